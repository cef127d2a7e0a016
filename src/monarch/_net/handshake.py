"""The handshake: what two processes say before the first frame of a connection between hosts.

    dialer -> acceptor   PREFACE  which process is meant, and whether TLS follows
    acceptor -> dialer   STATUS   whether it takes the connection, and why not, for people
    [TLS 1.3, when the preface says so]
    dialer -> acceptor   NONCE    32 bytes; without TLS right behind the preface
    acceptor -> dialer   NONCE 32 bytes, PROOF 32 bytes
    dialer -> acceptor   PROOF    32 bytes; frames follow at once

Preface and status belong to the host agent, all that follows to the process that is meant. A proof is the HMAC-SHA256, under
the hash of the job's secret, of who proves, both nonces, the target and what TLS agreed on; so it is worth nothing in another
connection, in the other direction, for another target or in another TLS channel.

Pure: bytes in, bytes out; chance comes as an argument.

Rules of this file:
    1. Every machine says how many bytes it `needed()` exactly. Who reads no more leaves the rest of the stream to the next owner.
    2. Nothing that a peer sends raises anything but `HandshakeError`, and no length of a peer is believed beyond the
       `MAX_..._BYTES` below.
    3. A machine is `done` only behind its last check. After an error it takes nothing more.
    4. The text of an error is for people, and holds neither a secret nor a proof.
    5. Magic, place of the version and layout of a status never change, so that any two versions can tell each other apart.

Read next: `secret.py` for where the secret comes from, `tls.py` for the channel and its binding.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple, TypeAlias

from monarch._base.errors import InternalError, explain

Entropy: TypeAlias = Callable[[int], bytes]
"""So many bytes that nobody can guess."""

VERSION = 1
"""Of the handshake and of the frames behind it. Both ends must have the same."""

_MAGIC = b"\x8dmonarch"
_STATUS_MAGIC = b"\x8dstatus:"
_PREFACE = struct.Struct(">8sBBB")
_STATUS = struct.Struct(">8sBBH")
_TLS_FOLLOWS = 1
_SECRET_NEEDED = 1
_NONCE_BYTES = _PROOF_BYTES = 32

MAX_TARGET_BYTES = 255
MAX_TEXT_BYTES = 512
MAX_PREFACE_BYTES = _PREFACE.size + MAX_TARGET_BYTES
MAX_STATUS_BYTES = _STATUS.size + MAX_TEXT_BYTES
MAX_PROOF_BYTES = _NONCE_BYTES + _PROOF_BYTES
"""What the proofs of one end come to, its nonce included."""
MAX_UNPROVEN_BYTES = max(MAX_PREFACE_BYTES, MAX_STATUS_BYTES) + MAX_PROOF_BYTES
"""The most that either end reads, beside TLS itself, before the other one has proved the secret."""

_FOREIGN = (
    ((b"GET ", b"POST", b"HEAD", b"PUT ", b"OPTI", b"DELE", b"PATC", b"CONN", b"TRAC", b"PRI ", b"HTTP"), "it speaks HTTP"),
    ((b"\x16\x03",), "it begins with TLS"),
    ((b"\x15\x03",), "it answers with an alert of TLS"),
    ((b"SSH-",), "it speaks SSH"),
)
_OTHER_PORT = "look whether address and port are those of a monarch worker"
_SAME_VERSION = "install one version of monarch-mesh on all machines"
_SAME_SECRET = "give all machines of the job one MONARCH_SECRET or MONARCH_SECRET_FILE (`monarch secret FILE` makes one)"
_BROKEN = "the bytes were damaged on their way or are not monarch's; look at what is between the machines"


class HandshakeError(ConnectionError):
    """The other end of a connection between hosts is not one that this process may talk to.

    A `ConnectionError`, so whoever handles the loss of a connection handles this; apart, because it is a verdict: trying
    again does not help. A connection that merely ends during the handshake is a plain `ConnectionError`.
    """

    def __init__(self, what: str, *, where: str = "", next: str = "") -> None:
        super().__init__(explain(what, where=where, next=next))
        self.what = what
        self.next = next

    def at(self, where: str) -> HandshakeError:
        """The same error with a place in the user's terms."""
        return HandshakeError(self.what, where=where, next=self.next)


