"""Segments are lent, looked at, given back once and reused, whoever holds on to what."""

from __future__ import annotations

import array
import gc
import os
import pickle
import socket
import subprocess
import sys
import threading
import time

import pytest

from monarch._base.errors import InternalError
from monarch._net import local
from monarch._net.local import ALIGNMENT, SegmentCache, SegmentPool, available

pytestmark = pytest.mark.skipif(not available(), reason="shared memory without a name needs memfd, which is Linux's")

MIB = 1 << 20


@pytest.fixture
def pool():
    pool = SegmentPool()
    yield pool
    pool.close()


@pytest.fixture
def cache():
    cache = SegmentCache()
    yield cache
    cache.close()


class Receiver:
    """One end of a link: knows segments by itself, gives them back to the pool."""

    def __init__(self, pool, cache):
        self.pool, self.cache, self.known, self.released = pool, cache, set(), []

    def take(self, segment, *, shared=False):
        if segment.segment_id not in self.known:
            self.known.add(segment.segment_id)
            self.cache.add(segment.segment_id, os.dup(segment.fd), segment.capacity)
        return self.cache.views(segment.segment_id, segment.spans, shared=shared, on_release=self.on_release)

    def on_release(self, segment_id):
        self.released.append(segment_id)
        self.pool.release(segment_id)


@pytest.fixture
def receiver(pool, cache):
    return Receiver(pool, cache)


def num_fds():
    return len(os.listdir("/proc/self/fd"))


def num_mappings():
    with open("/proc/self/maps") as lines:
        return sum("memfd:monarch" in line for line in lines)


def buffers(*sizes):
    return [memoryview(bytes([index % 251 + 1]) * size) for index, size in enumerate(sizes)]


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize(
    "sizes",
    [(0,), (1,), (5, 0, 7), (64, 65), (MIB, 3, MIB), (100_000,) * 3, (10,) * 3000, (4 * MIB + 1,)],
    ids=lambda s: f"{len(s)}x{s[0]}",
)
def test_what_is_packed_arrives_aligned_and_writable(pool, receiver, sizes, times):
    sent = buffers(*sizes)
    for _ in range(times):
        segment = pool.pack(sent, receivers=1)
        views = receiver.take(segment)
        assert [bytes(view) for view in views] == [bytes(buffer) for buffer in sent]
        assert all(offset % ALIGNMENT == 0 for offset, _ in segment.spans)
        assert all(not view.readonly and view.format == "B" and view.contiguous for view in views)
        del views
    assert receiver.released == [segment.segment_id] * times


@pytest.mark.parametrize("kind", [bytes, bytearray, lambda b: array.array("B", b)], ids=["bytes", "bytearray", "array"])
def test_read_only_and_writable_memory_can_be_packed_and_is_let_go(pool, receiver, kind):
    for _ in range(3):
        content = kind(b"ab" * MIB)
        receiver.take(pool.pack([memoryview(content)], receivers=1))
        if not isinstance(content, bytes):
            content.extend(b"x" * MIB) if isinstance(content, bytearray) else content.append(1)  # BufferError if still looked at
    assert sys.getrefcount(content) == 2


def test_no_buffers_are_a_segment_that_is_given_back(pool, receiver):
    segment = pool.pack([], receivers=1)
    assert receiver.take(segment) == []
    assert receiver.released == [segment.segment_id]


def test_a_partial_write_goes_on_where_it_stopped(pool, receiver, monkeypatch):
    sent = buffers(100_000, 7, 0, 300_000, 64)
    monkeypatch.setattr(os, "pwritev", lambda fd, pieces, at: os.pwrite(fd, b"".join(pieces)[:70_001], at))
    segment = pool.pack(sent, receivers=1)
    assert [bytes(view) for view in receiver.take(segment)] == [bytes(buffer) for buffer in sent]


def test_a_segment_is_released_once_when_the_last_view_of_it_is_gone(pool, receiver):
    segment = pool.pack(buffers(1000, 2000), receivers=1)
    first, second = receiver.take(segment)
    part = second[5:10].cast("B")
    del first, second
    gc.collect()
    assert receiver.released == []
    assert bytes(part) == b"\2" * 5
    del part
    assert receiver.released == [segment.segment_id]


def test_a_pickled_buffer_and_an_array_over_it_hold_the_segment(pool, receiver):
    import numpy as np

    for build in (
        lambda v: np.frombuffer(v, "u1")[3:],
        lambda v: np.ndarray(10, "u1", v),
        pickle.PickleBuffer,
        lambda v: memoryview(v)[2:],
    ):
        receiver.released.clear()
        held = build(receiver.take(pool.pack(buffers(5000), receivers=1))[0])
        gc.collect()
        assert receiver.released == []
        del held
        assert len(receiver.released) == 1


