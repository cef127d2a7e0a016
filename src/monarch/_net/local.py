"""The same-host lane: large buffers in shared memory that the receiver maps, one copy in all.

A segment is an anonymous memory file (memfd). The sender copies buffers into one of its pool and sends the descriptor once
per link; the receiver maps it and builds arrays over the mapping; when the last of those is gone the segment goes back
to the pool. A memfd has no name, so nothing stays behind, however either process ends.

Rules of this file:
    1. Used pages are 5 to 10 times as fast as fresh ones. So segments and mappings are kept and reused, the last used
       first, and are given up by `SegmentPool.trim` only.
    2. A segment is written by its pool while nobody else holds it, and then never until all receivers have released it.
    3. What was received is private to its receiver: one receiver of a segment gets the shared pages themselves, several
       get a copy-on-write mapping each. A process that the receiver forks shares pages of the first kind with it.
    4. A pool belongs to the process that made it; after `os.fork` the child makes its own.

Fresh segments are filled by `pwritev` (the kernel does not clear a page that it overwrites whole: 1.5 against 0.8 GiB/s), used ones
through a mapping (4 to 18 against 2 to 7 GiB/s); both let go of the GIL. Linux only; elsewhere `available()` is False.

Read next: `stream.py` for the messages that carry segment ids and descriptors.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple

from monarch._base.buffers import exported
from monarch._base.errors import InternalError
from monarch._base.tokens import new_token

ALIGNMENT = 64
"""Every buffer of a segment starts at a multiple of this: a cache line, and enough for any element type."""
FREE_LIMIT_BYTES = 1 << 30
FREE_LIMIT_SEGMENTS = 64
IDLE_LIMIT_S = 10.0

_SMALLEST_BYTES = 64 * 1024
_LARGER_CLASSES = 2  # a free segment up to 4 times too large beats a fresh one
_MEMMOVE_BYTES = 128 * 1024  # mean size of a buffer from which one foreign call each (2 us) beats one gathered write
_MOST_PIECES = 1024  # IOV_MAX of Linux
_ZEROS = memoryview(bytes(ALIGNMENT))


@lru_cache(maxsize=1)
def available() -> bool:
    """True when this system has what the lane needs; else buffers go through the socket."""
    if sys.platform != "linux":
        return False
    try:
        fd = os.memfd_create("monarch-probe")
    except (OSError, AttributeError):  # a sandbox may refuse it
        return False
    os.close(fd)
    return True


class Segment(NamedTuple):
    """Shared memory that holds the buffers of one message."""

    segment_id: int
    """Counts up within its pool; a closed segment's id is never used again."""
    fd: int
    """Belongs to the pool; stays open while the segment is lent."""
    capacity: int
    spans: tuple[tuple[int, int], ...]
    """(offset, length) of each buffer."""


class _Pooled:
    """A segment of this process: its file, and what is known of its pages."""

    __slots__ = ("capacity", "fd", "freed_s", "mapping", "receivers", "segment_id", "shared", "used_bytes")

    def __init__(self, segment_id: int, capacity: int, *, shared: bool) -> None:
        self.segment_id = segment_id
        self.capacity = capacity
        self.shared = shared
        self.receivers = 0
        self.freed_s = 0.0
        self.used_bytes = 0
        """The pages below this exist."""
        self.mapping: _Mapping | None = None
        self.fd = os.memfd_create("monarch")
        try:
            os.ftruncate(self.fd, capacity)  # reserves nothing: pages appear when they are written
        except BaseException:
            os.close(self.fd)
            raise

    def fill(self, buffers: Sequence[memoryview], spans: Sequence[tuple[int, int]], end: int) -> None:
        """Copy `buffers` to `spans`. Other threads run meanwhile."""
        if end <= self.used_bytes and end >= _MEMMOVE_BYTES * len(buffers):
            if self.mapping is None:
                self.mapping = _Mapping(self.fd, self.capacity, mmap.MAP_SHARED)
            for buffer, (offset, _) in zip(buffers, spans, strict=True):
                self.mapping.write(buffer, offset)
        else:
            _write_all(self.fd, _padded(buffers))
            self.used_bytes = max(self.used_bytes, end)

    def close(self) -> None:
        os.close(self.fd)
        self.mapping = None


