"""Debug servers that can be found: a file in the run directory of each client that has one.

The file is for its user alone, like the directory, and holds the secret that the server asks for. It disappears with
the client; of a client that was killed the directory's lock is free, so its file does not count.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import NamedTuple

from monarch._base.errors import explain
from monarch._runtime.rundir import live_run_dirs

HOST_VARIABLE = "MONARCH_DEBUG_SERVER_HOST"
PORT_VARIABLE = "MONARCH_DEBUG_SERVER_PORT"
DEFAULT_PORT = 27000
_FILE = "debug.json"


def port_wanted() -> int | None:
    """The port that the environment names, 0 for any; None when it names none.

    Raises:
        ValueError: it is no port.
    """
    text = os.environ.get(PORT_VARIABLE)
    if not text:
        return None
    if not (text.isdecimal() and int(text) < 65536):
        raise ValueError(explain(f"{PORT_VARIABLE}={text!r} is no port", next="give a number from 0 (any free port) to 65535"))
    return int(text)


class DebugJob(NamedTuple):
    """Where a client's debug server listens."""

    host: str
    """An address that this machine can connect to."""
    port: int
    token: str
    """What a terminal has to send first."""
    pid: int
    """The client's process."""
    command: str
    """How the client was started."""


def publish_debug_job(run_dir: str, job: DebugJob) -> None:
    """Let `find_debug_jobs` find `job` from now on; replaces an earlier one of the same client."""
    path = os.path.join(run_dir, _FILE)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    fd = os.open(path + ".new", os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump(job._asdict(), file)
    os.rename(path + ".new", path)


def withdraw_debug_job(run_dir: str) -> None:
    """The server has ended; harmless when nothing was published."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(run_dir, _FILE))


def find_debug_jobs() -> list[DebugJob]:
    """The debug servers of this user's clients on this machine, by port."""
    found = []
    for run_dir in live_run_dirs():
        try:
            with open(os.path.join(run_dir, _FILE)) as file:
                found.append(DebugJob(**json.load(file)))
        except (OSError, ValueError, TypeError):  # none there, or of another version
            continue
    return sorted(found, key=lambda job: job.port)
