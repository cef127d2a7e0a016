"""What a mesh costs on 10, 100, 1,000 or 10,000 hosts of 8 procs: simulated, with the real runtime, under a virtual clock.

Everything above processes, clock and sockets is the product's code (`monarch.testing.universe`): geometry, routes, casts, host agents,
mailboxes, owners. What that code takes is measured while it runs and counted as time of the process that it stands for; what
is not executed has the costs below. One line each, `<what>_<hosts>_<measure> value unit`:

    time       s          virtual seconds from the call to its result; of a cast: until all is quiet
    messages   messages   all that were received, by anybody
    bytes      MiB        of those
    client_*              for how long the client's process was busy, and how many messages it sent and received
    agent_*               the same, of the host agent that was busy longest

and a remark on the process that was busy longest of all.

Read next: `docs/design/scale.md`.
"""

from __future__ import annotations

import argparse
import gc
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import measure

from monarch.actor import Actor, endpoint
from monarch.testing import Costs, Universe, universe

PROCS_PER_HOST = 8
MEASURED = Costs(
    within_host_s=50e-6,  # a wake-up across cores
    between_hosts_s=80e-6,  # the same, and 30 us for a wire and its switches
    message_s=10e-6,  # sendmsg at one end; epoll_wait and recv_into at the other
    copy_byte_s=0.2e-9,  # the kernel's copy at either end of TCP over loopback
    link_byte_s=1e-9,  # 1 GB/s: one stream of TCP over loopback, or a network of 10 Gbit/s
    connect_s=150e-6,  # connect and accept take 55 and 16 us; preface, proof and handing over the rest
    processor=1.0,
    start_proc_s=0.1,  # processor time of a warm fork until it listens
)
STATED = Costs(
    within_host_s=50e-6, between_hosts_s=80e-6, jitter=0.0, message_s=25e-6, copy_byte_s=0.2e-9, link_byte_s=1e-9, connect_s=150e-6
)
"""The same in every run: a message takes as long as a call of `bench/actors.py` takes its client, whatever is in it."""


Counts: TypeAlias = tuple[float, int, int, int, int]
"""Of a process: seconds busy, messages sent and received, bytes sent and received."""
_NOTHING = (0.0, 0, 0, 0, 0)


class Worker(Actor):
    """What the procs do."""

    @endpoint
    def take(self, content: bytes) -> None:
        """Nothing."""

    @endpoint
    def answer(self, nbytes: int) -> bytes:
        """So many bytes."""
        return bytes(nbytes)


class Ruler:
    """Measures what happens in a universe."""

    def __init__(self, world: Universe, hosts: int) -> None:
        self._world = world
        self._hosts = hosts

    def measure(self, name: str, happen: Callable[[], Any]) -> Any:
        """Let something happen, and print what it took."""
        world, network = self._world, self._world.network
        nodes = world._machines.nodes
        before = {uid: _counts(node) for uid, node in nodes.items()}
        began_s, messages, nbytes = world.now_s, network.messages, network.bytes
        world._scheduler.uncharge()  # what measuring takes is not the client's
        result = happen()
        prefix = f"{name}_{self._hosts}"
        measure.out(f"{prefix}_time", world.now_s - began_s, "s")
        world.settle()
        measure.out(f"{prefix}_messages", network.messages - messages, "messages")
        measure.out(f"{prefix}_bytes", (network.bytes - nbytes) / 2**20, "MiB")
        spent = {uid: _difference(_counts(node), before.get(uid, _NOTHING)) for uid, node in nodes.items()}
        for kind, busiest in _busiest(spent):
            busy_s, sent, received, _, _ = spent[busiest]
            measure.out(f"{prefix}_{kind}_busy", busy_s, "s")
            measure.out(f"{prefix}_{kind}_sent", sent, "messages")
            measure.out(f"{prefix}_{kind}_received", received, "messages")
        busiest = max(spent, key=spent.__getitem__)
        busy_s, sent, received, out, come = spent[busiest]
        flows = f"sent {sent} messages, {out / 2**20:.2f} MiB, received {received}, {come / 2**20:.2f} MiB"
        measure.remark(f"busiest: {nodes[busiest].label}, {busy_s:.4f} s; {flows}")
        return result


