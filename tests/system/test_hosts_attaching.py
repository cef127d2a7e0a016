"""Attaching to hosts: late and missing workers are named, addresses mean what they say, and an address may serve somebody else in turn."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from contextlib import ExitStack

import pytest

from system.hosts import Hosts
from system.remote import CLIENT, TRUST, WORKERS, attach, run_alone, serving, start_alone
from system.waiting import wait_until

WAIT_S = 20.0


@pytest.fixture(autouse=True)
def mended(hosts):
    yield
    hosts.mend()


def after_s(done):
    return float(re.search(r"^after ([0-9.]+) s", done.stdout, re.MULTILINE)[1])


def test_a_worker_that_does_not_answer_is_named(hosts):
    """Two loops live, the third address swallows packets: the error says so in time, and the two can be used."""
    a, b = hosts[:2]
    nobody = f"tcp://{hosts.free_address()}:26600"
    b.drop(hosts.free_address())
    with serving(a, 26600, 26601):
        both = [a.url(26600), a.url(26601)]
        done = attach(b, [*both, nobody], HYPERACTOR_MESH_ATTACH_CONFIG_TIMEOUT="4s")
        assert after_s(done) < 7
        assert "attach failed: config push failed during attach on 1 host(s); 2 of 3 answered" in done.stdout
        assert f"    | {nobody}: reply timed out after MESH_ATTACH_CONFIG_TIMEOUT (4s)" in done.stdout
        assert f"attach: 2 of 3 workers have answered; waiting for {nobody} (" in done.stderr
        assert "from host-a\n" in attach(b, both).stdout


def test_a_worker_that_comes_late_is_waited_for(hosts):
    """Longer than the limit of links, which counts from when there is one; meanwhile the log says how many are there."""
    a, b, c = hosts[:3]
    limits = {"HYPERACTOR_CHANNEL_RECONNECT_TIMEOUT": "2s", "HYPERACTOR_MESH_ATTACH_CONFIG_TIMEOUT": "30s"}
    with serving(a, 26600), start_alone(c, CLIENT, args=[f"{a.url(26600)},{b.url(26600)}"], env={"TEST_CA": TRUST, **limits}) as run:
        wait_until(lambda: f"attach: 1 of 2 workers have answered; waiting for {b.url(26600)}" in run.stderr())
        time.sleep(1.5)  # nobody is to notice that it has become later
        assert run.stdout() == ""
        with serving(b, 26600):
            run.wait_line("^from host-a host-b$", 5)
            run.finish().check()


def test_a_recycled_address_serves_the_next_loop_and_no_old_reference(hosts):
    """SIGKILL of a loop with its procs, five times in one client: old references fail at once and for good, the next loop at the
    address is used, and the other host never notices."""
    a, b, c = hosts[:3]
    source = """
        import os, sys, time
        import monarch.actor
        from monarch.actor import attach_to_workers
        from system.peers import Peer
        from system.waiting import error_of
        failures = []
        monarch.actor.unhandled_fault_hook = failures.append
        ca = "trust_all_connections"
        first, second = sys.argv[1:]
        other = attach_to_workers(ca=ca, workers=[second]).spawn_procs().spawn("other", Peer)
        pid = other.where.call_one().get(10)
        old = []
        for number in range(6):
            began = time.monotonic()
            peers = attach_to_workers(ca=ca, workers=[first]).spawn_procs({"gpus": 1}).spawn("peer", Peer)
            peers.where.call().get(10)
            print(f"up {number} after {time.monotonic() - began:.2f} s", flush=True)
            for item in range(500):
                peers.add.broadcast(item)
            if number == 5:
                break
            waiting = peers.sleep.call(60.0)
            error_of(waiting)
            old.append(peers)
            for reference in old:
                began = time.monotonic()
                error = error_of(reference.where.call())
                assert type(error).__name__ == "SupervisionError", error
                assert time.monotonic() - began < 5
            assert other.where.call_one().get(10) == pid
            print(f"lost {number}", flush=True)
        reports = [failure.report() for failure in failures]
        assert sum(failure.mesh_name.startswith("peer-") for failure in failures) == 5, reports
        undelivered = [failure.report() for failure in failures if not failure.mesh_name.startswith("peer-")]  # of the 500
        assert all("a message to add() of rank 0 of mesh peer-" in report for report in undelivered), undelivered
        print("done", flush=True)
    """
    with serving(b, 26600) as _, start_alone(c, source, args=[a.url(26600), b.url(26600)]) as run:
        for number in range(6):
            with serving(a, 26600) as loop:
                run.wait_line(f"^up {number}")
                if number == 5:
                    run.wait_line("^done")
                    run.finish().check()
                    break
                for pid in loop.pids():
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        continue
                run.wait_line(f"^lost {number}", 20)


def test_a_service_id_means_one_loop_and_not_the_next_at_its_address(hosts):
    a, b = hosts[:2]
    ids = ["service<7x1>", "service<7x2>"]
    with serving(a, f"{ids[0]}@{a.url(26600)}", 26601):
        right, other, nobody = f"{ids[0]}@{a.url(26600)}", f"{ids[1]}@{a.url(26600)}", f"{ids[0]}@{a.url(26601)}"
        done = attach(b, [right], [other, nobody], [a.url(26600)], HYPERACTOR_MESH_ATTACH_CONFIG_TIMEOUT="1s")
        assert done.stdout.count("from host-a\n") == 2, "without an id whoever serves there is meant"
        assert f"addresses {a.url(26600)}/@{ids[0]} {a.url(26600)}/@{ids[0]}/" in done.stdout
        assert f"service {ids[1]} is not here (any more): service {ids[0]} is at this address now" in done.stdout
        assert f"service {ids[0]} is not here (any more): a service without an id is at this address now" in done.stdout


# --- addresses -------------------------------------------------------------------------------------------------------


CHILDREN = """
    spawner = peers.slice(gpus=0)
    assert [name for name, _ in spawner.spawn_here.call_one(1).get(10)] == ["host-a"]
    children = spawner.child.call_one().get(10)
    print("child", *[name for name, _ in children.where.call().get(10).values()], *[ref.address for ref in children._core.refs], flush=True)
