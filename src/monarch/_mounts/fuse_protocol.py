"""The FUSE kernel protocol, 7.23 and later: what the kernel writes into `/dev/fuse`, and what it wants to read there.

Pure: bytes in, values out, and back. All numbers are in the machine's own byte order, structures are laid out as on 64 bits.

Rules of this file:
    1. Whatever is malformed is a `ProtocolError` that says what; never an IndexError or a `struct.error`.
    2. A decoder copies what it returns: the buffer it reads from is used again for the next request.
    3. File data never pass through here: a read is answered by `reply_head`, and the data behind it.
    4. A request that would change anything is known by its opcode alone (`CHANGES`) and never decoded.

Read next: `fuse_negotiation.py` for INIT, `fuse_calls.py` for what each request asks of a file system.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from enum import IntEnum
from functools import partial
from typing import NamedTuple

from monarch._mounts.filesystem import Attr, Entry
from monarch._wire.frames import Buffer


class ProtocolError(ValueError):
    """Bytes that are no request of this protocol."""


class Opcode(IntEnum):
    """What the kernel asks for."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    GETLK = 31
    SETLK = 32
    SETLKW = 33
    ACCESS = 34
    CREATE = 35
    INTERRUPT = 36
    BMAP = 37
    DESTROY = 38
    IOCTL = 39
    POLL = 40
    NOTIFY_REPLY = 41
    BATCH_FORGET = 42
    FALLOCATE = 43
    READDIRPLUS = 44
    RENAME2 = 45
    LSEEK = 46
    COPY_FILE_RANGE = 47
    SETUPMAPPING = 48
    REMOVEMAPPING = 49
    SYNCFS = 50
    TMPFILE = 51
    STATX = 52


CHANGES = frozenset(
    {
        Opcode.SETATTR, Opcode.SYMLINK, Opcode.MKNOD, Opcode.MKDIR, Opcode.UNLINK, Opcode.RMDIR, Opcode.RENAME, Opcode.LINK, Opcode.WRITE,
        Opcode.SETXATTR, Opcode.REMOVEXATTR, Opcode.CREATE, Opcode.FALLOCATE, Opcode.RENAME2, Opcode.COPY_FILE_RANGE, Opcode.TMPFILE,
    }
)  # fmt: skip
"""Requests that a read-only file system refuses."""

HEADER_BYTES = 40
SMALLEST_BUFFER_BYTES = 8192
"""A reader of `/dev/fuse` with less gets EINVAL."""
MOST_NAME_BYTES = 4095

_HEADER = struct.Struct("=IIQQIII")  # four bytes more: the length of extensions, of which none was agreed upon
_U64 = struct.Struct("=Q")
_READ = struct.Struct("=QQI")
_FORGET_ONE = struct.Struct("=QQ")
_U32 = struct.Struct("=I")

_REPLY_HEAD = struct.Struct("=IiQ")
_ATTR = "QQQQQQIIIIIIIIII"
_ENTRY_REPLY = struct.Struct("=IiQ" + "QQQQII" + _ATTR)
_ATTR_REPLY = struct.Struct("=IiQ" + "QII" + _ATTR)
_OPEN_REPLY = struct.Struct("=IiQ" + "QIi")
_STATFS_REPLY = struct.Struct("=IiQ" + "QQQQQIIII24x")
_DIRENT = struct.Struct("=QQII")
_DIRENT_PLUS = struct.Struct("=QQQQII" + _ATTR + "QQII")
_PADDING = [bytes(-size % 8) for size in range(8)]
_MISSING = struct.Struct("=IiQ" + "QQQQII88x")

_INVALIDATE_NODE = 2
_INVALIDATE_ENTRY = 3
_STORE = 4
_NODE_NOTICE = struct.Struct("=IiQ" + "Qqq")
_ENTRY_NOTICE = struct.Struct("=IiQ" + "QII")
_STORE_NOTICE = struct.Struct("=IiQ" + "QQII")

_BLOCK_BYTES = 4096
_U64_MAX = (1 << 64) - 1
_NSEC = 1_000_000_000

# ------------------------------------------------------------------------------------------------------------ requests


class Header(NamedTuple):
    """How every request begins."""

    opcode: int
    """Of `Opcode`, or one that this version does not know."""
    unique: int
    """Number of the request, which its reply carries; 0: it wants none."""
    node: int
    uid: int
    gid: int
    pid: int


_new_header: Callable[[tuple[int, ...]], Header] = partial(tuple.__new__, Header)  # half the time of `Header._make`, for each request


class ReadRequest(NamedTuple):
    """A piece of a file or of a directory."""

    handle: int
    offset: int
    """Bytes; of a directory: where the last piece ended."""
    size: int
    """Most bytes to answer with."""


def decode_header(buffer: Buffer, size: int) -> Header:
    """The header of the request that is the first `size` bytes of `buffer`.

    Raises:
        ProtocolError: `size` is less than a header, or not what the header says.
    """
    if size < HEADER_BYTES:
        raise ProtocolError(f"a request of {size} bytes is shorter than its header of {HEADER_BYTES}")
    fields = _HEADER.unpack_from(buffer)
    if fields[0] != size:
        raise ProtocolError(f"a request of {size} bytes claims to have {fields[0]}")
    return _new_header(fields[1:])


