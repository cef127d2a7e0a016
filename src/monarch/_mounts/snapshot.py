"""Snapshot: one version of a directory as columns, small enough to send to every host and quick to look things up in.

A row is a path. Row 0 is the root; the children of a directory are consecutive rows in the order of their names; a parent comes
before its children. Names are the bytes of the file system, whatever encoding they may be in.

Rules of this file:
    1. A snapshot never changes. Two of them may share columns.
    2. What `decode` returns has been checked: names that are safe to join to a path, parents that are directories, files that lie
       inside the address space and do not overlap. Nobody below checks again.
    3. Integers travel little-endian, whatever the machine is.

Read next: `source.py`, which makes snapshots; `tree.py`, which shows them to the kernel.
"""

from __future__ import annotations

import os
import stat
import sys
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from operator import add
from typing import Any, NamedTuple

import msgspec

from monarch._base.errors import explain
from monarch._mounts.filesystem import Attr, attr_of
from monarch._mounts.index import BIG_FILE_THRESHOLD, Index
from monarch._mounts.ranges import Ranges, Span, span_of

FORMAT = 1
NOWHERE = -1
"""The offset of what has no bytes of its own: directories and symbolic links."""

_MOST_BYTES = 1 << 62


class Kind(NamedTuple):
    """What many rows have in common."""

    mode: int
    nlink: int
    uid: int
    gid: int


class SnapshotError(ValueError):
    """Bytes that are no snapshot: cut off, damaged, or made to do harm."""


class _Wire(msgspec.Struct, frozen=True, array_like=True):
    """The columns as they travel."""

    format: int
    total_bytes: int
    names: bytes
    """All names but the root's, each with a NUL behind it."""
    targets: bytes
    """Those of the symbolic links in the order of rows, each with a NUL behind it."""
    kinds: list[tuple[int, int, int, int]]
    parents: bytes
    kind_of: bytes
    sizes: bytes
    mtimes: bytes
    ctimes: bytes
    offsets: bytes


class Columns(NamedTuple):
    """The rows of a snapshot, column by column. Filled by `source.py`, never changed afterwards."""

    names: list[bytes]
    parents: array[int]
    """Row of the parent; "I"."""
    kind_of: array[int]
    """Place in `kinds`; "I"."""
    sizes: array[int]
    """Bytes; "q", as all below."""
    mtimes: array[int]
    ctimes: array[int]
    offsets: array[int]
    kinds: list[Kind]
    targets: dict[int, bytes]
    """Row of a symbolic link to where it points."""

    @classmethod
    def empty(cls) -> Columns:
        return cls([], array("I"), array("I"), array("q"), array("q"), array("q"), array("q"), [], {})

    def of_each(self) -> tuple[array[int], ...]:
        """What a path is, apart from its name and parent."""
        return self.kind_of, self.sizes, self.mtimes, self.ctimes, self.offsets


