"""An actor that publishes memory, and reads and writes that of others, for tests of one-sided memory."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import time
from typing import Any

from monarch.actor import Actor, endpoint
from monarch.rdma import RDMABuffer, RDMAError

WAIT_S = 20.0
MIB = 1 << 20


class Owner(Actor):
    """Publishes memory, and is busy in every way there is."""

    def __init__(self) -> None:
        self.published: list[RDMABuffer] = []
        self.memory: list[bytearray] = []

    @endpoint
    def publish(self, nbytes: int, value: int = 1, number: int = 1) -> list[RDMABuffer]:
        self.memory = [bytearray([value]) * nbytes for _ in range(number)]
        self.published = [RDMABuffer(memory) for memory in self.memory]
        return self.published

    @endpoint
    def publish_and_forget(self, text: bytes) -> RDMABuffer:
        buffer = RDMABuffer(memoryview(bytearray(text)))
        gc.collect()
        return buffer

    @endpoint
    def content(self, number: int = 0) -> bytes:
        return bytes(self.memory[number])

    @endpoint
    def fill(self, value: int) -> None:
        for memory in self.memory:
            memory[:] = bytes([value]) * len(memory)

    @endpoint
    def drop(self, number: int = 0) -> None:
        self.published[number].drop().get(WAIT_S)

    @endpoint
    def spin(self, seconds: float) -> float:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass
        return time.monotonic()

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def huge_kib(self) -> int:
        with open("/proc/self/smaps_rollup", encoding="ascii") as rollup:
            return next(int(line.split()[1]) for line in rollup if line.startswith("AnonHugePages:"))

    @endpoint
    def fds(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    @endpoint
    def read(self, buffer: RDMABuffer) -> bytes:
        target = bytearray(buffer.size())
        buffer.read_into(target).get(WAIT_S)
        return bytes(target)

    @endpoint
    def write(self, buffer: RDMABuffer, text: bytes) -> None:
        buffer.write_from(memoryview(text)).get(WAIT_S)

    @endpoint
    def write_for(self, buffer: RDMABuffer, value: int, seconds: float) -> int:
        source = bytearray([value]) * buffer.size()
        end, rounds = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            buffer.write_from(source).get(WAIT_S)
            rounds += 1
        return rounds

    @endpoint
    def drop_of(self, buffer: RDMABuffer) -> None:
        buffer.drop().get(WAIT_S)

    @endpoint
    def fork_and_publish(self) -> tuple[int, bytes]:
        """A child that goes on with the memory and publishes its own; its process id and a handle."""
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(theirs, pickle.dumps(RDMABuffer(bytearray(b"child"))))
            os.close(theirs)
            signal.pause()
        os.close(theirs)
        with os.fdopen(ours, "rb") as pipe:
            return pid, pipe.read()

    @endpoint
    def reap(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def publish(owner: Any, nbytes: int, value: int = 1) -> RDMABuffer:
    """A buffer of `nbytes` of `value` on `owner`."""
    return owner.publish.call_one(nbytes, value).get(WAIT_S)[0]  # type: ignore[no-any-return]


def read(buffer: RDMABuffer, timeout: int = 10) -> bytes:
    """All of a buffer."""
    target = bytearray(buffer.size())
    buffer.read_into(target, timeout=timeout).get(2 * WAIT_S)
    return bytes(target)


def check_reads_during_drops(owner: Any, nbytes: int, rounds: int) -> None:
    """What is read while the owner drops its memory is either all of one value, or an error."""
    outcomes = set()
    for value in range(1, rounds + 1):
        buffer = publish(owner, nbytes, value)
        outcomes.add(set(read(buffer)) == {value})
        dropping = owner.drop.call_one()
        while True:
            try:
                outcomes.add(set(read(buffer)) == {value})
            except RDMAError as exc:
                assert "not found" in str(exc)
                break
        dropping.get(WAIT_S)
    assert outcomes == {True}
