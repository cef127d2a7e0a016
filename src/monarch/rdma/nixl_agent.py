"""The agent of NIXL, and the one thread that owns it.

    Agent     what NIXL can do, in our words: register memory, tell others of it, begin a transfer, look at it
    Driver    the thread: takes jobs, polls the transfers that they wait for, and keeps their deadlines

Agents are not thread-safe, and nothing tells when a transfer is complete but asking. So a job is a generator that yields each transfer
that it has begun and goes on when that is complete, all on the thread of the driver.

Rules of this file:
    1. Only the thread of the driver calls the agent, from its first breath to its last.
    2. An agent that takes too long to start is given up for good; whoever asks gets an error at once from then on.
    3. A transfer whose time is over is not cancelled, because UCX may still write: its job keeps what it uses until it is complete.
    4. A fork has no thread and must not run a destructor of NIXL: what it inherits is never freed.

Read next: `nixl_transport.py` for the jobs, `nixl_library.py` for what the library must be told.
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from enum import Enum, auto
from typing import Any, TypeAlias

from monarch.rdma import nixl_library
from monarch.rdma.errors import DeadlineError, TransferError, UnreachableError

_logger = logging.getLogger("monarch.rdma")
_PROGRESS_US = 100_000
"""How often NIXL's own thread looks unasked; with its default of 0 it would use a core. Events wake it as well."""
_SPIN_S = 100e-6
"""How long it polls without a pause when something has happened."""
_LONGEST_PAUSE_S = 1e-3
_PAUSES = 8
"""A pause is this part of the time in which nothing has happened."""
_GRACE_S = 1.0
"""How much later than its deadline a job may end: the thread may be in a copy by the kernel."""
_OF_CONNECTIONS = ("createXferReq", "postXferReq", "getXferStatus", "loadRemoteMD")
"""Calls that fail when something is wrong with the other end."""
Place: TypeAlias = tuple[int, int, int]
"""Address, bytes, device."""
Steps: TypeAlias = Generator[int, None, Any]


class State(Enum):
    """Of a transfer."""

    UNDER_WAY = auto()
    COMPLETE = auto()


class BrokenError(TransferError):
    """A transfer failed, which says as a rule that the other end is gone, or that the connection is; a new one shows which."""


class Agent:
    """One agent. Thread: the one that made it."""

    def __init__(self, name: str) -> None:
        """Cost: 200 ms for the library, 500 ms for the agent, four native threads.

        Raises:
            ImportError: there is no library.
            Exception: of NIXL's.
        """
        self.name = name
        with nixl_library.environment():
            library = self._library = nixl_library.load()
            options = library.nixlAgentConfig()
            options.useProgThread = True
            options.pthrDelay = _PROGRESS_US
            options.useListenThread = False
            options.syncMode = library.NIXL_THREAD_SYNC_NONE
            self._agent = library.nixlAgent(name, options)
            self._agent.createBackend("UCX", {})
        self._operations = {"read": library.NIXL_READ, "write": library.NIXL_WRITE}
        self._parts: dict[tuple[int, int, int], list[Any]] = {}
        """What is registered, and how often: NIXL knows a part by its place only."""

    def _kind(self, is_device: bool) -> Any:
        return self._library.VRAM_SEG if is_device else self._library.DRAM_SEG

    def register(self, address: int, nbytes: int, device: int = -1) -> tuple[int, int, int]:
        """Let the agent use memory; what `deregister` takes. `device` is a GPU's number, -1 for none."""
        place = address, nbytes, device
        known = self._parts.get(place)
        if known is not None:
            known[1] += 1
            return place
        part = self._library.nixlRegDList(self._kind(device >= 0), [(address, nbytes, max(device, 0), "")])
        with self._translated("registerMem"):
            self._agent.registerMem(part)
        self._parts[place] = [part, 1]
        return place

    def deregister(self, place: tuple[int, int, int]) -> None:
        """Undo one `register`."""
        known = self._parts[place]
        known[1] -= 1
        if not known[1]:
            del self._parts[place]
            with self._translated("deregisterMem"):
                self._agent.deregisterMem(known[0])

    def metadata(self, places: Sequence[Place], *, is_device: bool, with_connection: bool) -> bytes:
        """What another agent must load to reach registered memory, and this agent."""
        parts = self._library.nixlRegDList(self._kind(is_device), [(*place, "") for place in places])
        with self._translated("getLocalPartialMD"):
            return bytes(self._agent.getLocalPartialMD(parts, with_connection))

    def load(self, metadata: bytes) -> str:
        """Learn of another agent's memory; its name."""
        with self._translated("loadRemoteMD"):
            return bytes(self._agent.loadRemoteMD(metadata)).decode()

    def forget(self, name: str) -> None:
        """Close the connections to an agent, and forget its memory."""
        with self._translated("invalidateRemoteMD"):
            self._agent.invalidateRemoteMD(name)

    def begin(
        self, kind: str, local: Sequence[Place], is_local_device: bool, remote: Sequence[Place], is_remote_device: bool, name: str
    ) -> int:
        """Begin to move each local place from or to the remote one beside it; a request for `state` and `release`."""
        library = self._library
        near = library.nixlXferDList(self._kind(is_local_device), list(local))
        far = library.nixlXferDList(self._kind(is_remote_device), list(remote))
        with self._translated("createXferReq"):
            request = int(self._agent.createXferReq(self._operations[kind], near, far, name))
        try:
            with self._translated("postXferReq"):
                self._agent.postXferReq(request)
        except BaseException:
            self.release(request)
            raise
        return request

    def state(self, request: int) -> State:
        """Look at a transfer; raises what has become of it."""
        with self._translated("getXferStatus"):
            under_way = self._agent.getXferStatus(request) == self._library.NIXL_IN_PROG
        return State.UNDER_WAY if under_way else State.COMPLETE

    def release(self, request: int) -> None:
        """A transfer is over."""
        with self._translated("releaseXferReq"):
            self._agent.releaseXferReq(request)

    def _translated(self, call: str) -> _Translation:
        return _Translation(call)

    def keep_for_ever(self) -> None:
        """Never run the destructors, in a fork."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._agent))


class _Translation:
    """NIXL's errors in our words."""

    __slots__ = ("_call",)

    def __init__(self, call: str) -> None:
        self._call = call

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, exc: BaseException | None, traceback: object) -> None:
        if exc is not None and type(exc).__name__.startswith("nixl"):
            raise translate(exc, self._call) from exc