def test_a_tensor_over_a_view_holds_the_segment(pool, receiver):
    torch = pytest.importorskip("torch", reason="checks how torch holds memory")
    from monarch._wire.pickling import dumps, loads

    payload, sent = dumps([torch.arange(5000.0), torch.ones(3000)])
    tensors = loads(payload, receiver.take(pool.pack(sent, receivers=1)))
    tensors[0][0] = 9
    part = tensors[1][:1]
    del tensors
    gc.collect()
    assert receiver.released == [] and part.item() == 1
    del part
    assert len(receiver.released) == 1


def test_a_view_in_a_reference_cycle_is_released_once_by_the_collector(pool, receiver):
    cycle = [receiver.take(pool.pack(buffers(1000), receivers=1))]
    cycle.append(cycle)
    del cycle
    assert receiver.released == []
    gc.collect()
    gc.collect()
    assert len(receiver.released) == 1


@pytest.mark.parametrize("shared", [False, True])
def test_finalisers_of_a_cycle_still_see_the_memory_and_may_keep_it(pool, cache, receiver, shared):
    seen = []

    class Last:
        def __del__(self):
            seen.append((list(receiver.released), bytes(self.view[:2])))
            kept.append(self.view)

    kept = []
    last = Last()
    last.me = last
    segment = pool.pack(buffers(1000), receivers=1 + shared)
    (last.view,) = receiver.take(segment, shared=shared)
    cache.close()
    del last
    gc.collect()
    assert seen == [([], b"\1\1")]
    assert receiver.released == [] and bytes(kept[0]) == b"\1" * 1000
    kept.clear()
    assert receiver.released == [segment.segment_id]


def test_views_outlive_the_cache_and_the_pool(pool, cache, receiver):
    (view,) = receiver.take(pool.pack(buffers(5000), receivers=1))
    (private,) = receiver.take(pool.pack(buffers(5000), receivers=2), shared=True)
    cache.close()
    pool.close()
    assert num_mappings() == 2
    assert bytes(view) == bytes(private) == b"\1" * 5000
    view[:2] = private[:2] = b"ab"
    del view, private
    assert len(receiver.released) == 2
    assert num_mappings() == 0


