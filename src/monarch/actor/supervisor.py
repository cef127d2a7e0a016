"""The supervisor of a process: keeps the ledger of what its actors own, and does what the ledger decides.

Rules of this file:
    1. The ledger decides; nothing here does. Each event is one call of the ledger, and its effects are carried out in order.
    2. First what a restart needs is sent, then whoever waits for a lost rank hears of it, then its owner. So who calls
       again at once reaches no rank that is about to be restarted too (if it calls from the owner's process), and an owner
       that awaits one of those answers does not have to supervise after its own wait.

Read next: `_runtime/supervision.py` for the decisions, `process.py` for the hooks that lead here.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from monarch import config
from monarch._base.ids import ProcRef, agent_at, by_agent
from monarch._runtime import supervision
from monarch._runtime.faults import buried
from monarch._runtime.mailbox import Answer
from monarch._runtime.policies import Escalate, Restarting
from monarch._runtime.supervision import Failure, Ledger, Place
from monarch._wire import messages
from monarch._wire.messages import CreateActor, Fault, ProcExited

if TYPE_CHECKING:
    from monarch.actor.actor_mesh import ActorMeshCore
    from monarch.actor.proc_mesh_core import ProcMeshCore
    from monarch.actor.process import Process

_logger = logging.getLogger("monarch.supervision")
_STOPPED_REMEMBERED = 4096
_CREATE_AGAIN_S = 0.2


class Supervisor:
    """What the actors of this process own. Thread: any."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._ledger = Ledger()
        self._actor_meshes: dict[str, ActorMeshCore] = {}
        self._proc_meshes: dict[str, ProcMeshCore] = {}
        self._refs: dict[str, ProcRef] = {}
        self._stopped: deque[str] = deque(maxlen=_STOPPED_REMEMBERED)
        """Meshes that were stopped: what of them fails while it stops is nobody's failure."""
        self._creating: dict[Place, int] = {}
        """Ports where restarted actors say that they are ready."""
        self._lock = threading.RLock()
        self._one_event: list[supervision.Notify] | None = None
        """Notices that wait for others of the same event."""
        self._gatherer = 0
        """Ident of the thread that handles that event; another thread's notices do not belong to it."""

    # --- what there is -------------------------------------------------------------------------------------------

    def own_procs(self, core: ProcMeshCore) -> None:
        """Tell `core` when one of its procs ends or comes back."""
        with self._lock:
            for ref in core.refs:
                self._proc_meshes[ref.uid] = core

    def disown_procs(self, core: ProcMeshCore) -> None:
        """`core` has ended, and what was spawned on it with it."""
        with self._lock:
            on_them = dict.fromkeys(place.mesh for ref in core.refs for place in self._ledger.places_on(ref.uid))
            ended = [mesh for mesh in on_them if set(core.refs).issuperset(self._actor_meshes[mesh].refs)]
            for ref in core.refs:
                if self._proc_meshes.get(ref.uid) is core:
                    del self._proc_meshes[ref.uid]
        for mesh in ended:
            self.disown_actors(self._actor_meshes[mesh])

    def own_actors(self, core: ActorMeshCore) -> None:
        """Supervise a mesh that an actor of this process has spawned."""
        group = core.group
        with self._lock:
            self._actor_meshes[core.uid] = core
            policy = Escalate() if group is None else group.policy
            uid = core.uid if group is None else group._uid
            self._ledger.spawned(core.uid, core.owner_actor, [ref.uid for ref in core.refs], uid, policy)
            self._refs.update((ref.uid, ref) for ref in core.refs)
        if group is not None and isinstance(policy, Restarting):
            for address, uids in self._by_agent([ref.uid for ref in core.refs]).items():
                self._process.proc.tell(agent_at(address), messages.SuperviseProcs(uids, group._uid))
        gone = self._process.proc.fates.gone
        for exited in [gone[ref.uid] for ref in core.refs if ref.uid in gone]:
            self.on_proc_lost(exited)()

    def disown_actors(self, core: ActorMeshCore) -> None:
        """`core` was stopped, or its procs were."""
        core.stopped = True
        with self._lock:
            if self._actor_meshes.pop(core.uid, None) is None:
                return
            self._stopped.append(core.uid)
            effects = self._ledger.forgotten(core.uid)
            for place in [place for place in self._creating if place.mesh == core.uid]:
                self._process.proc.ports.close(self._creating.pop(place))
        self._carry_out(effects)
        with self._lock:
            for ref in core.refs:
                if not self._ledger.places_on(ref.uid):
                    self._refs.pop(ref.uid, None)

    def procs_of(self, agent: ProcRef) -> list[ProcRef]:
        """The procs of that host that matter here."""
        with self._lock:
            meshes = dict.fromkeys(self._proc_meshes.values())
            owned = [ref for core in meshes for ref in core.refs.all() if ref.host == agent.address]
            others = [ref for ref in self._refs.values() if ref.host == agent.address]
            return list(dict.fromkeys((*owned, *others)))

    # --- events --------------------------------------------------------------------------------------------------

    def on_actor_fault(self, owner_actor: str, fault: Fault) -> None:
        """An actor failed that an actor of this process owns."""
        with self._lock:
            known = self._ledger.owns(fault.mesh)
            if not known and fault.mesh in self._stopped:
                return
            effects = self._ledger.failed(self._now_s(), [fault]) if known else [supervision.Notify(owner_actor, Failure((fault,)))]
        self._carry_out(effects)

    def on_proc_lost(self, exited: ProcExited) -> Callable[[], None]:
        """A proc has ended: its mesh knows, restarts begin; what is returned tells the owners of its actors."""
        uid = exited.proc.uid
        with self._lock:
            mesh = self._proc_meshes.get(uid)
            places = self._ledger.places_on(uid)
            cores = [self._actor_meshes[place.mesh] for place in places]
        if mesh is not None:
            mesh.on_exited(exited)
        if exited.how == "stopped" or self._process.proc.stopping or (mesh is not None and mesh.stop_begun):
            return _nothing
        faults = [core.blame(place.rank, exited) for core, place in zip(cores, places, strict=True)]
        if faults:
            with self._lock:
                effects = self._ledger.failed(self._now_s(), faults, proc_lost=True, final=not exited.again)
        elif mesh is not None and not exited.again and exited.how not in ("launch", "timeout"):  # `initialized` tells of those
            effects = [supervision.Notify(mesh.owner_actor, Failure((mesh.blame(exited),)))]
        else:
            return _nothing
        return self._prepare(effects)

    def on_proc_abandoned(self, exited: ProcExited) -> Callable[[], None]:
        """A proc that was lost will not be started anew; what is returned tells the owners."""
        if exited.how == "stopped" or self._process.proc.stopping:
            return _nothing
        with self._lock:
            places = self._ledger.places_on(exited.proc.uid)
            faults = [self._actor_meshes[place.mesh].blame(place.rank, exited) for place in places]
            effects = self._ledger.failed(self._now_s(), faults, proc_lost=True, final=True)
        return self._prepare(effects)

    def on_proc_up(self, ref: ProcRef) -> None:
        """A proc listens: one that was started anew is set up like the one before it."""
        with self._lock:
            mesh = self._proc_meshes.get(ref.uid)
        if mesh is not None:
            mesh.on_up(ref)

    @contextlib.contextmanager
    def one_event(self) -> Iterator[None]:
        """All that is lost in the `with` block is one failure: each owner is told once, at its end. Thread: net loop."""
        notices = self._one_event = []
        self._gatherer = threading.get_ident()
        try:
            yield
        finally:
            self._one_event = None
            self._carry_out(supervision.merged(notices))

    # --- effects -------------------------------------------------------------------------------------------------

    def _prepare(self, effects: Sequence[supervision.Effect]) -> Callable[[], None]:
        """Carry out all but the notices to owners, which are returned."""
        self._carry_out([effect for effect in effects if not isinstance(effect, supervision.Notify)])
        return partial(self._carry_out, [effect for effect in effects if isinstance(effect, supervision.Notify)])

    def _carry_out(self, effects: Sequence[supervision.Effect]) -> None:
        for effect in effects:
            match effect:
                case supervision.Notify():
                    if self._one_event is not None and threading.get_ident() == self._gatherer:
                        self._one_event.append(effect)
                    else:
                        self._process.notify(effect.owner_actor, effect.failure)
                case supervision.Bury():
                    self._bury(effect.place, effect.fault)
                case supervision.Later():
                    self._later(effect.delay_s, partial(self._ledger.due, effect.group, effect.epoch))
                case supervision.StopActor():
                    self._stop(effect.place, effect.reason)
                case supervision.KillProcs():
                    self._kill(effect.procs, effect.reason)
                case supervision.StartProcs():
                    self._ask_agents(effect.procs, messages.StartProcs)
                case supervision.Create():
                    self._create(effect.place, effect.attempt)
                case supervision.Abandon():
                    self._ask_agents(effect.procs, lambda uids, group=effect.group: messages.AbandonProcs(uids, group))  # type: ignore[misc]
                case supervision.GiveUp():
                    self._give_up([self._actor_meshes[mesh] for mesh in effect.meshes])
                case supervision.Note():
                    _logger.log(logging.WARNING if effect.serious else logging.INFO, effect.text)

    def _give_up(self, cores: Sequence[ActorMeshCore]) -> None:
        for core in cores:
            core.gave_up = True
            if core.group is not None:
                core.group._gave_up = True

    def _bury(self, place: Place, fault: Fault) -> None:
        core = self._actor_meshes.get(place.mesh)
        if core is None:
            return
        if not fault.actor:
            fault = msgspec.structs.replace(fault, actor=core.display(place.rank))
        fault = buried(fault) if core.gave_up else msgspec.structs.replace(fault, again=False)
        if core.refs[place.rank].uid not in self._process.proc.fates.gone:
            self._process.proc.tell(core.refs[place.rank], messages.Obituary(fault))

    def _stop(self, place: Place, reason: str) -> None:
        core = self._actor_meshes.get(place.mesh)
        if core is None:
            return
        stopping = self._process.proc.request(core.refs[place.rank], messages.StopActor(core.uid, reason, again=True))
        stopping._when_done(lambda: self._later(0.0, partial(self._ledger.cleared, place)) if stopping._error is None else None)
        budget_s = config.seconds("stop_actor_timeout") + config.seconds("cleanup_timeout")
        is_ours = not core.refs[place.rank].host  # nobody can kill the process that this very code runs in
        self._later(budget_s, partial(self._ledger.cleared if is_ours else self._ledger.stuck, place))

    def _create(self, place: Place, attempt: int) -> None:
        core = self._actor_meshes.get(place.mesh)
        if core is None or core.creation is None:
            return
        proc = self._process.proc
        proc.ports.close(self._creating.pop(place, 0))
        ref = core.refs[place.rank]
        payload, buffers = core.creation
        create = CreateActor(
            core.uid,
            core.name,
            proc.ref,
            core.owner_actor,
            place.rank,
            tuple(core.extent.labels),
            tuple(core.extent.sizes),
            supervised=True,
            attempt=attempt,
        )
        answer = Answer(proc.ports, ref.uid)
        self._creating[place] = answer.port

        def on_answer() -> None:
            if answer.future._error is None:
                self._later(0.0, lambda: self._ledger.ready(place, attempt, self._now_s()))
            else:  # lost on the way: when the proc has died once more that is news of its own, and comes first
                self._later(_CREATE_AGAIN_S, lambda: self._ledger.unanswered(place, attempt))

        answer.future._when_done(on_answer)
        proc.tell(ref, create, payload, buffers, answer.port)

    def _kill(self, uids: Sequence[str], reason: str) -> None:
        self._ask_agents(uids, messages.KillProcs)
        # What this process sends from now on is for those that come after them.
        self._process.proc.fates.forsake([ref for uid in uids if (ref := self._refs.get(uid)) is not None], reason)

    def _ask_agents(self, uids: Sequence[str], request: Callable[[list[str]], messages.Control]) -> None:
        for address, group in self._by_agent(uids).items():
            self._process.proc.tell(agent_at(address), request(group))

    def _by_agent(self, uids: Sequence[str]) -> dict[str, list[str]]:
        refs = [ref for uid in uids if (ref := self._refs.get(uid)) is not None and ref.host]
        return {address: [ref.uid for ref in group] for address, group in by_agent(refs).items()}

    def _later(self, delay_s: float, event: Callable[[], list[supervision.Effect]]) -> None:
        def happen() -> None:
            with self._lock:
                effects = event()
            self._carry_out(effects)

        loop = self._process.proc.loop
        if delay_s > 0:
            loop.call_later(delay_s, happen)
        else:
            loop.call_soon(happen)

    def _now_s(self) -> float:
        return self._process.proc.loop.now_s()


def _nothing() -> None:
    return
