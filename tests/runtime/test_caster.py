"""Casts in a universe: everybody gets every message once and in order, whatever happens to the agents on the way."""

from __future__ import annotations

import random

import pytest

from monarch import config
from monarch._runtime import cast_tree
from monarch.actor import Actor, ActorError, OneForOne, SupervisionError, context, endpoint
from monarch.actor.process import this_process
from monarch.testing import universe

HOSTS, PER_HOST = 9, 2


class Log(Actor):
    def __init__(self):
        self.seen = []

    @endpoint
    def put(self, item):
        self.seen.append(item)

    @endpoint
    def get(self):
        return self.seen

    @endpoint
    def rank(self):
        return context().message_rank.rank

    @endpoint
    def fail(self, ranks):
        if context().message_rank.rank in ranks:
            raise ValueError(f"rank {context().message_rank.rank}")


class Caster(Actor):
    @endpoint
    def send(self, logs, items):
        for item in items:
            logs.put.broadcast(item)
        return [len(seen) for seen in logs.get.call().get().values()]


@pytest.fixture(params=[2, 16], ids=["fanout 2", "fanout 16"])
def fanout(request, monkeypatch):
    monkeypatch.setattr(cast_tree, "MANY_RANKS", 4)
    with config.configured(max_cast_fanout=request.param):
        yield request.param


@pytest.fixture
def world(fanout):
    with universe(hosts=HOSTS, seed=3) as opened:
        yield opened


@pytest.fixture
def logs(world):
    procs = world.hosts.spawn_procs(per_host={"gpus": PER_HOST})
    mesh = procs.spawn("log", Log)
    assert mesh.rank.call().get().values() == list(range(HOSTS * PER_HOST))
    return mesh


def caster():
    return this_process().proc.caster


def relays_of(world, host):
    return _agent_of(world, host).router._events._relays


def test_a_call_of_many_goes_by_the_tree(logs):
    view = caster().worthwhile(logs._view.refs, 0)
    assert view is not None and len(view.targets) == HOSTS * PER_HOST and view.near == ()
    assert logs.slice(hosts=slice(1, 4)).rank.call().get().values() == list(range(6))
    assert len(caster()._ledger) == 0, "all of it is over"


def test_a_few_ranks_are_sent_to_directly(logs):
    few = logs.slice(hosts=0)
    assert caster().worthwhile(few._view.refs, 0) is None
    assert few.rank.call().get().values() == [0, 1]


def test_all_ranks_answer_before_the_first_error_is_raised(logs):
    with pytest.raises(ActorError, match="rank 5"):
        logs.fail.call([7, 5, 11]).get()


def test_order_holds_over_casts_slices_and_single_messages(world, logs):
    chance = random.Random(1)
    expected = [[] for _ in range(HOSTS * PER_HOST)]
    with world.network.delay(world.hosts.slice(hosts=0), world.client, 0.05):
        for item in range(200):
            start = chance.randrange(HOSTS)
            stop = chance.randint(start + 1, HOSTS)
            view = chance.choice([logs, logs.slice(hosts=slice(start, stop)), logs.slice(hosts=start, gpus=1), logs.slice(gpus=0)])
            view.put.broadcast(item)
            for rank in _ranks_of(view):
                expected[rank].append(item)
        assert logs.get.call().get().values() == expected


def _ranks_of(view):
    return list(view._view.mesh_ranks)


def test_nobody_remembers_casts_that_are_over(world, logs):
    for item in range(20):
        logs.put.broadcast(item)
    logs.get.call().get()
    assert any(len(relays_of(world, host)) for host in range(HOSTS))
    world.advance(3)
    assert [len(relays_of(world, host)) for host in range(HOSTS)] == [0] * HOSTS
    assert any(relays_of(world, host)._floors for host in range(HOSTS)), "what comes late is still known as done"
    world.advance(150)
    assert not any(relays_of(world, host)._floors for host in range(HOSTS))
    logs.put.broadcast("again")
    assert logs.get.call().get().values() == [[*range(20), "again"]] * HOSTS * PER_HOST


def test_an_actor_casts_too_and_in_order(logs):
    one = logs._proc_mesh.slice(hosts=4, gpus=0).spawn("caster", Caster)
    assert one.send.call_one(logs, list(range(20))).get() == [20] * (HOSTS * PER_HOST)
    assert all(seen == list(range(20)) for seen in logs.get.call().get().values())


def _agent_of(world, host):
    address = world.hosts._agents[host].address
    return next(node for node in world._machines.nodes.values() if node.machine == address and node.uid.startswith("host@"))


@pytest.mark.parametrize("host", [0, 3, HOSTS - 1])
def test_a_dead_agent_costs_its_own_ranks_only(world, logs, host):
    logs.put.broadcast("before")
    logs.get.call().get()
    _agent_of(world, host).end()
    logs.put.broadcast("after")
    with pytest.raises(SupervisionError) as caught:
        logs.rank.call().get()
    assert f"rank {host * PER_HOST}" in str(caught.value) or f"rank {host * PER_HOST + 1}" in str(caught.value)
    for others in (slice(0, host), slice(host + 1, HOSTS)):
        if others.start < others.stop:
            seen = logs.slice(hosts=others).get.call().get().values()
            assert seen == [["before", "after"]] * len(seen)
    assert world.faults


@pytest.mark.parametrize("seed", range(4))
def test_an_agent_that_dies_while_casts_pass_it_loses_nobody_else_s(world, logs, seed):
    chance = random.Random(seed)
    host = chance.randrange(HOSTS)
    number = 30
    for item in range(number):
        if item == 10:
            world._scheduler.call_later(chance.uniform(0, 0.001), _agent_of(world, host).end)
        logs.put.broadcast(item)
    world.advance(1)
    for other in range(HOSTS):
        if other != host:
            assert logs.slice(hosts=other).get.call().get().values() == [list(range(number))] * PER_HOST
    assert world.faults
    world.advance(70)
    assert len(caster()._ledger) == 0


