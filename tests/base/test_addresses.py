"""Addresses survive their text, say what is wrong with a malformed one, and tell a service id from an alias."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._base.addresses import (
    Address,
    canonical_service,
    is_ip,
    native_spelling,
    parse_address,
    parse_dialled_address,
    parse_worker_address,
)

names = st.from_regex(r"[a-z]([a-z0-9_-]{0,10}[a-z0-9])?(\.[a-z][a-z0-9]{0,5}){0,3}", fullmatch=True)
ipv4 = st.ip_addresses(v=4).map(str)
ipv6 = st.ip_addresses(v=6).filter(lambda address: address.ipv4_mapped is None).map(str)
scoped = st.builds("fe80::{:x}%{}".format, st.integers(1, 0xFFFF), st.sampled_from(["eth0", "en-1", "wlan0.7"]))
hosts = names | ipv4 | ipv6 | scoped | st.just("*")
services = st.just("") | st.from_regex(r"[a-r]{1,9}(<[1-9A-Z]{1,12}>)?|<[1-9a-z]{1,12}>", fullmatch=True)
ports = st.integers(0, 65535)
sockets = st.builds(Address, st.sampled_from(["tcp", "tls"]), hosts, ports, st.none(), st.just(""), services)
inherited = st.builds(Address, st.sampled_from(["tcp", "tls"]), hosts, st.just(0), st.integers(0, 4096), st.just(""), services)
files = st.builds(
    lambda path, service: Address("ipc", path=path, service=service), st.from_regex(r"[/@][^\x00\n\r]{1,40}", fullmatch=True), services
)
inproc = st.builds(lambda number, service: Address("inproc", path=str(number), service=service), st.integers(0, 10**12), services)
addresses = sockets | inherited | files | inproc


@given(addresses)
def test_an_address_survives_its_text(address):
    assert parse_address(str(address)) == address
    assert parse_worker_address(str(address)) == (address, address)


@given(dialled=sockets, bound=sockets | inherited)
def test_an_alias_survives_its_text(dialled, bound):
    dialled = dialled._replace(scheme=bound.scheme, service=bound.service)
    if dialled.is_wildcard:
        with pytest.raises(ValueError, match="is what others dial"):
            parse_worker_address(f"{dialled}@{bound.url}")
        return
    both = parse_worker_address(f"{dialled}@{bound.url}")
    assert both == (dialled, bound)
    assert parse_worker_address(str(both)) == both
    assert both.is_alias is (dialled != bound)


@given(address=addresses, cut=st.integers(0, 60), insert=st.text("@:/[]<>.*%fd0\0 é-", max_size=3), drop=st.integers(0, 5))
def test_what_was_cut_or_mangled_is_parsed_or_refused_in_words(address, cut, insert, drop):
    text = str(address)
    for mutant in (text[:cut], text[cut:], text[:cut] + insert + text[cut + drop :]):
        for parse in (parse_address, parse_worker_address):
            try:
                parsed = parse(mutant)
            except (ValueError, NotImplementedError) as error:
                assert repr(mutant) in str(error)
            else:
                assert parse(str(parsed)) == parsed


@given(st.text(max_size=40))
def test_any_text_is_parsed_or_refused(text):
    for parse in (parse_address, parse_worker_address):
        try:
            parsed = parse(text)
        except ValueError as error:
            assert "invalid worker address" in str(error)
        else:
            assert parse(str(parsed)) == parsed


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("tcp://Node7.Example.org:26600", "tcp://node7.example.org:26600"),
        ("tcp://[FE80:0::0001%eth0]:1", "tcp://[fe80::1%eth0]:1"),
        ("tcp://[::ffff:10.0.0.7]:1", "tcp://10.0.0.7:1"),
        ("tcp://h:00080", "tcp://h:80"),
        ("tls://h:fd03", "tls://h:fd3"),
        ("service@tcp://h:1", "tcp://h:1"),
        ("worker<3kW>@tcp://h:1", "worker<3kW>@tcp://h:1"),
        ("inproc://007", "inproc://7"),
        ("ipc://@a@b", "ipc://@a@b"),
        ("x@ipc://@a@b", "x@ipc://@a@b"),
        ("tcp://host.:1", "tcp://host.:1"),
    ],
)
def test_spellings_of_the_same_address_have_one_text(text, canonical):
    assert str(parse_address(text)) == canonical


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", ""),
        ("nonsense", ""),
        ("tcp://", ""),
        ("host:26600", ""),
        ("tpc://h:1", "scheme 'tpc' is unknown; did you mean 'tcp'"),
        ("tcp://h", "'h' is not 'host:port'"),
        ("tcp://::1:80", "in brackets"),
        ("tcp://h:65536", "port '65536' is not a number from 0 to 65535"),
        ("tcp://h:-1", "port '-1'"),
        ("tcp://h:８0", "port"),
        ("tcp://h:fd", "descriptor ''"),
        ("tcp://h:fd-1", "descriptor '-1'"),
        ("tcp://:1", "'' is not a host name"),
        ("tcp://a..b:1", "'a..b' is not a host name"),
        ("tcp://-a:1", "'-a' is not a host name"),
        ("tcp://a b:1", "'a b' is not a host name"),
        ("tcp://\u212a:1", "is not a host name"),  # the Kelvin sign, whose lower case is a letter of ASCII
        ("tcp://10.0.0:1", "'10.0.0' is not an IPv4 address"),
        ("tcp://10.0.0.256:1", "is not an IPv4 address"),
        ("tcp://10.0.0.01:1", "is not an IPv4 address"),
        ("tcp://[10.0.0.1]:1", "is not an IPv6 address"),
        ("tcp://[::1%]:1", "is not an IPv6 address"),
        ("tcp://[::1%a b]:1", "is not the name of an interface"),
        ("tcp://h:1/x", "port '1/x'"),
        ("tcp://h:1@tcp://i:2", "port"),
        ("ipc://relative", "neither an absolute path nor '@'"),
        ("ipc://@", "neither an absolute path nor '@'"),
        ("ipc:///a\0b", "neither an absolute path"),
        ("inproc://x", "port of this process 'x'"),
        ("a.b@tcp://h:1", "'a.b' is not the id of a service"),
        ("a<>@tcp://h:1", "is not the id of a service"),
        ("@tcp://h:1", "'' is not the id of a service"),
    ],
)
def test_a_malformed_address_says_which_part(text, where):
    with pytest.raises(ValueError) as caught:
        parse_address(text)
    lines = str(caught.value).splitlines()
    expected = "expected a channel URL such as 'tcp://host:4444' or a ProcAddr such as 'service<…>@tcp://host:4444'"
    assert lines[0] == f"invalid worker address {text!r}; {expected}"
    assert where in "".join(lines[1:])
    assert bool(where) is (len(lines) == 2)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("tcp://a:1@tls://b:2", "same scheme"),
        ("tcp://a:1@ipc:///b", "same scheme"),
        ("tcp://*:1@tcp://b:2", "'tcp://\\*:1', in front of the '@'"),
        ("tcp://a:fd3@tcp://b:2", "is what others dial"),
        ("tcp://a:1@tcp://b:2@tcp://c:3", "port '2@tcp://c:3'|not 'host:port'|is not a host name"),
        ("tcp://a:1@b:2", "invalid worker address"),
        ("tcp://a:x@tcp://b:2", "port 'x'"),
    ],
)
def test_halves_that_do_not_belong_together_are_refused(text, where):
    with pytest.raises(ValueError, match=where):
        parse_worker_address(text)


@pytest.mark.parametrize("text", ["quic://h:1", "metatls://h:1", "metaquic://h:1", "a@quic://h:1", "tcp://a:1@quic://b:1"])
def test_a_transport_that_is_not_made_names_those_that_are(text):
    with pytest.raises(NotImplementedError, match=r"there are ipc://, tcp://, tls://, inproc://\n.*use tls://"):
        parse_worker_address(text)


def test_a_service_id_in_front_of_an_alias_belongs_to_both_halves():
    both = parse_worker_address("w<5>@tcp://gate:7000@tcp://*:fd4")
    assert both == (Address("tcp", "gate", 7000, service="w<5>"), Address("tcp", "*", 0, 4, service="w<5>"))


@pytest.mark.parametrize(
    ("text", "native"),
    [
        ("tcp://1.2.3.4:5", "tcp:1.2.3.4:5"),
        ("tls://[::1]:5", "tls:[::1]:5"),
        ("ipc://@name", "unix:@name"),
        ("ipc:///run/w", "unix:/run/w"),
        ("inproc://3", "local:3"),
        ("w<5>@tcp://h:1", "w<5>@tcp:h:1"),
    ],
)
def test_the_native_spelling_of_an_address(text, native):
    assert native_spelling(parse_address(text)) == native


@given(ipv4 | ipv6)
def test_addresses_are_told_from_names(text):
    assert is_ip(text)
    assert ipaddress.ip_address(text)


@given(names)
def test_names_are_told_from_addresses(text):
    assert not is_ip(text)


@pytest.mark.parametrize(
    ("text", "wildcard"), [("tcp://*:1", True), ("tcp://0.0.0.0:1", True), ("tls://[::]:1", True), ("tcp://h:1", False)]
)
def test_a_wildcard_stands_for_every_interface(text, wildcard):
    assert parse_address(text).is_wildcard is wildcard


@pytest.mark.parametrize(
    ("text", "canonical"), [("service", ""), ("a<b>", "a<b>"), ("<b>", "<b>"), ("a-b_1", "a-b_1"), ("", None), ("a b", None)]
)
def test_ids_of_services(text, canonical):
    assert canonical_service(text) == canonical


def test_what_is_dialled_has_a_host_and_a_port():
    assert str(parse_dialled_address("tcp://gate:7000@tcp://*:26600")) == "tcp://gate:7000"
    assert str(parse_dialled_address("ipc:///run/w.sock")) == "ipc:///run/w.sock"
    for text in ("tcp://*:26600", "tls://0.0.0.0:1", "tcp://[::]:1", "tcp://a:0", "tcp://a:fd3"):
        with pytest.raises(ValueError, match=r"can't be dialled: it stands for .*\n  next:  give the host, and the port"):
            parse_dialled_address(text)
