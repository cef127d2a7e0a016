"""The stall log: notices of what does not move, in the client's log.

Logger `monarch.stalls`, level WARNING. Without any configuration of logging they go to standard error.

Read next: `_runtime/stalls.py` for what is noticed, `docs/hangs.md` for people.
"""

from __future__ import annotations

import logging
import queue
import re
import threading

import msgspec

from monarch._runtime.stalls import describe
from monarch._wire.observation_messages import Stalled

_logger = logging.getLogger("monarch.stalls")
_FRAME = re.compile(r'(\s*)File "(.+)", line (\d+), in ')
_JOIN_S = 1.0


class StallLog:
    """Writes notices, one at a time, on a thread of its own. Thread: any."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Stalled | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, stalled: Stalled) -> None:
        """Log a notice soon. Thread: net loop."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="monarch-stalls", daemon=True)
            self._thread.start()
        self._queue.put(stalled)

    def stop(self) -> None:
        """Log what was put so far, then end."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_JOIN_S)

    def _serve(self) -> None:
        while (stalled := self._queue.get()) is not None:
            _logger.warning("%s", describe(msgspec.structs.replace(stalled, stack=with_source(stalled.stack))))


def with_source(stack: str) -> str:
    """A stack with the lines of source that this process can find. Procs leave them out: reading a file may take its time."""
    import linecache

    lines = []
    for line in stack.splitlines():
        lines.append(line)
        if frame := _FRAME.match(line):
            source = linecache.getline(frame[2], int(frame[3])).strip()
            lines += [f"{frame[1]}  {source}"] if source else []
    return "\n".join(lines)
