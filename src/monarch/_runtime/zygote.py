"""The zygote: parent of all procs of a host. It forks them, reaps them, and hunts what they leave behind.

One process, one thread, one loop. It sits between the host agent, which decides, and the procs, which run user code:
agent --socket--> zygote --fork--> procs. Single-threaded, because only such a process can be forked safely; apart from
the agent, because the agent has threads; parent of command procs too, so that one process does all the killing.

Rules of this file:
    1. The loop blocks in one `poll` and nowhere else; a slow agent fills a buffer, never stops the loop.
    2. A death is told before anything is done about it: the caller's error waits for `Exited`, only stop() for `Gone`.
    3. A pid is used only while it is unreaped, so no signal ever reaches a stranger.
    4. The zygote's end, by any way, ends its procs: parent-death signal. The agent's end (EOF, and SIGCONT from the kernel)
       ends the zygote, also while it imports.

Read next: `launcher.py` for what happens in the child, `descendants.py` for who belongs to whom.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from enum import Enum, auto
from types import FrameType
from typing import NamedTuple

from monarch._runtime import descendants, heap, launcher
from monarch._wire.zygote_messages import (
    Continued,
    Exited,
    Gone,
    KillProc,
    Leaving,
    Note,
    Reply,
    Shutdown,
    SignalProc,
    Started,
    StartFailed,
    StartProc,
    Stopped,
    encode,
    request_reader,
)

HUNT_S = 5.0
"""Longest time to wait for killed processes to end; only one stuck in the kernel needs more."""

_READ_BYTES = 1 << 18


class Child(NamedTuple):
    """Who a forked process is."""

    uid: str
    spec: bytes


class End(Enum):
    """Why a zygote ended."""

    ASKED = auto()
    """By its agent, or by a signal."""
    AGENT_LOST = auto()
    """The agent ended first: it was killed, perhaps after it had asked, and can't remove its files."""


def run(sock: socket.socket) -> Child | End:
    """Serve the agent at the other end of `sock` until it goes.

    The fork happens in here, so the caller's stack unwinds in a child as in any program, and its interpreter finalises.

    Returns:
        In the zygote its end, when all its procs have ended; in each forked child, who it is.

    Raises:
        RuntimeError: not on Linux.
    """
    if sys.platform != "linux":
        raise RuntimeError(f"a zygote needs Linux, this is {sys.platform}; start procs by a command instead")
    return _Zygote(sock).serve()


class _BrokenOff(BaseException):
    """An import is given up, because the zygote is to end."""


class _Proc:
    """A child from its fork to its reaping."""

    __slots__ = ("failed", "pid", "raw_report", "report", "uid")

    def __init__(self, uid: str, pid: int, report: int) -> None:
        self.uid = uid
        self.pid = pid
        self.report: int | None = report
        """Read end of the pipe on which the child reports; None once it is under way or has failed."""
        self.raw_report = b""
        self.failed = False
        """It reported that it could not start; user code never ran."""


