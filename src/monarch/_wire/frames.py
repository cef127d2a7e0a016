"""Frames: the bytes of one message, and their way back into messages.

A frame is a fixed prefix, a header (what it is), a payload (a pickle, opaque here) and a tail: a table of the lengths of
the out-of-band buffers, then the buffers, padded so that each starts at a multiple of 16 bytes from the frame's start.
Buffers that travel through shared memory leave only their (offset, length) spans in the tail.

Pure: bytes in, frames out.

Rules of this file:
    1. Headers of calls are the same bytes for every call of one endpoint by one sender, so both ends cache them;
       whatever differs from call to call (port, rank) is in the prefix.
    2. A frame that does not fit the read buffer gets memory of its own, and its buffers stay views of that memory.
    3. No length of a frame is believed above `max_frame_bytes`, and below it only as far as bytes arrive: pages
       come into being with them. Headers are small, or refused before anything reads them.

Read next: `messages.py` for what headers say, `_net/stream.py` for the caller.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, TypeAlias

from monarch._base.reused import reused

Buffer: TypeAlias = bytes | bytearray | memoryview

PREFIX = struct.Struct("<BBIIQQQIII")
_LENGTH = struct.Struct("<Q")
_SPAN = struct.Struct("<QQ")
_ALIGN = 16
_READ_BYTES = 256 * 1024
MAX_CALL_HEADER_BYTES = 1 << 20
MAX_HEADER_BYTES = 16 << 20
"""Of a control message: what the actors of a whole host are doing, or the environment of its procs."""
_TRUSTED_BUFFERS = 1 << 17
_MEAN_BYTES = 1024
"""Of the buffers of a frame that has more of them: a view of each takes 200 bytes here. Senders make none below 4 KiB."""


class Kind(IntEnum):
    """What a frame is."""

    CONTROL = 0
    """Header is a control message (`messages.Control`)."""
    CALL = 1
    """Header is a `messages.CallHeader`; the payload is the pickled arguments."""
    REPLY = 2
    """No header; `port` says which waiting port it is for."""
    SEGMENT = 3
    """Announces shared-memory segment `segment` of `port` bytes; its descriptor rides along on the socket."""
    ACK = 4
    """The sender has received `port` frames of this session in all, this kind not counted (`session.py`)."""
    BYE = 5
    """The sender closes the session; the payload says why, for people."""
    TUNNEL = 6
    """Belongs to tunnel `port`; `flags` is a `tunnels.Op`."""


class Flag(IntEnum):
    """Bits of `Frame.flags`."""

    ERROR = 1
    """REPLY: the payload is a pickled exception."""
    DEAD = 2
    """REPLY: the payload is an encoded `messages.Fault`: who should have answered is dead or stopped."""
    SHARED = 4
    """Buffers are spans of segment `segment`, which other receivers read too."""
    MAPPED = 8
    """Buffers are spans of segment `segment`."""
    RAW = 16
    """REPLY: the payload is a control message, not a pickle."""


_SEGMENT, _MAPPED = int(Kind.SEGMENT), int(Flag.MAPPED | Flag.SHARED)


class Frame(NamedTuple):
    """One decoded frame."""

    kind: int
    flags: int
    port: int
    rank: int
    segment: int
    header: bytes
    payload: Buffer
    buffers: Sequence[memoryview]
    """Inline buffers; empty when MAPPED."""
    spans: Sequence[tuple[int, int]]
    """(offset, length) in the segment; empty unless MAPPED."""
    after: int = 0
    """The cast of its sender that it follows (`_runtime/cast_order.py`); 0: none."""


_frame = tuple.__new__
"""What `Frame(...)` does, without the call of its Python-level `__new__`."""


class FrameError(Exception):
    """The peer sent bytes that are no frame, or one longer than allowed."""


def encode(
    kind: int,
    header: bytes,
    payload: Buffer,
    *,
    flags: int = 0,
    port: int = 0,
    rank: int = 0,
    buffers: Sequence[memoryview] = (),
    segment: int = 0,
    spans: Sequence[tuple[int, int]] = (),
    after: int = 0,
) -> list[Buffer]:
    """The frame as the pieces of one gathered write; buffers are referred to, not copied.

    Args:
        after: which cast of the sender's it follows (`_runtime/cast_order.py`).
        spans: where the buffers are in shared memory; excludes `buffers`.
    """
    if buffers:
        tail, tail_bytes = _inline_tail(buffers, PREFIX.size + len(header) + len(payload))
        return [
            PREFIX.pack(kind, flags, len(buffers), len(header), len(payload), tail_bytes, port, rank, segment, after),
            header,
            payload,
            *tail,
        ]
    if spans:
        table = b"".join([_SPAN.pack(offset, length) for offset, length in spans])
        flags |= Flag.MAPPED
        prefix = PREFIX.pack(kind, flags, len(spans), len(header), len(payload), len(table), port, rank, segment, after)
        return [prefix, header, payload, table]
    return [PREFIX.pack(kind, flags, 0, len(header), len(payload), 0, port, rank, segment, after), header, payload]


def _inline_tail(buffers: Sequence[memoryview], base: int) -> tuple[list[Buffer], int]:
    table = b"".join([_LENGTH.pack(b.nbytes) for b in buffers])
    pieces: list[Buffer] = [table]
    position = len(table)
    for buffer in buffers:
        padding = -(base + position) % _ALIGN
        if padding:
            pieces.append(bytes(padding))
        pieces.append(buffer)
        position += padding + buffer.nbytes
    return pieces, position


class Decoder:
    """Cuts a stream into frames: write into `space()`, then say `received(n)`.

    Thread: one reader.
    """

    __slots__ = ("_buffer", "_fill", "_large", "_large_fill", "_maps_memory", "_max_frame_bytes", "_view")

    def __init__(self, max_frame_bytes: int, *, maps_memory: bool = True) -> None:
        """Args:
        maps_memory: False: a frame that refers to shared memory is an error, as soon as it begins.
        """
        self._max_frame_bytes = max_frame_bytes
        self._maps_memory = maps_memory
        self._buffer = bytearray(_READ_BYTES)
        self._view = memoryview(self._buffer)
        self._fill = 0
        self._large: memoryview | None = None
        self._large_fill = 0

    def space(self) -> memoryview:
        """Where the next bytes of the stream go; never empty."""
        if self._large is not None:
            return self._large[self._large_fill :]
        return self._view[self._fill :] if self._fill else self._view

    def received(self, count: int) -> list[Frame]:
        """Account for `count` bytes written into `space()`; the frames that they complete.

        Raises:
            FrameError: a length is beyond `max_frame_bytes` or inconsistent; the stream can't be used further.
        """
        if self._large is not None:
            self._large_fill += count
            if self._large_fill < self._large.nbytes:
                return []
            whole, self._large = self._large, None
            return [_parse(whole, 0, PREFIX.unpack_from(whole), whole=True)]
        frames: list[Frame] = []
        position, fill, view = 0, self._fill + count, self._view
        while fill - position >= PREFIX.size:
            prefix = PREFIX.unpack_from(view, position)
            size = PREFIX.size + prefix[3] + prefix[4] + prefix[5]
            if size > self._max_frame_bytes:
                raise FrameError(f"a frame of {size} bytes is longer than codec_max_frame_length ({self._max_frame_bytes})")
            if prefix[3] > MAX_CALL_HEADER_BYTES:
                _check_header(prefix[0], prefix[3])
            if not self._maps_memory and (prefix[0] == _SEGMENT or (prefix[1] & _MAPPED and prefix[0] != Kind.TUNNEL)):
                raise FrameError("a process of another host refers to shared memory")
            if size > fill - position:
                if size > _READ_BYTES:
                    self._start_large(size, view[position:fill])
                    return frames
                break
            frames.append(_parse(view, position, prefix, whole=False))
            position += size
        rest = fill - position
        if rest and position:
            self._buffer[:rest] = self._buffer[position:fill]
        self._fill = rest
        return frames

    def _start_large(self, size: int, have: memoryview) -> None:
        try:
            self._large = reused(size)
        except (MemoryError, OverflowError, OSError, ValueError) as exc:
            raise FrameError(f"no memory for a frame of {size} bytes") from exc
        self._large[: have.nbytes] = have
        self._large_fill = have.nbytes
        self._fill = 0


def _check_header(kind: int, nbytes: int) -> None:
    limit = MAX_HEADER_BYTES if kind == Kind.CONTROL else MAX_CALL_HEADER_BYTES
    if nbytes > limit:
        raise FrameError(f"a header of {nbytes} bytes is longer than {limit}")


def _parse(view: memoryview, position: int, prefix: tuple[int, ...], *, whole: bool) -> Frame:
    kind, flags, num_buffers, header_bytes, payload_bytes, tail_bytes, port, rank, segment, after = prefix
    start = position + PREFIX.size
    middle = start + header_bytes
    end = middle + payload_bytes
    header = bytes(view[start:middle])
    payload: Buffer = view[middle:end] if whole else bytes(view[middle:end])
    if not num_buffers:
        if tail_bytes:
            raise FrameError("a frame without buffers has a tail")
        return _frame(Frame, (kind, flags, port, rank, segment, header, payload, (), (), after))
    tail = view[end : end + tail_bytes]
    if flags & Flag.MAPPED:
        if num_buffers * _SPAN.size != tail_bytes:
            raise FrameError("the table of shared buffers does not fit the frame")
        return Frame(kind, flags, port, rank, segment, header, payload, (), list(_SPAN.iter_unpack(tail)), after)
    base = end - position
    if not whole:
        lead = base % _ALIGN
        tail = memoryview(bytearray(lead) + tail)[lead:]
    return Frame(kind, flags, port, rank, segment, header, payload, _inline_buffers(tail, num_buffers, base), (), after)


def _inline_buffers(tail: memoryview, num_buffers: int, base: int) -> list[memoryview]:
    position = num_buffers * _LENGTH.size
    if position > tail.nbytes:
        raise FrameError("the table of buffers does not fit the frame")
    if num_buffers > _TRUSTED_BUFFERS and num_buffers * _MEAN_BYTES > tail.nbytes:
        raise FrameError(f"{num_buffers} buffers have {tail.nbytes} bytes, less than {_MEAN_BYTES} each")
    buffers = []
    for (length,) in _LENGTH.iter_unpack(tail[:position]):
        position += -(base + position) % _ALIGN
        if position + length > tail.nbytes:
            raise FrameError("a buffer reaches beyond its frame")
        buffers.append(tail[position : position + length])
        position += length
    return buffers
