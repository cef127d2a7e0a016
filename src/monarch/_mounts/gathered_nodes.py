"""Nodes of folders that are seen from afar: what is known of each path, since when, and whether somebody tells when it changes.

Pure: no clock, no I/O.

Rules of this file:
    1. A node is one file of one host for good. When its path stands for another file, it is gone, and that one gets a node of its own.
       The folders themselves are the exception: their nodes stay.
    2. What somebody guards is known until he tells of a change. All else is known for `LEASE_S`.
    3. Nodes that nobody needs go: those which the kernel has forgotten, and, of listings, all but the latest.

Read next: `gathered.py`.
"""

from __future__ import annotations

import stat
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import count

from monarch._mounts.filesystem import ROOT, Attr, Entry
from monarch._mounts.folder import Found
from monarch._mounts.watches import Change, What

LEASE_S = 0.05
"""For so long an answer that nobody guards is good."""
_MOST_LISTED = 200_000
"""Entries of listings that are kept."""
_WRITE_BITS = 0o222
_NOT_YET = Found(stat.S_IFDIR | 0o555, 0, 0, 0, 0)
"""Shown of a folder that does not exist."""


class Node:
    """One file or directory. Thread: one at a time."""

    __slots__ = (
        "asked_s", "epoch", "found", "gone", "guarded", "kids", "last_index", "listed_s", "listing_guarded", "name", "number", "opens",
        "parent", "path", "shard",
    )  # fmt: skip

    def __init__(self, number: int, shard: int, path: bytes, parent: Node | None) -> None:
        self.number = number
        self.shard = shard
        """Which folder it is in; -1: above all folders."""
        self.path = path
        """In its folder."""
        self.name = path.rpartition(b"/")[2]
        self.parent = parent
        self.found = _NOT_YET
        self.asked_s: float | None = None
        """When `found` was asked for; None: a change has been told since."""
        self.guarded = False
        self.epoch = 0
        """How many changes were told."""
        self.kids: dict[bytes, Node] = {}
        """As far as they are known."""
        self.listed_s: float | None = None
        """When all of `kids` were asked for; None: not, or a change has been told since."""
        self.listing_guarded = False
        self.opens = 0
        self.gone = False
        self.last_index = -1
        """Window of the last read."""

    @property
    def is_folder(self) -> bool:
        """It is a whole folder."""
        return not self.path

    def is_known(self, now_s: float) -> bool:
        """Whether `found` still holds."""
        return self.asked_s is not None and (self.guarded or now_s - self.asked_s < LEASE_S)

    def is_listed(self, now_s: float) -> bool:
        """Whether `kids` is all that there is."""
        return self.listed_s is not None and (self.listing_guarded or now_s - self.listed_s < LEASE_S)

    def doubt(self) -> None:
        """A change was told."""
        self.asked_s = None
        self.epoch += 1


