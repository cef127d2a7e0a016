"""Run directories: private, one for each client, and swept away only when nobody holds them."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading

import pytest

from monarch._runtime.rundir import make_run_dir, remove_run_dir, sweep


@pytest.fixture(autouse=True)
def base(monkeypatch):
    """A temporary folder of the test's own, with a short path."""
    path = tempfile.mkdtemp(prefix="d")
    monkeypatch.setattr(tempfile, "tempdir", path)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def make():
    """Makes run directories, which are unlocked afterwards."""
    made = []

    def make_one():
        made.append(make_run_dir())
        return made[-1]

    yield make_one
    for run in made:
        os.close(run.lock_fd)


def listing(base):
    return sorted(os.listdir(os.path.join(base, f"monarch-{os.geteuid()}")))


def abandoned():
    """A run directory whose processes were all killed."""
    run = make_run_dir()
    os.close(run.lock_fd)
    return run.path


def test_a_run_directory_is_private_and_locked(base, make):
    run = make()
    assert os.path.dirname(run.path) == os.path.join(base, f"monarch-{os.geteuid()}")
    assert stat.S_IMODE(os.stat(run.path).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(os.path.dirname(run.path)).st_mode) == 0o700
    assert not os.get_inheritable(run.lock_fd)
    with open(os.path.join(run.path, "lock")) as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_its_sockets_have_room_in_a_path(make):
    assert len(make().path) + 40 < 107


def test_a_long_temporary_folder_is_not_used(base, monkeypatch, make):
    long = os.path.join(base, "x" * 80)
    os.mkdir(long)
    monkeypatch.setattr(tempfile, "tempdir", long)
    run = make()
    assert run.path.startswith(f"/tmp/monarch-{os.geteuid()}/")
    remove_run_dir(run.path)


def test_directories_of_killed_processes_are_swept_away(base, make):
    left = [abandoned() for _ in range(2)]  # the second sweeps the first
    run = make()
    assert not any(map(os.path.exists, left))
    assert listing(base) == [os.path.basename(run.path)]


def test_a_directory_in_use_stays(base, make):
    runs = [make() for _ in range(3)]
    sweep(os.path.dirname(runs[0].path))
    assert listing(base) == sorted(os.path.basename(run.path) for run in runs)


def test_a_directory_stays_as_long_as_one_process_holds_the_lock(base):
    run = make_run_dir()
    child = subprocess.Popen(
        [sys.executable, "-c", "print('up', flush=True); input()"],
        pass_fds=[run.lock_fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout.readline() == "up\n"
        os.close(run.lock_fd)  # its maker is gone
        sweep(os.path.dirname(run.path))
        assert os.path.exists(run.path)
        child.communicate("\n")
    sweep(os.path.dirname(run.path))
    assert not os.path.exists(run.path)


def test_what_is_no_run_directory_stays(base, make):
    parent = os.path.dirname(make().path)
    os.mkdir(os.path.join(parent, "being made"))
    with open(os.path.join(parent, "file"), "w"):
        pass
    sweep(parent)
    assert {"being made", "file"} <= set(listing(base))


def test_removing_is_harmless_when_it_is_gone(make):
    run = make()
    with open(os.path.join(run.path, "socket"), "w"):
        pass
    for _ in range(2):
        remove_run_dir(run.path)
        assert not os.path.exists(run.path)


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o710])
def test_a_parent_that_others_may_enter_is_refused(base, mode):
    parent = os.path.join(base, f"monarch-{os.geteuid()}")
    os.mkdir(parent)
    os.chmod(parent, mode)
    with pytest.raises(PermissionError, match=rf"(?s)monarch-\d+ is not a private directory.*where: .*mode {mode:o}.*next:  .*TMPDIR"):
        make_run_dir()


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_parent_that_is_no_directory_is_refused(base, tmp_path, kind):
    parent = os.path.join(base, f"monarch-{os.geteuid()}")
    if kind == "link":
        os.chmod(tmp_path, 0o700)
        os.symlink(tmp_path, parent)
    else:
        os.close(os.open(parent, os.O_CREAT, 0o600))
    with pytest.raises(PermissionError, match="is not a private directory of this user"):
        make_run_dir()
    assert list(tmp_path.iterdir()) == []


def test_clients_that_start_at_once_do_not_sweep_each_other(base):
    runs, start = [], threading.Barrier(3)

    def run():
        start.wait()
        for _ in range(40):
            runs.append(make_run_dir())

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    missing = [run.path for run in runs if not os.path.exists(os.path.join(run.path, "lock"))]
    for run in runs:
        os.close(run.lock_fd)
    assert len(runs) == 120
    assert not missing
