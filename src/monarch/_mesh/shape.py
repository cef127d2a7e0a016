"""Extents, points, shapes and regions: slices whose dimensions have names.

Pure. `Extent` says how long each dimension is, `Point` is one place in it, `Shape` adds which base ranks are meant,
`Region` is a shape as a part of a larger mesh.

Rules of this file:
    1. Labels are unique, and stay as the user wrote them.
    2. A rank counts row-major inside the thing at hand; a *base* rank counts in the mesh it was cut from.
    3. All classes are values: immutable, hashable, compared and pickled by their parts.

Read next: `slice` for the arithmetic, `mesh` for what users call.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Iterator, Mapping, Sequence
from operator import index as as_int
from typing import Any

from monarch._base.errors import did_you_mean
from monarch._mesh.slice import NDSlice, Slice, iter_ranks

__all__ = ["DimensionError", "Extent", "NDSlice", "Point", "Region", "Shape", "Slice", "iter_ranks"]


class DimensionError(KeyError, ValueError):
    """A label that the extent at hand does not have. `args` is `(label, extent)`.

    A KeyError for `Mapping` code such as `get` and `in`; a ValueError because scripts catch that.
    """

    def __init__(self, label: object, extent: Extent) -> None:
        super().__init__(label, extent)

    def __str__(self) -> str:
        # Built here because `get` and `in` raise this and throw it away; also KeyError would quote the text.
        label, extent = self.args
        return f"Dimension {label!r} not found in {extent}{nearest_label(label, extent)}"


class Extent(Mapping[str, int]):
    """Ordered map from label to size, such as {hosts: 4, gpus: 8}.

    Args:
        labels: one name per dimension, outermost first.
        sizes: elements per dimension.

    Raises:
        ValueError: unequal lengths, a label twice, or a negative size.
    """

    __slots__ = ("_labels", "_sizes")

    _labels: tuple[str, ...]
    _sizes: tuple[int, ...]

    def __init__(self, labels: Sequence[str], sizes: Sequence[int]) -> None:
        self._labels = checked_labels(labels)
        self._sizes = tuple(map(as_int, sizes))
        if len(self._labels) != len(self._sizes):
            counts = f"{len(self._labels)} != {len(self._sizes)}"
            raise ValueError(f"label/sizes dimension mismatch: {counts}, labels {list(self._labels)} but sizes {list(self._sizes)}")
        if any(size < 0 for size in self._sizes):
            raise ValueError(f"invalid sizes {list(self._sizes)} for {list(self._labels)}: a size is at least 0")

    @staticmethod
    def _of(labels: tuple[str, ...], sizes: tuple[int, ...]) -> Extent:
        """An extent from parts that are known to fit."""
        new = Extent.__new__(Extent)
        new._labels = labels
        new._sizes = sizes
        return new

    @property
    def labels(self) -> list[str]:
        """Names of the dimensions, outermost first."""
        return list(self._labels)

    @property
    def sizes(self) -> list[int]:
        """Elements per dimension, in the order of `labels`."""
        return list(self._sizes)

    @property
    def nelements(self) -> int:
        """Product of the sizes; 1 without dimensions."""
        return math.prod(self._sizes)

    @property
    def region(self) -> Region:
        """The region that covers all of this extent."""
        return Region(self._labels, NDSlice.new_row_major(self._sizes))

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """The coordinates of row-major `rank`, in the order of `labels`; ValueError when it lies outside."""
        if not 0 <= rank < self.nelements:
            raise ValueError(f"rank {rank} out of range for {self} (nelements={self.nelements})")
        coords = []
        for size in reversed(self._sizes):
            rank, coord = divmod(rank, size)
            coords.append(coord)
        return tuple(reversed(coords))

    def __getitem__(self, label: str) -> int:
        return self._sizes[dimension_of(self, label)]

    def __contains__(self, label: object) -> bool:
        return label in self._labels

    def __iter__(self) -> Iterator[str]:
        return iter(self._labels)

    def __len__(self) -> int:
        return len(self._labels)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Extent):
            return NotImplemented
        return self._sizes == other._sizes and self._labels == other._labels

    def __hash__(self) -> int:
        return hash((self._labels, self._sizes))

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{label}: {size}" for label, size in zip(self._labels, self._sizes, strict=True)) + "}"

    def __reduce__(self) -> tuple[object, ...]:
        return Extent._of, (self._labels, self._sizes)


class Point(Mapping[str, int]):
    """One place in an extent: a map from label to coordinate.

    Args:
        rank: row-major position in `extent`. One that lies outside is noticed at the first use of a coordinate (ValueError).
        extent: the space it lies in.
    """

    __slots__ = ("_coords", "_extent", "_rank")

    _coords: tuple[int, ...] | None

    def __init__(self, rank: int, extent: Extent) -> None:
        if not isinstance(extent, Extent):
            raise TypeError(f"Point(rank, extent) needs an Extent, not {type(extent).__name__}; a shape or mesh has one as its .extent")
        self._rank = rank
        self._extent = extent
        self._coords = None

    @property
    def rank(self) -> int:
        """Row-major position in `extent`."""
        return self._rank

    @property
    def extent(self) -> Extent:
        """The space this point lies in."""
        return self._extent

    def size(self, label: str) -> int:
        """Length of dimension `label`."""
        return self._extent[label]

    def __getitem__(self, label: str) -> int:
        return self._coordinates()[dimension_of(self._extent, label)]

    def __contains__(self, label: object) -> bool:
        return label in self._extent

    def __iter__(self) -> Iterator[str]:
        return iter(self._extent)

    def __len__(self) -> int:
        return len(self._extent)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Point):
            return NotImplemented
        return self._rank == other._rank and self._extent == other._extent

    def __hash__(self) -> int:
        return hash((self._rank, self._extent))

    def __repr__(self) -> str:
        sizes = self._extent.items()
        return "{" + ", ".join(f"{label!r}: {c}/{size}" for c, (label, size) in zip(self._coordinates(), sizes, strict=True)) + "}"

    def __reduce__(self) -> tuple[object, ...]:
        return Point, (self._rank, self._extent)

    def _coordinates(self) -> tuple[int, ...]:
        if self._coords is None:
            self._coords = self._extent.coordinates(self._rank)
        return self._coords


class Shape:
    """A slice with a name for each dimension.

    Raises:
        ValueError: not one label per dimension, or a label twice.
    """

    __slots__ = ("_extent", "_labels", "_slice")

    _labels: tuple[str, ...]
    _slice: NDSlice
    _extent: Extent

    def __init__(self, labels: Sequence[str], slice: NDSlice) -> None:
        self._labels = checked_labels(labels)
        self._slice = slice
        if not isinstance(slice, NDSlice):
            raise TypeError(f"Shape(labels, slice) needs a Slice, not {type(slice).__name__}; make one with Slice.new_row_major(sizes)")
        if len(self._labels) != slice.ndim:
            counts = f"{len(self._labels)} != {slice.ndim}"
            raise ValueError(f"label slice dimension mismatch: {counts}, labels {list(self._labels)} but {slice!r}")
        self._extent = Extent._of(self._labels, slice._sizes)

    @staticmethod
    def _of(labels: tuple[str, ...], offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Shape:
        """A shape that was cut from a valid one, unchecked."""
        new = Shape.__new__(Shape)
        new._labels = labels
        new._slice = NDSlice._cut(offset, sizes, strides)
        new._extent = Extent._of(labels, sizes)
        return new

    @staticmethod
    def unity() -> Shape:
        """The shape without dimensions: one element, base rank 0."""
        return Shape._of((), 0, (), ())

    @property
    def ndslice(self) -> NDSlice:
        """Which base ranks are covered."""
        return self._slice

    @property
    def labels(self) -> list[str]:
        """Names of the dimensions, outermost first."""
        return list(self._labels)

    @property
    def extent(self) -> Extent:
        """Label -> size."""
        return self._extent

    @property
    def region(self) -> Region:
        """The same as a region."""
        return Region(self._labels, self._slice)

    def ranks(self) -> list[int]:
        """The base ranks in row-major order."""
        return list(self._slice)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Label -> coordinate of the *base* rank `rank`; ValueError when it is not covered."""
        return dict(zip(self._labels, self._slice.coordinates(rank), strict=True))

    def at(self, label: str, index: int) -> Shape:
        """The part at `index` of `label`, without that dimension.

        Raises:
            ValueError: no such label, or `index` past the end.
            OverflowError: a negative `index`.
        """
        dim = dimension_of(self._extent, label)
        position, size, stride = as_int(index), self._slice._sizes[dim], self._slice._strides[dim]
        if position < 0:
            raise OverflowError(f"index {position} of dimension {label!r} in {self._extent} is negative; it counts from 0 to {size - 1}")
        if position >= size:
            raise ValueError(f"index {position} out of range for dimension {label!r} in {self._extent}")
        return Shape._of(
            _replaced(self._labels, dim),
            self._slice._offset + position * stride,
            _replaced(self._slice._sizes, dim),
            _replaced(self._slice._strides, dim),
        )

    def select(self, label: str, slice: builtins.slice) -> Shape:
        """The part in `slice` of `label`; the dimension stays. Bounds are those of list slicing.

        Raises:
            ValueError: no such label, nothing selected, or a step below 1.
        """
        dim = dimension_of(self._extent, label)
        if not isinstance(slice, builtins.slice):
            raise TypeError(f"select({label!r}, ...) needs a slice such as slice(0, 2), not {slice!r}; at() takes one index")
        size, stride = self._slice._sizes[dim], self._slice._strides[dim]
        if slice.step is not None and as_int(slice.step) < 1:
            raise ValueError(f"{slice} of dimension {label!r} has a step below 1; a mesh keeps its order, so use a positive step")
        picked = range(size)[slice]
        if not picked:
            raise ValueError(f"{slice} selects nothing of dimension {label!r} in {self._extent}; a mesh has at least one element")
        return Shape._of(
            self._labels,
            self._slice._offset + picked.start * stride,
            _replaced(self._slice._sizes, dim, len(picked)),
            _replaced(self._slice._strides, dim, stride * picked.step),
        )

    def index(self, /, **coords: int) -> Shape:
        """`at` for each keyword."""
        shape = self
        for label, index in coords.items():
            shape = shape.at(label, index)
        return shape

    def __len__(self) -> int:
        return len(self._slice)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Shape):
            return NotImplemented
        return self._labels == other._labels and self._slice == other._slice

    def __hash__(self) -> int:
        return hash((self._labels, self._slice))

    def __str__(self) -> str:
        return "{" + ",".join(f"{label}={size}" for label, size in self._extent.items()) + "}"

    def __repr__(self) -> str:
        return f"Shape {{ labels: {_quoted(self._labels)}, slice: {self._slice!r} }}"

    def __reduce__(self) -> tuple[object, ...]:
        return Shape._of, (self._labels, *self._slice._key())


