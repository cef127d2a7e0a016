"""Tunnels between local sockets and a link: what one end writes into its socket, the other end reads from its own.

A process without an address of its own (a client behind NAT) has one link, to the agent of its gateway. Whatever it
dials is a tunnel over that link, and whoever dials it comes through one. At the client a tunnel ends in a socket pair,
so links, TLS and proofs run over it as over any socket; the gateway moves bytes that mean nothing to it.

Rules of this file:
    1. A socket is read only when its bytes can leave: `Tunnels.room` first. At most `_TURN_BYTES` a turn, then the others.
    2. A socket is read until it has nothing more: an edge tells of last bytes and of the end behind them only once.
    3. A socket belongs to its tunnel, which closes it once: after both ends, on a reset, or with the link.

Read next: `_wire/tunnels.py` for windows and frames, `stream.py` for links.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import TypeAlias, assert_never

import msgspec

from monarch._net.liveness import Pulse
from monarch._net.loop import BROKEN, READ, WRITE, NetLoop, Timer
from monarch._net.stream import Link, LinkClosedError
from monarch._wire.frames import Buffer, Frame
from monarch._wire.tunnels import CHUNK_BYTES, Arrived, Broken, Effect, Ended, Opened, Room, Side, Silence, Tunnels, Write

_TURN_BYTES = 256 * 1024
_MOST_PIECES = 64
_LINGER_S = 10.0
"""How long bytes of a closed socket may wait for room: their sender is gone, so no other limit ends it."""
_GONE = "the other end closed the connection"

Connect: TypeAlias = Callable[[str, Callable[[socket.socket], None], Callable[..., None]], None]
"""`connect(address, on_connected, on_failed)`: calls one of the two, at once or later, on the net loop.

