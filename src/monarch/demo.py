"""The demo: index the source of the Python standard library with a mesh of processes, then survive two failures.

It is meant to be read. `Indexer` is an actor: one lives in each worker process, handles one message at a time and keeps what
it has found. `run_demo` is the script: it drives all of them as if they were one object.

Read next: docs/tutorial.md, which explains step by step what is used here.
"""

from __future__ import annotations

import ast
import io
import keyword
import operator
import os
import queue
import signal
import sys
import sysconfig
import time
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import monarch.actor
from monarch.actor import Accumulator, Actor, ActorError, MeshFailure, SupervisionError, context, endpoint, this_host

_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "_bundled"}
_BATCH = 8
"""Files that a worker indexes for one message: few enough for a smooth bar, enough to make the messages free."""
_SHOWN_PACKAGES = 10
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler)


# ---- what is found ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Function:
    """A function of the library; the longer one is the greater one."""

    lines: int = 0
    name: str = ""
    file: str = ""
    first_line: int = 0


@dataclass
class Package:
    """What one package adds up to."""

    files: int = 0
    lines: int = 0
    tokens: int = 0
    longest: Function = Function()

    def __add__(self, other: Package) -> Package:
        longest = max(self.longest, other.longest)
        return Package(self.files + other.files, self.lines + other.lines, self.tokens + other.tokens, longest)


@dataclass
class Index:
    """What a set of files adds up to. Indexes of disjoint sets of files can be added in any order."""

    packages: dict[str, Package] = field(default_factory=dict)
    identifiers: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: Index) -> Index:
        packages = dict(self.packages)
        for name, package in other.packages.items():
            packages[name] = packages.get(name, Package()) + package
        return Index(packages, self.identifiers + other.identifiers)

    @property
    def total(self) -> Package:
        """All packages together."""
        return sum(self.packages.values(), Package())

    def add_file(self, file: str, text: str) -> None:
        """Count the tokens and identifiers of one file, and measure its functions."""
        tokens = 0
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            tokens += 1
            if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
                self.identifiers[token.string] += 1
        longest = max(functions_of(ast.parse(text), file), default=Function())
        name = file.split("/")[0] if "/" in file else "(modules)"
        self.packages[name] = self.packages.get(name, Package()) + Package(1, text.count("\n"), tokens, longest)


def functions_of(tree: ast.AST, file: str, prefix: str = "") -> Iterator[Function]:
    """Every function below a syntax tree, nested ones included, by qualified name."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            yield from functions_of(node, file, prefix)
            continue
        name = f"{prefix}{node.name}"
        if not isinstance(node, ast.ClassDef):
            yield Function((node.end_lineno or node.lineno) - node.lineno + 1, name, file, node.lineno)
        yield from functions_of(node, file, f"{name}.")


# ---- the workers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """What one worker has done."""

    pid: int
    files: int
    tokens: int
    cpu_s: float


class Indexer(Actor):
    """Indexes its share of the library's files, and keeps the index until it is asked for it."""

    def __init__(self, library: Path) -> None:
        self._library = library
        self._todo: list[str] = []
        self._index = Index()
        self._cpu_s = 0.0

    @endpoint
    def assign(self, files: list[str]) -> None:
        """Take every n-th of the files, where n is how many workers were sent this message."""
        rank = context().message_rank
        self._todo = files[rank.rank :: rank.extent.nelements]

    @endpoint
    def index_batch(self) -> int:
        """Index the next few files; how many there were."""
        started = time.thread_time()
        batch, self._todo = self._todo[:_BATCH], self._todo[_BATCH:]
        for file in batch:
            self._index.add_file(file, self._read(file))
        self._cpu_s += time.thread_time() - started
        return len(batch)

    @endpoint
    def index(self) -> Index:
        """All that was found so far."""
        return self._index

    @endpoint
    def share(self) -> Share:
        """What this worker has done so far."""
        total = self._index.total
        return Share(os.getpid(), total.files, total.tokens, self._cpu_s)

    @endpoint
    def branches(self, function: Function) -> int:
        """How many branches a function has. Needs no index, so any worker can tell."""
        tree = ast.parse(self._read(function.file))
        node = next(node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS) and node.lineno == function.first_line)
        return sum(isinstance(inner, _BRANCHES) for inner in ast.walk(node))

    def _read(self, file: str) -> str:
        with tokenize.open(self._library / file) as source:
            return source.read()


# ---- the script ------------------------------------------------------------------------------------------------------


def run_demo(num_procs: int, max_files: int | None = None) -> None:
    """Index the standard library on `num_procs` processes (at least 2), report, then show two failures.

    Whatever happens in here, Ctrl-C included: what was started ends when this process ends.
    """
    started = time.perf_counter()
    library = Path(sysconfig.get_path("stdlib"))
    files = find_files(library)[:max_files]
    python = "Python {}.{}".format(*sys.version_info)
    print(f"indexing {len(files)} files of the {python} standard library on {num_procs} procs", flush=True)

    procs = this_host().spawn_procs(per_host={"procs": num_procs}, name="demo")
    workers = procs.spawn("indexer", Indexer, library)  # one in each proc; returns at once, messages wait for them

    index_all(workers, files, num_procs)
    # The workers' indexes are added up here, in whatever order they arrive.
    index = Accumulator(workers.index, Index(), operator.add).accumulate().get()
    seconds = time.perf_counter() - started
    report(index)
    report_work(workers, index.total.longest, seconds)

    with fault_queue() as failures:
        show_raise(workers)
        show_death(workers, failures)
    procs.stop().get()
    print(f"\ndone in {time.perf_counter() - started:.1f} s")


