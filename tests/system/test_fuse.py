"""A tree in memory under a real mount: what readers see, wait for, are refused, and what is left when either side dies.

Whatever would hold the interpreter lock of the serving process, this one, is done by other processes: mapping files, starting programs.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from monarch._mounts.filesystem import LIVE, PUSHED, Habits
from monarch._mounts.fuse_server import End, FuseServer
from monarch._mounts.mounting import fuse_problem, is_mounted, is_stale, mount, mount_at, prepare_mount_point, set_readahead, unmount
from monarch.testing import leaks
from mounts.trees import TIME_NS, Link, Parked, Tree
from system.script import run_script, start_script
from system.waiting import wait_until

pytestmark = pytest.mark.skipif(bool(fuse_problem()), reason=fuse_problem() or "FUSE is here")

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts as another user, or has the kernel read files itself: needs root")
needs_helper = pytest.mark.skipif(shutil.which("fusermount3") is None, reason="needs fusermount3 (package fuse3)")

BIG = bytes(range(256)) * 4096 * 3 + b"tail"
MAP = "import mmap, sys; f = open(sys.argv[1]); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)"
TESTS = str(Path(__file__).parents[1])
WAIT_S = 10.0


class Mount:
    """A tree that is served, and where."""

    def __init__(self, point, content, habits=PUSHED, **options):
        self.point = str(point)
        prepare_mount_point(self.point)
        self.tree = Tree(content, habits)
        self.server = FuseServer(mount(self.point, fsname="test"), self.tree, **options)
        self.server.start()

    def path(self, name):
        return f"{self.point}/{name}"

    def bytes(self, name):
        return Path(self.path(name)).read_bytes()

    def requests(self, name):
        return self.server.statistics().requests.get(name, 0)

    def close(self):
        unmount(self.point, lazy=True)
        assert self.server.stop()


@pytest.fixture
def mounted(tmp_path):
    made = []

    def make(content, habits=PUSHED, **options):
        made.append(Mount(tmp_path / f"mnt{len(made)}", content, habits, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def run(*command, timeout=WAIT_S):
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def run_python(source, *args):
    done = run(sys.executable, "-S", "-c", source, *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


# -------------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("habits", [PUSHED, LIVE], ids=["pushed", "live"])
@pytest.mark.parametrize("threads", [1, 3])
def test_files_are_read_whole_and_in_pieces(mounted, habits, threads):
    it = mounted({"big": BIG, "empty": b"", "folder": {"nested": {"small": b"text"}}}, habits, threads=threads)
    assert it.bytes("big") == BIG
    assert it.bytes("empty") == b""
    assert it.bytes("folder/nested/small") == b"text"
    with open(it.path("big"), "rb", buffering=0) as file:
        for offset, size in ((0, 1), (4095, 2), (1 << 20, 300_000), (len(BIG) - 4, 100), (len(BIG), 1)):
            file.seek(offset)
            assert file.read(size) == BIG[offset : offset + size]
        assert file.seek(-4, os.SEEK_END) == len(BIG) - 4 and file.read() == b"tail"
    assert it.bytes("big") == BIG


def test_a_file_is_mapped(mounted):
    it = mounted({"big": BIG})
    assert run_python(f"{MAP}; print(m[70000:70010].hex(), m[-4:])", it.path("big")).split() == [BIG[70000:70010].hex(), "b'tail'"]


def test_many_processes_read_the_same_files(mounted):
    it = mounted({f"f{index}": BIG for index in range(4)}, threads=2)
    readers = [subprocess.Popen(["md5sum", it.path(f"f{index % 4}")], stdout=subprocess.PIPE, text=True) for index in range(12)]
    sums = {reader.communicate(timeout=20)[0].split()[0] for reader in readers}
    assert len(sums) == 1


@pytest.mark.parametrize("habits", [PUSHED, LIVE], ids=["pushed", "live"])
def test_ten_thousand_entries_are_listed_once_each(mounted, habits):
    names = {f"entry-{index:05d}-{'x' * (index % 60)}": b"1" for index in range(10_000)}
    it = mounted({"folder": names, "none": {}}, habits)
    assert sorted(os.listdir(it.path("folder"))) == sorted(names)
    assert sorted(os.listdir(it.path("folder"))) == sorted(names)
    with os.scandir(it.path("folder")) as entries:
        assert all(entry.is_file() and entry.stat().st_size == 1 for entry in entries)
    assert os.listdir(it.path("none")) == []


def test_attributes_are_those_of_the_tree(mounted):
    it = mounted({"folder": {"file": b"12345"}, "link": Link(b"folder/file"), "dangling": Link(b"/no/where"), "loop": Link(b"loop")})
    node = it.tree.add("/script", b"#!/bin/sh\n", mode=0o711)
    found = os.stat(it.path("script"))
    assert (found.st_ino, stat.S_IMODE(found.st_mode), found.st_size, found.st_mtime_ns) == (node, 0o711, 10, TIME_NS)
    assert (found.st_atime_ns, found.st_ctime_ns, found.st_uid, found.st_nlink) == (TIME_NS, TIME_NS, os.getuid(), 1)
    assert os.readlink(it.path("link")) == "folder/file" and it.bytes("link") == b"12345"
    assert os.stat(it.path("folder/..")).st_ino == os.stat(it.point).st_ino == 1
    assert stat.S_ISLNK(os.lstat(it.path("dangling")).st_mode) and not os.path.exists(it.path("dangling"))
    with pytest.raises(OSError, match="symbolic links"):
        os.stat(it.path("loop"))


def test_wrong_uses_get_the_errors_of_any_file_system(mounted):
    it = mounted({"file": b"1", "folder": {}})
    with pytest.raises(FileNotFoundError):
        it.bytes("none")
    with pytest.raises(IsADirectoryError):
        it.bytes("folder")
    with pytest.raises(NotADirectoryError):
        os.listdir(it.path("file"))
    with pytest.raises(NotADirectoryError):
        it.bytes("file/inner")
    with pytest.raises(OSError) as caught:
        os.readlink(it.path("file"))
    assert caught.value.errno == errno.EINVAL


def test_a_program_of_the_mount_can_be_started(mounted):
    it = mounted({})
    it.tree.add("/hello", b"#!/bin/sh\necho hello\n", mode=0o755)
    assert run("sh", "-c", it.path("hello")).stdout == "hello\n"


WRITES = {
    "write": lambda it: os.open(it.path("file"), os.O_RDWR),
    "append": lambda it: os.open(it.path("file"), os.O_WRONLY | os.O_APPEND),
    "create": lambda it: os.open(it.path("new"), os.O_CREAT | os.O_WRONLY),
    "truncate": lambda it: os.truncate(it.path("file"), 0),
    "mkdir": lambda it: os.mkdir(it.path("new")),
    "rmdir": lambda it: os.rmdir(it.path("folder")),
    "unlink": lambda it: os.unlink(it.path("file")),
    "rename": lambda it: os.rename(it.path("file"), it.path("new")),
    "link": lambda it: os.link(it.path("file"), it.path("new")),
    "symlink": lambda it: os.symlink("file", it.path("new")),
    "mknod": lambda it: os.mkfifo(it.path("new")),
    "chmod": lambda it: os.chmod(it.path("file"), 0o777),
    "chown": lambda it: os.chown(it.path("file"), 0, 0),
    "utime": lambda it: os.utime(it.path("file"), (0, 0)),
    "setxattr": lambda it: os.setxattr(it.path("file"), "user.x", b"1"),
}


@pytest.mark.parametrize("write", list(WRITES))
def test_nothing_can_be_written(mounted, write):
    it = mounted({"file": b"1", "folder": {}})
    with pytest.raises(OSError) as caught:
        WRITES[write](it)
    assert caught.value.errno == errno.EROFS


def test_names_that_are_missing_are_asked_for_once(mounted):
    it = mounted({"file": b"1"})
    for _ in range(5):
        assert not os.path.exists(it.path("none"))
    assert it.requests("LOOKUP") == 1
    live = mounted({"file": b"1"}, LIVE)
    for _ in range(5):
        assert not os.path.exists(live.path("none"))
    assert live.requests("LOOKUP") == 5


def test_a_pushed_tree_costs_no_request_the_second_time(mounted):
    it = mounted({"folder": {f"f{index}": b"content" for index in range(20)}})
    look = ["sh", "-c", f"ls -l {it.point}/folder; cat {it.point}/folder/*"]
    first = run(*look)
    assert first.returncode == 0
    before = it.server.statistics().requests
    assert run(*look).stdout == first.stdout
    assert it.server.statistics().requests == before


# --------------------------------------------------------------------------------------------------------------- waiting


def test_answers_from_another_thread_are_waited_for(mounted):
    it = mounted({"late": b"content", "parked": Parked(b"?" * 10)})
    assert it.bytes("late") == b"content"
    assert not os.path.exists(it.path("late-none"))
    reader = subprocess.Popen(["cat", it.path("parked")], stdout=subprocess.PIPE)
    assert it.tree.parked.wait(WAIT_S)
    assert it.bytes("late") == b"content" and reader.poll() is None  # one that waits holds up nobody
    it.tree.waiting[0].answer([b"now", b" it comes"[:7]])
    assert reader.communicate(timeout=WAIT_S)[0] == b"now it com"


def test_an_error_that_comes_later_reaches_the_reader(mounted):
    it = mounted({"parked": Parked(b"?" * 10)})
    failing = threading.Thread(target=lambda: [wait_until(lambda: it.tree.waiting).pop().fail(errno.EIO) for _ in range(2)])
    failing.start()
    done = run("cat", it.path("parked"))
    failing.join(WAIT_S)
    assert "Input/output error" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("what", ["read", "lookup", "map"])
def test_a_reader_that_waits_can_be_killed_at_once(mounted, what, number):
    it = mounted({"parked": Parked(b"?" * 10_000)})
    parked = []
    if what == "lookup":
        it.tree.lookup = lambda parent, name, later: parked.append(later) or later
    else:
        parked = it.tree.waiting
    python = [sys.executable, "-S", "-c", f"import signal; signal.signal(2, signal.SIG_DFL); {MAP}; m[0]"]
    reader = subprocess.Popen([*(python if what == "map" else ["cat"]), it.path("parked")], stderr=subprocess.DEVNULL)
    wait_until(lambda: parked)
    began = time.monotonic()
    reader.send_signal(number)
    assert reader.wait(WAIT_S) == -number
    assert time.monotonic() - began < 2
    if what == "lookup":  # a read ahead goes on without its reader; it ends with an answer or the patience
        assert parked[0].cancelled and it.server.statistics().parked == 0


def test_a_python_program_that_waits_for_a_name_hears_ctrl_c(mounted):
    it = mounted({})
    parked = []
    it.tree.lookup = lambda parent, name, later: parked.append(later) or later
    reader = subprocess.Popen([sys.executable, "-S", "-c", f"import os; os.stat({it.path('x')!r})"], stderr=subprocess.PIPE, text=True)
    wait_until(lambda: parked)
    reader.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in reader.communicate(timeout=WAIT_S)[1]


@pytest.mark.parametrize("size", [10, 1 << 20])
def test_a_reader_loses_patience_once(mounted, size):
    it = mounted({"parked": Parked(b"?" * size)}, patience_s=1.0)
    began = time.monotonic()
    done = run("cat", it.path("parked"))
    assert "Connection timed out" in done.stderr
    assert 0.9 < time.monotonic() - began < 1.9
    assert all(later.cancelled for later in it.tree.waiting)


# --------------------------------------------------------------------------------------------------------------- changes


def test_a_change_is_seen_after_an_invalidation_and_not_before(mounted):
    it = mounted({"folder": {"file": b"old", "gone": b"1", "link": Link(b"file")}})
    assert it.bytes("folder/link") == b"old" and os.listdir(it.path("folder")) == ["file", "gone", "link"]
    assert not os.path.exists(it.path("folder/new")) and os.path.exists(it.path("folder/gone"))
    with open(it.path("folder/file"), "rb", buffering=0) as file:
        assert file.read() == b"old"
        node = it.tree.change("/folder/file", b"changed")
        it.tree.add("/folder/new", b"fresh")
        it.tree.remove("/folder/gone")
        link = it.tree.paths["/folder/link"]
        it.tree.nodes[link] = Link(b"new")
        assert it.bytes("folder/file") == b"old" and not os.path.exists(it.path("folder/new"))

        it.server.invalidate_node(node)
        it.server.invalidate_node(link)
        it.server.invalidate_node(it.tree.paths["/folder"])
        it.server.invalidate_entry(it.tree.paths["/folder"], b"new")
        it.server.invalidate_entry(it.tree.paths["/folder"], b"gone")
        file.seek(0)
        assert file.read() == b"changed"  # through a handle of before
    assert it.bytes("folder/file") == b"changed" and it.bytes("folder/new") == b"fresh" and it.bytes("folder/link") == b"fresh"
    assert os.stat(it.path("folder/file")).st_mtime_ns == TIME_NS + 1
    assert sorted(os.listdir(it.path("folder"))) == ["file", "link", "new"]
    assert not os.path.exists(it.path("folder/gone"))


def test_a_file_becomes_a_directory(mounted):
    it = mounted({"thing": b"file"})
    assert it.bytes("thing") == b"file"
    it.tree.remove("/thing")
    it.tree.add("/thing", {"inner": b"1"})
    it.server.invalidate_entry(1, b"thing")
    it.server.invalidate_node(1)
    assert it.bytes("thing/inner") == b"1"


@pytest.mark.parametrize("new", [b"longer than before", b"sh", b"sames"])
def test_a_grown_or_shrunk_file_is_read_to_its_new_end(mounted, new):
    it = mounted({"file": b"start"})
    assert it.bytes("file") == b"start"
    it.server.invalidate_node(it.tree.change("/file", new))
    assert it.bytes("file") == new and os.stat(it.path("file")).st_size == len(new)


def test_a_part_of_a_file_is_invalidated(mounted):
    it = mounted({"file": b"a" * 20_000})
    it.bytes("file")
    node = it.tree.change("/file", b"b" * 20_000)
    it.server.invalidate_node(node, 8192, 4096)
    assert it.bytes("file") == b"a" * 8192 + b"b" * 4096 + b"a" * (20_000 - 12_288)


def test_a_live_tree_shows_changes_without_being_told(mounted):
    it = mounted({"file": b"old"}, LIVE)
    assert it.bytes("file") == b"old"
    it.tree.change("/file", b"changed")
    it.tree.add("/new", b"1")
    assert it.bytes("file") == b"changed" and it.bytes("new") == b"1" and os.listdir(it.point) == ["file", "new"]
    reads = it.requests("READ")
    assert it.bytes("file") == b"changed" and it.requests("READ") == reads  # unchanged bytes stay cached


def test_nodes_of_a_live_tree_are_forgotten(mounted):
    it = mounted({f"f{index}": b"1" for index in range(100)}, LIVE)
    assert len(run("ls", "-l", it.point).stdout.splitlines()) == 101
    nodes = {it.tree.paths[f"/f{index}"] for index in range(100)}
    for index in range(100):
        it.tree.remove(f"/f{index}")
        assert not os.path.exists(it.path(f"f{index}"))
    wait_until(lambda: set(it.tree.forgotten) == nodes)
    assert it.server.statistics().known_nodes == 0


# ------------------------------------------------------------------------------------------------------------------ ends

SERVER = """
    import sys, time, threading
    sys.path.insert(0, sys.argv[1])
    from mounts.trees import Parked, Tree
    from monarch._mounts.fuse_server import FuseServer
    from monarch._mounts.mounting import mount
    tree = Tree({"file": b"content", "parked": Parked(b"?" * 10)})
    server = FuseServer(mount(sys.argv[2], fsname="test"), tree)
    server.start()
    print("ready", flush=True)
    tree.parked.wait()
    print("parked", flush=True)
    threading.Event().wait()
