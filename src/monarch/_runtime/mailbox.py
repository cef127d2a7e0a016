"""Ports: where replies and channel messages arrive, and who waits for them.

A port is a number in the table of its process. Replies go to the port named in the call; a port whose receiver is gone
drops what still comes.

Rules of this file:
    1. Receivers run on the net thread (or on a local sender's thread): they store and wake, and never decode.
    2. A receiver knows which procs it still waits for; when one is lost it ends at once.

Read next: `future.py` for the outcome, `faults.py` for the errors.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Protocol

from monarch._base.ids import ProcRef
from monarch._runtime.faults import supervision_error
from monarch._runtime.future import Future
from monarch._wire import messages
from monarch._wire.frames import Buffer, Flag
from monarch._wire.messages import Fault, ProcExited
from monarch._wire.pickling import loads


class Reply:
    """One raw answer. `take()` decodes it, once; errors come as exceptions."""

    __slots__ = ("_buffers", "_flags", "_outcome", "_payload", "_state")

    def __init__(self, flags: int, payload: Buffer, buffers: Sequence[memoryview]) -> None:
        self._flags = flags
        self._payload: Buffer | None = payload
        self._buffers = buffers
        self._outcome: Any = None
        self._state = "raw"

    @property
    def failed(self) -> bool:
        """True when the answer is an exception."""
        return bool(self._flags & Flag.ERROR)

    def take(self) -> Any:
        """The value; raises what the other side answered, or what decoding raised, the same object each time."""
        if self._state == "raw":
            self._decode()
        if self._state == "error":
            raise self._outcome
        return self._outcome

    def _decode(self) -> None:
        assert self._payload is not None
        try:
            self._outcome = loads(self._payload, self._buffers)
            self._state = "error" if self.failed else "value"
        except Exception as exc:
            self._outcome, self._state = exc, "error"
        self._payload, self._buffers = None, ()


def decode_reply(raw: tuple[int, Buffer, Sequence[memoryview]]) -> Any:
    """The value of an answer whose future remembers the outcome: `Reply.take` without a `Reply`."""
    flags, payload, buffers = raw
    value = loads(payload, buffers)
    if flags & Flag.ERROR:
        raise value
    return value


class Target(Protocol):
    """Who a receiver waits for: the view of a mesh that was called."""

    @property
    def procs(self) -> Sequence[str]:
        """Uid of the proc of each rank of the view."""

    @property
    def endpoint(self) -> str:
        """`<mesh name>.<method>`, for errors."""

    @property
    def actor(self) -> str:
        """Uid of the mesh."""

    @property
    def caller(self) -> str:
        """Uid of the actor that called last."""

    @property
    def refs(self) -> Sequence[ProcRef]:
        """The proc of each rank of the view."""

    @property
    def mesh_ranks(self) -> Sequence[int]:
        """Rank in the whole mesh of each rank of the view."""

    def blame(self, rank: int, exited: ProcExited) -> Fault:
        """The fault of the view's rank `rank` when its proc is gone."""

    def amend(self, fault: Fault) -> Fault:
        """The fault that a rank has answered with, as it is known here."""


class Receiver(Protocol):
    """What a port delivers to. Thread: net loop or a local sender."""

    def on_message(self, rank: int, flags: int, payload: Buffer, buffers: Sequence[memoryview]) -> None:
        """A message for this port."""

    def on_lost(self, exited: ProcExited) -> None:
        """A proc is gone; end if it was waited for."""

    def fail(self, error: Exception) -> None:
        """End with an error."""


class Call(Receiver, Protocol):
    """A receiver that waits for a call, or for a channel (no target)."""

    @property
    def target(self) -> Target | None:
        """Who was called."""

    def asked(self) -> list[int]:
        """The ranks of the view that were called."""

    def missing(self) -> list[int]:
        """Those that have not answered."""

    def completes(self, future: Future[Any]) -> bool:
        """Whether an answer completes `future`."""


