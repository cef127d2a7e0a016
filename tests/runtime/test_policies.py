"""Policies: numbers are checked, pauses double up to their limit, and each policy restarts whom its name says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis.strategies import floats, integers, lists, sampled_from, sets, tuples

from monarch._runtime.policies import AllForOne, Escalate, Ignore, OneForOne, Restarting, RestForOne
from monarch._runtime.supervision import Place

RESTARTING = [OneForOne, AllForOne, RestForOne]


@pytest.mark.parametrize("kind", RESTARTING)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"max_restarts": 0}, "max_restarts is 0; expected an integer of at least 1(.|\n)*Escalate"),
        ({"max_restarts": -1}, "max_restarts is -1"),
        ({"max_restarts": True}, "max_restarts is True"),
        ({"max_restarts": 2.5}, "max_restarts is 2.5"),
        ({"within_s": 0}, "within_s is 0; expected a number of seconds, more than 0"),
        ({"within_s": float("inf")}, "within_s is inf"),
        ({"within_s": float("nan")}, "within_s is nan"),
        ({"within_s": "60"}, "within_s is '60'"),
        ({"backoff_s": -0.1}, "backoff_s is -0.1; expected a number of seconds, at least 0"),
        ({"max_backoff_s": None}, "max_backoff_s is None"),
        ({"replace": "host"}, "replace is 'host'; expected 'actor' or 'proc'"),
    ],
    ids=str,
)
def test_a_wrong_number_is_named(kind, arguments, said):
    with pytest.raises(ValueError, match=said):
        kind(**arguments)


def test_policies_without_restarts_take_nothing():
    assert Escalate() == Escalate() and Ignore() == Ignore() != Escalate()
    with pytest.raises(TypeError):
        Ignore(max_restarts=3)


def test_the_pause_doubles_up_to_its_limit():
    policy = OneForOne(max_restarts=100, backoff_s=0.5, max_backoff_s=3.0)
    assert [policy.delay_s(count) for count in (1, 2, 3, 4, 5, 2000)] == [0.5, 1.0, 2.0, 3.0, 3.0, 3.0]
    assert OneForOne(backoff_s=0).delay_s(9) == 0


@given(backoff_s=floats(0, 1e6), most_s=floats(0, 1e6), count=integers(1, 10**9))
def test_a_pause_is_within_its_limit(backoff_s, most_s, count):
    assert 0 <= AllForOne(backoff_s=backoff_s, max_backoff_s=most_s).delay_s(count) <= most_s


members_and_failed = lists(tuples(sampled_from("ab"), integers(0, 5)).map(lambda pair: Place(*pair)), min_size=1, unique=True).flatmap(
    lambda members: tuples(sampled_from([members]), sets(sampled_from(members), min_size=1))
)


@given(case=members_and_failed)
def test_whom_a_policy_restarts_too(case):
    members, failed = case

    def restarted(policy: Restarting) -> set[Place]:
        return failed | set(policy.also_restarted(members, failed))

    assert restarted(OneForOne()) == failed
    assert restarted(AllForOne()) == set(members)
    first = min(members.index(place) for place in failed)
    assert restarted(RestForOne()) == set(members[first:])
