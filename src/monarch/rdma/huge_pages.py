"""Huge pages under memory that is moved again and again: a copy between processes then looks up 2 MiB at once, and takes half the time.

    reader    Heat: counts what it has moved of each buffer, and tells the owner once that one is worth it (`HotMemory`)
    owner     HugePages: asks the kernel to put the pages together, on a thread of its own, while transfers go on

The kernel takes some 0.6 ms a MiB for it, as much as four transfers save. It copies the pages and swaps them under whoever uses them;
the thread rests as long after each 2 MiB as they took, so that transfers meanwhile lose little.

Rules of this file:
    1. It is a hint: whatever the kernel refuses stays as it is, and is no error.
    2. Memory does not grow: only ranges that lie within the buffer and whose pages all exist, as this process's alone, are put together.
    3. Where the administrator wants no huge pages (`transparent_hugepage/enabled` is `never`), nothing is done.

Sources: madvise(2), MADV_COLLAPSE (Linux 6.1); Documentation/admin-guide/mm/pagemap.rst for the bits of a page.

Read next: `engine.py`, which counts; `manager.py`, which is told.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from monarch.rdma.handles import Handle
from monarch.rdma.memory import LocalMemory
from monarch.rdma.workers import Workers

_logger = logging.getLogger("monarch.rdma")
HUGE_BYTES = 2 << 20
LEAST_BYTES = 2 * HUGE_BYTES
"""Of a buffer; in a smaller one a huge page may not fit."""
TIMES = 4
"""How often the whole of a buffer is moved before it is worth it."""
_PAGE_BYTES = 4096
_MOST_KNOWN = 4096
_MADV_COLLAPSE = 25
_PAGES = HUGE_BYTES // _PAGE_BYTES
_PRESENT_ALONE = 1 << 63 | 1 << 56
_FILE_OR_SHARED = 1 << 61
_CLOSE_S = 1.0


class Heat:
    """How much of each buffer this process has moved. Thread: one at a time."""

    def __init__(self) -> None:
        self._moved: dict[tuple[bytes, int], int] = {}

    def add(self, handle: Handle, nbytes: int) -> bool:
        """Count bytes that were moved; whether the owner is to be told now, which is so once for each buffer."""
        if handle.nbytes < LEAST_BYTES:
            return False
        key = handle.nonce, handle.generation
        before = self._moved.get(key, 0)
        if not before and len(self._moved) >= _MOST_KNOWN:
            self._moved.clear()
        self._moved[key] = before + nbytes
        limit = TIMES * handle.nbytes
        return before < limit <= before + nbytes


class HugePages:
    """Puts pages of this process together, one buffer after the other. Thread: any."""

    def __init__(self) -> None:
        self._worker = Workers("monarch-rdma-pages", 1)
        self._closed = threading.Event()

    def put_under(self, find: Callable[[], LocalMemory | None]) -> None:
        """Do it soon.

        Args:
            find: gives the memory, before each 2 MiB; None ends it. What waits for its turn pins no memory.
        """
        if self._closed.is_set() or not is_possible():
            return
        with contextlib.suppress(RuntimeError):  # no thread can be started: then not
            self._worker.start_task(lambda: self._put(find))

    def _put(self, find: Callable[[], LocalMemory | None]) -> None:
        memory = None if self._closed.is_set() else find()
        if memory is None or memory.device != "cpu":
            return
        try:
            for address in scattered(memory.address, memory.nbytes):
                began = time.monotonic()
                if find() is None:
                    return
                _libc().madvise(address, HUGE_BYTES, _MADV_COLLAPSE)
                if self._closed.wait(time.monotonic() - began):
                    return
        except OSError as exc:  # descriptors have run out, or this process may not look at itself
            _logger.debug("pages stay small: bytes=%d reason=%s", memory.nbytes, exc)

    def close(self) -> None:
        """Stop after the 2 MiB that it is at."""
        self._closed.set()
        self._worker.close(_CLOSE_S)


def scattered(address: int, nbytes: int) -> Iterator[int]:
    """Addresses of the 2 MiB within a range whose pages all exist and are only this process's, not those of a file."""
    first = -(-address // HUGE_BYTES) * HUGE_BYTES
    with open("/proc/self/pagemap", "rb", buffering=0) as table:
        for start in range(first, address + nbytes - HUGE_BYTES + 1, HUGE_BYTES):
            pages = memoryview(os.pread(table.fileno(), 8 * _PAGES, start // _PAGE_BYTES * 8)).cast("Q")
            if len(pages) == _PAGES and all((page & (_PRESENT_ALONE | _FILE_OR_SHARED)) == _PRESENT_ALONE for page in pages):
                yield start


@lru_cache(maxsize=1)
def is_possible() -> bool:
    """Whether this system puts pages together on request, and may."""
    if not sys.platform.startswith("linux") or os.sysconf("SC_PAGE_SIZE") != _PAGE_BYTES:
        return False
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled", encoding="ascii") as enabled:
            if "[never]" in enabled.read():
                return False
        with open("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size", encoding="ascii") as size:
            return int(size.read()) == HUGE_BYTES and os.access("/proc/self/pagemap", os.R_OK)
    except (OSError, ValueError):
        return False


@lru_cache(maxsize=1)
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.madvise.restype = ctypes.c_int
    return libc
