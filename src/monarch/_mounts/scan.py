"""A scan: what was seen of every path of a directory, and by what the next look tells that a path is the same still.

Two ways to get one: `walked` lists every directory; `patched` copies an earlier scan, for which `differing` has found with one `stat` a
path that the names are the same.

Rules of this file:
    1. All that a `stat` says counts, but the time of access.
    2. A directory whose own `stat` is what it was has the names that it had, as its times change with them; any other is listed again.
    3. Where `differing` cannot know (other names, another kind of file, something that could not be examined) it says so.

Read next: `source.py`, who looks, and knows when times prove nothing.
"""

from __future__ import annotations

import os
import stat
from array import array
from collections.abc import Callable, Iterator, Set
from typing import NamedTuple

from monarch._mounts.index import LEFT_OUT, walk
from monarch._mounts.snapshot import NOWHERE, Columns, Kind, Status, add_row

_OPEN = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)
_MARKED = 7
"""The first numbers of a `stat`: mode, inode, device, links, owner, group, size. Behind them are the times."""
_LEFT_OUT = os.fsencode(LEFT_OUT)


class Folder(NamedTuple):
    """A directory that was listed."""

    path: str
    """In the tree; "": the root."""
    row: int
    first: int
    """Row of the first name in it."""
    end: int


class Scan:
    """What was seen, row by row."""

    def __init__(self, path: str, device: int, columns: Columns, inodes: array[int], marks: array[int], folders: list[Folder]) -> None:
        self.path = path
        """Of the directory, without a slash at the end."""
        self.device = device
        self.columns = columns
        """With offsets of NOWHERE, until `source.py` places the files."""
        self.inodes = inodes
        self.marks = marks
        """Hashes of what `_MARKED` says."""
        self.folders = folders
        """A parent before its children."""
        self.is_whole = True
        """Nothing is left out because it could not be examined."""
        self._kinds: dict[Kind, int] = {kind: at for at, kind in enumerate(columns.kinds)}

    def add(self, name: bytes, parent: int, status: os.stat_result) -> int:
        """Append a row."""
        self.inodes.append(status.st_ino)
        self.marks.append(hash(status[:_MARKED]))
        return add_row(self.columns, self._kinds, name, parent, _seen(status), NOWHERE)

    def replace(self, row: int, status: os.stat_result) -> None:
        """A row is something else now, of the same kind and name. A file is nowhere from now on."""
        columns, (kind, size, mtime_ns, ctime_ns) = self.columns, _seen(status)
        if kind not in self._kinds:
            self._kinds[kind] = len(columns.kinds)
            columns.kinds.append(kind)
        columns.kind_of[row] = self._kinds[kind]
        columns.sizes[row], columns.mtimes[row], columns.ctimes[row], columns.offsets[row] = size, mtime_ns, ctime_ns, NOWHERE
        self.inodes[row], self.marks[row] = status.st_ino, hash(status[:_MARKED])


