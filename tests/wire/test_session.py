"""Sessions: whatever is cut and whenever, every frame arrives once and in order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch._wire.frames import FrameError
from monarch._wire.session import Incoming, Outgoing


def frames_of(outgoing, number):
    return [bytes(frame) for frame in outgoing.from_(number)]


def test_what_is_not_acknowledged_is_kept_and_sent_again():
    outgoing = Outgoing()
    for name in (b"a", b"b", b"c", b"d"):
        outgoing.keep(name)
    outgoing.acknowledge(1)
    assert (outgoing.sent, outgoing.last, frames_of(outgoing, 1)) == (4, b"d", [b"b", b"c", b"d"])
    outgoing.resume(3)
    assert frames_of(outgoing, 3) == [b"d"]
    outgoing.keep(b"e")
    assert (outgoing.sent, frames_of(outgoing, 4)) == (5, [b"e"])


@pytest.mark.parametrize(
    ("acknowledged", "call", "number"), [(0, "acknowledge", 3), (0, "resume", 3), (2, "resume", 1), (1, "acknowledge", 1 << 63)]
)
def test_a_peer_that_can_not_count_is_broken(acknowledged, call, number):
    outgoing = Outgoing()
    outgoing.keep(b"a")
    outgoing.keep(b"b")
    outgoing.acknowledge(acknowledged)
    with pytest.raises(FrameError, match=r"the peer (acknowledges|has received) \d+ frames"):
        getattr(outgoing, call)(number)


def test_an_old_acknowledgement_changes_nothing():
    outgoing = Outgoing()
    outgoing.keep(b"a")
    outgoing.keep(b"b")
    outgoing.acknowledge(2)
    outgoing.acknowledge(1)
    assert (outgoing.sent, frames_of(outgoing, 2)) == (2, [])


@pytest.mark.parametrize(("frames", "nbytes"), [(3, 1), (1, 100), (2, 60)])
def test_acknowledgements_are_due_by_frames_and_by_bytes(frames, nbytes):
    incoming = Incoming(max_frames=3, max_bytes=100)
    assert not incoming.owes
    due = [incoming.count(nbytes) for _ in range(frames)]
    assert due == [False] * (frames - 1) + [True] and incoming.owes
    assert incoming.acknowledge() == frames
    assert not incoming.owes and not incoming.count(1)


class End:
    """One end, whose connection may be cut; what is under way then is lost."""

    def __init__(self):
        self.outgoing, self.incoming = Outgoing(), Incoming(4, 1 << 20)
        self.written = 0
        self.wire: list[tuple[str, object]] = []
        self.got: list[bytes] = []

    def write(self):
        frames = list(self.outgoing.from_(self.written))
        self.wire.extend(("frame", frame) for frame in frames)
        self.written += len(frames)

    def take(self, item, other):
        kind, value = item
        if kind == "ack":
            self.outgoing.acknowledge(value)
            return
        self.got.append(value)
        if self.incoming.count(len(value)):
            self.wire.append(("ack", self.incoming.acknowledge()))


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from("SsRrcW"), st.integers(0, 5))))
def test_frames_arrive_once_and_in_order_over_any_number_of_connections(steps):
    ends = (End(), End())
    sent: tuple[list[bytes], list[bytes]] = ([], [])

    def deliver(receiver, count):
        wire = ends[1 - receiver].wire
        for _ in range(min(count, len(wire))):
            ends[receiver].take(wire.pop(0), ends[1 - receiver])

    def reconnect():
        for end in ends:
            end.wire.clear()
        for end, other in (ends, ends[::-1]):
            end.outgoing.resume(other.incoming.received)
            end.written = other.incoming.received
            end.write()

    for action, count in steps:
        match action:
            case "S" | "s":
                which = action == "s"
                for _ in range(count):
                    sent[which].append(b"%d" % len(sent[which]))
                    ends[which].outgoing.keep(sent[which][-1])
                ends[which].write()
            case "R" | "r":
                deliver(action == "r", count)
            case "c":
                reconnect()
            case "W":
                ends[count % 2].write()
    reconnect()
    for _ in range(3):
        deliver(0, 1 << 30)
        deliver(1, 1 << 30)
    assert (ends[1].got, ends[0].got) == sent
    assert all(len(frames_of(end.outgoing, end.outgoing.sent - 0)) == 0 for end in ends)
