"""Spans: named stretches of work, handed to OpenTelemetry when the program uses it.

Rules of this file:
    1. OpenTelemetry is never imported here. A program that has not imported it has no tracer that could listen.
    2. Without it a span costs a function call and a look-up, so library code may use spans freely.

Read next: `meters.py`, which counts.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar, cast, overload

P = ParamSpec("P")
R = TypeVar("R")


class _Unheard:
    """The span that nobody listens to. One instance serves all, nested ones too."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc_info: object) -> None:
        return None


_UNHEARD = _Unheard()
_modules = sys.modules


def span(name: str) -> AbstractContextManager[object]:
    """A context manager around a stretch of work; nested spans follow the context variables of thread and task.

    What `as` binds belongs to the tracer in use; without one it is None. An exception passes through.
    """
    api = _modules.get("opentelemetry.trace")
    if api is None:
        return _UNHEARD
    return cast("AbstractContextManager[object]", _tracer(api).start_as_current_span(name))


@functools.cache
def _tracer(api: Any) -> Any:
    # Before the program sets a provider this is a proxy, which finds the provider later.
    return api.get_tracer("monarch")


@overload
def traced(fn: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def traced(fn: None = None, /, *, name: str | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def traced(fn: Callable[..., Any] | None = None, /, *, name: str | None = None) -> Callable[..., Any]:
    """Decorator, bare or called: every call of the function, sync or async, runs in a span.

    Args:
        name: of the span; the function's `__name__` when left out.
    """
    if fn is None:
        return functools.partial(_in_span, name)
    if not callable(fn):
        raise TypeError(f"traced() decorates a function, got {fn!r}; give a span's name as traced(name={fn!r})")
    return _in_span(name, fn)


def _in_span(name: str | None, fn: Callable[..., Any]) -> Callable[..., Any]:
    title = name or fn.__name__
    if inspect.iscoroutinefunction(fn):

        @functools.wraps(fn)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            with span(title):
                return await fn(*args, **kwargs)

        return run_async

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        with span(title):
            return fn(*args, **kwargs)

    return run
