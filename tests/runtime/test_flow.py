"""Windows: a sender beyond its window waits for credit, and nobody waits for ever."""

from __future__ import annotations

import _thread
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._net.loop import this_turn
from monarch._runtime.flow import Flow, open_gate

WAIT_S = 10.0
KEY = ("proc", "actor")


class Sender:
    """A thread that spends once, and the gates that it waited at."""

    def __init__(self, flow, nbytes, *, key=KEY, may_wait=lambda: True):
        self.gates, self.waits, self.done = [], threading.Event(), threading.Event()
        self._args = (flow, key, nbytes, may_wait)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        flow, key, nbytes, may_wait = self._args
        flow.spend(key, nbytes, may_wait, self._on_wait)
        self.done.set()

    def _on_wait(self, gate):
        self.gates.append(gate)
        self.waits.set()

    def join(self):
        assert self.done.wait(WAIT_S)
        self._thread.join(WAIT_S)


def must_not_wait(gate):
    raise AssertionError("waits")


def spend(flow, nbytes, key=KEY):
    flow.spend(key, nbytes, lambda: True, must_not_wait)


def waiting(flow, nbytes, **options):
    sender = Sender(flow, nbytes, **options)
    assert sender.waits.wait(WAIT_S)
    assert not sender.done.is_set()
    return sender


def test_a_sender_within_its_window_does_not_wait():
    flow = Flow(100)
    for _ in range(10):
        spend(flow, 10)


def test_the_message_that_fills_the_window_still_leaves():
    flow = Flow(100)
    spend(flow, 99)
    spend(flow, 1_000_000)
    sender = waiting(flow, 1)
    flow.credit(KEY, 1_000_000)
    sender.join()


def test_credit_that_leaves_the_window_full_wakes_nobody():
    flow = Flow(100)
    spend(flow, 300)
    sender = waiting(flow, 1)
    flow.credit(KEY, 200)
    assert not sender.done.is_set()
    flow.credit(KEY, 1)
    sender.join()
    assert len(sender.gates) == 1


def test_each_actor_has_a_window_of_its_own():
    flow = Flow(100)
    spend(flow, 100)
    spend(flow, 100, ("proc", "other actor"))
    spend(flow, 100, ("other proc", "actor"))
    sender = waiting(flow, 1)
    flow.credit(("proc", "other actor"), 100)
    flow.credit(("other proc", "actor"), 100)
    assert not sender.done.is_set()
    flow.credit(KEY, 100)
    sender.join()


def test_a_sender_that_others_wait_for_does_not_wait():
    flow = Flow(100)
    spend(flow, 100)
    flow.spend(KEY, 100, lambda: False, must_not_wait)
    sender = waiting(flow, 1)
    flow.credit(KEY, 100)
    assert not sender.done.is_set()  # what did not wait counts as well
    flow.credit(KEY, 1)
    sender.join()


@pytest.mark.parametrize(("name", "value"), [("sending", True), ("wake_ups", [])])
def test_a_finaliser_in_the_middle_of_a_send_or_on_the_net_loop_does_not_wait(monkeypatch, name, value):
    flow = Flow(100)
    spend(flow, 200)
    with monkeypatch.context() as patch:
        patch.setattr(this_turn, name, value)
        spend(flow, 50)
    sender = waiting(flow, 10)
    flow.credit(KEY, 250)
    sender.join()


def test_a_waiting_sender_that_somebody_begins_to_wait_for_goes_on():
    flow, wanted = Flow(100), threading.Event()
    spend(flow, 100)
    sender = waiting(flow, 1, may_wait=lambda: not wanted.is_set())
    open_gate(sender.gates[0])  # for no reason: it asks, and waits again
    while len(sender.gates) < 2:
        assert sender.waits.wait(WAIT_S)
    wanted.set()
    open_gate(sender.gates[1])
    sender.join()
    flow.credit(KEY, 101)  # its old gates hurt nobody


@pytest.mark.parametrize("number", [1, 5])
def test_the_loss_of_a_process_lets_its_senders_go(number):
    flow = Flow(100)
    spend(flow, 100)
    spend(flow, 100, ("other", "actor"))
    senders = [waiting(flow, 100) for _ in range(number)]
    other = waiting(flow, 1, key=("other", "actor"))
    flow.lose("proc")
    for sender in senders:
        sender.join()
    assert not other.done.is_set()
    flow.lose("other")
    other.join()
    flow.lose("never heard of")


def test_credit_of_an_unknown_or_lost_process_is_ignored():
    flow = Flow(100)
    flow.credit(KEY, 100)
    spend(flow, 100)
    flow.lose("proc")
    flow.credit(KEY, 100)
    spend(flow, 100)  # what was under way is gone with the process


