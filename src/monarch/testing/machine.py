"""Machines: what a universe gives the runtime instead of an operating system, and the processes on it.

The host agents are the real ones, upon a platform that starts nodes instead of forking.

Rules of this file:
    1. All processes share this interpreter: modules, class attributes and the working directory are the same for all, and
       what a process is told about environment, processors or executables is ignored.
    2. A process that is killed runs nothing any more, not even `finally`; its host agent hears of it a moment later.

Read next: `scheduler.py` for who runs, `universe.py` for what a test sees.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from monarch._base.ids import ProcRef
from monarch._net.router import Events
from monarch._runtime.board import Slot
from monarch._runtime.cell import Cell
from monarch._runtime.host import HostAgent
from monarch._wire import messages, zygote_messages
from monarch._wire.messages import ProcBoot
from monarch._wire.observation_messages import ActorActivity
from monarch.actor.client import ENTRY
from monarch.actor.worker import WorkerProcess
from monarch.testing.links import WiredRouter
from monarch.testing.network import Network
from monarch.testing.node import Node, ProcessLoop
from monarch.testing.scheduler import Scheduler
from monarch.testing.turns import ActorStrand
from monarch.testing.virtual_loop import VirtualLoop

if TYPE_CHECKING:
    import asyncio
    import socket

    from monarch._net.local import SegmentPool

_FIRST_PID = 100001


class Machines:
    """All hosts of a universe and the processes on them."""

    def __init__(self, scheduler: Scheduler, network: Network) -> None:
        self.scheduler = scheduler
        self.network = network
        self.nodes: dict[str, Node] = {}
        """By the process's uid; the dead ones too, until the uid is used again."""
        self.loops: list[VirtualLoop] = []
        self._pids = count(_FIRST_PID)
        self._nurseries: dict[str, Nursery] = {}

    def new_node(self, label: str, ref: ProcRef, machine: str) -> Node:
        """A process."""
        node = self.nodes[ref.uid] = Node(self.scheduler, label, ref.uid, machine, next(self._pids))
        return node

    def start_agent(self, label: str, ref: ProcRef, *, client_uid: str = "") -> Node:
        """Start a host agent.

        Args:
            client_uid: the client with which it ends; "": it serves one client after the other.
        """
        node = self.new_node(label, ref, ref.address)
        platform = NodePlatform(self, node)
        HostAgent(ref, ENTRY, client_uid=client_uid, platform=platform)
        assert node.router is not None
        node.router.listen()
        return node

    def start_proc(self, boot: ProcBoot) -> Node:
        """Start a proc of a host."""
        node = self.new_node(boot.proc.uid.partition("<")[0], boot.proc, boot.host.address)
        process = NodeProcess(boot, NodePlatform(self, node), self)
        node.process = process
        assert node.router is not None
        node.router.listen()
        node.router.link_to(boot.host)
        return node

    def add_nursery(self, machine: str, nursery: Nursery) -> None:
        """From now on the processes of a host start here."""
        self._nurseries[machine] = nursery

    def kill(self, node: Node, number: int = signal.SIGKILL, code: int | None = None) -> None:
        """End a process at once: by a signal, or with an exit status."""
        if node.dead:
            return
        node.end()
        if node.process is None:  # with an agent, its processes
            self._nurseries.pop(node.machine, None)
            for other in [other for other in self.nodes.values() if other.machine == node.machine and other.process is not None]:
                if isinstance(other.process, NodeProcess):
                    other.end()
        elif node.machine in self._nurseries:
            self._nurseries[node.machine].ended(node, code, None if code is not None else number)

    def freeze(self, node: Node) -> None:
        """Stop a process (SIGSTOP)."""
        if not node.frozen and not node.dead:
            node.freeze()
            if node.machine in self._nurseries and node.process is not None:
                self._nurseries[node.machine].tell(zygote_messages.Stopped(node.uid, node.pid))

    def thaw(self, node: Node) -> None:
        """Let a stopped process go on (SIGCONT)."""
        if node.frozen and not node.dead:
            node.thaw()
            if node.machine in self._nurseries and node.process is not None:
                self._nurseries[node.machine].tell(zygote_messages.Continued(node.uid, node.pid))


