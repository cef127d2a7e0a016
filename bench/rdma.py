"""One-sided memory against what the machine can do: the kernel's copy on one host, raw sockets between two.

usage: rdma.py [--rounds N] [--mib N] [--peer PYTHON] [SECTION ...]      SECTION: local, network, weights, weights_hosts, nixl

Every round measures ours and the floors in turns, so that a slow moment of the machine hits all; values are medians, ratios
are medians of the ratios of each round. `network` needs root on Linux with iproute2: owner and reader are in two network
namespaces joined by veth; so does `weights_hosts`. Prints one `name value unit` a line.

Measures:
    memcpy, vm_readv         floors: a copy within a process; `process_vm_readv` by one thread
    raw_tcp                  floor: as many connections as ours has, a thread each, `sendall` into `recv_into`
    read, write              through the public API; `..._spin` while the owner spins in Python
    network_pull             weights of another host into arrays that are there
    read_over_vm_readv       and the like: ours over the floor, in bandwidth
    batch_1000x4KiB          one action of 1,000 reads
    ways_...                 of one host: ours by the kernel (cma) and by TCP (tcp), and NIXL by the kernel and by TCP, if it is installed
    register, handle         making a buffer of the largest size; bytes of it pickled
    weights_pull             1 or 4 readers of one host pull the same version at once; `..._4_over_1`: their time over that of one
    weights_mapped           the same with `mapped()`: the slowest reader's own time, less than a message takes; `..._summed`: with a
                             look at every byte
    weights_hosts            one reader on each of 1 or 3 hosts with relays, at `LINK_RATE`; floor: the bytes over that rate
    weights_link             what the learner's link carries for it, in versions
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import pickle
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from measure import now, out, remark, wait_listening

ROOT = Path(__file__).resolve().parents[1]
KIB, MIB = 1 << 10, 1 << 20
PORT, RAW_PORT = 26600, 26700
SECTIONS = ("local", "network", "weights", "weights_hosts", "nixl")
READERS, RELAYED = 4, 3
LINK_RATE, LINK_MIB = "200mbit", 64
"""Slow enough that two processors move the bytes of four hosts."""
WAYS = {
    "cma": {"MONARCH_RDMA_TRANSPORTS": "cma"},
    "tcp": {"MONARCH_RDMA_TRANSPORTS": "tcp"},
    "nixl_cma": {"MONARCH_RDMA_TRANSPORTS": "nixl"},
    "nixl_tcp": {"MONARCH_RDMA_TRANSPORTS": "nixl", "UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"},
}
"""Variables for each way of one host."""
CONNECTIONS = 4
WAIT_S = 60.0
_REQUEST = struct.Struct("<QQ")
"""Where the bytes begin, and how many."""


def label(nbytes: int) -> str:
    return f"{nbytes // KIB}KiB" if nbytes < MIB else f"{nbytes // MIB}MiB"


def sizes_up_to(mib: int) -> list[int]:
    return [size for size in (4 * KIB, MIB, 64 * MIB, 1024 * MIB) if size <= mib * MIB]


def repeats(nbytes: int) -> int:
    return {4 * KIB: 200, MIB: 30}.get(nbytes, 1)


def owner_class() -> Any:
    from monarch.actor import Actor, endpoint
    from monarch.rdma import RDMABuffer

    class Owner(Actor):
        """Publishes memory, and spins."""

        def __init__(self, nbytes: int) -> None:
            self.memory = bytearray(b"\1") * nbytes
            self.parts = [bytearray(4 * KIB) for _ in range(1000)]

        @endpoint
        def publish(self) -> tuple[Any, list[Any], float, int, int]:
            began = now()
            buffer = RDMABuffer(self.memory)
            seconds = now() - began
            address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
            return buffer, [RDMABuffer(part) for part in self.parts], seconds, os.getpid(), address

        @endpoint
        def spin(self, seconds: float) -> None:
            end = now() + seconds
            while now() < end:
                pass

    return Owner


def seconds_of(call: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times):
        began = now()
        call()
        taken.append(now() - began)
    return statistics.median(taken)


class Table:
    """Seconds by name, one per round."""

    def __init__(self) -> None:
        self.rows: dict[str, list[float]] = {}

    def add(self, name: str, seconds: float) -> None:
        self.rows.setdefault(name, []).append(seconds)

    def show(self, prefix: str, nbytes: int) -> None:
        for name, times in self.rows.items():
            median = statistics.median(times)
            if nbytes < MIB:
                out(f"{prefix}{name}_{label(nbytes)}", median * 1e6, "us")
            else:
                out(f"{prefix}{name}_{label(nbytes)}", nbytes / median / 2**30, "GiB/s")

    def ratio(self, prefix: str, ours: str, floor: str, nbytes: int) -> None:
        pairs = zip(self.rows[ours], self.rows[floor], strict=True)
        out(f"{prefix}{ours}_over_{floor}_{label(nbytes)}", statistics.median([low / own for own, low in pairs]), "x")


class Side:
    """The other implementation, in a process of its own."""

    def __init__(self, python: str, sizes: list[int]) -> None:
        command = [python, str(ROOT / "bench" / "rdma_side.py"), json.dumps(sizes)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.register_s = self._answer()

    def seconds(self, name: str, nbytes: int, times: int) -> float:
        assert self._process.stdin is not None
        print(json.dumps([name, nbytes, times]), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> float:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line[0].isdigit():
                return float(line)
        raise RuntimeError(f"the other side has ended: exit status {self._process.wait()}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(WAIT_S)


def local(rounds: int, mib: int, peer: str | None) -> None:
    """Owner and reader on one host."""
    from monarch.actor import shutdown_context, this_host

    sizes = sizes_up_to(mib)
    owner = this_host().spawn_procs({"owners": 1}).spawn("owner", owner_class(), sizes[-1])
    buffer, parts, seconds, pid, address = owner.publish.call_one().get(WAIT_S)
    out("register_first", seconds * 1e3, "ms")
    out("register_again", owner.publish.call_one().get(WAIT_S)[2] * 1e3, "ms")
    out("handle_pickled", len(pickle.dumps(buffer)), "bytes")
    target, other = bytearray(b"\2") * sizes[-1], bytearray(b"\3") * sizes[-1]
    side = Side(peer, sizes) if peer else None
    for nbytes in sizes:
        _local_size(rounds, nbytes, owner, buffer, pid, address, target, other, side)
    _batch("", rounds, parts, target)
    if side is not None:
        out("peer_register_first", side.register_s * 1e3, "ms")
        out("peer_batch_1000x4KiB", side.seconds("batch", 0, rounds) * 1e3, "ms")
        side.close()
    shutdown_context().get(WAIT_S)


def _local_size(
    rounds: int, nbytes: int, owner: Any, buffer: Any, pid: int, address: int, target: bytearray, other: bytearray, side: Side | None
) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    near = ctypes.addressof(ctypes.c_char.from_buffer(target))
    here, there = struct.pack("2Q", near, nbytes), struct.pack("2Q", address, nbytes)
    one, view = buffer[:nbytes], memoryview(target)[:nbytes]
    aside = memoryview(other)[:nbytes]
    far = ctypes.addressof(ctypes.c_char.from_buffer(other))
    table, theirs = Table(), Table()
    calls: dict[str, Callable[[], object]] = {
        "memcpy": lambda: ctypes.memmove(near, far, nbytes),
        "vm_readv": lambda: libc.process_vm_readv(pid, here, 1, there, 1, 0),
        "read": lambda: one.read_into(view).get(WAIT_S),
        "write": lambda: one.write_from(aside).get(WAIT_S),
    }
    for number in range(rounds + 1):
        for name, call in calls.items():
            seconds = seconds_of(call, repeats(nbytes))
            if number:
                table.add(name, seconds)
        if side is not None:
            for name in ("read", "write"):
                seconds = side.seconds(name, nbytes, repeats(nbytes))
                if number:
                    theirs.add(name, seconds)
    spinning = owner.spin.call_one(_spin_s(table.rows["read"], nbytes, rounds))
    for _ in range(rounds):
        table.add("read_spin", seconds_of(calls["read"], repeats(nbytes)))
    spinning.get(WAIT_S)
    table.show("local_", nbytes)
    table.ratio("local_", "read", "vm_readv", nbytes)
    table.ratio("local_", "write", "vm_readv", nbytes)
    theirs.show("peer_local_", nbytes)


def _spin_s(times: list[float], nbytes: int, rounds: int) -> float:
    return 0.3 + 3 * max(times) * repeats(nbytes) * rounds


def _batch(prefix: str, rounds: int, parts: list[Any], target: bytearray) -> None:
    from monarch.rdma import RDMAAction

    action = RDMAAction()
    for number, part in enumerate(parts):
        action.read_remote(memoryview(target)[number * 4 * KIB : (number + 1) * 4 * KIB], part)
    times = [seconds_of(lambda: action.submit().get(WAIT_S), 1) for _ in range(5 * rounds)]
    out(f"{prefix}batch_1000x4KiB", statistics.median(times) * 1e3, "ms")


# ------------------------------------------------------------------------------------------------------------- by NIXL


@contextmanager
def owner_at(ip: str, nbytes: int) -> Iterator[tuple[Any, Any, Any, list[Any]]]:
    """An owner at the worker loop at `ip`, until the end of the block: the mesh, the owner, its buffer of so many bytes, its small ones."""
    from monarch.actor import attach_to_workers, shutdown_context

    mesh: Any = attach_to_workers(ca="trust_all_connections", workers=[f"tcp://{ip}:{PORT}"])
    mesh.initialized.get(WAIT_S)
    owner = mesh.spawn_procs({"owners": 1}).spawn("owner", owner_class(), nbytes)
    buffer, parts, _, _, _ = owner.publish.call_one().get(WAIT_S)
    yield mesh, owner, buffer, parts
    mesh.stop().get(WAIT_S)
    shutdown_context().get(WAIT_S)


def one_way(name: str, rounds: int, mib: int) -> None:
    """Owner and reader on one host, and one transport between them. The owner's agent listens, so that TCP leads to it."""
    sizes = [size for size in sizes_up_to(mib) if size <= 64 * MIB]
    with owner_at("127.0.0.1", sizes[-1]) as (_, _, buffer, parts):
        _measure_way(name, rounds, sizes, buffer, parts)


