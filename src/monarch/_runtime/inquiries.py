"""Inquiries: others ask a host agent what became of a process of its host, and wait for the answer if need be.

Read next: `host.py`, which answers those who wait when it happens; `fates.py` for who asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from monarch._base.ids import ProcRef
from monarch._wire import messages
from monarch._wire.messages import ProcExited, ProcUp

if TYPE_CHECKING:
    from monarch._runtime.record import Record

_OVERTAKEN_S = 5.0
"""How long the request to start a process may be behind a reference to that process."""


class Inquiries:
    """The questions to one agent. Thread: its loop."""

    def __init__(
        self,
        records: Mapping[str, Record],
        tell: Callable[[ProcRef, messages.Control, int], None],
        call_later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._records = records
        self._tell = tell
        self._call_later = call_later
        self._overtaken: dict[str, list[tuple[ProcRef, int]]] = {}
        """Who asks for processes that nobody has asked to start yet, and the ports for the answers."""

    def ask(self, request: messages.WatchProc, sender: ProcRef, port: int) -> None:
        """Answer now, or have the record remember who asks."""
        record = self._records.get(request.uid)
        if record is None and request.exit_only:
            self._deny(request.uid, sender, port)
        elif record is None:
            self._overtaken.setdefault(request.uid, []).append((sender, port))
            self._call_later(_OVERTAKEN_S, partial(self._give_up_waiting_for, request.uid))
        elif request.exit_only and record.last_exit is not None and request.pid != record.pid:
            self._tell(sender, record.last_exit, port)
        elif record.exited is not None and (request.exit_only or not record.exited.again):
            self._tell(sender, record.exited, port)
        elif record.up and record.exited is None and not request.exit_only:
            self._tell(sender, ProcUp(record.ref, record.pid), port)
        else:
            record.watchers.append((sender, port, request.exit_only))

    def take_overtaken(self, uid: str) -> list[tuple[ProcRef, int, bool]]:
        """Who has asked for a process before the request to start it came: what its record remembers of them."""
        return [(sender, port, False) for sender, port in self._overtaken.pop(uid, ())]

    def _give_up_waiting_for(self, uid: str) -> None:
        for sender, port in self._overtaken.pop(uid, ()):
            self._deny(uid, sender, port)

    def _deny(self, uid: str, sender: ProcRef, port: int) -> None:
        self._tell(sender, ProcExited(ProcRef(uid, "", ""), "this host knows no such process; it may have ended long ago", "unknown"), port)
