"""Lines of captured output: cutting a stream into them, who wrote each, and how they are shown.

Pure: bytes go in, lines come out. What Python prints inside an actor is *marked* in the stream, so that the host agent, which
reads it from outside, knows the writer; everything else (C code, subprocesses) belongs to the process as a whole.

    ESC _ m<mark> ; thread ; rank ; name ESC \\   text of that writer, up to the end of the line or the next mark
    ESC _ m<mark> ESC \\                          from here on nobody in particular

A mark is an "application program command": should one ever escape, terminals do not show it. `<mark>` is random for each
process, so no output can be taken for one by accident.

Rules of this file:
    1. No byte is lost or doubled, wherever the stream is cut: what may be the beginning of a mark waits for the rest.
    2. Memory is bounded: of a line at most `KEPT_BYTES` are kept, the rest is counted.
    3. Texts are bytes until they are shown; what is no UTF-8 is shown escaped.

Read next: `logs.py` for who reads, `captured_stream.py` for who writes the marks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

KEPT_BYTES = 1 << 16
"""Of a line; shown raw it is cut here."""
SHOWN_BYTES = 1 << 12
"""Of a line that carries its writer, and of last words."""
PIECE_BYTES = 4096
"""What the kernel writes to a pipe in one piece (PIPE_BUF on Linux): marks must not be torn by other writers."""
_MAX_MARK_BYTES = 512
_MAX_NAME_BYTES = 96
_MAX_UNFINISHED = 64
_CLOSE = b"\x1b\\"


class Writer(NamedTuple):
    """The actor that wrote a line."""

    name: str
    rank: int
    """In its mesh."""


class Line(NamedTuple):
    """One line of output, without its end of line."""

    writer: Writer | None
    """None: not known, the process as a whole."""
    text: bytes
    missing: int
    """Bytes of the line that are not in `text`."""
    shown: int
    """Bytes of `text` that were shown before the line was complete."""
    ended: bool
    """False: the stream ended within the line."""

    def raw(self) -> bytes:
        """What is still to be shown of it, as it was written."""
        mark = b"" if not self.missing else cut_mark(self.missing).encode()
        return self.text[self.shown :] + mark + (b"\n" if self.ended else b"")

    def shortened(self) -> tuple[bytes, int]:
        """The text to show with its writer, and how many bytes of the line are missing from it."""
        text = self.text.removesuffix(b"\r")
        if len(text) <= SHOWN_BYTES:
            return text, self.missing
        end = SHOWN_BYTES
        while end > SHOWN_BYTES - 4 and text[end] & 0xC0 == 0x80:  # not in the middle of a character
            end -= 1
        return text[:end], self.missing + len(text) - end


def cut_mark(missing: int) -> str:
    """What stands for the bytes of a line that are not shown."""
    return f"... [TRUNCATED] {missing} more bytes"


def decoded(text: bytes, missing: int = 0) -> str:
    """A line as text for people."""
    shown = text.decode("utf-8", "backslashreplace")
    return shown + cut_mark(missing) if missing else shown


# --- marks ---------------------------------------------------------------------------------------------------------


def opening(mark: str, thread: int, writer: Writer) -> bytes:
    """What goes before a text of `writer`."""
    name = writer.name.encode("utf-8", "backslashreplace").translate(None, bytes(range(32)) + b"\x7f")[:_MAX_NAME_BYTES]
    return b"\x1b_m%b;%d;%d;%b\x1b\\" % (mark.encode(), thread, writer.rank, name)


def closing(mark: str) -> bytes:
    """What goes behind a text that does not end a line."""
    return b"\x1b_m%b\x1b\\" % mark.encode()


def pieces(text: bytes, opened: bytes, closed: bytes) -> Iterator[bytes]:
    """`text` of one writer as writes that nobody else's output can tear."""
    limit = PIECE_BYTES - len(opened) - len(closed)
    for line in text.splitlines(keepends=True) if text.count(b"\n") > 1 else (text,):
        for start in range(0, len(line), limit):
            part = line[start : start + limit]
            yield b"".join((opened, part) if part.endswith(b"\n") else (opened, part, closed))


def _writer(header: bytes) -> Writer | None:
    _, rank, name = header.split(b";", 3)[1:] if header.count(b";") >= 3 else (b"", b"", b"")
    try:
        return Writer(name.decode("utf-8", "replace"), int(rank)) if name else None
    except ValueError:
        return None


# --- splitting -----------------------------------------------------------------------------------------------------


