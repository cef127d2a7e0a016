"""Mapped regions: memory files of other processes, mapped here for as long as somebody reads from them.

A copy out of a mapping takes half the time of `process_vm_readv`, which finds the pages of the other process one by one. The mapping
itself costs 0.1 ms a MiB at its first use, so it is kept until nothing was read from it for `idle_s`; until then, the memory of a region
that its owner has dropped, or of an owner that has ended, is not free.

Rules of this file:
    1. What is in a mapping is that of the region only as long as the region is valid, which whoever copies looks at before and after.
    2. A file that can't be mapped is not tried again: its region is read as any other.

Read next: `vm_transport.py`, which copies.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from monarch._base.buffers import address_of
from monarch.rdma.memory import FilePlace

_MOST_KNOWN = 1024
Key = tuple[bytes, int]
"""Nonce and generation."""


class Mapped(NamedTuple):
    """A region in this process's address space, until nobody has this any more."""

    pages: mmap.mmap
    address: int


class MappedRegions:
    """Those of one process. Thread: any."""

    def __init__(self, idle_s: float, call_later: Callable[[float, Callable[[], None]], object] | None = None) -> None:
        """Args:
        call_later: runs a callback after so many seconds; None: idle ones are let go of at the next `find`.
        """
        self._call_later = call_later
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._mapped: dict[Key, Mapped | None] = {}
        """None: it can't be."""
        self._used_s: dict[Key, float] = {}
        self._is_sweeping = False

    def __len__(self) -> int:
        return sum(mapped is not None for mapped in self._mapped.values())

    def find(self, key: Key, pid: int, place: FilePlace, nbytes: int) -> Mapped | None:
        """The memory of a region, mapped; None: it can't be.

        Args:
            place: in the process `pid`, where the owner says that its file is.
            nbytes: length of the region.
        """
        with self._lock:
            if self._call_later is None:
                self._drop_idle()
            if key not in self._mapped:
                if len(self._mapped) >= _MOST_KNOWN:
                    self._mapped.clear()
                    self._used_s.clear()
                self._mapped[key] = _map(pid, place, nbytes)
            mapped = self._mapped[key]
            if mapped is not None:
                self._used_s[key] = time.monotonic()
                if self._call_later is not None and not self._is_sweeping:
                    self._is_sweeping = True
                    self._call_later(self._idle_s, self._sweep)
            return mapped

    def drop(self, key: Key) -> None:
        """A region is not valid any more."""
        with self._lock:
            self._drop(key)

    def forget(self, nonce: bytes) -> None:
        """An owner is gone."""
        with self._lock:
            for key in [key for key in self._mapped if key[0] == nonce]:
                self._drop(key)

    def _drop(self, key: Key) -> None:
        self._mapped.pop(key, None)
        self._used_s.pop(key, None)

    def _drop_idle(self) -> float:
        """Let go of what is idle; how long the next one may still be."""
        oldest_s = time.monotonic() - self._idle_s
        for key in [key for key, used_s in self._used_s.items() if used_s <= oldest_s]:
            self._drop(key)
        return min(self._used_s.values(), default=0.0) - oldest_s

    def _sweep(self) -> None:
        with self._lock:
            wait_s = self._drop_idle()
            self._is_sweeping = bool(self._used_s)
        if self._is_sweeping and self._call_later is not None:
            self._call_later(wait_s, self._sweep)

    def close(self) -> None:
        """Let go of all of them."""
        with self._lock:
            self._mapped.clear()
            self._used_s.clear()


def _map(pid: int, place: FilePlace, nbytes: int) -> Mapped | None:
    if place.offset % mmap.ALLOCATIONGRANULARITY:
        return None
    try:
        fd = os.open(f"/proc/{pid}/fd/{place.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        pages = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ, offset=place.offset)
    except (OSError, ValueError):  # no room, or another file by now, and a shorter one
        return None
    finally:
        os.close(fd)
    return Mapped(pages, address_of(pages)[0])
