"""Every change under a watched directory is told under each path that leads there, and what can't be watched says so."""

from __future__ import annotations

import os
import queue

import pytest

from monarch._mounts import watches as module
from monarch._mounts.watches import Watches, What

WAIT_S = 5.0


class Told(queue.SimpleQueue):
    """Batches of changes."""

    def until(self, *wanted):
        """All changes until each of `wanted` has come."""
        seen = []
        while not set(wanted) <= set(seen):
            seen += self.get(timeout=WAIT_S)
        return seen


@pytest.fixture
def told():
    return Told()


@pytest.fixture
def watches(tmp_path, told):
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    (tmp_path / "file").write_bytes(b"1")
    watches = Watches(os.fsencode(tmp_path), told.put)
    yield watches
    watches.close()
    watches.close()


CHANGES = {
    "write": (lambda root: (root / "file").write_bytes(b"2"), (b"file", What.CONTENT)),
    "append": (lambda root: (root / "file").open("ab").write(b"2"), (b"file", What.CONTENT)),
    "truncate": (lambda root: os.truncate(root / "file", 0), (b"file", What.CONTENT)),
    "chmod": (lambda root: (root / "file").chmod(0o600), (b"file", What.CONTENT)),
    "create": (lambda root: (root / "new").touch(), (b"new", What.NAME)),
    "mkdir": (lambda root: (root / "new").mkdir(), (b"new", What.NAME)),
    "delete": (lambda root: (root / "file").unlink(), (b"file", What.NAME)),
    "rename": (lambda root: (root / "file").rename(root / "new"), (b"file", What.NAME)),
    "replace": (lambda root: ((root / "new").write_bytes(b"3"), (root / "new").rename(root / "file")), (b"file", What.NAME)),
    "link": (lambda root: (root / "new").symlink_to("file"), (b"new", What.NAME)),
    "bytes in the name": (lambda root: open(os.fsencode(root) + b"/\xff\n \\", "wb").close(), (b"\xff\n \\", What.NAME)),
    "itself": (lambda root: root.chmod(0o700), (b"", What.CONTENT)),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_a_change_is_told(tmp_path, watches, told, change):
    assert watches.watch(b"")
    make, expected = CHANGES[change]
    make(tmp_path)
    told.until(expected)


def test_what_is_not_watched_is_not_told(tmp_path, watches, told):
    assert watches.watch(b"") and not watches.is_watched(b"sub")
    (tmp_path / "sub" / "new").touch()
    (tmp_path / "file").touch()
    assert not [path for path, _ in told.until((b"file", What.CONTENT)) if path.startswith(b"sub/")]


def test_a_thousand_writes_are_few_changes(tmp_path, watches, told):
    watches.watch(b"")
    with open(tmp_path / "file", "ab", buffering=0) as file:
        for _ in range(1000):
            file.write(b"x")
    (tmp_path / "last").touch()
    assert len(told.until((b"last", What.NAME))) < 50


def test_a_directory_that_goes_is_watched_no_longer(tmp_path, watches, told):
    assert watches.watch(b"sub") and watches.watch(b"sub/deep") and watches.watch(b"")
    (tmp_path / "sub").rename(tmp_path / "elsewhere")
    told.until((b"sub", What.NAME), (b"elsewhere", What.NAME))
    assert not watches.is_watched(b"sub") and not watches.is_watched(b"sub/deep")
    assert not watches.watch(b"sub") and watches.watch(b"elsewhere/deep")
    (tmp_path / "elsewhere" / "deep" / "new").touch()
    told.until((b"elsewhere/deep/new", What.NAME))
    (tmp_path / "elsewhere" / "deep" / "new").unlink()
    (tmp_path / "elsewhere" / "deep").rmdir()
    told.until((b"elsewhere/deep", What.UNWATCHED))


def test_a_directory_with_two_paths_tells_of_both(tmp_path, watches, told):
    (tmp_path / "link").symlink_to("sub")
    assert watches.watch(b"sub") and watches.watch(b"link")
    (tmp_path / "sub" / "new").touch()
    told.until((b"sub/new", What.NAME), (b"link/new", What.NAME))


def test_the_one_used_longest_ago_goes_when_there_are_too_many(tmp_path, watches, told, monkeypatch):
    monkeypatch.setattr(module, "MOST", 2)
    assert watches.watch(b"") and watches.watch(b"sub") and watches.watch(b"") and watches.watch(b"sub/deep")
    assert len(watches) == 2 and not watches.is_watched(b"sub")
    (tmp_path / "file").touch()
    told.until((b"sub", What.UNWATCHED))


def test_a_folder_that_is_replaced_is_another_one(tmp_path, told):
    root = tmp_path / "root"
    watches = Watches(os.fsencode(root), told.put)
    assert not watches.watch(b"")
    root.mkdir()
    told.until((b"", What.ALL))
    assert watches.watch(b"")
    (root / "new").touch()
    told.until((b"new", What.NAME))
    watches.close()


@pytest.mark.parametrize("root", [b"/proc", b"/sys", b"/no/where"])
def test_what_does_not_tell_is_not_watched(told, root):
    watches = Watches(root, told.put)
    assert not watches.watch(b"") and len(watches) == 0
    watches.close()
