from __future__ import annotations

import asyncio
import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import monarch.actor
from monarch._runtime import future
from monarch.actor import ActorError, SupervisionError, context, get_or_spawn_controller, this_host, this_proc, with_timeout
from monarch.testing import DeadlockError, UnhandledFaultsError, patch_actor, universe
from testing.actors import AsyncCounter, Counter, Owner


@pytest.fixture
def world():
    with universe(hosts=2, seed=1) as opened:
        yield opened


@pytest.fixture
def procs(world):
    return world.hosts.spawn_procs(per_host={"gpus": 2})


# --- calls ---------------------------------------------------------------------------------------------------------


def test_actors_answer_by_rank(procs):
    counters = procs.spawn("c", Counter, 10)
    assert list(counters.add.call(1).get().values()) == [11] * 4
    assert counters.slice(hosts=1, gpus=0).add.call_one(5).get() == 16
    assert [point["gpus"] for point in counters.point.call().get().values()] == [0, 1, 0, 1]


def test_an_exception_of_an_endpoint_reaches_its_caller(procs):
    with pytest.raises(ActorError, match="ValueError: no"):
        procs.spawn("c", Counter).fail.call().get()


def test_every_process_has_actors_and_identities_of_its_own(world, procs):
    pids = {name.partition("@")[0] for name in procs.spawn("c", Whoami).proc.call().get().values()}
    assert len(pids) == 4
    assert context().actor_instance.proc_id.startswith("client<")


class Whoami(monarch.actor.Actor):
    @monarch.actor.endpoint
    def proc(self) -> str:
        return context().actor_instance.proc_id


def test_an_actor_waits_inside_for_others(procs):
    one, other = procs.spawn("one", Counter), procs.spawn("other", Counter)
    assert sum(sum(values) for values in one.twice.call(other, 1).get().values()) > 0
    assert list(other.add.call(0).get().values()) == [8] * 4


def test_async_actors_await_and_use_threads(procs):
    one, other = procs.spawn("one", AsyncCounter), procs.spawn("other", Counter)
    one.ask.call(other).get()
    one.in_thread.call(other).get()
    assert list(other.add.call(0).get().values()) == [8] * 4


def test_this_host_and_this_proc_work_as_in_a_script(world):
    there = this_host().spawn_procs(per_host={"p": 2}).spawn("c", Counter)
    here = this_proc().spawn("d", Counter)
    assert list(there.add.call(1).get().values()) == [1, 1]
    assert here.add.call_one(2).get() == 2


def test_a_controller_is_one_for_all(procs):
    one, two = get_or_spawn_controller("only", Counter).get(), get_or_spawn_controller("only", Counter).get()
    one.add.call_one(1).get()
    assert two.add.call_one(1).get() == 2


def test_a_mock_stands_in_while_it_is_patched(procs):
    class Fake(Counter):
        @monarch.actor.endpoint
        def add(self, number: int) -> int:
            return -1

    with patch_actor(Counter, Fake):
        assert list(procs.spawn("c", Counter).add.call(1).get().values()) == [-1] * 4
    assert list(procs.spawn("c", Counter).add.call(1).get().values()) == [1] * 4


def test_a_mock_of_new_processes_stays_theirs(world):
    with patch_actor(Counter, AsyncCounter):
        world.hosts.spawn_procs().initialized.get()
    assert monarch.actor.mock.get_actor_class(Counter) is Counter


# --- time ----------------------------------------------------------------------------------------------------------


def test_sleeping_takes_virtual_time_only(world, procs):
    began = time.perf_counter()
    assert procs.spawn("a", AsyncCounter).sleep.call(1000).get().values() is not None
    procs.spawn("c", Counter).sleep.call(1000).get()
    assert 2000 < world.now_s < 2001
    assert time.perf_counter() - began < 5


def test_actors_sleep_at_the_same_time(world, procs):
    procs.initialized.get()
    before_s = world.now_s
    procs.spawn("c", Counter).sleep.call(10).get()
    assert world.now_s - before_s == pytest.approx(10, abs=0.01)


def test_a_time_out_is_virtual(world, procs):
    waiters, sleepers = procs.spawn("a", AsyncCounter), procs.spawn("b", AsyncCounter)
    assert list(waiters.wait_for.call(sleepers, 5).get().values()) == ["too late"] * 4
    with pytest.raises(TimeoutError):
        sleepers.sleep.call(1e6).get(timeout=100)


def test_a_deadline_is_virtual(world, procs):
    sleepers = procs.spawn("b", AsyncCounter)
    sleepers.add.call(0).get()
    quick, began_s = with_timeout(sleepers, 1), world.now_s
    with pytest.raises(TimeoutError, match=r"of b\.sleep within 1 s \(with_timeout\)(.|\n)*answered: none of 4"):
        quick.sleep.call(5).get()
    assert world.now_s - began_s == pytest.approx(1, abs=0.1)
    world.advance(10)
    assert len(quick.sleep.call(0.9).get()) == 4


