"""Where a person debugs: the client's own standard streams, or a terminal that is connected to the debug server.

A terminal is a stream of lines, so `nc` is one. `monarch debug` says at connecting that it wants to be told when a line
is expected of it (`ENQUIRY`), because it edits lines itself; and it sends `INTERRUPT` and `END` for Ctrl-C and Ctrl-D. It
also wants an `END` when the connection is closed on purpose, so that it can tell when the job was killed.

Read next: `debug_server.py` for the connections, `debug_session.py` for what is talked about.
"""

from __future__ import annotations

import asyncio
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable

ENQUIRY = "\x05"
"""Sent to terminals that asked for it: a line is expected now; what stands behind the last newline is its prompt."""
INTERRUPT = "\x03"
"""A line of it: come back from whatever is being waited for."""
END = "\x04"
"""A line of it: leave, as `detach` or `quit` do. Sent to terminals that asked for it: nothing follows, and that is as it should be."""
_HTTP = re.compile(rb"^[A-Z]+ \S+ HTTP/")
_MOST_LINES = 1024
"""Lines that a terminal may be ahead; then it is not read from any more."""


class DebugIOError(Exception):
    """The terminal has gone."""


class DebugIO(ABC):
    """A place to debug from. Thread: that of the debug controller."""

    @property
    def interrupted(self) -> asyncio.Event | None:
        """Set when the person wants back to the prompt; None for places that can't say so."""
        return None

    @abstractmethod
    async def input(self, prompt: str = "") -> str:
        """The next line, without its newline; DebugIOError when there will be none."""

    @abstractmethod
    async def output(self, msg: str) -> None:
        """Show `msg` as it is; DebugIOError when nobody is there."""

    @abstractmethod
    async def quit(self) -> None:
        """The person has left."""


class DebugStdIO(DebugIO):
    """The standard streams of this process."""

    async def input(self, prompt: str = "") -> str:
        try:
            return await asyncio.to_thread(input, prompt)
        except EOFError as exc:
            raise DebugIOError("standard input has ended") from exc

    async def output(self, msg: str) -> None:
        sys.stdout.write(msg)
        sys.stdout.flush()

    async def quit(self) -> None:
        return


class DebugCliIO(DebugIO):
    """A terminal at the other end of a connection.

    Lines are read ahead of their use, so that an interrupt and the end of the connection are noticed at once. What was
    sent before the end is still returned.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue(_MOST_LINES)
        self._interrupted = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None
        self.enquires = False
        """The terminal wants `ENQUIRY`."""
        self.parts = False
        """The terminal wants `END` before its connection is closed on purpose."""

    @property
    def interrupted(self) -> asyncio.Event:
        return self._interrupted

    async def input(self, prompt: str = "") -> str:
        ask = prompt + ENQUIRY if self.enquires else prompt
        if ask:
            await self.output(ask)
        line = await self._next_line()
        if line is None:
            raise DebugIOError("the terminal has closed its connection")
        return line.decode(errors="replace").rstrip("\r\n")

    async def output(self, msg: str) -> None:
        try:
            self._writer.write(msg.encode(errors="replace"))
            await self._writer.drain()
        except (OSError, RuntimeError) as exc:
            raise DebugIOError(f"the terminal is gone: {exc}") from exc

    async def quit(self) -> None:
        """Close the connection."""
        if self._pump is not None:
            self._pump.cancel()
        if self.parts and not self._writer.is_closing():
            self._writer.write(END.encode())
        self._writer.close()

    async def first_line(self, timeout_s: float, wanted: Callable[[bytes], bool]) -> bytes | None:
        """The first line if it is `wanted`; None, and nothing is lost, when another or none comes within `timeout_s`."""
        try:
            line = await asyncio.wait_for(self._next_line(), timeout_s)
        except TimeoutError:
            return None
        if line is not None and wanted(line):
            return line
        rest = [line]
        while not self._lines.empty():
            rest.append(self._lines.get_nowait())
        for one in rest:
            self._lines.put_nowait(one)
        return None

    async def _next_line(self) -> bytes | None:
        if self._pump is None:
            self._pump = asyncio.get_running_loop().create_task(self._read_lines())
        line = await self._lines.get()
        if line is None:
            self._lines.put_nowait(None)  # whoever asks next hears the same
        return line

    async def _read_lines(self) -> None:
        while True:
            try:
                line = await self._reader.readline()
            except (OSError, ValueError):  # ValueError: a line without end
                line = b""
            # A web page of the same user can make a browser connect here, but a browser begins with a request.
            if not line or _HTTP.match(line):
                await self._lines.put(None)
                return
            if line.rstrip() == INTERRUPT.encode():
                self._interrupted.set()
            else:
                await self._lines.put(line)
