"""TLS: members of a job get through with all their bytes, and everybody else gets an error that says what is wrong."""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import os
import random
import select
import socket
import ssl
import threading
import time
from pathlib import Path

import pytest

from monarch import config
from monarch._base.errors import InternalError
from monarch._net import tls
from monarch._net.certificates import mint_job_certificates
from monarch._net.handshake import AcceptorProof, DialerProof, HandshakeError
from monarch._net.tls import TlsFiles, TlsSocket, acceptor_context, configured_files, dialer_context, given_files

WAIT_S = 10.0
MIB = 1 << 20


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return mint_job_certificates(tmp_path_factory.mktemp("certs") / "job")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    return mint_job_certificates(tmp_path_factory.mktemp("certs") / "stranger")


@pytest.fixture
def pair():
    """Two connected sockets; both are closed behind the test."""
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def join():
    """Make a connection of an acceptor and a dialer, each with its own files, and do the handshake."""
    with contextlib.ExitStack() as stack:

        def join(acceptors, dialers=None, send_buffer_bytes=None):
            left, right = socket.socketpair()
            if send_buffer_bytes is not None:
                left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
            ends = TlsSocket(left, acceptor_context(acceptors)), TlsSocket(right, dialer_context(dialers or acceptors))
            for end in ends:
                stack.callback(end.close)
            assert greet(*ends) == [None, None]
            return ends

        yield join


def greet(*ends):
    """Drive the handshakes of some ends of one connection; the error of each, or None."""
    errors = [RuntimeError("not done")] * len(ends)
    deadline_s = time.monotonic() + WAIT_S
    while any(isinstance(error, RuntimeError) for error in errors):
        assert time.monotonic() < deadline_s, errors
        for number, end in enumerate(ends):
            if isinstance(errors[number], RuntimeError):
                try:
                    if end.handshake_step() == "done":
                        errors[number] = None
                except OSError as exc:
                    errors[number] = exc
    return errors


