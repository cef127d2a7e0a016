"""TLS of connections between hosts: who may take part, and a socket that encrypts.

Both ends present a certificate that the job's authority signed; nothing else is asked of it. There is no check of host names:
certificates are minted per job, for machines whose names and addresses nobody knows yet, and whoever has one is a member.

Rules of this file:
    1. TLS 1.3 only, no session tickets, no compression, no early data: nothing can be replayed or weakened.
    2. A private key that came as bytes is never in a file with a name that lasts.
    3. No call blocks, and every call into OpenSSL is made under the socket's lock: a TLS connection is one state machine for both
       directions, though one thread writes while another reads.
    4. Errors of OpenSSL leave as `HandshakeError` or `OSError`, with a text for people.

Read next: `certificates.py` for how they are made, `stream.py` for who uses the socket.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar

from monarch import config
from monarch._base.errors import InternalError, explain
from monarch._net.handshake import HandshakeError
from monarch._wire.frames import Buffer

Pem: TypeAlias = "bytes | str | os.PathLike[str]"
"""PEM text as bytes, or the path of a file that holds it."""

_T = TypeVar("_T")
_CHUNK_BYTES = 256 * 1024
"""Most that one call encrypts: 0.1 to 0.3 ms, for which a reader waits."""
_KEY_BYTES = 1 << 38
"""RFC 8446, section 5.5: AES-GCM is safe for some 2^24.5 full records under one key, 388 GB; this stays below."""
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_OWN_DESCRIPTORS = "/proc/self/fd"
_KNOBS = {"cert": "hyperactor_tls_cert", "key": "hyperactor_tls_key", "ca": "hyperactor_tls_ca"}
_MINT = "`monarch certs FOLDER` makes certificates for a job"
_ONE_CA = f"give all machines certificates of one authority; {_MINT}"
_PLAIN = "one end uses tls:// and the other tcp://: use one of them on both ends"

_REASONS: tuple[tuple[str, str, str], ...] = (
    # What OpenSSL's reason contains, what it means, what to do.
    ("ALERT_UNKNOWN_CA", "the other end does not know the authority that signed this process's certificate", _ONE_CA),
    ("ALERT_CERTIFICATE_EXPIRED", "the other end says that this process's certificate has expired", f"check the clocks; {_MINT}"),
    ("ALERT_CERTIFICATE_REQUIRED", "the other end requires a certificate, and this process sent none", _ONE_CA),
    ("ALERT_BAD_CERTIFICATE", "the other end does not accept this process's certificate", _ONE_CA),
    ("ALERT_UNSUPPORTED_CERTIFICATE", "this process's certificate is not for this purpose", "it must be for clients and for servers"),
    ("ALERT_DECRYPT_ERROR", "the other end could not verify this process's signature", "key and certificate may not belong together"),
    ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "the other end presented no certificate", _ONE_CA),
    ("ALERT_PROTOCOL_VERSION", "the other end does not speak TLS 1.3", "update its OpenSSL"),
    ("UNSUPPORTED_PROTOCOL", "the other end does not speak TLS 1.3", "update its OpenSSL"),
    ("HTTP_REQUEST", "the other end speaks HTTP, not TLS", "look whether address and port are those of a monarch worker"),
    ("WRONG_VERSION_NUMBER", "the other end does not speak TLS", _PLAIN),
    ("RECORD_LAYER_FAILURE", "the other end does not speak TLS", _PLAIN),
    ("PACKET_LENGTH_TOO_LONG", "the other end does not speak TLS", _PLAIN),
    ("BAD_RECORD", "the encrypted bytes were changed on their way", "look at what is between the machines"),
    ("DECRYPTION_FAILED", "the encrypted bytes were changed on their way", "look at what is between the machines"),
)


# --- who may take part -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TlsFiles:
    """Certificate and key of this process, and the authority whose certificates it accepts. Each a path or PEM as bytes."""

    cert: Pem
    """The certificate, and behind it those between it and the authority, if any."""
    key: Pem
    """Its private key, not encrypted. May be the same text or file as `cert`."""
    ca: Pem

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={'<bytes>' if isinstance(v := getattr(self, name), bytes) else repr(os.fspath(v))}" for name in _KNOBS)
        return f"TlsFiles({shown})"  # a key must not get into a log


def given_files(private_key: Pem, ca: Pem) -> TlsFiles:
    """What a script gives: `private_key` is PEM with the key and the certificate chain."""
    return TlsFiles(private_key, private_key, ca)


def configured_files() -> TlsFiles | None:
    """What the knobs `hyperactor_tls_cert`, `_key` and `_ca` name; None when none is set.

    Raises:
        ValueError: some are set and some are not.
    """
    values = {field: config.value(name) for field, name in _KNOBS.items()}
    if not any(values.values()):
        return None
    missing = [_KNOBS[field] for field, path in values.items() if not path]
    if missing:
        raise ValueError(
            explain(f"TLS needs {' and '.join(missing)} as well", next="set all three, or none; one file may be in two of them")
        )
    return TlsFiles(**values)


@dataclass(frozen=True)
class TlsContext:
    """What a `TlsSocket` needs to know. Made once, used for any number of connections."""

    context: ssl.SSLContext
    certificate: bytes
    """DER of this process's own."""
    side: Literal["acceptor", "dialer"]


