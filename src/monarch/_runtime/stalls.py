"""Stalls: what has not moved for too long in one proc, decided from looks at it from outside.

Pure: looks go in, findings come out. `watcher.py` does the looking and the telling.

Rules of this file:
    1. One story, one finding: a message is found once, a mailbox once until it has shrunk to half its limit, an
       interpreter and a stop once until it is over. What runs while the interpreter is silent belongs to that story.
    2. A message is found only when two looks have seen it: one look may be at a slot that is half written.
    3. Nothing here ends anything. A stall is not a death. But a process that stays stopped is killed by its agent
       (`proc_stopped_limit`), so a stop is found while there is time to end it.

Read next: `board.py` for what a look shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from monarch._base.errors import explain
from monarch._runtime.board import Entry
from monarch._wire.observation_messages import Stalled

_LOOKS_PER_LIMIT = 4
_SHORTEST_STEP_S = 0.02
_LONGEST_STEP_S = 5.0


class Limits(NamedTuple):
    """What counts as too long; None: never."""

    endpoint_s: float | None
    mailbox: int | None
    """Messages that wait for one actor."""
    interpreter_s: float | None
    killed_s: float | None = None
    """When the agent kills a process that is stopped; None: never."""

    @property
    def stopped_s(self) -> float | None:
        """When a stopped process is told of: at the limit of interpreters, or at half the time that it has to live."""
        if self.interpreter_s is None or self.killed_s is None:
            return self.interpreter_s
        return min(self.interpreter_s, self.killed_s / 2)

    @property
    def step_s(self) -> float | None:
        """How often to look; None: never."""
        killed_s = None if self.interpreter_s is None else self.killed_s
        limits = [limit_s for limit_s in (self.endpoint_s, self.interpreter_s, killed_s) if limit_s is not None]
        if self.mailbox is not None:
            limits.append(_LONGEST_STEP_S * _LOOKS_PER_LIMIT)
        return min(max(min(limits) / _LOOKS_PER_LIMIT, _SHORTEST_STEP_S), _LONGEST_STEP_S) if limits else None

    def text(self, kind: str) -> str:
        """The limit that a finding of this kind has passed, as `knob=value`."""
        if kind == "mailbox":
            return f"stall_mailbox_limit={self.mailbox}"
        if kind == "stopped" and self.killed_s is not None:
            return f"proc_stopped_limit={self.killed_s:g}s"
        name, limit_s = ("endpoint", self.endpoint_s) if kind in ("endpoint", "concurrent") else ("interpreter", self.interpreter_s)
        return f"stall_{name}_limit={limit_s:g}s"


class Look(NamedTuple):
    """What one look at a proc has shown."""

    now_s: float
    entries: Sequence[Entry]
    silent_s: float = 0.0
    """For how long its interpreter has owed an answer; 0: it owes none."""
    stopped_s: float = 0.0
    """For how long a signal has stopped the process; 0: it runs."""


class Finding(NamedTuple):
    """Something that has not moved for too long."""

    kind: str
    """"endpoint", "concurrent" (a concurrent endpoint), "mailbox", "interpreter" or "stopped" (by a signal)."""
    entry: Entry | None
    """The actor; None when a process is meant in which none is busy."""
    seconds: float
    """For how long the endpoint runs, the interpreter is silent or the process stopped."""

    @property
    def endpoint(self) -> str:
        """What the actor runs; "" when nothing."""
        entry = self.entry
        if entry is None:
            return ""
        if self.kind == "concurrent":
            return entry.oldest
        return entry.endpoint if entry.since_s else ""


_Key: TypeAlias = tuple[int, str]


class Stalls:
    """What is known of one proc's stalls."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._seen: dict[_Key, float] = {}
        """Since when the message runs that the last look saw."""
        self._told: dict[_Key, float] = {}
        """Since when the message runs that was found, or is part of another story."""
        self._waiting: dict[_Key, int] = {}
        self._full: set[_Key] = set()
        self._overlapping: set[_Key] = set()
        self._silent = False
        self._stopped = False

    def step(self, look: Look) -> list[Finding]:
        """What this look has shown for the first time."""
        found = [*self._look_at_process(look)]
        if not (look.stopped_s or self._silent):
            for entry in look.entries:
                found += self._look_at_actor(entry, look.now_s)
        self._forget_others(look.entries)
        return found

    def _look_at_process(self, look: Look) -> Iterator[Finding]:
        limit_s = self.limits.stopped_s
        over = limit_s is not None and look.stopped_s >= limit_s
        if over and not self._stopped:
            yield Finding("stopped", _busiest(look.entries), look.stopped_s)
        self._stopped = over
        limit_s = self.limits.interpreter_s
        over = limit_s is not None and not look.stopped_s and look.silent_s >= limit_s
        if over and not self._silent:
            yield Finding("interpreter", _busiest(look.entries), look.silent_s)
        self._silent = over
        if self._silent or self._stopped:
            self._told |= {_key(entry): entry.since_s for entry in look.entries if entry.since_s}

    def _look_at_actor(self, entry: Entry, now_s: float) -> Iterator[Finding]:
        key, limit_s = _key(entry), self.limits.endpoint_s
        ran_s = now_s - entry.since_s
        seen = self._seen.get(key) == entry.since_s
        if limit_s is not None and entry.since_s and seen and ran_s >= limit_s and self._told.get(key) != entry.since_s:
            self._told[key] = entry.since_s
            yield Finding("endpoint", entry, ran_s)
        yield from self._look_at_overlap(key, entry, now_s)
        yield from self._look_at_mailbox(key, entry, ran_s if entry.since_s else 0.0)
        self._seen[key], self._waiting[key] = entry.since_s, entry.waiting

    def _look_at_overlap(self, key: _Key, entry: Entry, now_s: float) -> Iterator[Finding]:
        # Per actor, not per call: a thousand of them may wait for one thing.
        if entry.num_concurrent and not entry.oldest_since_s:
            return  # half written: the count is there, its time is not yet
        limit_s, ran_s = self.limits.endpoint_s, now_s - entry.oldest_since_s
        if limit_s is None or not entry.num_concurrent or ran_s < limit_s:
            self._overlapping.discard(key)
        elif key not in self._overlapping:
            self._overlapping.add(key)
            yield Finding("concurrent", entry, ran_s)

    def _look_at_mailbox(self, key: _Key, entry: Entry, ran_s: float) -> Iterator[Finding]:
        limit = self.limits.mailbox
        if limit is None or entry.waiting * 2 < limit:
            self._full.discard(key)
        elif key not in self._full and entry.waiting >= limit and entry.waiting > self._waiting.get(key, entry.waiting):
            self._full.add(key)
            yield Finding("mailbox", entry, ran_s)

    def _forget_others(self, entries: Sequence[Entry]) -> None:
        present = {_key(entry) for entry in entries}
        for known in (self._seen, self._told, self._waiting):
            for key in known.keys() - present:
                del known[key]
        self._full &= present
        self._overlapping &= present


