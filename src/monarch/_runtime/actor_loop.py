"""The event loop of an async actor: asyncio's, with a cheaper way to sleep.

While nothing but the loop's own wake-up pipe is registered, which is nearly always, the loop does not sleep in a poll of
its own. It drives the net loop, so that a message for this actor is handled where it arrives; or, when another thread
drives, it waits on a queue, where waking it costs one futex instead of a write, a poll and a read. As soon as user code
registers a socket or pipe it polls like any other loop.
"""

from __future__ import annotations

import asyncio
import queue
import selectors
import time
from typing import Any

from monarch._runtime.platform import Loop


class _Selector(selectors.DefaultSelector):
    """A selector that sleeps elsewhere while the loop's own pipe is the only thing registered."""

    def __init__(self, net: Loop) -> None:
        super().__init__()
        self._net = net
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._polling = False

    def ring(self) -> bool:
        """Wake the loop; True when it sleeps in its own poll, where only its pipe wakes it. Any thread."""
        self._bell.put(None)
        self._net.kick()
        return self._polling

    def select(self, timeout: float | None = None) -> list[tuple[Any, int]]:
        if len(self.get_map()) > 1:
            return self._poll(timeout)
        if timeout is None or timeout > 0:
            self._sleep(timeout)
        self._drain()
        return []

    def _sleep(self, timeout: float | None) -> None:
        began_s = time.monotonic()
        if self._net.drive(self._is_rung, timeout):
            return
        if timeout is not None:  # it may have driven for a while
            timeout = max(0.0, timeout - (time.monotonic() - began_s))
        try:
            self._bell.get(True, timeout)
        except queue.Empty:
            return

    def _is_rung(self) -> bool:
        return not self._bell.empty()

    def _poll(self, timeout: float | None) -> list[tuple[Any, int]]:
        self._polling = True
        if self._is_rung():  # between the loop's last look and the flag
            self._drain()
            timeout = 0
        try:
            return super().select(timeout)
        finally:
            self._polling = False

    def _drain(self) -> None:
        while self._is_rung():
            self._bell.get_nowait()  # this thread is the only reader


class ActorLoop(asyncio.SelectorEventLoop):
    """The loop of one actor's thread."""

    def __init__(self, net: Loop) -> None:
        self._sleeper = _Selector(net)
        super().__init__(self._sleeper)

    def _write_to_self(self) -> None:
        if self._sleeper.ring():
            super()._write_to_self()  # type: ignore[misc]


def new_actor_loop(net: Loop) -> asyncio.AbstractEventLoop:
    """A loop for one actor's thread, in a process that talks through `net`."""
    return ActorLoop(net)
