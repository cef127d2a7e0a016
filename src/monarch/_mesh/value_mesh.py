"""ValueMesh: one value per rank, the result of a call.

Pure. Values that came over the wire are decoded at the first look at each of them, once, also through slices.

Rules of this file:
    1. Ranks are positions in *this* mesh: whatever shape it is made from, it counts row-major from 0, without gaps.
    2. A slice shares the values (or the slots that decode them) of its origin; nothing here decodes before a user looks.

Read next: `mesh` for slicing.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import index as as_int
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar, cast, overload

from monarch._mesh.mesh import MeshTrait, checked_index, coordinate_of, position_of
from monarch._mesh.shape import NDSlice, Point, Shape

R = TypeVar("R")


class Slot(Protocol):
    """A value that may still be encoded."""

    def take(self) -> Any:
        """The value, always the same object. If decoding failed, that same exception, raised each time."""


class LazySlot:
    """A slot that runs `decode` at the first `take`.

    Thread: any, but not guarded: two first looks at the same moment may run `decode` twice.
    """

    __slots__ = ("_decode", "_error", "_traceback", "_value")

    def __init__(self, decode: Callable[[], Any]) -> None:
        self._decode: Callable[[], Any] | None = decode
        self._value: Any = None
        self._error: Exception | None = None
        self._traceback: TracebackType | None = None

    def take(self) -> Any:
        """The decoded value; raises what `decode` raised."""
        decode = self._decode
        if decode is not None:
            try:
                self._value = decode()
            except Exception as exc:
                self._error, self._traceback = exc, exc.__traceback__
            self._decode = None  # last, so that other threads never see an empty slot; also frees the encoded bytes
        if self._error is not None:
            # With the first traceback, or each look would add its own frames to it.
            raise self._error.with_traceback(self._traceback)
        return self._value


class ValueMesh(MeshTrait, Generic[R]):
    """A mesh of values. Iterates as `(point, value)`; `values[rank]`, `values[i, j]` and `values[{"gpus": 1}]` look inside.

    Args:
        shape: sizes and labels of the mesh.
        values: one per rank, row-major.

    Raises:
        TypeError: `values` is no list.
        ValueError: not one value per rank.
    """

    __slots__ = ("_is_lazy", "_shape", "_values")

    _shape: Shape
    _values: list[Any]
    _is_lazy: bool

    def __init__(self, shape: Shape, values: list[R]) -> None:
        if not isinstance(values, list):
            raise TypeError(f"ValueMesh(shape, values) needs a list of values, not {type(values).__name__}; write list(values)")
        self._fill(shape, list(values), is_lazy=False)

    @staticmethod
    def from_indexed(shape: Shape, pairs: Sequence[tuple[int, R]]) -> ValueMesh[R]:
        """A mesh from `(rank, value)` pairs in any order; the last one for a rank wins.

        Raises:
            ValueError: a rank outside of `shape`, or a rank without a value.
        """
        by_rank = {as_int(rank): value for rank, value in pairs}
        outside = [rank for rank in by_rank if not 0 <= rank < len(shape)]
        if outside:
            raise ValueError(f"rank {outside[0]} out of range for {shape.extent} (len={len(shape)})")
        return ValueMesh(shape, [by_rank[rank] for rank in sorted(by_rank)])

    @staticmethod
    def _from_lazy(shape: Shape, slots: Sequence[Slot]) -> ValueMesh[Any]:
        """A mesh whose values are taken from `slots`, one slot per rank, when a user looks at them."""
        new: ValueMesh[Any] = ValueMesh.__new__(ValueMesh)
        new._fill(shape, list(slots), is_lazy=True)
        return new

    def _fill(self, shape: Shape, values: list[Any], *, is_lazy: bool) -> None:
        if len(values) != len(shape):
            raise ValueError(
                f"invalid value mesh: expected {len(shape)} ranks, but contains {len(values)} ranks; {shape.extent} needs one value each"
            )
        self._shape = _renumbered(shape)
        self._values = values
        self._is_lazy = is_lazy

    @property
    def _ndslice(self) -> NDSlice:
        return self._shape.ndslice

    @property
    def _labels(self) -> Sequence[str]:
        return self._shape._labels

    def _as_shape(self) -> Shape:
        return self._shape

    def _new_with_shape(self, shape: Shape) -> ValueMesh[R]:
        # Rule 1 makes the base ranks of a part the places of its values in our list.
        new: ValueMesh[R] = ValueMesh.__new__(ValueMesh)
        new._fill(shape, [self._values[rank] for rank in shape.ndslice.ranks()], is_lazy=self._is_lazy)
        return new

    def values(self) -> list[R]:
        """All values, row-major."""
        return [slot.take() for slot in self._values] if self._is_lazy else list(self._values)

    def items(self) -> Iterator[tuple[Point, R]]:
        """`(point, value)` pairs, row-major. Points lie in the extent of this mesh."""
        extent = self._shape.extent
        for rank in range(len(self._values)):
            yield Point(rank, extent), self._at(rank)

    def get(self, rank: int) -> R:
        """The value of `rank`.

        Raises:
            ValueError: past the end.
            OverflowError: negative.
        """
        position = as_int(rank)
        if position < 0:
            raise OverflowError(f"rank {position} is negative; get() counts from 0 to {len(self) - 1}, values[{position}] from the end")
        if position >= len(self._values):
            raise ValueError(f"index {position} out of range (len={len(self._values)})")
        return self._at(position)

    def item(self, /, **kwargs: int) -> R:
        """The value at the given coordinates, one per dimension; `item()` reads a mesh without dimensions.

        Raises:
            KeyError: a dimension is missing, or one is given that the mesh does not have.
            IndexError: a coordinate that is negative or past the end.
        """
        extent = self._shape.extent
        missing = [label for label in extent if label not in kwargs]
        if missing:
            raise _ItemError(missing[0], f"item() needs one integer per dimension of {extent}; missing {', '.join(map(repr, missing))}")
        extra = [label for label in kwargs if label not in extent]
        if extra:
            raise _ItemError(f"item has extra dimensions: {extra}; it takes one integer for each of {extent}")
        return self._at(self._shape.ndslice.nditem([checked_index(kwargs[label], label, extent) for label in extent]))

    # The elements of other meshes are meshes too; this one gives out what it holds.
    @overload  # type: ignore[override]
    def __getitem__(self, index: int | tuple[int, ...]) -> R: ...

    @overload
    def __getitem__(self, index: Mapping[str, int | builtins.slice]) -> Any: ...

    def __getitem__(self, index: int | tuple[int, ...] | Mapping[str, int | builtins.slice]) -> Any:
        if not isinstance(index, Mapping):
            return self._at(position_of(index, self._shape.extent))
        part = _part_of(self._shape, index)
        return self._at(part.ndslice.offset) if not part.labels else self._new_with_shape(part)

    def __iter__(self) -> Iterator[tuple[Point, R]]:
        return self.items()

    def __repr__(self) -> str:
        # Imported here: only people print meshes, and every worker would pay for it at import.
        from pprint import pformat
        from textwrap import indent

        return f"ValueMesh({self._shape.extent}):\n" + indent(pformat(tuple(self.items())), "  ")

    def __reduce__(self) -> tuple[object, ...]:
        return ValueMesh, (self._shape, self.values())

    def _at(self, rank: int) -> R:
        value = self._values[rank]
        return cast(R, value.take() if self._is_lazy else value)


class _ItemError(KeyError):
    """A KeyError whose last argument is its text: KeyError itself would show that in quotes."""

    def __str__(self) -> str:
        return str(self.args[-1])


def _part_of(shape: Shape, index: Mapping[str, int | builtins.slice]) -> Shape:
    """The part of `shape` at `index`, label -> place; integers may count from the end."""
    extent = shape.extent
    for label, place in index.items():
        shape = shape.select(label, place) if isinstance(place, builtins.slice) else shape.at(label, coordinate_of(place, label, extent))
    return shape


def _renumbered(shape: Shape) -> Shape:
    """`shape` with the base ranks 0, 1, 2, ... in row-major order."""
    if shape.ndslice.offset == 0 and shape.ndslice.is_dense:
        return shape
    return Shape(shape.labels, NDSlice.new_row_major(shape.ndslice.sizes))
