"""Links and routes over the simulated network: the real router, the real frames, and wires instead of sockets.

Rules of this file:
    1. A lane hands over in the order of sending, each item once, unless a disturbance is `raw`.
    2. The end of a connection travels behind what was sent before, as the end of a stream does.
    3. A connection is made by its listener's answer; until then its frames wait in the link.

Read next: `network.py` for the weather, `_net/router.py` for the rules of routes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import monarch._wire.frames as frames
from monarch._base.ids import ProcRef
from monarch._net.loop import NetLoop
from monarch._net.router import PROTOCOL_VERSION, Events, Router
from monarch._net.stream import FrameHandler, Link, LinkClosedError
from monarch._wire import messages
from monarch._wire.frames import Buffer, FrameError, Kind

if TYPE_CHECKING:
    import socket

    from monarch._net.local import Segment
    from monarch.testing.network import Network
    from monarch.testing.node import Node

_SHARED_BYTES = 4096
"""From here on a payload that nobody can change is passed on as it is, so that a cast costs its memory once; buffers always are."""
_ENDED = "the peer closed the connection"


class Datagram(NamedTuple):
    """What a lane carries: a frame."""

    data: bytes
    """All of it, or its prefix and header."""
    nbytes: int
    """Size of the frame."""
    payload: bytes | None = None
    """A long one, or one with buffers; None: it is part of `data`."""
    buffers: tuple[memoryview, ...] = ()


def _datagram(pieces: Sequence[Buffer]) -> Datagram:
    """The frame of these pieces; what somebody may change is copied."""
    prefix, header, payload, *tail = pieces
    if type(payload) is bytes and (tail or len(payload) >= _SHARED_BYTES):
        buffers = tuple(piece for piece in tail if isinstance(piece, memoryview))
        if all(type(buffer.obj) is bytes for buffer in buffers) and bool(buffers) == bool(tail):
            return Datagram(b"".join((prefix, header)), sum(map(len, pieces)), payload, buffers)
    data = b"".join(pieces)
    return Datagram(data, len(data))


_CONNECTED = Datagram(b"connected", 9)
_END = Datagram(b"end", 3)
"""Marks of a lane, recognised by identity; all else on it is a frame."""


class Lane:
    """One direction of a connection."""

    __slots__ = ("_condition", "_epoch", "_expected", "_network", "_sent", "_waiting", "held", "receiver", "source", "target")

    def __init__(self, network: Network, source: Node, target: Node) -> None:
        self._network = network
        self.source = source
        self.target = target
        self.receiver: WiredLink | None = None
        self.held: list[tuple[int, Datagram]] = []
        """What a cut or a stall keeps."""
        self._sent = 0
        self._expected = 0
        self._waiting: dict[int, Datagram] | None = None
        self._epoch = -1
        self._condition = network.condition(source, target)
        network.lanes[self] = None

    def send(self, item: Datagram) -> None:
        """Put one item on its way."""
        number, self._sent = self._sent, self._sent + 1
        self._travel(number, item)

    def _travel(self, number: int, item: Datagram) -> None:
        network, source = self._network, self.source
        if self._epoch != network.epoch:
            self._epoch, self._condition = network.epoch, network.condition(source, self.target)
        condition = self._condition
        if condition.blocked:
            self.held.append((number, item))
            return
        scheduler, costs, nbytes = network.scheduler, network.costs, item.nbytes
        charging = False
        if network.costs_time:
            charging = scheduler.charge()
            source.spend(costs.message_s + costs.copy_byte_s * nbytes)
        source.sent += 1
        source.bytes_sent += nbytes
        ready_s = max(source.free_at_s, scheduler.now_s)
        copies = 1 + (condition.duplicates > 0 and scheduler.random.random() < condition.duplicates)
        scheduler.in_flight += copies
        for _ in range(copies):
            way_s = network.way_s(source, self.target, condition, nbytes)
            scheduler.call_later(network.link_s(source, self.target, ready_s, way_s, nbytes), partial(self._arrive, number, item))
        if charging:
            scheduler.uncharge()

    def _arrive(self, number: int, item: Datagram) -> None:
        network = self._network
        network.scheduler.in_flight -= 1
        if self.receiver is None:  # its end is closed
            return
        if self._epoch != network.epoch:
            self._epoch, self._condition = network.epoch, network.condition(self.source, self.target)
        if self._condition.blocked:
            self.held.append((number, item))
        elif number < self._expected or (self._waiting is not None and number in self._waiting):
            network.duplicates += 1
            if self._condition.raw:
                self._hand_over(item)
        elif number > self._expected:
            if self._waiting is None:
                self._waiting = {}
            self._waiting[number] = item
            if self._condition.raw:
                self._hand_over(item)
        else:
            self._hand_over(item)
            self._expected += 1
            if self._waiting:
                self._hand_over_waiting(self._waiting)

    def _hand_over_waiting(self, waiting: dict[int, Datagram]) -> None:
        raw = self._condition.raw  # then they were handed over as they came
        while self._expected in waiting:
            item = waiting.pop(self._expected)
            self._expected += 1
            self._network.late += 1
            if not raw:
                self._hand_over(item)

    def _hand_over(self, item: Datagram) -> None:
        if self.receiver is not None and not self.target.dead:
            self.target.loop.call_soon(self.receiver.take, item)

    def resume(self) -> None:
        """Send on what was held, if nothing holds it any more."""
        held, self.held = self.held, []
        for number, item in held:
            self._travel(number, item)

    def give_up(self, reason: str) -> None:
        """The receiving end takes the other for dead."""
        if self.receiver is not None and not self.target.dead:
            self.target.loop.call_soon(self.receiver.close, reason)

    def close(self) -> None:
        """Nobody receives any more."""
        self.receiver = None
        self.held.clear()
        self._network.lanes.pop(self, None)


class WiredLink(Link):
    """A link whose socket is a pair of lanes."""

    def __init__(
        self,
        node: Node,
        network: Network,
        hello: Datagram,
        on_frame: FrameHandler,
        on_closed: Callable[[Link, str], None],
        max_frame_bytes: int,
    ) -> None:
        super().__init__(cast(NetLoop, node.loop), None, on_frame, on_closed, max_frame_bytes)
        self._node = node
        self._network = network
        self._hello = hello
        self._out: Lane | None = None
        """Where frames leave; None until the connection stands."""
        self._way_out: Lane | None = None
        """The same, also before."""
        self._in: Lane | None = None
        self._unsent: list[Datagram] = []
        self._serial = network.num_links = network.num_links + 1
        self.dialling = False

    def __hash__(self) -> int:
        return self._serial  # sets of links have the same order in every run

    def __eq__(self, other: object) -> bool:
        return self is other

    @property
    def connected(self) -> bool:
        """True while it has its lanes."""
        return self._out is not None

    @property
    def queued_bytes(self) -> int:
        """What waits for the connection."""
        return sum(item.nbytes for item in self._unsent)

    def join(self, incoming: Lane, outgoing: Lane) -> None:
        """Become one end of a connection that does not stand yet."""
        self._in, self._way_out = incoming, outgoing
        incoming.receiver = self

    def answer(self) -> None:
        """The listening end: the connection stands. The node's loop."""
        if self.closed is None and self._way_out is not None:
            self._way_out.send(_CONNECTED)
            self._open()

    def _open(self) -> None:
        outgoing = self._out = self._way_out
        assert outgoing is not None
        self.dialling = False
        unsent, self._unsent = self._unsent, []
        for item in (self._hello, *unsent):
            outgoing.send(item)

    def _send(self, pieces: list[Buffer], segment: Segment | None) -> None:
        if self.closed is not None:
            raise LinkClosedError(self.closed)
        if self._node.dead or self._node.scheduler.closed:
            raise LinkClosedError("this process has ended")
        item = _datagram(pieces)
        if self._out is None:
            self._unsent.append(item)
        else:
            self._out.send(item)

    def take(self, item: Datagram) -> None:
        """Something has arrived. The node's loop."""
        if self.closed is not None:
            return
        if item is _END:
            self.close(_ENDED)
            return
        if item is _CONNECTED:
            self._open()
            return
        network, lane, nbytes = self._network, self._in, item.nbytes
        assert lane is not None
        network.messages += 1
        network.bytes += nbytes
        if network.record is not None:
            network.record(lane.source, lane.target, item.data)
        node = self._node
        node.received += 1
        node.bytes_received += nbytes
        if network.costs_time:
            node.spend(network.costs.message_s + network.costs.copy_byte_s * nbytes)
        try:
            if item.payload is not None:
                self._dispatch(network.whole(item, self._max_frame_bytes, is_for_agent=node.process is None))
                return
            for frame in network.decode(item.data, self._max_frame_bytes):
                self._dispatch(frame)
        except (FrameError, messages.DecodeError) as exc:
            self.close(f"protocol error: {exc}")

    def close(self, reason: str) -> None:
        """End the link; its peer hears of it behind what was sent before."""
        if self.closed is not None:
            return
        self.closed = reason
        self.hang_up()
        self._on_closed(self, reason)

    def hang_up(self) -> None:
        """What the kernel does with the connections of a process that ends: tell the peer, and nobody here."""
        outgoing, self._way_out, self._out = self._way_out, None, None
        incoming, self._in = self._in, None
        self._unsent.clear()
        if outgoing is not None:
            outgoing.send(_END)
        if incoming is not None:
            incoming.close()

    def close_after_reading(self, reason: str) -> None:
        """`close`, behind what has arrived."""
        self._loop.call_soon(self.close, reason)

    def abandon(self) -> None:
        """There is nothing that a fork could inherit."""


