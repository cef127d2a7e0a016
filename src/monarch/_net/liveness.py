"""Liveness: for how long nothing has been heard of the machine at the other end of a connection.

Its kernel acknowledges what it receives, whatever its processes do. Three states tell different things:

    idle               keepalive asks every `_PROBE_S` (`sockets.prepare`), so an acknowledgement is never older than that and a round trip
    data on its way    it is acknowledged as it arrives; a slow network acknowledges slowly, but all the time
    no room there      the process does not read, and its kernel says so each time it is asked, which is ever more rarely

In the last state an old acknowledgement means nothing; a question without an answer does.

Read next: `net_router.py`, which asks and decides.
"""

from __future__ import annotations

import socket
import struct
import sys
from typing import Any, NamedTuple

_INFO = struct.Struct("=2xBBB19xI24xII")
"""Some fields of `struct tcp_info` (linux/tcp.h): those of `Signs`, in this order."""


class Signs(NamedTuple):
    """What the kernel knows of a connection."""

    retransmits: int
    probes: int
    """Questions whether there is room again, or whether anybody is there, that have not been answered."""
    backoff: int
    """How often the time between two questions was doubled."""
    unacknowledged: int
    """Segments on their way."""
    data_age_ms: int
    """How long ago something came; its acknowledgements do not count as such unless they are news."""
    age_ms: int
    """How long ago the last acknowledgement came."""


class Pulse:
    """Judges one connection, look by look. Thread: net loop."""

    def __init__(self) -> None:
        self._unanswered_s: float | None = None

    def silence_of(self, sock: Any, now_s: float) -> float | None:
        """`silence_s` of a connection; None where that can't be known."""
        signs = signs_of(sock)
        return None if signs is None else self.silence_s(signs, now_s)

    def silence_s(self, signs: Signs, now_s: float) -> float:
        """For how long the machine at the other end has owed an answer, or been silent."""
        heard_s = min(signs.age_ms, signs.data_age_ms) / 1000
        if signs.unacknowledged or not signs.backoff:
            self._unanswered_s = None
            return heard_s
        if not signs.probes:
            self._unanswered_s = None
            return 0.0
        if self._unanswered_s is None:
            self._unanswered_s = now_s
        return min(heard_s, now_s - self._unanswered_s)


def signs_of(sock: Any) -> Signs | None:
    """What the kernel knows of a TCP connection; None where that can't be known."""
    if sys.platform != "linux" or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        return Signs(*_INFO.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)))
    except OSError:  # the connection is gone, and the loop is about to hear of it
        return None
