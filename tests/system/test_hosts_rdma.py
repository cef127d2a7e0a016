"""One-sided memory between machines: what the API promises holds over TCP, whatever happens to owners, agents and links."""

from __future__ import annotations

import os
import signal
import time

import msgspec
import numpy as np
import pytest

from monarch._base.ids import ProcRef
from monarch.actor import ActorError, attach_to_workers, this_host
from monarch.config import configured
from monarch.rdma import RDMAAction, RDMABuffer, RDMAError, RDMATimeout
from monarch.rdma.manager import own_manager
from system.memory_owner import MIB, WAIT_S, Owner, check_reads_during_drops, publish, read
from system.remote import TRUST, attach, serving, tls, workers
from system.waiting import wait_until

pytest_plugins = ["system.recorder"]
pytestmark = pytest.mark.filterwarnings("ignore::monarch.rdma.RDMATcpFallbackWarning")


BOTH_WAYS = """
    from monarch.rdma import RDMABuffer
    from system.memory_owner import Owner, publish, read
    owner = procs.slice(gpus=0).spawn("owner", Owner)
    buffer = publish(owner, 20_000_001, 3)
    assert read(buffer) == bytes([3]) * 20_000_001
    buffer.write_from(bytearray([4]) * 20_000_001).get(20)
    assert owner.content.call_one().get(20) == bytes([4]) * 20_000_001
    own = bytearray(b"of a client that nobody dials")
    assert owner.read.call_one(RDMABuffer(own)).get(20) == own
    print("both ways", flush=True)
"""


@pytest.fixture(scope="module", autouse=True)
def only_tcp():
    """Namespaces share a kernel, which would copy between them."""
    with configured(rdma_transports="tcp", rdma_idle_limit="1s"):
        yield


@pytest.fixture(scope="module")
def cluster(hosts, only_tcp):
    with workers(hosts[:2], MONARCH_RDMA_TRANSPORTS="tcp") as addresses:
        mesh = attach_to_workers(ca=TRUST, workers=addresses)
        assert mesh.initialized.get(WAIT_S) is True
        yield mesh
        mesh.shutdown().get(20)


@pytest.fixture(scope="module")
def owners(cluster):
    return cluster.spawn_procs({"gpus": 1}).spawn("owners", Owner)


@pytest.fixture
def owner(owners):
    return owners.slice(hosts=0)


@pytest.fixture
def lonely(cluster, faults):
    procs = cluster.slice(hosts=0).spawn_procs({"lonely": 1})
    yield procs.spawn("lonely", Owner)
    procs.stop().get(WAIT_S)


def connections():
    [transport] = [one for one in own_manager()._choice.transports if one.name == "tcp"]
    return sum(connections.num_open for connections in transport._connections.values())


@pytest.mark.parametrize("nbytes", [1, 4096, MIB + 1, 8 * MIB, 64 * MIB + 5])
def test_bytes_are_read_and_written_whole(owner, nbytes):
    buffer = publish(owner, nbytes, 7)
    assert read(buffer) == b"\7" * nbytes
    data = np.random.default_rng(nbytes).integers(0, 255, nbytes, np.uint8)
    buffer.write_from(data).get(WAIT_S)
    assert read(buffer) == data.tobytes() == owner.content.call_one().get(WAIT_S)
    owner.drop.call_one().get(WAIT_S)


def test_other_hosts_and_procs_of_the_client_read_and_write(owners, owner):
    buffer = owner.publish_and_forget.call_one(b"hello").get(WAIT_S)
    assert owners.read.call(buffer).get(WAIT_S).values() == [b"hello"] * 2
    owners.slice(hosts=1).write.call_one(buffer, b"HE").get(WAIT_S)
    local = this_host().spawn_procs({"here": 1}).spawn("local", Owner)
    assert local.read.call_one(buffer[1:]).get(WAIT_S) == b"Ello"


def test_an_action_moves_many(owners):
    mine, other = (owners.slice(hosts=rank).publish.call_one(4096, rank + 1, 600).get(WAIT_S) for rank in (0, 1))
    target, action = bytearray(4096 * 1200), RDMAAction()
    for number, buffer in enumerate([*mine, *other]):
        action.read_remote(memoryview(target)[number * 4096 : (number + 1) * 4096], buffer)
    action.submit().get(WAIT_S)
    assert target == b"\1" * (4096 * 600) + b"\2" * (4096 * 600)


def test_a_dropped_buffer_is_an_error(owners, owner):
    buffer = publish(owner, MIB, 1)
    assert read(buffer) == b"\1" * MIB
    owners.slice(hosts=1).drop_of.call_one(buffer).get(WAIT_S)
    for nbytes in (10, MIB):
        with pytest.raises(RDMAError, match=rf"buffer {buffer._handle.number} not found"):
            read(buffer[:nbytes])
    with pytest.raises(RDMAError, match="not found"):
        buffer.write_from(bytearray(MIB)).get(WAIT_S)
    assert owner.content.call_one().get(WAIT_S) == b"\1" * MIB
    assert read(publish(owner, MIB, 2)) == b"\2" * MIB


def test_reads_during_drops_are_whole_or_errors(owner):
    check_reads_during_drops(owner, 256 * 1024, 9)


