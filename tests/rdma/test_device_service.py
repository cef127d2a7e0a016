"""The device service: host memory that stands for memory of a device, and what becomes of it. The device is the host in disguise."""

from __future__ import annotations

import ctypes
import queue

import pytest

from monarch._base.ids import ProcRef
from monarch._wire.memory_messages import Staged, StageMemory, UnstageMemory
from monarch.rdma.device_service import MOST_PIECES, PIECE_BYTES, CudaDevice, DeviceService, Pool
from monarch.rdma.handles import Handle, decode_handle
from monarch.rdma.memory import LocalMemory, memory_of
from monarch.rdma.regions import RegionTable

WAIT_S = 5.0


class FakeDevice:
    """Memory of this process; `during` runs in the middle of each copy."""

    def __init__(self):
        self.during, self.num_allocated = lambda: None, 0

    def allocate(self, nbytes):
        self.num_allocated += 1
        return memory_of(bytearray(nbytes))

    def to_host(self, memory, offset, nbytes, host, at):
        self.during()
        ctypes.memmove(host.address + at, memory.address + offset, nbytes)

    def from_host(self, memory, offset, nbytes, host, at):
        self.during()
        ctypes.memmove(memory.address + offset, host.address + at, nbytes)


class World:
    """A process whose timers the test fires."""

    def __init__(self):
        self.proc = self.loop = self
        self.timers = []

    def call_soon(self, callback, *arguments):
        callback(*arguments)

    def call_later(self, delay_s, callback):
        self.timers.append((delay_s, callback))


class Service:
    def __init__(self):
        self.world, self.table, self.device = World(), RegionTable(), FakeDevice()
        self.service = DeviceService(self.world, lambda: self.table, self.publish, self.device)
        self.answers = queue.Queue()

    def publish(self, memory):
        region = self.table.add(memory)
        ref = ProcRef("proc-0", "ipc://x", "ipc://y")
        return Handle(
            ref,
            self.table.nonce,
            0,
            region.slot,
            region.generation,
            memory.address,
            memory.nbytes,
            0,
            {"cma": region.memory.device.encode()},
        )

    def on_device(self, data):
        real = memory_of(data)
        return self.table.add(LocalMemory(real.address, real.nbytes, data, device="fake:0"))

    def start(self, kind, *spans, patience_s=10.0):
        self.service.on_message(StageMemory(self.table.nonce, kind, spans, patience_s), self.answers.put)

    def end(self, generation, *spans):
        self.service.on_message(UnstageMemory(self.table.nonce, generation, spans), self.answers.put)
        return self.answers.get(timeout=WAIT_S)

    def stage(self, kind, *spans):
        self.start(kind, *spans)
        return self.answers.get(timeout=WAIT_S)


@pytest.fixture
def staging():
    made = Service()
    yield made
    made.service.close()
    assert made.table.close()


def host_bytes(handle, nbytes):
    return ctypes.string_at(handle.address, nbytes)


def test_bytes_of_a_device_are_read_from_host_memory_that_is_used_again(staging):
    region = staging.on_device(bytearray(b"0123456789"))
    for _ in range(3):
        handle = decode_handle(staging.stage("read", (region.generation, 2, 3), (region.generation, 8, 2)).handle)
        assert host_bytes(handle, 5) == b"23489" and staging.table.is_live(handle.generation)
        assert staging.end(handle.generation) == Staged() and not staging.table.is_live(handle.generation)
    assert staging.device.num_allocated == 1


def test_bytes_are_written_to_a_device_at_the_end(staging):
    data = bytearray(b"0123456789")
    region = staging.on_device(data)
    handle = decode_handle(staging.stage("write", (region.generation, 2, 3), (region.generation, 8, 2)).handle)
    ctypes.memmove(handle.address, b"abcde", 5)
    assert data == b"0123456789"
    assert staging.end(handle.generation, (region.generation, 2, 3), (region.generation, 8, 2)) == Staged()
    assert data == b"01abc567de"


