"""Copies: versions of the same bytes side by side in memory of one process, which others read and map while the next is made.

    header    stamp, version, bytes that are there     24 bytes for each slot
              handle of each slot                      so that a slot that is made later is found by those who have only the header
    slot 0    the bytes of one version                 memory from its first use on, until `close`
    slot 1    ...

    stamp     publication (from 1), attempt, whether it is still being filled; 0: there is nothing to be read

Rules of this file:
    1. The stamp is 0 before the first byte of a slot changes, and no two fillings of a slot have the same stamp. So whoever finds the
       stamp that he had found before he read, has read bytes of that filling only.
    2. A slot that is mapped is never filled. The lease is a lock of the kernel on a byte of the memory file (as in `regions.py`), which
       belongs to the mapping and ends with it, or with its process. Filling takes the same lock, exclusively.
    3. The oldest slot is filled first, and a new one only when there are fewer than `copies`, or the others are mapped.

Read next: `weights.py`, which publishes them; `relays.py` for those that pass them on; `mapped.py` for who maps them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from monarch._base.buffers import address_of
from monarch._base.errors import explain
from monarch._runtime.future import Future
from monarch.rdma.buffer import RDMABuffer
from monarch.rdma.errors import BufferGoneError, NoRoomError, OwnerGoneError, RDMAError, UnavailableError
from monarch.rdma.handles import MOST_BYTES, decode_handle, encode_handle
from monarch.rdma.holders import holders_of
from monarch.rdma.manager import is_published
from monarch.rdma.memory import FilePlace, LocalMemory, memory_of
from monarch.rdma.vm_transport import machine

_WORD_BYTES = 8
_WORDS = 3
_STAMP, _VERSION, _ARRIVED = 0, 1, 2
_HANDLE = struct.Struct(f"<H{MOST_BYTES}s")
_FLOCK = struct.Struct("hhqqi4x")
_ATTEMPTS = 128


class Copy(NamedTuple):
    """What the header says of a slot."""

    slot: int
    stamp: int
    version: int
    arrived: int
    """Bytes, from the first on."""

    @property
    def number(self) -> int:
        """Of the publication."""
        return self.stamp // (2 * _ATTEMPTS)

    @property
    def is_whole(self) -> bool:
        """All bytes are there."""
        return self.stamp > 0 and not self.stamp & 1

    def is_same(self, other: Copy) -> bool:
        """The same filling of the same slot."""
        return self.slot == other.slot and self.stamp | 1 == other.stamp | 1


NOTHING = Copy(0, 0, 0, 0)


class MemoryFile(NamedTuple):
    """Where the file is that the slots are in."""

    boot: bytes
    namespace: int
    """Of the process ids."""
    pid: int
    fd: int
    name: str
    """By which another file in its place is told; it is random."""
    stride: int
    """Bytes from slot to slot."""


class Copies:
    """The owner's end. Thread: any, one at a time, but `close`."""

    def __init__(self, size: int, *, copies: int, spares: int) -> None:
        """Args:
        size: bytes of a version.
        copies: slots that are filled in turns.
        spares: how many more there may be while others are mapped.
        """
        self.size = size
        self.pid = os.getpid()
        self._copies = copies
        self._most = copies + spares
        self._stride = -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self._name = f"monarch-weights-{os.urandom(8).hex()}"
        self._slots: list[memoryview] = []
        header = memoryview(mmap.mmap(-1, self._most * (_WORDS * _WORD_BYTES + _HANDLE.size)))
        self._handles = header[self._most * _WORDS * _WORD_BYTES :]
        self._words = (ctypes.c_int64 * (self._most * _WORDS)).from_buffer(header)  # an item is stored at once
        self._buffers = [RDMABuffer._over(memory_of(header.toreadonly()))]
        self._attempts = 0
        self._is_closed = False
        self._last = NOTHING
        """When it was closed."""
        self._fd = _memory_file(self._name, self._stride * self._most)
        file = None
        if self._fd >= 0:
            file = MemoryFile(*machine(), os.getpid(), self._fd, self._name, self._stride)
        self.published = PublishedCopies(self._buffers[0], self._most, size, file)
        """The handle for others."""
        self._filling = NOTHING
        self._late: dict[int, list[Future[None]]] = {}
        """By slot, transfers that may still write to it."""

    def newest(self) -> Copy:
        """The newest whole copy."""
        return newest(self._all())

    def check(self) -> None:
        """RDMAError when they were closed, or this is a fork: that shares the memory, and would publish in the place of its parent."""
        if self._is_closed:
            what = f"these weights were closed, with close(), when version {self._last.version} was the last"
            hint = "make a new WeightPublisher, and give its handle (publisher.weights) to the readers"
            raise RDMAError(explain(what, where=self.published.owner, next=hint))
        if os.getpid() != self.pid:
            what = f"only process {self.pid} publishes these weights, and this is a fork of it"
            raise RDMAError(explain(what, where=f"process {os.getpid()}", next="make a new WeightPublisher"))

    def begin(self, number: int, version: int) -> memoryview:
        """The memory to fill with a publication. Its slot holds nothing until `arrived` or `finish`.

        Raises:
            NoRoomError: all slots are mapped; the text says by whom.
            RDMAError: see `check`.
        """
        self.check()
        slot = self._choose()
        self._attempts = (self._attempts + 1) % _ATTEMPTS
        self._filling = Copy(slot, (number * _ATTEMPTS + self._attempts) * 2, version, 0)
        at = slot * _WORDS
        self._words[at + _STAMP] = 0
        self._words[at + _ARRIVED] = 0
        self._words[at + _VERSION] = version
        return self._slots[slot]

    def arrived(self, nbytes: int) -> Copy:
        """So many bytes are there, and may be read already."""
        at = self._filling.slot * _WORDS
        self._words[at + _ARRIVED] = nbytes
        self._words[at + _STAMP] = self._filling.stamp | 1
        return self._filling._replace(stamp=self._filling.stamp | 1, arrived=nbytes)

    def finish(self) -> Copy:
        """All bytes are there: this is the newest whole copy from now on."""
        whole = self._filling._replace(arrived=self.size)
        at = whole.slot * _WORDS
        self._words[at + _ARRIVED] = self.size
        self._words[at + _STAMP] = whole.stamp
        self._end()
        return whole

    def abandon(self, late: Sequence[Future[None]] = ()) -> None:
        """What was filled in so far is worth nothing. No-op when nothing is being filled.

        Args:
            late: transfers into it; the slot is filled anew only when they are over.
        """
        if self._filling.stamp:
            self._late[self._filling.slot] = [*late]
            self._words[self._filling.slot * _WORDS + _STAMP] = 0
            self._end()

    def _end(self) -> None:
        _lock(self._fd, fcntl.F_UNLCK, self._filling.slot)
        self._filling = NOTHING

    def _all(self) -> list[Copy]:
        return copies_in(self._words[: len(self._slots) * _WORDS])

    def _choose(self) -> int:
        """A slot that nobody maps, locked."""
        if len(self._slots) >= self._copies:
            kept = -1 if self._copies == 1 else self.newest().slot
            for copy in sorted(self._all(), key=lambda copy: copy.stamp):
                if copy.slot != kept and not self._is_late(copy.slot) and _lock(self._fd, fcntl.F_WRLCK, copy.slot):
                    return copy.slot
            if len(self._slots) == self._most:
                raise self._all_mapped()
        return self._add_slot()

    def _is_late(self, slot: int) -> bool:
        return not all(transfer._done for transfer in self._late.get(slot, ()))

    def _add_slot(self) -> int:
        slot = len(self._slots)
        try:
            if self._fd >= 0:
                memory = memoryview(mmap.mmap(self._fd, self._stride, offset=slot * self._stride))
            else:
                memory = memoryview(mmap.mmap(-1, self._stride))
        except OSError as exc:
            hint = "raise the limit of open files (ulimit -n) or of memory (ulimit -v)"
            raise NoRoomError(explain(f"there can be no copy {slot + 1} of the weights: {exc}", next=hint)) from exc
        place = FilePlace(self._fd, slot * self._stride) if self._fd >= 0 else None
        buffer = RDMABuffer._over(LocalMemory(address_of(memory)[0], self.size, memory, is_readonly=True, file=place))
        data = encode_handle(buffer._handle)
        _HANDLE.pack_into(self._handles, slot * _HANDLE.size, len(data), data)
        self._buffers.append(buffer)
        self._slots.append(memory[: self.size])
        _lock(self._fd, fcntl.F_WRLCK, slot)
        return slot

    def _all_mapped(self) -> NoRoomError:
        versions = {copy.slot: copy.version for copy in self._all()}
        held = sorted({(versions[offset // self._stride], pid, command) for pid, command, offset in holders_of(self._name)})
        who = [f"version {version} by pid {pid} ({command})" for version, pid, command in held]
        who += [f"copy {slot + 1} by a transfer that has been given up" for slot in range(self._most) if self._is_late(slot)]
        return NoRoomError(
            explain(
                f"there is no room for the next version: of {self._most} copies of the weights readers map all but the newest",
                where="; ".join(who) or "in processes of other users",
                next="close() what weights.mapped() gave, or publish with more spares: WeightPublisher(..., spares=8)",
            )
        )

    def close(self) -> None:
        """Take the memory back. Who has mapped it keeps it. Harmless twice."""
        if not self._is_closed:
            self._last, self._is_closed = self.newest(), True
        for buffer in self._buffers:
            if is_published(buffer._handle):  # or else the runtime that did so has ended, and taken it back
                buffer.drop().get()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._slots.clear()


class PublishedCopies:
    """A handle to the copies of another process. Thread: any."""

    def __init__(self, header: RDMABuffer, most: int, size: int, file: MemoryFile | None) -> None:
        """Args:
        most: slots that the header has room for.
        file: None: the slots can't be mapped.
        """
        self.size = size
        self._header = header
        self._most = most
        self._file = file
        self._buffers: dict[int, RDMABuffer] = {}
        """Of the slots that were read from here."""
        self.wait: Callable[[Future[None]], None] = Future.get
        """How small transfers are waited for."""

    @property
    def owner(self) -> str:
        """Whose they are, for people."""
        return f"{self._header._handle.ref.uid} at {self._header._handle.ref.address}"

    def explained(self, failure: RDMAError, last: Copy) -> RDMAError:
        """A failure in the words of who knows of weights, and not of the buffers that they are in; itself when it is no matter of that.

        Args:
            last: what was read from here before.
        """
        cause = failure.__cause__
        if isinstance(cause, BufferGoneError):
            what = "these weights are closed: their WeightPublisher has taken the memory back, with close()"
            hint = "take the handle of the WeightPublisher that publishes now (publisher.weights)"
        elif isinstance(cause, OwnerGoneError):
            what = f"the publisher of these weights is gone: {cause.fate or cause.what}"
            hint = "make a new WeightPublisher in a process that lives, and take its handle (publisher.weights)"
        else:
            return failure
        seen = "no version was seen from here" if last == NOTHING else f"version {last.version} was the last that was seen from here"
        return RDMAError(explain(f"{what}; {seen}", where=self.owner, next=hint))

    def newest(self, timeout: int) -> Copy:
        """The newest copy that is whole now; `NOTHING` while the only one is being filled. Cost: one small one-sided read.

        Raises:
            RDMAError: the owner has ended, or has closed them. So do all methods.
        """
        return newest(copies_in(self._words(0, self._most, timeout)))

    def look(self, slot: int, timeout: int) -> Copy:
        """What is in a slot now."""
        return copies_in(self._words(slot, 1, timeout))[0]._replace(slot=slot)

    def bytes_of(self, slot: int, timeout: int) -> RDMABuffer:
        """The memory of a slot that has held something."""
        buffer = self._buffers.get(slot)
        if buffer is None:
            start = self._most * _WORDS * _WORD_BYTES + slot * _HANDLE.size
            length, data = _HANDLE.unpack(self._read(start, _HANDLE.size, timeout))
            handle = decode_handle(data[:length])
            buffer = self._buffers[slot] = RDMABuffer._of(handle, 0, handle.nbytes)
        return buffer

    @property
    def is_near(self) -> bool:
        """Whether they can be mapped from here."""
        return self._file is not None and (self._file.boot, self._file.namespace) == machine()

    def map(self, copy: Copy, timeout: int) -> mmap.mmap | None:
        """The bytes of a copy, without a copy: they stay as they are as long as the result, or a view of it, exists. What is written
        to it is seen here only.

        Returns:
            None: it is not there any more.

        Raises:
            UnavailableError: the owner has ended, or is another user's.
        """
        assert self._file is not None
        try:
            fd = _open(self._file)
        except OSError as exc:
            raise UnavailableError(
                explain(f"the memory of the weights can't be opened: {exc}", where=self.owner, next="pull() them")
            ) from exc
        try:
            if not _lock(fd, fcntl.F_RDLCK, copy.slot) or not self.look(copy.slot, timeout).is_same(copy):
                return None
            return self._mapping(fd, copy.slot * self._file.stride)
        finally:
            os.close(fd)

    def _mapping(self, fd: int, offset: int) -> mmap.mmap:
        """It keeps a duplicate of the descriptor, which keeps the lock: the lease ends with the mapping itself."""
        try:
            return mmap.mmap(fd, self.size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=offset)
        except OSError as exc:
            hint = "close() what was mapped before, or raise the limit of open files (ulimit -n) or of memory (ulimit -v)"
            raise UnavailableError(explain(f"the weights can't be mapped: {exc}", where=self.owner, next=hint)) from exc

    def _words(self, first: int, number: int, timeout: int) -> list[int]:
        data = self._read(first * _WORDS * _WORD_BYTES, number * _WORDS * _WORD_BYTES, timeout)
        return list(memoryview(data).cast("q"))

    def _read(self, start: int, nbytes: int, timeout: int) -> bytearray:
        data = bytearray(nbytes)
        self.wait(self._header[start : start + nbytes].read_into(data, timeout=timeout))
        return data

    def __reduce__(self) -> tuple[object, ...]:
        return PublishedCopies, (self._header, self._most, self.size, self._file)


def copies_in(words: Sequence[int]) -> list[Copy]:
    """The copies that words of the header tell of, counted from 0."""
    return [Copy(slot, *words[slot * _WORDS : (slot + 1) * _WORDS]) for slot in range(len(words) // _WORDS)]


def newest(copies: Sequence[Copy]) -> Copy:
    """The newest whole one; `NOTHING` when there is none."""
    return max((copy for copy in copies if copy.is_whole), key=lambda copy: copy.stamp, default=NOTHING)


def _memory_file(name: str, size: int) -> int:
    """A sparse memory file; -1 where there are none."""
    if not hasattr(os, "memfd_create") or not hasattr(fcntl, "F_OFD_SETLK"):
        return -1
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _lock(fd: int, kind: int, slot: int) -> bool:
    """Lock the byte of a slot, or let go of it; False when others hold it."""
    if fd < 0:
        return True
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, slot, 1, 0))
    except OSError as exc:
        if exc.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def _open(file: MemoryFile) -> int:
    fd = os.open(f"/proc/{file.pid}/fd/{file.fd}", os.O_RDONLY | os.O_CLOEXEC)
    if os.readlink(f"/proc/self/fd/{fd}") == f"/memfd:{file.name} (deleted)":
        return fd
    os.close(fd)
    raise FileNotFoundError(errno.ENOENT, "another process has its process id")
