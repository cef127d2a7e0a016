"""Copy mode: plain files that follow the source, and nobody else's files harmed."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monarch._mounts.copy_mode import STATE, Copied, copy
from monarch._mounts.store import Store
from mounts.world import DIRECTORY, FILE, LINK, MIB, NOWHERE, World, made


@pytest.fixture
def target(tmp_path) -> Path:
    return tmp_path / "target"


def copied(world: World, target: Path) -> Copied:
    """Scan, deliver, copy."""
    if world.fs is None:
        world.start()
    else:
        world.refresh()
    world.deliver()
    return copy(world.fs.snapshot, world.store, str(target), patience_s=0.0)


def looks(folder: Path) -> dict[str, tuple]:
    """Paths with kind, permissions, time and content."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name, status = str(path.relative_to(folder)), path.lstat()
        if name.split("/")[0] == os.fsdecode(STATE):
            continue
        kind = stat.S_IFMT(status.st_mode)
        mode = stat.S_IMODE(status.st_mode) if kind != stat.S_IFLNK else None
        content = os.readlink(path) if kind == stat.S_IFLNK else path.read_bytes() if kind == stat.S_IFREG else None
        found[name] = kind, mode, status.st_mtime_ns, content
    return found


def inodes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.lstat().st_ino for path in folder.rglob("*")}


@pytest.fixture
def full(world):
    (world.path / "code" / "deep").mkdir(parents=True)
    (world.path / "code" / "a.py").write_bytes(b"a = 1\n")
    (world.path / "code" / "deep" / "b.py").write_bytes(b"b = 1\n")
    (world.path / "big").write_bytes(os.urandom(3 * MIB + 1))
    (world.path / "empty").touch()
    (world.path / "run").write_bytes(b"#!")
    os.chmod(world.path / "run", 0o750)
    (world.path / "link").symlink_to("../no/where")
    (world.path / "vacant").mkdir()
    os.utime(world.path / "code", ns=(10**18, 10**18 + 5))
    os.chmod(world.path / "code" / "deep", 0o555)
    return world


def test_a_copy_equals_the_source(full, target):
    done = copied(full, target)
    assert looks(target) == looks(full.path)
    assert done == Copied(num_written=6, num_bytes=3 * MIB + 15, num_removed=0, num_left=0)
    assert copied(full, target) == Copied(0, 0, 0, 9)


def test_holes_stay_holes(world, target):
    with open(world.path / "sparse", "wb") as file:
        file.truncate(300 * MIB + 5)
        file.seek(100 * MIB)
        file.write(b"data")
    world.start()
    span = world.fs.snapshot.span(world.fs.snapshot.find("/sparse"))
    world.store.put_zeros(span.offset, 100 * MIB)
    world.store.put_zeros(span.offset + 101 * MIB, 199 * MIB + 5)
    world.deliver()
    copied(world, target)
    status = (target / "sparse").stat()
    assert status.st_size == 300 * MIB + 5 and status.st_blocks * 512 <= 2 * MIB
    with open(target / "sparse", "rb") as file:
        file.seek(100 * MIB - 1)
        assert file.read(6) == b"\0data\0"


def test_a_refresh_touches_only_what_changed(full, target):
    copied(full, target)
    before = inodes(target)
    (full.path / "code" / "a.py").write_bytes(b"a = 2\n")
    (full.path / "new").write_bytes(b"new")
    os.chmod(full.path / "code" / "deep", 0o755)
    (full.path / "code" / "deep" / "b.py").unlink()
    (full.path / "link").unlink()
    (full.path / "link").symlink_to("elsewhere")
    done = copied(full, target)
    assert looks(target) == looks(full.path)
    assert (done.num_written, done.num_removed) == (3, 1)
    after = inodes(target)
    kept = {"code", "code/deep", "big", "empty", "run", "vacant"}
    assert {path for path in kept if before[path] == after[path]} == kept


def test_the_same_size_and_time_do_not_hide_a_change(full, target):
    copied(full, target)
    path = full.path / "code" / "a.py"
    status = path.stat()
    path.write_bytes(b"a = 9\n")
    os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))
    copied(full, target)
    assert (target / "code" / "a.py").read_bytes() == b"a = 9\n" and looks(target) == looks(full.path)


def test_only_the_permissions_of_a_file_change(full, target):
    copied(full, target)
    inode = (target / "code" / "a.py").stat().st_ino
    os.chmod(full.path / "code" / "a.py", 0o600)
    copied(full, target)
    assert looks(target) == looks(full.path)
    assert copied(full, target).num_written == 0 and inode


