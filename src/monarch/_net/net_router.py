"""Routes to other hosts: who dials, who waits, and when a link that has lost its connection is given up.

    ipc://<path>                a socket file of this machine: a plain link (`router.py`)
    tcp://host:port             the agent of a host, by a session link
    tcp://host:port/<name>      a process of that host: its agent passes the connection on
    any other                   nobody can be dialled there; whoever is, is asked to dial us (`Events.on_reach`)

Behind a gateway every connection but that to the gateway's agent takes another way (`ways.py`).

Rules of this file:
    1. Who has dialled a session dials again when its connection is lost; the other end waits.
    2. A link is lost when the other end says so, when its agent says so, when nobody listens there any more, or when nothing
       was heard of it for `channel_reconnect_timeout`. Nothing else is a sign of death, least of all that a process is slow.
    3. Whoever joins a session has proved that he holds the secret; that he is the one who began it, the random id of the session shows.

Read next: `session_link.py` for links, `dialer.py` and `greeter.py` for connections.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import monarch._wire.frames as frames
from monarch import config
from monarch._base.ids import ProcRef, split_address
from monarch._net.credentials import own_credentials
from monarch._net.dialer import Denial, Dialer, Failure
from monarch._net.greeter import Greeter, Greeting
from monarch._net.handshake import Preface
from monarch._net.loop import NetLoop, Timer
from monarch._net.portals import Portals
from monarch._net.router import PROTOCOL_VERSION, Events, Router
from monarch._net.session_link import SessionLink
from monarch._net.sockets import PROBE_S
from monarch._net.stream import PEER_CLOSED, Link
from monarch._net.ways import Direct, Outlet, ThroughPortal, Way
from monarch._wire import messages
from monarch._wire.contact_messages import Register
from monarch._wire.frames import Frame, FrameError, Kind

if TYPE_CHECKING:
    import socket

    from monarch._base.addresses import Address
    from monarch._net.local import SegmentPool

_logger = logging.getLogger("monarch.net")
_ORPHANED_S = 1.0
"""How long an end that was closed without a word may take to come back: one that lives dials at once."""
_RESET_S = 5.0
"""The same after a reset, which does not always come from the peer: what is between may have been started anew, and pass nothing on yet."""
_BUSY_S = 0.25
"""After so long it is looked again whether somebody who had dialled in time has said who he is."""
_ATTEMPT_S = 0.4
"""A lost connection is dialled anew after so long without an answer: the first packet may have gone into a cut that is over."""
_MAX_ATTEMPT_S = 5.0
_REFUSED_S = 0.15
"""After so long without a listener, there will be none: the machine answers, and its agent has ended."""
_RETRY_S = 0.03
_SLOW_RETRY_S = 0.5
_HELLO_S = 10.0
"""How long somebody who has proved himself may take to say who he is."""
_SUSPICION = 3
"""After so many heartbeats of silence another connection is tried."""
_LEAST_PATIENCE_S = 0.1
_LEAST_SUSPICION_S = 2.5 * PROBE_S
_SHORT_S = 4.0 * PROBE_S
"""With less patience than this the kernel asks too rarely."""


class NetRouter(Router):
    """The links of one process, to its own host and to others. Thread: as `Router`."""

    def __init__(
        self,
        loop: NetLoop,
        own: ProcRef,
        pool: SegmentPool | None,
        events: Events,
        max_frame_bytes: int,
        path_of: Callable[[str], str | None],
        way: Way | None = None,
    ) -> None:
        """Args:
        path_of: the socket file of an address; None: it is on another host.
        way: how other hosts are reached; None: by TCP.
        """
        super().__init__(loop, own, pool, events, max_frame_bytes, path_of)
        self.greeter = Greeter(loop, own_credentials, self._route, self._on_stranger)
        self.portals = Portals(loop, own.address, self.greeter, events.on_frame)
        self._way = Direct() if way is None else way
        self._outlet: Outlet | None = None
        self._sessions: dict[str, SessionLink] = {}
        self._dialers: dict[SessionLink, Dialer] = {}
        self._tick: Timer | None = None
        self._budget_s = config.seconds("channel_reconnect_timeout")
        self._beat_s = config.seconds("server_heartbeat_interval")
        self._step_s = min(self._beat_s, self._budget_s / 4)
        """How often links are looked at: a fraction of the patience with any of them."""

    # --- routes --------------------------------------------------------------------------------------------------

    def _new_link(self, ref: ProcRef | None) -> Link:
        if ref is None or not ref.address or self._path_of(ref.address) is not None:
            return super()._new_link(ref)
        return self._new_session(ref)

    def _new_session(self, ref: ProcRef | None) -> SessionLink:
        link = SessionLink(self._loop, ref, self._on_hello, self._on_detached, self._on_closed, self._max_frame_bytes)
        link.patience_s = self._budget_s
        return link

    def dial(self, ref: ProcRef) -> None:
        """Connect the link to `ref` unless it is connected or lost."""
        link = self._links.get(ref.uid)
        if not isinstance(link, SessionLink):
            super().dial(ref)
        elif not link.connected and link.closed is None and link.dials:
            self._connect(link)

    def listen_to_others(self, sock: socket.socket, *, tls: bool) -> None:
        """Serve connections of other hosts from `sock`, which listens."""
        self.greeter.listen(sock, tls=tls)

    def greet(self, sock: socket.socket, preface: Preface, peer: str) -> None:
        """Serve a connection of another host, whose preface was read by this host's agent."""
        self.greeter.go_on(sock, preface, peer, self.takers.get(preface.target.rpartition("/")[2]))

    def visit(self, sock: socket.socket, preface: Preface, peer: str) -> None:
        """Serve a connection of another host, whose preface was read by the client in front of this agent, and not answered."""
        self.greeter.visit(sock, preface, peer)

    def _route(self, preface: Preface, greeting: Greeting) -> None:
        own_name, (name, _, last) = split_address(self.own.address)[1], preface.target.rpartition("/")
        if preface.target in ("", own_name):
            greeting.accept()
        elif last in self.takers and name == own_name:
            greeting.accept(self.takers[last])
        elif not self.portals.relay(preface, greeting):
            self._events.on_visitor(preface, greeting)

    # --- gateways ------------------------------------------------------------------------------------------------

    def join(self, gateway: ProcRef, dialled: Address, name: str, outlet: socket.socket) -> None:
        """Be a client behind a gateway: have connections from and to everybody else through the link to its agent.

        Args:
            dialled: how the agent is reached from here.
            name: what others ask for at the gateway.
            outlet: listens for processes of this host, which go the same way.
        """
        link = self.link_to(gateway, dial=False)
        link.send_control(Register(name))
        way = self._way = ThroughPortal(split_address(gateway.address)[0], dialled, link, self.portals.open(link))
        self._outlet = Outlet(self._loop, outlet, way)
        self.greeter.tls = gateway.address.startswith("tls://")
        self.dial(gateway)

    def register(self, link: Link, name: str) -> None:
        """Be the gateway of the client at the other end of `link`; FrameError: it can't have that name."""
        self.portals.register(link, name)
        self._watch_links()

    def _introduce(self, link: Link, hello: messages.Hello) -> None:
        if link in self.portals:
            link.on_frame = self.portals.on_frame
        super()._introduce(link, hello)

    # --- connections we make -------------------------------------------------------------------------------------

    def _connect(self, link: SessionLink) -> None:
        if link in self._dialers:
            return
        ref = link.peer
        assert ref is not None
        try:
            route = self._way.route_to(ref.address)
            credentials = own_credentials()
        except (ValueError, OSError, NotImplementedError) as exc:
            self._events.on_denied(ref, str(exc))
            return
        if route is None:
            self._events.on_reach(ref)
            return
        dialer = Dialer(self._loop, route, credentials, partial(self._on_connected, link), partial(self._on_failed, link))
        self._dialers[link] = dialer
        dialer.start()
        if link.was_connected:
            self._loop.call_later(min(_ATTEMPT_S * 2**link.num_redials, _MAX_ATTEMPT_S), partial(self._try_anew, link, dialer))

    def _try_anew(self, link: SessionLink, dialer: Dialer) -> None:
        if self._dialers.get(link) is dialer and dialer.is_connecting and link.closed is None:
            dialer.cancel()
            del self._dialers[link]
            link.num_redials += 1  # it may be far away, and have answered soon
            self._connect(link)

    def _on_connected(self, link: SessionLink, sock: Any) -> None:
        del self._dialers[link]
        if link.closed is not None:
            sock.close()
            return
        self._sessions[link.session] = link
        self._all.add(link)
        is_first = not link.was_connected
        link.attach(sock, self._hello(link))
        if is_first:
            link.resume(0)
        self._watch_links()

    def _on_failed(self, link: SessionLink, denial: Denial) -> None:
        del self._dialers[link]
        link.story = denial.reason
        ref = link.peer
        assert ref is not None
        if link.closed is not None or link.connected:  # the latter: it was only suspected
            return
        if not link.was_connected:
            self._stories[ref.uid] = denial.reason
            if denial.failure is Failure.DENIED:
                self._events.on_denied(ref, denial.reason)
            else:
                self._events.on_unreachable(ref, denial.reason)
            return
        away_s = self._loop.now_s() - (link.detached_s or 0.0)
        if denial.failure in (Failure.GONE, Failure.DENIED):
            link.close(denial.reason)
        elif denial.failure is Failure.REFUSED and away_s >= _REFUSED_S:
            link.close(f"nobody listens at {ref.address} any more")
        else:
            self._loop.call_later(_RETRY_S if away_s < 1 else _SLOW_RETRY_S, partial(self._connect_again, link))

    def _connect_again(self, link: SessionLink) -> None:
        if link.closed is None and not link.connected:
            self._connect(link)

    def open_connection(self, address: str, on_connected: Callable[[Any], None], on_failed: Callable[[Denial], None]) -> Dialer | None:
        """Make a connection that carries no frames, to a service of another host's agent. Thread: net loop.

        Args:
            address: `<address of the agent>/~<name of the service>`.
            on_connected: told the socket, at whose other end somebody has proved the job's secret; it does not block.
            on_failed: told why there is none.

        Returns:
            The attempt, which may be cancelled; None when it has failed already.
        """
        try:
            route, credentials = self._way.route_to(address), own_credentials()
        except (ValueError, OSError, NotImplementedError) as exc:
            on_failed(Denial(Failure.DENIED, str(exc)))
            return None
        if route is None:
            on_failed(Denial(Failure.UNREACHABLE, f"nobody can be dialled at {address}"))
            return None
        dialer = Dialer(self._loop, route, credentials, on_connected, on_failed)
        dialer.start()
        return dialer

    # --- connections that others make ----------------------------------------------------------------------------

    def _on_stranger(self, sock: Any) -> None:
        link = self._new_session(None)
        self._all.add(link)
        link.attach(sock, [])
        self._loop.call_later(_HELLO_S, lambda: self._give_up_waiting(link))
        self._watch_links()

    def _give_up_waiting(self, stranger: SessionLink) -> None:
        if stranger.connected and not stranger.greeted:
            _logger.warning("link closed: a peer did not say who it is within %g s", _HELLO_S)
            stranger.close("it did not say who it is")

    def _hello(self, link: SessionLink) -> list[frames.Buffer]:
        hello = messages.Hello(
            self.own, os.getpid(), PROTOCOL_VERSION, link.session, link.received, link.was_connected, self.epoch, self._budget_s
        )
        return frames.encode(Kind.CONTROL, messages.encode(hello), b"")

    def _on_hello(self, link: Link, frame: Frame, _buffers: Sequence[memoryview]) -> None:
        assert isinstance(link, SessionLink)
        hello = self._checked_hello(link, frame)
        if hello is None:
            return
        if hello.patience_s > 0:  # not of a broken peer, which would have its links looked at all the time
            link.patience_s = min(self._budget_s, max(hello.patience_s, _LEAST_PATIENCE_S))
            self._step_s = min(self._step_s, link.patience_s / 4)
        if link.dials:
            self._on_answer(link, hello)
        else:
            self._on_caller(link, hello)

    def _on_answer(self, link: SessionLink, hello: messages.Hello) -> None:
        if hello.session != link.session:
            link.is_forgotten = hello.epoch != 0 and hello.epoch == link.peer_epoch
            what = "has given this link up meanwhile" if link.is_forgotten else "does not know this link: it is another one than before"
            link.close(f"the process at the other end {what}")
            return
        is_first = not link.greeted
        link.resume(hello.received)
        self._welcome(link, hello, is_first=is_first)

    def _on_caller(self, stranger: SessionLink, hello: messages.Hello) -> None:
        if not hello.session:
            raise FrameError(f"{hello.proc.uid} names no session")
        known = self._sessions.get(hello.session)
        if known is not None and known.closed is None:
            if known.dials or known.peer is None or known.peer.uid != hello.proc.uid:
                raise FrameError(f"{hello.proc.uid} names the session of somebody else")
            self._hand_over(stranger, known, hello)
            return
        if hello.resumed:
            stranger.session = ""
            stranger.say_apart(self._hello(stranger))
            stranger.close(f"{hello.proc.uid} asks for a link that this process does not know")
            return
        waiting = self._links.get(hello.proc.uid)
        if isinstance(waiting, SessionLink) and waiting.closed is None and not waiting.was_connected and waiting not in self._dialers:
            waiting.dials = False  # it waited for somebody who can't be dialled
            waiting.session = hello.session
            waiting.patience_s = stranger.patience_s
            self._sessions[hello.session] = waiting
            self._hand_over(stranger, waiting, hello)
            return
        if isinstance(waiting, SessionLink) and waiting.closed is None and not waiting.connected and not waiting.dials:
            waiting.close("its process has given that link up, and made another")
        stranger.session = hello.session
        self._sessions[hello.session] = stranger
        stranger.peer = hello.proc
        stranger.say_apart(self._hello(stranger))
        stranger.resume(hello.received)
        self._welcome(stranger, hello, is_first=True)

    def _hand_over(self, stranger: SessionLink, link: SessionLink, hello: messages.Hello) -> None:
        is_first = not link.greeted
        self._all.discard(stranger)
        self._all.add(link)
        link.take_over(stranger, self._hello(link), hello.received)
        self._welcome(link, hello, is_first=is_first)

    def _welcome(self, link: SessionLink, hello: messages.Hello, *, is_first: bool) -> None:
        link.greeted = True
        if not is_first:
            _logger.info("connection restored: peer=%s", hello.proc.uid)
            return
        link.peer_epoch = hello.epoch
        link.on_frame = self._events.on_frame
        self._introduce(link, hello)

    # --- connections that break ----------------------------------------------------------------------------------

    def _on_detached(self, link: SessionLink, reason: str) -> None:
        if link.peer is None or not link.session:  # it never said who it is
            link.close(reason)
            return
        _logger.info("connection lost: peer=%s reason=%s", link.peer.uid, reason)
        if link.suspected and link.detached_s is not None:  # it was of no use before
            link.detached_s -= link.silent_s
        if link.dials:
            self._loop.call_soon(self._connect_again, link)
            return
        patience_s = link.patience_s
        if reason == PEER_CLOSED:
            patience_s = min(_ORPHANED_S, patience_s)
        elif "reset" in reason.lower():  # by a process that ended with something unread, or by something on the way
            patience_s = min(_RESET_S, patience_s)
        self._loop.call_later(patience_s, partial(self._bury, link, link.detached_s, reason))

    def _bury(self, link: SessionLink, since_s: float | None, reason: str) -> None:
        if link.closed is not None or link.detached_s != since_s or link.connected:
            return
        if since_s is not None and self._loop.now_s() - since_s < link.patience_s and self._is_heard_from(link.origin):
            self._loop.call_later(_BUSY_S, partial(self._bury, link, since_s, reason))  # it is far away, or slow
        else:
            link.close(reason)

    def _is_heard_from(self, origin: str) -> bool:
        """Whether somebody from there is about to prove himself, or to say who he is."""
        waiting = (link for link in self._all if isinstance(link, SessionLink) and link.connected and not link.greeted)
        return self.greeter.is_heard_from(origin) or any(link.origin == origin for link in waiting)

    def _on_closed(self, link: Link, reason: str) -> None:
        if isinstance(link, SessionLink):
            if self._sessions.get(link.session) is link:
                del self._sessions[link.session]
            dialer = self._dialers.pop(link, None)
            if dialer is not None:
                dialer.cancel()
        if isinstance(self._way, ThroughPortal) and self._way.link is link:
            self._way.lost = reason
        self.portals.closed(link, reason)
        if isinstance(link, SessionLink) and link.is_forgotten and link.peer is not None and self._links.get(link.peer.uid) is link:
            self._all.discard(link)
            self._events.on_forgotten(link.peer, reason)
        else:
            super()._on_closed(link, reason)

    def _watch_links(self) -> None:
        if self._tick is None or not self._tick.pending:
            self._tick = self._loop.call_later(self._step_s, self._look)

    def _look(self) -> None:
        """See which links have been silent for too long."""
        links = [link for link in self._sessions.values() if link.closed is None]
        now_s = self._loop.now_s()
        for link in links:
            if link.connected:
                if link.dials and getattr(link.connection, "worn", False):  # a key of TLS has a limit, and is not changed
                    link.break_connection("its key has encrypted enough")
                    continue
                silent_s = self._way.silence_s(link.connection, link.pulse, now_s)
                if silent_s is not None:
                    self._suspect(link, silent_s)
            elif link.dials and link.detached_s is not None and now_s - link.detached_s >= link.patience_s:
                link.close(f"no connection for {link.patience_s:g} s (channel_reconnect_timeout): {link.story}")
        self.portals.look(now_s, self._beat_s, self._budget_s)
        if links or self.portals:
            self._tick = None
            self._watch_links()

    def _suspect(self, link: SessionLink, silent_s: float) -> None:
        peer = "somebody" if link.peer is None else link.peer.uid
        # The last sign may have come so long before the cut, and nobody is to be lost earlier than after their whole patience.
        if silent_s >= link.patience_s + min(PROBE_S, link.patience_s / 4) + self._step_s:
            link.close(f"its machine has not answered for {link.patience_s:g} s (channel_reconnect_timeout)")
        elif silent_s >= min(max(_SUSPICION * self._beat_s, _LEAST_SUSPICION_S), link.patience_s / 2):
            link.silent_s = silent_s
            if not link.suspected:
                link.suspected = True
                _logger.warning("no sign of life: peer=%s seconds=%.1f limit=%g", peer, silent_s, link.patience_s)
            if link.dials:
                self._connect(link)
        elif silent_s >= link.patience_s / 4 and link.patience_s < _SHORT_S:
            link.ask_for_a_sign()
        elif link.suspected:
            link.suspected = False
            _logger.info("sign of life again: peer=%s", peer)

    # --- the end -------------------------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """Close all links and listening sockets."""
        self.greeter.close()
        if self._outlet is not None:
            self._outlet.close()
        if self._tick is not None:
            self._tick.cancel()
        carriers = self.portals.links()
        for link in {*self._all, *self._links.values()} - carriers:
            link.close(reason)
        self.portals.drain()  # the others have said good-bye
        super().close(reason)
        for dialer in list(self._dialers.values()):
            dialer.cancel()
        self._dialers.clear()

    def abandon(self) -> None:
        """Close the descriptors only; for a forked child, whose parent goes on with the links."""
        self.greeter.abandon()
        self.portals.abandon()
        if self._outlet is not None:
            self._outlet.abandon()
        super().abandon()
