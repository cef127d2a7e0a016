"""The table of mounts is read as the kernel writes it, and a mount that cannot be is refused in words."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis.strategies import text

from monarch._mounts import mounting
from monarch._mounts.mounting import Mounted, is_mounted, is_stale, mount, mount_at, mounts, parse_mount, prepare_mount_point, unmount


def as_the_kernel_writes(path):
    return "".join(f"\\{ord(char):03o}" if char in " \t\n\\" else char for char in path)


@given(path=text().map("/".__add__), source=text(min_size=1))
def test_a_line_of_the_table_is_read_whatever_the_path(path, source):
    line = f"36 35 98:0 / {as_the_kernel_writes(path)} rw,noatime master:1 - fuse.monarch {as_the_kernel_writes(source)} rw,user_id=0"
    assert parse_mount(line) == Mounted(path, "fuse.monarch", source, "98:0")


@given(text())
def test_what_is_no_line_of_the_table_is_skipped(line):
    found = parse_mount(line)
    assert found is None or " - " in line


@pytest.mark.skipif(not os.path.exists("/proc/self/mountinfo"), reason="the table of mounts is Linux's")
def test_this_machine_has_a_root_and_a_proc():
    paths = [found.path for found in mounts()]
    assert "/" in paths and is_mounted("/") and mount_at("/proc").kind == "proc"
    assert not is_stale("/proc") and not mounting.set_readahead("/proc", 1 << 20)


def test_an_ordinary_directory_is_no_mount(tmp_path):
    assert not is_mounted(str(tmp_path)) and not is_stale(str(tmp_path)) and mount_at(str(tmp_path)) is None
    assert unmount(str(tmp_path)) == ("not_mounted", "")
    assert unmount(str(tmp_path / "none"), lazy=True) == ("not_mounted", "")


def test_a_relative_mount_point_is_refused():
    with pytest.raises(RuntimeError, match=r"mount_point must be an absolute path, not 'here'\n  next:  use os.path.abspath"):
        mount("here", fsname="x")


def test_a_mount_point_that_is_not_there_or_no_directory_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match=r"fuse mount failed: '.*none' does not exist\n  next:  make the directory first"):
        mount(str(tmp_path / "none"), fsname="x")
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match=r"fuse mount failed: '.*file' is not a directory"):
        mount(str(tmp_path / "file"), fsname="x")


def test_a_mount_point_is_made_with_its_parents(tmp_path):
    path = tmp_path / "a" / "b"
    for _ in range(2):
        prepare_mount_point(str(path))
        assert path.is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        prepare_mount_point(str(tmp_path / "file"))


def test_what_is_missing_for_fuse_is_said_with_a_way_on(monkeypatch, tmp_path):
    monkeypatch.setattr(mounting, "DEVICE", str(tmp_path / "fuse"))
    assert mounting.fuse_problem().startswith(f"there is no {tmp_path}/fuse\n  next:  load the kernel module")
    with pytest.raises(RuntimeError, match="fuse mount failed: there is no"):
        mount(str(tmp_path), fsname="x")
    (tmp_path / "fuse").mkdir()
    assert "fuse can't be opened: Is a directory\n  next:" in mounting.fuse_problem()


def test_options_for_the_helper_survive_commas():
    assert mounting._escaped("a,b\\c") == "a\\,b\\\\c"
