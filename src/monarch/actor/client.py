"""The client: the process of the user's script, root of everything it spawns.

It exists from its first use. The agent of this host is started when the first procs are wanted, and everything that it
started ends with this process: by `shutdown_context()`, at interpreter exit, or by the closed socket when the process
is killed.

Rules of this file:
    1. A forked child is a process of its own: it drops what it inherited and becomes a client when it needs to.
    2. Unhandled faults go to `monarch.actor.unhandled_fault_hook` on a thread of their own, never on the net thread. None
       goes there once the client is closing: what ends then ends because of that.

Read next: `process.py` for the hooks, `_runtime/host.py` for the agent.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from monarch import config
from monarch._base.ids import ProcRef, agent_at, random_id
from monarch._mesh.shape import Extent, Point, Shape
from monarch._net.router import listen_at
from monarch._runtime import background, runtime_log
from monarch._runtime.cell import Activation
from monarch._runtime.faults import NO_MESH, MeshFailure, follows_from_stop, undelivered
from monarch._runtime.future import Future
from monarch._runtime.interpreter import host_command
from monarch._runtime.platform import CLIENT_SOCKET, SYSTEM, Platform
from monarch._runtime.rundir import RunDir, make_run_dir, remove_run_dir
from monarch._runtime.supervision import Failure
from monarch._wire import messages
from monarch._wire.messages import Fault
from monarch._wire.observation_messages import Stalled
from monarch.actor.context import ROOT, Instance
from monarch.actor.presence import Presence
from monarch.actor.proc_mesh import ProcMesh
from monarch.actor.proc_mesh_core import ProcMeshCore, ProcNames
from monarch.actor.process import Process, flush_logs, known_process, set_process
from monarch.actor.stall_log import StallLog

if TYPE_CHECKING:
    import subprocess

_logger = logging.getLogger("monarch.actor")
Waiters: TypeAlias = Literal["told", "forgotten"]
ENTRY = "monarch.actor.worker"
_UNIX = config.BindSpec("unix")
_SHUT_DOWN = "the client was shut down by shutdown_context(), or by the end of the program"
_AGENT_EXIT_S = 6.0
_REAP_STEP_S = 0.05
_FLUSH_S = 2.0
"""How long the last output of procs may take to come, and again to be printed."""


class RootCell:
    """Stands for the root where a cell is expected: it handles no messages."""

    def __init__(self, instance: Instance) -> None:
        self.uid = ROOT
        self.instance = instance


class RootProcess(Process):
    """A process that nobody spawned, root of everything it spawns. Thread: any."""

    def __init__(self, ref: ProcRef, platform: Platform = SYSTEM) -> None:
        super().__init__(ref, None, ready=True, platform=platform)
        self._controllers_lock = threading.RLock()
        core = ProcMeshCore(
            ProcNames.of_one("client", self.proc.ref), name="client", extent=Extent([], []), hosts=None, owner_actor=ROOT, owned=True
        )
        own = ProcMesh(core, Shape.unity())
        self._root = Instance(
            process=self, uid=ROOT, name=ROOT, class_name=None, rank=Point(0, Extent([], [])), proc_mesh=own, proc=own, creator=None
        )
        self._outside = Activation(RootCell(self._root), 0, (), ())

    @property
    def root(self) -> Instance:
        """The instance that speaks for threads outside any actor."""
        return self._root

    def outside_activation(self) -> Activation:
        """The root's."""
        return self._outside

    def controller_table(self) -> Any:
        """The table of controllers, which the first use creates."""
        with self._controllers_lock:
            if self.controllers is None:
                from monarch.actor.controllers import ControllerTable

                self.controllers = self._root.proc._spawn("controller_controller", ControllerTable, (), {}, system=True)
            return self.controllers

    def shut_down(self, budget_s: float) -> Future[None]:
        """End everything this process started, then what it is; begins at once, and may be repeated."""
        raise NotImplementedError

    # --- hooks ---------------------------------------------------------------------------------------------------

    def put_fault(self, failure: MeshFailure) -> None:
        """Nobody handled this failure."""
        raise NotImplementedError

    def on_unowned(self, owner_actor: str, failure: Failure) -> None:
        """Something that the root owns failed, and nobody handled it."""
        if owner_actor == ROOT:
            self.put_fault(MeshFailure(failure))
        else:
            super().on_unowned(owner_actor, failure)

    def on_root_bounced(self, method: str, fault: Fault) -> None:
        """A message of the root found nobody."""
        bounced = Fault(fault.kind, f"<{ROOT}>", fault.mesh, fault.rank, undelivered(method, fault), fault.proc)
        self.put_fault(MeshFailure(Failure((bounced,)), NO_MESH))