def test_calls_with_a_deadline_end_one_after_the_other(world, procs):
    quick = with_timeout(procs.spawn("b", AsyncCounter), 1)
    quick.add.call(0).get()
    first = quick.sleep.call(50)
    world.advance(0.7)
    second = quick.sleep.call(50)
    world.advance(0.6)
    assert [repr(call) for call in (first, second)] == ["<Future failed>", "<Future pending>"]
    world.advance(0.7)
    assert isinstance(second.exception(), TimeoutError)


def test_a_deadline_holds_for_calls_between_actors(world, procs):
    waiter, sleeper = procs.slice(hosts=0, gpus=0).spawn("a", AsyncCounter), procs.slice(hosts=1, gpus=0).spawn("b", AsyncCounter)
    began_s = world.now_s
    assert "rank 0: busy for 1.0 s in 'sleep'" in waiter.late_call.call_one(sleeper, 5).get()
    assert world.now_s - began_s < 1.5


def test_a_time_out_says_who_has_answered_and_what_the_others_do(world, procs):
    counters = procs.spawn("c", Counter)
    counters.add.call(0).get()
    counters.slice(hosts=0).sleep.broadcast(100)
    world.freeze(procs, hosts=1, gpus=1)
    began_s = world.now_s
    with pytest.raises(TimeoutError) as caught:
        counters.add.call(0).get(timeout=3)
    assert str(caught.value).splitlines()[1:] == [
        "  answered: rank 2 (1 of 4)",
        "  rank 0: busy for 3.0 s in 'sleep', 1 waiting",
        "  rank 1: busy for 3.0 s in 'sleep', 1 waiting",
        "  rank 3: its process is stopped by a signal",
    ]
    assert world.now_s - began_s == pytest.approx(3, abs=0.1)


def test_a_time_out_waits_a_moment_for_agents_that_do_not_answer(world, procs):
    counters = procs.spawn("c", Counter)
    counters.add.call(0).get()
    world.network.stall(world.client, world.hosts.slice(hosts=1))
    began_s = world.now_s
    with pytest.raises(TimeoutError, match=r"answered: ranks 0.1 \(2 of 4\)(.|\n)*rank 2: its host agent has not said"):
        counters.add.call(0).get(timeout=3)
    assert world.now_s - began_s == pytest.approx(3.25, abs=0.1)


def test_a_time_out_inside_an_actor_tells_of_its_own_calls(procs):
    one, other = procs.spawn("one", Counter), procs.spawn("other", Counter)
    told = one.slice(hosts=0, gpus=0).patience.call_one(other).get()
    assert "answered: none of 4\n  rank 0: busy for 1.0 s in 'sleep'" in told


def test_the_oldest_concurrent_call_is_told_with_its_virtual_time(world, procs):
    servers = procs.slice(hosts=0, gpus=0).spawn("a", AsyncCounter)
    servers.add.call(0).get()
    late = servers.serve.call(100)
    world.advance(4)
    servers.serve.broadcast(100)
    with pytest.raises(TimeoutError, match=r"2 concurrent under way, the oldest 'serve' for 5\.0 s"):
        late.get(timeout=1)


def test_advance_stops_at_the_moment(world, procs):
    procs.initialized.get()
    sleeping = procs.spawn("a", AsyncCounter).sleep.call(5)
    start_s = world.now_s
    world.advance(4)
    assert world.now_s == start_s + 4
    assert repr(sleeping) == "<Future pending>"
    world.advance(2)
    assert repr(sleeping) == "<Future done>"


def test_settle_lets_messages_arrive_and_fires_no_timer(world, procs):
    counters = procs.spawn("c", Counter)
    counters.add.call(0).get()
    sleeping = procs.spawn("a", AsyncCounter).sleep.call(5)
    counters.add.broadcast(1)
    assert repr(sleeping) == "<Future pending>"
    world.settle()
    assert world.now_s < 1
    assert list(counters.add.call(0).get().values()) == [1] * 4


def test_nothing_happens_between_two_waits(world, procs):
    counters = procs.spawn("c", Counter)
    counters.add.call(0).get()
    future = counters.add.call(1)
    assert repr(future) == "<Future pending>"


def test_a_coroutine_of_the_test_runs_in_virtual_time(world, procs):
    async def main() -> list[int]:
        await asyncio.sleep(100)
        return list((await procs.spawn("c", Counter).add.call(2)).values())

    assert world.run(main()) == [2] * 4
    assert world.now_s > 100


def test_a_sync_actor_runs_a_coroutine(world, procs):
    assert list(procs.spawn("c", Counter).run_coroutine.call(50).get().values()) == ["slept"] * 4
    assert world.now_s > 50


