"""What the transport "nixl" asks NIXL for. That it moves bytes is the matter of tests/system/test_nixl.py."""

from __future__ import annotations

import ctypes
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._base.ids import ProcRef
from monarch._runtime.future import Future
from monarch._wire.memory_messages import MemoryKeys
from monarch.config import configured
from monarch.rdma.errors import BufferGoneError, OwnerGoneError, TransferError, UnreachableError
from monarch.rdma.handles import Handle
from monarch.rdma.memory import memory_of
from monarch.rdma.nixl_agent import BrokenError
from monarch.rdma.nixl_transport import _MOST_OPS, NixlTransport, _Moves
from monarch.rdma.regions import RegionTable
from monarch.rdma.transport import Op, Piece

OWNER = ProcRef("proc-0", "ipc://x", "ipc://y")
places = st.tuples(st.integers(0, 40), st.integers(0, 1), st.integers(0, 40), st.integers(0, 1), st.integers(1, 8))


@given(st.lists(places, max_size=20))
def test_neighbours_become_one_and_no_byte_is_lost(pairs):
    moves = _Moves()
    for pair in pairs:
        moves.add(*pair)
    wanted = [(near + at, nd, far + at, fd) for near, nd, far, fd, nbytes in pairs for at in range(nbytes)]
    assert [size for _, size, _ in moves.near] == [size for _, size, _ in moves.far]
    found = [
        (near + at, nd, far + at, fd)
        for (near, nbytes, nd), (far, _, fd) in zip(moves.near, moves.far, strict=True)
        for at in range(nbytes)
    ]
    assert found == wanted


def test_a_row_of_places_is_one():
    moves = _Moves()
    for number in range(100):
        moves.add(1000 + 64 * number, 0, 5000 + 64 * number, 0, 64)
    assert moves.near == [(1000, 6400, 0)] and moves.far == [(5000, 6400, 0)]


class Agent:
    """Moves bytes within this process, and notes how often it was asked."""

    name = "own"

    def __init__(self):
        self.registered, self.loaded, self.transfers, self.error = [], [], [], None

    def register(self, address, nbytes, device=-1):
        self.registered.append((address, nbytes, device))
        return self.registered[-1]

    def deregister(self, part):
        self.registered.remove(part)

    def load(self, metadata):
        self.loaded.append(metadata)
        return metadata.decode()

    def begin(self, kind, local, is_local_device, remote, is_remote_device, name):
        if self.error is not None:
            raise self.error
        self.transfers.append((kind, len(local), name))
        for (near, nbytes, _), (far, _, _) in zip(local, remote, strict=True):
            ctypes.memmove(*((near, far) if kind == "read" else (far, near)), nbytes)
        return 0


class World:
    """An owner's regions, and the loop and driver of a reader, in one thread."""

    def __init__(self):
        self.proc = self.loop = self
        self.table, self.own, self.agent, self.answers, self.num_asked = RegionTable(), RegionTable(), Agent(), [], 0
        self.transport = NixlTransport(self, lambda: self.own)
        self.transport._driver = self.driver = _Driver(self.agent)
        self.on_ask = lambda message: MemoryKeys((b"owner",), 1)

    def call_soon(self, callback, *arguments):
        callback(*arguments)

    def request(self, ref, message):
        self.num_asked += 1
        future = Future._new()
        answer = self.on_ask(message)
        future._fail(answer) if isinstance(answer, Exception) else future._complete(answer)
        return future

    def publish(self, data):
        memory = memory_of(data)
        region = self.table.add(memory)
        with configured(rdma_transports="nixl"):
            blob = self.transport.register(region)
        return Handle(
            OWNER, self.table.nonce, 0, region.slot, region.generation, memory.address, memory.nbytes, region.flags, {"nixl": blob or b""}
        )

    def move(self, kind, *pairs):
        ops = [Op(kind, memory_of(local), 0, handle, 0, len(local)) for handle, local in pairs]
        self.transport.move(Piece(kind, ops), time.monotonic() + 5)


class _Driver:
    name = "own"

    def __init__(self, agent):
        self.agent, self.soon = agent, []

    def do(self, steps, deadline_s, on_end=None):
        job = _Job()
        try:
            for _ in steps(self.agent):
                pass
        except TransferError as exc:
            job.error = exc
        if on_end is not None:
            on_end()
        return job

    def do_soon(self, task):
        self.soon.append(task)


