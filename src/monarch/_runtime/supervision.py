"""Supervision: who hears of a failure, and what a policy does about it.

Pure: events go in, effects come out. `actor/supervisor.py` feeds and obeys it.

Each process has one `Ledger` of what its actors have spawned. An actor mesh belongs to a group, a group to one owner
and one policy. One event (an actor failed, a proc was lost) is at most one restart of each group that it concerns, and
at most one notice to each owner.

A member of a group (one rank of one mesh):

    UP --failed--> DOWN --created anew--> STARTING --its __init__ returned--> UP
    UP --restarted with others--> STOPPING --stopped, or its proc killed--> DOWN
    any --the policy gives up, or has nothing to give--> DEAD

Rules of this file:
    1. A member that is DEAD or STOPPING can't fail again: one death is one report.
    2. A restart begins when the back-off is over and nothing is STOPPING; meshes start in the order of their spawn,
       each when the one before is UP.
    3. Whoever is not restarted is buried: those who still send to it get the reason, at once and for ever.

Read next: `faults.py` for what people read, `docs/design/supervision.md` for the messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple, TypeAlias

from monarch._runtime.policies import Escalate, Ignore, Policy, Restarting
from monarch._wire.messages import Fault


class Place(NamedTuple):
    """One rank of one mesh."""

    mesh: str
    """Uid of the mesh."""
    rank: int


@dataclass(frozen=True)
class Failure:
    """What one owner hears of one event."""

    faults: tuple[Fault, ...]
    """At least one, in the order of spawn and rank."""
    story: str = ""
    """What a policy has tried before; "" when there was none."""


class State(Enum):
    """Of one member."""

    UP = auto()
    """It serves."""
    STOPPING = auto()
    """It is stopped or its proc killed, in order to be restarted with others."""
    DOWN = auto()
    """It has ended and waits for its restart."""
    STARTING = auto()
    """It was created anew, and its `__init__` has not returned."""
    DEAD = auto()
    """For good."""


class _Member:
    __slots__ = ("attempt", "fault", "fresh", "place", "proc", "state")

    def __init__(self, place: Place, proc: str) -> None:
        self.place = place
        self.proc = proc
        self.state = State.UP
        self.attempt = 0
        """How many times it was restarted."""
        self.fresh = False
        """Its proc is gone: it needs another."""
        self.fault: Fault | None = None
        """Why it is not UP."""


class _Group:
    def __init__(self, uid: str, owner_actor: str, policy: Policy) -> None:
        self.uid = uid
        self.owner_actor = owner_actor
        self.policy = policy
        self.meshes: list[str] = []
        self.members: dict[Place, _Member] = {}
        self.history: list[tuple[float, str]] = []
        """When what failed, as long as the policy counts it."""
        self.targets: set[Place] = set()
        """What the restart under way restarts."""
        self.epoch = 0
        self.due = False
        """The back-off is over."""
        self.began_s = 0.0

    def in_order(self, places: Iterable[Place]) -> list[_Member]:
        wanted = set(places)
        return [member for place, member in self.members.items() if place in wanted]


# --- effects -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Notify:
    """Tell an owner."""

    owner_actor: str
    failure: Failure


@dataclass(frozen=True)
class Bury:
    """This rank will not come back: tell its proc, if it has one, so that senders hear of it."""

    place: Place
    fault: Fault


@dataclass(frozen=True)
class Later:
    """Call `due(group, epoch)` after `delay_s`."""

    group: str
    epoch: int
    delay_s: float


@dataclass(frozen=True)
class StopActor:
    """End an actor that will be created anew; then call `cleared`, or `stuck` when it takes too long."""

    place: Place
    reason: str


@dataclass(frozen=True)
class KillProcs:
    """End these procs; their loss comes as an event."""

    procs: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class StartProcs:
    """Start these lost procs anew, under their old ids."""

    procs: tuple[str, ...]


@dataclass(frozen=True)
class Create:
    """Create an actor anew; then call `ready`, or `failed`."""

    place: Place
    attempt: int


@dataclass(frozen=True)
class Abandon:
    """This group starts none of these procs any more."""

    group: str
    procs: tuple[str, ...]


@dataclass(frozen=True)
class GiveUp:
    """The policy of these meshes restarts nothing any more."""

    meshes: tuple[str, ...]


@dataclass(frozen=True)
class Note:
    """For the log of the owner's process."""

    text: str
    serious: bool = True


