"""Actors that the tests of universes spawn."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from monarch.actor import Actor, MeshFailure, concurrent_endpoint, context, endpoint, with_timeout


class Counter(Actor):
    """Adds up, and remembers what it got in which order."""

    def __init__(self, start: int = 0) -> None:
        self.total = start
        self.seen: list[Any] = []

    @endpoint
    def add(self, number: int) -> int:
        self.total += number
        return self.total

    @endpoint
    def see(self, thing: Any) -> None:
        self.seen.append(thing)

    @endpoint
    def all_seen(self) -> list[Any]:
        return self.seen

    @endpoint
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @endpoint
    def patience(self, other: Any) -> str:
        return str(other.sleep.call(100).exception(timeout=1))

    @endpoint
    def fail(self) -> None:
        raise ValueError("no")

    @endpoint
    def point(self) -> dict[str, int]:
        return dict(context().message_rank)

    @endpoint
    def twice(self, other: Any, number: int) -> list[int]:
        return [list(other.add.call(number).get().values()) for _ in range(2)][-1]

    @endpoint
    def run_coroutine(self, seconds: float) -> str:
        return asyncio.run(asyncio.sleep(seconds, "slept"))


class AsyncCounter(Actor):
    """The same with an event loop."""

    def __init__(self) -> None:
        self.total = 0

    @endpoint
    async def add(self, number: int) -> int:
        self.total += number
        return self.total

    @endpoint
    async def sleep(self, seconds: float) -> float:
        began_s = asyncio.get_running_loop().time()
        await asyncio.sleep(seconds)
        return asyncio.get_running_loop().time() - began_s

    @concurrent_endpoint
    async def serve(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    @endpoint
    async def late_call(self, other: Any, seconds: float) -> str:
        try:
            await with_timeout(other, 1).sleep.call(seconds)
        except TimeoutError as error:
            return str(error)
        return "in time"

    @endpoint
    async def wait_for(self, other: Any, seconds: float) -> str:
        try:
            await asyncio.wait_for(other.sleep.call(10 * seconds), seconds)
        except TimeoutError:
            return "too late"
        return "in time"

    @endpoint
    async def in_thread(self, other: Any) -> list[int]:
        return await asyncio.to_thread(lambda: list(other.add.call(1).get().values()))

    @endpoint
    async def ask(self, other: Any) -> list[int]:
        return list((await other.add.call(1)).values())


class Owner(Actor):
    """Owns a mesh and keeps what it hears of it."""

    def __init__(self, procs: Any) -> None:
        self.counters = procs.spawn("owned", Counter)
        self.heard: list[str] = []

    @endpoint
    def total(self) -> list[int]:
        return list(self.counters.add.call(1).get().values())

    @endpoint
    def failures(self) -> list[str]:
        return self.heard

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.heard.append(failure.report())
        return True


class Asker(Actor):
    """Waits for another of its kind, which may wait for it."""

    @endpoint
    def ask(self, other: Any, back: Any) -> str:
        if other is None:
            return "asked"
        return str(other.ask.call_one(back, None).get())


class Ticker(Actor):
    """Is never idle for long."""

    @endpoint
    async def tick(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)


class Stubborn(Actor):
    """Does not let its waits be ended."""

    @endpoint
    def wait(self, other: Any) -> None:
        for _ in range(3):
            try:
                other.sleep.call(1e9).get()
            except BaseException as exc:
                self.caught = exc
