"""Scenarios from real use: programs, what happens to them, and what their author must see."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from monarch import config
from monarch.actor import Actor, ActorError, concurrent_endpoint, current_rank, default_bootstrap_cmd, endpoint, this_host
from monarch.testing import leaks
from system.conftest import requires_torch
from system.script import run_script, start_script
from system.waiting import error_of, is_gone, wait_until

if TYPE_CHECKING:
    from system.recorder import Recorder

pytest_plugins = ["system.recorder"]
pytestmark = pytest.mark.usefixtures("faults")


class Worker(Actor):
    """What the scenarios need an actor to do."""

    def __init__(self) -> None:
        self.items: list[int] = []

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def work(self) -> None:
        if current_rank()["procs"] == 2:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    @endpoint
    def add(self, i: int) -> None:
        self.items.append(i)

    @endpoint
    def read(self) -> list[int]:
        return self.items

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def generate(self) -> Any:
        return (i for i in range(3))

    @endpoint
    def take(self, value: Any) -> None:
        pass

    @endpoint
    def fail_over_http(self) -> None:
        raise HttpFail(code=503)

    @endpoint
    def sleep_deaf(self) -> None:
        # `signal.signal` is for main threads; the C library's is for all.
        ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(1))
        time.sleep(600)

    @endpoint
    def start_grandchildren(self, marker: str) -> list[int]:
        command = [sys.executable, "-c", "import time; time.sleep(600)", marker]
        children = [subprocess.Popen(command), subprocess.Popen(command, start_new_session=True)]
        return [child.pid for child in children]

    @endpoint
    def hold_interpreter_lock(self, seconds: int) -> str:
        ctypes.PyDLL(None).sleep(seconds)
        return "held"


class SlowReader(Actor):
    def __init__(self) -> None:
        self.count = 0

    @endpoint
    def read(self, blob: bytes) -> None:
        self.count += 1
        time.sleep(0.001)

    @endpoint
    def total(self) -> int:
        return self.count


class HttpFail(Exception):
    """Pickles, but does not load: its constructor takes no positional argument."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"status {code}")
        self.code = code


def test_a_call_in_flight_ends_when_a_process_dies(faults: Recorder) -> None:
    with config.configured(stop_actor_timeout="100ms"):
        procs = this_host().spawn_procs({"procs": 4})
    call = procs.spawn("crew", Worker).work.call()
    began = time.monotonic()
    error = error_of(call)
    assert time.monotonic() - began < 10
    for part in ("work", "Worker", "{'procs': 2/4}", "rank 2", "signal 9 (SIGKILL)"):
        assert part in str(error)
    for failure in faults.wait(1):
        assert failure.crashed_ranks == [2]
        assert "{'procs': 2/4}" in failure.report()
    began = time.monotonic()
    assert error_of(call, timeout=0) is error
    assert time.monotonic() - began < 0.1
    procs.stop().get(20)


class Gate(Actor):
    def __init__(self) -> None:
        import asyncio

        self.event = asyncio.Event()

    @endpoint
    async def wait(self) -> str:
        await self.event.wait()
        return "released"

    @endpoint
    async def release(self) -> None:
        self.event.set()


class ConcurrentGate(Gate):
    @concurrent_endpoint
    async def wait(self) -> str:
        await self.event.wait()
        return "released"


def test_an_actor_that_waits_for_its_own_next_message_is_seen_wedged_and_can_be_stopped() -> None:
    with config.configured(stop_actor_timeout="1s"):
        procs = this_host().spawn_procs()
        gate = procs.spawn("gate", Gate)
        wait, release = gate.wait.call_one(), gate.release.call_one()
        wait_until(lambda: [row.endpoint for row in procs.activity().get(5)] == ["wait"])
        with pytest.raises(TimeoutError):
            wait.get(3)
        with pytest.raises(TimeoutError):
            release.get(0)
        [row] = procs.activity().get(5)
        assert (row.endpoint, row.waiting, row.state, row.name) == ("wait", 1, "busy", "gate")
        assert row.running_s == pytest.approx(3, abs=0.5)
        procs.stop().get(15)
        for future in (wait, release):
            assert "stopped" in str(error_of(future, timeout=2))