def _measure_way(name: str, rounds: int, sizes: list[int], buffer: Any, parts: list[Any]) -> None:
    target = memoryview(bytearray(b"\2") * sizes[-1])
    out(f"ways_first_{name}", seconds_of(lambda: buffer[:1].read_into(target).get(WAIT_S), 1) * 1e3, "ms")
    for nbytes in sizes:
        one, view, table = buffer[:nbytes], target[:nbytes], Table()
        for number in range(rounds + 1):
            for what, transfer in (("read", one.read_into), ("write", one.write_from)):
                seconds = seconds_of(lambda transfer=transfer, view=view: transfer(view).get(WAIT_S), repeats(nbytes))  # type: ignore[misc]
                if number:
                    table.add(f"{what}_{name}", seconds)
        table.show("ways_", nbytes)
    _batch(f"ways_{name}_", rounds, parts, bytearray(4 * MIB))


def nixl(rounds: int, mib: int) -> None:
    """Each way in a process of its own, because a process keeps the transports that it began with."""
    installed = importlib.util.find_spec("nixl_cu12") or importlib.util.find_spec("nixl_cu13")
    if not installed:
        remark("NIXL is not installed: ours alone")
    for name, variables in WAYS.items():
        if installed or not name.startswith("nixl"):
            environment = {**os.environ, **variables, "PYTHONPATH": str(ROOT / "bench")}
            worker = subprocess.Popen([sys.executable, "-c", worker_loop("127.0.0.1")], env=environment, stdout=subprocess.DEVNULL)
            try:
                wait_listening("127.0.0.1", PORT)
                command = [sys.executable, __file__, "--way", json.dumps([name, rounds, mib])]
                subprocess.run(command, env=environment, check=False, timeout=240)
            finally:
                worker.kill()
                worker.wait()


