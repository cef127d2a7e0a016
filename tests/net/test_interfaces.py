"""Listening and advertising on this machine alone; `tests/system/test_addresses.py` does the same between hosts."""

from __future__ import annotations

import fcntl
import os
import socket
import sys

import pytest

from monarch._base.addresses import Address, parse_address, parse_worker_address
from monarch._net import interfaces
from monarch._net.interfaces import advertised_address, is_loopback, listen_on, local_addresses, own_address, primary_address

WAIT_S = 5.0
needs_ipv6 = pytest.mark.skipif(not any(local.host == "::1" for local in local_addresses()), reason="this machine has no IPv6")
IPV6_LOOPBACK = pytest.param("tcp://[::1]:0", marks=needs_ipv6)


@pytest.fixture
def listen():
    """`listen(text)`: the socket and what is advertised."""
    opened = []

    def listen(text):
        worker = parse_worker_address(text)
        opened.append(listen_on(worker.bound))
        return opened[-1], *advertised_address(worker, opened[-1])

    yield listen
    for sock in opened:
        sock.close()


def dial(host, port):
    socket.create_connection((host, port), WAIT_S).close()


@pytest.mark.parametrize("text", ["tcp://127.0.0.1:0", "tls://127.0.0.1:0", "tcp://localhost:0", IPV6_LOOPBACK])
def test_what_the_script_names_is_bound_and_advertised(listen, text):
    sock, address, remark = listen(text)
    port = sock.getsockname()[1]
    assert address == parse_address(text)._replace(port=port)
    assert remark == ""
    assert not sock.getblocking()
    assert not sock.get_inheritable()
    dial(address.host, port)


@needs_ipv6
def test_all_interfaces_take_both_families(listen):
    sock, address, remark = listen("tcp://*:0")
    dial("127.0.0.1", address.port)
    dial("::1", address.port)
    assert address == Address("tcp", primary_address(), sock.getsockname()[1])
    assert remark.startswith(f"all interfaces are bound; {address} is advertised (")
    dial(address.host, address.port)


def test_all_ipv4_interfaces_advertise_an_ipv4_address(listen):
    sock, address, _ = listen("tcp://0.0.0.0:0")
    assert sock.family == socket.AF_INET
    assert address.host == primary_address((socket.AF_INET,))
    dial("127.0.0.1", address.port)


@needs_ipv6
def test_all_ipv6_interfaces_advertise_an_ipv6_address_first(listen):
    _, address, _ = listen("tcp://[::]:0")
    assert address.host == primary_address((socket.AF_INET6, socket.AF_INET))
    dial("::1", address.port)


def test_an_alias_wins_and_its_port_0_becomes_the_real_one(listen):
    sock, address, remark = listen("tcp://gate.example.org:7000@tcp://*:0")
    assert (str(address), remark) == ("tcp://gate.example.org:7000", "")
    sock, address, remark = listen("tcp://gate.example.org:0@tcp://127.0.0.1:0")
    assert (str(address), remark) == (f"tcp://gate.example.org:{sock.getsockname()[1]}", "")


def test_a_service_id_stays_with_the_advertised_address(listen):
    _, address, _ = listen("worker<5>@tcp://127.0.0.1:0")
    assert address.service == "worker<5>"


def test_a_port_in_use_names_who_has_it(listen):
    _, address, _ = listen("tcp://127.0.0.1:0")
    with pytest.raises(RuntimeError) as caught:
        listen_on(address)
    what, where, following = str(caught.value).splitlines()
    assert what == f"cannot listen at {address}: port {address.port} is in use"
    if sys.platform == "linux":
        assert where.startswith(f"  where: pid {os.getpid()} (")
    assert following.startswith("  next:  end it, or choose another port")


def test_a_port_in_use_on_one_family_is_in_use_for_all_interfaces():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(RuntimeError, match="in use"):
        listen_on(Address("tcp", "*", taken.getsockname()[1]))


def test_a_port_of_a_listener_that_has_closed_can_be_taken_at_once():
    first = listen_on(Address("tcp", "127.0.0.1", 0))
    port = first.getsockname()[1]
    first.setblocking(True)
    client = socket.create_connection(("127.0.0.1", port), WAIT_S)
    accepted, _ = first.accept()
    accepted.close()  # this end closes first, so it is here that the port waits
    client.close()
    first.close()
    listen_on(Address("tcp", "127.0.0.1", port)).close()


def test_an_address_of_another_machine_is_told_from_those_of_this_one():
    with pytest.raises(RuntimeError, match=r"at tcp://198.51.100.7:0: this machine has no .*\n  where: its .*127.0.0.1 ") as caught:
        listen_on(Address("tcp", "198.51.100.7", 0))
    assert "tcp://dialled:port@tcp://bound:port" in str(caught.value)
    with pytest.raises(RuntimeError, match="tls://dialled:port@tls://bound:port"):
        listen_on(Address("tls", "198.51.100.7", 0))


