"""Memory of every kind, in owners that come to harm: scenarios of one-sided memory from real use."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import struct
import threading
import time
import warnings

import pytest

from monarch.actor import Actor, ActorError, endpoint, this_host
from monarch.config import configured
from monarch.rdma import RDMABuffer, RDMAError
from monarch.rdma.manager import own_manager
from system.conftest import requires_torch
from system.memory_owner import WAIT_S, Owner, publish, read

pytestmark = pytest.mark.filterwarnings("ignore::monarch.rdma.RDMATcpFallbackWarning")
pytest_plugins = ["system.recorder"]
NUM_FLOATS = 4096


def pattern(torch, number=NUM_FLOATS):
    return torch.arange(number, dtype=torch.float32)


def mapped(torch, path, access):
    """The pattern in a file that is mapped, as loaders of checkpoints do."""
    with open(path, "wb") as file:
        file.write(pattern(torch).numpy().tobytes())
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=access)


class Librarian(Actor):
    """Owns tensors whose memory comes from everywhere."""

    def __init__(self) -> None:
        self.kept = {}

    @endpoint
    def publish(self, kind: str, path: str) -> RDMABuffer:
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch wants no tensors over what can't be written
            tensor = {
                "fresh": lambda: pattern(torch),
                "slice": lambda: torch.cat([torch.zeros(100), pattern(torch), torch.zeros(5)])[100 : 100 + NUM_FLOATS],
                "read-only map": lambda: torch.frombuffer(mapped(torch, path, mmap.ACCESS_READ), dtype=torch.float32),
                "private map": lambda: torch.frombuffer(mapped(torch, path, mmap.ACCESS_COPY), dtype=torch.float32),
                "shared memory": lambda: pattern(torch).share_memory_(),
                "half": lambda: pattern(torch).view(torch.float16),
                "transposed": lambda: pattern(torch).view(64, 64).t(),
                "strided": lambda: pattern(torch, 2 * NUM_FLOATS)[::2],
                "empty": lambda: torch.zeros(0),
                "parameter": lambda: torch.nn.Parameter(pattern(torch)),
            }[kind]()
        self.kept[kind] = tensor
        return RDMABuffer(tensor)

    @endpoint
    def total(self, kind: str) -> float:
        return float(self.kept[kind].view(-1).float().sum())


@pytest.fixture(scope="module")
def librarian():
    return this_host().spawn_procs({"librarians": 1}).spawn("librarian", Librarian)


@requires_torch
@pytest.mark.parametrize("kind", ["fresh", "slice", "private map", "shared memory", "half", "parameter"])
def test_tensors_of_every_memory_are_read_and_written(librarian, tmp_path, kind):
    import torch

    buffer = librarian.publish.call_one(kind, str(tmp_path / "file")).get(WAIT_S)
    target = torch.zeros(NUM_FLOATS)
    buffer.read_into(target).get(WAIT_S)
    assert torch.equal(target, pattern(torch))
    buffer.write_from(torch.zeros(NUM_FLOATS)).get(WAIT_S)
    assert librarian.total.call_one(kind).get(WAIT_S) == 0
    buffer.drop().get(WAIT_S)


@requires_torch
@pytest.mark.parametrize("transport", ["cma", "tcp"])
def test_what_the_owner_can_not_write_nobody_writes(librarian, tmp_path, transport):
    buffer = librarian.publish.call_one("read-only map", str(tmp_path / "file")).get(WAIT_S)
    with configured(rdma_transports=transport):
        peer = this_host().spawn_procs({"peers": 1}).spawn("peer", Owner)
    content = peer.read.call_one(buffer).get(WAIT_S)
    assert len(content) == 4 * NUM_FLOATS and content[-4:] == struct.pack("f", NUM_FLOATS - 1)
    with pytest.raises(ActorError, match=r"RDMAError: (.|\n)*writ"):
        peer.write.call_one(buffer, b"other").get(WAIT_S)
    assert peer.read.call_one(buffer).get(WAIT_S) == content
    buffer.drop().get(WAIT_S)


@requires_torch
@pytest.mark.parametrize(("kind", "why"), [("transposed", "contiguous"), ("strided", "contiguous"), ("empty", "size 0")])
def test_tensors_that_are_no_run_of_bytes_are_refused(librarian, tmp_path, kind, why):
    with pytest.raises(ActorError, match=rf"ValueError: (.|\n)*{why}"):
        librarian.publish.call_one(kind, str(tmp_path / "file")).get(WAIT_S)


def test_an_owner_that_follows_a_dead_one_serves_as_if_nothing_had_been(faults):
    dead, alive = (this_host().spawn_procs({"owners": 1}).spawn("owner", Owner) for _ in range(2))
    lost = publish(dead, 4096, 1)
    assert read(lost) == b"\1" * 4096
    os.kill(dead.pid.call_one().get(WAIT_S), signal.SIGKILL)
    target, began = bytearray(4096), time.monotonic()
    for use in (lambda: lost.read_into(target, timeout=5), lambda: lost.write_from(bytearray(4096), timeout=5)):
        with pytest.raises(RDMAError, match=rf"gone: (.|\n)*{lost._handle.ref.uid}"):
            while True:  # until the kernel has ended it
                use().get(WAIT_S)
    assert time.monotonic() - began < 8
    for _ in range(3):
        assert read(publish(alive, 4096, 2)) == b"\2" * 4096


def test_buffers_in_cycles_that_collectors_end_anywhere_leave_nothing():
    """Destructors run in the middle of anything, also of the making and dropping of other buffers."""
    shared, threads, failures = bytearray(4096), 4, []

    class Cycle:
        def __init__(self, buffer: RDMABuffer) -> None:
            self.buffer, self.me = buffer, self

        def __del__(self) -> None:
            self.buffer.drop()

    def work(number: int) -> None:
        try:
            for turn in range(2000):
                Cycle(RDMABuffer(shared if turn % 4 == 0 else bytearray(1024)))
        except BaseException as exc:
            failures.append((number, exc))

    before, thresholds = len(own_manager().table()), gc.get_threshold()
    gc.set_threshold(50)
    try:
        workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert not failures and not any(worker.is_alive() for worker in workers)
    assert len(own_manager().table()) == before and own_manager().table().num_lingering == 0
