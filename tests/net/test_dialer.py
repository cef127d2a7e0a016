"""Dialers: one attempt ends in a socket or in one reason that says what to do, whatever the other end does, and leaves nothing."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
from collections import deque
from pathlib import Path

import pytest

from monarch._base.addresses import Address, parse_address
from monarch._net import connector as connector_module
from monarch._net import dialer as dialer_module
from monarch._net import resolver
from monarch._net.certificates import mint_job_certificates
from monarch._net.credentials import Credentials
from monarch._net.dialer import Denial, Dialer, Failure, Route
from monarch._net.handshake import (
    AcceptorProof,
    Preface,
    PrefaceReader,
    Status,
    StatusCode,
    encode_status,
)
from monarch._net.loop import NetLoop
from net.wires import exactly, on_loop

WAIT_S = 10.0
SECRET = b"a secret of thirty-two characters"
OK = encode_status(Status(StatusCode.OK, True, ""))


class Attempts:
    """Dialers on a loop of their own, and how they ended."""

    def __init__(self):
        self.loop = NetLoop("monarch-test-dialer")
        self.loop.start()
        self.ends = deque()
        self.ended = threading.Semaphore(0)
        self.handlers = on_loop(self.loop, lambda: len(self.loop._handlers))

    def dial(self, address, *, target="", shown=None):
        if isinstance(address, str):
            address = parse_address(address)
        dialer = Dialer(self.loop, Route(address, target), shown or Credentials(SECRET), self.end, self.end)
        on_loop(self.loop, dialer.start)
        return dialer

    def end(self, outcome):
        self.ends.append(outcome)
        self.ended.release()

    def take(self):
        """How the only attempt ended."""
        assert self.ended.acquire(timeout=WAIT_S)
        assert len(self.ends) == 1
        assert self.left() == 0
        return self.ends.popleft()

    def denial(self, failure):
        end = self.take()
        assert isinstance(end, Denial) and end.failure is failure, end
        return end.reason

    def left(self):
        """Descriptors that are still watched, timers that would still do something."""

        def count():
            return len(self.loop._handlers) - self.handlers + sum(timer.pending for _, _, timer in self.loop._timers)

        return on_loop(self.loop, count)

    def settle(self):
        for _ in range(3):
            on_loop(self.loop, int)

    def close(self):
        for end in self.ends:
            if not isinstance(end, Denial):
                end.close()
        self.loop.stop()
        self.loop.join(WAIT_S)


@pytest.fixture
def attempts():
    made = Attempts()
    yield made
    made.close()


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        sock.settimeout(WAIT_S)
        yield sock


def url_of(listener, scheme="tcp"):
    return f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def accepted(listener):
    sock, _ = listener.accept()
    with sock:
        sock.settimeout(WAIT_S)
        yield sock


def preface_of(sock):
    reader = PrefaceReader()
    while needed := reader.needed():
        reader.feed(exactly(sock, needed))
    return reader.preface


def closed(sock):
    """The dialer has closed the connection."""
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(4096):
            continue
    return True


def test_the_whole_handshake_gives_a_socket_and_leaves_the_rest_of_the_stream(attempts, listener):
    attempts.dial(url_of(listener), target="abc.3")
    with accepted(listener) as sock:
        assert preface_of(sock) == Preface("abc.3", False)
        proof = AcceptorProof(SECRET, "abc.3")
        sock.sendall(OK + proof.feed(exactly(sock, 32)) + b"frames")
        proof.feed(exactly(sock, 32))
        connection = attempts.take()
        connection.setblocking(True)
        assert connection.recv(6) == b"frames"
        connection.sendall(b"more")
        assert exactly(sock, 4) == b"more"
        connection.close()


def test_the_answers_in_single_bytes_are_the_same(attempts, listener):
    attempts.dial(url_of(listener))
    with accepted(listener) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        preface_of(sock)
        proof = AcceptorProof(SECRET, "")
        for byte in OK + proof.feed(exactly(sock, 32)):
            sock.send(bytes([byte]))
        exactly(sock, 32)
        attempts.take().close()


def test_nobody_listens(attempts, listener):
    url = url_of(listener)
    listener.close()
    attempts.dial(url)
    assert "refused" in attempts.denial(Failure.REFUSED).lower()


def test_a_name_that_is_not_known(attempts):
    attempts.dial("tcp://no-such-host.invalid:1")
    assert "host name 'no-such-host.invalid' cannot be resolved" in attempts.denial(Failure.UNREACHABLE)


def test_every_interface_is_no_place_to_dial(attempts):
    attempts.dial(Address("tcp", "*", 1))
    assert "cannot be dialled" in attempts.denial(Failure.UNREACHABLE)


def test_the_next_address_of_a_name_is_tried(attempts, listener, monkeypatch):
    port = listener.getsockname()[1]
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # bound and not listening: refused
        places = [(socket.AF_INET, silent.getsockname()), (97, ("no such family",)), (socket.AF_INET, ("127.0.0.1", port))]
        monkeypatch.setattr(resolver, "resolve", lambda address, on_result: on_result(list(places)))
        attempts.dial("tcp://name:1")
        with accepted(listener) as sock:
            preface_of(sock)
            proof = AcceptorProof(SECRET, "")
            sock.sendall(OK + proof.feed(exactly(sock, 32)))
            attempts.take().close()


@contextlib.contextmanager
def full_backlog():
    """An address whose kernel answers nothing: its queue is full."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = []
        try:
            for _ in range(8):
                sock = socket.socket()
                sock.setblocking(False)
                sock.connect_ex(listener.getsockname())
                waiting.append(sock)
            yield listener.getsockname()
        finally:
            for sock in waiting:
                sock.close()


