"""The transport "staged": memory of an owner's GPU, by way of pinned host memory of the owner, where nothing reaches it directly.

The owner's device service (`device_service.py`) copies between the device and host memory; that travels as any host memory does. While one
piece travels the next one is copied.

Rules of this file:
    1. The owner's interpreter takes part, shortly, for each piece. Where that is not wanted, `ipc` and `nixl` are there.

Read next: `device_service.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from monarch._runtime.future import Future
from monarch._wire.memory_messages import Staged, StageMemory, UnstageMemory
from monarch.rdma.device_service import PIECE_BYTES
from monarch.rdma.errors import BufferGoneError, DeadlineError, TransferError, UnreachableError
from monarch.rdma.handles import Handle, decode_handle
from monarch.rdma.regions import ON_DEVICE, Region
from monarch.rdma.transport import Choice, Op, Piece, Transport, check_deadline, cut, wait_answer

if TYPE_CHECKING:
    from monarch.actor.process import Process

_MOST_OPS = 1024
_CONNECT_S = 10.0


class StagedTransport:
    """See the head of this file. Thread: any."""

    name = "staged"
    takes_devices = False
    is_instant = False
    num_threads = 2

    def __init__(self, process: Process, carriers: Sequence[Transport]) -> None:
        """Args:
        carriers: what may carry host memory.
        """
        self._process = process
        self._carriers = Choice(carriers)

    def register(self, region: Region) -> bytes | None:
        """Nothing to know; None for memory of the host."""
        return b"" if region.flags & ON_DEVICE else None

    def deregister(self, region: Region) -> None:
        """Nothing was kept."""

    def connect(self, handle: Handle, deadline_s: float) -> None:
        """Ask the owner whether it answers; see `Transport`."""
        if not self._carriers.transports:
            raise UnreachableError("neither cma nor tcp may carry it")
        soon_s = min(deadline_s, time.monotonic() + _CONNECT_S)
        try:
            self._outcome(self._process.proc.request(handle.ref, StageMemory(handle.nonce, "read", (), 0.0)), soon_s)
        except DeadlineError:
            check_deadline(deadline_s)
            raise UnreachableError("the owner does not answer: its interpreter may be held by something that never lets go") from None

    def lane(self, handle: Handle) -> str:
        """See `Transport`."""
        return f"{self.name} {handle.ref.uid}"

    def cut(self, ops: Sequence[Op]) -> list[Piece]:
        """See `Transport`."""
        return list(cut(ops, piece_bytes=PIECE_BYTES, most_ops=_MOST_OPS))

    def move(self, piece: Piece, deadline_s: float) -> None:
        """See `Transport`."""
        check_deadline(deadline_s)
        first = piece.ops[0].handle
        spans = tuple((op.handle.generation, op.offset, op.nbytes) for op in piece.ops)
        patience_s = max(0.0, deadline_s - time.monotonic())
        request = self._process.proc.request(first.ref, StageMemory(first.nonce, piece.kind, spans, patience_s))
        host = decode_handle(self._outcome(request, deadline_s).handle)
        try:
            carrier = self._carriers.choose(host, deadline_s)
            for part in carrier.cut(_carried(piece.ops, host)):
                carrier.move(part, deadline_s)
        except TransferError:
            self._process.proc.tell(first.ref, UnstageMemory(host.nonce, host.generation))
            raise
        unstage = UnstageMemory(host.nonce, host.generation, spans if piece.kind == "write" else ())
        if piece.kind == "write":
            self._outcome(self._process.proc.request(first.ref, unstage), deadline_s)
        else:
            self._process.proc.tell(first.ref, unstage)

    def _outcome(self, request: Future[Any], deadline_s: float) -> Staged:
        staged = wait_answer(request, deadline_s)
        assert isinstance(staged, Staged)
        if staged.gone:
            raise BufferGoneError(staged.gone - 1)
        if staged.failure:
            raise TransferError(f"the owner can't copy from or to its device: {staged.failure}")
        return staged

    def forget(self, nonce: bytes) -> None:
        """The owner is gone."""
        self._carriers.forget(nonce)

    def close(self) -> None:
        """The carriers are closed by themselves."""

    def abandon(self) -> None:
        """See `Transport`."""


def _carried(ops: Sequence[Op], host: Handle) -> list[Op]:
    """The ops as ops on the host memory, which has their bytes one behind the other."""
    carried, at = [], 0
    for op in ops:
        carried.append(op._replace(handle=host, offset=at))
        at += op.nbytes
    return carried
