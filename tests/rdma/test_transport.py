"""Transports: how ops become pieces, and which transport is taken."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._base.ids import ProcRef
from monarch.rdma.errors import DeadlineError, OwnerGoneError, UnreachableError
from monarch.rdma.handles import Handle
from monarch.rdma.memory import memory_of
from monarch.rdma.regions import ON_DEVICE
from monarch.rdma.transport import Choice, Op, check_deadline, cut, even_piece

MEMORY = memory_of(bytearray(1))


def handle_of(owner=0, *, names=("cma", "tcp"), generation=1, flags=0):
    ref = ProcRef(f"proc-{owner}", "ipc://x", "ipc://y")
    return Handle(ref, bytes([owner]) * 16, 0, 0, generation, 0, 1 << 40, flags, dict.fromkeys(names, b""))


class Way:
    """A transport that moves nothing."""

    def __init__(self, name, error=None, *, is_instant=True):
        self.name, self.error, self.is_instant, self.num_connects = name, error, is_instant, 0
        self.forgotten = []

    def connect(self, handle, deadline_s):
        self.num_connects += 1
        if self.error is not None:
            raise self.error

    def forget(self, nonce):
        self.forgotten.append(nonce)


ops = st.builds(
    Op,
    st.sampled_from(["read", "write"]),
    st.just(MEMORY),
    st.integers(0, 100),
    st.integers(0, 2).map(handle_of),
    st.integers(0, 100),
    st.integers(1, 50),
)


@given(st.lists(ops, max_size=12), st.integers(1, 40), st.integers(1, 5))
def test_pieces_are_the_ops_and_small_enough(some, piece_bytes, most_ops):
    pieces = list(cut(some, piece_bytes=piece_bytes, most_ops=most_ops))
    for piece in pieces:
        assert sum(op.nbytes for op in piece.ops) <= piece_bytes and 0 < len(piece.ops) <= most_ops
        assert {op.kind for op in piece.ops} == {piece.kind} and len({op.handle.nonce for op in piece.ops}) == 1
    parts = [
        (op.kind, op.handle.nonce, op.local_offset + at, op.offset + at) for piece in pieces for op in piece.ops for at in range(op.nbytes)
    ]
    assert parts == [(op.kind, op.handle.nonce, op.local_offset + at, op.offset + at) for op in some for at in range(op.nbytes)]


@given(st.integers(1, 1 << 32), st.integers(1, 8))
def test_a_large_transfer_is_shared_evenly(total, num_threads):
    size = even_piece(total, num_threads, 1 << 20, 8 << 20)
    assert 1 << 20 <= size <= 8 << 20
    assert size * num_threads >= total or size == 8 << 20


def test_the_first_transport_that_leads_there_is_taken_and_remembered():
    slow, fast = Way("tcp", is_instant=False), Way("cma")
    choice = Choice([slow, fast])
    assert choice.choose(handle_of(), 1.0) is fast and choice.choose(handle_of(), 1.0) is fast
    assert (fast.num_connects, slow.num_connects) == (1, 0)
    assert choice.choose(handle_of(1, names=("tcp",)), 1.0) is slow
    assert choice.known(handle_of(2)) is None
    choice.forget_process("proc-0")
    choice.forget_process("proc-0")
    assert choice.known(handle_of()) is None and fast.forgotten == slow.forgotten == [handle_of().nonce]


def test_one_that_can_not_is_passed_over():
    other = Way("tcp", is_instant=False)
    choice = Choice([Way("cma", UnreachableError("another machine")), other])
    assert choice.instant(handle_of()) is None
    assert choice.choose(handle_of(), 1.0) is other
    assert choice.instant(handle_of()) is None and choice.known(handle_of()) is other


def test_an_owner_that_is_gone_is_not_looked_for_elsewhere():
    other = Way("tcp", is_instant=False)
    choice = Choice([Way("cma", OwnerGoneError("its process has ended")), other])
    for find in (choice.instant, lambda handle: choice.choose(handle, 1.0)):
        with pytest.raises(OwnerGoneError):
            find(handle_of())
    assert other.num_connects == 0


def test_where_none_leads_there_the_reasons_are_told():
    choice = Choice([Way("cma", UnreachableError("forbidden", next="allow it")), Way("tcp")])
    with pytest.raises(UnreachableError, match=r"no compatible RDMA backend for buffer \(cma: forbidden; tcp: the owner can't") as caught:
        choice.choose(handle_of(names=("cma",)), 1.0)
    assert caught.value.next == "allow it"
    with pytest.raises(UnreachableError, match="none is switched on"):
        Choice([]).choose(handle_of(), 1.0)


def test_a_region_that_is_refused_at_once_says_nothing_of_the_others(caplog):
    refusing, other = Way("nixl", UnreachableError("no room", generations=(1,)), is_instant=False), Way("tcp", is_instant=False)
    choice = Choice([refusing, other])
    first, second = (handle_of(names=("nixl", "tcp"), generation=number) for number in (1, 2))
    assert choice.choose(first, 1.0) is choice.known(first) is other and choice.known(second) is None
    refusing.error = None
    assert choice.choose(second, 1.0) is refusing and choice.known(first) is other
    assert choice.route_of(first) != choice.route_of(second)
    assert caplog.text.count("no room") == 1
    choice.forget(first.nonce)
    assert choice.known(first) is choice.known(second) is None


def test_a_deadline_is_over_when_its_time_has_come():
    check_deadline(time.monotonic() + 5)
    with pytest.raises(DeadlineError, match="tcp submit timed out"):
        check_deadline(time.monotonic())


def test_memory_on_a_gpu_is_reached_otherwise_than_that_of_its_process():
    kernel, staged = Way("cma"), Way("tcp", is_instant=False)
    choice = Choice([kernel, staged])
    on_gpu = handle_of(names=("tcp",), generation=2, flags=ON_DEVICE)
    assert choice.choose(handle_of(), 1.0) is kernel and choice.choose(on_gpu, 1.0) is staged
    assert choice.known(handle_of()) is kernel and choice.known(on_gpu) is staged
    choice.forget(on_gpu.nonce)
    assert choice.known(handle_of()) is choice.known(on_gpu) is None
