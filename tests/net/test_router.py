"""Routes: one link to a peer whoever dials, nothing lost or out of order, and who is not who he should be is cut off."""

from __future__ import annotations

import os
import resource
import socket
import tempfile
import threading
from collections import deque

import pytest

from monarch._base.ids import ProcRef
from monarch._net.local import SegmentPool, available
from monarch._net.loop import NetLoop
from monarch._net.router import PROTOCOL_VERSION, Router, listen_at, socket_path
from monarch._net.stream import LinkClosedError
from monarch._wire import messages
from monarch._wire.frames import Kind, encode
from net.wires import on_loop

WAIT_S = 10.0
NO_LIMIT = 1 << 40


class Process:
    """A router on a loop of its own, and what it has told, as (what, who or number)."""

    def __init__(self, folder, name, *, pool=None):
        self.ref = ProcRef(name, f"ipc://{folder}/{name}", "")
        self.loop = NetLoop(f"monarch-test-{name}")
        self.loop.start()
        self.router = Router(self.loop, self.ref, pool, self, NO_LIMIT)
        self.told = deque()
        self.news = threading.Semaphore(0)
        self.redial = self.closed = False

    def tell(self, what, value):
        self.told.append((what, value))
        self.news.release()

    def on_peer(self, ref):
        self.tell("peer", ref.uid)

    def on_hello(self, hello):
        pass

    def on_forgotten(self, ref, reason):
        self.tell("forgotten", reason)

    def on_frame(self, link, frame, buffers):
        self.tell("frame", frame.port)

    def on_unreachable(self, ref, reason):
        self.tell("unreachable", ref.uid)
        if self.redial:
            self.loop.call_later(0.002, lambda: self.router.dial(ref))

    def on_lost(self, ref, reason, pid):
        self.tell("lost", (ref.uid, reason))

    def listen(self):
        on_loop(self.loop, self.router.listen, listen_at(socket_path(self.ref.address)))
        return self

    def send(self, other, *ports, dial=True):
        for port in ports:
            self.router.link_to(other.ref, dial=dial).send(encode(Kind.CALL, b"", b"", port=port))

    def take(self, number):
        """The next `number` news."""
        for _ in range(number):
            assert self.news.acquire(timeout=WAIT_S), list(self.told)
        return [self.told.popleft() for _ in range(number)]

    def take_frames(self, number):
        """The ports of the next frames; other news are left out."""
        ports = []
        while len(ports) < number:
            ((what, value),) = self.take(1)
            if what == "frame":
                ports.append(value)
        return ports

    def settle(self):
        """After this, what has arrived has been told."""
        for _ in range(3):
            on_loop(self.loop, int)

    def close(self):
        if not self.closed:
            self.closed = True
            on_loop(self.loop, self.router.close, "the test is over")
            self.loop.stop()
            self.loop.join(WAIT_S)


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(prefix="r") as path:  # short: the path of a socket has 107 bytes
        yield path


@pytest.fixture
def start(folder):
    """Starts processes by name; they are closed afterwards."""
    started = []

    def start_process(name, **options):
        started.append(Process(folder, name, **options))
        return started[-1]

    yield start_process
    for process in started:
        process.close()


@pytest.fixture
def two(start):
    return start("a").listen(), start("b").listen()


def raw_hello(uid, *, version=PROTOCOL_VERSION, address="ipc:///nowhere"):
    hello = messages.Hello(ProcRef(uid, address, ""), os.getpid(), version)
    return b"".join(encode(Kind.CONTROL, messages.encode(hello), b""))


def raw_call(port):
    return b"".join(encode(Kind.CALL, b"", b"", port=port))


