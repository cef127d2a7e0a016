"""Copy mode: a pushed directory as plain files, where there is no FUSE or none is wanted.

Rules of this file:
    1. A reader sees each file whole: it is written apart, in the state folder of the target, and renamed into place.
    2. Only what we wrote is ever overwritten or removed. The manifest in the state folder says what that is; it names a path before the
       path is written, so a copy that was killed is still ours.
    3. Conflicts are found before anything is written.
    4. Nothing is written through a symbolic link, whoever made it.

Owners are not kept, nor are set-user-id bits: the copy belongs to whoever makes it. Sockets, pipes and devices are left out.

Read next: `snapshot.py`, `store.py`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple, cast

import msgspec

from monarch._base.errors import explain
from monarch._mounts.ranges import Span
from monarch._mounts.segment import ZEROS
from monarch._mounts.snapshot import Snapshot
from monarch._mounts.store import Store

STATE = b".monarch-copy"
"""Folder in the target: manifest, lock, and files that are being written. A path of this name at the top of the source is left out."""

_WINDOW_BYTES = 8 << 20
_MOST_NAMED = 5


class Copied(NamedTuple):
    """What a copy did."""

    num_written: int
    """Files and links."""
    num_bytes: int
    num_removed: int
    num_left: int
    """Paths that were right already."""


class _Ours(msgspec.Struct, frozen=True, array_like=True):
    """A path that we wrote: what of, and what became of it."""

    path: bytes
    kind: int
    size: int
    mtime_ns: int
    ctime_ns: int
    """Of the source."""
    target: bytes
    inode: int
    """In the copy; 0: about to be written."""
    changed_ns: int
    """The change time in the copy."""

    def is_of(self, other: _Ours) -> bool:
        """Whether both were written from the same content."""
        if (self.kind, self.target) != (other.kind, other.target):
            return False
        if self.kind == stat.S_IFREG and (self.size, self.ctime_ns) != (other.size, other.ctime_ns):
            return False
        return self.kind == stat.S_IFDIR or self.mtime_ns == other.mtime_ns

    def is_intact(self, status: os.stat_result | None) -> bool:
        """Whether what is there is still what we wrote."""
        if status is None or stat.S_IFMT(status.st_mode) != self.kind:
            return False
        return self.kind == stat.S_IFDIR or not self.inode or (self.inode, self.changed_ns) == (status.st_ino, status.st_ctime_ns)


def copy(snapshot: Snapshot, store: Store, path: str, *, before: Snapshot | None = None, patience_s: float = 60.0) -> Copied:
    """Make the directory at `path` look like `snapshot`.

    Args:
        store: where the bytes are, or arrive.
        path: a directory that does not exist, is empty, or was made by this function; files of others in it stay.
        before: the version of the same source that was copied last. A file that has other bytes since is written whatever its times say.
        patience_s: how long to wait for the next bytes of a file.

    Raises:
        ValueError: the path is empty, or a name in the snapshot would leave the target.
        FileExistsError: the target has files that are not ours where ours have to go.
        BlockingIOError: another copy into it is going on.
        TimeoutError: bytes did not arrive in time.
        OSError: the target cannot be written; or files changed at the source while they were copied (EIO, after all others were copied).

    Cost: writes what changed only; one `lstat` for each path.
    """
    if not path:
        raise ValueError(explain("the path to copy to is empty", next="name a directory"))
    rows = list(_rows(snapshot))
    target = os.fsencode(os.path.abspath(path))
    try:
        os.makedirs(target, exist_ok=True)
        lock_fd = _claimed(target)
    except PermissionError as exc:
        what = f"{path!r} cannot be written"
        raise PermissionError(exc.errno, explain(what, next="choose a directory of this user", detail=str(exc))) from exc
    try:
        return _Copy(snapshot, before, store, target, patience_s).run(rows)
    finally:
        os.close(lock_fd)


def _rows(snapshot: Snapshot) -> Iterator[tuple[int, bytes, _Ours]]:
    """Row, parent's path and what is to be written, parents first."""
    paths = {0: b""}
    for row in range(1, len(snapshot)):
        name = snapshot.names[row]
        if name in (b"", b".", b"..") or b"/" in name or b"\0" in name:
            raise ValueError(explain(f"the name {name!r} would leave the directory that is copied to", next="do not trust this source"))
        parent = paths.get(snapshot.parents[row])
        kind = stat.S_IFMT(snapshot.mode(row))
        if parent is None or kind not in (stat.S_IFDIR, stat.S_IFREG, stat.S_IFLNK) or (not parent and name == STATE):
            continue
        path = parent + b"/" + name
        if kind == stat.S_IFDIR:
            paths[row] = path
        attr = snapshot.attr(row)
        yield row, parent, _Ours(path, kind, attr.size, attr.mtime_ns, attr.ctime_ns, snapshot.targets.get(row, b""), 0, 0)