Effect: TypeAlias = Notify | Bury | Later | StopActor | KillProcs | StartProcs | Create | Abandon | GiveUp | Note


@dataclass
class _Outcome:
    """What one event comes to; one notice to each owner."""

    effects: list[Effect] = field(default_factory=list)
    told: dict[str, tuple[list[Fault], list[str]]] = field(default_factory=dict)

    def tell(self, owner_actor: str, faults: Iterable[Fault], story: str) -> None:
        all_faults, stories = self.told.setdefault(owner_actor, ([], []))
        all_faults.extend(faults)
        if story:
            stories.append(story)

    def notices(self) -> list[Notify]:
        return [Notify(owner, Failure(tuple(faults), "\n".join(stories))) for owner, (faults, stories) in self.told.items()]

    def done(self) -> list[Effect]:
        return [*self.effects, *self.notices()]


def merged(notices: Iterable[Notify]) -> list[Notify]:
    """Notices that come of one event after all, one to each owner: the faults of one mesh stand together, in the order of spawn."""
    outcome = _Outcome()
    for notice in notices:
        outcome.tell(notice.owner_actor, notice.failure.faults, notice.failure.story)
    for faults, _ in outcome.told.values():
        order = {mesh: place for place, mesh in enumerate(dict.fromkeys(fault.mesh for fault in faults))}
        faults.sort(key=lambda fault: order[fault.mesh])
    return outcome.notices()


