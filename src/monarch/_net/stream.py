"""Links: one ordered stream of frames to one peer process, over a Unix socket.

A sender's thread writes to the socket itself while nothing is queued; what the kernel does not take at once waits in
the outbox for the net thread. A link that is not connected yet queues everything, so a reference to a proc that is
still starting is used like any other.

Rules of this file:
    1. Frames leave in the order of `send`, whichever thread called it, and each leaves whole: an exception in the
       caller's thread (Ctrl-C) may lose a frame before it is accepted, never a part of one.
    2. Memory of the caller is not referred to after `send` returns.
    3. A descriptor is sent once per link and segment, in front of the first frame that uses it.

Read next: `local.py` for shared memory, `router.py` for who owns links.
"""

from __future__ import annotations

import array
import logging
import os
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from monarch._base.ids import ProcRef
from monarch._base.reused import is_settled
from monarch._net.loop import BROKEN, READ, WRITE, NetLoop, this_turn
from monarch._wire import messages
from monarch._wire.frames import Buffer, Decoder, Flag, Frame, FrameError, Kind, encode

if TYPE_CHECKING:
    from monarch._net.local import Segment, SegmentCache, SegmentPool

_logger = logging.getLogger("monarch.net")
_MAX_PIECES = 512
_FLUSH_BYTES = 1 << 20
_READS_PER_WAKEUP = 8
_NOTHING: tuple[list[Buffer], int, int] = ([], -1, 0)
_ANCILLARY_BYTES = socket.CMSG_SPACE(16 * array.array("i").itemsize)
_NOT_INHERITED = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
"""For descriptors that come: Python would leave them open in programs that this process starts."""
_MAX_PENDING_FDS = 64

PEER_CLOSED = "the peer closed the connection"
"""The reason of a connection whose other end was closed: as a rule its process has ended."""

FrameHandler: TypeAlias = Callable[["Link", Frame, Sequence[memoryview]], None]


class LinkClosedError(Exception):
    """The link is closed; nothing was sent. The runtime turns it into the error of whoever waits."""


