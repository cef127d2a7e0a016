"""Futures: the outcome of something that was already started.

A future is completed once, from any thread, and observed any number of times, from any thread and any event loop. What
the net thread stores is raw; the first observer decodes it, on its own thread.

Rules of this file:
    1. Completing takes no lock: `_done` is set after the outcome and before the waiters are called, and a waiter
       checks `_done` again after it has put itself in the list. So neither side can miss the other.
    2. A failure is the same exception object every time.
    3. Nothing here imports asyncio unless a loop is running already.

Read next: `mailbox.py`, which completes most of them.
"""

from __future__ import annotations

import _thread
import contextlib
import logging
import math
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from monarch._base.errors import explain
from monarch._net.loop import wake
from monarch._runtime.unread import Unread

if TYPE_CHECKING:
    import asyncio

    from monarch._runtime.platform import Loop

R = TypeVar("R")
S = TypeVar("S")

_logger = logging.getLogger("monarch.future")
_MAX_TIMEOUT_S = threading.TIMEOUT_MAX


_net_loop: Loop | None = None
"""The loop that waiting threads of this process may drive."""


Story = Callable[["Future[Any]", float], str]
_story: Story | None = None
"""What people want to know of a future that is late, given how long it may take to find out."""
_STORY_S = 0.25
_whys: weakref.WeakKeyDictionary[Future[Any], Callable[[], str]] = weakref.WeakKeyDictionary()


def explain_lateness_by(story: Story | None) -> Story | None:
    """Let time-outs of this process say what the future waits for; what said it before."""
    global _story
    before, _story = _story, story
    return before


def tell_when_late(future: Future[Any], why: Callable[[], str]) -> None:
    """Let time-outs of a future that is no call's say what it waits for, as lines; `why` must not wait, or refer to `future`."""
    _whys[future] = why


def drive_while_waiting(loop: Loop | None) -> Loop | None:
    """Let threads that block in `Future.get` handle the network of `loop` meanwhile; the loop before."""
    global _net_loop
    before, _net_loop = _net_loop, loop
    return before


