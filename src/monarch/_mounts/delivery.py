"""Delivery: pieces of a pushed directory come from upstream, and go on to whoever is downstream.

    source --> host 0 --> host 1 --> ... --> host 15
                 `-----> host 16 --> host 17 --> ...        each asks the one before it, and keeps what passes

Everything is asked for, nothing is pushed: a reader asks for what it lacks, and in the background each host asks for the rest, some
pieces ahead. So a slow host slows only those behind it, and one that has ended is passed over: whoever asked it asks the source.

Rules of this file:
    1. What a reader waits for goes first, and never behind more than the pieces that are on their way already.
    2. Every request ends: with bytes, with the ranges that are lost (the file has changed at the source), or with the next upstream.
       When the last one has ended, whoever waits gets EIO.
    3. It knows no actors: an upstream is a function that returns a future.

Read next: `store.py`, which it fills; `mount_actor.py`, which runs it; docs/design/mounts.md.
"""

from __future__ import annotations

import errno
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from monarch._mounts.ranges import Span
from monarch._mounts.store import Store
from monarch._runtime.future import Future
from monarch._wire.frames import Buffer

_logger = logging.getLogger("monarch.mounts")
AHEAD = 8
"""Pieces that are on their way without anybody waiting for them."""
CHAIN = 16
"""Hosts in a row. The heads of the rows form a row of their own."""


class Piece(NamedTuple):
    """What is known of a range of addresses; nothing at all: whoever was asked does not know them, it has another version."""

    parts: list[tuple[int, Buffer]]
    """Address and bytes, in order. What lies between belongs to no file."""
    lost: list[tuple[int, int]]
    """Address and length of what the source does not have any more."""


Upstream = Callable[[int, int], "Future[Piece]"]
"""Asks for the piece at an address, so many bytes long."""


_NOTHING = Piece([], [])


def upstream_of(rank: int) -> int | None:
    """The host that a host asks; None: the source."""
    if rank == 0:
        return None
    return rank - 1 if rank % CHAIN else rank - CHAIN


class DeliveryStatistics(msgspec.Struct, frozen=True):
    """What a delivery has done so far."""

    num_pieces: int
    num_bytes: int
    num_served: int
    """Pieces given to others."""
    num_lost_upstreams: int


