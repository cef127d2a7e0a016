"""Gathered folders: a live tree of what other hosts have, each directory and file as it is there now.

Pure: time comes from a function, answers from functions that return futures. It knows no actors.

Rules of this file:
    1. Nothing waits: what is not known is asked for, and its `Later` returned.
    2. Who asks for the same thing at the same time shares one question, unless a change has been told since that was asked.
    3. What a question has found while a change of it was told is given to who waits, and not kept.
    4. A host that is lost is EIO for its folder; the others go on.

Read next: `gathered_nodes.py` for what is known, `gathered_reads.py` for bytes, `folder.py` for the other end.
"""

from __future__ import annotations

import logging
import stat
import threading
from collections.abc import Callable, Sequence
from errno import EACCES, EINVAL, EIO, EISDIR, ENOENT, ENOTDIR, ESTALE
from functools import partial
from typing import Any, NamedTuple

import msgspec

from monarch._mounts.filesystem import GUARDED, Attr, Entry, Later, Opened
from monarch._mounts.folder import Found, Listed
from monarch._mounts.gathered_nodes import Node, Nodes
from monarch._mounts.gathered_reads import Post, ReadRemote, Reads
from monarch._mounts.watches import Change, What
from monarch._mounts.windows import Windows
from monarch._runtime.future import Future
from monarch._wire.frames import Buffer

_logger = logging.getLogger("monarch.mounts")
CACHE_BYTES = 256 << 20
_HOT_S = 1.0


class Remote(NamedTuple):
    """One host's folder. Paths are relative to it, b"" is the folder; an int is an errno."""

    stat: Callable[[bytes, bool], Future[Found | int]]
    """True: the file is wanted even if it is replaced at once."""
    listing: Callable[[bytes], Future[Listed | int]]
    read: ReadRemote


class GatherStatistics(msgspec.Struct, frozen=True):
    """What a gathered mount has, and has done."""

    num_nodes: int
    num_questions: int
    """Attributes and listings that were asked for."""
    num_changes: int
    """Changes that were told."""
    cached_bytes: int
    fetched_bytes: int
    kept_bytes: int
    """Bytes of changed files that were found to be the same, and not fetched again."""
    lost: list[int]
    """Ranks of hosts that are gone."""


class _Question:
    """Something that is asked, and who waits for it."""

    def __init__(self, asked_s: float) -> None:
        self.asked_s: float | None = asked_s
        """None: what comes is not to be kept."""
        self.doubts: set[bytes] = set()
        """Names of a listing of which changes have been told since."""
        self.waiting: list[tuple[Later, Callable[[], object]]] = []

    def add(self, later: Later, answer: Callable[[], object]) -> None:
        """`answer()` is what `later` gets, once what was asked has been learnt."""
        self.waiting = [each for each in self.waiting if not each[0].cancelled]
        self.waiting.append((later, answer))

    def answer(self) -> None:
        """Answer all."""
        for later, answer in self.waiting:
            later.answer(answer())

    def fail(self, errno: int) -> None:
        """Answer all with an error."""
        for later, _ in self.waiting:
            later.fail(errno)


