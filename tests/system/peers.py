"""Actors of the tests with several machines, in a module of their own: procs import it by name, and without pytest."""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from monarch.actor import Actor, ActorMesh, MeshFailure, Port, context, current_rank, endpoint, this_host


class Peer(Actor):
    """Says where it is, and does what it is told with the references that it is sent."""

    def __init__(self) -> None:
        self.count = 0
        self.kept: list[Any] = []
        self.sum = hashlib.sha256()

    @endpoint
    def where(self) -> tuple[str, int]:
        return socket.gethostname(), os.getpid()

    @endpoint
    def rank(self) -> dict[str, int]:
        return dict(context().actor_instance.rank)

    @endpoint
    def ranks(self) -> tuple[dict[str, int], dict[str, int]]:
        """Coordinates in the full mesh and in the view of the message."""
        return dict(context().actor_instance.rank), dict(current_rank())

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def fail(self, text: str) -> None:
        raise ValueError(text)

    @endpoint
    def add(self, item: Any) -> int:
        self.kept.append(item)
        return len(self.kept)

    @endpoint
    def items(self) -> list[Any]:
        kept, self.kept = self.kept, []
        return kept

    @endpoint
    def checksum(self, data: Any) -> str:
        return hashlib.sha256(data).hexdigest()

    @endpoint(explicit_response_port=True)
    def later(self, port: Port[Any], value: Any) -> None:
        port.send(value)

    @endpoint
    def say(self, text: str) -> None:
        print(text, flush=True)

    @endpoint
    def ask(self, other: ActorMesh[Peer]) -> list[tuple[str, int]]:
        return list(other.where.call().get(timeout=20).values())

    @endpoint
    def send_all(self, other: ActorMesh[Peer], count: int) -> None:
        """Messages to one actor by all adverbs in turn; it must see them in this order."""
        for number in range(count):
            if number % 3 == 0:
                other.add.broadcast(number)
            elif number % 3 == 1:
                other.add.call(number)
            else:
                other.add.call_one(number)

    @endpoint
    def spawn_here(self, count: int) -> list[tuple[str, int]]:
        self.kept.append(this_host().spawn_procs({"own": count}).spawn("child", Peer))
        return list(self.kept[-1].where.call().get(timeout=20).values())

    @endpoint
    def child(self) -> Any:
        return self.kept[-1]

    @endpoint
    def files_with(self, text: str) -> list[str]:
        """Files of this machine's temporary folder that hold a text."""
        files = [path for path in Path(tempfile.gettempdir()).rglob("*") if path.is_file()]
        assert files
        return [str(path) for path in files if text.encode() in path.read_bytes()]

    @endpoint
    def die(self, number: int = signal.SIGKILL) -> None:
        os.kill(os.getpid(), number)

    @endpoint
    def hold(self, seconds: int) -> str:
        """Hold the interpreter lock."""
        ctypes.PyDLL(None).sleep(seconds)
        return "held"

    @endpoint
    def sleep(self, seconds: float) -> str:
        time.sleep(seconds)
        return "slept"

    @endpoint
    def stop_here(self) -> None:
        breakpoint()


class AsyncPeer(Actor):
    """One that awaits."""

    @endpoint
    async def ask(self, other: ActorMesh[Peer]) -> list[tuple[str, int]]:
        return list((await other.where.call()).values())


class Lead(Actor):
    """Owns peers on the hosts that it is given."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.failures.append(failure.report())
        return True

    @endpoint
    def spawn(self, hosts: Any, count: int) -> Any:
        return hosts.spawn_procs({"own": count}).spawn("led", Peer)

    @endpoint
    def told(self) -> list[str]:
        return self.failures
