"""A worker runs what is posted in order, whatever one of the calls does."""

from __future__ import annotations

import logging

from monarch._mounts.worker import Worker


def test_calls_run_in_order_and_one_that_fails_is_logged(caplog):
    ran = []
    worker = Worker("a-worker")

    def fail():
        raise ValueError("no")

    with caplog.at_level(logging.ERROR):
        for call in (lambda: ran.append(1), fail, lambda: ran.append(2)):
            worker.post(call)
        worker.close()
    assert ran == [1, 2]
    assert "a mount has failed at something thread=a-worker" in caplog.text and "ValueError: no" in caplog.text


def test_a_worker_may_close_itself():
    worker = Worker("a-worker")
    worker.post(worker.close)
    worker._thread.join(5)
    assert not worker._thread.is_alive()
