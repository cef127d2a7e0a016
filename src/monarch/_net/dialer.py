"""Dialers: one attempt each to make a connection to a process of another host.

    connect (`connector.py`), or go through a gateway -> preface, status -> [TLS] -> proofs -> a socket that can carry frames

Nothing here waits: every step goes on when its socket is ready. An agent answers the status at once, so that has a limit in
time. Behind it the target itself speaks, which may be busy; only its kernel has to be alive (`liveness.py`).

Read next: `handshake.py` for the bytes, `greeter.py` for the other end.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

from monarch._base.addresses import Address
from monarch._net.connector import Attempt, Connector
from monarch._net.credentials import Credentials
from monarch._net.handshake import (
    DialerProof,
    HandshakeError,
    Preface,
    StatusCode,
    StatusReader,
    check_status,
    encode_preface,
)
from monarch._net.loop import READ, WRITE, NetLoop
from monarch._net.sockets import prepare

_STATUS_S = 10.0


class Failure(Enum):
    """Why there is no connection."""

    REFUSED = "refused"
    """The machine is there, and nobody listens."""
    GONE = "gone"
    """The agent says that there is no such process."""
    DENIED = "denied"
    """The two do not trust, or do not understand, each other; another attempt would end the same way."""
    UNREACHABLE = "unreachable"
    """Anything else; it may go better next time."""


_KINDS = {StatusCode.GONE: Failure.GONE, StatusCode.BUSY: Failure.UNREACHABLE, StatusCode.NOBODY: Failure.REFUSED}


class WayLostError(ConnectionError):
    """The only way to other hosts is gone, and will not come back."""


class Route(NamedTuple):
    """How a process is reached."""

    address: Address
    """Of its host's agent, in the terms of whoever makes the connection; its scheme says whether TLS follows."""
    target: str
    """Which process there; "": the agent itself."""
    open: Callable[[], socket.socket] | None = None
    """Makes a socket that leads there, at once, or raises OSError; None: by TCP."""


class Denial(NamedTuple):
    """Why an attempt has failed."""

    failure: Failure
    reason: str


