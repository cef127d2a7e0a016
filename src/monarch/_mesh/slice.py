"""Slices: which base ranks a mesh covers, as an offset and one (size, stride) pair per dimension.

Pure. A rank here is a *base* rank: it counts in the mesh that this one was cut from.

Rules of this file:
    1. A slice never lists its ranks unless asked; an evenly spaced one answers with a `range`.
    2. Users can only construct slices whose strides nest (`_check_nested`). Cutting with a step makes others;
       they come from `NDSlice._cut` and keep the one property that lookups need: in a dimension longer than 1
       the stride exceeds the span of all dimensions with a smaller stride.

Read next: `shape` for the labels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from operator import index as as_int
from typing import overload


class NDSlice:
    """Maps row-major positions to base ranks: `offset + sum(coordinate * stride)`.

    Args:
        offset: base rank of the first element, >= 0.
        sizes: elements per dimension, outermost first.
        strides: distance in base ranks between neighbours, one per dimension.

    Raises:
        ValueError: a negative number, unequal lengths, or strides that do not nest.
    """

    __slots__ = ("_offset", "_ranks", "_sizes", "_strides")

    _offset: int
    _sizes: tuple[int, ...]
    _strides: tuple[int, ...]
    _ranks: range | tuple[int, ...] | None

    def __init__(self, *, offset: int, sizes: Sequence[int], strides: Sequence[int]) -> None:
        self._offset = as_int(offset)
        self._sizes = tuple(map(as_int, sizes))
        self._strides = tuple(map(as_int, strides))
        self._ranks = None
        _check_nested(self._offset, self._sizes, self._strides)

    @staticmethod
    def _cut(offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> NDSlice:
        """A slice that was cut from a valid one, unchecked (rule 2)."""
        new = NDSlice.__new__(NDSlice)
        new._offset = offset
        new._sizes = sizes
        new._strides = strides
        new._ranks = None
        return new

    @staticmethod
    def new_row_major(sizes: Sequence[int]) -> NDSlice:
        """The slice of these sizes that covers the ranks from 0 without a gap."""
        counts = tuple(map(as_int, sizes))
        if any(size < 0 for size in counts):
            raise ValueError(f"invalid sizes {list(counts)}: a size is at least 0")
        return NDSlice._cut(0, counts, row_major_strides(counts))

    @staticmethod
    def from_list(ranks: Iterable[int]) -> list[NDSlice]:
        """Cover `ranks` (any order, duplicates count once) with few one-dimensional slices.

        Cost: O(n log n). Greedy from the lowest rank: each slice takes the longest evenly spaced run.
        """
        todo = sorted(set(map(as_int, ranks)))
        slices = []
        start = 0
        while start < len(todo):
            stop = _end_of_run(todo, start)
            stride = todo[start + 1] - todo[start] if stop - start > 1 else 1
            slices.append(NDSlice(offset=todo[start], sizes=[stop - start], strides=[stride]))
            start = stop
        return slices

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self._sizes)

    @property
    def offset(self) -> int:
        """Base rank of the first element."""
        return self._offset

    @property
    def sizes(self) -> list[int]:
        """Elements per dimension, outermost first."""
        return list(self._sizes)

    @property
    def strides(self) -> list[int]:
        """Distance in base ranks between neighbours, per dimension."""
        return list(self._strides)

    @property
    def is_dense(self) -> bool:
        """True when the strides are those of a row-major array of these sizes; any offset."""
        return self._strides == row_major_strides(self._sizes)

    def ranks(self) -> range | tuple[int, ...]:
        """All base ranks in row-major order: a `range` when they are evenly spaced, else a tuple.

        Cost: computed once per slice; O(dims) for a range, O(len) for a tuple.
        """
        if self._ranks is None:
            self._ranks = _ranks_of(self._offset, self._sizes, self._strides)
        return self._ranks

    def nditem(self, coords: Sequence[int]) -> int:
        """The base rank at `coords`, one integer per dimension; IndexError when they lie outside."""
        inside = len(coords) == self.ndim and all(0 <= c < size for c, size in zip(coords, self._sizes, strict=True))
        if not inside:
            raise IndexError(f"coordinates {list(coords)} out of range for sizes {self.sizes}")
        return self._offset + sum(c * stride for c, stride in zip(coords, self._strides, strict=True))

    def coordinates(self, value: int) -> list[int]:
        """The coordinates of base rank `value`; ValueError when the slice does not cover it. Cost: O(dims log dims)."""
        rest = value - self._offset
        coords = [0] * self.ndim
        # Largest stride first: rule 2 makes the greedy choice the only one. Dimensions of one element have no say.
        for dim in sorted(range(self.ndim), key=self._strides.__getitem__, reverse=True):
            if self._sizes[dim] > 1:
                coords[dim] = min(max(rest, 0) // self._strides[dim], self._sizes[dim] - 1)
                rest -= coords[dim] * self._strides[dim]
        if rest != 0 or not len(self):
            raise ValueError(f"value {value} not in {self!r}")
        return coords

    def index(self, value: int) -> int:
        """The row-major position of base rank `value`; ValueError when the slice does not cover it."""
        position = 0
        for coord, size in zip(self.coordinates(value), self._sizes, strict=True):
            position = position * size + coord
        return position

    def get(self, index: int) -> int:
        """The base rank at row-major position `index`, as `self[index]`, but ValueError past the end."""
        try:
            return self[index]
        except IndexError as exc:
            raise ValueError(str(exc)) from None

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            return tuple(self.ranks()[index])
        position = as_int(index)
        if position < 0:
            raise TypeError(f"negative index {position}; a Slice counts from 0, so the last one is index {len(self) - 1}")
        if position >= len(self):
            raise IndexError(f"index {position} out of range (len={len(self)})")
        if self._ranks is not None:
            return self._ranks[position]
        rank = self._offset
        for size, stride in zip(reversed(self._sizes), reversed(self._strides), strict=True):
            position, coord = divmod(position, size)
            rank += coord * stride
        return rank

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int):
            return False
        try:
            self.coordinates(value)
        except ValueError:
            return False
        return True

    def __iter__(self) -> Iterator[int]:
        return iter(self.ranks())

    def __len__(self) -> int:
        return math.prod(self._sizes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NDSlice):
            return NotImplemented
        return self is other or self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"Slice {{ offset: {self._offset}, sizes: {self.sizes}, strides: {self.strides} }}"

    def __reduce__(self) -> tuple[object, ...]:
        return NDSlice._cut, self._key()

    def _key(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        return self._offset, self._sizes, self._strides


Slice = NDSlice
"""The name that the native binding of the peer uses."""


def iter_ranks(ranks: NDSlice | Iterable[NDSlice]) -> Iterator[int]:
    """The base ranks of one slice or of several, each rank once, in the order of first appearance."""
    if isinstance(ranks, NDSlice):
        yield from ranks
        return
    seen: set[int] = set()
    for part in ranks:
        for rank in part:
            if rank not in seen:
                seen.add(rank)
                yield rank


def row_major_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Strides of an array of these sizes without gaps, the last dimension fastest."""
    strides = [1] * len(sizes)
    for dim in range(len(sizes) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * sizes[dim]
    return tuple(strides)


def _check_nested(offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Refuse with ValueError what a mesh can not be: see the rules of the public constructor."""
    if len(sizes) != len(strides):
        raise ValueError(f"invalid dims: expected {len(sizes)} strides for sizes {list(sizes)}, got {len(strides)}")
    if offset < 0 or any(size < 0 for size in sizes) or any(stride < 1 for stride in strides):
        raise ValueError(
            f"invalid slice: offset {offset}, sizes {list(sizes)} and strides {list(strides)}; offset and sizes are at least 0, strides 1"
        )
    dims = sorted(zip(strides, sizes, strict=True))
    for (inner_stride, inner_size), (stride, size) in pairwise(dims):
        if stride % inner_stride:
            raise ValueError(f"nonrectangular shape: stride {stride} is not a multiple of stride {inner_stride}")
        if stride == inner_stride and inner_size != 1 and size != 1:
            raise ValueError(f"nonunique strides: two dimensions of sizes {inner_size} and {size} share stride {stride}")
        if stride < inner_stride * inner_size:
            raise ValueError(f"stride {stride} must be larger than size of previous space {inner_stride * inner_size}")


def _ranks_of(offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> range | tuple[int, ...]:
    """Base ranks in row-major order, after merging each dimension that continues its inner neighbour."""
    merged: list[tuple[int, int]] = []  # (size, stride), innermost first
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 0:
            return range(0)
        if size == 1:
            continue
        if merged and stride == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        else:
            merged.append((size, stride))
    if not merged:
        return range(offset, offset + 1)
    size, stride = merged[0]
    if len(merged) == 1:
        return range(offset, offset + size * stride, stride)
    starts = [offset]
    for outer_size, outer_stride in reversed(merged[1:]):
        starts = [start + step * outer_stride for start in starts for step in range(outer_size)]
    return tuple(rank for start in starts for rank in range(start, start + size * stride, stride))


def _end_of_run(ranks: Sequence[int], start: int) -> int:
    """One past the last index of the evenly spaced run that begins at `start`."""
    stop = start + 1
    if stop < len(ranks):
        stride = ranks[stop] - ranks[start]
        while stop < len(ranks) and ranks[stop] - ranks[stop - 1] == stride:
            stop += 1
    return stop
