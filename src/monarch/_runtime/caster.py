"""Casters: how a process sends one call to many procs of other hosts at once, and gathers what comes back.

The procs of its own host are sent to directly. What lies on other hosts goes to some agents, each of which serves its own procs
and passes the rest on.

Rules of this file:
    1. The ledger and the lanes are touched under one lock. Who finds it held by his own thread (a finaliser that sends in the
       middle of a cast) sends straight.
    2. A cast is entered into the ledger before its first frame leaves, so whatever happens then can be mended.
    3. A rank whose proc is known to be gone is sent to directly, so its caller is told as always.
    4. What keeps its place among an actor's messages without being a call (its creation) is cast too, and numbered like calls.

Read next: `cast_relays.py` for the agents, `cast_inbox.py` for the receivers; `docs/design/casts.md`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from monarch import config
from monarch._base.ids import ProcRef, agent_at, is_agent
from monarch._net.loop import this_turn
from monarch._net.stream import LinkClosedError
from monarch._runtime import cast_tree
from monarch._runtime.cast_ledger import Entry, Ledger, Resend
from monarch._runtime.cast_merge import Batch
from monarch._runtime.cast_order import Lanes, Target, Ticket, within
from monarch._wire import messages
from monarch._wire.cast_messages import Cast, CastAcked, CastBroken, CastControl, CastFence, CastReplies, CastsDone, CastVoid
from monarch._wire.frames import Buffer, Kind, encode
from monarch._wire.messages import CallHeader, ProcExited

if TYPE_CHECKING:
    from monarch._net.router import Router
    from monarch._runtime.mailbox import Ports
    from monarch._runtime.mailbox import Target as Callee
    from monarch._runtime.platform import Loop

_MAX_VIEWS = 64
_IDLE_S = 1.0
"""How long after the last cast the agents are told that all are over."""


class Root(NamedTuple):
    """A branch that this process sends to."""

    agent: ProcRef
    branch: cast_tree.Branch
    low: int
    high: int
    tree: bytes


class View(NamedTuple):
    """How the procs of one view are reached."""

    refs: Sequence[ProcRef]
    near: tuple[int, ...]
    """Ranks that are sent to directly: on this host, or gone."""
    uids: tuple[str, ...]
    """The procs of the others,"""
    targets: tuple[Target, ...]
    """and with their ranks."""
    num_hosts: int
    plan: cast_tree.Plan
    roots: tuple[Root, ...]


class Content(NamedTuple):
    """What a cast says, for whoever sends it again."""

    call: tuple[Callee, CallHeader] | None
    """Whom it calls; None: it is a control message."""
    encoded_header: bytes
    payload: Buffer
    buffers: Sequence[memoryview]
    port: int
    merged: bool
    view: View
    order: Ticket


class Caster:
    """The casts of one process. Thread: any for `cast`, `stamp`; net loop for the rest."""

    def __init__(
        self,
        loop: Loop,
        router: Router,
        ports: Ports,
        gone: Collection[str],
        epoch: int,
        bounce: Callable[[Callee, int, CallHeader, ProcExited], None],
        on_exited: Callable[[ProcExited], None],
    ) -> None:
        """Args:
        gone: uids of procs that are known to be gone for good.
        epoch: which process under this id this one is; a later one has a larger number.
        bounce: takes a message without reply port that found nobody.
        on_exited: takes the news of the end of a proc.
        """
        self.epoch = epoch
        self._loop = loop
        self._router = router
        self._ports = ports
        self._gone = gone
        self._bounce = bounce
        self._on_exited = on_exited
        self._lock = threading.RLock()
        self._inside = 0
        """Ident of the thread that holds the lock; 0: nobody does."""
        self._lanes = Lanes()
        self._ledger: Ledger[Content] = Ledger()
        self._views: OrderedDict[int, View] = OrderedDict()
        self._used: dict[int, View] = {}
        """Views with agents that still remember casts."""
        self._mended: dict[str, Root] = {}
        """Branches that took the place of lost ones, by agent: those remember casts, too."""

    # --- sending (any thread) --------------------------------------------------------------------------------------

    def stamp(self, uid: str) -> int:
        """The `after` of a frame that is about to be sent straight to a proc."""
        if not self._lanes:
            return 0
        with self._lock:
            return self._lanes.stamp(uid)

    def worthwhile(self, refs: Sequence[ProcRef], nbytes: int) -> View | None:
        """How to cast to all procs of a view; None: send straight. Cost: O(1) when the view is known, O(ranks) for the first time."""
        view = self._view(refs)
        if not cast_tree.is_worthwhile(view.num_hosts, len(view.targets), nbytes) or self._inside == threading.get_ident():
            return None
        return view

    def cast(
        self,
        view: View,
        callee: Callee,
        header: CallHeader,
        encoded_header: bytes,
        payload: bytes,
        buffers: Sequence[memoryview],
        port: int,
    ) -> None:
        """Send to the far ranks of a view; credit for them is taken already."""
        to_us = header.reply_to is not None and header.reply_to.uid == self._router.own.uid
        merged = port != 0 and to_us and header.once and not header.explicit
        self._cast(view, (callee, header), encoded_header, payload, buffers, port, merged=merged)

    def cast_control(self, view: View, message: messages.Control, payload: Buffer, buffers: Sequence[memoryview], port: int) -> None:
        """Send a control message to the far ranks of a view.

        Args:
            port: where answers come, one of each rank; 0: nobody waits.
        """
        header = messages.encode(CastControl(self._router.own, self._router.pid, messages.encode(message)))
        self._cast(view, None, header, payload, buffers, port, merged=port != 0)

    def _cast(
        self,
        view: View,
        call: tuple[Callee, CallHeader] | None,
        encoded_header: bytes,
        payload: Buffer,
        buffers: Sequence[memoryview],
        port: int,
        *,
        merged: bool,
    ) -> None:
        kept = [memoryview(bytes(buffer)) for buffer in buffers]
        entry: Entry[Content] | None = None
        outer = this_turn.sending
        with self._lock:
            try:
                self._inside = threading.get_ident()
                this_turn.sending = True  # a finaliser may send, too, and must not wait with the lock
                ticket = self._lanes.prepare(view.targets, self._router.has_link)
                content = Content(call, encoded_header, payload, kept, port, merged, view, ticket)
                entry = Entry(ticket.order.number, [root.branch for root in view.roots], view.targets, content, merged=merged)
                self._ledger.open(entry)
                self._lanes.commit(ticket)
                self._used[id(view)] = view
                self._send_all(entry, view, ticket)
            except BaseException:
                if entry is not None and self._ledger.entry(entry.number) is entry:
                    # Ctrl-C: later messages follow this one, so it has to come. What has left already comes twice, and is known there.
                    self._lanes.commit(entry.content.order)
                    self._loop.call_soon(self._finish, entry)
                raise
            finally:
                self._inside = 0
                this_turn.sending = outer

    def _finish(self, entry: Entry[Content]) -> None:
        """Send a cast whose thread was interrupted while it sent. Thread: net loop."""
        with self._lock:
            if self._ledger.entry(entry.number) is entry:
                view = entry.content.view
                self._used[id(view)] = view
                self._send_all(entry, view, entry.content.order)

    def _send_all(self, entry: Entry[Content], view: View, ticket: Ticket) -> None:
        refs = {uid: view.refs[rank] for rank, uid in ticket.targets} if ticket.fenced else {}
        fence = messages.encode(CastFence(ticket.order.number))
        for uid in ticket.fenced:
            try:
                self._router.link_to(refs[uid]).send(encode(Kind.CONTROL, fence, b""))
            except LinkClosedError:
                continue  # it is gone, and supervision tells
        for root in view.roots:
            self._send(entry, root)

    def _send(self, entry: Entry[Content], root: Root) -> None:
        content = entry.content
        message = Cast(
            self._router.own.uid,
            self.epoch,
            content.port,
            content.merged,
            content.encoded_header,
            root.tree,
            within(content.order.order, root.low, root.high),
            entry.turn,
            self._ledger.floor(self._lanes.next_number),
            content.call is None,
        )
        payload, buffers = (b"", ()) if entry.is_delivered else (content.payload, content.buffers)
        pieces = encode(Kind.CONTROL, messages.encode(message), payload, port=content.port, buffers=buffers)
        try:
            self._router.link_to(root.agent).send(pieces)
        except LinkClosedError:
            self._loop.call_soon(self.on_agent_gone, root.agent)

    # --- views -------------------------------------------------------------------------------------------------------

    def _view(self, refs: Sequence[ProcRef]) -> View:
        view = self._views.get(id(refs))
        if view is None or view.refs is not refs:
            view = self._views[id(refs)] = self._make_view(refs)
            while len(self._views) > _MAX_VIEWS:
                self._views.popitem(last=False)
        return view

    def _make_view(self, refs: Sequence[ProcRef]) -> View:
        near: list[int] = []
        groups: dict[str, list[tuple[int, ProcRef]]] = {}
        for rank, ref in enumerate(refs):
            if not ref.host or self._router.is_near(ref) or ref.uid in self._gone:
                near.append(rank)
            else:
                groups.setdefault(ref.host, []).append((rank, ref))
        members = sorted(member for group in groups.values() for member in group)
        targets = tuple((rank, ref.uid) for rank, ref in members)
        if len({uid for _, uid in targets}) < len(targets):  # two ranks on one proc
            groups, near, targets = {}, list(range(len(refs))), ()
        plan = cast_tree.plan(groups, config.value("max_cast_fanout"), self._ledger.avoid)
        uids = tuple(uid for _, uid in targets)
        return View(refs, tuple(near), uids, targets, len(groups), plan, tuple(_root(plan, branch) for branch in plan.branches))

    def _forget_views(self) -> None:
        self._views.clear()

    # --- what comes back (net loop) ------------------------------------------------------------------------------------

    def on_control(self, message: messages.Control, agent: ProcRef, payload: Buffer, buffers: Sequence[memoryview]) -> bool:
        """Serve a message about a cast of this process; False: it is none."""
        match message:
            case CastReplies():
                self._on_replies(message, payload, buffers)
            case CastAcked():
                if message.epoch == self.epoch:
                    self._on_acked(message.number, agent)
            case CastBroken():
                if message.epoch == self.epoch:
                    self._on_agent_lost(agent_at(message.agent), gone=False)
            case _:
                return False
        return True

    def _on_replies(self, message: CastReplies, payload: Buffer, buffers: Sequence[memoryview]) -> None:
        entry = self._entry(message.number) if message.epoch == self.epoch else None
        if entry is None:
            return
        batch = Batch.decode(message, payload, buffers)
        with self._lock:
            answers = entry.on_batch(batch)
        for answer in answers:
            self._ports.deliver(entry.content.port, answer.rank, answer.flags, answer.payload, answer.buffers)
        for exited in batch.lost():
            with self._lock:
                ranks = entry.on_proc_lost(exited.proc.uid)
            self._on_exited(exited)
            if entry.content.port:
                self._ports.lose_one(entry.content.port, exited)
            elif entry.content.call is not None:
                callee, header = entry.content.call
                for rank in ranks[:1]:
                    self._bounce(callee, rank, header, exited)
        self._settle(entry)

    def _on_acked(self, number: int, agent: ProcRef) -> None:
        entry = self._entry(number)
        if entry is None:
            return
        with self._lock:
            entry.on_acked(agent.address)
            if entry.is_delivered:
                entry.content = entry.content._replace(payload=b"", buffers=())
        self._settle(entry)

    def _entry(self, number: int) -> Entry[Content] | None:
        with self._lock:
            return self._ledger.entry(number)

    def _settle(self, entry: Entry[Content]) -> None:
        with self._lock:
            is_last = self._ledger.settle(entry)
        if is_last:
            self._loop.call_later(_IDLE_S, self._tell_done)

    def _settle_all(self) -> None:
        """A loss may have been the last thing that casts waited for."""
        if self._used and not len(self._ledger):
            self._loop.call_later(_IDLE_S, self._tell_done)

    def _tell_done(self) -> None:
        with self._lock:
            if len(self._ledger):
                return
            used, self._used = self._used, {}
            mended, self._mended = self._mended, {}
            below = self._lanes.next_number
        for root in (*(root for view in used.values() for root in view.roots), *mended.values()):
            self._say(root.agent, CastsDone(self._router.own.uid, self.epoch, below, root.tree))

    # --- losses (net loop) -----------------------------------------------------------------------------------------------

    def on_exited(self, exited: ProcExited) -> list[int]:
        """A process is gone, or about to be replaced.

        Returns:
            Ports that waited for it, to be told (`Ports.lose_one`): also of casts that left while this waited for the lock.
        """
        if is_agent(exited.proc):
            self.on_agent_gone(exited.proc)
            return []
        if not exited.again:
            self._forget_views()
        if not self._lanes and not len(self._ledger):
            return []
        uid = exited.proc.uid
        with self._lock:
            last = self._lanes.renew(uid, exited.attempt + 1) if exited.again else 0
            if not exited.again:
                self._lanes.forget(uid)
            waiting = self._ledger.on_proc_lost(uid)
        self._settle_all()
        if last and self._router.has_link(uid):
            self._say(exited.proc, CastVoid(self._router.own.uid, self.epoch, last))
        return [entry.content.port for entry in waiting if entry.content.port]

    def on_connection_lost(self, ref: ProcRef) -> None:
        """A link to a proc that lives is lost, with what was on it: fences must not be waited for."""
        with self._lock:
            last = self._lanes.last(ref.uid)
        if last:
            self._say(ref, CastFence(last))

    def _say(self, ref: ProcRef, message: messages.Control) -> None:
        try:
            self._router.link_to(ref).send(encode(Kind.CONTROL, messages.encode(message), b""))
        except LinkClosedError:
            return  # it is gone after all

    def on_agent_gone(self, agent: ProcRef) -> None:
        """A host agent has ended, or can't be reached any more."""
        self._on_agent_lost(agent, gone=True)

    def on_agent_unreached(self, agent: ProcRef) -> None:
        """An agent lives, but casts on their way to it are lost."""
        self._on_agent_lost(agent, gone=False)

    def on_agent_back(self, agent: ProcRef) -> None:
        """An agent serves again."""
        with self._lock:
            self._ledger.trusted(agent.address)
            self._forget_views()

    def _on_agent_lost(self, agent: ProcRef, *, gone: bool) -> None:
        if not self._lanes and not len(self._ledger):
            return
        if gone:
            for ref in self._procs_under_way(agent):
                self._on_exited(ProcExited(ref, "the agent of its host can't be reached", "unknown", attempt=messages.UNKNOWN_ATTEMPT))
        with self._lock:
            again = self._ledger.on_lost(agent.address, gone=gone)
            self._forget_views()
            for resend in again:
                self._send_again(resend)
        self._settle_all()

    def _procs_under_way(self, agent: ProcRef) -> list[ProcRef]:
        """The procs of a host that casts under way are for. Its agent would tell of their end; who owns them hears of it anyway."""
        with self._lock:
            views = {id(entry.content.view): entry.content.view for entry in self._ledger.entries()}
        refs = {ref.uid: ref for view in views.values() for ref in view.refs if ref.host == agent.address}
        return list(refs.values())

    def _send_again(self, resend: Resend[Content]) -> None:
        names = resend.entry.content.view.plan.names
        for branch in resend.branches:
            root = self._mended[branch.agent] = _root_of(names, branch)
            self._send(resend.entry, root)


def _root(plan: cast_tree.Plan, branch: cast_tree.Branch) -> Root:
    return _root_of(plan.names, branch)


def _root_of(names: Sequence[cast_tree.Name], branch: cast_tree.Branch) -> Root:
    low, high = cast_tree.span_of(branch)
    return Root(agent_at(branch.agent), branch, low, high, cast_tree.tree_bytes(names, branch))
