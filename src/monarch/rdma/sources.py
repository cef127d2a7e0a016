"""Sources: where a process reads published weights from, the owner or the relay of a host.

Read next: `relays.py` for what a relay answers, `weights.py` and `relay_actor.py` for who reads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from monarch._base.errors import explain
from monarch._runtime.faults import ActorError, SupervisionError
from monarch.actor.process import this_process
from monarch.rdma.copies import Copy, PublishedCopies
from monarch.rdma.errors import RDMAError, RDMATimeout
from monarch.rdma.relays import Question


class FetchError(RDMAError):
    """A relay lives, and could not get what it was asked for."""


class Source(NamedTuple):
    """Copies, and whom to ask for those that are not there yet."""

    copies: PublishedCopies
    relay: Any
    """The actor (`RelayActor`) that fills them; None: they are the owner's, who publishes when he likes."""

    def wait_copy(self, question: Question, timeout: int) -> Copy:
        """A copy that answers the question; of the owner, the newest.

        Raises:
            RDMATimeout: it has not come in time.
            FetchError: the relay could not get it.
            RDMAError: the owner or the relay has ended.
        """
        if self.relay is None:
            return self.copies.newest(timeout)
        try:
            copy: Copy | None = self.relay.wait_copy.call_one(question, timeout).get(timeout + 1)
        except TimeoutError:
            copy = None
        except ActorError as exc:
            raise FetchError(explain(f"the relay could not get the weights: {exc.exception}", where=self.copies.owner)) from exc
        except SupervisionError as exc:
            raise RDMAError(explain(f"the relay has ended: {exc}", where=self.copies.owner)) from exc
        if copy is None:
            hint = "give more time; or publish less often, or with more copies: WeightPublisher(..., copies=3)"
            raise RDMATimeout(explain(f"the relay got no version whole within {timeout} s", where=self.copies.owner, next=hint))
        return copy


class Relays:
    """The relays of a publisher. Picklable. Thread: any."""

    def __init__(self, mesh: Any, places: list[tuple[int, str, PublishedCopies]]) -> None:
        """Args:
        mesh: of `RelayActor`, of one dimension.
        places: rank in it, host and copies of each relay that is used, in the order of `relays.upstreams_of`.
        """
        self._mesh = mesh
        self._places = places

    def at(self, host: str) -> Source | None:
        """The relay of a host; None: it has none."""
        return next((self._source(position) for position, (_, name, _) in enumerate(self._places) if name == host), None)

    def position_of(self, host: str) -> int:
        """Which one it is; KeyError: none."""
        return {name: position for position, (_, name, _) in enumerate(self._places)}[host]

    def _source(self, position: int) -> Source:
        rank, _, copies = self._places[position]
        return Source(copies, self._mesh.slice(rank=rank))

    def __getitem__(self, position: int) -> Source:
        return self._source(position)

    def __len__(self) -> int:
        return len(self._places)

    def __reduce__(self) -> tuple[object, ...]:
        return Relays, (self._mesh, self._places)


def own_host() -> str:
    """The host of this process: the address of its agent."""
    process = this_process()
    return (process.proc.host or process.host_identity()).address
