"""Visitors: connections from other hosts that a host agent passes on to its procs.

The agent reads whom a connection is for and hands its descriptor over, through the Unix socket of that proc. It has proved nothing
yet, so it may cost the proc and the agent little, also when the proc does not take it: it may be stopped, or hold its
interpreter for an hour.

Rules of this file:
    1. At most `_MAX_WAITING` are on their way to a proc, and `_MAX_WAITING_IN_ALL` to all. The kernel has a limit, too, for each user, and
       whoever meets that one loses the link over which he sends.
    2. A stranger hears whether a process of that name takes connections, and nothing else of it.

Read next: `host.py`, the agent; `_net/greeter.py` for what happens before and behind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from monarch._base.ids import ProcRef, split_agent, split_target
from monarch._net.handshake import Preface, StatusCode
from monarch._net.stream import Link, LinkClosedError
from monarch._runtime.record import Record
from monarch._runtime.services import Services, split_service
from monarch._wire.contact_messages import HandOver

if TYPE_CHECKING:
    from monarch._net.greeter import Greeting

_MAX_WAITING = 32
_MAX_WAITING_IN_ALL = 128


class Visitors:
    """Passes connections on. Thread: net loop."""

    def __init__(self, link_to: Callable[[ProcRef], Link], service: str = "") -> None:
        """Args:
        link_to: the link to a process of this host.
        service: id of the service that this agent is; "": it has none.
        """
        self.services = Services()
        self._service = service
        self._link_to = link_to
        self._records: dict[str, Record] = {}
        """By the name that others dial."""
        self._waiting: dict[str, int] = {}
        """How many a process has not taken yet, by uid; none: it is not in here."""

    def add(self, record: Record) -> None:
        """Somebody may ask for this process."""
        self._records[_name_of(record)] = record

    def remove(self, record: Record) -> None:
        """It is forgotten."""
        self._records.pop(_name_of(record), None)

    def lead(self, preface: Preface, greeting: Greeting) -> None:
        """A connection is for a process of this host, if its name is known, or for a service that may have been here."""
        service, name = split_target(preface.target)
        if service not in ("", self._service):
            here = f"service {self._service}" if self._service else "a service without an id"
            greeting.refuse(StatusCode.GONE, f"service {service} is not here (any more): {here} is at this address now")
            return
        if not name:
            greeting.accept()
            return
        at, service = split_service(name)
        record = self._records.get(at)
        if record is None and service:
            self.services.lead(service, greeting)
            return
        if record is None or (record.exited is not None and not record.exited.again):
            greeting.refuse(StatusCode.GONE, "no such process runs here, or it has ended")
        elif not record.up or record.exited is not None:
            greeting.refuse(StatusCode.BUSY, "the process is not up yet")
        elif self._is_full(record.ref.uid):
            greeting.refuse(StatusCode.BUSY, "the process has not taken the connections before this one yet")
        else:
            self._pass_on(record.ref, preface, greeting)

    def _is_full(self, uid: str) -> bool:
        return self._waiting.get(uid, 0) >= _MAX_WAITING or sum(self._waiting.values()) >= _MAX_WAITING_IN_ALL

    def _pass_on(self, ref: ProcRef, preface: Preface, greeting: Greeting) -> None:
        sock = greeting.take()
        if sock is None:
            return
        message = HandOver(preface.target, preface.tls, greeting.peer)
        # It has just ended, or no descriptor is left for the copy: whoever dials will ask again.
        with sock, contextlib.suppress(LinkClosedError, OSError):
            self._link_to(ref).send_descriptor(message, sock.fileno())
            self._waiting[ref.uid] = self._waiting.get(ref.uid, 0) + 1

    def on_taken(self, uid: str) -> None:
        """A process has taken one."""
        left = self._waiting.get(uid, 0) - 1
        if left > 0:
            self._waiting[uid] = left
        else:
            self._waiting.pop(uid, None)

    def on_lost(self, uid: str, pid: int) -> None:
        """A process has ended; what was on its way to it went with its socket."""
        self._waiting.pop(uid, None)
        self.services.on_lost(uid, pid)


def _name_of(record: Record) -> str:
    return split_agent(record.ref.address)[1]
