"""A link: frames leave whole and in order, whoever sends and however slow the peer is, and its end is told once."""

from __future__ import annotations

import array
import gc
import os
import socket
import subprocess
import sys
import textwrap
import threading
from collections import deque

import pytest

from monarch._base.ids import ProcRef
from monarch._net.local import SegmentPool, available
from monarch._net.loop import NetLoop
from monarch._net.stream import Link, LinkClosedError
from monarch._wire import messages
from monarch._wire.frames import Flag, FrameError, Kind, encode
from net.wires import on_loop

WAIT_S = 10.0
NO_LIMIT = 1 << 40
needs_memfd = pytest.mark.skipif(not available(), reason="shared memory without a name needs memfd, which is Linux's")


@pytest.fixture
def loop():
    loop = NetLoop("monarch-test-net")
    loop.start()
    yield loop
    loop.stop()
    loop.join(WAIT_S)


class End:
    """A link and all that it has told."""

    def __init__(self, loop, pool=None, limit=NO_LIMIT):
        self.loop, self.pool = loop, pool
        self.frames, self.reasons = deque(), deque()
        self.arrived, self.ended = threading.Semaphore(0), threading.Event()
        self.answer = None
        self.link = Link(loop, pool, self.on_frame, self.on_closed, limit)
        self.link.peer = ProcRef("peer", "ipc:///peer", "")

    def on_frame(self, link, frame, buffers):
        assert link is self.link
        self.frames.append((frame, buffers))
        try:
            if self.answer is not None:
                self.answer(frame)
        finally:
            self.arrived.release()

    def on_closed(self, link, reason):
        assert link is self.link
        self.reasons.append(reason)
        self.ended.set()

    def attach(self, sock, first=(b"",)):
        on_loop(self.loop, self.link.attach, sock, list(first))

    def close(self, reason="the test is over"):
        on_loop(self.loop, self.link.close, reason)

    def take(self, count=1):
        """The next frames."""
        for _ in range(count):
            assert self.arrived.acquire(timeout=WAIT_S), (len(self.frames), list(self.reasons))
        return [self.frames.popleft() for _ in range(count)]

    def wait_closed(self):
        assert self.ended.wait(WAIT_S)
        on_loop(self.loop, int)
        (reason,) = self.reasons  # told once
        return reason


@pytest.fixture
def make(loop):
    """Makes ends of links, which are closed afterwards."""
    ends = []

    def make_end(**options):
        ends.append(End(loop, **options))
        return ends[-1]

    yield make_end
    for end in ends:
        end.close()
        assert len(end.reasons) == 1


@pytest.fixture
def linked(make):
    """Two ends of one connection."""
    left, right = make(), make()
    for end, sock in zip((left, right), socket.socketpair(), strict=True):
        end.attach(sock)
    return left, right


@pytest.fixture
def raw(make):
    """One end, and the socket of a peer that does what the test says."""
    end = make(limit=1 << 20)
    ours, theirs = socket.socketpair()
    with theirs:
        end.attach(ours)
        theirs.settimeout(WAIT_S)
        yield end, theirs


def call(number, payload=b"", **options):
    return encode(Kind.CALL, b"header", payload, port=number, **options)


def joined(pieces):
    return b"".join(bytes(piece) for piece in pieces)


def numbers(frames):
    return [frame.port for frame, _ in frames]


def read_all(sock):
    data = bytearray()
    while chunk := sock.recv(1 << 20):
        data += chunk
    return bytes(data)


# --- sending -------------------------------------------------------------------------------------------------------


def test_a_frame_arrives_as_it_left(linked):
    left, right = linked
    left.link.send(encode(Kind.REPLY, b"head", b"body", flags=Flag.ERROR, port=7, rank=3, buffers=[memoryview(b"one"), memoryview(b"")]))
    ((frame, buffers),) = right.take()
    assert (frame.kind, frame.flags, frame.port, frame.rank, frame.header, frame.payload) == (2, 1, 7, 3, b"head", b"body")
    assert [bytes(b) for b in buffers] == [b"one", b""]


