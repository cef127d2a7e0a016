"""Captured output: the host agent reads what its procs write to stdout and stderr, from outside.

    proc --- named pipe ---> agent --+--> stdout or stderr of the client, as it is      (default)
                                     +--> the client, line by line, with its writer     (`logging_option`)
                                     +--> a file for each process                       (`enable_file_capture`)
                                     '--> the last lines, for the error of a death

A pipe outlives its writer: what a killed process had written is still in it. So nothing here depends on the proc, neither on its
interpreter lock nor on its life.

Rules of this file:
    1. A line goes to the console or to a client, never to both, and never to neither.
    2. Where lines go may be slow or stuck. Then the pipes that lead there are not read: the writer waits, as it would for a
       terminal. Nothing is dropped and no queue grows beyond a bound.
    3. The lines of a pipe keep their order; those of stdout and stderr are as close as two pipes allow.
    4. A death is not told before its pipes were read, and a process is not called gone before they are empty.

Read next: `log_lines.py` for marks and cuts, `console.py` and `log_files.py` for where lines go.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from monarch import config
from monarch._base.ids import ProcRef
from monarch._net.loop import READ, NetLoop
from monarch._runtime import log_files
from monarch._runtime.console import Console
from monarch._runtime.log_lines import Line, Splitter, cut_mark, decoded
from monarch._wire import messages, zygote_messages
from monarch._wire.observation_messages import LogLine, LogLines

DEFAULT_LAST_WORDS = 20
_READ_BYTES = 1 << 16
_READS_PER_TURN = 4
_DRAIN_BYTES = 1 << 20
"""Most to read of a dead process at once; its pipe holds less."""
_WINDOW_BYTES = 1 << 20
_BATCH_BYTES = 1 << 16
_LINE_OVERHEAD_BYTES = 100
_WORDS_BYTES = 400
_MOST_KEPT_LINES = 10_000
_UNFINISHED_S = 0.1
"""How long a line without an end stays unseen; for prompts and progress bars."""
_STUCK_S = 1.0
_DESCRIPTORS_PER_PROC = 4

Send = Callable[[ProcRef, messages.Control], None]


class _Pipe:
    """One output of one process."""

    __slots__ = ("fd", "number", "opened", "path", "proc", "splitter", "timed")

    def __init__(self, proc: _Proc, number: int, path: str, fd: int, mark: str) -> None:
        self.proc = proc
        self.number = number
        self.path = path
        self.fd = fd
        """-1 once it has been read to its end."""
        self.opened = False
        """The process has it."""
        self.splitter = Splitter(mark)
        self.timed = False
        """An unfinished line will be looked at soon."""


class _Client:
    """A process that lines are sent to."""

    __slots__ = ("batch", "batch_bytes", "ref", "under_way_bytes")

    def __init__(self, ref: ProcRef) -> None:
        self.ref = ref
        self.batch: list[LogLine] = []
        self.batch_bytes = 0
        self.under_way_bytes = 0
        """Sent, and not shown yet."""


class _Proc:
    """The output of one process."""

    __slots__ = ("client", "file", "gone", "label", "last", "num_words", "pipes", "progress", "story", "uid", "when_done")

    def __init__(self, ref: ProcRef, spawner: Mapping[str, Any]) -> None:
        self.uid = ref.uid
        self.label = ref.uid.partition("<")[0]
        self.pipes: list[_Pipe] = []
        self.client: _Client | None = None
        """Who gets the lines; None: the console."""
        self.file: log_files.RotatedFile | None = None
        self.num_words = config.spawners_value(spawner, "tail_log_lines") or DEFAULT_LAST_WORDS
        self.last: deque[tuple[bytes, int]] = deque(maxlen=min(_MOST_KEPT_LINES, self.num_words))
        self.gone = False
        """No process of it is left; what is in the pipes is all there will be."""
        self.story = ""
        self.progress = 0
        """Bytes read."""
        self.when_done: Callable[[], None] | None = None


class Logs:
    """The output of all procs of this host. Thread: net loop only."""

    def __init__(self, loop: NetLoop, folder: str, send: Send) -> None:
        """Args:
        folder: a private one, where the pipes get their names.
        send: sends a control message, or drops it when its receiver is gone.
        """
        self._loop = loop
        self._folder = folder
        self._send = send
        self._host = socket.gethostname()
        self._consoles = {number: Console(loop, number, self._resume) for number in (1, 2)}
        self._procs: dict[str, _Proc] = {}
        self._clients: dict[str, _Client] = {}
        self._streamed: dict[str, _Client] = {}
        """Who gets the lines of a process, also after it was started anew."""
        self._paused: set[_Pipe] = set()
        self._run: log_files.RunFolder | None = None
        self._stamp = log_files.Stamp()
        self._num_opened = 0
        self._sending = False

    # --- a process's life ----------------------------------------------------------------------------------------

    def capture(self, ref: ProcRef, start: zygote_messages.StartProc) -> zygote_messages.StartProc:
        """The request to start a process, with pipes for its output; as it was, where there can be none."""
        boot = messages.decode_boot(start.spec)
        proc = _Proc(ref, boot.config)
        mark = secrets.token_hex(4)
        _need_descriptors(_DESCRIPTORS_PER_PROC * (len(self._procs) + 16))
        try:
            for number in (1, 2):
                self._num_opened += 1
                path = os.path.join(self._folder, f"o{self._num_opened}")
                proc.pipes.append(_Pipe(proc, number, path, _open_pipe(path), mark))
        except OSError as exc:
            for pipe in proc.pipes:
                self._close(pipe)
            self.say(f"output of proc {ref.uid!r} is not captured: {exc}")
            return start
        for pipe in proc.pipes:
            self._loop.watch(pipe.fd, READ, lambda _mask, pipe=pipe: self._read(pipe))  # type: ignore[misc]
        proc.client = self._streamed.get(ref.uid)
        self._procs[ref.uid] = proc
        if config.spawners_value(boot.config, "enable_file_capture") or config.spawners_value(boot.config, "force_file_log"):
            self._open_file(proc, boot.config)
        spec = messages.encode(msgspec.structs.replace(boot, log_mark=mark))
        return msgspec.structs.replace(start, spec=spec, outputs=[pipe.path for pipe in proc.pipes])

    def started(self, uid: str) -> None:
        """The process has its pipes, so their names can go."""
        proc = self._procs.get(uid)
        for pipe in proc.pipes if proc is not None else ():
            pipe.opened = True
            with contextlib.suppress(FileNotFoundError):
                os.unlink(pipe.path)

    def last_words(self, uid: str) -> list[str]:
        """The last lines of a process that has just ended; read now, however slow those are that lines go to."""
        proc = self._procs.get(uid)
        if proc is None:
            return []
        self._drain(proc)
        words = [decoded(text, missing) for text, missing in proc.last]
        for pipe in proc.pipes:
            words += [decoded(text[-_WORDS_BYTES:]) for text in pipe.splitter.unfinished()]
        return words[-proc.num_words :]

    def finish(self, uid: str, story: str, when_done: Callable[[], None]) -> None:
        """Nothing of the process is left: call back once its output has gone where it goes, or is stuck.

        Args:
            story: how it ended, for its file.
        """
        proc = self._procs.get(uid)
        if proc is None:
            when_done()
            return
        self.started(uid)
        proc.gone, proc.story, proc.when_done = True, story, when_done
        if all(pipe.fd < 0 for pipe in proc.pipes):
            self._done(proc)
            return
        for pipe in list(proc.pipes):
            self._read(pipe)
        if proc.when_done is not None:
            self._check_stuck(proc)

    def _check_stuck(self, proc: _Proc) -> None:
        before = proc.progress

        def check() -> None:
            if proc.when_done is None:
                return
            if proc.progress == before:
                self._call_back(proc)
            else:
                self._check_stuck(proc)

        self._loop.call_later(_STUCK_S, check)

    def _call_back(self, proc: _Proc) -> None:
        when_done, proc.when_done = proc.when_done, None
        if when_done is not None:
            when_done()

    # --- reading -------------------------------------------------------------------------------------------------

    def _read(self, pipe: _Pipe) -> None:
        """Read what is there, as long as there is room for it."""
        self._paused.discard(pipe)
        for _ in range(_READS_PER_TURN):
            if pipe.fd < 0:
                return
            if self._has_no_room(pipe):
                self._paused.add(pipe)
                return
            if not self._read_once(pipe):
                return
        self._loop.call_soon(self._read, pipe)

    def _read_once(self, pipe: _Pipe) -> bool:
        """False when there is nothing more, for now or for good."""
        try:
            data = os.read(pipe.fd, _READ_BYTES)
        except (BlockingIOError, InterruptedError):
            if pipe.proc.gone:
                self._end(pipe)
            return False
        if not data:
            if pipe.proc.gone or pipe.opened:  # else nobody has opened it yet, and it is no end
                self._end(pipe)
            return False
        pipe.opened = True
        pipe.proc.progress += len(data)
        self._take(pipe, pipe.splitter.feed(data))
        if not pipe.timed and pipe.splitter.has_unshown:
            pipe.timed = True
            self._loop.call_later(_UNFINISHED_S, lambda: self._show_unfinished(pipe))
        return True

    def _has_no_room(self, pipe: _Pipe) -> bool:
        client = pipe.proc.client
        return self._consoles[pipe.number].full if client is None else client.under_way_bytes >= _WINDOW_BYTES

    def _drain(self, proc: _Proc) -> None:
        """Read what a process had written before it ended."""
        for pipe in list(proc.pipes):
            limit = proc.progress + _DRAIN_BYTES
            while pipe.fd >= 0 and proc.progress < limit and self._read_once(pipe):
                continue

    def _end(self, pipe: _Pipe) -> None:
        """All ends of the pipe that anybody writes to are closed."""
        self._close(pipe)
        self._take(pipe, pipe.splitter.finish())
        proc = pipe.proc
        if proc.gone and all(other.fd < 0 for other in proc.pipes):
            self._done(proc)

    def _done(self, proc: _Proc) -> None:
        if self._procs.get(proc.uid) is proc:  # and not one that was started anew
            del self._procs[proc.uid]
        self._send_batches()
        if proc.file is not None:
            self._to_file(proc, f"{self._stamp(time.time())} --- [{proc.label}] {proc.story}\n".encode())
        if proc.file is not None:
            proc.file.close()
        self._call_back(proc)

    def _close(self, pipe: _Pipe) -> None:
        self._paused.discard(pipe)
        self._loop.unwatch(pipe.fd)
        os.close(pipe.fd)
        pipe.fd = -1
        with contextlib.suppress(FileNotFoundError):
            os.unlink(pipe.path)

    def _show_unfinished(self, pipe: _Pipe) -> None:
        pipe.timed = False
        if pipe.proc.client is None:
            self._consoles[pipe.number].write(pipe.splitter.take_unshown())

    def _resume(self) -> None:
        for pipe in list(self._paused):
            self._loop.call_soon(self._read, pipe)

    # --- where lines go ------------------------------------------------------------------------------------------

    def _take(self, pipe: _Pipe, lines: Sequence[Line]) -> None:
        if not lines:
            return
        proc = pipe.proc
        proc.last.extend(
            (line.text[:_WORDS_BYTES], line.missing + max(0, len(line.text) - _WORDS_BYTES)) for line in lines[-proc.num_words :]
        )
        if proc.file is not None:
            self._to_file(proc, self._for_file(pipe, lines))
        client = proc.client
        if client is None:
            self._consoles[pipe.number].write(b"".join([line.raw() for line in lines]))
        else:
            self._to_client(client, pipe, lines)

    def _to_client(self, client: _Client, pipe: _Pipe, lines: Iterable[Line]) -> None:
        for line in lines:
            text, missing = line.shortened()
            name, rank = ("", -1) if line.writer is None else line.writer
            client.batch.append(LogLine(pipe.proc.uid, pipe.number, text, missing, name, rank))
            nbytes = len(text) + _LINE_OVERHEAD_BYTES
            client.batch_bytes += nbytes
            client.under_way_bytes += nbytes
            if client.batch_bytes >= _BATCH_BYTES:
                self._send_batch(client)
        if not self._sending:
            self._sending = True
            self._loop.call_soon(self._send_batches)

    def _send_batches(self) -> None:
        self._sending = False
        for client in self._clients.values():
            self._send_batch(client)

    def _send_batch(self, client: _Client) -> None:
        if client.batch:
            lines, nbytes = client.batch, client.batch_bytes
            client.batch, client.batch_bytes = [], 0
            self._send(client.ref, LogLines(self._host, lines, nbytes))

    def say(self, text: str) -> None:
        """A line of the agent's own, on its stderr."""
        self._consoles[2].write(f"monarch: {text}\n".encode("utf-8", "backslashreplace"))

    # --- files ---------------------------------------------------------------------------------------------------

    def _open_file(self, proc: _Proc, spawner: Mapping[str, Any]) -> None:
        try:
            if self._run is None:
                self._run = log_files.make_run(log_files.base_folder(config.spawners_value(spawner, "log_folder")))
            label, _, random = proc.uid.rstrip(">").partition("<")
            path = os.path.join(self._run.path, f"{label}.{random}{log_files.ENDING}")
            proc.file = log_files.RotatedFile(path, config.spawners_value(spawner, "log_file_max_bytes"))
        except OSError as exc:
            self.say(f"output of proc {proc.uid!r} is not written to a file: {exc}")

    def _for_file(self, pipe: _Pipe, lines: Iterable[Line]) -> bytes:
        stamp, stream = self._stamp(time.time()), ("out", "err")[pipe.number - 1]
        parts = []
        for line in lines:
            who = pipe.proc.label if line.writer is None else f"{line.writer.name} {line.writer.rank}"
            end = cut_mark(line.missing) + "\n" if line.missing else "\n"
            parts.append(b"%b %b [%b] %b%b" % (stamp.encode(), stream.encode(), who.encode(), line.text, end.encode()))
        return b"".join(parts)

    def _to_file(self, proc: _Proc, data: bytes) -> None:
        assert proc.file is not None
        try:
            proc.file.write(data)
        except OSError as exc:
            self.say(f"no more output is written to {proc.file.path}: {exc}")
            with contextlib.suppress(OSError):
                proc.file.close()
            proc.file = None

    # --- clients -------------------------------------------------------------------------------------------------

    def stream(self, uids: Iterable[str], client_ref: ProcRef, *, on: bool) -> None:
        """From now on lines of these procs go to a client, or to the console again; those written before do not."""
        procs = [proc for uid in uids if (proc := self._procs.get(uid)) is not None]
        self._read_all(procs)
        client = self._clients.setdefault(client_ref.uid, _Client(client_ref)) if on else None
        for uid in uids:
            if client is None:
                self._streamed.pop(uid, None)
            else:
                self._streamed[uid] = client
        for proc in procs:
            proc.client = client
        self._resume()

    def flush(self, uids: Iterable[str]) -> None:
        """Send on what these procs have written, as far as there is room for it."""
        self._read_all([proc for uid in uids if (proc := self._procs.get(uid)) is not None])

    def _read_all(self, procs: Iterable[_Proc]) -> None:
        for proc in procs:
            for pipe in list(proc.pipes):
                limit = proc.progress + _DRAIN_BYTES
                while pipe.fd >= 0 and proc.progress < limit and not self._has_no_room(pipe) and self._read_once(pipe):
                    continue
                if pipe.fd >= 0 and proc.client is None:
                    self._show_unfinished(pipe)
        self._send_batches()

    def credit(self, client_ref: ProcRef, nbytes: int) -> None:
        """A client has shown so much."""
        client = self._clients.get(client_ref.uid)
        if client is not None:
            client.under_way_bytes -= nbytes
            if client.under_way_bytes < _WINDOW_BYTES:
                self._resume()

    def release(self, uid: str) -> None:
        """This process will not be started anew."""
        self._streamed.pop(uid, None)

    def forget(self, client_uid: str) -> None:
        """A client is gone: what it would have got goes to the console."""
        client = self._clients.pop(client_uid, None)
        if client is not None:
            self._streamed = {uid: other for uid, other in self._streamed.items() if other is not client}
            for proc in self._procs.values():
                if proc.client is client:
                    proc.client = None
            self._resume()

    # --- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """All procs have ended: give what is left to the consoles, which get some time for it. The loop has ended."""
        for proc in list(self._procs.values()):
            proc.client = None
            self._drain(proc)
            for pipe in proc.pipes:
                if pipe.fd >= 0:
                    os.close(pipe.fd)
                    pipe.fd = -1
                    self._take(pipe, pipe.splitter.finish())
            if proc.file is not None:
                proc.file.close()
        for console in self._consoles.values():
            console.close(_STUCK_S)
        if self._run is not None:
            os.close(self._run.lock_fd)


def _open_pipe(path: str) -> int:
    os.mkfifo(path, 0o600)
    try:
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        os.unlink(path)
        raise


def _need_descriptors(number: int) -> None:
    """See to it that this process may have so many, if that is allowed at all."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and number > soft:
        with contextlib.suppress(OSError, ValueError):
            wanted = 2 * number
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
