"""The source: what counts as a change, what is read, and what is known of it."""

from __future__ import annotations

import itertools
import mmap
import os
import threading

import pytest

from monarch._mounts import hashing, source
from monarch._mounts.hashing import PIECE_BYTES
from monarch._mounts.index import BLOCK_SIZE, build_index
from monarch._mounts.snapshot import Snapshot
from monarch._mounts.source import Diverged, Source

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_bytes(b"a = 1\n")
    (tmp_path / "code" / "b.py").write_bytes(b"b = 1\n")
    (tmp_path / "big").write_bytes(os.urandom(2 * MIB) + b"end")
    (tmp_path / "link").symlink_to("code/a.py")
    return tmp_path


@pytest.fixture(params=hashing.algorithms())
def algorithm(request):
    return request.param


@pytest.fixture(params=["racy", "settled"])
def clock(request, monkeypatch):
    """Whether files look as if they had changed within a tick of the scan."""
    monkeypatch.setattr(source, "RACY_NS", 10**15 if request.param == "racy" else -(10**12))
    return request.param


def read(source: Source, path: str) -> bytes | list[Diverged]:
    span = source.snapshot.span(source.snapshot.find(path))
    into = bytearray(span.length)
    return source.read_piece(span.offset, span.length, memoryview(into)) or bytes(into)


