"""Actors that publish weights and read them, for tests of `WeightPublisher`."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np

from monarch.actor import Actor, HostMesh, endpoint
from monarch.rdma import MappedWeights, WeightPublisher, Weights

NAMES = "abcd"


def state(value: int, nbytes: int) -> dict[str, Any]:
    """Four arrays of so many bytes together, all of one value."""
    return {name: np.full(nbytes // 8 // len(NAMES), value) for name in NAMES}


class Learner(Actor):
    """Publishes `state(version)`."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.done = threading.Event()
        self.publisher: Any = None

    @endpoint
    def start(self, hosts: HostMesh | None = None, **options: Any) -> Weights:
        self.publisher = WeightPublisher(state(0, self.nbytes), hosts=hosts, **options)
        return self.publisher.weights  # type: ignore[no-any-return]

    @endpoint
    def publish(self, number: int = 1) -> int:
        for _ in range(number):
            version = self.publisher.publish(state(self.publisher.weights.version() + 1, self.nbytes))
        return int(version)

    @endpoint
    def publish_all_the_time(self, pause_s: float) -> None:
        def publish() -> None:
            version = 0
            while not self.done.wait(pause_s):
                version += 1
                self.publisher.publish(state(version, self.nbytes))

        self.thread = threading.Thread(target=publish)
        self.thread.start()

    @endpoint
    def rest(self) -> int:
        self.done.set()
        self.thread.join()
        return int(self.publisher.weights.version())

    @endpoint
    def close(self) -> None:
        self.publisher.close()

    @endpoint
    def pid(self) -> int:
        return os.getpid()


class Reader(Actor):
    """Pulls and maps; every answer is a version that was seen whole."""

    def __init__(self, nbytes: int) -> None:
        self.into = state(-1, nbytes)
        self.mapped: dict[int, MappedWeights] = {}
        self.weights: Any = None

    @endpoint
    def take(self, weights: Weights) -> None:
        self.weights = weights

    @endpoint
    def pull(self, timeout: int = 10) -> int:
        return checked(self.weights.pull(self.into, timeout=timeout), self.into)

    @endpoint
    def pull_for(self, seconds: float) -> list[int]:
        end, versions = time.monotonic() + seconds, []
        while time.monotonic() < end:
            versions.append(checked(self.weights.pull(self.into), self.into))
        return versions

    @endpoint
    def map(self) -> int:
        mapped = self.weights.mapped()
        self.mapped[mapped.version] = mapped
        return checked(mapped.version, mapped)

    @endpoint
    def check_mapped(self) -> list[int]:
        return [checked(version, mapped) for version, mapped in self.mapped.items()]

    @endpoint
    def unmap(self) -> None:
        for mapped in self.mapped.values():
            mapped.close()
        self.mapped.clear()

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def source(self) -> tuple[str, int]:
        """Whose memory is read from here, and the process id of that."""
        copies = self.weights._own_sources()[0].copies
        return copies.owner, copies._file.pid


def checked(version: int, values: Any) -> int:
    """The version, if all is of it."""
    seen = {int(value) for array in values.values() for value in (array.min(), array.max())}
    assert seen == {version}, f"version {version} has {seen}"
    return version
