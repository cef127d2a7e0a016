"""Cells: the life of one actor, from its first message to its last.

A cell owns one thread. Everything the user wrote for that actor runs there: `__init__`, endpoints, `__supervise__`,
`__cleanup__`. An actor with async endpoints has an event loop on that thread; one with sync endpoints has none.

    starting -> running -> draining -> ended (stopped)
         \\__________\\__________\\______ ended (failed)

Rules of this file:
    1. One message at a time: the next one starts when the handler of the previous has finished.
    2. `fault` says that the cell has ended and why. Whoever sends to it afterwards is answered with it.
    3. Every delivery taken in is finished exactly once: handled, or refused with the fault. Both return its credit.
    4. Ending never waits for user code without a bound (`stop_actor_timeout`, `cleanup_timeout`).

Read next: `drivers.py` for the two kinds of threads, `monarch/actor/behavior.py` for what they run.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from monarch import config
from monarch._runtime.board import Slot
from monarch._runtime.faults import describe_failure, render, undelivered
from monarch._runtime.flow import MESSAGE_OVERHEAD_BYTES, open_gate
from monarch._runtime.supervision import Failure
from monarch._wire.frames import Buffer
from monarch._wire.messages import CallHeader, CreateActor, Fault

if TYPE_CHECKING:
    from asyncio import Task

    from monarch._base.ids import ProcRef
    from monarch._runtime.proc import Proc


class Delivery:
    """One message on its way into an actor."""

    __slots__ = ("buffers", "header", "nbytes", "payload", "port", "rank", "via")

    def __init__(
        self, header: CallHeader, port: int, rank: int, payload: Buffer, buffers: Sequence[memoryview], via: ProcRef | None = None
    ) -> None:
        """Args:
        via: the agent that gathers the answers; None: the answer goes to the caller itself.
        """
        self.via = via
        self.header = header
        self.port = port
        self.rank = rank
        self.payload = payload
        self.buffers = buffers
        self.nbytes = MESSAGE_OVERHEAD_BYTES + len(payload) + (sum(b.nbytes for b in buffers) if buffers else 0)


class Bounce(NamedTuple):
    """A message without reply port that found nobody."""

    method: str
    fault: Fault


Notice: TypeAlias = Failure | Bounce
"""What an actor is told ahead of its messages."""


class Activation:
    """Which actor runs in this context, and for which message."""

    __slots__ = ("cell", "labels", "rank", "sizes")

    def __init__(self, cell: Any, rank: int, labels: tuple[str, ...], sizes: tuple[int, ...]) -> None:
        self.cell = cell
        self.rank = rank
        self.labels = labels
        self.sizes = sizes


current: ContextVar[Activation] = ContextVar("monarch_activation")


class Behavior(Protocol):
    """What a cell runs. Thread: the cell's own."""

    asynchronous: bool
    """True: `restore`, `handle`, `supervise` and `close` return awaitables (or None), and a loop runs."""

    def create(self) -> None:
        """Run the user's `__init__`."""

    def restore(self) -> Any:
        """Run the user's `__restore__`, when a policy has created the actor anew."""

    def handle(self, delivery: Delivery) -> Any:
        """Run an endpoint and send its reply; what it raises ends the actor."""

    def supervise(self, notice: Notice) -> Any:
        """Tell the actor of a failure; true: handled."""

    def close(self, exc: BaseException | None) -> Any:
        """Stop what the actor owns, then run the user's `__cleanup__`."""


class Driver(Protocol):
    """Runs a cell's behavior on the cell's thread (`drivers.py`)."""

    def ring(self) -> None:
        """Something is to be done. Any thread."""

    def interrupt(self) -> bool:
        """Break off the handler in progress, if that is possible. Any thread."""

    def tasks(self) -> list[tuple[str, Task[Any]]]:
        """What runs on the cell's event loop, by name; "" and first is the one that serves messages. Any thread."""

    def run(self) -> None:
        """Serve until the cell ends. The cell's thread."""


class UnhandledFaultError(Exception):
    """An actor did not handle the failure of something it owns."""

    def __init__(self, notice: Notice) -> None:
        super().__init__(undelivered(notice.method, notice.fault) if isinstance(notice, Bounce) else describe_failure(notice))
        self.notice = notice


