"""Procs: how meshes of them are asked for, start, are spawned on, and end."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import logging
import os
import shlex
import stat
import sys
import textwrap
import threading

import pytest

from monarch.actor import (
    Actor,
    ActorError,
    BootstrapCommand,
    Channel,
    SupervisionError,
    context,
    default_bootstrap_cmd,
    endpoint,
    proc_mesh,
    shutdown_context,
    this_host,
    this_proc,
)
from monarch.actor.proc_mesh import (
    get_active_proc_meshes,
    register_proc_mesh_spawn_callback,
    unregister_proc_mesh_spawn_callback,
)
from system.actors import Echo, Gate, Inspector, Log, SyncEcho
from system.waiting import is_gone, wait_until

pytest_plugins = ["system.recorder"]
pytestmark = pytest.mark.usefixtures("faults")

WAIT_S = 10.0


@pytest.fixture(scope="module")
def procs():
    return this_host().spawn_procs(per_host={"gpus": 2}, name="pair")


@pytest.fixture(scope="module")
def grid():
    return this_host().spawn_procs(per_host={"rows": 3, "cols": 2}, name="grid")


def ask(procs, function, *args):
    """What `function(*args)` gives in each proc, in rank order."""
    return procs.spawn("inspector", Inspector).run.call(function, *args).get(WAIT_S).values()


# --- sizes, labels, names --------------------------------------------------------------------------------------------


def test_dimensions_are_those_asked_for_and_ranks_are_row_major(grid):
    assert grid.sizes == {"rows": 3, "cols": 2}
    assert (len(grid), grid.size("rows"), grid.extent.labels) == (6, 3, ["rows", "cols"])
    places = grid.spawn("echo", Echo).rank.call().get(WAIT_S)
    assert [(point["rows"], point["cols"], rank) for point, rank in places] == [(r, c, 2 * r + c) for r in range(3) for c in range(2)]
    pids = ask(grid, os.getpid)
    assert len({*pids, os.getpid()}) == 7


@pytest.mark.parametrize("per_host", [None, {}], ids=repr)
def test_without_dimensions_there_is_one_proc(per_host):
    procs = this_host().spawn_procs(per_host)
    assert (procs.sizes, len(procs)) == ({}, 1)
    assert procs.spawn("echo", Echo).rank.call_one().get(WAIT_S) == 0
    assert procs.host_mesh == this_host()
    procs.stop().get(WAIT_S)


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2", None], ids=repr)
def test_a_size_is_a_positive_integer(size):
    before = len(get_active_proc_meshes())
    with pytest.raises(ValueError, match=r"per_host\['gpus'\] is .*; expected an integer of at least 1\n  next:  write \{\"gpus\": 8\}"):
        this_host().spawn_procs(per_host={"gpus": size})
    assert len(get_active_proc_meshes()) == before


@pytest.mark.parametrize("label", ["", "two words", "7", 7], ids=repr)
def test_a_label_is_an_identifier(label):
    with pytest.raises(ValueError, match=r"per_host label .* is no identifier"):
        this_host().spawn_procs(per_host={label: 1})


@pytest.mark.parametrize("per_host", [5, "gpus", ["gpus"], [("gpus", 2, 3)]], ids=repr)
def test_per_host_is_a_dict(per_host):
    with pytest.raises((TypeError, ValueError)):
        this_host().spawn_procs(per_host=per_host)


def test_names_need_not_be_unique_and_show(procs):
    twin = this_host().spawn_procs(name="pair")
    assert procs._name.get() != twin._name.get()
    assert procs._name.get().startswith("pair-")
    assert repr(procs) == "ProcMesh(name='pair', extent={gpus: 2})"
    assert "anon" in this_host().spawn_procs()._name.get()
    twin.stop().get(WAIT_S)
    assert len(procs.spawn("echo", Echo).rank.call().get(WAIT_S)) == 2


def test_proc_mesh_is_the_short_form_and_awaitable():
    async def use():
        procs = await proc_mesh(gpus=2, name="short")
        async with procs:
            return (await procs.spawn("echo", Echo).rank()).values(), repr(procs)

    assert asyncio.run(use()) == ([0, 1], "ProcMesh(name='short', extent={gpus: 2})")


# --- bootstrap -------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(2)
def test_a_bootstrap_runs_first_in_every_proc_and_may_spawn_and_set_the_environment():
    port, receiver = Channel[str].open()

    def bootstrap():
        os.environ["FROM_BOOTSTRAP"] = "yes"
        import builtins

        builtins.kept = this_proc().spawn("local", Echo)
        builtins.answer = builtins.kept.pid.call_one().get()
        port.send("ran")

    procs = this_host().spawn_procs({"gpus": 2}, bootstrap)
    pids = ask(procs, lambda: (os.environ["FROM_BOOTSTRAP"], __import__("builtins").answer == os.getpid()))
    assert pids == [("yes", True)] * 2
    assert ask(procs, lambda: __import__("builtins").kept.pid.call_one().get() == os.getpid()) == [True, True]
    assert [receiver.recv().get(WAIT_S) for _ in range(2)] == ["ran", "ran"]
    assert procs.initialized.get(WAIT_S) is True
    procs.stop().get(WAIT_S)


def test_a_failure_of_what_the_bootstrap_spawned_reaches_who_spawned_the_procs(faults):
    def bootstrap():
        import builtins

        builtins.kept = this_proc().spawn("local", Echo)

    procs = this_host().spawn_procs({"gpus": 1}, bootstrap)
    [kept] = ask(procs, lambda: __import__("builtins").kept)
    assert kept.echo.call_one("alive").get(WAIT_S) == "alive"
    kept.fail.broadcast("dead-now")
    assert "dead-now" in faults.wait(1)[0].report()
    procs.stop().get(WAIT_S)


@pytest.mark.timeout(2)
def test_a_bootstrap_may_be_async():
    async def bootstrap():
        await asyncio.sleep(0)
        os.environ["FROM_BOOTSTRAP"] = str(await this_proc().spawn("local", Echo).echo.call_one(5))

    procs = this_host().spawn_procs({"gpus": 1}, bootstrap)
    assert ask(procs, os.getenv, "FROM_BOOTSTRAP") == ["5"]
    procs.stop().get(WAIT_S)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_raising_bootstrap_is_the_failure_of_initialized_and_later_spawns(asynchronous, faults):
    def raising():
        raise LookupError("not prepared")

    async def raising_later():
        raising()

    procs = this_host().spawn_procs({"gpus": 2}, raising_later if asynchronous else raising)
    for _ in range(2):
        with pytest.raises(ActorError, match=r"LookupError: not prepared"):
            procs.initialized.get(WAIT_S)
    with pytest.raises(SupervisionError, match=r"echo\.rank\(\) failed(.|\n)*LookupError: not prepared"):
        procs.spawn("echo", Echo).rank.call().get(WAIT_S)
    faults.wait(2)
    procs.stop().get(WAIT_S)


def test_spawns_do_not_wait_for_the_procs_and_messages_queue_up_in_order(tmp_path):
    path = tmp_path / "lock"

    def bootstrap():
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH)

    lock = open(path, "w")  # noqa: SIM115  # closed below, while the procs start
    fcntl.flock(lock, fcntl.LOCK_EX)
    procs = this_host().spawn_procs({"gpus": 2}, bootstrap)
    log = procs.spawn("log", Log)
    for number in range(20):
        (log if number % 2 else log.slice(gpus=0)).add.broadcast(number)
    items = log.items.call()
    for pending in (items, procs.initialized):
        with pytest.raises(TimeoutError):
            pending.get(0.05)
    lock.close()
    assert items.get(WAIT_S).values() == [list(range(20)), list(range(1, 20, 2))]
    procs.stop().get(WAIT_S)


# --- how a proc starts -----------------------------------------------------------------------------------------------


def test_proc_bind_has_one_entry_per_proc_with_known_keys():
    with pytest.raises(ValueError, match=r"proc_bind length \(1\) must equal procs_per_host \(4\)"):
        this_host().spawn_procs({"gpus": 4}, proc_bind=[{"cpus": "0"}])
    with pytest.raises(ValueError, match=r"unknown proc_bind keys \['cpu'\]; known are cpunodebind, membind, physcpubind, cpus"):
        this_host().spawn_procs({"gpus": 1}, proc_bind=[{"cpu": "0"}])


@pytest.mark.skipif(sys.platform != "linux", reason="binding needs Linux")
def test_proc_bind_binds_each_proc_to_its_processors():
    cpus = sorted(os.sched_getaffinity(0))[:2]
    procs = this_host().spawn_procs({"gpus": len(cpus)}, proc_bind=[{"cpus": str(cpu)} for cpu in cpus])
    assert ask(procs, lambda: sorted(os.sched_getaffinity(0))) == [[cpu] for cpu in cpus]
    procs.stop().get(WAIT_S)


def test_a_bootstrap_command_changes_the_environment_of_that_mesh_only(procs, monkeypatch):
    monkeypatch.setenv("HOME_BEFORE", "here")
    command = default_bootstrap_cmd().with_env({"ONE": "1"})
    changed = this_host().spawn_procs({"gpus": 1}, bootstrap_command=command.with_env({"TWO": "2", "HOME_BEFORE": None}))
    plain = this_host().spawn_procs({"gpus": 1})

    def look():
        return [os.environ.get(name) for name in ("ONE", "TWO", "HOME_BEFORE")]

    assert ask(changed, look) == [["1", "2", None]]
    assert ask(plain, look) == [[None, None, "here"]]
    assert command.env == {"ONE": "1"}
    changed.stop().get(WAIT_S)
    plain.stop().get(WAIT_S)


def test_a_bootstrap_command_may_start_from_an_empty_environment(monkeypatch):
    monkeypatch.setenv("HOME_BEFORE", "here")
    command = default_bootstrap_cmd().with_env({"PATH": os.environ["PATH"]})
    command.inherit_env = False
    procs = this_host().spawn_procs({"gpus": 1}, bootstrap_command=command)
    assert ask(procs, lambda: "HOME_BEFORE" in os.environ) == [False]
    procs.stop().get(WAIT_S)


def test_a_callable_bootstrap_command_gets_the_point_of_each_proc():
    def command(point):
        return default_bootstrap_cmd().with_env({"PLACE": f"{point['rows']}{point['cols']}"})

    procs = this_host().spawn_procs({"rows": 2, "cols": 1}, bootstrap_command=command)
    assert ask(procs, os.getenv, "PLACE") == ["00", "10"]
    procs.stop().get(WAIT_S)


def _raising(point):
    raise LookupError(f"no command for {point.rank}")


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (_raising, "error during mesh configuration: per-rank bootstrap callable raised: .*no command for 0"),
        (lambda point: "python", "per-rank bootstrap callable did not return BootstrapCommand, but 'python', at"),
        (BootstrapCommand("/no/such/program"), r"error creating proc \(host rank 0\)(.|\n)*/no/such/program(.|\n)*check the bootstrap"),
    ],
    ids=["raises", "wrong type", "bad program"],
)
def test_a_bad_bootstrap_command_is_a_value_error_of_initialized(command, text, faults):
    procs = this_host().spawn_procs({"gpus": 2}, bootstrap_command=command)
    for _ in range(2):
        with pytest.raises(ValueError, match=text):
            procs.initialized.get(WAIT_S)
    echo = procs.spawn("echo", Echo)
    with pytest.raises(SupervisionError, match=r"echo\.rank\(\) failed(.|\n)*(bootstrap callable|/no/such/program)"):
        echo.rank.call().get(WAIT_S)
    with pytest.raises(RuntimeError, match=r"error spawning actor mesh: statuses: .*(bootstrap callable|/no/such/program)"):
        echo.initialized.get(WAIT_S)
    assert sorted(failure.crashed_ranks for failure in faults.wait(2)) == [[0], [1]]
    procs.stop().get(WAIT_S)


def test_an_unknown_kind_of_bootstrap_command_is_refused():
    for wrong in ("python", ["python"]):
        with pytest.raises((TypeError, ValueError), match=r"[Bb]ootstrap"):
            this_host().spawn_procs({"gpus": 1}, bootstrap_command=wrong).initialized.get(WAIT_S)


def test_bootstrap_commands_are_values():
    command = default_bootstrap_cmd()
    assert (command.program, command.arg0, command.env) == (sys.executable, None, {})
    assert command == default_bootstrap_cmd() and command.with_env({"A": "1"}) != command
    command.args.append("x")
    assert "x" not in default_bootstrap_cmd().args
    assert "BootstrapCommand(program=" in repr(command)


def test_with_python_executable_serves_direct_and_nested_spawns(tmp_path):
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nWRAPPED=$$ exec {shlex.quote(sys.executable)} "$@"\n')
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)

    class Nested(Actor):
        @endpoint
        async def spawn(self):
            self.procs = this_host().spawn_procs({"gpus": 1})
            return await self.procs.spawn("inspector", Inspector).run.call(os.getenv, "WRAPPED")

    host = this_host().with_python_executable(str(wrapper))
    procs = host.spawn_procs({"gpus": 2})
    own = ask(procs, lambda: (os.environ.get("WRAPPED"), str(os.getpid())))
    assert all(wrapped == pid for wrapped, pid in own)
    nested = procs.spawn("nested", Nested)[0].spawn.call_one().get(WAIT_S).item(gpus=0)
    assert nested is not None and nested not in {pid for _, pid in own}
    procs.stop().get(WAIT_S)


def test_a_module_that_spawns_when_a_proc_imports_it_is_told_to_do_so_elsewhere(tmp_path, run_script):
    (tmp_path / "eager.py").write_text(
        textwrap.dedent("""
            from monarch.actor import Actor, endpoint, this_host

            class Worker(Actor):
                @endpoint
                def step(self): ...

            worker = this_host().spawn_procs(per_host={"gpus": 1}).spawn("worker", Worker)
        """)
    )
    done = run_script(
        """
        import sys
        import monarch.actor
        monarch.actor.unhandled_fault_hook = lambda failure: None
        sys.path.insert(0, sys.argv[1])
        import eager
        print(eager.worker.step.call().exception(20))
        """,
        args=[str(tmp_path)],
    ).check()
    assert "module 'eager' asks for its host or spawns when it is imported" in done.stdout
    assert "eager.py, line 8" in done.stdout and 'move that under `if __name__ == "__main__":`' in done.stdout


def test_procs_get_the_environment_directory_and_path_of_the_moment(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("VALUE = 17\n")
    monkeypatch.setenv("OF_THE_MOMENT", "now")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    procs = this_host().spawn_procs({"gpus": 1})
    monkeypatch.setenv("OF_THE_MOMENT", "later")
    assert ask(procs, lambda: (os.environ["OF_THE_MOMENT"], os.getcwd(), __import__("only_here").VALUE)) == [("now", str(tmp_path), 17)]
    monkeypatch.undo()
    procs.stop().get(WAIT_S)


def test_each_proc_has_its_own_module_globals(procs):
    def count():
        import json

        json.counted = getattr(json, "counted", 0) + 1
        return json.counted

    assert ask(procs, count) == [1, 1]
    assert ask(procs.slice(gpus=1), count) == [2]
    assert ask(procs, count) == [2, 3]


# --- spawning on them ------------------------------------------------------------------------------------------------


def test_actors_on_a_slice_are_renumbered_over_its_extent(grid):
    def who():
        instance = context().actor_instance
        return os.getpid(), str(instance.rank), instance.proc_mesh.sizes

    pids = ask(grid, os.getpid)
    corner = grid.slice(rows=slice(1, None), cols=1)
    assert ask(corner, who) == [(pids[3], "{'rows': 0/2}", {"rows": 2}), (pids[5], "{'rows': 1/2}", {"rows": 2})]
    part = grid.flatten("all").slice(all=slice(1, None, 2))
    expected = [(pids[1], "{'all': 0/3}"), (pids[3], "{'all': 1/3}"), (pids[5], "{'all': 2/3}")]
    assert [(pid, rank) for pid, rank, _ in ask(part, who)] == expected
    assert ask(grid.slice(rows=2, cols=0), who) == [(pids[4], "{}", {})]
    assert ask(grid[-1], who) == [(pids[5], "{}", {})]


def test_a_slice_of_a_mesh_that_is_still_starting_can_be_spawned_on():
    procs = this_host().spawn_procs({"gpus": 4})
    assert procs.slice(gpus=slice(1, 3)).spawn("echo", Echo).rank.call().get(WAIT_S).values() == [0, 1]
    procs.stop().get(WAIT_S)


def test_a_bad_variable_is_told_of_by_the_script_alone(run_script):
    env = {"MONARCH_STALL_ENDPOINT_LIMIT": "abc", "MONARCH_STALL_MAILBOX_LIMITS": "4"}
    done = run_script("from monarch.actor import this_host; this_host().spawn_procs().initialized.get()", env=env).check()
    assert done.stderr.splitlines()[::2] == [
        "ignored MONARCH_STALL_ENDPOINT_LIMIT='abc': Invalid duration format; expected text such as '30s', '500ms' or '1m 30s'; "
        "None is allowed too",
        "the environment variable MONARCH_STALL_MAILBOX_LIMITS is unknown; did you mean MONARCH_STALL_MAILBOX_LIMIT?",
    ]


def test_a_wrong_keyword_of_spawn_procs_says_what_was_meant():
    for wrong in ({"gpus": 2}, {"per_hosts": {"gpus": 2}}):
        with pytest.raises(TypeError, match=r"spawn_procs\(\) has no argument '.*'; did you mean per_host=\{'gpus': 2\}\?\n  next:  its"):
            this_host().spawn_procs(**wrong)
    with pytest.raises(TypeError, match=r"has no argument 'nam'; did you mean 'name'\?"):
        this_host().spawn_procs(nam="x")


def test_wrong_classes_and_arguments_are_refused_at_the_spawn(procs):
    class NoActor:
        pass

    for wrong in (NoActor, 5, "Echo", Echo.echo, None):
        with pytest.raises(ValueError, match=r"must subclass monarch\.service\.Actor to spawn it\.\n  next:  derive it from monarch"):
            procs.spawn("wrong", wrong)

    class Picky(Actor):
        def __init__(self, first, *, key):
            pass

        @endpoint
        async def touch(self):
            pass

    with pytest.raises(TypeError, match=r"missing a required argument: 'first'\n  where: call of Picky\.__init__\(first, \*, key"):
        procs.spawn("picky", Picky)
    with pytest.raises(TypeError, match=r"missing a required (keyword-only )?argument: 'key'"):
        procs.spawn("picky", Picky, 1)
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'other'"):
        procs.spawn("picky", Picky, 1, key=2, other=3)
    with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock' object"):
        procs.spawn("picky", Picky, threading.Lock(), key=2)
    assert procs.spawn("picky", Picky, 1, key=2).touch.call().get(WAIT_S).values() == [None, None]


def test_surplus_arguments_of_a_class_without_init_fail_the_actor(procs, faults):
    with pytest.raises(SupervisionError, match=r"TypeError: .*argument"):
        procs.slice(gpus=0).spawn("echo", Echo, "surplus").rank.call().get(WAIT_S)
    faults.wait(1)


def test_initialized_is_true_for_procs_and_none_for_actors_also_of_views(procs):
    assert procs.initialized.get(WAIT_S) is True
    assert procs.slice(gpus=1).initialized.get(WAIT_S) is True
    assert this_host().initialized.get(WAIT_S) is True
    assert this_proc().initialized.get(WAIT_S) is True
    echo = procs.spawn("echo", Echo)
    assert echo.initialized.get(WAIT_S) is None
    assert echo.slice(gpus=0).initialized.get(WAIT_S) is None


def test_initialized_of_actors_waits_for_no_init(faults):
    class Slow(Actor):
        def __init__(self, port):
            port.send("begun")
            self.gate = threading.Event()
            self.gate.wait(WAIT_S)

        @endpoint
        def touch(self):
            pass

    port, receiver = Channel[str].open()
    own = this_host().spawn_procs()
    slow = own.spawn("slow", Slow, port)
    assert slow.initialized.get(WAIT_S) is None
    assert receiver.recv().get(WAIT_S) == "begun"
    os.kill(own.spawn("inspector", Inspector).run.call_one(os.getpid).get(WAIT_S), 9)
    with pytest.raises(SupervisionError, match="SIGKILL"):
        slow.touch.call_one().get(WAIT_S)
    [failure] = faults.wait(1)
    assert len(failure.faults) == 2


# --- ending them -----------------------------------------------------------------------------------------------------


def test_stop_ends_the_processes_and_can_be_repeated_from_many_threads():
    procs = this_host().spawn_procs({"gpus": 2})
    echo = procs.spawn("echo", Echo)
    pids = echo.pid.call().get(WAIT_S).values()
    outcomes = []
    threads = [threading.Thread(target=lambda: outcomes.append(procs.stop().get(WAIT_S))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [None] * 4
    assert all(map(is_gone, pids))
    assert procs.stop().get(WAIT_S) is None
    with pytest.raises(SupervisionError, match=r"echo\.rank\(\) failed, (.|\n)*stop"):
        echo.rank.call().get(WAIT_S)
    again = this_host().spawn_procs({"gpus": 2})
    assert again.spawn("echo", Echo).rank.call().get(WAIT_S).values() == [0, 1]
    again.stop().get(WAIT_S)


def test_stop_begins_without_being_waited_for():
    procs = this_host().spawn_procs()
    pid = procs.spawn("echo", Echo).pid.call_one().get(WAIT_S)
    procs.stop()
    gc.collect()
    wait_until(lambda: is_gone(pid))


def test_stop_succeeds_when_the_processes_have_died_before(faults):
    procs = this_host().spawn_procs({"gpus": 2})
    pids = procs.spawn("echo", Echo).pid.call().get(WAIT_S).values()
    os.kill(pids[0], 9)
    faults.wait(1)
    assert procs.stop().get(WAIT_S) is None
    assert all(map(is_gone, pids))


def test_a_stop_right_after_the_spawn_is_fine():
    procs = this_host().spawn_procs({"gpus": 2})
    echo = procs.spawn("echo", Echo)
    assert procs.stop().get(WAIT_S) is None
    with pytest.raises(RuntimeError, match="stop"):
        echo.rank.call().get(WAIT_S)


def test_nothing_is_spawned_on_a_stopped_mesh():
    procs = this_host().spawn_procs({"gpus": 2})
    procs.initialized.get(WAIT_S)
    procs.stop().get(WAIT_S)
    echo = procs.spawn("echo", Echo)
    with pytest.raises(RuntimeError, match="`ProcMesh` has already been stopped"):
        echo.initialized.get(WAIT_S)
    with pytest.raises(RuntimeError, match="stop"):
        echo.rank.call().get(WAIT_S)
    assert procs.slice(gpus=0).spawn("echo", Echo).initialized.exception(WAIT_S) is not None


async def test_async_with_stops_at_its_end_whatever_happens():
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        pids = (await procs.spawn("echo", Echo).pid()).values()
    assert all(map(is_gone, pids))
    with pytest.raises(RuntimeError, match="`ProcMesh` has already been stopped"):
        async with procs:
            pass
    with pytest.raises(KeyError, match="of the body"):
        async with this_host().spawn_procs() as procs:
            pid = await procs.spawn("echo", Echo).pid()
            raise KeyError("of the body")
    assert is_gone(pid)


def test_only_the_whole_owned_mesh_is_stopped(procs, grid):
    with pytest.raises(ValueError, match=r"ProcMesh is not owned; must be stopped by an owner\n  where: mesh 'grid', extent \{cols: 2\}"):
        grid.slice(rows=0).stop()
    assert grid.slice() is grid
    with pytest.raises(ValueError, match="ProcMesh is not owned"):
        this_proc().stop()
    assert len(grid.spawn("echo", Echo).rank.call().get(WAIT_S)) == 6


def test_finalisers_of_module_globals_run_when_the_mesh_stops(tmp_path):
    class Witness:
        def __init__(self, path):
            self.file = open(path, "w")  # noqa: SIM115  # while the interpreter finalises, nothing is opened any more

        def __del__(self):
            self.file.write("finalised")
            self.file.close()

    def bootstrap():
        import json

        json.witness = Witness(tmp_path / str(os.getpid()))

    procs = this_host().spawn_procs({"gpus": 2}, bootstrap)
    pids = ask(procs, os.getpid)
    procs.stop().get(WAIT_S)
    assert [(tmp_path / str(pid)).read_text() for pid in pids] == ["finalised"] * 2


def test_actors_finish_what_is_queued_and_clean_up_when_they_are_stopped(procs):
    port, receiver = Channel[object].open()

    class Tidy(Actor):
        def __init__(self, port, log):
            self.port, self.log = port, log

        @endpoint
        def work(self, number):
            self.port.send(number)

        def __cleanup__(self, exc):
            self.port.send(("cleanup", exc, self.log.add.call_one("bye").get(WAIT_S)))

    log = procs.spawn("log", Log)
    tidy = procs.slice(gpus=0).spawn("tidy", Tidy, port, log.slice(gpus=1))
    for number in range(20):
        tidy.work.broadcast(number)
    assert tidy.stop("done with it").get(WAIT_S) == ()
    assert tidy.stop().get(WAIT_S) == ()
    assert [receiver.recv().get(WAIT_S) for _ in range(21)] == [*range(20), ("cleanup", None, "bye")]
    assert log.items.call().get(WAIT_S).values() == [[], ["bye"]]
    with pytest.raises(SupervisionError, match=r"has status: stopped: .*explicit stop request \(done with it\)(.|\n)*spawn a new one"):
        tidy.work.call_one(1).get(WAIT_S)


def test_an_actor_stops_itself_after_the_current_message(procs, faults):
    port, receiver = Channel[object].open()

    class Mortal(Actor):
        def __init__(self, port):
            self.port = port

        @endpoint
        def die(self):
            context().actor_instance.stop("had enough")
            return "last words"

        def __cleanup__(self, exc):
            self.port.send(exc)

    mortal = procs.slice(gpus=0).spawn("mortal", Mortal, port)
    assert mortal.die.call_one().get(WAIT_S) == "last words"
    assert receiver.recv().get(WAIT_S) is None
    with pytest.raises(SupervisionError, match="has status: stopped: had enough"):
        mortal.die.call_one().get(WAIT_S)
    assert not faults.seen


def test_an_actor_that_aborts_itself_fails(procs, faults):
    class Doomed(Actor):
        @endpoint
        async def abort(self, reason=None):
            context().actor_instance.abort(reason)
            await asyncio.Event().wait()

    for reason, text in (("bad state", "bad state"), (None, r"\(no reason provided\)")):
        with pytest.raises(SupervisionError, match=f"actor explicitly aborted due to: {text}"):
            procs.slice(gpus=0).spawn("doomed", Doomed).abort.call_one(reason).get(WAIT_S)
    assert [failure.crashed_ranks for failure in faults.wait(2)] == [[0], [0]]


def test_what_an_actor_owns_ends_with_it(procs):
    port, receiver = Channel[object].open()

    class Child(Actor):
        def __init__(self, port):
            self.port = port
            port.send("born")

        @endpoint
        async def touch(self):
            return os.getpid()

        async def __cleanup__(self, exc):
            self.port.send("child cleaned up")

    class Owner(Actor):
        def __init__(self, port, procs):
            self.own = this_host().spawn_procs()
            self.here = self.own.spawn("child", Child, port)
            self.there = procs.spawn("child", Child, port)

        @endpoint
        async def pids(self):
            return await self.here.touch(), (await self.there.touch())

    owner = procs.slice(gpus=0).spawn("owner", Owner, port, procs.slice(gpus=slice(1, 2)))
    own, there = owner.pids.call_one().get(WAIT_S)
    owner.stop().get(WAIT_S)
    assert sorted(receiver.recv().get(WAIT_S) for _ in range(4)) == ["born"] * 2 + ["child cleaned up"] * 2
    wait_until(lambda: is_gone(own))
    assert there == ask(procs, os.getpid)[1]


def test_what_cleanup_sends_arrives_although_the_process_ends():
    port, receiver = Channel[int].open()

    class Last(Actor):
        def __init__(self, port):
            self.port = port

        @endpoint
        async def touch(self):
            pass

        async def __cleanup__(self, exc):
            for number in range(200):
                self.port.send((number, bytes(100_000)))

    class Owner(Actor):
        def __init__(self, port):
            self.procs = this_host().spawn_procs()
            self.last = self.procs.spawn("last", Last, port)

        @endpoint
        async def ready(self):
            await self.last.touch()

    procs = this_host().spawn_procs()
    owner = procs.spawn("owner", Owner, port)
    owner.ready.call_one().get(WAIT_S)
    owner.stop().get(WAIT_S)
    assert [receiver.recv().get(2)[0] for _ in range(200)] == list(range(200))
    procs.stop().get(WAIT_S)


def test_a_cleanup_that_takes_too_long_is_given_up(procs):
    from monarch.config import configured

    class Slow(Actor):
        @endpoint
        def touch(self):
            pass

        def __cleanup__(self, exc):
            threading.Event().wait()

    class AsyncSlow(Actor):
        @endpoint
        async def touch(self):
            pass

        async def __cleanup__(self, exc):
            await asyncio.Event().wait()

    with configured(cleanup_timeout="50ms"):
        own = this_host().spawn_procs()
        for cls in (Slow, AsyncSlow):
            slow = own.spawn("slow", cls)
            slow.touch.call_one().get(WAIT_S)
            assert slow.stop().get(WAIT_S) == ()
        own.stop().get(WAIT_S)


# --- looking at them -------------------------------------------------------------------------------------------------


def test_activity_shows_what_every_actor_is_doing(procs):
    class Busy(Actor):
        @endpoint
        def work(self, port):
            port.send("begun")
            self.receiver.recv().get()

        @endpoint
        def open(self):
            port, self.receiver = Channel.open()
            return port

    busy = procs.slice(gpus=1).spawn("busy", Busy)
    release = busy.open.call_one().get(WAIT_S)
    port, receiver = Channel[str].open()
    working = busy.work.call_one(port)
    receiver.recv().get(WAIT_S)
    for _ in range(3):
        busy.work.broadcast(port)

    def row():
        [found] = [row for row in procs.activity().get(WAIT_S) if row.name == "busy"]
        return found

    shown = wait_until(lambda: row() if row().waiting == 3 else None)
    assert (shown.endpoint, shown.state, shown.handled, shown.rank) == ("work", "busy", 1, 0)
    assert shown.running_s >= 0 and shown.pid == ask(procs, os.getpid)[1]
    assert shown.actor.endswith("Busy busy{}>")
    release.send(None)
    working.get(WAIT_S)
    for _ in range(3):
        release.send(None)
    idle = wait_until(lambda: row() if row().state == "idle" else None)
    assert (idle.endpoint, idle.waiting, idle.handled) == (None, 0, 5)
    busy.stop().get(WAIT_S)
    assert not [row for row in procs.activity().get(WAIT_S) if row.name == "busy"]
    local = this_proc().spawn("local", Echo)
    local.rank.call_one().get(WAIT_S)
    assert "local" in [row.name for row in this_proc().activity().get(WAIT_S)]
    local.stop().get(WAIT_S)


async def test_logging_option_sets_the_level_everywhere_and_checks_its_arguments(procs):
    await procs.logging_option(level=logging.ERROR)
    inspector = procs.spawn("inspector", Inspector)
    assert (await inspector.run.call(lambda: logging.getLogger().level)).values() == [logging.ERROR] * 2
    await procs.logging_option(stream_to_client=True, aggregate_window_sec=3)
    assert (await inspector.run.call(lambda: logging.getLogger().level)).values() == [logging.INFO] * 2
    for level in (-1, 256):
        with pytest.raises(ValueError, match=f"Invalid logging level: {level}; expected 0 to 255"):
            await procs.logging_option(level=level)
    with pytest.raises(RuntimeError, match="cannot set aggregate window without streaming to client; pass stream_to_client=True"):
        await procs.logging_option(aggregate_window_sec=3)
    for window, error in ((0, ValueError), (-1, ValueError), (float("nan"), ValueError), (True, TypeError), ("3", TypeError)):
        with pytest.raises(error, match=f"aggregate_window_sec is {window!r}; expected .*\n  next: .*None"):
            await procs.logging_option(stream_to_client=True, aggregate_window_sec=window)


def test_spawn_callbacks_are_called_once_per_new_mesh():
    seen, twice = [], []
    register_proc_mesh_spawn_callback(seen.append)
    register_proc_mesh_spawn_callback(twice.append)
    procs = this_host().spawn_procs({"gpus": 2})
    assert seen == [procs] and twice == [procs] and seen[0] is procs
    unregister_proc_mesh_spawn_callback(seen.append)
    other = this_host().spawn_procs()
    assert seen == [procs] and twice == [procs, other]
    unregister_proc_mesh_spawn_callback(twice.append)
    with pytest.raises(ValueError, match="is not registered as a spawn callback"):
        unregister_proc_mesh_spawn_callback(twice.append)
    assert {procs, other} <= set(get_active_proc_meshes())
    procs.stop().get(WAIT_S)
    other.stop().get(WAIT_S)
    assert not {procs, other} & set(get_active_proc_meshes())


def test_hosts_and_procs_know_each_other(procs):
    assert this_proc().host_mesh == this_host() == this_host()
    assert procs.slice(gpus=1).host_mesh == this_host()
    with pytest.raises(NotImplementedError, match=r"`ProcMesh.host_mesh` is not yet supported for non-singleton proc meshes\n  where: "):
        procs.host_mesh

    class Local(Actor):
        @endpoint
        async def look(self):
            return this_host(), this_proc(), context().actor_instance.proc_mesh, this_proc() is context().actor_instance.proc

    for rank, (host, proc, mesh, same) in enumerate(procs.spawn("local", Local).look.call().get(WAIT_S).values()):
        assert host == this_host() and mesh == procs and same
        assert proc == procs.slice(gpus=rank)
    assert context().actor_instance.proc_mesh == this_proc()


def test_this_host_can_not_be_stopped(procs):
    for name, word in (("shutdown", "shut down"), ("stop", "stop")):
        with pytest.raises(RuntimeError, match=rf"cannot {word} `HostMesh` that is a reference instead of owned(.|\n)*shutdown_context"):
            getattr(this_host(), name)()

    async def use():
        async with this_host() as host:
            assert host == this_host()

    with pytest.raises(RuntimeError, match="cannot shut down `HostMesh`"):
        asyncio.run(use())
    assert (this_host().sizes, this_host().stream_logs, this_host().is_fake_in_process) == ({}, False, False)
    with pytest.raises(TypeError, match="unhashable"):
        hash(this_host())
    assert len(procs.spawn("echo", SyncEcho).rank.call().get(WAIT_S)) == 2


async def test_what_needs_more_than_this_version_says_so(procs):
    with pytest.raises(NotImplementedError, match="sync_workspace is a method of HostMesh"):
        await procs.sync_workspace("w")
    root = context().actor_instance
    for use in (procs.activate, procs.rank_tensors, lambda: procs.rank_tensor("gpus"), lambda: root.spawn_tensor_engine(procs)):
        with pytest.raises((RuntimeError, NotImplementedError), match="tensor engine"):
            use()


# --- the client ------------------------------------------------------------------------------------------------------


def test_an_invalid_timeout_of_shutdown_is_refused():
    for wrong in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="invalid timeout"):
            shutdown_context(wrong)
    assert this_host().initialized.get(WAIT_S) is True


def test_shutdown_ends_everything_and_is_idempotent(run_script):
    run_script(
        """
        import os, time
        from monarch.actor import Actor, endpoint, this_host, shutdown_context
        from monarch.actor.process import known_process

        assert shutdown_context().get() is None and known_process() is None  # no client yet: nothing happens

        class Echo(Actor):
            @endpoint
            def pid(self):
                return os.getpid()

        procs = this_host().spawn_procs({"gpus": 3})
        pids = procs.spawn("echo", Echo).pid.call().get(10).values()
        procs.spawn("unused", Echo)
        assert shutdown_context().get(10) is None
        assert shutdown_context(2.0).get(10) is None
        for pid in pids:
            assert not os.path.exists(f"/proc/{pid}"), pid
        """
    ).check()


def test_a_program_that_ends_without_stopping_leaves_nothing(run_script):
    run_script(
        """
        import threading
        from monarch.actor import Actor, endpoint, this_host

        class Endless(Actor):
            @endpoint
            def wait(self):
                threading.Event().wait()

        this_host().spawn_procs({"gpus": 2}).spawn("endless", Endless).wait.broadcast()
        """
    ).check()


def test_gates_of_two_meshes_do_not_mix(procs, grid):
    one, other = procs.spawn("gate", Gate), grid.spawn("gate", Gate)
    waiting = one.wait.call(1), other.wait.call(2)
    other.open.call().get(WAIT_S)
    assert waiting[1].get(WAIT_S).values() == [2] * 6
    with pytest.raises(TimeoutError):
        waiting[0].get(0.01)
    one.open.call().get(WAIT_S)
    assert waiting[0].get(WAIT_S).values() == [1, 1]
