"""The debugger in an actor's process: pdb, whose input and output are in the client's hands.

A breakpoint stops the thread that reached it: an actor handles nothing else meanwhile, and an async one's loop stands
still. Other actors of the process run on.

Rules of this file:
    1. A session belongs to one message (more exactly: to one activation on one thread). It ends when the user's code has
       returned from the message; in a task or thread that the user started, with the task, or when it is let go on.
    2. Whoever waits for a line gives up as soon as the actor is to end, so `stop()` never waits for a person.
    3. Frames of the runtime are neither shown nor stopped in.

Read next: `debug_session.py` for the other end; `behavior.py` calls `Debugging` when user code has returned.
"""

from __future__ import annotations

import bdb
import inspect
import io
import itertools
import logging
import pdb
import socket
import sys
import threading
from collections.abc import Callable
from fnmatch import fnmatch
from types import FrameType, TracebackType
from typing import Any

from monarch._runtime.cell import Activation, Cell
from monarch._runtime.faults import ActorError, users_part
from monarch._runtime.future import Future
from monarch.actor import behavior, source_loader
from monarch.actor.context import Instance, context
from monarch.actor.debug_session import DebuggerWrite, Origin
from monarch.actor.debugger import debug_controller

_logger = logging.getLogger("monarch.debugger")
_LOOK_S = 0.25
"""How often a waiting debugger looks whether its actor is to end: a cell has no bell for a thread inside of user code."""
_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")
_SKIP = ("monarch.actor.*", "monarch._*", "asyncio", "asyncio.*", "concurrent.futures.*", "selectors", "threading", "*weakref*")
_serial = itertools.count(1)


class RemoteSession:
    """A session as its debugger sees it. Thread: the one that reached the breakpoint, except `end`."""

    def __init__(self, instance: Instance, activation: Activation, forget: Callable[[], None]) -> None:
        self._cell: Any = activation.cell
        self._instance = instance
        self._forget = forget
        self.pdb: PdbWrapper | None = None
        self.until_continue = False
        """Ends when the debugger lets the program go on, because nothing else tells when to."""
        self._open = True
        point = context().message_rank
        self._rank = point.rank
        name = instance.name if _NAME.issuperset(instance.name) and instance.name else _label_of(instance)
        origin = Origin(instance._process.proc.ref.uid, instance._uid, instance.actor_id.actor_name, instance.name, next(_serial))
        self._controller: Any = debug_controller()
        self._name = self._ask("debugger_session_start", self._rank, dict(point), socket.gethostname(), name, origin)

    def must_end(self) -> bool:
        """The actor, or its process, is on its way out."""
        return is_ending(self._cell, self._instance)

    def read(self, size: int) -> str:
        """The next line that somebody types."""
        slot = getattr(self._cell, "slot", None)
        if slot is not None:
            slot.debug(True)
        try:
            answer = self._ask("debugger_read", self._name, self._rank, size)
        finally:
            if slot is not None:
                slot.debug(False)
        return answer if isinstance(answer, str) else answer.payload.decode(errors="replace")

    def write(self, text: str, function: str | None, lineno: int | None) -> None:
        """Show `text`."""
        self._ask("debugger_write", self._name, self._rank, DebuggerWrite(text.encode(errors="replace"), function, lineno))

    def end(self, reason: str, *, wait: bool = True) -> None:
        """Close it; harmless twice. With `wait`, it is closed when this returns. Thread: any."""
        if not self._open:
            return
        self._open = False
        self._forget()
        if self.must_end():
            reason = "its actor is being stopped"
        try:
            answer = self._controller.debugger_session_end.call_one(self._name, self._rank, reason)
            if wait:
                self._wait(answer)
        except (bdb.BdbQuit, RuntimeError, OSError) as exc:  # the client ends; nobody is left to tell
            _logger.debug("debug session not closed: %s", exc)

    def _ask(self, endpoint: str, *args: Any) -> Any:
        return self._wait(getattr(self._controller, endpoint).call_one(*args))

    def _wait(self, answer: Future[Any]) -> Any:
        bell = threading.Event()
        answer._when_done(bell.set)
        while not bell.wait(_LOOK_S):
            if self.must_end():
                raise bdb.BdbQuit(f"the actor {self._instance} is being stopped")
        try:
            return answer.get()
        except Exception as exc:
            reason = exc.exception if isinstance(exc, ActorError) else exc
            raise bdb.BdbQuit(f"nobody can attach to this breakpoint: {type(reason).__name__}: {reason}") from None


