"""Session links: what a peer may say at which moment, what it costs when it says something else, and who waits for whom."""

from __future__ import annotations

import array
import contextlib
import errno
import itertools
import logging
import os
import random
import socket
import sys
import threading
from collections import deque

import pytest

from monarch._base.ids import ProcRef
from monarch._net import kept_frame, session_link, stream
from monarch._net.kept_frame import LONG_BYTES
from monarch._net.loop import NetLoop
from monarch._net.session_link import SessionLink
from monarch._net.stream import PEER_CLOSED
from monarch._wire.frames import MAX_CALL_HEADER_BYTES, MAX_HEADER_BYTES, PREFIX, Decoder, Flag, FrameError, Kind, encode
from net.wires import on_loop

WAIT_S = 10.0
NO_LIMIT = 1 << 40
PEER = ProcRef("peer<1>", "tcp://127.0.0.1:1/peer", "")


def frame(kind, **parts):
    return b"".join(encode(kind, parts.pop("header", b""), parts.pop("payload", b""), **parts))


HELLO = frame(Kind.CONTROL, header=b"hello")


class End:
    """A session link that takes any first frame for a Hello, and all that it tells."""

    def __init__(self, loop, *, dials=False, limit=NO_LIMIT):
        self.loop = loop
        self.ports, self.reasons = deque(), deque()
        self.news = threading.Condition()
        self.answer = None
        self.received = 0
        self.link = SessionLink(loop, PEER if dials else None, self.on_hello, self.on_detached, self.on_closed, limit)
        self.link.on_frame = self.on_frame

    def tell(self, where, what):
        with self.news:
            where.append(what)
            self.news.notify_all()

    def on_hello(self, link, hello, _buffers):
        self.link.peer = PEER
        self.link.greeted = True
        self.link.resume(hello.port)
        self.tell(self.ports, "hello")

    def on_frame(self, link, frame, _buffers):
        self.tell(self.ports, frame.port)
        if self.answer is not None:
            self.answer(link, frame)

    def on_detached(self, link, reason):
        self.tell(self.reasons, ("detached", reason))

    def on_closed(self, link, reason):
        self.tell(self.reasons, ("closed", reason))

    def attach(self, sock):
        on_loop(self.loop, self.link.attach, sock, [HELLO])

    def wait_ports(self, number):
        with self.news:
            assert self.news.wait_for(lambda: len(self.ports) >= number, WAIT_S), (len(self.ports), self.reasons)
            return list(self.ports)

    def wait_end(self):
        with self.news:
            assert self.news.wait_for(lambda: self.reasons, WAIT_S), list(self.ports)
            return self.reasons.popleft()

    def refused(self, caplog):
        """It was closed as broken, which one line says; the reason."""
        what, reason = self.wait_end()
        assert what == "closed" and reason.startswith("protocol error: ")
        lines = [record.getMessage() for record in caplog.records if "protocol_error" in record.getMessage()]
        assert len(lines) == 1 and reason.removeprefix("protocol error: ") in lines[0]
        return reason


@pytest.fixture
def loop():
    loop = NetLoop("monarch-test-session")
    loop.start()
    yield loop
    loop.stop()
    loop.join(WAIT_S)


@pytest.fixture
def pair(loop):
    """A link that was dialled, and the socket of the other end, which has not said Hello."""
    end = End(loop)
    ours, theirs = socket.socketpair()
    theirs.settimeout(WAIT_S)
    end.attach(ours)
    assert theirs.recv(len(HELLO)) == HELLO
    yield end, theirs
    on_loop(loop, end.link.close, "the test is over")
    theirs.close()


@pytest.fixture
def greeted(pair):
    end, theirs = pair
    theirs.sendall(HELLO)
    end.wait_ports(1)
    end.ports.clear()
    return end, theirs


def prefix(kind, *, flags=0, buffers=0, header=0, payload=0, tail=0):
    return PREFIX.pack(kind, flags, buffers, header, payload, tail, 1, 0, 0, 0)


