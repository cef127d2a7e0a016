"""The run directory: where one client's sockets are, private to the user and gone with the client.

`<tmp>/monarch-<user id>/<random>/`, mode 0700, with a lock file that the client and its host agent keep locked. A
directory whose lock is free belonged to processes that were all killed; the next client sweeps it away.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from typing import NamedTuple

from monarch._base.errors import explain
from monarch._runtime import mount_notes

_LOCK = "lock"
_MAX_PREFIX = 60
"""Socket paths are limited to about 107 bytes; the names in the directory take up to 40."""
_MAKING_S = 60.0
"""An empty directory of this age is not being made any more."""


class RunDir(NamedTuple):
    """A run directory and the descriptor that keeps it locked."""

    path: str
    lock_fd: int


def make_run_dir() -> RunDir:
    """A fresh run directory; stale ones are removed first.

    Raises:
        PermissionError: the parent directory belongs to somebody else or others may write to it.
    """
    import tempfile

    parent = _parent()
    sweep(parent)
    while True:
        path = tempfile.mkdtemp(prefix="", dir=parent)
        lock = os.path.join(path, _LOCK)
        lock_fd = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        if os.path.exists(lock):
            return RunDir(path, lock_fd)
        os.close(lock_fd)  # another client's sweep came between the making and the locking, and took it for a dead one's


def remove_run_dir(path: str) -> None:
    """Remove a run directory; harmless when it is gone."""
    # Not shutil's: an agent that ends on a busy machine would spend longer on that import than on all the rest.
    for folder, folders, files in os.walk(path, topdown=False):
        for name in files:
            if name.startswith(mount_notes.PREFIX):
                mount_notes.tidy(os.path.join(folder, name))
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(folder, name))
        for name in folders:
            with contextlib.suppress(OSError):
                os.rmdir(os.path.join(folder, name))
    with contextlib.suppress(OSError):
        os.rmdir(path)


def remove_if_abandoned(path: str) -> None:
    """Remove a run directory when neither its client nor its agent lives; harmless when it is gone."""
    with contextlib.suppress(OSError):
        _remove_unlocked(path)


def _remove_unlocked(path: str) -> None:
    """Remove a run directory whose lock is free.

    Raises:
        FileNotFoundError: it has no lock.
        OSError: it is somebody else's.
    """
    fd = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # in use
    else:
        remove_run_dir(path)
    finally:
        os.close(fd)


def sweep(parent: str) -> None:
    """Remove the run directories of processes that are all gone."""
    for entry in os.scandir(parent):
        try:
            _remove_unlocked(entry.path)
        except FileNotFoundError:  # being made or being removed; or its maker was killed before it had a lock
            with contextlib.suppress(OSError):
                if time.time() - entry.stat().st_mtime > _MAKING_S:
                    os.rmdir(entry.path)
        except OSError:
            continue  # not ours


def live_run_dirs() -> list[str]:
    """The run directories of this user's clients that are alive."""
    return sorted(entry.path for entry in os.scandir(_parent()) if is_locked(os.path.join(entry.path, _LOCK)))


def is_locked(lock: str) -> bool:
    """Whether somebody keeps this lock file locked; False when it is not there, or not ours."""
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: those who look do not see each other
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _parent() -> str:
    import tempfile

    base = tempfile.gettempdir()
    if len(os.fsencode(base)) > _MAX_PREFIX:
        base = "/tmp"
    parent = os.path.join(base, f"monarch-{os.geteuid()}")
    make_private(parent, others=0o077, next="remove it, or point TMPDIR at a directory of your own")
    return parent


def make_private(folder: str, *, others: int, next: str) -> None:
    """Make `folder` for this user alone, unless it is there.

    Args:
        others: what a folder that is there may not let others do, as permission bits.
        next: what people can do when it does.

    Raises:
        PermissionError: it is no folder, belongs to somebody else, or lets others do that.
    """
    with contextlib.suppress(FileExistsError):
        os.makedirs(folder, 0o700)
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & others:
        raise PermissionError(
            explain(
                f"{folder} is not a private directory of this user",
                where=f"owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}",
                next=next,
            )
        )
