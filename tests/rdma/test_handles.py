"""Handles: small, whole after a journey, and refused when somebody made them up."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._base.ids import ProcRef
from monarch.rdma.handles import MOST_BYTES, Handle, decode_handle, encode_handle

REF = ProcRef("trainer-17<1pTvhB3Xwjzy>", "tcp://[fd77:1::1]:26600/1pTvhB3Xwjzy.17", "tcp://[fd77:1::1]:26600")
HANDLE = Handle(REF, bytes(16), 4096, 3, 9, 1 << 40, 1 << 30, 1, {"cma": bytes(40), "tcp": b"tcp://[fd77:1::1]:26600"})

numbers = st.integers(0, 2**40)
handles = st.builds(
    Handle,
    st.builds(ProcRef, st.text(max_size=60), st.text(max_size=80), st.text(max_size=80)),
    st.binary(min_size=16, max_size=16),
    numbers,
    st.integers(0, 2**31),
    st.integers(1, 2**62),
    numbers,
    st.integers(1, 2**40),
    st.integers(0, 1),
    st.dictionaries(st.sampled_from(["cma", "ipc", "tcp"]), st.binary(max_size=60)),
)


@given(handles)
def test_a_handle_arrives_as_it_left(handle):
    assert decode_handle(encode_handle(handle)) == handle


def test_a_handle_is_small():
    assert len(encode_handle(HANDLE)) < 300


def test_a_handle_that_would_not_travel_well_is_refused():
    with pytest.raises(ValueError, match="more than 1000"):
        encode_handle(msgspec.structs.replace(HANDLE, ref=REF._replace(address="tcp://" + "x" * MOST_BYTES)))


@given(st.binary(max_size=80))
def test_bytes_that_are_no_handle_are_refused(data):
    with pytest.raises(ValueError, match="handle"):
        decode_handle(data)


@pytest.mark.parametrize(
    "change",
    [
        {"nonce": b"short"},
        {"slot": -1},
        {"slot": 2**40},
        {"generation": 0},
        {"generation": 2**63},
        {"nbytes": 0},
        {"nbytes": -5},
        {"address": -1},
        {"address": 2**63 - 1, "nbytes": 2},
        {"flags": 256},
        {"blobs": {"cma": bytes(2000)}},
        {"blobs": {"cma": "text"}},
        {"ref": ("a", "b")},
    ],
    ids=str,
)
def test_a_handle_with_numbers_that_can_not_be_is_refused(change):
    parts = {name: getattr(HANDLE, name) for name in HANDLE.__struct_fields__} | change
    with pytest.raises(ValueError, match="handle"):
        decode_handle(msgspec.msgpack.encode(list(parts.values())))


def test_a_handle_knows_what_the_table_of_its_owner_holds():
    assert HANDLE.number == 8 and HANDLE.is_read_only and len(HANDLE.entry()) == 64
    assert HANDLE.owner == (REF, bytes(16), 4096)
