"""Rows: everybody hears of the first one, over few others, and nobody has many to serve."""

from __future__ import annotations

from collections import Counter

from monarch._base.rows import ROW, before


def way_of(position: int) -> list[int]:
    """Through whom it comes, the nearest first."""
    upstream = before(position)
    return [] if upstream is None else [upstream, *way_of(upstream)]


def test_heads_ask_the_head_of_the_row_before_and_others_their_neighbour():
    assert [before(position) for position in (0, 1, ROW - 1, ROW, ROW + 1, 2 * ROW)] == [None, 0, ROW - 2, 0, ROW, ROW]


def test_everybody_is_reached_over_a_row_of_heads_and_one_row_and_serves_two_at_most():
    positions = range(10 * ROW)
    assert all(way_of(position)[-1:] == [0][:position] for position in positions)
    assert max(len(way_of(position)) for position in positions) == 9 + ROW - 1
    assert max(Counter(before(position) for position in positions[1:]).values()) == 2
