"""A block arrives in chunks, in the order of sending, and whoever waits for one that does not come hears why."""

from __future__ import annotations

import ctypes
import pickle

import pytest
from hypothesis import given
from hypothesis.strategies import binary, integers, lists

from monarch._mounts.chain import ChainCtx, ChainSession, ctx_close, ctx_wait_into, new_ctx, send_block


class Wire:
    """A port to a context of the same process."""

    def __init__(self, ctx):
        self.ctx = ctx

    def send(self, chunk):
        self.ctx.take_chunk(*pickle.loads(pickle.dumps(chunk, 5)))


def received(ctx, want, room=None):
    destination = ctypes.create_string_buffer(want if room is None else room)
    ctx_wait_into(ctx, ctypes.addressof(destination), len(destination), want, 0)
    return destination.raw[:want]


@given(blocks=lists(binary(min_size=1, max_size=50), max_size=5), chunk_size=integers(1, 60))
def test_blocks_come_out_as_they_went_in(blocks, chunk_size):
    ctx = new_ctx(50)
    session = ChainSession(Wire(ctx))
    assert [send_block(session, block, chunk_size, 0) for block in blocks] == [len(block) for block in blocks]
    assert [received(ctx, len(block)) for block in blocks] == blocks


def test_only_the_used_bytes_of_a_block_travel():
    ctx = new_ctx(50)
    assert send_block(ChainSession(Wire(ctx)), bytearray(b"used and not"), 3, 0, 4) == 4
    assert received(ctx, 4) == b"used"


def test_nothing_can_be_sent_as_a_block():
    session = ChainSession(Wire(new_ctx(50)))
    for data, chunk_size in ((b"", 5), (b"data", 0)):
        with pytest.raises(ValueError, match="can't be sent in chunks"):
            send_block(session, data, chunk_size, 0)
    with pytest.raises(ValueError, match="hold nothing"):
        new_ctx(0)


def test_half_a_block_is_waited_for_in_vain():
    ctx = new_ctx(50)
    ctx.take_chunk(0, 10, 0, b"half")
    with pytest.raises(TimeoutError, match=r"no block has come within 0 s\n  where: 6 bytes of one are to come"):
        received(ctx, 10)
    ctx.take_chunk(0, 10, 4, b"other!")
    assert received(ctx, 10) == b"halfother!"


def test_a_block_of_another_size_than_expected_is_refused():
    ctx = new_ctx(50)
    send_block(ChainSession(Wire(ctx)), b"12345", 5, 0)
    with pytest.raises(ValueError, match="a block of 5 bytes has no room in 4"):
        received(ctx, 5, room=4)
    with pytest.raises(RuntimeError, match="a block of 5 bytes has come, not of 4"):
        received(ctx, 4)


MISFITS = {
    "too large": [(0, 51, 0, b"...")],
    "not the first": [(0, 9, 3, b"...")],
    "twice": [(0, 9, 0, b"abc"), (0, 9, 2, b"cd")],
    "too much": [(0, 3, 0, b"more")],
}


@pytest.mark.parametrize("chunks", MISFITS.values(), ids=MISFITS)
def test_chunks_that_do_not_fit_break_the_chain(chunks):
    ctx = ChainCtx(50)
    for chunk in chunks:
        ctx.take_chunk(*chunk)
    with pytest.raises(RuntimeError, match=r"the chain is broken: .*\n  next:  close it"):
        received(ctx, 9)


def test_a_closed_chain_gives_what_has_come_and_then_an_error():
    ctx = new_ctx(50)
    send_block(ChainSession(Wire(ctx)), b"here", 4, 0)
    ctx_close(ctx)
    ctx_close(ctx)
    assert received(ctx, 4) == b"here"
    with pytest.raises(RuntimeError, match="the chain is broken: it was closed"):
        received(ctx, 4)
