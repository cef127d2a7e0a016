"""Stalls: what looks at a proc over time are found to show, and what people read of it. Time is a number here."""

from __future__ import annotations

import pytest

from monarch._runtime.board import Entry
from monarch._runtime.stalls import Finding, Limits, Look, Stalls, blame_holder, describe
from monarch._wire.observation_messages import Stalled

NAME = "<root>.<a.Worker w{'gpus': 2/3}>"
LIMITS = Limits(endpoint_s=10.0, mailbox=100, interpreter_s=4.0)


def actor(slot=1, *, mesh="m-1", since_s=0.0, waiting=0, concurrent=0, oldest_since_s=0.0):
    return Entry(slot, 0, f"<actor {slot}>", "a", 0, since_s, "step", waiting, 7, mesh, concurrent, oldest_since_s, "serve")


def found(stalls, *looks):
    """(second, kind, slot) of everything that these looks find."""
    findings = []
    for look in looks:
        findings += [(look.now_s, finding.kind, finding.entry and finding.entry.slot) for finding in stalls.step(look)]
    return findings


def every_second(start, stop, look):
    return [look(float(second)) for second in range(start, stop)]


def test_an_endpoint_is_found_once_when_it_passes_its_limit():
    looks = every_second(1, 60, lambda now: Look(now, [actor(since_s=1.0)]))
    assert found(Stalls(LIMITS), *looks) == [(11.0, "endpoint", 1)]


def test_each_message_is_found_by_itself():
    looks = every_second(1, 60, lambda now: Look(now, [actor(since_s=1.0 if now < 30 else 30.0)]))
    assert found(Stalls(LIMITS), *looks) == [(11.0, "endpoint", 1), (40.0, "endpoint", 1)]


def test_messages_below_the_limit_are_not_found_however_many():
    looks = every_second(1, 100, lambda now: Look(now, [actor(since_s=now - now % 9)]))
    assert found(Stalls(LIMITS), *looks) == []


def test_a_slot_that_is_half_written_finds_nothing():
    looks = every_second(1, 30, lambda now: Look(now, [actor(since_s=1e-200 if now == 15 else now - 1)]))
    assert found(Stalls(LIMITS), *looks) == []


def test_each_actor_is_found_by_itself_also_in_the_slot_of_another():
    def look(now):
        return Look(now, [actor(1, since_s=1.0), actor(2, mesh="m-2" if now < 20 else "m-3", since_s=2.0)])

    assert found(Stalls(LIMITS), *every_second(1, 40, look)) == [(11.0, "endpoint", 1), (12.0, "endpoint", 2), (21.0, "endpoint", 2)]


@pytest.mark.parametrize(
    ("waiting", "times"),
    [
        (lambda now: 99, []),
        (lambda now: 500, []),  # full, but it does not grow
        (lambda now: 90 + 5 * now, [2.0]),
        (lambda now: 90 + 5 * (now % 10), [2.0]),  # never down to half the limit
        (lambda now: 20 * (now % 10), [5.0, 15.0, 25.0]),
    ],
    ids=["below", "steady", "growing", "swinging", "emptied"],
)
def test_a_mailbox_is_found_when_it_is_full_and_grows_and_again_once_it_was_emptied(waiting, times):
    looks = every_second(1, 30, lambda now: Look(now, [actor(waiting=int(waiting(now)))]))
    assert [at for at, kind, _ in found(Stalls(LIMITS), *looks) if kind == "mailbox"] == times


def test_an_interpreter_is_found_once_until_it_answers():
    looks = every_second(1, 30, lambda now: Look(now, [], silent_s=0.0 if now == 15 else now - (15 if now > 15 else 1)))
    assert found(Stalls(LIMITS), *looks) == [(5.0, "interpreter", None), (19.0, "interpreter", None)]


def test_what_runs_while_the_interpreter_is_silent_is_part_of_that_story():
    def look(now):
        return Look(now, [actor(1, since_s=3.0), actor(2, since_s=2.0), actor(3)], silent_s=now - 3 if 3 < now < 20 else 0.0)

    assert found(Stalls(LIMITS), *every_second(1, 60, look)) == [(7.0, "interpreter", 2)]


def test_a_message_that_begins_after_a_silence_is_found():
    def look(now):
        return Look(now, [actor(since_s=2.0 if now < 15 else 15.0)], silent_s=now - 1 if now < 15 else 0.0)

    assert found(Stalls(LIMITS), *every_second(1, 40, look)) == [(5.0, "interpreter", 1), (25.0, "endpoint", 1)]


def test_a_stopped_process_is_found_as_such_and_nothing_else_of_it_is():
    def look(now):
        stopped_s = now - 5 if 5 < now < 30 else 0.0
        return Look(now, [actor(since_s=1.0, waiting=int(now) * 50)], silent_s=now - 5 if stopped_s else 0.0, stopped_s=stopped_s)

    findings = found(Stalls(LIMITS), *every_second(1, 40, look))
    assert [finding for finding in findings if 5 < finding[0] < 30] == [(9.0, "stopped", 1)]
    assert "endpoint" not in [kind for _, kind, _ in findings]


def test_each_stop_is_found_by_itself():
    looks = every_second(1, 30, lambda now: Look(now, [], stopped_s=now % 10))
    assert found(Stalls(LIMITS), *looks) == [(4.0, "stopped", None), (14.0, "stopped", None), (24.0, "stopped", None)]


