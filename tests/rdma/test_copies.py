"""Copies: what is read is of one filling; what is mapped is never filled; who maps it may die."""

from __future__ import annotations

import gc
import os
import pickle
import resource
import signal
import stat
import subprocess
import sys

import pytest

from monarch._runtime.future import Future
from monarch.actor import shutdown_context
from monarch.rdma import RDMAError
from monarch.rdma.copies import NOTHING, Copies, Copy
from monarch.rdma.errors import NoRoomError

SIZE = 100_000
pytestmark = pytest.mark.filterwarnings("ignore::monarch.rdma.RDMATcpFallbackWarning")


@pytest.fixture(autouse=True)
def client_ends():
    yield
    shutdown_context().get(timeout=10)


@pytest.fixture
def make():
    made = []

    def make(**options) -> Copies:
        made.append(Copies(SIZE, **options))
        return made[-1]

    yield make
    for copies in made:
        copies.close()


def fill(copies: Copies, number: int) -> Copy:
    copies.begin(number, 10 * number)[:] = bytes([number]) * SIZE
    return copies.finish()


def read(copies: Copies, copy: Copy) -> bytes:
    target = bytearray(SIZE)
    copies.published.bytes_of(copy.slot, 10).read_into(target).get(10)
    return bytes(target)


@pytest.mark.parametrize(("copies", "slots"), [(1, [0, 0, 0, 0]), (2, [0, 1, 0, 1]), (3, [0, 1, 2, 0])])
def test_slots_are_filled_in_turns(make, copies, slots):
    owner = make(copies=copies, spares=4)
    assert owner.published.newest(10) == NOTHING
    filled = [fill(owner, number) for number in range(1, 5)]
    assert [copy.slot for copy in filled] == slots
    newest = owner.published.newest(10)
    assert newest == filled[-1] == owner.newest() and (newest.number, newest.version, newest.arrived) == (4, 40, SIZE)
    assert read(owner, newest) == b"\4" * SIZE
    assert pickle.loads(pickle.dumps(owner.published)).newest(10) == newest


def test_a_copy_that_is_overwritten_is_another_from_the_first_byte_on(make):
    owner = make(copies=2, spares=0)
    first = fill(owner, 1)
    assert owner.published.look(first.slot, 10).is_same(first)
    fill(owner, 2)
    owner.begin(3, 30)
    assert not owner.published.look(first.slot, 10).is_same(first)
    owner.abandon()
    assert not owner.published.look(first.slot, 10).is_same(first) and owner.published.newest(10).number == 2
    again = fill(owner, 3), fill(owner, 3)
    assert not again[0].is_same(again[1])


def test_what_has_arrived_is_seen_while_it_is_being_filled(make):
    owner = make(copies=2, spares=0)
    owner.begin(1, 10)
    assert owner.published.look(0, 10).stamp == 0
    some = owner.arrived(5000)
    seen = owner.published.look(0, 10)
    assert seen == some and seen.arrived == 5000 and not seen.is_whole and owner.published.newest(10) == NOTHING
    done = owner.finish()
    assert done.is_same(some) and done.is_whole and owner.published.newest(10) == done


def test_what_is_mapped_stays_as_it_is_and_the_owner_goes_on_in_other_slots(make):
    owner = make(copies=2, spares=1)
    first = fill(owner, 1)
    mapped = owner.published.map(first, 10)
    assert [fill(owner, number).slot for number in (2, 3, 4)] == [1, 2, 1]
    assert mapped[:] == b"\1" * SIZE
    mapped[:3] = b"abc"
    assert read(owner, first) == b"\1" * SIZE, "what a reader writes is seen by him only"
    view = memoryview(mapped)
    del mapped
    gc.collect()
    fill(owner, 5)
    assert view[10:] == b"\1" * (SIZE - 10)
    view.release()
    assert fill(owner, 6).slot == first.slot


