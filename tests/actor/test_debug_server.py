"""Where the debug server listens, and whom it knows."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from monarch.actor import debug_server
from monarch.actor.debug_io import DebugCliIO, DebugIOError
from monarch.actor.debug_server import Settings, listen, owner_of, settings


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in (debug_server.HOST_VARIABLE, debug_server.PORT_VARIABLE, debug_server.PROTOCOL_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def test_the_server_is_on_the_loopback_unless_the_environment_says_otherwise(monkeypatch):
    assert settings() == Settings("localhost", 27000)
    monkeypatch.setenv("MONARCH_DEBUG_SERVER_HOST", "0.0.0.0")
    monkeypatch.setenv("MONARCH_DEBUG_SERVER_PORT", "0")
    monkeypatch.setenv("MONARCH_DEBUG_SERVER_PROTOCOL", "tcp")
    assert settings() == Settings("0.0.0.0", 0)


@pytest.mark.parametrize(
    ("name", "value", "error", "text"),
    [
        ("PROTOCOL", "unix", NotImplementedError, "knows tcp only"),
        ("PORT", "many", ValueError, "'many' is no port"),
        ("PORT", "65536", ValueError, "is no port"),
        ("PORT", "-1", ValueError, "is no port"),
    ],
)
def test_a_wrong_setting_is_an_error_that_names_it(monkeypatch, name, value, error, text):
    monkeypatch.setenv(f"MONARCH_DEBUG_SERVER_{name}", value)
    with pytest.raises(error, match=f"MONARCH_DEBUG_SERVER_{name}(.|\n)*{text}"):
        settings()


def test_the_next_free_port_is_taken():
    with listen(Settings("localhost", 0)) as first:
        host, port = first.getsockname()
        assert host == "127.0.0.1"
        with listen(Settings("localhost", port)) as second:
            assert port < second.getsockname()[1] < port + 200


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.7"])
def test_a_host_that_is_not_here_is_an_error_with_a_way_on(host):
    with pytest.raises(OSError, match=r"the debug server can't listen(.|\n)*set MONARCH_DEBUG_SERVER_HOST"):
        listen(Settings(host, 0))


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="the kernel does not tell who owns a connection")
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_kernel_says_whose_a_connection_is_as_long_as_it_is_open(address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        server = socket.create_server((address, 0), family=family)
    except OSError:
        pytest.skip(f"no {address} here")
    with server:
        client = socket.create_connection(server.getsockname()[:2])
        ours, _ = server.accept()
        with ours:
            ends = ours.getpeername(), ours.getsockname()
            assert owner_of(*ends) == os.geteuid()
            client.close()
            assert owner_of(*ends) is None


def test_a_connection_from_elsewhere_is_nobodys():
    assert owner_of(("192.0.2.7", 4000), ("192.0.2.8", 27000)) is None
    assert owner_of(("127.0.0.1", 1), ("127.0.0.1", 2)) is None
    assert owner_of(None, None) is None


class Writer:
    def __init__(self, broken=False):
        self.written = b""
        self.closed = False
        self._broken = broken

    def write(self, data):
        self.written += data

    async def drain(self):
        if self._broken:
            raise ConnectionResetError("reset")

    def close(self):
        self.closed = True

    def is_closing(self):
        return self.closed


def terminal(*pieces, broken=False):
    reader = asyncio.StreamReader()
    for piece in pieces:
        reader.feed_data(piece)
    reader.feed_eof()
    return DebugCliIO(reader, Writer(broken))


async def test_lines_come_as_they_were_sent_and_then_the_end():
    io = terminal(b"attach a 1\r\n", b"p 'x", b"y'\nlast")
    assert [await io.input("> ") for _ in range(3)] == ["attach a 1", "p 'xy'", "last"]
    for _ in range(2):
        with pytest.raises(DebugIOError, match="closed"):
            await io.input()
    assert io._writer.written == b"> > > "
    await io.quit()


async def test_a_broken_stream_is_an_error_of_its_own():
    with pytest.raises(DebugIOError, match="reset"):
        await terminal(broken=True).output("x")


async def test_a_line_that_is_not_wanted_first_is_not_lost():
    io = terminal(b"list\n", b"quit\n")
    assert await io.first_line(1.0, lambda line: line.startswith(b"token ")) is None
    assert [await io.input(), await io.input()] == ["list", "quit"]
    io = terminal(b"token x\n", b"quit\n")
    assert await io.first_line(1.0, lambda line: line.startswith(b"token ")) == b"token x\n"
    assert await io.input() == "quit"


async def test_the_request_of_a_browser_ends_the_connection():
    io = terminal(b"POST /attach HTTP/1.1\r\n", b"attach a 1\n")
    with pytest.raises(DebugIOError):
        await io.input()


async def test_an_interrupt_is_no_line():
    io = terminal(b"\x03\n", b"list\n")
    assert await io.input() == "list"
    assert io.interrupted.is_set()


async def test_a_terminal_that_edits_lines_is_told_when_one_is_expected():
    io = terminal(b"list\n")
    io.enquires = True
    assert await io.input("monarch_dbg> ") == "list"
    assert io._writer.written == b"monarch_dbg> \x05"


async def test_a_terminal_that_asked_for_it_is_told_once_that_its_connection_is_closed_on_purpose():
    for parts, written in ((False, b""), (True, b"\x04")):
        io = terminal()
        io.parts = parts
        await io.quit()
        await io.quit()
        assert io._writer.written == written