class Ports:
    """The table of one process's open ports. Thread: any."""

    def __init__(self) -> None:
        self._receivers: dict[int, Receiver] = {}
        # A process that was started anew under an old id must not take answers to the questions of the one before it.
        self._ids = count(int.from_bytes(os.urandom(5), "little") + 1)

    def open(self, receiver: Receiver) -> int:
        """A new port that delivers to `receiver`."""
        port = next(self._ids)
        self._receivers[port] = receiver
        return port

    def close(self, port: int) -> None:
        """Drop what still comes for `port`; harmless twice."""
        self._receivers.pop(port, None)

    def deliver(self, port: int, rank: int, flags: int, payload: Buffer, buffers: Sequence[memoryview]) -> None:
        """Hand a message to its receiver; dropped when that is gone."""
        receiver = self._receivers.get(port)
        if receiver is not None:
            receiver.on_message(rank, flags, payload, buffers)

    def mark(self) -> int:
        """A point in time: ports that are opened from now on lie behind it."""
        return next(self._ids)

    def lose(self, exited: ProcExited, before: int) -> None:
        """Tell every receiver whose port was opened before that mark that a proc is gone. Cost: O(open ports)."""
        for port, receiver in list(self._receivers.items()):
            if port < before:
                receiver.on_lost(exited)

    def fail_all(self, error: Exception) -> None:
        """End every wait; the process stops."""
        for receiver in list(self._receivers.values()):
            receiver.fail(error)
        self._receivers.clear()

    def forget_all(self) -> None:
        """Complete no future any more, whatever comes: the interpreter ends, and threads that still wait end with it, in silence."""
        self._receivers = _OnlyAnswers()

    def fail(self, port: int, error: Exception) -> None:
        """End one wait with an error."""
        receiver = self._receivers.pop(port, None)
        if receiver is not None:
            receiver.fail(error)

    def lose_one(self, port: int, exited: ProcExited) -> None:
        """Tell one receiver that a proc is gone."""
        receiver = self._receivers.get(port)
        if receiver is not None:
            receiver.on_lost(exited)

    def calls(self) -> list[Call]:
        """The calls and channels that wait here. Cost: O(open ports)."""
        return [receiver for receiver in list(self._receivers.values()) if isinstance(receiver, OneReply | Gather | Stream)]

    def call_at(self, port: int) -> Call | None:
        """The call that waits at `port`; None once it is over."""
        receiver = self._receivers.get(port)
        return receiver if isinstance(receiver, OneReply | Gather | Stream) else None

    def call_of(self, future: Future[Any]) -> Call | None:
        """The call whose answer completes `future`; None when it is no call's, or answered. Cost: O(open ports)."""
        return next((call for call in self.calls() if call.completes(future)), None)

    def __len__(self) -> int:
        return len(self._receivers)


class _OnlyAnswers(dict[int, Receiver]):
    """Keeps no calls. In the place of a table, so that a port that is opened late costs no question on the way of all others."""

    def __setitem__(self, port: int, receiver: Receiver) -> None:
        if isinstance(receiver, Answer):  # the runtime still asks its agent to end
            super().__setitem__(port, receiver)


class OneReply:
    """Waits for one reply of one rank (`call_one`, `choose`)."""

    __slots__ = ("_ports", "_rank", "_target", "future", "port")

    def __init__(self, ports: Ports, target: Target, rank: int) -> None:
        self._ports = ports
        self._target = target
        self._rank = rank
        self.future: Future[Any] = Future._new()
        self.port = ports.open(self)

    def on_message(self, rank: int, flags: int, payload: Buffer, buffers: Sequence[memoryview]) -> None:
        self._ports.close(self.port)
        if flags & Flag.DEAD:
            self.future._fail(supervision_error(self._target.endpoint, self._target.amend(messages.decode_fault(payload))))
        else:
            self.future._complete((flags, payload, buffers), decode_reply)

    def on_lost(self, exited: ProcExited) -> None:
        if exited.proc.uid == self._target.procs[self._rank]:
            self._ports.close(self.port)
            self.future._fail(supervision_error(self._target.endpoint, self._target.blame(self._rank, exited)))

    def fail(self, error: Exception) -> None:
        self.future._fail(error)

    @property
    def target(self) -> Target | None:
        return self._target

    def asked(self) -> list[int]:
        return [self._rank]

    def missing(self) -> list[int]:
        return [] if self.future._done else [self._rank]

    def completes(self, future: Future[Any]) -> bool:
        return future is self.future


