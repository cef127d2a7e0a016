"""`bench/soak.py`, a short one: rounds of spawn, call and stop leave a client, its agent and its zygote as they were."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from system.script import run_script

BENCH = Path(__file__).parents[2] / "bench"
COMMAND = f"import sys; sys.path.insert(0, {str(BENCH)!r}); import soak; sys.exit(soak.main())"
LONG = os.environ.get("MONARCH_TEST_LONG") == "1"


@pytest.mark.timeout(600 if LONG else 60)
def test_rounds_of_spawn_and_stop_leave_all_processes_as_they_were() -> None:
    rounds = 200 if LONG else 20
    done = run_script(COMMAND, args=["--rounds", str(rounds), "--warm-up", "5"], timeout=500 if LONG else 50).check(0)
    assert done.stderr == "", done
    grown = {name: float(value) for name, value in re.findall(r"^soak_(\w+?)_growth +(-?[\d.]+) ", done.stdout, re.MULTILINE)}
    counted = [f"{who}_{what}" for who in ("client", "agent", "zygote") for what in ("descriptors", "segments", "threads")]
    assert max(grown[name] for name in [*counted, "files", "procs"]) <= 0, done
    assert {"client_memory", "agent_memory", "zygote_memory"} < grown.keys()