def translate(exc: BaseException, call: str) -> TransferError:
    """What an error of NIXL's means for a transfer."""
    kind = BrokenError if call in _OF_CONNECTIONS else TransferError
    return kind(f"{call} of NIXL failed: {exc}", next="NIXL_LOG_LEVEL=DEBUG and UCX_LOG_LEVEL=info in the environment tell more")


class Job:
    """Something for the thread of the driver. Thread: that one, except `wait`."""

    __slots__ = ("deadline_s", "error", "is_over", "on_end", "request", "result", "steps", "told")

    def __init__(self, steps: Steps, deadline_s: float, on_end: Callable[[], None] | None) -> None:
        self.steps = steps
        self.deadline_s = deadline_s
        self.on_end = on_end
        self.request: int | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.told = threading.Event()
        """`wait` has something to say."""
        self.is_over = False

    def tell(self, error: BaseException | None) -> None:
        """The first outcome counts."""
        if not self.told.is_set():
            self.error = error
            self.told.set()

    def end(self) -> None:
        """Nothing of it is under way any more."""
        self.is_over = True
        self.request = None
        if self.on_end is not None:
            self.on_end()

    def wait(self) -> Any:
        """What the steps returned; raises what they raised, or DeadlineError."""
        left_s = max(0.0, self.deadline_s - time.monotonic()) + _GRACE_S
        if not self.told.wait(min(left_s, threading.TIMEOUT_MAX)):
            raise DeadlineError
        if self.error is not None:
            raise self.error
        return self.result


