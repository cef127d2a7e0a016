"""Endpoints and adverbs between real processes: who gets what, in which order, on which thread, in which context."""

from __future__ import annotations

import asyncio
import gc
import operator
import queue
import threading
import time
import warnings

import pytest

from monarch.actor import (
    Accumulator,
    Actor,
    ActorError,
    Channel,
    Future,
    SupervisionError,
    ValueMesh,
    as_endpoint,
    concurrent_endpoint,
    context,
    current_actor_name,
    current_rank,
    current_size,
    endpoint,
    send,
    this_host,
    this_proc,
)
from system.actors import Caller, Echo, Gate, Log, Mailman, SyncCaller, SyncEcho, SyncLog

pytest_plugins = ["system.recorder"]
pytestmark = pytest.mark.usefixtures("faults")

WAIT_S = 10.0

both_echoes = pytest.mark.parametrize("cls", [Echo, SyncEcho], ids=lambda cls: cls.__name__)
both_logs = pytest.mark.parametrize("cls", [Log, SyncLog], ids=lambda cls: cls.__name__)
both_callers = pytest.mark.parametrize("caller", [Caller, SyncCaller], ids=lambda cls: cls.__name__)


@pytest.fixture(scope="module")
def procs():
    return this_host().spawn_procs(per_host={"gpus": 2})


@pytest.fixture(scope="module")
def grid():
    return this_host().spawn_procs(per_host={"hosts": 2, "gpus": 2})


@pytest.fixture
def echo(procs):
    mesh = procs.spawn("echo", Echo)
    yield mesh
    mesh.stop().get(WAIT_S)


# --- adverbs ---------------------------------------------------------------------------------------------------------


@both_echoes
def test_call_gives_one_value_per_rank_in_rank_order_over_the_extent_of_the_view(grid, cls):
    mesh = grid.spawn("echo", cls)
    values = mesh.rank.call().get(WAIT_S)
    assert isinstance(values, ValueMesh)
    assert values.sizes == {"hosts": 2, "gpus": 2}
    assert values.values() == [0, 1, 2, 3]
    assert [(dict(point), value) for point, value in values][1] == ({"hosts": 0, "gpus": 1}, 1)
    column = mesh.slice(gpus=1).rank.call().get(WAIT_S)
    assert (column.sizes, column.values()) == ({"hosts": 2}, [1, 3])
    single = mesh.slice(hosts=1, gpus=0).rank.call().get(WAIT_S)
    assert (single.sizes, single.item()) == ({}, 2)


@both_echoes
def test_call_one_gives_the_value_of_the_only_actor(procs, cls):
    mesh = procs.spawn("echo", cls)
    assert mesh.slice(gpus=1).echo.call_one({"a": [1, "x", None]}).get(WAIT_S) == {"a": [1, "x", None]}
    assert mesh.slice(gpus=slice(0, 1)).rank.call_one().get(WAIT_S) == 0


def test_call_one_on_several_actors_is_refused_and_nothing_is_sent(procs):
    log = procs.spawn("log", Log)
    text = r"call_one requires exactly 1 actor, but mesh has 2\n  where: log\.add, extent \{gpus: 2\}\n  next:  slice"
    with pytest.raises(ValueError, match=text):
        log.add.call_one(1)
    assert log.items.call().get(WAIT_S).values() == [[], []]


@both_echoes
def test_choose_reaches_every_member_sooner_or_later(procs, cls):
    mesh = procs.spawn("echo", cls)
    assert {mesh.rank.choose().get(WAIT_S) for _ in range(64)} == {0, 1}


@both_callers
def test_an_actor_can_choose_and_stream_a_mesh_it_was_given(procs, echo, caller):
    callers = procs.spawn("caller", caller, echo)
    assert set(callers.choose.call("rank").get(WAIT_S).values()) <= {0, 1}
    assert [sorted(ranks) for ranks in callers.stream.call("rank").get(WAIT_S).values()] == [[0, 1], [0, 1]]


def test_stream_gives_one_future_per_actor_after_what_was_broadcast_before(grid):
    log = grid.spawn("log", Log)
    log.add.broadcast(5)
    replies = log.items.stream()
    futures = list(replies)
    assert all(isinstance(future, Future) for future in futures)
    assert [future.get(WAIT_S) for future in futures] == [[5]] * 4


def test_stream_hands_out_replies_in_order_of_arrival(procs):
    mailman = procs.spawn("mailman", Mailman)
    replies = list(mailman.keep.stream())
    assert mailman.slice(gpus=1).deliver.call_one("late rank first").get(WAIT_S) == 1
    assert replies[0].get(WAIT_S) == (0, "late rank first")  # `slice` leaves a view of one: its rank is 0
    with pytest.raises(TimeoutError):
        replies[1].get(0.05)
    assert mailman.slice(gpus=0).deliver.call_one("early rank last").get(WAIT_S) == 1
    assert replies[1].get(WAIT_S) == (0, "early rank last")


@both_logs
def test_broadcast_returns_nothing_and_reaches_all(procs, cls):
    log = procs.spawn("log", cls)
    assert log.add.broadcast("x") is None
    assert log.items.call().get(WAIT_S).values() == [["x"], ["x"]]