class _Unfinished:
    """A line that has no end yet."""

    __slots__ = ("kept", "shown", "total")

    def __init__(self) -> None:
        self.kept = bytearray()
        self.total = 0
        self.shown = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = KEPT_BYTES - len(self.kept)
        if room > 0:
            self.kept += data[:room]


class Splitter:
    """Cuts one stream into lines."""

    def __init__(self, mark: str) -> None:
        """Args:
        mark: of the process at the other end; "": its output carries no marks.
        """
        self._open = b"\x1b_m" + mark.encode() if mark else b""
        self._rest = b""
        self._header = b""
        """Of the writer whose text comes; b"": nobody in particular."""
        self._unfinished: dict[bytes, _Unfinished] = {}
        self._writers: dict[bytes, Writer | None] = {b"": None}

    @property
    def has_unshown(self) -> bool:
        """A part of a line is here that `take_unshown` would give."""
        return any(len(line.kept) > line.shown for line in self._unfinished.values())

    def feed(self, data: bytes) -> list[Line]:
        """The lines that `data` completes, in order."""
        lines: list[Line] = []
        if self._rest:
            data = self._rest + data
            self._rest = b""
        start = 0
        if self._open:
            while (at := data.find(b"\x1b_m", start)) >= 0:
                end = self._mark_end(data, at)
                if end == 0:
                    self._rest = data[at:]
                    self._take(data[start:at], lines)
                    return lines
                if end < 0:
                    self._take(data[start : at + 3], lines)
                    start = at + 3
                    continue
                self._take(data[start:at], lines)
                self._header = data[at + len(self._open) : end - len(_CLOSE)]
                start = end
            tail = next((n for n in (2, 1) if data.endswith(b"\x1b_m"[:n], start)), 0)
            if tail:
                self._rest = data[-tail:]
                data = data[:-tail]
        self._take(data[start:] if start else data, lines)
        return lines

    def _mark_end(self, data: bytes, at: int) -> int:
        """Where the mark at `at` ends; 0: that is still to come; -1: it is no mark."""
        head = data[at : at + len(self._open)]
        if head != self._open:
            return 0 if self._open.startswith(head) else -1
        end = data.find(_CLOSE, at + len(self._open), at + _MAX_MARK_BYTES)
        if end >= 0:
            return end + len(_CLOSE)
        return 0 if len(data) - at < _MAX_MARK_BYTES else -1

    def _take(self, data: bytes, lines: list[Line]) -> None:
        if not data:
            return
        first, newline, rest = data.partition(b"\n") if self._header else (b"", b"", data)
        if self._header and newline:
            if not first and b"" in self._unfinished and self._header not in self._unfinished:
                self._header = b""  # a `print()` behind what went past Python's streams ends that line
            lines.append(self._finish(first))
            self._header = b""
        elif self._header:
            rest = first
        *whole, last = rest.split(b"\n")
        lines.extend(map(self._finish, whole))
        if last:
            self._add(last)
        while len(self._unfinished) > _MAX_UNFINISHED:
            lines.append(self._end(next(iter(self._unfinished)), ended=True))

    def _add(self, data: bytes) -> None:
        line = self._unfinished.get(self._header)
        if line is None:
            line = self._unfinished[self._header] = _Unfinished()
        line.add(data)

    def _finish(self, data: bytes) -> Line:
        if self._header in self._unfinished:
            self._add(data)
            return self._end(self._header, ended=True)
        return Line(self._writer(self._header), data[:KEPT_BYTES], max(0, len(data) - KEPT_BYTES), 0, True)

    def _end(self, header: bytes, *, ended: bool) -> Line:
        line = self._unfinished.pop(header)
        return Line(self._writer(header), bytes(line.kept), line.total - len(line.kept), line.shown, ended)

    def _writer(self, header: bytes) -> Writer | None:
        if header not in self._writers:
            if len(self._writers) > 4 * _MAX_UNFINISHED:
                self._writers = {b"": None}
            self._writers[header] = _writer(header)
        return self._writers[header]

    def unfinished(self) -> list[bytes]:
        """The beginnings of lines that have no end yet."""
        return [bytes(line.kept) for line in self._unfinished.values()]

    def take_unshown(self) -> bytes:
        """What is here of lines that have no end yet, once."""
        parts = []
        for line in self._unfinished.values():
            parts.append(bytes(line.kept[line.shown :]))
            line.shown = len(line.kept)
        return b"".join(parts)

    def finish(self) -> list[Line]:
        """The stream has ended: what is left."""
        rest, self._rest = self._rest, b""
        if rest:
            self._add(rest)
        return [self._end(header, ended=False) for header in list(self._unfinished)]