def test_an_unknown_name_cannot_be_bound():
    with pytest.raises(RuntimeError, match=r"where: host name 'no-such-host.invalid' cannot be resolved"):
        listen_on(parse_address("tcp://no-such-host.invalid:0"))


def test_an_unknown_interface_cannot_be_bound():
    with pytest.raises(RuntimeError, match=r"where: fe80::1%nowhere is of no use here"):
        listen_on(parse_address("tcp://[fe80::1%nowhere]:0"))


def test_an_inherited_listening_socket_is_taken_over(listen):
    parent = socket.create_server(("127.0.0.1", 0))
    port, fd = parent.getsockname()[1], parent.detach()
    sock, address, remark = listen(f"tcp://localhost:fd{fd}")
    assert sock.fileno() == fd
    assert (str(address), remark) == (f"tcp://localhost:{port}", "")
    assert not sock.getblocking()
    assert not sock.get_inheritable()
    dial("127.0.0.1", port)


def test_an_inherited_socket_for_any_host_is_advertised_where_it_is_bound(listen):
    fd = socket.create_server(("127.0.0.1", 0)).detach()
    _, address, remark = listen(f"tcp://*:fd{fd}")
    assert (address.host, remark) == ("127.0.0.1", "")


def no_descriptor():
    return None


def a_file():
    return os.open("/dev/null", os.O_RDONLY)


def a_unix_socket():
    return socket.socket(socket.AF_UNIX).detach()


def a_datagram_socket():
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM).detach()


def a_bound_socket():
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    return sock.detach()


def a_connected_socket():
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()
        return server.accept()[0].detach()


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (no_descriptor, "is not open"),
        (a_file, "is not a socket"),
        (a_unix_socket, "is not a TCP socket, but AF_UNIX SOCK_STREAM"),
        (a_datagram_socket, "is not a TCP socket, but AF_INET SOCK_DGRAM"),
        (a_bound_socket, "is a TCP socket that does not listen"),
        (a_connected_socket, "is a connected socket, not a listening one"),
    ],
)
def test_an_inherited_descriptor_that_is_none_to_listen_on_is_refused_and_stays_open(make, fault):
    fd = make()
    number = 9999 if fd is None else fd
    with pytest.raises(RuntimeError, match=rf"at tcp://h:fd{number}: descriptor {number} {fault}\n  next:  bind and listen in the parent"):
        listen_on(Address("tcp", "h", fd=number))
    if fd is not None:
        fcntl.fcntl(fd, fcntl.F_GETFD)
        os.close(fd)


def test_the_addresses_of_this_machine_can_be_bound():
    found = local_addresses()
    assert ("127.0.0.1", True) in [(local.host, local.loopback) for local in found]
    for local in found:
        host = f"[{local.host}]" if ":" in local.host else local.host
        listen_on(parse_address(f"tcp://{host}:0")).close()


def test_the_primary_address_is_one_of_this_machine_and_loopback_only_if_there_is_no_other():
    found = {local.host: local for local in local_addresses()}
    primary = found[primary_address()]
    others = [local for local in found.values() if not local.loopback and not local.link_local]
    assert primary.loopback is not bool(others)


@pytest.mark.parametrize(
    ("text", "loopback"),
    [
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.8.0.1:1", True),
        ("tls://[::1]:1", True),
        ("tcp://[::ffff:127.0.0.1]:1", True),
        ("tcp://localhost:1", True),
        ("tcp://a.localhost.:1", True),
        ("ipc:///run/w", True),
        ("inproc://1", True),
        ("tcp://*:1", False),
        ("tcp://0.0.0.0:1", False),
        ("tcp://[::]:1", False),
        ("tcp://10.0.0.7:1", False),
        ("tcp://127.0.0.1.example.org:1", False),
        ("tcp://localhost.example.org:1", False),
    ],
)
def test_loopback_is_told_from_the_network(text, loopback):
    assert is_loopback(parse_address(text)) is loopback


@pytest.mark.parametrize(
    ("hostname", "address"),
    [
        ("Node7", "tcp://node7:5"),
        ("node7.example.org", "tcp://node7.example.org:5"),
        ("Anna's laptop", "tcp://*:5"),
        ("12345", "tcp://*:5"),
        ("", "tcp://*:5"),
    ],
)
def test_a_transport_without_an_address_listens_at_the_host_name(monkeypatch, hostname, address):
    monkeypatch.setattr(socket, "gethostname", lambda: hostname)
    assert str(own_address("tcp", 5)) == address
    assert str(own_address("tls", 5, reach="loopback")) == "tls://127.0.0.1:5"


@pytest.mark.parametrize(
    ("host", "own"),
    [("node7", True), ("node7.example.org", True), ("node8", False), ("10.0.0.7", False), ("localhost", False)],
)
def test_the_own_name_is_known_with_and_without_a_domain(monkeypatch, host, own):
    monkeypatch.setattr(socket, "gethostname", lambda: "Node7.cluster")
    assert interfaces._is_own_name(host) is own
