"""Greeters: only who proves the secret gets through; everybody else costs little, for a short time, and is counted exactly."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import socket
import ssl
import struct
import threading
from collections import deque
from pathlib import Path

import pytest

from monarch._net import greeter as greeter_module
from monarch._net.certificates import mint_job_certificates
from monarch._net.credentials import Credentials
from monarch._net.greeter import Greeter
from monarch._net.handshake import (
    MAX_UNPROVEN_BYTES,
    DialerProof,
    Preface,
    StatusCode,
    StatusReader,
    encode_preface,
)
from monarch._net.loop import NetLoop
from monarch._net.sockets import origin_of
from net.wires import exactly, on_loop

WAIT_S = 10.0
SECRET = b"a secret of thirty-two characters"
GONE = "no such process runs here, or it has ended"


class Door:
    """A greeter that listens on loopback, and what came through."""

    def __init__(self, *, shown=None, tls=False):
        self.shown = Credentials(SECRET) if shown is None else shown
        self.loop = NetLoop("monarch-test-greeter")
        self.loop.start()
        self.greeter = Greeter(self.loop, self.credentials, self.route, self.connected)
        self.through = deque()
        self.asked = deque()
        self.answer = lambda greeting: greeting.accept()
        self.news = threading.Condition()
        sock = socket.create_server(("127.0.0.1", 0))
        self.address = sock.getsockname()
        on_loop(self.loop, lambda: self.greeter.listen(sock, tls=tls))

    def credentials(self):
        if isinstance(self.shown, Exception):
            raise self.shown
        return self.shown

    def route(self, preface, greeting):
        self.asked.append(preface.target)
        self.answer(greeting)

    def connected(self, sock):
        with self.news:
            self.through.append(sock)
            self.news.notify_all()

    def wait_through(self, number=1):
        with self.news:
            assert self.news.wait_for(lambda: len(self.through) >= number, WAIT_S), self.counts()

    def counts(self):
        return on_loop(self.loop, lambda: dict(self.greeter.counts))

    def wait_counts(self, **expected):
        """Until these are the counts; "ended" is closed or broken: a close with unread bytes is a reset."""
        give_up = threading.Event()
        timer = threading.Timer(WAIT_S, give_up.set)
        timer.start()
        while (counts := self.counts()) != expected and not give_up.is_set():
            if "ended" in expected and (ended := counts.pop("closed", 0) + counts.pop("broken", 0)):
                counts["ended"] = ended
            if counts == expected:
                break
        timer.cancel()
        assert counts == expected

    def left(self):
        """What the greeter still holds: connections, origins, timers."""
        g = self.greeter
        return on_loop(self.loop, lambda: (len(g._greetings), len(g._origins)))

    def close(self):
        on_loop(self.loop, self.greeter.close)
        for sock in self.through:
            sock.close()
        self.loop.stop()
        self.loop.join(WAIT_S)


@pytest.fixture
def open_door():
    doors = []

    def make(**options):
        doors.append(Door(**options))
        return doors[-1]

    yield make
    for door in doors:
        door.close()


@pytest.fixture
def door(open_door):
    return open_door()


@contextlib.contextmanager
def connected(door, first=b"", source=""):
    with socket.socket() as sock:
        sock.settimeout(WAIT_S)
        if source:
            sock.bind((source, 0))
        sock.connect(door.address)
        sock.sendall(first)
        yield sock


def ends(sock):
    """Read until the end: what came, and no error but a reset."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(4096):
            data += piece
    return data


def status_of(sock):
    reader = StatusReader()
    while needed := reader.needed():
        reader.feed(exactly(sock, needed))
    return reader.status


def prove(sock, secret=SECRET, target=""):
    """Say everything a dialer says, one step at a time."""
    proof = DialerProof(secret, target)
    sock.sendall(encode_preface(Preface(target, False)) + proof.first_bytes())
    status = status_of(sock)
    assert status.code is StatusCode.OK
    sock.sendall(proof.feed(exactly(sock, proof.needed())))


