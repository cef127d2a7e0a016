"""Greeters: how a process receives connections from other hosts, up to the first frame.

    preface -> (whom is it for?) -> status -> [TLS] -> proofs -> a socket that can carry frames

The agent of a host takes all its connections. It reads the preface, not a byte more, and passes the socket of one that is
for a proc on to that proc, which goes on from there; so whoever ends up with the frames has seen the proof himself.

Rules of this file:
    1. Before its proof a connection costs one descriptor and at most `MAX_UNPROVEN_BYTES`, for at most `_GREETING_S`.
    2. There are at most `_MAX_GREETINGS` of them, and they hold at most a quarter of this process's descriptors. One more, or a
       lack of descriptors, ends the oldest one of the machine that has most of them: a flood from there drowns itself.
    3. What is refused is counted, and said once in a while, not each time: "taken" is the sum of all other counts, and of those
       that are still under way.
    4. Who has proved nothing hears nothing that he could not find out by connecting.

Read next: `handshake.py` for the bytes, `dialer.py` for the other end.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any

from monarch._net.credentials import Credentials
from monarch._net.handshake import (
    MAX_UNPROVEN_BYTES,
    AcceptorProof,
    HandshakeError,
    Preface,
    PrefaceReader,
    Status,
    StatusCode,
    encode_status,
)
from monarch._net.loop import READ, WRITE, NetLoop, Timer
from monarch._net.sockets import origin_of, prepare, text_of
from monarch._net.stream import abandon

_logger = logging.getLogger("monarch.net")
_GREETING_S = 10.0
_MAX_GREETINGS = 512
_MAX_TLS_GREETINGS = 128
"""Each costs some 60 KB while OpenSSL is at work, instead of 3."""
_SHARE = 4
"""They get one of so many descriptors at most."""
_BACKLOG = 4096
_MAX_ACCEPTS = 64
"""Connections taken in one turn of the loop."""
_SAY_EVERY_S = 10.0
_REDIAL_S = 0.005


class Greeter:
    """The unproven connections of one process. Thread: net loop."""

    def __init__(
        self,
        loop: NetLoop,
        credentials: Callable[[], Credentials],
        route: Callable[[Preface, Greeting], None],
        on_connected: Callable[[Any], None],
    ) -> None:
        """Args:
        route: told whom a connection is for; answers with `accept`, `refuse`, or `take` or `pass_on` and a place of its own.
        on_connected: told the socket of a peer that has proved itself.
        """
        self.loop = loop
        self.credentials = credentials
        self.route = route
        self.on_connected = on_connected
        self.tls = False
        """Whether the listening address asks for TLS."""
        self.counts: Counter[str] = Counter()
        """How many connections were "taken"; of those "proved", "passed" on, and refused by what for."""
        self._greetings: dict[Greeting, None] = {}
        """Oldest first."""
        self._origins: dict[str, dict[Greeting, None]] = {}
        """The same by where they come from."""
        self._sweep_timer: Timer | None = None
        """For the oldest. One for all: those of a flood would outlive it in the loop."""
        self._listeners: dict[socket.socket, Timer | None] = {}
        """Each with the timer that waits for a descriptor."""
        self._unsaid: Counter[str] = Counter()
        self._example = ""
        self._say_timer: Timer | None = None

    def listen(self, sock: socket.socket, *, tls: bool) -> None:
        """Take connections from `sock`, which listens."""
        self.tls = tls
        self._listeners[sock] = None
        sock.setblocking(False)
        sock.listen(_BACKLOG)  # an inherited socket may have a short queue, and who finds it full waits for a second
        self.loop.watch(sock.fileno(), READ, lambda _mask: self._on_connection(sock))

    def _on_connection(self, listener: socket.socket) -> None:
        for _ in range(_MAX_ACCEPTS):
            if listener not in self._listeners:
                return
            try:
                sock, place = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError:  # no descriptor left, as a rule; who waits in the backlog is not told a second time
                self._make_room("this process has no descriptor left")
                self._accept_later(listener)
                return
            self._begin(sock, text_of(place), lambda greeting: greeting.start(), tls=self.tls)
        self.loop.call_soon(self._on_connection, listener)

    def _accept_later(self, listener: socket.socket) -> None:
        timer = self._listeners[listener]
        if timer is None or not timer.pending:
            self._listeners[listener] = self.loop.call_later(_REDIAL_S, lambda: self._on_connection(listener))

    def admit(self, sock: socket.socket, peer: str) -> None:
        """Take a connection that came another way than through a listening socket."""
        self._begin(sock, peer, lambda greeting: greeting.start(), tls=self.tls)

    def visit(self, sock: socket.socket, preface: Preface, peer: str) -> None:
        """Take a connection whose preface was read, and not answered, by whoever is in front of this process."""
        self._begin(sock, peer, lambda greeting: greeting.visit(preface), tls=preface.tls)

    def go_on(self, sock: socket.socket, preface: Preface, peer: str, on_connected: Callable[[Any], None] | None = None) -> None:
        """Take a connection whose preface the agent has read, and answered; `on_connected`: see `Greeting.accept`."""
        self._begin(sock, peer, lambda greeting: greeting.go_on(preface, on_connected), tls=preface.tls)

    def _begin(self, sock: socket.socket, peer: str, begin: Callable[[Greeting], None], *, tls: bool) -> None:
        self.counts["taken"] += 1
        try:
            prepare(sock)
        except OSError as exc:  # it was closed meanwhile; some kernels tell by this
            sock.close()
            self.count("broken", peer, exc.strerror or str(exc))
            return
        if len(self._greetings) >= most_greetings(tls=tls):
            self._make_room("too many connections at once that have not proved themselves")
        greeting = Greeting(self, sock, peer)
        self._greetings[greeting] = None
        self._origins.setdefault(greeting.origin, {})[greeting] = None
        if self._sweep_timer is None:
            self._sweep_timer = self.loop.call_later(_GREETING_S, self._sweep)
        begin(greeting)

    def is_heard_from(self, origin: str) -> bool:
        """Whether somebody from there (see `origin_of`) is about to prove himself."""
        return origin in self._origins

    def _make_room(self, why: str) -> None:
        """End the oldest of the machine that has most."""
        if self._greetings:
            crowd = max(self._origins.values(), key=len)
            next(iter(crowd)).give_up(why, "crowd")

    def _sweep(self) -> None:
        """End those that had their time."""
        self._sweep_timer = None
        now_s = self.loop.now_s()
        while (oldest := next(iter(self._greetings), None)) is not None:
            left_s = oldest.began_s + _GREETING_S - now_s
            if left_s > 0:
                self._sweep_timer = self.loop.call_later(left_s, self._sweep)
                return
            oldest.give_up(f"no proof within {_GREETING_S:g} s", "slow")

    def remove(self, greeting: Greeting) -> None:
        """It is over."""
        if greeting in self._greetings:
            del self._greetings[greeting]
            crowd = self._origins[greeting.origin]
            del crowd[greeting]
            if not crowd:
                del self._origins[greeting.origin]

    def count(self, kind: str, peer: str, reason: str) -> None:
        """A connection came to nothing."""
        self.counts[kind] += 1
        self._unsaid[kind] += 1
        self._example = f"{peer}: {reason}"
        if self._say_timer is None:
            self._say()
            self._say_timer = self.loop.call_later(_SAY_EVERY_S, self._say_rest)

    def _say(self) -> None:
        what = ", ".join(f"{kind} {number}" for kind, number in sorted(self._unsaid.items()))
        _logger.warning("connections refused: %s; the last one %s", what, self._example)
        self._unsaid.clear()

    def _say_rest(self) -> None:
        self._say_timer = None
        if self._unsaid:
            self._say()
            self._say_timer = self.loop.call_later(_SAY_EVERY_S, self._say_rest)

    def close(self) -> None:
        """Take no more connections, and drop those that have not proved themselves."""
        for listener, timer in self._listeners.items():
            self.loop.unwatch(listener.fileno())
            listener.close()
            if timer is not None:
                timer.cancel()
        self._listeners.clear()
        for greeting in list(self._greetings):
            greeting.drop()
        if self._unsaid:
            self._say()
        for timer in (self._say_timer, self._sweep_timer):
            if timer is not None:
                timer.cancel()
        self._say_timer = self._sweep_timer = None

    def abandon(self) -> None:
        """Close the descriptors only; for a forked child."""
        for listener in self._listeners:
            listener.close()
        for greeting in self._greetings:
            greeting.abandon()


class Greeting:
    """One connection that has not proved itself. Thread: net loop."""

    def __init__(self, greeter: Greeter, sock: socket.socket, peer: str) -> None:
        self.peer = peer
        """Where it comes from, for people."""
        self.origin = origin_of(peer)
        """The machine, or the network of somebody who has many addresses."""
        self.began_s = greeter.loop.now_s()
        self._greeter = greeter
        self._loop = greeter.loop
        self._socket: Any = sock
        self._reader = PrefaceReader()
        self._preface = Preface("", False)
        self._proof: AcceptorProof | None = None
        self._over = False
        self._on_connected = greeter.on_connected

    def start(self) -> None:
        """Read the preface."""
        self._loop.watch(self._socket.fileno(), READ, self._on_preface_event)

    def visit(self, preface: Preface) -> None:
        """The preface was read, and found right, by somebody else."""
        self._preface = preface
        self._greeter.route(preface, self)

    def go_on(self, preface: Preface, on_connected: Callable[[Any], None] | None = None) -> None:
        """The preface was read, and answered, by the agent."""
        self._preface = preface
        self._on_connected = on_connected or self._on_connected
        self._start_proof()

    def _on_preface_event(self, _mask: int) -> None:
        try:
            while (needed := self._reader.needed()) and (data := self._receive(needed)):
                self._reader.feed(data)
            if self._over or self._reader.needed():
                return
            preface = self._preface = self._reader.preface
            if preface.tls != self._greeter.tls:
                wanted, came = ("tls", "tcp") if self._greeter.tls else ("tcp", "tls")
                raise HandshakeError(f"this is a {wanted}:// address; you dialled {came}://", next=f"dial {wanted}:// there")
        except HandshakeError as exc:
            self.refuse(StatusCode.REFUSED, str(exc))
            return
        self._loop.unwatch(self._socket.fileno())
        self._greeter.route(preface, self)

    # --- what `route` answers ------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """The connection has ended meanwhile."""
        return self._over

    def accept(self, on_connected: Callable[[Any], None] | None = None) -> None:
        """It is for this process.

        Args:
            on_connected: told the socket of the peer that has proved itself; None: the greeter's own is.
        """
        self._on_connected = on_connected or self._on_connected
        if self._welcome():
            self._start_proof()

    def refuse(self, code: StatusCode, reason: str) -> None:
        """There is nobody for it here."""
        if not self._answer(Status(code, False, reason)):
            return
        with contextlib.suppress(OSError):
            # What came behind the preface: a kernel that throws it away at the close tells by a reset, faster than the status.
            self._socket.recv(MAX_UNPROVEN_BYTES)
        if code is StatusCode.REFUSED:
            self.give_up(reason, "refused")
        else:  # nothing to wonder about: processes end, and start
            self._greeter.counts[code.name.lower()] += 1
            self.drop()

    def take(self) -> socket.socket | None:
        """It is for another process: the socket, with the status sent; None when it has ended meanwhile."""
        if not self._welcome():
            return None
        return self.pass_on()

    def pass_on(self) -> socket.socket | None:
        """It is for a process that answers the preface itself: the socket; None when it has ended meanwhile."""
        if self._over:
            return None
        sock: socket.socket = self._let_go()
        self._greeter.counts["passed"] += 1
        return sock

    def _welcome(self) -> bool:
        try:
            secret = self._greeter.credentials().secret
        except (ValueError, OSError) as exc:  # the environment names a secret that can't be used
            self.give_up(str(exc), "credentials")
            return False
        return self._answer(Status(StatusCode.OK, bool(secret), ""))

    def _answer(self, status: Status) -> bool:
        if self._over:
            return False
        try:
            self._socket.send(encode_status(status))
        except OSError as exc:
            self.give_up(exc.strerror or str(exc), "broken")
            return False
        return True

    # --- proofs --------------------------------------------------------------------------------------------------

    def _start_proof(self) -> None:
        credentials = self._greeter.credentials()
        if self._preface.tls:
            try:
                self._socket = credentials.acceptor_tls(self._socket)
            except (HandshakeError, OSError, ValueError) as exc:
                self.give_up(str(exc), "tls")
                return
            self._on_tls_event(READ)
        else:
            self._expect_proof(b"")

    def _on_tls_event(self, _mask: int) -> None:
        try:
            step = self._socket.handshake_step()
        except (HandshakeError, OSError) as exc:
            self.give_up(str(exc), "tls")
            return
        if step == "done":
            self._expect_proof(self._socket.binding())
        else:
            self._loop.watch(self._socket.fileno(), READ if step == "read" else READ | WRITE, self._on_tls_event)

    def _expect_proof(self, binding: bytes) -> None:
        self._proof = AcceptorProof(self._greeter.credentials().secret, self._preface.target, binding)
        self._loop.watch(self._socket.fileno(), READ, self._on_proof_event)
        self._on_proof_event(READ)

    def _on_proof_event(self, _mask: int) -> None:
        proof = self._proof
        assert proof is not None
        try:
            while (needed := proof.needed()) and (data := self._receive(needed)):
                answer = proof.feed(data)
                if answer:
                    self._socket.sendmsg((answer,))
        except HandshakeError as exc:
            self.give_up(str(exc), "proof")
            return
        except OSError as exc:
            self.give_up(exc.strerror or str(exc), "broken")
            return
        if not self._over and not proof.needed():
            self._greeter.counts["proved"] += 1
            sock = self._let_go()
            self._on_connected(sock)

    def _receive(self, count: int) -> bytes:
        if self._over:
            return b""
        buffer = bytearray(count)
        try:
            received = int(self._socket.recvmsg_into((buffer,))[0])
        except (BlockingIOError, InterruptedError):
            return b""
        except OSError as exc:
            self.give_up(exc.strerror or str(exc), "broken")
            return b""
        if not received:
            self.give_up("it was closed before its proof", "closed")
        return bytes(buffer[:received])

    # --- the end -------------------------------------------------------------------------------------------------

    def give_up(self, reason: str, kind: str) -> None:
        """End the connection, and count it as `kind`."""
        if not self._over:
            self.drop()
            self._greeter.count(kind, self.peer, reason)

    def drop(self) -> None:
        """End the connection."""
        if not self._over:
            self._let_go().close()

    def abandon(self) -> None:
        """Close the descriptor only."""
        abandon(self._socket)

    def _let_go(self) -> Any:
        self._over = True
        self._greeter.remove(self)
        self._loop.unwatch(self._socket.fileno())
        return self._socket


def most_greetings(*, tls: bool) -> int:
    """How many connections that have proved nothing this process may have."""
    most = _MAX_TLS_GREETINGS if tls else _MAX_GREETINGS
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(most, soft // _SHARE)) if soft != resource.RLIM_INFINITY else most
