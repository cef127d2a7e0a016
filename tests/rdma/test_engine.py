"""The engine: order per buffer, failures, deadlines, and who does the work. The transport is one that a test holds by the hand."""

from __future__ import annotations

import contextvars
import threading
import weakref

import pytest

from monarch._base.ids import ProcRef
from monarch.rdma.engine import INLINE_BYTES, Engine
from monarch.rdma.errors import BufferGoneError, OwnerGoneError, RDMAError, RDMATimeout, TransferError, UnreachableError
from monarch.rdma.handles import Handle
from monarch.rdma.memory import memory_of
from monarch.rdma.transport import SPLIT_BYTES, Choice, Op, Piece, check_deadline, cut

WAIT_S = 5.0
LARGE = INLINE_BYTES + 1
MEMORY = memory_of(bytearray(1))


class Hand:
    """A transport whose large moves wait until the test lets them go on."""

    num_threads = 2

    def __init__(self, name="cma", *, is_instant=True):
        self.name, self.is_instant, self.takes_devices = name, is_instant, False
        self.moved, self.threads, self.forgotten = [], [], []
        self.error = None
        self.gate = threading.Event()
        self.began = threading.Semaphore(0)

    def register(self, region):
        return b""

    def connect(self, handle, deadline_s):
        if isinstance(self.error, UnreachableError):
            raise self.error

    def lane(self, handle):
        return self.name

    def cut(self, ops):
        return list(cut(ops, piece_bytes=100 * LARGE, most_ops=1))

    def move(self, piece, deadline_s):
        check_deadline(deadline_s)
        self.threads.append(threading.current_thread())
        if sum(op.nbytes for op in piece.ops) >= LARGE:
            self.began.release()
            assert self.gate.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        self.moved += [op.offset for op in piece.ops]

    def forget(self, nonce):
        self.forgotten.append(nonce)


@pytest.fixture
def hand():
    return Hand()


@pytest.fixture
def engine(hand, make_engine):
    yield make_engine(hand)
    hand.gate.set()


@pytest.fixture
def make_engine():
    timers, engines = [], []

    def call_later(delay_s, callback):
        timers.append(threading.Timer(delay_s, callback))
        timers[-1].daemon = True
        timers[-1].start()

    def make(*transports):
        engines.append(Engine(Choice(transports), 4, call_later, lambda ref, ask_s: "was killed by signal 9 (SIGKILL)" if ask_s else ""))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
    for timer in timers:
        timer.cancel()
        timer.join(WAIT_S)


def handle_of(buffer=0):
    return Handle(
        ProcRef("proc-0", "ipc://x", "ipc://y"), bytes(16), 0, 0, buffer + 1, 0, 1 << 40, 0, {"cma": b"", "nixl": b"", "tcp": b""}
    )


def op(mark, nbytes=8, buffer=0):
    """`mark` is where in the buffer, by which a test knows it again."""
    return Op("read", MEMORY, 0, handle_of(buffer), mark, nbytes)


def test_a_small_submit_is_over_when_it_returns_and_ran_on_this_thread(engine, hand):
    future = engine.submit([op(1), op(2, 0), op(3, buffer=1)], 60)
    assert future._done and future.get() is None
    assert hand.moved == [1, 3] and set(hand.threads) == {threading.current_thread()}


def test_an_empty_submit_moves_nothing(engine, hand):
    assert engine.submit([], 60).get() is None
    assert engine.submit([op(1, 0)], 0).get() is None
    assert not hand.threads


def test_a_large_submit_leaves_the_caller_alone(engine, hand):
    future = engine.submit([op(1, LARGE)], 60)
    assert hand.began.acquire(timeout=WAIT_S) and not future._done
    hand.gate.set()
    future.get(WAIT_S)
    assert threading.current_thread() not in hand.threads