class Snapshot:
    """One version of a directory. Immutable. Thread: any."""

    def __init__(self, columns: Columns, total_bytes: int) -> None:
        self.names, self.parents, self.kind_of, self.sizes, self.mtimes, self.ctimes, self.offsets, self.kinds, self.targets = columns
        self.columns = columns
        self.total_bytes = total_bytes
        """Where the address space ends."""
        self._named: dict[int, dict[bytes, int]] = {}

    def __len__(self) -> int:
        return len(self.names)

    def __eq__(self, other: object) -> bool:
        """Whether both describe the same files with the same attributes and bytes."""
        if not isinstance(other, Snapshot):
            return NotImplemented
        if self.columns is other.columns:
            return True
        if self.columns[:2] + self.columns[3:7] != other.columns[:2] + other.columns[3:7] or self.targets != other.targets:
            return False
        return self._kind_list() == other._kind_list()

    __hash__ = None  # type: ignore[assignment]

    def _kind_list(self) -> list[Kind]:
        return list(map(self.kinds.__getitem__, self.kind_of))

    @cached_property
    def _children_bounds(self) -> tuple[list[int], list[int]]:
        firsts, ends = [0] * len(self), [0] * len(self)
        end = 1
        for parent, count in Counter(self.parents[1:]).items():
            firsts[parent], end = end, end + count
            ends[parent] = end
        return firsts, ends

    def children(self, row: int) -> range:
        """The rows in a directory."""
        firsts, ends = self._children_bounds
        return range(firsts[row], ends[row])

    def mode(self, row: int) -> int:
        """As `st_mode`."""
        return self.kinds[self.kind_of[row]].mode

    def is_directory(self, row: int) -> bool:
        """Whether a row has, or could have, children."""
        return stat.S_ISDIR(self.mode(row))

    def span(self, row: int) -> Span | None:
        """Where the bytes of a file are; None for a directory and a symbolic link."""
        offset = self.offsets[row]
        return None if offset == NOWHERE else span_of((offset, self.sizes[row]))

    def attr(self, row: int) -> Attr:
        """The attributes of a row."""
        mode, nlink, uid, gid = self.kinds[self.kind_of[row]]
        mtime = self.mtimes[row]
        return attr_of((mode, self.sizes[row], nlink, uid, gid, mtime, mtime, self.ctimes[row], True))

    def child(self, row: int, name: bytes) -> int | None:
        """The row of a name in a directory. Cost: O(children) the first time."""
        names = self._named.get(row)
        if names is None:
            names = self._named[row] = {self.names[found]: found for found in self.children(row)}
        return names.get(name)

    def shows_same(self, row: int, other: Snapshot, other_row: int) -> bool:
        """Whether a row of another version has the same kind, bytes and target; attributes may differ."""
        return (
            stat.S_IFMT(self.mode(row)) == stat.S_IFMT(other.mode(other_row))
            and self.span(row) == other.span(other_row)
            and self.targets.get(row) == other.targets.get(other_row)
        )

    def has_same_rows(self, other: Snapshot, other_rows: range, rows: range) -> bool:
        """Whether these rows are, in all but their numbers, and their parents', those of another version. False in doubt.

        Cost: that of comparing memory.
        """
        new, old = slice(rows.start, rows.stop), slice(other_rows.start, other_rows.stop)
        columns, others = self.columns, other.columns
        num_kinds = min(len(columns.kinds), len(others.kinds))
        pairs = zip(columns.of_each(), others.of_each(), strict=True)
        return (
            columns.names[new] == others.names[old]
            and all(ours[new] == theirs[old] for ours, theirs in pairs)
            and columns.kinds[:num_kinds] == others.kinds[:num_kinds]
            and (not columns.targets or list(map(columns.targets.get, rows)) == list(map(others.targets.get, other_rows)))
        )

    def find(self, path: str | bytes) -> int | None:
        """The row of a path such as "/a/b"; None: there is none."""
        row: int | None = 0
        for name in os.fsencode(path).split(b"/"):
            if name and row is not None:
                row = self.child(row, name)
        return row

    def path(self, row: int) -> str:
        """The path of a row, "/" for the root."""
        parts: list[bytes] = []
        while row:
            parts.append(self.names[row])
            row = self.parents[row]
        return "/" + os.fsdecode(b"/".join(reversed(parts)))

    @cached_property
    def _files(self) -> tuple[list[int], list[int]]:
        """Offsets of the files that have bytes, in order, and their rows."""
        places = enumerate(zip(self.offsets, self.sizes, strict=True))
        pairs = sorted([(offset, row) for row, (offset, size) in places if size and offset >= 0])
        return [offset for offset, _ in pairs], [row for _, row in pairs]

    def files(self, span: Span | None = None) -> Iterator[tuple[int, Span]]:
        """Row and bytes of the files that have any, in the order of the address space.

        Args:
            span: only those with a part in it.
        """
        offsets, rows = self._files
        at = 0 if span is None else max(bisect_right(offsets, span.offset) - 1, 0)
        end = self.total_bytes if span is None else span.end
        for place in range(at, len(rows)):
            row, offset = rows[place], offsets[place]
            if offset >= end:
                return
            found = Span(offset, self.sizes[row])
            if span is None or found.end > span.offset:
                yield row, found

    @cached_property
    def spans(self) -> frozenset[Span]:
        """Where the files are that have bytes."""
        offsets, rows = self._files
        return frozenset(map(span_of, zip(offsets, map(self.sizes.__getitem__, rows), strict=True)))

    def small_spans(self) -> list[Span]:
        """Where the small files lie, joined: what is worth sending before anybody asks."""
        ranges = Ranges()
        offsets, rows = self._files
        for offset, row in zip(offsets, rows, strict=True):
            if self.sizes[row] < BIG_FILE_THRESHOLD:
                ranges.add(offset, offset + self.sizes[row])
        return [Span(start, end - start) for start, end in ranges]

    def encode(self) -> bytes:
        """The snapshot as bytes, some 55 a path plus its name."""
        links = sorted(self.targets)
        wire = _Wire(
            FORMAT,
            self.total_bytes,
            b"".join(name + b"\0" for name in self.names[1:]),
            b"".join(self.targets[row] + b"\0" for row in links),
            [(kind.mode, kind.nlink, kind.uid, kind.gid) for kind in self.kinds],
            *map(_little, (self.parents, self.kind_of, self.sizes, self.mtimes, self.ctimes, self.offsets)),
        )
        return msgspec.msgpack.encode(wire)

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Snapshot:
        """The snapshot that `encode` was called on.

        Raises:
            SnapshotError: the bytes are not what `encode` makes, or describe something that no scan finds.

        Cost: 100,000 files take about 0.2 s.
        """
        try:
            wire = msgspec.msgpack.decode(data, type=_Wire)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise _wrong(f"they cannot be decoded: {exc}") from exc
        if wire.format != FORMAT:
            raise _wrong(f"their format is {wire.format}, this side speaks {FORMAT}")
        names = [b"", *_split(wire.names)]
        parents, kind_of = (_column("I", data, len(names)) for data in (wire.parents, wire.kind_of))
        sizes, mtimes, ctimes, offsets = (_column("q", data, len(names)) for data in (wire.sizes, wire.mtimes, wire.ctimes, wire.offsets))
        columns = Columns(names, parents, kind_of, sizes, mtimes, ctimes, offsets, [_kind(fields) for fields in wire.kinds], {})
        snapshot = cls(columns, wire.total_bytes)
        _check_tree(snapshot, _split(wire.targets))
        _check_places(snapshot)
        return snapshot

    @classmethod
    def of_index(cls, index: Index) -> Snapshot:
        """The snapshot of a dict that `build_index` has made, or one of the same form."""
        columns, known = Columns.empty(), dict[Kind, int]()
        queue: list[tuple[str, int]] = [("/", 0)]
        for path, parent in queue:
            node = index[path]
            name = os.fsencode(path.rpartition("/")[2])
            row = add_row(columns, known, name, parent, _status_of(node), node.get("global_offset", NOWHERE))
            if "link_target" in node:
                columns.targets[row] = os.fsencode(node["link_target"])
            prefix = path.rstrip("/") + "/"
            queue += [(prefix + name, row) for name in sorted(node.get("children", ()), key=os.fsencode)]
        snapshot = cls(columns, index["/"].get("total_size", 0))
        _check_places(snapshot)
        return snapshot


