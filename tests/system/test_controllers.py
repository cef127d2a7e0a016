"""Controllers: one actor per name for the whole job, each in a process of its own."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading

import pytest

from monarch.actor import Actor, ActorError, context, endpoint, get_or_spawn_controller, this_host, this_proc
from system.actors import Echo, Log
from system.waiting import error_of, wait_until

pytest_plugins = ["system.recorder"]
pytestmark = pytest.mark.usefixtures("faults")

WAIT_S = 10.0


@pytest.fixture(scope="module")
def procs():
    return this_host().spawn_procs(per_host={"gpus": 2})


class Registry(Actor):
    """Counts how often it was made; found by name from anywhere."""

    made = 0

    def __init__(self, first=0, *, tag="untagged"):
        type(self).made += 1
        self.value = first
        self.tag = tag

    @endpoint
    async def add(self, number=1):
        self.value += number
        return self.value

    @endpoint
    async def about(self):
        instance = context().actor_instance
        return {"pid": os.getpid(), "made": type(self).made, "tag": self.tag, "proc": this_proc(), "mesh": instance.proc_mesh}

    @endpoint
    async def spawn(self):
        self.procs = this_host().spawn_procs({"gpus": 2})
        return await self.procs.spawn("echo", Echo)

    @endpoint
    async def leave(self, way):
        if way == "exit":
            os._exit(1)
        context().actor_instance.abort("left")


def make_finder():
    """A class by value: procs can't import this file without pytest."""

    class Finder(Actor):
        @endpoint
        async def find(self, name, cls, *args, **kwargs):
            return await get_or_spawn_controller(name, cls, *args, **kwargs)

        @endpoint
        async def add(self, name, cls, number):
            controller = await get_or_spawn_controller(name, cls)
            return await controller.add.call_one(number)

    return Finder


def make_registry():
    class Made(Registry):
        pass

    return Made


def test_the_first_caller_makes_it_and_everybody_gets_the_same_one(procs):
    cls = make_registry()
    first = get_or_spawn_controller("shared", cls, 5, tag="first").get(WAIT_S)
    second = get_or_spawn_controller("shared", Log, "ignored").get(WAIT_S)
    assert first is not second and first.sizes == {} and second.sizes == {}
    assert first.add.call_one().get(WAIT_S) == 6
    assert second.add.call_one().get(WAIT_S) == 7
    added = procs.spawn("finder", make_finder()).add.call("shared", cls, 10).get(WAIT_S).values()
    assert sorted(added) == [17, 27]
    about = second.about.call_one().get(WAIT_S)
    assert about["tag"] == "first"
    assert about["pid"] not in {os.getpid(), *procs.spawn("echo", Echo).pid.call().get(WAIT_S).values()}
    assert about["proc"] == about["mesh"] != this_proc()


def test_one_that_belongs_to_the_client_shares_its_process():
    class Inside(Registry):
        _lives_in_client = True

    about = get_or_spawn_controller("inside", Inside).get(WAIT_S).about.call_one().get(WAIT_S)
    assert about["pid"] == os.getpid() and about["proc"] == this_proc()


def test_one_that_an_actor_asked_for_first_is_everybodys_too(procs):
    finder = procs.spawn("finder", make_finder())[1]
    found = finder.find.call_one("from-actor", make_registry(), first=1, tag="k").get(WAIT_S)
    assert found.add.call_one(2).get(WAIT_S) == 3
    about = get_or_spawn_controller("from-actor", Registry).get(WAIT_S).about.call_one().get(WAIT_S)
    assert about["tag"] == "k"


def test_actors_of_nested_and_unpickled_procs_find_it(procs):
    class Nested(Actor):
        @endpoint
        async def add(self, finder, cls):
            self.procs = this_host().spawn_procs()
            return await self.procs.spawn("finder", finder).add.call_one("nested", cls, 1)

    cls = make_registry()
    get_or_spawn_controller("nested", cls).get(WAIT_S)
    assert sorted(procs.spawn("nested", Nested).add.call(make_finder(), cls).get(WAIT_S).values()) == [1, 2]
    copy = pickle.loads(pickle.dumps(procs))
    assert copy.spawn("finder", make_finder())[0].add.call_one("nested", cls, 1).get(WAIT_S) == 3


