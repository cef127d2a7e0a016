"""Weights over hosts: a version passes the learner's link once, versions never mix, and whatever dies, readers get one or an error."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest

from monarch.actor import ActorError, attach_to_workers
from monarch.config import configured
from system.memory_owner import MIB, WAIT_S
from system.remote import TRUST, workers
from system.waiting import is_gone, wait_until
from system.weight_actors import Learner, Reader

pytest_plugins = ["system.recorder"]


@pytest.fixture(scope="module")
def cluster(hosts):
    """Three workers; namespaces share a kernel, which would copy between them."""
    with configured(rdma_transports="tcp"), workers(hosts[:3], MONARCH_RDMA_TRANSPORTS="tcp") as addresses:
        mesh = attach_to_workers(ca=TRUST, workers=addresses)
        assert mesh.initialized.get(WAIT_S) is True
        yield mesh
        mesh.shutdown().get(20)


@pytest.fixture(scope="module")
def procs(cluster):
    return cluster.spawn_procs({"gpus": 2})


@pytest.fixture
def publish(cluster, procs, faults):
    """Makes a learner on the first host that publishes so many bytes, and readers on the others."""
    started = []

    def publish(nbytes: int, **options):
        own = cluster.slice(hosts=0).spawn_procs(name="learner")
        learner = own.spawn("learner", Learner, nbytes)
        started.append(own)
        weights = learner.start.call_one(hosts=cluster, **options).get(WAIT_S)
        readers = procs.slice(hosts=slice(1, 3)).spawn("readers", Reader, nbytes)
        readers.take.call(weights).get(WAIT_S)
        return learner, readers

    yield publish
    for own in started:
        own.stop().get(WAIT_S)


def test_each_version_passes_the_learners_link_once(hosts, publish):
    nbytes = 4 * MIB
    learner, readers = publish(nbytes)
    assert readers.pull.call().get(WAIT_S).values() == [0] * 4
    for version in (1, 2):
        learner.publish.call_one().get(WAIT_S)
        before = [host.sent_bytes() for host in hosts[:3]]
        assert readers.pull.call().get(WAIT_S).values() == [version] * 4
        sent = [(host.sent_bytes() - bytes_before) / nbytes for host, bytes_before in zip(hosts[:3], before, strict=True)]
        assert 1 <= sent[0] < 1.2 and sum(1 <= share < 1.2 for share in sent[1:]) == 1 and min(sent) < 0.2


def test_versions_never_mix_while_the_learner_publishes_all_the_time(publish):
    learner, readers = publish(MIB, copies=3)
    learner.publish_all_the_time.call_one(0.02).get(WAIT_S)
    seen = readers.pull_for.call(0.8).get(WAIT_S).values()
    last = learner.rest.call_one().get(WAIT_S)
    for versions in seen:
        assert versions == sorted(versions) and versions[-1] > versions[0]
    assert readers.pull.call().get(WAIT_S).values() == readers.map.call().get(WAIT_S).values() == [last] * 4


def test_what_is_mapped_is_kept_by_the_relay_and_outlives_the_publisher_which_ends_its_relays(publish):
    learner, readers = publish(MIB, spares=1)
    mapping, others = readers.slice(gpus=0), readers.slice(gpus=1)
    for version in range(3):
        assert mapping.map.call().get(WAIT_S).values() == [version] * 2
        assert learner.publish.call_one().get(WAIT_S) == version + 1
    assert others.pull.call().get(WAIT_S).values() == [3] * 2, "from the learner, for want of room in the relays"
    assert mapping.check_mapped.call().get(WAIT_S).values() == [[0, 1, 2]] * 2
    mapping.unmap.call().get(WAIT_S)
    assert others.map.call().get(WAIT_S).values() == [3] * 2
    places = set(readers.source.call().get(WAIT_S).values())
    assert len(places) == 2 and all("weights-relay" in owner for owner, _ in places)
    learner.close.call_one().get(WAIT_S)
    wait_until(lambda: all(is_gone(pid) for _, pid in places))
    with pytest.raises(ActorError, match=r"these weights are closed: .*version [23] was the last"):
        readers.pull.call().get(WAIT_S)
    assert others.check_mapped.call().get(WAIT_S).values() == [[3]] * 2


def test_when_a_relay_dies_its_readers_go_to_the_learner_and_those_behind_it_read_around_it(hosts, publish):
    learner, readers = publish(4 * MIB)
    assert readers.pull.call().get(WAIT_S).values() == [0] * 4
    first, second = readers.slice(hosts=0), readers.slice(hosts=1)
    [(_, pid)] = set(first.source.call().get(WAIT_S).values())
    hosts[0].limit("100mbit")
    try:
        learner.publish.call_one().get(WAIT_S)
        begun = hosts[0].sent_bytes()
        pulling = readers.pull.call()
        wait_until(lambda: hosts[0].sent_bytes() - begun > MIB)
        os.kill(pid, signal.SIGKILL)
        assert pulling.get(WAIT_S).values() == [1] * 4
    finally:
        hosts.mend()
    learner.publish.call_one().get(WAIT_S)
    assert readers.pull.call().get(WAIT_S).values() == [2] * 4
    assert all("learner" in owner for owner, _ in first.source.call().get(WAIT_S).values())
    assert all("weights-relay" in owner for owner, _ in second.source.call().get(WAIT_S).values())


@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP], ids=lambda way: way.name)
def test_a_relay_that_ends_or_is_stopped_costs_its_readers_little_whatever_the_way(publish, way):
    learner, readers = publish(4 * MIB)
    assert readers.pull.call().get(WAIT_S).values() == [0] * 4
    first = readers.slice(hosts=0)
    [(_, pid)] = set(first.source.call().get(WAIT_S).values())
    learner.publish.call_one().get(WAIT_S)
    os.kill(pid, way)
    try:
        began = time.monotonic()
        assert readers.pull.call(timeout=20).get(WAIT_S).values() == [1] * 4
        assert time.monotonic() - began < 5
        learner.publish.call_one().get(WAIT_S)
        began = time.monotonic()
        assert readers.pull.call(timeout=20).get(WAIT_S).values() == [2] * 4
        assert time.monotonic() - began < 2, "it is not asked again"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def test_a_relay_whose_host_is_cut_off_does_not_keep_those_behind_it(hosts, publish):
    learner, readers = publish(4 * MIB)
    assert readers.pull.call().get(WAIT_S).values() == [0] * 4
    hosts[1].limit("100mbit")
    try:
        learner.publish.call_one().get(WAIT_S)
        begun = hosts[1].sent_bytes()
        pulling = readers.slice(hosts=1).pull.call(timeout=20)
        wait_until(lambda: hosts[1].sent_bytes() - begun > MIB)
        hosts[1].link_down()
        began = time.monotonic()
        assert pulling.get(WAIT_S).values() == [1] * 2
        assert time.monotonic() - began < 5
    finally:
        hosts.mend()


def test_the_death_of_the_learner_is_told_at_once_and_its_relays_end(hosts, publish, faults):
    learner, readers = publish(4 * MIB)
    assert readers.pull.call().get(WAIT_S).values() == [0] * 4
    pids = [pid for _, pid in set(readers.source.call().get(WAIT_S).values())]
    hosts[0].limit("20mbit")
    try:
        learner.publish.call_one().get(WAIT_S)
        begun = hosts[0].sent_bytes()
        pulling = readers.pull.call()
        wait_until(lambda: hosts[0].sent_bytes() - begun > MIB // 2)
        os.kill(learner.pid.call_one().get(WAIT_S), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(ActorError, match=r"the publisher of these weights is gone: learner"):
            pulling.get(WAIT_S)
        assert time.monotonic() - began < 3
    finally:
        hosts.mend()
    with pytest.raises(ActorError, match=r"the publisher of these weights is gone: learner"):
        readers.slice(hosts=0, gpus=0).map.call_one().get(WAIT_S)
    wait_until(lambda: all(map(is_gone, pids)))
