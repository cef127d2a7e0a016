"""Hooks: what the runtime of a process asks of the layers above it.

Read next: `proc.py`, which calls them; `monarch/actor/process.py`, which has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from monarch._base.ids import ProcRef
from monarch._wire.frames import Buffer
from monarch._wire.memory_messages import MemoryRequest
from monarch._wire.messages import Fault, ProcExited
from monarch._wire.observation_messages import LogLines, Stalled

if TYPE_CHECKING:
    from monarch._runtime.cell import Behavior, Cell


class Hooks(Protocol):
    """What the layers above supply. Thread: net loop, except `open_behavior` (the cell's thread)."""

    def open_behavior(self, cell: Cell, payload: Buffer, buffers: Sequence[memoryview]) -> Behavior:
        """Unpickle an actor's class and arguments."""

    def on_actor_fault(self, owner_actor: str, fault: Fault) -> None:
        """An actor failed whose owner is an actor of this process, or its root."""

    def on_bounced(self, sender_actor: str, method: str, fault: Fault) -> None:
        """A message of an actor of this process, sent without reply port, found nobody."""

    def on_proc_lost(self, exited: ProcExited) -> Callable[[], None]:
        """A proc is gone; for good, unless `exited.again`. Once per process that has run under its id.

        Returns:
            What is to be done after those who wait for the proc have heard: tell the owners.
        """

    def on_proc_abandoned(self, exited: ProcExited) -> Callable[[], None]:
        """A proc that was lost will not be started anew; returns the same."""

    def on_proc_up(self, ref: ProcRef) -> None:
        """A proc that this process had started, or that was started anew, listens."""

    def on_log_lines(self, message: LogLines, sender: ProcRef) -> None:
        """Output of procs that this process asked for."""

    def on_memory_message(self, message: MemoryRequest, sender: ProcRef, answer: Callable[..., None]) -> None:
        """Somebody wants something of memory that this process has published; `answer` is called on the net loop, now or later."""

    def on_stop(self, reason: str) -> None:
        """The owner of this process wants it to end."""

    def on_stalled(self, stalled: Stalled) -> None:
        """Something that this process, or what it owns, has started does not move."""

    def on_host_lost(self, reason: str) -> None:
        """The agent of this host is gone."""

    def on_agent_denied(self, agent: ProcRef, reason: str) -> None:
        """The agent of another host and this process don't trust, or don't understand, each other."""

    def on_agent_lost(self, agent: ProcRef, reason: str) -> None:
        """The agent of another host is gone."""