class WiredRouter(Router):
    """The routes of a simulated process."""

    def __init__(self, node: Node, network: Network, own: ProcRef, events: Events, max_frame_bytes: int) -> None:
        super().__init__(cast(NetLoop, node.loop), own, None, events, max_frame_bytes)
        self._node = node
        self._network = network
        node.router = self
        hello = messages.Hello(own, self.pid, PROTOCOL_VERSION, epoch=int(node.loop.now_s() * 1000) + 1)
        self._hello = _datagram(frames.encode(Kind.CONTROL, messages.encode(hello), b""))

    @property
    def pid(self) -> int:
        """The simulated process."""
        return self._node.pid or os.getpid()

    def listen(self, sock: socket.socket | None = None) -> None:
        """Be reached at this process's own address."""
        self._network.listeners[self.own.address] = self

    def is_near(self, ref: ProcRef) -> bool:
        """Whether `ref` is of this process's host."""
        return (ref.host or ref.address) == self._node.machine

    def dial(self, ref: ProcRef) -> None:
        """Connect the link to `ref` unless it is connected, on its way or lost."""
        link = self._links.get(ref.uid)
        if link is None or link.connected or link.closed is not None:
            return
        assert isinstance(link, WiredLink)
        if not link.dialling:
            link.dialling = True
            Dial(self, link, ref).start()

    def hang_up(self) -> None:
        """This process has ended: the kernel closes what it had open."""
        if self._network.listeners.get(self.own.address) is self:
            del self._network.listeners[self.own.address]
        for link in sorted({*self._all, *self._links.values()}, key=_serial_of):
            cast(WiredLink, link).hang_up()

    def close(self, reason: str) -> None:
        """Close all links, and be reached no more."""
        self._network.listeners.pop(self.own.address, None)
        super().close(reason)

    def join(self, link: WiredLink | None, incoming: Lane, outgoing: Lane) -> WiredLink:
        """One end of a new connection is here; without `link` the peer names itself."""
        if link is None:
            link = cast(WiredLink, self._new_link(None))
        self._all.add(link)
        link.join(incoming, outgoing)
        return link

    def _new_link(self, ref: ProcRef | None) -> Link:
        link = WiredLink(self._node, self._network, self._hello, self._on_frame, self._on_closed, self._max_frame_bytes)
        link.peer = ref
        return link


