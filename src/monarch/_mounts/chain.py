"""Chains: blocks of bytes that travel from one source through a row of processes, each of which keeps a copy.

    context = new_ctx(BLOCK_SIZE)               # in each process of the row
    server = serve()                            # ... whose `addr` the one before it gets
    forward(server, successor_addr, context)    # None: the last one

    session = connect(first_addr)               # at the source
    send_block(session, data, CHUNK, tag=0)
    ctx_wait_into(context, address, len, want, timeout_ms)      # in each process, once for each block

A block travels in chunks, each of which is passed on before the next one comes, so a long row takes hardly longer than a short one.
Chunks are messages: cut links, gateways, authentication and TLS are dealt with where all messages are.

Rules of this file:
    1. Chunks of a source come in order, because messages do; blocks are waited for in the order in which they were sent.
    2. A process of the row keeps at most what was sent and not yet waited for.

Read next: `chain_actors.py`, which delivers blocks of a mount so.
"""

from __future__ import annotations

import ctypes
import pickle
import threading
from collections import deque
from typing import Any, NamedTuple

from monarch._base.errors import explain
from monarch.actor import Channel, Port, PortReceiver

CHUNK_BYTES = 64 << 10
STREAMS = 128


class ChainCtx:
    """Where the blocks of one process of a row come together. Thread: any."""

    def __init__(self, block_size: int) -> None:
        if block_size <= 0:
            raise ValueError(explain(f"blocks of {block_size} bytes hold nothing", next="pass the size of the largest block"))
        self._block_size = block_size
        self._changed = threading.Condition()
        self._blocks: deque[bytearray] = deque()
        """The last one may be incomplete, of which `_left` bytes are to come."""
        self._left = 0
        self._problem = ""
        self._listeners: list[Port[None]] = []

    def add_listener(self, port: Port[None]) -> None:
        """Somebody receives for this context, until None comes to `port`."""
        self._listeners.append(port)

    def take_chunk(self, tag: int, total: int, offset: int, data: Any) -> None:
        """A part of a block has come.

        Args:
            tag: of the sender's.
            total: bytes of the block.
        """
        with self._changed:
            if not self._left:
                if not 0 < total <= self._block_size or offset:
                    self.fail(f"a block of {total} bytes began at {offset}, in a chain of blocks of {self._block_size}")
                    return
                self._blocks.append(bytearray(total))
                self._left = total
            block = self._blocks[-1]
            if offset != len(block) - self._left or len(data) > self._left:
                self.fail(f"{len(data)} bytes at {offset} came, {self._left} at {len(block) - self._left} were next")
                return
            block[offset : offset + len(data)] = data
            self._left -= len(data)
            if not self._left:
                self._changed.notify_all()

    def fail(self, problem: str) -> None:
        """Nothing more will come: whoever waits, and will wait, hears of it."""
        with self._changed:
            self._problem = self._problem or problem
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bytearray:
        """The next block; RuntimeError when there will be none, TimeoutError when it does not come in time."""
        with self._changed:
            there = self._changed.wait_for(lambda: self._problem or len(self._blocks) > bool(self._left), timeout_s)
            if len(self._blocks) > bool(self._left):
                return self._blocks.popleft()
        if there:
            raise RuntimeError(explain(f"the chain is broken: {self._problem}", next="close it, and make another one"))
        raise TimeoutError(explain(f"no block has come within {timeout_s:g} s", where=f"{self._left} bytes of one are to come"))

    def close(self) -> None:
        """As `ctx_close`."""
        self.fail("it was closed")
        listeners, self._listeners = self._listeners, []
        for port in listeners:
            port.send(None)


class ChainServer:
    """The place in a row where one process receives."""

    def __init__(self) -> None:
        self.addr, self._receiver = Channel.open()

    def start(self, successor: ChainSession | None, ctx: ChainCtx) -> None:
        """Receive from now on, until the context is closed."""
        ctx.add_listener(self.addr)
        threading.Thread(target=_relay, args=(self._receiver, successor, ctx), name="monarch-chain", daemon=True).start()


