from __future__ import annotations

from monarch.testing import universe
from testing.actors import Counter


def test_a_trace_tells_who_sent_what_to_whom():
    with universe(seed=1) as world:
        procs = world.hosts.spawn_procs()
        procs.spawn("c", Counter).add.call(1).get()
        world.kill(procs)
        world.settle()
        assert len(world.faults) == 1
        lines = [line.split(" ", 1)[1] for line in world.trace]
    for line in ("client -> host0: SpawnProcs", "host0 -> client: ProcUp", "client -> anon-0: c.add", "anon-0 -> client: reply"):
        assert line in lines
    assert lines.index("kill anon-0") < lines.index("host0 -> client: ProcExited")


def test_a_trace_keeps_the_latest_events():
    with universe(trace=10) as world:
        counters = world.hosts.spawn_procs().spawn("c", Counter)
        for _ in range(10):
            counters.add.call(1).get()
        assert len(world.trace) == 10
        assert str(world.trace).count("c.add") == 5
        assert repr(world.trace) == "<trace of 10 events>"


def test_traces_are_equal_or_not():
    def trace(seed: int):
        with universe(seed=seed) as world:
            world.hosts.spawn_procs(per_host={"gpus": 2}).spawn("c", Counter).add.call(1).get()
        return world.trace

    assert trace(1) == trace(1)
    assert trace(1) != trace(2)
