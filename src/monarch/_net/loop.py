"""The net loop: waits on sockets and timers and calls back.

Why not asyncio: this loop carries every message of a process. A selector loop of this size costs 5 us less a message
and 30 ms less at import than asyncio's, and nothing here ever awaits.

The loop has a thread of its own, so something always answers the network. Besides, one other thread at a time, one that
would sleep anyway (a caller in `Future.get`, an idle actor), may *drive* it: it waits in the same poll and handles what
comes. The kernel wakes whoever began to wait last, so a message is handled on the very thread that wants it, without a
switch between threads: two switches less for each call and its reply. While that thread is busy, the loop's own takes
over; nobody hands anything over.

Rules of this file:
    1. Callbacks run under the loop's lock, one at a time, on one of these two threads. They never block and never run
       user code. "The net loop" in other files means: inside such a callback.
    2. `call_soon` takes no lock, so it may be called from any thread, from finalisers and from inside itself.
    3. A callback that raises is reported on stderr and does not end the loop.
    4. Descriptors are edge-triggered: a handler reads until there is nothing more, or asks to be called again.

Read next: `stream.py`, whose links live on this loop.
"""

from __future__ import annotations

import heapq
import os
import select
import signal
import sys
import threading
import time
import traceback
from _signal import getsignal, pthread_sigmask  # type: ignore[import-not-found] # the wrappers in signal make enums, at 4 us a call
from _signal import signal as set_handler
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

READ = getattr(select, "EPOLLIN", 1)
WRITE = getattr(select, "EPOLLOUT", 4)
_EDGE = getattr(select, "EPOLLET", 0)
_INTERRUPT = signal.SIGINT.value
_SPIN_S = 200e-6
"""How long a driver looks before it sleeps. Being woken costs 35-80 us where the processor has gone idle."""
_SPIN_WORTH_S = 400e-6
_STANDBY_S = 1e-3
"""How long the network may be unattended between two such waits."""
_SPIN_PAUSE = 32
"""For how many waits a driver that looked in vain does not try again."""
_MAY_SPIN = (os.cpu_count() or 1) > 1
_MAIN_THREAD = threading.main_thread().ident
BROKEN = getattr(select, "EPOLLHUP", 16) | getattr(select, "EPOLLERR", 8)


class _Turn(threading.local):
    """What this thread is in the middle of."""

    wake_ups: Any = None
    sending = False
    """A frame is on its way into a link: whatever waits for a reply now waits for ever."""

    @property
    def may_wait(self) -> bool:
        """False for finalisers that run in the middle of a send, or of what the net loop does: nothing comes meanwhile."""
        return not self.sending and self.wake_ups is None


this_turn = _Turn()


def wake(wake_up: Callable[[], Any]) -> None:
    """Run `wake_up`, which lets another thread go on; on a net thread, at the end of the loop's turn.

    A thread that is woken while this one still holds the interpreter lock only wakes up to wait again.
    """
    pending = this_turn.wake_ups
    if pending is None:
        wake_up()
    else:
        pending.append(wake_up)


class Timer:
    """A pending `call_later`; `cancel()` from any thread."""

    __slots__ = ("_callback",)

    def __init__(self, callback: Callable[[], Any]) -> None:
        self._callback: Callable[[], Any] | None = callback

    def cancel(self) -> None:
        """Forget the callback; harmless when it has run."""
        self._callback = None

    @property
    def pending(self) -> bool:
        """It has neither run nor been cancelled."""
        return self._callback is not None

    def fire(self) -> None:
        """Run the callback unless cancelled. Loop thread only."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


class _Shield:
    """Holds Ctrl-C back while the main thread handles the network: a KeyboardInterrupt there would leave half a step behind.

    To block the signal is not enough: the kernel then gives it to any thread that has not blocked it, and Python runs the
    handler on the main thread all the same. Thread: main.
    """

    __slots__ = ("_handler", "_pending", "closed")

    def __init__(self) -> None:
        self.closed = False
        """Whether Ctrl-C is held back. A plain attribute: no handler runs between a call and the store behind it."""
        self._pending = False
        self._handler: Any = None

    def put_up(self) -> None:
        """Stand in for the process's handler of Ctrl-C, if it has one."""
        handler = getsignal(_INTERRUPT)
        if callable(handler) and handler != self._on_signal:
            self._handler = handler
            set_handler(_INTERRUPT, self._on_signal)

    def take_down(self) -> None:
        """Give the handler its place back, and what was held back."""
        if self._handler is not None and getsignal(_INTERRUPT) == self._on_signal:
            set_handler(_INTERRUPT, self._handler)
        self.let_through()

    def let_through(self) -> None:
        """Handle what was held back."""
        if self._pending:
            self._pending = False
            self._handler(_INTERRUPT, None)

    def _on_signal(self, signum: int, frame: Any) -> None:
        if self.closed:
            self._pending = True
        else:
            self._handler(signum, frame)


