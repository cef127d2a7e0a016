"""Workers: as many threads as there is work for, at most the limit, and none in the end."""

from __future__ import annotations

import threading
import weakref
from functools import partial

import pytest

from monarch.rdma.workers import IDLE_S, Workers

WAIT_S = 5.0


@pytest.fixture
def workers():
    made = Workers("test-rdma", 2)
    yield made
    made.close(WAIT_S)
    assert not [thread for thread in threading.enumerate() if thread.name == "test-rdma"]


def test_tasks_run_at_the_same_time_up_to_the_limit(workers):
    both, gate, ran = threading.Barrier(3), threading.Event(), []

    def wait():
        both.wait(WAIT_S)
        gate.wait(WAIT_S)

    workers.start_task(wait)
    workers.start_task(wait)
    workers.start_task(lambda: ran.append("third"))
    both.wait(WAIT_S)
    assert not ran
    gate.set()
    done = threading.Event()
    workers.start_task(done.set)
    assert done.wait(WAIT_S) and ran == ["third"]


def test_a_thread_that_waits_for_work_keeps_nothing_of_the_last(workers):
    gone = threading.Event()
    weakref.finalize(task := partial(print, end=""), gone.set)
    workers.start_task(task)
    del task
    assert gone.wait(IDLE_S / 2)


def test_one_thread_does_what_comes_one_after_the_other(workers):
    for _ in range(20):
        done = threading.Event()
        workers.start_task(done.set)
        assert done.wait(WAIT_S)
    assert len([thread for thread in threading.enumerate() if thread.name == "test-rdma"]) <= 2


def test_what_was_given_in_is_done_before_the_end():
    workers, ran = Workers("test-rdma", 1), []
    for number in range(50):
        workers.start_task(lambda number=number: ran.append(number))
    workers.close(WAIT_S)
    assert ran == list(range(50))


def test_a_thread_that_can_not_be_started_is_told_and_the_next_one_is(workers, monkeypatch):
    ran = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            workers.start_task(lambda: pytest.fail("it was told that it does not run"))
    workers.start_task(ran.set)
    assert ran.wait(WAIT_S)
    both, done = threading.Barrier(2), threading.Event()
    workers.start_task(lambda: both.wait(WAIT_S))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        workers.start_task(done.set)
    both.wait(WAIT_S)
    assert done.wait(WAIT_S), "by the thread that is there"


def refuse(_):
    raise RuntimeError("can't start new thread")
