"""Stacks: real frames, coroutines and dumps of this process become the user's part of them."""

from __future__ import annotations

import asyncio
import bdb
import cmd
import faulthandler
import os
import pdb
import sys
import threading

import pytest

import monarch
from monarch._runtime import stacks
from monarch._runtime.stacks import Place

OURS = os.path.join(os.path.dirname(monarch.__file__), "_runtime", "cell.py")
REMOTE_PDB = os.path.join(os.path.dirname(monarch.__file__), "actor", "remote_pdb.py")
THREADING, ASYNCIO = threading.__file__, asyncio.base_events.__file__


def places(*files):
    return [Place(file, line, f"f{line}") for line, file in enumerate(files, 1)]


def trimmed(*files):
    return [place.line for place in stacks.trim(places(*files))]


def test_frames_are_in_the_order_of_a_traceback():
    def outer():
        return inner()

    def inner():
        return stacks.places_of(sys._getframe())

    names = [place.function.rpartition(".")[2] for place in outer()]
    assert names[-2:] == ["outer", "inner"]
    assert stacks.places_of(None) == []


@pytest.mark.parametrize(
    ("files", "lines"),
    [
        ((THREADING, OURS, OURS, "user.py", "lib.py"), [4, 5]),
        ((THREADING, OURS, "user.py", OURS, OURS), [3]),  # it waits in Future.get
        ((THREADING, OURS, "user.py", OURS, "user.py"), [3, 4, 5]),
        ((THREADING, OURS, "user.py", THREADING, THREADING), [3]),  # it waits for a lock of its own
        ((THREADING, OURS, "user.py", THREADING, "user.py"), [3, 4, 5]),
        (("user.py", ASYNCIO), [1]),  # a coroutine that sleeps
        ((THREADING, OURS, ASYNCIO, ASYNCIO, OURS), []),  # an idle event loop
        ((THREADING, OURS, ASYNCIO, OURS, "user.py"), [5]),
        ((THREADING, "user.py"), [2]),  # a thread of the user's
        (("<string>", OURS, OURS, THREADING), []),  # the main thread of a proc
        (("<string>", "user.py"), [1, 2]),  # a script given with -c
        ((), []),
    ],
)
def test_only_the_users_part_of_a_stack_is_kept(files, lines):
    assert trimmed(*files) == lines


@pytest.mark.parametrize(
    ("files", "waits"),
    [((), True), ((THREADING, OURS, "user.py"), False), (("user.py", OURS), True), (("user.py", THREADING), True), ((ASYNCIO,), True)],
)
def test_a_thread_waits_if_its_innermost_frame_does(files, waits):
    assert stacks.waits(places(*files)) == waits


def test_a_stack_that_waits_in_the_debugger_is_a_line_that_says_so():
    inner = (bdb.__file__, pdb.__file__, cmd.__file__, REMOTE_PDB, REMOTE_PDB, THREADING)
    assert stacks.told(places(THREADING, OURS, "user.py", *inner)) == (
        'waits at a breakpoint (File "user.py", line 3, in f3); attach with: monarch debug'
    )
    assert stacks.told(places(THREADING, OURS, *inner)) == "waits at a breakpoint; attach with: monarch debug"
    assert stacks.told(places("user.py", *inner, "user.py")).endswith("line 8, in f8")  # an expression that is run at the prompt
    assert stacks.told(places("user.py", THREADING)) == 'File "user.py", line 1, in f1'


async def test_a_suspended_coroutine_is_followed_to_what_it_awaits():
    event = asyncio.Event()

    async def outer():
        await inner()

    async def inner():
        async for _ in numbers():
            await waiting()

    async def numbers():
        yield 1

    async def waiting():
        await event.wait()

    task = asyncio.create_task(outer())
    await asyncio.sleep(0)
    names = [place.function.rpartition(".")[2] for place in stacks.awaits_of(task.get_coro())]
    assert names == ["outer", "inner", "waiting", "wait"]
    event.set()
    await task
    assert stacks.awaits_of(task.get_coro()) == []


def test_a_stack_is_text_of_bounded_length():
    assert stacks.render([]) == ""
    two = [Place("a.py", 3, "step"), Place("b.py", 0, "inner")]
    assert stacks.render(two) == 'File "a.py", line 3, in step\nFile "b.py", line ?, in inner'
    first, *rest = stacks.render(places(*["user.py"] * 500)).splitlines()
    assert first == "(480 frames more)"
    assert len(rest) == 20 and rest[-1].endswith("line 500, in f500")


def test_stacks_are_joined_under_their_titles_without_the_empty_ones():
    assert stacks.join([("", "one"), ("task 'a'", "two\nthree"), ("task 'b'", "")]) == "one\ntask 'a':\n  two\n  three"
    assert len(stacks.join([("", "x" * 1000)] * 50)) < 4100


def test_a_dump_of_this_process_gives_the_stack_of_every_thread(tmp_path):
    started, end = threading.Event(), threading.Event()

    def stand_still():
        started.set()
        end.wait()

    thread = threading.Thread(target=stand_still)
    thread.start()
    started.wait()
    with open(tmp_path / "dump", "w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        dump = stacks.parse_dump(file.read())
    ident = thread.ident
    end.set()
    thread.join()
    assert {ident, threading.get_ident()} <= dump.keys()
    kept = stacks.trim(dump[ident])
    assert (kept[0].file, kept[0].function) == (__file__, "stand_still")
    assert dump[threading.get_ident()][-1].function == "test_a_dump_of_this_process_gives_the_stack_of_every_thread"


BROKEN = ["", "garbage\n", "Thread 0xzz\n", '  File "a.py", line 1 in f\n', "Thread 0x10 (most recent call first):\n  ..."]


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_dump_gives_no_frames(text):
    assert not any(stacks.parse_dump(text).values())


def test_a_dump_names_a_line_that_is_not_known():
    text = 'Current thread 0x00000010 [name] (most recent call first):\n  File "a", line ??? in inner\n  File "b", line 7 in outer\n'
    assert stacks.parse_dump(text) == {16: [Place("b", 7, "outer"), Place("a", 0, "inner")]}
