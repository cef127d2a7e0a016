"""Measuring, for every program of this folder: sections in interpreters of their own, timed calls, memory, raw floors.

A measure is one line `name value unit` on standard output; lines that start with `#` are remarks. Nothing here knows
the product or a peer, so that all of them are measured by the same code.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

now = time.perf_counter
_MARK = "MONARCH_BENCH_RUN"


def out(name: str, value: float, unit: str) -> None:
    print(f"{name:32s} {value:14.4f} {unit}", flush=True)


def percentile(values: list[float], percent: float) -> float:
    """The value that `percent` of them do not exceed, by rank; nan of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else float("nan")


def remark(text: str) -> None:
    print(f"# {text}", flush=True)


def wait_listening(ip: str, port: int, host: Any = None, *, limit_s: float = 60.0) -> None:
    """Wait until somebody listens at a port.

    Args:
        host: of a rig (`tests/system/hosts.py`), from which it is tried; None: from here.

    Raises:
        TimeoutError: nobody does within `limit_s`.
    """
    deadline = now() + limit_s
    while now() < deadline:
        with _inside(host), socket.socket() as probe:
            if probe.connect_ex((ip, port)) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError(f"nothing listens at {ip}:{port}")


def _inside(host: Any) -> AbstractContextManager[None]:
    if host is None:
        return nullcontext()
    from system.hosts import inside

    return inside(host)


# ------------------------------------------------------------------------------------------------------------ sections


def main(file: str, doc: str, sections: Mapping[str, Callable[[], None]]) -> None:
    """Run the sections that the command line names, each in a fresh interpreter with a time limit.

    A section `spawn:16` is one size of the group `spawn`; a size is left out when, at the pace of the smaller ones, it would
    not end within the limit.
    """
    groups = list(dict.fromkeys(name.split(":")[0] for name in sections))
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    known = f"groups ({', '.join(groups)}) or one size such as spawn:16; default: all"
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=known)
    parser.add_argument("--max-procs", type=int, default=256, help="leave out larger meshes (default 256)")
    parser.add_argument("--limit-s", type=float, default=120.0, help="seconds that one section may take (default 120)")
    parser.add_argument("--inline", action="store_true", help="run the one SECTION here, without a limit (for profilers)")
    options = parser.parse_args()
    unknown = [name for name in options.sections if name not in sections and name not in groups]
    if unknown:
        parser.error(f"no section {unknown[0]!r}; known: {', '.join([*groups, *sections])}")
    wanted = [name for name in sections if not options.sections or {name, name.split(":")[0]} & set(options.sections)]
    if options.inline:
        for name in wanted:
            sections[name]()
        return
    seen: dict[str, list[tuple[int, float]]] = {}
    for name in wanted:
        group, _, digits = name.partition(":")
        size = int(digits or 0)
        guess = _predict(seen.setdefault(group, []), size)
        if size > options.max_procs:
            remark(f"left out {name}: --max-procs {options.max_procs}")
        elif size and guess > options.limit_s:
            remark(f"left out {name}: it would take about {guess:.0f} s at the pace of the smaller sizes, limit {options.limit_s:g} s")
        else:
            seen[group].append((size, _run_section(file, name, options.limit_s)))


def _predict(seen: list[tuple[int, float]], size: int) -> float:
    """Seconds that `size` would take if time went on growing as between the last two sizes; 0 when there are not two."""
    if any(seconds == float("inf") for _, seconds in seen):
        return float("inf")
    if len(seen) < 2:
        return 0.0
    (smaller, less), (larger, more) = seen[-2:]
    return more + (more - less) / (larger - smaller) * (size - larger)


