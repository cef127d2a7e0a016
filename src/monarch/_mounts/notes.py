"""Notes of what this process has mounted, where whoever tidies up after it looks.

Read next: `_runtime/mount_notes.py`.
"""

from __future__ import annotations

from monarch._runtime import mount_notes
from monarch._runtime.platform import SYSTEM
from monarch.actor.process import this_process


def remember(path: str) -> None:
    """This process is about to mount at `path`."""
    mount_notes.add(_file(), path)


def forget(path: str) -> None:
    """The mount at `path` is gone."""
    mount_notes.remove(_file(), path)


def _file() -> str:
    return mount_notes.note_of(SYSTEM.file_of(this_process().proc.ref.address))
