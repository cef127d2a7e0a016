"""Kept frames: copies of long frames, in memory that is used again, until the other end has them.

Fresh pages cost four times as much as the copy into them, so chunks come from a pool and go back to it.

Read next: `session_link.py`, which keeps them.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator, Sequence

from monarch._wire.frames import Buffer

LONG_BYTES = 512 << 10
"""From here on a frame is kept in chunks; a shorter one is one piece of bytes."""
_CHUNK_BYTES = 4 << 20
_MOST_FREE = 16
"""Chunks that wait for their next use."""


class _Pool:
    """Chunks of one process. Thread: any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[mmap.mmap] = []

    def take(self) -> mmap.mmap:
        """A chunk, with whatever is in it."""
        with self._lock:
            if self._free:
                return self._free.pop()
        chunk = mmap.mmap(-1, _CHUNK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                chunk.madvise(mmap.MADV_HUGEPAGE)
        return chunk

    def give(self, chunk: mmap.mmap) -> None:
        """It is not used any more."""
        with self._lock:
            if len(self._free) < _MOST_FREE:
                self._free.append(chunk)


_pool = _Pool()


class KeptFrame:
    """A copy of one long frame. Thread: one at a time."""

    __slots__ = ("_chunks", "_size", "pieces")

    def __init__(self) -> None:
        self.pieces: list[memoryview] = []
        """The frame, in order."""
        self._chunks: list[mmap.mmap] = []
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
                    chunk = _pool.take()
                    self._chunks.append(chunk)
                    space, fill = memoryview(chunk), 0
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
        """Nobody needs it any more; its pieces must not be used from here on."""
        self.pieces.clear()
        chunks, self._chunks = self._chunks, []
        for chunk in chunks:
            _pool.give(chunk)
