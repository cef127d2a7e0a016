"""A pushed directory as a file system: names from the tree, bytes from the store.

Rules of this file:
    1. What a node says never changes, so the kernel may remember it for a year; `refresh` says what it has to forget.
    2. While a file is open it is read in one way: by the kernel from the descriptor, or through us. The kernel refuses a mixture.

Read next: `tree.py`, `store.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from monarch._mounts.filesystem import PUSHED, Attr, Entry, Later, Opened
from monarch._mounts.hashing import Digests
from monarch._mounts.index import BIG_FILE_THRESHOLD
from monarch._mounts.keeping import keep
from monarch._mounts.ranges import Span
from monarch._mounts.snapshot import Snapshot
from monarch._mounts.store import Store
from monarch._mounts.tree import Invalidation, Tree

_SMALL = Opened(0, None, keep_cache=True)
_GIVEN_BYTES = 128 << 10
"""A file that is larger is not given to the kernel when it is opened: it is read in several pieces anyway, and perhaps not all of it."""


class PushedFileSystem:
    """A `FileSystem` over one version after the other of a directory. Thread: any."""

    def __init__(self, snapshot: Snapshot, store: Store) -> None:
        """Show `snapshot`."""
        store.extend(snapshot)
        self.habits = PUSHED._replace(forgets=True)
        self._store = store
        self._tree = Tree(snapshot, gone=store.drop, knows=lambda node: self.knows(node))
        self._lock = threading.Lock()
        self._handles: dict[int, int] = {}
        """Handle to node of the files that are open."""
        self._ways: dict[int, tuple[int, int | None]] = {}
        """Node of an open file to the number of handles and the descriptor that they are read from."""
        self._next_handle = 1
        self._given: set[int] = set()
        """Nodes of small files whose bytes the kernel was offered. If it did not take them, or drops them, it asks."""

    def knows(self, node: int) -> bool:
        """Whether the kernel may have a reference to a node: who makes a server replaces this by what that says."""
        return True

    @property
    def snapshot(self) -> Snapshot:
        """The version that is shown."""
        return self._tree.snapshot

    def refresh(self, snapshot: Snapshot, digests: Digests | None = None) -> list[Invalidation]:
        """Show another version. Files that are open stay as they are.

        Args:
            digests: by which bytes that are here already are kept.

        Returns:
            What the kernel has to be told to forget; then call `settle`. Thread: one refresh at a time.
        """
        if digests is None:
            self._store.extend(snapshot)
        else:
            keep(self._store, self._tree.snapshot, snapshot, digests)
        return self._tree.apply(snapshot)

    def settle(self) -> None:
        """Give back what only an old version had, as far as nobody uses it. No call that began before `refresh` may be under way."""
        self._tree.settle()

    def lookup(self, parent: int, name: bytes, later: Later) -> Entry | int:
        """The node of a name."""
        return self._tree.lookup(parent, name)

    def attr(self, node: int, later: Later) -> Attr | int:
        """What `stat` says."""
        return self._tree.attr(node)

    def children(self, node: int, later: Later) -> Sequence[tuple[bytes, Entry]] | int:
        """A directory's content."""
        return self._tree.children(node)

    def target(self, node: int, later: Later) -> bytes | int:
        """Where a symbolic link points."""
        return self._tree.target(node)

    def open(self, node: int, later: Later) -> Opened | int:
        """Open a file for reading. Only big ones are told apart by handles: of others there is nothing to keep."""
        file = self._tree.file(node)
        if isinstance(file, int):
            return file
        if file.length < BIG_FILE_THRESHOLD:
            return _SMALL if file.length > _GIVEN_BYTES or node in self._given else self._open_small(node, file)
        with self._lock:
            num_handles, fd = self._ways.get(node, (0, None))
            if not num_handles:
                fd = self._store.backing_fd(file)
            handle, self._next_handle = self._next_handle, self._next_handle + 1
            self._handles[handle] = node
            self._ways[node] = num_handles + 1, fd
        return Opened(handle, fd, keep_cache=True)

    def _open_small(self, node: int, file: Span) -> Opened:
        content = self._store.whole(file)
        if not content:
            return _SMALL
        self._given.add(node)
        return Opened(0, None, keep_cache=True, content=content)

    def release(self, handle: int) -> None:
        """A file is no longer open."""
        if not handle:
            return
        with self._lock:
            node = self._handles.pop(handle, None)
            if node is not None:
                num_handles, fd = self._ways.pop(node)
                if num_handles > 1:
                    self._ways[node] = num_handles - 1, fd

    def read(self, node: int, handle: int, offset: int, size: int, later: Later) -> Sequence[memoryview | bytes] | int | Later:
        """Bytes of a file; `handle` may be 0, the kernel need not have opened it."""
        file = self._tree.file(node)
        if isinstance(file, int):
            return file
        found = self._store.read(file, offset, size, later)
        return found if isinstance(found, list | int) else later

    def forget(self, node: int) -> None:
        """The kernel knows a node no longer."""
        self._given.discard(node)
        self._tree.forget(node)
