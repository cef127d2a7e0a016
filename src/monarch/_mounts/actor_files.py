"""Actor files: a mounted tree whose names and bytes an actor makes up, or fetches from anywhere.

    class Files(Actor):
        @endpoint
        def getattr_path(self, path: str) -> dict[str, float] | int: ...    # st_mode, st_size, ...; or an errno
        @endpoint
        def readdir_path(self, path: str) -> list[str] | int: ...
        @endpoint
        def read_path(self, path: str, size: int, offset: int) -> bytes | int: ...

    handle = mount_read_only_filesystem(files, "/mnt/files")

Nothing is remembered: each use of the mount asks the actor, and so sees what is there now. For folders of hosts there is `gather_mount`.

Rules of this file:
    1. The server's threads only ask; answers are taken by one thread of the mount.
    2. What the actor raises, or its end, is EIO to the reader, and logged once for each kind.

Read next: `filesystem.py` for what the server asks.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from monarch._base.errors import InternalError, explain
from monarch._mounts import mounting
from monarch._mounts.filesystem import LIVE, ROOT, Attr, Entry, Later, Opened
from monarch._mounts.fuse_server import FuseServer
from monarch._mounts.worker import Worker
from monarch._runtime.future import Future, gather, settled

_logger = logging.getLogger("monarch.mounts")


class ActorFileSystem:
    """A `FileSystem` over the endpoints of one actor. Thread: any."""

    habits = LIVE

    def __init__(self, actor: Any, post: Callable[[Callable[[], None]], None]) -> None:
        """
        Args:
            actor: with the endpoints `getattr_path`, `readdir_path` and `read_path`.
            post: runs a call on a thread that may take its time.
        """
        self._actor = actor
        self._post = post
        self._lock = threading.Lock()
        self._paths = {ROOT: "/"}
        self._numbers = {"/": ROOT}
        self._next = ROOT + 1
        self._said: set[type[BaseException]] = set()

    def lookup(self, parent: int, name: bytes, later: Later) -> int | Later:
        """`FileSystem.lookup`."""
        folder = self._path(parent)
        if folder is None:
            return errno.ESTALE
        path = _join(folder, os.fsdecode(name))
        return self._ask(self._actor.getattr_path, (path,), later, partial(self._entry, path))

    def attr(self, node: int, later: Later) -> int | Later:
        """`FileSystem.attr`."""
        path = self._path(node)
        return errno.ESTALE if path is None else self._ask(self._actor.getattr_path, (path,), later, _attr)

    def children(self, node: int, later: Later) -> int | Later:
        """`FileSystem.children`; an entry of which the actor gives no attributes, but an errno, is left out."""
        path = self._path(node)
        return errno.ESTALE if path is None else self._ask(self._actor.readdir_path, (path,), later, partial(self._look_at, path, later))

    def _look_at(self, folder: str, later: Later, names: list[str]) -> Any:
        asked = [(name, _join(folder, name)) for name in names if name not in (".", "..")]
        if not asked:
            return []
        futures = [self._actor.getattr_path.call_one(path) for _, path in asked]

        def take(_: object) -> list[tuple[bytes, Entry]]:
            found = zip(asked, (future.get(0.0) for future in futures), strict=True)
            return [(os.fsencode(name), self._entry(path, answer)) for (name, path), answer in found if isinstance(answer, dict)]

        self._await(gather([settled(future) for future in futures]), later, take)
        return later

    def target(self, node: int, later: Later) -> int:
        """Links are shown as what they lead to."""
        return errno.EINVAL

    def open(self, node: int, later: Later) -> Opened | int | Later:
        """`FileSystem.open`; no byte of an earlier opening is kept."""
        path = self._path(node)
        if path is None:
            return errno.ESTALE
        return self._ask(self._actor.getattr_path, (path,), later, lambda _: Opened(keep_cache=False))

    def release(self, handle: int) -> None:
        """Nothing is kept of an open file."""

    def read(self, node: int, handle: int, offset: int, size: int, later: Later) -> Sequence[bytes] | int | Later:
        """`FileSystem.read`."""
        path = self._path(node)
        return errno.ESTALE if path is None else self._ask(self._actor.read_path, (path, size, offset), later, lambda data: [data])

    def forget(self, node: int) -> None:
        """`FileSystem.forget`."""
        with self._lock:
            path = self._paths.pop(node, None)
            if path is not None and self._numbers.get(path) == node:
                del self._numbers[path]

    # --- questions -----------------------------------------------------------------------------------------------

    def _path(self, node: int) -> str | None:
        with self._lock:
            return self._paths.get(node)

    def _entry(self, path: str, fields: dict[str, Any]) -> Entry:
        with self._lock:
            number = self._numbers.get(path)
            if number is None:
                number = self._numbers[path] = self._next
                self._paths[number] = path
                self._next += 1
        return Entry(number, _attr(fields))

    def _ask(self, endpoint: Any, args: tuple[Any, ...], later: Later, take: Callable[[Any], Any]) -> Later:
        self._await(endpoint.call_one(*args), later, take)
        return later

    def _await(self, future: Future[Any], later: Later, take: Callable[[Any], Any]) -> None:
        """Answer `later` with what `take` makes of the outcome, unless it is an errno."""
        future._when_done(lambda: self._post(partial(self._receive, future, later, take)))

    def _receive(self, future: Future[Any], later: Later, take: Callable[[Any], Any]) -> None:
        try:
            answer = future.get(0.0)
            answer = answer if isinstance(answer, int) else take(answer)
        except Exception as exc:
            if type(exc) not in self._said:
                self._said.add(type(exc))
                _logger.warning("the actor of a mount does not answer as it should: %s", exc)
            answer = errno.EIO
        if answer is not later:
            later.answer(answer)


def _join(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}"


def _attr(fields: dict[str, Any]) -> Attr:
    times = (round(fields[name] * 1e9) for name in ("st_mtime", "st_atime", "st_ctime"))
    mode, size = int(fields["st_mode"]), int(fields["st_size"])
    return Attr(mode, size, int(fields["st_nlink"]), int(fields["st_uid"]), int(fields["st_gid"]), *times)


class ActorMountHandle:
    """A mount of an actor's files, from `mount_read_only_filesystem`; it ends with this object, or the process. Thread: any."""

    def __init__(self, path: str, server: FuseServer, answers: Worker) -> None:
        self._end = weakref.finalize(self, _let_go, path, server, answers)

    def unmount(self) -> None:
        """Take the mount out of the tree, whoever uses it. Harmless twice."""
        self._end()


def _let_go(path: str, server: FuseServer, answers: Worker) -> None:
    mounting.unmount(path, lazy=True)
    # The collector may run this on a thread of the server, which ends by itself when nobody uses the mount any more.
    with suppress(InternalError):
        server.stop()
    answers.close()


def mount_read_only_filesystem(actor: Any, mount_point: str) -> ActorMountHandle:
    """Mount the tree that `actor` describes; the head of this module says how.

    Args:
        actor: a mesh of one, in another process than this one: who uses the mount here holds up whoever would answer.
        mount_point: an existing directory, absolute.

    Raises:
        RuntimeError: `mount_point` is relative or no directory, there is no FUSE, or the actor does not describe its root.
    """
    root = actor.getattr_path.call_one("/").get()
    if not isinstance(root, dict) or not stat.S_ISDIR(int(root["st_mode"])):
        what = f"the actor says of its root {root!r:.100}, which is no directory"
        raise RuntimeError(explain(what, next='let getattr_path("/") give st_mode of a directory'))
    fd = mounting.mount(mount_point, fsname="monarch-actor")
    answers = Worker("monarch-actor-files")
    server = FuseServer(fd, ActorFileSystem(actor, answers.post))
    server.start()
    return ActorMountHandle(mount_point, server, answers)