def test_a_control_message_arrives_as_it_left(linked):
    left, right = linked
    right.link.send_control(messages.Credit("actor", 5), b"payload", port=9)
    ((frame, _),) = left.take()
    assert (messages.decode_control(frame.header), frame.payload, frame.port) == (messages.Credit("actor", 5), b"payload", 9)


def test_frames_sent_before_the_connection_arrive_behind_the_hello(make):
    left, right = make(), make()
    for number in range(3):
        left.link.send(call(number))
    assert not left.link.connected
    near, far = socket.socketpair()
    right.attach(far)
    left.attach(near, call(1000))
    left.link.send(call(3))
    assert left.link.connected
    assert numbers(right.take(5)) == [1000, 0, 1, 2, 3]


def test_memory_of_the_caller_is_free_after_a_send(make):
    left, right = make(), make()
    memory = bytearray(b"before")
    left.link.send(call(0, buffers=[memoryview(memory)]))
    memory[:] = b"after!"
    memory.clear()  # refused while somebody holds a view
    near, far = socket.socketpair()
    right.attach(far)
    left.attach(near)
    assert bytes(right.take()[0][1][0]) == b"before"
    memory = bytearray(1 << 20)  # more than the socket takes at once
    left.link.send(call(1, buffers=[memoryview(memory)]))
    memory.clear()
    assert right.take()[0][1][0].nbytes == 1 << 20


@pytest.mark.cpu_limit(5)
def test_frames_of_many_senders_stay_whole_and_in_the_order_of_each(linked):
    left, right = linked
    rounds, senders = 300, 4

    def send(sender):
        for number in range(rounds):
            body = bytes([sender]) * (number * 37 % 3000)
            left.link.send(call(number, body, rank=sender, buffers=[memoryview(body)] if number % 3 else ()))

    threads = [threading.Thread(target=send, args=[sender]) for sender in range(senders)]
    for thread in threads:
        thread.start()
    received = right.take(rounds * senders)
    for thread in threads:
        thread.join(WAIT_S)
    for sender in range(senders):
        own = [(frame, buffers) for frame, buffers in received if frame.rank == sender]
        assert numbers(own) == list(range(rounds))
    for frame, buffers in received:
        body = bytes([frame.rank]) * (frame.port * 37 % 3000)
        assert frame.payload == body
        assert [bytes(b) for b in buffers] == ([body] if frame.port % 3 else [])


@pytest.mark.cpu_limit(5)
def test_what_a_slow_reader_does_not_take_waits_and_arrives_in_order(raw, make):
    left, theirs = raw
    sent = []
    for number in range(200):
        pieces = call(number, bytes([number]) * 40_000)
        sent.append(joined(pieces))
        left.link.send(pieces)  # does not block, though nobody reads
    assert left.link.queued_bytes > 5_000_000
    reader = make()
    reader.attach(theirs.dup())
    assert numbers(reader.take(200)) == list(range(200))
    on_loop(left.loop, int)
    assert left.link.queued_bytes == 0
    left.link.send(call(200))
    assert numbers(reader.take(1)) == [200]


def test_a_frame_of_more_pieces_than_one_write_takes_arrives(linked):
    left, right = linked
    buffers = [memoryview(bytes([number % 251]) * 5) for number in range(2000)]
    left.link.send(call(1, buffers=buffers))
    assert [bytes(b) for b in right.take()[0][1]] == [bytes(b) for b in buffers]


def test_both_ends_send_while_neither_reads_at_once(linked):
    left, right = linked
    for number in range(40):
        for end in linked:
            end.link.send(call(number, bytes(100_000)))
    assert numbers(left.take(40)) == numbers(right.take(40)) == list(range(40))


def test_a_frame_handler_may_send(linked):
    left, right = linked
    right.answer = lambda frame: right.link.send(call(frame.port + 1000))
    for number in range(50):
        left.link.send(call(number))
    assert numbers(left.take(50)) == list(range(1000, 1050))


class Finalised:
    def __init__(self, end, number):
        self.end, self.number = end, number
        self.cycle = self

    def __del__(self):
        self.end.link.send(call(self.number))


