"""Kernel and server agree on what both can do."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis.strategies import booleans, integers, sampled_from

from monarch._mounts.filesystem import LIVE, PUSHED
from monarch._mounts.fuse_negotiation import Agreement, Flag, Offer, agree, decode_init, init_reply
from monarch._mounts.fuse_protocol import HEADER_BYTES, ProtocolError

ALL = (1 << 64) - 1
MODERN = Offer(7, 45, 1 << 17, ALL)


def sent(*numbers):
    body = struct.pack(f"={len(numbers)}I", *numbers)
    return bytearray(HEADER_BYTES) + body, HEADER_BYTES + len(body)


def test_an_offer_of_either_length_is_read():
    assert decode_init(*sent(7, 31, 131072, 0x01FF)) == Offer(7, 31, 131072, 0x01FF)
    extended = 1 << 30
    assert decode_init(*sent(7, 40, 131072, extended, 0x20, *[0] * 11)) == Offer(7, 40, 131072, extended | 0x20 << 32)
    assert decode_init(*sent(7, 40, 131072, 0, 0x20, *[0] * 11)) == Offer(7, 40, 131072, 0)


@pytest.mark.parametrize("count", range(4))
def test_a_shorter_offer_is_refused(count):
    with pytest.raises(ProtocolError, match=f"an INIT of {count * 4} bytes is shorter than 16"):
        decode_init(*sent(*[7] * count))


@pytest.mark.parametrize("version", [(6, 99), (7, 0), (7, 22)])
def test_a_kernel_that_is_too_old_is_told_so(version):
    with pytest.raises(ProtocolError, match=rf"the kernel speaks FUSE {version[0]}\.{version[1]}; 7\.23 \(Linux 3\.15\) is the oldest"):
        agree(Offer(*version, 0, 0), PUSHED, passthrough=False)


def test_a_kernel_of_a_later_major_version_is_told_ours():
    assert agree(Offer(8, 0, 0, 0), PUSHED, passthrough=False) is None
    reply = init_reply(3, None)
    assert struct.unpack_from("=IiQI", reply) == (80, 0, 3, 7)


@given(flags=integers(0, ALL), minor=integers(23, 60), passthrough=booleans(), habits=sampled_from([PUSHED, LIVE]))
def test_nothing_is_taken_that_was_not_offered(flags, minor, passthrough, habits):
    agreement = agree(Offer(7, minor, 1 << 17, flags), habits, passthrough=passthrough)
    assert agreement.flags & ~flags == 0
    assert agreement.minor <= minor
    assert agreement.passthrough == bool(passthrough and flags & Flag.PASSTHROUGH)
    assert len(init_reply(1, agreement)) == 16 + 64


def test_a_pushed_tree_is_asked_for_as_little_as_possible():
    agreement = agree(MODERN, PUSHED, passthrough=False)
    wanted = Flag.EXPLICIT_INVAL_DATA | Flag.CACHE_SYMLINKS | Flag.DO_READDIRPLUS
    assert agreement.flags & wanted == wanted and not agreement.flags & (Flag.AUTO_INVAL_DATA | Flag.READDIRPLUS_AUTO | Flag.PASSTHROUGH)
    assert (agreement.skips_open, agreement.skips_opendir, agreement.passthrough) == (True, True, False)


def test_a_live_tree_is_asked_each_time():
    agreement = agree(MODERN, LIVE, passthrough=False)
    assert agreement.flags & Flag.AUTO_INVAL_DATA and agreement.flags & Flag.READDIRPLUS_AUTO
    assert not agreement.flags & (Flag.EXPLICIT_INVAL_DATA | Flag.CACHE_SYMLINKS)
    assert (agreement.skips_open, agreement.skips_opendir) == (False, False)


def test_a_kernel_that_reads_backing_files_must_ask_for_each_open():
    agreement = agree(MODERN, PUSHED, passthrough=True)
    assert (agreement.passthrough, agreement.skips_open, agreement.skips_opendir) == (True, False, True)
    without = agree(MODERN._replace(flags=ALL & ~Flag.PASSTHROUGH), PUSHED, passthrough=True)
    assert (without.passthrough, without.skips_open) == (False, True)


def test_the_reply_has_the_layout_of_the_kernel():
    flags = Flag.MAX_PAGES | Flag.INIT_EXT | Flag.PASSTHROUGH
    reply = init_reply(3, Agreement(40, flags, 131072, passthrough=True, skips_open=False, skips_opendir=False))
    assert struct.unpack("=IiQIIIIHHIIHHII24x", reply) == (
        80, 0, 3, 7, 40, 131072, int(flags) & 0xFFFFFFFF, 1024, 768, 4096, 1, 256, 0, int(flags) >> 32, 1,
    )  # fmt: skip