class Dialer(Attempt):
    """One attempt. Thread: net loop."""

    def __init__(
        self,
        loop: NetLoop,
        route: Route,
        credentials: Credentials,
        on_connected: Callable[[Any], None],
        on_failed: Callable[[Denial], None],
    ) -> None:
        """Args:
        on_connected: told the socket, over which the peer is now known to hold the secret.
        on_failed: told why there is none. One of the two is called, once, unless the attempt is cancelled.
        """
        super().__init__(loop)
        self._route = route
        self._credentials = credentials
        self._on_connected = on_connected
        self._on_failed = on_failed
        self._connector: Connector | None = None
        self._status = StatusReader()
        self._proof: DialerProof | None = None
        self._over = False

    def start(self) -> None:
        """Begin."""
        if self._route.open is not None:
            self._loop.call_soon(self._open, self._route.open)
            return
        self._connector = Connector(self._loop, self._route.address, self._on_socket, self._on_no_socket)
        self._connector.start()

    def _open(self, make: Callable[[], socket.socket]) -> None:
        if self._over:
            return
        try:
            sock = make()
        except OSError as exc:
            self._on_no_socket(exc)
        else:
            prepare(sock)
            self._on_socket(sock)

    @property
    def is_connecting(self) -> bool:
        """The other machine has not answered yet."""
        return self._connector is not None

    def cancel(self) -> None:
        """Nobody wants the connection any more."""
        self._over = True
        if self._connector is not None:
            self._connector.cancel()
        self._drop()

    # --- connecting ----------------------------------------------------------------------------------------------

    def _on_socket(self, sock: socket.socket) -> None:
        self._connector = None
        self._socket = sock
        tls = self._route.address.scheme == "tls"
        first = encode_preface(Preface(self._route.target, tls))
        if not tls:
            self._proof = DialerProof(self._credentials.secret, self._route.target, b"")
            first += self._proof.first_bytes()
        silent = f"{self._route.address} took the connection and said nothing"
        self._limit(_STATUS_S, lambda: self._fail(Denial(Failure.UNREACHABLE, silent)))
        self._loop.watch(sock.fileno(), READ, self._on_status_event)
        self._send(first)
        self._on_status_event(READ)

    def _on_no_socket(self, exc: OSError) -> None:
        self._connector = None
        if isinstance(exc, WayLostError):
            self._fail(Denial(Failure.GONE, str(exc)))
            return
        refused = exc.errno == errno.ECONNREFUSED
        self._fail(Denial(Failure.REFUSED if refused else Failure.UNREACHABLE, exc.strerror or str(exc)))

    # --- handshake -----------------------------------------------------------------------------------------------

    def _on_status_event(self, _mask: int) -> None:
        try:
            while (needed := self._status.needed()) and (data := self._receive(needed)):
                self._status.feed(data)
        except HandshakeError as exc:
            self._fail(Denial(Failure.DENIED, str(exc)))
            return
        if self._over or self._status.needed():
            return
        status = self._status.status
        if status.code == StatusCode.OK:
            try:
                check_status(status, self._credentials.secret)
            except HandshakeError as exc:
                self._fail(Denial(Failure.DENIED, str(exc)))
                return
        else:
            self._fail(Denial(_KINDS.get(status.code, Failure.DENIED), status.text or status.code.name.lower()))
            return
        self._stop_clock()  # from here on the target itself answers, which may be busy
        if self._proof is None:
            self._start_tls()
        else:
            self._loop.watch(self._socket.fileno(), READ, self._on_proof_event)
            self._on_proof_event(READ)

    def _start_tls(self) -> None:
        try:
            self._socket = self._credentials.dialer_tls(self._socket)
        except (HandshakeError, OSError, ValueError) as exc:
            self._fail(Denial(Failure.DENIED, str(exc)))
            return
        self._on_tls_event(READ)

    def _on_tls_event(self, _mask: int) -> None:
        try:
            step = self._socket.handshake_step()
        except (HandshakeError, OSError) as exc:
            self._fail(Denial(Failure.DENIED, str(exc)))
            return
        if step != "done":
            self._loop.watch(self._socket.fileno(), READ if step == "read" else READ | WRITE, self._on_tls_event)
            return
        self._proof = DialerProof(self._credentials.secret, self._route.target, self._socket.binding())
        self._loop.watch(self._socket.fileno(), READ, self._on_proof_event)
        self._send(self._proof.first_bytes())
        self._on_proof_event(READ)

    def _on_proof_event(self, _mask: int) -> None:
        proof = self._proof
        assert proof is not None
        try:
            while (needed := proof.needed()) and (data := self._receive(needed)):
                self._send(proof.feed(data))
        except HandshakeError as exc:
            self._send(bytes(32))  # proves nothing, so that the other end can say in its log what was wrong
            self._fail(Denial(Failure.DENIED, str(exc)))
            return
        if not self._over and not proof.needed():
            self._succeed()

    def _receive(self, count: int) -> bytes:
        """Up to `count` bytes; b"" when none are there, or the attempt has failed."""
        if self._over:
            return b""
        buffer = bytearray(count)
        try:
            received = self._socket.recvmsg_into((buffer,))[0]
        except (BlockingIOError, InterruptedError):
            return b""
        except HandshakeError as exc:
            self._fail(Denial(Failure.DENIED, str(exc)))
            return b""
        except OSError as exc:
            self._fail(Denial(Failure.UNREACHABLE, exc.strerror or str(exc)))
            return b""
        if not received:
            self._fail(Denial(Failure.UNREACHABLE, "the connection was closed during the handshake"))
        return bytes(buffer[:received])

    def _send(self, data: bytes) -> None:
        """Send a few bytes; a fresh socket has room for them."""
        if self._over or not data:
            return
        try:
            sent = self._socket.sendmsg((data,))
        except OSError as exc:
            if self._status.needed():
                self._on_status_event(READ)  # a tunnel that was refused at once is closed behind the refusal
            else:
                self._receive(1)  # what the other end says against us is behind this, if it said anything
            self._fail(Denial(Failure.UNREACHABLE, exc.strerror or str(exc)))
            return
        if sent != len(data):
            self._fail(Denial(Failure.UNREACHABLE, "the connection has no room for a handshake"))

    # --- the end -------------------------------------------------------------------------------------------------

    def _succeed(self) -> None:
        self._over = True
        self._on_connected(self._let_go())

    def _fail(self, denial: Denial) -> None:
        if not self._over:
            self._over = True
            self._drop()
            self._on_failed(denial)
