"""Dumps: how a proc tells where its code is, from inside while its interpreter runs, and otherwise on a signal.

From inside (`texts`) the net thread answers: that also shows what coroutines await, and whose answers an actor waits for.
On a signal (`arm`) the standard library's `faulthandler` writes the stacks of all threads, in C and without the interpreter
lock, to a file beside the proc's socket, where the agent reads it.

Rules of this file:
    1. The signal is for the process, so the kernel hands it to the main thread, which in a proc runs no code of the
       user's: no system call of theirs is interrupted, and no thread has to block a signal that its subprocesses would
       then inherit as blocked.
    2. The signal never ends a process: it is ignored before the handler is there and after the interpreter has taken
       it away, and nobody sends it before the board says so.

Read next: `watcher.py`, which asks; `stacks.py` for frames and texts.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from monarch._runtime import stacks

if TYPE_CHECKING:
    from monarch._runtime.cell import Cell
    from monarch._runtime.proc import Proc

_BELOW_LAST = 5
"""Which of the real-time signals: not the first ones, which the C library and service managers use, nor the very last."""
_MAX_GROUPS = 8


def arm(address_path: str) -> int:
    """Make this process dump its stacks on a signal; that signal, or 0 where there is none to spare. Main thread only."""
    last = getattr(signal, "SIGRTMAX", None)
    if last is None or threading.current_thread() is not threading.main_thread():
        return 0
    import faulthandler

    number = int(last) - _BELOW_LAST
    fd = os.open(path_of(address_path), os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
    signal.signal(number, signal.SIG_IGN)
    faulthandler.register(number, file=fd, all_threads=True, chain=False)
    return number


def path_of(address_path: str) -> str:
    """The file of dumps, beside the proc's socket."""
    return address_path + ".s"


def texts(proc: Proc, threads: Sequence[int]) -> list[str]:
    """Where the user's code is on these threads of actors. Thread: net loop."""
    cells = {cell.thread_ident: cell for cell in list(proc.cells.values())}
    frames = sys._current_frames()
    return [_text(proc, cells.get(thread), stacks.places_of(frames.get(thread))) for thread in threads]


def _text(proc: Proc, cell: Cell | None, places: list[stacks.Place]) -> str:
    running = stacks.told(places)
    if cell is None or stacks.at_breakpoint(places):
        return running
    return stacks.join([("", running), *_suspended(cell), ("", "\n".join(awaited(proc, cell.uid)))])


def _suspended(cell: Cell) -> Iterator[tuple[str, str]]:
    """What waits on an actor's event loop: its endpoint in progress first, without a title; equal ones together."""
    groups: dict[tuple[str, str], int] = {}
    for name, task in cell.tasks():
        coroutine: Any = task.get_coro()
        if task.done() or getattr(coroutine, "cr_running", False):  # the latter is on the thread's own stack
            continue
        text = stacks.told(stacks.awaits_of(coroutine))
        if text:
            groups[name, text] = groups.get((name, text), 0) + 1
    for (name, text), count in list(groups.items())[:_MAX_GROUPS]:
        yield "" if not name else f"task {name!r}" if count == 1 else f"{count} tasks {name!r}", text


def awaited(proc: Proc, actor: str) -> Iterator[str]:
    """Whose answers the actor with this uid waits for, a line each."""
    for call in proc.ports.calls():
        target = call.target
        if target is None or target.caller != actor:
            continue
        missing = call.missing()
        own = target.actor == actor and proc.ref.uid in {target.procs[rank] for rank in missing}
        names = ranks_text([target.mesh_ranks[rank] for rank in missing])
        itself = "; that is this very actor, which handles no other message until this one has ended" if own else ""
        yield f"waits for the answer of {target.endpoint}, {names}{itself}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as people write them: "rank 3", "ranks 0-5, 7"."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    text = ", ".join("-".join(map(str, part)) for part in parts)
    return f"rank{'' if len(ranks) == 1 else 's'} {text}"