class _Zygote:
    """State of the loop. Thread: the only one of its process."""

    def __init__(self, sock: socket.socket) -> None:
        self._pid = os.getpid()
        self._agent_pid = os.getppid()
        self._sock = sock
        sock.setblocking(False)
        self._inbox = request_reader()
        self._outbox = bytearray()
        self._procs: dict[int, _Proc] = {}
        self._dying: dict[str, float] = {}
        """Procs that are reaped but whose descendants are not: when to give up."""
        self._given_up: set[int] = set()
        self._ends_at: float | None = None
        """Set by Shutdown, SIGTERM or the agent's end: when to leave at the latest."""
        self._end = End.ASKED
        self._failed_preloads: set[str] = set()
        self._importing = False
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._poll.register(self._wake_read, select.POLLIN)
        self._terminators = [signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup it stays ignored, also in the children
            self._terminators.append(signal.SIGHUP)

    def serve(self) -> Child | End:
        """The loop; see `run`."""
        self._prepare_process()
        while not self._is_finished():
            self._wait()
            self._reap()
            self._flush()
            self._hunt()
            child = self._serve_next()
            if child is not None:
                return child
            self._flush()
        with contextlib.suppress(OSError):  # the agent is too slow or gone; it has seen the procs end all the same
            self._sock.settimeout(1.0)
            self._sock.sendall(self._outbox)
        self._let_go()
        return End.AGENT_LOST if os.getppid() != self._agent_pid else self._end

    def _prepare_process(self) -> None:
        descendants.adopt_orphans()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        with contextlib.suppress(AttributeError):  # a stream may be missing, or replaced by something simpler
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        self._take_signals()
        heap.freeze()

    def _take_signals(self) -> None:
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, self._on_child)
        signal.signal(signal.SIGCONT, self._on_continue)
        for number in self._terminators:
            signal.signal(number, self._on_terminator)

    def _is_finished(self) -> bool:
        if self._ends_at is None:
            return False
        return not (self._procs or self._dying) or time.monotonic() >= self._ends_at

    def _wait(self) -> None:
        for fd, events in self._poll.poll(self._timeout_ms()):
            if fd == self._wake_read:
                self._on_signals()
            elif fd == self._sock.fileno():
                if events & ~select.POLLOUT:
                    self._receive()
            else:
                self._read_report(fd)

    def _timeout_ms(self) -> int | None:
        if self._inbox.has_message:
            return 0
        limits = list(self._dying.values()) + ([] if self._ends_at is None else [self._ends_at])
        return max(0, int((min(limits) - time.monotonic()) * 1000) + 1) if limits else None

    def _on_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            numbers = os.read(self._wake_read, 4096)
            if any(number in numbers for number in self._terminators):
                self._leave()

    def _on_child(self, number: int, frame: FrameType | None) -> None:
        """Outside imports the loop does all. An import of torch takes seconds, and a death is not to wait for it."""
        if not self._importing:
            return
        for pid in list(self._procs):  # by pid: a subprocess of the module that is being imported is not ours to reap
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                self._bury(pid)
        self._flush()

    def _on_terminator(self, number: int, frame: FrameType | None) -> None:
        """Outside imports the loop reads of it from the wake-up pipe."""
        if self._importing:
            self._leave()
            raise _BrokenOff

    def _leave(self) -> None:
        if self._ends_at is None:
            self._send(Leaving())
            self._shut_down()

    def _on_continue(self, number: int, frame: FrameType | None) -> None:
        """Outside imports the loop reads the end of the agent's stream."""
        if self._importing and os.getppid() != self._agent_pid:
            self._end = End.AGENT_LOST
            self._shut_down()
            raise _BrokenOff

    def _receive(self) -> None:
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if data:
            self._inbox.push(data)
        else:
            self._on_agent_gone()

    def _on_agent_gone(self) -> None:
        with contextlib.suppress(KeyError):
            self._poll.unregister(self._sock)
        self._outbox.clear()
        self._end = End.AGENT_LOST
        self._shut_down()

    def _send(self, reply: Reply) -> None:
        self._outbox += encode(reply)

    def _flush(self) -> None:
        if not self._outbox:
            return
        try:
            while self._outbox:
                del self._outbox[: self._sock.send(self._outbox)]
            interest = select.POLLIN
        except BlockingIOError:
            interest = select.POLLIN | select.POLLOUT
        except OSError:  # the agent has gone; the loop reads the end of the stream
            self._outbox.clear()
            return
        with contextlib.suppress(FileNotFoundError):  # no longer registered: the agent has gone
            self._poll.modify(self._sock, interest)

    def _serve_next(self) -> Child | None:
        """Serve one request; not all, so that deaths are told between the forks of a large mesh."""
        if not self._inbox.has_message:
            return None
        match self._inbox.pop():
            case StartProc() as start:
                return self._start(start)
            case SignalProc(uid, number, to):
                self._signal(uid, number, _signal_process if to == "process" else _signal_group)
            case KillProc(uid):
                # Its descendants follow when it is reaped: only then do all of them belong to us.
                self._signal(uid, signal.SIGKILL, _signal_group)
            case Shutdown():
                self._shut_down()
        return None

    def _shut_down(self) -> None:
        if self._ends_at is not None:
            return
        self._ends_at = time.monotonic() + HUNT_S + 1.0
        for pid in self._procs:
            _signal_group(pid, signal.SIGKILL)

    def _signal(self, uid: str, number: int, send: Callable[[int, int], None]) -> None:
        proc = self._find(uid)
        if proc is not None:
            send(proc.pid, number)

    def _find(self, uid: str) -> _Proc | None:
        return next((proc for proc in self._procs.values() if proc.uid == uid and not proc.failed), None)

    def _start(self, start: StartProc) -> Child | None:
        if start.command is None and self._ends_at is None:
            self._preload(start)
        if self._ends_at is not None:
            self._send(StartFailed(start.uid, f"proc {start.uid!r} was not started: the host's zygote is shutting down"))
            return None
        if start.uid in self._dying or self._find(start.uid) is not None:
            self._send(StartFailed(start.uid, f"proc {start.uid!r} exists already"))
            return None
        try:
            pid, report = _fork_with_report()
        except OSError as exc:
            self._send(StartFailed(start.uid, f"failed to fork a process for proc {start.uid!r}: {exc.strerror}"))
            return None
        if pid == 0:
            self._let_go()
            launcher.become(start, parent=self._pid, report=report)
            return Child(start.uid, start.spec)
        self._procs[pid] = _Proc(start.uid, pid, report)
        self._poll.register(report, select.POLLIN)
        return None

    def _let_go(self) -> None:
        """Undo what makes this process the zygote: descriptors and signal handlers. In a child, and at the end."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGCONT, *self._terminators):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._sock.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        for proc in self._procs.values():
            if proc.report is not None:
                os.close(proc.report)

    def _preload(self, start: StartProc) -> None:
        names = [name for name in start.preload if name not in sys.modules and name not in self._failed_preloads]
        if not names:
            return
        # What is found must be what the client would import, so look where the client looks.
        path, sys.path[:] = sys.path[:], start.sys_path
        try:
            try:
                self._importing = True
                for name in names:
                    self._import(name)
            finally:
                self._importing = False
        except _BrokenOff:
            return
        finally:
            sys.path[:] = path
            self._take_signals()  # a module may have thought that this process was its own
        if threading.active_count() > 1:
            running = ", ".join(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
            self._send(Note(f"preloading {', '.join(names)} started Python threads, which forks do not have: {running}"))
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError):
                stream.flush()  # or each child would write it once more
        heap.freeze()

    def _import(self, name: str) -> None:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as exc:
            self._failed_preloads.add(name)
            self._send(Note(f"could not preload {name!r}: {type(exc).__name__}: {exc}"))

    def _read_report(self, fd: int) -> None:
        proc = next((proc for proc in self._procs.values() if proc.report == fd), None)
        if proc is not None:
            self._continue_report(proc)

    def _continue_report(self, proc: _Proc) -> None:
        """Read what there is; the end of the stream says that the child is under way, or has failed."""
        if proc.report is None:
            return
        try:
            while data := os.read(proc.report, 4096):
                proc.raw_report += data
        except BlockingIOError:
            return
        self._poll.unregister(proc.report)
        os.close(proc.report)
        proc.report = None
        report = launcher.parse_report(proc.raw_report)
        for note in report.notes:
            self._send(Note(f"proc {proc.uid!r}: {note}"))
        proc.failed = report.failure is not None
        self._send(Started(proc.uid, proc.pid) if report.failure is None else StartFailed(proc.uid, report.failure))

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):  # there are no children at all
            while (info := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                self._bury(info.si_pid)
            while (info := os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)) is not None:
                proc = self._procs.get(info.si_pid)
                if proc is not None:
                    kind = Continued if info.si_code == os.CLD_CONTINUED else Stopped
                    self._send(kind(proc.uid, proc.pid))

    def _bury(self, pid: int) -> None:
        """Reap a child that has ended, a proc or an adopted orphan, and tell of the proc's end."""
        proc = self._procs.get(pid)
        if proc is not None:
            _signal_group(pid, signal.SIGKILL)  # before the reaping, which sets the number free for others
        info = os.waitid(os.P_PID, pid, os.WEXITED)
        self._given_up.discard(pid)
        if proc is None or info is None:
            return
        self._continue_report(proc)  # `Started` comes before `Exited`, however short the life
        del self._procs[pid]
        if proc.failed:
            return
        by_exit = info.si_code == os.CLD_EXITED
        code, number = (info.si_status, None) if by_exit else (None, info.si_status)
        self._send(Exited(proc.uid, pid, code, number, info.si_code == os.CLD_DUMPED))
        self._dying[proc.uid] = time.monotonic() + HUNT_S

    def _hunt(self) -> None:
        """Kill adopted orphans that descend from no living proc; tell when a dead proc has none left.

        One step. A killed orphan's own children become ours in turn, before its death is signalled to us, so each
        SIGCHLD brings the next step until the whole tree is gone.
        """
        if not self._dying:
            return
        uids = {descendants.tag_of(uid): uid for uid in [*(proc.uid for proc in self._procs.values()), *self._dying]}
        quarry: dict[int, str | None] = {}
        for pid in descendants.children_of(self._pid):
            if pid in self._procs or pid in self._given_up:
                continue
            owner = descendants.owner_of(pid, uids)
            if owner is None or owner in self._dying:
                _signal_process(pid, signal.SIGKILL)
                quarry[pid] = owner
        now = time.monotonic()
        for uid, gives_up_at in list(self._dying.items()):
            # One without an owner may be anyone's; everyone waits for it.
            left = [pid for pid, owner in quarry.items() if owner in (None, uid)]
            if not left or now >= gives_up_at:
                self._dismiss(uid, left)

    def _dismiss(self, uid: str, left: list[int]) -> None:
        del self._dying[uid]
        if left:
            self._given_up.update(left)
            self._send(Note(f"descendants of proc {uid!r} did not end within {HUNT_S:g} s after SIGKILL: pids {left}"))
        self._send(Gone(uid, left))


def _fork_with_report() -> tuple[int, int]:
    """Fork, with a pipe from the child to the parent.

    Returns:
        In the child 0 and the pipe's write end, with all signals blocked: one that is sent to the child before it has
        handlers of its own would end up in the zygote's. In the parent the child's pid and the read end, non-blocking.

    Raises:
        OSError: no process or no descriptor is to be had.
    """
    read, write = os.pipe()
    os.set_blocking(read, False)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = _fork()
    except OSError:
        os.close(read)
        os.close(write)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        raise
    if pid == 0:
        os.close(read)
        return 0, write
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.close(write)
    return pid, read


def _fork() -> int:
    if sys.version_info < (3, 12):
        return os.fork()
    with warnings.catch_warnings():
        # It warns of any thread of the process. OpenBLAS has some and prepares them for a fork itself.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _signal_group(pid: int, number: int) -> None:
    """Signal the group that `pid`, an unreaped child, leads."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        _signal_process(pid, number)  # it has not come to its setsid yet
    except PermissionError:
        _signal_process(pid, number)  # the group's only live members changed their user


def _signal_process(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
