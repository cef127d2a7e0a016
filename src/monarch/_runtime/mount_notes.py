"""Mount notes: what a process has mounted, written down where those who tidy up after it look.

A FUSE mount outlives the process that served it: the kernel tells everybody who uses it that nobody is there, until somebody takes
it away. A process that may be killed leaves a note beside its socket file first. Whoever removes that takes the mount away too: the
agent when a proc has ended, the zygote when the agent was killed, the next client when all of them were.

Rules of this file:
    1. Only mounts of ours are taken away, and never waited for: who still uses one gets errors, and it is gone.

Read next: `rundir.py` and `host.py`, which tidy up; `_mounts/mounting.py`, which mounts.
"""

from __future__ import annotations

import contextlib
import os

PREFIX = "mount-"
_KIND = " - fuse.monarch "
_MNT_DETACH = 2
_UMOUNT_NOFOLLOW = 8
_HELPERS = ("fusermount3", "fusermount")
_HELPER_S = 5.0


def note_of(socket_file: str) -> str:
    """The notes of the process that has this socket file."""
    folder, name = os.path.split(socket_file)
    return os.path.join(folder, PREFIX + name)


def add(file: str, path: str) -> None:
    """Write down that a process is about to mount at `path`."""
    with open(file, "ab", opener=lambda place, flags: os.open(place, flags, 0o600)) as notes:
        notes.write(os.fsencode(path) + b"\0")


def remove(file: str, path: str) -> None:
    """The mount at `path` is gone."""
    left = [each for each in _paths(file) if each != path]
    if left:
        with open(file + ".new", "wb", opener=lambda place, flags: os.open(place, flags, 0o600)) as notes:
            notes.writelines(os.fsencode(each) + b"\0" for each in left)
        os.rename(file + ".new", file)
    else:
        with contextlib.suppress(OSError):
            os.unlink(file)


def tidy(file: str) -> None:
    """Take away what a process that has ended had mounted, and its notes. Blocks for some milliseconds a mount."""
    for path in _paths(file):
        _detach(path)
    with contextlib.suppress(OSError):
        os.unlink(file)


def _paths(file: str) -> list[str]:
    try:
        with open(file, "rb") as notes:
            return [os.fsdecode(path) for path in notes.read().split(b"\0")[:-1]]
    except OSError:
        return []


def _detach(path: str) -> None:
    if not _is_ours(path):
        return
    import ctypes  # both for this rare case only: every client imports this module
    import subprocess

    with contextlib.suppress(OSError, AttributeError):
        if ctypes.CDLL(None, use_errno=True).umount2(os.fsencode(path), _MNT_DETACH | _UMOUNT_NOFOLLOW) == 0:
            return
    for helper in _HELPERS:
        try:
            subprocess.run([helper, "-u", "-z", "--", path], timeout=_HELPER_S, capture_output=True)
        except (OSError, subprocess.TimeoutExpired):
            continue
        return


def _is_ours(path: str) -> bool:
    escaped = "".join(f"\\{ord(char):03o}" if char in " \t\n\\" else char for char in path)
    try:
        with open("/proc/self/mountinfo", errors="surrogateescape") as table:
            return any(_KIND in line and line.split(" ", 5)[4] == escaped for line in table)
    except (OSError, IndexError):
        return False
