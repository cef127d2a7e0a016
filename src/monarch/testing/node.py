"""Nodes: the simulated processes of a universe, and the loop of each.

Read next: `network.py` for what connects them, `machine.py` for what starts and ends them.
"""

from __future__ import annotations

import sys
import traceback
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch._base.errors import InternalError
from monarch._net.loop import Timer
from monarch.testing.scheduler import Scheduler, Strand, Wait

if TYPE_CHECKING:
    from monarch.actor.process import Process
    from monarch.testing.links import WiredRouter


class Node:
    """One process: a client, a host agent or a proc."""

    __slots__ = (
        "_held",
        "busy_s",
        "bytes_received",
        "bytes_sent",
        "dead",
        "free_at_s",
        "frozen",
        "label",
        "loop",
        "machine",
        "mocks",
        "pid",
        "process",
        "received",
        "router",
        "scheduler",
        "sent",
        "uid",
    )

    def __init__(self, scheduler: Scheduler, label: str, uid: str, machine: str, pid: int) -> None:
        """Args:
        label: for people and the trace.
        machine: address of the agent of its host, running or not.
        """
        self.scheduler = scheduler
        self.label = label
        self.uid = uid
        self.machine = machine
        self.pid = pid
        self.process: Process | None = None
        """The actor layer's view; None for a host agent."""
        self.mocks: dict[type, type] = {}
        self.router: WiredRouter | None = None
        self.dead = False
        self.frozen = False
        self.free_at_s = 0.0
        """Until then it has to do, where `Costs` says that what it does takes time."""
        self.busy_s = 0.0
        """For how long it has been busy in all."""
        self.sent = self.received = self.bytes_sent = self.bytes_received = 0
        self._held: list[Strand | Wait] = []
        self.loop = ProcessLoop(self)

    def offer(self, item: Strand | Wait) -> None:
        """Queue what has work, unless this process is dead or stands still."""
        if self.dead:
            return
        if self.frozen:
            self._held.append(item)
        else:
            self.scheduler.add(item)

    def spend(self, seconds: float) -> None:
        """Be busy for so much longer."""
        self.free_at_s = max(self.free_at_s, self.scheduler.now_s) + seconds
        self.busy_s += seconds

    def freeze(self) -> None:
        """Stand still (SIGSTOP)."""
        if not self.frozen and not self.dead:
            self.frozen = True
            self._held = self.scheduler.withdraw(self)

    def thaw(self) -> None:
        """Go on (SIGCONT)."""
        if self.frozen and not self.dead:
            self.frozen = False
            held, self._held = self._held, []
            for item in held:
                self.scheduler.add(item)

    def end(self) -> None:
        """The process is gone; its connections are closed behind what it had sent."""
        if self.dead:
            return
        self.dead = True
        self._held = []
        self.scheduler.withdraw(self)
        if self.router is not None:
            self.router.hang_up()

    def __repr__(self) -> str:
        return f"<{self.label}>"


class ProcessLoop(Strand):
    """What `NetLoop` is for a real process: callbacks in order, timers of the virtual clock."""

    __slots__ = ("_queue",)

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._queue: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()

    def turn(self) -> bool:
        """Run the next callback."""
        callback, args = self._queue.popleft()
        self.node.scheduler.call(callback, *args)
        return bool(self._queue)

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> None:
        """Run `callback(*args)` after those already queued."""
        self._queue.append((callback, args))
        self.ring()

    def call_later(self, delay_s: float, callback: Callable[[], Any]) -> Timer:
        """Run `callback()` after `delay_s` virtual seconds."""
        return self.node.scheduler.call_later(delay_s, callback, self.call_soon)

    def now_s(self) -> float:
        """Virtual seconds since the beginning."""
        return self.node.scheduler.now_s

    def drive(self, is_done: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Let others run until `is_done()`."""
        return self.node.scheduler.drive(is_done, timeout_s)

    def kick(self) -> None:
        """Not needed: who waits for a future is told."""

    def leave_seat(self) -> None:
        """Not needed: nobody drives."""

    def start(self) -> None:
        """Not needed: there is no thread."""

    def run(self) -> None:
        """Not needed: there is no thread."""

    def stop(self) -> None:
        """The process has ended."""
        self._queue.clear()
        self.node.end()

    def join(self, timeout_s: float) -> None:
        """Not needed: there is no thread."""

    def watch(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        """There are no descriptors."""
        raise InternalError("a simulated process has no descriptors")

    def unwatch(self, fd: int) -> None:
        """There are no descriptors."""

    def report(self) -> None:
        """Tell of the exception that is being handled: a defect of monarch."""
        exc = sys.exc_info()[1]
        if exc is not None:
            self.node.scheduler.defects.append(exc)
        traceback.print_exc()
