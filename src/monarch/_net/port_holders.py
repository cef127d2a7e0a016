"""Who listens on a port of this machine, for the error of whoever wanted it. Reads /proc; elsewhere it knows nothing.

Read next: `interfaces.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

_LISTENING = "0A"
_TABLES = ("/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6")  # of the thread: it may be in a network namespace of its own
_MOST_COMMAND_CHARACTERS = 80


def port_holder(port: int) -> str:
    """`pid 123 (its command line)` of a process that listens on `port`; "" when it cannot be found, as for other users' processes.

    Cost: a walk over every descriptor of every process.
    """
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for pid in _listdir("/proc") if sockets else ():
        if not pid.isdigit():
            continue
        if any(_target(f"/proc/{pid}/fd/{fd}") in sockets for fd in _listdir(f"/proc/{pid}/fd")):
            command = _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
            return f"pid {pid} ({command[:_MOST_COMMAND_CHARACTERS]})"
    return ""


def _listening_inodes(port: int) -> Iterator[str]:
    for table in _TABLES:
        for line in _read(table).splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]


def _target(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _listdir(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def _read(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""