def find_files(library: Path) -> list[str]:
    """The library's modules, without its tests, relative to its folder."""
    files = (path.relative_to(library) for path in sorted(library.rglob("*.py")))
    return [file.as_posix() for file in files if not _SKIPPED.intersection(file.parts)]


def index_all(workers: Indexer, files: list[str], num_procs: int) -> None:
    """Let every worker index its share, and show how far they are."""
    workers.assign.broadcast(files)  # to all of them; nobody waits
    # Messages of one sender arrive in order, so the shares are assigned before the batches are asked for. All are asked
    # for at once: no worker waits for a slower one.
    rounds = range(0, len(files), _BATCH * num_procs)
    replies = [reply for _ in rounds for reply in workers.index_batch.stream()]
    with progress_bar(len(files)) as advance:
        for reply in replies:
            advance(reply.get())


def report(index: Index) -> None:
    """Print what was found, the largest packages first."""
    print(f"\n  {'package':15s} {'files':>5s} {'lines':>8s} {'tokens':>10s}  longest function")
    largest = sorted(index.packages.items(), key=lambda item: -item[1].tokens)
    for name, package in [*largest[:_SHOWN_PACKAGES], (f"all {len(largest)}", index.total)]:
        longest = f"{package.longest.lines} lines: {package.longest.name}" if package.longest.lines else ""
        print(f"  {name:15s} {package.files:5,d} {package.lines:8,d} {package.tokens:10,d}  {longest}")
    common = ", ".join(f"{name} {count:,d}" for name, count in index.identifiers.most_common(6))
    print(f"\n  {len(index.identifiers):,d} different identifiers; the most frequent: {common}")


def report_work(workers: Indexer, longest: Function, seconds: float) -> None:
    """Print a closer look at the longest function, and what each worker has done."""
    branches = workers.branches.choose(longest).get()  # one worker, whichever
    print(f"  the longest function: {longest.name}, {longest.file}:{longest.first_line}, with {branches} branches\n")

    shares = workers.share.call().get()  # one value per worker, each with its place in the mesh
    for point, share in shares.items():
        print(f"  worker {point['procs']}: {share.files} files, {share.tokens:,d} tokens, {share.cpu_s:.1f} s of processor time")
    cpu_s = sum(share.cpu_s for share in shares.values())
    print(f"  {seconds:.1f} s from the start to the whole index, for {cpu_s:.1f} s of work")


def show_raise(workers: Indexer) -> None:
    """An endpoint that raises: its caller is told, and the actor lives on."""
    print("\nworker 0 is asked about a file that does not exist:")
    worker = workers.slice(procs=0)
    try:
        worker.branches.call_one(Function(1, "main", "no/such/file.py")).get()
    except ActorError as error:
        print(f"  ActorError: {error.message} {type(error.exception).__name__}: {error.exception}")
    print(f"  worker 0 goes on: it still has its index of {worker.share.call_one().get().files} files")


def show_death(workers: Indexer, failures: queue.SimpleQueue[MeshFailure]) -> None:
    """A process that dies: whoever waits for its actor is told, its owner is told, and the others go on."""
    last = len(workers) - 1
    print(f"\nworker {last} is killed while all are asked:")
    pid = workers.slice(procs=last).share.call_one().get().pid
    started = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    try:
        workers.share.call().get()
    except SupervisionError as error:
        print(f"  SupervisionError after {1000 * (time.perf_counter() - started):.0f} ms:")
        print("\n".join(f"    {line}" for line in str(error).splitlines()))
    failure = failures.get(timeout=10)
    print(f"  the owner of the workers, this script, hears of it as well: ranks {failure.crashed_ranks} of {failure.mesh_name}")
    rest = workers.slice(procs=slice(0, last)).share.call().get()
    print(f"  the rest, {len(rest)} of {len(workers)} workers, goes on: it has {sum(share.files for share in rest.values())} indexed files")


@contextmanager
def fault_queue() -> Iterator[queue.SimpleQueue[MeshFailure]]:
    """While it is open, failures that no owner handles are queued here; by default they end the program."""
    failures: queue.SimpleQueue[MeshFailure] = queue.SimpleQueue()
    default = monarch.actor.unhandled_fault_hook
    monarch.actor.unhandled_fault_hook = lambda failure: failures.put(failure)
    try:
        yield failures
    finally:
        monarch.actor.unhandled_fault_hook = default


@contextmanager
def progress_bar(total: int, width: int = 40) -> Iterator[Callable[[int], None]]:
    """A bar on stderr that the yielded function advances, if stderr is a terminal."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        filled = width * done // max(total, 1)
        print(f"\r  [{'#' * filled}{'.' * (width - filled)}] {done}/{total}", end="", file=sys.stderr, flush=True)

    if not sys.stderr.isatty():
        yield lambda count: None
        return
    try:
        yield advance
    finally:
        print(f"\r{' ' * (width + 20)}\r", end="", file=sys.stderr, flush=True)
