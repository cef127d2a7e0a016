"""Chunked mounts: a tree that a dict describes, whose bytes are handed over block by block by whoever has mounted it.

    handle = mount_chunked_fuse(index, index["/"]["total_size"], "/mnt/code", on_fault)
    view = (ctypes.c_char * BLOCK_SIZE).from_address(handle.block_ptr(0))
    view[: len(data)] = data
    handle.receive_block(0, [])

This is how programs for PyTorch Monarch mount by themselves. `remotemount` is another thing: it moves single files, and never shows
half of a version.

Rules of this file:
    1. A node is a path, so whoever has a file open sees the newest version of it.
    2. Nothing foreign runs under the lock: neither the fault callback, on a thread of its own, nor the answer to a reader.
    3. Every reader that waits for a block ends: with its bytes, with EIO when its file is stale, or when the server's patience is over.
    4. A block that has come stays until the end of the mount; none is given up for want of memory. For it could not be had again: whoever
       mounts may have no fault callback, callbacks ask for a block once in the life of a mount (`RemoteMountLeader` does too), and a
       version may come back, or have moved on, while the block that is to show it exists here only.

Read next: `filesystem.py` for what the server asks, `index.py` for where the dict comes from.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from monarch._base.buffers import address_of
from monarch._base.errors import InternalError, explain
from monarch._mounts import mounting
from monarch._mounts.filesystem import ROOT, Attr, Entry, Habits, Later, Opened
from monarch._mounts.fuse_server import FuseServer
from monarch._mounts.index import BLOCK_SIZE, Index
from monarch._mounts.memory import Memory
from monarch._mounts.worker import Worker

_logger = logging.getLogger("monarch.mounts")
_HABITS = Habits(entry_s=0.2, attr_s=0.2, missing_s=0.0, opens=True, checks_mtime=True, forgets=False)
_CLOSED = "this mount has been unmounted"


class _Reader(NamedTuple):
    """Somebody who waits for blocks."""

    path: str
    offset: int
    size: int
    later: Later


class ChunkedFileSystem:
    """A `FileSystem` over an index and its blocks. Thread: any."""

    habits = _HABITS

    def __init__(self, index: Index, wanted: Callable[[int], None]) -> None:
        """
        Args:
            wanted: called, not under the lock, with the number of a block that a reader waits for; once until `receive` or `retry`.

        Raises:
            ValueError: there is no root directory in `index`.
        """
        self._index = _checked(index)
        self._wanted = wanted
        self._lock = threading.Lock()
        self._blocks: dict[int, Memory] = {}
        self._staging: dict[int, Memory] = {}
        """Blocks that are being written."""
        self._stale: set[str] = set()
        self._readers: list[_Reader] = []
        self._asked: set[int] = set()
        kind = stat.S_IFMT(index["/"]["attr"]["st_mode"])
        self._numbers: dict[tuple[str, int], int] = {("/", kind): ROOT}
        self._paths: dict[int, tuple[str, int]] = {ROOT: ("/", kind)}

    # --- FileSystem ----------------------------------------------------------------------------------------------

    def lookup(self, parent: int, name: bytes, later: Later) -> Entry | int:
        """`FileSystem.lookup`."""
        with self._lock:
            found = self._find(parent)
            if isinstance(found, int):
                return found
            path, node = found
            if "children" not in node:
                return errno.ENOTDIR
            return self._entry(f"{path.rstrip('/')}/{os.fsdecode(name)}") or errno.ENOENT

    def attr(self, node: int, later: Later) -> Attr | int:
        """`FileSystem.attr`."""
        with self._lock:
            found = self._find(node)
            return found if isinstance(found, int) else _attr(found[1])

    def children(self, node: int, later: Later) -> Sequence[tuple[bytes, Entry]] | int:
        """`FileSystem.children`; a name that is listed, but not described, is left out."""
        with self._lock:
            found = self._find(node)
            if isinstance(found, int):
                return found
            path, of = found
            if "children" not in of:
                return errno.ENOTDIR
            named = ((name, self._entry(f"{path.rstrip('/')}/{name}")) for name in of["children"])
            return [(os.fsencode(name), entry) for name, entry in named if entry is not None]

    def target(self, node: int, later: Later) -> bytes | int:
        """`FileSystem.target`."""
        with self._lock:
            found = self._find(node)
            if isinstance(found, int):
                return found
            return os.fsencode(found[1]["link_target"]) if "link_target" in found[1] else errno.EINVAL

    def open(self, node: int, later: Later) -> Opened | int:
        """`FileSystem.open`; blocks may have been delivered anew since the last time, so no page of then is kept."""
        with self._lock:
            found = self._find(node)
            if isinstance(found, int):
                return found
            return errno.EISDIR if "children" in found[1] else Opened(keep_cache=False)

    def release(self, handle: int) -> None:
        """Nothing is kept of an open file."""

    def forget(self, node: int) -> None:
        """A path keeps its number."""

    def read(self, node: int, handle: int, offset: int, size: int, later: Later) -> Sequence[memoryview] | int | Later:
        """`FileSystem.read`; waits for the blocks that are not here."""
        with self._lock:
            found = self._find(node)
            if isinstance(found, int):
                return found
            path, of = found
            if "file_len" not in of:
                return errno.EISDIR if "children" in of else errno.EINVAL
            reader = _Reader(path, offset, size, later)
            answer = self._answer(reader)
            if answer is not None:
                return answer
            self._readers.append(reader)
            asks = self._asks([reader])
        for block in asks:
            self._wanted(block)
        return later

    # --- under the lock ------------------------------------------------------------------------------------------

    def _find(self, number: int) -> tuple[str, dict[str, Any]] | int:
        path, kind = self._paths.get(number, ("", 0))
        node = self._index.get(path)
        if node is None or stat.S_IFMT(node["attr"]["st_mode"]) != kind:
            return errno.ESTALE
        return path, node

    def _entry(self, path: str) -> Entry | None:
        node = self._index.get(path)
        if node is None:
            return None
        key = path, stat.S_IFMT(node["attr"]["st_mode"])  # the kernel would not have a node change its kind
        number = self._numbers.setdefault(key, len(self._numbers) + ROOT)
        self._paths[number] = key
        return Entry(number, _attr(node))

    def _blocks_of(self, reader: _Reader) -> range:
        node = self._index.get(reader.path, {})
        start = node.get("global_offset", 0) + reader.offset
        end = node.get("global_offset", 0) + min(reader.offset + reader.size, node.get("file_len", 0))
        return range(start // BLOCK_SIZE, -(-end // BLOCK_SIZE)) if start < end else range(0)

    def _answer(self, reader: _Reader) -> list[memoryview] | int | None:
        """What a reader gets; None: a block of it is not here."""
        node = self._index.get(reader.path)
        if node is None or "file_len" not in node:
            return errno.ESTALE
        if reader.path in self._stale:
            return errno.EIO
        parts = []
        at = node["global_offset"] + reader.offset
        end = node["global_offset"] + min(reader.offset + reader.size, node["file_len"])
        for block in self._blocks_of(reader):
            memory = self._blocks.get(block)
            if memory is None:
                return None
            start = block * BLOCK_SIZE
            parts.append(memory.view[at - start : min(end - start, BLOCK_SIZE)])
            at = start + BLOCK_SIZE
        return parts

    def _asks(self, readers: Iterable[_Reader]) -> list[int]:
        """The blocks that these wait for and nobody has been asked for; they have been now."""
        missing = {block for reader in readers for block in self._blocks_of(reader) if block not in self._blocks}
        asks = sorted(missing - self._asked)
        self._asked.update(asks)
        return asks

    def _take_ready(self) -> list[tuple[Later, list[memoryview] | int]]:
        """The readers that can be answered now, who wait no longer."""
        ready, left = [], []
        for reader in self._readers:
            answer = None if reader.later.cancelled else self._answer(reader)
            if answer is not None:
                ready.append((reader.later, answer))
            elif not reader.later.cancelled:
                left.append(reader)
        self._readers = left
        return ready

    # --- delivery ------------------------------------------------------------------------------------------------

    def staging(self, block: int) -> Memory:
        """Where to write a block before it is received: the same memory until then, all zero in the beginning."""
        with self._lock:
            memory = self._staging.get(block)
            if memory is None:
                memory = self._staging[block] = Memory(BLOCK_SIZE, keep_fd=False)
            return memory

    def receive(self, block: int, stale: Iterable[str]) -> None:
        """A block is here, as it was staged; unstaged, it is zeros unless it was here before. Files in `stale` are EIO until `refresh`."""
        with self._lock:
            memory = self._staging.pop(block, None)
            if memory is None and block not in self._blocks:
                memory = Memory(BLOCK_SIZE, keep_fd=False)
            if memory is not None:
                self._blocks[block] = memory
            self._asked.discard(block)
            self._stale.update(path for path in stale if path in self._index)
            ready = self._take_ready()
        for later, answer in ready:
            later.answer(answer)

    def retry(self, block: int) -> None:
        """A request for a block has come to nothing: the next reader asks anew."""
        with self._lock:
            self._asked.discard(block)

    def refresh(self, index: Index) -> list[tuple[int, bytes, int]]:
        """Show another version, in which no file is stale.

        Returns:
            What the kernel has to look at again: node of a directory, name in it or b"", node of which the attributes have changed.

        Raises:
            ValueError: there is no root directory in `index`.
        """
        _checked(index)
        with self._lock:
            before, self._index = self._index, index
            self._stale.clear()
            changed = list(self._changed(before))
            ready = self._take_ready()
            asks = self._asks(self._readers)
        for later, answer in ready:
            later.answer(answer)
        for block in asks:
            self._wanted(block)
        return changed

    def _changed(self, before: Index) -> Iterable[tuple[int, bytes, int]]:
        for number, (path, kind) in self._paths.items():
            was, now = before.get(path), self._index.get(path)
            if was is None or stat.S_IFMT(was["attr"]["st_mode"]) != kind:
                continue
            if now is not None and stat.S_IFMT(now["attr"]["st_mode"]) == kind:
                if was["attr"] != now["attr"] or was.get("file_len") != now.get("file_len"):
                    yield 0, b"", number
                continue
            folder, _, name = path.rpartition("/")
            parent = self._numbers.get((folder or "/", stat.S_IFDIR))
            if parent is not None:
                yield parent, os.fsencode(name), number


def _checked(index: Index) -> Index:
    if "children" not in index.get("/", {}):
        raise ValueError(explain("the metadata of a mount has no directory '/'", next="pass what build_index() has made"))
    return index


def _attr(node: dict[str, Any]) -> Attr:
    attr = node["attr"]
    times = (round(attr[name] * 1e9) for name in ("st_mtime", "st_atime", "st_ctime"))
    size = node.get("file_len", attr["st_size"])
    return Attr(attr["st_mode"], size, attr["st_nlink"], attr["st_uid"], attr["st_gid"], *times)


class FuseMountHandle:
    """A chunked mount, from `mount_chunked_fuse`; it ends with this object, or the process. Thread: any."""

    def __init__(self, path: str, server: FuseServer, files: ChunkedFileSystem, faults: Worker) -> None:
        self._path = path
        self._server = server
        self._files = files
        self._faults = faults
        self._end = weakref.finalize(self, _let_go, path, server, faults)

    def unmount(self) -> None:
        """End the mount. No-op when that has been done.

        Raises:
            RuntimeError: somebody uses it; with what the system said.
        """
        status, detail = self.try_unmount()
        if status in ("busy", "error"):
            next = "close what is open there, and unmount() again"
            raise RuntimeError(explain(f"{self._path!r} can't be unmounted: {status}", next=next, detail=detail))

    def try_unmount(self) -> tuple[mounting.Status, str]:
        """As `unmount`, and as `mounting.unmount` says how it went."""
        if not self._end.alive:
            return "not_mounted", ""
        status, detail = mounting.unmount(self._path)
        # Detached, for the end of this object must not unmount what others mount at this path from now on.
        if status in ("ok", "not_mounted") and self._end.detach() is not None:
            _stop(self._server, self._faults)
        return status, detail

    def close(self) -> None:
        """End the mount whoever uses it: what is open there is ENOTCONN from now on. Harmless twice."""
        self._end()

    def refresh(self, metadata: Index, new_total_size: int) -> None:
        """Show another version, to those who have files open as well; no file of it is stale. Blocks stay as they are.

        Args:
            new_total_size: accepted; a block takes memory when it comes, whatever its number.

        Raises:
            ValueError: `metadata` has no root.
        """
        for parent, name, node in self._files.refresh(metadata):
            if name:
                self._server.invalidate_entry(parent, name)
            self._server.invalidate_node(node, -1)

    def block_ptr(self, block_id: int) -> int:
        """Address of `BLOCK_SIZE` bytes to write a block into, zeros at first; the same until `receive_block`.

        Raises:
            ValueError: a negative number.
            RuntimeError: it has been unmounted.
        """
        self._check(block_id)
        return address_of(self._files.staging(block_id).view)[0]

    def receive_block(self, block_id: int, stale: Sequence[str]) -> None:
        """The block at `block_ptr` is complete: whoever waits for it reads on, without a copy.

        Nothing written before: no-op for a block that is here, else it is zeros.

        Args:
            stale: paths of files whose bytes in this block are not theirs: EIO until the next `refresh`. Unknown ones are ignored.

        Raises:
            ValueError: a negative number.
            RuntimeError: it has been unmounted.
        """
        self._check(block_id)
        self._files.receive(block_id, stale)

    def _check(self, block: int) -> None:
        if block < 0:
            raise ValueError(explain(f"there is no block {block}", next="blocks are counted from 0"))
        if not self._end.alive:
            raise RuntimeError(explain(_CLOSED, where=self._path, next="mount it again"))


def _let_go(path: str, server: FuseServer, faults: Worker) -> None:
    mounting.unmount(path, lazy=True)
    _stop(server, faults)


def _stop(server: FuseServer, faults: Worker) -> None:
    # The collector may run this on a thread of the server, which ends by itself when nobody uses the mount any more.
    with suppress(InternalError):
        server.stop()
    faults.close()


def mount_chunked_fuse(
    metadata: Index, total_size: int, mount_point: str, fault_callback: Callable[[int], object] | None
) -> FuseMountHandle:
    """Mount a tree whose bytes come in blocks.

    Args:
        metadata: as of `build_index`; of a node only `attr` and `children`, `link_target`, or `global_offset` and `file_len` are used.
        total_size: accepted, as in `FuseMountHandle.refresh`.
        mount_point: an existing directory, absolute.
        fault_callback: called with the number of a block that somebody waits for, on a thread of its own, once until the block is
            received; when it raises, that is logged, and the next reader makes it be called again. None: blocks come by themselves.

    Raises:
        RuntimeError: `mount_point` is relative or no directory, or there is no FUSE.
        ValueError: `metadata` has no root.
    """
    faults: Worker | None = None

    def ask(block: int) -> None:
        assert fault_callback is not None
        try:
            fault_callback(block)
        except Exception:
            _logger.exception("the fault callback of a mount failed path=%s block=%d", mount_point, block)
            files.retry(block)

    def wanted(block: int) -> None:
        if fault_callback is not None and faults is not None:
            faults.post(partial(ask, block))

    files = ChunkedFileSystem(metadata, wanted)
    server = FuseServer(mounting.mount(mount_point, fsname="monarch-chunked"), files)
    faults = Worker("monarch-fuse-faults")
    server.start()
    return FuseMountHandle(mount_point, server, files, faults)
