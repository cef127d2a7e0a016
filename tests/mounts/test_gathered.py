"""A gathered tree is what the hosts have now: asked for once, kept while somebody guards it, and never what was there before a change."""

from __future__ import annotations

import errno
import stat

import pytest
from hypothesis import given, settings
from hypothesis.strategies import data, integers, lists, sampled_from

from monarch._mounts.gathered_nodes import LEASE_S
from monarch._mounts.watches import What
from mounts.far import Host, Mounted, Waiter, joined


def tree():
    return {"file": b"content", "sub": {"inner": b"inner", "deep": {}}, "secret": errno.EACCES}


def test_one_folder_is_the_root():
    it = Mounted(Host(tree()))
    assert it.names() == ["file", "secret", "sub"] and it.names("sub") == ["deep", "inner"]
    assert it.read("file") == b"content" and it.read("sub/inner") == b"inner"
    assert it.lookup("none") == errno.ENOENT and it.lookup("file/none") == errno.ENOTDIR
    assert it.lookup("secret") == errno.EACCES
    assert it.ask("read", it.lookup("sub").node, 0, 0, 1) == it.ask("open", it.lookup("sub").node) == errno.EISDIR
    assert it.ask("children", it.lookup("file").node) == errno.ENOTDIR and it.ask("target", it.lookup("file").node) == errno.EINVAL
    assert it.ask("attr", 4711) == it.ask("children", 4711) == errno.ESTALE


def test_several_folders_are_directories_of_the_root():
    it = Mounted(Host({"a": b"1"}), Host({"b": b"2"}), Host({}))
    assert it.names() == ["hosts_0", "hosts_1", "hosts_2"]
    assert it.names("hosts_0") == ["a"] and it.read("hosts_1/b") == b"2" and it.names("hosts_2") == []
    assert it.lookup("hosts_3") == errno.ENOENT
    root = it.ask("attr", 1)
    assert stat.S_ISDIR(root.mode) and stat.S_IMODE(root.mode) == 0o555 and root.nlink == 2


def test_attributes_are_without_write_bits_and_of_whoever_has_mounted():
    it = Mounted(Host(tree()))
    attr = it.lookup("file").attr
    assert (stat.S_IMODE(attr.mode), attr.size, attr.uid, attr.gid, attr.nlink) == (0o444, 7, 7, 8, 1)
    assert attr.mtime_ns == attr.ctime_ns == attr.atime_ns == 1_000_000_000


def test_a_folder_that_is_not_there_yet_is_empty():
    host = Host({})
    host.content = None
    it = Mounted(host)
    assert it.names() == [] and stat.S_ISDIR(it.ask("attr", 1).mode) and it.lookup("file") == errno.ENOENT
    host.content = tree()
    host.tell((b"", What.ALL))
    assert it.names() == ["file", "secret", "sub"] and it.read("file") == b"content"
    host.content = None
    host.tell((b"", What.ALL))
    assert it.names() == [] and it.lookup("file") == errno.ENOENT


# ------------------------------------------------------------------------------------------------------------ what is kept


def test_what_is_guarded_is_asked_for_once():
    it = Mounted(Host(tree()))
    for _ in range(3):
        it.names(), it.names("sub"), it.lookup("sub/inner"), it.ask("attr", 1), it.read("file"), it.lookup("none")
        it.time_s += 1000
    assert it.lookup("file").attr.lasts
    assert sorted(it.hosts[0].log) == [("listing", b""), ("listing", b"sub"), ("read", b"file"), ("stat", b"")]


def test_what_nobody_guards_is_asked_for_again_soon():
    host = Host(tree(), guarded=False)
    it = Mounted(host)
    assert it.lookup("file").attr.size == 7 and not it.lookup("file").attr.lasts
    host.write("file", b"longer content")
    assert it.lookup("file").attr.size == 7
    it.time_s += 2 * LEASE_S
    assert it.lookup("file").attr.size == 14 and it.read("file") == b"longer content"
    assert it.names() == ["file", "secret", "sub"]
    host.replace("new", b"")
    it.time_s += 2 * LEASE_S
    assert it.names() == ["file", "new", "secret", "sub"]


