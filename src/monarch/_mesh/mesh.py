"""MeshTrait: selecting, renaming and regrouping the dimensions of any mesh.

Pure. A mesh tells its geometry (`_ndslice`, `_labels`) and how to make one of its kind from a part of it
(`_new_with_shape`); everything users call is derived from these three.

Rules of this file:
    1. No method changes a mesh; each returns a new one of the same kind, over base ranks of the old one.
    2. The order of keywords never matters.

Read next: `shape` for the geometry, `value_mesh` for the results of a call.
"""

from __future__ import annotations

import builtins
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from operator import index as as_int
from typing import TYPE_CHECKING, Any, NoReturn, Self

from monarch._mesh.shape import Extent, NDSlice, Shape, checked_labels, nearest_label


class MeshTrait(ABC):
    """An N-dimensional container with named dimensions.

    `mesh[i]` is the element of row-major rank `i` (-1 the last), `mesh[i, j]` the one at these coordinates;
    both are meshes without dimensions. `slice` selects by name.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def _ndslice(self) -> NDSlice:
        """Base ranks of this mesh."""

    @property
    @abstractmethod
    def _labels(self) -> Sequence[str]:
        """Names of the dimensions, outermost first."""

    @abstractmethod
    def _new_with_shape(self, shape: Shape) -> Self:
        """A mesh of the same kind over `shape`, whose base ranks are among those of this mesh."""

    def slice(self, /, **kwargs: int | builtins.slice) -> Self:
        """The part at the given places: an integer drops its dimension, a `slice` keeps it.

        Raises:
            TypeError: no such dimension, or a value that is neither an integer nor a slice.
            IndexError: an integer that is negative or past the end.
            ValueError: a slice that selects nothing or has a step below 1.
        """
        return self._new_with_shape(ShapeExt.slice(self._as_shape(), **kwargs))

    def split(self, /, **kwargs: Sequence[str] | int) -> Self:
        """Cut dimensions into several: `split(host=("dp", "pp"), pp=16)` makes `dp` (inferred) and `pp` out of `host`.

        Args:
            kwargs: an existing dimension = its new names, outermost first; a new name = its size.

        Raises:
            ValueError: names as one plain string, a size that is no integer or does not divide its dimension, two
                sizes of one dimension left open, a size for a name that does not occur, or a name twice.
        """
        return self._new_with_shape(ShapeExt.split(self._as_shape(), kwargs))

    def flatten(self, name: str) -> Self:
        """All elements in one dimension, in row-major order; ValueError when the mesh was cut so that gaps remain."""
        ndslice = self._ndslice
        if not ndslice.is_dense:
            raise ValueError(
                f"cannot flatten sparse mesh {self.extent}: strides {ndslice.strides} leave gaps; flatten first, then slice, or use mesh[i]"
            )
        return self._new_with_shape(Shape._of((name,), ndslice.offset, (len(ndslice),), (1,)))

    def rename(self, /, **kwargs: str) -> Self:
        """New names for dimensions, `rename(old="new")`; the order stays. ValueError for an unknown or a taken name."""
        return self.split(**{old: (new,) for old, new in kwargs.items()})

    def size(self, dim: str | Sequence[str] | None = None) -> int:
        """Number of elements: of the mesh, of one dimension, or of several multiplied.

        Raises:
            KeyError: no such dimension.
        """
        extent = self.extent
        if dim is None:
            return extent.nelements
        return extent[dim] if isinstance(dim, str) else math.prod(extent[label] for label in dim)

    @property
    def sizes(self) -> dict[str, int]:
        """Label -> size, as a dict."""
        return dict(self.extent)

    @property
    def extent(self) -> Extent:
        """Label -> size."""
        return Extent._of(tuple(self._labels), self._ndslice._sizes)

    def __len__(self) -> int:
        return len(self._ndslice)

    def __getitem__(self, index: int | tuple[int, ...]) -> Self:
        base_rank = self._ndslice[position_of(index, self.extent)]
        return self._new_with_shape(Shape._of((), base_rank, (), ()))

    # `__getitem__` would make every mesh iterable, and each step a mesh: not what `for` is read as. Type checkers do
    # not see the method, so that they refuse the loop too.
    if not TYPE_CHECKING:

        def __iter__(self) -> NoReturn:
            kind = type(self).__name__
            raise TypeError(f"{kind!r} object is not iterable; write [mesh[i] for i in range(len(mesh))] for its elements")

    __reversed__ = None

    def _as_shape(self) -> Shape:
        """Geometry and names in one. A mesh that keeps a shape returns that instead."""
        ndslice = self._ndslice
        return Shape._of(tuple(self._labels), *ndslice._key())


class ShapedMesh(MeshTrait):
    """A mesh that keeps its view as a `Shape`; subclasses set `_shape` and say how another view is made."""

    _shape: Shape

    @property
    def _ndslice(self) -> NDSlice:
        return self._shape.ndslice

    @property
    def _labels(self) -> Sequence[str]:
        return self._shape.labels

    def _as_shape(self) -> Shape:
        return self._shape


class ShapeExt:
    """What a mesh can do with its dimensions, on a bare shape."""

    @staticmethod
    def slice(shape: Shape, /, **kwargs: int | builtins.slice) -> Shape:
        """The part of `shape` at the given places; see `MeshTrait.slice`."""
        extent = shape.extent
        for label, part in kwargs.items():
            if label not in extent:
                raise TypeError(f"Shape does not have dimension labeled {label!r}, only {extent}{nearest_label(label, extent)}")
            shape = shape.select(label, part) if isinstance(part, builtins.slice) else shape.at(label, checked_index(part, label, extent))
        return shape

    @staticmethod
    def split(shape: Shape, parts: Mapping[str, Sequence[str] | int]) -> Shape:
        """`shape` with dimensions cut into several; see `MeshTrait.split`."""
        extent = shape.extent
        names = {key: _checked_names(key, value) for key, value in parts.items() if key in extent}
        counts = {key: _checked_count(key, value, extent) for key, value in parts.items() if key not in extent}
        unused = counts.keys() - {name for group in names.values() for name in group}
        if unused:
            raise ValueError(f"sizes for {sorted(unused)}, but no dimension of {extent} is split into these names")
        labels: list[str] = []
        sizes: list[int] = []
        strides: list[int] = []
        for label, size, stride in zip(extent, shape.ndslice.sizes, shape.ndslice.strides, strict=True):
            group = names.get(label, (label,))
            filled = _filled(label, size, group, counts)
            labels += group
            sizes += filled
            strides += [stride * math.prod(filled[dim + 1 :]) for dim in range(len(filled))]
        return Shape._of(checked_labels(labels), shape.ndslice.offset, tuple(sizes), tuple(strides))


def position_of(index: Any, extent: Extent) -> int:
    """The row-major rank that `mesh[index]` means: `index` is a rank or a tuple of coordinates, negatives from the end.

    Raises:
        TypeError: anything else, booleans included.
        IndexError: past the end, or not one coordinate per dimension.
    """
    if not isinstance(index, tuple):
        return _counted(index, extent.nelements, "rank", extent)
    if len(index) != len(extent):
        raise IndexError(f"got {len(index)} coordinates for the {len(extent)} dimensions of {extent}; give one per dimension, or one rank")
    position = 0
    for coord, label in zip(index, extent, strict=True):
        position = position * extent[label] + coordinate_of(coord, label, extent)
    return position


def coordinate_of(index: Any, label: str, extent: Extent) -> int:
    """`index` as a coordinate of `label`, negatives from the end; errors as `position_of`, and KeyError for no such label."""
    return _counted(index, extent[label], f"coordinate {label!r}", extent)


def _counted(index: Any, count: int, what: str, extent: Extent) -> int:
    """`index` in range(count), negatives from the end."""
    if isinstance(index, bool) or not hasattr(index, "__index__"):
        part = f"; mesh.slice({extent.labels[-1]}=slice(0, 2)) selects a part" if len(extent) else ""
        raise TypeError(f"the {what} of an element of {extent} is an integer, not {index!r}{part}")
    position = as_int(index)
    if not -count <= position < count:
        raise IndexError(f"{what} {position} out of range for {extent}; it goes from {-count} to {count - 1}")
    return position % count


def checked_index(part: Any, label: str, extent: Extent) -> int:
    """`part` as an index into `label`, counted from the front only: TypeError or IndexError when it is none."""
    if isinstance(part, bool) or not hasattr(part, "__index__"):
        raise TypeError(f"{label}={part!r} is not an index; write {label}=0, or mesh.slice({label}=slice(0, 2)) for a part")
    index, size = as_int(part), extent[label]
    if index < 0:
        hint = f"; the same place from the front is {label}={size + index}" if index >= -size else ""
        raise IndexError(f"index out of range: {label}={index} in {extent} is negative{hint}")
    if index >= size:
        raise IndexError(f"index out of range: {label}={index} in {extent}; the last is {size - 1}")
    return index


def _checked_names(label: str, names: Sequence[str] | int) -> tuple[str, ...]:
    """The names that `label` is split into; ValueError when they are no sequence of strings."""
    if isinstance(names, str | int) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{label}={names!r} must be a sequence of names; write {label}=('outer', 'inner')")
    return checked_labels(names)


def _checked_count(name: str, count: Sequence[str] | int, extent: Extent) -> int:
    """The size of the new dimension `name`; ValueError when it is no positive integer."""
    if isinstance(count, bool) or not hasattr(count, "__index__"):
        raise ValueError(
            f"{name}={count!r}: no dimension {name!r} in {extent}{nearest_label(name, extent)}; for the size of a new one write {name}=2"
        )
    if as_int(count) < 1:
        raise ValueError(f"{name}={count!r}: the size of a dimension is at least 1")
    return as_int(count)


def _filled(label: str, size: int, names: Sequence[str], counts: Mapping[str, int]) -> list[int]:
    """Sizes of the dimensions `names` that `label` is split into, with the one that `counts` leaves open inferred."""
    unknown = [name for name in names if name not in counts]
    known = math.prod(counts[name] for name in names if name in counts)
    if len(unknown) > 1:
        raise ValueError(f"cannot infer the sizes of {unknown} from {label!r} of size {size}; give all but one, as {unknown[-1]}=2")
    if (size % known) if unknown else (known != size):
        raise ValueError(f"cannot split {label!r} of size {size} into {tuple(names)}: the given sizes multiply to {known}")
    return [counts.get(name, size // known) for name in names]
