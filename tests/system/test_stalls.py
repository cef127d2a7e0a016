"""Stalls: each kind is noticed once, with the stack, in the client's log, and nothing is ended; late calls say what they wait for."""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from monarch import config
from monarch.actor import (
    Actor,
    ActorMesh,
    Channel,
    ProcMesh,
    as_endpoint,
    concurrent_endpoint,
    context,
    default_bootstrap_cmd,
    endpoint,
    this_host,
    with_timeout,
)
from system.script import run_script
from system.waiting import is_gone, wait_until

pytest_plugins = ["system.recorder"]
pytestmark = pytest.mark.usefixtures("faults")


class Notices(logging.Handler):
    """What logger `monarch.stalls` has said."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._changed = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self._changed:
            assert record.levelno == logging.WARNING
            self.texts.append(record.getMessage())
            self._changed.notify_all()

    def wait(self, count: int, timeout: float = 10.0) -> list[str]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.texts) >= count, timeout), self.texts
            return list(self.texts)


@pytest.fixture
def notices() -> Generator[Notices, None, None]:
    handler = Notices()
    logging.getLogger("monarch.stalls").addHandler(handler)
    yield handler
    logging.getLogger("monarch.stalls").removeHandler(handler)


class Worker(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def block(self, gate: str, ranks: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        if context().actor_instance.rank.rank in ranks:
            self.wait_for(gate)

    def wait_for(self, gate: str) -> None:
        while not os.path.exists(gate):
            time.sleep(0.005)

    @endpoint
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @endpoint
    def hold_interpreter_lock(self, seconds: int) -> float:
        began = time.monotonic()
        ctypes.PyDLL(None).sleep(seconds)
        return time.monotonic() - began

    @endpoint
    def sleep_in_c(self, seconds: int) -> tuple[int, float]:
        began = time.monotonic()
        left = ctypes.CDLL(None).sleep(seconds)  # a signal to this thread would end it early
        return left, time.monotonic() - began

    @endpoint
    def call_own_mesh(self, mesh: Any) -> str:
        return str(error_of_late(mesh.pid.call(), 1.0))

    @endpoint
    def masks_of_a_subprocess(self) -> dict[str, int]:
        source = "print(*(line for line in open('/proc/self/status') if line.startswith(('SigBlk', 'SigIgn'))))"
        lines = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout.split()
        return {name.rstrip(":"): int(value, 16) for name, value in zip(lines[::2], lines[1::2], strict=True)}

    @endpoint
    def start_child(self) -> int:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid

    @endpoint
    def use_faulthandler(self, path: str) -> str:
        with open(path, "w+") as file:
            faulthandler.enable(file)
            faulthandler.register(signal.SIGUSR1, file)
            faulthandler.dump_traceback_later(600, file=file)
            signal.raise_signal(signal.SIGUSR1)
            faulthandler.cancel_dump_traceback_later()
            faulthandler.unregister(signal.SIGUSR1)
            faulthandler.disable()
            file.seek(0)
            return file.read()


def error_of_late(future: Any, timeout: float) -> TimeoutError:
    with pytest.raises(TimeoutError) as caught:
        future.get(timeout)
    return caught.value


class AsyncWorker(Actor):
    def __init__(self) -> None:
        self.opened = asyncio.Event()

    @endpoint
    async def wait(self, seconds: float) -> None:
        await self.inner(seconds)

    async def inner(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    @concurrent_endpoint
    async def overlap(self) -> None:
        await self.opened.wait()

    @endpoint
    async def open(self) -> None:
        self.opened.set()


class SlowToBegin(Actor):
    def __init__(self, gate: str) -> None:
        while not os.path.exists(gate):
            time.sleep(0.005)

    @endpoint
    def ready(self) -> bool:
        return True


@pytest.fixture
def gate(tmp_path: Path) -> Generator[Path, None, None]:
    """A file that `Worker.block` waits for: `gate.touch()` opens it."""
    yield tmp_path / "gate"
    (tmp_path / "gate").touch()


def spawn(count: int = 1, **limits: Any) -> ProcMesh:
    """Procs with these limits and no others."""
    off: dict[str, Any] = {"stall_endpoint_limit": None, "stall_mailbox_limit": None, "stall_interpreter_limit": None}
    with config.configured(**off | limits):
        return this_host().spawn_procs({"procs": count})


def test_a_slow_endpoint_is_noticed_once_with_its_stack_and_goes_on(notices: Notices, gate: Path) -> None:
    procs = spawn(2, stall_endpoint_limit="200ms")
    worker = procs.spawn("worker", Worker)
    pids = list(worker.pid.call().get(10).values())
    slow, waiting = worker.slice(procs=1).block.call_one(str(gate)), worker.slice(procs=1).pid.call_one()
    notices.wait(1)
    with pytest.raises(TimeoutError):  # for several limits more
        slow.get(0.8)
    gate.touch()
    slow.get(10)
    assert waiting.get(10) == pids[1]
    procs.stop().get(15)
    [text] = notices.texts
    assert text.startswith("endpoint still runs: endpoint=block actor=<root>.<")
    assert "Worker worker{'procs': 1/2}> rank=1 seconds=" in text and " waiting=1 " in text
    assert f", pid {pids[1]}, host " in text and "nothing was ended" in text
    frames = [line for line in text.splitlines() if line.startswith("    | File ")]
    assert [line.rpartition(" in ")[2] for line in frames] == ["Worker.block", "Worker.wait_for"]
    assert "    |   self.wait_for(gate)" in text.splitlines()


def test_a_held_interpreter_lock_is_noticed_with_the_frame_that_holds_it_and_not_cut_short(notices: Notices) -> None:
    procs = spawn(2, stall_interpreter_limit="400ms", stall_endpoint_limit="1500ms")
    worker = procs.spawn("worker", Worker)
    worker.pid.call().get(10)
    holding = worker.slice(procs=1).hold_interpreter_lock.call_one(3)
    [text] = notices.wait(1)
    assert not holding._done
    assert worker.slice(procs=0).pid.call_one().get(1)
    assert text.startswith("interpreter does not answer: endpoint=hold_interpreter_lock actor=") and "rank=1" in text
    assert ", in hold_interpreter_lock" in text and "PyDLL(None).sleep(seconds)" in text
    assert "another thread" not in text
    late = str(error_of_late(holding, 0.9))
    assert "rank 1: busy for" in late and "its interpreter has not answered for" in late
    assert holding.get(10) == pytest.approx(3, abs=0.5)
    procs.stop().get(15)
    assert len(notices.texts) == 1


def test_a_held_interpreter_lock_is_blamed_on_the_actor_that_holds_it_and_not_on_one_that_waits(notices: Notices) -> None:
    procs = spawn(1, stall_interpreter_limit="1s")
    holder = procs.spawn("holder", Worker)
    waiter = procs.spawn("waiter", Worker)
    waiting = waiter.call_own_mesh.call_one(waiter)
    wait_until(lambda: any(row.waiting for row in procs.activity().get(10)))
    holding = holder.hold_interpreter_lock.call_one(4)
    [text] = notices.wait(1)
    assert text.startswith("interpreter does not answer: endpoint=hold_interpreter_lock actor=")
    assert "Worker holder{" in text.splitlines()[0]
    assert text.index("Worker holder{'procs': 0/1}>:") < text.index("Worker waiter{'procs': 0/1}>:")
    late = str(error_of_late(procs.spawn("third", Worker).pid.call_one(), 0.9))
    assert "rank 0: not there yet: its interpreter has not answered for" in late
    holding.get(10)
    waiting.get(10)
    procs.stop().get(15)


def test_dumping_a_process_interrupts_no_system_call_of_the_user(notices: Notices) -> None:
    procs = spawn(1, stall_interpreter_limit="200ms")
    worker = procs.spawn("worker", Worker)
    other = procs.spawn("other", Worker)
    sleeping = worker.sleep_in_c.call_one(3)
    wait_until(lambda: "sleep_in_c" in [row.endpoint for row in procs.activity().get(5)])
    assert other.hold_interpreter_lock.call_one(1).get(10) == pytest.approx(1, abs=0.4)
    [text] = notices.wait(1)
    assert ", in hold_interpreter_lock" in text and ", in sleep_in_c" in text
    left, seconds = sleeping.get(10)
    assert left == 0 and seconds == pytest.approx(3, abs=0.3)
    procs.stop().get(15)


def test_what_a_coroutine_awaits_is_in_the_notice(notices: Notices) -> None:
    procs = spawn(1, stall_endpoint_limit="200ms")
    worker = procs.spawn("worker", AsyncWorker)
    waiting = worker.wait.call_one(1.5)
    [text] = notices.wait(1)
    waiting.get(10)
    procs.stop().get(15)
    frames = [line.rpartition(" in ")[2] for line in text.splitlines() if "| File " in line]
    assert frames == ["AsyncWorker.wait", "AsyncWorker.inner"]


def test_concurrent_calls_are_noticed_once_for_their_actor(notices: Notices) -> None:
    procs = spawn(1, stall_endpoint_limit="200ms")
    worker = procs.spawn("worker", AsyncWorker)
    calls = [worker.overlap.call_one() for _ in range(3)]
    [text] = notices.wait(1)
    assert text.startswith("concurrent endpoint still runs: endpoint=overlap")
    assert "3 tasks 'overlap':" in text and ", in AsyncWorker.overlap" in text
    [row] = procs.activity().get(5)
    assert (row.state, row.num_concurrent, row.oldest) == ("idle", 3, "overlap") and row.oldest_s > 0.2
    assert "3 concurrent under way, the oldest 'overlap' for" in str(error_of_late(calls[0], 0.3))
    worker.open.call_one().get(10)
    for call in calls:
        call.get(10)
    procs.stop().get(15)
    assert len(notices.texts) == 1


def test_a_growing_mailbox_is_noticed_once(notices: Notices, gate: Path) -> None:
    procs = spawn(1, stall_mailbox_limit=100, stall_endpoint_limit="200ms")  # the latter for a look every 50 ms
    worker = procs.spawn("worker", Worker)
    worker.block.broadcast(str(gate))

    def mailbox_notices() -> list[str]:
        return [text for text in notices.texts if text.startswith("mailbox grows: endpoint=block ")]

    def one_more() -> list[str]:
        worker.sleep.broadcast(0)
        return mailbox_notices()

    wait_until(one_more)
    for _ in range(100):
        one_more()
        time.sleep(0.002)
    gate.touch()
    worker.pid.call().get(10)
    procs.stop().get(15)
    [text] = mailbox_notices()
    assert "stall_mailbox_limit=100" in text and int(text.partition(" waiting=")[2].split()[0]) >= 100


def test_a_stopped_process_is_noticed_as_such(notices: Notices) -> None:
    with config.configured(proc_stopped_limit=None):
        procs = spawn(2, stall_interpreter_limit="300ms", stall_endpoint_limit="600ms")
    worker = procs.spawn("worker", Worker)
    pids = list(worker.pid.call().get(10).values())
    os.kill(pids[1], signal.SIGSTOP)
    try:
        [text] = notices.wait(1)
        late = str(error_of_late(worker.pid.call(), 1.0))
    finally:
        os.kill(pids[1], signal.SIGCONT)
    assert re.match(r"process is stopped by a signal: (endpoint=pid .*)?seconds=[01]\.", text), text  # or between its answer and the next
    assert f"pid {pids[1]}" in text and "kill -CONT" in text
    assert "answered: rank 0 (1 of 2)" in late and "rank 1: its process is stopped by a signal" in late
    assert worker.slice(procs=1).pid.call_one().get(10) == pids[1]
    procs.stop().get(15)
    assert len(notices.texts) == 1


def test_a_stopped_process_is_noticed_before_it_is_killed(notices: Notices) -> None:
    with config.configured(proc_stopped_limit="2s"):
        procs = spawn(1, stall_interpreter_limit="10s")
    worker = procs.spawn("worker", Worker)
    pid = worker.pid.call_one().get(10)
    os.kill(pid, signal.SIGSTOP)
    try:
        [text] = notices.wait(1)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert re.match(r"process is stopped by a signal: (endpoint=pid .*)?seconds=[01]\.", text) and "proc_stopped_limit=2s" in text, text
    assert re.search(r"if it stays stopped, its host agent kills it in [01]\.\d s", text)
    assert worker.pid.call_one().get(10) == pid
    procs.stop().get(15)


def test_an_actor_that_waits_for_its_own_mesh_is_told_so(notices: Notices) -> None:
    procs = spawn(1, stall_endpoint_limit="200ms")
    worker = procs.spawn("worker", Worker)
    late = worker.call_own_mesh.call_one(worker).get(10)
    procs.stop().get(15)
    assert "rank 0: busy for 1." in late and "in 'call_own_mesh', 1 waiting; that is this very actor: it waits for its own mesh" in late
    [text] = notices.texts
    assert "| waits for the answer of worker.pid, rank 0; that is this very actor" in text


def test_a_constructor_that_does_not_return_is_noticed(notices: Notices, gate: Path) -> None:
    procs = spawn(1, stall_endpoint_limit="200ms")
    slow = procs.spawn("slow", SlowToBegin, str(gate))
    ready = slow.ready.call_one()
    notices.wait(1)
    assert re.search(r"rank 0: busy for \d.* in '__init__', 1 waiting", str(error_of_late(ready, 0.2)))
    gate.touch()
    assert ready.get(10)
    procs.stop().get(15)
    [text] = notices.texts
    assert "endpoint=__init__" in text and ", in SlowToBegin.__init__" in text


def test_nothing_is_noticed_when_the_limits_are_off(notices: Notices) -> None:
    procs = spawn(1)
    worker = procs.spawn("worker", Worker)
    worker.hold_interpreter_lock.call_one(1).get(10)
    procs.stop().get(15)
    assert notices.texts == []


class Owner(Actor):
    """Spawns procs of its own, whose stalls are the client's to hear of, also while their owner is stuck itself."""

    def __init__(self) -> None:
        self.worker = spawn(1, stall_endpoint_limit="300ms").spawn("worker", Worker)

    @endpoint
    def hold_interpreter_lock_while_it_sleeps(self) -> None:
        sleeping = self.worker.sleep.call_one(1)
        ctypes.PyDLL(None).sleep(2)
        sleeping.get(10)


