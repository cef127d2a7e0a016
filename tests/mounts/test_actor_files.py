"""Files of an actor: each use asks it, an errno of its is the reader's, and what it raises is EIO."""

from __future__ import annotations

import errno
import logging
import stat

import pytest

from monarch._mounts.actor_files import ActorFileSystem, mount_read_only_filesystem
from monarch._mounts.filesystem import ROOT
from monarch._runtime.future import Future
from mounts.far import Waiter

MTIME = 2.5


def attributes(mode, size=0):
    times = dict.fromkeys(("st_atime", "st_mtime", "st_ctime"), MTIME)
    return {"st_mode": mode, "st_size": size, "st_nlink": 1, "st_uid": 7, "st_gid": 8, **times}


class Endpoint:
    """An endpoint that answers at once, as a future."""

    def __init__(self, method):
        self._method = method

    def call_one(self, *args):
        try:
            return Future._completed(self._method(*args))
        except ValueError as exc:
            return Future._failed(exc)


class Actor:
    """Files by path; a directory has None, and an errno stands for itself."""

    def __init__(self, files):
        self.files = files
        self.asked = []
        self.getattr_path, self.readdir_path, self.read_path = map(Endpoint, (self._getattr, self._readdir, self._read))

    def _getattr(self, path):
        self.asked.append(path)
        content = self.files.get(path, errno.ENOENT)
        if isinstance(content, int):
            return content
        return attributes(stat.S_IFDIR | 0o755) if content is None else attributes(stat.S_IFREG | 0o644, len(content))

    def _readdir(self, path):
        if self.files[path] is not None:
            return errno.ENOTDIR
        prefix = path.rstrip("/") + "/"
        return [".", "..", "ghost"] + [each[len(prefix) :] for each in self.files if each.startswith(prefix) and each != path]

    def _read(self, path, size, offset):
        if self.files[path] == b"broken":
            raise ValueError("this file can't be read")
        return self.files[path][offset : offset + size]


@pytest.fixture
def actor():
    return Actor({"/": None, "/a": b"content", "/d": None, "/d/b": b"inner", "/secret": errno.EACCES, "/broken": b"broken"})


@pytest.fixture
def tree(actor):
    return ActorFileSystem(actor, lambda call: call())


def ask(method, *args):
    waiter = Waiter()
    answer = method(*args, waiter)
    return waiter.value if answer is waiter else answer


def find(tree, path):
    node = ROOT
    for name in path.split("/"):
        entry = ask(tree.lookup, node, name.encode())
        if isinstance(entry, int):
            return entry
        node = entry.node
    return node


def test_names_attributes_and_bytes_are_what_the_actor_says(tree):
    assert [name for name, _ in ask(tree.children, ROOT)] == [b"a", b"d", b"d/b", b"broken"]  # neither the ghost nor the secret
    node = find(tree, "d/b")
    found = ask(tree.attr, node)
    assert (found.mode, found.size, found.uid, found.gid, found.mtime_ns) == (stat.S_IFREG | 0o644, 5, 7, 8, 2_500_000_000)
    assert ask(tree.read, node, 0, 2, 100) == [b"ner"] and not ask(tree.open, node).keep_cache
    assert find(tree, "none") == errno.ENOENT and find(tree, "secret") == errno.EACCES
    assert ask(tree.children, find(tree, "a")) == errno.ENOTDIR and ask(tree.target, find(tree, "a")) == errno.EINVAL
    tree.release(0)


def test_a_path_has_one_node_until_the_kernel_forgets_it(tree, actor):
    node = find(tree, "a")
    assert find(tree, "a") == node
    tree.forget(node)
    assert ask(tree.attr, node) == ask(tree.read, node, 0, 0, 1) == ask(tree.open, node) == ask(tree.lookup, node, b"x") == errno.ESTALE
    assert find(tree, "a") != node
    actor.asked.clear()
    find(tree, "d/b")
    find(tree, "d/b")
    assert actor.asked == ["/d", "/d/b"] * 2


def test_what_the_actor_raises_is_an_error_that_is_logged_once(tree, caplog):
    node = find(tree, "broken")
    with caplog.at_level(logging.WARNING):
        assert ask(tree.read, node, 0, 0, 1) == ask(tree.read, node, 0, 0, 1) == errno.EIO
    assert caplog.text.count("this file can't be read") == 1


def test_an_empty_directory_and_nonsense(tree, actor, caplog):
    actor.readdir_path = Endpoint(lambda path: [])
    assert ask(tree.children, ROOT) == []
    actor.getattr_path = Endpoint(lambda path: {"st_mode": 0o644})
    assert ask(tree.attr, ROOT) == errno.EIO and "does not answer as it should: 'st_" in caplog.text


def test_an_actor_without_a_root_directory_is_not_mounted(actor, tmp_path):
    actor.files = {"/": b"a file"}
    with pytest.raises(RuntimeError, match=r"the actor says of its root .*, which is no directory\n  next:  let getattr_path"):
        mount_read_only_filesystem(actor, str(tmp_path))
