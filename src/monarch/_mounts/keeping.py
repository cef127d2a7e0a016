"""What need not move: pieces of a new version whose digest says that the same bytes are here already.

Rules of this file:
    1. A digest of an old piece is either announced by the source together with the new ones, or made here from the bytes that are here.
    2. Made here are those of the same place of the same path, and of files of the same length that are gone: one of them may have
       been renamed.
    3. Pieces of zeros, mostly of holes, are here on every host.
    4. Copying needs no lock: what is here never changes.

Read next: `source.py`, which makes the digests.
"""

from __future__ import annotations

from monarch._mounts import hashing
from monarch._mounts.hashing import PIECE_BYTES, Digests
from monarch._mounts.ranges import Span
from monarch._mounts.snapshot import Snapshot
from monarch._mounts.store import Store


def keep(store: Store, old: Snapshot, new: Snapshot, digests: Digests) -> int:
    """Make room for `new` in the store, and copy into it what is here.

    Args:
        old: the version that the store has; still readable.
        digests: of pieces of files that changed from `old` to `new`, and of the old ones as far as the source knows them.

    Returns:
        Bytes of the new version that need not move. They count as arrived.

    Cost: one hash of the old bytes of each changed file where the source has not announced it, and one copy of what is kept.
        Meanwhile both versions are in memory.
    """
    store.extend(new)
    here: dict[tuple[bytes, int], Span] = {}
    lacking: list[tuple[Span, bytes]] = []
    for span, value in digests.spans():
        if store.peek(span) is not None:
            here.setdefault((value, span.length), span)
        else:
            lacking.append((span, value))
    old_bytes = _OldBytes(store, old, new, digests.algorithm)
    kept = 0
    zeros = hashing.zero_digest(digests.algorithm, PIECE_BYTES) if digests.algorithm in hashing.algorithms() else b""
    for span, value in lacking:
        key = value, span.length
        if value == zeros and span.length == PIECE_BYTES:
            store.put_zeros(*span)
            kept += span.length
            continue
        if key not in here:
            here.update(old_bytes.like(span))
        if key in here and _copy(store, here[key], span):
            kept += span.length
    store.count_kept(kept)
    return kept


class _OldBytes:
    """Digests of what is here of files that are no longer in the new version, made when they may be of use."""

    def __init__(self, store: Store, old: Snapshot, new: Snapshot, algorithm: str) -> None:
        self._store = store
        self._old = old
        self._new = new
        self._digest = hashing.digest(algorithm) if algorithm in hashing.algorithms() else None
        self._by_length: dict[int, list[Span]] = {}
        for span in old.spans - new.spans:
            self._by_length.setdefault(span.length, []).append(span)
        self._looked: set[tuple[int, int]] = set()
        """Length of the files that are gone, and offset in them, which have been hashed."""

    def like(self, span: Span) -> dict[tuple[bytes, int], Span]:
        """Pieces that may be the same as `span` of the new version, under their digests."""
        row, file = next(self._new.files(span), (0, span))
        before = self._old.find(self._new.path(row))
        was = self._old.span(before) if before is not None else None
        candidates = [] if was is None or was.length == file.length else [was]
        at = span.offset - file.offset
        if (file.length, at) not in self._looked:
            self._looked.add((file.length, at))
            candidates += self._by_length.get(file.length, [])
        found = {}
        for candidate in candidates:
            part = Span(candidate.offset + at, span.length)
            views = self._store.peek(part) if self._digest is not None and part.end <= candidate.end else None
            if views is not None and self._digest is not None:
                found[self._digest(views[0] if len(views) == 1 else b"".join(views)), part.length] = part
        return found


def _copy(store: Store, source: Span, target: Span) -> bool:
    sources = store.peek(source)
    if sources is None:
        return False
    at = target.offset
    for view in sources:
        store.put(at, view)
        at += len(view)
    return True
