"""This process as a proc: its cells, its ports, its links, and what it does with every frame.

A client, a worker proc and the root of a job are all the same thing here; they differ in who made them and in the
hooks that the actor layer fills in.

Rules of this file:
    1. The net thread reads, sorts and posts. It runs no user code, decodes no pickle and never waits.
    2. A message for an actor that is not here yet waits for its creation: a reference may overtake the creation that
       it refers to, because both travel on their own links.
    3. A closed link is only a suspicion. The host agent says how the process ended, and only then do waiters fail.
    4. A process or an actor that may come back under its id (`again`) has lost what was sent to it; what is sent later
       waits for it.

Read next: `cell.py` for an actor's life, `mailbox.py` for ports, `host.py` for the agent.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import msgspec

from monarch import config
from monarch._base.ids import ProcRef, agent_at
from monarch._net.stream import Link, LinkClosedError
from monarch._runtime import dumps
from monarch._runtime.cast_inbox import CastInbox
from monarch._runtime.caster import Caster
from monarch._runtime.cell import Cell, Delivery
from monarch._runtime.fates import Fates, unknown_end
from monarch._runtime.flow import Flow
from monarch._runtime.future import Future, drive_while_waiting, explain_lateness_by
from monarch._runtime.hooks import Hooks
from monarch._runtime.mailbox import Answer, Answers, Ports, Target
from monarch._runtime.outreach import Outreach
from monarch._runtime.platform import SYSTEM, Platform
from monarch._runtime.sender import Sender
from monarch._wire import messages
from monarch._wire.cast_messages import CastAcked, CastBroken, CastFence, CastHanded, CastReplies, CastVoid
from monarch._wire.contact_messages import DialMe, HandOver, Reach
from monarch._wire.frames import Buffer, Flag, Frame, FrameError, Kind, encode
from monarch._wire.memory_messages import MemoryRequest
from monarch._wire.messages import CallHeader, CreateActor, Fault, ProcExited
from monarch._wire.observation_messages import LogLines, Stacks, StackTexts, Stalled

if TYPE_CHECKING:
    from monarch._net.greeter import Greeting
    from monarch._net.handshake import Preface

_ORDERED = (CreateActor, messages.StopActor, messages.Obituary)
"""What keeps its place among an actor's messages."""
_CASTS = (CastHanded, CastFence, CastVoid, CastReplies, CastAcked, CastBroken)
_MAX_CACHED_HEADERS = 4096
_MAX_CACHED_BYTES = 1 << 20
"""Of encoded headers; decoded ones take a few times as much."""
_MAX_REMEMBERED = 16384
"""How many actors that have ended are remembered with the reason."""
_TRIM_S = 5.0
_FLUSH_STEP_S = 0.002


