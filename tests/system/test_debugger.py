"""Breakpoints in actors, and terminals attached to them."""

from __future__ import annotations

import asyncio
import bdb
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from unittest.mock import AsyncMock, patch

import pytest

from monarch import config
from monarch.actor import Actor, ActorError, concurrent_endpoint, context, current_rank, debug_controller, endpoint, this_host
from monarch.actor.debug_service import PROMPT
from system.script import start_script
from system.terminal import LEFT, UP, WAIT_S, Pty, Wire
from system.waiting import error_of, wait_until

pytest_plugins = ["system.recorder"]
pytestmark = pytest.mark.usefixtures("faults")

PDB = r"\(Pdb\) "
TOP = re.escape(PROMPT)


@pytest.fixture(scope="module", autouse=True)
def any_port():
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("MONARCH_DEBUG_SERVER_PORT", "0")
        monkeypatch.delenv("MONARCH_DEBUG_SERVER_HOST", raising=False)
        yield


@pytest.fixture(scope="module")
def procs():
    return this_host().spawn_procs(per_host={"hosts": 2, "gpus": 2})


@pytest.fixture
def port():
    return find_port()


def find_port():
    from monarch._runtime.debug_jobs import find_debug_jobs

    debug_controller()
    return wait_until(lambda: [job.port for job in find_debug_jobs() if job.pid == os.getpid()])[0]


@pytest.fixture(autouse=True)
def no_session_is_left():
    yield
    if sessions():  # a test has failed, or its last message is on its way out
        with Wire(find_port()) as wire:
            wait_until(lambda: wire.enter("continue") or not sessions())


def sessions():
    return debug_controller().list.call_one(print_output=False).get(WAIT_S)


def wait_sessions(count):
    """The sessions, once there are so many and each has said where it is."""
    return wait_until(lambda: (found,) if len(found := sessions()) == count and all(info.lineno for info in found) else None)[0]


def make_debuggee():
    """A class by value: procs can't import this file without pytest."""

    class Debuggee(Actor):
        def __init__(self):
            self.value = 0

        @endpoint
        def add(self, number):
            total = current_rank().rank + number
            breakpoint()
            total += 1
            total += 2
            return total

        @endpoint
        def fail(self):
            breakpoint()
            self.raise_it(3)

        def raise_it(self, number):
            raise ValueError(f"bad {number}")

        @endpoint
        def twice(self):
            breakpoint()
            self.value = 1
            breakpoint()
            self.value = 2
            return self.value

        @endpoint
        def pid(self):
            return os.getpid()

        @endpoint
        def in_thread(self):
            def work():
                inside = "thread"
                breakpoint()
                done.append(inside)

            done = []
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            return done

    return Debuggee


def make_async_debuggee():
    class AsyncDebuggee(Actor):
        def __init__(self):
            self.second = asyncio.Event()

        @endpoint
        async def step(self):
            value = 1
            breakpoint()
            value += await self.one()
            await asyncio.sleep(0)
            value += 1
            return value

        async def one(self):
            return 1

        @endpoint
        async def task(self):
            async def work():
                inside = "task"
                breakpoint()
                return inside

            return await asyncio.create_task(work())

        @concurrent_endpoint
        async def overlap(self, number):
            breakpoint()
            if number == 0:
                await self.second.wait()
            self.second.set()
            return number

        @concurrent_endpoint
        async def quick(self):
            return "quick"

    return AsyncDebuggee


def test_an_actor_that_waits_for_a_terminal_is_told_of_as_such(port, caplog):
    with config.configured(stall_endpoint_limit="300ms"):
        procs = this_host().spawn_procs()
    debuggee = procs.spawn("debuggee", make_debuggee())
    answer = debuggee.add.call_one(1)
    wait_sessions(1)
    texts = wait_until(lambda: [record.getMessage() for record in caplog.records if record.name == "monarch.stalls"])
    stack = [line for line in texts[0].splitlines() if line.startswith("    | ")]
    assert re.fullmatch(
        r'    \| waits at a breakpoint \(File ".*test_debugger.py", line \d+, in .*Debuggee.add\); attach with: monarch debug', *stack
    )
    with pytest.raises(TimeoutError, match=r"rank 0: busy for .* s in 'add', waits at a breakpoint \(attach with: monarch debug\)"):
        answer.get(timeout=0.5)
    with Wire(port) as wire:
        wire.enter("continue")
        assert answer.get(WAIT_S) == 4
    assert not any(row.debugged for row in procs.activity().get(WAIT_S))
    procs.stop().get(WAIT_S)


