"""Memory of a device of another process, by way of host memory there. The device is one in disguise."""

from __future__ import annotations

import warnings

import pytest

from monarch.actor import this_host
from monarch.rdma import RDMAAction, RDMAError, RDMATcpFallbackWarning
from system.device_owner import DeviceOwner
from system.memory_owner import MIB, WAIT_S, read


@pytest.fixture(scope="module")
def owners():
    return this_host().spawn_procs({"procs": 2}).spawn("owners", DeviceOwner)


@pytest.fixture
def owner(owners):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RDMATcpFallbackWarning)
        yield owners.slice(procs=0)


@pytest.mark.parametrize("nbytes", [100, 40 * MIB + 5])
def test_bytes_are_read_and_written_through_the_host(owner, owners, nbytes):
    buffer = owner.publish.call_one(nbytes, 7).get(WAIT_S)
    assert read(buffer) == b"\7" * nbytes
    buffer.write_from(bytearray([8]) * nbytes).get(WAIT_S)
    buffer[10:20].write_from(bytearray(b"0123456789")).get(WAIT_S)
    expected = b"\10" * 10 + b"0123456789" + b"\10" * (nbytes - 20)
    assert owner.content.call_one().get(WAIT_S) == expected == owners.slice(procs=1).read.call_one(buffer).get(WAIT_S)
    assert owner.num_copies.call_one().get(WAIT_S)


def test_many_small_ones_share_the_way_and_the_actor_may_be_busy(owner):
    buffer = owner.publish.call_one(1000, 3).get(WAIT_S)
    before, busy = owner.num_copies.call_one().get(WAIT_S), owner.sleep.call_one(0.5)
    target, action = bytearray(1000), RDMAAction()
    for start in range(0, 1000, 10):
        action.read_remote(memoryview(target)[start : start + 10], buffer[start : start + 10])
    action.submit().get(WAIT_S)
    assert not busy._done and set(target) == {3}
    busy.get(WAIT_S)
    assert owner.num_copies.call_one().get(WAIT_S) == before + 100


def test_dropped_memory_of_a_device_is_an_error(owner):
    buffer = owner.publish.call_one(100, 1).get(WAIT_S)
    owner.drop.call_one().get(WAIT_S)
    for transfer in (buffer.read_into, buffer.write_from):
        with pytest.raises(RDMAError, match="not found"):
            transfer(bytearray(100)).get(WAIT_S)
