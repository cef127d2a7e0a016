"""Every request gets one answer, whatever the file system does, and a server that stops leaves nobody waiting."""

from __future__ import annotations

import errno
import logging
import os
import struct
import threading

import pytest

from monarch._base.errors import InternalError
from monarch._mounts.filesystem import LIVE, PUSHED, Attr, Entry, Opened
from monarch._mounts.fuse_calls import OpenCall
from monarch._mounts.fuse_protocol import CHANGES, Header, Opcode
from monarch._mounts.fuse_server import End, FuseServer
from mounts.kernel import WAIT_S, Kernel
from mounts.trees import Parked, Tree

CONTENT = {"a": b"alpha" * 1000, "parked": Parked(), "folder": {f"f{index:03d}": b"x" for index in range(100)}}


class Rig:
    def __init__(self, habits=PUSHED, **options):
        self.kernel = Kernel()
        self.tree = Tree(CONTENT, habits)
        self.server = FuseServer(self.kernel.fd, self.tree, **options)
        self.server.start()
        self.kernel.init()

    def node(self, path):
        return self.tree.paths[path]


@pytest.fixture
def rig():
    rigs = []

    def make(habits=PUSHED, **options):
        rigs.append(Rig(habits, **options))
        return rigs[-1]

    yield make
    for one in rigs:
        assert one.server.stop()
        one.kernel.close()


def test_a_name_an_attribute_and_bytes_are_answered(rig):
    it = rig()
    error, body = it.kernel.ask(Opcode.LOOKUP, 1, b"a\0")
    assert error == 0 and struct.unpack_from("=Q", body) == (it.node("/a"),)
    error, body = it.kernel.ask(Opcode.GETATTR, it.node("/a"), bytes(16))
    assert error == 0 and struct.unpack_from("=QQ", body, 16) == (it.node("/a"), 5000)
    assert it.kernel.reply(it.kernel.read(it.node("/a"), 4998)) == (0, b"ha")
    assert it.kernel.reply(it.kernel.read(it.node("/a"), 5000)) == (0, b"")


def test_a_missing_name_is_remembered_by_the_kernel_where_the_tree_says_so(rig):
    error, body = rig().kernel.ask(Opcode.LOOKUP, 1, b"none\0")
    assert (error, len(body)) == (0, 128) and struct.unpack_from("=QQQ", body) == (0, 0, 365 * 24 * 3600)
    assert rig(LIVE).kernel.ask(Opcode.LOOKUP, 1, b"none\0") == (errno.ENOENT, b"")


@pytest.mark.parametrize("opcode", sorted(CHANGES), ids=lambda code: code.name)
def test_nothing_can_be_changed(rig, opcode):
    it = rig()
    assert it.kernel.ask(opcode, 1, bytes(64)) == (errno.EROFS, b"")
    assert it.tree.calls == []


@pytest.mark.parametrize(
    "opcode",
    [Opcode.ACCESS, Opcode.FLUSH, Opcode.GETXATTR, Opcode.LISTXATTR, Opcode.POLL, Opcode.LSEEK, Opcode.STATX, Opcode.FSYNC, 63, 1000],
)
def test_what_the_kernel_can_do_by_itself_is_declined_for_good(rig, opcode):
    assert rig().kernel.ask(opcode, 1, bytes(64)) == (errno.ENOSYS, b"")


def test_ioctl_says_that_this_is_no_terminal(rig):
    assert rig().kernel.ask(Opcode.IOCTL, 1, bytes(32)) == (errno.ENOTTY, b"")


@pytest.mark.parametrize("habits", [PUSHED, LIVE], ids=["pushed", "live"])
def test_opening_for_writing_is_refused(rig, habits):
    assert rig(habits).kernel.ask(Opcode.OPEN, 2, struct.pack("=II", os.O_RDWR, 0)) == (errno.EROFS, b"")


def test_a_tree_that_is_not_opened_says_so_once(rig):
    it = rig()
    assert it.kernel.ask(Opcode.OPEN, 2, bytes(8)) == (errno.ENOSYS, b"")
    assert it.kernel.ask(Opcode.OPENDIR, 1, bytes(8)) == (errno.ENOSYS, b"")
    assert it.tree.calls == []