def send(end, data, pieces=1):
    """Send all of `data`, as `pieces` buffers to a call."""
    view = memoryview(data)
    while view:
        cut = -(-len(view) // pieces)
        try:
            view = view[end.sendmsg([view[at : at + cut] for at in range(0, len(view), cut)]) :]
        except BlockingIOError:
            assert select.select([], [end], [], WAIT_S)[1], "never writable again"


def receive(end, count, space_bytes=MIB):
    """Read `count` bytes as an edge-triggered loop does: a wait only after a short count."""
    data, space = bytearray(), memoryview(bytearray(space_bytes))
    while len(data) < count:
        try:
            got, ancillary, flags, address = end.recvmsg_into((space,), 64)
        except BlockingIOError:
            assert select.select([end], [], [], WAIT_S)[0], f"{len(data)} of {count} bytes came"
            continue
        assert (ancillary, flags, address) == ([], 0, None)
        assert got > 0, f"the stream ended after {len(data)} of {count} bytes"
        data += space[:got]
    return bytes(data)


@contextlib.contextmanager
def threads(*functions):
    """Run functions on threads of their own; their values, once the block has ended."""
    values = [None] * len(functions)

    def run(number, function):
        try:
            values[number] = function()
        except BaseException as exc:
            values[number] = exc

    started = [threading.Thread(target=run, args=pair) for pair in enumerate(functions)]
    for thread in started:
        thread.start()
    yield values
    for thread in started:
        thread.join(2 * WAIT_S)
        assert not thread.is_alive()


def noise(count, seed=1):
    return random.Random(seed).randbytes(count)


# --- the channel ---------------------------------------------------------------------------------------------------


def test_members_of_a_job_agree_on_tls_1_3_and_on_the_binding(job, join):
    left, right = join(job)
    assert left._sock.version() == right._sock.version() == "TLSv1.3"
    assert left.binding() == right.binding()
    assert len(left.binding()) == 32


def test_the_binding_is_that_of_both_certificates_and_differs_for_others(job, stranger, join, tmp_path):
    # One file as authority of both jobs, so that their members may talk to each other.
    both = tmp_path / "both.pem"
    both.write_bytes(Path(job.ca).read_bytes() + Path(stranger.ca).read_bytes())
    one, two = TlsFiles(job.cert, job.key, both), TlsFiles(stranger.cert, stranger.key, both)
    found = set()
    for acceptors in (one, two):
        for dialers in (one, two):
            left, right = join(acceptors, dialers)
            assert left.binding() == right.binding()
            found.add(left.binding())
    assert len(found) == 4


def test_a_proof_holds_in_its_own_channel_only(job, stranger, join):
    """Someone in the middle who is a member of both jobs can't pass the proofs of one channel on to the other."""
    (left, right), (other, _) = join(job), join(stranger)
    secret = b"the secret of this job"
    dialer = DialerProof(secret, "", right.binding())
    dialer.feed(AcceptorProof(secret, "", left.binding()).feed(dialer.first_bytes()))
    assert dialer.done
    dialer = DialerProof(secret, "", right.binding())
    with pytest.raises(HandshakeError):
        dialer.feed(AcceptorProof(secret, "", other.binding()).feed(dialer.first_bytes()))


@pytest.mark.cpu_limit(20)
def test_32_mib_go_both_ways_at_once(job, join):
    left, right = join(job)
    there, back = noise(32 * MIB, 1), noise(32 * MIB, 2)
    with threads(
        lambda: send(left, there, pieces=3),
        lambda: send(right, back, pieces=700),
        lambda: hashlib.sha256(receive(left, len(back))).digest(),
        lambda: hashlib.sha256(receive(right, len(there), space_bytes=100_000)).digest(),
    ) as values:
        pass
    assert values == [None, None, hashlib.sha256(back).digest(), hashlib.sha256(there).digest()]


@pytest.mark.parametrize("size", [1, 16384, 16385, 256 * 1024 - 1, 256 * 1024, 256 * 1024 + 1, 600_000])
@pytest.mark.parametrize("pieces", [1, 2, 50])
def test_what_is_sent_arrives_however_it_is_cut(job, join, size, pieces):
    left, right = join(job, send_buffer_bytes=8192)
    data = noise(size)
    with threads(lambda: send(left, data, pieces), lambda: receive(right, size, space_bytes=5000)) as values:
        pass
    assert values == [None, data]


def test_a_short_count_says_that_nothing_more_is_at_hand(job, join):
    left, right = join(job)
    data = noise(100_000)
    send(left, data)
    assert right.recvmsg_into((bytearray(200_000),))[0] == 100_000  # seven records in one call
    with pytest.raises(BlockingIOError):
        right.recvmsg_into((bytearray(200_000),))


def test_decrypted_bytes_behind_a_full_space_are_there_at_once(job, join):
    left, right = join(job)
    send(left, b"x" * 96)
    space = bytearray(32)
    for _ in range(3):
        assert right.recvmsg_into((space,))[0] == 32
        assert not select.select([right], [], [], 0)[0]  # the kernel has nothing, OpenSSL has
    with pytest.raises(BlockingIOError):
        right.recvmsg_into((space,))


def test_several_buffers_are_filled_in_order(job, join):
    left, right = join(job)
    send(left, b"abcdef")
    first, second, third = bytearray(2), bytearray(3), bytearray(9)
    assert right.recvmsg_into((first, second, third))[0] == 6
    assert (first, second, third[:1]) == (b"ab", b"cde", b"f")


def test_a_full_connection_takes_a_part_and_then_blocks(job, join):
    left, right = join(job, send_buffer_bytes=8192)
    data = noise(4 * MIB)
    count = 0
    with pytest.raises(BlockingIOError):
        for _ in range(100):
            count += left.sendmsg((memoryview(data)[count:],))
    assert count < len(data)
    with threads(lambda: send(left, memoryview(data)[count:]), lambda: receive(right, len(data))) as values:
        pass
    assert values == [None, data]


def test_a_blocked_write_is_repeated_with_more_behind_it(job, join):
    left, right = join(job, send_buffer_bytes=8192)
    data = noise(MIB)
    count = 0
    with pytest.raises(BlockingIOError):
        for _ in range(100):
            count += left.sendmsg((memoryview(data)[count : count + 50_000],))
    with threads(lambda: send(left, memoryview(data)[count:], pieces=9), lambda: receive(right, len(data))) as values:
        pass
    assert values == [None, data]


def test_a_blocked_write_is_not_repeated_with_less(job, join):
    left, _ = join(job, send_buffer_bytes=8192)
    with pytest.raises(BlockingIOError):
        for _ in range(100):
            left.sendmsg((bytes(100_000),))
    with pytest.raises(InternalError, match="a write of 100000 bytes must be repeated with at least as many, not 99999"):
        left.sendmsg((bytes(99_999),))


def test_nothing_to_send_is_nothing_sent(job, join):
    left, right = join(job)
    assert left.sendmsg((b"", b"")) == 0
    assert left.sendmsg(()) == 0
    with pytest.raises(BlockingIOError):
        right.recvmsg_into((bytearray(9),))


def test_a_write_that_ended_half_way_breaks_the_connection(job, join):
    """Ctrl-C, in place of which stands an exception between two buffers: nobody can say what was sent."""

    class NoBuffer:
        def __len__(self):
            return 5

    left, right = join(job)
    with pytest.raises(TypeError):
        left.sendmsg([b"a", NoBuffer()])
    for _ in range(2):
        with pytest.raises(OSError, match="interrupted half-way") as caught:
            left.sendmsg((b"a",))
        assert caught.value.errno == errno.ECONNABORTED
    left.close()
    right.close()


def test_a_reader_gets_its_turn_between_the_chunks_of_a_writer():
    lock, turns = tls._FairLock(), []

    def first_chunk():
        deadline_s = time.monotonic() + WAIT_S
        while not lock._next.locked() and time.monotonic() < deadline_s:
            pass  # until the reader waits
        turns.append("writer")

    def write():
        lock.call(first_chunk)
        for _ in range(1000):
            lock.call(turns.append, "writer")

    with threads(write):
        while not lock._lock.locked():
            pass
        lock.call(turns.append, "reader")
    assert turns.index("reader") == 1
    assert len(turns) == 1002


def test_descriptors_can_not_travel(job, join):
    left, _ = join(job)
    with pytest.raises(InternalError, match="a descriptor can't travel over TLS"):
        left.sendmsg((b"x",), [(socket.SOL_SOCKET, socket.SCM_RIGHTS, b"")])


def test_a_worn_key_is_told(job, join, monkeypatch):
    monkeypatch.setattr(tls, "_KEY_BYTES", 1000)
    left, right = join(job)
    send(left, bytes(999))
    receive(right, 999)
    assert (left.worn, right.worn) == (False, False)
    send(left, b"x")
    receive(right, 1)
    assert (left.worn, right.worn) == (True, True)


# --- its end -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["close", "shutdown", "good-bye"])
def test_the_end_of_the_stream_is_a_count_of_0_behind_all_bytes(job, join, way):
    left, right = join(job)
    send(left, b"last words")
    if way == "close":
        left.close()
    elif way == "shutdown":
        left.shutdown(socket.SHUT_WR)
    else:
        with contextlib.suppress(ssl.SSLWantReadError):
            left._sock.unwrap()
    assert receive(right, 10) == b"last words"
    for _ in range(3):
        assert right.recvmsg_into((bytearray(9),)) == (0, [], 0, None)


def test_shutdown_never_falls_back_to_clear_text(job, join):
    left, right = join(job)
    left.shutdown(socket.SHUT_RD)
    send(left, b"still encrypted")
    assert b"still" not in socket.socket.recv(right._sock, 1000)


def test_writing_to_somebody_who_is_gone_is_an_os_error(job, join):
    left, right = join(job)
    right.close()
    with pytest.raises(ConnectionError) as caught:
        for _ in range(100):
            left.sendmsg((bytes(100_000),))
    assert not isinstance(caught.value, HandshakeError)
    with pytest.raises(OSError, match="an earlier write failed"):
        left.sendmsg((b"x",))


def test_a_closed_socket_says_so_and_has_no_descriptor(job, join):
    left, _ = join(job)
    left.close()
    left.close()
    assert left.fileno() == -1
    for call in (lambda: left.sendmsg((b"x",)), lambda: left.recvmsg_into((bytearray(9),)), lambda: left.shutdown(socket.SHUT_RD)):
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno == errno.EBADF


def test_a_forked_child_can_close_it_though_the_lock_is_held(job, join):
    left, right = join(job)
    with threads(lambda: left._lock.call(receive, right, 1)):  # holds left's lock until a byte comes
        left.abandon()
        assert left.fileno() == -1
        right.close()


def test_bytes_that_were_changed_on_their_way_are_an_error_and_never_data(job, pair):
    """A man in the middle flips one bit of the first record behind the handshake."""
    left, near = socket.socketpair()
    far, right = pair
    ends = TlsSocket(left, acceptor_context(job)), TlsSocket(right, dialer_context(job))
    try:
        for sock in (near, far):
            sock.setblocking(False)
        deadline_s = time.monotonic() + WAIT_S
        while [end.handshake_step() for end in ends] != ["done", "done"]:
            relay(near, far)
            assert time.monotonic() < deadline_s
        send(ends[0], b"x")
        record = near.recv(1000)
        far.sendall(record[:-1] + bytes([record[-1] ^ 1]))
        with pytest.raises(OSError, match="were changed on their way"):
            ends[1].recvmsg_into((bytearray(9),))
    finally:
        for end in ends:
            end.close()
        near.close()


def relay(near, far):
    for source, target in ((near, far), (far, near)):
        with contextlib.suppress(BlockingIOError):
            target.sendall(source.recv(100_000))


# --- who may not take part -----------------------------------------------------------------------------------------


def first_error(end, error):
    """The error of a dialer: in TLS 1.3 the acceptor's verdict on its certificate comes with the first read."""
    if error is None:
        with pytest.raises(OSError) as caught:
            receive(end, 1)
        return caught.value
    return error


def refused(acceptors, dialers, pair):
    """The errors of acceptor and dialer."""
    left, right = TlsSocket(pair[0], acceptors), TlsSocket(pair[1], dialers)
    try:
        errors = greet(left, right)
        return errors[0], first_error(right, errors[1])
    finally:
        left.close()
        right.close()


def test_members_of_another_job_are_refused_by_both_ends(job, stranger, pair):
    acceptor, dialer = refused(acceptor_context(job), dialer_context(stranger), pair)
    assert isinstance(acceptor, HandshakeError)
    assert isinstance(dialer, HandshakeError)
    # The dialer, who sees the acceptor's certificate first, ends it.
    assert "the other end's certificate is not accepted" in str(dialer)
    assert "does not know the authority that signed this process's certificate" in str(acceptor)
    assert "certificates of one authority" in str(acceptor)
    assert "certificates of one authority" in str(dialer)


def test_a_dialer_of_another_job_that_trusts_the_acceptor_is_refused(job, stranger, pair):
    acceptor, dialer = refused(acceptor_context(job), dialer_context(TlsFiles(stranger.cert, stranger.key, job.ca)), pair)
    assert "the other end's certificate is not accepted" in str(acceptor)
    assert "does not know the authority that signed this process's certificate" in str(dialer)
    assert isinstance(dialer, HandshakeError)


def test_a_dialer_without_certificate_is_refused(job, pair):
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname = False
    bare.load_verify_locations(job.ca)
    acceptor, dialer = refused(acceptor_context(job), tls.TlsContext(bare, b"", "dialer"), pair)
    assert "the other end presented no certificate" in str(acceptor)
    assert "the other end requires a certificate, and this process sent none" in str(dialer)
    assert isinstance(acceptor, HandshakeError)
    assert isinstance(dialer, HandshakeError)


@pytest.mark.parametrize("when", ["expired", "not yet valid"])
def test_a_certificate_out_of_its_time_is_refused(pair, when, tmp_path):
    shift = datetime.timedelta(days=-40 if when == "expired" else 40)
    old = mint_job_certificates(tmp_path / "old", now=datetime.datetime.now(datetime.UTC) + shift)
    acceptor, dialer = refused(acceptor_context(old), dialer_context(old), pair)
    assert f"the other end's certificate is not accepted: certificate {'has expired' if when == 'expired' else 'is not yet valid'}" in str(
        dialer
    )
    assert "check the clocks" in str(dialer)
    assert "this process's certificate" in str(acceptor)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2])
