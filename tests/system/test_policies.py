"""Supervision policies with real processes: who comes back, what the same handles then reach, and what is told when nobody does."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from monarch.actor import (
    Actor,
    AllForOne,
    Escalate,
    Ignore,
    OneForOne,
    RestForOne,
    SupervisionError,
    SupervisionGroup,
    endpoint,
    this_host,
    this_proc,
)
from monarch.config import configured
from system.script import run_script, start_script
from system.waiting import error_of, is_gone, wait_until

if TYPE_CHECKING:
    from system.recorder import Recorder

pytest_plugins = ["system.recorder"]
pytestmark = pytest.mark.usefixtures("faults")
WAIT_S = 15.0
FAST = {"max_restarts": 20, "within_s": 60, "backoff_s": 0.0}
booted: list[int] = []


class Sync(Actor):
    def __init__(self, start: int = 0) -> None:
        self.count = start
        self.restored: tuple[int, int] | None = None
        self.set_up = len(booted)

    def __restore__(self, rank: int, attempt: int) -> None:
        self.restored = (rank, attempt)

    @endpoint
    def about(self) -> tuple[int, int, tuple[int, int] | None]:
        return os.getpid(), self.count, self.restored

    @endpoint
    def add(self) -> int:
        self.count += 1
        return self.count

    @endpoint
    def booted(self) -> int:
        return self.set_up

    @endpoint
    def die(self, way: str) -> None:
        die(way)

    @endpoint
    def wait(self, seconds: float) -> None:
        time.sleep(seconds)


class Async(Actor):
    def __init__(self, start: int = 0) -> None:
        self.count = start
        self.restored: tuple[int, int] | None = None

    async def __restore__(self, rank: int, attempt: int) -> None:
        self.restored = (rank, attempt)

    @endpoint
    async def about(self) -> tuple[int, int, tuple[int, int] | None]:
        return os.getpid(), self.count, self.restored

    @endpoint
    async def add(self) -> int:
        self.count += 1
        return self.count

    @endpoint
    async def die(self, way: str) -> None:
        die(way)

    @endpoint
    async def wait(self, seconds: float) -> None:
        import asyncio

        await asyncio.sleep(seconds)


class Caller(Actor):
    """Holds a reference to somebody else's mesh."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh

    @endpoint
    def about(self) -> list[Any]:
        return list(self.mesh.about.call().get(WAIT_S).values())

    @endpoint
    def wait(self) -> str:
        return str(error_of(self.mesh.slice(gpus=1).wait.call(60.0)))


shared: list[Any] = []


class Thief(Actor):
    """In the process of the test: spawns in a group that is not its own."""

    @endpoint
    def steal(self) -> str:
        procs, group = shared
        try:
            procs.supervised(group).spawn("theirs", Sync)
        except ValueError as error:
            return str(error)
        return ""


class Stubborn(Sync):
    """Its endpoint does not end, and neither does the actor."""

    @endpoint
    def stay(self) -> None:
        threading.Event().wait()


def die(way: str) -> None:
    match way:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(3)
        case "sys.exit":
            raise SystemExit(3)
        case _:
            raise ValueError("bad-cfg-17")


def boot() -> None:
    booted.append(1)


def pids_of(mesh: Any) -> list[int]:
    return [about[0] for about in mesh.about.call().get(WAIT_S).values()]


def restored_of(mesh: Any) -> list[Any]:
    return [about[2] for about in mesh.about.call().get(WAIT_S).values()]


def answer_of(endpoint: Any) -> Any:
    """What the one actor answers, called again as long as it is restarting: its death may not be known here yet."""
    while True:
        try:
            return endpoint.call_one().get(WAIT_S)
        except SupervisionError as error:
            assert error.restarting


def is_restored(mesh: Any, expected: list[Any]) -> bool:
    """Whether `__restore__` was called like that. Calls that a restart of others has taken along are made again."""
    future = mesh.about.call()
    error = future.exception(WAIT_S)
    assert error is None or "restarting" in str(error)
    return error is None and [about[2] for about in future.get().values()] == expected


@pytest.fixture
def procs() -> Any:
    mesh = this_host().spawn_procs({"gpus": 3}, bootstrap=boot)
    yield mesh
    mesh.stop().get(WAIT_S)


both_kinds = pytest.mark.parametrize("kind", [Sync, Async])


