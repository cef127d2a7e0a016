"""References: meshes, ports and values that travel as arguments and results, and things that can't."""

from __future__ import annotations

import asyncio
import pickle
import threading
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import pytest

from monarch.actor import (
    Actor,
    ActorError,
    Channel,
    Extent,
    Point,
    SupervisionError,
    ValueMesh,
    context,
    current_rank,
    endpoint,
    get_or_spawn_controller,
    this_host,
    this_proc,
)
from monarch.config import configured
from system.actors import Caller, Echo, Log, SyncCaller, SyncEcho

WAIT_S = 10.0

both_callers = pytest.mark.parametrize("cls", [Caller, SyncCaller], ids=lambda cls: cls.__name__)


@pytest.fixture(scope="module")
def procs():
    return this_host().spawn_procs(per_host={"gpus": 2})


@pytest.fixture(scope="module")
def others():
    return this_host().spawn_procs(per_host={"gpus": 3}, name="others")


@pytest.fixture(scope="module")
def echo(others):
    return others.spawn("echo", Echo)


@pytest.fixture(scope="module")
def callers(procs):
    return procs.spawn("caller", Caller)


# --- actor meshes ----------------------------------------------------------------------------------------------------


@both_callers
def test_an_actor_mesh_can_be_an_argument_of_init_and_of_endpoints_also_by_keyword(procs, echo, cls):
    caller = procs.spawn("caller", cls, echo)
    assert caller.call.call("rank").get(WAIT_S).values() == [[0, 1, 2]] * 2
    assert caller.call.call("rank", target=echo.slice(gpus=slice(1, 3))).get(WAIT_S).values() == [[1, 2]] * 2
    assert caller.choose.call("rank", target=echo[2]).get(WAIT_S).values() == [2, 2]


@both_callers
def test_a_slice_stays_a_slice_on_its_way_there_and_back(procs, echo, cls):
    caller = procs.spawn("caller", cls)[0]
    part = echo.slice(gpus=slice(1, None))
    assert caller.sizes_of.call_one(part).get(WAIT_S) == {"gpus": 2}
    back = caller.hold.call_one(part).get(WAIT_S)
    assert back.sizes == {"gpus": 2} and back.rank.call().get(WAIT_S).values() == [1, 2]
    again = caller.held.call_one().get(WAIT_S)[-1]
    assert again.sizes == {} and again.rank.call_one().get(WAIT_S) == 2


def test_the_renamed_and_flattened_travel_too(callers, others):
    grid = others.split(gpus=("rows", "cols"), rows=3).spawn("echo", Echo)
    assert grid.sizes == {"rows": 3, "cols": 1}
    flat = callers[0].hold.call_one(grid.flatten("all").rename(all="x")).get(WAIT_S)
    assert flat.sizes == {"x": 3} and flat.rank.call().get(WAIT_S).values() == [0, 1, 2]


def test_a_received_mesh_can_not_be_stopped_and_is_not_stopped_with_its_holder(procs, echo):
    holder = procs.spawn("holder", Caller, echo)[0]
    received = holder.held.call_one().get(WAIT_S)
    for mesh in (received, echo.slice(gpus=1), pickle.loads(pickle.dumps(echo))):
        with pytest.raises(NotImplementedError, match=r"Cannot call stop on an ActorMeshRef, requires an owned .*\n  where: mesh 'echo'"):
            mesh.stop()
    procs.spawn("holder", Caller, echo).stop().get(WAIT_S)
    assert echo.rank.call().get(WAIT_S).values() == [0, 1, 2]


def test_a_mesh_that_an_actor_made_is_usable_by_who_receives_it(procs, others):
    maker = procs.spawn("maker", Caller)[0]
    log = maker.spawn.call_one(others, "log", Log, "given").get(WAIT_S)
    assert log.items.call().get(WAIT_S).values() == [["given"]] * 3
    log.add.broadcast("more")
    assert log[1].items.call_one().get(WAIT_S) == ["given", "more"]
    with pytest.raises(NotImplementedError, match="requires an owned ActorMesh"):
        log.stop()


def test_a_mesh_still_being_created_can_be_sent_returned_and_called_by_others(callers):
    pending = this_host().spawn_procs(per_host={"gpus": 2})
    echo = pending.spawn("echo", Echo)
    assert callers.call.call("rank", target=echo).get(WAIT_S).values() == [[0, 1]] * 2
    pending.stop().get(WAIT_S)