def _label_of(instance: Instance) -> str:
    return instance.actor_id.label or "actor"


class _Stream(io.TextIOBase):
    """Standard input and output of a debugger."""

    def __init__(self, debugger: PdbWrapper, session: RemoteSession) -> None:
        self._debugger = debugger
        self._session = session

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]
        return self._session.read(sys.maxsize if size is None or size < 0 else size)

    def write(self, text: str, /) -> int:
        self._session.write(text, *self._debugger.position())
        return len(text)


class PdbWrapper(pdb.Pdb):
    """pdb for one session. Thread: the session's."""

    def __init__(self, session: RemoteSession, module: str = "") -> None:
        self._session = session
        stream: Any = _Stream(self, session)
        skip = None if any(fnmatch(module, pattern) for pattern in _SKIP) else _SKIP
        super().__init__(stdin=stream, stdout=stream, skip=skip, nosigint=True)

    def position(self) -> tuple[str | None, int | None]:
        """`<module>.<function>` and line of the selected frame; None before the first stop."""
        frame: FrameType | None = getattr(self, "curframe", None)
        if frame is None:
            return None, None
        lineno = self.stack[self.curindex][1] if self.curindex < len(self.stack) else frame.f_lineno
        module = inspect.getmodulename(frame.f_code.co_filename) or frame.f_globals.get("__name__", "?")
        return f"{module}.{frame.f_code.co_name}", lineno

    def set_trace(self, frame: FrameType | None = None, **options: Any) -> None:
        """Stop at `frame`."""
        self._explain_missing_source(frame)
        super().set_trace(frame, **options)

    def post_mortem(self, exc: BaseException) -> None:
        """Look at where `exc` was raised."""
        traceback = users_part(exc.__traceback__)
        if traceback is None:
            return
        self._explain_missing_source(traceback.tb_frame)
        self.message(f"Post-mortem of {type(exc).__name__}: {exc}")
        self.reset()
        self.interaction(None, traceback)

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[list[tuple[FrameType, int]], int]:
        """The stack from the user's outermost frame on."""
        stack, index = super().get_stack(f, t)
        ours = [place for place, (frame, _) in enumerate(stack[:index]) if frame.f_code in _ENTRIES]
        cut = ours[-1] + 1 if ours else 0
        return stack[cut:], index - cut

    def user_exception(self, frame: FrameType, exc_info: Any) -> None:
        """Stop at an exception; not at the end of a coroutine in the frame of the runtime that awaits it."""
        if not (self.skip and self.is_skipped_module(frame.f_globals.get("__name__", ""))):
            super().user_exception(frame, exc_info)

    def set_continue(self) -> None:
        """Let the program go on."""
        super().set_continue()
        if self._session.until_continue and not self.breaks:
            self._session.end("it goes on", wait=False)

    def do_clear(self, arg: str) -> Any:
        """clear [filename:lineno | bpnumber ...]: delete these breakpoints; without argument all, and nobody is asked."""
        if arg:
            return super().do_clear(arg)
        self.clear_all_breaks()
        return None

    do_cl = do_clear

    def do_interact(self, arg: str) -> None:
        """interact: not here, where it would read the process's own standard input."""
        self.error("no interact here; statements and expressions are run at this prompt")

    def let_go(self) -> None:
        """Stop tracing the running thread."""
        if getattr(sys.gettrace(), "__self__", None) is not self:
            return
        sys.settrace(None)
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            frame.f_trace = None
            frame = frame.f_back

    def _explain_missing_source(self, frame: FrameType | None) -> None:
        while frame is not None:
            problem = source_loader.problem_with(frame.f_code.co_filename)
            if problem is not None:
                self.message(f"Failed querying root client host for source code: {problem}")
            frame = frame.f_back