def test_a_kernel_that_does_not_know_the_short_cut_gets_a_handle():
    kernel, tree = Kernel(), Tree(CONTENT)
    server = FuseServer(kernel.fd, tree)
    server.start()
    kernel.init(flags=0)
    assert kernel.ask(Opcode.OPEN, 2, bytes(8)) == (0, struct.pack("=QIi", 0, 2, 0))
    assert kernel.ask(Opcode.OPENDIR, 1, bytes(8)) == (0, struct.pack("=QIi", 0, 2 | 8, 0))
    assert kernel.ask(Opcode.RELEASE, 2, bytes(24)) == (0, b"")
    assert tree.calls == [] and server.stop()
    kernel.close()


def test_an_opened_file_is_read_by_its_handle_and_released(rig):
    it = rig(LIVE)
    node = it.node("/a")
    error, body = it.kernel.ask(Opcode.OPEN, node, bytes(8))
    assert (error, body) == (0, struct.pack("=QIi", node + 1000, 2, 0))
    assert it.kernel.reply(it.kernel.read(node, 0, 5, handle=node + 1000)) == (0, b"alpha")
    assert it.kernel.ask(Opcode.RELEASE, node, struct.pack("=QIIQ", node + 1000, 0, 0, 0)) == (0, b"")
    it.kernel.ask(Opcode.STATFS)
    assert it.tree.released == [node + 1000]


OPENED = struct.Struct("=QIi")
RELEASE = struct.Struct("=QIIQ")


def test_the_bytes_of_a_small_file_come_before_the_answer_to_its_first_opening(rig):
    it = rig(passthrough=True)
    node = it.node("/a")
    it.tree.given = {node}
    for _ in range(2):
        first = it.kernel.send(Opcode.OPEN, node, bytes(8))
        assert it.kernel.notice() == (-4, struct.pack("=QQII", node, 0, 5000, 0) + b"alpha" * 1000)
        assert first not in it.kernel.early, "answered before"
        assert it.kernel.reply(first) == (0, OPENED.pack(node + 1000, 2, 0))
        assert it.kernel.ask(Opcode.OPEN, node, bytes(8)) == (0, OPENED.pack(node + 1000, 2, 0))
        for _ in range(2):
            it.kernel.ask(Opcode.RELEASE, node, RELEASE.pack(node + 1000, 0, 0, 0))
        assert 0 not in it.kernel.early, "a READ may have been under way"
    assert it.server.statistics().given == 2


def test_an_opening_that_nobody_has_waited_for_does_not_count(rig):
    it = rig(passthrough=True)
    node = it.node("/a")
    call = OpenCall(it.server._desk, it.kernel.fd, Header(Opcode.OPEN, 2, node, 0, 0, 0), bytes(48), 48)
    call.reply(Opened(handle=3))
    call.take_back()
    it.tree.given = {node}
    it.kernel.send(Opcode.OPEN, node, bytes(8))
    assert it.kernel.notice()[0] == -4 and it.tree.released == [3]


def names_in(body):
    at, found = 0, []
    while at < len(body):
        _, offset, length, _ = struct.unpack_from("=QQII", body, at)
        found.append((body[at + 24 : at + 24 + length], offset))
        at += 24 + length + -length % 8
    return found


def list_all(kernel, node, handle, size=500):
    names, offset = [], 0
    while True:
        error, body = kernel.ask(Opcode.READDIR, node, struct.pack("=QQIIQII", handle, offset, size, 0, 0, 0, 0))
        assert error == 0
        if not body:
            return names
        piece = names_in(body)
        names += [name for name, _ in piece]
        offset = piece[-1][1]


@pytest.mark.parametrize("habits", [PUSHED, LIVE], ids=["pushed", "live"])
@pytest.mark.parametrize("size", [60, 500, 4096, 100_000])
def test_a_directory_read_in_pieces_has_each_name_once(rig, habits, size):
    it = rig(habits)
    node = it.node("/folder")
    handle = 0
    if habits.opens:
        handle = struct.unpack_from("=Q", it.kernel.ask(Opcode.OPENDIR, node, bytes(8))[1])[0]
        assert handle
    expected = [b".", b"..", *sorted(os.fsencode(name) for name in CONTENT["folder"])]
    assert list_all(it.kernel, node, handle, size) == expected
    if habits.opens:
        assert it.tree.calls == [("children", node)]  # one snapshot per open directory
        assert list_all(it.kernel, node, handle, size) == expected
        assert it.tree.calls == [("children", node)] * 2  # rewound
        assert it.kernel.ask(Opcode.RELEASEDIR, node, struct.pack("=QIIQ", handle, 0, 0, 0)) == (0, b"")
        assert it.server._desk.listings == {}


