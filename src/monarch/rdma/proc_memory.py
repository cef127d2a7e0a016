"""Memory of processes of this machine by their files `/proc/<pid>/mem`, where a seccomp profile forbids `process_vm_readv` and its like.

The kernel copies as well, to whoever it would let do the calls: the same user, unless Yama, a namespace of users or the process itself
(`PR_SET_DUMPABLE`) is against it. Of its own process it denies nobody anything. What is not mapped is an error and no signal.

Rules of this file:
    1. Nothing is checked here: `vm.py` checks entries in front of the bytes and behind them.
    2. No descriptor is kept, so a process that has ended is noticed, and so is another one under its id.

Read next: `vm.py`, which comes here when it has to.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from monarch.rdma.errors import OwnerGoneError, TransferError, UnreachableError

_GONE = "its process has ended"


class Move(NamedTuple):
    """Bytes here and there."""

    local: int
    """Address here."""
    remote: int
    """Address there."""
    nbytes: int


def read(pid: int, moves: Sequence[Move]) -> None:
    """Copy from a process to this one, one move after the other.

    Raises:
        OwnerGoneError: there is no such process.
        UnreachableError: the kernel forbids it.
        TransferError: nothing is there.
    """
    with _opened(pid, os.O_RDONLY) as fd:
        for local, remote, nbytes in moves:
            view, done = _view(local, nbytes), 0
            while done < nbytes:
                done += _checked(os.preadv(fd, [view[done:]], remote + done))


def write(pid: int, moves: Sequence[Move]) -> None:
    """Copy from this process to another; raises as `read`."""
    with _opened(pid, os.O_RDWR) as fd:
        for local, remote, nbytes in moves:
            view, done = _view(local, nbytes), 0
            while done < nbytes:
                done += _checked(os.pwritev(fd, [view[done:]], remote + done))


@contextmanager
def _opened(pid: int, flags: int) -> Iterator[int]:
    try:
        fd = os.open(f"/proc/{pid}/mem", flags | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        raise OwnerGoneError(_GONE) from None
    except OSError as exc:
        hint = "the kernel (Yama's ptrace_scope), a container or another user forbids it; see docs/rdma.md"
        raise UnreachableError(f"this process may not touch the memory of process {pid} ({exc.strerror})", next=hint) from None
    try:
        yield fd
    except OSError as exc:
        if exc.errno == errno.ESRCH:
            raise OwnerGoneError(_GONE) from None
        hint = "it may be unmapped, or be memory of a device"
        raise TransferError(f"memory of process {pid} can't be moved ({exc.strerror})", next=hint) from None
    finally:
        os.close(fd)


def _view(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _checked(count: int) -> int:
    if not count:
        raise OwnerGoneError(_GONE)
    return count
