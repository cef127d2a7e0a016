"""One-sided memory by NIXL, for real: UCX copies by the kernel ("cma"), or over sockets ("tcp"), where there is no better hardware."""

from __future__ import annotations

import importlib.util
import os
import pickle
import signal
import time
import warnings

import pytest

from monarch.actor import this_host
from monarch.rdma import RDMATcpFallbackWarning, is_ibverbs_available
from monarch.rdma.nixl_library import devices, probe
from system.memory_owner import MIB, WAIT_S
from system.nixl_actors import KIB, Peer
from system.remote import TESTS
from system.waiting import wait_until

pytest_plugins = ["system.recorder"]
pytestmark = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in ("nixl_cu12", "nixl_cu13")), reason="NIXL is not installed"
)


@pytest.fixture(scope="module", params=["", "tcp"], ids=["cma", "tcp"])
def peers(request):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RDMATcpFallbackWarning)
        procs = this_host().spawn_procs({"procs": 3})
        yield procs.spawn("peers", Peer, request.param)
        procs.stop().get(WAIT_S)


@pytest.fixture
def owner(peers):
    return peers.slice(procs=0)


@pytest.fixture
def reader(peers):
    return peers.slice(procs=1)


def published(owner, nbytes, value=1, number=1):
    return owner.publish.call_one(nbytes, value, number).get(WAIT_S)


def test_bytes_are_read_and_written_whole_and_in_part(owner, reader):
    for nbytes in (100, MIB + 1, 40 * MIB + 5):
        (buffer,) = published(owner, nbytes)
        assert len(pickle.dumps(buffer)) < 300
        assert reader.round_trip.call_one(buffer, nbytes).get(WAIT_S), nbytes
    (own,) = published(reader, 1000)
    assert reader.round_trip.call_one(own, 1000).get(WAIT_S)


def test_a_thousand_small_ones_are_one_action(owner, reader):
    assert reader.many.call_one(published(owner, 4 * KIB, 3, 1000)).get(WAIT_S) == {3}


@pytest.mark.parametrize("peers", [""], ids=["cma"], indirect=True)
def test_threads_submit_at_once(owner, reader):
    assert reader.from_threads.call_one(published(owner, 100 * KIB, 1, 4)).get(WAIT_S)


@pytest.mark.parametrize("peers", [""], ids=["cma"], indirect=True)
def test_an_owner_that_computes_does_not_matter_once_it_was_asked(owner, reader):
    (buffer,) = published(owner, MIB)
    assert reader.round_trip.call_one(buffer, MIB).get(WAIT_S)
    spinning = owner.spin.call_one(0.5)
    assert reader.round_trip.call_one(buffer, MIB).get(WAIT_S) and not spinning._done
    spinning.get(WAIT_S)


def test_dropped_memory_is_an_error_and_is_free_once_its_holders_have_let_go(owner, reader):
    (buffer,) = published(owner, MIB, 5)
    reading = reader.outcomes_until_dropped.call_one(buffer, 5)
    owner.drop.call_one().get(WAIT_S)
    assert reading.get(WAIT_S) <= {True}
    text, _ = reader.failure.call_one(buffer).get(WAIT_S)
    assert text.count("not found") == 2
    wait_until(lambda: owner.num_lingering.call_one().get(WAIT_S) == 0)


@pytest.mark.parametrize("peers", [""], ids=["cma"], indirect=True)
def test_an_agent_without_work_takes_no_processor_time(owner, reader):
    (buffer,) = published(owner, 100)
    assert reader.round_trip.call_one(buffer, 100).get(WAIT_S)
    used = [peer.processor_seconds.call_one(0.4) for peer in (owner, reader)]
    assert all(future.get(WAIT_S) < 0.15 for future in used)  # with NIXL's own setting 0.5


