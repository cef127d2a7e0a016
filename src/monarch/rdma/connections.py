"""Data connections of a reader: how they are made, used again and given up.

    the owner's agent can be dialled     this process dials it
    it can't                             the owner is asked to let it dial this process (`LendMemory`); a ticket tells which wait it ends
    both are on this machine             the same, at a socket file beside that of this process

Rules of this file:
    1. At most so many connections to one agent at a time; who wants one more waits for his turn, up to his deadline.
    2. A connection that was idle may have been closed by the agent in the moment of its use: the same request is made once more
       on a fresh one. That is harmless: it moves the same bytes to the same place.
    3. After a failure in the middle of an answer a connection is closed, because nobody knows what comes next on it.

Read next: `tcp_transport.py`, which asks; `data_service.py`, which answers.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from monarch import config
from monarch._base.ids import ProcRef, between_hosts
from monarch._net.dialer import Denial, Failure
from monarch._net.loop import READ
from monarch._net.router import listen_at, socket_path
from monarch._runtime.services import DATA, LENT, lent_path
from monarch._wire.memory_messages import LendMemory
from monarch.rdma.channel import Channel
from monarch.rdma.data_frames import (
    MAX_TEXT_BYTES,
    REPLY_BYTES,
    Code,
    DataFrameError,
    Verb,
    WireSpan,
    decode_reply,
    encode_request,
    failure_of,
)
from monarch.rdma.errors import DeadlineError, OwnerGoneError, TransferError, UnreachableError
from monarch.rdma.handles import Handle
from monarch.rdma.transport import check_deadline
from monarch.rdma.workers import Workers

if TYPE_CHECKING:
    from monarch.actor.process import Process

_SWEEP_S = 1.0
_LEND_S = 10.0
"""How long the agent of an owner may take to dial this process."""
_TICKET_BYTES = 16
_CLOSE_S = 1.0
Dial = Callable[[float], Channel]
"""Makes a connection until a deadline; UnreachableError, DeadlineError."""


class Connections:
    """The connections to one agent. Thread: any."""

    def __init__(self, process: Process, where: str, most: int, dial: Dial) -> None:
        """Args:
        where: what they lead to, for people.
        most: how many there may be.
        """
        self._process = process
        self._where = where
        self._most = most
        self._dial = dial
        self._idle_s = config.seconds("rdma_idle_limit")
        self._idle: list[tuple[Channel, float]] = []
        """With when they became idle; the last one was used last."""
        self._busy: set[Channel] = set()
        self._num_dialling = 0
        self._is_sweeping = False
        self._closed = False
        self._changed = threading.Condition()

    def ask(self, verb: Verb, handle: Handle, spans: Sequence[WireSpan], views: Sequence[memoryview], deadline_s: float) -> None:
        """Make one request and take its answer.

        Args:
            views: local memory of the spans, one each.

        Raises:
            UnreachableError: there is no connection.
            TransferError and its other kinds: what the agent says; DeadlineError.
        """
        check_deadline(deadline_s)
        request = encode_request(verb, handle.ref.uid, handle.nonce, spans)
        while True:
            channel, is_fresh = self._take(deadline_s)
            exchange = Exchange(channel)
            try:
                exchange.run(verb, request, views, deadline_s)
            except TransferError:
                self._put_back(channel, is_usable=exchange.is_over)
                raise
            except OSError as exc:
                self._put_back(channel, is_usable=False)
                if is_fresh or exchange.has_answer:
                    text = f"the data connection to {self._where} broke: {exc.strerror or exc}"
                    raise TransferError(text, next="submit again; the host of the owner, or its agent, may have ended") from exc
                self._drop_idle()
            except BaseException:
                self._put_back(channel, is_usable=False)
                raise
            else:
                self._put_back(channel, is_usable=True)
                return

    # --- connections ---------------------------------------------------------------------------------------------

    def _take(self, deadline_s: float) -> tuple[Channel, bool]:
        """A connection, and whether it is a fresh one."""
        with self._changed:
            while True:
                if self._closed:
                    raise UnreachableError("this process is being shut down")
                while self._idle:
                    channel, _ = self._idle.pop()
                    if channel.is_quiet():
                        self._busy.add(channel)
                        return channel, False
                    channel.close()
                if len(self._busy) + self._num_dialling < self._most:
                    self._num_dialling += 1
                    break
                if not self._changed.wait(max(0.0, min(deadline_s - time.monotonic(), threading.TIMEOUT_MAX))):
                    raise DeadlineError
        fresh: Channel | None = None
        try:
            fresh = self._dial(deadline_s)
            return fresh, True
        finally:
            with self._changed:
                self._num_dialling -= 1
                if fresh is not None:
                    self._busy.add(fresh)
                else:
                    self._changed.notify()

    def _put_back(self, channel: Channel, *, is_usable: bool) -> None:
        with self._changed:
            self._busy.discard(channel)
            if is_usable and not self._closed and not channel.is_worn:
                self._idle.append((channel, time.monotonic()))
                if not self._is_sweeping:
                    self._is_sweeping = True
                    self._process.proc.loop.call_later(_SWEEP_S, self._sweep)
            else:
                channel.close()
            self._changed.notify()

    def _sweep(self) -> None:
        """Close what has been idle for long. Thread: net loop."""
        with self._changed:
            oldest_s = time.monotonic() - self._idle_s
            for channel, since_s in self._idle:
                if since_s <= oldest_s:
                    channel.close()
            self._idle = [pair for pair in self._idle if pair[1] > oldest_s]
            self._is_sweeping = bool(self._idle)
        if self._is_sweeping:
            self._process.proc.loop.call_later(_SWEEP_S, self._sweep)

    def _drop_idle(self) -> None:
        """One that was idle broke: so will the others."""
        with self._changed:
            for channel, _ in self._idle:
                channel.close()
            self._idle.clear()

    @property
    def num_open(self) -> int:
        """How many connections there are."""
        return len(self._idle) + len(self._busy)

    def close(self) -> None:
        """Close all of them; those in use are broken."""
        with self._changed:
            self._closed = True
            for channel, _ in self._idle:
                channel.close()
            self._idle.clear()
            for channel in self._busy:
                channel.interrupt()
            self._changed.notify_all()

    def abandon(self) -> None:
        """Close the descriptors only; for a fork."""
        for channel in [*self._busy, *(channel for channel, _ in self._idle)]:
            channel.abandon()


class _Dial:
    """One attempt to connect. Thread: net loop, except `ended` and what is behind it."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.socket: Any = None
        self.denial: Denial | None = None
        self._dialer: Any = None
        self._is_given_up = False

    def start(self, router: Any, address: str) -> None:
        """Begin."""
        self._dialer = router.open_connection(address, self._on_connected, self._on_failed)

    def _on_connected(self, sock: Any) -> None:
        if self._is_given_up:
            sock.close()
            return
        self.socket = sock
        self.ended.set()

    def _on_failed(self, denial: Denial) -> None:
        self.denial = denial
        self.ended.set()

    def give_up(self) -> None:
        """Nobody waits any more."""
        self._is_given_up = True
        if self.socket is not None:
            self.socket.close()
        elif self._dialer is not None:
            self._dialer.cancel()


