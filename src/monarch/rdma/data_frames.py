"""What a reader and a host agent's data service say to each other on a connection that has proved the job's secret.

    reader -> service   REQUEST  kind, owner, its nonce, spans;  for a write the bytes of all spans follow
    service -> reader   REPLY    one per write; for a read one with the bytes, or several, until all have come or one is a failure

A read of much is answered by streams: their bytes leave before all of them have been looked at, so another reply follows each, which says
whether they are worth anything.

Requests are answered in order. Nothing names a process id or an address: those the service knows from the owner itself.

Pure: bytes in, bytes out.

Rules of this file:
    1. No count or length of the other end is believed beyond the limits below.

Read next: `data_service.py` and `tcp_transport.py`, the two ends.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from monarch.rdma.errors import BufferGoneError, OwnerGoneError, TransferError, UnreachableError
from monarch.rdma.regions import NONCE_BYTES

MAGIC = b"mrd1"
MAX_SPANS = 256
MAX_SPAN_BYTES = 1 << 30
MAX_UID_BYTES = 255
MAX_TEXT_BYTES = 1024
_REQUEST = struct.Struct(f"<4sBBH{NONCE_BYTES}s")
_SPAN = struct.Struct("<IQQQ")
_REPLY = struct.Struct("<B3xI")
REQUEST_BYTES = _REQUEST.size
REPLY_BYTES = _REPLY.size
MAX_REQUEST_BYTES = REQUEST_BYTES + MAX_UID_BYTES + MAX_SPANS * _SPAN.size


class Verb(IntEnum):
    """What a request asks for."""

    PROBE = 0
    """Whether the owner is there; no spans."""
    READ = 1
    WRITE = 2


class Code(IntEnum):
    """What a reply says."""

    OK = 0
    """Bytes of a read follow, or a write has arrived whole."""
    BUFFER_GONE = 1
    """The text is the number of the buffer."""
    OWNER_GONE = 2
    REFUSED = 3
    """The kernel does not let the service do it."""
    FAILED = 4
    """Anything else; another request may go well."""
    BUSY = 5
    """Too many connections; this one is closed."""
    STREAM = 6
    """Bytes of a read follow, and then a reply without any: they were right, or what went wrong."""


class DataFrameError(ConnectionError):
    """The other end does not keep to the protocol; the connection is of no use any more."""


class WireSpan(NamedTuple):
    """Bytes of a region."""

    slot: int
    generation: int
    offset: int
    nbytes: int


class Head(NamedTuple):
    """The first part of a request, which says how long the second one is."""

    verb: Verb
    nonce: bytes
    uid_bytes: int
    num_spans: int

    @property
    def rest_bytes(self) -> int:
        """Length of the second part."""
        return self.uid_bytes + self.num_spans * _SPAN.size


def encode_request(verb: Verb, uid: str, nonce: bytes, spans: Sequence[WireSpan] = ()) -> bytes:
    """The bytes of a request; ValueError beyond the limits."""
    name = uid.encode()
    if len(name) > MAX_UID_BYTES or len(spans) > MAX_SPANS or any(span.nbytes > MAX_SPAN_BYTES for span in spans):
        raise ValueError(f"a request for {len(spans)} spans of {uid[:80]!r} is beyond the limits of the protocol")
    return b"".join((_REQUEST.pack(MAGIC, verb, len(name), len(spans), nonce), name, *[_SPAN.pack(*span) for span in spans]))


def decode_head(data: bytes | bytearray | memoryview) -> Head:
    """The first `REQUEST_BYTES` of a request; DataFrameError when they are none."""
    magic, verb, uid_bytes, num_spans, nonce = _REQUEST.unpack(data)
    if magic != MAGIC or verb not in Verb._value2member_map_ or num_spans > MAX_SPANS:
        raise DataFrameError("the other end of a data connection does not speak this version of its protocol")
    return Head(Verb(verb), nonce, uid_bytes, num_spans)


def decode_rest(head: Head, data: bytes | bytearray | memoryview) -> tuple[str, list[WireSpan]]:
    """Owner and spans; DataFrameError when they make no sense."""
    try:
        uid = bytes(data[: head.uid_bytes]).decode()
    except UnicodeDecodeError as exc:
        raise DataFrameError("the owner in a request is no text") from exc
    spans = [WireSpan(*parts) for parts in _SPAN.iter_unpack(data[head.uid_bytes :])]
    if any(not 0 < span.nbytes <= MAX_SPAN_BYTES for span in spans):
        raise DataFrameError("a span in a request is empty or too long")
    return uid, spans


def encode_reply(code: Code, length: int) -> bytes:
    """The head of a reply: `length` bytes of data, or of a text, follow."""
    return _REPLY.pack(code, length)


def decode_reply(data: bytes | bytearray | memoryview) -> tuple[Code, int]:
    """Code and length; DataFrameError when it is no reply."""
    code, length = _REPLY.unpack(data)
    if code not in Code._value2member_map_ or (code not in (Code.OK, Code.STREAM) and length > MAX_TEXT_BYTES):
        raise DataFrameError("the other end of a data connection does not speak this version of its protocol")
    return Code(code), length


def encode_failure(failure: TransferError) -> bytes:
    """A whole reply that says what went wrong."""
    if isinstance(failure, BufferGoneError):
        code, text = Code.BUFFER_GONE, failure.what.split()[1]
    elif isinstance(failure, OwnerGoneError):
        code, text = Code.OWNER_GONE, failure.what
    elif isinstance(failure, UnreachableError):
        code, text = Code.REFUSED, failure.what
    else:
        code, text = Code.FAILED, failure.what
    data = text.encode()[:MAX_TEXT_BYTES]
    return encode_reply(code, len(data)) + data


def failure_of(code: Code, text: str) -> TransferError:
    """The error that a reply stands for."""
    if code is Code.BUFFER_GONE and text.isdecimal():
        return BufferGoneError(int(text))
    if code is Code.OWNER_GONE:
        return OwnerGoneError(text)
    if code is Code.REFUSED:
        return UnreachableError(f"the owner's host agent can't serve it: {text}")
    return TransferError(text)