@pytest.mark.parametrize("old_side", ["dialer", "acceptor"])
def test_tls_1_2_is_refused(job, pair, version, old_side):
    acceptors, dialers = acceptor_context(job), dialer_context(job)
    old = (dialers if old_side == "dialer" else acceptors).context
    old.minimum_version = old.maximum_version = version
    errors = refused(acceptors, dialers, pair)
    modern = errors[0 if old_side == "dialer" else 1]
    assert "the other end does not speak TLS 1.3" in str(modern)
    assert isinstance(modern, HandshakeError)


@pytest.mark.parametrize(
    ("said", "what"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "the other end speaks HTTP, not TLS"),
        (bytes(range(1, 65)), "the other end does not speak TLS"),
        (bytes(64), "the other end does not speak TLS"),
        (b"\x8dmonarch\x01\x00\x00" + bytes(32), "the other end does not speak TLS"),
        (b"\xff" * 20_000, "the other end does not speak TLS"),
    ],
    ids=["http", "bytes", "zeros", "preface", "many"],
)
def test_plain_text_to_an_acceptor_is_named(job, pair, said, what):
    end = TlsSocket(pair[0], acceptor_context(job))
    try:
        pair[1].sendall(said)
        with pytest.raises(HandshakeError, match=what):
            end.handshake_step()
    finally:
        end.close()


