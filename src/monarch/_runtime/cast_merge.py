"""Merging: what an agent on the way keeps for one cast, and how several answers travel in one frame.

Answers stay as they are: pickled bytes and buffers that nobody between the actor and the caller looks into.

    own procs    -- on_reply, on_proc_lost -->              -- batches -->  the agent, or caller, that the cast came from
    child agents -- on_batch, on_acknowledged -->   Relay   -- CastAcked -->
                 -- on_child_lost -->                       -- CastBroken -->

Pure: no I/O, no clock. Whoever holds a relay calls `flush` when the oldest answer in it has waited long enough.

Rules of this file:
    1. A batch leaves when nothing is missing any more, when it is full, when it is asked for, and at once with the first
       error of a cast: one error decides a call, the thousands behind it need no hurry.
    2. An agent keeps the answers of its own procs until the caller says that the cast is over. What an agent on the way held
       when it died is sent again by those who had it first; the caller takes the first answer of each rank.
    3. What follows an answer up the tree never overtakes it: the end of a proc comes after what the proc has said.
    4. Whole payloads are copied once per hop when they are merged, buffers never. Reading a batch copies nothing.

Read next: `cast_ledger.py` for the caller, `cast_tree.py` for who is whose child; `docs/design/casts.md`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from monarch._wire import messages
from monarch._wire.cast_messages import CastReplies
from monarch._wire.frames import Buffer, Flag, FrameError
from monarch._wire.messages import ProcExited

MAX_REPLIES = 4096
"""Answers in a batch, at most."""
MAX_BYTES = 256 << 10
"""Payloads and buffers of a batch; beyond that waiting saves nothing, and a longer answer goes alone."""
_URGENT = Flag.ERROR | Flag.DEAD


class Answer(NamedTuple):
    """What one rank has answered."""

    rank: int
    flags: int
    payload: Buffer
    buffers: Sequence[memoryview]

    @property
    def nbytes(self) -> int:
        """Of payload and buffers."""
        return len(self.payload) + sum(buffer.nbytes for buffer in self.buffers)


class Batch:
    """Answers that travel together."""

    __slots__ = ("_buffers", "_counts", "_flags", "_lost", "_payloads", "_ranks", "_sizes", "nbytes")

    def __init__(self) -> None:
        self._ranks: list[int] = []
        self._sizes: list[int] = []
        self._flags: list[int] = []
        self._counts: list[int] = []
        self._payloads: list[Buffer] = []
        self._buffers: list[memoryview] = []
        self._lost: list[bytes] = []
        self.nbytes = 0
        """Of payloads and buffers."""

    def __len__(self) -> int:
        """How many ranks it is about: answers, and procs that are gone."""
        return len(self._ranks) + len(self._lost)

    @property
    def failed(self) -> bool:
        """It holds an error or the end of a proc."""
        return bool(self._lost) or any(flags & _URGENT for flags in self._flags)

    def add(self, answer: Answer) -> None:
        """One answer more."""
        rank, flags, payload, buffers = answer
        self._ranks.append(rank)
        self._sizes.append(len(payload))
        self._flags.append(flags)
        self._counts.append(len(buffers))
        self._payloads.append(payload)
        self.nbytes += len(payload)
        if buffers:
            self._buffers.extend(buffers)
            self.nbytes += sum(buffer.nbytes for buffer in buffers)

    def add_lost(self, exited: ProcExited) -> None:
        """A proc is gone that had not answered."""
        self._lost.append(messages.encode(exited))

    def extend(self, other: Batch) -> None:
        """All of another batch. Cost: a few list operations, however many answers it has."""
        self._ranks += other._ranks
        self._sizes += other._sizes
        self._flags += other._flags
        self._counts += other._counts
        self._payloads += other._payloads
        self._buffers += other._buffers
        self._lost += other._lost
        self.nbytes += other.nbytes

    def encode(self, sender: str, epoch: int, number: int) -> tuple[CastReplies, Buffer, list[memoryview]]:
        """The message, payload and buffers of a CONTROL frame."""
        sizes = self._sizes[:1] if len(set(self._sizes)) == 1 else self._sizes
        flags = self._flags if any(self._flags) else []
        counts = self._counts if any(self._counts) else []
        message = CastReplies(sender, epoch, number, self._ranks, sizes, flags, counts, self._lost)
        return message, self._payloads[0] if len(self._payloads) == 1 else b"".join(self._payloads), self._buffers

    @staticmethod
    def decode(message: CastReplies, payload: Buffer, buffers: Sequence[memoryview]) -> Batch:
        """The batch of a frame; it refers to the frame's memory.

        Raises:
            FrameError: the numbers do not fit each other or the frame.
        """
        batch = Batch()
        total = len(message.ranks)
        sizes = message.sizes * total if len(message.sizes) == 1 else message.sizes
        flags = message.flags or [0] * total
        counts = message.counts or [0] * total
        wrong = len(sizes) != total or len(flags) != total or len(counts) != total
        if wrong or min(sizes, default=0) < 0 or min(counts, default=0) < 0:
            raise FrameError("the table of merged answers does not fit together")
        if sum(sizes) != len(payload) or sum(counts) != len(buffers):
            raise FrameError("the table of merged answers does not fit the frame")
        batch._ranks, batch._sizes, batch._flags, batch._counts = message.ranks, sizes, flags, counts
        batch._payloads = [payload]
        batch._buffers = list(buffers)
        batch._lost = message.lost
        batch.nbytes = len(payload) + sum(buffer.nbytes for buffer in buffers)
        return batch

    def answers(self) -> Iterator[Answer]:
        """The answers in the order they were added; their payloads are views where several came in one frame."""
        pieces = iter(self._payloads)
        piece = memoryview(b"")
        at = first = 0
        for rank, size, flags, count in zip(self._ranks, self._sizes, self._flags, self._counts, strict=True):
            if at == piece.nbytes and size:
                piece, at = memoryview(next(piece for piece in pieces if len(piece))), 0
            yield Answer(rank, flags, piece[at : at + size], self._buffers[first : first + count])
            at += size
            first += count

    def lost(self) -> list[ProcExited]:
        """The procs that are gone.

        Raises:
            DecodeError: it says something else.
        """
        ends = [messages.decode_control(encoded) for encoded in self._lost]
        if not all(isinstance(end, ProcExited) for end in ends):
            raise messages.DecodeError("merged answers tell of something else than the end of procs")
        return [end for end in ends if isinstance(end, ProcExited)]


class Relay:
    """What an agent keeps for one cast. Thread: net loop."""

    def __init__(
        self,
        own: Iterable[int],
        children: Mapping[str, int],
        *,
        merged: bool,
        max_replies: int = MAX_REPLIES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """Args:
        own: the ranks of the agent's own procs.
        children: the ranks that each child agent serves with all that is below it, by its address.
        merged: answers come back this way.
        """
        self.turn = 0
        """That of the way by which the cast came last; where it came from gets the answers."""
        self._merged = merged
        self._own = set(own)
        self._children = dict(children)
        self._below = self._expected()
        self._unacked = set(children)
        self._handed = False
        self._acked = False
        self._pending = Batch()
        self._kept: list[Answer] = []
        self._ends: list[ProcExited] = []
        self._has_failed = False
        self._max_replies = max_replies
        self._max_bytes = max_bytes

    @property
    def waiting(self) -> bool:
        """Something lies here that leaves with the next `flush`, in `split_max_buffer_age` at the latest."""
        return len(self._pending) > 0

    @property
    def missing(self) -> int:
        """Answers that are still to come this way."""
        return len(self._own) + sum(self._below.values())

    def _expected(self) -> dict[str, int]:
        return dict(self._children) if self._merged else dict.fromkeys(self._children, 0)

    # --- answers ---------------------------------------------------------------------------------------------------

    def on_reply(self, rank: int, flags: int, payload: Buffer, buffers: Sequence[memoryview]) -> list[Batch]:
        """One of the agent's own procs has answered; what leaves now. An answer that nobody waits for is dropped."""
        own = self._own
        if rank not in own:
            return []
        own.discard(rank)
        answer = Answer(rank, flags, payload, buffers)
        self._kept.append(answer)
        pending = self._pending
        has_room = len(pending) < self._max_replies - 1 and pending.nbytes + len(payload) < self._max_bytes
        if own and has_room and not (buffers or flags & _URGENT):
            pending.add(answer)  # the usual one: it waits for the rest
            return []
        batch = Batch()
        batch.add(answer)
        return self._take(batch)

    def on_proc_lost(self, exited: ProcExited, rank: int) -> list[Batch]:
        """One of the agent's own procs is gone, or was not to be given the cast; what leaves now: nothing, when it has answered.

        Without answers to merge, this is of interest only before `on_handed`.
        """
        if rank not in self._own:
            return []
        self._own.discard(rank)
        self._ends.append(exited)
        batch = Batch()
        batch.add_lost(exited)
        return self._take(batch)

    def on_batch(self, child: str, batch: Batch) -> list[Batch]:
        """Answers have come up from a child; what leaves now."""
        # Clamped: a child that was told to send again may say things twice, and the caller sorts that out.
        if child in self._below:
            self._below[child] = max(self._below[child] - len(batch), 0)
        return self._take(batch)

    def flush(self) -> list[Batch]:
        """What lies here leaves now: the oldest of it has waited long enough."""
        if not self._pending:
            return []
        batch, self._pending = self._pending, Batch()
        return [batch]

    def _take(self, batch: Batch) -> list[Batch]:
        leaving = self.flush() if self._pending.nbytes + batch.nbytes > self._max_bytes else []
        self._pending.extend(batch)
        urgent = not self._has_failed and batch.failed
        self._has_failed |= urgent
        full = len(self._pending) >= self._max_replies or self._pending.nbytes >= self._max_bytes
        return leaving + self.flush() if urgent or full or not self.missing else leaving

    # --- the way -----------------------------------------------------------------------------------------------------

    def on_handed(self) -> bool:
        """The agent has handed the cast to its own procs and sent it to its children; True: send `CastAcked` up now."""
        self._handed = True
        if not self._merged:
            self._own.clear()
        return self._completes()

    def on_acknowledged(self, child: str) -> bool:
        """A child and all below it have it; True: send `CastAcked` up now."""
        self._unacked.discard(child)
        return self._completes()

    def on_child_lost(self, child: str) -> ChildLost:
        """A child can't be reached any more: from here on the caller looks after all that was below it.

        When the cast comes again, the child is tried again, and found broken again: the news may not have reached the caller.
        """
        left = self._below.pop(child, 0)
        was_unacked = child in self._unacked
        acked = self.on_acknowledged(child)
        return ChildLost(left > 0 or was_unacked, acked, [] if self.missing else self.flush())

    def repeat(self, turn: int, children: Mapping[str, int]) -> tuple[bool, list[Batch]]:
        """The cast has come again, by a way with a later turn; it goes to its children once more.

        Whoever sent it by the earlier way is told `CastAcked` at once, lest it wait; so is one whose turn is not later.

        What they have said so far may have been lost on the old way, so they say it again.

        Args:
            children: those of the tree that came with it. Others have a new parent.

        Returns:
            Whether to send `CastAcked` now, and all that the agent's own procs have answered so far.
        """
        self.turn = turn
        self._children = dict(children)
        self._below = self._expected()
        self._unacked = set(self._children)
        self._acked = False
        self._pending = Batch()
        batches = [Batch()]
        for answer in self._kept:
            if batches[-1].nbytes + answer.nbytes > self._max_bytes:
                batches.append(Batch())
            batches[-1].add(answer)
        for exited in self._ends:
            batches[-1].add_lost(exited)
        return self._completes(), [batch for batch in batches if batch]

    def _completes(self) -> bool:
        if self._acked or not self._handed or self._unacked:
            return False
        self._acked = True
        return True


class ChildLost(NamedTuple):
    """What the loss of a child leads to, in this order."""

    broken: bool
    """Send `CastBroken` up."""
    acked: bool
    """Send `CastAcked` up."""
    leaving: list[Batch]
