"""The console: writes to a stream that this process inherited, and never waits for whoever reads it.

The client's standard output may be a pipe that nobody empties, or a terminal that was stopped. The host agent must not stop
with it. Nor may it make the descriptor non-blocking: the client and the user's shell share that flag. So a pipe or terminal
is opened anew through /proc, which gives a descriptor with flags of its own; a socket is asked for each single write; a file
never waits.

Rules of this file:
    1. Bytes leave in the order of `write`, each once, or never once the reader is gone.
    2. What does not leave is kept; `full` asks the producers to stop reading, so the memory stays bounded.

Read next: `logs.py`, the producer.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import time
from collections.abc import Callable

from monarch._net.loop import WRITE, NetLoop

_FULL_BYTES = 1 << 18
_CHUNK_BYTES = 1 << 16
_RETRY_S = 0.02


class Console:
    """One inherited output. Thread: net loop only."""

    def __init__(self, loop: NetLoop, fd: int, on_room: Callable[[], None]) -> None:
        """Args:
        fd: 1 or 2; it is never closed.
        on_room: called when it was full and no longer is.
        """
        self._loop = loop
        self._on_room = on_room
        self._queue = bytearray()
        self._fd = fd
        self._own_fd = -1
        self._socket: socket.socket | None = None
        self._may_wait = False
        """A write could block, and there is no way to forbid it: ask first, and write little."""
        self._gone = False
        self._was_full = False
        self._watched = False
        self._retries = False
        self._open()

    def _open(self) -> None:
        try:
            mode = os.fstat(self._fd).st_mode
        except OSError:
            self._gone = True
            return
        if stat.S_ISREG(mode):
            return
        if stat.S_ISSOCK(mode):
            self._socket = socket.socket(fileno=os.dup(self._fd))
            return
        try:
            self._own_fd = os.open(f"/proc/self/fd/{self._fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:
            self._may_wait = True

    @property
    def full(self) -> bool:
        """So much waits that no more should be written."""
        return len(self._queue) >= _FULL_BYTES

    @property
    def queued_bytes(self) -> int:
        """What has been written and has not left."""
        return len(self._queue)

    def write(self, data: bytes) -> None:
        """Write behind everything written before; leaves now, or when there is room."""
        if self._gone or not data:
            return
        self._queue += data
        self._flush()

    def _flush(self) -> None:
        while self._queue and not self._gone:
            try:
                count = self._write_nowait(bytes(self._queue[:_CHUNK_BYTES]))
            except (BlockingIOError, InterruptedError):
                self._wait_for_room()
                break
            except OSError:  # the reader is gone; there is nobody to tell
                self._gone = True
                self._queue.clear()
                break
            del self._queue[:count]
        if self.full:
            self._was_full = True
        elif self._was_full and len(self._queue) <= _FULL_BYTES // 2:
            self._was_full = False
            self._loop.call_soon(self._on_room)

    def _write_nowait(self, data: bytes) -> int:
        if self._socket is not None:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        if self._may_wait:
            poll = select.poll()
            poll.register(self._fd, select.POLLOUT)
            if not poll.poll(0):
                raise BlockingIOError
            return os.write(self._fd, data[: select.PIPE_BUF])
        return os.write(self._fd if self._own_fd < 0 else self._own_fd, data)

    def _wait_for_room(self) -> None:
        fd = self._own_fd if self._own_fd >= 0 else -1 if self._socket is None else self._socket.fileno()
        if fd < 0:
            self._retry_later()
        elif not self._watched:
            try:
                self._loop.watch(fd, WRITE, lambda _mask: self._flush())
                self._watched = True
            except OSError:  # a device that cannot be polled
                self._retry_later()

    def _retry_later(self) -> None:
        if not self._retries:  # one timer, however many writes wait for it
            self._retries = True
            self._loop.call_later(_RETRY_S, self._retry)

    def _retry(self) -> None:
        self._retries = False
        self._flush()

    def close(self, budget_s: float) -> None:
        """Let the rest leave, as long as it moves: after `budget_s` without progress it is dropped. The loop has ended."""
        deadline_s, left = time.monotonic() + budget_s, len(self._queue)
        while self._queue and not self._gone and time.monotonic() < deadline_s:
            self._flush_outside_loop()
            if len(self._queue) < left:
                deadline_s, left = time.monotonic() + budget_s, len(self._queue)
        if self._own_fd >= 0:
            os.close(self._own_fd)
        if self._socket is not None:
            self._socket.close()
        self._gone = True

    def _flush_outside_loop(self) -> None:
        try:
            del self._queue[: self._write_nowait(bytes(self._queue[:_CHUNK_BYTES]))]
        except (BlockingIOError, InterruptedError):
            fd = self._fd if self._socket is None else self._socket.fileno()
            poll = select.poll()
            poll.register(fd if self._own_fd < 0 else self._own_fd, select.POLLOUT)
            with contextlib.suppress(InterruptedError):
                poll.poll(_RETRY_S * 1000)
        except OSError:
            self._gone = True
