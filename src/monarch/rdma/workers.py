"""Workers: a few threads that move large pieces, started when there is something to do and ended when there has not been for a while.

Rules of this file:
    1. A thread that waits for work for `IDLE_S` ends; `close` waits for all of them.
    2. Work never raises: whoever gives it in handles its errors.

Read next: `engine.py`, which gives it in.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

IDLE_S = 5.0


class Workers:
    """Runs callables on at most `limit` daemon threads. Thread: any."""

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = max(1, limit)
        self._work: deque[Callable[[], None]] = deque()
        self._threads: set[threading.Thread] = set()
        self._num_idle = 0
        self._wanted = threading.Condition()
        self._closed = False

    def start_task(self, task: Callable[[], None]) -> None:
        """Run `task()` on some thread, soon. Tasks begin in order. Unbounded: each belongs to a submit that somebody holds.

        Raises:
            RuntimeError: there is no thread, and none can be started; the task is forgotten.
        """
        with self._wanted:
            self._work.append(task)
            if self._num_idle >= len(self._work):
                self._wanted.notify()
            elif len(self._threads) < self._limit:
                self._start_thread()

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if not self._threads:
                self._work.pop()
                raise
        else:
            self._threads.add(thread)

    def _serve(self) -> None:
        while (task := self._next()) is not None:
            task()
            del task  # it holds memory of users

    def _next(self) -> Callable[[], None] | None:
        with self._wanted:
            while not self._work:
                if self._closed:
                    break
                self._num_idle += 1
                woken = self._wanted.wait(IDLE_S)
                self._num_idle -= 1
                if not woken and not self._work:
                    break
            else:
                return self._work.popleft()
            self._threads.discard(threading.current_thread())
            return None

    def close(self, budget_s: float) -> None:
        """End the threads once what was given in is done, and wait for them."""
        with self._wanted:
            self._closed = True
            self._wanted.notify_all()
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(budget_s)
