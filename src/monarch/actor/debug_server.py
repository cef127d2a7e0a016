"""The debug server: who may connect to the debugger of a job, and where.

Whoever talks to a debugger runs code as its user. A connection is therefore let in when

- it comes from this machine's loopback and the kernel says that its other end belongs to the same user (Linux), so that
  `nc` needs no ceremony; or
- its first line is the job's secret: `token <secret>`, or the secret alone. `monarch debug` reads it from the run
  directory (`_runtime/debug_jobs.py`), which only the user can.

All others are told so and closed. A wrong secret is refused in any case.

Read next: `debug_service.py`, which serves what was let in.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import ipaddress
import os
import secrets
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from monarch._base.errors import explain
from monarch._runtime.debug_jobs import DEFAULT_PORT, HOST_VARIABLE, PORT_VARIABLE, DebugJob, port_wanted
from monarch.actor.debug_io import DebugCliIO, DebugIOError

PROTOCOL_VARIABLE = "MONARCH_DEBUG_SERVER_PROTOCOL"
_MONARCH_DEBUG_SERVER_HOST_ENV_VAR = HOST_VARIABLE  # these three are names that old scripts import (`_compat.py`)
_MONARCH_DEBUG_SERVER_PORT_ENV_VAR = PORT_VARIABLE
_MONARCH_DEBUG_SERVER_PROTOCOL_ENV_VAR = PROTOCOL_VARIABLE
_PORTS_TO_TRY = 200
_HELLO_S = 0.15
"""How long a terminal that is let in anyway may take to say that it is `monarch debug`."""
_TOKEN_S = 30.0
_WORD = b"token "
_UNKNOWN = "-"
"""In place of the token: I don't know it."""
ENQUIRE = "enquire"
"""Behind the token: tell me when a line is expected of me."""
PART = "part"
"""Behind the token: say so when you close the connection."""
_OVERFLOW_UID = 65534
"""What the kernel shows for users that a user namespace does not know: nobody in particular."""


class Settings(NamedTuple):
    """What the environment asks for."""

    host: str
    port: int
    """0: any."""


def settings() -> Settings:
    """Where the environment wants the server.

    Raises:
        NotImplementedError: a protocol other than tcp.
        ValueError: a port that is none.
    """
    protocol = os.environ.get(PROTOCOL_VARIABLE) or "tcp"
    if protocol != "tcp":
        raise NotImplementedError(explain(f"{PROTOCOL_VARIABLE}={protocol!r}: the debug server knows tcp only", next="unset it"))
    port = port_wanted()
    return Settings(os.environ.get(HOST_VARIABLE) or "localhost", DEFAULT_PORT if port is None else port)


def listen(wanted: Settings) -> socket.socket:
    """A socket that listens at the wanted place, or at the next free port behind it.

    Raises:
        OSError: the host is unknown, or no port is free.
    """
    family, _, _, _, address = _resolve(wanted.host)
    last = wanted.port + 1 if wanted.port == 0 else min(wanted.port + _PORTS_TO_TRY, 65536)
    for port in range(wanted.port, last):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address[0], port))
            sock.listen()
        except OSError as exc:
            sock.close()
            if exc.errno in (errno.EADDRINUSE, errno.EACCES) and port + 1 < last:
                continue
            raise OSError(
                exc.errno,
                explain(
                    f"the debug server can't listen: {exc.strerror}",
                    where=f"{wanted.host}, port {wanted.port}",
                    next=f"set {HOST_VARIABLE} and {PORT_VARIABLE} in the environment of the script",
                ),
            ) from exc
        sock.setblocking(False)
        return sock
    raise AssertionError("unreachable")


def _resolve(host: str) -> Any:
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as exc:
        text = f"the debug server can't listen at {host!r}: {exc.strerror}"
        raise OSError(explain(text, next=f"set {HOST_VARIABLE} to an address of this machine")) from exc
    return min(found, key=lambda entry: entry[0] != socket.AF_INET)