class Status(NamedTuple):
    """The part of a `stat` that a snapshot keeps."""

    kind: Kind
    size: int
    mtime_ns: int
    ctime_ns: int


def add_row(columns: Columns, known: dict[Kind, int], name: bytes, parent: int, status: Status, offset: int) -> int:
    """Append a row; its number.

    Args:
        known: the kinds in `columns` so far.
    """
    kind_at = known.get(status.kind)
    if kind_at is None:
        kind_at = known[status.kind] = len(columns.kinds)
        columns.kinds.append(status.kind)
    columns.names.append(name)
    columns.parents.append(parent)
    columns.kind_of.append(kind_at)
    columns.sizes.append(status.size)
    columns.mtimes.append(status.mtime_ns)
    columns.ctimes.append(status.ctime_ns)
    columns.offsets.append(offset)
    return len(columns.names) - 1


def _status_of(node: dict[str, Any]) -> Status:
    attr = node["attr"]
    kind = Kind(attr["st_mode"], attr["st_nlink"], attr["st_uid"], attr["st_gid"])
    mtime_ns = node.get("mtime_ns", round(attr["st_mtime"] * 1e9))
    return Status(kind, node.get("file_len", attr["st_size"]), mtime_ns, round(attr["st_ctime"] * 1e9))


def _wrong(why: str) -> SnapshotError:
    return SnapshotError(
        explain(f"these bytes are no snapshot of a directory: {why}", next="use the same version of monarch on both sides; send them again")
    )


