"""`monarch debug`: a terminal for the debugger of a running job.

On a tty, lines are edited with readline, and a line is asked for when the server says so. What arrives meanwhile (another
terminal's doings, the end of a session) is shown above the line being edited. Otherwise standard input and output are
passed on as they are.

    Ctrl-C   while editing: begin the line anew. While something runs: detach from it; a second time: leave.
    Ctrl-D   at pdb's prompt: detach. At the debugger's own: leave.

Thread: main, besides one that only reads (from the server on a tty, from standard input otherwise).

Read next: `actor/debug_server.py` for the other end.
"""

from __future__ import annotations

import codecs
import os
import signal
import socket
import sys
import threading
from typing import Any

from monarch._base.errors import explain
from monarch._runtime.debug_jobs import DEFAULT_PORT, HOST_VARIABLE, DebugJob, find_debug_jobs, port_wanted

_CONNECT_S = 10.0
_INTERRUPT, _END, _ENQUIRY = "\x03", "\x04", "\x05"  # as in `actor/debug_io.py`, which would load all of monarch
_HOLD_S = 0.1
"""How long a row without end is held back: if it is a prompt, readline writes it."""
_CLEAR_LINE = "\r\x1b[K"
_GREETING = "Enter 'help'"
_ASKS_TOKEN = "token: "
_UNKNOWN_TOKEN = "-"
_WILDCARDS = ("0.0.0.0", "::", "")


def debug_job(host: str | None, port: int | None, token: str | None) -> DebugJob:
    """The job to connect to: the one that was named, or else the only one of this user here.

    Raises:
        ValueError: there are several, which were printed; or the port in the environment is none.
    """
    jobs = find_debug_jobs()
    host = host or os.environ.get(HOST_VARIABLE)
    if port is None:
        port = port_wanted() or None
    if port is None and host is None and len(jobs) > 1:
        for job in jobs:
            print(f"monarch debug --port {job.port}    # pid {job.pid}: {job.command}")
        raise ValueError(f"{len(jobs)} of your jobs can be debugged; choose one with --port")
    for job in jobs:
        if port in (None, job.port) and _is_here(host, job):
            return job._replace(token=token or job.token)
    return DebugJob("127.0.0.1" if host in _WILDCARDS else host or "localhost", port or DEFAULT_PORT, token or "", 0, "")


def _is_here(host: str | None, job: DebugJob) -> bool:
    return host is None or host in (*_WILDCARDS, "localhost", "127.0.0.1", "::1", job.host, socket.gethostname())


def connect(job: DebugJob) -> socket.socket:
    """A connection to the job's debug server.

    Raises:
        OSError: nobody is there.
    """
    try:
        sock = socket.create_connection((job.host, job.port), _CONNECT_S)
    except OSError as exc:
        raise OSError(
            explain(
                f"no debugger answers: {exc.strerror or exc}",
                where=f"{job.host}, port {job.port}",
                next="a job opens its debugger when it reaches its first breakpoint(); name the place with --host and --port",
            )
        ) from exc
    sock.settimeout(None)
    return sock


def run_terminal(job: DebugJob) -> int:
    """Connect standard input and output with the job's debugger, until either side ends it.

    Returns:
        The exit status.

    Raises:
        OSError: nobody is there, it did not let us in, or the job was killed.
    """
    with connect(job) as sock:
        terminal = Terminal(sock, job) if sys.stdin.isatty() and sys.stdout.isatty() else Pipe(sock, job)
        terminal.run()
        if not terminal.greeted:
            said = terminal.received.removeprefix(_ASKS_TOKEN).strip() or "it closed the connection"
            raise ConnectionError(explain(said, where=f"{job.host}, port {job.port}", next="--token, or MONARCH_DEBUG_TOKEN, names it"))
        if terminal.cut_off:
            raise ConnectionError("the job has ended")
    return 0


class _Connection:
    """What both kinds share: sending, and what the server says first."""

    def __init__(self, sock: socket.socket, job: DebugJob) -> None:
        self._sock = sock
        self._job = job
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.greeted = False
        """The server has let us in."""
        self.received = ""
        """What came before that."""
        self._parted = True
        """Whether the server has closed, or will close, on purpose; True too of one that was not asked to say so."""

    @property
    def cut_off(self) -> bool:
        """The connection has ended without a word: the job was killed, or is out of reach."""
        return not self._parted

    def _introduce(self, options: str) -> None:
        self._send(f"token {self._job.token or _UNKNOWN_TOKEN} {options}")
        self._parted = False

    def run(self) -> None:
        """Serve until the connection ends."""
        raise NotImplementedError

    def _send(self, line: str) -> None:
        try:
            self._sock.sendall(f"{line}\n".encode())
        except OSError:  # closed meanwhile; the reader hears of it, too
            return

    def _receive(self) -> str:
        text = ""
        while not text:  # half a character is no text yet
            try:
                data = self._sock.recv(65536)
            except OSError:
                data = b""
            if not data:
                return ""
            text = self._decoder.decode(data)
        if text.endswith(_END) and not self._parted:
            self._parted = True
            text = text.removesuffix(_END)
        if not self.greeted:
            self.received += text
            self.greeted = _GREETING in self.received
        return text


