"""The manager: everything that one process has of one-sided memory. It is made on first use and ends with the process's runtime.

Rules of this file:
    1. One manager per runtime (`Process.memory`). A fork has none, and what it inherits is forgotten without a word.
    2. Memory that somebody is writing to at the end stays pinned until that is over (`_retired`).

Read next: `regions.py` for what others see, `engine.py` for what this process does to others.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING

from monarch import config
from monarch._base.errors import explain
from monarch._base.ids import ProcRef, agent_at
from monarch._runtime.future import Future
from monarch._wire.memory_messages import (
    AskMemory,
    DropMemory,
    HotMemory,
    LendMemory,
    MemoryRequest,
    ReleaseMemory,
    ShareStorage,
    StageMemory,
    UnstageMemory,
    nothing_published,
)
from monarch._wire.messages import ProcExited, WatchProc
from monarch.actor.process import Process, known_process, this_process
from monarch.rdma.backend import allowed_transports, check_backend
from monarch.rdma.cuda_memory import TorchCuda
from monarch.rdma.device_service import CudaDevice, DeviceService
from monarch.rdma.engine import Engine
from monarch.rdma.errors import RDMAError
from monarch.rdma.handles import Handle
from monarch.rdma.huge_pages import HugePages
from monarch.rdma.ipc_transport import IpcTransport
from monarch.rdma.mapped_regions import MappedRegions
from monarch.rdma.memory import LocalMemory
from monarch.rdma.nixl_transport import NixlTransport
from monarch.rdma.owner_transport import OwnerTransport
from monarch.rdma.regions import RegionTable
from monarch.rdma.staged_transport import StagedTransport
from monarch.rdma.tcp_transport import TcpTransport
from monarch.rdma.transport import Choice, Transport
from monarch.rdma.vm_transport import VmTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_lock = threading.Lock()
_retired: list[RegionTable] = []
_alive: weakref.WeakSet[Manager] = weakref.WeakSet()


class Manager:
    """One-sided memory of one process. Thread: any."""

    def __init__(self, process: Process) -> None:
        self.pid = os.getpid()
        self._process = process
        self._table: RegionTable | None = None
        self._lock = threading.Lock()
        self._tcp: TcpTransport | None = None
        self._owner: OwnerTransport | None = None
        self._ipc: IpcTransport | None = None
        self._nixl: NixlTransport | None = None
        self.devices = DeviceService(process, self.table, self.register, CudaDevice())
        self._huge_pages = HugePages()
        self._choice = Choice(self._transports())
        threads = max([config.value("rdma_runtime_worker_threads"), *(transport.num_threads for transport in self._choice.transports)])
        self.engine = Engine(self._choice, threads, process.proc.loop.call_later, self._why_gone, self._on_hot)
        process.proc_watchers.append(self._on_exited)

    def _transports(self) -> Sequence[Transport]:
        allowed = allowed_transports()
        if "tcp" in allowed:
            self._tcp = TcpTransport(self._process, self.table)
            self._owner = OwnerTransport(self._process, self.table, self._tcp.borrower)
        if "nixl" in allowed:
            self._nixl = NixlTransport(self._process, self.table)
        if "ipc" in allowed:
            self._ipc = IpcTransport(self._process, self.table, TorchCuda())
        mapped = MappedRegions(config.seconds("rdma_idle_limit"), self._process.proc.loop.call_later)
        every: list[Transport | None] = [VmTransport(self.table, mapped), self._ipc, self._nixl, self._tcp]
        chosen = [transport for transport in every if transport is not None and transport.name in allowed]
        chosen += [] if self._owner is None else [self._owner]
        carriers = [transport for transport in chosen if transport.name in ("cma", "tcp", "owner")]
        return [*chosen, StagedTransport(self._process, carriers)] if carriers else chosen

    def table(self) -> RegionTable:
        """The regions of this process."""
        with self._lock:
            if self._table is None:
                self._table = RegionTable(self._process.proc.loop.call_later)
            return self._table

    # --- as an owner ---------------------------------------------------------------------------------------------

    def register(self, memory: LocalMemory) -> Handle:
        """Let others read and write `memory` until it is dropped, or this process ends. Cost: 20 us, whatever its size."""
        table = self.table()
        region = table.add(memory)
        blobs = {transport.name: blob for transport in self._choice.transports if (blob := transport.register(region)) is not None}
        return Handle(
            self._process.proc.ref,
            table.nonce,
            table.address,
            region.slot,
            region.generation,
            memory.address,
            memory.nbytes,
            region.flags,
            blobs,
        )

    def on_message(self, message: MemoryRequest, sender: ProcRef, answer: Callable[..., None]) -> None:
        """Somebody who has a handle drops the memory, can't reach it, or wants its keys. Thread: net loop."""
        table = self._table
        match message:
            case ReleaseMemory() if self._nixl is not None:
                self._nixl.on_message(message, sender, answer)
                return
            case AskMemory() if self._nixl is not None and table is not None and table.nonce == message.nonce:
                self._nixl.on_message(message, sender, answer)
                return
            case StageMemory() | UnstageMemory() if table is not None and table.nonce == message.nonce:
                self.devices.on_message(message, answer)
                return
            case ShareStorage() if self._ipc is not None and table is not None and table.nonce == message.nonce:
                self._ipc.on_message(message, answer)
                return
            case LendMemory() if table is not None and self._tcp is not None and self._owner is not None:
                (self._owner if message.by_owner else self._tcp).lend(message)
            case DropMemory() if table is not None and table.nonce == message.nonce:
                self._take_back(table, message.generation)
            case HotMemory() if table is not None and table.nonce == message.nonce:
                self._put_on_huge_pages(table, message.generation)
            case _:
                answer(nothing_published(message))
                return
        answer()

    def _take_back(self, table: RegionTable, generation: int) -> None:
        region = table.drop(generation)
        if region is not None:
            for transport in self._choice.transports:
                transport.deregister(region)

    def _put_on_huge_pages(self, table: RegionTable, generation: int) -> None:
        def find() -> LocalMemory | None:
            region = table.find(generation)
            return None if region is None else region.memory

        self._huge_pages.put_under(find)

    # --- as a holder of handles ----------------------------------------------------------------------------------

    def drop(self, handle: Handle) -> Future[None]:
        """Take a region back, wherever it is, behind what this process was asked to do with it before."""
        result: Future[None] = Future._new()
        self.engine.order(handle, lambda: self._drop_now(handle, result))
        return result

    def _drop_now(self, handle: Handle, result: Future[None]) -> None:
        table = self._table
        if table is not None and table.nonce == handle.nonce:
            self._take_back(table, handle.generation)
            result._complete(None)
            return
        answer = self._process.proc.request(handle.ref, DropMemory(handle.nonce, handle.generation))

        def on_answer() -> None:
            error = answer._error
            if error is None:
                result._complete(None)
                return
            where = f"buffer {handle.number} of {handle.ref.uid} at {handle.ref.address}"
            failure = RDMAError(
                explain(f"Failed to drop buffer: {error}", where=where, next="nothing to do: the memory of a process ends with it")
            )
            failure.__cause__ = error
            result._fail(failure)

        answer._when_done(on_answer)

    def _on_hot(self, handle: Handle) -> None:
        self._process.proc.tell(handle.ref, HotMemory(handle.nonce, handle.generation))

    def _on_exited(self, exited: ProcExited) -> None:
        self._choice.forget_process(exited.proc.uid)

    def _why_gone(self, ref: ProcRef, ask_s: float) -> str:
        proc = self._process.proc
        exited = proc.fates.gone.get(ref.uid)
        if exited is None and ask_s and ref.host and ref.uid != proc.ref.uid:
            answer = proc.request(agent_at(ref.host), WatchProc(ref.uid, exit_only=True))
            exited = answer.get() if answer.exception(ask_s) is None else None
        return exited.reason if isinstance(exited, ProcExited) else ""

    # --- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """The runtime of this process ends."""
        self._process.proc_watchers.remove(self._on_exited)
        self.engine.close()
        self.devices.close()
        self._huge_pages.close()
        for transport in self._choice.transports:
            transport.close()
        with self._lock:
            table, self._table = self._table, None
        if table is not None and not table.close():
            _retired.append(table)

    def abandon(self) -> None:
        """Close inherited descriptors only, in a fork: a lock must not outlive its holder."""
        if self._table is not None:
            self._table.abandon()
        for transport in self._choice.transports:
            transport.abandon()


def own_manager() -> Manager:
    """The manager of this process, which the first call makes.

    Raises:
        RdmaInitError: no transfer is possible.
    """
    process = this_process()
    manager = process.memory
    if isinstance(manager, Manager) and manager.pid == os.getpid():
        return manager
    check_backend()
    with _lock:
        manager = process.memory
        if not isinstance(manager, Manager) or manager.pid != os.getpid():
            _retired[:] = [table for table in _retired if not table.close()]
            manager = process.memory = Manager(process)
            _alive.add(manager)
        return manager


def is_published(handle: Handle) -> bool:
    """Whether this process lets others at a region; a fork of the owner does not, nor does an owner whose runtime has ended."""
    process = known_process()
    manager = None if process is None else process.memory
    if not isinstance(manager, Manager) or manager.pid != os.getpid():
        return False
    table = manager._table
    return table is not None and table.nonce == handle.nonce and table.is_live(handle.generation)


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    for table in _retired:
        table.abandon()
    _retired.clear()
    for manager in list(_alive):
        manager.abandon()
    _alive.clear()


os.register_at_fork(after_in_child=_after_fork)