@both_kinds
@pytest.mark.parametrize("way", ["kill", "exit", "sys.exit", "raise"])
def test_one_for_one_brings_back_the_rank_that_failed(procs: Any, faults: Recorder, kind: type[Sync], way: str) -> None:
    mesh = procs.supervised(OneForOne(**FAST)).spawn("crew", kind, 7)
    caller = this_proc().spawn("caller", Caller, mesh)
    one = mesh.slice(gpus=1)
    before = pids_of(mesh)
    assert mesh.add.call().get(WAIT_S).values() == [8, 8, 8]
    if way == "raise":
        one.die.broadcast(way)
    else:
        error = error_of(one.die.call_one(way))
        assert isinstance(error, SupervisionError) and error.restarting
        assert "restarting" in str(error) and "call again" in str(error) and "rank 1" in str(error)
    wait_until(lambda: is_restored(mesh, [None, (1, 1), None]))
    for abouts in (mesh.about.call().get(WAIT_S).values(), caller.about.call_one().get(WAIT_S)):
        assert [about[1] for about in abouts] == [8, 7, 8], "the same arguments; state is the user's"
        assert [about[2] for about in abouts] == [None, (1, 1), None]
        pids = [about[0] for about in abouts]
        assert (pids[0], pids[2]) == (before[0], before[2])
        assert (pids[1] != before[1]) == (way in ("kill", "exit"))
    assert mesh.slice(gpus=slice(1, 3)).add.call().get(WAIT_S).values() == [8, 9]
    assert faults.seen == []


def test_the_bootstrap_runs_on_a_new_proc_before_its_actors(procs: Any) -> None:
    mesh = procs.supervised(OneForOne(**FAST)).spawn("crew", Sync)
    assert mesh.booted.call().get(WAIT_S).values() == [1, 1, 1]
    error_of(mesh.slice(gpus=2).die.call_one("kill"))
    assert mesh.booted.call().get(WAIT_S).values() == [1, 1, 1]
    assert restored_of(mesh) == [None, None, (2, 1)]


@both_kinds
def test_calls_under_way_are_lost_and_calls_made_meanwhile_wait(procs: Any, faults: Recorder, kind: type[Sync]) -> None:
    mesh = procs.supervised(OneForOne(max_restarts=5, within_s=60, backoff_s=0.3)).spawn("crew", kind)
    caller = this_proc().spawn("caller", Caller, mesh)
    one = mesh.slice(gpus=1)
    pid = pids_of(mesh)[1]
    running, queued, elsewhere = one.wait.call_one(60.0), one.add.call_one(), caller.wait.call_one()
    wait_until(lambda: procs.slice(gpus=1).activity().get(WAIT_S)[0].waiting >= 2)
    os.kill(pid, signal.SIGKILL)
    for future in (running, queued):
        assert "restarting" in str(error_of(future))
    assert "restarting" in elsewhere.get(WAIT_S)
    for _ in range(3):
        one.add.broadcast()
    assert one.add.call_one().get(WAIT_S) == 4
    assert faults.seen == []


@pytest.mark.parametrize("way", ["kill", "sys.exit"])
@pytest.mark.parametrize("replace", ["actor", "proc"])
def test_a_call_that_follows_the_error_reaches_only_those_that_were_restarted(procs: Any, faults: Recorder, way: str, replace: Any) -> None:
    mesh = procs.supervised(AllForOne(replace=replace, **FAST)).spawn("crew", Sync, 10)
    for attempt in range(1, 4):
        assert mesh.add.call().get(WAIT_S).values() == [11, 11, 11]
        assert "restarting" in str(error_of(mesh.slice(gpus=1).die.call_one(way)))
        assert restored_of(mesh) == [(rank, attempt) for rank in range(3)]
    assert faults.seen == []


@pytest.mark.parametrize("way", ["kill", "raise"])
@pytest.mark.parametrize("replace", ["actor", "proc"])
def test_all_for_one_restarts_everybody(procs: Any, faults: Recorder, way: str, replace: Any) -> None:
    mesh = procs.supervised(AllForOne(replace=replace, **FAST)).spawn("crew", Sync)
    before = pids_of(mesh)
    mesh.slice(gpus=1).die.broadcast(way)
    wait_until(lambda: is_restored(mesh, [(0, 1), (1, 1), (2, 1)]))
    changed = [a != b for a, b in zip(before, pids_of(mesh), strict=True)]
    assert changed == [replace == "proc", replace == "proc" or way == "kill", replace == "proc"]
    assert faults.seen == []


