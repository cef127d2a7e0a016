"""Relays: who passes published weights on from host to host, and what one relay fetches for whom.

    owner --> relay 0 --> relay 1 --> ... --> relay 15
                 `-----> relay 16 --> relay 17 --> ...        each reads from the one before it, what is there already

Pure: what happens to a relay goes in, what it is to do comes out.

Rules of this file:
    1. One publication is fetched at a time, and none that nobody has asked for.
    2. Who asks gets a publication that is at least as new as the one asked for, as soon as it has come as far as asked for; a newer
       one counts as well.
    3. Every question is answered: with a copy, with the failure of the fetch, or, when that has to begin anew after the asker's time
       is over, with `None`.

Read next: `relay_actor.py`, which does it; `copies.py` for where the bytes are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

from monarch._base.rows import before
from monarch.rdma.copies import NOTHING, Copy

A = TypeVar("A")


def upstreams_of(position: int) -> Iterator[int]:
    """The relays from which a relay may read, the nearest first; after them comes the owner."""
    upstream = before(position)
    while upstream is not None:
        yield upstream
        upstream = before(upstream)


class Question(NamedTuple):
    """What somebody wants of a relay."""

    least: int
    """Publication, or a newer one."""
    follows: Copy
    """What he is reading; `NOTHING`: he begins."""
    nbytes: int
    """How much of that he wants to be there; of any other copy he takes what there is."""

    def is_met_by(self, copy: Copy) -> bool:
        """Whether a copy is an answer."""
        if copy.number < self.least or not copy.arrived:
            return False
        return copy.arrived >= self.nbytes or not (self.follows == NOTHING or self.follows.is_same(copy))


class Asked(NamedTuple, Generic[A]):
    """A question that waits, and who has asked it."""

    question: Question
    who: A
    deadline_s: float


class Answer(NamedTuple, Generic[A]):
    """To be sent to who has asked; None: there is no such copy, for lack of time."""

    who: A
    copy: Copy | None
    failure: Exception | None = None


class Relay(Generic[A]):
    """What one relay has, fetches and is asked for."""

    def __init__(self) -> None:
        self.whole = NOTHING
        """The newest copy that has all its bytes."""
        self.coming = NOTHING
        """The copy that is being filled."""
        self.is_fetching = False
        self._waiting: list[Asked[A]] = []

    @property
    def wanted(self) -> int:
        """The newest publication that somebody waits for; 0: nobody does."""
        return max((asked.question.least for asked in self._waiting), default=0)

    def ask(self, question: Question, who: A, deadline_s: float) -> tuple[list[Answer[A]], bool]:
        """Somebody asks.

        Returns:
            Answers; whether a fetch of `wanted` is to be started.
        """
        self._waiting.append(Asked(question, who, deadline_s))
        return self._settle()

    def arrived(self, copy: Copy) -> list[Answer[A]]:
        """More bytes of the copy that is being filled are there."""
        self.coming = copy
        return self._settle()[0]

    def cut_off(self) -> None:
        """What has come so far is worth nothing; the fetch goes on from another upstream."""
        self.coming = NOTHING

    def finished(self, copy: Copy) -> tuple[list[Answer[A]], bool]:
        """The fetch has ended well; see `ask`."""
        self.whole, self.coming, self.is_fetching = copy, NOTHING, False
        return self._settle()

    def overtaken(self, now_s: float) -> tuple[list[Answer[A]], bool]:
        """What was being read is not there any more upstream: see `ask`, for those who still have time."""
        self.coming, self.is_fetching = NOTHING, False
        late = [asked for asked in self._waiting if asked.deadline_s <= now_s]
        self._waiting = [asked for asked in self._waiting if asked.deadline_s > now_s]
        answers, starts = self._settle()
        return [Answer(asked.who, None) for asked in late] + answers, starts

    def failed(self, failure: Exception) -> list[Answer[A]]:
        """The fetch has ended without a copy."""
        self.coming, self.is_fetching = NOTHING, False
        waiting, self._waiting = self._waiting, []
        return [Answer(asked.who, None, failure) for asked in waiting]

    def _settle(self) -> tuple[list[Answer[A]], bool]:
        answers, left = [], []
        for asked in self._waiting:
            copy = next((copy for copy in (self.whole, self.coming) if asked.question.is_met_by(copy)), None)
            if copy is None:
                left.append(asked)
            else:
                answers.append(Answer(asked.who, copy))
        self._waiting = left
        starts = bool(left) and not self.is_fetching
        self.is_fetching = self.is_fetching or starts
        return answers, starts
