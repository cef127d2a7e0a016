"""The actor layer, measured through its public API, so that this program runs unmodified on either implementation of it.

usage: actors.py [--max-procs N] [--limit-s S] [SECTION ...]      SECTION: floors, imports, latency, throughput, calls,
arrays, spawn, torch, memory, cpu, faults, or one size of a group such as spawn:16

Prints one `name value unit` a line. Every section runs in a fresh interpreter with a time limit. `compare` runs this
program on several implementations, in turns; `ray_actors.py` does the same work on Ray.

Measures, where the name does not say it:
    call_one_*          round trip of `call_one()` on one proc, the caller blocked in `get()` (or awaiting)
    pipelined_calls     many `call_one()` under way at once, awaited together
    broadcast           messages sent without a reply, until the last one has been handled
    call_N              round trip of `call()` on N procs
    send_* / echo_*     an array to an actor (which reads a byte of each page) / and back (the caller does the same)
    spawn_N_first       from `this_host()` to the reply of N procs; _later: the same for a second mesh; torch_N_*: with torch
                        imported in the client beforehand, and each proc doing a matrix product
    memory_per_proc     unique set size
    kill_to_caller      SIGKILL of a proc until the pending `call()` raises; kill_to_hook: until `unhandled_fault_hook` runs
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import measure
from measure import now, out, remark

import monarch.actor
from monarch.actor import Actor, endpoint, this_host


class Echo(Actor):
    """One of everything; its endpoints are asynchronous."""

    @endpoint
    async def ping(self) -> None:
        return None

    @endpoint
    async def echo(self, value: Any) -> Any:
        return value

    @endpoint
    async def touch(self, array: Any) -> int:
        return int(array[::4096].sum())

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def cpu_s(self) -> float:
        return time.process_time()

    @endpoint
    async def hang_in(self, pid: int) -> None:
        if os.getpid() == pid:
            await asyncio.sleep(3600)

    @endpoint
    async def fail(self) -> None:
        raise ValueError("boom-42")


class Plain(Actor):
    """Synchronous endpoints."""

    @endpoint
    def ping(self) -> None:
        return None


class Tensor(Actor):
    @endpoint
    async def product(self) -> float:
        import torch

        return float((torch.ones(64, 64) @ torch.ones(64, 64)).sum())

    @endpoint
    async def pid(self) -> int:
        return os.getpid()


def mesh_of(count: int, actor: Any = Echo) -> tuple[Any, Any]:
    procs = this_host().spawn_procs(per_host={"gpus": count})
    return procs, procs.spawn("bench", actor)


def one_of(count: int = 2, actor: Any = Echo) -> Any:
    """A warm actor of a mesh of `count`."""
    _, mesh = mesh_of(count, actor)
    mesh.ping.call().get()
    return mesh.slice(gpus=0)


# ------------------------------------------------------------------------------------------------------------ sections


def imports() -> None:
    measure.out_import("import monarch.actor")


def latency() -> None:
    one, plain = one_of(), one_of(1, Plain)
    measure.out_latency("call_one", measure.time_calls(lambda: one.ping.call_one().get(), 2000))
    measure.out_latency("call_one_sync_endpoint", measure.time_calls(lambda: plain.ping.call_one().get(), 2000))

    async def awaited() -> list[float]:
        times = []
        for _ in range(2100):
            started = now()
            await one.ping.call_one()
            times.append(now() - started)
        return sorted(times[100:])

    measure.out_latency("call_one_await", asyncio.run(awaited()))


def throughput() -> None:
    one = one_of()

    async def wait(future: Any) -> Any:
        return await future

    async def gather(count: int) -> None:
        await asyncio.gather(*[wait(one.ping.call_one()) for _ in range(count)])

    def pipelined_get(count: int) -> None:
        for future in [one.ping.call_one() for _ in range(count)]:
            future.get()

    def broadcast(count: int) -> None:
        for _ in range(count):
            one.ping.broadcast()
        one.ping.call_one().get()

    measure.out_rate("pipelined_calls", "calls/s", lambda count: asyncio.run(gather(count)))
    measure.out_rate("pipelined_calls_get", "calls/s", pipelined_get)
    measure.out_rate("broadcast", "msgs/s", broadcast)


def calls(count: int) -> None:
    _, mesh = mesh_of(count)
    mesh.ping.call().get()
    measure.out_latency(f"call_{count}", measure.time_calls(lambda: mesh.ping.call().get(), 500), p99=False)


def arrays() -> None:
    import numpy as np

    one = one_of()
    for label, num_bytes in measure.SIZES.items():
        array = np.random.default_rng(0).integers(0, 255, num_bytes, dtype=np.uint8)
        want = int(array[::4096].sum())

        def send(array: Any = array, want: int = want) -> None:
            assert one.touch.call_one(array).get() == want

        def echo(array: Any = array, want: int = want) -> None:
            assert int(one.echo.call_one(array).get()[::4096].sum()) == want

        measure.out_transfer("send", label, send, ways=1)
        measure.out_transfer("echo", label, echo, ways=2)


def spawn(count: int) -> None:
    first, later, stops = _spawn_times(count, Echo, "ping")
    out(f"spawn_{count}_first", first * 1e3, "ms")
    out(f"spawn_{count}_later", later * 1e3, "ms")
    out(f"stop_{count}", stops * 1e3, "ms")


def with_torch(count: int) -> None:
    import torch

    remark(f"torch {torch.__version__}")
    first, later, _ = _spawn_times(count, Tensor, "product")
    out(f"torch_{count}_first", first * 1e3, "ms")
    out(f"torch_{count}_later", later * 1e3, "ms")


def _spawn_times(count: int, actor: Any, method: str) -> tuple[float, float, float]:
    """Seconds to the first reply of the first mesh, of later ones, and to stop one; later ones in up to 10 s."""
    firsts: list[float] = []
    stops: list[float] = []
    began = now()
    while len(firsts) < 2 or (len(firsts) < 6 and now() - began < 10):
        started = now()
        procs, mesh = mesh_of(count, actor)
        getattr(mesh, method).call().get()
        firsts.append(now() - started)
        started = now()
        procs.stop().get()
        stops.append(now() - started)
    return firsts[0], statistics.median(firsts[1:]), statistics.median(stops)


def memory(count: int = 16) -> None:
    _, mesh = mesh_of(count)
    measure.out_memory("", mesh.pid.call().get().values())


def torch_memory(count: int = 16) -> None:
    import torch  # noqa: F401  (the client has it, so the procs may inherit it)

    _, mesh = mesh_of(count, Tensor)
    mesh.product.call().get()
    measure.out_memory("_torch", mesh.pid.call().get().values())


def cpu(count: int = 3000) -> None:
    """User and system time of the client and of the worker process, per blocking call."""
    one = one_of(1)
    for _ in range(200):
        one.ping.call_one().get()
    client, worker = time.process_time(), one.cpu_s.call_one().get()
    for _ in range(count):
        one.ping.call_one().get()
    worker = one.cpu_s.call_one().get() - worker
    client = time.process_time() - client
    out("cpu_per_call", (client + worker) / count * 1e6, "us")
    out("cpu_per_call_client", client / count * 1e6, "us")
    out("cpu_per_call_worker", worker / count * 1e6, "us")


def faults() -> None:
    heard = threading.Event()
    heard_at = [0.0]

    def hook(failure: object) -> None:
        if not heard.is_set():
            heard_at[0] = now()
            heard.set()

    monarch.actor.unhandled_fault_hook = hook
    one = one_of(1)

    def fail() -> None:
        try:
            one.fail.call_one().get()
        except monarch.actor.ActorError as error:
            assert "boom-42" in str(error)

    measure.out_latency("endpoint_error", measure.time_calls(fail, 200), p99=False)
    to_caller: list[float] = []
    to_hook: list[float] = []
    began = now()
    while not to_caller or (len(to_caller) < 5 and now() - began < 20):
        _, mesh = mesh_of(2)
        pids = mesh.pid.call().get().values()
        pending = mesh.hang_in.call(pids[1])
        time.sleep(0.2)
        heard.clear()
        started = now()
        os.kill(pids[1], signal.SIGKILL)
        try:
            pending.get(timeout=60)
            remark("no error reached the caller")
        except Exception as error:
            if not to_caller:
                remark(f"caller got {type(error).__name__}: {str(error).splitlines()[0][:100]}")
        to_caller.append(now() - started)
        to_hook.append((heard_at[0] if heard.wait(30) else float("nan")) - started)
        if mesh.slice(gpus=0).pid.call_one().get(timeout=10) != pids[0]:
            remark("the survivor does not answer")
    out("kill_to_caller", statistics.median(to_caller) * 1e3, "ms")
    out("kill_to_hook", statistics.median(to_hook) * 1e3, "ms")


SECTIONS: dict[str, Callable[[], None]] = {
    "floors": measure.floors,
    "imports": imports,
    "latency": latency,
    "throughput": throughput,
    **{f"calls:{count}": functools.partial(calls, count) for count in (2, 16, 64)},
    "arrays": arrays,
    **{f"spawn:{count}": functools.partial(spawn, count) for count in (1, 16, 64, 256)},
    **{f"torch:{count}": functools.partial(with_torch, count) for count in (1, 16, 64, 256)},
    "memory": memory,
    "torch_memory": torch_memory,
    "cpu": cpu,
    "faults": faults,
}

if __name__ == "__main__":
    measure.main(__file__, __doc__ or "", SECTIONS)
