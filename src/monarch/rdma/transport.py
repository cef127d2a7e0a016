"""Transports: what can move bytes between this process and the memory of another, behind one interface.

    cma     same machine: the kernel copies (`vm_transport.py`)
    ipc     GPUs of one machine, mapped by CUDA (`ipc_transport.py`)
    nixl    InfiniBand, RoCE, EFA, by a library (`nixl_transport.py`)
    tcp     anywhere else: the owner's host agent reads and writes for us (`tcp_transport.py`)
    owner   what the kernel lets nobody touch but the owner, which serves it itself (`owner_transport.py`)
    staged  GPU memory that none of these reaches: the owner copies it to host memory, which some of these reach (`staged_transport.py`)

The engine takes, per owner, the first in this order whose blob is in the handle and whose `connect` has really reached the owner, and
remembers it. What is large is cut into pieces, which several threads move at once.

A transport blocks: it is called by the thread of the caller for a few microseconds, or by workers of the engine. An `async` interface
would put an event loop, which costs more than a small transfer, into every one of them.

Rules of this file:
    1. Nothing here names a transport but the order.
    2. `connect` and `move` raise `UnreachableError` for "not by this one", and `OwnerGoneError` for "by none".
    3. What a transport does not lead to after all goes by the next one, and the log says so once for each owner.

Read next: `engine.py`, which drives them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from monarch._runtime.future import Future
from monarch.rdma.errors import BufferGoneError, DeadlineError, OwnerGoneError, TransferError, UnreachableError
from monarch.rdma.handles import Handle, device_route
from monarch.rdma.memory import LocalMemory
from monarch.rdma.regions import Region

_logger = logging.getLogger("monarch.rdma")
ORDER = ("cma", "ipc", "nixl", "tcp", "owner", "staged")
Kind: TypeAlias = Literal["read", "write"]
_MOST_REMEMBERED = 4096
"""Owners whose transport is known."""
_PAGE_BYTES = 4096
_LEAST_PIECE_BYTES = 1 << 20
SPLIT_BYTES = 8 << 20
"""From here on several threads are faster than one. Before, most of the work may hold the interpreter lock: tables of small ops."""


class Op(NamedTuple):
    """Bytes to move between local memory and a region."""

    kind: Kind
    """Seen from here."""
    local: LocalMemory
    local_offset: int
    handle: Handle
    offset: int
    """In the region."""
    nbytes: int


class Piece(NamedTuple):
    """Ops of one kind on regions of one owner, moved by one call."""

    kind: Kind
    ops: Sequence[Op]


class Transport(Protocol):
    """One way to move bytes. Thread: any; several may `move` at once."""

    name: str
    is_instant: bool
    """`connect` and small moves take microseconds, so the thread of the caller does them itself."""
    num_threads: int
    """How many threads are of use for one submit."""
    takes_devices: bool
    """Local memory may be on a GPU; otherwise it goes through host memory (`staging.py`)."""

    def register(self, region: Region) -> bytes | None:
        """What a handle carries for this transport; None: it can't serve this memory."""

    def deregister(self, region: Region) -> None:
        """The region is dropped."""

    def connect(self, handle: Handle, deadline_s: float) -> None:
        """Reach the owner for the first time.

        Args:
            deadline_s: `time.monotonic()` at which to give up.

        Raises:
            UnreachableError: this transport can't; another may.
            OwnerGoneError, DeadlineError: none can.
        """

    def lane(self, handle: Handle) -> str:
        """What transfers of this owner share with others, such as connections. Lanes have threads of their own: none waits for another."""

    def cut(self, ops: Sequence[Op]) -> list[Piece]:
        """The ops as pieces in any order; together they are the ops."""

    def move(self, piece: Piece, deadline_s: float) -> None:
        """Move the bytes; TransferError and its kinds when they did not all arrive. Again by another one does no harm."""

    def forget(self, nonce: bytes) -> None:
        """The owner with this nonce is gone."""

    def close(self) -> None:
        """Let go of connections."""

    def abandon(self) -> None:
        """Close inherited descriptors only; this process is a fork."""


