"""Delivery: who is asked for what and when, and that whoever waits hears of the end."""

from __future__ import annotations

import errno
import threading

import pytest

from monarch._base.rows import ROW
from monarch._mounts.delivery import AHEAD_BYTES, RUN_BYTES, Delivery, Piece, stall_s
from monarch._mounts.index import BLOCK_SIZE
from monarch._mounts.ranges import Span
from monarch._mounts.store import READ_AHEAD_BYTES, Store
from monarch._runtime.future import Future
from mounts.world import FILE, Answer, bytes_of, made

MIB = 1 << 20
SMALL, BIG, HUGE = Span(0, 1000), Span(BLOCK_SIZE, 3 * MIB + 5), Span(BLOCK_SIZE + 3 * MIB + 5, 64 * MIB)
FILES = made(*((0, name, FILE, span.length, span.offset) for name, span in ((b"s", SMALL), (b"b", BIG), (b"h", HUGE))), total=1 << 40)
WAIT_S = 5.0


class Upstream:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.asked: list[Span] = []
        self.called = threading.Semaphore(0)
        self.pending: dict[Span, Future] = {}

    def __call__(self, offset: int, length: int) -> Future:
        span = Span(offset, length)
        self.asked.append(span)
        future = self.pending[span] = Future._new()
        self.called.release()
        return future

    def give(self, span: Span, *, lost=(), only=None) -> None:
        part = only or span
        self.pending.pop(span)._complete(Piece([] if lost else [(part.offset, bytes([part.offset % 251]) * part.length)], list(lost)))

    def know_nothing(self, span: Span) -> None:
        self.pending.pop(span)._complete(Piece([], []))

    def end(self) -> None:
        for future in list(self.pending.values()):
            future._fail(ConnectionError("gone"))
        self.pending.clear()


class Host:
    """A store and its delivery, with a host before it and the source."""

    def __init__(self, **options: float) -> None:
        self.before, self.source = Upstream(), Upstream()
        self.store = Store()
        self.store.extend(FILES)
        self.delivery = Delivery(self.store, [self.before, self.source], **options)
        self.delivery.start()

    def settle(self) -> None:
        """Until all that was said so far is done."""
        done = threading.Event()
        self.delivery.prefetch([], done.set)
        assert done.wait(WAIT_S)

    def read(self, file: Span, offset: int, size: int) -> Answer:
        answer = Answer()
        found = self.store.read(file, offset, size, answer)
        if found is not answer:
            answer.given.append(bytes_of(found))
        self.settle()
        return answer

    def serve(self, span: Span) -> list[Piece]:
        given: list[Piece] = []
        self.delivery.serve(*span, given.append)
        self.settle()
        return given

    def pieces(self, file: Span) -> list[Span]:
        return [piece for pieces in self.store.pieces([file]) for piece in pieces]


@pytest.fixture
def host():
    host = Host()
    yield host
    host.delivery.close()
    host.store.close()


def test_who_is_farther_from_the_source_waits_longer():
    assert stall_s(0) < stall_s(ROW) < stall_s(2) < stall_s(ROW - 1) < 60, "whoever waits for bytes waits that long"


def test_in_the_background_pieces_are_asked_for_together_and_so_many_bytes_ahead(host):
    host.delivery.prefetch(host.pieces(HUGE))
    host.settle()
    asked = list(host.before.asked)
    assert asked == [Span(HUGE.offset + at, RUN_BYTES) for at in range(0, AHEAD_BYTES, RUN_BYTES)]
    host.before.give(asked[1])
    host.settle()
    assert host.before.asked[len(asked) :] == [Span(HUGE.offset + AHEAD_BYTES, RUN_BYTES)]


def test_the_small_files_are_told_of_while_the_big_ones_are_on_their_way(host):
    told = threading.Event()
    host.delivery.prefetch(host.pieces(SMALL), told.set)
    host.delivery.prefetch(host.pieces(HUGE))
    host.settle()
    host.before.give(SMALL)
    host.settle()
    assert told.is_set() and host.before.pending