class Link:
    """One ordered stream of frames to a peer. Thread: net loop only, except `send` and `send_control` (any thread)."""

    def __init__(
        self,
        loop: NetLoop,
        pool: SegmentPool | None,
        on_frame: FrameHandler,
        on_closed: Callable[[Link, str], None],
        max_frame_bytes: int,
    ) -> None:
        self.peer: ProcRef | None = None
        """Who is at the other end; None until its Hello."""
        self.peer_pid = 0
        self.closed: str | None = None
        """Why the link is closed; None while it can carry frames."""
        self._loop = loop
        self._pool = pool
        self._cache: SegmentCache | None = None
        self.on_frame = on_frame
        """Called with every frame."""
        self._on_closed = on_closed
        self._max_frame_bytes = max_frame_bytes
        self._decoder: Decoder | None = None
        self._socket: socket.socket | None = None
        self._lock = threading.RLock()
        self._busy = False
        self._outbox: deque[tuple[Buffer, int]] = deque()
        self._outbox_bytes = 0
        self._under_way: tuple[list[Buffer], int, int] = _NOTHING
        """Pieces, descriptor and length of the frame that `_sent` is about."""
        self._sent: list[int] = []
        """How much of it the kernel took; empty once the rest is in the outbox."""
        self._rest: tuple[Buffer, int] | None = None
        self._reads_to_the_end = False
        """Read until nothing is left. A Unix socket tells of its end apart, so there the last look can be saved; TCP does not."""
        self._maps_memory = True
        """The peer may refer to shared memory, and pass descriptors."""
        self._at_end = False
        """The peer has closed the connection; what it sent before may still be unread."""
        self._flush_wanted = False
        self._wants_room = False
        self._announced: set[int] = set()
        self._lent: Counter[int] = Counter()
        self._received_fds: deque[int] = deque()
        self._passing: set[int] = set()
        """Descriptors of our own that leave with a queued message."""
        self._released: deque[int] = deque()

    # --- connecting ----------------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """True while a socket is attached."""
        return self._socket is not None

    def attach(self, sock: socket.socket, first: list[Buffer]) -> None:
        """Use a connected socket from now on: `first` (a Hello) leaves first, then what was queued meanwhile."""
        sock.setblocking(False)
        with self._lock:
            self._decoder = Decoder(self._max_frame_bytes, maps_memory=self._maps_memory)
            self._socket = sock
            hello = b"".join(first)
            if hello:
                self._outbox.appendleft((hello, -1))
                self._outbox_bytes += len(hello)
        self._loop.watch(sock.fileno(), READ, self._on_ready)
        self._flush()

    def close(self, reason: str) -> None:
        """End the link; `on_closed` is told once. What is still queued is dropped."""
        with self._lock:
            if self.closed is not None:
                return
            self.closed = reason
            sock, self._socket = self._socket, None
            self._decoder = None
            self._outbox.clear()
            lent, self._lent = self._lent, Counter()
        if sock is not None:
            self._loop.unwatch(sock.fileno())
            sock.close()
        for fd in (*self._received_fds, *self._passing):
            os.close(fd)
        self._received_fds.clear()
        self._passing.clear()
        if self._cache is not None:
            self._cache.close()
        if self._pool is not None:
            for segment_id in lent.elements():
                self._pool.release(segment_id)
        self._on_closed(self, reason)

    def abandon(self) -> None:
        """Close the descriptor only; for a forked child, whose parent goes on with the link."""
        if self._socket is not None:
            abandon(self._socket)

    @property
    def queued_bytes(self) -> int:
        """What was sent and has not left this process."""
        return self._outbox_bytes

    # --- sending -------------------------------------------------------------------------------------------------

    def send_control(self, message: messages.Control, payload: Buffer = b"", *, port: int = 0) -> None:
        """Send a control message; see `send`."""
        self.send(encode(Kind.CONTROL, messages.encode(message), payload, port=port))

    def send_descriptor(self, message: messages.Control, fd: int) -> None:
        """Send a control message with a copy of `fd`, which `take_descriptor` gives to the receiver. Thread: net loop.

        Raises:
            LinkClosedError: the link is closed; nothing was sent.
        """
        with self._lock:
            if self.closed is not None:
                raise LinkClosedError(self.closed)
            copy = os.dup(fd)
            self._passing.add(copy)
            self._write(encode(Kind.CONTROL, messages.encode(message), b""), copy)
            self._close_passed()

    def _close_passed(self) -> None:
        waiting = {fd for _, fd in self._outbox}
        for fd in self._passing - waiting:
            self._passing.discard(fd)
            os.close(fd)

    def send(self, pieces: list[Buffer], segment: Segment | None = None) -> None:
        """Send one frame, behind all frames sent before.

        Args:
            pieces: the frame as `frames.encode` cut it; copied if they can't leave at once.
            segment: the shared memory that the frame's spans point into; it counts as lent to this link until the
                peer gives it back or the link closes.

        Raises:
            LinkClosedError: the link is closed; nothing was sent.
        """
        outer = this_turn.sending
        this_turn.sending = True
        try:
            self._send(pieces, segment)
        finally:
            this_turn.sending = outer

    def _send(self, pieces: list[Buffer], segment: Segment | None) -> None:
        with self._lock:
            if self.closed is not None:
                if segment is not None and self._pool is not None:
                    self._pool.release(segment.segment_id)
                raise LinkClosedError(self.closed)
            if segment is not None:
                self._lent[segment.segment_id] += 1
                if segment.segment_id not in self._announced:
                    self._announced.add(segment.segment_id)
                    self._write(encode(Kind.SEGMENT, b"", b"", port=segment.capacity, segment=segment.segment_id), segment.fd)
            self._write(pieces, -1)

    def _write(self, pieces: list[Buffer], fd: int) -> None:
        sock = self._socket
        sent = self._sent
        if self._busy or self._outbox or sent or sock is None:
            # Busy: a finaliser of this very thread sends while a send is under way.
            self._queue(b"".join(pieces), fd)
        else:
            self._transmit(sock, pieces, fd)

    def _transmit(self, sock: socket.socket, pieces: list[Buffer], fd: int) -> None:
        """Give a frame to the kernel; what it does not take goes into the outbox, which is empty."""
        sent = self._sent
        if len(pieces) > _MAX_PIECES:
            pieces = [b"".join(pieces)]
        total = sum(map(len, pieces))
        self._under_way = (pieces, fd, total)
        self._busy = True
        try:
            # One call from the interpreter's view: were `sendmsg` called on its own, a KeyboardInterrupt between its
            # return and the assignment would lose the count, and with it the frame boundaries of the whole stream.
            sent.extend(map(sock.sendmsg, (pieces,), (_ancillary(fd) if fd >= 0 else (),)))
        except (BlockingIOError, InterruptedError):
            sent.append(0)
        except OSError as exc:
            self._loop.call_soon(self._break_after_reading, describe(exc))
            return
        finally:
            self._busy = False
            if sent:
                self._keep_rest()
            self._under_way = _NOTHING
            if self._outbox:
                self._want_flush()

    def _keep_rest(self) -> None:
        """Put what the kernel did not take of the frame under way into the outbox; when interrupted, do so at the next call."""
        pieces, fd, total = self._under_way
        count = self._sent[0]
        if count < total and not (self._outbox and self._outbox[0] is self._rest):
            self._rest = (_rest_of(pieces, count), -1 if count else fd)
            self._outbox.appendleft(self._rest)
            self._outbox_bytes += total - count
        self._sent.clear()
        self._rest = None

    def _queue(self, data: Buffer, fd: int) -> None:
        self._outbox.append((data, fd))
        self._outbox_bytes += len(data)
        if self._socket is not None:
            self._want_flush()

    def _want_flush(self) -> None:
        if not self._flush_wanted:
            self._loop.call_soon(self._flush)
            self._flush_wanted = True  # behind the call: after an interrupt between the two nobody would ask again

    def _flush(self) -> None:
        with self._lock:
            self._flush_wanted = False
            sock = self._socket
            if sock is None or self._busy:
                return
            if self._sent:
                self._keep_rest()
            self._busy = True
            try:
                self._flush_to(sock)
            except OSError as exc:
                self._loop.call_soon(self._break_after_reading, describe(exc))
                return
            finally:
                self._busy = False
            if self._passing:
                self._close_passed()
            if self._wants_room != bool(self._outbox):
                self._wants_room = not self._wants_room
                self._loop.watch(sock.fileno(), READ | WRITE if self._wants_room else READ, self._on_ready)

    def _flush_to(self, sock: socket.socket) -> None:
        while self._outbox:
            data, fd = self._next_batch()
            try:
                count = sock.sendmsg((data,), _ancillary(fd) if fd >= 0 else ())
            except (BlockingIOError, InterruptedError):
                count = 0
            self._outbox_bytes -= count
            if count < len(data):
                self._outbox.appendleft((memoryview(data)[count:], -1 if count else fd))
                return

    def _next_batch(self) -> tuple[Buffer, int]:
        data, fd = self._outbox.popleft()
        if fd >= 0 or len(data) >= _FLUSH_BYTES:
            return data, fd
        batch, size = [data], len(data)
        while self._outbox and self._outbox[0][1] < 0 and size < _FLUSH_BYTES:
            batch.append(self._outbox.popleft()[0])
            size += len(batch[-1])
        return (data if len(batch) == 1 else b"".join(batch)), -1

    def close_after_reading(self, reason: str) -> None:
        """`close`, once what the peer had said before it ended is read."""
        if self._read():
            self._loop.call_soon(self.close_after_reading, reason)
        else:
            self.close(reason)

    def _break_after_reading(self, reason: str) -> None:
        """`_on_broken`, once what had come before is read."""
        if self._read():
            self._loop.call_soon(self._break_after_reading, reason)
        elif self._socket is not None:
            self._on_broken(reason)

    def _on_broken(self, reason: str) -> None:
        """The connection is gone."""
        self.close(reason)

    # --- receiving -----------------------------------------------------------------------------------------------

    def _on_ready(self, mask: int) -> None:
        if mask & BROKEN:
            self._at_end = True
        if mask & (READ | BROKEN):
            self._read()
        if mask & WRITE and self.closed is None:
            self._flush()

    def _read(self) -> bool:
        """Read what has come; True when there may be more, and the loop will call again."""
        for _ in range(_READS_PER_WAKEUP):
            sock, decoder = self._socket, self._decoder
            if sock is None or decoder is None:
                return False
            space = decoder.space()
            try:
                count, ancillary, flags, _ = sock.recvmsg_into((space,), _ANCILLARY_BYTES, _NOT_INHERITED)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as exc:
                self._on_broken(describe(exc))
                return False
            if count == 0:
                self._on_broken(PEER_CLOSED)
                return False
            try:
                if ancillary:
                    self._take_fds(ancillary)
                for frame in decoder.received(count):
                    self._dispatch(frame)
                    if self.closed is not None:
                        return False
            except (FrameError, messages.DecodeError) as exc:
                self._on_bad_frame(exc)
                return False
            # A read stops behind a descriptor, though more may follow. The end of the stream is told only once, perhaps
            # together with the last bytes.
            has_descriptor = ancillary or flags & socket.MSG_CTRUNC
            if count < len(space) and not has_descriptor and not self._at_end and not self._reads_to_the_end:
                return False
        self._loop.call_soon(self._read)
        return True

    def _on_bad_frame(self, exc: Exception) -> None:
        """The peer is no monarch, or a broken one: nothing behind this can be believed."""
        _logger.error("link closed: peer=%s protocol_error=%s", "unknown" if self.peer is None else self.peer.uid, exc)
        self.close(f"protocol error: {exc}")

    def _take_fds(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self._received_fds.extend(fds)
        if len(self._received_fds) > (_MAX_PENDING_FDS if self._maps_memory else 0):  # the link is closed, and closes them
            raise FrameError(f"{len(self._received_fds)} descriptors came without the messages that they belong to")

    def take_descriptor(self) -> int | None:
        """The descriptor that came with the message at hand; it is the caller's from now on. None: the kernel had none for this process."""
        return self._received_fds.popleft() if self._received_fds else None

    def _dispatch(self, frame: Frame) -> None:
        buffers = frame.buffers
        if frame.spans or frame.kind == Kind.SEGMENT:
            try:
                buffers = self._use_segment(frame)
            except (ValueError, OSError) as exc:
                raise FrameError(str(exc)) from exc
            if frame.kind == Kind.SEGMENT:
                return
        try:
            self.on_frame(self, frame, buffers)
        except (FrameError, messages.DecodeError):
            raise
        except Exception:
            self._loop.report()  # the frames behind it are none the worse

    def _use_segment(self, frame: Frame) -> Sequence[memoryview]:
        if frame.kind == Kind.SEGMENT:
            if not self._received_fds:
                raise FrameError("a segment was announced without its descriptor")
            if self._cache is None:
                from monarch._net.local import SegmentCache

                self._cache = SegmentCache()
            self._cache.add(frame.segment, self._received_fds.popleft(), frame.port)
            return ()
        if self._cache is None:
            raise FrameError("a frame refers to shared memory that was never announced")
        shared = bool(frame.flags & Flag.SHARED)
        return self._cache.views(frame.segment, frame.spans, shared=shared, on_release=self._on_release)

    # --- shared memory -------------------------------------------------------------------------------------------

    def _on_release(self, segment_id: int) -> None:
        # Any thread, also inside garbage collection: no lock may be taken here.
        self._released.append(segment_id)
        self._loop.call_soon(self._send_released)

    def _send_released(self) -> None:
        released = [self._released.popleft() for _ in range(len(self._released))]
        if released and self.closed is None:
            self.send_control(messages.ReleaseSegments(released))

    def take_back(self, segments: list[int]) -> None:
        """The peer gave these segments back."""
        if self._pool is None:
            return
        for segment_id in segments:
            with self._lock:
                if not self._lent[segment_id]:
                    continue
                self._lent[segment_id] -= 1
                if not self._lent[segment_id]:
                    del self._lent[segment_id]
            self._pool.release(segment_id)

    def forget_segments(self, segments: Sequence[int]) -> None:
        """Our pool closed these segments: tell the peer, if it knows them, to unmap them."""
        known = [s for s in segments if s in self._announced]
        if known and self.closed is None:
            self._announced.difference_update(known)
            self.send_control(messages.DropSegments(known))

    def drop_segments(self, segments: list[int]) -> None:
        """The peer closed these segments of its own."""
        if self._cache is not None:
            for segment_id in segments:
                self._cache.drop(segment_id)


def _ancillary(fd: int) -> list[tuple[int, int, array.array[int]]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]


def _rest_of(pieces: list[Buffer], count: int) -> Buffer:
    """What follows the first `count` bytes; copied, unless it can't change."""
    for index, piece in enumerate(pieces):
        if count < len(piece):
            if index == len(pieces) - 1 and is_settled(memoryview(piece)):
                return memoryview(piece)[count:]
            return b"".join((memoryview(piece)[count:], *pieces[index + 1 :]))
        count -= len(piece)
    return b""


def abandon(sock: Any) -> None:
    """Close the descriptor of a socket in a forked child. A TLS socket has more to close, and a lock that may be held for ever."""
    getattr(sock, "abandon", sock.close)()


def describe(exc: OSError) -> str:
    """What became of a connection, for people."""
    return f"the connection broke ({exc.strerror or exc})"
