"""Every way in which an actor or its process can fail: what callers, owners and the client hear, and what works on."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import pytest

from monarch import config
from monarch.actor import (
    Actor,
    ActorError,
    BootstrapCommand,
    MeshFailure,
    Port,
    ProcMesh,
    current_rank,
    endpoint,
    this_host,
    this_proc,
)
from system.script import run_script, start_script
from system.waiting import error_of, is_gone, wait_until

if TYPE_CHECKING:
    from system.recorder import Recorder

pytest_plugins = ["system.recorder"]
pytestmark = pytest.mark.usefixtures("faults")


class Broke(BaseException):
    """Not even an Exception."""


def raise_(exc: BaseException) -> None:
    raise exc


# `raise_signal` where a signal dumps core: sent to the process, it may hit another thread, and the endpoint would go on for a moment.
WAYS: dict[str, Callable[[], Any]] = {
    "returns": lambda: None,
    "raises": lambda: raise_(ValueError("bad-cfg-17")),
    "BaseException": lambda: raise_(Broke("bad-cfg-18")),
    "sys.exit": lambda: sys.exit("bad-cfg-19"),
    "KeyboardInterrupt": lambda: raise_(KeyboardInterrupt("bad-cfg-20")),
    "CancelledError": lambda: raise_(asyncio.CancelledError("bad-cfg-21")),
    "os._exit(0)": lambda: os._exit(0),
    "os._exit(3)": lambda: os._exit(3),
    "os.abort": os.abort,
    "null pointer": lambda: ctypes.string_at(0),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: signal.raise_signal(signal.SIGSEGV),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "SIGABRT": lambda: signal.raise_signal(signal.SIGABRT),
}
ENDS_ACTOR = {
    "BaseException": "Broke: bad-cfg-18",
    "sys.exit": "SystemExit: bad-cfg-19",
    "KeyboardInterrupt": "KeyboardInterrupt: bad-cfg-20",
    "CancelledError": "CancelledError: bad-cfg-21",
}
ENDS_PROC = {
    "os._exit(0)": "exited with status 0",
    "os._exit(3)": "exited with status 3",
    "os.abort": "signal 6 (SIGABRT)",
    "null pointer": "signal 11 (SIGSEGV)",
    "SIGKILL": "signal 9 (SIGKILL)",
    "SIGSEGV": "signal 11 (SIGSEGV)",
    "SIGTERM": "signal 15 (SIGTERM)",
    "SIGABRT": "signal 6 (SIGABRT)",
}


def go(way: str, rank: int | None = 1) -> None:
    """Fail on one rank, or everywhere."""
    if rank is None or current_rank().rank == rank:
        WAYS[way]()


class Sync(Actor):
    def __init__(self, way: str = "returns", rank: int | None = 1) -> None:
        go(way, rank)

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def do(self, way: str, rank: int | None = 1) -> str:
        go(way, rank)
        return "done"

    @endpoint(explicit_response_port=True)
    def do_port(self, port: Port[str], way: str, rank: int | None = 1) -> None:
        go(way, rank)
        port.send("done")


class Async(Actor):
    def __init__(self, way: str = "returns", rank: int | None = 1) -> None:
        go(way, rank)

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def do(self, way: str, rank: int | None = 1) -> str:
        go(way, rank)
        return "done"

    @endpoint(explicit_response_port=True)
    async def do_port(self, port: Port[str], way: str, rank: int | None = 1) -> None:
        go(way, rank)
        port.send("done")


both_kinds = pytest.mark.parametrize("kind", [Sync, Async])


@pytest.fixture
def procs() -> Generator[ProcMesh, None, None]:
    mesh = this_host().spawn_procs({"procs": 3})
    yield mesh
    mesh.stop().get(10)


def check_dead(error: Exception, endpoint: str, kind: type, cause: str) -> None:
    """The text of a call's error names what was called, where it went, and why there was no answer."""
    assert isinstance(error, RuntimeError) and type(error).__name__ == "SupervisionError"
    text = str(error)
    for part in (f"Endpoint call {endpoint}() failed", f"{kind.__name__} crew{{'procs': 1/3}}", "rank 1", cause, "next:"):
        assert part in text
    assert error.endpoint == endpoint  # type: ignore[attr-defined]


def check_rest(crew: Any, endpoint: str) -> None:
    """The mesh is broken at rank 1, at once and for good; the rest of it works."""
    began = time.perf_counter()
    for view in (crew, crew.slice(procs=1), crew.slice(procs=slice(1, 3)), crew.slice(procs=slice(0, 2)).slice(procs=1)):
        assert type(error_of(view.pid.call())).__name__ == "SupervisionError"
        ends = sorted(type(future.exception(5)).__name__ for future in view.pid.stream())
        assert ends == ["NoneType"] * (len(view) - 1) + ["SupervisionError"]
    assert time.perf_counter() - began < 1
    assert len(crew.slice(procs=slice(0, 3, 2)).pid.call().get(10)) == 2
    assert crew.slice(procs=2).pid.call_one().get(10) > 0


