"""A directory pushed to other hosts by `remotemount`, beside a bare copy over the same link: sections `pushed` and `hosts` of mount.py.

The program that opens, reads, refreshes and closes runs on any implementation of the API; what only ours tells is left out on others.

Measures (`peer_` before those of another implementation; `four_` are those of four hosts at once, `slow_` with links of 500 Mbit/s and a
quarter of the large files: on one machine, the processors are what all hosts share, and only a slow link shows what a network would):
    raw_copy                  seconds: every file over one socket into tmpfs, by two processes
    open                      seconds until open() returns
    open_to_all_here          seconds until every byte is on every host
    open_to_last_byte         seconds until one reader for each host, which begins when open() returns, has read every file
    direct_big, direct_small  GiB/s and files/s of a reader of the source itself, and direct_stat: ms of a `stat` of every file there
    *_of_copy                 the same as a multiple of raw_copy in the same round
    big_cold, big_warm        GiB/s of the first and second reader, once all bytes are there
    small_cold, small_warm    files/s of the same. As root the kernel reads the large files itself, and then asks for each opening
    only_small_*              the same small files without large ones, so that none of them is opened
    refresh_nothing           ms of a refresh() when nothing has changed
    refresh_edited            ms of one after a small file was edited; refresh_one_of_each: and 1 MiB of a large one
    close                     ms
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import folders
from measure import now, out, remark, wait_listening

ROOT = Path(__file__).resolve().parents[1]
PORT, RAW_PORT = 26600, 26700
WAIT_S = 60.0
_ROUND_S = 240.0
_LINE_WORDS = 3
NUM_REFRESHES = 20
_SLOW_LINK = "500mbit"

Add = Callable[[str, float, str], None]


# ------------------------------------------------------------------------------------------- on any implementation


def client(source: str, point: str, hosts: Sequence[str], prefix: str) -> None:
    """One round: all measures but the bare copy's."""
    from monarch.actor import attach_to_workers, this_host
    from monarch.remotemount import remotemount

    mesh: Any = attach_to_workers(ca="trust_all_connections", workers=list(hosts)) if hosts else this_host()
    mesh.initialized.get(timeout=WAIT_S)
    points = [point.replace("$SUBDIR", f"hosts_{rank}") for rank in range(len(hosts))] or [point]
    for each in points:
        os.makedirs(each, exist_ok=True)
    name = prefix.__add__

    with _opened(remotemount(mesh, source, point), name("open")) as (mount, began):
        _in_parallel(folders.read_all, points)
        out(name("open_to_last_byte"), now() - began, "s")
        del mount
    with _opened(remotemount(mesh, source, point), "") as (mount, began):
        if hasattr(mount, "statistics"):
            while any(told.store.missing_bytes for told in mount.statistics()):
                time.sleep(0.002)
            out(name("open_to_all_here"), now() - began, "s")
        for pace in ("cold", "warm"):
            out(name(f"small_{pace}"), statistics.median(_in_parallel(folders.read_small, points)), "files/s")
            out(name(f"big_{pace}"), statistics.median(_in_parallel(folders.read_big, points)), "GiB/s")
        if not prefix:
            out("direct_small", folders.read_small(source), "files/s")
            out("direct_big", folders.read_big(source), "GiB/s")
        _refreshes(mount, source, points, name)
        if not prefix:
            out("direct_stat", statistics.median(folders.stat_all(source) for _ in range(NUM_REFRESHES)), "ms")
        began = now()
        mount.close()
        out(name("close"), (now() - began) * 1000, "ms")
    if not hosts:
        _only_small(lambda source: remotemount(mesh, source, point), point, name)
    mesh.stop().get(timeout=WAIT_S) if hosts else None


def _only_small(mounted: Callable[[str], Any], point: str, name: Callable[[str], str]) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-mounts-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as source:
        folders.make(source, 0)
        with _opened(mounted(source), ""):
            for pace in ("cold", "warm"):
                out(name(f"only_small_{pace}"), folders.read_small(point), "files/s")


