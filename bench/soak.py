"""Soak: many rounds of spawn, call and stop in one client, and what its processes have more of afterwards.

    python bench/soak.py [--rounds N] [--procs N] [--warm-up N]

Each round spawns a mesh, calls a sync and an async actor with a small and a large argument, has one proc killed in every
tenth round, and stops the mesh. Looked at before and after, in the client, its host agent and the zygote: descriptors (of
those, shared-memory segments), threads and resident memory; and files of the run directory and of shared memory.

Prints `name value unit`, growth being after less before. The exit status is 1 when something has grown: descriptors,
threads, segments or files at all, memory by more than `KIB_PER_ROUND` a round beyond `KIB_ANYWAY`.

Read next: `tests/system/test_soak.py`, which runs a short one.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import measure

import monarch.actor
from monarch.actor import Actor, endpoint, shutdown_context, this_host, this_proc
from monarch.testing.leaks import children

KIB_PER_ROUND = 24.0
"""Of each proc that has ended it is remembered for long how it did, and everything of it for as long as a start may take."""
KIB_ANYWAY = 4096.0
"""What allocators keep, however few the rounds."""
SETTLE_S = 5.0
_LARGE_BYTES = 1 << 20


class Sync(Actor):
    """Answers from its own thread."""

    @endpoint
    def echo(self, value: bytes) -> int:
        return len(value)

    @endpoint
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Async(Actor):
    """Answers from an event loop, and owns an actor in its own process."""

    def __init__(self) -> None:
        self.child = this_proc().spawn("child", Sync)

    @endpoint
    async def echo(self, value: bytes) -> int:
        return await self.child.echo.call_one(value)


@dataclass(frozen=True)
class Footprint:
    """What one process holds."""

    descriptors: int
    segments: int
    threads: int
    resident_kib: float

    @classmethod
    def of(cls, pid: int) -> Footprint:
        """The footprint of a live process."""
        targets = []
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                targets.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return cls(
            len(targets),
            sum(target.startswith("/memfd:") for target in targets),
            len(os.listdir(f"/proc/{pid}/task")),
            pages * os.sysconf("SC_PAGE_SIZE") / 1024,
        )


@dataclass(frozen=True)
class Look:
    """All that is looked at, at one moment."""

    processes: dict[str, Footprint]
    files: int
    descendants: int

    @classmethod
    def take(cls, folder: str) -> Look:
        """Look at this client, whose files are in `folder`."""
        [agent] = children(os.getpid())
        [zygote] = children(agent)
        pids = {"client": os.getpid(), "agent": agent, "zygote": zygote}
        files = sum(len(names) + len(folders) for _, folders, names in os.walk(folder))
        shared = Path("/dev/shm")
        files += len([*shared.glob("monarch*")]) if shared.is_dir() else 0
        return cls({name: Footprint.of(pid) for name, pid in pids.items()}, files, len(children(zygote)))

    def counts(self) -> tuple[int, ...]:
        """What must not grow at all."""
        rows = self.processes.values()
        return (self.files, self.descendants, *(n for row in rows for n in (row.descriptors, row.segments, row.threads)))


def main() -> int:
    """Soak; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--procs", type=int, default=2)
    parser.add_argument("--warm-up", type=int, default=10, help="rounds before the first look (default 10)")
    options = parser.parse_args()
    monarch.actor.unhandled_fault_hook = lambda failure: None
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        tempfile.tempdir = folder
        for number in range(options.warm_up):
            turn(number, options.procs)
        before = Look.take(folder)
        began = time.perf_counter()
        for number in range(options.rounds):
            turn(number, options.procs)
        measure.out("soak_round", 1000 * (time.perf_counter() - began) / max(options.rounds, 1), "ms")
        after = settled(folder, before)
        shutdown_context().get()
        left = sum(len(names) for _, _, names in os.walk(folder))
    return report(before, after, left, options.rounds)


def turn(number: int, num_procs: int) -> None:
    """One round."""
    procs = this_host().spawn_procs(per_host={"procs": num_procs})
    for crew in (procs.spawn("sync", Sync), procs.spawn("async", Async)):
        for size in (10, _LARGE_BYTES):
            assert list(crew.echo.call(bytes(size)).get(60).values()) == [size] * num_procs
    local = this_proc().spawn("local", Sync)
    assert local.echo.call_one(b"").get(60) == 0
    local.stop().get(60)
    if number % 10 == 0:
        dying = procs.spawn("dying", Sync)
        assert dying.slice(procs=0).die.call_one().exception(60) is not None
    procs.stop().get(60)


def settled(folder: str, before: Look) -> Look:
    """A look once nothing is on its way out any more, or after `SETTLE_S`."""
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        gc.collect()
        after = Look.take(folder)
        if time.monotonic() > deadline_s or all(new <= old for new, old in zip(after.counts(), before.counts(), strict=True)):
            return after
        time.sleep(0.05)


def report(before: Look, after: Look, left: int, rounds: int) -> int:
    """Print the growth; 1 when there is some."""
    grown = after.files > before.files or after.descendants > before.descendants or left > 0
    for name, old in before.processes.items():
        new = after.processes[name]
        for kind in ("descriptors", "segments", "threads"):
            growth = getattr(new, kind) - getattr(old, kind)
            measure.out(f"soak_{name}_{kind}_growth", growth, kind)
            grown |= growth > 0
        kib = new.resident_kib - old.resident_kib
        measure.out(f"soak_{name}_memory_growth", kib, "KiB")
        measure.out(f"soak_{name}_memory_growth_round", kib / max(rounds, 1), "KiB")
        grown |= kib > KIB_ANYWAY + KIB_PER_ROUND * rounds
    measure.out("soak_files_growth", after.files - before.files, "files")
    measure.out("soak_procs_growth", after.descendants - before.descendants, "procs")
    measure.out("soak_files_left", left, "files")
    return int(grown)


if __name__ == "__main__":
    sys.exit(main())
