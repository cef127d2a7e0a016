"""Regions that are memory files: mapped while they are read, let go of when they are not, and never believed without their entry."""

from __future__ import annotations

import os

import pytest

from monarch._base.buffers import address_of
from monarch._base.ids import ProcRef
from monarch.rdma import mapped_regions, vm
from monarch.rdma.errors import BufferGoneError
from monarch.rdma.handles import Handle
from monarch.rdma.mapped_regions import MappedRegions
from monarch.rdma.memory import FilePlace, LocalMemory, memory_of
from monarch.rdma.regions import RegionTable
from monarch.rdma.transport import Op, Piece
from monarch.rdma.vm_transport import _LEAST_MAPPED, VmTransport

MIB = 1 << 20
IDLE_S = 30.0
FAR_S = 1e12


class World:
    """A process that owns regions which are files, and reads them itself."""

    def __init__(self):
        self.now_s = 0.0
        self.timers = []
        self.mapped = MappedRegions(IDLE_S, lambda after_s, call: self.timers.append((self.now_s + after_s, call)))
        self.table = RegionTable()
        self.transport = VmTransport(lambda: self.table, self.mapped)
        self.fds = []

    def file(self, data):
        fd = os.memfd_create("test")
        os.write(fd, data)
        self.fds.append(fd)
        return fd

    def publish(self, memory, fd, offset=0):
        """A region that claims to be a file. Its own memory is another one, to tell where bytes came from."""
        local = LocalMemory(address_of(memory)[0], len(memory), memory, file=FilePlace(fd, offset))
        region = self.table.add(local)
        blobs = {"cma": self.transport.register(region)}
        return Handle(
            ProcRef("owner<1>", "unix:/x", ""), self.table.nonce, self.table.address, region.slot, region.generation,
            local.address, local.nbytes, region.flags, blobs,
        )  # fmt: skip

    def read(self, handle, *places):
        """Bytes at (offset, length) of a region, one behind the other, as one piece."""
        target = bytearray(sum(nbytes for _, nbytes in places))
        local, at, ops = memory_of(target), 0, []
        for offset, nbytes in places:
            ops.append(Op("read", local, at, handle, offset, nbytes))
            at += nbytes
        self.transport.move(Piece("read", ops), FAR_S)
        return bytes(target)

    def advance(self, seconds):
        end_s = self.now_s + seconds
        while due := sorted(timer for timer in self.timers if timer[0] <= end_s):
            self.timers.remove(due[0])
            self.now_s = due[0][0]
            due[0][1]()
        self.now_s = end_s


@pytest.fixture
def world(monkeypatch):
    made = World()
    monkeypatch.setattr(mapped_regions.time, "monotonic", lambda: made.now_s)
    yield made
    made.transport.close()
    assert not made.mapped and made.table.close()
    for fd in made.fds:
        os.close(fd)


needs_calls = pytest.mark.skipif(not vm.available(), reason="this system has no process_vm_readv")
DATA = os.urandom(MIB) * 3


@needs_calls
@pytest.mark.parametrize("offset", [0, 4096])
def test_large_reads_come_out_of_the_file_and_small_ones_from_the_owner(world, offset):
    handle = world.publish(bytearray(2 * MIB), world.file(DATA), offset)
    assert world.read(handle, (5, _LEAST_MAPPED)) == DATA[offset + 5 : offset + 5 + _LEAST_MAPPED]
    parts = (7, MIB // 2), (0, 1), (MIB, MIB)
    assert world.read(handle, *parts) == b"".join(DATA[offset + start : offset + start + nbytes] for start, nbytes in parts)
    assert world.read(handle, (5, _LEAST_MAPPED - 1)) == bytes(_LEAST_MAPPED - 1)
    assert len(world.mapped) == 1


@needs_calls
def test_a_dropped_region_is_an_error_and_is_mapped_no_longer(world):
    handle = world.publish(bytearray(2 * MIB), world.file(DATA))
    assert world.read(handle, (0, 2 * MIB)) == DATA[: 2 * MIB]
    world.table.drop(handle.generation)
    with pytest.raises(BufferGoneError):
        world.read(handle, (0, 2 * MIB))
    assert not world.mapped


@needs_calls
@pytest.mark.parametrize("place", ["another file", "no file", "no page"])
def test_what_can_not_be_mapped_is_read_from_the_owner(world, place):
    fd, offset = {"another file": (world.file(b"short"), 0), "no file": (99_999, 0), "no page": (world.file(DATA), 512)}[place]
    handle = world.publish(bytearray(b"m") * MIB, fd, offset)
    for _ in range(2):
        assert world.read(handle, (0, MIB)) == b"m" * MIB
    assert not world.mapped


@needs_calls
def test_what_nobody_reads_is_let_go_of(world):
    first, second = (world.publish(bytearray(MIB), world.file(DATA)) for _ in range(2))
    world.read(first, (0, MIB))
    world.advance(IDLE_S - 1)
    assert world.read(second, (0, MIB)) == DATA[:MIB] and len(world.mapped) == 2
    world.advance(2)
    assert len(world.mapped) == 1
    world.advance(IDLE_S)
    assert not world.mapped and not world.timers
    assert world.read(first, (0, MIB)) == DATA[:MIB] and len(world.mapped) == 1


def test_without_timers_what_is_idle_goes_when_something_else_is_mapped(world):
    mapped = MappedRegions(IDLE_S)
    places = [FilePlace(world.file(DATA), 0) for _ in range(2)]
    mapped.find((b"n", 0), os.getpid(), places[0], MIB)
    world.advance(IDLE_S)
    found = mapped.find((b"n", 1), os.getpid(), places[1], MIB)
    assert found is not None and bytes(found.pages[:9]) == DATA[:9] and len(mapped) == 1
    mapped.close()


@needs_calls
def test_an_owner_that_is_gone_is_forgotten(world):
    handle = world.publish(bytearray(MIB), world.file(DATA))
    world.read(handle, (0, MIB))
    world.transport.forget(handle.nonce)
    assert not world.mapped
