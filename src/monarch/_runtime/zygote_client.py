"""The agent's zygotes: one per environment that libraries read while they load.

Read next: `zygote.py` for the other end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Callable

from monarch._net.loop import READ, WRITE, NetLoop
from monarch._runtime.interpreter import host_command
from monarch._runtime.launcher import startup_environment
from monarch._wire.zygote_messages import (
    Gone,
    KillProc,
    Leaving,
    News,
    Request,
    Shutdown,
    SignalProc,
    StartFailed,
    StartProc,
    encode,
    reply_reader,
)

_READ_BYTES = 1 << 16


class _Zygote:
    """One zygote process and the socket to it."""

    def __init__(self, sock: socket.socket, pid: int, process: subprocess.Popen[bytes] | None) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.pid = pid
        self.process = process
        self.uids: set[str] = set()
        """Procs that it was asked to start and that are not gone."""
        self.inbox = reply_reader()
        self.outbox = bytearray()


class Zygotes:
    """Starts procs through the zygote that fits. Thread: net loop only."""

    def __init__(self, loop: NetLoop, entry: str, on_news: Callable[[News], None], on_lost: Callable[[list[str]], None]) -> None:
        """Args:
        entry: module that a zygote loads before it forks.
        on_lost: told the uids of the procs that died with their zygote; what they had started may still live.
        """
        self._loop = loop
        self._entry = entry
        self._on_news = on_news
        self._on_lost = on_lost
        self._all: set[_Zygote] = set()
        self._by_key: dict[frozenset[tuple[str, str]], _Zygote] = {}
        """Those that start procs."""
        self._by_uid: dict[str, _Zygote] = {}
        self._when_ended: Callable[[], None] | None = None

    def adopt(self, sock: socket.socket, pid: int) -> None:
        """Use the zygote that was forked from the agent itself, with the agent's environment."""
        self._add(startup_environment(os.environ), _Zygote(sock, pid, None))

    def start(self, request: StartProc) -> None:
        """Start a proc; a zygote is started first when none fits."""
        zygote = self._fitting(request)
        zygote.uids.add(request.uid)
        self._by_uid[request.uid] = zygote
        self._send(zygote, request)

    def send(self, uid: str, request: KillProc | SignalProc) -> None:
        """Send a request about a started proc; dropped when its zygote is gone, and the proc with it."""
        zygote = self._by_uid.get(uid)
        if zygote is not None:
            self._send(zygote, request)

    def wake(self) -> None:
        """Let stopped zygotes (SIGSTOP) go on: who waits for the end of their procs would wait for them."""
        for zygote in list(self._all):
            _signal(zygote, signal.SIGCONT)

    def shut_down(self, when_ended: Callable[[], None]) -> None:
        """End every zygote with its procs, then call back."""
        self._when_ended = when_ended
        for zygote in list(self._all):
            self._send(zygote, Shutdown())
            # By signal too: the message waits behind those to start procs, and a stopped zygote would let everybody wait.
            _signal(zygote, signal.SIGTERM)
            _signal(zygote, signal.SIGCONT)
        self._check_ended()

    def close(self) -> None:
        """Drop the sockets (a zygote that still lives ends by that) and reap."""
        for zygote in list(self._all):
            zygote.sock.close()
            _signal(zygote, signal.SIGKILL)  # it had its time; a stopped one (SIGSTOP) would never see its socket close
            self._reap(zygote)

    def kill_silent(self, uid: str) -> None:
        """The zygote of this proc does not answer: kill it, and with it its procs."""
        zygote = self._by_uid.get(uid)
        if zygote is not None:
            _signal(zygote, signal.SIGKILL)

    def _fitting(self, request: StartProc) -> _Zygote:
        if request.command is not None and self._by_key:
            return next(iter(self._by_key.values()))
        key = startup_environment(request.env)
        zygote = self._by_key.get(key)
        if zygote is None:
            zygote = self._launch(request.env)
            self._add(key, zygote)
        return zygote

    def _launch(self, env: dict[str, str]) -> _Zygote:
        ours, theirs = socket.socketpair()
        with theirs:
            command = host_command("zygote", str(theirs.fileno()), self._entry)
            process = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        return _Zygote(ours, process.pid, process)

    def _add(self, key: frozenset[tuple[str, str]], zygote: _Zygote) -> None:
        self._all.add(zygote)
        self._by_key[key] = zygote
        self._loop.watch(zygote.sock.fileno(), READ, lambda mask: self._on_ready(zygote, mask))

    def _send(self, zygote: _Zygote, request: Request) -> None:
        zygote.outbox += encode(request)
        self._flush(zygote)

    def _flush(self, zygote: _Zygote) -> None:
        if zygote.sock.fileno() < 0:
            return
        try:
            while zygote.outbox:
                del zygote.outbox[: zygote.sock.send(zygote.outbox)]
        except (BlockingIOError, InterruptedError):
            pass  # the loop calls again when there is room
        except OSError:
            zygote.outbox.clear()  # it is gone; the read side tells who went with it
            return
        mask = READ | WRITE if zygote.outbox else READ
        self._loop.watch(zygote.sock.fileno(), mask, lambda mask: self._on_ready(zygote, mask))

    def _on_ready(self, zygote: _Zygote, mask: int) -> None:
        if mask & WRITE:
            self._flush(zygote)
        while zygote.sock.fileno() >= 0:  # until it has nothing more: the loop tells of news only
            try:
                data = zygote.sock.recv(_READ_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data = b""
            if data:
                self._take(zygote, data)
            else:
                self._lost(zygote)

    def _take(self, zygote: _Zygote, data: bytes) -> None:
        for reply in zygote.inbox.feed(data):
            if isinstance(reply, Leaving):
                self._retire(zygote)
                continue
            if isinstance(reply, Gone | StartFailed):
                zygote.uids.discard(reply.uid)
                self._by_uid.pop(reply.uid, None)
            self._on_news(reply)

    def _lost(self, zygote: _Zygote) -> None:
        self._loop.unwatch(zygote.sock.fileno())
        zygote.sock.close()
        self._retire(zygote)
        self._all.discard(zygote)
        self._reap(zygote)
        for uid in zygote.uids:
            self._by_uid.pop(uid, None)
        self._on_lost(sorted(zygote.uids))
        self._check_ended()

    def _retire(self, zygote: _Zygote) -> None:
        self._by_key = {key: other for key, other in self._by_key.items() if other is not zygote}

    def _check_ended(self) -> None:
        if self._when_ended is not None and not self._all:
            self._when_ended()

    def _reap(self, zygote: _Zygote) -> None:
        try:
            if zygote.process is not None:
                zygote.process.wait(timeout=5)
            else:
                os.waitpid(zygote.pid, 0)
        except (ChildProcessError, subprocess.TimeoutExpired):
            return


def _signal(zygote: _Zygote, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(zygote.pid, number)  # our child, and not reaped yet
