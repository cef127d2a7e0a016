"""The store: the bytes of a pushed directory on one host, as far as they have come, and the readers that wait for the rest.

Bytes have the addresses of the index. An address belongs to one version of one file for ever, so versions live side by side and a byte
that is here never changes.

    delivery                                   readers
      put(offset, bytes)                         read(file, offset, size, later) -> views, an errno, or later
      failed(path, errno), retry, disconnect     wanted(offset, length): called once for each piece that somebody waits for
                                                 expected(pieces): who reads on will soon wait for these

Rules of this file:
    1. Nothing foreign runs under the lock: neither `wanted` nor the answer to a reader.
    2. Every reader that waits ends: with its bytes, or with an errno from `failed`, `disconnect`, `drop` or `close`.
    3. Bytes that are here, or that nobody wants any more, are received into throwaway memory: a late or second delivery harms nothing.

Read next: `segment.py` for the memory, `pushed.py` for the reader, `keeping.py` for what need not move.
"""

from __future__ import annotations

import errno
import itertools
import resource
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from monarch._base.errors import explain
from monarch._mounts.filesystem import Later
from monarch._mounts.index import BIG_FILE_THRESHOLD
from monarch._mounts.ranges import Span
from monarch._mounts.segment import Segment, segments_of
from monarch._mounts.snapshot import Snapshot

Wanted = Callable[[int, int], None]
Expected = Callable[[Sequence[Span]], None]
READ_AHEAD_BYTES = 8 << 20
"""So much before a reader who goes on is announced."""


class StoreStatistics(msgspec.Struct, frozen=True):
    """What a store holds at one moment."""

    resident_bytes: int
    """Without holes."""
    missing_bytes: int
    """Of files that somebody can read."""
    kept_bytes: int
    """Since the beginning: copied from an older version on this host instead of moved."""
    num_segments: int
    num_descriptors: int
    num_waiting: int
    """Readers."""


class Offer(NamedTuple):
    """What is known here of a range of addresses."""

    parts: list[tuple[int, memoryview]]
    """Address and bytes."""
    lost: list[tuple[int, int]]
    """Address and length of what has failed."""
    holes: tuple[tuple[int, int], ...]
    """Address and length of zeros."""


class _Waiter(NamedTuple):
    file: Span
    start: int
    end: int
    later: Later


