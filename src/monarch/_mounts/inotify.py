"""Changes of directories as the kernel tells them: inotify, by way of ctypes.

Rules of this file:
    1. `decode` is pure; whatever the kernel cannot have written is a ValueError.
    2. Reading never blocks. Who wants to wait polls the descriptor.

What inotify does not tell: writes through a mapping until the file is closed, changes made by other machines (NFS), and those through
another hard link of a file in another directory.

Read next: `watches.py`, which makes changes of paths from it.
"""

from __future__ import annotations

import ctypes
import os
import struct
from enum import IntFlag
from functools import lru_cache
from typing import NamedTuple

_EVENT = struct.Struct("=iIII")
_READ_BYTES = 1 << 16
_MAGIC_BYTES = 256
"""More than `struct statfs` has on any machine; it begins with the type of the file system, as a long."""


class Mask(IntFlag):
    """What happened, or what is wanted."""

    MODIFY = 0x2
    ATTRIB = 0x4
    CLOSE_WRITE = 0x8
    MOVED_FROM = 0x40
    MOVED_TO = 0x80
    CREATE = 0x100
    DELETE = 0x200
    DELETE_SELF = 0x400
    MOVE_SELF = 0x800
    UNMOUNT = 0x2000
    Q_OVERFLOW = 0x4000
    IGNORED = 0x8000
    ONLYDIR = 0x01000000
    ISDIR = 0x40000000


NAMES = Mask.MOVED_FROM | Mask.MOVED_TO | Mask.CREATE | Mask.DELETE
"""A name of the directory stands for something else now."""
LOST = Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.UNMOUNT | Mask.IGNORED
"""The directory itself is gone, or elsewhere."""
WANTED = Mask.MODIFY | Mask.ATTRIB | Mask.CLOSE_WRITE | NAMES | Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.ONLYDIR


class Event(NamedTuple):
    """One change."""

    watch: int
    """Number of the watch; -1: of none (`Q_OVERFLOW`)."""
    mask: int
    """Of `Mask`."""
    cookie: int
    """The same for both ends of a move."""
    name: bytes
    """In the directory that is watched; b"": the directory itself."""


def decode(data: bytes) -> list[Event]:
    """The events of one read.

    Raises:
        ValueError: the bytes end in the middle of one.
    """
    events = []
    at = 0
    while at < len(data):
        if len(data) - at < _EVENT.size:
            raise ValueError(f"{len(data) - at} bytes are no inotify event of at least {_EVENT.size}")
        watch, mask, cookie, length = _EVENT.unpack_from(data, at)
        at += _EVENT.size
        if len(data) - at < length:
            raise ValueError(f"an inotify event claims a name of {length} bytes, {len(data) - at} are left")
        events.append(Event(watch, mask, cookie, data[at : at + length].rstrip(b"\0")))
        at += length
    return events


class Inotify:
    """A queue of events. Thread: any; `close` when nobody uses it any more."""

    def __init__(self) -> None:
        """
        Raises:
            OSError: the kernel has none, or this user has too many (`fs.inotify.max_user_instances`).
        """
        self._libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(self._libc, "inotify_init1"):
            raise OSError("this system has no inotify")
        self.fd: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise _error("no inotify")

    def add(self, path: bytes) -> int:
        """Watch a directory; its number, which is the same for the same directory by whatever path.

        Raises:
            OSError: there is no such directory, or there are too many watches (ENOSPC, `fs.inotify.max_user_watches`).
        """
        watch: int = self._libc.inotify_add_watch(self.fd, path, ctypes.c_uint32(WANTED))
        if watch < 0:
            raise _error(os.fsdecode(path))
        return watch

    def remove(self, watch: int) -> None:
        """End a watch; no-op when it has ended."""
        self._libc.inotify_rm_watch(self.fd, watch)

    def read(self) -> list[Event]:
        """What has happened since; [] when nothing has."""
        try:
            return decode(os.read(self.fd, _READ_BYTES))
        except BlockingIOError:
            return []

    def close(self) -> None:
        """End all watches."""
        os.close(self.fd)


def magic_of(path: bytes) -> int:
    """The type of the file system at `path`, as `statfs` numbers it; 0: unknown."""
    statfs = _statfs()
    buffer = ctypes.create_string_buffer(_MAGIC_BYTES)
    if statfs is None or statfs(path, buffer) != 0:
        return 0
    return int(ctypes.c_ulong.from_buffer(buffer).value) & 0xFFFFFFFF


@lru_cache(maxsize=1)
def _statfs() -> ctypes._NamedFuncPointer | None:
    return getattr(ctypes.CDLL(None, use_errno=True), "statfs", None)


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), what)
