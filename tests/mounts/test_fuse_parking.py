"""A request that waits ends once: by its answer, an interrupt, the end of the patience, or of the mount."""

from __future__ import annotations

import errno
import queue
import threading
import time

import pytest

from monarch._mounts.fuse_parking import Parking

WAIT_S = 5.0


class Request:
    def __init__(self, unique, node=1):
        self.unique, self.node = unique, node
        self.done = self.cancelled = False


class Lot:
    def __init__(self, patience_s=60.0):
        self.answers = queue.Queue()
        self.parking = Parking(lambda request, answer: self.answers.put((request.unique, answer)), patience_s)

    def next(self):
        return self.answers.get(timeout=WAIT_S)


@pytest.fixture
def lot():
    lots = []

    def make(patience_s=60.0):
        lots.append(Lot(patience_s))
        return lots[-1]

    yield make
    for one in lots:
        one.parking.close()
        one.parking.join(WAIT_S)


def test_the_first_answer_counts(lot):
    it = lot()
    request = Request(1)
    it.parking.park(request)
    assert len(it.parking) == 1
    threads = [threading.Thread(target=it.parking.settle, args=(request, index)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    it.parking.interrupt(1)
    it.next()
    assert it.answers.empty() and len(it.parking) == 0 and not request.cancelled


def test_a_request_that_was_answered_or_interrupted_is_not_parked(lot):
    it = lot()
    answered, interrupted = Request(1), Request(2)
    it.parking.settle(answered, "early")
    it.parking.park(answered)
    it.parking.interrupt(2)
    it.parking.park(interrupted)
    assert [it.next(), it.next()] == [(1, "early"), (2, errno.EINTR)]
    assert interrupted.cancelled and not answered.cancelled and len(it.parking) == 0


def test_an_interrupt_of_what_is_long_answered_hits_nobody(lot):
    it = lot()
    it.parking.interrupt(5)
    request = Request(7)
    it.parking.park(request)
    assert not request.done


def test_patience_is_lost_in_the_order_of_parking(lot):
    it = lot(patience_s=0.1)
    requests = [Request(index, node=index) for index in range(5)]
    began = time.monotonic()
    for request in requests:
        it.parking.park(request)
    it.parking.settle(requests[2], "in time")
    assert it.next() == (2, "in time")
    assert [it.next() for _ in range(4)] == [(index, errno.ETIMEDOUT) for index in (0, 1, 3, 4)]
    assert 0.09 < time.monotonic() - began < 2
    assert all(request.cancelled for request in requests if request.unique != 2)


def test_a_node_that_ran_out_of_patience_gets_none_for_a_moment_and_others_all_of_it(lot):
    it = lot(patience_s=0.1)
    it.parking.park(Request(1, node=8))
    assert it.next() == (1, errno.ETIMEDOUT)
    other = Request(3, node=9)
    it.parking.park(other)
    it.parking.park(Request(2, node=8))
    assert it.next() == (2, errno.ETIMEDOUT)
    assert not other.done


def test_the_end_answers_all_that_wait_and_all_that_come(lot):
    it = lot()
    early, late = Request(1), Request(2)
    it.parking.park(early)
    it.parking.close()
    it.parking.close()
    it.parking.park(late)
    assert [it.next(), it.next()] == [(1, errno.ENOTCONN), (2, errno.ENOTCONN)]
    assert early.cancelled and late.cancelled