class DebugServer:
    """Listens, lets in whom it may, and hands each terminal to `serve`. Thread: the debug controller's loop."""

    def __init__(self, serve: Callable[[DebugCliIO], Awaitable[None]]) -> None:
        self._serve = serve
        self._token = secrets.token_hex(16)

    async def start(self) -> asyncio.Server:
        """Listen.

        Raises:
            NotImplementedError, ValueError, OSError: what `settings` and `listen` raise.
        """
        return await asyncio.start_server(self._on_connection, sock=listen(settings()))

    def job(self, server: asyncio.Server) -> DebugJob:
        """How others find it."""
        host, port = server.sockets[0].getsockname()[:2]
        if ipaddress.ip_address(host).is_unspecified:
            host = "::1" if ":" in host else "127.0.0.1"
        return DebugJob(host, port, self._token, os.getpid(), " ".join(getattr(sys, "orig_argv", sys.argv)))

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        terminal = DebugCliIO(reader, writer)
        try:
            if await self._admit(terminal, writer):
                await self._serve(terminal)
        except DebugIOError:
            return  # it has left
        except asyncio.CancelledError:
            return  # the controller ends; asyncio's streams (Python 3.11) take a cancelled handler for an error of theirs
        finally:
            await terminal.quit()

    async def _admit(self, terminal: DebugCliIO, writer: asyncio.StreamWriter) -> bool:
        known: bool = owner_of(writer.get_extra_info("peername"), writer.get_extra_info("sockname")) == os.geteuid() != _OVERFLOW_UID
        if known:
            token, *options = await _hello(terminal, _HELLO_S, lambda line: line.startswith(_WORD))
        else:
            await terminal.output("token: ")
            token, *options = await _hello(terminal, _TOKEN_S, lambda line: True)
            if token == _UNKNOWN:  # it says what it is, and its user is about to type the secret
                token, *_ = await _hello(terminal, _TOKEN_S, lambda line: True)
        if hmac.compare_digest(token.encode(), self._token.encode()) or (known and token == _UNKNOWN):
            terminal.enquires, terminal.parts = ENQUIRE in options, PART in options
            return True
        await terminal.output(
            "refused: wrong token, or none; 'monarch debug', run as the user of the job on its machine, knows the right one\n"
        )
        return False


async def _hello(terminal: DebugCliIO, timeout_s: float, wanted: Callable[[bytes], bool]) -> list[str]:
    """The words of the first line behind `token`; `_UNKNOWN` alone when no such line comes."""
    line = await terminal.first_line(timeout_s, wanted)
    words = (line or b"").decode(errors="replace").split()
    return (words[1:] if words[:1] == ["token"] else words) or [_UNKNOWN]


def owner_of(peer: Any, own: Any) -> int | None:
    """The user whose process holds the other end of a loopback connection; None when the kernel does not say.

    Args:
        peer, own: addresses of the two ends, as sockets give them.
    """
    if peer is None or own is None or not _is_loopback(peer[0]):
        return None
    ends = {(_kernel_form(peer, wide), _kernel_form(own, wide)) for wide in (False, True)}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as file:
                rows = file.readlines()[1:]
        except OSError:
            continue
        for row in rows:
            # Of an end that its process has closed the kernel shows user 0 and inode 0; that is nobody's word.
            _, local, remote, _, _, _, _, uid, _, inode, *_ = row.split()
            if (local, remote) in ends and inode != "0":
                return int(uid)
    return None


def _is_loopback(host: str) -> bool:
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _kernel_form(end: Any, wide: bool) -> str:
    """An address as /proc/net/tcp (or, if `wide`, tcp6) writes it: words of 32 bit in the machine's order."""
    address = ipaddress.ip_address(end[0].partition("%")[0])
    address = getattr(address, "ipv4_mapped", None) or address
    packed = address.packed
    if wide and len(packed) == 4:
        packed = b"\0" * 10 + b"\xff\xff" + packed
    words = (packed[at : at + 4] for at in range(0, len(packed), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words) + f":{end[1]:04X}"