def test_a_call_whose_future_is_dropped_is_still_made(procs):
    log = procs.spawn("log", Log)
    log.add.call("dropped")
    log.slice(gpus=0).add.call_one("dropped too")
    gc.collect()
    assert log.items.call().get(WAIT_S).values() == [["dropped", "dropped too"], ["dropped"]]


def test_a_timeout_hurts_neither_the_actor_nor_the_future(procs):
    gate = procs.spawn("gate", Gate)
    future = gate.wait.call("w")
    with pytest.raises(TimeoutError):
        future.get(0.02)
    gate.open.call().get(WAIT_S)
    assert future.get(WAIT_S).values() == ["w", "w"]


@both_echoes
def test_arguments_follow_pythons_rules(procs, cls):
    mesh = procs.spawn("echo", cls).slice(gpus=0)
    ask = mesh.signature.call_one
    assert ask(1).get(WAIT_S) == (1, 2, (), "k", {})
    assert ask(1, 3, 4, 5, key=6, other=7).get(WAIT_S) == (1, 3, (4, 5), 6, {"other": 7})
    assert ask(1, second=3).get(WAIT_S) == (1, 3, (), "k", {})


@both_logs
@pytest.mark.parametrize("adverb", ["call", "choose", "stream", "broadcast"])
def test_arguments_that_do_not_fit_raise_at_the_call_and_nothing_is_sent(procs, cls, adverb):
    log = procs.spawn("log", cls)
    with pytest.raises(TypeError, match=r"missing a required argument: 'item'\n  where: call of log\.add\(item"):
        getattr(log.add, adverb)()
    with pytest.raises(TypeError, match="too many positional arguments"):
        getattr(log.add, adverb)(1, 2)
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'z'"):
        getattr(log.add, adverb)(1, z=2)
    assert log.items.call().get(WAIT_S).values() == [[], []]


class Stubborn:
    """Raises when pickled."""

    def __reduce__(self):
        raise LookupError("stays at home")


def test_an_error_of_pickling_an_argument_is_raised_as_it_is_and_nothing_is_sent(procs):
    log = procs.spawn("log", Log)
    for adverb in (log.add.call, log.add.broadcast, log.add.stream, log.add.choose):
        with pytest.raises(LookupError, match="stays at home"):
            adverb(Stubborn())
    with pytest.raises(TypeError, match=r"cannot pickle '_thread.lock' object\n  where: argument 0"):
        log.add.call(threading.Lock())
    assert log.items.call().get(WAIT_S).values() == [[], []]


@both_logs
def test_an_error_of_unpickling_an_argument_is_the_callers_and_the_actor_lives(procs, cls):
    def explode():
        raise LookupError("burst on arrival")

    class Bomb:
        def __reduce__(self):
            return explode, ()

    log = procs.spawn("log", cls)
    with pytest.raises(ActorError, match=r"Actor call log\.add failed\.(.|\n)*LookupError: burst"):
        log.add.call(Bomb()).get(WAIT_S)
    assert log.items.call().get(WAIT_S).values() == [[], []]


@both_echoes
def test_an_exception_is_an_actor_error_with_the_original_object_and_the_remote_traceback(procs, cls, faults):
    mesh = procs.spawn("echo", cls)
    with pytest.raises(ActorError, match=r"Actor call echo\.fail failed\.") as caught:
        mesh.fail.call("why").get(WAIT_S)
    error = caught.value
    assert isinstance(error.exception, ValueError) and error.exception.args == ("why",)
    assert not isinstance(error, ValueError)
    assert error.message == "Actor call echo.fail failed."
    assert error.args == (error.exception, error.message)
    assert "Traceback of where the remote call failed (most recent call last):" in str(error)
    assert "actors.py" in error.exception_formatted and "ValueError: why" in error.exception_formatted
    assert mesh.echo.call(1).get(WAIT_S).values() == [1, 1]
    assert not faults.seen


def test_call_raises_the_exception_of_the_lowest_failing_rank_once_all_have_answered(grid):
    class Picky(Actor):
        @endpoint
        async def check(self):
            rank = current_rank().rank
            if rank in (1, 2):
                raise ValueError(f"rank {rank} says no")
            return rank

    picky = grid.spawn("picky", Picky)
    for _ in range(10):
        with pytest.raises(ActorError, match="rank 1 says no"):
            picky.check.call().get(WAIT_S)
    outcomes = [future.exception(WAIT_S) for future in picky.check.stream()]
    assert sorted(str(error.exception) for error in outcomes if error) == ["rank 1 says no", "rank 2 says no"]


@both_callers
def test_an_exception_that_crosses_two_actors_keeps_the_innermost_text(procs, echo, caller):
    manager = procs.spawn("manager", caller, echo).slice(gpus=0)
    with pytest.raises(ActorError, match=r"manager\.call failed(.|\n)*echo\.fail failed(.|\n)*ValueError: innermost"):
        manager.call.call_one("fail", "innermost").get(WAIT_S)


def test_an_unpicklable_result_is_an_actor_error_that_names_it(procs):
    class Generous(Actor):
        @endpoint
        def give(self):
            return (number for number in range(3))

        @endpoint
        def fine(self):
            return "fine"

    generous = procs.spawn("generous", Generous).slice(gpus=0)
    with pytest.raises(ActorError, match=r"generous\.give failed(.|\n)*generator"):
        generous.give.call_one().get(WAIT_S)
    assert generous.fine.call_one().get(WAIT_S) == "fine"


