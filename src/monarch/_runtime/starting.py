"""Starting: what a host agent has a zygote do for a request to spawn procs.

Read next: `host.py`, which asks; `zygote.py`, which does it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from monarch._base.ids import ProcRef, agent_at, between_hosts
from monarch._net import credentials
from monarch._runtime.platform import SYSTEM
from monarch._wire import messages, zygote_messages
from monarch._wire.messages import ProcSpec


def starts_of(
    request: messages.SpawnProcs, own: ProcRef, entry: str, *, from_here: bool
) -> Iterator[tuple[ProcSpec, zygote_messages.StartProc]]:
    """Each proc of a request, and what its zygote is told.

    Args:
        own: the agent.
        entry: module whose `main(boot)` is the process.
        from_here: whether who asks is a process of this machine; another one's directories and credentials mean little here.
    """
    env = dict(os.environ) if request.env is None else request.env
    cwd, sys_path, shown = request.cwd, request.sys_path, request.credentials
    if not from_here or not shown:
        shown = credentials.encode(credentials.own_credentials()) if between_hosts(own.address) else b""
    if not from_here:
        cwd = cwd if os.path.isdir(cwd) else os.getcwd()
        sys_path = [*sys.path, *(path for path in sys_path if path not in sys.path and os.path.exists(path))]
    for spec in request.procs:
        if between_hosts(own.address):
            SYSTEM.add_name(spec.proc.host)
        agent = agent_at(spec.proc.host)  # as whoever spawns it calls this agent
        boot = messages.ProcBoot(spec.proc, agent, request.owner, spec.name, request.config, entry, folder=SYSTEM.folder, credentials=shown)
        command, proc_env = None, env
        if spec.command is not None:
            command = zygote_messages.Command(spec.command.program, spec.command.arg0, spec.command.args)
            proc_env = overlay(env, spec.command.env)
        yield (
            spec,
            zygote_messages.StartProc(spec.proc.uid, messages.encode(boot), proc_env, cwd, sys_path, command, spec.bind, request.preload),
        )


def overlay(env: dict[str, str], changes: dict[str, str | None]) -> dict[str, str]:
    """`env` with some variables set, or removed where the value is None."""
    merged = {**env, **{key: value for key, value in changes.items() if value is not None}}
    return {key: value for key, value in merged.items() if changes.get(key, "") is not None}
