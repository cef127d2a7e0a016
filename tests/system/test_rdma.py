"""One-sided memory on one host: the API with real procs, whose interpreters do what they like meanwhile."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import time
import warnings

import numpy as np
import pytest

from monarch.actor import ActorError, this_host
from monarch.config import configured
from monarch.rdma import (
    RDMAAction,
    RDMABuffer,
    RDMAError,
    RdmaInitError,
    RDMATcpFallbackWarning,
    RDMATimeout,
    get_rdma_backend,
    huge_pages,
    is_ibverbs_available,
    is_rdma_available,
)
from monarch.rdma.manager import own_manager
from system.memory_owner import MIB, WAIT_S, Owner, check_reads_during_drops, publish, read
from system.waiting import wait_until

FAILED = r"RdmaAction.submit failed: RDMA submit failed on 1 backend\(s\):\n\(Tcp\) "


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RDMATcpFallbackWarning)
        yield


@pytest.fixture(scope="module")
def procs():
    return this_host().spawn_procs({"procs": 3})


@pytest.fixture(scope="module")
def owners(procs):
    return procs.spawn("owners", Owner)


@pytest.fixture
def owner(owners):
    return owners.slice(procs=0)


@pytest.fixture
def lonely(faults):
    """An owner that may die."""
    procs = this_host().spawn_procs({"lonely": 1})
    yield procs.spawn("lonely", Owner)
    procs.stop().get(WAIT_S)


pytest_plugins = ["system.recorder"]


# --- transfers -------------------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("nbytes", [1, 4096, MIB, MIB + 1, 8 * MIB, 64 * MIB + 5])
def test_bytes_are_read_and_written_whole(owner, nbytes):
    buffer = publish(owner, nbytes, 7)
    assert buffer.size() == nbytes and read(buffer) == b"\7" * nbytes
    data = np.random.default_rng(nbytes).integers(0, 255, nbytes, np.uint8)
    buffer.write_from(data).get(WAIT_S)
    assert owner.content.call_one().get(WAIT_S) == data.tobytes() == read(buffer)
    owner.drop.call_one().get(WAIT_S)


@pytest.mark.skipif(not huge_pages.is_possible(), reason="this system puts no pages together on request")
def test_a_buffer_that_is_read_again_and_again_is_put_on_huge_pages(owner):
    buffer = publish(owner, 12 * MIB, 7)
    before = owner.huge_kib.call_one().get(WAIT_S)
    for _ in range(huge_pages.TIMES):
        assert read(buffer) == b"\7" * (12 * MIB)
    wait_until(lambda: owner.huge_kib.call_one().get(WAIT_S) - before >= 8 * 1024)
    assert read(buffer) == b"\7" * (12 * MIB) == owner.content.call_one().get(WAIT_S)
    owner.drop.call_one().get(WAIT_S)


def test_a_longer_destination_and_a_shorter_source_leave_the_rest(owner):
    buffer = publish(owner, 8, 1)
    target = bytearray(b"................")
    buffer.read_into(target).get(WAIT_S)
    assert target == b"\1" * 8 + b"........"
    buffer.write_from(memoryview(b"xyz")).get(WAIT_S)
    assert owner.content.call_one().get(WAIT_S) == b"xyz\1\1\1\1\1"


def test_slices_of_buffers_reach_any_part(owner):
    buffer = publish(owner, 100, 1)
    buffer[10:20].write_from(bytearray(b"0123456789")).get(WAIT_S)
    assert read(buffer[9:21]) == b"\x010123456789\x01"
    assert read(buffer[10:20][2:4]) == b"23" and read(pickle.loads(pickle.dumps(buffer[18:]))[:3]) == b"89\x01"
    for wrong, error in ((slice(5, 5), ValueError), (slice(0, 10, 2), TypeError), (3, TypeError)):
        with pytest.raises(error, match="next:"):
            buffer[wrong]


def test_a_later_read_sees_what_the_owner_has_written_since(owner):
    buffer = publish(owner, 1000, 1)
    owner.fill.call_one(9).get(WAIT_S)
    assert read(buffer) == b"\x09" * 1000


def test_a_handle_works_in_every_process_and_is_small(owners, owner):
    buffer = owner.publish_and_forget.call_one(b"hello").get(WAIT_S)
    assert len(pickle.dumps(buffer)) < 1024
    assert owners.read.call(buffer).get(WAIT_S).values() == [b"hello"] * 3
    owners.slice(procs=2).write.call_one(buffer, b"HE").get(WAIT_S)
    assert read(buffer) == b"HEllo"
    assert owners.slice(procs=1).read.call_one(buffer[1:]).get(WAIT_S) == b"Ello"


def test_the_client_owns_memory_too(owners):
    data = bytearray(b"of the client")
    buffer = RDMABuffer(data)
    assert owners.read.call(buffer).get(WAIT_S).values() == [b"of the client"] * 3
    owners.slice(procs=0).write.call_one(buffer, b"OF").get(WAIT_S)
    assert data == b"OF the client" and read(buffer) == b"OF the client"
    buffer.drop().get(WAIT_S)


def test_memory_that_can_not_be_written_can_be_read(owners):
    text = b"immutable"
    buffer = RDMABuffer(memoryview(text))
    assert owners.slice(procs=0).read.call_one(buffer).get(WAIT_S) == text
    with pytest.raises(ValueError, match=r"read-only memory(.|\n)*writable"):
        buffer.write_from(bytearray(1))
    with pytest.raises(ActorError, match="read-only memory"):
        owners.slice(procs=0).write.call_one(buffer, b"x").get(WAIT_S)
    with pytest.raises(ValueError, match="destination local memory is read-only"):
        buffer.read_into(memoryview(b"123456789"))
    assert text == b"immutable"


def test_neither_torch_nor_numpy_is_needed(run_script):
    run_script("""
        import sys
        from monarch.actor import Actor, endpoint, this_host
        from monarch.rdma import RDMABuffer

        class Owner(Actor):
            @endpoint
            def publish(self) -> RDMABuffer:
                return RDMABuffer(memoryview(bytearray(b"hello")))

            @endpoint
            def modules(self) -> set[str]:
                return {"torch", "numpy"} & set(sys.modules)

        owner = this_host().spawn_procs({"gpus": 1}).spawn("owner", Owner)
        target = bytearray(5)
        owner.publish.call_one().get(10).read_into(target).get(10)
        assert target == b"hello"
        assert not owner.modules.call_one().get(10) | ({"torch", "numpy"} & set(sys.modules))
    """).check()


def test_transfers_can_be_awaited_together(owner):
    buffers = owner.publish.call_one(100_000, 6, 20).get(WAIT_S)
    targets = [bytearray(100_000) for _ in buffers]

    async def read_all():
        return await asyncio.gather(*(buffer.read_into(target) for buffer, target in zip(buffers, targets, strict=True)))

    assert asyncio.run(read_all()) == [None] * 20
    assert all(target == b"\6" * 100_000 for target in targets)


# --- order -----------------------------------------------------------------------------------------------------------


def test_a_transfer_starts_without_anybody_waiting(owner):
    buffer = publish(owner, 64 * MIB, 1)
    source = bytearray([2]) * (64 * MIB)
    future = buffer.write_from(source)
    wait_until(lambda: owner.content.call_one().get(WAIT_S)[-1] == 2)
    future.get(WAIT_S)


def test_a_read_before_a_write_sees_the_old_bytes_and_one_behind_it_the_new(owner):
    buffer = publish(owner, 32 * MIB, 1)
    before, after, small = bytearray(32 * MIB), bytearray(32 * MIB), bytearray(10)
    source = bytearray([2]) * (32 * MIB)
    first = buffer.read_into(before)
    write = buffer.write_from(source)
    last = buffer.read_into(after)
    quick = buffer[:10].read_into(small)
    for future in (quick, last, write, first):
        future.get(WAIT_S)
    assert (set(before), set(after), set(small)) == ({1}, {2}, {2})


def test_two_initiators_leave_the_bytes_of_one_of_them(owners, owner):
    buffer = publish(owner, 4096, 0)
    writers = owners.slice(procs=slice(1, 3))
    rounds = [owners.slice(procs=rank).write_for.call_one(buffer, rank, 0.5) for rank in (1, 2)]
    seen = set()
    while not all(future._done for future in rounds):
        seen.update(read(buffer))
    assert all(future.get(WAIT_S) > 10 for future in rounds) and seen <= {0, 1, 2}
    assert len(writers) == 2 and set(owner.content.call_one().get(WAIT_S)) <= {1, 2}


# --- actions ---------------------------------------------------------------------------------------------------------


def test_an_action_moves_many_and_may_be_repeated(owner):
    buffers = owner.publish.call_one(4096, 3, 1000).get(WAIT_S)
    target = bytearray(4096 * 1000)
    parts = [memoryview(target)[start : start + 4096] for start in range(0, len(target), 4096)]
    action = RDMAAction()
    for buffer, part in zip(buffers, parts, strict=True):
        assert action.read_remote(part, buffer) is action
    for value in (3, 4):
        owner.fill.call_one(value).get(WAIT_S)
        assert action.submit().get(WAIT_S) is None
        assert target == bytes([value]) * len(target)


def test_an_action_reads_and_writes_buffers_of_several_owners(owners):
    buffers = [publish(owners.slice(procs=rank), MIB, rank + 1) for rank in range(3)]
    target = bytearray(2 * MIB)
    action = RDMAAction().read_remote(memoryview(target)[:MIB], buffers[0]).write_remote(buffers[1], bytearray(MIB))
    action.read_remote(memoryview(target)[MIB:], buffers[2]).write_remote(buffers[1], memoryview(b"")).submit().get(WAIT_S)
    assert target == b"\1" * MIB + b"\3" * MIB and read(buffers[1]) == bytes(MIB)


def test_an_empty_action_does_nothing():
    assert RDMAAction().submit().get(WAIT_S) is None

    async def wait():
        return await RDMAAction().submit()

    assert asyncio.run(wait()) is None


def test_one_destination_may_be_named_twice(owner):
    buffer, target = publish(owner, 100, 5), bytearray(100)
    RDMAAction().read_remote(target, buffer).read_remote(target, buffer).submit().get(WAIT_S)
    assert target == b"\5" * 100


def test_an_action_under_way_takes_nothing_more(owner):
    buffer, target = publish(owner, 64 * MIB), bytearray(64 * MIB)
    action = RDMAAction().read_remote(target, buffer)
    first, second = action.submit(), action.submit()
    text = "RdmaAction is currently being submitted; await the in-flight submit before mutating it"
    with pytest.raises(RuntimeError, match=text):
        action.read_remote(target, buffer)
    with pytest.raises(RuntimeError, match=text):
        action.write_remote(buffer, target)
    second.get(WAIT_S)
    assert first._done
    action.read_remote(target, buffer)


def test_atomic_operations_are_not_there_yet(owner):
    buffer = publish(owner, 8)
    with pytest.raises(NotImplementedError, match="Not yet supported"):
        RDMAAction().fetch_add(buffer, bytearray(8), 1)
    with pytest.raises(NotImplementedError, match="Not yet supported"):
        RDMAAction().compare_and_swap(buffer, bytearray(8), 1, 2)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_sizes_that_do_not_fit_are_refused_at_once(owner):
    buffer = publish(owner, 256)
    for use in (lambda data: buffer.read_into(data), lambda data: RDMAAction().read_remote(data, buffer)):
        with pytest.raises(ValueError, match=r"destination local memory size \(10\) must be >= remote buffer size \(256\)"):
            use(bytearray(10))
    for use in (lambda data: buffer.write_from(data), lambda data: RDMAAction().write_remote(buffer, data)):
        with pytest.raises(ValueError, match=r"source local memory size \(300\) must be <= remote buffer size \(256\)"):
            use(bytearray(300))


@pytest.mark.parametrize("timeout", [1.5, "7", None], ids=repr)
def test_a_timeout_is_an_integer(owner, timeout):
    buffer = publish(owner, 8)
    for use in (lambda: buffer.read_into(bytearray(8), timeout=timeout), lambda: RDMAAction().submit(timeout=timeout)):
        with pytest.raises(TypeError):
            use()


@pytest.mark.parametrize("timeout", [-1, 2**64], ids=repr)
def test_a_timeout_fits_64_bits(owner, timeout):
    buffer = publish(owner, 8)
    for use in (lambda: buffer.write_from(bytearray(8), timeout=timeout), lambda: RDMAAction().submit(timeout=timeout)):
        with pytest.raises(OverflowError, match="timeout must fit in an unsigned 64-bit integer"):
            use()


@pytest.mark.parametrize("nbytes", [8, 8 * MIB])
def test_no_time_is_a_timeout_and_nothing_moves(owner, nbytes):
    buffer, target = publish(owner, nbytes, 1), bytearray(nbytes)
    with pytest.raises(RDMATimeout, match=FAILED + "tcp submit timed out"):
        buffer.read_into(target, timeout=0).get(WAIT_S)
    assert not any(target[::1000])
    buffer.read_into(target, timeout=2**64 - 1).get(WAIT_S)


@pytest.mark.parametrize("data", [bytearray(), memoryview(b""), np.zeros(0)], ids=repr)
def test_nothing_at_all_is_no_buffer(data):
    with pytest.raises(ValueError, match=r"Cannot create RDMABuffer with size 0\."):
        RDMABuffer(data)


@pytest.mark.parametrize("data", [b"bytes", "text", 7, [1], memoryview(bytearray(8))[::2], np.zeros((2, 2))], ids=repr)
def test_what_is_no_run_of_bytes_is_no_buffer(data):
    with pytest.raises(ValueError, match=r"RDMABuffer only supports 1d contiguous torch.Tensor or 1d c-contiguous memoryview. Got: "):
        RDMABuffer(data)


def test_a_view_of_numbers_is_no_buffer():
    with pytest.raises(RuntimeError, match="failed to acquire memoryview buffer"):
        RDMABuffer(memoryview(bytearray(8)).cast("i"))


def test_a_broken_handle_says_what_it_is():
    buffer = RDMABuffer(bytearray(8))
    load, (data, offset, nbytes) = buffer.__reduce__()
    for wrong in ((b"nonsense", 0, 1), (data[:-3], 0, 1), (data, 0, 9), (data, -1, 4), (data, 8, 1), (data, 0, 0)):
        with pytest.raises(ValueError, match=r"handle|do not exist"):
            load(*wrong)
    assert load(data, offset, nbytes).size() == 8
    buffer.drop().get(WAIT_S)


def test_backends_are_told_as_configured():
    assert (is_ibverbs_available(), get_rdma_backend()) == (False, "tcp")
    with pytest.warns(DeprecationWarning, match="is_ibverbs_available"):
        assert is_rdma_available() is False
    with configured(rdma_allow_tcp_fallback=False):
        assert get_rdma_backend() == "none"
        with pytest.raises(RuntimeError, match=r"RDMA is not available on this platform(.|\n)*rdma_allow_tcp_fallback=True"):
            RDMABuffer(bytearray(8))
        with pytest.raises(RdmaInitError, match="no RDMA backend available"):
            RDMAAction().submit()


@pytest.mark.parametrize(("key", "value"), [("target", "disk:0"), ("target", "cpu:x"), ("affinity", "some"), ("affinity", "groups:a,b|b")])
def test_a_configuration_that_means_nothing_is_refused_by_buffers_and_submits(key, value):
    name, shown = {"target": ("rdma_ibverbs_target", "TARGET"), "affinity": ("rdma_peer_device_affinity", "AFFINITY")}[key]
    with configured(**{name: value}):
        for use in (lambda: RDMABuffer(bytearray(8)), lambda: RDMAAction().submit()):
            with pytest.raises(RdmaInitError, match=shown):
                use()
    RDMAAction().submit().get(WAIT_S)


def test_each_process_warns_once_that_there_is_no_network_card(run_script):
    done = run_script("""
        import warnings
        from monarch.rdma import RDMABuffer
        for _ in range(3):
            RDMABuffer(bytearray(8))
    """).check()
    assert done.stderr.count("RDMATcpFallbackWarning") == 1 and "rdma_allow_tcp_fallback=False" in done.stderr


def test_names_of_a_buffer_are_for_people(owner):
    buffer = publish(owner, 8)
    assert buffer.owner.startswith("rdma_manager.") and buffer.backend == "tcp"
    assert "of 8 bytes of" in repr(buffer)
    with pytest.raises(AttributeError):
        buffer.anything = 1


# --- lifetime --------------------------------------------------------------------------------------------------------


def test_memory_stays_after_its_owner_has_forgotten_it(owner):
    assert read(owner.publish_and_forget.call_one(b"kept" * 1000).get(WAIT_S)) == b"kept" * 1000


def test_a_dropped_buffer_is_an_error_everywhere_and_dropping_it_twice_is_none(owners, owner):
    buffer = publish(owner, 4096, 1)
    assert read(buffer) == b"\1" * 4096
    owners.slice(procs=1).drop_of.call_one(buffer).get(WAIT_S)
    assert buffer.drop().get(WAIT_S) is None
    for nbytes in (10, 4096):
        with pytest.raises(RDMAError, match=FAILED + rf"buffer {buffer._handle.number} not found"):
            read(buffer[:nbytes])
    with pytest.raises(RDMAError, match="not found"):
        buffer.write_from(bytearray(4096)).get(WAIT_S)
    with pytest.raises(ActorError, match="not found"):
        owners.slice(procs=2).read.call_one(buffer).get(WAIT_S)
    assert owner.content.call_one().get(WAIT_S) == b"\1" * 4096


def test_a_drop_comes_behind_what_was_submitted_before(owner):
    buffer, target = publish(owner, 64 * MIB, 1), bytearray(64 * MIB)
    transfer = buffer.read_into(target)
    buffer.drop().get(WAIT_S)
    transfer.get(WAIT_S)
    assert target == b"\1" * (64 * MIB)


def test_a_slot_that_is_used_again_is_another_buffer(owner):
    old = publish(owner, 4096, 1)
    owner.drop.call_one().get(WAIT_S)
    new = publish(owner, 4096, 2)
    assert new._handle.slot == old._handle.slot
    with pytest.raises(RDMAError, match="not found"):
        read(old)
    assert read(new) == b"\2" * 4096


def test_reads_during_drops_are_whole_or_errors(owner):
    check_reads_during_drops(owner, 64 * 1024, 19)


def test_a_fork_of_an_owner_has_memory_of_its_own(owner):
    ours = publish(owner, 16, 3)
    pid, pickled = owner.fork_and_publish.call_one().get(WAIT_S)
    child = pickle.loads(pickled)
    try:
        assert read(child) == b"child" and read(ours) == b"\3" * 16
    finally:
        owner.reap.call_one(pid).get(WAIT_S)
    with pytest.raises(RDMAError, match="owner"):
        read(child)
    assert read(ours) == b"\3" * 16


# --- owners in trouble -----------------------------------------------------------------------------------------------


def test_an_owner_that_spins_does_not_matter(owner):
    buffer = publish(owner, 4 * MIB, 1)
    read(buffer)
    spinning = owner.spin.call_one(1.0)
    for _ in range(20):
        assert read(buffer) == b"\1" * (4 * MIB)
        buffer.write_from(bytearray(b"\1")).get(WAIT_S)
    assert not spinning._done
    spinning.get(WAIT_S)


def test_an_owner_that_is_stopped_does_not_matter(lonely):
    buffer, pid = publish(lonely, 4 * MIB, 1), lonely.pid.call_one().get(WAIT_S)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert read(buffer) == b"\1" * (4 * MIB)
        buffer.write_from(bytearray([2]) * (4 * MIB)).get(WAIT_S)
        assert read(buffer) == b"\2" * (4 * MIB)
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("nbytes", [4096, 256 * MIB])
def test_the_death_of_an_owner_is_told_at_once_with_its_reason(lonely, faults, nbytes):
    buffer, pid = publish(lonely, nbytes), lonely.pid.call_one().get(WAIT_S)
    target = bytearray(nbytes)
    pending = [buffer.read_into(target) for _ in range(3)]
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RDMAError, match=r"the owner of the buffer is gone: \S+ Killed\(sig=9\): it was killed by signal 9 \(SIGKILL\)"):
        while True:
            buffer.read_into(target).get(WAIT_S)
    for future in pending:
        future.exception(WAIT_S)
    assert time.monotonic() - began < 2.0
    with pytest.raises(RDMAError, match="owner of the buffer is gone"):
        buffer.write_from(bytearray(8)).get(WAIT_S)
    with pytest.raises(RDMAError, match="Failed to drop buffer"):
        buffer.drop().get(WAIT_S)


def test_a_writer_that_dies_leaves_the_memory_to_others(owner, lonely, faults):
    buffer, pid = publish(owner, MIB, 1), lonely.pid.call_one().get(WAIT_S)
    writing = lonely.write_for.call_one(buffer, 2, 30.0)
    wait_until(lambda: read(buffer[:1]) == b"\2")
    os.kill(pid, signal.SIGKILL)
    assert writing.exception(WAIT_S) is not None
    buffer.write_from(bytearray([3]) * MIB).get(WAIT_S)
    assert read(buffer) == b"\3" * MIB
    owner.drop.call_one().get(WAIT_S)
    assert read(publish(owner, MIB, 4)) == b"\4" * MIB


# --- leaks -----------------------------------------------------------------------------------------------------------


def test_rounds_of_buffers_leave_nothing(owners, owner):
    def footprint():
        gc.collect()
        return len(own_manager().table()), own_manager().table().num_lingering, len(os.listdir("/proc/self/fd"))

    publish(owner, 100)
    before, fds = footprint(), owners.fds.call().get(WAIT_S).values()
    target = bytearray(100_000)
    for value in range(200):
        buffer = owner.publish.call_one(100_000, value % 250).get(WAIT_S)[0]
        own = RDMABuffer(bytearray([value % 250]) * 1000)
        buffer.read_into(target).get(WAIT_S)
        buffer.write_from(target).get(WAIT_S)
        assert owners.slice(procs=1).read.call_one(own).get(WAIT_S) == bytes([value % 250]) * 1000
        own.drop().get(WAIT_S)
        buffer.drop().get(WAIT_S)
    assert footprint() == before
    assert all(later <= earlier + 2 for earlier, later in zip(fds, owners.fds.call().get(WAIT_S).values(), strict=True))


def test_a_client_that_ends_leaves_nothing(run_script):
    run_script("""
        import threading
        from monarch.actor import shutdown_context
        from monarch.rdma import RDMABuffer
        buffer = RDMABuffer(bytearray(64 << 20))
        target = bytearray(64 << 20)
        buffer.read_into(target).get()
        shutdown_context().get(10)
        left = [thread.name for thread in threading.enumerate() if "rdma" in thread.name]
        assert not left, left
        again = RDMABuffer(bytearray(b"again"))
        again.read_into(target).get()
        assert target[:5] == b"again"
    """).check()
