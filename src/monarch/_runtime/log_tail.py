"""The tail of log files: what `monarch logs` prints.

Read next: `log_files.py` for where the files are.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from monarch._base.errors import did_you_mean, explain
from monarch._runtime import log_files

_STEP_S = 0.1
_BLOCK_BYTES = 1 << 16
_NAME = re.compile(r"(?P<mesh>.+)-(?P<rank>\d+)\.(?P<random>[^.]+)\.log")


class LogFile(NamedTuple):
    """The file of one process."""

    path: str
    mesh: str
    """Label of its proc mesh."""
    rank: int
    """Rank in that mesh."""
    num_bytes: int
    written_s: float
    """When it was last written to, in seconds since the epoch."""

    @property
    def name(self) -> str:
        """Mesh and rank, as people name a process."""
        return f"{self.mesh}-{self.rank}"

    def is_meant(self, names: Sequence[str]) -> bool:
        """Whether `names` (of meshes, of processes, ranks) mean this one; no names mean all."""
        return not names or bool({self.mesh, self.name, str(self.rank)} & set(names))


def log_files_of(run: log_files.Run) -> list[LogFile]:
    """The files of a run by mesh and rank; of two meshes of one name the younger comes last."""
    found = []
    for entry in log_files.files_of(run.path):
        match = _NAME.fullmatch(entry.name)
        if match:
            status = entry.stat()
            found.append(LogFile(entry.path, match["mesh"], int(match["rank"]), status.st_size, status.st_mtime))
    return sorted(found, key=lambda file: (file.mesh, file.rank, file.written_s))


def chosen(files: Sequence[LogFile], names: Sequence[str]) -> list[LogFile]:
    """The files of the processes that `names` mean: a mesh ("trainer"), a process ("trainer-3") or a rank ("3"); all for none.

    Raises:
        ValueError: a name that no file has.
    """
    for name in names:
        if not any(file.is_meant([name]) for file in files):
            known = sorted({name for file in files for name in (file.mesh, file.name)})
            raise ValueError(
                explain(f"no process {name!r} has a log file here{did_you_mean(name, known)}", next=f"known are {', '.join(known[:20])}")
            )
    return [file for file in files if file.is_meant(names)]


def last_lines(path: str, number: int) -> bytes:
    """The last `number` lines of a file, as far as they end in a newline.

    Cost: reads backwards, and no more than needed.
    """
    with open(path, "rb") as file:
        return _last_lines(file.fileno(), number)[0]


def _last_lines(fd: int, number: int) -> tuple[bytes, int]:
    """The lines, and where they end in the file."""
    end = os.fstat(fd).st_size
    start, data = end, b""
    while start > 0 and data.count(b"\n") <= number:
        step = min(_BLOCK_BYTES, start)
        start -= step
        data = os.pread(fd, step, start) + data
    complete = data[: data.rfind(b"\n") + 1]
    lines = complete.splitlines(keepends=True)
    return b"".join(lines[-number:] if number else []), end - len(data) + len(complete)


class _Follower:
    """Reads what is appended to one file, also after it has been started anew."""

    def __init__(self, path: str, number: int) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.first, self._at = _last_lines(self._fd, number)

    def read(self) -> bytes:
        """The complete lines that are new."""
        data = self._new_lines()
        while not data and (newer := self._next_part()) is not None:
            data = self._new_lines()  # what came between the first look and the rotation
            os.close(self._fd)
            self._fd, self._at = newer, 0
            data = data or self._new_lines()
        return data

    def _new_lines(self) -> bytes:
        data = b""
        while piece := os.pread(self._fd, _BLOCK_BYTES, self._at + len(data)):
            data += piece
            if b"\n" in piece and len(data) >= _BLOCK_BYTES:
                break
        data = data[: data.rfind(b"\n") + 1]
        self._at += len(data)
        return data

    def _next_part(self) -> int | None:
        """A descriptor of the part behind the one that is read; None while that is the last one."""
        parts = [f"{self._path}.{number}" for number in range(log_files.NUM_OLDER_PARTS, 0, -1)] + [self._path]
        own, newer = os.fstat(self._fd).st_ino, None
        for part in reversed(parts):
            try:
                fd = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            if os.fstat(fd).st_ino == own:
                os.close(fd)
                return newer
            if newer is not None:
                os.close(newer)
            newer = fd
        return newer

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._fd)


def follow(run: log_files.Run, names: Sequence[str], number: int) -> Iterator[tuple[LogFile, bytes]]:
    """The last lines of each chosen process and then what is added, also by processes that start later; ends with the run."""
    followers: dict[str, tuple[LogFile, _Follower]] = {}
    try:
        while True:
            running = log_files.is_running(run.path)  # before the reading: what was written before the end is read
            for file in log_files_of(run):
                if file.path not in followers and file.is_meant(names):
                    follower = _Follower(file.path, number)
                    followers[file.path] = file, follower
                    if follower.first:
                        yield file, follower.first
            for file, follower in followers.values():
                while data := follower.read():
                    yield file, data
            if not running:
                return
            time.sleep(_STEP_S)
    finally:
        for _, follower in followers.values():
            follower.close()
