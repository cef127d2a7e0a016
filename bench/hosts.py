"""Many hosts, measured over network namespaces joined by veth: what a network costs against one host, and against raw sockets.

usage: hosts.py [--rounds N] [--peer PYTHON] [SECTION ...]      SECTION: calls, arrays, casts, kills, connects

Needs root on Linux with iproute2. Prints one `name value unit` a line. The client runs in one namespace, up to four worker
loops in others. `--peer` names an interpreter that has the package that ours is compatible with: the same program runs there
in turns, and its measures begin with `peer_`.

Measures:
    call_one_host, call_two_hosts, call_ratio   round trip of `call_one()`, Unix sockets against TCP over veth, in turns
    call_64_one_host, call_64_four_hosts        `call()` on 64 procs
    raw_tcp_64MiB, send_64MiB, take_64MiB       one way, between two hosts: a bare socket; to an actor; from an actor
    kill_proc_to_caller, kill_agent_to_caller   SIGKILL on another host until the pending call raises
    connect_bare, connect_proved                a connection until it can carry frames, without and with a secret
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from measure import now, out, percentile, remark, wait_listening

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
PORT = 26600
RAW_PORT = 26700
CLIENT_PORT = 26800
SECTIONS = ("calls", "arrays", "casts", "kills", "connects")
WAIT_S = 60.0
SECTION_S = 120.0
_TRANSPORT = "MONARCH_BENCH_TRANSPORT"
_LINE = re.compile(r"^(\w+) +(-?[\d.]+|nan|inf) (\S+)$")


# ------------------------------------------------------------------------------------------------- inside the namespaces


def serve(address: str) -> None:
    """Be a worker loop."""
    from monarch.actor import run_worker_loop_forever

    run_worker_loop_forever(address=address, ca="trust_all_connections")


def sink() -> None:
    """Take 64 MiB at a time from a bare socket, into memory that is used again, and say so."""
    listener = socket.create_server(("", RAW_PORT))
    memory = memoryview(bytearray(64 * MIB))
    while True:
        with listener.accept()[0] as sock:
            while _fill(sock, memory):
                sock.sendall(b"x")


def _fill(sock: socket.socket, memory: memoryview) -> bool:
    filled = 0
    while filled < len(memory):
        count = sock.recv_into(memory[filled:])
        if not count:
            return False
        filled += count
    return True


def _actor() -> Any:
    from monarch.actor import Actor, endpoint

    class Worker(Actor):
        """One of everything."""

        @endpoint
        def ping(self) -> None:
            return None

        @endpoint
        def take(self, array: Any) -> int:
            return int(array[0])

        @endpoint
        def give(self, num_bytes: int) -> Any:
            import numpy

            if not hasattr(self, "array"):
                self.array = numpy.ones(num_bytes, dtype=numpy.uint8)
            return self.array

        @endpoint
        def pids(self) -> tuple[int, int]:
            return os.getpid(), os.getppid()

        @endpoint
        def wait(self) -> None:
            time.sleep(3600)

    return Worker


@contextmanager
def attached(hosts: list[str]) -> Iterator[Any]:
    """The hosts as a mesh; their procs end with the block, and they stay."""
    from monarch.actor import attach_to_workers

    mesh: Any = attach_to_workers(ca="trust_all_connections", workers=[f"tcp://{ip}:{PORT}" for ip in hosts])
    mesh.initialized.get(timeout=WAIT_S)
    try:
        yield mesh
    finally:
        mesh.stop().get(timeout=WAIT_S)


def in_turns(calls: dict[str, Callable[[], object]], most: int, budget_s: float = 8.0) -> dict[str, list[float]]:
    """Seconds of each call, one after the other, so that a slow moment of the machine hits all."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(20):
        for call in calls.values():
            call()
    deadline = now() + budget_s
    while now() < deadline and len(next(iter(times.values()))) < most:
        for name, call in calls.items():
            began = now()
            call()
            times[name].append(now() - began)
    return times


def calls(hosts: list[str]) -> None:
    """One round trip."""
    from monarch.actor import this_host

    worker = _actor()
    with attached(hosts[:1]) as mesh:
        far = mesh.spawn_procs({"procs": 1}).spawn("far", worker).slice(hosts=0, procs=0)
        near = this_host().spawn_procs({"procs": 1}).spawn("near", worker).slice(procs=0)
        times = in_turns({"one_host": lambda: near.ping.call_one().get(WAIT_S), "two_hosts": lambda: far.ping.call_one().get(WAIT_S)}, 4000)
        for name, seconds in times.items():
            out(f"call_{name}_p50", statistics.median(seconds) * 1e6, "us")
            out(f"call_{name}_p99", percentile(seconds, 99) * 1e6, "us")
        out("call_ratio", statistics.median(times["two_hosts"]) / statistics.median(times["one_host"]), "x")


def arrays(hosts: list[str]) -> None:
    """64 MiB, one way."""
    import numpy

    array = numpy.ones(64 * MIB, dtype=numpy.uint8)
    with attached(hosts[:1]) as mesh, socket.create_connection((hosts[0], RAW_PORT)) as sock:
        one = mesh.spawn_procs({"procs": 1}).spawn("far", _actor()).slice(hosts=0, procs=0)

        def raw() -> None:
            sock.sendall(array.data)
            sock.recv(1)

        times = in_turns(
            {
                "raw_tcp": raw,
                "send": lambda: one.take.call_one(array).get(WAIT_S),
                "take": lambda: one.give.call_one(64 * MIB).get(WAIT_S),
            },
            12,
            budget_s=20.0,
        )
        for name, seconds in times.items():
            out(f"{name}_64MiB", 64 / 1024 / statistics.median(seconds), "GiB/s")
        for name in ("send", "take"):
            out(f"{name}_ratio", statistics.median(times["raw_tcp"]) / statistics.median(times[name]), "x")