def test_kinds_change(full, target):
    copied(full, target)
    (full.path / "code" / "a.py").unlink()
    (full.path / "code" / "a.py").mkdir()
    (full.path / "code" / "a.py" / "x").write_bytes(b"x")
    os.chmod(full.path / "code" / "deep", 0o755)
    (full.path / "code" / "deep" / "b.py").unlink()
    (full.path / "code" / "deep").rmdir()
    (full.path / "code" / "deep").symlink_to("a.py")
    (full.path / "vacant").rmdir()
    (full.path / "vacant").write_bytes(b"full")
    copied(full, target)
    assert looks(target) == looks(full.path)


@pytest.mark.parametrize("leads_to", ["x" * 3000, "link", "../elsewhere"], ids=["nowhere", "itself", "a directory"])
def test_a_link_becomes_a_directory_and_a_link_again(full, target, tmp_path, leads_to):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "in").write_bytes(b"not ours")
    link = full.path / "link"
    for _ in range(2):
        link.unlink()
        link.symlink_to(leads_to)
        copied(full, target)
        assert looks(target) == looks(full.path)
        link.unlink()
        (link / "deep").mkdir(parents=True)
        (link / "in").write_bytes(b"ours")
        (link / "deep" / "in").write_bytes(b"ours")
        copied(full, target)
        assert looks(target) == looks(full.path)
        shutil.rmtree(link)
        link.touch()
    assert (tmp_path / "elsewhere" / "in").read_bytes() == b"not ours"


def test_other_bytes_with_the_same_times_are_written(target):
    snapshots = [made((0, b"file", FILE, 3, offset), total=offset + 3) for offset in (0, 64 * MIB)]
    store, before = Store(), None
    for snapshot, data in zip(snapshots, (b"old", b"new"), strict=True):
        store.extend(snapshot)
        store.put(snapshot.offsets[1], memoryview(data))
        copy(snapshot, store, str(target), before=before, patience_s=0.0)
        assert (target / "file").read_bytes() == data
        before = snapshot
    assert copy(snapshot, store, str(target), before=before, patience_s=0.0).num_written == 0
    store.close()


def test_a_reader_sees_the_old_file_or_the_new_one_whole(world, target):
    versions = [bytes([number]) * 300_000 for number in range(30)]
    (world.path / "a").write_bytes(versions[0])
    copied(world, target)
    torn, stop = [], threading.Event()

    def read() -> None:
        while not stop.is_set():
            data = (target / "a").read_bytes()
            if data not in versions:
                torn.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    for version in versions[1:]:
        (world.path / "a").write_bytes(version)
        copied(world, target)
    stop.set()
    reader.join()
    assert not torn and (target / "a").read_bytes() == versions[-1]


def test_files_of_others_are_left_alone(full, target):
    copied(full, target)
    (target / "mine").write_bytes(b"mine")
    (target / "code" / "mine").write_bytes(b"mine")
    (full.path / "code" / "a.py").unlink()
    os.chmod(full.path / "code" / "deep", 0o755)
    (full.path / "code" / "deep" / "b.py").unlink()
    (full.path / "code" / "deep").rmdir()
    (full.path / "code").rmdir()
    copied(full, target)
    assert (target / "mine").read_bytes() == (target / "code" / "mine").read_bytes() == b"mine"
    assert os.listdir(target / "code") == ["mine"]


def test_a_file_of_ours_that_somebody_changed_is_theirs_when_the_source_has_it_no_more(full, target):
    copied(full, target)
    (target / "empty").write_bytes(b"not empty")
    (full.path / "empty").unlink()
    copied(full, target)
    assert (target / "empty").read_bytes() == b"not empty"


def test_a_file_of_ours_that_somebody_changed_or_removed_is_mended(full, target):
    copied(full, target)
    (target / "empty").write_bytes(b"not empty")
    (target / "run").unlink()
    (target / "link").unlink()
    assert copied(full, target).num_written == 3
    assert looks(target) == looks(full.path)


def test_a_target_that_is_neither_empty_nor_ours_is_refused(full, target):
    target.mkdir()
    (target / "mine").write_bytes(b"mine")
    with pytest.raises(FileExistsError, match=r"target' is not empty and no copy of ours\n  next:  choose an empty directory"):
        copied(full, target)
    assert os.listdir(target) == ["mine"]


