"""Memory by /proc/<pid>/mem: bytes come and go whole, and what can't be is an error and no signal."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys

import pytest

from monarch._base.buffers import address_of
from monarch.rdma.errors import OwnerGoneError, TransferError, UnreachableError
from monarch.rdma.proc_memory import Move, read, write

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="this system has no /proc/<pid>/mem")
SIZE = 3 * mmap.PAGESIZE + 5
NOWHERE = 4096
OWNER = """
import ctypes, sys
data = ctypes.create_string_buffer(bytes(range(256)) * 100)
print(ctypes.addressof(data), flush=True)
sys.stdin.readline()
sys.stdout.buffer.write(data.raw[:10])
"""


def test_bytes_of_another_process_are_read_and_written():
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert owner.stdin is not None and owner.stdout is not None
    try:
        there = int(owner.stdout.readline())
        target = bytearray(SIZE)
        here = address_of(target)[0]
        read(owner.pid, [Move(here, there, 100), Move(here + 100, there + 256, SIZE - 100)])
        assert target == bytes(range(100)) + (bytes(range(256)) * 100)[: SIZE - 100]
        source = bytearray(b"0123456789")
        write(owner.pid, [Move(address_of(source)[0], there, 4), Move(address_of(source)[0] + 6, there + 6, 4)])
    finally:
        left, _ = owner.communicate(b"\n", timeout=10)
    assert left == b"0123\4\0056789"
    with pytest.raises(OwnerGoneError):
        read(owner.pid, [Move(here, there, 1)])


def test_what_is_not_mapped_is_an_error():
    target = bytearray(10)
    for move in (read, write):
        with pytest.raises(TransferError, match="can't be moved"):
            move(os.getpid(), [Move(address_of(target)[0], NOWHERE, len(target))])


def test_a_process_that_may_not_be_touched_is_told(monkeypatch):
    def refuse(path, flags):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UnreachableError, match=r"may not touch the memory of process 77 \(Permission denied\)"):
        read(77, [])
