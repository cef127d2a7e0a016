"""Lateness: what a call that is late waits for, told in the text of its time-out.

The agents know what the actors that have not answered are doing, whatever their interpreters do; so the question goes to
them, and nobody waits long for what they say.

Rules of this file:
    1. Nothing is kept for this while calls are under way; the call is looked up when it is late.
    2. Ranks are those of the whole mesh, as in all other reports about it, whichever view was called.

Read next: `board.py` for what is known from outside, `mailbox.py` for calls.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from monarch._base.errors import without_next
from monarch._base.ids import agent_at, by_agent
from monarch._runtime.dumps import ranks_text
from monarch._runtime.future import Future
from monarch._runtime.mailbox import Call, Target
from monarch._wire.observation_messages import Activities, Activity, ActorActivity

if TYPE_CHECKING:
    from monarch._runtime.proc import Proc

_MAX_LINES = 8


def story_of(proc: Proc, future: Future[Any], patience_s: float) -> str:
    """What `future` waits for, as lines of text; "" when it is no call's. Cost: up to `patience_s`.

    Args:
        patience_s: 0 tells only who has answered and who has not.
    """
    call = proc.ports.call_of(future)
    if call is None or call.target is None:
        return ""
    if not patience_s:
        missing = ranks_text([call.target.mesh_ranks[rank] for rank in call.missing()])
        return f"{answered(call, call.target)}\n  no answer yet of {call.target.endpoint}: {missing}"
    until_s = proc.loop.now_s() + patience_s
    question = Question(proc, call.target, call.missing())
    for answer in question.answers:
        if not answer._done:
            with contextlib.suppress(TimeoutError):
                answer._wait(max(0.0, until_s - proc.loop.now_s()))
    return question.story(call)


def answered(call: Call, target: Target) -> str:
    """Who has answered `call`, a line."""
    asked = call.asked()
    missing = set(call.missing())
    ranks = [target.mesh_ranks[rank] for rank in asked if rank not in missing]
    done = f"{ranks_text(ranks)} ({len(ranks)} of {len(asked)})" if ranks else f"none of {len(asked)}"
    return f"  answered: {done}"


class Question:
    """What the actors that have not answered are doing: asked when made, told by `story`."""

    def __init__(self, proc: Proc, target: Target, missing: Sequence[int]) -> None:
        self._proc = proc
        self._target = target
        elsewhere = [ref for rank in missing if (ref := target.refs[rank]).uid != proc.ref.uid and ref.host]
        self.answers: list[Future[Activities]] = [
            proc.request(agent_at(host), Activity([ref.uid for ref in refs])) for host, refs in by_agent(elsewhere).items()
        ]

    def when_answered(self, callback: Callable[[], None]) -> None:
        """Call back once every agent has answered, on any thread; it must be harmless twice."""

        def on_answer() -> None:
            if all(answer._done for answer in self.answers):
                callback()

        if not self.answers:
            callback()
        for answer in self.answers:
            answer._when_done(on_answer)

    def story(self, call: Call) -> str:
        """Who has answered `call`, and what the others do, as far as it is known by now."""
        target, missing = self._target, call.missing()
        rows = self._rows()
        lines = [answered(call, target)]
        lines += [f"  {ranks_text([target.mesh_ranks[rank]])}: {self._doing(rank, rows)}" for rank in missing[:_MAX_LINES]]
        if len(missing) > _MAX_LINES:
            lines.append(f"  and {ranks_text([target.mesh_ranks[rank] for rank in missing[_MAX_LINES:]])}")
        return "\n".join(lines)

    def _rows(self) -> Sequence[ActorActivity]:
        """The actors of the procs, from the answers that are there."""
        rows = self._proc.board.rows(self._proc.ref, os.getpid(), "")
        for answer in self.answers:
            if answer._done and answer._error is None:
                rows += answer.get().actors
        return rows

    def _doing(self, rank: int, rows: Sequence[ActorActivity]) -> str:
        ref, known = self._target.refs[rank], all(answer._done for answer in self.answers)
        there = [row for row in rows if row.proc == ref.uid]
        row = next((row for row in there if row.mesh and self._target.actor.endswith(row.mesh)), None)
        if row is None:
            if any(row.silent_s or row.state in ("stopped", "gone") for row in there):
                return f"not there yet: {of_process(there[0])}"
            if known:
                return "no such actor there, or none yet"
            reason = without_next(self._proc.router.story_of(agent_at(ref.host))) if ref.host else ""
            return f"its host can't be reached: {reason}" if reason else "its host agent has not said what it does"
        text = doing(row)
        if ref.uid == self._proc.ref.uid and self._target.actor == self._target.caller and row.endpoint is not None:
            text += "; that is this very actor: it waits for its own mesh, and handles no other message meanwhile"
        return text


def doing(row: ActorActivity) -> str:
    """What an actor does, in words."""
    parts = [of_process(row)] if row.state in ("stopped", "gone") else []
    if row.endpoint is not None:
        parts.append(f"busy for {row.running_s:.1f} s in {row.endpoint!r}")
        if row.debugged:
            parts.append("waits at a breakpoint (attach with: monarch debug)")
    elif row.state == "idle":
        parts.append(f"idle, {row.handled} handled")
    if row.num_concurrent:
        parts.append(f"{row.num_concurrent} concurrent under way, the oldest {row.oldest!r} for {row.oldest_s:.1f} s")
    if row.waiting:
        parts.append(f"{row.waiting} waiting")
    if row.silent_s:
        parts.append(_silence(row))
    return ", ".join(parts)


def of_process(row: ActorActivity) -> str:
    """What keeps the whole process of an actor from moving."""
    if row.state in ("stopped", "gone"):
        return "its process is stopped by a signal" if row.state == "stopped" else "its process has ended"
    return _silence(row)


def _silence(row: ActorActivity) -> str:
    return f"its interpreter has not answered for {row.silent_s:.1f} s"
