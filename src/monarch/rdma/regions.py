"""Regions: the memory that this process lets others read and write, and the table by which they see what is still valid.

The table lies at a fixed address in this process's memory and is read from outside, by `process_vm_readv`: no code of this
process runs for a transfer.

    head, one page      magic, nonce of 16 random bytes, descriptor of the locks, number of chunks, address of each chunk
    chunk n             1024 << n entries of 64 bytes; a chunk never moves and is never given back
    entry               nonce, slot, generation, address, length, flags; generation 0: nothing is here

Who has a handle knows all bytes that the entry must have. He reads the entry in front of and behind the data, in one call: so a
region that was dropped, a slot that was used again, another process under the same id, or memory of a fork is an error, never
wrong bytes. Writing can't be undone, so whoever writes holds a lock of the slot meanwhile (`SlotLocks`): a lock of the
kernel, by byte range of an empty file, that ends with its holder. Memory that was dropped under such a lock stays pinned until it ends.

Rules of this file:
    1. An entry is filled with generation 0 and becomes valid by one store of 8 bytes; it is made invalid by one before anything else.
    2. A generation is used once, so an entry that was valid for a handle never becomes valid for it again.
    3. The memory is unpinned, and its slot used again, only when nobody can be writing.
    4. A fork finds the table wiped (`MADV_WIPEONFORK`) and makes one of its own.

Read next: `vm.py`, which reads tables; `handles.py` for what travels.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Callable
from typing import NamedTuple

from monarch._base.buffers import address_of
from monarch.rdma.errors import OwnerGoneError
from monarch.rdma.memory import LocalMemory

MAGIC = b"monarch\x01"
NONCE_BYTES = 16
ENTRY_BYTES = 64
HEAD = struct.Struct("<8s16siiQ")
MAX_CHUNKS = 32
HEAD_BYTES = HEAD.size + 8 * MAX_CHUNKS
FIRST_ENTRIES = 1024
READ_ONLY = 1
"""Flag of an entry: others may not write here."""
ON_DEVICE = 2
"""Flag of an entry: the address is one of a GPU."""

_ENTRY = struct.Struct("<16sQQQQQ8x")
_GENERATION = 3
"""Word of an entry."""
_WORDS = ENTRY_BYTES // 8
_WIPE_ON_FORK = 18
_FLOCK = struct.Struct("hhqqi4x")
_WHENCE_START = 0
_RETRY_S = 0.05


class Region(NamedTuple):
    """Memory that others may read, or write."""

    memory: LocalMemory
    slot: int
    generation: int
    entry_address: int
    flags: int


def entry_bytes(nonce: bytes, slot: int, generation: int, address: int, nbytes: int, flags: int) -> bytes:
    """What the entry of a valid region looks like; struct.error for numbers that fit in no entry."""
    return _ENTRY.pack(nonce, slot, generation, address, nbytes, flags)


def parse_entry(data: bytes | memoryview) -> tuple[bytes, int, int, int, int, int]:
    """(nonce, slot, generation, address, bytes, flags) of an entry."""
    return _ENTRY.unpack(data)


def place_of(slot: int) -> tuple[int, int]:
    """Which chunk a slot is in, and its number there."""
    chunk = (slot // FIRST_ENTRIES + 1).bit_length() - 1
    return chunk, slot - FIRST_ENTRIES * ((1 << chunk) - 1)


class _Chunk:
    """Entries at a fixed address."""

    def __init__(self, num_entries: int) -> None:
        self.pages = _new_pages(num_entries * ENTRY_BYTES)
        self.address = address_of(self.pages)[0]
        self.words = memoryview(self.pages).cast("Q")


class RegionTable:
    """The regions of this process. Thread: any."""

    def __init__(self, call_later: Callable[[float, Callable[[], None]], object] | None = None) -> None:
        """Args:
        call_later: runs a callback after so many seconds; None: dropped memory that somebody writes to is looked after at the next call.
        """
        self.pid = os.getpid()
        self.nonce = os.urandom(NONCE_BYTES)
        self._head = _new_pages(mmap.PAGESIZE)
        self.address = address_of(self._head)[0]
        self._chunks: list[_Chunk] = []
        self.locks = SlotLocks(_lock_file()) if hasattr(fcntl, "F_OFD_SETLK") and hasattr(os, "memfd_create") else None
        self._call_later = call_later
        self._lock = threading.RLock()
        self._live: dict[int, Region] = {}
        """By generation."""
        self._lingering: list[Region] = []
        """Dropped while somebody was writing."""
        self._holds: dict[int, int] = {}
        """How often each generation is held in this process."""
        self._free: list[int] = []
        self._num_slots = 0
        self._last_generation = 0
        self._head[: HEAD.size] = HEAD.pack(MAGIC, self.nonce, -1 if self.locks is None else self.locks.fd, 0, 0)

    def __len__(self) -> int:
        return len(self._live)

    @property
    def num_lingering(self) -> int:
        """How many dropped regions are still pinned, because somebody writes to them."""
        return len(self._lingering)

    def add(self, memory: LocalMemory) -> Region:
        """Let others read and write `memory`, which is pinned until `drop`. Cost: 5 us, whatever its size."""
        with self._lock:
            self._release_idle()
            slot = self._free.pop() if self._free else self._new_slot()
            self._last_generation += 1
            flags = (READ_ONLY if memory.is_readonly else 0) | (0 if memory.device == "cpu" else ON_DEVICE)
            number, index = place_of(slot)
            chunk = self._chunks[number]
            region = Region(memory, slot, self._last_generation, chunk.address + index * ENTRY_BYTES, flags)
            at = index * ENTRY_BYTES
            chunk.pages[at : at + ENTRY_BYTES] = entry_bytes(self.nonce, slot, 0, memory.address, memory.nbytes, flags)
            chunk.words[index * _WORDS + _GENERATION] = region.generation
            self._live[region.generation] = region
            return region

    def drop(self, generation: int) -> Region | None:
        """Take a region back; None when it was dropped before. From the return on nobody reads or writes it any more."""
        with self._lock:
            region = self._live.pop(generation, None)
            if region is not None:
                self._invalidate(region)
                self._lingering.append(region)
            self._release_idle()
        return region

    def hold(self, generation: int) -> Region | None:
        """Keep a region's memory pinned, also behind its drop, until `let_go`; None: it was dropped before."""
        with self._lock:
            region = self._live.get(generation)
            if region is not None:
                self._holds[generation] = self._holds.get(generation, 0) + 1
            return region

    def let_go(self, generation: int) -> None:
        """Undo one `hold`."""
        with self._lock:
            self._holds[generation] -= 1
            if not self._holds[generation]:
                del self._holds[generation]
            self._release_idle()

    def chunks(self) -> list[tuple[int, int]]:
        """Address and bytes of what the entries are in; chunks are only ever added."""
        with self._lock:
            return [(chunk.address, len(chunk.pages)) for chunk in self._chunks]

    def is_live(self, generation: int) -> bool:
        """Whether a region was not dropped."""
        return generation in self._live

    def regions(self) -> list[Region]:
        """Those that are valid."""
        with self._lock:
            return list(self._live.values())

    def find(self, generation: int) -> Region | None:
        """A region; None when it was dropped."""
        return self._live.get(generation)

    def close(self) -> bool:
        """Take all regions back; the table stays readable, and says so.

        Returns:
            Whether all memory is free. Otherwise somebody is writing: the table must be kept, and closed again.
        """
        with self._lock:
            for region in self._live.values():
                self._invalidate(region)
                self._lingering.append(region)
            self._live.clear()
            self._release_idle()
            if self._lingering:
                return False
            if self.locks is not None:
                self.locks.close()
                self.locks = None
        return True

    def abandon(self) -> None:
        """Close the descriptor only; for a fork, which finds its copy of the table wiped."""
        if self.locks is not None:
            os.close(self.locks.fd)
            self.locks.fd = -1

    def _invalidate(self, region: Region) -> None:
        number, index = place_of(region.slot)
        self._chunks[number].words[index * _WORDS + _GENERATION] = 0

    def _release_idle(self) -> None:
        if not self._lingering:
            return
        kept = [region for region in self._lingering if region.generation in self._holds or self._is_written(region)]
        self._free.extend(region.slot for region in self._lingering if region not in kept)
        self._lingering = kept
        if self._call_later is not None and any(region.generation not in self._holds for region in kept):
            self._call_later(_RETRY_S, self._retry)

    def _is_written(self, region: Region) -> bool:
        return self.locks is not None and not self.locks.is_idle(region.slot)

    def _retry(self) -> None:
        with self._lock:
            self._release_idle()

    def _new_slot(self) -> int:
        slot = self._num_slots
        if place_of(slot)[0] == len(self._chunks):
            chunk = _Chunk(FIRST_ENTRIES << len(self._chunks))
            struct.pack_into("<Q", self._head, HEAD.size + 8 * len(self._chunks), chunk.address)
            self._chunks.append(chunk)
            struct.pack_into("<Q", self._head, HEAD.size - 8, len(self._chunks))
        self._num_slots += 1
        return slot


