"""The tree: nodes over versions, what the kernel must forget, what nobody can read any more."""

from __future__ import annotations

import errno

import pytest

from monarch._mounts.filesystem import ROOT
from monarch._mounts.ranges import Span
from monarch._mounts.tree import Invalidation
from mounts.world import DIRECTORY, FILE, LINK, NOWHERE, SeenTree, made

FIRST = made(
    (0, b"code", DIRECTORY, 4096, NOWHERE),
    (0, b"data", FILE, 100, 0),
    (0, b"link", LINK, 6, NOWHERE),
    (1, b"a.py", FILE, 10, 100),
    (1, b"b.py", FILE, 10, 110),
)


@pytest.fixture
def gone() -> list[Span]:
    return []


@pytest.fixture
def tree(gone):
    return SeenTree(FIRST, gone=gone.extend)


def changed(**files: int | None):
    """FIRST with files moved to new offsets, or removed."""
    rows = {b"data": 0, b"a.py": 100, b"b.py": 110} | {name.replace("_", ".").encode(): offset for name, offset in files.items()}
    top = [(0, b"code", DIRECTORY, 4096, NOWHERE)]
    if rows[b"data"] is not None:
        top.append((0, b"data", FILE, 100, rows[b"data"]))
    top.append((0, b"link", LINK, 6, NOWHERE))
    below = sorted(name for name in rows if name != b"data" and rows[name] is not None)
    return made(*top, *((1, name, FILE, 10, rows[name]) for name in below), total=10_000)


def test_names_lead_to_nodes_and_nodes_to_bytes(tree):
    code = tree.lookup(ROOT, b"code")
    a = tree.lookup(code.node, b"a.py")
    assert tree.file(a.node) == Span(100, 10) and tree.attr(a.node) == a.attr == FIRST.attr(4)
    assert tree.lookup(code.node, b"a.py").node == a.node
    assert tree.target(tree.lookup(ROOT, b"link").node) == b"target"


def test_dots_carry_the_attributes_of_the_parent(tree):
    code = tree.lookup(ROOT, b"code").node
    assert tree.lookup(code, b"..") == (ROOT, FIRST.attr(0)) == tree.lookup(ROOT, b"..")
    assert tree.lookup(code, b".") == (code, FIRST.attr(1))


def test_a_listing_is_in_the_order_of_names_and_names_the_nodes_of_lookup(tree):
    listing = tree.children(ROOT)
    assert [name for name, _ in listing] == [b"code", b"data", b"link"]
    assert [entry for _, entry in listing] == [tree.lookup(ROOT, name) for name, _ in listing]
    assert tree.children(tree.lookup(ROOT, b"code").node)[1][0] == b"b.py"


def test_wrong_questions_get_the_errno_of_linux(tree):
    data, link, code = (tree.lookup(ROOT, name).node for name in (b"data", b"link", b"code"))
    assert tree.lookup(ROOT, b"none") == errno.ENOENT and tree.lookup(data, b"x") == errno.ENOTDIR
    assert tree.children(data) == tree.children(link) == errno.ENOTDIR
    assert tree.target(data) == tree.target(code) == errno.EINVAL
    assert tree.file(code) == errno.EISDIR and tree.file(link) == errno.EINVAL
    asked = (tree.lookup(99, b"x"), tree.attr(99), tree.children(99), tree.target(99), tree.file(99))
    assert set(asked) == {errno.ESTALE}


def test_an_equal_version_forgets_nothing(tree, gone):
    for name in (b"code", b"data", b"none"):
        tree.lookup(ROOT, name)
    assert tree.apply(changed()) == [] and gone == []


def forest(*, added=(), b_at=20, folder_size=4096, in_d=()):
    """Folders a and d; d has a file b and a folder deep with a file c. More files in a move the rows of all behind them."""
    d, deep = 2, 3 + len(added) + 2
    return made(
        (0, b"a", DIRECTORY, 4096, NOWHERE),
        (0, b"d", DIRECTORY, folder_size, NOWHERE),
        (1, b"a", FILE, 10, 0),
        *((1, name, FILE, 10, 1000 + 10 * at) for at, name in enumerate(added)),
        (d, b"b", FILE, 10, b_at),
        (d, b"deep", DIRECTORY, 4096, NOWHERE),
        *((d, name, FILE, 10, 2000) for name in in_d),
        (deep, b"c", FILE, 10, 40),
        total=10_000,
    )


