"""The part of the protocol about memory that others may read and write. The bytes themselves never travel through it.

Read next: `messages.py`, which makes these part of `Control`; `monarch/rdma/regions.py` for the table.
"""

from __future__ import annotations

import msgspec


class ShareMemory(msgspec.Struct, frozen=True, tag=True):
    """The sender, a process of this host, has a table of regions: its agent may serve them to other hosts."""

    table: int
    """Address of the table in the sender."""
    nonce: bytes
    """Random bytes in the table, by which it is known from another process's."""


class ShareFile(msgspec.Struct, frozen=True, tag=True):
    """A region of the sender is a memory file, mapped as it is: its agent may send bytes from there. Behind `ShareMemory`."""

    nonce: bytes
    """Of the table."""
    generation: int
    fd: int
    """In the sender, open as long as the region is valid."""
    offset: int
    """Of the region's first byte."""


class LendMemory(msgspec.Struct, frozen=True, tag=True):
    """The sender wants to read memory of this process, whose agent can't be dialled: the agent is to dial the sender.

    The owner passes it on to its agent, unless it is to serve its memory itself. Whoever connects says the ticket first.
    """

    reader: str
    """Address of the sender."""
    ticket: bytes
    credentials: bytes = b""
    """Of the owner, for its agent, which may have none yet."""
    by_owner: bool = False
    """The agent can't read this process either."""

    def __repr__(self) -> str:
        return f"LendMemory(reader={self.reader!r})"  # not the credentials


class AskMemory(msgspec.Struct, frozen=True, tag=True):
    """The sender wants to reach regions of this process through NIXL; answered by `MemoryKeys`.

    From the answer on the sender holds the regions: their memory stays where it is until the sender has answered `ReleaseMemory`, or is
    gone.
    """

    nonce: bytes
    """Of the table."""
    generations: tuple[int, ...]
    num_chunks: int
    """Chunks of the table that the sender can read already; -1: it knows nothing of this process."""


class MemoryKeys(msgspec.Struct, frozen=True, tag=True):
    """What NIXL needs for regions of the sender."""

    metadata: tuple[bytes, ...] = ()
    """To be loaded in this order."""
    num_chunks: int = 0
    """Chunks of the table that can be read with them."""
    gone: tuple[int, ...] = ()
    """Generations that were dropped: the other ones are held."""
    refusal: str = ""
    """Why there are no keys at all."""
    refused: tuple[tuple[int, str], ...] = ()
    """Generations that NIXL can't register, and why: they are not held."""


class ReleaseMemory(msgspec.Struct, frozen=True, tag=True):
    """The sender has dropped a region that this process holds; answered by `Done` once no transfer of this process uses it."""

    nonce: bytes
    generation: int


class StageMemory(msgspec.Struct, frozen=True, tag=True):
    """The sender reaches host memory of this process, and wants some that stands for memory of a device; answered by `Staged`.

    To read: with a copy of the spans, one behind the other. To write: with room for them.
    """

    nonce: bytes
    """Of the table."""
    kind: str
    """`read` or `write`, as the sender sees it."""
    spans: tuple[tuple[int, int, int], ...]
    """Generation, offset and bytes of each; none to ask whether this process answers."""
    patience_s: float
    """How long the sender will use the memory at most."""


class ShareStorage(msgspec.Struct, frozen=True, tag=True):
    """The sender, of the same machine, wants to map the GPU memory of a region; answered by `Staged` with what CUDA needs for it."""

    nonce: bytes
    """Of the table."""
    generation: int


class Staged(msgspec.Struct, frozen=True, tag=True):
    """Host memory of the sender for a `StageMemory`, until `UnstageMemory`; or what came of that, or of a `ShareStorage`."""

    handle: bytes = b""
    gone: int = 0
    """A generation that was dropped; nothing was done."""
    failure: str = ""


class UnstageMemory(msgspec.Struct, frozen=True, tag=True):
    """The sender needs host memory of this process no longer; answered by `Staged` without a handle."""

    nonce: bytes
    generation: int
    """Of the host memory."""
    spans: tuple[tuple[int, int, int], ...] = ()
    """Where on a device its bytes are to go first, one behind the other."""


class HotMemory(msgspec.Struct, frozen=True, tag=True):
    """The sender moves the bytes of a region of this process again and again: it is worth making that cheaper. Not answered."""

    nonce: bytes
    """Of the table."""
    generation: int


class DropMemory(msgspec.Struct, frozen=True, tag=True):
    """Take back a region of this process; answered by `Done`, also when it was taken back before."""

    nonce: bytes
    """Of the table."""
    generation: int


MemoryRequest = DropMemory | LendMemory | AskMemory | ReleaseMemory | StageMemory | UnstageMemory | ShareStorage | HotMemory
"""What a process is asked about memory."""


def nothing_published(message: MemoryRequest) -> MemoryKeys | Staged | None:
    """The answer of a process that has no memory for others, or not with this table any more; None: `Done`."""
    match message:
        case AskMemory():
            return MemoryKeys(gone=message.generations)
        case StageMemory() | UnstageMemory():
            return Staged(gone=message.spans[0][0] if message.spans else 0)
        case ShareStorage():
            return Staged(gone=message.generation)
        case _:
            return None
