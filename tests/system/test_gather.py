"""Folders of workers under a real mount: what readers see, and how soon, and what is left when a worker, a client, or the mount ends."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

import monarch.actor
from monarch._mounts.filesystem import LIVE
from monarch._mounts.fuse_server import FuseServer
from monarch._mounts.mounting import fuse_problem, is_mounted, is_stale, mount, unmount
from monarch.actor import this_host
from monarch.gather_mount import gather_mount
from monarch.gather_mount.gather_mount import GatherMount
from monarch.testing import leaks
from mounts.trees import Tree
from system.script import start_script
from system.waiting import wait_until

pytestmark = pytest.mark.skipif(bool(fuse_problem()), reason=fuse_problem() or "FUSE is here")
SEEN_S = 0.5
"""A change is seen within about 0.1 s on an idle machine; tests run on busy ones."""


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "root"
    (root / "sub" / "deep").mkdir(parents=True)
    (root / "file").write_bytes(b"content\n")
    (root / "sub" / "deep" / "inner").write_bytes(b"inner")
    return root


@pytest.fixture
def point(tmp_path):
    return tmp_path / "mnt"


@pytest.fixture
def mounted(root, point):
    with gather_mount(this_host(), str(root), str(point)) as mount:
        yield mount
    assert not os.path.ismount(point)


def run(*command, timeout=15):
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def seen(condition):
    wait_until(condition, SEEN_S)


def test_a_folder_is_seen_as_it_is(root, point, mounted):
    (root / "link").symlink_to("sub")
    (root / "script").write_text("#!/bin/sh\necho hello\n")
    (root / "script").chmod(0o755)
    seen((point / "script").exists)
    assert sorted(os.listdir(point)) == ["file", "link", "script", "sub"]
    assert (point / "file").read_bytes() == b"content\n" and (point / "link" / "deep" / "inner").read_bytes() == b"inner"
    assert os.readlink(point / "link") == "sub"
    assert run(str(point / "script")).stdout == "hello\n"
    assert run("find", str(point), "-type", "f").stdout.count("\n") == 3
    found, really = os.stat(point / "file"), os.stat(root / "file")
    assert (found.st_size, found.st_mtime_ns, found.st_uid) == (really.st_size, really.st_mtime_ns, os.getuid())
    assert not found.st_mode & 0o222 and isinstance(mounted, GatherMount)


@pytest.mark.parametrize(
    "write",
    [
        lambda point: (point / "file").write_bytes(b""), lambda point: (point / "new").write_bytes(b""),
        lambda point: os.unlink(point / "file"), lambda point: os.mkdir(point / "new"), lambda point: os.chmod(point / "file", 0),
        lambda point: os.rename(point / "file", point / "new"),
    ],
)  # fmt: skip
def test_nothing_can_be_written(point, mounted, write):
    with pytest.raises(OSError) as caught:
        write(point)
    assert caught.value.errno in (errno.EROFS, errno.EACCES)


CHANGES = {
    "append": (lambda root: (root / "file").open("ab").write(b"more"), lambda point: (point / "file").read_bytes() == b"content\nmore"),
    "rewrite": (lambda root: (root / "file").write_bytes(b"CONTENT\n"), lambda point: (point / "file").read_bytes() == b"CONTENT\n"),
    "shorter": (lambda root: (root / "file").write_bytes(b"c"), lambda point: (point / "file").read_bytes() == b"c"),
    "truncate": (lambda root: os.truncate(root / "file", 0), lambda point: (point / "file").read_bytes() == b""),
    "replace": (
        lambda root: ((root / "new").write_bytes(b"another"), (root / "new").rename(root / "file")),
        lambda point: (point / "file").read_bytes() == b"another",
    ),
    "delete": (lambda root: (root / "file").unlink(), lambda point: not (point / "file").exists()),
    "create": (lambda root: (root / "new").touch(), lambda point: (point / "new").exists() and "new" in os.listdir(point)),
    "chmod": (lambda root: (root / "file").chmod(0o700), lambda point: os.stat(point / "file").st_mode & 0o777 == 0o500),
    "move": (
        lambda root: (root / "sub").rename(root / "elsewhere"),
        lambda point: not (point / "sub").exists() and (point / "elsewhere" / "deep" / "inner").read_bytes() == b"inner",
    ),
    "deep": (
        lambda root: (root / "sub" / "deep" / "inner").write_bytes(b"changed"),
        lambda point: (point / "sub" / "deep" / "inner").read_bytes() == b"changed",
    ),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_a_change_is_seen_soon(root, point, mounted, change):
    run("sh", "-c", f"ls -lR {point}; cat {point}/file {point}/sub/deep/inner; ls {point}/new")
    make, is_seen = CHANGES[change]
    make(root)
    seen(lambda: is_seen(point))


def test_a_file_that_is_open_grows(root, point, mounted):
    with open(point / "file", "rb") as reader, open(root / "file", "ab", buffering=0) as writer:
        assert reader.read() == b"content\n"
        for index in range(5):
            writer.write(b"line %d\n" % index)
            seen(lambda index=index: reader.readline() == b"line %d\n" % index)


def test_a_big_file_is_read_in_bounded_memory_and_its_end_at_once(root, point):
    size = 200 << 20
    with open(root / "big", "wb") as file:
        for offset in range(0, size, 1 << 20):
            file.seek(offset)
            file.write(offset.to_bytes(8, "big"))
        file.truncate(size)
    with gather_mount(this_host(), str(root), str(point), cache_bytes=32 << 20) as mounted:
        assert run("tail", "-c", "10", f"{point}/big").stdout == "\0" * 10
        assert mounted.statistics().fetched_bytes <= 8 << 20
        assert run("cmp", f"{root}/big", f"{point}/big").returncode == 0
        statistics = mounted.statistics()
        assert statistics.cached_bytes <= 32 << 20 and statistics.fetched_bytes <= size * 1.1


def test_an_append_moves_what_is_new(root, point, mounted):
    (root / "file").write_bytes(os.urandom(6 << 20))
    seen(lambda: (point / "file").stat().st_size == 6 << 20)
    assert (point / "file").read_bytes() == (root / "file").read_bytes()
    before = mounted.statistics().fetched_bytes
    with open(root / "file", "ab") as file:
        file.write(b"x" * 1000)
    seen(lambda: (point / "file").read_bytes() == (root / "file").read_bytes())
    assert mounted.statistics().fetched_bytes - before < 10_000


def test_ten_thousand_entries_are_listed_with_one_question(root, point, mounted):
    for index in range(10_000):
        (root / "sub" / f"f{index}").touch()
    began = time.monotonic()
    assert run("ls", "-l", f"{point}/sub").stdout.count("\n") == 10_002
    assert time.monotonic() - began < 5  # 0.2 s on an idle machine
    assert mounted.statistics().num_questions < 50


def test_names_are_any_bytes(root, point, mounted):
    names = [b"\xff\xfe", b"new\nline", b"sp ace", b"\\ \x01"]
    for name in names:
        Path(os.fsdecode(os.fsencode(root) + b"/" + name)).write_bytes(name)
    seen(lambda: set(names) <= set(os.listdir(os.fsencode(point))))
    for name in names:
        assert Path(os.fsdecode(os.fsencode(point) + b"/" + name)).read_bytes() == name


def test_a_file_that_is_replaced_all_the_time_is_always_whole(root, point, mounted):
    size = 6 << 20
    stop = threading.Event()

    def replace():
        version = 0
        while not stop.is_set():
            version = (version + 1) % 256
            (root / "new").write_bytes(bytes([version]) * size)
            (root / "new").rename(root / "file")

    replace_once = threading.Thread(target=replace)
    replace_once.start()
    try:
        seen(lambda: (point / "file").stat().st_size == size)
        deadline, whole = time.monotonic() + 4, 0
        while time.monotonic() < deadline:
            try:
                content = (point / "file").read_bytes()
            except OSError as exc:
                assert exc.errno == errno.EIO
                continue
            assert len(content) == size and len(set(content[:: 1 << 12])) == 1
            whole += 1
        assert whole > 3
    finally:
        stop.set()
        replace_once.join(10)


def test_a_file_that_is_appended_to_all_the_time_is_read(root, point, mounted):
    stop = threading.Event()

    def write():
        dice = random.Random(1)
        with open(root / "log", "ab", buffering=0) as log:
            number = 0
            while not stop.wait(0.0005):
                log.write(b"%08d %s\n" % (number, b"x" * dice.randint(0, 2000)))
                number += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen((point / "log").exists)
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            lines = (point / "log").read_bytes().split(b"\n")[:-1]
            assert [int(line[:8]) for line in lines] == list(range(len(lines)))
    finally:
        stop.set()
        writer.join(10)


def test_where_nobody_tells_of_changes_they_are_looked_for(tmp_path, point):
    far = tmp_path / "far"
    far.mkdir()
    tree = Tree({"file": b"content", "sub": {"inner": b"inner"}}, LIVE)
    server = FuseServer(mount(str(far), fsname="test"), tree)
    server.start()
    try:
        with gather_mount(this_host(), str(far), str(point)):
            assert (point / "file").read_bytes() == b"content" and sorted(os.listdir(point)) == ["file", "sub"]
            tree.change("/file", b"longer content")
            seen(lambda: (point / "file").read_bytes() == b"longer content")
            tree.add("/sub/new", b"new")
            seen(lambda: (point / "sub" / "new").read_bytes() == b"new" and sorted(os.listdir(point / "sub")) == ["inner", "new"])
            tree.remove("/file")
            seen(lambda: not (point / "file").exists())
    finally:
        unmount(str(far), lazy=True)
        assert server.stop()


def test_a_special_file_is_seen_as_what_it_is(root, point, mounted):
    os.mkfifo(root / "fifo")
    seen(lambda: (point / "fifo").is_fifo())
    assert run("grep", "-rs", "inner", str(point)).stdout == f"{point}/sub/deep/inner:inner\n"


def test_two_mounts_live_side_by_side(tmp_path, root):
    with gather_mount(this_host(), str(root), str(tmp_path / "one")), gather_mount(this_host(), str(root / "sub"), str(tmp_path / "two")):
        assert (tmp_path / "one" / "sub" / "deep" / "inner").read_bytes() == (tmp_path / "two" / "deep" / "inner").read_bytes()


# ------------------------------------------------------------------------------------------------------------ refusals


def test_a_mount_is_not_put_over_another(root, tmp_path, point, mounted):
    with pytest.raises(RuntimeError, match=r"is mounted at .* already"):
        gather_mount(this_host(), str(root), str(point))
    assert (point / "file").exists()


@pytest.mark.parametrize(("remote", "local"), [("", "x"), ("relative", "x"), ("/tmp", "")])
def test_paths_are_checked(remote, local):
    with pytest.raises(ValueError, match="absolute path"):
        gather_mount(this_host(), remote, local)


def test_what_can_not_be_gathered_is_refused_and_leaves_nothing(root, tmp_path):
    before = leaks.children(os.getpid())
    with pytest.raises(RuntimeError, match="can't be gathered: Not a directory"):
        gather_mount(this_host(), str(root / "file"), str(tmp_path / "mnt"))
    for local in (root / "sub" / "mnt", tmp_path):
        with pytest.raises(RuntimeError, match="one of them is in the other"):
            gather_mount(this_host(), str(root), str(local))
    with pytest.raises(RuntimeError, match=r"file' is no directory(?s:.*)another mount point"):
        gather_mount(this_host(), str(root / "sub"), str(root / "file"))
    with pytest.raises(TypeError, match=r"not str(?s:.*)this_host\(\)"):
        gather_mount("host", str(root), str(tmp_path / "mnt"))
    assert not is_mounted(str(tmp_path / "mnt")) and len(leaks.children(os.getpid())) <= len(before) + 1


def test_a_folder_may_come_later(root, point):
    with gather_mount(this_host(), str(root / "later"), str(point)):
        assert os.listdir(point) == []
        (root / "later").mkdir()
        (root / "later" / "log").write_bytes(b"1")
        wait_until(lambda: os.listdir(point) == ["log"], 3)


# --------------------------------------------------------------------------------------------------------------- ends


def test_close_waits_for_readers_and_says_who_they_are(root, point):
    mounted = gather_mount(this_host(), str(root), str(point))
    reader = subprocess.Popen(["sleep", "60"], cwd=point / "sub")
    try:
        with pytest.raises(RuntimeError, match=f"(?s)can't be unmounted: busy.*pid {reader.pid}: sleep"):
            mounted.close(deadline=0.3)
        assert (point / "file").exists()
        threading.Timer(0.3, reader.kill).start()
        mounted.close(deadline=10)
        assert not is_mounted(str(point))
        mounted.close()
    finally:
        reader.kill()
        reader.wait(5)


def test_rounds_leave_nothing(root, point):
    def left():
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(list(leaks.descendants(os.getpid())))

    with gather_mount(this_host(), str(root), str(point)):
        assert (point / "file").read_bytes() == b"content\n"
    before = wait_until(left)
    for _ in range(8):
        with gather_mount(this_host(), str(root), str(point)):
            assert (point / "file").read_bytes() == b"content\n"
        assert os.listdir(point) == []
    wait_until(lambda: all(now <= then + 1 for now, then in zip(left(), before, strict=True)), 5)


CLIENT = """
    import os, sys, time
    from monarch.actor import this_host
    from monarch.gather_mount import gather_mount
    mount = gather_mount(this_host(), sys.argv[1], sys.argv[2])
    print("mounted", flush=True)
    if sys.argv[3] == "wait":
        time.sleep(60)
    if sys.argv[3] == "interrupt":
        raise KeyboardInterrupt
