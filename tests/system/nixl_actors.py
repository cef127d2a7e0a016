"""An actor that reaches memory by NIXL alone, for `test_nixl.py`; the client only tells it what to do."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from monarch.actor import endpoint
from monarch.config import configure
from monarch.rdma import RDMAAction, RDMABuffer, RDMAError
from monarch.rdma.manager import own_manager
from system.memory_owner import WAIT_S, Owner

KIB = 1 << 10


class Peer(Owner):
    """Owner and reader."""

    def __init__(self, ucx_transports: str) -> None:
        super().__init__()
        configure(rdma_transports="nixl", rdma_nixl_start_limit="20s")
        if ucx_transports:
            os.environ["UCX_TLS"] = ucx_transports
            os.environ["UCX_NET_DEVICES"] = "lo"  # others come and go, with the tests of several hosts

    @endpoint
    def round_trip(self, buffer: RDMABuffer, nbytes: int) -> bool:
        """Write, read back, whole and in part; into longer memory, and from shorter one."""
        data = os.urandom(nbytes)
        buffer.write_from(memoryview(data)).get(WAIT_S)
        target = bytearray(nbytes + 8)
        buffer.read_into(target).get(WAIT_S)
        part = bytearray(10)
        buffer[5:15].read_into(part).get(WAIT_S)
        buffer[: len(part)].write_from(bytearray(b"x" * 3)).get(WAIT_S)
        again = bytearray(nbytes)
        buffer.read_into(memoryview(again)).get(WAIT_S)
        return target == data + bytes(8) and part == data[5:15] and again == b"xxx" + data[3:]

    @endpoint
    def many(self, buffers: list[RDMABuffer]) -> set[int]:
        target = bytearray(sum(buffer.size() for buffer in buffers))
        action, at = RDMAAction(), 0
        for buffer in buffers:
            action.read_remote(memoryview(target)[at : at + buffer.size()], buffer)
            at += buffer.size()
        action.submit().get(WAIT_S)
        action.submit().get(WAIT_S)
        return set(target)

    @endpoint
    def from_threads(self, buffers: list[RDMABuffer]) -> bool:
        """Each thread writes and reads a buffer of its own, many times, at once."""
        wrong: list[Any] = []

        def work(number: int) -> None:
            buffer, target = buffers[number], bytearray(buffers[number].size())
            for value in range(20):
                buffer.write_from(bytearray([value + number]) * buffer.size()).get(WAIT_S)
                buffer.read_into(target).get(WAIT_S)
                if set(target) != {value + number}:
                    wrong.append((number, value))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(buffers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return not wrong

    @endpoint
    def failure(self, buffer: RDMABuffer, timeout: int = 10) -> tuple[str, float]:
        """What reading and writing, or with one second only reading, fail with, and how soon."""
        began, texts = time.monotonic(), []
        for transfer in (buffer.read_into, buffer.write_from)[: 1 if timeout == 1 else 2]:
            try:
                transfer(bytearray(buffer.size()), timeout=timeout).get(2 * WAIT_S)
            except RDMAError as exc:
                texts.append(f"{type(exc).__name__}: {exc}")
        return "\n".join(texts), time.monotonic() - began

    @endpoint
    def outcomes_until_dropped(self, buffer: RDMABuffer, value: int) -> set[bool]:
        target, outcomes = bytearray(buffer.size()), set()
        while True:
            try:
                buffer.read_into(target).get(WAIT_S)
            except RDMAError as exc:
                assert "not found" in str(exc)
                return outcomes
            outcomes.add(set(target) == {value})

    @endpoint
    def num_lingering(self) -> int:
        return own_manager().table().num_lingering

    @endpoint
    def processor_seconds(self, window_s: float) -> float:
        """What all threads use of `window_s` seconds in which nothing is to be done."""
        began = time.process_time()
        time.sleep(window_s)
        return time.process_time() - began