@pytest.mark.parametrize(
    ("announced", "said"),
    [
        (prefix(Kind.SEGMENT), "shared memory"),
        (prefix(Kind.CALL, flags=Flag.MAPPED, buffers=1 << 28, tail=16 << 28), "shared memory"),
        (prefix(Kind.REPLY, flags=Flag.SHARED, payload=1 << 30), "shared memory"),
        (prefix(Kind.CALL, header=MAX_CALL_HEADER_BYTES + 1), "a header of"),
        (prefix(Kind.REPLY, header=MAX_CALL_HEADER_BYTES + 1), "a header of"),
        (prefix(Kind.CONTROL, header=MAX_HEADER_BYTES + 1), "a header of"),
        (prefix(Kind.CALL, payload=1 << 62), "longer than codec_max_frame_length"),
        (prefix(Kind.CALL, payload=(1 << 64) - 1, tail=(1 << 64) - 1), "longer than codec_max_frame_length"),
    ],
)
def test_what_can_t_come_from_another_host_is_refused_when_it_is_announced(greeted, caplog, announced, said):
    end, theirs = greeted
    with caplog.at_level(logging.ERROR, "monarch.net"):
        theirs.sendall(announced)  # and nothing else: nobody waits for, or makes room for, the rest
        assert said in end.refused(caplog)
    assert not end.ports


def test_what_follows_a_bad_frame_is_not_looked_at(greeted, caplog):
    end, theirs = greeted
    theirs.sendall(frame(Kind.CALL, port=1) + prefix(Kind.SEGMENT) + frame(Kind.CALL, port=2))
    end.refused(caplog)
    assert list(end.ports) in ([1], []), "frames in front of it count, at most"


@pytest.mark.parametrize("number", [1, 7, 1 << 40])
def test_nobody_can_have_received_what_was_not_sent(greeted, caplog, number):
    end, theirs = greeted
    theirs.sendall(frame(Kind.ACK, port=number))
    assert f"has received {number} frames, but 0 were sent" in end.refused(caplog)


def test_nobody_can_have_received_what_still_waits_for_room(greeted, caplog):
    end, theirs = greeted

    def send():
        for _ in range(40):
            end.link.send(encode(Kind.CALL, b"", bytes(1 << 20)))

    on_loop(end.loop, send)
    theirs.sendall(frame(Kind.ACK, port=40))
    assert "has received 40 frames, but" in end.refused(caplog)


def test_a_number_that_goes_back_is_no_acknowledgement(greeted):
    end, theirs = greeted
    on_loop(end.loop, lambda: [end.link.send(encode(Kind.CALL, b"", b"", port=port)) for port in range(1, 4)])
    theirs.sendall(frame(Kind.ACK, port=3) + frame(Kind.ACK, port=1) + frame(Kind.CALL, port=9))
    assert end.wait_ports(1) == [9]
    assert end.link.queued_bytes == 0 and end.link._outgoing._acknowledged == 3


def test_a_descriptor_is_refused_and_closed(greeted, caplog):
    end, theirs = greeted
    read, write = os.pipe()
    theirs.sendmsg([frame(Kind.CALL, port=1)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [write] * 3))])
    os.close(write)
    assert "descriptors came" in end.refused(caplog)
    assert os.read(read, 1) == b"", "nobody holds the other end of the pipe"
    os.close(read)


def test_a_good_bye_is_cut_and_ends_the_session(greeted):
    end, theirs = greeted
    theirs.sendall(frame(Kind.BYE, payload=b"x" * 100_000))
    assert end.wait_end() == ("closed", "x" * 512)


def test_half_a_frame_goes_with_its_connection(greeted):
    end, theirs = greeted
    theirs.sendall(frame(Kind.CALL, port=1) + frame(Kind.CALL, port=2, payload=b"half")[:-1])
    theirs.close()
    assert end.wait_end() == ("detached", PEER_CLOSED)
    assert list(end.ports) == [1] and end.link.received == 1
    ours, again = socket.socketpair()
    with again:
        end.attach(ours)
        again.sendall(HELLO + frame(Kind.CALL, port=2, payload=b"half"))
        assert end.wait_ports(3) == [1, "hello", 2]
        on_loop(end.loop, end.link.close, "over")


@pytest.mark.parametrize("number", range(1, 60, 7))
def test_a_connection_that_ends_in_a_frame_of_a_session_detaches_only(pair, number):
    end, theirs = pair
    theirs.sendall((HELLO + frame(Kind.CALL, port=1, payload=bytes(20)))[:number])
    theirs.close()
    assert end.wait_end() == ("detached", PEER_CLOSED)
    assert end.link.received == 0


