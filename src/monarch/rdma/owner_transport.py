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
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from monarch import config
from monarch._base.ids import ProcRef, between_hosts
from monarch._runtime.mailbox import ProcGoneError
from monarch._runtime.services import DATA, lend
from monarch._wire.memory_messages import LendMemory, ShareMemory
from monarch._wire.messages import Ping
from monarch.rdma.connections import Borrower, Connections, dial_agent
from monarch.rdma.data_frames import MAX_SPANS, Verb, WireSpan
from monarch.rdma.data_service import DataService
from monarch.rdma.errors import OwnerGoneError, TransferError, UnreachableError
from monarch.rdma.handles import Handle
from monarch.rdma.regions import Region, RegionTable
from monarch.rdma.transport import Op, Piece, even_cut

if TYPE_CHECKING:
    from monarch.actor.process import Process

_MOST_PIECE = 16 << 20
_PING_S = 1.0
_logger = logging.getLogger("monarch.rdma")


class OwnerTransport:
    """See the head of this file. Thread: any."""

    name = "owner"
    takes_devices = False
    is_instant = False
    num_threads = 2

    def __init__(self, process: Process, table: Callable[[], RegionTable], borrower: Borrower) -> None:
        """Args:
        table: the regions of this process.
        borrower: gets connections from owners that can't be dialled.
        """
        self._process = process
        self._table = table
        self._borrower = borrower
        self._service: DataService | None = None
        self._owners: dict[str, Connections] = {}
        """By their uid."""
        self._has_told = False
        self._lock = threading.Lock()

    # --- as an owner ---------------------------------------------------------------------------------------------

    def register(self, region: Region) -> bytes | None:
        """Nothing to know; None for memory of a device. Nothing is started."""
        if region.memory.device != "cpu" or not config.value("rdma_allow_tcp_fallback"):
            return None
        self._process.proc.router.takers[DATA] = self._on_connection
        return b""

    def deregister(self, region: Region) -> None:
        """Nothing was kept."""

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
        if not config.value("rdma_allow_tcp_fallback"):
            raise UnreachableError("rdma_allow_tcp_fallback is off")
        self._owner_of(handle).ask(Verb.PROBE, handle, (), (), deadline_s)
        if not self._has_told:
            self._has_told = True
            text = "memory is served by the process that owns it, slower and with its interpreter lock, since the kernel lets nobody else"
            _logger.warning("%s: owner=%s", text, handle.ref.uid)

    def lane(self, handle: Handle) -> str:
        """See `Transport`."""
        return f"{self.name} {handle.ref.uid}"

    def cut(self, ops: Sequence[Op]) -> list[Piece]:
        """See `Transport`."""
        return even_cut(ops, num_threads=self.num_threads, most_bytes=_MOST_PIECE, most_ops=MAX_SPANS)

    def move(self, piece: Piece, deadline_s: float) -> None:
        """See `Transport`."""
        handle = piece.ops[0].handle
        spans = [WireSpan(op.handle.slot, op.handle.generation, op.offset, op.nbytes) for op in piece.ops]
        views = [op.local.view(op.local_offset, op.nbytes) for op in piece.ops]
        try:
            self._owner_of(handle).ask(Verb.READ if piece.kind == "read" else Verb.WRITE, handle, spans, views, deadline_s)
        except TransferError as exc:
            if isinstance(exc, UnreachableError) or isinstance(exc.__cause__, OSError):
                self._check_life(handle.ref, deadline_s)
            raise

    def _check_life(self, owner: ProcRef, deadline_s: float) -> None:
        """OwnerGoneError when an owner that was reached before has ended, which breaks its connections and takes its socket file away."""
        limit_s = max(0.0, min(deadline_s - time.monotonic(), _PING_S))
        failure = self._process.proc.request(owner, Ping()).exception(limit_s)
        if isinstance(failure, ProcGoneError):
            raise OwnerGoneError(str(failure)) from failure

    def _owner_of(self, handle: Handle) -> Connections:
        owner = handle.ref
        with self._lock:
            connections = self._owners.get(owner.uid)
            if connections is None:
                is_dialled = between_hosts(owner.address)
                dial = (
                    partial(dial_agent, self._process, owner.address) if is_dialled else partial(self._borrower.dial, owner, by_owner=True)
                )
                connections = self._owners[owner.uid] = Connections(self._process, owner.uid, self.num_threads, dial)
            return connections

    def forget(self, nonce: bytes) -> None:
        """Connections of an owner that is gone break, and are closed when they were idle for long."""

    # --- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close all connections."""
        self._process.proc.router.takers.pop(DATA, None)
        for connections in list(self._owners.values()):
            connections.close()
        if self._service is not None:
            self._service.close()

    def abandon(self) -> None:
        """See `Transport`."""
        for connections in self._owners.values():
            connections.abandon()
        if self._service is not None:
            self._service.abandon()
