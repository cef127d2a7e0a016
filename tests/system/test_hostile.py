"""Hostile input against a real worker loop and its procs: they go on, forget nothing they should know, and believe nobody without proof."""

from __future__ import annotations

import contextlib
import glob
import os
import pickle
import random
import re
import resource
import signal
import socket
import threading
import time
from collections import Counter, deque
from pathlib import Path

import pytest

from monarch._base.ids import split_address
from monarch._net import credentials, secret
from monarch._net.handshake import DialerProof, Preface, Status, StatusCode, StatusReader, encode_preface
from monarch._wire.frames import Kind, encode
from monarch.actor import Actor, attach_to_workers, endpoint, start_worker_loop_forever
from monarch.testing.leaks import children
from system.waiting import is_gone, wait_until

WAIT_S = 10.0
CONNECTIONS = 10_000
AT_A_TIME = 700
"""More than the agent lets wait."""


class Worker(Actor):
    def __init__(self):
        self.number = 0
        self.held = []

    @endpoint
    def count(self):
        self.number += 1
        return self.number

    @endpoint
    def pid(self):
        return os.getpid()

    @endpoint
    def use_up_descriptors(self):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
        with contextlib.suppress(OSError):
            while True:
                self.held.append(os.dup(0))

    @endpoint
    def free_descriptors(self):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        while self.held:
            os.close(self.held.pop())


class Cluster:
    """A worker loop on loopback with a secret, a client that is attached to it, and one actor."""

    def __init__(self, folder):
        self.logs = folder / "logs"
        self.secret = secret.write_secret_file(folder / "job.secret")
        self.environment = pytest.MonkeyPatch()
        for name, value in (
            ("MONARCH_SECRET_FILE", str(folder / "job.secret")),
            ("MONARCH_FILE_LOG", "info"),
            ("MONARCH_LOG_FOLDER", str(self.logs)),
        ):
            self.environment.setenv(name, value)
        credentials.set_credentials(None)
        before = set(children(os.getpid()))
        listener = socket.create_server(("127.0.0.1", 0))
        self.place = listener.getsockname()
        self.ended = start_worker_loop_forever(address=f"tcp://127.0.0.1:fd{listener.detach()}")
        (self.agent,) = set(children(os.getpid())) - before
        self.hosts = attach_to_workers(workers=[f"tcp://127.0.0.1:{self.place[1]}"])
        assert self.hosts.initialized.get(timeout=WAIT_S)
        self.procs = self.hosts.spawn_procs({"procs": 1})
        self.worker = self.procs.spawn("worker", Worker)
        self.proc = self.worker.pid.call_one().get(timeout=WAIT_S)
        self.name = split_address(self.procs._refs[0].address)[1]

    def count(self):
        return self.worker.count.call_one().get(timeout=WAIT_S)

    def close(self):
        self.hosts.shutdown().get(timeout=WAIT_S)
        self.ended.get(timeout=WAIT_S)
        credentials.set_credentials(None)
        self.environment.undo()

    def refusals(self):
        """What the agent's log says of connections that came to nothing, by kind."""
        found = Counter()
        for line in self.log().splitlines():
            if match := re.search(r"connections refused: (.*?); the last one", line):
                for kind, number in re.findall(r"(\w+) (\d+)", match[1]):
                    found[kind] += int(number)
        return found

    def log(self):
        return "".join(Path(path).read_text() for path in glob.glob(f"{self.logs}/runtime/*.log*"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    made = Cluster(tmp_path_factory.mktemp("hostile"))
    yield made
    made.close()


@contextlib.contextmanager
def many_descriptors(number):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(limits[0], number)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, max(wanted, limits[1])))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def exactly(sock, count):
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise EOFError(data)
        data += piece
    return data


def status_of(sock) -> Status:
    reader = StatusReader()
    while needed := reader.needed():
        reader.feed(exactly(sock, needed))
    return reader.status


def connect(cluster, first=b""):
    sock = socket.create_connection(cluster.place, WAIT_S)
    sock.sendall(first)
    return sock


def is_closed(sock):
    """The other end ends the connection, without having said more."""
    with contextlib.suppress(ConnectionResetError):
        return sock.recv(1) == b""
    return True


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def rss_bytes(pid):
    return int(re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1]) << 10


