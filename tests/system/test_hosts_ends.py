"""Ends between machines: who stops or leaves waits for a machine that is cut off no longer than the limit of its link, and a worker
loop takes its procs along however it ends."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack

import pytest

from system.remote import CLIENT, TRUST, serving, start_alone
from system.waiting import is_gone, wait_until

LIMITS = {"TEST_CA": TRUST, "HYPERACTOR_CHANNEL_RECONNECT_TIMEOUT": "2s", "HYPERACTOR_SERVER_HEARTBEAT_INTERVAL": "200ms"}
PIDS = """
    print("pids", *[pid for _, pid in peers.where.call().get(10).values()], flush=True)
"""
WHEN_TOLD = """
    import queue, signal
    told = queue.SimpleQueue()
    signal.signal(signal.SIGUSR1, lambda *_: told.put(True))
    print("ready", flush=True)
    told.get(timeout=20)
"""
ENDS = {
    "exit": "",
    "stop procs": "procs.stop().get(20)",
    "stop hosts": "mesh.stop().get(20)",
    "shutdown": "mesh.shutdown().get(20)",
}


@pytest.fixture(autouse=True)
def mended(hosts):
    yield
    hosts.mend()


def client(host, source, addresses):
    return start_alone(host, CLIENT + PIDS + source, args=[",".join(addresses)], env=LIMITS)


def pids_of(run):
    return [int(pid) for pid in run.wait_line(r"^pids (.*)$")[1].split()]


def test_an_end_waits_for_a_host_that_is_cut_off_no_longer_than_its_limit(hosts):
    a, b, c = hosts[:3]
    with ExitStack() as stack:
        loops = [[a.url(port), b.url(port)] for port in (26600, 26601)]
        for host in (a, b):
            stack.enter_context(serving(host, 26600, 26601))
        runs = [stack.enter_context(client(c, WHEN_TOLD + f"    {end}", loops[how == "shutdown"])) for how, end in ENDS.items()]
        pids = [pid for run in runs for pid in pids_of(run)]
        for run in runs:
            run.wait_line("^ready")
        b.link_down()
        began = time.monotonic()
        for run in runs:
            os.kill(run.pid, signal.SIGUSR1)
        for run in runs:
            done = run.finish()
            assert done.leftovers == () and time.monotonic() - began < 6, done
        wait_until(lambda: all(map(is_gone, pids)), 4)


def test_a_worker_loop_takes_its_procs_along(hosts):
    a, c = hosts["a"], hosts["c"]
    source = """
    for rank in range(3):
        lost = peers.slice(hosts=rank).sleep.call(60.0)
        print(f"waiting {rank}\\n", end="", flush=True)  # in one write: a failure is told by another thread
        assert "SupervisionError" in type(lost.exception(20)).__name__
        print(f"told {rank}\\n", end="", flush=True)
    """
    with ExitStack() as stack:
        ports = range(26600, 26603)
        loops = [stack.enter_context(serving(a, port)) for port in ports]
        run = stack.enter_context(client(c, source, [a.url(port) for port in ports]))
        pids = pids_of(run)
        for rank, (loop, number) in enumerate(zip(loops, (signal.SIGTERM, signal.SIGKILL, signal.SIGINT), strict=True)):
            run.wait_line(f"^waiting {rank}")
            began = time.monotonic()
            os.kill(loop.pid, number)
            run.wait_line(f"^told {rank}")
            assert time.monotonic() - began < 2
            wait_until(lambda rank=rank: all(map(is_gone, pids[2 * rank : 2 * rank + 2])), 4)
            assert loop.finish().leftovers == ()
        run.finish().check()
