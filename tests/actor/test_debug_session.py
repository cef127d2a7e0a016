"""Debug sessions: names, selections, and the talk between pdb and terminals."""

from __future__ import annotations

import asyncio
import sys

import pytest

from monarch.actor.debug_io import DebugIO, DebugIOError
from monarch.actor.debug_session import DebuggerWrite, DebugSession, DebugSessionInfo, DebugSessions, Origin

HOSTS, GPUS = 3, 8


def origin(mesh, serial=0, proc="p"):
    return Origin(proc, f"{mesh}-uid", f"{mesh}<uid>", "worker", serial)


@pytest.fixture
def grid():
    sessions = DebugSessions()
    for actor in ("a", "b"):
        for rank in range(HOSTS * GPUS):
            sessions.insert(DebugSession(rank, {"hosts": rank // GPUS, "gpus": rank % GPUS}, "", actor))
    return sessions


def test_a_session_is_found_by_actor_and_rank_until_it_is_removed():
    sessions = DebugSessions()
    one, two = DebugSession(0, {}, "", "a"), DebugSession(1, {}, "", "a")
    with pytest.raises(ValueError, match="No debug sessions for actor a"):
        sessions.get("a", 0)
    sessions.insert(one)
    with pytest.raises(ValueError, match="No debug session for rank 1 for actor a"):
        sessions.get("a", 1)
    with pytest.raises(ValueError, match="Debug session for rank 0 already exists for actor a"):
        sessions.insert(DebugSession(0, {}, "", "a"))
    sessions.insert(two)
    assert (sessions.get("a", 0), sessions.get("a", 1), len(sessions)) == (one, two, 2)
    assert ("a", 0) in sessions and ("a", 2) not in sessions and ("b", 0) not in sessions
    assert sessions.remove("a", 0) is one
    with pytest.raises(ValueError, match="No debug session for rank 0 for actor a"):
        sessions.remove("a", 0)
    assert sessions.remove("a", 1) is two
    with pytest.raises(ValueError, match="No debug sessions for actor a"):
        sessions.remove("a", 1)
    assert len(sessions) == 0 and ("a", 1) not in sessions


@pytest.mark.parametrize(
    ("ranks", "chosen"),
    [
        (None, range(24)),
        (2, [2]),
        (99, []),
        ([1, 3, 99], [1, 3]),
        (range(2, 24, 3), range(2, 24, 3)),
        (range(sys.maxsize), range(24)),
        ({"hosts": 1}, range(8, 16)),
        ({"hosts": [0, 2]}, [*range(8), *range(16, 24)]),
        ({"gpus": range(5, 8)}, [5, 6, 7, 13, 14, 15, 21, 22, 23]),
        ({"hosts": [1, 3], "gpus": range(0, sys.maxsize, 3)}, [8, 11, 14]),
        ({"hosts": 0, "zone": 0}, []),
        ({}, range(24)),
    ],
)
def test_ranks_select_sessions_of_one_actor(grid, ranks, chosen):
    for actor in ("a", "b"):
        found = sorted(session.get_info() for session in grid.iter((actor, ranks)))
        assert [(info.actor_name, info.rank) for info in found] == [(actor, rank) for rank in chosen]
    assert list(grid.iter(("c", ranks))) == []


def test_all_sessions_are_listed_by_actor_and_rank(grid):
    listed = [(info.actor_name, info.rank) for info in grid.info()]
    assert listed == [(actor, rank) for actor in ("a", "b") for rank in range(24)]
    assert len(list(grid.iter(None))) == 48


def test_sessions_may_end_while_they_are_walked_over(grid):
    for session in grid.iter(("a", None)):
        grid.remove("a", session.rank)
    assert len(grid) == 24


def named(sessions, mesh, rank, serial=0):
    name = sessions.name_for("worker", rank, origin(mesh, serial))
    session = DebugSession(rank, {}, "", name, origin=origin(mesh, serial))
    sessions.insert(session)
    return name


def test_meshes_of_one_name_get_names_of_their_own_for_all_their_ranks():
    sessions = DebugSessions()
    order = [("x", 0), ("y", 0), ("y", 1), ("x", 1), ("z", 5)]
    assert [named(sessions, *one) for one in order] == ["worker", "worker-2", "worker-2", "worker", "worker-3"]


def test_equal_ranks_of_one_mesh_get_names_of_their_own():
    sessions = DebugSessions()
    assert [named(sessions, "x", 0, serial) for serial in range(3)] == ["worker", "worker-2", "worker-3"]
    assert named(sessions, "x", 1, 9) == "worker"


def test_a_name_is_free_again_when_its_sessions_have_ended_but_nobody_is_renamed():
    sessions = DebugSessions()
    assert [named(sessions, "x", 0), named(sessions, "y", 0)] == ["worker", "worker-2"]
    sessions.remove("worker", 0)
    assert named(sessions, "y", 1) == "worker-2"
    assert named(sessions, "z", 0) == "worker"


def test_a_session_is_found_by_the_unique_names_of_its_mesh_too():
    sessions = DebugSessions()
    named(sessions, "x", 0)
    named(sessions, "y", 0)
    assert sessions.get("y<uid>", 0).actor_name == sessions.get("y-uid", 0).actor_name == "worker-2"
    assert [session.actor_name for session in sessions.iter(("x-uid", None))] == ["worker"]
    assert sessions.remove("y<uid>", 0).actor_name == "worker-2"


def test_infos_compare_and_sort():
    info = DebugSessionInfo("a", 1, {"x": 1}, "h", None, None)
    assert info == DebugSessionInfo("a", 1, {"x": 1}, "h", None, None)
    assert sorted([DebugSessionInfo("b", 0, {}, "", None, None), info])[0] is info


# --- the talk ----------------------------------------------------------------------------------------------------------


class Person(DebugIO):
    """Sees everything; types what `lines` has when it is asked."""

    def __init__(self, *lines):
        self.lines = asyncio.Queue()
        self.seen = ""
        self.asked = 0
        self._interrupt = asyncio.Event()
        for line in lines:
            self.lines.put_nowait(line)

    @property
    def interrupted(self):
        return self._interrupt

    async def input(self, prompt=""):
        self.asked += 1
        line = await self.lines.get()
        if line is None:
            raise DebugIOError("gone")
        return line

    async def output(self, msg):
        self.seen += msg

    async def quit(self):
        return


class Talk:
    """A session with pdb at one end."""

    def __init__(self):
        self.session = DebugSession(2, {}, "host", "actor")

    async def print(self, text, lineno=1):
        await self.session.debugger_write(DebuggerWrite(text.encode(), "m.f", lineno))

    async def read(self):
        return (await self.session.debugger_read(sys.maxsize)).payload.decode()


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


async def test_what_pdb_prints_is_shown_and_what_is_typed_is_read():
    talk, person = Talk(), Person("n", "detach")
    await talk.print("first\n(Pdb) ")
    assert (talk.session.get_info().function, talk.session.get_info().lineno) == ("m.f", 1)
    attached = asyncio.create_task(talk.session.attach(person))
    await settle()
    assert person.asked == 0, "asked for a line although pdb does not wait for one"
    assert await talk.read() == "n\n"
    await talk.print("second\n(Pdb) ", 2)
    waiting = asyncio.create_task(talk.read())
    await attached
    assert person.seen == (
        "Attached to debug session for actor 2 (host)\n<last pdb output for actor 2 follows>\nfirst\n(Pdb) "
        "second\n(Pdb) Detached from debug session for actor 2 (host)\n"
    )
    again = Person("detach")
    await talk.session.attach(again, suppress_output=True)
    assert again.seen == "<last pdb output for actor 2 follows>\nsecond\n(Pdb) "
    assert talk.session.get_info().lineno == 2
    waiting.cancel()


async def test_a_session_that_was_let_go_on_runs_until_pdb_asks_again():
    talk = Talk()
    await talk.print("-> stop\n(Pdb) ")
    waiting = asyncio.create_task(talk.read())
    await settle()
    assert not talk.session.get_info().running
    talk.session.send("c")
    assert talk.session.get_info().running
    assert await waiting == "c\n"
    assert talk.session.get_info().running
    person = Person("detach")
    attached = asyncio.create_task(talk.session.attach(person))
    while "runs" not in person.seen:
        await asyncio.sleep(0)
    assert person.seen.endswith("actor 2 runs; its prompt comes when it stops at a breakpoint; Ctrl-C detaches\n")
    await talk.print("-> again\n(Pdb) ", 2)
    waiting = asyncio.create_task(talk.read())
    await attached
    assert "-> again\n(Pdb) Detached" in person.seen and not talk.session.get_info().running
    waiting.cancel()


async def test_one_line_is_sent_without_attaching():
    talk = Talk()
    await talk.session.attach(Person(), "p 1")
    await talk.session.attach(Person(), "n", suppress_output=True)
    assert [await talk.read(), await talk.read()] == ["p 1\n", "n\n"]


async def test_a_long_line_is_read_in_pieces():
    talk = Talk()
    talk.session.send("abcdef")
    assert [(await talk.session.debugger_read(size)).payload for size in (4, 2, 9)] == [b"abcd", b"ef", b"\n"]


async def test_two_people_see_the_same_and_the_first_line_is_the_answer():
    talk, left, right = Talk(), Person(), Person()
    both = [asyncio.create_task(talk.session.attach(person)) for person in (left, right)]
    reading = asyncio.create_task(talk.read())
    await settle()
    right.lines.put_nowait("p 42")
    assert await reading == "p 42\n"
    await talk.print("42\n")
    reading = asyncio.create_task(talk.read())
    await settle()
    assert left.seen.endswith("p 42\n42\n") and right.seen.endswith("(host)\n42\n")
    left.lines.put_nowait("c")
    assert await reading == "c\n"
    talk.session.end("all done")
    await asyncio.wait(both, timeout=1)
    for person in (left, right):
        assert person.seen.endswith("\nDebug session for actor 2 has ended: all done\nDetached from debug session for actor 2 (host)\n")


async def test_an_end_while_a_person_is_asked_takes_no_line_of_theirs():
    talk, person = Talk(), Person()
    attached = asyncio.create_task(talk.session.attach(person))
    reading = asyncio.create_task(talk.read())
    await settle()
    assert person.asked == 1
    talk.session.end("killed")
    await attached
    person.lines.put_nowait("for the next prompt")
    assert await person.input() == "for the next prompt"
    reading.cancel()


async def test_an_interrupt_and_the_loss_of_a_person_leave_the_session_as_it_is():
    talk, person = Talk(), Person()
    attached = asyncio.create_task(talk.session.attach(person))
    await settle()
    person.interrupted.set()
    await attached
    gone = Person(None)
    reading = asyncio.create_task(talk.read())
    with pytest.raises(DebugIOError):
        await talk.session.attach(gone)
    assert talk.session.ended is None and not reading.done()
    talk.session.send("c")
    assert await reading == "c\n"


async def test_detach_sends_everybody_away():
    talk, people = Talk(), [Person(), Person()]
    attached = [asyncio.create_task(talk.session.attach(person)) for person in people]
    await settle()
    await talk.session.detach()
    done, _ = await asyncio.wait(attached, timeout=1)
    assert len(done) == 2 and talk.session.ended is None