class Choice:
    """Which transport leads to which owner. Thread: any."""

    def __init__(self, transports: Sequence[Transport]) -> None:
        self.transports = sorted(transports, key=lambda transport: ORDER.index(transport.name))
        self._known: dict[bytes, Transport] = {}
        """By `Handle.route`."""
        self._nonces: dict[str, bytes] = {}
        """Of the owners in `_known`, by uid."""
        self._diverted: dict[tuple[bytes, int], Transport] = {}
        """For regions that the transport of their owner does not lead to, by nonce and generation."""
        self._told: set[tuple[bytes, str]] = set()
        """Owners, by nonce, and transports of which the log has said that they do not lead to all of it."""

    def known(self, handle: Handle) -> Transport | None:
        """The transport that was chosen before."""
        if self._diverted and (diverted := self._diverted.get((handle.nonce, handle.generation))) is not None:
            return diverted
        return self._known.get(handle.route)

    def route_of(self, handle: Handle) -> Hashable:
        """Regions of one route go by one transport."""
        region = handle.nonce, handle.generation
        return region if region in self._diverted else handle.route

    def instant(self, handle: Handle) -> Transport | None:
        """The transport that was chosen before, or one that is quickly tried; None: choosing may take a while."""
        known = self.known(handle)
        if known is not None:
            return known if known.is_instant else None
        first = next((transport for transport in self.transports if transport.name in handle.blobs), None)
        if first is None or not first.is_instant:
            return None
        try:
            return self._connect(first, handle, time.monotonic() + 1)
        except UnreachableError:
            return None

    def choose(self, handle: Handle, deadline_s: float) -> Transport:
        """The transport to use.

        Raises:
            UnreachableError: none leads there; the text has the reason of each.
            OwnerGoneError, DeadlineError: see `connect`.
        """
        known = self.known(handle)
        if known is not None:
            return known
        reasons, hint, refusal = [], "", None
        for transport in self.transports:
            if transport.name not in handle.blobs:
                reasons.append(f"{transport.name}: the owner can't be reached so")
                continue
            try:
                self._connect(transport, handle, deadline_s, only_region=refusal is not None)
            except UnreachableError as exc:
                reasons.append(f"{transport.name}: {exc.what}")
                hint = exc.next or hint
                if exc.generations:
                    refusal = refusal or (transport, exc)
                continue
            if refusal is not None:
                self._say(*refusal, handle, transport)
            return transport
        raise UnreachableError(f"no compatible RDMA backend for buffer ({'; '.join(reasons) or 'none is switched on'})", next=hint)

    def divert(self, transport: Transport, handle: Handle, why: UnreachableError, deadline_s: float) -> Transport:
        """The transport to use instead of one that does not lead to a region after all, now and from now on.

        Args:
            why: says what else it does not lead to. Raised when no other one does.
        """
        later = self.transports[self.transports.index(transport) + 1 :]
        known = self.known(handle)
        if known in later:
            return known
        for other in later:
            if other.name in handle.blobs:
                try:
                    self._connect(other, handle, deadline_s, only_region=bool(why.generations))
                except UnreachableError as exc:
                    why.next = exc.next or why.next
                    continue
                self._say(transport, why, handle, other)
                return other
        raise why

    def _say(self, transport: Transport, why: UnreachableError, handle: Handle, other: Transport) -> None:
        if (handle.nonce, transport.name) not in self._told:
            self._told.add((handle.nonce, transport.name))
            which = f"buffers of {handle.ref.uid}, such as {handle.number}," if why.generations else f"buffers of {handle.ref.uid}"
            _logger.warning("%s go by %s, because %s does not lead there: reason=%s", which, other.name, transport.name, why.what)

    def forget(self, nonce: bytes) -> None:
        """The owner is gone: let go of what is kept for it."""
        for region in [region for region in self._diverted if region[0] == nonce]:
            self._diverted.pop(region, None)
        self._told = {pair for pair in self._told if pair[0] != nonce}
        for route in [route for route in (nonce, device_route(nonce)) if route in self._known]:
            del self._known[route]
        for transport in self.transports:
            transport.forget(nonce)

    def forget_process(self, uid: str) -> None:
        """The process has ended: the same for all that it owned."""
        nonce = self._nonces.pop(uid, None)
        if nonce is not None:
            self.forget(nonce)

    def _connect(self, transport: Transport, handle: Handle, deadline_s: float, *, only_region: bool = False) -> Transport:
        transport.connect(handle, deadline_s)
        if max(len(self._known), len(self._diverted)) >= _MOST_REMEMBERED:
            self._known.clear()
            self._diverted.clear()
            self._nonces.clear()
        if only_region:
            self._diverted[handle.nonce, handle.generation] = transport
        else:
            self._known[handle.route] = transport
        self._nonces[handle.ref.uid] = handle.nonce
        return transport


