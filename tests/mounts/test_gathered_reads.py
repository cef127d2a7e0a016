"""Bytes of far files: what is fetched for a read, what is not fetched twice, and that no read has bytes of two versions."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given, settings
from hypothesis.strategies import data, integers, lists, sampled_from

from monarch._mounts import gathered_reads
from mounts.far import Host, Mounted, Waiter, joined

W = 1 << 16


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    """Windows of 64 KiB, and digests for all of them."""
    monkeypatch.setattr(gathered_reads, "WINDOW_BYTES", W)
    monkeypatch.setattr(gathered_reads, "_WORTH_A_DIGEST", 1)
    monkeypatch.setattr(gathered_reads, "_WITH_OPEN_BYTES", W)


def some(size, seed=1):
    block = bytes((index * 7 + seed) & 255 for index in range(1021))
    return (block * (size // len(block) + 1))[:size]


def fetched(host):
    """Windows that were asked for, in order."""
    return [want.offset // W for wants in host.wants for want in wants]


def test_pieces_of_a_file_are_its_pieces():
    content = some(3 * W + 100)
    it = Mounted(Host({"file": content}))
    for offset, size in ((0, 10), (W - 1, 2), (W, W), (0, 4 * W), (3 * W + 90, 100), (3 * W + 100, 5), (9 * W, 5), (5, 0)):
        assert it.read("file", offset, size) == content[offset : offset + size]


def test_a_look_at_the_end_fetches_the_end_only():
    host = Host({"file": some(100 * W)})
    it = Mounted(host)
    assert it.read("file", 100 * W - 10, 10) == some(100 * W)[-10:]
    assert fetched(host) == [99]


def test_who_reads_on_is_run_ahead_of_by_a_few_windows():
    host = Host({"file": some(20 * W)})
    it = Mounted(host)
    node = it.lookup("file").node
    it.ask("read", node, 0, 0, 100)
    assert fetched(host) == [0]
    it.ask("read", node, 0, 100, 100)
    assert fetched(host) == [0, 1, 2]
    it.ask("read", node, 0, W, 100)
    assert fetched(host) == [0, 1, 2, 3]
    it.ask("read", node, 0, 19 * W, 100)
    it.ask("read", node, 0, 19 * W + 100, 100)
    assert fetched(host) == [0, 1, 2, 3, 19]


def test_readers_of_the_same_share_one_fetch():
    host = Host({"file": some(W)})
    it = Mounted(host)
    node = it.lookup("file").node
    host.holds_back = True
    waiting = [it.ask("read", node, 0, offset, 10) for offset in (0, 10, 20)]
    assert len(host.asked) == 1
    host.asked[0].tell()
    assert [joined(waiter.value) for waiter in waiting] == [some(W)[at : at + 10] for at in (0, 10, 20)]


def test_a_reader_after_a_change_does_not_get_what_was_asked_for_before_it():
    host = Host({"file": some(W)})
    it = Mounted(host)
    node = it.lookup("file").node
    host.holds_back = True
    early = it.ask("read", node, 0, 0, 10)
    host.asked[0].look()
    host.write("file", some(W, 2))
    late = it.ask("read", node, 0, 0, 10)
    assert len(host.asked) == 2
    for asked in host.asked:
        asked.tell()
    assert joined(early.value) == some(W)[:10] and joined(late.value) == some(W, 2)[:10]


def test_an_append_moves_only_what_is_new():
    content = some(3 * W)
    host = Host({"file": content})
    it = Mounted(host)
    assert it.read("file", 0, 4 * W) == content
    before = it.fs.statistics().fetched_bytes
    host.write("file", content + b"more")
    assert it.read("file", 0, 4 * W) == content + b"more"
    after = it.fs.statistics()
    assert after.fetched_bytes - before == 4 and after.kept_bytes == 3 * W


@pytest.mark.parametrize("change", ["same size", "shorter", "longer", "other file"])
def test_a_change_is_read_whole(change):
    content = some(2 * W + 50)
    host = Host({"file": content})
    it = Mounted(host)
    assert it.read("file", 0, 4 * W) == content
    new = {"same size": some(2 * W + 50, 3), "shorter": some(W + 7, 3), "longer": some(3 * W, 3), "other file": some(2 * W + 50, 3)}[change]
    (host.replace if change == "other file" else host.write)("file", new)
    assert it.read("file", 0, 4 * W) == new


def test_a_read_over_two_windows_is_of_one_version():
    host = Host({"file": some(2 * W)})
    it = Mounted(host)
    node = it.lookup("file").node
    host.holds_back = True
    waiting = it.ask("read", node, 0, W - 10, 20)
    first, second = host.asked
    first.look()
    host.is_quiet = True  # nobody has been told yet
    host.write("file", some(2 * W, 5))
    first.tell()
    second.tell()
    assert waiting.value is None
    host.asked[2].tell()
    assert joined(waiting.value) == some(2 * W, 5)[W - 10 : W + 10]


def test_memory_is_bounded():
    content = some(40 * W)
    it = Mounted(Host({"file": content}), cache_bytes=5 * W)
    for index in range(40):
        assert it.read("file", index * W, W) == content[index * W : (index + 1) * W]
        assert it.fs.statistics().cached_bytes <= 5 * W


def test_only_so_many_fetches_are_under_way_and_all_end():
    host = Host({"file": some(40 * W)})
    it = Mounted(host)
    node = it.lookup("file").node
    host.holds_back = True
    waiting = [it.ask("read", node, 0, index * W * 2, 10) for index in range(20)]
    assert len(host.asked) == gathered_reads._MOST_UNDER_WAY
    waiting[15].cancelled = True
    for asked in host.asked:  # grows as they are answered
        asked.tell()
    assert all(isinstance(waiter, Waiter) and (waiter.value is not None or waiter.cancelled) for waiter in waiting)
    assert 30 not in fetched(host)


def test_a_file_that_is_another_one_by_now_is_not_opened():
    host = Host({"file": some(10)})
    it = Mounted(host)
    node = it.lookup("file").node
    host.is_quiet = True
    host.replace("file", b"another")
    assert it.ask("open", node) == errno.ESTALE
    assert it.read("file") == b"another"


def test_an_open_file_that_is_here_asks_nobody():
    host = Host({"file": some(10), "empty": b"", "big": some(3 * W)})
    it = Mounted(host)
    for name, size, count in (("file", 10, 1), ("empty", 0, 0), ("big", 3 * W, 4)):
        before = len(host.wants)
        it.read(name, 0, size), it.read(name, 0, size)
        assert len(host.wants) - before == count


@settings(max_examples=100)
@given(steps=lists(sampled_from(["read", "append", "rewrite", "replace", "answer", "look"]), max_size=30), dice=data())
def test_every_read_is_a_part_of_some_version_that_was_there_meanwhile(steps, dice):
    versions = [some(2 * W + 100)]
    host = Host({"file": versions[0]})
    it = Mounted(host)
    reads = []
    for seed, step in enumerate(steps):
        host.holds_back = False
        if step == "read":
            entry = it.lookup("file")
            host.holds_back = dice.draw(sampled_from([True, False]))
            offset, size = dice.draw(integers(0, 2 * W)), dice.draw(integers(1, W))
            reads.append((len(versions) - 1, offset, size, it.ask("read", entry.node, 0, offset, size)))
        elif step == "answer" and host.asked:
            host.asked.pop(dice.draw(integers(0, len(host.asked) - 1))).tell()
        elif step == "look" and host.asked:
            dice.draw(sampled_from(host.asked)).look()
        elif step in ("append", "rewrite", "replace"):
            new = versions[-1] + b"more" if step == "append" else some(dice.draw(integers(1, 3 * W)), seed + 2)
            versions.append(new)
            (host.replace if step == "replace" else host.write)("file", new)
    host.holds_back = False
    while host.asked:
        host.asked.pop().tell()
    for first, offset, size, value in reads:
        found = value.value if isinstance(value, Waiter) else value
        assert found == errno.EIO or joined(found) in [version[offset : offset + size] for version in versions[first:]]
