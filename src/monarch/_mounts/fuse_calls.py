"""Calls: one request of the kernel that a file system answers, now or later. The `Later` of a question is its call.

Rules of this file:
    1. A class per question: how it is read, what it asks of the file system, and how the answer is told to the kernel.
    2. `reply` runs on the thread that answers, `ask` on a thread of the server.
    3. What the kernel gets to know is counted before it is told, and taken back when it did not take the answer.

Read next: `fuse_parking.py` for calls that wait, `fuse_server.py` for the requests that no file system hears of.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Sequence
from errno import ENOENT, EROFS
from typing import TYPE_CHECKING, Any, ClassVar

from monarch._mounts import fuse_protocol
from monarch._mounts.filesystem import ROOT, Attr, Entry, FileSystem, Opened
from monarch._mounts.fuse_protocol import DirectoryOffset, Header, Listing, Opcode, Validity
from monarch._wire.frames import Buffer

if TYPE_CHECKING:
    from monarch._mounts.fuse_device import Device
    from monarch._mounts.fuse_negotiation import Agreement
    from monarch._mounts.fuse_parking import Parking

_KEEP_CACHE = 1 << 1
_PASSTHROUGH = 1 << 7
_UNKNOWN_NODE = 0xFFFFFFFF
"""Listed for ".." of a directory other than the root: the kernel knows the parent itself, and a listing must not say 0."""


class Desk:
    """What the calls of one mount have in common."""

    def __init__(self, filesystem: FileSystem, device: Device, parking: Parking[Call]) -> None:
        self.filesystem = filesystem
        self.device = device
        self.parking = parking
        self.agreement: Agreement | None = None
        habits = filesystem.habits
        self.habits = habits
        self.entry_valid = Validity.of(habits.entry_s)
        self.attr_valid = Validity.of(habits.attr_s)
        self.missing_valid = Validity.of(habits.missing_s) if habits.missing_s > 0 else None
        self.references = References() if habits.forgets else None
        self.listings: dict[int, Sequence[tuple[bytes, Entry]]] = {}
        """Of opened directories, by handle."""
        self.handles = itertools.count(1)
        self.openings = Openings(device)
        self.num_given = 0
        """Files that the kernel was given before it asked; about, when several threads serve."""


class References:
    """How often the kernel has been told of each node. Thread: any."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, node: int) -> bool:
        return node in self._counts

    def take(self, nodes: Sequence[int]) -> None:
        """The kernel hears of `nodes`."""
        with self._lock:
            for node in nodes:
                self._counts[node] = self._counts.get(node, 0) + 1

    def give_back(self, counts: Sequence[tuple[int, int]]) -> list[int]:
        """The kernel gives back so many references of each node; those of which it has none left."""
        gone = []
        with self._lock:
            for node, count in counts:
                left = self._counts.get(node, 0) - count
                if left > 0:
                    self._counts[node] = left
                elif self._counts.pop(node, 0) and node != ROOT:
                    gone.append(node)
        return gone


