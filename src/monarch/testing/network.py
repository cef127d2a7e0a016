"""The network of a universe: what connects its processes, and what a test does to it.

Each connection has two lanes. What a lane carries is numbered and travels as datagrams, each on its own: the network may
delay, reorder and duplicate them, or hold them back. The lane's far end restores the order, as TCP does, so that programs
see what they see on a real network: late messages, silence, closed connections. A disturbance that is `raw` reaches the
receiver as it is; no real transport does that, it is for tests of what restores order.

Read next: `links.py` for connections, `node.py` for processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from monarch._base.errors import explain
from monarch._wire.frames import PREFIX, Decoder, Frame, FrameError

if TYPE_CHECKING:
    from monarch.testing.links import Datagram, Dial, Lane, WiredRouter
    from monarch.testing.node import Node
    from monarch.testing.scheduler import Scheduler


@dataclass(frozen=True)
class Costs:
    """What things take, in virtual seconds."""

    between_hosts_s: float = 100e-6
    """One way between two hosts."""
    within_host_s: float = 20e-6
    """One way between two processes of a host."""
    jitter: float = 0.2
    """Up to this share is added to each way, by the seed; so messages of different senders overtake each other."""
    message_s: float = 0.0
    """A process needs this long for each message it sends, and for each it receives, one after the other."""
    byte_s: float = 0.0
    """Each way takes so much longer for each byte of the message."""
    copy_byte_s: float = 0.0
    """A process needs this long for each byte it sends, and for each it receives, on top of `message_s`."""
    link_byte_s: float = 0.0
    """The link of a host needs this long for each byte that leaves for other hosts, and for each that comes, one after the other."""
    connect_s: float = 0.0
    """A process needs this long for each connection that it makes, or accepts."""
    processor: float = 0.0
    """So much longer than here a process's own code takes, its processor time measured as it runs; so runs differ. 0: no time at all."""
    start_proc_s: float = 0.01
    """From the request to the first instruction of a new process."""
    notice_end_s: float = 0.001
    """Until a host agent knows that one of its processes has ended."""


@dataclass(frozen=True)
class NetworkStatistics:
    """What the network has carried so far."""

    messages: int
    bytes: int
    duplicates: int
    """Datagrams that came twice."""
    late: int
    """Datagrams that a later one had overtaken."""
    held: int
    """Datagrams that wait for a cut or a stall to end."""


@dataclass(frozen=True)
class Side:
    """Some processes: by id, or all of a host, those that are still to come included."""

    uids: frozenset[str] = frozenset()
    machines: frozenset[str] = frozenset()
    everybody: bool = False

    def has(self, node: Node) -> bool:
        """Whether a process is among them."""
        return self.everybody or node.uid in self.uids or node.machine in self.machines


@dataclass(eq=False)
class Disturbance(AbstractContextManager["Disturbance"]):
    """Something that a test does to the ways between two sides; it lasts until `heal()`, or until the `with` block ends."""

    network: Network
    left: Side
    right: Side
    delay_s: float = 0.0
    spread_s: float = 0.0
    duplicates: float = 0.0
    raw: bool = False
    blocks: bool = False
    suspicion_s: float = math.inf
    began_s: float = 0.0
    healed: bool = field(default=False, init=False)

    def heal(self) -> None:
        """End it; what it held back goes on its way."""
        self.network._remove(self)

    def affects(self, one: Node, other: Node) -> bool:
        """Whether it is between these two."""
        return (self.left.has(one) and self.right.has(other)) or (self.left.has(other) and self.right.has(one))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self.heal()


@dataclass(frozen=True)
class Condition:
    """What the disturbances between two processes add up to."""

    delay_s: float
    spread_s: float
    duplicates: float
    raw: bool
    blocked: bool
    suspicion_at_s: float
    """When a connection that is blocked is given up."""


_GOOD = Condition(0.0, 0.0, 0.0, False, False, math.inf)