@pytest.mark.parametrize("pair", [(0, 1), (4, 5), (2, 6)])
def test_a_way_between_two_agents_that_is_cut_is_gone_around(world, logs, pair):
    one, other = (_agent_of(world, host) for host in pair)
    with world.network.cut(world.hosts.slice(hosts=pair[0]), world.hosts.slice(hosts=pair[1]), suspicion_s=1.0):
        for item in range(5):
            logs.put.broadcast(item)
        assert logs.rank.call().get(timeout=30).values() == list(range(HOSTS * PER_HOST))
        assert logs.get.call().get(timeout=30).values() == [list(range(5))] * (HOSTS * PER_HOST)
    assert one is not other and not world.faults


def test_a_restarted_rank_gets_what_is_cast_after_its_restart(world, fanout):
    procs = world.hosts.spawn_procs(per_host={"gpus": PER_HOST})
    mesh = procs.supervised(OneForOne(max_restarts=3, within_s=60)).spawn("log", Log)
    mesh.put.broadcast("old")
    mesh.rank.call().get()
    world.kill(procs, hosts=2, gpus=1)
    error = mesh.rank.call().exception(10)
    assert error is None or error.restarting
    mesh.put.broadcast("new")
    seen = mesh.get.call().get(timeout=30).values()
    restarted = 2 * PER_HOST + 1
    assert [entries for rank, entries in enumerate(seen) if rank != restarted] == [["old", "new"]] * (HOSTS * PER_HOST - 1)
    assert seen[restarted] == ["new"]


def test_a_cast_that_overtakes_the_request_for_its_procs_waits_for_it(world):
    with world.network.delay(world.client, world.hosts.slice(hosts=HOSTS - 1), 0.5):
        procs = world.hosts.spawn_procs(per_host={"gpus": PER_HOST})
        assert procs.spawn("log", Log).rank.call().get().values() == list(range(HOSTS * PER_HOST))
    assert not world.faults


def test_a_cast_to_procs_that_nobody_asks_for_ends(world, logs):
    refs = list(logs._view.refs)
    refs[5] = refs[5]._replace(uid=refs[5].uid.replace("anon", "gone"))
    logs._view.refs, logs._view.procs = tuple(refs), tuple(ref.uid for ref in refs)
    with pytest.raises(SupervisionError, match="knows no such process"):
        logs.rank.call().get(timeout=11)


def test_a_client_has_a_connection_to_a_proc_of_another_host_only_when_it_sends_straight_to_it(world, logs):
    def linked():
        return {ref.uid for ref in this_process().proc.router.peers() if not ref.uid.startswith("host@")}

    logs.put.broadcast("x")
    assert linked() <= {ref.uid for ref in logs._view.refs[:0]}
    assert logs.slice(hosts=3, gpus=1).get.call_one().get() == ["x"]
    assert linked() == {logs._view.refs[3 * PER_HOST + 1].uid}
    world.kill(logs, hosts=5, gpus=0)
    with pytest.raises(SupervisionError, match=f"rank {5 * PER_HOST}"):
        logs.rank.call().get()
    assert len(world.faults) == 1


def _sent_by_client(world, happen):
    node = world._machines.nodes[world.client.ref.uid]
    before = node.sent
    happen()
    world.settle()
    return node.sent - before


def test_actors_are_created_looked_for_and_stopped_by_the_tree(world, logs, fanout):
    procs = logs._proc_mesh
    meshes = []
    most = 2 * fanout  # to the agents; and the numbers of casts that are over
    assert _sent_by_client(world, lambda: meshes.append(procs.spawn("log", Log))) <= most
    assert _sent_by_client(world, lambda: meshes[0].initialized.get()) <= most
    assert meshes[0].rank.call().get().values() == list(range(HOSTS * PER_HOST))
    assert _sent_by_client(world, lambda: meshes[0].stop().get()) <= most
    with pytest.raises(SupervisionError, match="stopped"):
        meshes[0].rank.call().get()


def test_a_message_to_one_rank_does_not_overtake_the_creation_of_its_actor(world, logs):
    procs = logs._proc_mesh
    procs.slice(hosts=HOSTS - 1).spawn("log", Log).rank.call().get()  # there is a connection to these
    with world.network.delay(world.hosts, world.hosts, 0.05):
        mesh = procs.spawn("log", Log)
        assert mesh.slice(hosts=HOSTS - 1, gpus=1).rank.call_one().get() == 0
        assert mesh.rank.call().get().values() == list(range(HOSTS * PER_HOST))


def test_a_view_without_a_rank_that_has_died_still_goes_by_the_tree(world, logs, fanout):
    logs.put.broadcast("before")
    world.kill(logs, hosts=5, gpus=0)
    world.advance(1)
    assert _sent_by_client(world, lambda: logs.put.broadcast("after")) <= 2 * fanout
    others = logs.slice(hosts=slice(6, HOSTS))
    assert others.get.call().get().values() == [["before", "after"]] * len(others)
    with pytest.raises(RuntimeError, match="it was killed by signal 9"):
        logs.initialized.get()
    assert len(world.faults) == 2  # the rank, and the broadcast that it did not get


def test_procs_are_stopped_by_the_tree(world, fanout):
    procs = world.hosts.spawn_procs(per_host={"gpus": PER_HOST})
    procs.spawn("log", Log).rank.call().get()
    assert _sent_by_client(world, lambda: procs.stop().get()) <= HOSTS + 2 * fanout
    assert not world.faults
