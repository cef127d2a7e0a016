"""Memory: nothing until it is written, nothing after it is let go."""

from __future__ import annotations

import errno
import os

import pytest

from monarch._mounts.memory import Memory
from mounts.world import memfds

MIB = 1 << 20


def pages(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_a_descriptor_has_the_bytes_that_were_written():
    memory = Memory(10_000, keep_fd=True)
    memory.view[5000:5003] = b"abc"
    assert os.pread(memory.fd, 5, 4999) == b"\0abc\0" and os.fstat(memory.fd).st_size == 10_000
    memory.close()


def test_untouched_pages_cost_nothing_and_discarded_ones_come_back():
    memory = Memory(8 << 30, keep_fd=True)
    memory.view[7 << 30 : (7 << 30) + 4 * MIB] = bytes([1]) * (4 * MIB)
    assert pages(memory.fd) == 4 * MIB
    memory.discard((7 << 30) + 5, (7 << 30) + 3 * MIB)
    assert pages(memory.fd) == MIB + 4096
    assert memory.view[7 << 30] == memory.view[(7 << 30) + 3 * MIB] == 1 and memory.view[(7 << 30) + MIB] == 0
    memory.close()


@pytest.mark.parametrize("keep_fd", [True, False])
def test_the_last_view_unmaps(keep_fd):
    before = memfds()
    memory = Memory(MIB, keep_fd=keep_fd)
    part = memory.view[100:200]
    part[:3] = b"abc"
    memory.close()
    assert memfds() == before + 1 and bytes(part[:3]) == b"abc"
    del part
    assert memfds() == before


@pytest.mark.parametrize("keep_fd", [True, False])
def test_a_writer_writes_its_range_also_when_the_memory_is_closed_meanwhile(keep_fd):
    memory = Memory(MIB, keep_fd=keep_fd)
    view, writer = memory.view, memory.writer(1000, 1003)
    memory.close()
    writer.write(memoryview(b"abc"))
    writer.close()
    writer.close()
    assert bytes(view[999:1004]) == b"\0abc\0"


def test_a_writer_needs_no_descriptor(monkeypatch):
    def refuse(_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "dup", refuse)
    memory = Memory(MIB, keep_fd=True)
    writer = memory.writer(1000, 1003)
    writer.write(memoryview(b"abc"))
    writer.close()
    assert os.pread(memory.fd, 5, 999) == b"\0abc\0"
    memory.close()


def test_an_unused_writer_leaves_no_descriptor():
    memory = Memory(MIB, keep_fd=True)
    before = len(os.listdir("/proc/self/fd"))
    memory.writer(0, 10).close()
    assert len(os.listdir("/proc/self/fd")) == before
    memory.close()