# --- an endpoint ends in some way ------------------------------------------------------------------------------------


@both_kinds
def test_an_exception_goes_to_the_caller_and_the_actor_lives(procs: ProcMesh, kind: type[Sync]) -> None:
    crew = procs.spawn("crew", kind)
    pids = list(crew.pid.call().get(10).values())
    call, one, stream = crew.do.call("raises"), crew.slice(procs=1).do.call_one("raises", None), list(crew.do.stream("raises"))
    for error in (error_of(call), error_of(one), *filter(None, [future.exception(10) for future in stream])):
        assert isinstance(error, ActorError)
        assert error.message == "Actor call crew.do failed."
        assert isinstance(error.exception, ValueError) and error.exception.args == ("bad-cfg-17",)
        assert "ValueError: bad-cfg-17" in error.exception_formatted and "in raise_" in error.exception_formatted
    assert list(crew.pid.call().get(10).values()) == pids


@both_kinds
def test_the_error_of_a_call_is_that_of_the_lowest_rank(procs: ProcMesh, kind: type[Sync]) -> None:
    crew = procs.spawn("crew", kind)
    assert "bad-cfg-17" in str(error_of(crew.do.call("raises", None)))
    assert crew.do.call("raises", rank=7).get(10).item(procs=1) == "done"


@both_kinds
@pytest.mark.parametrize("adverb", ["broadcast", "port"])
def test_an_exception_that_goes_to_no_caller_ends_the_actor(procs: ProcMesh, faults: Recorder, kind: type[Sync], adverb: str) -> None:
    crew, others = procs.spawn("crew", kind), procs.spawn("others", kind)
    if adverb == "broadcast":
        crew.do.broadcast("raises")
    else:
        check_dead(error_of(crew.do_port.call("raises")), "crew.do_port", kind, "ValueError: bad-cfg-17")
    [failure] = faults.wait(1)
    check_failure(failure, crew, f"{kind.__name__} crew{{'procs': 1/3}}", "ValueError: bad-cfg-17")
    check_rest(crew, "crew.pid")
    assert others.do.call("returns").get(10).item(procs=1) == "done"


@both_kinds
@pytest.mark.parametrize("adverb", ["call", "broadcast", "port"])
@pytest.mark.parametrize("way", ENDS_ACTOR)
def test_a_base_exception_ends_the_actor_and_not_its_process(
    procs: ProcMesh, faults: Recorder, kind: type[Sync], way: str, adverb: str
) -> None:
    crew, others = procs.spawn("crew", kind), procs.spawn("others", kind)
    pids = list(crew.pid.call().get(10).values())
    fail(crew, kind, way, adverb, ENDS_ACTOR[way])
    [failure] = faults.wait(1)
    check_failure(failure, crew, f"{kind.__name__} crew{{'procs': 1/3}}", ENDS_ACTOR[way])
    check_rest(crew, "crew.pid")
    assert list(others.pid.call().get(10).values()) == pids
    assert list(procs.spawn("new", kind).pid.call().get(10).values()) == pids


@both_kinds
@pytest.mark.parametrize(
    ("way", "adverb"),
    [(way, adverb) for way in ENDS_PROC for adverb in ("call", "broadcast")] + [("os._exit(0)", "port"), ("SIGKILL", "port")],
)
def test_the_end_of_a_process_ends_its_actors(procs: ProcMesh, faults: Recorder, kind: type[Sync], way: str, adverb: str) -> None:
    crew, others = procs.spawn("crew", kind), procs.spawn("others", kind)
    pid = crew.slice(procs=1).pid.call_one().get(10)
    fail(crew, kind, way, adverb, ENDS_PROC[way])
    [failure] = faults.wait(1)
    check_failure(failure, crew, f"{kind.__name__} crew{{'procs': 1/3}}", ENDS_PROC[way])
    assert f"{kind.__name__} others{{'procs': 1/3}}" in failure.report()
    assert [(fault.mesh, fault.rank) for fault in failure.faults] == [(crew._name.get(), 1), (others._name.get(), 1)]
    assert str(pid) in failure.report()
    check_rest(crew, "crew.pid")
    check_rest(others, "others.pid")
    error = error_of(procs.spawn("new", kind).pid.call())
    assert ENDS_PROC[way] in str(error)
    assert "new" in faults.wait(2)[-1].report()


