"""Pushed directories as large and as odd as they come, checked and measured: 100,000 files, a sparse file of gigabytes, an environment.

usage: mount_scale.py [SECTION ...]        SECTION: many, huge, environment, odd (default all)

Needs FUSE. Prints one `name value unit` a line; what reads wrong ends the program with an error.

Measures:
    many_*          100,000 files of 40 to 4,000 bytes in 1,000 directories: open, refreshes, `find`, a walk that reads all, memory
                    of both ends
    huge_*          a file of 4 GiB, of which 256 MiB are random and the rest is a hole: open, the parts read and compared, memory
    environment_*   the virtual environment of this interpreter: open, and a start of its Python from the mount that imports from it
    odd_*           names of any bytes, links, empty files, 200 directories below each other, files that grow while they are looked at
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from measure import now, out

from monarch._mounts.mounting import is_mounted, unmount
from monarch.actor import shutdown_context, this_host
from monarch.remotemount import remotemount

NUM_FOLDERS, PER_FOLDER = 1000, 100
HUGE_BYTES, RANDOM_BYTES, STEP_BYTES = 4 << 30, 256 << 20, 64 << 20
DEPTH = 200


@contextmanager
def opened(source: str, title: str) -> Iterator[tuple[Any, str]]:
    """The directory pushed to this machine, and where; tells how long open() took, and what both ends need."""
    point = tempfile.mkdtemp(prefix="bench-mounts-")
    mount: Any = remotemount(this_host(), source, point)
    began = now()
    mount.open()
    out(f"{title}_open", now() - began, "s")
    try:
        yield mount, point
        pid = mount.statistics()[0].pid
        out(f"{title}_host_memory", memory_of(pid, "VmRSS", "RssShmem"), "MiB")
        out(f"{title}_host_bytes", mount.statistics()[0].store.resident_bytes / 2**20, "MiB")
        out(f"{title}_source_memory", max(memory_of(each, "VmRSS") for each in siblings_of(pid)), "MiB")
        began = now()
    finally:
        mount.close()
        if is_mounted(point):
            unmount(point, lazy=True)
        os.rmdir(point)
    out(f"{title}_close", now() - began, "s")


def memory_of(pid: int, field: str, without: str | None = None) -> float:
    """MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = {line.split(":")[0]: line.split()[1] for line in lines if line.endswith("kB")}
    return (int(fields[field]) - (int(fields[without]) if without else 0)) / 1024


def siblings_of(pid: int) -> list[int]:
    """Other processes of the same parent."""
    parents = {}
    for each in os.listdir("/proc"):
        if each.isdigit():
            try:
                parents[int(each)] = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()[1]
            except OSError:
                continue
    return [each for each, parent in parents.items() if parent == parents[pid] and each != pid]


def timed(title: str, function: Any, unit: str = "s") -> Any:
    began = now()
    found = function()
    out(title, (now() - began) * (1000 if unit == "ms" else 1), unit)
    return found


def same(one: Path, other: Path) -> None:
    """Raises RuntimeError unless both trees are the same to `diff`, link for link."""
    done = subprocess.run(["diff", "-r", "--no-dereference", str(one), str(other)], capture_output=True)
    if done.returncode:
        raise RuntimeError(f"{other} differs from {one}:\n{done.stdout.decode(errors='replace')[:2000]}{done.stderr.decode()[:2000]}")


# ------------------------------------------------------------------------------------------------------------ sections


def many(source: str) -> None:
    dice = random.Random(1)
    for number in range(NUM_FOLDERS):
        path = f"{source}/p{number // 40}/f{number}"
        os.makedirs(path)
        for index in range(PER_FOLDER):
            with open(f"{path}/m{index:03d}.py", "wb") as file:
                file.write(b"%08d %04d\n" % (number, index) * dice.randint(3, 300))
    with opened(source, "many") as (mount, point):
        found = timed("many_find", lambda: subprocess.run(["find", point, "-type", "f"], capture_output=True, check=True).stdout)
        if found.count(b"\n") != NUM_FOLDERS * PER_FOLDER:
            raise RuntimeError(f"find sees {found.count(10)} files")
        began = now()
        for folder, _, files in os.walk(point):
            for name in files:
                Path(folder, name).read_bytes()
        out("many_read", NUM_FOLDERS * PER_FOLDER / (now() - began), "files/s")
        mount.refresh()
        timed("many_refresh_nothing", mount.refresh, "ms")
        Path(source, "p0/f0/m000.py").write_text("edited")
        timed("many_refresh_edited", mount.refresh, "ms")
        if Path(point, "p0/f0/m000.py").read_text() != "edited":
            raise RuntimeError("the edit is not seen")
        Path(source, "p0/f0/new.py").write_text("new")
        timed("many_refresh_added", mount.refresh, "ms")
        shutil.rmtree(f"{source}/p1")
        timed("many_refresh_removed_4000", mount.refresh, "ms")
        same(Path(source), Path(point))


