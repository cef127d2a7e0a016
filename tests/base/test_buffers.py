"""Buffers at the C level: addresses are those of the bytes, and nothing stays exported."""

from __future__ import annotations

import ctypes

import pytest

from monarch._base.buffers import address_of, exported


@pytest.mark.parametrize("data", [bytearray(b"abcdef"), memoryview(b"abcdef"), b"abcdef", memoryview(bytearray(b"..abcdef"))[2:]], ids=repr)
def test_an_address_is_that_of_the_first_byte(data):
    address, nbytes = address_of(data)
    assert ctypes.string_at(address, nbytes) == b"abcdef"


def test_an_object_can_be_resized_after_its_address_was_taken():
    data = bytearray(10)
    address_of(data)
    data.extend(b"more")
    with exported(data) as buffer, pytest.raises(BufferError):
        assert buffer.len == 14
        data.extend(b"more")
    data.extend(b"more")


@pytest.mark.parametrize("data", [memoryview(b"abcdef")[::2], "text", 7], ids=repr)
def test_what_has_no_contiguous_buffer_has_no_address(data):
    with pytest.raises((BufferError, TypeError)):
        address_of(data)