def test_a_finaliser_may_send_while_its_own_thread_sends(linked):
    left, right = linked
    before = gc.get_threshold()
    gc.set_threshold(5)
    try:
        for number in range(300):
            Finalised(left, 1000 + number)
            left.link.send(call(number, buffers=[memoryview(b"x")] * 20))
    finally:
        gc.set_threshold(*before)
    gc.collect()
    received = numbers(right.take(600))
    assert [number for number in received if number < 1000] == list(range(300))
    assert sorted(received) == [*range(300), *range(1000, 1300)]


INTERRUPTED = """
    import os, signal, socket, threading, time

    def on_signal(*_):
        global armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    armed = False
    signal.signal(signal.SIGINT, on_signal)

    from monarch._net.loop import NetLoop
    from monarch._net.stream import Link
    from monarch._wire.frames import Decoder, Kind, encode

    main = os.getpid()
    bomber = os.fork()  # a process: a thread would only ever send while this one waits for the interpreter lock
    while not bomber:
        time.sleep(0.0001)
        if os.getppid() != main:
            os._exit(0)
        os.kill(main, signal.SIGINT)

    loop = NetLoop("monarch-test-net")
    loop.start()
    near, far = socket.socketpair()
    link = Link(loop, None, print, lambda link, reason: print("closed", reason), 1 << 40)
    link.on_frame = lambda *_: None
    attached = threading.Event()
    loop.call_soon(lambda: (link.attach(near, [b""]), attached.set()))
    attached.wait()
    received, interrupts = [], 0

    def read():
        decoder = Decoder(1 << 40)
        while not (received and received[-1].port == 2**40):
            received.extend(decoder.received(far.recv_into(decoder.space())))

    reader = threading.Thread(target=read)
    reader.start()
    accepted = []
    for number in range(1500):
        body = bytes([number % 251]) * (number % 7 * 90_000 if number % 5 == 0 else 100)
        try:
            armed = True
            link.send(encode(Kind.CALL, b"", body, port=number))
            armed = False
            accepted.append(number)
        except KeyboardInterrupt:
            interrupts += 1
    os.kill(bomber, signal.SIGKILL)
    os.waitpid(bomber, 0)
    link.send(encode(Kind.CALL, b"", b"", port=2**40))
    reader.join(10)
    assert not reader.is_alive(), f"the stream stands still: {len(received)} of {len(accepted)} frames"
    ports = [frame.port for frame in received[:-1]]
    assert ports == sorted(set(ports)) and set(accepted) <= set(ports), "frames are missing or out of order"
    for frame in received[:-1]:
        assert set(frame.payload) <= {frame.port % 251}, f"frame {frame.port} is torn"
    print("interrupts", interrupts)
    loop.call_soon(link.close, "over")
    loop.stop()
    loop.join(5)
"""


def test_ctrl_c_in_a_send_leaves_whole_frames():
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(INTERRUPTED)], capture_output=True, text=True, timeout=25)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[1]) > 20


# --- receiving -----------------------------------------------------------------------------------------------------


def test_half_a_frame_waits_for_its_other_half(raw):
    end, theirs = raw
    data = joined(call(1, b"payload"))
    for at in range(len(data) - 1):
        theirs.sendall(data[at : at + 1])
        on_loop(end.loop, int)
    assert not end.frames
    theirs.sendall(data[-1:] + data)
    assert numbers(end.take(2)) == [1, 1]


def test_many_frames_at_once_are_all_handled(raw):
    end, theirs = raw
    data = b"".join(joined(call(number, bytes(300))) for number in range(10_000))
    sender = threading.Thread(target=theirs.sendall, args=[data])
    sender.start()
    assert numbers(end.take(10_000)) == list(range(10_000))
    sender.join()


def test_the_last_frames_of_a_peer_that_closes_are_handled(make):
    for count in (1, 2, 3000):
        end = make()
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        theirs.settimeout(WAIT_S)
        hold, held = threading.Event(), threading.Event()
        end.attach(ours)
        end.loop.call_soon(lambda held=held, hold=hold: (held.set(), hold.wait(WAIT_S)))
        assert held.wait(WAIT_S)
        theirs.sendall(b"".join(joined(call(number, bytes(900))) for number in range(count)))
        theirs.close()  # the loop hears of both at the same time
        hold.set()
        assert end.wait_closed() == "the peer closed the connection"
        assert numbers(end.take(count)) == list(range(count))