`on_failed(reason, code)` takes the reason for people and, if the peer's `farewell` knows any, a code for programs.
"""


def no_words(reason: str, code: int) -> bytes:
    """The farewell of a portal whose users know how to read `Tunnel.reason`."""
    return b""


def accepting(accept: Callable[[socket.socket, str], None]) -> Connect:
    """A `Connect` for a process that is reached through its portal: `accept` gets a socket as from a listening one."""

    def connect(address: str, on_connected: Callable[[socket.socket], None], on_failed: Callable[..., None]) -> None:
        try:
            near, far = socket.socketpair()
        except OSError as exc:  # no descriptor left
            on_failed(f"no connection can be accepted ({exc.strerror})")
            return
        on_connected(near)
        accept(far, address)

    return connect


class PortalStatistics(msgspec.Struct, frozen=True):
    """What a portal holds."""

    tunnels: int
    waiting_bytes: int
    """Arrived over the link, and not taken by the sockets here."""


class Portal:
    """All tunnels of one link. Thread: net loop."""

    def __init__(self, loop: NetLoop, link: Link, side: Side, connect: Connect, farewell: Callable[[str, int], bytes] = no_words) -> None:
        """Args:
        link: its TUNNEL frames go to `on_frame`; whoever is told that it closed calls `close`.
        connect: leads the tunnels that the peer opens to where they want to go.
        farewell: by reason and code, the last and only bytes that a socket gets here whose tunnel the peer refused.
        """
        self.farewell = farewell
        self._loop = loop
        self._link = link
        self._connect = connect
        self._machine = Tunnels(side)
        self._tunnels: dict[int, Tunnel] = {}
        self._ready: deque[Tunnel] = deque()
        """Tunnels whose sockets are to be read, each once, in turns."""
        self._turn_due = False
        self._buffer = memoryview(bytearray(CHUNK_BYTES))

    def open(self, address: str) -> tuple[socket.socket, Tunnel]:
        """Connect to `address` from the other end of the link.

        Returns:
            The socket, usable at once, and its tunnel: when the socket is at its end, `Tunnel.reason` may say why.

        Raises:
            OSError: no descriptor is left.
        """
        near, far = socket.socketpair()
        return far, self.relay(near, address)

    def relay(self, sock: socket.socket, address: str, first: bytes = b"") -> Tunnel:
        """Connect `sock`, which is the portal's from now on, to `address` at the other end; `first` arrives in front.

        Args:
            first: what was read from `sock` before, less than a first window.
        """
        number, effects = self._machine.open(address)
        tunnel = self._tunnels[number] = Tunnel(self._loop, self, self._machine, number, is_own=True)
        self.run(effects)
        if first and tunnel.reason is None:
            self.write(self._machine.send(number, first))
        tunnel.attach(sock)
        return tunnel

    def on_frame(self, frame: Frame) -> None:
        """Handle a TUNNEL frame of the link.

        Raises:
            FrameError: the peer breaks the rules of tunnels; the link has to be closed.
        """
        self.run(self._machine.receive(frame))

    def close(self, reason: str) -> None:
        """Close every socket: the link is closed."""
        self._ready.clear()
        for tunnel in list(self._tunnels.values()):
            tunnel.close(reason)

    def drain(self) -> None:
        """Send what the sockets have, as far as there is room: the last words of their users, who have closed them."""
        for tunnel in list(self._tunnels.values()):
            while tunnel.read():
                continue

    def look(self, now_s: float, beat_s: float, limit_s: float) -> None:
        """Tell the peer of machines that fell silent at the sockets here, from a beat of silence on; at the limit, reset their tunnels."""
        for tunnel in list(self._tunnels.values()):
            silent_s = tunnel.silent_s(now_s)
            if silent_s >= limit_s:
                tunnel.close(f"that machine has not answered for {limit_s:g} s")
            elif silent_s >= beat_s or tunnel.told_silence:
                tunnel.told_silence = silent_s >= beat_s
                self.run(self._machine.tell_silence(tunnel.number, silent_s if tunnel.told_silence else 0.0))

    def abandon(self) -> None:
        """Close the descriptors only; for a forked child, whose parent goes on with the tunnels."""
        for tunnel in self._tunnels.values():
            tunnel.abandon()

    def statistics(self) -> PortalStatistics:
        """How many tunnels there are, and what waits in them."""
        return PortalStatistics(len(self._tunnels), self._machine.waiting_bytes)

    # --- for tunnels ---------------------------------------------------------------------------------------------

    def serve(self, tunnel: Tunnel) -> None:
        """Read from the tunnel's socket: now, if no other waits for its turn."""
        if not self._turn_due:
            if tunnel.read():
                self.serve_later(tunnel)
        else:
            self.serve_later(tunnel)

    def serve_later(self, tunnel: Tunnel) -> None:
        """Read from the tunnel's socket when it is its turn."""
        if not tunnel.in_turn:
            tunnel.in_turn = True
            self._ready.append(tunnel)
            if not self._turn_due:
                self._turn_due = True
                self._loop.call_soon(self._take_turns)

    def buffer(self, nbytes: int) -> memoryview:
        """Memory for one read; it is free again after `write`."""
        return self._buffer[:nbytes]

    def write(self, pieces: list[Buffer]) -> None:
        """Send a frame; without effect on a closed link, whose end is told in another way."""
        try:
            self._link.send(pieces)
        except LinkClosedError as exc:
            self._loop.call_soon(self.close, str(exc))

    def run(self, effects: list[Effect]) -> None:
        """Do what the state machine says."""
        for effect in effects:
            match effect:
                case Write(pieces):
                    self.write(pieces)
                case Arrived(number, data):
                    self._tunnels[number].deliver(data)
                case Room(number):
                    self.serve_later(self._tunnels[number])
                case Ended(number):
                    self._tunnels[number].end()
                case Broken(number, reason, code):
                    self._tunnels[number].break_off(reason, code)
                case Silence(number, seconds):
                    self._tunnels[number].silence_s = seconds
                case Opened(number, address):
                    self._lead(number, address)
                case _:
                    assert_never(effect)

    def forget(self, number: int) -> None:
        """The tunnel is closed."""
        self._tunnels.pop(number, None)

    def _lead(self, number: int, address: str) -> None:
        tunnel = self._tunnels[number] = Tunnel(self._loop, self, self._machine, number, is_own=False)
        try:
            self._connect(address, tunnel.attach, tunnel.close)
        except (OSError, ValueError) as exc:
            tunnel.close(f"can't connect to {address!r} ({exc})")

    def _take_turns(self) -> None:
        self._turn_due = False
        for _ in range(len(self._ready)):
            tunnel = self._ready.popleft()
            tunnel.in_turn = False
            if tunnel.read():
                self.serve_later(tunnel)