class ClientProcess(RootProcess):
    """The runtime of a client. Thread: any."""

    def __init__(self, run_dir: RunDir, presence: Presence) -> None:
        self._run_dir = run_dir
        self.presence = presence
        path = self._run_dir.path
        presence.settle(path)
        super().__init__(ProcRef(f"client<{random_id()}>", presence.place or f"ipc://{path}/{CLIENT_SOCKET}", ""))
        self.pid = os.getpid()
        self._host = self._new_host()
        self._agent: subprocess.Popen[bytes] | None = None
        self._agent_lock = threading.Lock()
        self._faults = FaultThread()
        self._stall_log = StallLog()
        self._closing: Future[None] | None = None
        self.proc.start()
        self.proc.loop.call_soon(self.proc.router.listen, listen_at(f"{path}/{CLIENT_SOCKET}"))
        self.proc.loop.call_soon(presence.begin, self.proc, path)

    def name_of(self, address: str) -> str:
        """What a worker is called in its cluster that this client reaches at `address`."""
        return self.presence.name_of(address)

    @property
    def gateway(self) -> ProcRef | None:
        """The agent without which this client reaches no other host."""
        return self.presence.gateway

    def host_identity(self) -> ProcRef:
        """The agent of this host, running or not."""
        return self._host

    def need_agent(self, agent: ProcRef) -> None:
        """The agent of this host is started now, if it is the one and does not run."""
        if agent == self._host and self._agent is None:
            # On a thread of its own, which no Ctrl-C reaches: half started, an agent would end with its socket and take
            # the run directory along, and the next would find its address in use.
            failure: list[BaseException] = []
            starter = threading.Thread(target=self._start_agent_once, args=(agent, failure), name="monarch-start", daemon=True)
            starter.start()
            starter.join()
            if failure:
                raise failure[0]

    def _start_agent_once(self, agent: ProcRef, failure: list[BaseException]) -> None:
        try:
            with self._agent_lock:
                if self._closing is not None:
                    raise RuntimeError(_SHUT_DOWN)
                if self._agent is None and agent == self._host:
                    self._start_agent()
        except BaseException as exc:
            failure.append(exc)

    def _new_host(self) -> ProcRef:
        """Identity of the next agent; not the address of the last, whose socket may still be there."""
        return agent_at(f"{self.presence.place or f'ipc://{self._run_dir.path}'}/h{random_id()[:6]}")

    def _start_agent(self) -> None:
        import subprocess

        ours, theirs = socket.socketpair()
        with theirs:
            fds = [theirs.fileno(), self._run_dir.lock_fd]
            host = self._host
            arguments = ["host", *map(str, fds), self._run_dir.path, host.address, self.proc.ref.uid, ENTRY]
            self._agent = subprocess.Popen(
                host_command(*arguments, msgspec.json.encode(config.snapshot()).decode()),
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.proc.host = self._host
        link = self.proc.router.link_to(self._host, dial=False)
        self.proc.loop.call_soon(self.proc.router.adopt, ours, link)

    # --- hooks ---------------------------------------------------------------------------------------------------

    def put_fault(self, failure: MeshFailure) -> None:
        """Nobody handled this failure: the user's hook decides. What the end of the client causes is no failure of its own."""
        if self._closing is None:
            self._faults.put(failure)
        elif failure.mesh_name != NO_MESH and not all(map(follows_from_stop, failure.faults)):
            _logger.error("actor failed while its client was shut down\n%s", failure.report())

    def on_stalled(self, stalled: Stalled) -> None:
        """Log it, on a thread for that: handlers of logs may block."""
        self._stall_log.put(stalled)

    def on_host_lost(self, reason: str) -> None:
        """The agent was killed: all procs are gone with it."""
        if self._closing is not None:
            return
        with self._agent_lock:  # a spawn on another thread either finds all of the old agent or nothing
            lost, self._host = self._host, self._new_host()
            agent, self._agent, self.proc.host = self._agent, None, None
        if agent is not None:
            self._reap(agent)
        self.on_agent_lost(lost, reason)

    def _reap(self, agent: subprocess.Popen[bytes]) -> None:
        if agent.poll() is None:  # its socket closes a moment before it can be waited for
            self.proc.loop.call_later(_REAP_STEP_S, lambda: self._reap(agent))

    # --- the end -------------------------------------------------------------------------------------------------

    def shut_down(self, budget_s: float) -> Future[None]:
        """End everything this client started, then the client; begins at once, and may be repeated."""
        if self._closing is None:
            self._closing = Future._new()
            threading.Thread(target=self._shut_down, args=(budget_s, self._closing, "told"), name="monarch-shutdown", daemon=True).start()
        return self._closing

    def shut_down_now(self, budget_s: float, waiters: Waiters) -> None:
        """`shut_down` on this thread: at interpreter exit no other can be started.

        Args:
            waiters: what becomes of threads that wait for an answer; "forgotten" is for those that end with the interpreter, which
                would print a traceback each.
        """
        self._faults.interrupts = False
        if self._closing is None:
            self._closing = Future._new()
            self._shut_down(budget_s, self._closing, waiters)
        else:
            self._closing.get()

    def _shut_down(self, budget_s: float, closing: Future[None], waiters: Waiters) -> None:
        try:
            self._stop_own_actors(budget_s)
            if waiters == "forgotten":
                self.proc.ports.forget_all()
            flushed = flush_logs()
            self._stop_agent(budget_s)
            self._print_last(flushed)
            self.close_memory()
            self.proc.close("the client was shut down")
            self.proc.ports.fail_all(RuntimeError(_SHUT_DOWN))
            self._faults.stop()
            self._stall_log.stop()
            background.stop()
            os.close(self._run_dir.lock_fd)
            remove_run_dir(self._run_dir.path)
        except BaseException as exc:
            closing._fail(exc)
            raise
        finally:
            if known_process() is self:
                set_process(None)
                SYSTEM.settle_client("", "")
            closing._complete(None)

    def _print_last(self, flushed: Future[None]) -> None:
        if self.printer is not None:
            deadline_s = time.monotonic() + _FLUSH_S
            flushed.exception(_FLUSH_S)  # what came from hosts that this client has attached to
            self.printer.close(max(0.1, deadline_s - time.monotonic()))

    def abandon(self) -> None:
        """End what this client started without waiting for it."""
        if self._agent is not None:
            self._agent.kill()
        remove_run_dir(self._run_dir.path)

    def _stop_own_actors(self, budget_s: float) -> None:
        ended = threading.Event()
        self.proc.stop_cells("the client is being shut down", ended.set)
        ended.wait(budget_s)
        self.proc.join_cells(0.2)

    def _stop_agent(self, budget_s: float) -> None:
        import subprocess

        with self._agent_lock:  # one that another thread was starting when Ctrl-C came is seen
            agent = self._agent
        if agent is None:
            return
        agent.send_signal(signal.SIGCONT)  # a stopped one would let everybody wait
        ended = self.proc.request(self._host, messages.ShutdownHost(budget_s))
        try:
            agent.wait(budget_s + _AGENT_EXIT_S)
            ended.exception(_FLUSH_S)  # behind the last output of its procs
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()

    def drop_inherited(self) -> None:
        """This process is a fork of the client: give back the descriptors, so that the client's end is still seen."""
        self.proc.router.abandon()
        os.close(self._run_dir.lock_fd)


_HEARD_S = 0.1
"""A call that failed by the same event shall raise its own error, which says more than the interrupt does, before that comes."""


class FaultThread:
    """Calls the user's hook, one fault at a time. Thread: any for `put` and `stop`."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[MeshFailure | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._broken = False
        self.interrupts = True
        """A hook that raises ends the program; False once it is ending anyway."""

    def put(self, failure: MeshFailure) -> None:
        """Report a failure that no owner handled."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="monarch-faults", daemon=True)
            self._thread.start()
        self._queue.put(failure)

    def stop(self) -> None:
        """Handle what was put so far, then end."""
        if self._thread is not None:
            self._queue.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join(1)

    def _serve(self) -> None:
        while (failure := self._queue.get()) is not None:
            if self._broken:
                continue
            import monarch.actor

            try:
                monarch.actor.unhandled_fault_hook(failure)
            except BaseException as exc:
                self._broken = True
                then = "KeyboardInterrupt is raised in the main thread now" if self.interrupts else "the program ends"
                _print_unhandled(failure, exc, then)
                if self.interrupts:
                    time.sleep(_HEARD_S)
                    # A real signal, not `_thread.interrupt_main`: it also wakes a main thread that blocks in `Future.get`.
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _print_unhandled(failure: MeshFailure, exc: BaseException, then: str) -> None:
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    lines = [f"monarch: unhandled failure; {now}, host {socket.gethostname()}, pid {os.getpid()}", failure.report()]
    if not isinstance(exc, SystemExit):
        lines.append(f"unhandled_fault_hook raised {exc!r}")
    lines.append(f"  next:  handle it in __supervise__ of the owner, or set monarch.actor.unhandled_fault_hook; {then}")
    print("\n".join(lines), file=sys.stderr, flush=True)


def unhandled_fault_hook(failure: MeshFailure) -> None:
    """Called for every failure that no owner handled; replace it by assigning to `monarch.actor.unhandled_fault_hook`.

    Returning drops the failure. Raising, as this default does, ends the program: the report goes to stderr and the
    main thread gets KeyboardInterrupt.
    """
    sys.exit(1)


def start_client(presence: Presence | None = None) -> ClientProcess:
    """Make this process a client. Callers hold the lock of `process.py`.

    Args:
        presence: how others reach it; None: as `default_transport` says.
    """
    config.warn_of_environment()
    main = sys.modules.get("__mp_main__")
    if main is not None:  # a child of multiprocessing: what its script defines is in a module that procs don't have
        import cloudpickle

        cloudpickle.register_pickle_by_value(main)
    if presence is None:
        presence = Presence() if config.value("default_transport") == _UNIX else _chosen_presence()
    # Here, not in the thread of the first actor: an interrupt of the main thread meanwhile would end the program with status 1.
    importlib.import_module("monarch.actor.behavior")
    run_dir = make_run_dir()
    try:
        client = ClientProcess(run_dir, presence)
    except BaseException:  # Ctrl-C among them
        SYSTEM.settle_client("", "")
        remove_run_dir(run_dir.path)
        os.close(run_dir.lock_fd)
        raise
    set_process(client)
    runtime_log.start_runtime_log("client")
    return client


def _chosen_presence() -> Presence:
    from monarch.actor.transport import chosen_presence

    return chosen_presence()


def shutdown_context(host_timeout: float | None = None) -> Future[None]:
    """End everything this client started, and the client itself; begins at once.

    Without a client it does nothing. Using monarch again afterwards starts a new client.

    Args:
        host_timeout: seconds for actors to drain and clean up; None: `stop_actor_timeout` plus `cleanup_timeout`.

    Raises:
        ValueError: the timeout is negative or no number.
    """
    if host_timeout is not None and not 0 <= host_timeout < float("inf"):
        raise ValueError(f"invalid timeout {host_timeout!r}; expected a finite number of seconds, zero or more")
    process = known_process()
    if not isinstance(process, RootProcess):
        return Future._completed(None)
    budget_s = config.seconds("stop_actor_timeout") + config.seconds("cleanup_timeout") if host_timeout is None else host_timeout
    return process.shut_down(budget_s)


def _at_exit() -> None:
    _shut_down_now("forgotten")


def _shut_down_now(waiters: Waiters) -> None:
    process = known_process()
    if isinstance(process, ClientProcess) and process.pid == os.getpid():
        try:
            process.shut_down_now(config.seconds("client_exit_timeout"), waiters)
        except KeyboardInterrupt:  # the user is in a hurry
            process.abandon()


def _before_threads_are_joined() -> None:
    """The main thread has ended. After Ctrl-C other threads that wait for an answer are to end too: one Ctrl-C is enough."""
    if getattr(sys, "last_type", None) is KeyboardInterrupt:
        _shut_down_now("told")


def _after_fork() -> None:
    process: Any = known_process()
    if isinstance(process, ClientProcess):
        set_process(None)
        SYSTEM.settle_client("", "")
        process.drop_inherited()


if getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)() is not None:
    config.configure(enable_log_forwarding=True)  # in a notebook the terminal, where output goes otherwise, is far away
atexit.register(_at_exit)
if hasattr(threading, "_register_atexit"):  # private, but there in every version so far; without it a second Ctrl-C is needed
    threading._register_atexit(_before_threads_are_joined)
os.register_at_fork(after_in_child=_after_fork)
