"""Regions: whoever looks from outside gets the bytes that were published, or an error; never others, whatever the owner does."""

from __future__ import annotations

import gc
import os
import weakref

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from monarch.rdma import vm
from monarch.rdma.errors import BufferGoneError, OwnerGoneError
from monarch.rdma.memory import memory_of
from monarch.rdma.regions import ENTRY_BYTES, FIRST_ENTRIES, RegionTable, entry_bytes, open_locks, parse_entry, place_of

pytestmark = pytest.mark.skipif(not vm.available(), reason="this system has no process_vm_readv")


@pytest.fixture
def table():
    made = RegionTable()
    yield made
    assert made.close()


def span_of(table, region, local, offset=0, nbytes=None):
    entry = entry_bytes(table.nonce, region.slot, region.generation, region.memory.address, region.memory.nbytes, region.flags)
    nbytes = region.memory.nbytes if nbytes is None else nbytes
    return vm.Span(local, region.memory.address + offset, nbytes, region.entry_address, entry, region.slot, region.generation - 1)


def read(table, region, pid=None):
    target = bytearray(region.memory.nbytes)
    vm.read_spans(pid or os.getpid(), [span_of(table, region, memory_of(target).address)])
    return bytes(target)


def write(table, region, data, locks=None):
    source = bytearray(data)
    vm.write_spans(os.getpid(), [span_of(table, region, memory_of(source).address, nbytes=len(data))], locks or table.locks)


# --- the table -------------------------------------------------------------------------------------------------------


def test_slots_lie_in_chunks_of_doubling_size():
    places = [place_of(slot) for slot in range(8 * FIRST_ENTRIES)]
    assert len(set(places)) == len(places)
    sizes = [sum(chunk == number for chunk, _ in places) for number in range(3)]
    assert sizes == [FIRST_ENTRIES, 2 * FIRST_ENTRIES, 4 * FIRST_ENTRIES]
    assert all(0 <= index < FIRST_ENTRIES << chunk for chunk, index in places)


