"""What can go wrong with one-sided memory: what users see, and what transports tell the engine.

Rules of this file:
    1. What fails a submit is an `RDMAError`; its text begins as that of PyTorch Monarch does, because scripts match on it.
    2. A transport raises `TransferError` and its kinds only; the engine turns them into what users see.

Read next: `engine.py`, which turns one into the other.
"""

from __future__ import annotations

from collections.abc import Iterable

from monarch._base.errors import explain


class RDMAError(Exception):
    """A transfer, or the drop of a buffer, failed."""


class RDMATimeout(RDMAError, TimeoutError):
    """A transfer did not end in time. What was under way may still change the destination, up to the end of its current piece."""


class NoRoomError(RDMAError):
    """Readers map every copy of published weights that could be filled anew."""


class UnavailableError(RDMAError):
    """Who was asked for weights lives, and can't give them (so)."""


class SilentError(UnavailableError):
    """A relay has given no sign of life, so nobody waits for it."""


class RdmaInitError(Exception):
    """No transfer is possible in this process: nothing that could carry one is available, or it is misconfigured."""


class TransferError(Exception):
    """A transport could not move bytes. `what` is for people; `next` says what they can do."""

    def __init__(self, what: str, *, next: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.next = next


class BufferGoneError(TransferError):
    """The owner has dropped the buffer, or its table says that this memory is not what the handle means."""

    def __init__(self, number: int, why: str = "it was dropped by its owner, or by whoever has a handle to it") -> None:
        super().__init__(f"buffer {number} not found", next=f"{why}; make a new RDMABuffer")
        self.why = why


class OwnerGoneError(TransferError):
    """The process that owns the memory has ended."""

    def __init__(self, what: str, *, next: str = "", fate: str = "") -> None:
        """Args:
        fate: which process that was, and how it ended; "" before somebody has asked.
        """
        super().__init__(what, next=next)
        self.fate = fate


class DeadlineError(TransferError):
    """The time of the submit is over."""

    def __init__(self) -> None:
        super().__init__("tcp submit timed out", next="give read_into, write_from or submit a larger timeout (seconds)")


class UnreachableError(TransferError):
    """This transport does not lead there; another one may."""

    def __init__(self, what: str, *, next: str = "", generations: Iterable[int] = ()) -> None:
        """Args:
        generations: of the regions that it does not lead to; none: to nothing of the owner.
        """
        super().__init__(what, next=next)
        self.generations = frozenset(generations)


def submit_failed(cause: TransferError, where: str) -> RDMAError:
    """What the future of a submit fails with."""
    text = f"RdmaAction.submit failed: RDMA submit failed on 1 backend(s):\n(Tcp) {cause.what}"
    kind = RDMATimeout if isinstance(cause, DeadlineError) else RDMAError
    return kind(explain(text, where=where, next=cause.next))
