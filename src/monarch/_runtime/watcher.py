"""The watcher: the agent's eye on its procs. It looks at boards, pings, asks for stacks, and tells of what has stalled.

Rules of this file:
    1. A look costs some system calls per proc and no process is woken for it; a ping wakes one, a few times per
       `stall_interpreter_limit`. Nothing is looked at when all limits are off.
    2. A stack is asked for inside first, because only the inside knows what coroutines await. Who does not answer soon is
       dumped from outside (`dumps.py`), which works while the interpreter lock is held.
    3. Asking and dumping have bounds; a notice then goes without a stack.

Read next: `stalls.py`, which decides; `host.py`, which owns the watcher.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, Protocol

from monarch import config
from monarch._base.ids import ProcRef
from monarch._base.knobs import nanos
from monarch._net.loop import NetLoop
from monarch._runtime import board, dumps, stacks
from monarch._runtime.stalls import Finding, Limits, Look, Stalls, blame_holder
from monarch._wire import messages, zygote_messages
from monarch._wire.frames import Buffer
from monarch._wire.messages import ProcExited
from monarch._wire.observation_messages import Stacks, StackTexts, Stalled

_PINGS_PER_LIMIT = 4
_PATIENCE_S = 1.0
"""How long a proc may take to answer from inside: longer than a loaded machine needs, because a dump may catch frames in motion."""
_DUMP_STEP_S = 0.02
_DUMP_BUDGET_S = 1.0
_RESUMED_STEPS = 3
_MAX_THREADS = 8


class Watchable(Protocol):
    """What the agent knows of a proc."""

    ref: ProcRef
    pid: int
    up: bool
    stopped_at_s: float
    exited: ProcExited | None


class _Watched:
    """One proc under watch."""

    __slots__ = ("asked_at_s", "dumped", "path", "ping_port", "pinged_at_s", "record", "stalls")

    def __init__(self, record: Any, limits: Limits, path: str) -> None:
        self.record = record
        self.path = path
        self.stalls = Stalls(limits)
        self.pinged_at_s = 0.0
        self.ping_port = 0
        self.asked_at_s = 0.0
        """When the ping left that is not answered yet; 0: none is out."""
        self.dumped: list[Callable[[dict[int, list[stacks.Place]]], None]] = []
        """Who waits for the dump that is being written."""


class Watcher:
    """Looks after the procs of one host. Thread: net loop."""

    def __init__(
        self,
        loop: NetLoop,
        ask: Callable[[ProcRef, messages.Control, int], None],
        signal: Callable[[str, zygote_messages.SignalProc], None],
        tell: Callable[[Any, Stalled], None],
        file_of: Callable[[str], str],
    ) -> None:
        """Args:
        ask: sends a control message to a proc; the answer comes to `on_answer` with the same port.
        signal: has a proc's zygote send a signal.
        tell: takes a record and what is wrong with it.
        file_of: the socket file of a proc, by its address.
        """
        self._loop = loop
        self._ask = ask
        self._signal = signal
        self._tell = tell
        self._file_of = file_of
        self._watched: dict[str, _Watched] = {}
        self._answers: dict[int, Callable[[Buffer], None]] = {}
        self._ports = count(1)
        self._scanning = False
        self._scanned_at_s = 0.0
        self._host = socket.gethostname()

    def add(self, record: Watchable, limits: Limits) -> None:
        """Watch a proc from now to its end."""
        self.remove(record.ref.uid)  # the process before it under this id
        if limits.step_s is not None:
            self._watched[record.ref.uid] = _Watched(record, limits, self._file_of(record.ref.address))
            if not self._scanning:
                self._scanning = True
                self._scanned_at_s = self._loop.now_s()
                self._loop.call_later(limits.step_s, self._scan)

    def remove(self, uid: str) -> None:
        """A proc has closed its link; it is not asked any more."""
        watched = self._watched.pop(uid, None)
        if watched is not None:
            self._answers.pop(watched.ping_port, None)

    def silent_s(self, uid: str) -> float:
        """For how long a proc has owed an answer that should have come at once; 0: it owes none."""
        watched = self._watched.get(uid)
        silent_s = self._loop.now_s() - watched.asked_at_s if watched is not None and watched.asked_at_s else 0.0
        return silent_s if silent_s >= _PATIENCE_S else 0.0

    def on_answer(self, port: int, payload: Buffer) -> None:
        """A proc has answered."""
        answer = self._answers.pop(port, None)
        if answer is not None:
            answer(payload)

    # --- looking -------------------------------------------------------------------------------------------------

    def _scan(self) -> None:
        for uid in [uid for uid, watched in self._watched.items() if watched.record.exited is not None]:
            self.remove(uid)
        steps = [watched.stalls.limits.step_s or 0.0 for watched in self._watched.values()]
        if not steps:
            self._scanning = False
            return
        now_s, step_s = self._loop.now_s(), min(steps)
        if now_s - self._scanned_at_s > _RESUMED_STEPS * step_s:  # this process did not run itself: nobody was silent
            for watched in self._watched.values():
                watched.asked_at_s = now_s if watched.asked_at_s else 0.0
        self._scanned_at_s = now_s
        for watched in self._watched.values():
            if watched.record.up:
                self._look_at(watched, now_s)
        self._loop.call_later(step_s, self._scan)

    def _look_at(self, watched: _Watched, now_s: float) -> None:
        stopped_at_s = watched.record.stopped_at_s
        if stopped_at_s and watched.asked_at_s:  # it can't answer; that story is another one
            watched.asked_at_s = now_s
        silent_s = now_s - watched.asked_at_s if watched.asked_at_s else 0.0
        stopped_s = now_s - stopped_at_s if stopped_at_s else 0.0
        for finding in watched.stalls.step(Look(now_s, board.look(watched.path), silent_s, stopped_s)):
            self._report(watched, finding)
        limit_s = watched.stalls.limits.interpreter_s
        due = limit_s is not None and now_s - watched.pinged_at_s >= limit_s / _PINGS_PER_LIMIT
        if due and not watched.asked_at_s and not stopped_at_s:
            watched.pinged_at_s = watched.asked_at_s = now_s
            watched.ping_port = self._request(watched, messages.Ping(), lambda _: self._on_pong(watched))

    def _on_pong(self, watched: _Watched) -> None:
        watched.asked_at_s = 0.0

    def _request(self, watched: _Watched, message: messages.Control, answer: Callable[[Buffer], None]) -> int:
        port = next(self._ports)
        self._answers[port] = answer
        self._ask(watched.record.ref, message, port)
        return port

    # --- telling -------------------------------------------------------------------------------------------------

    def _report(self, watched: _Watched, finding: Finding) -> None:
        tell = partial(self._tell_of, watched, finding)
        if finding.kind == "stopped":
            tell("")
        elif finding.kind == "interpreter" or finding.entry is None:
            self._dump(watched, lambda threads: self._tell_of_silence(watched, finding, threads))
        else:
            self._ask_stack(watched, finding.entry, tell)

    def _ask_stack(self, watched: _Watched, entry: board.Entry, tell: Callable[[str], None]) -> None:
        def on_answer(payload: Buffer) -> None:
            timer.cancel()
            answer = messages.decode_control(bytes(payload))
            tell(answer.texts[0] if isinstance(answer, StackTexts) and answer.texts else "")

        def give_up() -> None:
            if self._answers.pop(port, None) is not None:
                self._dump(watched, lambda threads: tell(stacks.told(threads.get(entry.thread, []))))

        port = self._request(watched, Stacks([entry.thread]), on_answer)
        timer = self._loop.call_later(_PATIENCE_S, give_up)

    def _tell_of_silence(self, watched: _Watched, finding: Finding, threads: dict[int, list[stacks.Place]]) -> None:
        entries = board.look(watched.path)
        running = [thread for thread, places in threads.items() if not stacks.waits(places)]
        self._tell_of(watched, blame_holder(finding, entries, running), self._all_text(entries, threads, running))

    def _all_text(self, entries: Sequence[board.Entry], threads: dict[int, list[stacks.Place]], running: Sequence[int]) -> str:
        """Every thread with code of the user's, actors first, and those in front that may hold the interpreter lock."""
        entries = sorted(entries, key=lambda entry: (entry.thread not in running, not entry.since_s))
        names = {entry.thread: entry.display for entry in entries}
        others = [thread for thread in threads if thread not in names]
        parts = [(names.get(thread, "another thread"), stacks.told(threads.get(thread, []))) for thread in (*names, *others)]
        return stacks.join([part for part in parts if part[1]][:_MAX_THREADS])

    def _tell_of(self, watched: _Watched, finding: Finding, stack: str) -> None:
        record, entry, limits = watched.record, finding.entry, watched.stalls.limits
        if record.exited is not None:
            return  # its end is told, and says more
        stalled = Stalled(
            kind=finding.kind,
            actor="" if entry is None else entry.display,
            rank=-1 if entry is None else entry.rank,
            endpoint=finding.endpoint,
            seconds=finding.seconds,
            waiting=0 if entry is None else entry.waiting,
            proc=record.ref.uid,
            pid=record.pid,
            host=self._host,
            limit=limits.text(finding.kind),
            stack=stack,
            killed_in_s=max(0.0, limits.killed_s - finding.seconds) if finding.kind == "stopped" and limits.killed_s is not None else None,
        )
        self._tell(record, stalled)

    # --- dumps ---------------------------------------------------------------------------------------------------

    def _dump(self, watched: _Watched, when_read: Callable[[dict[int, list[stacks.Place]]], None]) -> None:
        """Have all stacks of a proc written, and read them; {} when that can't be had."""
        watched.dumped.append(when_read)
        if len(watched.dumped) > 1:
            return
        pid, number = board.armed(watched.path)
        file = dumps.path_of(watched.path)
        if pid != watched.record.pid or watched.record.stopped_at_s:  # not the zygote's child but a descendant of that
            self._on_dump(watched, "")
            return
        with contextlib.suppress(OSError):
            os.truncate(file, 0)
        self._signal(watched.record.ref.uid, zygote_messages.SignalProc(watched.record.ref.uid, number, "process"))
        self._read_dump(watched, file, 0, self._loop.now_s() + _DUMP_BUDGET_S)

    def _read_dump(self, watched: _Watched, file: str, size: int, until_s: float) -> None:
        """Read the file once it has stopped growing."""
        try:
            grown = os.stat(file).st_size
        except OSError:
            grown = 0
        if (grown and grown == size) or self._loop.now_s() >= until_s:
            with contextlib.suppress(OSError), open(file, encoding="utf-8", errors="replace") as dump:
                self._on_dump(watched, dump.read())
                return
            self._on_dump(watched, "")
        else:
            self._loop.call_later(_DUMP_STEP_S, lambda: self._read_dump(watched, file, grown, until_s))

    def _on_dump(self, watched: _Watched, text: str) -> None:
        threads = stacks.parse_dump(text)
        waiting, watched.dumped = watched.dumped, []
        for when_read in waiting:
            when_read(threads)


def limits_of(spawner: Mapping[str, Any]) -> Limits:
    """The limits as the spawner has them now; this agent may be older than the settings."""

    def duration_s(name: str) -> float | None:
        text = config.spawners_value(spawner, name)
        return None if text is None else nanos(text) / 1e9

    return Limits(
        endpoint_s=duration_s("stall_endpoint_limit"),
        mailbox=config.spawners_value(spawner, "stall_mailbox_limit"),
        interpreter_s=duration_s("stall_interpreter_limit"),
        killed_s=duration_s("proc_stopped_limit"),
    )
