"""GPU memory of one machine: who maps what, when it is unmapped, what protects it. CUDA is a fake with GPUs of this process's memory."""

from __future__ import annotations

import ctypes
import os
import queue
import time

import pytest

from monarch._base.ids import ProcRef
from monarch._runtime.future import Future
from monarch._wire.memory_messages import ShareStorage, Staged
from monarch.rdma import vm
from monarch.rdma.cuda_memory import TorchCuda
from monarch.rdma.errors import BufferGoneError, OwnerGoneError, TransferError, UnreachableError
from monarch.rdma.handles import Handle
from monarch.rdma.ipc_transport import IpcTransport
from monarch.rdma.memory import LocalMemory, memory_of
from monarch.rdma.regions import RegionTable
from monarch.rdma.transport import Op, Piece

pytestmark = pytest.mark.skipif(not vm.available(), reason="this system has no process_vm_readv")
WAIT_S = 5.0
OWNER = ProcRef("proc-0", "ipc://x", "ipc://y")


class Storage:
    """Of a GPU."""

    def __init__(self, nbytes):
        self.data = bytearray(range(nbytes))
        self.start = memory_of(self.data).address


class FakeCuda:
    """Sees some GPUs; `during` runs in the middle of each copy."""

    def __init__(self, uuids=(b"A" * 16, b"B" * 16)):
        self.uuids, self.shared, self.num_maps, self.error = list(uuids), {}, 0, None
        self.during = lambda: None

    def uuid(self, device):
        return self.uuids[int(device[5:])]

    def find(self, uuid):
        return f"cuda:{self.uuids.index(uuid)}" if uuid in self.uuids else ""

    def storage_start(self, memory):
        return memory.pin.start

    def share(self, memory):
        if self.error is not None:
            raise self.error
        self.shared[id(memory.pin)] = memory.pin
        return str(id(memory.pin)).encode()

    def map(self, shared, device):
        if self.error is not None:
            raise self.error
        self.num_maps += 1
        return self.other.shared[int(shared)]

    def copy(self, kind, storage, offset, local, local_offset, nbytes):
        self.during()
        if self.error is not None:
            raise self.error
        there, here = storage.start + offset, local.address + local_offset
        ctypes.memmove(*((here, there) if kind == "read" else (there, here)), nbytes)


class World:
    """The process of a reader, whose messages reach the owner at once."""

    def __init__(self):
        self.proc = self.loop = self
        self.owner, self.num_asked = None, 0

    def call_soon(self, callback, *arguments):
        callback(*arguments)

    def request(self, ref, message):
        assert isinstance(message, ShareStorage)
        self.num_asked += 1
        future = Future._new()
        answers = queue.Queue()
        self.owner.on_message(message, answers.put)
        answer = answers.get(timeout=WAIT_S)
        if isinstance(answer, Staged):
            future._complete(answer)
        return future


class Pair:
    """An owner and a reader."""

    def __init__(self):
        self.table, self.own_table, self.world = RegionTable(), RegionTable(), World()
        self.owner_cuda, self.cuda = FakeCuda(), FakeCuda(uuids=[b"B" * 16, b"A" * 16])
        self.cuda.other = self.owner_cuda
        self.owner = IpcTransport(self.world, lambda: self.table, self.owner_cuda)
        self.reader = IpcTransport(self.world, lambda: self.own_table, self.cuda)
        self.world.owner = self.owner

    def publish(self, storage, start=0, nbytes=100, table=None):
        memory = LocalMemory(storage.start + start, nbytes, storage, device="cuda:0")
        region = self.table.add(memory)
        blob = self.owner.register(region)
        handle = Handle(
            OWNER, self.table.nonce, self.table.address, region.slot, region.generation, memory.address, nbytes, region.flags, {"ipc": blob}
        )
        return region, handle

    def drop(self, region):
        self.table.drop(region.generation)
        self.owner.deregister(region)

    def move(self, kind, handle, local, offset=0):
        memory = memory_of(local)
        self.reader.move(Piece(kind, [Op(kind, memory, 0, handle, offset, memory.nbytes)]), time.monotonic() + WAIT_S)

    def connect(self, handle):
        self.reader.connect(handle, time.monotonic() + WAIT_S)


@pytest.fixture
def pair():
    made = Pair()
    yield made
    made.reader.close()
    made.owner.close()
    assert made.table.close() and made.own_table.close()