def test_who_asks_for_what_is_on_its_way_already_hears_of_it_too(host):
    host.delivery.prefetch(host.pieces(BIG))
    told = threading.Event()
    host.delivery.prefetch(host.pieces(BIG), told.set)
    host.settle()
    assert host.before.asked == [BIG] and not told.is_set()
    host.before.give(BIG)
    host.settle()
    assert told.is_set()


def test_a_reader_goes_before_the_background_and_what_he_will_want_next(host):
    host.delivery.prefetch(host.pieces(HUGE)[32:])
    host.settle()
    first = list(host.before.asked)
    reader = host.read(HUGE, 0, 100)
    assert host.before.asked[len(first) :] == [Span(HUGE.offset, MIB)]
    host.before.give(Span(HUGE.offset, MIB))
    host.settle()
    assert reader.value == bytes([HUGE.offset % 251]) * 100
    host.before.give(first[0])
    host.settle()
    assert host.before.asked[-1] == Span(HUGE.offset + MIB, RUN_BYTES), "not the rest of the background"


def test_who_reads_on_is_read_ahead_for_and_who_jumps_is_not(host):
    host.read(HUGE, 40 * MIB, 10)
    assert host.before.asked == [Span(HUGE.offset + 40 * MIB, MIB)]
    host.read(HUGE, 0, 10)
    asked = host.before.asked[1:]
    ahead = [Span(HUGE.offset + MIB, RUN_BYTES), Span(HUGE.offset + 5 * MIB, READ_AHEAD_BYTES - RUN_BYTES)]
    assert asked == [Span(HUGE.offset, MIB), *ahead]
    for span in asked:
        host.before.give(span)
    host.settle()
    for at in range(0, READ_AHEAD_BYTES // 2, 128 << 10):
        host.read(HUGE, at, 128 << 10)
    assert len(host.before.asked) == 4, "enough is on its way"
    host.read(HUGE, READ_AHEAD_BYTES // 2 + MIB, 128 << 10)
    ahead = [span.offset - HUGE.offset for span in host.before.asked[4:]]
    assert ahead == [READ_AHEAD_BYTES + MIB, READ_AHEAD_BYTES + MIB + RUN_BYTES]


def test_an_upstream_that_ends_is_passed_over(host):
    host.delivery.prefetch(host.pieces(BIG))
    reader = host.read(HUGE, 0, 10)
    host.before.end()
    host.settle()
    assert set(host.source.asked) >= {BIG, Span(HUGE.offset, MIB)}
    host.source.give(Span(HUGE.offset, MIB))
    host.settle()
    assert reader.value == bytes([HUGE.offset % 251]) * 10 and host.delivery.statistics().num_lost_upstreams == 1


def test_when_the_last_upstream_ends_everybody_hears_of_it(host):
    told = threading.Event()
    host.delivery.prefetch([*host.pieces(SMALL), *host.pieces(HUGE)], told.set)
    reader, guests = host.read(BIG, 0, 10), host.serve(SMALL)
    host.before.end()
    host.settle()
    host.source.end()
    host.settle()
    host.settle()
    assert told.is_set() and reader.value == errno.EIO and guests == [Piece([], [SMALL])]


def test_an_upstream_that_says_nothing_is_not_waited_for_and_comes_back_when_it_does():
    host = Host(stall_s=0.05)
    reader = host.read(HUGE, 10 * MIB, 10)
    [span] = host.before.asked
    assert host.source.called.acquire(timeout=WAIT_S) and host.source.asked == [span]
    host.source.give(span)
    host.settle()
    assert reader.value == bytes([span.offset % 251]) * 10
    host.read(HUGE, 20 * MIB, 10)
    assert len(host.source.asked) == 2 and host.before.asked == [span], "it is not asked while it hangs"
    host.before.give(span)
    host.settle()
    host.read(HUGE, 30 * MIB, 10)
    assert len(host.before.asked) == 2
    host.delivery.close()
    host.store.close()


def test_one_that_has_ended_and_says_nothing_of_it_is_not_waited_for_when_there_is_no_other():
    host = Host(stall_s=0.2)
    told = threading.Event()
    host.read(BIG, 0, 10)
    reader = host.read(SMALL, 0, 10)
    host.delivery.prefetch(host.pieces(SMALL), told.set)
    host.before.pending.pop(host.before.asked[0])._fail(ConnectionError("gone"))
    assert host.source.called.acquire(timeout=WAIT_S)
    host.source.end()
    assert told.wait(WAIT_S) and reader.value == errno.EIO
    host.delivery.close()
    host.store.close()


def test_what_an_upstream_does_not_know_is_asked_of_the_next(host):
    host.delivery.prefetch(host.pieces(BIG))
    host.settle()
    host.before.know_nothing(BIG)
    host.settle()
    assert host.source.asked == [BIG]


def test_an_upstream_that_knows_a_part_leaves_nobody_waiting(host):
    """A host that shows another version has some of the files only."""
    reader = host.read(BIG, 0, 10)
    span = host.before.asked[0]
    host.before.give(span, only=Span(span.offset, 5))
    host.settle()
    assert host.source.asked == [span] and not reader.given
    host.source.give(span)
    host.settle()
    assert reader.value == bytes([BIG.offset % 251]) * 10


def test_what_the_source_has_lost_is_an_error_and_is_not_asked_for_again(host):
    reader = host.read(BIG, 0, 10)
    span = host.before.asked[0]
    host.before.give(span, lost=[span])
    host.settle()
    assert reader.value == errno.EIO and host.source.asked == []


def test_a_guest_gets_what_is_here_at_once_and_the_rest_when_it_has_come(host):
    host.store.put(SMALL.offset, memoryview(b"s" * SMALL.length))
    assert [bytes(data) for [piece] in [host.serve(SMALL)] for _, data in piece.parts] == [b"s" * SMALL.length]
    guests = host.serve(BIG)
    assert host.before.asked == [BIG] and guests == []
    again = host.serve(Span(BIG.offset, MIB))
    assert host.before.asked == [BIG], "it is on its way"
    host.before.give(BIG)
    host.settle()
    assert [sum(memoryview(data).nbytes for _, data in piece.parts) for piece in (*guests, *again)] == [BIG.length, MIB]
    assert host.delivery.statistics().num_served == 3


def test_holes_go_on_as_holes(host):
    guests = host.serve(BIG)
    host.before.pending.pop(BIG)._complete(Piece([(BIG.offset + MIB, b"x" * (BIG.length - MIB))], [], [(BIG.offset, MIB)]))
    host.settle()
    [piece] = guests
    assert piece.holes == ((BIG.offset, MIB),) and [at for at, _ in piece.parts] == [BIG.offset + MIB]
    assert host.read(BIG, 0, BIG.length).value == bytes(MIB) + b"x" * (BIG.length - MIB)
    assert host.delivery.statistics().num_bytes == BIG.length - MIB


def test_a_guest_who_asks_for_what_nobody_has_is_told_so(host):
    assert host.serve(Span(1 << 39, 100)) == [Piece([], [])]


def test_bytes_that_there_is_no_memory_for_are_an_error(host, monkeypatch, caplog):
    reader = host.read(BIG, 0, 10)

    def refuse(offset, data):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(host.store, "put", refuse)
    host.before.give(host.before.asked[0])
    host.settle()
    assert reader.value == errno.EIO and "could not be kept" in caplog.text


def test_an_end_leaves_nobody_waiting():
    host = Host()
    reader, guests = host.read(BIG, 0, 10), host.serve(SMALL)
    host.delivery.close()
    assert reader.value == errno.EIO and guests == [Piece([], [])]
    host.store.close()