def dial_agent(process: Process, agent: str, deadline_s: float) -> Channel:
    """Connect to the data service of the agent, or of the process that serves its own memory, at `agent`.

    Raises:
        OwnerGoneError: another one is at that address now, or none.
        UnreachableError: there is none, or it does not trust this process.
        DeadlineError: not in time.
    """
    dial = _Dial()
    proc = process.proc
    proc.loop.call_soon(dial.start, proc.router, f"{agent}/{DATA}")
    if not dial.ended.wait(_left(deadline_s)):
        proc.loop.call_soon(dial.give_up)
        raise DeadlineError
    if dial.denial is not None:
        if dial.denial.failure is Failure.GONE:
            raise OwnerGoneError(dial.denial.reason)
        hint = "the owner's host may be gone, or not reachable from here"
        raise UnreachableError(f"no data connection to {agent}: {dial.denial.reason}", next=hint)
    return Channel(dial.socket)


def _left(deadline_s: float) -> float:
    return max(0.0, min(deadline_s - time.monotonic(), threading.TIMEOUT_MAX))


class Borrower:
    """Gets connections from agents that can't be dialled. Thread: any."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._waiting: dict[bytes, _Wait] = {}
        self._listener: socket.socket | None = None
        """For agents of this machine."""
        self._lock = threading.Lock()
        self._readers = Workers("monarch-rdma-lent", 2)
        """Read tickets."""

    def dial(self, owner: ProcRef, deadline_s: float, *, by_owner: bool = False) -> Channel:
        """Have the agent of `owner`, or that process itself, dial this process; raises as `dial_agent`."""
        proc = self._process.proc
        own = proc.ref.address
        hint = "let one of the two be a process of a worker loop, or let the client listen: enable_transport, or attach to a gateway"
        if between_hosts(own):
            proc.router.takers[LENT] = self._on_connection
        elif _is_near(owner.address):
            self._listen(lent_path(own))
        else:
            raise UnreachableError("neither this process nor the host of the owner can be dialled", next=hint)
        ticket, wait = os.urandom(_TICKET_BYTES), _Wait()
        self._waiting[ticket] = wait
        try:
            answer = proc.request(owner, LendMemory(own, ticket, by_owner=by_owner))
            answer._when_done(lambda: wait.fail(answer._error))
            limit_s = min(_left(deadline_s), _LEND_S)
            if not wait.ended.wait(limit_s):
                check_deadline(deadline_s)
                text = f"the host of the owner did not connect to {own} within {_LEND_S:g} s"
                raise UnreachableError(text, next="look at the log of the owner's host agent; " + hint)
        finally:
            self._waiting.pop(ticket, None)
        if wait.channel is None:
            raise OwnerGoneError(str(wait.failure)) from wait.failure
        return wait.channel

    def _listen(self, path: str) -> None:
        with self._lock:
            if self._listener is None:
                self._listener = listen_at(path)
                self._listener.setblocking(False)
                self._process.proc.loop.watch(self._listener.fileno(), READ, self._on_ready)

    def _on_ready(self, _events: int) -> None:
        """Somebody of this machine connects. Thread: net loop."""
        with contextlib.suppress(OSError):  # nobody any more
            while self._listener is not None:
                self._on_connection(self._listener.accept()[0])

    def _on_connection(self, sock: Any) -> None:
        """An agent has dialled. Thread: net loop."""
        self._readers.start_task(lambda: self._read_ticket(Channel(sock)))

    def _read_ticket(self, channel: Channel) -> None:
        ticket = memoryview(bytearray(_TICKET_BYTES))
        try:
            channel.receive(ticket, time.monotonic() + _LEND_S)
        except (OSError, DeadlineError):
            channel.close()
            return
        wait = self._waiting.pop(bytes(ticket), None)
        if wait is None:  # nobody waits any more
            channel.close()
            return
        wait.channel = channel
        wait.ended.set()

    def close(self) -> None:
        """Take no more connections."""
        proc = self._process.proc
        proc.router.takers.pop(LENT, None)
        with self._lock:
            listener, self._listener = self._listener, None
        if listener is not None:
            proc.loop.unwatch(listener.fileno())
            with contextlib.suppress(OSError):
                os.unlink(listener.getsockname())
            listener.close()
        self._readers.close(_CLOSE_S)

    def abandon(self) -> None:
        """Close the descriptor only; for a fork."""
        if self._listener is not None:
            self._listener.close()


def _is_near(address: str) -> bool:
    """Whether a process is on this machine, and in the same file system."""
    return not between_hosts(address) and os.path.exists(socket_path(address))


class _Wait:
    """Somebody waits for a connection."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.channel: Channel | None = None
        self.failure: BaseException | None = None

    def fail(self, failure: BaseException | None) -> None:
        """There will be none; None: there may be."""
        if failure is not None:
            self.failure = failure
            self.ended.set()