class NetLoop:
    """Waits on sockets and timers. Thread: inside callbacks, except `call_soon`, `call_later`, `stop`, `drive`, `kick` (any)."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._poller = _poller()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._soon: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._timer_ids = count()
        self._wakes_at_s: float | None = None
        """When the loop's own thread wakes by itself; None: not before something happens."""
        self._lock = threading.Lock()
        self._processing = 0
        """Thread that runs callbacks now; 0 when none does."""
        self._stopping = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._thread: threading.Thread | None = None
        self._seat = threading.Lock()
        """Held by the one other thread that drives."""
        self._driver = 0
        self._kicked = False
        self._leave = False
        self._shield = _Shield()
        self._polls_in_main = False
        """The main thread drives and polls; what runs there now is a handler of signals."""
        self._num_polls = 0
        """Of drivers; not all drives get as far."""
        self._num_drives = 0
        self._no_spin_until = 0 if _MAY_SPIN else 1 << 62
        self._spins = False
        """The last wait was short, so the next begins with looking instead of sleeping."""
        self.watch(self._wake_read, READ, self._drain_wakeups)

    def start(self) -> None:
        """Run the loop on a daemon thread of its own."""
        self._thread = threading.Thread(target=self.run, name=self._name, daemon=True)
        self._thread.start()

    # --- any thread ----------------------------------------------------------------------------------------------

    def now_s(self) -> float:
        """The loop's clock, in seconds."""
        return time.monotonic()

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> None:
        """Run `callback(*args)` on the loop, after those already queued."""
        self._soon.append((callback, args))
        if not self._processing:
            self._wake()

    def call_later(self, delay_s: float, callback: Callable[[], Any]) -> Timer:
        """Run `callback()` on the loop after `delay_s` seconds."""
        timer = Timer(callback)
        self.call_soon(self._add_timer, time.monotonic() + delay_s, timer)
        return timer

    def stop(self) -> None:
        """End `run` after the callbacks queued so far."""
        self.call_soon(self._set_stopping)

    def join(self, timeout_s: float) -> None:
        """Wait for the loop's thread to end; no-op on that thread itself."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def drive(self, is_done: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Handle the network on this thread until `is_done()`; whoever makes it true from elsewhere calls `kick`.

        Returns:
            False when another thread drives, when this one is wanted elsewhere (`leave_seat`) or when the loop has
            ended: wait in some other way.
        """
        ident = threading.get_ident()
        if self._processing == ident or this_turn.sending:
            raise RuntimeError("a finaliser may not wait for a reply: it can run in the middle of sending or receiving one")
        if self._stopping or self._driver == ident:  # the latter: in a handler of signals
            return False
        if ident != _MAIN_THREAD:
            return self._drive(ident, is_done, timeout_s, self._turn)
        shield = self._shield
        shield.put_up()
        try:
            shield.closed = True
            return self._drive(ident, is_done, timeout_s, self._interruptible_turn)
        finally:
            shield.closed = False
            shield.take_down()

    def _drive(self, ident: int, is_done: Callable[[], bool], timeout_s: float | None, turn: Callable[[float | None], None]) -> bool:
        if not self._seat.acquire(False):
            return False
        began_s = time.monotonic()
        deadline_s = None if timeout_s is None else began_s + timeout_s
        spin_until_s = began_s + _SPIN_S if self._spins else 0.0
        self._leave = False
        self._driver = ident
        wake_ups: list[Callable[[], Any]] = []
        outer, this_turn.wake_ups = this_turn.wake_ups, wake_ups
        try:
            while not is_done():
                if wake_ups:
                    self._wake_others(wake_ups)  # futures that depend on one another may make it done
                    continue
                if self._leave or self._stopping:
                    return False
                if deadline_s is not None:
                    timeout_s = deadline_s - time.monotonic()
                    if timeout_s <= 0:
                        return True
                self._num_polls += 1
                if spin_until_s and time.monotonic() < spin_until_s:
                    turn(0)
                    # The kernel likes to put who was just woken behind the waker, on the same processor.
                    os.sched_yield()
                else:
                    if spin_until_s:
                        spin_until_s = 0.0
                        self._no_spin_until = self._num_drives + _SPIN_PAUSE
                    turn(self._until_timer(timeout_s) if self._timers else timeout_s)
            return True
        finally:
            self._num_drives += 1
            self._spins = self._num_drives > self._no_spin_until and time.monotonic() - began_s < _SPIN_WORTH_S
            self._driver = 0
            self._seat.release()
            self._wake_others(wake_ups)
            this_turn.wake_ups = outer
            if self._unseen_due_s() is not None:
                self._wake()

    def kick(self) -> None:
        """Make the driving thread, if there is one, look at its `is_done` again."""
        driver = self._driver
        if driver and (driver != threading.get_ident() or self._polls_in_main):
            self._kicked = True
            self._wake()

    def leave_seat(self) -> None:
        """This thread, if it drives, shall stop: what it handled was for another thread, which may drive next."""
        if self._driver == threading.get_ident():
            self._leave = True

    # --- on the loop ---------------------------------------------------------------------------------------------

    def watch(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        """Call `handler(events)` whenever `fd` becomes ready."""
        known = fd in self._handlers
        self._handlers[fd] = handler
        if known:
            self._poller.modify(fd, events | _EDGE)
        else:
            self._poller.register(fd, events | _EDGE)

    def unwatch(self, fd: int) -> None:
        """Stop watching `fd`; harmless when it is not watched. Before the fd is closed."""
        if self._handlers.pop(fd, None) is not None:
            self._poller.unregister(fd)

    def run(self) -> None:
        """Serve until `stop`, then release the loop's descriptors."""
        if self._thread is None:
            self._thread = threading.current_thread()
        if threading.current_thread() is not threading.main_thread():
            pthread_sigmask(signal.SIG_BLOCK, {_INTERRUPT})  # Ctrl-C is for the main thread
        wake_ups: list[Callable[[], Any]] = []
        this_turn.wake_ups = wake_ups
        seen = -1
        while not self._stopping:
            self._wake_others(wake_ups)
            if self._spins and self._num_polls != seen:
                # Another thread waits for one message after the other and looks instead of sleeping: in the poll this
                # thread would only be woken in its stead.
                seen = self._num_polls
                time.sleep(_STANDBY_S)
                continue
            timeout_s = None
            if self._timers:
                self._wakes_at_s = self._timers[0][0]
                timeout_s = max(0.0, self._wakes_at_s - time.monotonic())
            else:
                self._wakes_at_s = None
            self._turn(0 if self._soon else timeout_s)
            if self._kicked and self._driver:
                self._wake()  # it woke this thread; now only the driver waits
        self._wake_others(wake_ups)
        this_turn.wake_ups = None
        self._close()

    def _turn(self, timeout_s: float | None) -> None:
        events = self._poller.poll(timeout_s)
        if self._kicked and self._driver == threading.get_ident():
            self._kicked = False
        if events or self._soon or self._timers:
            self._process(events)

    def _interruptible_turn(self, timeout_s: float | None) -> None:
        """`_turn` on the main thread, where a KeyboardInterrupt ends the poll."""
        ready: list[list[tuple[int, int]]] = []
        shield = self._shield
        wake_ups, this_turn.wake_ups = this_turn.wake_ups, None  # a handler of signals wakes others at once
        try:
            self._polls_in_main = True
            shield.closed = False
            shield.let_through()
            # One call from the interpreter's view: an interrupt between the return of `poll` and the assignment would
            # lose events, and edges do not come twice.
            ready.extend(map(self._poller.poll, (timeout_s,)))
        finally:
            shield.closed = True
            self._polls_in_main = self._kicked = False
            this_turn.wake_ups = wake_ups
            events = ready[0] if ready else []
            if events or self._soon or self._timers:
                self._process(events)

    def _process(self, events: Sequence[tuple[int, int]]) -> None:
        soon = self._soon
        with self._lock:
            self._processing = threading.get_ident()
            try:
                for fd, mask in events:
                    handler = self._handlers.get(fd)
                    if handler is not None:
                        try:
                            handler(mask)
                        except Exception:
                            self.report()
                if self._timers and self._timers[0][0] <= time.monotonic():
                    self._fire_timers()
                if soon:
                    for _ in range(len(soon)):
                        callback, args = soon.popleft()
                        self._guard(callback, *args)
            finally:
                self._processing = 0  # else nobody would wake the loop any more
        if soon:
            self._wake()

    def _close(self) -> None:
        if self._seat.acquire(timeout=1):
            self._seat.release()
        self._poller.close()
        os.close(self._wake_read)
        # Who calls late must not write to whatever gets the number next.
        wake_write, self._wake_write = self._wake_write, -1
        os.close(wake_write)

    def _guard(self, callback: Callable[..., Any], *args: Any) -> None:
        try:
            callback(*args)
        except Exception:
            self.report()

    def report(self) -> None:
        """Tell of the exception that is being handled: a defect of monarch that must not end the loop."""
        print(f"monarch: internal error on {self._name}; please report it", file=sys.stderr)
        traceback.print_exc()

    def _add_timer(self, due_s: float, timer: Timer) -> None:
        heapq.heappush(self._timers, (due_s, next(self._timer_ids), timer))

    def _unseen_due_s(self) -> float | None:
        """When the next timer is due, if the loop's own thread sleeps beyond that, because a driver has added it."""
        timers, wakes_at_s = self._timers, self._wakes_at_s
        if timers and (wakes_at_s is None or timers[0][0] < wakes_at_s):
            return timers[0][0]
        return None

    def _until_timer(self, timeout_s: float | None) -> float | None:
        """How long a driver may sleep that would sleep for `timeout_s`."""
        due_s = self._unseen_due_s()
        if due_s is None:
            return timeout_s
        # Waking the loop's own thread instead is no way: as long as this one polls, it may be the one that is woken.
        left_s = max(0.0, due_s - time.monotonic())
        return left_s if timeout_s is None else min(left_s, timeout_s)

    def _wake_others(self, wake_ups: list[Callable[[], Any]]) -> None:
        for wake_up in wake_ups:  # one may append another
            self._guard(wake_up)
        wake_ups.clear()

    def _fire_timers(self) -> None:
        now_s = time.monotonic()
        while self._timers and self._timers[0][0] <= now_s:
            self._guard(heapq.heappop(self._timers)[2].fire)

    def _set_stopping(self) -> None:
        self._stopping = True
        self._kicked = bool(self._driver)
        self._wake()

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"\0")
        except (BlockingIOError, OSError):
            return  # full: a wake-up is pending; closed: the loop has ended

    def _drain_wakeups(self, _mask: int) -> None:
        try:
            while len(os.read(self._wake_read, 4096)) == 4096:
                continue
        except BlockingIOError:
            return


class _SelectPoller:
    """`select.epoll`'s interface for systems without it."""

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}

    def register(self, fd: int, events: int) -> None:
        self._masks[fd] = events

    modify = register

    def unregister(self, fd: int) -> None:
        del self._masks[fd]

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        waiter = select.poll()
        for fd, mask in self._masks.items():
            waiter.register(fd, mask)
        return waiter.poll(None if timeout is None else timeout * 1000)

    def close(self) -> None:
        self._masks.clear()


def _poller() -> Any:
    return select.epoll() if hasattr(select, "epoll") else _SelectPoller()
