"""Outreach: how a process and those of other hosts come together when they can't simply dial each other.

    it can't be dialled     whoever knows the way to it is asked to have it dial: agents and clients ask on (`Reach`, `DialMe`)
    it is behind this one   a client is in front of its own host, and hands connections for it over to its agent
    it is this one          its agent has read whom a connection is for, and hands it over

Read next: `visitors.py` for the agent's side, `_net/net_router.py` for connections.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from typing import TYPE_CHECKING

from monarch._base.ids import ProcRef, split_address
from monarch._net.stream import Link, LinkClosedError
from monarch._wire.contact_messages import DialMe, HandOver, Reach, TookOver
from monarch._wire.frames import FrameError

if TYPE_CHECKING:
    from monarch._net.greeter import Greeting
    from monarch._net.handshake import Preface
    from monarch._runtime.proc import Proc

_logger = logging.getLogger("monarch.net")
_REACH_S = 10.0
"""How long somebody who can't be dialled may take to dial."""


class Outreach:
    """The ways of one process to others, and of others to it, that are no plain connection. Thread: net loop."""

    def __init__(self, proc: Proc) -> None:
        self._proc = proc

    def seek(self, ref: ProcRef) -> None:
        """A process can't be dialled from here: it is asked to dial, by whoever knows the way."""
        proc = self._proc
        if proc.host is None:
            proc.fates.on_unreachable(ref, "it is on another machine, at an address that is of use on that machine only")
            return
        proc.tell(proc.host, Reach(ref, proc.ref))
        proc.loop.call_later(_REACH_S, lambda: self._give_up(ref))

    def _give_up(self, ref: ProcRef) -> None:
        if not self._proc.router.is_connected(ref):
            self._proc.fates.on_unreachable(ref, f"it can't be dialled from here, and did not dial within {_REACH_S:g} s")

    def help(self, request: Reach) -> None:
        """Somebody of another host seeks a process that this one may know."""
        proc = self._proc
        if request.target.uid == proc.ref.uid:
            proc.router.dial_back(request.seeker)
        elif proc.platform.is_near(request.target):
            proc.tell(request.target, DialMe(request.seeker))

    def lead(self, preface: Preface, greeting: Greeting) -> None:
        """A connection from another host came to this client, which is in front of its host's agent."""
        from monarch._net.handshake import StatusCode

        host = self._proc.host
        agent = "" if host is None else split_address(host.address)[1]
        if host is None or not agent or agent not in (preface.target, preface.target.rpartition("/")[0]):
            greeting.refuse(StatusCode.GONE, "no such process is on the host of this client, or it has ended")
            return
        sock = greeting.pass_on()
        if sock is None:
            return
        with sock, contextlib.suppress(LinkClosedError, OSError):  # the agent has just ended, or no descriptor is left for the copy
            message = HandOver(preface.target, preface.tls, greeting.peer)
            self._proc.router.link_to(host, dial=False).send_descriptor(message, sock.fileno())

    def take(self, link: Link, message: HandOver) -> None:
        """A connection from another host is for this process.

        Raises:
            FrameError: it does not come from the agent.
        """
        proc = self._proc
        if proc.host is None or link.peer != proc.host:
            raise FrameError("only its agent hands connections over to a proc")
        from monarch._net.handshake import Preface

        proc.tell(proc.host, TookOver())
        fd = link.take_descriptor()
        if fd is None:  # this process may have no more of them, so the kernel has closed the connection; who dials will do so again
            _logger.warning("a connection was lost, because this process has no descriptor left: peer=%s", message.peer)
            return
        proc.router.greet(socket.socket(fileno=fd), Preface(message.target, message.tls), message.peer)
