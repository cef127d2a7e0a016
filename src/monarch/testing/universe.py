"""Universes: a whole cluster inside one process, under a virtual clock, for testing programs made of actors.

    with universe(hosts=2, seed=7) as world:
        procs = world.hosts.spawn_procs(per_host={"gpus": 2})
        workers = procs.spawn("worker", Worker)
        world.kill(procs, hosts=1, gpus=0)

The runtime is the real one: messages are pickled and framed, actors have mailboxes and owners, host agents watch
processes. Only what is below it is simulated: processes, clock, network.

Read next: `network.py` for what a test does to connections, `scheduler.py` for how it all runs.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Callable, Coroutine, Iterable
from types import TracebackType
from typing import Any, Self, TypeVar

from monarch._base.agents import Agents, unpacked
from monarch._base.errors import explain
from monarch._base.ids import ProcRef, agent_at, draw_ids_from, random_id
from monarch._mesh.shape import Extent
from monarch._runtime import background
from monarch._runtime.faults import MeshFailure
from monarch._runtime.future import Future, drive_while_waiting, explain_lateness_by, settled
from monarch._runtime.lateness import story_of
from monarch._wire import messages
from monarch.actor import client
from monarch.actor.actor_mesh import ActorMesh
from monarch.actor.client import RootProcess
from monarch.actor.host_mesh import Attachment, HostMesh
from monarch.actor.mock import get_actor_mock_registry_state, swap_registry
from monarch.actor.proc_mesh import ProcMesh
from monarch.actor.proc_mesh_core import shared_names
from monarch.actor.process import known_process, set_process
from monarch.testing.machine import Machines, NodePlatform
from monarch.testing.network import Costs, Network, Side
from monarch.testing.node import Node
from monarch.testing.scheduler import Call, Scheduler, Wait
from monarch.testing.stall import DeadlockError, deadlock
from monarch.testing.trace import Trace
from monarch.testing.virtual_loop import VirtualPolicy

R = TypeVar("R")
_open: Universe | None = None
_KINDS = "a mesh of hosts, procs or actors, or a slice of one"
_GC_THRESHOLD = (50_000, 20, 50)
"""A thousand processes are a large heap that stays; to look through it as often as usual takes a third of the time."""


class Client:
    """The process of the test, as a side of the network."""

    def __init__(self, ref: ProcRef) -> None:
        self.ref = ref

    def __repr__(self) -> str:
        return "<the client>"


class UnhandledFaultsError(AssertionError):
    """Something failed in the universe, no owner handled it, and the test never looked at `world.faults`."""


class Universe:
    """A simulated cluster. Open it by `with`; then monarch's functions work on it, in this thread and in its actors."""

    def __init__(self, hosts: int, *, seed: int, costs: Costs, suspicion_s: float, limit_s: float, trace: int) -> None:
        self._num_hosts = _checked_count(hosts)
        self._scheduler = Scheduler(seed, limit_s, self._switch, costs.processor)
        self._scheduler.explain_stall = self._stalled
        self.network = Network(self._scheduler, costs, suspicion_s, self._side_of)
        """Delays, reorders, duplicates, stalls and cuts."""
        self.trace = Trace(trace)
        """Every message that has arrived, and what the test did to processes. Equal for equal seeds."""
        self._machines = Machines(self._scheduler, self.network)
        self._seed = seed
        self._faults: list[MeshFailure] = []
        self._unseen = 0
        self._before: Any = None
        self.hosts: HostMesh
        """The hosts, a mesh with the dimension `hosts`. The test itself runs on a machine of its own, `this_host()`."""
        self.client: Client
        """The process of the test, for `network`."""

    # --- time ----------------------------------------------------------------------------------------------------

    @property
    def now_s(self) -> float:
        """Virtual seconds since the universe was opened."""
        return self._scheduler.now_s

    def advance(self, seconds: float) -> None:
        """Let everything happen that happens within so many virtual seconds."""
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"seconds is {seconds!r}; expected a finite number, zero or more")
        self._scheduler.advance(seconds)

    def settle(self) -> None:
        """Let everything happen that waits for no timer: until no message is under way, no process starts or ends, no actor has work."""
        self._scheduler.wait_quiet(lambda: self._scheduler.in_flight == 0)

    def run(self, coro: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine of the test to its end, on an event loop of the universe."""
        return asyncio.run(coro)

    # --- what happens to processes -------------------------------------------------------------------------------

    def kill(self, mesh: Any, **where: Any) -> None:
        """Processes end at once, as by SIGKILL.

        Args:
            mesh: of hosts (the agent and all its processes), of procs, or of actors (their processes).
            where: a slice of it, such as `gpus=1`.

        Raises:
            TypeError: not a mesh.
            ValueError: no process of it runs yet, or it is the client, which is the test itself.
        """
        for node in self._nodes_of(mesh, where, "killed"):
            self.trace.note(self.now_s, f"kill {node.label}")
            self._machines.kill(node)

    def freeze(self, mesh: Any, **where: Any) -> None:
        """Processes stand still, as by SIGSTOP: nothing runs in them, nobody is told; see `kill` for the arguments."""
        for node in self._nodes_of(mesh, where, "frozen"):
            self.trace.note(self.now_s, f"freeze {node.label}")
            self._machines.freeze(node)

    def thaw(self, mesh: Any, **where: Any) -> None:
        """Frozen processes go on, as by SIGCONT."""
        for node in self._nodes_of(mesh, where, "thawed"):
            self.trace.note(self.now_s, f"thaw {node.label}")
            self._machines.thaw(node)

    @property
    def faults(self) -> list[MeshFailure]:
        """The failures that no owner handled, in order; in a real program the first ends it, by `unhandled_fault_hook`.

        A test that never looks at them fails when the universe ends.
        """
        self._unseen = 0
        return list(self._faults)

    # --- opening and closing -------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        global _open
        if _open is not None:
            raise RuntimeError(explain("a universe is open already", next="close it first: one process holds one universe at a time"))
        if asyncio._get_running_loop() is not None:
            raise RuntimeError(
                explain(
                    "a universe can't be opened while an event loop runs in this thread: real time would go on in it",
                    next="make the test a plain function, and run what is async in it by world.run(main())",
                )
            )
        _open = self
        draw = random.Random(f"ids {self._seed}")
        self._before = (
            known_process(),
            swap_registry(get_actor_mock_registry_state()),
            draw_ids_from(draw.randbytes),
            drive_while_waiting(None),
            explain_lateness_by(self._lateness),
            asyncio.get_event_loop_policy(),
            random.getstate(),
            time.sleep,
            gc.get_threshold(),
        )
        gc.set_threshold(*_GC_THRESHOLD)
        # What an earlier universe left there has the same ids: to share it would change the sizes of pickles.
        shared_names.cache_clear()
        unpacked.cache_clear()
        random.seed(self._seed)
        asyncio.set_event_loop_policy(VirtualPolicy(self._scheduler, self._before[5], self._machines.loops))
        background.run_elsewhere(self._run_in_background)
        time.sleep = self._sleep  # type: ignore[assignment]
        try:
            self._begin()
        except BaseException:
            self._restore()
            raise
        return self

    def _begin(self) -> None:
        machines = self._machines
        own = agent_at("inproc://client-host")
        ref = ProcRef(f"client<{random_id()}>", "inproc://client", "")
        node = machines.new_node("client", ref, own.address)
        node.mocks = swap_registry({})
        swap_registry(node.mocks)
        process = UniverseClient(ref, own, NodePlatform(machines, node), self)
        node.process = process
        assert node.router is not None
        node.router.listen()
        self._scheduler.node = node
        self.client = Client(ref)
        set_process(process)
        drive_while_waiting(node.loop)
        agents = Agents(f"inproc://host{rank}" for rank in range(self._num_hosts))
        for rank, agent in enumerate(agents):
            machines.start_agent(f"host{rank}", agent)
        self.hosts = HostMesh(agents, Extent(["hosts"], [self._num_hosts]).region.as_shape(), attachment=Attachment())
        self.network.record = lambda source, target, data: self.trace.add_message(self.now_s, source, target, data)

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        try:
            left = self._scheduler.close()
            for loop in self._machines.loops:
                loop.abandon()
        finally:
            self._restore()
        if exc is None:
            self._check(left)

    def _check(self, left: list[str]) -> None:
        if left:
            text = f"code of an actor does not return: threads {left}"
            raise RuntimeError(explain(text, next="look for a loop that catches BaseException"))
        if self._scheduler.defects:
            raise self._scheduler.defects[0]
        if self._unseen:
            story = "\n".join(failure.report() for failure in self._faults)
            raise UnhandledFaultsError(
                explain(
                    f"{self._unseen} failures reached the root of the universe unhandled",
                    next="check world.faults in the test, or handle them in __supervise__ of the owner",
                    detail=story,
                )
            )

    def _restore(self) -> None:
        global _open
        process, registry, entropy, loop, story, policy, state, sleep, threshold = self._before
        gc.set_threshold(*threshold)
        time.sleep = sleep
        background.run_elsewhere(None)
        asyncio.set_event_loop_policy(policy)
        random.setstate(state)
        drive_while_waiting(loop)
        explain_lateness_by(story)
        draw_ids_from(entropy)
        swap_registry(registry)
        set_process(process)
        _open = None

    # --- inside --------------------------------------------------------------------------------------------------

    def _switch(self, node: Node) -> None:
        if node.process is not None:
            set_process(node.process)
            swap_registry(node.mocks)

    def _stalled(self, wait: Wait, why: str) -> DeadlockError:
        return deadlock(wait, why, self._machines.nodes, self._scheduler.parked)

    def _lateness(self, future: Future[Any], patience_s: float) -> str:
        node = self._scheduler.running_node()
        return "" if node is None or node.process is None else story_of(node.process.proc, future, patience_s)

    def _sleep(self, seconds: float) -> None:
        if self._scheduler.running_node() is None:
            self._before[7](seconds)
        else:
            self._scheduler.sleep(seconds)

    def _run_in_background(self, coro: Coroutine[Any, Any, None]) -> None:
        node = self._scheduler.node
        assert node is not None
        Call(node, lambda: asyncio.run(coro)).ring()

    def add_fault(self, failure: MeshFailure) -> None:
        """Nobody handled this failure."""
        self._faults.append(failure)
        self._unseen += 1

    def start_own_agent(self, agent: ProcRef, client_uid: str) -> None:
        """The client's own host is needed."""
        self._machines.start_agent("client-host", agent, client_uid=client_uid)

    def _nodes_of(self, mesh: Any, where: dict[str, Any], what: str) -> list[Node]:
        if not isinstance(mesh, Client | HostMesh | ProcMesh | ActorMesh):
            raise TypeError(explain(f"{mesh!r} is no mesh, so it can't be {what}", next=f"give {_KINDS}"))
        if where and not isinstance(mesh, Client):
            mesh = mesh.slice(**where)
        if any(ref.uid == self.client.ref.uid for ref in _refs_of(mesh)):
            text = f"{mesh!r} belongs to the process of the test itself, which can't be {what}"
            raise ValueError(explain(text, next=f"give {_KINDS}, in other processes; world.network can cut or stall world.client"))
        nodes = self._machines.nodes
        found = [node for ref in _refs_of(mesh) if (node := nodes.get(ref.uid)) is not None]
        if not found:
            text = f"{mesh!r} has no process in this universe yet"
            raise ValueError(explain(text, next="wait for it, such as by procs.initialized.get()"))
        return found

    def _side_of(self, what: Any) -> Side:
        if what is None:
            return Side(everybody=True)
        if isinstance(what, HostMesh):
            return Side(machines=frozenset(ref.address for ref in _refs_of(what)))
        if isinstance(what, list | tuple):
            sides = [self._side_of(part) for part in what]
            return Side(
                frozenset().union(*(side.uids for side in sides)),
                frozenset().union(*(side.machines for side in sides)),
                any(side.everybody for side in sides),
            )
        return Side(uids=frozenset(ref.uid for ref in _refs_of(what)))


def _checked_count(hosts: Any) -> int:
    hint = "write universe(hosts=2); the machine of the test, this_host(), is there in any case"
    if not isinstance(hosts, int) or isinstance(hosts, bool):
        raise TypeError(explain(f"hosts is {hosts!r}; expected an integer, the number of hosts", next=hint))
    if hosts < 1:
        raise ValueError(explain(f"hosts is {hosts!r}; expected an integer of at least 1", next=hint))
    return hosts


def _refs_of(mesh: Any) -> Iterable[ProcRef]:
    if isinstance(mesh, Client):
        return (mesh.ref,)
    if isinstance(mesh, HostMesh):
        return mesh._here()
    if isinstance(mesh, ProcMesh):
        return mesh._refs
    if isinstance(mesh, ActorMesh):
        return mesh._view.refs
    raise TypeError(explain(f"{mesh!r} is no mesh of hosts, procs or actors", next=f"give {_KINDS}, or world.client"))


class UniverseClient(RootProcess):
    """The runtime of the test itself."""

    def __init__(self, ref: ProcRef, host: ProcRef, platform: NodePlatform, world: Universe) -> None:
        super().__init__(ref, platform)
        self._node = platform.node
        self._world = world
        self._host = host
        self._has_agent = False
        self._closing: Future[None] | None = None

    def host_identity(self) -> ProcRef:
        """The agent of the client's own host, running or not."""
        return self._host

    def need_agent(self, agent: ProcRef) -> None:
        """The agent of this host is started now, if it is the one and does not run."""
        if agent == self._host and not self._has_agent:
            self._has_agent = True
            self._world.start_own_agent(agent, self.proc.ref.uid)
            self.proc.host = agent
            self.proc.router.link_to(agent)

    def put_fault(self, failure: MeshFailure) -> None:
        """Nobody handled this failure: the world lists it, and the user's hook, if there is one, is called."""
        import monarch.actor

        self._world.add_fault(failure)
        hook: Callable[[MeshFailure], Any] = monarch.actor.unhandled_fault_hook
        if hook is not client.unhandled_fault_hook:
            Call(self._node, lambda: hook(failure)).ring()

    def on_host_lost(self, reason: str) -> None:
        """The agent of this host was killed."""
        if self._closing is None:
            lost, self._host = self._host, agent_at(f"{self._host.address}-{random_id()[:6]}")
            self._has_agent, self.proc.host = False, None
            self.on_agent_lost(lost, reason)

    def shut_down(self, budget_s: float) -> Future[None]:
        """Stop the actors of the test's process and everything on its host."""
        if self._closing is None:
            closing: Future[None] = Future._new()
            self._closing = closing
            self.proc.stop_cells("the client is being shut down", lambda: self._stop_agent(budget_s, closing))
        return self._closing

    def _stop_agent(self, budget_s: float, closing: Future[None]) -> None:
        def end() -> None:
            self.proc.router.close("the client was shut down")
            closing._complete(None)

        if self._has_agent:
            settled(self.proc.request(self._host, messages.ShutdownHost(budget_s)))._when_done(end)
        else:
            end()


def universe(
    hosts: int = 1,
    *,
    seed: int = 0,
    costs: Costs | None = None,
    suspicion_s: float = 3.0,
    limit_s: float = 7200.0,
    trace: int = 100_000,
) -> Universe:
    """A cluster of simulated hosts; open it by `with universe() as world:`.

    Args:
        hosts: size of `world.hosts`.
        seed: chooses among all the orders in which things may happen. Equal seeds, equal runs.
        costs: what messages and processes take, in virtual seconds.
        suspicion_s: how long `network.cut` is not noticed.
        limit_s: a wait of the test without a time-out that takes more virtual seconds is a deadlock.
        trace: how many events `world.trace` keeps.

    Raises:
        TypeError: `hosts` is no integer.
        ValueError: a number is out of range.
    """
    return Universe(hosts, seed=seed, costs=costs or Costs(), suspicion_s=suspicion_s, limit_s=limit_s, trace=trace)
