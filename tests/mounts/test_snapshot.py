"""Snapshots: what travels is what was scanned, small and quick; what was not made by us is refused."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from array import array
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch._mounts.index import BIG_FILE_THRESHOLD, BLOCK_SIZE, build_index
from monarch._mounts.ranges import Span
from monarch._mounts.snapshot import NOWHERE, Columns, Kind, Snapshot, SnapshotError, Status, add_row
from mounts.world import DIRECTORY, FILE, LINK, made


def test_attributes_and_names_survive_the_way(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(b"12345")
    os.chmod(tmp_path / "a" / "file", 0o640)
    (tmp_path / "link").symlink_to("a/file")
    snapshot = Snapshot.decode(Snapshot.of_index(build_index(str(tmp_path), {})).encode())
    row = snapshot.find("/a/file")
    status = os.stat(tmp_path / "a" / "file")
    attr = snapshot.attr(row)
    assert attr[:5] == (status.st_mode, 5, 1, status.st_uid, status.st_gid) and attr.mtime_ns == attr.atime_ns == status.st_mtime_ns
    assert snapshot.path(row) == "/a/file" and snapshot.span(row) == Span(0, 5)
    assert snapshot.targets == {snapshot.find("/link"): b"a/file"}
    assert snapshot.find("/a/none") is snapshot.find("/none/file") is snapshot.find("/a/file/x") is None
    assert snapshot.find("/") == 0 and snapshot.path(0) == "/"


names = st.binary(min_size=1, max_size=6).filter(lambda name: not {0, ord("/")} & set(name) and name not in (b".", b".."))


@given(data=st.data())
def test_a_snapshot_is_the_same_on_the_other_side(data):
    rows, parents, offset = [], [0], 0
    for parent in parents:
        for name in sorted(data.draw(st.sets(names, max_size=3))) if len(rows) < 20 else ():
            mode = data.draw(st.sampled_from([DIRECTORY, FILE, LINK]))
            size = data.draw(st.sampled_from([0, 5, 1 << 40]))
            rows.append((parent, name, mode, size, offset if mode == FILE else NOWHERE))
            offset += size if mode == FILE else 0
            if mode == DIRECTORY:
                parents.append(len(rows))
    snapshot = made(*rows, total=offset)
    other = Snapshot.decode(snapshot.encode())
    assert other == snapshot
    assert [other.path(row) for row in range(len(other))] == [snapshot.path(row) for row in range(len(snapshot))]
    assert all(other.find(other.path(row)) == row for row in range(len(other)))


GOOD = ((0, b"a", DIRECTORY, 4096, NOWHERE), (0, b"b", FILE, 10, 0), (0, b"c", LINK, 6, NOWHERE), (1, b"d", FILE, 5, 10))


@settings(max_examples=300)
@given(cut=st.integers(0, 10_000), flips=st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 255)), max_size=3))
def test_damaged_bytes_are_refused_or_harmless(cut, flips):
    data = bytearray(made(*GOOD).encode())
    for at, flip in flips:
        data[at % len(data)] ^= flip
    try:
        snapshot = Snapshot.decode(bytes(data[: cut % (len(data) + 1)] if not flips else data))
    except SnapshotError:
        return
    for row in range(len(snapshot)):
        assert snapshot.path(row) and snapshot.attr(row) and snapshot.find(os.fsencode(snapshot.path(row))) is not None


@pytest.mark.parametrize(
    ("rows", "total", "said"),
    [
        ([(0, b"..", FILE, 0, 0)], 0, r"b'\.\.' is no name of a file"),
        ([(0, b".", FILE, 0, 0)], 0, r"b'\.' is no name of a file"),
        ([(0, b"a/b", FILE, 0, 0)], 0, "b'a/b' is no name of a file"),
        ([(0, b"", FILE, 0, 0)], 0, "b'' is no name of a file"),
        ([(0, b"a", FILE, 0, 0), (0, b"a", FILE, 0, 0)], 0, "a name is twice in '/'"),
        ([(1, b"a", DIRECTORY, 0, NOWHERE)], 0, "path 1 has no right parent"),
        ([(0, b"a", FILE, 0, 0), (1, b"b", FILE, 0, 0)], 0, "path 2 has no right parent"),
        ([(0, b"a", DIRECTORY, 0, NOWHERE), (1, b"b", FILE, 0, 0), (0, b"c", FILE, 0, 0)], 0, "path 3 has no right parent"),
        ([(0, b"a", FILE, 10, 0)], 9, "a file ends at 10, the address space at 9"),
        ([(0, b"a", FILE, 10, 0), (0, b"b", FILE, 10, 9)], 100, "two files share the byte 9"),
        ([(0, b"a", FILE, -5, 0)], 100, "out of range"),
        ([(0, b"a", FILE, 5, -2)], 100, "out of range"),
        ([(0, b"a", FILE, 5, NOWHERE)], 100, "no right place"),
        ([(0, b"a", DIRECTORY, 5, 0)], 100, "no right place"),
        ([(0, b"a", 0o644, 5, 0)], 100, "describes no file"),
        ([], -1, "out of range"),
        ([], 1 << 63, "out of range"),
    ],
)
def test_what_no_scan_finds_is_refused(rows, total, said):
    with pytest.raises(SnapshotError, match=rf"no snapshot of a directory: .*{said}"):
        Snapshot.decode(made(*rows, total=total).encode())


@pytest.mark.parametrize("data", [b"", b"\x00", b"\xc1", b"\x93\x01\x02\x03", b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"])
def test_bytes_of_something_else_are_refused(data):
    with pytest.raises(SnapshotError, match=r"cannot be decoded: .*\n  next:  use the same version"):
        Snapshot.decode(data)


def test_another_format_is_named():
    fields = msgspec.msgpack.decode(made().encode())
    with pytest.raises(SnapshotError, match="their format is 99, this side speaks 1"):
        Snapshot.decode(msgspec.msgpack.encode([99, *fields[1:]]))


def test_columns_of_different_lengths_are_refused():
    fields = msgspec.msgpack.decode(made(*GOOD).encode())
    fields[5] += array("I", [0]).tobytes()
    with pytest.raises(SnapshotError, match="a column has 24 bytes, not 4 for each of 5 paths"):
        Snapshot.decode(msgspec.msgpack.encode(fields))


def test_files_are_found_by_where_their_bytes_are():
    snapshot = made((0, b"a", FILE, 10, 100), (0, b"b", FILE, 0, 110), (0, b"c", FILE, 5, 110), (0, b"d", FILE, BIG_FILE_THRESHOLD, 200))
    assert [snapshot.path(row) for row, _ in snapshot.files()] == ["/a", "/c", "/d"]
    assert [snapshot.path(row) for row, _ in snapshot.files(Span(109, 1))] == ["/a"]
    assert [snapshot.path(row) for row, _ in snapshot.files(Span(109, 2))] == ["/a", "/c"]
    assert [snapshot.path(row) for row, _ in snapshot.files(Span(115, 85))] == []
    assert [snapshot.path(row) for row, _ in snapshot.files(Span(1 << 40, 1))] == []
    assert snapshot.small_spans() == [Span(100, 15)]


@pytest.fixture
def many_files(tmp_path):
    """A folder with 100,000 files, in memory where that is possible."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else tmp_path))
    try:
        for number in range(1000):
            below = folder / f"package{number // 40}" / f"folder{number}"
            below.mkdir(parents=True)
            for at in range(100):
                os.close(os.open(f"{below}/some_module_{at}.py", os.O_CREAT))
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.mark.cpu_limit(20)
@pytest.mark.timeout(90)
def test_a_hundred_thousand_files_are_indexed_and_sent_in_seconds(many_files):
    def measured(work):
        used = time.process_time()
        return work(), time.process_time() - used

    index, index_s = measured(lambda: build_index(str(many_files), {}))
    snapshot = Snapshot.of_index(index)
    data, encode_s = measured(snapshot.encode)
    decoded, decode_s = measured(lambda: Snapshot.decode(data))
    assert len(decoded) > 101_000 and decoded == snapshot
    assert len(data) < 8_000_000
    assert index_s < 4 and encode_s < 1 and decode_s < 1.5, (index_s, encode_s, decode_s)  # idle: 0.7, 0.03, 0.2


