"""A pushed directory as readers see it: whole versions, refreshes while files are open, sources that change or die."""

from __future__ import annotations

import errno
import os
import queue
import random
import shutil
import stat
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monarch._mounts.filesystem import ROOT
from monarch._mounts.index import BLOCK_SIZE
from monarch._mounts.snapshot import Snapshot
from monarch._mounts.store import Store
from mounts.world import DIRECTORY, FILE, MIB, NOWHERE, Answer, Mounted, World, bytes_of, made, memfds, resident_kib


def names(world: World, path: str = "") -> list[str]:
    return [os.fsdecode(name) for name, _ in world.fs.children(world.node(path) if path else ROOT, Answer())]


# ------------------------------------------------------------------------------------------------------------------ reading


def test_files_folders_and_links_look_as_they_do_at_the_source(world):
    (world.path / "a" / "b").mkdir(parents=True)
    (world.path / "a" / "b" / "deep").write_bytes(b"deep")
    (world.path / "a" / "empty").touch()
    (world.path / "run").write_bytes(b"#!")
    os.chmod(world.path / "run", 0o750)
    os.link(world.path / "run", world.path / "run2")
    (world.path / "dangling").symlink_to("../no/where")
    world.start()
    assert names(world) == ["a", "dangling", "run", "run2"] and names(world, "a") == ["b", "empty"]
    assert world.read("a/b/deep") == b"deep" and world.read("a/empty") == b""
    assert world.fs.target(world.node("dangling"), Answer()) == b"../no/where"
    for path in ("a", "a/b", "a/b/deep", "run", "run2", "dangling"):
        attr, status = world.fs.attr(world.node(path), Answer()), os.lstat(world.path / path)
        assert attr[:6] == (status.st_mode, status.st_size, status.st_nlink, status.st_uid, status.st_gid, status.st_mtime_ns)
        assert attr.ctime_ns == status.st_ctime_ns
    assert world.fs.lookup(world.node("a/b"), b"..", Answer()).attr == world.fs.attr(world.node("a"), Answer())
    assert world.read("missing") == errno.ENOENT


def test_partial_reads_are_parts(world):
    data = random.Random(1).randbytes(3 * MIB)
    (world.path / "big").write_bytes(data)
    node = world.start().node("big")
    for offset, size in [(0, 10), (MIB - 5, 10), (2 * MIB + 5, 2 * MIB), (3 * MIB, 10), (4 * MIB, 10)]:
        assert world.read_node(node, offset, size) == data[offset : offset + size]


def test_names_of_any_bytes_and_deep_trees_are_served(world):
    name = b"\xff\xfe-\xc3\xa4-\n"
    folder = world.path
    for _ in range(200):
        folder = folder / "d"
    folder.mkdir(parents=True)
    Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_bytes(b"deep")
    world.start()
    assert world.read("d/" * 200 + os.fsdecode(name)) == b"deep"
    world.fs.refresh(Snapshot.decode(world.fs.snapshot.encode()))
    assert world.read("d/" * 200 + os.fsdecode(name)) == b"deep"


def test_opening_a_folder_or_a_link_is_an_error(world):
    (world.path / "a").mkdir()
    (world.path / "link").symlink_to("a")
    world.start()
    assert world.fs.open(world.node("a"), Answer()) == world.read("a") == errno.EISDIR
    assert world.fs.open(world.node("link"), Answer()) == world.read("link") == errno.EINVAL


def test_a_file_that_is_all_here_is_opened_with_its_descriptor(world):
    (world.path / "big").write_bytes(b"b" * 2 * MIB)
    node = world.start().node("big")
    early = world.fs.open(node, Answer())
    world.deliver()
    second = world.fs.open(node, Answer())
    assert early.backing_fd is second.backing_fd is None, "one way at a time"
    world.fs.release(early.handle)
    world.fs.release(second.handle)
    opened = world.fs.open(node, Answer())
    assert os.pread(opened.backing_fd, 3, 2 * MIB - 3) == b"bbb" and opened.keep_cache
    world.fs.release(opened.handle)
    world.fs.release(12345)


def opened_with(world: World, path: str) -> bytes:
    """The bytes that come with an opening."""
    opened = world.fs.open(world.node(path), Answer())
    world.fs.release(opened.handle)
    return bytes_of(list(opened.content))


