"""Fixtures for tests that start processes: a client that ends with its module, and user scripts in fresh interpreters."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Generator

import pytest

from system import script
from system.hosts import Hosts, why_not

_SHUTDOWN_S = 15.0


@pytest.fixture(scope="module", autouse=True)
def client() -> Generator[None, None, None]:
    """Shut the client down after the module's last test, if one of them has started it."""
    yield
    shutdown = getattr(sys.modules.get("monarch.actor"), "shutdown_context", None)
    if shutdown is not None:
        shutdown().get(timeout=_SHUTDOWN_S)


@pytest.fixture
def run_script() -> Callable[..., script.CompletedRun]:
    """`run_script(source, timeout=..., env=...)`; see `system.script`."""
    return script.run_script


@pytest.fixture(scope="module")
def hosts() -> Generator[Hosts, None, None]:
    """Four hosts on a network of their own, and this one; see `system.hosts`. Whatever still runs on them in the end fails the module.

    Without the right to make namespaces its tests are skipped, or failed where `MONARCH_REQUIRE_NETWORK=1`.
    """
    reason = why_not()
    if reason and os.environ.get("MONARCH_REQUIRE_NETWORK") == "1":
        pytest.fail(reason, pytrace=False)
    if reason:
        pytest.skip(reason)
    rig = Hosts()
    try:
        yield rig
    finally:
        left = rig.close()
    if left:
        pytest.fail("left running on the hosts:\n  " + "\n  ".join(left), pytrace=False)


requires_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
