"""Merging of similar lines: counts add up, actors stay apart, work is bounded."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._runtime.log_merge import SIMILAR_BELOW, Merger, distance, is_similar


def slow_distance(a: str, b: str) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))
    return row[-1]


words = st.text(alphabet="abc ", max_size=24)


@given(a=words, b=words)
def test_the_distance_is_that_of_the_textbook(a, b):
    assert distance(a, b, 1000) == slow_distance(a, b)


@given(a=words, b=words, most=st.integers(0, 24))
def test_giving_up_early_gives_up_only_beyond_the_limit(a, b, most):
    found, true = distance(a, b, most), slow_distance(a, b)
    assert found == true if true <= most else found > most


@given(a=words, b=words)
def test_similar_means_a_normalised_distance_below_the_limit(a, b):
    longest = max(len(a), len(b))
    assert is_similar(a, b) == (a == b or slow_distance(a, b) / longest < SIMILAR_BELOW)


@pytest.mark.parametrize(
    "a, b, similar",
    [
        ("", "", True),
        ("", "x", False),
        ("1", "2", False),
        ("epoch 3 loss 0.51273", "epoch 3 loss 0.51288", True),
        ("loaded shard 3 of 8 in 12 s", "loaded shard 5 of 8 in 12 s", True),
        ("rank 0 is ready", "out of memory!!", False),
        ("x" * 20, "x" * 17 + "yyy", False),  # exactly 0.15
        ("x" * 21, "x" * 18 + "yyy", True),
        ("x" * 5000, "x" * 4999 + "y", False),  # long lines merge only when equal
    ],
)
def test_which_lines_are_similar(a, b, similar):
    assert is_similar(a, b) == similar == is_similar(b, a)


sources = st.integers(0, 3)
texts = st.sampled_from(["", "1", "2", "step 10 of 100 loss 0.5", "step 11 of 100 loss 0.5", "done"])
lines = st.lists(st.tuples(sources, texts), max_size=60)


@given(lines=lines, merge=st.sampled_from(["actors", "all"]))
def test_counts_add_up_to_the_lines(lines, merge):
    merger = Merger(merge)
    for source, text in lines:
        merger.add(source, text)
    merged = merger.take()
    assert sum(line.num_lines for line in merged) == len(lines)
    assert not merger and merger.take() == []
    for text in ("1", "2", "done"):  # unlike all others
        assert sum(line.num_lines for line in merged if line.text == text) == Counter(text for _, text in lines)[text]


@given(lines=lines)
def test_merging_across_actors_covers_at_most_one_line_of_each(lines):
    merger = Merger("actors")
    for source, text in lines:
        merger.add(source, text)
    assert all(line.num_lines <= 4 for line in merger.take())


def test_four_actors_that_print_ten_numbers_twice():
    merger = Merger("actors")
    for source in range(4):
        for _ in range(2):
            for number in range(10):
                merger.add(source, str(number))
    merged = merger.take()
    assert [(line.num_lines, line.text) for line in merged] == [(4, str(number)) for _ in range(2) for number in range(10)]


def test_merging_all_counts_the_lines_of_one_actor_too():
    merger = Merger("all")
    for index in range(20):
        merger.add(index % 2, f"has print streaming {index % 10}")
    assert [line.num_lines for line in merger.take()] == [20]


def test_a_merger_says_when_it_is_full():
    merger = Merger()
    added = 0
    while not merger.full:
        merger.add(0, f"{added:0100d}"[::-1])
        added += 1
    assert added <= 2000 and len(merger.take()) == added and not merger.full
    for letter in "abcdefgh":
        merger.add(0, letter * 2**20)
        if merger.full:
            break
    assert merger.full


def test_a_flood_of_different_lines_costs_a_bounded_number_of_comparisons():
    merger = Merger()
    for number in range(100_000):
        merger.add(number % 4, f"{number * 7919 % 1000003:x} and some more text that makes the line longer")
        if merger.full:
            merger.spill()
