"""Debug sessions as the client sees them: what pdb printed, who looks at it, and lines on their way to it.

A session is one message (or thread) of one actor that has reached a breakpoint. The debugger itself runs in the actor's
process (`remote_pdb.py`); it writes here, and waits here for the next line.

Rules of this file:
    1. Everything runs on the debug controller's loop. No locks.
    2. Several terminals may be attached to one session: all see everything, and the first line that comes is the answer.
    3. A terminal is asked for a line only while pdb waits for one and everything before has been shown. So what was typed
       ahead, or piped in, meets the prompts it was meant for.
    4. A session that has ended says why to whoever is attached.

Read next: `debug_service.py` for the owner.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from monarch.actor.debug_command import Ranks, RanksType
from monarch.actor.debug_io import END, DebugIO

DETACH = ("detach", END)
SETTLE_S = 0.2
"""How long a command of pdb that only looks at something may take; what takes longer is a program that runs."""
_MOST_REPEATED = 4096
"""Pieces of output that are shown again to who attaches; the oldest go first."""


@dataclass(frozen=True)
class DebuggerWrite:
    """Text of a debugger or for one, and where the debugger stands."""

    payload: bytes
    function: str | None
    lineno: int | None


@dataclass(frozen=True, order=False)
class DebugSessionInfo:
    """A session as `list` shows it; ordered by actor and rank."""

    actor_name: str
    rank: int
    coords: dict[str, int]
    hostname: str
    function: str | None
    """`<module>.<function>`; None until the debugger has written for the first time, like `lineno`."""
    lineno: int | None
    running: bool = field(default=False, compare=False)
    """It was let go on, and has not stopped again: it is no longer at that line."""

    def __lt__(self, other: DebugSessionInfo) -> bool:
        return (self.actor_name, self.rank) < (other.actor_name, other.rank)


class Origin(NamedTuple):
    """Whose session it is, beyond any name that others may have too."""

    proc: str
    """Uid of the process."""
    mesh: str
    """Uid of the actor mesh."""
    actor: str
    """Text of the actor's uid, as in `actor_id.actor_name`."""
    name: str
    """The mesh's name as given to `spawn`."""
    serial: int
    """Which session of that process."""


class _Onlooker:
    """One attached terminal: what it has not shown yet, and a bell for whatever changes."""

    def __init__(self) -> None:
        self.unseen: list[str] = []
        self.bell = asyncio.Event()