def steps(secret=SECRET):
    """What a dialer sends, step by step, each as a function of the socket."""
    proof = DialerProof(secret, "")
    return [
        lambda sock: sock.sendall(encode_preface(Preface("", False))[:5]),
        lambda sock: sock.sendall(encode_preface(Preface("", False))[5:]),
        lambda sock: sock.sendall(proof.first_bytes()[:7]) if status_of(sock) else None,
        lambda sock: sock.sendall(proof.first_bytes()[7:]),
        lambda sock: sock.sendall(proof.feed(exactly(sock, 64))[:31]),
    ]


def test_who_proves_the_secret_gets_through_and_what_follows_is_not_touched(door):
    with connected(door) as sock:
        prove(sock)
        sock.sendall(b"frames")
        door.wait_through()
        door.through[0].setblocking(True)
        assert door.through[0].recv(6) == b"frames"
    assert door.counts() == {"taken": 1, "proved": 1} and door.left() == (0, 0)


def test_a_handshake_in_single_bytes_is_the_same(door):
    proof = DialerProof(SECRET, "")
    with connected(door) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in encode_preface(Preface("", False)) + proof.first_bytes():
            sock.send(bytes([byte]))
        assert status_of(sock).needs_secret
        for byte in proof.feed(exactly(sock, 64)):
            sock.send(bytes([byte]))
        door.wait_through()


@pytest.mark.parametrize("number", range(6))
def test_a_connection_that_is_closed_at_some_step_leaves_nothing(door, number):
    with connected(door) as sock:
        for step in steps()[:number]:
            step(sock)
    door.wait_counts(taken=1, ended=1)
    assert door.left() == (0, 0)


@pytest.mark.parametrize("number", range(6))
def test_a_connection_that_is_reset_at_some_step_leaves_nothing(door, number):
    with connected(door) as sock:
        for step in steps()[:number]:
            step(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    door.wait_counts(taken=1, ended=1)
    assert door.left() == (0, 0)


@pytest.mark.parametrize("number", range(6))
def test_who_is_slow_at_some_step_is_ended_in_time(open_door, monkeypatch, number):
    monkeypatch.setattr(greeter_module, "_GREETING_S", 0.1)
    door = open_door()
    with connected(door) as sock:
        for step in steps()[:number]:
            step(sock)
        ends(sock)
    door.wait_counts(taken=1, slow=1)
    assert door.left() == (0, 0)


def test_a_byte_now_and_then_buys_no_time(open_door, monkeypatch):
    monkeypatch.setattr(greeter_module, "_GREETING_S", 0.15)
    door = open_door()
    first = encode_preface(Preface("x" * 255, False))
    with connected(door) as sock:
        sent = 0
        with contextlib.suppress(OSError):
            for byte in first:
                sock.settimeout(0.02)
                sock.send(bytes([byte]))
                sent += 1
                with contextlib.suppress(TimeoutError):
                    if not sock.recv(1):
                        break
        assert sent < 100
    door.wait_counts(taken=1, slow=1)


def test_one_timer_serves_all_so_a_flood_leaves_none_behind(door):
    pending = on_loop(door.loop, lambda: len(door.loop._timers))
    for _ in range(200):
        with connected(door):
            pass
    door.wait_counts(taken=200, closed=200)
    assert on_loop(door.loop, lambda: len(door.loop._timers)) <= pending + 2


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "it speaks HTTP"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "it begins with TLS"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "it speaks SSH"),
        (os.urandom(11) + b"x", "it is|it begins"),
        (encode_preface(Preface("", True)), "this is a tcp:// address"),
        (encode_preface(Preface("", False))[:8] + b"\x63\x00\x00", "version 99"),
        (encode_preface(Preface("", False))[:9] + b"\xf0\x00", "unknown flags"),
        (encode_preface(Preface("", False))[:10] + b"\x02\xff\xfe", "not UTF-8"),
        (encode_preface(Preface("", False))[:10] + b"\x02\x1b[", "not printable"),
    ],
)
def test_what_is_no_preface_is_refused_with_a_reason(door, caplog, sent, said):
    with caplog.at_level(logging.WARNING, "monarch.net"), connected(door, sent + bytes(200)) as sock:
        status = status_of(sock)
        assert ends(sock) == b""
        door.wait_counts(taken=1, refused=1)
    assert status.code is StatusCode.REFUSED and not status.needs_secret
    assert "connections refused: refused 1" in caplog.text
    if "|" not in said:
        assert said in status.text and said in caplog.text
    assert not door.asked


