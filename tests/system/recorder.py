"""The fixture of tests about failures: a hook that records.

    pytest_plugins = ["system.recorder"]
    pytestmark = pytest.mark.usefixtures("faults")

    def test_a_death_is_reported(faults):
        ...
        [failure] = faults.wait(1)

Every test of such a module runs with the recorder as its hook; one without the parameter fails when there was a failure.
A plugin, so a module that uses it imports it for its types only.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Generator

import pytest

import monarch.actor
from monarch.actor import MeshFailure

WAIT_S = 10.0


class Recorder:
    """An `unhandled_fault_hook` that handles everything. Thread: any."""

    def __init__(self) -> None:
        self.seen: list[MeshFailure] = []
        self.times_s: list[float] = []
        """`time.perf_counter()` at each of `seen`."""
        self._changed = threading.Condition()

    def __call__(self, failure: MeshFailure) -> None:
        with self._changed:
            self.times_s.append(time.perf_counter())
            self.seen.append(failure)
            self._changed.notify_all()

    def wait(self, count: int, timeout: float = WAIT_S) -> list[MeshFailure]:
        """The failures once there are `count`; more than that is an error, too."""
        with self._changed:
            came = self._changed.wait_for(lambda: len(self.seen) >= count, timeout)
            assert came and len(self.seen) == count, f"{len(self.seen)} failures instead of {count}: {self.seen}"
            return list(self.seen)


@pytest.fixture(scope="module")
def hook() -> Generator[None, None, None]:
    """Give the hook back after the module's last test, not between two: a late failure would interrupt the session."""
    before = monarch.actor.unhandled_fault_hook
    yield
    monarch.actor.unhandled_fault_hook = before


@pytest.fixture
def faults(request: pytest.FixtureRequest, hook: None) -> Generator[Recorder, None, None]:
    """The recorder, which is the hook while the test runs."""
    recorder = monarch.actor.unhandled_fault_hook = Recorder()
    yield recorder
    if "faults" not in inspect.signature(request.function).parameters:
        assert not recorder.seen
