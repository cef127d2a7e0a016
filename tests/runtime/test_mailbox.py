"""Ports: each answer reaches who waits for it, and who waits for a process that is gone hears of it at once."""

from __future__ import annotations

import threading
from typing import NamedTuple

import pytest

from monarch._base.ids import ProcRef
from monarch._runtime.faults import SupervisionError
from monarch._runtime.mailbox import Answer, Gather, OneReply, Ports, ProcGoneError, Reply, Stream
from monarch._wire import messages
from monarch._wire.exceptions import dumps_exception
from monarch._wire.frames import Flag
from monarch._wire.messages import Fault, ProcExited
from monarch._wire.pickling import dumps

WAIT_S = 10.0
GONE = ProcExited(ProcRef("p1", "ipc:///p1", ""), "was killed by signal 9 (SIGKILL)", "killed")
OTHER_GONE = ProcExited(ProcRef("p9", "ipc:///p9", ""), "exited with status 1", "exited")
FAULT = Fault("failed", "root.Worker{'gpus': 1/3}", "mesh<1>", 1, "ValueError: no", "p1")


class View(NamedTuple):
    """The view of a mesh that was called."""

    procs: tuple[str, ...] = ("p0", "p1", "p2")
    endpoint: str = "workers.step"

    def amend(self, fault):
        return fault

    def blame(self, rank, exited):
        return Fault("lost", f"root.Worker{rank}", "mesh<1>", rank, f"its process {exited.reason}", exited.proc.uid)


@pytest.fixture
def ports():
    return Ports()


def answer(ports, port, rank, value, flags=0):
    payload, buffers = dumps_exception(value) if flags & Flag.ERROR else dumps(value)
    ports.deliver(port, rank, flags, payload, [memoryview(bytearray(b)) for b in buffers])


def die(ports, port, rank=1):
    ports.deliver(port, rank, Flag.DEAD, messages.encode(FAULT), ())


# --- the table -----------------------------------------------------------------------------------------------------


class Recorder:
    def __init__(self):
        self.seen = []

    def on_message(self, *message):
        self.seen.append(message)

    def on_lost(self, exited):
        self.seen.append(exited)

    def fail(self, error):
        self.seen.append(error)


def test_a_message_reaches_its_port_alone(ports):
    one, two = Recorder(), Recorder()
    first, second = ports.open(one), ports.open(two)
    assert first != second
    ports.deliver(first, 3, 0, b"payload", ())
    assert (one.seen, two.seen) == ([(3, 0, b"payload", ())], [])
    assert len(ports) == 2


def test_a_closed_port_drops_what_still_comes(ports):
    receiver = Recorder()
    port = ports.open(receiver)
    ports.close(port)
    ports.close(port)
    ports.deliver(port, 0, 0, b"", ())
    ports.lose_one(port, GONE)
    ports.fail(port, ValueError())
    ports.lose(GONE, ports.mark())
    ports.fail_all(ValueError())
    assert receiver.seen == []
    assert len(ports) == 0
    assert ports.open(Recorder()) != port  # a late answer must not reach somebody else


def test_who_waits_since_after_the_mark_is_not_told_of_the_loss(ports):
    before, after = Recorder(), Recorder()
    ports.open(before)
    mark = ports.mark()
    ports.open(after)
    ports.lose(GONE, mark)
    assert (before.seen, after.seen) == ([GONE], [])


def test_all_are_told_of_a_loss_and_of_the_end(ports):
    receivers = [Recorder(), Recorder()]
    first, second = (ports.open(receiver) for receiver in receivers)
    ports.lose(GONE, ports.mark())
    ports.lose_one(second, OTHER_GONE)
    error, last = ValueError(), KeyError()
    ports.fail(first, error)
    ports.fail(first, last)
    ports.fail_all(last)
    assert receivers[0].seen == [GONE, error]
    assert receivers[1].seen == [GONE, OTHER_GONE, last]
    assert len(ports) == 0


def test_ports_of_many_threads_differ(ports):
    opened = []

    def open_some():
        opened.extend([ports.open(Recorder()) for _ in range(500)])

    threads = [threading.Thread(target=open_some) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(opened)) == len(ports) == 2000


# --- one reply -----------------------------------------------------------------------------------------------------


def test_one_reply_is_the_value(ports):
    one = OneReply(ports, View(), 1)
    answer(ports, one.port, 1, {"loss": 0.5})
    assert one.future.get(WAIT_S) == {"loss": 0.5}
    assert len(ports) == 0
    answer(ports, one.port, 1, "late")
    assert one.future.get(WAIT_S) == {"loss": 0.5}


def test_a_value_with_buffers_arrives(ports):
    one = OneReply(ports, View(), 1)
    value = bytearray(b"x" * 100_000)
    answer(ports, one.port, 1, value)
    assert one.future.get(WAIT_S) == value


