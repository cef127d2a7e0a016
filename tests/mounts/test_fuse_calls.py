"""Who has a file open is counted: what the kernel reads itself is opened and closed once, and bytes go ahead only to a first opening."""

from __future__ import annotations

import errno

from hypothesis import given
from hypothesis.strategies import integers, just, lists, none, one_of, sampled_from, tuples

from monarch._mounts.fuse_calls import Openings

UNREADABLE = 13


class Numbers:
    """A device of which the kernel opens all files but `UNREADABLE`."""

    def __init__(self):
        self.last = 0
        self.open = {}

    def open_backing(self, file):
        if file == UNREADABLE:
            raise OSError(errno.EPERM, "not this one")
        self.last += 1
        self.open[self.last] = file
        return self.last

    def close_backing(self, number):
        del self.open[number]


@given(lists(tuples(sampled_from(["add", "remove"]), integers(2, 4), one_of(none(), integers(10, 12), just(UNREADABLE)))))
def test_a_node_has_one_number_while_it_is_open(steps):
    numbers = Numbers()
    openings = Openings(numbers)
    counts, held = {2: 0, 3: 0, 4: 0}, {}
    for step, node, file in steps:
        if step == "add":
            number, is_first = openings.add(node, file)
            assert is_first is (counts[node] == 0)
            assert bool(number) is (file is not None and (node in held or file != UNREADABLE))
            assert number in (0, held.get(node, number))
            counts[node] += 1
            if number:
                held[node] = number
        else:  # also of what is not open
            openings.remove(node)
            counts[node] = max(0, counts[node] - 1)
            if not counts[node]:
                held.pop(node, None)
        assert sorted(numbers.open) == sorted(held.values())
        assert len(openings) == sum(map(bool, counts.values()))
