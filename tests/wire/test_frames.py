"""Frames: the same ones at the other end, however the stream is cut, and nothing but a FrameError for other bytes."""

from __future__ import annotations

import os
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from monarch._base.reused import MOST_BYTES
from monarch._wire import frames
from monarch._wire.frames import PREFIX, Decoder, Flag, Frame, FrameError, Kind, encode

READ_BYTES = frames._READ_BYTES
ALIGN = 16
NO_LIMIT = 1 << 62


def joined(pieces):
    return b"".join(bytes(piece) for piece in pieces)


def feed(decoder, stream, cuts=()):
    """The frames of `stream`, written in pieces of the lengths `cuts`, then as much as there is space for."""
    found, at, cuts = [], 0, iter(cuts)
    while at < len(stream):
        space = decoder.space()
        assert len(space) > 0
        count = min(len(space), len(stream) - at, next(cuts, len(stream)))
        space[:count] = stream[at : at + count]
        found += decoder.received(count)
        at += count
    return found


def decode(stream, cuts=(), *, limit=NO_LIMIT):
    return feed(Decoder(limit), stream, cuts)


def plain(frame):
    """A frame without views, to compare."""
    return frame._replace(payload=bytes(frame.payload), buffers=[bytes(b) for b in frame.buffers], spans=list(frame.spans))


def made(kind, flags, port, rank, segment, header, payload, buffers, spans):
    pieces = encode(
        kind, header, payload, flags=flags, port=port, rank=rank, segment=segment, buffers=[memoryview(b) for b in buffers], spans=spans
    )
    flags |= Flag.MAPPED if spans else 0
    return joined(pieces), Frame(kind, flags, port, rank, segment, header, payload, buffers, spans)


u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
bodies = st.binary(max_size=50)
tails = st.tuples(st.lists(bodies, max_size=4), st.just([])) | st.tuples(st.just([]), st.lists(st.tuples(u64, u64), max_size=4))
any_frame = st.builds(
    lambda kind, flags, port, rank, segment, header, payload, tail: made(kind, flags, port, rank, segment, header, payload, *tail),
    st.sampled_from(Kind),
    st.sampled_from([0, Flag.ERROR, Flag.DEAD, Flag.RAW, Flag.SHARED]),
    u64,
    u32,
    u32,
    bodies,
    bodies,
    tails,
)


@given(st.lists(any_frame, max_size=6), st.lists(st.integers(1, 80), max_size=60))
def test_frames_survive_any_split_of_the_stream(sent, cuts):
    stream = b"".join(data for data, _ in sent)
    assert [plain(frame) for frame in decode(stream, cuts)] == [frame for _, frame in sent]


def around(size):
    return [size - 1, size, size + 1]


