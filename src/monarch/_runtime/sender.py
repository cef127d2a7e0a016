"""The sender: how calls and replies leave a process.

Buffers that are large enough are copied once, into shared memory that all receivers on this host map; smaller ones go
through the socket behind the payload. Messages to this very process never leave it, but are copied like any other.

Read next: `_net/stream.py` for links, `flow.py` for who waits, `proc.py` for the receiving side.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from monarch import config
from monarch._base.errors import explain
from monarch._base.ids import ProcRef
from monarch._net.router import Router
from monarch._net.stream import LinkClosedError
from monarch._runtime.caster import Caster
from monarch._runtime.cell import Cell, Delivery, current
from monarch._runtime.faults import SupervisionError
from monarch._runtime.flow import MESSAGE_OVERHEAD_BYTES, Flow
from monarch._runtime.mailbox import Ports, Target
from monarch._wire.frames import Buffer, Flag, Kind, encode
from monarch._wire.messages import CallHeader, ProcExited

if TYPE_CHECKING:
    from monarch._net.local import Segment, SegmentPool

_logger = logging.getLogger("monarch.actor")
Undelivered: TypeAlias = Callable[[Target, int, ProcRef | ProcExited, CallHeader, int], None]


class Sender:
    """Sends to actors and ports. Thread: any; `call` may wait for a slow receiver, so never the net loop."""

    def __init__(
        self,
        router: Router,
        pool: SegmentPool | None,
        flow: Flow,
        ports: Ports,
        caster: Caster,
        deliver: Callable[[Delivery], None],
        undelivered: Undelivered,
    ) -> None:
        """Args:
        caster: sends to procs of other hosts, where that is better than one by one.
        deliver: takes a message for an actor of this process.
        undelivered: told (target, rank, proc or reason, header, port) of a message whose proc is gone, or that can't be sent.
        """
        self._own_uid = router.own.uid
        self._router = router
        self._pool = pool
        self._flow = flow
        self._ports = ports
        self.caster = caster
        self._deliver = deliver
        self._undelivered = undelivered
        self._shm_threshold_bytes: int = config.value("shm_threshold_bytes")
        self._max_frame_bytes: int = config.value("codec_max_frame_length")
        self.before_reply: Callable[[], None] | None = None
        """Called on the replying thread, once: the process has printed, and a reply is not to overtake that."""

    def call(
        self,
        target: Target,
        refs: Sequence[ProcRef],
        ranks: Sequence[int],
        header: CallHeader,
        encoded_header: bytes,
        payload: bytes,
        buffers: Sequence[memoryview],
        port: int,
    ) -> None:
        """Send one message to some ranks of a view; the buffers may be changed by the caller afterwards.

        Args:
            refs: the proc of every rank of the view.
            ranks: which of them to send to.
            port: where replies go, in this process or in `header.reply_to`; 0: nobody waits.

        Cost: one gathered write per rank; buffers are copied once.
        """
        size = sum(b.nbytes for b in buffers) if buffers else 0
        nbytes = MESSAGE_OVERHEAD_BYTES + len(payload) + size
        if nbytes > self._max_frame_bytes:
            self._refuse_long(target, ranks, header, port, nbytes)
            return
        if len(ranks) > 1 and len(ranks) == len(refs):
            view = self.caster.worthwhile(refs, nbytes)
            if view is not None:
                self._spend_all(view.uids, header.actor, nbytes)
                self.caster.cast(view, target, header, encoded_header, payload, buffers, port)
                ranks = view.near
        segment, flags, num_left = None, 0, 0
        if buffers and size >= self._shm_threshold_bytes:
            num_left = sum(self._shares_memory(refs[rank]) for rank in ranks)
            segment, flags = self._pack(buffers, num_left), Flag.SHARED if num_left > 1 else 0
        try:
            for rank in ranks:
                ref = refs[rank]
                if ref.uid == self._own_uid:
                    self._deliver(Delivery(header, port, rank, payload, _copies(buffers)))
                    continue
                self._spend(ref, header.actor, nbytes)
                lent = segment if segment is not None and self._shares_memory(ref) else None
                after = self.caster.stamp(ref.uid)
                pieces = _encode(Kind.CALL, encoded_header, payload, buffers, lent, port, rank, flags if lent is not None else 0, after)
                num_left -= lent is not None
                try:
                    self._router.link_to(ref).send(pieces, lent)
                except LinkClosedError:
                    self._flow.credit((ref.uid, header.actor), nbytes)
                    self._undelivered(target, rank, ref, header, port)
        finally:
            if segment is not None and self._pool is not None:
                for _ in range(num_left):  # Ctrl-C came while this thread waited for a slow receiver
                    self._pool.release(segment.segment_id)

    def reply(self, delivery: Delivery, payload: Buffer, buffers: Sequence[memoryview], flags: int = 0) -> None:
        """Answer a message; dropped when nobody waits or who waits is gone."""
        before_reply = self.before_reply  # read once: another thread's reply takes it away
        if before_reply is not None:
            before_reply()
        reply_to = delivery.header.reply_to
        if reply_to is not None:
            self.post(delivery.via or reply_to, delivery.port, delivery.rank, payload, buffers, flags)

    def post(self, ref: ProcRef, port: int, rank: int, payload: Buffer, buffers: Sequence[memoryview], flags: int = 0) -> bool:
        """Send to a port of any process; False when that process is gone.

        Raises:
            ValueError: more than a frame may have; the receiver would take this process for broken.
        """
        size = sum(b.nbytes for b in buffers) if buffers else 0
        if len(payload) + size > self._max_frame_bytes:
            raise ValueError(self._too_long(ref.uid, len(payload) + size))
        if ref.uid == self._own_uid:
            self._ports.deliver(port, rank, flags, payload, _copies(buffers))
            return True
        segment = self._pack(buffers, 1) if buffers and size >= self._shm_threshold_bytes and self._shares_memory(ref) else None
        pieces = _encode(Kind.REPLY, b"", payload, buffers, segment, port, rank, flags)
        try:
            self._router.link_to(ref).send(pieces, segment)
        except LinkClosedError:
            return False
        return True

    def _shares_memory(self, ref: ProcRef) -> bool:
        """Whether that is another process of this machine."""
        return self._pool is not None and ref.uid != self._own_uid and self._router.is_near(ref)

    def _pack(self, buffers: Sequence[memoryview], receivers: int) -> Segment | None:
        """The buffers in shared memory; None where they have to go through the socket."""
        if self._pool is None or not receivers:
            return None
        try:
            return self._pool.pack(buffers, receivers=receivers)
        except OSError as exc:
            _logger.warning("no shared memory, buffers go through the socket: bytes=%d error=%s", sum(b.nbytes for b in buffers), exc)
            return None

    def _spend(self, ref: ProcRef, actor: str, nbytes: int) -> None:
        activation = current.get(None)
        cell = None if activation is None else activation.cell
        if isinstance(cell, Cell):
            self._flow.spend((ref.uid, actor), nbytes, cell.may_wait, cell.waits_at)
        else:
            self._flow.spend((ref.uid, actor), nbytes, _always, _nothing)

    def _spend_all(self, uids: Sequence[str], actor: str, nbytes: int) -> None:
        activation = current.get(None)
        cell = None if activation is None else activation.cell
        if isinstance(cell, Cell):
            self._flow.spend_all(uids, actor, nbytes, cell.may_wait, cell.waits_at)
        else:
            self._flow.spend_all(uids, actor, nbytes, _always, _nothing)

    def _refuse_long(self, target: Target, ranks: Sequence[int], header: CallHeader, port: int, nbytes: int) -> None:
        text = explain(self._too_long(target.endpoint, nbytes), next="send less at once, or raise it with monarch.config.configure()")
        if port:
            self._ports.fail(port, SupervisionError(text))
            return
        for rank in ranks:
            self._undelivered(target, rank, ProcExited(self._router.own, text, "unknown"), header, port)

    def _too_long(self, where: str, nbytes: int) -> str:
        return f"the message to {where} has {nbytes} bytes, more than codec_max_frame_length ({self._max_frame_bytes})"


def _encode(
    kind: int,
    header: bytes,
    payload: Buffer,
    buffers: Sequence[memoryview],
    segment: Segment | None,
    port: int,
    rank: int,
    flags: int,
    after: int = 0,
) -> list[Buffer]:
    if segment is None:
        return encode(kind, header, payload, flags=flags, port=port, rank=rank, buffers=buffers, after=after)
    return encode(kind, header, payload, flags=flags, port=port, rank=rank, segment=segment.segment_id, spans=segment.spans, after=after)


def _copies(buffers: Sequence[memoryview]) -> list[memoryview]:
    return [memoryview(bytearray(buffer)) for buffer in buffers]


def _always() -> bool:
    return True


def _nothing(_gate: Any) -> None:
    return
