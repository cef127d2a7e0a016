"""Channels: blocking reads and writes with a deadline, over a socket that has proved itself.

Sockets come from `_net` non-blocking, some encrypted. A plain one is made blocking: one call then waits in the kernel for all bytes,
without the interpreter lock and without coming back for each packet. An encrypted one is polled.

Rules of this file:
    1. Every wait has a deadline, kept to within `_SLICE_S`.
    2. `interrupt`, from any thread, ends all waits by an error; `close` comes after them.

Read next: `data_frames.py` for what is said.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from monarch.rdma.errors import DeadlineError

_SLICE_S = 0.25
_TIMEVAL = struct.Struct("ll")


class ChannelClosedError(ConnectionError):
    """The other end has closed the connection, or this one was interrupted."""


class Channel:
    """One connection. Thread: one at a time, except `interrupt` (any)."""

    def __init__(self, sock: Any) -> None:
        """Args:
        sock: a `socket.socket` or a `TlsSocket`, connected; it is the channel's.
        """
        self._sock = sock
        self._is_plain = isinstance(sock, socket.socket)
        self._poll = select.poll()
        if self._is_plain:
            sock.setblocking(True)
            slice_of_time = _TIMEVAL.pack(0, int(_SLICE_S * 1e6))
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                sock.setsockopt(socket.SOL_SOCKET, option, slice_of_time)

    def receive(self, space: memoryview, deadline_s: float) -> None:
        """Fill `space`.

        Raises:
            DeadlineError: not in time.
            OSError: the connection is broken; ChannelClosedError when the other end closed it.
        """
        while len(space):
            count = self._receive_plain(space) if self._is_plain else self._receive_encrypted(space)
            if count == 0:
                raise ChannelClosedError("the other end has closed the data connection")
            if count > 0:
                space = space[count:]
            if len(space) and time.monotonic() >= deadline_s:
                raise DeadlineError

    def send(self, parts: Sequence[bytes | memoryview], deadline_s: float) -> None:
        """Send all bytes of all parts; raises as `receive`."""
        views = [memoryview(part) for part in parts]
        while views:
            count = self._send_some(views)
            while views and count >= len(views[0]):
                count -= len(views[0])
                del views[0]
            if count:
                views[0] = views[0][count:]
            if views and time.monotonic() >= deadline_s:
                raise DeadlineError

    def _receive_plain(self, space: memoryview) -> int:
        try:
            return int(self._sock.recv_into(space, 0, socket.MSG_WAITALL))
        except BlockingIOError:
            return -1

    def _receive_encrypted(self, space: memoryview) -> int:
        try:
            return int(self._sock.recvmsg_into((space,))[0])
        except BlockingIOError:
            self._wait(select.POLLIN)
            return -1

    def _send_some(self, views: Sequence[memoryview]) -> int:
        try:
            return int(self._sock.sendmsg(views))
        except BlockingIOError:
            if not self._is_plain:
                self._wait(select.POLLOUT)
            return 0

    def _wait(self, event: int) -> None:
        fd = self._sock.fileno()
        self._poll.register(fd, event)
        self._poll.poll(int(_SLICE_S * 1000))

    def is_quiet(self) -> bool:
        """Nothing has come that nobody asked for, the end of the connection among it: it can be used again."""
        self._poll.register(self._sock.fileno(), select.POLLIN)
        return not self._poll.poll(0)

    def finish(self, deadline_s: float) -> None:
        """Send nothing more, and wait until the other end has closed the connection, so that it has read what was sent."""
        with contextlib.suppress(OSError, DeadlineError):
            self._sock.shutdown(socket.SHUT_WR)
            space = memoryview(bytearray(4096))
            while True:
                self.receive(space, deadline_s)

    @property
    def is_worn(self) -> bool:
        """So much went through that its key should not encrypt more."""
        return bool(getattr(self._sock, "worn", False))

    def interrupt(self) -> None:
        """Break the connection, so that whoever waits for it wakes up."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the descriptor back."""
        self._sock.close()

    def abandon(self) -> None:
        """Close the descriptor only; for a fork."""
        with contextlib.suppress(OSError):
            os.close(self._sock.fileno())