def acceptor_context(files: TlsFiles) -> TlsContext:
    """For connections that others made to this process; see `dialer_context`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0
    return TlsContext(context, _set_up(context, files), "acceptor")


def dialer_context(files: TlsFiles) -> TlsContext:
    """For connections that this process makes.

    Raises:
        ValueError: a file is not what it should be, or key and certificate do not belong together.
        OSError: a file can't be read.
    """
    return TlsContext(context := ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), _set_up(context, files), "dialer")


def _set_up(context: ssl.SSLContext, files: TlsFiles) -> bytes:
    """Rule 1, the authority, certificate and key; the certificate as DER."""
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_TICKET
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # `ca` may itself be signed by somebody: it is trusted as it is
    cert, key, ca = read_pem(files.cert, "certificate"), read_pem(files.key, "private key"), read_pem(files.ca, "authority")
    _load_authority(context, ca, files.ca)
    first = _CERTIFICATE.search(cert)
    if first is None:
        raise _unusable("certificate", files.cert, "it holds no certificate in PEM")
    try:
        with _as_file(cert) as cert_path, _as_file(key) as key_path:
            context.load_cert_chain(cert_path, key_path, password=_no_password)
        return ssl.PEM_cert_to_DER_cert(first[0].decode("ascii"))
    except ssl.SSLError as exc:
        fits = "KEY_VALUES_MISMATCH" not in str(exc)
        what = "OpenSSL can't read it" if fits else "it is not that of the certificate"
        raise _unusable("private key", files.key, f"{what} ({exc.reason or exc})") from exc
    except ValueError as exc:
        raise _unusable("private key", files.key, str(exc)) from exc


def _load_authority(context: ssl.SSLContext, ca: bytes, source: Pem) -> None:
    # Only the certificates: OpenSSL wants ASCII, and people write names and dates between them.
    found = _CERTIFICATE.findall(ca)
    if not found:
        raise _unusable("authority", source, "it holds no certificate in PEM")
    try:
        context.load_verify_locations(cadata=b"\n".join(found).decode("ascii"))
    except (ssl.SSLError, ValueError) as exc:
        raise _unusable("authority", source, f"OpenSSL can't read it ({exc})") from exc


def read_pem(source: Pem, what: str) -> bytes:
    """The text of a key or certificate.

    Raises:
        OSError: the file can't be read; the text names it.
    """
    if isinstance(source, bytes):
        return source
    try:
        with open(source, "rb") as file:
            return file.read()
    except OSError as exc:
        text = explain(f"the {what} of TLS can't be read ({exc.strerror})", where=os.fspath(source), next=_MINT)
        raise type(exc)(text) from exc


def _unusable(what: str, source: Pem, why: str) -> ValueError:
    where = "the bytes that were given" if isinstance(source, bytes) else os.fspath(source)
    return ValueError(explain(f"the {what} of TLS can't be used: {why}", where=where, next=_MINT))


def _no_password() -> NoReturn:
    raise ValueError("it is encrypted, and nobody could be asked for its password")  # OpenSSL would ask the terminal


@contextlib.contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    """A path under which only this user finds `data`, for as long as the block lasts: OpenSSL reads keys from files only."""
    if hasattr(os, "memfd_create") and os.path.isdir(_OWN_DESCRIPTORS):
        with open(os.memfd_create("monarch-tls", os.MFD_CLOEXEC), "wb", buffering=0) as nameless:
            nameless.write(data)
            yield f"{_OWN_DESCRIPTORS}/{nameless.fileno()}"
        return
    import tempfile

    with tempfile.NamedTemporaryFile(prefix="monarch-", buffering=0) as named:  # mode 0600, removed when it is closed
        named.write(data)
        yield named.name


# --- the socket --------------------------------------------------------------------------------------------------


class _FairLock:
    """A lock that two threads get in turns. A plain one goes back to whoever releases and takes it again at once."""

    def __init__(self) -> None:
        self._next = threading.Lock()
        self._lock = threading.Lock()

    def call(self, function: Callable[..., _T], *args: Any) -> _T:
        """`function(*args)`, with the lock held."""
        held: list[bool] = []
        try:
            with self._next:
                # One call from the interpreter's view: after a Ctrl-C between `acquire` and the `try` nobody would release.
                held.extend(map(self._lock.acquire, (True,)))
            return function(*args)
        finally:
            if held:
                self._lock.release()


class TlsSocket:
    """A connected, non-blocking socket that encrypts; has what `stream.py` uses of a `socket.socket`.

    It owns the socket that it is made from. The handshake is driven by `handshake_step`; then `sendmsg` and `recvmsg_into`
    mean what a plain socket's mean to an edge-triggered loop:

    - Reading: a count smaller than the space says that nothing more is at hand, so the kernel will report what comes. A
      count as large as the space may have left decrypted bytes behind, of which the kernel knows nothing: whoever
      reads goes on until a smaller count or BlockingIOError, and whoever takes the socket over, behind the handshake or behind
      the proofs, reads before waiting.
    - Writing: a call that would block may have encrypted, and even sent, a part of what it was given. The next
      call must begin with the same bytes; it may have more behind them.
    - The end of the stream is a count of 0 whether TLS said good-bye or not: frames have lengths, and a session knows what is missing.
    - An exception in the middle of `sendmsg`, such as Ctrl-C, leaves open what was sent. The next `sendmsg` then raises OSError:
      the connection is lost, and whoever can resume it does.

    Thread: one that writes and one that reads, at the same time; `fileno` any.
    """

    def __init__(self, sock: socket.socket, tls: TlsContext) -> None:
        """Cost: no I/O.

        Raises:
            OSError: the socket is not connected any more. It is closed.
        """
        sock.setblocking(False)
        self._tls = tls
        self._lock = _FairLock()
        try:
            self._sock = tls.context.wrap_socket(sock, server_side=tls.side == "acceptor", do_handshake_on_connect=False)
        except BaseException:
            sock.close()
            raise
        self._closed = False
        self._writing = False
        """A write is under way, or was interrupted."""
        self._unfinished = 0
        """Length of the chunk that OpenSSL has begun and must see again."""
        self._written = 0
        self._read = 0

    # --- handshake -----------------------------------------------------------------------------------------------

    def handshake_step(self) -> Literal["done", "read", "write"]:
        """Go on with the handshake as far as possible; "read" or "write": again when the socket is ready for that.

        In TLS 1.3 a dialer is done before the acceptor has judged its certificate: a refusal is the error of its first read.

        Raises:
            HandshakeError: the other end is not a member of the job.
            ConnectionError: it is gone.
        """
        try:
            self._lock.call(self._sock.do_handshake)
        except ssl.SSLWantReadError:
            return "read"
        except ssl.SSLWantWriteError:
            return "write"
        except OSError as exc:
            raise _explained(exc, HandshakeError) from exc
        return "done"

    def binding(self) -> bytes:
        """What is the same on both ends of this channel, and on no other between other certificates; 32 bytes.

        Raises:
            InternalError: the handshake is not done.
        """
        try:
            peer = self._lock.call(self._peer_certificate)
        except ValueError:  # not done
            peer = None
        if peer is None:
            raise InternalError("the binding of a TLS channel was asked for before its handshake was done")
        ends = (self._tls.certificate, peer) if self._tls.side == "acceptor" else (peer, self._tls.certificate)
        return hashlib.sha256(b"".join(hashlib.sha256(der).digest() for der in ends)).digest()

    def _peer_certificate(self) -> bytes | None:
        return self._sock.getpeercert(binary_form=True)

    @property
    def worn(self) -> bool:
        """So much went through that the key should be changed, which Python's ssl can't: a new connection has a new one."""
        return max(self._written, self._read) >= _KEY_BYTES

    # --- reading and writing -------------------------------------------------------------------------------------

    def sendmsg(self, buffers: Sequence[Buffer], ancillary: Iterable[Any] = ()) -> int:
        """Send as much as the kernel takes now; how much of the buffers that is.

        Raises:
            BlockingIOError: nothing of it counts as sent. Repeat with the same bytes, or more.
            OSError: the connection is broken.
        """
        if tuple(ancillary):
            raise InternalError("a descriptor can't travel over TLS")
        if self._writing:
            raise OSError(errno.ECONNABORTED, "an earlier write failed, or was interrupted half-way")
        blocked: BlockingIOError | None = None
        count = 0
        self._writing = True
        for chunk in _chunks(buffers, self._unfinished):
            blocked = self._write(chunk)
            if blocked is not None:
                break
            count += len(chunk)
        # No call, so no place for Ctrl-C, from here to the caller: what follows is told, or marked as interrupted.
        self._writing = False
        if blocked is not None and not count:
            raise blocked
        return count

    def _write(self, chunk: Buffer) -> BlockingIOError | None:
        """Encrypt and send one chunk; the exception to raise when it would block."""
        try:
            self._lock.call(self._write_locked, chunk)
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            self._unfinished = len(chunk)
            return BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        except ssl.SSLError as exc:
            raise _explained(exc, OSError) from exc
        self._unfinished = 0
        self._written += len(chunk)
        return None

    def _write_locked(self, chunk: Buffer) -> None:
        self._check_open()
        self._sock.write(chunk)  # all of it, or an exception: OpenSSL's partial writes are off

    def recvmsg_into(
        self, buffers: Sequence[Buffer], ancbufsize: int = 0, flags: int = 0
    ) -> tuple[int, list[tuple[int, int, bytes]], int, None]:
        """Fill the buffers as far as bytes are at hand; as `socket.recvmsg_into`, without ancillary data.

        Returns:
            (count, [], 0, None); a count of 0 is the end of the stream.

        Raises:
            BlockingIOError: nothing is at hand.
            OSError: the connection is broken, or what came is not TLS; a HandshakeError when the acceptor did not take the certificate.
        """
        count = 0
        for buffer in buffers:
            space = memoryview(buffer)
            while len(space):
                got = self._read_into(space)
                if got < 0 and not count:
                    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
                if got <= 0:
                    return count, [], 0, None
                count += got
                self._read += got
                space = space[got:]
        return count, [], 0, None

    def _read_into(self, space: memoryview) -> int:
        """Decrypt one record into `space`; 0: the stream has ended, -1: nothing is at hand."""
        try:
            return self._lock.call(self._read_locked, space)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return -1
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return 0
        except ssl.SSLError as exc:
            # Nothing came yet: this is the acceptor's verdict on the certificate.
            raise _explained(exc, OSError if self._read else HandshakeError) from exc

    def _read_locked(self, space: memoryview) -> int:
        self._check_open()
        return int(self._sock.read(len(space), space))

    def _check_open(self) -> None:
        if self._closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    # --- what a socket has besides -------------------------------------------------------------------------------

    def fileno(self) -> int:
        """The descriptor; -1 when closed."""
        return self._sock.fileno()

    @property
    def family(self) -> int:
        """As `socket.family`."""
        return self._sock.family

    def setblocking(self, flag: bool) -> None:
        """Does nothing for False; InternalError for True, because no call here may wait with the lock held."""
        if flag:
            raise InternalError("a TLS socket of monarch never blocks")

    def getpeername(self) -> Any:
        """As `socket.getpeername`."""
        return self._sock.getpeername()

    def getsockopt(self, level: int, option: int, buffer_bytes: int = 0) -> Any:
        """As `socket.getsockopt`."""
        return self._sock.getsockopt(level, option, buffer_bytes) if buffer_bytes else self._sock.getsockopt(level, option)

    def shutdown(self, how: int) -> None:
        """As `socket.shutdown`, for the connection underneath; TLS says no good-bye."""
        # Not SSLSocket's own: it forgets the keys, and what is written afterwards leaves in clear text.
        self._lock.call(socket.socket.shutdown, self._sock, how)

    def close(self) -> None:
        """Close the connection. Waits for a call under way in another thread: its descriptor may be somebody else's a moment later."""
        self._lock.call(self.abandon)

    def abandon(self) -> None:
        """Close the descriptor only, in a forked child, where the lock may be held by a thread that does not exist."""
        self._closed = True
        self._sock.close()


