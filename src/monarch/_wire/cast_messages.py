"""The part of the protocol that casts use: one call to many procs, through a tree of host agents.

A cast is named by its sender's id, the sender's epoch, and its number. Of two processes that run under one id, one after
the other, the later has the larger epoch; a process numbers its casts from 1 upwards.

Read next: `docs/design/casts.md`; `messages.py`, which makes these part of `Control`.
"""

from __future__ import annotations

import msgspec

from monarch._base.ids import ProcRef


class CastOrder(msgspec.Struct, frozen=True, array_like=True):
    """The place of a cast among all messages of its sender, for each receiving proc (`_runtime/cast_order.py`)."""

    number: int
    after: int
    """The number of the sender's cast before it to the same proc; 0: this is the first."""
    others: list[tuple[int, int, int]] = []
    """(first rank, one past the last, `after`) of the ranks where that differs."""
    fenced: list[tuple[int, int]] = []
    """(first rank, one past the last) of those that get a `CastFence` as well, and have to wait for it."""
    lives: list[tuple[int, int, int]] = []
    """(first rank, one past the last, least `ProcExited.attempt` of the process that is meant); elsewhere 0."""


class Cast(msgspec.Struct, frozen=True, tag=True):
    """To an agent: hand this call to your procs, and pass it on to your children. Payload and buffers are the call's."""

    sender: str
    """Uid of the calling proc."""
    epoch: int
    port: int
    """Where answers go in the calling proc, or in the header's `reply_to`; 0: nobody waits."""
    merged: bool
    """Answers come back along the tree, one of each rank; False: they go straight to the header's `reply_to`."""
    header: bytes
    """The encoded `CallHeader`."""
    tree: bytes
    """What is to be reached (`_runtime/cast_tree.py`)."""
    order: CastOrder
    turn: int = 0
    """How often the way to an agent was changed: the sender of the latest turn is the one that gets the answers."""
    done: int = 0
    """All casts of this sender below this number are over; forget them."""
    control: bool = False
    """It is no call: the header is an encoded `CastControl`."""


class CastHanded(msgspec.Struct, frozen=True, tag=True):
    """From an agent to its proc: one call of a cast. Rank and reply port are in the frame's prefix."""

    epoch: int
    number: int
    after: int
    fenced: bool
    merged: bool
    """The answer goes to the agent, with the port of this frame."""
    header: bytes
    control: bool = False
    """It is no call: the header is an encoded `CastControl`."""


class CastControl(msgspec.Struct, frozen=True, array_like=True):
    """A control message that is cast."""

    sender: ProcRef
    pid: int
    """The sender's process."""
    message: bytes
    """Encoded; what differs from rank to rank follows from the rank of the frame."""


class CastFence(msgspec.Struct, frozen=True, tag=True):
    """Straight from a sender to a receiver: what came before this was sent before the cast of that number."""

    number: int


class CastVoid(msgspec.Struct, frozen=True, tag=True):
    """From an agent to its proc, or from the sender itself: casts of this sender up to that number will not come any more."""

    sender: str
    epoch: int
    number: int


class CastAcked(msgspec.Struct, frozen=True, tag=True):
    """Up the tree: all that the receiver gave the sender of this has been handed to procs, or reported as broken."""

    sender: str
    epoch: int
    number: int


class CastBroken(msgspec.Struct, frozen=True, tag=True):
    """Up the tree, as it is: one that should have passed the cast to this agent can't reach it."""

    sender: str
    epoch: int
    number: int
    agent: str


class CastReplies(msgspec.Struct, frozen=True, tag=True):
    """Up the tree: answers of several ranks. The payload is theirs, one behind the other; so are the buffers."""

    sender: str
    epoch: int
    number: int
    ranks: list[int]
    sizes: list[int]
    """Bytes of payload of each; one number when all have the same."""
    flags: list[int] = []
    """`frames.Flag` of each; [] when none has any."""
    counts: list[int] = []
    """Buffers of each; [] when none has any."""
    lost: list[bytes] = []
    """Encoded `ProcExited` of procs that are gone and have not answered."""


class CastsDone(msgspec.Struct, frozen=True, tag=True):
    """Down the tree: all casts of this sender below that number are over; forget them."""

    sender: str
    epoch: int
    below: int
    tree: bytes