# --- order and one at a time -----------------------------------------------------------------------------------------


@both_logs
def test_one_sender_is_served_in_order_over_all_adverbs_and_slices(grid, cls):
    """Also what was sent while the mesh was being created."""
    log = grid.spawn("log", cls)
    views = [log, log.slice(gpus=0), log.slice(hosts=1), log.slice(hosts=1, gpus=1), log.flatten("all").slice(all=slice(0, None, 3))]
    port, _ = Channel[int].open()
    expected = {rank: [] for rank in range(4)}
    chosen = []
    for number in range(400):
        view = views[number % len(views)]
        match number // 5 % 5:
            case 0:
                view.add.broadcast(number)
            case 1:
                view.add.call(number)
            case 2:
                view.add.stream(number)
            case 3:
                send(view.add, (number,), {}, port)
            case _:
                view = view[-1]
                view.add.call_one(number)
        for rank in view._view.mesh_ranks:
            expected[rank].append(number)
    chosen.append(log.items.choose())
    assert log.items.call().get(WAIT_S).values() == list(expected.values())
    assert chosen[0].get(WAIT_S) in expected.values()


def test_order_holds_for_an_actor_that_sends(procs):
    class Writer(Actor):
        @endpoint
        async def write(self, log, count):
            for number in range(count):
                (log if number % 2 else log.slice(gpus=0)).add.broadcast(number)

    log = procs.spawn("log", Log)
    writers = procs.spawn("writer", Writer)
    writers.slice(gpus=1).write.call_one(log, 500).get(WAIT_S)
    # The client is another sender than the writer, and between two senders no order is promised: look until all is there.
    deadline = time.monotonic() + WAIT_S
    while [len(seen) for seen in log.items.call().get(WAIT_S).values()] != [500, 250]:
        assert time.monotonic() < deadline
    assert log.items.call().get(WAIT_S).values() == [list(range(500)), list(range(1, 500, 2))]


def test_messages_of_many_threads_each_keep_their_order(procs):
    log = procs.spawn("log", Log)

    def write(name):
        for number in range(200):
            log.add.broadcast((name, number))

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seen in log.items.call().get(WAIT_S).values():
        assert len(seen) == 800
        for name in "abcd":
            assert [number for who, number in seen if who == name] == list(range(200))


def test_endpoints_of_one_actor_do_not_overlap_not_even_async_ones(procs):
    class Meter(Actor):
        def __init__(self):
            self.running = self.most = 0

        @endpoint
        async def step(self):
            self.running += 1
            self.most = max(self.most, self.running)
            for _ in range(5):
                await asyncio.sleep(0)
            self.running -= 1

        @endpoint
        async def result(self):
            return self.most

    meter = procs.spawn("meter", Meter)
    for _ in range(50):
        meter.step.broadcast()
    assert meter.result.call().get(WAIT_S).values() == [1, 1]


def test_actors_of_one_proc_run_at_the_same_time(procs):
    class Meeting(Actor):
        @endpoint
        def open(self):
            port, self.receiver = Channel.open()
            return port

        @endpoint
        def talk(self, port):
            port.send("hello")
            return self.receiver.recv().get(WAIT_S)

    one, other = (procs.spawn(name, Meeting).slice(gpus=0) for name in ("one", "other"))
    to_one, to_other = one.open.call_one().get(WAIT_S), other.open.call_one().get(WAIT_S)
    talks = one.talk.call_one(to_other), other.talk.call_one(to_one)
    assert [talk.get(WAIT_S) for talk in talks] == ["hello", "hello"]


# --- threads, loops --------------------------------------------------------------------------------------------------


def test_sync_endpoints_have_no_loop_and_may_block_on_futures_quietly(procs, echo):
    class Blocking(Actor):
        def __init__(self, echo):
            self.echo = echo
            self.loop_in_init = self._loop()

        @staticmethod
        def _loop():
            try:
                return repr(asyncio.get_running_loop())
            except RuntimeError as exc:
                return str(exc)

        @endpoint
        def ask(self):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                return self.loop_in_init, self._loop(), self.echo.rank.call().get().values()

    blocking = procs.spawn("blocking", Blocking, echo)
    assert blocking.ask.call().get(WAIT_S).values() == [("no running event loop", "no running event loop", [0, 1])] * 2


def test_async_endpoints_and_init_run_on_one_loop_where_tasks_may_be_made(procs):
    class Looping(Actor):
        def __init__(self):
            self.loop = asyncio.get_running_loop()
            self.ready = asyncio.Event()
            self.task = asyncio.create_task(self.set_ready())

        async def set_ready(self):
            self.ready.set()

        @endpoint
        async def check(self):
            await self.ready.wait()
            return self.loop is asyncio.get_running_loop(), threading.current_thread().name

    checks = procs.spawn("looping", Looping).check.call().get(WAIT_S).values()
    assert checks == [(True, "monarch-actor-event-loop")] * 2


