"""Platform: what a runtime gets from the machine below it.

`SYSTEM` is the operating system: a net loop with sockets, threads, shared memory, a zygote. `monarch.testing` has
another one, in which a whole cluster lives in one process under a virtual clock. The runtime asks its platform when it
is built, and never again for a message.

Read next: `proc.py` and `host.py`, which are built upon it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from monarch._base.ids import GATEWAY_ONLY, ProcRef, between_hosts, is_proc_name, place_of_client, split_address, split_agent
from monarch._net.loop import NetLoop, Timer
from monarch._net.router import Events, Router, socket_path
from monarch._runtime import board, dumps, mount_notes
from monarch._wire.observation_messages import ActorActivity, Stalled

if TYPE_CHECKING:
    import asyncio
    import socket

    from monarch._net.local import SegmentPool
    from monarch._net.ways import Way
    from monarch._runtime.cell import Cell
    from monarch._runtime.stalls import Limits
    from monarch._wire import zygote_messages
    from monarch._wire.frames import Buffer
    from monarch._wire.messages import Control


class Loop(Protocol):
    """Runs the callbacks of one process, in order. `NetLoop` says which thread may call what."""

    def start(self) -> None:
        """Begin to serve."""

    def run(self) -> None:
        """Serve on this thread until `stop`."""

    def stop(self) -> None:
        """End after the callbacks queued so far."""

    def join(self, timeout_s: float) -> None:
        """Wait for the end."""

    def now_s(self) -> float:
        """The loop's clock, in seconds."""

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> None:
        """Run `callback(*args)` after those already queued."""

    def call_later(self, delay_s: float, callback: Callable[[], Any]) -> Timer:
        """Run `callback()` after `delay_s` seconds."""

    def drive(self, is_done: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Let the network go on until `is_done()`; False: wait in some other way."""

    def kick(self) -> None:
        """Make whoever drives look at its `is_done` again."""

    def leave_seat(self) -> None:
        """What this thread handled was for another one, which may drive next."""

    def watch(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        """Call `handler(events)` whenever `fd` becomes ready."""

    def unwatch(self, fd: int) -> None:
        """Stop watching `fd`."""

    def report(self) -> None:
        """Tell of the exception that is being handled, a defect of monarch."""


class Carrier(Protocol):
    """Lives a cell's life (`Cell.live`), or takes its turns."""

    def start(self) -> None:
        """Begin."""

    def join(self, timeout_s: float) -> None:
        """Wait for the cell's code to return; no-op inside of it."""


class Board(Protocol):
    """Where a process says what its actors do."""

    def arm(self, pid: int, signal: int) -> None:
        """From now on `signal` makes the process dump its stacks; 0: none does."""

    def slot(self, rank: int, display: str, name: str, *, mesh: str = "", thread: int = 0) -> board.Slot | None:
        """A place for one actor; None when there is no room."""

    def give_back(self, slot: board.Slot) -> None:
        """The actor has ended."""

    def rows(self, ref: ProcRef, pid: int, state: str) -> list[ActorActivity]:
        """What this process's own actors are doing."""


class Watch(Protocol):
    """Looks after the processes of a host (`Watcher`)."""

    def add(self, record: Any, limits: Limits) -> None:
        """Look after a process from now to its end."""

    def remove(self, uid: str) -> None:
        """It has closed its link."""

    def silent_s(self, uid: str) -> float:
        """For how long it has owed an answer."""

    def on_answer(self, port: int, payload: Buffer) -> None:
        """It has answered."""


class Output(Protocol):
    """Reads what the processes of a host write to stdout and stderr (`Logs`)."""

    def capture(self, ref: ProcRef, start: zygote_messages.StartProc) -> zygote_messages.StartProc:
        """The request to start a process, so changed that its output is captured."""

    def started(self, uid: str) -> None:
        """The process is under way."""

    def last_words(self, uid: str) -> list[str]:
        """The last lines of one that has just ended."""

    def finish(self, uid: str, story: str, when_done: Callable[[], None]) -> None:
        """Nothing is left of it: call back when its output has gone where it goes."""

    def stream(self, uids: Sequence[str], client_ref: ProcRef, *, on: bool) -> None:
        """Lines of these go to a client, or no longer."""

    def flush(self, uids: Sequence[str]) -> None:
        """Send on what these have written."""

    def credit(self, client_ref: ProcRef, nbytes: int) -> None:
        """A client has shown so much."""

    def release(self, uid: str) -> None:
        """This one will not be started anew."""

    def forget(self, client_uid: str) -> None:
        """A client is gone."""

    def say(self, text: str) -> None:
        """A line of the agent's own."""

    def close(self) -> None:
        """The agent ends."""


class Starter(Protocol):
    """Starts and ends the processes of a host (`Zygotes`)."""

    def adopt(self, sock: socket.socket, pid: int) -> None:
        """Use the zygote `pid` at the other end of `sock`, which runs already."""

    def start(self, request: zygote_messages.StartProc) -> None:
        """Start a process."""

    def send(self, uid: str, request: zygote_messages.KillProc | zygote_messages.SignalProc) -> None:
        """Send a request about a started one; dropped when it is gone."""

    def wake(self) -> None:
        """Let what starts them go on, if somebody has stopped it."""

    def shut_down(self, when_ended: Callable[[], None]) -> None:
        """End all of them, then call back."""

    def kill_silent(self, uid: str) -> None:
        """Nobody answers for this process: end it by other means."""

    def close(self) -> None:
        """Let go of everything, at the agent's end."""


Lost = Callable[[list[str]], None]


class Platform(Protocol):
    """What differs between an operating system and a universe."""

    def new_loop(self, name: str) -> Loop:
        """The loop of a new process."""

    def new_pool(self) -> SegmentPool | None:
        """Shared memory for large buffers; None: they travel through the link."""

    def new_router(self, loop: Loop, own: ProcRef, pool: SegmentPool | None, events: Events, max_frame_bytes: int) -> Router:
        """The routes of a new process."""

    def new_board(self, own: ProcRef, *, watched: bool) -> Board:
        """The board of a new process; `watched`: a host agent reads it."""

    def read_board(self, ref: ProcRef, pid: int, state: str, silent_s: float) -> Sequence[ActorActivity]:
        """What the actors of another process of this host are doing; it has owed an answer for `silent_s`."""

    def new_watcher(
        self,
        loop: Loop,
        ask: Callable[[ProcRef, Control, int], None],
        signal: Callable[[str, zygote_messages.SignalProc], None],
        tell: Callable[[Any, Stalled], None],
    ) -> Watch:
        """Who looks after the processes of a host; see `Watcher`."""

    def new_logs(self, loop: Loop, agent: ProcRef, send: Callable[[ProcRef, Control], None]) -> Output:
        """Who reads what the processes of a host write; see `Logs`."""

    def carrier_of(self, cell: Cell) -> Carrier:
        """What runs an actor's code."""

    def new_actor_loop(self, cell: Cell) -> asyncio.AbstractEventLoop:
        """The event loop of an async actor."""

    def wait_at(self, loop: Loop, gate: Any) -> None:
        """Block until another thread releases `gate`."""

    def new_starter(self, loop: Loop, entry: str, on_reply: Callable[[zygote_messages.News], None], on_lost: Lost) -> Starter:
        """What starts the processes of a host; see `Zygotes`."""

    def is_near(self, ref: ProcRef) -> bool:
        """Whether a process is of this machine, so that it can be reached without its host's agent."""

    def remove_files(self, ref: ProcRef) -> None:
        """Remove what a process that has ended left under its address."""


class ActorThread(threading.Thread):
    """A cell's own thread."""

    def __init__(self, live: Callable[[], None]) -> None:
        super().__init__(target=live, name="monarch-actor-event-loop", daemon=True)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end; no-op on this thread, and before it has started."""
        if self is not threading.current_thread() and self.ident is not None:
            super().join(timeout)


_AGENT_SOCKET = "agent"
CLIENT_SOCKET = "c"
"""In the run directory of a client."""


class OperatingSystem:
    """The platform of every real program."""

    def __init__(self) -> None:
        self._agent = ""
        self._names: set[str] = set()
        self._folder = ""
        self._place = ""
        """Of the client of this host, if others reach it: what the addresses of all its processes begin with."""
        self._run_dir = ""
        self._doors: dict[str, str] = {}

    def settle(self, agent: str, folder: str) -> None:
        """This process belongs to the host of `agent`, whose procs have their socket files in `folder`."""
        self._agent = agent
        self._names = {agent}
        self._folder = folder
        self._place = place_of_client(agent)
        self._run_dir = os.path.dirname(folder) if self._place else ""

    def settle_client(self, place: str, run_dir: str, doors: dict[str, str] | None = None) -> None:
        """This process is a client that others reach at `place`, with its socket files in `run_dir`; "": one that is reached there only.

        Args:
            doors: socket files by which this process, and no other of its host, reaches what is elsewhere.
        """
        self._place = place
        self._run_dir = run_dir
        self._doors = doors or {}

    def add_name(self, agent: str) -> None:
        """Somebody knows the agent of this host by another address, which those of its procs begin with."""
        self._names.add(agent)

    @property
    def folder(self) -> str:
        """Where the files of this host's procs are; "" in a client."""
        return self._folder

    def path_of(self, address: str) -> str | None:
        """The socket file of an address; None: it is of another host.

        A proc of a host that others reach takes any file of another host's for that of another machine, as it is for most of them.
        """
        if self._place:
            return self._path_below_place(address)
        if not between_hosts(self._agent):
            if address == self._agent:
                return os.path.join(self._folder, _AGENT_SOCKET)  # the file at its address may be removed
            return None if between_hosts(address) else socket_path(address)
        agent, name = split_agent(address)
        if agent not in self._names or (name and not is_proc_name(name)):  # the latter: a client that is reached through this host
            return None
        return os.path.join(self._folder, name or _AGENT_SOCKET)

    def _path_below_place(self, address: str) -> str | None:
        """On the host of a client that others reach. Behind a gateway that is a socket file, all other files are of the gateway's host."""
        if address == self._place:
            return os.path.join(self._run_dir, CLIENT_SOCKET)
        name = address.removeprefix(f"{self._place}/")
        if name != address:
            agent, slash, proc = name.partition("/")
            return os.path.join(self._run_dir, f"{agent}.d", proc) if slash else os.path.join(self._run_dir, agent)
        if address in self._doors:
            return self._doors[address]
        return None if between_hosts(address) or self._place.startswith(GATEWAY_ONLY) else socket_path(address)

    def _way(self) -> Way | None:
        """How a process of a client's host leaves it, if the client is behind a gateway."""
        if not self._agent or not split_address(self._place)[1]:
            return None
        from monarch._net.ways import OUTLET, ThroughOutlet

        return ThroughOutlet(os.path.join(self._run_dir, OUTLET))

    def file_of(self, address: str) -> str:
        """The socket file of a process of this host."""
        path = self.path_of(address)
        assert path is not None, address
        return path

    def new_loop(self, name: str) -> NetLoop:
        return NetLoop(name)

    def new_pool(self) -> SegmentPool | None:
        from monarch._net import local

        return local.SegmentPool() if local.available() else None

    def new_router(self, loop: NetLoop, own: ProcRef, pool: SegmentPool | None, events: Events, max_frame_bytes: int) -> Router:
        from monarch._net.net_router import NetRouter

        return NetRouter(loop, own, pool, events, max_frame_bytes, self.path_of, self._way())

    def new_board(self, own: ProcRef, *, watched: bool) -> board.Board:
        return board.Board(self.file_of(own.address) if watched else None)

    def read_board(self, ref: ProcRef, pid: int, state: str, silent_s: float) -> list[ActorActivity]:
        return board.read(ref, self.file_of(ref.address), pid, state, silent_s)

    def new_watcher(
        self,
        loop: NetLoop,
        ask: Callable[[ProcRef, Control, int], None],
        signal: Callable[[str, zygote_messages.SignalProc], None],
        tell: Callable[[Any, Stalled], None],
    ) -> Watch:
        from monarch._runtime.watcher import Watcher

        return Watcher(loop, ask, signal, tell, self.file_of)

    def new_logs(self, loop: NetLoop, agent: ProcRef, send: Callable[[ProcRef, Control], None]) -> Output:
        from monarch._runtime.logs import Logs

        return Logs(loop, self._folder, send)

    def carrier_of(self, cell: Cell) -> ActorThread:
        return ActorThread(cell.live)

    def new_actor_loop(self, cell: Cell) -> asyncio.AbstractEventLoop:
        from monarch._runtime.actor_loop import new_actor_loop

        return new_actor_loop(cell.proc.loop)

    def wait_at(self, loop: Loop, gate: Any) -> None:
        gate.acquire()  # unbounded on purpose: ends by credit, by the loss of the proc, or by Ctrl-C

    def new_starter(self, loop: NetLoop, entry: str, on_reply: Any, on_lost: Lost) -> Starter:
        from monarch._runtime.zygote_client import Zygotes

        return Zygotes(loop, entry, on_reply, on_lost)

    def is_near(self, ref: ProcRef) -> bool:
        return self.path_of(ref.address) is not None

    def remove_files(self, ref: ProcRef) -> None:
        path = self.file_of(ref.address)
        for name in (path, board.path_of(path), dumps.path_of(path)):
            with contextlib.suppress(OSError):
                os.unlink(name)
        notes = mount_notes.note_of(path)
        if os.path.exists(notes):
            threading.Thread(target=mount_notes.tidy, args=(notes,), name="monarch-tidy", daemon=True).start()


SYSTEM: Any = OperatingSystem()
"""Typed `Any`: its loops are `NetLoop`s, and only its own routers and starters ever see them."""
