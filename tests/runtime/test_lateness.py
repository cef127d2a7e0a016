"""Lateness: what an actor does, in words. Whole stories are in `system/test_stalls.py`."""

from __future__ import annotations

import pytest

from monarch._runtime.lateness import answered, doing
from monarch._wire.observation_messages import ActorActivity


def row(**fields):
    known = {"endpoint": None, "running_s": 0.0, "waiting": 0, "handled": 5, "state": "idle"}
    return ActorActivity(actor="<a>", name="a", rank=0, proc="p<1>", pid=1, **known | fields)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "idle, 5 handled"),
        ({"waiting": 2}, "idle, 5 handled, 2 waiting"),
        ({"endpoint": "step", "running_s": 12.34, "state": "busy", "waiting": 3}, "busy for 12.3 s in 'step', 3 waiting"),
        (
            {"endpoint": "step", "running_s": 2.0, "state": "busy", "debugged": True},
            "busy for 2.0 s in 'step', waits at a breakpoint (attach with: monarch debug)",
        ),
        ({"state": "stopped"}, "its process is stopped by a signal"),
        ({"endpoint": "step", "running_s": 2.0, "state": "stopped"}, "its process is stopped by a signal, busy for 2.0 s in 'step'"),
        ({"state": "gone"}, "its process has ended"),
        (
            {"num_concurrent": 2, "oldest": "serve", "oldest_s": 3.0},
            "idle, 5 handled, 2 concurrent under way, the oldest 'serve' for 3.0 s",
        ),
        (
            {"endpoint": "step", "running_s": 7.0, "state": "busy", "silent_s": 6.5},
            "busy for 7.0 s in 'step', its interpreter has not answered for 6.5 s",
        ),
    ],
)
def test_what_an_actor_does_is_said_in_words(fields, text):
    assert doing(row(**fields)) == text


class Late:
    """A call of some ranks of a slice of every second rank."""

    mesh_ranks = range(0, 20, 2)

    def __init__(self, asked, missing):
        self._asked, self._missing = asked, missing

    def asked(self):
        return list(self._asked)

    def missing(self):
        return list(self._missing)


@pytest.mark.parametrize(
    ("asked", "missing", "text"),
    [
        (range(10), [0], "ranks 2, 4, 6, 8, 10, 12, 14, 16, 18 (9 of 10)"),
        (range(3), [0, 2], "rank 2 (1 of 3)"),
        ([4], [4], "none of 1"),
    ],
)
def test_ranks_that_have_answered_are_those_of_the_mesh(asked, missing, text):
    call = Late(asked, missing)
    assert answered(call, call) == f"  answered: {text}"