class Tunnel:
    """One tunnel at this end: a socket, and what waits for it. Thread: net loop."""

    __slots__ = (
        "_broken",
        "_ending",
        "_events",
        "_heard",
        "_hung_up",
        "_linger",
        "_loop",
        "_machine",
        "_paused",
        "_portal",
        "_queue",
        "_reads",
        "_shut",
        "_socket",
        "closed",
        "in_turn",
        "is_own",
        "number",
        "reason",
        "_pulse",
        "silence_s",
        "told_silence",
    )

    def __init__(self, loop: NetLoop, portal: Portal, machine: Tunnels, number: int, *, is_own: bool) -> None:
        self.is_own = is_own
        """This end has opened it."""
        self._pulse = Pulse()
        self.silence_s = 0.0
        """For how long nothing was heard of whoever is at the far end, as the peer said last."""
        self.told_silence = False
        """The peer knows that nothing is heard at this end."""
        self.closed = False
        self.in_turn = False
        self.reason: str | None = None
        """Why it is over or was refused, for people; None while it works and when both ends just ended."""
        self._loop = loop
        self._portal = portal
        self._machine = machine
        self.number = number
        self._socket: socket.socket | None = None
        """None until it is connected, and when closed."""
        self._events = -1
        """What the loop watches it for; -1: not at all."""
        self._queue: deque[memoryview] = deque()
        self._heard = False
        """Something came from the peer."""
        self._reads = True
        """Its end has not been read, and the peer may still want what comes."""
        self._paused = False
        """It may have bytes for which there is no room."""
        self._shut = False
        """It was told that nothing more comes."""
        self._ending = False
        """The peer has ended: shut it behind the queue."""
        self._broken = False
        """The tunnel is over: close it behind the queue."""
        self._hung_up = False
        """Whoever held the other end has closed it altogether."""
        self._linger: Timer | None = None

    def attach(self, sock: socket.socket) -> None:
        """Use a connected socket, which is the tunnel's from now on."""
        if self.closed:
            sock.close()
            return
        sock.setblocking(False)
        self._socket = sock
        self._flush()
        self._watch()

    def silent_s(self, now_s: float) -> float:
        """For how long nothing was heard of the machine at the other end of the socket; 0 where that can't be known."""
        return 0.0 if self._socket is None else self._pulse.silence_of(self._socket, now_s) or 0.0

    def close(self, reason: str | None = None, code: int = 0) -> None:
        """Close the socket; the peer hears the reason, unless both ends have ended."""
        if self.closed:
            return
        self.closed = True
        self.reason = self.reason or reason
        self._queue.clear()
        sock, self._socket = self._socket, None
        if sock is not None:
            self._loop.unwatch(sock.fileno())
            sock.close()
        self._stop_lingering()
        self._portal.forget(self.number)
        self._portal.run(self._machine.reset(self.number, reason or _GONE, code))

    def abandon(self) -> None:
        """Close the descriptor only."""
        if self._socket is not None:
            self._socket.close()

    # --- from the socket into the link ---------------------------------------------------------------------------

    def read(self) -> bool:
        """Send what the socket has, as far as there is room; True when it may have more, and wants another turn."""
        left = _TURN_BYTES
        while left > 0:
            sock = self._socket
            if sock is None or not self._reads:
                return False
            room = self._machine.room(self.number)
            if not room:
                self._pause()
                return False
            space = self._portal.buffer(min(room, left))
            try:
                count = sock.recv_into(space)
            except (BlockingIOError, InterruptedError):
                self._paused = False
                self._watch()
                return False
            except OSError as exc:
                self.close(_describe(exc))
                return False
            if not count:
                self._on_end()
                return False
            self._portal.write(self._machine.send(self.number, space[:count]))
            left -= count
            self._stop_lingering()
        return True

    def _pause(self) -> None:
        """Wait for room instead of for bytes."""
        self._paused = True
        if not self._hung_up:
            self._watch()
        elif self._linger is None and self._socket is not None:
            self._events = -1
            self._loop.unwatch(self._socket.fileno())  # there is nothing more to hear from it
            self._linger = self._loop.call_later(_LINGER_S, lambda: self.close(_GONE))

    def _stop_lingering(self) -> None:
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None

    def _on_end(self) -> None:
        self._reads = False
        if self._hung_up and not self._shut:
            self.close(_GONE)  # what comes from the peer would find nobody
            return
        self._portal.run(self._machine.finish(self.number))
        if self._shut:
            self.close()
        else:
            self._watch()

    # --- from the link into the socket ---------------------------------------------------------------------------

    def deliver(self, data: Buffer) -> None:
        """Write the next piece of the stream."""
        self._heard = True
        count, sock = 0, self._socket
        if sock is not None and not self._queue:
            try:
                count = sock.send(data)
            except (BlockingIOError, InterruptedError):
                count = 0
            except OSError as exc:
                self.close(_describe(exc))
                return
        if count < len(data):
            self._queue.append(memoryview(data)[count:])
            if len(self._queue) == 1 and sock is not None:
                self._watch()
        if count:
            self._portal.run(self._machine.consumed(self.number, count))

    def end(self) -> None:
        """The peer sends nothing more."""
        self._ending = True
        if not self._queue and self._socket is not None:
            self._finish_writing()

    def break_off(self, reason: str, code: int) -> None:
        """The tunnel is over; what has come is still written."""
        self.reason = reason
        if self.is_own and not self._heard and (words := self._portal.farewell(reason, code)):
            self._queue.append(memoryview(words))
        self._broken = True
        self._reads = False
        if self._queue and (self._socket is not None or self.is_own):  # our own gets its socket in this very turn
            self._flush()
            self._watch()
        else:
            self.close(reason)

    def _flush(self) -> None:
        queue, taken = self._queue, 0
        while queue and self._socket is not None:
            try:
                count = self._socket.sendmsg(list(islice(queue, _MOST_PIECES)))
            except (BlockingIOError, InterruptedError):
                break
            except OSError as exc:
                self.close(_describe(exc))
                return
            taken += count
            while count:
                piece = queue.popleft()
                if count < piece.nbytes:
                    queue.appendleft(piece[count:])
                    break
                count -= piece.nbytes
        if taken:
            self._portal.run(self._machine.consumed(self.number, taken))
        if not queue:
            self._finish_writing()

    def _finish_writing(self) -> None:
        sock = self._socket
        if sock is None or not (self._ending or self._broken):
            return
        if self._broken or not self._reads:
            self.close(self.reason)
            return
        self._shut = True
        try:
            sock.shutdown(socket.SHUT_WR)
        except OSError as exc:
            self.close(_describe(exc))

    # --- the loop ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        events = (READ if self._reads and not self._paused else 0) | (WRITE if self._queue else 0)
        if self._socket is not None and events != self._events:
            self._events = events
            self._loop.watch(self._socket.fileno(), events, self._on_ready)  # also for 0: that it broke is told all the same

    def _on_ready(self, mask: int) -> None:
        if mask & WRITE and self._queue:
            self._flush()
            self._watch()
        if mask & BROKEN:
            self._hung_up = True
            if not self._reads:
                self.close(_GONE)
        if mask & (READ | BROKEN):
            self._portal.serve(self)


def _describe(exc: OSError) -> str:
    return f"the connection broke ({exc.strerror or exc})"
