"""What all views of one proc mesh share: its names and addresses, and how its processes came and went.

Read next: `proc_mesh.py`, the views.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, overload

from monarch import config
from monarch._base.agents import Agents
from monarch._base.errors import explain
from monarch._base.ids import ProcRef, folder_of
from monarch._mesh.shape import Extent, Point
from monarch._runtime.faults import SupervisionError, last_words
from monarch._runtime.future import Future
from monarch._wire.messages import Fault, ProcExited

if TYPE_CHECKING:
    from monarch.actor.host_mesh import HostMesh
    from monarch.actor.launch import Launch
    from monarch.actor.proc_mesh import ProcMesh

_logger = logging.getLogger("monarch.actor")
STOPPED = "`ProcMesh` has already been stopped"


class ProcNames(NamedTuple):
    """What the ids and addresses of a mesh's procs are made of, so that a reference to many procs stays small."""

    label: str
    random: str
    agents: Agents
    """The agent of each host, in rank order."""
    per_host: int
    only: ProcRef | None = None
    """The one proc of a mesh that nobody spawned (a client)."""
    renamed: tuple[tuple[int, str], ...] = ()
    """The random part of ranks whose proc was replaced by hand (`respawn`)."""

    @staticmethod
    def of_one(label: str, ref: ProcRef) -> ProcNames:
        """Those of a mesh that nobody spawned."""
        return ProcNames(label, "", Agents(()), 1, ref)

    @property
    def uid(self) -> str:
        """Unique id of the mesh."""
        return self.only.uid if self.only is not None else f"{self.label}-{self.random}"

    @property
    def num_procs(self) -> int:
        """How many procs the mesh has."""
        return 1 if self.only is not None else len(self.agents) * self.per_host

    def ref(self, rank: int) -> ProcRef:
        """The proc of a rank. Cost: O(procs that were replaced by hand)."""
        if self.only is not None:
            return self.only
        agent = self.agents[rank // self.per_host].address
        random = next((random for renamed, random in self.renamed if renamed == rank), self.random)
        return ProcRef(f"{self.label}-{rank}<{random}>", f"{folder_of(agent)}/{random}.{rank}", agent)


class Refs(Sequence[ProcRef]):
    """Procs of a mesh, each made when it is asked for: a proc that has a reference to the mesh of all procs seldom needs them."""

    __slots__ = ("_all", "_made", "_names", "_ranks")

    def __init__(self, names: ProcNames, ranks: Sequence[int], made: dict[int, ProcRef]) -> None:
        """Args:
        ranks: in the whole mesh.
        made: those that were asked for, shared by the slices of a mesh.
        """
        self._names = names
        self._ranks = ranks
        self._made = made
        self._all: tuple[ProcRef, ...] | None = None

    def all(self) -> tuple[ProcRef, ...]:
        """All of them, the same object each time."""
        if self._all is None:
            self._all = tuple(map(self.__getitem__, range(len(self))))
        return self._all

    def __iter__(self) -> Iterator[ProcRef]:
        return iter(self.all())

    def cut(self, positions: Sequence[int]) -> Refs:
        """Some of them, by their positions here."""
        every = range(len(self))
        if positions == every:
            return self
        ranks = positions if self._ranks == every else tuple(self._ranks[position] for position in positions)
        return Refs(self._names, ranks, self._made)

    @overload
    def __getitem__(self, index: int) -> ProcRef: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ProcRef]: ...
    def __getitem__(self, index: int | slice) -> ProcRef | Sequence[ProcRef]:
        if isinstance(index, slice):
            return self.cut(range(len(self))[index])
        rank = self._ranks[index]
        ref = self._made.get(rank)
        if ref is None:
            ref = self._made.setdefault(rank, self._names.ref(rank))
        return ref

    def __len__(self) -> int:
        return len(self._ranks)


@functools.lru_cache(maxsize=64)
def shared_names(names: ProcNames) -> tuple[ProcNames, Refs]:
    """Names and procs of a mesh, once for all references to it in this process."""
    return names, Refs(names, range(names.num_procs), {})


