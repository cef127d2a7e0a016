"""Who holds what: memory that others hold stays where it is until they have let go, or are gone."""

from __future__ import annotations

import pytest

from monarch._base.ids import ProcRef
from monarch._runtime.future import Future
from monarch._wire.memory_messages import AskMemory, MemoryKeys, ReleaseMemory
from monarch.rdma.errors import TransferError
from monarch.rdma.memory import memory_of
from monarch.rdma.nixl_holds import Lent, Peer
from monarch.rdma.regions import RegionTable

READER, OTHER = ProcRef("proc-1", "ipc://x", "ipc://y"), ProcRef("proc-2", "ipc://x", "ipc://y")
NONCE = bytes(16)


class Agent:
    """Says what it was told."""

    def __init__(self):
        self.registered, self.error = [], None

    def register(self, address, nbytes, device=-1):
        if self.error is not None:
            raise self.error
        self.registered.append((address, nbytes, device))
        return self.registered[-1]

    def deregister(self, part):
        self.registered.remove(part)

    def metadata(self, places, *, is_device, with_connection):
        return b"connection " * with_connection + f"{len(places)}".encode()


class World:
    """A process, its loop and its driver, in one thread. Messages are kept."""

    def __init__(self):
        self.agent, self.requests, self.answers = Agent(), [], []
        self.proc = self.loop = self

    def call_soon(self, callback, *arguments):
        callback(*arguments)

    def begin(self):
        pass

    def request(self, ref, message):
        self.requests.append((ref, message, Future._new()))
        return self.requests[-1][2]

    def do(self, steps, deadline_s, on_end):
        return _Done(steps(self.agent), on_end)

    def do_soon(self, task):
        task(self.agent)


class _Done:
    def __init__(self, steps, on_end):
        self.error, self.result = None, None
        try:
            next(steps)
        except StopIteration as stop:
            self.result = stop.value
        except TransferError as exc:
            self.error = exc
        self.on_end = on_end


class Lending:
    """`Lent` over a real table."""

    def __init__(self):
        self.world, self.table = World(), RegionTable()
        self.lent = Lent(self.world, lambda: self.table, self.world)

    def ask(self, *generations, sender=READER, num_chunks=-1):
        answers = []
        message = AskMemory(self.table.nonce, generations, num_chunks)
        job = self.world.do(lambda agent: self.lent._show(agent, message), 0, None)
        self.lent._finish(job, message, sender, answers.append)
        return answers[0]

    def drop(self, region):
        self.table.drop(region.generation)
        self.lent.on_dropped(region)


@pytest.fixture
def lending():
    made = Lending()
    yield made
    made.lent.close()
    assert made.table.close()


def test_who_asks_gets_the_connection_once_and_keys(lending):
    first, second = (lending.table.add(memory_of(bytearray(100))) for _ in range(2))
    assert lending.ask(first.generation) == MemoryKeys((b"connection 2",), 1)
    assert lending.ask(second.generation, num_chunks=1) == MemoryKeys((b"1",), 1)
    assert lending.ask(first.generation, second.generation, num_chunks=1) == MemoryKeys((b"2",), 1)
    assert len(lending.world.agent.registered) == 3


def test_a_region_is_unpinned_when_all_holders_have_let_go_or_are_gone(lending):
    region = lending.table.add(memory_of(bytearray(100)))
    for sender in (READER, OTHER):
        lending.ask(region.generation, sender=sender)
    lending.drop(region)
    asked = lending.world.requests
    assert [(ref, message) for ref, message, _ in asked] == [
        (ref, ReleaseMemory(lending.table.nonce, region.generation)) for ref in (READER, OTHER)
    ]
    assert lending.table.num_lingering == 1
    asked[0][2]._complete(None)
    assert lending.table.num_lingering == 1
    asked[1][2]._fail(RuntimeError("is gone"))
    assert lending.table.num_lingering == 0 and len(lending.world.agent.registered) == 1  # the table


def test_what_was_dropped_has_no_keys(lending):
    region = lending.table.add(memory_of(bytearray(100)))
    lending.drop(region)
    assert lending.ask(region.generation, 77).gone == (region.generation, 77)
    assert lending.table.num_lingering == 0


def test_a_drop_between_registering_and_answering_leaves_nothing(lending):
    region = lending.table.add(memory_of(bytearray(100)))
    message, answers = AskMemory(lending.table.nonce, (region.generation,), -1), []
    job = lending.world.do(lambda agent: lending.lent._show(agent, message), 0, None)
    lending.table.drop(region.generation)
    assert lending.table.num_lingering == 1
    lending.lent._finish(job, message, READER, answers.append)
    assert answers[0].gone == (region.generation,) and lending.table.num_lingering == 0


def test_what_can_not_be_registered_is_refused_and_stays_unheld(lending):
    region = lending.table.add(memory_of(bytearray(100)))
    lending.world.agent.error = TransferError("no room")
    assert lending.ask(region.generation).refusal == "no room"
    lending.drop(region)
    assert lending.table.num_lingering == 0


def test_what_is_held_at_the_end_is_free_when_the_agent_is_no_more(lending):
    region = lending.table.add(memory_of(bytearray(100)))
    lending.ask(region.generation)
    lending.drop(region)
    lending.lent.close()
    assert lending.table.num_lingering == 0


def keys_for(peer, *generations, gone=()):
    message, epoch = peer.question(generations)
    peer.on_keys(epoch, message, MemoryKeys((b"keys",), 1, gone))


def test_a_holder_lets_go_when_its_last_transfer_is_over():
    peer, answers = Peer(NONCE), []
    assert peer.take([1, 2]) == ([], [1, 2])
    keys_for(peer, 1, 2)
    holds, missing = peer.take([1, 2])
    again, _ = peer.take([1])
    assert not missing and len(holds) == 2 and peer.unloaded == [b"keys"] and peer.num_chunks == 1
    peer.release(1, lambda: answers.append(1))
    assert not answers and peer.take([1]) == ([], [1])
    assert peer.give_back(holds) == []
    for answer in peer.give_back(again):
        answer()
    assert answers == [1]
    peer.release(2, lambda: answers.append(2))
    peer.release(3, lambda: answers.append(3))
    assert answers == [1, 2, 3]


def test_what_is_gone_is_not_held():
    peer = Peer(NONCE)
    keys_for(peer, 1, 2, gone=(2,))
    assert peer.take([1, 2]) == ([], [2])


def test_a_broken_connection_asks_for_all_keys_again_and_still_lets_nothing_go_that_is_in_use():
    peer, answers = Peer(NONCE), []
    keys_for(peer, 1)
    holds, _ = peer.take([1])
    question = peer.question([2])
    peer.name, forgotten = "agent", []
    peer.reset(question[1], forgotten.append)
    peer.reset(question[1], forgotten.append)
    assert forgotten == ["agent"]
    peer.on_keys(question[1], question[0], MemoryKeys((b"late",), 1))
    assert peer.take([1]) == ([], [1]) and peer.take([2]) == ([], [2]) and not peer.unloaded and peer.num_chunks == -1
    peer.release(1, lambda: answers.append(1))
    assert not answers
    assert len(peer.give_back(holds)) == 1
