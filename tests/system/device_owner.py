"""An actor with memory of a device that is none: nothing reaches it but the copies of its device service."""

from __future__ import annotations

import ctypes
import time
from typing import Any

from monarch.actor import Actor, endpoint
from monarch.rdma import RDMABuffer
from monarch.rdma.manager import own_manager
from monarch.rdma.memory import LocalMemory, memory_of
from system.memory_owner import WAIT_S


class FakeDevice:
    """Bytes of this process."""

    def __init__(self) -> None:
        self.num_copies = 0

    def allocate(self, nbytes: int) -> LocalMemory:
        return memory_of(bytearray(nbytes))

    def to_host(self, memory: LocalMemory, offset: int, nbytes: int, host: LocalMemory, at: int) -> None:
        self.num_copies += 1
        ctypes.memmove(host.address + at, memory.address + offset, nbytes)

    def from_host(self, memory: LocalMemory, offset: int, nbytes: int, host: LocalMemory, at: int) -> None:
        self.num_copies += 1
        ctypes.memmove(memory.address + offset, host.address + at, nbytes)


class DeviceOwner(Actor):
    """Owner and reader."""

    def __init__(self) -> None:
        self.device = FakeDevice()
        own_manager().devices.device = self.device
        self.data = bytearray()
        self.buffer: Any = None

    @endpoint
    def publish(self, nbytes: int, value: int) -> RDMABuffer:
        self.data = bytearray([value]) * nbytes
        real = memory_of(self.data)
        handle = own_manager().register(LocalMemory(real.address, nbytes, real.pin, device="fake:0"))
        self.buffer = RDMABuffer._of(handle, 0, nbytes)
        return self.buffer

    @endpoint
    def content(self) -> bytes:
        return bytes(self.data)

    @endpoint
    def num_copies(self) -> int:
        return self.device.num_copies

    @endpoint
    def drop(self) -> None:
        self.buffer.drop().get(WAIT_S)

    @endpoint
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @endpoint
    def read(self, buffer: RDMABuffer) -> bytes:
        target = bytearray(buffer.size())
        buffer.read_into(target).get(WAIT_S)
        return bytes(target)