@both_callers
def test_an_actor_returns_meshes_it_has_just_asked_for(procs, cls):
    maker = procs.spawn("maker", cls)

    class Spawner(Actor):
        @endpoint
        async def make(self):
            procs = this_host().spawn_procs(per_host={"gpus": 2})
            return procs, procs.spawn("echo", Echo), procs.spawn("log", Log).slice(gpus=1)

    made = procs.spawn("spawner", Spawner).make.call().get(WAIT_S)
    for nested, echo, log in made.values():
        assert echo.rank.call().get(WAIT_S).values() == [0, 1]
        assert log.add.call(1).get(WAIT_S).item() == 1
        assert nested.slice(gpus=1).spawn("echo", SyncEcho).rank.call().get(WAIT_S).item() == 0
        assert maker.call.call("rank", target=echo).get(WAIT_S).values() == [[0, 1]] * 2


def test_init_may_block_for_ever_and_has_sent_its_references_before(procs):
    port, receiver = Channel[Any].open()

    class Endless(Actor):
        def __init__(self, port, procs):
            self.echo = procs.spawn("echo", Echo)
            port.send(self.echo)
            threading.Event().wait()

        @endpoint
        def touch(self):
            pass

    with configured(stop_actor_timeout="50ms", cleanup_timeout="50ms"):
        own = this_host().spawn_procs(per_host={"gpus": 1})
        endless = own.spawn("endless", Endless, port, procs)
        echo = receiver.recv().get(WAIT_S)
        assert echo.rank.call().get(WAIT_S).values() == [0, 1]
        touch = endless.touch.call()
        endless.stop().get(WAIT_S)
        with pytest.raises(SupervisionError, match=r"endless\.touch\(\) failed, (.|\n)*stopped"):
            touch.get(WAIT_S)
        own.stop().get(WAIT_S)


@dataclass
class Team:
    """A value of the user's with meshes inside."""

    name: str
    members: dict[str, Any] = field(default_factory=dict)
    ports: list[Any] = field(default_factory=list)


def test_references_nested_in_containers_and_dataclasses_arrive_usable(procs, others, echo):
    class Captain(Actor):
        @endpoint
        async def meet(self, team):
            ranks = (await team.members["echo"].rank.call()).values()
            one = await team.members["one"].rank.call_one()
            new = team.members["procs"].spawn("log", Log)
            await new.add.call(team.name)
            team.ports[0].send((current_rank().rank, team.name))
            return {"ranks": ranks, "one": one, "team": Team("back", {"log": new, "values": team.members["values"]})}

    port, receiver = Channel[Any].open()
    values = echo.rank.call().get(WAIT_S)
    team = Team("red", {"echo": echo, "one": echo[1], "procs": others.slice(gpus=slice(0, 2)), "values": values}, [port])
    captain = procs.spawn("captain", Captain)
    for answer in captain.meet.call(team).get(WAIT_S).values():
        assert (answer["ranks"], answer["one"], answer["team"].name) == ([0, 1, 2], 1, "back")
        assert answer["team"].members["log"].items.call().get(WAIT_S).values() == [["red"], ["red"]]
        assert answer["team"].members["values"].values() == [0, 1, 2]
    assert sorted(receiver.recv().get(WAIT_S) for _ in range(2)) == [(0, "red"), (1, "red")]


def test_a_mesh_may_hold_a_reference_to_itself_and_its_ranks_call_each_other(others):
    class Ring(Actor):
        def __init__(self):
            self.calls = 0

        @endpoint
        async def join(self, ring):
            self.ring = ring
            rank = current_rank().rank
            if rank != 0:
                await self.ring.slice(gpus=0).count.call_one()
            return rank

        @endpoint
        async def count(self):
            self.calls += 1
            return self.calls

    ring = others.spawn("ring", Ring)
    ring.join.call(ring).get(WAIT_S)
    assert ring.slice(gpus=0).count.call_one().get(WAIT_S) == 3


