"""The host agent: one process per host that starts, watches and ends procs. It runs no user code.

    client ---- agent ---- zygote ---- procs
                  ^------ control link ---'

Rules of this file:
    1. The agent learns of a death from the kernel, through the zygote, and tells the owner before anything else.
    2. Everything a process owns ends with it: when a link's owner is gone, so are its procs and their descendants.
    3. Nothing waits for a proc's interpreter. A stop has a budget; after it comes SIGKILL.

Read next: `zygote.py` for the parent of the procs, `proc.py` for the other end of the links.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from monarch import config
from monarch._base.ids import ProcRef, between_hosts, is_agent, split_address, split_target
from monarch._net import credentials
from monarch._net.loop import READ
from monarch._net.router import listen_at, socket_path
from monarch._net.session_link import SessionLink
from monarch._net.stream import Link, LinkClosedError
from monarch._runtime import descendants, versions
from monarch._runtime.cast_post import CastPost
from monarch._runtime.cast_relays import CastRelays
from monarch._runtime.inquiries import Inquiries
from monarch._runtime.platform import SYSTEM, Platform
from monarch._runtime.record import Record, ending_of
from monarch._runtime.rundir import remove_run_dir
from monarch._runtime.starting import starts_of
from monarch._runtime.up_news import UpNews
from monarch._runtime.visitors import Visitors
from monarch._runtime.watcher import limits_of
from monarch._wire import messages, zygote_messages
from monarch._wire.contact_messages import Attach, DialMe, HandOver, HostInfo, Reach, Register, TookOver
from monarch._wire.frames import Flag, Frame, FrameError, Kind, encode
from monarch._wire.memory_messages import LendMemory, ShareFile, ShareMemory
from monarch._wire.messages import ProcExited, ProcUp
from monarch._wire.observation_messages import Activities, Activity, ActorActivity, FlushLogs, LogCredit, Stalled, StreamLogs

if TYPE_CHECKING:
    from monarch._net.greeter import Greeting
    from monarch._net.handshake import Preface
    from monarch._net.net_router import NetRouter

_MAX_RECORDS = 8192
_SHUTDOWN_S = 5.0
_SHUT_DOWN = "its host is shut down"
_HUNT_STEP_S = 0.01
_SILENT_S = 3.0
_FRAME_SLACK = 1 << 24  # frames of casts are longer than the calls and answers in them


class Stopping:
    """A `StopProcs` under way."""

    __slots__ = ("answer", "waiting")

    def __init__(self, waiting: dict[str, None], answer: Callable[[], None]) -> None:
        self.waiting = waiting
        self.answer = answer


class HostAgent:
    """The agent. Thread: its only one."""

    def __init__(self, own: ProcRef, entry: str, *, client_uid: str = "", platform: Platform = SYSTEM) -> None:
        """Args:
        client_uid: the one client of this agent, with which it ends; "": a worker loop, which serves one after the other.
        """
        self.own = own
        self._client_uid = client_uid
        self._entry = entry
        self._platform = platform
        self._loop = platform.new_loop("monarch-host")
        self._pool = platform.new_pool()
        self._router = platform.new_router(self._loop, own, self._pool, self, config.value("codec_max_frame_length") + _FRAME_SLACK)
        self._router.epoch = int(self._loop.now_s() * 1000) + 1
        self._records: dict[str, Record] = {}
        self._refused: dict[str, str] = {}
        """Clients that nothing is spawned for, and why."""
        self._inquiries = Inquiries(self._records, self._tell, self._loop.call_later)
        self._visitors = Visitors(partial(self._router.link_to, dial=False), split_target(split_address(own.address)[1])[0])
        self._stoppings: list[Stopping] = []
        self._shutting_down = False
        self._ending = False
        self._zygotes = platform.new_starter(self._loop, entry, self._on_zygote, self._on_zygote_lost)
        self._watcher = platform.new_watcher(self._loop, self._ask, self._zygotes.send, self._on_stalled)
        self._logs = platform.new_logs(self._loop, own, self._tell)
        self._news = UpNews(self._loop.call_later, self._tell, self._router.is_near)
        self._relays = CastRelays(self._loop.call_later, CastPost(self._router, self._pool), self._records.get)

    def serve(self, sock: socket.socket, first_zygote: socket.socket, zygote_pid: int, outside: socket.socket | None = None) -> None:
        """Run until the other end of `sock` is gone or a client shuts this host down.

        Args:
            outside: listens for other hosts.
        """
        self._zygotes.adopt(first_zygote, zygote_pid)
        folder = SYSTEM.folder
        paths = {SYSTEM.file_of(self.own.address)} | ({socket_path(self.own.address)} if not between_hosts(self.own.address) else set())
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        for path in paths:
            self._router.listen(listen_at(path))
        if outside is not None:
            self._net_router().listen_to_others(outside, tls=self.own.address.startswith("tls://"))
        elif not self._client_uid:
            from monarch._net.portals import VISITORS

            self._net_router().listen_to_others(listen_at(os.path.join(folder, VISITORS)), tls=False)
        if self._client_uid:
            # By name: a client that dies before its Hello is to be missed all the same.
            self._router.adopt(sock, self._router.link_to(ProcRef(self._client_uid, "", ""), dial=False))
        else:
            self._loop.watch(sock.fileno(), READ, lambda _mask: self._end())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: self._loop.call_soon(self._end))
        self._loop.run()
        for close in (self._zygotes.close, self._visitors.services.close, self._logs.close):
            close()
        if self._pool is not None:
            self._pool.close()
        remove_run_dir(folder)
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def _net_router(self) -> NetRouter:
        from monarch._net.net_router import NetRouter

        assert isinstance(self._router, NetRouter)
        return self._router

    # --- links ---------------------------------------------------------------------------------------------------

    def on_peer(self, ref: ProcRef) -> None:
        """A process connected: one of our procs is up, or a client arrived."""
        record = self._records.get(ref.uid)
        if record is not None and not record.up and record.exited is None:
            record.up = True
            up = ProcUp(record.ref, record.pid)
            self._news.add(record.owner, up)
            for who, port, exit_only in record.watchers:
                if not exit_only:
                    self._tell(who, up, port)
            record.watchers = [watcher for watcher in record.watchers if watcher[2]]
            self._relays.on_up(record)
            if self._shutting_down:
                self._tell(ref, messages.StopProc(_SHUT_DOWN))

    def on_hello(self, hello: messages.Hello) -> None:
        """A process has said Hello."""

    def on_unreachable(self, ref: ProcRef, reason: str) -> None:
        """The agent dials other agents only, for casts."""
        if is_agent(ref):
            self._router.renew(ref, reason)
            self._relays.on_agent_lost(ref.address)
        else:
            self._router.lose(ref, reason)

    def on_denied(self, ref: ProcRef, reason: str) -> None:
        """Another agent does not trust this one."""
        self.on_unreachable(ref, reason)

    def on_reach(self, ref: ProcRef) -> None:
        """The agent dials nobody but agents."""
        self._router.lose(ref, "it can't be dialled from here")

    def on_visitor(self, preface: Preface, greeting: Greeting) -> None:
        """A connection from another host is for one of our procs, or for a service that may have been here: pass it on."""
        self._visitors.lead(preface, greeting)

    def _take_visitor(self, link: Link, message: HandOver) -> None:
        if link.peer is None or link.peer.uid != self._client_uid:
            raise FrameError("only its client hands connections over to an agent")
        from monarch._net.handshake import Preface

        fd = link.take_descriptor()
        if fd is not None:  # else the kernel had none for this process and closed the connection; who dials will do so again
            self._net_router().visit(socket.socket(fileno=fd), Preface(message.target, message.tls), message.peer)

    def on_forgotten(self, ref: ProcRef, reason: str) -> None:
        """Another agent has given the link up; the next cast dials it anew."""
        self.on_unreachable(ref, reason)

    def on_lost(self, ref: ProcRef, reason: str, pid: int) -> None:
        """A process closed its link: what it owns ends."""
        self._logs.forget(ref.uid)
        self._visitors.on_lost(ref.uid, pid)
        self._watcher.remove(ref.uid)
        self._refused.pop(ref.uid, None)
        self._relays.on_lost(ref)
        if is_agent(ref):
            self._relays.on_agent_lost(ref.address)
        if ref.uid == self._client_uid:
            self._end()
        else:
            self._end_owned_by(ref.uid, reason)
            self._abandon_for(ref.uid)

    def on_frame(self, link: Link, frame: Frame, buffers: Sequence[memoryview]) -> None:
        """Serve one control message."""
        if frame.kind == Kind.REPLY:
            if not self._relays.on_reply(frame.port, frame.rank, frame.flags, frame.payload, buffers):
                self._watcher.on_answer(frame.port, frame.payload)
            return
        if frame.kind != Kind.CONTROL or link.peer is None:
            raise FrameError("a host agent takes control messages only")
        message, sender, port = messages.decode_control(frame.header), link.peer, frame.port
        match message:
            case messages.SpawnProcs():
                if sender.uid in self._refused:
                    self._refuse_to_spawn(message, self._refused[sender.uid])
                else:
                    self._spawn(message, from_here=not isinstance(link, SessionLink))
            case messages.WatchProc():
                self._inquiries.ask(message, sender, port)
            case messages.SuperviseProcs():
                self._supervise(message.uids, (sender.uid, message.group))
            case messages.AbandonProcs():
                self._abandon(message.uids, (sender.uid, message.group))
            case messages.KillProcs():
                self._kill([uid for uid in message.uids if uid in self._records and self._records[uid].exited is None])
            case messages.StartProcs():
                self._start_anew(message.uids)
            case messages.StopProcs():
                self._stop(message.uids, message.budget_s, lambda: self._tell(sender, messages.Done(), port))
            case Activity():
                self._tell(sender, self._activity(message.uids), port)
            case StreamLogs():
                self._logs.stream(message.uids, sender, on=message.on)
                self._tell(sender, messages.Done(), port)
            case FlushLogs():
                self._logs.flush(message.uids)
                self._tell(sender, messages.Done(), port)
            case LogCredit():
                self._logs.credit(sender, message.nbytes)
            case TookOver():
                self._visitors.on_taken(sender.uid)
            case Attach():
                self._attach(message, sender, port)
            case Reach():
                self._reach(message)
            case DialMe():
                self._router.dial_back(message.seeker)
            case Register():
                self._net_router().register(link, message.name)
            case HandOver():
                self._take_visitor(link, message)
            case messages.ShutdownHost():
                self._shut_down(message.budget_s, lambda: self._tell(sender, messages.Done(), port))
            case messages.Ping():
                self._tell(sender, messages.Done(), port)
            case messages.ReleaseSegments():
                link.take_back(message.segments)
            case messages.DropSegments():
                link.drop_segments(message.segments)
            case ShareMemory() | ShareFile() | LendMemory() if not isinstance(link, SessionLink):  # of this machine, by the kernel's word
                self._visitors.services.on_message(message, sender.uid, link.peer_pid, self._net_router)
            case _ if isinstance(message, messages.Credit) or self._relays.on_control(message, sender, frame.payload, buffers):
                return
            case _:
                raise FrameError(f"a host agent does not serve {type(message).__name__}")

    def _tell(self, ref: ProcRef, message: messages.Control, port: int = 0) -> None:
        record = self._records.get(ref.uid)
        if record is not None and (record.exited is not None or not record.up):
            return  # it has ended; a link that is made now would stand in the way of that of its successor
        encoded = messages.encode(message)
        pieces = encode(Kind.REPLY, b"", encoded, flags=Flag.RAW, port=port) if port else encode(Kind.CONTROL, encoded, b"")
        try:
            self._router.link_to(ref, dial=False).send(pieces)
        except LinkClosedError:
            return  # who asked is gone, and what it owned ends by `on_lost`

    def _ask(self, ref: ProcRef, message: messages.Control, port: int) -> None:
        with contextlib.suppress(LinkClosedError):
            self._router.link_to(ref, dial=False).send(encode(Kind.CONTROL, messages.encode(message), b"", port=port))

    def _on_stalled(self, record: Record, stalled: Stalled) -> None:
        owner = record.owner
        while (parent := self._records.get(owner.uid)) is not None:  # a proc may be stalled itself; its client is not one of ours
            owner = parent.owner
        self._tell(owner, stalled)

    # --- starting ------------------------------------------------------------------------------------------------

    def _attach(self, request: Attach, sender: ProcRef, port: int) -> None:
        """A client introduces itself. One that differs is refused here as well: it spawns without waiting for the answer."""
        ours = versions.own_versions()
        fatal, _ = versions.differences(request.versions, ours)
        if fatal and not request.any_version:
            self._refused[sender.uid] = versions.mismatch(fatal, request.versions, {self.own.address: ours})
        else:
            self._refused.pop(sender.uid, None)
        self._tell(sender, HostInfo(ours, socket.gethostname(), self.own.address, ""), port)

    def _reach(self, request: Reach) -> None:
        """A proc of ours can't dial somebody: ask whoever is linked, or may know the way."""
        peers = self._router.peers()
        if any(ref.uid == request.target.uid for ref in peers):
            self._tell(request.target, DialMe(request.seeker))
            return
        for ref in peers:
            if not ref.host and ref.uid not in self._records and ref.uid != self.own.uid:  # a client
                self._tell(ref, request)

    def _refuse_to_spawn(self, request: messages.SpawnProcs, why: str) -> None:
        for spec in request.procs:
            self._tell(request.owner, ProcExited(spec.proc, why, "launch"))

    def _spawn(self, request: messages.SpawnProcs, *, from_here: bool) -> None:
        """Start procs.

        Args:
            from_here: for a process of this machine; another one's directories and credentials mean little here.
        """
        if from_here and request.credentials and self._client_uid:
            credentials.set_credentials(credentials.decode(request.credentials))
        limits = limits_of(request.config)
        for spec, start in starts_of(request, self.own, self._entry, from_here=from_here):
            record = Record(spec, request.owner, start, request.max_idle_s, limits)
            record.watchers = self._inquiries.take_overtaken(spec.proc.uid)
            self._remember(record)
            self._launch(record)

    def _launch(self, record: Record) -> None:
        self._news.expect(record.owner)
        self._zygotes.start(self._logs.capture(record.ref, record.start))
        self._watcher.add(record, record.limits)
        self._loop.call_later(record.max_idle_s, partial(self._check_up, record, record.attempt))

    def _start_anew(self, uids: Sequence[str]) -> None:
        for uid in uids:
            record = self._records.get(uid)
            if record is None or record.exited is None or not record.exited.again or self._ending:
                continue  # it lives, or whoever waits for it has been told that it will not come back
            record.wanted = True
            if record.gone:
                self._relaunch(record)

    def _relaunch(self, record: Record) -> None:
        record.wanted = False
        record.last_exit, record.exited = record.exited, None
        record.attempt += 1
        record.pid, record.up, record.gone = 0, False, False
        record.how, record.stopped_at_s = "", 0.0
        self._launch(record)

    def _supervise(self, uids: Sequence[str], supervisor: tuple[str, str]) -> None:
        for uid in uids:
            record = self._records.get(uid)
            if record is not None:
                record.supervisors.add(supervisor)

    def _abandon(self, uids: Sequence[str], supervisor: tuple[str, str]) -> None:
        for uid in uids:
            record = self._records.get(uid)
            if record is not None and supervisor in record.supervisors:
                record.supervisors.discard(supervisor)
                if not record.supervisors:
                    self._end_for_good(record)

    def _abandon_for(self, process_uid: str) -> None:
        """A process is gone that may have had supervisors."""
        for record in list(self._records.values()):
            for supervisor in [supervisor for supervisor in record.supervisors if supervisor[0] == process_uid]:
                self._abandon([record.ref.uid], supervisor)

    def _end_for_good(self, record: Record) -> None:
        """A process that has ended, and might have come back, will not."""
        exited = record.exited
        if exited is None or not exited.again:
            return
        record.wanted = False
        record.exited = msgspec.structs.replace(exited, again=False, how="stopped" if record.stop_asked else exited.how)
        self._relays.on_exited(record.exited)
        self._tell(record.owner, record.exited)
        for who, port, _ in record.watchers:
            self._tell(who, record.exited, port)
        record.watchers = []
        self._router.lose(record.ref, exited.reason)
        self._logs.release(record.ref.uid)

    def _remember(self, record: Record) -> None:
        if len(self._records) >= _MAX_RECORDS:
            over = [uid for uid, old in self._records.items() if old.gone and not (old.exited is not None and old.exited.again)]
            for uid in over[: _MAX_RECORDS // 2]:
                self._visitors.remove(self._records.pop(uid))
        self._records[record.ref.uid] = record
        self._visitors.add(record)

    def _check_up(self, record: Record, attempt: int) -> None:
        if not record.up and record.exited is None and record.attempt == attempt:
            record.how = "timeout"
            self._exited(record, f"did not report within {record.max_idle_s:g} s (mesh_proc_spawn_max_idle)", "timeout")
            self._zygotes.send(record.ref.uid, zygote_messages.KillProc(record.ref.uid))

    # --- watching ------------------------------------------------------------------------------------------------

    def _on_zygote(self, message: zygote_messages.News) -> None:
        if isinstance(message, zygote_messages.Note):
            self._logs.say(message.text)
            return
        record = self._records.get(message.uid)
        if record is None:
            return
        match message:
            case zygote_messages.Started():
                record.pid = message.pid
                self._logs.started(record.ref.uid)
            case zygote_messages.StartFailed():
                self._exited(record, message.reason, "launch")
                self._gone(record)
            case zygote_messages.Exited():
                self._exited(record, *ending_of(record, message), message.code, message.signal)
            case zygote_messages.Gone():
                self._gone(record)
            case zygote_messages.Stopped():
                self._on_stopped(record)
            case zygote_messages.Continued():
                record.stopped_at_s = 0.0

    def _on_stopped(self, record: Record) -> None:
        limit_s = record.limits.killed_s
        record.stopped_at_s = self._loop.now_s()
        if limit_s is None:
            return
        since_s = record.stopped_at_s

        def check() -> None:
            if record.stopped_at_s == since_s and record.exited is None:
                record.how = f"was stopped by a signal (SIGSTOP) for {limit_s:g} s (proc_stopped_limit), so its host agent killed it"
                self._zygotes.send(record.ref.uid, zygote_messages.KillProc(record.ref.uid))

        self._loop.call_later(limit_s, check)

    def _exited(self, record: Record, reason: str, how: str, code: int | None = None, number: int | None = None) -> None:
        if record.exited is not None:
            return
        words = [] if how == "stopped" else self._logs.last_words(record.ref.uid)
        again = bool(record.supervisors) and not record.stop_asked and not self._ending
        record.exited = ProcExited(record.ref, reason, how, code, number, record.pid, record.attempt, again, words)
        if record.up:
            self._news.flush(record.owner)
        else:
            self._news.fail(record.owner)
        self._tell(record.owner, record.exited)
        for who, port, exit_only in record.watchers:
            if exit_only or not again:
                self._tell(who, record.exited, port)
        if again:
            record.watchers = [watcher for watcher in record.watchers if not watcher[2]]
            self._router.renew(record.ref, reason)
        else:
            record.watchers = []
            self._router.lose(record.ref, reason)
        self._relays.on_exited(record.exited)
        self._logs.forget(record.ref.uid)  # `on_lost` does not come for a link that was closed above
        self._end_owned_by(record.ref.uid, reason)
        self._abandon_for(record.ref.uid)

    def _gone(self, record: Record) -> None:
        story = "" if record.exited is None else record.exited.reason
        self._logs.finish(record.ref.uid, story, lambda: self._forget(record))

    def _forget(self, record: Record) -> None:
        record.gone = True
        self._platform.remove_files(record.ref)
        for stopping in list(self._stoppings):
            stopping.waiting.pop(record.ref.uid, None)
            if not stopping.waiting:
                self._stoppings.remove(stopping)
                stopping.answer()
        if record.wanted:
            self._relaunch(record)
        elif record.exited is not None and not record.exited.again:
            self._logs.release(record.ref.uid)

    def _on_zygote_lost(self, uids: list[str]) -> None:
        lost = [record for uid in uids if (record := self._records.get(uid)) is not None and not record.gone]
        for record in lost:
            self._platform.remove_files(record.ref)  # first: it may not be dead yet, and whoever hears of it now would dial it once more
            self._exited(record, "its zygote was killed, and it with it", "killed", None, signal.SIGKILL)
        self._hunt(lost, self._loop.now_s() + _SHUTDOWN_S)

    def _hunt(self, lost: list[Record], until_s: float) -> None:
        """Kill what procs without a zygote leave behind; nobody else knows whose it is."""
        found = False
        for pid in descendants.find_descendants(record.ref.uid for record in lost):
            found = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if found and self._loop.now_s() < until_s:
            self._loop.call_later(_HUNT_STEP_S, lambda: self._hunt(lost, until_s))
            return
        for record in lost:
            self._gone(record)

    def _activity(self, uids: list[str]) -> Activities:
        rows: list[ActorActivity] = []
        for uid in uids:
            record = self._records.get(uid)
            if record is not None:
                state = "gone" if record.exited is not None else "stopped" if record.stopped_at_s else ""
                rows.extend(self._platform.read_board(record.ref, record.pid, state, self._watcher.silent_s(uid)))
        return Activities(rows)

    # --- ending --------------------------------------------------------------------------------------------------

    def _stop(self, uids: Sequence[str], budget_s: float, answer: Callable[[], None]) -> None:
        asked = [self._records[uid] for uid in uids if uid in self._records]
        for record in asked:
            record.stop_asked = True
            self._end_for_good(record)
        waiting = dict.fromkeys(record.ref.uid for record in asked if not record.gone)
        if not waiting:
            answer()
            return
        self._stoppings.append(Stopping(waiting, answer))
        self._loop.call_later(budget_s, lambda: self._kill(list(waiting)))

    def _kill(self, uids: Sequence[str]) -> None:
        for uid in uids:
            record = self._records.get(uid)
            if record is not None and not record.gone:
                self._zygotes.send(uid, zygote_messages.KillProc(uid))
                self._loop.call_later(_SILENT_S, partial(self._kill_zygote_of, record, record.attempt))

    def _kill_zygote_of(self, record: Record, attempt: int) -> None:
        # Its zygote tells of a SIGKILL's effect within milliseconds, unless it is stopped itself.
        if record.exited is None and record.attempt == attempt:
            self._zygotes.kill_silent(record.ref.uid)

    def _end_owned_by(self, uid: str, reason: str) -> None:
        owned = [record for record in self._records.values() if record.owner.uid == uid]
        for record in owned:
            if not record.stop_asked:
                record.how = f"its owner {uid} was lost ({reason}), so its host agent ended it"
            record.stop_asked = True
            self._end_for_good(record)
        self._kill([record.ref.uid for record in owned if not record.gone])

    def _shut_down(self, budget_s: float, answer: Callable[[], None]) -> None:
        def done() -> None:
            answer()
            self._loop.call_later(0.05, self._end)  # lets the answer leave before the links close

        self._zygotes.wake()
        self._shutting_down = True  # those that are on their way hear when they are up
        for record in list(self._records.values()):
            if record.up and record.exited is None:
                self._tell(record.ref, messages.StopProc(_SHUT_DOWN))
        self._stop(list(self._records), budget_s, done)

    def _end(self) -> None:
        if self._ending:
            return
        self._ending = True
        self._router.close("the host agent has ended")  # now, so that nobody spawns here any more, or hears of deaths without their cause
        self._zygotes.shut_down(self._close)
        self._loop.call_later(_SHUTDOWN_S, self._close)

    def _close(self) -> None:
        self._loop.stop()
