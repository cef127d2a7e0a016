"""When the kernel is to read big files itself."""

from __future__ import annotations

import pytest

from monarch._mounts.mount_actor import is_mostly_big
from mounts.world import FILE, MIB, made


@pytest.mark.parametrize(
    ("small", "big", "outcome"),
    [([], [], False), ([], [MIB], True), ([9], [], False), ([MIB - 1], [], False), ([9] * 64, [MIB], False), ([9] * 63, [MIB], True)],
)
def test_the_kernel_reads_big_files_where_they_outweigh_the_openings_of_small_ones(small, big, outcome):
    sizes = [*small, *big]
    rows = [(0, b"f%03d" % at, FILE, size, at * 2 * MIB) for at, size in enumerate(sizes)]
    assert is_mostly_big(made(*rows, total=2 * MIB * len(sizes))) is outcome
