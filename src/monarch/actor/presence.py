"""Presence: how the processes of other hosts reach a client and what runs on its host.

    Presence     not at all: they ask the client, over a link that it has made, to dial them; or it is on their machine
    Listening    at an address of this machine (`transport.py`)
    BehindGateway   at an address of its gateway (`gateway.py`)

The client is in front of its host: connections come to it, and those for its agent or a proc it hands over to the agent, once each.

Read next: `client.py`, which has one.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from monarch._base.addresses import Address
from monarch._base.ids import GATEWAY_ONLY, agent_at, between_hosts, split_address
from monarch._net.router import listen_at, socket_path
from monarch._runtime.platform import SYSTEM

if TYPE_CHECKING:
    from monarch._base.ids import ProcRef
    from monarch._net.net_router import NetRouter
    from monarch._runtime.proc import Proc


class Presence:
    """A client that others reach on its own machine only."""

    place = ""
    """What the addresses of the client and its host begin with; "": socket files of this machine."""

    def settle(self, run_dir: str) -> None:
        """Say where the socket files are; before the client has links."""
        SYSTEM.settle_client(self.place, run_dir)

    def begin(self, proc: Proc, run_dir: str) -> None:
        """Let others in. Thread: net loop."""

    def name_of(self, address: str) -> str:
        """What a worker is called in the cluster that this client reaches at `address`."""
        return address

    @property
    def gateway(self) -> ProcRef | None:
        """The agent without which nobody else is reached."""
        return None


class Listening(Presence):
    """A client that listens for other hosts."""

    def __init__(self, address: Address, listener: socket.socket) -> None:
        self.place = address.url
        self._listener = listener

    def begin(self, proc: Proc, run_dir: str) -> None:
        """See `Presence`."""
        net_router_of(proc).listen_to_others(self._listener, tls=self.place.startswith("tls://"))


class BehindGateway(Presence):
    """A client whose gateway passes connections on, both ways."""

    def __init__(self, dialled: Address, called: str, name: str) -> None:
        """Args:
        dialled: the gateway's address as this client reaches it.
        called: its address as the gateway itself, and the cluster, calls it.
        name: of this client, unique at the gateway.
        """
        self.dialled = dialled
        self._called = called
        self._name = name
        place = split_address(called)[0]
        self.place = f"{place}/{name}" if between_hosts(place) else f"{GATEWAY_ONLY}{name}"

    def settle(self, run_dir: str) -> None:
        """See `Presence`."""
        doors = {} if self.dialled.is_network else {self._called: socket_path(self.dialled.url)}
        SYSTEM.settle_client(self.place, run_dir, doors)

    def begin(self, proc: Proc, run_dir: str) -> None:
        """See `Presence`."""
        from monarch._net.ways import OUTLET

        net_router_of(proc).join(agent_at(self._called), self.dialled, self._name, listen_at(os.path.join(run_dir, OUTLET)))

    def name_of(self, address: str) -> str:
        """See `Presence`."""
        return self._called if address == self.dialled.url else address

    @property
    def gateway(self) -> ProcRef:
        """See `Presence`."""
        return agent_at(self._called)


def net_router_of(proc: Proc) -> NetRouter:
    """The router of a process that the operating system runs."""
    from monarch._net.net_router import NetRouter

    assert isinstance(proc.router, NetRouter)
    return proc.router
