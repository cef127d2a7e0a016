"""The measures of `actors.py` on Ray core, under the same names: the third column of `compare`.

Ray is given its best form of each: synchronous actors for blocking calls, no dashboard, no log forwarding, resource
counts that never make an actor wait. Its object store maps a received array read-only, without a copy into private memory.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.update(RAY_DEDUP_LOGS="0", RAY_USAGE_STATS_ENABLED="0", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")

import measure
import ray
from measure import now, out, remark


class Echo:
    def ping(self) -> None:
        return None

    def echo(self, value: Any) -> Any:
        return value

    def touch(self, array: Any) -> int:
        return int(array[::4096].sum())

    def pid(self) -> int:
        return os.getpid()

    def cpu_s(self) -> float:
        return time.process_time()

    def hang(self) -> None:
        time.sleep(3600)

    def fail(self) -> None:
        raise ValueError("boom-42")

    def product(self) -> float:
        import torch

        return float((torch.ones(64, 64) @ torch.ones(64, 64)).sum())


def init() -> None:
    ray.init(num_cpus=64, include_dashboard=False, log_to_driver=False, logging_level="ERROR", object_store_memory=2 << 30)


def actors_of(count: int, method: str = "ping") -> list[Any]:
    remote = ray.remote(num_cpus=0.01, max_restarts=0)(Echo)
    actors = [remote.remote() for _ in range(count)]
    ray.get([getattr(actor, method).remote() for actor in actors])
    return actors


# ------------------------------------------------------------------------------------------------------------ sections


def imports() -> None:
    measure.out_import("import ray")


def latency() -> None:
    init()
    (one,) = actors_of(1)
    times = measure.time_calls(lambda: ray.get(one.ping.remote()), 2000)
    measure.out_latency("call_one", times)
    measure.out_latency("call_one_sync_endpoint", times)

    async def awaited() -> list[float]:
        times = []
        for _ in range(2100):
            started = now()
            await one.ping.remote()
            times.append(now() - started)
        return sorted(times[100:])

    measure.out_latency("call_one_await", asyncio.run(awaited()))


def throughput() -> None:
    init()
    (one,) = actors_of(1)

    async def wait(reference: Any) -> Any:
        return await reference

    async def gather(count: int) -> None:
        await asyncio.gather(*[wait(one.ping.remote()) for _ in range(count)])

    def broadcast(count: int) -> None:
        for _ in range(count):
            one.ping.remote()
        ray.get(one.ping.remote())

    measure.out_rate("pipelined_calls", "calls/s", lambda count: asyncio.run(gather(count)))
    measure.out_rate("pipelined_calls_get", "calls/s", lambda count: ray.get([one.ping.remote() for _ in range(count)]))
    measure.out_rate("broadcast", "msgs/s", broadcast)


def calls(count: int) -> None:
    init()
    actors = actors_of(count)
    times = measure.time_calls(lambda: ray.get([actor.ping.remote() for actor in actors]), 500)
    measure.out_latency(f"call_{count}", times, p99=False)


def arrays() -> None:
    import numpy as np

    init()
    (one,) = actors_of(1)
    for label, num_bytes in measure.SIZES.items():
        array = np.random.default_rng(0).integers(0, 255, num_bytes, dtype=np.uint8)
        want = int(array[::4096].sum())

        def send(array: Any = array, want: int = want) -> None:
            assert ray.get(one.touch.remote(array)) == want

        def echo(array: Any = array, want: int = want) -> None:
            assert int(ray.get(one.echo.remote(array))[::4096].sum()) == want

        measure.out_transfer("send", label, send, ways=1)
        measure.out_transfer("echo", label, echo, ways=2)


def spawn(count: int, name: str = "spawn", method: str = "ping") -> None:
    firsts: list[float] = []
    began = now()
    while len(firsts) < 2 or (len(firsts) < 6 and now() - began < 10):
        started = now()
        if not firsts:
            init()
        actors = actors_of(count, method)
        firsts.append(now() - started)
        for actor in actors:
            ray.kill(actor)  # returns at once, so there is no `stop` to measure
    out(f"{name}_{count}_first", firsts[0] * 1e3, "ms")
    out(f"{name}_{count}_later", statistics.median(firsts[1:]) * 1e3, "ms")


def with_torch(count: int) -> None:
    import torch

    remark(f"torch {torch.__version__}")
    spawn(count, "torch", "product")


def memory(count: int = 16, suffix: str = "", method: str = "ping") -> None:
    init()
    actors = actors_of(count, method)
    measure.out_memory(suffix, ray.get([actor.pid.remote() for actor in actors]))


def cpu(count: int = 3000) -> None:
    init()
    (one,) = actors_of(1)
    for _ in range(200):
        ray.get(one.ping.remote())
    client, worker = time.process_time(), ray.get(one.cpu_s.remote())
    for _ in range(count):
        ray.get(one.ping.remote())
    worker = ray.get(one.cpu_s.remote()) - worker
    client = time.process_time() - client
    out("cpu_per_call", (client + worker) / count * 1e6, "us")
    out("cpu_per_call_client", client / count * 1e6, "us")
    out("cpu_per_call_worker", worker / count * 1e6, "us")


def faults() -> None:
    init()
    (one,) = actors_of(1)

    def fail() -> None:
        try:
            ray.get(one.fail.remote())
        except ValueError as error:
            assert "boom-42" in str(error)

    measure.out_latency("endpoint_error", measure.time_calls(fail, 200), p99=False)
    times = []
    for _ in range(5):
        (actor,) = actors_of(1)
        pid = ray.get(actor.pid.remote())
        pending = actor.hang.remote()
        time.sleep(0.2)
        started = now()
        os.kill(pid, signal.SIGKILL)
        try:
            ray.get(pending, timeout=60)
        except ray.exceptions.RayError:
            times.append(now() - started)
    out("kill_to_caller", statistics.median(times) * 1e3, "ms")


SECTIONS: dict[str, Callable[[], None]] = {
    "imports": imports,
    "latency": latency,
    "throughput": throughput,
    **{f"calls:{count}": functools.partial(calls, count) for count in (2, 16, 64)},
    "arrays": arrays,
    **{f"spawn:{count}": functools.partial(spawn, count) for count in (1, 16, 64, 256)},
    **{f"torch:{count}": functools.partial(with_torch, count) for count in (1, 16, 64, 256)},
    "memory": memory,
    "torch_memory": functools.partial(memory, 16, "_torch", "product"),
    "cpu": cpu,
    "faults": faults,
}

if __name__ == "__main__":
    measure.main(__file__, __doc__ or "", SECTIONS)
