"""The operating system as a platform: which addresses are socket files of this host."""

from __future__ import annotations

import pytest

from monarch._runtime.platform import OperatingSystem


@pytest.fixture
def host():
    system = OperatingSystem()
    system.settle("tcp://10.0.0.1:26600", "/run/x")
    return system


@pytest.mark.parametrize(
    ("address", "path"),
    [
        ("tcp://10.0.0.1:26600", "/run/x/agent"),
        ("tcp://10.0.0.1:26600/JLszdeE9VbZ5.0", "/run/x/JLszdeE9VbZ5.0"),
        ("tcp://10.0.0.1:26601/JLszdeE9VbZ5.0", None),
        ("tcp://10.0.0.1:26600/@w<7x>/JLszdeE9VbZ5.0", None),
        ("tls://10.0.0.1:26600/JLszdeE9VbZ5.0", None),
        ("ipc:///run/y/c", None),
    ],
)
def test_a_host_that_others_reach_knows_its_own_addresses(host, address, path):
    assert host.path_of(address) == path


def test_a_host_is_known_by_further_names(host):
    for name in ("tcp://node7:26600", "tcp://node7:26600/@w<7x>"):
        assert host.path_of(f"{name}/JLszdeE9VbZ5.0") is None
        host.add_name(name)
        assert host.path_of(f"{name}/JLszdeE9VbZ5.0") == "/run/x/JLszdeE9VbZ5.0"
        assert host.path_of(name) == "/run/x/agent"


def test_a_client_has_only_socket_files():
    client = OperatingSystem()
    assert client.path_of("ipc:///run/y/c") == "/run/y/c"
    assert client.path_of("tcp://10.0.0.1:26600/JLszdeE9VbZ5.0") is None
