"""The thread that owns an agent of NIXL: deadlines, failures and ends, with an agent whose transfers the test completes."""

from __future__ import annotations

import threading
import time

import pytest

from monarch.rdma import nixl_library
from monarch.rdma.errors import DeadlineError, OwnerGoneError, TransferError, UnreachableError
from monarch.rdma.nixl_agent import BrokenError, Driver, State, translate

WAIT_S = 5.0


class Hand:
    """An agent whose transfers are complete, or fail, when the test says so."""

    def __init__(self, name):
        self.name, self.states, self.released, self.threads = name, {}, [], set()

    def begin(self):
        number = len(self.states)
        self.states[number] = State.UNDER_WAY
        return number

    def state(self, request):
        self.threads.add(threading.current_thread())
        if isinstance(self.states[request], Exception):
            raise self.states[request]
        return self.states[request]

    def release(self, request):
        self.released.append(request)


@pytest.fixture(autouse=True)
def warnings_seen(monkeypatch):
    seen = []
    monkeypatch.setattr(nixl_library, "warn_once", lambda why, hint: seen.append(why))
    return seen


@pytest.fixture
def hand():
    return Hand("hand")


@pytest.fixture
def driver(hand):
    made = Driver("hand", lambda name: hand)
    made.start(WAIT_S)
    yield made
    assert made.close(WAIT_S)


def soon():
    return time.monotonic() + WAIT_S


def two_transfers(agent):
    yield agent.begin()
    yield agent.begin()
    return "moved"


def wait_state(hand, number):
    end = soon()
    while number not in hand.states:
        assert time.monotonic() < end


def test_steps_go_on_when_what_they_wait_for_is_complete(driver, hand):
    ended = threading.Event()
    job = driver.do(two_transfers, soon(), ended.set)
    wait_state(hand, 0)
    assert 1 not in hand.states and not job.told.is_set()
    hand.states[0] = State.COMPLETE
    wait_state(hand, 1)
    hand.states[1] = State.COMPLETE
    assert job.wait() == "moved" and ended.wait(WAIT_S)
    assert hand.released == [0, 1] and threading.current_thread() not in hand.threads


def test_jobs_do_not_wait_for_each_other(driver, hand):
    first, second = driver.do(two_transfers, soon()), driver.do(two_transfers, soon())
    wait_state(hand, 1)
    hand.states[1] = State.COMPLETE
    wait_state(hand, 2)
    hand.states[2] = State.COMPLETE
    assert second.wait() == "moved" and not first.told.is_set()
    hand.states[0] = OwnerGoneError("gone")
    with pytest.raises(OwnerGoneError):
        first.wait()


def test_what_a_transfer_fails_with_is_raised_in_the_steps(driver, hand):
    def steps(agent):
        try:
            yield agent.begin()
        except TransferError:
            yield agent.begin()
        return "otherwise"

    job = driver.do(steps, soon())
    wait_state(hand, 0)
    hand.states[0] = TransferError("broken")
    wait_state(hand, 1)
    hand.states[1] = State.COMPLETE
    assert job.wait() == "otherwise"


def test_time_is_over_for_who_waits_but_what_is_used_stays_until_the_transfer_is_complete(driver, hand):
    ended = threading.Event()
    job = driver.do(two_transfers, time.monotonic() + 0.05, ended.set)
    with pytest.raises(DeadlineError):
        job.wait()
    assert not ended.is_set() and not hand.released
    hand.states[0] = State.COMPLETE
    assert ended.wait(WAIT_S) and hand.released == [0] and 1 not in hand.states


def test_a_job_that_comes_too_late_does_nothing_but_end(driver, hand):
    ended = threading.Event()
    with pytest.raises(DeadlineError):
        driver.do(two_transfers, time.monotonic(), ended.set).wait()
    assert ended.wait(WAIT_S) and not hand.states


def test_what_is_under_way_at_the_end_fails(hand):
    driver, ended = Driver("hand", lambda name: hand), threading.Event()
    driver.start(WAIT_S)
    job = driver.do(two_transfers, soon(), ended.set)
    wait_state(hand, 0)
    assert driver.close(WAIT_S) and ended.is_set()
    for late in (job, driver.do(two_transfers, soon())):
        with pytest.raises(UnreachableError, match="shut down"):
            late.wait()
    with pytest.raises(UnreachableError):
        driver.start(WAIT_S)


def test_an_agent_that_can_not_start_is_an_error_at_once_for_everybody(warnings_seen):
    def make(name):
        raise ImportError("no such library")

    driver = Driver("hand", make)
    driver.begin()
    early = driver.do(two_transfers, float("inf"))
    for _ in range(2):
        with pytest.raises(UnreachableError, match="no such library"):
            driver.start(WAIT_S)
    with pytest.raises(UnreachableError, match="no such library"):
        early.wait()
    assert warnings_seen and driver.close(WAIT_S)


def test_an_agent_that_takes_too_long_to_start_is_given_up_for_good(hand):
    gate = threading.Event()

    def make(name):
        assert gate.wait(WAIT_S)
        return hand

    driver = Driver("hand", make)
    assert driver.begin() and not driver.begin()
    with pytest.raises(DeadlineError):
        driver.start(WAIT_S, time.monotonic())
    waiting = driver.do(two_transfers, float("inf"))
    with pytest.raises(UnreachableError, match=r"within 0\.05 s"):
        driver.start(0.05)
    with pytest.raises(UnreachableError, match=r"within 0\.05 s"):
        waiting.wait()
    gate.set()
    assert driver.close(WAIT_S)
    with pytest.raises(UnreachableError):
        driver.do(two_transfers, soon()).wait()
    assert not hand.states


def test_what_nobody_waits_for_is_done_and_its_failure_harms_nobody(driver, hand):
    done = []
    driver.do_soon(lambda agent: (_ for _ in ()).throw(TransferError("no")))
    driver.do_soon(done.append)
    job = driver.do(two_transfers, soon())
    wait_state(hand, 0)
    assert done == [hand]
    hand.states[0] = TransferError("over")
    with pytest.raises(TransferError):
        job.wait()


def test_errors_of_nixl_become_those_of_transports():
    broken, other = translate(Exception("why"), "postXferReq"), translate(Exception("why"), "registerMem")
    assert isinstance(broken, BrokenError) and type(other) is TransferError
    assert broken.what == "postXferReq of NIXL failed: why" and "UCX_LOG_LEVEL" in other.next