def test_a_terminal_lists_attaches_steps_detaches_casts_and_continues(procs, port):
    debuggee = procs.spawn("debuggee", make_debuggee())
    answer = debuggee.add.call(10)
    wait_sessions(4)
    with Pty() as screen:
        screen.wait("Enter 'help' for a list of commands.\nEnter 'list' to show all active breakpoints.\n")
        screen.wait(TOP)
        screen.enter("list")
        for rank in range(4):
            screen.wait(rf"\| debuggee \| {rank} +\| hosts: {rank // 2}, gpus: {rank % 2} \| .* \| test_debugger.add +\| \d+ ")
        screen.wait(TOP)
        screen.enter("attach debuggee 1")
        screen.wait(r"Attached to debug session for debuggee 1 \(.*\)\n<last pdb output for debuggee 1 follows>\n")
        screen.wait(r"> .*test_debugger.py\(\d+\)add\(\)\n-> total \+= 1\n" + PDB)
        screen.enter("n")
        screen.wait(r"-> total \+= 2\n" + PDB)
        screen.enter("p total, 'x' * 3")
        screen.wait(r"\n\(12, 'xxx'\)\n" + PDB)
        screen.enter("w")
        outermost = screen.wait(rf"w\n((.|\n)*?)> .*add\(\)\n-> total \+= 2\n{PDB}")
        assert "behavior" not in outermost[1], "frames of the runtime are shown"
        screen.enter("detach")
        screen.wait(rf"Detached from debug session for debuggee 1 \(.*\)\n{TOP}")
        screen.enter("a debuggee 1")
        screen.wait(rf"follows>\n(.|\n)*-> total \+= 2\n{PDB}")
        screen.enter("c")
        screen.wait(rf"Debug session for debuggee 1 has ended: its message was handled\nDetached from .* debuggee 1 .*\n{TOP}")
        screen.enter("cast debuggee ranks(hosts=1, gpus=:) !total = 100")
        screen.wait(TOP)
        screen.enter("cast debuggee ranks(0,1) !total = 200")
        screen.wait(TOP)
        screen.enter("attach nobody 3")
        screen.wait(rf"Error processing command: No debug sessions for actor nobody; .*: debuggee\n{TOP}")
        screen.enter("attach debuggee 1")
        screen.wait(rf"Error processing command: No debug session for rank 1 .*: 0, 2, 3\n{TOP}")
        screen.enter("ttach debuggee 1")
        screen.wait(rf"Error parsing input: unknown command 'ttach'; did you mean 'attach'\?.*\n{TOP}")
        screen.enter("continue")
        screen.wait(TOP)
        assert answer.get(WAIT_S).values() == [203, 14, 103, 103]
        screen.enter("l")
        screen.wait(rf"no actor waits at a breakpoint\n{TOP}")
        screen.enter("q")
        assert screen.exit_status() == 0


def test_lines_are_edited_and_remembered_and_control_keys_are_harmless(procs, port):
    debuggee = procs.slice(hosts=0, gpus=0).spawn("debuggee", make_debuggee())
    answer = debuggee.twice.call_one()
    wait_sessions(1)
    with Pty("--port", str(port)) as screen:
        screen.wait(TOP)
        screen.enter("atach debuggee 0" + LEFT * 14 + "t")
        screen.wait("Attached to")
        screen.wait(PDB)
        screen.enter("p 40 + 2")
        screen.wait(rf"\n42\n{PDB}")
        screen.enter(UP)
        screen.wait(rf"p 40 \+ 2\n42\n{PDB}")
        screen.type("p nonsense")
        screen.wait("p nonsense")
        screen.type("\x03")
        screen.wait(PDB)
        screen.enter("p 1 + 1")
        screen.wait(rf"\n2\n{PDB}")
        screen.type("\x04")
        screen.wait(rf"Detached from debug session for debuggee 0 .*\n{TOP}")
        assert len(sessions()) == 1
        screen.enter(UP + UP + UP + UP)
        screen.wait("Attached to")
        screen.wait(PDB)
        screen.enter("c")
        screen.wait(rf"-> self.value = 2\n{PDB}")
        screen.enter("import time; time.sleep(0.5)")
        screen.enter("c")
        screen.wait(rf"has ended(.|\n)*{TOP}")
        screen.type("\x04")
        assert screen.exit_status() == 0
    assert answer.get(WAIT_S) == 2


