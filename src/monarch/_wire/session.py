"""Sessions: one ordered stream of frames over successive connections.

Each end numbers the frames it sends and keeps them until the other has acknowledged them. After a connection is lost, both
say on the next one how many they had received; what is missing is sent again. So a cut costs time, never a frame.

Pure: frames and numbers go in, frames and numbers come out. `_net/session_link.py` does the I/O.

Rules of this file:
    1. A frame is kept until it is acknowledged, whole: half a frame that came is thrown away with its connection.
    2. Numbers count frames from the beginning of the session and never wrap (64 bits).
    3. A peer that acknowledges what was never sent, or takes back what it acknowledged, is broken.

Read next: `_net/session_link.py`, the driver.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Generic, TypeVar

from monarch._wire.frames import FrameError

F = TypeVar("F")


class Outgoing(Generic[F]):
    """What one end has sent, as frames of any form. Thread: one at a time."""

    __slots__ = ("_acknowledged", "_kept", "_let_go")

    def __init__(self, let_go: Callable[[F], object] | None = None) -> None:
        """Args:
        let_go: told each frame that need not be kept any more.
        """
        self._kept: deque[F] = deque()
        self._let_go = let_go
        self._acknowledged = 0

    @property
    def sent(self) -> int:
        """Frames sent so far."""
        return self._acknowledged + len(self._kept)

    @property
    def last(self) -> F:
        """The frame that was sent last; IndexError when all are acknowledged."""
        return self._kept[-1]

    def keep(self, frame: F) -> None:
        """One more frame is sent. One step: an exception in the caller's thread (Ctrl-C) comes before or behind it."""
        self._kept.append(frame)

    def from_(self, number: int) -> Iterator[F]:
        """The frames that follow the first `number` ones of the session."""
        return islice(self._kept, number - self._acknowledged, None)

    def acknowledge(self, received: int) -> None:
        """The other end has received so many frames in all. Cost: O(frames that are let go).

        Raises:
            FrameError: more than were sent.
        """
        if received > self.sent:
            raise FrameError(f"the peer acknowledges {received} frames, but {self.sent} were sent")
        kept = self._kept
        while self._acknowledged < received:
            self._acknowledged += 1
            frame = kept.popleft()
            if self._let_go is not None:
                self._let_go(frame)

    def clear(self) -> None:
        """The session is over."""
        self.acknowledge(self.sent)

    def resume(self, received: int) -> None:
        """The other end says on a new connection how many frames it has received.

        Raises:
            FrameError: its number does not fit; the session can't go on.
        """
        if received < self._acknowledged:
            raise FrameError(f"the peer has received {received} frames, but acknowledged {self._acknowledged} before")
        self.acknowledge(received)


class Incoming:
    """What one end has received, and when to say so. Thread: one at a time."""

    __slots__ = ("_bytes", "_frames", "_max_bytes", "_max_frames", "received")

    def __init__(self, max_frames: int, max_bytes: int) -> None:
        """Args:
        max_frames: after so many frames an acknowledgement is due at once,
        max_bytes: and after so many bytes.
        """
        self.received = 0
        """Frames received so far."""
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        self._frames = 0
        self._bytes = 0

    @property
    def owes(self) -> bool:
        """Something was received that has not been acknowledged."""
        return self._frames > 0

    def count(self, nbytes: int) -> bool:
        """One more frame has come; True: acknowledge now."""
        self.received += 1
        self._frames += 1
        self._bytes += nbytes
        return self._frames >= self._max_frames or self._bytes >= self._max_bytes

    def acknowledge(self) -> int:
        """How many frames to acknowledge."""
        self._frames = self._bytes = 0
        return self.received
