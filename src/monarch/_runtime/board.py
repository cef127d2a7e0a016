"""The board: what every actor of a proc is doing, written where the host agent can read it.

A small memory-mapped file beside the proc's socket. The proc writes a few bytes at the start and end of each message;
the agent reads them whenever somebody asks. So a proc that computes, hangs or holds the interpreter lock is still seen
from outside, and asking costs it nothing.

Rules of this file:
    1. A slot has one writer at a time per field; the reader tolerates a torn slot (the next look is right).
    2. Times are CLOCK_MONOTONIC, which all processes of a host share.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

from monarch._base.ids import ProcRef
from monarch._wire.observation_messages import ActorActivity

_SLOT_BYTES = 512
_NUM_SLOTS = 1023
_BOARD_BYTES = _SLOT_BYTES * (_NUM_SLOTS + 1)
_logger = logging.getLogger("monarch.runtime")
_NAME = struct.Struct("<i200s99s?")
"""Rank, human chain, name, whether it waits at a breakpoint."""
_WORK = struct.Struct("<Qd64sQ")
"""Messages handled, since when the running one runs (0: none does), its endpoint, messages waiting."""
_END = struct.Struct("<Qd")
_BEGIN = struct.Struct("<d64sQ")
_WAITING = struct.Struct("<Q")
_WHO = struct.Struct("<Q56s")
"""Ident of the actor's thread, the end of its mesh's uid."""
_OVERLAP = struct.Struct("<Qd40s")
"""Concurrent calls under way, since when the oldest runs, its endpoint."""
_ARMED = struct.Struct("<iI")
"""Behind the number of slots: the process that wrote it, and the signal that makes it dump its stacks (0: none)."""
_NAME_AT = 0
_DEBUGGED_AT = _NAME.size - 1
_WORK_AT = -(-_NAME.size // 8) * 8
_BEGIN_AT = _WORK_AT + 8
_WAITING_AT = _WORK_AT + _WORK.size - _WAITING.size
_WHO_AT = _WORK_AT + _WORK.size
_OVERLAP_AT = _WHO_AT + _WHO.size
_ARMED_AT = 8


class Entry(NamedTuple):
    """One actor as the board shows it. Times are on the board's clock; 0: nothing runs."""

    slot: int
    """Which slot; after the actor's end another one may get it."""
    rank: int
    display: str
    name: str
    handled: int
    since_s: float
    endpoint: str
    waiting: int
    thread: int
    """Ident of its thread."""
    mesh: str
    """The end of its mesh's uid."""
    num_concurrent: int
    oldest_since_s: float
    oldest: str
    debugged: bool = False
    """Whether it waits at a breakpoint."""


_SPARE_BYTES = 8 * _BOARD_BYTES