def test_pieces_of_one_submit_move_at_the_same_time(engine, hand):
    future = engine.submit([op(number, SPLIT_BYTES // 4) for number in range(4)], 60)
    assert hand.began.acquire(timeout=WAIT_S) and hand.began.acquire(timeout=WAIT_S)
    hand.gate.set()
    future.get(WAIT_S)
    assert sorted(hand.moved) == [0, 1, 2, 3] and len(set(hand.threads)) == 2


def test_submits_on_one_buffer_keep_their_order_and_others_do_not_wait(engine, hand):
    first = engine.submit([op(1, LARGE)], 60)
    second = engine.submit([op(2)], 60)
    third = engine.submit([op(3), op(4, buffer=1)], 60)
    assert engine.submit([op(5, buffer=2)], 60)._done
    assert not second._done and not third._done and hand.moved == [5]
    hand.gate.set()
    third.get(WAIT_S)
    assert first._done and second._done and hand.moved == [5, 1, 2, 3, 4]
    assert engine.submit([op(6)], 60)._done


def test_submits_with_one_key_keep_their_order(engine, hand):
    engine.submit([op(1, LARGE)], 60, key="action")
    second = engine.submit([op(2, buffer=1)], 60, key="action")
    assert not second._done
    hand.gate.set()
    second.get(WAIT_S)
    assert hand.moved == [1, 2]


def test_what_fails_does_not_hold_up_what_comes_behind(engine, hand):
    hand.error = TransferError("broken")
    first = engine.submit([op(1, LARGE)], 60)
    second = engine.submit([op(2)], 60)
    hand.gate.set()
    for future in (first, second):
        with pytest.raises(RDMAError, match=r"RdmaAction.submit failed: RDMA submit failed on 1 backend\(s\):\n\(Tcp\) broken"):
            future.get(WAIT_S)


def test_a_submit_for_which_there_is_no_thread_fails_and_the_next_one_runs(engine, hand, monkeypatch):
    hand.gate.set()

    def refuse(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RDMAError, match=r"no thread can be started for it: can't start new thread(?s:.*)ulimit -u"):
            engine.submit([op(1, LARGE)], 60).get(WAIT_S)
    engine.submit([op(2, LARGE)], 60).get(WAIT_S)
    assert hand.moved == [2]


def test_a_submit_that_waits_for_others_ends_at_its_deadline_and_moves_nothing(engine, hand):
    first = engine.submit([op(1, LARGE)], 60)
    second = engine.submit([op(2)], 0.05)
    with pytest.raises(RDMATimeout, match="tcp submit timed out"):
        second.get(WAIT_S)
    third = engine.submit([op(3)], 60)
    hand.gate.set()
    first.get(WAIT_S)
    third.get(WAIT_S)
    assert hand.moved == [1, 3]


def test_a_submit_that_has_waited_for_another_keeps_no_memory_until_its_deadline(engine, hand):
    first = engine.submit([op(1, LARGE)], 60)
    memory = memory_of(bytearray(8))
    second = engine.submit([op(2)._replace(local=memory)], 60)
    kept = weakref.ref(memory)
    del memory
    hand.gate.set()
    first.get(WAIT_S)
    second.get(WAIT_S)
    engine.close()  # the workers are done
    assert kept() is None


@pytest.mark.parametrize("nbytes", [8, LARGE])
def test_no_time_at_all_is_a_timeout(engine, hand, nbytes):
    with pytest.raises(TimeoutError, match=r"tcp submit timed out(.|\n)*where: read of bytes 7 to (.|\n)*of proc-0(.|\n)*larger timeout"):
        engine.submit([op(7, nbytes)], 0).get(WAIT_S)
    assert not hand.moved


@pytest.mark.parametrize("nbytes", [8, LARGE])
def test_the_end_of_an_owner_is_told_with_its_reason(engine, hand, nbytes):
    hand.error = OwnerGoneError("its process has ended")
    hand.gate.set()
    with pytest.raises(RDMAError, match=r"the owner of the buffer is gone: proc-0 was killed by signal 9 \(SIGKILL\)"):
        engine.submit([op(1, nbytes)], 60).get(WAIT_S)
    assert hand.forgotten == [handle_of().nonce]


def test_a_dropped_buffer_is_told_by_its_number(engine, hand):
    hand.error = BufferGoneError(4)
    with pytest.raises(RDMAError, match=r"\(Tcp\) buffer 4 not found(.|\n)*make a new RDMABuffer"):
        engine.submit([op(1)], 60).get(WAIT_S)


def test_where_nothing_leads_the_submit_says_so(engine, hand):
    hand.error = UnreachableError("another machine")
    with pytest.raises(RDMAError, match=r"no compatible RDMA backend for buffer \(cma: another machine"):
        engine.submit([op(1)], 60).get(WAIT_S)


class Refusing(Hand):
    """Does not lead to some regions, which shows when they are moved."""

    def __init__(self, name, *refused, generations=True):
        super().__init__(name, is_instant=name == "cma")
        self.refused, self.says_which, self.num_refusals = refused, generations, 0
        self.gate.set()

    def move(self, piece, deadline_s):
        refused = {op.handle.generation for op in piece.ops} & {buffer + 1 for buffer in self.refused}
        if refused:
            self.num_refusals += 1
            raise UnreachableError("no room", generations=refused if self.says_which else ())
        super().move(piece, deadline_s)

    def cut(self, ops):
        return [Piece("read", ops)]


@pytest.mark.parametrize("first", ["cma", "nixl"])
def test_a_region_that_a_transport_does_not_lead_to_goes_by_the_next_one_and_others_do_not(make_engine, first, caplog):
    one, other = Refusing(first, 2, 3), Refusing("tcp")
    engine = make_engine(one, other)
    for _ in range(2):
        engine.submit([op(number, buffer=number) for number in range(5)], 60).get(WAIT_S)
    assert sorted(one.moved) == [0, 0, 1, 1, 4, 4] and sorted(other.moved) == [2, 2, 3, 3]
    assert caplog.text.count("no room") == 1 and f"buffers of proc-0, such as 2, go by tcp, because {first} does not lead" in caplog.text
    refusals = one.num_refusals
    engine.submit([op(5, buffer=2), op(6, LARGE, buffer=3)], 60).get(WAIT_S)
    assert one.num_refusals == refusals


def test_an_owner_that_a_transport_does_not_lead_to_any_more_goes_by_the_next_one(make_engine, caplog):
    one, other = Refusing("cma", 0, generations=False), Refusing("tcp")
    engine = make_engine(one, other)
    engine.submit([op(1, buffer=1)], 60).get(WAIT_S)
    engine.submit([op(2, buffer=0)], 60).get(WAIT_S)
    engine.submit([op(3, buffer=1)], 60).get(WAIT_S)
    assert one.moved == [1] and other.moved == [2, 3] and "buffers of proc-0 go by tcp, because cma" in caplog.text


def test_where_no_other_transport_leads_the_first_reason_is_told(make_engine):
    engine = make_engine(Refusing("cma", 0), Refusing("tcp", 0))
    with pytest.raises(RDMAError, match=r"\(Tcp\) no room"):
        engine.submit([op(1), op(2, buffer=1)], 60).get(WAIT_S)


def test_a_defect_of_a_transport_ends_the_submit(engine, hand):
    hand.error = ZeroDivisionError("ours")
    hand.gate.set()
    with pytest.raises(RuntimeError, match="a transfer broke"):
        engine.submit([op(1, LARGE)], 60).get(WAIT_S)


def test_what_is_to_come_behind_a_buffer_comes_behind_it(engine, hand):
    ended = threading.Event()
    engine.order(handle_of(), ended.set)
    assert ended.is_set()
    ended.clear()
    engine.submit([op(1, LARGE)], 60)
    engine.order(handle_of(), ended.set)
    assert not ended.is_set()
    hand.gate.set()
    assert ended.wait(WAIT_S) and hand.moved == [1]


def test_a_closed_engine_takes_nothing_more(engine):
    engine.close()
    with pytest.raises(RDMAError, match="shut down"):
        engine.submit([op(1, LARGE)], 60).get(WAIT_S)


def test_work_of_several_submits_runs_elsewhere_in_the_context_of_the_caller(engine):
    asker = contextvars.ContextVar("asker", default="nobody")
    asker.set("me")
    assert engine.run(lambda: (asker.get(), threading.current_thread().name), "weights of somebody").get(WAIT_S) == (
        "me",
        "monarch-rdma-weights",
    )
    assert repr(engine.run(lambda: {}["missing"], "weights").exception(WAIT_S)) == "KeyError('missing')"
