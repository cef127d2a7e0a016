"""Every way of getting away that a process has, against the one question: whose child is this?"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch._runtime import descendants

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="tags are Linux resource limits"), pytest.mark.timeout(20)]

SRC = Path(descendants.__file__).parents[2]
PROC = """
import os, subprocess, sys
from monarch._runtime import descendants
if {tagged}: descendants.mark_self({uid!r})
os.environ[descendants.UID_VARIABLE] = {uid!r}
{body}
sys.stdin.read()
"""

PLAIN = "print(subprocess.Popen(['sleep', '60']).pid, flush=True)"
NEW_SESSION = "print(subprocess.Popen(['sleep', '60'], start_new_session=True).pid, flush=True)"
CLEAN_ENVIRONMENT = "print(subprocess.Popen(['/bin/sleep', '60'], env={}, start_new_session=True).pid, flush=True)"
DAEMON = """
known, told = os.pipe()
if os.fork() == 0:
    os.setsid()
    child = os.fork()
    if child == 0:
        os.closerange(0, 3)
        import signal; signal.pause()
    os._exit(0 if os.write(told, b"%d" % child) else 1)
os.close(told)
os.wait()  # whoever reads the number finds nobody between the two
print(os.read(known, 20).decode(), flush=True)
"""


@pytest.fixture
def proc() -> Iterator[Proc]:
    made = Proc()
    yield made
    made.end()


class Proc:
    """A marked process, and the one child that tries to get away from it."""

    def __init__(self) -> None:
        self.uid = f"proc<{uuid.uuid4().hex}>"
        self.uids = {descendants.tag_of(self.uid): self.uid, descendants.tag_of("other"): "other"}

    def start(self, body: str, *, tagged: bool = True) -> int:
        code = PROC.format(uid=self.uid, body=body, tagged=tagged)
        env = {**os.environ, "PYTHONPATH": str(SRC)}
        self.process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True)
        assert self.process.stdout is not None
        self.child = int(self.process.stdout.readline())
        while Path(f"/proc/{self.child}/cmdline").read_bytes() == b"":  # its exec is about to end; pytest limits this
            os.sched_yield()
        return self.child

    def end(self) -> None:
        with os.fdopen(os.pidfd_open(self.child), "rb"):
            os.kill(self.child, 9)
        self.process.kill()
        self.process.communicate()


@pytest.mark.parametrize("body", [PLAIN, NEW_SESSION, CLEAN_ENVIRONMENT, DAEMON], ids=["plain", "session", "environment", "daemon"])
def test_a_descendant_is_known_however_it_got_away(proc: Proc, body: str) -> None:
    child = proc.start(body)
    assert descendants.owner_of(child, proc.uids) == proc.uid
    assert set(descendants.find_descendants([proc.uid])) == {proc.process.pid, child}


def test_the_environment_tells_where_the_tag_is_refused(proc: Proc) -> None:
    assert descendants.owner_of(proc.start(NEW_SESSION, tagged=False), proc.uids) == proc.uid


def test_a_proc_of_another_owner_is_nobodys(proc: Proc) -> None:
    child = proc.start(PLAIN)
    assert descendants.owner_of(child, {descendants.tag_of("other"): "other"}) is None
    assert not set(descendants.find_descendants(["other"]))


def test_the_children_of_a_process_are_listed(proc: Proc) -> None:
    child = proc.start(PLAIN)
    assert descendants.children_of(proc.process.pid) == [child] == descendants._children_by_scan(proc.process.pid)
    assert proc.process.pid in descendants.children_of(os.getpid())


def test_a_process_that_is_gone_has_no_owner_and_no_children() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert descendants.owner_of(process.pid, {descendants.tag_of("a"): "a"}) is None
    assert descendants.children_of(process.pid) == []
    assert descendants.is_zombie(process.pid)


def test_tags_differ_and_are_never_the_unlimited_value() -> None:
    tags = {descendants.tag_of(f"proc-{rank}") for rank in range(2000)}
    assert len(tags) == 2000
    assert all(1 << 61 <= tag < 1 << 62 for tag in tags)