@pytest.mark.parametrize("way", ["file", "link to a folder", "folder"])
def test_what_is_in_the_way_is_named_before_anything_is_written(full, target, way, tmp_path):
    copied(full, target)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if way == "file":
        (target / "late").write_bytes(b"mine")
    elif way == "link to a folder":
        (target / "late").symlink_to(elsewhere)
    else:
        (target / "late").mkdir()
    before = looks(target)
    if way == "folder":
        (full.path / "late").write_bytes(b"late")
    else:
        (full.path / "late").mkdir()
        (full.path / "late" / "x").write_bytes(b"x")
    (full.path / "big").write_bytes(b"other")
    said = r"1 paths are in the way .*: 'late'\n  where: .*target\n  next:  move them away.*nothing has been changed"
    with pytest.raises(FileExistsError, match=said):
        copied(full, target)
    assert looks(target) == before and not list(elsewhere.iterdir())


def test_a_folder_of_ours_that_became_a_link_is_not_written_through(full, target, tmp_path):
    copied(full, target)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "a.py").write_bytes(b"theirs")
    os.rename(target / "code", tmp_path / "away")
    (target / "code").symlink_to(elsewhere)
    (full.path / "code" / "a.py").write_bytes(b"a = 3\n")
    with pytest.raises(FileExistsError, match=r"in the way .*'code'"):
        copied(full, target)
    (full.path / "code" / "a.py").unlink()
    with pytest.raises(FileExistsError, match=r"in the way .*'code'"):
        copied(full, target)
    assert (elsewhere / "a.py").read_bytes() == b"theirs"


def test_a_folder_of_others_is_used_and_stays_theirs(full, target):
    copied(full, target)
    (target / "late").mkdir(mode=0o700)
    (full.path / "late").mkdir(mode=0o755)
    (full.path / "late" / "x").write_bytes(b"x")
    copied(full, target)
    assert (target / "late" / "x").read_bytes() == b"x" and stat.S_IMODE((target / "late").stat().st_mode) == 0o700
    (full.path / "late" / "x").unlink()
    (full.path / "late").rmdir()
    copied(full, target)
    assert os.listdir(target / "late") == []


@pytest.mark.parametrize("name", [b"..", b".", b"a/b", b"/etc/x", b"", b"a\0b"])
def test_names_that_lead_out_are_refused(target, name):
    store = Store()
    with pytest.raises(ValueError, match="would leave the directory that is copied to"):
        copy(made((0, name, FILE, 0, 0)), store, str(target))
    assert not target.exists()


def test_nothing_is_written_through_a_link_of_the_snapshot(target, tmp_path):
    snapshot = made((0, b"link", LINK, 6, NOWHERE), (1, b"x", FILE, 0, 0))
    copy(snapshot, Store(), str(target))
    assert os.readlink(target / "link") == "target" and sorted(os.listdir(target)) == sorted(["link", os.fsdecode(STATE)])


def test_set_user_id_bits_and_devices_are_not_copied(target):
    snapshot = made((0, b"pipe", stat.S_IFIFO | 0o644, 0, 0), (0, b"root", FILE | 0o4755, 0, 0), (0, b"dir", DIRECTORY, 0, NOWHERE))
    store = Store()
    copy(snapshot, store, str(target))
    assert sorted(looks(target)) == ["dir", "root"] and stat.S_IMODE((target / "root").stat().st_mode) == 0o755


def test_a_state_folder_in_the_source_is_left_out(full, target, tmp_path):
    copied(full, target)
    second = World(target)
    try:
        copied(second, tmp_path / "again")
        assert looks(tmp_path / "again") == looks(full.path)
    finally:
        second.close()


def test_bytes_that_do_not_come_end_the_wait_and_what_is_there_stays(full, target):
    copied(full, target)
    (full.path / "big").write_bytes(b"b" * 2 * MIB)
    full.refresh()
    before = looks(target)
    with pytest.raises(TimeoutError, match=r"'big': its bytes did not arrive within 0\.01 s"):
        copy(full.fs.snapshot, full.store, str(target), patience_s=0.01)
    assert looks(target) == before
    full.deliver()
    copy(full.fs.snapshot, full.store, str(target))
    assert looks(target) == looks(full.path)


def test_a_dead_source_is_named(full, target):
    full.start()
    full.store.disconnect(errno.EHOSTUNREACH)
    with pytest.raises(OSError, match="No route to host\n  next:  connect the source"):
        copy(full.fs.snapshot, full.store, str(target))