def _little(column: array[int]) -> bytes:
    if sys.byteorder == "big":
        column = array(column.typecode, column)
        column.byteswap()
    return column.tobytes()


def _column(typecode: str, data: bytes, rows: int) -> array[int]:
    column: array[int] = array(typecode)
    if len(data) != rows * column.itemsize:
        raise _wrong(f"a column has {len(data)} bytes, not {column.itemsize} for each of {rows} paths")
    column.frombytes(data)
    if sys.byteorder == "big":
        column.byteswap()
    return column


def _split(data: bytes) -> list[bytes]:
    if not data:
        return []
    if data[-1]:
        raise _wrong("the last name is cut off")
    return data[:-1].split(b"\0")


def _kind(fields: tuple[int, int, int, int]) -> Kind:
    kind = Kind(*fields)
    if min(kind) < 0 or max(kind) >= 1 << 32 or not stat.S_IFMT(kind.mode):
        raise _wrong(f"{kind} describes no file")
    return kind


def _check_tree(snapshot: Snapshot, targets: Sequence[bytes]) -> None:
    """Check names, parents and kinds; give the symbolic links their targets."""
    names, parents = snapshot.names, snapshot.parents
    if max(snapshot.kind_of) >= len(snapshot.kinds):
        raise _wrong("a path is of no kind")
    bad = {b"", b".", b".."}.intersection(names[1:])
    if b"/" in b"".join(names):
        bad = {name for name in names if b"/" in name}
    if bad:
        raise _wrong(f"{bad.pop()!r} is no name of a file")
    if parents[0] or not snapshot.is_directory(0):
        raise _wrong("the root is no directory")
    directories = [stat.S_ISDIR(kind.mode) for kind in snapshot.kinds]
    links = [stat.S_ISLNK(kind.mode) for kind in snapshot.kinds]
    seen, row = set[int](), 1
    for parent, run in groupby(parents[1:]):
        if parent >= row or parent in seen or not directories[snapshot.kind_of[parent]]:
            raise _wrong(f"path {row} has no right parent")
        seen.add(parent)
        row += len(list(run))
    for row in seen:
        children = snapshot.children(row)
        if len(set(names[children.start : children.stop])) != len(children):
            raise _wrong(f"a name is twice in {snapshot.path(row)!r}")
    rows = [row for row, kind in enumerate(snapshot.kind_of) if links[kind]] if any(links) else []
    if len(rows) != len(targets):
        raise _wrong(f"{len(rows)} symbolic links have {len(targets)} targets")
    snapshot.targets.update(zip(rows, targets, strict=True))
    placed = [not (directory or link) for directory, link in zip(directories, links, strict=True)]
    for row, (kind, offset) in enumerate(zip(snapshot.kind_of, snapshot.offsets, strict=True)):
        if placed[kind] is (offset == NOWHERE):
            raise _wrong(f"path {row} has no right place for its bytes")


def _check_places(snapshot: Snapshot) -> None:
    """Check that files lie inside the address space and apart from each other."""
    total = snapshot.total_bytes
    if not 0 <= total <= _MOST_BYTES or min(snapshot.sizes) < 0 or max(snapshot.sizes) > _MOST_BYTES or min(snapshot.offsets) < NOWHERE:
        raise _wrong("a size or an offset is out of range")
    offsets, rows = snapshot._files
    ends = list(map(add, offsets, map(snapshot.sizes.__getitem__, rows)))
    for end, offset in zip(ends, offsets[1:], strict=False):
        if offset < end:
            raise _wrong(f"two files share the byte {offset}")
    if ends and ends[-1] > total:
        raise _wrong(f"a file ends at {ends[-1]}, the address space at {total}")
