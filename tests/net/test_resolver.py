"""Names are looked up beside whoever asks; a result comes once or, cancelled, never; no more threads than needed, and none idle."""

from __future__ import annotations

import socket
import threading

import pytest

from monarch._base.addresses import parse_address
from monarch._net import resolver
from monarch._net.resolver import resolve, resolve_within

WAIT_S = 10.0
LOOPBACK = [(socket.AF_INET, ("127.0.0.1", 5))]


def resolver_threads():
    return [thread for thread in threading.enumerate() if thread.name == "monarch-resolver"]


@pytest.fixture(autouse=True)
def no_thread_outlives_its_queue():
    yield
    for thread in resolver_threads():
        thread.join(WAIT_S)
    assert resolver._threads == 0
    assert not resolver._waiting


class NameServer:
    """Stands for a slow name server: looks nothing up before `answer`."""

    def __init__(self, real):
        self.asked = []
        self.arrived = threading.Semaphore(0)
        self.answer = threading.Event()
        self._real = real

    def getaddrinfo(self, host, port, **options):
        self.asked.append(host)
        self.arrived.release()
        assert self.answer.wait(WAIT_S)
        return self._real("127.0.0.1", port, **options)


@pytest.fixture
def slow(monkeypatch):
    server = NameServer(socket.getaddrinfo)
    monkeypatch.setattr(socket, "getaddrinfo", server.getaddrinfo)
    yield server
    server.answer.set()


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("tcp://127.0.0.1:5", (socket.AF_INET, ("127.0.0.1", 5))),
        ("tls://10.0.0.7:26600", (socket.AF_INET, ("10.0.0.7", 26600))),
        ("tcp://[fd00::7]:1", (socket.AF_INET6, ("fd00::7", 1, 0, 0))),
        ("tcp://[fe80::7%lo]:1", (socket.AF_INET6, ("fe80::7", 1, 0, socket.if_nametoindex("lo")))),
    ],
)
def test_an_ip_address_is_answered_at_once_and_without_a_thread(text, target):
    results = []
    resolution = resolve(parse_address(text), results.append)
    assert results == [[target]]
    assert resolution.cancelled_or_done
    assert not resolver_threads()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tcp://*:1", r"tcp://\*:1 stands for every interface and cannot be dialled\n  next:  give a host name"),
        ("tcp://[fe80::1%nowhere]:1", r"fe80::1%nowhere is of no use here: .*\n  next:  is there an interface 'nowhere'"),
    ],
)
def test_what_cannot_be_dialled_is_refused_at_once(text, message):
    results = []
    resolve(parse_address(text), results.append)
    with pytest.raises(OSError, match=message):
        raise results[0]


def test_a_name_is_looked_up_in_another_thread(slow):
    results, done = [], threading.Event()

    def on_result(result):
        results.append((result, threading.current_thread()))
        done.set()

    resolve(parse_address("tcp://node7:5"), on_result)
    assert slow.arrived.acquire(timeout=WAIT_S)
    assert results == []
    slow.answer.set()
    assert done.wait(WAIT_S)
    ((result, thread),) = results
    assert result == LOOPBACK
    assert thread is not threading.current_thread()


def test_an_unknown_name_is_named():
    with pytest.raises(OSError, match=r"host name 'no-such-host.invalid' cannot be resolved: .*\n  next:  see /etc/hosts and DNS"):
        resolve_within(parse_address("tcp://no-such-host.invalid:1"), WAIT_S)


def test_localhost_leads_to_loopback():
    assert (socket.AF_INET, ("127.0.0.1", 5)) in resolve_within(parse_address("tcp://localhost:5"), WAIT_S)


def test_a_name_that_takes_longer_than_the_budget_is_named(slow):
    with pytest.raises(OSError, match=r"'node7' was not resolved within 0.05 s"):
        resolve_within(parse_address("tcp://node7:1"), 0.05)


def test_a_result_that_nobody_wants_is_dropped(slow):
    results, done = [], threading.Event()
    running = resolve(parse_address("tcp://running:5"), results.append)
    assert slow.arrived.acquire(timeout=WAIT_S)
    running.cancel()
    resolve(parse_address("tcp://other:5"), lambda result: (results.append(result), done.set()))
    slow.answer.set()
    assert done.wait(WAIT_S)
    for thread in resolver_threads():
        thread.join(WAIT_S)
    assert results == [LOOPBACK]


def test_many_names_share_a_few_threads_and_those_cancelled_in_the_queue_are_not_looked_up(slow):
    most = resolver._MOST_THREADS
    results, done = [], threading.Semaphore(0)
    wanted = [resolve(parse_address(f"tcp://h{n}:5"), lambda result: (results.append(result), done.release())) for n in range(3 * most)]
    for _ in range(most):
        assert slow.arrived.acquire(timeout=WAIT_S)
    assert len(resolver_threads()) == most
    for resolution in wanted[2 * most :]:
        resolution.cancel()
    slow.answer.set()
    for _ in range(2 * most):
        assert done.acquire(timeout=WAIT_S)
    assert results == [LOOPBACK] * (2 * most)
    assert slow.asked == [f"h{n}" for n in range(2 * most)]
