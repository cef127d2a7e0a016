"""Routes: which link leads to which proc. Dials on demand, accepts, and checks who is at the other end.

Rules of this file:
    1. All frames to one proc leave by one link, the first that was known, so their order holds; a second link (both
       ends dialled at once) is only read.
    2. A connection is served after both kernels say that the peer runs under our own user id, and after its Hello.
    3. A process that was lost stays lost, and is dialled again only after `readmit`.

Read next: `_runtime/proc.py`, which owns a router per process.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

import monarch._wire.frames as frames
from monarch._base.ids import ProcRef, is_agent
from monarch._net.loop import READ, NetLoop, Timer
from monarch._net.stream import Link
from monarch._wire import messages
from monarch._wire.frames import Frame, FrameError, Kind

if TYPE_CHECKING:
    from monarch._net.greeter import Greeting
    from monarch._net.handshake import Preface
    from monarch._net.local import SegmentPool

PROTOCOL_VERSION = "1"
_BACKLOG = 4096
_REDIAL_S = 0.005
_MAX_LOST = 16384
_SCHEME = "ipc://"


class Events(Protocol):
    """What a router tells its process. Thread: net loop."""

    def on_peer(self, ref: ProcRef) -> None:
        """A process has said Hello."""

    def on_hello(self, hello: messages.Hello) -> None:
        """A process has said Hello."""

    def on_frame(self, link: Link, frame: Frame, buffers: Sequence[memoryview]) -> None:
        """A frame other than Hello came in."""

    def on_unreachable(self, ref: ProcRef, reason: str) -> None:
        """Dialling `ref` failed; its link still queues. Answer with `dial` or `lose`."""

    def on_denied(self, ref: ProcRef, reason: str) -> None:
        """`ref` and this process do not trust, or do not understand, each other; another attempt would end the same way."""

    def on_reach(self, ref: ProcRef) -> None:
        """`ref` can't be dialled from here: somebody may ask it to dial this process."""

    def on_visitor(self, preface: Preface, greeting: Greeting) -> None:
        """A connection from another host is for the process `preface.target` of this one: answer it (`Greeting`)."""

    def on_forgotten(self, ref: ProcRef, reason: str) -> None:
        """`ref` lives, and took this process for lost when their connection was: what was under way either way is gone."""

    def on_lost(self, ref: ProcRef, reason: str, pid: int) -> None:
        """The link to `ref`, the process `pid` (0: it had not said Hello), is closed; nothing more comes from it."""


