"""Fates: what became of other processes, as far as this one has to know.

A closed link is only a suspicion. The agent of the other process's host says how that ended, and whether it may come back
under the same id; only then do those who wait for it fail.

Rules of this file:
    1. One end is heard once, however many tell of it and whenever: `ProcExited.attempt` counts the processes under an id.
    2. Whoever waits hears first, then the owners (`Hooks.on_proc_lost`); restarts begin before both.
    3. What was under way to a process that is gone is lost; what is sent later waits for its successor, or is refused.

Read next: `proc.py`, which owns this; `docs/design/supervision.md`, "Identity".
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from monarch._base.ids import ProcRef, agent_at, is_agent
from monarch._runtime.mailbox import ProcGoneError, Target
from monarch._wire import messages
from monarch._wire.messages import CallHeader, ProcExited

if TYPE_CHECKING:
    from monarch._runtime.proc import Proc

_logger = logging.getLogger("monarch.net")
_MAX_REMEMBERED = 16384
"""How many procs that are gone are remembered with the reason."""
_TIMEOUT_S = 10.0
_REDIAL_S = 0.05
_MAX_REDIAL_S = 1.0
_MANY_DIALS = 6
Stray: TypeAlias = tuple[Target, int, CallHeader]
"""A message without reply port that could not be sent: to whom, to which rank of the view, and its header."""


class Fates:
    """The fates that one process knows of. Thread: net loop, except `gone` and `keep_until_known` (any)."""

    def __init__(self, proc: Proc) -> None:
        self._proc = proc
        self.gone: dict[str, ProcExited] = {}
        """How those ended that will not come back, by uid."""
        self._awaited: dict[str, float] = {}
        self._last_ends: dict[str, int] = {}
        """The last process under each id whose end was heard of (`ProcExited.attempt`)."""
        self._vain: dict[str, int] = {}
        """How often a process that is up was dialled in vain, by uid."""
        self._limbo: dict[str, list[Stray]] = {}
        self._forsaken: set[str] = set()
        """Procs that are being killed, and what is sent to them is for those that will be started anew."""

    def keep_until_known(self, uid: str, stray: Stray) -> None:
        """Bounce a message to a proc once it is known whether that comes back."""
        self._proc.loop.call_soon(self._keep, uid, stray)

    def _keep(self, uid: str, stray: Stray) -> None:
        self._limbo.setdefault(uid, []).append(stray)
        # The fate may have come between the failed send and this.
        exited = self.gone.get(uid)
        if exited is not None:
            self._leave_limbo(exited)

    def _leave_limbo(self, exited: ProcExited) -> None:
        for target, rank, header in self._limbo.pop(exited.proc.uid, ()):
            self._proc.bounce(target, rank, header, exited)

    def await_agent(self, agent: ProcRef, budget_s: float) -> None:
        """Keep dialling an agent that may not serve yet, or serves again."""
        self.gone.pop(agent.uid, None)
        self._proc.router.readmit(agent)
        self._proc.caster.on_agent_back(agent)
        self._awaited[agent.uid] = self._proc.loop.now_s() + budget_s

    def on_unreachable(self, ref: ProcRef, reason: str) -> None:
        """Dialling failed: an agent may still come; of a proc, its agent knows whether it is on its way or gone."""
        if self._proc.loop.now_s() < self._awaited.get(ref.uid, 0.0):
            self._proc.loop.call_later(_REDIAL_S, lambda: self._proc.router.dial(ref))
            return
        self._ask(ref, reason, messages.WatchProc(ref.uid))

    def on_denied(self, ref: ProcRef, reason: str) -> None:
        """The other end and this one don't trust, or don't understand, each other: there will be no link."""
        self._awaited.pop(ref.uid, None)
        self.on_exited(ProcExited(ref, reason, "denied", attempt=messages.UNKNOWN_ATTEMPT))
        if is_agent(ref):
            self._proc.hooks.on_agent_denied(ref, reason)

    def on_forgotten(self, ref: ProcRef, reason: str) -> None:
        """A process lives, but took this one for lost: what was under way is lost, and it is dialled at once for the news that it has."""
        self._lose_connection(ProcExited(ref, f"the connection to it broke ({reason})", "unknown", again=True))
        if is_agent(ref):
            self._proc.caster.on_agent_unreached(ref)
        self._proc.router.link_to(ref)

    def on_lost(self, ref: ProcRef, reason: str, pid: int) -> None:
        """The link to a proc, whose process was `pid`, closed: its agent knows how it ended."""
        if ref.uid not in self.gone:
            self._ask(ref, reason, messages.WatchProc(ref.uid, exit_only=True, pid=pid))

    def _ask(self, ref: ProcRef, reason: str, question: messages.WatchProc, *, broke: bool = False) -> None:
        if not ref.host:
            self.on_exited(unknown_end(ref, reason))
            return
        agent = agent_at(ref.host)
        lost = self.gone.get(agent.uid)
        if lost is not None and lost.how != "denied":
            self.await_agent(agent, 0.0)  # it may have been a cut, which is over; whoever lost something there has been told
        answer = self._proc.request(agent, question)

        def on_answer() -> None:
            error = answer._error
            if isinstance(error, ProcGoneError) and agent.uid not in self.gone:  # only the connection was lost, and the question with it
                self._proc.loop.call_later(_REDIAL_S, lambda: self._ask(ref, reason, question, broke=broke))
                return
            if isinstance(error, TimeoutError) and question.exit_only:
                self._proc.loop.call_soon(lambda: self._ask(ref, reason, messages.WatchProc(ref.uid), broke=True))
                return
            fate = unknown_end(ref, reason) if error is not None else answer.get()
            if broke and isinstance(fate, messages.ProcUp):  # it lives: only the connection is gone, and what was on it
                lost = ProcExited(ref, f"the connection to it broke ({reason})", "unknown", again=True)
                self._proc.loop.call_soon(self._lose_connection, lost)
            else:
                self._proc.loop.call_soon(self._on_fate, fate)

        answer._when_done(on_answer)
        if question.exit_only or broke:
            self._proc.loop.call_later(_TIMEOUT_S, lambda: answer._fail(TimeoutError()))

    def _on_fate(self, fate: messages.Control) -> None:
        if isinstance(fate, messages.ProcUp):
            self._dial_again(fate.proc)
        elif isinstance(fate, ProcExited):
            self.on_exited(fate)

    def on_reached(self, ref: ProcRef) -> None:
        """There is a connection."""
        self._vain.pop(ref.uid, None)

    def _dial_again(self, ref: ProcRef) -> None:
        """A process that could not be reached is up: at once the first time, then ever more slowly."""
        number = self._vain[ref.uid] = self._vain.get(ref.uid, 0) + 1
        if number == 1:
            self._proc.router.dial(ref)
            return
        if number == _MANY_DIALS:
            _logger.warning("not reached, tried again and again: peer=%s reason=%s", ref.uid, self._proc.router.story_of(ref))
        self._proc.loop.call_later(min(_REDIAL_S * 2.0 ** (number - 2), _MAX_REDIAL_S), lambda: self._proc.router.dial(ref))

    def _lose_connection(self, exited: ProcExited) -> None:
        """What was under way to a proc is lost; what is sent from now on takes another link."""
        sent_before = self._proc.ports.mark()
        self._proc.router.renew(exited.proc, exited.reason, exited.pid)
        self._proc.ports.lose(exited, sent_before)
        self._proc.flow.lose(exited.proc.uid)
        self._proc.caster.on_connection_lost(exited.proc)
        self._leave_limbo(exited)

    def forsake(self, refs: Sequence[ProcRef], reason: str) -> None:
        """Procs are being killed and will be started anew: what is sent from now on waits for that, as if they were gone already."""
        refs = [ref for ref in refs if ref.uid not in self.gone and ref.uid not in self._forsaken]
        sent_before = self._proc.ports.mark()
        pids = [self._proc.router.supersede(ref, reason) for ref in refs]  # all of them before anybody is woken who calls again
        for ref, pid in zip(refs, pids, strict=True):
            self._forsaken.add(ref.uid)
            attempt = self._last_ends.get(ref.uid, -1) + 1
            cast_ports = self._proc.caster.on_exited(ProcExited(ref, reason, "killed", attempt=attempt, again=True))
            self._lose(ProcExited(ref, reason, "killed", again=True), sent_before, cast_ports)
            self._proc.flow.lose(ref.uid)
            self._ask(ref, reason, messages.WatchProc(ref.uid, exit_only=True, pid=pid))

    def on_exited(self, exited: ProcExited) -> None:
        """A proc is gone: everything here that waits for it ends now."""
        uid = exited.proc.uid
        self._vain.pop(uid, None)
        is_news = exited.attempt > self._last_ends.get(uid, -1)
        if uid in self.gone:
            return
        if exited.again and not is_news:
            if not self._proc.router.serves(exited.proc):  # a link that was made while the process was dying has closed, too
                self._lose_connection(exited)
            return
        self._last_ends[uid] = exited.attempt
        if exited.again and uid in self._forsaken:
            self._forsaken.discard(uid)
            self._proc.hooks.on_proc_lost(exited)()
            self._proc.end_owned_by(exited)
            self._proc.router.dial(exited.proc)
            return
        self._forsaken.discard(uid)
        sent_before = self._proc.ports.mark()  # who is woken by the last words of the proc may call it again before `ports.lose`
        if exited.again:
            self._proc.router.renew(exited.proc, exited.reason, exited.pid)
        else:
            if len(self.gone) >= _MAX_REMEMBERED:
                self._last_ends.pop(next(iter(self.gone)), None)
                del self.gone[next(iter(self.gone))]
            self.gone[uid] = exited
            self._proc.router.lose(exited.proc, exited.reason)
        cast_ports = self._proc.caster.on_exited(exited)
        self._proc.inbox.on_gone(uid)
        tell_owners = self._proc.hooks.on_proc_lost(exited) if is_news else self._proc.hooks.on_proc_abandoned(exited)
        self._lose(exited, sent_before, cast_ports)
        self._proc.flow.lose(uid)
        self._leave_limbo(exited)
        tell_owners()
        if is_news:
            self._proc.end_owned_by(exited)

    def _lose(self, exited: ProcExited, sent_before: int, cast_ports: Sequence[int]) -> None:
        """Whoever waits for a proc hears of its end."""
        self._proc.ports.lose(exited, sent_before)
        for port in cast_ports:
            self._proc.ports.lose_one(port, exited)


def unknown_end(ref: ProcRef, reason: str = "its connection is closed") -> ProcExited:
    """The end of a process that nobody can tell more of."""
    return ProcExited(ref, f"its process has ended ({reason})", "unknown", attempt=messages.UNKNOWN_ATTEMPT)