@pytest.fixture
def stranger(two):
    """A socket that is connected to the first process and has said nothing yet."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(WAIT_S)
        sock.connect(socket_path(two[0].ref.address))
        yield sock


def rest_of(sock):
    """All that still comes until the other end closes."""
    data = b""
    try:
        while chunk := sock.recv(65536):
            data += chunk
    except ConnectionResetError:
        pass
    return data


# --- dialling ------------------------------------------------------------------------------------------------------


def test_the_first_message_dials(two):
    a, b = two
    a.send(b, 1, 2, 3)
    assert b.take(4) == [("peer", "a"), ("frame", 1), ("frame", 2), ("frame", 3)]
    assert a.take(1) == [("peer", "b")]
    b.send(a, 4)  # over the same connection
    assert a.take(1) == [("frame", 4)]
    assert a.router.statistics() == b.router.statistics() == {"links": 1, "connected": 1, "lost": 0}


def test_a_link_is_the_same_for_every_thread(two):
    a, b = two
    links, started = [], threading.Barrier(4)

    def get():
        started.wait()
        links.append(a.router.link_to(b.ref))

    threads = [threading.Thread(target=get) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(links)) == 1


def test_messages_to_a_process_that_is_not_there_yet_wait(start):
    a, b = start("a"), start("b")
    a.redial = True
    a.send(b, 1, 2)
    assert a.take(2) == [("unreachable", "b")] * 2
    assert a.router.queued_bytes() > 0
    b.listen()
    a.send(b, 3)
    assert b.take_frames(3) == [1, 2, 3]


def test_without_dialling_messages_wait_for_it(two):
    a, b = two
    a.send(b, 1, 2, dial=False)
    a.settle()
    assert not a.told and not b.told
    on_loop(a.loop, a.router.dial, b.ref)
    assert b.take_frames(2) == [1, 2]
    on_loop(a.loop, a.router.dial, b.ref)  # is connected: no second one
    assert a.router.statistics()["connected"] == 1


def test_a_message_that_waits_leaves_behind_the_hello_of_the_peer_that_dials(two):
    a, b = two
    a.send(b, 1, dial=False)
    b.send(a, 5)
    assert a.take(2) == [("peer", "b"), ("frame", 5)]
    on_loop(a.loop, a.router.dial, b.ref)
    assert b.take_frames(1) == [1]


def test_a_full_backlog_is_dialled_again(start, folder):
    a, b = start("a"), start("b")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(socket_path(b.ref.address))
        listener.listen(0)
        with socket.socket(socket.AF_UNIX) as first:
            first.connect(socket_path(b.ref.address))
            a.send(b, 1)
            a.settle()
            assert not a.told
            listener.accept()[0].close()
            accepted, _ = listener.accept()
            with accepted:
                accepted.settimeout(WAIT_S)
                assert accepted.recv(10)


@pytest.mark.parametrize("address", ["tcp://host:1", "/tmp/x", ""])
def test_another_address_is_refused(address):
    with pytest.raises(ValueError, match="expected 'ipc://<path>'"):
        socket_path(address)


@pytest.mark.cpu_limit(5)
@pytest.mark.parametrize("round", range(4))
def test_both_ends_that_dial_at_once_lose_nothing_and_keep_the_order(start, round):
    a, b = start("a").listen(), start("b").listen()
    started = threading.Barrier(2)

    def send(own, other):
        started.wait()
        for number in range(400):
            own.send(other, number)

    threads = [threading.Thread(target=send, args=pair) for pair in ((a, b), (b, a))]
    for thread in threads:
        thread.start()
    assert a.take_frames(400) == b.take_frames(400) == list(range(400))
    for thread in threads:
        thread.join()
    assert not any(what == "lost" for what, _ in [*a.told, *b.told])


def test_crossing_connections_are_both_read_and_one_is_written(two):
    a, b = two
    hold = threading.Event()
    for process in two:
        process.loop.call_soon(hold.wait, WAIT_S)  # both dial before either accepts
    a.send(b, 1)
    b.send(a, 1)
    hold.set()
    for process in two:
        assert process.take_frames(1) == [1]
    for number in range(2, 50):
        a.send(b, number)
        b.send(a, number)
    for process in two:
        assert process.take_frames(48) == list(range(2, 50))
        process.settle()
        assert process.router.statistics()["links"] == 1


@pytest.mark.skipif(not available(), reason="needs memfd")
def test_processes_without_descriptors_left_are_reached_later(start):
    a, b, c = (start(name).listen() for name in "abc")
    a.send(c, 0)
    assert c.take_frames(1) == [0]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = [socket.socket()]
    resource.setrlimit(resource.RLIMIT_NOFILE, (used[0].fileno() + 40, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                used.append(socket.socket())
        a.send(b, 1)  # can't dial
        a.settle()
        used.pop().close()  # enough to dial, not to accept
        a.settle()
        a.send(b, 2)
        a.settle()
        b.settle()
        assert not [what for what, _ in b.told if what == "frame"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for sock in used:
            sock.close()
    assert b.take_frames(2) == [1, 2]


# --- who is there --------------------------------------------------------------------------------------------------


def test_a_stranger_is_greeted_and_served_after_its_hello(two, stranger):
    a, _ = two
    stranger.sendall(raw_hello("c") + raw_call(1))
    assert a.take(2) == [("peer", "c"), ("frame", 1)]
    assert stranger.recv(65536) == raw_hello("a", address=a.ref.address)


@pytest.mark.parametrize(
    "first",
    [
        raw_call(1),
        b"".join(encode(Kind.CONTROL, messages.encode(messages.Ping()), b"")),
        b"".join(encode(Kind.CONTROL, b"\xc1", b"")),
        b"".join(encode(77, messages.encode(messages.Ping()), b"")),
        raw_hello("c", version="2"),
        raw_hello("c", version=""),
        b"GET / HTTP/1.1\r\nHost: somewhere.example.org\r\n\r\n",
        bytes(200),
    ],
    ids=["call", "ping", "nonsense", "unknown kind", "version 2", "no version", "http", "zeros"],
)
def test_another_first_frame_than_a_fitting_hello_ends_the_connection(two, stranger, first):
    a, _ = two
    stranger.sendall(first + raw_call(2))
    rest_of(stranger)
    a.settle()
    assert not a.told
    assert a.router.statistics() == {"links": 0, "connected": 0, "lost": 0}


def answering(path, answer):
    """A process at `path` that says `answer` to whoever connects; its thread."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()

    def serve():
        with listener, listener.accept()[0] as sock:
            sock.settimeout(WAIT_S)
            sock.sendall(answer)
            rest_of(sock)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (raw_hello("c"), "c answers at the address of b"),
        (raw_hello("b", version="0"), f"the peer speaks protocol 0, we speak {PROTOCOL_VERSION}"),
        (raw_call(1), "the first frame is no Hello"),
    ],
    ids=["another", "old", "rude"],
)
def test_another_process_at_the_address_is_not_served(start, answer, said):
    a, b = start("a"), start("b")
    thread = answering(socket_path(b.ref.address), answer)
    a.router.link_to(b.ref)
    assert a.take(1) == [("lost", ("b", f"protocol error: {said}"))]
    thread.join(WAIT_S)
    with pytest.raises(LinkClosedError, match=said):
        a.send(b, 2)