def decode_unique(buffer: Buffer, size: int) -> int:
    """The number of a request that may be malformed; 0 when it has none."""
    return int(_U64.unpack_from(buffer, 8)[0]) if size >= HEADER_BYTES else 0


def decode_name(buffer: Buffer, size: int) -> bytes:
    """The name that a LOOKUP asks for.

    Raises:
        ProtocolError: it is empty, not terminated, too long, or contains a slash.
    """
    name = bytes(buffer[HEADER_BYTES : size - 1])
    if not 0 < len(name) <= MOST_NAME_BYTES or buffer[size - 1] or b"\0" in name or b"/" in name:
        raise ProtocolError(f"{bytes(buffer[HEADER_BYTES : min(size, HEADER_BYTES + 60)])!r} is not the name of a file")
    return name


def decode_read(buffer: Buffer, size: int) -> ReadRequest:
    """What a READ, READDIR or READDIRPLUS asks for."""
    _need(size, _READ.size)
    return ReadRequest(*_READ.unpack_from(buffer, HEADER_BYTES))


def decode_handle(buffer: Buffer, size: int) -> int:
    """The handle that a RELEASE or RELEASEDIR gives back."""
    _need(size, 24)
    return int(_U64.unpack_from(buffer, HEADER_BYTES)[0])


def decode_open_flags(buffer: Buffer, size: int) -> int:
    """The `O_...` flags of an OPEN or OPENDIR."""
    _need(size, 8)
    return int(_U32.unpack_from(buffer, HEADER_BYTES)[0])


def decode_interrupt(buffer: Buffer, size: int) -> int:
    """The number of the request that nobody waits for any longer."""
    _need(size, 8)
    return int(_U64.unpack_from(buffer, HEADER_BYTES)[0])


def decode_forget(header: Header, buffer: Buffer, size: int) -> list[tuple[int, int]]:
    """Nodes of a FORGET or BATCH_FORGET, each with how many of the lookups the kernel has got an answer to it takes back."""
    if header.opcode == Opcode.FORGET:
        _need(size, 8)
        return [(header.node, _U64.unpack_from(buffer, HEADER_BYTES)[0])]
    _need(size, 8)
    count = _U32.unpack_from(buffer, HEADER_BYTES)[0]
    start = HEADER_BYTES + 8
    _need(size, 8 + count * _FORGET_ONE.size)
    return list(_FORGET_ONE.iter_unpack(bytes(buffer[start : start + count * _FORGET_ONE.size])))


def _need(size: int, body_bytes: int) -> None:
    if size < HEADER_BYTES + body_bytes:
        raise ProtocolError(f"a body of {size - HEADER_BYTES} bytes is shorter than the {body_bytes} of its kind")


# ------------------------------------------------------------------------------------------------------------- replies


class Validity(NamedTuple):
    """For how long an answer holds, as the kernel wants it."""

    seconds: int
    nanoseconds: int

    @classmethod
    def of(cls, seconds: float) -> Validity:
        """Of a number of seconds >= 0; infinite ones are many."""
        if not seconds > 0:
            return cls(0, 0)
        whole = math.floor(min(seconds, 1 << 40))
        return cls(whole, min(int((min(seconds, 1 << 40) - whole) * _NSEC), _NSEC - 1))


_NOT_VALID = Validity(0, 0)
_NO_TIMES = (0, 0, 0, 0)
_DIRENT_BYTES, _PLUS_BYTES = _DIRENT.size, _DIRENT_PLUS.size


class DirectoryOffset(IntEnum):
    """Positions in a directory: that of child number `i` (0-based) is `CHILDREN + i`; an entry carries the one behind it."""

    SELF = 0
    PARENT = 1
    CHILDREN = 2


def reply_head(unique: int, body_bytes: int) -> bytes:
    """What precedes `body_bytes` of answer."""
    return _REPLY_HEAD.pack(_REPLY_HEAD.size + body_bytes, 0, unique)


def error_reply(unique: int, errno: int) -> bytes:
    """A refusal; `errno` 0: done, with nothing to tell."""
    return _REPLY_HEAD.pack(_REPLY_HEAD.size, -errno, unique)


def entry_reply(unique: int, entry: Entry, entry_valid: Validity, attr_valid: Validity) -> bytes:
    """The answer to a LOOKUP that has found something."""
    node, attr = entry
    if not attr[8]:
        entry_valid = attr_valid = _NOT_VALID
    return _ENTRY_REPLY.pack(
        _ENTRY_REPLY.size, 0, unique, node, 0, entry_valid[0], attr_valid[0], entry_valid[1], attr_valid[1], *_attr_fields(node, attr)
    )


def missing_reply(unique: int, valid: Validity) -> bytes:
    """The answer to a LOOKUP that has found nothing, which the kernel remembers."""
    return _MISSING.pack(_MISSING.size, 0, unique, 0, 0, valid[0], 0, valid[1], 0)


