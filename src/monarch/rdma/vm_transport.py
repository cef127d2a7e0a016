"""The transport "cma" (cross-memory attach): owner and reader are on one machine, and the kernel copies between them.

Nobody of the owner's takes part: it may compute, hold its interpreter lock or be stopped. Whether it works (same kernel and
process ids, same user, no Yama, no seccomp profile against it) shows when the owner's nonce is read.

Rules of this file:
    1. A process is believed to be the owner only after its table has shown the owner's nonce; every transfer checks that again.
    2. Pieces are at most `vm.PIECE_BYTES`, so two threads share a large transfer and deadlines are kept.
    3. Large reads of a region that is a memory file come out of a mapping of it, with a look at the entry before and after. The kernel
       copies nothing then, and no page has to be found in another process.

Read next: `vm.py` for the calls, `mapped_regions.py` for the mappings.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from monarch.rdma import vm
from monarch.rdma.errors import BufferGoneError, OwnerGoneError, UnreachableError
from monarch.rdma.handles import Handle
from monarch.rdma.mapped_regions import MappedRegions
from monarch.rdma.memory import FilePlace
from monarch.rdma.regions import Region, RegionTable, SlotLocks
from monarch.rdma.transport import SPLIT_BYTES, Op, Piece, check_deadline, cut, even_piece

_BLOB = struct.Struct("<16sQIiQ")
_FILE = struct.Struct("<iQ")
"""Behind it for a region that is a file: descriptor in the owner, and offset."""
_LEAST_MAPPED = 1 << 20
"""Of what is read at once; for less it isn't worth mapping a region."""
_LEAST_PIECE = 1 << 20
_MOST_KNOWN = 8192
_PR_SET_PTRACER = 0x59616D61
_ANY_PROCESS = 2**64 - 1


class _Place(NamedTuple):
    """Where a region is, for the kernel."""

    pid: int
    address: int
    entry_address: int
    entry: bytes
    slot: int
    number: int
    file: FilePlace | None


