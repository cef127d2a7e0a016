from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch.actor import Actor, SupervisionError, current_rank, endpoint
from monarch.testing import Costs, universe
from testing.actors import Counter


class Sender(Actor):
    """Sends numbered messages to a keeper."""

    @endpoint
    def send(self, keeper: Counter, count: int) -> None:
        for number in range(count):
            keeper.see.broadcast((current_rank().rank, number))


@pytest.fixture
def world():
    with universe(hosts=2, seed=5) as opened:
        yield opened


@pytest.fixture
def counters(world):
    counters = world.hosts.spawn_procs().spawn("c", Counter)
    counters.add.call(1).get()
    return counters


disturbances = st.sampled_from(["delay", "reorder", "duplicate", "stall"])


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), weather=st.lists(disturbances, max_size=3))
def test_messages_of_each_sender_arrive_once_and_in_order_whatever_the_weather(seed, weather):
    with universe(hosts=3, seed=seed) as world:
        procs = world.hosts.spawn_procs()
        keeper = procs.slice(hosts=0).spawn("keeper", Counter)
        senders = procs.spawn("senders", Sender)
        for kind in weather:
            if kind == "delay":
                world.network.delay(procs.slice(hosts=1), procs.slice(hosts=0), 0.2)
            elif kind == "reorder":
                world.network.reorder(None, None, 0.05)
            elif kind == "duplicate":
                world.network.duplicate(None, None, 0.5)
            else:
                world.network.stall(procs.slice(hosts=2), procs.slice(hosts=0))
        senders.send.call(keeper, 5)
        world.advance(1)
        world.network.heal()
        world.advance(1)
        seen = keeper.all_seen.call_one().get()
        assert sorted(seen) == [(rank, number) for rank in range(3) for number in range(5)]
        for rank in range(3):
            assert [number for sender, number in seen if sender == rank] == [0, 1, 2, 3, 4]


def test_reordering_is_seen_when_it_is_raw(world, counters):
    keeper = counters.slice(hosts=0)
    with world.network.reorder(world.client, counters, raw=True):
        for number in range(50):
            keeper.see.broadcast(number)
        world.settle()
    seen = keeper.all_seen.call_one().get()
    assert sorted(seen) == list(range(50))
    assert seen != list(range(50))


def test_duplicates_are_seen_when_they_are_raw(world, counters):
    keeper = counters.slice(hosts=0)
    with world.network.duplicate(world.client, counters, raw=True):
        keeper.see.broadcast("x")
        world.settle()
    assert keeper.all_seen.call_one().get() == ["x", "x"]


def test_overtaking_is_counted_and_mended(world, counters):
    with world.network.reorder(world.client, counters, 1.0), world.network.duplicate(world.client, counters):
        answers = [counters.add.call(1) for _ in range(20)]
        assert [list(answer.get().values()) for answer in answers] == [[n, n] for n in range(2, 22)]
        world.settle()
    statistics = world.network.statistics()
    assert statistics.late > 0
    assert statistics.duplicates > 40
    assert statistics.held == 0


def test_a_delay_counts_both_ways_and_only_there(world, counters):
    world.network.delay(world.client, world.hosts.slice(hosts=1), 2.0)
    start_s = world.now_s
    counters.slice(hosts=0).add.call(1).get()
    assert world.now_s - start_s < 0.01
    counters.slice(hosts=1).add.call(1).get()
    assert world.now_s - start_s == pytest.approx(4.0, abs=0.01)


def test_a_delay_of_a_host_holds_for_processes_still_to_come(world):
    world.network.delay(None, world.hosts.slice(hosts=1), 1.0)
    world.hosts.slice(hosts=1).spawn_procs().initialized.get()
    assert world.now_s > 2


def test_a_healed_stall_loses_nothing(world, counters):
    stall = world.network.stall(world.client, counters)
    answer = counters.add.call(1)
    with pytest.raises(TimeoutError):
        answer.get(timeout=1000)
    assert world.network.statistics().held == 2
    stall.heal()
    stall.heal()
    assert list(answer.get().values()) == [2, 2]


def test_a_cut_that_is_healed_in_time_loses_nothing(world, counters):
    with world.network.cut(world.client, counters):
        answer = counters.add.call(1)
        world.advance(2.9)
    assert list(answer.get().values()) == [2, 2]
    world.advance(10)
    assert list(counters.add.call(1).get().values()) == [3, 3]


@pytest.mark.parametrize("suspicion_s", [0, 7])
def test_a_host_that_is_cut_off_is_lost_after_the_suspicion(world, counters, suspicion_s):
    start_s = world.now_s
    world.network.cut(world.hosts.slice(hosts=1), None, suspicion_s=suspicion_s)
    with pytest.raises(SupervisionError):
        counters.add.call(1).get()
    assert world.now_s - start_s == pytest.approx(suspicion_s, abs=0.01)
    assert [fault.crashed_ranks for fault in world.faults] == [[1]]
    assert list(counters.slice(hosts=0).add.call(1).get().values()) == [3]


def test_a_connection_is_made_when_the_way_is_free_again(world):
    procs = world.hosts.spawn_procs()
    procs.initialized.get()
    with world.network.stall(world.client, world.hosts):
        later = world.hosts.spawn_procs()
        world.advance(5)
        assert repr(later.initialized) == "<Future pending>"
    assert later.initialized.get()


def test_what_was_sent_before_the_end_arrives_before_its_news(world, counters):
    one = counters.slice(hosts=0)
    answer = one.add.call(1)
    world.advance(0.00035)  # the answer is under way
    world.kill(one)
    world.advance(1)
    assert list(answer.get().values()) == [2]
    assert len(world.faults) == 1