def test_plain_text_to_a_dialer_is_named(job, pair):
    end = TlsSocket(pair[1], dialer_context(job))
    try:
        assert end.handshake_step() == "read"
        pair[0].sendall(bytes(96))
        with pytest.raises(HandshakeError, match=r"does not speak TLS.*\n  next:  one end uses tls:// and the other tcp://"):
            end.handshake_step()
    finally:
        end.close()


@pytest.mark.parametrize("side", [acceptor_context, dialer_context])
def test_a_peer_that_hangs_up_is_no_verdict(job, pair, side):
    end = TlsSocket(pair[0], side(job))
    try:
        assert end.handshake_step() == "read"
        pair[1].close()
        with pytest.raises(ConnectionError, match="closed the connection") as caught:
            for _ in range(3):
                end.handshake_step()
        assert not isinstance(caught.value, HandshakeError)
    finally:
        end.close()


def test_random_bytes_never_get_through(job):
    context = acceptor_context(job)
    for seed in range(200):
        left, right = socket.socketpair()
        end = TlsSocket(left, context)
        beginning = (b"", b"\x16\x03\x01", b"\x16\x03\x01\x00\x20\x01\x00\x00\x1c\x03\x03")[seed % 3]
        right.sendall(beginning + noise(300, seed))
        right.close()
        try:
            with pytest.raises(ConnectionError):
                for _ in range(3):
                    assert end.handshake_step() != "done"
        finally:
            end.close()