class Board:
    """The writer's end; one per proc."""

    def __init__(self, address_path: str | None) -> None:
        """Args:
        address_path: the proc's socket; None: nobody looks from outside, the board stays in this process.
        """
        if address_path is None:
            self._memory = mmap.mmap(-1, _BOARD_BYTES)
        else:
            fd = os.open(path_of(address_path), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            space = os.fstatvfs(fd)
            if space.f_bavail * space.f_frsize < _SPARE_BYTES:  # a page that can't be had when it is first touched is a SIGBUS
                _logger.warning("the disk of %s is full: what the actors of this process do can't be seen from outside", address_path)
                self._memory = mmap.mmap(-1, _BOARD_BYTES)
            else:
                os.ftruncate(fd, _BOARD_BYTES)
                self._memory = mmap.mmap(fd, _BOARD_BYTES)
            os.close(fd)
        self._used = 0
        self._free: list[int] = []

    def arm(self, pid: int, signal: int) -> None:
        """From now on `signal` makes the process dump its stacks; 0: none does."""
        _ARMED.pack_into(self._memory, _ARMED_AT, pid, signal)

    def slot(self, rank: int, display: str, name: str, *, mesh: str = "", thread: int = 0) -> Slot | None:
        """A slot for one actor; None when the board is full.

        Args:
            mesh: uid of the actor's mesh.
            thread: ident of the actor's thread.
        """
        if self._free:
            index = self._free.pop()
        elif self._used < _NUM_SLOTS:
            index = self._used = self._used + 1
        else:
            return None
        offset = index * _SLOT_BYTES
        self._memory[offset : offset + _SLOT_BYTES] = bytes(_SLOT_BYTES)
        _NAME.pack_into(self._memory, offset + _NAME_AT, rank, _clip(display, 200), _clip(name, 99), False)
        _WHO.pack_into(self._memory, offset + _WHO_AT, thread, mesh.encode("utf-8", "replace")[-56:])
        struct.pack_into("<Q", self._memory, 0, self._used)
        return Slot(self._memory, offset)

    def give_back(self, slot: Slot) -> None:
        """The actor of a slot has ended, and its thread too: nobody writes to the slot any more."""
        slot.leave()
        self._free.append(slot.index)

    def rows(self, ref: ProcRef, pid: int, state: str) -> list[ActorActivity]:
        """What this process's own actors are doing."""
        return _rows(self._memory, ref, pid, state)


class Slot:
    """Where one actor says what it does."""

    __slots__ = ("_begin_at", "_memory", "_name_at", "_overlap_at", "_waiting_at", "_work_at", "index")

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._memory = memory
        self.index = offset // _SLOT_BYTES
        self._name_at = offset + _NAME_AT
        self._work_at = offset + _WORK_AT
        self._begin_at = offset + _BEGIN_AT
        self._waiting_at = offset + _WAITING_AT
        self._overlap_at = offset + _OVERLAP_AT

    def begin(self, now_s: float, endpoint: bytes, waiting: int) -> None:
        """An endpoint starts, while so many messages are queued."""
        _BEGIN.pack_into(self._memory, self._begin_at, now_s, endpoint, waiting)

    def end(self, handled: int) -> None:
        """It has ended; so many have."""
        _END.pack_into(self._memory, self._work_at, handled, 0.0)

    def wait(self, waiting: int) -> None:
        """So many messages are queued."""
        _WAITING.pack_into(self._memory, self._waiting_at, waiting)

    def overlap(self, count: int, oldest_since_s: float, endpoint: str) -> None:
        """So many concurrent calls are under way."""
        _OVERLAP.pack_into(self._memory, self._overlap_at, count, oldest_since_s, _clip(endpoint, 40))

    def debug(self, waits: bool) -> None:
        """The actor waits at a breakpoint, or does not any more."""
        self._memory[self._name_at + _DEBUGGED_AT] = waits

    def leave(self) -> None:
        """The actor has ended; its row goes."""
        _NAME.pack_into(self._memory, self._name_at, 0, b"", b"", False)


def read(ref: ProcRef, address_path: str, pid: int, state: str, silent_s: float = 0.0) -> list[ActorActivity]:
    """What the actors of a proc of this host are doing; [] when it has no board.

    Args:
        state: "stopped" or "gone" when the process is; "" otherwise.
        silent_s: for how long its interpreter has not answered.
    """
    return _rows(_used(address_path), ref, pid, state, silent_s)


def look(address_path: str) -> list[Entry]:
    """The actors of a proc of this host; [] when it has no board. Cost: reads the slots in use, about 1 us each."""
    return list(_entries(_used(address_path)))


def armed(address_path: str) -> tuple[int, int]:
    """The process behind a board and the signal that makes it dump its stacks; (0, 0) when none does."""
    data = _used(address_path)
    pid, signal = _ARMED.unpack_from(data, _ARMED_AT) if data else (0, 0)
    return (pid, signal) if signal else (0, 0)


def _used(address_path: str) -> bytes:
    """The part of a board's file that is in use; b"" when there is none, or it is being made."""
    try:
        fd = os.open(path_of(address_path), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        if os.fstat(fd).st_size < _BOARD_BYTES:
            return b""
        (used,) = struct.unpack("<Q", os.pread(fd, 8, 0))
        return os.pread(fd, (min(used, _NUM_SLOTS) + 1) * _SLOT_BYTES, 0)
    finally:
        os.close(fd)


def _entries(data: bytes | mmap.mmap) -> Iterator[Entry]:
    if not data:
        return
    (used,) = struct.unpack_from("<Q", data, 0)
    for index in range(1, min(used, len(data) // _SLOT_BYTES - 1) + 1):
        offset = index * _SLOT_BYTES
        rank, display, name, debugged = _NAME.unpack_from(data, offset + _NAME_AT)
        if not name.strip(b"\0"):
            continue
        handled, since_s, endpoint, waiting = _WORK.unpack_from(data, offset + _WORK_AT)
        thread, mesh = _WHO.unpack_from(data, offset + _WHO_AT)
        count, oldest_since_s, oldest = _OVERLAP.unpack_from(data, offset + _OVERLAP_AT)
        yield Entry(
            index, rank, _text(display), _text(name), handled, since_s, _text(endpoint), waiting, thread, _text(mesh),
            count, oldest_since_s, _text(oldest), debugged,
        )  # fmt: skip


def _rows(data: bytes | mmap.mmap, ref: ProcRef, pid: int, state: str, silent_s: float = 0.0) -> list[ActorActivity]:
    now_s = time.monotonic()
    return [
        ActorActivity(
            actor=entry.display,
            name=entry.name,
            rank=entry.rank,
            proc=ref.uid,
            pid=pid,
            endpoint=entry.endpoint if entry.since_s > 0 else None,
            running_s=max(0.0, now_s - entry.since_s) if entry.since_s > 0 else 0.0,
            waiting=entry.waiting,
            handled=entry.handled,
            state=state or ("busy" if entry.since_s > 0 else "idle"),
            mesh=entry.mesh,
            num_concurrent=entry.num_concurrent,
            oldest=entry.oldest if entry.num_concurrent else None,
            oldest_s=max(0.0, now_s - entry.oldest_since_s) if entry.num_concurrent else 0.0,
            silent_s=silent_s,
            debugged=entry.debugged,
        )
        for entry in _entries(data)
    ]


def path_of(address_path: str) -> str:
    """The board's file, beside the proc's socket."""
    return address_path + ".b"


def _clip(text: str, limit: int) -> bytes:
    return text.encode("utf-8", "replace")[:limit]


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode("utf-8", "replace")
