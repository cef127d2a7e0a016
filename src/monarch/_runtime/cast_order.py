"""The order of one sender's messages at one receiver, when some go straight and others by the tree.

Straight messages share a link, so they keep their order among themselves. Casts take ways of their own. So

    a straight message says after which cast it was sent                        (`after`, 32 bits of its frame; 0: none)
    a cast says after which cast it was sent, for each receiver                 (`CastOrder`, nearly always one number)
    and when straight messages went to a receiver since that cast, a `CastFence` follows them on their link, and the
    cast waits for it there

and the receiver holds back what is early. A sender that has never used the tree stamps 0, and 0 is never early: that one
comparison is all that such traffic pays.

Pure: no I/O, no clock, no threads.

Rules of this file:
    1. The numbers of one sender's casts grow; to one receiver each names the one before, so they form a chain there.
    2. A message waits only for messages with smaller numbers, so nothing waits in a circle.
    3. Nothing is promised that may not come: whatever is not handed to a receiver is voided there (`Inorder.void`).
    4. A fence is compared with >=, a stamp with <=. Losing one of them can only weaken the order, never hold up a message
       for which all ways have delivered.
    5. A receiver holds no more of a sender than that one's window allows (`flow.py`), because only what was handled gives
       credit.

Read next: `docs/design/casts.md`, "Order"; `cast_ledger.py`.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from monarch._wire.cast_messages import CastOrder

T = TypeVar("T")
Target: TypeAlias = tuple[int, str]
"""Rank in the view, and the proc's uid."""
_MASK = 0xFFFF_FFFF
_HALF = 1 << 31


# --- at the sender -------------------------------------------------------------------------------------------------


class _Group:
    """Receivers whose last cast is the same one."""

    __slots__ = ("dirty", "intact", "last", "lives", "ranks", "targets")

    def __init__(self, targets: Sequence[Target], last: int, lives: list[tuple[int, int, int]]) -> None:
        self.targets = targets
        self.last = last
        self.lives = lives
        self.dirty: set[str] = set()
        """Those that were sent to directly since."""
        self.intact = True
        """It still has all of `targets`."""
        self.ranks: dict[str, int] | None = None


class Ticket(NamedTuple):
    """The place of a cast that is about to be sent."""

    order: CastOrder
    fenced: list[str]
    """Uids of the procs to which `CastFence(order.number)` is to be sent on their links."""
    targets: Sequence[Target]


class Lanes:
    """What a sender remembers of its receivers. Thread: one at a time; whoever sends holds a lock around each call."""

    def __init__(self) -> None:
        self._number = 0
        self._group_of: dict[str, _Group] = {}
        self._lives: dict[str, int] = {}

    def __bool__(self) -> bool:
        """Whether any cast has gone by the tree; if not, every stamp is 0."""
        return bool(self._group_of)

    @property
    def next_number(self) -> int:
        """What the next cast will have, or more."""
        return self._number + 1

    def stamp(self, uid: str) -> int:
        """The `after` of a frame that is about to be sent straight to a proc."""
        group = self._group_of.get(uid)
        if group is None:
            return 0
        group.dirty.add(uid)
        return group.last & _MASK

    def last(self, uid: str) -> int:
        """The number of the last cast to a proc; 0 when there was none.

        When a link to a proc that lives is lost, what was on it is lost, fences too. A new one is opened at once, and
        `CastFence(last(uid))` is the first frame on it.
        """
        group = self._group_of.get(uid)
        return 0 if group is None else group.last

    def prepare(self, targets: Sequence[Target], has_link: Callable[[str], bool]) -> Ticket:
        """The place of a cast to these procs; nothing is remembered before `commit`.

        Args:
            targets: not empty, by rank, each proc once. The same object for the same view: that makes it cheap.
            has_link: whether anything may have been sent straight to a proc before the first cast to it.

        Cost: O(procs that were sent to directly since) when the last cast to each of `targets` was one to all of them;
        else O(targets).
        """
        # 32 bits of it travel as a stamp, where 0 has a meaning of its own.
        self._number += 1 if (self._number + 1) & _MASK else 2
        group = self._group_like(targets)
        if group is None:
            return self._survey(targets, has_link)
        if not group.dirty:
            return Ticket(CastOrder(self._number, group.last, [], [], group.lives), [], targets)
        if group.ranks is None:
            group.ranks = {uid: rank for rank, uid in targets}
        ranks = group.ranks
        fenced = sorted(group.dirty, key=ranks.__getitem__)
        return Ticket(CastOrder(self._number, group.last, [], _spans(ranks[uid] for uid in fenced), group.lives), fenced, targets)

    def _group_like(self, targets: Sequence[Target]) -> _Group | None:
        """The group of exactly these receivers, if all of them had their last cast together."""
        group = self._group_of.get(targets[0][1])
        if group is None or not group.intact:
            return None
        return group if group.targets is targets or group.targets == targets else None

    def _survey(self, targets: Sequence[Target], has_link: Callable[[str], bool]) -> Ticket:
        afters: list[int] = []
        fenced: list[Target] = []
        for target in targets:
            uid = target[1]
            group = self._group_of.get(uid)
            afters.append(0 if group is None else group.last)
            if has_link(uid) if group is None else uid in group.dirty:
                fenced.append(target)
        base = Counter(afters).most_common(1)[0][0]
        others = _valued_spans((rank, after) for (rank, _), after in zip(targets, afters, strict=True) if after != base)
        lives: list[tuple[int, int, int]] = []
        if self._lives:
            lives = _valued_spans((rank, self._lives[uid]) for rank, uid in targets if uid in self._lives)
        order = CastOrder(self._number, base, others, _spans(rank for rank, _ in fenced), lives)
        return Ticket(order, [uid for _, uid in fenced], targets)

    def commit(self, ticket: Ticket) -> None:
        """The cast will be sent, come what may; harmless twice in a row."""
        targets, number = ticket.targets, ticket.order.number
        group = self._group_like(targets)
        if group is not None:
            group.dirty = set()
            group.last = number
            return
        new = _Group(targets, number, ticket.order.lives)
        for _, uid in targets:
            old = self._group_of.get(uid)
            if old is not None:
                old.intact = False
            self._group_of[uid] = new

    def renew(self, uid: str, attempt: int) -> int:
        """A proc will be, or was, started anew: what is sent from now on is for that process, which has had nothing yet.

        Args:
            attempt: how many processes there were under its id before.

        Returns:
            The last cast to the process before; when there is a link to the proc, `CastVoid` with it is the next frame there,
            for messages that went straight to the new process before we knew of it wait for casts to the old one. 0: none.
        """
        last = self.last(uid)
        self.forget(uid)
        self._lives[uid] = attempt
        return last

    def forget(self, uid: str) -> None:
        """A proc is gone."""
        group = self._group_of.pop(uid, None)
        if group is not None:
            group.intact = False
            group.dirty.discard(uid)
        self._lives.pop(uid, None)


