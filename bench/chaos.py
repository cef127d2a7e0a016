"""Chaos: random calls, broadcasts, kills, failures, stops and respawns at once, and whether everything that is promised holds.

    python bench/chaos.py [--seed N] [--faults N] [--limit-s S] [--procs N]

Three meshes live side by side, each with threads that hurt it and threads that use it:

    supervised   OneForOne: every rank is killed or made to fail again and again, and has to come back
    owned        no policy: every death has to reach the owner's hook exactly once; then the mesh is re-formed by hand
    stopped      spawned, used and stopped in rounds, with calls in flight

Prints `name value unit`. The exit status is 1 when a promise was broken: a call that did not end, an error that does not
name its rank, a death that was reported never or twice, a mesh that is not whole in the end, something left over.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import queue
import random
import re
import signal
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from measure import out, percentile

import monarch.actor
from monarch.actor import Actor, ActorError, MeshFailure, OneForOne, SupervisionError, context, endpoint, shutdown_context, this_host
from monarch.testing.leaks import marked

CALL_LIMIT_S = 30.0
NAMED = re.compile(r"rank \d+ of mesh|'gpus': \d+/\d+|mesh was stopped|was stopped|error spawning")
SETTLE_S = 30.0
MARK = "MONARCH_CHAOS_RUN"


class Worker(Actor):
    """Does as it is told."""

    def __init__(self, size: int) -> None:
        self.data = bytes(size)
        self.count = 0

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def add(self, number: int) -> int:
        self.count += number
        return self.count

    @endpoint
    def work(self, seconds: float) -> int:
        time.sleep(seconds)
        return len(self.data)

    @endpoint
    def echo(self, data: bytes) -> bytes:
        return data

    @endpoint
    def fail(self) -> None:
        raise ValueError("an ordinary failure")

    @endpoint
    def end(self, way: str) -> None:
        if way == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif way == "_exit":
            os._exit(7)
        elif way == "abort":
            context().actor_instance.abort("chaos")
        else:
            raise SystemExit(7)


WAYS = ["kill", "kill", "_exit", "abort", "SystemExit", "from outside", "from outside", "broadcast"]
KILLS_PROC = {"kill", "_exit", "from outside"}


@dataclass
class Tally:
    """What happened. Thread: any, by the lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    counts: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    to_caller_s: list[float] = field(default_factory=list)
    to_hook_s: list[float] = field(default_factory=list)
    to_whole_s: list[float] = field(default_factory=list)

    def add(self, name: str, number: int = 1) -> None:
        with self.lock:
            self.counts[name] += number

    def broke(self, text: str) -> None:
        with self.lock:
            self.broken.append(text)


