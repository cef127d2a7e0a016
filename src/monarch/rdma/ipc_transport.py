"""The transport "ipc": memory of a GPU of this machine, mapped by CUDA's own handles as torch makes them, and copied by the GPU.

    once per storage    ShareStorage ->    the owner has torch share the storage with this process, which maps it
    each transfer       the lock of the slot, the owner's table, the copy, the table again; as `cma` does for host memory

Written against the documented interface of torch and CUDA; it has not run on hardware. Whatever of it fails before the first copy is
an `UnreachableError`, and another transport is taken.

Rules of this file:
    1. Only `cuda_memory.py` touches CUDA. What is decided here, is decided by what the handle, the kernel and the owner say.
    2. A mapping lives until its storage is found dropped, its owner is gone, or `_MOST_MAPPED` others were used since.
    3. The owner's kernels are not waited for: nothing tells which. It synchronises before it says that the bytes are there.

Read next: `vm_transport.py`, whose locks and table look-ups these are.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from monarch._wire.memory_messages import ShareStorage, Staged
from monarch.rdma.errors import BufferGoneError, TransferError, UnreachableError
from monarch.rdma.handles import Handle
from monarch.rdma.memory import LocalMemory
from monarch.rdma.regions import Region, RegionTable
from monarch.rdma.transport import Op, Piece, check_deadline, connecting, cut, wait_answer
from monarch.rdma.vm_transport import VmTransport
from monarch.rdma.workers import Workers

if TYPE_CHECKING:
    from monarch.actor.process import Process

_BLOB = struct.Struct("<16sQQ")
"""The GPU's identity, a number of the storage, and where in it the region is; what `cma` would need is in front."""
_MOST_MAPPED = 64
_PIECE_BYTES = 256 << 20
_MOST_OPS = 256
_ASK_S = 5.0
_CLOSE_S = 1.0
Answer = Callable[[Staged], None]


class Cuda(Protocol):
    """What must be done by CUDA. Thread: any."""

    def uuid(self, device: str) -> bytes:
        """16 bytes by which a GPU is known in every process; RuntimeError when there are none."""

    def find(self, uuid: bytes) -> str:
        """The GPU as this process calls it; "" when it sees none such."""

    def storage_start(self, memory: LocalMemory) -> int:
        """Address of the first byte of the storage that memory is in."""

    def share(self, memory: LocalMemory) -> bytes:
        """What one other process needs to map the storage that memory is in."""

    def map(self, shared: bytes, device: str) -> Any:
        """Map a storage of another process."""

    def copy(self, kind: str, storage: Any, offset: int, local: LocalMemory, local_offset: int, nbytes: int) -> None:
        """Copy from a storage to local memory ("read") or back; all bytes are there at the return."""


class _Numbers:
    """A number for each storage that has published regions. Thread: any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._known: dict[int, list[int]] = {}
        """Number and count of live regions, by the identity of the storage, which they pin."""

    def take(self, storage: object) -> int:
        """The storage's number, for one region more."""
        with self._lock:
            entry = self._known.get(id(storage))
            if entry is None:
                self._last += 1
                entry = self._known[id(storage)] = [self._last, 0]
            entry[1] += 1
            return entry[0]

    def give_back(self, storage: object) -> None:
        """A region of the storage was dropped."""
        with self._lock:
            entry = self._known.get(id(storage))
            if entry is not None:
                entry[1] -= 1
                if not entry[1]:
                    del self._known[id(storage)]


