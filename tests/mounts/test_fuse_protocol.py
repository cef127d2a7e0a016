"""What the kernel writes is understood or refused in words; what it reads has the layout that it expects."""

from __future__ import annotations

import stat
import struct

import pytest
from hypothesis import given
from hypothesis.strategies import binary, builds, floats, integers, lists, sampled_from, tuples

from monarch._mounts import fuse_protocol as protocol
from monarch._mounts.filesystem import Attr, Entry
from monarch._mounts.fuse_protocol import HEADER_BYTES, Header, Listing, Opcode, ProtocolError, Validity

U32, U64 = (1 << 32) - 1, (1 << 64) - 1
NSEC = 10**9
ATTR = "QQQQQQIIIIIIIIII"

u32s, u64s = integers(0, U32), integers(0, U64)
names = binary(min_size=1, max_size=255).filter(lambda name: b"/" not in name and b"\0" not in name)
times = integers(-(1 << 62), 1 << 62)
attrs = builds(Attr, u32s, integers(0, 1 << 62), u32s, u32s, u32s, times, times, times)
entries = builds(Entry, u64s, attrs)
ANY = Header(1, 5, 1, 0, 0, 0)


def request(opcode, body=b"", *, unique=7, node=1, length=None):
    head = struct.pack("=IIQQIIIHH", HEADER_BYTES + len(body) if length is None else length, opcode, unique, node, 10, 20, 30, 0, 0)
    return bytearray(head + body)


def attr_of(node, attr):
    seconds, nanoseconds = zip(*(divmod(value, NSEC) for value in (attr.atime_ns, attr.mtime_ns, attr.ctime_ns)), strict=True)
    blocks = (attr.size + 511) // 512
    return (
        node, attr.size, blocks, *(value & U64 for value in seconds), *nanoseconds,
        attr.mode, attr.nlink, attr.uid, attr.gid, 0, 4096, 0,
    )  # fmt: skip


@given(opcode=u32s, unique=u64s, node=u64s, body=binary(max_size=100))
def test_a_header_is_what_was_sent(opcode, unique, node, body):
    sent = request(opcode, body, unique=unique, node=node)
    assert protocol.decode_header(sent, len(sent)) == Header(opcode, unique, node, 10, 20, 30)
    assert protocol.decode_unique(sent, len(sent)) == unique


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES - 1])
def test_less_than_a_header_is_refused(size):
    with pytest.raises(ProtocolError, match=f"a request of {size} bytes is shorter than its header of 40"):
        protocol.decode_header(bytearray(64), size)
    assert protocol.decode_unique(bytearray(64), size) == 0


@pytest.mark.parametrize("length", [0, 39, 41, U32])
def test_a_request_that_lies_about_its_length_is_refused(length):
    sent = request(Opcode.LOOKUP, length=length)
    with pytest.raises(ProtocolError, match=f"a request of 40 bytes claims to have {length}"):
        protocol.decode_header(sent, len(sent))


@given(name=names)
def test_a_name_is_copied(name):
    sent = request(Opcode.LOOKUP, name + b"\0")
    found = protocol.decode_name(sent, len(sent))
    sent[HEADER_BYTES:] = bytes(len(name) + 1)
    assert found == name


@pytest.mark.parametrize("body", [b"", b"\0", b"abc", b"a/b\0", b"a\0b\0", b"a" * 4096 + b"\0"], ids=lambda body: repr(body[:6]))
def test_what_cannot_be_a_name_is_refused(body):
    sent = request(Opcode.LOOKUP, body)
    with pytest.raises(ProtocolError, match="is not the name of a file"):
        protocol.decode_name(sent, len(sent))


@given(handle=u64s, offset=u64s, size=u32s)
def test_a_read_is_what_was_sent(handle, offset, size):
    sent = request(Opcode.READ, struct.pack("=QQIIQII", handle, offset, size, 0, 0, 0, 0))
    assert protocol.decode_read(sent, len(sent)) == (handle, offset, size)


@given(counts=lists(tuples(u64s, u64s), max_size=50))
def test_forgets_are_what_was_sent(counts):
    body = struct.pack("=II", len(counts), 0) + b"".join(struct.pack("=QQ", *pair) for pair in counts)
    sent = request(Opcode.BATCH_FORGET, body)
    assert protocol.decode_forget(protocol.decode_header(sent, len(sent)), sent, len(sent)) == counts
    one = request(Opcode.FORGET, struct.pack("=Q", 3), node=9)
    assert protocol.decode_forget(protocol.decode_header(one, len(one)), one, len(one)) == [(9, 3)]


@given(body=binary(max_size=64), kind=sampled_from(list(Opcode)))
def test_no_body_makes_a_decoder_fail_in_another_way(body, kind):
    sent = request(kind, body)
    header = protocol.decode_header(sent, len(sent))
    decoders = (protocol.decode_name, protocol.decode_read, protocol.decode_handle, protocol.decode_open_flags, protocol.decode_interrupt)
    for decode in decoders:
        try:
            decode(sent, len(sent))
        except ProtocolError as exc:
            assert "is shorter than" in str(exc) or "is not the name" in str(exc)
    try:
        protocol.decode_forget(header, sent, len(sent))
    except ProtocolError as exc:
        assert "is shorter than" in str(exc)


