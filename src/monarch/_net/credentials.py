"""Credentials: what this process shows to processes of other hosts, and asks of them.

A process has one set of them. A host agent takes it from its environment or from the script that starts it, and gives it to its
procs in their first message, which travels inside the host; a client takes it when it first attaches.

Read next: `secret.py` and `tls.py`, where they come from; `handshake.py`, which uses them.
"""

from __future__ import annotations

import functools
import os
import socket
from typing import TYPE_CHECKING, NoReturn

import msgspec

from monarch import config
from monarch._base.errors import explain

if TYPE_CHECKING:
    from pathlib import Path

    from monarch._net.tls import TlsContext, TlsSocket


class Credentials(msgspec.Struct, frozen=True):
    """Never printed: its fields are secrets."""

    secret: bytes = b""
    """The job's secret; empty: none."""
    member: bytes = b""
    """PEM: this member's private key and its certificates; empty: no TLS."""
    authority: bytes = b""
    """PEM: who signs the certificates of members."""

    def __repr__(self) -> str:
        return f"Credentials(secret={'yes' if self.secret else 'no'}, tls={'yes' if self.member else 'no'})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(explain("the credentials of a process can't be pickled", next="give each machine its own, by MONARCH_SECRET_FILE"))

    def dialer_tls(self, sock: socket.socket) -> TlsSocket:
        """TLS over a connected socket, as the end that connects.

        Raises:
            ValueError: this process has no certificate.
        """
        return self._tls(sock, dials=True)

    def acceptor_tls(self, sock: socket.socket) -> TlsSocket:
        """TLS over a connected socket, as the end that listened; raises the same."""
        return self._tls(sock, dials=False)

    def _tls(self, sock: socket.socket, *, dials: bool) -> TlsSocket:
        from monarch._net.tls import TlsSocket

        return TlsSocket(sock, _tls_context(self, dials=dials))

    @property
    def has_certificate(self) -> bool:
        """Whether this process can speak TLS."""
        return bool(self.member)


@functools.lru_cache(maxsize=4)
def _tls_context(credentials: Credentials, *, dials: bool) -> TlsContext:
    from monarch._net.tls import acceptor_context, dialer_context, given_files

    if not credentials.has_certificate:
        raise ValueError(
            explain(
                "tls:// needs a certificate, and this process has none",
                next="pass private_key and ca, or set hyperactor_tls_cert, hyperactor_tls_key and hyperactor_tls_ca; "
                "`monarch certs FOLDER` makes them",
            )
        )
    files = given_files(credentials.member, credentials.authority)
    return dialer_context(files) if dials else acceptor_context(files)


_credentials: Credentials | None = None


def own_credentials() -> Credentials:
    """Those of this process; from its environment when nobody has set any.

    Raises:
        ValueError, PermissionError: the environment names a secret that can't be used.
    """
    global _credentials
    if _credentials is None:
        _credentials = credentials_from_environment()
    return _credentials


def encoded_credentials() -> bytes:
    """Those of this process if they were set or asked for before, for a process of this host; else b""."""
    return b"" if _credentials is None else encode(_credentials)


def set_credentials(credentials: Credentials | None) -> None:
    """Use these from now on; None: ask the environment again."""
    global _credentials
    _credentials = credentials


def credentials_from_environment() -> Credentials:
    """`MONARCH_SECRET` or `MONARCH_SECRET_FILE`, and the certificates that the knobs name; raises as `own_credentials`."""
    from monarch._net.secret import job_secret

    if config.value("hyperactor_tls_cert") is None:
        return Credentials(job_secret())
    from monarch._net.tls import configured_files

    files = configured_files()
    assert files is not None
    return Credentials(job_secret(), _pem(files.key) + b"\n" + _pem(files.cert), _pem(files.ca))


def given_credentials(private_key: bytes | Path | None, ca: bytes | Path | None) -> Credentials:
    """The secret of the environment, and the certificates that a script gives, or else those that the knobs name.

    Raises:
        ValueError: one of the two without the other, or a secret that can't be used.
        OSError: a file can't be read.
    """
    if (private_key is None) != (ca is None):
        missing = "ca" if ca is None else "private_key"
        how = "private_key is PEM of the key and its certificates, ca is PEM of who signs them"
        raise ValueError(explain(f"TLS needs {missing} as well", next=how))
    if private_key is None or ca is None:
        return own_credentials()
    return Credentials(own_credentials().secret, _pem(private_key), _pem(ca))


def _pem(source: bytes | str | os.PathLike[str]) -> bytes:
    from monarch._net.tls import read_pem

    return read_pem(source, "private key or certificate")


def send(sock: socket.socket, credentials: Credentials) -> None:
    """Give them to a process of this host, over a socket pair."""
    data = encode(credentials)
    sock.sendall(len(data).to_bytes(4, "little") + data)


def receive(sock: socket.socket) -> Credentials:
    """What the other end of a socket pair has sent by `send`; EOFError when it has ended instead."""
    return decode(_exactly(sock, int.from_bytes(_exactly(sock, 4), "little")))


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise EOFError("whoever started this process has ended")
        data += piece
    return data


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Credentials)
encode = _encoder.encode
decode = _decoder.decode
