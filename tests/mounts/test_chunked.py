"""A chunked tree shows one index after the other at the same nodes, and its readers wait for blocks and for nothing else."""

from __future__ import annotations

import errno
import stat

import pytest

from monarch._mounts.chunked import ChunkedFileSystem, mount_chunked_fuse
from monarch._mounts.filesystem import ROOT
from monarch._mounts.index import BLOCK_SIZE
from mounts.far import Waiter


def attr(mode, size=0, mtime=1.5):
    return {
        "st_atime": mtime,
        "st_ctime": mtime,
        "st_mtime": mtime,
        "st_mode": mode,
        "st_size": size,
        "st_nlink": 1,
        "st_uid": 7,
        "st_gid": 8,
    }


def folder(*names):
    return {"attr": attr(stat.S_IFDIR | 0o755, 4096), "children": list(names)}


def file(offset, length, mtime=1.5):
    return {"attr": attr(stat.S_IFREG | 0o640, length, mtime), "global_offset": offset, "file_len": length}


def link(target):
    return {"attr": attr(stat.S_IFLNK | 0o777, len(target)), "link_target": target}


class Shown:
    """A tree, and a reader of it."""

    def __init__(self, index):
        self.wanted = []
        self.tree = ChunkedFileSystem(index, self.wanted.append)

    def node(self, path):
        found = ROOT
        for name in path.split("/"):
            entry = self.tree.lookup(found, name.encode(), Waiter())
            if isinstance(entry, int):
                return entry
            found = entry.node
        return found

    def start(self, path, offset=0, size=1 << 17):
        return self.start_at(self.node(path), offset, size)

    def start_at(self, node, offset=0, size=1 << 17):
        waiter = Waiter()
        answer = self.tree.read(node, 0, offset, size, waiter)
        if answer is not waiter:
            waiter.answer(answer)
        return waiter

    def deliver(self, block, data=b"", at=0, stale=()):
        self.tree.staging(block).view[at : at + len(data)] = data
        self.tree.receive(block, stale)


def got(waiter):
    return b"".join(bytes(part) for part in waiter.value) if isinstance(waiter.value, list) else waiter.value


def test_names_links_and_attributes_are_those_of_the_index():
    it = Shown({"/": folder("a", "d", "l", "gone"), "/a": file(0, 3), "/d": folder("b"), "/d/b": file(3, 2), "/l": link("d/b")})
    names = [name for name, _ in it.tree.children(ROOT, Waiter())]
    assert names == [b"a", b"d", b"l"]  # "gone" is listed, and nothing is said of it
    found = it.tree.attr(it.node("d/b"), Waiter())
    assert (found.mode, found.size, found.uid, found.gid, found.mtime_ns) == (stat.S_IFREG | 0o640, 2, 7, 8, 1_500_000_000)
    assert it.tree.target(it.node("l"), Waiter()) == b"d/b"
    assert it.node("none") == it.node("d/none") == errno.ENOENT and it.node("a/none") == errno.ENOTDIR
    assert it.tree.children(it.node("a"), Waiter()) == errno.ENOTDIR and it.tree.target(it.node("a"), Waiter()) == errno.EINVAL
    assert it.tree.open(it.node("d"), Waiter()) == got(it.start("d")) == errno.EISDIR and got(it.start("l")) == errno.EINVAL
    assert it.tree.attr(4711, Waiter()) == errno.ESTALE


def test_a_reader_waits_for_its_blocks_which_are_asked_for_once():
    it = Shown({"/": folder("f"), "/f": file(BLOCK_SIZE - 3, 6)})
    first, second, inside = it.start("f"), it.start("f"), it.start("f", 4, 1)
    assert it.wanted == [0, 1] and first.value is None
    it.deliver(1, b"def")
    assert got(inside) == b"e" and first.value is None
    it.deliver(0, b"abc", BLOCK_SIZE - 3)
    assert got(first) == got(second) == b"abcdef"
    assert got(it.start("f", 2, 2)) == b"cd" and got(it.start("f", 5, 100)) == b"f" and got(it.start("f", 6)) == b""
    assert it.wanted == [0, 1]


def test_a_block_that_could_not_be_fetched_is_asked_for_by_the_next_reader():
    it = Shown({"/": folder("f"), "/f": file(0, 1)})
    it.start("f")
    it.tree.retry(0)
    waiter = it.start("f")
    assert it.wanted == [0, 0]
    it.deliver(0, b"x")
    assert got(waiter) == b"x"


