"""Actors that several system tests spawn, in a module of their own: procs import it by name, and without pytest.

Each has a twin with sync endpoints where a rule must hold for both kinds. Actors of one test only are classes in that
test; they travel by value.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any

from monarch.actor import Actor, Channel, Port, concurrent_endpoint, context, current_rank, endpoint


class Echo(Actor):
    """Answers with what it is given, and with who it is."""

    version = 7

    @endpoint
    async def echo(self, value: Any = None) -> Any:
        return value

    @endpoint
    async def rank(self) -> int:
        return context().actor_instance.rank.rank

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def fail(self, text: str = "no") -> None:
        raise ValueError(text)

    @endpoint
    async def signature(self, first: Any, /, second: Any = 2, *rest: Any, key: Any = "k", **more: Any) -> Any:
        return first, second, rest, key, more

    def plain(self, value: Any) -> Any:
        return "plain", value

    async def plain_async(self, value: Any) -> Any:
        return "plain_async", value

    def with_port(self, port: Port[Any], value: Any) -> None:
        port.send(("with_port", value))


class SyncEcho(Actor):
    """`Echo` with sync endpoints."""

    version = 7

    @endpoint
    def echo(self, value: Any = None) -> Any:
        return value

    @endpoint
    def rank(self) -> int:
        return context().actor_instance.rank.rank

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def fail(self, text: str = "no") -> None:
        raise ValueError(text)

    @endpoint
    def signature(self, first: Any, /, second: Any = 2, *rest: Any, key: Any = "k", **more: Any) -> Any:
        return first, second, rest, key, more

    def plain(self, value: Any) -> Any:
        return "plain", value

    async def plain_async(self, value: Any) -> Any:
        return "plain_async", value

    def with_port(self, port: Port[Any], value: Any) -> None:
        port.send(("with_port", value))


class Log(Actor):
    """Keeps what it is sent, in order."""

    def __init__(self, *items: Any) -> None:
        self.seen = list(items)

    @endpoint
    async def add(self, item: Any) -> Any:
        self.seen.append(item)
        return item

    @endpoint
    async def items(self) -> list[Any]:
        return self.seen


class SyncLog(Actor):
    """`Log` with sync endpoints."""

    def __init__(self, *items: Any) -> None:
        self.seen = list(items)

    @endpoint
    def add(self, item: Any) -> Any:
        self.seen.append(item)
        return item

    @endpoint
    def items(self) -> list[Any]:
        return self.seen


class Gate(Actor):
    """`wait` ends when `open` was called, which other calls may do meanwhile."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.events: list[str] = []

    @concurrent_endpoint
    async def wait(self, name: str = "") -> str:
        self.events.append(f"start {name}")
        await self.opened.wait()
        self.events.append(f"end {name}")
        return name

    @endpoint
    async def open(self) -> None:
        self.opened.set()

    @endpoint
    async def log(self) -> list[str]:
        return self.events

    @concurrent_endpoint
    async def fail(self, text: str) -> None:
        raise ValueError(text)

    @concurrent_endpoint
    async def cancel_itself(self) -> None:
        raise asyncio.CancelledError

    @concurrent_endpoint(explicit_response_port=True)
    async def meet(self, port: Port[str], name: str) -> None:
        await self.opened.wait()
        port.send(name)

    @concurrent_endpoint(explicit_response_port=True)
    async def fail_with_port(self, port: Port[str]) -> None:
        raise ValueError("no-answer")


