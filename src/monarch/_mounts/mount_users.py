"""Who uses a mount: processes with a file of it open, mapped, or as their working directory.

Only links of `/proc` are read, never the mount. Processes of other users can't be seen without root.
"""

from __future__ import annotations

import os

_MOST = 20


def users_of(path: str) -> list[str]:
    """The processes that use what is mounted at `path`, as lines `pid 12: cat: /mnt/file`; the first `_MOST`."""
    parent, name = os.path.split(os.path.normpath(path))
    where = os.path.join(os.path.realpath(parent), name)
    lines = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        used = next((target for target in _targets(pid) if target == where or target.startswith(where + "/")), None)
        if used is not None:
            lines.append(f"pid {pid}: {_command(pid)}: {used}")
            if len(lines) == _MOST:
                break
    return lines


def _targets(pid: str) -> list[str]:
    links = [f"/proc/{pid}/{name}" for name in ("cwd", "root", "exe")]
    for folder in (f"/proc/{pid}/fd", f"/proc/{pid}/map_files"):
        try:
            links += [f"{folder}/{name}" for name in os.listdir(folder)]
        except OSError:  # it has ended, or is another user's
            continue
    return [target for link in links if (target := _target(link))]


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def _command(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return "?"
