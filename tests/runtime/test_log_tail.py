"""Tails of log files: the last lines, found from the end, and what is added later."""

from __future__ import annotations

import contextlib
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._runtime import log_files, log_tail
from monarch._runtime.log_files import RotatedFile

half_a_line = st.binary(max_size=5).map(lambda data: data.replace(b"\n", b""))


@given(lengths=st.lists(st.integers(0, 30_000), max_size=12), rest=half_a_line, number=st.integers(0, 15))
def test_the_last_lines_are_those_of_the_whole_file(tmp_path_factory, lengths, rest, number):
    path = tmp_path_factory.mktemp("tail") / "a.log"
    lines = [b"%d" % index * length + b"\n" for index, length in enumerate(lengths)]
    path.write_bytes(b"".join(lines) + rest)
    assert log_tail.last_lines(str(path), number) == b"".join(lines[len(lines) - min(number, len(lines)) :])


@pytest.fixture
def run(tmp_path):
    made = log_files.make_run(str(tmp_path / "logs"))
    for name in ("trainer-0.aaa", "trainer-1.aaa", "eval-0.bbb"):
        RotatedFile(os.path.join(made.path, f"{name}.log"), 1000).close()
    yield made
    with contextlib.suppress(OSError):  # the test has ended the run
        os.close(made.lock_fd)


def named(run: log_files.RunFolder) -> log_files.Run:
    (found,) = log_files.runs(os.path.dirname(run.path))
    return found


@pytest.mark.parametrize(
    ("names", "files"),
    [
        ([], ["eval-0", "trainer-0", "trainer-1"]),
        (["trainer"], ["trainer-0", "trainer-1"]),
        (["trainer-1"], ["trainer-1"]),
        (["0"], ["eval-0", "trainer-0"]),
        (["eval", "1"], ["eval-0", "trainer-1"]),
    ],
)
def test_processes_are_chosen_by_mesh_name_or_rank(run, names, files):
    assert [file.name for file in log_tail.chosen(log_tail.log_files_of(named(run)), names)] == files


def test_an_unknown_process_is_named_with_those_that_exist(run):
    with pytest.raises(ValueError, match=r"no process 'trainr' has a log file here; did you mean 'trainer'\?\n  next:  known are eval, "):
        log_tail.chosen(log_tail.log_files_of(named(run)), ["trainr"])


def test_following_goes_on_through_rotations_until_the_run_ends(run):
    path = os.path.join(run.path, "trainer-0.aaa.log")
    file = RotatedFile(path, 60)
    file.write(b"old\nfirst\n")
    following = log_tail.follow(named(run), ["trainer-0"], 1)
    assert next(following)[1] == b"first\n"

    def write() -> None:
        for number in range(20):  # three parts, none of them too old to be there
            file.write(b"line %d\n" % number)
        file.close()
        os.close(run.lock_fd)

    writer = threading.Thread(target=write)
    writer.start()
    seen = b"".join(data for _, data in following)
    writer.join()
    assert seen == b"".join(b"line %d\n" % number for number in range(20))
