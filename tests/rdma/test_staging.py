"""Staging: what is on a device reaches a transport as host memory, and gets there from it. The device here is the CPU in disguise."""

from __future__ import annotations

import ctypes

import pytest

from monarch._base.ids import ProcRef
from monarch.rdma import staging
from monarch.rdma.errors import TransferError
from monarch.rdma.handles import Handle
from monarch.rdma.memory import LocalMemory, memory_of
from monarch.rdma.transport import Op, Piece

torch = pytest.importorskip("torch")
HANDLE = Handle(ProcRef("proc-0", "ipc://x", "ipc://y"), bytes(16), 0, 0, 1, 0, 100, 0, {})


class Remote:
    """A transport to 100 bytes of this process; it touches no device."""

    takes_devices = False

    def __init__(self):
        self.data, self.error, self.num_ops = bytearray(range(100)), None, 0

    def move(self, piece, deadline_s):
        if self.error is not None:
            raise self.error
        for op in piece.ops:
            assert op.local.device == "cpu"
            self.num_ops += 1
            near = op.local.address + op.local_offset
            if piece.kind == "read":
                ctypes.memmove(near, bytes(self.data[op.offset : op.offset + op.nbytes]), op.nbytes)
            else:
                self.data[op.offset : op.offset + op.nbytes] = ctypes.string_at(near, op.nbytes)


@pytest.fixture
def remote():
    return Remote()


def device_tensor(nbytes, start=0):
    """A tensor, and its memory as if it were on a GPU."""
    tensor = torch.zeros(start + nbytes, dtype=torch.uint8)[start:]
    real = memory_of(tensor)
    return tensor, LocalMemory(real.address, real.nbytes, tensor.untyped_storage(), device="cuda:0")


@pytest.mark.parametrize("start", [0, 7])
def test_a_device_reads_and_writes_through_host_memory(remote, start):
    tensor, memory = device_tensor(20, start)
    staging.move(remote, Piece("read", [Op("read", memory, 4, HANDLE, 10, 5), Op("read", memory, 10, HANDLE, 50, 2)]), 0.0)
    assert tensor.tolist() == [0] * 4 + [10, 11, 12, 13, 14] + [0, 50, 51] + [0] * 8
    tensor.fill_(9)
    staging.move(remote, Piece("write", [Op("write", memory, 0, HANDLE, 30, 3)]), 0.0)
    assert remote.data[29:34] == bytes([29, 9, 9, 9, 33])


def test_a_piece_may_have_both_kinds_of_memory(remote):
    tensor, memory = device_tensor(4)
    target = bytearray(4)
    staging.move(remote, Piece("read", [Op("read", memory, 0, HANDLE, 1, 4), Op("read", memory_of(target), 1, HANDLE, 60, 3)]), 0.0)
    assert tensor.tolist() == [1, 2, 3, 4] and target == bytes([0, 60, 61, 62])


def test_host_memory_goes_straight(remote):
    target = bytearray(4)
    staging.move(remote, Piece("read", [Op("read", memory_of(target), 0, HANDLE, 1, 4)]), 0.0)
    assert target == bytes([1, 2, 3, 4]) and remote.num_ops == 1


def test_what_failed_changes_nothing_on_the_device(remote):
    tensor, memory = device_tensor(4)
    remote.error = TransferError("broken")
    with pytest.raises(TransferError):
        staging.move(remote, Piece("read", [Op("read", memory, 0, HANDLE, 1, 4)]), 0.0)
    assert tensor.tolist() == [0] * 4