class Nursery:
    """Starts the processes of a host, and tells its agent how they end; what zygotes are elsewhere."""

    def __init__(self, machines: Machines, node: Node, on_reply: Callable[[zygote_messages.News], None]) -> None:
        self._machines = machines
        self._node = node
        self._on_reply = on_reply
        self._alive: dict[str, Node] = {}
        self._when_ended: Callable[[], None] | None = None
        machines.add_nursery(node.machine, self)

    def start(self, request: zygote_messages.StartProc) -> None:
        """Start a process."""
        self._later(self._machines.network.costs.start_proc_s, partial(self._start, request))

    def _start(self, request: zygote_messages.StartProc) -> None:
        if self._when_ended is not None:
            return
        node = self._alive[request.uid] = self._machines.start_proc(messages.decode_boot(request.spec))
        self._on_reply(zygote_messages.Started(request.uid, node.pid))

    def send(self, uid: str, request: zygote_messages.KillProc | zygote_messages.SignalProc) -> None:
        """Signal a process."""
        node = self._alive.get(uid)
        if node is None:
            return
        if isinstance(request, zygote_messages.KillProc):
            self._machines.kill(node)
        elif request.signal == signal.SIGSTOP:
            self._machines.freeze(node)
        elif request.signal == signal.SIGCONT:
            self._machines.thaw(node)
        else:
            self._machines.kill(node, request.signal)

    def ended(self, node: Node, code: int | None, number: int | None) -> None:
        """A process has ended: its agent will know."""

        def notice() -> None:
            if self._alive.get(node.uid) is node:
                del self._alive[node.uid]
            self._on_reply(zygote_messages.Exited(node.uid, node.pid, code, number, False))
            self._on_reply(zygote_messages.Gone(node.uid))
            self._check_ended()

        self._later(self._machines.network.costs.notice_end_s, notice)

    def tell(self, message: zygote_messages.News) -> None:
        """Tell the agent what happened to a process."""
        self._later(self._machines.network.costs.notice_end_s, partial(self._on_reply, message))

    def _later(self, delay_s: float, callback: Callable[[], None]) -> None:
        scheduler = self._machines.scheduler
        scheduler.in_flight += 1  # `settle` waits for it

        def due() -> None:
            scheduler.in_flight -= 1
            self._node.loop.call_soon(callback)

        scheduler.call_later(delay_s, due)

    def wake(self) -> None:
        """Nobody stops a nursery."""

    def shut_down(self, when_ended: Callable[[], None]) -> None:
        """Kill all processes, then call back."""
        self._when_ended = when_ended
        for node in list(self._alive.values()):
            self._machines.kill(node)
        self._check_ended()

    def _check_ended(self) -> None:
        if self._when_ended is not None and not self._alive:
            self._node.loop.call_soon(self._when_ended)

    def kill_silent(self, uid: str) -> None:
        """Not needed: nothing here is silent."""

    def adopt(self, sock: socket.socket, pid: int) -> None:
        """Not needed: nothing runs before."""

    def close(self) -> None:
        """Not needed: the node's end is the end."""


class NodeProcess(WorkerProcess):
    """The runtime of a simulated proc."""

    def __init__(self, boot: ProcBoot, platform: NodePlatform, machines: Machines) -> None:
        super().__init__(boot, platform)
        self._node = platform.node
        self._machines = machines

    def on_stop(self, reason: str) -> None:
        """The owner wants this process to end: it exits when its actors have ended."""
        self.proc.stop_cells(reason, lambda: self._node.loop.call_soon(self._exit))

    def _exit(self) -> None:
        self._machines.kill(self._node, code=0)

    def on_host_lost(self, reason: str) -> None:
        """The agent is gone, so this process goes."""
        self._machines.kill(self._node)


class NodePlatform:
    """The platform of one simulated process."""

    def __init__(self, machines: Machines, node: Node) -> None:
        self.machines = machines
        self.node = node

    def new_loop(self, name: str) -> ProcessLoop:
        """The node's loop."""
        return self.node.loop

    def new_pool(self) -> SegmentPool | None:
        """No shared memory: large buffers travel in their frames."""
        return None

    def new_router(self, loop: Any, own: ProcRef, pool: Any, events: Events, max_frame_bytes: int) -> WiredRouter:
        """Routes over the simulated network."""
        return WiredRouter(self.node, self.machines.network, own, events, max_frame_bytes)

    def new_board(self, own: ProcRef, *, watched: bool) -> NodeBoard:
        """A board in plain memory."""
        return NodeBoard(self.node)

    def read_board(self, ref: ProcRef, pid: int, state: str, silent_s: float) -> Sequence[ActorActivity]:
        """What the actors of another process are doing."""
        node = self.machines.nodes.get(ref.uid)
        if node is None or node.process is None:
            return []
        return node.process.proc.board.rows(ref, pid, state)

    def carrier_of(self, cell: Cell) -> ActorStrand:
        """Turns."""
        return ActorStrand(self.node, cell)

    def new_actor_loop(self, cell: Cell) -> asyncio.AbstractEventLoop:
        """A virtual loop."""
        strand = cell._carrier
        assert isinstance(strand, ActorStrand)
        strand.loop = VirtualLoop(self.node, strand)
        self.machines.loops.append(strand.loop)
        return strand.loop

    def wait_at(self, loop: Any, gate: Any) -> None:
        """Let others run until `gate` is released."""
        self.machines.scheduler.drive(lambda: not gate.locked())

    def new_starter(self, loop: Any, entry: str, on_reply: Any, on_lost: Any) -> Nursery:
        """What starts the processes of this host."""
        return Nursery(self.machines, self.node, on_reply)

    def new_watcher(self, loop: Any, ask: Any, signal: Any, tell: Any) -> NoWatch:
        """Nobody: what waits for ever ends a universe by itself."""
        return NoWatch()

    def new_logs(self, loop: Any, agent: ProcRef, send: Any) -> NoLogs:
        """Nobody reads what processes print."""
        return NoLogs()

    def is_near(self, ref: ProcRef) -> bool:
        return True

    def remove_files(self, ref: ProcRef) -> None:
        """There are none."""