def test_the_client_hears_of_procs_whose_owner_is_stuck(notices: Notices) -> None:
    procs = spawn(1)
    owning = procs.spawn("owner", Owner).hold_interpreter_lock_while_it_sleeps.call_one()
    [text] = notices.wait(1)
    assert not owning._done and "endpoint=sleep" in text
    owning.get(10)
    procs.stop().get(15)


def test_subprocesses_of_a_proc_have_no_signal_blocked_or_ignored_for_this() -> None:
    procs = spawn(1)
    masks = procs.spawn("worker", Worker).masks_of_a_subprocess.call_one().get(10)
    real_time = sum(1 << (number - 1) for number in range(signal.SIGRTMIN, signal.SIGRTMAX + 1))
    assert {name: mask & real_time for name, mask in masks.items()} == dict.fromkeys(masks, 0)
    procs.stop().get(15)


def test_the_users_own_faulthandler_works_and_so_do_dumps_after_it(notices: Notices, tmp_path: Any) -> None:
    procs = spawn(1, stall_interpreter_limit="300ms")
    worker = procs.spawn("worker", Worker)
    assert "use_faulthandler" in worker.use_faulthandler.call_one(str(tmp_path / "dump")).get(10)
    worker.hold_interpreter_lock.call_one(1).get(10)
    [text] = notices.wait(1)
    assert ", in hold_interpreter_lock" in text
    procs.stop().get(15)


