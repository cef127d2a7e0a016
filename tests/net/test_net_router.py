"""Links between hosts: they outlive their connections, end when the other end ends, and are made with friends only."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import deque
from pathlib import Path

import pytest

from monarch import config
from monarch._base.addresses import parse_address
from monarch._base.ids import ProcRef, agent_at
from monarch._net import credentials
from monarch._net.certificates import mint_job_certificates
from monarch._net.credentials import Credentials
from monarch._net.handshake import DialerProof, Preface, StatusReader, encode_preface
from monarch._net.interfaces import listen_on
from monarch._net.loop import NetLoop
from monarch._net.net_router import NetRouter
from monarch._net.router import PROTOCOL_VERSION
from monarch._net.session_link import SessionLink
from monarch._wire import messages
from monarch._wire.frames import Decoder, Kind, encode
from net.wires import on_loop

WAIT_S = 10.0
NO_LIMIT = 1 << 40


class Host:
    """A router on a loop of its own, reached over TCP like the agent of a host."""

    def __init__(self, scheme="tcp", *, shown=None, port=0):
        self.sock = listen_on(parse_address(f"{scheme}://127.0.0.1:{port}"))
        self.ref = agent_at(f"{scheme}://127.0.0.1:{self.sock.getsockname()[1]}")
        self.loop = NetLoop("monarch-test-host")
        self.loop.start()
        self.router = NetRouter(self.loop, self.ref, None, self, NO_LIMIT, lambda _address: None)
        if shown is not None:
            self.router.greeter.credentials = lambda: shown
        self.told = deque()
        self.news = threading.Condition()
        self.frames = []
        on_loop(self.loop, lambda: self.router.listen_to_others(self.sock, tls=scheme == "tls"))
        self.closed = False

    def tell(self, what, value):
        with self.news:
            if what == "frame":
                self.frames.append(value)
            self.told.append((what, value))
            self.news.notify_all()

    def on_peer(self, ref):
        pass

    def on_hello(self, hello):
        pass

    def on_forgotten(self, ref, reason):
        self.tell("forgotten", reason)

    def on_frame(self, link, frame, buffers):
        self.tell("frame", frame.port)

    def on_unreachable(self, ref, reason):
        self.tell("unreachable", reason)

    def on_denied(self, ref, reason):
        self.tell("denied", reason)

    def on_reach(self, ref):
        self.tell("reach", ref.uid)

    def on_visitor(self, preface, greeting):
        self.tell("visitor", preface.target)
        greeting.accept()

    def on_lost(self, ref, reason, pid):
        self.tell("lost", reason)

    def send(self, other, *ports, size=0):
        link = self.router.link_to(other.ref)
        for port in ports:
            link.send(encode(Kind.CALL, b"", bytes(size), port=port))

    def expect(self, what):
        """The value of the next news of that kind; frames in front of it are passed over."""
        with self.news:
            assert self.news.wait_for(lambda: any(kind != "frame" for kind, _ in self.told), WAIT_S), (what, list(self.told)[-5:])
            kind, value = next(item for item in self.told if item[0] != "frame")
            assert kind == what, (kind, value)
            self.told.clear()
            return value

    def wait_frames(self, number):
        with self.news:
            assert self.news.wait_for(lambda: len(self.frames) >= number, WAIT_S), (len(self.frames), number, list(self.told)[-5:])
            return list(self.frames)

    def links(self):
        return [link for link in list(self.router._sessions.values()) if isinstance(link, SessionLink)]

    def cut(self):
        """Break the connections of all links, as a failing network does."""

        def run():
            for link in self.links():
                if link.connected:
                    link.break_connection("cut by a test")

        on_loop(self.loop, run)

    def vanish(self):
        """End as a killed process does: the kernel closes its sockets, and nobody says good-bye."""

        def run():
            self.router.greeter.close()
            for link in [*self.router._all, *self.links()]:
                link.on_frame = lambda *_: None
                link._on_detached = lambda *_: None
                if link.connected:
                    link._detach("killed")

        on_loop(self.loop, run)
        self.end("killed")

    def end(self, reason="the test is over"):
        if not self.closed:
            self.closed = True
            on_loop(self.loop, self.router.close, reason)
            self.loop.stop()
            self.loop.join(WAIT_S)


@pytest.fixture(params=["tcp", "tls"])
def scheme(request, tmp_path):
    shown = Credentials(b"a secret of thirty-two characters")
    if request.param == "tls":
        files = mint_job_certificates(tmp_path / "certs")
        shown = Credentials(shown.secret, Path(files.cert).read_bytes(), Path(files.ca).read_bytes())
    credentials.set_credentials(shown)
    yield request.param
    credentials.set_credentials(None)


@pytest.fixture
def start(scheme):
    started = []

    def start_host(**options):
        started.append(Host(scheme, **options))
        return started[-1]

    yield start_host
    for host in started:
        host.end()


@pytest.fixture
def two(start):
    return start(), start()


def test_frames_pass_both_ways_in_order(two):
    one, other = two
    one.send(other, *range(1, 200))
    assert other.wait_frames(199) == list(range(1, 200))
    other.send(one, *range(1, 50), size=100_000)
    assert one.wait_frames(49) == list(range(1, 50))
    assert len(one.links()) == len(other.links()) == 1, "the answer takes the same link"


def test_what_is_acknowledged_is_forgotten(two):
    one, other = two
    with config.configured(message_ack_every_n_messages=10):
        one.send(other, *range(1, 101))
        other.wait_frames(100)
    link = one.links()[0]
    deadline = time.monotonic() + WAIT_S
    while link._outgoing._acknowledged < 100 and time.monotonic() < deadline:
        on_loop(one.loop, int)
    assert link._outgoing._acknowledged == 100 and link.queued_bytes == 0


@pytest.mark.parametrize("cutter", [0, 1, 2])
def test_a_link_outlives_its_connections_and_loses_nothing(two, cutter):
    one, other = two
    chance = random.Random(cutter)
    one.send(other, 0)
    other.wait_frames(1)
    number = 300
    done = threading.Event()

    def cut():
        for _ in range(12):
            (one, other, chance.choice((one, other)))[cutter].cut()
            time.sleep(chance.uniform(0.0, 0.02))
        done.set()

    thread = threading.Thread(target=cut)
    thread.start()
    for port in range(1, number):
        one.send(other, port, size=chance.choice((0, 100, 300_000)))
        other.send(one, port)
    thread.join()
    assert done.is_set()
    assert other.wait_frames(number) == list(range(number))
    assert one.wait_frames(number - 1) == list(range(1, number))
    assert not [what for what, _ in (*one.told, *other.told) if what == "lost"]


def test_an_end_that_closes_says_so(two):
    one, other = two
    one.send(other, 1)
    other.wait_frames(1)
    other.end("I have other plans")
    assert one.expect("lost") == "I have other plans"


def test_an_end_that_vanishes_is_lost_soon_to_who_dials(two):
    one, other = two
    one.send(other, 1)
    other.wait_frames(1)
    began = time.monotonic()
    other.vanish()
    assert "nobody listens" in one.expect("lost")
    assert time.monotonic() - began < 2


def test_an_end_that_vanishes_is_lost_soon_to_who_was_dialled(two):
    one, other = two
    one.send(other, 1)
    other.wait_frames(1)
    one.vanish()
    assert other.expect("lost") == "the peer closed the connection"


def test_who_comes_back_as_another_process_is_not_taken_for_the_first(two, start):
    one, other = two
    one.send(other, 1)
    other.wait_frames(1)
    other.vanish()
    successor = start(port=parse_address(other.ref.address).port)
    reason = one.expect("lost")
    assert "nobody listens" in reason or "another one than before" in reason
    on_loop(one.loop, one.router.lose, other.ref, "gone")
    on_loop(one.loop, one.router.readmit, other.ref)
    one.send(successor, 7)
    assert successor.wait_frames(1) == [7]


@pytest.mark.parametrize("impatient", ["dialer", "dialled"])
def test_both_ends_have_the_patience_of_the_less_patient(start, impatient):
    with config.configured(channel_reconnect_timeout="2s"):
        first = start()
    second = start()
    one, other = (first, second) if impatient == "dialer" else (second, first)
    one.send(other, 1)
    other.wait_frames(1)
    other.send(one, 2)
    one.wait_frames(1)
    assert [link.patience_s for host in (one, other) for link in host.links()] == [2.0, 2.0]


def test_who_lives_and_has_given_a_link_up_is_no_other_process(start):
    one, other = start(), start()
    other.router.epoch = 7
    one.send(other, 1)
    other.wait_frames(1)
    [theirs] = other.links()
    on_loop(other.loop, lambda: setattr(theirs, "_flowing", False))  # no good-bye
    on_loop(other.loop, theirs.close, "it took too long")
    assert "has given this link up" in one.expect("forgotten")
    on_loop(one.loop, one.router.renew, other.ref, "forgotten")
    one.send(other, 2)
    assert other.wait_frames(2) == [1, 2]


def test_an_end_with_another_secret_is_denied_and_nothing_is_decoded(start):
    one, other = start(), start(shown=Credentials(b"another secret of the same length"))
    if one.ref.address.startswith("tls"):
        other.router.greeter.credentials = lambda: Credentials(b"x" * 32, *_certificates())
    one.send(other, 1)
    reason = one.expect("denied")
    assert "the other end has another secret" in reason and "of the same length" not in reason
    assert other.frames == [] and not other.links()


def _certificates():
    shown = credentials.own_credentials()
    return shown.member, shown.authority


def test_nobody_listens_is_said(two):
    one, other = two
    other.end()
    one.send(other, 1)
    assert "refused" in one.expect("unreachable").lower()


def test_an_address_of_another_machine_s_own_is_reached_by_asking(two):
    one, _ = two
    far = ProcRef("client<x>", "ipc:///nowhere/c", "")
    one.router.link_to(far)
    assert one.expect("reach") == "client<x>"


def test_who_waits_for_somebody_to_dial_sends_over_that_connection(start):
    one, other = start(), start()
    hidden = ProcRef(other.ref.uid, "ipc:///nowhere/h", "")
    link = one.router.link_to(hidden)
    link.send(encode(Kind.CALL, b"", b"", port=5))
    one.expect("reach")
    other.send(one, 3)
    assert one.wait_frames(1) == [3]
    assert other.wait_frames(1) == [5]
    assert one.links() == [link]
    other.cut()
    one.send(Named(hidden), 6)
    assert other.wait_frames(2) == [5, 6]


class Named:
    """Somebody to send to."""

    def __init__(self, ref):
        self.ref = ref


# --- members who do not keep to the rules ----------------------------------------------------------------------------


class Member:
    """Somebody who has proved the secret to a host, over a plain socket, and says whatever he likes."""

    def __init__(self, host, secret=b"a secret of thirty-two characters"):
        address = parse_address(host.ref.address)
        self.sock = socket.create_connection((address.host, address.port), WAIT_S)
        self.sock.settimeout(WAIT_S)
        proof = DialerProof(secret, "")
        self.sock.sendall(encode_preface(Preface("", False)) + proof.first_bytes())
        status = StatusReader()
        while needed := status.needed():
            status.feed(self.sock.recv(needed))
        answer = b""
        while len(answer) < 64:
            answer += self.sock.recv(64 - len(answer))
        self.sock.sendall(proof.feed(answer))
        self.decoder = Decoder(NO_LIMIT)
        self.frames = []

    def hello(self, uid="member<1>", session="s1", *, received=0, resumed=False):
        hello = messages.Hello(ProcRef(uid, "ipc:///nowhere/m", ""), 1, PROTOCOL_VERSION, session, received, resumed)
        self.say(Kind.CONTROL, header=messages.encode(hello))
        return self

    def say(self, kind, header=b"", **parts):
        self.sock.sendall(b"".join(encode(kind, header, b"", **parts)))

    def next(self):
        """The next frame from the host; None at the end."""
        while not self.frames:
            space = self.decoder.space()
            try:
                count = self.sock.recv_into(space)
            except ConnectionResetError:
                count = 0
            if not count:
                return None
            self.frames += self.decoder.received(count)
        return self.frames.pop(0)

    def told(self):
        return messages.decode_control(self.next().header)

    def ended(self):
        while self.next() is not None:
            continue
        return True


plain = pytest.mark.parametrize("scheme", ["tcp"], indirect=True)
"""Nothing here depends on TLS."""


@pytest.fixture
def host(start):
    return start()


@pytest.fixture
def meet(host):
    met = []

    def member(**options):
        met.append(Member(host, **options))
        return met[-1]

    yield member
    for each in met:
        each.sock.close()


def protocol_errors(caplog):
    return [record.getMessage() for record in caplog.records if "protocol_error" in record.getMessage()]


@plain
def test_a_member_who_says_hello_and_nothing_else_costs_a_link(host, meet):
    member = meet().hello()
    assert isinstance(member.told(), messages.Hello) and len(host.links()) == 1
    member.sock.close()
    assert host.expect("lost") == "the peer closed the connection"
    assert not host.links() and not host.router._all


@plain
def test_a_member_who_says_nothing_is_ended_in_time(host, meet, monkeypatch):
    monkeypatch.setattr("monarch._net.net_router._HELLO_S", 0.1)
    member = meet()
    assert member.ended()
    assert not on_loop(host.loop, lambda: set(host.router._all))


@plain
@pytest.mark.parametrize("kind", [Kind.CALL, Kind.REPLY, Kind.ACK, Kind.BYE, Kind.SEGMENT, Kind.TUNNEL, 99])
def test_a_frame_in_front_of_the_hello_ends_the_link(host, meet, caplog, kind):
    member = meet()
    member.say(kind)
    assert member.ended() and len(protocol_errors(caplog)) == 1
    assert not host.frames


@plain
@pytest.mark.parametrize("header", [b"", b"\xc1", b"\x81\xa4type\xa5Hello", messages.encode(messages.StopProc("x")), b"\x91" * 5000])
def test_a_control_message_that_is_no_hello_ends_the_link(host, meet, caplog, header):
    member = meet()
    member.say(Kind.CONTROL, header=header)
    assert member.ended() and len(protocol_errors(caplog)) == 1


@plain
def test_a_session_has_a_name(host, meet, caplog):
    assert meet().hello(session="").ended() and "names no session" in protocol_errors(caplog)[0]


@plain
def test_a_session_is_not_taken_over_by_another_process(host, meet, caplog):
    owner = meet().hello("owner<1>", "shared")
    owner.told()
    for resumed in (False, True):
        assert meet().hello("thief<1>", "shared", resumed=resumed).ended()
    assert ["names the session of somebody else" in line for line in protocol_errors(caplog)] == [True, True]
    owner.say(Kind.CALL, port=7)
    assert host.wait_frames(1) == [7]
    owner.sock.close()
    again = meet().hello("owner<1>", "shared", resumed=True)
    assert again.told().received == 1, "the owner goes on where he was"


@plain
def test_a_session_that_this_end_dials_is_not_resumed_from_outside(start, host, meet, caplog):
    other = start()
    host.send(other, 1)
    other.wait_frames(1)
    (link,) = host.links()
    assert meet().hello(other.ref.uid, link.session, resumed=True).ended()
    assert "names the session of somebody else" in protocol_errors(caplog)[0]
    host.send(other, 2)
    assert other.wait_frames(2) == [1, 2]


@plain
def test_a_session_that_is_not_known_is_not_begun_in_the_middle(host, meet):
    member = meet().hello(session="lost", received=5, resumed=True)
    assert member.told().session == "" and member.ended()
    assert not on_loop(host.loop, host.links)


@plain
def test_a_new_session_has_received_nothing(host, meet, caplog):
    assert meet().hello(received=3).ended()
    assert "has received 3 frames, but 0 were sent" in protocol_errors(caplog)[0] and not on_loop(host.loop, host.links)


@plain
def test_frames_are_not_taken_twice_though_they_come_twice(host, meet):
    """A connection that replays its frames is another session, or says how many the host has and goes on behind them."""
    member = meet().hello()
    member.told()
    for port in (1, 2, 3):
        member.say(Kind.CALL, port=port)
    host.wait_frames(3)
    member.sock.close()
    again = meet().hello(resumed=True)
    assert again.told().received == 3
    again.say(Kind.CALL, port=4)
    assert host.wait_frames(4) == [1, 2, 3, 4]
