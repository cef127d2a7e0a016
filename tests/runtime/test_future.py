"""Futures: completed once, observed by anybody, any number of times, with the same outcome."""

from __future__ import annotations

import asyncio
import logging
import math
import pickle
import threading
import traceback
import warnings
from typing import Any

import pytest

from monarch._runtime.future import Future, gather

WAIT_S = 5.0


class Stopped(BaseException):
    """Not an `Exception`."""


def new() -> Future:
    return Future._new()


def after_start(future, complete):
    """Run `complete` on a thread once somebody waits for `future`."""

    def run():
        while not future._waiters:
            pass
        complete()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def by_get(future):
    return future.get(WAIT_S)


def by_result(future):
    return future.result(WAIT_S)


def by_await(future):
    async def observe():
        return await future

    return asyncio.run(observe())


def by_as_asyncio(future):
    async def observe():
        return await future.as_asyncio()

    return asyncio.run(observe())


def by_gather(future):
    async def observe():
        return (await asyncio.gather(future))[0]

    return asyncio.run(observe())


def by_wait_for(future):
    async def observe():
        return await asyncio.wait_for(future, WAIT_S)

    return asyncio.run(observe())


def by_ensure_future(future):
    async def observe():
        return await asyncio.ensure_future(future)

    return asyncio.run(observe())


def by_thread(future):
    outcome = []

    def observe():
        try:
            outcome.append(future.get(WAIT_S))
        except BaseException as exc:
            outcome.append(exc)

    thread = threading.Thread(target=observe)
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


WAYS = [by_get, by_result, by_await, by_as_asyncio, by_gather, by_wait_for, by_ensure_future, by_thread]
first_way = pytest.mark.parametrize("way", WAYS, ids=lambda f: f.__name__)
then_way = pytest.mark.parametrize("then", WAYS, ids=lambda f: f.__name__)


def test_nobody_constructs_one():
    with pytest.raises(TypeError, match="Future objects are returned by Monarch operations, not made; for a coroutine use"):
        Future()


@first_way
@then_way
def test_a_value_is_seen_by_every_observer_in_any_order(way, then):
    value = object()
    future = new()
    thread = after_start(future, lambda: future._complete(value))
    assert way(future) is value
    assert then(future) is value
    thread.join()


@first_way
@then_way
def test_a_failure_is_the_same_object_for_every_observer(way, then):
    error = ValueError("no")
    future = new()
    thread = after_start(future, lambda: future._fail(error))
    for observe in (way, then):
        with pytest.raises(ValueError, match="no") as caught:
            observe(future)
        assert caught.value is error
    thread.join()


def test_the_traceback_of_a_failure_does_not_grow_with_every_look():
    future = Future._failed(ValueError("no"))
    lengths = set()
    for _ in range(5):
        with pytest.raises(ValueError) as caught:
            future.get()
        lengths.add(len(traceback.format_exception(caught.value)))
    assert len(lengths) == 1


def test_the_first_outcome_stays():
    future = Future._completed(1)
    future._fail(ValueError())
    future._complete(2)
    assert future.get() == 1
    future = Future._failed(KeyError("first"))
    future._complete(2)
    assert isinstance(future.exception(), KeyError)


