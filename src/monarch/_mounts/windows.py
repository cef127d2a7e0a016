"""Windows of files that were read from afar: the bytes that are kept, and which of them go first.

Rules of this file:
    1. What is kept never takes more than the limit; the window used longest ago goes first.
    2. A window never changes. What replaces it is another one, so who has it may go on reading it.

Read next: `gathered_reads.py`, which fills it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

WINDOW_BYTES = 4 << 20
"""What is asked for at a time. A window begins at a multiple of it."""

Version = tuple[int, int, int]
"""Size and times of a file."""


class Window(NamedTuple):
    """Bytes of a file, all of one version."""

    data: memoryview
    """Fewer than `WINDOW_BYTES`: the file ended there."""
    version: Version
    epoch: int
    """How many changes of the file had been told when they were asked for."""


class Windows:
    """The windows of all files of a mount. Thread: one at a time."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._by_key: OrderedDict[tuple[int, int], Window] = OrderedDict()
        self._of_node: dict[int, set[int]] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def get(self, node: int, index: int) -> Window | None:
        """A window by its number in the file, which counts as used now."""
        window = self._by_key.get((node, index))
        if window is not None:
            self._by_key.move_to_end((node, index))
        return window

    def put(self, node: int, index: int, window: Window) -> None:
        """Keep `window`; others go where there is no room for it."""
        self.drop(node, index)
        self._by_key[node, index] = window
        self._of_node.setdefault(node, set()).add(index)
        self.num_bytes += len(window.data)
        while self.num_bytes > self._most_bytes and self._by_key:
            self.drop(*next(iter(self._by_key)))

    def drop(self, node: int, index: int) -> None:
        """Keep that one no longer; no-op when it is not kept."""
        window = self._by_key.pop((node, index), None)
        if window is None:
            return
        self.num_bytes -= len(window.data)
        indices = self._of_node[node]
        indices.discard(index)
        if not indices:
            del self._of_node[node]

    def drop_node(self, node: int) -> None:
        """Keep nothing of a file."""
        for index in list(self._of_node.get(node, ())):
            self.drop(node, index)
