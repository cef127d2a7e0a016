"""A gateway and its client: connections lead where they should, and what can't be reached is told as by an agent."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import deque

import pytest

from monarch._base.addresses import parse_address
from monarch._base.ids import ProcRef, agent_at
from monarch._net.loop import NetLoop
from monarch._net.net_router import NetRouter
from monarch._net.router import listen_at
from monarch._wire import messages
from monarch._wire.frames import FrameError, Kind
from net.test_net_router import NO_LIMIT, WAIT_S, Host, Named, scheme, start  # noqa: F401
from net.wires import on_loop


class Gateway(Host):
    """An agent at which clients register."""

    def on_frame(self, link, frame, buffers):
        if frame.kind == Kind.CONTROL:
            self.router.register(link, messages.decode_control(frame.header).name)
        else:
            super().on_frame(link, frame, buffers)


class Client(Host):
    """A process that nobody can dial, and that dials its gateway only."""

    def __init__(self, gateway, folder, name="client.one"):
        self.outlet = str(folder / name)
        self.gateway = gateway.ref
        self.ref = ProcRef(f"{name}<1>", f"{gateway.ref.address}/{name}", "")
        self.loop = NetLoop("monarch-test-client")
        self.loop.start()
        self.router = NetRouter(self.loop, self.ref, None, self, NO_LIMIT, lambda _address: None)
        self.told, self.news, self.frames, self.closed = deque(), threading.Condition(), [], False
        on_loop(self.loop, self.router.join, gateway.ref, parse_address(gateway.ref.address), name, listen_at(self.outlet))


@pytest.fixture
def gateway(start, scheme):  # noqa: F811
    gateway = Gateway(scheme)
    yield gateway
    gateway.end()


@pytest.fixture
def client(gateway, tmp_path):
    client = Client(gateway, tmp_path)
    yield client
    client.end()


def test_a_client_and_a_host_reach_each_other_through_the_gateway(client, start):  # noqa: F811
    host, other = start(), start()
    client.send(host, *range(1, 100))
    assert host.wait_frames(99) == list(range(1, 100))
    host.send(client, *range(1, 50), size=100_000)
    assert client.wait_frames(49) == list(range(1, 50))
    other.send(client, 1000)  # who speaks first
    assert client.wait_frames(50)[-1] == 1000
    client.send(other, 7)
    assert other.wait_frames(1) == [7]
    assert len(host.links()) == len(other.links()) == 1


def test_a_client_reaches_the_gateway_itself_and_other_clients_of_it(client, gateway, tmp_path):
    client.send(gateway, 1)
    assert gateway.wait_frames(1) == [1]
    second = Client(gateway, tmp_path, "client.two")
    try:
        second.send(client, 5)
        assert client.wait_frames(1) == [5]
        client.send(second, 6)
        assert second.wait_frames(1) == [6]
    finally:
        second.end()


@pytest.mark.parametrize("cutter", ["client", "host", "gateway"])
def test_cut_connections_lose_nothing(client, gateway, start, cutter):  # noqa: F811
    host = start()
    ends = {"client": client, "host": host, "gateway": gateway}
    client.send(host, 0)
    host.wait_frames(1)
    chance = random.Random(cutter)

    def cut():
        for _ in range(8):
            ends[cutter].cut()
            time.sleep(chance.uniform(0.0, 0.02))

    thread = threading.Thread(target=cut)
    thread.start()
    for port in range(1, 200):
        client.send(host, port, size=chance.choice((0, 100, 200_000)))
        host.send(client, port)
    thread.join()
    assert host.wait_frames(200) == list(range(200))
    assert client.wait_frames(199) == list(range(1, 200))


def test_nobody_listens_is_said_by_the_gateway(client, start):  # noqa: F811
    host = start()
    host.end()
    client.send(host, 1)
    assert client.expect("unreachable") == f"Connection refused (the gateway says of {host.ref.address})"


def test_a_host_that_ends_behind_the_gateway_is_lost_soon(client, start):  # noqa: F811
    host = start()
    client.send(host, 1)
    host.wait_frames(1)
    began = time.monotonic()
    host.vanish()
    assert "nobody listens" in client.expect("lost")
    assert time.monotonic() - began < 2


def test_an_address_that_no_agent_can_have_is_refused(client):
    on_loop(client.loop, client.router.link_to, agent_at("ipc:///run/w.sock"))
    reason = client.expect("denied")
    assert "this gateway leads to no 'ipc:///run/w.sock'" in reason or "you dialled" in reason


def test_everybody_is_lost_with_the_gateway(client, gateway, start):  # noqa: F811
    host = start()
    client.send(host, 1)
    host.wait_frames(1)
    gateway.end("the gateway was shut down")
    with client.news:
        assert client.news.wait_for(lambda: [kind for kind, _ in client.told].count("lost") == 2, WAIT_S)
    assert any("the gateway was shut down" in reason for _, reason in client.told)
    late = Named(agent_at("tcp://127.0.0.1:1"))
    client.told.clear()
    client.send(late, 1)
    assert "is lost" in client.expect("unreachable")


def test_who_ends_says_so_through_the_gateway(client, start):  # noqa: F811
    host = start()
    client.send(host, 1)
    host.wait_frames(1)
    client.end("I have other plans")
    assert host.expect("lost") == "I have other plans"


def test_a_process_of_the_client_s_host_goes_out_through_the_client(client, start, scheme):  # noqa: F811
    from monarch._net.ways import ThroughOutlet

    host = start()
    near = Host(scheme)
    near.router.close("it is replaced")
    near.router = NetRouter(near.loop, near.ref, None, near, NO_LIMIT, lambda _address: None, ThroughOutlet(client.outlet))
    try:
        near.send(host, 1, 2, size=200_000)
        assert host.wait_frames(2) == [1, 2]
        host.send(near, 3)
        assert near.wait_frames(1) == [3]
    finally:
        near.end()


def test_what_comes_to_the_outlet_without_an_address_is_closed(client):
    for data in (b"", b"\x00", b"\x00\x05tcp"):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(5)
            sock.connect(client.outlet)
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(1) == b""


@pytest.mark.parametrize("name", ["", "a/b", "line\nbreak", "x" * 65])
def test_a_name_that_could_be_mistaken_is_refused(gateway, name):
    with pytest.raises(FrameError, match="can't register"):
        gateway.router.register(object(), name)
