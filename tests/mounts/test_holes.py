"""Holes: what a file has no data for is found in whole pieces, and nothing that has data is taken for a hole."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monarch._mounts.holes import data_in, gaps_in

PIECE = 1 << 16


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 40 * PIECE), st.integers(1, 3 * PIECE)), max_size=5), st.integers(0, 20), st.integers(0, 30))
def test_data_are_never_in_a_hole(tmp_path, writes, first, number):
    path = tmp_path / "sparse"
    size = 45 * PIECE + 7
    path.unlink(missing_ok=True)
    with open(path, "w+b") as file:
        file.truncate(size)
        for at, length in writes:
            file.seek(at)
            file.write(b"x" * length)
        file.flush()
        start, end = first * PIECE, min((first + number) * PIECE, size)
        found = data_in(file.fileno(), start, end, PIECE)
        holes = gaps_in(found, start, end)
        assert all(not any(os.pread(file.fileno(), high - low, low)) for low, high in holes)
    every = sorted([*found, *holes])
    assert [low for low, _ in every[1:]] == [high for _, high in every[:-1]] and all(low % PIECE == 0 for low, _ in every)
    assert sum(high - low for low, high in every) == max(0, end - start)


def test_a_file_without_data_is_one_hole_and_one_that_does_not_tell_is_data(tmp_path, monkeypatch):
    with open(tmp_path / "sparse", "w+b") as file:
        file.truncate(10 * PIECE)
        assert data_in(file.fileno(), 0, 10 * PIECE, PIECE) == [] and gaps_in([], 3, 9) == [(3, 9)]
    reading, writing = os.pipe()
    try:
        assert data_in(reading, 5, 9, PIECE) == [(5, 9)]
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("at", [0, PIECE - 1, PIECE, 5 * PIECE + 1])
def test_a_byte_makes_its_piece_data(tmp_path, at):
    with open(tmp_path / "sparse", "w+b") as file:
        file.truncate(9 * PIECE)
        os.pwrite(file.fileno(), b"x", at)
        piece = at // PIECE * PIECE
        assert data_in(file.fileno(), 0, 9 * PIECE, PIECE) == [(piece, piece + PIECE)]