def descriptors(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


# --- the flood -------------------------------------------------------------------------------------------------------


def hostile_inputs(target, bomb, chance):
    """One first word of each kind of stranger, for ever."""
    preface, to_proc, nonce = encode_preface(Preface("", False)), encode_preface(Preface(target, False)), bytes(range(32))
    frames = b"".join(bytes(piece) for piece in encode(Kind.CALL, pickle.dumps(bomb), pickle.dumps(bomb), port=1))
    while True:
        yield b""
        yield chance.randbytes(chance.randrange(1, 600))
        yield preface[: chance.randrange(1, len(preface))]
        yield encode_preface(Preface("no-such-process", False)) + nonce
        yield b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
        yield preface + nonce
        yield preface + nonce + bytes(32) + frames
        yield to_proc + nonce + bytes(32) + frames
        yield preface[:10] + b"\xff" + b"x" * 255 + nonce
        yield b"\x16\x03\x01\x40\x00" + bytes(200)
        yield frames
        yield preface + encode_preface(Preface("", False)) * 3


class Honest:
    """Somebody who goes on working: calls, new procs, and what it all took."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.calls, self.spawns, self.slowest_s = 0, 0, 0.0
        self.error = None
        self.stop = threading.Event()
        self.threads = [threading.Thread(target=self.guarded, args=(work,)) for work in (self.call, self.spawn)]

    def guarded(self, work):
        try:
            while not self.stop.is_set():
                work()
        except BaseException as exc:
            self.error = exc

    def call(self):
        began = time.monotonic()
        self.cluster.count()
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        self.calls += 1
        self.stop.wait(0.002)

    def spawn(self):
        procs = self.cluster.hosts.spawn_procs({"procs": 1})
        assert procs.spawn("late", Worker).count.call_one().get(timeout=WAIT_S) == 1
        procs.stop().get(timeout=WAIT_S)
        self.spawns += 1
        self.stop.wait(0.2)

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *exc_info):
        self.stop.set()
        for thread in self.threads:
            thread.join(3 * WAIT_S)


def flood(cluster, number, bomb):
    """Connect `number` times, `AT_A_TIME` at a time, and say something hostile each time."""
    open_ones = deque()
    inputs = hostile_inputs(cluster.name, bomb, random.Random(7))
    try:
        for _ in range(number):
            sock = socket.create_connection(cluster.place, WAIT_S)
            with contextlib.suppress(ConnectionError):
                sock.sendall(next(inputs))
            open_ones.append(sock)
            if len(open_ones) > AT_A_TIME:
                open_ones.popleft().close()
    finally:
        while open_ones:
            open_ones.popleft().close()


def test_ten_thousand_hostile_connections_cost_little_and_the_honest_client_works_on(cluster, tmp_path):
    bomb = Bomb(tmp_path / "exploded")
    first = cluster.count()
    with many_descriptors(4 * AT_A_TIME):
        flood(cluster, 1000, bomb)  # what is allocated once, by buffers and tables, is no growth
        wait_until(lambda: descriptors(cluster.agent) < 60)
        before = rss_bytes(cluster.agent), rss_bytes(cluster.proc), descriptors(cluster.agent), descriptors(cluster.proc)
        with Honest(cluster) as honest:
            flood(cluster, CONNECTIONS, bomb)
    assert honest.error is None, honest.error
    assert honest.calls > 20 and honest.spawns >= 1 and honest.slowest_s < 5
    wait_until(lambda: descriptors(cluster.agent) <= before[2] + 8 and descriptors(cluster.proc) <= before[3] + 8)
    assert rss_bytes(cluster.agent) - before[0] < 30 << 20 and rss_bytes(cluster.proc) - before[1] < 30 << 20
    assert cluster.count() == first + honest.calls + 1, "no call was lost or done twice"
    assert not (tmp_path / "exploded").exists()


def test_the_payload_of_the_flood_would_have_left_a_trace(tmp_path):
    pickle.loads(pickle.dumps(Bomb(tmp_path / "exploded")))
    assert (tmp_path / "exploded").exists()


# --- single strangers ------------------------------------------------------------------------------------------------


def prove(cluster, target=""):
    """Become a member: the socket, and all that was said on it."""
    proof = DialerProof(cluster.secret.encode(), target)
    said = [encode_preface(Preface(target, False)) + proof.first_bytes()]
    sock = connect(cluster, said[0])
    assert status_of(sock).code is StatusCode.OK
    said.append(proof.feed(exactly(sock, 64)))
    sock.sendall(said[1])
    return sock, said


@pytest.mark.parametrize("to_proc", [False, True])
def test_a_handshake_that_is_replayed_reordered_or_cut_gets_nobody_in(cluster, to_proc):
    target = cluster.name if to_proc else ""
    sock, said = prove(cluster, target)
    sock.close()
    for again in ([said[0] + said[1]], said, [said[0], said[1][:31]], [said[0][:-32], said[1], said[0][-32:]], [said[1], said[0]]):
        with connect(cluster) as stranger:
            with contextlib.suppress(OSError):  # a socket that the other end has closed can't be shut down either
                for part in again:
                    stranger.sendall(part)
                stranger.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                while stranger.recv(4096):
                    continue
    assert cluster.count()


def test_a_connection_for_one_process_is_worth_nothing_at_another(cluster):
    """Who stands in the middle may lead a handshake for the agent to a proc: the proofs say for whom they are."""
    proof = DialerProof(cluster.secret.encode(), "")
    with connect(cluster, encode_preface(Preface(cluster.name, False)) + proof.first_bytes()) as sock:
        status_of(sock)
        answer = exactly(sock, 64)
        with pytest.raises(ConnectionError, match="another secret"):
            proof.feed(answer)


def test_a_member_who_sends_garbage_is_cut_off_and_nobody_else(cluster, tmp_path):
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    for target in ("", cluster.name):
        for garbage in (
            os.urandom(5000),
            b"".join(bytes(piece) for piece in encode(Kind.CALL, bomb, bomb)),
            b"".join(bytes(piece) for piece in encode(Kind.CONTROL, bomb, bomb)),
            b"".join(bytes(piece) for piece in encode(Kind.SEGMENT, b"", b"", port=1 << 40)),
        ):
            sock, _ = prove(cluster, target)
            with sock, contextlib.suppress(ConnectionError):
                sock.sendall(garbage)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    continue
    assert cluster.count() and not (tmp_path / "exploded").exists()


def test_a_proc_without_descriptors_loses_a_connection_and_not_its_life(cluster):
    cluster.worker.use_up_descriptors.call_one().get(timeout=WAIT_S)
    try:
        for _ in range(3):
            with connect(cluster, encode_preface(Preface(cluster.name, False)) + bytes(range(32))) as sock:
                assert status_of(sock).code is StatusCode.OK
                assert is_closed(sock)
        assert cluster.count()
    finally:
        cluster.worker.free_descriptors.call_one().get(timeout=WAIT_S)
    sock, _ = prove(cluster, cluster.name)
    sock.close()
    assert not is_gone(cluster.proc)


def test_connections_for_a_proc_that_is_stopped_wait_in_small_number(cluster):
    before = descriptors(cluster.agent)
    os.kill(cluster.proc, signal.SIGSTOP)
    try:
        with contextlib.ExitStack() as stack:
            codes = Counter()
            for _ in range(150):
                sock = stack.enter_context(connect(cluster, encode_preface(Preface(cluster.name, False)) + bytes(range(32))))
                codes[status_of(sock).code] += 1
            assert codes == {StatusCode.OK: 32, StatusCode.BUSY: 118}
            assert descriptors(cluster.agent) < before + 80
    finally:
        os.kill(cluster.proc, signal.SIGCONT)
    assert cluster.count() and not is_gone(cluster.proc)
    sock, _ = prove(cluster, cluster.name)  # there is room again
    sock.close()


# --- secrets ---------------------------------------------------------------------------------------------------------


def texts_of(pid):
    for name in ("cmdline", "environ"):
        with contextlib.suppress(OSError):
            yield Path(f"/proc/{pid}/{name}").read_bytes()


def below(pid):
    for child in children(pid):
        yield child
        yield from below(child)


def test_the_secret_is_on_no_command_line_in_no_environment_and_in_no_log(cluster):
    with connect(cluster, encode_preface(Preface("", False)) + bytes(range(32))) as sock:
        status_of(sock)
        exactly(sock, 64)
        sock.sendall(bytes(32))
        assert is_closed(sock)
    pids = [os.getpid(), *below(os.getpid())]
    assert cluster.agent in pids and cluster.proc in pids
    secrets = (cluster.secret.encode(), cluster.secret.encode().hex().encode())
    assert not [pid for pid in pids for text in texts_of(pid) if any(each in text for each in secrets)]
    assert cluster.log() and not any(each.decode() in cluster.log() for each in secrets)


def test_what_is_refused_is_counted_exactly(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("counted"))
    try:
        for number, first in (
            (3, b"GET / HTTP/1.1\r\n\r\n"),
            (5, encode_preface(Preface("", True))),
            (7, encode_preface(Preface("no-such-process", False))),
            (2, b""),
            (4, encode_preface(Preface("", False)) + bytes(64)),
        ):
            for _ in range(number):
                with connect(cluster, first) as sock:
                    if first[:1] == b"\x8d" and number == 4:
                        status_of(sock)
                        exactly(sock, 64)
                    elif first:
                        status_of(sock)
    finally:
        cluster.close()
    # That a process is gone is no reason to wonder, and is not told.
    assert cluster.refusals() == {"refused": 8, "closed": 2, "proof": 4}
    assert cluster.log().count("connections refused") <= 3
