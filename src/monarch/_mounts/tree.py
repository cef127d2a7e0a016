"""The tree: a pushed directory as the kernel sees it, one whole version at a time.

Rules of this file:
    1. A node means one content for ever. A directory keeps its node over versions; a file whose bytes changed, a link whose target
       changed, a name that is something else now, get a new one. So whoever has the old file open goes on reading the old
       version whole, and whoever opens the name anew gets the new one whole.
    2. A node of an old version lives until the kernel forgets it; then `gone` says which bytes nobody can read any more.
    3. Node ids are never used twice.
    4. Nodes exist for what the kernel has asked about; the rest of a version is columns.

Read next: `snapshot.py` for the columns, `pushed.py` for the file system.
"""

from __future__ import annotations

import errno
import stat
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from monarch._mounts.filesystem import ROOT, Attr, Entry, entry_of
from monarch._mounts.ranges import Span
from monarch._mounts.snapshot import Snapshot

_MOST_LISTINGS = 4


class Invalidation(NamedTuple):
    """Something that the kernel may remember and that is no longer so."""

    parent: int
    name: bytes
    """The entry to forget in `parent`; b"": no entry, but attributes and listing of the directory `parent`."""
    node: int
    """What the entry led to, whose attributes are to be forgotten too; 0: nothing, the name did not exist."""


class _Node:
    """What the kernel has, or may have, a reference to."""

    __slots__ = ("attr", "children", "number", "parent", "row", "span", "target")

    def __init__(self, number: int, parent: _Node | None, row: int, snapshot: Snapshot) -> None:
        self.number = number
        self.parent = parent or self
        self.row = row
        """In the current version; -1: only an old version has it."""
        self.attr = snapshot.attr(row)
        self.children: dict[bytes, _Node] | None = {} if stat.S_ISDIR(self.attr[0]) else None
        """Those that have a node; None: this is no directory."""
        self.span = snapshot.span(row)
        """Where its bytes are; None: a directory or a symbolic link."""
        self.target = snapshot.targets.get(row) if snapshot.targets else None