def test_state_of_the_thread_made_in_init_is_there_in_every_endpoint(procs):
    class Local(Actor):
        def __init__(self):
            self.local = threading.local()
            self.local.value = 5

    class AsyncLocal(Local):
        @endpoint
        async def value(self):
            self.local.value += 1
            return self.local.value

    class SyncLocal(Local):
        @endpoint
        def value(self):
            self.local.value += 1
            return self.local.value

    for cls in (AsyncLocal, SyncLocal):
        local = procs.spawn("local", cls)
        assert [local.value.call().get(WAIT_S).values() for _ in range(3)] == [[6, 6], [7, 7], [8, 8]]


# --- context ---------------------------------------------------------------------------------------------------------


def test_context_works_everywhere_inside_an_actor(procs):
    class Observer(Actor):
        def __init__(self):
            self.seen = {"init": self.where()}

        @staticmethod
        def where():
            here = context()
            return here.actor_instance.name, here.actor_instance.rank.rank, str(here.message_rank)

        @endpoint
        async def look(self):
            seen = dict(self.seen)
            seen["endpoint"] = self.where()

            async def in_task():
                return self.where()

            seen["task"] = await asyncio.create_task(in_task())
            seen["to_thread"] = await asyncio.to_thread(self.where)
            answers = queue.Queue()
            thread = threading.Thread(target=lambda: answers.put(self.where()))
            thread.start()
            seen["thread"] = await asyncio.to_thread(answers.get)
            thread.join()
            seen["name"] = current_actor_name() == str(context().actor_instance.actor_id)
            seen["size"] = current_size()
            return seen

        @concurrent_endpoint
        async def look_concurrently(self):
            await asyncio.sleep(0)
            return self.where()

    observer = procs.spawn("observer", Observer)
    for rank, seen in enumerate(observer.look.call().get(WAIT_S).values()):
        place = ("observer", rank, f"{{'gpus': {rank}/2}}")
        assert seen == {
            "init": ("observer", rank, f"{{'gpus': {rank}/2}}"),
            "endpoint": place,
            "task": place,
            "to_thread": place,
            "thread": place,
            "name": True,
            "size": {"gpus": 2},
        }
    assert [where[:2] for where in observer.look_concurrently.call().get(WAIT_S).values()] == [("observer", 0), ("observer", 1)]


def test_context_works_in_threads_of_a_sync_actor_and_in_cleanup(procs):
    port, receiver = Channel[tuple].open()

    class Observer(Actor):
        def __init__(self, port):
            self.port = port

        @endpoint
        def look(self):
            answers = queue.Queue()
            thread = threading.Thread(target=lambda: answers.put(context().actor_instance.name))
            thread.start()
            thread.join()
            return answers.get()

        def __cleanup__(self, exc):
            self.port.send((context().actor_instance.name, str(context().message_rank), exc))

    observer = procs.spawn("observer", Observer, port)
    assert observer.look.call().get(WAIT_S).values() == ["observer"] * 2
    observer.stop().get(WAIT_S)
    assert [receiver.recv().get(WAIT_S) for _ in range(2)] == [("observer", "{}", None)] * 2


def test_message_rank_is_the_place_in_the_view_that_was_sent_to(grid):
    class Points(Actor):
        @endpoint
        async def point(self):
            return str(current_rank()), str(context().actor_instance.rank)

    points = grid.spawn("points", Points)
    own = ["{'hosts': 0/2, 'gpus': 0/2}", "{'hosts': 0/2, 'gpus': 1/2}", "{'hosts': 1/2, 'gpus': 0/2}", "{'hosts': 1/2, 'gpus': 1/2}"]

    def ask(mesh):
        return mesh.point.call().get(WAIT_S).values()

    assert ask(points) == list(zip(own, own, strict=True))
    assert ask(points.slice(gpus=1)) == [("{'hosts': 0/2}", own[1]), ("{'hosts': 1/2}", own[3])]
    assert ask(points.slice(hosts=1, gpus=0)) == [("{}", own[2])]
    assert ask(points.slice(hosts=0, gpus=slice(1, 2))) == [("{'gpus': 0/1}", own[1])]
    assert ask(points.flatten("all").slice(all=slice(1, 4, 2))) == [("{'all': 0/2}", own[1]), ("{'all': 1/2}", own[3])]


def test_names_and_creators_form_a_chain(procs):
    class Inner(Actor):
        @endpoint
        async def who(self):
            instance = context().actor_instance
            return str(instance), instance.name, instance.class_name, instance.creator

    class Outer(Actor):
        def __init__(self, procs):
            self.inner = procs.spawn("My Inner!", Inner)

        @endpoint
        async def ask(self):
            return await self.inner.slice(gpus=1).who.call_one()

    outer = procs.spawn("outer", Outer, procs).slice(gpus=0)
    text, name, class_name, creator = outer.ask.call_one().get(WAIT_S)
    assert text == f"<root>.<{__name__}.Outer outer{{'gpus': 0/2}}>.<{class_name} My Inner!{{'gpus': 1/2}}>"
    assert (name, class_name) == ("My Inner!", f"{__name__}.Inner")
    assert (creator.name, creator.rank.rank, creator.creator.name, creator.creator.creator) == ("outer", 0, "root", None)
    assert str(context().actor_instance) == "<root>"
    assert context().actor_instance.creator is None and context().actor_instance.class_name is None