def test_concurrent_endpoints_overlap() -> None:
    procs = this_host().spawn_procs()
    gate = procs.spawn("gate", ConcurrentGate)
    wait, release = gate.wait.call_one(), gate.release.call_one()
    release.get(2)
    assert wait.get(2) == "released"
    procs.stop().get(15)


def test_messages_arrive_in_order_whatever_view_they_were_sent_through() -> None:
    procs = this_host().spawn_procs({"procs": 4})
    crew, slow = procs.spawn("crew", Worker), procs.spawn("slow", SlowReader)
    blob = bytes(20_000)
    flood = threading.Thread(target=lambda: [slow.read.broadcast(blob) for _ in range(2000)])
    flood.start()
    first = crew.slice(procs=0)
    for i in range(2000):
        (first if i % 2 else crew).add.broadcast(i)
    items = list(crew.read.call().get(60).values())
    assert items == [list(range(2000))] + 3 * [list(range(0, 2000, 2))]
    flood.join(60)
    assert list(slow.total.call().get(60).values()) == [2000] * 4
    procs.stop().get(20)


def test_an_unpicklable_argument_or_result_names_its_type_and_hurts_nobody() -> None:
    procs = this_host().spawn_procs()
    worker = procs.spawn("worker", Worker)
    pid = worker.pid.call_one().get(5)
    with pytest.raises(TypeError, match="lock"):
        worker.echo.call_one(threading.Lock()).get(5)
    with pytest.raises(ActorError, match=r"(?s)worker\.generate.*generator"):
        worker.generate.call_one().get(5)
    assert worker.pid.call_one().get(5) == pid
    procs.stop().get(15)


def test_an_exception_with_an_unusual_constructor_arrives_as_what_it_is() -> None:
    procs = this_host().spawn_procs()
    worker = procs.spawn("worker", Worker)
    with pytest.raises(ActorError, match=r"HttpFail: status 503") as caught:
        worker.fail_over_http.call_one().get(5)
    assert isinstance(caught.value.exception, HttpFail)
    assert caught.value.exception.code == 503
    assert "argument" not in str(caught.value)
    assert worker.echo.call_one(1).get(5) == 1
    procs.stop().get(15)


class OnlyHere:
    """Loads in the process that made it and nowhere else."""

    def __reduce__(self) -> Any:
        return _load_only_in, (os.getpid(),)


def _load_only_in(pid: int) -> OnlyHere:
    if os.getpid() != pid:
        raise ImportError("only_on_client")
    return OnlyHere()


def test_an_argument_that_does_not_load_fails_the_call_and_not_the_actor() -> None:
    procs = this_host().spawn_procs({"procs": 2})
    crew = procs.spawn("crew", Worker)
    pids = list(crew.pid.call().get(5).values())
    with pytest.raises(ActorError, match=r"(?s)crew\.take.*only_on_client") as caught:
        crew.take.call(OnlyHere()).get(5)
    assert isinstance(caught.value.exception, ImportError)
    assert list(crew.pid.call().get(5).values()) == pids
    procs.stop().get(15)


ONLY_BROADCASTS = """
import gc, time
from monarch.actor import Actor, endpoint, this_host

class Bomb(Actor):
    @endpoint
    def boom(self):
        raise RuntimeError("boom-7")

mesh = this_host().spawn_procs(per_host={"procs": 2}).spawn("bomb", Bomb)
mesh.boom.broadcast()
FORGET
time.sleep(30)
print("done")
"""


@pytest.mark.parametrize("then", ["", "del mesh; gc.collect()"], ids=["kept", "forgotten"])
def test_a_program_that_only_broadcasts_still_fails_loudly(then: str) -> None:
    done = run_script(ONLY_BROADCASTS.replace("FORGET", then), timeout=10)
    assert done.returncode != 0 and not done.leftovers, done
    assert "RuntimeError: boom-7" in done.stderr and re.search(r'File ".*script\.py", line 8, in boom', done.stderr), done
    assert done.stdout == ""