class Driver:
    """See the head of this file. Thread: any, where nothing else is said."""

    def __init__(self, name: str, make: Callable[[str], Agent] = Agent) -> None:
        """Nothing is started yet.

        Args:
            name: of the agent; no other one anywhere has it.
        """
        self.name = name
        self._make = make
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._began_s = 0.0
        self._ready = threading.Event()
        self._failure = ""
        self._agent: Agent | None = None
        self._closed = False

    def begin(self) -> bool:
        """Start an agent, unless there is one; jobs wait for it. Whether it was this call that started it."""
        with self._lock:
            if self._thread is not None or self._closed:
                return False
            self._thread = threading.Thread(target=self._serve, name="monarch-nixl", daemon=True)
            self._began_s = time.monotonic()
            self._thread.start()
            return True

    def give_up_start(self, limit_s: float) -> None:
        """The time to start is over: without an agent by now there will be none, and whoever waits is told."""
        with self._lock:
            if self._ready.is_set():
                return
            self._failure = f"its agent has not started within {limit_s:g} s"
            self._ready.set()
        self._warn()
        self._drain()

    def _warn(self) -> None:
        nixl_library.warn_once(self._failure, "take nixl out of rdma_transports, or see UCX_LOG_LEVEL=info")

    def start(self, limit_s: float, deadline_s: float = float("inf")) -> None:
        """Have an agent, or wait for the one that is being started.

        Args:
            limit_s: how long a start may take, from its beginning; after that there will be no agent in this process.
            deadline_s: of who waits, `time.monotonic()`.

        Raises:
            UnreachableError: there is none.
            DeadlineError: there is none yet.
        """
        self.begin()
        if self._closed:
            raise UnreachableError("this process is being shut down")
        limit_end_s = self._began_s + limit_s
        if not self._ready.wait(max(0.0, min(limit_end_s, deadline_s) - time.monotonic())):
            if deadline_s < limit_end_s:
                raise DeadlineError
            self.give_up_start(limit_s)
        if self._failure:
            raise UnreachableError(self._failure)

    def do(self, steps: Callable[[Agent], Steps], deadline_s: float, on_end: Callable[[], None] | None = None) -> Job:
        """Have steps taken; they begin in order. `on_end` runs once nothing of them is under way, also if they never began."""
        job = Job(self._run(steps), deadline_s, on_end)
        with self._lock:
            if self._closed or self._failure or self._thread is None:
                job.tell(UnreachableError(self._failure or "this process is being shut down"))
            else:
                self._jobs.put(job)
                return job
        job.end()
        return job

    def do_soon(self, task: Callable[[Agent], object]) -> None:
        """Have something done that nobody waits for, or nothing when there is no agent any more. May be called by a finalizer."""
        self._jobs.put(Job(self._run(lambda agent: _once(task, agent)), float("inf"), None))

    def _run(self, steps: Callable[[Agent], Steps]) -> Steps:
        agent = self._agent
        assert agent is not None
        return (yield from steps(agent))

    # --- the thread ----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            agent = self._make(self.name)
        except Exception as exc:
            with self._lock:
                self._failure = self._failure or f"its agent can't start ({type(exc).__name__}: {exc})"
                self._ready.set()
            self._warn()
            self._drain()
            return
        with self._lock:
            late = bool(self._failure)
            if not late:
                self._agent = agent
            self._ready.set()
        if not late:
            self._take_jobs()
            self._agent = None
        self._drain()
        del agent

    def _take_jobs(self) -> None:
        active: list[Job] = []
        moved_s = time.monotonic()
        while True:
            quiet_s = time.monotonic() - moved_s
            try:
                job = self._jobs.get(not active or quiet_s > _SPIN_S, min(_LONGEST_PAUSE_S, quiet_s / _PAUSES) if active else None)
            except queue.Empty:
                pass
            else:
                if job is None:
                    break
                self._begin(job)
                active += [job] if not job.is_over else []
                moved_s = time.monotonic()
            if sum(self._poll(job) for job in active):  # all of them, each time
                moved_s = time.monotonic()
                active = [job for job in active if not job.is_over]
        for job in active:
            job.tell(UnreachableError("this process is being shut down"))
            job.steps.close()
            job.end()

    def _begin(self, job: Job) -> None:
        if time.monotonic() >= job.deadline_s:
            job.tell(DeadlineError())
            job.steps.close()
            job.end()
        else:
            self._step(job, None)

    def _poll(self, job: Job) -> bool:
        """Whether something has happened."""
        assert self._agent is not None and job.request is not None
        try:
            if self._agent.state(job.request) is State.UNDER_WAY:
                if time.monotonic() >= job.deadline_s:
                    job.tell(DeadlineError())
                return False
            failure = None
        except Exception as exc:
            failure = exc
        try:
            self._agent.release(job.request)
        except Exception as exc:
            failure = exc if failure is None else failure
        if failure is None and job.told.is_set():
            failure = DeadlineError()
        self._step(job, failure)
        return True

    def _step(self, job: Job, failure: Exception | None) -> None:
        try:
            job.request = next(job.steps) if failure is None else job.steps.throw(failure)
        except StopIteration as stop:
            job.result = stop.value
            job.tell(None)
            job.end()
        except Exception as exc:
            job.tell(exc)
            job.end()

    def _drain(self) -> None:
        """Nobody takes jobs any more."""
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            if job is not None:
                job.tell(UnreachableError(self._failure or "this process is being shut down"))
                job.end()

    # --- the end -------------------------------------------------------------------------------------------------

    def close(self, budget_s: float) -> bool:
        """Destroy the agent; whether that was done in time."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is None:
            return True
        self._jobs.put(None)
        thread.join(budget_s)
        if thread.is_alive():
            _logger.warning("the agent of NIXL does not end: budget_s=%g", budget_s)
        return not thread.is_alive()

    def abandon(self) -> None:
        """See rule 4."""
        if self._agent is not None:
            self._agent.keep_for_ever()


def _once(task: Callable[[Agent], object], agent: Agent) -> Steps:
    try:
        task(agent)
    except TransferError as exc:
        _logger.debug("nixl: task=%s reason=%s", task, exc)
    return
    yield


def unique_name() -> str:
    """A name for an agent that no other one has."""
    return f"{os.getpid()}-{os.urandom(8).hex()}"