def test_control_c_while_something_runs_detaches_from_it(procs, port):
    debuggee = procs.slice(hosts=0, gpus=0).spawn("debuggee", make_debuggee())
    answer = debuggee.add.call_one(1)
    wait_sessions(1)
    with Pty() as screen:
        screen.wait(TOP)
        screen.enter("attach debuggee 0")
        screen.wait(PDB)
        screen.enter("import threading; print('bu' + 'sy'); threading.Event().wait(2)")
        screen.wait("busy\n")
        screen.type("\x03")
        screen.wait(rf"Detached from debug session for debuggee 0 .*\n{TOP}", timeout=1.4)
        screen.enter("list")
        screen.wait(r"\| debuggee \| 0 .* \| \(runs\) +\| +\|")
        screen.enter("attach debuggee 0")
        screen.wait("debuggee 0 runs; its prompt comes when it stops at a breakpoint; Ctrl-C detaches\n")
        screen.wait(PDB)
        screen.enter("c")
        assert answer.get(WAIT_S) == 4
        screen.wait(TOP)


def test_two_terminals_at_once_on_different_sessions_and_on_the_same(procs, port):
    debuggee = procs.slice(hosts=0).spawn("debuggee", make_debuggee())
    answer = debuggee.add.call(1)
    wait_sessions(2)
    with Pty() as left, Wire(port) as right:
        left.wait(TOP)
        right.wait(TOP)
        left.enter("attach debuggee 0")
        right.enter("attach debuggee 1")
        left.wait(PDB)
        right.wait(PDB)
        right.enter("p 'right', total")
        right.wait(rf"\('right', 2\)\n{PDB}")
        left.enter("p 'left', total")
        left.wait(rf"\n\('left', 1\)\n{PDB}")
        right.enter("c")
        right.wait(TOP)
        right.enter("attach debuggee 0")
        right.wait(rf"\('left', 1\)\n{PDB}")
        left.type("half a li")
        left.wait("half a li")
        right.enter("p 'both'")
        right.wait(rf"'both'\n{PDB}")
        left.wait(r"p 'both'\n'both'\n")
        left.wait(rf"{PDB}half a li")
        left.type("\x03")
        left.wait(rf"\n{PDB}")
        left.enter("c")
        left.wait(TOP)
        right.wait(rf"Debug session for debuggee 0 has ended(.|\n)*{TOP}")
    assert answer.get(WAIT_S).values() == [4, 5]


def test_a_killed_process_ends_its_sessions_and_the_terminal_says_so(port, faults):
    procs = this_host().spawn_procs(per_host={"gpus": 2})
    debuggee = procs.spawn("mortal", make_debuggee())
    pids = debuggee.pid.call().get(WAIT_S).values()
    answer = debuggee.add.call(1)
    wait_sessions(2)
    with Pty() as screen:
        screen.wait(TOP)
        screen.enter("attach mortal 1")
        screen.wait(PDB)
        screen.type("p tot")
        screen.wait("p tot")
        os.kill(pids[1], signal.SIGKILL)
        screen.wait(rf"Debug session for mortal 1 has ended: its process is gone: .*signal 9.*\nDetached from .*\n{TOP}")
        error_of(answer)
        assert [info.rank for info in wait_sessions(1)] == [0]
        faults.wait(1)
        screen.enter("attach mortal 0")  # not behind the half command that was meant for the dead one
        screen.wait(PDB)
        screen.enter("c")
        screen.wait(TOP)
    procs.stop().get(WAIT_S)


@pytest.mark.parametrize("what", ["procs", "actors"])
def test_stop_does_not_wait_for_a_person(what, port):
    procs = this_host().spawn_procs()
    debuggee = procs.spawn("stopped", make_debuggee())
    answer = debuggee.add.call_one(1)
    wait_sessions(1)
    with Wire(port) as wire:
        wire.enter("attach stopped 0")
        wire.wait(PDB)
        began = time.monotonic()
        (procs if what == "procs" else debuggee).stop().get(WAIT_S)
        assert time.monotonic() - began < 5
        wire.wait(rf"Debug session for stopped 0 has ended: (its actor is being stopped|its process is gone).*\n(.|\n)*{TOP}")
    assert isinstance(error_of(answer), (ActorError, RuntimeError))
    if what == "actors":
        procs.stop().get(WAIT_S)


