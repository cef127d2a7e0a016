"""The rig of hosts is what tests take it for: everybody is reached, links do as told, and nothing outlives it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from system.hosts import Hosts, inside, own_namespaces, run_script_in, start_script_in, sweep
from system.script import start_script
from system.waiting import is_gone, wait_until

WAIT_S = 20.0
TESTS = str(Path(__file__).parents[1])


@pytest.fixture(autouse=True)
def mended(hosts):
    yield
    hosts.mend()


@contextmanager
def listening(host, family=socket.AF_INET):
    with inside(host):
        sock = socket.socket(family)
    with sock:
        sock.bind((host.ip if family == socket.AF_INET else host.ip6, 0))
        sock.listen()
        sock.settimeout(WAIT_S)
        yield sock


def dial(host, sock, timeout=WAIT_S):
    with inside(host):
        return socket.create_connection(sock.getsockname()[:2], timeout)


@contextmanager
def connected(left, right):
    """A connection from one host to another, as the sockets of both."""
    with listening(right) as listener, dial(left, listener) as ours:
        theirs, _ = listener.accept()
        theirs.settimeout(WAIT_S)
        with theirs:
            yield ours, theirs


def arrives(sender, receiver, within=WAIT_S):
    sender.sendall(b"x")
    receiver.settimeout(within)
    try:
        return receiver.recv(100) != b""
    except TimeoutError:
        return False


@pytest.mark.quick
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_everybody_reaches_everybody(hosts, family):
    assert len(hosts) == 4
    everyone = [hosts.client, *hosts]
    for host in everyone:
        with listening(host, family) as listener:
            for other in everyone:
                with dial(other, listener), listener.accept()[0] as accepted:
                    assert accepted.getpeername()[0] == (other.ip if family == socket.AF_INET else other.ip6)


@pytest.mark.quick
def test_a_thread_comes_home_and_its_sockets_stay(hosts):
    home = os.readlink("/proc/thread-self/ns/net")
    with pytest.raises(KeyError), inside(hosts[0]):
        there = os.readlink("/proc/thread-self/ns/net")
        sock = socket.create_server((hosts[0].ip, 0))
        raise KeyError
    with sock:
        assert os.readlink("/proc/thread-self/ns/net") == home != there
        with dial(hosts[1], sock):
            pass


def test_a_program_on_a_host_is_the_child_itself(hosts):
    a = hosts["a"]
    source = "import os, signal; print(os.readlink('/proc/self/ns/net'), flush=True); signal.pause()"
    with a.run(source, stdout=subprocess.PIPE, text=True) as program:
        with inside(a):
            assert program.stdout.readline().strip() == os.readlink("/proc/thread-self/ns/net")
        assert a.pids() == [program.pid]
        program.kill()
        assert program.wait(WAIT_S) == -signal.SIGKILL
    assert a.pids() == []


def test_a_link_that_is_down_carries_nothing_until_it_is_up(hosts):
    a, b = hosts[:2]
    with connected(a, b) as (ours, theirs):
        assert arrives(ours, theirs)
        b.link_down()
        with inside(b):
            assert Path("/proc/thread-self/net/if_inet6").read_text().count("eth0") == 2  # it keeps its addresses
        assert not arrives(ours, theirs, within=0.3)
        b.link_up()
        assert arrives(ours, theirs)


def seconds_for(left, right, amount):
    with connected(left, right) as (ours, theirs):
        started = time.monotonic()
        ours.setblocking(False)
        left_to_send, got = amount, 0
        while got < amount:
            with suppress(BlockingIOError):
                left_to_send -= ours.send(bytes(min(left_to_send, 1 << 16))) if left_to_send else 0
            got += len(theirs.recv(1 << 16))
        return time.monotonic() - started


@pytest.mark.parametrize("direction", ["from", "to"])
def test_a_limit_holds_in_both_directions(hosts, direction):
    a, b = hosts[:2]
    pair = (a, b) if direction == "from" else (b, a)
    amount = 1 << 20
    assert seconds_for(*pair, amount) < 0.3
    a.limit("20mbit")
    assert 0.3 < seconds_for(*pair, amount) < 3.0  # 0.42 s at 20 Mbit/s
    a.unlimit()
    assert seconds_for(*pair, amount) < 0.3


def test_a_delay_is_paid_each_way(hosts):
    a, b, c = hosts[:3]

    def dial_s(host):
        with listening(a) as listener:
            started = time.monotonic()
            with dial(host, listener):
                return time.monotonic() - started

    def round_trip_s(host):
        return min(dial_s(host) for _ in range(3))  # the machine may be busy

    assert round_trip_s(b) < 0.05
    b.delay(40)
    assert 0.08 <= round_trip_s(b) < 0.3
    assert round_trip_s(c) < 0.05
    with connected(b, a) as (ours, theirs):
        assert arrives(ours, theirs)
        b.delay(0)
        assert arrives(ours, theirs)
    assert round_trip_s(b) < 0.05


def test_what_is_sent_to_a_dropped_address_vanishes_without_a_word(hosts):
    b = hosts["b"]
    nobody = hosts.free_address()
    b.drop(nobody)
    with inside(b), pytest.raises(TimeoutError):
        socket.create_connection((nobody, 26600), timeout=0.3)


def test_two_hosts_that_are_cut_off_from_each_other_reach_the_others(hosts):
    a, b, c = hosts[:3]
    with connected(a, b) as (ours, theirs), connected(c, b) as (third, accepted):
        assert arrives(ours, theirs)
        hosts.cut(a, b)
        assert not arrives(ours, theirs, within=0.3)
        assert not arrives(theirs, ours, within=0.3)
        assert arrives(third, accepted)
        hosts.mend()
        assert arrives(ours, theirs)


def test_a_host_has_its_own_name_and_hosts_file(hosts):
    d = hosts["d"]
    d.rename("node-d", {"node-d": "127.0.1.1", "elsewhere": "10.0.0.7"})
    done = run_script_in(
        d,
        """
        import os, socket
        print(socket.gethostname(), socket.gethostbyname("node-d"), socket.gethostbyname("elsewhere"), socket.gethostbyname("localhost"))
        """,
    ).check()
    assert done.stdout == "node-d 127.0.1.1 10.0.0.7 127.0.0.1\n"
    assert socket.gethostname() != "node-d"


def test_what_is_sent_far_away_follows_the_default_route(hosts):
    a = hosts["a"]
    with inside(a), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        with pytest.raises(OSError, match="unreachable"):
            sock.connect(("203.0.113.1", 9))
        a.add_default_route()
        sock.connect(("203.0.113.1", 9))
        assert sock.getsockname()[0] == a.ip


def test_a_second_rig_is_another_network(hosts):
    with Hosts(("a", "b"), ipv6_only=("b",)) as other:
        assert other.number != hosts.number
        a, b = other
        assert (b.ip, b.url(5)) == ("", f"tcp://[{b.ip6}]:5")
        with listening(b, socket.AF_INET6) as listener:
            with dial(a, listener), dial(other.client, listener):
                pass
            with pytest.raises(OSError):
                dial(hosts[0], listener, timeout=0.3)
        ours = [name for name in own_namespaces() if name.startswith(other.bridge.removesuffix("bridge"))]
        assert len(ours) == 3
    assert not set(ours) & set(own_namespaces())
    assert not Path(f"/sys/class/net/mh{other.number}").exists()


def test_programs_that_still_run_are_killed_and_named():
    rig = Hosts(("a",))
    with rig["a"].run("import signal; signal.pause()") as program:
        wait_until(rig["a"].pids)
        (left,) = rig.close()
        assert "signal.pause()" in left
        assert str(program.pid) in left
        assert program.wait(WAIT_S) == -signal.SIGKILL


RIG = """
    import signal
    from system.hosts import Hosts
    with Hosts(("a",)) as rig:
        program = rig["a"].run("import signal; signal.pause()")
        print("up", program.pid, rig.number, flush=True)
        try:
            signal.pause()
        finally:
            program.kill()
            program.wait()
