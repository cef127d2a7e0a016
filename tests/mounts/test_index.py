"""The index: what it says of a directory, where files lie, what a block holds."""

from __future__ import annotations

import os
import stat

import pytest

from monarch._mounts.index import BIG_FILE_THRESHOLD, BLOCK_SIZE, build_index, code_blocks, materialise_block

ATTRIBUTES = {"st_atime", "st_ctime", "st_gid", "st_mode", "st_mtime", "st_nlink", "st_size", "st_uid"}


def put(folder, name: str, data: bytes | int, *, mtime_ns: int | None = None):
    """A file of these bytes, or a sparse one of this size."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        if isinstance(data, int):
            file.truncate(data)
        else:
            file.write(data)
    if mtime_ns is not None:
        os.utime(path, ns=(mtime_ns, mtime_ns))
    return path


def places(index) -> dict[str, tuple[int, int]]:
    return {path: (node["global_offset"], node["file_len"]) for path, node in index.items() if "file_len" in node}


def content(index, path: str) -> bytes:
    """A file put together from its blocks."""
    offset, length = places(index)[path]
    first, last = offset // BLOCK_SIZE, max(offset + length - 1, 0) // BLOCK_SIZE
    buffer = bytearray(BLOCK_SIZE)
    data = b"".join(materialise_block(index, block, buffer)[0] for block in range(first, last + 1))
    return data[offset - first * BLOCK_SIZE :][:length]


def test_an_empty_directory_has_a_root_and_no_bytes(tmp_path):
    index = build_index(str(tmp_path), {})
    assert set(index) == {"/"}
    assert index["/"].keys() == {"attr", "children", "total_size"}
    assert index["/"]["total_size"] == 0 and index["/"]["children"] == []
    assert code_blocks(index) == set()


def test_nodes_have_the_keys_of_their_kind(tmp_path):
    put(tmp_path, "b/inner.txt", b"12345")
    put(tmp_path, "a.txt", b"1")
    (tmp_path / "link").symlink_to("no/where")
    index = build_index(str(tmp_path), {})
    assert index["/"]["children"] == ["a.txt", "b", "link"]
    assert index["/b"].keys() == {"attr", "children"} and index["/b"]["children"] == ["inner.txt"]
    assert index["/link"].keys() == {"attr", "link_target"} and index["/link"]["link_target"] == "no/where"
    node = index["/b/inner.txt"]
    assert node.keys() == {"attr", "file_len", "mtime_ns", "full_path", "global_offset"}
    assert node["full_path"] == str(tmp_path / "b" / "inner.txt") and node["file_len"] == 5
    for node in index.values():
        assert node["attr"].keys() == ATTRIBUTES
        assert node["attr"]["st_atime"] == node["attr"]["st_mtime"]


def test_reading_a_file_leaves_the_index_equal(tmp_path):
    path = put(tmp_path, "a", b"1", mtime_ns=10**18)
    before = build_index(str(tmp_path), {})
    os.utime(path, ns=(2 * 10**18, 10**18))
    after = build_index(str(tmp_path), before)
    after["/a"]["attr"]["st_ctime"] = before["/a"]["attr"]["st_ctime"]  # `utime` itself
    assert after == before


def test_state_of_jobs_is_left_out_at_every_depth(tmp_path):
    put(tmp_path, "a/b/.monarch/state", b"1")
    put(tmp_path, ".monarch/state", b"1")
    before = build_index(str(tmp_path), {})
    put(tmp_path, ".monarch/other", b"1")
    put(tmp_path, "a/b/.monarch/state", b"222")
    assert set(before) == {"/", "/a", "/a/b"}
    assert build_index(str(tmp_path), before) == before


def test_a_file_called_like_the_state_of_jobs_is_a_file(tmp_path):
    put(tmp_path, ".monarch", b"1")
    assert "/.monarch" in build_index(str(tmp_path), {})


def test_small_files_come_first_each_kind_in_the_order_of_the_walk(tmp_path):
    for name in ("a/small", "b/small", "small"):
        put(tmp_path, name, b"12345")
    for name in ("a/big", "big"):
        put(tmp_path, name, BIG_FILE_THRESHOLD)
    found = places(build_index(str(tmp_path), {}))
    assert sorted(found, key=found.__getitem__) == ["/small", "/b/small", "/a/small", "/big", "/a/big"]
    ends = [0, *(sum(found[path]) for path in sorted(found, key=found.__getitem__))]
    assert [found[path][0] for path in sorted(found, key=found.__getitem__)] == ends[:-1]


def test_a_single_file_is_at_the_beginning(tmp_path):
    put(tmp_path, "one", b"abc")
    index = build_index(str(tmp_path), {})
    assert places(index) == {"/one": (0, 3)} and index["/"]["total_size"] == 3


def test_what_is_new_or_changed_goes_behind_a_block_boundary_and_the_rest_stays(tmp_path):
    for name in "abc":
        put(tmp_path, name, name.encode() * 10, mtime_ns=10**18)
    first = build_index(str(tmp_path), {})
    put(tmp_path, "b", b"B" * 10)
    put(tmp_path, "d", b"D" * 10)
    (tmp_path / "c").unlink()
    second = build_index(str(tmp_path), first)
    assert places(second)["/a"] == places(first)["/a"]
    assert sorted(offset for path, (offset, _) in places(second).items() if path in "/b/d") == [BLOCK_SIZE, BLOCK_SIZE + 10]
    assert second["/"]["total_size"] == BLOCK_SIZE + 20


def test_the_layout_never_shrinks_and_starts_afresh_on_demand(tmp_path):
    put(tmp_path, "a", b"a" * 10)
    first = build_index(str(tmp_path), {})
    (tmp_path / "a").unlink()
    assert build_index(str(tmp_path), first)["/"]["total_size"] == 10
    assert build_index(str(tmp_path), {})["/"]["total_size"] == 0


def test_nothing_new_means_no_rounding(tmp_path):
    put(tmp_path, "a", b"a" * 10)
    first = build_index(str(tmp_path), {})
    assert build_index(str(tmp_path), first) == first


@pytest.mark.parametrize("size", [BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE + 5])
def test_files_around_a_block_boundary_come_out_as_they_went_in(tmp_path, size):
    put(tmp_path, "small", b"s" * 100)
    path = put(tmp_path, "big", size)
    with open(path, "r+b") as file:
        for at in (0, size // 2, BLOCK_SIZE - 101, size - 3):
            file.seek(at)
            file.write(b"xyz"[: size - at])
    index = build_index(str(tmp_path), {})
    assert content(index, "/big") == path.read_bytes()
    assert content(index, "/small") == b"s" * 100


def test_several_files_across_a_boundary_come_out_as_they_went_in(tmp_path):
    data = {f"/f{number:03}": bytes([number]) * (BIG_FILE_THRESHOLD - number) for number in range(70)}
    for path, value in data.items():
        put(tmp_path, path[1:], value)
    index = build_index(str(tmp_path), {})
    buffer = bytearray(BLOCK_SIZE)
    whole = b"".join(materialise_block(index, block, buffer)[0] for block in (0, 1))
    assert {path: whole[offset : offset + length] for path, (offset, length) in places(index).items()} == data
    assert code_blocks(index) == {0, 1}


def test_the_last_block_says_how_much_of_it_is_used(tmp_path):
    put(tmp_path, "a", b"a" * 10)
    index = build_index(str(tmp_path), {})
    data, used, diverged = materialise_block(index, 0, bytearray(BLOCK_SIZE))
    assert (len(data), used, diverged) == (BLOCK_SIZE, 10, [])


def test_code_blocks_are_those_of_small_files_with_bytes(tmp_path):
    put(tmp_path, "big", 3 * BLOCK_SIZE)
    first = build_index(str(tmp_path), {})
    put(tmp_path, "empty", b"")
    second = build_index(str(tmp_path), first)
    put(tmp_path, "small", b"1")
    third = build_index(str(tmp_path), second)
    assert code_blocks(first) == code_blocks(second) == set()
    assert code_blocks(third) == {places(third)["/small"][0] // BLOCK_SIZE}


def truncated(path):
    os.truncate(path, 3)


def missing(path):
    path.unlink()


def touched(path):
    os.utime(path, ns=(5, 5))


def a_fifo_now(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("change", [truncated, missing, touched, a_fifo_now], ids=lambda change: change.__name__)
def test_a_file_that_is_not_what_the_index_says_diverges_and_its_neighbours_do_not(tmp_path, change):
    path = put(tmp_path, "b", b"b" * 1000)
    put(tmp_path, "a", b"a" * 10)
    put(tmp_path, "c", b"c" * 10)
    index = build_index(str(tmp_path), {})
    change(path)
    data, _, diverged = materialise_block(index, 0, bytearray(BLOCK_SIZE))
    assert diverged == ["/b"]
    offset, length = places(index)["/b"]
    assert b"bbbb" not in data[offset : offset + length]
    assert b"a" * 10 in data and b"c" * 10 in data


def test_a_relative_path_is_taken_from_the_working_directory(tmp_path, monkeypatch):
    put(tmp_path, "a/b", b"1")
    monkeypatch.chdir(tmp_path)
    assert build_index("a", {})["/b"]["full_path"] == str(tmp_path / "a" / "b")


def test_a_block_whose_files_are_gone_is_empty(tmp_path):
    put(tmp_path, "a", b"a" * 100)
    index = build_index(str(tmp_path), {})
    (tmp_path / "a").unlink()
    assert materialise_block(build_index(str(tmp_path), index), 0, bytearray(BLOCK_SIZE))[1:] == (0, [])


def test_an_empty_layout_has_no_block(tmp_path):
    with pytest.raises(ValueError, match="block 0 is past the layout end: 0 bytes, 0 blocks"):
        materialise_block(build_index(str(tmp_path), {}), 0, bytearray(BLOCK_SIZE))


@pytest.mark.parametrize("block", [-1, 1, 7])
def test_a_block_that_does_not_exist_is_refused(tmp_path, block):
    put(tmp_path, "a", b"a")
    with pytest.raises(ValueError, match=r"past the layout end: 1 bytes, 1 blocks\n  next:  use the index"):
        materialise_block(build_index(str(tmp_path), {}), block, bytearray(BLOCK_SIZE))


def test_a_buffer_of_another_size_is_refused(tmp_path):
    put(tmp_path, "a", b"a")
    with pytest.raises(ValueError, match=f"has 5 bytes\n  next:  pass one of BLOCK_SIZE, {BLOCK_SIZE} bytes"):
        materialise_block(build_index(str(tmp_path), {}), 0, bytearray(5))


def test_devices_and_the_like_are_files_without_bytes(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    index = build_index(str(tmp_path), {})
    assert index["/pipe"]["file_len"] == 0 and stat.S_ISFIFO(index["/pipe"]["attr"]["st_mode"])


def test_a_directory_that_cannot_be_listed_is_an_error(tmp_path):
    with pytest.raises(NotADirectoryError):
        build_index(str(put(tmp_path, "file", b"1")), {})
    with pytest.raises(FileNotFoundError):
        build_index(str(tmp_path / "missing"), {})


def test_names_of_any_bytes_are_kept(tmp_path):
    name = b"\xff\xfe-\xc3\xa4-\n"
    with open(os.fsencode(tmp_path) + b"/" + name, "wb") as file:
        file.write(b"data")
    index = build_index(str(tmp_path), {})
    assert index["/"]["children"] == [os.fsdecode(name)]
    assert content(index, "/" + os.fsdecode(name)) == b"data"


def test_a_tree_as_deep_as_paths_go_is_walked(tmp_path):
    depth = (4000 - len(str(tmp_path))) // 6
    path = str(tmp_path)
    for _ in range(depth):
        path += "/deep_"
        os.mkdir(path)
    index = build_index(str(tmp_path), {})
    assert len(index) == depth + 1 and index["/deep_" * depth]["children"] == []
