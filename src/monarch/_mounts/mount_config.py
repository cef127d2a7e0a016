"""Mount configurations: which directories a job wants on its hosts and from them, and what is mounted of that.

    mounts = Mounts()
    mounts.remote_mount("/home/me/project", "/mnt/project", meshes=["trainers"])
    mounts.gather_mount("/tmp/logs", "/mnt/logs")
    mounts.ensure_open(allocation, {"trainers": hosts})     # as often as one likes: opened once, refreshed from then on

A configuration is data: it is pickled with the job, and opened by whatever process stays as long as the allocation does.

Rules of this file:
    1. Of a configuration that can't be opened nothing stays mounted; where that fails as well, the error says so.
    2. What can't be closed is kept, and the next `close` tries again.
    3. One mount that fails does not keep the others from being tried. Each failure is a line on stderr, and all of them are raised.

Read next: `remotemount/remotemount.py` and `gather_mount/gather_mount.py`, which mount.
"""

from __future__ import annotations

import copy
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from monarch._base.errors import did_you_mean, explain

if TYPE_CHECKING:
    from monarch.actor import HostMesh
    from monarch.gather_mount.gather_mount import GatherMount
    from monarch.remotemount.remotemount import MountHandler

_CLOSE_S = 20.0
"""For all gathered mounts of a configuration together."""
HostMeshes = Mapping[str, "HostMesh"]


@dataclass
class RemoteMountEntry:
    """A directory of this machine that is to appear on hosts."""

    source: str
    mntpoint: str | None = None
    meshes: list[str] | None = None
    """Names of meshes of the job; None: all of them."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """For `remotemount`."""
    via_gateway: bool = False
    """As of `MountHandler.open`."""

    def apply(self, host_meshes: HostMeshes) -> list[MountHandler]:
        """Mount on each mesh.

        Raises:
            ValueError: a mesh that is not there.
            Exception: as of `remotemount` and `MountHandler.open`; nothing stays open.
        """
        from monarch.remotemount.remotemount import remotemount

        meant = _meant(self.meshes, host_meshes)
        handles = [remotemount(mesh, self.source, self.mntpoint, **self.kwargs) for mesh in meant.values()]
        begun: list[Callable[[], None]] = []
        try:
            for handle in handles:
                begun.append(handle.close)
                handle.open(self.via_gateway)
        except BaseException as exc:
            _undo(begun, exc)
            raise
        return handles


@dataclass
class GatherMountEntry:
    """A folder of hosts that is to appear on this machine."""

    remote_mount_point: str
    local_mount_point: str
    meshes: list[str] | None = None
    """Names of meshes of the job; None: all of them. Of several each has a directory of its name."""

    def apply(self, host_meshes: HostMeshes) -> list[GatherMount]:
        """Mount each mesh; raises as of `gather_mount`, and ValueError for a mesh that is not there. Then nothing stays open."""
        from monarch.gather_mount.gather_mount import gather_mount

        meant = _meant(self.meshes, host_meshes)
        handles: list[GatherMount] = []
        try:
            for name, mesh in meant.items():
                local = os.path.join(self.local_mount_point, name) if len(meant) > 1 else self.local_mount_point
                handles.append(gather_mount(mesh, self.remote_mount_point, local))
        except BaseException as exc:
            _undo([partial(handle.close, deadline=_CLOSE_S) for handle in handles], exc)
            raise
        return handles


def _meant(names: list[str] | None, host_meshes: HostMeshes) -> dict[str, HostMesh]:
    """The meshes of these names."""
    for name in names or ():
        if name not in host_meshes:
            known = ", ".join(sorted(host_meshes)) or "(none)"
            what = f"a mount is meant for the mesh {name!r}, which the job does not have{did_you_mean(name, host_meshes)}"
            raise ValueError(explain(what, where=f"its meshes: {known}", next="correct meshes=[...], or leave it out for all of them"))
    return {name: mesh for name, mesh in host_meshes.items() if names is None or name in names}


def _undo(closes: list[Callable[[], None]], error: BaseException) -> None:
    for close in closes:
        try:
            close()
        except Exception as exc:
            error.add_note(f"and what had been opened before could not be closed: {exc}")


class MountsHandle:
    """What is mounted of one configuration. All methods block. Thread: one at a time."""

    def __init__(self, mounts: Mounts, host_meshes: HostMeshes) -> None:
        """Mount it; raises as of the entries, and then nothing stays open."""
        self._active_remote: list[MountHandler] = []
        self._active_gather: list[GatherMount] = []
        try:
            for remote in mounts._remote_entries:
                self._active_remote += remote.apply(host_meshes)
            for gathered in mounts._gather_entries:
                self._active_gather += gathered.apply(host_meshes)
        except BaseException as exc:
            _undo([self.close], exc)
            raise

    def refresh(self) -> None:
        """Make changes at the sources be seen on the hosts; what is gathered is live anyway. RuntimeError when some can't be refreshed."""
        failed = [failure for mount in self._active_remote if (failure := _failure("refresh", mount.refresh)) is not None]
        _raise_all("refresh", failed)

    def close(self) -> None:
        """Unmount all; RuntimeError when some can't be, which the next `close` tries again."""
        until_s = time.monotonic() + _CLOSE_S
        failed: list[Exception] = []
        busy_gather, busy_remote = [], []
        for gathered in self._active_gather:
            failure = _failure("close", partial(gathered.close, deadline=max(0.0, until_s - time.monotonic())))
            if failure is not None:
                busy_gather.append(gathered)
                failed.append(failure)
        for remote in self._active_remote:
            failure = _failure("close", remote.close)
            if failure is not None:
                busy_remote.append(remote)
                failed.append(failure)
        self._active_gather, self._active_remote = busy_gather, busy_remote
        _raise_all("close", failed)