def fail(crew: Any, kind: type, way: str, adverb: str, cause: str) -> None:
    if adverb == "broadcast":
        crew.do.broadcast(way)
    else:
        name = "do" if adverb == "call" else "do_port"
        check_dead(error_of(getattr(crew, name).call(way)), f"crew.{name}", kind, cause)


def check_failure(failure: MeshFailure, mesh: Any, who: str, cause: str) -> None:
    assert failure.mesh_name == mesh._name.get()
    assert failure.crashed_ranks == [1] and "crashed_ranks=[1]" in repr(failure)
    assert who in failure.report() and cause in failure.report()
    assert "MeshFailure(" in str(failure)


def test_all_processes_may_die_at_once(faults: Recorder) -> None:
    procs = this_host().spawn_procs({"procs": 2})
    crew = procs.spawn("crew", Sync)
    error = error_of(crew.do.call("SIGSEGV", None))
    assert "signal 11 (SIGSEGV)" in str(error)
    assert sorted(rank for failure in faults.wait(2) for rank in failure.crashed_ranks) == [0, 1]
    assert "signal 11 (SIGSEGV)" in str(error_of(crew.do.call("returns")))
    procs.stop().get(10)
    again = this_host().spawn_procs({"procs": 2})
    assert again.spawn("crew", Sync).do.call("returns").get(10).item(procs=0) == "done"
    again.stop().get(10)


def test_every_rank_that_fails_is_reported_once(procs: ProcMesh, faults: Recorder) -> None:
    crew = procs.spawn("crew", Sync)
    crew.do.broadcast("raises", None)
    assert sorted(rank for failure in faults.wait(3) for rank in failure.crashed_ranks) == [0, 1, 2]
    error_of(crew.pid.call())
    crew.do.broadcast("raises", None)  # nobody is there: each message comes back
    assert [failure.mesh_name for failure in faults.wait(6)[3:]] == ["<none>"] * 3


def test_every_waiting_call_ends_when_the_process_dies(procs: ProcMesh, faults: Recorder) -> None:
    crew = procs.spawn("crew", Sleeper)
    pids = list(crew.pid.call().get(10).values())
    sleeping = [crew.sleep.call() for _ in range(20)]
    others = [crew.slice(procs=rank).pid.call_one() for rank in (0, 2)]
    streams = [list(crew.sleep.stream()) for _ in range(2)]
    os.kill(pids[1], signal.SIGKILL)
    for future in (*sleeping, *(stream[0] for stream in streams)):
        assert "signal 9 (SIGKILL)" in str(error_of(future))
    faults.wait(1)
    assert not any(future._done for stream in streams for future in stream[1:])
    for pid in (pids[0], pids[2]):
        os.kill(pid, signal.SIGKILL)
    for future in (*others, *(future for stream in streams for future in stream[1:])):
        assert "signal 9 (SIGKILL)" in str(error_of(future))
    faults.wait(3)