"""


def start_rig():
    return start_script(RIG, env={"PYTHONPATH": TESTS})


def traces(pid, number):
    return [*Path("/var/run/netns").glob(f"mh-{pid}-*"), *Path("/sys/class/net").glob(f"mh{number}")]


def test_a_rig_goes_with_an_interrupted_test_run():
    with start_rig() as run:
        match = run.wait_line(r"up (\d+) (\d+)")
        assert len(traces(run.pid, match[2])) == 3
        os.kill(run.pid, signal.SIGINT)
        assert run.finish().leftovers == ()
        assert traces(run.pid, match[2]) == []


def test_the_next_run_removes_the_rig_of_one_that_was_killed():
    with start_rig() as run:
        match = run.wait_line(r"up (\d+) (\d+)")
        os.kill(run.pid, signal.SIGKILL)
        wait_until(lambda: is_gone(run.pid))
        sweep()
        assert wait_until(lambda: is_gone(int(match[1])))
        assert wait_until(lambda: not traces(run.pid, match[2]))


def test_a_script_on_a_host_serves_one_on_another(hosts):
    a, b = hosts[:2]
    server = """
        import socket, sys
        with socket.create_server(("", 26600)) as server:
            print("ready", flush=True)
            server.accept()[0].sendall(b"hello")
    """
    client = """
        import socket, sys
        print(socket.create_connection((sys.argv[1], 26600)).recv(100).decode())
    """
    with start_script_in(a, server) as run:
        run.wait_line("ready")
        assert run_script_in(b, client, args=[a.ip]).check().stdout == "hello\n"
        run.finish().check()