class Preface(NamedTuple):
    """The first thing on a connection."""

    target: str
    """Name of the process that is meant; "" is the host agent itself."""
    tls: bool
    """TLS begins behind the status."""


class StatusCode(IntEnum):
    """What the host agent says to a preface."""

    OK = 0
    """The connection is the target's from here on."""
    REFUSED = 1
    """Wrong version, wrong transport, or a target that nobody knows. Trying again does not help."""
    GONE = 2
    """The target was here and has ended; the text says how."""
    BUSY = 3
    """It can't be reached now: too many connections are in their handshake, say. Trying again later helps."""
    NOBODY = 4
    """From a gateway: nobody listens at the address of the target's host."""


class Status(NamedTuple):
    """The answer to a preface."""

    code: StatusCode
    needs_secret: bool
    """The acceptor has a secret, so the dialer needs the same one."""
    text: str
    """For people; "" when there is nothing to say."""


def encode_preface(preface: Preface) -> bytes:
    """The bytes of a preface.

    Raises:
        ValueError: the target is longer than 255 bytes of UTF-8, or not printable.
    """
    target = preface.target
    if not target.isprintable():
        raise ValueError(explain(f"the target {target!r} of a connection is not printable", next="use the name as its host gave it"))
    data = target.encode()
    if len(data) > MAX_TARGET_BYTES:
        raise ValueError(explain(f"the target {target!r} of a connection has {len(data)} bytes, more than {MAX_TARGET_BYTES}"))
    return _PREFACE.pack(_MAGIC, VERSION, _TLS_FOLLOWS if preface.tls else 0, len(data)) + data


def encode_status(status: Status) -> bytes:
    """The bytes of a status. The text is cut at 512 bytes; what is not printable in it is escaped."""
    shown = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in status.text)
    data = shown.encode()
    if len(data) > MAX_TEXT_BYTES:
        data = data[: MAX_TEXT_BYTES - 3].decode(errors="ignore").encode() + b"..."
    return _STATUS.pack(_STATUS_MAGIC, status.code, _SECRET_NEEDED if status.needs_secret else 0, len(data)) + data


class _Machine:
    """Takes messages of known length, one after the other; `_parts[n]` handles the n-th and says how long the next one is."""

    def __init__(self, first_bytes: int) -> None:
        self._buffer = bytearray()
        self._wanted = first_bytes

    def needed(self) -> int:
        """How many more bytes to read, exactly; 0: nothing more, it is done."""
        return self._wanted - len(self._buffer)

    @property
    def done(self) -> bool:
        """All has come, and was right."""
        return self._wanted == 0

    def _take(self, data: bytes) -> bytes | None:
        """The next message, once it is whole. It stays in the buffer until `_next`, so after an error nothing more fits."""
        if len(data) > self.needed():
            raise InternalError(f"a handshake was fed {len(data)} bytes where it needs {self.needed()}")
        self._buffer += data
        return bytes(self._buffer) if self._wanted and len(self._buffer) == self._wanted else None

    def _next(self, wanted: int) -> None:
        self._buffer.clear()
        self._wanted = wanted


class PrefaceReader(_Machine):
    """Reads a preface; the acceptor's first step.

    Thread: one reader.
    """

    def __init__(self) -> None:
        super().__init__(_PREFACE.size)
        self._tls: bool | None = None
        self._preface: Preface | None = None

    @property
    def preface(self) -> Preface:
        """What was read; InternalError unless `done`."""
        if self._preface is None:
            raise InternalError("a preface was asked for before it was read")
        return self._preface

    def feed(self, data: bytes) -> None:
        """Take at most `needed()` bytes.

        Raises:
            HandshakeError: it is no preface, or one of another version.
        """
        whole = self._take(data)
        if whole is None:
            return
        if self._tls is not None:
            self._finish(self._tls, whole)
            return
        magic, version, flags, length = _PREFACE.unpack(whole)
        _check_magic(magic, _MAGIC)
        if version != VERSION:
            raise HandshakeError(
                f"the other end speaks version {version} of the protocol, this process version {VERSION}", next=_SAME_VERSION
            )
        if flags & ~_TLS_FOLLOWS:
            raise HandshakeError(f"the preface of a connection has unknown flags ({flags:#04x})", next=_SAME_VERSION)
        self._tls = bool(flags)
        if length:
            self._next(length)
        else:
            self._finish(self._tls, b"")

    def _finish(self, tls: bool, target: bytes) -> None:
        self._preface = Preface(_text_of(target, "the target of a connection"), tls)
        self._next(0)


