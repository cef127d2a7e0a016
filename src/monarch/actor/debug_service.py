"""The debug controller: the actor in the client that knows all debug sessions and serves the terminals.

    actor's process                        client's process                       terminals
      remote_pdb: pdb  -- debugger_read -->  DebugController  <-- debug_server --   monarch debug, nc
                       -- debugger_write ->    DebugSessions                        as many as want to

It is a controller of the job (`get_or_spawn_controller("debug_controller", DebugController)`), made at the first
breakpoint, and listens from then on.

Rules of this file:
    1. A session ends with its message, its actor or its process, whichever is first. A process's end is heard from the
       runtime, the others from the debugger itself.
    2. What goes wrong with one terminal or one command is said there, and hurts no other.

Read next: `debug_session.py` for one session, `debugger.py` for the way here.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import os
import sys
from typing import assert_never

from monarch._runtime.debug_jobs import DEFAULT_PORT, publish_debug_job, withdraw_debug_job
from monarch._runtime.platform import SYSTEM
from monarch._wire.messages import ProcExited
from monarch.actor.base import Actor
from monarch.actor.debug_command import HELP, Attach, Cast, Command, Continue, DebugCommand, Help, ListCommand, Quit
from monarch.actor.debug_io import END, DebugCliIO, DebugIO, DebugIOError, DebugStdIO
from monarch.actor.debug_server import DebugServer
from monarch.actor.debug_session import SETTLE_S, DebuggerWrite, DebugSession, DebugSessionInfo, DebugSessions, Origin
from monarch.actor.debugger import debug_controller as debug_controller
from monarch.actor.endpoint import concurrent_endpoint, endpoint
from monarch.actor.process import this_process

BANNER = """\
************************ MONARCH DEBUGGER ************************
Enter 'help' for a list of commands.
Enter 'list' to show all active breakpoints.
"""
PROMPT = "monarch_dbg> "
_ASK_S = 1.0
"""How long `continue` waits for a debugger that is about to stop."""
_FAREWELL_S = 1.0
_RUNS = "(runs)"
_COLUMNS = ("actor", "rank", "coords", "hostname", "function", "line")


class DebugController(Actor):
    """Sessions and terminals of one job."""

    _lives_in_client = True

    def __init__(self) -> None:
        self.sessions = DebugSessions()
        self._debug_io: DebugIO = DebugStdIO()
        """Where `list` prints."""
        self._task_lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        """Serves the terminal that has connected last, until that leaves."""
        self._terminals: dict[DebugCliIO, asyncio.Task[None]] = {}
        self._appeared = asyncio.Event()
        self._announced = False
        self._loop = asyncio.get_running_loop()
        self._gate = DebugServer(self._serve_terminal)
        self._process = this_process()
        self._server: asyncio.Future[asyncio.Server] = self._loop.create_task(self._start())
        self._server.add_done_callback(_look_at_error)
        self._process.proc_watchers.append(self._on_proc_gone)

    # --- sessions ------------------------------------------------------------------------------------------------

    @endpoint
    async def list(self, print_output: bool = True) -> builtins.list[DebugSessionInfo]:
        """The sessions, by actor and rank.

        Args:
            print_output: print the table of them, too.
        """
        found = self.sessions.info()
        if print_output:
            await self._debug_io.output(table_of(found))
        return found

    @concurrent_endpoint
    async def wait_pending_session(self) -> None:
        """Return once there is a session."""
        while not len(self.sessions):
            self._appeared.clear()
            await self._appeared.wait()

    @concurrent_endpoint
    async def debugger_session_start(
        self, rank: int, coords: dict[str, int], hostname: str, actor_name: str, origin: Origin | None = None
    ) -> str:
        """Open a session; nothing happens when it is open already.

        Returns:
            The name to use for it: `actor_name`, unless another session has that name and rank (see `Origin`).

        Raises:
            NotImplementedError, ValueError, OSError: the server can't start, so nobody could attach.
        """
        await asyncio.shield(self._server)
        if origin is None:
            if (actor_name, rank) in self.sessions:
                return actor_name
        else:
            known = [session for session in self.sessions.iter(None) if session.origin == origin]
            if known:
                return known[0].actor_name
            actor_name = self.sessions.name_for(actor_name, rank, origin)
        session = DebugSession(rank, coords, hostname, actor_name, origin=origin)
        self.sessions.insert(session)
        self._appeared.set()
        if origin is not None and origin.proc in self._process.proc.fates.gone:
            self._end(session, self._process.proc.fates.gone[origin.proc].reason)
        return actor_name

    @concurrent_endpoint
    async def debugger_session_end(self, actor_name: str, rank: int, reason: str = "its message was handled") -> None:
        """Close a session; harmless when it is closed already."""
        if (actor_name, rank) in self.sessions:
            self._end(self.sessions.get(actor_name, rank), reason)

    @concurrent_endpoint
    async def debugger_read(self, actor_name: str, rank: int, size: int) -> DebuggerWrite | str:
        """The next line that somebody types for a session."""
        return await self.sessions.get(actor_name, rank).debugger_read(size)

    @concurrent_endpoint
    async def debugger_write(self, actor_name: str, rank: int, write: DebuggerWrite) -> None:
        """Show what a session's debugger printed."""
        session = self.sessions.get(actor_name, rank)
        await session.debugger_write(write)
        if not self._announced and not self._terminals:
            self._announced = True
            await self._announce(session)

    def _end(self, session: DebugSession, reason: str) -> None:
        self.sessions.remove(session.actor_name, session.rank)
        session.end(reason)

    def _on_proc_gone(self, exited: ProcExited) -> None:
        # Net loop. A client that shuts down has closed this actor's loop by now, maybe.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end_of_proc, exited)

    def _end_of_proc(self, exited: ProcExited) -> None:
        for session in builtins.list(self.sessions.iter(None)):
            if session.origin is not None and session.origin.proc == exited.proc.uid:
                self._end(session, f"its process is gone: {exited.reason}")

    # --- the server ----------------------------------------------------------------------------------------------

    async def _start(self) -> asyncio.Server:
        server = await self._gate.start()
        publish_debug_job(self._run_dir, self._gate.job(server))
        return server

    @property
    def _run_dir(self) -> str:
        return os.path.dirname(str(SYSTEM.file_of(self._process.proc.ref.address)))

    async def _announce(self, session: DebugSession) -> None:
        # Nobody may be there to see a prompt: without this line the script would seem to hang.
        job = self._gate.job(await self._server)
        info = session.get_info()
        place = f" ({info.function}:{info.lineno} on {info.hostname})" if info.function else f" (on {info.hostname})"
        port = "" if job.port == DEFAULT_PORT else f" --port {job.port}"
        print(
            f"monarch: {session.title} waits at a breakpoint{place}; to debug it, in another terminal: monarch debug{port}\n"
            f"monarch: the debug server listens at {job.host}, port {job.port}",
            file=sys.stderr,
            flush=True,
        )

    async def _serve_terminal(self, terminal: DebugCliIO) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._terminals[terminal] = self._task = task
        try:
            await self._enter(terminal)
        finally:
            del self._terminals[terminal]
            if self._task is task:
                self._task = None
            if not self._terminals:
                self._announced = False

    async def __cleanup__(self, exc: Exception | None) -> None:
        """The job ends: terminals are told, and the server goes."""
        self._process.proc_watchers.remove(self._on_proc_gone)
        withdraw_debug_job(self._run_dir)
        self._server.cancel()
        if self._server.done() and not self._server.cancelled() and self._server.exception() is None:
            self._server.result().close()
        for session in builtins.list(self.sessions.iter(None)):
            self._end(session, "the job ends")
        tasks = builtins.list(self._terminals.values())
        for terminal in builtins.list(self._terminals):
            with contextlib.suppress(DebugIOError, TimeoutError):
                await asyncio.wait_for(terminal.output("\nmonarch: the job has ended\n"), _FAREWELL_S)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_FAREWELL_S)

    # --- a terminal ----------------------------------------------------------------------------------------------

    async def _enter(self, debug_io: DebugIO | None = None) -> None:
        """Serve one terminal, or the standard streams, until the person leaves."""
        place = self._debug_io if debug_io is None else debug_io
        try:
            await place.output(BANNER)
            while True:
                line = await place.input(PROMPT)
                if line == END:
                    return
                command = await DebugCommand.parse(place, line)
                if isinstance(command, Quit):
                    return
                if command is not None:
                    await self._run(place, command)
        except DebugIOError:
            return  # it has left, without a word
        finally:
            await place.quit()

    async def _run(self, place: DebugIO, command: Command) -> None:
        try:
            await self._execute(place, command)
        except DebugIOError:
            raise
        except Exception as exc:
            await place.output(f"Error processing command: {exc}\n")

    async def _execute(self, place: DebugIO, command: Command) -> None:
        match command:
            case Attach(actor_name, rank):
                await self.sessions.get(actor_name, rank).attach(place)
            case Cast(actor_name, ranks, line):
                sessions = builtins.list(self.sessions.iter((actor_name, ranks)))
                for session in sessions:
                    await session.attach(place, line, suppress_output=True)
                if not sessions:
                    await place.output(f"no session of {actor_name!r} has these ranks; 'list' shows all\n")
            case ListCommand():
                await asyncio.gather(*(session.wait_asking(SETTLE_S) for session in self.sessions.iter(None)))
                await place.output(table_of(self.sessions.info()))
            case Continue():
                await self._continue_all(place)
            case Help():
                await place.output(HELP)
            case Quit():
                return
            case _:
                assert_never(command)

    async def _continue_all(self, place: DebugIO) -> None:
        sessions = builtins.list(self.sessions.iter(None))
        # One that runs has nothing to continue from, and would skip its next breakpoint.
        asking = await asyncio.gather(*(session.wait_asking(_ASK_S) for session in sessions))
        for session, asks in zip(sessions, asking, strict=True):
            if asks:
                await session.attach(place, "clear", suppress_output=True)
                await session.attach(place, "c", suppress_output=True)
            elif session.ended is None:
                await place.output(f"{session.title} runs\n")


def table_of(sessions: builtins.list[DebugSessionInfo]) -> str:
    """The sessions as a table with a grid; a sentence when there are none."""
    if not sessions:
        return "no actor waits at a breakpoint\n"
    rows = [_COLUMNS, *(_cells(info) for info in sessions)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    rule = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows]
    return "\n".join([rule, lines[0], rule.replace("-", "="), *(part for line in lines[1:] for part in (line, rule))]) + "\n"


def _cells(info: DebugSessionInfo) -> tuple[str, ...]:
    coords = ", ".join(f"{dim}: {index}" for dim, index in info.coords.items())
    function, line = (_RUNS, "") if info.running else (info.function or "", "" if info.lineno is None else str(info.lineno))
    return (info.actor_name, str(info.rank), coords, info.hostname, function, line)


def _look_at_error(server: asyncio.Future[asyncio.Server]) -> None:
    if not server.cancelled():
        server.exception()  # whoever reaches a breakpoint hears of it