class Nodes:
    """All nodes of a mount. Thread: one at a time."""

    def __init__(self, names: list[bytes] | None, *, uid: int, gid: int) -> None:
        """
        Args:
            names: of the folders, each a directory below the root; None: there is one, and it is the root.
            uid, gid: whom everything belongs to.
        """
        self._uid, self._gid = uid, gid
        self._numbers = count(ROOT)
        self._by_number: dict[int, Node] = {}
        self._listed: OrderedDict[int, int] = OrderedDict()
        self._num_listed = 0
        self.knows: Callable[[int], bool] = lambda number: True
        """Whether the kernel may have a node."""
        self.on_changed: Callable[[Node], None] = lambda node: None
        """Attributes or bytes are no longer what they were."""
        self.on_renamed: Callable[[Node, bytes], None] = lambda parent, name: None
        """A name may stand for something else now, or for nothing."""
        self.on_gone: Callable[[Node], None] = lambda node: None
        """A node has been dropped."""
        self.root = self._new(0 if names is None else -1, b"", None)
        self.folders = [self.root] if names is None else [self._new(index, b"", self.root) for index in range(len(names))]
        for folder, name in zip(self.folders, names or [], strict=False):
            folder.name = name
            self.root.kids[name] = folder

    def __len__(self) -> int:
        return len(self._by_number)

    def _new(self, shard: int, path: bytes, parent: Node | None) -> Node:
        node = Node(next(self._numbers), shard, path, parent)
        self._by_number[node.number] = node
        return node

    def get(self, number: int) -> Node | None:
        """A node by its number."""
        return self._by_number.get(number)

    def entry(self, node: Node) -> Entry:
        """A node as the kernel wants it."""
        return Entry(node.number, self.attr(node))

    def attr(self, node: Node) -> Attr:
        """Its attributes: nothing can be written, and it belongs to whoever has mounted."""
        found = node.found
        time_ns = found.mtime_ns
        nlink = 2 if node.shard < 0 else 1
        mode = found.mode if stat.S_ISLNK(found.mode) else found.mode & ~_WRITE_BITS
        lasts = node.shard < 0 or (node.guarded and node.asked_s is not None and not node.gone)
        return Attr(mode, found.size, nlink, self._uid, self._gid, time_ns, time_ns, time_ns, lasts)

    # --- learning ------------------------------------------------------------------------------------------------

    def learn(self, parent: Node, name: bytes, found: Found, asked_s: float | None) -> Node:
        """The node that `name` in `parent` stands for now.

        Args:
            asked_s: when it was asked for; None: a change has been told meanwhile.
        """
        node = parent.kids.get(name)
        if node is not None and (node.found.ident != found.ident or stat.S_IFMT(node.found.mode) != stat.S_IFMT(found.mode)):
            self.lose(node)
            node = None
        if node is None:
            path = parent.path + b"/" + name if parent.path else name
            node = parent.kids[name] = self._new(parent.shard, path, parent)
        self.update(node, found, asked_s)
        return node

    def update(self, node: Node, found: Found, asked_s: float | None) -> None:
        """`found` is what `node` is now."""
        if node.asked_s is not None and node.found.version != found.version:
            self.on_changed(node)
        node.found = found
        node.asked_s = asked_s
        node.guarded = found.guarded

    def learn_folder(self, folder: Node, found: Found | None, asked_s: float | None) -> None:
        """What a whole folder is now; None: nothing yet."""
        if found is None or folder.found.ident not in (0, found.ident):
            for kid in list(folder.kids.values()):
                self.lose(kid)
            folder.listed_s = None
        self.update(folder, _NOT_YET if found is None else found, asked_s)

    def learn_kids(self, parent: Node, entries: Iterable[tuple[bytes, Found]], asked_s: float | None, *, guarded: bool) -> None:
        """All that the directory `parent` holds now."""
        before, parent.kids = parent.kids, {}
        for name, found in entries:
            node = before.pop(name, None)
            if node is not None:
                parent.kids[name] = node
            self.learn(parent, name, found, asked_s)
        for node in before.values():
            self.lose(node)
        parent.listed_s = asked_s
        parent.listing_guarded = guarded
        self._num_listed += len(parent.kids) - self._listed.pop(parent.number, 0)
        self._listed[parent.number] = len(parent.kids)
        while self._num_listed > _MOST_LISTED and len(self._listed) > 1:
            number, size = self._listed.popitem(last=False)
            self._num_listed -= size
            self._unlist(self._by_number[number])

    def _unlist(self, node: Node) -> None:
        node.listed_s = None
        for kid in list(node.kids.values()):
            if not kid.kids and not kid.opens and not self.knows(kid.number):
                self.lose(kid)

    def lose(self, node: Node) -> None:
        """`node` and all below it are not there any more. Who has it open may go on with it."""
        for each in list(_below(node)):
            each.gone = True
            self._num_listed -= self._listed.pop(each.number, 0)
            if not each.opens and not self.knows(each.number):
                self._drop(each)
        if node.parent is not None and node.parent.kids.get(node.name) is node:
            del node.parent.kids[node.name]

    def forget(self, number: int) -> None:
        """The kernel does not know a node any more."""
        node = self._by_number.get(number)
        if node is None or node.is_folder or node.shard < 0 or node.opens:
            return
        parent = node.parent
        if node.gone:
            self._drop(node)
        elif parent is not None and parent.listed_s is None and not node.kids:
            self.lose(node)
            self._by_number.pop(number, None)
            self.on_gone(node)

    def close(self, node: Node) -> None:
        """One opening of `node` less."""
        node.opens -= 1
        if node.gone and not node.opens and not self.knows(node.number):
            self._drop(node)

    def _drop(self, node: Node) -> None:
        if self._by_number.pop(node.number, None) is not None:
            self.on_gone(node)

    # --- changes -------------------------------------------------------------------------------------------------

    def doubt(self, shard: int, changes: Iterable[Change]) -> None:
        """Changes in a folder were told."""
        for path, what in changes:
            node = self.find(shard, path)
            if what == What.NAME:
                self._doubt_name(shard, *_split(path))
            if node is None:
                continue
            if what == What.CONTENT:
                self._doubt(node)
            elif what == What.UNWATCHED:
                node.listed_s = None
                for each in (node, *node.kids.values()):
                    self._doubt(each)
            else:
                for each in _below(node):
                    each.listed_s = None
                    self._doubt(each)

    def _doubt_name(self, shard: int, path: bytes, name: bytes) -> None:
        parent = self.find(shard, path)
        if parent is not None:
            parent.listed_s = None
            self._doubt(parent)
            self.on_renamed(parent, name)

    def _doubt(self, node: Node) -> None:
        node.doubt()
        self.on_changed(node)

    def doubt_all(self, shard: int) -> None:
        """Nothing that is known of a folder counts any more."""
        self.doubt(shard, [(b"", What.ALL)])

    def find(self, shard: int, path: bytes) -> Node | None:
        """The node that is known at a path of a folder."""
        node: Node | None = self.folders[shard]
        for name in path.split(b"/") if path else ():
            node = node.kids.get(name) if node is not None else None
        return node


def _split(path: bytes) -> tuple[bytes, bytes]:
    parent, _, name = path.rpartition(b"/")
    return parent, name


def _below(node: Node) -> Iterator[Node]:
    """`node` and all below it that is known."""
    pending = [node]
    while pending:
        node = pending.pop()
        yield node
        pending += node.kids.values()