def _peak_mib() -> float:
    """The most memory that this process has had; `ru_maxrss` would be that of whoever has started it, if that had more."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"^VmHWM:\s+(\d+)", status, re.MULTILINE)[0]) / 1024


def _counts(node: Any) -> Counts:
    return node.busy_s, node.sent, node.received, node.bytes_sent, node.bytes_received


def _difference(now: Counts, then: Counts) -> Counts:
    return now[0] - then[0], now[1] - then[1], now[2] - then[2], now[3] - then[3], now[4] - then[4]


def _busiest(spent: dict[str, Counts]) -> list[tuple[str, str]]:
    kinds = {"client": "client<", "agent": "host@"}
    found = {kind: [uid for uid in spent if uid.startswith(start)] for kind, start in kinds.items()}
    return [(kind, max(uids, key=spent.__getitem__)) for kind, uids in found.items() if uids]


def simulate(hosts: int, costs: Costs) -> None:
    """All measures at one size."""
    started = measure.now()
    with universe(hosts=hosts, costs=costs, trace=0) as world:
        gc.disable()  # looking through the heap of all processes would be charged to one
        ruler = Ruler(world, hosts)
        _measure_calls(world, ruler)
        _ = world.faults
        gc.enable()
        measure.out(f"simulation_{hosts}_wall", measure.now() - started, "s")
        measure.out(f"simulation_{hosts}_memory", _peak_mib(), "MiB")


def _measure_calls(world: Universe, ruler: Ruler) -> None:
    procs = ruler.measure("spawn_procs", lambda: _ready(world.hosts.spawn_procs(per_host={"gpus": PROCS_PER_HOST}, name="trainer")))
    workers: Any = ruler.measure("spawn_actors", lambda: world.run(_alive(procs.spawn("worker", Worker))))

    def cast(content: bytes) -> None:
        workers.take.broadcast(content)
        world.settle()

    ruler.measure("cast_small", lambda: cast(b""))
    ruler.measure("cast_1MiB", lambda: cast(bytes(1 << 20)))
    ruler.measure("gather_small", lambda: workers.answer.call(0).get())
    ruler.measure("gather_4KiB", lambda: workers.answer.call(4096).get())
    _measure_failures(world, ruler, procs, workers)


def _measure_failures(world: Universe, ruler: Ruler, procs: Any, workers: Any) -> None:
    last = len(world.hosts) - 1

    def lose_proc() -> None:
        waiting = workers.slice(hosts=last, gpus=1).answer.call_one(0)
        world.kill(procs, hosts=last, gpus=1)
        waiting.exception()

    def lose_host(host: int) -> None:
        waiting = workers.slice(hosts=host).answer.call(0)
        world.kill(world.hosts, hosts=host)
        waiting.exception()

    def lose_agent_in_cast() -> None:
        waiting = workers.slice(hosts=slice(0, last - 1)).answer.call(0)
        world.advance(300e-6)
        world.kill(world.hosts, hosts=0)
        assert waiting.exception() is not None

    ruler.measure("lose_proc", lose_proc)
    ruler.measure("lose_host", lambda: lose_host(last - 1))
    ruler.measure("lose_agent_in_cast", lose_agent_in_cast)
    others = workers.slice(hosts=slice(1, last - 1))
    ruler.measure("gather_after_losses", lambda: others.answer.call(0).get())


def _ready(procs: Any) -> Any:
    procs.initialized.get()
    return procs


async def _alive(mesh: Any) -> Any:
    return await mesh


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[10, 100, 1000], help="sizes (default: 10 100 1000)")
    parser.add_argument("--stated", action="store_true", help="count messages, not processor time: equal in every run")
    parser.add_argument("--inline", action="store_true", help="in this interpreter, for profilers")
    options = parser.parse_args()
    for hosts in options.hosts:
        if options.inline:
            simulate(hosts, STATED if options.stated else MEASURED)
        else:  # memory is that of one size only
            extra = ["--stated"] if options.stated else []
            subprocess.run([sys.executable, __file__, "--inline", "--hosts", str(hosts), *extra], check=True)


if __name__ == "__main__":
    main()