class SegmentPool:
    """The segments that this process sends with. Never blocks on a peer.

    Thread: any. A child made by `os.fork` must not use the pool of its parent (`pack` raises): both would write the same pages.
    """

    def __init__(self) -> None:
        # Reentrant: a finaliser that runs inside one of the short critical sections may send, too.
        self._lock = threading.RLock()
        self._free: dict[tuple[int, bool], list[_Pooled]] = {}
        self._lent: dict[int, _Pooled] = {}
        self._ids = itertools.count(1)
        self._pid = os.getpid()
        self._closed = False

    def pack(self, buffers: Sequence[memoryview], *, receivers: int) -> Segment:
        """Copy `buffers` into a segment and lend it to `receivers` receivers, each of whom releases it once.

        Args:
            buffers: C-contiguous views of bytes; not referred to after the return.
            receivers: >= 1. Segments for one receiver and for several are kept apart, because the receiver of the former
                gives up the descriptor.

        Raises:
            OSError: no memory or no descriptor left. Nothing is lent; the socket is still a way.

        Cost: one copy; 12 us besides.
        """
        spans, end = _layout(buffers)
        pooled = self._take(max(_SMALLEST_BYTES, 1 << (end - 1).bit_length()) if end else _SMALLEST_BYTES, shared=receivers > 1)
        try:
            pooled.fill(buffers, spans, end)
        except BaseException:
            with self._lock:
                self._put_back(pooled)
            raise
        pooled.receivers = receivers
        with self._lock:
            self._lent[pooled.segment_id] = pooled
        return Segment(pooled.segment_id, pooled.fd, pooled.capacity, spans)

    def release(self, segment_id: int) -> None:
        """One receiver gave the segment back, or will never answer again. Ids that are not lent are ignored."""
        with self._lock:
            pooled = self._lent.get(segment_id)
            if pooled is None:
                return
            pooled.receivers -= 1
            if not pooled.receivers:
                del self._lent[segment_id]
                self._put_back(pooled)

    def trim(self, now_s: float) -> list[int]:
        """Close segments that nobody has used for `IDLE_LIMIT_S`, and the longest unused ones beyond the limits.

        Args:
            now_s: `time.monotonic()`.

        Returns:
            Ids of the closed segments: each receiver that knows them should call `SegmentCache.drop`.
        """
        with self._lock:
            free = sorted((pooled for pile in self._free.values() for pooled in pile), key=lambda pooled: pooled.freed_s)
            num_bytes = sum(pooled.used_bytes for pooled in free)
            closed: list[_Pooled] = []
            for index, pooled in enumerate(free):
                surplus = num_bytes > FREE_LIMIT_BYTES or len(free) - index > FREE_LIMIT_SEGMENTS
                if not surplus and now_s - pooled.freed_s <= IDLE_LIMIT_S:
                    break
                num_bytes -= pooled.used_bytes
                self._free[pooled.capacity, pooled.shared].remove(pooled)
                closed.append(pooled)
        for pooled in closed:
            pooled.close()
        return [pooled.segment_id for pooled in closed]

    def close(self) -> None:
        """Close all segments, lent ones too: what receivers have mapped stays theirs."""
        with self._lock:
            self._closed = True
            left = [*self._lent.values(), *(pooled for pile in self._free.values() for pooled in pile)]
            self._lent.clear()
            self._free.clear()
        for pooled in left:
            pooled.close()

    def _take(self, capacity: int, *, shared: bool) -> _Pooled:
        if self._pid != os.getpid():
            raise InternalError("a SegmentPool was used in a forked child; a process makes its own")
        with self._lock:
            if self._closed:
                raise InternalError("pack() of a closed SegmentPool")
            for times in range(_LARGER_CLASSES + 1):
                pile = self._free.get((capacity << times, shared))
                if pile:
                    return pile.pop()
        return _Pooled(next(self._ids), capacity, shared=shared)

    def _put_back(self, pooled: _Pooled) -> None:
        if self._closed:
            pooled.close()
            return
        pooled.freed_s = time.monotonic()
        self._free.setdefault((pooled.capacity, pooled.shared), []).append(pooled)


