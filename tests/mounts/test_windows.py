"""What is kept of files stays below its limit, and the windows used last stay."""

from __future__ import annotations

from hypothesis import given
from hypothesis.strategies import integers, lists, one_of, tuples

from monarch._mounts.windows import Window, Windows

LIMIT = 100
step = one_of(
    tuples(integers(1, 3), integers(0, 4), integers(0, 60)),
    tuples(integers(1, 3), integers(0, 4)),
    tuples(integers(1, 3)),
)


def window(size):
    return Window(memoryview(bytes(size)), (size, 0, 0), 0)


@given(lists(step, max_size=40))
def test_they_are_as_a_list_in_order_of_use(steps):
    windows, model = Windows(LIMIT), []
    for node, *rest in steps:
        if not rest:
            windows.drop_node(node)
            model = [each for each in model if each[0][0] != node]
        elif len(rest) == 1:
            found = windows.get(node, rest[0])
            known = [each for each in model if each[0] == (node, rest[0])]
            assert (found is None) == (not known)
            model = [each for each in model if each not in known] + known
        else:
            index, size = rest
            windows.put(node, index, window(size))
            model = [each for each in model if each[0] != (node, index)] + [((node, index), size)]
            while sum(size for _, size in model) > LIMIT:
                del model[0]
        assert windows.num_bytes == sum(size for _, size in model) <= LIMIT
        assert len(windows) == len(model)