class Sleeper(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def sleep(self) -> None:
        time.sleep(60)


# --- __init__, bootstrap, launch -------------------------------------------------------------------------------------


@both_kinds
@pytest.mark.parametrize("way", ["raises", *ENDS_ACTOR])
def test_a_failing_init_is_reported_once_per_rank_and_fails_calls(procs: ProcMesh, faults: Recorder, kind: type[Sync], way: str) -> None:
    cause = {"raises": "ValueError: bad-cfg-17", **ENDS_ACTOR}[way]
    crew, others = procs.spawn("crew", kind, way), procs.spawn("others", kind)
    check_dead(error_of(crew.pid.call()), "crew.pid", kind, cause)
    [failure] = faults.wait(1)
    check_failure(failure, crew, f"{kind.__name__} crew{{'procs': 1/3}}", cause)
    crew.initialized.get(10)
    check_rest(crew, "crew.pid")
    assert len(others.pid.call().get(10)) == 3

    async def wait() -> Any:
        return await crew

    with pytest.raises(RuntimeError, match=cause):
        asyncio.run(wait())


@pytest.mark.parametrize("way", ["SIGKILL", "os._exit(3)"])
def test_a_process_that_dies_in_init_is_reported(procs: ProcMesh, faults: Recorder, way: str) -> None:
    crew = procs.spawn("crew", Sync, way)
    check_dead(error_of(crew.pid.call()), "crew.pid", Sync, ENDS_PROC[way])
    faults.wait(1)
    check_rest(crew, "crew.pid")


def test_a_class_that_does_not_load_is_a_failing_init(procs: ProcMesh, faults: Recorder) -> None:
    crew = procs.spawn("crew", Sync, Unloadable())  # type: ignore[arg-type]
    assert "does not load here" in str(error_of(crew.pid.call()))
    assert sorted(rank for failure in faults.wait(3) for rank in failure.crashed_ranks) == [0, 1, 2]
    assert "does not load here" in faults.seen[0].report()


class Unloadable:
    def __reduce__(self) -> Any:
        return _fail_to_load, (os.getpid(),)


def _fail_to_load(pid: int) -> Unloadable:
    if os.getpid() != pid:
        raise LookupError("does not load here")
    return Unloadable()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_failing_bootstrap_fails_initialized_and_later_spawns(faults: Recorder, asynchronous: bool) -> None:
    async def boot() -> None:
        raise KeyError("bad-boot-3")

    procs = this_host().spawn_procs({"procs": 2}, bootstrap=boot if asynchronous else lambda: raise_(KeyError("bad-boot-3")))
    with pytest.raises(ActorError, match="bad-boot-3"):
        procs.initialized.get(10)
    assert "bad-boot-3" in str(error_of(procs.spawn("crew", Sync).pid.call()))
    faults.wait(2)
    procs.stop().get(10)


@pytest.mark.parametrize("way", ["sys.exit", "os._exit(3)", "SIGKILL"])
def test_a_bootstrap_that_ends_its_process_fails_initialized(way: str, faults: Recorder) -> None:
    procs = this_host().spawn_procs({"procs": 2}, bootstrap=lambda: WAYS[way]())
    cause = {**ENDS_ACTOR, **ENDS_PROC}[way]
    error = error_of(procs.initialized)
    assert cause in str(error)
    assert cause in str(error_of(procs.spawn("crew", Sync).pid.call()))
    procs.stop().get(10)
    assert faults.seen


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (["/no/such/program"], "error creating proc .*failed to spawn process '/no/such/program': No such file or directory"),
        (["/etc/passwd"], "failed to spawn process '/etc/passwd': Permission denied"),
        (["/bin/sh", "-c", "exit 7"], "exited with status 7"),
        (["/bin/sh", "-c", "kill -9 $$"], "signal 9"),
        (["/bin/sleep", "60"], "Timeout.*did not report within 0.3 s"),
    ],
    ids=["missing", "not executable", "exits", "killed", "silent"],
)
def test_a_process_that_does_not_come_up_fails_initialized_and_calls(program: list[str], text: str, faults: Recorder) -> None:
    with config.configured(mesh_proc_spawn_max_idle="300ms"):
        procs = this_host().spawn_procs({"procs": 2}, bootstrap_command=BootstrapCommand(program[0], None, program[1:]))
    crew = procs.spawn("crew", Sync)
    with pytest.raises(ValueError, match=f"(?s){text}"):
        procs.initialized.get(10)
    assert type(error_of(crew.pid.call())).__name__ == "SupervisionError"
    assert [failure.mesh_name for failure in faults.wait(2)] == [crew._name.get()] * 2
    with pytest.raises(RuntimeError, match=f"(?s)error spawning actor mesh: .*{text}"):
        crew.initialized.get(10)
    procs.stop().get(10)


# --- what does not travel --------------------------------------------------------------------------------------------