def test_the_last_frames_of_a_peer_that_takes_nothing_more_are_handled(make):
    end = make()
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    end.attach(ours)
    hold, held = threading.Event(), threading.Event()
    end.loop.call_soon(lambda: (held.set(), hold.wait(WAIT_S)))
    assert held.wait(WAIT_S)
    theirs.sendall(b"".join(joined(call(number, bytes(900))) for number in range(3000)))
    theirs.close()
    end.link.send(call(0))  # finds out on this thread
    hold.set()
    end.wait_closed()
    assert numbers(end.take(3000)) == list(range(3000))


def test_a_handler_that_raises_costs_no_other_frame(linked, capsys):
    left, right = linked

    def fail(frame):
        if frame.port % 2:
            raise LookupError(f"frame {frame.port}")

    right.answer = fail
    on_loop(left.loop, lambda: [left.link.send(call(number)) for number in range(10)])
    assert numbers(right.take(10)) == list(range(10))
    on_loop(left.loop, int)
    assert right.link.closed is None
    assert capsys.readouterr().err.count("LookupError: frame") == 5


def test_nothing_comes_from_a_link_that_its_handler_closed(raw):
    end, theirs = raw
    end.answer = lambda frame: end.link.close("enough")
    theirs.sendall(joined(call(1)) + joined(call(2)) + joined(call(3)))
    assert end.wait_closed() == "enough"
    assert numbers(end.frames) == [1]


# --- the end -------------------------------------------------------------------------------------------------------


def test_a_closed_link_refuses_with_its_reason(linked):
    left, right = linked
    left.close("why not")
    with pytest.raises(LinkClosedError, match="why not"):
        left.link.send(call(0))
    assert not left.link.connected
    assert right.wait_closed() == "the peer closed the connection"
    with pytest.raises(LinkClosedError, match="the peer closed the connection"):
        right.link.send_control(messages.Ping())


def test_only_the_first_reason_counts(linked):
    left, _ = linked
    for reason in ("first", "second"):
        left.close(reason)
    assert left.wait_closed() == "first"
    assert left.link.closed == "first"


def test_a_link_that_was_never_connected_can_be_closed(make):
    end = make()
    end.link.send(call(0))
    end.close("never up")
    assert end.wait_closed() == "never up"


def test_a_peer_that_is_gone_is_noticed_by_a_sender(make):
    end = make()
    ours, theirs = socket.socketpair()
    end.attach(ours)
    theirs.close()
    end.wait_closed()


def test_senders_of_a_link_that_closes_get_an_answer(linked):
    left, right = linked
    refused = threading.Semaphore(0)

    def send():
        try:
            while True:
                left.link.send(call(0, bytes(1000)))
        except LinkClosedError:
            refused.release()

    threads = [threading.Thread(target=send) for _ in range(3)]
    for thread in threads:
        thread.start()
    right.take(10)
    right.close("enough")
    for thread in threads:
        assert refused.acquire(timeout=WAIT_S)
        thread.join(WAIT_S)
    left.wait_closed()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\xff" * 200, "is longer than codec_max_frame_length"),
        (joined(call(0, bytes(2 << 20))), "is longer than codec_max_frame_length"),
        (joined(encode(Kind.SEGMENT, b"", b"", port=4096, segment=1)), "a segment was announced without its descriptor"),
        (joined(encode(Kind.CALL, b"", b"", segment=1, spans=[(0, 1)])), "shared memory that was never announced"),
    ],
    ids=["garbage", "too long", "no descriptor", "no segment"],
)
def test_a_peer_that_breaks_the_protocol_is_cut_off(raw, data, said):
    end, theirs = raw
    threading.Thread(target=lambda: theirs.send(data), daemon=True).start()
    reason = end.wait_closed()
    assert reason.startswith("protocol error: ")
    assert said in reason


@pytest.mark.parametrize("error", [FrameError("no such kind"), messages.DecodeError("no such kind")], ids=lambda e: type(e).__name__)
def test_a_handler_may_cut_the_peer_off(raw, error):
    end, theirs = raw

    def refuse(frame):
        raise error

    end.answer = refuse
    theirs.sendall(joined(call(0)) + joined(call(1)))
    assert end.wait_closed() == "protocol error: no such kind"
    assert numbers(end.frames) == [0]


