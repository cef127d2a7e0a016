"""This process, as the actor layer sees it: the runtime and what the runtime calls back.

One `Process` exists per operating-system process. A worker makes its own when it starts (`worker.py`); any other
process becomes a client on first use (`client.py`).

Read next: `client.py` and `worker.py`, the two kinds.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from monarch._base.errors import InternalError, explain
from monarch._base.ids import ProcRef, between_hosts
from monarch._runtime.cell import Activation, Behavior, Bounce, Cell, current
from monarch._runtime.faults import describe_failure
from monarch._runtime.future import Future
from monarch._runtime.platform import SYSTEM, Platform
from monarch._runtime.proc import Proc
from monarch._runtime.supervision import Failure
from monarch._wire.frames import Buffer
from monarch._wire.memory_messages import MemoryRequest, nothing_published
from monarch._wire.messages import UNKNOWN_ATTEMPT, Fault, ProcExited
from monarch._wire.observation_messages import ActorActivity, LogLines, Stalled
from monarch.actor.supervisor import Supervisor

if TYPE_CHECKING:
    from monarch.actor.context import Instance
    from monarch.actor.log_printer import LogPrinter


_logger = logging.getLogger("monarch.supervision")
_PRINT_S = 3.0
"""How long the output of procs that have ended may take to be printed here."""


class Memory(Protocol):
    """What a process has of one-sided memory; `monarch.rdma` makes it, once it is needed."""

    def on_message(self, message: MemoryRequest, sender: ProcRef, answer: Callable[..., None]) -> None:
        """Somebody wants something of published memory; `answer` is called on the net loop, now or later. Thread: net loop."""

    def close(self) -> None:
        """The process ends."""


class Process:
    """The hooks of a `Proc`, and what is owned in this process. Thread: any."""

    def __init__(self, ref: ProcRef, host: ProcRef | None, *, ready: bool, platform: Platform = SYSTEM) -> None:
        self.proc = Proc(ref, host, self, ready=ready, platform=platform)
        self.controllers: Any = None
        """Mesh of the actor that keeps the table of controllers; None until it is known (see `controller_table`)."""
        self.printer: LogPrinter | None = None
        """Shows the output of procs here; None: it was never asked to."""
        self._printer_lock = threading.Lock()
        self.proc_watchers: list[Callable[[ProcExited], None]] = []
        """Called on the net loop for each process that is known here and has ended."""
        self.memory: Memory | None = None
        """Filled by `monarch.rdma`."""
        self.supervisor = Supervisor(self)

    # --- who runs here -------------------------------------------------------------------------------------------

    @property
    def root(self) -> Instance | None:
        """The instance that speaks for threads outside any actor; None in a worker."""
        return None

    def activation(self) -> Activation:
        """The actor and message of the running context."""
        return current.get(None) or self.outside_activation()

    def instance(self) -> Instance:
        """The actor that runs in this context.

        Raises:
            RuntimeError: it does not exist yet; a module is imported for it that wants to know its place, or to spawn.
        """
        instance: Instance | None = self.activation().cell.instance
        if instance is None:
            raise RuntimeError(_nobody_yet())
        return instance

    def outside_activation(self) -> Activation:
        """The activation of threads that no actor started."""
        raise NotImplementedError

    def need_agent(self, agent: ProcRef) -> None:
        """A host agent is about to be asked for something; a client starts its own now."""

    def host_identity(self) -> ProcRef:
        """The agent of this host, running or not."""
        raise NotImplementedError

    def name_of(self, address: str) -> str:
        """What a worker is called in its cluster that this process reaches at `address`."""
        return address

    @property
    def gateway(self) -> ProcRef | None:
        """The agent without which this process reaches no other host; None: there is none such."""
        return None

    def controller_table(self) -> Any:
        """Mesh of the actor that keeps the table of controllers; it lives in the root client."""
        if self.controllers is None:
            raise InternalError("this process was not told of its job's table of controllers")
        return self.controllers

    def own_activity(self) -> list[ActorActivity]:
        """What the actors of this process are doing."""
        return self.proc.board.rows(self.proc.ref, os.getpid(), "")

    # --- output of procs -----------------------------------------------------------------------------------------

    def log_printer(self) -> LogPrinter:
        """What shows the output of procs in this process; the first call starts it."""
        from monarch.actor.log_printer import LogPrinter, flush_after_cells

        with self._printer_lock:
            if self.printer is None:
                self.printer = LogPrinter(self.proc)
        flush_after_cells(flush_logs)
        return self.printer

    def on_log_lines(self, message: LogLines, sender: ProcRef) -> None:
        """Output of procs came in."""
        if self.printer is not None:
            self.printer.put(message, sender)

    def print_last(self, refs: Sequence[ProcRef], result: Future[None]) -> None:
        """Complete `result` once the last lines of procs that have ended are printed here, if any are."""
        printer = self.printer
        if printer is None:
            result._complete(None)
            return
        printer.forget([ref.uid for ref in refs], result)
        self.proc.loop.call_later(_PRINT_S, lambda: result._complete(None))  # nobody reads what is printed

    # --- one-sided memory ----------------------------------------------------------------------------------------

    def on_memory_message(self, message: MemoryRequest, sender: ProcRef, answer: Callable[..., None]) -> None:
        """Somebody wants something of memory that this process has published; without any, there is nothing to do."""
        if self.memory is not None:
            self.memory.on_message(message, sender, answer)
        else:
            answer(nothing_published(message))

    def close_memory(self) -> None:
        """Take all published memory back, because this process ends."""
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.close()

    # --- hooks of the runtime ------------------------------------------------------------------------------------

    def open_behavior(self, cell: Cell, payload: Buffer, buffers: Sequence[memoryview]) -> Behavior:
        """Unpickle an actor's class and arguments. Thread: the cell's."""
        from monarch.actor.behavior import open_behavior

        return open_behavior(self, cell, payload, buffers)

    def on_actor_fault(self, owner_actor: str, fault: Fault) -> None:
        """An actor failed whose owner is here."""
        self.supervisor.on_actor_fault(owner_actor, fault)

    def on_proc_lost(self, exited: ProcExited) -> Callable[[], None]:
        """A proc has ended."""
        for watch in list(self.proc_watchers):
            watch(exited)
        return self.supervisor.on_proc_lost(exited)

    def on_proc_abandoned(self, exited: ProcExited) -> Callable[[], None]:
        """A proc that was lost will not be started anew."""
        return self.supervisor.on_proc_abandoned(exited)

    def on_proc_up(self, ref: ProcRef) -> None:
        """A proc listens."""
        self.supervisor.on_proc_up(ref)

    def notify(self, owner_actor: str, failure: Failure) -> None:
        """Tell an owner of a failure."""
        cell = self.proc.cells.get(owner_actor)
        if cell is not None:
            cell.notify(failure)
        else:
            self.on_unowned(owner_actor, failure)

    def on_unowned(self, owner_actor: str, failure: Failure) -> None:
        """The owner has ended meanwhile; its own owner has heard of that."""
        _logger.info("failure of what an ended actor owned: owner=%s failure=%s", owner_actor, describe_failure(failure))

    def on_bounced(self, sender_actor: str, method: str, fault: Fault) -> None:
        """A message without reply port found nobody: its sender decides."""
        cell = self.proc.cells.get(sender_actor)
        if cell is None:
            self.on_root_bounced(method, fault)
        else:
            cell.notify(Bounce(method, fault))

    def on_root_bounced(self, method: str, fault: Fault) -> None:
        """A message of the root found nobody."""

    def on_stalled(self, stalled: Stalled) -> None:
        """Something that descends from this process does not move."""

    def on_stop(self, reason: str) -> None:
        """The owner of this process wants it to end."""

    def on_host_lost(self, reason: str) -> None:
        """The agent of this host is gone."""

    def on_agent_lost(self, agent: ProcRef, reason: str) -> None:
        """An agent is gone, and every process that it had started."""
        if between_hosts(agent.address):
            why = f"its host {agent.address} is lost: {reason}"
        else:
            why = f"the agent of its host has ended ({reason}), and every process that it had started"
        with self.supervisor.one_event():
            for ref in (*self.supervisor.procs_of(agent), agent):  # the agent too: a stop() may be waiting for its answer
                self.proc.fates.on_exited(ProcExited(ref, why, "killed", attempt=UNKNOWN_ATTEMPT))

    def on_agent_denied(self, agent: ProcRef, reason: str) -> None:
        """A host can't be used, and nothing that was to start there will."""
        with self.supervisor.one_event():
            for ref in self.supervisor.procs_of(agent):
                self.proc.fates.on_exited(ProcExited(ref, f"its host {agent.address} can't be used: {reason}", "launch"))