def test_bytes_are_read_and_written_where_the_region_is_in_its_storage(pair):
    storage = Storage(200)
    _, handle = pair.publish(storage, 50)
    pair.connect(handle)
    target = bytearray(10)
    pair.move("read", handle, target, offset=5)
    assert target == bytes(range(55, 65))
    pair.move("write", handle, bytearray(b"xyz"), offset=1)
    assert storage.data[50:55] == b"\x32xyz\x36"


def test_a_storage_is_mapped_once_for_all_its_regions(pair):
    storage, other = Storage(200), Storage(200)
    handles = [pair.publish(storage, start)[1] for start in (0, 100)] + [pair.publish(other)[1]]
    for handle in handles * 2:
        pair.connect(handle)
        pair.move("read", handle, bytearray(10))
    assert pair.cuda.num_maps == pair.world.num_asked == 2


def test_memory_of_the_host_and_of_other_devices_is_not_for_it(pair):
    host = pair.table.add(memory_of(bytearray(10)))
    assert pair.owner.register(host) is None
    pair.owner_cuda.uuid = lambda device: (_ for _ in ()).throw(RuntimeError("no identities"))
    assert pair.publish(Storage(200))[1].blobs["ipc"] is None


@pytest.mark.parametrize("reason", ["no such gpu", "another machine", "own memory", "broken", "not shared", "not mapped"])
def test_what_can_not_be_mapped_is_left_to_another_transport(pair, reason):
    _, handle = pair.publish(Storage(200))
    blob = handle.blobs["ipc"]
    if reason == "no such gpu":
        pair.cuda.uuids = []
    elif reason == "another machine":
        handle.blobs["ipc"] = os.urandom(16) + blob[16:]
    elif reason == "own memory":
        pair.own_table, kept = pair.table, pair.own_table
    elif reason == "broken":
        handle.blobs["ipc"] = blob[:20]
    elif reason == "not shared":
        pair.owner_cuda.error = RuntimeError("memory of another allocator")
    else:
        pair.cuda.error = RuntimeError("invalid handle")
    with pytest.raises(UnreachableError):
        pair.connect(handle)
    if reason == "own memory":
        pair.own_table = kept
    assert pair.table.num_lingering == 0


def test_dropped_memory_is_an_error_and_its_mapping_ends(pair):
    storage = Storage(200)
    region, handle = pair.publish(storage)
    pair.connect(handle)
    pair.drop(region)
    for kind in ("read", "write"):
        with pytest.raises(BufferGoneError):
            pair.move(kind, handle, bytearray(10))
    assert pair.table.num_lingering == 0 and not pair.reader._mapped
    _, again = pair.publish(storage)
    pair.connect(again)
    assert pair.cuda.num_maps == 2  # it has a number of its own by now


@pytest.mark.parametrize("kind", ["read", "write"])
def test_what_is_dropped_during_a_copy_stays_until_its_end_and_is_an_error(pair, kind):
    region, handle = pair.publish(Storage(200))
    pair.connect(handle)
    seen = []

    def during():
        pair.drop(region)
        seen.append(pair.table.num_lingering)

    pair.cuda.during = during
    with pytest.raises(BufferGoneError):
        pair.move(kind, handle, bytearray(10))
    pair.table.drop(0)
    assert seen == [1] and pair.table.num_lingering == 0 and not pair.reader._mapped


def test_an_error_of_cuda_unmaps_and_fails(pair):
    _, handle = pair.publish(Storage(200))
    pair.connect(handle)
    pair.cuda.error = RuntimeError("an illegal memory access")
    with pytest.raises(TransferError, match="CUDA can't copy: an illegal"):
        pair.move("read", handle, bytearray(10))
    assert not pair.reader._mapped


def test_an_owner_that_is_gone_is_unmapped(pair):
    _, handle = pair.publish(Storage(200))
    pair.connect(handle)
    pair.reader.forget(handle.nonce)
    assert not pair.reader._mapped
    pair.table._head[8:24] = bytes(16)
    with pytest.raises(OwnerGoneError):
        pair.connect(handle)


def test_without_cuda_there_are_no_gpus():
    assert TorchCuda().find(b"A" * 16) == ""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AssertionError)):
            TorchCuda().uuid("cuda:0")