@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
def test_ping_pong_between_two_meshes_ends_with_six_pongs_and_five_pings(procs, others, sync):
    class Player(Actor):
        def __init__(self, done):
            self.done = done
            self.count = 0

    class AsyncPlayer(Player):
        @endpoint
        async def join(self, other):
            self.other = other.slice(**current_rank())

        @endpoint
        async def hit(self, left):
            self.count += 1
            if left:
                self.other.hit.call(left - 1)
            else:
                self.done.send("done")

        @endpoint
        async def hits(self):
            return self.count

    class SyncPlayer(Player):
        @endpoint
        def join(self, other):
            self.other = other.slice(**current_rank())

        @endpoint
        def hit(self, left):
            self.count += 1
            if left:
                self.other.hit.call(left - 1)
            else:
                self.done.send("done")

        @endpoint
        def hits(self):
            return self.count

    cls = SyncPlayer if sync else AsyncPlayer
    port, receiver = Channel[str].open()
    ping, pong = procs.spawn("ping", cls, port), others.slice(gpus=slice(0, 2)).spawn("pong", cls, port)
    ping.join.call(pong).get(WAIT_S)
    pong.join.call(ping).get(WAIT_S)
    pong.hit.broadcast(10)
    for _ in range(2):
        receiver.recv().get(WAIT_S)
    assert (pong.hits.call().get(WAIT_S).values(), ping.hits.call().get(WAIT_S).values()) == ([6, 6], [5, 5])


def test_rank_zero_collects_what_the_others_send_from_tasks_through_one_channel(others):
    class Fan(Actor):
        @endpoint
        async def open(self):
            port, self.receiver = Channel[Any].open()
            return port

        @endpoint
        async def feed(self, port):
            rank = current_rank().rank

            async def push():
                for number in range(3):
                    port.send((rank, number))
                    await asyncio.sleep(0)

            self.task = asyncio.create_task(push())

        @endpoint
        async def collect(self, count):
            return [await self.receiver.recv() for _ in range(count)]

    fan = others.spawn("fan", Fan)
    port = fan[0].open.call_one().get(WAIT_S)
    fan.slice(gpus=slice(1, None)).feed.call(port).get(WAIT_S)
    collected = fan[0].collect.call_one(6).get(WAIT_S)
    assert sorted(collected) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    for rank in (0, 1):
        assert [number for who, number in collected if who == rank] == [0, 1, 2]


# --- host and proc meshes --------------------------------------------------------------------------------------------


@both_callers
def test_proc_meshes_and_their_slices_can_be_spawned_on_by_who_receives_them(procs, others, cls):
    maker = procs.spawn("maker", cls)[0]
    echo = maker.spawn.call_one(others, "echo", SyncEcho).get(WAIT_S)
    assert echo.rank.call().get(WAIT_S).values() == [0, 1, 2]
    part = maker.spawn.call_one(others.slice(gpus=slice(1, None)), "echo", Echo).get(WAIT_S)
    assert part.rank.call().get(WAIT_S).values() == [0, 1]
    assert part.pid.call().get(WAIT_S).values() == echo.pid.call().get(WAIT_S).values()[1:]
    one = maker.spawn.call_one(others.slice(gpus=2), "echo", Echo).get(WAIT_S)
    assert one.pid.call_one().get(WAIT_S) == echo.pid.call().get(WAIT_S).values()[2]


def test_a_received_proc_mesh_can_not_be_stopped(callers, others):
    for mesh in (callers[0].hold.call_one(others).get(WAIT_S), others.slice(gpus=1), pickle.loads(pickle.dumps(others))):
        with pytest.raises(ValueError, match=r"ProcMesh is not owned; must be stopped by an owner\n  where: mesh 'others'"):
            mesh.stop()
    assert len(others.spawn("echo", Echo).rank.call().get(WAIT_S)) == 3


def test_who_spawns_procs_from_a_received_host_owns_them(procs, callers):
    class Owner(Actor):
        @endpoint
        async def spawn(self, host):
            self.procs = host.spawn_procs(per_host={"gpus": 2})
            return await self.procs.spawn("echo", Echo)

        @endpoint
        async def close(self):
            await self.procs.stop()

    owner = procs.spawn("owner", Owner)[0]
    echo = owner.spawn.call_one(this_host()).get(WAIT_S)
    assert echo.rank.call().get(WAIT_S).values() == [0, 1]
    owner.close.call_one().get(WAIT_S)
    assert callers[0].hold.call_one(this_host()).get(WAIT_S) == this_host()


def test_the_client_is_called_by_its_actors_through_this_proc(callers):
    local = this_proc().spawn("log", Log)
    assert callers.call.call("add", "from a worker", target=local).get(WAIT_S).values() == [["from a worker"]] * 2
    assert local.items.call_one().get(WAIT_S) == ["from a worker"] * 2
    local.stop().get(WAIT_S)