class Region:
    """A shape seen as a part of the mesh it was cut from. Ranks are base ranks of that mesh.

    Raises:
        ValueError: not one label per dimension, or a label twice.
    """

    __slots__ = ("_shape",)

    def __init__(self, labels: Sequence[str], slice: NDSlice) -> None:
        self._shape = Shape(labels, slice)

    @property
    def labels(self) -> list[str]:
        """Names of the dimensions, outermost first."""
        return self._shape.labels

    def slice(self) -> NDSlice:
        """Which base ranks are covered."""
        return self._shape.ndslice

    def as_shape(self) -> Shape:
        """The same as a shape."""
        return self._shape

    def point_of_base_rank(self, rank: int) -> Point:
        """Where base rank `rank` lies in this region; ValueError when it does not."""
        try:
            return Point(self._shape.ndslice.index(rank), self._shape.extent)
        except ValueError:
            raise ValueError(f"base rank {rank} not in region {self!r}") from None

    def __len__(self) -> int:
        return len(self._shape)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Region):
            return NotImplemented
        return self._shape == other._shape

    def __hash__(self) -> int:
        return hash((Region, self._shape))

    def __repr__(self) -> str:
        return f"Region {{ labels: {_quoted(self._shape._labels)}, slice: {self._shape.ndslice!r} }}"

    def __reduce__(self) -> tuple[object, ...]:
        return Region, (self._shape._labels, self._shape.ndslice)