def test_messages_cost_what_is_stated():
    costs = Costs(between_hosts_s=0.5, within_host_s=0.5, jitter=0.0, message_s=0.01, start_proc_s=0.0, notice_end_s=0.0)
    with universe(hosts=10, costs=costs) as world:
        counters = world.hosts.spawn_procs().spawn("c", Counter)
        counters.add.call(1).get()
        start_s = world.now_s
        counters.add.call(1).get()
        # The client sends ten one after the other; the last needs two ways, and is received, answered and received.
        assert world.now_s - start_s == pytest.approx(10 * 0.01 + 0.5 + 0.01 + 0.01 + 0.5 + 0.01)


FREE = {"between_hosts_s": 0.0, "within_host_s": 0.0, "jitter": 0.0, "start_proc_s": 0.0, "notice_end_s": 0.0}
"""Costs under which nothing takes time."""


def time_of(costs, call, *, hosts=4):
    with universe(hosts=hosts, costs=costs) as world:
        counters = world.hosts.spawn_procs().spawn("c", Counter)
        counters.add.call(1).get()
        began_s = world.now_s
        call(counters)
        world.settle()
        return world.now_s - began_s


def test_the_bytes_of_one_host_leave_one_after_the_other():
    data = bytes(1_000_000)
    seconds = time_of(Costs(**FREE, link_byte_s=1e-6), lambda counters: counters.see.broadcast(data))
    assert seconds == pytest.approx(4.0, rel=0.01)
    seconds = time_of(Costs(**FREE, link_byte_s=1e-6), lambda counters: counters.slice(hosts=0).see.broadcast(data))
    assert seconds == pytest.approx(1.0, rel=0.01)


def test_each_end_copies_bytes():
    data = bytes(1_000_000)
    seconds = time_of(Costs(**FREE, copy_byte_s=1e-6), lambda counters: counters.see.broadcast(data))
    assert seconds == pytest.approx(4.0 + 1.0, rel=0.01)  # the receivers copy at the same time


def test_a_connection_costs_each_end():
    costs = Costs(**FREE, connect_s=1.0)
    with universe(hosts=1, costs=costs) as world:
        counter = world.hosts.spawn_procs().spawn("c", Counter)
        counter.add.call_one(1).get()  # client to agent, proc to agent, client to proc
        began_s = world.now_s
        assert 3.0 <= began_s <= 6.0
        counter.add.call_one(1).get()
        assert world.now_s == began_s


class Worker(Actor):
    """Computes."""

    @endpoint
    def compute(self) -> int:
        return sum(range(300_000))


def test_the_code_of_each_process_takes_its_own_time():
    def run(hosts, processor):
        with universe(hosts=hosts, costs=Costs(**FREE, processor=processor)) as world:
            workers = world.hosts.spawn_procs().spawn("w", Worker)
            workers.compute.call().get()
            began_s = world.now_s
            workers.compute.call().get()
            return world.now_s - began_s

    assert run(1, 0.0) == 0.0
    assert run(1, 1.0) > 0.001
    assert run(6, 1000.0) < 3 * run(1, 1000.0)  # they compute at the same time


def test_a_process_that_is_frozen_while_it_is_busy_stays_frozen():
    with universe(hosts=2, costs=Costs(**FREE, copy_byte_s=1e-6)) as world:
        counters = world.hosts.spawn_procs().spawn("c", Counter)
        counters.add.call(1).get()
        answer = counters.slice(hosts=1).see.call_one(bytes(1_000_000))
        world.advance(0.5)  # it is being sent
        world.freeze(counters.slice(hosts=1))
        world.advance(3)
        assert not answer._is_done()
        world.thaw(counters.slice(hosts=1))
        answer.get()


def test_large_buffers_travel(world, counters):
    keeper, data = counters.slice(hosts=0), bytearray(3_000_000)
    data[-1] = 7
    keeper.see.broadcast(data)
    assert keeper.all_seen.call_one().get()[0][-1] == 7
    assert world.network.statistics().bytes > 6_000_000


def test_a_trace_tells_times_in_order(world, counters):
    times = [float(line.split()[0]) for line in world.trace]
    assert all(one <= other for one, other in pairwise(times))


@pytest.mark.parametrize(
    ("act", "match"),
    [
        (lambda world: world.network.delay(None, None, -1), "zero or more"),
        (lambda world: world.network.duplicate(None, None, 2), "0 to 1"),
        (lambda world: world.network.delay("host0", None, 1), "no mesh of hosts"),
    ],
)
def test_wrong_use_is_told(world, act, match):
    with pytest.raises((TypeError, ValueError), match=match):
        act(world)


class Spawner(Actor):
    """Spawns counters where it is told, and hands the reference out before they exist."""

    @endpoint
    def spawn(self, hosts):
        return hosts.spawn_procs().spawn("spawned", Counter)


@pytest.mark.parametrize("delay_s", [1.0, 20.0])
def test_a_reference_may_overtake_the_request_to_start_its_process(world, delay_s):
    spawner = world.hosts.slice(hosts=0).spawn_procs().spawn("spawner", Spawner)
    far = world.hosts.slice(hosts=1)
    spawner.spawn.call_one(far).get()
    with world.network.delay(spawner, far, delay_s):
        spawned = spawner.spawn.call_one(far).get()
        if delay_s < 5:
            assert spawned.add.call_one(3).get() == 3
        else:
            with pytest.raises(SupervisionError, match="this host knows no such process"):
                spawned.add.call_one(3).get()
            assert 5 < world.now_s < 10
