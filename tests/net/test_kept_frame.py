"""Kept frames: the same bytes in the same order, copied where they could change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._base.reused import reused, settle
from monarch._net import kept_frame
from monarch._net.kept_frame import KeptFrame

KIB = 1 << 10


def piece(kind, nbytes, value):
    if kind == "bytes":
        return bytes([value]) * nbytes
    if kind == "settled" and nbytes:
        view = reused(nbytes)
        view[:] = bytes([value]) * nbytes
        return settle(view)
    return bytearray([value]) * nbytes


KINDS = st.sampled_from(["bytes", "settled", "bytearray"])
SIZES = st.sampled_from([0, 1, 100, 64 * KIB - 1, 64 * KIB, 300 * KIB])
PIECES = st.lists(st.tuples(KINDS, SIZES, st.integers(0, 255)), max_size=8)


@pytest.mark.parametrize("chunk_bytes", [1000, 100 * KIB, 4096 * KIB])
@given(PIECES)
def test_what_is_kept_is_what_was_given_also_after_that_has_changed(chunk_bytes, parts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_frame, "_CHUNK_BYTES", chunk_bytes)
        pieces = [piece(*part) for part in parts]
        whole = b"".join(pieces)
        frame = KeptFrame()
        assert b"".join(map(bytes, frame.copy(pieces))) == whole
    for given_piece in pieces:
        if isinstance(given_piece, bytearray):
            given_piece[:] = bytes(len(given_piece))
    assert b"".join(frame.pieces) == whole and len(frame) == len(whole)


def test_only_what_can_not_change_is_kept_as_it_is():
    constant, settled, changing = piece("bytes", 64 * KIB, 1), piece("settled", 64 * KIB, 2), piece("bytearray", 64 * KIB, 3)
    unsettled = reused(64 * KIB)
    frame = KeptFrame()
    list(frame.copy([b"head", constant, settled, changing, unsettled]))
    owners = [view.obj for view in frame.pieces]
    assert constant in owners and settled.obj in owners
    assert changing not in owners and unsettled.obj not in owners
    frame.free()
    assert not frame.pieces
