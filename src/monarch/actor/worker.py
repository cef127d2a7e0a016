"""The life of a worker proc: serve until its owner stops it or its host agent is gone.

The main thread only waits; actors have threads of their own. When the proc is stopped the main thread returns, so the
interpreter finalises as in any program.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading

from monarch import config
from monarch._base.ids import ProcRef
from monarch._mesh.shape import Extent, Point, Shape
from monarch._net import credentials
from monarch._net.router import listen_at
from monarch._runtime import background, captured_stream, dumps, runtime_log, threads
from monarch._runtime.cell import Activation
from monarch._runtime.platform import SYSTEM, Platform
from monarch._wire.messages import ProcBoot
from monarch._wire.observation_messages import Stalled
from monarch.actor import log_source
from monarch.actor.actor_mesh import is_asynchronous
from monarch.actor.context import Instance
from monarch.actor.debugger import install_breakpoints
from monarch.actor.endpoint import parameters_of
from monarch.actor.proc_mesh import ProcMesh
from monarch.actor.proc_mesh_core import ProcMeshCore, ProcNames
from monarch.actor.process import Process, set_process
from monarch.actor.source_loader import install_source_loader

_HOST_LOST_STATUS = 70
_JOIN_S = 1.0
_SET_UP_S = 1.0
"""How long a process that is stopped waits for what its owner may have sent before."""
_FLUSH_S = 2.0
"""How long what actors sent last may take to leave, once they have ended."""
_WARM = (
    "asyncio",
    "cloudpickle",
    "faulthandler",
    "monarch._net.local",
    "monarch._runtime.actor_loop",
    "monarch._runtime.drivers",
    "monarch._wire.exceptions",
    "monarch._wire.tensors",
    "monarch.actor.behavior",
    "monarch.actor.controllers",
    "monarch.actor.setup",
)
"""Modules that every proc soon needs. The zygote has them before it forks, so procs share their memory."""


class WorkerProcess(Process):
    """The runtime of a worker proc. Thread: any."""

    def __init__(self, boot: ProcBoot, platform: Platform = SYSTEM) -> None:
        self.boot = boot
        super().__init__(boot.proc, boot.host, ready=False, platform=platform)
        self.ended = threading.Event()
        own = ProcMesh(
            ProcMeshCore(
                ProcNames.of_one(boot.name, boot.proc), name=boot.name, extent=Extent([], []), hosts=None, owner_actor="", owned=False
            ),
            Shape.unity(),
        )
        self._instance = Instance(
            process=self,
            uid="proc",
            name=boot.name,
            class_name=None,
            rank=Point(0, Extent([], [])),
            proc_mesh=own,
            proc=own,
            creator=None,
        )
        self._outside = Activation(_ProcCell(self._instance), 0, (), ())

    def host_identity(self) -> ProcRef:
        """The agent of this host."""
        return self.boot.host

    def outside_activation(self) -> Activation:
        """A thread that no actor started speaks for the only actor of this proc, or else for the proc."""
        cells = [cell for cell in self.proc.cells.values() if not cell.create.system and cell.fault is None and cell.instance is not None]
        if len(cells) == 1:
            create = cells[0].create
            return Activation(cells[0], create.rank, create.labels, create.sizes)
        return self._outside

    def on_stop(self, reason: str) -> None:
        """The owner wants this process to end."""
        self.proc.stop_cells(reason, self.ended.set)
        if not self.proc.is_set_up:
            self.proc.loop.call_later(_SET_UP_S, lambda: self._end_unprepared(reason))

    def _end_unprepared(self, reason: str) -> None:
        """A process that was started anew may have been stopped before its owner has sent the bootstrap, which then never comes."""
        if not self.proc.is_set_up:
            self.proc.set_ready(RuntimeError(f"its process was stopped before the bootstrap: {reason}"))

    def on_stalled(self, stalled: Stalled) -> None:
        """The client logs it, and this process's owner is nearer to it."""
        self.proc.tell(self.boot.owner, stalled)

    def on_host_lost(self, reason: str) -> None:
        """The agent is gone, so this process goes, with its children that are still in its group."""
        if self.ended.is_set():  # it is this process that closed the link, on its way out
            return
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(_HOST_LOST_STATUS)

    def serve(self) -> None:
        """Run until stopped."""
        proc = self.proc
        path = SYSTEM.file_of(proc.ref.address)
        proc.board.arm(os.getpid(), dumps.arm(path))
        listener = listen_at(path)
        proc.start()
        proc.loop.call_soon(proc.router.listen, listener)
        proc.router.link_to(self.boot.host)
        self.ended.wait()
        proc.join_cells(_JOIN_S)
        background.stop()
        self.close_memory()
        if self.printer is not None:
            self.printer.close(_FLUSH_S)
        proc.close("the process ends", flush_s=_FLUSH_S)
        proc.board.arm(os.getpid(), 0)


class _ProcCell:
    """Stands for a proc where a cell is expected."""

    def __init__(self, instance: Instance) -> None:
        self.uid = "proc"
        self.instance = instance


def warm_up() -> None:
    """Import what procs need, in the process that forks them."""
    captured_stream.install()  # first: modules may keep the stream that they find
    for module in _WARM:
        importlib.import_module(module)


def main(boot: ProcBoot) -> None:
    """Be the proc that `boot` describes; returns when it was stopped."""
    config.reload_config_from_env()
    config.adopt(boot.config)
    captured_stream.install()
    _buffer_lines()
    threads.inherit_context()
    SYSTEM.settle(boot.host.address, boot.folder)
    if boot.credentials:
        credentials.set_credentials(credentials.decode(boot.credentials))
    process = WorkerProcess(boot)
    log_source.attribute_output(boot.log_mark)
    runtime_log.start_runtime_log("proc")
    set_process(process)
    install_breakpoints()
    install_source_loader()
    process.serve()
    _forget_user_code()
    sys.stdout.flush()
    sys.stderr.flush()


def _forget_user_code() -> None:
    """Let go of the user's classes, or the finalisers of what is in their modules would not run.

    The zygote's modules outlive all others when the interpreter ends (`zygote.py`), so nothing in them may refer to those.
    """
    set_process(None)
    parameters_of.cache_clear()
    is_asynchronous.cache_clear()


def _buffer_lines() -> None:
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True)
