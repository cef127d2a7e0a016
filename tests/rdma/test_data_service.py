"""The data service: published memory of a process, over a socket. The owner here is the process of the tests itself."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time

import pytest

from monarch import config
from monarch._wire.memory_messages import ShareFile, ShareMemory
from monarch.rdma import data_frames, vm
from monarch.rdma.channel import Channel, ChannelClosedError
from monarch.rdma.connections import Exchange
from monarch.rdma.data_frames import Verb, WireSpan, encode_request
from monarch.rdma.data_service import _LEAST_MAPPED, PIECE_BYTES, DataService
from monarch.rdma.errors import BufferGoneError, OwnerGoneError, TransferError
from monarch.rdma.memory import memory_of
from monarch.rdma.regions import RegionTable

pytestmark = pytest.mark.skipif(not vm.available(), reason="this system has no process_vm_readv")
UID = "trainer-0<1pTvhB3Xwjzy>"
WAIT_S = 5.0


class Reader:
    """The other end of a connection."""

    def __init__(self, service):
        ours, theirs = socket.socketpair()
        self.sock = ours
        self.channel = Channel(ours)
        service.on_connection(theirs, "test")

    def ask(self, verb, nonce, spans=(), views=(), uid=UID):
        exchange = Exchange(self.channel)
        exchange.run(verb, encode_request(verb, uid, nonce, spans), views, time.monotonic() + WAIT_S)

    def read(self, table, region, offset=0, nbytes=None):
        nbytes = region.memory.nbytes - offset if nbytes is None else nbytes
        target = memoryview(bytearray(nbytes))
        self.ask(Verb.READ, table.nonce, [WireSpan(region.slot, region.generation, offset, nbytes)], [target])
        return bytes(target)

    def write(self, table, region, data, offset=0):
        self.ask(Verb.WRITE, table.nonce, [WireSpan(region.slot, region.generation, offset, len(data))], [memoryview(data)])


@pytest.fixture
def table():
    made = RegionTable()
    yield made
    assert made.close()


@pytest.fixture
def service(table):
    made = DataService()
    made.share(UID, os.getpid(), ShareMemory(table.address, table.nonce))
    yield made
    made.close()
    assert made.num_connections == 0


@pytest.fixture
def reader(service):
    made = Reader(service)
    yield made
    made.channel.close()


def pattern(nbytes):
    return bytearray(struct.pack(f"<{nbytes // 8}Q", *range(nbytes // 8)))


@pytest.mark.parametrize("nbytes", [8, 4096, PIECE_BYTES, 3 * PIECE_BYTES + 8])
def test_bytes_are_read_and_written(table, reader, nbytes):
    data = pattern(nbytes)
    region = table.add(memory_of(data))
    assert reader.read(table, region) == data
    assert reader.read(table, region, 4, nbytes - 6) == data[4:-2]
    reader.write(table, region, bytes(nbytes - 4), offset=2)
    assert data[2:-2] == bytes(nbytes - 4) and reader.read(table, region) == data


def test_many_spans_are_one_request(table, reader):
    regions = [table.add(memory_of(bytearray([number % 251]) * 9000)) for number in range(data_frames.MAX_SPANS)]
    spans = [WireSpan(region.slot, region.generation, 1, 8000) for region in regions]
    views = [memoryview(bytearray(8000)) for _ in regions]
    reader.ask(Verb.READ, table.nonce, spans, views)
    assert [set(view) for view in views] == [{number % 251} for number in range(data_frames.MAX_SPANS)]
    reader.ask(Verb.WRITE, table.nonce, spans, [memoryview(bytes([7]) * 8000)] * len(spans))
    assert all(
        region.memory.read_at(0, 9000) == bytes([number % 251]) + b"\7" * 8000 + bytes([number % 251]) * 999
        for number, region in enumerate(regions)
    )


@pytest.fixture
def file():
    """Descriptor and bytes of a memory file."""
    data = pattern(4 * PIECE_BYTES)
    fd = os.memfd_create("test")
    os.write(fd, data)
    yield fd, data
    os.close(fd)


def of_file(service, table, memory, fd, offset=0):
    """A region that the service takes to be a file; its own memory has other bytes, to tell where they came from."""
    region = table.add(memory_of(memory))
    service.share(UID, os.getpid(), ShareFile(table.nonce, region.generation, fd, offset))
    return region


@pytest.mark.parametrize("offset", [0, 4096, 3 * 4096], ids=str)
def test_long_spans_of_a_file_leave_from_the_file_and_short_ones_are_copied(service, table, reader, file, offset):
    fd, data = file
    region = of_file(service, table, bytearray(3 * PIECE_BYTES), fd, offset)
    assert reader.read(table, region) == data[offset : offset + 3 * PIECE_BYTES]
    for start in (1, 4095, 4097, PIECE_BYTES + 8):
        assert reader.read(table, region, start, _LEAST_MAPPED) == data[offset + start : offset + start + _LEAST_MAPPED]
    assert reader.read(table, region, 8, _LEAST_MAPPED - 1) == bytes(_LEAST_MAPPED - 1)


def test_spans_of_files_and_of_memory_come_in_their_order(service, table, reader, file):
    fd, data = file
    near, far = table.add(memory_of(bytearray(b"m") * 3 * PIECE_BYTES)), of_file(service, table, bytearray(3 * PIECE_BYTES), fd)
    long, short = _LEAST_MAPPED + 3, 100
    parts = [(near, short), (far, long), (far, short), (near, long), (far, long), (far, long), (near, PIECE_BYTES + 1)]
    spans = [WireSpan(region.slot, region.generation, 5, nbytes) for region, nbytes in parts]
    views = [memoryview(bytearray(nbytes)) for _, nbytes in parts]
    reader.ask(Verb.READ, table.nonce, spans, views)
    for (region, nbytes), view in zip(parts, views, strict=True):
        assert view == (b"m" * nbytes if region is near else data[5 : 5 + nbytes] if nbytes == long else bytes(nbytes))


def test_a_region_that_is_dropped_while_its_file_is_being_sent_is_an_error(service, table, reader, file):
    fd, _ = file
    nbytes = 3 * PIECE_BYTES
    region = of_file(service, table, bytearray(nbytes), fd)
    request = encode_request(Verb.READ, UID, table.nonce, [WireSpan(region.slot, region.generation, 0, nbytes)])
    reader.channel.send([request], time.monotonic() + WAIT_S)
    head = memoryview(bytearray(data_frames.REPLY_BYTES))
    reader.channel.receive(head, time.monotonic() + WAIT_S)
    assert data_frames.decode_reply(head) == (data_frames.Code.STREAM, nbytes)
    table.drop(region.generation)  # most of it has not left: the socket holds less
    reader.channel.receive(memoryview(bytearray(nbytes)), time.monotonic() + WAIT_S)
    reader.channel.receive(head, time.monotonic() + WAIT_S)
    code, length = data_frames.decode_reply(head)
    reader.channel.receive(memoryview(bytearray(length)), time.monotonic() + WAIT_S)
    assert code is data_frames.Code.BUFFER_GONE
    with pytest.raises(BufferGoneError):
        reader.read(table, region)
    assert reader.read(table, table.add(memory_of(bytearray(b"next")))) == b"next"


def test_a_file_that_is_not_there_or_too_short_is_no_file(service, table, reader, file):
    memory = bytearray(b"m") * (_LEAST_MAPPED + 1)
    short = os.memfd_create("short")
    try:
        for fd in (short, 99_999):
            assert reader.read(table, of_file(service, table, memory, fd)) == memory
        service.share(UID, os.getpid(), ShareFile(bytes(16), 1, file[0], 0))  # of another table
        assert reader.read(table, table.add(memory_of(memory))) == memory
    finally:
        os.close(short)


def test_a_dropped_region_is_an_error_and_the_connection_goes_on(table, reader):
    dropped, kept = table.add(memory_of(bytearray(b"old"))), table.add(memory_of(bytearray(b"kept")))
    assert reader.read(table, dropped) == b"old"
    table.drop(dropped.generation)
    again = table.add(memory_of(bytearray(b"new")))
    assert again.slot == dropped.slot
    for act in (lambda: reader.read(table, dropped), lambda: reader.write(table, dropped, b"xyz")):
        with pytest.raises(BufferGoneError, match=f"buffer {dropped.generation - 1} not found"):
            act()
    assert reader.read(table, again) == b"new" and reader.read(table, kept) == b"kept"


def test_a_write_that_fails_is_read_to_its_end_and_changes_nothing(table, reader):
    data = bytearray(b"immutable")
    region = table.add(memory_of(memoryview(data).toreadonly()))
    with pytest.raises(TransferError, match="read-only"):
        reader.write(table, region, b"x" * 9)
    large = table.add(memory_of(bytearray(16)))
    with pytest.raises(TransferError, match="do not exist"):
        reader.write(table, large, bytes(3 * PIECE_BYTES))
    assert data == b"immutable" and reader.read(table, region) == b"immutable"


@pytest.mark.parametrize("place", [(0, 17), (16, 1), (2**63, 1), (1, 2**30)], ids=str)
def test_bytes_beyond_a_region_do_not_exist(table, reader, place):
    region = table.add(memory_of(bytearray(16)))
    with pytest.raises(TransferError, match="do not exist"):
        reader.read(table, region, *place)
    assert reader.read(table, region) == bytes(16)


def test_a_region_that_never_was_is_not_found(table, reader):
    table.add(memory_of(bytearray(16)))
    for slot, generation in ((0, 99), (1, 1), (5000, 1), (2**31, 1)):
        with pytest.raises(BufferGoneError):
            reader.ask(Verb.READ, table.nonce, [WireSpan(slot, generation, 0, 1)], [memoryview(bytearray(1))])


def test_an_owner_that_is_not_here_is_gone(service, table, reader):
    reader.ask(Verb.PROBE, table.nonce)
    with pytest.raises(OwnerGoneError, match="ended"):
        reader.ask(Verb.PROBE, table.nonce, uid="somebody")
    with pytest.raises(OwnerGoneError, match="another one was started in its place"):
        reader.ask(Verb.PROBE, bytes(16))
    service.on_lost(UID, os.getpid() + 1)  # the process before it under this id
    reader.ask(Verb.PROBE, table.nonce)
    service.on_lost(UID, os.getpid())
    with pytest.raises(OwnerGoneError):
        reader.ask(Verb.PROBE, table.nonce)


def test_an_owner_that_died_without_a_word_is_gone(service, reader):
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    service.share("dead", pid, ShareMemory(4096, bytes(16)))
    with pytest.raises(OwnerGoneError, match="process has ended"):
        reader.ask(Verb.PROBE, bytes(16), uid="dead")


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n" + bytes(80), bytes(100), data_frames._REQUEST.pack(data_frames.MAGIC, 9, 0, 0, bytes(16)), b"mrd1"],
    ids=["http", "zeros", "unknown verb", "half"],
)
def test_who_does_not_keep_to_the_protocol_loses_the_connection(service, data):
    reader = Reader(service)
    reader.sock.sendall(data)
    reader.sock.shutdown(socket.SHUT_WR)
    with pytest.raises(OSError):
        reader.channel.receive(memoryview(bytearray(1)), time.monotonic() + WAIT_S)
    reader.channel.close()


def test_a_writer_that_ends_in_the_middle_holds_up_nobody(service, table, reader):
    region = table.add(memory_of(bytearray(1 << 20)))
    other = Reader(service)
    other.sock.sendall(encode_request(Verb.WRITE, UID, table.nonce, [WireSpan(region.slot, region.generation, 0, 1 << 20)]) + bytes(100))
    other.channel.close()
    reader.write(table, region, b"whole")
    assert region.memory.read_at(0, 5) == b"whole"
    table.drop(region.generation)


def test_one_connection_too_many_is_told_so(table):
    with config.configured(rdma_data_max_connections=1):
        service = DataService()
    service.share(UID, os.getpid(), ShareMemory(table.address, table.nonce))
    first, second = Reader(service), Reader(service)
    with pytest.raises(TransferError, match=r"serves 1 data connections already \(rdma_data_max_connections"):
        second.ask(Verb.PROBE, table.nonce)
    first.ask(Verb.PROBE, table.nonce)
    for reader in (first, second):
        reader.channel.close()
    service.close()


def test_an_idle_connection_is_closed():
    with config.configured(rdma_idle_limit="50ms"):
        service = DataService(slack_s=0.0)
    reader = Reader(service)
    with pytest.raises(ChannelClosedError):
        reader.channel.receive(memoryview(bytearray(1)), time.monotonic() + WAIT_S)
    reader.channel.close()
    service.close()


def test_a_connection_for_which_there_is_no_thread_is_closed_and_the_next_one_served(table, service, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        refused = Reader(service)
    assert refused.sock.recv(1) == b"" and service.num_connections == 0
    refused.channel.close()
    served = Reader(service)
    assert served.read(table, table.add(memory_of(bytearray(b"bytes")))) == b"bytes"
    served.channel.close()