class Dial:
    """An attempt to connect."""

    def __init__(self, router: WiredRouter, link: WiredLink, ref: ProcRef) -> None:
        self._router = router
        self._link = link
        self._ref = ref
        self._node = router._node
        self._network = router._network
        self._scheduler = router._network.scheduler

    def start(self) -> None:
        """Knock."""
        listener, network = self._network.listeners.get(self._ref.address), self._network
        if listener is None:
            near = (self._ref.host or self._ref.address) == self._node.machine
            way_s = network.costs.within_host_s if near else network.costs.between_hosts_s
            self._scheduler.call_later(2 * way_s, partial(self._refuse, "Connection refused"), self._node.loop.call_soon)
            return
        condition = network.condition(self._node, listener._node)
        if not condition.blocked:
            self._node.spend(network.costs.connect_s)
            wait_s = max(0.0, self._node.free_at_s - self._scheduler.now_s)
            self._scheduler.in_flight += 1
            self._scheduler.call_later(wait_s + network.way_s(self._node, listener._node, condition, 0), partial(self._arrive, listener))
        elif condition.suspicion_at_s <= self._scheduler.now_s:
            self._node.loop.call_soon(self._refuse, "Connection timed out")
        else:
            network.waiting_dials.append(self)

    def _refuse(self, reason: str) -> None:
        self._link.dialling = False
        self._router._events.on_unreachable(self._ref, reason)

    def _arrive(self, listener: WiredRouter) -> None:
        self._scheduler.in_flight -= 1
        if self._node.dead or self._link.closed is not None:
            return
        source, target = self._node, listener._node
        if self._network.listeners.get(self._ref.address) is not listener:
            source.loop.call_soon(self._refuse, "Connection refused")
            return
        there, back = Lane(self._network, source, target), Lane(self._network, target, source)
        self._router.join(self._link, back, there)
        target.spend(self._network.costs.connect_s)
        target.loop.call_soon(listener.join(None, there, back).answer)


def _serial_of(link: Any) -> int:
    return cast(int, link._serial)