def huge(source: str) -> None:
    offsets = range(0, HUGE_BYTES, HUGE_BYTES // (RANDOM_BYTES // STEP_BYTES))
    with open(f"{source}/huge", "wb") as file:
        file.truncate(HUGE_BYTES)
        for offset in offsets:
            file.seek(offset)
            file.write(os.urandom(STEP_BYTES))
    with opened(source, "huge") as (mount, point):
        with open(f"{source}/huge", "rb") as ours, open(f"{point}/huge", "rb") as theirs:
            began = now()
            for offset in offsets:
                ours.seek(offset)
                theirs.seek(offset)
                if ours.read(STEP_BYTES) != theirs.read(STEP_BYTES):
                    raise RuntimeError(f"the bytes at {offset} differ")
            out("huge_parts", RANDOM_BYTES / 2**30 / (now() - began), "GiB/s")
        with open(f"{source}/huge", "r+b") as file:
            file.seek(HUGE_BYTES // 2 + 5)
            file.write(b"changed")
        timed("huge_refresh_edited", mount.refresh, "ms")
        with open(f"{point}/huge", "rb") as file:
            file.seek(HUGE_BYTES // 2 + 5)
            if file.read(7) != b"changed":
                raise RuntimeError("the edit is not seen")


def environment(source: str) -> None:
    with opened(sys.prefix, "environment") as (_, point):
        code = "import sys, msgspec, monarch.actor; print(sys.prefix, msgspec.__file__)"
        for pace in ("cold", "warm"):
            began = now()
            done = subprocess.run([f"{point}/bin/python", "-c", code], capture_output=True, text=True)
            out(f"environment_python_{pace}", now() - began, "s")
            if done.stdout.split() != [point, f"{point}/{os.path.relpath(sys.modules['msgspec'].__file__ or '', sys.prefix)}"]:
                raise RuntimeError(f"{done.stdout}{done.stderr}")
        files = sum(len(names) for _, _, names in os.walk(point))
        out("environment_files", files, "files")


def odd(source: str) -> None:
    root = os.fsencode(source)
    for name in (b"\xff\xfe", b"new\nline", b"sp ace", "\N{SNOWMAN}".encode(), b"-", b"x" * 255):
        with open(root + b"/" + name, "wb") as file:
            file.write(name)
    Path(source, "empty").touch()
    Path(source, "void").mkdir()
    Path(source, "first").write_text("linked")
    os.link(f"{source}/first", f"{source}/second")
    os.symlink("loop", f"{source}/loop")
    os.symlink("/nowhere" * 100, f"{source}/dangling")
    deep = Path(source, *(["d"] * DEPTH))
    deep.mkdir(parents=True)
    (deep / "bottom").write_text("here")
    growing, stop = Path(source, "growing"), threading.Event()

    def grow() -> None:
        with open(growing, "ab") as file:
            while not stop.wait(0.001):
                file.write(b"line\n" * 100)
                file.flush()

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        with opened(source, "odd") as (mount, point):
            for _ in range(20):
                mount.refresh()
                try:
                    data = Path(point, "growing").read_bytes()
                except OSError as error:
                    if error.errno != 5:
                        raise
                else:
                    if data.strip(b"line\n"):
                        raise RuntimeError("a growing file has bytes that were never written")
            stop.set()
            thread.join()
            timed("odd_refresh", mount.refresh, "ms")
            same(Path(source), Path(point))
            if Path(point, *(["d"] * DEPTH), "bottom").read_text() != "here":
                raise RuntimeError("the deepest file is not there")
    finally:
        stop.set()
        thread.join()


SECTIONS = {"many": many, "huge": huge, "environment": environment, "odd": odd}


def main() -> None:
    for name in sys.argv[1:] or SECTIONS:
        base = "/dev/shm" if os.path.isdir("/dev/shm") else None
        source = tempfile.mkdtemp(prefix="bench-mounts-", dir=base)
        try:
            SECTIONS[name](source)
        finally:
            shutil.rmtree(source, ignore_errors=True)
    shutdown_context().get(timeout=20)


if __name__ == "__main__":
    main()
