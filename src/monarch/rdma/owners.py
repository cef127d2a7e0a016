"""The owners of one host, as its agent sees them: whose memory may be served, and where regions are in it.

Rules of this file:
    1. Process ids come from the link that a process has to its agent, addresses from its own table. Nothing a reader says is an address.
    2. What the table says is only a hint: `vm.read_spans` and `vm.write_spans` check it again with the bytes.

Read next: `data_service.py`, which serves them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from monarch.rdma import vm
from monarch.rdma.data_frames import WireSpan
from monarch.rdma.errors import BufferGoneError, OwnerGoneError, TransferError
from monarch.rdma.mapped_regions import MappedRegions
from monarch.rdma.memory import FilePlace
from monarch.rdma.regions import ENTRY_BYTES, READ_ONLY, SlotLocks, parse_entry, place_of

_MOST_KNOWN = 4096
"""Regions of an owner whose entry is remembered."""
_MOST_FILES = 256


class _Known:
    """An entry of the owner's table."""

    __slots__ = ("address", "entry", "entry_address", "flags", "nbytes")

    def __init__(self, entry_address: int, entry: bytes, address: int, nbytes: int, flags: int) -> None:
        self.entry_address = entry_address
        self.entry = entry
        self.address = address
        self.nbytes = nbytes
        self.flags = flags


class SharedOwner:
    """One process of this host that has published memory. Thread: any."""

    def __init__(self, uid: str, pid: int, table: int, nonce: bytes, mapped: MappedRegions) -> None:
        self.uid = uid
        self.pid = pid
        self.nonce = nonce
        self._mapped = mapped
        self._table = table
        self._chunks: list[int] = []
        self._known: dict[tuple[int, int], _Known] = {}
        self._files: dict[int, FilePlace] = {}
        """Regions that are files, by generation."""
        self._locks: SlotLocks | None = None
        self._lock = threading.Lock()

    def check(self) -> None:
        """Look at the owner's table; raises as `vm.read_head`, and OwnerGoneError when it is another's."""
        self._head()

    def _head(self) -> vm.Head:
        head = vm.read_head(self.pid, self._table)
        if head.nonce != self.nonce:
            raise OwnerGoneError("its process has ended, and another one has its process id")
        return head

    def resolve(self, spans: Sequence[WireSpan], *, to_write: bool) -> list[vm.Span]:
        """The spans with the owner's addresses, and local addresses of 0.

        Raises:
            BufferGoneError: a region is not there any more.
            TransferError: bytes beyond the end of a region, or writing to one that is read-only.
        """
        found = []
        for span in spans:
            known = self._known.get((span.slot, span.generation)) or self._learn(span)
            number = span.generation - 1
            if span.offset + span.nbytes > known.nbytes:
                raise TransferError(
                    f"bytes {span.offset} to {span.offset + span.nbytes} of buffer {number} of {known.nbytes} bytes do not exist"
                )
            if to_write and known.flags & READ_ONLY:
                raise TransferError(f"buffer {number} is over read-only memory")
            found.append(vm.Span(0, known.address + span.offset, span.nbytes, known.entry_address, known.entry, span.slot, number))
        return found

    def _learn(self, span: WireSpan) -> _Known:
        chunk, index = place_of(span.slot)
        if chunk >= len(self._chunks):
            self._chunks = self._head().chunks
        if chunk >= len(self._chunks):
            raise BufferGoneError(span.generation - 1)
        entry_address = self._chunks[chunk] + index * ENTRY_BYTES
        entry = vm.peek(self.pid, [(entry_address, ENTRY_BYTES)])
        nonce, slot, generation, address, nbytes, flags = parse_entry(entry)
        if nonce != self.nonce or (slot, generation) != (span.slot, span.generation):
            raise BufferGoneError(span.generation - 1)
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        known = self._known[span.slot, span.generation] = _Known(entry_address, entry, address, nbytes, flags)
        return known

    def share_file(self, generation: int, place: FilePlace) -> None:
        """A region is a file. Of regions that have gone since, something may be left here; their entries say that they have."""
        if len(self._files) >= _MOST_FILES:
            del self._files[next(iter(self._files))]
        self._files[generation] = place

    def view_of(self, span: vm.Span) -> memoryview | None:
        """The bytes of a span where its region is a file, mapped at least until the view is gone; None: it is none, or can't be mapped.

        They are those of the region only if its entry is valid before and after they were looked at.
        """
        place = self._files.get(span.number + 1)
        if place is None:
            return None
        _, _, _, address, nbytes, _ = parse_entry(span.entry)
        mapped = self._mapped.find((self.nonce, span.number + 1), self.pid, place, nbytes)
        if mapped is None:
            return None
        start = span.remote - address
        return memoryview(mapped.pages)[start : start + span.nbytes]

    def check_span(self, span: vm.Span) -> None:
        """Whether the entry of a span is valid now; raises as `vm.check_entry`, and lets go of a mapping of the region."""
        try:
            vm.check_entry(self.pid, span.entry_address, span.entry, span.number)
        except (BufferGoneError, OwnerGoneError):
            self._mapped.drop((self.nonce, span.number + 1))
            raise

    def locks(self) -> SlotLocks:
        """The locks of the owner's table; raises `TransferError` and its kinds."""
        with self._lock:
            if self._locks is None:
                self._locks = vm.owner_locks(self.pid, self._table, self._head().lock_fd)
            return self._locks

    def abandon(self) -> None:
        """Close the descriptor only; for a fork."""
        if self._locks is not None and self._locks.fd >= 0:
            os.close(self._locks.fd)
            self._locks.fd = -1

    def close(self) -> None:
        """The owner is gone."""
        self._mapped.forget(self.nonce)
        with self._lock:
            if self._locks is not None:
                self._locks.close()