def test_a_block_is_kept_and_never_asked_for_again_also_when_no_file_was_in_it_meanwhile():
    first, second = {"/": folder("f"), "/f": file(0, 3)}, {"/": folder("g"), "/g": file(BLOCK_SIZE, 3)}
    it = Shown(first)
    it.deliver(0, b"old")
    for number in range(1, 20):
        it.tree.refresh({"/": folder("g"), "/g": file(number * BLOCK_SIZE, 3)})
        it.deliver(number, b"new")
    it.tree.refresh(first)
    assert got(it.start("f")) == b"old"
    it.tree.refresh(second)
    assert got(it.start("g")) == b"new" and it.wanted == []


def test_who_waits_no_longer_is_not_answered():
    it = Shown({"/": folder("f"), "/f": file(0, 1)})
    waiter = it.start("f")
    waiter.cancelled = True
    it.deliver(0, b"x")
    assert waiter.value is None


def test_a_stale_file_is_an_error_until_the_next_version_and_its_neighbour_is_not():
    index = {"/": folder("a", "b"), "/a": file(0, 2), "/b": file(2, 2)}
    it = Shown(index)
    waiting = it.start("b")
    it.deliver(0, b"aabb", stale=["/b", "/unknown"])
    assert got(waiting) == got(it.start("b")) == errno.EIO and got(it.start("a")) == b"aa"
    it.tree.refresh(index)
    assert got(it.start("b")) == b"bb"


def test_a_block_that_nobody_has_written_is_zeros_unless_it_was_there():
    it = Shown({"/": folder("f"), "/f": file(0, 3)})
    it.tree.receive(0, [])
    assert got(it.start("f")) == b"\0\0\0"
    it.deliver(0, b"abc")
    it.tree.receive(0, [])
    assert got(it.start("f")) == b"abc"


def test_staging_is_the_same_memory_until_the_block_is_received():
    it = Shown({"/": folder("f"), "/f": file(0, 3)})
    assert it.tree.staging(5) is it.tree.staging(5)
    it.deliver(0, b"abc")
    assert bytes(it.tree.staging(0).view[:3]) == b"\0\0\0" and got(it.start("f")) == b"abc"


def test_a_file_that_is_open_shows_the_new_version_from_its_new_place():
    it = Shown({"/": folder("f", "g"), "/f": file(0, 3), "/g": file(3, 1)})
    node, gone = it.node("f"), it.node("g")
    it.deliver(0, b"old!")
    it.deliver(1, b"longer")
    changed = it.tree.refresh({"/": folder("f"), "/f": file(BLOCK_SIZE, 6, mtime=2.5)})
    assert got(it.start_at(node)) == b"longer" and it.node("f") == node
    assert got(it.start_at(gone)) == errno.ESTALE and it.node("g") == errno.ENOENT
    assert {(0, b"", node), (ROOT, b"g", gone)} <= set(changed)


def test_a_reader_that_waits_during_a_refresh_reads_on_in_the_new_version():
    it = Shown({"/": folder("f", "g"), "/f": file(0, 3), "/g": file(0, 3)})
    moved, removed = it.start("f"), it.start("g")
    it.tree.refresh({"/": folder("f"), "/f": file(BLOCK_SIZE, 3)})
    assert got(removed) == errno.ESTALE and moved.value is None and it.wanted == [0, 1]
    it.deliver(1, b"new")
    assert got(moved) == b"new"


def test_a_name_that_becomes_another_kind_of_file_gets_another_node():
    it = Shown({"/": folder("x"), "/x": file(0, 3)})
    before = it.node("x")
    changed = it.tree.refresh({"/": folder("x"), "/x": folder()})
    assert it.node("x") != before and it.tree.attr(before, Waiter()) == errno.ESTALE and (ROOT, b"x", before) in changed
    it.tree.refresh({"/": folder("x"), "/x": file(0, 3)})
    assert it.node("x") == before


def test_what_has_no_root_is_refused():
    with pytest.raises(ValueError, match=r"no directory '/'\n  next:  pass what build_index"):
        ChunkedFileSystem({"/a": file(0, 1)}, print)
    it = Shown({"/": folder()})
    with pytest.raises(ValueError, match="no directory '/'"):
        it.tree.refresh({"/": file(0, 1)})


def test_a_relative_mount_point_is_refused():
    with pytest.raises(RuntimeError, match="mount_point must be an absolute path"):
        mount_chunked_fuse({"/": folder()}, 0, "relative", None)