class DebugSession:
    """One session. Thread: the debug controller's loop."""

    def __init__(self, rank: int, coords: dict[str, int], hostname: str, actor_name: str, *, origin: Origin | None = None) -> None:
        self.rank = rank
        self.coords = coords
        self.hostname = hostname
        self.actor_name = actor_name
        self.origin = origin
        self.ended: str | None = None
        """Why there will be no more; None while it goes on."""
        self._function: str | None = None
        self._lineno: int | None = None
        self._since_input: deque[str] = deque(maxlen=_MOST_REPEATED)
        self._lines: asyncio.Queue[bytes] = asyncio.Queue()
        self._rest = b""
        self._asking = asyncio.Event()
        self._obeys = False
        """pdb has taken a line, and has not asked for the next one: it carries out a command, or lets the program run."""
        self._onlookers: set[_Onlooker] = set()

    @property
    def title(self) -> str:
        """`<actor> <rank>`, what `attach` takes."""
        return f"{self.actor_name} {self.rank}"

    def get_info(self) -> DebugSessionInfo:
        """What `list` shows of it."""
        return DebugSessionInfo(self.actor_name, self.rank, self.coords, self.hostname, self._function, self._lineno, self._runs)

    @property
    def _runs(self) -> bool:
        return self._obeys or not self._lines.empty()

    def is_called(self, actor_name: str) -> bool:
        """Whether this is one of its names: the one that `list` shows, or one that is unique in the job."""
        known = {self.actor_name}
        if self.origin is not None:
            known |= {self.origin.actor, self.origin.mesh}
        return actor_name in known

    # --- the debugger's side -------------------------------------------------------------------------------------

    async def debugger_read(self, size: int) -> DebuggerWrite:
        """The next line for pdb, `size` bytes of it at most; the rest is for the next read."""
        if not self._rest:
            self._obeys = False
            if self._lines.empty():
                self._asking.set()
                self._ring()
            try:
                self._rest = await self._lines.get()
            finally:
                self._asking.clear()
            self._since_input.clear()
        line, self._rest = self._rest[:size], self._rest[size:]
        self._obeys = not self._rest
        return DebuggerWrite(line, None, None)

    async def debugger_write(self, write: DebuggerWrite) -> None:
        """Show what pdb printed."""
        if write.function is not None:
            self._function, self._lineno = write.function, write.lineno
        text = write.payload.decode(errors="replace")
        self._since_input.append(text)
        self._show(text)

    def end(self, reason: str) -> None:
        """There will be no more."""
        if self.ended is None:
            self.ended = reason
            self._ring()

    # --- the person's side ---------------------------------------------------------------------------------------

    async def attach(self, debug_io: DebugIO, line: str | None = None, suppress_output: bool = False) -> None:
        """Let `debug_io` talk to pdb until it detaches or the session ends.

        Args:
            line: send only this, and return at once.
            suppress_output: say nothing around it.

        Raises:
            DebugIOError: the terminal has gone; the session goes on.
        """
        if line is not None:
            self.send(line)
            return
        if not suppress_output:
            await debug_io.output(f"Attached to debug session for {self.title} ({self.hostname})\n")
            if self._runs and not await self.wait_asking(SETTLE_S) and self.ended is None:
                way_back = "" if debug_io.interrupted is None else "; Ctrl-C detaches"
                await debug_io.output(f"{self.title} runs; its prompt comes when it stops at a breakpoint{way_back}\n")
        onlooker = _Onlooker()
        if self._since_input:
            onlooker.unseen = [f"<last pdb output for {self.title} follows>\n", *self._since_input]
        self._onlookers.add(onlooker)
        try:
            await self._converse(debug_io, onlooker)
        finally:
            self._onlookers.discard(onlooker)
        if self.ended is not None:
            await debug_io.output(f"\nDebug session for {self.title} has ended: {self.ended}\n")
        if not suppress_output:
            await debug_io.output(f"Detached from debug session for {self.title} ({self.hostname})\n")

    async def detach(self) -> None:
        """Send every terminal that is attached back to its own prompt; pdb goes on waiting."""
        onlookers, self._onlookers = self._onlookers, set()
        for onlooker in onlookers:
            onlooker.bell.set()

    def send(self, line: str) -> None:
        """Queue a line for pdb."""
        self._asking.clear()
        self._lines.put_nowait(f"{line}\n".encode())
        self._ring()

    async def wait_asking(self, timeout_s: float) -> bool:
        """Whether pdb waits for a line, or soon does."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._asking.wait(), timeout_s)
        return self._asking.is_set()

    async def _converse(self, debug_io: DebugIO, onlooker: _Onlooker) -> None:
        interrupted = debug_io.interrupted
        if interrupted is not None:
            interrupted.clear()
        while onlooker in self._onlookers:
            onlooker.bell.clear()
            unseen, onlooker.unseen = onlooker.unseen, []
            for text in unseen:
                await debug_io.output(text)
            if onlooker.unseen:
                continue
            if self.ended is not None:
                return
            if interrupted is not None and interrupted.is_set():
                interrupted.clear()
                if not self._asking.is_set():  # else there is nothing to come back from
                    return
            line = await self._line_or_news(debug_io, onlooker)
            if line in DETACH:
                return
            if line is not None:
                self._echo(line, onlooker)
                self.send(line)

    async def _line_or_news(self, debug_io: DebugIO, onlooker: _Onlooker) -> str | None:
        """What the person typed at pdb's prompt; None as soon as there is something else to look at."""
        loop = asyncio.get_running_loop()
        asked = loop.create_task(debug_io.input()) if self._asking.is_set() else None
        news: list[asyncio.Task[object]] = [loop.create_task(onlooker.bell.wait())]
        if debug_io.interrupted is not None:
            news.append(loop.create_task(debug_io.interrupted.wait()))
        waiting: list[asyncio.Task[object]] = [*news] if asked is None else [asked, *news]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
        if asked is None:
            return None
        try:
            return await asked
        except asyncio.CancelledError:
            return None

    def _echo(self, line: str, onlooker: _Onlooker) -> None:
        for other in self._onlookers - {onlooker}:
            other.unseen.append(f"{line}\n")

    def _show(self, text: str) -> None:
        for onlooker in self._onlookers:
            onlooker.unseen.append(text)
            onlooker.bell.set()

    def _ring(self) -> None:
        for onlooker in self._onlookers:
            onlooker.bell.set()


