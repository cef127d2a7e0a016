"""Huge pages: when a buffer is worth it, and which ranges are put together."""

from __future__ import annotations

import mmap
import os
import threading
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._base.ids import ProcRef
from monarch.rdma.handles import Handle
from monarch.rdma.huge_pages import HUGE_BYTES, LEAST_BYTES, TIMES, Heat, HugePages, is_possible, scattered
from monarch.rdma.memory import memory_of

MIB = 1 << 20
WAIT_S = 10.0
on_huge_pages = pytest.mark.skipif(not is_possible(), reason="this system puts no pages together on request")


def handle(nbytes, generation=1):
    return Handle(ProcRef("owner<1>", "unix:/x", ""), b"n" * 16, 0, 0, generation, 0, nbytes, 0, {})


@given(st.integers(LEAST_BYTES, 1 << 34), st.lists(st.integers(1, 1 << 34), max_size=30))
def test_the_owner_hears_once_when_the_whole_was_moved_often_enough(nbytes, moves):
    heat, told, total = Heat(), 0, 0
    for move in moves:
        total += move
        told += heat.add(handle(nbytes), move)
        assert told == (total >= TIMES * nbytes)


def test_small_buffers_are_not_worth_it_and_others_do_not_count():
    heat = Heat()
    assert not any(heat.add(handle(LEAST_BYTES - 1), 1 << 40) for _ in range(9))
    assert [heat.add(handle(LEAST_BYTES, generation), TIMES * LEAST_BYTES - 1) for generation in (1, 2)] == [False, False]
    assert heat.add(handle(LEAST_BYTES, 2), 1)


def pages(nbytes):
    """Memory in small pages, not one of which exists yet."""
    made = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    made.madvise(mmap.MADV_NOHUGEPAGE)
    return made


def num_huge_kib(address):
    """KiB of huge pages in the mapping around an address."""
    is_in = False
    with open("/proc/self/smaps", encoding="ascii", errors="replace") as smaps:
        for line in smaps:
            words = line.split()
            if "-" in words[0] and not words[0].endswith(":"):
                start, end = (int(word, 16) for word in words[0].split("-"))
                is_in = start <= address < end
            elif is_in and words[0] == "AnonHugePages:":
                return int(words[1])
    raise AssertionError("no such mapping")


@on_huge_pages
def test_only_whole_ranges_whose_pages_exist_are_put_together():
    nbytes = 9 * HUGE_BYTES
    with pages(nbytes) as made:
        memory = memory_of(memoryview(made))
        first = -(-memory.address // HUGE_BYTES) * HUGE_BYTES
        assert list(scattered(memory.address, nbytes)) == []
        offset = first - memory.address
        made[offset + HUGE_BYTES : offset + 3 * HUGE_BYTES] = b"x" * (2 * HUGE_BYTES)
        made[offset + 3 * HUGE_BYTES + 4096 : offset + 4 * HUGE_BYTES] = b"x" * (HUGE_BYTES - 4096)
        assert list(scattered(memory.address, nbytes)) == [first + HUGE_BYTES, first + 2 * HUGE_BYTES]
        assert list(scattered(first + HUGE_BYTES + 1, 2 * HUGE_BYTES - 1)) == [first + 2 * HUGE_BYTES]
        memory.pin.release()
        del memory


@on_huge_pages
def test_memory_of_a_file_and_memory_shared_with_a_fork_stay_as_they_are():
    fd = os.memfd_create("test")
    try:
        os.ftruncate(fd, 3 * HUGE_BYTES)
        with mmap.mmap(fd, 3 * HUGE_BYTES) as made:
            made[:] = b"x" * len(made)
            view = memoryview(made)
            assert list(scattered(memory_of(view).address, len(made))) == []
            view.release()
    finally:
        os.close(fd)


@on_huge_pages
def test_bytes_are_the_same_and_lie_in_huge_pages_afterwards():
    data = bytearray(os.urandom(MIB)) * 16
    before = bytes(data)
    memory = memory_of(data)
    made, asked, last = HugePages(), [], threading.Event()
    ranges = list(scattered(memory.address, memory.nbytes))
    assert len(ranges) >= 6

    def find():
        asked.append(num_huge_kib(ranges[0]))
        if len(asked) > len(ranges):
            last.set()
        return memory

    made.put_under(find)
    assert last.wait(WAIT_S)
    made.close()
    assert num_huge_kib(ranges[0]) - asked[0] >= 2048 and data == before


@on_huge_pages
def test_it_ends_when_the_memory_is_gone_and_pins_none_that_waits_for_its_turn():
    data = bytearray(b"x") * (16 * MIB)
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    asked = []

    def find():
        asked.append(1)
        begun.set()
        assert go_on.wait(WAIT_S)
        return memory_of(data) if len(asked) == 1 else None

    made = HugePages()
    made.put_under(find)
    assert begun.wait(WAIT_S)
    regions = {1: memory_of(bytearray(16 * MIB))}
    second = weakref.ref(regions[1])
    made.put_under(lambda: regions.get(1))
    made.put_under(lambda: ended.set() and None)
    regions.clear()
    assert second() is None
    go_on.set()
    assert ended.wait(WAIT_S) and len(asked) == 2
    made.close()
    made.put_under(lambda: pytest.fail("it is closed"))


@on_huge_pages
def test_what_waits_when_it_is_closed_is_not_begun():
    begun, go_on = threading.Event(), threading.Event()

    def find():
        begun.set()
        assert go_on.wait(WAIT_S)

    made, begun_late = HugePages(), []
    made.put_under(find)
    assert begun.wait(WAIT_S)
    for _ in range(1000):
        made.put_under(lambda: begun_late.append(1))
    made._closed.set()
    go_on.set()
    made.close()
    assert not begun_late and not made._worker._work
