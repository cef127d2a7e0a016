"""Kept frames: copies of long frames, in memory that is used again, until the other end has them.

What can't change is not copied: `bytes`, and what was settled.

Read next: `session_link.py`, which keeps them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from monarch._base.reused import is_settled, reused, settle
from monarch._wire.frames import Buffer

LONG_BYTES = 512 << 10
"""From here on a frame is kept in chunks; a shorter one is one piece of bytes."""
_CHUNK_BYTES = 4 << 20
_LEAST_REFERRED = 64 << 10
"""A shorter piece is copied: each has a write of its own."""


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
        views = [memoryview(piece) for piece in pieces]
        left = sum([len(view) for view in views if not _stays(view)])
        space, fill = memoryview(b""), 0
        for view in views:
            if _stays(view):
                if fill:
                    yield self._add(settle(space[:fill]))
                    space, fill = space[fill:], 0
                yield self._add(view)
                continue
            rest = view
            while len(rest):
                if fill == len(space):
                    if fill:
                        yield self._add(settle(space))
                    space, fill = reused(min(left, _CHUNK_BYTES)), 0
                count = min(len(rest), len(space) - fill)
                space[fill : fill + count] = rest[:count]
                fill += count
                left -= count
                rest = rest[count:]
        if fill:
            yield self._add(settle(space[:fill]))

    def _add(self, view: memoryview) -> memoryview:
        self.pieces.append(view)
        self._size += len(view)
        return view

    def free(self) -> None:
        """Nobody needs it any more."""
        self.pieces.clear()


def _stays(view: memoryview) -> bool:
    return len(view) >= _LEAST_REFERRED and is_settled(view)
