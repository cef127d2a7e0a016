"""Readiness: whether all processes of a mesh can take part in transfers, found out before the first one.

Nobody needs to ask: each process makes its manager when it first uses one-sided memory. Who asks hears of a wrong configuration early,
and saves the first transfer some milliseconds.

Rules of this file:
    1. A mesh is asked once; who asks again gets the same future.
    2. A remembered future does not keep its mesh alive.

Read next: `manager.py`.
"""

from __future__ import annotations

import threading
import weakref

from monarch._base.errors import explain
from monarch._mesh.value_mesh import ValueMesh
from monarch._runtime.future import Future
from monarch.actor import Actor, Instance, ProcMesh, context, endpoint
from monarch.rdma.errors import RdmaInitError
from monarch.rdma.manager import own_manager

_ready: weakref.WeakKeyDictionary[ProcMesh, Future[None]] = weakref.WeakKeyDictionary()
_ready_lock = threading.Lock()


class ManagerActor(Actor):
    """Makes the manager of its process, and ends."""

    @endpoint
    def start(self) -> str:
        """Why no transfer is possible here; "": it is."""
        context().actor_instance.stop()
        try:
            own_manager()
        except RdmaInitError as exc:
            return str(exc)
        return ""


class Readiness:
    """The question by itself, which nobody remembers."""

    @classmethod
    def ensure_init_rdma_manager_nonblocking(cls, proc_mesh: ProcMesh, actor_instance: Instance) -> Future[None]:
        """Have every process of a mesh make its manager; returns at once.

        Args:
            actor_instance: the running actor, who asks.

        Returns:
            A future that fails with `RdmaInitError` when one of them can't, and with TypeError when `proc_mesh` is no ProcMesh.
        """
        if not isinstance(proc_mesh, ProcMesh):
            return Future._failed(TypeError(explain(f"expected a ProcMesh, got {proc_mesh!r:.80}", next="pass what spawn_procs() gave")))
        return proc_mesh.spawn("rdma-manager", ManagerActor).start.call()._then(_checked)


def _checked(problems: ValueMesh[str]) -> None:
    for point, problem in problems.items():
        if problem:
            where = f"{dict(point)} of the mesh" if point else ""
            raise RdmaInitError(problem if not where else explain(problem, where=where))


def ensure_ready_on(proc_mesh: ProcMesh) -> Future[None]:
    """As `Readiness`, once for each mesh."""
    with _ready_lock:
        future = _ready.get(proc_mesh)
        if future is None:
            future = Readiness.ensure_init_rdma_manager_nonblocking(proc_mesh, context().actor_instance)
            _ready[proc_mesh] = future
        return future


def ensure_ready() -> Future[None]:
    """As `ensure_ready_on` for the mesh that the running actor was spawned on."""
    return ensure_ready_on(context().actor_instance.proc_mesh)
