"""Stacks: where the user's code is, from a thread's frames, a coroutine's awaits, or a dump of the whole process.

Pure, but for reading frames: nothing here waits, and no file is opened, because it also runs on net threads.

Rules of this file:
    1. Frames are listed as in a traceback: the most recent call last.
    2. Only the user's part is shown: what leads from the start of a thread to the user's code is cut, and so is behind it
       what waits: our own frames, locks, event loops, debuggers. A thread without any code of the user's has no frames.
    3. Text is bounded: the most recent `_MAX_FRAMES` of a stack, `_MAX_CHARS` in all.

Read next: `dumps.py` for the two ways a stack is asked for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any, NamedTuple

_MAX_FRAMES = 20
_MAX_AWAITS = 200
_MAX_CHARS = 4000
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB = os.path.dirname(os.__file__) + os.sep
_MACHINERY = tuple(_STDLIB + name for name in ("threading.py", "selectors.py", "asyncio" + os.sep))
_WAITING = (*_MACHINERY, *(_STDLIB + name for name in ("bdb.py", "pdb.py", "cmd.py", "code.py")))
_DEBUGGER = os.path.join(_PACKAGE, "actor", "remote_pdb.py")
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


class Place(NamedTuple):
    """One frame."""

    file: str
    line: int
    """0 when it is not known."""
    function: str


def places_of(frame: FrameType | None) -> list[Place]:
    """The stack of a thread whose innermost frame is `frame`."""
    places: list[Place] = []
    while frame is not None:
        places.append(_place(frame))
        frame = frame.f_back
    return places[::-1]


def awaits_of(awaitable: Any) -> list[Place]:
    """Where a suspended coroutine is: its own frame, that of what it awaits, and so on."""
    places: list[Place] = []
    while awaitable is not None and len(places) < _MAX_AWAITS:
        frame, inner = _suspended(awaitable)
        if frame is None:
            break
        places.append(_place(frame))
        awaitable = inner
    return places


def _suspended(awaitable: Any) -> tuple[FrameType | None, Any]:
    for kind, link in (("cr", "cr_await"), ("gi", "gi_yieldfrom"), ("ag", "ag_await")):
        frame = getattr(awaitable, f"{kind}_frame", None)
        if frame is not None:
            return frame, getattr(awaitable, link, None)
    return None, None


def _place(frame: FrameType) -> Place:
    code = frame.f_code
    return Place(code.co_filename, frame.f_lineno or 0, code.co_qualname)


def trim(places: Sequence[Place]) -> list[Place]:
    """The user's part of a stack."""
    start, stop = _start_of_main(places), len(places)
    while start < stop and (_is_ours(places[start]) or places[start].file.startswith(_MACHINERY)):
        start += 1
    while stop > start and _only_waits(places[stop - 1]):
        stop -= 1
    return list(places[start:stop])


def _only_waits(place: Place) -> bool:
    return _is_ours(place) or place.file.startswith(_WAITING)


def waits(places: Sequence[Place]) -> bool:
    """Whether a thread just waits: in our own code, for a lock or in an event loop. One without frames does."""
    return not places or _only_waits(places[-1])


def told(places: Sequence[Place]) -> str:
    """The user's part of a stack as text; of one that waits in the debugger, a line that says so."""
    shown = trim(places)
    if not at_breakpoint(places):
        return render(shown)
    where = f" ({render(shown[-1:])})" if shown else ""
    return f"waits at a breakpoint{where}; attach with: monarch debug"


def at_breakpoint(places: Sequence[Place]) -> bool:
    """Whether it is our debugger that waits."""
    for place in reversed(places):
        if place.file == _DEBUGGER:
            return True
        if not _only_waits(place):
            return False
    return False


def _start_of_main(places: Sequence[Place]) -> int:
    """Where our own code begins on a main thread, which `-c` or `-m` has started; 0 on any other."""
    start = next((at for at, place in enumerate(places) if not place.file.startswith(("<string>", "<frozen "))), 0)
    return start if start and _is_ours(places[start]) else 0


def _is_ours(place: Place) -> bool:
    return place.file.startswith(_PACKAGE)


def render(places: Sequence[Place]) -> str:
    """A stack as text; "" when it has no frames."""
    lines = [f'File "{place.file}", line {place.line or "?"}, in {place.function}' for place in places[-_MAX_FRAMES:]]
    if len(places) > _MAX_FRAMES:
        lines.insert(0, f"({len(places) - _MAX_FRAMES} frames more)")
    return "\n".join(lines)


def parse_dump(text: str) -> dict[int, list[Place]]:
    """The stacks of a dump by `faulthandler`, by ident of the thread; lines that are no part of one are skipped."""
    stacks: dict[int, list[Place]] = {}
    places: list[Place] | None = None
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            places = stacks.setdefault(int(thread[1], 16), [])
        elif places is not None and (frame := _FRAME.fullmatch(line)):
            places.insert(0, Place(frame[1], int(frame[2]) if frame[2].isdigit() else 0, frame[3]))
    return stacks


def join(parts: Iterable[tuple[str, str]]) -> str:
    """Several stacks with their titles as one text; an empty one is left out, a title too where there is none."""
    shown = [f"{title}:\n{_indented(text)}" if title else text for title, text in parts if text]
    whole = "\n".join(shown)
    return whole if len(whole) <= _MAX_CHARS else f"{whole[:_MAX_CHARS]}\n..."


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