class Openings:
    """How often each node is open, and the numbers by which the kernel reads some of them itself. Thread: any."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._counts: dict[int, int] = {}
        self._numbers: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, node: int, file: int | None) -> tuple[int, bool]:
        """`node` is about to be opened once more.

        Args:
            file: what the kernel may read itself; None: nothing.

        Returns:
            The number for `file`, 0 when the kernel will not read it; and whether nobody had `node` open.
        """
        with self._lock:
            count = self._counts.get(node, 0)
            self._counts[node] = count + 1
            return 0 if file is None else self._number_of(node, file), not count

    def _number_of(self, node: int, file: int) -> int:
        number = self._numbers.get(node, 0)
        if not number:
            try:
                number = self._numbers[node] = self._device.open_backing(file)
            except OSError:
                return 0
        return number

    def remove(self, node: int) -> None:
        """One opening of `node` less."""
        with self._lock:
            count = self._counts.pop(node, 0)
            if count > 1:
                self._counts[node] = count - 1
            elif node in self._numbers:
                self._device.close_backing(self._numbers.pop(node))


class Call:
    """A request on its way. Thread: any."""

    __slots__ = ("cancelled", "desk", "done", "fd", "node", "unique")
    name: ClassVar[str]

    def __init__(self, desk: Desk, fd: int, header: Header, buffer: Buffer, size: int) -> None:
        self.desk = desk
        self.fd = fd
        _, self.unique, self.node, _, _, _ = header
        self.done = self.cancelled = False
        self.decode(buffer, size)

    def decode(self, buffer: Buffer, size: int) -> None:
        """Take over what the request's body says."""

    def ask(self) -> Any:
        """Put the question to the file system."""
        raise NotImplementedError

    def reply(self, value: Any) -> Sequence[Buffer]:
        """The bytes that tell the kernel an answer other than an errno."""
        raise NotImplementedError

    def refuse(self, errno: int) -> bytes:
        """The bytes that tell the kernel an errno."""
        return fuse_protocol.error_reply(self.unique, errno)

    def take_back(self) -> None:
        """The kernel did not take the reply."""

    def answer(self, value: object) -> None:
        """`Later.answer`."""
        self.desk.parking.settle(self, value)

    def fail(self, errno: int) -> None:
        """`Later.fail`."""
        self.desk.parking.settle(self, errno)


class LookupCall(Call):
    """What a name stands for."""

    __slots__ = ("_child", "_name")
    name = "lookup"

    def decode(self, buffer: Buffer, size: int) -> None:
        self._name = fuse_protocol.decode_name(buffer, size)
        self._child = 0

    def ask(self) -> Any:
        return self.desk.filesystem.lookup(self.node, self._name, self)

    def reply(self, value: Entry) -> Sequence[Buffer]:
        desk = self.desk
        reply = fuse_protocol.entry_reply(self.unique, value, desk.entry_valid, desk.attr_valid)
        if desk.references is not None:
            self._child = value[0]
            desk.references.take((self._child,))
        return (reply,)

    def refuse(self, errno: int) -> bytes:
        valid = self.desk.missing_valid
        if errno == ENOENT and valid is not None:
            return fuse_protocol.missing_reply(self.unique, valid)
        return fuse_protocol.error_reply(self.unique, errno)

    def take_back(self) -> None:
        if self.desk.references is not None and self._child:
            self.desk.references.give_back([(self._child, 1)])


class AttrCall(Call):
    """The attributes of a node."""

    __slots__ = ()
    name = "attr"

    def ask(self) -> Any:
        return self.desk.filesystem.attr(self.node, self)

    def reply(self, value: Attr) -> Sequence[Buffer]:
        return (fuse_protocol.attr_reply(self.unique, self.node, value, self.desk.attr_valid),)


class TargetCall(Call):
    """Where a symbolic link leads."""

    __slots__ = ()
    name = "target"

    def ask(self) -> Any:
        return self.desk.filesystem.target(self.node, self)

    def reply(self, value: bytes) -> Sequence[Buffer]:
        return (fuse_protocol.reply_head(self.unique, len(value)), value)


class OpenCall(Call):
    """Open a file."""

    __slots__ = ("_flags", "_opened")
    name = "open"

    def decode(self, buffer: Buffer, size: int) -> None:
        self._flags = fuse_protocol.decode_open_flags(buffer, size)
        self._opened: Opened | None = None

    def ask(self) -> Any:
        if self._flags & os.O_ACCMODE != os.O_RDONLY:
            return EROFS
        return self.desk.filesystem.open(self.node, self)

    def reply(self, value: Opened) -> Sequence[Buffer]:
        self._opened = value
        handle, backing_fd, keep_cache, content = value
        desk = self.desk
        number, is_first = desk.openings.add(self.node, backing_fd if desk.agreement is not None and desk.agreement.passthrough else None)
        if number:
            return (fuse_protocol.open_reply(self.unique, handle, _PASSTHROUGH, number),)
        if content and is_first:
            self._give(content)
        return (fuse_protocol.open_reply(self.unique, handle, _KEEP_CACHE if keep_cache else 0),)

    def _give(self, content: Sequence[Buffer]) -> None:
        """Have the kernel keep all bytes of the file.

        It waits for a READ of these bytes that is under way, which this thread may be the one to answer. There is none: nobody has the
        file open. Until the reply to this OPEN only another thread can let somebody have it, and that thread is not here at this time.
        """
        head = fuse_protocol.store_head(self.node, sum(map(len, content)))
        if not self.desk.device.write(self.fd, (head, *content)):
            self.desk.num_given += 1

    def take_back(self) -> None:
        if self._opened is not None:
            self.desk.openings.remove(self.node)
            self.desk.filesystem.release(self._opened.handle)


