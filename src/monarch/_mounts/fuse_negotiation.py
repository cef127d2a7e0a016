"""The first exchange on a FUSE device: which version both sides speak, and what the kernel may do by itself.

Pure: an INIT request in, an agreement out.

Rules of this file:
    1. We ask for what the kernel offers and never for more; without an offer we do without.
    2. Sizes are the smaller of what both want.

Read next: `fuse_server.py`, which acts upon the agreement.
"""

from __future__ import annotations

import struct
from enum import IntFlag
from typing import NamedTuple

from monarch._mounts.filesystem import Habits
from monarch._mounts.fuse_protocol import HEADER_BYTES, ProtocolError, reply_head
from monarch._wire.frames import Buffer

MAJOR = 7
OLDEST_MINOR = 23
"""Of Linux 3.15: answers have had their present sizes since then."""
NEWEST_MINOR = 40

_INIT_OLD = struct.Struct("=IIII")
_INIT_FLAGS2 = struct.Struct("=I")
_INIT_REPLY = struct.Struct("=IIIIHHIIHHII24x")

_MAX_WRITE_BYTES = 4096
_MAX_PAGES = 256
_MAX_READAHEAD_BYTES = 1 << 20
_MAX_BACKGROUND = 1024
"""Reads ahead that may be under way at once; the kernel's own default of 12 lets a few files that wait hold up all others."""


class Flag(IntFlag):
    """What kernel and server can agree on; of those that a server of trees that cannot be written has a use for."""

    ASYNC_READ = 1 << 0
    AUTO_INVAL_DATA = 1 << 12
    DO_READDIRPLUS = 1 << 13
    READDIRPLUS_AUTO = 1 << 14
    ASYNC_DIO = 1 << 15
    NO_OPEN_SUPPORT = 1 << 17
    PARALLEL_DIROPS = 1 << 18
    ABORT_ERROR = 1 << 21
    MAX_PAGES = 1 << 22
    CACHE_SYMLINKS = 1 << 23
    NO_OPENDIR_SUPPORT = 1 << 24
    EXPLICIT_INVAL_DATA = 1 << 25
    INIT_EXT = 1 << 30
    PASSTHROUGH = 1 << 37


_ALWAYS = Flag.ASYNC_READ | Flag.DO_READDIRPLUS | Flag.ASYNC_DIO | Flag.PARALLEL_DIROPS | Flag.ABORT_ERROR | Flag.MAX_PAGES | Flag.INIT_EXT


class Offer(NamedTuple):
    """What the kernel says of itself in INIT."""

    major: int
    minor: int
    max_readahead_bytes: int
    flags: int


class Agreement(NamedTuple):
    """What holds for the life of the mount."""

    minor: int
    flags: Flag
    max_readahead_bytes: int
    passthrough: bool
    """The kernel will read backing files itself."""
    skips_open: bool
    """ENOSYS to OPEN means: never ask again."""
    skips_opendir: bool


def decode_init(buffer: Buffer, size: int) -> Offer:
    """The kernel's offer.

    Raises:
        ProtocolError: it is too short.
    """
    if size < HEADER_BYTES + _INIT_OLD.size:
        raise ProtocolError(f"an INIT of {size - HEADER_BYTES} bytes is shorter than {_INIT_OLD.size}")
    major, minor, readahead, flags = _INIT_OLD.unpack_from(buffer, HEADER_BYTES)
    if flags & Flag.INIT_EXT and size >= HEADER_BYTES + _INIT_OLD.size + _INIT_FLAGS2.size:
        flags |= _INIT_FLAGS2.unpack_from(buffer, HEADER_BYTES + _INIT_OLD.size)[0] << 32
    return Offer(major, minor, readahead, flags)


def agree(offer: Offer, habits: Habits, *, passthrough: bool) -> Agreement | None:
    """What to reply to `offer`; None: the kernel speaks a later major version, will be told ours and asks again.

    Raises:
        ProtocolError: the kernel is older than `OLDEST_MINOR`.
    """
    if offer.major > MAJOR:
        return None
    if offer.major < MAJOR or offer.minor < OLDEST_MINOR:
        ours = f"{MAJOR}.{OLDEST_MINOR} (Linux 3.15) is the oldest known here"
        raise ProtocolError(f"the kernel speaks FUSE {offer.major}.{offer.minor}; {ours}")
    wanted = _ALWAYS
    wanted |= Flag.AUTO_INVAL_DATA if habits.checks_mtime else Flag.EXPLICIT_INVAL_DATA
    if habits.attr_s > 0:
        wanted |= Flag.CACHE_SYMLINKS
    else:
        wanted |= Flag.READDIRPLUS_AUTO  # attributes that do not outlive the listing are fetched for who looks at them only
    if passthrough:
        wanted |= Flag.PASSTHROUGH
    if not habits.opens:
        wanted |= Flag.NO_OPENDIR_SUPPORT
        if not (passthrough and offer.flags & Flag.PASSTHROUGH):
            wanted |= Flag.NO_OPEN_SUPPORT
    flags = Flag(offer.flags & wanted)
    return Agreement(
        min(offer.minor, NEWEST_MINOR),
        flags,
        min(offer.max_readahead_bytes, _MAX_READAHEAD_BYTES),
        passthrough=Flag.PASSTHROUGH in flags,
        skips_open=Flag.NO_OPEN_SUPPORT in flags,
        skips_opendir=Flag.NO_OPENDIR_SUPPORT in flags,
    )


def init_reply(unique: int, agreement: Agreement | None) -> bytes:
    """The answer to INIT; of no agreement: our version, upon which the kernel asks again."""
    if agreement is None:
        body = _INIT_REPLY.pack(MAJOR, NEWEST_MINOR, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    else:
        flags = int(agreement.flags)
        body = _INIT_REPLY.pack(
            MAJOR, agreement.minor, agreement.max_readahead_bytes, flags & 0xFFFFFFFF, _MAX_BACKGROUND, _MAX_BACKGROUND * 3 // 4,
            _MAX_WRITE_BYTES, 1, _MAX_PAGES if flags & Flag.MAX_PAGES else 0, 0, flags >> 32, int(agreement.passthrough),
        )  # fmt: skip
    return reply_head(unique, len(body)) + body
