"""Staging: local memory of a GPU goes through pinned host memory, piece by piece, while no transport reaches it directly.

Rules of this file:
    1. No more host memory than one piece for each thread that moves pieces; torch's own allocator keeps it for the next one.
    2. What the user's kernels have queued is waited for first, on every stream: nobody told this thread which one counts.

Read next: `engine.py`, which asks `move` for every piece.
"""

from __future__ import annotations

import sys
from typing import Any

from monarch.rdma.memory import LocalMemory, memory_of
from monarch.rdma.transport import Op, Piece, Transport


def move(transport: Transport, piece: Piece, deadline_s: float) -> None:
    """`transport.move`, by way of host memory where the local side is on a device; raises the same."""
    for op in piece.ops:
        if op.local.device != "cpu":
            _move_staged(transport, piece, deadline_s)
            return
    transport.move(piece, deadline_s)


def _move_staged(transport: Transport, piece: Piece, deadline_s: float) -> None:
    torch: Any = sys.modules["torch"]
    host = torch.empty(sum(op.nbytes for op in piece.ops), dtype=torch.uint8, device="cpu", pin_memory=torch.cuda.is_available())
    memory, at, staged, parts = memory_of(host), 0, [], []
    for op in piece.ops:
        staged.append(op._replace(local=memory, local_offset=at))
        parts.append(host[at : at + op.nbytes])
        at += op.nbytes
    if piece.kind == "write":
        _wait_for_kernels(piece, torch)
        for op, part in zip(piece.ops, parts, strict=True):
            part.copy_(_bytes_of(op, torch))
    transport.move(Piece(piece.kind, staged), deadline_s)
    if piece.kind == "read":
        _wait_for_kernels(piece, torch)
        for op, part in zip(piece.ops, parts, strict=True):
            _bytes_of(op, torch).copy_(part)
        _wait_for_kernels(piece, torch)


def _bytes_of(op: Op, torch: Any) -> Any:
    """A tensor over the local bytes of an op, wherever they are."""
    local: LocalMemory = op.local
    if local.device == "cpu":
        return torch.frombuffer(local.view(op.local_offset, op.nbytes), dtype=torch.uint8)
    storage = local.pin
    start = local.address - storage.data_ptr() + op.local_offset
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (op.nbytes,), (1,))


def _wait_for_kernels(piece: Piece, torch: Any) -> None:
    for device in {op.local.device for op in piece.ops if op.local.device.startswith("cuda") and torch.cuda.is_available()}:
        torch.cuda.synchronize(device)