class Cell:
    """One actor of this process. Thread: any, except where a method says otherwise."""

    def __init__(
        self,
        proc: Proc,
        create: CreateActor,
        open_behavior: Callable[[Cell], Behavior],
        when_ready: Callable[[], None] | None = None,
        *,
        owner_pid: int = 0,
    ) -> None:
        """Args:
        when_ready: called once, on the cell's thread, when the user's `__init__` has returned.
        """
        self.uid = create.actor
        self.owner_pid = owner_pid
        """The process that its owner runs in, when that is another; its successor under the same id has another."""
        self.create = create
        self.proc = proc
        self.display = create.name
        """Human chain, `<root>.<mod.Class name{'gpus': 0/2}>`; complete once the class is known."""
        self.slot: Slot | None = None
        """Where others see what this actor does; None before the class is known."""
        self.instance: Any = None
        """The actor layer's view of this actor."""
        self.fault: Fault | None = None
        self.killed: BaseException | None = None
        self.inbox: deque[Delivery] = deque()
        self.notices: deque[Notice] = deque()
        self.idle = False
        """The driver waits for `ring`."""
        self.urgent = False
        """Something other than a message wants attention: a notice, a stop, the end."""
        self.handled = 0
        self.running: Delivery | None = None
        self.queued_bytes = 0
        self.when_ready = when_ready
        self._open_behavior = open_behavior
        self._driver: Driver | None = None
        self._stop_reason: str | None = None
        self._again = False
        """It is stopped in order to be created anew."""
        self._drain = True
        self._abandoned = False
        self._when_ended: list[Callable[[], None]] = []
        self._ident = 0
        self._lock = threading.Lock()
        self._waiting_gate: Any = None
        self._consumed: dict[str, int] = {}
        self._credit_bytes = config.value("mailbox_window_bytes") // 8
        self._carrier = proc.platform.carrier_of(self)

    def start(self) -> None:
        """Begin the actor's life on its thread."""
        self._carrier.start()

    def live(self) -> None:
        """The whole life, on the cell's thread."""
        from monarch._runtime.drivers import driver_of

        driver = self.open(driver_of)
        if driver is not None:
            driver.run()
            self.leave()

    def open(self, driver_of: Callable[[Cell, Behavior], Driver]) -> Driver | None:
        """Unpickle the actor once the process is ready; None: it has failed. The cell's thread."""
        create = self.create
        self._ident = threading.get_ident()
        self.activate()
        try:
            if not self.is_of_setup:
                self.proc.wait_ready()
            behavior = self._open_behavior(self)
        except BaseException as exc:
            if self._stop_reason is not None or self.proc.stopping:
                self.end()
            else:
                self.fail(exc)
            return None
        current.set(Activation(self, create.rank, create.labels, create.sizes))
        self._driver = driver_of(self, behavior)
        return self._driver

    def leave(self) -> None:
        """The driver has ended. The cell's thread."""
        slot, self.slot = self.slot, None
        if slot is not None:
            self.proc.board.give_back(slot)

    @property
    def is_of_setup(self) -> bool:
        """Part of the bootstrap, so it doesn't wait for its end."""
        # What the bootstrap function has spawned can't wait for that function's end: the function may wait for it.
        owner = self.proc.cells.get(self.create.owner_actor)
        return self.create.system or (owner is not None and owner.create.system)

    def activate(self) -> None:
        """Make this actor the one of the running context, without a message."""
        current.set(Activation(self, 0, (), ()))

    def on_thread(self) -> bool:
        """True on the cell's own thread."""
        return self._ident == threading.get_ident()

    @property
    def thread_ident(self) -> int:
        """Ident of the cell's thread; 0 before it has begun."""
        return self._ident

    def tasks(self) -> list[tuple[str, Task[Any]]]:
        """What runs on the cell's event loop (`Driver.tasks`); [] without one. Any thread."""
        return self._driver.tasks() if self._driver is not None else []

    def join(self, timeout_s: float) -> None:
        """Wait for the cell's thread to end; no-op on that thread."""
        self._carrier.join(timeout_s)

    # --- messages ------------------------------------------------------------------------------------------------

    def post(self, delivery: Delivery) -> None:
        """Queue a message; when the cell has ended or is about to, it is refused, or kept for the cell that comes after it."""
        if self.fault is not None or self._stop_reason is not None:
            if not (self._again and self.proc.keep_for_next(delivery)):
                self._refuse(delivery)
            return
        self.queued_bytes += delivery.nbytes
        self.inbox.append(delivery)
        if self._waiting_gate is not None and self.congested:
            open_gate(self._waiting_gate)
        if self.idle:
            self.ring()
            if not self.on_thread():
                self.proc.loop.leave_seat()
        elif self.slot is not None:
            self.slot.wait(len(self.inbox))
        if self.fault is not None:
            self._refuse_all()

    def take(self) -> Delivery | None:
        """The next message; None when there is none. The cell's thread."""
        try:
            return self.inbox.popleft() if self.inbox else None
        except IndexError:  # the cell has ended meanwhile, and another thread refused the last one
            return None

    def begin(self, delivery: Delivery) -> None:
        """A handler starts. The cell's thread."""
        header = delivery.header
        current.set(Activation(self, delivery.rank, header.labels, header.sizes))
        self.running = delivery
        slot = self.slot
        if slot is not None:
            slot.begin(time.monotonic(), header.method.encode(), len(self.inbox))

    def finish(self, delivery: Delivery) -> None:
        """The handler has returned. The cell's thread."""
        self.running = None
        self.handled += 1
        if self.slot is not None:
            self.slot.end(self.handled)
        self.queued_bytes -= delivery.nbytes
        self._give_credit(delivery)

    def _give_credit(self, delivery: Delivery) -> None:
        sender = delivery.header.sender.uid
        consumed = self._consumed.get(sender, 0) + delivery.nbytes
        if consumed >= self._credit_bytes or self.fault is not None:  # an actor that ends keeps nothing back
            self.proc.give_credit(delivery.header.sender, self.uid, consumed)
            consumed = 0
        self._consumed[sender] = consumed

    def _give_rest(self) -> None:
        """Give back what was kept for a larger message: senders have one account for this actor and its successor."""
        consumed, self._consumed = self._consumed, {}
        for sender, nbytes in consumed.items():
            if nbytes:
                self.proc.give_credit_to(sender, self.uid, nbytes)

    def _refuse(self, delivery: Delivery, *, started: bool = False) -> None:
        self._give_credit(delivery)
        self.proc.refuse(delivery, self.fault or self._stopped_fault(), started=started)

    def refuse_started(self, delivery: Delivery) -> None:
        """A concurrent call was broken off because the actor ends."""
        self.proc.refuse(delivery, self.fault or self._stopped_fault(), started=True)

    def _refuse_all(self) -> None:
        running, self.running = self.running, None
        if running is not None:
            self._refuse(running, started=True)
        while self.inbox:
            try:
                delivery = self.inbox.popleft()
            except IndexError:  # another thread took it
                return
            self._refuse(delivery)

    # --- flow control of the actor as a sender -------------------------------------------------------------------

    @property
    def congested(self) -> bool:
        """Somebody may be waiting for this actor's credit."""
        return bool(self.queued_bytes >= self._credit_bytes)

    def waits_at(self, gate: Any) -> None:
        """The actor is about to wait for credit at `gate`."""
        self._waiting_gate = gate

    def may_wait(self) -> bool:
        """May the actor wait for credit? Not while others wait for the actor's own."""
        return not self.congested and self.fault is None and self.killed is None

    # --- supervision and ending ----------------------------------------------------------------------------------

    def ring(self) -> None:
        """Make the driver look again."""
        self.idle = False
        if self._driver is not None:
            self._driver.ring()

    def notify(self, notice: Notice) -> None:
        """Tell the actor that something it owns failed, or a message of its bounced, ahead of its messages."""
        self.notices.append(notice)
        self.urgent = True
        self.ring()

    def stop(self, reason: str, when_ended: Callable[[], None] | None = None, *, drain: bool = True, again: bool = False) -> None:
        """End the actor after what it has queued; in any case after `stop_actor_timeout` and `cleanup_timeout`.

        Args:
            when_ended: called once, on any thread, after `__cleanup__`; soon, when the cell has ended already.
            drain: False: end after the current message, and refuse what is queued.
            again: a supervision policy will create it anew.
        """
        with self._lock:
            if when_ended is not None:
                if self.fault is not None:
                    self.proc.loop.call_soon(when_ended)
                else:
                    self._when_ended.append(when_ended)
            if self._stop_reason is not None or self.fault is not None:
                return
            self._drain = drain
            self._again = again
            self._stop_reason = reason
            self.urgent = True
        self.proc.loop.call_later(config.seconds("stop_actor_timeout"), self._abandon)
        self.ring()

    def kill(self, exc: BaseException) -> None:
        """Fail the actor, breaking off an async endpoint in progress."""
        if self.killed is None and self.fault is None:
            self.killed = exc
            self.urgent = True
            if self._driver is not None:
                self._driver.interrupt()
            self.ring()

    def look_down(self) -> None:
        """Nothing urgent was found; a stop that still drains stays urgent."""
        self.urgent = False
        if self.notices or self._stop_reason is not None or self.should_end():
            self.urgent = True

    def should_end(self) -> bool:
        """No further message is to be started."""
        if self.killed is not None or self.fault is not None or self._abandoned:
            return True
        return self._stop_reason is not None and not (self._drain and len(self.inbox) > 0)

    def must_break_off(self) -> bool:
        """The handler in progress was interrupted on purpose."""
        return self.killed is not None or self._abandoned

    def ready(self) -> None:
        """The actor is about to take its first message. The cell's thread."""
        when_ready, self.when_ready = self.when_ready, None
        if when_ready is not None:
            when_ready()

    def fail(self, exc: BaseException) -> None:
        """The actor has failed: refuse what waits, tell the owner."""
        report = (
            f"The actor {self.display} failed because it did not handle a supervision event from its child. The event was: {exc}"
            if isinstance(exc, UnhandledFaultError)
            else render(exc)
        )
        fault = self._fault("failed", report, again=self.create.supervised)
        if self.end(fault) and not fault.again:
            self.proc.report_fault(self, fault)

    def end(self, fault: Fault | None = None) -> bool:
        """The actor has ended; without a fault: it was stopped. False when it had ended before."""
        with self._lock:
            if self.fault is not None:
                return False
            self.fault = fault or self._stopped_fault()
            self.urgent = True
            callbacks, self._when_ended = self._when_ended, []
        # First of all: who is refused and calls again at once shall find the successor, if there will be one.
        self.proc.retire(self, self.fault)
        if fault is not None and fault.again:
            # To its supervisor before its callers: when they hear, the ranks that restart with it have been told to stop.
            self.proc.report_fault(self, fault)
        self._refuse_all()
        self._give_rest()
        if self.slot is not None:
            self.slot.leave()
        for callback in callbacks:
            callback()
        return True

    def start_cleanup_clock(self, when_over: Callable[[], None]) -> None:
        """`__cleanup__` begins: end without it, and call back, when it takes longer than `cleanup_timeout`."""

        def give_up() -> None:
            if self.end():
                when_over()

        self.proc.loop.call_later(config.seconds("cleanup_timeout"), give_up)

    def _abandon(self) -> None:
        # Net loop: the drain has outlived its budget.
        if self.fault is not None:
            return
        self._abandoned = True
        self.urgent = True
        if self._driver is not None and self._driver.interrupt():
            self.proc.loop.call_later(config.seconds("cleanup_timeout") + 1, self._give_up)
        else:
            self._give_up()

    def _give_up(self) -> None:
        # Net loop: user code does not return. Its thread is left behind; the process's end takes it.
        self.end()

    def _stopped_fault(self) -> Fault:
        return self._fault("stopped", self._stop_reason or "stopped", again=self._again)

    def _fault(self, kind: str, report: str, *, again: bool) -> Fault:
        return Fault(kind, self.display, self.uid, self.create.rank, report, self.proc.ref.uid, again)