def test_an_actor_that_does_not_end_loses_its_process_in_a_restart(procs: Any, faults: Recorder) -> None:
    with configured(stop_actor_timeout="200ms", cleanup_timeout="200ms"):
        mesh = procs.supervised(AllForOne(**FAST)).spawn("crew", Stubborn)
        before = pids_of(mesh)
        staying = mesh.slice(gpus=2).stay.call_one()
        wait_until(lambda: procs.slice(gpus=2).activity().get(WAIT_S)[0].state == "busy")
        mesh.slice(gpus=0).die.broadcast("raise")
        assert "restarting" in str(error_of(staying))
        wait_until(lambda: is_restored(mesh, [(0, 1), (1, 1), (2, 1)]))
        after = pids_of(mesh)
    assert after[:2] == before[:2]
    assert faults.seen == []


def test_a_group_over_two_proc_meshes_restarts_what_was_started_later(procs: Any, faults: Recorder) -> None:
    other_procs = this_host().spawn_procs({"stage": 2})
    stages = SupervisionGroup(RestForOne(**FAST))
    first = procs.supervised(stages).spawn("first", Sync)
    second = other_procs.supervised(stages).spawn("second", Async)
    pids_of(first), pids_of(second)
    second.slice(stage=0).die.broadcast("kill")
    wait_until(lambda: is_restored(second, [(0, 1), (1, 1)]))
    assert restored_of(first) == [None] * 3
    first.slice(gpus=1).die.broadcast("raise")
    wait_until(lambda: is_restored(second, [(0, 2), (1, 2)]))
    assert restored_of(first) == [None, (1, 1), (2, 1)]
    assert faults.seen == []
    other_procs.stop().get(WAIT_S)


def test_too_many_restarts_are_told_with_the_whole_story(procs: Any, faults: Recorder) -> None:
    supervised = procs.supervised(OneForOne(max_restarts=2, within_s=60, backoff_s=0.0))
    mesh = supervised.spawn("crew", Sync)
    one = mesh.slice(gpus=1)
    for way in ("kill", "sys.exit"):
        error_of(one.die.call_one(way))
        assert one.about.call_one().get(WAIT_S)[2] is not None
    last = error_of(one.die.call_one("exit"))
    assert isinstance(last, SupervisionError) and not last.restarting
    assert "its supervision policy has given up" in str(last) and "restarting" not in str(last)
    [failure] = faults.wait(1)
    assert failure.crashed_ranks == [1] and failure.mesh_name == mesh._name.get()
    report = failure.report()
    assert "gave up: 2 restarts within 60 s were not enough" in report
    assert "signal 9 (SIGKILL)" in report and "SystemExit: 3" in report and "exited with status 3" in report
    error = error_of(one.about.call_one())
    assert "exited with status 3" in str(error) and "its supervision policy has given up" in str(error)
    assert mesh.slice(gpus=0).add.call_one().get(WAIT_S) == 1
    with pytest.raises(ValueError, match=r"has given up(.|\n)*new group"):
        supervised.spawn("late", Sync)


def test_an_init_that_always_fails_is_given_up(procs: Any, faults: Recorder) -> None:
    class Broken(Actor):
        def __init__(self) -> None:
            raise ValueError("bad-cfg-17")

        @endpoint
        def about(self) -> None: ...

    mesh = procs.slice(gpus=0).supervised(OneForOne(max_restarts=3, within_s=60, backoff_s=0.01)).spawn("broken", Broken)
    [failure] = faults.wait(1)
    assert failure.story.count("bad-cfg-17") == 4
    assert "bad-cfg-17" in str(error_of(mesh.about.call_one()))


@pytest.mark.parametrize("policy", [Ignore(), Escalate()], ids=repr)
def test_policies_without_restarts(procs: Any, faults: Recorder, policy: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "monarch.supervision")
    mesh = procs.supervised(policy).spawn("crew", Sync)
    error = error_of(mesh.slice(gpus=1).die.call_one("sys.exit"))
    assert "restarting" not in str(error)
    assert "SystemExit" in str(error_of(mesh.add.call()))
    assert mesh.slice(gpus=0).add.call_one().get(WAIT_S) >= 1
    if isinstance(policy, Escalate):
        faults.wait(1)
    else:
        wait_until(lambda: "a failure is ignored: rank 1" in caplog.text)
        assert faults.seen == []