def test_an_outcome_is_decoded_once_by_its_first_observer():
    decoded = []

    def decode(raw):
        decoded.append((raw, threading.current_thread().name))
        return raw * 2

    future = new()
    thread = threading.Thread(target=future._complete, args=(21, decode), name="net")
    thread.start()
    thread.join()
    assert decoded == []
    threads = [threading.Thread(target=future.get) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert future.get() == 42 and len(decoded) == 1 and decoded[0][1] != "net"


def test_a_failure_of_decoding_is_the_outcome():
    def decode(raw):
        raise LookupError("bad bytes")

    future = new()
    future._complete(b"", decode)
    first, second = future.exception(), future.exception()
    assert isinstance(first, LookupError) and first is second


# --- time ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("observe", [Future.get, Future.result], ids=lambda f: f.__name__)
def test_a_timeout_is_the_builtin_and_poisons_nothing(observe):
    future = new()
    for _ in range(3):
        with pytest.raises(TimeoutError, match=r"no outcome within 0.001 s; the operation goes on"):
            observe(future, 0.001)
    with pytest.raises(TimeoutError):
        observe(future, timeout=0)
    future._complete("late")
    assert observe(future, 0) == "late"


def test_exception_returns_failures_and_timeouts_and_lets_the_rest_out():
    future = new()
    assert isinstance(future.exception(0.001), TimeoutError)
    future._complete(1)
    assert future.exception() is None
    error = OSError("x")
    assert Future._failed(error).exception() is error
    with pytest.raises(Stopped):
        Future._failed(Stopped()).exception()


@pytest.mark.parametrize("timeout", [math.nan, math.inf, -math.inf, -1, -0.001])
def test_an_invalid_timeout_is_refused_unless_the_outcome_is_there(timeout):
    future = new()
    for observe in (future.get, future.result):
        with pytest.raises(ValueError, match=f"invalid timeout {timeout!r}; expected a finite number of seconds"):
            observe(timeout)
    assert isinstance(future.exception(timeout), ValueError)
    future._complete(1)
    assert future.get(timeout) == 1


@pytest.mark.parametrize("timeout", ["3", [1], object(), 10**400])
def test_a_timeout_that_is_no_number_is_refused_with_what_to_write(timeout):
    with pytest.raises(TypeError if timeout != 10**400 else ValueError, match=r"invalid timeout .*\n  next: .*None"):
        Future._new().get(timeout)


def test_polling_with_timeouts_does_not_pile_up_waiters():
    future = new()
    for _ in range(100):
        future.exception(0)
    assert len(future._waiters) < 5


# --- loops -----------------------------------------------------------------------------------------------------------


def test_await_and_as_asyncio_need_a_loop_and_consume_nothing():
    future = Future._completed(3)
    with pytest.raises(RuntimeError, match=r"needs a running event loop; outside of one write \.get"):
        future.as_asyncio()
    with pytest.raises(ValueError, match="__await__ with no active event loop"):
        future.__await__().send(None)
    assert future.get() == 3


async def test_each_asyncio_future_is_its_own_and_cancelling_one_hurts_no_other():
    future = new()
    one, other = future.as_asyncio(), future.as_asyncio()
    assert one is not other
    one.cancel()
    task = asyncio.ensure_future(future)
    await asyncio.sleep(0)
    task.cancel()
    threading.Thread(target=future._complete, args=("v",)).start()
    assert await other == "v"
    assert await future == "v"
    assert one.cancelled()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_two_loops_on_two_threads_both_get_it():
    future = new()
    outcomes = []
    threads = [threading.Thread(target=lambda: outcomes.append(by_await(future))) for _ in range(2)]
    for thread in threads:
        thread.start()
    while len(future._waiters) < 2:
        pass
    future._complete("both")
    for thread in threads:
        thread.join()
    assert outcomes == ["both", "both"]


async def test_wait_for_times_out_and_leaves_the_future_usable():
    future = new()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(future, 0.001)
    future._complete(5)
    assert await future == 5


def test_a_loop_that_was_closed_meanwhile_is_no_problem_for_the_completer():
    future = new()

    async def leave():
        future.as_asyncio()

    asyncio.run(leave())
    future._complete(1)
    assert future.get() == 1


def test_a_failure_nobody_looks_at_makes_no_noise(caplog):
    async def leave():
        Future._failed(ValueError("unseen")).as_asyncio()

    asyncio.run(leave())
    assert caplog.records == []


async def test_get_inside_a_loop_works_and_warns_once_with_advice(caplog):
    caplog.set_level(logging.DEBUG, "monarch.future")
    future = new()
    thread = after_start(future, lambda: future._complete(1))
    with pytest.warns(UserWarning, match=r"blocks the active event loop of this thread; write .await future. or use as_asyncio") as seen:
        assert future.get(WAIT_S) == 1
    thread.join()
    assert len(seen) == 1
    assert [(record.context, record.levelno) for record in caplog.records] == [("asyncio", logging.DEBUG)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert future.get() == 1


async def test_the_warning_points_at_the_line_that_blocks():
    with pytest.warns(UserWarning, match=r"Future\.get\(\) blocks") as seen:
        new().exception(0)
    assert seen[0].filename == __file__
    with pytest.warns(UserWarning, match=r"Future\.get\(\) blocks") as seen, pytest.raises(TimeoutError):
        new().get(0)
    assert seen[0].filename == __file__


async def test_what_waits_for_a_future_of_ours_is_named_as_what_blocks():
    ours: dict[str, Any] = {"__name__": "monarch.ours"}
    exec("def close(future):\n    return inner(future)\ndef inner(future):\n    return future.exception(0)", ours)
    with pytest.warns(UserWarning, match=r'^close\(\) blocks the active event loop .*"await asyncio\.to_thread\(\.\.\.\)"') as seen:
        ours["close"](new())
    assert [warning.filename for warning in seen] == [__file__]


async def test_stop_iteration_becomes_a_runtime_error_on_a_loop():
    future = Future._failed(StopIteration(3))
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        await future.as_asyncio()
    assert isinstance(caught.value.__cause__, StopIteration)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await future


def test_a_base_exception_escapes_every_time():
    future = Future._failed(Stopped("s"))
    for observe in (by_get, by_result, by_await, by_get):
        with pytest.raises(Stopped, match="s"):
            observe(future)


# --- derived ---------------------------------------------------------------------------------------------------------


def test_then_transforms_values_and_passes_failures_on():
    future = new()
    doubled = future._then(lambda value: value * 2)
    future._complete(4)
    assert doubled.get() == 8
    error = KeyError("k")
    assert Future._failed(error)._then(len).exception() is error
    assert isinstance(Future._completed(1)._then(len).exception(), TypeError)


def test_gather_gives_values_in_order_or_the_first_failure():
    assert gather([]).get() == []
    parts = [new() for _ in range(3)]
    whole = gather(parts)
    for part, value in zip(reversed(parts), "cba", strict=True):
        assert not whole._done
        part._complete(value)
    assert whole.get() == ["a", "b", "c"]
    parts = [new() for _ in range(3)]
    whole = gather(parts)
    error = ValueError("one")
    parts[1]._fail(error)
    assert whole.exception() is error


def test_the_inner_outcome_is_taken_once():
    future = new()
    heir = future._take_inner()
    future._complete(1)
    assert heir.get() == 1
    for use in (future.get, future._take_inner, lambda: by_await(future), lambda: by_as_asyncio(future)):
        with pytest.raises(ValueError, match="consumed"):
            use()
    with pytest.raises(ValueError, match="consumed"):
        Future._completed(1)._take_inner()


def test_it_shows_its_state_and_does_not_travel():
    future = new()
    assert repr(future) == "<Future pending>"
    assert repr(Future._completed(1)) == "<Future done>"
    assert repr(Future._failed(ValueError())) == "<Future failed>"
    with pytest.raises(TypeError, match="a Future can't be pickled: it belongs to this process; send the value"):
        pickle.dumps(future)
    assert Future[int] is not None


# --- races -----------------------------------------------------------------------------------------------------------


def test_no_waiter_is_missed_when_completion_races_with_waiting():
    for round_number in range(300):
        future = new()
        barrier = threading.Barrier(3)
        seen = []

        def wait(future=future, barrier=barrier, seen=seen):
            barrier.wait()
            seen.append(future.get(WAIT_S))

        threads = [threading.Thread(target=wait) for _ in range(2)]
        for thread in threads:
            thread.start()
        barrier.wait()
        future._complete(round_number)
        for thread in threads:
            thread.join()
        assert seen == [round_number] * 2


def test_many_threads_and_loops_observe_one_future():
    future = new()
    seen = []
    threads = [threading.Thread(target=lambda way=way: seen.append(way(future))) for way in WAYS for _ in range(4)]
    for thread in threads:
        thread.start()
    future._complete("x")
    for thread in threads:
        thread.join()
    assert seen == ["x"] * len(threads)