"""


def test_an_own_name_that_leads_to_loopback_harms_nobody(hosts):
    """Host a calls itself by a name that means 127.0.1.1 there; others reach it, and what its procs spawn there."""
    a, b = hosts[:2]
    a.rename("host-a", {"host-a": "127.0.1.1"})
    try:
        with serving(a, "tcp://host-a:26600") as loop:
            assert "own name but resolves to 127.0.1.1 here" in loop.stderr()
            done = attach(b, [a.url(26600)], source=CHILDREN)
    finally:
        a._identity = ()
    assert "from host-a\n" in done.stdout and "child host-a" in done.stdout
    assert "127." not in done.stdout + done.stderr


BOTH_WAYS = """
    for address in sys.argv[1:]:
        _, _, peers = use([address])
        spawner = peers.slice(gpus=0)
        assert [name for name, _ in spawner.spawn_here.call_one(1).get(10)] == ["host-a"]
        assert [name for name, _ in spawner.ask.call_one(peers.slice(gpus=1)).get(10)] == ["host-a"]
        print("both ways", flush=True)
"""


def test_a_host_is_used_under_any_of_its_names(hosts):
    """By IPv6 what serves on all interfaces, by a name of /etc/hosts, by an alias, by a port that was free."""
    a, b = hosts[:2]
    b.rename("host-b", {"node-a": a.ip})
    try:
        with serving(a, "tcp://*:26600", "tcp://gate:7000@tcp://0.0.0.0:26601", f"tcp://{a.ip}:0") as loop:
            port = wait_until(lambda: re.search(rf"address=tcp://{re.escape(a.ip)}:(?!26600)(\d+)", loop.stderr()))[1]
            done = attach(b, ["tcp://node-a:26600"], [f"tcp://[{a.ip6}]:26600"], [a.url(26601)], [a.url(int(port))], source=BOTH_WAYS)
            assert done.stdout.count("both ways\n") == 4, done
    finally:
        b._identity = ()


def test_hosts_without_ipv4_work():
    with Hosts(("a", "b"), ipv6_only=("a", "b")) as rig:
        a, b = rig
        with serving(a, "tcp://*:26600") as loop:
            assert f"{a.url(26600)} is advertised" in loop.stderr()
            assert "from host-a\n" in attach(b, [a.url(26600)]).stdout


def test_a_port_that_is_taken_names_who_has_it(hosts):
    a = hosts["a"]
    with serving(a, 26600) as loop:
        done = run_alone(a, WORKERS, args=[a.url(26600)], env={"TEST_CA": TRUST})
        assert done.returncode == 1
        assert "port 26600 is in use" in done.stderr
        holder = re.search(r"where: pid (\d+)", done.stderr)
        assert holder and int(holder[1]) in loop.pids(), done


def test_an_inherited_socket_is_served(hosts):
    a, b = hosts[:2]
    source = """
        import os, socket, sys
        from monarch.actor import run_worker_loop_forever
        sock = socket.create_server((sys.argv[1], 0))
        os.set_inheritable(sock.fileno(), True)
        print("port", sock.getsockname()[1], flush=True)
        run_worker_loop_forever(address=f"tcp://{sys.argv[1]}:fd{sock.fileno()}", ca="trust_all_connections")
    """
    with start_alone(a, source, args=[a.ip]) as loop:
        port = int(loop.wait_line(r"^port (\d+)")[1])
        assert "from host-a\n" in attach(b, [a.url(port)]).stdout


# --- versions --------------------------------------------------------------------------------------------------------


def test_other_versions_are_refused_with_both_sides_values_and_another_torch_is_said(hosts):
    a, b = hosts[:2]
    cases = [
        ({"monarch": "9.9"}, "monarch differs"),
        ({"python": "3.8"}, "python differs"),
        ({"monarch": "9", "protocol": 99}, "monarch and protocol differ"),
    ]
    with ExitStack() as stack:
        for port, versions in enumerate([*(theirs for theirs, _ in cases), {"torch": "1.2.3"}], 26600):
            stack.enter_context(serving(a, port, env={"MONARCH_TEST_VERSIONS": json.dumps(versions)}))
        urls = [a.url(port) for port in range(26600, 26604)]
        done = attach(b, *([url] for url in urls), MONARCH_TEST_VERSIONS='{"torch": "2.0.0"}')
        refusals = re.split(r"^after ", done.stdout, flags=re.MULTILINE)[1:]
        assert len(refusals) == 3
        for refusal, url, (theirs, what) in zip(refusals, urls, cases, strict=False):
            assert float(refusal.partition(" ")[0]) < 5
            assert f"client and worker can't work together: {what}\n" in refusal
            assert re.search(r"^ *\| client ", refusal, re.MULTILINE)
            for value in theirs.values():
                assert re.search(rf"^ *\| {re.escape(url)} .*\b{re.escape(str(value))} !", refusal, re.MULTILINE)
        assert done.stdout.count("from host-a\n") == 1
        assert re.search(r"versions differ:\n(.*\n)*client .* 2\.0\.0\n.*1\.2\.3 !", done.stderr), done
        done = attach(b, urls[:3], MONARCH_ALLOW_VERSION_MISMATCH="1")
        assert "from host-a\n" in done.stdout and "versions differ:" in done.stderr
