"""Merging: batches survive the wire, every answer leaves once, errors do not wait, and what a dead agent held is said again."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch._base.ids import ProcRef
from monarch._runtime.cast_merge import Answer, Batch, Relay
from monarch._wire import messages
from monarch._wire.cast_messages import CastReplies
from monarch._wire.frames import Decoder, Flag, FrameError, Kind, encode
from monarch._wire.messages import ProcExited


def exited(number: int) -> ProcExited:
    return ProcExited(ProcRef(f"p-{number}", "ipc:///p", "ipc:///h"), "was killed", "killed")


def batch_of(*answers: Answer, lost=()) -> Batch:
    batch = Batch()
    for answer in answers:
        batch.add(answer)
    for end in lost:
        batch.add_lost(end)
    return batch


def plain(answers) -> list[tuple]:
    return [(rank, flags, bytes(payload), [bytes(b) for b in buffers]) for rank, flags, payload, buffers in answers]


def over_the_wire(batch: Batch) -> Batch:
    message, payload, buffers = batch.encode("caller", 7, 3)
    data = b"".join(bytes(piece) for piece in encode(Kind.CONTROL, messages.encode(message), payload, buffers=buffers))
    decoder, frames = Decoder(1 << 30), []
    while data:
        space = decoder.space()
        count = min(len(space), len(data))
        space[:count], data = data[:count], data[count:]
        frames += decoder.received(count)
    (frame,) = frames
    decoded = messages.decode_control(frame.header)
    assert isinstance(decoded, CastReplies) and (decoded.sender, decoded.epoch, decoded.number) == ("caller", 7, 3)
    return Batch.decode(decoded, frame.payload, frame.buffers)


answers_st = st.builds(
    Answer,
    st.integers(0, 100_000),
    st.sampled_from([0, 0, Flag.ERROR, Flag.DEAD]).map(int),
    st.binary(max_size=40),
    st.lists(st.binary(max_size=40).map(memoryview), max_size=3),
)


@settings(max_examples=60)
@given(parts=st.lists(st.lists(answers_st, max_size=6), max_size=5), lost=st.lists(st.integers(0, 9), max_size=3))
def test_answers_survive_being_merged_at_every_hop(parts, lost):
    up = batch_of(lost=[exited(number) for number in lost])
    for part in parts:
        up.extend(over_the_wire(batch_of(*part)))
    got = over_the_wire(up)
    assert plain(got.answers()) == plain(answer for part in parts for answer in part)
    assert got.lost() == [exited(number) for number in lost]
    assert got.nbytes == up.nbytes == sum(answer.nbytes for part in parts for answer in part)
    assert len(got) == len(lost) + sum(map(len, parts))


def test_reading_a_batch_copies_neither_payloads_nor_buffers():
    payload, buffer = bytearray(b"onetwo"), memoryview(bytearray(b"x" * 8))
    batch = Batch.decode(CastReplies("c", 0, 1, [0, 1], [3], [], [0, 1]), payload, [buffer])
    first, second = batch.answers()
    payload[0:1], buffer[0] = b"O", ord("y")
    assert bytes(first.payload) == b"One" and second.buffers[0][0] == ord("y")


def test_equal_answers_cost_few_bytes_each():
    batch = batch_of(*(Answer(rank, 0, b"N.", ()) for rank in range(1000)))
    message, payload, _ = batch.encode("caller", 1, 1)
    assert len(messages.encode(message)) + len(payload) < 6 * 1000


@pytest.mark.parametrize(
    "fields",
    [
        {"sizes": [3, 3]},
        {"sizes": [2, 5]},
        {"sizes": [-1, 8, -1]},
        {"flags": [1]},
        {"counts": [1]},
        {"counts": [2, -1, 0]},
        {"counts": [1, 1, 1]},
    ],
    ids=str,
)
def test_a_table_that_does_not_fit_its_frame_is_refused(fields):
    fields = {"ranks": [0, 1, 2], "sizes": [2], "counts": [0, 1, 0], **fields}
    with pytest.raises(FrameError):
        Batch.decode(CastReplies("c", 0, 1, **fields), b"123456", [memoryview(b"b")])


def test_something_else_than_an_end_in_a_batch_is_refused():
    batch = Batch.decode(CastReplies("c", 0, 1, [], [], lost=[messages.encode(messages.Done())]), b"", [])
    with pytest.raises(messages.DecodeError):
        batch.lost()


# --- relays ----------------------------------------------------------------------------------------------------------


def test_answers_wait_for_each_other_and_leave_together():
    relay = Relay([0, 1], {"b": 2}, merged=True)
    assert relay.on_reply(0, 0, b"0", ()) == [] and relay.waiting
    assert relay.on_batch("b", batch_of(Answer(2, 0, b"2", ()), Answer(3, 0, b"3", ()))) == []
    assert relay.missing == 1
    (batch,) = relay.on_reply(1, 0, b"1", ())
    assert sorted(answer.rank for answer in batch.answers()) == [0, 1, 2, 3]
    assert not relay.waiting and relay.flush() == []


def test_a_flush_lets_go_of_what_is_here():
    relay = Relay([0, 1], {}, merged=True)
    relay.on_reply(1, 0, b"1", ())
    (batch,) = relay.flush()
    assert plain(batch.answers()) == [(1, 0, b"1", [])] and not relay.waiting


@pytest.mark.parametrize("flag", [Flag.ERROR, Flag.DEAD])
def test_the_first_error_does_not_wait_and_those_behind_it_do(flag):
    relay = Relay(range(10), {}, merged=True)
    relay.on_reply(4, 0, b"", ())
    (batch,) = relay.on_reply(5, int(flag), b"", ())
    assert [answer.rank for answer in batch.answers()] == [4, 5]
    assert relay.on_reply(6, int(flag), b"", ()) == []


def test_a_lost_proc_is_told_behind_what_the_others_have_said():
    relay = Relay([0, 1, 2], {}, merged=True)
    relay.on_reply(0, 0, b"", ())
    (batch,) = relay.on_proc_lost(exited(1), 1)
    assert [answer.rank for answer in batch.answers()] == [0] and batch.lost() == [exited(1)]
    assert relay.on_proc_lost(exited(0), 0) == []  # it had answered
    assert relay.missing == 1


def test_a_full_batch_leaves_and_a_long_answer_goes_alone():
    relay = Relay(range(10), {}, merged=True, max_replies=3, max_bytes=100)
    assert relay.on_reply(0, 0, b"", ()) == relay.on_reply(1, 0, b"", ()) == []
    assert [len(batch) for batch in relay.on_reply(2, 0, b"", ())] == [3]
    assert relay.on_reply(3, 0, b"", ()) == []
    assert [len(batch) for batch in relay.on_reply(4, 0, b"", [memoryview(bytes(200))])] == [1, 1]


def test_an_answer_that_nobody_waits_for_is_dropped():
    relay = Relay([0], {}, merged=True)
    assert len(relay.on_reply(0, 0, b"", ())) == 1
    assert relay.on_reply(0, 0, b"", ()) == relay.on_reply(7, 0, b"", ()) == []


def test_a_cast_is_acknowledged_once_it_was_handed_over_here_and_below():
    relay = Relay([0], {"b": 1, "c": 1}, merged=True)
    assert not relay.on_acknowledged("b") and not relay.on_handed()
    assert relay.on_acknowledged("c") and not relay.on_acknowledged("c")
    assert Relay([0], {}, merged=False).on_handed()


def test_a_lost_child_is_reported_and_no_longer_waited_for():
    relay = Relay([0], {"b": 3}, merged=True)
    assert not relay.on_handed()
    assert relay.on_reply(0, 0, b"", ()) == []
    lost = relay.on_child_lost("b")
    assert lost.broken and lost.acked and [len(batch) for batch in lost.leaving] == [1]
    assert relay.missing == 0 and relay.on_child_lost("b") == (False, False, [])


def test_a_child_that_has_said_all_is_no_loss():
    relay = Relay([], {"b": 1}, merged=True)
    relay.on_handed()
    relay.on_batch("b", batch_of(Answer(0, 0, b"", ())))
    relay.on_acknowledged("b")
    assert relay.on_child_lost("b") == (False, False, [])


def test_a_cast_without_answers_tells_only_of_procs_that_it_did_not_reach():
    relay = Relay([0, 1], {"b": 5}, merged=False)
    (batch,) = relay.on_proc_lost(exited(0), 0)
    assert batch.lost() == [exited(0)]
    relay.on_handed()
    assert relay.on_proc_lost(exited(1), 1) == [] and relay.missing == 0


def test_when_the_cast_comes_again_own_answers_are_said_again_and_those_of_children_asked_for():
    relay = Relay([0, 1, 2], {"b": 1}, merged=True)
    relay.on_handed()
    assert relay.on_acknowledged("b")
    relay.on_batch("b", batch_of(Answer(3, 0, b"3", ())))
    relay.on_reply(0, 0, b"0", ())
    relay.flush()
    relay.on_reply(1, 0, b"1", ())
    relay.on_proc_lost(exited(2), 2)
    acked, batches = relay.repeat(2, {"b": 1})
    assert not acked and relay.turn == 2 and relay.missing == 1
    assert [answer.rank for batch in batches for answer in batch.answers()] == [0, 1]
    assert [end for batch in batches for end in batch.lost()] == [exited(2)]
    assert relay.on_acknowledged("b")
    assert [len(batch) for batch in relay.on_batch("b", batch_of(Answer(3, 0, b"3", ())))] == [1]


def test_children_that_are_not_in_the_new_tree_are_not_waited_for():
    relay = Relay([0], {"b": 1}, merged=True)
    relay.on_handed()
    assert relay.repeat(1, {}) == (True, []) and relay.missing == 1
    assert not relay.on_acknowledged("b")


def test_a_child_that_was_lost_is_tried_and_reported_again_when_the_cast_comes_again():
    relay = Relay([0], {"b": 1}, merged=True)
    relay.on_handed()
    relay.on_child_lost("b")
    acked, _ = relay.repeat(1, {"b": 1})
    assert not acked and relay.on_child_lost("b")[:2] == (True, True)


@settings(max_examples=40)
@given(st.data())
def test_every_answer_leaves_exactly_once_whatever_the_order(data):
    own, below = list(range(5)), {"b": [5, 6, 7], "c": [8]}
    relay = Relay(own, {child: len(ranks) for child, ranks in below.items()}, merged=True, max_replies=4, max_bytes=50)
    events = [("", rank) for rank in own] + [(child, rank) for child, ranks in below.items() for rank in ranks]
    left = []
    for child, rank in data.draw(st.permutations(events)):
        answer = Answer(rank, data.draw(st.sampled_from([0, int(Flag.ERROR)])), data.draw(st.sampled_from([b"", b"x" * 30])), ())
        left += relay.on_batch(child, batch_of(answer)) if child else relay.on_reply(*answer)
        if data.draw(st.booleans()):
            left += relay.flush()
    assert not relay.waiting and relay.missing == 0
    assert sorted(answer.rank for batch in left for answer in batch.answers()) == list(range(9))