def test_an_unsupervised_mesh_beside_a_supervised_one_dies_with_the_process_and_stays_dead(procs: Any, faults: Recorder) -> None:
    mortal = procs.spawn("mortal", Sync)
    mesh = procs.supervised(OneForOne(**FAST)).spawn("crew", Sync)
    caller = this_proc().spawn("caller", Caller, mortal)
    pid = pids_of(mesh)[1]
    os.kill(pid, signal.SIGKILL)
    [failure] = faults.wait(1)
    assert failure.mesh_name == mortal._name.get() and failure.crashed_ranks == [1] and len(failure.faults) == 1
    assert restored_of(mesh) == [None, (1, 1), None]
    began = time.monotonic()
    assert "signal 9" in str(error_of(mortal.about.call()))
    assert "signal 9" in str(error_of(caller.about.call_one()))
    assert time.monotonic() - began < 5
    assert mortal.slice(gpus=2).add.call_one().get(WAIT_S) == 1


@pytest.mark.parametrize("policy", [Ignore(), Escalate()], ids=repr)
def test_a_process_that_no_policy_restarts_is_gone_at_once(faults: Recorder, policy: Any) -> None:
    procs = this_host().spawn_procs({"gpus": 2})
    mesh = procs.supervised(policy).spawn("crew", Sync)
    other = procs.spawn("other", Sync)
    error_of(mesh.slice(gpus=1).die.call_one("kill"))
    for one in (mesh, other):
        assert "SIGKILL" in str(error_of(one.add.call()))
    assert procs.respawn() != procs
    faults.wait(1)
    procs.stop().get(WAIT_S)


def test_the_dead_stay_dead_however_often_their_process_is_replaced(procs: Any, faults: Recorder) -> None:
    mortal = procs.spawn("mortal", Sync)
    mesh = procs.supervised(OneForOne(**FAST)).spawn("crew", Sync)
    for attempt in range(1, 4):
        error_of(mesh.slice(gpus=1).die.call_one("kill"))
        assert restored_of(mesh)[1] == (1, attempt)
        assert "signal 9" in str(error_of(mortal.slice(gpus=1).add.call_one()))
    faults.wait(1)


class Manager(Actor):
    """Owns processes with workers that are supervised, too."""

    def __init__(self) -> None:
        self.procs = this_host().spawn_procs({"gpus": 2})
        self.crew = self.procs.supervised(OneForOne(**FAST)).spawn("workers", Sync)

    @endpoint
    def pids(self) -> tuple[int, list[int]]:
        return os.getpid(), pids_of(self.crew)

    @endpoint
    def mesh(self) -> Any:
        return self.crew


def test_a_supervised_manager_starts_its_supervised_workers_anew(faults: Recorder) -> None:
    top = this_host().spawn_procs()
    manager = top.supervised(OneForOne(**FAST)).spawn("manager", Manager)
    seen: set[int] = set()
    for _ in range(3):
        own, workers = answer_of(manager.pids)
        assert not seen & {own, *workers}
        seen |= {own, *workers}
        crew = manager.mesh.call_one().get(WAIT_S)
        error_of(crew.slice(gpus=0).die.call_one("kill"))
        assert restored_of(crew) == [(0, 1), None]
        os.kill(own, signal.SIGKILL)
        wait_until(lambda: is_gone(own) and all(map(is_gone, workers)))  # noqa: B023
    answer_of(manager.pids)
    assert faults.seen == []
    top.stop().get(WAIT_S)


@pytest.mark.parametrize("way", ["sys.exit", "kill"])
def test_restarts_cost_a_sender_no_credit(way: str) -> None:
    lines = f"""
payload = bytes(200_000)
for _ in range(12):
    for _ in range(10):
        crew.slice(gpus=1).take.broadcast(payload)
    crew.slice(gpus=1).die.broadcast({way!r})
    while True:
        try:
            crew.slice(gpus=1).pid.call_one().get(10)
            break
        except monarch.actor.SupervisionError as error:
            assert error.restarting
print("through", flush=True)
"""
    done = run_script(PROGRAM + lines, timeout=30, env={"MONARCH_MAILBOX_WINDOW_BYTES": "1048576"}).check()
    assert "through" in done.stdout


def test_an_owner_in_another_process_supervises_received_procs(procs: Any, faults: Recorder) -> None:
    class Owner(Actor):
        def __init__(self, procs: Any) -> None:
            self.crew = procs.supervised(OneForOne(**FAST)).spawn("crew", Sync, 5)

        @endpoint
        def mesh(self) -> Any:
            return self.crew

    owner = this_host().spawn_procs(name="owner").spawn("owner", Owner, procs)
    mesh = owner.mesh.call_one().get(WAIT_S)
    before = pids_of(mesh)
    os.kill(before[2], signal.SIGKILL)
    wait_until(lambda: is_restored(mesh, [None, None, (2, 1)]))
    assert faults.seen == []
    owner.stop().get(WAIT_S)