class Router:
    """The links of one process. Thread: any for `link_to`; net loop for the rest."""

    def __init__(
        self,
        loop: NetLoop,
        own: ProcRef,
        pool: SegmentPool | None,
        events: Events,
        max_frame_bytes: int,
        path_of: Callable[[str], str | None] = lambda address: socket_path(address),
    ) -> None:
        """Args:
        path_of: the socket file of an address; None: this router does not lead there.
        """
        self.own = own
        self.epoch = 0
        """Which process under this id this one is: a later one has a larger number."""
        self.takers: dict[str, Callable[[Any], None]] = {}
        """Who is told of connections of other hosts that carry no frames, by what they ask for, `~<name>`."""
        self._path_of = path_of
        self._loop = loop
        self._pool = pool
        self._events = events
        self._max_frame_bytes = max_frame_bytes
        self._links: dict[str, Link] = {}
        self._all: set[Link] = set()
        self._lost: dict[str, str] = {}
        self._expected: set[str] = set()
        """Those that do not listen yet: `dial_expected` will say when they do."""
        self._stories: dict[str, str] = {}
        """Why the first connection to somebody has not come about yet."""
        self._listeners: dict[socket.socket, Timer | None] = {}
        """Each with the timer that looks at it again after there was no descriptor left."""

    # --- any thread ----------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """This process, as its Hello says."""
        return os.getpid()

    def link_to(self, ref: ProcRef, *, dial: bool = True) -> Link:
        """The link to a proc, made on first use; it queues until it is connected.

        Args:
            dial: connect now; False: somebody calls `dial` when the proc is up.
        """
        link = self._links.get(ref.uid)
        if link is None:
            link = self._links.setdefault(ref.uid, self._new_link(ref))
            reason = self._lost.get(ref.uid)  # behind the entry: `lose` looks for a link after it has made its own
            if reason is not None:
                self._links.pop(ref.uid, None)
                link.closed = reason
            elif dial and ref.uid not in self._expected:  # behind the entry, too: `dial_expected` looks for a link last
                self._loop.call_soon(self.dial, ref)
        return link

    def expect(self, ref: ProcRef) -> None:
        """`ref` does not listen yet: what is sent to it waits for `dial_expected`."""
        self._expected.add(ref.uid)

    def story_of(self, ref: ProcRef) -> str:
        """Why `ref` could not be dialled so far; "" when it was, or when nothing is known."""
        return self._stories.get(ref.uid, "")

    def readmit(self, ref: ProcRef) -> None:
        """A lost process may have come back under its old id (a host agent at its address): dial it anew."""
        if self._lost.pop(ref.uid, None) is not None:
            self._links.pop(ref.uid, None)

    def queued_bytes(self) -> int:
        """What waits for its link: to be connected, or to have room."""
        return sum(link.queued_bytes for link in {*self._all, *self._links.values()} if link.closed is None)

    def statistics(self) -> dict[str, int]:
        """How many links are known, connected and lost."""
        return {"links": len(self._links), "connected": sum(link.connected for link in self._all), "lost": len(self._lost)}

    # --- net loop ------------------------------------------------------------------------------------------------

    def listen(self, sock: socket.socket) -> None:
        """Serve connections from `sock`, which is bound and listening."""
        self._listeners[sock] = None
        sock.setblocking(False)
        self._loop.watch(sock.fileno(), READ, lambda _mask: self._on_connection(sock))

    def dial(self, ref: ProcRef) -> None:
        """Connect the link to `ref` unless it is connected or lost."""
        link = self._links.get(ref.uid)
        if link is None or link.connected or link.closed is not None:
            return
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:  # no descriptor left
            self._loop.call_later(_REDIAL_S, lambda: self.dial(ref))
            return
        sock.setblocking(False)
        code = sock.connect_ex(self._path_of(ref.address) or "")
        if code == errno.EAGAIN:  # its backlog is full
            sock.close()
            self._loop.call_later(_REDIAL_S, lambda: self.dial(ref))
        elif code:
            sock.close()
            self._stories[ref.uid] = os.strerror(code)
            self._events.on_unreachable(ref, os.strerror(code))
        else:
            self.adopt(sock, link)

    def dial_expected(self, ref: ProcRef) -> None:
        """`ref` listens now: dial it if anything is to be sent there."""
        self._expected.discard(ref.uid)
        self.dial(ref)

    def adopt(self, sock: socket.socket, link: Link | None = None) -> Link:
        """Serve a connected socket; without `link` the peer names itself."""
        if link is None:
            link = self._new_link(None)
        self._all.add(link)
        if _peer_uid(sock) not in (os.geteuid(), None):
            sock.close()
            link.close("the peer runs under another user id")
        else:
            hello = messages.Hello(self.own, os.getpid(), PROTOCOL_VERSION, epoch=self.epoch)
            link.attach(sock, frames.encode(Kind.CONTROL, messages.encode(hello), b""))
        return link

    def lose(self, ref: ProcRef, reason: str) -> None:
        """Close every link to `ref` and refuse it from now on."""
        self._expected.discard(ref.uid)
        if ref.uid in self._lost:
            return
        if len(self._lost) >= _MAX_LOST:
            self._stories.pop(forgotten := next(iter(self._lost)), None)
            del self._lost[forgotten]
        self._lost[ref.uid] = reason
        self.renew(ref, reason)

    def peer_of(self, uid: str) -> ProcRef | None:
        """The process of that id, when there is a link to it."""
        link = self._links.get(uid)
        return None if link is None else link.peer

    def peers(self) -> list[ProcRef]:
        """The processes that there is a connected link to."""
        return [link.peer for link in self._links.values() if link.peer is not None and link.connected]

    def serves(self, ref: ProcRef) -> bool:
        """Whether what is sent to `ref` now can still reach it: its link is open, or there is none yet."""
        link = self._links.get(ref.uid)
        return link is None or link.closed is None

    def renew(self, ref: ProcRef, reason: str, pid: int = 0) -> None:
        """Close every link to `ref`, whose process is gone; the next one under its id gets a link of its own.

        Args:
            pid: the process that is gone; links to its successor stay. 0: unknown, all are closed.
        """

        def is_of_successor(link: Link) -> bool:
            return link.connected and 0 not in (pid, link.peer_pid) and link.peer_pid != pid

        link = self._links.get(ref.uid)
        if link is not None and is_of_successor(link):
            link = None
        else:
            self._links.pop(ref.uid, None)
        others = [other for other in self._all if other.peer is not None and other.peer.uid == ref.uid and not is_of_successor(other)]
        for open_link in {*others, *([link] if link is not None and link.closed is None else [])}:
            open_link.close_after_reading(reason)

    def supersede(self, ref: ProcRef, reason: str) -> int:
        """From now on frames to `ref` queue for its successor, until somebody dials that.

        Returns:
            The process that is superseded, as far as it is known; else 0.
        """
        old = self._links.get(ref.uid)
        self._links[ref.uid] = self._new_link(ref)
        others = [link for link in self._all if link.peer is not None and link.peer.uid == ref.uid]
        for link in {*others, *([old] if old is not None and old.closed is None else [])}:
            self._loop.call_soon(link.close_after_reading, reason)  # this may be called while a frame of that link is handled
        return 0 if old is None else old.peer_pid

    def has_link(self, uid: str) -> bool:
        """Whether anything may have been sent to a process."""
        return uid in self._links

    def is_near(self, ref: ProcRef) -> bool:
        """Whether `ref` is reached by a socket file, over which descriptors travel."""
        return self._path_of(ref.address) is not None

    def is_connected(self, ref: ProcRef) -> bool:
        """Whether there is a connected link to `ref`."""
        link = self._links.get(ref.uid)
        return link is not None and link.connected

    def dial_back(self, ref: ProcRef) -> None:
        """Make a link to `ref`, which has asked for one."""
        if not self.is_connected(ref):
            self.link_to(ref)

    def greet(self, sock: socket.socket, preface: Preface, peer: str) -> None:
        """Serve a connection of another host, whose preface was read by this host's agent."""
        sock.close()
        raise FrameError("this router serves no other hosts")

    def forget_segments(self, segments: Sequence[int]) -> None:
        """Tell every peer that our pool closed these segments."""
        for link in list(self._all):
            link.forget_segments(segments)

    def close(self, reason: str) -> None:
        """Close all links and listening sockets."""
        for listener in self._listeners:
            self._loop.unwatch(listener.fileno())
            listener.close()
        self._listeners.clear()
        for link in {*self._all, *self._links.values()}:
            link.close(reason)

    def abandon(self) -> None:
        """Close the descriptors only; for a forked child, whose parent goes on with the links."""
        for link in [*self._all, *self._links.values()]:
            link.abandon()
        for listener in self._listeners:
            listener.close()

    def _new_link(self, ref: ProcRef | None) -> Link:
        link = Link(self._loop, self._pool, self._on_frame, self._on_closed, self._max_frame_bytes)
        link.peer = ref
        return link

    def _on_connection(self, listener: socket.socket) -> None:
        while listener in self._listeners:
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError:  # no descriptor left, and who waits in the backlog is not told a second time
                timer = self._listeners.get(listener)
                if timer is None or not timer.pending:
                    self._listeners[listener] = self._loop.call_later(_REDIAL_S, lambda: self._on_connection(listener))
                return
            self.adopt(sock)

    def _on_frame(self, link: Link, frame: Frame, buffers: Sequence[memoryview]) -> None:
        """The first frame of a link."""
        hello = self._checked_hello(link, frame)
        if hello is not None:
            link.on_frame = self._events.on_frame
            self._introduce(link, hello)

    def _checked_hello(self, link: Link, frame: Frame) -> messages.Hello | None:
        """The Hello of a peer that may be served; None when it may not, and the link was closed."""
        hello = messages.decode_control(frame.header) if frame.kind == Kind.CONTROL else None
        if not isinstance(hello, messages.Hello):
            raise FrameError("the first frame is no Hello")
        if hello.version != PROTOCOL_VERSION:
            raise FrameError(f"the peer speaks protocol {hello.version}, we speak {PROTOCOL_VERSION}")
        if link.peer is not None and link.peer.uid != hello.proc.uid:
            if not (is_agent(link.peer) and is_agent(hello.proc)):
                raise FrameError(f"{hello.proc.uid} answers at the address of {link.peer.uid}")
            # Whoever serves at an agent's address is that agent, by whichever of its names it was dialled.
            hello = msgspec.structs.replace(hello, proc=link.peer)
        if hello.proc.uid in self._lost:
            # It said Hello before it ended, and the news of its end was faster: no error of anybody's.
            link.close(f"{hello.proc.uid} was lost before: {self._lost[hello.proc.uid]}")
            return None
        link.peer_pid = hello.pid
        return hello

    def _introduce(self, link: Link, hello: messages.Hello) -> None:
        """`link` leads to the process that has said this."""
        self._stories.pop(hello.proc.uid, None)
        self._events.on_hello(hello)
        link.peer = hello.proc
        known = self._links.get(hello.proc.uid)
        if known is None or known.closed is not None:
            self._links[hello.proc.uid] = link
        self._events.on_peer(hello.proc)

    def _on_closed(self, link: Link, reason: str) -> None:
        self._all.discard(link)
        ref = link.peer
        if ref is not None and self._links.get(ref.uid) is link:
            self._events.on_lost(ref, reason, link.peer_pid)


def socket_path(address: str) -> str:
    """The file of an `ipc://` address."""
    if not address.startswith(_SCHEME):
        raise ValueError(f"invalid address {address!r}; expected 'ipc://<path>'")
    return address[len(_SCHEME) :]


def listen_at(path: str) -> socket.socket:
    """A Unix socket that listens at a file."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(path)
    sock.listen(_BACKLOG)
    return sock


def _peer_uid(sock: socket.socket) -> int | None:
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(uid)