def test_the_test_sleeps_in_virtual_time_too(world):
    time.sleep(3600 * 24)
    assert world.now_s == 3600 * 24


# --- ends ----------------------------------------------------------------------------------------------------------


def test_a_killed_process_is_an_error_for_the_caller_and_a_fault_for_the_owner(world, procs):
    counters = procs.spawn("c", Counter)
    counters.add.call(1).get()
    world.kill(procs, hosts=1, gpus=0)
    with pytest.raises(SupervisionError, match=r"Killed\(sig=9\)"):
        counters.add.call(1).get()
    assert [fault.crashed_ranks for fault in world.faults] == [[2]]
    assert counters.slice(hosts=0).add.call(1).get().values() is not None


def test_a_call_in_progress_ends_with_its_process(world, procs):
    sleeping = procs.spawn("c", Counter).slice(hosts=0).sleep.call(100)
    world.advance(1)
    world.kill(procs, hosts=0, gpus=0)
    with pytest.raises(SupervisionError):
        sleeping.get()
    assert world.now_s < 2
    assert len(world.faults) == 1


def test_an_owner_hears_of_what_it_owns(world, procs):
    owner = this_host().spawn_procs().spawn("o", Owner, procs)
    owner.total.call().get()
    world.kill(procs, hosts=0, gpus=1)
    world.advance(1)
    heard = owner.failures.call_one().get()
    assert len(heard) == 1
    assert "SIGKILL" in heard[0]
    assert [fault.report().count("<proc anon") for fault in world.faults] == [1]  # the test owns the process, the owner the actor


def test_a_host_that_is_killed_takes_its_processes_along(world, procs):
    counters = procs.spawn("c", Counter)
    counters.add.call(1).get()
    world.kill(world.hosts, hosts=0)
    with pytest.raises(SupervisionError):
        counters.slice(hosts=0).add.call(1).get()
    assert list(counters.slice(hosts=1).add.call(1).get().values()) == [2, 2]
    assert [fault.crashed_ranks for fault in world.faults] == [[0, 1]]


def test_a_frozen_process_answers_when_it_is_thawed(world, procs):
    counters = procs.spawn("c", Counter)
    counters.add.call(1).get()
    world.freeze(procs, gpus=0)
    answer = counters.add.call(1)
    with pytest.raises(TimeoutError):
        answer.get(timeout=5)
    world.thaw(procs, gpus=0)
    assert list(answer.get().values()) == [2] * 4


def test_what_is_frozen_too_long_is_killed_if_so_configured(procs, world):
    from monarch.config import configured

    with configured(proc_stopped_limit="5s"):
        frozen = world.hosts.spawn_procs()
        counters = frozen.spawn("c", Counter)
        counters.add.call(1).get()
    world.freeze(frozen, hosts=0)
    world.advance(4)
    assert world.faults == []
    world.advance(2)
    assert "SIGSTOP" in world.faults[0].report()


def test_what_is_frozen_is_killed_after_ten_seconds(world, procs):
    procs.spawn("c", Counter).add.call(1).get()
    world.freeze(procs, hosts=1, gpus=1)
    world.advance(9.9)
    assert world.faults == []
    world.advance(0.2)
    assert "10 s (proc_stopped_limit)" in world.faults[0].report()


@pytest.mark.parametrize(("do", "done"), [("kill", "killed"), ("freeze", "frozen"), ("thaw", "thawed")])
def test_the_process_of_the_test_stays(world, procs, do, done):
    counters, own = procs.spawn("c", Counter), this_proc().spawn("own", Counter)
    for mesh in (world.client, this_proc(), own):
        with pytest.raises(ValueError, match=f"process of the test itself, which can't be {done}\n  next:  give a mesh of hosts"):
            getattr(world, do)(mesh)
    with pytest.raises(ValueError, match="<the client>"):
        getattr(world, do)(world.client, hosts=0)
    with pytest.raises(TypeError, match=f"5 is no mesh, so it can't be {done}"):
        getattr(world, do)(5, hosts=0)
    assert list(counters.add.call(1).get().values()) == [1] * 4


def test_a_stopped_mesh_is_no_fault(world, procs):
    counters = procs.spawn("c", Counter)
    counters.add.call(1).get()
    procs.stop().get()
    with pytest.raises(SupervisionError):
        counters.add.call(1).get()
    assert world.faults == []


def test_activity_is_seen_from_outside(world, procs):
    sleeping = procs.spawn("c", Counter).sleep.call(100)
    world.advance(10)
    rows = procs.activity().get()
    assert [(row.name, row.endpoint, row.state) for row in rows] == [("c", "sleep", "busy")] * 4
    assert all(9 < row.running_s < 10.1 for row in rows)
    sleeping.get()


