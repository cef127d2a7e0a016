"""Delivery: pieces of a pushed directory come from upstream, and go on to whoever is downstream.

    source --> host 0 --> host 1 --> ... --> host 15
                 `-----> host 16 --> host 17 --> ...        each asks the one before it, and keeps what passes

Everything is asked for, nothing is pushed: a reader asks for what it lacks, and in the background each host asks for the rest, several
pieces at once and some requests ahead. So a slow host slows only those behind it, and one that has ended is passed over: whoever asked it
asks the source.

Rules of this file:
    1. What a reader waits for goes first, and never behind more than the bytes that are on their way already. Next comes what he is about
       to read.
    2. Every request ends: with bytes, with the ranges that are lost (the file has changed at the source), or with the next upstream,
       which is also asked when one has said nothing for `STALL_S`. When the last one has ended, whoever waits gets EIO.
    3. It knows no actors: an upstream is a function that returns a future.

Read next: `store.py`, which it fills; `mount_actor.py`, which runs it; docs/design/mounts.md.
"""

from __future__ import annotations

import errno
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from monarch._base.rows import ROW
from monarch._mounts.ranges import Span
from monarch._mounts.store import Store
from monarch._runtime.future import Future
from monarch._wire.frames import Buffer

_logger = logging.getLogger("monarch.mounts")
AHEAD_BYTES = 16 << 20
"""So much may be on its way without anybody waiting for it."""
RUN_BYTES = 4 << 20
"""Most that is asked for at once then: the more, the less a byte costs, and the longer a reader waits behind it."""
STALL_S = 10.0
"""A host that is asked and gives nothing for so long is not asked any more until it does: it hangs, or its network does."""
HOP_S = 3.0
"""So much longer for each host that the bytes come through: on a slow link even the first of them take their time."""


class Piece(NamedTuple):
    """What is known of a range of addresses; nothing at all: whoever was asked does not know them, it has another version."""

    parts: list[tuple[int, Buffer]]
    """Address and bytes, in order. What lies between belongs to no file."""
    lost: list[tuple[int, int]]
    """Address and length of what the source does not have any more."""
    holes: Sequence[tuple[int, int]] = ()
    """Address and length of zeros that take no place at the source."""


Upstream = Callable[[int, int], "Future[Piece]"]
"""Asks for the piece at an address, so many bytes long."""


_NOTHING = Piece([], [])


