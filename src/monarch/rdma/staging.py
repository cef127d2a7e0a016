"""Staging: local memory of a GPU goes through pinned host memory, piece by piece, while no transport reaches it directly.

Rules of this file:
    1. No more host memory than one piece for each thread that moves pieces; torch's own allocator keeps it for the next one.
    2. What the user's kernels have queued is waited for first, on every stream: nobody told this thread which one counts.

Read next: `engine.py`, which asks `move` for every piece.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from monarch.rdma.memory import LocalMemory, memory_of
from monarch.rdma.transport import Piece, Transport


def move(transport: Transport, piece: Piece, deadline_s: float) -> None:
    """`transport.move`, by way of host memory where the local side is on a device; raises the same."""
    if not transport.takes_devices:
        for op in piece.ops:
            if op.local.device != "cpu":
                move_staged(transport, piece, deadline_s)
                return
    transport.move(piece, deadline_s)


def move_staged(transport: Transport, piece: Piece, deadline_s: float) -> None:
    """`transport.move` of host memory that stands for the local side."""
    host = pinned(sum(op.nbytes for op in piece.ops))
    memory, at, staged, parts = memory_of(host), 0, [], []
    for op in piece.ops:
        staged.append(op._replace(local=memory, local_offset=at))
        parts.append(host[at : at + op.nbytes])
        at += op.nbytes
    if piece.kind == "write":
        wait_for_kernels([op.local for op in piece.ops])
        for op, part in zip(piece.ops, parts, strict=True):
            part.copy_(bytes_of(op.local, op.local_offset, op.nbytes))
    transport.move(Piece(piece.kind, staged), deadline_s)
    if piece.kind == "read":
        wait_for_kernels([op.local for op in piece.ops])
        for op, part in zip(piece.ops, parts, strict=True):
            bytes_of(op.local, op.local_offset, op.nbytes).copy_(part)
        wait_for_kernels([op.local for op in piece.ops])


def pinned(nbytes: int) -> Any:
    """A tensor of host memory that devices can copy from and to."""
    torch: Any = sys.modules["torch"]
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=torch.cuda.is_available())


def bytes_of(local: LocalMemory, offset: int, nbytes: int) -> Any:
    """A tensor over bytes of local memory, wherever they are."""
    torch: Any = sys.modules["torch"]
    if local.device == "cpu":
        return torch.frombuffer(local.view(offset, nbytes), dtype=torch.uint8)
    storage = local.pin
    start = local.address - storage.data_ptr() + offset
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (nbytes,), (1,))


def wait_for_kernels(memory: Iterable[LocalMemory]) -> None:
    """Wait for all that was queued on the devices of the memory."""
    torch: Any = sys.modules["torch"]
    for device in {local.device for local in memory if local.device.startswith("cuda") and torch.cuda.is_available()}:
        torch.cuda.synchronize(device)