def test_a_fault_that_the_test_does_not_look_at_fails_it():
    with pytest.raises(UnhandledFaultsError, match=r"1 failures(.|\n)*Killed"), universe() as world:
        procs = world.hosts.spawn_procs()
        procs.spawn("c", Counter).add.call(1).get()
        world.kill(procs)
        world.advance(1)


def test_the_users_hook_is_called(world, procs, monkeypatch):
    heard = []
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", heard.append)
    procs.spawn("c", Counter).fail.broadcast()
    world.settle()
    assert len(heard) == 4
    assert len(world.faults) == 4


# --- determinism ---------------------------------------------------------------------------------------------------


def run_once(seed: int) -> list[str]:
    with universe(hosts=2, seed=seed) as world:
        procs = world.hosts.spawn_procs(per_host={"gpus": 2})
        counters, others = procs.spawn("c", Counter), procs.spawn("a", AsyncCounter)
        calls = [others.ask.call(counters) for _ in range(3)]
        world.advance(0.0105)
        world.kill(procs, hosts=random.randrange(2), gpus=random.randrange(2))
        for call in calls:
            call.exception()
        counters.add.choose(1).exception()
        _ = world.faults
        return world.trace.lines()


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32))
def test_equal_seeds_give_equal_traces(seed):
    first = run_once(seed)
    assert len(first) > 40
    assert run_once(seed) == first


def test_seeds_choose_the_order():
    assert len({tuple(run_once(seed)) for seed in range(5)}) == 5


def test_every_seed_gives_some_order_of_concurrent_senders():
    def order(seed: int) -> tuple[int, ...]:
        with universe(hosts=3, seed=seed) as world:
            procs = world.hosts.spawn_procs()
            keeper = this_host().spawn_procs().spawn("k", Counter)
            procs.spawn("s", Sender).send.call(keeper).get()
            return tuple(keeper.all_seen.call_one().get())

    assert {order(seed) for seed in range(40)} == {(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)}


class Sender(monarch.actor.Actor):
    @monarch.actor.endpoint
    def send(self, keeper: Counter) -> None:
        keeper.see.broadcast(monarch.actor.current_rank().rank)
        keeper.add.call_one(0).get()


# --- the universe and the process it is in -------------------------------------------------------------------------


def test_leaving_gives_everything_back():
    before = (asyncio.get_event_loop_policy(), time.sleep, random.getstate(), future._story)
    with universe(seed=3):
        this_host()
    assert (asyncio.get_event_loop_policy(), time.sleep, random.getstate(), future._story) == before
    assert monarch.actor.process.known_process() is None


def test_code_that_waits_is_ended_with_the_universe():
    with universe() as world:
        sleeper = world.hosts.spawn_procs().spawn("c", Counter).sleep.call(1e9)
        world.advance(1)
        assert any(thread.name.startswith("universe-") for thread in threading.enumerate())
    assert not any(thread.name.startswith("universe-") for thread in threading.enumerate())
    assert repr(sleeper) == "<Future pending>"


def test_one_universe_at_a_time(world):
    with pytest.raises(RuntimeError, match="close it first"), universe():
        pass


async def test_a_universe_is_not_opened_inside_an_event_loop():
    with pytest.raises(RuntimeError, match=r"world\.run"), universe():
        pass


def test_another_thread_may_not_wait(world, procs):
    future, caught = procs.spawn("c", Counter).add.call(1), []
    thread = threading.Thread(target=lambda: caught.append(future.exception()))
    thread.start()
    thread.join()
    assert "does not belong to the universe" in str(caught[0])
    future.get()


def test_a_test_that_waits_for_ever_is_told(world, procs):
    with pytest.raises(DeadlockError):
        procs.spawn("c", Counter).sleep.call(1e5).get()


@pytest.mark.parametrize("hosts", [0, -1])
def test_there_is_a_host(hosts):
    with pytest.raises(ValueError, match=r"at least 1\n  next:  write universe\(hosts=2\)"):
        universe(hosts)


@pytest.mark.parametrize("hosts", ["a", "2", True, 2.0, None, [2]])
def test_hosts_are_counted(hosts):
    with pytest.raises(TypeError, match=r"expected an integer(.|\n)*next:  write universe\(hosts=2\)"):
        universe(hosts)


# --- supervision policies under the virtual clock ------------------------------------------------------------------


def test_a_restart_waits_for_its_backoff(world, procs):
    policy = monarch.actor.OneForOne(max_restarts=3, within_s=60, backoff_s=10)
    counters = procs.supervised(policy).spawn("c", Counter)
    counters.add.call(5).get()
    killed_s = world.now_s
    world.kill(procs, hosts=1, gpus=0)
    world.advance(1)
    assert counters.slice(hosts=1, gpus=0).add.call_one(1).get() == 1
    assert world.now_s - killed_s == pytest.approx(10, abs=0.1)
    assert world.faults == []
