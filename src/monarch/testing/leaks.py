"""Leaks: what a test may leave behind, which is nothing. Snapshots of this process and of the machine, and what has grown.

    with no_leaks():
        run_my_program()

Rules of this file:
    1. Only what belongs to this test session is looked at, so that several sessions can share a machine: every process
       started from here inherits `SESSION_MARK`, and `TMPDIR` may be a folder of the session's own.
    2. `Snapshot.quick` is for every unit test (well under a millisecond); `Snapshot.full` walks all of /proc.
    3. Things that are on their way out get `GRACE_S` to finish; a longer goodbye is a leak.

Where there is no /proc, only threads and files are seen.

Read next: `fixtures.py` for pytest.
"""

from __future__ import annotations

import fcntl
import gc
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from monarch._base.errors import explain

GRACE_S = 3.0
SESSION_MARK = "MONARCH_TEST_SESSION"
MOUNT_ROOTS = "MONARCH_TEST_MOUNT_ROOTS"
"""Environment variable with the folders below which mounts are this session's, separated as in PATH; without it, all are."""
_SHM = Path("/dev/shm")
_WATCHED_FDS = ("socket:", "pipe:", "anon_inode:", "/memfd:", "/dev/shm/", "/dev/fuse")


@dataclass(frozen=True)
class Snapshot:
    """What exists at one moment, each thing as a line that a person can read."""

    processes: frozenset[str]
    threads: frozenset[str]
    fds: frozenset[str]
    files: frozenset[str]
    mounts: frozenset[str]

    @classmethod
    def quick(cls) -> Snapshot:
        """The direct children, threads, descriptors and files of this process; no walk over other processes."""
        return cls(_lines_of(children(os.getpid())), _threads(), _fds(), _files(), frozenset())

    @classmethod
    def full(cls) -> Snapshot:
        """As `quick`, and every process that descends from this one or carries the session's mark, and FUSE mounts."""
        mark = f"{SESSION_MARK}={os.environ.get(SESSION_MARK, '')}"
        pids = set(descendants(os.getpid())) | set(marked(mark))
        return cls(_lines_of(pids - {os.getpid()}), _threads(), _fds(), _files(), _mounts())

    def growth(self, later: Snapshot) -> list[str]:
        """What `later` has and this one had not, one line each."""
        kinds = ("processes", "threads", "fds", "files", "mounts")
        return [f"{kind}: {thing}" for kind in kinds for thing in sorted(getattr(later, kind) - getattr(self, kind))]


class LeakError(AssertionError):
    """Something was left behind; the text lists it."""


@contextmanager
def no_leaks(*, grace_s: float = GRACE_S) -> Iterator[None]:
    """Fail when the block leaves processes, threads, sockets, pipes, shared memory, run directories or mounts behind.

    The client of `monarch.actor` counts: call `shutdown_context().get()` in the block, or open the block once, around all
    tests that share a client.

    Args:
        grace_s: what is still on its way out gets so many seconds.

    Raises:
        LeakError: something is left; not when the block itself raises.
    """
    mark_session()
    before = Snapshot.full()
    yield
    left = wait_no_growth(before, Snapshot.full, grace_s)
    if left:
        raise LeakError(
            explain("this was left behind", next="end it in the block: stop meshes, shutdown_context().get()", detail="\n".join(left))
        )


def mark_session() -> str:
    """Give this process a mark that all processes it starts from now on inherit, unless it has one; the mark."""
    return os.environ.setdefault(SESSION_MARK, uuid.uuid4().hex)


def wait_no_growth(before: Snapshot, take: Callable[[], Snapshot], grace_s: float = GRACE_S) -> list[str]:
    """What is still there after `grace_s`, [] as soon as nothing is: closing sockets and dying processes need a moment."""
    grown = before.growth(take())
    deadline = time.monotonic() + grace_s
    while grown and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
        grown = before.growth(take())
    return grown


def children(pid: int) -> list[int]:
    """Direct children of `pid`, zombies too: a child that nobody waited for is a leak."""
    found: list[int] = []
    for task in _listdir(f"/proc/{pid}/task"):
        found += [int(child) for child in _read(f"/proc/{pid}/task/{task}/children").split()]
    return found


def descendants(pid: int) -> Iterator[int]:
    """Every process below `pid`, nearest first."""
    for child in children(pid):
        yield child
        yield from descendants(child)


def marked(mark: str) -> list[int]:
    """Processes that were started with `mark` (NAME=value) in their environment, whoever their parent is now.

    A fork shares the environment block of the program that forked, so warm forks are found as well.
    """
    wanted = mark.encode()
    pids = [int(name) for name in _listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if wanted in _read_bytes(f"/proc/{pid}/environ").split(b"\0")]


def command(pid: int) -> str:
    """`pid` and its command line for a message, `(zombie)` when only the entry is left; "" when it has gone."""
    status = _read(f"/proc/{pid}/stat")
    if not status:
        return ""
    line = _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
    return f"pid {pid}: {line or status.split('(', 1)[1].rsplit(')', 1)[0] + ' (zombie)'}"


def _lines_of(pids: set[int] | list[int]) -> frozenset[str]:
    lines = {command(pid) for pid in pids} - {""}
    # The standard library keeps one tracker per process on purpose.
    return frozenset(line for line in lines if "multiprocessing.resource_tracker" not in line)


def _threads() -> frozenset[str]:
    """Threads that keep the interpreter from ending, and the product's own."""
    return frozenset(
        f"{thread.name} (ident {thread.ident}{', daemon' if thread.daemon else ''})"
        for thread in threading.enumerate()
        if not thread.daemon or thread.name.lower().startswith("monarch")
    )


def _fds() -> frozenset[str]:
    found = set()
    for fd in _listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith(_WATCHED_FDS):
            found.add(f"{fd} -> {target}")
    return frozenset(found)


def _files() -> frozenset[str]:
    """The product's files in shared memory, and run directories in the session's temporary folder."""
    shared = [path for path in _SHM.glob("monarch*") if not _in_use_elsewhere(path)] if _SHM.is_dir() else []
    runs = [path for path in Path(os.environ.get("TMPDIR", "/tmp")).glob("monarch*/*") if not _is_stale_run(path)]
    return frozenset(map(str, shared + runs))


def _is_stale_run(path: Path) -> bool:
    """Whether `path` is a run directory of processes that were all killed: nobody is left to remove it, the next client does."""
    try:
        with open(path / "lock", "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return not path.exists()
    except OSError:
        return False
    return True


def _in_use_elsewhere(path: Path) -> bool:
    """Whether a process outside of this session has `path` mapped or open: then it is another session's file."""
    mark = f"{SESSION_MARK}={os.environ.get(SESSION_MARK, '')}"
    ours = {os.getpid(), *descendants(os.getpid()), *marked(mark)}
    others = [name for name in _listdir("/proc") if name.isdigit() and int(name) not in ours]
    return any(str(path) in _read(f"/proc/{name}/maps") for name in others)


def _mounts() -> frozenset[str]:
    lines = _read("/proc/self/mountinfo").splitlines()
    roots = tuple(root.rstrip("/") + "/" for root in os.environ.get(MOUNT_ROOTS, "").split(os.pathsep) if root)
    paths = (line.split()[4] for line in lines if " - fuse" in line)
    return frozenset(path for path in paths if not roots or path.startswith(roots))


def _listdir(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def _read(path: str) -> str:
    return _read_bytes(path).decode(errors="replace")


def _read_bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
