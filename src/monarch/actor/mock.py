"""Actor mocks: while a patch is open, spawning one class makes actors of another.

Rules of this file:
    1. The registry is one dict for the process; whoever starts a proc hands its state on, whoever spawns asks `get_actor_class`.
    2. Patches close in the reverse order of opening. Closing restores what was registered before, on every way out.

Read next: `proc_mesh.py`, which asks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

M = TypeVar("M")
F = TypeVar("F", bound=Callable[..., Any])

_actor_registry: dict[type, type] = {}


def swap_registry(registry: dict[type, type]) -> dict[type, type]:
    """Use another dict as this process's registry; the one before. A universe gives each of its processes one."""
    global _actor_registry
    before, _actor_registry = _actor_registry, registry
    return before


def get_actor_class(cls: type) -> type:
    """The class to construct when `cls` is spawned: its mock, or `cls` itself."""
    return _actor_registry.get(cls, cls)


def get_actor_mock_registry_state() -> dict[type, type]:
    """A copy of the registry, original class -> mock, to be handed to a new proc."""
    return dict(_actor_registry)


def set_actor_mock_registry_state(state: dict[type, type]) -> None:
    """Replace the registry's content."""
    replacement = dict(state)
    _actor_registry.clear()
    _actor_registry.update(replacement)


class patch_actor(Generic[M]):
    """Let `mock` be constructed whenever this process, or a proc started meanwhile, spawns `original`.

    Use it as `with` or `async with` block, which yields the mock, or as decorator of a sync or async function. One patch may
    be used many times, also nested.

    Raises:
        TypeError: `original` or `mock` is not a class.
    """

    def __init__(self, original: type, mock: type[M]) -> None:
        for role, given in (("original", original), ("mock", mock)):
            if not isinstance(given, type):
                raise TypeError(f"patch_actor() needs a class as {role}, got {given!r}")
        self._original = original
        self._mock = mock
        self._before: list[type | None] = []

    def __enter__(self) -> type[M]:
        self._before.append(_actor_registry.get(self._original))
        _actor_registry[self._original] = self._mock
        return self._mock

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        before = self._before.pop()
        if before is None:
            _actor_registry.pop(self._original, None)
        else:
            _actor_registry[self._original] = before

    async def __aenter__(self) -> type[M]:
        return self.__enter__()

    async def __aexit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        self.__exit__(exc_type, exc, traceback)

    def __call__(self, function: F) -> F:
        if isinstance(function, type) or not callable(function):
            raise TypeError(f"patch_actor() decorates a function, got {function!r}; open a with block instead")
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def run_async(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return await function(*args, **kwargs)

            return cast("F", run_async)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return cast("F", run)
