"""Attaching: what a client does until all hosts of a mesh have answered, and what it says meanwhile.

A worker may come late: its address is dialled again and again until `mesh_attach_config_timeout`. What is spawned on it
meanwhile waits in the link.

Read next: `workers.py` for the calls, `_runtime/host.py` for the other end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence

from monarch import config
from monarch._base.errors import explain, next_of, without_next
from monarch._base.ids import ProcRef
from monarch._runtime import versions
from monarch._runtime.future import Future, tell_when_late
from monarch._runtime.proc import Proc
from monarch._wire.contact_messages import Attach, HostInfo
from monarch.actor.process import Process

_logger = logging.getLogger("monarch.attach")
_SAY_S = 3.0
_SAY_AGAIN_S = 10.0
_OTHERS_S = 0.5
"""How long the others may still answer once one has failed, so that one error names all that did."""
CHECK = "check that a worker loop runs there, and that this machine reaches it"


class Attaching:
    """The introduction of this client to some hosts. Thread: any."""

    def __init__(self, process: Process, agents: Sequence[ProcRef]) -> None:
        self.ready: Future[bool] = Future._new()
        """True once all have answered."""
        self._process = process
        self._agents = tuple(dict.fromkeys(agents))
        self._budget_s = config.seconds("mesh_attach_config_timeout")
        self._versions = versions.own_versions()
        self._any_version = bool(config.value("allow_version_mismatch"))
        self._infos: dict[str, HostInfo] = {}
        self._errors: dict[str, str] = {}
        self._is_late = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin."""
        proc = self._process.proc
        request = Attach(self._versions, self._any_version)
        for agent in self._agents:
            proc.fates.await_agent(agent, self._budget_s)
            answer = proc.request(agent, request)
            answer._when_done(lambda agent=agent, answer=answer: self._on_answer(agent, answer))  # type: ignore[misc]
        agents, infos = self._agents, self._infos
        tell_when_late(self.ready, lambda: unreached(proc, [agent for agent in agents if agent.address not in infos]))
        proc.loop.call_later(self._budget_s, self._on_time_out)
        proc.loop.call_later(_SAY_S, self._say)

    def _on_answer(self, agent: ProcRef, answer: Future[HostInfo]) -> None:
        with self._lock:
            error = answer._error
            if error is not None:
                self._errors[agent.address] = str(error)
            else:
                self._infos[agent.address] = answer.get()
            left = len(self._agents) - len(self._infos) - len(self._errors)
        if not left:
            self._finish()
        elif error is not None:  # it will come to nothing; who else can't be attached to is likely to be known in a moment
            self._process.proc.loop.call_later(_OTHERS_S, self._finish)

    def _on_time_out(self) -> None:
        self._is_late = True
        self._finish()

    def _finish(self) -> None:
        if self.ready._done:
            return
        error = self._failure()
        if error is not None:
            self.ready._fail(error)
            return
        theirs = {address: info.versions for address, info in self._infos.items()}
        differing = {address: found for address in theirs if any(found := versions.differences(self._versions, theirs[address]))}
        fatal = sorted({name for names, _ in differing.values() for name in names})
        if fatal and not self._any_version:
            self.ready._fail(RuntimeError(versions.mismatch(fatal, self._versions, {address: theirs[address] for address in differing})))
            return
        if differing:
            _logger.warning("versions differ:\n%s", versions.table(self._versions, {address: theirs[address] for address in differing}))
        self.ready._complete(True)

    def _silent(self) -> dict[str, str]:
        """Addresses that have not answered, each with the reason."""
        late = f"reply timed out after MESH_ATTACH_CONFIG_TIMEOUT ({config.value('mesh_attach_config_timeout')})"
        found: dict[str, str] = {}
        for agent in self._agents:
            if agent.address in self._infos or not (self._is_late or agent.address in self._errors):
                continue
            story = self._process.proc.router.story_of(agent)
            found[agent.address] = self._errors.get(agent.address) or (f"{late}: {story}" if story else late)
        return found

    def _failure(self) -> RuntimeError | None:
        silent = self._silent()
        if not silent:
            return None
        number = len(self._agents)
        return RuntimeError(
            explain(
                f"attach failed: config push failed during attach on {len(silent)} host(s); {len(self._infos)} of {number} answered",
                next="; ".join(dict.fromkeys(filter(None, map(next_of, silent.values())))) or CHECK,
                detail="\n".join(f"{address}: {without_next(reason)}" for address, reason in silent.items()),
            )
        )

    def _say(self) -> None:
        if self.ready._done or self._process.proc.stopping:
            return
        missing = [
            f"{agent.address} ({without_next(self._process.proc.router.story_of(agent)) or 'no answer yet'})"
            for agent in self._agents
            if agent.address not in self._infos
        ]
        number = len(self._agents)
        _logger.warning("attach: %d of %d workers have answered; waiting for %s", number - len(missing), number, ", ".join(missing))
        self._process.proc.loop.call_later(_SAY_AGAIN_S, self._say)


def unreached(proc: Proc, agents: Iterable[ProcRef]) -> str:
    """Why hosts could not be reached so far, a line for each of which that is known."""
    stories = {agent.address: proc.router.story_of(agent) for agent in dict.fromkeys(agents)}
    return "\n".join(f"  host {address}: {without_next(story)}" for address, story in stories.items() if story)