def test_one_reply_may_be_an_exception(ports):
    one = OneReply(ports, View(), 1)
    answer(ports, one.port, 1, LookupError("no key"), Flag.ERROR)
    with pytest.raises(LookupError, match="no key") as first:
        one.future.get(WAIT_S)
    with pytest.raises(LookupError) as second:
        one.future.get(WAIT_S)
    assert first.value is second.value


def test_a_reply_that_can_not_be_read_is_an_error_of_who_reads_it(ports):
    one = OneReply(ports, View(), 1)
    ports.deliver(one.port, 1, 0, b"no pickle", ())
    assert one.future.exception(WAIT_S) is not None


def test_a_dead_actor_fails_its_call_with_what_where_and_next(ports):
    one = OneReply(ports, View(), 1)
    die(ports, one.port)
    said = r"(?s)workers\.step\(\) failed.*ValueError: no\n  where: rank 1 of mesh mesh<1>, proc p1\n  next: "
    with pytest.raises(SupervisionError, match=said):
        one.future.get(WAIT_S)
    assert len(ports) == 0


def test_one_reply_waits_for_its_own_process_only(ports):
    one = OneReply(ports, View(), 2)
    ports.lose(GONE, ports.mark())
    ports.lose(OTHER_GONE, ports.mark())
    with pytest.raises(TimeoutError):
        one.future.get(0)
    answer(ports, one.port, 2, "alive")
    assert one.future.get(WAIT_S) == "alive"


def test_one_reply_of_a_lost_process_names_how_it_ended(ports):
    one = OneReply(ports, View(), 1)
    ports.lose(GONE, ports.mark())
    with pytest.raises(SupervisionError, match=r"killed by signal 9") as caught:
        one.future.get(WAIT_S)
    assert (caught.value.endpoint, caught.value.fault.rank, caught.value.fault.kind) == ("workers.step", 1, "lost")
    assert len(ports) == 0


def test_a_table_that_forgets_tells_nobody_anything_any_more(ports):
    before, behind = Recorder(), Recorder()
    first = ports.open(before)
    ports.forget_all()
    second = ports.open(behind)
    for port in (first, second):
        ports.deliver(port, 0, 0, b"", ())
        ports.lose_one(port, GONE)
    ports.lose(GONE, ports.mark())
    ports.fail_all(ValueError())
    assert before.seen == behind.seen == []
    assert len(ports) == 0


def test_every_kind_of_wait_ends_with_the_process(ports):
    stream = Stream(ports, None, lambda item: item)
    waits = [
        OneReply(ports, View(), 0).future,
        Gather(ports, View(), list).future,
        Answer(ports, "p0").future,
        stream.receive(),
    ]
    ports.fail_all(RuntimeError("the process stops"))
    for future in waits:
        with pytest.raises(RuntimeError, match="the process stops"):
            future.get(WAIT_S)


# --- answers to requests -------------------------------------------------------------------------------------------


def test_an_answer_is_a_control_message(ports):
    request = Answer(ports, "p1")
    ports.deliver(request.port, 0, Flag.RAW, memoryview(messages.encode(messages.Done())), ())
    assert request.future.get(WAIT_S) == messages.Done()
    assert len(ports) == 0


def test_a_request_to_a_lost_process_says_so(ports):
    request = Answer(ports, "p1")
    ports.lose(OTHER_GONE, ports.mark())
    ports.lose(GONE, ports.mark())
    with pytest.raises(ProcGoneError, match="was killed by signal 9"):
        request.future.get(WAIT_S)
    assert len(ports) == 0


# --- gathers -------------------------------------------------------------------------------------------------------


def gather(ports, procs=("p0", "p1", "p2")):
    return Gather(ports, View(procs), lambda replies: [reply.take() for reply in replies])


def test_a_gather_is_in_rank_order_whoever_answers_first(ports):
    wait = gather(ports)
    for rank in (2, 0, 1):
        assert not wait.future._done
        answer(ports, wait.port, rank, f"rank {rank}")
    assert wait.future.get(WAIT_S) == ["rank 0", "rank 1", "rank 2"]
    assert len(ports) == 0


def test_a_second_answer_of_a_rank_counts_for_no_other(ports):
    wait = gather(ports)
    for rank, value in ((0, "a"), (0, "again"), (1, "b"), (2, "c")):
        answer(ports, wait.port, rank, value)
    assert wait.future.get(WAIT_S) == ["a", "b", "c"]


def test_of_several_exceptions_a_gather_raises_that_of_the_first_rank(ports):
    wait = gather(ports)
    answer(ports, wait.port, 2, ValueError("rank 2"), Flag.ERROR)
    answer(ports, wait.port, 1, KeyError("rank 1"), Flag.ERROR)
    assert not wait.future._done  # the others are still at work
    answer(ports, wait.port, 0, "fine")
    with pytest.raises(KeyError, match="rank 1"):
        wait.future.get(WAIT_S)


