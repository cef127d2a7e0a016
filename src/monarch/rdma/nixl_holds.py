"""Who holds what, so that memory is never given away under a transfer of NIXL's.

NIXL does not check that a region was dropped: over some networks late bytes would be written into, or read from, whatever the address is
then, by threads of the owner that crash when nothing is there. So a reader or writer asks once for every region, and from then on holds it:

    reader or writer    AskMemory ->           the owner registers the region, notes who asked, and sends its keys
    owner, at a drop    ReleaseMemory ->       answered at once, or when the last transfer of the region is over there
    all have answered, or are gone             the region is deregistered, and its memory unpinned

A region that is held can't be stale, only dropped; that shows in the owner's table, as for all transports.

Rules of this file:
    1. The net loop alone decides who holds what, on both sides, so that an answer and a `ReleaseMemory` behind it keep their order.
    2. A holder that can't be asked any more is gone; so is what it was doing.

Read next: `nixl_transport.py`, which uses both sides.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from monarch import config
from monarch._base.ids import ProcRef
from monarch._wire.memory_messages import AskMemory, MemoryKeys, ReleaseMemory
from monarch.rdma.errors import TransferError
from monarch.rdma.nixl_agent import Agent, Driver, Job, Place, Steps
from monarch.rdma.regions import ON_DEVICE, Region, RegionTable

if TYPE_CHECKING:
    from monarch.actor.process import Process

Answer = Callable[..., None]
_NOBODY = ""


def device_of(region: Region) -> int:
    """The number of the GPU that a region is on; -1 for none."""
    return int(region.memory.device.rpartition(":")[2]) if region.flags & ON_DEVICE else -1


class _Shown:
    """A region of this process that others may have keys for."""

    __slots__ = ("holders", "part", "place")

    def __init__(self, part: Any, place: Place) -> None:
        self.part = part
        self.place = place
        self.holders: dict[str, ProcRef] = {}


class Lent:
    """What others hold of this process. Thread: net loop, where nothing else is said."""

    def __init__(self, process: Process, table: Callable[[], RegionTable], driver: Driver) -> None:
        self._process = process
        self._table = table
        self._driver = driver
        self._shown: dict[int, _Shown] = {}
        """By generation; made on the thread of the driver."""
        self._pinned: set[int] = set()
        """Generations that this object holds in the table."""
        self._chunks: list[Place] = []
        """Of the table, registered. Thread: that of the driver."""
        self._lock = threading.Lock()
        self._closed = False

    def on_ask(self, message: AskMemory, sender: ProcRef, answer: Answer) -> None:
        """Somebody wants keys."""
        if self._driver.begin():
            limit_s = config.seconds("rdma_nixl_start_limit")
            self._process.proc.loop.call_later(limit_s, partial(self._driver.give_up_start, limit_s))
        job: list[Job] = []
        done = threading.Event()

        def on_end() -> None:
            done.wait()
            self._process.proc.loop.call_soon(self._finish, job[0], message, sender, answer)

        job.append(self._driver.do(lambda agent: self._show(agent, message), float("inf"), on_end))
        done.set()

    def _show(self, agent: Agent, message: AskMemory) -> Steps:
        """Register what is asked for; the metadata, the number of chunks, and what can't be registered. Thread: that of the driver."""
        table = self._table()
        for address, nbytes in table.chunks()[len(self._chunks) :]:
            agent.register(address, nbytes)
            self._chunks.append((address, nbytes, 0))
        found, refused = [], []
        for generation in message.generations:
            try:
                shown = self._shown.get(generation) or self._register(agent, generation)
            except TransferError as exc:
                refused.append((generation, exc.what))
            else:
                found += [] if shown is None else [shown]
        on_host = [*self._chunks[max(0, message.num_chunks) :], *[shown.place for shown in found if shown.part[2] < 0]]
        on_devices = [shown.place for shown in found if shown.part[2] >= 0]
        metadata = []
        if on_host or message.num_chunks < 0:
            metadata.append(agent.metadata(on_host, is_device=False, with_connection=message.num_chunks < 0))
        if on_devices:
            metadata.append(agent.metadata(on_devices, is_device=True, with_connection=False))
        return tuple(metadata), len(self._chunks), tuple(refused)
        yield

    def _register(self, agent: Agent, generation: int) -> _Shown | None:
        region = self._table().hold(generation)
        if region is None:
            return None
        memory, device = region.memory, device_of(region)
        try:
            part = agent.register(memory.address, memory.nbytes, device)
        except BaseException:
            self._table().let_go(generation)
            raise
        with self._lock:
            self._pinned.add(generation)
        shown = self._shown[generation] = _Shown(part, (memory.address, memory.nbytes, max(device, 0)))
        return shown

    def _finish(self, job: Job, message: AskMemory, sender: ProcRef, answer: Answer) -> None:
        if job.error is not None:
            answer(MemoryKeys(refusal=str(job.error)))
            return
        table, gone = self._table(), []
        metadata, num_chunks, refused = job.result
        for generation in message.generations:
            if generation in dict(refused):
                continue
            shown = self._shown.get(generation)
            if shown is not None and table.is_live(generation):
                shown.holders[sender.uid] = sender
            else:
                gone.append(generation)
                self._take_back(generation)
        answer(MemoryKeys(metadata, num_chunks, tuple(gone), refused=refused))

    def on_dropped(self, region: Region) -> None:
        """A region was dropped. Thread: any."""
        if region.generation in self._shown:
            self._process.proc.loop.call_soon(self._take_back, region.generation)

    def _take_back(self, generation: int) -> None:
        shown = self._shown.pop(generation, None)
        if shown is None or self._closed:
            return
        waiting = {_NOBODY, *shown.holders}

        def on_answer(uid: str) -> None:
            if uid in waiting:
                waiting.remove(uid)
                if not waiting:
                    self._driver.do_soon(partial(self._deregister, generation, shown))

        message = ReleaseMemory(self._table().nonce, generation)
        for uid, holder in shown.holders.items():
            self._process.proc.request(holder, message)._when_done(partial(on_answer, uid))
        on_answer(_NOBODY)

    def _deregister(self, generation: int, shown: _Shown, agent: Agent) -> None:
        try:
            agent.deregister(shown.part)
        finally:
            self._let_go(generation)

    def _let_go(self, generation: int) -> None:
        with self._lock:
            if generation not in self._pinned:
                return
            self._pinned.remove(generation)
        self._table().let_go(generation)

    def close(self) -> None:
        """The agent is no more, so nobody reaches anything. Thread: any."""
        self._closed = True
        for generation in list(self._pinned):
            self._let_go(generation)


