"""Reads of files that are far away: which windows are fetched for them, how far ahead, and when they may be answered.

Pure: no clock, no I/O; bytes come from functions that return futures.

Rules of this file:
    1. A read is answered with bytes of one version. Windows of several are asked for anew, all at once, and come in one.
    2. Readers of the same window share one fetch, unless a change has been told since that was asked for.
    3. After a change a window is not thrown away: its host is told what we have, and sends what is different.
    4. A file is opened at its host as well, if not all of it is here. So who has it open reads on in the same file when it is replaced,
       and who opens it too late is told so before he has read anything. What is small comes along.
    5. Of one host no more than `_MOST_UNDER_WAY` fetches are under way. Readers wait their turn; what would be ahead of them is left out.

Read next: `windows.py` for what is kept, `gathered.py` for the rest of the file system.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from errno import EIO, ESTALE
from functools import partial
from threading import RLock

from monarch._mounts.filesystem import Later
from monarch._mounts.folder import Found, Got, Want, digest
from monarch._mounts.gathered_nodes import Node
from monarch._mounts.windows import WINDOW_BYTES, Window, Windows
from monarch._runtime.future import Future
from monarch._wire.frames import Buffer

_logger = logging.getLogger("monarch.mounts")

ReadRemote = Callable[[bytes, int, list[Want]], "Future[Got | int]"]
"""Asks for ranges of the file with a path and a number."""
Post = Callable[[Callable[[], None]], None]
"""Runs something on another thread, soon."""

_AHEAD = 2
"""Windows that are fetched before a reader who reads on comes to them."""
_MOST_UNDER_WAY = 8
_WITH_OPEN_BYTES = 1 << 20
_WORTH_A_DIGEST = 1 << 16
"""Bytes. Fewer are sent again."""


class _Read:
    """A reader who waits."""

    def __init__(self, later: Later, offset: int, size: int, indices: range) -> None:
        self.later = later
        self.offset = offset
        self.size = size
        self.indices = indices
        self.windows: dict[int, Window] = {}

    @property
    def is_complete(self) -> bool:
        return len(self.windows) == len(self.indices)

    @property
    def is_one_version(self) -> bool:
        return len({window.version for window in self.windows.values()}) == 1

    def parts(self) -> list[Buffer]:
        """Its bytes; fewer where the file ends."""
        parts: list[Buffer] = []
        for index in self.indices:
            start = max(0, self.offset - index * WINDOW_BYTES)
            end = min(WINDOW_BYTES, self.offset + self.size - index * WINDOW_BYTES)
            data = self.windows[index].data
            parts.append(data[start:end])
            if len(data) < min(end, WINDOW_BYTES):
                break
        return parts


class _Fetch:
    """Windows that are asked for."""

    def __init__(self, node: Node, indices: tuple[int, ...]) -> None:
        self.node = node
        self.indices = indices
        self.epoch = node.epoch
        self.has_begun = False
        self.is_ahead = False
        """It goes on if nobody waits for it."""
        self.old: dict[int, Window] = {}
        self.reads: list[_Read] = []
        self.opens: list[tuple[Later, Callable[[], object]]] = []

    def prune(self) -> None:
        """Leave out who has given up."""
        self.reads = [read for read in self.reads if not read.later.cancelled]
        self.opens = [each for each in self.opens if not each[0].cancelled]

    @property
    def key(self) -> tuple[int, tuple[int, ...]]:
        return self.node.number, self.indices


class Reads:
    """All reads of a mount. Thread: any, under the lock of the file system."""

    def __init__(self, remotes: Sequence[ReadRemote], windows: Windows, lock: RLock, post: Post) -> None:
        self._remotes = remotes
        self._windows = windows
        self._lock = lock
        self._post = post
        self._under_way: dict[tuple[int, tuple[int, ...]], _Fetch] = {}
        self._num_under_way = [0] * len(remotes)
        self._queues: list[deque[_Fetch]] = [deque() for _ in remotes]
        self._said: set[type[BaseException]] = set()
        self.too_late: set[tuple[int, bytes]] = set()
        """Files that were replaced before they could be opened, by folder and path."""
        self.num_fetched_bytes = 0
        self.num_kept_bytes = 0

    def open(self, node: Node, later: Later, opened: Callable[[], object]) -> object:
        """`FileSystem.open` of a file: `opened()`, now or later; ESTALE when its path leads to another one."""
        size = node.found.size
        if node.asked_s is not None and all(self._current(node, index) for index in range(-(-size // WINDOW_BYTES))):
            return opened()
        fetch = self._fetch(node, (0,) if 0 < size <= _WITH_OPEN_BYTES else ())
        fetch.opens.append((later, opened))
        self._begin(fetch)
        return later

    def read(self, node: Node, offset: int, size: int, later: Later) -> Sequence[Buffer] | Later:
        """`FileSystem.read` of a file."""
        if size <= 0:
            return []
        request = _Read(later, offset, size, range(offset // WINDOW_BYTES, (offset + size - 1) // WINDOW_BYTES + 1))
        for index in request.indices:
            window = self._current(node, index)
            if window is not None:
                request.windows[index] = window
        last, reads_on = request.indices[-1], node.last_index in (request.indices[-1], request.indices[-1] - 1)
        node.last_index = last
        answered = request.is_complete and request.is_one_version
        if not answered:
            self._fetch_missing(node, request)
        if reads_on and offset:
            self._read_ahead(node, last)
        return request.parts() if answered else later

    def _current(self, node: Node, index: int) -> Window | None:
        window = self._windows.get(node.number, index)
        return window if window is not None and (window.version, window.epoch) == (node.found.version, node.epoch) else None

    def _fetch_missing(self, node: Node, request: _Read) -> None:
        for index in request.indices:
            if index not in request.windows:
                self._begin(self._fetch(node, (index,), request))

    def _read_ahead(self, node: Node, index: int) -> None:
        for ahead in range(index + 1, index + 1 + _AHEAD):
            is_there = ahead * WINDOW_BYTES < node.found.size
            if is_there and self._num_under_way[node.shard] < _MOST_UNDER_WAY - 2 and self._current(node, ahead) is None:
                fetch = self._fetch(node, (ahead,))
                fetch.is_ahead = True
                self._begin(fetch)

    def _fetch(self, node: Node, indices: tuple[int, ...], request: _Read | None = None) -> _Fetch:
        """The fetch of these windows, under way or new."""
        fetch = self._under_way.get((node.number, indices))
        if fetch is None or fetch.epoch != node.epoch:
            fetch = self._under_way[node.number, indices] = _Fetch(node, indices)
        fetch.prune()
        if request is not None:
            fetch.reads.append(request)
        return fetch

    def _begin(self, fetch: _Fetch) -> None:
        """Ask for it, when it is its turn; no-op when it has begun."""
        shard = fetch.node.shard
        if not fetch.has_begun:
            fetch.has_begun = True
            self._queues[shard].append(fetch)
        self._go_on(shard)

    def _go_on(self, shard: int) -> None:
        queue = self._queues[shard]
        while queue and self._num_under_way[shard] < _MOST_UNDER_WAY:
            fetch = queue.popleft()
            fetch.prune()
            if not (fetch.reads or fetch.opens or fetch.is_ahead):
                self._forget(fetch)
                continue
            self._num_under_way[shard] += 1
            self._start(fetch)

    def _start(self, fetch: _Fetch) -> None:
        for index in fetch.indices:
            old = self._windows.get(fetch.node.number, index)
            if old is not None and len(old.data) >= _WORTH_A_DIGEST:
                fetch.old[index] = old
        if fetch.old:
            self._post(partial(self._ask, fetch))
        else:
            self._ask(fetch)

    def _ask(self, fetch: _Fetch) -> None:
        wants = []
        for index in fetch.indices:
            old = fetch.old.get(index)
            known = (0, (0, 0)) if old is None else (len(old.data), digest(old.data))
            wants.append(Want(index * WINDOW_BYTES, WINDOW_BYTES, *known))
        node = fetch.node
        try:
            future = self._remotes[node.shard](node.path, node.found.ident, wants)
        except Exception as exc:
            future = Future._failed(exc)
        future._when_done(lambda: self._post(partial(self._take, fetch, future)))

    # --- answers -------------------------------------------------------------------------------------------------

    def _take(self, fetch: _Fetch, future: Future[Got | int]) -> None:
        error = future.exception(0.0)
        if error is not None:
            self._say(error)
        answer = EIO if error is not None else future.get(0.0)
        windows = [] if isinstance(answer, int) else self._windows_of(fetch, answer)
        with self._lock:
            self._end(fetch)
            if isinstance(answer, int):
                self._fail(fetch, answer)
            else:
                self._learn(fetch, answer, windows)

    def _windows_of(self, fetch: _Fetch, got: Got) -> list[Window]:
        version = Found(*got.found).version  # type: ignore[arg-type]
        windows = []
        for index, (num_known, data) in zip(fetch.indices, got.parts, strict=True):
            if num_known:
                old = fetch.old[index].data[:num_known]
                # A copy, since what has come belongs to memory that messages are received into.
                data = old if not len(data) else memoryview(b"".join((old, data)))
            else:
                data = memoryview(bytes(data))
            windows.append(Window(data, version, fetch.epoch))
        return windows

    def _end(self, fetch: _Fetch) -> None:
        self._forget(fetch)
        self._num_under_way[fetch.node.shard] -= 1
        self._go_on(fetch.node.shard)

    def _forget(self, fetch: _Fetch) -> None:
        if self._under_way.get(fetch.key) is fetch:
            del self._under_way[fetch.key]

    def _fail(self, fetch: _Fetch, errno: int) -> None:
        if errno == ESTALE:
            fetch.node.doubt()
            if fetch.opens:
                self.too_late.add((fetch.node.shard, fetch.node.path))
        for later, _ in fetch.opens:
            later.fail(errno)  # ESTALE makes the kernel look the name up once more
        for read in fetch.reads:
            read.later.fail(EIO if errno == ESTALE else errno)

    def _learn(self, fetch: _Fetch, got: Got, windows: list[Window]) -> None:
        node = fetch.node
        found = Found(*got.found)._replace(guarded=node.guarded)  # type: ignore[arg-type]
        if found.version != node.found.version and found.ctime_ns >= node.found.ctime_ns and fetch.epoch == node.epoch:
            node.found = found
        for index, window, (num_known, part) in zip(fetch.indices, windows, got.parts, strict=True):
            self.num_fetched_bytes += len(part)
            self.num_kept_bytes += num_known
            if not (node.gone and not node.opens):
                self._windows.put(node.number, index, window)
        for later, opened in fetch.opens:
            if not later.cancelled:
                later.answer(opened())
        for read in fetch.reads:
            read.windows.update((index, window) for index, window in zip(fetch.indices, windows, strict=True) if index in read.indices)
            if not read.is_complete:
                continue
            if read.is_one_version:
                read.later.answer(read.parts())
            else:
                self._begin(self._fetch(node, tuple(read.indices), read))

    def _say(self, error: BaseException) -> None:
        if type(error) not in self._said:
            self._said.add(type(error))
            _logger.warning("a gathered file could not be read: %s", error)
