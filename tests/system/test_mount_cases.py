"""Mounts as users have them: versions under readers, odd mount points, processes that die at bad moments."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from monarch._mounts import mounting
from monarch._mounts.mount_actor import Mode
from monarch.actor import this_host
from monarch.remotemount import remotemount
from system.script import run_script
from system.waiting import wait_until

MIB = 1 << 20
BIG_BYTES = 20 * MIB
NUM_VERSIONS = 11
pytestmark = pytest.mark.skipif(bool(mounting.fuse_problem()), reason=f"no FUSE here: {mounting.fuse_problem()}")


BYTES = os.urandom(BIG_BYTES)


def version_of_big(number: int) -> bytes:
    """Other bytes at every place."""
    return BYTES[number * 4099 :] + BYTES[: number * 4099]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    root.mkdir()
    (root / "module.py").write_text("value = 0\n")
    (root / "module.py").chmod(0o640)
    (root / "link.py").symlink_to("module.py")
    (root / "big").write_bytes(version_of_big(0))
    return root


@pytest.fixture
def there(tmp_path: Path):
    point = tmp_path / "mount"
    yield point
    assert not mounting.is_mounted(str(point))


READ_ALL_THE_TIME = """
import sys, zlib
print("reading", flush=True)
while True:
    with open(sys.argv[1], "rb") as file:
        print(zlib.crc32(file.read()), flush=True)