class Restarts(logging.Handler):
    """Counts the restarts that the supervisor says it begins."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        found = re.match(r"restart \d+ of .*?: rank (\d+) of mesh supervised", record.getMessage())
        if found:
            self.seen[found[1]] += 1


class Chaos:
    """One run. Thread: its own ones, by `tally` and `over`."""

    def __init__(self, seed: int, num_faults: int, limit_s: float, num_procs: int) -> None:
        self.seed = seed
        self.num_faults = num_faults
        self.until_s = time.monotonic() + limit_s
        self.num_procs = num_procs
        self.tally = Tally()
        self.failures: queue.SimpleQueue[tuple[float, MeshFailure]] = queue.SimpleQueue()
        self.restarts = Restarts()

    def over(self) -> bool:
        """Enough faults, or no time left."""
        return self.tally.counts["faults"] >= self.num_faults or time.monotonic() > self.until_s

    def run(self) -> bool:
        """Whether every promise held."""
        os.environ[MARK] = uuid.uuid4().hex  # every process that this run starts inherits it
        monarch.actor.unhandled_fault_hook = lambda failure: self.failures.put((time.perf_counter(), failure))
        logger = logging.getLogger("monarch.supervision")
        logger.addHandler(self.restarts)
        logger.propagate = False
        sizes = {"gpus": self.num_procs}
        self.supervised_procs = this_host().spawn_procs(sizes, name="supervised")
        policy = OneForOne(max_restarts=10**9, within_s=60, backoff_s=0.0)
        self.supervised: Any = self.supervised_procs.supervised(policy).spawn("supervised", Worker, 1000)
        self.supervised.pid.call().get(CALL_LIMIT_S)
        targets: list[Callable[[random.Random], None]] = [self.hurt_owned, self.stop_in_rounds, self.use, self.use, self.use]
        threads = [self.start(target, index) for index, target in enumerate(targets)]
        threads += [self.start(lambda rng, rank=rank: self.hurt_rank(rank, rng), 100 + rank) for rank in range(self.num_procs)]  # type: ignore[misc]
        for thread in threads:
            thread.join(max(0.0, self.until_s - time.monotonic()) + 2 * CALL_LIMIT_S)
            if thread.is_alive():
                self.tally.broke(f"thread {thread.name} does not end")
        self.check_whole()
        self.check_leftovers()
        return not self.tally.broken

    def start(self, target: Callable[[random.Random], None], index: int) -> threading.Thread:
        def live() -> None:
            try:
                target(random.Random(self.seed * 1000 + index))
            except BaseException as exc:
                self.tally.broke(f"thread {index}: {exc!r}")

        thread = threading.Thread(target=live, daemon=True, name=f"chaos-{index}")
        thread.start()
        return thread

    # --- using ---------------------------------------------------------------------------------------------------

    def use(self, rng: random.Random) -> None:
        """Call the supervised mesh and slices of it."""
        while not self.over():
            first = rng.randrange(self.num_procs)
            view = self.supervised.slice(gpus=slice(first, rng.randrange(first, self.num_procs) + 1))
            number = rng.random()
            if number < 0.25:
                view.add.broadcast(1)
                self.tally.add("broadcasts")
            elif number < 0.5:
                self.finish(view.work.call(rng.random() * 0.05))
            elif number < 0.6:
                self.finish(view.echo.choose(bytes(rng.randrange(300_000))))
            elif number < 0.7:
                for future in view.add.stream(1):
                    self.finish(future)
            elif number < 0.75:
                self.finish(view.fail.choose())
            else:
                self.finish(view.add.call(1))

    def finish(self, future: Any) -> BaseException | None:
        """Wait for a call; its error has to name who did not answer."""
        self.tally.add("calls")
        try:
            future.get(timeout=CALL_LIMIT_S)
        except ActorError:
            self.tally.add("calls_raised")
        except SupervisionError as exc:
            self.tally.add("calls_lost")
            if not NAMED.search(str(exc)):
                self.tally.broke(f"an error names no rank: {exc}")
            return exc
        except BaseException as exc:
            self.tally.broke(f"a call ended otherwise: {exc!r}")
            return exc
        return None

    # --- hurting -------------------------------------------------------------------------------------------------

    def hurt_rank(self, rank: int, rng: random.Random) -> None:
        """Make one supervised rank fail, wait until it is back, and again."""
        one = self.supervised.slice(gpus=rank)
        pid = self.answer(one)
        while not self.over():
            time.sleep(rng.random() * 0.1)
            way = rng.choice(WAYS)
            self.tally.add("faults")
            self.tally.add("expected_restarts")
            waiting = one.work.call_one(60.0) if way == "from outside" else None
            began = time.perf_counter()
            if way == "broadcast":
                one.end.broadcast("SystemExit")
            elif waiting is not None:
                os.kill(pid, signal.SIGKILL)
                if self.finish(waiting) is None:
                    self.tally.broke("a call outlived its process")
                with self.tally.lock:
                    self.tally.to_caller_s.append(time.perf_counter() - began)
            else:
                self.finish(one.end.call_one(way))
            before, pid = pid, self.answer(one, until=lambda new: new != pid if way in KILLS_PROC else True)  # noqa: B023
            if way in KILLS_PROC:
                self.tally.add("kills")
                with self.tally.lock:
                    self.tally.to_whole_s.append(time.perf_counter() - began)
            elif before != pid:
                self.tally.broke(f"an actor failed by {way}, and its process went too")

    def answer(self, one: Any, until: Callable[[int], bool] = lambda _: True) -> int:
        """The pid of a rank, once it answers."""
        deadline_s = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline_s:
            try:
                pid: int = one.pid.call_one().get(timeout=CALL_LIMIT_S)
            except SupervisionError:
                continue
            if until(pid):
                return pid
        self.tally.broke(f"{one} did not come back")
        return 0

    def hurt_owned(self, rng: random.Random) -> None:
        """Kill ranks of an unsupervised mesh; each death is one report; then re-form the mesh."""
        procs: Any = this_host().spawn_procs({"gpus": 4}, name="owned")
        while not self.over():
            mesh: Any = procs.spawn("owned", Worker, 10)
            extra: Any = procs.spawn("extra", Worker, 10)
            pids = list(mesh.pid.call().get(CALL_LIMIT_S).values())
            ranks = rng.sample(range(4), rng.randrange(1, 4))
            began = time.perf_counter()
            for rank in ranks:
                os.kill(pids[rank], signal.SIGKILL)
            self.tally.add("faults", len(ranks))
            self.tally.add("kills", len(ranks))
            self.expect_reports(mesh, extra, sorted(ranks), began)
            self.finish(mesh.pid.call())
            procs = procs.respawn()
            mesh.stop().get(CALL_LIMIT_S)
            extra.stop().get(CALL_LIMIT_S)
        procs.stop().get(CALL_LIMIT_S)

    def expect_reports(self, mesh: Any, extra: Any, ranks: list[int], began: float) -> None:
        """Each of these deaths once, with the actors of both meshes."""
        told: list[list[tuple[str, int]]] = []
        names = [mesh._name.get(), extra._name.get()]
        deadline_s = time.monotonic() + SETTLE_S
        while len(told) < len(ranks) and time.monotonic() < deadline_s:
            with contextlib.suppress(queue.Empty):
                at_s, failure = self.failures.get(timeout=0.5)
                with self.tally.lock:
                    self.tally.to_hook_s.append(at_s - began)
                told.append([(fault.mesh, fault.rank) for fault in failure.faults])
        expected = [[(names[0], rank), (names[1], rank)] for rank in ranks]
        if sorted(told) != expected:
            self.tally.broke(f"reports {told} instead of {expected}")

    def stop_in_rounds(self, rng: random.Random) -> None:
        """Spawn, use, and stop with calls in flight."""
        while not self.over():
            procs: Any = this_host().spawn_procs({"gpus": rng.randrange(1, 4)}, name="stopped")
            mesh: Any = procs.spawn("stopped", Worker, 10)
            calls = [mesh.work.call(rng.random() * 0.1) for _ in range(3)]
            if rng.random() < 0.5:
                self.finish(mesh.add.call(1))
            stopping = procs.stop()
            for future in calls:
                self.finish(future)
            stopping.get(timeout=CALL_LIMIT_S)
            self.finish(mesh.add.call(1))
            self.tally.add("stops")

    # --- the end -------------------------------------------------------------------------------------------------

    def check_whole(self) -> None:
        """The supervised mesh is whole, each of its failures began one restart, and no report is left over."""
        for rank in range(self.num_procs):
            self.answer(self.supervised.slice(gpus=rank))
        if self.finish(self.supervised.add.call(1)) is not None:
            self.tally.broke("the supervised mesh is not whole")
        expected, began = self.tally.counts["expected_restarts"], sum(self.restarts.seen.values())
        if expected != began:
            self.tally.broke(f"{began} restarts for {expected} failures")
        while not self.failures.empty():
            self.tally.broke(f"a report too many: {self.failures.get()[1]}")

    def check_leftovers(self) -> None:
        """No process of this run outlives it."""
        shutdown_context().get(CALL_LIMIT_S)
        deadline_s = time.monotonic() + 2.0
        while (left := marked(f"{MARK}={os.environ[MARK]}")) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        if left:
            self.tally.broke(f"processes left over: {left}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Random failures against what is promised.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=1000, help="stop after so many")
    parser.add_argument("--limit-s", type=float, default=240.0, help="stop after so many seconds")
    parser.add_argument("--procs", type=int, default=12, help="of the supervised mesh")
    arguments = parser.parse_args()
    chaos = Chaos(arguments.seed, arguments.faults, arguments.limit_s, arguments.procs)
    began = time.monotonic()
    held = chaos.run()
    tally = chaos.tally
    for name in ("faults", "kills", "stops", "broadcasts", "calls", "calls_lost", "calls_raised"):
        out(f"chaos_{name}", tally.counts[name], "count")
    out("chaos_seconds", time.monotonic() - began, "s")
    for name, values in (("kill_to_caller", tally.to_caller_s), ("kill_to_hook", tally.to_hook_s), ("kill_to_whole", tally.to_whole_s)):
        for percent in (50, 99):
            out(f"chaos_{name}_p{percent}", percentile(values, percent) * 1e3, "ms")
    out("chaos_broken_promises", len(tally.broken), "count")
    for text in tally.broken[:20]:
        print(f"  broken: {text}", file=sys.stderr)
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    main()