@pytest.mark.parametrize("seed", range(8))
def test_random_bytes_close_the_link_or_wait_for_more(greeted, seed, capfd):
    end, theirs = greeted
    chance = random.Random(seed)
    with contextlib.suppress(OSError):
        for _ in range(40):
            if chance.random() < 0.5:
                theirs.sendall(chance.randbytes(chance.randrange(1, 300)))
            else:
                kind, flags, count, header = chance.randrange(8), chance.randrange(32), chance.randrange(1000), chance.randrange(999)
                payload, tail = (chance.choice((0, 1, 20, 1 << 20, 1 << 63)) for _ in range(2))
                theirs.sendall(PREFIX.pack(kind, flags, count, header, payload, tail, *[0] * (len(PREFIX.unpack(bytes(PREFIX.size))) - 6)))
    theirs.close()
    what, _ = end.wait_end()
    assert what in ("closed", "detached")
    assert "internal error" not in capfd.readouterr().err


# --- taking over -----------------------------------------------------------------------------------------------------


class Stranger(End):
    """The connection of somebody whose Hello says that it is for the session of `known`."""

    def __init__(self, loop, known):
        super().__init__(loop)
        self.known = known

    def on_hello(self, link, hello, _buffers):
        self.known.link.take_over(link, [HELLO], hello.port)


@pytest.fixture
def resumed(greeted):
    """A known session, and the socket of a second connection that has not said Hello."""
    known, _ = greeted
    ours, second = socket.socketpair()
    second.settimeout(WAIT_S)
    stranger = Stranger(known.loop, known)
    on_loop(known.loop, stranger.link.attach, ours, [])
    yield known, stranger, second
    second.close()
    on_loop(known.loop, stranger.link.close, "over")


def test_frames_right_behind_the_hello_belong_to_the_session(resumed):
    known, stranger, second = resumed
    second.sendall(HELLO + frame(Kind.CALL, port=1) + frame(Kind.CALL, port=2))
    assert known.wait_ports(2) == [1, 2]
    assert not stranger.ports and known.link.received == 2


def test_a_bad_frame_right_behind_the_hello_closes_the_session_it_is_for(resumed, caplog):
    known, stranger, second = resumed
    second.sendall(HELLO + frame(Kind.CALL, port=1) + frame(Kind.ACK, port=5) + frame(Kind.CALL, port=2))
    assert "has received 5 frames" in known.refused(caplog)
    assert list(known.ports) == [1] and not stranger.reasons


def test_a_hello_that_claims_too_much_closes_the_session(resumed, caplog):
    known, _, second = resumed
    second.sendall(frame(Kind.CONTROL, header=b"hello", port=3))
    assert "has received 3 frames, but 0 were sent" in known.refused(caplog)


# --- back-pressure ---------------------------------------------------------------------------------------------------


def answer_with(nbytes):
    def answer(link, frame):
        if frame.kind == Kind.CALL:
            link.send(encode(Kind.REPLY, b"", bytes(nbytes), port=frame.port))

    return answer


def flood(sock, number, size=0):
    """Send requests until nobody takes them; how many left whole."""
    sent = 0
    sock.settimeout(1.0)
    with contextlib.suppress(TimeoutError):
        for port in range(1, number + 1):
            sock.sendall(frame(Kind.CALL, port=port, payload=bytes(size)))
            sent += 1
    return sent


@pytest.mark.parametrize("nbytes", [0, 100_000])
def test_who_asks_and_does_not_read_is_not_read_either(greeted, monkeypatch, nbytes):
    monkeypatch.setattr(session_link, "_CLOGGED_FRAMES", 1000)
    monkeypatch.setattr(session_link, "_CLOGGED_BYTES", 8 << 20)
    end, theirs = greeted
    end.answer = answer_with(nbytes)
    asked = flood(theirs, 60_000, 64)
    assert asked < 60_000
    held = on_loop(end.loop, lambda: (end.link._outgoing.sent, end.link.queued_bytes, end.link._paused))
    assert held[2] and held[0] < 30_000 and held[1] < (64 << 20) + 100_000 * 5000
    before = held[0]
    # He reads at last, and is read at last: nothing is lost.
    theirs.settimeout(WAIT_S)
    wanted = asked * (PREFIX.size + nbytes) if nbytes == 0 else 0
    got = 0
    while got < wanted:
        got += len(theirs.recv(1 << 20))
    if wanted:
        assert len(end.wait_ports(asked)) >= asked > before


