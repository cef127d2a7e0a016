from __future__ import annotations

import pytest

from monarch.testing.fixtures import leak_check, world  # noqa: F401 -- pytest finds them here
from testing.actors import Counter


def test_a_world_is_open(world):  # noqa: F811 -- it is the fixture
    assert len(world.hosts.spawn_procs().spawn("c", Counter).add.call(1).get().values()) == 1


@pytest.mark.usefixtures("leak_check")
def test_a_test_without_leaks_passes():
    assert True
