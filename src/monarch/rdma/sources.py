"""Sources: where a process reads published weights from, the owner or the relay of a host.

Read next: `relays.py` for what a relay answers, `weights.py` and `relay_actor.py` for who reads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from monarch._base.errors import explain
from monarch._runtime.faults import SupervisionError
from monarch._runtime.future import Future
from monarch.actor.process import this_process
from monarch.rdma.copies import Copy, PublishedCopies
from monarch.rdma.errors import RDMAError, RDMATimeout, UnavailableError
from monarch.rdma.relays import Question, upstreams_of


class Source(NamedTuple):
    """Copies, and whom to ask for those that are not there yet."""

    copies: PublishedCopies
    relay: Any
    """The actor (`RelayActor`) that fills them; None: they are the owner's, who publishes when he likes."""

    def newest(self, nbytes: int, timeout: int) -> Copy:
        """A copy that is at least as new as what is published now, and of which `nbytes` are there.

        Returns:
            `NOTHING` while the owner's only copy is being filled.

        Raises:
            See `wait_copy`.
        """
        if self.relay is None:
            return self.copies.newest(timeout)
        return self._ask(self.relay.newest.call_one(nbytes, timeout), timeout)

    def wait_copy(self, question: Question, timeout: int) -> Copy:
        """A copy that answers the question; of the owner, the newest.

        Raises:
            RDMATimeout: it has not come in time.
            UnavailableError: the relay could not get it.
            RDMAError: the owner or the relay has ended.
        """
        if self.relay is None:
            return self.copies.newest(timeout)
        return self._ask(self.relay.wait_copy.call_one(question, timeout), timeout)

    def _ask(self, answer: Future[Copy | None], timeout: int) -> Copy:
        try:
            copy = answer.get(timeout)
        except RDMAError as exc:
            raise UnavailableError(explain(f"the relay could not get the weights: {exc}", where=self.copies.owner)) from exc
        except TimeoutError:
            copy = None
        except SupervisionError as exc:
            raise RDMAError(explain(f"the relay has ended: {exc}", where=self.copies.owner)) from exc
        if copy is None:
            hint = "give more time; or publish less often, or with more copies: WeightPublisher(..., copies=3)"
            raise RDMATimeout(explain(f"the relay got no version whole within {timeout} s", where=self.copies.owner, next=hint))
        return copy


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