def test_an_actor_of_the_client_is_created_anew_in_the_client() -> None:
    mesh = this_proc().supervised(OneForOne(**FAST)).spawn("crew", Sync, 3)
    error_of(mesh.die.call_one("sys.exit"))
    assert mesh.about.call_one().get(WAIT_S) == (os.getpid(), 3, (0, 1))
    with pytest.raises(ValueError, match='replace="proc" needs procs that were spawned'):
        this_proc().supervised(OneForOne(replace="proc"))
    mesh.stop().get(WAIT_S)


def test_a_process_that_dies_again_while_it_starts_is_started_once_more(procs: Any, faults: Recorder) -> None:
    mesh = procs.supervised(OneForOne(**FAST)).spawn("crew", Sync)
    pid = pids_of(mesh)[0]
    for attempt in range(1, 6):
        os.kill(pid, signal.SIGKILL)
        pid, _, restored = wait_until(lambda pid=pid: _other(mesh.slice(gpus=0), pid))
        assert restored == (0, attempt)
    assert faults.seen == []


def _other(one: Any, pid: int) -> Any:
    future = one.about.call_one()
    return future.get() if future.exception(WAIT_S) is None and future.get()[0] != pid else None


@pytest.mark.parametrize("what", ["mesh", "procs"])
def test_a_stop_during_the_pause_is_a_stop(faults: Recorder, what: str) -> None:
    procs = this_host().spawn_procs({"gpus": 2})
    mesh = procs.supervised(OneForOne(max_restarts=3, within_s=60, backoff_s=30.0)).spawn("crew", Sync)
    pids = pids_of(mesh)
    error_of(mesh.slice(gpus=0).die.call_one("kill"))
    waiting = mesh.slice(gpus=0).about.call_one()
    (mesh if what == "mesh" else procs).stop().get(WAIT_S)
    assert "stopped" in str(error_of(waiting)) or "SIGKILL" in str(error_of(waiting))
    error_of(mesh.about.call())
    procs.stop().get(WAIT_S)
    assert all(map(is_gone, pids)) and faults.seen == []


def test_respawn_replaces_the_dead_and_only_them(faults: Recorder) -> None:
    procs = this_host().spawn_procs({"gpus": 3}, bootstrap=boot)
    assert procs.respawn() is procs
    mesh = procs.spawn("crew", Sync)
    before = pids_of(mesh)
    os.kill(before[1], signal.SIGKILL)
    faults.wait(1)
    again = procs.respawn()
    assert again.extent == procs.extent and again != procs
    assert again.initialized.get(WAIT_S) is True
    crew = again.spawn("crew", Sync)
    after = pids_of(crew)
    assert (after[0], after[2]) == (before[0], before[2]) and after[1] not in before
    assert crew.booted.call().get(WAIT_S).values() == [1, 1, 1]
    assert mesh.slice(gpus=2).add.call_one().get(WAIT_S) == 1, "actors on living processes go on"
    error_of(mesh.add.call())
    assert procs.respawn() is again
    with pytest.raises(ValueError, match="must be respawned by an owner"):
        again.slice(gpus=0).respawn()
    procs.stop().get(WAIT_S)
    assert all(map(is_gone, after))
    with pytest.raises(RuntimeError, match="already been stopped"):
        again.respawn()


def test_wrong_policies_are_refused(procs: Any) -> None:
    with pytest.raises(TypeError, match=r"no supervision policy(.|\n)*OneForOne"):
        procs.supervised(3)
    with pytest.raises(TypeError, match="no supervision policy"):
        SupervisionGroup(OneForOne)  # type: ignore[arg-type]
    group = SupervisionGroup(OneForOne())
    procs.supervised(group).spawn("mine", Sync).add.call().get(WAIT_S)
    shared[:] = [procs, group]
    thief = this_proc().spawn("thief", Thief)
    assert "same owner" in thief.steal.call_one().get(WAIT_S)
    thief.stop().get(WAIT_S)


# --- whole programs ------------------------------------------------------------------------------------------------