class Thrower(Actor):
    """Raises what it is told to."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    @endpoint
    def throw(self, which: str) -> None:
        EXCEPTIONS[which]()

    @endpoint
    def give(self, which: str) -> Any:
        return RESULTS[which](self)

    @endpoint
    def take(self, value: Any) -> str:
        return type(value).__name__


class NeedsKeyword(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class NeedsTwo(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")
        self.pair = (first, second)


class HoldsLock(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class CannotSpeak(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError("no words")


class FailsToPickle(Exception):
    def __reduce__(self) -> Any:
        raise ZeroDivisionError("not me")


class LoadsAsOther(Exception):
    def __reduce__(self) -> Any:
        return dict, ()


def throw_local() -> None:
    class Local(Exception):
        pass

    raise Local("of a function")


def throw_chained() -> None:
    try:
        raise NeedsKeyword(code=1)
    except NeedsKeyword as exc:
        raise KeyError("outer") from exc


EXCEPTIONS: dict[str, Callable[[], None]] = {
    "NeedsKeyword: code 503": lambda: raise_(NeedsKeyword(code=503)),
    "NeedsTwo: 1 and 2": lambda: raise_(NeedsTwo(1, 2)),
    "HoldsLock: held": lambda: raise_(HoldsLock("held")),
    "CannotSpeak": lambda: raise_(CannotSpeak("?")),
    "FailsToPickle: f": lambda: raise_(FailsToPickle("f")),
    "LoadsAsOther: o": lambda: raise_(LoadsAsOther("o")),
    "Local: of a function": throw_local,
    "NeedsKeyword: code 1": throw_chained,
    "StopIteration: 5": lambda: raise_(StopIteration(5)),
    "StopAsyncIteration": lambda: raise_(StopAsyncIteration()),
    "TimeoutError: slow": lambda: raise_(TimeoutError("slow")),
    "NeedsKeyword: code 2": lambda: raise_(ExceptionGroup("several", [NeedsKeyword(code=2), ValueError("v")])),
    "UnicodeDecodeError": lambda: b"\xff".decode(),  # type: ignore[dict-item]
    "FileNotFoundError": lambda: open("/no/such/file").close(),
    "ActorError": lambda: raise_(ActorError(NeedsKeyword(code=4), "inner call")),
}
RESULTS: dict[str, Callable[[Any], Any]] = {
    "generator": lambda self: (i for i in ()),
    "lock": lambda self: self.lock,
    "frame": lambda self: sys._getframe(),
    "the result of give().lock, of type _thread.lock": lambda self: self,
    "socket": lambda self: socket.socket(),
}


@pytest.fixture(scope="module")
def thrower() -> Generator[Any, None, None]:
    procs = this_host().spawn_procs()
    yield procs.spawn("thrower", Thrower)
    procs.stop().get(10)


@pytest.mark.parametrize("which", EXCEPTIONS)
def test_any_exception_arrives_with_its_type_and_text(thrower: Any, which: str) -> None:
    error = error_of(thrower.throw.call_one(which))
    assert isinstance(error, ActorError)
    assert which in str(error) and "thrower.throw" in str(error)
    assert isinstance(error.exception, Exception)
    assert thrower.take.call_one(1).get(10) == "int"


@pytest.mark.parametrize(("which", "kind"), [("NeedsKeyword: code 503", NeedsKeyword), ("NeedsTwo: 1 and 2", NeedsTwo)])
def test_an_exception_keeps_its_class_and_attributes_whatever_its_constructor(thrower: Any, which: str, kind: type[Exception]) -> None:
    error = error_of(thrower.throw.call_one(which))
    assert isinstance(error, ActorError) and type(error.exception) is kind
    assert vars(error.exception) in ({"code": 503}, {"pair": (1, 2)})


def test_a_cause_arrives_with_its_class(thrower: Any) -> None:
    error = error_of(thrower.throw.call_one("NeedsKeyword: code 1"))
    assert isinstance(error, ActorError) and isinstance(error.exception, KeyError)
    assert isinstance(error.exception.__cause__, NeedsKeyword) and error.exception.__cause__.code == 1
    assert "The above exception was the direct cause" in str(error)


@pytest.mark.parametrize("which", RESULTS)
def test_a_result_that_does_not_travel_fails_the_call_only(thrower: Any, which: str) -> None:
    error = error_of(thrower.give.call_one(which))
    assert isinstance(error, ActorError) and "thrower.give" in str(error)
    assert which in str(error)
    assert thrower.take.call_one(1).get(10) == "int"


def test_a_result_that_does_not_load_fails_at_the_caller() -> None:
    procs = this_host().spawn_procs()
    other = procs.spawn("giver", Giver)
    assert "does not load here" in str(error_of(other.give.call_one()))
    values = other.give.call().get(10)
    with pytest.raises(LookupError, match="does not load here"):
        values.item()
    assert other.pid.call_one().get(10) > 0
    procs.stop().get(10)


class Giver(Actor):
    @endpoint
    def give(self) -> Unloadable:
        return Unloadable()

    @endpoint
    def pid(self) -> int:
        return os.getpid()


@pytest.mark.parametrize("adverb", ["call", "call_one", "choose", "stream", "broadcast"])
def test_an_argument_that_does_not_pickle_raises_at_the_call(thrower: Any, adverb: str) -> None:
    with pytest.raises(TypeError, match="lock"):
        getattr(thrower.take, adverb)(threading.Lock())
    with pytest.raises(ZeroDivisionError, match="not me"):
        getattr(thrower.take, adverb)(FailsToPickle())
    assert thrower.take.call_one(1).get(10) == "int"


def test_errors_are_bounded_in_length(thrower: Any) -> None:
    blob = "x" * 5_000_000
    error = error_of(thrower.throw.call_one(blob))
    assert isinstance(error, ActorError) and isinstance(error.exception, KeyError)
    assert len(str(error)) <= 4000


# --- owners ----------------------------------------------------------------------------------------------------------


class SyncOwner(Actor):
    """Owns a mesh on procs that it was given, that it spawned, or on its own."""

    def __init__(self, answer: str, where: Any) -> None:
        self.answer = answer
        self.heard: list[str] = []
        procs = {"own": this_proc, "spawned": lambda: this_host().spawn_procs(name="nested")}.get(where, lambda: where)()
        self.child = procs.spawn("child", Sync)

    @endpoint
    def ready(self) -> Any:
        self.child.pid.call().get()
        return self.child

    @endpoint
    def report(self) -> list[str]:
        return self.heard

    @endpoint
    def use_child(self, way: str) -> Any:
        return self.child.do.call(way, None).get()

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.heard.append(f"{failure.crashed_ranks} {failure.report()}")
        return respond(self.answer)


class AsyncOwner(Actor):
    def __init__(self, answer: str, where: Any) -> None:
        self.answer = answer
        self.heard: list[str] = []
        self.loop: Any = None
        procs = {"own": this_proc, "spawned": lambda: this_host().spawn_procs(name="nested")}.get(where, lambda: where)()
        self.child = procs.spawn("child", Sync)

    @endpoint
    async def ready(self) -> Any:
        self.loop = asyncio.get_running_loop()
        await self.child.pid.call()
        return self.child

    @endpoint
    async def report(self) -> list[str]:
        return self.heard

    @endpoint
    async def use_child(self, way: str) -> Any:
        return await self.child.do.call(way, None)

    @endpoint
    async def wait_heard(self) -> list[str]:
        while not self.heard:
            await asyncio.sleep(0.001)
        return self.heard

    @endpoint
    async def wait_forever(self) -> None:
        await asyncio.sleep(600)

    async def __supervise__(self, failure: MeshFailure) -> bool:
        assert self.loop is asyncio.get_running_loop()
        await asyncio.sleep(0)
        self.heard.append(f"{failure.crashed_ranks} {failure.report()}")
        return respond(self.answer)


def respond(answer: str) -> bool:
    if answer == "raises":
        raise LookupError("handler-gave-up")
    return answer == "handles"


both_owners = pytest.mark.parametrize("kind", [SyncOwner, AsyncOwner])
WHERES = ["own", "spawned"]
OWNED = {"raises": "ValueError: bad-cfg-17", "sys.exit": ENDS_ACTOR["sys.exit"], "SIGKILL": ENDS_PROC["SIGKILL"]}


@pytest.fixture
def owner_procs() -> Generator[ProcMesh, None, None]:
    mesh = this_host().spawn_procs()
    yield mesh
    mesh.stop().get(10)


@pytest.fixture
def given() -> Generator[Any, None, None]:
    mesh = this_host().spawn_procs(name="given")
    yield mesh
    mesh.stop().get(10)


@both_owners
@pytest.mark.parametrize(("where", "way"), [(where, way) for where in WHERES for way in OWNED if (where, way) != ("own", "SIGKILL")])
def test_an_owner_that_handles_a_failure_lives_on(owner_procs: ProcMesh, kind: type[SyncOwner], where: str, way: str) -> None:
    owner = owner_procs.spawn("owner", kind, "handles", where)
    child = owner.ready.call_one().get(10)
    child.do.broadcast(way, None)
    error_of(child.pid.call_one())
    [heard] = wait_until(lambda: owner.report.call_one().get(10))
    assert heard.startswith("[0] ")
    assert "child" in heard and OWNED[way] in heard


@both_owners
@pytest.mark.parametrize("way", ["raises", "SIGKILL"])
def test_the_death_of_given_procs_concerns_the_owners_of_the_actors_and_of_the_procs(
    owner_procs: ProcMesh, given: Any, faults: Recorder, kind: type[SyncOwner], way: str
) -> None:
    owner = owner_procs.spawn("owner", kind, "handles", given)
    child = owner.ready.call_one().get(10)
    child.do.broadcast(way, None)
    [heard] = wait_until(lambda: owner.report.call_one().get(10))
    assert "child" in heard and OWNED[way] in heard
    if way == "SIGKILL":
        [failure] = faults.wait(1)
        assert "<proc given{}>" in failure.report() and failure.mesh_name == given._name.get()
    else:
        assert faults.seen == []


@both_owners
@pytest.mark.parametrize("answer", ["declines", "raises"])
@pytest.mark.parametrize("way", ["raises", "SIGKILL"])
def test_an_owner_that_does_not_handle_a_failure_fails_too(
    owner_procs: ProcMesh, faults: Recorder, kind: type[SyncOwner], answer: str, way: str
) -> None:
    owner = owner_procs.spawn("owner", kind, answer, "spawned")
    child = owner.ready.call_one().get(10)
    child.do.broadcast(way, None)
    [failure] = faults.wait(1)
    cause = OWNED[way]
    error = error_of(owner.report.call_one())
    for text in (failure.report(), str(error)):
        assert f"{kind.__name__} owner" in text and "child" in text and cause in text
        assert ("handler-gave-up" in text) == (answer == "raises")
    assert failure.mesh_name == owner._name.get()


@both_owners
def test_a_nested_death_interrupts_who_waits_for_it_and_names_the_child(
    owner_procs: ProcMesh, faults: Recorder, kind: type[SyncOwner]
) -> None:
    owner = owner_procs.spawn("owner", kind, "declines", "spawned")
    owner.ready.call_one().get(10)
    error = error_of(owner.use_child.call_one("SIGKILL"))
    assert "child" in str(error) and "signal 9 (SIGKILL)" in str(error)
    [failure] = faults.wait(1)
    assert "owner" in failure.report() and "child" in failure.report()


def test_an_async_owner_hears_while_its_endpoint_waits(owner_procs: ProcMesh) -> None:
    owner = owner_procs.spawn("owner", AsyncOwner, "handles", "spawned")
    child = owner.ready.call_one().get(10)
    waiting = owner.wait_heard.call_one()
    child.do.broadcast("raises", None)
    assert "bad-cfg-17" in waiting.get(10)[0]


def test_a_declining_async_owner_is_interrupted_and_its_callers_hear_of_the_child(owner_procs: ProcMesh, faults: Recorder) -> None:
    owner = owner_procs.spawn("owner", AsyncOwner, "declines", "spawned")
    child = owner.ready.call_one().get(10)
    waiting = owner.wait_forever.call_one()
    child.do.broadcast("raises", None)
    error = error_of(waiting)
    assert "owner" in str(error) and "child" in str(error) and "bad-cfg-17" in str(error)
    faults.wait(1)


def test_the_owner_hears_and_not_the_caller_with_a_reference(owner_procs: ProcMesh) -> None:
    owner = owner_procs.spawn("owner", AsyncOwner, "handles", "spawned")
    child = owner.ready.call_one().get(10)
    assert "signal 9" in str(error_of(child.do.call("SIGKILL", None)))
    [heard] = wait_until(lambda: owner.report.call_one().get(10))
    assert "signal 9" in heard


def test_an_exception_that_crosses_two_actors_still_says_what_it_was(owner_procs: ProcMesh) -> None:
    owner = owner_procs.spawn("owner", AsyncOwner, "declines", "spawned")
    error = error_of(owner.use_child.call_one("raises"))
    assert isinstance(error, ActorError) and isinstance(error.exception, ActorError)
    assert "owner.use_child" in str(error) and "child.do" in str(error) and "ValueError: bad-cfg-17" in str(error)
    assert isinstance(error.exception.exception, ValueError)


# --- the client's hook -----------------------------------------------------------------------------------------------

PROGRAM = """
import atexit, os, signal, sys, threading, time
import monarch.actor
from monarch.actor import Actor, endpoint, this_host

