"""The transport "nixl": InfiniBand, RoCE, EFA and memory of GPUs, by the NIXL library and the UCX in it, which has ways without them too.

The first use of a region by a process asks its owner for the keys (`nixl_holds.py`), on the owner's message loop. After that nobody of the
owner's takes part but NIXL's own thread, which needs no interpreter.

    read     data, and when they are complete the entry of the owner's table: right, or the data are worth nothing
    write    the entry, and when it was right the data, to memory that stays where it is because this process holds it

Rules of this file:
    1. NIXL promises no order within a transfer, so what must be in order is in two.
    2. Small ops go through memory of the transport's own that stays registered; what is larger is registered where it is, for as long as
       the user's object lives.

Read next: `nixl_agent.py` for the thread that does all this.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from monarch import config
from monarch._base.buffers import address_of
from monarch._wire.memory_messages import AskMemory, ReleaseMemory
from monarch.rdma import nixl_library, staging
from monarch.rdma.errors import BufferGoneError, DeadlineError, OwnerGoneError, TransferError, UnreachableError
from monarch.rdma.handles import Handle
from monarch.rdma.memory import LocalMemory
from monarch.rdma.nixl_agent import Agent, BrokenError, Driver, Place, Steps, unique_name
from monarch.rdma.nixl_holds import Answer, Lent, Peer, device_of
from monarch.rdma.regions import ENTRY_BYTES, Region, RegionTable
from monarch.rdma.transport import Op, Piece, check_deadline, connecting, even_cut

if TYPE_CHECKING:
    from monarch._base.ids import ProcRef
    from monarch.actor.process import Process

_logger = logging.getLogger("monarch.rdma")
_BLOB = struct.Struct("<Qi")
_MOST_PIECE = 32 << 20
_MOST_OPS = 1024
_SMALL_BYTES = 64 << 10
"""Copying this much is cheaper than registering it."""
_ROOM_BYTES = 4 << 20
_MOST_KNOWN = 8192
_ASK_S = 5.0
"""How long an owner whose agent runs may take to answer."""
_CLOSE_S = 2.0
_SILENT_S = 0.5
"""A connection on which nothing has moved for longer than this, and than some transfer's time, is not used again."""


class _Slab:
    """Registered memory for the small ops and the entries of one piece. Thread: that of the driver."""

    def __init__(self, agent: Agent) -> None:
        self.pages = mmap.mmap(-1, _ROOM_BYTES + _MOST_OPS * ENTRY_BYTES)
        self.address = address_of(self.pages)[0]
        agent.register(self.address, len(self.pages))
        self.entries_at = self.address + _ROOM_BYTES

    def entries(self, count: int) -> bytes:
        return self.pages[_ROOM_BYTES : _ROOM_BYTES + count * ENTRY_BYTES]


class _NoDeviceError(TransferError):
    """Local memory of a GPU can't be registered."""


class _Far(NamedTuple):
    """A region of another process."""

    address: int
    device: int
    """Number of its GPU; -1 for none."""
    entry_address: int
    entry: bytes


class _Moves:
    """Pairs of places of one kind each; neighbours that are neighbours on both sides are one."""

    def __init__(self) -> None:
        self.near: list[Place] = []
        self.far: list[Place] = []
        self._next_near = self._next_far = -1

    def add(self, near: int, near_device: int, far: int, far_device: int, nbytes: int) -> None:
        if near == self._next_near and far == self._next_far and near_device == self.near[-1][2] and far_device == self.far[-1][2]:
            nbytes += self.near[-1][1]
            near, far = self.near.pop()[0], self.far.pop()[0]
        self.near.append((near, nbytes, near_device))
        self.far.append((far, nbytes, far_device))
        self._next_near, self._next_far = near + nbytes, far + nbytes