class IpcTransport:
    """See the head of this file. Thread: any."""

    name = "ipc"
    is_instant = False
    num_threads = 1
    takes_devices = True

    def __init__(self, process: Process, table: Callable[[], RegionTable], cuda: Cuda) -> None:
        """Args:
        table: the regions of this process.
        """
        self._process = process
        self._table = table
        self._cuda = cuda
        self._kernel = VmTransport(table)
        self._numbers = _Numbers()
        self._mapped: OrderedDict[tuple[bytes, int], Any] = OrderedDict()
        """By nonce and number of the storage."""
        self._lock = threading.Lock()
        self._workers = Workers("monarch-rdma-ipc", 1)

    # --- as an owner ---------------------------------------------------------------------------------------------

    def register(self, region: Region) -> bytes | None:
        """Where the entry is, which GPU it is, and where in which storage; None for other memory than CUDA's."""
        memory = region.memory
        place = self._kernel.place(region)
        if not memory.device.startswith("cuda") or place is None:
            return None
        try:
            uuid, start = self._cuda.uuid(memory.device), self._cuda.storage_start(memory)
        except RuntimeError:  # a GPU, or a torch, without identities
            return None
        return place + _BLOB.pack(uuid, self._numbers.take(memory.pin), memory.address - start)

    def deregister(self, region: Region) -> None:
        """See `Transport`."""
        if region.memory.device.startswith("cuda"):
            self._numbers.give_back(region.memory.pin)

    def on_message(self, message: ShareStorage, answer: Answer) -> None:
        """Somebody wants to map a storage. Thread: net loop."""
        reply = partial(self._process.proc.loop.call_soon, answer)
        self._workers.start_task(partial(self._share, message.generation, reply))

    def _share(self, generation: int, reply: Answer) -> None:
        region = self._table().hold(generation)
        if region is None:
            reply(Staged(gone=generation))
            return
        try:
            reply(Staged(self._cuda.share(region.memory)))
        except Exception as exc:  # of CUDA: memory that can't be shared, such as that of another allocator
            reply(Staged(failure=str(exc) or type(exc).__name__))
        finally:
            self._table().let_go(generation)

    # --- as a holder of handles ----------------------------------------------------------------------------------

    def connect(self, handle: Handle, deadline_s: float) -> None:
        """Look at the owner's table, find the GPU, and map the storage; see `Transport`."""
        place, _, _, _ = self._parsed(handle)
        if handle.nonce == self._table().nonce:
            raise UnreachableError("a process can't map its own memory")
        self._kernel.visit(place, handle)
        soon_s = min(deadline_s, time.monotonic() + _ASK_S)
        with connecting(deadline_s, "the owner does not answer"), self._kernel.held(place, handle):
            self._storage(handle, soon_s)
            self._kernel.check(place, handle)

    def _parsed(self, handle: Handle) -> tuple[bytes, str, int, int]:
        """What `cma` would need, the GPU as it is called here, number of the storage, and offset in it."""
        blob = handle.blobs[self.name]
        place, rest = blob[: -_BLOB.size], blob[-_BLOB.size :]
        try:
            uuid, number, offset = _BLOB.unpack(rest)
        except struct.error:
            raise UnreachableError("the handle is broken") from None
        device = self._cuda.find(uuid)
        if not device:
            raise UnreachableError(
                "this process does not see the GPU", next="let CUDA_VISIBLE_DEVICES name it, if it is one of this machine"
            )
        return place, device, number, offset

    def lane(self, handle: Handle) -> str:
        """See `Transport`."""
        return f"{self.name} {handle.ref.uid}"

    def cut(self, ops: Sequence[Op]) -> list[Piece]:
        """See `Transport`."""
        return list(cut(ops, piece_bytes=_PIECE_BYTES, most_ops=_MOST_OPS))

    def move(self, piece: Piece, deadline_s: float) -> None:
        """See `Transport`."""
        for op in piece.ops:
            check_deadline(deadline_s)
            try:
                self._move(piece.kind, op, deadline_s)
            except TransferError:
                self._evict(op.handle)  # what is still good is mapped anew
                raise

    def _move(self, kind: str, op: Op, deadline_s: float) -> None:
        handle = op.handle
        place, _, _, start = self._parsed(handle)
        with self._kernel.held(place, handle):
            storage = self._storage(handle, deadline_s)
            self._kernel.check(place, handle)
            try:
                self._cuda.copy(kind, storage, start + op.offset, op.local, op.local_offset, op.nbytes)
            except RuntimeError as exc:
                raise TransferError(f"CUDA can't copy: {exc}") from exc
            self._kernel.check(place, handle)

    def _storage(self, handle: Handle, deadline_s: float) -> Any:
        """The owner's storage, mapped."""
        _, device, number, _ = self._parsed(handle)
        key = handle.nonce, number
        with self._lock:
            if key in self._mapped:
                self._mapped.move_to_end(key)
                return self._mapped[key]
        shared = self._asked(handle, deadline_s)
        try:
            storage = self._cuda.map(shared, device)
        except RuntimeError as exc:
            raise UnreachableError(f"CUDA can't map it: {exc}") from exc
        with self._lock:
            storage = self._mapped.setdefault(key, storage)
            while len(self._mapped) > _MOST_MAPPED:
                self._mapped.popitem(last=False)
        return storage

    def _asked(self, handle: Handle, deadline_s: float) -> bytes:
        request = self._process.proc.request(handle.ref, ShareStorage(handle.nonce, handle.generation))
        answer = wait_answer(request, deadline_s)
        if answer.gone:
            raise BufferGoneError(answer.gone - 1)
        if answer.failure:
            raise UnreachableError(f"the owner can't share it: {answer.failure}")
        return bytes(answer.handle)

    def _evict(self, handle: Handle) -> None:
        _, _, number, _ = self._parsed(handle)
        with self._lock:
            self._mapped.pop((handle.nonce, number), None)

    # --- the end -------------------------------------------------------------------------------------------------

    def forget(self, nonce: bytes) -> None:
        """The owner is gone: unmap what was its."""
        with self._lock:
            for key in [key for key in self._mapped if key[0] == nonce]:
                del self._mapped[key]
        self._kernel.forget(nonce)

    def close(self) -> None:
        """Unmap everything."""
        self._workers.close(_CLOSE_S)
        with self._lock:
            self._mapped.clear()
        self._kernel.close()

    def abandon(self) -> None:
        """See `Transport`."""
        self._kernel.abandon()
