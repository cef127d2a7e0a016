"""Dumps: how ranks are written. Signals and stacks of whole processes are in `system/test_stalls.py`."""

from __future__ import annotations

import threading

import pytest

from monarch._runtime import dumps


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0-1"),
        ([7, 0, 1, 2, 5], "ranks 0-2, 5, 7"),
        (range(1000), "ranks 0-999"),
        ([1, 3, 5], "ranks 1, 3, 5"),
    ],
)
def test_ranks_are_written_as_people_write_them(ranks, text):
    assert dumps.ranks_text(ranks) == text


def test_only_the_main_thread_can_take_the_signal(tmp_path):
    armed = []
    thread = threading.Thread(target=lambda: armed.append(dumps.arm(str(tmp_path / "p"))))
    thread.start()
    thread.join()
    assert armed == [0]
    assert list(tmp_path.iterdir()) == []
