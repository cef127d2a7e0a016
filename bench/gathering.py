"""What a gathered folder costs its readers: the section `gather` of `mount.py`.

The worker is another process of this machine, its folder is in memory, so nothing is measured but the way.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time

from measure import now

from monarch.actor import shutdown_context, this_host
from monarch.gather_mount import gather_mount

NUM_ENTRIES = 10_000
NUM_STATS = 2_000
NUM_APPENDS = 20
_LATEST_S = 5.0

Row = tuple[str, float, str]


def run_gather(base: str | None, mib: int) -> list[Row]:
    """One round: name, value, unit."""
    folder = tempfile.mkdtemp(prefix="bench-mounts-", dir=base)
    point = tempfile.mkdtemp(prefix="bench-mounts-")
    try:
        _make(folder, mib)
        began = now()
        with gather_mount(this_host(), folder, point, cache_bytes=2 * mib << 20):
            rows = [("gather_open", (now() - began) * 1000, "ms")]
            rows += _measure(folder, point)
            began = now()
        rows.append(("gather_close", (now() - began) * 1000, "ms"))
        return rows
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.rmdir(point)
        shutdown_context().get(timeout=20)


def _make(folder: str, mib: int) -> None:
    with open(f"{folder}/big", "wb") as file:
        for _ in range(mib):
            file.write(os.urandom(1 << 20))
    os.mkdir(f"{folder}/many")
    for index in range(NUM_ENTRIES):
        with open(f"{folder}/many/entry-{index:05d}.log", "wb") as file:
            file.write(b"line\n" * (index % 100))


def _measure(folder: str, point: str) -> list[Row]:
    rows = [("gather_big_cold", _read(f"{point}/big"), "GiB/s"), ("gather_big_warm", _read(f"{point}/big"), "GiB/s")]
    for name in ("cold", "warm"):
        began = now()
        subprocess.run(["ls", "-l", f"{point}/many"], stdout=subprocess.DEVNULL, check=True)
        rows.append((f"gather_ls_10k_{name}", (now() - began) * 1000, "ms"))
    began = now()
    for index in range(NUM_STATS):
        os.stat(f"{point}/many/entry-{index:05d}.log")
    rows.append(("gather_stat_warm", NUM_STATS / (now() - began), "/s"))
    began = now()
    for index in range(NUM_STATS):
        with open(f"{point}/many/entry-{index:05d}.log", "rb") as file:
            file.read()
    rows.append(("gather_small_cold", NUM_STATS / (now() - began), "files/s"))
    for name, pause_s in (("append", 0.2), ("append_hot", 0.0)):
        delays = sorted(_append(f"{folder}/growing", f"{point}/growing", pause_s) for _ in range(NUM_APPENDS))
        rows += [(f"gather_{name}_p50", delays[NUM_APPENDS // 2] * 1000, "ms"), (f"gather_{name}_max", delays[-1] * 1000, "ms")]
    return rows


def _read(path: str) -> float:
    """GiB/s."""
    buffer, total, began = bytearray(1 << 20), 0, now()
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(buffer):
            total += size
    return total / (now() - began) / 2**30


def _append(path: str, seen_at: str, pause_s: float) -> float:
    """Seconds until an append is seen by who looks at the size all the time, `pause_s` after the one before."""
    time.sleep(pause_s)
    os.path.exists(seen_at)  # what is known of it is kept, so that it has to be told
    with open(path, "ab") as file:
        size = file.tell() + 100
        file.write(b"x" * 100)
    began = now()
    while not os.path.exists(seen_at) or os.path.getsize(seen_at) < size:
        if now() - began > _LATEST_S:
            raise RuntimeError(f"an append to {path} is not seen within {_LATEST_S:g} s")
        time.sleep(0.001)
    return now() - began