def _layout(buffers: Sequence[memoryview]) -> tuple[tuple[tuple[int, int], ...], int]:
    """Aligned (offset, length) of each buffer, and where the last one ends."""
    spans, end = [], 0
    for buffer in buffers:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + buffer.nbytes
        spans.append((start, buffer.nbytes))
    return tuple(spans), end


def _padded(buffers: Sequence[memoryview]) -> Iterator[memoryview]:
    """The bytes of a segment from its start: buffers, and the gaps that align them."""
    end = 0
    for buffer in buffers:
        gap = -end % ALIGNMENT
        if gap:
            yield _ZEROS[:gap]
        yield buffer
        end += gap + buffer.nbytes


def _write_all(fd: int, pieces: Iterator[memoryview]) -> None:
    at = 0
    batch: list[memoryview] = []
    while True:
        batch.extend(itertools.islice(pieces, _MOST_PIECES - len(batch)))
        if not batch:
            return
        count = os.pwritev(fd, batch, at)  # at most 2 GiB a call
        at += count
        for done, piece in enumerate(batch):
            if count < piece.nbytes:
                batch[: done + 1] = [piece[count:]]
                break
            count -= piece.nbytes
        else:
            batch.clear()


class _Known:
    """A segment of the peer: its descriptor until it is mapped for good, then its mapping."""

    __slots__ = ("capacity", "fd", "mapping")

    def __init__(self, fd: int, capacity: int) -> None:
        self.fd = fd
        self.capacity = capacity
        self.mapping: _Mapping | None = None

    def map_kept(self) -> _Mapping:
        if self.mapping is None:
            self.mapping = _Mapping(self.fd, self.capacity, mmap.MAP_SHARED)
            self.close()
        return self.mapping

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class SegmentCache:
    """The segments of the peer of one link. Thread: net loop only; views and their release: any."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def add(self, segment_id: int, fd: int, capacity: int) -> None:
        """Get to know a segment; `fd` is the cache's from now on.

        Raises:
            ValueError: the file is shorter than `capacity`; reading behind its end would kill this process.
        """
        if os.fstat(fd).st_size < capacity:
            os.close(fd)
            raise ValueError(f"segment {segment_id} is shorter than the {capacity} bytes that its sender announced")
        self.drop(segment_id)
        self._known[segment_id] = _Known(fd, capacity)

    def views(
        self, segment_id: int, spans: Sequence[tuple[int, int]], *, shared: bool, on_release: Callable[[int], None]
    ) -> list[memoryview]:
        """Writable views of the segment's spans.

        Args:
            spans: (offset, length) of each view.
            shared: other receivers look at the same segment now, so writes must stay here.
            on_release: called with the id once, when all views, and what was built over them, are gone: from any thread,
                in the middle of anything. It takes no lock and raises nothing.

        Raises:
            ValueError: unknown segment, or a span outside of it. `on_release` is not called.

        Cost: 3 us and 0.5 us a span; with `shared` a mapping of its own (10 us and page faults).
        """
        known = self._known.get(segment_id)
        if known is None:
            raise ValueError(f"segment {segment_id} was never announced, or was dropped")
        end = 0
        for offset, length in spans:
            end = max(end, offset + length)
            if end > known.capacity or offset < 0 or length < 0:
                raise ValueError(f"span ({offset}, {length}) is outside of segment {segment_id} of {known.capacity} bytes")
        if not shared:
            mapping = known.map_kept()
        elif known.fd >= 0:
            mapping = _Mapping(known.fd, max(end, 1), mmap.MAP_PRIVATE)
        else:
            mapping = known.map_kept().copied(end)  # mapped for good, while it was for one receiver
        whole = memoryview(mapping.lend(segment_id, on_release)).cast("B")
        return [whole[offset : offset + length] for offset, length in spans]

    def drop(self, segment_id: int) -> None:
        """The sender closed the segment: forget it. Its views stay valid."""
        known = self._known.pop(segment_id, None)
        if known is not None:
            known.close()

    def close(self) -> None:
        """The link is gone: forget everything. Views stay valid, and are released as before."""
        while self._known:
            self._known.popitem()[1].close()


# By ctypes rather than the `mmap` module, whose objects keep a duplicate of the descriptor and map under the GIL.
class _Mapping:
    """Pages of this process. Whoever uses the address keeps the object; the pages go with it."""

    __slots__ = ("address", "size")

    def __init__(self, fd: int, size: int, flags: int) -> None:
        self.size = size
        self.address = 0
        address = _libc().mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
        if address in (None, _FAILED):
            raise OSError(ctypes.get_errno(), f"mmap of {size} bytes: {os.strerror(ctypes.get_errno())}")
        self.address = address

    def write(self, data: memoryview, offset: int) -> None:
        """Copy `data` to `offset`; other threads run meanwhile."""
        with exported(data) as source:
            ctypes.memmove(self.address + offset, source.buf, source.len)

    def copied(self, size: int) -> _Mapping:
        """A mapping of fresh private pages that hold the first `size` bytes of this one."""
        other = _Mapping(-1, max(size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        ctypes.memmove(other.address, self.address, size)
        return other

    def lend(self, segment_id: int, on_release: Callable[[int], None]) -> Any:
        """An array over the pages; `on_release` is called when nothing refers to it any more."""
        whole = _array_type(self.size).from_address(self.address)
        token = whole.lease = new_token()
        number = next(_lease_ids)
        _leases[number] = _Lease(token, number, self, segment_id, on_release)
        return whole

    def __del__(self, is_finalizing: Any = sys.is_finalizing) -> None:
        # At the end of the interpreter arrays of the user may live longer than this; the kernel cleans up.
        if self.address and not is_finalizing():
            _libc().munmap(self.address, self.size)


class _Lease(weakref.ref[Any]):
    """Ends when its token is gone, which an array over mapped memory holds (`_base/tokens.py`)."""

    __slots__ = ("mapping", "number", "on_release", "pid", "segment_id")

    def __new__(cls, token: CodeType, *_: Any) -> _Lease:
        return super().__new__(cls, token, _end)

    def __init__(self, token: CodeType, number: int, mapping: _Mapping, segment_id: int, on_release: Callable[[int], None]) -> None:
        self.number = number
        self.mapping = mapping
        self.segment_id = segment_id
        self.on_release = on_release
        self.pid = os.getpid()


_leases: dict[int, _Lease] = {}
"""By number. Holds the mappings, so that no reference cycle can take one down before the arrays over it."""
_lease_ids = itertools.count(1)


def _end(lease: Any, leases: Any = _leases, getpid: Any = os.getpid, is_finalizing: Any = sys.is_finalizing) -> None:
    del leases[lease.number]
    if lease.pid == getpid() and not is_finalizing():  # not for what a forked child drops
        lease.on_release(lease.segment_id)


_FAILED = ctypes.c_void_p(-1).value


@lru_cache(maxsize=1)
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc


@lru_cache(maxsize=64)
def _array_type(size: int) -> Any:
    return ctypes.c_char * size  # making the type costs 12 us
