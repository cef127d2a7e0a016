"""Tunnels: many two-way streams of bytes over one ordered link, so that a process without an address of its own has connections.

Pure: frames and what the local sockets did go in, effects come out. `_net/tunnel.py` does the I/O.

Rules of this file:
    1. Nothing is queued here. A sender asks for `room` before it reads its source; what a receiver has not `consumed`
       is bounded by the window that it granted. So a slow reader holds up its own tunnel only.
    2. All tunnels together may have `LINK_WINDOW` bytes between the two ends. That bounds what waits in the link, shares
       it out in turns, and keeps the other frames of the link moving. It is given back on arrival, not on consumption.
    3. The opener sends at once, without an answer; a refusal is a RESET. Numbers are never used twice, so what comes for
       a tunnel that is over was on its way when it ended, and is ignored.

Read next: `_net/tunnel.py` for the caller, docs/design/tunnels.md for the reasons.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, TypeAlias

from monarch._wire.frames import Buffer, Frame, FrameError, Kind, encode

FIRST_WINDOW = 64 * 1024
"""Bytes that may be on the way through a new tunnel; part of the protocol, for both ends begin with it."""
MOST_WINDOW = 4 << 20
LINK_WINDOW = 8 << 20
MOST_TUNNELS = 4096
CHUNK_BYTES = 64 * 1024
"""Most bytes of one DATA frame: a few of them fit the read buffer of a link, so none gets memory of its own."""
_GROWTH_BYTES = 128 << 20
"""How much more than their first windows all tunnels of a link may get."""
_MOST_ADDRESS_BYTES = 1024
_MOST_REASON_BYTES = 512
_MOST_MILLISECONDS = (1 << 32) - 1


class Side(IntEnum):
    """Which end of the link this is; it decides which numbers this end gives to the tunnels that it opens."""

    CLIENT = 1
    """The process outside, which dialled the link: odd numbers."""
    GATEWAY = 2
    """The process that it dialled: even numbers."""


class Op(IntEnum):
    """What a TUNNEL frame says; its `flags`. The frame's `port` is the number of the tunnel."""

    DATA = 0
    """The payload is the next piece of the stream."""
    OPEN = 1
    """A new tunnel; the payload is the address that it shall lead to."""
    CREDIT = 2
    """`rank` more bytes may come through this tunnel; for number 0, through all of them together."""
    END = 3
    """Nothing more comes from this end."""
    RESET = 4
    """The tunnel is over, both ways; the payload says why to people, and `rank` to programs (`Broken.code`)."""
    SILENCE = 5
    """Nothing was heard for `rank` milliseconds of the machine that the tunnel leads to; 0 ends the silence."""


class Write(NamedTuple):
    """Send this frame."""

    pieces: list[Buffer]


class Opened(NamedTuple):
    """The peer wants a tunnel to `address`; its bytes may follow at once."""

    number: int
    address: str


class Arrived(NamedTuple):
    """The next piece of the stream; `consumed` when somebody has taken it."""

    number: int
    data: Buffer


class Room(NamedTuple):
    """There is room again, which there was not when `room` was asked."""

    number: int


class Ended(NamedTuple):
    """The peer sends nothing more; the other direction goes on."""

    number: int


class Broken(NamedTuple):
    """The tunnel is over, both ways; what has arrived is still good."""

    number: int
    reason: str
    code: int = 0
    """What kind of end that is, for the users of tunnels; 0: any."""


class Silence(NamedTuple):
    """At the other end nothing was heard of whoever the tunnel leads to for so long."""

    number: int
    seconds: float


Effect: TypeAlias = Write | Opened | Arrived | Room | Ended | Broken | Silence


class _Tunnel:
    """What one end knows of a tunnel."""

    __slots__ = ("credit", "owed", "receives", "sends", "waiting", "window")

    def __init__(self) -> None:
        self.credit = FIRST_WINDOW
        """What may still be sent."""
        self.window = FIRST_WINDOW
        """What we granted the peer."""
        self.waiting = 0
        """Of it: arrived and not consumed."""
        self.owed = 0
        """Of it: consumed and not granted anew."""
        self.sends = True
        self.receives = True