"""


def test_readers_of_a_server_that_was_killed_get_an_error_at_once_and_the_place_is_taken_over(tmp_path):
    point = str(tmp_path)
    with start_script(SERVER, args=[TESTS, point]) as server:
        server.wait_line("ready")
        assert is_mounted(point) and not is_stale(point)
        reader = subprocess.Popen(["cat", f"{point}/parked"], stderr=subprocess.PIPE, text=True)
        server.wait_line("parked")
        began = time.monotonic()
        os.kill(server.pid, signal.SIGKILL)
        assert "error" in reader.communicate(timeout=WAIT_S)[1].lower() or reader.returncode
        assert time.monotonic() - began < 2
    with pytest.raises(OSError) as caught:
        os.stat(f"{point}/file")
    assert caught.value.errno == errno.ENOTCONN
    assert is_mounted(point) and is_stale(point)
    prepare_mount_point(point)
    assert not is_mounted(point) and os.path.isdir(point)
    again = Mount(point, {"file": b"again"})
    assert again.bytes("file") == b"again"
    again.close()


def test_several_dead_mounts_over_each_other_are_taken_away(tmp_path):
    point = str(tmp_path)
    for _ in range(3):
        FuseServer(mount(point, fsname="test"), Tree({})).stop()
    assert is_stale(point)
    prepare_mount_point(point)
    assert not is_mounted(point)


def test_a_server_that_hangs_is_not_taken_for_dead_and_does_not_hang_who_asks(tmp_path):
    point = str(tmp_path)
    with start_script(SERVER, args=[TESTS, point]) as server:
        server.wait_line("ready")
        os.kill(server.pid, signal.SIGSTOP)
        began = time.monotonic()
        assert is_mounted(point) and not is_stale(point)
        assert time.monotonic() - began < 8
        assert unmount(point, lazy=True) == ("ok", "")
    wait_until(lambda: not is_stale(point) and not any("stat -f" in leaks.command(pid) for pid in children()))


def children():
    subprocess.run(["true"])  # starting a child makes the standard library wait for those that were left to themselves
    return leaks.children(os.getpid())


def test_unmounting_says_how_it_went(mounted):
    it = mounted({"file": b"content"})
    with open(it.path("file"), "rb") as file:
        status, detail = unmount(it.point)
        assert status == "busy" and detail
        assert file.read() == b"content"
    assert unmount(it.point) == ("ok", "")
    assert unmount(it.point) == ("not_mounted", "")
    assert it.server.closed.result(WAIT_S) is End.UNMOUNTED


def test_a_lazy_unmount_lets_open_files_be_read_to_the_end(mounted):
    it = mounted({"file": BIG})
    with open(it.path("file"), "rb", buffering=0) as file:
        assert unmount(it.point, lazy=True) == ("ok", "")
        assert not is_mounted(it.point) and os.listdir(it.point) == []
        assert file.read() == BIG
        assert not it.server.closed.done()
    assert it.server.closed.result(WAIT_S) is End.UNMOUNTED


def test_a_server_that_stops_while_files_are_open_ends_their_readers(mounted):
    it = mounted({"file": BIG, "parked": Parked(b"?" * 10)})
    reader = subprocess.Popen(["cat", it.path("parked")], stderr=subprocess.PIPE, text=True)
    assert it.tree.parked.wait(WAIT_S)
    fd = os.open(it.path("file"), os.O_RDONLY)
    assert it.server.stop()
    with pytest.raises(OSError):
        os.read(fd, 100)
    with suppress(OSError):  # nobody answers the flush
        os.close(fd)
    reader.communicate(timeout=WAIT_S)
    assert reader.returncode == 1
    assert is_stale(it.point) and it.server.closed.result(0) is End.STOPPED


@needs_root
def test_an_unmount_by_somebody_else_is_told(mounted):
    it = mounted({})
    told = threading.Event()
    it.server.closed.add_done_callback(lambda end: told.set())
    assert run("umount", it.point).returncode == 0
    assert told.wait(WAIT_S) and it.server.closed.result(0) is End.UNMOUNTED


def test_fifty_mounts_leave_nothing(tmp_path):
    def left():
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    point = str(tmp_path)
    before = left()
    for index in range(50):
        it = Mount(point, {"file": b"%d" % index}, threads=1 + index % 2)
        assert it.bytes("file") == b"%d" % index
        assert unmount(point) == ("ok", "")
        assert it.server.closed.result(WAIT_S) is End.UNMOUNTED and it.server.stop()
    assert left() == before


def test_a_mount_over_a_mount_hides_it_until_it_goes(tmp_path):
    below, above = Mount(tmp_path, {"below": b""}), Mount(tmp_path, {"above": b""})
    assert os.listdir(tmp_path) == ["above"]
    above.close()
    assert os.listdir(tmp_path) == ["below"]
    below.close()
    assert not is_mounted(str(tmp_path))


def test_the_table_of_mounts_says_whose_it_is(tmp_path):
    strange = tmp_path / "with space, comma\\and \N{SNOWMAN}"
    strange.mkdir()
    fd = mount(str(strange), fsname="a,b c\\d", subtype="thing")
    server = FuseServer(fd, Tree({}))
    found = mount_at(str(strange))
    assert found[:3] == (str(strange), "fuse.thing", "a,b c\\d")
    (tmp_path / "link").symlink_to(tmp_path)
    assert is_mounted(str(tmp_path / "link" / strange.name))
    assert unmount(str(strange)) == ("ok", "") and server.stop()


# ------------------------------------------------------------------------------------------------------ rights and kernels


@needs_root
def test_the_kernel_asks_for_as_much_ahead_as_it_is_told(mounted):
    it = mounted({"before": BIG, "after": BIG})
    assert it.bytes("before") == BIG
    small = it.requests("READ")
    if not set_readahead(it.point, 1 << 20):
        pytest.skip("/sys can't be written here")
    assert it.bytes("after") == BIG and it.requests("READ") - small < small / 2
    assert not set_readahead("/proc", 1 << 20)


AS_NOBODY = """
    import os, subprocess, sys, tempfile
    sys.path.insert(0, sys.argv[1])
    from mounts.trees import Link, Tree
    from monarch._mounts.fuse_server import FuseServer
    from monarch._mounts.mounting import fuse_problem, is_mounted, is_stale, mount, mount_at, unmount
    fuse_problem()  # what it imports may be out of reach for others
    device = tempfile.mktemp(prefix="monarch-test-", dir="/tmp")
    os.mknod(device, 0o020000, os.stat("/dev/fuse").st_rdev)
    os.chmod(device, 0o666)  # as everywhere but in some containers; only this script's own namespace sees it
    subprocess.run(["mount", "--bind", device, "/dev/fuse"], check=True)
    os.unlink(device)
    point = tempfile.mkdtemp(prefix="monarch-test-", dir="/tmp")
    os.chown(point, 65534, 65534)
    os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
    os.environ["HOME"] = "/"; os.chdir("/")
    assert fuse_problem() == "", fuse_problem()
    tree = Tree({"file": b"content" * 100_000, "secret": b"1"})
    tree.attrs[tree.paths["/secret"]] = tree.attrs[tree.paths["/secret"]]._replace(mode=0o100600, uid=4711)
    for index in range(3):
        server = FuseServer(mount(point, fsname="mine, yours"), tree, threads=2, passthrough=True)
        server.start()
        print(*mount_at(point)[1:3], flush=True)
        assert open(f"{point}/file", "rb").read() == b"content" * 100_000
        assert open(f"{point}/secret", "rb").read() == b"1"
        assert not server.statistics().passthrough or tree.backing == {}
        held = open(f"{point}/file", "rb")
        assert unmount(point)[0] == "busy", unmount(point)
        held.close()
        if index == 2:
            server.stop()
            assert is_stale(point)
        assert unmount(point) == ("ok", ""), unmount(point)
        assert unmount(point) == ("not_mounted", "")
        assert server.stop()
    try:
        mount(point, fsname="x", audience="everybody")
        print("allowed")
    except RuntimeError as error:
        print("refused", str(error).splitlines()[0])
    if is_mounted(point):
        unmount(point)
    os.rmdir(point)
    try:
        mount("/usr", fsname="x")
    except RuntimeError as error:
        print("elsewhere", error)
