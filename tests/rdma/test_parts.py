"""Parts: pieces of a copy cover every part once, wherever they are cut, and a part is seen as it was put there."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from monarch.rdma.parts import copy_out, parts_of, target_of, view_of, within

ARRAYS = st.lists(st.tuples(st.sampled_from(["uint8", "float16", "int64", "complex128"]), st.integers(0, 90)), min_size=1, max_size=6)


@given(ARRAYS, st.lists(st.integers(0, 9000), max_size=5))
def test_whatever_pieces_come_every_byte_of_every_part_is_read_once(shapes, cuts):
    state = {f"a{number}": np.arange(length).astype(dtype) for number, (dtype, length) in enumerate(shapes)}
    parts, size = parts_of(state)
    memory = bytearray(size)
    for name, part in parts.items():
        copy_out(state[name], memoryview(memory), part)
    into = {name: np.zeros_like(value) for name, value in state.items()}
    targets = {name: target_of(value, parts[name]) for name, value in into.items()}
    edges = sorted({0, size, *(cut for cut in cuts if cut < size)})
    moved = 0
    for start, end in pairwise(edges):
        for target, low, high in within(targets, parts, start, end):
            assert start <= low < high <= end and target.nbytes == high - low
            target[...] = np.frombuffer(memory, "uint8")[low:high]
            moved += high - low
    assert moved == sum(value.nbytes for value in state.values())
    for name, value in state.items():
        assert np.array_equal(into[name], value) and np.array_equal(view_of(memory, parts[name]), value)