def test_a_forked_child_abandons_its_links_and_the_parent_goes_on(linked):
    left, right = linked
    pid = os.fork()
    if not pid:
        left.link.abandon()
        right.link.abandon()
        os._exit(0)
    os.waitpid(pid, 0)
    left.link.send(call(5))
    assert numbers(right.take()) == [5]


# --- shared memory -------------------------------------------------------------------------------------------------


@pytest.fixture
def pool():
    pool = SegmentPool()
    yield pool
    pool.close()


@pytest.fixture
def shared(make, pool):
    """Two ends of one connection; the left one sends by shared memory and takes it back as a process does."""
    left, right = make(pool=pool), make()
    left.returned = threading.Semaphore(0)
    left.gone = threading.Semaphore(0)

    def on_left(link, frame, buffers):
        message = messages.decode_control(frame.header)
        assert isinstance(message, messages.ReleaseSegments)
        left.link.take_back(message.segments)
        for _ in message.segments:
            left.returned.release()

    def on_right(link, frame, buffers):
        if frame.kind == Kind.CONTROL:
            right.link.drop_segments(messages.decode_control(frame.header).segments)
            left.gone.release()
        else:
            right.on_frame(link, frame, buffers)

    left.link.on_frame, right.link.on_frame = on_left, on_right
    for end, sock in zip((left, right), socket.socketpair(), strict=True):
        end.attach(sock)
    return left, right


def send_shared(end, number, *contents, receivers=1):
    segment = end.pool.pack([memoryview(content) for content in contents], receivers=receivers)
    flags = Flag.SHARED if receivers > 1 else 0
    end.link.send(call(number, flags=flags, segment=segment.segment_id, spans=segment.spans), segment)
    return segment


def num_lent(pool):
    return len(pool._lent)


@needs_memfd
def test_buffers_in_shared_memory_arrive_and_their_segment_comes_back(shared, pool):
    left, right = shared
    seen = set()
    for number in range(20):
        segment = send_shared(left, number, b"one" * 100, b"", bytes([number]) * 70_000)
        seen.add(segment.segment_id)
        ((frame, buffers),) = right.take()
        assert frame.port == number
        assert [bytes(b) for b in buffers] == [b"one" * 100, b"", bytes([number]) * 70_000]
        assert num_lent(pool) == 1
        del buffers
        assert left.returned.acquire(timeout=WAIT_S)
        assert num_lent(pool) == 0
    assert len(seen) == 1  # and so its descriptor was sent once


@needs_memfd
def test_shared_and_inline_frames_keep_their_order(shared, pool):
    left, right = shared
    for number in range(0, 60, 2):
        send_shared(left, number, bytes([number]) * 70_000)
        left.link.send(call(number + 1, bytes(number * 1000)))
    received = right.take(60)
    assert numbers(received) == list(range(60))
    for frame, buffers in received[::2]:
        assert bytes(buffers[0][:1]) == bytes([frame.port])
    del received, frame, buffers
    for _ in range(30):
        assert left.returned.acquire(timeout=WAIT_S)
    assert num_lent(pool) == 0


@needs_memfd
def test_segments_sent_before_the_connection_arrive(make, pool):
    left, right = make(pool=pool), make()
    for number in range(20):  # more descriptors than one read takes
        send_shared(left, number, bytes([number]) * 70_000)
    near, far = socket.socketpair()
    right.attach(far)
    left.attach(near)
    received = right.take(20)
    assert [bytes(buffers[0][:1]) for _, buffers in received] == [bytes([number]) for number in range(20)]
    assert num_lent(pool) == 20


@needs_memfd
@pytest.mark.parametrize("side", ["left", "right"])
def test_segments_come_back_when_the_link_is_lost(shared, pool, side):
    left, right = shared
    for number in range(3):
        send_shared(left, number, bytes(70_000))
    kept = right.take(3)
    assert num_lent(pool) == 3
    (left if side == "left" else right).close("cut")
    left.wait_closed()
    assert num_lent(pool) == 0
    assert bytes(kept[0][1][0][:3]) == bytes(3)  # what was received stays
    del kept  # released on a closed link: nobody is told


