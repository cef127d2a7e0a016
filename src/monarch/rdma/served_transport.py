"""What the transports have in common that go by connections to a data service: `tcp`, to that of a host agent, and `owner`, to the owner's.

Read next: `tcp_transport.py` and `owner_transport.py`, which say whose connections; `connections.py` and `data_service.py`, the ends.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

from monarch import config
from monarch.rdma.connections import Connections
from monarch.rdma.data_frames import MAX_SPANS, Verb, WireSpan
from monarch.rdma.errors import UnreachableError
from monarch.rdma.handles import Handle
from monarch.rdma.regions import Region
from monarch.rdma.transport import Op, Piece, even_cut

_MOST_PIECE = 16 << 20


class ServedTransport(ABC):
    """Host memory by requests on connections. Thread: any."""

    name: str
    num_threads: int
    takes_devices = False
    is_instant = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: dict[str, Connections] = {}
        """By what `_key_of` says."""

    @abstractmethod
    def _key_of(self, handle: Handle) -> str:
        """Who shares connections."""

    @abstractmethod
    def register(self, region: Region) -> bytes | None:
        """See `Transport`."""

    @abstractmethod
    def _connect_to(self, handle: Handle) -> Connections:
        """Connections to where a region is served; none is made yet."""

    def serves(self, region: Region) -> bool:
        """Whether this way is open to a region at all."""
        return region.memory.device == "cpu" and bool(config.value("rdma_allow_tcp_fallback"))

    def deregister(self, region: Region) -> None:  # noqa: B027
        """Nothing was kept."""

    def connect(self, handle: Handle, deadline_s: float) -> None:
        """Ask the service whether it knows the owner; see `Transport`."""
        if not config.value("rdma_allow_tcp_fallback"):
            raise UnreachableError("rdma_allow_tcp_fallback is off")
        self._connections_of(handle).ask(Verb.PROBE, handle, (), (), deadline_s)

    def lane(self, handle: Handle) -> str:
        """See `Transport`; those who share connections."""
        return f"{self.name} {self._key_of(handle)}"

    def cut(self, ops: Sequence[Op]) -> list[Piece]:
        """See `Transport`."""
        return even_cut(ops, num_threads=self.num_threads, most_bytes=_MOST_PIECE, most_ops=MAX_SPANS)

    def move(self, piece: Piece, deadline_s: float) -> None:
        """See `Transport`."""
        handle = piece.ops[0].handle
        spans = [WireSpan(op.handle.slot, op.handle.generation, op.offset, op.nbytes) for op in piece.ops]
        views = [op.local.view(op.local_offset, op.nbytes) for op in piece.ops]
        self._connections_of(handle).ask(Verb.READ if piece.kind == "read" else Verb.WRITE, handle, spans, views, deadline_s)

    def _connections_of(self, handle: Handle) -> Connections:
        key = self._key_of(handle)
        with self._lock:
            connections = self._connections.get(key)
            if connections is None:
                connections = self._connections[key] = self._connect_to(handle)
            return connections

    def forget(self, nonce: bytes) -> None:  # noqa: B027
        """Connections outlive an owner: they are an agent's, or break, and are closed when they were idle for long."""

    def close(self) -> None:
        """Close all connections."""
        for connections in list(self._connections.values()):
            connections.close()

    def abandon(self) -> None:
        """See `Transport`."""
        for connections in self._connections.values():
            connections.abandon()
