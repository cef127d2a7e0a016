"""Memory that is used again: views of large buffers that go back to a pool with the last reference to them.

Fresh pages cost several times as much as a copy into them: the kernel finds, clears and maps each one.

    view = reused(4 << 20)        # with whatever was in it
    ...                           # slices, arrays over it, whoever holds them
                                  # all of them gone: the next one gets these pages

Rules of this file:
    1. No lock: views end anywhere, also in the middle of what is done here. Lists are taken from and added to in one step.
    2. What is free stays below `MOST_FREE_BYTES` for the whole process, and the kernel may take it when memory is short.
    3. Pages are free when nobody can reach them any more, finalisers of a reference cycle included (`tokens.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from monarch._base.tokens import new_token

MOST_BYTES = 32 << 20
"""Of one view; a longer one is not kept for the next."""
MOST_FREE_BYTES = 64 << 20
_LEAST_BYTES = 512 << 10
_HUGE_BYTES = 2 << 20


class Pages:
    """What views of this module are views of."""

    is_settled = False
    """Nobody writes to them any more, as long as they are in use."""


_free: dict[int, list[mmap.mmap]] = {}
"""Pages that nobody uses, by their number of bytes."""


def reused(size: int) -> memoryview:
    """A writable view of `size` bytes that hold anything, page-aligned. Thread: any.

    Raises:
        OSError: there is no memory.
        ValueError: `size` < 1.

    Cost: 5 us with pages that were used before.
    """
    if size < 1:
        raise ValueError(f"there is no memory of {size} bytes")
    if size > MOST_BYTES:
        return memoryview(_new(size))
    capacity = max(_LEAST_BYTES, 1 << (size - 1).bit_length())
    free = _free.setdefault(capacity, [])
    try:
        pages = free.pop()
    except IndexError:
        pages = _new(capacity)
    exporter = _kind(capacity).from_buffer(pages)
    exporter.token = new_token()
    weakref.finalize(exporter.token, _giver(free), pages).atexit = False
    return memoryview(exporter).cast("B")[:size]


def settle(view: memoryview) -> memoryview:
    """Promise that nobody will write to a view of `reused`, or to any other of the same bytes: whoever keeps it need not copy it."""
    pages = _exporter(view)
    if isinstance(pages, Pages):
        pages.is_settled = True
    return view


def is_settled(view: memoryview) -> bool:
    """Whether the bytes of a view never change as long as it exists: they were settled, or are those of a `bytes`."""
    exporter = _exporter(view)
    return isinstance(exporter, bytes) or (isinstance(exporter, Pages) and exporter.is_settled)


def _exporter(view: memoryview) -> Any:
    """What has the bytes; a view of a `PickleBuffer` names the view that this was made of."""
    exporter: Any = view.obj
    while isinstance(exporter, memoryview):
        exporter = exporter.obj
    return exporter


@lru_cache
def _kind(capacity: int) -> Any:
    return type("Pages", (Pages, ctypes.Array), {"_type_": ctypes.c_ubyte, "_length_": capacity})


def _giver(free: list[mmap.mmap]) -> Callable[[mmap.mmap], None]:
    def give(pages: mmap.mmap) -> None:
        if free_bytes() + len(pages) <= MOST_FREE_BYTES:
            _advise(pages, "MADV_FREE")
            free.append(pages)

    return give


def free_bytes() -> int:
    """How much waits for its next use."""
    return sum([capacity * len(pages) for capacity, pages in list(_free.items())])


def _new(capacity: int) -> mmap.mmap:
    pages = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _advise(pages, "MADV_HUGEPAGE")
    return pages


def _advise(pages: mmap.mmap, advice: str) -> None:
    if len(pages) >= _HUGE_BYTES and hasattr(mmap, advice):
        with contextlib.suppress(OSError):  # a kernel that does not know it
            pages.madvise(getattr(mmap, advice))
