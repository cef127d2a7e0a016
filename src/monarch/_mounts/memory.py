"""Memory for the bytes of a pushed directory: pages that exist only once they are written, and that a descriptor may stand for.

An anonymous memory file (memfd) where the system has them: it has no name, so nothing stays behind however the process ends, and the
kernel can serve reads from its descriptor. Elsewhere anonymous shared pages.

Rules of this file:
    1. A view handed out keeps its pages mapped, also after `close`; the last view unmaps them.
    2. Pages never written read as zeros.

Read next: `store.py`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from functools import lru_cache
from typing import Any

_FAILED = ctypes.c_void_p(-1).value


class Writer:
    """Writes one range of a memory. Thread: any; where there is a descriptor, others may use the interpreter meanwhile."""

    def __init__(self, view: memoryview, fd: int | None, start: int) -> None:
        self._view = view
        self._fd = None if fd is None else _duplicate(fd)  # the memory may be closed before we are done
        self._start = start

    def write(self, data: memoryview) -> None:
        """Write `data`, as long as the range.

        Raises:
            OSError: the system has no memory.
        """
        if self._fd is None:
            self._view[:] = data
            return
        done = 0
        while done < len(data):  # half the time of a copy into the mapping, where each page is faulted in and cleared first
            done += os.pwrite(self._fd, data[done:], self._start + done)

    def close(self) -> None:
        """Let go of the memory. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd, self._view = None, memoryview(b"")


class Memory:
    """`size` bytes, all zero. Thread: any; the owner keeps `close` apart from all else."""

    def __init__(self, size: int, *, keep_fd: bool) -> None:
        self.size = size
        self.fd: int | None = None
        """Descriptor of these bytes, until `close`; None: not kept, or there is none on this system."""
        fd = _memfd(size)
        try:
            self.view: memoryview = _mapped(fd, size)
        except BaseException:
            if fd is not None:
                os.close(fd)
            raise
        if fd is not None and keep_fd:
            self.fd = fd
        elif fd is not None:
            os.close(fd)

    def writer(self, start: int, end: int) -> Writer:
        """Who writes the bytes from `start` to `end`."""
        return Writer(self.view[start:end], self.fd, start)

    def discard(self, start: int, end: int) -> None:
        """Give the whole pages inside [start, end) back to the system; they read as zeros again."""
        start, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if start < end and sys.platform == "linux":
            anchor = ctypes.c_char.from_buffer(self.view)
            _libc().madvise(ctypes.addressof(anchor) + start, end - start, mmap.MADV_REMOVE)

    def close(self) -> None:
        """Close the descriptor and let go of the pages."""
        if self.fd is not None:
            os.close(self.fd)
        self.fd, self.view = None, memoryview(b"")


def _duplicate(fd: int) -> int | None:
    try:
        return os.dup(fd)
    except OSError:  # descriptors have run out
        return None


def _memfd(size: int) -> int | None:
    if sys.platform != "linux":
        return None
    try:
        fd = os.memfd_create("monarch-mount")
    except OSError:  # a sandbox may refuse it, or descriptors have run out
        return None
    try:
        os.ftruncate(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _mapped(fd: int | None, size: int) -> memoryview:
    if fd is None:
        return memoryview(mmap.mmap(-1, size))
    # Not by the `mmap` module, whose objects keep a duplicate of the descriptor.
    address = _libc().mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address in (None, _FAILED):
        raise OSError(ctypes.get_errno(), f"mmap of {size} bytes: {os.strerror(ctypes.get_errno())}")
    array = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(array, _libc().munmap, address, size).atexit = False
    return memoryview(array).cast("B")


@lru_cache(maxsize=1)
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
