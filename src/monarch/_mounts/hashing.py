"""Digests of pieces: by which both ends see that bytes are the same without moving them.

xxh3 (128 bit) where `xxhash` is installed, the `mounts` extra: faster than any source of the bytes. Otherwise SHA-256, cut to as many
bits. Digests tell versions of one user's directory apart; they prove nothing against an adversary, that is the transport's work.

Rules of this file:
    1. The name of the algorithm travels with the digests. Digests of different algorithms are never compared.
    2. A buffer of some megabytes is shared among threads: both libraries let go of the GIL.

Read next: `source.py` and `store.py`, the two ends.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import msgspec

from monarch._base.errors import explain
from monarch._mounts.holes import data_in, gaps_in
from monarch._mounts.index import read_fully
from monarch._mounts.ranges import Span

PIECE_BYTES = 1 << 20
"""Content is compared, and usually moved, in pieces of this size, counted from the beginning of each big file."""
DIGEST_BYTES = 16
XXH3, SHA256 = "xxh3_128", "sha256_128"

_THREADS = min(4, os.cpu_count() or 1)
_THREADED_BYTES = 16 << 20  # handing work to a thread costs 0.1 ms: below this it does not pay

Digest = Callable[[bytes | bytearray | memoryview], bytes]


class Digests(msgspec.Struct, frozen=True):
    """What the pieces of some files hash to, as it travels."""

    algorithm: str
    offsets: list[int]
    """Where each piece begins in the address space."""
    lengths: list[int]
    values: list[bytes]
    """`DIGEST_BYTES` each."""

    def __post_init__(self) -> None:
        if not len(self.offsets) == len(self.lengths) == len(self.values):
            raise ValueError("the columns of these digests differ in length")

    def spans(self) -> list[tuple[Span, bytes]]:
        """Each piece with its digest."""
        return [(Span(a, b), value) for a, b, value in zip(self.offsets, self.lengths, self.values, strict=True)]


def algorithms() -> list[str]:
    """Those that work here, the best first."""
    return [XXH3, SHA256] if _xxh3() is not None else [SHA256]


@lru_cache(maxsize=1)
def _xxh3() -> Digest | None:
    try:
        import xxhash
    except ImportError:
        return None
    function: Digest = xxhash.xxh3_128_digest
    return function


def digest(algorithm: str) -> Digest:
    """The function that hashes one buffer to `DIGEST_BYTES` bytes.

    Raises:
        ValueError: it is unknown here, or needs a library that is not installed.
    """
    if algorithm == SHA256:
        return _sha256
    xxh3 = _xxh3()
    if algorithm != XXH3 or xxh3 is None:
        next = f"use one of {', '.join(algorithms())}, or install the 'mounts' extra"
        raise ValueError(explain(f"digests by {algorithm!r} cannot be made here", next=next))
    return xxh3


def _sha256(data: bytes | bytearray | memoryview) -> bytes:
    return hashlib.sha256(data, usedforsecurity=False).digest()[:DIGEST_BYTES]


@lru_cache(maxsize=64)
def zero_digest(algorithm: str, size: int) -> bytes:
    """The digest of so many zeros; ValueError as of `digest`."""
    return digest(algorithm)(bytes(size))


def hash_pieces(data: int | memoryview, piece_bytes: int = PIECE_BYTES, *, algorithm: str, length: int | None = None) -> list[bytes]:
    """Digests of `data` in pieces.

    Args:
        data: a buffer of bytes, or the descriptor of a file that can be read at any place.
        piece_bytes: bytes of each piece but the last.
        length: bytes to hash, from the beginning; None: the whole buffer, or the file as long as it is now.

    Raises:
        EOFError: the file ends before `length`.
        OSError: the file cannot be read.

    Cost: about 9 GiB/s (xxh3) or 1 GiB/s (SHA-256) per thread; up to four threads from 16 MiB on. Holes of a file cost nothing.
    """
    if length is None:
        length = os.fstat(data).st_size if isinstance(data, int) else len(data)
    if isinstance(data, int) and os.fstat(data).st_size < length:
        raise EOFError("the file has become shorter")
    ranges = data_in(data, 0, length, piece_bytes) if isinstance(data, int) else [(0, length)]
    values = [b""] * -(-length // piece_bytes)
    for low, high in gaps_in(ranges, 0, length):
        for start in range(low, high, piece_bytes):
            values[start // piece_bytes] = zero_digest(algorithm, min(piece_bytes, length - start))
    pieces = [(start, min(piece_bytes, length - start)) for low, high in ranges for start in range(low, high, piece_bytes)]
    function = digest(algorithm)
    threads = _THREADS if sum(size for _, size in pieces) >= _THREADED_BYTES else 1
    share = -(-len(pieces) // threads) if pieces else 1
    parts = [pieces[at : at + share] for at in range(0, len(pieces), share)]
    if len(parts) <= 1:
        done = [_hash_part(data, part, function) for part in parts]
    else:
        with ThreadPoolExecutor(len(parts), thread_name_prefix="monarch-hash") as pool:
            done = list(pool.map(lambda part: _hash_part(data, part, function), parts))
    for (start, _), value in zip(pieces, (value for part in done for value in part), strict=True):
        values[start // piece_bytes] = value
    return values


def _hash_part(data: int | memoryview, pieces: list[tuple[int, int]], function: Digest) -> list[bytes]:
    if not isinstance(data, int):
        return [function(data[start : start + size]) for start, size in pieces]
    buffer = _buffer(max(size for _, size in pieces))
    values = []
    for start, size in pieces:
        if not read_fully(data, start, buffer[:size]):
            raise EOFError("the file has become shorter")
        values.append(function(buffer[:size]))
    return values


_local = threading.local()


def _buffer(size: int) -> memoryview:
    """Scratch space of this thread: touched pages are several times as fast as fresh ones."""
    view: memoryview | None = getattr(_local, "view", None)
    if view is None or len(view) < size:
        view = _local.view = memoryview(bytearray(max(size, PIECE_BYTES)))
    return view
