"""Cast trees: which host agent passes one message on to which, and which procs each of them serves.

A plan is made by the caller, once per view of a mesh, and travels with every cast: each agent reads its own part and hands
the parts of its children on as bytes, unread.

Pure: no I/O, no clock.

Rules of this file:
    1. Every rank is in exactly one branch, every agent at most once in a plan.
    2. The same procs, fan-out and agents to avoid make the same plan, wherever it is made.
    3. What an agent does for a cast costs O(its procs + its children), however many hosts lie below it.

Read next: `cast_ledger.py` for the caller, `cast_merge.py` for the agents on the way; `docs/design/casts.md`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from monarch._base.ids import ProcRef

MANY_RANKS = 48
"""From here on a cast goes by the tree whatever its size: the sender pays for hosts instead of ranks."""
SAVED_BYTES = 1 << 20
"""So many bytes that a tree keeps off the sender's link are worth its hops, however few ranks there are."""
_LITERAL = -1
"""`Run.number` of a proc whose name does not follow from a number."""
_NUMBERED = re.compile(r"(.*?)([0-9]{1,18})(<[^<>]*>)?")


class Name(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How the ids and addresses of a run of procs are made of their numbers."""

    head: str
    """Their ids are head, number, tail."""
    tail: str
    place: str
    """Their addresses are the agent's address, this, and the number."""


class Run(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Evenly spaced ranks of the view, on procs with evenly spaced numbers."""

    rank: int
    count: int
    number: int
    name: int
    """Index of the `Name`."""
    rank_step: int = 1
    number_step: int = 1


class Below(msgspec.Struct, frozen=True, array_like=True):
    """What is under an agent that is no leaf."""

    children: list[Branch]
    low: int
    """The lowest rank of the branch, its own agent's ranks included."""
    high: int
    """One past the highest."""
    num_ranks: int


class Branch(msgspec.Struct, frozen=True, array_like=True):
    """What one agent has to do: serve its own procs, and hand the rest to its children."""

    agent: str
    """Its address."""
    runs: list[Run]
    """Its own procs."""
    below: Below | None = None
    """None: a leaf."""

    @property
    def children(self) -> Sequence[Branch]:
        """The branches that its agent passes on."""
        return () if self.below is None else self.below.children

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole branch."""
        return _num_ranks(self.runs) if self.below is None else self.below.num_ranks


class Plan(NamedTuple):
    """The whole tree of one view."""

    names: Sequence[Name]
    branches: Sequence[Branch]
    """What the caller itself sends."""


class _BelowUnread(msgspec.Struct, frozen=True, array_like=True):
    children: list[msgspec.Raw]
    low: int
    high: int
    num_ranks: int


class _Unread(msgspec.Struct, frozen=True, array_like=True):
    """A `Branch` whose children are still bytes."""

    agent: str
    runs: list[Run]
    below: _BelowUnread | None = None


class Child(NamedTuple):
    """A branch that an agent passes on."""

    agent: str
    low: int
    """The lowest of its ranks."""
    high: int
    """One past the highest."""
    num_ranks: int
    tree: bytes
    """What its agent reads with `read_tree`."""


class Part(NamedTuple):
    """What an agent reads of the tree."""

    agent: str
    procs: list[tuple[int, ProcRef]]
    """Its own procs, with their ranks in the view."""
    children: list[Child]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[list[Name], _Unread])
_child_decoder = msgspec.msgpack.Decoder(_Unread)


def is_worthwhile(num_hosts: int, num_ranks: int, nbytes: int) -> bool:
    """Whether a call of `num_ranks` ranks on `num_hosts` remote hosts goes by the tree; else each rank is sent to directly.

    Args:
        nbytes: payload and buffers of the message.
    """
    return num_hosts > 0 and num_ranks > 1 and (num_ranks >= MANY_RANKS or (num_ranks - num_hosts) * nbytes >= SAVED_BYTES)


# --- making a plan -------------------------------------------------------------------------------------------------


def plan(groups: Mapping[str, Iterable[tuple[int, ProcRef]]], fanout: int, avoid: Collection[str] = ()) -> Plan:
    """The tree that reaches the procs of these agents.

    Args:
        groups: (rank in the view, proc) of each agent's procs, by the agent's address.
        fanout: most children of an agent, and of the caller; 1 counts as 2, for a chain has as many hops as hosts.
        avoid: agents that were lost or hard to reach. The caller sends to each of them itself, and they pass nothing on.

    Returns:
        A tree of least depth, with neighbours in rank order below the same agent; the depth is at most
        `max(1, ceil(log(hosts, fanout)))`.

    Raises:
        ValueError: a proc whose address does not lie under its agent's.

    Cost: O(ranks).
    """
    names: dict[Name, int] = {}
    by_rank = sorted((sorted(members), agent) for agent, members in groups.items())
    hosts = [Branch(agent, _runs(agent, members, names)) for members, agent in by_rank if members]
    inner = [host for host in hosts if host.agent not in avoid]
    edge = [host for host in hosts if host.agent in avoid]
    return Plan(tuple(names), (*_grow(inner, 0, len(inner), max(fanout, 2)), *edge))


def _grow(hosts: Sequence[Branch], start: int, stop: int, fanout: int) -> list[Branch]:
    """Cut `hosts[start:stop]` into equal parts; the first host of each serves it."""
    count = stop - start
    parts = min(fanout, count)
    branches = []
    for part in range(parts):
        first = start + count * part // parts
        last = start + count * (part + 1) // parts
        top = hosts[first]
        children = _grow(hosts, first + 1, last, fanout)
        if children:
            spans = [span_of(top), *map(span_of, children)]
            num_ranks = top.num_ranks + sum(child.num_ranks for child in children)
            top = Branch(top.agent, top.runs, Below(children, min(low for low, _ in spans), max(high for _, high in spans), num_ranks))
        branches.append(top)
    return branches


def _runs(agent: str, members: Sequence[tuple[int, ProcRef]], names: dict[Name, int]) -> list[Run]:
    """The procs of one agent, by rank, as few runs; new names join `names`."""
    runs: list[Run] = []
    run, name = None, Name("", "", "")
    for rank, ref in members:
        if run is not None and run.number != _LITERAL:
            rank_step, number_step = rank - run.rank, run.number_step
            if run.count > 1:
                rank_step = run.rank_step
                number = run.number + run.count * number_step
                follows = rank == run.rank + run.count * rank_step and _is(ref, agent, name, number)
            else:
                number_step = _number_of(ref) - run.number
                follows = number_step > 0 and _is(ref, agent, name, run.number + number_step)
            if follows:
                run = runs[-1] = Run(run.rank, run.count + 1, run.number, run.name, rank_step, number_step)
                continue
        name, number = _named(ref, agent)
        run = Run(rank, 1, number, names.setdefault(name, len(names)))
        runs.append(run)
    return runs


def _named(ref: ProcRef, agent: str) -> tuple[Name, int]:
    if not ref.address.startswith(agent):
        raise ValueError(f"the address of {ref.uid}, {ref.address!r}, does not lie under that of its agent, {agent!r}")
    place = ref.address[len(agent) :]
    match = _NUMBERED.fullmatch(ref.uid)
    if match is not None and place.endswith(match[2]) and (match[2] == "0" or match[2][0] != "0"):
        return Name(match[1], match[3] or "", place[: -len(match[2])]), int(match[2])
    return Name(ref.uid, "", place), _LITERAL


def _number_of(ref: ProcRef) -> int:
    match = _NUMBERED.fullmatch(ref.uid)
    return _LITERAL if match is None else int(match[2])


def _is(ref: ProcRef, agent: str, name: Name, number: int) -> bool:
    return ref.uid == f"{name.head}{number}{name.tail}" and ref.address == f"{agent}{name.place}{number}"


# --- what is in a branch -------------------------------------------------------------------------------------------


def _num_ranks(runs: Sequence[Run]) -> int:
    return sum(run.count for run in runs)


def span_of(branch: Branch | _Unread) -> tuple[int, int]:
    """Lowest rank of the branch, and one past its highest."""
    below = branch.below
    if below is not None:
        return below.low, below.high
    return branch.runs[0].rank, max(run.rank + (run.count - 1) * run.rank_step for run in branch.runs) + 1


def branches_of(branch: Branch) -> Iterator[Branch]:
    """The branch and all below it, each agent's own, parents first."""
    todo = [branch]
    while todo:
        branch = todo.pop()
        yield branch
        todo.extend(branch.children)


def agents_of(branch: Branch) -> Iterator[str]:
    """The agents of a branch: all hosts that it reaches."""
    return (part.agent for part in branches_of(branch))


def ranks_of(branch: Branch) -> list[int]:
    """The ranks of a branch."""
    return [rank for part in branches_of(branch) for rank in own_ranks(part)]


def own_ranks(branch: Branch) -> list[int]:
    """The ranks of a branch's own agent."""
    return [rank for run in branch.runs for rank in range(run.rank, run.rank + run.count * run.rank_step, run.rank_step)]


def procs_of(agent: str, runs: Iterable[Run], names: Sequence[Name]) -> list[tuple[int, ProcRef]]:
    """The procs of an agent, with their ranks in the view."""
    procs = []
    for run in runs:
        name = names[run.name]
        for index in range(run.count):
            number = "" if run.number == _LITERAL else str(run.number + index * run.number_step)
            ref = ProcRef(f"{name.head}{number}{name.tail}", f"{agent}{name.place}{number}", agent)
            procs.append((run.rank + index * run.rank_step, ref))
    return procs


def find(branches: Iterable[Branch], agent: str) -> Branch | None:
    """The branch of one agent; None when it has no part in these. Cost: O(hosts)."""
    return next((part for branch in branches for part in branches_of(branch) if part.agent == agent), None)


def orphans(branches: Iterable[Branch], dead: str) -> list[Branch]:
    """What an agent that is gone no longer passes on, to be sent directly instead."""
    branch = find(branches, dead)
    return [] if branch is None else list(branch.children)


def alone(branch: Branch) -> Branch:
    """The branch without what is below it."""
    return Branch(branch.agent, branch.runs)


# --- on the wire ---------------------------------------------------------------------------------------------------


def tree_bytes(names: Sequence[Name], branch: Branch | msgspec.Raw) -> bytes:
    """What the branch's agent reads with `read_tree`. The same for every cast, so the caller keeps it."""
    return _encoder.encode((names, branch))


def read_tree(data: bytes) -> Part:
    """An agent's own part of a tree.

    Raises:
        DecodeError: these bytes are none.

    Cost: O(own procs + children); what is below the children is skipped, not read.
    """
    try:
        names, branch = _decoder.decode(data)
        procs = procs_of(branch.agent, branch.runs, names)
        raw = [] if branch.below is None else branch.below.children
        return Part(branch.agent, procs, [_child(names, child) for child in raw])
    except (RecursionError, IndexError) as exc:
        raise msgspec.DecodeError("the tree of a cast does not fit together") from exc


def _child(names: Sequence[Name], raw: msgspec.Raw) -> Child:
    branch = _child_decoder.decode(raw)
    low, high = span_of(branch)
    num_ranks = _num_ranks(branch.runs) if branch.below is None else branch.below.num_ranks
    return Child(branch.agent, low, high, num_ranks, tree_bytes(names, raw))