def test_a_copy_that_is_gone_or_being_filled_is_not_mapped(make):
    owner = make(copies=2, spares=0)
    first = fill(owner, 1)
    owner.begin(2, 20)
    owner.abandon()
    fill(owner, 2)
    owner.begin(3, 30)
    assert owner.published.map(first, 10) is None
    owner.finish()
    assert owner.published.map(first, 10) is None
    assert owner.published.map(owner.newest(), 10) is not None


def test_without_spares_it_is_told_who_maps_what(make):
    owner = make(copies=2, spares=1)
    kept = [owner.published.map(fill(owner, number), 10) for number in (1, 2, 3)]
    where = "; ".join(rf"version {version} by pid {os.getpid()} \(\S+\)" for version in (10, 20, 30))
    text = rf"of 3 copies of the weights readers map all but the newest\n.*{where}\n.*spares="
    with pytest.raises(RDMAError, match=text):
        owner.begin(4, 40)
    assert owner.newest().number == 3
    kept.pop(0)
    assert fill(owner, 4).slot == 0
    kept.clear()


HOLD = """
import pickle, sys
from monarch.actor import shutdown_context
copies = pickle.loads(bytes.fromhex(sys.argv[1]))
mapped = copies.map(copies.newest(10), 10)
print(mapped[0], flush=True)
sys.stdin.read()
"""


def test_the_death_of_a_reader_frees_what_he_has_mapped(make):
    owner = make(copies=1, spares=1)
    first = fill(owner, 1)
    argv = [sys.executable, "-W", "ignore", "-c", HOLD, pickle.dumps(owner.published).hex()]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout.readline() == b"1\n"
        assert fill(owner, 2).slot == 1 and fill(owner, 3).slot == 1
        os.kill(reader.pid, signal.SIGKILL)
        reader.wait(10)
    assert fill(owner, 4).slot == first.slot


def test_the_file_is_the_owners_alone_and_another_in_its_place_is_an_error(make):
    owner = make(copies=2, spares=0)
    copy = fill(owner, 1)
    assert stat.S_IMODE(os.fstat(owner._fd).st_mode) == 0o600
    published = pickle.loads(pickle.dumps(owner.published))
    published._file = published._file._replace(name="another")
    with pytest.raises(RDMAError, match=r"can't be opened: .*another process has its process id"):
        published.map(copy, 10)


def test_closed_copies_are_an_error_and_what_is_mapped_stays(make):
    owner = make(copies=2, spares=0)
    published, mapped = owner.published, owner.published.map(fill(owner, 1), 10)
    owner.close()
    for use in (lambda: published.newest(10), lambda: published.look(0, 10)):
        with pytest.raises(RDMAError, match="not found"):
            use()
    assert mapped[:] == b"\1" * SIZE


def test_a_slot_that_a_late_transfer_may_still_write_to_is_not_filled(make):
    copies = make(copies=2, spares=0)
    kept = fill(copies, 1)
    late = Future._new()
    copies.begin(2, 2)
    copies.abandon([late])
    with pytest.raises(NoRoomError, match="copy 2 by a transfer that has been given up"):
        copies.begin(3, 3)
    assert copies.newest() == kept
    late._fail(TimeoutError("over"))
    assert fill(copies, 3).slot == 1


def test_limits_of_this_process_are_told_and_leave_everything_as_it_was(make):
    copies = make(copies=2, spares=2)
    copy = fill(copies, 1)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        with pytest.raises(RDMAError, match=r"no copy 2 of the weights(?s:.*)ulimit -n"):
            copies.begin(2, 20)
        with pytest.raises(RDMAError, match="can't be opened"):
            copies.published.map(copy, 10)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, limits[1]))
        with pytest.raises(RDMAError, match=r"can't be mapped(?s:.*)ulimit -n"):
            copies.published.map(copy, 10)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert copies.newest() == copy and fill(copies, 2).slot == 1
    assert copies.published.map(copy, 10)[:] == bytes([1]) * SIZE
