"""Tunnels: every byte arrives once and in order, a slow reader costs a window and holds up nobody, and ends end once."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch._wire import tunnels
from monarch._wire.frames import PREFIX, Decoder, Frame, FrameError, Kind, encode
from monarch._wire.tunnels import (
    CHUNK_BYTES,
    FIRST_WINDOW,
    LINK_WINDOW,
    MOST_TUNNELS,
    MOST_WINDOW,
    Arrived,
    Broken,
    Ended,
    Op,
    Opened,
    Room,
    Side,
    Tunnels,
    Write,
)

CHUNK = bytes(CHUNK_BYTES)


class End:
    """One end, with sources and readers as its driver has them."""

    def __init__(self, side):
        self.tunnels = Tunnels(side)
        self.sent, self.got = {}, {}
        """Bytes that entered each tunnel here, and that a reader here has taken."""
        self.queues = {}
        self.wire = deque()
        self.opened, self.rooms = {}, []
        self.ended, self.broken, self.finished, self.gave_up = [], {}, set(), set()
        self.most_waiting = 0

    def run(self, effects):
        for effect in effects:
            match effect:
                case Write(pieces):
                    self.write(pieces)
                case Opened(number, address):
                    self.opened[number] = address
                    self.add(number)
                case Arrived(number, data):
                    assert number not in self.ended and number not in self.broken
                    self.queues[number] += data
                case Room(number):
                    self.rooms.append(number)
                case Ended(number):
                    self.ended.append(number)
                case Broken(number, reason):
                    assert number not in self.broken
                    self.broken[number] = reason

    def write(self, pieces):
        self.wire.append(b"".join(bytes(piece) for piece in pieces))

    def add(self, number):
        self.sent[number], self.got[number], self.queues[number] = bytearray(), bytearray(), bytearray()

    def open(self, address="somewhere"):
        number, effects = self.tunnels.open(address)
        self.add(number)
        self.run(effects)
        return number

    def send(self, number, data):
        """What fits of it."""
        data = data[: self.tunnels.room(number)]
        if data:
            self.write(self.tunnels.send(number, data))
            self.sent[number] += data
        return len(data)

    def fill(self, number, nbytes=1 << 40):
        """Send as long as there is room."""
        left = nbytes
        while left and (count := self.send(number, CHUNK[:left])):
            left -= count
        return nbytes - left

    def read(self, number, nbytes=1 << 40):
        data = bytes(self.queues[number][:nbytes])
        del self.queues[number][: len(data)]
        self.got[number] += data
        if data:
            self.run(self.tunnels.consumed(number, len(data)))

    def finish(self, number):
        self.finished.add(number)
        self.run(self.tunnels.finish(number))

    def reset(self, number, reason="reset"):
        self.gave_up.add(number)
        self.queues[number].clear()
        self.run(self.tunnels.reset(number, reason))

    def receive(self, data):
        (frame,) = decoded(data)
        self.run(self.tunnels.receive(frame))
        if frame.flags != Op.DATA:
            return
        self.most_waiting = max(self.most_waiting, self.tunnels.waiting_bytes)
        assert self.tunnels.waiting_bytes == sum(map(len, self.queues.values()))


def decoded(data):
    decoder, found = Decoder(1 << 30), []
    while data:
        space = decoder.space()
        count = min(len(space), len(data))
        space[:count] = data[:count]
        found += decoder.received(count)
        data = data[count:]
    return found


def pair():
    return End(Side.CLIENT), End(Side.GATEWAY)


def deliver(*ends):
    """Deliver frames until none is on the way."""
    one, other = ends
    while one.wire or other.wire:
        for left, right in ((one, other), (other, one)):
            if left.wire:
                right.receive(left.wire.popleft())


def connected():
    """Two ends with one tunnel."""
    client, gateway = pair()
    number = client.open()
    deliver(client, gateway)
    return client, gateway, number


def frame(op, number, payload=b"", *, rank=0, header=b"", buffers=()):
    return b"".join(bytes(b) for b in encode(Kind.TUNNEL, header, payload, flags=op, port=number, rank=rank, buffers=buffers))


# --- streams -------------------------------------------------------------------------------------------------------


def test_an_opened_tunnel_tells_the_other_end_its_address():
    client, gateway = pair()
    assert [client.open("tcp://host:1"), gateway.open("näme"), client.open("tcp://host:2")] == [1, 2, 3]
    deliver(client, gateway)
    assert gateway.opened == {1: "tcp://host:1", 3: "tcp://host:2"}
    assert client.opened == {2: "näme"}


def test_bytes_follow_the_opening_at_once_and_come_back():
    client, gateway = pair()
    number = client.open()
    assert client.send(number, b"question") == 8
    deliver(client, gateway)
    gateway.read(number)
    gateway.send(number, b"answer")
    deliver(client, gateway)
    client.read(number)
    assert (bytes(gateway.got[number]), bytes(client.got[number])) == (b"question", b"answer")


def test_a_frame_of_data_fits_the_read_buffer_of_a_link_several_times():
    client, _, number = connected()
    client.fill(number)
    assert 4 * (max(map(len, client.wire)) + PREFIX.size) <= 256 * 1024 + 8 * PREFIX.size


steps = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1), st.integers(0, 5), st.integers(1, 90_000)), max_size=120)


@settings(max_examples=60)
@given(steps)
def test_bytes_arrive_complete_and_in_order_whoever_does_what_when(script):
    ends = pair()
    for what, who, which, size in script:
        end, other = ends[who], ends[1 - who]
        numbers = sorted(end.sent)
        number = numbers[which % len(numbers)] if numbers else None
        if what == 0 and len(numbers) < 6:
            end.open(str(size))
        elif what in (1, 2, 3, 4) and end.wire:
            other.receive(end.wire.popleft())
        elif number is None or number in end.gave_up:
            continue
        elif what in (5, 6) and number not in end.finished:
            end.send(number, bytes([size % 251]) * size)
        elif what == 7:
            end.read(number, size)
        elif what == 8 and size < 20_000:
            end.finish(number)
        elif what == 9 and size < 5_000:
            end.reset(number, str(size))
    deliver(*ends)
    for end, other in (ends, ends[::-1]):
        assert end.most_waiting <= len(end.sent) * MOST_WINDOW
        assert len(end.ended) == len(set(end.ended))
        for number, sent in end.sent.items():
            arrived = bytes(other.got[number] + other.queues[number])
            assert sent.startswith(arrived)
            if number not in other.gave_up:
                assert arrived == sent
                assert (number in other.ended or number in other.broken) == (number in end.finished or number in end.gave_up)
    for end in ends:
        for number in end.sent:
            end.read(number)
            end.finish(number)
    deliver(*ends)
    for end in ends:
        for number in end.sent:
            end.read(number)
    deliver(*ends)
    for end in ends:
        assert len(end.tunnels) == end.tunnels.waiting_bytes == 0
        assert end.tunnels._growth_left == tunnels._GROWTH_BYTES
        assert not end.tunnels._starved


# --- windows -------------------------------------------------------------------------------------------------------


def test_a_reader_that_takes_nothing_gets_one_window():
    client, gateway, number = connected()
    for _ in range(3):
        client.fill(number)
        deliver(client, gateway)
    assert len(client.sent[number]) == gateway.tunnels.waiting_bytes == FIRST_WINDOW
    assert client.tunnels.room(number) == 0
    gateway.read(number, FIRST_WINDOW // 2)
    deliver(client, gateway)
    assert client.rooms == [number]
    assert client.tunnels.room(number) == FIRST_WINDOW // 2


def test_room_is_told_only_to_who_asked_in_vain():
    client, gateway, number = connected()
    client.write(client.tunnels.send(number, CHUNK[:FIRST_WINDOW]))
    deliver(client, gateway)
    gateway.queues[number] += CHUNK[:FIRST_WINDOW]
    gateway.run(gateway.tunnels.consumed(number, FIRST_WINDOW))
    gateway.queues[number].clear()
    deliver(client, gateway)
    assert client.rooms == []


def test_a_stalled_reader_holds_up_no_other_tunnel():
    client, gateway, stalled = connected()
    fast = client.open()
    client.fill(stalled)
    while len(client.sent[fast]) < 3 * LINK_WINDOW:
        client.fill(fast)
        deliver(client, gateway)
        gateway.read(fast)
        deliver(client, gateway)
    assert len(gateway.queues[stalled]) == FIRST_WINDOW
    assert gateway.most_waiting <= FIRST_WINDOW + MOST_WINDOW


def test_the_window_of_a_reader_that_keeps_up_grows_to_its_most():
    client, gateway, number = connected()
    rounds = []
    for _ in range(12):
        rounds.append(client.fill(number))
        while client.wire:
            gateway.receive(client.wire.popleft())
            gateway.read(number)
        deliver(client, gateway)
    assert rounds[0] == FIRST_WINDOW
    assert sorted(rounds) == rounds
    assert rounds[-1] == MOST_WINDOW


def test_all_tunnels_together_share_what_they_may_grow():
    gateway, numbers, granted = Tunnels(Side.GATEWAY), range(1, 101, 2), {}
    for number in numbers:
        gateway.receive(Frame(Kind.TUNNEL, Op.OPEN, number, 0, 0, b"", b"", (), ()))
        granted[number] = FIRST_WINDOW
    for _ in range(8):
        for number in numbers:
            for _ in range(granted[number] // CHUNK_BYTES):
                gateway.receive(Frame(Kind.TUNNEL, Op.DATA, number, 0, 0, b"", CHUNK, (), ()))
            written = gateway.consumed(number, granted[number])
            granted[number] = sum(decoded(b"".join(effect.pieces))[0].rank for effect in written)
    assert sum(granted.values()) == len(numbers) * FIRST_WINDOW + tunnels._GROWTH_BYTES
    assert max(granted.values()) == MOST_WINDOW


def test_what_is_on_the_way_through_all_tunnels_is_bounded_and_shared_in_turns():
    client, gateway = pair()
    numbers = [client.open() for _ in range(200)]
    for number in numbers:
        client.fill(number)
    assert sum(map(len, client.sent.values())) == LINK_WINDOW
    waiting = [number for number in numbers if len(client.sent[number]) < FIRST_WINDOW]
    assert len(waiting) == 200 - LINK_WINDOW // FIRST_WINDOW
    deliver(client, gateway)
    assert client.rooms == waiting
    for number in waiting:
        client.fill(number)
    deliver(client, gateway)
    assert gateway.tunnels.waiting_bytes == 200 * FIRST_WINDOW  # though nobody has read


def test_a_send_without_room_is_refused():
    client, _, number = connected()
    with pytest.raises(ValueError, match="there is no room for 65537 bytes in tunnel 1"):
        client.tunnels.send(number, bytes(FIRST_WINDOW + 1))
    client.finish(number)
    assert client.tunnels.room(number) == 0
    with pytest.raises(ValueError, match="no room"):
        client.tunnels.send(number, b"x")


# --- ends ----------------------------------------------------------------------------------------------------------


def test_one_direction_ends_and_the_other_goes_on():
    client, gateway, number = connected()
    client.finish(number)
    client.finish(number)
    deliver(client, gateway)
    assert gateway.ended == [number]
    gateway.send(number, b"late")
    gateway.finish(number)
    assert len(gateway.tunnels) == 0
    deliver(client, gateway)
    assert client.ended == [number]
    assert len(client.tunnels) == 1  # somebody has to take what came
    client.read(number)
    assert len(client.tunnels) == 0


def test_a_refusal_comes_with_its_reason():
    client, gateway, number = connected()
    client.send(number, b"first words")
    gateway.reset(number, "nobody listens at tcp://host:1")
    deliver(client, gateway)
    assert client.broken == {number: "nobody listens at tcp://host:1"}
    assert len(client.tunnels) == len(gateway.tunnels) == 0
    assert client.tunnels.room(number) == 0
    assert client.tunnels.finish(number) == client.tunnels.reset(number, "") == client.tunnels.consumed(number, 5) == []


def test_what_came_before_a_reset_is_good_and_counted():
    client, gateway, number = connected()
    client.send(number, b"last words")
    client.reset(number, "gone")
    deliver(client, gateway)
    assert gateway.broken == {number: "gone"}
    assert len(gateway.tunnels) == 1
    gateway.read(number)
    assert bytes(gateway.got[number]) == b"last words"
    assert len(gateway.tunnels) == 0


def test_resets_that_cross_are_quiet():
    client, gateway, number = connected()
    client.reset(number)
    gateway.reset(number)
    deliver(client, gateway)
    assert client.broken == gateway.broken == {}
    assert len(client.tunnels) == len(gateway.tunnels) == 0


def test_bytes_for_a_tunnel_that_was_reset_count_for_the_link():
    client, gateway = pair()
    for _ in range(3 * LINK_WINDOW // FIRST_WINDOW):
        number = client.open()
        deliver(client, gateway)
        gateway.reset(number)
        assert client.fill(number) == FIRST_WINDOW  # has not heard of it
        deliver(client, gateway)
    assert gateway.tunnels.waiting_bytes == 0


def test_a_reason_of_any_length_is_told():
    client, gateway, number = connected()
    gateway.reset(number, "ä" * 5000)
    deliver(client, gateway)
    assert client.broken[number].startswith("ä" * 200)


def test_an_address_that_is_too_long_is_refused_here():
    client, gateway = pair()
    number = client.open("x" * 2000)
    assert "an address of 2000 bytes is longer than 1024" in client.broken[number]
    assert not client.wire
    assert client.open() == number + 2
    deliver(client, gateway)
    assert list(gateway.opened) == [number + 2]


def test_tunnels_beyond_the_limit_are_refused_at_either_end():
    client, gateway = pair()
    for _ in range(MOST_TUNNELS):
        client.open()
    deliver(client, gateway)
    number = client.open()
    assert "4096 tunnels are open through this gateway" in client.broken[number]
    assert not client.wire
    gateway.receive(frame(Op.OPEN, number + 2))  # who does not count them itself
    assert "4096 tunnels" in decoded(gateway.wire.popleft())[0].payload.decode()
    client.reset(1)
    assert client.open() == number + 2  # which the other end has refused already
    client.wire.pop()
    assert len(client.tunnels) == MOST_TUNNELS
    client.reset(3)
    last = client.open()
    deliver(client, gateway)
    assert last in gateway.opened
    assert last not in client.broken


# --- peers that break the rules ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (frame(Op.OPEN, 2), "may not open a tunnel of number 2"),
        (frame(Op.OPEN, 0), "may not open a tunnel of number 0"),
        (frame(Op.OPEN, 1), "may not open a tunnel of number 1"),
        (frame(Op.OPEN, 3, bytes(1025)), "a text of 1025 bytes came where 1024 are the most"),
        (frame(Op.RESET, 1, bytes(513)), "a text of 513 bytes came where 512 are the most"),
        (frame(Op.DATA, 3, b"x"), "there never was a tunnel 3"),
        (frame(Op.DATA, 2, b"x"), "there never was a tunnel 2"),
        (frame(Op.END, 0), "there never was a tunnel 0"),
        (frame(Op.RESET, 2**64 - 1), "there never was a tunnel"),
        (frame(Op.CREDIT, 5, rank=1), "there never was a tunnel 5"),
        (frame(Op.DATA, 1), "0 bytes came through tunnel 1"),
        (frame(Op.DATA, 1, bytes(FIRST_WINDOW + 1)), "65537 bytes came through tunnel 1, which has no room"),
        (frame(Op.DATA, 1, CHUNK) + frame(Op.DATA, 1, b"x"), "1 bytes came through tunnel 1, which has no room"),
        (frame(Op.END, 1) + frame(Op.DATA, 1, b"x"), "bytes came behind the end of tunnel 1"),
        (frame(Op.END, 1) + frame(Op.END, 1), "tunnel 1 ended twice"),
        (frame(Op.CREDIT, 1, rank=MOST_WINDOW), "a credit of 4194304 bytes for tunnel 1 is beyond every window"),
        (frame(Op.CREDIT, 0, rank=1), "a credit of 1 bytes for all tunnels is more than was sent"),
        (frame(Op.SILENCE, 3, rank=1), "there never was a tunnel 3"),
        (frame(6, 1), "know no operation 6"),
        (frame(255, 1), "know no operation 255"),
        (frame(Op.DATA, 1, b"x", header=b"h"), "has more than a payload"),
        (frame(Op.DATA, 1, b"x", buffers=[memoryview(b"y")]), "has more than a payload"),
    ],
)
def test_a_peer_that_breaks_the_rules_gets_a_frame_error(data, said):
    _, gateway, _ = connected()
    *before, last = decoded(data)
    for one in before:
        gateway.run(gateway.tunnels.receive(one))
    with pytest.raises(FrameError, match=said):
        gateway.tunnels.receive(last)


any_frames = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 6), st.binary(max_size=40) | st.just(CHUNK), st.integers(0, 200_000)), max_size=60
)


@settings(max_examples=200)
@given(any_frames)
def test_whatever_a_peer_sends_costs_no_more_than_the_windows(sent):
    _, gateway, _ = connected()
    gateway.open()
    try:
        for op, number, payload, rank in sent:
            gateway.run(gateway.tunnels.receive(Frame(Kind.TUNNEL, op, number, rank, 0, b"", payload, (), ())))
    except FrameError:
        pass
    assert gateway.tunnels.waiting_bytes <= len(gateway.tunnels) * FIRST_WINDOW
    assert len(gateway.wire) <= 2 + len(sent)
