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
from typing import Any

from monarch._base.errors import explain
from monarch._mounts.chain import CHUNK_BYTES as CBC_CHUNK
from monarch._mounts.chain import STREAMS as CBC_STREAMS
from monarch._mounts.chain_actors import FUSEActor, RemoteMountLeader
from monarch._mounts.index import BIG_FILE_THRESHOLD, BLOCK_SIZE, build_index, code_blocks, materialise_block
from monarch._mounts.mount_actor import Mode, MountActor, MountStatistics
from monarch._mounts.mounting import prepare_mount_point
from monarch._mounts.source_actor import SourceActor, Version
from monarch.actor import Actor, HostMesh, ProcMesh, endpoint, this_host

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


def remotemount(
    host_mesh: HostMesh, sourcepath: str, mntpoint: str | None = None, *, mode: Mode = "fuse", ahead_bytes: int | None = None
) -> MountHandler:
    """A handle to a directory that is to appear on every host; `open` makes it do so.

    Args:
        host_mesh: of any shape.
        sourcepath: a directory of this machine.
        mntpoint: where it appears; None: at the same absolute path. `$SUBDIR` in it stands for the coordinates of the host, such as
            `hosts_0`, which is needed where several hosts of the mesh are one machine.
        mode: "fuse": mounted, read as it comes; "copy": written as plain files, for hosts without FUSE.
        ahead_bytes: how much of the files of 1 MiB and more each host fetches before somebody reads it; None: up to a quarter of the
            memory that is free there.

    Raises:
        ValueError: another mode, or no path.
    """
    return MountHandler(host_mesh, sourcepath, mntpoint, mode=mode, ahead_bytes=ahead_bytes)


class MountHandler:
    """A directory on every host of a mesh. All methods block. Thread: one at a time."""

    def __init__(
        self, host_mesh: HostMesh, sourcepath: str, mntpoint: str | None = None, *, mode: Mode = "fuse", ahead_bytes: int | None = None
    ) -> None:
        if mode not in ("fuse", "copy"):
            raise ValueError(explain(f"unknown mode {mode!r}", next='use "fuse" or "copy"'))
        if not sourcepath:
            raise ValueError(explain("the path of the directory to push is empty", next="name a directory"))
        self.sourcepath = sourcepath
        self.mntpoint = mntpoint
        self._mode = mode
        self._ahead_bytes = ahead_bytes
        self._host_mesh = host_mesh
        self._procs: list[ProcMesh] = []
        self._source: Any = None
        self._mounts: Any = None

    def open(self, via_gateway: bool = False) -> None:
        """Make the directory appear; returns when all files below 1 MiB are on every host. The others follow, or come when they are read.

        Args:
            via_gateway: accepted; the way to hosts behind a gateway is found without it.

        Raises:
            RuntimeError: it is open; or a host has no FUSE.
            OSError: the source is no directory, or can't be read.
        """
        if self._procs:
            raise RuntimeError(explain("this mount is open already", next="close() it first, or refresh() it"))
        try:
            self._open()
        except BaseException:
            self._stop()
            raise

    def _open(self) -> None:
        source_procs = this_host().spawn_procs(name="mount-source")
        self._procs.append(source_procs)
        source = source_procs.spawn("source", SourceActor, os.path.abspath(self.sourcepath))
        self._source = source.flatten("rank").slice(rank=0)
        version: Version = self._source.scan.call_one().get()
        procs = self._host_mesh.spawn_procs(name="remotemount")
        self._procs.append(procs)
        self._mounts = procs.spawn("mount", MountActor, self._source)
        path = os.path.abspath(self.mntpoint if self.mntpoint is not None else self.sourcepath)
        self._mounts.mount.call(self._mounts, path, version.snapshot, self._mode).get()
        self._mounts.fetch_code.call(self._ahead_bytes).get()
        if self._mode == "copy":
            _logger.info("%s is copied to every host, not mounted: changes on a host stay there until a file changes here", path)
            self._mounts.copy.call().get()

    def refresh(self, sourcepath: str | None = None) -> None:
        """Make what has changed at the source be seen on every host: each file whole, all of them at once.

        Files that are open there go on in the version that they were opened in.

        Args:
            sourcepath: ignored.

        Raises:
            RuntimeError: it is not open.

        Cost: a look at every file; what has not changed does not move.
        """
        if self._mounts is None:
            raise RuntimeError(explain("no active mount to refresh; call open() first"))
        version: Version | None = self._source.scan.call_one().get()
        if version is None:
            return
        self._mounts.refresh.call(version.snapshot, version.digests).get()
        if self._mode == "copy":
            self._mounts.copy.call().get()

    def close(self) -> None:
        """Take the directory away again. No-op when it is not open.

        Raises:
            RuntimeError: with the hosts where it is still mounted, because somebody uses it.
        """
        if self._mounts is None:
            self._stop()
            return
        failed = []
        try:
            for point, (status, detail) in self._mounts.unmount.call().get().items():
                if status not in ("ok", "not_mounted"):
                    failed.append(f"{dict(point)}: {status}: {detail}")
        finally:
            self._stop()
        if failed:
            what = "the directory is still mounted on some hosts"
            raise RuntimeError(explain(what, next="end what uses it there", detail="\n".join(failed)))

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