def _spans(ranks: Iterable[int]) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank:
            spans[-1] = (spans[-1][0], rank + 1)
        else:
            spans.append((rank, rank + 1))
    return spans


def _valued_spans(values: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    spans: list[tuple[int, int, int]] = []
    for rank, value in values:
        if spans and spans[-1][1:] == (rank, value):
            spans[-1] = (spans[-1][0], rank + 1, value)
        else:
            spans.append((rank, rank + 1, value))
    return spans


# --- on the way ----------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """The place of a cast at one receiver."""

    after: int
    fenced: bool
    life: int


def place_of(order: CastOrder, rank: int) -> Place:
    """What a cast says for one rank."""
    after, fenced, life = order.after, False, 0
    if order.others:
        span = order.others[bisect_right(order.others, rank, key=_start) - 1]
        after = span[2] if span[0] <= rank < span[1] else after
    if order.fenced:
        start, stop = order.fenced[bisect_right(order.fenced, rank, key=_start) - 1]
        fenced = start <= rank < stop
    if order.lives:
        span = order.lives[bisect_right(order.lives, rank, key=_start) - 1]
        life = span[2] if span[0] <= rank < span[1] else 0
    return Place(after, fenced, life)


def within(order: CastOrder, low: int, high: int) -> CastOrder:
    """What a cast says for the ranks from `low` up to `high`: all that a branch has to carry."""
    if not (order.others or order.fenced or order.lives):
        return order
    return CastOrder(order.number, order.after, _cut(order.others, low, high), _cut(order.fenced, low, high), _cut(order.lives, low, high))


Span = TypeVar("Span", tuple[int, int], tuple[int, int, int])


def _cut(spans: list[Span], low: int, high: int) -> list[Span]:
    # Spans are sorted and disjoint. Those at the edges may reach beyond; nobody outside asks.
    first = max(bisect_right(spans, low, key=_start) - 1, 0)
    return [span for span in spans[first : bisect_right(spans, high - 1, key=_start)] if span[1] > low]


def _start(span: Sequence[int]) -> int:
    return span[0]


# --- at the agent of the receiver ----------------------------------------------------------------------------------


class Admission(Enum):
    """What an agent does with a cast for one of its procs."""

    HAND = auto()
    """Hand it to the process that runs."""
    WAIT = auto()
    """Its sender knows already that the process is being replaced: keep it for the next one."""
    REFUSE = auto()
    """It was meant for the process before: answer with that one's `ProcExited`, and void it at the one that runs."""


class Handover:
    """What the agent of a proc has handed to the processes under its id. Memory: one entry per sender."""

    __slots__ = ("_handed", "_past", "attempt")

    def __init__(self) -> None:
        self.attempt = 0
        """How many processes there were under the id before the one that runs."""
        self._handed: dict[str, tuple[int, int]] = {}
        self._past: dict[str, tuple[int, int]] = {}

    def admit(self, sender: str, epoch: int, number: int, life: int, *, is_owner: bool = False) -> Admission:
        """What to do with a cast.

        Args:
            life: what the cast says for this rank.
            is_owner: the sender is told of every end of the proc, also when it has cast nothing to it.
        """
        if life > self.attempt:
            return Admission.WAIT
        if life < self.attempt and (is_owner or self._past.get(sender, (0, 0))[0] == epoch):
            # Who has never cast to the process before doesn't wait for that one, and may not know that there was one.
            return Admission.REFUSE
        self._handed[sender] = max(self._handed.get(sender, (0, 0)), (epoch, number))
        return Admission.HAND

    def restart(self, attempt: int) -> list[tuple[str, int, int]]:
        """Another process runs now; the (sender, epoch, number) to void there before it is handed anything."""
        self.attempt = attempt
        for sender, last in self._handed.items():
            self._past[sender] = max(self._past.get(sender, (0, 0)), last)
        self._handed = {}
        return [(sender, epoch, number) for sender, (epoch, number) in self._past.items()]

    def forget(self, sender: str) -> None:
        """A sender is gone."""
        self._handed.pop(sender, None)
        self._past.pop(sender, None)


# --- at the receiver -----------------------------------------------------------------------------------------------


class Inorder(Generic[T]):
    """Puts one sender's messages to this process into the order in which they were sent. Thread: net loop.

    Frames with stamp 0 need not come here: they are never early. Every method returns what may be handled now, in order.
    """

    __slots__ = ("_casts", "_directs", "_fence", "_last", "_numbers", "_waived", "epoch", "lost")

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch
        """Which process under the sender's id this is the order of."""
        self.lost = False
        self._last = 0
        self._fence = 0
        self._waived = False
        self._directs: deque[tuple[int, T]] = deque()
        self._casts: dict[int, tuple[int, bool, T]] = {}
        self._numbers: list[int] = []
        """A heap of the keys of `_casts`."""

    def __len__(self) -> int:
        """How many messages are held back."""
        return len(self._directs) + len(self._casts)

    def begin(self, epoch: int) -> list[T]:
        """A link from the sender, of that epoch, has said Hello. What is returned was held for the process before, and is lost."""
        return self._turn_to(epoch)

    def _turn_to(self, epoch: int) -> list[T]:
        if epoch <= self.epoch:
            return []
        held = self._take_all()
        self.epoch, self.lost, self._last, self._fence, self._waived = epoch, False, 0, 0, False
        return held

    def on_direct(self, after: int, item: T) -> list[T]:
        """A message that came straight.

        Args:
            after: its stamp, 32 bits; a cast that many thousand millions back is taken for a later one.
        """
        ahead = (after - self._last) & _MASK
        if ahead == 0 or after == 0 or (ahead >= _HALF and self._last):
            return [item]
        if self.lost:
            return []
        self._directs.append((self._last + ahead, item))
        return []

    def on_fence(self, number: int) -> list[T]:
        """All that was sent straight before that cast has come."""
        self._fence = max(self._fence, number)
        return self._release() if self._casts else []

    def on_cast(self, epoch: int, number: int, after: int, fenced: bool, item: T) -> list[T]:
        """A message that came by the tree; dropped when it came before, or from a process that is gone."""
        self._turn_to(epoch)  # what that one held nobody waits for: its end has been told, or will be
        if epoch < self.epoch or number <= self._last or number in self._casts or self.lost:
            return []
        if after <= self._last and (not fenced or self._fence >= number or self._waived) and not self._casts and not self._directs:
            self._last = number
            return [item]
        self._casts[number] = (after, fenced, item)
        heapq.heappush(self._numbers, number)
        return self._release()

    def void(self, epoch: int, number: int) -> list[T]:
        """Casts up to that one will not come any more."""
        if epoch < self.epoch:
            return []
        self._turn_to(epoch)
        self._last = max(self._last, number)
        return self._release()

    def close(self) -> list[T]:
        """The sender is gone and its link read to the end: no fence comes any more, only casts that are in the tree."""
        self._waived = True
        return self._release()

    def lose(self) -> list[T]:
        """What the sender had in the tree has had its time, too. What is returned misses what was sent before it, and is dropped."""
        self.lost = True
        return self._take_all()

    def _take_all(self) -> list[T]:
        held = [item for _, item in self._directs] + [self._casts[number][2] for number in sorted(self._casts)]
        self._directs.clear()
        self._casts.clear()
        self._numbers.clear()
        return held

    def _release(self) -> list[T]:
        ready: list[T] = []
        while True:
            while self._directs and self._directs[0][0] <= self._last:
                ready.append(self._directs.popleft()[1])
            if not self._numbers:
                return ready
            number = self._numbers[0]
            after, fenced, item = self._casts[number]
            if number > self._last:  # else it was voided
                if after > self._last or (fenced and self._fence < number and not self._waived):
                    return ready
                self._last = number
                ready.append(item)
            del self._casts[heapq.heappop(self._numbers)]