def _claimed(target: bytes) -> int:
    """The locked state folder of a target, made if the target is empty."""
    state = target + b"/" + STATE
    if not os.path.lexists(state):
        if os.listdir(target):
            what = f"{os.fsdecode(target)!r} is not empty and no copy of ours"
            raise FileExistsError(explain(what, next="choose an empty directory, or one that does not exist"))
        os.mkdir(state, 0o700)
    fd = os.open(state, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    if os.fstat(fd).st_uid != os.geteuid():  # else its manifest could make us remove what is not ours
        os.close(fd)
        raise PermissionError(errno.EPERM, "the copy there belongs to another user")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        os.close(fd)
        what = f"another copy into {os.fsdecode(target)!r} is going on"
        raise BlockingIOError(exc.errno, explain(what, next="wait for it, or choose another directory")) from exc
    return fd


class _Copy:
    """One run."""

    def __init__(self, snapshot: Snapshot, before: Snapshot | None, store: Store, target: bytes, patience_s: float) -> None:
        self._snapshot = snapshot
        self._new = snapshot.spans - before.spans if before is not None else frozenset()
        self._store = store
        self._target = target
        self._manifest = target + b"/" + STATE + b"/manifest"
        self._part = target + b"/" + STATE + b"/part"
        self._patience_s = patience_s
        self._ours: dict[bytes, _Ours] = {}
        self._opened: dict[bytes, None] = {}
        """Directories in which something changes: their modes and times are set at the end."""

    def run(self, rows: list[tuple[int, bytes, _Ours]]) -> Copied:
        """Copy."""
        self._ours = before = self._read_manifest()
        planned = {wanted.path: wanted for _, _, wanted in rows}
        there: dict[bytes, os.stat_result | None] = {}
        for _, parent, wanted in rows:  # what lies below a link is elsewhere
            status = there[parent] if parent else None
            is_reached = not parent or (status is not None and stat.S_ISDIR(status.st_mode))
            there[wanted.path] = _lstat(self._target + wanted.path) if is_reached else None
        self._refuse_conflicts(planned, there)
        todo = [(row, parent, wanted) for row, parent, wanted in rows if self._is_due(row, wanted, there[wanted.path])]
        gone = [ours for path, ours in before.items() if path not in planned]
        if todo or gone:
            due = {wanted.path: wanted for _, _, wanted in todo}
            self._ours = before | due
            self._write_manifest()
            self._prepare(todo)
        failed, num_bytes = [], 0
        for row, parent, wanted in todo:
            try:
                num_bytes += self._write(row, parent, wanted)
            except _Lost:
                failed.append(os.fsdecode(wanted.path))
        num_removed = self._remove(gone)
        self._settle(rows)
        if todo or gone:
            self._write_manifest()
        if failed:
            raise _changed_meanwhile(failed)
        num_written = sum(wanted.kind != stat.S_IFDIR for _, _, wanted in todo)
        return Copied(num_written, num_bytes, num_removed, len(rows) - len(todo))

    def _refuse_conflicts(self, planned: dict[bytes, _Ours], there: dict[bytes, os.stat_result | None]) -> None:
        conflicts = []
        for path, wanted in planned.items():
            status, ours = there[path], self._ours.get(path)
            kind = stat.S_IFMT(status.st_mode) if status is not None else wanted.kind
            if ours is None:
                fits = status is None or kind == wanted.kind == stat.S_IFDIR
            else:  # of another kind than we want and than we made: a link in place of a directory, say, would lead all below it elsewhere
                fits = kind in (wanted.kind, ours.kind) or not ours.inode or stat.S_IFDIR not in (kind, wanted.kind)
            if not fits:
                conflicts.append(os.fsdecode(path[1:]))
        if conflicts:
            named = ", ".join(map(repr, conflicts[:_MOST_NAMED])) + (", ..." if len(conflicts) > _MOST_NAMED else "")
            raise FileExistsError(
                explain(
                    f"{len(conflicts)} paths are in the way that this copy has not made: {named}",
                    where=os.fsdecode(self._target),
                    next="move them away, or copy to another directory; nothing has been changed",
                )
            )

    def _is_due(self, row: int, wanted: _Ours, status: os.stat_result | None) -> bool:
        ours = self._ours.get(wanted.path)
        if wanted.kind == stat.S_IFDIR:  # one that somebody else has made is used, and stays theirs
            return status is None or not stat.S_ISDIR(status.st_mode)
        return (
            ours is None or not ours.inode or not ours.is_of(wanted) or not ours.is_intact(status) or self._snapshot.span(row) in self._new
        )

    def _prepare(self, todo: list[tuple[int, bytes, _Ours]]) -> None:
        shutil.rmtree(os.fsdecode(self._part), ignore_errors=True)
        os.mkdir(self._part, 0o700)
        for row, _, wanted in todo:
            if wanted.kind == stat.S_IFREG:
                span = self._span(row)
                self._store.want(span.offset, span.length)

    def _span(self, row: int) -> Span:
        return self._snapshot.span(row) or Span(0, 0)

    # ------------------------------------------------------------------------------------------------------------- writing

    def _write(self, row: int, parent: bytes, wanted: _Ours) -> int:
        """Put one path into place; the bytes of it."""
        self._open_up(parent)
        place, num_bytes = self._target + wanted.path, 0
        if wanted.kind == stat.S_IFDIR:
            self._clear(place, wanted)
            os.mkdir(place, 0o700)
            self._record(wanted)
            self._opened[wanted.path] = None
            return 0
        part = self._part + b"/%d" % row
        if wanted.kind == stat.S_IFLNK:
            os.symlink(wanted.target, part)
            os.utime(part, ns=(wanted.mtime_ns, wanted.mtime_ns), follow_symlinks=False)
        else:
            num_bytes = self._write_file(row, part, wanted)
        self._clear(place, wanted)
        os.rename(part, place)
        self._record(wanted)
        return num_bytes

    def _record(self, wanted: _Ours) -> None:
        status = os.lstat(self._target + wanted.path)
        self._ours[wanted.path] = msgspec.structs.replace(wanted, inode=status.st_ino, changed_ns=status.st_ctime_ns)

    def _clear(self, place: bytes, wanted: _Ours) -> None:
        """Make way where a directory of ours is to become something else, or the reverse; files give way to files by themselves."""
        status = _lstat(place)
        if status is None or stat.S_ISDIR(status.st_mode) is (wanted.kind == stat.S_IFDIR):
            return
        if wanted.kind == stat.S_IFDIR:
            os.unlink(place)
            return
        self._remove([ours for path, ours in self._ours.items() if path.startswith(wanted.path + b"/")])
        try:
            os.rmdir(place)
        except OSError as exc:
            what = f"the directory {os.fsdecode(place)!r} is to become a file, and has files that this copy has not made"
            raise FileExistsError(exc.errno, explain(what, next="move them away, and copy again", detail=str(exc))) from exc
        self._opened.pop(wanted.path, None)

    def _write_file(self, row: int, part: bytes, wanted: _Ours) -> int:
        span = self._span(row)
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            for offset in range(0, span.length, _WINDOW_BYTES):
                for view in self._fetched(span, offset, wanted.path):
                    if view.obj is ZEROS.obj:
                        os.lseek(fd, len(view), os.SEEK_CUR)
                        continue
                    while view:
                        view = view[os.write(fd, view) :]
            os.ftruncate(fd, span.length)
            os.fchmod(fd, self._snapshot.mode(row) & 0o777)
            os.utime(fd, ns=(wanted.mtime_ns, wanted.mtime_ns))
        except BaseException:
            os.unlink(part)
            raise
        finally:
            os.close(fd)
        return span.length

    def _fetched(self, span: Span, offset: int, path: bytes) -> list[memoryview]:
        arrival = _Arrival()
        at_once = self._store.read(span, offset, _WINDOW_BYTES, arrival)
        found = at_once if isinstance(at_once, list | int) else arrival.wait(self._patience_s)
        if found is None:
            what = f"{os.fsdecode(path[1:])!r}: its bytes did not arrive within {self._patience_s:g} s"
            raise TimeoutError(errno.ETIMEDOUT, explain(what, where=os.fsdecode(self._target), next="copy again; what is there is kept"))
        if isinstance(found, int):
            if found in (errno.EIO, errno.ESTALE):
                raise _Lost
            raise OSError(found, explain(f"{os.fsdecode(path[1:])!r}: {os.strerror(found)}", next="connect the source, and copy again"))
        return found

    # ------------------------------------------------------------------------------------------------------------- the rest

    def _remove(self, gone: list[_Ours]) -> int:
        """Remove what the source no longer has, unless somebody has changed it: then it is theirs. The deepest first."""
        count = 0
        for ours in sorted(gone, key=lambda ours: ours.path.count(b"/"), reverse=True):
            place = self._target + ours.path
            if self._is_reached(ours.path) and ours.is_intact(_lstat(place)):
                self._open_up(ours.path.rpartition(b"/")[0])
                try:
                    if ours.kind == stat.S_IFDIR:
                        os.rmdir(place)
                    else:
                        os.unlink(place)
                    count += 1
                except OSError as exc:
                    if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                        raise
            self._ours.pop(ours.path, None)
            self._opened.pop(ours.path, None)
        return count

    def _is_reached(self, path: bytes) -> bool:
        """Whether all directories above a path are directories still, and no links."""
        folders = accumulate(path.split(b"/")[1:-1], lambda above, name: above + b"/" + name, initial=self._target)
        return all(map(_is_directory, folders))

    def _open_up(self, folder: bytes) -> None:
        """Something changes in this directory: let us write there, until `_settle`."""
        if folder in self._ours and folder not in self._opened:
            self._opened[folder] = None
            mode = os.lstat(self._target + folder).st_mode
            if mode & 0o300 != 0o300:
                os.chmod(self._target + folder, stat.S_IMODE(mode) | 0o700)

    def _settle(self, rows: list[tuple[int, bytes, _Ours]]) -> None:
        """Set modes, and times of directories, where they are not those of the source; the deepest directories last written first."""
        for row, _, wanted in reversed(rows):
            status = _lstat(self._target + wanted.path)
            if wanted.kind == stat.S_IFLNK or wanted.path not in self._ours or status is None or stat.S_IFMT(status.st_mode) != wanted.kind:
                continue
            mode, place = self._snapshot.mode(row) & 0o777, self._target + wanted.path
            if wanted.kind == stat.S_IFDIR:
                if wanted.path in self._opened or stat.S_IMODE(status.st_mode) != mode:
                    os.chmod(place, mode)
                if status.st_mtime_ns != wanted.mtime_ns:
                    os.utime(place, ns=(wanted.mtime_ns, wanted.mtime_ns))
            elif stat.S_IMODE(status.st_mode) != mode:
                os.chmod(place, mode)
                self._record(wanted)

    def _read_manifest(self) -> dict[bytes, _Ours]:
        try:
            with open(self._manifest, "rb") as file:
                entries = msgspec.msgpack.decode(file.read(), type=list[_Ours])
        except FileNotFoundError:
            return {}
        except msgspec.DecodeError as exc:
            what = f"{os.fsdecode(self._manifest)!r} is damaged, so nobody knows which files are ours"
            raise ValueError(explain(what, next="remove the directory, or copy to another one", detail=str(exc))) from exc
        return {entry.path: entry for entry in entries if _is_inside(entry.path)}

    def _write_manifest(self) -> None:
        with open(self._manifest + b".new", "wb") as file:
            file.write(msgspec.msgpack.encode(list(self._ours.values())))
        os.rename(self._manifest + b".new", self._manifest)


class _Lost(Exception):
    """The bytes of a file are gone at the source."""


class _Arrival:
    """A reader that blocks."""

    def __init__(self) -> None:
        self.cancelled = False
        self._done = threading.Event()
        self._value: object = None

    def answer(self, value: object) -> None:
        """The bytes are here."""
        self._value = value
        self._done.set()

    def fail(self, errno: int) -> None:
        """They will not come."""
        self._value = errno
        self._done.set()

    def wait(self, patience_s: float) -> list[memoryview] | int | None:
        """The bytes, an errno, or None after `patience_s`."""
        self._done.wait(patience_s)
        self.cancelled = self._value is None
        return cast("list[memoryview] | int | None", self._value)


def _is_inside(path: bytes) -> bool:
    return path.startswith(b"/") and not {b"", b".", b".."} & set(path[1:].split(b"/"))


def _lstat(path: bytes) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_directory(path: bytes) -> bool:
    status = _lstat(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def _changed_meanwhile(paths: list[str]) -> OSError:
    named = ", ".join(repr(path[1:]) for path in paths[:_MOST_NAMED]) + (", ..." if len(paths) > _MOST_NAMED else "")
    what = f"{len(paths)} files changed at the source while they were copied: {named}"
    return OSError(errno.EIO, explain(what, next="refresh and copy again; all others have been copied, the older versions of these stay"))
