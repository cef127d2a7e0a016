"""The event loop of asyncio under the virtual clock, without a thread and without a descriptor.

An async actor's loop runs one round a turn (`step`). A loop that somebody runs to the end, by `asyncio.run` in a sync
actor or in the test, parks its thread while it has nothing to do.

Read next: `turns.py` for actors, `scheduler.py` for who runs.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Any

from monarch._net.loop import Timer
from monarch.testing.node import Node
from monarch.testing.scheduler import Call, Scheduler, Strand, Wait

_RESOLUTION_S = 1e-6


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop whose time is the universe's."""

    _ready: Any
    _scheduled: list[Any]
    _timer_cancelled_count: int

    def __init__(self, node: Node, strand: Strand | None = None) -> None:
        """Args:
        strand: rung when the loop has something to do; None: somebody runs it to the end.
        """
        super().__init__()
        self._selector = self
        self._clock_resolution = _RESOLUTION_S
        self._node = node
        self._strand = strand
        self._timer: Timer | None = None
        self._due_s = 0.0
        self._stepping = False
        self._rung = False
        self._wait: Wait | None = None

    def time(self) -> float:
        """Virtual seconds."""
        return self._node.scheduler.now_s

    def step(self) -> bool:
        """Run what is ready now; True: more has become ready."""
        self._stepping = True
        try:
            self.stop()
            self.run_forever()
        finally:
            self._stepping = False
        self._watch_clock()
        return bool(self._ready)

    def _watch_clock(self) -> None:
        """Be rung when the next timer of the loop is due."""
        scheduled = self._scheduled
        while scheduled and scheduled[0].cancelled():
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            self._timer_cancelled_count -= 1
        due_s = scheduled[0].when() if scheduled else None
        if self._timer is not None:
            if self._timer.pending and self._due_s == due_s:
                return
            self._timer.cancel()
            self._timer = None
        if due_s is not None:
            self._due_s = due_s
            self._timer = self._node.scheduler.call_later(due_s - self.time(), self._ring)

    def _ring(self) -> None:
        if self._strand is not None:
            self._strand.ring()

    # --- what asyncio's base class asks for ----------------------------------------------------------------------

    def select(self, timeout: float | None) -> list[Any]:
        """Let others run until the loop has something to do."""
        if self._stepping or self._rung or timeout == 0:
            self._rung = False
            return []
        scheduler = self._node.scheduler
        scheduler.check_may_wait()
        wait = self._wait = scheduler.new_wait(self._has_work)
        try:
            scheduler.park(wait, timeout)
        finally:
            self._wait, self._rung = None, False
        return []

    def _has_work(self) -> bool:
        return self._rung

    def _process_events(self, event_list: list[Any]) -> None:
        return

    def _write_to_self(self) -> None:
        self._rung = True
        if self._wait is not None:
            self._wait.ring()
        elif self._strand is not None:
            self._strand.ring()

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        """Run a function beside the loop; it may wait, and sees the virtual clock."""
        if executor is not None:
            return super().run_in_executor(executor, func, *args)
        result: asyncio.Future[Any] = self.create_future()

        def settle(value: Any, exc: BaseException | None) -> None:
            if not result.done():
                result.set_result(value) if exc is None else result.set_exception(exc)

        def run() -> None:
            value, error = None, None
            try:
                value = func(*args)
            except Exception as exc:
                error = exc
            if not self.is_closed():
                self.call_soon_threadsafe(settle, value, error)

        Call(self._node, run).ring()
        return result

    def abandon(self) -> None:
        """Its process has ended: what was pending never goes on, and says nothing about it."""
        if self.is_closed() or self.is_running():
            return
        self.set_exception_handler(lambda loop, context: None)
        for task in asyncio.all_tasks(self):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self.close()


class VirtualPolicy(asyncio.DefaultEventLoopPolicy):
    """Gives code of a universe virtual loops, so that `asyncio.run` works there; other threads get what they had."""

    def __init__(self, scheduler: Scheduler, before: asyncio.AbstractEventLoopPolicy, loops: list[VirtualLoop]) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._before = before
        self._loops = loops

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        """A virtual loop for the running process, if there is one."""
        node = self._scheduler.running_node()
        if node is None:
            return self._before.new_event_loop()
        loop = VirtualLoop(node)
        self._loops.append(loop)
        return loop

    def get_event_loop(self) -> asyncio.AbstractEventLoop:
        """The policy's before."""
        return self._before.get_event_loop()

    def set_event_loop(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Only outside of the universe: a virtual loop is current while it runs, no longer."""
        if not isinstance(loop, VirtualLoop):
            self._before.set_event_loop(loop)