def test_quit_raises_in_the_endpoint_and_an_exception_is_looked_at_first(procs, port):
    debuggee = procs.slice(hosts=0, gpus=0).spawn("debuggee", make_debuggee())
    answer = debuggee.add.call_one(1)
    wait_sessions(1)
    with Wire(port) as wire:
        wire.enter("attach debuggee 0", "quit")
        wire.wait("Detached from")
        error = error_of(answer)
        assert isinstance(error, ActorError) and isinstance(error.exception, bdb.BdbQuit)
        answer = debuggee.fail.call_one()
        wait_sessions(1)
        wire.enter("attach debuggee 0", "b self.raise_it", "c", "clear", "c")
        wire.wait(r"Post-mortem of ValueError: bad 3\n> .*raise_it\(\)\n-> raise ValueError\(.*\n" + PDB)
        assert [info.function for info in sessions()] == ["test_debugger.raise_it"]
        wire.enter("p number", "up", "w", "c")
        wire.wait(rf"3\n{PDB}> .*fail\(\)\n-> self.raise_it\(3\)\n{PDB}")
        stack = wire.wait(rf"((.|\n)*?){PDB}")[1]
        assert "behavior.py" not in stack and "raise_it()" in stack
        wire.wait("has ended: its message raised ValueError")
    assert "bad 3" in str(error_of(answer))


def test_a_breakpoint_in_a_thread_of_an_actor_is_a_session_of_that_actor(procs, port):
    debuggee = procs.slice(hosts=0, gpus=0).spawn("debuggee", make_debuggee())
    answer = debuggee.in_thread.call_one()
    wait_sessions(1)
    with Wire(port) as wire:
        wire.enter("attach debuggee 0", "p inside", "c")
        wire.wait(rf"'thread'\n{PDB}")
        wire.wait(rf"Debug session for debuggee 0 has ended: it goes on\n(.|\n)*{TOP}")
        assert answer.get(WAIT_S) == ["thread"]
        answer = debuggee.in_thread.call_one()
        wait_sessions(1)
        wire.enter("attach debuggee 0", "b threading.Thread.join", "c")
        wire.wait("has ended: its thread has ended")
        assert answer.get(WAIT_S) == ["thread"]


def test_async_endpoints_their_tasks_and_overlapping_calls(procs, port):
    debuggee = procs.slice(hosts=0, gpus=0).spawn("loop", make_async_debuggee())
    answer = debuggee.step.call_one()
    wait_sessions(1)
    with Wire(port) as wire:
        wire.enter("attach loop 0", *"nnnn", "n")
        wire.wait(r"-> await asyncio.sleep\(0\)\n" + PDB)
        wire.wait(rf"-> value \+= 1\n{PDB}(.|\n)*-> return value\n{PDB}")
        wire.wait("has ended: its message was handled")
        assert answer.get(WAIT_S) == 3
        answer = debuggee.task.call_one()
        wait_sessions(1)
        wire.enter("attach loop 0", "p inside", "c")
        wire.wait(rf"'task'\n{PDB}")
        wire.wait(r"has ended: its (task has ended|message was handled)")
        assert answer.get(WAIT_S) == "task"
        answers = [debuggee.overlap.call_one(number) for number in range(2)]
        wait_sessions(1)  # the loop stands still at the first
        wire.enter("attach loop 0", "c")
        assert [info.actor_name for info in wait_sessions(2)] == ["loop", "loop-2"]  # and now at the second, before the first has ended
        with Wire(port) as other:
            other.enter("attach loop-2 0", "c")
            other.wait("has ended: its message was handled")
        wire.wait("has ended: its message was handled")
        assert [answer.get(WAIT_S) for answer in answers] == [0, 1]
        assert debuggee.quick.call_one().get(WAIT_S) == "quick"


def test_other_actors_of_the_process_run_on(procs, port):
    one = procs.slice(hosts=0, gpus=0)
    debuggee, other = one.spawn("debuggee", make_debuggee()), one.spawn("other", make_debuggee())
    answer = debuggee.add.call_one(0)
    wait_sessions(1)
    assert other.pid.call_one().get(WAIT_S) == other.pid.call_one().get(WAIT_S)
    with Wire(port) as wire:
        wire.enter("c", "q")
        assert answer.get(WAIT_S) == 3


