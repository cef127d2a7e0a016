"""Listening and advertising on machines that have a network: what a host says about itself is what another one reaches."""

from __future__ import annotations

import socket
from contextlib import contextmanager

import pytest

from monarch._base.addresses import parse_worker_address
from monarch._net.interfaces import advertised_address, listen_on, local_addresses, primary_interface
from monarch._net.resolver import resolve_within
from system.hosts import Hosts, inside, start_script_in

WAIT_S = 10.0


@pytest.fixture(autouse=True)
def mended(hosts):
    yield
    hosts.mend()


@contextmanager
def serving(host, text):
    """What `host` advertises when it is told `text`, and the remark."""
    worker = parse_worker_address(text)
    with inside(host):
        sock = listen_on(worker.bound)
        with sock:
            yield advertised_address(worker, sock)


def reach(host, address):
    with inside(host):
        family, sockaddr = resolve_within(address, WAIT_S)[0]
        with socket.socket(family) as sock:
            sock.settimeout(WAIT_S)
            sock.connect(sockaddr)


@pytest.mark.parametrize("routed", [False, True], ids=["no route", "default route"])
def test_all_interfaces_are_advertised_as_the_one_towards_others(hosts, routed):
    a, b = hosts[:2]
    if routed:
        a.add_default_route()
    with serving(a, "tcp://*:26600") as (address, remark):
        assert str(address) == a.url(26600)
        reach(b, address)
        reach(hosts.client, address)
    how = "the interface of the default route" if routed else "the first interface; there is no default route"
    assert remark == f"all interfaces are bound; {address} is advertised (eth0, {how})"


def test_an_ipv6_address_is_bound_and_reached(hosts):
    a, b = hosts[:2]
    with serving(a, f"tcp://[{a.ip6}]:0") as (address, remark):
        assert (address.host, remark) == (a.ip6, "")
        reach(b, address)
    with serving(a, "tcp://[::]:0") as (address, _):
        assert address.host == a.ip6
        reach(b, address)


def test_a_link_local_address_is_bound_and_reached_through_its_interface(hosts):
    a, b = hosts[:2]
    with inside(a):
        (own,) = [local.host for local in local_addresses() if local.link_local]
    with serving(a, f"tcp://[{own}]:0") as (address, _):
        assert address.host == own
        assert own.endswith("%eth0")
        reach(b, address)


def test_a_machine_without_ipv4_advertises_ipv6():
    with Hosts(("a", "b"), ipv6_only=("a", "b")) as rig:
        a, b = rig
        with serving(a, "tcp://*:0") as (address, _):
            assert address.host == a.ip6
            reach(b, address)


def test_a_machine_without_a_network_says_so(hosts):
    with inside(hosts.bridge):  # its ports have no addresses, and its loopback is down
        primary = primary_interface()
    assert primary.host == "127.0.0.1"
    assert primary.origin == "there is no other interface, so other machines cannot dial it"


NAMED = """
    import sys
    from monarch._base.addresses import Address, WorkerAddress
    from monarch._net.interfaces import advertised_address, listen_on, own_address
    own = own_address("tcp", 26600)
    with listen_on(own) as sock:
        print(own, *advertised_address(WorkerAddress(own, own), sock), flush=True)
        sock.setblocking(True)
        while True:
            sock.accept()[0].close()
"""


@contextmanager
def named(host, hostname, names):
    host.rename(hostname, names)
    with start_script_in(host, NAMED) as run:
        yield run.wait_line(r"^tcp://\S+ (\S+) ?(.*)")


def test_an_own_name_that_leads_to_loopback_is_not_advertised(hosts):
    a, b = hosts[:2]
    with named(a, "node-a", {"node-a": "127.0.1.1"}) as line:
        address = parse_worker_address(line[1]).advertised
        assert str(address) == a.url(26600)
        assert line[2].startswith(
            "'node-a' is this machine's own name but resolves to 127.0.1.1 here, which others cannot dial; tcp://10.77."
        )
        reach(b, address)
        reach(a, address._replace(host="127.0.1.1"))  # what the name means to this machine's own programs


def test_an_own_name_that_leads_nowhere_is_not_advertised(hosts):
    a, b = hosts[:2]
    with named(a, "node-a.example.invalid", {}) as line:
        address = parse_worker_address(line[1]).advertised
        assert str(address) == a.url(26600)
        assert "own name but resolves to nothing here" in line[2]
        reach(b, address)


def test_an_own_name_that_leads_to_the_network_is_bound_there_and_advertised(hosts):
    a, b = hosts[:2]
    with named(a, "node-a", {"node-a": a.ip}) as line:
        assert (line[1], line[2]) == ("tcp://node-a:26600", "")
        reach(b, parse_worker_address(a.url(26600)).advertised)
        with inside(a), pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", 26600), WAIT_S)


def test_a_port_of_another_machine_is_not_in_use_here(hosts):
    a, b = hosts[:2]
    refused = pytest.raises(RuntimeError, match=r"port 26600 is in use\n  where: pid \d+")
    with serving(a, "tcp://*:26600"), serving(b, "tcp://*:26600"), inside(a), refused:
        listen_on(parse_worker_address("tcp://*:26600").bound)