def _run_section(file: str, name: str, limit_s: float) -> float:
    """Run one section in a child; returns its seconds, infinite when it hit the limit or failed."""
    mark = uuid.uuid4().hex
    started = now()
    child = subprocess.Popen([sys.executable, file, "--inline", name], env={**os.environ, _MARK: mark}, start_new_session=True)
    try:
        status: int | str = child.wait(limit_s)
    except subprocess.TimeoutExpired:
        status = f"still running after {limit_s:g} s"
    seconds = now() - started
    left = [pid for pid in _marked(mark) if pid != child.pid]
    if status == 0 and left:
        time.sleep(1.0)
        left = _marked(mark)
        if left:
            remark(f"{name}: {len(left)} processes were left behind")
    for pid in _marked(mark):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    child.wait()
    if status != 0:
        remark(f"{name} failed: {status if isinstance(status, str) else f'exit status {status}'}")
        return float("inf")
    return seconds


def _marked(mark: str) -> list[int]:
    wanted = f"{_MARK}={mark}".encode()
    return [pid for pid in _pids() if wanted in _read(f"/proc/{pid}/environ") and b"\nState:\tZ" not in _read(f"/proc/{pid}/status")]


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


# --------------------------------------------------------------------------------------------------------------- times


def time_calls(call: Callable[[], object], most: int, budget_s: float = 5.0, warm_up: int = 50) -> list[float]:
    """Sorted seconds of up to `most` calls; fewer when they do not fit into `budget_s`, at least three."""
    deadline = now() + budget_s / 5
    for _ in range(min(warm_up, most)):
        if now() > deadline:
            break
        call()
    times: list[float] = []
    deadline = now() + budget_s
    while len(times) < most and (len(times) < 3 or now() < deadline):
        started = now()
        call()
        times.append(now() - started)
    return sorted(times)


def out_latency(name: str, times: list[float], *, p99: bool = True) -> None:
    out(f"{name}_p50", statistics.median(times) * 1e6, "us")
    if p99 and len(times) >= 100:
        out(f"{name}_p99", times[int(len(times) * 0.99)] * 1e6, "us")


def out_rate(name: str, unit: str, repeat: Callable[[int], object], *, first: int = 500, most: int = 20_000, target_s: float = 1.0) -> None:
    """Print how many per second `repeat(count)` does; the count is chosen so that a run takes about `target_s`."""
    started = now()
    repeat(first)
    count = max(first, min(most, int(first / (now() - started) * target_s)))
    rates = []
    for _ in range(3):
        started = now()
        repeat(count)
        rates.append(count / (now() - started))
    out(name, statistics.median(rates), unit)


SIZES = {"1KiB": 1 << 10, "64KiB": 64 << 10, "1MiB": 1 << 20, "16MiB": 16 << 20, "64MiB": 64 << 20, "256MiB": 256 << 20}
"""Bytes of the arrays that travel, by the label in a measure's name."""


def out_transfer(name: str, label: str, call: Callable[[], object], *, ways: int) -> None:
    """Print the median of a call that moves an array of `SIZES[label]` `ways` times: as time when small, else as rate.

    From 16 MiB on, also the mean of the very first five (`_early`): there the receiver's memory is touched for the first time, which
    costs several times the copy itself, and which a program that moves a large array only now and then meets every time.
    """
    num_bytes = SIZES[label]
    if num_bytes >= 16 << 20:
        early = statistics.mean(time_calls(call, most=5, warm_up=0))
        out(f"{name}_{label}_early", ways * num_bytes / 2**30 / early, "GiB/s")
    seconds = statistics.median(time_calls(call, most=300 if num_bytes < 1 << 20 else 20, budget_s=2.0, warm_up=3))
    if num_bytes < 1 << 20:
        out(f"{name}_{label}", seconds * 1e6, "us")
    else:
        out(f"{name}_{label}", ways * num_bytes / 2**30 / seconds, "GiB/s")


def out_import(statement: str) -> None:
    """Print the median milliseconds of `statement` in fresh interpreters, byte code cached."""
    source = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
    times = [float(subprocess.run([sys.executable, "-c", source], capture_output=True, check=True).stdout) for _ in range(10)]
    out("import", statistics.median(times[1:]) * 1e3, "ms")


# -------------------------------------------------------------------------------------------------------------- memory


