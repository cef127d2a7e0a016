"""Cast post: how an agent sends what its relays want sent.

Read next: `cast_relays.py`, the only user.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from monarch import config
from monarch._base.ids import ProcRef, is_agent
from monarch._net.stream import LinkClosedError
from monarch._wire import messages
from monarch._wire.cast_messages import CastHanded
from monarch._wire.frames import Buffer, Flag, Kind, encode

if TYPE_CHECKING:
    from monarch._net.local import SegmentPool
    from monarch._net.router import Router


class CastPost:
    """Sends to other agents, to callers and to own procs. Thread: net loop."""

    def __init__(self, router: Router, pool: SegmentPool | None) -> None:
        self._router = router
        self._pool = pool
        self._shm_threshold_bytes: int = config.value("shm_threshold_bytes")

    def send(
        self, ref: ProcRef, message: messages.Control, payload: Buffer = b"", buffers: Sequence[memoryview] = (), *, port: int = 0
    ) -> bool:
        """Send a control message; another agent is dialled if need be. False: nobody is there."""
        pieces = encode(Kind.CONTROL, messages.encode(message), payload, port=port, buffers=buffers)
        try:
            self._router.link_to(ref, dial=is_agent(ref)).send(pieces)
        except LinkClosedError:
            return False
        return True

    def hand(self, receivers: Sequence[tuple[ProcRef, CastHanded, int]], payload: Buffer, buffers: Sequence[memoryview], port: int) -> None:
        """Give own procs one call, each with its message and rank; large buffers go once for all into shared memory."""
        segment, flags = None, 0
        if self._pool is not None and sum(buffer.nbytes for buffer in buffers) >= self._shm_threshold_bytes:
            segment = self._pool.pack(buffers, receivers=len(receivers))
            flags = Flag.SHARED if len(receivers) > 1 else 0
        last, encoded = None, b""
        for ref, handed, rank in receivers:
            if handed is not last:
                last, encoded = handed, messages.encode(handed)
            if segment is None:
                pieces = encode(Kind.CONTROL, encoded, payload, port=port, rank=rank, buffers=buffers)
            else:
                shared = segment.segment_id
                pieces = encode(Kind.CONTROL, encoded, payload, flags=flags, port=port, rank=rank, segment=shared, spans=segment.spans)
            with contextlib.suppress(LinkClosedError):  # it has just ended, and whoever waits for it hears of that
                self._router.link_to(ref, dial=False).send(pieces, segment)
