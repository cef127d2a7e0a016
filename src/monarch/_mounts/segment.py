"""Segments: the address space cut where memory is cut: one for each big file, one a block for the small files in it.

Rules of this file:
    1. A segment takes memory when its first byte is about to be written, not before.
    2. Bytes that are `present` never change: they may be on their way to a reader, or be read by the kernel itself.
    3. `present` is inside of `live`: what no file of any version has is not kept.
    4. What came as a hole takes no memory, not even when it is read: a look at pages of a mapping that were never written makes them.

Read next: `store.py`, which locks; nothing here does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from monarch._mounts.hashing import PIECE_BYTES
from monarch._mounts.index import BIG_FILE_THRESHOLD, BLOCK_SIZE
from monarch._mounts.memory import Memory, Writer
from monarch._mounts.ranges import Ranges, Span

ZEROS = memoryview(bytes(PIECE_BYTES))
"""What is read of holes."""


class Segment:
    """Addresses `start` to `end` in one piece of memory."""

    __slots__ = ("end", "expected", "is_big", "live", "memory", "present", "start", "zeros")

    def __init__(self, start: int, end: int, *, is_big: bool) -> None:
        self.start = start
        self.end = end
        self.is_big = is_big
        """One big file, all of it."""
        self.live = Ranges()
        """What belongs to a file of a version that somebody can read."""
        self.present = Ranges()
        self.zeros = Ranges()
        """What of it has come as a hole."""
        self.memory: Memory | None = None
        self.expected = start
        """Up to here readers have been announced."""

    def writer(self, start: int, end: int) -> Writer:
        """Writes the bytes at these addresses, also when the segment is closed meanwhile."""
        return self.allocated(keep_fd=False).writer(start - self.start, end - self.start)

    def view(self, start: int, end: int) -> memoryview:
        """The bytes at these addresses."""
        return self.allocated(keep_fd=False).view[start - self.start : end - self.start]

    def views(self, start: int, end: int) -> list[memoryview]:
        """The bytes at these addresses, which must be present, for who only reads; holes are parts of `ZEROS`."""
        if not self.zeros:
            return [self.view(start, end).toreadonly()]
        found = []
        for low, high in self.zeros.within(start, end):
            if start < low:
                found.append(self.view(start, low).toreadonly())
            found += [ZEROS[: min(len(ZEROS), high - at)] for at in range(low, high, len(ZEROS))]
            start = high
        return [*found, self.view(start, end).toreadonly()] if start < end else found

    def allocated(self, *, keep_fd: bool) -> Memory:
        """The memory, made now if need be."""
        if self.memory is None:
            self.memory = Memory(self.end - self.start, keep_fd=keep_fd)
        return self.memory

    def arrive(self, start: int, end: int, *, as_zeros: bool = False) -> None:
        """These bytes are here now, or are zeros that nobody has written."""
        for low, high in self.live.within(start, end):
            if as_zeros:
                for gap in self.present.gaps(low, high):
                    self.zeros.add(*gap)
            self.present.add(low, high)

    def lacking(self, start: int, end: int) -> list[tuple[int, int]]:
        """What of [start, end) is wanted and not here."""
        return [gap for low, high in self.live.within(start, end) for gap in self.present.gaps(low, high)]

    def pieces(self, start: int, end: int) -> Iterator[Span]:
        """The pieces that have a part in [start, end); they are counted from the beginning of the segment."""
        at = self.start + (start - self.start) // PIECE_BYTES * PIECE_BYTES
        while at < end:
            yield Span(at, min(PIECE_BYTES, self.end - at))
            at += PIECE_BYTES

    def drop(self, parts: Iterable[tuple[int, int]]) -> None:
        """Nobody can read these bytes any more: give back the pages that hold nothing else."""
        parts = list(parts)
        for start, end in parts:
            self.live.remove(start, end)
            self.present.remove(start, end)
            self.zeros.remove(start, end)
        if self.memory is not None:
            for low, high in {self.live.gap_around(start, end) for start, end in parts}:
                first, last = (self.start if low is None else low), (self.end if high is None else high)
                self.memory.discard(first - self.start, last - self.start)

    def close(self) -> None:
        """Let go of the memory."""
        if self.memory is not None:
            self.memory.close()
            self.memory = None


def segments_of(files: Iterable[Span]) -> list[Segment]:
    """The segments of files, given in the order of their addresses; in order as well."""
    found: list[Segment] = []
    small: Segment | None = None
    block_end = 0
    for span in files:
        start, length = span
        end = start + length
        if length >= BIG_FILE_THRESHOLD:
            segment = Segment(start, end, is_big=True)
            segment.live.add(start, end)
            found.append(segment)
            small = None
            continue
        parts = ((start, end),) if small is not None and end <= block_end else in_blocks(span)
        for low, high in parts:
            if small is None or low >= block_end:
                small = Segment(low, high, is_big=False)
                block_end = (low // BLOCK_SIZE + 1) * BLOCK_SIZE
                found.append(small)
            small.end = high
            small.live.add(low, high)
    return found


def in_blocks(span: Span) -> Iterator[tuple[int, int]]:
    """The parts of a span, cut at block boundaries."""
    start = span.offset
    while start < span.end:
        end = min(span.end, (start // BLOCK_SIZE + 1) * BLOCK_SIZE)
        yield start, end
        start = end
