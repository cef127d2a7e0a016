"""Sockets between hosts: their options, and what the kernel knows of the other end.

The kernel of the peer acknowledges what it receives, whatever the peer's process does: a held interpreter lock, a stopped
process or a full buffer do not stop it, and a slow transfer keeps it talking. So its silence, and nothing else, is the sign
of a dead link or machine. Idle connections are probed by the kernel's keepalive.

Read next: `liveness.py`, which asks.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Any

PROBE_S = 1
"""How often the kernel asks an idle connection's other end whether it is there; it counts in whole seconds."""
_PROBES = 120
"""More than any limit of ours: this process decides, not the kernel."""
_MAPPED = bytes(10) + b"\xff\xff"
"""In front of an IPv4 address that a socket for both takes for IPv6."""


def prepare(sock: socket.socket) -> None:
    """Set the options of a TCP socket between hosts; it becomes non-blocking."""
    sock.setblocking(False)
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", PROBE_S), ("TCP_KEEPALIVE", PROBE_S), ("TCP_KEEPINTVL", PROBE_S), ("TCP_KEEPCNT", _PROBES)):
        option = getattr(socket, name, None)
        if option is not None:
            with contextlib.suppress(OSError):  # not every kernel has every one
                sock.setsockopt(socket.IPPROTO_TCP, option, value)


def text_of(place: Any) -> str:
    """`host:port`, or `[host]:port` of IPv6."""
    if not isinstance(place, tuple):
        return str(place)
    return f"[{place[0]}]:{place[1]}" if ":" in place[0] else f"{place[0]}:{place[1]}"


def origin_of(peer: str) -> str:
    """Who shares the limits of `peer`: an IPv4 address, a /64 of IPv6, which is what one machine is given."""
    host = peer.rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        network = socket.inet_pton(socket.AF_INET6, host)
    except OSError:
        return host
    return socket.inet_ntop(socket.AF_INET, network[12:]) if network.startswith(_MAPPED) else network[:8].hex()