def test_a_table_grows_and_never_moves(table):
    memory = memory_of(bytearray(b"data"))
    first = table.add(memory)
    rest = [table.add(memory) for _ in range(3 * FIRST_ENTRIES)]
    head = vm.read_head(os.getpid(), table.address)
    assert (head.nonce, len(head.chunks)) == (table.nonce, 3)
    for region in (first, *rest[:: FIRST_ENTRIES // 2], rest[-1]):
        chunk, index = place_of(region.slot)
        assert head.chunks[chunk] + index * ENTRY_BYTES == region.entry_address
        assert read(table, region) == b"data"


def test_an_entry_says_what_was_published(table):
    region = table.add(memory_of(memoryview(b"read only")))
    entry = vm.peek(os.getpid(), [(region.entry_address, ENTRY_BYTES)])
    assert parse_entry(entry) == (table.nonce, region.slot, 1, region.memory.address, 9, 1)


def test_generations_are_used_once_and_slots_again(table):
    regions = []
    for _ in range(5):
        regions.append(table.add(memory_of(bytearray(8))))
        assert table.drop(regions[-1].generation)
        assert not table.drop(regions[-1].generation)
    assert {region.slot for region in regions} == {0} and len({region.generation for region in regions}) == 5
    for region in regions:
        with pytest.raises(BufferGoneError, match=f"buffer {region.generation - 1} not found"):
            read(table, region)


def test_memory_is_pinned_until_it_is_dropped(table):
    class Memory(bytearray):
        pass

    data = Memory(b"pinned")
    seen = weakref.ref(data)
    region = table.add(memory_of(data))
    del data
    gc.collect()
    assert read(table, region) == b"pinned"
    table.drop(region.generation)
    del region
    gc.collect()
    assert seen() is None


def test_memory_under_a_lock_stays_pinned_and_its_slot_unused_until_the_lock_ends(table):
    region = table.add(memory_of(bytearray(8)))
    locks = open_locks(os.getpid(), table.locks.fd)
    locks.hold(region.slot)
    locks.hold(region.slot)
    table.drop(region.generation)
    assert table.num_lingering == 1
    assert table.add(memory_of(bytearray(8))).slot != region.slot
    locks.let_go(region.slot)
    assert not table.drop(region.generation) and table.num_lingering == 1
    locks.let_go(region.slot)
    table.drop(0)
    assert table.num_lingering == 0
    locks.close()


def test_a_lock_ends_with_its_holder(table):
    region = table.add(memory_of(bytearray(8)))
    locks = open_locks(os.getpid(), table.locks.fd)
    locks.hold(region.slot)
    table.drop(region.generation)
    assert not table.close()
    locks.close()
    assert table.close()


def test_nobody_writes_to_what_was_dropped(table):
    data = bytearray(b"before")
    region = table.add(memory_of(data))
    write(table, region, b"AB")
    table.drop(region.generation)
    with pytest.raises(BufferGoneError):
        write(table, region, b"XY")
    assert data == b"ABfore"


def test_a_closed_table_says_that_everything_is_gone():
    table = RegionTable()
    region = table.add(memory_of(bytearray(b"data")))
    assert table.close() and len(table) == 0
    with pytest.raises(BufferGoneError):
        read(table, region)


def test_a_fork_finds_the_table_empty(table):
    region = table.add(memory_of(bytearray(b"data")))
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            vm.read_head(os.getpid(), table.address)
        except OwnerGoneError:
            os.write(theirs, b"empty")
        finally:
            os._exit(0)
    os.close(theirs)
    assert os.read(ours, 9) == b"empty"
    os.close(ours)
    assert os.waitpid(pid, 0)[1] == 0
    assert read(table, region) == b"data"


def test_a_table_of_another_process_under_the_same_id_is_not_believed(table):
    other = RegionTable()
    region = table.add(memory_of(bytearray(b"data")))
    local = memory_of(bytearray(4))
    forged = span_of(other, region, local.address)
    with pytest.raises(OwnerGoneError, match="table of regions is gone"):
        vm.read_spans(os.getpid(), [forged])
    other.close()


# --- a model: regions of another process -----------------------------------------------------------------------------


def serve(requests, answers):
    """An owner that publishes and drops on request, and uses memory again at once."""
    table = RegionTable()
    arena = bytearray(64)
    views = [memoryview(arena)[start : start + 8] for start in range(0, 64, 8)]
    live = {}
    with os.fdopen(requests, "r", 1) as lines:
        for line in lines:
            what, *numbers = line.split()
            if what == "add":
                place, value = map(int, numbers)
                views[place][:] = bytes([value]) * 8
                region = table.add(memory_of(views[place]))
                live[region.generation] = region
                parts = (region.slot, region.generation, region.memory.address, region.entry_address)
                answer = " ".join(map(str, parts))
            elif what == "drop":
                table.drop(int(numbers[0]))
                region = live.pop(int(numbers[0]))
                start = region.memory.address - memory_of(arena).address
                arena[start : start + 8] = b"\xff" * 8  # used for something else at once
                answer = "ok"
            else:
                answer = f"{table.address} {table.nonce.hex()} {table.locks.fd}"
            os.write(answers, f"{answer}\n".encode())


class Regions(RuleBasedStateMachine):
    """Publish, drop and use again in one process; read and write from another."""

    @initialize()
    def start(self):
        theirs, self.requests = os.pipe()
        answers, to_us = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self.requests)
                os.close(answers)
                serve(theirs, to_us)
            finally:
                os._exit(0)
        os.close(theirs)
        os.close(to_us)
        self.answers = os.fdopen(answers, "r", 1)
        self.table, nonce, fd = self.ask("where").split()
        self.nonce = bytes.fromhex(nonce)
        self.locks = open_locks(self.pid, int(fd))
        self.live, self.gone, self.used = {}, {}, set()

    def ask(self, line):
        os.write(self.requests, f"{line}\n".encode())
        return self.answers.readline()

    def span(self, region, local):
        slot, generation, address, entry_address, _, _ = region
        entry = entry_bytes(self.nonce, slot, generation, address, 8, 0)
        return vm.Span(local, address, 8, entry_address, entry, slot, generation - 1)

    def read(self, region):
        target = bytearray(8)
        vm.read_spans(self.pid, [self.span(region, memory_of(target).address)])
        return bytes(target)

    @rule(place=st.integers(0, 7), value=st.integers(1, 200))
    def add(self, place, value):
        if place not in self.used:
            numbers = tuple(map(int, self.ask(f"add {place} {value}").split()))
            self.live[numbers[1]] = (*numbers, place, value)
            self.used.add(place)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def drop(self, data):
        generation = data.draw(st.sampled_from(sorted(self.live)))
        self.ask(f"drop {generation}")
        region = self.gone[generation] = self.live.pop(generation)
        self.used.discard(region[4])

    @precondition(lambda self: self.live)
    @rule(data=st.data(), value=st.integers(1, 200))
    def write(self, data, value):
        generation = data.draw(st.sampled_from(sorted(self.live)))
        source = bytearray([value]) * 8
        vm.write_spans(self.pid, [self.span(self.live[generation], memory_of(source).address)], self.locks)
        self.live[generation] = (*self.live[generation][:5], value)

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def use_what_is_gone(self, data):
        region = self.gone[data.draw(st.sampled_from(sorted(self.gone)))]
        with pytest.raises(BufferGoneError):
            self.read(region)
        with pytest.raises(BufferGoneError):
            local = memory_of(bytearray(8))
            vm.write_spans(self.pid, [self.span(region, local.address)], self.locks)

    @precondition(lambda self: self.live and self.gone)
    @rule()
    def read_all_at_once(self):
        target = bytearray(8)
        regions = [*self.live.values(), next(iter(self.gone.values()))]
        with pytest.raises(BufferGoneError, match=f"buffer {regions[-1][1] - 1} not found"):
            vm.read_spans(self.pid, [self.span(region, memory_of(target).address) for region in regions])

    @invariant()
    def what_is_live_is_what_was_written(self):
        for region in getattr(self, "live", {}).values():
            assert self.read(region) == bytes([region[5]]) * 8

    def teardown(self):
        if not hasattr(self, "requests"):
            return
        os.close(self.requests)
        self.answers.close()
        os.waitpid(self.pid, 0)
        with pytest.raises(OwnerGoneError):
            vm.read_head(self.pid, int(self.table))
        for region in self.live.values():
            with pytest.raises(OwnerGoneError, match="process has ended"):
                self.read(region)
        self.locks.close()


TestRegions = Regions.TestCase
TestRegions.settings = settings(max_examples=25, stateful_step_count=20)