@pytest.mark.cpu_limit(5)
@pytest.mark.parametrize("size", [*around(READ_BYTES - PREFIX.size), *around(READ_BYTES), 3 * READ_BYTES + 5])
@pytest.mark.parametrize("lead", [0, 1, READ_BYTES // 2, READ_BYTES - PREFIX.size - 1])
@pytest.mark.parametrize("step", [1000, 65_536, READ_BYTES, 10 * READ_BYTES])
def test_large_frames_survive_between_small_ones(size, lead, step):
    small = made(Kind.REPLY, 0, 7, 1, 0, b"h", bytes(lead), [], [])
    large = made(Kind.CALL, 0, 8, 2, 0, b"header", b"p" * 9, [b"", b"x" * size, b"y"], [])
    stream = small[0] + large[0] + small[0]
    found = decode(stream, [step] * (len(stream) // step))
    assert [plain(frame) for frame in found] == [small[1], large[1], small[1]]


def address(buffer):
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


@given(header=bodies, sizes=st.lists(st.integers(0, 70), min_size=1, max_size=5), payload=bodies, lead=bodies, large=st.booleans())
def test_buffers_start_at_multiples_of_16_of_the_frame_and_of_memory(header, sizes, payload, lead, large):
    buffers = [bytes([index + 1]) * size for index, size in enumerate(sizes)]
    if large:
        buffers.append(b"z" * READ_BYTES)
    before, (data, sent) = made(Kind.REPLY, 0, 0, 0, 0, b"", lead, [], [])[0], made(Kind.CALL, 0, 0, 0, 0, header, payload, buffers, [])
    at = PREFIX.size + len(header) + len(payload) + 8 * len(buffers)
    for buffer in buffers:
        at += -at % ALIGN
        assert data[at : at + len(buffer)] == buffer
        at += len(buffer)
    assert at == len(data)
    _, found = decode(before + data)
    assert plain(found) == sent
    assert all(address(buffer) % ALIGN == 0 for buffer in found.buffers if buffer.nbytes)


@pytest.mark.parametrize("size", [10, READ_BYTES], ids=["small", "large"])
def test_received_buffers_can_be_written_and_stay_when_the_stream_goes_on(size):
    decoder = Decoder(NO_LIMIT)
    data, sent = made(Kind.CALL, 0, 1, 2, 0, b"header", b"payload", [b"a" * size, b"b" * size], [])
    (first,) = feed(decoder, data)
    feed(decoder, made(Kind.CALL, 0, 9, 9, 0, b"HEADER", b"PAYLOAD", [b"c" * size, b"d" * size], [])[0])
    assert plain(first) == sent
    first.buffers[0][0] = 0
    assert bytes(first.buffers[1]) == b"b" * size
    assert isinstance(first.header, bytes)


def test_encoding_copies_no_buffer():
    buffer = bytearray(b"before")
    pieces = encode(Kind.CALL, b"", b"", buffers=[memoryview(buffer)])
    buffer[:] = b"behind"
    assert joined(pieces).endswith(b"behind")


def test_a_large_frame_is_views_of_one_memory():
    (frame,) = decode(made(Kind.CALL, 0, 0, 0, 0, b"", b"p", [b"x" * READ_BYTES], [])[0])
    assert frame.payload.obj is frame.buffers[0].obj


def test_more_buffers_than_16_bits_count_arrive():
    buffers = [b"x"] * 66_000
    (frame,) = decode(made(Kind.CALL, 0, 0, 0, 0, b"", b"", buffers, [])[0])
    assert len(frame.buffers) == 66_000
    (frame,) = decode(made(Kind.CALL, 0, 0, 0, 1, b"", b"", [], [(1, 2)] * 66_000)[0])
    assert frame.spans == [(1, 2)] * 66_000


# --- hostile bytes -------------------------------------------------------------------------------------------------


def prefix(num_buffers=0, header=0, payload=0, tail=0, *, kind=0, flags=0):
    return PREFIX.pack(kind, flags, num_buffers, header, payload, tail, 0, 0, 0, 0)


@pytest.mark.parametrize(
    "lengths", [{"header": 2**32 - 1}, {"payload": 2**64 - 1}, {"tail": 2**64 - 1}, {"payload": 1001 - PREFIX.size}], ids=repr
)
def test_no_length_above_the_limit_is_believed(lengths):
    with pytest.raises(FrameError, match=r"is longer than codec_max_frame_length \(1000\)"):
        decode(prefix(**lengths), limit=1000)


@pytest.mark.parametrize("step", [1, 41, 2000])
def test_the_limit_holds_however_the_stream_is_cut(step):
    fits, _ = made(0, 0, 0, 0, 0, b"", bytes(1000 - PREFIX.size), [], [])
    assert len(decode(fits, [step] * 2000, limit=1000)) == 1
    longer, _ = made(0, 0, 0, 0, 0, b"", bytes(1001 - PREFIX.size), [], [])
    with pytest.raises(FrameError, match="1001 bytes"):
        decode(longer, [step] * 2000, limit=1000)


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="asks the kernel how much memory is in use")
def test_an_announced_frame_takes_memory_only_as_its_bytes_arrive():
    before = resident_bytes()
    decoders = [Decoder(NO_LIMIT) for _ in range(4)]
    for decoder in decoders:
        assert feed(decoder, prefix(payload=1 << 31)) == []
    assert resident_bytes() - before < 64 << 20


@pytest.mark.cpu_limit(5)
@pytest.mark.parametrize("nbytes", [MOST_BYTES // 2, MOST_BYTES], ids=["in memory that is used again", "in fresh memory"])
def test_a_long_frame_arrives_as_any_other(nbytes):
    body = bytes(range(256)) * (nbytes // 256) + b"more"
    data, _ = made(Kind.CALL, 0, 1, 0, 0, b"header", b"payload", [b"", b"first", body], [])
    (found,) = decode(data)
    assert (found.header, found.payload) == (b"header", b"payload")
    assert bytes(found.buffers[1]) == b"first"
    assert found.buffers[2] == body
    assert address(found.buffers[2]) % ALIGN == 0
    found.buffers[2][0] = 7  # may be written
    del found


def test_a_table_of_many_tiny_buffers_is_refused():
    table = bytes(8 * (frames._TRUSTED_BUFFERS + 1))
    with pytest.raises(FrameError, match="131073 buffers have 1048584 bytes, less than 1024 each"):
        decode(prefix(frames._TRUSTED_BUFFERS + 1, tail=len(table)) + table)


def test_a_frame_without_memory_is_an_error_of_the_stream():
    with pytest.raises(FrameError, match="no memory for a frame of"):
        decode(prefix(payload=2**61), limit=2**62)


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (prefix(0, tail=16) + bytes(16), "a frame without buffers has a tail"),
        (prefix(1), "the table of buffers does not fit"),
        (prefix(2**32 - 1, tail=16) + bytes(16), "the table of buffers does not fit"),
        (prefix(2, tail=8) + bytes(8), "the table of buffers does not fit"),
        (prefix(1, tail=8) + struct.pack("<Q", 1), "a buffer reaches beyond its frame"),
        (prefix(1, tail=8) + struct.pack("<Q", 2**64 - 1), "a buffer reaches beyond its frame"),
        (prefix(2, tail=40) + struct.pack("<QQ", 2**63, 2**63) + bytes(24), "a buffer reaches beyond its frame"),
        (prefix(1, tail=8, flags=Flag.MAPPED) + bytes(8), "the table of shared buffers does not fit"),
        (prefix(1, tail=32, flags=Flag.MAPPED) + bytes(32), "the table of shared buffers does not fit"),
        (prefix(2**32 - 1, tail=16, flags=Flag.MAPPED) + bytes(16), "the table of shared buffers does not fit"),
    ],
)
def test_lengths_that_contradict_each_other_are_refused(frame, said):
    with pytest.raises(FrameError, match=said):
        decode(frame)


@given(st.binary(max_size=400), st.lists(st.integers(1, 60), max_size=20))
@example(bytes(400), [])
@example(b"\xff" * 400, [])
def test_random_bytes_are_frames_or_a_frame_error(data, cuts):
    try:
        found = decode(data, cuts, limit=100_000)
    except FrameError:
        return
    assert all(len(frame.header) + len(frame.payload) <= len(data) for frame in found)


small_lengths = st.integers(0, 40)


@given(small_lengths, small_lengths, small_lengths, st.integers(0, 5), st.sampled_from([0, Flag.MAPPED]), st.binary(max_size=150))
def test_no_prefix_makes_views_beyond_its_frame(header, payload, tail, num_buffers, flags, rest):
    try:
        found = decode(prefix(num_buffers, header, payload, tail, flags=flags) + rest, limit=100_000)
    except FrameError:
        return
    for frame in found[:1]:
        assert (len(frame.header), len(frame.payload)) == (header, payload)
        assert sum(buffer.nbytes for buffer in frame.buffers) + 8 * len(frame.buffers) <= tail
        assert len(frame.buffers) + len(frame.spans) == num_buffers


def test_half_a_frame_is_no_frame_yet():
    data, sent = made(Kind.CALL, 0, 1, 2, 3, b"header", b"payload", [b"buffer"], [])
    decoder = Decoder(NO_LIMIT)
    assert feed(decoder, data[:-1]) == []
    (found,) = feed(decoder, data[-1:] + data[:5])
    assert plain(found) == sent
    assert plain(*feed(decoder, data[5:])) == sent
