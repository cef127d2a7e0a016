"""How actors, meshes, clients and hosts end: in which order, within which time, and that nothing is left of them."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from monarch import config
from monarch.actor import Actor, Channel, Port, ProcMesh, concurrent_endpoint, context, endpoint, this_host, this_proc
from monarch.testing import leaks
from system.script import CompletedRun, Run, run_script, start_script
from system.waiting import error_of, is_gone, wait_until

if TYPE_CHECKING:
    from system.recorder import Recorder

pytest_plugins = ["system.recorder"]
pytestmark = pytest.mark.usefixtures("faults")


@pytest.fixture
def procs() -> Generator[ProcMesh, None, None]:
    mesh = this_host().spawn_procs({"procs": 2})
    yield mesh
    mesh.stop().get(20)


class Diary:
    """What actors say about their life. They may do so from several processes, whose messages know no order: so with the time."""

    def __init__(self) -> None:
        self.port, self._receiver = Channel[tuple[float, str]].open()

    def read(self, count: int) -> list[str]:
        """The next lines, in the order in which they were written."""
        return [line for _, line in sorted(self._receiver.recv().get(3) for _ in range(count))]

    def is_empty(self) -> bool:
        """Nothing has come that was not read. Ask after whoever could still write has ended."""
        write(self.port, "the end")
        return self.read(1) == ["the end"]


def write(diary: Port[tuple[float, str]], line: str) -> None:
    diary.send((time.monotonic(), line))


class Sync(Actor):
    def __init__(self, name: str, diary: Port[tuple[float, str]], child_on: Any = None, cleanup_s: float = 0, other: Any = None) -> None:
        self.name, self.diary, self.cleanup_s, self.other = name, diary, cleanup_s, other
        procs = {"own": this_proc, "spawned": lambda: this_host().spawn_procs(name="nested")}.get(child_on, lambda: child_on)()
        self.child = None if procs is None else procs.spawn("child", type(self), f"{name}'s child", diary)

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def child_pid(self) -> int:
        assert self.child is not None
        return self.child.pid.call_one().get()

    @endpoint
    def note(self, text: str, pause_s: float = 0) -> str:
        time.sleep(pause_s)
        write(self.diary, f"{self.name}: {text}")
        return text

    @endpoint
    def leave(self, how: str, reason: str | None) -> str:
        getattr(context().actor_instance, how)(reason)
        return "still replied"

    def __cleanup__(self, exc: Exception | None) -> None:
        time.sleep(self.cleanup_s)
        if self.other is not None:
            self.other.note.call_one(f"called by the cleanup of {context().actor_instance.name}").get()
        write(self.diary, f"{self.name}: cleanup {exc if exc is None else type(exc).__name__}")
        if self.name == "clumsy":
            raise ValueError("clumsy cleanup")


class Async(Actor):
    def __init__(self, name: str, diary: Port[tuple[float, str]], child_on: Any = None, cleanup_s: float = 0, other: Any = None) -> None:
        self.name, self.diary, self.cleanup_s, self.other = name, diary, cleanup_s, other
        procs = {"own": this_proc, "spawned": lambda: this_host().spawn_procs(name="nested")}.get(child_on, lambda: child_on)()
        self.child = None if procs is None else procs.spawn("child", type(self), f"{name}'s child", diary)

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def child_pid(self) -> int:
        assert self.child is not None
        return await self.child.pid.call_one()

    @endpoint
    async def note(self, text: str, pause_s: float = 0) -> str:
        await asyncio.sleep(pause_s)
        write(self.diary, f"{self.name}: {text}")
        return text

    @concurrent_endpoint
    async def note_cancel(self) -> None:
        write(self.diary, f"{self.name}: begun")
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            write(self.diary, f"{self.name}: cancelled")
            raise

    @endpoint
    async def leave(self, how: str, reason: str | None) -> str:
        getattr(context().actor_instance, how)(reason)
        return "still replied"

    async def __cleanup__(self, exc: Exception | None) -> None:
        await asyncio.sleep(self.cleanup_s)
        if self.other is not None:
            await self.other.note.call_one(f"called by the cleanup of {context().actor_instance.name}")
        write(self.diary, f"{self.name}: cleanup {exc if exc is None else type(exc).__name__}")
        if self.name == "clumsy":
            raise ValueError("clumsy cleanup")


both_kinds = pytest.mark.parametrize("kind", [Sync, Async])
both_stops = pytest.mark.parametrize("what", ["actors", "procs"])


# --- stopping actors -------------------------------------------------------------------------------------------------


@both_kinds
@both_stops
def test_a_stop_handles_what_is_queued_and_then_cleans_up(kind: type[Sync], what: str) -> None:
    diary = Diary()
    procs = this_host().spawn_procs()
    actor = procs.spawn("a", kind, "a", diary.port)
    actor.note.broadcast("0", 0.05)
    for i in range(1, 5):
        actor.note.broadcast(str(i))
    (actor if what == "actors" else procs).stop().get(10)
    assert diary.read(6) == ["a: 0", "a: 1", "a: 2", "a: 3", "a: 4", "a: cleanup None"]
    procs.stop().get(10)
    assert diary.is_empty()


@both_kinds
def test_a_stop_drains_within_its_limit_and_refuses_the_rest(faults: Recorder, kind: type[Sync]) -> None:
    diary = Diary()
    with config.configured(stop_actor_timeout="200ms", cleanup_timeout="200ms"):
        procs = this_host().spawn_procs()
        actor = procs.spawn("a", kind, "a", diary.port)
        actor.pid.call_one().get(10)
        late = [actor.note.call_one(str(i), 0.08) for i in range(20)]
        began = time.monotonic()
        actor.stop().get(10)
        assert time.monotonic() - began < 2
        ends = [future.exception(5) for future in late]
        assert ends[0] is None and ends[-1] is not None
        assert all("stopped" in str(end) for end in ends if end is not None)
        procs.stop().get(10)
    assert faults.seen == []


@both_kinds
def test_messages_to_a_stopped_actor_are_refused_at_once(procs: ProcMesh, faults: Recorder, kind: type[Sync]) -> None:
    diary = Diary()
    crew, others = procs.spawn("crew", kind, "c", diary.port), procs.spawn("others", kind, "o", diary.port)
    assert crew.stop("enough").get(10) == ()
    assert crew.stop().get(10) == ()
    for future in (crew.pid.call(), crew.slice(procs=0).pid.call_one(), crew.slice(procs=1).pid.choose()):
        error = error_of(future, timeout=2)
        assert isinstance(error, RuntimeError) and "has status: stopped: " in str(error) and "enough" in str(error)
    assert faults.seen == []
    crew.slice(procs=1).note.broadcast("lost")  # nobody waits for it, so it comes back to its sender
    [bounced] = faults.wait(1)
    assert bounced.mesh_name == "<none>" and "note" in bounced.report() and "stopped" in bounced.report()
    assert len(others.pid.call().get(10)) == 2


def test_only_the_owner_may_stop_a_mesh(procs: ProcMesh) -> None:
    diary = Diary()
    crew = procs.spawn("crew", Sync, "c", diary.port)
    with pytest.raises(NotImplementedError, match="requires an owned ActorMesh"):
        crew.slice(procs=0).stop()
    with pytest.raises(ValueError, match="ProcMesh is not owned"):
        procs.slice(procs=0).stop()
    with pytest.raises(RuntimeError, match="reference instead of owned"):
        this_host().stop()
    assert len(crew.pid.call().get(10)) == 2


@both_kinds
@both_stops
def test_a_slow_cleanup_is_left_after_its_time_limit(kind: type[Sync], what: str) -> None:
    diary = Diary()
    with config.configured(cleanup_timeout="200ms"):
        procs = this_host().spawn_procs()
    actor = procs.spawn("a", kind, "a", diary.port, cleanup_s=60)
    actor.pid.call_one().get(10)
    began = time.monotonic()
    (actor if what == "actors" else procs).stop().get(10)
    assert 0.15 < time.monotonic() - began < 2
    began = time.monotonic()
    procs.stop().get(10)
    assert time.monotonic() - began < 2


@both_kinds
@both_stops
def test_a_cleanup_that_raises_does_not_stop_the_stop(procs: ProcMesh, kind: type[Sync], what: str) -> None:
    diary = Diary()
    actor = procs.slice(procs=0).spawn("a", kind, "clumsy", diary.port)
    actor.pid.call_one().get(10)
    (actor if what == "actors" else procs).stop().get(10)
    assert diary.read(1) == ["clumsy: cleanup None"]


@both_kinds
def test_a_cleanup_may_call_other_actors_and_knows_its_context(procs: ProcMesh, kind: type[Sync]) -> None:
    diary = Diary()
    other = procs.slice(procs=1).spawn("other", kind, "other", diary.port)
    actor = procs.slice(procs=0).spawn("a", kind, "a", diary.port, other=other)
    actor.stop().get(10)
    assert diary.read(2) == ["other: called by the cleanup of a", "a: cleanup None"]


@both_kinds
def test_an_actor_that_fails_cleans_up_with_the_reason(procs: ProcMesh, faults: Recorder, kind: type[Sync]) -> None:
    diary = Diary()
    crew = procs.spawn("crew", kind, "c", diary.port)
    crew.slice(procs=0).note.broadcast(text="x", pause_s="not a number")  # type: ignore[arg-type]
    faults.wait(1)
    assert diary.read(1) == ["c: cleanup TypeError"]
    crew.stop().get(10)
    assert diary.read(1) == ["c: cleanup None"]
    assert diary.is_empty()


@both_kinds
def test_an_actor_without_init_does_not_clean_up(procs: ProcMesh, faults: Recorder, kind: type[Sync]) -> None:
    diary = Diary()
    broken = procs.slice(procs=0).spawn("broken", kind, "b", diary.port, child_on="no mesh")
    assert "AttributeError" in str(error_of(broken.pid.call_one()))
    faults.wait(1)
    broken.stop().get(10)
    assert diary.is_empty()


def test_concurrent_calls_are_cancelled_before_the_cleanup(procs: ProcMesh) -> None:
    diary = Diary()
    actor = procs.slice(procs=0).spawn("a", Async, "a", diary.port)
    calls = [actor.note_cancel.call_one() for _ in range(2)]
    assert diary.read(2) == ["a: begun", "a: begun"]
    actor.stop("enough").get(10)
    assert diary.read(3) == ["a: cancelled", "a: cancelled", "a: cleanup None"]
    for call in calls:
        assert "stopped" in str(error_of(call))


def test_a_concurrent_call_that_is_cancelled_before_it_has_begun_is_answered(procs: ProcMesh) -> None:
    for _ in range(10):
        actor = procs.slice(procs=0).spawn("a", Async, "a", Diary().port)
        actor.pid.call_one().get(10)
        calls = [actor.note_cancel.call_one() for _ in range(5)]
        stopped = actor.stop("at once")
        for call in calls:
            assert "stopped" in str(error_of(call))
        stopped.get(10)


# --- from inside -----------------------------------------------------------------------------------------------------


@both_kinds
def test_an_actor_may_stop_itself_after_its_reply(procs: ProcMesh, faults: Recorder, kind: type[Sync]) -> None:
    diary = Diary()
    actor = procs.slice(procs=0).spawn("a", kind, "a", diary.port)
    assert actor.leave.call_one("stop", "had enough").get(10) == "still replied"
    assert diary.read(1) == ["a: cleanup None"]
    error = error_of(actor.pid.call_one(), timeout=2)
    assert "stopped: had enough" in str(error)
    actor.stop().get(10)
    assert faults.seen == []


@both_kinds
@pytest.mark.parametrize("reason", ["it hurts", None])
@pytest.mark.parametrize("how", ["abort", "kill"])
def test_an_actor_may_fail_itself(procs: ProcMesh, faults: Recorder, kind: type[Sync], how: str, reason: str | None) -> None:
    diary = Diary()
    actor = procs.slice(procs=0).spawn("a", kind, "a", diary.port)
    actor.leave.broadcast(how, reason)
    [failure] = faults.wait(1)
    expected = f"actor explicitly aborted due to: {reason or '(no reason provided)'}"
    assert expected in failure.report()
    assert expected in str(error_of(actor.pid.call_one(), timeout=2))
    assert diary.read(1) == ["a: cleanup ActorAborted"]


# --- owners ----------------------------------------------------------------------------------------------------------


@both_kinds
@pytest.mark.parametrize("child_on", ["own", "spawned", "given"])
@pytest.mark.parametrize("end", ["stop", "abort", "procs.stop"])
def test_what_an_actor_owns_ends_before_it(procs: ProcMesh, faults: Recorder, kind: type[Sync], child_on: str, end: str) -> None:
    diary = Diary()
    given: Any = child_on if child_on != "given" else this_host().spawn_procs(name="given")
    mine = this_host().spawn_procs(name="mine")
    owner = mine.spawn("owner", kind, "owner", diary.port, child_on=given)
    own_pid, child_pid = owner.pid.call_one().get(10), owner.child_pid.call_one().get(10)
    assert (child_pid == own_pid) == (child_on == "own")
    if end == "abort":
        owner.leave.broadcast("abort", None)
        faults.wait(1)
    else:
        (owner if end == "stop" else mine).stop().get(10)
        assert faults.seen == []
    lines = diary.read(2)
    if not (end == "procs.stop" and child_on == "own"):  # there both are told to stop at once
        assert [line.split(":")[0] for line in lines] == ["owner's child", "owner"]
    if child_on == "spawned":
        wait_until(lambda: is_gone(child_pid))
    elif child_on == "given":
        assert not is_gone(child_pid)
        given.stop().get(10)
    mine.stop().get(10)
    assert is_gone(own_pid) and is_gone(child_pid)


@pytest.mark.parametrize("kind", [Sync, Async])
def test_what_a_dead_process_owned_ends(procs: ProcMesh, faults: Recorder, kind: type[Sync]) -> None:
    diary = Diary()
    given = this_host().spawn_procs(name="given")
    guest = given.spawn("guest", kind, "guest", diary.port)
    owners = [procs.slice(procs=0).spawn("owner", kind, "owner", diary.port, child_on=where) for where in ("spawned", given)]
    nested_pid, given_pid = (owner.child_pid.call_one().get(10) for owner in owners)
    os.kill(owners[0].pid.call_one().get(10), signal.SIGKILL)
    [failure] = faults.wait(1)
    assert [fault.mesh for fault in failure.faults] == [owner._name.get() for owner in owners]
    wait_until(lambda: is_gone(nested_pid))
    assert diary.read(1) == ["owner's child: cleanup None"]  # that on the given proc; a killed proc's own are killed
    assert guest.pid.call_one().get(10) == given_pid
    given.stop().get(10)


# --- stopping procs --------------------------------------------------------------------------------------------------


kept: Any = None


class Finalised:
    """Says when the interpreter has finalised it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __del__(self) -> None:
        os.mkdir(self.path)  # `open` is gone by then, as in any program


