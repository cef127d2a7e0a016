"""The caller's ledger, and casts as a whole: a tree of agents that die in the middle, and nothing lost, doubled or out of order."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch._base.ids import ProcRef
from monarch._runtime import cast_tree
from monarch._runtime.cast_ledger import Entry, Ledger
from monarch._runtime.cast_merge import Answer, Batch, Relay
from monarch._runtime.cast_order import Inorder, Lanes, place_of, within
from monarch._runtime.cast_tree import plan, read_tree, tree_bytes


def groups_of(num_hosts: int, per_host: int = 2) -> dict[str, list[tuple[int, ProcRef]]]:
    groups: dict[str, list[tuple[int, ProcRef]]] = {}
    for rank in range(num_hosts * per_host):
        agent = f"h{rank // per_host}"
        groups.setdefault(agent, []).append((rank, ProcRef(f"p-{rank}", f"{agent}/{rank}", agent)))
    return groups


class Cast:
    """What travels down."""

    def __init__(self, text: str, turn: int, tree: bytes, order, merged: bool, done: int) -> None:
        self.text, self.turn, self.tree, self.order, self.merged, self.done = text, turn, tree, order, merged, done


class Agent:
    """What the runtime will do with a relay."""

    def __init__(self, world: World, address: str) -> None:
        self.world = world
        self.address = address
        self.relays: dict[int, tuple[Relay, cast_tree.Part]] = {}
        self.parents: dict[int, str] = {}
        self.done = 0

    def up(self, number: int, what: str, content) -> None:
        self.world.send(self.address, self.parents[number], (what, number, content))

    def on_cast(self, source: str, cast: Cast) -> None:
        number = cast.order.number
        self.done = max(self.done, cast.done)
        for old in [old for old in self.relays if old < self.done]:
            del self.relays[old]
        if number < self.done:
            return
        known = self.relays.get(number)
        if known is not None:
            # Whoever is not, or no longer, on the way of this cast is not to wait for it.
            is_later = cast.turn > known[0].turn
            if source != self.parents[number]:
                self.world.send(self.address, self.parents[number] if is_later else source, ("acked", number, None))
            if not is_later:
                return
        self.parents[number] = source
        part = read_tree(cast.tree)
        below = {child.agent: child.num_ranks for child in part.children}
        if known is None:
            relay = Relay([rank for rank, _ in part.procs], below, merged=cast.merged)
            relay.turn = cast.turn
            self.relays[number] = relay, part
            for rank, ref in part.procs:
                self.world.send(self.address, ref.uid, ("handed", number, (rank, place_of(cast.order, rank), cast.text, cast.merged)))
        else:
            relay = known[0]
            self.relays[number] = relay, part
            acked, batches = relay.repeat(cast.turn, below)
            for batch in batches:
                self.up(number, "replies", batch)
            if acked:
                self.up(number, "acked", None)
        for child in part.children:
            on = Cast(cast.text, cast.turn, child.tree, within(cast.order, child.low, child.high), cast.merged, cast.done)
            if not self.world.send(self.address, child.agent, ("cast", number, on)):
                self.on_child_lost(child.agent, number)
        if known is None and relay.on_handed():
            self.up(number, "acked", None)

    def on_child_lost(self, child: str, number: int) -> None:
        lost = self.relays[number][0].on_child_lost(child)
        if lost.broken:
            self.up(number, "broken", child)
        for batch in lost.leaving:
            self.up(number, "replies", batch)
        if lost.acked:
            self.up(number, "acked", None)

    def receive(self, source: str, what: str, number: int, content) -> None:
        if what == "cast":
            self.on_cast(source, content)
        elif what == "closed":
            for number, (_, part) in list(self.relays.items()):
                if any(child.agent == source for child in part.children):
                    self.on_child_lost(source, number)
        elif number in self.relays:
            relay = self.relays[number][0]
            if what == "reply":
                rank, payload = content
                leaving = relay.on_reply(rank, 0, payload, ())
            elif what == "replies":
                leaving = relay.on_batch(source, content)
            elif what == "broken":
                self.up(number, "broken", content)
                return
            else:
                if relay.on_acknowledged(source):
                    self.up(number, "acked", None)
                return
            for batch in leaving:
                self.up(number, "replies", batch)

    def flush(self) -> None:
        for number, (relay, _) in self.relays.items():
            for batch in relay.flush():
                self.up(number, "replies", batch)


class World:
    """One caller, agents and procs; every pair has a connection that keeps its order, and nothing else does."""

    def __init__(self, rng: random.Random, num_hosts: int, fanout: int) -> None:
        self.rng = rng
        self.fanout = fanout
        self.groups = groups_of(num_hosts)
        self.agents = {address: Agent(self, address) for address in self.groups}
        self.home = {ref.uid: address for address, members in self.groups.items() for _, ref in members}
        self.dead: set[str] = set()
        self.known_dead: set[str] = set()
        self.cut: set[tuple[str, str]] = set()
        self.wires: dict[tuple[str, str], deque] = {}
        self.lanes, self.ledger = Lanes(), Ledger()
        self.inorders = {uid: Inorder() for uid in self.home}
        self.linked: set[str] = set()
        self.sent: dict[str, list[str]] = {uid: [] for uid in self.home}
        self.got: dict[str, list[str]] = {uid: [] for uid in self.home}
        self.answered: dict[int, list[int]] = {}
        self.asked: dict[int, list[int]] = {}
        self.targets: dict[frozenset, tuple] = {}
        self.count = 0

    # --- the network -------------------------------------------------------------------------------------------------

    def send(self, source: str, target: str, message) -> bool:
        if {self.home.get(source, source), self.home.get(target, target)} & self.dead or (source, target) in self.cut:
            return False
        self.wires.setdefault((source, target), deque()).append(message)
        return True

    def deliver_one(self) -> bool:
        wires = [wire for wire, queue in self.wires.items() if queue]
        if not wires:
            return False
        source, target = self.rng.choice(wires)
        what, number, content = self.wires[source, target].popleft()
        if self.home.get(target, target) in self.dead:
            return True
        if target == "caller":
            self.on_news(source, what, number, content)
        elif target in self.agents:
            self.agents[target].receive(source, what, number, content)
        else:
            self.on_proc(target, what, number, content)
        return True

    def kill(self, agent: str) -> None:
        self.dead.add(agent)
        for (source, target), queue in self.wires.items():
            if self.home.get(source, source) == agent:
                while queue and self.rng.random() < 0.5:
                    queue.pop()
            elif self.home.get(target, target) == agent:
                queue.clear()
        for other in [*self.agents, "caller"]:
            if other not in self.dead:
                self.wires.setdefault((agent, other), deque()).append(("closed", 0, None))

    def part(self, agent: str, other: str) -> None:
        """Two agents that live can no longer reach each other; what was under way between them is lost."""
        for source, target in ((agent, other), (other, agent)):
            if source not in self.dead and target not in self.dead and (source, target) not in self.cut:
                self.cut.add((source, target))
                self.wires[source, target] = deque([("closed", 0, None)])

    # --- the caller --------------------------------------------------------------------------------------------------

    def text(self, kind: str) -> str:
        self.count += 1
        return f"{self.count}.{kind}"

    def direct(self, uid: str) -> None:
        if self.home[uid] in self.known_dead:
            return
        text = self.text("direct")
        self.send("caller", uid, ("direct", self.lanes.stamp(uid), text))
        self.linked.add(uid)
        self.sent[uid].append(text)

    def cast(self, hosts: list[str], *, merged: bool) -> None:
        groups = {host: self.groups[host] for host in hosts if host not in self.known_dead}
        if not groups:
            return
        text = self.text("cast")
        made = plan(groups, self.fanout, self.ledger.avoid)
        members = sorted(member for members in groups.values() for member in members)
        targets = self.targets.setdefault(frozenset(groups), tuple((rank, ref.uid) for rank, ref in members))
        ticket = self.lanes.prepare(targets, self.linked.__contains__)
        entry = Entry(ticket.order.number, made.branches, targets, (text, made.names, ticket.order, merged), merged=merged)
        self.ledger.open(entry)
        self.lanes.commit(ticket)
        for uid in ticket.fenced:
            self.send("caller", uid, ("fence", ticket.order.number, None))
        self.answered[entry.number] = []
        self.asked[entry.number] = [rank for rank, _ in targets] if merged else []
        for _, uid in targets:
            self.sent[uid].append(text)
        self.hand_out(entry, made.branches)

    def hand_out(self, entry: Entry, branches) -> None:
        text, names, order, merged = entry.content
        text = "never to be seen" if entry.is_delivered else text
        floor = self.ledger.floor(self.lanes.next_number)
        for branch in branches:
            ranks = cast_tree.ranks_of(branch)
            cast = Cast(text, entry.turn, tree_bytes(names, branch), within(order, min(ranks), max(ranks) + 1), merged, floor)
            self.send("caller", branch.agent, ("cast", entry.number, cast))

    def on_news(self, source: str, what: str, number: int, content) -> None:
        if what in ("closed", "broken"):
            gone = what == "closed"
            agent = source if gone else content
            self.known_dead |= {agent} if gone else set()
            for entry, branches in self.ledger.on_lost(agent, gone=gone):
                self.hand_out(entry, branches)
            if gone:
                for _, ref in self.groups[agent]:
                    self.lanes.forget(ref.uid)
                    self.ledger.on_proc_lost(ref.uid)
            return
        entry = self.ledger.entry(number)
        if entry is None:
            return
        if what == "acked":
            entry.on_acked(source)
        else:
            self.answered[number] += [answer.rank for answer in entry.on_batch(content)]
        self.ledger.settle(entry)

    # --- the procs ---------------------------------------------------------------------------------------------------

    def on_proc(self, uid: str, what: str, number: int, content) -> None:
        inorder = self.inorders[uid]
        if what == "direct":
            ready = inorder.on_direct(number, (content, None))
        elif what == "fence":
            ready = inorder.on_fence(number)
        else:
            rank, place, text, merged = content
            ready = inorder.on_cast(0, number, place.after, place.fenced, (text, (number, rank) if merged else None))
        for text, reply in ready:
            self.got[uid].append(text)
            if reply is not None:
                self.send(uid, self.home[uid], ("reply", reply[0], (reply[1], text.encode())))


@pytest.mark.parametrize("deaths, cuts", [(0, 0), (1, 0), (3, 0), (0, 2), (2, 2)])
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32))
def test_whatever_dies_the_others_get_every_message_once_in_order_and_every_answer_comes(deaths, cuts, seed):
    rng = random.Random(seed)
    world = World(rng, rng.randint(1, 9), rng.choice([2, 3]))
    hosts = sorted(world.agents)
    for _ in range(60):
        what = rng.random()
        if what < 0.12:
            world.cast(hosts if rng.random() < 0.6 else rng.sample(hosts, rng.randint(1, len(hosts))), merged=rng.random() < 0.7)
        elif what < 0.25:
            world.direct(rng.choice(list(world.home)))
        elif what < 0.3:
            rng.choice(list(world.agents.values())).flush()
        elif what < 0.35 and deaths:
            deaths -= 1
            world.kill(rng.choice(hosts))
        elif what < 0.4 and cuts and len(hosts) > 1:
            cuts -= 1
            world.part(*rng.sample(hosts, 2))
        else:
            world.deliver_one()
    for _ in range(12):
        while world.deliver_one():
            pass
        for agent in world.agents.values():
            if agent.address not in world.dead:
                agent.flush()
    for uid, address in world.home.items():
        if address not in world.dead:
            assert world.got[uid] == world.sent[uid]
            assert not len(world.inorders[uid])
    for number, asked in world.asked.items():
        answered = world.answered[number]
        living = [rank for rank in asked if f"h{rank // 2}" not in world.dead]
        assert len(set(answered)) == len(answered) and set(living) <= set(answered) <= set(asked)
    assert len(world.ledger) == 0
    assert world.ledger.floor(world.lanes.next_number) == world.lanes.next_number


# --- one rule at a time ----------------------------------------------------------------------------------------------


def entry_of(num_hosts: int, *, fanout: int = 2, merged: bool = False, number: int = 1) -> Entry[str]:
    groups = groups_of(num_hosts, 1)
    targets = tuple((rank, f"p-{rank}") for rank in range(num_hosts))
    return Entry(number, plan(groups, fanout).branches, targets, "content", merged=merged)


def answers(*ranks: int) -> Batch:
    batch = Batch()
    for rank in ranks:
        batch.add(Answer(rank, 0, b"", ()))
    return batch


def test_a_cast_without_answers_is_over_when_every_branch_is_acknowledged():
    entry = entry_of(6)
    entry.on_acked("h0")
    assert not entry.is_over and not entry.is_delivered
    entry.on_acked("h3")
    assert entry.is_over and entry.is_delivered


def test_a_call_is_over_when_every_rank_has_answered_or_is_gone():
    entry = entry_of(3, merged=True)
    for agent in ("h0", "h1"):
        entry.on_acked(agent)
    assert entry.is_delivered and not entry.is_over
    assert [answer.rank for answer in entry.on_batch(answers(0, 1, 0, 7))] == [0, 1]
    assert entry.on_proc_lost("p-1") == [] and entry.on_proc_lost("p-2") == [2] and entry.is_over


@pytest.mark.parametrize("gone", [True, False])
def test_a_lost_root_is_replaced_by_what_was_below_it(gone):
    entry = entry_of(6)
    again = entry.on_lost("h0", gone=gone)
    assert [branch.agent for branch in again] == ([] if gone else ["h0"]) + ["h1", "h2"]
    assert all(not branch.children for branch in again) and entry.turn == 1
    assert entry.on_lost("h0", gone=True) == [] and entry.turn == 1
    for agent in ("h1", "h2", "h3"):
        entry.on_acked(agent)
    assert entry.is_over


def test_a_branch_that_was_sent_again_can_be_lost_again():
    entry = entry_of(14)
    (first, second) = entry.on_lost("h0", gone=True)
    assert [branch.agent for branch in (first, second)] == ["h1", "h4"] and first.children
    assert [branch.agent for branch in entry.on_lost("h1", gone=True)] == ["h2", "h3"] and entry.turn == 2


def test_an_orphan_that_was_given_up_before_is_not_waited_for_again():
    entry = entry_of(6)
    assert entry.on_lost("h1", gone=True) == []
    assert [branch.agent for branch in entry.on_lost("h0", gone=True)] == ["h2"]


def test_a_cast_that_is_over_or_elsewhere_is_not_sent_again():
    ledger: Ledger[str] = Ledger()
    ledger.open(entry_of(3))
    assert ledger.on_lost("h9", gone=True) == [] and ledger.avoid == {"h9"}
    entry = ledger.entry(1)
    for agent in ("h0", "h1"):
        entry.on_acked(agent)
    assert entry.on_lost("h1", gone=True) == []
    assert ledger.settle(entry) and ledger.entry(1) is None
    ledger.trusted("h9")
    assert ledger.avoid == set()


def test_the_floor_is_below_the_oldest_cast_that_is_not_over():
    ledger: Ledger[str] = Ledger()
    assert ledger.floor(1) == 1
    entries = [entry_of(1, number=number) for number in (1, 2, 3)]
    for entry in entries:
        ledger.open(entry)
    entries[1].on_acked("h0")
    assert not ledger.settle(entries[1]) and ledger.floor(4) == 1
    entries[0].on_acked("h0")
    assert not ledger.settle(entries[0]) and ledger.floor(4) == 3 and len(ledger) == 1
    assert ledger.on_lost("h0", gone=True) == [] and len(ledger) == 0 and ledger.floor(4) == 4