def test_a_small_file_is_opened_with_its_bytes_once_they_are_here(world):
    data = {"small": b"s" * 5000, "most": b"m" * (128 << 10), "more": b"n" * (129 << 10), "big": b"b" * MIB, "empty": b""}
    for name, content in data.items():
        (world.path / name).write_bytes(content)
    world.start()
    assert {name: opened_with(world, name) for name in data} == dict.fromkeys(data, b"")
    world.deliver()
    assert {name: opened_with(world, name) for name in data} == data | dict.fromkeys(["more", "big"], b"")


def test_a_file_is_given_again_when_the_kernel_has_forgotten_it(world):
    (world.path / "file").write_bytes(b"content")
    node = world.start().node("file")
    world.deliver()
    assert [bytes_of(list(world.fs.open(node, Answer()).content)) for _ in range(2)] == [b"content", b""]
    world.fs.forget(node, 1)
    assert opened_with(world, "file") == b"content"


def test_a_file_that_failed_is_not_given(world):
    (world.path / "file").write_bytes(b"content")
    world.start().deliver()
    world.store.failed("/file", errno.EIO)
    assert opened_with(world, "file") == b"" and world.read("file") == errno.EIO


def test_a_node_is_given_the_bytes_of_its_own_version(world):
    (world.path / "file").write_bytes(b"first")
    (world.path / "other").write_bytes(b"other")
    old = world.start().node("file")
    world.deliver()
    (world.path / "file").write_bytes(b"second")
    world.refresh()
    world.deliver()
    assert bytes_of(list(world.fs.open(old, Answer()).content)) == b"first" and opened_with(world, "file") == b"second"
    world.fs.forget(old, 1)
    assert world.fs.open(old, Answer()) == errno.ESTALE


def test_a_huge_sparse_file_takes_no_memory_until_it_is_read(world):
    size = 8 << 30
    with open(world.path / "huge", "wb") as file:
        file.truncate(size)
        file.seek(size - 4)
        file.write(b"tail")
    before = resident_kib()
    node = world.start().node("huge")
    assert world.fs.attr(node, Answer()).size == size and resident_kib() == before
    assert world.read_node(node, size - 6, 100) == b"\0\0tail"
    assert world.read_node(node, 5 << 30, 3) == b"\0\0\0"
    assert resident_kib() - before <= 2200


