"""Services of a host agent: what others connect to at its address that is no process. They belong to upper layers.

A connection asks for a service by a name that begins with `~`, which no process has. It has proved the job's secret like any other
when the service gets it. A service is loaded with the first message or connection for it.

Rules of this file:
    1. A service has threads of its own. The agent's loop only hands over, and never waits for one.

Read next: `visitors.py`, which leads connections here; `monarch/rdma/data_service.py`, the one there is.
"""

from __future__ import annotations

import importlib
import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from monarch._base.ids import between_hosts
from monarch._net import credentials
from monarch._net.handshake import StatusCode
from monarch._net.router import socket_path
from monarch._wire.memory_messages import LendMemory, ShareFile, ShareMemory

if TYPE_CHECKING:
    from monarch._net.greeter import Greeting
    from monarch._net.net_router import NetRouter

_logger = logging.getLogger("monarch.net")
DATA = "~data"
LENT = "~lent"
"""What the agent of an owner asks a reader for that can't dial it."""
_PROVIDERS = {DATA: "monarch.rdma.data_service"}
"""Module that has `make_service()`, by name of the service."""


class Service(Protocol):
    """One service. Thread: the agent's loop."""

    def share(self, uid: str, pid: int, message: ShareMemory | ShareFile) -> None:
        """A process of this host lets its memory be served."""

    def on_lost(self, uid: str, pid: int) -> None:
        """A process has closed its link to the agent."""

    def on_connection(self, sock: Any, peer: str, greeting: bytes = b"") -> None:
        """Somebody who belongs to the job has connected, or was dialled and is sent `greeting` first; the socket is the service's."""

    def close(self) -> None:
        """The agent ends."""


class Services:
    """The services of one agent. Thread: its loop."""

    def __init__(self) -> None:
        self._loaded: dict[str, Service] = {}

    def on_message(self, message: ShareMemory | ShareFile | LendMemory, uid: str, pid: int, router: Callable[[], NetRouter]) -> None:
        """A process of this host lets its memory be served, to everybody or to somebody who can't dial this agent."""
        service = self._load(DATA)
        if not isinstance(message, LendMemory):
            service.share(uid, pid, message)
            return
        if message.credentials:
            credentials.set_credentials(credentials.decode(message.credentials))
        lend(service, message, router())

    def lead(self, name: str, greeting: Greeting) -> None:
        """A connection is for the service `name`."""
        if name not in _PROVIDERS:
            greeting.refuse(StatusCode.GONE, f"this agent has no service {name}")
            return
        peer = greeting.peer
        greeting.accept(lambda sock: self._load(name).on_connection(sock, peer))

    def on_lost(self, uid: str, pid: int) -> None:
        """See `Service`."""
        for service in self._loaded.values():
            service.on_lost(uid, pid)

    def close(self) -> None:
        """End all of them."""
        for service in self._loaded.values():
            service.close()
        self._loaded.clear()

    def _load(self, name: str) -> Service:
        if name not in self._loaded:
            self._loaded[name] = importlib.import_module(_PROVIDERS[name]).make_service()
        return self._loaded[name]


def lend(service: Service, message: LendMemory, router: Any) -> None:
    """Dial the reader who has asked for it, and serve that connection. Thread: net loop.

    Args:
        router: of this process.
    """
    reader = message.reader
    if not between_hosts(reader):
        try:
            service.on_connection(_connect(lent_path(reader)), reader, message.ticket)
        except OSError as exc:  # it has ended, or waits no more
            _logger.warning("memory can't be lent: reader=%s reason=%s", reader, exc)
        return
    router.open_connection(
        f"{reader}/{LENT}",
        lambda sock: service.on_connection(sock, reader, message.ticket),
        lambda denial: _logger.warning("memory can't be lent: reader=%s reason=%s", reader, denial.reason),
    )


def lent_path(address: str) -> str:
    """The socket file at which a process of this host, at an `ipc://` address, takes connections that it has asked for."""
    return f"{socket_path(address)}.{LENT}"


def _connect(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.connect(path)  # at once, or not at all
    except OSError:
        sock.close()
        raise
    return sock


def split_service(name: str) -> tuple[str, str]:
    """A target as the process, or the agent, that is meant and the service there; "" for no service."""
    rest, _, last = name.rpartition("/")
    return (rest, last) if last.startswith("~") else (name, "")
