"""Kept frames: copies of long frames, in memory that is used again, until the other end has them.

Read next: `session_link.py`, which keeps them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from monarch._base.reused import reused
from monarch._wire.frames import Buffer

LONG_BYTES = 512 << 10
"""From here on a frame is kept in chunks; a shorter one is one piece of bytes."""
_CHUNK_BYTES = 4 << 20


class KeptFrame:
    """A copy of one long frame. Thread: one at a time."""

    __slots__ = ("_size", "pieces")

    def __init__(self) -> None:
        self.pieces: list[memoryview] = []
        """The frame, in order."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def copy(self, pieces: Sequence[Buffer]) -> Iterator[memoryview]:
        """Copy the pieces of a frame; each chunk as soon as it is full, so that it can leave while the next is filled."""
        space, fill = memoryview(b""), 0
        for piece in pieces:
            rest = memoryview(piece)
            while len(rest):
                if fill == len(space):
                    if fill:
                        yield self._add(space)
                    space, fill = reused(_CHUNK_BYTES), 0
                count = min(len(rest), len(space) - fill)
                space[fill : fill + count] = rest[:count]
                fill += count
                rest = rest[count:]
        if fill:
            yield self._add(space[:fill])

    def _add(self, view: memoryview) -> memoryview:
        self.pieces.append(view)
        self._size += len(view)
        return view

    def free(self) -> None:
        """Nobody needs it any more."""
        self.pieces.clear()
