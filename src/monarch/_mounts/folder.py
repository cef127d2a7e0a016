"""A folder of a worker as it is looked at from afar: attributes, listings, and bytes of files.

Rules of this file:
    1. An errno is an answer, not an exception.
    2. Bytes of one answer are of one file in one version: it is the same before and after they were read, or it is read again.
    3. A file that was read lately stays open for `_OPEN_S`, so that a reader gets its end also when it has been replaced meanwhile.
    4. Links are resolved here. One to a file is that file; one to a directory in the folder is a relative link; one to a directory outside
       is that directory, unless it is found behind another such link. So the tree is finite, and no link leads out of a mount.

Read next: `watches.py` for changes, `gather_source.py` for the actor, `gathered.py` for who asks.
"""

from __future__ import annotations

import os
import stat
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from errno import EINVAL, EIO, ELOOP, ENOENT, ENOTDIR, ESTALE
from typing import NamedTuple, Protocol

from monarch._wire.frames import Buffer

_OPEN_S = 10.0
_MOST_OPEN = 64
_TRIES = 5
_SMALL_BYTES = 128 << 10


class Found(NamedTuple):
    """What a path stands for."""

    mode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    ident: int
    """Number of the file on this host; of two files at one time it differs."""
    guarded: bool = False
    """Whoever knows this will be told when it changes."""
    target: bytes = b""
    """Of a link."""

    @property
    def version(self) -> tuple[int, int, int]:
        """Size and times: they differ when the bytes do."""
        return self[1:4]


class Listed(NamedTuple):
    """What a directory holds."""

    guarded: bool
    entries: list[tuple[bytes, tuple[object, ...] | int]]
    """Name, and the fields of a `Found` or the errno of who looked."""


class Want(NamedTuple):
    """A range of a file, and what the asker has of it already."""

    offset: int
    length: int
    num_known: int = 0
    """The first bytes of the range, which need not be sent ..."""
    digest: tuple[int, int] = (0, 0)
    """... if they are still these."""


class Got(NamedTuple):
    """Bytes of a file."""

    found: tuple[object, ...]
    """The file when they were read, as the fields of a `Found`."""
    parts: list[tuple[int, Buffer]]
    """Of each range: how many of its first bytes are those known, and the bytes behind them. Fewer than wanted: the file ends."""


class Watcher(Protocol):
    """Who tells of changes."""

    def watch(self, path: bytes) -> bool: ...
    def is_watched(self, path: bytes) -> bool: ...


def digest(data: Buffer) -> tuple[int, int]:
    """Enough to see that bytes have changed by themselves, at 0.7 GiB/s; no protection against who wants to be taken for unchanged,
    and who has the file may write into it what he likes."""
    return zlib.crc32(data), zlib.adler32(data)


