"""Holes: where a sparse file has no data, so that nothing need be read, hashed, sent or kept of it.

Only whole pieces count, the ones by which content is compared. A piece that has been written is data, also if it is all zeros.

Read next: `source.py`, who sends holes as such; `segment.py`, which keeps them so.
"""

from __future__ import annotations

import errno
import os

_NO_MORE_DATA = errno.ENXIO
_BLOCK_BYTES = 512
"""Of `st_blocks`, on every file system."""


def data_in(fd: int, start: int, end: int, piece_bytes: int) -> list[tuple[int, int]]:
    """Where a file has data between `start` and `end`; all of it where the file system does not tell. Moves the file's position.

    Returns:
        Disjoint ranges in order, of whole pieces counted from the beginning of the file, as far as they lie between the two.

    Cost: two system calls for each run of data, where there are holes.
    """
    status = os.fstat(fd)
    if status.st_blocks * _BLOCK_BYTES >= status.st_size:  # no hole; to look for one takes the longer, the more data there is
        return [(start, end)]
    found: list[tuple[int, int]] = []
    at = start
    while at < end:
        try:
            low = os.lseek(fd, at, os.SEEK_DATA)
            if low >= end:
                break
            high = os.lseek(fd, low, os.SEEK_HOLE)
        except OSError as exc:
            if exc.errno == _NO_MORE_DATA:
                break
            return [(start, end)]
        low, high = max(at, low // piece_bytes * piece_bytes), min(end, -(-high // piece_bytes) * piece_bytes)
        if found and found[-1][1] == low:
            low = found.pop()[0]
        found.append((low, high))
        at = high
    return found


def gaps_in(found: list[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """What lies between the ranges that `data_in` has found."""
    edges = [start, *(edge for each in found for edge in each), end]
    return [(low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high]
