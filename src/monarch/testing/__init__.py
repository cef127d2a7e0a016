"""Tests of programs made of actors: a universe in one process, leak checks, mocks.

See `docs/testing.md`; `universe` is where to begin.
"""

from monarch.actor.mock import patch_actor
from monarch.testing.leaks import LeakError, Snapshot, no_leaks
from monarch.testing.network import Costs, Disturbance, Network, NetworkStatistics
from monarch.testing.stall import DeadlockError
from monarch.testing.trace import Trace
from monarch.testing.universe import Client, UnhandledFaultsError, Universe, universe

__all__ = [
    "Client",
    "Costs",
    "DeadlockError",
    "Disturbance",
    "LeakError",
    "Network",
    "NetworkStatistics",
    "Snapshot",
    "Trace",
    "UnhandledFaultsError",
    "Universe",
    "no_leaks",
    "patch_actor",
    "universe",
]