def test_an_owner_that_spins_or_is_stopped_does_not_matter(lonely):
    buffer, pid = publish(lonely, 4 * MIB, 1), lonely.pid.call_one().get(WAIT_S)
    spinning = lonely.spin.call_one(0.5)
    assert read(buffer) == b"\1" * (4 * MIB) and not spinning._done
    spinning.get(WAIT_S)
    os.kill(pid, signal.SIGSTOP)
    try:
        buffer.write_from(bytearray([2]) * (4 * MIB)).get(WAIT_S)
        assert read(buffer) == b"\2" * (4 * MIB)
    finally:
        os.kill(pid, signal.SIGCONT)


def test_the_death_of_an_owner_is_told_at_once_with_its_reason(lonely, faults):
    buffer, pid = publish(lonely, 64 * MIB), lonely.pid.call_one().get(WAIT_S)
    target = bytearray(64 * MIB)
    pending = [buffer.read_into(target) for _ in range(3)]
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RDMAError, match=r"the owner of the buffer is gone: \S+ Killed\(sig=9\): it was killed by signal 9"):
        while True:
            buffer.read_into(target).get(WAIT_S)
    for future in pending:
        future.exception(WAIT_S)
    assert time.monotonic() - began < 5.0
    with pytest.raises(RDMAError, match="the owner of the buffer is gone"):
        buffer.write_from(bytearray(8)).get(WAIT_S)


def test_a_link_that_is_cut_is_a_timeout_and_serves_again_afterwards(hosts, owner):
    buffer = publish(owner, MIB, 3)
    assert read(buffer) == b"\3" * MIB
    hosts.cut(hosts[0], hosts.client)
    began = time.monotonic()
    try:
        with pytest.raises(RDMATimeout, match="tcp submit timed out"):
            read(buffer, timeout=1)
        assert time.monotonic() - began < 3
    finally:
        hosts.mend()
    assert read(buffer, timeout=20) == b"\3" * MIB


def test_connections_are_few_and_go_when_nobody_needs_them(owner):
    buffer = publish(owner, 32 * MIB, 1)
    for future in [buffer.read_into(bytearray(32 * MIB)) for _ in range(4)]:
        future.get(WAIT_S)
    assert 1 <= connections() <= 4
    wait_until(lambda: connections() == 0)
    assert read(buffer[:10]) == b"\1" * 10


def test_memory_of_a_client_that_nobody_can_dial_is_served_by_dialling_the_reader(owners):
    data = bytearray(b"here" * 1000)
    buffer = RDMABuffer(data)
    for _ in range(2):
        assert owners.read.call(buffer).get(WAIT_S).values() == [bytes(data)] * 2
    owners.slice(hosts=1).write.call_one(buffer, b"HE").get(WAIT_S)
    assert data[:4] == b"HEre"
    buffer.drop().get(WAIT_S)
    with pytest.raises(ActorError, match="not found"):
        owners.slice(hosts=0).read.call_one(buffer).get(WAIT_S)


def test_memory_of_procs_of_a_client_that_nobody_can_dial_is_served_as_well(owners):
    local = this_host().spawn_procs({"here": 1}).spawn("local", Owner)
    buffer = local.publish_and_forget.call_one(b"local").get(WAIT_S)
    assert owners.read.call(buffer).get(WAIT_S).values() == [b"local"] * 2


def test_two_on_one_host_that_nobody_can_dial_meet_at_a_socket_file(hosts, owners):
    """The client reads and writes what is on its own host, without the way that the kernel offers."""
    local = this_host().spawn_procs({"here": 2}).spawn("local", Owner)
    buffer = publish(local.slice(here=0), 3 * MIB, 5)
    assert read(buffer) == b"\5" * (3 * MIB) == local.slice(here=1).read.call_one(buffer).get(WAIT_S)
    buffer.write_from(bytearray(MIB)).get(WAIT_S)
    assert local.slice(here=0).content.call_one().get(WAIT_S) == bytes(MIB) + b"\5" * (2 * MIB)
    mine = RDMABuffer(bytearray(b"of the client"))
    assert local.read.call(mine).get(WAIT_S).values() == [b"of the client"] * 2
    mine.drop().get(WAIT_S)


def test_two_that_nobody_can_dial_say_so(hosts):
    buffer = RDMABuffer(bytearray(b"here"))
    handle = msgspec.structs.replace(buffer._handle, nonce=os.urandom(16), ref=ProcRef("elsewhere", "ipc:///nowhere/elsewhere", ""))
    with pytest.raises(RDMAError, match="neither this process nor the host of the owner can be dialled"):
        read(RDMABuffer._of(handle, 0, 4))
    buffer.drop().get(WAIT_S)


@pytest.mark.parametrize("scheme", ["tls", "tcp"])
def test_memory_travels_under_the_protection_of_the_job(hosts, tmp_path, scheme):
    env = {"MONARCH_RDMA_TRANSPORTS": "tcp"} | (
        tls(tmp_path / "job") if scheme == "tls" else {"MONARCH_SECRET": "a-secret-of-this-job-0123456789"}
    )
    url = hosts[2].url(26601, scheme)
    with serving(hosts[2], url, env=env, ca=None):
        assert "both ways" in attach(hosts[3], [url], source=BOTH_WAYS, ca=None, **env).stdout