def cut(ops: Sequence[Op], *, piece_bytes: int, most_ops: int) -> Iterator[Piece]:
    """Split large ops and put small ones of one kind and owner together.

    Args:
        piece_bytes: most bytes of a piece.
        most_ops: most ops of a piece.
    """
    together: list[Op] = []
    total = 0
    kind, nonce = "", b""
    for op in ops:
        for part in (op,) if op.nbytes <= piece_bytes else _split(op, piece_bytes):
            differs = part.kind != kind or part.handle.nonce != nonce
            if differs or total + part.nbytes > piece_bytes or len(together) >= most_ops:
                if together:
                    yield Piece(together[0].kind, together)
                together, total, kind, nonce = [], 0, part.kind, part.handle.nonce
            together.append(part)
            total += part.nbytes
    if together:
        yield Piece(together[0].kind, together)


def _split(op: Op, piece_bytes: int) -> Iterator[Op]:
    for done in range(0, op.nbytes, piece_bytes):
        nbytes = min(piece_bytes, op.nbytes - done)
        yield op._replace(local_offset=op.local_offset + done, offset=op.offset + done, nbytes=nbytes)


def even_cut(ops: Sequence[Op], *, num_threads: int, most_bytes: int, most_ops: int) -> list[Piece]:
    """The ops as pieces of which `num_threads` have about as much to do each; what is small is not split.

    Args:
        most_bytes, most_ops: of a piece.
    """
    total = sum(op.nbytes for op in ops)
    size = SPLIT_BYTES if total < SPLIT_BYTES else even_piece(total, num_threads, _LEAST_PIECE_BYTES, most_bytes)
    return list(cut(ops, piece_bytes=size, most_ops=most_ops))


def even_piece(total: int, num_threads: int, least: int, most: int) -> int:
    """Bytes of a piece, so that `num_threads` have about as much to do each: whole pages between `least` and `most`."""
    share = -(-total // num_threads)
    return max(least, min(most, -(-share // _PAGE_BYTES) * _PAGE_BYTES))


@contextmanager
def connecting(deadline_s: float, silence: str) -> Iterator[None]:
    """What goes wrong inside means "not by this transport", unless the owner or the buffer is gone, or the time is over.

    Args:
        silence: what is said when the owner did not answer by a deadline that comes before `deadline_s`.
    """
    try:
        yield
    except DeadlineError:
        check_deadline(deadline_s)
        raise UnreachableError(silence) from None
    except (OwnerGoneError, BufferGoneError, UnreachableError):
        raise
    except TransferError as exc:
        raise UnreachableError(exc.what, next=exc.next) from exc


def wait_answer(request: Future[Any], deadline_s: float) -> Any:
    """The owner's answer to a message; DeadlineError, OwnerGoneError."""
    try:
        return request.get(max(0.0, min(deadline_s - time.monotonic(), threading.TIMEOUT_MAX)))
    except TimeoutError:
        raise DeadlineError from None
    except RuntimeError as exc:
        raise OwnerGoneError(str(exc)) from exc


def check_deadline(deadline_s: float) -> None:
    """DeadlineError when the time is over."""
    if time.monotonic() >= deadline_s:
        raise DeadlineError
