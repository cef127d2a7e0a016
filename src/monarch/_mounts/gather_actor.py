"""The client's end of gathered folders, as an actor in a process of its own on the client's machine: it owns the processes on the hosts,
and serves the mount.

Rules of this file:
    1. This process never touches the mount.
    2. A host that ends is a failure of this actor's, which it handles: its folder is EIO, the others go on.

Read next: `gathered.py` for what is mounted, `gather_source.py` for the hosts' end.
"""

from __future__ import annotations

import logging
import os
import time
from functools import partial
from typing import Any

from monarch._base.errors import explain, without_next
from monarch._mounts import mounting, notes
from monarch._mounts.fuse_server import FuseServer
from monarch._mounts.gather_source import GatherSourceActor, Whereabouts, key_of
from monarch._mounts.gathered import GatheredFileSystem, GatherStatistics, Remote
from monarch._mounts.mount_users import users_of
from monarch._mounts.worker import Worker
from monarch._runtime.future import Future
from monarch.actor import Actor, HostMesh, MeshFailure, ProcMesh, endpoint

_logger = logging.getLogger("monarch.mounts")
_READ_AHEAD_BYTES = 1 << 20


class GatherActor(Actor):
    """The mount."""

    def __init__(self) -> None:
        self._path = ""
        self._procs: ProcMesh | None = None
        self._filesystem: GatheredFileSystem | None = None
        self._server: FuseServer | None = None
        self._workers: list[Worker] = []

    async def __supervise__(self, failure: MeshFailure) -> bool:
        return True  # whoever asks that host hears of it, `_lose` among them

    @endpoint
    async def mount(self, host_mesh: HostMesh, remote: str, local: str, cache_bytes: int, patience_s: float) -> str:
        """Show the folder `remote` of all hosts at `local`; mounted when it returns.

        Returns:
            Why it can't be shown: no FUSE, `remote` or `local` is no directory, or one of them is in the other. "": it is mounted.
        """
        problem = mounting.fuse_problem()
        if problem:
            return explain(f"there is no FUSE on this machine: {problem}")
        self._procs = host_mesh.spawn_procs(name="gather_mount")
        sources = self._procs.spawn("gather-source", GatherSourceActor, remote)
        keys = []
        for point, where in (await sources.whereabouts.call()).items():
            problem = problem or where.problem or _nesting(where, local)
            keys.append(os.fsencode(key_of(point)))
        if problem:
            return problem
        names = keys if host_mesh.extent.labels else None
        ranks = sources.flatten("rank")
        ends = [ranks.slice(rank=index) for index in range(len(keys))]
        self._path = local
        try:
            mounting.prepare_mount_point(local)
            self._serve([_remote(end) for end in ends], names, cache_bytes, patience_s)
        except (RuntimeError, OSError) as exc:
            return str(exc)
        for shard, end in enumerate(ends):
            self._listen(shard, end)
        return ""

    def _serve(self, remotes: list[Remote], names: list[bytes] | None, cache_bytes: int, patience_s: float) -> None:
        notes.remember(self._path)
        fd = mounting.mount(self._path, fsname="monarch-gather")
        answers, notices = self._workers = [Worker("monarch-gather"), Worker("monarch-gather-notices")]
        filesystem = GatheredFileSystem(
            remotes, names, now=time.monotonic, post=answers.post, uid=os.getuid(), gid=os.getgid(), cache_bytes=cache_bytes
        )
        server = FuseServer(fd, filesystem, patience_s=patience_s)
        filesystem.nodes.knows = server.knows
        # Another thread, since the kernel may wait for readers before it forgets anything.
        filesystem.on_changed = lambda number: notices.post(partial(_forget_node, server, number))
        filesystem.on_renamed = lambda parent, name: notices.post(partial(server.invalidate_entry, parent, name))
        server.start()
        mounting.set_readahead(self._path, _READ_AHEAD_BYTES)
        self._filesystem, self._server = filesystem, server

    def _listen(self, shard: int, end: Any) -> None:
        try:
            future = end.changes.call_one()
        except Exception as exc:
            future = Future._failed(exc)
        future._when_done(lambda: self._workers[0].post(partial(self._hear, shard, end, future)))

    def _hear(self, shard: int, end: Any, future: Future[Any]) -> None:
        filesystem = self._filesystem
        if filesystem is None:
            return
        error = future.exception(0.0)
        if error is not None:
            _logger.warning("the host of a gathered folder is lost: mount=%s rank=%d error=%s", self._path, shard, without_next(str(error)))
            filesystem.lose(shard)
            return
        filesystem.changed(shard, future.get(0.0))
        self._listen(shard, end)

    @endpoint
    async def unmount(self, lazy: bool) -> tuple[str, str]:
        """End the mount: one of "ok", "not_mounted", "busy" and "error", and what uses it, or what the system said.

        Args:
            lazy: also while it is used.
        """
        if self._server is None:
            return "not_mounted", ""
        status, detail = mounting.unmount(self._path, lazy=lazy)
        if status == "busy":
            return status, "\n".join(users_of(self._path)) or detail
        if status != "error":
            notes.forget(self._path)
            self._end()
        return status, detail

    @endpoint
    async def stop_sources(self) -> None:
        """End the processes on the hosts."""
        procs, self._procs = self._procs, None
        if procs is not None:
            await procs.stop()

    @endpoint
    async def statistics(self) -> GatherStatistics | None:
        """What is here, and what was done; None: it is not mounted."""
        return None if self._filesystem is None else self._filesystem.statistics()

    def _end(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.stop()
        self._filesystem = None
        for worker in self._workers:
            worker.close()

    async def __cleanup__(self, exc: Exception | None) -> None:
        if self._server is not None:
            mounting.unmount(self._path, lazy=True)
            notes.forget(self._path)
        self._end()


def _forget_node(server: FuseServer, number: int) -> None:
    if server.knows(number):
        server.invalidate_node(number)


def _remote(end: Any) -> Remote:
    return Remote(end.stat.call_one, end.listing.call_one, end.read.call_one)


def _nesting(where: Whereabouts, local: str) -> str:
    """A mount inside of what it shows would be looked at by the one who is asked for it, who would wait for himself."""
    parent, name = os.path.split(local)
    path = os.path.join(os.path.realpath(parent), name)
    ours, theirs = path.rstrip("/") + "/", where.path.rstrip("/") + "/"
    if not (ours.startswith(theirs) or theirs.startswith(ours)) or where.machine != mounting.machine():
        return ""
    what = f"{local!r} can't show {where.path!r}: on this machine one of them is in the other"
    return explain(what, next="mount it beside the folder")