class StatusReader(_Machine):
    """Reads a status; the dialer's first step.

    Thread: one reader.
    """

    def __init__(self) -> None:
        super().__init__(_STATUS.size)
        self._head: tuple[StatusCode, bool] | None = None
        self._status: Status | None = None

    @property
    def status(self) -> Status:
        """What was read; InternalError unless `done`."""
        if self._status is None:
            raise InternalError("a status was asked for before it was read")
        return self._status

    def feed(self, data: bytes) -> None:
        """Take at most `needed()` bytes.

        Raises:
            HandshakeError: it is no status.
        """
        whole = self._take(data)
        if whole is None:
            return
        if self._head is not None:
            self._finish(*self._head, whole)
            return
        magic, number, flags, length = _STATUS.unpack(whole)
        _check_magic(magic, _STATUS_MAGIC)
        if number not in StatusCode._value2member_map_ or flags & ~_SECRET_NEEDED:
            raise HandshakeError(f"the answer to a connection has an unknown code or flag ({number}, {flags:#04x})", next=_SAME_VERSION)
        if length > MAX_TEXT_BYTES:
            raise HandshakeError(f"the answer to a connection has a text of {length} bytes, more than {MAX_TEXT_BYTES}", next=_BROKEN)
        self._head = StatusCode(number), bool(flags)
        if length:
            self._next(length)
        else:
            self._finish(*self._head, b"")

    def _finish(self, code: StatusCode, needs_secret: bool, text: bytes) -> None:
        self._status = Status(code, needs_secret, _text_of(text, "the answer to a connection", allowed="\n"))
        self._next(0)


def check_status(status: Status, secret: bytes) -> None:
    """Whether the dialer may go on: the target takes the connection, and both have a secret or neither.

    Args:
        secret: this process's; b"": it has none.

    Raises:
        HandshakeError: otherwise. The proofs would fail as well; this says so before any TLS.
    """
    if status.code is not StatusCode.OK:
        raise HandshakeError(status.text or f"the other end refuses the connection ({status.code.name})")
    if status.needs_secret and not secret:
        raise _no_secret_here()
    if secret and not status.needs_secret:
        raise _no_secret_there()


class DialerProof(_Machine):
    """The dialer's part of the proofs: `first_bytes()` leave first, then what `feed` returns.

    Thread: one.
    """

    def __init__(self, secret: bytes, target: str, binding: bytes = b"", *, entropy: Entropy = secrets.token_bytes) -> None:
        """
        Args:
            secret: the job's; b"": this process has none, and the acceptor must have none either.
            target: as in the preface.
            binding: what `TlsSocket.binding()` says; b"" without TLS.
        """
        super().__init__(_NONCE_BYTES + _PROOF_BYTES)
        self._secret = secret
        self._context = _context_of(target, binding)
        self._nonce = entropy(_NONCE_BYTES)

    def first_bytes(self) -> bytes:
        """The nonce. Without TLS it may leave together with the preface."""
        return self._nonce

    def feed(self, data: bytes) -> bytes:
        """Take at most `needed()` bytes; what to send now. Frames may follow it at once.

        Raises:
            HandshakeError: the acceptor does not have this process's secret.
        """
        whole = self._take(data)
        if whole is None:
            return b""
        nonce, proof = whole[:_NONCE_BYTES], whole[_NONCE_BYTES:]
        _check_fresh(nonce, self._nonce)
        story = self._nonce + nonce + self._context
        _check_proof(self._secret, b"monarch acceptor", story, proof)
        self._next(0)
        return _proof(self._secret, b"monarch dialer", story)

    def cut(self) -> ConnectionError:
        """The error for a connection that the acceptor ended before it proved anything."""
        return ConnectionResetError(
            explain(
                "the other end closed the connection before it proved the job's secret",
                next="look at the log of the other end; it may have ended, or this took longer than it waits",
            )
        )


