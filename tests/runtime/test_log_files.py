"""Log files: rotation at line ends, private folders, old runs swept."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch._runtime import log_files
from monarch._runtime.log_files import NUM_OLDER_PARTS, RotatedFile, Stamp


def parts_of(path: str) -> list[bytes]:
    """The older parts, oldest first, and the current one."""
    names = [*(f"{path}.{number}" for number in range(NUM_OLDER_PARTS + 5, 0, -1)), path]
    found = []
    for name in names:
        if os.path.exists(name):
            with open(name, "rb") as file:
                found.append(file.read())
    return found


lines = st.lists(st.integers(0, 40).map(lambda length: b"x" * length + b"\n"), max_size=30)


@settings(max_examples=30)
@given(writes=st.lists(lines.map(b"".join), max_size=8), most=st.integers(5, 60))
def test_parts_end_with_a_line_and_are_the_end_of_what_was_written(tmp_path_factory, writes, most):
    path = str(tmp_path_factory.mktemp("rotated") / "a.log")
    file = RotatedFile(path, most)
    for data in writes:
        file.write(data)
    file.close()
    parts = parts_of(path)
    written = b"".join(writes)
    assert len(parts) <= NUM_OLDER_PARTS + 1
    assert written.endswith(b"".join(parts))
    if len(parts) <= NUM_OLDER_PARTS:
        assert b"".join(parts) == written
    for part in parts:
        assert len(part) <= most or part.count(b"\n") == 1
        assert not part or part.endswith(b"\n")


def test_files_and_folders_are_private(tmp_path):
    base = tmp_path / "logs"
    run = log_files.make_run(str(base))
    RotatedFile(os.path.join(run.path, "a.log"), 100).close()
    modes = [os.stat(path).st_mode & 0o777 for path in (base, run.path, os.path.join(run.path, "a.log"))]
    os.close(run.lock_fd)
    assert modes == [0o700, 0o700, 0o600]


def test_a_folder_that_others_may_write_to_is_refused(tmp_path):
    base = tmp_path / "logs"
    base.mkdir()
    base.chmod(0o777)
    said = r"is not a private directory of this user\n  where: owner \d+, mode 777\n  next: .*log_folder"
    with pytest.raises(PermissionError, match=said):
        log_files.make_run(str(base))


def test_old_runs_are_swept_and_running_ones_stay(tmp_path):
    base = str(tmp_path / "logs")
    kept = [log_files.make_run(base) for _ in range(3)]
    for _ in range(14):
        os.close(log_files.make_run(base).lock_fd)
    runs = log_files.runs(base)
    assert len(runs) <= 3 + 11
    assert {run.path for run in runs if run.running} == {run.path for run in kept}
    for run in kept:
        os.close(run.lock_fd)
    assert not any(run.running for run in log_files.runs(base))


def test_a_stamp_has_milliseconds():
    stamp = Stamp()
    first, second, later = stamp(1000.0), stamp(1000.25), stamp(1001.0)
    assert first[:-4] == second[:-4] != later[:-4]
    assert (first[-4:], second[-4:]) == (".000", ".250")
