"""The source: a directory as it changes, scanned into versions and read in pieces. What sends the pieces is not known here.

Rules of this file:
    1. An address never gets other bytes than it had when it was first read. A file whose size, times or inode changed keeps its place
       only when everything that was read of it still hashes to the same, so that no host ever mixes two versions.
    2. A piece is right only when its file was what the scan saw, before and after it was read. Anything else is reported as
       diverged and filled with zeros.
    3. Size and modification time prove nothing: programs set them back. The change time and the inode count as well, and a file that
       changed within `RACY_NS` of the scan is looked at again, because two changes in one tick of the clock leave the same times.

Read next: `snapshot.py` for the form of a version, `store.py` for the other end.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from array import array
from collections.abc import Iterator
from typing import NamedTuple

from monarch._base.errors import explain
from monarch._mounts import hashing
from monarch._mounts.hashing import PIECE_BYTES, XXH3, Digests
from monarch._mounts.index import BIG_FILE_THRESHOLD, Found, place, read_fully, walk
from monarch._mounts.ranges import Ranges, Span
from monarch._mounts.snapshot import NOWHERE, Columns, Kind, Snapshot, Status, add_row

RACY_NS = 100_000_000
_SETTLE_NS = 20_000_000

_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO that takes the place of a file must not block us


class Diverged(NamedTuple):
    """Bytes that are lost for the version that has them: the file has changed since."""

    path: str
    """In the current version; "": only an older one has these bytes."""
    offset: int
    length: int


class Changes(NamedTuple):
    """How a version differs from an earlier one, as paths."""

    added: list[str]
    changed: list[str]
    """Other bytes, another target, or another kind of file."""
    touched: list[str]
    """Other attributes only."""
    removed: list[str]
    num_bytes: int
    """Of what was added or changed."""


class _Scan:
    """One look at the directory, while it is put together."""

    def __init__(self, previous: Snapshot | None) -> None:
        self.previous = previous
        self.columns = Columns.empty()
        self.inodes = array("Q")
        self.unsure: list[tuple[int, int]] = []
        """Rows of files that may be the same as rows of the previous version."""
        self._kinds: dict[Kind, int] = {}

    def add(self, name: str, parent: int, status: os.stat_result, target: str | None) -> int:
        """Append a row; files are nowhere as yet."""
        kind = Kind(status.st_mode, status.st_nlink, status.st_uid, status.st_gid)
        seen = Status(kind, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        row = add_row(self.columns, self._kinds, os.fsencode(name), parent, seen, NOWHERE)
        self.inodes.append(status.st_ino)
        if target is not None:
            self.columns.targets[row] = os.fsencode(target)
        return row


class Source:
    """A directory that is pushed to other hosts. Thread: any; `scan` one at a time."""

    def __init__(self, path: str, *, algorithm: str | None = None) -> None:
        """Follow the directory at `path`, which is taken relative to the working directory of this moment.

        Args:
            algorithm: for digests; None: the best that is here.

        Raises:
            ValueError: the path is empty.
        """
        if not path:
            raise ValueError(explain("the path of the directory to push is empty", next="name a directory"))
        self.path = os.path.abspath(path)
        self.algorithm = algorithm or hashing.algorithms()[0]
        self._digest = hashing.digest(self.algorithm)
        self._lock = threading.Lock()
        self._snapshot: Snapshot | None = None
        self._inodes = array("Q")
        self._scanned_ns = 0
        self._sent = Ranges()
        """Addresses whose bytes somebody may have."""
        self._digests: dict[int, bytes] = {}
        """Of pieces that may have been sent, by the address of their first byte."""
        self._outgoing: frozenset[Span] = frozenset()
        """Files of the version before this one that are no longer in it."""

    @property
    def snapshot(self) -> Snapshot | None:
        """The version that the last scan saw; None before the first."""
        return self._snapshot

    # ------------------------------------------------------------------------------------------------------------ scanning

    def scan(self) -> Snapshot:
        """Look at the directory.

        Returns:
            The version that is there now; the very object of the last scan when nothing has changed.

        Raises:
            OSError: the directory is not there, or one in it cannot be listed.

        Cost: one `stat` a file, about 10 us each; bytes are read only of files that were sent and look changed.
        """
        started_ns = time.time_ns()
        root = os.stat(self.path)
        if not stat.S_ISDIR(root.st_mode):
            raise NotADirectoryError(explain(f"{self.path!r} is no directory", next="push the directory that it is in"))
        scan = self._walked(root)
        with self._lock:
            for row, before in scan.unsure:
                if self._is_unchanged(scan, row, before):
                    scan.columns.offsets[row] = self._known.offsets[before]
            snapshot = self._placed(scan)
            if self._snapshot is None or snapshot != self._snapshot:
                self._forget_older(snapshot)
                self._snapshot = snapshot
            self._inodes, self._scanned_ns = scan.inodes, started_ns
            return self._snapshot

    @property
    def _known(self) -> Snapshot:
        if self._snapshot is None:
            raise ValueError(explain(f"{self.path!r} has not been looked at", next="call scan() first"))
        return self._snapshot

    def _walked(self, root: os.stat_result) -> _Scan:
        scan = _Scan(self._snapshot)
        scan.add("", 0, root, None)
        rows: dict[str, tuple[int, int | None]] = {"": (0, 0 if scan.previous is not None else None)}
        for folder, entries in walk(self.path.rstrip("/"), root):
            parent, before = rows.pop(folder)
            for entry in entries:
                row = scan.add(entry.name, parent, entry.stat, entry.target)
                was = scan.previous.child(before, scan.columns.names[row]) if scan.previous is not None and before is not None else None
                if entry.descends:
                    rows[f"{folder}/{entry.name}"] = row, was
                elif entry.target is None and not stat.S_ISDIR(entry.stat.st_mode):
                    self._settle(scan, row, was, entry)
        return scan

    def _settle(self, scan: _Scan, row: int, was: int | None, entry: Found) -> None:
        """A file that has certainly not changed keeps its place."""
        previous, status = scan.previous, entry.stat
        if previous is None or was is None or previous.offsets[was] == NOWHERE or previous.sizes[was] != status.st_size:
            return
        times = previous.mtimes[was], previous.ctimes[was], self._inodes[was]
        if times == (status.st_mtime_ns, status.st_ctime_ns, status.st_ino) and not self._is_racy(status.st_ctime_ns):
            scan.columns.offsets[row] = previous.offsets[was]
        else:
            scan.unsure.append((row, was))

    def _is_racy(self, ctime_ns: int) -> bool:
        """Whether a file changed so shortly before the last scan that another change may have left the same times."""
        return ctime_ns >= self._scanned_ns - RACY_NS

    def _is_unchanged(self, scan: _Scan, row: int, before: int) -> bool:
        """Whether whatever was sent of a file of the previous version is what the file has now."""
        span = self._known.span(before)
        if span is None or not self._sent.within(span.offset, span.end):
            return span is not None
        pieces = [piece for piece in _pieces(span) if self._sent.within(piece.offset, piece.end)]
        if any(piece.offset not in self._digests for piece in pieces):
            return False
        seen = _Seen.of(scan.columns, scan.inodes, row)
        buffer = memoryview(bytearray(min(PIECE_BYTES, span.length)))
        path = self._known.path(before)
        for piece in pieces:
            into = buffer[: piece.length]
            if not self._read(path, seen, piece.offset - span.offset, into) or self._digest(into) != self._digests[piece.offset]:
                return False
        return True

    def _placed(self, scan: _Scan) -> Snapshot:
        columns = scan.columns
        modes = [stat.S_ISDIR(kind.mode) or stat.S_ISLNK(kind.mode) for kind in columns.kinds]
        rows = [row for row, offset in enumerate(columns.offsets) if offset == NOWHERE and not modes[columns.kind_of[row]]]
        offsets, total = place([columns.sizes[row] for row in rows], self._snapshot.total_bytes if self._snapshot is not None else 0)
        for row, offset in zip(rows, offsets, strict=True):
            columns.offsets[row] = offset
        return Snapshot(columns, total)

    def _forget_older(self, snapshot: Snapshot) -> None:
        """Digests of a version are of use until the one after the next."""
        for span in self._outgoing:
            self._sent.remove(span.offset, span.end)
            for piece in _pieces(span):
                self._digests.pop(piece.offset, None)
        self._outgoing = self._snapshot.spans - snapshot.spans if self._snapshot is not None else frozenset()

    # ------------------------------------------------------------------------------------------------------------- reading

    def read_piece(self, offset: int, length: int, into: memoryview) -> list[Diverged]:
        """Read bytes of the current version.

        Args:
            into: `length` bytes to fill; what belongs to no file becomes zero.

        Returns:
            Ranges whose bytes are lost for this version, zeros in `into`; never to be sent as if they were right.
        """
        diverged = []
        at = offset
        with self._lock:
            for row, span in self._known.files(Span(offset, length)):
                low, high = max(span.offset, offset), min(span.end, offset + length)
                if at < low:
                    diverged.append(Diverged("", at, low - at))
                part, at = into[low - offset : high - offset], high
                path = self._known.path(row)
                if self._read(path, _Seen.of(self._known.columns, self._inodes, row), low - span.offset, part):
                    self._note(row, span, low, part)
                else:
                    diverged.append(Diverged(path, low, high - low))
        if at < offset + length:
            diverged.append(Diverged("", at, offset + length - at))
        for _, start, size in diverged:
            into[start - offset : start - offset + size] = bytes(size)
        return diverged

    def _read(self, path: str, seen: _Seen, offset: int, into: memoryview) -> bool:
        """Whether a file is what a scan saw, and its bytes from `offset` are in `into`."""
        try:
            fd = os.open(self.path + path, _OPEN)
        except OSError:
            return False
        try:
            fresh_ns = _SETTLE_NS - (time.time_ns() - seen.ctime_ns)
            if 0 < fresh_ns <= _SETTLE_NS:  # a write sets the time when it begins, so one may still be under way
                time.sleep(fresh_ns / 1e9)
            return seen == _Seen.now(fd) and read_fully(fd, offset, into) and seen == _Seen.now(fd)
        except OSError:
            return False
        finally:
            os.close(fd)

    def _note(self, row: int, file: Span, start: int, data: memoryview) -> None:
        """These bytes may be sent now: remember what they were."""
        self._sent.add(start, start + len(data))
        if file.length >= BIG_FILE_THRESHOLD and self.algorithm != XXH3 and not self._is_racy(self._known.ctimes[row]):
            return  # slower than reading; if the file changes, whoever has the old bytes can hash them as well
        for piece in _pieces(file, Span(start, len(data))):
            if start <= piece.offset and piece.end <= start + len(data):
                self._digests[piece.offset] = self._digest(data[piece.offset - start : piece.end - start])

    # ------------------------------------------------------------------------------------------------------------ comparing

    def hashes(self, old: Snapshot, new: Snapshot) -> Digests:
        """Digests by which a host that has `old` sees what of `new` it has already.

        Args:
            new: the current version.

        Returns:
            Those of each file that has changed, or is new and as long as one that is gone; and what is known of the files that are gone.
            A file that is changing at this moment is left out.

        Cost: reads each changed file once.
        """
        found: list[tuple[Span, bytes]] = []
        lengths = set()
        for span in sorted(old.spans - new.spans):
            lengths.add(span.length)
            found += [(piece, self._digests[piece.offset]) for piece in _pieces(span) if piece.offset in self._digests]
        for row, span in new.files():
            if span not in old.spans:
                path = new.path(row)
                if old.find(path) is not None or span.length in lengths:
                    found += self._hash_file(new, row, path, span)
        spans = [span for span, _ in found]
        return Digests(self.algorithm, [span.offset for span in spans], [span.length for span in spans], [value for _, value in found])

    def _hash_file(self, snapshot: Snapshot, row: int, path: str, span: Span) -> list[tuple[Span, bytes]]:
        pieces = list(_pieces(span))
        with self._lock:
            if snapshot is not self._snapshot:
                return []
            seen = _Seen.of(snapshot.columns, self._inodes, row)
            try:
                fd = os.open(self.path + path, _OPEN)
            except OSError:
                return []
            try:
                if seen != _Seen.now(fd):
                    return []
                values = hashing.hash_pieces(fd, algorithm=self.algorithm, length=span.length)
                if seen != _Seen.now(fd):
                    return []
            except (OSError, EOFError):
                return []
            finally:
                os.close(fd)
            self._sent.add(span.offset, span.end)  # whoever keeps a piece for its digest has it as if it had been sent
            self._digests.update((piece.offset, value) for piece, value in zip(pieces, values, strict=True))
        return list(zip(pieces, values, strict=True))

    def changed_since(self, previous: Snapshot) -> Changes:
        """How the current version differs from `previous`."""
        return changes(previous, self._known)


class _Seen(NamedTuple):
    """By what a file is told from another version of itself."""

    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, columns: Columns, inodes: array[int], row: int) -> _Seen:
        return cls(inodes[row], columns.sizes[row], columns.mtimes[row], columns.ctimes[row])

    @classmethod
    def now(cls, fd: int) -> _Seen:
        status = os.fstat(fd)
        return cls(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _pieces(file: Span, within: Span | None = None) -> Iterator[Span]:
    """The pieces by which a file is compared, counted from its beginning.

    Args:
        within: only those with a part in it.
    """
    start, end = (file.offset, file.end) if within is None else (within.offset, min(within.end, file.end))
    at = file.offset + (start - file.offset) // PIECE_BYTES * PIECE_BYTES
    while at < end:
        yield Span(at, min(PIECE_BYTES, file.end - at))
        at += PIECE_BYTES


def changes(old: Snapshot, new: Snapshot) -> Changes:
    """How `new` differs from `old`. Cost: O(paths)."""
    found = Changes([], [], [], [], 0)
    num_bytes = 0
    before: dict[int, int] = {0: 0}
    """Row in `new` to the row in `old` of the same path."""
    removed: list[int] = []
    for row in range(len(new)):
        was = before.get(row)
        children = new.children(row)
        if was is not None:
            names = {new.names[child] for child in children}
            before.update((child, at) for child in children if (at := old.child(was, new.names[child])) is not None)
            removed += [child for child in old.children(was) if old.names[child] not in names]
        span = new.span(row)
        if was is None:
            found.added.append(new.path(row))
        elif not old.shows_same(was, new, row):
            found.changed.append(new.path(row))
        else:
            if old.attr(was) != new.attr(row):
                found.touched.append(new.path(row))
            continue
        num_bytes += span.length if span is not None else 0
    for row in removed:
        found.removed.append(old.path(row))
        removed += old.children(row)
    return found._replace(num_bytes=num_bytes)