PROGRAM = """
import os, signal, subprocess, sys, time
import monarch.actor
from monarch.actor import Actor, AllForOne, OneForOne, endpoint, this_host

class Crew(Actor):
    @endpoint
    def pid(self):
        return os.getpid()

    @endpoint
    def die(self, way="kill"):
        if way == "sys.exit":
            raise SystemExit(1)
        os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    def take(self, data):
        pass

    @endpoint
    def stay(self):
        time.sleep(600)

    @endpoint
    def start_children(self, mark):
        command = [sys.executable, "-c", "import time; time.sleep(600)", mark]
        return [subprocess.Popen(command).pid, subprocess.Popen(command, start_new_session=True).pid]

procs = this_host().spawn_procs({"gpus": 3})
crew = procs.supervised(OneForOne(max_restarts=50, within_s=600, backoff_s=0.0)).spawn("crew", Crew)
"""


def test_a_clean_end_after_restarts_is_silent_and_has_status_0() -> None:
    lines = """
import logging
logging.getLogger("monarch.supervision").setLevel(logging.ERROR)
for rank in (0, 1, 2, 1):
    crew.slice(gpus=rank).die.call_one().exception(10)
assert len(set(crew.pid.call().get(10).values())) == 3
"""
    for last in ("", "procs.stop().get()"):
        done = run_script(PROGRAM + lines + last, timeout=20).check()
        assert done.stderr == ""


def test_restarts_take_the_descendants_of_the_dead_process_along() -> None:
    lines = """
first = crew.slice(gpus=1).start_children.call_one("mark").get(10)
crew.slice(gpus=1).die.call_one().exception(10)
crew.slice(gpus=1).pid.call_one().get(10)
print(*first, flush=True)
"""
    done = run_script(PROGRAM + lines, timeout=20).check()
    assert all(is_gone(int(pid)) for pid in done.stdout.split())
    assert "restart 1 of 50" in done.stderr, "a restart is said, once, also when logging was not set up"


def test_stop_means_stopped_also_for_supervised_actors_that_sit_in_an_endpoint() -> None:
    lines = """
pids = crew.pid.call().get(10).values()
crew.stay.broadcast()
procs.stop().get(25)
print(*pids, flush=True)
began = time.monotonic()
procs.stop().get(1)
try:
    crew.pid.call().get(2)
except RuntimeError as error:
    print("stopped" in str(error))
"""
    done = run_script(PROGRAM + lines, timeout=30, env={"HYPERACTOR_STOP_ACTOR_TIMEOUT": "2s"}).check()
    *pids, said = done.stdout.split()
    assert all(is_gone(int(pid)) for pid in pids) and len(pids) == 3 and said == "True"


@pytest.mark.parametrize("victim", ["client", "agent"])
def test_nothing_is_restarted_and_nothing_left_when_the_client_or_the_agent_is_killed(victim: str) -> None:
    lines = """
monarch.actor.unhandled_fault_hook = lambda failure: print("told", failure.crashed_ranks, failure.story, flush=True)
crew.pid.call().get(10)
slow = procs.supervised(OneForOne(max_restarts=3, within_s=60, backoff_s=20.0)).spawn("slow", Crew)
slow.pid.call().get(10)
slow.slice(gpus=0).die.call_one().exception(10)
from monarch.actor.process import this_process
print("agent", this_process()._agent.pid, flush=True)
waiting = slow.slice(gpus=0).pid.call_one()
print("ended", str(waiting.exception(10)).splitlines()[-3:], flush=True)
"""
    with start_script(PROGRAM + lines) as run:
        agent = int(run.wait_line(r"^agent (\d+)")[1])
        os.kill(run.pid if victim == "client" else agent, signal.SIGKILL)
        done = run.finish(20)
    done.check(-signal.SIGKILL if victim == "client" else 0)
    if victim == "agent":
        assert "could not restart it: no process can be started in its place" in done.stdout and "ended" in done.stdout


def test_stopping_my_mesh_keeps_yours_under_policies() -> None:
    lines = """
other = this_host().spawn_procs({"gpus": 2})
theirs = other.supervised(AllForOne(max_restarts=5, within_s=60, backoff_s=0.0)).spawn("theirs", Crew)
pids = theirs.pid.call().get(10).values()
mine = crew.pid.call().get(10).values()
procs.stop().get(20)
assert theirs.pid.call().get(10).values() == pids
theirs.slice(gpus=0).die.call_one().exception(10)
after = theirs.pid.call().get(10).values()
assert after[0] not in pids and after[1] == pids[1], (pids, after)
print(*mine, flush=True)
"""
    done = run_script(PROGRAM + lines, timeout=25).check()
    assert all(is_gone(int(pid)) for pid in done.stdout.split())