def _key(entry: Entry) -> _Key:
    return entry.slot, entry.mesh


def _busiest(entries: Sequence[Entry]) -> Entry | None:
    """The actor whose message runs for longest."""
    return min((entry for entry in entries if entry.since_s), key=lambda entry: entry.since_s, default=None)


def blame_holder(finding: Finding, entries: Sequence[Entry], running: Sequence[int]) -> Finding:
    """A silent interpreter's finding, told of the actor that holds the interpreter lock, if the stacks tell which does.

    Args:
        running: idents of the threads whose innermost frame does not just wait. Of several nobody knows which it is.
    """
    holder = next((entry for entry in entries if [entry.thread] == list(running)), None)
    return finding if holder is None else finding._replace(entry=holder)


# --- what people read ----------------------------------------------------------------------------------------------

_WHAT = {
    "endpoint": "endpoint still runs",
    "concurrent": "concurrent endpoint still runs",
    "mailbox": "mailbox grows",
    "interpreter": "interpreter does not answer",
    "stopped": "process is stopped by a signal",
}
_NEXT = {
    "endpoint": "see where it stands below",
    "concurrent": "see where it stands below",
    "mailbox": "send less, use call() and wait for its answer, or spread the work over more actors",
    "interpreter": "see where it stands below; most often C code holds the interpreter lock, which ctypes and extensions can release",
    "stopped": "kill -CONT lets it run on",
}
_NO_STACK = {"stopped": ""}


def describe(stalled: Stalled) -> str:
    """A notice, for the log."""
    fields = {
        "endpoint": stalled.endpoint,
        "actor": stalled.actor,
        "rank": stalled.rank if stalled.rank >= 0 else "",
        "seconds": f"{stalled.seconds:.1f}" if stalled.kind != "mailbox" else "",
        "waiting": stalled.waiting if stalled.actor else "",
    }
    pairs = " ".join([*(f"{name}={value}" for name, value in fields.items() if value != ""), stalled.limit])
    return explain(
        f"{_WHAT[stalled.kind]}: {pairs}",
        where=f"proc {stalled.proc}, pid {stalled.pid}, host {stalled.host}",
        next=f"nothing was ended; {_NEXT[stalled.kind]}{_deadline(stalled)}",
        detail=stalled.stack or _NO_STACK.get(stalled.kind, "(no stack: the process did not give one in time)"),
    )


def _deadline(stalled: Stalled) -> str:
    if stalled.killed_in_s is None:
        return ""
    return f"; if it stays stopped, its host agent kills it in {stalled.killed_in_s:.1f} s"