def _seen(status: os.stat_result) -> Status:
    kind = Kind(status.st_mode, status.st_nlink, status.st_uid, status.st_gid)
    return Status(kind, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def walked(path: str, root: os.stat_result, covered: Set[str] = frozenset()) -> Scan:
    """Look at all of a directory.

    Args:
        root: its own `stat`.
        covered: see `walk`.

    Raises:
        OSError: it, or a directory in it, cannot be listed.

    Cost: about 8 us a path.
    """
    path = path.rstrip("/")
    scan = Scan(path, root.st_dev, Columns.empty(), array("Q"), array("q"), [])
    scan.add(b"", 0, root)
    rows = {"": 0}
    left_out: list[str] = []
    for folder, entries in walk(path, root, left_out, covered):
        first = len(scan.inodes)
        for name, status, target, descends in entries:
            row = scan.add(os.fsencode(name), rows[folder], status)
            if descends:
                rows[f"{folder}/{name}"] = row
            elif target is not None:
                scan.columns.targets[row] = os.fsencode(target)
        scan.folders.append(Folder(folder, rows.pop(folder), first, len(scan.inodes)))
    scan.is_whole = not left_out
    return scan


def patched(before: Scan, rows: dict[int, os.stat_result]) -> Scan:
    """The scan `before` with other files in these rows, which `differing` has found.

    Cost: O(rows) and a copy of the columns.
    """
    old = before.columns
    columns = old._replace(
        kind_of=old.kind_of[:], sizes=old.sizes[:], mtimes=old.mtimes[:], ctimes=old.ctimes[:], offsets=old.offsets[:], kinds=old.kinds[:]
    )
    scan = Scan(before.path, before.device, columns, before.inodes[:], before.marks[:], before.folders)
    for row, status in rows.items():
        scan.replace(row, status)
    return scan


def differing(scan: Scan, racy: Callable[[int, int], bool], since_ns: int) -> dict[int, os.stat_result] | None:
    """What may have changed since a scan.

    Args:
        racy: of a change time and a size: whether another change may have left the same. Such a path is reported in any case.
        since_ns: change times before it are not.

    Returns:
        The rows, each with what it is now; None: `walked` has to look.

    Cost: about 2 us a path.
    """
    if not scan.is_whole:
        return None
    try:
        found = dict(_differing(scan, racy, since_ns))
        listed = [folder for folder in scan.folders if folder.row in found]
        descended = {folder.row for folder in listed}
        if any(_is_other(scan, row, status, row in descended) for row, status in found.items()):
            return None
        return found if all(_has_same_names(scan, folder) for folder in listed) else None
    except OSError:  # gone, or not ours to look at any more; `walked` says which
        return None


def _differing(scan: Scan, racy: Callable[[int, int], bool], since_ns: int) -> Iterator[tuple[int, os.stat_result]]:
    columns, marks = scan.columns, scan.marks
    names, sizes, mtimes, ctimes = columns.names, columns.sizes, columns.mtimes, columns.ctimes
    look, marked = os.lstat, _MARKED  # here is what a refresh of nothing costs
    status = os.stat(scan.path or "/")
    if (hash(status[:marked]), status.st_mtime_ns, status.st_ctime_ns) != (marks[0], mtimes[0], ctimes[0]) or racy(ctimes[0], 0):
        yield 0, status
    for path, _, first, end in scan.folders:
        folder = os.open(scan.path + path, _OPEN) if path else os.open(scan.path or "/", _OPEN & ~os.O_NOFOLLOW)
        try:
            seen = zip(range(first, end), names[first:end], mtimes[first:end], ctimes[first:end], marks[first:end], strict=True)
            for row, name, mtime_ns, ctime_ns, mark in seen:
                status = look(name, dir_fd=folder)
                if (
                    status.st_ctime_ns != ctime_ns
                    or hash(status[:marked]) != mark
                    or status.st_mtime_ns != mtime_ns
                    or (ctime_ns >= since_ns and racy(ctime_ns, sizes[row]))
                ):
                    yield row, status
        finally:
            os.close(folder)


def _is_other(scan: Scan, row: int, status: os.stat_result, was_listed: bool) -> bool:
    """Whether a path is another kind of file than it was, a link, which may point elsewhere, or another directory."""
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFDIR and (status.st_ino != scan.inodes[row] or (status.st_dev == scan.device) is not was_listed):
        return True
    return kind == stat.S_IFLNK or kind != stat.S_IFMT(scan.columns.kinds[scan.columns.kind_of[row]].mode)


def _has_same_names(scan: Scan, folder: Folder) -> bool:
    path = os.fsencode(scan.path + folder.path) or b"/"
    names = set(os.listdir(path))
    known = scan.columns.names[folder.first : folder.end]
    if _LEFT_OUT in names and _LEFT_OUT not in known and stat.S_ISDIR(os.lstat(path + b"/" + _LEFT_OUT).st_mode):
        names.remove(_LEFT_OUT)
    return names == set(known)