def test_a_malformed_request_is_refused_and_the_next_one_served(rig, caplog):
    it = rig()
    assert it.kernel.ask(Opcode.READ, 2, b"short") == (errno.EIO, b"")
    assert it.kernel.reply(it.kernel.send(Opcode.LOOKUP, 1, b"a\0", length=999)) == (errno.EIO, b"")
    it.kernel.end.send(b"no header")
    assert it.kernel.ask(Opcode.LOOKUP, 1, b"a\0")[0] == 0
    assert [record.message for record in caplog.records] == [
        "malformed request: a body of 5 bytes is shorter than the 20 of its kind",
        "malformed request: a request of 42 bytes claims to have 999",
        "malformed request: a request of 9 bytes is shorter than its header of 40",
    ]


def test_an_exception_of_the_file_system_is_eio_and_logged_once_per_kind(rig, caplog):
    it = rig(LIVE)
    it.tree.error = ValueError("broken tree")
    for _ in range(3):
        assert it.kernel.ask(Opcode.LOOKUP, 1, b"a\0") == (errno.EIO, b"")
        assert it.kernel.reply(it.kernel.read(2)) == (errno.EIO, b"")
        assert it.kernel.ask(Opcode.RELEASE, 2, bytes(24)) == (0, b"")
    it.tree.error = None
    assert it.kernel.ask(Opcode.LOOKUP, 1, b"a\0")[0] == 0
    assert [record.message for record in caplog.records] == [
        "lookup() of the file system failed",
        "read() of the file system failed",
        "release() of the file system failed",
    ]
    assert "broken tree" in caplog.text


@pytest.mark.parametrize(
    ("opcode", "body", "method", "value"),
    [
        (Opcode.LOOKUP, b"a\0", "lookup", None),
        (Opcode.LOOKUP, b"a\0", "lookup", Entry(2, Attr(0, -5))),
        (Opcode.LOOKUP, b"a\0", "lookup", 0),
        (Opcode.LOOKUP, b"a\0", "lookup", 5000),
        (Opcode.GETATTR, bytes(16), "attr", "text"),
        (Opcode.READ, struct.pack("=QQIIQII", 0, 0, 4, 0, 0, 0, 0), "read", [b"five!"]),
    ],
    ids=["none", "negative", "zero", "large", "text", "too_much"],
)
def test_an_answer_that_is_none_is_eio(rig, opcode, body, method, value, caplog):
    it = rig()
    setattr(it.tree, method, lambda *arguments: value)
    assert it.kernel.ask(opcode, 2, body) == (errno.EIO, b"")
    assert it.kernel.ask(Opcode.STATFS)[0] == 0