def test_another_secret_is_found_out_by_the_proof(door, caplog):
    with caplog.at_level(logging.WARNING, "monarch.net"), connected(door) as sock:
        sock.sendall(encode_preface(Preface("", False)) + bytes(range(32)))
        status_of(sock)
        exactly(sock, 64)
        sock.sendall(bytes(32))
        assert ends(sock) == b""
        door.wait_counts(taken=1, proof=1)
    assert "another secret" in caplog.text and SECRET.decode() not in caplog.text
    assert not door.through


def test_without_a_secret_here_nobody_needs_one_and_a_secret_there_is_noticed(open_door):
    door = open_door(shown=Credentials())
    with connected(door) as sock:
        prove(sock, b"")
        door.wait_through()
    with connected(door) as sock:
        sock.sendall(encode_preface(Preface("", False)) + bytes(range(32)))
        assert not status_of(sock).needs_secret
        exactly(sock, 64)
        sock.sendall(os.urandom(32))
        assert ends(sock) == b""
    door.wait_counts(taken=2, proved=1, proof=1)


def test_a_proof_of_one_connection_is_worth_nothing_in_another(door):
    said = []
    with connected(door) as sock:
        proof = DialerProof(SECRET, "")
        said.append(encode_preface(Preface("", False)) + proof.first_bytes())
        sock.sendall(said[0])
        status_of(sock)
        said.append(proof.feed(exactly(sock, 64)))
        sock.sendall(said[1])
        door.wait_through()
    with connected(door, said[0]) as sock:
        status_of(sock)
        exactly(sock, 64)
        sock.sendall(said[1])
        assert ends(sock) == b""
    door.wait_counts(taken=2, proved=1, proof=1)


def test_the_challenge_sent_back_proves_nothing(door):
    with connected(door, encode_preface(Preface("", False)) + bytes(32)) as sock:
        status_of(sock)
        theirs = exactly(sock, 64)
        with connected(door, encode_preface(Preface("", False)) + theirs[:32]) as other:
            status_of(other)
            sock.sendall(exactly(other, 64)[32:])
            assert ends(sock) == b""
    door.wait_counts(taken=2, proof=1, ended=1)


def test_the_route_is_told_the_target_and_may_refuse(door):
    door.answer = lambda greeting: greeting.refuse(StatusCode.GONE, GONE)
    with connected(door, encode_preface(Preface("abc.3", False)) + bytes(32)) as sock:
        assert status_of(sock) == (StatusCode.GONE, False, GONE)
        assert ends(sock) == b""
    door.answer = lambda greeting: greeting.refuse(StatusCode.BUSY, "later")
    with connected(door, encode_preface(Preface("abc.3", False))) as sock:
        assert status_of(sock).code is StatusCode.BUSY
    door.wait_counts(taken=2, gone=1, busy=1)
    assert list(door.asked) == ["abc.3"] * 2


def test_a_connection_that_is_taken_goes_on_in_another_greeter(open_door):
    agent, proc = open_door(), open_door()

    def pass_on(greeting):
        sock = greeting.take()
        proc.loop.call_soon(proc.greeter.go_on, sock, Preface("abc.3", False), greeting.peer)

    agent.answer = pass_on
    with connected(agent) as sock:
        prove(sock, target="abc.3")
        proc.wait_through()
    assert agent.counts() == {"taken": 1, "passed": 1} and proc.counts() == {"taken": 1, "proved": 1}
    with connected(agent) as sock, pytest.raises(AssertionError, match="closed"):
        sock.sendall(encode_preface(Preface("abc.3", False)) + bytes(32))
        status_of(sock)
        exactly(sock, 64)
        sock.sendall(os.urandom(32))
        exactly(sock, 1)
    proc.wait_counts(taken=2, proved=1, proof=1)
    assert agent.left() == proc.left() == (0, 0)


