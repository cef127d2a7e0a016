"""Drivers: how a cell's thread works off its messages, without an event loop (sync actors) or inside one (async).

Rules of this file:
    1. A sync actor has no loop at all: `asyncio.get_running_loop()` raises, and blocking is fine.
    2. An async actor's endpoints run inside the one driver task, so they are sequential; supervision runs in a task of
       its own, at the endpoint's next await.

Read next: `cell.py` for the states.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch import config
from monarch._net.loop import wake
from monarch._runtime.cell import Behavior, Cell, Delivery, Driver, UnhandledFaultError
from monarch._runtime.faults import users_part

if TYPE_CHECKING:
    import asyncio

_logger = logging.getLogger("monarch.actor")
_MESSAGES_PER_TURN = 64


def driver_of(cell: Cell, behavior: Behavior) -> Driver:
    """The driver for this kind of actor."""
    return AsyncDriver(cell, behavior) if behavior.asynchronous else SyncDriver(cell, behavior)


class SyncDriver:
    """A plain thread that takes one message after the other."""

    def __init__(self, cell: Cell, behavior: Behavior) -> None:
        self._cell = cell
        self._behavior = behavior
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()

    def ring(self) -> None:
        if not self._cell.on_thread():
            wake(self._ring)

    def _ring(self) -> None:
        self._bell.put(None)
        self._cell.proc.loop.kick()

    def interrupt(self) -> bool:
        return False

    def tasks(self) -> list[tuple[str, asyncio.Task[Any]]]:
        return []

    def run(self) -> None:
        cell = self._cell
        drive = cell.proc.loop.drive
        failure = self._begin()
        while failure is None:
            if cell.urgent:
                if cell.should_end():
                    break
                failure = self._look_up()
            if failure is not None:
                break
            delivery = cell.take()
            if delivery is not None:
                failure = self._handle(delivery)
            else:
                cell.idle = True
                if not self._has_work() and not drive(self._has_work):
                    self._bell.get()
                cell.idle = False
        self._close(failure or cell.killed)

    def _begin(self) -> BaseException | None:
        failure = _attempt(self._behavior.create) or _attempt(self._behavior.restore)
        if failure is None:
            self._cell.ready()
        return failure

    def _look_up(self) -> BaseException | None:
        if self._cell.notices:
            return _attempt(self._supervise)
        self._cell.look_down()
        return None

    def _has_work(self) -> bool:
        return self._cell.urgent or len(self._cell.inbox) > 0

    def _handle(self, delivery: Delivery) -> BaseException | None:
        self._cell.begin(delivery)
        try:
            self._behavior.handle(delivery)
        except BaseException as exc:
            return exc
        self._cell.finish(delivery)
        return None

    def _supervise(self) -> None:
        notice = self._cell.notices.popleft()
        self._cell.activate()
        if not self._behavior.supervise(notice):
            raise UnhandledFaultError(notice)

    def _close(self, failure: BaseException | None) -> None:
        cell = self._cell
        cell.activate()
        if failure is not None:
            cell.fail(failure)
        if cell.fault is None:
            cell.start_cleanup_clock(lambda: _report_slow_cleanup(cell))
        exc = _attempt(self._behavior.close, failure)
        if exc is not None:
            _report_cleanup(cell, exc)
        cell.end()


class AsyncDriver:
    """An event loop whose main task takes one message after the other."""

    def __init__(self, cell: Cell, behavior: Behavior) -> None:
        self._cell = cell
        self._behavior = behavior
        self._loop: asyncio.AbstractEventLoop = cell.proc.platform.new_actor_loop(cell)
        self._main: asyncio.Task[None] | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._handling = False
        self._work: asyncio.Future[None] | None = None

    def ring(self) -> None:
        if self._cell.on_thread():
            self._ring()
        else:
            wake(self._ring)

    def _ring(self) -> None:
        self._call(self._wake)

    def interrupt(self) -> bool:
        if self._main is None:
            return False
        self._call(self._cancel_handler)
        return True

    def tasks(self) -> list[tuple[str, asyncio.Task[Any]]]:
        import asyncio

        try:
            tasks = asyncio.all_tasks(self._loop)
        except RuntimeError:  # they come and go faster than they can be listed
            return []
        return sorted((("" if task is self._main else task.get_name(), task) for task in tasks), key=lambda named: named[0])

    def _cancel_handler(self) -> None:
        # A handler that has returned meanwhile is not to be cancelled; the clean-up that follows even less.
        if self._handling and self._main is not None:
            self._main.cancel()

    def run(self) -> None:
        import asyncio

        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as exc:  # SystemExit in a task of the user's leaves the loop this way
            self._cell.fail(exc)
        finally:
            _cancel_tasks(self._loop)
            asyncio.set_event_loop(None)
            self._loop.close()

    def _call(self, callback: Callable[[], Any]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop is closed: the cell has ended, and `post` sees its fault
            return

    def _wake(self) -> None:
        work = self._work
        if work is not None and not work.done():
            work.set_result(None)
        if self._cell.notices and self._supervision is None and self._main is not None:
            self._supervision = self._loop.create_task(self._supervise())

    async def _serve(self) -> None:
        import asyncio

        cell = self._cell
        failure = _attempt(self._behavior.create)
        self._main = asyncio.current_task()
        self._wake()
        if failure is None:
            failure = await self._restore()
        turn = 0
        while failure is None and not cell.should_end():
            delivery = cell.take()
            if delivery is not None:
                failure = await self._handle(delivery)
                turn += 1
                if turn % _MESSAGES_PER_TURN == 0:
                    await self._pause(asyncio.sleep(0))
            else:
                self._work = self._loop.create_future()
                cell.idle = True
                if not (cell.inbox or cell.should_end()):
                    await self._pause(self._work)
                cell.idle = False
        await self._close(failure or cell.killed)

    async def _restore(self) -> BaseException | None:
        try:
            pending = self._behavior.restore()
            if pending is not None:
                self._handling = True
                await pending
        except BaseException as exc:
            return self._failure(exc)
        finally:
            self._handling = False
        self._cell.ready()
        return None

    def _failure(self, exc: BaseException) -> BaseException | None:
        """What user code that raised, or was broken off, does to the actor."""
        if self._cell.must_break_off():
            self._uncancel()
            return self._cell.killed
        return exc

    async def _pause(self, awaitable: Any) -> None:
        import asyncio

        try:
            await awaitable
        except asyncio.CancelledError:
            self._uncancel()

    def _uncancel(self) -> None:
        if self._main is not None:
            while self._main.uncancel():
                continue

    async def _handle(self, delivery: Delivery) -> BaseException | None:
        self._cell.begin(delivery)
        try:
            pending = self._behavior.handle(delivery)
            if pending is not None:
                self._handling = True
                await pending
        except BaseException as exc:
            return self._failure(exc)
        finally:
            self._handling = False
        self._cell.finish(delivery)
        return None

    async def _supervise(self) -> None:
        self._cell.activate()
        try:
            while self._cell.notices:
                notice = self._cell.notices.popleft()
                answer = self._behavior.supervise(notice)
                if hasattr(answer, "__await__"):
                    answer = await answer
                if not answer:
                    raise UnhandledFaultError(notice)
        except BaseException as exc:
            self._cell.kill(exc)
        finally:
            self._supervision = None

    async def _close(self, failure: BaseException | None) -> None:
        import asyncio

        cell = self._cell
        cell.activate()
        if failure is not None:
            cell.fail(failure)
        limit = asyncio.timeout(config.seconds("cleanup_timeout"))
        try:
            async with limit:
                await self._behavior.close(failure)
        except BaseException as exc:
            if limit.expired():
                _report_slow_cleanup(cell)
            else:
                _report_cleanup(cell, exc)
        cell.end()


def _attempt(step: Callable[..., Any], *args: Any) -> BaseException | None:
    try:
        step(*args)
    except BaseException as exc:
        return exc
    return None


def _report_cleanup(cell: Cell, exc: BaseException) -> None:
    _logger.error("cleanup raised: actor=%s", cell.display, exc_info=(type(exc), exc, users_part(exc.__traceback__)))


def _report_slow_cleanup(cell: Cell) -> None:
    _logger.warning("cleanup broken off: actor=%s cleanup_timeout=%gs", cell.display, config.seconds("cleanup_timeout"))


def _cancel_tasks(loop: asyncio.AbstractEventLoop) -> None:
    import asyncio

    pending = asyncio.all_tasks(loop)
    for task in pending:
        task.cancel()
    if pending:
        try:
            loop.run_until_complete(asyncio.wait(pending, timeout=config.seconds("cleanup_timeout")))
        except BaseException as exc:
            _logger.warning("a task of an ended actor raised: %r", exc)
    loop.run_until_complete(loop.shutdown_asyncgens())