class Answer:
    """Waits for the control message that answers a request."""

    __slots__ = ("_ports", "_proc_uid", "future", "port")

    def __init__(self, ports: Ports, proc_uid: str) -> None:
        self._ports = ports
        self._proc_uid = proc_uid
        self.future: Future[Any] = Future._new()
        self.port = ports.open(self)

    def on_message(self, rank: int, flags: int, payload: Buffer, buffers: Sequence[memoryview]) -> None:
        self._ports.close(self.port)
        self.future._complete(messages.decode_control(bytes(payload)))

    def on_lost(self, exited: ProcExited) -> None:
        if exited.proc.uid == self._proc_uid:
            self._ports.close(self.port)
            self.future._fail(ProcGoneError(exited.reason))

    def fail(self, error: Exception) -> None:
        self.future._fail(error)


class Answers:
    """Waits for the control messages with which all procs of a view answer a request."""

    __slots__ = ("_left", "_ports", "_ranks", "_slots", "_survivors", "future", "port")

    def __init__(self, ports: Ports, uids: Sequence[str], *, survivors: bool) -> None:
        """Args:
        uids: the proc of each rank.
        survivors: a proc that is gone answers with its `ProcExited`; otherwise it ends the wait.
        """
        self._ports = ports
        self._survivors = survivors
        self._ranks: dict[str, list[int]] = {}
        for rank, uid in enumerate(uids):
            self._ranks.setdefault(uid, []).append(rank)
        self._slots: list[messages.Control | None] = [None] * len(uids)
        self._left = len(uids)
        self.future: Future[list[messages.Control]] = Future._new()
        self.port = ports.open(self)
        if not self._left:
            self._end()

    def on_message(self, rank: int, flags: int, payload: Buffer, buffers: Sequence[memoryview]) -> None:
        self._put(rank, messages.decode_control(bytes(payload)))

    def on_lost(self, exited: ProcExited) -> None:
        for rank in self._ranks.get(exited.proc.uid, ()):
            if self._slots[rank] is not None:
                continue
            if self._survivors:
                self._put(rank, exited)
            else:
                self._ports.close(self.port)
                self.future._fail(ProcGoneError(exited.reason))

    def _put(self, rank: int, answer: messages.Control) -> None:
        if self._slots[rank] is None:
            self._slots[rank] = answer
            self._left -= 1
            if not self._left:
                self._end()

    def _end(self) -> None:
        self._ports.close(self.port)
        self.future._complete(self._slots)

    def fail(self, error: Exception) -> None:
        self.future._fail(error)


class ProcGoneError(RuntimeError):
    """A request found its proc gone."""


class Gather:
    """Waits for one reply of every rank (`call`)."""

    __slots__ = ("_finish", "_missing", "_ports", "_slots", "_target", "future", "port")

    def __init__(self, ports: Ports, target: Target, finish: Callable[[list[Reply]], Any]) -> None:
        """Args:
        finish: makes the value of the future from the replies in rank order, none of them failed.
        """
        self._ports = ports
        self._target = target
        self._finish = finish
        self._slots: list[Reply | None] = [None] * len(target.procs)
        self._missing = len(self._slots)
        self.future: Future[Any] = Future._new()
        self.port = ports.open(self)

    def on_message(self, rank: int, flags: int, payload: Buffer, buffers: Sequence[memoryview]) -> None:
        if flags & Flag.DEAD:
            self._ports.close(self.port)
            self.future._fail(supervision_error(self._target.endpoint, self._target.amend(messages.decode_fault(payload))))
        elif self._slots[rank] is None:
            self._slots[rank] = Reply(flags, payload, buffers)
            self._missing -= 1
            if not self._missing:
                self._ports.close(self.port)
                self.future._complete(self._slots, self._decode)

    def on_lost(self, exited: ProcExited) -> None:
        for rank, uid in enumerate(self._target.procs):
            if uid == exited.proc.uid and self._slots[rank] is None:
                self._ports.close(self.port)
                self.future._fail(supervision_error(self._target.endpoint, self._target.blame(rank, exited)))
                return

    def fail(self, error: Exception) -> None:
        self.future._fail(error)

    @property
    def target(self) -> Target | None:
        return self._target

    def asked(self) -> list[int]:
        return list(range(len(self._slots)))

    def missing(self) -> list[int]:
        return [rank for rank, reply in enumerate(self._slots) if reply is None]

    def completes(self, future: Future[Any]) -> bool:
        return future is self.future

    def _decode(self, slots: list[Reply]) -> Any:
        for reply in slots:
            if reply.failed:
                reply.take()
        return self._finish(slots)