@pytest.mark.parametrize("seen", ["lookup", "names"])
def test_every_change_is_seen_once_it_was_told(seen):
    host = Host(tree())
    it = Mounted(host)
    look = {"lookup": lambda: it.lookup("file"), "names": lambda: it.names() and it.lookup("file")}[seen]
    first = look()
    host.write("file", b"longer content")
    assert it.notices[-1] == first.node
    assert look().attr.size == 14 and look().node == first.node
    host.replace("file", b"another")
    assert it.renamed == [(1, b"file")]
    assert look().node != first.node and it.read("file") == b"another"
    assert it.ask("attr", first.node) == errno.ESTALE or it.ask("attr", first.node).size == 14
    host.remove("file")
    assert it.lookup("file") == errno.ENOENT and "file" not in it.names()
    host.replace("file", {"inner": b""})
    assert stat.S_ISDIR(it.lookup("file").attr.mode) and it.names("file") == ["inner"]


def test_a_directory_that_has_moved_takes_along_what_is_below():
    host = Host(tree())
    it = Mounted(host)
    inner = it.lookup("sub/inner")
    host.content["elsewhere"] = host.content.pop("sub")
    host.tell((b"sub", What.NAME), (b"elsewhere", What.NAME))
    assert it.lookup("sub") == errno.ENOENT and it.read("elsewhere/inner") == b"inner"
    assert it.ask("attr", inner.node) == errno.ESTALE or it.ask("attr", inner.node).size == 5
    assert it.ask("lookup", inner.node, b"x") in (errno.ESTALE, errno.ENOTDIR)


def test_a_directory_that_is_watched_no_longer_is_asked_for_again():
    host = Host(tree())
    it = Mounted(host)
    it.names("sub"), it.lookup("sub/inner")
    host.is_quiet = True
    host.write("sub/inner", b"longer inner")
    it.fs.changed(0, [(b"sub", What.UNWATCHED)])
    assert it.lookup("sub/inner").attr.size == 12


@pytest.mark.parametrize("change", [(b"sub/inner", What.CONTENT), (b"sub/inner", What.NAME), (b"sub", What.NAME), (b"", What.ALL)])
@pytest.mark.parametrize("question", ["stat", "listing"])
def test_what_was_seen_before_a_change_is_not_kept_after_it(change, question):
    host = Host(tree())
    it = Mounted(host)
    sub = it.lookup("sub").node
    host.holds_back = True
    waiting = it.ask("lookup", sub, b"inner") if question == "stat" else it.ask("children", sub)
    (asked,) = host.asked
    asked.look()
    host.is_quiet = True
    host.write("sub/inner", b"longer inner")
    it.fs.changed(0, [change])
    again = it.ask("lookup", sub, b"inner") if question == "stat" else None
    host.holds_back = False
    asked.tell()
    assert waiting.value is not None
    if again is not None:  # it has come after the change, and does not get what was before
        assert isinstance(again, Waiter) and again.value is None
        host.asked[-1].tell()
        assert again.value.attr.size == 12
    assert it.lookup("sub/inner").attr.size == 12


def test_who_asks_for_the_same_at_the_same_time_shares_the_question():
    host = Host(tree())
    it = Mounted(host)
    host.holds_back = True
    waiting = [it.ask("lookup", 1, b"file") for _ in range(5)] + [it.ask("children", 1) for _ in range(5)]
    waiting[1].cancelled = True
    assert [(asked.kind, asked.path) for asked in host.asked] == [("stat", b"file"), ("listing", b"")]
    for asked in host.asked:
        asked.tell()
    assert len({waiter.value.node for waiter in waiting[:1] + waiting[2:5]}) == 1
    assert all(len(waiter.value) == 3 for waiter in waiting[5:])


