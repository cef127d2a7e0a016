"""Requests that wait for their answer, until it comes, its reader is interrupted, or the patience is over.

Rules of this file:
    1. Every parked request ends, and is answered once: whoever sets `done` under the lock answers it.
    2. Answers are written outside of the lock.
    3. All have the same patience, so the one parked first is always the next to lose it.

Read next: `fuse_calls.py` for the requests.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

_REPEAT_S = 0.25
"""When a read ahead has failed, the kernel reads the first page once more for its reader. So long after a read has run out of patience,
another one of the same node runs out at once: the reader waits once, not twice."""
_REMEMBERED = 1024


class Parkable(Protocol):
    """A request, seen from here."""

    unique: int
    node: int
    done: bool
    cancelled: bool


Request = TypeVar("Request", bound=Parkable)


class Parking(Generic[Request]):
    """Parked requests of one mount. Thread: any."""

    def __init__(self, deliver: Callable[[Request, object], None], patience_s: float) -> None:
        """`deliver(request, answer)` writes an answer, an errno among others."""
        self._deliver = deliver
        self._patience_s = patience_s
        self._changed = threading.Condition(threading.Lock())
        self._parked: dict[int, tuple[float, Request]] = {}
        self._interrupted: deque[int] = deque(maxlen=_REMEMBERED)
        self._given_up: dict[int, float] = {}
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._parked)

    def park(self, request: Request) -> None:
        """Let `request` wait, unless it has been answered or interrupted meanwhile."""
        now = time.monotonic()
        with self._changed:
            if request.done:
                return
            reason = self._why_not(request, now)
            if not reason:
                self._parked[request.unique] = (now + self._patience_s, request)
                self._watch()
                return
            request.done = request.cancelled = True
        self._deliver(request, reason)

    def _why_not(self, request: Request, now: float) -> int:
        if self._is_closed:
            return errno.ENOTCONN
        if request.unique in self._interrupted:
            return errno.EINTR
        if now - self._given_up.get(request.node, -_REPEAT_S) < _REPEAT_S:
            return errno.ETIMEDOUT
        return 0

    def _watch(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._lose_patience, name="monarch-fuse-patience", daemon=True)
            self._thread.start()
        elif len(self._parked) == 1:
            self._changed.notify_all()

    def settle(self, request: Request, answer: object) -> None:
        """Answer `request`, parked or about to be; no-op when it has been."""
        with self._changed:
            if request.done:
                return
            request.done = True
            self._parked.pop(request.unique, None)
        self._deliver(request, answer)

    def interrupt(self, unique: int) -> None:
        """Nobody waits for request number `unique` any more. It may have been answered, or be at another thread that will park it."""
        with self._changed:
            if unique not in self._parked:
                self._interrupted.append(unique)
                return
            _, request = self._parked.pop(unique)
            request.done = request.cancelled = True
        self._deliver(request, errno.EINTR)

    def close(self) -> None:
        """Answer all that are parked, and all that will be, with ENOTCONN."""
        with self._changed:
            self._is_closed = True
            requests = [request for _, request in self._parked.values()]
            self._parked.clear()
            for request in requests:
                request.done = request.cancelled = True
            self._changed.notify_all()
        for request in requests:
            self._deliver(request, errno.ENOTCONN)

    def join(self, timeout_s: float) -> None:
        """Wait for the thread of a closed parking to end."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _lose_patience(self) -> None:
        while (request := self._wait_next()) is not None:
            self._deliver(request, errno.ETIMEDOUT)

    def _wait_next(self) -> Request | None:
        """The next request to give up, when its time has come; None: closed."""
        with self._changed:
            while not self._is_closed:
                if not self._parked:
                    self._changed.wait()  # unbounded: `park` and `close` notify
                    continue
                unique, (deadline, request) = next(iter(self._parked.items()))
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    del self._parked[unique]
                    request.done = request.cancelled = True
                    self._remember(request.node)
                    return request
                self._changed.wait(left_s)
        return None

    def _remember(self, node: int) -> None:
        now = time.monotonic()
        self._given_up = {other: at for other, at in self._given_up.items() if now - at < _REPEAT_S}
        self._given_up[node] = now
