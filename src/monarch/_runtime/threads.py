"""Threads that user code starts inside an actor keep its context.

Python gives a new thread an empty context; `context()` there would not know its actor. In a worker every thread
therefore starts with a copy of its starter's context (what `-X thread_inherit_context` does from Python 3.14 on).
"""

from __future__ import annotations

import contextvars
import sys
import threading
from typing import Any


def inherit_context() -> None:
    """From now on, threads of this process run in a copy of the context of whoever starts them."""
    if getattr(sys.flags, "thread_inherit_context", False):
        return
    start = threading.Thread.start

    def start_in_context(self: threading.Thread) -> None:
        run: Any = self.run
        context = contextvars.copy_context()
        self.run = lambda: context.run(run)  # type: ignore[method-assign]
        start(self)

    threading.Thread.start = start_in_context  # type: ignore[method-assign]