class Store:
    """The bytes of a directory on this host. Thread: any, several at a time."""

    def __init__(self, wanted: Wanted | None = None, *, most_descriptors: int | None = None) -> None:
        """An empty store.

        Args:
            wanted: see `connect`; None: until then, reads of what is not here fail with ENOTCONN.
            most_descriptors: big files that keep a descriptor for the kernel; None: a quarter of what this process may have open.
        """
        self._lock = threading.Lock()
        self._wanted: Wanted | None = wanted
        self._expected: Expected | None = None
        self._severed = errno.ENOTCONN
        self._version = 0
        self._current: Snapshot | None = None
        self._files: dict[int, int] = {}
        """Offset to length of every file that has bytes, in any version that somebody can read."""
        self._segments: list[Segment] = []
        self._starts: list[int] = []
        self._errnos: dict[int, int] = {}
        """Files that failed, by offset."""
        self._waiting: dict[int, list[_Waiter]] = {}
        """Readers by the first piece that they lack."""
        self._asked: set[int] = set()
        self._kept_bytes = 0
        if most_descriptors is None:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            most_descriptors = limit // 4 if limit > 0 else 4096
        self._descriptors_left = most_descriptors

    # ------------------------------------------------------------------------------------------------------------ versions

    def extend(self, snapshot: Snapshot) -> None:
        """Make room for the files of a version. What had failed and is in it may be asked for again. Takes no memory.

        Raises:
            ValueError: a new file lies where another one is: the snapshot comes from another source.
        """
        with self._lock:
            new = sorted(snapshot.spans.difference(self._files.items()))
            for span in new:
                if span.offset in self._files:
                    raise _other_source(span)
            if self._errnos:
                self._errnos = {start: error for start, error in self._errnos.items() if (start, self._files[start]) not in snapshot.spans}
            added = segments_of(new)
            merged = sorted([*self._segments, *added], key=lambda segment: segment.start)
            for left, right in itertools.pairwise(merged):
                if left.end > right.start:
                    raise _other_source(Span(right.start, right.end - right.start))
            self._segments, self._starts = merged, [segment.start for segment in merged]
            self._files.update(new)
            self._current = snapshot
            self._version += 1

    @property
    def version(self) -> int:
        """Counts the versions that there has been room made for."""
        return self._version

    def drop(self, files: Iterable[Span]) -> None:
        """Nobody can read these files any more: their memory is given back. Who waits for them all the same gets ESTALE."""
        with self._lock:
            parts: dict[int, tuple[Segment, list[tuple[int, int]]]] = {}
            gone = set()
            for file in files:
                if file.length and self._files.pop(file.offset, None) is not None:
                    gone.add(file)
                    self._errnos.pop(file.offset, None)
                    for segment, start, end in self._parts(file.offset, file.end):
                        parts.setdefault(segment.start, (segment, []))[1].append((start, end))
            for segment, dead in parts.values():
                segment.drop(dead)
            self._remove({segment.start for segment, _ in parts.values() if not segment.live.total})
            unlucky = self._take_waiters(lambda waiter: waiter.file in gone) if gone else []
        _fail(unlucky, errno.ESTALE)

    def _remove(self, starts: set[int]) -> None:
        if not starts:
            return
        for segment in self._segments:
            if segment.start in starts:
                if segment.memory is not None and segment.memory.fd is not None:
                    self._descriptors_left += 1
                self._asked.difference_update(piece.offset for piece in segment.pieces(segment.start, segment.end))
                segment.close()
        self._segments = [segment for segment in self._segments if segment.start not in starts]
        self._starts = [segment.start for segment in self._segments]

    # ------------------------------------------------------------------------------------------------------------ delivery

    def connect(self, wanted: Wanted, expected: Expected | None = None) -> None:
        """There is a source (again).

        Args:
            wanted: called with offset and length of each piece that a reader waits for and that nobody has asked for yet; from the
                reader's thread, so it must not block. Each call is to be followed by `put`, `failed` or `retry` of the piece.
            expected: called, as `wanted`, with pieces that a reader of a big file will want when he goes on. May be ignored.
        """
        with self._lock:
            self._wanted, self._expected = wanted, expected

    def disconnect(self, errno: int) -> None:
        """The source is gone: who waits, and who comes later for what is not here, gets `errno`, until `connect`."""
        with self._lock:
            self._wanted, self._expected, self._severed = None, None, errno
            self._asked.clear()
            unlucky = self._take_waiters(lambda _: True)
        _fail(unlucky, errno)

    def put(self, offset: int, data: memoryview) -> None:
        """Bytes have come: keep those that are wanted and not here, and wake who waits for them, in the order of the pieces.

        Raises:
            OSError: there is no memory for them.
        """
        end = offset + len(data)
        with self._lock:
            gaps = [(segment, low, high) for segment, start, stop in self._parts(offset, end) for low, high in segment.lacking(start, stop)]
            for segment, _, _ in gaps:
                self._allocate(segment)
            writers = [segment.writer(low, high) for segment, low, high in gaps]
        try:
            for (_, low, high), writer in zip(gaps, writers, strict=True):
                writer.write(data[low - offset : high - offset])
        finally:
            for writer in writers:
                writer.close()
        self._arrived(offset, end)

    def put_zeros(self, offset: int, length: int) -> None:
        """As `put`, of so many zeros, which take no memory."""
        with self._lock:
            for segment, _, _ in self._parts(offset, offset + length):
                self._allocate(segment)
        self._arrived(offset, offset + length, as_zeros=True)

    def _allocate(self, segment: Segment) -> None:
        if segment.memory is None:
            memory = segment.allocated(keep_fd=segment.is_big and self._descriptors_left > 0)
            self._descriptors_left -= memory.fd is not None

    def _arrived(self, start: int, end: int, *, as_zeros: bool = False) -> None:
        ready: list[tuple[Later, list[memoryview] | int]] = []
        with self._lock:
            for segment, low, high in list(self._parts(start, end)):
                segment.arrive(low, high, as_zeros=as_zeros)
                if self._asked or self._waiting:
                    for piece in segment.pieces(low, high):
                        if not segment.lacking(piece.offset, piece.end):
                            self._asked.discard(piece.offset)
                        for waiter in self._waiting.pop(piece.offset, ()):
                            self._look_again(waiter, ready)
        _give(ready)

    def _look_again(self, waiter: _Waiter, ready: list[tuple[Later, list[memoryview] | int]]) -> None:
        if waiter.later.cancelled:
            return
        found = self._found(waiter.file, waiter.start, waiter.end)
        if found is not None:
            ready.append((waiter.later, found))
        else:
            first = next(self._lacking_pieces(waiter.start, waiter.end))
            self._waiting.setdefault(first.offset, []).append(waiter)

    def failed(self, path: str, errno: int) -> None:
        """A file is not what the current version says: whoever reads it gets `errno`, until the next version."""
        with self._lock:
            row = self._current.find(path) if self._current is not None else None
            span = self._current.span(row) if self._current is not None and row is not None else None
        if span is not None:
            self.failed_at(span.offset, span.length, errno)

    def failed_at(self, offset: int, length: int, errno: int, *, version: int | None = None) -> None:
        """As `failed`, for every file of any version with a byte in this range.

        Args:
            version: the `version` that was shown when these bytes were asked for. When there is a newer one by now, which may have the
                file as it is, the news is old: as `retry`.
        """
        if version is not None and version != self._version:
            self.retry(offset, length)
            return
        with self._lock:
            order = sorted(self._files)
            at = max(bisect_right(order, offset) - 1, 0)
            hit = set()
            while at < len(order) and order[at] < offset + length:
                if order[at] + self._files[order[at]] > offset:
                    hit.add(order[at])
                at += 1
            self._errnos.update(dict.fromkeys(hit, errno))
            for start in hit:  # the next version may have the file, and then somebody has to ask anew
                self._unask(start, start + self._files[start])
            unlucky = self._take_waiters(lambda waiter: waiter.file.offset in hit)
        _fail(unlucky, errno)

    def retry(self, offset: int, length: int) -> None:
        """A delivery has come to nothing: ask again for the pieces in this range that readers wait for, forget the others."""
        with self._lock:
            self._unask(offset, offset + length)
            waiters = [waiter for waiters in self._waiting.values() for waiter in waiters if not waiter.later.cancelled]
            again = [piece for waiter in waiters for piece in self._unasked(waiter.start, waiter.end)]
            wanted = self._wanted
        _ask(wanted, again)

    def want(self, offset: int, length: int) -> None:
        """Ask for what of this range is not here and has not been asked for, before anybody reads it."""
        with self._lock:
            pieces, wanted = self._unasked(offset, offset + length) if self._wanted else [], self._wanted
        _ask(wanted, pieces)

    def missing(self, offset: int, length: int) -> list[Span]:
        """What of this range belongs to a file and is not here, in order."""
        with self._lock:
            gaps = [gap for segment, start, end in self._parts(offset, offset + length) for gap in segment.lacking(start, end)]
        return [Span(start, end - start) for start, end in gaps]

    def lacking(self, offset: int, length: int) -> list[Span]:
        """The pieces of this range of which something is missing, in order."""
        with self._lock:
            return list(self._lacking_pieces(offset, offset + length))

    def lacks(self, offset: int, length: int) -> bool:
        """Whether something of this range is missing and may still come: not that of files that have failed."""
        with self._lock:
            gaps = [gap for segment, start, end in self._parts(offset, offset + length) for gap in segment.lacking(start, end)]
            failed = [(start, start + self._files[start]) for start in self._errnos]
        return any(not any(low <= start and end <= high for low, high in failed) for start, end in gaps)

    def offer(self, offset: int, length: int) -> Offer | None:
        """What another host may have of a range; None: some of it is still to come."""
        end = offset + length
        with self._lock:
            lost = [(low, self._files[low] + low) for low in self._errnos if low < end and offset < low + self._files[low]]
            parts: list[tuple[int, memoryview]] = []
            holes: list[tuple[int, int]] = []
            for segment, start, stop in self._parts(offset, end):
                if any(not any(low <= gap[0] and gap[1] <= high for low, high in lost) for gap in segment.lacking(start, stop)):
                    return None
                here = segment.present.within(start, stop)
                parts += [(at, segment.view(at, to)) for low, high in here for at, to in segment.zeros.gaps(low, high)]
                holes += [(low, high - low) for low, high in segment.zeros.within(start, stop)]
            return Offer(parts, [(max(low, offset), min(high, end) - max(low, offset)) for low, high in sorted(lost)], tuple(holes))

    def pieces(self, files: Iterable[Span]) -> tuple[list[Span], list[Span]]:
        """The pieces of these files: those with small files, and those of big ones, each in the order of the files."""
        with self._lock:
            small: dict[int, Span] = {}
            big: dict[int, Span] = {}
            for span in files:
                for segment, start, end in self._parts(span.offset, span.end):
                    into = big if segment.is_big else small
                    into.update((piece.offset, piece) for piece in segment.pieces(start, end))
        return list(small.values()), list(big.values())

    def count_kept(self, num_bytes: int) -> None:
        """Account for bytes that were copied from an older version."""
        with self._lock:
            self._kept_bytes += num_bytes

    # ------------------------------------------------------------------------------------------------------------- reading

    def read(self, file: Span, offset: int, size: int, later: Later) -> list[memoryview] | int | Later:
        """Bytes of a file.

        Args:
            file: where it lies.
            offset: in the file.
            size: most bytes; beyond the end of the file there are none.

        Returns:
            Views to read from, an errno, or `later` when some of the bytes are still to come.
        """
        start, end = file.offset + offset, min(file.offset + offset + size, file.end)
        if start >= end:
            return []
        with self._lock:
            found = self._found(file, start, end)
            wanted, expected = self._wanted, self._expected
            if found is None and wanted is None:
                return self._severed
            pieces = [] if found is not None else self._parked(_Waiter(file, start, end, later))
            coming = self._coming(start, end) if expected is not None and file.length >= BIG_FILE_THRESHOLD else []
        _ask(wanted, pieces)
        if coming and expected is not None:
            expected(coming)
        return later if found is None else found

    def peek(self, span: Span) -> list[memoryview] | None:
        """The bytes of a range, if all of them are here."""
        with self._lock:
            parts = list(self._parts(span.offset, span.end))
            if sum(end - start for _, start, end in parts) != span.length:
                return None
            if not all(segment.present.covers(start, end) for segment, start, end in parts):
                return None
            return [view for segment, start, end in parts for view in segment.views(start, end)]

    def whole(self, file: Span) -> list[memoryview]:
        """All bytes of a file, when a reader would get them at once; else none."""
        with self._lock:
            found = self._found(file, file.offset, file.end)
        return found if isinstance(found, list) else []

    def backing_fd(self, file: Span) -> int | None:
        """A descriptor whose bytes are those of a big file, once all of them are here; None: not yet, or there is none."""
        with self._lock:
            for segment, start, end in self._parts(file.offset, file.end):
                if segment.is_big and segment.memory is not None and segment.present.covers(start, end) and file.offset not in self._errnos:
                    return segment.memory.fd
        return None

    def statistics(self) -> StoreStatistics:
        """What is here. Cost: O(segments)."""
        with self._lock:
            present = sum(segment.present.total for segment in self._segments)
            resident = present - sum(segment.zeros.total for segment in self._segments)
            live = sum(segment.live.total for segment in self._segments)
            fds = sum(segment.memory is not None and segment.memory.fd is not None for segment in self._segments)
            waiting = sum(not waiter.later.cancelled for waiters in self._waiting.values() for waiter in waiters)
            return StoreStatistics(resident, live - present, self._kept_bytes, len(self._segments), fds, waiting)

    def close(self) -> None:
        """Give all memory back; who waits gets EIO, who comes later ESTALE. Views in use stay valid."""
        with self._lock:
            self._wanted = None
            self._files.clear()
            self._remove(set(self._starts))
            unlucky = self._take_waiters(lambda _: True)
        _fail(unlucky, errno.EIO)

    # ------------------------------------------------------------------------------------------------ under the lock

    def _parts(self, start: int, end: int) -> Iterator[tuple[Segment, int, int]]:
        """The segments that have a part of [start, end), with that part."""
        at = max(bisect_right(self._starts, start) - 1, 0)
        while at < len(self._segments) and self._segments[at].start < end:
            segment = self._segments[at]
            low, high = max(start, segment.start), min(end, segment.end)
            if low < high:
                yield segment, low, high
            at += 1

    def _found(self, file: Span, start: int, end: int) -> list[memoryview] | int | None:
        """The bytes, an errno, or None: not all of them are here."""
        if self._files.get(file.offset) != file.length:
            return errno.ESTALE
        if self._errnos and file.offset in self._errnos:
            return self._errnos[file.offset]
        at = bisect_right(self._starts, start) - 1
        if end <= self._segments[at].end:  # as nearly always
            parts: Iterable[tuple[Segment, int, int]] = ((self._segments[at], start, end),)
        else:
            parts = self._parts(start, end)
        views = []
        for segment, low, high in parts:
            if not segment.present.covers(low, high):
                return None
            self._allocate(segment)
            views += segment.views(low, high)
        return views

    def _lacking_pieces(self, start: int, end: int) -> Iterator[Span]:
        for segment, low, high in self._parts(start, end):
            for piece in segment.pieces(low, high):
                if segment.lacking(max(low, piece.offset), min(high, piece.end)):
                    yield piece

    def _unasked(self, start: int, end: int) -> list[Span]:
        """Pieces that [start, end) lacks and nobody has asked for; they count as asked for from now on."""
        pieces = [piece for piece in self._lacking_pieces(start, end) if piece.offset not in self._asked]
        self._asked.update(piece.offset for piece in pieces)
        return pieces

    def _parked(self, waiter: _Waiter) -> list[Span]:
        """Have a reader wait; the pieces to ask for."""
        first = next(self._lacking_pieces(waiter.start, waiter.end))
        self._waiting.setdefault(first.offset, []).append(waiter)
        return self._unasked(waiter.start, waiter.end)

    def _coming(self, start: int, end: int) -> list[Span]:
        """What has to be announced for a reader of [start, end) of a big file; nothing for one who jumps about."""
        segment = next((segment for segment, _, _ in self._parts(start, end)), None)
        if segment is None or segment.present.total == segment.live.total:
            return []
        piece = next(segment.pieces(start, end)).offset
        if piece > segment.start and not segment.present.covers(piece - 1, piece):
            return []
        low = segment.expected if end <= segment.expected <= end + READ_AHEAD_BYTES else end
        high = min(end + READ_AHEAD_BYTES, segment.end)
        if low >= high or (low - end > READ_AHEAD_BYTES // 2 and high < segment.end):
            return []
        segment.expected = high
        return list(self._lacking_pieces(low, high))

    def _unask(self, start: int, end: int) -> None:
        if self._asked:
            for segment, low, high in self._parts(start, end):
                self._asked.difference_update(piece.offset for piece in segment.pieces(low, high))

    def _take_waiters(self, unlucky: Callable[[_Waiter], bool]) -> list[_Waiter]:
        taken = []
        for piece in list(self._waiting):
            waiters = self._waiting.pop(piece)
            stay = [waiter for waiter in waiters if not unlucky(waiter) and not waiter.later.cancelled]
            taken += [waiter for waiter in waiters if unlucky(waiter)]
            if stay:
                self._waiting[piece] = stay
        return taken


def _give(ready: Sequence[tuple[Later, list[memoryview] | int]]) -> None:
    for later, found in ready:
        if isinstance(found, int):
            later.fail(found)
        else:
            later.answer(found)


def _fail(waiters: Sequence[_Waiter], errno: int) -> None:
    for waiter in waiters:
        waiter.later.fail(errno)


def _ask(wanted: Wanted | None, pieces: Sequence[Span]) -> None:
    if wanted is not None:
        for piece in pieces:
            wanted(piece.offset, piece.length)


def _other_source(span: Span) -> ValueError:
    return ValueError(
        explain(
            f"a file at {span.offset}, {span.length} bytes long, lies where this store has another one",
            next="the snapshot comes from another source, or from one that was started anew: use a new store for it",
        )
    )