def test_senders_and_a_receiver_that_run_at_once_end_with_an_empty_window():
    flow, rounds, senders = Flow(1000), 400, 4
    under_way = threading.Semaphore(0)

    def send():
        for _ in range(rounds):
            flow.spend(KEY, 300, lambda: True, lambda gate: None)
            under_way.release()

    threads = [threading.Thread(target=send) for _ in range(senders)]
    for thread in threads:
        thread.start()
    most = 0
    for _ in range(rounds * senders):
        assert under_way.acquire(timeout=WAIT_S)
        most = max(most, flow._windows[KEY].bytes)
        flow.credit(KEY, 300)
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert flow._windows[KEY].bytes == 0
    assert most < 1000 + senders * 300  # each may have looked at a window with room


def test_a_gate_opens_once():
    gate = _thread.allocate_lock()
    gate.acquire()
    open_gate(gate)
    open_gate(gate)
    assert gate.acquire(False)


def test_a_gate_may_be_opened_by_many_at_once():
    for _ in range(200):
        gate, start = _thread.allocate_lock(), threading.Barrier(3)
        gate.acquire()
        threads = [threading.Thread(target=lambda gate=gate, start=start: (start.wait(), open_gate(gate))) for _ in range(2)]
        for thread in threads:
            thread.start()
        start.wait()
        assert gate.acquire(timeout=WAIT_S)
        for thread in threads:
            thread.join()


# --- casts: many windows at once -------------------------------------------------------------------------------------

PROCS = tuple(f"proc-{number}" for number in range(6))
VIEWS = [PROCS, PROCS[:3], PROCS[2:], PROCS[3:4]]
steps = st.one_of(
    st.tuples(st.just("cast"), st.integers(0, len(VIEWS) - 1), st.integers(1, 40)),
    st.tuples(st.just("send"), st.integers(0, len(PROCS) - 1), st.integers(1, 40)),
    st.tuples(st.just("handle"), st.integers(0, len(PROCS) - 1), st.integers(1, 40)),
    st.tuples(st.just("lose"), st.integers(0, len(PROCS) - 1), st.just(0)),
)


@given(st.lists(steps, max_size=60))
def test_what_is_cast_counts_at_every_receiver_as_if_it_was_sent_to_each(todo):
    flow, under_way = Flow(1000), {}
    for what, which, nbytes in todo:
        if what == "cast":
            flow.spend_all(VIEWS[which], "actor", nbytes, lambda: False, must_not_wait)
            for uid in VIEWS[which]:
                under_way[uid] = under_way.get(uid, 0) + nbytes
        elif what == "send":
            flow.spend((PROCS[which], "actor"), nbytes, lambda: False, must_not_wait)
            under_way[PROCS[which]] = under_way.get(PROCS[which], 0) + nbytes
        elif what == "handle" and PROCS[which] in under_way:
            flow.credit((PROCS[which], "actor"), nbytes)
            under_way[PROCS[which]] -= nbytes
        elif what == "lose":
            flow.lose(PROCS[which])
            under_way.pop(PROCS[which], None)
    assert {uid: window.load() for (uid, _), window in flow._windows.items()} == under_way
    shares = {id(window.share): window.share for window in flow._windows.values() if window.share is not None}
    for share in shares.values():  # who trusts the room overruns no window
        assert not share.intact or share.room <= min((1000 - window.load() for window in share.windows), default=1000)


def test_a_cast_waits_for_the_slowest_of_its_receivers():
    flow = Flow(100)
    flow.spend_all(PROCS, "actor", 100, lambda: True, must_not_wait)
    for uid in PROCS[1:]:
        flow.credit((uid, "actor"), 100)
    waits, done = threading.Event(), threading.Event()

    def cast():
        flow.spend_all(PROCS, "actor", 60, lambda: True, lambda gate: waits.set())
        done.set()

    thread = threading.Thread(target=cast)
    thread.start()
    assert waits.wait(WAIT_S) and not done.is_set()
    flow.credit((PROCS[0], "actor"), 1)
    assert done.wait(WAIT_S)
    thread.join(WAIT_S)
    assert flow._windows[PROCS[0], "actor"].load() == 159 and flow._windows[PROCS[1], "actor"].load() == 60


def test_nobody_waits_for_a_receiver_that_is_lost():
    flow = Flow(100)
    flow.spend_all(PROCS, "actor", 100, lambda: True, must_not_wait)
    for uid in PROCS[1:]:
        flow.credit((uid, "actor"), 100)
    flow.lose(PROCS[0])
    flow.spend_all(PROCS, "actor", 60, lambda: True, must_not_wait)
    assert flow._windows[PROCS[0], "actor"].load() == 60


def test_views_that_are_no_longer_cast_to_are_forgotten():
    flow = Flow(1 << 30)
    for number in range(200):
        flow.spend_all((f"a{number}", f"b{number}"), "actor", 10, lambda: True, must_not_wait)
    assert len(flow._shares) <= 64
    assert all(window.load() == 10 for window in flow._windows.values())
