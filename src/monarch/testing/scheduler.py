"""The scheduler: who runs next, and what time it is.

In a universe exactly one thing runs at a time. What can run is a *strand*: the network side of a process, an actor, a
function in a worker thread. The scheduler draws the next one from those that have work, by the seed; when none has, the
clock jumps to the next timer.

User code may block (`Future.get()` inside an actor), so a turn that waits must keep its stack. Turns run on *carriers*:
threads of which one holds the baton. Who waits parks its carrier and passes the baton to another; an actor that does
not wait costs no thread.

Rules of this file:
    1. Only the thread with the baton touches anything of a universe. Others may `ring`, and nothing else.
    2. A strand has one turn at a time; what rings it meanwhile makes it run again.
    3. The test's thread gets the baton when its wait is over, or with an error when nothing is left that could end it.

Read next: `node.py` for processes, `turns.py` for actors, `virtual_loop.py` for asyncio.
"""

from __future__ import annotations

import _thread
import contextlib
import heapq
import random
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any

from monarch._base.errors import explain
from monarch._net.loop import Timer
from monarch._runtime.future import Future

if TYPE_CHECKING:
    from monarch.testing.node import Node

_END_S = 5.0
"""How long, in real seconds, code that waits inside an actor may take to return when the universe ends."""


class Ended(BaseException):
    """The process or the universe of this code has ended while it waited; unwinds its stack."""


class Strand:
    """Things that happen one after the other, in turns. Subclasses say what a turn is."""

    __slots__ = ("_again", "busy", "node", "queued")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.queued = False
        self.busy = False
        """In the middle of a turn, perhaps parked."""
        self._again = False

    def turn(self) -> bool:
        """Do the next thing; True: there is more to do at once."""
        raise NotImplementedError

    def ring(self) -> None:
        """There is something to do. Any thread."""
        scheduler = self.node.scheduler
        if scheduler.holder != _thread.get_ident():
            scheduler.ring_from_outside(self)
        elif self.busy:
            self._again = True
        elif not self.queued:
            self.queued = True
            self.node.offer(self)

    def take_turn(self) -> None:
        """Do the next thing, and be queued again if there is more. The scheduler only."""
        self.busy, self._again = True, False
        more = False
        try:
            more = self.turn()
        finally:
            self.busy = False
        if more or self._again:
            self.ring()


class Call(Strand):
    """A function that runs once, and may wait (a hook, a function in a worker thread)."""

    __slots__ = ("_function",)

    def __init__(self, node: Node, function: Callable[[], Any]) -> None:
        super().__init__(node)
        self._function = function

    def turn(self) -> bool:
        """Run it."""
        self._function()
        return False


class Wait:
    """Somebody who waits, with a stack: the test, or user code inside an actor."""

    __slots__ = ("error", "gate", "is_done", "is_main", "is_over", "limit_at_s", "node", "queued", "strand")

    def __init__(self, is_done: Callable[[], bool], node: Node, strand: Strand | None) -> None:
        self.is_done = is_done
        self.node = node
        self.strand = strand
        """Whose turn is parked; None: the test's."""
        self.is_main = strand is None
        self.gate = _thread.allocate_lock()
        self.gate.acquire()
        self.error: BaseException | None = None
        self.queued = False
        self.is_over = False
        self.limit_at_s = float("inf")

    def ring(self) -> None:
        """The wait is over."""
        if not self.queued and not self.is_over:
            self.queued = True
            self.node.offer(self)