TAKES_LONG = """
import asyncio, sys, threading, time
from monarch.actor import Actor, endpoint, this_host

class Worker(Actor):
    def __init__(self):
        print("up", flush=True)

    @endpoint
    def work(self):
        time.sleep(600)

mesh = this_host().spawn_procs(per_host={"procs": 2}).spawn("worker", Worker)
mesh.initialized.get()

async def main():
    print("ready", flush=True)
    await mesh.work.call()

def block():
    mesh.work.call().get()

"""


@pytest.mark.parametrize(
    "block",
    [
        "threading.Thread(target=block).start(); print('ready', flush=True); time.sleep(600)",
        "print('ready', flush=True); block()",
        "asyncio.run(main())",
    ],
    ids=["another thread", "get", "asyncio"],
)
def test_one_ctrl_c_is_enough(block: str) -> None:
    with start_script(TAKES_LONG + block) as run:
        run.wait_line("^ready$")
        began = time.monotonic()
        os.kill(run.pid, signal.SIGINT)
        done = run.finish(8, grace_s=0.5)
        assert time.monotonic() - began < 8
    assert done.returncode in (1, 130, -signal.SIGINT) and not done.leftovers, done
    assert "KeyboardInterrupt" in done.stderr and len(done.stderr.splitlines()) <= 60, done


BROADCASTS_WHAT_DOES_NOT_LOAD = """
import os, time
from monarch.actor import Actor, endpoint, this_host

client = os.getpid()

class OnlyHere:
    def __reduce__(self):
        return load, (client,)

def load(pid):
    if os.getpid() != pid:
        raise ImportError("only_on_client")
    return OnlyHere()

class Taker(Actor):
    @endpoint
    def take(self, value):
        pass

taker = this_host().spawn_procs(per_host={"procs": 2}).spawn("taker", Taker)
taker.take.broadcast(OnlyHere())
time.sleep(30)
print("done")
"""


def test_a_broadcast_argument_that_does_not_load_ends_the_program() -> None:
    done = run_script(BROADCASTS_WHAT_DOES_NOT_LOAD, timeout=10)
    assert done.returncode != 0 and not done.leftovers, done
    assert "ImportError" in done.stderr and "only_on_client" in done.stderr
    assert "done" not in done.stdout


def test_stop_means_stopped_also_for_actors_that_sleep_and_ignore_signals() -> None:
    with config.configured(stop_actor_timeout="1s", cleanup_timeout="1s"):
        procs = this_host().spawn_procs({"procs": 4})
        crew = procs.spawn("crew", Worker)
        pids = list(crew.pid.call().get(10).values())
        crew.sleep_deaf.broadcast()
        wait_until(lambda: [row.endpoint for row in procs.activity().get(5)] == ["sleep_deaf"] * 4)
        began = time.monotonic()
        procs.stop().get(20)
        assert [pid for pid in pids if not is_gone(pid)] == []
        assert time.monotonic() - began < 20
        began = time.monotonic()
        procs.stop().get(1)
        assert time.monotonic() - began < 0.1
        assert "stopped" in str(error_of(crew.pid.call(), timeout=2))


@pytest.mark.parametrize("way", ["stopped", "killed"])
def test_grandchildren_go_with_their_actor(faults: Recorder, way: str) -> None:
    marker = f"marker-{uuid.uuid4().hex}"
    procs = this_host().spawn_procs()
    worker = procs.spawn("worker", Worker)
    pid = worker.pid.call_one().get(5)
    grandchildren = worker.start_grandchildren.call_one(marker).get(5)
    assert sorted(_with_argument(marker)) == sorted(grandchildren)
    if way == "stopped":
        procs.stop().get(15)
        assert _with_argument(marker) == []
        assert faults.seen == []
    else:
        os.kill(pid, signal.SIGKILL)
        [failure] = faults.wait(1)
        assert "signal 9 (SIGKILL)" in failure.report()
        wait_until(lambda: not _with_argument(marker), timeout=15)
        procs.stop().get(15)