@pytest.mark.parametrize("peers", ["tcp"], ids=["tcp"], indirect=True)
def test_an_owner_that_is_stopped_costs_the_timeout_and_one_that_is_killed_nothing(peers, reader, faults):
    owner = peers.slice(procs=2)
    (buffer,), pid = published(owner, 4 * MIB), owner.pid.call_one().get(WAIT_S)
    assert reader.round_trip.call_one(buffer, 4 * MIB).get(WAIT_S)
    os.kill(pid, signal.SIGSTOP)
    text, seconds = reader.failure.call_one(buffer, 1).get(WAIT_S)
    assert "timed out" in text and seconds < 3
    os.kill(pid, signal.SIGCONT)
    assert reader.round_trip.call_one(buffer, 4 * MIB).get(WAIT_S)  # on a new connection: nothing had moved on the old one
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    text, _ = reader.failure.call_one(buffer).get(WAIT_S)
    assert text.count("the owner of the buffer is gone") == 2 and time.monotonic() - began < 3


def test_a_client_that_has_used_it_forks_closes_begins_anew_and_ends_well(run_script):
    run_script(
        """
        import os
        from monarch.actor import Actor, endpoint, shutdown_context, this_host
        from monarch.rdma import RDMABuffer

        class Reader(Actor):
            @endpoint
            def read(self, buffer: RDMABuffer) -> bytes:
                target = bytearray(buffer.size())
                buffer.read_into(target).get(10)
                return bytes(target)

        def use(text):
            buffer, target = RDMABuffer(bytearray(text)), bytearray(5)
            buffer.read_into(target).get(20)
            assert target == text

        buffer = RDMABuffer(bytearray(b"first"))
        reader = this_host().spawn_procs({"gpus": 1}).spawn("reader", Reader)
        assert reader.read.call_one(buffer).get(20) == b"first"
        if not (child := os.fork()):
            raise SystemExit(0)
        assert os.waitpid(child, 0)[1] == 0
        use(b"again")
        shutdown_context().get(10)
        use(b"third")
        """,
        env={"MONARCH_RDMA_TRANSPORTS": "nixl"},
    ).check()


def test_a_later_region_that_can_not_be_registered_goes_by_tcp_and_the_log_says_so_once(run_script):
    done = run_script(
        """
        import warnings
        warnings.simplefilter("ignore")
        from monarch.actor import Actor, endpoint, this_host
        from monarch.rdma import RDMABuffer
        from monarch.rdma.errors import TransferError
        from monarch.rdma.manager import own_manager
        from monarch.rdma.nixl_agent import Agent
        from system.memory_owner import Owner

        class Full(Owner):
            @endpoint
            def refuse_from(self, most: int) -> None:
                register = Agent.register

                def refuse(self, address, nbytes, device=-1):
                    if nbytes >= most:
                        raise TransferError("registerMem of NIXL failed: no memory can be pinned")
                    return register(self, address, nbytes, device)

                Agent.register = refuse

        class Reader(Owner):
            @endpoint
            def read_all(self, buffers: list[RDMABuffer]) -> list[str]:
                for buffer in buffers:
                    target = bytearray(buffer.size())
                    buffer.read_into(target).get(20)
                    assert set(target) == {1}
                    buffer.write_from(target).get(20)
                return [own_manager()._choice.known(buffer._handle).name for buffer in buffers]

        procs = this_host().spawn_procs({"gpus": 2})
        owner, reader = procs.slice(gpus=0).spawn("owner", Full), procs.slice(gpus=1).spawn("reader", Reader)
        owner.refuse_from.call_one(1 << 20).get(20)
        small, large, other = (owner.publish.call_one(nbytes).get(20)[0] for nbytes in (1000, 2 << 20, 1 << 20))
        print(*reader.read_all.call_one([small, large, other, small]).get(30))
        """,
        env={"MONARCH_RDMA_TRANSPORTS": "nixl,tcp", "PYTHONPATH": TESTS},
    )
    done.check()
    assert "nixl tcp tcp nixl" in done.stdout
    text = done.stdout + done.stderr
    assert text.count("because nixl does not lead there: reason=the owner: registerMem of NIXL failed: no memory can be pinned") == 1


def test_a_process_that_reads_its_own_memory_tells_what_works():
    assert probe("tcp", "lo")
    assert is_ibverbs_available() is bool(devices() and probe("ib"))