def attr_reply(unique: int, node: int, attr: Attr, valid: Validity) -> bytes:
    """The answer to a GETATTR."""
    if not attr[8]:
        valid = _NOT_VALID
    return _ATTR_REPLY.pack(_ATTR_REPLY.size, 0, unique, valid[0], valid[1], 0, *_attr_fields(node, attr))


def open_reply(unique: int, handle: int, flags: int, backing_id: int = 0) -> bytes:
    """The answer to an OPEN or OPENDIR."""
    return _OPEN_REPLY.pack(_OPEN_REPLY.size, 0, unique, handle, flags, backing_id)


def statfs_reply(unique: int) -> bytes:
    """The answer to a STATFS: a file system without room, and names of up to 255 bytes."""
    return _STATFS_REPLY.pack(_STATFS_REPLY.size, 0, unique, 0, 0, 0, 0, 0, _BLOCK_BYTES, 255, _BLOCK_BYTES, 0)


def _attr_fields(node: int, attr: Attr) -> tuple[int, ...]:
    mode, size, nlink, uid, gid, mtime_ns, atime_ns, ctime_ns, _ = attr
    atime = ctime = mtime = mtime_ns // _NSEC
    atime_nsec = ctime_nsec = mtime_nsec = mtime_ns - mtime * _NSEC
    if atime_ns != mtime_ns:
        atime, atime_nsec = divmod(atime_ns, _NSEC)
    if ctime_ns != mtime_ns:
        ctime, ctime_nsec = divmod(ctime_ns, _NSEC)
    return (
        node, size, (size + 511) >> 9, atime & _U64_MAX, mtime & _U64_MAX, ctime & _U64_MAX, atime_nsec, mtime_nsec, ctime_nsec,
        mode, nlink, uid, gid, 0, _BLOCK_BYTES, 0,
    )  # fmt: skip


class Listing:
    """One piece of a directory, up to a number of bytes."""

    __slots__ = ("_left", "_parts", "_plus", "_times", "nodes")

    def __init__(self, most_bytes: int, plus: tuple[Validity, Validity] | None) -> None:
        """`plus`: names come with their attributes, which hold for (entry, attributes); None: names only."""
        self._left = most_bytes
        self._parts: list[bytes] = []
        self._plus = plus is not None
        entry_valid, attr_valid = plus or (_NOT_VALID, _NOT_VALID)
        self._times = entry_valid[0], attr_valid[0], entry_valid[1], attr_valid[1]
        self.nodes: list[int] = []
        """Nodes of which the kernel hears here as if it had looked them up."""

    def add(self, name: bytes, entry: Entry, next_offset: int) -> bool:
        """Append one entry; False: there is no room for it any more."""
        node, attr = entry
        length, kind = len(name), attr[0] >> 12 & 15
        padding = _PADDING[length & 7]
        self._left -= (_PLUS_BYTES if self._plus else _DIRENT_BYTES) + length + len(padding)
        if self._left < 0:
            return False
        if not self._plus:
            packed = _DIRENT.pack(node, next_offset, length, kind)
        else:
            times = self._times if attr[8] else _NO_TIMES
            packed = _DIRENT_PLUS.pack(node, 0, *times, *_attr_fields(node, attr), node, next_offset, length, kind)
            self.nodes.append(node)
        self._parts += (packed, name, padding)
        return True

    def add_dot(self, name: bytes, node: int, next_offset: int) -> bool:
        """Append "." or "..", which is listed but not looked up."""
        padding = -len(name) % 8
        head = _DIRENT_PLUS.size - _DIRENT.size if self._plus else 0
        self._left -= head + _DIRENT.size + len(name) + padding
        if self._left < 0:
            return False
        self._parts += (bytes(head), _DIRENT.pack(node, next_offset, len(name), 4), name, bytes(padding))
        return True

    def reply(self, unique: int) -> bytes:
        """The whole answer; a piece without entries is the end of the directory."""
        body = b"".join(self._parts)
        return reply_head(unique, len(body)) + body


# -------------------------------------------------------------------------------------------------------------- notices


def node_notice(node: int, offset: int, length: int) -> bytes:
    """Forget the attributes of `node`, and its cached bytes from `offset` on (`length` -1: all); `offset` < 0: no bytes."""
    return _NODE_NOTICE.pack(_NODE_NOTICE.size, _INVALIDATE_NODE, 0, node, offset, length)


def entry_notice(parent: int, name: bytes) -> bytes:
    """Forget what `name` in `parent` stands for, or that it stands for nothing."""
    return _ENTRY_NOTICE.pack(_ENTRY_NOTICE.size + len(name) + 1, _INVALIDATE_ENTRY, 0, parent, len(name), 0) + name + b"\0"


def store_head(node: int, body_bytes: int) -> bytes:
    """What precedes the first `body_bytes` of a file, for the kernel to keep as if it had read them."""
    return _STORE_NOTICE.pack(_STORE_NOTICE.size + body_bytes, _STORE, 0, node, 0, body_bytes, 0)


def names_of(opcodes: Iterable[int]) -> list[str]:
    """Opcodes as people know them."""
    known = {int(code): code.name for code in Opcode}
    return [known.get(code, f"opcode {code}") for code in opcodes]