def _failure(verb: str, call: Callable[[], object]) -> Exception | None:
    """What went wrong, which is told on stderr as well; None: nothing did."""
    try:
        call()
    except Exception as exc:
        print(f"[job_sidecar pid={os.getpid()}] failed to {verb} mount: {exc}", file=sys.stderr, flush=True)
        return exc
    return None


def _raise_all(verb: str, failed: list[Exception]) -> None:
    if failed:
        what = f"failed to {verb} {len(failed)} mount{'s' if len(failed) > 1 else ''}"
        raise RuntimeError(explain(what, next=f"see why below, and {verb} again", detail="\n".join(map(str, failed)))) from failed[0]


class Mounts:
    """A configuration: what a job wants mounted. Picklable."""

    def __init__(self) -> None:
        self._remote_entries: list[RemoteMountEntry] = []
        self._gather_entries: list[GatherMountEntry] = []

    def remote_mount(self, source: str, mntpoint: str | None = None, meshes: list[str] | None = None, **kwargs: Any) -> None:
        """Want a directory of this machine on all hosts of some meshes.

        Args:
            source, mntpoint, kwargs: as of `remotemount`.
            meshes: names of meshes of the job; None: all of them.
        """
        self._remote_entries.append(RemoteMountEntry(source, mntpoint, meshes, kwargs))

    def gather_mount(self, remote_mount_point: str, local_mount_point: str, meshes: list[str] | None = None) -> None:
        """Want a folder of all hosts of some meshes here; paths as of `gather_mount`."""
        self._gather_entries.append(GatherMountEntry(remote_mount_point, local_mount_point, meshes))

    def open(self, host_meshes: HostMeshes) -> MountsHandle:
        """Mount it, whatever else is mounted."""
        return MountsHandle(self, host_meshes)

    def ensure_open(self, apply_id: str, host_meshes: HostMeshes, via_gateway: bool = False) -> None:
        """Make this the configuration that is mounted for an allocation; see `OpenMounts.ensure`.

        Args:
            apply_id: of the allocation.
            via_gateway: of all remote mounts from now on.
        """
        for entry in self._remote_entries:
            entry.via_gateway = via_gateway
        with _allocations_lock:
            allocation = _allocations.setdefault(apply_id, OpenMounts())
        allocation.ensure(self, host_meshes)


class OpenMounts:
    """What is mounted for one allocation. Thread: any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handle: MountsHandle | None = None
        self._configured: object = None
        """What `_handle` was made of; None: of nothing that may be used again."""

    def ensure(self, mounts: Mounts, host_meshes: HostMeshes) -> None:
        """Mount a configuration: the one that is mounted is refreshed, another one takes its place, an empty one clears it.

        Raises:
            Exception: as of `MountsHandle`. What could not be closed is tried again the next time, before anything is opened.
        """
        with self._lock:
            wanted = copy.deepcopy((mounts._remote_entries, mounts._gather_entries)), sorted(host_meshes)
            if self._handle is not None and self._configured == wanted:
                self._handle.refresh()
                return
            self._clear()
            if mounts._remote_entries or mounts._gather_entries:
                self._handle, self._configured = mounts.open(host_meshes), wanted

    def clear(self) -> None:
        """Unmount what is mounted."""
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        self._configured = None
        if self._handle is not None:
            self._handle.close()
            self._handle = None


_allocations: dict[str, OpenMounts] = {}
_allocations_lock = threading.Lock()