def casts(hosts: list[str]) -> None:
    """A call on 64 procs."""
    from monarch.actor import this_host

    worker = _actor()
    with attached(hosts) as mesh:
        far = mesh.spawn_procs({"procs": 64 // len(hosts)}).spawn("far", worker)
        far.ping.call().get(WAIT_S)
        near = this_host().spawn_procs({"procs": 64}).spawn("near", worker)
        times = in_turns({"one_host": lambda: near.ping.call().get(WAIT_S), "four_hosts": lambda: far.ping.call().get(WAIT_S)}, 300)
        for name, seconds in times.items():
            out(f"call_64_{name}", statistics.median(seconds) * 1e3, "ms")
        out("call_64_ratio", statistics.median(times["four_hosts"]) / statistics.median(times["one_host"]), "x")


def kills(hosts: list[str]) -> None:
    """SIGKILL of a proc, and of a whole agent, until the pending call raises. Processes of all namespaces are seen from here."""
    import monarch.actor

    monarch.actor.unhandled_fault_hook = lambda failure: None
    worker = _actor()
    for what, rounds in (("proc", 15), ("agent", 1)):
        times: list[float] = []
        until = now() + SECTION_S / 4
        for _ in range(rounds):
            if now() > until:
                break
            with attached(hosts[:1]) as mesh:
                one = mesh.spawn_procs({"procs": 1}).spawn("far", worker).slice(hosts=0, procs=0)
                pid, _ = one.pids.call_one().get(WAIT_S)
                victim = pid if what == "proc" else _agent_of(pid)
                waiting = one.wait.call_one()
                time.sleep(0.1)
                began = now()
                os.kill(victim, signal.SIGKILL)
                assert waiting.exception(WAIT_S) is not None
                times.append(now() - began)
        out(f"kill_{what}_to_caller", statistics.median(times) * 1e3, "ms")


def _agent_of(pid: int) -> int:
    """The host agent above a proc: its zygote's parent, or on another implementation its parent."""
    parent = _parent_of(pid)
    command = Path(f"/proc/{_parent_of(parent)}/cmdline").read_bytes()
    return _parent_of(parent) if b"host_main" in command else parent


def _parent_of(pid: int) -> int:
    return int(re.findall(r"^PPid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M)[0])


def connects(hosts: list[str]) -> None:
    """A connection until it can carry frames: bare, and with preface, status and proofs. Ours only."""
    from monarch._base.addresses import parse_address
    from monarch._net.credentials import own_credentials
    from monarch._net.dialer import Dialer, Route
    from monarch._net.loop import NetLoop
    from monarch._runtime.future import Future

    loop = NetLoop("bench-connects")
    loop.start()
    address = parse_address(f"tcp://{hosts[0]}:{PORT}")

    def bare() -> None:
        with socket.create_connection((hosts[0], RAW_PORT)) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def proved() -> None:
        done: Future[Any] = Future._new()
        dialer = Dialer(loop, Route(address, ""), own_credentials(), done._complete, lambda denial: done._fail(OSError(denial.reason)))
        loop.call_soon(dialer.start)
        done.get(WAIT_S).close()

    times = in_turns({"bare": bare, "proved": proved}, 500)
    for name, seconds in times.items():
        out(f"connect_{name}", statistics.median(seconds) * 1e6, "us")
    loop.stop()
    loop.join(5)


# ------------------------------------------------------------------------------------------------------------- outside


def measure_side(rig: Any, python: str, section: str, prefix: str) -> None:
    """Run one section on one implementation."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "bench")}
    environment.pop("MONARCH_SECRET", None)
    hosts = list(rig)
    if prefix:  # there the client listens as well
        environment[_TRANSPORT] = f"tcp://{rig.client.ip}:{CLIENT_PORT}"
    processes = [
        host.run([python, __file__, "--serve", f"tcp://{host.ip}:{PORT}"], env=environment, stdout=subprocess.DEVNULL) for host in hosts
    ]
    processes.append(hosts[0].run([python, __file__, "--sink"], env=environment))
    try:
        for host in hosts:
            wait_listening(host.ip, PORT, host)
        wait_listening(hosts[0].ip, RAW_PORT, hosts[0])
        client = rig.client.run(
            [python, __file__, "--client", section, json.dumps([host.ip for host in hosts])],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            text, _ = client.communicate(timeout=SECTION_S)
        except subprocess.TimeoutExpired:
            client.kill()
            text, _ = client.communicate()
            remark(f"{prefix}{section} was not over within {SECTION_S:g} s")
        for line in text.splitlines():
            match = _LINE.match(line)
            if match:
                out(prefix + match[1], float(match[2]), match[3])
        if client.returncode:
            remark(f"{prefix}{section} failed: exit status {client.returncode}")
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], metavar="SECTION")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--peer", help="interpreter of the other implementation")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--sink", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--client", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
    elif options.sink:
        sink()
    elif options.client:
        if transport := os.environ.get(_TRANSPORT):
            from monarch.actor import enable_transport

            enable_transport(transport)
        globals()[options.client[0]](json.loads(options.client[1]))
    else:
        sys.path.insert(0, str(ROOT / "tests"))
        from system.hosts import Hosts

        with Hosts(("a", "b", "c", "d")) as rig:
            for _ in range(options.rounds):
                for section in options.sections or SECTIONS:
                    measure_side(rig, sys.executable, section, "")
                    if options.peer and section != "connects":
                        measure_side(rig, options.peer, section, "peer_")


if __name__ == "__main__":
    main()