def test_the_signal_reaches_nothing_that_a_proc_has_started(notices: Notices) -> None:
    procs = spawn(1, stall_interpreter_limit="300ms")
    worker = procs.spawn("worker", Worker)
    child = worker.start_child.call_one().get(10)
    worker.hold_interpreter_lock.call_one(1).get(10)
    assert ", in hold_interpreter_lock" in notices.wait(1)[0]
    assert not is_gone(child)
    procs.stop().get(15)


def test_a_proc_behind_another_program_is_noticed_without_a_stack_and_lives_on(notices: Notices) -> None:
    inner = default_bootstrap_cmd()
    wrapped = replace(inner, program="/bin/sh", args=["-c", f"{inner.program} {' '.join(inner.args)}; exit $?"])
    with config.configured(stall_interpreter_limit="300ms"):
        procs = this_host().spawn_procs(bootstrap_command=lambda point: wrapped)
    worker = procs.spawn("worker", Worker)
    pid = worker.pid.call_one().get(20)
    worker.hold_interpreter_lock.call_one(1).get(10)
    [text] = notices.wait(1)
    assert "no stack" in text and "endpoint=hold_interpreter_lock" in text
    assert worker.pid.call_one().get(10) == pid
    procs.stop().get(15)


STALLS_WITHOUT_LOGGING = """
import time
from monarch import config
from monarch.actor import Actor, endpoint, this_host

class Worker(Actor):
    @endpoint
    def step(self):
        time.sleep(0.6)

config.configure(stall_endpoint_limit="200ms")
procs = this_host().spawn_procs()
procs.spawn("worker", Worker).step.call_one().get()
procs.stop().get()
"""