def _chunks(buffers: Sequence[Buffer], begun: int) -> Iterator[Buffer]:
    """The buffers cut and joined into chunks of `_CHUNK_BYTES`, the last one shorter. Copies only what lies across buffers.

    Args:
        begun: length of the chunk that must come again; equal cuts of equal beginnings are at least as long.
    """
    rest = sum(map(len, buffers))
    if rest < begun:
        raise InternalError(f"a write of {begun} bytes must be repeated with at least as many, not {rest}")
    joined = bytearray()
    for buffer in buffers:
        view = memoryview(buffer)
        while len(view):
            size = min(_CHUNK_BYTES, rest)
            part = view[: size - len(joined)]
            view = view[len(part) :]
            if len(part) == size:
                rest -= size
                yield part
                continue
            joined += part
            if len(joined) == size:
                rest -= size
                yield joined
                joined = bytearray()


def _explained(exc: OSError, kind: type[OSError]) -> OSError:
    """The error for people of one of OpenSSL or of the kernel.

    Args:
        kind: HandshakeError while a refusal is a verdict on who takes part, OSError once both were accepted.
    """
    if isinstance(exc, ssl.SSLEOFError | ssl.SSLZeroReturnError | ConnectionError):
        return ConnectionResetError(explain("the other end closed the connection", next="look at the log of the other end"))
    reason = (exc.reason if isinstance(exc, ssl.SSLError) else "") or exc.strerror or str(exc)
    if isinstance(exc, ssl.SSLCertVerificationError):
        what, remedy = f"the other end's certificate is not accepted: {exc.verify_message}", f"check the clocks; {_ONE_CA}"
    else:
        known = ((meaning, remedy) for part, meaning, remedy in _REASONS if part in reason)
        meaning, remedy = next(known, ("TLS failed", "look at the log of the other end"))
        what = f"{meaning} ({reason})"
    return HandshakeError(what, next=remedy) if kind is HandshakeError else OSError(errno.EPROTO, explain(what, next=remedy))
