"""The transport "owner": the process that owns memory serves it itself, where the kernel lets nobody else touch it.

That is so under a strict Yama, in namespaces of users, and for a process that has made itself unreadable (`PR_SET_DUMPABLE`). The owner
does what its host agent does otherwise: it has a data service of its own, over its own memory, which the kernel never denies it.

Rules of this file:
    1. It comes behind all that leave the owner alone, and the log says once that it is used: an owner that holds its interpreter lock, or
       is stopped, serves nobody.
    2. An owner that can be dialled is; another one is asked to dial the reader, as an agent would.

Read next: `data_service.py` for the service, `tcp_transport.py` for the same with the agent.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from monarch._base.ids import ProcRef, between_hosts
from monarch._runtime.mailbox import ProcGoneError
from monarch._runtime.services import DATA, lend
from monarch._wire.memory_messages import LendMemory, ShareMemory
from monarch._wire.messages import Ping
from monarch.rdma.connections import Borrower, Connections, dial_agent
from monarch.rdma.data_service import DataService
from monarch.rdma.errors import OwnerGoneError, TransferError, UnreachableError
from monarch.rdma.handles import Handle
from monarch.rdma.regions import Region, RegionTable
from monarch.rdma.served_transport import ServedTransport
from monarch.rdma.transport import Piece

if TYPE_CHECKING:
    from monarch.actor.process import Process

_PING_S = 1.0
_logger = logging.getLogger("monarch.rdma")


class OwnerTransport(ServedTransport):
    """See the head of this file. Thread: any."""

    name = "owner"
    num_threads = 2

    def __init__(self, process: Process, table: Callable[[], RegionTable], borrower: Borrower) -> None:
        """Args:
        table: the regions of this process.
        borrower: gets connections from owners that can't be dialled.
        """
        super().__init__()
        self._process = process
        self._table = table
        self._borrower = borrower
        self._service: DataService | None = None
        self._has_told = False

    # --- as an owner ---------------------------------------------------------------------------------------------

    def register(self, region: Region) -> bytes | None:
        """Nothing to know; None for memory of a device. Nothing is started."""
        if not self.serves(region):
            return None
        self._process.proc.router.takers[DATA] = self._on_connection
        return b""

    def lend(self, message: LendMemory) -> None:
        """A reader can't dial this process, which is to dial the reader. Thread: net loop."""
        lend(self._own_service(), message, self._process.proc.router)

    def _on_connection(self, sock: Any) -> None:
        """A reader has dialled this process. Thread: net loop."""
        self._own_service().on_connection(sock, "a reader")

    def _own_service(self) -> DataService:
        if self._service is None:
            table = self._table()
            self._service = DataService()
            self._service.share(self._process.proc.ref.uid, os.getpid(), ShareMemory(table.address, table.nonce))
        return self._service

    # --- as a holder of handles ----------------------------------------------------------------------------------

    def connect(self, handle: Handle, deadline_s: float) -> None:
        """Ask the owner whether it is there; see `Transport`."""
        super().connect(handle, deadline_s)
        if not self._has_told:
            self._has_told = True
            text = "memory is served by the process that owns it, slower and with its interpreter lock, since the kernel lets nobody else"
            _logger.warning("%s: owner=%s", text, handle.ref.uid)

    def move(self, piece: Piece, deadline_s: float) -> None:
        """See `Transport`."""
        try:
            super().move(piece, deadline_s)
        except TransferError as exc:
            if isinstance(exc, UnreachableError) or isinstance(exc.__cause__, OSError):  # what was reached before, and is cut off now
                self._check_life(piece.ops[0].handle.ref, deadline_s)
            raise

    def _check_life(self, owner: ProcRef, deadline_s: float) -> None:
        """OwnerGoneError when an owner that was reached before has ended, which breaks its connections and takes its socket file away."""
        limit_s = max(0.0, min(deadline_s - time.monotonic(), _PING_S))
        failure = self._process.proc.request(owner, Ping()).exception(limit_s)
        if isinstance(failure, ProcGoneError):
            raise OwnerGoneError(str(failure)) from failure

    def _key_of(self, handle: Handle) -> str:
        return handle.ref.uid

    def _connect_to(self, handle: Handle) -> Connections:
        owner = handle.ref
        if between_hosts(owner.address):
            dial = partial(dial_agent, self._process, owner.address)
        else:
            dial = partial(self._borrower.dial, owner, by_owner=True)
        return Connections(self._process, owner.uid, self.num_threads, dial)

    # --- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close all connections."""
        self._process.proc.router.takers.pop(DATA, None)
        super().close()
        if self._service is not None:
            self._service.close()

    def abandon(self) -> None:
        """See `Transport`."""
        super().abandon()
        if self._service is not None:
            self._service.abandon()
