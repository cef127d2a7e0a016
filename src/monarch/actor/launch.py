"""Launch: how the processes of one proc mesh are started, and how those that are gone are started again.

Read next: `host_mesh.py` for who asks, `_runtime/host.py` for the agent that does it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import cached_property
from typing import Any

import msgspec

from monarch import config
from monarch._base.errors import explain
from monarch._base.ids import ProcRef, agent_at, by_agent
from monarch._mesh.shape import NDSlice, Shape
from monarch._net.credentials import encoded_credentials
from monarch._runtime.future import Future, gather, tell_when_late
from monarch._wire import messages
from monarch.actor.attaching import unreached
from monarch.actor.mock import get_actor_mock_registry_state
from monarch.actor.proc_mesh import ProcMesh
from monarch.actor.proc_mesh_core import ProcMeshCore, launch_or
from monarch.actor.process import Process, this_process

_AGENT_SILENCE_S = 10.0
"""How long an agent may take to say that a proc did not start, after `mesh_proc_spawn_max_idle`."""
_PRELOADS = ("numpy", "torch")


class Launch:
    """What the processes of a mesh are made of. Thread: any."""

    def __init__(
        self, bootstrap: Callable[[], Any] | None, binds: Sequence[dict[str, str]], commands: Sequence[messages.Command | None]
    ) -> None:
        """Args:
        binds: one per process of a host; empty: none is bound.
        commands: one per rank.
        """
        self._setup = (bootstrap, get_actor_mock_registry_state())
        self._binds = binds
        self._commands = commands
        self._spawner = copy_context()
        """What is spawned later has the owner of what was spawned at first."""

    def start(self, mesh: ProcMesh, ranks: Sequence[int]) -> Future[bool]:
        """Start the processes of these ranks of a whole mesh; True once the bootstrap has ended on all of them."""
        process, core = this_process(), mesh._core
        process.supervisor.own_procs(core)
        per_host = core.names.per_host
        specs = [
            messages.ProcSpec(core.refs[rank], core.name, self._binds[rank % per_host] if self._binds else {}, self._commands[rank])
            for rank in ranks
        ]
        for spec in specs:
            _prepare_link(process, spec.proc)
        requests = _Requests(core.uid, process.proc.ref)
        for address, group in _by_agent(specs).items():
            agent = agent_at(address)
            process.need_agent(agent)
            is_near = process.proc.router.is_near(agent)
            if not process.proc.tell(agent, requests.for_agent(group, is_near=is_near)):
                end = process.proc.fates.gone.get(agent.uid)
                why = "the agent of its host has ended"
                if end is not None and end.how == "denied":
                    why = f"its host {address} can't be used: {end.reason}"
                for spec in group:
                    process.proc.loop.call_soon(process.proc.fates.on_exited, messages.ProcExited(spec.proc, why, "launch"))
        _expect(process, core, [spec.proc for spec in specs])
        if self._setup[0] is not None:
            process.controller_table()  # what the bootstrap spawns may ask for a controller
        core.set_up_anew = lambda rank: self._spawner.run(self._set_up_anew, mesh, rank)
        if len(ranks) == len(core.refs):
            return self._ready(mesh, self._set_up(mesh).call())
        return self._ready(mesh, gather([self._set_up(_only(mesh, rank)).call_one() for rank in ranks]))

    def _set_up(self, mesh: ProcMesh) -> Any:
        from monarch.actor.setup import SetupActor

        return mesh._spawn("setup", SetupActor, self._setup, {}, system=True).run

    def _ready(self, mesh: ProcMesh, replies: Future[Any]) -> Future[bool]:
        ready: Future[bool] = Future._new()
        loop = this_process().proc.loop

        def transfer() -> None:
            error = replies._error
            if error is None:
                ready._complete(None, lambda _: bool(replies.get()))
            else:
                # Later: who waits hears of a lost proc before the mesh, which knows why it never came.
                loop.call_soon(lambda: ready._fail(launch_or(error, mesh._core) or error))

        replies._when_done(transfer)
        proc, refs = this_process().proc, mesh._core.refs
        tell_when_late(ready, lambda: unreached(proc, map(agent_at, by_agent(refs))))
        return ready

    def _set_up_anew(self, mesh: ProcMesh, rank: int) -> None:
        """Run the bootstrap on a proc that was started anew. Its failure is that of every actor there, and told as such."""
        self._set_up(_only(mesh, rank)).call_one()  # an answer that nobody reads; by broadcast the failure would be told twice


def _prepare_link(process: Process, ref: ProcRef) -> None:
    """What is sent to a proc waits until it is up. Those of other hosts are not dialled before there is something to send straight."""
    router = process.proc.router
    if router.is_near(ref):
        router.link_to(ref, dial=False)
    else:
        router.expect(ref)


def _only(mesh: ProcMesh, rank: int) -> ProcMesh:
    return ProcMesh(mesh._core, Shape((), NDSlice(offset=rank, sizes=(), strides=())))


def _expect(process: Process, core: ProcMeshCore, refs: Sequence[ProcRef]) -> None:
    """Give up on procs whose agent says nothing at all, neither that they are up nor that they are not."""
    proc = process.proc

    def check() -> None:
        for ref in refs:
            if not core.was_up(ref) and ref.uid not in proc.fates.gone and not proc.router.is_connected(ref):
                proc.fates.on_exited(messages.ProcExited(ref, "the agent of its host does not answer", "timeout"))

    proc.loop.call_later(config.seconds("mesh_proc_spawn_max_idle") + _AGENT_SILENCE_S, check)


def _by_agent(specs: Sequence[messages.ProcSpec]) -> dict[str, list[messages.ProcSpec]]:
    groups: dict[str, list[messages.ProcSpec]] = {}
    for spec in specs:
        groups.setdefault(spec.proc.host, []).append(spec)
    return groups


class _Requests:
    """The requests of one mesh to its agents, which differ little."""

    def __init__(self, mesh: str, owner: ProcRef) -> None:
        try:
            cwd = os.getcwd()
        except FileNotFoundError:
            text = explain("the working directory of this process was deleted", next="os.chdir() to one that exists")
            raise FileNotFoundError(text) from None
        self._of_others = messages.SpawnProcs(
            mesh=mesh,
            procs=[],
            owner=owner,
            env=None,
            cwd=cwd,
            sys_path=[entry or cwd for entry in sys.path],
            preload=[module for module in _PRELOADS if module in sys.modules],
            config=config.snapshot(),
            max_idle_s=config.seconds("mesh_proc_spawn_max_idle"),
        )

    @cached_property
    def _of_own(self) -> messages.SpawnProcs:
        return msgspec.structs.replace(self._of_others, env=dict(os.environ), credentials=encoded_credentials())

    def for_agent(self, specs: list[messages.ProcSpec], *, is_near: bool) -> messages.SpawnProcs:
        """What one agent is asked; those of other hosts are not told this process's environment and credentials."""
        return msgspec.structs.replace(self._of_own if is_near else self._of_others, procs=specs)
