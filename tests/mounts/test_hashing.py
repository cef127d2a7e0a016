"""Digests: the same for buffers and files, with threads and without."""

from __future__ import annotations

import hashlib
import os

import pytest

from monarch._mounts import hashing
from monarch._mounts.hashing import DIGEST_BYTES, PIECE_BYTES, Digests, hash_pieces


@pytest.fixture(params=hashing.algorithms())
def algorithm(request):
    return request.param


@pytest.mark.parametrize("size", [0, 1, 1000, 1001, 4096, 40 << 20])
def test_a_file_and_a_buffer_hash_alike(tmp_path, algorithm, size):
    data = os.urandom(min(size, 5000)) * (size // 5000 or 1)
    path = tmp_path / "file"
    path.write_bytes(data)
    piece_bytes = 1000 if size < 10_000 else 1 << 20
    one = hashing.digest(algorithm)
    expected = [one(data[at : at + piece_bytes]) for at in range(0, len(data), piece_bytes)]
    assert hash_pieces(memoryview(data), piece_bytes, algorithm=algorithm) == expected
    with open(path, "rb") as file:
        assert hash_pieces(file.fileno(), piece_bytes, algorithm=algorithm) == expected
        assert hash_pieces(file.fileno(), piece_bytes, algorithm=algorithm, length=min(len(data), piece_bytes)) == expected[:1]
    assert all(len(value) == DIGEST_BYTES for value in expected)


def test_a_sparse_file_hashes_as_if_it_were_written(tmp_path, algorithm):
    path, size = tmp_path / "file", 20 * PIECE_BYTES + 3
    with open(path, "w+b") as file:
        file.truncate(size)
        os.pwrite(file.fileno(), b"data", 7 * PIECE_BYTES - 2)
        file.flush()
        assert hash_pieces(file.fileno(), algorithm=algorithm) == hash_pieces(memoryview(path.read_bytes()), algorithm=algorithm)


def test_sha256_is_always_there():
    assert hashing.digest("sha256_128")(b"x") == hashlib.sha256(b"x").digest()[:16]
    assert hashing.algorithms()[-1] == "sha256_128"


def test_a_file_that_has_become_shorter_is_an_error(tmp_path, algorithm):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    with open(path, "rb") as file, pytest.raises(EOFError, match="shorter"):
        hash_pieces(file.fileno(), 4, algorithm=algorithm, length=9)


def test_an_unknown_algorithm_is_named():
    with pytest.raises(ValueError, match=r"digests by 'crc' cannot be made here\n  next:  use one of .*sha256_128.*'mounts' extra"):
        hashing.digest("crc")


def test_digests_have_columns_of_one_length():
    assert Digests("a", [1], [2], [b"x"]).spans() == [((1, 2), b"x")]
    with pytest.raises(ValueError, match="differ in length"):
        Digests("a", [1, 2], [2], [b"x"])
