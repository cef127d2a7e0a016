from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from monarch.testing import universe
from testing.actors import AsyncCounter, Counter, Stubborn, Ticker


class Alarm(Exception):
    """What a time limit of a test raises."""


@pytest.fixture
def alarm() -> Iterator[Any]:
    """`alarm(s)`: after so many real seconds the main thread raises, wherever it is."""

    def ring(*_: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def world():
    with universe(hosts=2, seed=3, limit_s=1e12) as opened:
        yield opened


def universe_threads() -> int:
    return sum(thread.name.startswith("universe-") for thread in threading.enumerate())


def test_a_wait_can_be_interrupted_and_the_universe_goes_on(world, alarm):
    procs = world.hosts.spawn_procs()
    ticking = procs.spawn("t", Ticker).tick.call(0.001)
    alarm(0.2)
    with pytest.raises(Alarm):
        ticking.get()
    assert list(procs.spawn("c", Counter).add.call(1).get().values()) == [1, 1]


def test_idle_actors_cost_no_thread(world):
    procs = world.hosts.spawn_procs(per_host={"gpus": 10})
    procs.spawn("c", Counter).add.call(1).get()
    procs.spawn("a", AsyncCounter).sleep.call(10).get()
    assert universe_threads() == 1


def test_actors_that_wait_cost_a_thread_each_while_they_do(world):
    procs = world.hosts.spawn_procs(per_host={"gpus": 10})
    counters, other = procs.spawn("c", Counter), procs.spawn("o", Counter)
    sleeping = counters.sleep.call(10)
    world.advance(5)
    assert universe_threads() == 20 + 1
    sleeping.get()
    for _ in range(3):
        counters.twice.call(other, 1).get()
    assert universe_threads() == 20 + 1  # they are used again


def test_code_that_catches_everything_ends_with_the_universe():
    with universe() as world:
        procs = world.hosts.spawn_procs()
        procs.spawn("s", Stubborn).wait.broadcast(procs.spawn("c", Counter))
        world.advance(1)
    assert universe_threads() == 0


def test_killed_code_runs_no_further_while_the_universe_lasts(world):
    procs = world.hosts.spawn_procs()
    counters = procs.spawn("c", Counter)
    procs.slice(hosts=0).spawn("s", Stubborn).wait.broadcast(counters)
    world.advance(1)
    calls = len(world.trace)
    world.kill(procs, hosts=0)
    world.advance(100)
    assert not any("c.sleep" in line for line in world.trace.lines()[calls:])
    assert len(world.faults) == 1