def test_a_few_large_answers_are_no_reason_to_stop_reading(greeted):
    end, theirs = greeted
    on_loop(end.loop, lambda: [end.link.send(encode(Kind.CALL, b"", bytes(4 << 20))) for _ in range(20)])
    theirs.sendall(frame(Kind.CALL, port=5))
    assert end.wait_ports(1) == [5]


def test_who_dials_always_reads(loop, monkeypatch):
    monkeypatch.setattr(session_link, "_CLOGGED_FRAMES", 10)
    end = End(loop, dials=True)
    end.answer = answer_with(1000)
    ours, theirs = socket.socketpair()
    with theirs:
        end.attach(ours)
        theirs.sendall(HELLO)
        assert flood(theirs, 5000) == 5000
        end.wait_ports(5001)
        on_loop(loop, end.link.close, "over")


def test_two_that_ask_each_other_for_much_never_wait_for_each_other(loop, monkeypatch):
    monkeypatch.setattr(session_link, "_CLOGGED_FRAMES", 200)
    monkeypatch.setattr(session_link, "_CLOGGED_BYTES", 1 << 20)
    monkeypatch.setattr(session_link, "_FEW_FRAMES", 4)
    other_loop = NetLoop("monarch-test-other")
    other_loop.start()
    try:
        dialler, dialled = End(loop, dials=True), End(other_loop)
        for end in (dialler, dialled):
            end.answer = answer_with(20_000)
        ours, theirs = socket.socketpair()
        dialler.attach(ours)
        dialled.attach(theirs)
        number = 2000
        paused = []
        count = dialled.answer

        def watched(link, frame):
            paused.append(link._paused or link._clogged())
            count(link, frame)

        dialled.answer = watched

        def ask(end):
            for port in range(1, number + 1):
                end.link.send(encode(Kind.CALL, b"", bytes(500), port=port))

        senders = [threading.Thread(target=ask, args=(end,)) for end in (dialler, dialled)]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join(WAIT_S)
        for end in (dialler, dialled):
            assert end.wait_ports(2 * number + 1)
        assert any(paused), "the limit was never met, so this has shown nothing"
        for end in (dialler, dialled):
            on_loop(end.loop, end.link.close, "over")
    finally:
        other_loop.stop()
        other_loop.join(WAIT_S)


def test_an_end_that_pauses_sees_the_loss_of_its_connection(greeted, monkeypatch):
    monkeypatch.setattr(session_link, "_CLOGGED_FRAMES", 100)
    end, theirs = greeted
    end.answer = answer_with(2000)
    assert flood(theirs, 60_000) < 60_000
    assert on_loop(end.loop, lambda: end.link._paused)
    theirs.close()
    assert end.wait_end()[0] == "detached"
    assert not end.link._paused


def test_the_decoder_of_a_link_between_hosts_refuses_memory_of_its_peer():
    from monarch._wire.frames import Decoder

    for announced in (prefix(Kind.SEGMENT), prefix(Kind.CALL, flags=Flag.MAPPED)):
        decoder = Decoder(NO_LIMIT, maps_memory=False)
        decoder.space()[: len(announced)] = announced
        with pytest.raises(FrameError, match="shared memory"):
            decoder.received(len(announced))


# --- long frames -----------------------------------------------------------------------------------------------------

LONG = bytes(LONG_BYTES)
PLACES = (session_link.__file__, kept_frame.__file__, stream.__file__)


def decoded(sock, number):
    """The ports of the next frames."""
    decoder, ports = Decoder(NO_LIMIT), []
    while len(ports) < number:
        ports += [frame.port for frame in decoder.received(sock.recv_into(decoder.space()))]
    return ports


class Pieces(list):
    """Pieces of a frame, in the middle of whose copying something else is sent, as finalisers do."""

    def __init__(self, pieces, also):
        super().__init__(pieces)
        self.also = also

    def __iter__(self):
        yield from super().__iter__()
        if sys._getframe(1).f_code.co_filename == kept_frame.__file__:
            self.also()