def test_bytes_that_arrive_while_it_copies_are_awaited(full, target):
    full.start()
    asked = threading.Event()
    full.store.connect(lambda offset, length: asked.set())
    helper = threading.Thread(target=lambda: asked.wait(10) and full.deliver())
    helper.start()
    copy(full.fs.snapshot, full.store, str(target), patience_s=10)
    helper.join()
    assert looks(target) == looks(full.path)


def test_files_that_changed_meanwhile_are_named_after_all_others_were_copied(full, target):
    full.start()
    (full.path / "code" / "a.py").write_bytes(b"changed")
    full.deliver()
    with pytest.raises(OSError, match=r"1 files changed at the source while they were copied: 'code/a\.py'"):
        copy(full.fs.snapshot, full.store, str(target))
    assert (target / "big").exists() and not (target / "code" / "a.py").exists()
    copied(full, target)
    assert looks(target) == looks(full.path)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("at", range(12))
def test_a_copy_that_was_killed_is_still_ours(full, target, at, monkeypatch):
    calls = {"left": at}

    def counted(function):
        def call(*arguments, **options):
            if not calls["left"]:
                raise Killed
            calls["left"] -= 1
            return function(*arguments, **options)

        return call

    copied(full, target)
    for path in ("code/a.py", "run", "big"):
        (full.path / path).write_bytes(b"second")
    (full.path / "vacant").rmdir()
    (full.path / "vacant").write_bytes(b"a file now")
    (full.path / "empty").unlink()
    (full.path / "more").mkdir()
    (full.path / "more" / "x").write_bytes(b"x")
    with monkeypatch.context() as patched:
        for name in ("rename", "mkdir", "unlink", "rmdir"):
            patched.setattr(os, name, counted(getattr(os, name)))
        with pytest.raises(Killed):
            copied(full, target)
    copied(full, target)
    assert looks(target) == looks(full.path)
    assert sorted(os.listdir(target / os.fsdecode(STATE) / "part")) == []


def test_two_copies_at_once_are_refused(full, target):
    copied(full, target)
    fd = os.open(target / os.fsdecode(STATE), os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(BlockingIOError, match=r"another copy into .* is going on\n  next:  wait for it"):
        copied(full, target)
    os.close(fd)
    copied(full, target)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_copy_of_another_user_is_refused(full, target):
    copied(full, target)
    os.chown(target / os.fsdecode(STATE), 12345, 12345)
    with pytest.raises(PermissionError, match=r"cannot be written\n  next:  choose a directory of this user\n.*belongs to another user"):
        copied(full, target)


def test_a_damaged_manifest_is_an_error(full, target):
    copied(full, target)
    (target / os.fsdecode(STATE) / "manifest").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="nobody knows which files are ours\n  next:  remove the directory"):
        copied(full, target)


def test_a_manifest_that_leads_out_is_not_followed(full, target, tmp_path):
    copied(full, target)
    victim = tmp_path / "victim"
    victim.write_bytes(b"")
    status = victim.stat()
    path = target / os.fsdecode(STATE) / "manifest"
    entries = msgspec.msgpack.decode(path.read_bytes())
    entries.append([b"/../victim", stat.S_IFREG, 0, 0, 0, b"", status.st_ino, status.st_ctime_ns])
    path.write_bytes(msgspec.msgpack.encode(entries))
    copied(full, target)
    assert victim.exists()


def test_an_empty_path_is_refused(full):
    with pytest.raises(ValueError, match="path to copy to is empty"):
        copied(full, "")


def test_a_target_below_a_file_is_an_error(full, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        copied(full, tmp_path / "file" / "target")


edits = st.lists(
    st.tuples(st.sampled_from(["a", "b", "d/a", "d/e/f"]), st.sampled_from(["file", "other", "link", "folder", "nothing"])), max_size=6
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rounds=st.lists(edits, min_size=1, max_size=4))
def test_after_any_edits_a_copy_equals_the_source(tmp_path_factory, rounds):
    base = tmp_path_factory.mktemp("copies")
    world = World(base / "source")
    for edits in rounds:
        for path, kind in edits:
            place = world.path / path
            for parent in reversed(place.relative_to(world.path).parents):
                if not (world.path / parent).is_dir() or (world.path / parent).is_symlink():
                    _cleared(world.path / parent).mkdir()
            _cleared(place)
            if kind in ("file", "other"):
                place.write_bytes(kind.encode())
            elif kind == "link":
                place.symlink_to("a")
            elif kind == "folder":
                place.mkdir()
        copied(world, base / "target")
        assert looks(base / "target") == looks(world.path)
    world.close()


def _cleared(place: Path) -> Path:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
    return place
