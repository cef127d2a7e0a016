"""What need not move: pieces are kept by digest, wherever they were."""

from __future__ import annotations

import os
import random

import pytest

from monarch._mounts import hashing
from monarch._mounts.hashing import Digests
from monarch._mounts.keeping import keep
from monarch._mounts.source import Source
from mounts.world import MIB, World


@pytest.fixture(params=hashing.algorithms())
def full(tmp_path, request):
    """A host that has all bytes of a directory with a big file and some small ones."""
    world = World(tmp_path / "source")
    world.source = Source(str(world.path), algorithm=request.param)
    (world.path / "big").write_bytes(random.Random(1).randbytes(5 * MIB + 100))
    for number in range(10):
        (world.path / f"small{number}").write_bytes(random.Random(number).randbytes(1000))
    world.start().deliver()
    yield world
    world.close()


def test_of_a_big_file_only_the_pieces_that_changed_move(full):
    with open(full.path / "big", "r+b") as file:
        file.seek(3 * MIB + 7)
        file.write(b"changed")
    full.refresh()
    assert full.store.statistics().kept_bytes == 4 * MIB + 100
    assert full.deliver() == MIB
    assert full.read("big") == (full.path / "big").read_bytes()


def test_of_a_sparse_file_holes_neither_move_nor_take_memory(full):
    with open(full.path / "sparse", "wb") as file:
        file.truncate(2000 * MIB)
        for at in (0, 1000 * MIB + 5):
            file.seek(at)
            file.write(b"data")
    full.refresh()
    start = full.fs.snapshot.span(full.fs.snapshot.find("/sparse")).offset
    for first, end in ((1, 1000), (1001, 2000)):
        full.store.put_zeros(start + first * MIB, (end - first) * MIB)
    assert full.deliver() == 2 * MIB
    with open(full.path / "sparse", "r+b") as file:
        file.seek(1000 * MIB + 7)
        file.write(b"changed")
    before = full.store.statistics()
    full.refresh()
    assert full.deliver() == MIB
    assert full.store.statistics().resident_bytes == before.resident_bytes
    assert full.read("sparse", 1000 * MIB, 20) == b"\0" * 5 + b"da" + b"changed" + bytes(6)
    assert full.read("sparse", 1999 * MIB, MIB) == bytes(MIB)


def test_what_was_appended_moves_and_the_rest_stays(full):
    with open(full.path / "big", "ab") as file:
        file.write(b"x" * MIB)
    full.refresh()
    assert full.deliver() == MIB + 100
    assert full.read("big") == (full.path / "big").read_bytes()


def test_a_small_file_that_was_written_anew_does_not_move(full):
    data = (full.path / "small3").read_bytes()
    (full.path / "small3").unlink()
    (full.path / "small3").write_bytes(data)
    (full.path / "small4").write_bytes(b"y" * 1000)
    full.refresh()
    assert full.deliver() == 1000
    assert full.read("small3") == data and full.read("small4") == b"y" * 1000


def test_a_small_file_that_was_renamed_does_not_move(full):
    os.rename(full.path / "small3", full.path / "other")
    full.refresh()
    assert full.deliver() == 0 and full.read("other") == random.Random(3).randbytes(1000)


def test_what_never_arrived_is_not_kept(tmp_path):
    world = World(tmp_path / "source")
    (world.path / "big").write_bytes(b"b" * (2 * MIB))
    world.start().deliver(0, MIB)
    with open(world.path / "big", "ab") as file:
        file.write(b"more")
    world.refresh()
    assert world.store.statistics().kept_bytes == 2 * MIB  # both pieces have the digest of the one that is here
    assert world.deliver() == 4
    world.close()


def test_digests_of_an_algorithm_that_is_not_here_serve_as_far_as_they_were_announced(full):
    old = full.fs.snapshot
    (full.path / "small1").rename(full.path / "small99")
    with open(full.path / "big", "ab") as file:
        file.write(b"more")
    new = full.source.scan()
    digests = full.source.hashes(old, new)
    kept = keep(full.store, old, new, Digests("unheard of", digests.offsets, digests.lengths, digests.values))
    assert kept >= 1000


def test_a_file_across_a_block_boundary_is_kept(tmp_path):
    world = World(tmp_path / "source")
    for number in range(66):
        (world.path / f"f{number:02}").write_bytes(bytes([number]) * (MIB - 1000))
    world.start().deliver()
    for number in range(66):
        os.rename(world.path / f"f{number:02}", world.path / f"g{65 - number:02}")
    world.refresh()
    assert world.deliver() == 0
    assert [world.read(f"g{number:02}")[:1] for number in range(66)] == [bytes([65 - number]) for number in range(66)]
    assert world.store.statistics().resident_bytes == 66 * (MIB - 1000)
    world.close()
