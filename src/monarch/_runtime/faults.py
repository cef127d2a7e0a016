"""What users read when something remote went wrong: the three shapes of a failure.

`ActorError`: an endpoint raised, the actor lives. `SupervisionError`: the actor, or its process, is gone or stopped.
`MeshFailure`: the same story, told to the owner of the mesh.

Rules of this file:
    1. Text is rendered where the failure happened and travels as text; nothing is re-derived later.
    2. An error's text is at most `_MAX_TEXT` characters: the middle of a long one is cut, its end (the cause) is kept.

Read next: `mailbox.py`, which hands them to waiting futures.
"""

from __future__ import annotations

import os
import traceback
from types import TracebackType
from typing import Any

import msgspec

from monarch._base.errors import explain
from monarch._runtime.supervision import Failure
from monarch._wire.exceptions import dumps_exception
from monarch._wire.messages import Fault, ProcExited
from monarch._wire.pickling import loads

NO_MESH = "<none>"
"""`MeshFailure.mesh_name` of a message that could not be delivered."""
GAVE_UP = "its supervision policy has given up"
_MAX_TEXT = 3600
_MOST_LAST_WORDS = 1600
_LONGEST_LAST_WORD = 200
_MAX_NAMES = 8
_STOPPED = "has status: stopped:"
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TRACEBACK_HEADER = "Traceback of where the remote call failed (most recent call last):"


class ActorError(Exception):
    """An endpoint raised; the actor lives on.

    Attributes:
        exception: the original exception object, of its real type when that can be imported here.
        message: which call failed.
        exception_formatted: the remote traceback as text.
    """

    def __init__(self, exception: BaseException, message: str = "A remote actor call has failed.", formatted: str | None = None) -> None:
        super().__init__(exception, message)
        self.exception = exception
        self.message = message
        self.exception_formatted = render(exception) if formatted is None else formatted

    def __str__(self) -> str:
        return f"{self.message}\n{self.exception_formatted}"

    def __reduce__(self) -> tuple[Any, ...]:
        # The exception apart, because many classes break when they are loaded.
        return _load_actor_error, (dumps_exception(self.exception)[0], self.message, self.exception_formatted)


class SupervisionError(RuntimeError):
    """The actor that should have answered, or its process, is dead or stopped.

    Attributes:
        endpoint: "<mesh name>.<method>" of the call, or None.
        fault: the structured reason; None when constructed by hand.
    """

    def __init__(self, message: str, endpoint: str | None = None, fault: Fault | None = None) -> None:
        super().__init__(message)
        self.endpoint = endpoint
        self.fault = fault

    @property
    def restarting(self) -> bool:
        """A supervision policy brings the actor back: this call is lost, and one that is made now waits until it is there."""
        return self.fault is not None and self.fault.again

    def __reduce__(self) -> tuple[Any, ...]:
        return SupervisionError, (str(self), self.endpoint, self.fault)


class MeshFailure:
    """What an owner hears of its mesh: argument of `__supervise__` and of `unhandled_fault_hook`.

    Attributes:
        mesh_name: unique id of the mesh; "<none>" for a message that could not be delivered. When one event takes actors of
            several meshes along (their process died), it is one failure, and this is the mesh that was spawned first.
        crashed_ranks: ranks of that mesh that are gone.
    """

    def __init__(self, failure: Failure, mesh_name: str | None = None) -> None:
        self._failure = failure
        fault = failure.faults[0]
        self.mesh_name = fault.mesh if mesh_name is None else mesh_name
        self.crashed_ranks = [other.rank for other in failure.faults if other.mesh == fault.mesh and other.rank >= 0]

    @property
    def mesh(self) -> tuple[()]:
        """A placeholder that the public interface asks for."""
        return ()

    @property
    def fault(self) -> Fault:
        """The structured reason."""
        return self._failure.faults[0]

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The reason of every actor that this event took along, of other meshes too."""
        return self._failure.faults

    @property
    def story(self) -> str:
        """What a supervision policy has tried before it gave up; "" when there is none."""
        return self._failure.story

    def report(self) -> str:
        """What happened, for people."""
        return describe_failure(self._failure)

    def __repr__(self) -> str:
        return (
            f"MeshFailure(mesh_name={self.mesh_name}, crashed_ranks={self.crashed_ranks}, "
            f"event=Supervision event: actor {self.fault.actor} failed: {self.report()})"
        )

    __str__ = __repr__

    def __reduce__(self) -> Any:
        raise TypeError("a MeshFailure can't be pickled; send its report()")


def _load_actor_error(exception: bytes, message: str, formatted: str) -> ActorError:
    return ActorError(loads(exception), message, formatted)


def render(exception: BaseException) -> str:
    """The exception with its remote traceback and its chain of causes, bounded in length."""
    lines = traceback.format_exception(type(exception), exception, users_part(exception.__traceback__))
    if lines and lines[0].startswith("Traceback "):
        lines[0] = _TRACEBACK_HEADER + "\n"
    else:
        lines.insert(0, _TRACEBACK_HEADER + "\n")
    return shorten("".join(lines).rstrip("\n"))


def users_part(frames: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame that is not ours; all of it when there is none."""
    part = frames
    while part is not None and part.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        part = part.tb_next
    return frames if part is None else part