class Keeper(Actor):
    @endpoint
    def keep(self, path: str) -> int:
        global kept
        kept = Finalised(path)
        return os.getpid()

    @endpoint
    def ignore_termination(self) -> int:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        return os.getpid()


def test_a_stopped_process_finalises_as_any_program(tmp_path: Path) -> None:
    procs = this_host().spawn_procs()
    pid = procs.spawn("keeper", Keeper).keep.call_one(str(tmp_path / "note")).get(10)
    procs.stop().get(10)
    assert (tmp_path / "note").is_dir()
    assert is_gone(pid)


def test_a_stop_may_be_asked_for_twice_and_at_once() -> None:
    procs = this_host().spawn_procs({"procs": 2})
    pids = list(procs.spawn("keeper", Keeper).ignore_termination.call().get(10).values())
    ends: list[Any] = []
    threads = [threading.Thread(target=lambda: ends.append(procs.stop().get(10))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends == [None] * 4 and all(map(is_gone, pids))
    assert procs.stop().get(0) is None


def test_a_stopped_mesh_refuses_to_spawn() -> None:
    diary = Diary()
    procs = this_host().spawn_procs()
    crew = procs.spawn("crew", Sync, "c", diary.port)
    procs.stop().get(10)
    assert "stopped" in str(error_of(crew.pid.call_one(), timeout=2))
    late = procs.spawn("late", Sync, "l", diary.port)
    with pytest.raises(RuntimeError, match="`ProcMesh` has already been stopped"):
        late.initialized.get(2)
    assert "stopped" in str(error_of(late.pid.call_one(), timeout=2))

    async def enter() -> None:
        async with procs:
            pass

    with pytest.raises(RuntimeError, match="`ProcMesh` has already been stopped"):
        asyncio.run(enter())


def test_a_mesh_in_a_with_block_stops_at_its_end() -> None:
    diary = Diary()

    async def use() -> int:
        async with this_host().spawn_procs() as procs:
            return await procs.spawn("a", Async, "a", diary.port).pid.call_one()

    assert is_gone(asyncio.run(use()))
    assert diary.read(1) == ["a: cleanup None"]


def test_a_mesh_whose_processes_are_dead_can_be_stopped(faults: Recorder) -> None:
    diary = Diary()
    procs = this_host().spawn_procs({"procs": 2})
    crew = procs.spawn("crew", Sync, "c", diary.port)
    for pid in crew.pid.call().get(10).values():
        os.kill(pid, signal.SIGKILL)
    faults.wait(2)
    assert crew.stop().get(5) == ()
    procs.stop().get(5)


def test_a_mesh_that_is_being_created_can_be_stopped() -> None:
    diary = Diary()
    for _ in range(5):
        procs = this_host().spawn_procs({"procs": 2})
        crew = procs.spawn("crew", Sync, "c", diary.port)
        call = crew.pid.call()
        procs.stop().get(10)
        assert call.exception(5) is None or "stopped" in str(call.exception())


class NeverReady(Actor):
    def __init__(self, port: Port[Any]) -> None:
        port.send((this_proc(), os.getpid()))
        time.sleep(600)

    @endpoint
    def ping(self) -> None:
        pass


@both_stops
def test_an_actor_whose_init_never_returns_can_be_stopped(what: str) -> None:
    port, receiver = Channel[Any].open()
    with config.configured(stop_actor_timeout="200ms", cleanup_timeout="200ms"):
        procs = this_host().spawn_procs()
        actor = procs.spawn("a", NeverReady, port)
        proc, pid = receiver.recv().get(10)
        ping = actor.ping.call_one()
        diary = Diary()
        assert proc.spawn("other", Sync, "o", diary.port).pid.call_one().get(10) == pid
        (actor if what == "actors" else procs).stop().get(10)
        assert "stopped" in str(error_of(ping, timeout=2))
        procs.stop().get(10)
    assert is_gone(pid)


# --- the end of a client ---------------------------------------------------------------------------------------------

PROGRAM = """
import asyncio, os, signal, subprocess, sys, threading, time
from monarch.actor import Actor, endpoint, shutdown_context, this_host, this_proc

class Worker(Actor):
    def __init__(self):
        self.child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        self.nested = this_host().spawn_procs(name="nested").spawn("nested", Nested)
        self.nested.ping.call_one().get()

    @endpoint
    def work(self):
        time.sleep(600)

    @endpoint
    def echo(self, value):
        return value

class Nested(Actor):
    @endpoint
    def ping(self):
        return os.getpid()

def main():
    procs = this_host().spawn_procs(per_host={"procs": 2})
    local = this_proc().spawn("local", Nested)
    crew = procs.spawn("crew", Worker)
    crew.echo.call(bytes(1_000_000)).get()
    local.ping.call_one().get()
    threading.Thread(target=lambda: crew.slice(procs=0).work.call_one().exception(), daemon=True).start()
    return crew
"""

ENDS = {
    "returns": ("", 0),
    "raises": ("raise ValueError('end-1')", 1),
    "sys.exit": ("sys.exit(3)", 3),
    "os._exit": ("os._exit(4)", 4),
    "exec": ("os.execlp('true', 'true')", 0),
    "aborts": ("os.abort()", -signal.SIGABRT),
    "shuts down": ("shutdown_context().get(); shutdown_context().get()", 0),
}
BLOCKS = {
    "get": "crew.work.call().get()",
    "asyncio.run": "async def wait(): await crew.work.call()\nasyncio.run(wait())",
    "sleep": "time.sleep(600)",
    "join": "thread = threading.Thread(target=crew.work.call().get); thread.start(); thread.join()",
    "iterating": "for future in crew.work.stream(): future.get()",
}
SIGNALS = [(signal.SIGINT, block) for block in BLOCKS] + [
    (number, "sleep") for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, signal.SIGQUIT)
]


@contextmanager
def program(lines: str, **options: Any) -> Iterator[tuple[Run, Path]]:
    """PROGRAM with `lines` running, and the temporary directory that it has for itself."""
    with tempfile.TemporaryDirectory(prefix="c-") as folder:
        env = {"TMPDIR": folder, "HYPERACTOR_STOP_ACTOR_TIMEOUT": "300ms", **options.pop("env", {})}
        with start_script(PROGRAM + "\ncrew = main()\nprint('ready', flush=True)\n" + lines, env=env, **options) as run:
            yield run, Path(folder)


def check_nothing_left(done: CompletedRun, folder: Path) -> None:
    assert not done.leftovers, done
    deadline = time.monotonic() + 2
    while left := [str(path) for path in folder.glob("monarch-*/**/*")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_left_of_a_client_that_ends(end: str) -> None:
    line, status = ENDS[end]
    with program(line) as (run, folder):
        done = run.finish(15, grace_s=2)
        assert done.returncode == status, done
        check_nothing_left(done, folder)
        assert ("end-1" in done.stderr) == (end == "raises"), done


@pytest.mark.parametrize(("number", "block"), SIGNALS, ids=[f"{number.name}-{block}" for number, block in SIGNALS])
def test_nothing_is_left_of_a_client_that_a_signal_ends(number: signal.Signals, block: str) -> None:
    with program(BLOCKS[block]) as (run, folder):
        run.wait_line("ready")
        os.kill(run.pid, number)
        done = run.finish(8, grace_s=2)
        assert done.returncode == -number or (number == signal.SIGINT and done.returncode in (1, 130)), done
        check_nothing_left(done, folder)
        if number == signal.SIGINT:
            assert len(done.stderr.splitlines()) <= 60, done


def test_a_ctrl_c_of_the_terminal_reaches_the_client_only() -> None:
    lines = """
try:
    time.sleep(600)
except KeyboardInterrupt:
    print(crew.slice(procs=1).echo.call_one("alive").get())
"""
    with program(lines) as (run, folder):
        run.wait_line("ready")
        os.killpg(run.pid, signal.SIGINT)
        done = run.finish(8)
        check_nothing_left(done.check(), folder)
        assert done.stdout == "ready\nalive\n" and done.stderr == ""


def test_a_client_that_is_killed_while_it_spawns_leaves_nothing() -> None:
    lines = """
print("ready", flush=True)
for _ in range(6):
    this_host().spawn_procs(per_host={"procs": 4}).spawn("n", Nested)
time.sleep(60)
"""
    with tempfile.TemporaryDirectory(prefix="c-") as folder:
        env = {"TMPDIR": folder}
        for delay_s in (0.0, 0.02, 0.05, 0.1, 0.2):
            with start_script(PROGRAM + lines, env=env) as run:
                run.wait_line("ready")
                time.sleep(delay_s)  # any moment is right
                os.kill(run.pid, signal.SIGKILL)
                done = run.finish(8, grace_s=2)
                assert not done.leftovers, done
        for path in Path(folder).glob("monarch-*/*"):
            os.utime(path, (0, 0))
        # One that was killed before it had an agent leaves its directory to a later client.
        check_nothing_left(run_script(PROGRAM + "this_host().spawn_procs().initialized.get()", env=env).check(), Path(folder))


def test_a_thread_that_works_on_after_the_main_thread_finishes_its_work() -> None:
    lines = """
def work():
    for i in range(20):
        time.sleep(0.02)
        assert crew.slice(procs=1).echo.call_one(i).get() == i
    print("worked")
threading.Thread(target=work).start()
"""
    with program(lines) as (run, folder):
        done = run.finish(15).check()
        check_nothing_left(done, folder)
        assert done.stdout == "ready\nworked\n" and done.stderr == ""


def test_a_waiting_thread_is_told_when_the_client_shuts_down() -> None:
    lines = """
call = crew.work.call()
shutdown_context().get()
print(call.exception(0))
"""
    with program(lines) as (run, folder):
        done = run.finish(15).check()
        check_nothing_left(done, folder)
        assert "stop" in done.stdout or "shut down" in done.stdout, done


def test_a_clean_end_warns_of_nothing() -> None:
    source = """
import asyncio
from monarch.actor import Actor, endpoint, this_host, this_proc

class Sync(Actor):
    @endpoint
    def echo(self, value):
        return value

class Async(Actor):
    @endpoint
    async def echo(self, value):
        return value

async def main():
    procs = this_host().spawn_procs(per_host={"procs": 2})
    for kind in (Sync, Async):
        for mesh in (procs.spawn("a", kind), this_proc().spawn("b", kind)):
            assert len(await mesh.echo.call(bytes(1_000_000))) == len(mesh)
            mesh.echo.broadcast(1)
            for future in mesh.echo.stream(2):
                await future
    await procs.stop()

asyncio.run(main())
"""
    done = run_script(source, env={"PYTHONWARNINGS": "error"}).check()
    assert (done.stdout, done.stderr) == ("", "")


def test_two_clients_share_a_machine_and_end_apart() -> None:
    with tempfile.TemporaryDirectory(prefix="c-") as folder:
        env = {"TMPDIR": folder}
        source = PROGRAM + "crew = main(); print('ready', flush=True)\nsys.stdin.read(); time.sleep(600)"
        talker = (
            PROGRAM
            + """
crew = main()
print('ready', flush=True)
while not os.path.exists(sys.argv[1]):
    crew.slice(procs=1).echo.call_one(1).get()
"""
        )
        flag = Path(folder) / "flag"
        with start_script(source, env=env) as first, start_script(talker, env=env, args=[str(flag)]) as second:
            first.wait_line("ready")
            second.wait_line("ready")
            os.kill(first.pid, signal.SIGKILL)
            assert not first.finish(8).leftovers
            wait_until(lambda: len([*Path(folder).glob("monarch-*/*")]) == 1)
            with start_script(talker, env=env, args=[str(flag)]) as third:  # sweeps what is stale, and only that
                third.wait_line("ready")
                flag.touch()
                third.finish(8).check()
            second.finish(8).check()
        assert not [*Path(folder).glob("monarch-*/*")]


def test_the_next_client_sweeps_up_after_a_massacre() -> None:
    with program("time.sleep(600)") as (run, folder):
        run.wait_line("ready")
        for pid in run.pids():
            with suppress(ProcessLookupError):  # it went with the one before
                os.kill(pid, signal.SIGKILL)
        run.finish(8)
        assert [*folder.glob("monarch-*/*")]
        done = run_script(PROGRAM + "this_host().spawn_procs().initialized.get()", env={"TMPDIR": str(folder)}).check()
        check_nothing_left(done, folder)


def test_a_forked_child_does_not_keep_the_client_alive_nor_end_it() -> None:
    lines = """
pid = os.fork()
if pid == 0:
    sys.exit(0)
os.waitpid(pid, 0)
assert crew.slice(procs=1).echo.call_one(1).get() == 1
if os.fork() == 0:
    time.sleep(5)
    os._exit(0)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with program(lines) as (run, folder):
        begun = run.finish(15, grace_s=2)
        assert begun.returncode == -signal.SIGKILL, begun
        assert [line for line in begun.leftovers if "sleep" in line or "host_main" in line] == []
        assert len(begun.leftovers) == 1, begun  # the child of the user's own
        wait_until(lambda: not [*folder.glob("monarch-*/*")], timeout=2)


def test_after_a_shutdown_the_client_starts_anew() -> None:
    lines = """
shutdown_context().get()
print(len(this_host().spawn_procs(per_host={"procs": 2}).spawn("n", Nested).ping.call().get()))
"""
    with program(lines) as (run, folder):
        done = run.finish(15).check()
        assert done.stdout == "ready\n2\n" and done.stderr == ""
        check_nothing_left(done, folder)


# --- SIGKILL of the runtime's own processes --------------------------------------------------------------------------

VICTIMS = """
import monarch.actor
seen = []
monarch.actor.unhandled_fault_hook = lambda failure: seen.append(failure.report())

def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]

def agent():
    [pid] = children(os.getpid())
    return pid

def zygote():
    return children(agent())[0]

def proc():
    return local_pids[0]

def end(call):
    error = call.exception(5)
    assert type(error).__name__ in ("SupervisionError", "RuntimeError"), repr(error)
    return str(error)

def check_alive():
    assert len(this_host().spawn_procs(per_host={"procs": 2}).spawn("n", Nested).ping.call().get(10)) == 2
"""

MOMENTS = {
    "a call is under way": """
calls = [crew.slice(procs=0).echo.call_one(1), crew.echo.call(1)]
crew.slice(procs=1).echo.call_one(1).get(10)
os.kill({victim}(), signal.SIGKILL)
for call in calls:
    text = end(call)
    assert "zygote was killed" in text or "host has ended" in text, text
end(crew.echo.call(1))
""",
    "nothing happens": """
os.kill({victim}(), signal.SIGKILL)
while not seen:
    time.sleep(0.01)
end(crew.echo.call(1))
""",
    "procs are spawned": """
meshes = [this_host().spawn_procs(per_host={"procs": 4}) for _ in range(4)]
calls = [mesh.spawn("n", Nested).ping.call() for mesh in meshes]
os.kill({victim}(), signal.SIGKILL)
for call in calls:
    if call.exception(5) is not None:
        end(call)
for mesh in meshes:
    mesh.initialized.exception(5)
    mesh.stop().get(5)
""",
    "procs are stopped": """
procs = this_host().spawn_procs(per_host={"procs": 4})
procs.spawn("n", Nested).ping.call().get()
stopping = procs.stop()
os.kill({victim}(), signal.SIGKILL)
stopping.get(5)
""",
    "the program ends": """
import atexit
atexit.register(lambda: os.kill({victim}(), signal.SIGKILL))
sys.exit(0)
""",
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("victim", ["agent", "zygote"])
def test_the_end_of_the_runtime_is_an_error_for_all_and_the_client_can_go_on(victim: str, moment: str) -> None:
    lines = VICTIMS + MOMENTS[moment].replace("{victim}", victim) + "check_alive()\nprint('went on')"
    with program(lines) as (run, folder):
        done = run.finish(20, grace_s=2)
        check_nothing_left(done.check(), folder)
        if moment != "the program ends":
            assert done.stdout == "ready\nwent on\n"
        assert done.stderr == ""


def test_an_agent_that_was_asleep_notices_that_its_client_has_died() -> None:
    lines = """
print(agent(), flush=True)
os.kill(agent(), signal.SIGSTOP)
this_host().spawn_procs()
os.kill(os.getpid(), signal.SIGKILL)
"""
    with program(VICTIMS + lines) as (run, folder):
        agent = int(run.wait_line(r"^(\d+)$").group(1))
        wait_until(lambda: is_gone(run.pid))
        os.kill(agent, signal.SIGCONT)
        check_nothing_left(run.finish(8, grace_s=2), folder)


class Waiter(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def ask(self, leaver: Any, folder: Path) -> None:
        port, _receiver = Channel[str].open()
        leaver.leave.call_one(port, folder).get()

    @endpoint
    def leave(self, port: Port[str], folder: Path) -> None:
        (folder / "here").touch()
        while not (folder / "now").exists():
            time.sleep(0.005)
        port.send("last words")
        os._exit(3)


def test_a_death_is_noticed_together_with_the_last_words(faults: Recorder, tmp_path: Path) -> None:
    procs = this_host().spawn_procs({"procs": 2})
    crew = procs.spawn("crew", Waiter)
    pids = list(crew.pid.call().get(10).values())
    asking = crew.slice(procs=0).ask.call_one(crew.slice(procs=1), tmp_path)
    wait_until((tmp_path / "here").exists)
    os.kill(pids[0], signal.SIGSTOP)
    (tmp_path / "now").touch()
    wait_until(lambda: is_gone(pids[1]))
    os.kill(pids[0], signal.SIGCONT)
    try:
        assert "exited with status 3" in str(error_of(asking, timeout=3))
        faults.wait(1)
    finally:
        os.kill(pids[0], signal.SIGKILL)
        procs.stop().get(10)


def test_grandchildren_go_with_a_killed_zygote() -> None:
    lines = "os.kill(zygote(), signal.SIGKILL)\nend(crew.echo.call(1))\nprint('dead', flush=True)\ntime.sleep(60)"
    with program(VICTIMS + lines) as (run, _):
        run.wait_line("dead")
        wait_until(lambda: not [pid for pid in run.pids() if "sleep 600" in leaks.command(pid)], timeout=2)


@pytest.mark.parametrize("pause_s", [0.0, 0.001, 0.003, 0.01, 0.03])
def test_a_process_may_die_at_any_moment_of_its_start(faults: Recorder, pause_s: float) -> None:
    def die() -> None:
        time.sleep(pause_s)  # any moment is right
        os.kill(os.getpid(), signal.SIGKILL)

    def boot() -> None:
        threading.Thread(target=die).start()

    diary = Diary()
    procs = this_host().spawn_procs({"procs": 2}, bootstrap=boot)
    crews = [procs.spawn(f"crew{i}", Sync, "c", diary.port) for i in range(5)]
    calls = [crew.pid.call() for crew in crews for _ in range(5)]
    for call in calls:
        error = call.exception(5)
        assert error is None or "signal 9" in str(error)
    wait_until(lambda: sum(len(failure.faults) for failure in faults.seen) >= 10)
    for crew in crews:
        assert "signal 9" in str(error_of(crew.pid.call(), timeout=2))
    procs.stop().get(5)


# --- many rounds -----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_rounds_of_spawn_and_stop_leave_nothing_in_the_client() -> None:
    rounds = 200 if os.environ.get("MONARCH_TEST_LONG") == "1" else 10
    diary = Diary()

    def turn() -> None:
        procs = this_host().spawn_procs({"procs": 2})
        for kind in (Sync, Async):
            crew = procs.spawn("crew", kind, "c", diary.port)
            crew.note.call("x" * 100_000).get(10)
        local = this_proc().spawn("local", Async, "l", diary.port)
        local.pid.call_one().get(10)
        local.stop().get(10)
        procs.stop().get(10)
        diary.read(4 + 1 + 4)

    for _ in range(5):
        turn()
    before = footprint()
    for _ in range(rounds):
        turn()
    wait_until(lambda: footprint()[:2] <= before[:2])
    gc.collect()
    grown_kib = footprint()[2] - before[2]
    assert grown_kib < 4096 + 20 * rounds


def footprint() -> tuple[int, int, int]:
    """Descriptors, threads, and KiB of resident memory of this process."""
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(os.listdir("/proc/self/fd")), threading.active_count(), resident_pages * os.sysconf("SC_PAGE_SIZE") // 1024
