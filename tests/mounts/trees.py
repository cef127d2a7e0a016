"""Trees in memory for the tests of mounts: what `FileSystem` asks for, in the plainest way."""

from __future__ import annotations

import errno
import itertools
import os
import stat
import threading

from monarch._mounts.filesystem import PUSHED, ROOT, Attr, Entry, Opened

TIME_NS = 1_700_000_000_123_456_789


class Tree:
    """Directories are dicts by name, files bytes, links `Link`s. A name that begins with `late` is answered by another thread."""

    def __init__(self, content, habits=PUSHED):
        self.habits = habits
        self.numbers = itertools.count(ROOT)
        self.nodes = {}
        self.attrs = {}
        self.kids = {}
        self.paths = {}
        self.listings = {}
        self.calls = []
        self.waiting = []
        """`Later`s of reads of `Parked` files."""
        self.parked = threading.Event()
        self.released = []
        self.forgotten = []
        self.backing = {}
        self.given = set()
        """Nodes of small files that are opened with their content."""
        self.error = None
        """Raised by every method while it is set."""
        self.add("/", content)

    def add(self, path, content, *, mode=None):
        """Put `content` at `path`; a node that was there is replaced."""
        self.listings.clear()
        node = next(self.numbers)
        self.nodes[node] = content
        self.paths[path] = node
        kind, permissions, size = _kind_of(content)
        self.attrs[node] = Attr(kind | (mode or permissions), size, 1, os.getuid(), os.getgid(), TIME_NS, TIME_NS, TIME_NS)
        if isinstance(content, dict):
            self.kids[node] = {}
            for name, child in content.items():
                self.add(os.path.join(path, name), child)
        if path != "/":
            parent, name = os.path.split(path)
            self.kids[self.paths[parent]][os.fsencode(name)] = node
        return node

    def change(self, path, content):
        """New bytes for a file that stays the same node."""
        self.listings.clear()
        node = self.paths[path]
        self.nodes[node] = content
        self.attrs[node] = self.attrs[node]._replace(size=len(content), mtime_ns=TIME_NS + 1)
        return node

    def remove(self, path):
        self.listings.clear()
        parent, name = os.path.split(path)
        del self.kids[self.paths[parent]][os.fsencode(name)]
        return self.paths.pop(path)

    def entry(self, node):
        return Entry(node, self.attrs[node])

    def _called(self, *call):
        self.calls.append(call)
        if self.error is not None:
            raise self.error

    # ------------------------------------------------------------------------------------------------------ FileSystem

    def lookup(self, parent, name, later):
        self._called("lookup", parent, name)
        node = self.kids[parent].get(name)
        if name.startswith(b"late"):
            threading.Timer(0.01, later.answer if node else later.fail, [self.entry(node) if node else errno.ENOENT]).start()
            return later
        return errno.ENOENT if node is None else self.entry(node)

    def attr(self, node, later):
        self._called("attr", node)
        return self.attrs.get(node, errno.ESTALE)

    def children(self, node, later):
        self._called("children", node)
        if node not in self.listings:
            self.listings[node] = [(name, self.entry(child)) for name, child in self.kids[node].items()]
        return self.listings[node]

    def target(self, node, later):
        self._called("target", node)
        return self.nodes[node].target if isinstance(self.nodes[node], Link) else errno.EINVAL

    def open(self, node, later):
        self._called("open", node)
        content = [memoryview(self.nodes[node])] if node in self.given else []
        return Opened(handle=node + 1000, backing_fd=self.backing.get(node), content=content)

    def release(self, handle):
        self._called("release", handle)
        self.released.append(handle)

    def read(self, node, handle, offset, size, later):
        self._called("read", node, handle, offset, size)
        content = self.nodes[node]
        if isinstance(content, Parked):
            self.waiting.append(later)
            self.parked.set()
            return later
        data = memoryview(content)[offset : offset + size]
        half = len(data) // 2
        return [data[:half], data[half:]]

    def forget(self, node):
        self._called("forget", node)
        self.forgotten.append(node)


class Link:
    """A symbolic link."""

    def __init__(self, target):
        self.target = target


class Parked(bytes):
    """A file whose reads are never answered by themselves."""


def _kind_of(content):
    if isinstance(content, dict):
        return stat.S_IFDIR, 0o755, 0
    if isinstance(content, Link):
        return stat.S_IFLNK, 0o777, len(content.target)
    return stat.S_IFREG, 0o644, len(content)