def test_meshes_of_one_name_and_slices_with_equal_ranks_have_sessions_of_their_own(procs, port):
    cls = make_debuggee()
    first, second = procs.spawn("same", cls), procs.spawn("same", cls)
    answers = [first.slice(hosts=0, gpus=0).add.call_one(1), first.slice(hosts=1, gpus=1).add.call_one(2), second.add.call(3)]
    found = wait_sessions(6)
    assert len({(info.actor_name, info.rank) for info in found}) == 6
    assert {info.actor_name for info in found} == {"same", "same-2", "same-3"}
    unique = second.slice(hosts=0, gpus=0)._core.uid
    with Wire(port) as wire:
        wire.enter(f"cast {unique} ranks(:) !total = 50", f"cast {unique} ranks(:) c")
        assert answers[2].get(WAIT_S).values() == [53] * 4
        assert len(wait_sessions(2)) == 2
        wire.enter("continue", "quit")
        assert [answer.get(WAIT_S) for answer in answers[:2]] == [4, 5]


def test_the_unique_name_of_an_actor_attaches_too(procs, port):
    class Named(Actor):
        @endpoint
        def stop_here(self):
            breakpoint()
            return context().actor_instance.actor_id.actor_name

        @endpoint
        def name(self):
            return context().actor_instance.actor_id.actor_name

    named = procs.slice(hosts=0, gpus=0).spawn("named", Named)
    name = named.name.call_one().get(WAIT_S)
    answer = named.stop_here.call_one()
    wait_sessions(1)
    with Wire(port) as wire:
        wire.enter(f"attach {name} 0", "c")
        wire.wait("Detached from debug session for named 0")
    assert answer.get(WAIT_S) == name


def test_breakpoints_in_init_and_in_supervise_and_in_cleanup(procs, port):
    class Hooks(Actor):
        def __init__(self):
            breakpoint()
            self.made = True

        @endpoint
        def is_made(self):
            return self.made

        def __cleanup__(self, exc):
            breakpoint()  # passed over: the actor ends
            self.made = False

    hooks = procs.slice(hosts=0, gpus=0).spawn("hooks", Hooks)
    wait_sessions(1)
    with Wire(port) as wire:
        wire.enter("attach hooks 0", "n", "c")
        wire.wait("has ended")
    assert hooks.is_made.call_one().get(WAIT_S)
    hooks.stop().get(WAIT_S)


# --- who may connect -------------------------------------------------------------------------------------------------


def test_a_wrong_token_is_refused_whoever_brings_it(procs, port):
    with Wire(port) as wire:
        wire.enter("token 0123456789abcdef")
        assert wire.wait_end().startswith("refused: wrong token, or none; 'monarch debug', run as the user of the job")
    with Pty("--port", str(port), "--token", "wrong") as screen:
        assert screen.exit_status() == 1
        assert "monarch: refused: wrong token" in screen.text


def test_a_browser_is_not_listened_to(procs, port):
    with Wire(port) as wire:
        wire.enter("POST / HTTP/1.1", "Host: localhost", "", "list")
        assert "no actor waits" not in wire.wait_end()


def test_a_stranger_is_asked_for_the_token(procs, port):
    from monarch._runtime.debug_jobs import find_debug_jobs

    token = next(job.token for job in find_debug_jobs() if job.pid == os.getpid())
    with patch("monarch.actor.debug_server.owner_of", lambda peer, own: None):  # as where the kernel does not tell
        with Wire(port) as wire:
            wire.enter("list")
            assert wire.wait_end().startswith("token: refused: ")
        with Wire(port) as wire:
            wire.wait("token: ")
            wire.enter(token, "list")
            wire.wait(rf"Enter 'help'(.|\n)*no actor waits at a breakpoint\n{TOP}")
        with Pty("--host", "localhost", "--port", str(port)) as screen:
            screen.wait(TOP)


def test_the_place_of_the_server_is_in_a_file_of_the_user_alone(procs, port):
    from monarch._runtime.rundir import live_run_dirs

    files = [path for folder in live_run_dirs() if os.path.exists(path := os.path.join(folder, "debug.json"))]
    assert files and all(os.stat(path).st_mode & 0o777 == 0o600 for path in files)


# --- the programmatic interface ----------------------------------------------------------------------------------------