def test_a_second_hello_is_a_frame_like_others(two, stranger):
    a, _ = two
    stranger.sendall(raw_hello("c") + raw_hello("d") + raw_call(5))
    assert a.take(3) == [("peer", "c"), ("frame", 0), ("frame", 5)]


def test_a_stranger_that_leaves_without_a_word_is_nobodys_loss(two, stranger):
    a, _ = two
    stranger.sendall(raw_hello("c")[:-1])
    stranger.close()
    while a.router.statistics()["connected"]:
        a.settle()
    assert not a.told


# --- losing --------------------------------------------------------------------------------------------------------


def test_the_end_of_a_peer_is_told_once_to_those_who_know_it(two):
    a, b = two
    a.send(b, 1)
    assert b.take_frames(1) == [1]
    a.take(1)
    b.close()
    assert a.take(1) == [("lost", ("b", "the peer closed the connection"))]
    a.settle()
    assert not a.told
    with pytest.raises(LinkClosedError, match="the peer closed the connection"):
        a.send(b, 2)
    a.router.link_to(b.ref)
    a.settle()
    assert not a.told  # and it is not dialled


def test_of_crossing_connections_the_end_is_told_once(two):
    a, b = two
    hold = threading.Event()
    for process in two:
        process.loop.call_soon(hold.wait, WAIT_S)
    a.send(b, 1)
    b.send(a, 1)
    hold.set()
    for process in two:
        assert process.take_frames(1) == [1]
    b.close()
    told = []
    while not any(what == "lost" for what, _ in told):
        told += a.take(1)
    while a.router.statistics()["connected"]:
        a.settle()
    assert [what for what, _ in [*told, *a.told]].count("lost") == 1


def test_a_lost_process_is_refused_with_the_reason(two):
    a, b = two
    a.send(b, 1)
    b.take_frames(1)
    on_loop(a.loop, a.router.lose, b.ref, "killed by signal 9")
    on_loop(a.loop, a.router.lose, b.ref, "another reason")
    for _ in range(2):
        with pytest.raises(LinkClosedError, match="killed by signal 9"):
            a.send(b, 2)
    assert a.router.statistics() == {"links": 0, "connected": 0, "lost": 1}
    assert b.take(1) == [("lost", ("a", "the peer closed the connection"))]


def test_what_waits_for_a_process_ends_when_it_is_lost(start):
    a, b = start("a"), start("b")
    a.send(b, 1, dial=False)
    on_loop(a.loop, a.router.lose, b.ref, "failed to start")
    with pytest.raises(LinkClosedError, match="failed to start"):
        a.send(b, 2)
    assert a.router.queued_bytes() == 0


def test_senders_hear_of_a_loss_that_comes_between(start):
    a, b = start("a"), start("b")
    for number in range(200):
        ref = b.ref._replace(uid=f"b{number}")
        started = threading.Barrier(2)
        thread = threading.Thread(target=lambda ref=ref, started=started: (started.wait(), on_loop(a.loop, a.router.lose, ref, "gone")))
        thread.start()
        started.wait()
        link = a.router.link_to(ref, dial=False)
        thread.join()
        assert link.closed == "gone"
        with pytest.raises(LinkClosedError, match="gone"):
            a.router.link_to(ref).send([b""])