class ChainSession(NamedTuple):
    """The way to a process of a row."""

    port: Port[Any]


def _relay(receiver: PortReceiver[Any], successor: ChainSession | None, ctx: ChainCtx) -> None:
    while (chunk := receiver.recv().get()) is not None:
        if successor is not None:
            successor.port.send(_chunk(*chunk))
        ctx.take_chunk(*chunk)


def _chunk(tag: int, total: int, offset: int, data: Any) -> Any:
    return tag, total, offset, pickle.PickleBuffer(data)


def new_ctx(block_size: int) -> ChainCtx:
    """A context for blocks of at most so many bytes."""
    return ChainCtx(block_size)


def serve(bind_addr: str | None = None) -> ChainServer:
    """Be ready to receive; `addr` of the result is for `connect`, in any process.

    Args:
        bind_addr: accepted; what comes takes the ways that all messages to this process take.
    """
    return ChainServer()


def serve_port(instance: object) -> ChainServer:
    """As `serve`, for the running actor."""
    return ChainServer()


def connect(addr: Port[Any], num_streams: int = STREAMS) -> ChainSession:
    """The way to a process that serves.

    Args:
        num_streams: accepted; there is one stream to each process.
    """
    return ChainSession(addr)


def send_block(session: ChainSession, data: Any, chunk_size: int, tag: int, used: int | None = None) -> int:
    """Send a block down the row; returns when it is on its way.

    Args:
        data: an object with a buffer; its bytes may be changed afterwards.
        chunk_size: bytes of a chunk.
        tag: a number of the caller's.
        used: bytes of `data` to send; None: all.

    Returns:
        Number of bytes that were sent.

    Raises:
        ValueError: no bytes, or chunks of none.
    """
    with memoryview(data) as view, view.cast("B") as block, block[: len(block) if used is None else used] as sent:
        total = len(sent)
        if not total or chunk_size <= 0:
            raise ValueError(explain(f"{total} bytes can't be sent in chunks of {chunk_size}", next="send something, in chunks of 64 KiB"))
        for offset in range(0, total, chunk_size):
            session.port.send(_chunk(tag, total, offset, bytes(sent[offset : offset + chunk_size])))
        return total


def send_block_to_port(instance: object, port: Port[Any], data: Any, chunk_size: int, tag: int, used: int | None = None) -> int:
    """As `send_block`, to the `addr` of a server."""
    return send_block(ChainSession(port), data, chunk_size, tag, used)


def forward(server: ChainServer, successor: Port[Any] | None, ctx: ChainCtx, num_streams: int = STREAMS) -> None:
    """Receive blocks into `ctx` from now on, and pass them on.

    Args:
        successor: `addr` of the next process of the row; None: this is the last one.
        num_streams: as for `connect`.
    """
    server.start(None if successor is None else connect(successor, num_streams), ctx)


def ctx_wait_into(ctx: ChainCtx, dst_addr: int, dst_len: int, want: int, timeout_ms: int) -> None:
    """Wait for the next block, and copy it to an address.

    Args:
        dst_len: bytes that are free there.
        want: bytes that the block must have.

    Raises:
        TimeoutError: it has not come in time.
        RuntimeError: the chain is broken or closed, or the block has another size.
        ValueError: there is no room for it.
    """
    if want > dst_len:
        raise ValueError(explain(f"a block of {want} bytes has no room in {dst_len}", next="pass a larger destination"))
    block = ctx.wait(timeout_ms / 1000)
    if len(block) != want:
        raise RuntimeError(
            explain(f"a block of {len(block)} bytes has come, not of {want}", next="wait for blocks in the order of sending")
        )
    ctypes.memmove(dst_addr, (ctypes.c_char * want).from_buffer(block), want)


def ctx_close(ctx: ChainCtx) -> None:
    """End what receives into `ctx`; whoever waits gets RuntimeError. Harmless twice."""
    ctx.close()