def test_an_address_that_does_not_answer_costs_its_time_and_then_comes_the_next(attempts, listener, monkeypatch):
    monkeypatch.setattr(connector_module, "_CONNECT_S", 0.1)
    with full_backlog() as silent:
        places = [(socket.AF_INET, silent), (socket.AF_INET, listener.getsockname())]
        monkeypatch.setattr(resolver, "resolve", lambda address, on_result: on_result(list(places)))
        attempts.dial("tcp://name:1")
        with accepted(listener) as sock:
            preface_of(sock)
            proof = AcceptorProof(SECRET, "")
            sock.sendall(OK + proof.feed(exactly(sock, 32)))
            attempts.take().close()
        places.pop()
        attempts.dial("tcp://name:1")
        assert attempts.denial(Failure.UNREACHABLE) == "no answer within 0.1 s"


def test_who_takes_the_connection_and_says_nothing(attempts, listener, monkeypatch):
    monkeypatch.setattr(dialer_module, "_STATUS_S", 0.1)
    attempts.dial(url_of(listener))
    with accepted(listener) as sock:
        assert f"{url_of(listener)} took the connection and said nothing" in attempts.denial(Failure.UNREACHABLE)
        assert closed(sock)


def test_a_status_in_slow_bytes_buys_no_time(attempts, listener, monkeypatch):
    monkeypatch.setattr(dialer_module, "_STATUS_S", 0.1)
    attempts.dial(url_of(listener))
    with accepted(listener) as sock:
        preface_of(sock)
        exactly(sock, 32)
        sock.settimeout(0.03)
        sent = 0
        with contextlib.suppress(ConnectionError):
            for byte in encode_status(Status(StatusCode.BUSY, False, "x" * 500)):
                sock.send(bytes([byte]))
                sent += 1
                with contextlib.suppress(TimeoutError):
                    if not sock.recv(1):
                        break
        assert sent < 50
        assert "said nothing" in attempts.denial(Failure.UNREACHABLE)


def test_a_target_that_is_busy_behind_its_agent_is_waited_for(attempts, listener, monkeypatch):
    monkeypatch.setattr(dialer_module, "_STATUS_S", 0.05)
    attempts.dial(url_of(listener))
    with accepted(listener) as sock:
        preface_of(sock)
        proof = AcceptorProof(SECRET, "")
        sock.sendall(OK)
        answer = proof.feed(exactly(sock, 32))
        waited = threading.Event()
        on_loop(attempts.loop, lambda: attempts.loop.call_later(0.2, waited.set))
        assert waited.wait(WAIT_S) and not attempts.ends
        sock.sendall(answer)
        attempts.take().close()