def stall_s(rank: int) -> float:
    """How long a host waits for the one before it."""
    return STALL_S + HOP_S * (rank % ROW + rank // ROW)


class DeliveryStatistics(msgspec.Struct, frozen=True):
    """What a delivery has done so far."""

    num_pieces: int
    num_bytes: int
    num_served: int
    """Pieces given to others."""
    num_lost_upstreams: int


class _Batch:
    """Pieces that somebody wants to hear of when the last of them is here or lost."""

    def __init__(self, when_done: Callable[[], None]) -> None:
        self.num_lacking = 0
        self.when_done = when_done


class _Request(NamedTuple):
    """Pieces asked for at once; what lies between them may come as well."""

    pieces: tuple[Span, ...]
    is_ahead: bool
    """Nobody waits for them."""

    @property
    def span(self) -> Span:
        first, last = self.pieces[0], self.pieces[-1]
        return Span(first.offset, last.end - first.offset)


class _Way:
    """An upstream, and how it does."""

    def __init__(self, ask: Upstream) -> None:
        self.ask = ask
        self.heard_s = 0.0
        """When it last answered, by the monotonic clock."""
        self.is_stalled = False


class _Asked:
    """A request on its way."""

    def __init__(self, request: _Request, way: _Way) -> None:
        self.request = request
        self.way = way
        self.since_s = time.monotonic()
        self.is_given_up = False
        """Another upstream was asked as well."""


class _Guest(NamedTuple):
    """Who of downstream waits for a range."""

    span: Span
    answer: Callable[[Piece], None]


class Delivery:
    """Fills one store. Thread: one of its own, which moves the bytes; methods: any."""

    def __init__(self, store: Store, upstreams: Sequence[Upstream], *, stall_s: float = STALL_S) -> None:
        """Args:
        upstreams: in the order in which they are asked; the last is the source.
        """
        self._store = store
        self._ways = [_Way(each) for each in upstreams]
        self._stall_s = stall_s
        self._asked: dict[_Asked, None] = {}
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._under_way: set[int] = set()
        """Pieces that were asked for, by address."""
        self._background: deque[Span] = deque()
        self._bytes_ahead = 0
        self._guests: dict[int, list[_Guest]] = {}
        """By the address of a piece that is on its way to them."""
        self._batches: dict[int, list[_Batch]] = {}
        """Which of them a piece is still lacking in, by its address."""
        self._said: set[type[BaseException]] = set()
        self._num_pieces = self._num_bytes = self._num_served = self._num_lost = 0
        self._thread = threading.Thread(target=self._run, name="monarch-delivery", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._store.connect(self.want, self.expect)
        self._thread.start()

    def close(self) -> None:
        """End; who waits gets EIO."""
        self._events.put(None)
        self._thread.join(10.0)
        self._store.disconnect(errno.EIO)

    def want(self, offset: int, length: int) -> None:
        """Somebody waits for a piece."""
        self._events.put(partial(self._ask, Span(offset, length)))

    def expect(self, pieces: Sequence[Span]) -> None:
        """Somebody will soon wait for these pieces: they go before all else that nobody waits for."""
        self._events.put(partial(self._fetch_soon, pieces))

    def prefetch(self, pieces: Iterable[Span], when_done: Callable[[], None] | None = None) -> None:
        """Fetch pieces that nobody waits for yet, in this order, after those asked for before.

        Args:
            when_done: called once, when all of them are here or lost. Thread: the delivery's.
        """
        pieces = list(pieces)
        self._events.put(partial(self._fetch_ahead, pieces, when_done))

    def serve(self, offset: int, length: int, answer: Callable[[Piece], None]) -> None:
        """Give a piece to somebody downstream, now or when it has come."""
        self._events.put(partial(self._serve, _Guest(Span(offset, length), answer)))

    def statistics(self) -> DeliveryStatistics:
        """What was done so far."""
        return DeliveryStatistics(self._num_pieces, self._num_bytes, self._num_served, self._num_lost)

    # --- on the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        look_s = 0.0
        while True:
            try:
                event = self._events.get(timeout=self._stall_s / 4 if self._asked else None)
            except queue.Empty:
                event = self._look
            if event is None:
                break
            try:
                event()
                if self._asked and look_s + self._stall_s / 4 < time.monotonic():
                    look_s = time.monotonic()
                    self._look()
            except Exception:
                _logger.exception("a piece was not delivered")
        for guests in self._guests.values():
            for guest in guests:
                guest.answer(_NOTHING)
        self._guests.clear()

    def _ask(self, piece: Span) -> None:
        if piece.offset not in self._under_way and self._store.missing(piece.offset, piece.length):
            self._send(_Request((piece,), is_ahead=False))

    def _fetch_soon(self, pieces: Sequence[Span]) -> None:
        self._background.extendleft(reversed(pieces))
        self._go_on()

    def _fetch_ahead(self, pieces: list[Span], when_done: Callable[[], None] | None) -> None:
        self._background.extend(pieces)
        if when_done is not None:
            batch = _Batch(when_done)
            for piece in pieces:
                if self._store.missing(piece.offset, piece.length):
                    self._batches.setdefault(piece.offset, []).append(batch)
                    batch.num_lacking += 1
            if not batch.num_lacking:
                when_done()
        self._go_on()

    def _go_on(self) -> None:
        while self._background and (self._bytes_ahead < AHEAD_BYTES or not self._ways):
            pieces = self._next_run()
            if not self._ways:
                self._count_off(pieces)
            elif pieces:
                self._send(_Request(tuple(pieces), is_ahead=True))

    def _next_run(self) -> list[Span]:
        """The next pieces of the background, as far as they lie behind each other."""
        run: list[Span] = []
        num_bytes = 0
        while self._background:
            piece = self._background[0]
            if run and (piece.offset != run[-1].end or num_bytes + piece.length > RUN_BYTES):
                break
            self._background.popleft()
            if piece.offset in self._under_way:
                if run:
                    break
            elif self._store.missing(piece.offset, piece.length):
                run.append(piece)
                num_bytes += piece.length
            else:
                self._count_off((piece,))
        return run

    def _count_off(self, pieces: Iterable[Span]) -> None:
        for piece in pieces:
            for batch in self._batches.pop(piece.offset, ()):
                batch.num_lacking -= 1
                if not batch.num_lacking:
                    batch.when_done()

    def _send(self, request: _Request) -> None:
        self._under_way.update(piece.offset for piece in request.pieces)
        if request.is_ahead:
            self._bytes_ahead += request.span.length
        self._ask_upstream(request, 0)

    def _ask_upstream(self, request: _Request, at: int) -> None:
        while at + 1 < len(self._ways) and self._ways[at].is_stalled:
            at += 1
        span = request.span
        if at >= len(self._ways):
            for gap in self._store.missing(*span):
                self._store.failed_at(*gap, errno.EIO, version=self._store.version)
            self._events.put(partial(self._finish, request))
            return
        asked, version = _Asked(request, self._ways[at]), self._store.version
        self._asked[asked] = None
        try:
            future = asked.way.ask(*span)
        except Exception as exc:
            future = Future._failed(exc)
        future._when_done(lambda: self._events.put(partial(self._take, asked, future, version)))

    def _look(self) -> None:
        """Ask the next upstream for what has been waited for too long."""
        now_s = time.monotonic()
        for asked in list(self._asked):
            way = asked.way
            if not asked.is_given_up and way not in self._ways[-1:] and max(asked.since_s, way.heard_s) + self._stall_s < now_s:
                if not way.is_stalled:
                    _logger.warning("the host before this one does not answer: the source is asked for a pushed directory")
                way.is_stalled = asked.is_given_up = True
                self._ask_upstream(asked.request, self._ways.index(way) + 1 if way in self._ways else 0)

    def _take(self, asked: _Asked, future: Future[Piece], version: int) -> None:
        request, way, error = asked.request, asked.way, future.exception(0.0)
        self._asked.pop(asked, None)
        at = self._ways.index(way) if way in self._ways else -1
        if error is not None:
            if at >= 0:
                self._say(error, at)
                self._num_lost += 1
                del self._ways[at]
            if not asked.is_given_up:
                self._ask_upstream(request, max(at, 0))
            return
        way.heard_s, way.is_stalled = time.monotonic(), False
        if asked.is_given_up:  # late, but right
            self._store_piece(future.get(0.0), version)
            return
        try:
            self._store_piece(future.get(0.0), version)
        except (OSError, MemoryError) as exc:  # no memory for it; later ones may find some
            _logger.error("bytes of a pushed directory could not be kept: %s", exc)
            self._store.failed_at(*request.span, errno.EIO, version=version)
        if any(self._store.lacks(*piece) for piece in request.pieces):
            self._ask_upstream(request, at + 1)  # who was asked does not know all of them: it has another version
            return
        self._num_pieces += len(request.pieces)
        self._finish(request)

    def _store_piece(self, found: Piece, version: int) -> None:
        for offset, data in found.parts:
            view = memoryview(data).cast("B")
            self._store.put(offset, view)
            self._num_bytes += view.nbytes
        for offset, length in found.holes:
            self._store.put_zeros(offset, length)
        for offset, length in found.lost:
            self._store.failed_at(offset, length, errno.EIO, version=version)

    def _finish(self, request: _Request) -> None:
        self._under_way.difference_update(piece.offset for piece in request.pieces)
        if request.is_ahead:
            self._bytes_ahead -= request.span.length
        for piece in request.pieces:
            for guest in self._guests.pop(piece.offset, ()):
                self._wait_or_give(guest)
        self._count_off(request.pieces)
        self._go_on()

    def _serve(self, guest: _Guest) -> None:
        if self._store.offer(*guest.span) is None:
            pieces = [piece for piece in self._store.lacking(*guest.span) if piece.offset not in self._under_way]
            if pieces:
                self._send(_Request(tuple(pieces), is_ahead=False))
        self._wait_or_give(guest)

    def _wait_or_give(self, guest: _Guest) -> None:
        offer = self._store.offer(*guest.span)
        if offer is not None:
            self._num_served += 1
            guest.answer(Piece(list(offer.parts), offer.lost, offer.holes))
            return
        for piece in self._store.lacking(*guest.span):
            if piece.offset in self._under_way:
                self._guests.setdefault(piece.offset, []).append(guest)
                return
        guest.answer(_NOTHING)

    def _say(self, error: BaseException, at: int) -> None:
        if type(error) not in self._said:
            self._said.add(type(error))
            what = "its source" if at == len(self._ways) - 1 else "the host before this one"
            _logger.warning("a pushed directory can't be had from %s any more: %s", what, error)
