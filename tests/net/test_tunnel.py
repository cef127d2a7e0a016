"""Tunnels: connections through a gateway behave like connections, and neither a slow one nor the end of the link leaks."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading

import pytest

from monarch._net import loop as net_loop
from monarch._net.loop import NetLoop
from monarch._net.stream import Link
from monarch._net.tunnel import Portal, accepting
from monarch._wire import tunnels
from monarch._wire.frames import Decoder, Kind, encode
from monarch._wire.tunnels import FIRST_WINDOW, LINK_WINDOW, MOST_WINDOW, Op, Side
from net.wires import on_loop

WAIT_S = 10.0
NO_LIMIT = 1 << 40


class End:
    """A loop with one link and its portal."""

    def __init__(self, sock, side, connect):
        self.loop = NetLoop(f"monarch-test-{side.name.lower()}")
        self.loop.start()
        self.link = Link(self.loop, None, lambda link, frame, buffers: self.portal.on_frame(frame), self.on_closed, NO_LIMIT)
        self.portal = Portal(self.loop, self.link, side, connect)
        self.closed = threading.Event()
        if sock is not None:
            on_loop(self.loop, self.link.attach, sock, [b""])

    def on_closed(self, link, reason):
        self.portal.close(reason)
        self.closed.set()

    def open(self, address):
        sock, tunnel = on_loop(self.loop, self.portal.open, address)
        sock.settimeout(WAIT_S)
        return sock, tunnel

    def wait(self, condition):
        """Until `condition()` holds on the loop."""
        done = threading.Event()

        def look():
            if condition():
                done.set()
            else:
                self.loop.call_later(0.001, look)

        self.loop.call_soon(look)
        assert done.wait(WAIT_S), self.portal.statistics()

    def wait_empty(self):
        self.wait(lambda: (self.portal.statistics().tunnels, len(self.portal._machine)) == (0, 0))

    def close(self):
        on_loop(self.loop, self.link.close, "the test is over")
        assert self.portal.statistics() == type(self.portal.statistics())(0, 0)
        self.loop.stop()
        self.loop.join(WAIT_S)


class Cluster:
    """What the gateway can reach: `listen` makes an address; `accept` and `dial` are what a process there does."""

    def __init__(self):
        self.listeners = {}

    def listen(self, name="server", family=socket.AF_INET):
        listener = socket.socket(family)
        listener.bind(("127.0.0.1", 0) if family == socket.AF_INET else "")
        listener.listen(600)
        listener.settimeout(WAIT_S)
        self.listeners[name] = listener
        return name

    def accept(self, name="server"):
        sock, _ = self.listeners[name].accept()
        sock.settimeout(WAIT_S)
        return sock

    def connect(self, address, on_connected, on_failed):
        if address not in self.listeners:
            on_failed(f"nobody listens at {address}")
            return
        listener = self.listeners[address]
        sock = socket.socket(listener.family)
        sock.connect(listener.getsockname())
        on_connected(sock)

    def close(self):
        for listener in self.listeners.values():
            listener.close()


@pytest.fixture
def cluster():
    cluster = Cluster()
    cluster.listen()
    yield cluster
    cluster.close()


@pytest.fixture
def arrivals():
    """Sockets that tunnels to the client ended in, with the names they asked for."""
    found = []
    yield found
    for sock, _ in found:
        sock.close()


@pytest.fixture
def ends(cluster, arrivals):
    """The client and its gateway."""
    near, far = socket.socketpair()
    client = End(near, Side.CLIENT, accepting(lambda sock, name: arrivals.append((sock, name))))
    gateway = End(far, Side.GATEWAY, cluster.connect)
    yield client, gateway
    client.close()
    gateway.close()


@pytest.fixture
def connected(ends, cluster):
    """Both ends of one connection from the client to the server: the client's socket, its tunnel, the server's socket."""
    sock, tunnel = ends[0].open("server")
    with sock, cluster.accept() as served:
        yield sock, tunnel, served


def read_all(sock):
    data = bytearray()
    while chunk := sock.recv(1 << 20):
        data += chunk
    return bytes(data)


def read_exactly(sock, nbytes):
    data = bytearray()
    while len(data) < nbytes:
        chunk = sock.recv(nbytes - len(data))
        assert chunk
        data += chunk
    return bytes(data)


def in_thread(function, *args):
    thread = threading.Thread(target=function, args=args)
    thread.start()
    return thread


def send_what_goes(sock, data):
    with contextlib.suppress(ConnectionError):
        sock.sendall(data)


def send_until_blocked(sock):
    """Send until nobody takes any more for a while; how much that was."""
    sock.settimeout(0.2)
    total = 0
    try:
        while True:
            total += sock.send(bytes(1 << 16))
    except TimeoutError:
        sock.settimeout(WAIT_S)
        return total


# --- connections ---------------------------------------------------------------------------------------------------


def test_what_one_side_writes_the_other_reads(connected):
    sock, tunnel, served = connected
    for number in range(50):
        sock.sendall(b"question %d" % number)
        assert served.recv(100) == b"question %d" % number
        served.sendall(b"answer %d" % number)
        assert sock.recv(100) == b"answer %d" % number
    assert tunnel.reason is None


@pytest.mark.cpu_limit(6)
def test_64_mib_arrive_as_they_left_in_both_directions_at_once(connected):
    sock, _, served = connected
    data = os.urandom(1 << 20)
    received = {}
    threads = [
        in_thread(lambda: [sock.sendall(data) for _ in range(64)]),
        in_thread(lambda: [served.sendall(data[::-1]) for _ in range(8)]),
        in_thread(lambda: received.update(up=[read_exactly(served, 1 << 20) == data for _ in range(64)])),
        in_thread(lambda: received.update(down=[read_exactly(sock, 1 << 20) == data[::-1] for _ in range(8)])),
    ]
    for thread in threads:
        thread.join(2 * WAIT_S)
    assert received == {"up": [True] * 64, "down": [True] * 8}


def test_a_connection_to_the_client_arrives_as_at_a_listening_socket(ends, arrivals):
    client, gateway = ends
    near, far = socket.socketpair()
    near.settimeout(WAIT_S)
    near.sendall(b"behind")
    on_loop(gateway.loop, gateway.portal.relay, far, "client.1", b"preface, ")
    client.wait(lambda: arrivals)
    (sock, name) = arrivals[0]
    sock.settimeout(WAIT_S)
    assert name == "client.1"
    assert read_exactly(sock, 15) == b"preface, behind"
    sock.sendall(b"status")
    assert near.recv(100) == b"status"
    near.close()
    assert sock.recv(100) == b""


def test_several_clients_share_a_gateway(cluster):
    gateways, clients = [], []
    for _ in range(3):
        near, far = socket.socketpair()
        clients.append(End(near, Side.CLIENT, accepting(print)))
        gateways.append(End(far, Side.GATEWAY, cluster.connect))
    for number, client in enumerate(clients):
        with client.open("server")[0] as sock, cluster.accept() as served:
            sock.sendall(b"%d" % number)
            assert served.recv(10) == b"%d" % number
    for end in [*clients, *gateways]:
        end.wait_empty()
        end.close()


# --- ends ----------------------------------------------------------------------------------------------------------


def test_a_half_closed_connection_still_answers(ends, connected):
    sock, tunnel, served = connected
    sock.sendall(b"all of it")
    sock.shutdown(socket.SHUT_WR)
    assert read_all(served) == b"all of it"
    served.sendall(b"the answer")
    served.close()
    assert read_all(sock) == b"the answer"
    for end in ends:
        end.wait_empty()
    assert tunnel.reason is None


@pytest.mark.parametrize("nbytes", [0, 1, 300_000])
@pytest.mark.parametrize("who", ["client", "server"])
def test_last_words_arrive_before_the_end(ends, connected, who, nbytes):
    one, other = (connected[0], connected[2]) if who == "client" else (connected[2], connected[0])
    words = os.urandom(nbytes)

    def speak():
        one.sendall(words)
        one.close()

    thread = in_thread(speak)
    assert read_all(other) == words
    thread.join(WAIT_S)
    other.close()
    for end in ends:
        end.wait_empty()


def test_a_client_that_hangs_up_closes_the_connection_of_a_server_that_says_nothing(ends, connected):
    sock, _, served = connected
    sock.close()
    for end in ends:
        end.wait_empty()  # though the server has not closed its end
    assert served.recv(1) == b""


def test_a_connection_that_breaks_is_an_end_with_a_reason(ends, connected):
    sock, tunnel, served = connected
    served.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    served.close()  # is a RST
    assert sock.recv(1) == b""
    ends[0].wait_empty()
    assert tunnel.reason == "the connection broke (Connection reset by peer)"


def test_a_refused_connection_is_an_end_with_a_reason(ends):
    client, gateway = ends
    sock, tunnel = client.open("nowhere")
    with sock:
        assert sock.recv(1) == b""
        assert tunnel.reason == "nobody listens at nowhere"
    client.wait_empty()
    gateway.wait_empty()


def test_an_address_that_makes_no_sense_is_refused(ends, cluster):
    def connect(address, on_connected, on_failed):
        raise ValueError("expected 'tcp://host:port'")

    ends[1].portal._connect = connect
    sock, tunnel = ends[0].open("\udc80?")
    with sock:
        assert sock.recv(1) == b""
        assert "can't connect to '??' (expected 'tcp://host:port')" in tunnel.reason


def test_a_connection_that_comes_too_late_is_closed(cluster):
    near, far = socket.socketpair()
    asked, pending = threading.Event(), []
    client = End(near, Side.CLIENT, accepting(print))
    gateway = End(far, Side.GATEWAY, lambda *args: (pending.append(args), asked.set()))
    client.open("server")[0].close()
    assert asked.wait(WAIT_S)
    client.wait_empty()
    gateway.wait_empty()
    on_loop(gateway.loop, cluster.connect, *pending[0])
    with cluster.accept() as served:
        assert served.recv(1) == b""
    client.close()
    gateway.close()


def test_bytes_sent_while_the_gateway_still_connects_arrive(cluster):
    near, far = socket.socketpair()
    asked, pending = threading.Event(), []
    client = End(near, Side.CLIENT, accepting(print))
    gateway = End(far, Side.GATEWAY, lambda *args: (pending.append(args), asked.set()))
    sock, _ = client.open("server")
    sock.sendall(b"early")
    sock.shutdown(socket.SHUT_WR)
    gateway.wait(lambda: gateway.portal.statistics().waiting_bytes == 5)
    on_loop(gateway.loop, cluster.connect, *pending[0])
    with cluster.accept() as served:
        assert read_all(served) == b"early"
    assert sock.recv(1) == b""
    sock.close()
    client.close()
    gateway.close()


# --- windows and turns ---------------------------------------------------------------------------------------------


@pytest.mark.cpu_limit(6)
def test_a_stalled_reader_holds_up_nobody_and_costs_a_window(ends, cluster):
    client, gateway = ends
    stalled, _ = client.open("server")
    unread = cluster.accept()
    taken = send_until_blocked(stalled)
    assert gateway.portal.statistics().waiting_bytes <= MOST_WINDOW
    fast, _ = client.open("server")
    served = cluster.accept()
    data, received = bytes(1 << 20), []
    reader = in_thread(lambda: received.extend(len(read_exactly(served, 1 << 20)) for _ in range(32)))
    most = 0
    for _ in range(32):
        fast.sendall(data)
        most = max(most, client.link.queued_bytes, gateway.portal.statistics().waiting_bytes)
    reader.join(WAIT_S)
    assert received == [1 << 20] * 32
    assert most <= LINK_WINDOW + 4096
    # Meanwhile nothing of the stalled one got lost.
    stalled.shutdown(socket.SHUT_WR)
    assert len(read_all(unread)) == taken
    for sock in (stalled, unread, fast, served):
        sock.close()


def test_bytes_for_a_reader_that_hangs_up_are_given_up(ends, connected):
    sock, _, served = connected
    assert send_until_blocked(sock) > FIRST_WINDOW
    served.close()
    with pytest.raises(ConnectionError):
        while True:
            sock.sendall(bytes(1 << 16))
    sock.close()
    for end in ends:
        end.wait_empty()


def test_a_sender_that_hangs_up_without_room_is_given_up_in_time(ends, cluster, monkeypatch):
    monkeypatch.setattr("monarch._net.tunnel._LINGER_S", 0.05)
    sock, tunnel = ends[0].open("server")
    with cluster.accept() as served:
        send_until_blocked(sock)
        sock.close()
        ends[0].wait_empty()
        assert tunnel.reason == "the other end closed the connection"
        assert len(read_all(served)) >= FIRST_WINDOW
    ends[1].wait_empty()


@pytest.mark.cpu_limit(6)
def test_tunnels_take_turns(ends, cluster):
    client, _ = ends
    loud = [client.open("server")[0] for _ in range(3)]
    loud_served = [cluster.accept() for _ in loud]
    quiet, _ = client.open("server")
    quiet_served = cluster.accept()
    over = threading.Event()

    def shout(sock):
        while not over.is_set():
            sock.sendall(bytes(1 << 18))
        sock.shutdown(socket.SHUT_WR)

    threads = [in_thread(shout, sock) for sock in loud] + [in_thread(read_all, sock) for sock in loud_served]
    for number in range(20):
        quiet.sendall(b"%d" % number)
        assert quiet_served.recv(10) == b"%d" % number
    over.set()
    for thread in threads:
        thread.join(WAIT_S)
    for sock in (*loud, *loud_served, quiet, quiet_served):
        sock.close()


@pytest.fixture(params=["edge", "level"])
def polls(request, monkeypatch):
    """How often each loop has polled; with epoll, or as on systems that have none."""
    counts = []

    class Counting:
        def __init__(self):
            if request.param == "edge" and not hasattr(select, "epoll"):
                pytest.skip("this system has no epoll")
            self.poller = select.epoll() if request.param == "edge" else net_loop._SelectPoller()
            counts.append(0)
            self.index = len(counts) - 1

        def poll(self, timeout=None):
            counts[self.index] += 1
            return self.poller.poll(timeout)

        def __getattr__(self, name):
            return getattr(self.poller, name)

    monkeypatch.setattr(net_loop, "_poller", Counting)
    if request.param == "level":
        monkeypatch.setattr(net_loop, "_EDGE", 0)
    return counts


@pytest.mark.parametrize("hung_up", [False, True], ids=["waiting", "hung up"])
def test_nobody_polls_in_vain_while_nothing_moves(polls, ends, connected, hung_up):
    sock, _, served = connected
    sent = send_until_blocked(sock)
    if hung_up:
        sock.close()
    passed = threading.Event()
    on_loop(ends[0].loop, int)
    before = list(polls)
    ends[0].loop.call_later(0.05, passed.set)
    assert passed.wait(WAIT_S)
    assert all(after - start < 10 for start, after in zip(before, polls, strict=True)), (before, polls)
    if not hung_up:
        sock.shutdown(socket.SHUT_WR)
        served.sendall(b"still here")
        assert sock.recv(100) == b"still here"
    assert len(read_all(served)) == sent
    served.close()
    sock.close()
    for end in ends:
        end.wait_empty()


@pytest.mark.cpu_limit(6)
def test_500_tunnels_open_talk_and_close(ends, cluster):
    client, gateway = ends
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    pairs = []
    for number in range(500):
        sock, _ = client.open("server")
        sock.sendall(b"%03d" % number)
        pairs.append(sock)
    served = [cluster.accept() for _ in pairs]
    assert client.portal.statistics().tunnels == gateway.portal.statistics().tunnels == 500
    told = {}
    for sock in served:
        told[sock.recv(3)] = sock
    assert sorted(told) == [b"%03d" % number for number in range(500)]
    for number, sock in enumerate(pairs):
        (sock if number % 2 else told[b"%03d" % number]).close()
    for number, sock in enumerate(pairs):
        other = told[b"%03d" % number] if number % 2 else sock
        assert other.recv(1) == b""
        other.close()
    for end in ends:
        end.wait_empty()
    if before:
        assert len(os.listdir("/proc/self/fd")) == before


# --- the link ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", [0, 1], ids=["client", "gateway"])
def test_both_ends_see_the_end_when_the_link_closes(ends, connected, who):
    sock, tunnel, served = connected
    send_until_blocked(sock)
    on_loop(ends[who].loop, ends[who].link.close, "cut")
    for end in ends:
        assert end.closed.wait(WAIT_S)
        end.wait_empty()
    read_all(served)
    with pytest.raises(ConnectionError):
        sock.sendall(b"x")
    with contextlib.suppress(ConnectionError):  # it had written what nobody will read
        assert sock.recv(1) == b""
    assert tunnel.reason == ("cut" if who == 0 else "the peer closed the connection")
    late, refused = ends[0].open("server")
    with late:
        assert late.recv(1) == b""
    assert refused.reason == tunnel.reason


def test_a_forked_child_abandons_its_tunnels_and_the_parent_goes_on(ends, connected):
    sock, _, served = connected
    pid = os.fork()
    if not pid:
        for end in ends:
            end.portal.abandon()
            end.link.abandon()
        os._exit(0)
    os.waitpid(pid, 0)
    sock.sendall(b"on we go")
    assert served.recv(100) == b"on we go"


def test_tunnels_can_be_opened_before_the_link_is_connected(cluster):
    client = End(None, Side.CLIENT, accepting(print))
    sock, _ = client.open("server")
    sock.sendall(b"early")
    near, far = socket.socketpair()
    gateway = End(far, Side.GATEWAY, cluster.connect)
    on_loop(client.loop, client.link.attach, near, [b""])
    with sock, cluster.accept() as served:
        assert served.recv(100) == b"early"
    client.close()
    gateway.close()


def tunnel_frame(op, number, payload=b"", *, rank=0):
    return b"".join(bytes(piece) for piece in encode(Kind.TUNNEL, b"", payload, flags=op, port=number, rank=rank))


@pytest.fixture
def hostile(cluster):
    """A gateway, and the socket of a client that sends what the test says."""
    theirs, far = socket.socketpair()
    theirs.settimeout(WAIT_S)
    gateway = End(far, Side.GATEWAY, cluster.connect)
    with theirs:
        yield gateway, theirs
    gateway.close()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (tunnel_frame(Op.DATA, 3, b"x"), "there never was a tunnel 3"),
        (tunnel_frame(Op.OPEN, 2), "may not open a tunnel of number 2"),
        (tunnel_frame(Op.DATA, 1, bytes(FIRST_WINDOW)) + tunnel_frame(Op.DATA, 1, bytes(8 << 20)), "which has no room for them"),
        (tunnel_frame(Op.CREDIT, 1, rank=2**32 - 1), "is beyond every window"),
        (tunnel_frame(99, 1), "know no operation 99"),
    ],
)
def test_a_peer_that_breaks_the_rules_loses_its_link(hostile, cluster, data, said):
    gateway, theirs = hostile
    theirs.sendall(tunnel_frame(Op.OPEN, 1, b"server"))
    with cluster.accept() as served:
        sender = in_thread(send_what_goes, theirs, data)
        assert gateway.closed.wait(WAIT_S)
        sender.join(WAIT_S)
        assert said in gateway.link.closed
        assert gateway.link.closed.startswith("protocol error: ")
        read_all(served)  # has an end


def test_tunnels_beyond_the_limit_are_refused_and_the_rest_goes_on(hostile):
    gateway, theirs = hostile
    on_loop(gateway.loop, setattr, gateway.portal, "_connect", lambda *args: None)  # connects for ever
    count = tunnels.MOST_TUNNELS + 10
    theirs.sendall(b"".join(tunnel_frame(Op.OPEN, 2 * number + 1, b"server") for number in range(count)))
    decoder, refused = Decoder(NO_LIMIT), []
    while len(refused) < 10:
        refused += decoder.received(theirs.recv_into(decoder.space()))
    assert {(frame.kind, frame.flags) for frame in refused} == {(Kind.TUNNEL, Op.RESET)}
    assert [frame.port for frame in refused] == [2 * number + 1 for number in range(tunnels.MOST_TUNNELS, count)]
    assert gateway.portal.statistics().tunnels == tunnels.MOST_TUNNELS
