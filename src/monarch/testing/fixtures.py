"""Fixtures for pytest. Name this module in `conftest.py`: `pytest_plugins = ["monarch.testing.fixtures"]`.

Read next: `leaks.py`, `universe.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from monarch.testing.leaks import no_leaks
from monarch.testing.universe import Universe, universe


@pytest.fixture
def leak_check() -> Iterator[None]:
    """The test fails when it leaves processes, threads, sockets, files or mounts behind."""
    with no_leaks():
        yield


@pytest.fixture
def world() -> Iterator[Universe]:
    """A universe of one host, open for the time of the test."""
    with universe() as opened:
        yield opened