def _with_argument(marker: str) -> list[int]:
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if marker in leaks.command(pid)]


ENDS_CLEANLY = """
from monarch.actor import Actor, endpoint, this_host

class Echo(Actor):
    @endpoint
    def echo(self, value):
        return value

procs = this_host().spawn_procs(per_host={"procs": 2})
assert list(procs.spawn("echo", Echo).echo.call(1).get().values()) == [1, 1]
"""


@pytest.mark.timeout(90)
@pytest.mark.parametrize("last_line", ["procs.stop().get()", ""], ids=["stopped", "not stopped"])
def test_a_clean_end_is_silent_and_has_status_0(last_line: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        runs = list(pool.map(lambda _: run_script(ENDS_CLEANLY + last_line), range(12)))
    for done in runs:
        done.check(0)
        assert done.stderr == ""


NOTES_ITS_START = """
import os, sys
with open(os.path.join(os.environ["NOTES"], os.environ.get("MARK", "client") + f"-{os.getpid()}"), "w") as file:
    print(os.environ.get("MARK"), *(name for name in sys.modules if name.partition(".")[0] == "torch"), file=file)
"""


class Threads(Actor):
    @endpoint
    def count(self) -> tuple[int, str, str]:
        import torch

        return torch.get_num_threads(), os.environ["MARK"], os.environ["OMP_NUM_THREADS"]


@requires_torch
def test_the_environment_is_there_before_the_first_import(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NOTES_ITS_START)
    before = dict(os.environ)
    path = os.pathsep.join(filter(None, [str(tmp_path), before.get("PYTHONPATH")]))
    command = default_bootstrap_cmd().with_env({"PYTHONPATH": path, "NOTES": str(tmp_path), "OMP_NUM_THREADS": "1"})
    procs = this_host().spawn_procs({"procs": 2}, bootstrap_command=lambda point: command.with_env({"MARK": f"r{point['procs']}"}))
    counts = list(procs.spawn("threads", Threads).count.call().get(60).values())
    assert counts == [(1, "r0", "1"), (1, "r1", "1")]
    notes = {note.name.split("-")[0]: note.read_text().split() for note in tmp_path.glob("r*-*")}
    assert notes == {"r0": ["r0"], "r1": ["r1"]}
    assert dict(os.environ) == before
    procs.stop().get(15)


def test_a_held_interpreter_lock_is_no_death_and_a_stopped_process_is(faults: Recorder) -> None:
    with config.configured(proc_stopped_limit="1s"):
        procs = this_host().spawn_procs({"procs": 2})
        crew = procs.spawn("crew", Worker)
        pids = list(crew.pid.call().get(5).values())
        holding = crew.slice(procs=1).hold_interpreter_lock.call_one(4)
        began = time.monotonic()
        wait_until(lambda: procs.activity().get(5)[1].state == "busy")
        while holding.exception(timeout=0.25) is not None:
            asked = time.monotonic()
            assert crew.slice(procs=0).pid.call_one().get(5) == pids[0]
            row = procs.activity().get(5)[1]
            assert time.monotonic() - asked < 1
            assert (row.endpoint, row.state) in (("hold_interpreter_lock", "busy"), (None, "idle"))
        assert time.monotonic() - began == pytest.approx(4, abs=1)
        assert holding.get() == "held"
        assert faults.seen == []

        os.kill(pids[1], signal.SIGSTOP)
        wait_until(lambda: procs.activity().get(5)[1].state == "stopped")
        [failure] = faults.wait(1, timeout=3)
        assert failure.crashed_ranks == [1]
        assert "SIGSTOP" in failure.report() and "proc_stopped_limit" in failure.report()
        assert crew.slice(procs=0).pid.call_one().get(5) == pids[0]
        procs.stop().get(15)