def test_release_may_come_from_any_thread(pool, receiver):
    views = [receiver.take(pool.pack(buffers(100), receivers=1)) for _ in range(50)]
    threads = [threading.Thread(target=views.clear) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert sorted(receiver.released) == sorted(set(receiver.released)) and len(receiver.released) == 50


def test_a_release_inside_a_pack_of_the_same_thread_does_not_block(pool, receiver):
    held = [receiver.take(pool.pack(buffers(100), receivers=1))]
    with pool._lock:
        held.clear()
    assert len(receiver.released) == 1


def test_a_forked_child_releases_nothing_and_may_not_use_the_pool(pool, receiver):
    views = receiver.take(pool.pack(buffers(100), receivers=1))
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            views.clear()
            pool.pack(buffers(1), receivers=1)
        except InternalError:
            status = 0 if not receiver.released else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert receiver.released == []


def test_receivers_of_one_segment_do_not_see_each_other(pool):
    caches = [SegmentCache() for _ in range(3)]
    receivers = [Receiver(pool, cache) for cache in caches]
    segment = pool.pack(buffers(10_000), receivers=3)
    views = [receiver.take(segment, shared=True)[0] for receiver in receivers]
    views[0][:] = bytes(10_000)
    views[1][5] = 99
    assert bytes(views[2]) == b"\1" * 10_000
    assert views[1][4] == 1 and not any(views[0])
    for cache in caches:
        cache.close()


def test_a_segment_of_several_receivers_is_reused_when_all_have_released_it(pool, receiver):
    segment = pool.pack(buffers(10), receivers=3)
    for _ in range(2):
        pool.release(segment.segment_id)
        assert pool.pack(buffers(10), receivers=3).segment_id != segment.segment_id
    pool.release(segment.segment_id)
    assert pool.pack(buffers(10), receivers=3).segment_id == segment.segment_id


def test_a_private_mapping_sees_each_use_of_a_reused_segment(pool, receiver):
    for index in range(1, 5):
        sent = [memoryview(bytes([index]) * MIB)]
        segment = pool.pack(sent, receivers=2)
        assert segment.segment_id == 1
        (view,) = receiver.take(segment, shared=True)
        assert bytes(view) == bytes(sent[0])
        view[:10] = b"mine, mine"
        del view
        pool.release(1)
    assert receiver.released == [1] * 4
    assert num_mappings() == 1  # the sender's


def test_a_segment_mapped_for_good_can_still_be_received_privately(pool, receiver):
    segment = pool.pack(buffers(10_000, 5), receivers=1)
    (own, _) = receiver.take(segment)
    views = receiver.take(segment, shared=True)
    views[0][:] = bytes(10_000)
    assert own[0] == 1 and bytes(views[1]) == b"\2" * 5


def test_ping_pong_uses_one_segment_and_one_mapping(pool, receiver):
    used = set()
    for _ in range(20):
        segment = pool.pack(buffers(MIB), receivers=1)
        used.add(segment.segment_id)
        (view,) = receiver.take(segment)
        del view
    assert used == {1}
    assert num_mappings() == 2


def test_the_last_used_segment_is_taken_first_and_a_larger_one_before_a_fresh_one(pool):
    first, second = (pool.pack(buffers(3 * MIB), receivers=1) for _ in range(2))
    pool.release(first.segment_id)
    pool.release(second.segment_id)
    assert pool.pack(buffers(MIB), receivers=1).segment_id == second.segment_id
    assert pool.pack(buffers(100), receivers=1).segment_id == 3


def test_a_lent_segment_is_never_written(pool, receiver):
    held = [receiver.take(pool.pack([memoryview(bytes([index]) * 1000)], receivers=1))[0] for index in range(100)]
    assert [view[0] for view in held] == list(range(100))
    assert len({bytes(view) for view in held}) == 100


def test_releasing_what_is_not_lent_is_ignored(pool):
    pool.release(7)
    segment = pool.pack(buffers(10), receivers=1)
    pool.release(segment.segment_id)
    pool.release(segment.segment_id)
    one, two = (pool.pack(buffers(10), receivers=1) for _ in range(2))
    assert one.segment_id != two.segment_id


def test_an_interrupted_pack_keeps_the_segment(pool, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.pack(buffers(10), receivers=1)
    assert pool.pack(buffers(10), receivers=1).segment_id == 1


def test_hundreds_of_segments_take_one_descriptor_each_at_the_sender_and_none_at_the_receiver(pool, receiver):
    before = num_fds()
    held = [receiver.take(pool.pack(buffers(100), receivers=1)) for _ in range(400)]
    assert num_fds() == before + 400
    held.clear()
    assert len(receiver.released) == 400
    closed = pool.trim(time.monotonic())
    assert len(closed) == 400 - local.FREE_LIMIT_SEGMENTS
    assert num_fds() == before + local.FREE_LIMIT_SEGMENTS


def test_trim_closes_what_is_idle_and_the_receiver_forgets_it(pool, receiver):
    segments = [pool.pack(buffers(10), receivers=1) for _ in range(3)]
    views = [receiver.take(segment) for segment in segments]
    views[0].clear()
    views[1].clear()
    assert pool.trim(time.monotonic()) == []
    assert pool.trim(time.monotonic() + local.IDLE_LIMIT_S + 1) == [1, 2]
    assert pool.trim(time.monotonic() + local.IDLE_LIMIT_S + 1) == []
    mapped = num_mappings()
    for segment_id in (1, 2):
        receiver.cache.drop(segment_id)
    assert num_mappings() == mapped - 2
    with pytest.raises(ValueError, match="segment 1 was never announced, or was dropped"):
        receiver.cache.views(1, [(0, 1)], shared=False, on_release=print)
    assert bytes(views[2][0]) == b"\1" * 10
    assert pool.pack(buffers(10), receivers=1).segment_id == 4


def test_trim_closes_the_longest_unused_beyond_the_limit_of_bytes(pool, monkeypatch):
    monkeypatch.setattr(local, "FREE_LIMIT_BYTES", 5 * MIB)
    segments = [pool.pack(buffers(2 * MIB), receivers=1) for _ in range(4)]
    for index in (2, 0, 3, 1):
        pool.release(segments[index].segment_id)
    assert pool.trim(time.monotonic()) == [3, 1]


def test_dropping_a_segment_leaves_its_views_valid(pool, receiver):
    (view,) = receiver.take(pool.pack(buffers(1000), receivers=1))
    receiver.cache.drop(1)
    receiver.cache.drop(1)
    assert bytes(view) == b"\1" * 1000


def test_nothing_is_left_open(pool, cache):
    before = num_fds(), num_mappings()
    for round_ in range(3):
        pool, cache = SegmentPool(), SegmentCache()
        receiver = Receiver(pool, cache)
        views = [receiver.take(pool.pack(buffers(MIB, 10), receivers=r), shared=r > 1) for r in (1, 2, 1, 2)]
        views.pop()
        if round_:
            pool.close()
        cache.close()
        views.clear()
        pool.close()
        assert len(receiver.released) == 4
    assert (num_fds(), num_mappings()) == before


def test_a_closed_pool_says_so(pool):
    pool.close()
    with pytest.raises(InternalError, match="closed SegmentPool"):
        pool.pack(buffers(10), receivers=1)


@pytest.mark.parametrize("span", [(0, 1 << 40), (65_536, 1), (-1, 5), (5, -1), (1 << 63, 1)])
def test_a_span_outside_of_its_segment_is_refused(pool, receiver, span):
    segment = pool.pack(buffers(10), receivers=1)
    receiver.take(segment)
    with pytest.raises(ValueError, match="is outside of segment 1 of 65536 bytes"):
        receiver.cache.views(1, [(0, 1), span], shared=False, on_release=print)


def test_a_segment_shorter_than_announced_is_refused(pool, cache):
    segment = pool.pack(buffers(10), receivers=1)
    before = num_fds()
    with pytest.raises(ValueError, match="segment 9 is shorter than the 65537 bytes"):
        cache.add(9, os.dup(segment.fd), segment.capacity + 1)
    assert num_fds() == before


PEER = """
import socket, sys, array
sys.path.insert(0, "src")
from monarch._net.local import SegmentCache
link = socket.socket(fileno=int(sys.argv[1]))
cache = SegmentCache()
held = []
def release(segment_id):
    link.sendall(b"r" + segment_id.to_bytes(8, "little"))
while True:
    head, ancillary, _, _ = link.recvmsg(33, socket.CMSG_SPACE(4))
    if len(head) < 33:
        break
    segment_id, capacity, offset, length = (int.from_bytes(head[1 + 8 * i : 9 + 8 * i], "little") for i in range(4))
    for _, _, data in ancillary:
        cache.add(segment_id, array.array("i", data)[0], capacity)
    (view,) = cache.views(segment_id, [(offset, length)], shared=head[:1] == b"s", on_release=release)
    link.sendall(b"v" + (sum(view[::4096]) + view[-1]).to_bytes(8, "little"))
    view[:4] = b"peer"
    held = [view] if head[:1] == b"k" else []
    del view
"""


class Peer:
    """Another interpreter behind a socket pair."""

    def __init__(self):
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.known = set()
        with theirs:
            self.process = subprocess.Popen([sys.executable, "-c", PEER, str(theirs.fileno())], pass_fds=[theirs.fileno()])
        self.link.settimeout(20)

    def send(self, segment, how):
        ancillary = []
        if segment.segment_id not in self.known:
            self.known.add(segment.segment_id)
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [segment.fd]))]
        numbers = (segment.segment_id, segment.capacity, *segment.spans[0])
        self.link.sendmsg([how + b"".join(n.to_bytes(8, "little") for n in numbers)], ancillary)
        return self.answer(b"v")

    def answer(self, kind):
        got = self.link.recv(9, socket.MSG_WAITALL)
        assert got[:1] == kind
        return int.from_bytes(got[1:], "little")

    def close(self):
        self.link.close()
        self.process.wait(20)