class Scheduler:
    """The clock, the timers and the baton of a universe. Thread: the one with the baton, except `ring_from_outside`."""

    def __init__(self, seed: int, limit_s: float, switch: Callable[[Node], None], processor: float = 0.0) -> None:
        """Args:
        limit_s: virtual seconds after which a wait of the test without a time-out gives up.
        switch: told whose code runs from now on.
        processor: virtual seconds that a process is busy for each second of processor time that its code takes.
        """
        self.now_s = 0.0
        self.random = random.Random(seed)
        self.holder = _thread.get_ident()
        """The thread with the baton."""
        self.closed = False
        self.in_flight = 0
        """Messages on their way, and what machines are about to do."""
        self.explain_stall: Callable[[Wait, str], BaseException] = lambda wait, why: RuntimeError(why)
        self.defects: list[BaseException] = []
        """What callbacks of the runtime raised: defects of monarch."""
        self.node: Node | None = None
        self._limit_s = limit_s
        self._switch = switch
        self._ready: list[Strand | Wait] = []
        self._timers: list[tuple[float, int, Timer, Callable[[Callable[[], None]], None]]] = []
        self._ids = count()
        self._outside: deque[Strand] = deque()
        self._parked: dict[Wait, None] = {}
        self._polled: dict[Wait, None] = {}
        """Those of the parked whose end nobody announces."""
        self._quiet: list[tuple[Callable[[], bool], Wait]] = []
        """Those who wait until nothing else can run."""
        self._strand: Strand | None = None
        self._in_callback = False
        self._main_thread = self.holder
        self._recalled: Wait | None = None
        self._idle: list[Any] = []
        self._threads: list[threading.Thread] = []
        self._returned = threading.Semaphore(0)
        self._real_ids = count(1)
        self._processor = processor
        self._began_s: float | None = None
        """Since when, in processor time, code runs that has not been charged to its process; None: no such code runs."""
        self.uncharge()

    # --- what is to be done --------------------------------------------------------------------------------------

    def add(self, item: Strand | Wait) -> None:
        """Queue what has work. `Node.offer` only."""
        self._ready.append(item)

    def withdraw(self, node: Node) -> list[Strand | Wait]:
        """Take what a process has queued out again."""
        mine = [item for item in self._ready if item.node is node]
        if mine:
            self._ready = [item for item in self._ready if item.node is not node]
        return mine

    def ring_from_outside(self, strand: Strand) -> None:
        """`strand.ring()`, from a thread that the universe does not know."""
        self._outside.append(strand)

    def call_later(self, delay_s: float, callback: Callable[[], Any], post: Callable[[Callable[[], None]], None] | None = None) -> Timer:
        """Call `callback()`, which does not wait, after `delay_s` virtual seconds.

        Args:
            post: takes what is due, to run it; None: it runs at once, between two turns.
        """
        timer = Timer(callback)
        heapq.heappush(self._timers, (self.now_s + max(0.0, delay_s), next(self._ids), timer, post or self.call))
        return timer

    # --- waiting -------------------------------------------------------------------------------------------------

    def drive(self, is_done: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Let others run until `is_done()` or for `timeout_s` virtual seconds."""
        self.check_may_wait()
        if is_done():
            return True
        wait = self.new_wait(is_done)
        future = getattr(is_done, "__self__", None)
        if isinstance(future, Future):
            future._when_done(wait.ring)
        else:
            self._polled[wait] = None
        self.park(wait, timeout_s)
        return True

    def check_may_wait(self) -> None:
        """Raise when the running code may not wait."""
        if self.holder != _thread.get_ident():
            raise RuntimeError(
                explain(
                    "this thread does not belong to the universe, so nothing would ever end its wait",
                    next="let actors start threads by asyncio.to_thread(), and wait in the thread that opened the universe",
                )
            )
        if self._in_callback:
            raise RuntimeError("a finaliser may not wait for a reply: it can run in the middle of sending or receiving one")
        if self.closed or (self.node is not None and self.node.dead):
            raise Ended

    def running_node(self) -> Node | None:
        """Whose code runs on this thread; None when it has not the baton."""
        return self.node if self.holder == _thread.get_ident() and not self.closed else None

    def new_wait(self, is_done: Callable[[], bool]) -> Wait:
        """A wait of the running code."""
        assert self.node is not None
        return Wait(is_done, self.node, self._strand)

    def park(self, wait: Wait, timeout_s: float | None) -> None:
        """Let others run until `wait` is rung, or for `timeout_s`."""
        self.charge()
        strand, node, timer = self._strand, self.node, None
        if timeout_s is not None:
            timer = self.call_later(timeout_s, wait.ring)
        elif wait.is_main:
            wait.limit_at_s = self.now_s + self._limit_s
        self._parked[wait] = None
        self._pass_on()
        try:
            wait.gate.acquire()
        except BaseException:
            self._regain(wait)
            raise
        finally:
            self.holder = _thread.get_ident()
            self._parked.pop(wait, None)
            self._polled.pop(wait, None)
            if timer is not None:
                timer.cancel()
            self._strand, self.node = strand, node
        assert node is not None
        self._switch(node)
        self.uncharge()
        if wait.error is not None:
            raise wait.error

    def wait_quiet(self, is_done: Callable[[], bool]) -> None:
        """Let others run until none has work at this moment and `is_done()`."""
        self.check_may_wait()
        wait = self.new_wait(is_done)
        self._quiet.append((is_done, wait))
        try:
            self.park(wait, None)
        finally:
            self._quiet = [entry for entry in self._quiet if entry[1] is not wait]

    def sleep(self, seconds: float) -> None:
        """Let others run for so many virtual seconds."""
        self.check_may_wait()
        self.park(self.new_wait(_never), seconds)

    def advance(self, seconds: float) -> None:
        """Let everything happen that happens within so many virtual seconds, up to and with the last moment."""
        until_s = self.now_s + seconds
        self.call_later(seconds, _nothing)
        self.wait_quiet(lambda: self.now_s >= until_s)

    def _pass_on(self) -> None:
        if self._idle:
            self._idle.pop().release()
            return
        gate = _thread.allocate_lock()
        gate.acquire()
        thread = threading.Thread(target=self._carry, args=(gate,), name=f"universe-{next(self._real_ids)}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _regain(self, wait: Wait) -> None:
        # Ctrl-C, or a time limit of the test, broke the wait off: the baton is elsewhere.
        self._recalled = wait
        if not wait.gate.acquire(timeout=_END_S):
            self.closed = True  # an actor does not return; it stays behind with its thread
        self._recalled = None

    # --- carriers ------------------------------------------------------------------------------------------------

    def _carry(self, gate: Any) -> None:
        while True:
            self.holder = _thread.get_ident()
            self._in_callback = False
            wait = self._run_others()
            if wait is None:
                break
            wait.is_over = True
            self._idle.append(gate)
            wait.gate.release()
            gate.acquire()
            if self.closed:
                break
        self._returned.release()

    def _run_others(self) -> Wait | None:
        """Run strands until somebody who waits can go on; None: the universe has ended."""
        while not self.closed:
            item = self._next()
            if isinstance(item, Wait):
                return item
            self.enter(item)
            self.uncharge()
            try:
                item.take_turn()
            except Ended:
                continue
            except BaseException as exc:
                self.report(exc)
            finally:
                self.charge()
        return None

    def charge(self) -> bool:
        """The code that runs has kept its process busy since it began, or since `uncharge`; False: no such code runs."""
        began_s = self._began_s
        if began_s is None or self.node is None:
            return False
        self._began_s = None
        self.node.spend((time.thread_time() - began_s) * self._processor)
        return True

    def uncharge(self) -> None:
        """What runs from now on is code of a process; what ran before was not."""
        if self._processor:
            self._began_s = time.thread_time()

    def enter(self, strand: Strand) -> None:
        """From now on code of this strand runs."""
        self._strand = strand
        if strand.node is not self.node:
            self.node = strand.node
            self._switch(strand.node)

    def report(self, exc: BaseException) -> None:
        """A callback of the runtime raised: a defect of monarch, which the end of the universe tells of."""
        self.defects.append(exc)
        traceback.print_exception(exc, file=sys.stderr)

    def call(self, callback: Callable[..., Any], *args: Any) -> None:
        """Run a callback of the runtime, which may not wait."""
        self._in_callback = True
        try:
            callback(*args)
        except Exception as exc:
            self.report(exc)
        finally:
            self._in_callback = False

    def _next(self) -> Strand | Wait:
        while True:
            while self._outside:
                self._outside.popleft().ring()
            for wait in [wait for wait in self._polled if wait.is_done()] if self._polled else ():
                wait.ring()
            if self._recalled is not None:
                return self._recalled
            ready = self._ready
            if ready:
                index = int(self.random.random() * len(ready)) if len(ready) > 1 else 0
                item, last = ready[index], ready.pop()
                if item is not last:
                    ready[index] = last
                if item.node.free_at_s > self.now_s:
                    self._put_off(item)
                    continue
                item.queued = False
                return item
            for is_done, wait in self._quiet:
                if is_done():
                    return wait
            self._jump()

    def _put_off(self, item: Strand | Wait) -> None:
        """Its process is busy: offer it once more when that is over."""
        self.in_flight += 1

        def offer() -> None:
            self.in_flight -= 1
            item.node.offer(item)

        self.call_later(item.node.free_at_s - self.now_s, offer)

    def _jump(self) -> None:
        """Go to the time of the next timer; when there is none, the test hears of it."""
        timers = self._timers
        while timers and not timers[0][2].pending:
            heapq.heappop(timers)
        main = next((wait for wait in self._parked if wait.is_main), None)
        if not timers:
            self._give_up(main, "nothing is left to happen")
        elif main is not None and timers[0][0] > main.limit_at_s:
            self._give_up(main, f"{self._limit_s:g} virtual seconds do not end it")
        else:
            self.now_s = timers[0][0]
            while timers and timers[0][0] <= self.now_s:
                _, _, timer, post = heapq.heappop(timers)
                post(timer.fire)

    def _give_up(self, main: Wait | None, why: str) -> None:
        assert main is not None, "the baton is with a carrier, so the test waits"
        main.error = self.explain_stall(main, why)
        main.ring()

    @property
    def parked(self) -> list[Wait]:
        """Who waits with a stack."""
        return list(self._parked)

    # --- the end -------------------------------------------------------------------------------------------------

    def close(self) -> list[str]:
        """End every thread; the names of those that did not. The test's thread, with the baton."""
        was_stuck = self.closed
        self.closed = True
        for wait in list(self._parked):
            wait.error = Ended()
            wait.is_over = True
            wait.gate.release()
            if was_stuck or not self._returned.acquire(timeout=_END_S):
                break
        self.holder = _thread.get_ident()
        for gate in self._idle:
            with contextlib.suppress(RuntimeError):
                gate.release()
        for thread in self._threads:
            thread.join(_END_S if not was_stuck else 0.1)
        return [thread.name for thread in self._threads if thread.is_alive()]


def _never() -> bool:
    return False


def _nothing() -> None:
    return
