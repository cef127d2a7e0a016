"""Futures of real calls: from many threads and loops, with Ctrl-C, on the background loop, and after the end."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import warnings

import pytest

from monarch.actor import Actor, ActorError, Future, endpoint, returns_future, shutdown_context, this_host
from system.actors import Caller, Echo, Gate, SyncCaller
from system.script import start_script

WAIT_S = 10.0


@pytest.fixture(scope="module")
def procs():
    return this_host().spawn_procs(per_host={"gpus": 2})


@pytest.fixture(scope="module")
def echo(procs):
    return procs.spawn("echo", Echo)


@pytest.fixture
def gate(procs):
    mesh = procs.spawn("gate", Gate)
    yield mesh
    mesh.stop().get(WAIT_S)


def test_many_threads_and_loops_wait_for_one_call(gate):
    future = gate.wait.call("x")
    seen = []

    def by_loop():
        async def observe():
            return await future

        seen.append(asyncio.run(observe()))

    threads = [threading.Thread(target=lambda: seen.append(future.get(WAIT_S))) for _ in range(8)]
    threads += [threading.Thread(target=by_loop) for _ in range(8)]
    for thread in threads:
        thread.start()
    gate.open.broadcast()
    for thread in threads:
        thread.join(WAIT_S)
    assert [values.values() for values in seen] == [["x", "x"]] * 16
    assert all(values is seen[0] for values in seen)


def test_a_remote_failure_is_one_object_for_all_observers(echo):
    future = echo.fail.call("same")
    errors = [future.exception(WAIT_S) for _ in range(3)]
    assert isinstance(errors[0], ActorError) and errors[0] is errors[1] is errors[2]

    async def observe():
        await future

    with pytest.raises(ActorError, match="same") as caught:
        asyncio.run(observe())
    assert caught.value is errors[0]


def test_a_timed_out_call_can_be_asked_again(gate):
    future = gate.wait.call("late")
    for _ in range(3):
        with pytest.raises(TimeoutError):
            future.get(timeout=0.005)
    gate.open.call().get(WAIT_S)
    assert future.get(timeout=WAIT_S).values() == ["late", "late"]


def test_an_invalid_timeout_is_refused_before_anything_is_waited_for(gate):
    future = gate.wait.call()
    for wrong in (float("nan"), float("inf"), -1):
        with pytest.raises(ValueError, match="invalid timeout"):
            future.get(timeout=wrong)


async def test_a_client_with_a_loop_may_block_and_is_warned_once(echo, gate):
    future = gate.wait.call()
    with pytest.warns(UserWarning, match="active event loop") as seen, pytest.raises(TimeoutError):
        future.get(0.01)
    assert len(seen) == 1
    gate.open.broadcast()
    await future
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        future.get()
        assert (await echo.rank.call()).values() == [0, 1]


async def test_a_cancelled_wait_leaves_the_call_alone(gate):
    future = gate.wait.call("still there")
    task = asyncio.ensure_future(future)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(future, 0.005)
    await gate.open.call()
    assert (await future).values() == ["still there"] * 2


@pytest.mark.parametrize("cls", [Caller, SyncCaller], ids=lambda cls: cls.__name__)
def test_actors_of_both_kinds_wait_for_futures(procs, echo, cls):
    assert procs.spawn("caller", cls, echo).call.call("rank").get(WAIT_S).values() == [[0, 1], [0, 1]]


def test_an_async_endpoint_that_blocks_on_a_future_works_and_warns(procs, echo):
    class Blocking(Actor):
        @endpoint
        async def ask(self, echo):
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                values = echo.rank.call().get(WAIT_S).values()
            return values, [str(warning.message) for warning in seen]

    values, texts = procs.spawn("blocking", Blocking)[0].ask.call_one(echo).get(WAIT_S)
    assert values == [0, 1]
    assert len(texts) <= 1 and all("active event loop" in text for text in texts)


def test_from_coro_and_returns_future_start_at_once_on_the_background_loop(echo):
    started = threading.Event()

    async def work(value):
        started.set()
        await asyncio.sleep(0)
        return value, (await echo.rank.call()).values(), threading.current_thread() is threading.main_thread()

    future = Future._from_coro(work(3))
    assert started.wait(WAIT_S)
    assert future.get(WAIT_S) == (3, [0, 1], False)

    @returns_future
    async def decorated(value):
        """Its text."""
        return await work(value)

    assert decorated.__name__ == "decorated" and decorated.__doc__ == "Its text."
    again = decorated(value=4)
    assert isinstance(again, Future) and again.get(WAIT_S)[0] == 4
    with pytest.raises(TypeError):
        decorated()


def test_a_failing_coroutine_fails_its_future_and_base_exceptions_escape():
    class Stopped(BaseException):
        pass

    async def fail(error):
        raise error

    error = KeyError("k")
    assert Future._from_coro(fail(error)).exception(WAIT_S) is error
    future = Future._from_coro(fail(Stopped("s")))
    for _ in range(2):
        with pytest.raises(Stopped, match="s"):
            future.get(WAIT_S)
    assert Future._from_coro(fail(ValueError("after"))).exception(WAIT_S).args == ("after",)


def test_an_abandoned_future_costs_nothing_and_its_late_reply_is_dropped(procs, gate):
    for _ in range(20):
        gate.wait.call()
    gate.open.call().get(WAIT_S)
    assert procs.spawn("echo", Echo).rank.call().get(WAIT_S).values() == [0, 1]


SCRIPT = """
    import asyncio, threading
    from monarch.actor import Actor, endpoint, this_host

    class Sleeper(Actor):
        @endpoint
        def sleep(self):
            threading.Event().wait()

    sleeper = this_host().spawn_procs(per_host={{"gpus": 2}}).spawn("sleeper", Sleeper)
    future = sleeper.sleep.call()
    async def wait():
        await future
    try:
        print("ready", flush=True)
        {wait}
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        raise
"""


@pytest.mark.parametrize("wait", ["future.get()", "future.get(timeout=60)", "asyncio.run(wait())"])
def test_ctrl_c_interrupts_a_main_thread_that_waits(wait):
    with start_script(SCRIPT.format(wait=wait)) as run:
        run.wait_line("ready")
        os.kill(run.pid, signal.SIGINT)
        run.wait_line("interrupted")
        done = run.finish()
    assert done.returncode in (1, 130, -signal.SIGINT) and not done.leftovers, done
    assert done.seconds < 12, done
    if "asyncio" not in wait:
        assert "get() was waiting for answers\n  answered: none of 2\n  no answer yet of sleeper.sleep: ranks 0-1\n" in done.stderr, done


def test_futures_of_a_client_that_was_shut_down_fail_or_keep_their_outcome(procs, echo, gate):
    """Last in this file: it ends the module's client, and starts another one."""
    finished = echo.rank.call()
    finished.get(WAIT_S)
    pending = gate.wait.call()
    assert shutdown_context().get(WAIT_S) is None
    assert shutdown_context().get(WAIT_S) is None
    assert finished.get(WAIT_S).values() == [0, 1]
    with pytest.raises(RuntimeError, match=r"gate\.wait\(\) failed|shut down"):
        pending.get(WAIT_S)
    with pytest.raises(RuntimeError):
        echo.rank.call().get(WAIT_S)
    again = this_host().spawn_procs(per_host={"gpus": 1}).spawn("echo", Echo)
    assert again.rank.call_one().get(WAIT_S) == 0