def test_an_open_file_that_is_replaced_is_still_what_it_was():
    host = Host(tree())
    it = Mounted(host)
    old = it.lookup("file")
    opened = it.ask("open", old.node)
    host.replace("file", b"another one")
    new = it.lookup("file")
    assert new.node != old.node and it.ask("attr", old.node).size == 7
    assert joined(it.ask("read", old.node, opened.handle, 0, 10)) == errno.EIO  # its host has it no longer
    it.fs.nodes.knows = lambda number: False
    it.fs.release(opened.handle)
    assert it.ask("attr", old.node) == errno.ESTALE


def test_what_the_kernel_forgets_goes_and_comes_again():
    it = Mounted(Host(tree()))
    first = it.lookup("sub/inner")
    count = len(it.fs.nodes)
    it.fs.forget(first.node)
    assert len(it.fs.nodes) == count - 1
    assert it.read("sub/inner") == b"inner"
    it.fs.forget(1)
    assert it.names() == ["file", "secret", "sub"]


# ---------------------------------------------------------------------------------------------------------------- ends


def test_a_host_that_ends_is_an_error_of_its_own_folder():
    dead, alive = Host(tree()), Host(tree())
    it = Mounted(dead, alive)
    it.read("hosts_0/file"), it.read("hosts_1/file")
    it.fs.lose(0)
    assert it.names() == ["hosts_0", "hosts_1"]
    assert it.lookup("hosts_0/file") == errno.EIO and it.names("hosts_0") == errno.EIO
    assert it.names("hosts_1") == ["file", "secret", "sub"] and it.read("hosts_1/file") == b"content"
    assert it.fs.statistics().lost == [0]


@pytest.mark.parametrize("method", ["lookup", "children", "attr", "read"])
def test_who_waits_for_a_host_that_ends_gets_an_error(method):
    host = Host(tree())
    it = Mounted(host)
    node = it.lookup("file").node
    host.holds_back = True
    it.fs.changed(0, [(b"", What.ALL)])
    args = {"lookup": (1, b"file"), "children": (1,), "attr": (node,), "read": (node, node, 0, 10)}[method]
    waiting = it.ask(method, *args)
    host.asked[0].die()
    assert waiting.value == errno.EIO
    host.holds_back = False
    assert it.read("file") == b"content"


PATHS = ["file", "sub/inner", "sub/new", "new"]
VERBS = ["write", "replace", "remove", "look", "list", "read", "answer", "later"]


@settings(max_examples=150)
@given(steps=lists(sampled_from(VERBS), max_size=30), dice=data(), guarded=sampled_from([True, False]))
def test_whatever_happens_it_is_seen_once_it_was_told(steps, dice, guarded):
    host = Host(tree(), guarded=guarded)
    it = Mounted(host)
    waiting = []
    for number, verb in enumerate(steps):
        path = dice.draw(sampled_from(PATHS))
        exists = host._at(path.encode()) is not None
        host.holds_back = dice.draw(sampled_from([True, False])) if verb in ("look", "list", "read") else False
        if verb == "write" and exists:
            host.write(path, b"%d" % number * dice.draw(integers(0, 5)))
        elif verb == "replace":
            host.replace(path, b"new %d" % number)
        elif verb == "remove" and exists:
            host.remove(path)
        elif verb in ("look", "list", "read"):
            method = {"look": it.lookup, "list": lambda path: it.names("sub"), "read": it.read}[verb]
            try:
                waiting.append(method(path))
            except AttributeError:  # a directory of the path is being waited for
                continue
        elif verb == "answer" and host.asked:
            host.asked.pop(dice.draw(integers(0, len(host.asked) - 1))).tell()
        elif verb == "later" and host.asked:
            dice.draw(sampled_from(host.asked)).look()
    host.holds_back = False
    for asked in host.asked:
        asked.tell()
    assert all(each.value is not None for each in waiting if isinstance(each, Waiter))
    it.time_s += 2 * LEASE_S
    for path in PATHS:
        content = host._at(path.encode())
        assert it.read(path) == (errno.ENOENT if content is None else content)
    it.time_s += 2 * LEASE_S
    assert it.names("sub") == sorted(host.content["sub"]) and it.names() == sorted(host.content)