@pytest.mark.parametrize(
    ("interpreter_s", "killed_s", "times"),
    [(10.0, 10.0, [5.0]), (2.0, 10.0, [2.0]), (10.0, 4.0, [2.0]), (10.0, None, [10.0]), (None, 10.0, [])],
)
def test_a_stop_is_found_while_there_is_time_to_end_it(interpreter_s, killed_s, times):
    stalls = Stalls(LIMITS._replace(interpreter_s=interpreter_s, killed_s=killed_s))
    assert [at for at, _, _ in found(stalls, *every_second(1, 15, lambda now: Look(now, [], stopped_s=now)))] == times


def test_concurrent_calls_are_found_once_for_their_actor_until_the_oldest_is_young():
    def look(now):
        return Look(now, [actor(concurrent=5, oldest_since_s=1.0 if now < 20 else 5.0 if now < 30 else 29.0)])

    assert found(Stalls(LIMITS), *every_second(1, 45, look)) == [(11.0, "concurrent", 1), (39.0, "concurrent", 1)]


@pytest.mark.parametrize("off", ["endpoint_s", "mailbox", "interpreter_s"])
def test_none_switches_off_its_kind_only(off):
    stalls = Stalls(LIMITS._replace(**{off: None}))
    kinds = set()
    for now in range(1, 100):
        silent_s = max(0.0, now - 60.0)
        look = Look(float(now), [actor(since_s=1.0, waiting=10 * now, concurrent=1, oldest_since_s=1.0)], silent_s)
        kinds |= {finding.kind for finding in stalls.step(look)}
    kinds_of = {"endpoint_s": {"endpoint", "concurrent"}, "mailbox": {"mailbox"}, "interpreter_s": {"interpreter"}}
    assert kinds == {"endpoint", "concurrent", "mailbox", "interpreter"} - kinds_of[off]


@pytest.mark.parametrize(
    ("limits", "step_s"),
    [
        (Limits(None, None, None), None),
        (Limits(60.0, 10_000, 10.0), 2.5),
        (Limits(60.0, None, None), 5.0),
        (Limits(60.0, 10_000, 10.0, killed_s=10.0), 2.5),
        (Limits(60.0, 10_000, 10.0, killed_s=2.0), 0.5),
        (Limits(None, None, None, killed_s=10.0), None),
        (Limits(None, 10, None), 5.0),
        (Limits(0.2, None, 10.0), 0.05),
        (Limits(0.001, None, None), 0.02),
    ],
    ids=str,
)
def test_looks_are_a_fraction_of_the_smallest_limit_apart(limits, step_s):
    assert limits.step_s == step_s


def stalled(kind, *, rank=2, stack='File "a.py", line 3, in step'):
    name = NAME if rank >= 0 else ""
    return Stalled(kind, name, rank, "step" if rank >= 0 else "", 61.25, 4, "w-2<x>", 123, "node7", LIMITS.text(kind), stack)


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("endpoint", f"endpoint still runs: endpoint=step actor={NAME} rank=2 seconds=61.2 waiting=4 stall_"),
        ("concurrent", "concurrent endpoint still runs: endpoint=step actor=<root>"),
        ("mailbox", f"mailbox grows: endpoint=step actor={NAME} rank=2 waiting=4 stall_mailbox_limit=100"),
        ("interpreter", "interpreter does not answer: endpoint=step"),
        ("stopped", "process is stopped by a signal: endpoint=step"),
    ],
)
def test_a_notice_says_what_where_and_next(kind, what):
    first, where, following, *stack = describe(stalled(kind)).splitlines()
    assert first.startswith(what) and first.endswith(LIMITS.text(kind))
    assert where == "  where: proc w-2<x>, pid 123, host node7"
    assert following.startswith("  next:  nothing was ended; ")
    assert stack == ['    | File "a.py", line 3, in step']


def test_a_notice_without_a_stack_says_so_unless_none_was_asked_for():
    assert "no stack" in describe(stalled("endpoint", stack=""))
    assert "no stack" not in describe(stalled("stopped", stack=""))


def test_a_notice_of_a_process_without_a_busy_actor_names_the_process_only():
    first = describe(stalled("stopped", rank=-1)).splitlines()[0]
    assert first == "process is stopped by a signal: seconds=61.2 stall_interpreter_limit=4s"


def test_a_notice_of_a_stopped_process_says_when_it_is_killed():
    limits = LIMITS._replace(killed_s=10.0)
    notice = Stalled("stopped", "", -1, "", 5.0, 0, "w-2<x>", 123, "node7", limits.text("stopped"), "", killed_in_s=5.0)
    assert describe(notice).splitlines() == [
        "process is stopped by a signal: seconds=5.0 proc_stopped_limit=10s",
        "  where: proc w-2<x>, pid 123, host node7",
        "  next:  nothing was ended; kill -CONT lets it run on; if it stays stopped, its host agent kills it in 5.0 s",
    ]


@pytest.mark.parametrize(("running", "slot"), [((), 1), ((7,), 2), ((9,), 1), ((7, 9), 1), ((7, 8), 1)])
def test_a_silent_interpreter_is_blamed_on_an_actor_only_if_no_other_thread_can_hold_the_lock(running, slot):
    entries = [actor(1, since_s=1.0)._replace(thread=8), actor(2, since_s=2.0)._replace(thread=7)]
    finding = blame_holder(Finding("interpreter", entries[0], 5.0), entries, running)
    assert finding == Finding("interpreter", entries[slot - 1], 5.0)


def test_what_a_finding_is_about_is_the_endpoint_that_it_means():
    entry = actor(since_s=1.0, concurrent=1, oldest_since_s=1.0)
    assert [Finding(kind, entry, 1.0).endpoint for kind in ("endpoint", "concurrent")] == ["step", "serve"]
    assert Finding("mailbox", actor(), 0.0).endpoint == Finding("interpreter", None, 0.0).endpoint == ""
