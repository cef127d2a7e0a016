"""Workers: a thread of a mount that runs what must neither hold up the server's threads nor the net loop, in order.

Read next: `gather_actor.py` and `chunked.py`, which have some.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

_logger = logging.getLogger("monarch.mounts")
_STOP_S = 10.0


class Worker:
    """Runs the calls that are posted to it. Thread: any."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self.post = self._calls.put

    def close(self) -> None:
        """End, when what was posted before has run; does not wait for it longer than 10 s, nor when it is called by itself."""
        self._calls.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_STOP_S)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception:
                _logger.exception("a mount has failed at something thread=%s", self._thread.name)