class Exchange:
    """One request and its answer."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.has_answer = False
        """Something of the answer has come."""
        self.is_over = False
        """All of the answer has come."""

    def run(self, verb: Verb, request: bytes, views: Sequence[memoryview], deadline_s: float) -> None:
        """Send the request, and what is to be written; take the answer."""
        self._channel.send([request, *views] if verb is Verb.WRITE else [request], deadline_s)
        if verb is Verb.READ:
            self._take_bytes(views, deadline_s)
        else:
            self._take_end(deadline_s)
        self.is_over = True

    def _take_head(self, deadline_s: float) -> tuple[Code, int]:
        """What follows, and the length of it; raises what the agent says."""
        head = memoryview(bytearray(REPLY_BYTES))
        self._channel.receive(head, deadline_s)
        self.has_answer = True
        code, length = decode_reply(head)
        if code in (Code.OK, Code.STREAM):
            return code, length
        text = memoryview(bytearray(min(length, MAX_TEXT_BYTES)))
        self._channel.receive(text, deadline_s)
        self.is_over = code is not Code.BUSY
        raise failure_of(code, bytes(text).decode(errors="replace"))

    def _take_end(self, deadline_s: float) -> None:
        if self._take_head(deadline_s) != (Code.OK, 0):
            raise DataFrameError("an answer without data has some")

    def _take_bytes(self, views: Sequence[memoryview], deadline_s: float) -> None:
        code, left = Code.OK, 0
        for view in views:
            while len(view):
                if not left:
                    code, left = self._take_head(deadline_s)
                    if not left:
                        raise DataFrameError("an answer has no data")
                count = min(left, len(view))
                self._channel.receive(view[:count], deadline_s)
                view = view[count:]
                left -= count
                if not left and code is Code.STREAM:
                    self._take_end(deadline_s)
        if left:
            raise DataFrameError("an answer has more data than was asked for")
