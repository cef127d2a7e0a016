"""What readers and the data service say: it arrives as it left, and what makes no sense is refused before it costs anything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.rdma import data_frames
from monarch.rdma.data_frames import (
    MAX_SPAN_BYTES,
    MAX_SPANS,
    REPLY_BYTES,
    REQUEST_BYTES,
    Code,
    DataFrameError,
    Verb,
    WireSpan,
    decode_head,
    decode_reply,
    decode_rest,
    encode_failure,
    encode_reply,
    encode_request,
    failure_of,
)
from monarch.rdma.errors import BufferGoneError, OwnerGoneError, TransferError, UnreachableError

spans = st.builds(WireSpan, st.integers(0, 2**32 - 1), st.integers(0, 2**63), st.integers(0, 2**63), st.integers(1, MAX_SPAN_BYTES))


@given(st.sampled_from(Verb), st.text(max_size=60), st.binary(min_size=16, max_size=16), st.lists(spans, max_size=5))
def test_a_request_arrives_as_it_left(verb, uid, nonce, some):
    data = encode_request(verb, uid, nonce, some)
    head = decode_head(data[:REQUEST_BYTES])
    assert (head.verb, head.nonce, head.rest_bytes) == (verb, nonce, len(data) - REQUEST_BYTES)
    assert decode_rest(head, data[REQUEST_BYTES:]) == (uid, some)
    assert len(data) <= data_frames.MAX_REQUEST_BYTES


@given(st.binary(min_size=REQUEST_BYTES, max_size=REQUEST_BYTES))
def test_what_is_no_request_is_refused(data):
    with pytest.raises(DataFrameError):
        decode_head(data)


@pytest.mark.parametrize("bad", [WireSpan(0, 1, 0, 0), WireSpan(0, 1, 0, 2**63)], ids=str)
def test_a_span_that_can_not_be_is_refused(bad):
    head = data_frames.Head(Verb.READ, bytes(16), 0, 1)
    with pytest.raises(DataFrameError):
        decode_rest(head, data_frames._SPAN.pack(*bad))


def test_a_request_beyond_the_limits_is_neither_made_nor_taken():
    span = WireSpan(0, 1, 0, 1)
    for arguments in (
        ("u" * 256, bytes(16), [span]),
        ("u", bytes(16), [span] * (MAX_SPANS + 1)),
        ("u", bytes(16), [span._replace(nbytes=2**31)]),
    ):
        with pytest.raises(ValueError, match="beyond the limits"):
            encode_request(Verb.READ, *arguments)
    with pytest.raises(DataFrameError):
        decode_head(data_frames._REQUEST.pack(data_frames.MAGIC, Verb.READ, 1, MAX_SPANS + 1, bytes(16)))


@given(st.binary(min_size=REPLY_BYTES, max_size=REPLY_BYTES))
def test_replies_are_bounded(data):
    try:
        code, length = decode_reply(data)
    except DataFrameError:
        return
    assert code in (Code.OK, Code.STREAM) or length <= data_frames.MAX_TEXT_BYTES


@pytest.mark.parametrize(
    "failure",
    [BufferGoneError(12), OwnerGoneError("its process has ended"), TransferError("other"), TransferError("é" * 2000)],
    ids=lambda failure: failure.what[:20],
)
def test_a_failure_arrives_as_what_it_is(failure):
    data = encode_failure(failure)
    code, length = decode_reply(data[:REPLY_BYTES])
    arrived = failure_of(code, data[REPLY_BYTES:].decode(errors="ignore"))
    assert length == len(data) - REPLY_BYTES and type(arrived) is type(failure)
    assert failure.what.startswith(arrived.what)


def test_what_the_kernel_refuses_the_agent_is_told_as_that():
    data = encode_failure(UnreachableError("not permitted"))
    assert "host agent can't serve it: not permitted" in failure_of(decode_reply(data[:REPLY_BYTES])[0], data[REPLY_BYTES:].decode()).what


def test_a_reply_is_a_code_and_a_length():
    assert decode_reply(encode_reply(Code.OK, 1 << 20)) == (Code.OK, 1 << 20)