class Ledger:
    """What the actors of one process own. Not thread-safe.

    Cost: O(members of the concerned groups) per event; nothing per message.
    """

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._group_of: dict[str, _Group] = {}
        self._on_proc: dict[str, list[Place]] = {}

    # --- what there is -------------------------------------------------------------------------------------------

    def spawned(self, mesh: str, owner_actor: str, procs: Sequence[str], group: str, policy: Policy) -> None:
        """A mesh was spawned; `procs[r]` is the proc of its rank r.

        Args:
            group: uid of its group; a mesh without a policy of its own is a group by itself.
        """
        entry = self._groups.get(group)
        if entry is None:
            entry = self._groups[group] = _Group(group, owner_actor, policy)
        entry.meshes.append(mesh)
        self._group_of[mesh] = entry
        for rank, proc in enumerate(procs):
            place = Place(mesh, rank)
            entry.members[place] = _Member(place, proc)
            self._on_proc.setdefault(proc, []).append(place)

    def forgotten(self, mesh: str) -> list[Effect]:
        """The owner has stopped a mesh: nothing of it fails any more."""
        group = self._group_of.pop(mesh, None)
        if group is None:
            return []
        gone = [member for place, member in group.members.items() if place.mesh == mesh]
        for member in gone:
            del group.members[member.place]
            group.targets.discard(member.place)
            places = self._on_proc.get(member.proc)
            if places is not None:
                places.remove(member.place)
                if not places:
                    del self._on_proc[member.proc]
        group.meshes.remove(mesh)
        if not group.meshes:
            del self._groups[group.uid]
        if not isinstance(group.policy, Restarting):
            return []
        left = {member.proc for member in group.members.values()}
        procs = tuple(member.proc for member in gone if member.proc not in left)
        outcome = _Outcome([Abandon(group.uid, procs)] if procs else [])
        self._advance(group, outcome)
        return outcome.done()

    def owns(self, mesh: str) -> bool:
        """Whether failures of this mesh are this ledger's."""
        return mesh in self._group_of

    def places_on(self, proc: str) -> list[Place]:
        """The ranks on a proc, in the order of spawn."""
        return list(self._on_proc.get(proc, ()))

    def state_of(self, place: Place) -> State:
        """How a rank is."""
        return self._group_of[place.mesh].members[place].state

    # --- events --------------------------------------------------------------------------------------------------

    def failed(self, now_s: float, faults: Sequence[Fault], *, proc_lost: bool = False, final: bool = False) -> list[Effect]:
        """Ranks have failed, all by one event.

        Args:
            faults: one per rank; of ranks that are known.
            proc_lost: the proc of these ranks is gone.
            final: nobody can bring these ranks back; what was about to be restarted is told of, too.
        """
        outcome = _Outcome()
        concerned: dict[str, list[Fault]] = {}
        for fault in faults:
            group = self._group_of.get(fault.mesh)
            if group is not None and Place(fault.mesh, fault.rank) in group.members:
                concerned.setdefault(group.uid, []).append(fault)
        for uid, own in concerned.items():
            if final:
                self._fail_for_good(now_s, self._groups[uid], own, outcome)
            else:
                self._fail(now_s, self._groups[uid], own, proc_lost, outcome)
        return outcome.done()

    def due(self, group_uid: str, epoch: int) -> list[Effect]:
        """A back-off is over."""
        group = self._groups.get(group_uid)
        outcome = _Outcome()
        if group is not None and group.epoch == epoch:
            group.due = True
            self._advance(group, outcome)
        return outcome.done()

    def cleared(self, place: Place) -> list[Effect]:
        """An actor that was to be stopped has ended."""
        return self._change(place, State.STOPPING, State.DOWN)

    def stuck(self, place: Place) -> list[Effect]:
        """An actor that was to be stopped does not end: its proc has to go."""
        member = self._member(place)
        if member is None or member.state is not State.STOPPING:
            return []
        return [KillProcs((member.proc,), "it is replaced, because it did not end an actor in time that is to be restarted")]

    def ready(self, place: Place, attempt: int, now_s: float) -> list[Effect]:
        """The `__init__` of a restarted actor has returned."""
        member = self._member(place)
        if member is None or member.attempt != attempt:
            return []
        return self._change(place, State.STARTING, State.UP, now_s)

    def unanswered(self, place: Place, attempt: int) -> list[Effect]:
        """A creation was lost together with the connection that it took."""
        member = self._member(place)
        if member is None or member.state is not State.STARTING or member.attempt != attempt:
            return []
        return [Create(place, attempt)]

    # --- inside --------------------------------------------------------------------------------------------------

    def _member(self, place: Place) -> _Member | None:
        group = self._group_of.get(place.mesh)
        return None if group is None else group.members.get(place)

    def _change(self, place: Place, before: State, after: State, now_s: float = 0.0) -> list[Effect]:
        member = self._member(place)
        if member is None or member.state is not before:
            return []
        member.state = after
        if after is State.UP:
            member.fault = None
        outcome = _Outcome()
        self._advance(self._group_of[place.mesh], outcome, now_s)
        return outcome.done()

    def _fail(self, now_s: float, group: _Group, faults: Sequence[Fault], proc_lost: bool, outcome: _Outcome) -> None:
        fresh_faults = []
        for fault in faults:
            member = group.members[Place(fault.mesh, fault.rank)]
            member.fresh = member.fresh or proc_lost
            if member.state is State.DEAD and proc_lost and member.fault is not None:
                outcome.effects.append(Bury(member.place, member.fault))  # its next proc knows nothing of it
            if member.state in (State.UP, State.STARTING):
                fresh_faults.append(fault)
            if member.state is not State.DEAD:
                member.state, member.fault = State.DOWN, fault
        if not fresh_faults:
            self._advance(group, outcome, now_s)
            return
        policy = group.policy
        if isinstance(policy, Restarting):
            self._restart_or_give_up(now_s, group, policy, fresh_faults, outcome)
            return
        self._bury(group, [Place(fault.mesh, fault.rank) for fault in fresh_faults], outcome)
        if isinstance(policy, Ignore):
            for fault in fresh_faults:
                outcome.effects.append(Note(f"a failure is ignored: {_line(fault)}", serious=False))
        else:
            outcome.tell(group.owner_actor, fresh_faults, "")

    def _fail_for_good(self, now_s: float, group: _Group, faults: Sequence[Fault], outcome: _Outcome) -> None:
        left = [fault for fault in faults if group.members[Place(fault.mesh, fault.rank)].state is not State.DEAD]
        if not isinstance(group.policy, Restarting):
            self._fail(now_s, group, left, True, outcome)
            return
        for fault in left:
            member = group.members[Place(fault.mesh, fault.rank)]
            member.state, member.fault = State.DOWN, fault
        if left:
            self._give_up(now_s, group, f"{group.policy!r} could not restart it: no process can be started in its place", left, outcome)

    def _restart_or_give_up(self, now_s: float, group: _Group, policy: Restarting, faults: Sequence[Fault], outcome: _Outcome) -> None:
        group.history = [(at_s, text) for at_s, text in group.history if at_s > now_s - policy.within_s]
        group.history.append((now_s, "; ".join(_line(fault) for fault in faults)))
        failed = {Place(fault.mesh, fault.rank) for fault in faults}
        if len(group.history) > policy.max_restarts:
            self._give_up(now_s, group, _story(now_s, group, policy), faults, outcome)
            return
        if not group.targets:
            group.began_s = now_s
        also = policy.also_restarted(list(group.members), failed)
        concerned = failed | {place for place in also if group.members[place].state is not State.DEAD}
        group.targets |= concerned
        delay_s = policy.delay_s(len(group.history))
        group.epoch += 1
        group.due = False
        outcome.effects.append(Note(f"restart {len(group.history)} of {policy.max_restarts} in {delay_s:g} s: {_line(faults[0])}"))
        self._clear(group, policy, concerned, _line(faults[0]), outcome)
        outcome.effects.append(Later(group.uid, group.epoch, delay_s))

    def _clear(self, group: _Group, policy: Restarting, concerned: set[Place], cause: str, outcome: _Outcome) -> None:
        """Stop what is still running of what will be restarted."""
        doomed: dict[str, None] = {}
        for member in group.in_order(concerned):
            running = member.state in (State.UP, State.STARTING)
            if policy.replace == "proc" and not member.fresh:
                member.state = State.STOPPING
                doomed[member.proc] = None
            elif running:
                member.state = State.STOPPING
                outcome.effects.append(StopActor(member.place, "it is restarted together with a rank that failed"))
        if doomed:
            outcome.effects.append(KillProcs(tuple(doomed), f"it is replaced, because of {cause}"))

    def _give_up(self, now_s: float, group: _Group, story: str, faults: Sequence[Fault], outcome: _Outcome) -> None:
        group.policy = Escalate()
        places = {place for place, member in group.members.items() if member.state not in (State.UP, State.STARTING, State.DEAD)}
        group.targets.clear()
        group.epoch += 1
        outcome.effects.append(GiveUp(tuple(group.meshes)))
        self._bury(group, [place for place in group.members if place in places], outcome)
        told = {Place(fault.mesh, fault.rank) for fault in faults}
        also = [fault for place, member in group.members.items() if place in places - told and (fault := member.fault) is not None]
        outcome.effects.append(Abandon(group.uid, tuple({member.proc: None for member in group.members.values()})))
        outcome.tell(group.owner_actor, [*faults, *also], story)

    def _bury(self, group: _Group, places: Sequence[Place], outcome: _Outcome) -> None:
        for place in places:
            member = group.members[place]
            member.state = State.DEAD
            if member.fault is None:
                member.fault = Fault("stopped", "", place.mesh, place.rank, "it was stopped for a restart that was given up", "")
            outcome.effects.append(Bury(place, member.fault))

    def _advance(self, group: _Group, outcome: _Outcome, now_s: float = 0.0) -> None:
        """Take the next step of a restart under way."""
        members = group.in_order(group.targets)
        if not members or not group.due or any(member.state is State.STOPPING for member in members):
            return
        lost = {member.proc: None for member in members if member.fresh and member.state is State.DOWN}
        if lost:
            outcome.effects.append(StartProcs(tuple(lost)))
            for member in members:
                member.fresh = member.fresh and member.proc not in lost
        for mesh in group.meshes:
            own = [member for member in members if member.place.mesh == mesh]
            for member in own:
                if member.state is State.DOWN:
                    member.state = State.STARTING
                    member.attempt += 1
                    outcome.effects.append(Create(member.place, member.attempt))
            if any(member.state is State.STARTING for member in own):
                return
        group.targets.clear()
        took = f" after {now_s - group.began_s:.3g} s" if now_s else ""  # a mesh was stopped: no clock at hand
        names = ", ".join(f"rank {member.place.rank} of mesh {member.place.mesh}" for member in members[:8])
        outcome.effects.append(Note(f"restarted{took}: {names}{' and more' if len(members) > 8 else ''}", serious=False))


def _line(fault: Fault) -> str:
    """A fault in one line."""
    lines = [line.strip() for line in fault.report.splitlines() if line.strip()]
    cause = lines[0] if fault.kind != "failed" or not lines else lines[-1]
    return f"rank {fault.rank} of mesh {fault.mesh}: {cause[:300]}"


def _story(now_s: float, group: _Group, policy: Restarting) -> str:
    times = len(group.history) - 1
    restarts, were = ("restart", "was") if times == 1 else ("restarts", "were")
    head = f"{policy!r} gave up: {times} {restarts} within {policy.within_s:g} s {were} not enough"
    return "\n".join([head, *(f"  {now_s - at_s:6.1f} s ago: {text}" for at_s, text in group.history)])