async def test_concurrent_callers_reach_one_instance_that_was_made_once(procs):
    cls = make_registry()
    found = await asyncio.gather(*(get_or_spawn_controller("concurrent", cls) for _ in range(8)))
    assert sorted(await asyncio.gather(*(controller.add.call_one() for controller in found))) == list(range(1, 9))
    finders = procs.spawn("finder", make_finder())
    await asyncio.gather(*(finders.find.call("concurrent-from-actors", cls) for _ in range(4)))
    results = []

    def find():
        results.append(get_or_spawn_controller("concurrent-from-threads", cls).get(WAIT_S).add.call_one().get(WAIT_S))

    threads = [threading.Thread(target=find) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == list(range(1, 9))


def test_a_controller_may_spawn_processes_of_its_own(procs):
    controller = get_or_spawn_controller("spawner", make_registry()).get(WAIT_S)
    echo = controller.spawn.call_one().get(WAIT_S)
    pids = echo.pid.call().get(WAIT_S).values()
    assert len({*pids, os.getpid()}) == 3
    assert procs.spawn("echo", Echo).rank.call().get(WAIT_S).values() == [0, 1]


@pytest.mark.parametrize("way", ["abort", "exit"])
def test_one_dead_controller_does_not_poison_the_registry(procs, way, caplog):
    cls = make_registry()
    mortal = get_or_spawn_controller(f"mortal-{way}", cls).get(WAIT_S)
    other = get_or_spawn_controller(f"other-{way}", cls).get(WAIT_S)
    assert other.add.call_one().get(WAIT_S) == 1
    pid = mortal.about.call_one().get(WAIT_S)["pid"]
    said = "explicitly aborted due to: left" if way == "abort" else "exited with status 1"
    mortal.leave.call_one(way).exception(WAIT_S)  # an abort may come before or after the reply
    assert f"mortal-{way}.add() failed" in str(error_of(mortal.add.call_one()))
    # The table hears of the failure by its own message, maybe after the caller's error.
    wait_until(lambda: f"a controller failed; who asks for it next makes a new one: name=mortal-{way}" in caplog.text)
    assert said in caplog.text
    assert get_or_spawn_controller(f"new-{way}", cls).get(WAIT_S).add.call_one().get(WAIT_S) == 1
    assert get_or_spawn_controller(f"other-{way}", cls).get(WAIT_S).add.call_one().get(WAIT_S) == 2
    again = get_or_spawn_controller(f"mortal-{way}", cls).get(WAIT_S)
    assert again.add.call_one().get(WAIT_S) == 1
    assert again.about.call_one().get(WAIT_S)["pid"] != pid
    assert f"mortal-{way}.add() failed" in str(error_of(mortal.add.call_one()))


def test_a_controller_that_can_not_be_made_is_an_error_for_who_asks(procs):
    class NoActor:
        pass

    for _ in range(2):
        with pytest.raises(ActorError, match="must subclass"):
            get_or_spawn_controller("wrong", NoActor).get(WAIT_S)
    with pytest.raises(ActorError, match="got an unexpected keyword argument 'surplus'"):
        get_or_spawn_controller("wrong", make_registry(), surplus=1).get(WAIT_S)
    assert get_or_spawn_controller("wrong", make_registry()).get(WAIT_S).add.call_one().get(WAIT_S) == 1


def test_a_new_client_has_new_controllers(run_script):
    run_script(
        """
        from monarch.actor import Actor, endpoint, get_or_spawn_controller, shutdown_context, this_host

        class Counter(Actor):
            def __init__(self):
                self.count = 0

            @endpoint
            def add(self):
                self.count += 1
                return self.count

        class User(Actor):
            @endpoint
            def add(self):
                return get_or_spawn_controller("c", Counter).get(10).add.call_one().get(10)

        for _ in range(2):
            assert get_or_spawn_controller("c", Counter).get(10).add.call_one().get(10) == 1
            user = this_host().spawn_procs({"gpus": 2}).spawn("user", User)
            assert sorted(user.add.call().get(10).values()) == [2, 3]
            shutdown_context().get(10)
        """
    ).check()