class Crew(Actor):
    def __init__(self, way=None):
        if way is not None:
            self.fail(way)

    @endpoint
    def do(self, way):
        self.fail(way)

    def fail(self, way):
        if way == "raises":
            raise RuntimeError("boom-7")
        os.kill(os.getpid(), signal.SIGKILL)

atexit.register(lambda: print("atexit ran"))
procs = this_host().spawn_procs(per_host={"procs": 2})
"""


WAITS = {
    "sleep": "time.sleep(30)",
    "event": "threading.Event().wait()",
    "future": "from monarch.actor import Channel; Channel.open()[1].recv().get()",
    "asyncio": "import asyncio; asyncio.run(asyncio.sleep(30))",
}


@pytest.mark.parametrize(("way", "wait"), [("killed", "sleep"), *(("raises", wait) for wait in WAITS)])
def test_the_default_hook_ends_the_program_with_the_report(way: str, wait: str) -> None:
    lines = f"""
crew = procs.spawn("crew", Crew)
crew.do.broadcast({way!r})
{WAITS[wait]}
print("done")
"""
    done = run_script(PROGRAM + lines, timeout=10)
    assert done.returncode != 0 and not done.leftovers, done
    for part in {"raises": ["RuntimeError: boom-7", "script.py"], "killed": ["signal 9 (SIGKILL)"]}[way]:
        assert part in done.stderr, done
    assert "crew{'procs': 0/2}" in done.stderr or "crew{'procs': 1/2}" in done.stderr
    assert done.stdout == "atexit ran\n"
    assert done.seconds < 5


UNAWAITED = {
    "init": ("procs.spawn('crew', Crew, 'raises')", "RuntimeError: boom-7"),
    "collected": ("procs.spawn('crew', Crew).do.broadcast('raises'); import gc; gc.collect()", "RuntimeError: boom-7"),
    "launch": (
        "from monarch.actor import BootstrapCommand\n"
        "procs = this_host().spawn_procs(bootstrap_command=BootstrapCommand('/no/such/program'))\n"
        "procs.spawn('crew', Crew).do.broadcast('raises')",
        "failed to spawn process '/no/such/program'",
    ),
}


@pytest.mark.parametrize("case", UNAWAITED)
def test_a_failure_that_nobody_waits_for_ends_the_program(case: str) -> None:
    lines, cause = UNAWAITED[case]
    done = run_script(f"{PROGRAM}{lines}\ntime.sleep(30)\nprint('done')", timeout=10)
    assert done.returncode != 0 and not done.leftovers, done
    assert cause in done.stderr and "done" not in done.stdout


def test_a_program_that_catches_the_interrupt_ends_as_it_likes() -> None:
    lines = """