class Proc:
    """The runtime of this process. Thread: any, except where a method says otherwise."""

    def __init__(self, ref: ProcRef, host: ProcRef | None, hooks: Hooks, *, ready: bool, platform: Platform = SYSTEM) -> None:
        self.ref = ref
        self.host = host
        self.hooks = hooks
        self.platform = platform
        self.loop = platform.new_loop("monarch-net")
        self.pool = platform.new_pool()
        self.router = platform.new_router(self.loop, ref, self.pool, self, config.value("codec_max_frame_length"))
        self.ports = Ports()
        self.flow = Flow(config.value("mailbox_window_bytes"), partial(platform.wait_at, self.loop))
        self.router.epoch = int(self.loop.now_s() * 1000) + 1
        self.fates = Fates(self)
        self.caster = Caster(
            self.loop, self.router, self.ports, self.fates.gone, self.router.epoch, self.bounce, lambda exited: self.fates.on_exited(exited)
        )
        self.inbox = CastInbox(self.loop.call_later)
        self.sender = Sender(self.router, self.pool, self.flow, self.ports, self.caster, self._deliver, self._undelivered)
        self.board = platform.new_board(ref, watched=host is not None)
        self._outreach = Outreach(self)
        self.cells: dict[str, Cell] = {}
        self.stopping = False
        self._restarting: set[str] = set()
        """Actors that have ended here and may be created anew."""
        self._all_cells: weakref.WeakSet[Cell] = weakref.WeakSet()
        self._ended: dict[str, Fault] = {}
        self._early: dict[str, list[Delivery]] = {}
        self._cells_lock = threading.Lock()
        self._headers: dict[bytes, CallHeader] = {}
        self._header_bytes = 0
        self._ready = threading.Event()
        self._setup_error: BaseException | None = None
        self._when_ready: list[Callable[[], None]] = []
        if ready:
            self._ready.set()

    def start(self) -> None:
        """Begin to serve the network."""
        self.loop.start()
        drive_while_waiting(self.loop)
        explain_lateness_by(self._lateness)
        if self.pool is not None:
            self.loop.call_later(_TRIM_S, self._trim)

    # --- messages that leave -------------------------------------------------------------------------------------

    def _undelivered(self, target: Target, rank: int, why: ProcRef | ProcExited, header: CallHeader, port: int) -> None:
        exited = why if isinstance(why, ProcExited) else self.fates.gone.get(why.uid)
        if port:
            if exited is not None and header.reply_to is not None and header.reply_to.uid == self.ref.uid:
                self.ports.lose_one(port, exited)
        else:
            if exited is None:
                self.fates.keep_until_known(cast(ProcRef, why).uid, (target, rank, header))
            else:
                self.bounce(target, rank, header, exited)

    def bounce(self, target: Target, rank: int, header: CallHeader, exited: ProcExited) -> None:
        """A message without reply port was lost: its sender decides, unless who it was for comes back."""
        fault = target.blame(rank, exited)
        if not fault.again:
            self.hooks.on_bounced(header.sender_actor, header.method, fault)

    def refuse(self, delivery: Delivery, fault: Fault, *, started: bool) -> None:
        """Answer a message with the fault of its actor; without a reply port it bounces to its sender, unless it had started."""
        header = delivery.header
        if header.reply_to is not None:
            self.sender.post(delivery.via or header.reply_to, delivery.port, delivery.rank, messages.encode(fault), (), Flag.DEAD)
        elif not started and not fault.again:
            self.tell(header.sender, messages.Bounced(header.sender_actor, header.method, fault))

    def give_credit_to(self, sender_uid: str, actor: str, nbytes: int) -> None:
        """`give_credit` to a sender that is known by its id, if it is still connected."""
        ref = self.router.peer_of(sender_uid)
        if ref is not None:
            self.give_credit(ref, actor, nbytes)

    def give_credit(self, sender: ProcRef, actor: str, nbytes: int) -> None:
        """An actor here has handled `nbytes` of what `sender` sent it."""
        if sender.uid != self.ref.uid:
            self.tell(sender, messages.Credit(actor, nbytes))

    # --- control messages ----------------------------------------------------------------------------------------

    def tell(
        self,
        ref: ProcRef,
        message: messages.Control,
        payload: Buffer = b"",
        buffers: Sequence[memoryview] = (),
        port: int = 0,
        rank: int = 0,
    ) -> bool:
        """Send a control message; False when the process is gone."""
        if ref.uid == self.ref.uid:
            self._handle_control(message, payload, [memoryview(bytearray(b)) for b in buffers], ref, port, 0, rank)
            return True
        after = self.caster.stamp(ref.uid) if isinstance(message, _ORDERED) else 0
        pieces = encode(Kind.CONTROL, messages.encode(message), payload, port=port, rank=rank, buffers=buffers, after=after)
        try:
            self.router.link_to(ref).send(pieces)
        except LinkClosedError:
            return False
        return True

    def tell_all(
        self,
        refs: Sequence[ProcRef],
        message: messages.Control,
        payload: Buffer = b"",
        buffers: Sequence[memoryview] = (),
        port: int = 0,
    ) -> list[int]:
        """Send a control message to all procs of a view, in order with what else is sent to them; the ranks whose process is gone.

        Args:
            refs: the same object for the same view, which makes it cheap.
            port: where answers come, one of each rank.
        """
        ranks: Sequence[int] = range(len(refs))
        if len(refs) > 1:
            view = self.caster.worthwhile(refs, len(payload) + sum(buffer.nbytes for buffer in buffers))
            if view is not None:
                self.caster.cast_control(view, message, payload, buffers, port)
                ranks = view.near
        return [rank for rank in ranks if not self.tell(refs[rank], message, payload, buffers, port, rank)]

    def request_all(self, refs: Sequence[ProcRef], message: messages.Control, *, survivors: bool = False) -> Future[list[messages.Control]]:
        """Send a control message to all procs of a view; the future has their answers in rank order.

        Args:
            survivors: a process that is gone answers with its `ProcExited`; otherwise the future fails with `ProcGoneError`.
        """
        answers = Answers(self.ports, [ref.uid for ref in refs], survivors=survivors)
        for rank in self.tell_all(refs, message, port=answers.port):
            answers.on_lost(self.fates.gone.get(refs[rank].uid) or unknown_end(refs[rank]))
        return answers.future

    def request(self, ref: ProcRef, message: messages.Control, payload: Buffer = b"", buffers: Sequence[memoryview] = ()) -> Future[Any]:
        """Send a control message; the future is its answer, or fails with `ProcGoneError`."""
        answer = Answer(self.ports, ref.uid)
        if not self.tell(ref, message, payload, buffers, answer.port):
            answer.on_lost(self.fates.gone.get(ref.uid) or unknown_end(ref))
        return answer.future

    def report_fault(self, cell: Cell, fault: Fault) -> None:
        """Tell the owner of an actor of this process that it failed."""
        create = cell.create
        self.tell(create.owner, messages.ActorFault(create.owner_actor, fault))

    def _lateness(self, future: Future[Any], patience_s: float) -> str:
        try:
            from monarch._runtime.lateness import story_of
        except OSError as exc:  # no descriptor left: the time-out is the news
            return f"what the others do can't be told: {exc.strerror}"
        return story_of(self, future, patience_s)

    # --- setup ---------------------------------------------------------------------------------------------------

    def wait_ready(self) -> None:
        """Wait for the bootstrap of this process; raises what it raised."""
        self._ready.wait()
        if self._setup_error is not None:
            raise self._setup_error

    @property
    def ready(self) -> bool:
        """`wait_ready` would not wait."""
        return self._ready.is_set()

    def when_ready(self, callback: Callable[[], None]) -> None:
        """Call `callback()` once the bootstrap has ended. One thread at a time, that of `set_ready` among them."""
        self._when_ready.append(callback)

    @property
    def is_set_up(self) -> bool:
        """The bootstrap has ended, or is under way."""
        return self._ready.is_set() or any(cell.create.system for cell in list(self.cells.values()))

    def set_ready(self, error: BaseException | None) -> None:
        """The bootstrap has ended."""
        self._setup_error = error
        self._ready.set()
        while self._when_ready:
            self._when_ready.pop(0)()

    # --- frames (net loop) ---------------------------------------------------------------------------------------

    def on_peer(self, ref: ProcRef) -> None:
        """A process connected."""
        self.fates.on_reached(ref)

    def on_hello(self, hello: messages.Hello) -> None:
        """A process has said Hello."""
        self.inbox.on_hello(hello)

    def on_frame(self, link: Link, frame: Frame, buffers: Sequence[memoryview]) -> None:
        """Sort one frame."""
        kind = frame.kind
        if kind == Kind.CALL:
            header = self._headers.get(frame.header)
            if header is None:
                header = self._learn(frame.header)
            delivery = Delivery(header, frame.port, frame.rank, frame.payload, buffers)
            if frame.after:
                self.inbox.on_direct(header.sender.uid, frame.after, partial(self._deliver, delivery))
            else:
                self._deliver(delivery)
        elif kind == Kind.REPLY:
            self.ports.deliver(frame.port, frame.rank, frame.flags, frame.payload, buffers)
        elif kind == Kind.CONTROL:
            self._on_control(link, messages.decode_control(frame.header), frame, buffers)
        else:
            raise FrameError(f"unknown kind of frame {kind}")

    def _learn(self, encoded: bytes) -> CallHeader:
        if len(self._headers) >= _MAX_CACHED_HEADERS or self._header_bytes >= _MAX_CACHED_BYTES:
            self._headers.clear()
            self._header_bytes = 0
        header = messages.decode_call(encoded)
        if len(encoded) <= _MAX_CACHED_BYTES // 16:
            self._headers[encoded] = header
            self._header_bytes += len(encoded)
        return header

    def _deliver(self, delivery: Delivery) -> None:
        cell = self.cells.get(delivery.header.actor)
        if cell is None:
            self._keep_early(delivery)
        else:
            cell.post(delivery)

    def keep_for_next(self, delivery: Delivery) -> bool:
        """Keep a message for the actor that will be created in the place of one that ends; False: none will."""
        actor = delivery.header.actor
        with self._cells_lock:
            if actor not in self._restarting:
                return False
            self._early.setdefault(actor, []).append(delivery)
        return True

    def _keep_early(self, delivery: Delivery) -> None:
        actor = delivery.header.actor
        with self._cells_lock:
            cell = self.cells.get(actor)
            fault = self._ended.get(actor)
            if cell is None and fault is None:
                waiting = self._early.setdefault(actor, [])
                waiting.append(delivery)
                if len(waiting) == 1:
                    self.loop.call_later(config.seconds("pending_actor_delivery_timeout"), lambda: self._drop_early(actor))
                return
        if cell is not None:
            cell.post(delivery)
        elif fault is not None:
            self.refuse(delivery, fault, started=False)
            self.give_credit(delivery.header.sender, actor, delivery.nbytes)

    def _drop_early(self, actor: str) -> None:
        if actor in self._restarting:  # its policy decides, however long it pauses
            self.loop.call_later(config.seconds("pending_actor_delivery_timeout"), lambda: self._drop_early(actor))
            return
        with self._cells_lock:
            waiting = self._early.pop(actor, [])
        for delivery in waiting:
            limit_s = config.seconds("pending_actor_delivery_timeout")
            fault = Fault("lost", actor, actor, delivery.rank, f"no such actor came to this process within {limit_s:g} s", self.ref.uid)
            self.refuse(delivery, fault, started=False)
            self.give_credit(delivery.header.sender, actor, delivery.nbytes)

    def _on_control(self, link: Link, message: messages.Control, frame: Frame, buffers: Sequence[memoryview]) -> None:
        assert link.peer is not None
        if isinstance(message, messages.ReleaseSegments):
            link.take_back(message.segments)
        elif isinstance(message, messages.DropSegments):
            link.drop_segments(message.segments)
        elif isinstance(message, HandOver):
            self._outreach.take(link, message)
        elif isinstance(message, _CASTS):
            self._on_cast_message(message, link.peer, frame, buffers)
        elif frame.after:
            step = partial(self._handle_control, message, frame.payload, buffers, link.peer, frame.port, link.peer_pid, frame.rank)
            self.inbox.on_direct(link.peer.uid, frame.after, step)
        else:
            self._handle_control(message, frame.payload, buffers, link.peer, frame.port, link.peer_pid, frame.rank)

    def _on_cast_message(self, message: messages.Control, peer: ProcRef, frame: Frame, buffers: Sequence[memoryview]) -> None:
        match message:
            case CastHanded() if message.control:
                cast = messages.decode_cast_control(message.header)
                answer_to = peer if message.merged else cast.sender
                arguments = (messages.decode_control(cast.message), frame.payload, buffers, answer_to, frame.port, cast.pid, frame.rank)
                self.inbox.on_handed(cast.sender.uid, message, partial(self._handle_control, *arguments))
            case CastHanded():
                header = self._headers.get(message.header) or self._learn(message.header)
                delivery = Delivery(header, frame.port, frame.rank, frame.payload, buffers, peer if message.merged else None)
                self.inbox.on_handed(header.sender.uid, message, partial(self._deliver, delivery))
            case CastFence():
                self.inbox.on_fence(peer.uid, message.number)
            case CastVoid():
                self.inbox.on_void(message)
            case _:
                self.caster.on_control(message, peer, frame.payload, buffers)

    def _handle_control(
        self,
        message: messages.Control,
        payload: Buffer,
        buffers: Sequence[memoryview],
        sender: ProcRef,
        port: int,
        pid: int,
        rank: int,
    ) -> None:
        answer = partial(self._answer, sender, port, rank)
        match message:
            case messages.Credit():
                self.flow.credit((sender.uid, message.actor), message.nbytes)
            case CreateActor():
                create = message if message.rank >= 0 else msgspec.structs.replace(message, rank=rank)
                self._create(create, payload, buffers, answer if port else None, pid)
            case messages.StopActor():
                self._stop_actor(message, answer)
            case messages.Obituary():
                self._bury(message.fault)
            case messages.ActorFault():
                self.hooks.on_actor_fault(message.owner_actor, message.fault)
            case messages.Bounced():
                self.hooks.on_bounced(message.sender_actor, message.method, message.fault)
            case messages.ProcUp() | messages.ProcsUp():
                for up in message.procs if isinstance(message, messages.ProcsUp) else (message,):
                    self.router.dial_expected(up.proc)
                    self.hooks.on_proc_up(up.proc)
            case ProcExited():
                self.fates.on_exited(message)
            case messages.StopProc():
                answer()
                self.hooks.on_stop(message.reason)
            case messages.Ping():
                answer()
            case Reach():
                self._outreach.help(message)
            case DialMe():
                self.router.dial_back(message.seeker)
            case LogLines():
                self.hooks.on_log_lines(message, sender)
            case _ if isinstance(message, MemoryRequest):
                self.hooks.on_memory_message(message, sender, answer)
            case Stacks():
                answer(StackTexts(dumps.texts(self, message.threads)))
            case Stalled():
                self.hooks.on_stalled(message)
            case _:
                raise FrameError(f"a proc does not serve {type(message).__name__}")

    def _answer(self, ref: ProcRef, port: int, rank: int, message: messages.Control | None = None) -> None:
        if port:
            self.sender.post(ref, port, rank, messages.encode(message or messages.Done()), (), Flag.RAW)

    def _create(
        self, create: CreateActor, payload: Buffer, buffers: Sequence[memoryview], when_ready: Callable[[], None] | None, owner_pid: int
    ) -> None:
        cell = Cell(self, create, lambda cell: self.hooks.open_behavior(cell, payload, buffers), when_ready, owner_pid=owner_pid)
        with self._cells_lock:
            self._restarting.discard(create.actor)
            early = self._early.pop(create.actor, [])
            for delivery in early:
                cell.post(delivery)
            self.cells[create.actor] = cell
            self._all_cells.add(cell)
        cell.start()
        if self.stopping:
            cell.stop("its process is being stopped")

    def _stop_actor(self, stop: messages.StopActor, when_ended: Callable[[], None]) -> None:
        cell = self.cells.get(stop.actor)
        if cell is not None:
            if stop.again:
                with self._cells_lock:
                    self._restarting.add(stop.actor)
            cell.stop(stop.reason, when_ended, drain=not stop.again, again=stop.again)
            return
        if not stop.again and stop.actor in self._restarting:
            self._bury(Fault("stopped", stop.actor, stop.actor, -1, stop.reason, self.ref.uid))
        when_ended()

    def retire(self, cell: Cell, fault: Fault) -> None:
        """An actor has ended: only the reason is kept, for those who still send to it."""
        with self._cells_lock:
            if self.cells.get(cell.uid) is cell:  # else it was created anew while this one did not end
                del self.cells[cell.uid]
                if fault.again and cell.uid not in self._ended:
                    self._restarting.add(cell.uid)
                elif not fault.again:
                    self._remember(fault)

    def _remember(self, fault: Fault) -> None:
        if len(self._ended) >= _MAX_REMEMBERED:
            del self._ended[next(iter(self._ended))]
        self._ended[fault.mesh] = fault

    def _bury(self, fault: Fault) -> None:
        """An actor will not be created anew here."""
        with self._cells_lock:
            self._restarting.discard(fault.mesh)
            self._remember(fault)
            early = self._early.pop(fault.mesh, [])
        for delivery in early:
            self.refuse(delivery, fault, started=False)
            self.give_credit(delivery.header.sender, fault.mesh, delivery.nbytes)

    def on_unreachable(self, ref: ProcRef, reason: str) -> None:
        """Dialling failed."""
        self.fates.on_unreachable(ref, reason)

    def on_denied(self, ref: ProcRef, reason: str) -> None:
        """The other end does not trust this process, or this process not the other end."""
        self.fates.on_denied(ref, reason)

    def on_reach(self, ref: ProcRef) -> None:
        """A process can't be dialled from here."""
        self._outreach.seek(ref)

    def on_visitor(self, preface: Preface, greeting: Greeting) -> None:
        """A connection from another host is for a process behind this one."""
        self._outreach.lead(preface, greeting)

    def on_forgotten(self, ref: ProcRef, reason: str) -> None:
        """A process that lives has given a link up."""
        self.fates.on_forgotten(ref, reason)

    def on_lost(self, ref: ProcRef, reason: str, pid: int) -> None:
        """A link closed."""
        if self.host is not None and ref.uid == self.host.uid:
            self.hooks.on_host_lost(reason)
        elif ref == agent_at(ref.address):
            self.hooks.on_agent_lost(ref, reason)
        else:
            self.fates.on_lost(ref, reason, pid)

    def end_owned_by(self, exited: ProcExited) -> None:
        """End the actors here that a process has spawned which is gone; not those of its successor under the same id."""
        for cell in list(self.cells.values()):
            if cell.create.owner.uid == exited.proc.uid and 0 in (cell.owner_pid - exited.pid, cell.owner_pid, exited.pid):
                cell.stop(f"its owner's process is gone: {exited.reason}", drain=False)

    def _trim(self) -> None:
        assert self.pool is not None
        closed = self.pool.trim(self.loop.now_s())
        if closed:
            self.router.forget_segments(closed)
        self.loop.call_later(_TRIM_S, self._trim)

    # --- the end -------------------------------------------------------------------------------------------------

    def stop_cells(self, reason: str, when_ended: Callable[[], None]) -> None:
        """Stop every actor of this process; `when_ended` is called once, when all have ended."""
        self.stopping = True
        cells = [cell for cell in list(self.cells.values()) if cell.fault is None]
        countdown = Countdown(len(cells) + 1, when_ended)
        for cell in cells:
            cell.stop(reason, countdown.tick)
        countdown.tick()

    def join_cells(self, budget_s: float) -> None:
        """Wait for the threads of actors, ended ones too."""
        deadline_s = self.loop.now_s() + budget_s
        for cell in list(self._all_cells):
            cell.join(max(0.0, deadline_s - self.loop.now_s()))

    def _flush(self, flushed: threading.Event, deadline_s: float) -> None:
        if self.router.queued_bytes() and self.loop.now_s() < deadline_s:
            self.loop.call_later(_FLUSH_STEP_S, lambda: self._flush(flushed, deadline_s))
        else:
            flushed.set()

    def close(self, reason: str, *, flush_s: float = 0.0) -> None:
        """End the network side: links, then the loop.

        Args:
            flush_s: for so long at most, what is queued may leave first.
        """
        drive_while_waiting(None)
        explain_lateness_by(None)
        flushed = threading.Event()
        self.loop.call_soon(self._flush, flushed, self.loop.now_s() + flush_s)
        flushed.wait(flush_s + 1)
        self.loop.call_soon(self.router.close, reason)
        self.loop.stop()
        self.loop.join(5)
        if self.pool is not None:
            self.pool.close()


class Countdown:
    """Calls back at its last tick. Thread: any."""

    def __init__(self, ticks: int, when_done: Callable[[], None]) -> None:
        self._left = ticks
        self._when_done = when_done
        self._lock = threading.Lock()

    def tick(self) -> None:
        """One less to wait for."""
        with self._lock:
            self._left -= 1
            done = self._left == 0
        if done:
            self._when_done()