"""


@needs_root
@needs_helper
def test_a_user_without_rights_mounts_through_the_helper():
    done = run_script(AS_NOBODY, args=[TESTS], prefix=["unshare", "--mount"]).check()
    lines = done.stdout.splitlines()
    assert lines[:3] == ["fuse.monarch mine, yours"] * 3
    assert re.match("refused fuse mount failed: users other than you may not use|allowed", lines[3])
    assert "elsewhere fuse mount failed: '/usr' was refused" in done.stdout and "fusermount3: " in done.stdout


@needs_root
def test_other_users_see_what_the_modes_say(mounted):
    it = mounted({"public": b"1"})
    it.tree.add("/private", b"2", mode=0o600)
    for folder in Path(it.point).parents:  # the session's folder is closed to others
        if folder.stat().st_mode & 0o005 != 0o005:
            folder.chmod(folder.stat().st_mode | 0o005)
    source = "import os, sys; os.setgid(65534); os.setuid(65534); print(open(sys.argv[1]).read()); open(sys.argv[2])"
    done = run(sys.executable, "-S", "-c", source, it.path("public"), it.path("private"))
    assert done.stdout == "1\n" and "PermissionError" in done.stderr
    assert it.bytes("private") == b"2"


def memory_file(content):
    fd = os.memfd_create("monarch-test")
    os.write(fd, content)
    return fd


@needs_root
@pytest.mark.parametrize("habits", [PUSHED, LIVE], ids=["pushed", "live"])
def test_the_kernel_reads_backing_files_itself(mounted, habits: Habits):
    it = mounted({"big": BIG, "other": b"from us"}, habits, passthrough=True)
    os.stat(it.path("big"))
    if not it.server.statistics().passthrough:
        pytest.skip("this kernel does not read backing files (Linux 6.9)")
    fd = memory_file(BIG)
    it.tree.backing[it.tree.paths["/big"]] = fd
    for _ in range(3):
        with open(it.path("big"), "rb") as first, open(it.path("big"), "rb") as second:
            assert first.read() == BIG
            second.seek(1 << 20)
            assert second.read(10) == BIG[1 << 20 : (1 << 20) + 10]
        assert run_python(f"{MAP}; print(m[-4:])", it.path("big")) == "b'tail'\n"
    assert it.requests("READ") == 0
    wait_until(lambda: not len(it.server._desk.openings) and len(it.tree.released) == 9)
    os.close(fd)
    assert it.bytes("other") == b"from us" and it.requests("READ") > 0


@needs_root
def test_a_backing_file_that_the_kernel_refuses_is_read_by_us(mounted):
    it = mounted({"file": b"content"}, passthrough=True)
    reading, writing = os.pipe()
    it.tree.backing[it.tree.paths["/file"]] = reading
    assert it.bytes("file") == b"content"
    os.close(reading)
    os.close(writing)


OPEN_AT_ONCE = """
import os, sys, threading
folder, rounds = sys.argv[1], int(sys.argv[2])
barrier = threading.Barrier(4)
def read():
    for index in range(rounds):
        barrier.wait()
        with open(f"{folder}/f{index}", "rb") as file:
            assert file.read() == b"%d " % index * 2000