class VmTransport:
    """See the head of this file. Thread: any."""

    name = "cma"
    takes_devices = False
    is_instant = True

    def __init__(self, table: Callable[[], RegionTable], mapped: MappedRegions | None = None) -> None:
        """Args:
        table: the regions of this process.
        mapped: None: nothing is read out of mappings.
        """
        self._mapped = mapped
        self.num_threads = min(2, os.cpu_count() or 1)
        self._table = table
        self._places: dict[tuple[bytes, int], _Place] = {}
        """By nonce and generation."""
        self._locks: dict[bytes, SlotLocks] = {}
        """By the owner's nonce."""
        self._lock = threading.Lock()

    def register(self, region: Region) -> bytes | None:
        """Where the entry is; None for memory of a device, or when this system has no such calls."""
        place = self.place(region) if region.memory.device == "cpu" else None
        return place if place is None or region.memory.file is None else place + _FILE.pack(*region.memory.file)

    def place(self, region: Region) -> bytes | None:
        """The same for any memory: where its entry is, and the locks."""
        if not vm.available():
            return None
        _let_others_look()
        table = self._table()
        boot, namespace = machine()
        return _BLOB.pack(boot, namespace, table.pid, -1 if table.locks is None else table.locks.fd, region.entry_address)

    def deregister(self, region: Region) -> None:
        """Nothing was kept."""

    def connect(self, handle: Handle, deadline_s: float) -> None:
        """Read the owner's nonce; see `Transport`."""
        self.visit(handle.blobs[self.name], handle)

    def visit(self, place: bytes, handle: Handle) -> None:
        """Read the nonce of the owner of `place`; raises as `connect`."""
        try:
            boot, namespace, pid, _, _ = _BLOB.unpack_from(place)
        except struct.error:
            raise UnreachableError("the handle is broken") from None
        if not vm.available():
            raise UnreachableError("this system has no process_vm_readv")
        if (boot, namespace) != machine():
            raise UnreachableError("the owner is on another machine, or in another container")
        if vm.read_head(pid, handle.table).nonce != handle.nonce:
            raise OwnerGoneError("its process has ended, and another one has its process id")

    def check(self, place: bytes, handle: Handle) -> None:
        """Whether the entry at `place` is that of the handle; TransferError and its kinds if not."""
        _, _, pid, _, entry_address = _BLOB.unpack_from(place)
        vm.check_entry(pid, entry_address, handle.entry(), handle.number)

    @contextlib.contextmanager
    def held(self, place: bytes, handle: Handle) -> Iterator[None]:
        """Keep the owner from giving the region's memory away meanwhile; BufferGoneError when it is about to."""
        locks = self._locks_of(handle, place)
        try:
            locks.hold(handle.slot)
        except BlockingIOError:
            raise BufferGoneError(handle.number) from None
        try:
            yield
        finally:
            locks.let_go(handle.slot)

    def lane(self, handle: Handle) -> str:
        """See `Transport`; the kernel lets nobody wait."""
        return self.name

    def cut(self, ops: Sequence[Op]) -> list[Piece]:
        """See `Transport`."""
        total = sum(op.nbytes for op in ops)
        size = vm.PIECE_BYTES if total < SPLIT_BYTES else even_piece(total, self.num_threads, _LEAST_PIECE, vm.PIECE_BYTES)
        return list(cut(ops, piece_bytes=size, most_ops=vm.MAX_SPANS))

    def move(self, piece: Piece, deadline_s: float) -> None:
        """See `Transport`."""
        check_deadline(deadline_s)
        places, new_span = self._places, vm.Span._make
        spans = []
        pid = 0
        for _, local, local_offset, handle, offset, nbytes in piece.ops:
            place = places.get((handle.nonce, handle.generation)) or self._learn(handle)
            pid, address, entry_address, entry, slot, number, _ = place
            spans.append(new_span((local.address + local_offset, address + offset, nbytes, entry_address, entry, slot, number)))
        if piece.kind == "read":
            if not self._copy_mapped(piece.ops):
                vm.read_spans(pid, spans)
        else:
            vm.write_spans(pid, spans, self._locks_of(piece.ops[0].handle, piece.ops[0].handle.blobs[self.name]))

    def _learn(self, handle: Handle) -> _Place:
        if len(self._places) >= _MOST_KNOWN:
            self._places.clear()
        blob = handle.blobs[self.name]
        _, _, pid, _, entry_address = _BLOB.unpack_from(blob)
        file = FilePlace(*_FILE.unpack_from(blob, _BLOB.size)) if len(blob) == _BLOB.size + _FILE.size else None
        place = self._places[handle.nonce, handle.generation] = _Place(
            pid, handle.address, entry_address, handle.entry(), handle.slot, handle.number, file
        )
        return place

    def _copy_mapped(self, ops: Sequence[Op]) -> bool:
        """Read from a mapping; False: nothing was done, this is not to be read so."""
        handle = ops[0].handle
        place = self._places.get((handle.nonce, handle.generation))
        if (
            self._mapped is None
            or place is None
            or place.file is None
            or sum([op.nbytes for op in ops]) < _LEAST_MAPPED
            or any(op.handle is not handle for op in ops)
        ):
            return False
        mapped = self._mapped.find((handle.nonce, handle.generation), place.pid, place.file, handle.nbytes)
        if mapped is None:
            return False
        try:
            vm.check_entry(place.pid, place.entry_address, place.entry, place.number)
            for _, local, local_offset, _, offset, nbytes in ops:
                ctypes.memmove(local.address + local_offset, mapped.address + offset, nbytes)
            vm.check_entry(place.pid, place.entry_address, place.entry, place.number)
        except (BufferGoneError, OwnerGoneError):
            self._mapped.drop((handle.nonce, handle.generation))
            raise
        return True

    def _locks_of(self, handle: Handle, place: bytes) -> SlotLocks:
        locks = self._locks.get(handle.nonce)
        if locks is not None:
            return locks
        _, _, pid, lock_fd, _ = _BLOB.unpack_from(place)
        with self._lock:
            locks = self._locks.get(handle.nonce)
            if locks is None:
                locks = self._locks[handle.nonce] = vm.owner_locks(pid, handle.table, lock_fd)
            return locks

    def forget(self, nonce: bytes) -> None:
        """The owner is gone."""
        if self._mapped is not None:
            self._mapped.forget(nonce)
        with self._lock:
            locks = self._locks.pop(nonce, None)
        if locks is not None:
            locks.close()

    def close(self) -> None:
        """Close the owners' lock files."""
        if self._mapped is not None:
            self._mapped.close()
        with self._lock:
            for locks in self._locks.values():
                locks.close()
            self._locks.clear()
        self._places.clear()

    def abandon(self) -> None:
        """See `Transport`."""
        for locks in self._locks.values():
            os.close(locks.fd)
            locks.fd = -1


@lru_cache(maxsize=1)
def machine() -> tuple[bytes, int]:
    """Boot of this kernel and its namespace of process ids: where a process id means the same."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = bytes.fromhex(file.read().strip().replace("-", ""))
        return boot, os.stat("/proc/self/ns/pid").st_ino
    except (OSError, ValueError):
        return os.urandom(16), 0  # equal to nobody's but this process's own


@lru_cache(maxsize=1)
def _let_others_look() -> None:
    """Where Yama lets a process look only at its children, allow all that the kernel allows otherwise: the same user."""
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope") as file:
            scope = file.read().strip()
    except OSError:
        return
    if scope == "1" and sys.platform == "linux":
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(ctypes.c_int(_PR_SET_PTRACER), ctypes.c_ulong(_ANY_PROCESS), 0, 0, 0)
