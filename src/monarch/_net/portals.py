"""Portals of one process: who is reached through its links, and where its links lead to.

    client behind a gateway   one portal, on its link to the gateway's agent
    agent of a gateway        one portal for each client that has registered, on the link that client has made

Rules of this file:
    1. A gateway opens connections to addresses that monarch can have, and passes bytes on. It takes no part in what is said.
    2. What the gateway could not reach is told as an agent would tell it: by a status (`refusal`), so a dialer knows nothing of tunnels.
    3. Whether a machine has fallen silent only the gateway can see. It tells the client, which judges as of a connection of its
       own; what is silent for the gateway's own limit is reset.

Read next: `tunnel.py` for the bytes, `ways.py` for how a client uses its portal, docs/design/tunnels.md.
"""

from __future__ import annotations

import errno
import os
import socket
from typing import TYPE_CHECKING

from monarch._base.addresses import parse_address
from monarch._base.ids import split_address
from monarch._net.connector import Connector
from monarch._net.handshake import Preface, Status, StatusCode, encode_preface, encode_status
from monarch._wire.frames import FrameError, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from monarch._net.greeter import Greeter, Greeting
    from monarch._net.loop import NetLoop
    from monarch._net.stream import FrameHandler, Link
    from monarch._net.tunnel import Portal
    from monarch._wire.frames import Frame

_MOST_NAME = 64
VISITORS = "net"
"""In the folder of an agent that has a socket file for an address: where tunnels from other hosts arrive."""


def refusal(reason: str, code: int) -> bytes:
    """The status that stands for a refused tunnel."""
    known = code in StatusCode._value2member_map_ and code != StatusCode.OK
    return encode_status(Status(StatusCode(code) if known else StatusCode.BUSY, False, reason))


class Portals:
    """The portals of a router. Thread: net loop."""

    def __init__(self, loop: NetLoop, own_address: str, greeter: Greeter, on_frame: FrameHandler) -> None:
        """Args:
        on_frame: told the frames of links with a portal that belong to no tunnel.
        """
        self._loop = loop
        self._own_place = split_address(own_address)[0]
        self._greeter = greeter
        self._rest = on_frame
        self._portals: dict[Link, Portal] = {}
        self._names: dict[str, Portal] = {}

    def __len__(self) -> int:
        return len(self._portals)

    def __contains__(self, link: object) -> bool:
        return link in self._portals

    def links(self) -> set[Link]:
        """The links that carry tunnels."""
        return set(self._portals)

    def open(self, link: Link) -> Portal:
        """The portal of a client on its link to the gateway."""
        from monarch._net.tunnel import Portal, accepting
        from monarch._wire.tunnels import Side

        portal = Portal(self._loop, link, Side.CLIENT, accepting(self._admit), refusal)
        self._portals[link] = portal
        return portal

    def register(self, link: Link, name: str) -> None:
        """The client at the other end of `link` is reached through this process from now on, as `name`.

        Raises:
            FrameError: that is no name, or the link has one.
        """
        from monarch._net.tunnel import Portal
        from monarch._wire.tunnels import Side

        if not 0 < len(name) <= _MOST_NAME or not name.isprintable() or "/" in name or link in self._portals:
            raise FrameError(f"a client can't register as {name!r}")
        self._portals[link] = self._names[name] = Portal(self._loop, link, Side.GATEWAY, self._connect, refusal)
        link.on_frame = self.on_frame

    def on_frame(self, link: Link, frame: Frame, buffers: Sequence[memoryview]) -> None:
        """Serve a frame of a link that has a portal."""
        if frame.kind == Kind.TUNNEL:
            self._portals[link].on_frame(frame)
        else:
            self._rest(link, frame, buffers)

    def relay(self, preface: Preface, greeting: Greeting) -> bool:
        """Pass a connection on to the registered client that it is for, or whose host it is for; False: it is for none."""
        portal = self._names.get(preface.target.partition("/")[0])
        if portal is None:
            return False
        sock = greeting.pass_on()
        if sock is not None:
            portal.relay(sock, greeting.peer, encode_preface(preface))
        return True

    def look(self, now_s: float, beat_s: float, limit_s: float) -> None:
        """Care for tunnels to machines that have fallen silent; see `Portal.look`."""
        for portal in list(self._portals.values()):
            portal.look(now_s, beat_s, limit_s)

    def closed(self, link: Link, reason: str) -> None:
        """A link is closed, and with it its tunnels."""
        portal = self._portals.pop(link, None)
        if portal is not None:
            self._names = {name: other for name, other in self._names.items() if other is not portal}
            portal.close(reason)

    def drain(self) -> None:
        """Send the last words of those who have closed their ends."""
        for portal in list(self._portals.values()):
            portal.drain()

    def abandon(self) -> None:
        """Close the descriptors only; for a forked child."""
        for portal in self._portals.values():
            portal.abandon()

    # --- where tunnels lead --------------------------------------------------------------------------------------

    def _admit(self, sock: socket.socket, peer: str) -> None:
        self._greeter.admit(sock, f"{peer}, through a gateway")

    def _connect(self, address: str, on_connected: Callable[[socket.socket], None], on_failed: Callable[..., None]) -> None:
        """Connect for a client; "" is this gateway itself."""
        from monarch._net.tunnel import accepting

        if address in ("", self._own_place):
            accepting(lambda sock, _: self._admit(sock, "a client"))(address, on_connected, on_failed)
            return
        try:
            where = parse_address(address)
        except (ValueError, NotImplementedError) as exc:
            on_failed(str(exc), StatusCode.REFUSED)
            return
        if where.is_network and not where.is_wildcard and where.fd is None:
            Connector(self._loop, where, on_connected, lambda exc: _tell(exc, address, on_failed)).start()
        elif where.scheme == "ipc" and self._own_place.startswith("ipc://"):
            _connect_to_file(f"{where.path}.d/{VISITORS}", address, on_connected, on_failed)
        else:
            on_failed(f"this gateway leads to no {address!r}", StatusCode.REFUSED)


def _connect_to_file(path: str, address: str, on_connected: Callable[[socket.socket], None], on_failed: Callable[..., None]) -> None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    code = sock.connect_ex(path)
    if code:
        sock.close()
        gone = errno.ECONNREFUSED if code == errno.ENOENT else code
        _tell(OSError(gone, os.strerror(code)), address, on_failed)
    else:
        on_connected(sock)


def _tell(exc: OSError, address: str, on_failed: Callable[..., None]) -> None:
    code = StatusCode.NOBODY if exc.errno == errno.ECONNREFUSED else StatusCode.BUSY
    on_failed(f"{exc.strerror or exc} (the gateway says of {address})", code)