class Future(Unread, Generic[R]):
    """The outcome of an operation that is already under way. Thread: any.

    Dropping a future, or timing out on it, neither cancels the operation nor hurts whoever runs it.
    """

    __slots__ = ("__weakref__", "_decode", "_decoding", "_done", "_driven_by", "_error", "_taken", "_traceback", "_value", "_waiters")

    _done: bool
    _value: Any
    _error: BaseException | None
    _traceback: TracebackType | None
    _decode: Callable[[Any], R] | None
    _taken: bool
    _driven_by: Loop | None
    _waiters: list[Callable[[], Any]]

    def __init__(self) -> None:
        raise TypeError("Future objects are returned by Monarch operations, not made; for a coroutine use monarch.actor.returns_future")

    @classmethod
    def _new(cls) -> Future[R]:
        future = cls.__new__(cls)
        future._done = False
        future._value = None
        future._error = None
        future._traceback = None
        future._decode = None
        future._taken = False
        future._driven_by = None
        future._waiters = []
        return future

    @classmethod
    def _completed(cls, value: R) -> Future[R]:
        future = cls._new()
        future._complete(value)
        return future

    @classmethod
    def _failed(cls, error: BaseException) -> Future[R]:
        future = cls._new()
        future._fail(error)
        return future

    @classmethod
    def _from_coro(cls, coro: Coroutine[Any, Any, R]) -> Future[R]:
        """Run a coroutine on the process's background loop, from now on."""
        from monarch._runtime.background import run_coroutine

        future = cls._new()
        run_coroutine(coro, future)
        return future

    # --- completing (any thread, once) ---------------------------------------------------------------------------

    def _complete(self, value: Any, decode: Callable[[Any], R] | None = None) -> None:
        """Store the outcome; `decode(value)` runs on the first observer's thread."""
        if self._done:
            return
        self._value = value
        if decode is not None:
            self._decoding = threading.RLock()
            self._decode = decode
        self._finish()

    def _fail(self, error: BaseException) -> None:
        """Store a failure; ignored when there is an outcome already."""
        if self._done:
            return
        self._error = error
        self._traceback = error.__traceback__
        self._finish()

    def _finish(self) -> None:
        self._done = True
        if self._driven_by is not None:
            self._driven_by.kick()
        waiters = self._waiters
        while waiters:
            try:
                waiter = waiters.pop()
            except IndexError:  # another thread took the last one
                return
            wake(waiter)

    def _when_done(self, callback: Callable[[], Any]) -> None:
        """Call `callback()` once there is an outcome: now, or on the completing thread; it must be harmless twice."""
        self._waiters.append(callback)
        if self._done:
            self._finish()

    def _then(self, transform: Callable[[R], S]) -> Future[S]:
        """A future of `transform(value)`; failures pass through."""
        result: Future[S] = Future._new()

        def transfer() -> None:
            if self._error is not None:
                result._fail(self._error)
            else:
                result._complete(None, lambda _: transform(self._outcome()))

        self._when_done(transfer)
        return result

    # --- observing (any thread, any number of times) -------------------------------------------------------------

    def get(self, timeout: float | None = None) -> R:
        """Block this thread until there is an outcome; Ctrl-C interrupts.

        Args:
            timeout: seconds; None waits as long as it takes.

        Raises:
            TimeoutError: no outcome in time; a later `get` still works.
            TypeError: `timeout` is no number.
            ValueError: `timeout` is negative, infinite or nan.
            Exception: what the operation failed with; the same object each time.
        """
        if self._taken:
            raise ValueError("this Future was consumed; its outcome went to whoever took it")
        if not self._done:
            if timeout is not None:
                check_timeout(timeout)
            if _running_loop() is not None:
                _warn_blocking()
            try:
                self._wait(timeout)
            except KeyboardInterrupt as exc:
                _note_what_was_awaited(exc, self)
                raise
        return self._outcome()

    def result(self, timeout: float | None = None) -> R:
        """The same as `get`."""
        return self.get(timeout)

    def exception(self, timeout: float | None = None) -> Exception | None:
        """What `get` would raise, or None; a time-out counts, KeyboardInterrupt and its like pass through."""
        try:
            self.get(timeout)
        except Exception as exc:
            return exc
        return None

    def as_asyncio(self) -> asyncio.Future[R]:
        """A new asyncio future of the running loop with this outcome; cancelling it affects nobody else.

        Raises:
            RuntimeError: no loop runs in this thread; this future is untouched.
        """
        loop = _running_loop()
        if loop is None:
            raise RuntimeError("as_asyncio() needs a running event loop; outside of one write .get()")
        if self._taken:
            raise ValueError("this Future was consumed; its outcome went to whoever took it")
        target: asyncio.Future[R] = loop.create_future()
        if self._done:
            self._transfer(target)
        else:
            self._when_done(lambda: _call_in(loop, self._transfer, target))
        return target

    def __await__(self) -> Generator[Any, None, R]:
        loop = _running_loop()
        if loop is None:
            raise ValueError("__await__ with no active event loop; outside of one write .get()")
        if self._done and not self._taken:
            return self._outcome()
        return (yield from self.as_asyncio().__await__())

    def _take_inner(self) -> Future[R]:
        """Hand the outcome over to a new future; this one can't be observed any more."""
        if self._taken or self._done:
            raise ValueError("this Future was consumed; its outcome went to whoever took it")
        heir: Future[R] = self._then(lambda value: value)
        self._taken = True
        return heir

    def __reduce__(self) -> Any:
        raise TypeError("a Future can't be pickled: it belongs to this process; send the value, which get() or await gives, or the mesh")

    def __repr__(self) -> str:
        state = "pending" if not self._done else "failed" if self._error is not None else "done"
        return f"<Future {state}>"

    def _wait(self, timeout: float | None) -> None:
        loop = _net_loop
        limit, deadline_s = timeout, None if timeout is None else time.monotonic() + timeout
        if loop is not None:
            # Often the reply then arrives on this very thread. Being woken is for the other case.
            self._driven_by = loop
            if loop.drive(self._is_done, timeout):
                if not self._done:
                    raise _timed_out(self, limit)
                return
        if deadline_s is not None:
            timeout = max(0.0, deadline_s - time.monotonic())
        gate = _thread.allocate_lock()
        gate.acquire()
        self._when_done(gate.release)
        if not gate.acquire(True, -1 if timeout is None else min(timeout, _MAX_TIMEOUT_S)) and not self._done:
            with contextlib.suppress(ValueError):  # completed in this very moment
                self._waiters.remove(gate.release)
            raise _timed_out(self, limit)

    def _is_done(self) -> bool:
        return self._done

    def _outcome(self) -> R:
        if self._decode is not None:
            self._decode_once()
        if self._error is not None:
            raise self._error.with_traceback(self._traceback)
        return self._value  # type: ignore[no-any-return]

    def _decode_once(self) -> None:
        # Reentrant: decoding may unpickle an object whose constructor observes other futures.
        with self._decoding:
            decode, raw = self._decode, self._value
            if decode is None:
                return
            try:
                self._value = decode(raw)
            except Exception as exc:
                self._value = None
                self._error = exc
                self._traceback = exc.__traceback__
            self._decode = None

    def _transfer(self, target: asyncio.Future[R]) -> None:
        if target.done():
            return
        try:
            value = self._outcome()
        except StopIteration as exc:
            wrapped = RuntimeError("the operation raised StopIteration")
            wrapped.__cause__ = exc
            target.set_exception(wrapped)
        except BaseException as exc:
            target.set_exception(exc)
            target.exception()  # this copy's owner may have gone; the outcome stays with the Future
        else:
            target.set_result(value)


