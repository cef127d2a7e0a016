"""The loop of an async actor is an asyncio loop like any other, though it sleeps elsewhere, and no wake-up is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time

import pytest

from monarch._net.loop import NetLoop
from monarch._runtime.actor_loop import new_actor_loop

WAIT_S = 10.0


@pytest.fixture
def net():
    net = NetLoop("monarch-test-net")
    net.start()
    yield net
    net.stop()
    net.join(WAIT_S)


@pytest.fixture(params=["drives the net loop", "waits while another drives", "polls", "net loop has ended"])
def run(request, net):
    """Runs a coroutine on an actor's loop, in each of the ways in which it may sleep."""
    loop = new_actor_loop(net)
    ended, drives, pipe = threading.Event(), threading.Event(), os.pipe()
    driver = threading.Thread(target=lambda: net.drive(lambda: drives.set() or ended.is_set(), WAIT_S))
    if request.param == "waits while another drives":
        driver.start()
        assert drives.wait(WAIT_S)
    elif request.param == "polls":
        loop.add_reader(pipe[0], lambda: None)
    elif request.param == "net loop has ended":
        net.stop()
        net.join(WAIT_S)

    def run_until_complete(coroutine):
        return loop.run_until_complete(asyncio.wait_for(coroutine, WAIT_S))

    run_until_complete.loop = loop
    yield run_until_complete
    loop.remove_reader(pipe[0])
    for fd in pipe:
        os.close(fd)
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    ended.set()
    net.kick()
    if driver.ident:
        driver.join(WAIT_S)


# --- time ----------------------------------------------------------------------------------------------------------


def test_sleeps_end_in_their_order_and_not_early(run):
    async def main():
        seen, began_s = [], time.monotonic()

        async def sleep(delay_s):
            await asyncio.sleep(delay_s)
            seen.append((delay_s, time.monotonic() - began_s))

        await asyncio.gather(*map(sleep, (0.02, 0, 0.005, 0.01)))
        return seen

    seen = run(main())
    assert [delay_s for delay_s, _ in seen] == [0, 0.005, 0.01, 0.02]
    assert all(took_s >= delay_s - 0.001 for delay_s, took_s in seen)


def test_time_outs_and_cancellation_work(run):
    async def main():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 0.005)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.005):
                await asyncio.sleep(WAIT_S)
        task = asyncio.create_task(asyncio.sleep(WAIT_S))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return "done"

    assert run(main()) == "done"


def test_a_sleep_is_no_longer_because_the_thread_was_wanted_elsewhere(net):
    """A loop that left the seat slept for its whole time again."""
    loop = new_actor_loop(net)
    me = threading.get_ident()
    left = []

    def leave():
        net.leave_seat()
        if threading.get_ident() == me:
            left.append(True)
        else:
            net.call_soon(leave)  # the net loop's own thread was faster

    net.call_later(0.15, leave)
    began_s = time.monotonic()
    loop.run_until_complete(asyncio.sleep(0.2))
    took_s = time.monotonic() - began_s
    loop.close()
    assert left
    assert 0.199 <= took_s < 0.3


# --- wake-ups ------------------------------------------------------------------------------------------------------


def test_calls_of_another_thread_wake_the_loop(run):
    async def main():
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        thread = threading.Thread(target=loop.call_soon_threadsafe, args=[event.set])
        thread.start()
        await event.wait()
        thread.join()
        return "woken"

    assert run(main()) == "woken"


@pytest.mark.cpu_limit(6)
def test_thousands_of_wake_ups_are_all_answered(run):
    rounds = 1500

    async def main():
        loop = asyncio.get_running_loop()
        ping, answers = threading.Semaphore(0), []
        pong = asyncio.Event()

        def answer():
            for number in range(rounds):
                assert ping.acquire(timeout=WAIT_S)
                loop.call_soon_threadsafe(lambda number=number: (answers.append(number), pong.set()))

        thread = threading.Thread(target=answer)
        thread.start()
        for _ in range(rounds):
            ping.release()
            await pong.wait()
            pong.clear()
        thread.join()
        return answers

    assert run(main()) == list(range(rounds))


@pytest.mark.cpu_limit(6)
def test_calls_of_many_threads_all_arrive_in_the_order_of_each(run):
    num, threads = 800, 4

    async def main():
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        seen = [[] for _ in range(threads)]

        def arrive(own, number):
            own.append(number)
            if all(len(other) == num for other in seen):
                ended.set()

        def call(own):
            for number in range(num):
                loop.call_soon_threadsafe(arrive, own, number)

        started = [threading.Thread(target=call, args=[own]) for own in seen]
        for thread in started:
            thread.start()
        await ended.wait()
        for thread in started:
            thread.join()
        return seen

    assert run(main()) == [list(range(num))] * threads