def rewrite(path, data: bytes) -> None:
    """Other bytes, the same size and modification time."""
    status = os.stat(path)
    assert len(data) == status.st_size
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_holes_are_told_and_not_read(folder, algorithm):
    with open(folder / "sparse", "wb") as file:
        file.truncate(3 << 30)
        file.seek((1 << 30) + 5)
        file.write(b"data")
    source = Source(str(folder), algorithm=algorithm)
    source.scan()
    span = source.snapshot.span(source.snapshot.find("/sparse"))
    at = span.offset + (1 << 30)
    assert source.read_within(span.offset, 1 << 30) == ([], [(span.offset, 1 << 30)])
    parts, holes = source.read_within(at - PIECE_BYTES, 3 * PIECE_BYTES)
    assert holes == [(at - PIECE_BYTES, PIECE_BYTES), (at + PIECE_BYTES, PIECE_BYTES)]
    assert parts == [(at, bytes(5) + b"data" + bytes(PIECE_BYTES - 9))]
    source.read_within(span.end - PIECE_BYTES, PIECE_BYTES)
    os.utime(folder / "sparse")  # what was sent of it is compared with what is there
    assert source.scan().span(source.snapshot.find("/sparse")) == span
    with open(folder / "sparse", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    assert source.scan().span(source.snapshot.find("/sparse")) != span


def test_a_first_scan_is_the_index(folder):
    snapshot = Source(str(folder)).scan()
    index = Snapshot.of_index(build_index(str(folder), {}))
    assert {snapshot.path(row): snapshot.span(row) for row in range(len(snapshot))} == {
        index.path(row): index.span(row) for row in range(len(index))
    }
    assert snapshot.total_bytes == index.total_bytes and snapshot == Snapshot.decode(snapshot.encode())


def test_a_path_is_taken_from_where_the_program_is_now(folder, monkeypatch):
    monkeypatch.chdir(folder)
    source = Source("code")
    monkeypatch.chdir("/")
    assert source.path == str(folder / "code") and source.scan().find("/a.py")


@pytest.mark.parametrize(
    ("path", "error", "said"),
    [
        ("", ValueError, "is empty"),
        ("big", NotADirectoryError, "is no directory"),
        ("missing", FileNotFoundError, r"is not there \(any more\): .*missing(?s:.*)next:  make it, or name another"),
    ],
)
def test_a_path_that_is_no_directory_is_refused(folder, path, error, said):
    with pytest.raises(error, match=said):
        Source(path and str(folder / path)).scan()


def test_reading_before_a_scan_says_what_to_do(folder):
    with pytest.raises(ValueError, match=r"has not been looked at\n  next:  call scan\(\) first"):
        Source(str(folder)).read_piece(0, 1, memoryview(bytearray(1)))


def test_nothing_changed_is_the_same_snapshot(folder, clock, algorithm):
    source = Source(str(folder), algorithm=algorithm)
    first = source.scan()
    assert isinstance(read(source, "/big"), bytes)
    for _ in range(2):
        again = source.scan()
        assert again is first
    (folder / "code" / "a.py").write_bytes(b"a = 22\n")
    assert source.scan() is not first


def test_what_is_read_is_what_is_there(folder, algorithm):
    source = Source(str(folder), algorithm=algorithm)
    snapshot = source.scan()
    into = bytearray(snapshot.total_bytes)
    assert source.read_piece(0, len(into), memoryview(into)) == []
    for path in ("code/a.py", "code/b.py", "big"):
        span = snapshot.span(snapshot.find(path))
        assert into[span.offset : span.end] == (folder / path).read_bytes()


def test_the_same_size_and_time_do_not_hide_a_change(folder, clock, algorithm):
    source = Source(str(folder), algorithm=algorithm)
    first = source.scan()
    read(source, "/code/a.py")
    rewrite(folder / "code" / "a.py", b"a = 2\n")
    second = source.scan()
    assert first.span(first.find("/code/a.py")) != second.span(second.find("/code/a.py"))
    assert first.span(first.find("/code/b.py")) == second.span(second.find("/code/b.py"))
    assert read(source, "/code/a.py") == b"a = 2\n"


def test_the_rest_of_a_long_write_that_leaves_no_times_is_seen(folder, algorithm, monkeypatch):
    monkeypatch.setattr(source, "RACY_NS", -(10**10))
    monkeypatch.setattr(source, "WRITING_NS", 10**6)
    with open(folder / "big", "r+b") as file, mmap.mmap(file.fileno(), 2 * MIB) as written:
        written[0] = 1
        pushed = Source(str(folder), algorithm=algorithm)
        before = pushed.scan()
        assert read(pushed, "/big")[0] == 1
        written[0] = 2
        assert pushed.scan().span(before.find("/big")) != before.span(before.find("/big"))
        assert read(pushed, "/big")[0] == 2


def test_a_file_that_was_only_touched_or_written_anew_stays_where_it_was(folder, clock):
    source = Source(str(folder))
    first = source.scan()
    read(source, "/code/a.py")
    os.chmod(folder / "code" / "a.py", 0o600)
    (folder / "code" / "new").write_bytes(b"b = 1\n")
    os.replace(folder / "code" / "new", folder / "code" / "b.py")  # nobody has a byte of the old one
    second = source.scan()
    for path in ("/code/a.py", "/code/b.py"):
        assert second.span(second.find(path)) == first.span(first.find(path))
    assert second.mode(second.find("/code/a.py")) == 0o100600 and read(source, "/code/a.py") == b"a = 1\n"
    assert source.changed_since(first)[:2] == ([], [])


def test_a_big_file_keeps_its_place_while_what_was_sent_of_it_is_the_same(folder, clock, algorithm):
    source = Source(str(folder), algorithm=algorithm)
    first = source.scan()
    span = first.span(first.find("/big"))
    into = bytearray(MIB)
    source.read_piece(span.offset + MIB, MIB, memoryview(into))
    data = bytearray((folder / "big").read_bytes())
    data[:3] = b"xyz"
    rewrite(folder / "big", data)
    second = source.scan()
    assert (second.span(second.find("/big")) == span) is (algorithm == hashing.XXH3 or clock == "racy")
    source.read_piece(second.span(second.find("/big")).offset, MIB, memoryview(into))
    data[5:8] = b"xyz"
    rewrite(folder / "big", data)
    third = source.scan()
    assert third.span(third.find("/big")) != second.span(second.find("/big"))
    assert read(source, "/big") == bytes(data)


def test_changes_go_behind_the_end_on_a_block_boundary(folder):
    source = Source(str(folder))
    source.scan()
    (folder / "code" / "c.py").write_bytes(b"new")
    snapshot = source.scan()
    assert snapshot.span(snapshot.find("/code/c.py")) == (BLOCK_SIZE, 3) and snapshot.total_bytes == BLOCK_SIZE + 3


def truncated(path):
    os.truncate(path, 3)


def missing(path):
    path.unlink()


def rewritten(path):
    rewrite(path, b"a = 9\n")


def replaced(path):
    path.with_name("other").write_bytes(b"a = 9\n")
    os.replace(path.with_name("other"), path)


def a_fifo_now(path):
    path.unlink()
    os.mkfifo(path)


def a_link_now(path):
    path.unlink()
    path.symlink_to("b.py")


def folder_replaced(path):
    path.parent.rename(path.parent.with_name("old"))
    path.parent.symlink_to("old")
    os.truncate(path, 2)


CHANGES = [truncated, missing, rewritten, replaced, a_fifo_now, a_link_now, folder_replaced]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_file_that_changed_since_the_scan_diverges_and_its_neighbours_do_not(folder, change):
    source = Source(str(folder))
    snapshot = source.scan()
    change(folder / "code" / "a.py")
    a, b = (snapshot.span(snapshot.find(path)) for path in ("/code/a.py", "/code/b.py"))
    into = bytearray(b"x" * (BLOCK_SIZE // 64))
    lost = source.read_piece(0, len(into), memoryview(into))
    assert Diverged("/code/a.py", *a) in lost
    assert into[a.offset : a.end] == bytes(6) and into[b.offset : b.end] == b"b = 1\n"


def test_bytes_of_an_older_version_are_lost_under_no_name(folder):
    source = Source(str(folder))
    old = source.scan()
    span = old.span(old.find("/code/a.py"))
    (folder / "code" / "a.py").write_bytes(b"a = 22\n")
    source.scan()
    into = bytearray(b"x" * span.length)
    assert source.read_piece(*span, memoryview(into)) == [Diverged("", *span)] and into == bytes(span.length)


def test_digests_are_of_what_changed(folder, algorithm):
    source = Source(str(folder), algorithm=algorithm)
    old = source.scan()
    read(source, "/code/a.py")
    (folder / "code" / "a.py").write_bytes(b"a = 22\n")
    with open(folder / "big", "ab") as file:
        file.write(b"more")
    (folder / "added").write_bytes(b"nothing like it was there")
    new = source.scan()
    digests = source.hashes(old, new)
    one = hashing.digest(algorithm)
    a, was, big = new.span(new.find("/code/a.py")), old.span(old.find("/code/a.py")), new.span(new.find("/big"))
    found = dict(digests.spans())
    assert digests.algorithm == algorithm
    assert found[a] == one(b"a = 22\n") and found[was] == one(b"a = 1\n")
    assert {span for span in found if big.offset <= span.offset < big.end} == {
        (big.offset, MIB), (big.offset + MIB, MIB), (big.offset + 2 * MIB, 7),
    }  # fmt: skip
    assert len(found) == 5


def test_a_file_that_changes_while_it_is_hashed_has_no_digest(folder):
    source = Source(str(folder))
    old = source.scan()
    (folder / "code" / "a.py").write_bytes(b"a = 22\n")
    new = source.scan()
    (folder / "code" / "a.py").write_bytes(b"a = 33\n")
    assert source.hashes(old, new).values == []
    assert source.hashes(old, old).values == []


def test_changes_are_told_as_paths(folder):
    source = Source(str(folder))
    old = source.scan()
    (folder / "code" / "a.py").write_bytes(b"a = 22\n")
    (folder / "code" / "b.py").unlink()
    (folder / "code" / "b.py").mkdir()
    (folder / "code" / "b.py" / "inner").write_bytes(b"12")
    os.chmod(folder / "big", 0o400)
    (folder / "link").unlink()
    changes = source.scan() and source.changed_since(old)
    assert changes.added == ["/code/b.py/inner"] and sorted(changes.changed) == ["/code/a.py", "/code/b.py"]
    assert {"/", "/big", "/code"} == set(changes.touched) and changes.removed == ["/link"]
    assert changes.num_bytes == 9
    (folder / "code" / "b.py" / "inner").unlink()
    (folder / "code" / "b.py").rmdir()
    os.rename(folder / "code", folder / "kode")
    changes = source.scan() and source.changed_since(old)
    assert sorted(changes.removed) == ["/code", "/code/a.py", "/code/b.py", "/link"] and changes.added == ["/kode", "/kode/a.py"]


def test_what_is_known_of_old_versions_is_bounded(folder):
    source = Source(str(folder))
    for number in range(50):
        (folder / "code" / "a.py").write_bytes(b"a = %d\n" % number)
        source.scan()
        read(source, "/code/a.py")
    assert len(source._digests) <= 3 and source._sent.total <= 3 * 7


def test_what_is_read_while_the_file_is_written_is_right_or_lost(folder):
    versions = [bytes([number]) * (256 << 10) for number in range(100)]
    (folder / "live").write_bytes(versions[0])
    source = Source(str(folder))
    enough = threading.Event()

    def write() -> None:
        fd = os.open(folder / "live", os.O_WRONLY)
        for version in itertools.cycle(versions):
            os.pwrite(fd, version, 0)
            if enough.is_set():
                break
        os.close(fd)

    writer = threading.Thread(target=write)
    source.scan()
    writer.start()
    try:
        for _ in range(100):
            source.scan()
            parts = [read(source, "/live") for _ in range(3)]
            whole = {part for part in parts if isinstance(part, bytes)}
            assert len(whole) <= 1 and whole <= set(versions)
    finally:
        enough.set()
        writer.join()
    source.scan()
    assert read(source, "/live") == (folder / "live").read_bytes()