def shorten(text: str) -> str:
    """`text`, its middle cut out when it is longer than `_MAX_TEXT` characters."""
    if len(text) <= _MAX_TEXT:
        return text
    head = _MAX_TEXT // 3
    tail = _MAX_TEXT - head
    return f"{text[:head]}\n... [{len(text) - head - tail} characters left out] ...\n{text[-tail:]}"


def buried(fault: Fault) -> Fault:
    """The fault of an actor that its policy does not bring back after all."""
    return msgspec.structs.replace(fault, again=False, report=f"{fault.report}\n{GAVE_UP}")


def last_words(exited: ProcExited) -> str:
    """What a process that is gone had written last, as lines to put behind the reason; "" when it was silent."""
    lines: list[str] = []
    left = _MOST_LAST_WORDS
    for line in reversed(exited.last_words):
        shown = line if len(line) <= _LONGEST_LAST_WORD else f"{line[:_LONGEST_LAST_WORD]}..."
        left -= len(shown) + 6
        if left < 0:
            break
        lines.append(f"  | {shown}")
    return "\n".join(["\nits last lines:", *reversed(lines)]) if lines else ""


def describe(fault: Fault) -> str:
    """The report of a fault in full sentences."""
    if fault.kind == "stopped":
        return f"Supervision event: actor {fault.actor} {_STOPPED} {fault.report}"
    indented = "\n".join(f"  {line}" for line in fault.report.splitlines())
    return f"The actor {fault.actor} and all its descendants have failed:\n{indented}"


def describe_failure(failure: Failure) -> str:
    """The report of one event to one owner."""
    first, *others = failure.faults
    text = describe(first)
    if others:
        names = ", ".join(other.actor for other in others[:_MAX_NAMES])
        more = f" and {len(others) - _MAX_NAMES} more" if len(others) > _MAX_NAMES else ""
        text = f"{text}\nwith it, by the same event: {names}{more}"
    return shorten(f"{text}\n{failure.story}" if failure.story else text)


def follows_from_stop(fault: Fault) -> bool:
    """Whether an actor that fails while everything is being stopped fails because of that: its own end, or that of one it called."""
    return fault.kind != "failed" or _STOPPED in fault.report


def undelivered(method: str, fault: Fault) -> str:
    """The report of a message without reply port that found nobody."""
    return f"a message to {method}() of rank {fault.rank} of mesh {fault.mesh} could not be delivered: {describe(fault)}"


def supervision_error(endpoint: str, fault: Fault) -> SupervisionError:
    """The error of a call whose actor can't answer."""
    text = f"Endpoint call {endpoint}() failed, {describe(fault)}"
    if fault.again:
        text += "\nthe actor is restarting, as its supervision policy says; this call is lost"
    place = f"rank {fault.rank} of mesh {fault.mesh}" if fault.rank >= 0 else f"mesh {fault.mesh}"
    if fault.again:
        step = "call again: a call that is made now waits until the actor is back"
    elif GAVE_UP in fault.report:
        step = "slices without this rank go on working; stop the mesh and spawn a new one; the owner was told the whole story"
    elif fault.kind == "stopped":
        step = "the mesh was stopped; spawn a new one"
    else:
        step = "slices without this rank go on working; spawn a replacement, supervise the mesh, or define __supervise__ on the owner"
    return SupervisionError(explain(text, where=f"{place}, proc {fault.proc}" if fault.proc else place, next=step), endpoint, fault)
