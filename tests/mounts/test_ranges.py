"""Ranges against a plain set."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from monarch._mounts.ranges import Ranges

pairs = st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda pair: (pair[0], pair[0] + pair[1]))
steps = st.lists(st.tuples(st.sampled_from(["add", "remove"]), pairs), max_size=30)


def integers(intervals) -> list[int]:
    return [at for start, end in intervals for at in range(start, end)]


@given(steps=steps, asked=pairs)
def test_ranges_are_a_set(steps, asked):
    ranges, plain = Ranges(), set()
    for name, (start, end) in steps:
        before = len(plain)
        plain = plain | set(range(start, end)) if name == "add" else plain - set(range(start, end))
        assert getattr(ranges, name)(start, end) == abs(len(plain) - before)
    assert integers(ranges) == sorted(plain)
    assert ranges.total == len(plain)
    wanted = set(range(*asked))
    assert ranges.covers(*asked) == (wanted <= plain)
    assert integers(ranges.within(*asked)) == sorted(wanted & plain)
    assert integers(ranges.gaps(*asked)) == sorted(wanted - plain)
    assert list(ranges) == sorted(ranges) and all(a[1] < b[0] for a, b in zip(ranges, list(ranges)[1:], strict=False))


@given(steps=steps, at=st.integers(0, 50))
def test_a_gap_reaches_to_the_next_intervals(steps, at):
    ranges = Ranges()
    for name, pair in steps:
        getattr(ranges, name)(*pair)
    ranges.remove(at, at + 1)
    low, high = ranges.gap_around(at, at + 1)
    plain = integers(ranges)
    assert (low - 1 if low is not None else None) == max((i for i in plain if i < at), default=None)
    assert high == min((i for i in plain if i > at), default=None)
