"""Cast relays: what a host agent does for casts that pass through it.

    cast from above ──> hand it to own procs, payload once in shared memory ──> pass it on to children
    answers <───────── merged into few frames <──────────────────────────────── answers of procs and children

Rules of this file:
    1. An agent knows a cast by its sender, epoch and number. What comes again changes the way of the answers, never delivers twice.
    2. A proc that is on its way, or that nobody has asked for yet, gets what is for it when it is up.
    3. What is remembered of a cast goes when its sender says so, or has ended.

Read next: `cast_merge.py` for one cast's answers, `caster.py` for who sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from monarch import config
from monarch._base.ids import ProcRef, agent_at
from monarch._runtime.cast_merge import Batch, Relay
from monarch._runtime.cast_order import Admission, Handover, Place, place_of, within
from monarch._runtime.cast_tree import Child, read_tree
from monarch._wire import messages
from monarch._wire.cast_messages import Cast, CastAcked, CastBroken, CastHanded, CastReplies, CastsDone, CastVoid
from monarch._wire.frames import Buffer
from monarch._wire.messages import ProcExited

if TYPE_CHECKING:
    from monarch._runtime.cast_post import CastPost

Key: TypeAlias = tuple[str, int, int]
"""Sender, epoch, number."""
_FIRST_PORT = 1 << 40
"""Relays have ports of their own, beyond those of other questions of the agent."""
_UNASKED_S = 10.0
"""How long the request for a proc may take to come, once a cast to it has."""
_ORPHANED_S = 60.0
"""How long a cast whose parent is gone is kept for its sender to ask again; how long what is done with may still come once more."""


class _Known:
    """One cast that came through here. Thread: net loop."""

    __slots__ = ("buffers", "cast", "children", "parent", "payload", "port", "ranks", "relay", "timed")

    def __init__(self, cast: Cast, parent: ProcRef, payload: Buffer, buffers: Sequence[memoryview], relay: Relay, port: int) -> None:
        self.cast = cast
        self.parent = parent
        self.payload = payload
        self.buffers = buffers
        self.relay = relay
        self.port = port
        self.children: list[Child] = []
        self.ranks: dict[str, int] = {}
        """Rank of each own proc."""
        self.timed = False


class _Parked(NamedTuple):
    """A cast that waits for a proc of this host."""

    known: _Known
    ref: ProcRef
    rank: int
    handed: CastHanded
    life: int
    payload: Buffer
    buffers: Sequence[memoryview]


class CastRelays:
    """The casts that pass through one host agent. Thread: net loop."""

    def __init__(
        self,
        call_later: Callable[[float, Callable[[], None]], object],
        post: CastPost,
        record_of: Callable[[str], Any],
    ) -> None:
        """Args:
        record_of: the record of an own proc; None: unknown.
        """
        self._call_later = call_later
        self._post = post.send
        self._hand = post.hand
        self._record_of = record_of
        self._known: dict[Key, _Known] = {}
        self._by_port: dict[int, _Known] = {}
        self._floors: dict[tuple[str, int], int] = {}
        """By sender and epoch: the first number that it is not done with."""
        self._handovers: dict[str, Handover] = {}
        self._parked: dict[str, list[_Parked]] = {}
        self._ports = count(_FIRST_PORT)

    # --- from above --------------------------------------------------------------------------------------------------

    def on_cast(self, cast: Cast, parent: ProcRef, payload: Buffer, buffers: Sequence[memoryview]) -> None:
        """A cast has come."""
        self._raise_floor(cast.sender, cast.epoch, cast.done)
        number = cast.order.number
        if number < self._floors.get((cast.sender, cast.epoch), 0):
            return
        known = self._known.get((cast.sender, cast.epoch, number))
        if known is None:
            self._begin(cast, parent, payload, buffers)
        elif cast.turn > known.relay.turn:
            self._again(known, cast, parent, payload, buffers)
        elif known.parent != parent:
            self._post(parent, CastAcked(cast.sender, cast.epoch, number))

    def _begin(self, cast: Cast, parent: ProcRef, payload: Buffer, buffers: Sequence[memoryview]) -> None:
        part = read_tree(cast.tree)
        relay = Relay([rank for rank, _ in part.procs], {child.agent: child.num_ranks for child in part.children}, merged=cast.merged)
        known = _Known(cast, parent, payload, buffers, relay, next(self._ports) if cast.merged else cast.port)
        relay.turn = cast.turn
        known.children = part.children
        known.ranks = {ref.uid: rank for rank, ref in part.procs}
        self._known[cast.sender, cast.epoch, cast.order.number] = known
        if cast.merged:
            self._by_port[known.port] = known
        self._pass_on(known, part.children)
        self._serve(known, part.procs)
        if relay.on_handed():
            self._ack(known)
        self._arm(known)

    def _again(self, known: _Known, cast: Cast, parent: ProcRef, payload: Buffer, buffers: Sequence[memoryview]) -> None:
        if known.parent != parent:
            self._ack(known)
            known.parent = parent
        known.cast = cast
        if len(payload):
            known.payload, known.buffers = payload, buffers
        known.children = read_tree(cast.tree).children
        acked, batches = known.relay.repeat(cast.turn, {child.agent: child.num_ranks for child in known.children})
        self._send_up(known, batches)
        if acked:
            self._ack(known)
        self._pass_on(known, known.children)

    def _pass_on(self, known: _Known, children: Iterable[Child]) -> None:
        cast = known.cast
        for child in children:
            message = Cast(
                cast.sender,
                cast.epoch,
                cast.port,
                cast.merged,
                cast.header,
                child.tree,
                within(cast.order, child.low, child.high),
                cast.turn,
                cast.done,
                cast.control,
            )
            if not self._post(agent_at(child.agent), message, known.payload, known.buffers, port=cast.port):
                self._call_later(0.0, lambda agent=child.agent: self.on_agent_lost(agent))  # type: ignore[misc]

    def _serve(self, known: _Known, procs: Sequence[tuple[int, ProcRef]]) -> None:
        cast, order = known.cast, known.cast.order
        ready: list[tuple[ProcRef, CastHanded, int]] = []
        messages_of: dict[Place, CastHanded] = {}
        for rank, ref in procs:
            record = self._record_of(ref.uid)
            place = place_of(order, rank)
            handed = messages_of.get(place)
            if handed is None:
                handed = CastHanded(cast.epoch, order.number, place.after, place.fenced, cast.merged, cast.header, cast.control)
                messages_of[place] = handed
            if record is None:
                self._await(_Parked(known, ref, rank, handed, place.life, known.payload, known.buffers))
                continue
            if record.exited is not None and not record.exited.again:
                self._lost(known, record.exited, rank)
                continue
            handover = self._handovers.setdefault(ref.uid, Handover())
            admission = handover.admit(cast.sender, cast.epoch, order.number, place.life, is_owner=record.owner.uid == cast.sender)
            if admission is Admission.REFUSE:
                self._refuse(known, record, rank)
            elif admission is Admission.WAIT or record.exited is not None or not record.up:
                self._park(_Parked(known, ref, rank, handed, place.life, known.payload, known.buffers))
            else:
                ready.append((ref, handed, rank))
        if ready:
            self._hand(ready, known.payload, known.buffers, known.port)

    def _refuse(self, known: _Known, record: Any, rank: int) -> None:
        """The cast was meant for the process before: the one that runs shall not wait for it."""
        cast = known.cast
        self._lost(known, record.last_exit or record.exited, rank)
        if record.up and record.exited is None:
            self._post(record.ref, CastVoid(cast.sender, cast.epoch, cast.order.number))

    def _park(self, parked: _Parked) -> None:
        self._parked.setdefault(parked.ref.uid, []).append(parked)

    def _go_on(self, parked: _Parked) -> None:
        known, ref, rank, handed, life, payload, buffers = parked
        record, cast = self._record_of(ref.uid), known.cast
        handover = self._handovers.setdefault(ref.uid, Handover())
        admission = handover.admit(cast.sender, cast.epoch, handed.number, life, is_owner=record.owner.uid == cast.sender)
        if admission is Admission.REFUSE:
            self._refuse(known, record, rank)
        else:
            self._hand([(ref, handed, rank)], payload, buffers, known.port)

    def _await(self, parked: _Parked) -> None:
        """Nobody has asked for this proc yet: the request goes straight, so a cast may overtake it."""
        self._park(parked)
        self._call_later(_UNASKED_S, lambda: self._give_up(parked.ref))

    def _give_up(self, ref: ProcRef) -> None:
        if self._record_of(ref.uid) is None:
            exited = ProcExited(ref, "this host knows no such process; it may have ended long ago", "unknown")
            for parked in self._parked.pop(ref.uid, ()):
                self._lost(parked.known, exited, parked.rank)

    # --- from below ----------------------------------------------------------------------------------------------------

    def on_reply(self, port: int, rank: int, flags: int, payload: Buffer, buffers: Sequence[memoryview]) -> bool:
        """An own proc has answered; False: the port is none of ours."""
        if port < _FIRST_PORT:
            return False
        known = self._by_port.get(port)
        if known is not None:
            self._send_up(known, known.relay.on_reply(rank, flags, payload, buffers))
            if not known.timed:
                self._arm(known)
        return True

    def on_control(self, message: messages.Control, sender: ProcRef, payload: Buffer, buffers: Sequence[memoryview]) -> bool:
        """Serve a message about a cast; False: it is none."""
        match message:
            case Cast():
                self.on_cast(message, sender, payload, buffers)
            case CastReplies():
                self._on_replies(message, sender, payload, buffers)
            case CastAcked():
                known = self._known.get((message.sender, message.epoch, message.number))
                if known is not None and known.relay.on_acknowledged(sender.address):
                    self._ack(known)
            case CastBroken():
                known = self._known.get((message.sender, message.epoch, message.number))
                if known is not None:
                    self._post(known.parent, message)
            case CastsDone():
                self._on_done(message)
            case _:
                return False
        return True

    def _on_replies(self, message: CastReplies, child: ProcRef, payload: Buffer, buffers: Sequence[memoryview]) -> None:
        known = self._known.get((message.sender, message.epoch, message.number))
        if known is not None:
            self._send_up(known, known.relay.on_batch(child.address, Batch.decode(message, payload, buffers)))
            self._arm(known)

    def _lost(self, known: _Known, exited: ProcExited, rank: int) -> None:
        self._send_up(known, known.relay.on_proc_lost(exited, rank))

    def _send_up(self, known: _Known, batches: Iterable[Batch]) -> None:
        cast = known.cast
        for batch in batches:
            self._post(known.parent, *batch.encode(cast.sender, cast.epoch, cast.order.number))

    def _ack(self, known: _Known) -> None:
        cast = known.cast
        known.payload, known.buffers = b"", ()  # whoever asks again does so for answers, or brings them along
        self._post(known.parent, CastAcked(cast.sender, cast.epoch, cast.order.number))

    def _arm(self, known: _Known) -> None:
        if known.relay.waiting and not known.timed:
            known.timed = True
            self._call_later(config.seconds("split_max_buffer_age"), lambda: self._on_age(known))

    def _on_age(self, known: _Known) -> None:
        known.timed = False
        self._send_up(known, known.relay.flush())

    # --- comings and goings ----------------------------------------------------------------------------------------------

    def on_up(self, record: Any) -> None:
        """An own proc listens: one that was started anew first hears what it shall not wait for, then what has waited for it."""
        handover = self._handovers.get(record.ref.uid)
        if handover is not None and record.attempt > handover.attempt:
            for sender, epoch, number in handover.restart(record.attempt):
                self._post(record.ref, CastVoid(sender, epoch, number))
        for parked in self._parked.pop(record.ref.uid, ()):
            self._go_on(parked)

    def on_exited(self, exited: ProcExited) -> None:
        """An own proc has ended."""
        uid = exited.proc.uid
        for known in list(self._known.values()):
            rank = known.ranks.get(uid)
            if rank is not None:
                self._lost(known, exited, rank)
        if not exited.again:
            self._parked.pop(uid, None)
            self._handovers.pop(uid, None)

    def on_agent_lost(self, address: str) -> None:
        """Another agent can't be reached."""
        for known in list(self._known.values()):
            if not any(child.agent == address for child in known.children):
                continue
            cast = known.cast
            lost = known.relay.on_child_lost(address)
            if lost.broken:
                self._post(known.parent, CastBroken(cast.sender, cast.epoch, cast.order.number, address))
            self._send_up(known, lost.leaving)
            if lost.acked:
                self._ack(known)

    def on_lost(self, ref: ProcRef) -> None:
        """A process that casts came from is gone: its own are over, and what came through it waits for its sender to ask again."""
        for handover in self._handovers.values():
            handover.forget(ref.uid)
        for key, known in list(self._known.items()):
            if key[0] == ref.uid:
                self._end(key, known)
            elif known.parent == ref:
                self._call_later(_ORPHANED_S, lambda key=key, known=known: self._end_orphan(key, known, ref))  # type: ignore[misc]
        for floor in [floor for floor in self._floors if floor[0] == ref.uid]:
            del self._floors[floor]

    def _end_orphan(self, key: Key, known: _Known, parent: ProcRef) -> None:
        if self._known.get(key) is known and known.parent == parent:
            self._end(key, known)

    def _end(self, key: Key, known: _Known) -> None:
        """A cast is over, and nobody will say so below."""
        sender, epoch, number = key
        self._forget(key, known)
        for child in known.children:
            self._post(agent_at(child.agent), CastsDone(sender, epoch, number + 1, child.tree))

    def _on_done(self, message: CastsDone) -> None:
        self._raise_floor(message.sender, message.epoch, message.below)
        for child in read_tree(message.tree).children:
            self._post(agent_at(child.agent), CastsDone(message.sender, message.epoch, message.below, child.tree))

    def _raise_floor(self, sender: str, epoch: int, below: int) -> None:
        known_floor = self._floors.get((sender, epoch), 0)
        if below <= known_floor:
            return
        self._floors[sender, epoch] = below
        if not known_floor:
            self._expire_floor((sender, epoch), 0)
        for key in [key for key in self._known if key[0] == sender and (key[1] < epoch or (key[1] == epoch and key[2] < below))]:
            self._forget(key, self._known[key])

    def _expire_floor(self, sender: tuple[str, int], seen: int) -> None:
        """Forget where a sender stands that has said nothing new: no link tells of the end of one that is not linked here."""
        floor = self._floors.get(sender)
        if floor is None:
            return
        if floor == seen and not any(key[:2] == sender for key in self._known):
            del self._floors[sender]
        else:
            self._call_later(_ORPHANED_S, lambda: self._expire_floor(sender, floor))

    def _forget(self, key: Key, known: _Known) -> None:
        self._known.pop(key, None)
        self._by_port.pop(known.port, None)

    def __len__(self) -> int:
        """How many casts are remembered."""
        return len(self._known)
