"""Session links: links between hosts, which outlive their connections.

A frame counts as sent once it is kept (`_wire/session.py`); from there it goes into the connection of the day. When that
breaks, the link is *detached*: it goes on taking frames, and the router sees to the next connection, over which both ends
send again what the other has not received. A link that is closed on purpose says so, and the other end closes at once.

Rules of this file:
    1. `_written` says which kept frames have gone into the connection; a frame goes in once per connection, in order.
    2. The first frame on every connection is a Hello. It is no part of the session, and neither are acknowledgements.
    3. Nothing but Hello is sent on a new connection before it is known what the peer has received.
    4. A peer that asks and asks and does not read the answers is not read either, until it has. Only the end that was dialled
       does this: the other one always reads, so two that both send much never wait for each other.

Read next: `net_router.py`, which finds the next connection; `liveness.py`, which says when one is dead.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch import config
from monarch._base.ids import random_id
from monarch._net.kept_frame import LONG_BYTES, KeptFrame
from monarch._net.liveness import Pulse
from monarch._net.loop import READ, NetLoop, Timer
from monarch._net.sockets import origin_of, text_of
from monarch._net.stream import FrameHandler, Link, describe
from monarch._wire.frames import PREFIX, Buffer, Frame, FrameError, Kind, encode
from monarch._wire.session import Incoming, Outgoing

if TYPE_CHECKING:
    from monarch._base.ids import ProcRef

_ACK_BYTES = 1 << 20
_REFILL_BYTES = 1 << 20
_CLOGGED_FRAMES, _CLOGGED_BYTES = 16384, 32 << 20
"""An end that has so many frames, or more than a few frames and so many bytes, unsent, is clogged (rule 4)."""
_FEW_FRAMES = 64
"""A large value or two on their way are no reason to stop listening."""
_MAX_REASON_BYTES = 512


class SessionLink(Link):
    """One ordered stream of frames to a process of another host. Thread: as `Link`."""

    def __init__(
        self,
        loop: NetLoop,
        peer: ProcRef | None,
        on_hello: FrameHandler,
        on_detached: Callable[[SessionLink, str], None],
        on_closed: Callable[[Link, str], None],
        max_frame_bytes: int,
    ) -> None:
        """Args:
        peer: whom to dial; None: the peer dials, and names itself.
        on_hello: told the first frame of every connection.
        on_detached: told that a connection is lost; the link is left without one.
        """
        super().__init__(loop, None, _too_early, on_closed, max_frame_bytes)
        self.peer = peer
        self.session = "" if peer is None else random_id()
        """Unique id of the session; chosen by who dials."""
        self.dials = peer is not None
        """This end makes the connections."""
        self.greeted = False
        """The peer has said Hello once, on this connection or one before."""
        self.heard_s = loop.now_s()
        """When something last came from the peer."""
        self.was_connected = False
        """It has had a connection; from then on only the peer's Hello says what the peer has received."""
        self.suspected = False
        """Nothing is heard of the peer."""
        self.peer_epoch = 0
        """`Hello.epoch` of the process at the other end."""
        self.is_forgotten = False
        """The process at the other end lives, and has given this session up."""
        self.origin = ""
        """The machine at the other end, as far as that can be seen."""
        self.num_redials = 0
        """How often dialling was begun anew, for want of an answer, since the last connection."""
        self.pulse = Pulse()
        """Judges the connection of the day."""
        self.patience_s = 0.0
        """For how long it may be without a sign of life."""
        self.silent_s = 0.0
        """For how long that was so when it was last looked at, while it is suspected."""
        self.detached_s: float | None = None
        """Since when the link has no connection, after it had one."""
        self.story = ""
        """Why the last connection was lost, or could not be made."""
        self._reads_to_the_end = True
        self._maps_memory = False
        self._on_hello = on_hello
        self._on_detached = on_detached
        self._first = True
        self._heir: SessionLink | None = None
        self._outgoing: Outgoing[bytes | KeptFrame] = Outgoing(_let_go)
        self._incoming = Incoming(config.value("message_ack_every_n_messages"), _ACK_BYTES)
        self._ack_s = config.seconds("message_ack_time_interval")
        self._ack_timer: Timer | None = None
        self._flowing = False
        self._written = 0
        """How many frames of the session have gone into the connection."""
        self._paused = False
        """It has stopped reading, because it is clogged."""
        self._behind: list[bytes] | None = None
        """Frames that finalisers have sent while a long one is being copied, which they follow; None: none is."""
        self._number = 0
        """What `_written` becomes once the frame under way is with the kernel or in the outbox; 0: it is no part of the session."""

    # --- connections ---------------------------------------------------------------------------------------------

    @property
    def received(self) -> int:
        """Frames received so far."""
        return self._incoming.received

    @property
    def connection(self) -> Any:
        """The socket of the connection; None when detached."""
        return self._socket

    def attach(self, sock: socket.socket, first: list[Buffer]) -> None:
        """Use a connected socket from now on; frames wait for `resume`."""
        if self._socket is not None:
            self._detach("another connection takes its place")
        self.detached_s = None
        self.was_connected = True
        self.num_redials = 0
        self.suspected = False
        self.pulse = Pulse()
        self._first = True
        self.heard_s = self._loop.now_s()
        with contextlib.suppress(OSError):  # it has ended meanwhile
            self.origin = origin_of(text_of(sock.getpeername()))
        super().attach(sock, first)
        self._loop.call_soon(self._read)  # what a TLS layer has read ahead makes no socket readable

    def resume(self, received: int) -> None:
        """The peer has received so many frames: send the others, unless they flow already (on a first connection).

        Raises:
            FrameError: that can't be.
        """
        with self._lock:
            self._check_written(received)
            self._outgoing.resume(received)
            if not self._flowing:
                self._written = received
                self._flowing = True
        self._flush()

    def take_over(self, other: SessionLink, first: list[Buffer], received: int) -> None:
        """Go on with the connection of `other`, whose peer has said that it is for this session.

        Args:
            first: a Hello, which leaves first.
            received: how many frames of this session the peer has.
        """
        sock, decoder = other._socket, other._decoder
        assert sock is not None
        if self._socket is not None:
            self._detach("the peer has made another connection")
        other._loop.unwatch(sock.fileno())
        other._socket = other._decoder = None
        other._heir = self
        self.detached_s = None
        self.was_connected = True
        self.num_redials = 0
        self.suspected = False
        self.pulse = Pulse()
        self.origin = other.origin
        self.peer_pid = other.peer_pid
        self.heard_s = self._loop.now_s()
        self._first = False  # it was the Hello
        with self._lock:
            self._decoder = decoder
            self._socket = sock
            self._queue(b"".join(first), -1)
        self._loop.watch(sock.fileno(), READ, self._on_ready)
        self.resume(received)
        self._loop.call_soon(self._read)

    def say_apart(self, first: list[Buffer]) -> None:
        """Send a Hello, before anything else flows."""
        with self._lock:
            self._queue(b"".join(first), -1)
        self._flush()

    def _detach(self, reason: str) -> None:
        with self._lock:
            sock, self._socket = self._socket, None
            self._decoder = None
            self._flowing = False
            self._paused = False
            self._written = max(self._written, self._number)  # interrupted: it may have left whole
            self._number = 0
            self._outbox.clear()
            self._outbox_bytes = 0
            self._sent.clear()
            self._wants_room = False
        self.story = reason
        if sock is not None:
            self._loop.unwatch(sock.fileno())
            sock.close()

    def _on_broken(self, reason: str) -> None:
        if self.closed is not None:
            return
        self._detach(reason)
        self._at_end = False
        self.detached_s = self._loop.now_s()
        self._on_detached(self, reason)

    def ask_for_a_sign(self) -> None:
        """Make the peer's kernel acknowledge something."""
        self._send_apart(encode(Kind.ACK, b"", b"", port=self._incoming.acknowledge()))

    def break_connection(self, reason: str) -> None:
        """The connection is taken for dead."""
        self._on_broken(reason)

    def close_after_reading(self, reason: str) -> None:
        """`close`, once what the peer had said before it ended is read."""
        if self._socket is not None and self._read():
            self._loop.call_soon(self.close_after_reading, reason)
        else:
            self.close(reason)

    def close(self, reason: str) -> None:
        """End the session; the peer is told, if there is a connection with room for it."""
        with self._lock:
            sock = self._socket
            if self.closed is None and sock is not None and self._flowing and not self._outbox and not self._busy:
                try:
                    sock.sendmsg(encode(Kind.BYE, b"", reason.encode()[:_MAX_REASON_BYTES]))
                except OSError:
                    self.story = "the connection broke as it was closed"
        if self._ack_timer is not None:
            self._ack_timer.cancel()
        super().close(reason)
        with self._lock:
            self._outgoing.clear()

    # --- sending -------------------------------------------------------------------------------------------------

    @property
    def queued_bytes(self) -> int:
        """What was sent and has not left this process."""
        with self._lock:
            return self._outbox_bytes + sum(map(len, self._outgoing.from_(self._written)))

    def _clogged(self) -> bool:
        """What this end has to say piles up (rule 4). Cost: O(unsent frames), where there are many."""
        if self.dials or not self._flowing or self._outgoing.sent - self._written < _FEW_FRAMES:
            return False
        with self._lock:
            unsent = self._outgoing.sent - self._written
            return unsent >= _CLOGGED_FRAMES or sum(map(len, self._outgoing.from_(self._written))) >= _CLOGGED_BYTES

    def _check_written(self, received: int) -> None:
        """A peer can't have received what never went into a connection.

        Raises:
            FrameError: it says that it has.
        """
        written = max(self._written, self._number)
        if received > written:
            raise FrameError(f"the peer has received {received} frames, but {written} were sent")

    def _write(self, pieces: list[Buffer], fd: int) -> None:
        if self._behind is not None:
            self._behind.append(b"".join(pieces))
            return
        size = sum(map(len, pieces))
        if size >= LONG_BYTES:
            self._write_long(pieces, size)
            return
        outgoing = self._outgoing
        data = b"".join(pieces)
        outgoing.keep(data)
        sock = self._socket
        if not self._flowing or sock is None:
            return
        if self._busy or self._outbox or self._sent or self._written != outgoing.sent - 1:
            self._want_flush()
            return
        self._number = outgoing.sent
        self._transmit(sock, [data], -1)

    def _write_long(self, pieces: list[Buffer], size: int) -> None:
        """Copy a long frame, and let the kernel take what is copied while the rest is.

        Its last piece leaves once the frame is kept: the peer never has one that does not count.
        """
        outgoing, frame, sock = self._outgoing, KeptFrame(), self._socket
        may_flow = self._flowing and not (self._busy or self._outbox or self._sent) and self._written == outgoing.sent
        waiting: deque[Buffer] = deque()
        was_busy, done = self._busy, False
        self._behind, self._busy = [], True
        try:
            for piece in frame.copy(pieces):
                if may_flow and sock is not None:
                    waiting.append(piece)
                    may_flow = len(frame) == size or self._push(sock, waiting)
            outgoing.keep(frame)
            if may_flow and sock is not None:
                self._finish_long(sock, waiting)
            done = True
        finally:
            behind, self._behind, self._busy = self._behind, None, was_busy
            if not done and may_flow:  # Ctrl-C: nobody knows what has left, so the next connection begins with what the peer has
                self._flowing = False
                self._loop.call_soon(self._on_broken, "a send was interrupted")
            for data in behind:
                outgoing.keep(data)
        if self._flowing:
            self._want_flush()

    def _finish_long(self, sock: socket.socket, waiting: deque[Buffer]) -> None:
        if len(waiting) == 1:
            self._number = number = self._written + 1
            self._transmit(sock, [waiting[0]], -1)
            self._flowing = self._written == number  # or the connection is broken: the frame leaves whole on the next one
        else:
            self._written += 1
            self._outbox.extend((piece, -1) for piece in waiting)
            self._outbox_bytes += sum(map(len, waiting))

    def _push(self, sock: socket.socket, waiting: deque[Buffer]) -> bool:
        """Send what waits as far as the kernel takes it; False: the connection is broken, and the frame goes out on the next one."""
        try:
            while waiting:
                count = sock.sendmsg((waiting[0],))
                if count < len(waiting[0]):
                    waiting[0] = memoryview(waiting[0])[count:]
                else:
                    waiting.popleft()
        except (BlockingIOError, InterruptedError):
            return True
        except OSError as exc:
            self._flowing = False
            self._loop.call_soon(self._break_after_reading, describe(exc))
            return False
        return True

    def _keep_rest(self) -> None:
        if self._number:
            self._written = self._number
        super()._keep_rest()
        self._number = 0

    def _flush(self) -> None:
        super()._flush()
        if self._paused and not self._clogged():
            self._paused = False
            self._loop.call_soon(self._read)

    def _flush_to(self, sock: socket.socket) -> None:
        while True:
            super()._flush_to(sock)
            if self._outbox or not self._flowing:
                return
            size = 0
            for frame in self._outgoing.from_(self._written):
                self._outbox.extend((piece, -1) for piece in (frame.pieces if isinstance(frame, KeptFrame) else (frame,)))
                self._outbox_bytes += len(frame)
                self._written += 1
                size += len(frame)
                if size >= _REFILL_BYTES:
                    break
            if not size:
                return

    def _send_apart(self, pieces: list[Buffer]) -> None:
        """Send a frame that is no part of the session; dropped without a connection."""
        with self._lock:
            sock = self._socket
            if sock is None or not self._flowing:
                return
            if self._busy or self._outbox or self._sent:
                self._queue(b"".join(pieces), -1)
            else:
                self._number = 0
                self._transmit(sock, pieces, -1)

    # --- receiving -----------------------------------------------------------------------------------------------

    def _on_ready(self, mask: int) -> None:
        if mask & READ:
            self.heard_s = self._loop.now_s()
        super()._on_ready(mask)

    def _read(self) -> bool:
        if self._clogged():
            self._paused = True  # the end of the connection is seen by who writes
            return False
        return super()._read()

    def _on_bad_frame(self, exc: Exception) -> None:
        heir = self._heir
        if heir is None:
            super()._on_bad_frame(exc)
        else:
            heir._on_bad_frame(exc)

    def _dispatch(self, frame: Frame) -> None:
        heir = self._heir
        if heir is not None:
            if heir.closed is None:
                heir._dispatch(frame)
        elif self._first:
            self._first = False
            self._on_hello(self, frame, frame.buffers)
        elif frame.kind == Kind.ACK:
            with self._lock:
                self._check_written(frame.port)
                self._outgoing.acknowledge(frame.port)
        elif frame.kind == Kind.BYE:
            self.close(bytes(frame.payload[:_MAX_REASON_BYTES]).decode(errors="replace"))
        elif frame.spans or frame.kind == Kind.SEGMENT:
            raise FrameError("a process of another host refers to shared memory")
        else:
            self._count(frame)
            super()._dispatch(frame)

    def _count(self, frame: Frame) -> None:
        size = PREFIX.size + len(frame.header) + len(frame.payload) + sum(buffer.nbytes for buffer in frame.buffers)
        if self._incoming.count(size):
            self._acknowledge()
        elif self._ack_timer is None:
            self._ack_timer = self._loop.call_later(self._ack_s, self._acknowledge)

    def _acknowledge(self) -> None:
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None
        if self._incoming.owes and self.closed is None:
            self._send_apart(encode(Kind.ACK, b"", b"", port=self._incoming.acknowledge()))


def _let_go(frame: bytes | KeptFrame) -> None:
    if isinstance(frame, KeptFrame):
        frame.free()


def _too_early(link: Link, frame: Frame, _buffers: Any) -> None:
    raise FrameError("a frame came before the Hello")
