"""The ledger: what a caller keeps of its casts until they are over.

A cast is over when every agent has acknowledged that it handed it to its procs, and, where answers come back along the tree, when
each rank has answered or is known to be gone. Until then the caller can send it again: to the agents below one that was lost.

Pure: no I/O, no clock, no threads.

Rules of this file:
    1. A branch that was lost is sent again once, as its children and, while its agent may live, itself without them.
    2. Agents know a cast by its number, so sending again costs bytes and never a second delivery.
    3. The first answer of a rank counts.
    4. An agent that broke a cast is no inner node of later ones, until it is `trusted` again.

Read next: `cast_tree.py` for branches, `cast_merge.py` for the agents' side; `docs/design/casts.md`, "Loss".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from monarch._runtime.cast_merge import Answer, Batch
from monarch._runtime.cast_order import Target
from monarch._runtime.cast_tree import Branch, alone, find

C = TypeVar("C")


class Entry(Generic[C]):
    """One cast under way. Thread: net loop, after the caller's thread has sent it."""

    __slots__ = ("_given_up", "_roots", "_seen", "_targets", "_unacked", "_waiting", "content", "is_delivered", "number", "turn")

    def __init__(self, number: int, branches: Sequence[Branch], targets: Sequence[Target], content: C, *, merged: bool) -> None:
        """Args:
        targets: (rank, uid) of each proc in the branches, by rank.
        content: what is sent, for whoever sends it again.
        """
        self.number = number
        self.content = content
        self.is_delivered = False
        """Every agent has it. Who is sent it again is only asked for answers, so payload and buffers need not be kept."""
        self.turn = 0
        """How often the way was changed."""
        self._targets = targets
        self._roots = list(branches)
        self._unacked = {branch.agent for branch in branches}
        self._given_up: set[str] = set()
        self._seen = bytearray(targets[-1][0] + 1)
        self._waiting = len(targets) if merged else 0

    @property
    def is_over(self) -> bool:
        """Nothing more will be done for it."""
        return not self._unacked and not self._waiting

    def on_batch(self, batch: Batch) -> list[Answer]:
        """Answers came; those that are the first of their rank."""
        return [answer for answer in batch.answers() if self._is_first(answer.rank)]

    def on_proc_lost(self, uid: str) -> list[int]:
        """A proc is gone; its ranks that have not answered, nor were known to be gone. Cost: O(ranks)."""
        return [rank for rank, target in self._targets if target == uid and self._is_first(rank)]

    def _is_first(self, rank: int) -> bool:
        seen = self._seen
        if not 0 <= rank < len(seen) or seen[rank]:
            return False
        seen[rank] = 1
        self._waiting -= self._waiting > 0
        return True

    def on_acked(self, agent: str) -> None:
        """An agent that was sent this by the caller has handed it on, and so has all that is below it."""
        self._unacked.discard(agent)
        self.is_delivered |= not self._unacked

    def on_lost(self, agent: str, *, gone: bool) -> list[Branch]:
        """An agent can't be reached, by its parent or by us; what the caller sends itself now, with the new `turn`.

        Args:
            gone: it is known to have ended; its own ranks are told through supervision (`on_proc_lost`).
        """
        again: list[Branch] = []
        branch = None if agent in self._given_up or self.is_over else find(reversed(self._roots), agent)
        if branch is not None:
            self._given_up.add(agent)
            # A child that was given up before has been sent to directly since, or is gone.
            again = [*([] if gone else [alone(branch)]), *(child for child in branch.children if child.agent not in self._given_up)]
        if again:
            self.turn += 1
            self._roots.extend(again)
            self._unacked.update(branch.agent for branch in again)
        if gone:  # after the orphans have taken its place, so that the cast is not over in between
            self.on_acked(agent)
        return again


class Resend(NamedTuple, Generic[C]):
    """A cast that is to be sent again."""

    entry: Entry[C]
    branches: list[Branch]


class Ledger(Generic[C]):
    """The casts of one process that are under way. Thread: one at a time; `open` on the sending one, the rest on the net loop."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry[C]] = {}
        self.avoid: set[str] = set()
        """Agents that broke a cast: leaves from now on."""

    def __len__(self) -> int:
        return len(self._entries)

    def open(self, entry: Entry[C]) -> None:
        """A cast is about to be sent."""
        self._entries[entry.number] = entry

    def entry(self, number: int) -> Entry[C] | None:
        """A cast that is not over."""
        return self._entries.get(number)

    def entries(self) -> list[Entry[C]]:
        """The casts that are not over."""
        return list(self._entries.values())

    def settle(self, entry: Entry[C]) -> bool:
        """Forget a cast if it is over; True: it was the last one, and the agents may be told (`CastsDone`)."""
        return entry.is_over and self._entries.pop(entry.number, None) is not None and not self._entries

    def floor(self, next_number: int) -> int:
        """All casts below this number are over. Cost: O(1); numbers were opened in order."""
        return next(iter(self._entries), next_number)

    def on_lost(self, agent: str, *, gone: bool) -> list[Resend[C]]:
        """An agent can't be reached; what is sent again. Cost: O(casts under way x their hosts)."""
        self.avoid.add(agent)
        found = [Resend(entry, entry.on_lost(agent, gone=gone)) for entry in list(self._entries.values())]
        for entry in list(self._entries.values()):
            self.settle(entry)
        return [resend for resend in found if resend.branches]

    def trusted(self, agent: str) -> None:
        """An agent serves again."""
        self.avoid.discard(agent)

    def on_proc_lost(self, uid: str) -> list[Entry[C]]:
        """A proc is gone: no cast waits for its answer; those that did. Cost: O(ranks of the casts under way)."""
        waited = []
        for entry in list(self._entries.values()):
            if entry.on_proc_lost(uid):
                waited.append(entry)
            self.settle(entry)
        return waited
