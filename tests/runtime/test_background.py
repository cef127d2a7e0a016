"""The background loop: coroutines that belong to nobody's loop run, and end with the process at the latest."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading

import pytest

from monarch._runtime import background
from monarch._runtime.background import returns_future
from monarch._runtime.future import Future

WAIT_S = 10.0
pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(autouse=True)
def stopped():
    yield
    background.stop()


@returns_future
async def double(number, *, by=2):
    """Twice as much."""
    await asyncio.sleep(0)
    return number * by


@returns_future
async def never():
    await asyncio.Event().wait()


def test_a_coroutine_function_returns_a_future():
    assert double(4).get(WAIT_S) == 8
    assert double(4, by=3).get(WAIT_S) == 12
    assert (double.__name__, double.__doc__) == ("double", "Twice as much.")


def test_its_body_starts_at_the_call():
    started = threading.Event()

    @returns_future
    async def start():
        started.set()

    future = start()
    assert started.wait(WAIT_S)
    assert future.get(WAIT_S) is None


def test_it_fails_with_what_its_body_raised():
    @returns_future
    async def fail():
        raise LookupError("no key")

    with pytest.raises(LookupError, match="no key"):
        fail().get(WAIT_S)


def test_wrong_arguments_are_an_error_of_the_call():
    with pytest.raises(TypeError, match="by_mistake"):
        double(4, by_mistake=1)


def test_coroutines_run_at_the_same_time_on_one_thread():
    inside, all_inside = [], asyncio.Event()

    @returns_future
    async def meet():
        inside.append(threading.current_thread())
        if len(inside) == 20:
            all_inside.set()
        await all_inside.wait()

    for future in [meet() for _ in range(20)]:
        future.get(WAIT_S)
    (thread,) = set(inside)
    assert thread.daemon
    assert thread is not threading.current_thread()


def test_one_coroutine_may_wait_for_another():
    @returns_future
    async def outer():
        return await double(await double(1))

    assert outer().get(WAIT_S) == 4


def test_a_running_loop_may_await_it():
    async def main():
        return await double(5)

    assert asyncio.run(main()) == 10


@pytest.mark.parametrize("when", ["at once", "after its start"])
def test_stopping_ends_what_runs(when):
    started = threading.Event()

    async def wait():
        started.set()
        await asyncio.Event().wait()

    futures = [Future._from_coro(wait()) for _ in range(3)]
    if when != "at once":
        assert started.wait(WAIT_S)
    background.stop()
    for future in futures:
        assert future._done
        with pytest.raises(asyncio.CancelledError):
            future.get(WAIT_S)


def test_a_coroutine_may_clean_up_when_it_is_stopped():
    cleaned, started = threading.Event(), threading.Event()

    async def wait():
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.set()

    Future._from_coro(wait())
    assert started.wait(WAIT_S)
    background.stop()
    assert cleaned.is_set()


def test_stopping_is_harmless_twice_and_before_any_start():
    background.stop()
    background.stop()
    assert double(1).get(WAIT_S) == 2
    background.stop()
    background.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "monarch-background"]


def test_a_coroutine_may_stop_the_loop_that_it_runs_on():
    @returns_future
    async def stop():
        background.stop()
        return "stopped"

    assert stop().get(WAIT_S) == "stopped"
    assert double(2).get(WAIT_S) == 4  # on a new one
    assert not never()._done


def test_no_wait_is_forgotten_between_starts_and_stops():
    futures = []

    def start():
        for _ in range(200):
            futures.append(double(1))

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        background.stop()
    background.stop()
    assert len(futures) == 400
    for future in futures:
        assert future._done
        with contextlib.suppress(asyncio.CancelledError):
            assert future.get(WAIT_S) == 2


def test_a_coroutine_sees_the_context_of_its_call():
    variable = contextvars.ContextVar("variable", default="none")

    @returns_future
    async def look():
        return variable.get()

    context = contextvars.copy_context()
    context.run(variable.set, "set")
    assert context.run(look).get(WAIT_S) == "set"
    assert look().get(WAIT_S) == "none"