"""


@pytest.mark.parametrize(("way", "status"), [("end", 0), ("interrupt", -signal.SIGINT)])
def test_a_script_that_ends_unmounts(root, point, way, status):
    with start_script(CLIENT, args=[str(root), str(point), way]) as client:
        ended = client.finish().check(status)
    assert "was not closed" not in ended.stderr
    assert not is_mounted(str(point))


def test_a_killed_client_leaves_no_mount(root, point):
    with start_script(CLIENT, args=[str(root), str(point), "wait"]) as client:
        client.wait_line("mounted")
        assert (point / "file").read_bytes() == b"content\n"
        os.kill(client.pid, signal.SIGKILL)
        assert client.finish(grace_s=5).leftover_pids == ()
    wait_until(lambda: not is_mounted(str(point)))
    with gather_mount(this_host(), str(root), str(point)):
        assert (point / "file").read_bytes() == b"content\n"
    assert not is_mounted(str(point))


def test_a_dead_mount_is_taken_away_first(root, point):
    point.mkdir()
    FuseServer(mount(str(point), fsname="test"), Tree({})).stop()
    assert is_stale(str(point))
    with gather_mount(this_host(), str(root), str(point)):
        assert (point / "file").read_bytes() == b"content\n"


def holds(pid, what):
    try:
        return any(what in os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


def test_a_worker_that_is_killed_is_an_error_at_once(root, point, monkeypatch):
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", pytest.fail)
    mounted = gather_mount(this_host(), str(root), str(point))
    assert (point / "file").read_bytes() == b"content\n"
    (source,) = [pid for pid in leaks.descendants(os.getpid()) if holds(pid, "inotify")]
    os.kill(source, signal.SIGKILL)
    wait_until(lambda: mounted.statistics().lost == [0], 3)
    for path in (point / "file", point / "none", point):
        with pytest.raises(OSError) as caught:
            os.listdir(path) if path == point else path.read_bytes()
        assert caught.value.errno == errno.EIO
    mounted.close(deadline=5)
    assert not is_mounted(str(point))


def test_a_server_that_is_killed_is_told_of_and_its_mount_goes(root, point, monkeypatch):
    told = threading.Event()
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", lambda failure: told.set())
    mounted = gather_mount(this_host(), str(root), str(point))
    (server,) = [pid for pid in leaks.descendants(os.getpid()) if holds(pid, "/dev/fuse")]
    os.kill(server, signal.SIGKILL)
    assert told.wait(5)
    wait_until(lambda: not is_mounted(str(point)))
    mounted.close()


def test_a_worker_that_hangs_is_a_timeout(root, point):
    mounted = gather_mount(this_host(), str(root), str(point), patience_s=1.0)
    (source,) = [pid for pid in leaks.descendants(os.getpid()) if holds(pid, "inotify")]
    os.kill(source, signal.SIGSTOP)
    try:
        began = time.monotonic()
        done = run("cat", f"{point}/file")
        assert "timed out" in done.stderr and time.monotonic() - began < 5
    finally:
        os.kill(source, signal.SIGCONT)
    wait_until(lambda: run("cat", f"{point}/file").stdout == "content\n", 10)
    mounted.close()
    assert unmount(str(point)) == ("not_mounted", "")
