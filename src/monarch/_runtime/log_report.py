"""What `monarch logs` says: the jobs of this user that have log files, and the tails of their processes.

Read next: `log_tail.py` for the reading.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence

from monarch import config
from monarch._base.errors import did_you_mean, explain
from monarch._runtime import log_files, log_tail
from monarch._runtime.log_files import Run

_NO_FILES = "a job writes them when it sets enable_file_capture=True with monarch.config.configure() before it spawns"


def overview(folder: str | None, job: str | None) -> str:
    """The jobs and their processes as a table.

    Raises:
        ValueError: there is none, or not the one that `job` names.
    """
    lines = []
    for run in _runs(folder, job):
        lines.append(f"{os.path.basename(run.path)}  {'running' if run.running else 'ended'}")
        for file in log_tail.log_files_of(run):
            written = time.strftime("%H:%M:%S", time.localtime(file.written_s))
            lines.append(f"  {file.name:<24} {file.num_bytes:>12} bytes   last line at {written}   {file.path}")
    return "\n".join(lines)


def tails(folder: str | None, job: str | None, processes: Sequence[str], num_lines: int, *, follow: bool) -> Iterator[bytes]:
    """The last lines of the chosen processes, each under its name; with `follow` also what comes, until the job ends.

    Raises:
        ValueError: there is no such job, or no such process.
    """
    run = _runs(folder, job)[0]
    files = log_tail.chosen(log_tail.log_files_of(run), processes)
    heads = len(files) > 1
    if not follow:
        for file in files:
            data = log_tail.last_lines(file.path, num_lines)
            yield _head(file) + data if heads else data
        return
    last = ""
    for file, data in log_tail.follow(run, processes, num_lines):
        yield _head(file) + data if heads and file.path != last else data
        last = file.path


def _head(file: log_tail.LogFile) -> bytes:
    return f"==> {file.name} <==\n".encode()


def _runs(folder: str | None, job: str | None) -> list[Run]:
    """The runs to look at, never none."""
    base = log_files.base_folder(config.value("log_folder") if folder is None else folder)
    found = log_files.runs(base)
    if not found:
        raise ValueError(explain(f"no job of this user has log files in {base}", next=_NO_FILES))
    if job is None:
        return found
    names = [os.path.basename(run.path) for run in found]
    if job not in names:
        raise ValueError(explain(f"no job {job!r}{did_you_mean(job, names)}", where=base, next=f"the jobs are {', '.join(names)}"))
    return [found[names.index(job)]]