def test_the_controller_driven_through_its_own_streams(run_script, tmp_path):
    (tmp_path / "debuggee_module.py").write_text(
        "from monarch.actor import Actor, current_rank, endpoint\n"
        "class Debuggee(Actor):\n"
        "    @endpoint\n"
        "    async def to_debug(self):\n"
        "        return inner(current_rank().rank)\n"
        "def inner(rank):\n"
        "    breakpoint()\n"
        "    rank += 1\n"
        "    if rank == 2:\n"
        "        raise ValueError('bad rank')\n"
        "    return rank\n"
    )
    run_script(
        """
        import asyncio, re
        from unittest.mock import AsyncMock, patch
        from debuggee_module import Debuggee
        from monarch._src.actor.actor_mesh import ActorError
        from monarch._src.actor.debugger.debug_controller import DebugController
        from monarch._src.actor.debugger.debug_io import DebugStdIO
        from monarch._src.actor.endpoint import endpoint
        from monarch.actor import concurrent_endpoint
        from monarch._src.actor.proc_mesh import get_or_spawn_controller
        from monarch.actor import this_host

        class Testing(DebugController):
            def __init__(self):
                super().__init__()
                self._debug_io = DebugStdIO()

            @concurrent_endpoint
            async def blocking_enter(self):
                async with self._task_lock:
                    assert self._task is None
                    await self._enter()

            @endpoint
            async def server_port(self):
                return (await self._server).sockets[0].getsockname()[1]

        async def wait_breakpoints(controller, count):
            while True:
                found = await controller.list.call_one(print_output=False)
                if len(found) == count and all(info.lineno for info in found):
                    return found
                await asyncio.sleep(0.01)

        async def main():
            outputs = []
            lines = ["attach debuggee 0", "n", "n", "n", "n", "detach", "attach debuggee 0", "detach", "quit",
                     "cast debuggee ranks(2:) n", "cast debuggee ranks(1) c", "quit",
                     "attach debuggee 1", "bt", "c", "quit", "continue", "quit"]
            io = "monarch._src.actor.debugger.debug_io.DebugStdIO"
            with (patch(f"{io}.input", new=AsyncMock(side_effect=lines)),
                  patch(f"{io}.output", new=AsyncMock(side_effect=outputs.append))):
                controller = await get_or_spawn_controller("debug_controller", Testing)
                assert await controller.server_port.call_one() > 0
                answer = this_host().spawn_procs(per_host={"gpus": 3}).spawn("debuggee", Debuggee).to_debug.call()
                await controller.wait_pending_session.call_one()
                found = await wait_breakpoints(controller, 3)
                assert [(info.actor_name, info.rank, info.coords) for info in found] == [("debuggee", r, {"gpus": r}) for r in range(3)]
                assert {info.function for info in found} == {"debuggee_module.inner"}
                await controller.blocking_enter.call_one()
                at = r"> /.*debuggee_module.py\\(5\\)to_debug\\(\\)->1\\n-> return inner\\(.*\\)"
                expected = ["--Return--", r"\\n", at, r"\\n", r"\\(Pdb\\) "]
                places = [at for at, text in enumerate(outputs) if text == "--Return--"]
                assert len(places) >= 2, outputs
                for at in places[-2:]:
                    for pattern, text in zip(expected, outputs[at:], strict=False):
                        assert re.match(pattern, text), (pattern, text)
                await controller.blocking_enter.call_one()
                while [info.function for info in await controller.list.call_one(print_output=False)][1] != "debuggee_module.inner":
                    await asyncio.sleep(0.01)
                await controller.blocking_enter.call_one()
                assert any("-> return inner" in text for text in outputs)
                await wait_breakpoints(controller, 2)
                await controller.blocking_enter.call_one()
                await wait_breakpoints(controller, 0)
                try:
                    await answer
                except ActorError as error:
                    assert "bad rank" in str(error)
                else:
                    raise AssertionError

        asyncio.run(main())
        """,
        env={"PYTHONPATH": str(tmp_path), "MONARCH_DEBUG_SERVER_PORT": "0", "MONARCH_DEBUG_SERVER_HOST": "0.0.0.0"},
    ).check()


