"""Cast trees: every rank once, least depth, few bytes per host, and what is left when an agent dies."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._base.ids import ProcRef
from monarch._mesh.mesh import ShapeExt
from monarch._mesh.shape import Extent
from monarch._runtime import cast_tree
from monarch._runtime.cast_tree import Branch, Plan, Run, agents_of, alone, branches_of, find, is_worthwhile, orphans, plan, ranks_of

FANOUTS = (1, 2, 3, 7, 16)


def address(host: int) -> str:
    return f"tcp://10.{host >> 16}.{host >> 8 & 255}.{host & 255}:26600"


def proc(number: int, agent: str, random: str = "aBcDeFgHiJkL") -> ProcRef:
    return ProcRef(f"trainer-{number}<{random}>", f"{agent}/{random}.{number}", agent)


def groups_of(numbers, per_host: int, replaced=()) -> dict[str, list[tuple[int, ProcRef]]]:
    groups: dict[str, list[tuple[int, ProcRef]]] = {}
    for rank, number in enumerate(numbers):
        agent = address(number // per_host)
        groups.setdefault(agent, []).append((rank, proc(number, agent, "x" * 12 if number in replaced else "aBcDeFgHiJkL")))
    return groups


def delivered(made: Plan) -> list[tuple[int, ProcRef]]:
    """What the agents hand over when each reads its part and passes the rest on."""
    got, todo = [], [cast_tree.tree_bytes(made.names, branch) for branch in made.branches]
    while todo:
        part = cast_tree.read_tree(todo.pop())
        got += part.procs
        todo += [child.tree for child in part.children]
    return got


def depth(branches) -> int:
    return 1 + max(depth(branch.children) for branch in branches) if branches else 0


@st.composite
def views(draw):
    sizes = [draw(st.integers(1, 12)), draw(st.integers(1, 8))]
    shape = Extent(["hosts", "gpus"], sizes).region.as_shape()
    if draw(st.booleans()):
        start = draw(st.integers(0, sizes[0] - 1))
        shape = ShapeExt.slice(shape, hosts=slice(start, draw(st.integers(start + 1, sizes[0])), draw(st.integers(1, 3))))
    if draw(st.booleans()):
        start = draw(st.integers(0, sizes[1] - 1))
        shape = ShapeExt.slice(shape, gpus=slice(start, draw(st.integers(start + 1, sizes[1])), draw(st.integers(1, 3))))
    numbers = list(shape.ndslice.ranks())
    return groups_of(numbers, draw(st.sampled_from([sizes[1], 3])), draw(st.sets(st.sampled_from(numbers), max_size=3)))


@given(groups=views(), fanout=st.sampled_from(FANOUTS), data=st.data())
def test_every_rank_of_any_view_is_reached_exactly_once(groups, fanout, data):
    avoid = data.draw(st.sets(st.sampled_from(sorted(groups)), max_size=3))
    made = plan(groups, fanout, avoid)
    expected = sorted(member for members in groups.values() for member in members)
    assert sorted(delivered(made)) == expected
    assert sorted(rank for branch in made.branches for rank in ranks_of(branch)) == [rank for rank, _ in expected]
    assert sorted(agent for branch in made.branches for agent in agents_of(branch)) == sorted(groups)


@given(groups=views(), fanout=st.sampled_from(FANOUTS), data=st.data())
def test_an_avoided_agent_is_a_leaf_of_the_caller(groups, fanout, data):
    avoid = data.draw(st.sets(st.sampled_from(sorted(groups)), min_size=1))
    roots = {branch.agent: branch for branch in plan(groups, fanout, avoid).branches}
    assert all(not roots[agent].children for agent in avoid)


@given(groups=views(), fanout=st.sampled_from(FANOUTS))
def test_a_branch_knows_how_many_ranks_it_has_and_where_they_lie(groups, fanout):
    made = plan(groups, fanout)
    for branch in (part for root in made.branches for part in branches_of(root)):
        ranks = ranks_of(branch)
        child = cast_tree._child(made.names, msgspec.Raw(msgspec.msgpack.encode(branch)))
        assert branch.num_ranks == child.num_ranks == len(ranks)
        assert (child.low, child.high) == (min(ranks), max(ranks) + 1)


@pytest.mark.parametrize("fanout", FANOUTS)
@pytest.mark.parametrize("num_hosts", [1, 2, 15, 16, 17, 256, 272, 273, 1000])
def test_a_tree_has_least_depth_and_no_more_than_its_fanout(num_hosts, fanout):
    made = plan(groups_of(range(num_hosts), 1), fanout)
    width = max(fanout, 2)
    assert depth(made.branches) <= max(1, math.ceil(math.log(num_hosts) / math.log(width) - 1e-9))
    assert len(made.branches) <= width
    assert all(len(part.children) <= width for root in made.branches for part in branches_of(root))


@given(groups=views(), fanout=st.sampled_from(FANOUTS), order=st.randoms())
def test_a_plan_does_not_depend_on_the_order_in_which_hosts_are_named(groups, fanout, order):
    shuffled = list(groups.items())
    order.shuffle(shuffled)
    assert plan({agent: members[::-1] for agent, members in shuffled}, fanout).branches == plan(groups, fanout).branches


@given(groups=views(), fanout=st.sampled_from(FANOUTS), data=st.data())
def test_what_a_dead_agent_leaves_behind_is_all_that_was_below_it(groups, fanout, data):
    made = plan(groups, fanout)
    dead = data.draw(st.sampled_from(sorted(groups)))
    lost = find(made.branches, dead)
    left = [rank for branch in orphans(made.branches, dead) for rank in ranks_of(branch)]
    assert sorted(left + ranks_of(alone(lost))) == sorted(ranks_of(lost))
    assert sorted(ranks_of(alone(lost))) == [rank for rank, _ in groups[dead]]


def test_an_agent_without_a_part_leaves_no_orphans():
    assert orphans(plan(groups_of(range(8), 2), 2).branches, "tcp://elsewhere:1") == []


def test_one_host_is_one_branch_with_one_run():
    made = plan(groups_of(range(8), 8), 16)
    assert made.branches == (Branch(address(0), [Run(0, 8, 0, 0)]),)


def test_a_slice_with_steps_stays_one_run_per_host():
    groups = {address(0): [(rank, proc(3 + 2 * rank, address(0))) for rank in range(5)]}
    assert plan(groups, 16).branches[0].runs == [Run(0, 5, 3, 0, 1, 2)]


@pytest.mark.parametrize(
    "ref",
    [
        ProcRef("client", "tcp://h:1/client", "tcp://h:1"),
        ProcRef("a-03<x>", "tcp://h:1/x.03", "tcp://h:1"),
        ProcRef("a-3<x>", "tcp://h:1/other", "tcp://h:1"),
        ProcRef("7", "tcp://h:1/7", "tcp://h:1"),
        ProcRef("a-" + "1" * 30, "tcp://h:1/" + "1" * 30, "tcp://h:1"),
    ],
    ids=lambda ref: ref.uid[:8],
)
def test_a_name_that_follows_no_pattern_travels_as_it_is(ref):
    other = proc(4, "tcp://h:1")
    assert delivered(plan({"tcp://h:1": [(0, ref), (1, other), (2, ref)]}, 16)) == [(0, ref), (1, other), (2, ref)]


def test_a_proc_that_is_not_under_its_agent_is_refused():
    with pytest.raises(ValueError, match="does not lie under"):
        plan({"tcp://h:1": [(0, proc(0, "tcp://other:1"))]}, 16)


def test_a_plan_for_ten_thousand_hosts_takes_few_bytes_per_host_and_is_cut_without_reading_it_all():
    made = plan(groups_of(range(80_000), 8), 16)
    sizes = [len(cast_tree.tree_bytes(made.names, branch)) for branch in made.branches]
    assert sum(sizes) / 10_000 < 48
    assert max(sizes) < 1.25 * min(sizes)
    part = cast_tree.read_tree(cast_tree.tree_bytes(made.names, made.branches[0]))
    assert len(part.procs) == 8 and len(part.children) == 16
    assert sum(len(child.tree) for child in part.children) < 1.1 * sizes[0]


@given(data=st.binary(max_size=60) | st.integers(0, 200))
def test_bytes_that_are_no_tree_are_refused(data):
    if isinstance(data, int):
        whole = cast_tree.tree_bytes(*((made := plan(groups_of(range(12), 2), 2)).names, made.branches[0]))
        data = whole[: min(data, len(whole) - 1)]
    with pytest.raises(msgspec.DecodeError):
        cast_tree.read_tree(data)


@pytest.mark.parametrize(
    "num_hosts, num_ranks, nbytes, worth",
    [
        (0, 0, 0, False),
        (1, 1, 1 << 30, False),
        (2, 8, 100, False),
        (2, 8, 1 << 20, True),
        (8, 8, 1 << 30, False),
        (4, 64, 100, True),
        (10_000, 80_000, 0, True),
    ],
)
def test_a_tree_pays_for_many_ranks_or_much_to_send(num_hosts, num_ranks, nbytes, worth):
    assert is_worthwhile(num_hosts, num_ranks, nbytes) == worth