def test_a_worker_spawns_in_the_clients_process_through_its_proc(procs):
    import os

    class Guest(Actor):
        @endpoint
        async def spawn(self, client):
            return await client.spawn("echo", Echo)

    echo = procs.spawn("guest", Guest)[0].spawn.call_one(this_proc()).get(WAIT_S)
    assert echo.pid.call_one().get(WAIT_S) == os.getpid()


# --- ports -----------------------------------------------------------------------------------------------------------


@both_callers
def test_a_port_brings_a_hundred_messages_in_order(procs, cls):
    port, receiver = Channel[int].open()
    caller = procs.spawn("caller", cls)[0]
    caller.post.call_one(port, *range(100)).get(WAIT_S)
    assert [receiver.recv().get(WAIT_S) for _ in range(100)] == list(range(100))


@both_callers
def test_a_port_that_one_actor_returns_serves_another_and_makes_no_client_there(procs, others, cls):
    class Probe(Actor):
        @endpoint
        async def use(self, port):
            from monarch.actor.client import ClientProcess
            from monarch.actor.process import known_process

            port.send("through a third")
            return isinstance(known_process(), ClientProcess)

    opener = procs.spawn("opener", cls)[0]
    port = opener.open_channel.call_one().get(WAIT_S)
    assert others.spawn("probe", Probe).use.call(port).get(WAIT_S).values() == [False] * 3
    port.send("from the client")
    assert sorted(opener.receive.call_one(4).get(WAIT_S)) == ["from the client"] + ["through a third"] * 3


def test_a_once_port_takes_one_message_and_sends_to_a_dropped_receiver_are_silent(callers):
    port, receiver = Channel[int].open(once=True)
    port.send(1)
    with pytest.raises(RuntimeError, match=r"OncePortRef already used: this port takes one message; use a port of Channel.open\(\)"):
        port.send(2)
    assert receiver.recv().get(WAIT_S) == 1
    port, receiver = Channel[int].open()
    del receiver
    port.send(3)
    callers[0].post.call_one(port, 4).get(WAIT_S)


def test_an_exception_sent_to_a_port_is_raised_as_it_is_and_the_next_message_is_there(callers):
    port, receiver = Channel[int].open()
    port.exception(KeyError("k"))
    port.send(1)
    with pytest.raises(KeyError, match="k"):
        receiver.recv().get(WAIT_S)
    assert receiver.recv().get(WAIT_S) == 1


def test_each_recv_claims_the_next_message_in_the_order_of_the_claims(callers):
    port, receiver = Channel[int].open()
    claims = [receiver.recv() for _ in range(3)]
    callers[0].post.call_one(port, "a", "b", "c").get(WAIT_S)
    assert [claim.get(WAIT_S) for claim in reversed(claims)] == ["c", "b", "a"]


def test_a_message_without_rank_is_an_error_of_the_ranked_receiver():
    port, receiver = Channel[int].open_ranked(once=True)
    port.send(1)
    with pytest.raises(ValueError, match="the message carries no rank; it was sent by a port that belongs to no call"):
        receiver.recv().get(WAIT_S)
    port, receiver = Channel[int].open()
    port.send(2)
    port.send(3)
    assert receiver.recv().get(WAIT_S) == 2
    with pytest.raises(ValueError, match="carries no rank"):
        receiver.ranked().recv().get(WAIT_S)


