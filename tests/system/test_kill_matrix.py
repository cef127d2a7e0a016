"""Who is killed, how, and at which moment: soon nothing is left of what hung on the victim, and a client that survives goes on.

Every cell of the matrix is a program of its own. It comes to its moment, says so by a line on stdout, and is hit there. The
client that survives must be told what happened, must be able to spawn anew, and must end as if nothing had been.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from monarch._runtime import rundir
from monarch.testing import leaks
from system.script import Run, start_script
from system.waiting import is_gone, wait_until

PROGRAM = """
import glob, os, subprocess, sys, time
import monarch.actor
from monarch.actor import Actor, endpoint, this_host

seen, meshes = [], []
monarch.actor.unhandled_fault_hook = lambda failure: seen.append(failure.report())

def say(*words):
    print(*words, flush=True)

class Worker(Actor):
    def __init__(self, name):
        self.name = name
        self.child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        say(name, os.getpid(), self.child.pid)

    @endpoint
    def ping(self):
        return os.getpid()

    @endpoint
    def work(self):
        say("here")
        time.sleep(600)

    def __cleanup__(self, exc):
        if self.name == "cleaner":
            say("here")
            time.sleep(600)

def come_up():
    say("victim", os.getpid(), subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
    say("here")
    time.sleep(600)

def spawn(name, count=1, **options):
    meshes.append(this_host().spawn_procs(per_host={"procs": count}, name=name, **options))
    return meshes[-1].spawn(name, Worker, name)

def tell(call):
    error = call.exception(10)
    assert type(error).__name__ in ("SupervisionError", "RuntimeError"), repr(error)
    say("told:", " ".join(str(error).split()))

def wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)

others = spawn("others")
others.ping.call().get()
"""

MOMENTS = {
    "idle": """
crew = spawn("victim")
crew.ping.call().get()
say("here")
wait_until(lambda: seen)
tell(crew.ping.call())
""",
    "calling": """
tell(spawn("victim").work.call())
""",
    "spawning": """
tell(spawn("late", bootstrap=come_up).ping.call())
""",
    "forking": """
calls = [spawn("late", 3).ping.call() for _ in range(2)]
say("victim 0 0")
say("here")
tell(calls[-1])
""",
    "stopping": """
crew = spawn("victim")
crew.ping.call().get()
busy = crew.work.call()
stopping = meshes[-1].stop()
tell(busy)
stopping.get(10)
""",
    "cleaning up": """
crew = spawn("cleaner")
crew.ping.call().get()
stopping = meshes[-1].stop()
tell(crew.ping.call())
stopping.get(10)
""",
}

GOES_ON = """
alive = others.ping.call().exception(10) is None
assert alive == (sys.argv[1] == "proc"), "the others are " + ("alive" if alive else "gone")
assert len(spawn("again").ping.call().get(10)) == 1
for mesh in meshes:
    mesh.stop().get(10)