@contextmanager
def _opened(mount: Any, title: str) -> Iterator[tuple[Any, float]]:
    began = now()
    mount.open()
    if title:
        out(title, now() - began, "s")
    try:
        yield mount, began
    finally:
        mount.close()


def _in_parallel(function: Callable[[str], Any], points: Sequence[str]) -> list[Any]:
    """A function of `folders` for each mount point, by as many processes."""
    if len(points) == 1:
        return [function(points[0])]
    code = f"import sys, folders; print(folders.{function.__name__}(sys.argv[1]))"
    readers = [subprocess.Popen([sys.executable, "-c", code, point], stdout=subprocess.PIPE, text=True) for point in points]
    return [float(reader.communicate(timeout=_ROUND_S)[0]) for reader in readers]


def _refreshes(mount: Any, source: str, points: Sequence[str], name: Callable[[str], str]) -> None:
    small, big = f"{source}/{folders.A_SMALL_FILE}", f"{source}/{folders.A_BIG_FILE}"

    def edit() -> None:
        with open(small, "wb") as file:
            file.write(os.urandom(3000))

    def edit_both() -> None:
        edit()
        with open(big, "r+b") as file:
            file.write(os.urandom(1 << 20))

    changes: list[tuple[str, Callable[[], object], int]] = [
        ("nothing", bool, NUM_REFRESHES),
        ("edited", edit, NUM_REFRESHES),
        ("one_of_each", edit_both, 5),
    ]
    for title, change, times in changes:
        taken = []
        time.sleep(0.3)  # a file that has just changed is looked at again, once
        mount.refresh()
        for _ in range(times):
            change()
            began = now()
            mount.refresh()
            taken.append((now() - began) * 1000)
            for point in points:
                if Path(point, folders.A_SMALL_FILE).read_bytes() != Path(small).read_bytes():
                    raise RuntimeError(f"{point} shows another version than {source}")
        out(name(f"refresh_{title}"), statistics.median(taken), "ms")


# ------------------------------------------------------------------------------------------------------- the floor


def receive() -> None:
    """Take copies, one a connection, into a folder in memory that is then removed."""
    base = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with socket.create_server(("", RAW_PORT)) as listener:
        while True:
            with listener.accept()[0] as sock:
                folder = tempfile.mkdtemp(prefix="bench-mounts-", dir=base)
                try:
                    folders.receive_all(folder, sock)
                finally:
                    shutil.rmtree(folder, ignore_errors=True)


def copy(source: str, ip: str) -> None:
    """Print the seconds that a bare copy takes."""
    with socket.create_connection((ip, RAW_PORT)) as sock:
        began = now()
        folders.send_all(source, sock)
        out("raw_copy", now() - began, "s")


# -------------------------------------------------------------------------------------------------------- outside


class Place:
    """Where programs run: this machine, or one namespace of a rig."""

    def __init__(self, host: Any = None) -> None:
        self.host = host
        """Of the rig; None: this machine."""
        self.ip = "127.0.0.1" if host is None else host.ip

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program there."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "bench")}
        environment.pop("MONARCH_SECRET", None)
        if self.host is None:
            return subprocess.Popen(command, env=environment, **options)
        process: subprocess.Popen[Any] = self.host.run(command, env=environment, **options)
        return process


def run_round(source: str, place: Place, hosts: Sequence[Place], pythons: dict[str, str], title: str, add: Add) -> None:
    """The bare copy, then each implementation: on `hosts`, or on this machine when there are none."""
    found: dict[str, float] = {}

    def take(text: str, before: str) -> None:
        for line in text.splitlines():
            words = line.split()
            if len(words) == _LINE_WORDS and not line.startswith("#"):
                name, value, unit = before + words[0], float(words[1]), words[2]
                found[name] = value
                add(name, value, unit)

    take(_run(place, [sys.executable, __file__, "--copy", source, (hosts or [place])[0].ip]), title)
    for prefix, python in pythons.items():
        serving = [_serve(host, python) for host in hosts]
        point = tempfile.mkdtemp(prefix="bench-mounts-")
        try:
            for host in hosts:
                wait_listening(host.ip, PORT, place.host)
            target = f"{point}/$SUBDIR" if hosts else point
            urls = json.dumps([f"tcp://{host.ip}:{PORT}" for host in hosts])
            take(_run(place, [python, __file__, "--client", source, target, urls, prefix]), title)
        finally:
            for process in serving:
                process.kill()
                process.wait()
            _clean(point)
        for name in ("open_to_all_here", "open_to_last_byte"):
            if (value := found.get(f"{title}{prefix}{name}")) is not None:
                add(f"{title}{prefix}{name}_of_copy", value / found[f"{title}raw_copy"], "x")


