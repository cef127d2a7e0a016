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


class LendMemory(msgspec.Struct, frozen=True, tag=True):
    """The sender wants to read memory of this process, whose agent can't be dialled: the agent is to dial the sender.

    The owner passes it on to its agent. Whoever connects says the ticket first.
    """

    reader: str
    """Address of the sender."""
    ticket: bytes
    credentials: bytes = b""
    """Of the owner, for its agent, which may have none yet."""

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


class ReleaseMemory(msgspec.Struct, frozen=True, tag=True):
    """The sender has dropped a region that this process holds; answered by `Done` once no transfer of this process uses it."""

    nonce: bytes
    generation: int


class DropMemory(msgspec.Struct, frozen=True, tag=True):
    """Take back a region of this process; answered by `Done`, also when it was taken back before."""

    nonce: bytes
    """Of the table."""
    generation: int


MemoryRequest = DropMemory | LendMemory | AskMemory | ReleaseMemory
"""What a process is asked about memory."""
