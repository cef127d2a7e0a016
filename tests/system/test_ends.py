"""How a program ends that has work under way: with the right status, and without noise about what its own end has caused."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from system.script import Run, run_script, start_script
from system.waiting import is_gone, wait_until

BUSY = """
import os, signal, sys, time
from monarch.actor import Actor, endpoint, shutdown_context, this_host

class Worker(Actor):
    @endpoint
    def nap(self, seconds):
        time.sleep(seconds)

    @endpoint
    def note(self):
        pass

    @endpoint
    def boom(self):
        raise RuntimeError("boom-7")

    @endpoint
    def lean_on(self, other):
        other.nap.call_one(60).get()

procs = this_host().spawn_procs(per_host={"procs": 2})
crew = procs.spawn("crew", Worker)
crew.note.call().get()
first, last = crew.slice(procs=0), crew.slice(procs=1)
"""
SOON = {"HYPERACTOR_STOP_ACTOR_TIMEOUT": "100ms"}
WAYS_TO_END = {
    "returns": ("", 0, ""),
    "shuts down": ("shutdown_context().get(); print('went on')", 0, "went on\n"),
    "interrupted": ("os.kill(os.getpid(), signal.SIGINT)", 130, ""),
}
ways_to_end = pytest.mark.parametrize("way", WAYS_TO_END)
CONSEQUENCES = {
    "a message that waits behind a long one comes back": "crew.nap.broadcast(5); crew.note.broadcast()",
    "an actor loses the one that it waits for": "last.nap.broadcast(5); first.lean_on.broadcast(last)",
    "procs are not up yet": "this_host().spawn_procs({'procs': 4}).spawn('late', Worker).note.broadcast()",
}


@ways_to_end
@pytest.mark.parametrize("consequence", CONSEQUENCES)
def test_what_the_end_of_a_program_causes_is_no_failure(consequence: str, way: str) -> None:
    line, status, stdout = WAYS_TO_END[way]
    done = run_script(BUSY + CONSEQUENCES[consequence] + "\n" + line, env=SOON)
    assert done.returncode in (status, -signal.SIGINT if status else status) and not done.leftovers, done
    assert done.stdout == stdout, done
    if status:
        assert done.stderr.startswith("Traceback") and done.stderr.endswith("\nKeyboardInterrupt\n"), done
    else:
        assert done.stderr == "", done


def test_a_failure_on_the_way_out_is_shown_and_does_not_disturb_the_end() -> None:
    done = run_script(BUSY + "first.boom.broadcast()").check(0)
    assert "boom-7" in done.stderr and "crew{'procs': 0/2}" in done.stderr, done
    assert "KeyboardInterrupt" not in done.stderr


def test_a_failure_before_the_end_is_reported_to_the_hook() -> None:
    source = """
import threading
import monarch.actor
seen, go_on = [], threading.Event()

def hook(failure):
    seen.append(failure)
    go_on.set()
    time.sleep(0.3)  # the end comes meanwhile
    sys.exit(1)

monarch.actor.unhandled_fault_hook = hook
first.boom.broadcast()
go_on.wait(10)
"""
    done = run_script(BUSY + source).check(0)
    assert "monarch: unhandled failure" in done.stderr and "boom-7" in done.stderr and done.stderr.endswith("the program ends\n"), done


# --- clean-up --------------------------------------------------------------------------------------------------------

CLEANS_UP = """
import asyncio, time
from monarch.actor import Actor, endpoint, this_host

class Sync(Actor):
    @endpoint
    def ping(self):
        pass

    def __cleanup__(self, exc):
        clean_up()

class Async(Actor):
    @endpoint
    async def ping(self):
        pass

    async def __cleanup__(self, exc):
        if slow:
            await asyncio.sleep(60)
        clean_up()

def clean_up():
    if slow:
        time.sleep(60)
    raise TimeoutError("cleanup-1")

for kind in (Sync, Async):
    procs = this_host().spawn_procs()
    first, second = (procs.spawn(name, kind) for name in ("first", "second"))
    for actor in (first, second):
        actor.ping.call_one().get()
    first.stop().get(5)
    procs.stop().get(5)
print("went on")
"""


@pytest.mark.parametrize("slow", [True, False], ids=["too slow", "raises"])
def test_a_cleanup_that_goes_wrong_is_shown_and_holds_nobody_up(slow: bool) -> None:
    done = run_script(f"slow = {slow}\n{CLEANS_UP}", env={"HYPERACTOR_CLEANUP_TIMEOUT": "200ms"}).check(0)
    assert done.stdout == "went on\n"
    for actor in ("Sync first{}", "Sync second{}", "Async first{}", "Async second{}"):
        how, limit = ("broken off", " cleanup_timeout=0.2s") if slow else ("raised", "")
        assert done.stderr.count(f"cleanup {how}: actor=<root>.<__main__.{actor}>{limit}\n") == 1, done
    if not slow:
        assert done.stderr.count("TimeoutError: cleanup-1\n") == 4 and "drivers.py" not in done.stderr, done


# --- the script ------------------------------------------------------------------------------------------------------

FLIGHT = "calls = [crew.nap.call(600) for _ in range(3)]; streams = crew.nap.stream(600)\n"
DEAF = """
import ctypes

