"""The agents of some hosts as one value, which is small to send and cheap to compare however many they are.

Every reference to a mesh carries the agents of its hosts, and every proc of the mesh unpickles such a reference.

Read next: `ids.py`, for what an agent is.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import overload

from monarch._base.ids import ProcRef, agent_at

_PACKED_BYTES = 1024
"""From here on addresses are compressed: those of one network differ in a few characters."""


class Agents(Sequence[ProcRef]):
    """Host agents in rank order; immutable. Two are equal when their addresses are."""

    __slots__ = ("_hash", "_packed", "_refs")

    def __init__(self, addresses: Iterable[str]) -> None:
        self._refs = tuple(map(agent_at, addresses))
        self._packed = _pack("\n".join(ref.address for ref in self._refs))
        self._hash = hash(self._packed)

    @overload
    def __getitem__(self, index: int) -> ProcRef: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ProcRef]: ...
    def __getitem__(self, index: int | slice) -> ProcRef | Sequence[ProcRef]:
        return self._refs[index]

    def __len__(self) -> int:
        return len(self._refs)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Agents) and self._packed == other._packed)

    def __repr__(self) -> str:
        return f"Agents({[ref.address for ref in self._refs]})"

    def __reduce__(self) -> tuple[object, ...]:
        return unpacked, (self._packed,)


@functools.lru_cache(maxsize=64)
def unpacked(packed: str | bytes) -> Agents:
    """The agents of a pickle, once for all references to them in this process."""
    if isinstance(packed, bytes):
        import zlib

        packed = zlib.decompress(packed).decode()
    return Agents(packed.split("\n") if packed else ())


def _pack(text: str) -> str | bytes:
    if len(text) < _PACKED_BYTES:
        return text
    import zlib

    return zlib.compress(text.encode(), 6)
