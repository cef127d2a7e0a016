"""Relays: every question is answered once, with a copy that is new enough and has come far enough; one fetch at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._base.rows import ROW
from monarch.rdma.copies import NOTHING, Copy
from monarch.rdma.relays import Answer, Question, Relay, upstreams_of

SIZE = 100


def copy(number: int, arrived: int = SIZE, attempt: int = 1) -> Copy:
    stamp = number * 256 + 2 * attempt + (arrived < SIZE)
    return Copy(slot=number % 2, stamp=stamp, version=10 * number, arrived=arrived)


def whole(least: int) -> Question:
    return Question(least, NOTHING, SIZE)


def test_one_fetch_serves_all_who_wait():
    relay: Relay[str] = Relay()
    assert relay.ask(whole(3), "a", 9.0) == ([], True)
    assert relay.ask(whole(3), "b", 9.0) == ([], False)
    assert relay.wanted == 3
    assert relay.arrived(copy(3, 50)) == []
    answers, starts = relay.finished(copy(3))
    assert sorted(answers) == [Answer("a", copy(3)), Answer("b", copy(3))] and not starts
    assert relay.wanted == 0 and relay.ask(whole(2), "c", 9.0) == ([Answer("c", copy(3))], False)


def test_who_wants_a_newer_one_starts_the_next_fetch_when_this_one_has_ended():
    relay: Relay[str] = Relay()
    relay.ask(whole(1), "a", 9.0)
    relay.arrived(copy(1, 50))
    assert relay.ask(whole(2), "b", 9.0) == ([], False)
    assert relay.finished(copy(1)) == ([Answer("a", copy(1))], True)
    assert relay.wanted == 2
    assert relay.finished(copy(4)) == ([Answer("b", copy(4))], False)


def test_who_follows_gets_what_has_arrived_since():
    relay: Relay[str] = Relay()
    relay.ask(Question(1, NOTHING, 1), "next", 9.0)
    first = copy(1, 10)
    assert relay.arrived(first) == [Answer("next", first)]
    assert relay.ask(Question(1, first, 11), "next", 9.0) == ([], False)
    assert relay.arrived(copy(1, 10)) == []
    assert relay.arrived(copy(1, 11)) == [Answer("next", copy(1, 11))]
    relay.ask(Question(1, first, 12), "next", 9.0)
    assert relay.finished(copy(1)) == ([Answer("next", copy(1))], False)


@pytest.mark.parametrize("other", [copy(3, 10), copy(1, 10, attempt=2)])
def test_who_follows_what_was_overtaken_gets_what_comes_instead(other):
    relay: Relay[str] = Relay()
    relay.ask(Question(1, NOTHING, 1), "next", 9.0)
    relay.arrived(copy(1, 50))
    relay.ask(Question(1, copy(1, 50), 51), "next", 9.0)
    assert relay.overtaken(1.0) == ([], True)
    assert relay.arrived(other) == [Answer("next", other)]


def test_what_came_from_an_upstream_that_has_ended_is_no_answer_any_more():
    relay: Relay[str] = Relay()
    relay.ask(whole(1), "a", 9.0)
    relay.arrived(copy(1, 50))
    relay.cut_off()
    assert relay.ask(Question(1, NOTHING, 1), "next", 9.0) == ([], False)
    assert relay.arrived(copy(1, 10, attempt=2)) == [Answer("next", copy(1, 10, attempt=2))]


def test_whose_time_is_over_hears_so_and_nothing_is_fetched_for_him():
    relay: Relay[str] = Relay()
    relay.ask(whole(1), "early", 1.0)
    relay.ask(whole(2), "late", 3.0)
    assert relay.overtaken(1.0) == ([Answer("early", None)], True)
    assert relay.overtaken(3.0) == ([Answer("late", None)], False)
    assert relay.ask(whole(2), "again", 5.0) == ([], True)


def test_a_fetch_that_fails_fails_for_all_and_the_next_question_tries_again():
    relay: Relay[str] = Relay()
    relay.ask(whole(1), "a", 9.0)
    relay.ask(whole(5), "b", 9.0)
    failure = RuntimeError("gone")
    assert relay.failed(failure) == [Answer("a", None, failure), Answer("b", None, failure)]
    assert relay.ask(whole(1), "a", 9.0) == ([], True)


@given(st.lists(st.tuples(st.sampled_from(["ask", "follow", "arrive", "finish", "overtaken", "fail"]), st.integers(1, 4)), max_size=60))
def test_every_question_is_answered_once_and_a_fetch_runs_whenever_somebody_waits(steps):
    relay: Relay[int] = Relay()
    waiting: dict[int, Question] = {}
    fetching, number, arrived, attempt, last, asked = False, 0, 0, 0, NOTHING, 0

    def take(answers, starts=False):
        nonlocal fetching
        assert not (starts and fetching)
        fetching = fetching or starts
        for answer in answers:
            question = waiting.pop(answer.who)
            if answer.copy is not None:
                assert question.is_met_by(answer.copy) and answer.copy.number >= question.least
        assert fetching or not waiting

    for kind, value in steps:
        if kind in ("ask", "follow"):
            asked += 1
            question = whole(number + value - 1) if kind == "ask" else Question(number + value - 1, last, last.arrived % SIZE + 1)
            waiting[asked] = question
            take(*relay.ask(question, asked, 5.0))
        elif fetching and kind == "arrive":
            number, arrived = (max(number, relay.wanted), 1) if not arrived else (number, min(SIZE - 1, arrived + 20 * value))
            last = copy(number, arrived, attempt)
            take(relay.arrived(last))
        elif fetching:
            number, arrived, attempt = max(number, relay.wanted), 0, attempt + 1
            fetching = False
            if kind == "finish":
                take(*relay.finished(copy(number, SIZE, attempt - 1)))
            elif kind == "overtaken":
                take(*relay.overtaken(float(value)))
            else:
                take(relay.failed(RuntimeError("gone")))


def test_relays_form_rows_whose_heads_form_a_row():
    assert [list(upstreams_of(position)) for position in range(3)] == [[], [0], [1, 0]]
    assert list(upstreams_of(ROW)) == [0] and list(upstreams_of(2 * ROW + 2)) == [2 * ROW + 1, 2 * ROW, ROW, 0]
    readers = [next(upstreams_of(position), None) for position in range(200)]
    assert max(readers.count(position) for position in range(200)) == 2
    assert readers.count(None) == 1
