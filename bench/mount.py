"""What a mounted tree costs its readers, beside tmpfs: large and small files cold and warm, stat, names that do not exist.

    .venv/bin/python bench/mount.py                    # needs /dev/fuse, and fusermount3 unless run by root
    .venv/bin/python bench/mount.py --mib 1024 --rounds 5
    .venv/bin/python bench/mount.py gather             # folders of hosts, see gathering.py
    .venv/bin/python bench/mount.py pushed --peer PY   # remotemount on this machine, see pushing.py
    .venv/bin/python bench/mount.py hosts              # and on hosts in network namespaces, which needs root and iproute2

Section `tree`: the tree is served from the memory of another process. Every round mounts anew, runs each variant and tmpfs in turns, and
the medians over the rounds are printed, and those of the ratios to tmpfs in the same round: `own` is one thread, `own2` two, `through`
lets the kernel read memory files itself.
"""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import stat
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from folders import NUM_FOLDERS, PER_FOLDER, make, read_big, read_small
from gathering import run_gather
from measure import now, out, remark
from pushing import run_hosts, run_pushed

from monarch._mounts.filesystem import PUSHED, Attr, Entry, Later, Opened
from monarch._mounts.fuse_server import FuseServer
from monarch._mounts.mounting import fuse_problem, mount, unmount
from monarch._wire.frames import Buffer

NUM_STATS = 2000
VARIANTS = ("own", "own2", "through")
SECTIONS = ("tree", "gather", "pushed", "hosts")


class MemoryTree:
    """A copy of a directory in memory."""

    habits = PUSHED

    def __init__(self, root: str, *, backed: bool) -> None:
        self._attrs: dict[int, Attr] = {}
        self._names: dict[int, dict[bytes, Entry]] = {}
        self._listings: dict[int, list[tuple[bytes, Entry]]] = {}
        self._data: dict[int, memoryview] = {}
        self._fds: dict[int, int] = {}
        self._backed = backed
        self._add(root)

    def _add(self, path: str) -> Entry:
        found = os.lstat(path)
        node = len(self._attrs) + 1
        attr = Attr(found.st_mode, found.st_size, found.st_nlink, found.st_uid, found.st_gid, found.st_mtime_ns, found.st_mtime_ns)
        self._attrs[node] = attr
        if stat.S_ISDIR(found.st_mode):
            self._names[node] = {os.fsencode(name): self._add(f"{path}/{name}") for name in sorted(os.listdir(path))}
            self._listings[node] = list(self._names[node].items())
        else:
            with open(path, "rb") as file:
                self._data[node] = memoryview(file.read())
            if self._backed:
                self._fds[node] = os.memfd_create("bench")
                os.write(self._fds[node], self._data[node])
        return Entry(node, attr)

    def lookup(self, parent: int, name: bytes, later: Later) -> Entry | int:
        return self._names[parent].get(name, errno.ENOENT)

    def attr(self, node: int, later: Later) -> Attr:
        return self._attrs[node]

    def children(self, node: int, later: Later) -> Sequence[tuple[bytes, Entry]]:
        return self._listings[node]

    def target(self, node: int, later: Later) -> int:
        return errno.EINVAL

    def open(self, node: int, later: Later) -> Opened:
        return Opened(0, self._fds.get(node))

    def release(self, handle: int) -> None: ...

    def read(self, node: int, handle: int, offset: int, size: int, later: Later) -> Sequence[Buffer]:
        return (self._data[node][offset : offset + size],)

    def forget(self, node: int) -> None: ...


@contextmanager
def served(source: str, point: str, variant: str) -> Iterator[None]:
    """`source` mounted at `point` by another process, until the end of the block."""
    ready, is_ready = os.pipe()
    stop, do_stop = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(do_stop)
        try:
            tree = MemoryTree(source, backed=variant == "through")
            fd = mount(point, fsname="bench")
            server = FuseServer(fd, tree, threads=2 if variant == "own2" else 1, passthrough=variant == "through")
            server.start()
            os.write(is_ready, b"1")
            os.read(stop, 1)
            unmount(point, lazy=True)
            server.stop()
        finally:
            os._exit(0)
    os.close(is_ready)
    os.close(stop)
    try:
        if not os.read(ready, 1):
            raise RuntimeError(f"the server of {point} did not start")
        yield
    finally:
        os.close(do_stop)
        os.close(ready)
        os.waitpid(pid, 0)
        if os.path.ismount(point):
            unmount(point, lazy=True)