class DebugSessions:
    """The sessions that are open, by actor and rank."""

    def __init__(self) -> None:
        self._by_actor: dict[str, dict[int, DebugSession]] = {}
        self._holders: dict[str, tuple[str, int]] = {}

    def insert(self, session: DebugSession) -> None:
        """Add a session; ValueError when there is one of that actor and rank."""
        ranks = self._by_actor.setdefault(session.actor_name, {})
        if session.rank in ranks:
            raise ValueError(f"Debug session for rank {session.rank} already exists for actor {session.actor_name}")
        ranks[session.rank] = session

    def get(self, actor_name: str, rank: int) -> DebugSession:
        """The session of that actor and rank; ValueError when there is none."""
        ranks = self._by_actor.get(actor_name) or {session.rank: session for session in self.iter((actor_name, None))}
        if not ranks:
            known = ", ".join(sorted(self._by_actor)) or "none"
            raise ValueError(f"No debug sessions for actor {actor_name}; actors with sessions: {known}")
        if rank not in ranks:
            known = ", ".join(map(str, sorted(ranks)))
            raise ValueError(f"No debug session for rank {rank} for actor {actor_name}; its ranks with sessions: {known}")
        return ranks[rank]

    def remove(self, actor_name: str, rank: int) -> DebugSession:
        """Take a session out, and return it; ValueError when there is none."""
        session = self.get(actor_name, rank)
        ranks = self._by_actor[session.actor_name]
        del ranks[rank]
        if not ranks:
            del self._by_actor[session.actor_name]
        return session

    def info(self) -> list[DebugSessionInfo]:
        """What is known of each, by actor and rank."""
        return sorted(session.get_info() for session in self.iter(None))

    def iter(self, selection: tuple[str, RanksType | None] | None) -> Iterator[DebugSession]:
        """The sessions of an actor's ranks; of all of them for `(actor, None)`, of all actors for None.

        A dict selects by coordinates; a session that lacks one of its dimensions is left out.
        """
        everything = [session for ranks in self._by_actor.values() for session in ranks.values()]
        if selection is None:
            yield from everything
            return
        actor_name, wanted = selection
        for session in list(self._by_actor.get(actor_name, {}).values()) or [one for one in everything if one.is_called(actor_name)]:
            if wanted is None or _matches(session, wanted):
                yield session

    def name_for(self, name: str, rank: int, origin: Origin) -> str:
        """A name that no other open session of this rank has: `name`, or `name-2` and so on.

        All ranks of a mesh get the same one as long as some of them are open. A mesh whose ranks clash among themselves
        (slices of it, several threads) gets further names.
        """
        level = 1
        while True:
            found = self._name_of((origin.mesh, level), name)
            if rank not in self._by_actor.get(found, {}):
                return found
            level += 1

    def _name_of(self, holder: tuple[str, int], name: str) -> str:
        held = [known for known, owner in self._holders.items() if owner == holder and known in self._by_actor]
        if held:
            return held[0]
        number = 1
        candidate = name
        while True:
            if candidate not in self._by_actor:
                self._holders[candidate] = holder
                return candidate
            number += 1
            candidate = f"{name}-{number}"

    def __len__(self) -> int:
        return sum(len(ranks) for ranks in self._by_actor.values())

    def __contains__(self, key: tuple[str, int]) -> bool:
        actor_name, rank = key
        return rank in self._by_actor.get(actor_name, {})


def _matches(session: DebugSession, wanted: RanksType) -> bool:
    if isinstance(wanted, dict):
        return all(dim in session.coords and _holds(ranks, session.coords[dim]) for dim, ranks in wanted.items())
    return _holds(wanted, session.rank)


def _holds(ranks: Ranks, rank: int) -> bool:
    return rank in ranks if isinstance(ranks, (range, Sequence)) else rank == ranks
