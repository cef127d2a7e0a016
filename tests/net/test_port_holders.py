"""Who has a port: the process that listens there, with its command line; nobody for a port that is free or only connected."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from monarch._net.port_holders import port_holder

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/thread-self/net/tcp"), reason="there is no /proc")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_process_that_listens_is_named(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        holder = port_holder(server.getsockname()[1])
    assert holder.startswith(f"pid {os.getpid()} (")
    assert os.path.basename(sys.executable) in holder


def test_a_free_port_and_one_of_a_connection_have_no_holder():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(server.getsockname())
    with client:
        assert port_holder(port) == ""
        assert port_holder(client.getsockname()[1]) == ""