def stat_all(root: str) -> float:
    """Calls per second, each of another file, without a listing before."""
    began = now()
    for folder in range(NUM_FOLDERS):
        for index in range(PER_FOLDER):
            os.stat(f"{root}/pkg{folder // 10}/sub{folder:03d}/mod{index:02d}.py")
    return NUM_FOLDERS * PER_FOLDER / (now() - began)


def miss_all(root: str, tag: str) -> float:
    """Calls per second, each for another name that does not exist."""
    began = now()
    for index in range(NUM_STATS):
        os.path.exists(f"{root}/pkg0/{tag}{index}")
    return NUM_STATS / (now() - began)


def run_round(root: str) -> dict[str, tuple[float, str]]:
    return {
        "stat_cold": (stat_all(root), "/s"),
        "miss_cold": (miss_all(root, "none"), "/s"),
        "miss_warm": (miss_all(root, "none"), "/s"),
    }


def run_reads(root: str) -> dict[str, tuple[float, str]]:
    return {
        "small_cold": (read_small(root), "files/s"),
        "small_warm": (read_small(root), "files/s"),
        "big_cold": (read_big(root), "GiB/s"),
        "big_warm": (read_big(root), "GiB/s"),
    }


def run_trees(base: str | None, mib: int, rounds: int, variants: Sequence[str], add: Callable[[str, float, str], None]) -> None:
    """The section `tree`."""
    source = tempfile.mkdtemp(prefix="bench-mounts-", dir=base)
    point = tempfile.mkdtemp(prefix="bench-mounts-")
    floor: dict[str, tuple[float, str]] = {}
    try:
        make(source, mib)
        for _ in range(rounds):
            for variant in ["tmpfs", *variants]:
                if variant == "tmpfs":
                    rows = {**run_round(source), **run_reads(source)}
                else:
                    with served(source, point, variant):
                        rows = run_round(point)
                    with served(source, point, variant):
                        rows |= run_reads(point)
                if variant == "tmpfs":
                    floor = rows
                for name, (value, unit) in rows.items():
                    add(f"{variant}_{name}", value, unit)
                    if variant != "tmpfs":
                        add(f"{variant}_{name}_of_tmpfs", value / floor[name][0], "x")
    finally:
        shutil.rmtree(source, ignore_errors=True)
        os.rmdir(point)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("sections", nargs="*", default=[], help=f"of {', '.join(SECTIONS)} (default all)")
    parser.add_argument("--mib", type=int, default=256, help="in 20 large files (default 256)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", help="interpreter of another implementation, measured in turns in the section pushed")
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=VARIANTS)
    options = parser.parse_args()
    problem = fuse_problem()
    if problem:
        remark(problem)
        return
    base = "/dev/shm" if os.path.isdir("/dev/shm") else None
    results: dict[str, list[float]] = {}
    units: dict[str, str] = {}

    def add(name: str, value: float, unit: str) -> None:
        results.setdefault(name, []).append(value)
        units[name] = unit

    sections = options.sections or SECTIONS
    if "tree" in sections:
        run_trees(base, options.mib, options.rounds, options.variants, add)
    if "gather" in sections:
        for _ in range(options.rounds):
            for row in run_gather(base, options.mib):
                add(*row)
    pythons = {"": sys.executable, **({"peer_": options.peer} if options.peer else {})}
    if "pushed" in sections:
        run_pushed(base, options.mib, options.rounds, pythons, add)
    if "hosts" in sections:
        run_hosts(base, options.mib, options.rounds, add)
    for name in sorted(results):
        out(name, statistics.median(results[name]), units[name])


if __name__ == "__main__":
    main()