class Pipe(_Connection):
    """Passes standard input and output on."""

    def run(self) -> None:
        if self._job.token:
            self._introduce("part")  # without one, the first line of standard input may be it
        threading.Thread(target=self._forward, name="monarch-debug-stdin", daemon=True).start()
        while text := self._receive():
            sys.stdout.write(text)
            sys.stdout.flush()

    def _forward(self) -> None:
        # Not `sys.stdin`: a daemon thread that holds its lock breaks the end of the interpreter.
        try:
            while data := os.read(0, 65536):
                self._sock.sendall(data)
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            return


class _News(Exception):
    """Something arrived while a line was being edited."""


class Terminal(_Connection):
    """Edits lines on a tty."""

    def __init__(self, sock: socket.socket, job: DebugJob) -> None:
        super().__init__(sock, job)
        self._arrived = ""
        self._closed = False
        self._editing = False
        self._changed = threading.Condition()
        self._row = ""
        """What came behind the last newline: the prompt."""
        self._shown = 0
        """How much of it is on the screen."""
        self._typed = ""
        """A line half edited."""
        self._typed_at = ""
        """The prompt that it was meant for."""
        self._readline = _readline()

    def run(self) -> None:
        self._introduce("enquire part")
        if self._job.pid:
            print(f"pid {self._job.pid}: {self._job.command}")
        signal.signal(signal.SIGUSR1, self._on_news)
        threading.Thread(target=self._read, name="monarch-debug-server", daemon=True).start()
        impatient = False
        while True:
            try:
                asked = self._show_news()
                if asked is None:
                    return
                impatient = False
                if asked:
                    self._edit()
            except KeyboardInterrupt:
                if impatient:
                    raise
                impatient = True
                self._typed = ""
                self._send(_INTERRUPT)

    def _read(self) -> None:
        while text := self._receive():
            self._put(text)
        self._put("", closed=True)

    def _put(self, text: str, *, closed: bool = False) -> None:
        with self._changed:
            self._arrived += text
            self._closed = self._closed or closed
            self._changed.notify()
            if self._editing and (closed or text.strip(_ENQUIRY)):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def _on_news(self, *_: object) -> None:
        if self._editing:
            self._editing = False
            raise _News

    def _show_news(self) -> bool | None:
        """Wait for something and show it. True: a line is expected now; None: the server has closed."""
        with self._changed:
            while not self._arrived and not self._closed:
                if not self._changed.wait(_HOLD_S if self._shown < len(self._row) else None):
                    self._show(self._row)
            text, self._arrived = self._arrived, ""
        if not text:
            self._show(self._row)
            return None
        asked = text.endswith(_ENQUIRY)
        rows, newline, row = (self._row + text.replace(_ENQUIRY, "")).rpartition("\n")
        self._show(rows + newline)
        if newline:
            self._shown = 0
        self._row = row
        return asked or (not self.greeted and row == _ASKS_TOKEN)

    def _show(self, text: str) -> None:
        """Write what is not on the screen yet of the last row and of what came behind it."""
        sys.stdout.write(text[self._shown :])
        sys.stdout.flush()
        self._shown = max(self._shown, len(text))

    def _edit(self) -> None:
        """Let the person edit a line and send it; come back without one when there are news."""
        while True:
            try:
                line = self._input()
            except _News:
                self._typed = self._readline.get_line_buffer() if self._readline else ""
                self._typed_at = self._row
                sys.stdout.write(_CLEAR_LINE)
                self._shown = 0  # what comes next continues the row
                return
            except KeyboardInterrupt:
                sys.stdout.write("\n")
                continue
            except EOFError:
                sys.stdout.write("\n")
                line = _END
            break
        asked_token, self._row, self._shown = self._row == _ASKS_TOKEN and not self.greeted, "", 0
        self._send(f"token {line} enquire part" if asked_token else line)

    def _input(self) -> str:
        typed, self._typed = self._typed if self._row == self._typed_at else "", ""
        if self._readline:
            self._readline.set_startup_hook(lambda: self._readline.insert_text(typed) if typed else None)
        if self._shown:
            sys.stdout.write(_CLEAR_LINE)  # readline writes the prompt itself
            self._shown = 0
        try:
            with self._changed:
                if self._closed or self._arrived.strip(_ENQUIRY):
                    raise _News
                self._editing = True
            return input(self._row)
        finally:
            self._editing = False


def _readline() -> Any:
    try:
        import readline
    except ImportError:  # Python was built without it
        return None
    return readline
