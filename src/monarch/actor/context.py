"""Context: which actor runs, and for which message.

`context()` works wherever user code runs: in endpoints and the tasks, worker threads and raw threads that they start,
in `__init__`, `__supervise__` and `__cleanup__`, and in every thread of a client.

Read next: `process.py` for who answers outside of actors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from monarch._base.ids import ActorAddr
from monarch._mesh.shape import Extent, Point
from monarch._runtime.cell import Activation
from monarch.actor.process import Process, this_process

if TYPE_CHECKING:
    from monarch.actor.proc_mesh import ProcMesh

ROOT = "root"
_PRUNE_AT = 64
"""How many owned meshes an actor lists before it drops those that were stopped."""


class CreatorInstance(NamedTuple):
    """Snapshot of the actor that spawned another one; picklable."""

    rank: Point
    proc_mesh: ProcMesh
    proc: ProcMesh
    name: str
    class_name: str | None
    creator: CreatorInstance | None

    def __repr__(self) -> str:
        return _chain(self)

    def __str__(self) -> str:
        return _chain(self)


class Instance:
    """The running actor, seen from inside."""

    def __init__(
        self,
        *,
        process: Process,
        uid: str,
        name: str,
        class_name: str | None,
        rank: Point,
        proc_mesh: ProcMesh,
        proc: ProcMesh,
        creator: CreatorInstance | None,
        cell: Any = None,
    ) -> None:
        self._process = process
        self._uid = uid
        self._cell = cell
        self.name = name
        """The name given to `spawn`, verbatim; "root" for a client."""
        self.class_name = class_name
        """`<module>.<qualname>`; None for a client."""
        self.rank = rank
        """Rank in the mesh on which this actor's mesh was spawned."""
        self.proc_mesh = proc_mesh
        """The procs that this actor's mesh was spawned on."""
        self.proc = proc
        """The one proc that this actor is on."""
        self.creator = creator
        """Who spawned this actor; None for a client."""
        self._children: list[Any] = []
        self._prune_at = _PRUNE_AT
        self._debugging: Any = None
        """The debugger's part (`remote_pdb.Debugging`), once this actor has reached a breakpoint."""
        self._text = _chain(self)

    @property
    def actor_id(self) -> ActorAddr:
        """Globally unique address of this actor."""
        ref = self._process.proc.ref
        label, _, random = self._uid.rpartition("-")
        return ActorAddr(addr=ref.address, proc_name=ref.uid, actor_name=f"{label}<{random}>" if label else random)

    @property
    def proc_id(self) -> str:
        """Address of this actor's proc."""
        ref = self._process.proc.ref
        return f"{ref.uid}@{ref.address}"

    def stop(self, reason: str | None = None) -> None:
        """Stop this actor after the current message; `__cleanup__(None)` runs. Not a failure."""
        self._own_cell("stop").stop(reason or "stopped by itself", drain=False)

    def abort(self, reason: str | None = None) -> None:
        """Fail this actor; its owner hears of it."""
        self._own_cell("abort").kill(ActorAborted(f"actor explicitly aborted due to: {reason or '(no reason provided)'}"))

    kill = abort

    def _as_rust(self) -> Instance:
        """What programs for PyTorch Monarch hand to its private functions."""
        return self

    def set_system(self) -> None:
        """Mark this actor as infrastructure, which listings leave out."""
        cell = self._cell
        if cell is not None and cell.slot is not None:
            cell.slot.leave()

    def spawn_tensor_engine(self, proc_mesh: ProcMesh) -> Any:
        """Needs the tensor engine."""
        raise NotImplementedError("the tensor engine is not part of this version of monarch")

    def _own_cell(self, what: str) -> Any:
        if self._cell is None:
            raise RuntimeError(f"the root client can't {what} itself; use shutdown_context()")
        return self._cell

    def _add_child(self, mesh: Any) -> None:
        if self._cell is None:
            return  # what the root owns ends with its process
        if len(self._children) >= self._prune_at:
            self._children = [child for child in self._children if not child._ended]
            self._prune_at = max(_PRUNE_AT, 2 * len(self._children))
        self._children.append(mesh)

    def _snapshot(self) -> CreatorInstance:
        return CreatorInstance(self.rank, self.proc_mesh, self.proc, self.name, self.class_name, self.creator)

    def __repr__(self) -> str:
        return self._text

    __str__ = __repr__

    def __reduce__(self) -> Any:
        raise TypeError("an Instance can't be pickled; send actor_id, or a mesh")


class ActorAborted(Exception):
    """An actor ended itself by `abort` or `kill`."""


class Context:
    """The running actor and the message it handles."""

    __slots__ = ("_activation", "actor_instance")

    def __init__(self, instance: Instance, activation: Activation) -> None:
        self.actor_instance = instance
        self._activation = activation

    @property
    def message_rank(self) -> Point:
        """Position of this actor in the view of the mesh that the message was sent to; 0-d outside of a message."""
        activation = self._activation
        return Point(activation.rank, Extent._of(activation.labels, activation.sizes))

    def __repr__(self) -> str:
        return f"Context(actor_instance={self.actor_instance}, message_rank={self.message_rank})"

    def __reduce__(self) -> Any:
        raise TypeError("a Context can't be pickled; send what you need of it")


def context() -> Context:
    """The running context. Outside of actors it is the root client's, which the first call creates."""
    activation = this_process().activation()
    return Context(activation.cell.instance, activation)


def current_actor_name() -> str:
    """Text form of the running actor's id."""
    return str(context().actor_instance.actor_id)


def current_rank() -> Point:
    """The same as `context().message_rank`."""
    return context().message_rank


def current_size() -> dict[str, int]:
    """Extent of the view that the message was sent to, as a dict."""
    return dict(context().message_rank.extent.items())


def _chain(instance: Instance | CreatorInstance) -> str:
    own = f"<{ROOT}>" if instance.class_name is None else f"<{instance.class_name} {instance.name}{instance.rank}>"
    return own if instance.creator is None else f"{_chain(instance.creator)}.{own}"