def test_sessions_opened_by_hand_are_read_and_written(procs):
    from monarch.actor.debug_session import DebuggerWrite

    controller = debug_controller()
    for _ in range(2):  # the same key twice is one session
        controller.debugger_session_start.call_one(3, {"gpus": 3}, "there", "handmade").get(WAIT_S)
    controller.wait_pending_session.call_one().get(WAIT_S)
    controller.debugger_write.call_one("handmade", 3, DebuggerWrite(b"hello\n", "m.f", 7)).get(WAIT_S)
    (info,) = sessions()
    assert (info.actor_name, info.rank, info.hostname, info.function, info.lineno) == ("handmade", 3, "there", "m.f", 7)
    with Wire(find_port()) as wire:
        read = controller.debugger_read.call_one("handmade", 3, 4)
        wire.enter("attach handmade 3", "abcdef")
        wire.wait("hello\n")
        assert read.get(WAIT_S).payload == b"abcd"
        assert controller.debugger_read.call_one("handmade", 3, 100).get(WAIT_S).payload == b"ef\n"
        controller.debugger_session_end.call_one("handmade", 3).get(WAIT_S)
        wire.wait("Detached from debug session for handmade 3")
    with pytest.raises(ActorError, match="No debug sessions for actor handmade"):
        controller.debugger_read.call_one("handmade", 3, 1).get(WAIT_S)


def test_the_table_goes_to_standard_output(procs, capfd):
    debug_controller().list.call_one().get(WAIT_S)
    assert "no actor waits at a breakpoint" in capfd.readouterr().out


# --- jobs of their own -------------------------------------------------------------------------------------------------

JOB = """
    import sys
    from monarch.actor import Actor, endpoint, this_host

    class Worker(Actor):
        @endpoint
        def step(self):
            breakpoint()
            return "stepped"

    worker = this_host().spawn_procs().spawn("worker", Worker)
    print(worker.step.call_one().get())
"""


def start_job(port, source=JOB, **env):
    return start_script(source, env={"MONARCH_DEBUG_SERVER_PORT": str(port), "MONARCH_DEBUG_SERVER_HOST": None, **env})


def wait_stderr(run, pattern):
    return wait_until(lambda: re.search(pattern, run.stderr()))


def test_a_taken_port_is_passed_over_and_the_jobs_of_a_user_are_listed():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with start_job(port) as one, start_job(port) as two:
            ports = [int(wait_stderr(run, r"another terminal: monarch debug --port (\d+)\n")[1]) for run in (one, two)]
            assert len({port, *ports}) == 3 and all(port < other < port + 50 for other in ports)
            with Pty() as screen:
                assert screen.exit_status() == 1
                for run, other in zip((one, two), ports, strict=True):
                    assert re.search(rf"monarch debug --port {other} .*pid {run.pid}: .*script.py", screen.text)
                assert "of your jobs can be debugged; choose one with --port" in screen.text
            for run, other in zip((one, two), ports, strict=True):
                command = [sys.executable, "-c", "from monarch.cli import main; main()", "debug", "--port", str(other)]
                piped = subprocess.run(command, input=b"attach worker 0\nc\nq\n", capture_output=True, timeout=20)
                assert (piped.returncode, piped.stderr) == (0, b"")
                assert b"Detached from debug session for worker 0" in piped.stdout
                assert run.finish().check().stdout == "stepped\n"
                assert run.stderr().count("waits at a breakpoint") == 1


@pytest.mark.parametrize("way", ["interrupt", "kill"])
def test_a_job_that_ends_while_it_is_debugged_leaves_nothing(way):
    with start_job(0) as run:
        port = int(wait_stderr(run, r"port (\d+)")[1])
        with Pty("--port", str(port)) as screen:
            screen.wait(TOP)
            screen.enter("attach worker 0")
            screen.wait(PDB)
            os.kill(run.pid, signal.SIGINT if way == "interrupt" else signal.SIGKILL)
            done = run.finish(timeout=8)
            assert not done.leftovers, str(done)
            if way == "interrupt":
                assert "has ended: the job ends" in screen.wait_end()
                assert screen.exit_status() == 0
            else:
                assert screen.exit_status() == 1
                assert "monarch: the job has ended" in screen.text