class Tree:
    """The current version of a directory, and what is still in use of older ones. Thread: any."""

    def __init__(
        self,
        snapshot: Snapshot,
        gone: Callable[[Sequence[Span]], None] = lambda files: None,
        knows: Callable[[int], bool] = lambda node: True,
    ) -> None:
        """Show `snapshot`.

        Args:
            gone: called, not under the lock, with files that no version shows any more and nobody has open.
            knows: whether the kernel may have a reference to a node; if not, `forget` will not come for it.
        """
        self._knows = knows
        self._lock = threading.Lock()
        self._gone = gone
        self._snapshot = snapshot
        self._files = snapshot.spans
        self._retired: list[_Node] = []
        """Since the last `settle`. The kernel may be about to hear of one: a call that began before `apply` is answered after it."""
        self._held: dict[Span, int] = {}
        """Files of old versions that the kernel has a reference to, with the number of nodes."""
        root = _Node(ROOT, None, 0, snapshot)
        self._nodes = {ROOT: root}
        self._next = ROOT + 1
        self._listings: dict[int, list[tuple[bytes, Entry]]] = {}
        """Of the current version, by directory, those made last: a listing is read in pieces."""

    @property
    def snapshot(self) -> Snapshot:
        """The current version."""
        return self._snapshot

    def lookup(self, parent: int, name: bytes) -> Entry | int:
        """The node of a name."""
        with self._lock:
            folder = self._nodes.get(parent)
            if folder is None:
                return errno.ESTALE
            if folder.children is None:
                return errno.ENOTDIR
            if name == b"." or name == b"..":
                node = folder if name == b"." else folder.parent
                return Entry(node.number, node.attr)
            row = self._snapshot.child(folder.row, name) if folder.row >= 0 else None
            if row is None:
                return errno.ENOENT
            node = self._node_of(folder, name, row)
            return Entry(node.number, node.attr)

    def attr(self, node: int) -> Attr | int:
        """What `stat` says of a node."""
        with self._lock:
            found = self._nodes.get(node)
            return errno.ESTALE if found is None else found.attr

    def children(self, node: int) -> list[tuple[bytes, Entry]] | int:
        """What is in a directory, in the order of names, without "." and ".."."""
        with self._lock:
            folder = self._nodes.get(node)
            if folder is None:
                return errno.ESTALE
            if folder.children is None:
                return errno.ENOTDIR
            if folder.row < 0:
                return []
            listing = self._listings.get(node)
            if listing is None:
                if len(self._listings) >= _MOST_LISTINGS:
                    self._listings.clear()
                listing = self._listings[node] = self._list(folder)
            return listing

    def target(self, node: int) -> bytes | int:
        """Where a symbolic link points."""
        with self._lock:
            found = self._nodes.get(node)
            if found is None:
                return errno.ESTALE
            return errno.EINVAL if found.target is None else found.target

    def file(self, node: int) -> Span | int:
        """Where the bytes of a file are."""
        with self._lock:
            found = self._nodes.get(node)
            if found is None:
                return errno.ESTALE
            if found.children is not None:
                return errno.EISDIR
            return found.span or errno.EINVAL

    def forget(self, node: int) -> None:
        """The kernel has no reference to a node any more."""
        gone: list[Span] = []
        with self._lock:
            found = self._nodes.get(node)
            if found is not None and found.row < 0:
                gone = self._bury(found)
        if gone:
            self._gone(gone)

    def apply(self, snapshot: Snapshot) -> list[Invalidation]:
        """Show another version: every call from now on sees it whole. `settle` follows when no call from before is under way any more.

        Returns:
            What the kernel has to forget. Tell it after this call: until then it may still show what it remembers.

        Cost: O(files) to find the bytes that are gone, O(nodes that the kernel has asked about) for the rest.
        """
        files = snapshot.spans
        found: list[Invalidation] = []
        with self._lock:
            before, self._snapshot = self._snapshot, snapshot
            self._listings.clear()
            old, self._files = self._files, files
            folders = [(self._nodes[ROOT], 0)]
            while folders:
                folder, row = folders.pop()
                folders += self._move(folder, row, before, found)
            gone = [span for span in old - files if span not in self._held]
        if gone:
            self._gone(gone)
        return found

    def settle(self) -> None:
        """Bury the nodes of old versions that the kernel does not know."""
        gone: list[Span] = []
        with self._lock:
            retired, self._retired = self._retired, []
            for node in retired:
                if node.number in self._nodes and not self._knows(node.number):
                    gone += self._bury(node)
        if gone:
            self._gone(gone)

    # ------------------------------------------------------------------------------------------------ under the lock

    def _list(self, folder: _Node) -> list[tuple[bytes, Entry]]:
        rows = self._snapshot.children(folder.row)
        names = self._snapshot.names[rows.start : rows.stop]
        nodes = [self._node_of(folder, name, row) for row, name in zip(rows, names, strict=True)]
        return [(name, entry_of((found.number, found.attr))) for name, found in zip(names, nodes, strict=True)]

    def _node_of(self, folder: _Node, name: bytes, row: int) -> _Node:
        assert folder.children is not None
        node = folder.children.get(name)
        if node is None:
            node = folder.children[name] = self._nodes[self._next] = _Node(self._next, folder, row, self._snapshot)
            self._next += 1
        return node

    def _move(self, folder: _Node, row: int, before: Snapshot, found: list[Invalidation]) -> list[tuple[_Node, int]]:
        """Bring a directory into the current version; the directories in it that have a node, with their rows."""
        assert folder.children is not None
        folders = []
        now = self._snapshot
        was, folder.row = folder.row, row
        old_rows, new_rows = before.children(was), now.children(row)
        attr = now.attr(row)
        changed = attr != folder.attr
        folder.attr = attr
        if now.has_same_rows(before, old_rows, new_rows):
            if changed:
                found.append(Invalidation(folder.number, b"", folder.number))
            shift = new_rows.start - old_rows.start
            for child in folder.children.values():
                if child.children is not None:
                    folders.append((child, child.row + shift))
                else:
                    child.row += shift
            return folders
        old_names, new_names = before.names[old_rows.start : old_rows.stop], now.names[new_rows.start : new_rows.stop]
        if changed or old_names != new_names:
            found.append(Invalidation(folder.number, b"", folder.number))
        if old_names != new_names:
            found += [Invalidation(folder.number, name, 0) for name in set(new_names).difference(old_names)]
        for name, child in list(folder.children.items()):
            at = now.child(row, name)
            if at is None or not before.shows_same(child.row, now, at):
                del folder.children[name]
                found.append(Invalidation(folder.number, name, child.number))
                self._retire(child)
            elif child.children is not None:
                folders.append((child, at))
            else:
                child.row = at
                attr = now.attr(at)
                if attr != child.attr:
                    child.attr = attr
                    found.append(Invalidation(folder.number, name, child.number))
        return folders

    def _retire(self, node: _Node) -> None:
        """A node, and all below it, is of an old version from now on."""
        stack = [node]
        while stack:
            node = stack.pop()
            node.row = -1
            stack += (node.children or {}).values()
            if node.children is not None:
                node.children = {}
            self._retired.append(node)
            span = node.span
            if span is not None and span.length:
                self._held[span] = self._held.get(span, 0) + 1

    def _bury(self, node: _Node) -> list[Span]:
        """Remove a node of an old version that the kernel no longer knows; the bytes that nobody can read any more."""
        del self._nodes[node.number]
        span = node.span
        if span is None or span not in self._held:
            return []
        self._held[span] -= 1
        if self._held[span]:
            return []
        del self._held[span]
        return [] if span in self._files else [span]
