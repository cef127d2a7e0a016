"""Universes in interpreters of their own: what one process can't show of itself."""

from __future__ import annotations

import re
from pathlib import Path

_PAGE = Path(__file__).parents[2] / "docs" / "testing.md"
PROGRAM = """
import hashlib, random
from monarch.actor import Actor, endpoint, this_host
from monarch.testing import universe

class Worker(Actor):
    def __init__(self, others=None):
        self.others = others

    @endpoint
    def ask(self):
        return list(self.others.answer.call().get().values())

    @endpoint
    def answer(self):
        return 1

with universe(hosts=3, seed=11) as world:
    procs = world.hosts.spawn_procs(per_host={"gpus": 2})
    workers = procs.spawn("worker", Worker)
    askers = this_host().spawn_procs(per_host={"p": 2}).spawn("asker", Worker, workers)
    world.network.reorder(None, None, 0.001)
    world.network.duplicate(None, None, 0.3)
    calls = [askers.ask.call() for _ in range(3)]
    world.advance(0.0215)
    world.kill(world.hosts, hosts=random.randrange(3))
    for call in calls:
        call.exception()
    world.network.cut(world.hosts, world.client)
    world.advance(5)
    assert len(world.faults) > 0
    print(len(world.trace), hashlib.sha256(str(world.trace).encode()).hexdigest(), world.now_s)
"""


def test_a_seed_means_the_same_in_every_interpreter(run_script):
    """Whatever the hashes of strings are there, on which the order of sets depends."""
    runs = {run_script(PROGRAM, timeout=25, env={"PYTHONHASHSEED": seed}).check().stdout for seed in ("1", "2", "3")}
    assert len(runs) == 1
    assert int(runs.pop().split()[0]) > 100


def test_the_test_file_of_the_page_passes(run_script, tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```$", _PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (file,) = [block for block in blocks if block.startswith("import pytest\n")]
    path = tmp_path / "test_shards.py"
    path.write_text(file)
    arguments = ["-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-c", "/dev/null", str(path)]
    done = run_script(f"import sys, pytest; sys.exit(pytest.main({arguments!r}))", timeout=25).check()
    assert "23 passed" in done.stdout