@pytest.mark.parametrize("kind", ["read", "write"])
def test_what_is_dropped_before_or_during_a_copy_is_gone(staging, kind):
    region = staging.on_device(bytearray(10))
    span = region.generation, 0, 10
    answer = staging.stage("write", span)
    staging.device.during = lambda: staging.table.drop(region.generation)
    if kind == "write":
        assert staging.end(decode_handle(answer.handle).generation, span).gone == region.generation
    else:
        assert staging.stage("read", span).gone == region.generation
    assert staging.stage("read", span).gone == region.generation
    assert staging.table.num_lingering == 0


@pytest.mark.parametrize("span", [(0, 11), (5, 6), (-1, 2), (0, -1)])
def test_bytes_that_do_not_exist_are_refused(staging, span):
    region = staging.on_device(bytearray(10))
    assert "do not exist" in staging.stage("read", (region.generation, *span)).failure
    assert len(staging.table) == 1


def test_an_error_of_the_device_is_told_and_gives_the_piece_back(staging):
    region = staging.on_device(bytearray(10))

    def fail():
        raise RuntimeError("no such kernel")

    staging.device.during = fail
    for _ in range(MOST_PIECES + 1):
        assert staging.stage("read", (region.generation, 0, 10)).failure == "no such kernel"
    assert staging.device.num_allocated == 1


def test_who_finds_no_piece_waits_for_one_and_who_is_too_late_gets_none(staging):
    region = staging.on_device(bytearray(10))
    taken = [decode_handle(staging.stage("read", (region.generation, 0, 1)).handle).generation for _ in range(MOST_PIECES)]
    staging.start("read", (region.generation, 0, 1))
    staging.start("read", (region.generation, 0, 1), patience_s=0.0)
    answers = [staging.end(taken[0])] + [staging.answers.get(timeout=WAIT_S) for _ in range(1)]
    assert sum(bool(answer.handle) for answer in answers) == 1 and staging.answers.empty()
    last = next(decode_handle(answer.handle).generation for answer in answers if answer.handle)
    answers = [staging.end(last), staging.answers.get(timeout=WAIT_S)]
    assert {answer.failure for answer in answers} == {"", "its time is over"}
    assert staging.device.num_allocated == MOST_PIECES


def test_a_piece_that_is_not_given_back_is_dropped_and_replaced(staging):
    region = staging.on_device(bytearray(10))
    generations = [decode_handle(staging.stage("read", (region.generation, 0, 1)).handle).generation for _ in range(MOST_PIECES)]
    delay_s, reclaim = staging.world.timers[0]
    assert 10.0 < delay_s < 30.0
    reclaim()
    assert not staging.table.is_live(generations[0])
    assert staging.end(generations[0]).failure == "its time is over"
    assert staging.stage("read", (region.generation, 0, 1)).handle and staging.device.num_allocated == MOST_PIECES + 1


def test_whether_anybody_answers_costs_nothing(staging):
    assert staging.stage("read") == Staged() and staging.device.num_allocated == 0


def test_a_pool_without_room_counts_on_what_it_has():
    made = []

    def allocate(nbytes):
        if made:
            raise MemoryError("no room")
        made.append(nbytes)
        return memory_of(bytearray(1))

    pool, got = Pool(allocate), []
    pool.take(got.append)
    for _ in range(MOST_PIECES + 1):
        with pytest.raises(MemoryError):
            pool.take(got.append)
    pool.put_back(got[0])
    pool.take(got.append)
    assert got[1] is got[0] and made == [PIECE_BYTES]


def test_torch_copies_between_a_device_and_the_host():
    torch = pytest.importorskip("torch")
    tensor = torch.arange(20, dtype=torch.uint8)[5:]
    real = memory_of(tensor)
    memory, device = LocalMemory(real.address, real.nbytes, tensor.untyped_storage(), device="cuda:0"), CudaDevice()
    host = device.allocate(10)
    device.to_host(memory, 1, 3, host, 2)
    assert host.read_at(0, 10)[2:5] == bytes([6, 7, 8])
    host.write_at(2, b"abc")
    device.from_host(memory, 0, 3, host, 2)
    assert tensor.tolist()[:4] == [97, 98, 99, 8]
