"""The device of one mount: the descriptors of `/dev/fuse` that lead to it, and what is asked of the kernel there.

Rules of this file:
    1. A descriptor is closed when nobody uses it any more, and not before: its number would soon be another file's.
       Whoever uses one is inside of `enter` and `leave`; the last to leave a closed device closes the descriptors.
    2. A reply goes to the descriptor from which its request was read; nothing else knows the request.
    3. What the kernel will not do (clone, read a backing file) is no error: there is always a plainer way.

Read next: `fuse_server.py`, which reads here.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import struct
import threading
from collections.abc import Callable, Sequence

from monarch._wire.frames import Buffer

DEVICE = "/dev/fuse"
_IOC_CLONE = 0x8004E500
_IOC_BACKING_OPEN = 0x4010E501
_IOC_BACKING_CLOSE = 0x4004E502
_MOST_PARTS = 1024  # IOV_MAX of Linux


class Device:
    """The descriptors of one mount. Thread: any."""

    def __init__(self, fd: int) -> None:
        """`fd`: what `mount` gave; the device owns it from now on."""
        self.fd = fd
        self._alarm = os.eventfd(0, os.EFD_CLOEXEC)
        self._fds = [fd, self._alarm]
        self._lock = threading.Lock()
        self._users = 0
        self._is_closed = False

    def another(self) -> int:
        """A descriptor for one more thread, with a queue of its own where the kernel and our rights allow, else the first one."""
        try:
            clone = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return self.fd
        try:
            fcntl.ioctl(clone, _IOC_CLONE, struct.pack("=I", self.fd))
        except OSError:
            os.close(clone)
            return self.fd
        self._fds.append(clone)
        return clone

    def waiter(self, fd: int) -> Callable[[], object]:
        """A function that blocks until `fd` may have a request to read, or the device is closed; reading it then does not block.

        Cost: half a microsecond a request. A reader that blocks in reading would cost none, but nothing wakes it for sure.
        """
        os.set_blocking(fd, False)
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.register(self._alarm, select.POLLIN)
        return poll.poll

    def enter(self) -> bool:
        """Keep the descriptors open until `leave`; False: they are closed, or will be."""
        with self._lock:
            if self._is_closed:
                return False
            self._users += 1
            return True

    def leave(self) -> None:
        """End what a successful `enter` began."""
        with self._lock:
            self._users -= 1
            if self._is_closed:
                self._close_unused()

    def close(self) -> None:
        """Let nobody enter any more, and close the descriptors when the last user leaves. The kernel then ends the connection."""
        with self._lock:
            if self._fds:
                os.eventfd_write(self._alarm, 1)
            self._is_closed = True
            self._close_unused()

    def _close_unused(self) -> None:
        if self._users == 0:
            while self._fds:
                os.close(self._fds.pop())

    @property
    def is_open(self) -> bool:
        """Some descriptor is."""
        return bool(self._fds)

    def write(self, fd: int, parts: Sequence[Buffer]) -> int:
        """Give the kernel a reply or a notice, whole; the errno of its refusal, 0 when it took it.

        ENOENT: nobody waits for this reply any more, or what a notice is about is not cached.
        """
        if len(parts) > _MOST_PARTS:
            parts = [parts[0], b"".join(parts[1:])]
        try:
            os.writev(fd, parts)
        except OSError as exc:
            return exc.errno or errno.EIO
        return 0

    def open_backing(self, file: int) -> int:
        """A number by which the kernel reads the descriptor `file` itself.

        Raises:
            OSError: it will not: no right to (CAP_SYS_ADMIN), or not such a file.
        """
        return int(fcntl.ioctl(self.fd, _IOC_BACKING_OPEN, bytearray(struct.pack("=iIQ", file, 0, 0)), True))

    def close_backing(self, number: int) -> None:
        """Give back what `open_backing` gave; files that are open keep theirs."""
        try:
            fcntl.ioctl(self.fd, _IOC_BACKING_CLOSE, struct.pack("=I", number))
        except OSError:  # the connection has ended, and with it all its numbers
            return
