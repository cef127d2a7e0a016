"""Segments: how the address space is cut into memory."""

from __future__ import annotations

from monarch._mounts.index import BIG_FILE_THRESHOLD, BLOCK_SIZE
from monarch._mounts.ranges import Span
from monarch._mounts.segment import Segment, in_blocks, segments_of

MIB = 1 << 20


def bounds(segments) -> list[tuple[int, int, bool]]:
    return [(segment.start, segment.end, segment.is_big) for segment in segments]


def test_small_files_of_a_block_share_a_segment_and_big_ones_have_their_own():
    files = [Span(0, 10), Span(10, 20), Span(30, BIG_FILE_THRESHOLD), Span(BLOCK_SIZE, 5), Span(3 * BLOCK_SIZE, 5)]
    assert bounds(segments_of(files)) == [
        (0, 30, False),
        (30, 30 + MIB, True),
        (BLOCK_SIZE, BLOCK_SIZE + 5, False),
        (3 * BLOCK_SIZE, 3 * BLOCK_SIZE + 5, False),
    ]


def test_a_small_file_across_a_block_boundary_has_two_parts():
    span = Span(BLOCK_SIZE - 10, 30)
    assert list(in_blocks(span)) == [(BLOCK_SIZE - 10, BLOCK_SIZE), (BLOCK_SIZE, BLOCK_SIZE + 20)]
    assert bounds(segments_of([span])) == [(BLOCK_SIZE - 10, BLOCK_SIZE, False), (BLOCK_SIZE, BLOCK_SIZE + 20, False)]


def test_pieces_are_counted_from_the_beginning_of_the_segment():
    segment = Segment(30, 30 + 3 * MIB + 7, is_big=True)
    assert list(segment.pieces(30, 31)) == [Span(30, MIB)]
    assert list(segment.pieces(29 + MIB, 31 + MIB)) == [Span(30, MIB), Span(30 + MIB, MIB)]
    assert list(segment.pieces(30 + 3 * MIB, segment.end)) == [Span(30 + 3 * MIB, 7)]


def test_what_no_file_has_is_never_missing_and_never_present():
    (segment,) = segments_of([Span(0, 10), Span(20, 10)])
    assert segment.lacking(0, 30) == [(0, 10), (20, 30)]
    segment.arrive(5, 25)
    assert segment.lacking(0, 30) == [(0, 5), (25, 30)] and segment.present.total == 10
    segment.drop([(20, 30)])
    assert segment.lacking(0, 30) == [(0, 5)] and segment.present.total == 5