def test_an_unchanged_folder_whose_rows_have_moved_is_what_it_was(gone):
    tree = SeenTree(forest(), gone=gone.extend)
    a, d = (tree.lookup(ROOT, name).node for name in (b"a", b"d"))
    b, deep = (tree.lookup(d, name).node for name in (b"b", b"deep"))
    c = tree.lookup(deep, b"c").node
    assert Invalidation(a, b"new", 0) in tree.apply(forest(added=[b"new", b"newer"]))
    assert [tree.lookup(d, name).node for name in (b"b", b"deep")] == [b, deep] and tree.lookup(deep, b"c").node == c
    assert [name for name, _ in tree.children(d)] == [b"b", b"deep"] and [name for name, _ in tree.children(deep)] == [b"c"]

    assert tree.apply(forest(added=[b"new", b"newer"], folder_size=8192)) == [Invalidation(d, b"", d)]
    assert tree.attr(d).size == 8192
    assert tree.apply(forest(added=[b"new", b"newer"], in_d=[b"e"])) == [Invalidation(d, b"", d), Invalidation(d, b"e", 0)]
    assert [tree.lookup(d, name).node for name in (b"b", b"deep")] == [b, deep]
    tree.apply(forest(added=[b"new", b"newer"], folder_size=8192))
    gone.clear()
    assert Invalidation(d, b"b", b) in tree.apply(forest(b_at=60, folder_size=8192, added=[b"new", b"newer", b"newest"]))
    assert tree.lookup(d, b"b").node != b and tree.file(b) == Span(20, 10)
    assert tree.lookup(deep, b"c").node == c and tree.file(c) == Span(40, 10) and gone == []


def test_a_changed_file_gets_a_new_node_and_the_old_one_is_as_it_was(tree, gone):
    code = tree.lookup(ROOT, b"code").node
    old = tree.lookup(code, b"a.py").node
    assert tree.apply(changed(a_py=500)) == [Invalidation(code, b"a.py", old)]
    new = tree.lookup(code, b"a.py").node
    assert new != old and tree.file(old) == Span(100, 10) and tree.file(new) == Span(500, 10)
    assert tree.lookup(ROOT, b"code").node == code
    assert gone == []
    tree.forget(old, 1)
    assert gone == [Span(100, 10)] and tree.attr(old) == errno.ESTALE


def test_bytes_that_nobody_has_open_go_at_once(tree, gone):
    node = tree.lookup(ROOT, b"data").node
    tree.forget(node, 1)
    tree.apply(changed(data=500, a_py=None))
    assert sorted(gone) == [Span(0, 100), Span(100, 10)]


def test_an_old_node_lives_until_its_last_reference_is_gone(tree, gone):
    node = tree.lookup(ROOT, b"data").node
    tree.lookup(ROOT, b"data")
    tree.remember(node, 3)
    tree.apply(changed(data=500))
    tree.apply(changed(data=900))
    tree.forget(node, 4)
    assert tree.file(node) == Span(0, 100) and Span(0, 100) not in gone
    tree.forget(node, 1)
    assert Span(0, 100) in gone


def test_a_node_of_the_current_version_outlives_its_references(tree):
    node = tree.lookup(ROOT, b"data").node
    tree.forget(node, 1)
    assert tree.lookup(ROOT, b"data").node == node


def test_names_that_come_and_go_are_told_where_the_kernel_looked(tree):
    code = tree.lookup(ROOT, b"code").node
    b = tree.lookup(code, b"b.py").node
    found = tree.apply(changed(b_py=None, c_py=500))
    assert set(found) == {Invalidation(code, b"b.py", b), Invalidation(code, b"c.py", 0), Invalidation(code, b"", code)}
    assert tree.lookup(code, b"b.py") == errno.ENOENT and [name for name, _ in tree.children(code)] == [b"a.py", b"c.py"]


def test_directories_that_the_kernel_never_saw_are_not_mentioned(tree):
    assert tree.apply(changed(a_py=500, c_py=600)) == []


def test_other_attributes_keep_the_node(tree):
    data = tree.lookup(ROOT, b"data")
    columns = changed().columns
    kinds = [kind._replace(mode=0o100600) if kind.mode == FILE else kind for kind in columns.kinds]
    found = tree.apply(type(FIRST)(columns._replace(kinds=kinds), 10_000))
    assert found == [Invalidation(ROOT, b"data", data.node)]
    assert tree.lookup(ROOT, b"data").node == data.node and tree.attr(data.node).mode == 0o100600


@pytest.mark.parametrize("now", [(0, b"code", FILE, 10, 900), (0, b"code", LINK, 6, NOWHERE)], ids=["file", "link"])
def test_a_directory_that_became_something_else_is_another_node(tree, gone, now):
    code = tree.lookup(ROOT, b"code").node
    a = tree.lookup(code, b"a.py").node
    found = tree.apply(made(now, total=10_000))
    assert Invalidation(ROOT, b"code", code) in found
    assert tree.lookup(ROOT, b"code").node != code
    assert tree.lookup(code, b"a.py") == errno.ENOENT and tree.children(code) == []
    assert tree.file(a) == Span(100, 10) and Span(100, 10) not in gone
    tree.forget(a, 1)
    assert Span(100, 10) in gone


def test_a_link_with_another_target_is_another_node(tree):
    link = tree.lookup(ROOT, b"link").node
    columns = changed().columns
    tree.apply(type(FIRST)(columns._replace(targets={3: b"elsewhere"}), 10_000))
    assert tree.target(tree.lookup(ROOT, b"link").node) == b"elsewhere" and tree.target(link) == b"target"


def test_bytes_that_come_back_under_another_name_are_not_gone(tree, gone):
    node = tree.lookup(ROOT, b"data").node
    tree.apply(made((0, b"moved", FILE, 100, 0)))
    tree.forget(node, 1)
    assert Span(0, 100) not in gone
    tree.apply(made())
    assert Span(0, 100) in gone
