"""Ways to other hosts for those who can't dial them: a client behind a gateway, and the processes of its host.

    client          its portal: a tunnel over the link to the gateway's agent
    its host        the client's *outlet*, a socket file: they say where to, and the client leads the connection into its portal

Rules of this file:
    1. A way says how a connection is made, not what is said on it: `dialer.py` goes on as with any socket.
    2. What goes through the outlet is moved by the net thread of the client, never by its interpreter's other threads.

Read next: `portals.py` for the gateway's end.
"""

from __future__ import annotations

import errno
import os
import socket
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from monarch._base.addresses import Address, parse_address
from monarch._base.ids import GATEWAY_ONLY, split_address
from monarch._net.dialer import Route, WayLostError
from monarch._net.loop import READ, NetLoop
from monarch._net.sockets import prepare

if TYPE_CHECKING:
    from monarch._net.liveness import Pulse
    from monarch._net.stream import Link
    from monarch._net.tunnel import Portal, Tunnel

_LENGTH_BYTES = 2
_REDIAL_S = 0.005
OUTLET = "out"
"""Name of the outlet in the run directory of a client."""


class Way(Protocol):
    """How the processes of other hosts are reached."""

    def route_to(self, address: str) -> Route | None:
        """The route to a process; None: there is none, so it is asked to dial."""

    def silence_s(self, sock: Any, pulse: Pulse, now_s: float) -> float | None:
        """For how long nothing was heard of the machine at the other end of a connection; None where that can't be known."""


class Direct:
    """By TCP, as far as addresses are those of a network."""

    def route_to(self, address: str) -> Route | None:
        """See `Way`; ValueError for malformed addresses."""
        place, target = split_address(address)
        if not place.startswith(("tcp://", "tls://")):
            return None
        return Route(parse_address(place), target)

    def silence_s(self, sock: Any, pulse: Pulse, now_s: float) -> float | None:
        """See `Way`."""
        return pulse.silence_of(sock, now_s)


class ThroughPortal:
    """The way of a client behind a gateway. Thread: net loop."""

    def __init__(self, place: str, dialled: Address, link: Link, portal: Portal) -> None:
        """Args:
        place: what the gateway's agent calls itself.
        dialled: how this process reaches it.
        """
        self.link = link
        self.lost = ""
        """Why there is no way any more."""
        self._place = place
        self._dialled = dialled
        self._portal = portal
        self._tunnels: dict[int, Tunnel] = {}
        """By the descriptor of this end, which TLS over it shares."""

    def route_to(self, address: str) -> Route | None:
        """See `Way`."""
        place, target = _place_and_target(address, self._place)
        if place == self._place and (not target or target.startswith("@")):
            return Route(self._dialled, target)
        return Route(parse_address(place), target, partial(self._open, place))

    def silence_s(self, sock: Any, pulse: Pulse, now_s: float) -> float | None:
        """See `Way`; of what goes through a tunnel, what the gateway says."""
        tunnel = self._tunnels.get(sock.fileno())
        return pulse.silence_of(sock, now_s) if tunnel is None or tunnel.closed else tunnel.silence_s

    def relay(self, sock: socket.socket, place: str) -> None:
        """Lead a connection of a process of this host there, whatever it is that it says."""
        if self.lost:
            sock.close()
        else:
            self._portal.relay(sock, place)

    def _open(self, place: str) -> socket.socket:
        if self.lost:
            raise WayLostError(f"the gateway {self._place} is lost: {self.lost}")
        self._tunnels = {fd: tunnel for fd, tunnel in self._tunnels.items() if not tunnel.closed}
        sock, tunnel = self._portal.open(place)
        self._tunnels[sock.fileno()] = tunnel
        return sock


class ThroughOutlet:
    """The way of a process on the host of a client behind a gateway. Thread: net loop."""

    def __init__(self, path: str) -> None:
        self._path = path

    def route_to(self, address: str) -> Route | None:
        """See `Way`."""
        place, target = _place_and_target(address, "")
        known = parse_address(place) if place else Address("ipc", path="the gateway")
        return Route(known, target, partial(self._open, place))

    def silence_s(self, sock: Any, pulse: Pulse, now_s: float) -> float | None:
        """See `Way`: the gateway resets what is silent for too long."""
        return pulse.silence_of(sock, now_s)

    def _open(self, place: str) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            prepare(sock)
            code = sock.connect_ex(self._path)
            if code in (errno.ENOENT, errno.ECONNREFUSED):
                raise WayLostError("the client of this host has ended")
            if code:
                raise OSError(code, os.strerror(code))
            data = place.encode()
            sock.send(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
        except BaseException:
            sock.close()
            raise
        return sock


class Outlet:
    """Where the processes of a client's host go out. Thread: net loop."""

    def __init__(self, loop: NetLoop, listener: socket.socket, way: ThroughPortal) -> None:
        """Args:
        listener: a Unix socket in a folder of this user's alone.
        """
        self._loop = loop
        self._listener = listener
        self._way = way
        self._unread: dict[socket.socket, bytes] = {}
        """Connections that have not said yet where to."""
        listener.setblocking(False)
        loop.watch(listener.fileno(), READ, lambda _mask: self._on_connection())

    def _on_connection(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError:  # no descriptor left, or closed; who waits in the backlog is not told a second time
                if self._listener.fileno() >= 0:
                    self._loop.call_later(_REDIAL_S, self._on_connection)
                return
            sock.setblocking(False)
            self._unread[sock] = b""
            self._loop.watch(sock.fileno(), READ, partial(self._on_head, sock))
            self._on_head(sock, READ)

    def _on_head(self, sock: socket.socket, _mask: int) -> None:
        if sock not in self._unread:
            return
        try:
            while (missing := _missing_of(self._unread[sock])) and (data := sock.recv(missing)):
                self._unread[sock] += data
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            missing = 1
        head = self._unread[sock]
        self._let_go(sock)
        if missing:  # it ended before it had said where to
            sock.close()
        else:
            self._way.relay(sock, head[_LENGTH_BYTES:].decode(errors="replace"))

    def _let_go(self, sock: socket.socket) -> socket.socket:
        del self._unread[sock]
        self._loop.unwatch(sock.fileno())
        return sock

    def close(self) -> None:
        """Take no more connections."""
        self._loop.unwatch(self._listener.fileno())
        self._listener.close()
        for sock in list(self._unread):
            self._let_go(sock).close()

    def abandon(self) -> None:
        """Close the descriptors only; for a forked child."""
        for sock in (self._listener, *self._unread):
            sock.close()


def _missing_of(head: bytes) -> int:
    """How many bytes of the length and the address are still to come."""
    if len(head) < _LENGTH_BYTES:
        return _LENGTH_BYTES - len(head)
    return _LENGTH_BYTES + int.from_bytes(head[:_LENGTH_BYTES], "big") - len(head)


def _place_and_target(address: str, gateway: str) -> tuple[str, str]:
    """Where a tunnel leads to, and which process is meant there."""
    place, target = split_address(address)
    return (gateway if place == GATEWAY_ONLY else place), target