[run_dir] = glob.glob(os.environ["TMPDIR"] + "/monarch-*/*")
wait_until(lambda: len(glob.glob(run_dir + "/h*")) == 2)  # the socket and the folder of the agent that lives
own = {"agent", "net"}  # sockets of the agent that lives
wait_until(lambda: {os.path.basename(path) for path in glob.glob(run_dir + "/h*.d/*")} <= own)
say("went on")
"""

STOP, KILL, TERM, INT = signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM, signal.SIGINT
HITS: dict[str, list[tuple[str, signal.Signals]]] = {
    "client KILL": [("client", KILL)],
    "client TERM": [("client", TERM)],
    "client INT": [("client", INT)],
    "client and agent KILL": [("client", KILL), ("agent", KILL)],
    "client KILL, agent STOP": [("agent", STOP), ("client", KILL)],
    "client INT, zygote STOP": [("zygote", STOP), ("client", INT)],
    "agent KILL": [("agent", KILL)],
    "agent TERM": [("agent", TERM)],
    "agent STOP KILL": [("agent", STOP), ("agent", KILL)],
    "agent KILL, zygote STOP": [("zygote", STOP), ("agent", KILL)],
    "zygote KILL": [("zygote", KILL)],
    "zygote TERM": [("zygote", TERM)],
    "zygote STOP KILL": [("zygote", STOP), ("zygote", KILL)],
    "proc KILL": [("proc", KILL)],
    "proc TERM": [("proc", TERM)],
}
CAUSES = {
    "agent": "the agent of its host has ended",
    "zygote": "its zygote was killed|killed by signal 9|zygote is shutting down",
    "proc": "killed by signal",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("hit", HITS)
def test_nothing_is_left_of_what_hung_on_the_victim(hit: str) -> None:
    blows = HITS[hit]
    moments = [moment for moment in MOMENTS if not (blows[-1][0] == "proc" and moment == "forking")]  # which one, nobody knows
    with ThreadPoolExecutor(3) as pool:
        complaints = list(pool.map(lambda moment: complaint_of(moment, blows), moments))
    assert not any(complaints), "\n\n".join(filter(None, complaints))


def complaint_of(moment: str, blows: list[tuple[str, signal.Signals]]) -> str:
    """What went wrong in one cell; "" when all is well."""
    try:
        with tempfile.TemporaryDirectory(prefix="k-") as folder:
            play(moment, blows, Path(folder))
    except AssertionError as error:
        return f"{moment}: {error}"
    return ""


def play(moment: str, blows: list[tuple[str, signal.Signals]], folder: Path) -> None:
    """Run one program to its moment, hit, and look at what is left."""
    victims = [victim for victim, _ in blows]
    client_dies = "client" in victims
    env = {"TMPDIR": str(folder), "HYPERACTOR_STOP_ACTOR_TIMEOUT": "1s", "HYPERACTOR_CLEANUP_TIMEOUT": "1s"}
    with start_script(PROGRAM + MOMENTS[moment] + GOES_ON, env=env, args=[victims[-1]]) as run:
        run.wait_line("^here$")
        cast = find_cast(run)
        doomed = doomed_with(victims, cast, run)
        for victim, number in blows:
            os.kill(cast[victim], number)
        wait_gone(doomed, run)
        done = run.finish(15, grace_s=soon_s())
        assert not done.leftovers, str(done)
        if client_dies:
            number = blows[victims.index("client")][1]
            assert done.returncode == -number, str(done)
            assert len(done.stderr.splitlines()) <= 60 and done.stderr.count("Traceback") == (number == INT), str(done)
        else:
            assert done.returncode == 0 and done.stdout.endswith("went on\n"), str(done)
            [told] = re.findall("^told: (.*)$", done.stdout, re.MULTILINE)
            cause = CAUSES[victims[-1]] + ("|stopped" if moment in ("stopping", "cleaning up") else "")
            assert re.search(cause, told), told
            assert all("proc did not start" in line for line in done.stderr.splitlines()), str(done)
        if "agent" in victims and victims[0] == "client":  # where the agent had time to send its zygote away, nobody is left
            rundir.sweep(*map(str, folder.glob("monarch-*")))
        try:
            wait_until(lambda: not [*folder.glob("monarch-*/**/*")], timeout=soon_s())
        except AssertionError:
            raise AssertionError(f"left: {[*map(str, folder.glob('monarch-*/**/*'))]}") from None


def find_cast(run: Run) -> dict[str, int]:
    """Pids of those who may be hit."""
    [agent] = leaks.children(run.pid)
    [zygote, *_] = leaks.children(agent)
    last = re.findall(r"^(?:victim|cleaner) (\d+) \d+$", run.stdout(), re.MULTILINE)[-1]
    return {"client": run.pid, "agent": agent, "zygote": zygote, "proc": int(last)}


def doomed_with(victims: list[str], cast: dict[str, int], run: Run) -> list[int]:
    """Who is to end with the victims; of those who are on their way, only some."""
    alive = run.pids()
    if "client" in victims:
        return alive
    if "agent" in victims:
        return [pid for pid in alive if pid != cast["client"]]
    if "zygote" in victims:
        return [pid for pid in alive if pid not in (cast["client"], cast["agent"])]
    return [cast["proc"], *map(int, re.findall(rf"^\w+ {cast['proc']} (\d+)$", run.stdout(), re.MULTILINE))]


def wait_gone(pids: list[int], run: Run) -> None:
    assert pids
    try:
        wait_until(lambda: all(map(is_gone, pids)), timeout=soon_s())
    except AssertionError:
        left = [leaks.command(pid) for pid in pids if not is_gone(pid)]
        raise AssertionError(f"still there after {soon_s():g} s: {left}\n{run.finish(0.1)}") from None


def soon_s() -> float:
    """Two seconds, as long as the machine has processors to spare."""
    return 2.0 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


IMPORTS = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy
from monarch.actor import this_host
this_host().spawn_procs().initialized.get()
"""
SLOW_LIBRARY = """
import os, sys, time
if sys.argv[0] == "-c":
    print("here", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("victim", ["client", "agent", "zygote"])
def test_an_import_in_the_zygote_delays_no_end(tmp_path: Path, victim: str) -> None:
    (tmp_path / "numpy.py").write_text(SLOW_LIBRARY)
    with start_script(IMPORTS, args=[str(tmp_path)]) as run:
        run.wait_line("^here$")
        [agent] = leaks.children(run.pid)
        [zygote] = leaks.children(agent)
        os.kill({"client": run.pid, "agent": agent, "zygote": zygote}[victim], KILL)
        wait_gone([agent, zygote] if victim != "zygote" else [zygote], run)


def test_an_actors_child_may_die_without_harm() -> None:
    source = """
crew = spawn("victim")
crew.ping.call().get()
say("here")
wait_until(lambda: os.path.exists(sys.argv[1]))
assert len(crew.ping.call().get(10)) == 1 and not seen
"""
    with tempfile.TemporaryDirectory(prefix="k-") as folder, start_script(PROGRAM + source, args=[f"{folder}/go"]) as run:
        run.wait_line("^here$")
        child = int(run.wait_line(r"^victim \d+ (\d+)$").group(1))
        os.kill(child, KILL)
        wait_until(lambda: is_gone(child))
        Path(folder, "go").touch()
        run.finish(10).check()
