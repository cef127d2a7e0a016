"""The order of casts and straight messages: exact under any delay, and never a message held for ever."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch._runtime.cast_order import Admission, Handover, Inorder, Lanes, place_of, within
from monarch._wire import messages
from monarch._wire.cast_messages import CastOrder

seeds = st.integers(0, 2**32)


class Sender:
    """One sending process, its links, and the casts of it that are in the tree."""

    def __init__(self, name: str, epoch: int, procs: list[str]) -> None:
        self.name = name
        self.epoch = epoch
        self.lanes = Lanes()
        self.linked: set[str] = set()
        self.links: dict[str, deque] = {uid: deque() for uid in procs}
        self.tree: list[tuple] = []
        self.sent: dict[str, list[str]] = {uid: [] for uid in procs}
        self.count = 0

    def text(self, kind: str) -> str:
        self.count += 1
        return f"{self.name}.{self.epoch}.{self.count}.{kind}"

    def direct(self, uid: str) -> str:
        text = self.text("direct")
        self.links[uid].append((self.lanes.stamp(uid), text))
        self.linked.add(uid)
        self.sent[uid].append(text)
        return text

    def cast(self, targets, copies: int = 1) -> str:
        text = self.text("cast")
        ticket = self.lanes.prepare(targets, self.linked.__contains__)
        self.lanes.commit(ticket)
        for uid in ticket.fenced:
            self.links[uid].append((None, ticket.order.number))
        order = messages.decode_control(messages.encode(messages.Cast("s", 0, 0, True, b"", b"", ticket.order))).order
        for rank, uid in targets:
            self.tree += [(uid, order.number, place_of(within(order, rank, rank + 1), rank), text)] * copies
            self.sent[uid].append(text)
        return text

    def break_link(self, uid: str) -> list[str]:
        """The link to a proc that lives is replaced; the messages that were on it are lost."""
        lost = [item for after, item in self.links[uid] if after is not None]
        self.links[uid].clear()
        if uid in self.linked and self.lanes.last(uid):
            self.links[uid].append((None, self.lanes.last(uid)))
        return lost


def hear(inorder: Inorder, after, item) -> list:
    if after == "void":
        return inorder.void(1, item)
    return inorder.on_fence(item) if after is None else inorder.on_direct(after, item)


def views(procs: list[str], rng: random.Random):
    """Some views of the procs; one of them is used again and again."""
    everybody = tuple(enumerate(procs))
    while True:
        part = tuple(enumerate(rng.sample(procs, rng.randint(1, len(procs)))))
        yield from rng.choice([[everybody] * 3, [part], [part] * 2, [everybody, part]])


def run(rng: random.Random, senders: list[Sender], steps: int, do, receive) -> None:
    """Let senders act and the network deliver in any order, then deliver all that is under way."""
    for _ in range(steps):
        if rng.random() < 0.5:
            do(rng.choice(senders))
        else:
            deliver_one(rng, senders, receive)
    while deliver_one(rng, senders, receive):
        pass


def deliver_one(rng: random.Random, senders: list[Sender], receive) -> bool:
    ways = [(sender, uid) for sender in senders for uid, link in sender.links.items() if link]
    ways += [(sender, None) for sender in senders if sender.tree]
    if not ways:
        return False
    sender, uid = rng.choice(ways)
    if uid is not None:
        receive(sender, uid, "link", sender.links[uid].popleft())
    else:
        uid, *cast = sender.tree.pop(rng.randrange(len(sender.tree)))
        receive(sender, uid, "tree", cast)
    return True


@settings(max_examples=150)
@given(seed=seeds)
def test_every_message_comes_exactly_once_and_in_the_order_of_its_sender(seed):
    rng = random.Random(seed)
    procs = [f"p{index}" for index in range(rng.randint(1, 4))]
    senders = [Sender(name, 1, procs) for name in "ab"]
    inorders = {(sender.name, uid): Inorder(1) for sender in senders for uid in procs}
    got = {key: [] for key in inorders}
    lost: set[str] = set()
    view = views(procs, rng)

    def do(sender):
        what = rng.random()
        if what < 0.5:
            sender.direct(rng.choice(procs))
        elif what < 0.95:
            sender.cast(next(view), copies=rng.choice([1, 1, 2]))
        else:
            lost.update(sender.break_link(rng.choice(procs)))

    def receive(sender, uid, way, item):
        inorder = inorders[sender.name, uid]
        if way == "link":
            got[sender.name, uid] += hear(inorder, *item)
        else:
            number, place, text = item
            got[sender.name, uid] += inorder.on_cast(1, number, place.after, place.fenced, text)

    run(rng, senders, 40, do, receive)
    for sender in senders:
        for uid in procs:
            assert got[sender.name, uid] == [text for text in sender.sent[uid] if text not in lost]
            assert not len(inorders[sender.name, uid])


@settings(max_examples=150)
@given(seed=seeds, is_owner=st.booleans())
def test_a_proc_that_is_started_anew_gets_what_was_sent_for_it_and_nothing_is_held_for_ever(seed, is_owner):
    rng = random.Random(seed)
    procs = ["p0", "p1", "p2"]
    sender = Sender("a", 1, procs)
    handovers = {uid: Handover() for uid in procs}
    inorders = {uid: Inorder(1) for uid in procs}
    parked: dict[str, list] = {uid: [] for uid in procs}
    got: dict[str, list[str]] = {uid: [] for uid in procs}
    fresh: dict[str, list[str]] = {uid: [] for uid in procs}  # sent since the sender knows of the last end of the proc
    told: dict[str, int] = dict.fromkeys(procs, 0)
    cast_to: set[str] = set()
    view = views(procs, rng)

    def restart(uid):
        sender.links[uid].clear()
        if uid in sender.linked and sender.lanes.last(uid):
            sender.links[uid].append((None, sender.lanes.last(uid)))
        got[uid], inorders[uid] = [], Inorder(1)
        for _, epoch, number in handovers[uid].restart(handovers[uid].attempt + 1):
            got[uid] += inorders[uid].void(epoch, number)
        waiting, parked[uid] = parked[uid], []
        for item in waiting:
            receive(sender, uid, "tree", item)
        if is_owner:
            tell(uid, handovers[uid].attempt)

    def tell(uid, attempt):
        if told[uid] < attempt:
            told[uid] = attempt
            fresh[uid] = []
            last = sender.lanes.renew(uid, attempt)
            if last and uid in sender.linked:
                sender.links[uid].append(("void", last))

    def do(sender):
        what = rng.random()
        if what < 0.1:
            restart(rng.choice(procs))
        elif what < 0.5:
            uid = rng.choice(procs)
            fresh[uid].append(sender.direct(uid))
        else:
            targets = next(view)
            text = sender.cast(targets, copies=rng.choice([1, 2]))
            for _, uid in targets:
                fresh[uid].append(text)
                cast_to.add(uid)

    def receive(sender, uid, way, item):
        if way == "link":
            got[uid] += hear(inorders[uid], *item)
            return
        number, place, text = item
        match handovers[uid].admit("a", 1, number, place.life, is_owner=is_owner):
            case Admission.HAND:
                got[uid] += inorders[uid].on_cast(1, number, place.after, place.fenced, text)
            case Admission.WAIT:
                parked[uid].append(item)
            case Admission.REFUSE:
                got[uid] += inorders[uid].void(1, number)
                tell(uid, handovers[uid].attempt)

    run(rng, [sender], 40, do, receive)
    for uid in procs:
        assert not len(inorders[uid])
        assert len(set(got[uid])) == len(got[uid])
        places = [sender.sent[uid].index(text) for text in got[uid]]
        assert places == sorted(places)
        if told[uid] == handovers[uid].attempt:
            lost_on_link = [text for text in fresh[uid] if text not in got[uid] and text.endswith("cast")]
            assert not lost_on_link
            if told[uid] and is_owner:
                assert got[uid] == fresh[uid]


def test_a_cast_for_the_process_that_is_to_come_waits_for_it():
    handover = Handover()
    assert handover.admit("a", 1, 1, 1) is Admission.WAIT
    assert handover.restart(1) == []
    assert handover.admit("a", 1, 1, 1) is Admission.HAND


def test_a_sender_that_never_knew_the_process_before_is_not_refused():
    handover = Handover()
    handover.admit("a", 1, 5, 0)
    assert handover.restart(1) == [("a", 1, 5)]
    assert handover.admit("b", 1, 1, 0) is Admission.HAND
    assert handover.admit("a", 1, 6, 0) is Admission.REFUSE
    assert handover.admit("a", 2, 1, 0) is Admission.HAND  # the sender was started anew, too
    assert handover.admit("c", 1, 1, 0, is_owner=True) is Admission.REFUSE
    handover.forget("a")
    assert handover.admit("a", 1, 7, 0) is Admission.HAND


# --- the sender ------------------------------------------------------------------------------------------------------


def prepared(lanes: Lanes, targets, links=()):
    ticket = lanes.prepare(targets, links.__contains__)
    lanes.commit(ticket)
    return ticket


def test_a_sender_that_casts_to_the_same_procs_says_one_number_for_all():
    lanes, targets = Lanes(), tuple((rank, f"p{rank}") for rank in range(100))
    assert not lanes and lanes.stamp("p3") == 0
    assert prepared(lanes, targets).order == CastOrder(1, 0)
    assert prepared(lanes, tuple(targets)).order == CastOrder(2, 1)
    assert lanes.stamp("p3") == 2 and lanes.stamp("other") == 0
    ticket = prepared(lanes, targets)
    assert (ticket.order, ticket.fenced) == (CastOrder(3, 2, [], [(3, 4)]), ["p3"])
    assert prepared(lanes, targets).order == CastOrder(4, 3)


def test_a_cast_to_a_slice_leaves_one_exception_and_the_next_to_all_none():
    lanes, targets = Lanes(), tuple((rank, f"p{rank}") for rank in range(8))
    prepared(lanes, targets)
    prepared(lanes, tuple((index, f"p{rank}") for index, rank in enumerate(range(2, 5))))
    assert prepared(lanes, targets).order == CastOrder(3, 1, [(2, 5, 2)])
    assert prepared(lanes, targets).order == CastOrder(4, 3)


def test_the_first_cast_is_fenced_where_something_went_straight_before():
    ticket = prepared(Lanes(), ((0, "a"), (1, "b"), (2, "c")), links={"b", "c"})
    assert ticket.fenced == ["b", "c"] and ticket.order.fenced == [(1, 3)]


def test_a_cast_that_was_not_sent_leaves_nothing_behind():
    lanes, targets = Lanes(), ((0, "a"),)
    lanes.prepare(targets, set().__contains__)
    assert not lanes and lanes.stamp("a") == 0
    assert prepared(lanes, targets).order.after == 0


def test_committing_twice_is_committing_once():
    lanes, targets = Lanes(), ((0, "a"), (1, "b"))
    lanes.commit(prepared(lanes, targets))
    assert prepared(lanes, targets).order == CastOrder(2, 1)


def test_a_restarted_proc_is_told_apart_and_a_lost_one_forgotten():
    lanes, targets = Lanes(), ((0, "a"), (1, "b"))
    prepared(lanes, targets)
    assert lanes.renew("c", 1) == 0 and lanes.renew("b", 1) == 1
    assert lanes.stamp("b") == 0
    assert prepared(lanes, targets).order == CastOrder(2, 1, [(1, 2, 0)], [], [(1, 2, 1)])
    assert prepared(lanes, targets).order == CastOrder(3, 2, [], [], [(1, 2, 1)])
    lanes.forget("b")
    assert prepared(lanes, targets).order == CastOrder(4, 3, [(1, 2, 0)])


def test_no_number_has_the_stamp_of_none():
    lanes, targets = Lanes(), ((0, "a"),)
    lanes._number = 2**32 - 2
    assert [prepared(lanes, targets).order.number for _ in range(2)] == [2**32 - 1, 2**32 + 1]


spans = st.lists(st.integers(0, 30), unique=True, max_size=8).map(sorted).map(lambda cuts: list(zip(cuts[::2], cuts[1::2], strict=False)))


@given(others=spans, fenced=spans, lives=spans, low=st.integers(0, 30), width=st.integers(1, 30))
def test_a_branch_is_told_all_that_concerns_its_ranks(others, fenced, lives, low, width):
    order = CastOrder(9, 1, [(a, b, 7) for a, b in others], fenced, [(a, b, 2) for a, b in lives])
    cut = within(order, low, low + width)
    for rank in range(low, low + width):
        inside = [any(a <= rank < b for a, b in part) for part in (others, fenced, lives)]
        assert place_of(cut, rank) == place_of(order, rank) == (7 if inside[0] else 1, inside[1], 2 if inside[2] else 0)
    assert all(a < low + width and b > low for a, b, *_ in [*cut.others, *cut.fenced, *cut.lives])


# --- the receiver ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [2**31 - 1, 2**31, 2**32 - 1, 2**32 + 1, 2**40 + 5])
def test_stamps_of_32_bits_mean_the_right_cast(last):
    inorder = Inorder()
    inorder.void(0, last)
    assert inorder.on_direct(last & 0xFFFFFFFF, "now") == ["now"]
    assert inorder.on_direct((last - 1) & 0xFFFFFFFF or 1, "before") == ["before"]
    early = last + 3
    assert inorder.on_direct(early & 0xFFFFFFFF, "early") == []
    assert inorder.on_cast(0, early, last, False, "cast") == ["cast", "early"]


def test_a_sender_started_anew_begins_anew_and_what_its_predecessor_sent_late_is_dropped():
    inorder = Inorder(1)
    inorder.on_cast(1, 5, 0, False, "old")
    assert inorder.on_direct(7, "held") == []
    assert inorder.on_cast(2, 1, 0, False, "new") == ["new"]
    assert inorder.begin(2) == [] and inorder.on_cast(1, 7, 5, False, "late") == [] and inorder.void(1, 9) == []
    assert inorder.on_direct(1, "after it") == ["after it"]


def test_a_hello_of_a_new_process_hands_back_what_was_held_for_the_old():
    inorder = Inorder(1)
    inorder.on_direct(3, "direct")
    inorder.on_cast(1, 5, 3, False, "cast")
    assert inorder.begin(1) == [] and inorder.begin(2) == ["direct", "cast"] and not len(inorder)


def test_when_the_sender_is_gone_its_casts_wait_for_no_fence_and_in_the_end_for_nothing():
    inorder = Inorder(1)
    assert inorder.on_cast(1, 1, 0, True, "fenced") == []
    inorder.on_direct(2, "after one that may still come")
    assert inorder.close() == ["fenced"]
    assert inorder.lose() == ["after one that may still come"]
    assert inorder.on_cast(1, 2, 1, False, "too late") == [] and inorder.on_direct(3, "too late") == []
    assert inorder.on_cast(2, 1, 0, False, "a new process") == ["a new process"]


def test_many_casts_that_come_backwards_are_released_in_order():
    inorder = Inorder()
    for number in range(5000, 1, -1):
        assert inorder.on_cast(0, number, number - 1, False, number) == []
    assert inorder.on_cast(0, 1, 0, False, 1) == list(range(1, 5001)) and not len(inorder)