def gather(futures: list[Future[R]]) -> Future[list[R]]:
    """A future of all values in order; it fails as soon as one has failed, with that failure."""
    result: Future[list[R]] = Future._new()
    lock = threading.Lock()
    missing = len(futures)

    def on_done(future: Future[R]) -> None:
        nonlocal missing
        if future._error is not None:
            result._fail(future._error)
            return
        with lock:
            missing -= 1
            complete = missing == 0
        if complete:
            result._complete(None, lambda _: [future.get() for future in futures])

    if not futures:
        result._complete([])
    for future in futures:
        future._when_done(lambda future=future: on_done(future))  # type: ignore[misc]
    return result


def settled(future: Future[Any]) -> Future[None]:
    """A future that completes when `future` has an outcome, whichever."""
    result: Future[None] = Future._new()
    future._when_done(lambda: result._complete(None))
    return result


def runs_in_loop() -> bool:
    """Whether an event loop runs in this thread, which must not be blocked."""
    return _running_loop() is not None


def _running_loop() -> Any:
    asyncio_events = sys.modules.get("asyncio.events")
    return None if asyncio_events is None else asyncio_events._get_running_loop()


def _call_in(loop: Any, callback: Callable[..., Any], *args: Any) -> None:
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:  # the loop was closed meanwhile: nobody is left to tell
        return


def check_timeout(timeout: Any, *, zero: bool = True) -> None:
    """Refuse what is no time to wait.

    Args:
        zero: whether 0 is one.

    Raises:
        TypeError: not a number.
        ValueError: negative, infinite or nan.
    """
    try:
        fits = math.isfinite(timeout) and (timeout > 0 or (zero and timeout == 0))
    except OverflowError:
        fits = False
    except TypeError:
        hint = "give it seconds, such as 0.5, or None to wait as long as it takes"
        raise TypeError(explain(f"invalid timeout {timeout!r}; expected a number of seconds", next=hint)) from None
    if not fits:
        least = "a finite number of seconds, zero or more" if zero else "a positive, finite number of seconds"
        hint = "write None to wait as long as it takes"
        raise ValueError(explain(f"invalid timeout {timeout!r}; expected {least}", next=hint))


def _timed_out(future: Future[Any], timeout: float | None) -> TimeoutError:
    text = f"no outcome within {timeout:g} s; the operation goes on, and a later get() can still have it"
    # Who polls with short time-outs is not to wait much longer than that for the text of an error.
    why = _whys.get(future)
    story = why() if why is not None else _story(future, min(timeout or 0.0, _STORY_S)) if _story is not None else ""
    return TimeoutError(f"{text}\n{story}" if story else text)


def _note_what_was_awaited(exc: KeyboardInterrupt, future: Future[Any]) -> None:
    """Whoever is tired of waiting may want to know for whom; nobody is asked anything for it."""
    story = _story(future, 0.0) if _story is not None else ""
    if story:
        exc.add_note(f"get() was waiting for answers\n{story}")


def _warn_blocking() -> None:
    """Point at the caller's line; where that has called something of ours which waits for a future, name that."""
    frame, level = sys._getframe(1), 3
    while frame.f_back is not None and frame.f_back.f_globals.get("__name__", "").startswith("monarch."):
        frame, level = frame.f_back, level + 1
    text = 'Future.get() blocks the active event loop of this thread; write "await future" or use as_asyncio()'
    if frame.f_globals is not globals():
        text = f'{frame.f_code.co_qualname}() blocks the active event loop of this thread; call it by "await asyncio.to_thread(...)"'
    _logger.debug(text, extra={"context": "asyncio"})  # for who collects logs; people read the warning
    warnings.warn(text, UserWarning, stacklevel=level)
