"""Who maps a memory file: processes of this machine, for people. Those of other users can't be seen without root."""

from __future__ import annotations

import os
from typing import NamedTuple

_MOST = 20


class Holder(NamedTuple):
    """A process that has mapped a part of the file for itself."""

    pid: int
    command: str
    offset: int
    """Where that part begins."""


def holders_of(name: str) -> list[Holder]:
    """Private mappings of the memory file `name`; the first `_MOST`."""
    found: list[Holder] = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/maps") as file:
                lines = [line for line in file if f"memfd:{name}" in line]
            with open(f"/proc/{pid}/comm") as file:
                command = file.read().strip()
        except OSError:  # it has ended, or is another user's
            continue
        fields = [line.split() for line in lines]
        found += [Holder(int(pid), command, int(field[2], 16)) for field in fields if field[1].endswith("p")]
    return found[:_MOST]
