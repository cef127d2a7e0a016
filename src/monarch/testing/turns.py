"""Turns: how an actor of a universe lives, one message a turn, on whatever thread has the baton.

Rules of this file:
    1. What a turn does is what `_runtime/drivers.py` does; only the waiting between messages is another.
    2. Each actor has a context of its own, as it has a thread of its own elsewhere.

Read next: `scheduler.py` for who takes turns, `virtual_loop.py` for async actors.
"""

from __future__ import annotations

import contextvars
from collections.abc import Generator
from typing import Any, Protocol

from monarch._runtime.cell import Behavior, Cell, Driver
from monarch._runtime.drivers import AsyncDriver, SyncDriver, _cancel_tasks
from monarch.testing.node import Node
from monarch.testing.scheduler import Ended, Strand
from monarch.testing.virtual_loop import VirtualLoop


class _Turner(Driver, Protocol):
    ended: bool

    def turn(self) -> bool:
        """Do the next thing; True: there is more to do at once."""


class ActorStrand(Strand):
    """An actor's turns; stands for the thread of its cell."""

    __slots__ = ("_cell", "_context", "_driver", "loop")

    def __init__(self, node: Node, cell: Cell) -> None:
        super().__init__(node)
        self._cell = cell
        self._context = contextvars.Context()
        self._driver: _Turner | None = None
        self.loop: VirtualLoop | None = None
        """Of an async actor."""

    def start(self) -> None:
        """Begin the actor's life."""
        self.ring()

    def join(self, timeout_s: float) -> None:
        """Nothing to wait for: nobody else runs."""

    def turn(self) -> bool:
        """One message, or one round of the actor's event loop."""
        return self._context.run(self._turn)

    def _turn(self) -> bool:
        driver, cell = self._driver, self._cell
        if driver is None:
            return self._open()
        more = driver.turn()
        if driver.ended:
            cell.leave()
            return False
        return more

    def _open(self) -> bool:
        cell = self._cell
        if cell.fault is not None:
            return False
        if not cell.is_of_setup and not cell.proc.ready:
            cell.proc.when_ready(self.ring)
            return False
        self._driver = cell.open(self._driver_of)  # type: ignore[assignment]
        return self._driver is not None

    def _driver_of(self, cell: Cell, behavior: Behavior) -> Driver:
        kind = AsyncTurns if behavior.asynchronous else SyncTurns
        return kind(cell, behavior, self)


class SyncTurns(SyncDriver):
    """The driver of a sync actor, whose thread is not its own."""

    def __init__(self, cell: Cell, behavior: Behavior, strand: ActorStrand) -> None:
        super().__init__(cell, behavior)
        self.ended = False
        self._strand = strand
        self._life = self._live()

    def ring(self) -> None:
        self._strand.ring()

    def turn(self) -> bool:
        """One message."""
        more = next(self._life, None)
        self.ended = more is None
        return bool(more)

    def _live(self) -> Generator[bool, None, None]:
        cell = self._cell
        failure = _go_on(self._begin())
        while failure is None:
            yield True
            if cell.urgent:
                if cell.should_end():
                    break
                failure = _go_on(self._look_up())
                continue
            delivery = cell.take()
            if delivery is not None:
                failure = _go_on(self._handle(delivery))
                continue
            cell.idle = True
            while not self._has_work():
                yield False
            cell.idle = False
        self._close(failure or cell.killed)


class AsyncTurns(AsyncDriver):
    """The driver of an async actor, whose loop does a round a turn."""

    def __init__(self, cell: Cell, behavior: Behavior, strand: ActorStrand) -> None:
        super().__init__(cell, behavior)
        assert isinstance(self._loop, VirtualLoop)
        self._virtual: VirtualLoop = self._loop
        self.ended = False
        self._life: Any = None

    def turn(self) -> bool:
        """One round of the loop."""
        loop = self._virtual
        if self._life is None:
            self._life = loop.create_task(self._serve())
        failure: BaseException | None = None
        try:
            more = loop.step()
        except BaseException as exc:  # SystemExit in a task of the user's leaves the loop this way
            failure, more = _go_on(exc), False
        if not (self._life.done() or failure is not None):
            return more
        if failure is None and not self._life.cancelled():
            failure = self._life.exception()
        if failure is not None:
            self._cell.fail(failure)
        try:
            _cancel_tasks(loop)
        finally:
            self.ended = True
            loop.close()
        return False


def _go_on(failure: BaseException | None) -> BaseException | None:
    """`failure`, unless it says that the process has ended in the middle of user code."""
    if isinstance(failure, Ended):
        raise failure
    return failure