def test_thirty_thousand_files_are_shown_and_refreshed():
    def version(number: int) -> Snapshot:
        rows = [(0, b"d%04d" % at, DIRECTORY, 0, NOWHERE) for at in range(300)]
        rows += [(1 + at // 100, b"m%02d" % (at % 100), FILE, 100, at * 100) for at in range(30_000)]
        rows[300 + 27_777] = (278, b"m77", FILE, 100, number * BLOCK_SIZE)
        return made(*rows, total=10 * BLOCK_SIZE)

    used = time.process_time()
    store = Store(lambda offset, length: None)
    fs = Mounted(version(1), store)
    nodes = {name: entry.node for name, entry in fs.children(ROOT, Answer())}
    files = {(name, inner): entry.node for name, node in nodes.items() for inner, entry in fs.children(node, Answer())}
    old = files[b"d0277", b"m77"]
    fs.remember(old, 1)
    assert fs.refresh(version(2)) == [(nodes[b"d0277"], b"m77", old)]
    assert len(files) == 30_000 and store.statistics().missing_bytes == 30_001 * 100
    fs.forget(old, 1)
    assert store.statistics().missing_bytes == 30_000 * 100
    assert time.process_time() - used < 5  # idle: 0.6
    store.close()


# ------------------------------------------------------------------------------------------------------------------ refresh


def test_unchanged_content_stays_and_changed_content_is_seen(world):
    for name in "abc":
        (world.path / name).write_bytes(name.encode() * 10)
    world.start().deliver()
    (world.path / "b").write_bytes(b"B" * 20)
    (world.path / "c").unlink()
    (world.path / "d").write_bytes(b"d" * 5)
    world.refresh()
    assert names(world) == ["a", "b", "d"]
    assert [world.read(name) for name in "abcd"] == [b"a" * 10, b"B" * 20, errno.ENOENT, b"d" * 5]


def test_nothing_changed_sends_nothing(world):
    (world.path / "a").write_bytes(b"a")
    world.start()
    assert world.refresh() == []


@pytest.mark.parametrize("size", [10, 200, 3 * MIB])
def test_a_file_grows_and_shrinks(world, size):
    (world.path / "a").write_bytes(b"first" * 20)
    world.start().deliver()
    for data in (b"x" * size, b"yy", b"", b"z" * size):
        (world.path / "a").write_bytes(data)
        world.refresh()
        assert world.read("a") == data and world.fs.attr(world.node("a"), Answer()).size == len(data)


def test_an_open_file_stays_the_old_version_whole(world):
    old, new = b"o" * (2 * MIB), b"n" * (2 * MIB + 1)
    (world.path / "a").write_bytes(old)
    node = world.start().node("a")
    world.deliver()
    assert world.read_node(node, 0, MIB) == old[:MIB]
    (world.path / "a").write_bytes(new)
    (invalidation,) = [entry for entry in world.refresh() if entry.name]
    assert invalidation == (ROOT, b"a", node)
    assert world.read("a") == new
    assert world.read_node(node, MIB, MIB) == old[MIB:]
    world.fs.forget(node, 1)
    world.fs.forget(world.node("a"), 1)
    assert world.store.statistics().resident_bytes == len(new)


def test_an_open_file_that_was_deleted_is_read_to_its_end(world):
    (world.path / "a").write_bytes(b"alive")
    node = world.start().node("a")
    world.deliver()
    (world.path / "a").unlink()
    world.refresh()
    assert world.read("a") == errno.ENOENT and world.read_node(node) == b"alive"
    world.fs.forget(node, 1)
    assert world.store.statistics().num_segments == 0


def test_several_rapid_refreshes_each_show_their_version(world):
    node = None
    for number in range(20):
        (world.path / "a").write_bytes(b"%04d" % number)
        if node is None:
            world.start()
        world.refresh()
        node = world.node("a")
        assert world.read_node(node) == b"%04d" % number
        world.fs.forget(node, 1)
    assert world.store.statistics().resident_bytes == 4


def test_one_of_many_files_changes(world):
    for number in range(300):
        (world.path / f"f{number}").write_bytes(b"%d" % number)
    world.start().deliver()
    (world.path / "f77").write_bytes(b"new")
    world.refresh()
    assert world.deliver() == 3
    assert all(world.read(f"f{number}") == (b"new" if number == 77 else b"%d" % number) for number in range(300))


def test_the_same_bytes_at_other_places_are_served(world):
    """As after a layout that started afresh: a snapshot may put everything elsewhere."""
    (world.path / "a").write_bytes(b"aaaa")
    world.start().deliver()
    moved = made((0, b"a", FILE, 4, 5 * BLOCK_SIZE), total=6 * BLOCK_SIZE)
    old = world.node("a")
    world.fs.refresh(moved)
    world._put(5 * BLOCK_SIZE, b"aaaa")
    assert world.read("a") == world.read_node(old) == b"aaaa"


def test_a_file_becomes_a_folder_and_back(world):
    (world.path / "a").write_bytes(b"file")
    world.start().deliver()
    (world.path / "a").unlink()
    (world.path / "a").mkdir()
    (world.path / "a" / "b").write_bytes(b"inner")
    world.refresh()
    assert world.read("a/b") == b"inner" and names(world, "a") == ["b"]
    shutil.rmtree(world.path / "a")
    (world.path / "a").symlink_to("x")
    world.refresh()
    assert world.fs.target(world.node("a"), Answer()) == b"x" and world.read("a/b") == errno.ENOTDIR


def test_permissions_and_times_change_without_a_new_node(world):
    (world.path / "a").write_bytes(b"a")
    node = world.start().node("a")
    world.deliver()
    os.chmod(world.path / "a", 0o700)
    os.utime(world.path / "a", ns=(7, 7))
    assert (ROOT, b"a", node) in world.refresh()
    attr = world.fs.attr(world.node("a"), Answer())
    assert world.node("a") == node and stat.S_IMODE(attr.mode) == 0o700 and attr.mtime_ns == 7
    assert world.deliver() == 0


# -------------------------------------------------------------------------------------------------------------------- stale


def test_what_is_here_serves_the_old_version_between_a_change_and_the_refresh_and_the_rest_is_an_error(world):
    (world.path / "here").write_bytes(b"here")
    (world.path / "late").write_bytes(b"late" * MIB)
    world.start()
    assert world.read("here") == b"here"
    for name in ("here", "late"):
        (world.path / name).write_bytes(b"other")
    assert world.read("here") == b"here" and world.read("late") == errno.EIO
    world.refresh()
    assert world.read("here") == world.read("late") == b"other"


def test_a_parked_read_is_woken_by_data(world):
    (world.path / "a").write_bytes(b"a" * 3 * MIB)
    world.start()
    reader = world.start_read(world.node("a"), MIB, 5)
    assert not reader.given
    world.serve()
    assert reader.value == b"aaaaa"


def test_a_parked_read_of_a_stale_file_is_an_error_and_its_neighbour_is_served(world):
    for name in ("a", "b", "c"):
        (world.path / name).write_bytes(name.encode() * 10)
    world.start()
    readers = [world.start_read(world.node(name)) for name in ("a", "b", "c")]
    (world.path / "b").unlink()
    world.serve()
    assert [reader.value for reader in readers] == [b"a" * 10, errno.EIO, b"c" * 10]


def test_a_stale_file_is_an_error_again_and_again_until_the_refresh(world):
    (world.path / "a").write_bytes(b"a")
    world.start()
    os.utime(world.path / "a", ns=(5, 5))
    assert [world.read("a") for _ in range(3)] == [errno.EIO] * 3
    world.refresh()
    assert world.read("a") == b"a"


def test_a_parked_read_of_an_old_version_ends_when_its_bytes_are_lost(world):
    (world.path / "a").write_bytes(b"a" * 2 * MIB)
    world.start()
    node = world.node("a")
    assert world.read_node(node, 0, 5) == b"aaaaa"
    reader = world.start_read(node, MIB, 5)
    (world.path / "a").write_bytes(b"b" * 2 * MIB)
    world.refresh()
    world.serve()
    assert reader.value == errno.EIO and world.read_node(node, 0, 5) == errno.EIO
    assert world.read("a", MIB, 5) == b"bbbbb"


def test_a_dead_source_wedges_no_reader(world):
    (world.path / "a").write_bytes(b"a" * 3 * MIB)
    world.start()
    reader = world.start_read(world.node("a"))
    world.store.disconnect(errno.EHOSTUNREACH)
    assert reader.value == world.read("a") == errno.EHOSTUNREACH
    assert names(world) == ["a"]


@pytest.mark.cpu_limit(30)
def test_twenty_changes_of_the_same_size_and_time_are_each_seen_whole(world):
    rng = random.Random(3)
    path, versions = world.path / "big", []

    def change() -> None:
        versions.append(rng.randbytes(4 * MIB))
        path.write_bytes(versions[-1])
        os.utime(path, ns=(10**18, 10**18))

    change()
    world.start()
    for _ in range(20):
        node = world.node("big")
        half = world.read_node(node, 0, 2 * MIB)
        change()
        rest = world.read_node(node, 2 * MIB, 2 * MIB)
        assert half == versions[-2][: 2 * MIB] and rest in (errno.EIO, versions[-2][2 * MIB :])
        world.fs.forget(node, 1)
        world.refresh()
        assert world.read("big") == versions[-1]
    assert world.store.statistics().resident_bytes == 4 * MIB


@pytest.mark.timeout(60)
def test_readers_in_threads_see_whole_versions_while_others_refresh_and_deliver(world):
    versions = [bytes([number]) * (MIB + 1000 * number) for number in range(25)]
    (world.path / "big").write_bytes(versions[0])
    requests: queue.SimpleQueue = queue.SimpleQueue()
    world.start()
    world.store.connect(lambda offset, length: requests.put((offset, length)))
    done, wrong, seen = threading.Event(), [], set()

    def deliver() -> None:
        while (request := requests.get()) is not None:
            world.deliver(*request)

    def read() -> None:
        while not done.is_set():
            node, came = world.node("big"), threading.Event()
            answer = Answer()
            answer.answer = lambda value, answer=answer, came=came: (answer.given.append(bytes_of(value)), came.set())
            answer.fail = answer.answer
            found = world.fs.read(node, 0, 0, 1 << 40, answer)
            if found is answer:
                if not came.wait(20):
                    wrong.append("waits for ever")
                    return
                found = answer.value
            data = bytes_of(found)
            if data in versions:
                seen.add(data[0])
            elif data != errno.EIO:
                wrong.append(data)
            world.fs.forget(node, 1)

    threads = [threading.Thread(target=target) for target in (deliver, read, read, read)]
    for thread in threads:
        thread.start()
    for version in versions[1:]:
        (world.path / "big").write_bytes(version)
        world.refresh(settle=False)
    last = version[0]
    give_up_s = time.monotonic() + 20
    while last not in seen and time.monotonic() < give_up_s:
        done.wait(0.01)
    done.set()
    for thread in threads[1:]:
        thread.join()
    requests.put(None)
    threads[0].join()
    assert not wrong and last in seen
    world.refresh()
    assert world.store.statistics().num_segments == 1


# ------------------------------------------------------------------------------------------- any order of everything at once


class Life:
    """Somebody edits, somebody refreshes, bytes trickle in, readers read: each sees one version of what it opened.

    Each method is a step, with chance of its own.
    """

    PATHS = ("a", "d/c")
    SIZES = (0, 700, MIB - 1, MIB + 7, 2 * MIB + 3)

    def __init__(self) -> None:
        self.memfds = memfds()
        self.folder = tempfile.mkdtemp()
        self.world = World(Path(self.folder) / "source").start()
        self.ever: dict[str, set[bytes]] = {path: set() for path in self.PATHS}
        """All that a path has ever held."""
        self.at_scan: dict[str, bytes] = {}
        self.seen: dict[int, tuple[str, list[tuple[int, bytes]]]] = {}
        """Node that is open to its path, and all that was read of it."""
        self.readers: list[tuple[int, int, int, Answer]] = []
        self.references: dict[int, int] = {}

    def write(self, chance: random.Random) -> None:
        path, way = chance.choice(self.PATHS), chance.choice(["in place", "renamed", "same time"])
        target = self.world.path / path
        target.parent.mkdir(exist_ok=True)
        old = target.stat() if target.exists() else None
        size = old.st_size if old and chance.random() < 0.5 else chance.choice(self.SIZES)
        data = chance.randbytes(size)
        place = target if way != "renamed" else target.with_name("new")
        place.write_bytes(data)
        if way == "renamed":
            os.replace(place, target)
        if way == "same time" and old is not None:
            os.utime(target, ns=(old.st_mtime_ns, old.st_mtime_ns))
        self.ever[path].add(data)

    def patch(self, chance: random.Random) -> None:
        path = chance.choice(self.PATHS)
        target = self.world.path / path
        if target.exists() and target.stat().st_size:
            status = target.stat()
            with open(target, "r+b") as file:
                file.seek(chance.choice([0, 5, 699, MIB, 2 * MIB]) % status.st_size)
                file.write(chance.randbytes(1))
            os.utime(target, ns=(status.st_mtime_ns, status.st_mtime_ns))
            self.ever[path].add(target.read_bytes())

    def delete(self, chance: random.Random) -> None:
        path = chance.choice([*self.PATHS, "d"])
        if path == "d":
            shutil.rmtree(self.world.path / "d", ignore_errors=True)
        else:
            (self.world.path / path).unlink(missing_ok=True)

    def touch(self, chance: random.Random) -> None:
        path = self.world.path / chance.choice(self.PATHS)
        if path.exists():
            os.chmod(path, chance.choice([0o600, 0o644, 0o755]))

    def rename(self, chance: random.Random) -> None:
        old, new = chance.sample(self.PATHS, 2)
        if (self.world.path / old).exists():
            (self.world.path / new).parent.mkdir(exist_ok=True)
            os.replace(self.world.path / old, self.world.path / new)
            self.ever[new].add((self.world.path / new).read_bytes())

    def refresh(self, chance: random.Random) -> None:
        self.world.refresh()
        self.at_scan = {path: (self.world.path / path).read_bytes() for path in self.PATHS if (self.world.path / path).exists()}
        for path in set(self.PATHS) - self.at_scan.keys():
            assert self.world.read(path) in (errno.ENOENT, errno.ENOTDIR)

    def open(self, chance: random.Random) -> None:
        path = chance.choice(self.PATHS)
        entry = self.world.entry(path)
        if not isinstance(entry, int):
            self.references[entry.node] = self.references.get(entry.node, 0) + 1
            self.seen.setdefault(entry.node, (path, []))
            opened = self.world.fs.open(entry.node, Answer())
            self.world.fs.release(opened.handle)
            if opened.content:
                answer = Answer()
                answer.answer(list(opened.content))
                self.readers.append((entry.node, 0, 1 << 40, answer))

    def read(self, chance: random.Random) -> None:
        if self.seen:
            node = chance.choice(list(self.seen))
            offset, size = chance.choice([0, 5, 690, MIB - 3, MIB + 5, 2 * MIB]), chance.choice([1, 100, MIB, 3 * MIB])
            self.readers.append((node, offset, size, self.world.start_read(node, offset, size)))

    def close(self, chance: random.Random) -> None:
        if self.seen:
            node = chance.choice(list(self.seen))
            self.references[node] -= 1
            if not self.references[node]:
                for reader in self.readers:
                    reader[3].cancelled |= reader[0] == node
                self.readers = [reader for reader in self.readers if reader[0] != node]
                del self.seen[node], self.references[node]
            self.world.fs.forget(node, 1)

    def arrive(self, chance: random.Random) -> None:
        missing = self.world.store.missing(0, self.world.fs.snapshot.total_bytes)
        if missing:
            span = chance.choice(missing)
            self.world.deliver(span.offset + chance.randrange(span.length), chance.randrange(1, 2 * MIB))

    def serve(self, chance: random.Random) -> None:
        self.world.serve()
        assert all(reader[3].given for reader in self.readers), "a reader waits for ever"

    def refresh_and_look(self, chance: random.Random) -> None:
        self.refresh(chance)
        for path, data in self.at_scan.items():
            assert self.world.read(path) == data

    def check(self) -> None:
        """Whether what readers got since the last time is of one version."""
        waiting = []
        for node, offset, size, answer in self.readers:
            if not answer.given:
                waiting.append((node, offset, size, answer))
            elif isinstance(answer.value, int):
                assert answer.value == errno.EIO
            else:
                path, parts = self.seen[node]
                parts.append((offset, answer.value))
                length = self.world.fs.attr(node, Answer()).size
                assert len(answer.value) == max(min(size, length - offset), 0)
                whole = [data for data in self.ever[path] if len(data) == length]
                assert any(all(data[at:].startswith(part) for at, part in parts) for data in whole), f"{path}: bytes of two versions"
        self.readers = waiting

    def end(self) -> None:
        self.world.serve()
        self.check()
        assert not self.readers
        for node, count in self.references.items():
            self.world.fs.forget(node, count)
        self.world.refresh()
        statistics = self.world.store.statistics()
        current = sum(span.length for span in self.world.fs.snapshot.spans)
        assert statistics.resident_bytes + statistics.missing_bytes == current and statistics.num_waiting == 0
        self.world.close()
        assert memfds() == self.memfds

    def clean(self) -> None:
        self.world.close()
        shutil.rmtree(self.folder)


WEIGHTS = {Life.read: 6, Life.open: 3, Life.write: 3, Life.patch: 3, Life.refresh: 3, Life.arrive: 3, Life.serve: 2, Life.close: 2}
STEPS = [step for step, weight in WEIGHTS.items() for _ in range(weight)] + [Life.delete, Life.touch, Life.rename, Life.refresh_and_look]
steps = st.tuples(st.sampled_from(STEPS), st.integers(0, 1 << 32))


@pytest.mark.cpu_limit(60)
@pytest.mark.timeout(120)
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(steps=st.lists(steps, min_size=60, max_size=150))
def test_in_any_order_of_everything_a_reader_sees_one_version(steps):
    life = Life()
    try:
        for step, seed in steps:
            step(life, random.Random(seed))
            life.check()
        life.end()
    finally:
        life.clean()
