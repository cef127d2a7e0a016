"""Ranges: a set of integers held as disjoint half-open intervals. Which bytes are here, which are wanted.

Pure.

Read next: `store.py`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple


class Span(NamedTuple):
    """Bytes `offset` to `offset + length` of the address space of a pushed directory."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


span_of: Callable[[tuple[int, int]], Span] = partial(tuple.__new__, Span)
"""`Span(*pair)` in a third of the time, for where there is one for every file."""


class Ranges:
    """Disjoint intervals [start, end) in order, joined where they touch. Cost of each operation: O(log n) and one move of a list."""

    __slots__ = ("_ends", "_starts", "total")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.total = 0
        """How many integers are in it."""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(list(zip(self._starts, self._ends, strict=True)))

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, start: int, end: int) -> int:
        """Put [start, end) in; how many of it are new."""
        if start >= end:
            return 0
        if not self._ends or start >= self._ends[-1]:  # in order, as nearly always
            if self._ends and start == self._ends[-1]:
                self._ends[-1] = end
            else:
                self._starts.append(start)
                self._ends.append(end)
            self.total += end - start
            return end - start
        first, last = bisect_left(self._ends, start), bisect_right(self._starts, end)
        had = sum(self._ends[at] - self._starts[at] for at in range(first, last))
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last], self._ends[first:last] = [start], [end]
        new = end - start - had
        self.total += new
        return new

    def remove(self, start: int, end: int) -> int:
        """Take [start, end) out; how many of it were in."""
        first, last = bisect_right(self._ends, start), bisect_left(self._starts, end)
        if start >= end or first >= last:
            return 0
        had = sum(self._ends[at] - self._starts[at] for at in range(first, last))
        low, high = self._starts[first], self._ends[last - 1]
        rest = [(a, b) for a, b in ((low, min(start, high)), (max(end, low), high)) if a < b]
        self._starts[first:last], self._ends[first:last] = [a for a, _ in rest], [b for _, b in rest]
        gone = had - sum(b - a for a, b in rest)
        self.total -= gone
        return gone

    def covers(self, start: int, end: int) -> bool:
        """Whether all of [start, end) is in it."""
        at = bisect_right(self._starts, start) - 1
        return start >= end or (at >= 0 and self._ends[at] >= end)

    def within(self, start: int, end: int) -> list[tuple[int, int]]:
        """What of [start, end) is in it, as intervals in order."""
        first, last = bisect_right(self._ends, start), bisect_left(self._starts, end)
        return [(max(start, self._starts[at]), min(end, self._ends[at])) for at in range(first, last)]

    def gaps(self, start: int, end: int) -> list[tuple[int, int]]:
        """What of [start, end) is not in it, as intervals in order."""
        found = []
        for low, high in self.within(start, end):
            if start < low:
                found.append((start, low))
            start = high
        if start < end:
            found.append((start, end))
        return found

    def gap_around(self, start: int, end: int) -> tuple[int | None, int | None]:
        """The gap that holds [start, end), which must not be in it; None where nothing bounds it."""
        at = bisect_right(self._ends, start)
        return (self._ends[at - 1] if at else None), (self._starts[at] if at < len(self._starts) else None)