def test_without_any_logging_set_up_the_notice_goes_to_standard_error() -> None:
    done = run_script(STALLS_WITHOUT_LOGGING).check()
    assert done.stderr.startswith("endpoint still runs: endpoint=step actor=<root>.<__main__.Worker worker")
    assert "    |   time.sleep(0.6)\n" in done.stderr
    assert done.stderr.count("endpoint still runs") == 1


# --- late calls ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def crew() -> Generator[Any, None, None]:
    procs = spawn(4)
    crew = procs.spawn("crew", Worker)
    crew.pid.call().get(10)
    yield crew
    procs.stop().get(15)


def test_a_time_out_names_who_has_answered_and_what_the_others_do(crew: Any, gate: Path) -> None:
    late = crew.block.call(str(gate), (1, 2))
    behind = crew.slice(procs=2).pid.call_one()
    wait_until(lambda: "0, 3 (2 of 4)" in str(late.exception(0)))
    first, answered, *others = str(error_of_late(late, 0.2)).splitlines()
    assert first == "no outcome within 0.2 s; the operation goes on, and a later get() can still have it"
    assert answered == "  answered: ranks 0, 3 (2 of 4)"
    assert [line.rpartition(" in ")[2] for line in others] == ["'block'", "'block', 1 waiting"]
    assert [line[:18] for line in others] == ["  rank 1: busy for", "  rank 2: busy for"]
    gate.touch()
    assert len(late.get(10)) == 4  # a later get has it
    behind.get(10)


