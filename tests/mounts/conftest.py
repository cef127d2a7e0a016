"""Fixtures of the tests of mounts."""

from __future__ import annotations

import pytest

from mounts.world import World


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path / "source")
    yield world
    world.close()