@pytest.mark.parametrize("other", [b"", LONG], ids=["short", "long"])
def test_what_a_finaliser_sends_during_a_long_frame_follows_it(greeted, other):
    end, theirs = greeted

    def send():
        with end.link._lock:
            end.link.send(Pieces(encode(Kind.CALL, b"", LONG, port=1), lambda: end.link.send(encode(Kind.CALL, b"", other, port=2))))
            end.link.send(encode(Kind.CALL, b"", b"", port=3))

    end.loop.call_soon(send)
    assert decoded(theirs, 3) == [1, 2, 3]
    theirs.sendall(frame(Kind.ACK, port=3) + frame(Kind.CALL, port=9))
    assert end.wait_ports(1) == [9]


class Weak(socket.socket):
    """Takes so many messages whole, and has no memory for the next one."""

    takes = -1

    def sendmsg(self, pieces, *args):
        if self.takes < 0:
            return super().sendmsg(pieces, *args)
        self.takes -= 1
        if self.takes < 0:
            raise OSError(errno.ENOBUFS, "no buffer space")
        return sum(map(len, pieces))


@pytest.mark.parametrize("number", range(3))
def test_a_long_frame_that_a_connection_did_not_take_leaves_whole_on_the_next_one(loop, number):
    end = End(loop)
    ours, theirs = socket.socketpair()
    theirs.settimeout(WAIT_S)
    weak = Weak(fileno=ours.detach())
    end.attach(weak)
    theirs.sendall(HELLO)
    end.wait_ports(1)
    weak.takes = number

    def send():
        end.link._want_flush()
        for port in (1, 2):
            end.link.send(encode(Kind.CALL, b"", bytearray(9 << 20), port=port))

    on_loop(loop, send)
    assert theirs.recv(len(HELLO)) == HELLO and theirs.recv(1) == b"", "nothing follows a part"
    theirs.close()
    ours, theirs = socket.socketpair()
    theirs.settimeout(WAIT_S)
    end.attach(ours)
    theirs.sendall(HELLO)
    assert theirs.recv(len(HELLO)) == HELLO and decoded(theirs, 2) == [1, 2]
    on_loop(loop, end.link.close, "over")
    theirs.close()


class Interrupts:
    """Ctrl-C at the n-th place where the interpreter looks for it: behind a call of C, and at the beginning of a function."""

    def __init__(self, number):
        self.left = number

    def __call__(self, python_frame, event, _):
        if python_frame.f_code.co_filename in PLACES and event in ("call", "c_return"):
            self.left -= 1
            if not self.left:
                sys.setprofile(None)
                raise KeyboardInterrupt


@pytest.mark.parametrize("nbytes", [10, LONG_BYTES, 9 << 20])
def test_ctrl_c_in_a_send_leaves_a_session_that_goes_on(loop, nbytes):
    for number in itertools.count(1):
        end = End(loop)
        ours, theirs = socket.socketpair()
        theirs.settimeout(WAIT_S)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        end.attach(ours)
        theirs.sendall(HELLO)
        end.wait_ports(1)
        theirs.recv(len(HELLO))
        interrupts, was_accepted = Interrupts(number), True
        before = sys.getprofile()
        try:
            sys.setprofile(interrupts)
            end.link.send(encode(Kind.CALL, b"", bytearray(nbytes), port=1))
        except KeyboardInterrupt:
            was_accepted = False
        finally:
            sys.setprofile(before)
        end.link.send(encode(Kind.CALL, b"", b"", port=2))
        received, decoder = [], Decoder(NO_LIMIT)
        while 2 not in received:
            count = theirs.recv_into(decoder.space())
            if not count:
                theirs.close()
                ours, theirs = socket.socketpair()
                theirs.settimeout(WAIT_S)
                end.attach(ours)
                theirs.sendall(frame(Kind.CONTROL, header=b"hello", port=len(received)))
                assert theirs.recv(len(HELLO)) == HELLO
                decoder = Decoder(NO_LIMIT)
                continue
            received += [frame.port for frame in decoder.received(count)]
        assert received == [1, 2] or (received == [2] and not was_accepted), (number, received)
        assert end.link.closed is None
        on_loop(loop, end.link.close, "over")
        theirs.close()
        if interrupts.left > 0:
            return