procs.spawn("crew", Crew, "raises")
try:
    time.sleep(30)
except KeyboardInterrupt:
    print("caught")
    sys.exit(5)
"""
    done = run_script(PROGRAM + lines, timeout=10).check(5)
    assert done.stdout == "caught\natexit ran\n"


def test_a_call_raises_what_became_of_it_before_the_program_is_interrupted() -> None:
    lines = """
crew = procs.spawn("crew", Crew)
try:
    crew.slice(procs=0).do.call_one("dies").get()
except RuntimeError as error:
    print(type(error).__name__, flush=True)
time.sleep(30)
"""
    done = run_script(PROGRAM + lines, timeout=10)
    assert done.stdout == "SupervisionError\natexit ran\n" and done.stderr.endswith("\nKeyboardInterrupt\n"), done


def test_a_hook_that_raises_is_called_once() -> None:
    lines = """
def hook(failure):
    print("hook", failure.crashed_ranks, flush=True)
    raise ValueError("from the hook")

monarch.actor.unhandled_fault_hook = hook
procs.spawn("a", Crew, "raises")
procs.spawn("b", Crew, "raises")
time.sleep(30)
"""
    done = run_script(PROGRAM + lines, timeout=10)
    assert done.returncode != 0 and not done.leftovers, done
    assert done.stdout.count("hook") == 1
    assert "ValueError('from the hook')" in done.stderr and "boom-7" in done.stderr


def test_a_hook_that_returns_drops_the_failure() -> None:
    lines = """