class Debugging:
    """The open sessions of one actor. Thread: any; a session is used by the thread that opened it."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._sessions: dict[tuple[Activation, int], RemoteSession] = {}

    def session(self, frame: FrameType) -> RemoteSession:
        """The session of the running message on this thread, opened now if there is none."""
        activation = self._instance._process.activation()
        key = (activation, threading.get_ident())
        session = self._sessions.get(key)
        if session is None:
            session = RemoteSession(self._instance, activation, lambda: self._forget(key))
            session.pdb = PdbWrapper(session, frame.f_globals.get("__name__", ""))
            self._sessions[key] = session
            if not _inside_behavior(frame):
                _end_with_task_or_thread(session)
        return session

    def _forget(self, key: tuple[Activation, int]) -> None:
        self._sessions.pop(key, None)

    def current(self) -> RemoteSession | None:
        """The session of the running message on this thread, if it has one."""
        return self._sessions.get((self._instance._process.activation(), threading.get_ident()))

    def left(self) -> None:
        """User code has returned."""
        session = self.current()
        if session is not None:
            assert session.pdb is not None
            session.pdb.let_go()
            session.end("its message was handled")

    def raised(self, exc: BaseException) -> None:
        """User code has raised; whoever debugs it may look."""
        session = self.current()
        if session is None:
            return
        assert session.pdb is not None
        session.pdb.let_go()
        if not isinstance(exc, bdb.BdbQuit) and not session.must_end():
            try:
                session.pdb.post_mortem(exc)
            except bdb.BdbQuit as quit_:
                _logger.debug("post-mortem broken off: %s", quit_)
            session.pdb.let_go()
        session.end(f"its message raised {type(exc).__name__}")


def stop_at(frame: FrameType) -> None:
    """Stop the running thread at `frame`, in the session of the running message."""
    instance = context().actor_instance
    if instance._process.root is not None:  # not a worker: the terminal of the script is at hand
        pdb.Pdb().set_trace(frame)
        return
    if is_ending(instance._process.activation().cell, instance):
        _logger.warning("breakpoint passed over, because the actor is being stopped: actor=%s", instance)
        return
    if instance._debugging is None:
        instance._debugging = Debugging(instance)
    session = instance._debugging.session(frame)
    assert session.pdb is not None
    session.pdb.set_trace(frame)


def is_ending(cell: Any, instance: Instance) -> bool:
    """Whether an actor, or its process, is on its way out."""
    if isinstance(cell, Cell):
        return cell.should_end()
    return instance._process.proc.stopping


def current_debugger() -> PdbWrapper | None:
    """The debugger of the running message, if it has reached a breakpoint."""
    debugging = context().actor_instance._debugging
    session = None if debugging is None else debugging.current()
    return None if session is None else session.pdb


_ENTRIES = frozenset(
    function.__code__
    for function in (
        behavior._Behavior._create,
        behavior._Behavior.restore,
        behavior._Behavior._await,
        behavior.SyncBehavior.handle,
        behavior.SyncBehavior.supervise,
        behavior.SyncBehavior.close,
        behavior.AsyncBehavior._run,
        behavior.AsyncBehavior.supervise,
        behavior.AsyncBehavior._close,
    )
)
"""Where the runtime calls user code, and says so when it has returned."""


def _inside_behavior(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code in _ENTRIES:
            return True
        frame = frame.f_back
    return False


class _Farewell:
    """Held by a thread: calls back when the thread has ended."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback

    def __del__(self) -> None:
        self._callback()


_held = threading.local()


def _end_with_task_or_thread(session: RemoteSession) -> None:
    import asyncio

    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    if task is not None:
        task.add_done_callback(lambda _: session.end("its task has ended", wait=False))
        return
    session.until_continue = True
    _held.farewell = _Farewell(lambda: session.end("its thread has ended", wait=False))
