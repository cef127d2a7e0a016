"""A short run of `bench/chaos.py`: kills, failures, stops and respawns at once, and every promise holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[2] / "bench" / "chaos.py"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", [1, 2])
def test_every_promise_holds_in_a_short_chaos(seed: int) -> None:
    command = [sys.executable, str(CHAOS), "--seed", str(seed), "--faults", "100", "--limit-s", "60", "--procs", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    values = {name: float(value) for name, value, _ in map(str.split, done.stdout.splitlines())}
    assert values["chaos_faults"] >= 100
    assert values["chaos_broken_promises"] == 0
