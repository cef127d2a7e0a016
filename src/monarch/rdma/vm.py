"""Memory of other processes of this machine, by `process_vm_readv` and `process_vm_writev`.

No copy but the one, no word to the other process, and the interpreter lock is free meanwhile.

Rules of this file:
    1. Reading fetches the entries, the data and the entries again in one call, in this order, and believes the data only if
       all entries are right. Writing checks the entry under the lock of its slot.
    2. One call moves at most `PIECE_BYTES` and `MAX_SPANS` spans, so nobody is long in the kernel.
    3. Where the calls are forbidden, the files of `proc_memory.py` are tried; only where these are too, is a process out of reach.

Read next: `vm_transport.py` and `data_service.py`, which call this; `regions.py` for tables and locks.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from monarch.rdma import proc_memory
from monarch.rdma.errors import BufferGoneError, OwnerGoneError, TransferError, UnreachableError
from monarch.rdma.proc_memory import Move
from monarch.rdma.regions import ENTRY_BYTES, HEAD, HEAD_BYTES, MAGIC, SlotLocks, open_locks

PIECE_BYTES = 8 << 20
_IOV_MAX = 1024
_FORBIDDEN = (errno.EPERM, errno.EACCES, errno.ENOSYS)
_ANOTHER = "its table of regions is gone: the process has ended, or has become another"
MAX_SPANS = _IOV_MAX // 3


class Span(NamedTuple):
    """Bytes to move between this process and another."""

    local: int
    """Address here."""
    remote: int
    """Address there."""
    nbytes: int
    entry_address: int
    """Of the region's entry, there."""
    entry: bytes
    """What it must be."""
    slot: int
    number: int
    """Of the buffer, for people."""


@lru_cache(maxsize=1)
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    for name in ("process_vm_readv", "process_vm_writev"):
        function = getattr(libc, name)
        function.restype = ctypes.c_ssize_t
        function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong)
    return libc


@lru_cache(maxsize=1)
def available() -> bool:
    """Whether this system has the calls; whether they are allowed for some process, only a try tells."""
    if not sys.platform.startswith("linux") or sys.byteorder != "little" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    try:
        return bool(_libc())
    except (OSError, AttributeError):
        return False


class _Scratch(threading.local):
    """Tables of addresses for the kernel, and room for entries, of one thread."""

    def __init__(self) -> None:
        self.near = ctypes.create_string_buffer(16 * _IOV_MAX)
        self.far = ctypes.create_string_buffer(16 * _IOV_MAX)
        self.entries = ctypes.create_string_buffer(2 * ENTRY_BYTES * MAX_SPANS)
        self.near_at = ctypes.addressof(self.near)
        self.far_at = ctypes.addressof(self.far)
        self.entries_at = ctypes.addressof(self.entries)
        self.seen = memoryview(self.entries).cast("B")
        self.readv = _libc().process_vm_readv
        self.writev = _libc().process_vm_writev


_local: _Scratch | None = None
_pack_six = struct.Struct("6Q").pack_into


def _own_scratch() -> _Scratch:
    global _local
    if _local is None:
        _local = _Scratch()
    return _local


def read_spans(pid: int, spans: Sequence[Span]) -> None:
    """Copy from another process to this one; all spans are right at the return.

    Args:
        spans: at most `MAX_SPANS`, none empty.

    Raises:
        BufferGoneError, OwnerGoneError, UnreachableError, TransferError: what is in the local memory then is worth nothing.
    """
    scratch = _own_scratch()
    wanted = 2 * ENTRY_BYTES * len(spans)
    if len(spans) == 1:
        at = scratch.entries_at
        local, remote, nbytes, entry_at, entry, _, _ = spans[0]
        _pack_six(scratch.near, 0, at, ENTRY_BYTES, local, nbytes, at + ENTRY_BYTES, ENTRY_BYTES)
        _pack_six(scratch.far, 0, entry_at, ENTRY_BYTES, remote, nbytes, entry_at, ENTRY_BYTES)
        total, num_near, num_far, expected = nbytes + wanted, 3, 3, entry + entry
    else:
        total, num_near, num_far = _tabulate(scratch, spans)
        expected = 2 * b"".join([span.entry for span in spans])
    moved = scratch.readv(pid, scratch.near_at, num_near, scratch.far_at, num_far, 0)
    if moved != total or scratch.seen[:wanted].tobytes() != expected:
        number = ctypes.get_errno()
        if moved >= 0 or number not in _FORBIDDEN:
            raise _failure(pid, spans, moved, number)
        _read_by_file(pid, spans)


