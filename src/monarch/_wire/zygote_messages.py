"""What the host agent and its zygote say to each other, and how it is framed on their stream socket.

Pure. A frame is a 4-byte little-endian length and a msgpack body.

Rules of this file:
    1. Every message names its proc by `uid`; a pid is information, never a key.
    2. Text of the operating system (environment, paths, arguments) may hold bytes that are not UTF-8; it arrives as it left.

Read next: `_runtime/zygote.py`, which serves the requests.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar, cast

import msgspec


class Command(msgspec.Struct, frozen=True):
    """A program to execute instead of forking the zygote."""

    program: str
    """Path, or a name that is looked up on the child's own PATH."""
    arg0: str | None
    """argv[0]; None means `program`."""
    args: list[str]


class StartProc(msgspec.Struct, frozen=True, tag=True):
    """Start one proc; answered by `Started` or `StartFailed`."""

    uid: str
    spec: bytes
    """Opaque to the zygote: a fork gets it as `Child.spec`, a command as base64 in MONARCH_PROC_SPEC."""
    env: dict[str, str]
    """The whole environment of the child, not an overlay."""
    cwd: str
    sys_path: list[str]
    command: Command | None = None
    """None: fork the zygote."""
    bind: dict[str, str] = {}
    """`proc_bind`: cpunodebind, membind, physcpubind as numactl reads them, cpus as taskset reads it."""
    preload: list[str] = []
    """Modules that the zygote shall have imported before it forks. One that fails to import is a `Note`."""
    outputs: list[str] = []
    """Named pipes that become its stdout and stderr; []: it has those of the zygote."""
    escaped: bool = False
    """Set by `encode` alone: the texts carry escapes for what UTF-8 cannot say."""


class SignalProc(msgspec.Struct, frozen=True, tag=True):
    """Send `signal` to the process group of a proc; without effect once it has ended."""

    uid: str
    signal: int
    to: str = "group"
    """"process": only the proc itself, not what it has started."""


class KillProc(msgspec.Struct, frozen=True, tag=True):
    """SIGKILL a proc and all its descendants, also those in sessions of their own."""

    uid: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Kill every proc with its descendants, then end."""


class Started(msgspec.Struct, frozen=True, tag=True):
    """The proc is set up and enters its code (a fork), or its program has been executed (a command)."""

    uid: str
    pid: int


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The proc never came to its first instruction; no `Exited` follows."""

    uid: str
    reason: str


class Exited(msgspec.Struct, frozen=True, tag=True):
    """The proc was reaped. Sent at once; `Gone` follows when its descendants have ended too."""

    uid: str
    pid: int
    code: int | None
    """Exit status, or None when a signal ended it."""
    signal: int | None
    core_dumped: bool


class Gone(msgspec.Struct, frozen=True, tag=True):
    """Nothing of the proc is left; the last message about it."""

    uid: str
    left: list[int] = []
    """Pids of descendants that did not end within the time for the hunt; a `Note` has told why."""


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """Job control halted the proc (SIGSTOP, SIGTSTP): it is frozen, not dead."""

    uid: str
    pid: int


class Continued(msgspec.Struct, frozen=True, tag=True):
    """SIGCONT woke a stopped proc."""

    uid: str
    pid: int


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """Somebody else has told the zygote to end: it starts no more procs."""


class Note(msgspec.Struct, frozen=True, tag=True):
    """Something a person may want to read in the agent's log; nothing depends on it."""

    text: str


Request: TypeAlias = StartProc | SignalProc | KillProc | Shutdown
News: TypeAlias = Started | StartFailed | Exited | Gone | Stopped | Continued | Note
"""What a zygote tells of its procs."""
Reply: TypeAlias = News | Leaving

_T = TypeVar("_T")
_HEADER = 4
_encoder = msgspec.msgpack.Encoder()
_SURROGATE = re.compile("[\ud800-\udfff]")
# NUL cannot stand in an environment, a path or an argument, so the escape needs no escape of its own.
_ESCAPE = re.compile("\0([0-9a-f]{4})")


def encode(message: Request | Reply) -> bytes:
    """`message` as one frame."""
    try:
        body = _encoder.encode(message)
    except UnicodeEncodeError:
        body = _encoder.encode(_speakable(message))
    return len(body).to_bytes(_HEADER, "little") + body


class FrameReader(Generic[_T]):
    """Messages out of a stream that arrives in any pieces.

    What is not yet asked for stays bytes in one buffer. The zygote needs that: a child that frees a queue of a mesh's worth
    of decoded requests would copy each page of it.
    """

    __slots__ = ("_buffer", "_decoder")

    def __init__(self, decoder: msgspec.msgpack.Decoder[_T]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def push(self, data: bytes) -> None:
        """Take the next piece of the stream."""
        self._buffer += data

    @property
    def has_message(self) -> bool:
        """Whether `pop` has one."""
        return len(self._buffer) >= self._end()

    def pop(self) -> _T:
        """The next message.

        Raises:
            IndexError: none is complete.
            msgspec.DecodeError: the body is not a message of this direction.

        Cost: of this message alone; a bytearray drops its front without moving the rest.
        """
        end = self._end()
        if len(self._buffer) < end:
            raise IndexError("no complete message in the buffer")
        body = self._buffer[_HEADER:end]
        del self._buffer[:end]
        return _restored(self._decoder.decode(body))

    def feed(self, data: bytes) -> list[_T]:
        """Take the next piece of the stream and return the messages that it completed, in order."""
        self.push(data)
        messages = []
        while self.has_message:
            messages.append(self.pop())
        return messages

    def _end(self) -> int:
        """Length of the first frame, as far as it is known."""
        size = int.from_bytes(self._buffer[:_HEADER], "little") if len(self._buffer) >= _HEADER else 0
        return _HEADER + size


def request_reader() -> FrameReader[Request]:
    """The zygote's side of the stream."""
    return FrameReader(msgspec.msgpack.Decoder(Request))


def reply_reader() -> FrameReader[Reply]:
    """The agent's side of the stream."""
    return FrameReader(msgspec.msgpack.Decoder(Reply))


def _speakable(message: Request | Reply) -> Request | Reply:
    if isinstance(message, StartProc):
        return _with_text(message, lambda text: _SURROGATE.sub(lambda hit: f"\0{ord(hit[0]):04x}", text), escaped=True)
    if isinstance(message, StartFailed):
        return msgspec.structs.replace(message, reason=_printable(message.reason))
    if isinstance(message, Note):
        return msgspec.structs.replace(message, text=_printable(message.text))
    return message


def _restored(message: _T) -> _T:
    if isinstance(message, StartProc) and message.escaped:
        return cast(_T, _with_text(message, lambda text: _ESCAPE.sub(lambda hit: chr(int(hit[1], 16)), text), escaped=False))
    return message


def _with_text(start: StartProc, change: Callable[[str], str], *, escaped: bool) -> StartProc:
    command = start.command
    if command is not None:
        arg0 = None if command.arg0 is None else change(command.arg0)
        command = Command(change(command.program), arg0, [change(arg) for arg in command.args])
    return msgspec.structs.replace(
        start,
        env={change(name): change(value) for name, value in start.env.items()},
        cwd=change(start.cwd),
        sys_path=[change(entry) for entry in start.sys_path],
        command=command,
        escaped=escaped,
    )


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
