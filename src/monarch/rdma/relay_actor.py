"""The relay of one host, as an actor in a process of its own: it fetches what readers of its host, or relays behind it, ask for.

Read next: `relays.py` for what is fetched when, `copies.py` for where it is put, `sources.py` for who asks.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from typing import NamedTuple

from monarch._runtime.future import Future
from monarch.actor import Actor, Ignore, Port, ProcMesh, endpoint
from monarch.rdma.copies import NOTHING, Copies, Copy, PublishedCopies
from monarch.rdma.errors import NoRoomError, RDMAError
from monarch.rdma.relays import Answer, Question, Relay
from monarch.rdma.sources import Relays, Source, own_host

_logger = logging.getLogger("monarch.rdma")
_LEAST_PIECE, _MOST_PIECE = 1 << 19, 16 << 20
_PIECES = 64
"""Of a version, if it is neither small nor large. Those behind a relay read a piece while it reads the next."""
_AHEAD = 2
"""Pieces that are on their way at once, so that the link does not wait for us."""
_PATIENCE_S = 30
"""How long one piece may take before another upstream is tried."""
_JOIN_S = 5.0
_START_S = 120.0
"""How long a host may take to start a process; a stopped one never does."""


class Guest(NamedTuple):
    """Who wants what is published now."""

    port: Port[Copy | None]
    nbytes: int
    deadline_s: float


class RelayActor(Actor):
    """See the head of this file."""

    def __init__(self, size: int, copies: int, spares: int) -> None:
        # With one, a fetch would take away what readers of this host are reading.
        self._copies = Copies(size, copies=max(2, copies), spares=spares)
        self._piece = min(_MOST_PIECE, max(_LEAST_PIECE, size // _PIECES // _LEAST_PIECE * _LEAST_PIECE))
        self._relay: Relay[Port[Copy | None]] = Relay()
        self._lock = threading.Lock()
        self._upstreams: list[Source] = []
        """The nearest first, the owner last."""
        self._lost: set[str] = set()
        """Owners of upstreams whose loss is in the log."""
        self._ends = threading.Event()
        self._starts: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._guests: queue.SimpleQueue[Guest | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=run, name="monarch-relay", daemon=True) for run in (self._run, self._receive)]
        for thread in self._threads:
            thread.start()

    @endpoint
    def place(self) -> tuple[str, PublishedCopies]:
        """The host that this is for, and where others read."""
        return own_host(), self._copies.published

    @endpoint
    def connect(self, relays: Relays, owner: PublishedCopies) -> None:
        """Say from whom to read."""
        if relays.at(own_host()) is not None:
            self._upstreams = [*relays.before(own_host()), Source(owner, None)]

    @endpoint
    def sign(self) -> None:
        """That it lives."""

    @endpoint(explicit_response_port=True)
    def newest(self, port: Port[Copy | None], nbytes: int, timeout: int) -> None:
        """A copy as new as what is published now, or newer, of which so many bytes are there; see `wait_copy`."""
        self._guests.put(Guest(port, nbytes, time.monotonic() + timeout))

    @endpoint(explicit_response_port=True)
    def wait_copy(self, port: Port[Copy | None], question: Question, timeout: int) -> None:
        """A copy that answers the question; None: it did not come within `timeout` seconds."""
        self._ask(question, port, time.monotonic() + timeout)

    def _ask(self, question: Question, port: Port[Copy | None], deadline_s: float) -> None:
        with self._lock:
            answers, starts = self._relay.ask(question, port, deadline_s)
        self._act(answers, starts=starts)

    def _act(self, answers: list[Answer[Port[Copy | None]]], *, starts: bool = False) -> None:
        for answer in answers:
            if answer.failure is not None:
                answer.who.exception(answer.failure)
            else:
                answer.who.send(answer.copy)
        if starts:
            self._starts.put(True)

    # --- on the thread that looks what is published ---------------------------------------------------------------

    def _receive(self) -> None:
        while guests := _all_in(self._guests):
            try:  # one look for all who came before it
                published = self._upstreams[-1].newest(1, _PATIENCE_S)
            except Exception as exc:
                self._act([Answer(guest.port, None, self._told(exc)) for guest in guests])
                continue
            for guest in guests:
                self._ask(Question(published.number, NOTHING, guest.nbytes), guest.port, guest.deadline_s)

    # --- on the thread that fetches -------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._starts.get():
            try:
                self._fetch()
            except Exception as exc:
                with self._lock:
                    answers = self._relay.failed(self._told(exc))
                self._act(answers)

    def _fetch(self) -> None:
        """Fetch what is wanted from the first upstream that has it.

        Raises:
            Exception: that of the last upstream.
        """
        for at, upstream in enumerate(self._upstreams):
            try:
                whole = self._fetch_from(upstream, self._relay.wanted)
            except NoRoomError:
                raise
            except RDMAError as exc:
                if at == len(self._upstreams) - 1:
                    raise
                with self._lock:
                    self._relay.cut_off()
                self._say_lost(upstream, exc)
                continue
            with self._lock:
                answers, starts = self._relay.finished(whole) if whole is not None else self._relay.overtaken(time.monotonic())
            self._act(answers, starts=starts)
            return

    def _fetch_from(self, upstream: Source, least: int) -> Copy | None:
        """Fill a copy; None: what was being read has been overwritten."""
        there = upstream.wait_copy(Question(least, NOTHING, 1), _PATIENCE_S)
        if there == NOTHING:
            return None
        source = upstream.copies.bytes_of(there.slot, _PATIENCE_S)
        memory = self._copies.begin(there.number, there.version)
        reads: deque[tuple[int, Future[None]]] = deque()
        done = asked = 0
        try:
            while done < self._copies.size:
                if self._ends.is_set():
                    raise RDMAError("the relay is being stopped")
                while len(reads) < _AHEAD and asked < there.arrived:
                    end = min(there.arrived, asked + self._piece)
                    reads.append((end, source[asked:end].read_into(memory[asked:end], timeout=_PATIENCE_S)))
                    asked = end
                if reads:
                    upstream.wait(reads[0][1])
                    done = reads.popleft()[0]
                    if done < self._copies.size:
                        self._announce(done)
                    now = upstream.copies.look(there.slot, _PATIENCE_S)
                else:
                    now = upstream.wait_copy(Question(least, there, done + 1), _PATIENCE_S)
                if not now.is_same(there):
                    return None
                there = now
            return self._copies.finish()
        finally:
            self._copies.abandon([read for _, read in reads])

    def _announce(self, done: int) -> None:
        """Let others read what has come. Should it have been overwritten upstream, they find that this copy never becomes whole."""
        with self._lock:
            answers = self._relay.arrived(self._copies.arrived(done))
        self._act(answers)

    def _say_lost(self, upstream: Source, failure: RDMAError) -> None:
        if upstream.copies.owner not in self._lost:
            self._lost.add(upstream.copies.owner)
            _logger.warning("weights can't be had from the relay before this one: relay=%s reason=%s", upstream.copies.owner, failure)

    def _told(self, failure: Exception) -> RDMAError:
        """What readers hear of a failure, so that they read from the owner; one that is none of a transfer is logged here."""
        if isinstance(failure, RDMAError):
            return self._upstreams[-1].copies.explained(failure, self._copies.newest())
        _logger.error("a fetch of weights broke", exc_info=failure)
        return RDMAError(f"a fetch of weights broke: {failure!r}")

    def __cleanup__(self, exc: Exception | None) -> None:
        self._ends.set()
        self._starts.put(False)
        self._guests.put(None)
        for thread in self._threads:
            thread.join(_JOIN_S)
        self._copies.close()


def _all_in(guests: queue.SimpleQueue[Guest | None]) -> list[Guest]:
    """All that are there, one at least; none: it is over."""
    found = [guests.get()]
    while not guests.empty():
        found.append(guests.get())
    return [guest for guest in found if guest is not None] if None not in found else []


def start_relays(procs: ProcMesh, owner: PublishedCopies, size: int, *, copies: int, spares: int) -> Relays:
    """Start a relay in each of these processes, which are of different hosts.

    A relay that dies is nobody's failure: who reads from it reads elsewhere.

    Raises:
        TimeoutError, SupervisionError: one of them does not start, or its host has died.
    """
    mesh = procs.supervised(Ignore()).spawn("relay", RelayActor, size, copies, spares).flatten("rank")
    places: dict[str, tuple[int, PublishedCopies]] = {}
    for rank, (host, published) in enumerate(mesh.place.call().get(_START_S).values()):
        if host != own_host():  # that would only send the weights through the owner's link once more
            places.setdefault(host, (rank, published))
    relays = Relays(mesh, places)
    mesh.connect.call(relays, owner).get(_START_S)
    return relays