monarch.actor.unhandled_fault_hook = lambda failure: seen.append(failure.crashed_ranks) or seen
seen = []
crew = procs.spawn("crew", Crew, "raises")
print(type(crew.do.call("raises").exception()).__name__)
while len(seen) < 2:
    time.sleep(0.01)
print(sorted(seen))
"""
    done = run_script(PROGRAM + lines, timeout=10).check()
    assert done.stdout == "SupervisionError\n[[0], [1]]\natexit ran\n"
    assert done.stderr == ""


def test_a_multiprocessing_child_with_a_failure_dies_with_status_1() -> None:
    lines = """
import multiprocessing

def child():
    this_host().spawn_procs().spawn("crew", Crew, "raises")
    time.sleep(30)

if __name__ == "__main__":
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    print(process.exitcode)
"""
    done = run_script(PROGRAM.replace("procs = ", "# procs = ") + lines, timeout=10).check()
    assert done.stdout.splitlines()[0] == "1", done


# --- latency ---------------------------------------------------------------------------------------------------------


def test_a_kill_is_an_error_at_the_caller_and_at_the_hook_within_milliseconds(faults: Recorder) -> None:
    to_caller_s, to_hook_s = [], []
    procs = this_host().spawn_procs({"procs": 12})
    crew = procs.spawn("crew", Sleeper)
    pids = list(crew.pid.call().get(10).values())
    for rank, pid in enumerate(pids):
        call = crew.slice(procs=rank).sleep.call_one()
        wait_until(lambda rank=rank: procs.slice(procs=rank).activity().get(5)[0].state == "busy")
        began = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        error_of(call)
        to_caller_s.append(time.perf_counter() - began)
        faults.wait(rank + 1)
        to_hook_s.append(faults.times_s[-1] - began)
    assert statistics.median(to_caller_s) < 0.05
    assert statistics.median(to_hook_s) < 0.05
    procs.stop().get(10)
    assert all(map(is_gone, pids))


def test_a_failure_reaches_the_caller_before_the_owner() -> None:
    lines = """
crew = procs.spawn("crew", Crew)
call = crew.do.call("killed")
order = []
monarch.actor.unhandled_fault_hook = lambda failure: order.append(call._done)
call.exception(5)
while not order:
    time.sleep(0.01)
print(order[0])
"""
    with start_script(PROGRAM + lines) as run:
        assert run.finish(10).check().stdout.startswith("True\n")