class ProcMeshCore:
    """What all views of one proc mesh share."""

    def __init__(self, names: ProcNames, *, name: str, extent: Extent, hosts: HostMesh | None, owner_actor: str, owned: bool) -> None:
        self.names, self.refs = shared_names(names)
        self.uid = names.uid
        self.name = name
        self.extent = extent
        self.hosts = hosts
        """The hosts that the procs were spawned on; None for a process that nobody spawned (a client)."""
        self.owner_actor = owner_actor
        self.owned = owned
        self.ready: Future[bool] | None = None
        """Whether the bootstrap has ended everywhere; None when this process did not spawn the mesh."""
        self.stop_begun = False
        """From here on an exit is no failure, even when the agent sees it before it has read that it was asked for."""
        self.stopping: Future[None] | None = None
        self.launch: Launch | None = None
        """How its procs are started; None when this process did not spawn the mesh."""
        self.successor: ProcMesh | None = None
        """What `respawn` has made of it, which stops its procs from then on."""
        self.launch_failure: ProcExited | None = None
        self.set_up_anew: Callable[[int], None] | None = None
        """Runs the bootstrap on the proc of a rank that was started anew; None where that is not this process's business."""
        self._were_up: set[str] = set()
        self.spawned: ProcMeshCore | None = None
        """Of a reference made in the process that spawned the mesh: the original, which knows of its start and stop."""
        self.lock = threading.Lock()

    def on_exited(self, exited: ProcExited) -> None:
        """A proc of the mesh has ended. Thread: net loop."""
        if exited.how in ("launch", "timeout") and self.launch_failure is None:
            self.launch_failure = exited
            _logger.error("proc did not start: mesh=%s rank=%d reason=%s", self.name, self.rank_of(exited.proc), exited.reason)

    def on_up(self, ref: ProcRef) -> None:
        """A proc of the mesh listens. Thread: net loop."""
        if ref.uid in self._were_up and self.set_up_anew is not None:
            self.set_up_anew(self.rank_of(ref))
        self._were_up.add(ref.uid)

    def succeed(self, other: ProcMeshCore) -> None:
        """Know of the procs of `other`, with which this mesh goes on."""
        self._were_up |= other._were_up

    def was_up(self, ref: ProcRef) -> bool:
        """Whether this proc has ever listened."""
        return ref.uid in self._were_up

    def rank_of(self, ref: ProcRef) -> int:
        """Rank of a proc in the whole mesh."""
        rest = ref.uid.rpartition("-")[2]
        rank = 0 if self.names.only is not None else int(rest.partition("<")[0])
        if self.refs[rank].uid != ref.uid:
            raise ValueError(f"{ref.uid} is no proc of {self.uid}")
        return rank

    def blame(self, exited: ProcExited) -> Fault:
        """The fault of one proc."""
        rank = self.rank_of(exited.proc)
        report = f"the process failed: {exited.reason}{last_words(exited)}"
        return Fault("lost", f"<proc {self.name}{Point(rank, self.extent)}>", self.uid, rank, report, exited.proc.uid)

    def launch_error(self) -> Exception | None:
        """The error of a mesh whose procs did not all start."""
        failure = self.launch_failure
        if failure is None:
            return None
        place = f"rank {self.rank_of(failure.proc)} of {self.extent}, mesh {self.name!r}"
        if failure.how == "timeout":
            return ValueError(
                explain(
                    f"error spawning proc mesh: statuses: Timeout({config.value('mesh_proc_spawn_max_idle')})=0..{len(self.refs)}: "
                    f"a proc {failure.reason}{last_words(failure)}",
                    where=place,
                    next="look at its output above, or raise mesh_proc_spawn_max_idle with monarch.config.configure()",
                )
            )
        host_rank = self.rank_of(failure.proc) // self.names.per_host
        return ValueError(
            explain(
                f"error creating proc (host rank {host_rank}) {self.name}: {failure.reason}{last_words(failure)}",
                where=place,
                next="check the bootstrap command",
            )
        )


def launch_or(error: BaseException | None, core: ProcMeshCore) -> BaseException | None:
    """What `initialized` raises instead of a bare "process is gone"."""
    if not isinstance(error, SupervisionError):
        return error
    if core.stopping is not None:
        return RuntimeError(explain(STOPPED, where=f"mesh {core.name!r}", next="spawn a new one"))
    return core.launch_error() or error