def _read_by_file(pid: int, spans: Sequence[Span]) -> None:
    scratch = _own_scratch()
    wanted, at, moves = 2 * ENTRY_BYTES * len(spans), scratch.entries_at, []
    for local, remote, nbytes, entry_at, _, _, _ in spans:
        moves += [Move(at, entry_at, ENTRY_BYTES), Move(local, remote, nbytes), Move(at + ENTRY_BYTES, entry_at, ENTRY_BYTES)]
        at += 2 * ENTRY_BYTES
    try:
        proc_memory.read(pid, moves)
    except TransferError as exc:
        if not isinstance(exc, (OwnerGoneError, UnreachableError)):
            _check_spans(pid, spans)
        raise
    if scratch.seen[:wanted].tobytes() != b"".join([2 * span.entry for span in spans]):
        _check_spans(pid, spans)
        raise BufferGoneError(spans[0].number)  # it was dropped, and the entry is another one by now; unreachable otherwise


def _tabulate(scratch: _Scratch, spans: Sequence[Span]) -> tuple[int, int, int]:
    """Make the tables for: all entries, all data, all entries. What is side by side in memory is one row, which is cheaper for the kernel.

    Returns:
        Bytes in all; rows of the table of here, and of there.
    """
    block = ENTRY_BYTES * len(spans)
    near: list[int] = [scratch.entries_at, block]
    far: list[int] = []
    entries: list[int] = []
    total, next_local, next_entry = 2 * block, -1, -1
    for local, remote, nbytes, entry_at, _, _, _ in spans:
        if entry_at == next_entry:
            entries[-1] += ENTRY_BYTES
        else:
            entries += (entry_at, ENTRY_BYTES)
        if local == next_local:
            near[-1] += nbytes
        else:
            near += (local, nbytes)
        far += (remote, nbytes)
        next_local, next_entry = local + nbytes, entry_at + ENTRY_BYTES
        total += nbytes
    near += (scratch.entries_at + block, block)
    far = entries + far + entries
    struct.pack_into(f"{len(near)}Q", scratch.near, 0, *near)
    struct.pack_into(f"{len(far)}Q", scratch.far, 0, *far)
    return total, len(near) // 2, len(far) // 2


def write_spans(pid: int, spans: Sequence[Span], locks: SlotLocks) -> None:
    """Copy from this process to another; all spans have arrived at the return.

    Raises:
        BufferGoneError, OwnerGoneError, UnreachableError, TransferError: some of the bytes may have arrived.
    """
    held = []
    try:
        for span in spans:
            try:
                locks.hold(span.slot)
            except BlockingIOError:
                raise BufferGoneError(span.number) from None
            held.append(span.slot)
        if not _check_entries(pid, spans):
            proc_memory.write(pid, [Move(*span[:3]) for span in spans])
            return
        scratch = _own_scratch()
        near = [word for span in spans for word in (span.local, span.nbytes)]
        far = [word for span in spans for word in (span.remote, span.nbytes)]
        struct.pack_into(f"{len(near)}Q", scratch.near, 0, *near)
        struct.pack_into(f"{len(far)}Q", scratch.far, 0, *far)
        moved = scratch.writev(pid, scratch.near_at, len(spans), scratch.far_at, len(spans), 0)
        if moved != sum(span.nbytes for span in spans):
            raise _failure(pid, spans, moved, ctypes.get_errno())
    finally:
        for slot in held:
            locks.let_go(slot)


def _check_entries(pid: int, spans: Sequence[Span]) -> bool:
    """Raises as `read_spans`; whether the calls are allowed."""
    scratch = _own_scratch()
    count, wanted = len(spans), ENTRY_BYTES * len(spans)
    struct.pack_into("2Q", scratch.near, 0, scratch.entries_at, wanted)
    struct.pack_into(f"{2 * count}Q", scratch.far, 0, *[word for span in spans for word in (span.entry_address, ENTRY_BYTES)])
    moved = scratch.readv(pid, scratch.near_at, 1, scratch.far_at, count, 0)
    if moved != wanted or scratch.seen[:wanted].tobytes() != b"".join([span.entry for span in spans]):
        number = ctypes.get_errno()
        if moved >= 0 or number not in _FORBIDDEN:
            raise _failure(pid, spans, moved, number)
        _check_spans(pid, spans)
        return False
    return True


