"""Breakpoints: what `breakpoint()` does in the process of an actor, and the controller that knows of all of them.

In a worker `sys.breakpointhook` is replaced when the process starts. In the client nothing is: `breakpoint()` is plain
pdb there, on the script's own terminal.

Rules of this file:
    1. It is part of everybody's import, so what is only needed at a breakpoint is imported there.

Read next: `remote_pdb.py` for the debugger in the worker, `debug_service.py` for the client's side.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from monarch.actor.controllers import get_or_spawn_controller
from monarch.actor.process import this_process

if TYPE_CHECKING:
    from monarch._runtime.future import Future
    from monarch.actor.debug_service import DebugController

_ANSWER_S = 60.0
_found: tuple[str, DebugController] | None = None
"""Uid of the process that asked, and what it got."""


def debug_controller() -> DebugController:
    """The debug controller of this job, which the first use creates in the client's process; it opens the debug server."""
    global _found
    uid = this_process().proc.ref.uid
    if _found is None or _found[0] != uid:
        _found = (uid, outcome_within(_ask_for_controller(), _ANSWER_S))
    return _found[1]


def _ask_for_controller() -> Future[DebugController]:
    from monarch.actor.debug_service import DebugController

    return get_or_spawn_controller("debug_controller", DebugController)


def outcome_within(future: Future[Any], timeout_s: float) -> Any:
    """The outcome, or TimeoutError. Not `get`, which warns on the thread of an event loop: here it is meant."""
    import threading

    bell = threading.Event()
    future._when_done(bell.set)
    bell.wait(timeout_s)
    return future.get(0)


def install_breakpoints() -> None:
    """Make `breakpoint()` in this process a session of the job's debugger."""
    own_pid = os.getpid()

    def breakpointhook(*args: Any, **kwargs: Any) -> Any:
        if os.getpid() != own_pid:  # a fork of the user's has nobody to talk to the client
            return sys.__breakpointhook__(*args, **kwargs)
        return remote_breakpointhook(sys._getframe(1))

    sys.breakpointhook = breakpointhook


def remote_breakpointhook(frame: Any = None) -> None:
    """Stop at `frame`, by default the caller's, until somebody at a terminal lets it go on.

    Raises:
        bdb.BdbQuit: they entered `quit`, or the debug controller can't be reached.
    """
    if os.environ.get("PYTHONBREAKPOINT") == "0":
        return
    from monarch.actor.remote_pdb import stop_at

    stop_at(frame or sys._getframe(1))


class DebugContext:
    """Which debugger serves the running message. Kept for scripts that ask for it."""

    def __init__(self, pdb_wrapper: Any = None) -> None:
        self.pdb_wrapper = pdb_wrapper

    @staticmethod
    def get() -> DebugContext:
        """The context of the running message; its `pdb_wrapper` is None unless a breakpoint was reached."""
        remote_pdb = sys.modules.get("monarch.actor.remote_pdb")
        return DebugContext(None if remote_pdb is None else remote_pdb.current_debugger())
