"""News of procs: none is late for long, none is told twice, and many are few messages."""

from __future__ import annotations

from monarch._base.ids import ProcRef
from monarch._runtime.up_news import UpNews
from monarch._wire.messages import ProcsUp, ProcUp

OWNER, OTHER, NEAR = (ProcRef(f"client<{number}>", "", "") for number in range(3))


def up(number):
    return ProcUp(ProcRef(f"proc-{number}<x>", "", "host"), number)


class Agent:
    """Collects what is told, and lets time pass."""

    def __init__(self):
        self.told, self.due = [], []
        self.news = UpNews(
            lambda delay_s, step: self.due.append(step),
            lambda owner, message: self.told.append((owner, message)),
            lambda ref: ref == NEAR,
        )

    def start(self, count):
        for _ in range(count):
            self.news.expect(OWNER)

    def pass_time(self):
        due, self.due = self.due, []
        for step in due:
            step()


def test_the_last_that_is_on_its_way_takes_the_others_along():
    agent = Agent()
    agent.start(4)
    for number in range(3):
        agent.news.add(OWNER, up(number))
    assert agent.told == [(OWNER, up(0))]
    agent.news.add(OWNER, up(3))
    assert agent.told[1:] == [(OWNER, ProcsUp([up(1), up(2), up(3)]))]


def test_one_that_fails_is_not_waited_for():
    agent = Agent()
    agent.start(4)
    for number in range(3):
        agent.news.add(OWNER, up(number))
    agent.news.fail(OWNER)
    assert agent.told[1:] == [(OWNER, ProcsUp([up(1), up(2)]))]
    agent.start(1)
    agent.news.add(OWNER, up(4))
    assert agent.told[2:] == [(OWNER, ProcsUp([up(4)]))]


def test_an_owner_on_the_same_host_hears_of_each_at_once():
    agent = Agent()
    for number in range(4):
        agent.news.expect(NEAR)
        agent.news.add(NEAR, up(number))
    assert agent.told == [(NEAR, up(number)) for number in range(4)]


def test_those_that_are_late_are_not_waited_for_long():
    agent = Agent()
    agent.start(9)
    for number in range(8):
        agent.news.add(OWNER, up(number))
    assert agent.told == [(OWNER, up(0))]
    agent.pass_time()
    assert agent.told[1:] == [(OWNER, ProcsUp([up(number) for number in range(1, 8)]))]
    agent.pass_time()
    assert len(agent.told) == 2 and not agent.due
    agent.news.add(OWNER, up(8))
    assert agent.told[2:] == [(OWNER, up(8))]


def test_owners_do_not_wait_for_each_other():
    agent = Agent()
    agent.start(2)
    agent.news.add(OWNER, up(0))
    agent.news.add(OTHER, up(1))
    assert agent.told == [(OWNER, up(0)), (OTHER, up(1))]


def test_what_comes_after_them_is_told_after_them():
    agent = Agent()
    agent.start(4)
    for number in range(3):
        agent.news.add(OWNER, up(number))
    agent.news.flush(OTHER)
    agent.news.flush(OWNER)
    assert agent.told[1:] == [(OWNER, ProcsUp([up(1), up(2)]))]
    agent.news.flush(OWNER)
    agent.pass_time()
    assert len(agent.told) == 2
