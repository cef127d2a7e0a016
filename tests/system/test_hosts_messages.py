"""Messages between machines: what actors send each other over a network is what they send on one host."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from time import perf_counter as clock

import numpy as np
import pytest

from monarch.actor import ActorError, Channel, OneForOne, attach_to_workers, send, this_host, this_proc
from monarch.config import configured
from system.peers import AsyncPeer, Lead, Peer
from system.remote import TRUST, workers
from system.terminal import Wire
from system.waiting import error_of, wait_until

pytest_plugins = ["system.recorder"]
pytestmark = pytest.mark.usefixtures("faults")
WAIT_S = 20.0


@pytest.fixture(scope="module")
def cluster(hosts):
    """Two hosts with a worker loop each, and this process as the client of both."""
    with workers(hosts[:2]) as addresses:
        mesh = attach_to_workers(ca=TRUST, workers=addresses)
        assert mesh.initialized.get(WAIT_S) is True
        yield mesh
        mesh.shutdown().get(20)


@pytest.fixture(scope="module")
def procs(cluster):
    with configured(stall_endpoint_limit="500ms"):
        return cluster.spawn_procs({"gpus": 2})


@pytest.fixture(scope="module")
def peers(procs):
    return procs.spawn("peer", Peer)


@pytest.fixture(scope="module")
def local():
    return this_host().spawn_procs({"here": 1}).spawn("local", Peer)


def names(answers):
    return [name for name, _ in answers]


# --- adverbs ---------------------------------------------------------------------------------------------------------


def test_every_rank_runs_where_its_coordinates_say(peers):
    answers = peers.where.call().get(WAIT_S)
    assert names(answers.values()) == ["host-a", "host-a", "host-b", "host-b"]
    assert len({pid for _, pid in answers.values()}) == 4
    assert [dict(point) for point, _ in peers.rank.call().get(WAIT_S)] == peers.rank.call().get(WAIT_S).values()


def test_all_adverbs_reach_other_hosts(peers):
    far = peers.slice(hosts=1, gpus=1)
    assert far.echo.call_one("one").get(WAIT_S) == "one"
    assert peers.echo.choose("any").get(WAIT_S) == "any"
    assert peers.later.call(7).get(WAIT_S).values() == [7] * 4
    assert sorted(name for name, _ in (future.get(WAIT_S) for future in peers.where.stream())) == ["host-a"] * 2 + ["host-b"] * 2
    peers.add.broadcast("heard")
    assert peers.items.call().get(WAIT_S).values() == [["heard"]] * 4
    port, receiver = Channel.open()
    send(far.echo, ("by port",), {}, port=port)
    assert receiver.recv().get(WAIT_S) == "by port"


def test_order_holds_over_all_adverbs_and_slices(peers):
    far, other = peers.slice(hosts=1, gpus=0), peers.slice(hosts=1, gpus=1)
    for number in range(300):
        (peers if number % 2 else far).add.broadcast(number)
        if number % 7 == 0:
            far.add.call_one(-number)
    expected = [item for number in range(300) for item in ((number, -number) if number % 7 == 0 else (number,))]
    assert far.items.call_one().get(WAIT_S) == expected
    assert other.items.call_one().get(WAIT_S) == list(range(1, 300, 2))
    peers.items.call().get(WAIT_S)


@pytest.mark.parametrize("direction", ["between hosts", "on one host", "to the client's host"])
def test_order_holds_between_actors(peers, local, direction):
    sender = peers.slice(hosts=0, gpus=0)
    receiver = {"between hosts": peers.slice(hosts=1, gpus=1), "on one host": peers.slice(hosts=0, gpus=1), "to the client's host": local}
    sender.send_all.call_one(receiver[direction], 200).get(WAIT_S)
    seen: list[int] = []
    wait_until(lambda: len(seen.extend(receiver[direction].items.call_one().get(WAIT_S)) or seen) >= 200)  # some may be on their way
    assert seen == list(range(200))


def test_large_arrays_arrive_whole(peers):
    array = np.random.default_rng(7).integers(0, 255, 48 << 20, dtype=np.uint8)
    back = peers.slice(gpus=0).echo.call(array).get(WAIT_S)
    assert all((value == array).all() for value in back.values())


# --- references ------------------------------------------------------------------------------------------------------


def test_a_remote_actor_calls_one_of_another_host(procs, peers):
    assert names(peers.slice(hosts=0, gpus=0).ask.call_one(peers.slice(hosts=1)).get(WAIT_S)) == ["host-b"] * 2
    asyncs = procs.slice(hosts=1, gpus=0).spawn("async", AsyncPeer)
    assert names(asyncs.ask.call_one(peers).get(WAIT_S)) == ["host-a"] * 2 + ["host-b"] * 2


def test_remote_actors_call_those_of_the_client(peers, local):
    own = this_proc().spawn("own", Peer)
    assert [pid for [(_, pid)] in peers.ask.call(own).get(WAIT_S).values()] == [os.getpid()] * 4
    [(_, pid)] = local.where.call().get(WAIT_S).values()
    assert [pid for [(_, pid)] in peers.ask.call(local).get(WAIT_S).values()] == [pid] * 4
    assert names(local.ask.call_one(peers).get(WAIT_S)) == ["host-a"] * 2 + ["host-b"] * 2


def test_a_remote_actor_spawns_on_its_own_machine_and_others_reach_that(peers, local):
    spawner = peers.slice(hosts=1, gpus=0)
    assert names(spawner.spawn_here.call_one(2).get(WAIT_S)) == ["host-b"] * 2
    children = spawner.child.call_one().get(WAIT_S)
    assert names(children.where.call().get(WAIT_S).values()) == ["host-b"] * 2
    assert names(peers.slice(hosts=0, gpus=1).ask.call_one(children).get(WAIT_S)) == ["host-b"] * 2
    assert names(local.ask.call_one(children).get(WAIT_S)) == ["host-b"] * 2
    spawner.items.call_one().get(WAIT_S)


def test_a_slice_of_hosts_places_procs(cluster):
    only = cluster.slice(hosts=1).spawn_procs({"gpus": 1})
    assert names(only.spawn("only", Peer).where.call().get(WAIT_S).values()) == ["host-b"]
    only.stop().get(WAIT_S)


# --- failures --------------------------------------------------------------------------------------------------------


def test_an_endpoint_that_raises_tells_rank_and_place(peers):
    error = error_of(peers.slice(hosts=1, gpus=1).fail.call_one("no luck"))
    assert isinstance(error, ActorError)
    assert "no luck" in str(error) and "peers.py" in str(error)
    assert peers.slice(hosts=1, gpus=1).echo.call_one(1).get(WAIT_S) == 1


def test_the_death_of_a_remote_proc_is_told_at_once(cluster, faults):
    procs = cluster.spawn_procs({"gpus": 2})
    peers = procs.spawn("mortal", Peer)
    victim = peers.slice(hosts=1, gpus=0)
    (_, pid) = victim.where.call_one().get(WAIT_S)
    waiting = victim.sleep.call_one(60.0)
    victim.where.call_one()
    began = clock()
    os.kill(pid, signal.SIGKILL)
    error = error_of(waiting)
    took_s = clock() - began
    print(f"SIGKILL of a remote proc -> error: {took_s * 1000:.1f} ms")
    assert took_s < 1
    assert ("SIGKILL" in str(error) and "'hosts': 1" in str(error)) or "hosts=1" in str(error)
    [failure] = faults.wait(1)
    assert failure.crashed_ranks == [2]
    assert peers.slice(hosts=0).echo.call(1).get(WAIT_S).values() == [1, 1]
    procs.stop().get(WAIT_S)


def test_slices_of_a_mesh_on_two_hosts_keep_their_coordinates(cluster, faults):
    """Overlapping slices answer by view and full coordinates; a death fails the calls that include the rank, once for the owner."""
    procs = cluster.spawn_procs({"procs": 3})
    peers = procs.spawn("sliced", Peer)
    left, right = peers.slice(procs=slice(0, 2)), peers.slice(procs=slice(1, 3))
    for view, first in ((left, 0), (right, 1)):
        answers = view.ranks.call().get(WAIT_S)
        assert len(answers) == 4
        for point, (full, seen) in answers.items():
            assert dict(point) == seen
            assert full == {"hosts": seen["hosts"], "procs": seen["procs"] + first}
    assert len(procs.slice(procs=slice(0, 2)).spawn("fewer", Peer).where.call().get(WAIT_S)) == 4

    peers.slice(hosts=1, procs=1).die.broadcast()
    [failure] = faults.wait(1)  # one for both meshes of actors that had a member there
    assert "'hosts': 1/2, 'procs': 1/3" in failure.report()
    for view in (left, right):
        assert "'hosts': 1/2, 'procs': 1/3" in str(error_of(view.where.call()))
    assert len(peers.slice(procs=2).where.call().get(WAIT_S)) == 2
    faults.wait(1)
    procs.stop().get(WAIT_S)


def test_a_policy_restarts_a_proc_of_another_machine(cluster, faults):
    procs = cluster.spawn_procs({"gpus": 1})
    peers = procs.supervised(OneForOne(max_restarts=5, within_s=60, backoff_s=0.0)).spawn("renewed", Peer)
    before = peers.where.call().get(WAIT_S).values()
    lost = peers.slice(hosts=1).sleep.call(60.0)
    os.kill(before[1][1], signal.SIGKILL)
    assert "the actor is restarting" in str(error_of(lost))
    after = peers.where.call().get(WAIT_S).values()
    assert after[0] == before[0] and after[1][0] == "host-b" and after[1][1] != before[1][1]
    assert not faults.seen
    procs.stop().get(WAIT_S)


def test_an_owner_on_one_machine_hears_of_a_death_on_another(cluster):
    lead = cluster.slice(hosts=0).spawn_procs({"lead": 1}).spawn("lead", Lead)
    led = lead.spawn.call_one(cluster.slice(hosts=1), 1).get(WAIT_S)
    ((name, pid),) = led.where.call().get(WAIT_S).values()
    assert name == "host-b"
    os.kill(pid, signal.SIGKILL)
    told = wait_until(lambda: lead.told.call_one().get(WAIT_S))
    assert len(told) == 1 and "SIGKILL" in told[0]


# --- what else crosses -----------------------------------------------------------------------------------------------


def test_logs_come_with_the_names_of_their_hosts(procs, peers, capsys):
    asyncio.run(show(procs, stream_to_client=True))
    peers.say.call("hello").get(WAIT_S)
    asyncio.run(show(procs))
    printed = capsys.readouterr().out
    assert sorted(re.findall(r"^\[(host-.) .*peer\] \[.*\] hello$", printed, re.MULTILINE)) == ["host-a"] * 2 + ["host-b"] * 2


async def show(procs, **options):
    await procs.logging_option(**options)


def test_a_stalled_endpoint_of_another_machine_is_noticed(peers, caplog):
    with caplog.at_level(logging.WARNING, "monarch.stalls"):
        slept = peers.slice(hosts=1, gpus=1).sleep.call(1.5)
        [record] = wait_until(lambda: [record for record in caplog.records if record.name == "monarch.stalls"])
    assert "host-b" in record.getMessage() and "peers.py" in record.getMessage()
    slept.get(WAIT_S)


def test_a_breakpoint_of_another_machine_opens_here(procs, monkeypatch):
    from monarch._runtime.debug_jobs import find_debug_jobs
    from monarch.actor import debug_controller

    monkeypatch.setenv("MONARCH_DEBUG_SERVER_PORT", "0")
    peers = procs.spawn("broken", Peer)
    stopped = peers.slice(hosts=1, gpus=1).stop_here.call_one()
    controller = debug_controller()
    [session] = wait_until(lambda: [info for info in controller.list.call_one(print_output=False).get(WAIT_S) if info.lineno])
    assert (session.actor_name, session.rank, session.hostname) == ("broken", 0, "host-b")
    [port] = [job.port for job in find_debug_jobs() if job.pid == os.getpid()]
    with Wire(port) as wire:
        wire.enter("attach broken 0", "p 40 + 2", "continue")
        wire.wait(r"42\n")
    stopped.get(WAIT_S)