# --- what is not done yet ------------------------------------------------------------------------------------------


def test_before_the_handshake_there_is_no_binding(job, pair):
    end = TlsSocket(pair[0], acceptor_context(job))
    try:
        with pytest.raises(InternalError, match="before its handshake was done"):
            end.binding()
        with pytest.raises(InternalError, match="never blocks"):
            end.setblocking(True)
        end.setblocking(False)
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_STREAM
        assert len(end.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE, 4)) == 4
        assert end.getpeername() == ""
        assert end.fileno() > 2
    finally:
        end.close()


# --- files ---------------------------------------------------------------------------------------------------------


def test_bytes_do_as_well_as_paths_and_leave_no_file(job, join, tmp_path, monkeypatch):
    as_bytes = given_files(Path(job.key).read_bytes(), Path(job.ca).read_bytes())
    monkeypatch.setattr(tls, "_OWN_DESCRIPTORS", str(tmp_path / "no /proc here"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    join(as_bytes)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    before = len(os.listdir("/dev/fd"))
    dialer_context(as_bytes)
    assert len(os.listdir("/dev/fd")) == before
    join(as_bytes, given_files(job.key, job.ca))


def test_text_between_the_certificates_of_an_authority_is_no_harm(job, join, tmp_path):
    commented = tmp_path / "ca.pem"
    commented.write_bytes("Prüfstelle, März\n".encode() + Path(job.ca).read_bytes() + b"end\n")
    join(TlsFiles(job.cert, job.key, commented))


def test_an_authority_that_somebody_else_signed_is_trusted_as_it_is(job, join):
    # The member's own certificate is all that its peers trust.
    join(TlsFiles(job.cert, job.key, job.cert))


def test_a_key_is_not_in_the_text_of_files(job):
    key = Path(job.key).read_bytes()
    assert repr(TlsFiles(key, key, job.ca)) == f"TlsFiles(cert=<bytes>, key=<bytes>, ca={job.ca!r})"


@pytest.mark.parametrize(
    ("change", "kind", "what"),
    [
        ({"cert": b"nothing"}, ValueError, "the certificate of TLS can't be used: it holds no certificate in PEM\n  where: the bytes"),
        ({"ca": b"nothing"}, ValueError, "the authority of TLS can't be used: it holds no certificate in PEM"),
        (
            {"ca": b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----"},
            ValueError,
            "the authority of TLS can't be used: OpenSSL",
        ),
        ({"key": b"nothing"}, ValueError, "the private key of TLS can't be used: OpenSSL can't read it"),
        ({"key": "stranger"}, ValueError, "the private key of TLS can't be used: it is not that of the certificate"),
        ({"key": "encrypted"}, ValueError, "the private key of TLS can't be used: it is encrypted, and nobody could be asked"),
        (
            {"cert": "/missing/cert.pem"},
            FileNotFoundError,
            "the certificate of TLS can't be read .*\n  where: /missing/cert.pem\n  next: .*certs",
        ),
        ({"ca": "/"}, IsADirectoryError, "the authority of TLS can't be read"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("side", [acceptor_context, dialer_context])
def test_a_file_that_can_not_be_used_is_named(job, stranger, side, change, kind, what):
    made = {"stranger": lambda: Path(stranger.key).read_bytes(), "encrypted": encrypted_key}
    values = {"cert": job.cert, "key": job.key, "ca": job.ca} | {
        name: made[value]() if value in made else value for name, value in change.items()
    }
    with pytest.raises(kind, match=what) as caught:
        side(TlsFiles(**values))
    assert "PRIVATE KEY" not in str(caught.value)


def encrypted_key():
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

    key = ec.generate_private_key(ec.SECP256R1())
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"password"))


def test_the_knobs_name_all_three_files_or_none(job):
    assert configured_files() is None
    with config.configured(hyperactor_tls_cert=job.cert, hyperactor_tls_key=job.key, hyperactor_tls_ca=job.ca):
        assert configured_files() == job
    with (
        config.configured(hyperactor_tls_cert=job.cert),
        pytest.raises(ValueError, match="hyperactor_tls_key and hyperactor_tls_ca as well"),
    ):
        configured_files()
