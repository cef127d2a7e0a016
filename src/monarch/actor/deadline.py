"""Deadlines: a view of an actor mesh whose calls fail when they take too long.

Rules of this file:
    1. Calls through any other mesh pay nothing for this: a mesh with a deadline is of a class of its own. It is made by a
       function, as a method would take its name away from the endpoints of users.
    2. Calls end in the order in which they began, as all calls of one view have the same time; so a queue and one timer do.
    3. A call that has failed is over: its port is closed, and what still comes for it is dropped.

Read next: `_runtime/lateness.py` for the text of the error.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, ParamSpec, TypeVar, cast

from monarch._base.errors import explain
from monarch._mesh.shape import Shape
from monarch._runtime.future import check_timeout
from monarch._runtime.proc import Proc
from monarch.actor.actor_mesh import ActorMesh, ActorMeshCore
from monarch.actor.endpoint import Endpoint
from monarch.actor.process import Process

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M")
_PATIENCE_S = 0.25


def with_timeout(mesh: M, timeout: float | None) -> M:
    """The same actors, seen through a view whose calls fail with TimeoutError after `timeout` seconds, also when awaited.

    The error says which ranks have answered and what the others are doing. The actors are not disturbed; what they
    still answer is dropped. Slices of the view, and the view sent to another actor, keep the time.

    Args:
        timeout: seconds from each call; None: the view without a deadline.

    Raises:
        TypeError: not an actor mesh, or `timeout` is no number.
        ValueError: `timeout` is not positive and finite.
    """
    if not isinstance(mesh, ActorMesh):
        hint = "give it what spawn() returned, or a slice of that"
        raise TypeError(explain(f"with_timeout needs an actor mesh, got {mesh!r}", next=hint))
    if timeout is None:
        return cast(M, ActorMesh(mesh._core, mesh._shape))
    check_timeout(timeout, zero=False)
    return cast(M, TimedMesh(mesh._core, mesh._shape, Deadlines(timeout)))


class Deadlines:
    """The calls of one view, and the moment when each is too late. Thread: any."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._calls: deque[tuple[float, Proc, int]] = deque()
        """When on the loop's clock, whose, and at which port the answer is awaited; an open port means that the call is not over."""
        self._ticking: Proc | None = None
        """On whose loop the timer is; another one after the client was shut down and began anew."""

    def add(self, proc: Proc, port: int) -> None:
        """A call begins."""
        due_s = proc.loop.now_s() + self.timeout_s
        with self._lock:
            while self._calls and _is_over(self._calls[0]):
                self._calls.popleft()
            self._calls.append((due_s, proc, port))
            if self._ticking is proc:
                return
            self._ticking = proc
        proc.loop.call_later(self.timeout_s, lambda: self._tick(proc))

    def _tick(self, proc: Proc) -> None:
        late = []
        now_s = proc.loop.now_s()
        with self._lock:
            calls = self._calls
            while calls and (calls[0][0] <= now_s or _is_over(calls[0])):
                late.append(calls.popleft())
            self._ticking = proc if calls else None
            next_s = calls[0][0] - now_s if calls else 0.0
        if calls:
            proc.loop.call_later(next_s, lambda: self._tick(proc))
        for _, owner, port in late:
            self._expire(owner, port)

    def _expire(self, proc: Proc, port: int) -> None:
        from monarch._runtime.lateness import Question

        call = proc.ports.call_at(port)
        if call is None or call.target is None:
            return
        target = call.target
        question = Question(proc, target, call.missing())

        def fail() -> None:
            if proc.ports.call_at(port) is not None:
                text = f"no outcome of {target.endpoint} within {self.timeout_s:g} s (with_timeout); what still comes is dropped"
                proc.ports.fail(port, TimeoutError(f"{text}\n{question.story(call)}"))

        question.when_answered(lambda: proc.loop.call_soon(fail))
        proc.loop.call_later(_PATIENCE_S, fail)


def _is_over(entry: tuple[float, Proc, int]) -> bool:
    _, proc, port = entry
    return proc.ports.call_at(port) is None


class TimedEndpoint(Endpoint[P, R]):
    """An endpoint seen through a view with a deadline."""

    __slots__ = ()

    def _send(self, process: Process, args: Any, kwargs: Any, port: int, ranks: Sequence[int], **options: Any) -> None:
        super()._send(process, args, kwargs, port, ranks, **options)
        if port and options.get("to") is None:
            mesh: Any = self._mesh
            mesh._deadlines.add(process.proc, port)


class TimedMesh(ActorMesh[Any]):
    """An actor mesh seen through a view with a deadline."""

    _endpoint_class = TimedEndpoint

    def __init__(self, core: ActorMeshCore, shape: Shape, deadlines: Deadlines) -> None:
        super().__init__(core, shape)
        self._deadlines = deadlines

    def _new_with_shape(self, shape: Shape) -> TimedMesh:
        return self if shape == self._shape else TimedMesh(self._core, shape, self._deadlines)

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, arguments = super().__reduce__()
        return _rebuild, (rebuild, arguments, self._deadlines.timeout_s)

    def __repr__(self) -> str:
        return f"{super().__repr__()} with_timeout {self._deadlines.timeout_s:g}"


def _rebuild(rebuild: Any, arguments: tuple[Any, ...], timeout_s: float) -> Any:
    return with_timeout(rebuild(*arguments), timeout_s)