def test_offsets_beyond_32_bits_are_kept():
    size = 5 << 40
    snapshot = Snapshot.decode(made((0, b"a", FILE, size, BLOCK_SIZE), total=size + BLOCK_SIZE).encode())
    assert snapshot.span(1) == Span(BLOCK_SIZE, size) and snapshot.total_bytes == size + BLOCK_SIZE


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ("nothing", True), ("elsewhere", True), ("new kinds elsewhere", True), ("other order of kinds", False),
        ("name", False), ("size", False), ("target", False),
    ],
)  # fmt: skip
def test_rows_of_two_versions_are_compared_wherever_they_are(change, same):
    def version(*, before=0, name=b"f", size=5, target=b"t", kinds=()):
        columns, known = Columns.empty(), {}
        for kind in kinds:
            known[kind] = len(columns.kinds)
            columns.kinds.append(kind)
        file, link = Kind(0o100644, 1, 5, 6), Kind(0o120777, 1, 5, 6)
        add_row(columns, known, b"", 0, Status(Kind(0o40755, 1, 5, 6), 0, 7, 8), NOWHERE)
        for at in range(before):
            add_row(columns, known, b"before%d" % at, 0, Status(file, 0, 7, 8), 100)
        add_row(columns, known, name, 0, Status(file, size, 7, 8), 100)
        row = add_row(columns, known, b"l", 0, Status(link, 1, 7, 8), NOWHERE)
        columns.targets[row] = target
        return Snapshot(columns, 1000), range(row - 1, row + 1)

    old, old_rows = version()
    other = {
        "nothing": {}, "elsewhere": {"before": 3}, "new kinds elsewhere": {"kinds": old.kinds}, "name": {"name": b"g"}, "size": {"size": 6},
        "other order of kinds": {"kinds": old.kinds[::-1]}, "target": {"target": b"u"},
    }[change]  # fmt: skip
    new, new_rows = version(**other)
    assert new.has_same_rows(old, old_rows, new_rows) is same