def scripts():
    """What an acceptor does until it closes, step by step."""
    proof = AcceptorProof(SECRET, "")
    return [
        preface_of,
        lambda sock: sock.sendall(OK[:5]),
        lambda sock: sock.sendall(OK[5:]),
        lambda sock: sock.sendall(proof.feed(exactly(sock, 32))[:40]),
    ]


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("number", range(5))
def test_a_connection_that_ends_at_some_step_may_go_better_next_time(attempts, listener, number, reset):
    attempts.dial(url_of(listener))
    with accepted(listener) as sock:
        for step in scripts()[:number]:
            step(sock)
        if reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert "closed during the handshake" in (reason := attempts.denial(Failure.UNREACHABLE)) or "reset" in reason.lower()


@pytest.mark.parametrize(
    ("answer", "failure", "said"),
    [
        (encode_status(Status(StatusCode.GONE, False, "no such process")), Failure.GONE, "no such process"),
        (encode_status(Status(StatusCode.GONE, False, "")), Failure.GONE, "gone"),
        (encode_status(Status(StatusCode.BUSY, False, "later")), Failure.UNREACHABLE, "later"),
        (encode_status(Status(StatusCode.REFUSED, False, "another version")), Failure.DENIED, "another version"),
        (encode_status(Status(StatusCode.OK, False, "")), Failure.DENIED, "the other end has none"),
        (b"HTTP/1.1 400 Bad Request\r\n", Failure.DENIED, "it speaks HTTP"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", Failure.DENIED, "it speaks SSH"),
        (b"\x15\x03\x01\x00\x02\x02\x46" + bytes(9), Failure.DENIED, "an alert of TLS"),
        (bytes(40), Failure.DENIED, "is not monarch"),
        (OK[:8] + b"\x09\x00\x00\x00", Failure.DENIED, "unknown code"),
        (OK[:8] + b"\x01\x00\xff\xff", Failure.DENIED, "65535 bytes"),
        (OK[:8] + b"\x01\x00\x00\x02\xff\xfe", Failure.DENIED, "not UTF-8"),
        (OK + bytes(range(100, 164)), Failure.DENIED, "another secret"),
    ],
)
def test_what_the_other_end_answers_is_the_reason(attempts, listener, answer, failure, said):
    attempts.dial(url_of(listener))
    with accepted(listener) as sock:
        preface_of(sock)
        exactly(sock, 32)
        sock.sendall(answer)
        reason = attempts.denial(failure)
        assert said in reason and SECRET.decode() not in reason
        assert closed(sock)


def test_a_secret_there_and_none_here_is_said(attempts, listener):
    attempts.dial(url_of(listener), shown=Credentials(b"", b"x"))
    with accepted(listener) as sock:
        preface_of(sock)
        sock.sendall(OK)
        assert "requires the job's secret, and this process has none" in attempts.denial(Failure.DENIED)


def test_the_challenge_sent_back_is_no_proof(attempts, listener):
    attempts.dial(url_of(listener))
    with accepted(listener) as sock:
        preface_of(sock)
        nonce = exactly(sock, 32)
        sock.sendall(OK + nonce + bytes(32))
        assert "own challenge" in attempts.denial(Failure.DENIED)


def test_a_socket_that_is_connected_to_itself_is_nobody(attempts, monkeypatch):
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        port = own.getsockname()[1]
    real = socket.socket

    class Bound(real):
        """Gets the port that it dials, as happens by chance."""

        def connect_ex(self, place):
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.bind(("127.0.0.1", port))
            return super().connect_ex(place)

    monkeypatch.setattr(connector_module.socket, "socket", Bound)
    attempts.dial(f"tcp://127.0.0.1:{port}")
    assert "refused" in attempts.denial(Failure.REFUSED).lower()


@pytest.mark.parametrize("number", range(5))
def test_an_attempt_that_is_cancelled_at_some_step_tells_nobody(attempts, listener, number):
    dialer = attempts.dial(url_of(listener))
    with accepted(listener) as sock:
        for step in scripts()[:number]:
            step(sock)
        on_loop(attempts.loop, dialer.cancel)
        assert closed(sock)
    attempts.settle()
    assert not attempts.ends and attempts.left() == 0


def test_an_attempt_that_is_cancelled_before_its_name_is_known(attempts, monkeypatch):
    kept = []

    def resolve(address, on_result):
        kept.append(resolver.Resolution(address, on_result))
        return kept[0]

    monkeypatch.setattr(resolver, "resolve", resolve)
    dialer = attempts.dial("tcp://name:1")
    on_loop(attempts.loop, dialer.cancel)
    assert kept[0].cancelled_or_done
    kept[0]._answer([(socket.AF_INET, ("127.0.0.1", 1))])
    attempts.settle()
    assert not attempts.ends and attempts.left() == 0


# --- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def members(tmp_path):
    files = [mint_job_certificates(tmp_path / name) for name in ("certs", "others")]
    return [Credentials(SECRET, Path(f.cert).read_bytes(), Path(f.ca).read_bytes()) for f in files]


def test_tls_without_a_certificate_here(attempts, listener):
    attempts.dial(url_of(listener, "tls"))
    with accepted(listener) as sock:
        assert preface_of(sock).tls
        sock.sendall(OK)
        assert "this process has none" in attempts.denial(Failure.DENIED)


@pytest.mark.parametrize("number", range(3))
def test_tls_that_ends_or_never_begins(attempts, listener, members, number):
    attempts.dial(url_of(listener, "tls"), shown=members[0])
    with accepted(listener) as sock:
        preface_of(sock)
        sock.sendall(OK)
        if number == 1:
            exactly(sock, 100)
        elif number == 2:
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        with contextlib.suppress(OSError):  # the other end may have closed
            sock.shutdown(socket.SHUT_WR)
        closed(sock)
    end = attempts.take()
    assert isinstance(end, Denial) and "\n" in end.reason


def test_tls_with_somebody_of_another_job(attempts, listener, members):
    attempts.dial(url_of(listener, "tls"), shown=members[0])
    with accepted(listener) as sock:
        preface_of(sock)
        sock.sendall(OK)
        tls = members[1].acceptor_tls(sock)
        pause = threading.Event()
        with pytest.raises(OSError):
            while tls.handshake_step() != "done":
                pause.wait(0.001)
        assert "certificate is not accepted" in attempts.denial(Failure.DENIED)
        tls.close()


def test_tls_with_a_stranger_in_the_middle_who_has_a_certificate_of_the_job(attempts, listener, members):
    """He can pass proofs on, but they are bound to the certificates of both ends."""
    attempts.dial(url_of(listener, "tls"), shown=members[0])
    with accepted(listener) as sock:
        preface_of(sock)
        sock.sendall(OK)
        tls = members[0].acceptor_tls(sock)
        pause = threading.Event()
        while tls.handshake_step() != "done":
            pause.wait(0.001)
        space = bytearray(32)
        read = 0
        while not read:
            with contextlib.suppress(BlockingIOError):
                read = tls.recvmsg_into((space,))[0]
        relayed = AcceptorProof(SECRET, "", b"the binding of another channel..")
        tls.sendmsg((relayed.feed(bytes(space)),))
        assert "another secret" in attempts.denial(Failure.DENIED)
        tls.close()


def test_tls_1_2_is_not_spoken(attempts, listener, members, tmp_path):
    attempts.dial(url_of(listener, "tls"), shown=members[0])
    with accepted(listener) as sock:
        preface_of(sock)
        sock.sendall(OK)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / "certs" / "member.pem")
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(OSError), context.wrap_socket(sock, server_side=True):
            pass
        assert "TLS" in attempts.denial(Failure.DENIED)