def test_a_pipe_into_a_job_that_is_killed_says_so():
    with start_job(0) as run:
        port = int(wait_stderr(run, r"port (\d+)")[1])
        command = [sys.executable, "-m", "monarch", "debug", "--port", str(port)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as piped:
            piped.stdin.write(b"list\n")
            piped.stdin.flush()
            while b"worker" not in piped.stdout.readline():
                continue
            os.kill(run.pid, signal.SIGKILL)
            assert piped.wait(WAIT_S) == 1
            assert piped.stderr.read() == b"monarch: the job has ended\n"


def test_a_server_that_can_not_start_fails_the_breakpoint():
    with start_job(0, MONARCH_DEBUG_SERVER_PROTOCOL="carrier-pigeon") as run:
        done = run.finish()
        assert done.returncode == 1 and not done.leftovers
        assert re.search(r"BdbQuit: nobody can attach to this breakpoint: NotImpl.*carrier-pigeon.* knows tcp only", done.stderr)


def test_no_job_is_an_error_of_one_line(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with Pty("--port", str(free.getsockname()[1])) as screen:
            assert screen.exit_status() == 1
            assert "monarch: no debugger answers: Connection refused" in screen.text


def test_in_the_client_it_is_plain_pdb(run_script):
    done = run_script(
        """
        from monarch.actor import Actor, endpoint, this_proc

        class Here(Actor):
            @endpoint
            def step(self):
                value = 7
                breakpoint()
                return value

        print("value", this_proc().spawn("here", Here).step.call_one().get())
        """,
        send_stdin="p value + 1\nc\n",
    ).check()
    assert "(Pdb) 8" in done.stdout and "value 7" in done.stdout and "monarch debug" not in done.stderr


# --- source of code that has no file ------------------------------------------------------------------------------------

BY_VALUE = """
    import linecache, sys
    from monarch.actor import Actor, ActorError, endpoint, this_host

    source = 'def work(stop):\\n    number = 41\\n    if stop:\\n        breakpoint()\\n    return number / 0  # the line\\n'
    linecache.cache["<cell 1>"] = (len(source), None, source.splitlines(True), "<cell 1>")
    namespace = {"__name__": "__main__"}
    exec(compile(source, "<cell 1>", "exec"), namespace)

    class Worker(Actor):
        @endpoint
        def run(self, function, stop):
            return function(stop)

    worker = this_host().spawn_procs().spawn("worker", Worker)
    for stop in (False, True):
        try:
            worker.run.call_one(namespace["work"], stop).get()
        except ActorError as error:
            print(error)
"""


def test_source_of_a_notebook_is_shown_in_tracebacks_and_in_the_debugger():
    with start_job(0, BY_VALUE) as run:
        run.wait_line("return number / 0  # the line")
        port = int(wait_stderr(run, r"port (\d+)")[1])
        with Wire(port) as wire:
            wire.enter("attach worker 0", "list", "c", "c")
            wire.wait(rf"> <cell 1>\(5\)work\(\)\n-> return number / 0  # the line\n{PDB}")
            wire.wait(r"  2  \s+number = 41\n(.|\n)*  5  ->\s+return number / 0  # the line\n")
            wire.wait("Post-mortem of ZeroDivisionError")
            wire.wait("has ended")
        run.finish().check()


def test_a_source_that_can_not_be_had_is_said_in_the_session():
    broken = """
    from monarch.actor import get_or_spawn_controller
    from monarch.actor.source_loader import SourceLoaderController

    class Broken(SourceLoaderController):
        @endpoint
        def get_source(self, filename):
            raise LookupError("burnt")

    get_or_spawn_controller("source_loader", Broken).get()
    """
    source = BY_VALUE.replace("    class Worker", broken + "\n    class Worker").replace("(False, True)", "(True,)")
    with start_job(0, source) as run:
        port = int(wait_stderr(run, r"port (\d+)")[1])
        with Wire(port) as wire:
            wire.enter("attach worker 0", "c", "c")
            wire.wait("Failed querying root client host for source code: (.|\n)*burnt")
            wire.wait("has ended")
        run.finish().check()


async def test_the_mocked_streams_are_not_asked_before_pdb_is(procs):
    """What is typed ahead meets the prompt that it was meant for."""
    from monarch.actor.debug_session import DebuggerWrite, DebugSession

    session = DebugSession(0, {}, "h", "a")
    io = AsyncMock(interrupted=None)
    io.input.side_effect = ["first", "detach"]
    attached = asyncio.create_task(session.attach(io))
    await asyncio.sleep(0)
    assert io.input.await_count == 0
    read = asyncio.create_task(session.debugger_read(100))
    assert (await read).payload == b"first\n"
    await session.debugger_write(DebuggerWrite(b"out", None, None))
    assert io.input.await_count == 1
    read = asyncio.create_task(session.debugger_read(100))
    await attached
    read.cancel()
    assert [call.args[0] for call in io.output.await_args_list][1:2] == ["out"]
