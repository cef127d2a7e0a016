"""Memory that is used again."""

from __future__ import annotations

import gc
import itertools
import pickle
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._base import reused as module
from monarch._base.buffers import address_of
from monarch._base.reused import MOST_BYTES, MOST_FREE_BYTES, free_bytes, is_settled, reused, settle

MIB = 1 << 20


@pytest.fixture(autouse=True)
def own_pool(monkeypatch):
    monkeypatch.setattr(module, "_free", {})


@pytest.mark.parametrize("size", [1, 511 << 10, MIB - 1, MIB, MIB + 1, MOST_BYTES, MOST_BYTES + 1])
def test_a_view_has_its_size_and_can_be_written_whole(size):
    view = reused(size)
    assert (view.nbytes, view.format, view.readonly) == (size, "B", False)
    view[0] = view[-1] = 7
    assert view[0] == view[-1] == 7


def test_pages_are_used_again_when_the_last_slice_is_gone():
    view = reused(MIB)
    view[:] = b"x" * MIB
    part, address = view[1:10], address_of(view)[0]
    del view
    other = reused(MIB)
    assert part == b"x" * 9 and address_of(other)[0] != address
    del part
    assert address_of(reused(MIB - 100))[0] == address


def test_two_sizes_do_not_share_pages_and_very_long_ones_are_not_kept():
    small, large = reused(MIB), reused(4 * MIB)
    del small, large
    assert free_bytes() == 5 * MIB
    view = reused(MOST_BYTES + 1)
    del view
    assert free_bytes() == 5 * MIB


@given(st.lists(st.tuples(st.integers(1, MOST_BYTES), st.integers(0, 9)), max_size=40))
def test_living_views_never_overlap_and_what_is_free_is_bounded(steps):
    alive = []
    for size, at in steps:
        if alive and at < 5:
            del alive[at % len(alive)]
        alive.append(reused(size))
        places = sorted(address_of(view) for view in alive)
        assert all(start + length <= following for (start, length), (following, _) in itertools.pairwise(places))
    alive.clear()
    assert free_bytes() <= MOST_FREE_BYTES


def test_views_may_end_in_the_collector_and_on_any_thread():
    def make():
        for _ in range(200):
            cycle = [reused(MIB)]
            cycle.append(cycle)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert 0 < free_bytes() <= MOST_FREE_BYTES


def test_a_finaliser_of_a_cycle_still_has_its_bytes_and_may_keep_them():
    kept = []

    class Batch:
        def __init__(self):
            self.view, self.cycle = reused(MIB), self
            self.view[:] = b"a" * MIB

        def __del__(self):
            other = reused(MIB)
            other[:] = b"b" * MIB
            kept.append(self)

    Batch()
    gc.collect()
    assert kept[0].view == b"a" * MIB and free_bytes() == MIB
    address = address_of(kept[0].view)[0]
    kept[0].cycle = None
    kept.clear()
    assert free_bytes() == 2 * MIB and address in [address_of(view)[0] for view in (reused(MIB), reused(MIB))]


def test_what_is_settled_is_so_through_every_view():
    for data in (settle(reused(MIB)), memoryview(b"bytes")):
        views = data, data[1:], memoryview(pickle.PickleBuffer(data)), memoryview(pickle.PickleBuffer(data[1:]))[1:]
        assert all(map(is_settled, views))
    for data in (reused(MIB), memoryview(bytearray(9)), settle(memoryview(bytearray(9)))):
        assert not any(map(is_settled, (data, data[1:].toreadonly(), memoryview(pickle.PickleBuffer(data)))))


def test_no_bytes_are_no_memory():
    with pytest.raises(ValueError, match="no memory of 0 bytes"):
        reused(0)