def worker_loop(ip: str) -> str:
    """A script that starts procs for whoever attaches."""
    return f"from monarch.actor import run_worker_loop_forever as f; f(address='tcp://{ip}:{PORT}', ca='trust_all_connections')"


# --------------------------------------------------------------------------------------------------- between namespaces


def raw_server() -> None:
    """Send so many bytes as are asked for, on each connection."""
    listener = socket.create_server(("", RAW_PORT))
    memory = memoryview(bytearray(b"\1") * (256 * MIB))

    def serve(sock: socket.socket) -> None:
        with sock:
            while len(request := sock.recv(_REQUEST.size, socket.MSG_WAITALL)) == _REQUEST.size:
                start, nbytes = _REQUEST.unpack(request)
                sock.sendall(memory[start : start + nbytes])

    while True:
        sock = listener.accept()[0]
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=serve, args=(sock,), daemon=True).start()


def raw_read(socks: list[socket.socket], view: memoryview) -> None:
    """The floor: a share of the bytes on each connection."""
    share = max(len(view) // len(socks), 1)
    if len(view) < 8 * MIB:
        socks, share = socks[:1], len(view)

    def take(number: int) -> None:
        part = view[number * share : (number + 1) * share]
        socks[number].sendall(_REQUEST.pack(number * share, len(part)))
        done = 0
        while done < len(part):
            done += socks[number].recv_into(part[done:], 0, socket.MSG_WAITALL)

    others = [threading.Thread(target=take, args=(number,)) for number in range(1, len(socks))]
    for thread in others:
        thread.start()
    take(0)
    for thread in others:
        thread.join()


def network_client(ip: str, rounds: int, mib: int) -> None:
    """Owner on another host."""
    sizes = [size for size in sizes_up_to(mib) if size <= 256 * MIB]
    with owner_at(ip, sizes[-1]) as (mesh, owner, buffer, parts):
        _measure_network(ip, rounds, sizes, mesh, owner, buffer, parts)


def _measure_network(ip: str, rounds: int, sizes: list[int], mesh: Any, owner: Any, buffer: Any, parts: list[Any]) -> None:
    socks = [socket.create_connection((ip, RAW_PORT)) for _ in range(CONNECTIONS)]
    for sock in socks:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    target = bytearray(b"\2") * sizes[-1]
    for nbytes in sizes:
        one, view, table = buffer[:nbytes], memoryview(target)[:nbytes], Table()
        calls: dict[str, Callable[[], object]] = {
            "raw_tcp": lambda view=view: raw_read(socks, view),  # type: ignore[misc]
            "read": lambda one=one, view=view: one.read_into(view).get(WAIT_S),  # type: ignore[misc]
            "write": lambda one=one, view=view: one.write_from(view).get(WAIT_S),  # type: ignore[misc]
        }
        for number in range(rounds + 1):
            for name, call in calls.items():
                seconds = seconds_of(call, repeats(nbytes))
                if number:
                    table.add(name, seconds)
        spinning = owner.spin.call_one(2 * _spin_s(table.rows["read"], nbytes, rounds))
        for _ in range(rounds):
            table.add("raw_tcp_spin", seconds_of(calls["raw_tcp"], repeats(nbytes)))
            table.add("read_spin", seconds_of(calls["read"], repeats(nbytes)))
        spinning.get(WAIT_S)
        table.show("network_", nbytes)
        table.ratio("network_", "read", "raw_tcp", nbytes)
        table.ratio("network_", "write", "raw_tcp", nbytes)
        table.ratio("network_", "read_spin", "raw_tcp_spin", nbytes)
    _batch("network_", rounds, parts, bytearray(4 * MIB))
    _network_pull(rounds, mesh, socks, memoryview(target)[: min(sizes[-1], 64 * MIB)])
    for sock in socks:
        sock.close()


def _network_pull(rounds: int, mesh: Any, socks: list[socket.socket], view: memoryview) -> None:
    learner_class, reader_class = weight_classes()
    learner = mesh.spawn_procs({"learners": 1}).spawn("learner", learner_class, len(view))
    weights = learner.start.call_one(None).get(WAIT_S)
    into = reader_class(weights).into
    table = Table()
    for number in range(rounds + 1):
        for name, call in (("raw_tcp", lambda: raw_read(socks, view)), ("pull", lambda: weights.pull(into))):
            seconds = seconds_of(call, 1)
            if number:
                table.add(name, seconds)
    table.ratio("network_", "pull", "raw_tcp", len(view))
    learner.close.call_one().get(WAIT_S)


def network(rounds: int, mib: int) -> None:
    """Two namespaces: a worker loop and the raw server in one, the client in the other."""
    sys.path.insert(0, str(ROOT / "tests"))
    from system.hosts import Hosts

    environment = {**os.environ, "PYTHONPATH": str(ROOT / "bench"), "MONARCH_RDMA_TRANSPORTS": "tcp"}
    environment.pop("MONARCH_SECRET", None)
    with Hosts() as rig:
        a, b = rig[:2]
        processes = [
            a.run(worker_loop(a.ip), env=environment, stdout=subprocess.DEVNULL),
            a.run([sys.executable, __file__, "--raw"], env=environment),
        ]
        try:
            for port in (PORT, RAW_PORT):
                wait_listening(a.ip, port, a)
            client = b.run([sys.executable, __file__, "--client", json.dumps([a.ip, rounds, mib])], env=environment)
            if client.wait(240):
                remark(f"network failed: exit status {client.returncode}")
        finally:
            for process in processes:
                process.kill()
                process.wait()


# --------------------------------------------------------------------------------------------------------------- weights


def weight_classes() -> tuple[Any, Any]:
    import numpy as np

    from monarch.actor import Actor, endpoint
    from monarch.rdma import WeightPublisher

    class Learner(Actor):
        """Publishes 16 arrays."""

        def __init__(self, nbytes: int) -> None:
            self.state = {f"layer{number}": np.ones(nbytes // 16 // 4, np.float32) for number in range(16)}

        @endpoint
        def start(self, hosts: Any) -> Any:
            self.publisher = WeightPublisher(self.state, hosts=hosts)
            return self.publisher.weights

        @endpoint
        def publish(self) -> float:
            began = now()
            self.publisher.publish(self.state)
            return now() - began

        @endpoint
        def close(self) -> None:
            self.publisher.close()

    class Reader(Actor):
        """Reads them in every way."""

        def __init__(self, handle: Any) -> None:
            self.weights = handle
            self.into = {name: np.zeros(part.shape, part.dtype) for name, part in handle.parts.items()}
            self.mapped: Any = None

        @endpoint
        def pull(self) -> int:
            return int(self.weights.pull(self.into))

        @endpoint
        def map(self) -> float:
            began = now()
            self.mapped = self.weights.mapped()
            return now() - began

        @endpoint
        def sum(self) -> float:
            return float(sum(value.sum() for value in self.mapped.values()))

        @endpoint
        def unmap(self) -> None:
            self.mapped.close()

    return Learner, Reader


def weights(rounds: int, mib: int) -> None:
    """Publisher and readers on one host."""
    from monarch.actor import shutdown_context, this_host

    learner_class, reader_class = weight_classes()
    nbytes = mib * MIB
    procs = this_host().spawn_procs({"procs": 1 + READERS})
    learner = procs.slice(procs=0).spawn("learner", learner_class, nbytes)
    readers = procs.slice(procs=slice(1, None)).spawn("readers", reader_class, learner.start.call_one(None).get(WAIT_S))
    table, publishing = Table(), []
    for number in range(rounds + 1):
        publishing.append(learner.publish.call_one().get(WAIT_S))
        for count in (1, READERS):
            some = readers.slice(procs=slice(0, count))
            pull = seconds_of(lambda some=some: some.pull.call().get(WAIT_S), 1)  # type: ignore[misc]
            mapped = max(some.map.call().get(WAIT_S).values())
            summed = mapped + seconds_of(lambda some=some: some.sum.call().get(WAIT_S), 1)  # type: ignore[misc]
            some.unmap.call().get(WAIT_S)
            for name, seconds in (("pull", pull), ("mapped", mapped), ("mapped_summed", summed)):
                if number:
                    table.add(f"{name}_{count}", seconds)
    out(f"weights_publish_{label(nbytes)}", statistics.median(publishing), "s")
    for name, taken in table.rows.items():
        out(f"weights_{name}_{label(nbytes)}", statistics.median(taken), "s")
    for name in ("pull", "mapped", "mapped_summed"):
        pairs = zip(table.rows[f"{name}_{READERS}"], table.rows[f"{name}_1"], strict=True)
        out(f"weights_{name}_{READERS}_over_1_{label(nbytes)}", statistics.median([many / one for many, one in pairs]), "x")
    learner.close.call_one().get(WAIT_S)
    shutdown_context().get(WAIT_S)


def weights_client(addresses: list[str], ready: str, links: list[str], rounds: int) -> None:
    """A learner on the first host, readers and relays on the others."""
    from monarch.actor import attach_to_workers, shutdown_context

    learner_class, reader_class = weight_classes()
    nbytes = LINK_MIB * MIB
    mesh: Any = attach_to_workers(ca="trust_all_connections", workers=addresses)
    mesh.initialized.get(WAIT_S)
    procs = mesh.spawn_procs()
    learner = procs.slice(hosts=0).spawn("learner", learner_class, nbytes)
    handle = learner.start.call_one(mesh).get(WAIT_S)
    readers = procs.slice(hosts=slice(1, None)).spawn("readers", reader_class, handle)
    readers.pull.call().get(WAIT_S)
    Path(ready).touch()
    while Path(ready).exists():  # until the links are slow
        time.sleep(0.01)
    table = Table()
    for _ in range(rounds):
        for count in (1, RELAYED):
            learner.publish.call_one().get(WAIT_S)
            some, before = readers.slice(hosts=slice(0, count)), sent_bytes(links)
            table.add(f"hosts_{count}", seconds_of(lambda some=some: some.pull.call().get(WAIT_S), 1))  # type: ignore[misc]
            table.add(f"link_{count}", (sent_bytes(links) - before) / nbytes)
    for name, values in table.rows.items():
        out(f"weights_{name}_{label(nbytes)}", statistics.median(values), "s" if name.startswith("hosts") else "x")
    pairs = zip(table.rows[f"hosts_{RELAYED}"], table.rows["hosts_1"], strict=True)
    out(f"weights_hosts_{RELAYED}_over_1_{label(nbytes)}", statistics.median([many / one for many, one in pairs]), "x")
    learner.close.call_one().get(WAIT_S)
    mesh.stop().get(WAIT_S)
    shutdown_context().get(WAIT_S)


def sent_bytes(link: list[str]) -> int:
    """By the link that `ip` is to show with these arguments."""
    done = subprocess.run(["ip", *link], capture_output=True, text=True, check=True)
    return int(json.loads(done.stdout)[0]["stats64"]["tx"]["bytes"])


def weights_hosts(rounds: int, mib: int) -> None:
    """Four namespaces, whose links are slow, and a client."""
    sys.path.insert(0, str(ROOT / "tests"))
    from system.hosts import Hosts

    environment = {**os.environ, "PYTHONPATH": str(ROOT / "bench"), "MONARCH_RDMA_TRANSPORTS": "tcp"}
    environment.pop("MONARCH_SECRET", None)
    with Hosts() as rig, tempfile.TemporaryDirectory() as folder:
        learner_host, *others = rig[: 1 + RELAYED]
        processes = []
        for host in (learner_host, *others):
            address = f"tcp://{host.ip}:{PORT}"
            server = f"from monarch.actor import run_worker_loop_forever as f; f(address={address!r}, ca='trust_all_connections')"
            processes.append(host.run(server, env=environment, stdout=subprocess.DEVNULL))
        ready = Path(folder) / "ready"
        link = ["-n", str(learner_host.namespace), "-json", "-s", "link", "show", "dev", learner_host.interface]
        addresses = [f"tcp://{host.ip}:{PORT}" for host in (learner_host, *others)]
        options = json.dumps([addresses, str(ready), link, rounds])
        client = subprocess.Popen([sys.executable, __file__, "--weights-client", options], env=environment)
        try:
            while not ready.exists() and client.poll() is None:
                time.sleep(0.05)
            for host in (learner_host, *others):
                host.limit(LINK_RATE)
            ready.unlink(missing_ok=True)
            if client.wait(240):
                remark(f"weights_hosts failed: exit status {client.returncode}")
        finally:
            for process in (*processes, client):
                process.kill()
                process.wait()
    out(f"weights_hosts_floor_{label(LINK_MIB * MIB)}", LINK_MIB * MIB * 8 / (int(LINK_RATE.removesuffix("mbit")) * 1e6), "s")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], metavar="SECTION")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=1024, help="largest size")
    parser.add_argument("--peer", help="interpreter of the other implementation")
    parser.add_argument("--raw", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--weights-client", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.raw:
        raw_server()
    elif options.client:
        network_client(*json.loads(options.client))
    elif options.way:
        one_way(*json.loads(options.way))
    elif options.weights_client:
        weights_client(*json.loads(options.weights_client))
    else:
        for section in options.sections or SECTIONS:
            if section == "local":
                local(options.rounds, options.mib, options.peer)
            else:
                {"network": network, "weights": weights, "weights_hosts": weights_hosts, "nixl": nixl}[section](options.rounds, options.mib)


if __name__ == "__main__":
    main()
