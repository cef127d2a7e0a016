"""Mount a folder of every host of a mesh under one local directory: all logs in one place.

    with gather_mount(hosts, "/tmp/logs", "/mnt/logs"):
        ...                     # /mnt/logs/hosts_0/worker.log

Read next: `_mounts/gather_actor.py` for our end, `_mounts/gather_source.py` for a host's.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from types import TracebackType
from typing import Any

from monarch._base.errors import explain
from monarch._mounts import mounting
from monarch._mounts.gather_actor import GatherActor
from monarch._mounts.gather_source import key_of
from monarch._mounts.gathered import CACHE_BYTES, GatherStatistics
from monarch.actor import HostMesh, ProcMesh, SupervisionError, this_host
from monarch.actor.host_mesh import check_hosts

__all__ = ["GatherMount", "gather_mount"]
_logger = logging.getLogger("monarch.mounts")
_CLOSE_S = 20.0
_RETRY_S = 0.1
_STOP_S = 20.0
_EXIT_S = 1.0

# Names that scripts for the package whose API this is import from here.
_NOTIFY_BATCH_S = 0.05
_point_to_key = key_of


def gather_mount(
    host_mesh: HostMesh,
    remote_mount_point: str,
    local_mount_point: str,
    *,
    cache_bytes: int = CACHE_BYTES,
    patience_s: float = 60.0,
) -> GatherMount:
    """Show a folder of every host, live and read-only; mounted when it returns.

    A mesh without dimensions appears at `local_mount_point` itself, of others each host has a directory there, such as `hosts_0`.
    A change on a host is seen here within about 100 ms.

    Args:
        host_mesh: of any shape.
        remote_mount_point: an absolute path on the hosts; `$SUBDIR` in it stands for the coordinates of the host. What does not exist is
            shown empty until it does.
        local_mount_point: a directory of this machine; it is made if need be.
        cache_bytes: memory for what was read, in the process that serves the mount.
        patience_s: a host that takes longer for an answer is ETIMEDOUT to the reader.

    Raises:
        ValueError: a path is empty, `remote_mount_point` is relative, or a number is not positive.
        TypeError: `host_mesh` is no mesh of hosts.
        RuntimeError: something is mounted at `local_mount_point`, there is no FUSE here, or what is to be shown is no directory.
    """
    if not local_mount_point or not os.path.isabs(remote_mount_point):
        what = f"gather_mount needs an absolute path on the hosts and one here, not {remote_mount_point!r} and {local_mount_point!r}"
        raise ValueError(explain(what, next='write gather_mount(hosts, "/tmp/logs", "/mnt/logs")'))
    if cache_bytes <= 0 or not patience_s > 0:
        raise ValueError(explain(f"cache_bytes={cache_bytes} and patience_s={patience_s:g} must be positive"))
    check_hosts(host_mesh)
    path = os.path.abspath(local_mount_point)
    if mounting.is_mounted(path) and not mounting.is_stale(path):
        found = mounting.mount_at(path)
        where = "" if found is None else f"{found.source}, of type {found.kind}"
        raise RuntimeError(explain(f"something is mounted at {path!r} already", where=where, next="close that first, or mount elsewhere"))
    return GatherMount(host_mesh, remote_mount_point, path, cache_bytes, patience_s)


class GatherMount:
    """A mounted folder of every host; made by `gather_mount`. All methods block. Thread: one at a time."""

    def __init__(self, host_mesh: HostMesh, remote: str, local: str, cache_bytes: int, patience_s: float) -> None:
        self._path = local
        self._procs: ProcMesh | None = this_host().spawn_procs(name="gather-mount")
        try:
            self._actor: Any = self._procs.spawn("gather", GatherActor)
            problem = self._actor.mount.call_one(host_mesh, remote, local, cache_bytes, patience_s).get()
            if problem:
                raise RuntimeError(problem)
        except BaseException:
            self._stop()
            raise
        atexit.register(self._close_at_exit)

    def close(self, *, deadline: float | None = None) -> None:
        """Unmount, and end the processes on the hosts. No-op when that has been done.

        Args:
            deadline: seconds for which it is tried while somebody uses the mount; None: 20.

        Raises:
            RuntimeError: it is still used, with the processes that do; it stays as it is, and may be closed later.
        """
        if self._procs is None:
            return
        until_s = time.monotonic() + (_CLOSE_S if deadline is None else deadline)
        while True:
            status, detail = self._unmount(lazy=False)
            if status in ("ok", "not_mounted"):
                break
            if time.monotonic() >= until_s:
                next = "end what uses it, and close() it again"
                raise RuntimeError(explain(f"{self._path!r} can't be unmounted: {status}", next=next, detail=detail))
            time.sleep(_RETRY_S)  # nobody tells when the last file is closed
        self._stop()

    def _unmount(self, *, lazy: bool) -> tuple[str, str]:
        try:
            answer: tuple[str, str] = self._actor.unmount.call_one(lazy).get()
        except SupervisionError as exc:
            # The process that served it has ended. Nobody can use what it has left, and nothing can be lost.
            _logger.warning("a gathered mount was not served any more: path=%s error=%s", self._path, exc)
            return mounting.unmount(self._path, lazy=True)
        return answer

    def statistics(self) -> GatherStatistics | None:
        """What is cached, and what was done so far; None: it is closed."""
        if self._procs is None:
            return None
        found: GatherStatistics | None = self._actor.statistics.call_one().get()
        return found

    def __enter__(self) -> GatherMount:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _stop(self) -> None:
        procs, self._procs = self._procs, None
        atexit.unregister(self._close_at_exit)
        if procs is None:
            return
        try:
            if hasattr(self, "_actor"):
                self._actor.stop_sources.call_one().get(timeout=_STOP_S)
        except Exception as exc:
            _logger.warning("the processes of a gathered mount did not stop: path=%s error=%s", self._path, exc)
        procs.stop().get(timeout=_STOP_S)

    def _close_at_exit(self) -> None:
        """Unmount whoever uses it: its server ends with this process."""
        try:
            self._actor.unmount.call_one(True).get(timeout=_EXIT_S)
            self._stop()
        except Exception as exc:
            if mounting.is_mounted(self._path):  # or else it went with all processes: after Ctrl-C they end before this is called
                _logger.warning("a gathered mount was not closed: path=%s error=%s", self._path, exc)
