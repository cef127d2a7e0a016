"""Clients in unusual processes: forks before and after use, multiprocessing, started inside a worker, notebooks."""

from __future__ import annotations

import pytest

ECHO = """
import os, sys
from monarch.actor import Actor, endpoint, this_host, context, shutdown_context

class Echo(Actor):
    @endpoint
    def echo(self, value):
        return value

    @endpoint
    def pid(self):
        return os.getpid()

def use(label, count=2):
    procs = this_host().spawn_procs({"gpus": count})
    echo = procs.spawn("echo", Echo)
    assert echo.echo.call(label).get(10).values() == [label] * count
    return procs, echo
"""


def script(body):
    return ECHO + body


def test_a_child_forked_before_the_first_use_is_a_client_of_its_own(run_script):
    run_script(
        script("""
child = os.fork()
procs, echo = use(f"pid {os.getpid()}")
name = str(context().actor_instance.actor_id)
shutdown_context().get(10)
if child:
    assert os.waitpid(child, 0)[1] == 0
    print("parent fine")
""")
    ).check()


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)", "shutdown_context().get(10); os._exit(0)"])
def test_a_child_forked_after_use_is_a_client_of_its_own_and_leaves_the_parents_alone(run_script, end):
    run_script(
        script(f"""
procs, echo = use("before")
own = str(context().actor_instance.actor_id)
child = os.fork()
if not child:
    assert str(context().actor_instance.actor_id) != own
    other, copy = use("in the child")
    assert not set(copy.pid.call().get(10).values()) & {{os.getppid(), os.getpid()}}
    {end}
assert os.waitpid(child, 0)[1] == 0
assert echo.echo.call("after").get(10).values() == ["after"] * 2
assert str(context().actor_instance.actor_id) == own
""")
    ).check()


def test_a_forked_child_that_does_nothing_disturbs_nobody(run_script):
    run_script(
        script("""
procs, echo = use("before")
for end in (lambda: os._exit(0), lambda: sys.exit(0)):
    child = os.fork()
    if not child:
        end()
    assert os.waitpid(child, 0)[1] == 0
    assert echo.echo.call("still").get(10).values() == ["still"] * 2
""")
    ).check()


def test_an_idle_fork_does_not_keep_the_procs_of_a_dead_parent_alive(run_script):
    done = run_script(
        script("""
import subprocess, signal, time
procs, echo = use("before")
pids = echo.pid.call().get(10).values()
if not os.fork():
    time.sleep(600)
print("pids", *pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
""")
    )
    assert done.returncode == -9
    left = [line for line in done.leftovers if "host_main" in line]
    assert not left and len(done.leftovers) == 1, done  # the idle fork itself, which nobody has ended


def test_what_the_parent_had_is_an_error_in_the_child_and_not_a_hang(run_script):
    run_script(
        script("""
procs, echo = use("before")
pending = echo.echo.call("pending")
if not (child := os.fork()):
    for attempt in (lambda: echo.echo.call("x").get(5), lambda: procs.spawn("echo", Echo).echo.call("y").get(5)):
        try:
            values = attempt().values()
            assert values in (["x"] * 2, ["y"] * 2), values  # a reference, so it may simply work
        except RuntimeError:
            pass
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert pending.get(10).values() == ["pending"] * 2
""")
    ).check()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_multiprocessing_children_are_clients(run_script, method, when):
    run_script(
        script(f"""
import multiprocessing

def work(queue):
    procs, echo = use("child")
    queue.put(echo.echo.call(os.getpid()).get(10).values())

if __name__ == "__main__":
    context = multiprocessing.get_context({method!r})
    if {when!r} == "after":
        procs, echo = use("parent")
    queue = context.Queue()
    children = [context.Process(target=work, args=(queue,)) for _ in range(2)]
    for child in children:
        child.start()
    got = sorted(queue.get(timeout=15) for _ in children)
    for child in children:
        child.join(10)
        assert child.exitcode == 0, child.exitcode
    assert got == sorted([child.pid] * 2 for child in children)
    procs, echo = use("parent again")
"""),
        timeout=25,
    ).check()


def test_references_travel_to_multiprocessing_children(run_script):
    run_script(
        script("""
import multiprocessing

def work(echo):
    assert echo.echo.call("from the child").get(10).values() == ["from the child"] * 2

if __name__ == "__main__":
    procs, echo = use("parent")
    child = multiprocessing.get_context("spawn").Process(target=work, args=(echo,))
    child.start()
    child.join(15)
    assert child.exitcode == 0, child.exitcode
    assert echo.echo.call("after").get(10).values() == ["after"] * 2
"""),
        timeout=25,
    ).check()