class _Job:
    error = None

    def wait(self):
        if self.error is not None:
            raise self.error


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setattr("monarch.rdma.nixl_library.package", lambda: "nixl_cu12")
    made = World()
    yield made
    for table in (made.table, made.own):
        assert table.close()


def test_many_small_reads_are_two_transfers_and_one_question(world):
    data = [bytearray([number % 256]) * 100 for number in range(_MOST_OPS)]
    handles, targets = [world.publish(part) for part in data], [bytearray(100) for _ in data]
    for _ in range(2):
        world.move("read", *zip(handles, targets, strict=True))
    assert targets == data and world.num_asked == 1 and world.agent.loaded == [b"owner"]
    assert [kind for kind, _, _ in world.agent.transfers] == ["read"] * 4
    assert world.agent.transfers[1][1] == 1  # the entries are side by side
    assert len(world.agent.registered) == 1


def test_large_memory_is_registered_where_it_is_for_as_long_as_it_lives(world):
    handle, target = world.publish(bytearray(b"\7") * 100_000), bytearray(100_000)
    view = memoryview(target)
    for _ in range(2):
        world.move("read", (handle, view))
    assert set(target) == {7} and len(world.agent.registered) == 2 and not world.driver.soon
    del view
    for task in world.driver.soon:
        task(world.agent)
    assert len(world.agent.registered) == 1


def test_a_dropped_region_is_not_written_and_what_was_read_of_it_is_an_error(world):
    data = bytearray(b"before")
    handle = world.publish(data)
    world.move("write", (handle, bytearray(b"during")))
    world.table.drop(handle.generation)
    target = bytearray(6)
    for kind, local in (("write", bytearray(b"behind")), ("read", target)):
        with pytest.raises(BufferGoneError):
            world.move(kind, (handle, local))
    assert data == b"during" and target == bytes(6)


def test_a_failed_transfer_is_made_once_more_on_a_new_connection(world):
    handle, target = world.publish(bytearray(b"data")), bytearray(4)
    world.move("read", (handle, target))
    world.agent.error = BrokenError("broken")

    def asked_again(message):
        assert message.num_chunks == -1
        world.agent.error = None
        return MemoryKeys((b"new",), 1)

    world.on_ask = asked_again
    world.move("write", (handle, bytearray(b"DATA")))
    assert world.num_asked == 2 and world.agent.transfers[-1] == ("write", 1, "new") and len(world.driver.soon) == 1


@pytest.mark.parametrize(
    "answer, error",
    [
        (MemoryKeys(refusal="no room"), UnreachableError),
        (MemoryKeys(gone=(1,)), BufferGoneError),
        (RuntimeError("killed"), OwnerGoneError),
    ],
)
def test_an_owner_without_keys_says_why(world, answer, error):
    handle = world.publish(bytearray(b"data"))
    world.on_ask = lambda message: answer
    with pytest.raises(error):
        world.move("read", (handle, bytearray(4)))
    assert not world.agent.transfers


def test_what_the_owner_can_not_register_is_named_and_the_rest_is_held(world):
    first, second = (world.publish(bytearray(b"data")) for _ in range(2))
    world.on_ask = lambda message: MemoryKeys((b"owner",), 1, refused=((second.generation, "too much"),))
    target = bytearray(4)
    with pytest.raises(UnreachableError, match="the owner: too much") as caught:
        world.move("read", (first, target), (second, bytearray(4)))
    assert caught.value.generations == {second.generation}
    world.move("read", (first, target))
    assert target == b"data" and world.num_asked == 1


def test_memory_of_this_process_that_can_not_be_registered_is_no_failure_of_the_transfer(world):
    handle = world.publish(bytearray(100_000))
    kept = bytearray(100_000)
    world.move("read", (handle, kept))
    register = world.agent.register

    def refuse(*place):
        raise TransferError("registerMem of NIXL failed")

    world.agent.register = refuse
    with pytest.raises(UnreachableError, match="memory of this process: registerMem") as caught:
        world.move("read", (handle, bytearray(100_000)))
    assert caught.value.generations == {handle.generation}
    world.transport._slabs.clear()
    with pytest.raises(UnreachableError) as caught:
        world.move("read", (handle, bytearray(10)))
    assert not caught.value.generations
    world.agent.register = register


def test_without_a_device_and_unasked_it_leads_nowhere(world):
    handle = world.publish(bytearray(b"data"))
    with pytest.raises(UnreachableError, match="no RDMA device"):
        world.transport.connect(handle, time.monotonic() + 5)
    assert world.transport.register(world.table.add(memory_of(bytearray(1)))) is None
    assert not world.transport._peers