def test_ranks_of_a_slice_are_those_of_the_mesh(crew: Any, gate: Path) -> None:
    late = crew.slice(procs=slice(2, 4)).block.call(str(gate), (3,))
    wait_until(lambda: "answered: rank 2 (1 of 2)" in str(late.exception(0)))
    assert "rank 3: busy for" in str(error_of_late(late, 0.2))
    gate.touch()
    late.get(10)


def test_each_future_of_a_stream_tells_of_the_whole_stream(crew: Any, gate: Path) -> None:
    first, second = crew.slice(procs=slice(0, 2)).block.stream(str(gate), (0,))
    first.get(10)
    assert re.search(r"answered: rank 1 \(1 of 2\)\n  rank 0: busy for .* in 'block'", str(error_of_late(second, 0.2)))
    gate.touch()
    second.get(10)


def test_polling_stays_quick(crew: Any, gate: Path) -> None:
    late = crew.slice(procs=0).block.call_one(str(gate))
    began = time.monotonic()
    texts = {str(error_of_late(late, 0)) for _ in range(50)}
    assert time.monotonic() - began < 1
    assert {text.splitlines()[1] for text in texts} == {"  answered: none of 1"}
    gate.touch()
    late.get(10)


def test_other_futures_time_out_as_before() -> None:
    receiver = Channel.open()[1]
    assert str(error_of_late(receiver.recv(), 0.01)).splitlines()[1:] == []


