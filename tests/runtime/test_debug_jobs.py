"""Debug servers are found by their user, while their client lives."""

from __future__ import annotations

import os
import tempfile

import pytest

from monarch._runtime.debug_jobs import DebugJob, find_debug_jobs, publish_debug_job, withdraw_debug_job
from monarch._runtime.rundir import make_run_dir, remove_run_dir


@pytest.fixture
def run_dirs(monkeypatch, tmp_path_factory):
    monkeypatch.setattr(tempfile, "tempdir", tempfile.mkdtemp(prefix="dj-"))
    made = [make_run_dir() for _ in range(2)]
    yield made
    for run_dir in made:
        remove_run_dir(run_dir.path)


def job(port):
    return DebugJob("127.0.0.1", port, "secret", 4711, "python train.py")


def test_what_is_published_is_found_until_it_is_withdrawn_or_its_client_is_gone(run_dirs):
    one, two = run_dirs
    assert find_debug_jobs() == []
    publish_debug_job(one.path, job(27001))
    publish_debug_job(two.path, job(9))
    publish_debug_job(two.path, job(27000))
    assert find_debug_jobs() == [job(27000), job(27001)]
    withdraw_debug_job(one.path)
    withdraw_debug_job(one.path)
    assert find_debug_jobs() == [job(27000)]
    os.close(two.lock_fd)  # as when the client and its agent were killed
    assert find_debug_jobs() == []
    os.close(one.lock_fd)


def test_the_file_is_for_its_user_alone_and_a_strange_one_is_passed_over(run_dirs):
    one, two = run_dirs
    publish_debug_job(one.path, job(27000))
    path = os.path.join(one.path, "debug.json")
    assert os.stat(path).st_mode & 0o777 == 0o600
    with open(os.path.join(two.path, "debug.json"), "w") as file:
        file.write('{"port": 1, "of": "another version"}')
    assert find_debug_jobs() == [job(27000)]
    for run_dir in run_dirs:
        os.close(run_dir.lock_fd)