class _Handle:
    """A file that is open."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 0
        self.used_s = 0.0


class Folder:
    """One folder. Thread: any, several at once."""

    def __init__(self, root: bytes, watcher: Watcher) -> None:
        self._root = root
        self._watcher = watcher
        self._lock = threading.Lock()
        self._handles: OrderedDict[tuple[bytes, int], _Handle] = OrderedDict()

    # --- looking -------------------------------------------------------------------------------------------------

    def stat(self, path: bytes, *, keep: bool = False) -> Found | int:
        """What `path` stands for; b"" is the folder itself.

        Args:
            keep: open it as well, so that it can be read for a while even if it is replaced at once.
        """
        if not _is_clean(path):
            return EINVAL
        if not path:
            return self._found(self._root, path, os.stat, guarded=self._watcher.watch(path))
        watched = self._watcher.watch(os.path.dirname(path))
        for _ in range(_TRIES if keep else 0):
            found = self._found(self._full(path), path, os.lstat, guarded=watched)
            if isinstance(found, int) or not stat.S_ISREG(found.mode) or self._keep(path, found.ident):
                return found
        return self._found(self._full(path), path, os.lstat, guarded=watched)

    def listing(self, path: bytes) -> Listed | int:
        """What the directory `path` holds. Names that lead nowhere, and those that can't be followed, are left out."""
        if not _is_clean(path):
            return EINVAL
        watched = self._watcher.watch(path)
        prefix = path + b"/" if path else b""
        entries: list[tuple[bytes, tuple[object, ...] | int]] = []
        try:
            with os.scandir(self._full(path)) as scan:
                for entry in scan:
                    found = self._found(entry.path, prefix + entry.name, lambda _: entry.stat(follow_symlinks=False), guarded=watched)  # noqa: B023
                    if found not in (ENOENT, ELOOP):
                        entries.append((entry.name, found if isinstance(found, int) else tuple(found)))
        except OSError as exc:
            return exc.errno or EIO
        return Listed(watched, entries)

    def _full(self, path: bytes) -> bytes:
        return self._root + b"/" + path if path else self._root

    def _found(self, full: bytes, path: bytes, look, *, guarded: bool) -> Found | int:  # type: ignore[no-untyped-def]
        try:
            found = look(full)
            if stat.S_ISLNK(found.st_mode):
                return self._followed(full, path, found)
        except OSError as exc:
            return exc.errno or EIO
        # A directory's own watch tells of its times. A change of a file by another name of it would not be told.
        tells = self._watcher.is_watched(path) if stat.S_ISDIR(found.st_mode) else found.st_nlink == 1
        return _of(found, guarded=guarded and tells)

    def _followed(self, full: bytes, path: bytes, link: os.stat_result) -> Found | int:
        root = os.path.realpath(self._root)
        real = os.path.realpath(full)
        inside = _is_in(real, root)
        try:
            found = os.stat(full)
        except FileNotFoundError:
            return _link(path, real, root, link) if inside else ENOENT
        if not stat.S_ISDIR(found.st_mode):
            return _of(found)
        if inside:
            return _link(path, real, root, link)
        return _of(found) if _is_in(os.path.realpath(os.path.dirname(full)), root) else ELOOP

    # --- reading -------------------------------------------------------------------------------------------------

    def read(self, path: bytes, ident: int, wants: Sequence[Want]) -> Got | int:
        """Ranges of the file `path`, all of one version.

        Returns:
            ESTALE: `path` is another file than `ident` now, which is not open here any more; EIO: it does not hold still.
        """
        if not _is_clean(path):
            return EINVAL
        try:
            handle = self._take_handle(path, ident)
        except OSError as exc:
            return exc.errno or EIO
        if handle is None:
            return ESTALE
        try:
            return self._read_steadily(handle.fd, wants)
        except OSError as exc:
            return exc.errno or EIO
        finally:
            self._give_back(handle)

    def is_small(self, path: bytes) -> bool:
        """Whether all of a file is read in less time than another thread takes to begin with it."""
        try:
            return _is_clean(path) and os.stat(self._full(path)).st_size <= _SMALL_BYTES
        except OSError:
            return True

    def _read_steadily(self, fd: int, wants: Sequence[Want]) -> Got | int:
        earlier: tuple[Found, list[bytes]] | None = None
        for _ in range(_TRIES):
            before = _of(os.fstat(fd))
            data = [_read_range(fd, want.offset, want.length) for want in wants]
            after = _of(os.fstat(fd))
            if after.version == before.version:
                return _without_known(before, data, wants)
            # One that grows all the time is taken as it was, if what was there is there still.
            if earlier is not None and earlier[0].size <= after.size and all(map(bytes.startswith, data, earlier[1])):
                return _without_known(*earlier, wants)
            earlier = before, data
        return EIO

    def _keep(self, path: bytes, ident: int) -> bool:
        try:
            handle = self._take_handle(path, ident)
        except OSError:  # who reads it hears of that
            return True
        if handle is not None:
            self._give_back(handle)
        return handle is not None

    def _take_handle(self, path: bytes, ident: int) -> _Handle | None:
        with self._lock:
            handle = self._handles.get((path, ident))
            if handle is None:
                handle = _open(self._full(path), ident)
                if handle is None:
                    return None
                self._handles[path, ident] = handle
            self._handles.move_to_end((path, ident))
            handle.users += 1
        return handle

    def _give_back(self, handle: _Handle) -> None:
        with self._lock:
            handle.users -= 1
            handle.used_s = time.monotonic()
        self._close_unused(_OPEN_S, _MOST_OPEN)

    def tick(self) -> None:
        """Close what was not used lately; to be called now and then."""
        self._close_unused(_OPEN_S, _MOST_OPEN)

    def close(self) -> None:
        """Close everything that nobody reads."""
        self._close_unused(-1.0, 0)

    def _close_unused(self, idle_s: float, most: int) -> None:
        now = time.monotonic()
        with self._lock:
            surplus = len(self._handles) - most
            for key, handle in list(self._handles.items()):
                if not handle.users and (surplus > 0 or now - handle.used_s > idle_s):
                    del self._handles[key]
                    os.close(handle.fd)
                    surplus -= 1


def _open(full: bytes, ident: int) -> _Handle | None:
    fd = os.open(full, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)  # a FIFO must not make us wait
    found = os.fstat(fd)
    if _ident(found) == ident and stat.S_ISREG(found.st_mode):
        return _Handle(fd)
    os.close(fd)
    return None


def _read_range(fd: int, offset: int, length: int) -> bytes:
    data = os.pread(fd, length, offset)
    while 0 < len(data) < length and (more := os.pread(fd, length - len(data), offset + len(data))):
        data += more
    return data


def _without_known(found: Found, data: list[bytes], wants: Sequence[Want]) -> Got:
    parts: list[tuple[int, Buffer]] = []
    for each, (_, _, num_known, known) in zip(data, wants, strict=True):
        view = memoryview(each)
        is_known = 0 < num_known <= len(each) and digest(view[:num_known]) == known
        parts.append((num_known, view[num_known:]) if is_known else (0, view))
    return Got(tuple(found), parts)


def _link(path: bytes, real: bytes, root: bytes, link: os.stat_result) -> Found:
    target = b"../" * path.count(b"/") + real[len(root.rstrip(b"/")) + 1 :] or b"."
    return Found(link.st_mode, len(target), link.st_mtime_ns, link.st_ctime_ns, _ident(link), target=target)


def _of(found: os.stat_result, *, guarded: bool = False) -> Found:
    return Found(found.st_mode, found.st_size, found.st_mtime_ns, found.st_ctime_ns, _ident(found), guarded)


def _ident(found: os.stat_result) -> int:
    return found.st_dev << 64 | found.st_ino


def _is_in(path: bytes, root: bytes) -> bool:
    return path == root or path.startswith(root.rstrip(b"/") + b"/")


def _is_clean(path: bytes) -> bool:
    """Leads down from the folder by names alone."""
    return not path or (b"\0" not in path and not {b"", b".", b".."} & set(path.split(b"/")))


def kind_of_root(root: bytes) -> int:
    """0: a directory, or nothing yet; else the errno that says what is wrong with it."""
    try:
        return 0 if stat.S_ISDIR(os.stat(root).st_mode) else ENOTDIR
    except FileNotFoundError:
        return 0
    except OSError as exc:
        return exc.errno or EIO
