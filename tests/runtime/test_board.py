"""The board: what is written at one end is read at the other, whatever is being written just now."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from monarch._base.ids import ProcRef
from monarch._runtime import board
from monarch._runtime.board import Board

REF = ProcRef("p<1>", "ipc:///p", "")


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "p")


def texts(rows):
    return [(row.actor, row.name, row.rank, row.endpoint, row.waiting, row.handled, row.state) for row in rows]


def test_a_slot_shows_what_its_actor_does(path):
    slot = Board(path).slot(3, "root.Worker{'gpus': 3/4}", "worker")
    assert texts(board.read(REF, path, 7, "")) == [("root.Worker{'gpus': 3/4}", "worker", 3, None, 0, 0, "idle")]
    slot.begin(time.monotonic() - 5, b"step", 2)
    (row,) = board.read(REF, path, 7, "")
    assert texts([row]) == [("root.Worker{'gpus': 3/4}", "worker", 3, "step", 2, 0, "busy")]
    assert 5 <= row.running_s < 60
    assert (row.proc, row.pid) == ("p<1>", 7)
    slot.wait(9)
    slot.end(1)
    (row,) = board.read(REF, path, 7, "")
    assert (row.endpoint, row.running_s, row.waiting, row.handled, row.state) == (None, 0.0, 9, 1, "idle")


def test_a_slot_shows_who_waits_at_a_breakpoint(path):
    writer = Board(path)
    slots = [writer.slot(rank, "actor", "n" * 200) for rank in range(3)]
    slots[1].debug(True)
    assert [row.debugged for row in board.read(REF, path, 1, "")] == [False, True, False]
    slots[1].begin(time.monotonic(), b"step", 2)
    slots[1].end(1)
    assert [entry.debugged for entry in board.look(path)] == [False, True, False]
    slots[1].debug(False)
    assert not any(row.debugged for row in writer.rows(REF, 1, ""))


def test_actors_are_listed_in_the_order_of_their_start_until_they_leave(path):
    writer = Board(path)
    slots = [writer.slot(rank, f"actor {rank}", "name") for rank in range(4)]
    slots[1].leave()
    slots[1].leave()
    assert [row.rank for row in board.read(REF, path, 1, "")] == [0, 2, 3]
    slots[1].end(5)  # its last message ends behind it
    assert [row.rank for row in board.read(REF, path, 1, "")] == [0, 2, 3]
    assert texts(writer.rows(REF, 1, "")) == texts(board.read(REF, path, 1, ""))


def test_a_process_that_stands_still_or_is_gone_is_shown_so(path):
    Board(path).slot(0, "actor", "name").begin(time.monotonic(), b"step", 0)
    for state in ("stopped", "gone"):
        assert [row.state for row in board.read(REF, path, 1, state)] == [state]


def test_a_client_has_a_board_that_nobody_else_sees(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    writer = Board(None)
    writer.slot(0, "actor", "name")
    assert texts(writer.rows(REF, 1, "")) == [("actor", "name", 0, None, 0, 0, "idle")]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["Tensor🔥" * 60, "x" * 5000, "ü" * 101, "", "\ud800"], ids=len)
def test_names_of_any_length_fit(path, name):
    writer = Board(path)
    slot = writer.slot(0, name + "!", name or "name")
    slot.begin(time.monotonic(), name.encode("utf-8", "replace"), 0)
    (row,) = board.read(REF, path, 1, "")
    assert row.actor.rstrip("�") in (name + "!").encode("utf-8", "replace").decode()
    assert row.name


def test_a_full_board_has_no_slot_left(path):
    writer = Board(path)
    slots = [writer.slot(rank, "actor", "name") for rank in range(1100)]
    assert [slot is None for slot in slots] == [False] * 1023 + [True] * 77
    slots[1022].begin(time.monotonic(), b"last", 0)
    rows = board.read(REF, path, 1, "")
    assert len(rows) == 1023
    assert rows[-1].endpoint == "last"


def test_a_process_without_board_has_no_rows(path):
    assert board.read(REF, path, 1, "") == []


@pytest.mark.parametrize("size", [0, 1, 8, 600])
def test_a_board_that_is_being_made_has_no_rows(path, size):
    with open(path + ".b", "wb") as file:
        file.write(b"\xff" * size)
    assert board.read(REF, path, 1, "") == []


def test_a_board_is_for_its_user_only(path):
    Board(path)
    assert os.stat(path + ".b").st_mode & 0o777 == 0o600


def test_another_process_reads_what_a_killed_one_wrote_last(path):
    source = f"""
import os, signal, time
from monarch._runtime.board import Board
slot = Board({path!r}).slot(0, "actor", "name")
slot.begin(time.monotonic(), b"step", 3)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", source]).returncode == -9
    assert texts(board.read(REF, path, 1, "gone")) == [("actor", "name", 0, "step", 3, 0, "gone")]


def test_reading_while_it_is_written_never_fails(path):
    writer = Board(path)
    stop = threading.Event()

    def write():
        slot = writer.slot(0, "actor", "name")
        handled = 0
        while not stop.is_set():
            slot.begin(time.monotonic(), b"step", handled)
            slot.wait(handled)
            handled += 1
            slot.end(handled)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(30):
            for row in board.read(REF, path, 1, ""):
                # A torn slot is half written: the endpoint may be cut or empty, a count may be zero for a moment.
                assert row.actor == "actor"
                assert row.endpoint is None or "step".startswith(row.endpoint)
    finally:
        stop.set()
        thread.join()


def test_concurrent_calls_and_the_mesh_are_shown_beside_the_endpoint(path):
    slot = Board(path).slot(0, "actor", "name", mesh="a-mesh", thread=77)
    slot.overlap(3, time.monotonic() - 5, "serve")
    (row,) = board.read(REF, path, 1, "", 1.5)
    assert (row.mesh, row.num_concurrent, row.oldest, row.silent_s) == ("a-mesh", 3, "serve", 1.5)
    assert 5 <= row.oldest_s < 60
    slot.overlap(0, 0.0, "")
    (row,) = board.read(REF, path, 1, "")
    assert (row.num_concurrent, row.oldest, row.oldest_s) == (0, None, 0.0)


def test_a_long_name_of_a_mesh_keeps_its_end_which_is_unique(path):
    Board(path).slot(0, "actor", "name", mesh="x" * 200 + "-random")
    assert board.look(path)[0].mesh == "x" * 49 + "-random"


def test_a_look_shows_what_is_in_use_and_the_threads(path):
    writer = Board(path)
    for thread in (5, 6):
        writer.slot(0, "actor", "name", thread=thread).begin(12.5, b"step", 4)
    assert [(entry.slot, entry.thread, entry.since_s, entry.endpoint, entry.waiting) for entry in board.look(path)] == [
        (1, 5, 12.5, "step", 4),
        (2, 6, 12.5, "step", 4),
    ]
    assert board.look(path + "x") == []


def test_a_board_says_which_signal_dumps_its_process(path):
    assert board.armed(path) == (0, 0)
    writer = Board(path)
    assert board.armed(path) == (0, 0)
    writer.arm(12, 59)
    assert board.armed(path) == (12, 59)
    writer.slot(0, "actor", "name")
    assert board.armed(path) == (12, 59)
    writer.arm(12, 0)
    assert board.armed(path) == (0, 0)
