"""`sys.stdout` and `sys.stderr` of a proc: what Python prints leaves in whole lines, each with the mark of its actor.

A subclass of the interpreter's own text stream, so whatever programs do with `sys.stdout` works as before. Before `mark_with`
it is exactly that; the zygote installs it before it imports what the user's program imports, because libraries keep the
stream that they find.

Rules of this file:
    1. The text of each thread is put together apart, so lines of several threads never mix, and leaves when its line ends
       or somebody calls `flush`.
    2. A write to the pipe is small enough to be one piece for the kernel: a subprocess that writes there too tears nothing.
    3. A descriptor that leads elsewhere (the user's `os.dup2`) gets plain text.

Read next: `log_lines.py` for the marks, `logs.py` for who reads the pipe.
"""

from __future__ import annotations

import io
import os
import select
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from monarch._runtime.log_lines import PIECE_BYTES, Writer, closing, opening, pieces

_streams: weakref.WeakSet[CapturedStream] = weakref.WeakSet()


class CapturedStream(io.TextIOWrapper):
    """A text stream over an inherited descriptor. Thread: any."""

    def __init__(self, plain: io.TextIOWrapper) -> None:
        super().__init__(
            plain.buffer,
            encoding=plain.encoding,
            errors=plain.errors,
            line_buffering=True,
        )
        self._fd = plain.fileno()
        self._mark = ""
        self._pipe = 0
        """Inode of the pipe to the host agent; 0: not captured."""
        self._parts: dict[int, str] = {}
        """Unfinished text of each thread."""
        self._openings: dict[tuple[int, Writer], bytes] = {}
        self._writer: Callable[[], Writer | None] = lambda: None
        self._wrote: Callable[[], None] = lambda: None
        self._lock = threading.RLock()
        self._mode = getattr(plain, "mode", "w")
        _streams.add(self)

    @property
    def mode(self) -> str:
        """As that of any `sys.stdout`."""
        return self._mode

    def mark_with(self, mark: str, writer: Callable[[], Writer | None], wrote: Callable[[], None]) -> None:
        """Begin to mark what is written.

        Args:
            writer: who writes, asked on the writing thread.
            wrote: called after each write.
        """
        self._writer, self._wrote = writer, wrote
        self._closing = closing(mark)
        self._pipe = os.fstat(self._fd).st_ino
        self._mark = mark

    def write(self, text: str, /) -> int:
        """Write text; it leaves when its line is complete."""
        if not self._mark:
            return super().write(text)
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if self.closed:
            raise ValueError("I/O operation on closed file.")
        thread = threading.get_ident()
        with self._lock:
            part = self._parts.pop(thread, "")
            end = text.rfind("\n") + 1
            if "\r" in text[end:] or len(part) + len(text) - end >= PIECE_BYTES:  # a progress bar; much without an end
                end = len(text)
            if end:
                self._emit(thread, part + text[:end])
                part = ""
            if end < len(text):
                self._parts[thread] = part + text[end:]
            elif part:
                self._parts[thread] = part
        return len(text)

    def flush(self) -> None:
        """Let the unfinished lines of all threads leave."""
        if self._parts:
            with self._lock:
                for thread in list(self._parts):
                    self._emit(thread, self._parts.pop(thread))
        super().flush()

    def _emit(self, thread: int, text: str) -> None:
        encoded = text.encode(self.encoding, self.errors or "strict")
        self.buffer.flush()  # what the user wrote there came first
        if os.fstat(self._fd).st_ino != self._pipe:
            _write_all(self._fd, encoded)
            return
        writer = self._writer()
        if writer is None:
            _write_all(self._fd, encoded)
        else:
            key = thread, writer
            opened = self._openings.get(key)
            if opened is None:
                if len(self._openings) > 1000:
                    self._openings.clear()
                opened = self._openings[key] = opening(self._mark, thread, writer)
            for piece in pieces(encoded, opened, self._closing):
                _write_all(self._fd, piece)
        self._wrote()

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()
        self._parts = {}  # they are the parent's to write


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # a subprocess has made the pipe, which all share, non-blocking
            select.select((), (fd,), ())


def install() -> None:
    """Put captured streams in the place of `sys.stdout` and `sys.stderr`, where these are the interpreter's own."""
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:
            setattr(sys, name, CapturedStream(stream))


def mark_with(mark: str, writer: Callable[[], Writer | None], wrote: Callable[[], None]) -> None:
    """Begin to mark what this process prints; a stream that somebody has replaced is left alone."""
    for stream in list(_streams):
        stream.mark_with(mark, writer, wrote)


def _after_fork() -> None:
    for stream in list(_streams):
        stream._renew_lock()


os.register_at_fork(after_in_child=_after_fork)