@pytest.mark.parametrize("adverb", ["call", "call_one", "choose", "stream"])
def test_a_call_through_a_view_with_a_timeout_fails_by_itself(crew: Any, gate: Path, adverb: str) -> None:
    view = with_timeout(crew, 0.3).slice(procs=1)
    late = getattr(view.block, adverb)(str(gate))
    if adverb == "stream":
        [late] = list(late)
    text = str(late.exception())
    assert text.startswith("no outcome of crew.block within 0.3 s (with_timeout)")
    assert "rank 1: busy for" in text
    gate.touch()
    assert crew.slice(procs=1).pid.call_one().get(10)
    assert isinstance(late.exception(), TimeoutError)  # the answer that came meanwhile is dropped


async def test_awaiting_a_call_with_a_timeout_raises(crew: Any, gate: Path) -> None:
    with pytest.raises(TimeoutError, match=r"(?s)crew\.block within 0\.4 s.*answered: ranks 0-2 \(3 of 4\).*rank 3: busy for"):
        await with_timeout(crew, 0.4).block.call(str(gate), (3,))
    gate.touch()
    assert len(await crew.pid.call()) == 4


def test_calls_in_time_are_as_without(crew: Any) -> None:
    view = with_timeout(crew, 5.0)
    assert isinstance(view, ActorMesh)
    pids = list(crew.pid.call().get(10).values())
    for _ in range(20):
        assert list(view.pid.call().get().values()) == pids
    assert len(view._deadlines._calls) <= 1  # what is over is not kept
    assert view.slice(procs=0).pid.choose().get() == pids[0]
    assert type(with_timeout(view, None)) is type(crew)
    view.sleep.broadcast(0)


def test_each_of_many_calls_has_its_own_deadline(crew: Any, gate: Path) -> None:
    view = with_timeout(crew, 0.2).slice(procs=2)
    late = [view.block.call_one(str(gate)) for _ in range(20)]
    assert ["within 0.2 s" in str(future.exception()) for future in late] == [True] * 20
    late = [as_endpoint(view.wait_for).call_one(str(gate))]  # once more, after the queue was empty
    assert "within 0.2 s" in str(late[0].exception())
    gate.touch()
    crew.slice(procs=2).pid.call_one().get(10)


class Forwarder(Actor):
    @endpoint
    def forward(self, mesh: Any, gate: str) -> str:
        return str(mesh.slice(procs=0).block.call_one(gate).exception())


def test_a_view_that_was_sent_keeps_its_timeout(crew: Any, gate: Path) -> None:
    procs = spawn(1)
    text = procs.spawn("forwarder", Forwarder).forward.call_one(with_timeout(crew, 0.2), str(gate)).get(10)
    assert text.startswith("no outcome of crew.block within 0.2 s (with_timeout)") and "rank 0: busy for" in text
    procs.stop().get(15)


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan")])
def test_a_timeout_is_a_positive_number(crew: Any, timeout: float) -> None:
    with pytest.raises(ValueError, match="expected a positive, finite number of seconds"):
        with_timeout(crew, timeout)


def test_a_timeout_is_no_text(crew: Any) -> None:
    with pytest.raises(TypeError, match=r"invalid timeout '1s'; expected a number of seconds\n  next: .*0\.5"):
        with_timeout(crew, "1s")  # type: ignore[arg-type]


def test_only_actor_meshes_have_timeouts() -> None:
    with pytest.raises(TypeError, match=r"(?s)with_timeout needs an actor mesh.*spawn\(\) returned"):
        with_timeout(this_host(), 1.0)