def test_a_worker_may_use_subprocesses_forks_and_pools(run_script):
    run_script(
        script("""
import math, multiprocessing, subprocess

class Pooling(Actor):
    @endpoint
    def run(self):
        text = subprocess.run([sys.executable, "-c", "print(40 + 2)"], capture_output=True, text=True, check=True).stdout
        with multiprocessing.get_context("fork").Pool(2) as pool:
            roots = pool.map(math.sqrt, [0, 1, 4])
        child = os.fork()
        if not child:
            os._exit(7)
        return text.strip(), roots, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

if __name__ == "__main__":
    procs = this_host().spawn_procs({"gpus": 2})
    pooling = procs.spawn("pooling", Pooling)
    assert pooling.run.call().get(15).values() == [("42", [0, 1, 2], 7)] * 2
    assert pooling.run.call().get(15).values() == [("42", [0, 1, 2], 7)] * 2
"""),
        timeout=25,
    ).check()


def test_a_client_started_inside_a_worker_is_independent(run_script, tmp_path):
    path = tmp_path / "inner.py"
    path.write_text(
        script("""
procs, echo = use("inner client")
print(str(context().actor_instance), len(set(echo.pid.call().get(10).values())))
""")
    )
    run_script(
        script(f"""
import subprocess

class Runner(Actor):
    @endpoint
    def run(self):
        done = subprocess.run([sys.executable, {str(path)!r}], capture_output=True, text=True, timeout=15)
        return done.returncode, done.stdout.strip(), done.stderr

    @endpoint
    def nested(self):
        procs, echo = use("nested", 1)
        value = echo.echo.call("n").get(10).values()
        procs.stop().get(10)
        return value

runner = this_host().spawn_procs({{"gpus": 2}}).spawn("runner", Runner)
assert runner.run.call().get(20).values() == [(0, "<root> 2", "")] * 2
assert runner.nested.call().get(20).values() == [["n"]] * 2
"""),
        timeout=30,
    ).check()


CELLS = [
    "from monarch.actor import Actor, endpoint, this_host, shutdown_context",
    """
import dataclasses

OFFSET = 10

@dataclasses.dataclass
class Item:
    value: int

def helper(item):
    return Item(item.value + OFFSET)
""",
    """
class Cell(Actor):
    def __init__(self, start):
        self.start = start

    @endpoint
    async def step(self, item):
        return helper(Item(item.value + self.start))
""",
    "procs = this_host().spawn_procs({'gpus': 2})",
    "cell = procs.spawn('cell', Cell, 1)",
    "assert cell.step.call(Item(1)).get(10).values() == [Item(12), Item(12)]",
    "OFFSET = 20",
    "class Cell(Cell):\n    @endpoint\n    async def more(self):\n        return 'redefined', OFFSET",
    "cell = procs.spawn('cell', Cell, 1)",
    "assert cell.more.call().get(10).values() == [('redefined', 20)] * 2",
    "assert cell.step.call(Item(1)).get(10).values() == [Item(22), Item(22)]",
]


def test_classes_of_notebook_cells_work(run_script):
    run_script(
        f"""
        import sys
        from IPython.core.interactiveshell import InteractiveShell

        shell = InteractiveShell.instance()
        # A notebook's kernel makes its namespace the main module.
        for cell in {CELLS!r}:
            result = shell.run_cell(cell)
            result.raise_error()
        result = shell.run_cell("value = await cell.more.call()")
        result.raise_error()
        assert shell.user_ns["value"].values() == [("redefined", 20)] * 2
        shell.run_cell("shutdown_context().get(10)").raise_error()
        """,
        timeout=30,
        env={"IPYTHONDIR": "/tmp/no-such-ipython"},
    ).check()


def test_ipython_as_a_program_is_a_client(run_script):
    body = "\n".join([*CELLS, "print('end of cells')"])
    run_script(
        f"""
        import subprocess, sys, tempfile

        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "IPython", "--ipython-dir", folder, "--colors=nocolor", "-c", {body!r}]
            done = subprocess.run(command, capture_output=True, text=True, timeout=25)
        assert done.returncode == 0 and "end of cells" in done.stdout and "Error" not in done.stdout + done.stderr, done
        """,
        timeout=30,
    ).check()