def test_a_gather_ends_with_the_first_rank_that_is_gone(ports):
    wait = gather(ports)
    answer(ports, wait.port, 0, "a")
    ports.lose(GONE, ports.mark())
    with pytest.raises(SupervisionError, match="killed by signal 9") as caught:
        wait.future.get(WAIT_S)
    assert caught.value.fault.rank == 1
    assert len(ports) == 0


def test_a_rank_that_has_answered_may_go(ports):
    wait = gather(ports)
    answer(ports, wait.port, 1, "b")
    ports.lose(GONE, ports.mark())
    ports.lose(OTHER_GONE, ports.mark())
    answer(ports, wait.port, 0, "a")
    answer(ports, wait.port, 2, "c")
    assert wait.future.get(WAIT_S) == ["a", "b", "c"]


def test_of_two_ranks_in_one_process_the_one_without_answer_is_blamed(ports):
    wait = gather(ports, ("p1", "p1"))
    answer(ports, wait.port, 0, "a")
    ports.lose(GONE, ports.mark())
    with pytest.raises(SupervisionError) as caught:
        wait.future.get(WAIT_S)
    assert caught.value.fault.rank == 1


def test_a_dead_actor_ends_a_gather(ports):
    wait = gather(ports)
    die(ports, wait.port)
    with pytest.raises(SupervisionError, match="ValueError: no"):
        wait.future.get(WAIT_S)
    assert len(ports) == 0


def test_answers_that_come_on_several_threads_are_all_counted(ports):
    for _ in range(50):
        wait = gather(ports, tuple(f"p{rank}" for rank in range(8)))
        start = threading.Barrier(4)

        def run(first, wait=wait, start=start):
            start.wait()
            for rank in (first, first + 4):
                answer(ports, wait.port, rank, rank)

        threads = [threading.Thread(target=run, args=[first]) for first in range(4)]
        for thread in threads:
            thread.start()
        assert wait.future.get(WAIT_S) == list(range(8))
        for thread in threads:
            thread.join()


# --- streams and channels ------------------------------------------------------------------------------------------


def stream(ports, target=None):
    return Stream(ports, target, lambda item: (item[0], item[1].take()))


def test_a_channel_hands_over_in_the_order_of_arrival(ports):
    channel = stream(ports)
    early = channel.receive()
    for rank, value in ((5, "a"), (0, "b"), (5, "c")):
        answer(ports, channel.port, rank, value)
    assert [early.get(WAIT_S), channel.receive().get(WAIT_S), channel.receive().get(WAIT_S)] == [(5, "a"), (0, "b"), (5, "c")]


def test_waiting_receivers_are_served_in_their_order(ports):
    channel = stream(ports)
    futures = [channel.receive() for _ in range(3)]
    for value in "abc":
        answer(ports, channel.port, 0, value)
    assert [future.get(WAIT_S)[1] for future in futures] == ["a", "b", "c"]


def test_an_exception_of_a_channel_is_one_message(ports):
    channel = stream(ports)
    answer(ports, channel.port, 0, ValueError("bad"), Flag.ERROR)
    answer(ports, channel.port, 0, "good")
    with pytest.raises(ValueError, match="bad"):
        channel.receive().get(WAIT_S)
    assert channel.receive().get(WAIT_S) == (0, "good")


def test_nobodys_death_ends_a_channel(ports):
    channel = stream(ports)
    waits = channel.receive()
    ports.lose(GONE, ports.mark())
    answer(ports, channel.port, 0, "still here")
    assert waits.get(WAIT_S) == (0, "still here")


def test_a_closed_channel_still_gives_what_it_has(ports):
    channel = stream(ports)
    answer(ports, channel.port, 0, "had")
    channel.close()
    channel.close()
    answer(ports, channel.port, 0, "late")
    assert channel.receive().get(WAIT_S) == (0, "had")
    assert not channel.receive()._done


def test_a_stream_closes_behind_its_last_answer(ports):
    replies = stream(ports, View())
    for rank in (2, 0, 1):
        assert len(ports) == 1
        answer(ports, replies.port, rank, rank)
    assert len(ports) == 0
    assert [replies.receive().get(WAIT_S) for _ in range(3)] == [(2, 2), (0, 0), (1, 1)]


def test_a_rank_that_is_gone_costs_a_stream_only_its_own_answer(ports):
    replies = stream(ports, View())
    answer(ports, replies.port, 0, "a")
    waits = [replies.receive(), replies.receive()]
    ports.lose(OTHER_GONE, ports.mark())
    assert not waits[1]._done
    ports.lose(GONE, ports.mark())
    ports.lose(GONE, ports.mark())
    answer(ports, replies.port, 2, "c")
    assert waits[0].get(WAIT_S) == (0, "a")
    with pytest.raises(SupervisionError, match="killed by signal 9"):
        waits[1].get(WAIT_S)
    assert replies.receive().get(WAIT_S) == (2, "c")
    assert len(ports) == 0