class NixlTransport:
    """See the head of this file. Thread: any."""

    name = "nixl"
    is_instant = False
    num_threads = 2
    takes_devices = True

    def __init__(self, process: Process, table: Callable[[], RegionTable]) -> None:
        """Args:
        table: the regions of this process.
        """
        self._process = process
        self._table = table
        self._driver = Driver(unique_name())
        self._lent = Lent(process, table, self._driver)
        self._peers: dict[bytes, Peer] = {}
        """By nonce."""
        self._lock = threading.Lock()
        self._registers_devices = True
        self._slabs: list[_Slab] = []
        self._fars: dict[tuple[bytes, int], _Far] = {}
        """By nonce and generation. Thread: that of the driver."""
        self._registered: dict[tuple[int, int, int], Any] = {}
        """Local memory, by what backs it, address and bytes. Thread: that of the driver."""

    # --- as an owner ---------------------------------------------------------------------------------------------

    def register(self, region: Region) -> bytes | None:
        """Where the entry is, and on which GPU the memory; None when NIXL is of no use here. Nothing is started."""
        device = device_of(region)
        if not nixl_library.wanted(for_device_memory=device >= 0):
            return None
        return _BLOB.pack(region.entry_address, device)

    def deregister(self, region: Region) -> None:
        """Those who hold the region are asked to let go."""
        self._lent.on_dropped(region)

    def on_message(self, message: AskMemory | ReleaseMemory, sender: ProcRef, answer: Answer) -> None:
        """Somebody wants keys of this process, or back what this process holds. Thread: net loop."""
        if isinstance(message, AskMemory):
            self._lent.on_ask(message, sender, answer)
            return
        peer = self._peers.get(message.nonce)
        if peer is None:
            answer()
        else:
            peer.release(message.generation, answer)

    # --- as a holder of handles ----------------------------------------------------------------------------------

    def connect(self, handle: Handle, deadline_s: float) -> None:
        """Start an agent, learn the owner's keys, and read its table; see `Transport`."""
        try:
            _, device = _BLOB.unpack(handle.blobs[self.name])
        except struct.error:
            raise UnreachableError("the handle is broken") from None
        if not nixl_library.wanted(for_device_memory=device >= 0):
            raise UnreachableError("this process has no RDMA device, or NIXL is not installed or not wanted here")
        limit_s = config.seconds("rdma_nixl_start_limit")
        self._driver.start(limit_s, deadline_s)
        check_deadline(deadline_s)
        soon_s = min(deadline_s, time.monotonic() + limit_s + _ASK_S)
        with connecting(deadline_s, "the owner, or its agent of NIXL, does not answer"):
            self._move(Piece("read", [Op("read", _NOTHING, 0, handle, 0, 0)]), soon_s)

    def lane(self, handle: Handle) -> str:
        """See `Transport`; an owner that does not answer keeps nobody else waiting."""
        return f"{self.name} {handle.ref.uid}"

    def cut(self, ops: Sequence[Op]) -> list[Piece]:
        """See `Transport`."""
        return even_cut(ops, num_threads=self.num_threads, most_bytes=_MOST_PIECE, most_ops=_MOST_OPS)

    def move(self, piece: Piece, deadline_s: float) -> None:
        """See `Transport`."""
        check_deadline(deadline_s)
        has_devices = any(op.local.device != "cpu" for op in piece.ops)
        if has_devices and not self._registers_devices:
            staging.move_staged(self, piece, deadline_s)
            return
        if has_devices:
            staging.wait_for_kernels([op.local for op in piece.ops])
        try:
            self._move(piece, deadline_s)
        except _NoDeviceError:  # this UCX knows no CUDA, or the machine no GPUDirect
            self._registers_devices = False
            staging.move_staged(self, piece, deadline_s)
        except BrokenError:  # once more, on a new connection: of an owner that is gone there is none, and that is told in words
            self._move(piece, deadline_s)

    def _move(self, piece: Piece, deadline_s: float) -> None:
        handle = piece.ops[0].handle
        with self._lock:
            peer = self._peers.setdefault(handle.nonce, Peer(handle.nonce))
        generations = {op.handle.generation for op in piece.ops}
        while True:
            holds, missing = peer.take(generations)
            if not missing:
                break
            self._ask(peer, handle, missing, deadline_s)

        def on_end() -> None:
            for answer in peer.give_back(holds):
                self._process.proc.loop.call_soon(answer)

        began_s, epoch = time.monotonic(), holds[0].epoch
        try:
            self._driver.do(lambda agent: self._steps(agent, peer, piece), deadline_s, on_end).wait()
        except BrokenError:
            peer.reset(epoch, self._forget_agent)
            raise
        except DeadlineError:
            now_s = time.monotonic()
            if peer.moved_s < began_s <= now_s - _SILENT_S:  # it may be the connection; whoever comes next makes a new one
                _logger.warning("nothing moves by NIXL: owner=%s seconds=%.1f", handle.ref.uid, now_s - began_s)
                peer.reset(epoch, self._forget_agent)
            raise
        peer.moved_s = time.monotonic()

    def _ask(self, peer: Peer, handle: Handle, missing: Sequence[int], deadline_s: float) -> None:
        """Get the keys of regions, and hold them."""
        message, epoch = peer.question(missing)
        answer, noted = self._process.proc.request(handle.ref, message), threading.Event()

        def on_answer() -> None:  # on the net loop, so that a `ReleaseMemory` behind the answer finds it noted
            if not noted.is_set():
                if answer._error is None and not answer._value.refusal:
                    peer.on_keys(epoch, message, answer._value)
                noted.set()

        answer._when_done(on_answer)
        if not noted.wait(max(0.0, min(deadline_s - time.monotonic(), threading.TIMEOUT_MAX))):
            raise DeadlineError
        if answer._error is not None:
            raise OwnerGoneError(str(answer._error)) from answer._error
        keys = answer._value
        if keys.refusal:
            raise UnreachableError(f"the owner: {keys.refusal}")
        if keys.gone:
            raise BufferGoneError(keys.gone[0] - 1)
        if keys.refused:
            raise UnreachableError(f"the owner: {keys.refused[0][1]}", generations=dict(keys.refused))

    # --- on the thread of the driver -----------------------------------------------------------------------------

    def _steps(self, agent: Agent, peer: Peer, piece: Piece) -> Steps:
        self._load(agent, peer)
        slab = self._slabs.pop() if self._slabs else self._new_slab(agent)
        try:
            if piece.kind == "write":
                yield from self._check(agent, peer, piece, slab)
            moves, copies = self._placed(agent, piece, slab)
            if piece.kind == "write":
                for own, near, nbytes in copies:
                    ctypes.memmove(own, near, nbytes)
            for (is_local_device, is_remote_device), pairs in moves.items():
                yield agent.begin(piece.kind, pairs.near, is_local_device, pairs.far, is_remote_device, peer.name)
            if piece.kind == "read":
                yield from self._check(agent, peer, piece, slab)
                for own, near, nbytes in copies:
                    ctypes.memmove(near, own, nbytes)
        finally:
            self._slabs.append(slab)

    def _new_slab(self, agent: Agent) -> _Slab:
        try:
            return _Slab(agent)
        except TransferError as exc:
            raise UnreachableError(exc.what, next=exc.next) from exc

    def _load(self, agent: Agent, peer: Peer) -> None:
        if peer.nonce == self._table().nonce:
            peer.name = agent.name
            peer.unloaded.clear()
        while peer.unloaded:
            peer.name = agent.load(peer.unloaded.pop(0))

    def _check(self, agent: Agent, peer: Peer, piece: Piece, slab: _Slab) -> Iterator[int]:
        """Whether the owner's table has the entries that the handles mean."""
        handles = {op.handle.generation: op.handle for op in piece.ops}.values()
        fars = [self._far(handle) for handle in handles]
        pairs = _Moves()
        for number, far in enumerate(fars):
            pairs.add(slab.entries_at + number * ENTRY_BYTES, 0, far.entry_address, 0, ENTRY_BYTES)
        yield agent.begin("read", pairs.near, False, pairs.far, False, peer.name)
        found = slab.entries(len(fars))
        if found != b"".join([far.entry for far in fars]):
            for number, handle in enumerate(handles):
                if found[number * ENTRY_BYTES : (number + 1) * ENTRY_BYTES] != handle.entry():
                    raise BufferGoneError(handle.number)

    def _placed(self, agent: Agent, piece: Piece, slab: _Slab) -> tuple[dict[tuple[bool, bool], _Moves], list[tuple[int, int, int]]]:
        """What NIXL is to move, by whether each side is on a GPU; and what is copied to or from the slab: there, here, bytes."""
        moves: dict[tuple[bool, bool], _Moves] = {}
        copies = []
        used = 0
        for _, local, local_offset, handle, offset, nbytes in piece.ops:
            if not nbytes:
                continue
            is_host = local.device == "cpu"
            near, near_device = local.address + local_offset, 0
            if is_host and nbytes <= _SMALL_BYTES and used + nbytes <= _ROOM_BYTES:
                copies.append((slab.address + used, near, nbytes))
                near = slab.address + used
                used += nbytes
            else:
                near_device = self._registered_device(agent, local, handle)
            far = self._far(handle)
            pairs = moves.get((not is_host, far.device >= 0)) or moves.setdefault((not is_host, far.device >= 0), _Moves())
            pairs.add(near, near_device, far.address + offset, max(far.device, 0), nbytes)
        return moves, copies

    def _far(self, handle: Handle) -> _Far:
        key = handle.nonce, handle.generation
        far = self._fars.get(key)
        if far is None:
            if len(self._fars) >= _MOST_KNOWN:
                self._fars.clear()
            entry_address, device = _BLOB.unpack(handle.blobs[self.name])
            far = self._fars[key] = _Far(handle.address, device, entry_address, handle.entry())
        return far

    def _registered_device(self, agent: Agent, local: LocalMemory, remote: Handle) -> int:
        """Have local memory registered for as long as the user has it; the number of its device."""
        device = -1 if local.device == "cpu" else int(local.device.rpartition(":")[2])
        lifetime = local.lifetime
        key = id(lifetime), local.address, local.nbytes
        if key not in self._registered:
            try:
                self._registered[key] = agent.register(local.address, local.nbytes, device)
            except TransferError as exc:
                if device >= 0:
                    raise _NoDeviceError(exc.what, next=exc.next) from exc
                raise UnreachableError(f"memory of this process: {exc.what}", next=exc.next, generations=(remote.generation,)) from exc
            weakref.finalize(lifetime, self._driver.do_soon, partial(self._deregister, key)).atexit = False
        return max(device, 0)

    def _deregister(self, key: tuple[int, int, int], agent: Agent) -> None:
        agent.deregister(self._registered.pop(key))

    # --- the end -------------------------------------------------------------------------------------------------

    def forget(self, nonce: bytes) -> None:
        """The owner is gone, or the connection to it."""
        peer = self._peers.get(nonce)
        if peer is not None:
            peer.reset(peer.epoch, self._forget_agent)

    def _forget_agent(self, name: str) -> None:
        if name != self._driver.name:
            self._driver.do_soon(lambda agent: agent.forget(name))

    def close(self) -> None:
        """Destroy the agent; what others hold is free then."""
        if self._driver.close(_CLOSE_S):
            self._lent.close()

    def abandon(self) -> None:
        """See `Transport`."""
        self._driver.abandon()


_NOTHING = LocalMemory(0, 0, None)