threads = [threading.Thread(target=read) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print("read")
"""


@needs_root
def test_small_files_are_read_and_mapped_without_a_read(mounted):
    it = mounted({"plain": b"p" * 5000, "code": b"c" * 9001}, passthrough=True)
    os.stat(it.path("plain"))
    if not it.server.statistics().passthrough:
        pytest.skip("this kernel does not read backing files (Linux 6.9), so files are not opened one by one")
    it.tree.given = {it.tree.paths["/plain"], it.tree.paths["/code"]}
    assert run("ls", "-lR", it.point).returncode == 0 and it.server.statistics().given == 0, "who only lists reads nothing"
    assert it.bytes("plain") == b"p" * 5000
    assert run_python(f"{MAP}; print(len(m), m[:].strip(b'c'))", it.path("code")) == "9001 b''\n"
    assert it.requests("READ") == 0 and it.server.statistics().given == 2


@needs_root
@pytest.mark.parametrize("threads", [1, 2])
def test_files_that_many_open_at_once_are_given_and_read(mounted, threads):
    it = mounted({"dir": {f"f{index}": b"%d " % index * 2000 for index in range(200)}}, passthrough=True, threads=threads)
    it.tree.given = {node for path, node in it.tree.paths.items() if path.startswith("/dir/")}
    assert run_python(OPEN_AT_ONCE, it.path("dir"), "200") == "read\n"
