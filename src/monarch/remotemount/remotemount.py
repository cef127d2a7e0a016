"""Push a directory to every host of a mesh, where it appears as a read-only file system.

    mount = remotemount(hosts, "/home/me/project")
    mount.open()
    ...
    mount.refresh()     # what has changed since; every file is seen whole, in the old version or in the new one
    mount.close()

Read next: `_mounts/mount_actor.py` for a host's end, `_mounts/source_actor.py` for ours; docs/mounts.md.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from functools import partial
from itertools import chain
from types import TracebackType
from typing import Any

from monarch._base.errors import explain, without_next
from monarch._mounts.chain import CHUNK_BYTES as CBC_CHUNK
from monarch._mounts.chain import STREAMS as CBC_STREAMS
from monarch._mounts.chain_actors import FUSEActor, RemoteMountLeader
from monarch._mounts.index import BIG_FILE_THRESHOLD, BLOCK_SIZE, build_index, code_blocks, materialise_block
from monarch._mounts.mount_actor import SUBDIR, Mode, MountActor, MountStatistics
from monarch._mounts.mounting import machine, prepare_mount_point
from monarch._mounts.source import root_of
from monarch._mounts.source_actor import SourceActor, Version
from monarch.actor import Actor, Future, HostMesh, Ignore, ProcMesh, endpoint, this_host
from monarch.actor.host_mesh import check_hosts

__all__ = [
    "BIG_FILE_THRESHOLD",
    "BLOCK_SIZE",
    "CBC_CHUNK",
    "CBC_STREAMS",
    "FUSEActor",
    "MountHandler",
    "MountHandlerClient",
    "RemoteMountLeader",
    "build_index",
    "code_blocks",
    "materialise_block",
    "prepare_mount_point",
    "remotemount",
]
_logger = logging.getLogger("monarch.mounts")
_STOP_S = 20.0
_CLOSE_S = 20.0
_RETRY_S = 0.1


def remotemount(
    host_mesh: HostMesh, sourcepath: str, mntpoint: str | None = None, *, mode: Mode = "fuse", ahead_bytes: int | None = None
) -> MountHandler:
    """A handle to a directory that is to appear on every host; `open` makes it do so.

    Args:
        host_mesh: of any shape.
        sourcepath: a directory of this machine. Relative paths are meant from the working directory of this moment.
        mntpoint: where it appears; None: at the same absolute path. `$SUBDIR` in it stands for the coordinates of the host, such as
            `hosts_0`, which is needed where several hosts of the mesh are one machine.
        mode: "fuse": mounted, read as it comes; "copy": written as plain files, for hosts without FUSE.
        ahead_bytes: how much of the files of 1 MiB and more each host fetches before somebody reads it; None: up to a quarter of the
            memory that is free there.

    Raises:
        ValueError: another mode, or no path.
        TypeError: `host_mesh` is no mesh of hosts.
    """
    return MountHandler(host_mesh, sourcepath, mntpoint, mode=mode, ahead_bytes=ahead_bytes)


class MountHandler:
    """A directory on every host of a mesh. All methods block. Thread: one at a time."""

    def __init__(
        self, host_mesh: HostMesh, sourcepath: str, mntpoint: str | None = None, *, mode: Mode = "fuse", ahead_bytes: int | None = None
    ) -> None:
        if mode not in ("fuse", "copy"):
            raise ValueError(explain(f"unknown mode {mode!r}", next='use "fuse" or "copy"'))
        check_hosts(host_mesh)
        if not sourcepath:
            raise ValueError(explain("the path of the directory to push is empty", next="name a directory"))
        self.sourcepath = sourcepath
        self.mntpoint = mntpoint
        self._source_path = os.path.abspath(sourcepath)
        self._target_path = os.path.abspath(sourcepath if mntpoint is None else mntpoint)
        self._mode = mode
        self._ahead_bytes = ahead_bytes
        self._host_mesh = host_mesh
        self._is_behind = False
        """A refresh has failed or was interrupted: hosts may show an older version than the source has found last."""
        self._procs: list[ProcMesh] = []
        self._source: Any = None
        self._mounts: Any = None

    def open(self, via_gateway: bool = False) -> None:
        """Make the directory appear; returns when all files below 1 MiB are on every host. The others follow, or come when they are read.

        Args:
            via_gateway: accepted; the way to hosts behind a gateway is found without it.

        Raises:
            RuntimeError: it is open.
            OSError: the source is no directory.
            ActorError: of a RuntimeError: a host has no FUSE, something is mounted there, or the directory would be shown over itself, on
                this machine; of an OSError: the source can't be read, the mount point can't be made, or, in copy mode, is not empty.
            SupervisionError: a host has ended.
        """
        if self._procs:
            raise RuntimeError(explain("this mount is open already", next="close() it first, or refresh() it"))
        root_of(self._source_path)
        self._is_behind = False
        try:
            self._open()
        except BaseException:
            self._stop()
            raise

    def _open(self) -> None:
        source_procs = this_host().spawn_procs(name="mount-source")
        self._procs.append(source_procs)
        procs = self._host_mesh.spawn_procs(name="remotemount")  # they start while the directory is looked at
        self._procs.append(procs)
        source = source_procs.spawn("source", SourceActor, self._source_path)
        self._source = source.flatten("rank").slice(rank=0)
        self._mounts = procs.supervised(Ignore()).spawn("mount", MountActor, self._source)
        origin = os.path.realpath(self._source_path), machine()
        self._cover(*origin)
        version: Version = self._source.scan.call_one().get()
        mounted = self._mounts.mount.call(self._mounts, self._target_path, version.snapshot, self._mode, self._ahead_bytes, origin)
        complete = self._mounts.wait_code.call()
        mounted.get()
        for life in self._mounts.live.stream():
            life._when_done(partial(self._on_end, life))
        complete.get()
        if self._mode == "copy":
            text = "%s is copied to every host, not mounted: changes on a host stay there until a file changes here"
            _logger.info(text, self._target_path)
            self._mounts.copy.call().get()

    def _on_end(self, life: Future[None]) -> None:
        """What serves the directory on a host has ended. The others go on, so that is no fault of the program's. Thread: any."""
        error = life.exception(0.0)
        if self._mounts is not None:
            text = "a pushed directory is gone on a host, the others go on: path=%s error=%s"
            _logger.warning(text, self._target_path, without_next(str(error)))

    def _cover(self, source: str, own_machine: str) -> None:
        """Make the mount points that are in the source itself, and leave out what is below; hosts are asked only if there may be some."""
        parent = os.path.realpath(os.path.dirname(self._target_path.partition(SUBDIR)[0]))
        if f"{parent.rstrip('/')}/".startswith(f"{source.rstrip('/')}/"):
            places = self._mounts.place.call(self._target_path).get().values()
            covered = [path for path, where in places if where == own_machine]
            if self._mode == "fuse":  # before the first look, which is to find them
                for path in covered:
                    prepare_mount_point(path)
            self._source.cover.call_one(covered).get()

    def refresh(self, sourcepath: str | None = None) -> None:
        """Make what has changed at the source be seen on every host: each file whole, all of them at once.

        Returns when what has changed in files below 1 MiB, and 64 MiB of the others, is on every host; the rest follows, as after `open`.
        Files that are open there go on in the version that they were opened in.

        Args:
            sourcepath: ignored.

        Raises:
            RuntimeError: it is not open.
            ActorError: of an OSError: the source is not there any more, or can't be read.
            SupervisionError: a host has ended; the others show the new version.

        Cost: a look at every file; what has not changed does not move.
        """
        if self._mounts is None:
            raise RuntimeError(explain("no active mount to refresh; call open() first"))
        again, self._is_behind = self._is_behind, True
        version: Version | None = self._source.scan.call_one(again).get()
        if version is not None:
            self._show(version)
        self._is_behind = False

    def _show(self, version: Version) -> None:
        shown = self._mounts.refresh.stream(version.snapshot, version.digests)
        complete = self._mounts.wait_code.stream()
        _wait_all(shown, complete)
        if self._mode == "copy":
            _wait_all(self._mounts.copy.stream())

    def close(self, *, deadline: float | None = None) -> None:
        """Take the directory away again, and end the processes that serve it. No-op when it is not open.

        Args:
            deadline: seconds for which it is tried while somebody uses the directory; None: 20.

        Raises:
            RuntimeError: it is still used, with the hosts where, and by whom; there it stays as it is, and may be closed later.
            SupervisionError: a host has ended, and its mount with it; it is closed on the others.
        """
        if self._mounts is None:
            self._stop()
            return
        until_s = time.monotonic() + (_CLOSE_S if deadline is None else deadline)
        try:
            while failed := self._unmounted():
                if time.monotonic() >= until_s:
                    break
                time.sleep(_RETRY_S)  # nobody tells when the last file is closed
        except BaseException:
            self._stop()
            raise
        if failed:
            next = "end what uses it there, and close() it again"
            raise RuntimeError(explain("the directory is still mounted on some hosts", next=next, detail="\n".join(failed)))
        self._stop()

    def __enter__(self) -> MountHandler:
        """`open`."""
        self.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _unmounted(self) -> list[str]:
        """Unmount on every host; where that could not be, and why."""
        failed = []
        for point, (status, detail) in self._mounts.unmount.call().get().items():
            if status not in ("ok", "not_mounted"):
                where = ", ".join(f"{dim} {at}" for dim, at in dict(point).items()) or "this host"
                failed.append(f"{where}: {status}: {detail}")
        return failed

    def statistics(self) -> list[MountStatistics]:
        """What each host has and has done, in the order of ranks.

        Raises:
            RuntimeError: it is not open.
        """
        if self._mounts is None:
            raise RuntimeError(explain("no active mount; call open() first"))
        return list(self._mounts.statistics.call().get().values())

    def _stop(self) -> None:
        procs, self._procs = self._procs, []
        self._mounts = self._source = None
        for mesh in reversed(procs):
            mesh.stop().get(timeout=_STOP_S)


class MountHandlerClient(Actor):
    """A `MountHandler` as an actor, for a process that must not wait for it."""

    def __init__(self, host_mesh: HostMesh, sourcepath: str, mntpoint: str | None = None) -> None:
        self._handler = MountHandler(host_mesh, sourcepath, mntpoint)

    @endpoint
    def open(self, self_handle: Any = None, via_gateway: bool = False) -> None:
        """`MountHandler.open`; `self_handle` is accepted."""
        self._handler.open(via_gateway)

    @endpoint
    def refresh(self) -> None:
        """`MountHandler.refresh`."""
        self._handler.refresh()

    @endpoint
    def close(self) -> None:
        """`MountHandler.close`."""
        self._handler.close()


def _wait_all(*answers: Iterator[Future[Any]]) -> None:
    """Wait until every host has answered or ended; then raise the first error."""
    errors = []
    for future in chain(*answers):
        try:
            future.get()
        except Exception as exc:
            errors.append(exc)
    if errors:
        raise errors[0]