@pytest.mark.cpu_limit(6)
def test_two_loops_that_wake_each_other_lose_nothing(net):
    rounds = 1000
    loops = [new_actor_loop(net) for _ in range(2)]
    queues = [asyncio.Queue() for _ in range(2)]
    received = [[], []]

    async def play(own, other):
        for number in range(rounds):
            if own == 0:
                loops[other].call_soon_threadsafe(queues[other].put_nowait, number)
            received[own].append(await asyncio.wait_for(queues[own].get(), WAIT_S))
            if own == 1:
                loops[other].call_soon_threadsafe(queues[other].put_nowait, number)

    thread = threading.Thread(target=lambda: loops[1].run_until_complete(play(1, 0)))
    thread.start()
    loops[0].run_until_complete(play(0, 1))
    thread.join(WAIT_S)
    for loop in loops:
        loop.close()
    assert received == [list(range(rounds))] * 2


def test_the_network_is_served_while_the_loop_sleeps(net):
    loop = new_actor_loop(net)
    near, far = socket.socketpair()
    near.setblocking(False)
    event = asyncio.Event()
    net.call_soon(net.watch, near.fileno(), 1, lambda mask: loop.call_soon_threadsafe(event.set))

    async def main():
        for _ in range(100):
            event.clear()
            far.send(b"x")
            await asyncio.wait_for(event.wait(), WAIT_S)

    loop.run_until_complete(main())
    loop.close()
    unwatched = threading.Event()
    net.call_soon(lambda: (net.unwatch(near.fileno()), unwatched.set()))
    assert unwatched.wait(WAIT_S)
    near.close()
    far.close()


def test_a_loop_that_sleeps_uses_no_processor_time(run):
    async def main():
        await asyncio.sleep(0.005)
        before_s = time.thread_time()
        await asyncio.sleep(0.05)
        return time.thread_time() - before_s

    assert run(main()) < 0.02


# --- what user code does with a loop -------------------------------------------------------------------------------


def test_streams_of_user_code_work(run):
    async def main():
        near, far = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=near)
        other_reader, other_writer = await asyncio.open_connection(sock=far)
        data = bytes(range(256)) * 4000

        async def echo():
            other_writer.write(await other_reader.readexactly(len(data)))
            await other_writer.drain()

        task = asyncio.create_task(echo())
        writer.write(data)
        await writer.drain()
        got = await reader.readexactly(len(data))
        await task
        for end in (writer, other_writer):
            end.close()
            await end.wait_closed()
        return got == data

    assert run(main())


def test_readers_come_and_go_between_sleeps(run):
    async def main():
        loop, seen = asyncio.get_running_loop(), []
        for number in range(50):
            near, far = socket.socketpair()
            with near, far:
                event = asyncio.Event()
                loop.add_reader(near, event.set)
                thread = threading.Thread(target=far.send, args=[b"x"])
                thread.start()
                await event.wait()
                loop.remove_reader(near)
                thread.join()
            await asyncio.sleep(0.0005)
            thread = threading.Thread(target=loop.call_soon_threadsafe, args=[seen.append, number])
            thread.start()
            while len(seen) <= number:
                await asyncio.sleep(0)
            thread.join()
        return seen

    assert run(main()) == list(range(50))


def test_wake_ups_arrive_while_a_socket_is_watched(run):
    async def main():
        loop = asyncio.get_running_loop()
        near, far = socket.socketpair()
        with near, far:
            loop.add_reader(near, lambda: None)
            for _ in range(200):
                event = asyncio.Event()
                thread = threading.Thread(target=loop.call_soon_threadsafe, args=[event.set])
                thread.start()
                await event.wait()
                thread.join()
            loop.remove_reader(near)
        return "done"

    assert run(main()) == "done"


def test_blocking_functions_run_in_an_executor(run):
    async def main():
        loop = asyncio.get_running_loop()
        own = threading.get_ident()
        others = await asyncio.gather(*(loop.run_in_executor(None, threading.get_ident) for _ in range(100)))
        return own in others, await asyncio.to_thread(sum, [1, 2])

    assert run(main()) == (False, 3)


def test_subprocesses_work(run):
    async def main():
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "print(input() * 2)", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate(b"ab\n")
        doomed = await asyncio.create_subprocess_exec("sleep", "60")
        doomed.kill()
        return out, process.returncode, await doomed.wait()

    assert run(main()) == (b"abab\n", 0, -signal.SIGKILL)


def test_queues_and_generators_work(run):
    async def main():
        queue = asyncio.Queue(1)

        async def numbers():
            for number in range(100):
                await queue.put(number)
                yield number

        async def consume():
            return [await queue.get() for _ in range(100)]

        task = asyncio.create_task(consume())
        produced = [number async for number in numbers()]
        return produced == await task

    assert run(main())


def test_a_closed_loop_refuses_calls(net):
    loop = new_actor_loop(net)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_soon_threadsafe(print)


def test_a_loop_may_be_stopped_from_another_thread(run):
    loop = run.loop
    stopper = threading.Thread(target=lambda: loop.call_soon_threadsafe(loop.stop))
    loop.call_soon(stopper.start)
    loop.run_forever()
    stopper.join()
    assert not loop.is_running()
