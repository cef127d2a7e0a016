"""Log files: one for each process of a run, in a folder that only this user can read.

    <folder>/<date>-<time>-<random>/        one run: what one host agent captured; `lock` is locked while it runs
        trainer-3.<random>.log              the process of rank 3 of the mesh `trainer`; `.1`, `.2` are older parts

`<folder>` is the setting `log_folder`, by default `<temporary folder>/monarch-<user id>-logs`.

Rules of this file:
    1. A file is bounded (`log_file_max_bytes`), and so are the number of its older parts and the number and age of old runs.
    2. A write that fails turns that file off and is told once; the process and its other output go on.

Read next: `log_tail.py`, which reads them for people.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from typing import NamedTuple

from monarch._runtime.rundir import is_locked, make_private

NUM_OLDER_PARTS = 2
LOCK = "lock"
ENDING = ".log"
_NUM_OLD_RUNS = 10
_OLD_RUN_S = 7 * 86400.0


class RunFolder(NamedTuple):
    """The folder of a run that goes on, and the descriptor that says so."""

    path: str
    lock_fd: int


class Run(NamedTuple):
    """A run as people look for it."""

    path: str
    running: bool
    started_s: float
    """Seconds since the epoch."""


def base_folder(configured: str) -> str:
    """Where the runs of this user are; not made here.

    Args:
        configured: the setting `log_folder`.
    """
    if configured:
        return os.path.abspath(os.path.expanduser(configured))
    import tempfile

    return os.path.join(tempfile.gettempdir(), f"monarch-{os.geteuid()}-logs")


def make_log_folder(folder: str) -> None:
    """Make `folder` unless it is there; others may read in it at most.

    Raises:
        PermissionError: it belongs to somebody else or others may write to it.
    """
    make_private(folder, others=0o022, next="remove it, or choose another one with monarch.config.configure(log_folder=...)")


def make_run(base: str) -> RunFolder:
    """A fresh folder for the files of a run; runs that are too old go.

    Raises:
        OSError: there is no room, or no permission.
    """
    import tempfile

    make_log_folder(base)
    sweep(base)
    path = tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=base)
    lock_fd = os.open(os.path.join(path, LOCK), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock_fd, fcntl.LOCK_EX)
    return RunFolder(path, lock_fd)


def runs(base: str) -> list[Run]:
    """All runs of this user, the youngest first."""
    found = []
    for entry in os.scandir(base) if os.path.isdir(base) else ():
        if entry.is_dir(follow_symlinks=False):
            with contextlib.suppress(FileNotFoundError):  # being made, or swept away by another agent
                started_s = os.stat(os.path.join(entry.path, LOCK)).st_mtime
                found.append(Run(entry.path, is_running(entry.path), started_s))
    return sorted(found, key=lambda run: run.started_s, reverse=True)


def sweep(base: str) -> None:
    """Remove the oldest runs that have ended."""
    import shutil

    ended = [run for run in runs(base) if not run.running]
    for place, run in enumerate(ended):
        if place >= _NUM_OLD_RUNS or time.time() - run.started_s > _OLD_RUN_S:
            shutil.rmtree(run.path, ignore_errors=True)


def files_of(run: str) -> Iterator[os.DirEntry[str]]:
    """The current file of each process of a run."""
    for entry in os.scandir(run):
        if entry.name.endswith(ENDING):
            yield entry


def is_running(run: str) -> bool:
    """Whether the host agent that writes into this folder lives."""
    return is_locked(os.path.join(run, LOCK))


class RotatedFile:
    """A file that starts anew when it has reached its size. Thread: one."""

    def __init__(self, path: str, most_bytes: int) -> None:
        self.path = path
        self._most_bytes = most_bytes
        self._fd = -1
        self._bytes = 0
        self._open()

    def _open(self) -> None:
        self._fd = os.open(self.path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._bytes = os.fstat(self._fd).st_size

    def write(self, data: bytes) -> None:
        """Append whole lines; a line that is longer than a file gets one of its own."""
        start = 0
        while start < len(data):
            room = self._most_bytes - self._bytes
            end = len(data) if len(data) - start <= room else data.rfind(b"\n", start, start + max(0, room)) + 1
            if end <= start and self._bytes:
                self._rotate()
                continue
            if end <= start:
                end = data.find(b"\n", start) + 1 or len(data)
            self._append(memoryview(data)[start:end])
            start = end

    def _append(self, data: memoryview) -> None:
        self._bytes += len(data)
        while data:
            data = data[os.write(self._fd, data) :]

    def _rotate(self) -> None:
        os.close(self._fd)
        self._fd = -1
        for number in range(NUM_OLDER_PARTS, 0, -1):
            older = self.path if number == 1 else f"{self.path}.{number - 1}"
            with contextlib.suppress(FileNotFoundError):
                os.replace(older, f"{self.path}.{number}")
        self._open()

    def close(self) -> None:
        """Close the file; harmless when that has happened."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Stamp:
    """The local time as text, in milliseconds; formatted once a second."""

    def __init__(self) -> None:
        self._second = -1
        self._text = ""

    def __call__(self, now_s: float) -> str:
        second = int(now_s)
        if second != self._second:
            self._second = second
            self._text = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
        return f"{self._text}.{int((now_s - second) * 1000):03d}"