def test_a_hundred_threads_of_the_client_see_one_root():
    seen = queue.Queue()
    barrier = threading.Barrier(100)

    def look():
        barrier.wait()
        seen.put(str(context().actor_instance.actor_id))

    threads = [threading.Thread(target=look) for _ in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {seen.get() for _ in range(100)} == {str(context().actor_instance.actor_id)}


# --- concurrent endpoints --------------------------------------------------------------------------------------------


def test_concurrent_calls_overlap_and_start_in_order(procs):
    gate = procs.spawn("gate", Gate).slice(gpus=0)
    waiting = [gate.wait.call_one(name) for name in ("a", "b", "c")]
    gate.open.call_one().get(WAIT_S)
    assert [future.get(WAIT_S) for future in waiting] == ["a", "b", "c"]
    assert [event for event in gate.log.call_one().get(WAIT_S) if "start" in event] == ["start a", "start b", "start c"]


def test_concurrent_calls_with_explicit_ports_overlap_and_the_port_is_hidden(procs):
    gate = procs.spawn("gate", Gate).slice(gpus=0)
    with pytest.raises(TypeError, match=r"missing a required argument: 'name'\n  where: call of gate\.meet\(name"):
        gate.meet.call_one()
    meeting = [gate.meet.call_one(name) for name in ("a", "b")]
    gate.open.call_one().get(WAIT_S)
    assert [future.get(WAIT_S) for future in meeting] == ["a", "b"]


def test_a_subclass_inherits_and_mixes_concurrent_endpoints(procs):
    class Wider(Gate):
        @endpoint
        async def plain(self):
            return "plain"

        @concurrent_endpoint
        async def fail(self, text):
            return f"overridden {text}"

    gate = procs.spawn("gate", Wider).slice(gpus=0)
    waiting = gate.wait.call_one("w")
    assert gate.plain.call_one().get(WAIT_S) == "plain"
    assert gate.fail.call_one("x").get(WAIT_S) == "overridden x"
    gate.open.call_one().get(WAIT_S)
    assert waiting.get(WAIT_S) == "w"


def test_an_exception_of_a_concurrent_call_reaches_its_caller_and_the_actor_lives(procs, faults):
    gate = procs.spawn("gate", Gate).slice(gpus=0)
    waiting = gate.wait.call_one("w")
    with pytest.raises(ActorError, match=r"Actor call gate\.fail failed\.(.|\n)*ValueError: oh"):
        gate.fail.call_one("oh").get(WAIT_S)
    with pytest.raises(ActorError, match=r"Actor call gate\.cancel_itself failed with BaseException\."):
        gate.cancel_itself.call_one().get(WAIT_S)
    gate.open.call_one().get(WAIT_S)
    assert waiting.get(WAIT_S) == "w"
    assert not faults.seen


def test_an_exception_of_a_concurrent_call_with_explicit_port_fails_the_actor(procs, faults):
    gate = procs.spawn("gate", Gate).slice(gpus=0)
    with pytest.raises(SupervisionError, match=r"gate\.fail_with_port\(\) failed(.|\n)*no-answer"):
        gate.fail_with_port.call_one().get(WAIT_S)
    assert "no-answer" in faults.wait(1)[0].report()


def test_stop_cancels_concurrent_calls_before_cleanup(procs):
    port, receiver = Channel[list].open()

    class Tidy(Actor):
        def __init__(self, port):
            self.port = port
            self.events = []

        @concurrent_endpoint
        async def work(self, started):
            started.send("started")
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.events.append("cancelled")
                raise

        @endpoint
        async def touch(self):
            pass

        async def __cleanup__(self, exc):
            self.events.append(f"cleanup {exc}")
            self.port.send(self.events)

    tidy = procs.spawn("tidy", Tidy, port)
    started, starts = Channel.open()
    working = tidy.slice(gpus=0).work.call_one(started)
    starts.recv().get(WAIT_S)
    tidy.stop().get(WAIT_S)
    assert sorted((receiver.recv().get(WAIT_S) for _ in range(2)), key=len) == [["cleanup None"], ["cancelled", "cleanup None"]]
    with pytest.raises(SupervisionError, match=r"tidy\.work\(\) failed"):
        working.get(WAIT_S)


def test_six_hundred_concurrent_calls_end(procs):
    gate = procs.spawn("gate", Gate).slice(gpus=0)
    waiting = [gate.wait.call_one(number) for number in range(600)]
    gate.open.call_one().get(WAIT_S)
    assert [future.get(WAIT_S) for future in waiting] == list(range(600))


# --- explicit ports --------------------------------------------------------------------------------------------------


def test_an_explicit_port_answers_at_once_later_or_from_a_thread(procs):
    mailman = procs.spawn("mailman", Mailman)
    assert mailman.now.call("hi").get(WAIT_S).values() == ["hi", "hi"]
    assert mailman.from_thread.call("there").get(WAIT_S).values() == ["there", "there"]
    kept = mailman.keep.call()
    with pytest.raises(TimeoutError):
        kept.get(0.02)
    assert mailman.deliver.call("later").get(WAIT_S).values() == [1, 1]
    assert kept.get(WAIT_S).values() == [(0, "later"), (1, "later")]


def test_an_exception_sent_through_the_port_is_raised_as_it_is(procs, faults):
    mailman = procs.spawn("mailman", Mailman)
    with pytest.raises(KeyError, match="not mine"):
        mailman.refuse.call("not mine").get(WAIT_S)
    with pytest.raises(KeyError, match="not mine"):
        mailman.slice(gpus=0).refuse.call_one("not mine").get(WAIT_S)
    assert mailman.now.call(1).get(WAIT_S).values() == [1, 1]
    assert not faults.seen


def test_extra_sends_are_dropped_by_call_one_and_shared_by_stream(procs):
    mailman = procs.spawn("mailman", Mailman)
    assert mailman.slice(gpus=0).times.call_one(3).get(WAIT_S) == 0
    assert len([reply.get(WAIT_S) for reply in mailman.times.stream(3)]) == 2
    port, receiver = Channel[int].open()
    send(mailman.slice(gpus=0).times, (3,), {}, port)
    assert [receiver.recv().get(WAIT_S) for _ in range(3)] == [0, 1, 2]


def test_a_second_send_under_call_fails_the_actor(procs, faults):
    mailman = procs.spawn("mailman", Mailman)
    mailman.times.call(2)
    reports = [failure.report() for failure in faults.wait(2)]
    assert all("OncePortRef already used" in report for report in reports)
    with pytest.raises(SupervisionError, match="OncePortRef already used"):
        mailman.now.call().get(WAIT_S)


def test_an_exception_with_an_explicit_port_fails_the_actor(procs, faults):
    mailman = procs.spawn("mailman", Mailman).slice(gpus=0)
    text = r"mailman\.fail\(\) failed, The actor <root>\.<system\.actors\.Mailman mailman\{'gpus': 0/2\}>(.|\n)*oops"
    with pytest.raises(SupervisionError, match=text):
        mailman.fail.call_one("oops").get(WAIT_S)
    assert faults.wait(1)[0].crashed_ranks == [0]


def test_a_port_that_nobody_waits_for_drops_values_and_fails_the_actor_on_exceptions(procs, faults):
    mailman = procs.spawn("mailman", Mailman).slice(gpus=0)
    mailman.now.broadcast(1)
    mailman.keep.broadcast()
    assert mailman.deliver.call_one("nobody").get(WAIT_S) == 1
    mailman.refuse.broadcast("nobody hears")
    assert "nobody hears" in faults.wait(1)[0].report()


def test_who_waits_for_a_kept_port_hears_of_the_actors_end(procs, faults):
    mailman = procs.spawn("mailman", Mailman)
    kept, streamed = mailman.keep.call(), list(mailman.keep.stream())
    mailman.now.call().get(WAIT_S)
    mailman.stop().get(WAIT_S)
    for waiting in (kept, *streamed):
        with pytest.raises(SupervisionError, match=r"mailman\.keep\(\) failed, (.|\n)*stopped"):
            waiting.get(WAIT_S)
    mailman = procs.spawn("mailman", Mailman)[0]
    kept = mailman.keep.call_one()
    mailman.fail.broadcast("died meanwhile")
    with pytest.raises(SupervisionError, match=r"mailman\.keep\(\) failed, (.|\n)*died meanwhile"):
        kept.get(WAIT_S)
    assert faults.wait(1)[0].crashed_ranks == [0]


def test_cleanup_may_still_answer_after_a_stop(procs):
    class Polite(Mailman):
        def __cleanup__(self, exc):
            for port in self.kept:
                port.send("sorry, closing")

    polite = procs.spawn("polite", Polite)
    kept = polite.keep.call()
    polite.stop().get(WAIT_S)
    assert kept.get(WAIT_S).values() == ["sorry, closing"] * 2


def test_a_port_that_was_handed_on_is_answered_by_its_new_holder(procs, faults):
    class Clerk(Actor):
        def __init__(self, caller):
            self.caller = caller

        @endpoint(explicit_response_port=True)
        async def ask(self, port, value):
            self.caller.post.broadcast(port, value)

        @endpoint
        async def touch(self):
            pass

    caller = procs.spawn("caller", Caller)[1]
    clerk = procs.spawn("clerk", Clerk, caller)
    answers = clerk.ask.call("by another")
    clerk.touch.call().get(WAIT_S)
    clerk.stop().get(WAIT_S)
    assert answers.get(WAIT_S).values() == ["by another"] * 2


# --- plain methods ---------------------------------------------------------------------------------------------------


def test_as_endpoint_gives_a_plain_method_the_adverbs(procs):
    mesh = procs.spawn("echo", Echo)
    assert as_endpoint(mesh.plain).call(1).get(WAIT_S).values() == [("plain", 1)] * 2
    assert as_endpoint(mesh.slice(gpus=0).plain_async).call_one(1).get(WAIT_S) == ("plain_async", 1)
    assert as_endpoint(mesh.slice(gpus=0).with_port, explicit_response_port=True).call_one(1).get(WAIT_S) == ("with_port", 1)
    with pytest.raises(TypeError, match="missing a required argument: 'value'"):
        as_endpoint(mesh.plain).call()


def test_an_async_plain_method_of_a_sync_actor_is_a_type_error(procs, faults):
    mesh = procs.spawn("echo", SyncEcho).slice(gpus=0)
    assert as_endpoint(mesh.plain).call_one(1).get(WAIT_S) == ("plain", 1)
    with pytest.raises((TypeError, ActorError), match="plain_async is async, but"):
        as_endpoint(mesh.plain_async).call_one(1).get(WAIT_S)
    assert mesh.echo.call_one(1).get(WAIT_S) == 1
    assert not faults.seen


def test_only_plain_methods_become_endpoints(echo):
    for wrong in (echo.echo, Echo.plain, print, 5):
        with pytest.raises(ValueError, match="expected an method of a spawned actor"):
            as_endpoint(wrong)
    with pytest.raises(ValueError, match="expected an method of a spawned actor, but version is 7"):
        as_endpoint(echo.version)


def test_other_attributes_of_the_class_are_placeholders_that_say_what_to_do(echo):
    with pytest.raises(RuntimeError, match=r"Actor .*Echo.*\.plain is not annotated as an endpoint\n  next:  decorate it .* as_endpoint"):
        echo.plain(1)
    assert echo.version is not None
    text = r"actor mesh 'echo' has no endpoint 'ecko'; did you mean 'echo'\?\n  where: class system\.actors\.Echo\n  next:  its"
    with pytest.raises(AttributeError, match=text):
        echo.ecko


def test_a_wrong_form_of_a_call_says_the_right_one(echo):
    for name, adverb in (("call", "call"), ("callone", "call_one"), ("brodcast", "broadcast")):
        text = rf"^{adverb} belongs to an endpoint: write mesh.<endpoint>.{adverb}\(...\)\n  where: class"
        with pytest.raises(AttributeError, match=text):
            getattr(echo, name)
    text = r"an endpoint has no attribute 'callone'; did you mean 'call_one'\?\n  where: echo\.echo\n  next:  call it by call, call_one"
    with pytest.raises(AttributeError, match=text):
        echo.echo.callone(1)
    assert not hasattr(echo.echo, "value")
    plain = r"Echo\.echo is an endpoint: it is called through the mesh that spawn\(\) returned\n  next:  write mesh\.echo\.call"
    with pytest.raises(AttributeError, match=plain):
        Echo().echo.call(3)
    with pytest.raises(TypeError, match=plain):
        Echo().echo(3)
    assert not hasattr(Echo.echo, "shape")


def test_a_mesh_lists_its_endpoints(echo):
    assert {"echo", "rank", "slice", "extent"} <= set(dir(echo))


# --- sugar -----------------------------------------------------------------------------------------------------------


async def test_calling_an_endpoint_is_call_and_on_one_actor_call_one(procs, grid):
    mesh = await procs.spawn("echo", Echo)
    assert (await mesh.echo(3)).values() == [3, 3]
    assert await mesh[1].echo(value=4) == 4
    assert await mesh.slice(gpus=slice(0, 1)).rank() == 0


def test_indexing_a_mesh_gives_the_one_actor(grid):
    mesh = grid.spawn("echo", Echo)
    assert [mesh[rank].rank().get(WAIT_S) for rank in (0, 3, -1, -4)] == [0, 3, 3, 0]
    assert [mesh[place].rank().get(WAIT_S) for place in ((0, 1), (1, 0), (-1, -1))] == [1, 2, 3]
    assert mesh[2].sizes == {}
    assert mesh.slice(gpus=1)[1].rank().get(WAIT_S) == 3
    assert str(mesh[3].echo.call_one(current_rank()).get(WAIT_S)) == "{}"
    for wrong in (4, -5, (0,), (0, 2), (0, 1, 0)):
        with pytest.raises(IndexError):
            mesh[wrong]
    for wrong in ("gpus", 1.0, True, slice(0, 1)):
        with pytest.raises(TypeError):
            mesh[wrong]


async def test_meshes_are_awaitable(faults):
    procs = await this_host().spawn_procs(per_host={"gpus": 2})
    assert procs.sizes == {"gpus": 2}
    echo = await procs.spawn("echo", Echo)
    assert (await echo.rank()).values() == [0, 1]
    assert (await echo.slice(gpus=1)).sizes == {}

    class Broken(Actor):
        def __init__(self):
            raise ValueError("unborn")

        @endpoint
        async def touch(self):
            pass

    with pytest.raises(SupervisionError, match="unborn"):
        await procs.spawn("broken", Broken)
    assert all("unborn" in failure.report() for failure in faults.wait(2))
    await procs.stop()


# --- send and accumulators -------------------------------------------------------------------------------------------


def test_send_tags_each_reply_with_its_rank_and_without_port_is_a_broadcast(grid):
    log = grid.spawn("log", Log)
    port, receiver = Channel[int].open_ranked()
    send(log.add, (7,), {}, port)
    assert sorted(receiver.recv().get(WAIT_S) for _ in range(4)) == [(0, 7), (1, 7), (2, 7), (3, 7)]
    send(log.add, (), {"item": 8}, port, "choose")
    assert receiver.recv().get(WAIT_S)[1] == 8
    send(log.add, (9,), {})
    assert sorted(map(len, log.items.call().get(WAIT_S).values())) == [2, 2, 2, 3]


def test_send_refuses_other_selections(echo):
    with pytest.raises(ValueError, match="Invalid selection: 'some'; expected 'all' or 'choose'"):
        send(echo.echo, (), {}, None, "some")


def test_an_exception_arrives_at_the_port_of_send(echo):
    port, receiver = Channel[int].open()
    send(echo.slice(gpus=0).fail, ("x",), {}, port)
    with pytest.raises(ActorError, match="ValueError: x"):
        receiver.recv().get(WAIT_S)


@both_echoes
def test_an_accumulator_folds_the_replies_from_the_identity(grid, cls):
    mesh = grid.spawn("echo", cls)
    assert Accumulator(mesh.rank, 100, operator.add).accumulate().get(WAIT_S) == 106
    folded = Accumulator(mesh.echo, [], lambda so_far, reply: [*so_far, reply]).accumulate("x").get(WAIT_S)
    assert folded == ["x"] * 4
    with pytest.raises(ActorError, match="ValueError: no"):
        Accumulator(mesh.fail, 0, operator.add).accumulate().get(WAIT_S)


def test_an_accumulator_sends_at_once(procs):
    log = procs.spawn("log", Log)
    Accumulator(log.add, 0, operator.add).accumulate(5)
    assert log.items.call().get(WAIT_S).values() == [[5], [5]]


async def test_an_accumulator_can_be_awaited_and_travels_as_a_closure(procs, echo):
    assert await Accumulator(echo.rank, 0, operator.add).accumulate() == 1

    class Folder(Actor):
        @endpoint
        async def fold(self, echo, combine):
            return await Accumulator(echo.rank, 0, combine).accumulate()

    folder = procs.spawn("folder", Folder)
    assert (await folder.fold.call(echo, lambda a, b: a + 10 * b)).values() == [10, 10]


def test_an_error_of_combine_is_the_futures(echo):
    def combine(a, b):
        raise ZeroDivisionError("in combine")

    with pytest.raises(ZeroDivisionError, match="in combine"):
        Accumulator(echo.rank, 0, combine).accumulate().get(WAIT_S)


# --- the rest --------------------------------------------------------------------------------------------------------


def test_endpoints_are_inherited_and_overridden(procs):
    class Base(Actor):
        @endpoint
        async def kept(self):
            return "base"

        @endpoint
        async def replaced(self):
            return "base"

    class Derived(Base):
        @endpoint
        async def replaced(self, extra=1):
            return f"derived {extra} over {await Base.replaced._method(self)}"

    derived = procs.spawn("derived", Derived).slice(gpus=0)
    assert derived.kept.call_one().get(WAIT_S) == "base"
    assert derived.replaced.call_one(extra=2).get(WAIT_S) == "derived 2 over base"


def test_actors_of_one_name_are_independent(procs):
    one, other = procs.spawn("log", Log), procs.spawn("log", Log, "given")
    one.add.broadcast("only one")
    assert one.items.call().get(WAIT_S).values() == [["only one"]] * 2
    assert other.items.call().get(WAIT_S).values() == [["given"]] * 2
    assert one._name.get() != other._name.get()


def test_actors_live_on_when_every_reference_is_dropped(procs):
    port, receiver = Channel[int].open()

    class Ticker(Actor):
        @endpoint
        async def go(self, port):
            for number in range(3):
                await asyncio.sleep(0.01)
                port.send(number)

    procs.spawn("ticker", Ticker).slice(gpus=0).go.broadcast(port)
    gc.collect()
    assert [receiver.recv().get(WAIT_S) for _ in range(3)] == [0, 1, 2]


def test_this_proc_spawns_actors_in_the_clients_own_process():
    import os

    for cls in (Echo, SyncEcho):
        mesh = this_proc().spawn("local", cls)
        assert mesh.pid.call_one().get(WAIT_S) == os.getpid()
        data = [1, 2]
        answer = mesh.echo.call_one(data).get(WAIT_S)
        assert answer == data and answer is not data
        mesh.stop().get(WAIT_S)


def test_rref_says_what_it_needs(echo):
    with pytest.raises(NotImplementedError, match="rref needs the tensor engine"):
        echo.echo.rref(1)


def test_endpoints_show_themselves_and_do_not_travel(procs, echo):
    import pickle

    assert repr(echo.echo) == "Endpoint(echo.echo, extent={gpus: 2})"
    with pytest.raises(TypeError, match=r"an endpoint can't be pickled; send the mesh and use \.echo there"):
        pickle.dumps(echo.echo)
    with pytest.raises(TypeError, match=r"an endpoint can't be pickled"):
        echo.echo.call(echo.rank)
    assert repr(echo).startswith("ActorMesh(class=<class 'system.actors.Echo'>, shape={gpus=2}, inner=echo-")


async def test_a_client_with_a_loop_awaits_gathers_and_times_out(echo):
    values = await asyncio.gather(echo.rank.call(), echo.echo.call(1), echo[0].echo.call_one(2))
    assert [values[0].values(), values[1].values(), values[2]] == [[0, 1], [1, 1], 2]
    assert await asyncio.wait_for(echo[1].rank.call_one(), WAIT_S) == 1
    assert sorted([await reply for reply in echo.rank.stream()]) == [0, 1]
