"""What the tests of mounts share: a directory that is pushed, whole or in parts, and readers that wait."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

from monarch._mounts.filesystem import ROOT, Entry
from monarch._mounts.pushed import PushedFileSystem
from monarch._mounts.snapshot import NOWHERE, Columns, Kind, Snapshot, Status, add_row
from monarch._mounts.source import Source
from monarch._mounts.store import Store
from monarch._mounts.tree import Tree

MIB = 1 << 20


_MEMORY = "memfd:monarch-mount"
DIRECTORY, FILE, LINK = 0o40755, 0o100644, 0o120777


def made(*rows, total: int = 1000) -> Snapshot:
    """A snapshot of (parent, name, mode, size, offset) below a root, unchecked."""
    columns, known = Columns.empty(), {}
    for parent, name, mode, size, offset in [(0, b"", DIRECTORY, 0, NOWHERE), *rows]:
        row = add_row(columns, known, name, parent, Status(Kind(mode, 1, 5, 6), size, 7, 8), offset)
        if mode == LINK:
            columns.targets[row] = b"target"
    return Snapshot(columns, total)


def memfds() -> int:
    """How many memories of stores are mapped."""
    return Path("/proc/self/maps").read_text().count(_MEMORY)


def resident_kib() -> int:
    """How much of them is in use: by their descriptors, and of those without one what is mapped."""
    files = [os.stat(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _MEMORY in _target(f"/proc/self/fd/{fd}")]
    kib = {status.st_ino: status.st_blocks // 2 for status in files}
    total, inside = sum(kib.values()), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            inside = _MEMORY in line and int(words[4]) not in kib
        elif inside and words[0] == "Rss:":
            total += int(words[1])
    return total


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:  # the descriptor of the listing itself
        return ""


class Answer:
    """A `Later` that keeps what it was told."""

    def __init__(self) -> None:
        self.cancelled = False
        self.given = []

    @property
    def value(self):
        assert len(self.given) == 1, self.given
        return self.given[0]

    def answer(self, value) -> None:
        self.given.append(bytes_of(value))

    def fail(self, errno) -> None:
        self.given.append(errno)


def bytes_of(value):
    """What a read returned: its bytes, or an errno."""
    return b"".join(map(bytes, value)) if isinstance(value, list) else value


class Kernel:
    """Counts the references that a kernel would have, and forgets a node with the last; one call at a time, as one server thread does."""

    def __init__(self, *args, **options) -> None:
        self.references = {}
        self._turn = threading.RLock()
        super().__init__(*args, **options)

    def knows(self, node) -> bool:
        return node in self.references

    def lookup(self, parent, name, *later):
        with self._turn:
            found = super().lookup(parent, name, *later)
            if isinstance(found, Entry) and name not in (b".", b".."):
                self.remember(found.node, 1)
            return found

    def remember(self, node, count) -> None:
        with self._turn:
            self.references[node] = self.references.get(node, 0) + count

    def forget(self, node, count) -> None:
        with self._turn:
            self.references[node] -= count
            if not self.references[node]:
                del self.references[node]
                super().forget(node)


class Mounted(Kernel, PushedFileSystem):
    """A pushed directory that a kernel has looked at."""


class SeenTree(Kernel, Tree):
    """A tree that a kernel has looked at."""

    def __init__(self, snapshot, gone=lambda files: None) -> None:
        super().__init__(snapshot, gone, lambda node: self.knows(node))

    def apply(self, snapshot):
        found = super().apply(snapshot)
        self.settle()  # no call is under way
        return found


class World:
    """A directory at `path`, and a host that it is pushed to: `refresh` shows changes, `deliver` moves bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.mkdir(exist_ok=True)
        self.source = Source(str(path))
        self.wanted = []
        self.store = Store(lambda offset, length: self.wanted.append((offset, length)))
        self.fs = None

    def start(self) -> World:
        self.fs = Mounted(self.source.scan(), self.store)
        return self

    def refresh(self, *, settle=True):
        """Scan, and show what is there; the invalidations."""
        new, found = self.source.scan(), []
        if new is not self.fs.snapshot:
            found = self.fs.refresh(new, self.source.hashes(self.fs.snapshot, new))
        if settle:  # no call is under way
            self.fs.settle()
        return found

    def deliver(self, offset=0, length=None) -> int:
        """Move what of a range is missing, a piece at a time; how many bytes arrived."""
        moved, version = 0, self.store.version
        for span in self.store.missing(offset, self.fs.snapshot.total_bytes if length is None else length):
            for start in range(span.offset, span.end, MIB):
                size = min(MIB, span.end - start)
                into = bytearray(size)
                lost = self.source.read_piece(start, size, memoryview(into))
                at = start
                for _, low, count in lost:
                    moved += self._put(at, into[at - start : low - start])
                    self.store.failed_at(low, count, errno.EIO, version=version)
                    at = low + count
                moved += self._put(at, into[at - start :])
        return moved

    def _put(self, offset: int, data: bytes) -> int:
        self.store.put(offset, memoryview(data))
        return len(data)

    def serve(self) -> None:
        """Deliver all that readers wait for."""
        while self.wanted:
            self.deliver(*self.wanted.pop(0))

    def entry(self, path: str):
        """What a path leads to, with a reference to each node on the way; or an errno."""
        found = Entry(ROOT, None)
        for name in os.fsencode(path).split(b"/"):
            found = self.fs.lookup(found.node, name, Answer())
            if isinstance(found, int):
                return found
        return found

    def node(self, path: str) -> int:
        """The node of a path that exists, with a reference to each node on the way."""
        return self.entry(path).node

    def start_read(self, node: int, offset: int = 0, size: int = 1 << 40) -> Answer:
        answer = Answer()
        found = self.fs.read(node, 0, offset, size, answer)
        if found is not answer:
            answer.given.append(bytes_of(found))
        return answer

    def read(self, path: str, offset: int = 0, size: int = 1 << 40):
        """Bytes of what has this name now, delivered if need be; or an errno."""
        found = self.entry(path)
        if isinstance(found, int):
            return found
        try:
            return self.read_node(found.node, offset, size)
        finally:
            self.fs.forget(found.node, 1)

    def read_node(self, node: int, offset: int = 0, size: int = 1 << 40):
        """Bytes of a file, delivered if need be; or an errno."""
        answer = self.start_read(node, offset, size)
        self.serve()
        return answer.value

    def close(self) -> None:
        self.store.close()