def test_a_port_is_used_from_threads_of_an_actor(procs):
    class Threaded(Actor):
        @endpoint
        def post(self, port):
            threads = [threading.Thread(target=port.send, args=(number,)) for number in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    port, receiver = Channel[int].open()
    procs.spawn("threaded", Threaded)[1].post.call_one(port).get(WAIT_S)
    assert sorted(receiver.recv().get(WAIT_S) for _ in range(8)) == list(range(8))


# --- values ----------------------------------------------------------------------------------------------------------


def test_points_extents_value_meshes_and_classes_travel(procs, callers, echo):
    hold = callers[0].hold
    values = echo.rank.call().get(WAIT_S)
    point, extent = Point(1, Extent(["x", "y"], [2, 3])), Extent(["x"], [4])
    sent = [point, extent, Echo, echo.extent]
    back = hold.call_one([*sent, values]).get(WAIT_S)
    assert back[:4] == sent
    assert isinstance(back[4], ValueMesh) and back[4].values() == [0, 1, 2] and back[4].sizes == {"gpus": 3}
    assert callers[0].spawn.call_one(procs, "log", Log, 5).get(WAIT_S)[0].items.call_one().get(WAIT_S) == [5]


def test_items_of_a_value_mesh_computed_in_an_actor_equal_the_clients(procs, echo):
    class Lister(Actor):
        @endpoint
        async def list_ranks(self, echo):
            return list(await echo.rank.call())

    remote = procs.spawn("lister", Lister)[0].list_ranks.call_one(echo).get(WAIT_S)
    assert remote == list(echo.rank.call().get(WAIT_S))


def test_a_value_mesh_of_pending_meshes_arrives(procs):
    class Spawner(Actor):
        @endpoint
        async def make(self, procs):
            return procs.spawn("echo", Echo)

    class Collector(Actor):
        @endpoint
        async def collect(self, values):
            return [(await mesh.rank.call()).values() for mesh in values.values()]

    made = procs.spawn("spawner", Spawner).make.call(procs).get(WAIT_S)
    assert procs.spawn("collector", Collector)[0].collect.call_one(made).get(WAIT_S) == [[0, 1], [0, 1]]


def test_equal_replies_are_distinct_objects(echo):
    values = echo.echo.call([1]).get(WAIT_S)
    values.get(0).append(2)
    assert values.values() == [[1, 2], [1], [1]]
    assert values.get(0) is values.get(0)


def test_a_value_that_can_not_be_loaded_fails_where_it_is_read(procs):
    class Odd(Actor):
        @endpoint
        async def give(self):
            import os

            home = os.getpid()

            def load():
                if os.getpid() != home:
                    raise ImportError("only there")
                return None

            class Value:
                def __reduce__(self):
                    return load, ()

            return Value() if context().actor_instance.rank.rank else "fine"

    odd = procs.spawn("odd", Odd)
    values = odd.give.call().get(WAIT_S)
    assert values.get(0) == "fine"
    with pytest.raises(ImportError, match="only there"):
        values.get(1)
    with pytest.raises(ImportError, match="only there"):
        odd[1].give.call_one().get(WAIT_S)


def test_functions_lambdas_and_local_classes_travel_by_value(callers):
    base = 10

    class Local:
        def __init__(self, value):
            self.value = value

        def __eq__(self, other):
            return type(self) is type(other) and self.value == other.value

    hold = callers[0].hold
    assert hold.call_one(lambda value: base + value).get(WAIT_S)(5) == 15
    assert hold.call_one(Local(3)).get(WAIT_S) == Local(3)


def test_a_controller_can_be_reached_through_the_function_as_an_argument(callers):
    made = get_or_spawn_controller("by-reference", Log).get(WAIT_S)

    class Asker(Actor):
        @endpoint
        async def ask(self, get, cls):
            await (await get("by-reference", cls)).add.call_one("asked")

    this_proc().spawn("asker", Asker).ask.call_one(get_or_spawn_controller, Log).get(WAIT_S)
    assert made.items.call_one().get(WAIT_S) == ["asked"]


# --- plain pickle ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [pickle, cloudpickle], ids=lambda module: module.__name__)
def test_meshes_and_ports_survive_plain_pickling(procs, echo, module):
    def copy(value):
        return module.loads(module.dumps(value))

    assert copy(echo).rank.call().get(WAIT_S).values() == [0, 1, 2]
    assert copy(echo.slice(gpus=slice(1, 3))).rank.call().get(WAIT_S).values() == [1, 2]
    assert copy(procs) == procs and copy(procs.slice(gpus=1)) == procs.slice(gpus=1)
    assert copy(procs.slice(gpus=1)).spawn("echo", Echo).rank.call_one().get(WAIT_S) == 0
    assert copy(this_host()) == this_host()
    assert copy(this_proc()) == this_proc()
    assert copy(this_host()).spawn_procs is not None
    port, receiver = Channel[int].open()
    copy(port).send(1)
    assert receiver.recv().get(WAIT_S) == 1
    values = copy(echo.rank.call().get(WAIT_S))
    assert values.values() == [0, 1, 2]


def test_pending_meshes_can_be_pickled_off_the_main_thread():
    import queue

    answers = queue.Queue()
    procs = this_host().spawn_procs(per_host={"gpus": 2})
    echo = procs.spawn("echo", Echo)
    thread = threading.Thread(target=lambda: answers.put(pickle.dumps((procs, procs.slice(gpus=1), echo))))
    thread.start()
    thread.join()
    _, part, again = pickle.loads(answers.get())
    assert again.rank.call().get(WAIT_S).values() == [0, 1]
    assert part.sizes == {}
    procs.stop().get(WAIT_S)


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda echo: echo.rank.call(), "a Future can't be pickled(.|\n)*send the value"),
        (lambda echo: echo.rank, "an endpoint can't be pickled; send the mesh and use .rank there"),
        (lambda echo: Channel.open()[1], "a PortReceiver can't be pickled(.|\n)*send the Port"),
        (lambda echo: Channel.open_ranked()[1], "a RankedPortReceiver can't be pickled(.|\n)*send the Port"),
        (lambda echo: context(), "a Context can't be pickled; send what you need of it"),
        (lambda echo: context().actor_instance, "an Instance can't be pickled; send actor_id, or a mesh"),
    ],
    ids=["Future", "Endpoint", "PortReceiver", "RankedPortReceiver", "Context", "Instance"],
)
def test_what_belongs_to_a_process_is_a_type_error_with_advice(callers, echo, make, advice):
    value = make(echo)
    for attempt in (lambda: pickle.dumps(value), lambda: callers.hold.call(value), lambda: callers.hold.broadcast([value])):
        with pytest.raises(TypeError, match=advice):
            attempt()