def unique_mib(pid: int) -> float:
    """Unique set size of `pid`: memory that would come back if it alone ended."""
    lines = _read(f"/proc/{pid}/smaps_rollup").decode().splitlines()
    kib = sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:")))
    return kib / 1024


def out_memory(suffix: str, workers: list[int]) -> None:
    """Print the unique set size per worker, and of all else that this section has started beside workers and client."""
    out(f"memory_per_proc{suffix}", statistics.median(map(unique_mib, workers)), "MiB")
    if mark := os.environ.get(_MARK):
        rest = set(_marked(mark)) - {os.getpid(), *workers}
        out(f"memory_other_processes{suffix}", sum(map(unique_mib, rest)), "MiB")


# -------------------------------------------------------------------------------------------------------------- floors


def floors() -> None:
    """What this machine does with sockets, memory and forks alone, in the same run."""
    out("floor_fork_16", statistics.median(_fork_all(16) for _ in range(5)) * 1e3, "ms")
    starts = [_start_python() for _ in range(5)]
    out("floor_python_start", statistics.median(starts) * 1e3, "ms")
    left, right = socket.socketpair()
    echoer = os.fork()
    if echoer == 0:
        left.close()
        _echo_forever(right)
        os._exit(0)
    right.close()

    def ping() -> None:
        left.sendall(b"x" * 64)
        left.recv(64, socket.MSG_WAITALL)

    out_latency("floor_socket", time_calls(ping, 5000))
    out_rate("floor_pipelined", "calls/s", lambda count: _pipeline(left, count))
    left.close()
    os.waitpid(echoer, 0)
    _floor_bulk(64 << 20)
    _floor_memcpy(64 << 20)


def _echo_forever(end: socket.socket) -> None:
    while data := end.recv(1 << 16):
        end.sendall(data)


def _pipeline(end: socket.socket, count: int, window: int = 256) -> None:
    """`count` messages of 64 bytes, one system call each to send, `window` on their way at most."""
    received = 0
    for sent in range(1, count + 1):
        end.sendall(b"x" * 64)
        while sent * 64 - received >= window * 64:
            received += len(end.recv(1 << 16))
    while received < count * 64:
        received += len(end.recv(1 << 16))


def _floor_bulk(num_bytes: int) -> None:
    left, right = socket.socketpair()
    child = os.fork()
    buffer = bytearray(num_bytes)
    if child == 0:
        left.close()
        while _receive(right, buffer):
            right.sendall(buffer)
        os._exit(0)
    right.close()

    def echo() -> None:
        left.sendall(buffer)
        _receive(left, buffer)

    seconds = statistics.median(time_calls(echo, 10, budget_s=2.0, warm_up=1))
    out("floor_socket_echo_64MiB", 2 * num_bytes / 2**30 / seconds, "GiB/s")
    left.close()
    os.waitpid(child, 0)


def _receive(end: socket.socket, buffer: bytearray) -> bool:
    view, filled = memoryview(buffer), 0
    while filled < len(buffer):
        count = end.recv_into(view[filled:])
        if not count:
            return False
        filled += count
    return True


def _floor_memcpy(num_bytes: int) -> None:
    source, target = bytearray(num_bytes), bytearray(num_bytes)

    def copy() -> None:
        target[:] = source

    out("floor_memcpy_64MiB", num_bytes / 2**30 / statistics.median(time_calls(copy, 10, warm_up=2)), "GiB/s")


def _fork_all(count: int) -> float:
    """Seconds until `count` forks of this interpreter have each written one byte."""
    started = now()
    reader, writer = os.pipe()
    pids = []
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            os.write(writer, b"x")
            os._exit(0)
        pids.append(pid)
    received = 0
    while received < count:
        received += len(os.read(reader, count))
    seconds = now() - started
    for pid in pids:
        os.waitpid(pid, 0)
    os.close(reader)
    os.close(writer)
    return seconds


def _start_python() -> float:
    started = now()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return now() - started