def _run(place: Place, command: Sequence[str], **options: Any) -> str:
    process = place.start(command, stdout=subprocess.PIPE, text=True, **options)
    try:
        text, _ = process.communicate(timeout=_ROUND_S)
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
        remark(f"not over within {_ROUND_S:g} s: {' '.join(command)}")
    if process.returncode:
        remark(f"exit status {process.returncode}: {' '.join(command)}")
    return str(text)


def _serve(host: Place, python: str) -> subprocess.Popen[Any]:
    return host.start([python, __file__, "--serve", f"tcp://{host.ip}:{PORT}"], stdout=subprocess.DEVNULL)


def _clean(point: str) -> None:
    for folder in (*sorted(Path(point).iterdir()), Path(point)):
        if os.path.ismount(folder):
            subprocess.call(["umount", "-l", str(folder)])
        folder.rmdir()


def run_pushed(base: str | None, mib: int, rounds: int, pythons: dict[str, str], add: Add) -> None:
    """The section `pushed`: on this machine."""
    with _source(base, mib) as source, _receiver(Place()):
        for _ in range(rounds):
            run_round(source, Place(), [], pythons, "", add)


def run_hosts(base: str | None, mib: int, rounds: int, add: Add) -> None:
    """The section `hosts`: one and four namespaces, in turns. Ours only: the workers of the peer listen at the client's address."""
    pythons = {"": sys.executable}
    sys.path.insert(0, str(ROOT / "tests"))
    from system.hosts import Hosts

    with Hosts(("a", "b", "c", "d")) as rig, _source(base, mib) as source, _source(base, mib // 4) as small:
        hosts = [Place(host) for host in rig]
        place = Place(rig.client)
        with _receiver(hosts[0]):
            wait_listening(hosts[0].ip, RAW_PORT, place.host)
            for _ in range(rounds):
                seconds: dict[str, float] = {}

                def add_and_note(name: str, value: float, unit: str, seconds: dict[str, float] = seconds) -> None:
                    seconds[name] = value
                    add(name, value, unit)

                run_round(source, place, hosts[:1], pythons, "one_", add_and_note)
                run_round(source, place, hosts, pythons, "four_", add_and_note)
                for host in rig:
                    host.limit(_SLOW_LINK, burst="1mb")
                run_round(small, place, hosts[:1], pythons, "slow_one_", add_and_note)
                run_round(small, place, hosts, pythons, "slow_four_", add_and_note)
                for host in rig:
                    host.unlimit()
                for kind in ("", "slow_"):
                    name = "open_to_all_here"
                    add(f"{kind}four_{name}_of_one", seconds[f"{kind}four_{name}"] / seconds[f"{kind}one_{name}"], "x")


@contextmanager
def _source(base: str | None, mib: int) -> Iterator[str]:
    source = tempfile.mkdtemp(prefix="bench-mounts-", dir=base)
    try:
        folders.make(source, mib)
        yield source
    finally:
        shutil.rmtree(source, ignore_errors=True)


@contextmanager
def _receiver(place: Place) -> Iterator[None]:
    process = place.start([sys.executable, __file__, "--receive"])
    try:
        time.sleep(0.5)
        yield
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    what, arguments = sys.argv[1], sys.argv[2:]
    if what == "--serve":
        from monarch.actor import run_worker_loop_forever

        run_worker_loop_forever(address=arguments[0], ca="trust_all_connections")
    elif what == "--receive":
        receive()
    elif what == "--copy":
        copy(*arguments)
    elif what == "--client":
        client(arguments[0], arguments[1], json.loads(arguments[2]), arguments[3])
