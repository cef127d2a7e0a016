"""Whose child is this? Finds what a dead proc left behind, however it tried to get away.

A descendant may change its process group, its session, its parent and its environment. It keeps its resource limits, and
one of them, RLIMIT_LOCKS, means nothing to any kernel since Linux 2.4.25. So every proc gets a value of its own there, its
*tag*: inherited by fork and exec, world-readable, one system call to ask. The environment variable MONARCH_PROC_UID is
the second marker, for a system that refuses the first. Process groups and sessions were not enough (a daemon leaves both),
control groups need privileges that a user of a cluster does not have.

Rules of this file:
    1. It answers questions and marks the calling process; it never kills. The zygote does.
    2. Linux only. Importing it elsewhere is harmless.

Read next: `_runtime/zygote.py`, which hunts.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping

UID_VARIABLE = "MONARCH_PROC_UID"
"""Environment variable that names the proc to its whole offspring."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_RLIMIT_LOCKS = 10

if sys.platform == "linux":
    import resource

    # Loaded at import, in the parent: a dlopen between fork and exec costs each child a millisecond and dirty pages.
    libc = ctypes.CDLL(None, use_errno=True)


def tag_of(uid: str) -> int:
    """The tag of a proc: 62 bits, never zero and never "unlimited"."""
    digest = hashlib.blake2b(uid.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2 | 1 << 61


def mark_self(uid: str) -> bool:
    """Make this process and all its later offspring recognisable as those of `uid`.

    Returns:
        False when the system refuses the tag (a lowered hard limit); the environment variable then stands alone.
    """
    try:
        _, hard = resource.getrlimit(_RLIMIT_LOCKS)
        resource.setrlimit(_RLIMIT_LOCKS, (tag_of(uid), hard))
    except (OSError, ValueError):
        return False
    return True


def adopt_orphans() -> None:
    """Make this process the parent of every orphan below it (a *subreaper*)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signal: int) -> None:
    """Have the kernel send `signal` to this process when its parent, seen as the thread that forked it, ends."""
    _prctl(_PR_SET_PDEATHSIG, signal)


def children_of(pid: int) -> list[int]:
    """Direct children of a process, zombies included; [] when there is no such process.

    Complete for the caller itself, if nothing is reaped meanwhile: the kernel only ever appends to that list.
    Cost: one read per thread of `pid` where the kernel has CONFIG_PROC_CHILDREN, otherwise one per process of the host.
    """
    children: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            try:
                children.extend(map(int, _read(f"/proc/{pid}/task/{task}/children").split()))
            except (FileNotFoundError, ProcessLookupError):
                if os.path.exists(f"/proc/{pid}/task/{task}/stat"):
                    return _children_by_scan(pid)  # the thread lives, so it is the kernel that has no such file
    except (FileNotFoundError, ProcessLookupError):
        return []
    return children


def owner_of(pid: int, uids: Mapping[int, str]) -> str | None:
    """The proc that `pid` descends from.

    Args:
        uids: the procs to choose from, by `tag_of` their uid.

    Returns:
        One of the values of `uids`, or None: of none of them, or already gone.
    """
    uid = uids.get(_tag(pid))
    if uid is not None:
        return uid
    marker = _marker(pid)
    return marker if marker is not None and uids.get(tag_of(marker)) == marker else None


def find_descendants(uids: Iterable[str]) -> Iterator[int]:
    """Every live process of this host that descends from one of the procs, the procs themselves included.

    For whoever cleans up after a zygote that was killed: its orphans then have no parent that knows them.
    Cost: two system calls per process of the host.
    """
    wanted = {tag_of(uid): uid for uid in uids}
    for pid in _pids():
        if owner_of(pid, wanted) is not None and not is_zombie(pid):
            yield pid


def is_zombie(pid: int) -> bool:
    """True for a process that has ended, reaped or not."""
    fields = _stat(pid)
    return fields is None or fields[0] in (b"Z", b"X")


def _prctl(option: int, value: int) -> None:
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _tag(pid: int) -> int:
    try:
        return resource.prlimit(pid, _RLIMIT_LOCKS)[0]
    except ProcessLookupError:
        return 0
    except PermissionError:
        return _tag_of_stranger(pid)


def _tag_of_stranger(pid: int) -> int:
    """The tag of a process with other credentials (sudo): prlimit(2) is refused, the file is not."""
    try:
        lines = _read(f"/proc/{pid}/limits").splitlines()
    except OSError:
        return 0
    soft = next((line.split()[3] for line in lines if line.startswith(b"Max file locks")), b"")
    return int(soft) if soft.isdigit() else 0


def _marker(pid: int) -> str | None:
    try:
        block = _read(f"/proc/{pid}/environ")
    except OSError:  # gone, or other credentials
        return None
    name = UID_VARIABLE.encode() + b"="
    hit = next((entry for entry in block.split(b"\0") if entry.startswith(name)), None)
    return None if hit is None else os.fsdecode(hit[len(name) :])


def _children_by_scan(pid: int) -> list[int]:
    return [child for child in _pids() if (fields := _stat(child)) is not None and int(fields[1]) == pid]


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> list[bytes] | None:
    """Fields of /proc/<pid>/stat from the state on: [state, ppid, pgrp, session, ...]; None when it is gone."""
    try:
        return _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.readall()
