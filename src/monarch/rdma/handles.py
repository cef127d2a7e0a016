"""Handles: what travels of a buffer. Everything that a holder anywhere needs to reach it, in less than 1 KB.

Pure: bytes in, bytes out.

Rules of this file:
    1. A handle owns nothing: copying, sending and dropping one has no effect on the memory.
    2. What arrives is checked before it is used; a handle that is none is a ValueError that says so.

Read next: `transport.py` for who understands the blobs, `buffer.py` for what users hold.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec

from monarch._base.errors import explain
from monarch._base.ids import ProcRef
from monarch.rdma.regions import NONCE_BYTES, ON_DEVICE, READ_ONLY, entry_bytes

MOST_BYTES = 1000
"""Of an encoded handle."""
_MOST_ADDRESS = 2**63 - 1
_DEVICE = b"device"
_Number = Annotated[int, msgspec.Meta(ge=0, le=_MOST_ADDRESS)]
_Positive = Annotated[int, msgspec.Meta(ge=1, le=_MOST_ADDRESS)]


class Owner(NamedTuple):
    """The process that owns memory, and nobody who comes after it."""

    ref: ProcRef
    nonce: bytes
    """Of its table of regions."""
    table: int
    """Address of that table in the owner."""


class Handle(msgspec.Struct, frozen=True, array_like=True, cache_hash=True, weakref=True):
    """One region of one owner."""

    ref: ProcRef
    nonce: Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
    table: _Number
    slot: Annotated[int, msgspec.Meta(ge=0, le=2**31)]
    generation: _Positive
    address: _Number
    nbytes: _Positive
    flags: Annotated[int, msgspec.Meta(ge=0, le=255)]
    blobs: dict[str, bytes]
    """What each transport needs that could register the region, by its name."""

    @property
    def number(self) -> int:
        """Counts the buffers of the owner's process, from 0."""
        return self.generation - 1

    @property
    def route(self) -> bytes:
        """By what the transport is remembered: memory on a GPU is reached otherwise than that of its process."""
        return device_route(self.nonce) if self.flags & ON_DEVICE else self.nonce

    @property
    def is_read_only(self) -> bool:
        """Nobody but the owner may write here."""
        return bool(self.flags & READ_ONLY)

    @property
    def owner(self) -> Owner:
        """Whose memory it is."""
        return Owner(self.ref, self.nonce, self.table)

    def entry(self) -> bytes:
        """What the owner's table holds for this region as long as it is valid."""
        return entry_bytes(self.nonce, self.slot, self.generation, self.address, self.nbytes, self.flags)


def device_route(nonce: bytes) -> bytes:
    """`Handle.route` for the GPU memory of the owner with this nonce."""
    return nonce + _DEVICE


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Handle)


def encode_handle(handle: Handle) -> bytes:
    """The bytes of a handle; ValueError when they are more than travel well, because of a very long address."""
    data = _encoder.encode(handle)
    if len(data) > MOST_BYTES:
        raise ValueError(
            explain(f"the handle of this buffer has {len(data)} bytes, more than {MOST_BYTES}", next="use a shorter host address")
        )
    return data


def decode_handle(data: bytes) -> Handle:
    """The handle in `data`; ValueError when there is none."""
    try:
        handle = _decoder.decode(data)
    except (msgspec.DecodeError, TypeError, RecursionError) as exc:
        why = "it comes from another version of monarch, or was made up"
        raise ValueError(explain(f"these {len(data)} bytes are no handle of an RDMABuffer ({exc})", where=why)) from None
    if len(data) > MOST_BYTES or handle.address + handle.nbytes > _MOST_ADDRESS:
        raise ValueError(explain("the handle of an RDMABuffer names memory that can't exist", where=f"owner {handle.ref.uid[:200]}"))
    return handle
