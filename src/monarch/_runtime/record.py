"""Records: what a host agent knows of each of its procs.

Read next: `host.py`, which keeps them.
"""

from __future__ import annotations

import signal

from monarch._base.ids import ProcRef
from monarch._runtime.stalls import Limits
from monarch._wire import zygote_messages
from monarch._wire.messages import ProcExited, ProcSpec


class Record:
    """What the agent knows of one proc."""

    __slots__ = (
        "attempt",
        "exited",
        "gone",
        "how",
        "last_exit",
        "limits",
        "max_idle_s",
        "owner",
        "pid",
        "ref",
        "start",
        "stop_asked",
        "stopped_at_s",
        "supervisors",
        "up",
        "wanted",
        "watchers",
    )

    def __init__(
        self,
        spec: ProcSpec,
        owner: ProcRef,
        start: zygote_messages.StartProc,
        max_idle_s: float,
        limits: Limits,
    ) -> None:
        self.ref = spec.proc
        self.start = start
        self.max_idle_s = max_idle_s
        self.limits = limits
        self.attempt = 0
        """How many processes there were under this id before."""
        self.supervisors: set[tuple[str, str]] = set()
        """(process, group) of those who may want it started anew."""
        self.wanted = False
        """It is to be started anew as soon as the old process is gone."""
        self.last_exit: ProcExited | None = None
        """How the process before this one ended."""
        self.owner = owner
        self.pid = 0
        self.up = False
        self.stop_asked = False
        self.stopped_at_s = 0.0
        self.how = ""
        """Why the agent itself ended it; "" when it did not."""
        self.exited: ProcExited | None = None
        self.gone = False
        self.watchers: list[tuple[ProcRef, int, bool]] = []
        """(who, port, exit only)"""


def ending_of(record: Record, exited: zygote_messages.Exited) -> tuple[str, str]:
    """What to say of a proc's end, and which kind of end it is (`ProcExited.how`)."""
    if record.how:
        return record.how, "killed"
    if exited.signal is not None:
        name = signal.Signals(exited.signal).name if exited.signal in signal.Signals._value2member_map_ else "unknown signal"
        core = ", core dumped" if exited.core_dumped else ""
        how = "stopped" if record.stop_asked else "killed"
        reason = f"Killed(sig={exited.signal}): it was killed by signal {exited.signal} ({name}){core}, pid {exited.pid}"
    else:
        how = "stopped" if record.stop_asked else "exited"
        reason = f"Stopped(exit_code={exited.code}): it exited with status {exited.code}, pid {exited.pid}"
    if not record.up and not record.stop_asked:
        return f"{reason}, before it was ready for messages", "launch"
    return reason, how
