"""Terminals for tests of the debugger: `monarch debug` on a pseudo-terminal, and a bare connection as `nc` makes it.

    with Pty() as screen:
        screen.wait(r"monarch_dbg> ")
        screen.type("list\\r")

Both keep what has been read; `wait` goes on behind the last match, so that an old prompt is not taken for a new one.
"""

from __future__ import annotations

import os
import pty
import re
import select
import socket
import subprocess
import sys
import time
from types import TracebackType
from typing import Self

WAIT_S = 10.0
UP, LEFT = "\x1b[A", "\x1b[D"
_ANSI = re.compile(r"\x1b\[[?0-9;]*[A-Za-z]|\x1b[=>]|\x07")
# A session leader that opens a tty without a controlling one gets it as that, and Ctrl-C with it.
_PROGRAM = "import os, sys; os.open(os.ttyname(0), os.O_RDWR); from monarch.cli import main; main(sys.argv[1:], 'monarch')"


class _Reader:
    """Waits for text."""

    def __init__(self) -> None:
        self._raw = ""
        self._at = 0

    @property
    def text(self) -> str:
        """All that was read, as a screen without cursor movements would show it."""
        return _ANSI.sub("", self._raw).replace("\r\n", "\n").replace("\r", "")

    def fileno(self) -> int:
        raise NotImplementedError

    def read(self) -> str:
        raise NotImplementedError

    def wait(self, pattern: str, timeout: float = WAIT_S) -> re.Match[str]:
        """The next match of `pattern`, behind the one before."""
        deadline = time.monotonic() + timeout
        while not (match := re.compile(pattern).search(self.text, self._at)):
            left = deadline - time.monotonic()
            assert left > 0, f"no {pattern!r} within {timeout:g} s; behind the last match came:\n{self.text[self._at :]}"
            if select.select([self.fileno()], [], [], left)[0]:
                piece = self.read()
                assert piece, f"ended before {pattern!r}; behind the last match came:\n{self.text[self._at :]}"
                self._raw += piece
        self._at = match.end()
        return match

    def wait_end(self, timeout: float = WAIT_S) -> str:
        """All that was read, once there is no more to come."""
        deadline = time.monotonic() + timeout
        while True:
            assert select.select([self.fileno()], [], [], max(0.0, deadline - time.monotonic()))[0], f"goes on:\n{self.text}"
            piece = self.read()
            if not piece:
                return self.text
            self._raw += piece


class Pty(_Reader):
    """`monarch debug` on a pseudo-terminal. Use as a context manager."""

    def __init__(self, *args: str) -> None:
        super().__init__()
        self._fd, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, "debug", *args],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", "INPUTRC": os.devnull, "COLUMNS": "200"},
        )
        os.close(theirs)

    def fileno(self) -> int:
        return self._fd

    def read(self) -> str:
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # EIO: the other end was closed
            return ""
        return data.decode(errors="replace")

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def enter(self, line: str) -> None:
        self.type(line + "\r")

    def exit_status(self) -> int:
        self.wait_end()
        return self.process.wait(WAIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)
        os.close(self._fd)


class Wire(_Reader):
    """A connection to the debug server, as `nc` makes it. Use as a context manager."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        super().__init__()
        self.socket = socket.create_connection((host, port), WAIT_S)

    def fileno(self) -> int:
        return self.socket.fileno()

    def read(self) -> str:
        try:
            return self.socket.recv(65536).decode(errors="replace")
        except ConnectionResetError:
            return ""

    def enter(self, *lines: str) -> None:
        self.socket.sendall("".join(f"{line}\n" for line in lines).encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.socket.close()
