"""Directories that appear on other hosts: whole versions, what moves, and what becomes of a mount whose processes die."""

from __future__ import annotations

import errno
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from monarch._mounts import mounting
from monarch.actor import ActorError, this_host
from monarch.remotemount import remotemount
from monarch.remotemount.remotemount import MountHandler
from system.remote import serving
from system.script import start_script
from system.waiting import is_gone, wait_until

MIB = 1 << 20
pytestmark = pytest.mark.skipif(bool(mounting.fuse_problem()), reason=f"no FUSE here: {mounting.fuse_problem()}")


def write(path: Path, data: bytes | str, mode: int = 0o644) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    path.chmod(mode)
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A tree with a bit of everything."""
    root = tmp_path / "source"
    for number in range(40):
        write(root / f"pkg/m{number}.py", f"number = {number}\n" * 20)
    write(root / "pkg/run.sh", "#!/bin/sh\necho ran\n", 0o755)
    write(root / "big/weights.bin", os.urandom(5 * MIB + 17))
    write(root / "empty", b"")
    (root / "link.py").symlink_to("pkg/m1.py")
    (root / "dangling").symlink_to("nowhere")
    (root / "void").mkdir()
    return root


@pytest.fixture
def mount(source: Path, tmp_path: Path):
    handler = remotemount(this_host(), str(source), str(tmp_path / "mount"))
    handler.open()
    yield handler
    handler.close()
    assert not mounting.is_mounted(str(tmp_path / "mount"))


LOOK = """
import os, pickle, stat, sys
found = {}
for folder, folders, files in os.walk(sys.argv[1]):
    for name in [*folders, *files]:
        path = os.path.join(folder, name)
        mode = os.lstat(path).st_mode
        content = None
        if stat.S_ISLNK(mode):
            content = os.readlink(path)
        elif stat.S_ISREG(mode):
            content = open(path, "rb").read()
        found[os.path.relpath(path, sys.argv[1])] = mode, content
sys.stdout.buffer.write(pickle.dumps(found))
"""


def tree(root: Path) -> dict[str, tuple[int, object]]:
    """Mode and content of everything."""
    done = subprocess.run([sys.executable, "-SEc", LOOK, str(root)], capture_output=True, timeout=20)
    assert done.returncode == 0, done.stderr.decode()
    found: dict[str, tuple[int, object]] = pickle.loads(done.stdout)
    return found


def pid_of(mount: MountHandler) -> int:
    return mount.statistics()[0].pid


def cat(path: Path, timeout: float = 10) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["cat", str(path)], capture_output=True, timeout=timeout)


def test_a_directory_appears_whole(mount: MountHandler, source: Path, tmp_path: Path) -> None:
    assert tree(tmp_path / "mount") == tree(source)
    assert subprocess.run([str(tmp_path / "mount/pkg/run.sh")], capture_output=True, timeout=10).stdout == b"ran\n"
    for attempt in (lambda: (tmp_path / "mount/new").write_text("x"), lambda: (tmp_path / "mount/empty").unlink()):
        with pytest.raises(OSError) as caught:
            attempt()
        assert caught.value.errno == errno.EROFS


def test_a_refresh_shows_what_changed_and_moves_no_more(mount: MountHandler, source: Path, tmp_path: Path) -> None:
    there = tmp_path / "mount"
    tree(there)
    before = mount.statistics()[0].delivery.num_bytes
    write(source / "pkg/m1.py", "other\n")
    (source / "pkg/m2.py").unlink()
    write(source / "fresh/file", "fresh")
    with open(source / "big/weights.bin", "r+b") as file:
        file.seek(2 * MIB + 5)
        file.write(b"changed")
    mount.refresh()
    assert tree(there) == tree(source)
    assert mount.statistics()[0].delivery.num_bytes - before <= MIB + 200, "one piece of the big file, and the small ones"
    mount.refresh()
    assert tree(there) == tree(source)


READ_IN_TWO = """
import sys
with open(sys.argv[1], "rb") as file:
    begin = file.read(100)
    print("open", flush=True)
    input()
    sys.stdout.buffer.write(begin + file.read())