class SlotLocks:
    """Locks of slots across processes, one byte of a file each. Thread: any, one holder per slot and `SlotLocks`.

    Locks belong to the open file: who opens it once more (`/proc/<pid>/fd/<number>`) has locks of his own, which end with it.
    """

    def __init__(self, fd: int) -> None:
        """Args:
        fd: is closed with this object.
        """
        self.fd = fd
        self._holders: dict[int, int] = {}
        self._lock = threading.Lock()

    def hold(self, slot: int) -> None:
        """Keep the owner from giving the slot's memory away. Cost: 2 us.

        Raises:
            BlockingIOError: the owner is about to.
            OwnerGoneError: the locks were closed, because the owner has ended.
        """
        with self._lock:
            holders = self._holders.get(slot, 0)
            if self.fd < 0:
                raise OwnerGoneError("its process has ended")
            if not holders:
                self._set(fcntl.F_RDLCK, slot)
            self._holders[slot] = holders + 1

    def let_go(self, slot: int) -> None:
        """Undo one `hold`."""
        with self._lock:
            holders = self._holders[slot] - 1
            if holders:
                self._holders[slot] = holders
                return
            del self._holders[slot]
            if self.fd >= 0:
                self._set(fcntl.F_UNLCK, slot)

    def is_idle(self, slot: int) -> bool:
        """Nobody holds this slot."""
        try:
            self._set(fcntl.F_WRLCK, slot)
        except OSError as exc:
            if exc.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        self._set(fcntl.F_UNLCK, slot)
        return True

    def close(self) -> None:
        """Let go of everything."""
        with self._lock:
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1

    def _set(self, kind: int, slot: int) -> None:
        fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, _WHENCE_START, slot, 1, 0))


def open_locks(pid: int, fd: int) -> SlotLocks:
    """The locks of another process's table; OSError when they can't be reached."""
    return SlotLocks(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))


def _lock_file() -> int:
    return os.memfd_create("monarch-regions", os.MFD_CLOEXEC)


def _new_pages(num_bytes: int) -> mmap.mmap:
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        pages.madvise(_WIPE_ON_FORK)
    except (OSError, AttributeError):  # an old kernel: the pid in the handle, which a fork does not have, is the only guard
        return pages
    return pages
