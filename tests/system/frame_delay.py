"""A cable that is longer than it looks: frames between two TAP devices, each handed on a fixed time after it came.

For kernels without `netem`. One thread; some 20,000 frames a second.

Read next: `hosts.py`, which puts it between a host and the bridge.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import threading
import time
from collections import deque

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_FRAME_BYTES = 65536
_MOST_FRAMES = 20_000
"""Per direction; what comes on top is dropped, as by a router."""


class FrameDelay:
    """Two new TAP devices of the calling thread's namespace, joined with a delay. Thread: any; `close` waits for its own."""

    def __init__(self, left: str, right: str, delay_s: float) -> None:
        self._delay_s = delay_s
        self._taps = [_open_tap(left), _open_tap(right)]
        self._wake, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._serve, name=f"frame-delay-{left}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Remove both devices; frames on their way are lost."""
        os.close(self._waker)
        self._thread.join()
        for fd in (self._wake, *self._taps):
            os.close(fd)

    def _serve(self) -> None:
        queue: deque[tuple[float, int, bytes]] = deque()  # one delay for all, so the order of coming is the order of going
        poller = select.poll()
        for fd in (self._wake, *self._taps):
            poller.register(fd, select.POLLIN)
        while True:
            wait_ms = None if not queue else max(0.0, (queue[0][0] - time.monotonic()) * 1000)
            for fd, _ in poller.poll(wait_ms):
                if fd == self._wake:
                    return
                self._take(fd, queue)
            while queue and queue[0][0] <= time.monotonic():
                _, fd, frame = queue.popleft()
                _write(fd, frame)

    def _take(self, fd: int, queue: deque[tuple[float, int, bytes]]) -> None:
        other = self._taps[1] if fd == self._taps[0] else self._taps[0]
        due = time.monotonic() + self._delay_s
        while (frame := _read(fd)) is not None:
            if len(queue) < 2 * _MOST_FRAMES:
                queue.append((due, other, frame))


def _open_tap(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _read(fd: int) -> bytes | None:
    try:
        return os.read(fd, _FRAME_BYTES)
    except OSError:  # no more, or the device is down
        return None


def _write(fd: int, frame: bytes) -> None:
    try:
        os.write(fd, frame)
    except OSError:  # the device is down, or its queue full: a lost frame
        return