@given(entry=entries, unique=u64s, seconds=floats(0, 1e9))
def test_an_entry_has_the_layout_of_the_kernel(entry, unique, seconds):
    valid = Validity.of(seconds)
    reply = protocol.entry_reply(unique, entry, valid, Validity(3, 4))
    assert len(reply) == 16 + 128
    times = (valid.seconds, 3, valid.nanoseconds, 4) if entry.attr.lasts else (0, 0, 0, 0)
    expected = (len(reply), 0, unique, entry.node, 0, *times, *attr_of(*entry))
    assert struct.unpack(f"=IiQQQQQII{ATTR}", reply) == expected


@given(attr=attrs, node=u64s)
def test_attributes_have_the_layout_of_the_kernel(attr, node):
    reply = protocol.attr_reply(8, node, attr, Validity(1, 2))
    assert struct.unpack(f"=IiQQII{ATTR}", reply) == (
        16 + 104, 0, 8, *((1, 2) if attr.lasts else (0, 0)), 0, *attr_of(node, attr)
    )  # fmt: skip


def test_short_replies_have_the_layout_of_the_kernel():
    assert protocol.error_reply(5, 2) == struct.pack("=IiQ", 16, -2, 5)
    assert protocol.reply_head(5, 100) == struct.pack("=IiQ", 116, 0, 5)
    assert protocol.open_reply(5, 77, 128, 3) == struct.pack("=IiQQIi", 32, 0, 5, 77, 128, 3)
    assert len(protocol.statfs_reply(5)) == 16 + 80
    missing = protocol.missing_reply(5, Validity(9, 1))
    assert len(missing) == 144 and struct.unpack_from("=IiQQQQQII", missing) == (144, 0, 5, 0, 0, 9, 0, 1, 0)


def test_notices_have_the_layout_of_the_kernel():
    assert protocol.node_notice(7, -1, 0) == struct.pack("=IiQQqq", 40, 2, 0, 7, -1, 0)
    assert protocol.entry_notice(7, b"name") == struct.pack("=IiQQII", 37, 3, 0, 7, 4, 0) + b"name\0"


@pytest.mark.parametrize(
    ("seconds", "valid"),
    [(0, (0, 0)), (-1, (0, 0)), (float("nan"), (0, 0)), (0.25, (0, 250_000_000)), (1.5, (1, 500_000_000)), (float("inf"), (1 << 40, 0))],
)
def test_a_time_out_is_whole_seconds_and_the_rest(seconds, valid):
    assert Validity.of(seconds) == valid


def parse_listing(reply, plus):
    """Entries of a listing as the kernel would read them: (node it looks up or None, attributes, node listed, offset, type, name)."""
    size, error, _ = struct.unpack_from("=IiQ", reply)
    assert (size, error) == (len(reply), 0)
    at, found = 16, []
    while at < len(reply):
        assert at % 8 == 0
        looked_up = attr = None
        if plus:
            looked_up, _, _, _, _, _, *attr = struct.unpack_from(f"=QQQQII{ATTR}", reply, at)
            at += 128
        node, offset, length, kind = struct.unpack_from("=QQII", reply, at)
        found.append((looked_up, attr, node, offset, kind, reply[at + 24 : at + 24 + length]))
        at += 24 + length + -length % 8
    assert at == len(reply)
    return found


@given(children=lists(tuples(names, entries), max_size=20), plus=sampled_from([False, True]), most=integers(0, 3000))
def test_a_listing_fits_and_says_where_it_ends(children, plus, most):
    listing = Listing(most, (Validity(1, 0), Validity(2, 0)) if plus else None)
    dots = int(listing.add_dot(b".", 1, 1))
    taken = 0
    while taken < len(children) and listing.add(*children[taken], taken + 3):
        taken += 1
    reply = listing.reply(9)
    assert len(reply) <= 16 + most
    found = parse_listing(reply, plus)[dots:]
    assert [(name, node, offset) for _, _, node, offset, _, name in found] == [
        (name, entry.node, index + 3) for index, (name, entry) in enumerate(children[:taken])
    ]
    assert [kind for *_, kind, _ in found] == [entry.attr.mode >> 12 & 15 for _, entry in children[:taken]]
    if plus:
        assert [(node, tuple(attr)) for node, attr, *_ in found] == [(entry.node, attr_of(*entry)) for _, entry in children[:taken]]
    assert listing.nodes == ([entry.node for _, entry in children[:taken]] if plus else [])


def test_dots_are_listed_but_not_looked_up():
    listing = Listing(4096, (Validity(1, 0), Validity(1, 0)))
    assert listing.add_dot(b".", 5, 1) and listing.add_dot(b"..", 6, 2)
    assert [(looked_up, node, kind, name) for looked_up, _, node, _, kind, name in parse_listing(listing.reply(1), True)] == [
        (0, 5, stat.S_IFDIR >> 12, b"."),
        (0, 6, stat.S_IFDIR >> 12, b".."),
    ]
    assert listing.nodes == []


def test_opcodes_have_names_for_people():
    assert protocol.names_of([1, 44, 60]) == ["LOOKUP", "READDIRPLUS", "opcode 60"]