def test_a_result_that_belongs_to_its_process_is_an_actor_error_with_the_same_advice(procs):
    class Leaky(Actor):
        @endpoint
        async def context(self):
            return context()

        @endpoint
        async def future(self, echo):
            return echo.rank.call()

    leaky = procs.spawn("leaky", Leaky)[0]
    with pytest.raises(ActorError, match="a Context can't be pickled"):
        leaky.context.call_one().get(WAIT_S)
    with pytest.raises(ActorError, match="a Future can't be pickled"):
        leaky.future.call_one(procs.spawn("echo", Echo)).get(WAIT_S)


def test_actor_ids_are_values(procs):
    class Ids(Actor):
        @endpoint
        async def own(self):
            instance = context().actor_instance
            return instance.actor_id, instance.proc_id, instance.creator

    ids = procs.spawn("My Actor!", Ids)
    (one, proc, creator), (other, *_) = ids.own.call().get(WAIT_S).values()
    assert one != other and one.label == other.label == "myactor"
    assert type(one).from_string(str(one)) == one and hash(type(one).from_string(str(one))) == hash(one)
    assert proc == one.proc_id or proc in str(one)
    assert creator.name == "root"


def test_classes_and_functions_of_main_travel(run_script):
    run_script(
        """
        import enum, dataclasses
        from monarch.actor import Actor, endpoint, this_host, context

        FACTOR = 3

        class Colour(enum.Enum):
            RED = 1

        @dataclasses.dataclass
        class Item:
            value: int
            colour: Colour = Colour.RED

        class Odd(Exception):
            def __init__(self, *, code):
                super().__init__(f"code {code}")
                self.code = code

        def scale(item):
            return Item(item.value * FACTOR, item.colour)

        class Base(Actor):
            @endpoint
            async def own(self):
                return type(self).__name__, type(self).__module__

        class Worker(Base):
            def __init__(self, start: Item):
                self.item = start

            @endpoint
            async def scale(self, item, function=scale):
                self.item = function(item)
                return self.item

            @endpoint
            async def fail(self):
                raise Odd(code=4)

        if __name__ == "__main__":
            worker = this_host().spawn_procs(per_host={"gpus": 2}).spawn("worker", Worker, Item(1))
            scaled = worker.scale.call(Item(2)).get(10).values()
            assert scaled == [Item(6), Item(6)] and scaled[0].colour is Colour.RED, scaled
            assert worker.scale.call(Item(2), lambda item: item.value).get(10).values() == [2, 2]
            assert worker.own.call().get(10).values() == [("Worker", "__main__")] * 2
            try:
                worker.fail.call().get(10)
            except Exception as error:
                assert type(error.exception) is Odd and error.exception.code == 4, error
            else:
                raise SystemExit("no error")
            assert "__main__.Worker worker" in repr(worker) or "__main__.Worker" in repr(worker)
            print("fine")
        """
    ).check()
