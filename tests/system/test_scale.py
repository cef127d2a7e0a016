"""bench/scale.py at a size that takes seconds: what it prints, and that casts cost their sender the fan-out, not the mesh."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "bench" / "scale.py"
FANOUT = 16
CASTS = ["cast_small", "cast_1MiB", "gather_small", "gather_4KiB"]
LOSSES = ["lose_proc", "lose_host", "lose_agent_in_cast"]


@pytest.fixture(scope="module")
def measures():
    command = [sys.executable, str(PROGRAM), "--inline", "--stated", "--hosts", "20", "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    lines = [line.split() for line in done.stdout.splitlines() if not line.startswith("#")]
    assert all(len(line) == 3 for line in lines)
    return {name: (float(value), unit) for name, value, unit in lines}


@pytest.mark.parametrize("hosts", [20, 60])
@pytest.mark.parametrize("what", ["spawn_procs", "spawn_actors", *CASTS, *LOSSES, "gather_after_losses"])
def test_everything_is_measured(measures, what, hosts):
    units = {
        "time": "s",
        "messages": "messages",
        "bytes": "MiB",
        "client_busy": "s",
        "client_sent": "messages",
        "client_received": "messages",
        "agent_busy": "s",
    }
    assert {measure: measures[f"{what}_{hosts}_{measure}"][1] for measure in units} == units
    assert measures[f"{what}_{hosts}_time"][0] > 0


def test_the_client_is_busy(measures):
    assert all(0 < measures[f"{what}_60_client_busy"][0] <= 2 * measures[f"{what}_60_time"][0] for what in CASTS)


@pytest.mark.parametrize("what", [*CASTS, "spawn_actors"])
def test_the_client_sends_to_as_many_agents_as_the_tree_has_branches(measures, what):
    sent = measures[f"{what}_60_client_sent"][0]
    assert sent <= (2 if what == "spawn_actors" else 1) * FANOUT  # creating is one cast, asking whether it is done another


@pytest.mark.parametrize("what", CASTS)
def test_the_time_of_a_cast_grows_like_the_depth_of_its_tree(measures, what):
    small, large = (measures[f"{what}_{hosts}_time"][0] for hosts in (20, 60))
    assert large < 2.2 * small  # three times the hosts, and the same depth


def test_a_payload_is_sent_once_to_each_host_and_there_once_to_each_proc(measures):
    assert measures["cast_1MiB_60_bytes"][0] == pytest.approx(60 + 60 * 8, rel=0.02)  # once per host, then once per proc


def test_the_program_is_small(measures):
    assert measures["simulation_60_memory"][0] < 400