def _check_spans(pid: int, spans: Sequence[Span]) -> None:
    for span in spans:
        check_entry(pid, span.entry_address, span.entry, span.number)


def check_entry(pid: int, entry_address: int, entry: bytes, number: int) -> None:
    """Whether an entry of another process's table is as it should be; raises as `read_spans`."""
    now = peek(pid, [(entry_address, ENTRY_BYTES)])
    if now[:16] != entry[:16] and any(now):
        raise OwnerGoneError(_ANOTHER)
    if now != entry:
        raise BufferGoneError(number)


def peek(pid: int, places: Sequence[tuple[int, int]]) -> bytes:
    """Bytes of another process, without any check.

    Args:
        places: (address, bytes) of each part.

    Raises:
        OwnerGoneError, UnreachableError: there is no such process, this process may not look at it, or nothing is there.
    """
    total = sum(nbytes for _, nbytes in places)
    buffer = ctypes.create_string_buffer(total)
    near = struct.pack("2Q", ctypes.addressof(buffer), total)
    far = struct.pack(f"{2 * len(places)}Q", *[word for place in places for word in place])
    moved = _libc().process_vm_readv(pid, near, 1, far, len(places), 0)
    if moved < 0:
        if ctypes.get_errno() in _FORBIDDEN:
            return _peek_file(pid, places)
        raise _refusal(ctypes.get_errno()) or OwnerGoneError(_ANOTHER)
    if moved != total:
        raise OwnerGoneError(_ANOTHER)
    return buffer.raw


def _peek_file(pid: int, places: Sequence[tuple[int, int]]) -> bytes:
    parts = [ctypes.create_string_buffer(nbytes) for _, nbytes in places]
    moves = [Move(ctypes.addressof(part), at, nbytes) for part, (at, nbytes) in zip(parts, places, strict=True)]
    try:
        proc_memory.read(pid, moves)
    except (OwnerGoneError, UnreachableError):
        raise
    except TransferError:
        raise OwnerGoneError(_ANOTHER) from None
    return b"".join([part.raw for part in parts])


class Head(NamedTuple):
    """What the first page of a table of regions says."""

    nonce: bytes
    lock_fd: int
    """Descriptor in the owner; see `SlotLocks`."""
    chunks: list[int]
    """Addresses in the owner."""


def read_head(pid: int, table: int) -> Head:
    """The head of the table of regions at address `table`.

    Raises:
        OwnerGoneError: there is no table (any more).
        UnreachableError: this process may not look.
    """
    head = peek(pid, [(table, HEAD_BYTES)])
    magic, nonce, lock_fd, _, num_chunks = HEAD.unpack_from(head)
    most = (HEAD_BYTES - HEAD.size) // 8
    if magic != MAGIC or num_chunks > most:
        raise OwnerGoneError(_ANOTHER)
    return Head(nonce, lock_fd, list(struct.unpack_from(f"<{num_chunks}Q", head, HEAD.size)))


def owner_locks(pid: int, table: int, lock_fd: int) -> SlotLocks:
    """The locks of the slots of another process's table.

    Raises:
        OwnerGoneError: it has ended.
        UnreachableError: it lives, and its locks can't be opened.
    """
    try:
        return open_locks(pid, lock_fd)
    except OSError as exc:
        read_head(pid, table)
        hint = "/proc must show the processes of this container, and the kernel must have locks of open files (Linux 3.15)"
        raise UnreachableError(f"the owner's locks can't be opened ({exc}), so writing to it is not safe", next=hint) from None


def _refusal(number: int) -> TransferError | None:
    return OwnerGoneError("its process has ended") if number == errno.ESRCH else None


def _failure(pid: int, spans: Sequence[Span], moved: int, number: int) -> TransferError:
    """Why a call did not do what it should."""
    refusal = _refusal(number) if moved < 0 else None
    if refusal is not None:
        return refusal
    try:
        _check_spans(pid, spans)
    except TransferError as exc:
        return exc
    if moved >= 0 and moved == sum(span.nbytes for span in spans) + 2 * ENTRY_BYTES * len(spans):
        return BufferGoneError(spans[0].number)  # it was dropped, and the entry is another one by now; unreachable otherwise
    why = os.strerror(number) if moved < 0 else f"the kernel moved {moved} bytes"
    return TransferError(
        f"the memory of buffer {spans[0].number} can't be moved ({why})", next="it may be unmapped, or be memory of a device"
    )
