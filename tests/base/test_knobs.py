from __future__ import annotations

import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._base import knobs
from monarch._base.knobs import BindSpec, ChannelTransport, Encoding

DURATIONS = {
    "300s": "5m",
    "90s": "1m 30s",
    "1m 30s": "1m 30s",
    "1m30s": "1m 30s",
    "5 minutes": "5m",
    "500ms": "500ms",
    "1500ms": "1s 500ms",
    "0s": "0s",
    "0": "0s",
    "24h": "1day",
    "2weeks": "14days",
    "36h": "1day 12h",
    "1us 5ns": "1us 5ns",
    "1year": "1year",
    "  7s ": "7s",
}


@pytest.mark.parametrize(("given_text", "normal"), DURATIONS.items())
def test_a_duration_reads_back_in_normal_form(given_text, normal):
    assert knobs.DURATION.accept(given_text) == normal


@pytest.mark.parametrize("text", ["", "s", "30", "-1s", "1.5s", "1 parsec", "30s!", "1m 30", "m1", "99999999999999999years"])
def test_other_text_is_no_duration(text):
    with pytest.raises(TypeError, match=r"Invalid duration format.*'1m 30s'"):
        knobs.DURATION.accept(text)


@given(st.integers(0, 10**19))
def test_the_normal_form_of_a_duration_keeps_every_nanosecond(total):
    text = knobs.DURATION.accept(f"{total}ns")
    assert knobs.nanos(text) == total
    assert knobs.DURATION.accept(text) == text


@pytest.mark.parametrize("transport", ChannelTransport, ids=repr)
def test_a_transport_survives_pickling_and_its_own_text(transport):
    assert repr(transport) == f"ChannelTransport.{transport.name}"
    assert pickle.loads(pickle.dumps(transport)) is transport
    spec = BindSpec(transport)
    assert BindSpec(str(spec)) == pickle.loads(pickle.dumps(spec)) == BindSpec(spec) == spec
    assert (spec.transport, spec.address) == (transport, None)


@pytest.mark.parametrize(
    ("text", "transport"),
    [
        ("tcp", ChannelTransport.TcpWithHostname),
        ("ipc", ChannelTransport.Unix),
        ("unix", ChannelTransport.Unix),
        ("local", ChannelTransport.Local),
        ("metatls", ChannelTransport.MetaTlsWithIpV6),
        ("metatls-hostname", ChannelTransport.MetaTlsWithHostname),
        ("tls", ChannelTransport.Tls),
        ("quic", ChannelTransport.Quic),
    ],
)
def test_a_transport_has_a_short_name(text, transport):
    assert BindSpec(text) == BindSpec(transport)
    assert hash(BindSpec(text)) == hash(BindSpec(transport))
    assert repr(BindSpec(text)) == f"PyBindSpec(Any({transport.name}))"


@pytest.mark.parametrize(
    ("url", "transport"),
    [
        ("tcp://node7:26600", ChannelTransport.TcpWithHostname),
        ("tcp://10.0.0.1:0", ChannelTransport.TcpWithHostname),
        ("tcp://[::1]:5", ChannelTransport.TcpWithHostname),
        ("tcp://*:5", ChannelTransport.TcpWithHostname),
        ("tcp://node7:fd3", ChannelTransport.TcpWithHostname),
        ("tcp://public:1@tcp://10.0.0.1:2", ChannelTransport.TcpWithHostname),
        ("ipc:///run/m.sock", ChannelTransport.Unix),
        ("ipc://@name", ChannelTransport.Unix),
        ("inproc://7", ChannelTransport.Local),
        ("metatls://node7:1", ChannelTransport.MetaTlsWithIpV6),
    ],
)
def test_an_address_is_kept_as_written(url, transport):
    spec = BindSpec(url)
    assert (spec.transport, spec.address, str(spec)) == (transport, url, url)
    assert BindSpec(str(spec)) == pickle.loads(pickle.dumps(spec)) == spec
    assert spec != BindSpec(transport)
    assert url in repr(spec)


@pytest.mark.parametrize("text", ["tpc", "", "http://host:1", "tcp://host", "tcp://", "tcp://:5", "ipc://", "inproc://x"])
def test_other_text_is_no_transport(text):
    with pytest.raises(ValueError, match=rf"unknown transport {re.escape(repr(text))}.*'tcp://host:26600'"):
        BindSpec(text)


def test_a_mistyped_transport_gets_a_suggestion():
    with pytest.raises(ValueError, match="did you mean 'unix'"):
        BindSpec("unx")


@pytest.mark.parametrize("value", [None, 1, b"tcp", Encoding.Json], ids=repr)
def test_a_transport_is_text_or_a_transport(value):
    with pytest.raises(TypeError, match="expected a ChannelTransport, str or BindSpec, got"):
        BindSpec(value)


@pytest.mark.parametrize("text", ["8000..9000", slice(8000, 9000), slice(8000, 9000, 1)], ids=repr)
def test_a_port_range_reads_back_as_a_slice(text):
    assert knobs.PORTS.accept(text) == slice(8000, 9000)
    assert knobs.PORTS.accept(knobs.PORTS.plain(slice(8000, 9000))) == slice(8000, 9000)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("8000", TypeError),
        ("a..b", TypeError),
        (slice(1, 9, 2), TypeError),
        (slice(None, 9), TypeError),
        (8000, TypeError),
        ("9..8", ValueError),
        ("1..99999", ValueError),
        (slice(-5, 9), ValueError),
    ],
    ids=repr,
)
def test_other_values_are_no_port_range(value, error):
    with pytest.raises(error, match="expected"):
        knobs.PORTS.accept(value)


@pytest.mark.parametrize(
    ("text", "flag"), [(t, True) for t in ("1", "true", "YES", "On")] + [(t, False) for t in ("0", "False", "no", "off")]
)
def test_a_flag_in_the_environment_has_many_spellings(text, flag):
    assert knobs.BOOLEAN.parse(text) is flag


def test_no_word_of_a_variable_comes_twice():
    def variables(prefix: str, name: str) -> tuple[str, ...]:
        return knobs.knob(prefix, name, knobs.TEXT, "", "").env

    assert variables(knobs.HYPERACTOR, "cleanup_timeout")[0] == "HYPERACTOR_CLEANUP_TIMEOUT"
    assert variables(knobs.HYPERACTOR, "hyperactor_tls_ca")[0] == "HYPERACTOR_TLS_CA"
    assert variables(knobs.MESH, "tail_log_lines") == ("HYPERACTOR_MESH_TAIL_LOG_LINES", "HYPERACTOR_TAIL_LOG_LINES")
    assert variables(knobs.MESH, "mesh_orphan_timeout")[0] == "HYPERACTOR_MESH_ORPHAN_TIMEOUT"
    assert variables(knobs.MONARCH, "rdma_host_odp") == ("MONARCH_RDMA_HOST_ODP",)