class Tunnels:
    """One end of all tunnels of a link.

    Every method returns what the caller has to do, in this order. Methods accept the numbers of tunnels that are over,
    and do nothing then.
    """

    def __init__(self, side: Side) -> None:
        self._side = side
        self._tunnels: dict[int, _Tunnel] = {}
        self._last_own = side - 2
        self._last_of_peer = 0
        self._link_credit = LINK_WINDOW
        self._link_owed = 0
        self._growth_left = _GROWTH_BYTES
        self._starved: dict[int, None] = {}
        """Tunnels that asked for room in vain, first come first."""

    def __len__(self) -> int:
        """How many tunnels are not over, or have bytes that nobody has consumed."""
        return len(self._tunnels)

    @property
    def waiting_bytes(self) -> int:
        """What has arrived and nobody has consumed."""
        return sum(tunnel.waiting for tunnel in self._tunnels.values())

    # --- from this end -------------------------------------------------------------------------------------------

    def open(self, address: str) -> tuple[int, list[Effect]]:
        """A new tunnel to `address`; its number, which `Broken` follows at once when there can't be one."""
        self._last_own = number = self._last_own + 2
        payload = address.encode(errors="replace")
        if len(payload) > _MOST_ADDRESS_BYTES:
            return number, [Broken(number, f"an address of {len(payload)} bytes is longer than {_MOST_ADDRESS_BYTES}")]
        if len(self._tunnels) >= MOST_TUNNELS:
            return number, [Broken(number, _too_many())]
        self._tunnels[number] = _Tunnel()
        return number, [Write(_frame(Op.OPEN, number, payload))]

    def room(self, number: int) -> int:
        """How much `send` takes now, at most `CHUNK_BYTES`; after a 0, `Room` says when to ask again."""
        tunnel = self._tunnels.get(number)
        if tunnel is None or not tunnel.sends:
            return 0
        room = min(tunnel.credit, self._link_credit, CHUNK_BYTES)
        if not room:
            self._starved.setdefault(number)
        return room

    def send(self, number: int, data: Buffer) -> list[Buffer]:
        """The frame that carries `data`, which is no more than `room` said; it refers to the memory of `data`."""
        count = len(data)
        tunnel = self._tunnels[number]
        if not (tunnel.sends and 0 < count <= min(tunnel.credit, self._link_credit)):
            raise ValueError(f"there is no room for {count} bytes in tunnel {number}")
        tunnel.credit -= count
        self._link_credit -= count
        return _frame(Op.DATA, number, data)

    def finish(self, number: int) -> list[Effect]:
        """Nothing more will be sent; the other direction goes on."""
        tunnel = self._tunnels.get(number)
        if tunnel is None or not tunnel.sends:
            return []
        tunnel.sends = False
        self._settle(number, tunnel)
        return [Write(_frame(Op.END, number))]

    def reset(self, number: int, reason: str, code: int = 0) -> list[Effect]:
        """End the tunnel both ways, and refuse it if the peer has opened it; what waits is given up."""
        tunnel = self._tunnels.get(number)
        if tunnel is None:
            return []
        told = not (tunnel.sends or tunnel.receives)
        tunnel.sends = tunnel.receives = False
        tunnel.waiting = 0
        self._settle(number, tunnel)
        return [] if told else [Write(_reset(number, reason, code))]

    def tell_silence(self, number: int, seconds: float) -> list[Effect]:
        """Nothing was heard for so long of the machine that the tunnel leads to."""
        return [Write(_frame(Op.SILENCE, number, rank=min(int(seconds * 1000), _MOST_MILLISECONDS)))] if number in self._tunnels else []

    def consumed(self, number: int, count: int) -> list[Effect]:
        """Somebody has taken `count` bytes that had arrived."""
        tunnel = self._tunnels.get(number)
        if tunnel is None:
            return []
        tunnel.waiting -= count
        if not tunnel.receives:
            self._settle(number, tunnel)
            return []
        tunnel.owed += count
        if 2 * tunnel.owed < tunnel.window:
            return []
        # Who takes what comes as it comes may be far away: twice the window, unless it all waits here.
        growth = 0 if tunnel.waiting else min(tunnel.window, MOST_WINDOW - tunnel.window, self._growth_left)
        credit = tunnel.owed + growth
        tunnel.owed = 0
        tunnel.window += growth
        self._growth_left -= growth
        return [Write(_frame(Op.CREDIT, number, rank=credit))]

    # --- from the peer -------------------------------------------------------------------------------------------

    def receive(self, frame: Frame) -> list[Effect]:
        """Account for a TUNNEL frame of the peer.

        Raises:
            FrameError: it breaks the rules; the link can't be used further.
        """
        if frame.header or frame.buffers or frame.spans:
            raise FrameError("a frame of a tunnel has more than a payload")
        number, payload = frame.port, frame.payload
        match frame.flags:
            case Op.DATA:
                return self._on_data(number, payload)
            case Op.CREDIT:
                return self._on_credit(number, frame.rank)
            case Op.OPEN:
                return self._on_open(number, payload)
            case Op.END:
                return self._on_end(number)
            case Op.RESET:
                return self._on_reset(number, payload, frame.rank)
            case Op.SILENCE:
                return [] if self._find(number) is None else [Silence(number, frame.rank / 1000)]
        raise FrameError(f"frames of tunnels know no operation {frame.flags}")

    def _on_data(self, number: int, data: Buffer) -> list[Effect]:
        tunnel, count = self._find(number), len(data)
        effects: list[Effect] = []
        if tunnel is not None:
            if not tunnel.receives:
                raise FrameError(f"bytes came behind the end of tunnel {number}")
            if not count or tunnel.waiting + count + tunnel.owed > tunnel.window:
                raise FrameError(f"{count} bytes came through tunnel {number}, which has no room for them")
            tunnel.waiting += count
            effects.append(Arrived(number, data))
        self._link_owed += count
        if 4 * self._link_owed >= LINK_WINDOW:
            effects.append(Write(_frame(Op.CREDIT, 0, rank=self._link_owed)))
            self._link_owed = 0
        return effects

    def _on_credit(self, number: int, count: int) -> list[Effect]:
        if not number:
            self._link_credit += count
            if self._link_credit > LINK_WINDOW:
                raise FrameError(f"a credit of {count} bytes for all tunnels is more than was sent")
            woken = [starved for starved in self._starved if self._tunnels[starved].credit]
        else:
            tunnel = self._find(number)
            if tunnel is None:
                return []
            tunnel.credit += count
            if tunnel.credit > MOST_WINDOW:
                raise FrameError(f"a credit of {count} bytes for tunnel {number} is beyond every window")
            woken = [number] if number in self._starved and self._link_credit else []
        for starved in woken:
            del self._starved[starved]
        return [Room(starved) for starved in woken]

    def _on_open(self, number: int, payload: Buffer) -> list[Effect]:
        if number % 2 == self._side % 2 or number <= self._last_of_peer:
            raise FrameError(f"the peer may not open a tunnel of number {number}")
        self._last_of_peer = number
        address = _text(payload, _MOST_ADDRESS_BYTES)
        if len(self._tunnels) >= MOST_TUNNELS:
            return [Write(_reset(number, _too_many()))]
        self._tunnels[number] = _Tunnel()
        return [Opened(number, address)]

    def _on_end(self, number: int) -> list[Effect]:
        tunnel = self._find(number)
        if tunnel is None:
            return []
        if not tunnel.receives:
            raise FrameError(f"tunnel {number} ended twice")
        tunnel.receives = False
        self._settle(number, tunnel)
        return [Ended(number)]

    def _on_reset(self, number: int, payload: Buffer, code: int) -> list[Effect]:
        tunnel, reason = self._find(number), _text(payload, _MOST_REASON_BYTES)
        if tunnel is None or not (tunnel.sends or tunnel.receives):  # the latter: our END and the RESET have crossed
            return []
        tunnel.sends = tunnel.receives = False
        self._settle(number, tunnel)
        return [Broken(number, reason, code)]

    def _find(self, number: int) -> _Tunnel | None:
        """The tunnel; None when it is over at this end."""
        tunnel = self._tunnels.get(number)
        if tunnel is None:
            last = self._last_own if number % 2 == self._side % 2 else self._last_of_peer
            if not 0 < number <= last:
                raise FrameError(f"there never was a tunnel {number}")
        return tunnel

    def _settle(self, number: int, tunnel: _Tunnel) -> None:
        """Forget what ends have no more use for."""
        if not tunnel.sends:
            self._starved.pop(number, None)
            if not (tunnel.receives or tunnel.waiting):
                del self._tunnels[number]
                self._growth_left += tunnel.window - FIRST_WINDOW


def _frame(op: Op, number: int, payload: Buffer = b"", *, rank: int = 0) -> list[Buffer]:
    return encode(Kind.TUNNEL, b"", payload, flags=op, port=number, rank=rank)


def _reset(number: int, reason: str, code: int = 0) -> list[Buffer]:
    return _frame(Op.RESET, number, reason.encode(errors="replace")[:_MOST_REASON_BYTES], rank=code)


def _too_many() -> str:
    return f"{MOST_TUNNELS} tunnels are open through this gateway, which is the most"


def _text(payload: Buffer, most_bytes: int) -> str:
    if len(payload) > most_bytes:
        raise FrameError(f"a text of {len(payload)} bytes came where {most_bytes} are the most")
    return str(payload, "utf-8", "replace")
