"""File systems: what a mounted tree must answer, whoever asks.

Pure: no descriptor, no thread, no clock. A `FileSystem` knows nodes by number (the root is `ROOT`) and answers each
question in one of three ways: with the answer, with an errno, or with the `Later` that came with the question, when the
answer is not at hand yet.

Rules of this file:
    1. No method may wait: it runs on a thread that serves everybody. What has to wait returns its `Later`.
    2. A `Later` is answered from any thread, and only the first answer counts.
    3. A node number stands for one file for good; what replaces a file gets a number of its own.
    4. Every tree is read-only. Nothing here can be written, and the server refuses all that tries.

Read next: `fuse_server.py`, which asks; `fuse_calls.py` for what each question becomes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

Buffer: TypeAlias = "bytes | bytearray | memoryview"
"""A part of a file's bytes."""
ROOT = 1
"""Node of the mount point itself."""
YEAR_S = 365.0 * 24 * 3600


class Attr(NamedTuple):
    """What `stat` tells of a node."""

    mode: int
    """Kind of file and permissions, as in `st_mode`."""
    size: int
    """Bytes."""
    nlink: int = 1
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    """Since the epoch, as the other times; negative before it."""
    atime_ns: int = 0
    ctime_ns: int = 0
    lasts: bool = True
    """The kernel may take this, and the name that has led here, for right for as long as the `Habits` say. False: it asks each time."""


class Entry(NamedTuple):
    """What a name stands for."""

    node: int
    attr: Attr


attr_of: Callable[[tuple[int, int, int, int, int, int, int, int, bool]], Attr] = partial(tuple.__new__, Attr)
entry_of: Callable[[tuple[int, Attr]], Entry] = partial(tuple.__new__, Entry)
"""`Attr(*fields)` and `Entry(*fields)` in half the time, for where there is one for every file."""


class Opened(NamedTuple):
    """An open file."""

    handle: int = 0
    """Comes back with every read and with the release."""
    backing_fd: int | None = None
    """A regular file or memfd with the same bytes, for the kernel to read past us when the server may (`passthrough`); it is the file
    system's and must stay open until this answer has been given. Of one node that is open several times: always the same file."""
    keep_cache: bool = True
    """Pages that the kernel has of this node from earlier are still right."""
    content: Sequence[Buffer] = ()
    """All bytes of a small file, for the kernel to have before it asks. Only where `habits.opens` is False, of a node whose bytes never
    change, and whose reads are answered at once. The kernel is given them when nobody else has the file open."""


class Habits(NamedTuple):
    """How much the kernel may take for granted about a tree."""

    entry_s: float
    """Seconds for which a name stands for its node without asking again."""
    attr_s: float
    """Seconds for which attributes and link targets hold."""
    missing_s: float
    """Seconds for which a missing name stays missing; 0: it is asked for each time."""
    opens: bool
    """Files and directories are opened and released one by one. False: the kernel learns once that it need not ask."""
    checks_mtime: bool
    """Cached pages go when size or mtime of a node have changed. False: only when the server is told to invalidate them."""
    forgets: bool
    """Nodes come and go, so that `forget` is wanted; the server then counts what the kernel knows (100 bytes a node)."""


PUSHED = Habits(entry_s=YEAR_S, attr_s=YEAR_S, missing_s=YEAR_S, opens=False, checks_mtime=False, forgets=False)
"""A tree that changes only when its owner says so, node by node and name by name."""
GUARDED = Habits(entry_s=1.0, attr_s=1.0, missing_s=0.0, opens=True, checks_mtime=True, forgets=True)
"""A tree that changes at any time, and whose owner knows of which attributes he will hear when they do; of others `Attr.lasts` is False."""
LIVE = Habits(entry_s=0.0, attr_s=0.0, missing_s=0.0, opens=True, checks_mtime=True, forgets=True)
"""A tree that changes at any time: each use asks, a `stat` for each directory of its path and each check of permissions; a second of
`entry_s` and `attr_s` saves most of that."""


class Later(Protocol):
    """The promise of an answer. Thread: any. A second answer, and one that comes after the end of the request, is dropped."""

    @property
    def cancelled(self) -> bool:
        """Nobody waits any more: the reader was interrupted or killed, the patience is over, or the mount has ended."""

    def answer(self, value: object) -> None:
        """Give what the method would have returned."""

    def fail(self, errno: int) -> None:
        """Give an error, such as `errno.EIO`."""


class FileSystem(Protocol):
    """A tree to serve. Thread: the server's, several at once when it has several. An exception is EIO to the reader, and logged."""

    @property
    def habits(self) -> Habits:
        """How much the kernel may cache; read once, when the server is made."""

    def lookup(self, parent: int, name: bytes, later: Later) -> Entry | int | Later:
        """The entry `name` of the directory `parent`; ENOENT when there is none. Never asked for "." and ".."."""

    def attr(self, node: int, later: Later) -> Attr | int | Later:
        """The attributes of `node`; ESTALE when it is gone."""

    def children(self, node: int, later: Later) -> Sequence[tuple[bytes, Entry]] | int | Later:
        """What the directory `node` holds, without "." and "..".

        Where `habits.opens` is False, a listing is read in pieces, each of which asks anew: the order must be stable, the answer cheap
        (the same sequence each time). Else it is asked for once per opened directory, and again when its reader rewinds.
        """

    def target(self, node: int, later: Later) -> bytes | int | Later:
        """Where the symbolic link `node` leads; EINVAL when it is none."""

    def open(self, node: int, later: Later) -> Opened | int | Later:
        """Open a file for reading. Only asked where `habits.opens`, or where the kernel reads backing files itself."""

    def release(self, handle: int) -> None:
        """What `open` has given will not be used any more."""

    def read(self, node: int, handle: int, offset: int, size: int, later: Later) -> Sequence[Buffer] | int | Later:
        """`size` bytes of a file from `offset`, as parts in order; they may be looked at until they are written, and are not copied.

        Fewer bytes mean the end of the file, and the kernel then takes the file to be that short; more are EIO.

        Args:
            handle: what `open` gave; 0 when nothing was opened.
        """

    def forget(self, node: int) -> None:
        """The kernel knows `node` no longer; only where `habits.forgets`, and not of the root.

        A hint: a lookup that is being answered meanwhile may give it anew. So a node that is gone answers ESTALE, upon which the kernel
        looks its name up once more.
        """
