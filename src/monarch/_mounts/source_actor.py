"""The source of a pushed directory as an actor: scans and reads it in a process of its own, on the machine of the client.

Read next: `source.py`, which does the work; `mount_actor.py`, who asks.
"""

from __future__ import annotations

import pickle
from typing import NamedTuple

from monarch._mounts.delivery import Piece
from monarch._mounts.hashing import Digests
from monarch._mounts.source import Source
from monarch.actor import Actor, endpoint


class Version(NamedTuple):
    """A version of the directory, as it travels."""

    snapshot: bytes
    digests: Digests | None
    """By which hosts see what they have already; None: of the first version."""


class SourceActor(Actor):
    """One directory."""

    def __init__(self, path: str) -> None:
        self._source = Source(path)
        self._has_lost = False
        """A host was told that bytes of the version of now are lost. What could not be read a moment ago may be there again."""

    @endpoint
    def cover(self, paths: list[str]) -> None:
        """`Source.cover`."""
        self._source.cover(paths)

    @endpoint
    def scan(self, again: bool = False) -> Version | None:
        """Look at the directory; None: nothing has changed since the last time.

        Args:
            again: not every host shows what was found the last time, so None is no answer.
        """
        again, self._has_lost = again or self._has_lost, False
        before = self._source.snapshot
        now = self._source.scan()
        if now is before and not again:
            return None
        return Version(now.encode(), self._source.hashes(before, now) if before is not None else None)

    @endpoint
    def piece(self, offset: int, length: int) -> Piece:
        """Bytes of the current version."""
        whole = self._source.read_within(offset, length)
        if whole is not None:
            found, holes = whole
            return Piece([(at, pickle.PickleBuffer(part)) for at, part in found], [], holes)  # type: ignore[misc] # they arrive as buffers
        data = memoryview(bytearray(length))
        lost = self._source.read_piece(offset, length, data)
        self._has_lost = self._has_lost or bool(lost)
        gaps = [(each.offset, each.length) for each in lost]
        parts = []
        at = offset
        for start, size in [*gaps, (offset + length, 0)]:
            if at < start:
                parts.append((at, pickle.PickleBuffer(data[at - offset : start - offset])))
            at = start + size
        return Piece(parts, gaps)  # type: ignore[arg-type] # they arrive as buffers
