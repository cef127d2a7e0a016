"""Sources: where a process reads published weights from, the owner or the relay of a host.

Rules of this file:
    1. Nobody waits for a relay that is not there. One that has ended is known to be (`SupervisionError`); one that is silent, because its
       process is stopped or its host cut off, is asked for a sign of life, and left alone for a while when it gives none.

Read next: `relays.py` for what a relay answers, `weights.py` and `relay_actor.py` for who reads.
"""

from __future__ import annotations

import math
import threading
import time
from typing import Any, TypeVar

from monarch._base.errors import explain, without_next
from monarch._runtime.faults import SupervisionError
from monarch._runtime.future import Future
from monarch.actor.process import this_process
from monarch.rdma.copies import Copy, PublishedCopies
from monarch.rdma.errors import RDMAError, RDMATimeout, SilentError, UnavailableError
from monarch.rdma.relays import Question, upstreams_of

T = TypeVar("T")
_PATIENCE_S = 0.5
"""How long an answer may take without a word. Fetching often takes longer."""
_SIGN_S = 1.5
"""How long a relay may take for a sign of life: it does nothing for it, so more would be said of the machine than of the relay."""
_REST_S = 10.0
"""How long one that is silent is not asked."""


class Source:
    """Copies, and whom to ask for those that are not there yet. Thread: any."""

    def __init__(self, copies: PublishedCopies, relay: Any) -> None:
        """Args:
        relay: the actor (`RelayActor`) that fills them; None: they are the owner's, who publishes when he likes.
        """
        self.copies = copies
        self._relay = relay
        self._rests_until_s = 0.0
        if relay is not None:
            copies.wait = self.wait

    def newest(self, nbytes: int, timeout: int) -> Copy:
        """A copy that is at least as new as what is published now, and of which `nbytes` are there.

        Returns:
            `NOTHING` while the owner's only copy is being filled.

        Raises:
            See `wait_copy`.
        """
        if self._relay is None:
            return self.copies.newest(timeout)
        return self._ask(self._relay.newest, nbytes, timeout)

    def wait_copy(self, question: Question, timeout: int) -> Copy:
        """A copy that answers the question; of the owner, the newest.

        Raises:
            RDMATimeout: it has not come in time.
            UnavailableError: the relay could not get it, or gives no sign of life.
            RDMAError: the owner or the relay has ended.
        """
        if self._relay is None:
            return self.copies.newest(timeout)
        return self._ask(self._relay.wait_copy, question, timeout)

    def _ask(self, endpoint: Any, question: object, timeout: int) -> Copy:
        if time.monotonic() < self._rests_until_s:
            raise self._silent()
        try:
            copy: Copy | None = self.wait(endpoint.call_one(question, timeout), timeout)
        except SilentError:
            raise
        except RDMAError as exc:
            raise UnavailableError(explain(f"the relay could not get the weights: {exc}", where=self.copies.owner)) from exc
        except TimeoutError:
            copy = None
        except SupervisionError as exc:
            raise RDMAError(explain(f"the relay has ended: {without_next(str(exc))}", where=self.copies.owner)) from exc
        if copy is None:
            hint = "give more time; or publish less often, or with more copies: WeightPublisher(..., copies=3)"
            raise RDMATimeout(explain(f"the relay got no version whole within {timeout} s", where=self.copies.owner, next=hint))
        return copy

    def wait(self, outcome: Future[T], timeout: float = math.inf) -> T:
        """What the relay, or a transfer from its memory, comes to.

        Raises:
            SilentError: the relay gives no sign of life meanwhile.
            TimeoutError: not within so many seconds.
        """
        deadline_s = time.monotonic() + timeout
        while self._relay is not None and not _ends(outcome, min(_PATIENCE_S, deadline_s - time.monotonic())):
            if time.monotonic() >= deadline_s:
                raise TimeoutError
            if not _ends(self._relay.sign.call_one(), _SIGN_S) and not outcome._done:
                self._rests_until_s = time.monotonic() + _REST_S
                raise self._silent()
        return outcome.get()

    def _silent(self) -> SilentError:
        what = f"the relay gives no sign of life, and is not asked for {_REST_S:g} s: its process is stopped, or its host can't be reached"
        return SilentError(explain(what, where=self.copies.owner))


def _ends(future: Future[Any], limit_s: float) -> bool:
    """Whether there is an outcome within so many seconds."""
    ended = threading.Event()
    future._when_done(ended.set)
    return ended.wait(max(0.0, limit_s))


class Relays:
    """The relays of a publisher. Picklable. Thread: any."""

    def __init__(self, mesh: Any, places: dict[str, tuple[int, PublishedCopies]]) -> None:
        """Args:
        mesh: of `RelayActor`, of one dimension.
        places: by host, rank in the mesh and copies of its relay, in the order of `relays.upstreams_of`.
        """
        self._mesh = mesh
        self._places = places

    def at(self, host: str) -> Source | None:
        """The relay of a host; None: it has none."""
        if host not in self._places:
            return None
        rank, copies = self._places[host]
        return Source(copies, self._mesh.slice(rank=rank))

    def before(self, host: str) -> list[Source]:
        """Those from which the relay of a host may read, the nearest first."""
        hosts = list(self._places)
        found = [self.at(hosts[position]) for position in upstreams_of(hosts.index(host))]
        return [source for source in found if source is not None]

    def __reduce__(self) -> tuple[object, ...]:
        return Relays, (self._mesh, self._places)


def own_host() -> str:
    """The host of this process: the address of its agent."""
    process = this_process()
    return (process.proc.host or process.host_identity()).address