def test_a_lost_process_that_dials_is_refused(two, stranger):
    a, _ = two
    on_loop(a.loop, a.router.lose, ProcRef("c", "ipc:///nowhere", ""), "killed")
    stranger.sendall(raw_hello("c") + raw_call(1))
    rest_of(stranger)
    a.settle()
    assert not a.told
    with pytest.raises(LinkClosedError, match="killed"):
        a.router.link_to(ProcRef("c", "ipc:///nowhere", "")).send([b""])


def test_a_lost_process_may_come_back_when_it_is_readmitted(two):
    a, b = two
    on_loop(a.loop, a.router.lose, b.ref, "gone")
    on_loop(a.loop, a.router.readmit, b.ref)
    on_loop(a.loop, a.router.readmit, b.ref)
    a.send(b, 1)
    assert b.take_frames(1) == [1]
    assert a.router.statistics() == {"links": 1, "connected": 1, "lost": 0}


def test_a_peer_that_comes_back_under_its_id_gets_a_new_link(two, stranger):
    a, _ = two
    stranger.sendall(raw_hello("c"))
    assert a.take(1) == [("peer", "c")]
    stranger.close()
    assert [what for what, _ in a.take(1)] == ["lost"]
    with socket.socket(socket.AF_UNIX) as again:
        again.settimeout(WAIT_S)
        again.connect(socket_path(a.ref.address))
        again.sendall(raw_hello("c"))
        assert a.take(1) == [("peer", "c")]
        again.recv(65536)
        a.router.link_to(ProcRef("c", "", "")).send([raw_call(3)])
        assert again.recv(65536) == raw_call(3)


def test_closing_tells_of_every_known_peer_and_frees_the_address(start):
    a, b, c = start("a").listen(), start("b").listen(), start("c")
    a.send(b, 1)
    b.take_frames(1)
    a.take(1)
    a.send(c, 1, dial=False)
    on_loop(a.loop, a.router.close, "over")
    on_loop(a.loop, a.router.close, "over again")
    assert sorted(a.take(2)) == [("lost", ("b", "over")), ("lost", ("c", "over"))]
    a.settle()
    assert not a.told
    with socket.socket(socket.AF_UNIX) as late, pytest.raises(ConnectionRefusedError):
        late.connect(socket_path(a.ref.address))


@pytest.mark.skipif(not available(), reason="needs memfd")
def test_peers_are_told_of_closed_segments(start):
    pool = SegmentPool()
    a, b = start("a", pool=pool).listen(), start("b").listen()
    segment = pool.pack([memoryview(b"x" * 70_000)], receivers=1)
    a.router.link_to(b.ref).send(encode(Kind.CALL, b"", b"", port=1, segment=segment.segment_id, spans=segment.spans), segment)
    assert b.take_frames(1) == [1]  # looks at it no longer: gives it back
    assert a.take_frames(1) == [0]
    on_loop(a.loop, a.router.forget_segments, [segment.segment_id])
    assert b.take_frames(1) == [0]
    pool.close()


def test_a_forked_child_abandons_all_and_the_parent_goes_on(two):
    a, b = two
    a.send(b, 1)
    b.take_frames(1)
    pid = os.fork()
    if not pid:
        a.router.abandon()
        b.router.abandon()
        os._exit(0)
    os.waitpid(pid, 0)
    a.send(b, 2)
    assert b.take_frames(1) == [2]


def test_a_process_is_superseded_while_a_frame_of_it_is_handled(two):
    one, other = two
    one.send(other, 1)
    assert other.take_frames(1) == [1]
    other.send(one, 2)
    assert one.take_frames(1) == [2]
    pids, all_sent = [], threading.Event()

    class Told:
        def __getattr__(self, name):
            return getattr(one, name)

        def on_frame(self, link, frame, buffers):
            if frame.port == 3:
                assert all_sent.wait(WAIT_S)
                pids.append(one.router.supersede(other.ref, "it is replaced"))
                one.send(other, 11, dial=False)
            one.on_frame(link, frame, buffers)

    events = Told()
    for link in one.router._all:
        link.on_frame = events.on_frame
    other.send(one, 3, 4, 5)
    all_sent.set()
    assert one.take_frames(3) == [3, 4, 5], "what was said before is read"
    one.settle()
    other.settle()
    assert pids == [os.getpid()]
    assert not [what for what, _ in one.told if what == "lost"], "who superseded it knows"
    assert not [what for what, _ in other.told if what == "frame"], "that is for the successor"
    on_loop(one.loop, one.router.dial, other.ref)
    assert other.take_frames(1) == [11]