def test_a_secret_that_can_t_be_used_ends_the_connection_and_says_why_here_only(open_door, caplog):
    door = open_door(shown=ValueError("the secret has 3 characters"))
    with caplog.at_level(logging.WARNING, "monarch.net"), connected(door, encode_preface(Preface("", False))) as sock:
        assert ends(sock) == b""
        door.wait_counts(taken=1, credentials=1)
    assert "the secret has 3 characters" in caplog.text


def test_one_more_than_fit_ends_the_oldest_of_the_machine_that_has_most(door, monkeypatch):
    monkeypatch.setattr(greeter_module, "_MAX_GREETINGS", 4)
    with contextlib.ExitStack() as stack:
        honest = stack.enter_context(connected(door, encode_preface(Preface("", False)), source="127.0.0.2"))
        status_of(honest)
        flood = []
        for _ in range(20):
            flood.append(stack.enter_context(connected(door, encode_preface(Preface("", False)))))
            status_of(flood[-1])
        assert all(ends(sock) == b"" for sock in flood[:17])
        assert door.counts() == {"taken": 21, "crowd": 17} and door.left() == (4, 2)
        proof = DialerProof(SECRET, "")
        honest.sendall(proof.first_bytes())
        honest.sendall(proof.feed(exactly(honest, 64)))
        door.wait_through()
    door.wait_counts(taken=21, proved=1, crowd=17, ended=3)


@pytest.mark.parametrize(
    ("peer", "origin"),
    [
        ("10.0.0.7:26600", "10.0.0.7"),
        ("[::ffff:10.0.0.7]:1", "10.0.0.7"),
        ("[fd00:1:2:3:4:5:6:7]:1", "fd00000100020003"),
        ("[fd00:1:2:3::1]:2", "fd00000100020003"),
        ("[fe80::1%eth0]:2", "fe80000000000000"),
        ("", ""),
    ],
)
def test_limits_are_shared_by_what_one_machine_has(peer, origin):
    assert origin_of(peer) == origin


def test_a_quarter_of_the_descriptors_is_the_most(monkeypatch):
    for soft, plain, tls in ((1024, 256, 128), (100_000, 512, 128), (2, 1, 1), (resource.RLIM_INFINITY, 512, 128)):
        monkeypatch.setattr(greeter_module.resource, "getrlimit", lambda _which, soft=soft: (soft, soft))
        assert (greeter_module.most_greetings(tls=False), greeter_module.most_greetings(tls=True)) == (plain, tls)


def test_without_descriptors_the_oldest_goes_and_the_next_is_served(door):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connected(door)) for _ in range(6)]
        door.wait_counts(taken=6)
        more = [stack.enter_context(socket.socket()) for _ in range(4)]
        for sock in more:
            sock.settimeout(WAIT_S)
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        fillers = []
        with contextlib.suppress(OSError):
            while (filler := os.dup(0)) < highest:
                fillers.append(filler)
            os.close(filler)
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, limits[1]))
        try:
            for sock in more:
                sock.connect(door.address)
                sock.sendall(encode_preface(Preface("", False)))
                assert status_of(sock).code is StatusCode.OK
            # Linux takes a descriptor before it looks who waits, so one more goes than comes.
            assert door.counts()["crowd"] in (4, 5) and door.left()[0] in (5, 6)
            assert ends(idle[0]) == b""
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for filler in fillers:
                os.close(filler)


def test_a_lack_of_descriptors_is_waited_for_once(door, monkeypatch):
    class Exhausted:
        def fileno(self):
            return -1

        def accept(self):
            raise OSError(errno.EMFILE, "Too many open files")

        def close(self):
            pass

    def knock():
        listener = Exhausted()
        door.greeter._listeners[listener] = None
        before = len(door.loop._soon)
        for _ in range(50):
            door.greeter._on_connection(listener)
        added = len(door.loop._soon) - before
        door.greeter._listeners.pop(listener)
        return added

    assert on_loop(door.loop, knock) == 1


