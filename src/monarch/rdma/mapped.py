"""Mapped weights: one version where its publisher, or the relay of this host, has it, without a copy.

Read next: `copies.py` for why it does not change meanwhile.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from monarch._base.errors import explain
from monarch.rdma.errors import RDMAError
from monarch.rdma.parts import Part, view_of


class MappedWeights(Mapping[str, Any]):
    """Name to tensor, or read-only array, of one version. Thread: any, one at a time for `close`.

    The version is kept by its publisher until this is closed and no tensor of it is left, here or in a fork of this process. Writing to
    a tensor changes it in this process only, at the price of a copy of each page that is written to.
    """

    def __init__(self, version: int, memory: mmap.mmap, parts: Mapping[str, Part]) -> None:
        self.version = version
        """That it was published with."""
        self._tensors: dict[str, Any] | None = {name: view_of(memory, part) for name, part in parts.items()}

    def close(self) -> None:
        """Let go of the tensors: there are none here from then on. Harmless twice."""
        self._tensors = None

    def _open(self) -> dict[str, Any]:
        if self._tensors is None:
            what = f"these mapped weights, version {self.version}, were closed here, with close() or at the end of `with`"
            hint = "map them anew, weights.mapped(); or copy what is wanted for longer, tensor.clone(), before that"
            raise RDMAError(explain(what, next=hint))
        return self._tensors

    def __getitem__(self, name: str) -> Any:
        """RDMAError when it is closed. So do all others."""
        return self._open()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._open())

    def __len__(self) -> int:
        return len(self._open())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        held = "closed" if self._tensors is None else f"{len(self._tensors)} tensors"
        return f"<MappedWeights: version {self.version}, {held}>"
