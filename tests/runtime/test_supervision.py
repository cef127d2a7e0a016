"""The ledger: a failure reaches the first owner that handles it, once; a policy restarts whom it should, in order, or says why not.

The first part is a grid of a tree of owners, `client > manager > workers`, each in a process of its own: every way to fail,
at every place, with every answer of the owner. The second part drives one group through restarts; the third lets
hypothesis find orders of events that nobody thought of.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis.strategies import data, integers, sampled_from

from monarch._runtime.policies import AllForOne, Escalate, Ignore, OneForOne, RestForOne
from monarch._runtime.supervision import (
    Abandon,
    Bury,
    Create,
    GiveUp,
    KillProcs,
    Later,
    Ledger,
    Note,
    Notify,
    Place,
    StartProcs,
    State,
    StopActor,
    merged,
)
from monarch._wire.messages import Fault

FANOUT = 3


def fault_of(mesh, rank, kind="failed", report="ValueError: bad-cfg-17", proc=""):
    return Fault(kind, f"<{mesh}[{rank}]>", mesh, rank, report, proc)


# --- a tree of owners ------------------------------------------------------------------------------------------------


class Tree:
    """`client > manager > workers`: mesh "manager" (1 rank) owned by the client, mesh "workers" (3 ranks) owned by the manager."""

    def __init__(self, answers, policy=None):
        self.answers = answers
        self.heard = []
        self.stopped = []
        self.at_client, self.at_manager = Ledger(), Ledger()
        self.at_client.spawned("manager", "root", ["p0"], "manager", Escalate())
        self.at_client.spawned("bystander", "root", ["p1"], "bystander", Escalate())
        self.at_manager.spawned("workers", "manager", ["p1", "p2", "p3"], "workers", policy or Escalate())
        self.at_manager.spawned("others", "manager", ["p1", "p2", "p3"], "others", Escalate())

    def obey(self, effects):
        for effect in effects:
            if isinstance(effect, Notify):
                self.notify(effect)

    def notify(self, notice):
        self.heard.append((notice.owner_actor, notice.failure))
        answer = self.answers[notice.owner_actor]
        if notice.owner_actor == "manager" and answer != "handles":
            for mesh in ("workers", "others"):
                self.stopped.append(mesh)
                self.obey(self.at_manager.forgotten(mesh))
            report = f"child failed: {notice.failure.faults[0].report}; manager {answer}"
            self.obey(self.at_client.failed(0.0, [fault_of("manager", 0, report=report)]))

    def owners_heard(self):
        return [owner for owner, _ in self.heard]


def raises(tree, mesh, rank):
    ledger = tree.at_client if mesh == "manager" else tree.at_manager
    tree.obey(ledger.failed(0.0, [fault_of(mesh, rank)]))


def killed(tree, mesh, rank):
    proc = "p0" if mesh == "manager" else f"p{rank + 1}"
    for ledger in (tree.at_client, tree.at_manager):
        places = ledger.places_on(proc)
        tree.obey(ledger.failed(0.0, [fault_of(*place, "lost", "Killed(sig=9)", proc) for place in places], proc_lost=True, final=True))


def killed_and_told_twice(tree, mesh, rank):
    killed(tree, mesh, rank)
    killed(tree, mesh, rank)


def raises_and_dies(tree, mesh, rank):
    raises(tree, mesh, rank)
    killed(tree, mesh, rank)


WAYS = [raises, killed, killed_and_told_twice, raises_and_dies]
PLACES = [("manager", 0), *(("workers", rank) for rank in range(FANOUT))]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("answer", ["handles", "declines", "raises"])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_failure_reaches_the_first_owner_that_handles_it(way, answer, place):
    tree = Tree({"manager": answer, "root": "handles"})
    mesh, rank = place
    way(tree, mesh, rank)
    told = [(owner, failure.faults[0]) for owner, failure in tree.heard]
    if mesh == "manager":
        assert [(owner, fault.mesh, fault.rank) for owner, fault in told] == [("root", "manager", 0)]
        return
    expected = [("manager", "workers", rank)]
    # A second event of the same rank that takes another mesh along (the proc of a rank that had raised) is another failure.
    if way is raises_and_dies and answer == "handles":
        expected.append(("manager", "others", rank))
    if answer != "handles":
        expected.append(("root", "manager", 0))
    if rank == 0 and way is not raises:  # the client has an actor of its own on that proc
        expected.append(("root", "bystander", 0))
    assert sorted((owner, fault.mesh, fault.rank) for owner, fault in told) == sorted(expected)
    assert tree.stopped == ([] if answer == "handles" else ["workers", "others"])
    if answer != "handles":
        [of_manager] = [fault for owner, fault in told if fault.mesh == "manager"]
        assert told[0][1].report in of_manager.report and answer in of_manager.report


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("mesh", ["manager", "workers"])
def test_a_mesh_that_was_stopped_does_not_fail(way, mesh):
    tree = Tree({"manager": "handles", "root": "handles"})
    for ledger in (tree.at_client, tree.at_manager):
        for name in ("manager", "workers", "others", "bystander"):
            assert ledger.forgotten(name) == []
    way(tree, mesh, 0)
    assert tree.heard == []


def test_one_event_is_one_notice_to_each_owner_whatever_it_takes_along():
    ledger = Ledger()
    ledger.spawned("a", "x", ["p", "q"], "a", Escalate())
    ledger.spawned("b", "y", ["p"], "b", Escalate())
    ledger.spawned("c", "x", ["q", "p"], "c", Escalate())
    assert ledger.places_on("p") == [Place("a", 0), Place("b", 0), Place("c", 1)]
    effects = ledger.failed(1.0, [fault_of(*place) for place in ledger.places_on("p")], proc_lost=True)
    told = {effect.owner_actor: [(f.mesh, f.rank) for f in effect.failure.faults] for effect in effects if isinstance(effect, Notify)}
    assert told == {"x": [("a", 0), ("c", 1)], "y": [("b", 0)]}
    assert [effect.place for effect in effects if isinstance(effect, Bury)] == [Place("a", 0), Place("b", 0), Place("c", 1)]
    assert isinstance(effects[-1], Notify), "who sends to the dead hears before the owner"


def test_losses_that_are_one_event_are_one_notice_to_each_owner_in_the_order_of_spawn():
    ledger = Ledger()
    ledger.spawned("a", "x", ["p", "q"], "a", Escalate())
    ledger.spawned("b", "y", ["p", "q"], "b", OneForOne())
    ledger.spawned("c", "x", ["p", "q"], "c", Escalate())
    effects = []
    for proc in ("p", "q"):
        effects += ledger.failed(1.0, [fault_of(*place) for place in ledger.places_on(proc)], proc_lost=True, final=True)
    notices = merged([effect for effect in effects if isinstance(effect, Notify)])
    told = {notice.owner_actor: [(f.mesh, f.rank) for f in notice.failure.faults] for notice in notices}
    assert told == {"x": [("a", 0), ("a", 1), ("c", 0), ("c", 1)], "y": [("b", 0), ("b", 1)]}
    assert len(notices) == 2 and notices[1].failure.story.count("no process can be started") == 1
    assert merged([]) == []


def test_a_failure_of_an_unknown_mesh_or_rank_concerns_nobody():
    ledger = Ledger()
    ledger.spawned("a", "x", ["p"], "a", Escalate())
    assert ledger.failed(0.0, [fault_of("b", 0), fault_of("a", 7)]) == []
    assert ledger.owns("a") and not ledger.owns("b")


# --- restarts --------------------------------------------------------------------------------------------------------


class Group:
    """One ledger with one group, whose effects are carried out when the test says so."""

    def __init__(self, policy, meshes=(("w", 3),)):
        self.ledger = Ledger()
        self.log = []
        self.now_s = 0.0
        for mesh, size in meshes:
            self.ledger.spawned(mesh, "owner", [f"p{rank}" for rank in range(size)], "g", policy)

    def feed(self, effects):
        self.log.extend(effects)
        return effects

    def fail(self, mesh="w", rank=0, **options):
        return self.feed(self.ledger.failed(self.now_s, [fault_of(mesh, rank)], **options))

    def kill(self, proc):
        faults = [fault_of(*place, "lost", "Killed(sig=9)", proc) for place in self.ledger.places_on(proc)]
        return self.feed(self.ledger.failed(self.now_s, faults, proc_lost=True))

    def all_of(self, kind):
        return [effect for effect in self.log if isinstance(effect, kind)]

    def pause_ends(self):
        later = self.all_of(Later)[-1]
        return self.feed(self.ledger.due(later.group, later.epoch))

    def finish(self):
        """Carry out everything until nothing is left to do; returns what was created, in order."""
        created, at = [], 0
        pending = [effect for effect in self.log if not isinstance(effect, Create)]
        while at < len(pending):
            effect, at = pending[at], at + 1
            if isinstance(effect, Later):
                pending += self.feed(self.ledger.due(effect.group, effect.epoch))
            elif isinstance(effect, StopActor):
                pending += self.feed(self.ledger.cleared(effect.place))
            elif isinstance(effect, KillProcs):
                for proc in effect.procs:
                    pending += self.kill(proc)
            elif isinstance(effect, Create):
                created.append(effect.place)
                pending += self.feed(self.ledger.ready(effect.place, effect.attempt, self.now_s))
        return created

    def states(self, mesh="w", size=3):
        return [self.ledger.state_of(Place(mesh, rank)).name for rank in range(size)]


def places(mesh, *ranks):
    return [Place(mesh, rank) for rank in ranks]


def test_one_for_one_creates_the_failed_rank_anew_after_its_pause():
    group = Group(OneForOne(backoff_s=2.0))
    effects = group.fail(rank=1)
    assert [type(effect) for effect in effects] == [Note, Later] and effects[1].delay_s == 2.0
    assert group.states() == ["UP", "DOWN", "UP"]
    assert group.pause_ends() == [Create(Place("w", 1), 1)]
    assert group.states() == ["UP", "STARTING", "UP"]
    [note] = group.feed(group.ledger.ready(Place("w", 1), 1, 2.5))
    assert isinstance(note, Note) and "restarted after 2.5 s: rank 1 of mesh w" in note.text
    assert group.states() == ["UP", "UP", "UP"]
    assert not group.all_of(Notify)


def test_a_lost_proc_is_started_anew_before_its_actors():
    group = Group(OneForOne(), meshes=(("w", 2), ("v", 2)))
    group.kill("p1")
    assert len(group.all_of(Later)) == 1, "one event is one restart"
    assert group.pause_ends() == [StartProcs(("p1",)), Create(Place("w", 1), 1)], "the mesh that was spawned first starts first"
    assert group.feed(group.ledger.ready(Place("w", 1), 1, 1.0)) == [Create(Place("v", 1), 1)]
    group.feed(group.ledger.ready(Place("v", 1), 1, 1.0))
    assert group.states("w", 2) == group.states("v", 2) == ["UP", "UP"]


@pytest.mark.parametrize(
    ("policy", "stopped"),
    [
        (OneForOne, []),
        (AllForOne, [("w", 0), ("w", 2), ("v", 0), ("v", 1), ("v", 2)]),
        (RestForOne, [("w", 2), ("v", 0), ("v", 1), ("v", 2)]),
    ],
)
def test_a_policy_stops_at_once_whom_it_restarts_too(policy, stopped):
    group = Group(policy(), meshes=(("w", 3), ("v", 3)))
    group.fail(rank=1)
    assert [effect.place for effect in group.all_of(StopActor)] == [Place(*place) for place in stopped]
    everybody = [Place("w", 1), *(Place(*place) for place in stopped)]
    assert group.finish() == sorted(everybody, key=lambda place: (place.mesh != "w", place.rank))
    assert group.states("w") == group.states("v") == ["UP"] * 3


def test_nothing_starts_before_all_that_is_to_be_stopped_has_ended():
    group = Group(AllForOne(backoff_s=0))
    group.fail(rank=0)
    assert group.pause_ends() == []
    assert group.feed(group.ledger.cleared(Place("w", 1))) == []
    assert group.feed(group.ledger.cleared(Place("w", 2))) == [Create(place, 1) for place in places("w", 0, 1, 2)]


def test_an_actor_that_does_not_end_costs_its_proc():
    group = Group(AllForOne(backoff_s=0))
    group.fail(rank=0)
    group.pause_ends()
    group.feed(group.ledger.cleared(Place("w", 1)))
    [kill] = group.feed(group.ledger.stuck(Place("w", 2)))
    assert kill.procs == ("p2",) and "did not end an actor in time" in kill.reason
    assert group.kill("p2")[0] == StartProcs(("p2",))
    assert len(group.all_of(Later)) == 1, "a death that was asked for is no failure"
    assert group.feed(group.ledger.stuck(Place("w", 1))) == [], "it has ended in time"


def test_replacing_procs_kills_those_that_live():
    group = Group(AllForOne(backoff_s=0, replace="proc"))
    group.fail(rank=0)
    [kill] = group.all_of(KillProcs)
    assert kill.procs == ("p0", "p1", "p2") and not group.all_of(StopActor)
    assert kill.reason == "it is replaced, because of rank 0 of mesh w: ValueError: bad-cfg-17"
    group.finish()
    assert group.all_of(StartProcs) == [StartProcs(("p0", "p1", "p2"))]
    assert group.states() == ["UP"] * 3 and len(group.all_of(Later)) == 1


def test_a_failure_during_the_restart_of_another_rank_leaves_that_one_alone():
    group = Group(OneForOne(backoff_s=0))
    group.fail(rank=0)
    group.pause_ends()
    group.fail(rank=1)
    group.feed(group.ledger.ready(Place("w", 0), 1, 0.0))
    group.fail(rank=2)
    assert group.states() == ["UP", "DOWN", "DOWN"] and not group.all_of(StopActor)
    assert group.pause_ends() == [Create(Place("w", 1), 1), Create(Place("w", 2), 1)]


def test_a_failure_while_starting_counts_and_starts_over():
    group = Group(OneForOne(max_restarts=2, backoff_s=1.0))
    group.fail()
    group.pause_ends()
    group.fail()
    assert [later.delay_s for later in group.all_of(Later)] == [1.0, 2.0]
    assert group.pause_ends() == [Create(Place("w", 0), 2)]
    assert group.ledger.ready(Place("w", 0), 1, 0.0) == [], "the first attempt has failed"
    group.fail()
    [notice] = group.all_of(Notify)
    assert notice.owner_actor == "owner" and [fault.rank for fault in notice.failure.faults] == [0]
    story = notice.failure.story
    assert "OneForOne(max_restarts=2" in story and "gave up: 2 restarts within 60 s" in story and story.count("bad-cfg-17") == 3
    assert group.states() == ["DEAD", "UP", "UP"]
    assert group.all_of(Abandon) == [Abandon("g", ("p0", "p1", "p2"))] and group.all_of(GiveUp) == [GiveUp(("w",))]


def test_one_restart_was_not_enough():
    group = Group(OneForOne(max_restarts=1))
    group.fail()
    group.pause_ends()
    group.fail()
    [notice] = group.all_of(Notify)
    assert "gave up: 1 restart within 60 s was not enough" in notice.failure.story


def test_restarts_that_are_long_ago_do_not_count():
    group = Group(OneForOne(max_restarts=1, within_s=10.0, backoff_s=0))
    for _ in range(5):
        group.fail()
        group.finish()
        group.now_s += 10.5
    assert not group.all_of(Notify) and group.states() == ["UP"] * 3
    group.fail()
    group.now_s += 9.0
    group.finish()
    group.fail()
    assert len(group.all_of(Notify)) == 1


def test_giving_up_buries_also_those_that_were_stopped_for_the_restart():
    group = Group(AllForOne(max_restarts=1, backoff_s=5.0))
    group.fail(rank=0)
    group.feed(group.ledger.cleared(Place("w", 1)))
    group.feed(group.ledger.cleared(Place("w", 2)))
    group.pause_ends()
    effects = group.fail(rank=1)
    assert {effect.place.rank: effect.fault.report for effect in effects if isinstance(effect, Bury)} == {1: "ValueError: bad-cfg-17"}
    assert group.states() == ["STARTING", "DEAD", "STARTING"]
    for rank in (0, 2):
        group.feed(group.ledger.ready(Place("w", rank), 1, 0.0))
    assert group.states() == ["UP", "DEAD", "UP"]
    group.fail(rank=2)
    assert len(group.all_of(Notify)) == 2, "after giving up every failure goes to the owner"

    other = Group(AllForOne(max_restarts=1, backoff_s=5.0))
    other.fail(rank=0)
    other.feed(other.ledger.cleared(Place("w", 1)))
    assert other.fail(rank=0) == [], "it is down already"
    other.feed(other.ledger.failed(0.0, [fault_of("w", 0)], proc_lost=True, final=True))
    assert other.states() == ["DEAD"] * 3 and len(other.all_of(Notify)) == 1
    assert "no process can be started in its place" in other.all_of(Notify)[0].failure.story


def test_a_loss_for_good_is_told_even_when_a_restart_was_under_way():
    group = Group(OneForOne())
    group.kill("p1")
    group.feed(group.ledger.failed(0.0, [fault_of("w", 1, "lost", "its host is gone")], proc_lost=True, final=True))
    [notice] = group.all_of(Notify)
    assert notice.failure.faults[0].report == "its host is gone"
    assert group.pause_ends() == [], "nothing is restarted after that"
    group.feed(group.ledger.failed(0.0, [fault_of("w", 1, "lost", "its host is gone")], proc_lost=True, final=True))
    assert len(group.all_of(Notify)) == 1


def test_an_ignored_failure_is_noted_only():
    group = Group(Ignore())
    effects = group.fail(rank=2)
    assert [type(effect) for effect in effects] == [Bury, Note] and not effects[1].serious
    assert group.states() == ["UP", "UP", "DEAD"]


def test_stopping_a_mesh_of_a_group_gives_its_procs_back_and_lets_the_rest_go_on():
    group = Group(AllForOne(backoff_s=0), meshes=(("w", 2), ("v", 3)))
    group.fail("v", 0)
    group.pause_ends()
    for place in [*places("v", 1, 2), *places("w", 0)]:
        group.feed(group.ledger.cleared(place))
    effects = group.feed(group.ledger.forgotten("w"))
    assert effects == [Create(place, 1) for place in places("v", 0, 1, 2)], "rank 1 of w was what the restart waited for"
    assert group.feed(group.ledger.forgotten("v")) == [Abandon("g", ("p0", "p1", "p2"))]
    assert group.ledger.places_on("p0") == []


POLICIES = [
    OneForOne(max_restarts=4, within_s=5, backoff_s=0.5),
    AllForOne(max_restarts=4, within_s=5, backoff_s=0.5),
    RestForOne(max_restarts=4, within_s=5, backoff_s=0.5),
    AllForOne(max_restarts=4, within_s=5, backoff_s=0, replace="proc"),
    RestForOne(max_restarts=4, within_s=5, backoff_s=0, replace="proc"),
]


@settings(max_examples=150)
@given(draw=data(), policy=sampled_from(POLICIES))
def test_whatever_the_order_of_events_a_group_ends_whole_or_has_told_its_owner(draw, policy):
    """A model of procs and actors that obeys the effects in random order, with failures in between."""
    group = Group(policy, meshes=(("w", 3), ("v", 2)))
    ledger = group.ledger
    alive = {f"p{rank}": True for rank in range(3)}
    todo = []
    everybody = [*places("w", 0, 1, 2), *places("v", 0, 1)]

    def take(effects):
        todo.extend(effect for effect in group.feed(effects) if not isinstance(effect, Note | Notify | Bury | Abandon | GiveUp))

    def lose(proc):
        if alive[proc]:
            alive[proc] = False
            faults = [fault_of(*place, "lost", "Killed(sig=9)", proc) for place in ledger.places_on(proc)]
            take(ledger.failed(group.now_s, faults, proc_lost=True))

    def do(effect):
        match effect:
            case Later():
                take(ledger.due(effect.group, effect.epoch))
            case StopActor():
                if alive[proc_of(effect)]:
                    take(ledger.cleared(effect.place))
                elif is_coming(proc_of(effect)):
                    todo.append(effect)
            case KillProcs():
                for proc in effect.procs:
                    lose(proc)
            case StartProcs():
                alive.update(dict.fromkeys(effect.procs, True))
            case Create():
                if alive[proc_of(effect)]:
                    take(ledger.ready(effect.place, effect.attempt, group.now_s))
                elif is_coming(proc_of(effect)):
                    todo.append(effect)

    def proc_of(effect):
        return f"p{effect.place.rank}"

    def is_coming(proc):
        """Whether messages to it wait for it."""
        return any(isinstance(other, StartProcs) and proc in other.procs for other in todo)

    for _ in range(draw.draw(integers(0, 12), label="steps")):
        group.now_s += draw.draw(sampled_from([0.0, 0.5, 2.0]), label="pause")
        event = draw.draw(sampled_from(["raise", "kill", "do"]), label="event")
        if event == "kill":
            lose(draw.draw(sampled_from(sorted(alive)), label="proc"))
        elif event == "raise":
            place = draw.draw(sampled_from(everybody), label="place")
            if alive[f"p{place.rank}"] and ledger.state_of(place) in (State.UP, State.STARTING):
                take(ledger.failed(group.now_s, [fault_of(*place)]))
        elif todo:
            do(todo.pop(draw.draw(integers(0, len(todo) - 1), label="which")))
    while todo:
        do(todo.pop(0))
    states = {place: ledger.state_of(place) for place in everybody}
    assert set(states.values()) <= {State.UP, State.DEAD}
    dead = {place for place, state in states.items() if state is State.DEAD}
    buried = [effect.place for effect in group.all_of(Bury)]
    assert set(buried) == dead, "all of the dead are buried, on each proc that comes in the place of theirs"
    assert bool(group.all_of(Notify)) == bool(dead)
    told = [(fault.mesh, fault.rank) for notice in group.all_of(Notify) for fault in notice.failure.faults]
    assert len(told) == len(set(told)), "no rank is reported twice"