def test_each_rank_of_a_stream_that_was_on_a_dead_process_says_so(ports):
    replies = stream(ports, View(procs=("p1", "p0", "p1")))
    futures = [replies.receive() for _ in range(3)]
    ports.lose(GONE, ports.mark())
    answer(ports, replies.port, 1, "b")
    assert [error.fault.rank for error in (future.exception(WAIT_S) for future in futures) if error] == [0, 2]
    assert futures[2].get(WAIT_S) == (1, "b")
    assert len(ports) == 0


def test_a_stream_does_not_mind_a_rank_that_goes_behind_its_answer(ports):
    replies = stream(ports, View())
    answer(ports, replies.port, 1, "b")
    ports.lose(GONE, ports.mark())
    answer(ports, replies.port, 0, "a")
    assert [replies.receive().get(WAIT_S) for _ in range(2)] == [(1, "b"), (0, "a")]


def test_a_stream_goes_on_behind_an_actor_that_is_dead(ports):
    replies = stream(ports, View())
    answer(ports, replies.port, 0, "a")
    die(ports, replies.port)
    assert replies.receive().get(WAIT_S) == (0, "a")
    with pytest.raises(SupervisionError, match="ValueError: no"):
        replies.receive().get(WAIT_S)
    answer(ports, replies.port, 2, "c")
    assert replies.receive().get(WAIT_S) == (2, "c")


def test_a_dead_actor_ends_a_channel_that_it_was_to_answer(ports):
    channel = stream(ports)
    waits = channel.receive()
    die(ports, channel.port)
    with pytest.raises(SupervisionError, match=r"Endpoint call port\(\) failed"):
        waits.get(WAIT_S)


def test_each_message_of_a_busy_channel_is_received_once(ports):
    channel, num = stream(ports), 2000
    received = []

    def send():
        for number in range(num):
            answer(ports, channel.port, 0, number)

    def receive():
        for _ in range(num):
            received.append(channel.receive().get(WAIT_S)[1])

    threads = [threading.Thread(target=target) for target in (send, receive, send, receive)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(received) == sorted(2 * list(range(num)))


# --- replies -------------------------------------------------------------------------------------------------------


def test_a_reply_is_decoded_once_and_lets_go_of_its_buffers():
    payload, _ = dumps([1, 2])
    reply = Reply(0, payload, [memoryview(b"x")])
    assert not reply.failed
    assert reply.take() is reply.take()
    assert (reply._payload, reply._buffers) == (None, ())


def test_a_failed_reply_raises_the_same_object_each_time():
    payload, _ = dumps_exception(KeyError("k"))
    reply = Reply(Flag.ERROR, payload, ())
    assert reply.failed
    with pytest.raises(KeyError) as first:
        reply.take()
    with pytest.raises(KeyError) as second:
        reply.take()
    assert first.value is second.value


# --- calls that are late -------------------------------------------------------------------------------------------


def test_a_call_knows_who_has_not_answered(ports):
    one, all_of_them = OneReply(ports, View(), 1), Gather(ports, View(), list)
    stream = Stream(ports, View(), lambda item: item[1].take())
    assert [call.asked() for call in (one, all_of_them, stream)] == [[1], [0, 1, 2], [0, 1, 2]]
    for receiver in (all_of_them, stream):
        answer(ports, receiver.port, 1, "x")
    assert [call.missing() for call in (one, all_of_them, stream)] == [[1], [0, 2], [0, 2]]
    answer(ports, one.port, 1, "x")
    assert one.missing() == []


def test_a_future_leads_to_its_call_until_that_is_over(ports):
    one, all_of_them = OneReply(ports, View(), 1), Gather(ports, View(), list)
    stream = Stream(ports, View(), lambda item: item[1].take())
    first, second = stream.receive(), stream.receive()
    control = Answer(ports, "p0")
    futures = (one.future, all_of_them.future, first, second, control.future)
    assert [ports.call_of(future) for future in futures] == [one, all_of_them, stream, stream, None]
    assert ports.call_at(one.port) is one and ports.call_at(control.port) is None
    answer(ports, one.port, 1, "x")
    answer(ports, stream.port, 1, "x")
    assert [ports.call_of(future) for future in futures] == [None, all_of_them, None, stream, None]
    assert ports.call_at(one.port) is None
    assert ports.calls() == [all_of_them, stream]


def test_a_channel_waits_for_nobody_in_particular(ports):
    channel = Stream(ports, None, lambda item: item)
    assert (channel.target, channel.asked(), channel.missing()) == (None, [], [])
