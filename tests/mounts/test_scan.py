"""A scan and the next look: what is told to be the same is the same, and what `patched` makes is what `walked` sees."""

from __future__ import annotations

import os
import stat

import pytest

from monarch._mounts.scan import differing, patched, walked

NEVER = lambda ctime_ns, size: False  # noqa: E731
ALWAYS = lambda ctime_ns, size: True  # noqa: E731
FAR = 1 << 62


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "code" / "deep").mkdir(parents=True)
    (tmp_path / "code" / "a.py").write_bytes(b"a = 1\n")
    (tmp_path / "code" / "deep" / "b.py").write_bytes(b"b = 1\n")
    (tmp_path / "link").symlink_to("code/a.py")
    (tmp_path / ".monarch").mkdir()
    with open(os.fsencode(tmp_path) + b"/odd \xff\n", "wb") as file:
        file.write(b"odd")
    wait_tick(tmp_path.parent / f"{tmp_path.name}-clock")
    return tmp_path


def wait_tick(probe):
    """Until the clock that files are stamped by has moved on: what changes from now on has other times than what is there."""
    probe.touch()
    before = os.stat(probe).st_ctime_ns
    while os.stat(probe).st_ctime_ns == before:
        os.utime(probe)


def look(scan, racy=NEVER):
    """Paths that differ; None: a scan is needed."""
    found = differing(scan, racy, 0 if racy is ALWAYS else FAR)
    return None if found is None else {scan.columns.names[row] for row in found}


def walk(folder):
    return walked(str(folder), os.stat(folder))


def table(scan):
    """All that a scan knows, without the order of its kinds."""
    columns = scan.columns
    kinds = [columns.kinds[at] for at in columns.kind_of]
    return columns.names, columns.parents, kinds, columns.of_each()[1:], columns.targets, scan.inodes, scan.marks, scan.folders


def rewritten_with_the_same_size_and_time(folder):
    path = folder / "code" / "a.py"
    before = os.stat(path)
    path.write_bytes(b"a = 2\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return {b"a.py"}


def replaced_by_rename(folder):
    (folder / "code" / "new").write_bytes(b"a = 2\n")
    os.replace(folder / "code" / "new", folder / "code" / "a.py")
    return {b"a.py", b"code"}


def mode_changed(folder):
    (folder / "code" / "a.py").chmod(0o700)
    return {b"a.py"}


def linked_from_outside(folder):
    os.link(folder / "code" / "a.py", folder.parent / f"{folder.name}-outside")
    return {b"a.py"}


def state_of_a_job_appeared(folder):
    (folder / "code" / ".monarch").mkdir()
    return {b"code"}


def came_and_went(folder):
    (folder / "code" / "c.py").write_bytes(b"")
    (folder / "code" / "c.py").unlink()
    return {b"code"}


def odd_name_written(folder):
    with open(os.fsencode(folder) + b"/odd \xff\n", "ab") as file:
        file.write(b"more")
    return {b"odd \xff\n"}


SAME_NAMES = [
    rewritten_with_the_same_size_and_time,
    replaced_by_rename,
    mode_changed,
    linked_from_outside,
    state_of_a_job_appeared,
    came_and_went,
    odd_name_written,
]


def test_a_covered_directory_is_empty_whatever_is_in_it_and_stays_so(folder, caplog):
    (folder / "code" / "mnt").mkdir()
    (folder / "code" / "mnt" / "below").touch()
    (folder / "mnt").mkdir()
    (folder / "mnt" / "seen").touch()
    scan = walked(str(folder), os.stat(folder), {"/code/mnt", "/none"})
    assert b"below" not in scan.columns.names and {b"mnt", b"seen"} <= set(scan.columns.names) and scan.is_whole and not caplog.text
    (folder / "code" / "mnt" / "more").touch()
    assert look(scan) is None
    again = walked(str(folder), os.stat(folder), {"/code/mnt", "/none"})
    assert b"more" not in again.columns.names and look(again) == set()


def test_nothing_changed_differs_in_nothing(folder):
    scan = walk(folder)
    assert look(scan) == set() and table(scan) == table(walk(folder))


@pytest.mark.parametrize("change", SAME_NAMES, ids=lambda change: change.__name__)
def test_what_changed_under_the_same_names_is_found_and_patched(folder, change):
    scan = walk(folder)
    expected = change(folder)
    assert look(scan) == expected
    again = patched(scan, differing(scan, NEVER, FAR))
    assert table(again) == table(walk(folder)) and look(again) == set()
    assert table(scan) != table(again), "the scan before stays what it was"


def added(folder):
    (folder / "code" / "deep" / "new").write_bytes(b"")


def removed(folder):
    (folder / "code" / "a.py").unlink()


def renamed(folder):
    (folder / "code" / "a.py").rename(folder / "code" / "c.py")


def link_points_elsewhere(folder):
    (folder / "link").unlink()
    (folder / "link").symlink_to("code")


def file_became_a_folder(folder):
    (folder / "code" / "a.py").unlink()
    (folder / "code" / "a.py").mkdir()


def folder_swapped(folder):
    (folder / "other" / "deep").mkdir(parents=True)
    (folder / "other" / "a.py").write_bytes(b"a = 1\n")
    (folder / "code").rename(folder.parent / f"{folder.name}-code")
    (folder / "other").rename(folder / "code")


def state_of_a_job_became_a_file(folder):
    (folder / ".monarch").rmdir()
    (folder / ".monarch").write_bytes(b"")


def gone(folder):
    folder.rename(folder.with_name(f"{folder.name}-gone"))


@pytest.mark.parametrize(
    "change",
    [added, removed, renamed, link_points_elsewhere, file_became_a_folder, folder_swapped, state_of_a_job_became_a_file, gone],
    ids=lambda change: change.__name__,
)
def test_other_names_and_kinds_need_a_scan(folder, change):
    scan = walk(folder)
    change(folder)
    assert look(scan) is None


def test_what_could_not_be_examined_is_looked_for_each_time(folder, monkeypatch):
    def refuse(path):
        raise PermissionError(path)

    with monkeypatch.context() as broken:
        broken.setattr(os, "readlink", refuse)
        scan = walk(folder)
    assert b"link" not in scan.columns.names
    assert look(scan) is None


def test_a_change_that_may_have_been_the_first_of_two_is_told_of(folder):
    scan = walk(folder)
    assert look(scan, ALWAYS) is None, "links are never patched"
    (folder / "link").unlink()
    scan = walk(folder)
    assert look(scan, ALWAYS) == set(scan.columns.names)
    assert look(scan, lambda ctime_ns, size: ctime_ns == os.stat(folder / "code" / "a.py").st_ctime_ns) == set(), "older than `since_ns`"


def test_kinds_are_those_of_the_paths(folder):
    scan = walk(folder)
    modes = {name: scan.columns.kinds[at].mode for name, at in zip(scan.columns.names, scan.columns.kind_of, strict=True)}
    assert stat.S_ISLNK(modes[b"link"]) and stat.S_ISDIR(modes[b"deep"]) and stat.S_ISREG(modes[b"a.py"])