def test_refusals_are_told_at_once_and_then_once_in_a_while(open_door, monkeypatch, caplog):
    monkeypatch.setattr(greeter_module, "_SAY_EVERY_S", 0.2)
    door = open_door()
    said = threading.Event()
    with caplog.at_level(logging.WARNING, "monarch.net"):
        for _ in range(30):
            with connected(door, b"GET / HTTP/1.1\r\n\r\n") as sock:
                ends(sock)
        door.wait_counts(taken=30, refused=30)
        on_loop(door.loop, lambda: door.loop.call_later(0.5, said.set))
        assert said.wait(WAIT_S)
    told = [record.getMessage() for record in caplog.records]
    assert sum(int(line.split("refused: refused ")[1].split(";")[0]) for line in told) == 30 and len(told) <= 5
    assert "127.0.0.1:" in told[0]


def test_closing_ends_all_that_is_under_way(door):
    with connected(door) as one, connected(door, encode_preface(Preface("", False))) as other:
        status_of(other)
        on_loop(door.loop, door.greeter.close)
        assert ends(one) == ends(other) == b""
    with pytest.raises(ConnectionRefusedError), connected(door):
        pass
    assert door.left() == (0, 0)


@pytest.fixture
def members(tmp_path):
    files = mint_job_certificates(tmp_path / "certs")
    others = mint_job_certificates(tmp_path / "others")
    return [Credentials(SECRET, Path(f.cert).read_bytes(), Path(f.ca).read_bytes()) for f in (files, others)]


def shake(sock, shown):
    """The dialer's part of TLS, blocking."""
    tls = shown.dialer_tls(sock)
    sock_is_ready = threading.Event()
    while (step := tls.handshake_step()) != "done":
        assert step in ("read", "write")
        sock_is_ready.wait(0.001)
    return tls


def test_tls_ends_at_each_step_and_leaves_nothing(open_door, members):
    own, foreign = members
    door = open_door(shown=own, tls=True)
    preface = encode_preface(Preface("", True))
    with connected(door, encode_preface(Preface("", False))) as sock:
        assert "this is a tls:// address" in status_of(sock).text
    with connected(door, preface) as sock:
        status_of(sock)
    with connected(door, preface) as sock:
        status_of(sock)
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        ends(sock)
    with connected(door, preface) as sock:
        status_of(sock)
        sock.sendall(b"\x16\x03\x01\x40\x00" + bytes(0x4000))
        ends(sock)
    with connected(door, preface) as sock:
        status_of(sock)
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with pytest.raises(ssl.SSLError), context.wrap_socket(sock) as tls:  # no certificate: told by the first read
            tls.recv(1)
    with connected(door, preface) as sock:
        status_of(sock)
        with pytest.raises(OSError, match=r"authority|certificate"):
            shake(sock, foreign)
    door.wait_counts(taken=6, refused=1, tls=5)
    with connected(door, preface) as sock:
        status_of(sock)
        tls = shake(sock, own)
        proof = DialerProof(SECRET, "", tls.binding())
        tls.sendmsg((proof.first_bytes(),))
        answer = bytearray()
        while len(answer) < 64:
            with contextlib.suppress(BlockingIOError):
                space = bytearray(64 - len(answer))
                answer += space[: tls.recvmsg_into((space,))[0]]
        tls.sendmsg((proof.feed(bytes(answer)),))
        door.wait_through()
        tls.close()
    door.wait_counts(taken=7, refused=1, tls=5, proved=1)
    assert door.left() == (0, 0)


def test_no_more_is_read_than_the_handshake_has(door):
    """All that is sent behind a preface that is refused, or a nonce that waits, stays with the kernel."""
    with connected(door, encode_preface(Preface("", False)) + bytes(32) + bytes(MAX_UNPROVEN_BYTES * 100)) as sock:
        status_of(sock)
        exactly(sock, 64)
        ends(sock)
    door.wait_counts(taken=1, proof=1)