class Mailman(Actor):
    """Answers through ports: now, twice, later, from a thread, never."""

    def __init__(self) -> None:
        self.kept: list[Port[Any]] = []

    @endpoint(explicit_response_port=True)
    def now(self, port: Port[Any], value: Any = None) -> str:
        port.send(value)
        return "ignored"

    @endpoint(explicit_response_port=True)
    def times(self, port: Port[Any], count: int) -> None:
        for number in range(count):
            port.send(number)

    @endpoint(explicit_response_port=True)
    def refuse(self, port: Port[Any], text: str) -> None:
        port.exception(KeyError(text))

    @endpoint(explicit_response_port=True)
    def keep(self, port: Port[Any]) -> None:
        self.kept.append(port)

    @endpoint(explicit_response_port=True)
    def from_thread(self, port: Port[Any], value: Any) -> None:
        threading.Thread(target=port.send, args=(value,)).start()

    @endpoint(explicit_response_port=True)
    def fail(self, port: Port[Any], text: str) -> None:
        raise ValueError(text)

    @endpoint
    def deliver(self, value: Any) -> int:
        kept, self.kept = self.kept, []
        for port in kept:
            port.send((current_rank().rank, value))
        return len(kept)


class Inspector(Actor):
    """Runs a function in its process."""

    @endpoint
    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


class Caller(Actor):
    """Calls what it is given, from inside an actor."""

    def __init__(self, target: Any = None) -> None:
        self.target = target

    @endpoint
    async def hold(self, target: Any) -> Any:
        self.target = target
        return target

    @endpoint
    async def held(self) -> Any:
        return self.target

    @endpoint
    async def call(self, name: str, *args: Any, target: Any = None) -> list[Any]:
        return (await getattr(target or self.target, name).call(*args)).values()

    @endpoint
    async def choose(self, name: str, *args: Any, target: Any = None) -> Any:
        return await getattr(target or self.target, name).choose(*args)

    @endpoint
    async def stream(self, name: str, *args: Any, target: Any = None) -> list[Any]:
        return [await reply for reply in getattr(target or self.target, name).stream(*args)]

    @endpoint
    async def broadcast(self, name: str, *args: Any, target: Any = None) -> None:
        getattr(target or self.target, name).broadcast(*args)

    @endpoint
    async def post(self, port: Port[Any], *items: Any) -> None:
        for item in items:
            port.send(item)

    @endpoint
    async def open_channel(self) -> Port[Any]:
        port, self.receiver = Channel[Any].open()
        return port

    @endpoint
    async def receive(self, count: int) -> list[Any]:
        return [await self.receiver.recv() for _ in range(count)]

    @endpoint
    async def sizes_of(self, target: Any = None) -> dict[str, int]:
        return dict((target or self.target).extent.items())

    @endpoint
    async def spawn(self, procs: Any, name: str, cls: type[Actor], *args: Any) -> Any:
        return procs.spawn(name, cls, *args)


class SyncCaller(Actor):
    """`Caller` with sync endpoints."""

    def __init__(self, target: Any = None) -> None:
        self.target = target

    @endpoint
    def hold(self, target: Any) -> Any:
        self.target = target
        return target

    @endpoint
    def held(self) -> Any:
        return self.target

    @endpoint
    def call(self, name: str, *args: Any, target: Any = None) -> list[Any]:
        return getattr(target or self.target, name).call(*args).get().values()

    @endpoint
    def choose(self, name: str, *args: Any, target: Any = None) -> Any:
        return getattr(target or self.target, name).choose(*args).get()

    @endpoint
    def stream(self, name: str, *args: Any, target: Any = None) -> list[Any]:
        return [reply.get() for reply in getattr(target or self.target, name).stream(*args)]

    @endpoint
    def broadcast(self, name: str, *args: Any, target: Any = None) -> None:
        getattr(target or self.target, name).broadcast(*args)

    @endpoint
    def post(self, port: Port[Any], *items: Any) -> None:
        for item in items:
            port.send(item)

    @endpoint
    def open_channel(self) -> Port[Any]:
        port, self.receiver = Channel[Any].open()
        return port

    @endpoint
    def receive(self, count: int) -> list[Any]:
        return [self.receiver.recv().get() for _ in range(count)]

    @endpoint
    def sizes_of(self, target: Any = None) -> dict[str, int]:
        return dict((target or self.target).extent.items())

    @endpoint
    def spawn(self, procs: Any, name: str, cls: type[Actor], *args: Any) -> Any:
        return procs.spawn(name, cls, *args)
