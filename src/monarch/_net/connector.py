"""Connectors: one attempt each to make a TCP connection to another host.

    resolve the name -> connect to its addresses, one after the other -> a socket

Read next: `dialer.py`, which speaks over the socket; `portals.py`, where a gateway connects for its clients.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

from monarch._base.addresses import Address
from monarch._net import resolver
from monarch._net.loop import WRITE, NetLoop, Timer
from monarch._net.sockets import prepare

_CONNECT_S = 5.0
"""For each address of a name."""


class Attempt:
    """A socket that is on its way to be useful, and the time that it has for that. Thread: net loop."""

    def __init__(self, loop: NetLoop) -> None:
        self._loop = loop
        self._socket: Any = None
        self._timer: Timer | None = None

    def _limit(self, seconds: float, then: Callable[[], None]) -> None:
        """So long, and no longer."""
        self._stop_clock()
        self._timer = self._loop.call_later(seconds, then)

    def _stop_clock(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _let_go(self) -> Any:
        """The socket, which somebody else looks after from now on."""
        self._stop_clock()
        sock, self._socket = self._socket, None
        self._loop.unwatch(sock.fileno())
        return sock

    def _drop(self) -> None:
        if self._socket is not None:
            self._let_go().close()
        self._stop_clock()


class Connector(Attempt):
    """One attempt. Thread: net loop."""

    def __init__(
        self, loop: NetLoop, address: Address, on_connected: Callable[[socket.socket], None], on_failed: Callable[[OSError], None]
    ) -> None:
        """Args:
        on_connected, on_failed: one of the two is called, once, unless the attempt is cancelled. ECONNREFUSED: nobody listens there.
        """
        super().__init__(loop)
        self._address = address
        self._on_connected = on_connected
        self._on_failed = on_failed
        self._places: list[tuple[int, Any]] = []
        self._last = OSError(errno.EADDRNOTAVAIL, "no address")
        self._over = False
        self._resolution: resolver.Resolution | None = None

    def start(self) -> None:
        """Begin."""
        self._resolution = resolver.resolve(self._address, lambda result: self._loop.call_soon(self._on_resolved, result))

    def cancel(self) -> None:
        """Nobody wants the connection any more."""
        self._over = True
        if self._resolution is not None:
            self._resolution.cancel()
        self._drop()

    def _on_resolved(self, result: Sequence[tuple[int, Any]] | OSError) -> None:
        if self._over:
            return
        if isinstance(result, OSError):
            self._fail(result)
            return
        self._places = list(result)
        self._try_next()

    def _try_next(self) -> None:
        if not self._places:
            self._fail(self._last)
            return
        family, place = self._places.pop(0)
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as exc:  # no descriptor left, or no such family here
            self._next_because(exc)
            return
        self._socket = sock
        prepare(sock)
        code = sock.connect_ex(place)
        if code not in (0, errno.EINPROGRESS, errno.EAGAIN):
            self._next_because(OSError(code, os.strerror(code)))
            return
        self._limit(_CONNECT_S, self._on_late)
        self._loop.watch(sock.fileno(), WRITE, self._on_event)

    def _on_late(self) -> None:
        self._next_because(TimeoutError(errno.ETIMEDOUT, f"no answer within {_CONNECT_S:g} s"))

    def _on_event(self, _mask: int) -> None:
        sock = self._socket
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not code and _is_own(sock):
            code = errno.ECONNREFUSED
        if code:
            self._next_because(OSError(code, os.strerror(code)))
            return
        self._over = True
        self._on_connected(self._let_go())

    def _next_because(self, exc: OSError) -> None:
        self._last = exc
        self._drop()
        self._try_next()

    def _fail(self, exc: OSError) -> None:
        self._over = True
        self._on_failed(exc)


def _is_own(sock: socket.socket) -> bool:
    """Whether a socket is connected to itself: the kernel may choose, as its own port, the one of this machine that it dials in vain."""
    try:
        return bool(sock.getsockname() == sock.getpeername())
    except OSError:  # the connection has ended already
        return False