@pytest.fixture
def peer():
    peer = Peer()
    yield peer
    peer.close()


def test_another_process_sees_each_use_of_a_segment_and_gives_it_back(pool, peer):
    for index in (1, 2, 3, 4):
        content = memoryview(bytes([index]) * (8 * MIB + 5))
        segment = pool.pack([content], receivers=1)
        assert segment.segment_id == 1
        assert peer.send(segment, b"u") == sum(content[::4096]) + index
        assert peer.answer(b"r") == 1
        pool.release(1)


def test_a_process_that_shares_a_segment_does_not_change_it_for_others(pool, receiver, peer):
    segment = pool.pack(buffers(10_000), receivers=2)
    peer.send(segment, b"s")
    assert peer.answer(b"r") == 1
    assert bytes(receiver.take(segment, shared=True)[0]) == b"\1" * 10_000


def test_nothing_is_left_of_a_killed_process_and_its_segment_is_reused(pool, peer):
    segment = pool.pack(buffers(MIB), receivers=1)
    peer.send(segment, b"k")
    peer.process.kill()
    peer.process.wait(20)
    pool.release(segment.segment_id)
    assert pool.pack(buffers(MIB), receivers=1).segment_id == segment.segment_id
    assert not [name for name in os.listdir("/dev/shm") if "monarch" in name]


def test_an_interpreter_that_ends_while_views_live_ends_cleanly():
    source = (
        "import sys; sys.path.insert(0, 'src')\n"
        "from monarch._net.local import *\n"
        "pool, cache = SegmentPool(), SegmentCache()\n"
        "def end(segment_id): raise RuntimeError\n"
        "import os\n"
        "views = []\n"
        "for n in (1, 2):\n"
        "    s = pool.pack([memoryview(b'x' * 100000)], receivers=n)\n"
        "    cache.add(s.segment_id, os.dup(s.fd), s.capacity)\n"
        "    views.append(cache.views(s.segment_id, s.spans, shared=n > 1, on_release=end)[0])\n"
        "class Late:\n"
        "    def __del__(self): print(sum(self.view[:3]), end=' ')\n"
        "late = Late(); late.view = views[0]\n"
        "sys.modules['late'] = late; cycle = [views]; cycle.append(cycle)\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == "360"
