"""The source: a directory as it changes, scanned into versions and read in pieces. What sends the pieces is not known here.

Rules of this file:
    1. An address never gets other bytes than it had when it was first read. A file whose size, times or inode changed keeps its place
       only when everything that was read of it still hashes to the same, so that no host ever mixes two versions.
    2. A piece is right only when its file was what the scan saw, before and after it was read. Anything else is reported as
       diverged and filled with zeros.
    3. Size and modification time prove nothing: programs set them back. The change time and the inode count as well, and a file that
       changed within `RACY_NS` of the scan is looked at again, because two changes in one tick of the clock leave the same times; a big
       one longer, because a write sets them when it begins.

Read next: `scan.py` for a look at it, `snapshot.py` for the form of a version, `store.py` for the other end.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple, TypeVar

from monarch._base.errors import explain
from monarch._base.reused import reused, settle
from monarch._mounts import hashing
from monarch._mounts.hashing import PIECE_BYTES, XXH3, Digests
from monarch._mounts.holes import data_in, gaps_in
from monarch._mounts.index import BIG_FILE_THRESHOLD, place, read_fully
from monarch._mounts.ranges import Ranges, Span
from monarch._mounts.scan import Scan, differing, patched, walked
from monarch._mounts.snapshot import NOWHERE, Snapshot

RACY_NS = 100_000_000
COARSE_NS = 2_000_000_000
"""As much more where the clock of the file system seems to tick in seconds, or in pairs of them."""
WRITING_NS = 10
"""As much more for each byte of a file: one write leaves the time when it began, and may go on for so long."""
_LONGEST_WRITE_NS = WRITING_NS << 31
"""No system call writes more than 2 GiB."""
_SETTLE_NS = 20_000_000

T = TypeVar("T")
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


def root_of(path: str) -> os.stat_result:
    """The `stat` of a directory to push.

    Raises:
        FileNotFoundError: it is not there.
        NotADirectoryError: it is something else.
        OSError: it can't be looked at.
    """
    try:
        root = os.stat(path)
    except FileNotFoundError as exc:
        what = f"the directory to push is not there (any more): {path!r}"
        hint = "make it, or name another one; a relative path is meant from the working directory of the program"
        raise FileNotFoundError(exc.errno, explain(what, where=f"host {os.uname().nodename}", next=hint)) from None
    if not stat.S_ISDIR(root.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, explain(f"{path!r} is no directory", next="push the directory that it is in"))
    return root


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
        self._covered: set[str] = set()
        """Directories that are left empty, as paths in the tree."""
        self._digest = hashing.digest(self.algorithm)
        self._lock = threading.Lock()
        self._snapshot: Snapshot | None = None
        self._scan: Scan | None = None
        """What the last look saw."""
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

    def cover(self, paths: Iterable[str]) -> None:
        """Show directories as empty ones from the next scan on, because something is, or will be, mounted there.

        Args:
            paths: real ones of this machine; those that are not in the source do not matter.
        """
        root = os.path.realpath(self.path).rstrip("/") + "/"
        self._covered = {path[len(root) - 1 :] for path in paths if path.startswith(root)}

    # ------------------------------------------------------------------------------------------------------------ scanning

    def scan(self) -> Snapshot:
        """Look at the directory.

        Returns:
            The version that is there now; the very object of the last scan when nothing has changed.

        Raises:
            OSError: the directory is not there, or one in it cannot be listed.

        Cost: one `stat` a file, about 2 us each, 8 where names have changed; bytes are read only of files that were sent and look changed.
        """
        started_ns = time.time_ns()
        before = self._scan
        found = differing(before, self._is_racy, self._scanned_ns - RACY_NS - COARSE_NS - _LONGEST_WRITE_NS) if before is not None else None
        if found == {}:
            return self._known
        root = root_of(self.path)
        if before is None or found is None:
            scan = walked(self.path, root, self._covered)
            rows = self._rows_before(scan)
        else:
            scan = patched(before, found)
            rows = ((row, row) for row in found)
        unsure = list(self._unsettled(scan, rows))
        with self._lock:
            for row, was in unsure:
                if self._is_unchanged(scan, row, was):
                    scan.columns.offsets[row] = self._known.offsets[was]
            snapshot = self._placed(scan)
            if self._snapshot is None or snapshot != self._snapshot:
                self._forget_older(snapshot)
                self._snapshot = snapshot
            self._scan, self._scanned_ns = scan, started_ns
            return self._snapshot

    @property
    def _known(self) -> Snapshot:
        if self._snapshot is None:
            raise ValueError(explain(f"{self.path!r} has not been looked at", next="call scan() first"))
        return self._snapshot

    def _rows_before(self, scan: Scan) -> Iterator[tuple[int, int]]:
        """The rows of paths that the version before has too, with their rows there."""
        previous = self._snapshot
        if previous is None:
            return
        names = scan.columns.names
        before = {0: 0}
        for _, folder, first, end in scan.folders:
            was = before.get(folder)
            if was is not None:
                for row in range(first, end):
                    at = previous.child(was, names[row])
                    if at is not None:
                        before[row] = at
                        yield row, at

    def _unsettled(self, scan: Scan, rows: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Files that may be what they were; those that certainly are get their place at once."""
        if self._scan is None:
            return
        columns, inodes = scan.columns, scan.inodes
        old, old_inodes = self._scan.columns, self._scan.inodes
        placed = [not (stat.S_ISDIR(kind.mode) or stat.S_ISLNK(kind.mode)) for kind in columns.kinds]
        for row, was in rows:
            if old.offsets[was] == NOWHERE or old.sizes[was] != columns.sizes[row] or not placed[columns.kind_of[row]]:
                continue
            ctime_ns = columns.ctimes[row]
            seen = columns.mtimes[row], ctime_ns, inodes[row]
            if seen == (old.mtimes[was], old.ctimes[was], old_inodes[was]) and not self._is_racy(ctime_ns, columns.sizes[row]):
                columns.offsets[row] = old.offsets[was]
            else:
                yield row, was

    def _is_racy(self, ctime_ns: int, size: int) -> bool:
        """Whether something changed so shortly before the last scan that more of it, or another change, may have left the same times."""
        coarse_ns = 0 if ctime_ns % 1_000_000_000 else COARSE_NS
        return ctime_ns >= self._scanned_ns - RACY_NS - coarse_ns - min(size * WRITING_NS, _LONGEST_WRITE_NS)

    def _is_unchanged(self, scan: Scan, row: int, before: int) -> bool:
        """Whether whatever was sent of a file of the previous version is what the file has now."""
        span = self._known.span(before)
        if span is None or not self._sent.within(span.offset, span.end):
            return span is not None
        pieces = [piece for piece in _pieces(span) if self._sent.within(piece.offset, piece.end)]
        if any(piece.offset not in self._digests for piece in pieces):
            return False
        buffer = memoryview(bytearray(min(PIECE_BYTES, span.length)))

        def is_same(fd: int) -> bool:
            data = data_in(fd, 0, span.length, PIECE_BYTES)
            ends = [high for _, high in data]
            for piece in pieces:
                at, into = piece.offset - span.offset, buffer[: piece.length]
                later = bisect_right(ends, at)
                if later == len(data) or at < data[later][0]:
                    value = hashing.zero_digest(self.algorithm, piece.length)
                elif read_fully(fd, at, into):
                    value = self._digest(into)
                else:
                    return False
                if value != self._digests[piece.offset]:
                    return False
            return True

        return self._read(self._known.path(before), _Seen.of(scan, row), is_same) is True

    def _placed(self, scan: Scan) -> Snapshot:
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
                if self._read(path, self._seen(row), partial(read_fully, offset=low - span.offset, into=part)):
                    self._note(row, span, low, part)
                else:
                    diverged.append(Diverged(path, low, high - low))
        if at < offset + length:
            diverged.append(Diverged("", at, offset + length - at))
        for _, start, size in diverged:
            into[start - offset : start - offset + size] = bytes(size)
        return diverged

    def read_within(self, offset: int, length: int) -> tuple[list[tuple[int, memoryview]], list[tuple[int, int]]] | None:
        """As `read_piece`, with fewer copies, and without holes; None: these bytes are not all of one file, or it has changed.

        Returns:
            Address and bytes of data, and address and length of holes.
        """
        with self._lock:
            row, span = next(self._known.files(Span(offset, length)), (0, Span(0, 0)))
            if offset < span.offset or span.end < offset + length:
                return None
            start, is_big = offset - span.offset, span.length >= BIG_FILE_THRESHOLD

            def read(fd: int) -> list[tuple[int, memoryview]] | None:
                ranges = data_in(fd, start, start + length, PIECE_BYTES) if is_big else [(start, start + length)]
                views = [(low, reused(high - low)) for low, high in ranges]
                return views if all(read_fully(fd, low, view) for low, view in views) else None

            found = self._read(self._known.path(row), self._seen(row), read)
            if found is None:
                return None
            for low, view in found:
                self._note(row, span, span.offset + low, view)
            holes = gaps_in([(low, low + len(view)) for low, view in found], start, start + length)
            for low, high in holes:
                self._note_hole(span, span.offset + low, span.offset + high)
            parts = [(span.offset + low, settle(view)) for low, view in found]
            return parts, [(span.offset + low, high - low) for low, high in holes]

    def _seen(self, row: int) -> _Seen:
        assert self._scan is not None
        return _Seen.of(self._scan, row)

    def _read(self, path: str, seen: _Seen, read: Callable[[int], T]) -> T | None:
        """What `read` makes of the descriptor of a file; None: the file is not what a scan saw."""
        try:
            fd = os.open(self.path + path, _OPEN)
        except OSError:
            return None
        try:
            fresh_ns = _SETTLE_NS - (time.time_ns() - seen.ctime_ns)
            if 0 < fresh_ns <= _SETTLE_NS:  # a write sets the time when it begins, so one may still be under way
                time.sleep(fresh_ns / 1e9)
            found = read(fd) if seen == _Seen.now(fd) else None
            return found if seen == _Seen.now(fd) else None
        except OSError:
            return None
        finally:
            os.close(fd)

    def _note(self, row: int, file: Span, start: int, data: memoryview) -> None:
        """These bytes may be sent now: remember what they were."""
        self._sent.add(start, start + len(data))
        if file.length >= BIG_FILE_THRESHOLD and self.algorithm != XXH3 and not self._is_racy(self._known.ctimes[row], file.length):
            return  # slower than reading; if the file changes, whoever has the old bytes can hash them as well
        for piece in _pieces(file, Span(start, len(data))):
            if start <= piece.offset and piece.end <= start + len(data):
                self._digests[piece.offset] = self._digest(data[piece.offset - start : piece.end - start])

    def _note_hole(self, file: Span, start: int, end: int) -> None:
        self._sent.add(start, end)
        for piece in _pieces(file, Span(start, end - start)):
            if start <= piece.offset and piece.end <= end:
                self._digests[piece.offset] = hashing.zero_digest(self.algorithm, piece.length)

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
        for span in sorted(new.spans - old.spans):
            row = next(row for row, _ in new.files(span))
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
            seen = self._seen(row)
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
    def of(cls, scan: Scan, row: int) -> _Seen:
        columns = scan.columns
        return cls(scan.inodes[row], columns.sizes[row], columns.mtimes[row], columns.ctimes[row])

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
