"""The part of the protocol that tells what procs do: activity, output, stacks and stalls, seen from outside by their host agent.

Read next: `messages.py`, which makes these part of `Control`; `_runtime/{board,logs,watcher}.py`, which observe.
"""

from __future__ import annotations

import msgspec


class Activity(msgspec.Struct, frozen=True, tag=True):
    """Ask what the actors of these procs are doing; answered by `Activities`."""

    uids: list[str]


class ActorActivity(msgspec.Struct, frozen=True):
    """What one actor is doing, read from outside its process."""

    actor: str
    """Human chain of the actor."""
    name: str
    rank: int
    """Rank in its mesh."""
    proc: str
    pid: int
    endpoint: str | None
    """The endpoint that runs now; None when idle."""
    running_s: float
    """For how long; 0 when idle."""
    waiting: int
    """Messages queued behind it."""
    handled: int
    """Messages handled so far."""
    state: str
    """"idle", "busy" (an endpoint runs), "stopped" (the process is stopped by a signal) or "gone"."""
    mesh: str = ""
    """Unique id of its mesh, or the end of a long one."""
    num_concurrent: int = 0
    """Calls of `concurrent_endpoint`s under way, which keep no message waiting."""
    oldest: str | None = None
    """The endpoint of the oldest of them."""
    oldest_s: float = 0.0
    """For how long that one runs."""
    silent_s: float = 0.0
    """For how long the interpreter of its process has not answered; 0 when it does."""
    debugged: bool = False
    """Whether it waits at a breakpoint for somebody at a terminal."""


class Activities(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Activity`."""

    actors: list[ActorActivity]


class StreamLogs(msgspec.Struct, frozen=True, tag=True):
    """Send the output of these procs to the sender of this message from now on, or no longer; answered by `Done`."""

    uids: list[str]
    on: bool


class FlushLogs(msgspec.Struct, frozen=True, tag=True):
    """Answered by `Done` once what these procs have written so far is on its way to whoever shows it."""

    uids: list[str]


class LogLine(msgspec.Struct, frozen=True, array_like=True):
    """A line of output."""

    proc: str
    """Uid of the proc."""
    stream: int
    """1 (stdout) or 2 (stderr)."""
    text: bytes
    missing: int
    """Bytes of the line that were cut off."""
    actor: str = ""
    """Name of the actor that wrote it; "" when only the process is known."""
    rank: int = -1
    """Rank of that actor in its mesh."""


class LogLines(msgspec.Struct, frozen=True, tag=True):
    """Lines of output, in order per process; `LogCredit` gives back the `nbytes` that they count as."""

    host: str
    """Name of the machine."""
    lines: list[LogLine]
    nbytes: int


class LogCredit(msgspec.Struct, frozen=True, tag=True):
    """Lines were shown."""

    nbytes: int


class Stacks(msgspec.Struct, frozen=True, tag=True):
    """Ask a proc where the code on some of its threads is; answered by `StackTexts`."""

    threads: list[int]
    """Idents, as in the slots of its board."""


class StackTexts(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Stacks`, in the order of the question; "" for a thread without code of the user's."""

    texts: list[str]


class Stalled(msgspec.Struct, frozen=True, tag=True):
    """Something has not moved for longer than its limit; from the agent to the client, which logs it. Nothing was killed."""

    kind: str
    """"endpoint", "concurrent", "mailbox", "interpreter" or "stopped" (`_runtime/stalls.py`)."""
    actor: str
    """Human chain of the actor; "" when the whole process is meant and no actor of it is busy."""
    rank: int
    """Its rank in its mesh; -1 without an actor."""
    endpoint: str
    """What it runs; "" when nothing."""
    seconds: float
    waiting: int
    """Messages queued behind it."""
    proc: str
    pid: int
    host: str
    """Name of the machine."""
    limit: str
    """The limit that was passed, as `knob=value`."""
    stack: str
    """Where the user's code is, most recent call last; "" when that could not be had."""
    killed_in_s: float | None = None
    """When its agent kills it, unless it is continued; None: not at all."""