class NoWatch:
    """Looks after nobody."""

    def add(self, record: Any, limits: Any) -> None:
        """Nothing to do."""

    def remove(self, uid: str) -> None:
        """Nothing to do."""

    def silent_s(self, uid: str) -> float:
        """Nobody is silent."""
        return 0.0

    def on_answer(self, port: int, payload: Any) -> None:
        """Nobody was asked."""


class NoLogs:
    """All processes print to the stdout of the one that they are in: there is nothing to capture."""

    def capture(self, ref: ProcRef, start: zygote_messages.StartProc) -> zygote_messages.StartProc:
        """As it was."""
        return start

    def started(self, uid: str) -> None:
        """Nothing to do."""

    def last_words(self, uid: str) -> list[str]:
        """None."""
        return []

    def finish(self, uid: str, story: str, when_done: Callable[[], None]) -> None:
        """At once."""
        when_done()

    def stream(self, uids: Sequence[str], client_ref: ProcRef, *, on: bool) -> None:
        """Nothing to do."""

    def flush(self, uids: Sequence[str]) -> None:
        """Nothing to do."""

    def credit(self, client_ref: ProcRef, nbytes: int) -> None:
        """Nothing to do."""

    def release(self, uid: str) -> None:
        """Nothing to do."""

    def forget(self, client_uid: str) -> None:
        """Nothing to do."""

    def say(self, text: str) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


class NodeBoard:
    """What the actors of a simulated process are doing."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._slots: list[NodeSlot] = []

    def arm(self, pid: int, signal: int) -> None:
        """Nobody dumps its stacks."""

    def slot(self, rank: int, display: str, name: str, *, mesh: str = "", thread: int = 0) -> Slot:
        """A place for one actor."""
        slot = NodeSlot(self._node, self._slots, rank, display, name, mesh)
        self._slots.append(slot)
        return slot

    def give_back(self, slot: Slot) -> None:
        """The actor has ended."""
        slot.leave()

    def rows(self, ref: ProcRef, pid: int, state: str) -> list[ActorActivity]:
        """One row an actor."""
        return [slot.row(ref, pid, state) for slot in self._slots]


class NodeSlot(Slot):
    """One actor on the board."""

    __slots__ = (
        "_began_s",
        "_display",
        "_endpoint",
        "_handled",
        "_mesh",
        "_name",
        "_node",
        "_oldest_at",
        "_overlapping",
        "_rank",
        "_slots",
        "_waiting",
    )

    def __init__(self, node: Node, slots: list[NodeSlot], rank: int, display: str, name: str, mesh: str) -> None:
        self._mesh = mesh
        self._overlapping: tuple[int, float, str] = (0, 0.0, "")
        self._oldest_at = 0.0
        """Since when the oldest concurrent call runs on the clock of its process, which is real; what tells it from others."""
        self._node = node
        self._slots = slots
        self._rank = rank
        self._display = display
        self._name = name
        self._endpoint: str | None = None
        self._began_s = 0.0
        self._handled = 0
        self._waiting = 0

    def begin(self, now_s: float, endpoint: bytes, waiting: int) -> None:
        self._endpoint, self._began_s, self._waiting = endpoint.decode(), self._node.scheduler.now_s, waiting

    def end(self, handled: int) -> None:
        self._endpoint, self._handled = None, handled

    def wait(self, waiting: int) -> None:
        self._waiting = waiting

    def overlap(self, count: int, oldest_since_s: float, endpoint: str) -> None:
        since_s = self._overlapping[1] if oldest_since_s == self._oldest_at else self._node.scheduler.now_s
        self._oldest_at, self._overlapping = oldest_since_s, (count, since_s, endpoint)

    def leave(self) -> None:
        if self in self._slots:
            self._slots.remove(self)

    def row(self, ref: ProcRef, pid: int, state: str) -> ActorActivity:
        """What `activity()` tells."""
        busy = self._endpoint is not None
        num_concurrent, since_s, oldest = self._overlapping
        return ActorActivity(
            actor=self._display,
            name=self._name,
            rank=self._rank,
            proc=ref.uid,
            pid=pid,
            endpoint=self._endpoint,
            running_s=self._node.scheduler.now_s - self._began_s if busy else 0.0,
            waiting=self._waiting,
            handled=self._handled,
            state=state or ("busy" if busy else "idle"),
            mesh=self._mesh,
            num_concurrent=num_concurrent,
            oldest=oldest if num_concurrent else None,
            oldest_s=self._node.scheduler.now_s - since_s if num_concurrent else 0.0,
        )