def dimension_of(extent: Extent, label: str) -> int:
    """The position of `label` in `extent`; DimensionError when it has none."""
    try:
        return extent._labels.index(label)
    except ValueError:
        raise DimensionError(label, extent) from None


def nearest_label(label: object, extent: Extent) -> str:
    """The end of an error text: "; did you mean 'gpus'?", or "" when no label is near."""
    return did_you_mean(label, extent) if isinstance(label, str) else ""


def checked_labels(labels: Sequence[str]) -> tuple[str, ...]:
    """`labels` as a tuple; TypeError for one plain string, ValueError for a label twice."""
    if isinstance(labels, str):
        raise TypeError(f"labels must be a sequence of strings, not the string {labels!r}; write [{labels!r}]")
    if len(set(labels)) != len(labels):
        raise ValueError(f"duplicate labels in {list(labels)}; each dimension needs a name of its own")
    return tuple(labels)


def _replaced(parts: tuple[Any, ...], dim: int, *new: Any) -> tuple[Any, ...]:
    """`parts` with the one at `dim` replaced by `new` (nothing: removed)."""
    return parts[:dim] + new + parts[dim + 1 :]


def _quoted(labels: tuple[str, ...]) -> str:
    return "[" + ", ".join(f'"{label}"' for label in labels) + "]"