class GatheredFileSystem:
    """The folders of some hosts. Thread: any."""

    habits = GUARDED

    def __init__(
        self,
        remotes: Sequence[Remote],
        names: Sequence[bytes] | None,
        *,
        now: Callable[[], float],
        post: Post = lambda call: call(),
        uid: int = 0,
        gid: int = 0,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """
        Args:
            names: of the directories that show the folders; None: there is one folder, which is the root.
            now: seconds, monotonic.
            post: runs a call on a thread that may take its time.
            cache_bytes: most bytes of files that are kept.
        """
        self._remotes = remotes
        self._now = now
        self._post = post
        self._lock = threading.RLock()
        self._windows = Windows(cache_bytes)
        self.nodes = Nodes(None if names is None else list(names), uid=uid, gid=gid)
        self.nodes.on_changed = lambda node: self.on_changed(node.number)
        self.nodes.on_renamed = lambda parent, name: self.on_renamed(parent.number, name)
        self.nodes.on_gone = lambda node: self._windows.drop_node(node.number)
        self._reads = Reads([remote.read for remote in remotes], self._windows, self._lock, post)
        self._stats: dict[tuple[int, bytes], _Question] = {}
        self._lists: dict[tuple[int, bytes], _Question] = {}
        self._lost: set[int] = set()
        self._hot: dict[tuple[int, bytes], float] = {}
        self._num_questions = self._num_changes = 0
        self._said: set[type[BaseException]] = set()
        self.on_changed: Callable[[int], None] = lambda number: None
        """What the kernel has of this node is no longer right. Called under the lock, as the next one: it must not wait."""
        self.on_renamed: Callable[[int, bytes], None] = lambda parent, name: None
        """A name in a directory may stand for something else now."""

    # --- FileSystem ----------------------------------------------------------------------------------------------

    def lookup(self, parent: int, name: bytes, later: Later) -> Entry | int | Later:
        """`FileSystem.lookup`."""
        with self._lock:
            directory = self._find(parent)
            if isinstance(directory, int):
                return directory
            if not stat.S_ISDIR(directory.found.mode):
                return ENOTDIR
            now_s = self._now()
            node = directory.kids.get(name)
            if node is not None and (node.is_folder or node.is_known(now_s)):
                return self.nodes.entry(node)
            if node is None and (directory.shard < 0 or directory.is_listed(now_s)):
                return ENOENT
            path = directory.path + b"/" + name if directory.path else name
            return self._ask_stat(directory.shard, path, later, partial(self._entry_of, directory.shard, path))

    def _entry_of(self, shard: int, path: bytes) -> Entry | int:
        node = self.nodes.find(shard, path)
        return ENOENT if node is None else self.nodes.entry(node)

    def attr(self, node: int, later: Later) -> Attr | int | Later:
        """`FileSystem.attr`; what is gone keeps its last attributes, for those who have it open or are about to open it."""
        with self._lock:
            found = self._find(node, gone=True)
            if isinstance(found, int):
                return found
            if found.shard < 0 or found.gone or found.is_known(self._now()):
                return self.nodes.attr(found)
            return self._ask_stat(found.shard, found.path, later, partial(self.nodes.attr, found))

    def children(self, node: int, later: Later) -> Sequence[tuple[bytes, Entry]] | int | Later:
        """`FileSystem.children`."""
        with self._lock:
            found = self._find(node)
            if isinstance(found, int):
                return found
            if not stat.S_ISDIR(found.found.mode):
                return ENOTDIR
            if found.shard < 0 or found.is_listed(self._now()):
                return self._children_of(found)
            return self._ask_list(found, later)

    def _children_of(self, node: Node) -> list[tuple[bytes, Entry]]:
        return [(name, self.nodes.entry(kid)) for name, kid in node.kids.items()]

    def target(self, node: int, later: Later) -> bytes | int | Later:
        """`FileSystem.target`."""
        with self._lock:
            found = self._find(node, gone=True)
            if isinstance(found, int):
                return found
            return found.found.target if stat.S_ISLNK(found.found.mode) else EINVAL

    def open(self, node: int, later: Later) -> Opened | int | Later:
        """`FileSystem.open`."""
        with self._lock:
            found = self._find(node, gone=True)
            if isinstance(found, int):
                return found
            if not stat.S_ISREG(found.found.mode):
                return EISDIR if stat.S_ISDIR(found.found.mode) else EACCES
            return self._reads.open(found, later, partial(self._opened, found))  # type: ignore[return-value]

    def _opened(self, node: Node) -> Opened:
        node.opens += 1
        return Opened(handle=node.number)

    def release(self, handle: int) -> None:
        """`FileSystem.release`."""
        with self._lock:
            node = self.nodes.get(handle)
            if node is not None:
                self.nodes.close(node)

    def read(self, node: int, handle: int, offset: int, size: int, later: Later) -> Sequence[Buffer] | int | Later:
        """`FileSystem.read`."""
        with self._lock:
            found = self._find(node, gone=True)
            if isinstance(found, int):
                return found
            if not stat.S_ISREG(found.found.mode):
                return EISDIR if stat.S_ISDIR(found.found.mode) else EINVAL
            return self._reads.read(found, offset, size, later)

    def forget(self, node: int) -> None:
        """`FileSystem.forget`."""
        with self._lock:
            self.nodes.forget(node)

    def _find(self, number: int, *, gone: bool = False) -> Node | int:
        node = self.nodes.get(number)
        if node is None or (node.gone and not gone):
            return ESTALE
        return EIO if node.shard in self._lost else node

    # --- questions -----------------------------------------------------------------------------------------------

    def _ask_stat(self, shard: int, path: bytes, later: Later, answer: Callable[[], object]) -> Later:
        question, is_new = self._question(self._stats, shard, path)
        question.add(later, answer)
        if is_new:
            self._send(partial(self._remotes[shard].stat, path, self._is_hot(shard, path)), partial(self._take_stat, shard, path, question))
        return later

    def _is_hot(self, shard: int, path: bytes) -> bool:
        """Whether the file was replaced before it could be opened, a moment ago."""
        now_s = self._now()
        for late in self._reads.too_late:
            self._hot[late] = now_s
        self._reads.too_late.clear()
        self._hot = {each: at for each, at in self._hot.items() if now_s - at < _HOT_S}
        return (shard, path) in self._hot

    def _ask_list(self, node: Node, later: Later) -> Later:
        question, is_new = self._question(self._lists, node.shard, node.path)
        question.add(later, partial(self._listing_of, node))
        if is_new:
            self._send(partial(self._remotes[node.shard].listing, node.path), partial(self._take_list, node, question))
        return later

    def _question(self, questions: dict[tuple[int, bytes], _Question], shard: int, path: bytes) -> tuple[_Question, bool]:
        question = questions.get((shard, path))
        if question is not None:
            return question, False
        question = questions[shard, path] = _Question(self._now())
        self._num_questions += 1
        return question, True

    def _send(self, ask: Callable[[], Future[Any]], take: Callable[[Any], None]) -> None:
        try:
            future = ask()
        except Exception as exc:
            future = Future._failed(exc)
        future._when_done(lambda: self._post(partial(self._receive, future, take)))

    def _receive(self, future: Future[Any], take: Callable[[Any], None]) -> None:
        error = future.exception(0.0)
        if error is not None and type(error) not in self._said:
            self._said.add(type(error))
            _logger.warning("a gathered folder does not answer: %s", error)
        answer = EIO if error is not None else future.get(0.0)
        with self._lock:
            take(answer)

    def _take_stat(self, shard: int, path: bytes, question: _Question, answer: Found | int) -> None:
        _remove(self._stats, (shard, path), question)
        folder = self.nodes.folders[shard]
        parent = folder if not path else self.nodes.find(shard, path.rpartition(b"/")[0])
        if answer == ENOENT:
            self._lose(shard, path, question.asked_s)
        elif isinstance(answer, int):
            question.fail(answer)
            return
        elif parent is None:
            question.fail(ESTALE)
            return
        elif path:
            self.nodes.learn(parent, path.rpartition(b"/")[2], answer, question.asked_s)
        else:
            self.nodes.learn_folder(folder, answer, question.asked_s)
        question.answer()

    def _lose(self, shard: int, path: bytes, asked_s: float | None) -> None:
        node = self.nodes.find(shard, path)
        if not path:
            self.nodes.learn_folder(self.nodes.folders[shard], None, asked_s)
        elif node is not None:
            self.nodes.lose(node)

    def _take_list(self, node: Node, question: _Question, answer: Listed | int) -> None:
        _remove(self._lists, (node.shard, node.path), question)
        if answer == ENOENT:
            self._lose(node.shard, node.path, question.asked_s)
        elif isinstance(answer, int):
            question.fail(answer)
            return
        elif not node.gone:
            self._learn_list(node, question, answer)
        question.answer()

    def _learn_list(self, node: Node, question: _Question, listed: Listed) -> None:
        found, unknown = [], question.doubts
        for name, fields in listed.entries:
            if isinstance(fields, int):
                unknown.add(name)
            found.append((name, _UNKNOWN if isinstance(fields, int) else Found(*fields)))  # type: ignore[arg-type]
        self.nodes.learn_kids(node, found, question.asked_s, guarded=listed.guarded)
        for name in unknown:
            if name in node.kids:
                node.kids[name].asked_s = None

    def _listing_of(self, node: Node) -> list[tuple[bytes, Entry]] | int:
        return ESTALE if node.gone else self._children_of(node)

    # --- news ----------------------------------------------------------------------------------------------------

    def changed(self, shard: int, changes: Sequence[Change]) -> None:
        """What has changed in a folder, as its host tells."""
        with self._lock:
            self._num_changes += len(changes)
            for path, what in changes:
                self._doubt_questions(shard, path, what)
            self.nodes.doubt(shard, changes)

    def _doubt_questions(self, shard: int, path: bytes, what: int) -> None:
        """What is being asked may be answered with what was before the change."""
        for key, question in list(self._stats.items()):
            if key[0] == shard and _is_concerned(key[1], path, what):
                question.asked_s = None
                del self._stats[key]
        parent, _, name = path.rpartition(b"/")
        for key, question in list(self._lists.items()):
            if key[0] != shard:
                continue
            if what <= What.NAME and key[1] == parent:
                question.doubts.add(name)
            if (what != What.CONTENT and key[1] in (path, parent)) or (what != What.CONTENT and _is_concerned(key[1], path, what)):
                question.asked_s = None
                del self._lists[key]

    def lose(self, shard: int) -> None:
        """A host is gone for good: its folder is EIO from now on."""
        with self._lock:
            self._lost.add(shard)
            self.nodes.doubt_all(shard)

    def statistics(self) -> GatherStatistics:
        """What is here, and what was done."""
        with self._lock:
            reads = self._reads
            return GatherStatistics(
                num_nodes=len(self.nodes),
                num_questions=self._num_questions,
                num_changes=self._num_changes,
                cached_bytes=self._windows.num_bytes,
                fetched_bytes=reads.num_fetched_bytes,
                kept_bytes=reads.num_kept_bytes,
                lost=sorted(self._lost),
            )


_UNKNOWN = Found(stat.S_IFREG, 0, 0, 0, 0)
"""Of an entry that its host may list, but not look at."""


def _remove(questions: dict[tuple[int, bytes], _Question], key: tuple[int, bytes], question: _Question) -> None:
    if questions.get(key) is question:
        del questions[key]


def _is_concerned(asked: bytes, path: bytes, what: int) -> bool:
    """Whether a change of `path` may be one of `asked` as well."""
    if what == What.CONTENT:
        return asked == path
    if what == What.UNWATCHED:
        return asked == path or asked.rpartition(b"/")[0] == path
    return not path or asked == path or asked.startswith(path + b"/")