@needs_memfd
def test_a_segment_for_a_closed_link_comes_back_at_once(make, pool):
    end = make(pool=pool)
    end.close("gone")
    with pytest.raises(LinkClosedError, match="gone"):
        send_shared(end, 0, bytes(70_000))
    assert num_lent(pool) == 0


@needs_memfd
def test_a_segment_for_several_receivers_comes_back_from_the_last(make, pool):
    lefts, rights = [make(pool=pool) for _ in range(2)], [make() for _ in range(2)]
    for left, right in zip(lefts, rights, strict=True):
        near, far = socket.socketpair()
        left.attach(near)
        right.attach(far)
    segment = pool.pack([memoryview(b"x" * 70_000)], receivers=2)
    for left in lefts:
        left.link.send(call(1, flags=Flag.SHARED, segment=segment.segment_id, spans=segment.spans), segment)
    first, second = rights[0].take()[0][1], rights[1].take()[0][1]
    first[0][:1] = b"y"  # is private
    assert bytes(second[0][:1]) == b"x"
    lefts[0].close("cut")
    assert num_lent(pool) == 1
    lefts[1].close("cut")
    assert num_lent(pool) == 0


@needs_memfd
def test_a_segment_that_nobody_lent_is_not_taken_back(shared, pool):
    left, right = shared
    send_shared(left, 0, bytes(70_000))
    kept = right.take()
    right.link.send_control(messages.ReleaseSegments([12345]))
    assert left.returned.acquire(timeout=WAIT_S)
    assert num_lent(pool) == 1
    del kept
    assert left.returned.acquire(timeout=WAIT_S)
    assert num_lent(pool) == 0


@needs_memfd
def test_closed_segments_are_unmapped_by_who_knows_them(shared, pool):
    left, right = shared
    send_shared(left, 0, bytes(70_000))
    right.take()
    assert left.returned.acquire(timeout=WAIT_S)
    closed = pool.trim(1e12)
    assert len(closed) == 1
    on_loop(left.loop, left.link.forget_segments, [*closed, 999])
    assert left.gone.acquire(timeout=WAIT_S)
    assert right.link._cache._known == {}
    on_loop(left.loop, left.link.forget_segments, closed)  # told once
    send_shared(left, 1, b"z" * 70_000)
    assert bytes(right.take()[0][1][0][:1]) == b"z"


@needs_memfd
def test_a_link_without_pool_ignores_what_is_given_back(linked):
    left, _ = linked
    on_loop(left.loop, left.link.take_back, [1, 2])
    on_loop(left.loop, left.link.drop_segments, [1, 2])
    assert left.link.closed is None


@needs_memfd
@pytest.mark.parametrize(
    ("capacity", "spans", "said"),
    [
        (8192, [(0, 1)], "shorter than the 8192 bytes"),
        (4096, [(4000, 97)], "outside of segment"),
        (4096, [(2**63, 1)], "outside of segment"),
    ],
)
def test_shared_memory_that_lies_about_its_size_cuts_the_peer_off(raw, capacity, spans, said, capsys):
    end, theirs = raw
    fd = os.memfd_create("monarch-test")
    os.ftruncate(fd, 4096)
    announcement = joined(encode(Kind.SEGMENT, b"", b"", port=capacity, segment=1))
    frame = joined(call(1, segment=1, spans=spans))
    theirs.sendmsg([announcement, frame], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
    os.close(fd)
    reason = end.wait_closed()
    assert reason.startswith("protocol error: ")
    assert said in reason
    assert not end.frames
    assert "internal error" not in capsys.readouterr().err


@needs_memfd
def test_descriptors_that_no_frame_asked_for_are_closed_with_the_link(raw):
    end, theirs = raw
    with open("/dev/null") as file:
        theirs.sendmsg([joined(call(1))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file.fileno()] * 5))])
    end.take()
    num_open = len(os.listdir("/proc/self/fd"))
    end.close("over")
    assert len(os.listdir("/proc/self/fd")) == num_open - 6  # five and the socket