class ReadCall(Call):
    """Bytes of a file."""

    __slots__ = ("_handle", "_offset", "_size")
    name = "read"

    def decode(self, buffer: Buffer, size: int) -> None:
        self._handle, self._offset, self._size = fuse_protocol.decode_read(buffer, size)

    def ask(self) -> Any:
        return self.desk.filesystem.read(self.node, self._handle, self._offset, self._size, self)

    def reply(self, value: Sequence[Buffer]) -> Sequence[Buffer]:
        num_bytes = 0
        for part in value:
            num_bytes += part.nbytes if isinstance(part, memoryview) else len(part)
        if num_bytes > self._size:
            raise ValueError(f"read() of node {self.node} gave {num_bytes} bytes, {self._size} were asked for")
        return (fuse_protocol.reply_head(self.unique, num_bytes), *value)


class ChildrenCall(Call):
    """A piece of a directory's listing."""

    __slots__ = ("_handle", "_nodes", "_offset", "_plus", "_size")
    name = "children"

    def decode(self, buffer: Buffer, size: int) -> None:
        self._handle, self._offset, self._size = fuse_protocol.decode_read(buffer, size)
        self._plus = False
        self._nodes: list[int] = []

    def ask(self) -> Any:
        if self._handle and self._offset:
            listing = self.desk.listings.get(self._handle)
            if listing is not None:
                return listing
        return self.desk.filesystem.children(self.node, self)

    def reply(self, value: Sequence[tuple[bytes, Entry]]) -> Sequence[Buffer]:
        desk = self.desk
        if self._handle:
            desk.listings[self._handle] = value
        listing = Listing(self._size, (desk.entry_valid, desk.attr_valid) if self._plus else None)
        self._fill(listing, value)
        if desk.references is not None and listing.nodes:
            desk.references.take(listing.nodes)
            self._nodes = listing.nodes
        return (listing.reply(self.unique),)

    def _fill(self, listing: Listing, children: Sequence[tuple[bytes, Entry]]) -> None:
        offset = self._offset
        if offset == DirectoryOffset.SELF:
            if not listing.add_dot(b".", self.node, DirectoryOffset.PARENT):
                return
            offset = DirectoryOffset.PARENT
        if offset == DirectoryOffset.PARENT:
            if not listing.add_dot(b"..", ROOT if self.node == ROOT else _UNKNOWN_NODE, DirectoryOffset.CHILDREN):
                return
            offset = DirectoryOffset.CHILDREN
        for index in range(offset - DirectoryOffset.CHILDREN, len(children)):
            name, entry = children[index]
            if not listing.add(name, entry, index + DirectoryOffset.CHILDREN + 1):
                return

    def take_back(self) -> None:
        if self.desk.references is not None:
            self.desk.references.give_back([(node, 1) for node in self._nodes])


class ChildrenPlusCall(ChildrenCall):
    """The same with attributes, each entry as if it had been looked up."""

    __slots__ = ()

    def decode(self, buffer: Buffer, size: int) -> None:
        super().decode(buffer, size)
        self._plus = True


CALLS: dict[int, type[Call]] = {
    Opcode.LOOKUP: LookupCall,
    Opcode.GETATTR: AttrCall,
    Opcode.READLINK: TargetCall,
    Opcode.OPEN: OpenCall,
    Opcode.READ: ReadCall,
    Opcode.READDIR: ChildrenCall,
    Opcode.READDIRPLUS: ChildrenPlusCall,
}
"""Requests that a file system answers."""
