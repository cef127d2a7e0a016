"""Failure, measured: how fast a death is an error and a report, how fast a policy repairs it, and what supervision costs a call.

    python bench/supervision.py [--kills N] [--calls N]

Prints `name value unit`. The medians of calls alternate between a supervised mesh and one that is not, on the same procs.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import statistics
import time
from typing import Any

from measure import now, out, percentile

import monarch.actor
from monarch.actor import Actor, MeshFailure, OneForOne, endpoint, this_host

WAIT_S = 30.0
PROCS = 8
BLOCK = 200


class Worker(Actor):
    """Answers, or waits to be killed."""

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def ping(self) -> None:
        return None

    @endpoint
    def wait(self) -> None:
        time.sleep(3600)


def measure_kills(kills: int) -> None:
    """SIGKILL of a proc until the pending call raises, and until the hook runs, on meshes without a policy."""
    told: queue.SimpleQueue[tuple[float, MeshFailure]] = queue.SimpleQueue()
    monarch.actor.unhandled_fault_hook = lambda failure: told.put((now(), failure))
    to_caller_s: list[float] = []
    to_hook_s: list[float] = []
    while len(to_caller_s) < kills:
        procs = this_host().spawn_procs({"procs": PROCS})
        mesh: Any = procs.spawn("worker", Worker)
        for rank, pid in enumerate(mesh.pid.call().get(WAIT_S).values()):
            one = mesh.slice(procs=rank)
            waiting = one.wait.call_one()
            time.sleep(0.01)  # the call is under way; how it is answered is what is measured
            began = now()
            os.kill(pid, signal.SIGKILL)
            assert waiting.exception(WAIT_S) is not None
            to_caller_s.append(now() - began)
            at, failure = told.get(timeout=WAIT_S)
            assert failure.crashed_ranks == [rank]
            to_hook_s.append(at - began)
        procs.stop().get(WAIT_S)
    for name, values in (("kill_to_caller", to_caller_s), ("kill_to_hook", to_hook_s)):
        out(f"{name}_p50", percentile(values, 50) * 1e3, "ms")
        out(f"{name}_p99", percentile(values, 99) * 1e3, "ms")


def measure_restarts(kills: int) -> None:
    """SIGKILL of a supervised rank until it answers again; the pause is 0."""
    procs = this_host().spawn_procs({"procs": PROCS})
    policy = OneForOne(max_restarts=10 * kills, within_s=3600, backoff_s=0.0)
    mesh: Any = procs.supervised(policy).spawn("worker", Worker)
    pids = list(mesh.pid.call().get(WAIT_S).values())
    seconds = []
    for index in range(kills):
        rank = index % PROCS
        one = mesh.slice(procs=rank)
        waiting = one.wait.call_one()
        began = now()
        os.kill(pids[rank], signal.SIGKILL)
        assert waiting.exception(WAIT_S) is not None
        pids[rank] = one.pid.call_one().get(WAIT_S)
        seconds.append(now() - began)
    procs.stop().get(WAIT_S)
    out("kill_to_whole_p50", percentile(seconds, 50) * 1e3, "ms")
    out("kill_to_whole_p99", percentile(seconds, 99) * 1e3, "ms")


def measure_calls(calls: int) -> None:
    """Round trips to an actor with a policy and to one without, in turns."""
    procs = this_host().spawn_procs()
    plain: Any = procs.spawn("plain", Worker)
    supervised: Any = procs.supervised(OneForOne()).spawn("supervised", Worker)
    medians: dict[str, list[float]] = {"plain": [], "supervised": []}
    for mesh, name in [(plain, "plain"), (supervised, "supervised")] * max(2, calls // BLOCK):
        times = []
        for _ in range(BLOCK):
            began = now()
            mesh.ping.call_one().get(WAIT_S)
            times.append(now() - began)
        medians[name].append(statistics.median(times))
    procs.stop().get(WAIT_S)
    before, after = (statistics.median(medians[name]) for name in ("plain", "supervised"))
    out("call_plain_p50", before * 1e6, "us")
    out("call_supervised_p50", after * 1e6, "us")
    out("supervision_cost", (after / before - 1) * 100, "%")


def main() -> None:
    parser = argparse.ArgumentParser(description="What failures and supervision cost.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--calls", type=int, default=20_000, help="to each of the two meshes")
    arguments = parser.parse_args()
    measure_kills(arguments.kills)
    measure_restarts(arguments.kills // 4)
    measure_calls(arguments.calls)


if __name__ == "__main__":
    main()