class Delivery:
    """Fills one store. Thread: one of its own, which moves the bytes; methods: any."""

    def __init__(self, store: Store, upstreams: Sequence[Upstream]) -> None:
        """Args:
        upstreams: in the order in which they are asked; the last is the source.
        """
        self._store = store
        self._upstreams = list(upstreams)
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._under_way: set[int] = set()
        """Pieces that were asked for, by address."""
        self._background: deque[Span] = deque()
        self._num_ahead = 0
        self._guests: dict[int, list[Callable[[Piece], None]]] = {}
        """Who of downstream waits for a piece, by its address."""
        self._idle: list[Callable[[], None]] = []
        self._said: set[type[BaseException]] = set()
        self._num_pieces = self._num_bytes = self._num_served = self._num_lost = 0
        self._thread = threading.Thread(target=self._run, name="monarch-delivery", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._store.connect(self.want)
        self._thread.start()

    def close(self) -> None:
        """End; who waits gets EIO."""
        self._events.put(None)
        self._thread.join(10.0)
        self._store.disconnect(errno.EIO)

    def want(self, offset: int, length: int) -> None:
        """Somebody waits for a piece."""
        self._events.put(partial(self._ask, Span(offset, length)))

    def prefetch(self, pieces: Iterable[Span], when_done: Callable[[], None] | None = None) -> None:
        """Fetch pieces that nobody waits for yet, in this order, after those asked for before.

        Args:
            when_done: called once, when all of them are here or lost. Thread: the delivery's.
        """
        pieces = list(pieces)
        self._events.put(partial(self._fetch_ahead, pieces, when_done))

    def serve(self, offset: int, length: int, answer: Callable[[Piece], None]) -> None:
        """Give a piece to somebody downstream, now or when it has come."""
        self._events.put(partial(self._serve, Span(offset, length), answer))

    def statistics(self) -> DeliveryStatistics:
        """What was done so far."""
        return DeliveryStatistics(self._num_pieces, self._num_bytes, self._num_served, self._num_lost)

    # --- on the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                event()
            except Exception:
                _logger.exception("a piece was not delivered")
        for guests in self._guests.values():
            for answer in guests:
                answer(_NOTHING)
        self._guests.clear()

    def _ask(self, piece: Span) -> None:
        if piece.offset in self._under_way or not self._store.missing(piece.offset, piece.length):
            return
        self._under_way.add(piece.offset)
        self._ask_upstream(piece, 0, ahead=False)

    def _fetch_ahead(self, pieces: list[Span], when_done: Callable[[], None] | None) -> None:
        self._background.extend(pieces)
        if when_done is not None:
            self._idle.append(when_done)
        self._go_on()

    def _go_on(self) -> None:
        if not self._upstreams:
            self._background.clear()
        while self._background and self._num_ahead < AHEAD:
            piece = self._background.popleft()
            if piece.offset in self._under_way or not self._store.missing(piece.offset, piece.length):
                continue
            self._under_way.add(piece.offset)
            self._num_ahead += 1
            self._ask_upstream(piece, 0, ahead=True)
        if not self._background and not self._num_ahead:
            idle, self._idle = self._idle, []
            for call in idle:
                call()

    def _ask_upstream(self, piece: Span, at: int, *, ahead: bool) -> None:
        if at >= len(self._upstreams):
            for span in self._store.missing(piece.offset, piece.length):
                self._store.failed_at(span.offset, span.length, errno.EIO, version=self._store.version)
            self._events.put(partial(self._finish, piece, ahead=ahead))
            return
        upstream, version = self._upstreams[at], self._store.version
        try:
            future = upstream(piece.offset, piece.length)
        except Exception as exc:
            future = Future._failed(exc)
        future._when_done(lambda: self._events.put(partial(self._take, piece, upstream, future, version, ahead=ahead)))

    def _take(self, piece: Span, upstream: Upstream, future: Future[Piece], version: int, *, ahead: bool) -> None:
        error = future.exception(0.0)
        at = self._upstreams.index(upstream) if upstream in self._upstreams else -1
        if error is not None:
            if at >= 0:
                self._say(error, at)
                self._num_lost += 1
                del self._upstreams[at]
            self._ask_upstream(piece, max(at, 0), ahead=ahead)
            return
        found = future.get(0.0)
        if found == _NOTHING:
            self._ask_upstream(piece, at + 1, ahead=ahead)
            return
        self._store_piece(found, version)
        self._finish(piece, ahead=ahead)

    def _store_piece(self, found: Piece, version: int) -> None:
        for offset, data in found.parts:
            view = memoryview(data).cast("B")
            self._fill(offset, view)
            self._num_bytes += view.nbytes
        self._num_pieces += 1
        for offset, length in found.lost:
            self._store.failed_at(offset, length, errno.EIO, version=version)

    def _fill(self, offset: int, data: memoryview) -> None:
        done = 0
        for target in self._store.writable(offset, data.nbytes):
            target[:] = data[done : done + target.nbytes]
            done += target.nbytes
        self._store.arrived(offset, done)

    def _finish(self, piece: Span, *, ahead: bool) -> None:
        self._under_way.discard(piece.offset)
        if ahead:
            self._num_ahead -= 1
        for answer in self._guests.pop(piece.offset, ()):
            self._give(piece, answer)
        self._go_on()

    def _serve(self, piece: Span, answer: Callable[[Piece], None]) -> None:
        if self._store.offer(piece.offset, piece.length) is not None or not self._store.knows(piece.offset, piece.length):
            self._give(piece, answer)
            return
        self._guests.setdefault(piece.offset, []).append(answer)
        self._ask(piece)

    def _give(self, piece: Span, answer: Callable[[Piece], None]) -> None:
        offer = self._store.offer(piece.offset, piece.length)
        if offer is None:
            answer(_NOTHING)
        else:
            self._num_served += 1
            parts, lost = offer
            answer(Piece(list(parts), lost))

    def _say(self, error: BaseException, at: int) -> None:
        if type(error) not in self._said:
            self._said.add(type(error))
            what = "its source" if at == len(self._upstreams) - 1 else "the host before this one"
            _logger.warning("a pushed directory can't be had from %s any more: %s", what, error)
