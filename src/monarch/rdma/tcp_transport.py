"""The transport "tcp": the host agent of the owner reads and writes its memory for us, over several connections.

Neither the owner's interpreter nor its threads take part, so it does not matter what they do. Works between hosts wherever messages
do: directly, with TLS, and through gateways.

Rules of this file:
    1. Connections belong to an agent, not to an owner, and are made when they are needed, at most `num_threads` for each agent.
       Idle ones are closed after `rdma_idle_limit`.
    2. An owner whose agent can't be dialled, such as a client that does not listen, has it dial the reader.

Read next: `connections.py` for the connections, `data_service.py` for the other end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from monarch import config
from monarch._base.ids import ProcRef
from monarch._net.credentials import encoded_credentials
from monarch._wire.memory_messages import LendMemory, ShareFile, ShareMemory
from monarch.rdma.connections import Borrower, Connections, dial_agent
from monarch.rdma.handles import Handle
from monarch.rdma.regions import Region, RegionTable
from monarch.rdma.served_transport import ServedTransport
from monarch.rdma.workers import Workers

if TYPE_CHECKING:
    from monarch.actor.process import Process

_CLOSE_S = 1.0


_logger = logging.getLogger("monarch.rdma")


class TcpTransport(ServedTransport):
    """See the head of this file. Thread: any."""

    name = "tcp"

    def __init__(self, process: Process, table: Callable[[], RegionTable]) -> None:
        """Args:
        table: the regions of this process.
        """
        super().__init__()
        self.num_threads = max(config.value("rdma_tcp_connections"), config.value("rdma_tcp_fallback_parallelism"))
        self._process = process
        self._table = table
        self._told = ""
        """The agent that knows of the table."""
        self.borrower = Borrower(process)
        """Gets connections from owners whose agents can't be dialled."""
        self._lender = Workers("monarch-rdma-lend", 1)

    def register(self, region: Region) -> bytes | None:
        """The address of the agent that serves it; nothing when that can't be dialled, and the owner is to be asked."""
        if not self.serves(region):
            return None
        agent = self._process.proc.host or self._process.host_identity()
        if not agent.address.startswith(("tcp://", "tls://")):
            return b""
        if not self._tell(agent):
            self._tell_files(agent, [region])
        return agent.address.encode()

    def _tell(self, agent: ProcRef) -> bool:
        """Let the agent know of this process's table, unless it does."""
        if self._told == agent.address:
            return False
        self._process.need_agent(agent)
        table = self._table()
        self._process.proc.tell(agent, ShareMemory(table.address, table.nonce))
        self._told = agent.address
        self._tell_files(agent, table.regions())
        return True

    def _tell_files(self, agent: ProcRef, regions: Sequence[Region]) -> None:
        nonce = self._table().nonce
        for region in regions:
            if region.memory.file is not None:
                self._process.proc.tell(agent, ShareFile(nonce, region.generation, *region.memory.file))

    def lend(self, message: LendMemory) -> None:
        """A reader can't dial the agent: have that dial the reader. Thread: net loop; the agent may have to be started first."""
        self._lender.start_task(lambda: self._lend(message))

    def _lend(self, message: LendMemory) -> None:
        agent = self._process.proc.host or self._process.host_identity()
        try:
            self._tell(agent)
        except (RuntimeError, OSError) as exc:  # this process is being shut down, or has no room for another one
            _logger.warning("memory can't be lent: reader=%s reason=%s", message.reader, exc)
            return
        self._process.proc.tell(agent, msgspec.structs.replace(message, credentials=encoded_credentials()))

    def _key_of(self, handle: Handle) -> str:
        """The address of the agent, or the owner that is to be asked."""
        return handle.blobs[self.name].decode(errors="replace") or handle.ref.uid

    def _connect_to(self, handle: Handle) -> Connections:
        agent = handle.blobs[self.name].decode(errors="replace")
        dial = partial(dial_agent, self._process, agent) if agent else partial(self.borrower.dial, handle.ref)
        return Connections(self._process, agent or f"the host of {handle.ref.uid}", self.num_threads, dial)

    def close(self) -> None:
        """Close all connections."""
        super().close()
        self.borrower.close()
        self._lender.close(_CLOSE_S)

    def abandon(self) -> None:
        """See `Transport`."""
        super().abandon()
        self.borrower.abandon()