class Stream:
    """Hands each next message, in arrival order, to the next future asked for (`stream`, channels).

    A rank that is gone has answered, too: with its `SupervisionError`. What the others answer is not lost behind that.
    """

    __slots__ = ("__weakref__", "_answered", "_broken", "_decode", "_lock", "_pending", "_ports", "_queue", "_remaining", "_target", "port")

    def __init__(self, ports: Ports, target: Target | None, decode: Callable[[tuple[int, Reply]], Any]) -> None:
        """Args:
        target: whose one reply each is waited for; None: anybody may send at any time, and nobody's death ends it.
        decode: makes the value of a future from (rank, reply).
        """
        self._ports = ports
        self._target = target
        self._remaining = None if target is None else len(target.procs)
        self._decode = decode
        self._lock = threading.RLock()
        self._queue: deque[tuple[int, Reply] | Exception] = deque()
        self._pending: deque[Future[Any]] = deque()
        self._answered: set[int] = set()
        self._broken: BaseException | None = None
        self.port = ports.open(self)

    def receive(self) -> Future[Any]:
        """A future of the next message not yet claimed."""
        future: Future[Any] = Future._new()
        with self._lock:
            if self._queue:
                self._hand(future, self._queue.popleft())
            elif self._broken is not None:
                future._fail(self._broken)
            else:
                self._pending.append(future)
        return future

    def close(self) -> None:
        """Take no more messages; what was received can still be claimed."""
        self._ports.close(self.port)

    def on_message(self, rank: int, flags: int, payload: Buffer, buffers: Sequence[memoryview]) -> None:
        if not flags & Flag.DEAD:
            self._put(rank, (rank, Reply(flags, payload, buffers)))
        elif self._target is not None:
            self._bury(rank, self._target.amend(messages.decode_fault(payload)))
        else:
            self.close()
            self.fail(supervision_error("port", messages.decode_fault(payload)))

    def on_lost(self, exited: ProcExited) -> None:
        if self._target is None:
            return
        for rank, uid in enumerate(self._target.procs):
            if uid == exited.proc.uid:
                self._bury(rank, self._target.blame(rank, exited))

    def _bury(self, rank: int, fault: Fault) -> None:
        assert self._target is not None
        with self._lock:
            if rank not in self._answered:
                self._put(rank, supervision_error(self._target.endpoint, fault))

    def _put(self, rank: int, item: tuple[int, Reply] | Exception) -> None:
        with self._lock:
            future = self._pending.popleft() if self._pending else None
            if future is None:
                self._queue.append(item)
            if self._remaining is not None:
                self._answered.add(rank)
                self._remaining -= 1
                if not self._remaining:
                    self.close()
        if future is not None:
            self._hand(future, item)

    def _hand(self, future: Future[Any], item: tuple[int, Reply] | Exception) -> None:
        if isinstance(item, Exception):
            future._fail(item)
        else:
            future._complete(item, self._decode)

    def fail(self, error: Exception) -> None:
        with self._lock:
            self._broken = error
            pending, self._pending = list(self._pending), deque()
        for future in pending:
            future._fail(error)

    @property
    def target(self) -> Target | None:
        return self._target

    def asked(self) -> list[int]:
        return [] if self._target is None else list(range(len(self._target.procs)))

    def missing(self) -> list[int]:
        return [rank for rank in self.asked() if rank not in self._answered]

    def completes(self, future: Future[Any]) -> bool:
        with self._lock:
            return any(pending is future for pending in self._pending)