"""


def test_who_has_a_file_open_reads_the_old_version_to_its_end(mount: MountHandler, source: Path, tmp_path: Path) -> None:
    there = tmp_path / "mount/big/weights.bin"
    old = (source / "big/weights.bin").read_bytes()
    assert cat(there).stdout == old, "what has not come when the source changes is lost"
    reader = subprocess.Popen([sys.executable, "-SEc", READ_IN_TWO, str(there)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert reader.stdin is not None and reader.stdout is not None
        assert reader.stdout.readline() == b"open\n"
        new = os.urandom(3 * MIB)
        write(source / "big/weights.bin", new)
        mount.refresh()
        assert cat(there).stdout == new
        out, _ = reader.communicate(b"\n", timeout=10)
        assert out == old
    finally:
        reader.kill()
        reader.wait()


def test_a_file_that_changed_since_the_last_look_is_an_error_until_the_next(source: Path, tmp_path: Path) -> None:
    """Its bytes are not there any more, and nothing else is passed off as them."""
    mount = remotemount(this_host(), str(source), str(tmp_path / "mount"), ahead_bytes=0)
    mount.open()
    try:
        with open(source / "big/weights.bin", "r+b") as file:
            file.write(b"changed")
        done = subprocess.run(["tail", "-c", "10", str(tmp_path / "mount/big/weights.bin")], capture_output=True, timeout=20)
        assert done.returncode and b"Input/output error" in done.stderr
        assert cat(tmp_path / "mount/pkg/m3.py").stdout == (source / "pkg/m3.py").read_bytes()
        os.truncate(source / "big/weights.bin", 100)
        mount.refresh()
        assert cat(tmp_path / "mount/big/weights.bin").stdout == (source / "big/weights.bin").read_bytes()
    finally:
        mount.close()


def test_opening_and_closing_follow_each_other(source: Path, tmp_path: Path) -> None:
    mount = remotemount(this_host(), str(source), str(tmp_path / "mount"))
    with pytest.raises(RuntimeError, match="no active mount to refresh; call open"):
        mount.refresh()
    mount.close()
    for _ in range(3):
        mount.open()
        with pytest.raises(RuntimeError, match="open already"):
            mount.open()
        assert (tmp_path / "mount/empty").exists()
        mount.close()
        mount.close()
        assert os.listdir(tmp_path / "mount") == []


def test_close_waits_for_readers_and_says_who_they_are(mount: MountHandler, source: Path, tmp_path: Path) -> None:
    said = rf"(?s)still mounted on some hosts.*close\(\) it again.*this host: busy: pid {os.getpid()}: "
    with open(tmp_path / "mount/pkg/m1.py", "rb") as file:
        with pytest.raises(RuntimeError, match=said):
            mount.close(deadline=0.2)
        assert file.read() == (source / "pkg/m1.py").read_bytes() and cat(tmp_path / "mount/pkg/m2.py").returncode == 0
        reader = subprocess.Popen(["sleep", "0.5"], cwd=tmp_path / "mount")
    mount.close()
    assert reader.wait() == 0 and os.listdir(tmp_path / "mount") == []


def test_a_change_in_a_sparse_file_of_gigabytes_is_shown_soon_and_takes_no_memory(tmp_path: Path) -> None:
    source, there = tmp_path / "source", tmp_path / "mount"
    source.mkdir()
    with open(source / "disk.img", "wb") as file:
        file.truncate(4096 * MIB)
        file.seek(3000 * MIB)
        file.write(b"data")
    mount = remotemount(this_host(), str(source), str(there))
    mount.open()
    try:
        for text in (b"changed", b"again"):
            with open(source / "disk.img", "r+b") as file:
                file.seek(3000 * MIB + 2)
                file.write(text)
            began = time.monotonic()
            mount.refresh()
            assert time.monotonic() - began < 3
            with open(there / "disk.img", "rb") as file:
                file.seek(3000 * MIB - 5)
                assert file.read(20) == bytes(5) + b"da" + text + {b"changed": b"", b"again": b"ed"}[text] + bytes(6)
                assert file.seek(0, os.SEEK_END) == 4096 * MIB
        wait_until(lambda: mount.statistics()[0].store.missing_bytes == 0)
        assert mount.statistics()[0].store.resident_bytes <= 2 * MIB
    finally:
        mount.close()


def test_what_can_not_be_mounted_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path / "file", "x")
    write(tmp_path / "source" / "file", "x")
    for place, text in ((tmp_path / "nowhere", "is not there"), (tmp_path / "file", "no directory")):
        mount = remotemount(this_host(), str(place), str(tmp_path / "mount"))
        with pytest.raises(OSError, match=rf"{text}(?s:.*)next:"):
            mount.open()
        mount.close()
    with (
        pytest.raises(ActorError, match=r"file' is no directory(?s:.*)another mount point"),
        remotemount(this_host(), str(tmp_path / "source"), str(tmp_path / "file")),
    ):
        pass
    with pytest.raises(ValueError, match="unknown mode"):
        remotemount(this_host(), str(tmp_path), mode="ftp")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"not PosixPath(?s:.*)this_host\(\)"):
        remotemount(tmp_path, str(tmp_path))  # type: ignore[arg-type]


def test_a_copy_is_made_where_there_is_no_fuse(source: Path, tmp_path: Path) -> None:
    there = tmp_path / "copy"
    mount = remotemount(this_host(), str(source), str(there), mode="copy")
    mount.open()
    write(there / "foreign", "stays")
    write(source / "pkg/m5.py", "new")
    mount.refresh()
    mount.close()
    copied = {path: what for path, what in tree(there).items() if not path.startswith(".monarch-copy")}
    assert copied.pop("foreign")[1] == b"stays"
    assert copied == tree(source)


def test_a_copy_that_failed_is_made_up_for_by_the_next_refresh(source: Path, tmp_path: Path) -> None:
    there = tmp_path / "copy"
    mount = remotemount(this_host(), str(source), str(there), mode="copy")
    mount.open()
    write(there / "new", "in the way")
    write(source / "new", "new")
    with pytest.raises(Exception, match="in the way"):
        mount.refresh()
    (there / "new").unlink()
    mount.refresh()
    assert (there / "new").read_text() == "new"
    mount.close()


def test_what_could_not_be_read_for_a_moment_is_there_after_a_refresh(tmp_path: Path) -> None:
    folder, there = tmp_path / "disk/source", tmp_path / "mount"
    written = write(folder / "weights", os.urandom(2 * MIB)).read_bytes()
    mount = remotemount(this_host(), str(folder), str(there), ahead_bytes=0)
    mount.open()
    (tmp_path / "disk").rename(tmp_path / "unplugged")
    assert b"Input/output error" in cat(there / "weights").stderr
    (tmp_path / "unplugged").rename(tmp_path / "disk")
    mount.refresh()
    assert cat(there / "weights").stdout == written
    mount.close()


def test_a_mount_whose_process_is_killed_is_taken_away_and_the_log_says_so(
    mount: MountHandler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.kill(pid_of(mount), signal.SIGKILL)
    wait_until(lambda: not mounting.is_mounted(str(tmp_path / "mount")))
    assert os.listdir(tmp_path / "mount") == []
    wait_until(lambda: "a pushed directory is gone on a host, the others go on" in caplog.text)
    with pytest.raises(Exception, match="killed by signal 9"):
        mount.close()


OWNER = """
import os, signal, sys
import monarch.actor
from monarch.actor import ActorError, this_host
from monarch.actor.process import this_process
from monarch.remotemount import remotemount
mount = remotemount(this_host(), sys.argv[1], sys.argv[2])
mount.open()
print("agent", this_process()._agent.pid, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("victims", [["client"], ["agent"], ["client", "agent"]], ids=" and ".join)
def test_no_mount_outlives_its_owners(source: Path, tmp_path: Path, victims: list[str]) -> None:
    there = str(tmp_path / "mount")
    with start_script(OWNER, args=[str(source), there]) as run:
        agent = int(run.wait_line(r"^agent (\d+)")[1])
        assert mounting.is_mounted(there)
        pids = {"client": run.pid, "agent": agent}
        for victim in reversed(victims):
            os.kill(pids[victim], signal.SIGKILL)
        wait_until(lambda: not mounting.is_mounted(there))
        if "client" in victims:
            wait_until(lambda: is_gone(agent))
        os.kill(run.pid, signal.SIGKILL)


CHAIN = """
import hashlib, os, signal, sys
import monarch.actor
from monarch.actor import Actor, attach_to_workers, endpoint
from monarch.remotemount import remotemount

class Reader(Actor):
    @endpoint
    def digest(self, root):
        import subprocess
        command = f"cd {root} && find . -type f | LC_ALL=C sort | xargs sha256sum | sha256sum"
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        return done.stdout.split()[0], done.stderr

    @endpoint
    def die(self, pid):
        os.kill(pid, signal.SIGKILL)

source, there = sys.argv[1:3]
hosts = attach_to_workers(ca="trust_all_connections", workers=sys.argv[3:])
mount = remotemount(hosts, source, there)
readers = hosts.spawn_procs().spawn("reader", Reader)
mount.open()
print("digests", *{digest for digest, _ in readers.digest.call(there).get(20).values()}, flush=True)
told = mount.statistics()
print("served", *[each.delivery.num_served for each in told], flush=True)
with open(source + "/more", "wb") as file:
    file.write(os.urandom(3 << 20))
readers.slice(hosts=1).die.call_one(told[1].pid).get(10)
try:
    mount.refresh()
except Exception as error:
    print("refresh", type(error).__name__, flush=True)
for rank in (0, 2):
    print("again", *readers.slice(hosts=rank).digest.call_one(there).get(20), flush=True)
"""


def digest_of(root: Path) -> str:
    command = f"cd {root} && find . -type f | LC_ALL=C sort | xargs sha256sum | sha256sum"
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout.split()[0]


def test_a_chain_of_hosts_passes_on_what_each_has(hosts, source: Path, tmp_path: Path) -> None:
    """The same path on three machines. The second asks the first, the third the second; one that dies costs the others nothing."""
    shared = tmp_path / "shared"
    before = digest_of(source)
    a, b, c = hosts[:3]
    with serving(a, 26600), serving(b, 26600), serving(c, 26600):
        urls = [host.url(26600) for host in (a, b, c)]
        with start_script(CHAIN, args=[str(source), str(shared), *urls], prefix=[]) as run:
            assert run.wait_line("^digests (.*)", 40)[1].split() == [before]
            served = list(map(int, run.wait_line("^served (.*)")[1].split()))
            assert served[0] and served[1] and not served[2]
            done = run.finish(40)
            assert "refresh SupervisionError" in done.stdout, "the host that died is told of"
            assert re.findall("^again (.*)$", done.stdout, re.MULTILINE) == [f"{digest_of(source)} "] * 2, done