class AcceptorProof(_Machine):
    """The acceptor's part of the proofs: what `feed` returns is sent.

    Thread: one.
    """

    def __init__(self, secret: bytes, target: str, binding: bytes = b"", *, entropy: Entropy = secrets.token_bytes) -> None:
        """
        Args:
            secret: the job's; b"": this process has none, and the dialer must have none either.
            target: as in the preface.
            binding: what `TlsSocket.binding()` says; b"" without TLS.
        """
        super().__init__(_NONCE_BYTES)
        self._secret = secret
        self._context = _context_of(target, binding)
        self._nonce = entropy(_NONCE_BYTES)
        self._story: bytes | None = None

    def feed(self, data: bytes) -> bytes:
        """Take at most `needed()` bytes; what to send now.

        Raises:
            HandshakeError: the dialer does not have this process's secret.
        """
        whole = self._take(data)
        if whole is None:
            return b""
        if self._story is None:
            _check_fresh(whole, self._nonce)
            self._story = whole + self._nonce + self._context
            self._next(_PROOF_BYTES)
            return self._nonce + _proof(self._secret, b"monarch acceptor", self._story)
        _check_proof(self._secret, b"monarch dialer", self._story, whole)
        self._next(0)
        return b""

    def cut(self) -> ConnectionError:
        """The error for a connection that the dialer ended before it proved anything."""
        if self._story is None:
            return ConnectionResetError("the other end closed the connection before it said anything")
        return HandshakeError(
            "the other end closed the connection instead of proving the job's secret: it has another one", next=_SAME_SECRET
        )


def _context_of(target: str, binding: bytes) -> bytes:
    """What a proof is about beside the nonces. Lengths in front, so that no two pairs give the same bytes."""
    name = target.encode()
    return struct.pack(">BHH", VERSION, len(name), len(binding)) + name + binding


def _proof(secret: bytes, who: bytes, story: bytes) -> bytes:
    # Hashed before: HMAC fills short keys up with zeros, so a secret of zeros would be the empty one.
    return hmac.digest(hashlib.sha256(secret).digest(), who + story, "sha256")


def _check_proof(secret: bytes, who: bytes, story: bytes, proof: bytes) -> None:
    if hmac.compare_digest(_proof(secret, who, story), proof):
        return
    # Which of the two has none is only for the text. Whoever has none proves it with the empty key, which is no secret.
    if not secret:
        raise _no_secret_here()
    if hmac.compare_digest(_proof(b"", who, story), proof):
        raise _no_secret_there()
    raise HandshakeError("the other end has another secret than this process", next=_SAME_SECRET)


def _check_fresh(theirs: bytes, ours: bytes) -> None:
    if hmac.compare_digest(theirs, ours):
        raise HandshakeError("the other end sent this process's own challenge back", next="look at what is between the machines")


def _no_secret_here() -> HandshakeError:
    return HandshakeError("the other end requires the job's secret, and this process has none", next=_SAME_SECRET)


def _no_secret_there() -> HandshakeError:
    return HandshakeError("this process requires the job's secret, and the other end has none", next=_SAME_SECRET)


def _check_magic(magic: bytes, expected: bytes) -> None:
    if magic == expected:
        return
    spoken = next((what for beginnings, what in _FOREIGN if magic.startswith(beginnings)), f"it begins with {magic!r}")
    raise HandshakeError(f"the other end is not monarch: {spoken}", next=_OTHER_PORT)


def _text_of(data: bytes, what: str, *, allowed: str = "") -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError as exc:
        raise HandshakeError(f"{what} is not UTF-8", next=_BROKEN) from exc
    if not all(c.isprintable() or c in allowed for c in text):
        raise HandshakeError(f"{what} is not printable: {text!r}", next=_BROKEN)
    return text
