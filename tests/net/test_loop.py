"""The net loop: whatever threads do at the same time, each event, timer and wake-up is handled, once and in order."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections import deque
from itertools import pairwise

import pytest

from monarch._net.loop import BROKEN, READ, WRITE, NetLoop, wake
from net.wires import on_loop

WAIT_S = 10.0


@pytest.fixture
def loop():
    loop = NetLoop("monarch-test-net")
    loop.start()
    yield loop
    loop.stop()
    loop.join(WAIT_S)
    assert not loop._thread.is_alive()


@pytest.fixture
def pair():
    left, right = socket.socketpair()
    left.setblocking(False)
    with left, right:
        yield left, right


@pytest.fixture
def threads():
    """Starts threads that end before the test does; what one of them raises fails the test."""
    started, raised = [], []

    def start(function, *args):
        def run():
            try:
                function(*args)
            except BaseException as exc:
                raised.append(exc)

        started.append(threading.Thread(target=run))
        started[-1].start()
        return started[-1]

    yield start
    for thread in started:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert raised == []


class Flag:
    """Something that a driving thread waits for, set from anywhere."""

    def __init__(self, loop):
        self.loop, self.value = loop, False

    def __call__(self):
        return self.value

    def set(self):
        self.value = True
        wake(self.loop.kick)


def on_driver(loop, function, is_done=None):
    """Run `function` as a callback on this thread, while it drives until then or until `is_done`; what drive returns."""
    me, ran = threading.get_ident(), Flag(loop)

    def run():
        if threading.get_ident() != me:
            loop.call_soon(run)  # the loop's own thread was faster
            return
        ran.set()
        function()

    loop.call_soon(run)
    return loop.drive(is_done or ran, WAIT_S)


# --- callbacks -----------------------------------------------------------------------------------------------------


def test_callbacks_run_in_the_order_of_their_calls(loop):
    seen = []
    for number in range(1000):
        loop.call_soon(seen.append, number)
    assert on_loop(loop, list, seen) == list(range(1000))


def test_no_callback_of_many_threads_is_lost_and_each_thread_keeps_its_order(loop, threads):
    seen = [[] for _ in range(6)]
    started = threading.Barrier(6)

    def call(own):
        started.wait()
        for number in range(1500):
            loop.call_soon(own.append, number)

    for thread in [threads(call, own) for own in seen]:
        thread.join()
    on_loop(loop, int)
    assert seen == [list(range(1500))] * 6


def test_callbacks_queued_while_processing_run_behind_those_queued_before(loop):
    seen, ended = [], threading.Event()

    def first():
        seen.append("first")
        loop.call_soon(seen.append, "queued by first")
        loop.call_soon(ended.set)

    def both():
        loop.call_soon(first)
        loop.call_soon(seen.append, "second")

    loop.call_soon(both)
    assert ended.wait(WAIT_S)
    assert seen == ["first", "second", "queued by first"]


def test_a_long_chain_of_callbacks_neither_recurses_nor_starves_sockets(loop, pair):
    left, right = pair
    left_chain, received = threading.Event(), threading.Event()

    def link(left_links):
        if left_links:
            loop.call_soon(link, left_links - 1)
        elif received.is_set():
            left_chain.set()
        else:
            loop.call_soon(link, 10)  # goes on until the socket has been served

    on_loop(loop, loop.watch, left.fileno(), READ, lambda mask: received.set())
    loop.call_soon(link, 3000)
    right.send(b"x")
    assert left_chain.wait(WAIT_S)
    on_loop(loop, loop.unwatch, left.fileno())


def test_a_callback_that_raises_is_reported_and_ends_nothing(loop, pair, capsys):
    left, right = pair
    raised = threading.Event()

    def broken(*_):
        raised.set()
        raise ValueError("broken callback")

    on_loop(loop, loop.watch, left.fileno(), READ, broken)
    for start in (
        lambda: right.send(b"x"),
        lambda: loop.call_soon(broken),
        lambda: loop.call_later(0, broken),
        lambda: loop.call_soon(wake, broken),
    ):
        raised.clear()
        start()
        assert raised.wait(WAIT_S)
        assert on_loop(loop, lambda: 7) == 7
    on_loop(loop, loop.unwatch, left.fileno())
    report = capsys.readouterr().err
    assert report.count("ValueError: broken callback") == 4
    assert "internal error on monarch-test-net" in report


def test_a_callback_that_raises_on_a_driver_does_not_reach_it(loop, capsys):
    assert on_driver(loop, lambda: 1 / 0) is True
    assert "ZeroDivisionError" in capsys.readouterr().err


# --- timers --------------------------------------------------------------------------------------------------------


def test_timers_fire_in_the_order_of_their_times(loop):
    seen, ended = [], threading.Event()

    def start():
        for delay_s, name in [(0.02, "c"), (0.0, "a"), (0.01, "b"), (-1.0, "overdue"), (0.01, "b2")]:
            loop.call_later(delay_s, lambda name=name: seen.append(name))
        loop.call_later(0.021, ended.set)

    loop.call_soon(start)
    assert ended.wait(WAIT_S)
    assert seen == ["overdue", "a", "b", "b2", "c"]


def test_a_timer_never_fires_early(loop):
    fired = deque()
    ended = threading.Event()
    due = [time.monotonic() + delay_s for delay_s in (0.001, 0.003, 0.0105)]
    for at in due:
        loop.call_later(at - time.monotonic(), lambda: fired.append(loop.now_s()))
    loop.call_later(0.02, ended.set)
    assert ended.wait(WAIT_S)
    assert all(at <= seen for at, seen in zip(due, fired, strict=True))


@pytest.mark.parametrize("where", ["before", "on the loop", "by an earlier timer", "twice"])
def test_a_cancelled_timer_does_not_fire(loop, where):
    seen, ended = [], threading.Event()
    doomed = loop.call_later(0.01, lambda: seen.append("doomed"))
    loop.call_later(0.011, ended.set)
    if where == "on the loop":
        on_loop(loop, doomed.cancel)
    elif where == "by an earlier timer":
        loop.call_later(0.001, doomed.cancel)
    else:
        doomed.cancel()
        if where == "twice":
            doomed.cancel()
    assert ended.wait(WAIT_S)
    assert seen == []


def test_a_timer_that_fired_can_be_cancelled(loop):
    fired = threading.Event()
    timer = loop.call_later(0, fired.set)
    assert fired.wait(WAIT_S)
    timer.cancel()


def test_a_shorter_timer_wakes_a_loop_that_sleeps_for_a_longer_one(loop):
    late = loop.call_later(100, lambda: None)
    on_loop(loop, int)
    fired = threading.Event()
    loop.call_later(0.005, fired.set)
    assert fired.wait(WAIT_S)
    late.cancel()


@pytest.mark.parametrize("other", [None, 0.001, 100], ids=["no other", "past", "later"])
def test_a_timer_of_a_driver_fires_while_it_drives(loop, other):
    for _ in range(10):
        if other is not None:
            loop.call_later(other, lambda: None)
        fired = Flag(loop)
        on_driver(loop, lambda fired=fired: loop.call_later(0.002, fired.set))
        assert loop.drive(fired, WAIT_S)
        assert fired()


def test_a_timer_of_a_driver_fires_when_nobody_drives_any_more(loop):
    for _ in range(10):
        fired, added = threading.Event(), Flag(loop)

        def add(fired=fired, added=added):
            loop.call_later(0.002, fired.set)
            loop.call_soon(added.set)  # behind the timer, in the same turn

        on_driver(loop, add, is_done=added)
        assert fired.wait(WAIT_S)


def test_timers_fire_while_a_driver_is_busy(loop):
    fired = threading.Event()
    loop.call_later(0.001, fired.set)
    assert loop.drive(lambda: fired.wait(WAIT_S), WAIT_S)


# --- descriptors ---------------------------------------------------------------------------------------------------


def test_a_descriptor_is_told_once_for_each_arrival(loop, pair):
    left, right = pair
    told = deque()
    arrived = threading.Semaphore(0)

    def on_ready(mask):
        told.append(mask)
        arrived.release()

    right.send(b"x")  # before it is watched: counts as well
    on_loop(loop, loop.watch, left.fileno(), READ, on_ready)
    assert arrived.acquire(timeout=WAIT_S)
    for _ in range(3):
        on_loop(loop, int)
    assert list(told) == [READ]
    right.send(b"y")
    assert arrived.acquire(timeout=WAIT_S)
    on_loop(loop, loop.unwatch, left.fileno())
    right.send(b"z")
    on_loop(loop, int)
    on_loop(loop, loop.unwatch, left.fileno())
    assert list(told) == [READ, READ]


def test_room_to_write_is_told_when_asked_for(loop, pair):
    left, right = pair
    masks = deque()
    arrived = threading.Semaphore(0)

    def on_ready(mask):
        masks.append(mask)
        arrived.release()

    on_loop(loop, loop.watch, left.fileno(), READ, on_ready)
    on_loop(loop, loop.watch, left.fileno(), READ | WRITE, on_ready)
    assert arrived.acquire(timeout=WAIT_S)
    assert masks.popleft() == WRITE
    on_loop(loop, loop.watch, left.fileno(), READ, on_ready)
    right.close()
    assert arrived.acquire(timeout=WAIT_S)
    assert masks.popleft() & BROKEN
    on_loop(loop, loop.unwatch, left.fileno())


def test_a_handler_may_be_replaced(loop, pair):
    left, right = pair
    first, second = threading.Event(), threading.Event()
    on_loop(loop, loop.watch, left.fileno(), READ, lambda mask: first.set())
    on_loop(loop, loop.watch, left.fileno(), READ, lambda mask: second.set())
    right.send(b"x")
    assert second.wait(WAIT_S)
    assert not first.is_set()
    on_loop(loop, loop.unwatch, left.fileno())


def test_a_handler_may_unwatch_another_that_is_ready_too(loop):
    seen = []
    pairs = [socket.socketpair() for _ in range(2)]

    def handler(own, other):
        seen.append(own)
        loop.unwatch(pairs[other][0].fileno())

    def prepare():
        for number, (left, right) in enumerate(pairs):
            loop.watch(left.fileno(), READ, lambda mask, number=number: handler(number, 1 - number))
            right.send(b"x")

    on_loop(loop, prepare)
    for _ in range(3):
        on_loop(loop, int)
    assert len(seen) == 1
    for left, right in pairs:
        on_loop(loop, loop.unwatch, left.fileno())
        left.close()
        right.close()


# --- driving -------------------------------------------------------------------------------------------------------


def test_a_driver_that_has_nothing_to_wait_for_returns_at_once(loop):
    assert loop.drive(lambda: True) is True


def test_a_driver_returns_in_time(loop):
    began_s = time.monotonic()
    assert loop.drive(lambda: False, 0.02) is True
    assert 0.02 <= time.monotonic() - began_s < WAIT_S


def test_a_driver_handles_the_network_on_its_own_thread(loop, pair):
    left, right = pair
    handled_on = set()

    def on_ready(mask):
        handled_on.add(threading.get_ident())
        left.recv(10)
        echoed.set()

    on_loop(loop, loop.watch, left.fileno(), READ, on_ready)
    for _ in range(200):
        echoed = Flag(loop)
        right.send(b"x")
        assert loop.drive(echoed, WAIT_S)
    assert threading.get_ident() in handled_on
    on_loop(loop, loop.unwatch, left.fileno())


def test_a_kick_makes_a_driver_look_again(loop):
    for _ in range(300):
        done = Flag(loop)
        kicker = threading.Thread(target=done.set)
        kicker.start()
        assert loop.drive(done, WAIT_S)
        assert done()
        kicker.join()


def test_a_kick_without_driver_is_harmless(loop):
    loop.kick()
    assert on_loop(loop, lambda: 1) == 1


def test_a_driver_that_leaves_its_seat_returns_false(loop):
    assert on_driver(loop, loop.leave_seat, is_done=lambda: False) is False
    assert loop.drive(lambda: True) is True


def test_a_thread_that_does_not_drive_leaves_no_seat(loop):
    left = threading.Event()

    def leave():
        loop.leave_seat()
        left.set()

    threading.Thread(target=leave).start()
    assert loop.drive(left.is_set, WAIT_S) or left.wait(WAIT_S)
    assert loop.drive(lambda: False, 0.001) is True


def test_only_one_thread_drives(loop, threads):
    drives, ended = threading.Event(), Flag(loop)
    outcome = []

    def drive():
        outcome.append(loop.drive(lambda: drives.set() or ended(), WAIT_S))

    thread = threads(drive)
    assert drives.wait(WAIT_S)
    for _ in range(3):
        assert loop.drive(ended, WAIT_S) is False
    ended.set()
    thread.join(WAIT_S)
    assert outcome == [True]
    assert loop.drive(ended) is True


def test_a_thread_that_drives_does_not_drive_again(loop):
    assert loop.drive(lambda: loop.drive(lambda: True) is False, WAIT_S) is True


def test_a_callback_may_not_drive(loop):
    def drive():
        with pytest.raises(RuntimeError, match="may not wait"):
            loop.drive(lambda: True)
        return True

    assert on_loop(loop, drive)


def test_what_is_done_may_raise_and_the_seat_is_free(loop):
    with pytest.raises(ZeroDivisionError):
        loop.drive(lambda: 1 / 0, WAIT_S)
    assert loop.drive(lambda: True) is True


def test_the_network_is_served_while_the_driver_is_busy(loop, pair):
    left, right = pair
    served = threading.Event()
    on_loop(loop, loop.watch, left.fileno(), READ, lambda mask: served.set())

    def busy():
        right.send(b"x")
        return served.wait(WAIT_S)

    assert loop.drive(busy, WAIT_S)
    on_loop(loop, loop.unwatch, left.fileno())


def test_callbacks_never_run_at_the_same_time(loop, threads):
    inside, overlaps, counted = [], [], []
    ended = Flag(loop)

    def callback():
        if inside:
            overlaps.append(True)
        inside.append(True)
        len(os.listdir("/proc/self/fd"))  # lets go of the interpreter lock
        inside.pop()
        counted.append(True)
        if len(counted) == 600:
            ended.set()

    def call():
        for _ in range(200):
            loop.call_soon(callback)

    for _ in range(3):
        threads(call)
    assert loop.drive(ended, WAIT_S)
    assert ended() and not overlaps


def test_a_kick_that_comes_late_leaves_the_loop_at_rest(loop):
    def kick_then_end():
        kicker = threading.Thread(target=loop.kick)
        kicker.start()
        kicker.join()

    for _ in range(20):
        on_driver(loop, kick_then_end)
    on_loop(loop, int)
    used_s = time.process_time()
    threading.Event().wait(0.05)  # an idle time, not a wait for a state
    assert time.process_time() - used_s < 0.03


# --- waking others -------------------------------------------------------------------------------------------------


def test_elsewhere_a_wake_up_runs_at_once():
    seen = []
    wake(lambda: seen.append(1))
    assert seen == [1]


def test_in_a_callback_a_wake_up_runs_behind_it(loop):
    seen, ended = [], threading.Event()

    def callback():
        wake(lambda: (seen.append("woken"), ended.set()))
        seen.append("callback")

    loop.call_soon(callback)
    assert ended.wait(WAIT_S)
    assert seen == ["callback", "woken"]


def test_a_wake_up_of_a_driver_may_be_what_it_waits_for(loop):
    chain = [Flag(loop) for _ in range(3000)]
    for left, right in pairwise(chain):
        left.set = lambda left=left, right=right: (setattr(left, "value", True), wake(right.set))
    on_driver(loop, lambda: wake(chain[0].set))
    assert loop.drive(chain[-1], WAIT_S)
    assert all(flag() for flag in chain)


def test_wake_ups_of_a_driver_run_when_it_leaves(loop):
    woken = []
    on_driver(loop, lambda: wake(lambda: woken.append(1)))
    assert woken == [1]


def test_a_driver_that_comes_and_goes_does_not_hold_up_wake_ups_of_the_loop(loop, threads):
    """A waiting thread was woken only when the driver had made no short wait for a while."""
    for _ in range(20):
        woken = threading.Event()
        loop.drive(lambda: True)
        thread = threads(lambda woken=woken: loop.call_soon(wake, woken.set))
        while not woken.is_set():
            loop.drive(Flag(loop), 0.0)
            loop.drive(lambda: True)
        thread.join()


# --- the end -------------------------------------------------------------------------------------------------------


def test_callbacks_queued_before_the_stop_still_run():
    loop = NetLoop("monarch-test-net")
    seen = []
    loop.call_soon(seen.append, 1)
    loop.stop()
    loop.call_soon(seen.append, 2)
    loop.start()
    loop.join(WAIT_S)
    assert seen[0] == 1


def test_wake_ups_of_the_last_turn_run():
    loop = NetLoop("monarch-test-net")
    woken = threading.Event()
    loop.stop()
    loop.call_soon(wake, woken.set)
    loop.start()
    assert woken.wait(WAIT_S)
    loop.join(WAIT_S)


def test_a_driver_ends_with_the_loop(threads):
    loop = NetLoop("monarch-test-net")
    loop.start()
    drives, outcome = threading.Event(), []
    thread = threads(lambda: outcome.append(loop.drive(lambda: drives.set() and False, WAIT_S)))
    assert drives.wait(WAIT_S)
    loop.stop()
    loop.join(WAIT_S)
    thread.join(WAIT_S)
    assert outcome == [False]
    assert loop.drive(lambda: True) is False


def test_the_loop_may_join_itself():
    loop = NetLoop("monarch-test-net")
    joined = threading.Event()
    loop.start()
    loop.call_soon(lambda: (loop.join(WAIT_S), joined.set()))
    loop.stop()
    loop.join(WAIT_S)
    assert joined.is_set()


def test_the_loop_runs_on_a_thread_of_its_caller(threads):
    loop = NetLoop("monarch-test-net")
    loop.stop()
    loop.run()
    loop.join(WAIT_S)
    test_elsewhere_a_wake_up_runs_at_once()


def test_calls_behind_the_end_write_to_nobodys_descriptor():
    loop = NetLoop("monarch-test-net")
    loop.start()
    loop.stop()
    loop.join(WAIT_S)
    pipes = [os.pipe() for _ in range(4)]  # they get the numbers that the loop had
    loop.call_soon(print)
    loop.call_later(1, print)
    loop.kick()
    loop.stop()
    ready, _, _ = select.select([read for read, _ in pipes], [], [], 0)
    for ends in pipes:
        for fd in ends:
            os.close(fd)
    assert ready == []


# --- stress --------------------------------------------------------------------------------------------------------


class Echo:
    """Requests over a socket pair whose far end answers at once from a thread of its own; replies come by the loop."""

    def __init__(self, loop, threads):
        self.loop = loop
        self.near, self.far = socket.socketpair()
        self.near.setblocking(False)
        self.waiting = deque()
        on_loop(loop, loop.watch, self.near.fileno(), READ, self.on_ready)
        self.thread = threads(self.serve)

    def serve(self):
        while data := self.far.recv(100):
            self.far.sendall(data)

    def on_ready(self, mask):
        try:
            while True:
                for _ in self.near.recv(100):
                    self.waiting.popleft().set()
        except BlockingIOError:
            return

    def request(self, waiter):
        self.waiting.append(waiter)
        self.near.send(b"x")

    def close(self):
        on_loop(self.loop, self.loop.unwatch, self.near.fileno())
        self.near.shutdown(socket.SHUT_WR)
        self.thread.join(WAIT_S)
        self.near.close()
        self.far.close()


class Waiter:
    """Waits as `Future.get` does: drives, or is woken at a gate by whoever drives."""

    def __init__(self, loop):
        self.loop, self.done, self.gate = loop, False, threading.Lock()
        self.gate.acquire()

    def is_done(self):
        return self.done

    def set(self):
        self.done = True
        wake(self.wake_up)

    def wake_up(self):
        self.gate.release()
        self.loop.kick()

    def wait(self):
        if not self.loop.drive(self.is_done, WAIT_S):
            self.gate.acquire(timeout=WAIT_S)
        assert self.done


@pytest.mark.cpu_limit(6)
@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_thousands_of_waits_lose_no_wake_up(loop, threads, num_threads):
    echoes = [Echo(loop, threads) for _ in range(num_threads)]
    slowest_s = []

    def wait(echo):
        for _ in range(4000 // num_threads):
            waiter = Waiter(loop)
            began_s = time.monotonic()
            echo.request(waiter)
            waiter.wait()
            slowest_s.append(time.monotonic() - began_s)

    others = [threads(wait, echo) for echo in echoes[1:]]
    wait(echoes[0])
    for thread in others:
        thread.join(WAIT_S)
    for echo in echoes:
        echo.close()
    assert len(slowest_s) == 4000 // num_threads * num_threads
    assert max(slowest_s) < 1.0


@pytest.mark.cpu_limit(6)
def test_two_threads_that_wake_each_other_lose_no_wake_up(loop, threads):
    rounds, given = 3000, 0
    left = [Waiter(loop) for _ in range(rounds)]
    right = [Waiter(loop) for _ in range(rounds)]

    def give(waiter):
        nonlocal given
        given += 1
        if given % 3:
            waiter.set()
        else:
            loop.call_soon(waiter.set)

    def answer():
        for mine, theirs in zip(left, right, strict=True):
            mine.wait()
            give(theirs)

    thread = threads(answer)
    for mine, theirs in zip(left, right, strict=True):
        give(mine)
        theirs.wait()
    thread.join(WAIT_S)


@pytest.mark.cpu_limit(6)
def test_waits_timers_and_callbacks_at_the_same_time_lose_nothing(loop, threads):
    echo = Echo(loop, threads)
    fired, called = [], []

    def disturb():
        for number in range(600):
            loop.call_soon(called.append, number)
            loop.call_later(number % 7 / 1000, lambda: (fired.append(1), loop.kick()))
            loop.kick()

    disturbing = [threads(disturb) for _ in range(2)]
    for _ in range(600):
        waiter = Waiter(loop)
        echo.request(waiter)
        waiter.wait()
    for thread in disturbing:
        thread.join(WAIT_S)
    assert loop.drive(lambda: len(fired) == 1200, WAIT_S)
    assert (len(fired), len(called)) == (1200, 1200)
    echo.close()


# --- Ctrl-C --------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_handler():
    before = signal.getsignal(signal.SIGINT)
    yield lambda handler: signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def interrupts(threads):
    """Sends Ctrl-C to the main thread until it is set: one that comes just before a system call does not interrupt it."""
    main, enough = threading.main_thread().ident, threading.Event()

    def send():
        while not enough.wait(0.005):
            signal.pthread_kill(main, signal.SIGINT)

    enough.start = lambda: threads(send)
    yield enough
    enough.set()


def test_ctrl_c_ends_an_idle_drive(loop, own_handler, interrupts):
    def handler(*_):
        if not interrupts.is_set():
            interrupts.set()
            raise KeyboardInterrupt

    own_handler(handler)
    interrupts.start()
    with pytest.raises(KeyboardInterrupt):
        loop.drive(lambda: False, WAIT_S)
    assert interrupts.is_set()
    assert loop.drive(lambda: True) is True
    assert signal.getsignal(signal.SIGINT) is handler


def test_ctrl_c_in_a_callback_waits_for_its_end(loop):
    seen = []

    def callback():
        loop.call_soon(seen.append, "next callback")
        signal.raise_signal(signal.SIGINT)
        seen.append("end of the callback")
        wake(lambda: seen.append("wake-up"))

    with pytest.raises(KeyboardInterrupt):
        on_driver(loop, callback)
    on_loop(loop, int)
    assert seen == ["end of the callback", "wake-up", "next callback"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert on_driver(loop, lambda: None) is True


def test_ctrl_c_in_a_callback_ends_a_drive_that_would_go_on(loop):
    with pytest.raises(KeyboardInterrupt):
        on_driver(loop, lambda: signal.raise_signal(signal.SIGINT), is_done=lambda: False)


def test_a_handler_of_the_user_is_called_and_put_back(loop, own_handler):
    seen = []
    own_handler(lambda signum, frame: seen.append(signum))
    handler = signal.getsignal(signal.SIGINT)
    on_driver(loop, lambda: signal.raise_signal(signal.SIGINT))
    assert seen == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_handler_may_complete_what_the_main_thread_waits_for(loop, own_handler, interrupts):
    done, drives = Flag(loop), []

    def handler(*_):
        interrupts.set()
        drives.append(loop.drive(lambda: True))  # it drives already, below this handler
        done.set()

    own_handler(handler)
    interrupts.start()
    began_s = time.monotonic()
    assert loop.drive(done, WAIT_S)
    assert time.monotonic() < began_s + WAIT_S / 2
    assert drives[0] is False


def test_a_handler_may_wake_another_thread(loop, own_handler, interrupts, threads):
    woken = threading.Event()
    done = Flag(loop)

    def wait():
        assert woken.wait(WAIT_S)
        done.set()

    own_handler(lambda *_: (interrupts.set(), wake(woken.set)))
    threads(wait)
    interrupts.start()
    began_s = time.monotonic()
    assert loop.drive(done, WAIT_S)
    assert time.monotonic() < began_s + WAIT_S / 2


def test_an_ignored_ctrl_c_stays_ignored(loop, own_handler):
    own_handler(signal.SIG_IGN)
    assert on_driver(loop, lambda: signal.raise_signal(signal.SIGINT)) is True
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_another_signal_whose_handler_raises_leaves_a_loop_that_works(loop):
    class Interrupt(BaseException):
        pass

    def raise_it(*_):
        raise Interrupt

    before = signal.signal(signal.SIGUSR1, raise_it)
    with pytest.raises(Interrupt):
        on_driver(loop, lambda: signal.raise_signal(signal.SIGUSR1))
    signal.signal(signal.SIGUSR1, before)
    assert on_loop(loop, lambda: 7) == 7
    assert on_driver(loop, lambda: None) is True


BOMBARDED = """
    import os, signal, socket, threading, time

    def on_signal(*_):
        global armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    armed = False
    signal.signal(signal.SIGINT, on_signal)
    main = os.getpid()
    bomber = os.fork()  # a process: a thread would only ever send while this one waits for the interpreter lock
    while not bomber:
        time.sleep(0.0001)
        if os.getppid() != main:
            os._exit(0)
        os.kill(main, signal.SIGINT)

    from monarch._net.loop import READ, NetLoop

    loop = NetLoop("monarch-test-net")
    loop.start()
    near, far = socket.socketpair()
    near.setblocking(False)
    seen, interrupts = 0, 0

    def on_ready(mask):
        global seen
        seen += len(near.recv(100))

    loop.call_soon(loop.watch, near.fileno(), READ, on_ready)
    threading.Thread(target=threading.Event().wait, daemon=True).start()  # Ctrl-C is not blocked there
    for number in range(1, 4000):
        far.send(b"x")
        began_s = time.monotonic()
        while seen < number:
            assert time.monotonic() < began_s + 5, f"event {number} was lost after {interrupts} interrupts"
            try:
                armed = True
                loop.drive(lambda: seen >= number, 5)
                armed = False
            except KeyboardInterrupt:
                interrupts += 1
    os.kill(bomber, signal.SIGKILL)
    os.waitpid(bomber, 0)
    assert signal.getsignal(signal.SIGINT) is on_signal
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    assert loop.drive(lambda: True)
    loop.stop()
    loop.join(5)
    print("interrupts", interrupts)
"""


def test_no_event_is_lost_under_a_bombardment_of_ctrl_c():
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(BOMBARDED)], capture_output=True, text=True, timeout=25)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) > 20


def test_the_loops_own_thread_takes_no_ctrl_c(loop):
    assert signal.SIGINT in on_loop(loop, signal.pthread_sigmask, signal.SIG_BLOCK, [])
