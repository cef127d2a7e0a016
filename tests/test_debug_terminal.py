"""Which job `monarch debug` connects to."""

from __future__ import annotations

import os
import tempfile

import pytest

from monarch._runtime.debug_jobs import DebugJob, publish_debug_job
from monarch._runtime.rundir import make_run_dir, remove_run_dir
from monarch.debug_terminal import connect, debug_job

ONE = DebugJob("127.0.0.1", 27000, "first", 11, "python one.py")
TWO = DebugJob("127.0.0.1", 27001, "second", 22, "python two.py")


@pytest.fixture
def publish(monkeypatch):
    monkeypatch.delenv("MONARCH_DEBUG_SERVER_HOST", raising=False)
    monkeypatch.delenv("MONARCH_DEBUG_SERVER_PORT", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", tempfile.mkdtemp(prefix="dt-"))
    made = []

    def publish(job):
        made.append(make_run_dir())
        publish_debug_job(made[-1].path, job)

    yield publish
    for run_dir in made:
        remove_run_dir(run_dir.path)
        os.close(run_dir.lock_fd)


def test_the_only_job_needs_no_name(publish):
    publish(TWO)
    assert debug_job(None, None, None) == TWO
    assert debug_job(None, None, "mine").token == "mine"


def test_several_jobs_are_listed_and_the_port_chooses(publish, capsys):
    publish(ONE)
    publish(TWO)
    with pytest.raises(ValueError, match="2 of your jobs can be debugged; choose one with --port"):
        debug_job(None, None, None)
    assert "monarch debug --port 27001    # pid 22: python two.py\n" in capsys.readouterr().out
    for host in (None, "localhost", "127.0.0.1", "0.0.0.0"):
        assert debug_job(host, 27001, None) == TWO


def test_a_place_in_the_environment_counts_like_an_option_except_port_0(publish, monkeypatch):
    publish(ONE)
    publish(TWO)
    monkeypatch.setenv("MONARCH_DEBUG_SERVER_PORT", "27001")
    assert debug_job(None, None, None) == TWO
    assert debug_job(None, 27000, None) == ONE
    monkeypatch.setenv("MONARCH_DEBUG_SERVER_PORT", "0")
    with pytest.raises(ValueError, match="choose one"):
        debug_job(None, None, None)


def test_no_secret_goes_to_a_place_that_is_none_of_our_jobs(publish):
    publish(ONE)
    for host, port in (("far.example", 27000), (None, 4000), ("localhost", 4000)):
        job = debug_job(host, port, None)
        assert (job.token, job.port) == ("", port) and job.host in (host, "localhost")


def test_without_a_job_the_usual_place_is_tried(publish):
    assert debug_job(None, None, None)[:3] == ("localhost", 27000, "")
    with pytest.raises(OSError, match=r"no debugger answers: (.|\n)*its first breakpoint\(\)"):
        connect(ONE._replace(host="no.such.host.invalid"))