def _nobody_yet() -> str:
    """Why the running actor is unknown while it is being unpickled, in terms of the module that is being imported then."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    text = "an actor is being set up in this process, and can't ask for its host or proc, or spawn, before its class is loaded"
    if frame is None:
        return explain(text, next="do that in the __init__ of the actor, or in an endpoint")
    name = frame.f_globals.get("__name__")
    return explain(
        f"module {name!r} asks for its host or spawns when it is imported; this process imports it to find a class or function of it",
        where=f"{frame.f_code.co_filename}, line {frame.f_lineno}",
        next='move that under `if __name__ == "__main__":`, or into a function that the script calls',
    )


_process: Process | None = None
_lock = threading.RLock()


def this_process() -> Process:
    """The process's runtime; outside a worker, the first call makes this process a client."""
    process = _process
    if process is None:
        from monarch.actor.client import start_client

        with _lock:
            process = _process or start_client()
    return process


def become(make: Callable[[], Process], refuse: Callable[[], Exception]) -> None:
    """Let `make` make the runtime of this process; raise what `refuse` gives if it has one."""
    with _lock:
        if _process is not None:
            raise refuse()
        make()


def known_process() -> Process | None:
    """The process's runtime, or None when nothing has needed it yet."""
    return _process


def flush_logs() -> Future[None]:
    """Done when everything that procs have written so far, and that is shown here, is printed."""
    printer = None if _process is None else _process.printer
    return Future._completed(None) if printer is None else printer.flush()


def set_process(process: Process | None) -> None:
    """Install the runtime of this process; None forgets it."""
    global _process
    _process = process
