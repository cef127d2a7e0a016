"""Clients of hosts come and go: what they leave behind, by whichever way, is nothing, and the hosts serve the next one."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from system.remote import serving, start_alone
from system.waiting import is_gone, wait_until

BOUND_S = 2.0
CLIENT = """
    import os, sys, time
    import monarch.actor
    from monarch.actor import attach_to_workers
    from system.peers import Peer

    def attach():
        mesh = attach_to_workers(ca="trust_all_connections", workers=sys.argv[2:])
        mesh.initialized.get(10)
        procs = mesh.spawn_procs({"gpus": 2})
        peers = procs.spawn("peer", Peer)
        pids = [pid for _, pid in peers.where.call().get(10).values()]
        print("pids", *pids, flush=True)
        return mesh, procs, peers

    mesh, procs, peers = attach()
    what = sys.argv[1]
    if what == "exit":
        pass
    elif what == "wait":
        time.sleep(60)
    elif what == "stop procs":
        procs.stop().get(10)
        print("stopped", flush=True)
        time.sleep(60)
    elif what == "stop hosts":
        mesh.stop().get(10)
        print("stopped", flush=True)
        mesh, procs, peers = attach()
    elif what == "shutdown":
        mesh.shutdown().get(10)
        print("shut down", flush=True)
    elif what == "exception":
        raise ValueError("of the script")
"""


@pytest.fixture
def two(hosts):
    a, b = hosts[:2]
    with serving(a, 26600) as first, serving(b, 26600) as second:
        yield [a.url(26600), b.url(26600)], [first, second]


def client(host, what, addresses, **env):
    return start_alone(host, CLIENT, args=[what, *addresses], env=env)


def pids_of(run):
    return [int(pid) for pid in run.wait_line(r"^pids (.*)$")[1].split()]


def wait_gone(pids, bound_s=BOUND_S):
    began = time.monotonic()
    wait_until(lambda: all(map(is_gone, pids)))
    took_s = time.monotonic() - began
    assert took_s < bound_s, took_s
    return took_s


def test_hosts_serve_one_client_after_the_other_however_each_ends(hosts, two):
    """Each of four pids is gone within 2 s after the client's end by exit, exception, SIGTERM, SIGKILL, or its own stop()."""
    addresses, loops = two
    third = hosts["c"]
    for what, number in (("exit", 0), ("exception", 0), ("wait", signal.SIGKILL), ("wait", signal.SIGTERM), ("stop hosts", 0)):
        with client(third, what, addresses) as run:
            pids = pids_of(run)
            assert len(set(pids)) == 4
            if number:
                assert not any(map(is_gone, pids))
                os.kill(run.pid, number)
            done = run.finish()
            assert done.leftovers == (), done
            all_pids = [int(pid) for line in re.findall(r"^pids (.*)$", done.stdout, re.MULTILINE) for pid in line.split()]
            print(f"{what} {number or ''}: procs gone after {wait_gone(all_pids):.2f} s")
            assert done.returncode == {"exception": 1}.get(what, -number), done
    for loop in loops:
        assert len(loop.pids()) == 3, "the script, the agent, and its zygote"
    with client(third, "shutdown", addresses) as run:
        assert run.finish().check().stdout.endswith("shut down\n")
    for loop in loops:
        assert loop.finish().check().stdout.endswith("ended\n")


def test_two_clients_at_once_do_not_meet(hosts, two):
    addresses, _ = two
    with client(hosts["c"], "wait", addresses) as first, client(hosts["d"], "stop procs", addresses) as second:
        ours, theirs = pids_of(first), pids_of(second)
        second.wait_line("^stopped")
        wait_gone(theirs)
        assert not any(map(is_gone, ours))
        os.kill(first.pid, signal.SIGKILL)
        wait_gone(ours)
        with client(hosts["c"], "exit", addresses) as third:
            pids_of(third)
            third.finish().check()


def test_a_client_that_is_cut_off_loses_its_procs_within_the_bound(hosts, two):
    addresses, _ = two
    c = hosts["c"]
    limits = {"HYPERACTOR_CHANNEL_RECONNECT_TIMEOUT": "2s", "HYPERACTOR_SERVER_HEARTBEAT_INTERVAL": "200ms"}
    with client(c, "wait", addresses, **limits) as run:
        pids = pids_of(run)
        c.link_down()
        took_s = wait_gone(pids, 4.0)
        print(f"client cut off: procs gone after {took_s:.2f} s")
        assert took_s >= 2.0
        c.mend()
    with client(c, "exit", addresses) as run:
        pids_of(run)
        run.finish().check()