"""


def digest(path: Path) -> str:
    return str(zlib.crc32(path.read_bytes()))


def replace(path: Path, data: bytes, *, by_rename: bool) -> None:
    """Other bytes, of the same length and with the same modification time."""
    before = os.stat(path)
    target = path.with_name("new") if by_rename else path
    with open(target, "wb" if by_rename else "r+b") as file:
        file.write(data)
    os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))
    if by_rename:
        os.replace(target, path)


def test_a_refresh_shows_whole_versions_only_while_readers_go_on(source: Path, there: Path) -> None:
    mount = remotemount(this_host(), str(source), str(there))
    mount.open()
    wait_until(lambda: all(told.store.missing_bytes == 0 for told in mount.statistics()))  # open() does not wait for big files
    known = [digest(source / "big")]
    reader = subprocess.Popen([sys.executable, "-SEc", READ_ALL_THE_TIME, str(there / "big")], stdout=subprocess.PIPE)
    try:
        assert reader.stdout is not None and reader.stdout.readline() == b"reading\n"
        for version in range(1, NUM_VERSIONS):
            replace(source / "big", version_of_big(version), by_rename=bool(version % 2))
            known.append(digest(source / "big"))
            mount.refresh()
            assert digest(there / "big") == known[-1], "the next open sees the version of the refresh"
        assert reader.poll() is None
    finally:
        reader.kill()
    seen = [line.decode() for line in reader.communicate(timeout=10)[0].splitlines()[:-1]]
    assert set(seen) <= set(known) and len(set(seen)) > 2

    (source / "module.py").write_text("value = 1\n")
    mount.refresh()
    done = subprocess.run([sys.executable, "-c", "import link; print(link.value)"], env={"PYTHONPATH": str(there)}, capture_output=True)
    assert done.stdout == b"1\n", done.stderr
    assert os.readlink(there / "link.py") == "module.py" and os.stat(there / "link.py").st_mode == 0o100640
    with pytest.raises(OSError) as caught:
        (there / "module.py").write_text("value = 2\n")
    assert caught.value.errno == errno.EROFS
    mount.close()


def test_a_mount_point_that_holds_a_file_has_it_back_after_close(source: Path, there: Path) -> None:
    there.mkdir()
    (there / "mine").write_text("stays")
    mount = remotemount(this_host(), str(source), str(there))
    mount.open()
    assert sorted(os.listdir(there)) == ["big", "link.py", "module.py"]
    mount.close()
    assert os.listdir(there) == ["mine"] and (there / "mine").read_text() == "stays"


def test_a_mount_point_of_another_mount_is_refused_and_that_goes_on(source: Path, there: Path) -> None:
    mount, other = (remotemount(this_host(), str(source), str(there)) for _ in range(2))
    mount.open()
    with pytest.raises(Exception, match=r"a directory is mounted at .* already\n  next:  close\(\) that mount first"):
        other.open()
    assert (there / "module.py").read_text() == "value = 0\n"
    mount.close()
    other.open()
    other.close()


def test_a_mount_point_that_is_a_file_is_refused_in_words(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("stays")
    mount = remotemount(this_host(), str(source), str(tmp_path / "file"))
    with pytest.raises(Exception, match="file"):
        mount.open()
    assert (tmp_path / "file").read_text() == "stays"


@pytest.mark.parametrize(("mode", "where"), [("fuse", "."), ("fuse", ".."), ("copy", "."), ("copy", "inner")])
def test_a_directory_is_not_shown_over_itself(source: Path, mode: Mode, where: str) -> None:
    mount = remotemount(this_host(), str(source), str(source / where), mode=mode)
    with pytest.raises(Exception, match=r"(?s)can't be shown at .*pass another mount point"):
        mount.open()
    assert sorted(os.listdir(source)) == ["big", "link.py", "module.py"]


@pytest.mark.parametrize("covered", [[], ["below"]], ids=["made", "there"])
def test_a_mount_point_in_the_source_is_empty_in_it_from_the_beginning(source: Path, covered: list[str]) -> None:
    inner = source / "deep" / "mnt"
    inner.parent.mkdir()
    for name in covered:
        inner.mkdir()
        (inner / name).write_text("what the mount covers")
    (source / "deep" / "beside").write_text("seen")
    with remotemount(this_host(), str(source), str(inner)) as mount:
        for _ in range(2):
            assert (inner / "module.py").read_text() == "value = 0\n" and (inner / "deep" / "beside").read_text() == "seen"
            assert os.listdir(inner / "deep" / "mnt") == []
            (source / "later").write_text("a change")
            mount.refresh()
        assert (inner / "later").read_text() == "a change"
    assert os.listdir(inner) == covered


def test_relative_paths_are_those_of_the_call(source: Path, there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(source.parent)
    mount = remotemount(this_host(), "source", "mount")
    monkeypatch.chdir("/")
    mount.open()
    assert (mount.sourcepath, mount.mntpoint) == ("source", "mount") and (there / "module.py").read_text() == "value = 0\n"
    mount.close()


def test_a_mount_whose_process_was_killed_is_made_anew(source: Path, there: Path) -> None:
    mount = remotemount(this_host(), str(source), str(there))
    mount.open()
    os.kill(mount.statistics()[0].pid, signal.SIGKILL)
    again = remotemount(this_host(), str(source), str(there))  # the stale mount may still be there
    again.open()
    assert digest(there / "big") == digest(source / "big")
    again.close()
    with pytest.raises(Exception, match="killed by signal 9"):
        mount.close()


WITHOUT_HELPER = """
    import os, sys, time
    os.environ["PATH"] = "/nowhere"
    from monarch.actor import this_host
    from monarch.remotemount import remotemount
    print("user", os.geteuid())
    mount = remotemount(this_host(), sys.argv[1], sys.argv[2])
    began = time.monotonic()
    try:
        mount.open()
    except Exception as error:
        print("refused", error)
    print("soon", time.monotonic() - began < 5)
    mount.close()
"""


def namespaces_of_users() -> bool:
    return subprocess.run(["unshare", "--user", "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not namespaces_of_users(), reason="becomes a user without rights: needs user namespaces")
def test_without_a_helper_an_ordinary_user_is_told_which_one(source: Path, tmp_path: Path) -> None:
    done = run_script(WITHOUT_HELPER, args=[str(source), str(tmp_path / "mount")], prefix=["unshare", "--user"], timeout=20)
    assert "user 0" not in done.stdout
    assert re.search(r"(?s)refused .*fusermount3.*mode=\"copy\"", done.stdout), done
    assert "soon True" in done.stdout