class Hold:
    """A region of another process, which this process may use."""

    __slots__ = ("answer", "epoch", "num_active")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        """Of the connection for which its keys are."""
        self.num_active = 0
        self.answer: Answer | None = None
        """The owner wants it back."""


class Peer:
    """Another process whose memory this one uses. Thread: any, where nothing else is said."""

    def __init__(self, nonce: bytes) -> None:
        self.nonce = nonce
        self.name = ""
        """Of its agent, once its metadata are loaded. Thread: that of the driver."""
        self.unloaded: list[bytes] = []
        """Metadata that the agent does not know yet."""
        self.num_chunks = -1
        self.moved_s = 0.0
        """When a transfer was complete last, of `time.monotonic()`."""
        self.epoch = 0
        self._holds: dict[int, Hold] = {}
        self._lock = threading.Lock()

    def take(self, generations: Iterable[int]) -> tuple[list[Hold], list[int]]:
        """Use regions until `give_back`.

        Returns:
            The holds; or none, and the generations that must be asked for first.
        """
        with self._lock:
            pairs = [(generation, self._holds.get(generation)) for generation in generations]
            missing = [generation for generation, hold in pairs if hold is None or hold.epoch != self.epoch]
            if missing:
                return [], missing
            holds = [hold for _, hold in pairs if hold is not None]
            for hold in holds:
                hold.num_active += 1
            return holds, []

    def give_back(self, holds: Sequence[Hold]) -> list[Answer]:
        """A transfer is over; owners to be answered that they are."""
        answers = []
        with self._lock:
            for hold in holds:
                hold.num_active -= 1
                if not hold.num_active and hold.answer is not None:
                    answers.append(hold.answer)
                    hold.answer = None
        return answers

    def question(self, missing: Sequence[int]) -> tuple[AskMemory, int]:
        """What to ask the owner for, and the epoch in which."""
        with self._lock:
            return AskMemory(self.nonce, tuple(missing), self.num_chunks), self.epoch

    def on_keys(self, epoch: int, asked: AskMemory, keys: MemoryKeys) -> None:
        """The owner has answered. Thread: net loop."""
        with self._lock:
            if epoch != self.epoch:
                epoch = -1  # held, with keys for a connection that is no more
            else:
                self.unloaded += keys.metadata
                self.num_chunks = max(self.num_chunks, keys.num_chunks)
            for generation in set(asked.generations) - set(keys.gone) - set(dict(keys.refused)):
                self._holds.setdefault(generation, Hold(epoch)).epoch = epoch

    def release(self, generation: int, answer: Answer) -> None:
        """The owner wants a region back. Thread: net loop."""
        with self._lock:
            hold = self._holds.pop(generation, None)
            if hold is not None and hold.num_active:
                hold.answer = answer
                return
        answer()

    def reset(self, epoch: int, forget: Callable[[str], None]) -> None:
        """The connection of `epoch` broke; all keys must be asked for again. Nothing happens when there is another one by now.

        Args:
            forget: begins to make the agent forget another one, before anything that is for the next connection.
        """
        with self._lock:
            if epoch != self.epoch:
                return
            if self.name:
                forget(self.name)
            self._holds = {generation: hold for generation, hold in self._holds.items() if hold.num_active}
            self.epoch += 1
            self.name, self.unloaded, self.num_chunks = "", [], -1