class Network:
    """What a test does to the connections: `delay`, `reorder`, `duplicate`, `stall`, `cut`, until it is healed.

    The sides of each are a mesh or a slice of one (of hosts, procs or actors), `world.client`, or a list of these; None
    means everybody. A host stands for its agent and all its processes, also those that start later.
    """

    def __init__(self, scheduler: Scheduler, costs: Costs, suspicion_s: float, side_of: Callable[[Any], Side]) -> None:
        self.costs = costs
        self.costs_time = bool(costs.message_s or costs.copy_byte_s or costs.processor)
        """Messages keep their processes busy."""
        self.scheduler = scheduler
        self.epoch = 0
        """Grows with every change of the disturbances."""
        self.listeners: dict[str, WiredRouter] = {}
        self.record: Callable[[Node, Node, bytes], None] | None = None
        """Told of every message that arrives."""
        self.num_links = 0
        self.messages = self.bytes = self.duplicates = self.late = 0
        self._suspicion_s = suspicion_s
        self._side_of = side_of
        self._disturbances: list[Disturbance] = []
        self.lanes: dict[Lane, None] = {}
        """The lanes of open connections."""
        self.waiting_dials: list[Dial] = []
        """Attempts to connect that a cut or a stall holds back."""
        self._decoder: Decoder | None = None
        self._links: dict[str, list[float]] = {}
        """Until when the link of each host is busy: with what leaves, with what comes."""

    # --- what a test does ----------------------------------------------------------------------------------------

    def delay(self, a: Any, b: Any, seconds: float) -> Disturbance:
        """Each message between `a` and `b` takes so much longer, one way."""
        return self._add(a, b, delay_s=_checked(seconds, "delay"))

    def reorder(self, a: Any, b: Any, spread_s: float = 0.01, *, raw: bool = False) -> Disturbance:
        """Each datagram between `a` and `b` takes up to `spread_s` longer, at random, and so they overtake each other.

        Args:
            raw: receivers get them in that order, instead of in the order of sending.
        """
        return self._add(a, b, spread_s=_checked(spread_s, "spread"), raw=raw)

    def duplicate(self, a: Any, b: Any, share: float = 1.0, *, raw: bool = False) -> Disturbance:
        """So large a share of the datagrams between `a` and `b` arrives twice.

        Args:
            raw: receivers get both.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"share is {share!r}; expected 0 to 1")
        return self._add(a, b, duplicates=share, raw=raw)

    def stall(self, a: Any, b: Any) -> Disturbance:
        """Nothing gets through between `a` and `b`, and nobody is told; healed, all of it arrives."""
        return self._add(a, b, blocks=True)

    def cut(self, a: Any, b: Any, suspicion_s: float | None = None) -> Disturbance:
        """Nothing gets through between `a` and `b`; connections, and attempts to connect, are given up after `suspicion_s`.

        Healed before, nothing is lost.

        Args:
            suspicion_s: virtual seconds; 0: at once; None: that of the universe.
        """
        limit_s = self._suspicion_s if suspicion_s is None else _checked(suspicion_s, "suspicion_s")
        made = self._add(a, b, blocks=True, suspicion_s=limit_s)
        if limit_s == 0:
            self._give_up(made)
        else:
            self.scheduler.call_later(limit_s, lambda: self._give_up(made))
        return made

    def heal(self) -> None:
        """End every disturbance."""
        for disturbance in list(self._disturbances):
            self._remove(disturbance)

    def statistics(self) -> NetworkStatistics:
        """What the network has carried so far."""
        held = sum(len(lane.held) for lane in self.lanes)
        return NetworkStatistics(self.messages, self.bytes, self.duplicates, self.late, held)

    # --- what links ask ------------------------------------------------------------------------------------------

    def condition(self, one: Node, other: Node) -> Condition:
        """How it stands between two processes."""
        present = [disturbance for disturbance in self._disturbances if disturbance.affects(one, other)]
        if not present:
            return _GOOD
        return Condition(
            delay_s=sum(d.delay_s for d in present),
            spread_s=sum(d.spread_s for d in present),
            duplicates=1 - math.prod(1 - d.duplicates for d in present),
            raw=any(d.raw for d in present),
            blocked=any(d.blocks for d in present),
            suspicion_at_s=min((d.began_s + d.suspicion_s for d in present if d.blocks), default=math.inf),
        )

    def decode(self, data: bytes, max_frame_bytes: int) -> list[Frame]:
        """The frame that a datagram is, by the decoder of real links.

        Raises:
            FrameError: it is none.
        """
        decoder = self._decoder or Decoder(max_frame_bytes)
        self._decoder = None  # it is of no use any more when it raises
        found: list[Frame] = []
        rest = memoryview(data)
        while rest:
            space = decoder.space()
            count = min(len(space), len(rest))
            space[:count] = rest[:count]
            found += decoder.received(count)
            rest = rest[count:]
        self._decoder = decoder
        return found

    def whole(self, item: Datagram, max_frame_bytes: int, *, is_for_agent: bool) -> Frame:
        """The frame of a datagram whose payload and buffers are apart from the rest.

        Args:
            is_for_agent: it changes no buffers, so it needs no memory of its own.

        Raises:
            FrameError: it is too long.
        """
        if item.nbytes > max_frame_bytes:
            raise FrameError(f"a frame of {item.nbytes} bytes is longer than codec_max_frame_length ({max_frame_bytes})")
        assert item.payload is not None
        kind, flags, _, _, _, _, port, rank, segment, after = PREFIX.unpack_from(item.data)
        buffers = item.buffers if is_for_agent else [memoryview(bytearray(buffer)) for buffer in item.buffers]
        return Frame(kind, flags, port, rank, segment, item.data[PREFIX.size :], item.payload, buffers, (), after)

    def way_s(self, one: Node, other: Node, condition: Condition, nbytes: int) -> float:
        """How long one datagram takes, by the seed."""
        costs, draw = self.costs, self.scheduler.random.random
        way_s = costs.within_host_s if one.machine == other.machine else costs.between_hosts_s
        way_s *= 1.0 + costs.jitter * draw()
        if condition is not _GOOD:
            way_s += condition.delay_s + (condition.spread_s * draw() if condition.spread_s else 0.0)
        return way_s + costs.byte_s * nbytes

    def link_s(self, one: Node, other: Node, ready_s: float, way_s: float, nbytes: int) -> float:
        """When a datagram arrives that is ready to leave at `ready_s`, seen from now."""
        costs, now_s = self.costs, self.scheduler.now_s
        if not costs.link_byte_s or one.machine == other.machine:
            return ready_s + way_s - now_s
        takes_s = costs.link_byte_s * nbytes
        here = self._links.setdefault(one.machine, [0.0, 0.0])
        there = self._links.setdefault(other.machine, [0.0, 0.0])
        # From now on, not from `ready_s`: what leaves later shall not keep back what others have ready before.
        here[0] = max(here[0], now_s) + takes_s
        there[1] = max(there[1], now_s) + takes_s
        return max(ready_s + takes_s, here[0], there[1]) + way_s - now_s

    def _add(self, a: Any, b: Any, **what: Any) -> Disturbance:
        made = Disturbance(self, self._side_of(a), self._side_of(b), began_s=self.scheduler.now_s, **what)
        self._disturbances.append(made)
        self.epoch += 1
        return made

    def _remove(self, disturbance: Disturbance) -> None:
        if disturbance.healed:
            return
        disturbance.healed = True
        self._disturbances.remove(disturbance)
        self.epoch += 1
        for lane in list(self.lanes):
            lane.resume()
        self._dial_again()

    def _dial_again(self) -> None:
        dials, self.waiting_dials = self.waiting_dials, []
        for dial in dials:
            dial.start()

    def _give_up(self, disturbance: Disturbance) -> None:
        if disturbance.healed:
            return
        for lane in list(self.lanes):
            if disturbance.affects(lane.source, lane.target):
                lane.give_up(f"no sign of life for {disturbance.suspicion_s:g} s: the network is cut")
        self._dial_again()


def _checked(seconds: float, what: str) -> float:
    if not 0 <= seconds < math.inf:
        raise ValueError(explain(f"{what} is {seconds!r}; expected a finite number of seconds, zero or more"))
    return float(seconds)
