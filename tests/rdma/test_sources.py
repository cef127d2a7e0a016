"""Sources: nobody waits for a relay that gives no sign of life."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from monarch._runtime.future import Future
from monarch.rdma import sources
from monarch.rdma.copies import Copy
from monarch.rdma.errors import RDMAError, SilentError, UnavailableError
from monarch.rdma.sources import Source

COPY = Copy(0, 256, 7, 100)


class FakeRelay:
    """Answers what it is told to; what it has not been told to answer never comes."""

    def __init__(self, *, signs=0, answers_at=None, failure=None):
        self.signs, self.answers_at, self.failure = signs, answers_at, failure
        self.asked = self.signed = 0
        self.answer = Future._new()
        self.newest = SimpleNamespace(call_one=self.on_newest)
        self.sign = SimpleNamespace(call_one=self.on_sign)

    def on_newest(self, nbytes, timeout):
        self.asked += 1
        return self.answer

    def on_sign(self):
        self.signed += 1
        if self.signed == self.answers_at:
            if self.failure is None:
                self.answer._complete(COPY)
            else:
                self.answer._fail(self.failure)
        return Future._completed(None) if self.signed <= self.signs else Future._new()


@pytest.fixture
def source(monkeypatch):
    monkeypatch.setattr(sources, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(sources, "_SIGN_S", 0.01)
    return lambda relay: Source(SimpleNamespace(owner="relay-0 at tcp://b"), relay)


def test_an_answer_that_takes_long_is_waited_for_as_long_as_there_are_signs_of_life(source):
    relay = FakeRelay(signs=5, answers_at=4)
    assert source(relay).newest(1, 10) == COPY and relay.signed == 4


def test_a_relay_without_a_sign_of_life_is_left_alone_for_a_while(source, monkeypatch):
    relay = FakeRelay(signs=2)
    asking = source(relay)
    for _ in range(3):
        with pytest.raises(SilentError, match=r"no sign of life(?s:.*)where: relay-0 at tcp://b"):
            asking.newest(1, 10)
    assert (relay.asked, relay.signed) == (1, 3)
    monkeypatch.setattr(sources, "_REST_S", 0.0)
    other = source(relay)
    for _ in range(2):
        with pytest.raises(SilentError):
            other.newest(1, 10)
    assert relay.asked == 3


def test_an_answer_that_comes_instead_of_the_sign_counts(source):
    assert source(FakeRelay(answers_at=1)).newest(1, 10) == COPY
    with pytest.raises(UnavailableError, match="could not get the weights: no room"):
        source(FakeRelay(answers_at=1, failure=RDMAError("no room"))).newest(1, 10)


def test_transfers_from_the_memory_of_a_silent_relay_are_given_up_too(source):
    relay = FakeRelay()
    asking = source(relay)
    with pytest.raises(SilentError):
        asking.copies.wait(Future._new())
    assert asking.copies.wait(Future._completed(3)) == 3