class Deaf(Actor):
    @endpoint
    def compute(self, path):
        ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(1))
        open(path, "w").close()
        while True:
            pass

procs.spawn("deaf", Deaf).compute.broadcast(sys.argv[1])
while not os.path.exists(sys.argv[1]):
    time.sleep(0.005)
"""


@pytest.mark.parametrize(
    ("line", "status", "stderr"),
    [
        ("1 / 0", 1, "Traceback .*\nZeroDivisionError: division by zero\n"),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('so long')", 1, "so long\n"),
        ("os._exit(4)", 4, ""),
        ("threading.Thread(target=calls[0].get, daemon=True).start()", 0, ""),
        ("asyncio.run(not_for_long())", 0, ""),
    ],
)
def test_a_script_that_ends_with_calls_under_way_ends_as_any_script(line: str, status: int, stderr: str) -> None:
    source = """
import asyncio, threading

async def not_for_long():
    await asyncio.wait([asyncio.ensure_future(calls[0])], timeout=0.1)

"""
    done = run_script(BUSY + FLIGHT + source + line)
    assert re.fullmatch(stderr, done.stderr, re.DOTALL), done
    assert done.stderr.count("Traceback") == stderr.count("Traceback")
    done.check(status)


def test_an_actor_that_computes_and_ignores_signals_ends_with_the_script(tmp_path: Path) -> None:
    done = run_script(BUSY + DEAF, args=[str(tmp_path / "computing")], grace_s=0.3).check(0)
    assert done.stderr == "", done


LINGERS = BUSY + "crew.nap.broadcast(600)\n"


def test_a_second_ctrl_c_ends_the_program_at_once() -> None:
    with start_script(LINGERS + "print('ready', flush=True); time.sleep(600)", env={"MONARCH_CLIENT_EXIT_TIMEOUT": "20s"}) as run:
        run.wait_line("^ready$")
        os.kill(run.pid, signal.SIGINT)
        wait_until(lambda: run.stderr().endswith("KeyboardInterrupt\n"))
        assert ends_after_sigint(run) < 5
        done = run.finish(5, grace_s=2).check(-signal.SIGINT)
        assert done.stderr.count("Traceback") == 1, done


def test_a_ctrl_c_during_the_last_shutdown_is_no_error() -> None:
    ends = """
from monarch.actor.client import ClientProcess as Client
shut_down_now = Client.shut_down_now
Client.shut_down_now = lambda *args: (print('ending', flush=True), shut_down_now(*args))
"""
    with start_script(LINGERS + ends, env={"MONARCH_CLIENT_EXIT_TIMEOUT": "20s"}) as run:
        run.wait_line("^ending$")
        assert ends_after_sigint(run) < 5
        done = run.finish(5, grace_s=2).check(0)
        assert done.stderr == "", done


def ends_after_sigint(run: Run) -> float:
    """Seconds from a Ctrl-C to the script's end."""
    began = time.monotonic()
    os.kill(run.pid, signal.SIGINT)
    wait_until(lambda: is_gone(run.pid))
    return time.monotonic() - began


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_of_multiprocessing_end_without_the_client(method: str) -> None:
    source = """
import multiprocessing

def work(queue):
    queue.put(list(this_host().spawn_procs().spawn("own", Worker).note.call().get().values()))

def main():
    crew = this_host().spawn_procs(per_host={"procs": 2}).spawn("crew", Worker)
    crew.note.call().get()
    methods = multiprocessing.get_context(sys.argv[1])
    queue = methods.SimpleQueue()
    children = [methods.Process(target=work, args=(queue,)) for _ in range(2)]
    for child in children:
        child.start()
    assert [queue.get(), queue.get()] == [[None], [None]]
    for child in children:
        child.join(20)
        assert child.exitcode == 0
    assert len(crew.note.call().get()) == 2

if __name__ == "__main__":
    main()
"""
    head = BUSY[: BUSY.index("procs = ")]
    done = run_script(head + source, args=[method]).check(0)
    assert done.stderr == "", done


def test_an_ordinary_end_waits_for_nothing() -> None:
    """The exit of a program whose processes are idle costs tenths of a second, not a time-out."""
    lines = """
import atexit, time
from monarch.actor import Actor, endpoint, this_host

class Worker(Actor):
    @endpoint
    def ping(self):
        return 1

began = []
atexit.register(lambda: print(time.monotonic() - began[0], flush=True))
import monarch.actor.client as client
atexit.unregister(client._at_exit)
atexit.register(client._at_exit)
atexit.register(lambda: began.append(time.monotonic()))
this_host().spawn_procs({"procs": 2}).spawn("worker", Worker).ping.call().get(10)
"""
    taken = min(float(run_script(lines, timeout=20).check().stdout) for _ in range(3))
    assert taken < 1.0
