"""The index of a directory: every path with its attributes, and where the bytes of each file lie in one long address space.

The address space is cut into blocks. Small files ("code") come first, then big ones; a file that has not changed keeps its place,
what is new goes behind the end. Plain dicts, because programs and tests know them in this form; `snapshot.py` has the form that travels.

Rules of this file:
    1. Nothing is recursive, so depth is bounded only by what the kernel takes as a path.
    2. One `stat` a file, none of them twice.
    3. What cannot be described (another file system, a directory that has just gone) is left out with a warning, never guessed.

Read next: `source.py`, which follows a directory over time.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterable, Iterator, Set
from typing import Any, NamedTuple

from monarch._base.errors import explain

BIG_FILE_THRESHOLD = 1 << 20
"""Bytes from which a file is big: it is fetched in pieces when somebody reads it, not pushed ahead."""
BLOCK_SIZE = 64 << 20
"""Bytes of one block."""
LEFT_OUT = ".monarch"
"""Directories of this name are no part of what is pushed: the state of jobs, which changes all the time."""

Index = dict[str, dict[str, Any]]

_log = logging.getLogger(__name__)
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO that takes the place of a file must not block us


class Found(NamedTuple):
    """One name of a directory."""

    name: str
    stat: os.stat_result
    target: str | None
    """Where a symbolic link points; None: it is not one."""
    descends: bool
    """A directory whose content belongs to the tree."""


def build_index(source_path: str, previous: Index) -> Index:
    """Describe a directory.

    Args:
        source_path: the directory.
        previous: the index of an earlier look, whose unchanged files (same size and modification time) keep their offsets;
            {} starts afresh.

    Returns:
        Virtual path ("/" is the root) to node. Every node has `attr`; a directory `children`; a symbolic link `link_target`; all else
        `file_len`, `mtime_ns`, `full_path`, `global_offset`. The root also has `total_size`, where the address space ends.

    Raises:
        OSError: the directory, or one in it, cannot be listed.

    Cost: one `stat` a file; 100,000 files take about a second.
    """
    source_path = os.path.abspath(source_path)
    root = os.stat(source_path)
    index: Index = {"/": {"attr": _attr(root), "children": []}}
    appended: list[tuple[int, dict[str, Any]]] = []
    for folder, entries in walk(source_path.rstrip("/"), root):
        prefix = folder + "/"
        at_disk = os.path.join(source_path, folder[1:]) if folder else source_path
        index[folder or "/"]["children"] = [entry.name for entry in entries]
        for name, status, target, _ in entries:
            path = prefix + name
            attr = _attr(status)
            if target is not None:
                index[path] = {"attr": attr, "link_target": target}
            elif stat.S_ISDIR(status.st_mode):
                index[path] = {"attr": attr, "children": []}
            else:
                node = index[path] = {
                    "attr": attr,
                    "file_len": status.st_size,
                    "mtime_ns": status.st_mtime_ns,
                    "full_path": os.path.join(at_disk, name),
                }
                old = previous.get(path)
                if old is not None and old.get("file_len") == status.st_size and old.get("mtime_ns") == status.st_mtime_ns:
                    node["global_offset"] = old["global_offset"]
                else:
                    appended.append((status.st_size, node))
    offsets, total = place([size for size, _ in appended], previous["/"]["total_size"] if previous else 0)
    for (_, node), offset in zip(appended, offsets, strict=True):
        node["global_offset"] = offset
    index["/"]["total_size"] = total
    return index


def place(sizes: list[int], total: int) -> tuple[list[int], int]:
    """Where new files go in an address space that ends at `total`.

    Args:
        sizes: of the new files, in the order of the walk.

    Returns:
        The offset of each, and the new end. The first is on a block boundary; small files come before big ones.
    """
    if not sizes:
        return [], total
    end = -(-total // BLOCK_SIZE) * BLOCK_SIZE
    offsets = [0] * len(sizes)
    for big in (False, True):
        for at, size in enumerate(sizes):
            if (size >= BIG_FILE_THRESHOLD) is big:
                offsets[at] = end
                end += size
    return offsets, end


def walk(
    source_path: str, root: os.stat_result, left_out: list[str] | None = None, covered: Set[str] = frozenset()
) -> Iterator[tuple[str, list[Found]]]:
    """The directories of a tree, each with its names in order; a parent before its children, the last child first.

    Args:
        covered: virtual paths of directories that are left empty, as those of another file system.
        left_out: where the paths go that could not be examined.

    Yields:
        Virtual path of the directory ("" is the root) and what is in it.

    Raises:
        OSError: a directory cannot be listed.
    """
    stack = [""]
    left_out = [] if left_out is None else left_out
    while stack:
        folder = stack.pop()
        try:
            entries = _listing(source_path, folder, root.st_dev, left_out, covered)
        except FileNotFoundError:
            if not folder:
                raise
            _log.warning("left empty, has just gone path=%r", source_path + folder)
            left_out.append(source_path + folder)
            entries = []
        yield folder, entries
        stack += [f"{folder}/{entry.name}" for entry in entries if entry.descends]


def _listing(source_path: str, folder: str, device: int, left_out: list[str], covered: Set[str]) -> list[Found]:
    found = []
    with os.scandir(source_path + folder or "/") as entries:
        ordered = sorted(entries, key=lambda entry: entry.name)
    for entry in ordered:
        try:
            status = entry.stat(follow_symlinks=False)
            target = os.readlink(entry.path) if stat.S_ISLNK(status.st_mode) else None
        except OSError as exc:
            _log.warning("left out, cannot be examined path=%r error=%s", entry.path, exc)
            left_out.append(entry.path)
            continue
        descends = stat.S_ISDIR(status.st_mode)
        if descends and entry.name == LEFT_OUT:
            continue
        if descends and covered and f"{folder}/{entry.name}" in covered:
            descends = False
        if descends and status.st_dev != device:
            _log.warning("left empty, another file system is mounted there path=%r", entry.path)
            descends = False
        found.append(Found(entry.name, status, target, descends))
    return found


def _attr(status: os.stat_result) -> dict[str, Any]:
    return {
        "st_atime": status.st_mtime,  # reading a file is no change
        "st_ctime": status.st_ctime,
        "st_gid": status.st_gid,
        "st_mode": status.st_mode,
        "st_mtime": status.st_mtime,
        "st_nlink": status.st_nlink,
        "st_size": status.st_size,
        "st_uid": status.st_uid,
    }


def code_blocks(index: Index) -> set[int]:
    """Numbers of the blocks that hold a part of a small file: those worth sending before anybody asks."""
    blocks: set[int] = set()
    for node in index.values():
        if 0 < node.get("file_len", 0) < BIG_FILE_THRESHOLD:
            offset = node["global_offset"]
            blocks.update(range(offset // BLOCK_SIZE, (offset + node["file_len"] - 1) // BLOCK_SIZE + 1))
    return blocks


def materialise_block(index: Index, block: int, buf: bytearray) -> tuple[bytes, int, list[str]]:
    """Read the bytes of one block.

    Args:
        block: its number.
        buf: scratch space of `BLOCK_SIZE` bytes.

    Returns:
        The block as bytes; where the last file in it ends; virtual paths of files that are no longer what the index says, whose
        bytes are random.

    Raises:
        ValueError: no such block, or `buf` of another size.
    """
    start, total = block * BLOCK_SIZE, index["/"]["total_size"]
    if not 0 <= start < total:
        what = f"block {block} is past the layout end: {total} bytes, {-(-total // BLOCK_SIZE)} blocks"
        raise ValueError(explain(what, next="use the index that the number comes from"))
    if len(buf) != BLOCK_SIZE:
        raise ValueError(explain(f"the buffer has {len(buf)} bytes", next=f"pass one of BLOCK_SIZE, {BLOCK_SIZE} bytes"))
    used = 0
    diverged = []
    with memoryview(buf) as view:
        for path, node, low, high in _parts(index, start, start + BLOCK_SIZE):
            used = max(used, high - start)
            into = view[low - start : high - start]
            if not _read_part(node, low - node["global_offset"], into):
                into[:] = os.urandom(len(into))  # never the bytes of another version
                diverged.append(path)
    return bytes(buf), used, diverged


def _parts(index: Index, start: int, end: int) -> Iterable[tuple[str, dict[str, Any], int, int]]:
    for path, node in index.items():
        length = node.get("file_len", 0)
        if length:
            low = max(node["global_offset"], start)
            high = min(node["global_offset"] + length, end)
            if low < high:
                yield path, node, low, high


def _read_part(node: dict[str, Any], offset: int, into: memoryview) -> bool:
    """Whether the file is what the index says, and `into` holds its bytes from `offset`."""
    try:
        status = os.stat(node["full_path"], follow_symlinks=False)
        if (status.st_size, status.st_mtime_ns) != (node["file_len"], node["mtime_ns"]):
            return False
        fd = os.open(node["full_path"], _OPEN)
        try:
            return read_fully(fd, offset, into)
        finally:
            os.close(fd)
    except OSError:
        return False


def read_fully(fd: int, offset: int, into: memoryview) -> bool:
    """Fill `into` from a file; False when the file ends before. Raises OSError as `os.preadv` does."""
    done = 0
    while done < len(into):
        count = os.preadv(fd, [into[done:]], offset + done)
        if not count:
            return False
        done += count
    return True
