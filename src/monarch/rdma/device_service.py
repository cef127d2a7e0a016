"""The device service: memory of this process's GPUs, for readers and writers that reach host memory only.

    read     StageMemory ->    the bytes are copied to pinned host memory, whose handle is the answer; UnstageMemory gives it back
    write    StageMemory ->    the handle of pinned host memory to write to; UnstageMemory ->    the bytes are copied to the device

The host memory is an ordinary region, so `cma` and `tcp` carry it with all their checks. A thread of this process does the copies: it
needs the interpreter for some microseconds each, so an owner that never lets go of it keeps others waiting.

Rules of this file:
    1. At most `MOST_PIECES` pieces of `PIECE_BYTES`, which are kept; who finds none waits, in order.
    2. A piece has a generation of its own for each use. One that was not given back in time is dropped, and others replace it.
    3. Bytes are copied while their region is held, and only count when it is not dropped behind the copy.

Read next: `staged_transport.py`, the other end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from monarch._wire.memory_messages import Staged, StageMemory, UnstageMemory
from monarch.rdma import staging
from monarch.rdma.handles import Handle, encode_handle
from monarch.rdma.memory import LocalMemory, memory_of
from monarch.rdma.regions import READ_ONLY, RegionTable
from monarch.rdma.workers import Workers

if TYPE_CHECKING:
    from monarch.actor.process import Process

_logger = logging.getLogger("monarch.rdma")
PIECE_BYTES = 16 << 20
MOST_PIECES = 4
_SLACK_S = 5.0
_NUM_THREADS = 2
_CLOSE_S = 1.0
Span = tuple[int, int, int]
"""Generation, offset, bytes."""
Answer = Callable[[Staged], None]


class Device(Protocol):
    """Copies between devices and the host. Thread: any."""

    def allocate(self, nbytes: int) -> LocalMemory:
        """Host memory that copies are fast with."""

    def to_host(self, memory: LocalMemory, offset: int, nbytes: int, host: LocalMemory, at: int) -> None:
        """Copy from a device; what was queued for it before is waited for."""

    def from_host(self, memory: LocalMemory, offset: int, nbytes: int, host: LocalMemory, at: int) -> None:
        """Copy to a device; the bytes are there at the return."""


class CudaDevice:
    """The devices of torch."""

    def allocate(self, nbytes: int) -> LocalMemory:
        """Pinned memory."""
        return memory_of(staging.pinned(nbytes))

    def to_host(self, memory: LocalMemory, offset: int, nbytes: int, host: LocalMemory, at: int) -> None:
        """See `Device`."""
        staging.wait_for_kernels([memory])
        staging.bytes_of(host, at, nbytes).copy_(staging.bytes_of(memory, offset, nbytes))

    def from_host(self, memory: LocalMemory, offset: int, nbytes: int, host: LocalMemory, at: int) -> None:
        """See `Device`."""
        staging.wait_for_kernels([memory])
        staging.bytes_of(memory, offset, nbytes).copy_(staging.bytes_of(host, at, nbytes))
        staging.wait_for_kernels([memory])


class Pool:
    """Pieces of host memory, a few in all. Thread: any."""

    def __init__(self, allocate: Callable[[int], LocalMemory]) -> None:
        self._allocate = allocate
        self._lock = threading.Lock()
        self._free: list[LocalMemory] = []
        self._num_pieces = 0
        self._waiting: deque[Callable[[LocalMemory], None]] = deque()

    def take(self, then: Callable[[LocalMemory], None]) -> None:
        """Call `then(piece)`: now, or on the thread of whoever gives one back."""
        with self._lock:
            piece = self._free.pop() if self._free and not self._waiting else None
            if piece is None and self._num_pieces >= MOST_PIECES:
                self._waiting.append(then)
                return
            if piece is None:
                self._num_pieces += 1
        then(self._made() if piece is None else piece)

    def _made(self) -> LocalMemory:
        try:
            return self._allocate(PIECE_BYTES)
        except BaseException:
            with self._lock:
                self._num_pieces -= 1
            raise

    def put_back(self, piece: LocalMemory) -> None:
        """Nobody uses the piece any more."""
        with self._lock:
            then = self._waiting.popleft() if self._waiting else None
            if then is None:
                self._free.append(piece)
        if then is not None:
            then(piece)

    def lose(self) -> None:
        """A piece is not to be used again."""
        with self._lock:
            self._num_pieces -= 1
            then = self._waiting.popleft() if self._waiting else None
        if then is not None:
            self.take(then)


class DeviceService:
    """See the head of this file. Thread: any."""

    def __init__(
        self, process: Process, table: Callable[[], RegionTable], publish: Callable[[LocalMemory], Handle], device: Device
    ) -> None:
        """Args:
        publish: make a region of host memory.
        """
        self._process = process
        self._table = table
        self._publish = publish
        self.device = device
        """For copies; tests have one of their own."""
        self._pool = Pool(lambda nbytes: self.device.allocate(nbytes))
        self._workers = Workers("monarch-rdma-device", _NUM_THREADS)
        self._lent: dict[int, LocalMemory] = {}
        """Pieces in use, by the generation of the use."""
        self._lock = threading.Lock()

    def on_message(self, message: StageMemory | UnstageMemory, answer: Answer) -> None:
        """Somebody wants bytes of a device, or has written some. Thread: net loop, on which `answer` will run too."""
        reply = partial(self._process.proc.loop.call_soon, answer)
        if isinstance(message, UnstageMemory):
            self._workers.start_task(partial(self._guarded, reply, partial(self._unstage, message, reply)))
        elif not message.spans:
            answer(Staged())
        else:
            self._workers.start_task(partial(self._guarded, reply, partial(self._stage, message, reply)))

    def _guarded(self, reply: Answer, task: Callable[[], None]) -> None:
        try:
            task()
        except Exception as exc:  # out of memory, an error of the device
            _logger.warning("memory of a device can't be staged: reason=%r", exc)
            reply(Staged(failure=str(exc) or type(exc).__name__))

    def _stage(self, message: StageMemory, reply: Answer) -> None:
        end_s = time.monotonic() + message.patience_s
        self._pool.take(
            lambda piece: self._workers.start_task(partial(self._guarded, reply, partial(self._fill, message, end_s, reply, piece)))
        )

    def _fill(self, message: StageMemory, end_s: float, reply: Answer, piece: LocalMemory) -> None:
        if time.monotonic() >= end_s:
            self._pool.put_back(piece)
            reply(Staged(failure="its time is over"))
            return
        try:
            gone = 0 if message.kind == "write" else self._copy(message.spans, piece, self.device.to_host, to_write=False)
        except BaseException:
            self._pool.put_back(piece)
            raise
        if gone:
            self._pool.put_back(piece)
            reply(Staged(gone=gone))
            return
        handle = self._publish(piece)
        with self._lock:
            self._lent[handle.generation] = piece
        delay_s = min(message.patience_s + _SLACK_S, threading.TIMEOUT_MAX)
        self._process.proc.loop.call_later(delay_s, partial(self._reclaim, handle.generation))
        reply(Staged(encode_handle(handle)))

    def _unstage(self, message: UnstageMemory, reply: Answer) -> None:
        with self._lock:
            piece = self._lent.pop(message.generation, None)
        if piece is None:
            reply(Staged(failure="its time is over"))
            return
        try:
            gone = self._copy(message.spans, piece, self.device.from_host, to_write=True)
        finally:
            self._table().drop(message.generation)
            self._pool.put_back(piece)
        reply(Staged(gone=gone))

    def _reclaim(self, generation: int) -> None:
        """Its user is gone, or too late; whoever writes to it now does so to memory that nobody uses."""
        with self._lock:
            piece = self._lent.pop(generation, None)
        if piece is not None:
            self._table().drop(generation)
            self._pool.lose()

    def _copy(self, spans: Sequence[Span], piece: LocalMemory, copy: Callable[..., None], *, to_write: bool) -> int:
        """Copy between regions and a piece; the generation of one that was dropped, or 0."""
        table, at = self._table(), 0
        for generation, offset, nbytes in spans:
            region = table.hold(generation)
            if region is None:
                return generation
            try:
                if min(offset, nbytes) < 0 or offset + nbytes > region.memory.nbytes or at + nbytes > piece.nbytes:
                    raise ValueError(f"bytes {offset} to {offset + nbytes} of buffer {generation - 1} do not exist, or are too many")
                if to_write and region.flags & READ_ONLY:
                    raise ValueError(f"buffer {generation - 1} is over read-only memory")
                copy(region.memory, offset, nbytes, piece, at)
                if not table.is_live(generation):
                    return generation
            finally:
                table.let_go(generation)
            at += nbytes
        return 0

    def close(self) -> None:
        """End the threads; the pieces end with the table."""
        self._workers.close(_CLOSE_S)
        with self._lock:
            self._lent.clear()
