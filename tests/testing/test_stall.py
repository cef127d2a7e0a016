from __future__ import annotations

import pytest

from monarch.actor import Channel
from monarch.config import configured
from monarch.testing import DeadlockError, universe
from testing.actors import Asker, AsyncCounter, Counter


@pytest.fixture
def world():
    with universe(hosts=1, seed=2, limit_s=1000) as opened:
        yield opened


@pytest.fixture
def procs(world):
    return world.hosts.spawn_procs(per_host={"gpus": 2})


def test_two_actors_that_wait_for_each_other(world, procs):
    one, two = procs.slice(gpus=0).spawn("one", Asker), procs.slice(gpus=1).spawn("two", Asker)
    with pytest.raises(DeadlockError) as caught:
        one.ask.call_one(two, one).get()
    text = str(caught.value)
    assert "this wait will not end: nothing is left to happen" in text
    assert "client waits for one.ask of anon-0" in text
    assert "anon-0 waits for two.ask of anon-1" in text
    assert "anon-1 waits for one.ask of anon-0" in text
    assert text.count("is in its endpoint ask") == 2


def test_a_frozen_process_is_named(world):
    with configured(proc_stopped_limit=None):
        procs = world.hosts.spawn_procs(per_host={"gpus": 2})
    counters = procs.spawn("c", Counter)
    counters.add.call(1).get()
    world.freeze(procs, gpus=1)
    with pytest.raises(DeadlockError, match=r"client waits for c\.add of anon-1 \(frozen\)"):
        counters.add.call(1).get()
    world.thaw(procs, gpus=1)
    assert len(counters.add.call(1).get().values()) == 2


def test_a_port_that_nobody_sends_to(world):
    _, receiver = Channel.open()
    with pytest.raises(DeadlockError, match="client waits for a message on a port"):
        receiver.recv().get()


def test_a_wait_with_a_time_out_is_no_deadlock(world):
    _, receiver = Channel.open()
    with pytest.raises(TimeoutError):
        receiver.recv().get(timeout=30)
    assert world.now_s == pytest.approx(30)


def test_a_program_that_ticks_for_ever_is_given_up(world, procs):
    procs.spawn("a", AsyncCounter).sleep.call(1e9)
    _, receiver = Channel.open()
    with pytest.raises(DeadlockError, match="1000 virtual seconds do not end it"):
        receiver.recv().get()
    assert world.now_s < 1100


def test_the_universe_is_usable_afterwards(world, procs):
    _, receiver = Channel.open()
    with pytest.raises(DeadlockError):
        receiver.recv().get()
    assert len(procs.spawn("c", Counter).add.call(1).get().values()) == 2
