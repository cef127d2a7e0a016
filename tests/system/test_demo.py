"""`monarch demo` as a user runs it: its report, its end, and what is left of it."""

from __future__ import annotations

import os
import re
import signal

import pytest

from system.script import run_script, start_script
from system.waiting import wait_until

COMMAND = "from monarch.cli import main; main()"
ALL_PROCESSES = 1 + 2 + 3
"""The script, the host agent and its zygote, and three workers."""


@pytest.mark.quick
def test_the_demo_reports_an_index_and_both_failures() -> None:
    done = run_script(COMMAND, args=["demo", "--procs", "3", "--files", "60"]).check()
    assert done.stderr == ""  # no terminal, so no progress bar
    text = done.stdout
    assert re.match(r"indexing 60 files of the Python 3\.\d+ standard library on 3 procs\n", text)
    assert re.search(r"^  all \d+ +60 +[\d,]{5,} +[\d,]{6,}  \d+ lines: \w+", text, re.MULTILINE)
    assert re.search(r"^  [\d,]+ different identifiers; the most frequent: self [\d,]+, ", text, re.MULTILINE)
    assert re.search(r"^  the longest function: [\w.]+, [\w/]+\.py:\d+, with \d+ branches$", text, re.MULTILINE)
    assert re.findall(r"^  worker (\d): (\d+) files, ", text, re.MULTILINE) == [("0", "20"), ("1", "20"), ("2", "20")]
    assert re.search(r"^  ActorError: Actor call indexer.branches failed. FileNotFoundError: .*no/such/file.py'$", text, re.MULTILINE)
    assert "worker 0 goes on: it still has its index of 20 files" in text
    assert re.search(r"^  SupervisionError after \d+ ms:\n    Endpoint call indexer\.share\(\) failed, ", text, re.MULTILINE)
    assert "{'procs': 2/3}" in text and "Killed(sig=9)" in text
    assert re.search(r"hears of it as well: ranks \[2\] of indexer-", text)
    assert "the rest, 2 of 3 workers, goes on: it has 40 indexed files" in text
    assert re.search(r"\ndone in \d+\.\d s\n$", text)


def test_ctrl_c_ends_the_demo_and_leaves_nothing() -> None:
    with start_script(COMMAND, args=["demo", "--procs", "3"]) as run:
        run.wait_line("^indexing ")
        wait_until(lambda: len(run.pids()) >= ALL_PROCESSES)
        os.kill(run.pid, signal.SIGINT)
        done = run.finish()
    done.check(130)
    assert done.stderr.splitlines()[-1] == "monarch: interrupted"
    assert "Traceback" not in done.stderr
    assert "done" not in done.stdout


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_a_killed_demo_leaves_nothing(number: signal.Signals) -> None:
    with start_script(COMMAND, args=["demo", "--procs", "3"]) as run:
        run.wait_line("^indexing ")
        wait_until(lambda: len(run.pids()) >= ALL_PROCESSES)
        os.kill(run.pid, number)
        run.finish().check(-number)