def test_a_deferred_answer_goes_out_once_and_overtakes_nobody(rig):
    it = rig()
    first = it.kernel.read(it.node("/parked"))
    assert it.kernel.reply(it.kernel.read(it.node("/a"), 0, 5)) == (0, b"alpha")
    (later,) = it.tree.waiting
    assert it.server.statistics().parked == 1
    threads = [threading.Thread(target=later.answer, args=([b"late", memoryview(b"data")],)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    later.fail(errno.EIO)
    assert it.kernel.reply(first) == (0, b"latedata")
    it.kernel.ask(Opcode.STATFS)
    assert it.kernel.early == {} and it.server.statistics().parked == 0 and not later.cancelled


def test_an_answer_given_before_the_method_returns_counts(rig):
    it = rig()

    def at_once(parent, name, later):
        later.answer(it.tree.entry(it.node("/a")))
        return later

    it.tree.lookup = at_once
    error, body = it.kernel.ask(Opcode.LOOKUP, 1, b"a\0")
    assert error == 0 and struct.unpack_from("=Q", body) == (it.node("/a"),)
    assert it.server.statistics().parked == 0


@pytest.mark.parametrize("threads", [1, 3])
def test_an_interrupted_request_ends_at_once(rig, threads):
    it = rig(threads=threads)
    waits = it.kernel.read(it.node("/parked"))
    assert it.tree.parked.wait(WAIT_S)
    it.kernel.send(Opcode.INTERRUPT, 0, struct.pack("=Q", waits))
    assert it.kernel.reply(waits) == (errno.EINTR, b"")
    (later,) = it.tree.waiting
    assert later.cancelled
    later.answer([b"too late"])
    it.kernel.ask(Opcode.STATFS)
    assert it.kernel.early == {}


def test_an_interrupt_that_another_thread_has_read_first_is_not_lost(rig):
    it = rig(threads=2)
    inside, go_on = threading.Event(), threading.Event()

    def slow(node, handle, offset, size, later):
        inside.set()
        assert go_on.wait(WAIT_S)
        return later

    it.tree.read = slow
    waits = it.kernel.read(it.node("/a"))
    assert inside.wait(WAIT_S)
    it.kernel.send(Opcode.INTERRUPT, 0, struct.pack("=Q", waits))
    it.kernel.ask(Opcode.STATFS)
    go_on.set()
    assert it.kernel.reply(waits) == (errno.EINTR, b"")


def test_patience_ends_and_does_not_begin_anew_for_the_page_that_is_read_once_more(rig):
    it = rig(patience_s=0.2)
    assert it.kernel.reply(it.kernel.read(it.node("/parked"), 0, 131072)) == (errno.ETIMEDOUT, b"")
    (later,) = it.tree.waiting
    assert later.cancelled
    began = it.server.statistics().requests["READ"]
    assert it.kernel.reply(it.kernel.read(it.node("/parked"), 0, 4096)) == (errno.ETIMEDOUT, b"")
    assert it.tree.waiting[1].cancelled and it.server.statistics().requests["READ"] == began + 1


def test_stop_answers_who_waits_and_is_idempotent(rig):
    it = rig()
    waits = it.kernel.read(it.node("/parked"))
    assert it.tree.parked.wait(WAIT_S)
    assert it.server.stop() and it.server.stop()
    assert it.kernel.reply(waits) == (errno.ENOTCONN, b"")
    assert it.server.closed.result(0) is End.STOPPED
    assert it.tree.waiting[0].cancelled
    it.tree.waiting[0].answer([b"nobody hears"])
    assert it.kernel.end.recv(10) == b""  # our descriptor is closed


def test_stop_waits_for_a_busy_file_system_only_so_long_and_closes_later(rig):
    it = rig()
    inside, go_on = threading.Event(), threading.Event()

    def slow(node, later):
        inside.set()
        assert go_on.wait(WAIT_S)
        return errno.EIO

    it.tree.attr = slow
    it.kernel.send(Opcode.GETATTR, 1, bytes(16))
    assert inside.wait(WAIT_S)
    assert not it.server.stop(timeout_s=0.05)
    assert not it.server.closed.done()
    go_on.set()
    assert it.server.closed.result(WAIT_S) is End.STOPPED
    assert it.server.stop()


def test_the_end_of_the_connection_is_told(rig):
    it = rig()
    waits = it.kernel.read(it.node("/parked"))
    assert it.tree.parked.wait(WAIT_S) and waits
    it.kernel.close()
    assert it.server.closed.result(WAIT_S) is End.UNMOUNTED
    assert it.tree.waiting[0].cancelled
    it.server.invalidate_node(1)
    assert it.server.stop() and it.server.closed.result(0) is End.UNMOUNTED


def test_a_server_that_was_never_started_stops():
    kernel = Kernel()
    server = FuseServer(kernel.fd, Tree({}))
    assert server.stop() and server.closed.result(0) is End.STOPPED
    with pytest.raises(RuntimeError, match="is started once"):
        server.start()
    kernel.close()


def test_a_kernel_without_a_common_version_is_refused(caplog):
    kernel = Kernel()
    server = FuseServer(kernel.fd, Tree({}))
    server.start()
    assert kernel.init(minor=12) == (errno.EPROTO, b"")
    assert "the kernel speaks FUSE 7.12" in caplog.text
    assert server.closed.result(WAIT_S) is End.REFUSED and server.stop()
    kernel.close()


def test_invalidations_reach_the_kernel_and_not_from_the_servers_own_threads(rig, caplog):
    it = rig()
    it.server.invalidate_entry(1, b"a")
    assert it.kernel.notice() == (-3, struct.pack("=QII", 1, 1, 0) + b"a\0")
    it.server.invalidate_node(5, 10, 20)
    assert it.kernel.notice() == (-2, struct.pack("=Qqq", 5, 10, 20))
    it.tree.attr = lambda node, later: it.server.invalidate_node(node)
    assert it.kernel.ask(Opcode.GETATTR, 1, bytes(16))[0] == errno.EIO
    it.tree.attr = lambda node, later: it.server.stop()
    assert it.kernel.ask(Opcode.GETATTR, 1, bytes(16))[0] == errno.EIO
    assert isinstance(caplog.records[0].exc_info[1], InternalError)


def test_nodes_are_forgotten_when_the_kernel_knows_them_no_longer(rig):
    it = rig(LIVE)
    node = it.node("/a")
    for _ in range(3):
        it.kernel.ask(Opcode.LOOKUP, 1, b"a\0")
    it.kernel.ask(Opcode.READDIRPLUS, 1, struct.pack("=QQIIQII", 0, 0, 4096, 0, 0, 0, 0))
    assert it.server.statistics().known_nodes == 3
    it.kernel.send(Opcode.FORGET, node, struct.pack("=Q", 3))
    it.kernel.ask(Opcode.STATFS)
    assert it.tree.forgotten == []
    folder, parked = it.node("/folder"), it.node("/parked")
    it.kernel.send(Opcode.BATCH_FORGET, 0, struct.pack("=II6Q", 3, 0, node, 1, folder, 1, parked, 1))
    it.kernel.ask(Opcode.STATFS)
    assert it.tree.forgotten == [node, folder, parked] and it.server.statistics().known_nodes == 0


def test_a_read_of_thousands_of_parts_is_one_reply(rig):
    it = rig()
    it.tree.read = lambda node, handle, offset, size, later: [b"ab"] * 3000
    assert it.kernel.reply(it.kernel.read(2, 0, 8192)) == (0, b"ab" * 3000)


def test_a_thread_of_the_server_that_dies_takes_the_connection_along(rig, monkeypatch):
    it = rig()
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)

    def leave(node, later):
        raise SystemExit

    it.tree.attr = leave
    it.kernel.send(Opcode.GETATTR, 1, bytes(16))
    assert it.server.closed.result(WAIT_S) is End.ABORTED
    assert it.kernel.end.recv(10) == b""


def test_an_answer_that_nobody_takes_is_taken_back(rig):
    it = rig(LIVE)
    lookups = []
    it.tree.lookup = lambda parent, name, later: lookups.append(later) or later
    it.tree.open = lambda node, later: lookups.append(later) or later
    it.kernel.send(Opcode.LOOKUP, 1, b"a\0")
    it.kernel.send(Opcode.OPEN, 2, bytes(8))
    it.kernel.ask(Opcode.STATFS)
    it.server._device.write = lambda fd, parts: errno.ENOENT
    lookups[0].answer(it.tree.entry(2))
    lookups[1].answer(Opened(handle=77))
    assert it.server.statistics().known_nodes == 0 and it.tree.released == [77]


def test_statistics_count_requests_by_name(rig):
    it = rig(threads=2)
    for _ in range(3):
        it.kernel.ask(Opcode.LOOKUP, 1, b"a\0")
    it.kernel.ask(700)
    assert it.server.statistics().requests == {"INIT": 1, "LOOKUP": 3, "opcode 0": 1}
    assert it.server.statistics().threads == 2


@pytest.mark.parametrize("options", [{"threads": 0}, {"patience_s": 0}, {"patience_s": -1.0}])
def test_impossible_options_are_refused(options):
    kernel = Kernel()
    with pytest.raises(ValueError, match="threads >= 1 and patience_s > 0"):
        FuseServer(kernel.fd, Tree({}), **options)
    os.close(kernel.fd)
    kernel.close()


def test_nothing_is_logged_of_a_life_without_faults(rig, caplog):
    with caplog.at_level(logging.INFO):
        it = rig()
        it.kernel.ask(Opcode.LOOKUP, 1, b"a\0")
        it.server.stop()
    assert caplog.records == []
