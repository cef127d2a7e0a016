"""Behavior: an actor object as its cell runs it.

Rules of this file:
    1. An `Exception` of an endpoint somebody waits for goes to the caller as `ActorError`, and the actor lives.
    2. Whatever else an endpoint raises fails the actor: without a waiting caller, with an explicit port, or a
       `BaseException`.

Read next: `_runtime/cell.py` for the caller.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from types import CoroutineType
from typing import Any, NamedTuple

from monarch._base.ids import ActorAddr
from monarch._mesh.shape import Extent, NDSlice, Point, Shape
from monarch._runtime.cell import Behavior, Cell, Delivery, Notice, UnhandledFaultError
from monarch._runtime.faults import ActorError, MeshFailure, render, undelivered
from monarch._runtime.supervision import Failure
from monarch._wire.exceptions import dumps_exception
from monarch._wire.frames import Buffer, Flag
from monarch._wire.pickling import dumps, loads
from monarch.actor.actor_mesh import READY, class_name, is_asynchronous
from monarch.actor.base import hook_of
from monarch.actor.context import Instance
from monarch.actor.endpoint import EndpointProperty
from monarch.actor.ports import DroppingPort, ReplyPort
from monarch.actor.proc_mesh import ProcMesh
from monarch.actor.process import Process

_logger = logging.getLogger("monarch.actor")


class Method(NamedTuple):
    """One method that messages may call."""

    function: Callable[..., Any]
    concurrent: bool


class UndeliverableMessageEnvelope:
    """A message of an actor that found nobody."""

    def __init__(self, sender: ActorAddr, dest: str, error: str) -> None:
        self._sender = sender
        self._dest = dest
        self._error = error

    def sender(self) -> ActorAddr:
        """The actor that sent it."""
        return self._sender

    def dest(self) -> str:
        """Where it should have gone: mesh, rank and method."""
        return self._dest

    def error_msg(self) -> str | None:
        """Why it did not arrive."""
        return self._error


def open_behavior(process: Process, cell: Cell, payload: Buffer, buffers: Sequence[memoryview]) -> Behavior:
    """Unpickle a class and its arguments into what the cell runs. Thread: the cell's."""
    cls, args, kwargs, proc_mesh, creator, controllers = loads(payload, buffers)
    if process.controllers is None:
        process.controllers = controllers
    create = cell.create
    instance = Instance(
        process=process,
        uid=cell.uid,
        name=create.name,
        class_name=class_name(cls),
        rank=Point(create.rank, Extent._of(create.labels, create.sizes)),
        proc_mesh=proc_mesh,
        proc=_own_proc(proc_mesh, create.rank),
        creator=creator,
        cell=cell,
    )
    cell.instance = instance
    cell.display = str(instance)
    if not create.system:
        cell.slot = process.proc.board.slot(create.rank, cell.display, create.name, mesh=cell.uid, thread=threading.get_ident())
    behavior = AsyncBehavior if is_asynchronous(cls) else SyncBehavior
    return behavior(cell, cls, args, kwargs)


def _own_proc(proc_mesh: ProcMesh, rank: int) -> ProcMesh:
    ranks = proc_mesh._shape.ndslice.ranks()
    return ProcMesh(proc_mesh._core, Shape((), NDSlice(offset=ranks[rank], sizes=(), strides=())))


class _Behavior:
    """What both kinds share. Thread: the cell's."""

    asynchronous = False

    def __init__(self, cell: Cell, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._cell = cell
        self._instance: Instance = cell.instance
        self._cls = cls
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._actor: Any = None
        self._methods: dict[str, Method] = {}
        self._owed: set[Delivery] = set()
        """Calls whose explicit port has not been used yet."""

    def create(self) -> None:
        """Run the user's `__init__`, which the board shows as an endpoint."""
        slot = self._cell.slot
        if slot is not None:
            slot.begin(time.monotonic(), b"__init__", len(self._cell.inbox))
        self._create()
        if slot is not None:
            slot.end(0)

    def _create(self) -> None:
        assert self._arguments is not None
        args, kwargs = self._arguments
        self._arguments = None
        cls: Any = self._cls
        try:
            actor = cls.__new__(cls, *args, **kwargs) if cls.__new__ is not object.__new__ else object.__new__(cls)
            cls.__init__(actor, *args, **kwargs)
        finally:
            self._leave()
        self._actor = actor  # only now: there is nothing to clean up of one whose `__init__` raised

    def restore(self) -> Any:
        """Run the user's `__restore__` of an actor that a policy has created anew."""
        create = self._cell.create
        hook = hook_of(self._cls, "__restore__") if create.attempt else None
        if hook is None:
            return None
        try:
            result = hook(self._actor, create.rank, create.attempt)
        finally:
            self._leave()
        return self._await(result) if inspect.isawaitable(result) else result

    async def _await(self, result: Awaitable[Any]) -> Any:
        try:
            return await result
        finally:
            self._leave()

    def _method(self, name: str) -> Method:
        method = self._methods.get(name)
        if method is None:
            method = self._methods[name] = self._find(name)
        return method

    def _find(self, name: str) -> Method:
        if name == READY:
            return Method(_answer_ready, concurrent=False)
        attribute = inspect.getattr_static(self._cls, name, None)
        if isinstance(attribute, EndpointProperty):
            return Method(attribute._method, attribute._concurrent)
        plain = getattr(self._cls, name, None)
        if not callable(plain):
            raise AttributeError(f"{class_name(self._cls)} has no method {name!r}")
        return Method(plain, concurrent=False)

    def _port(self, delivery: Delivery) -> Any:
        header = delivery.header
        if header.reply_to is None:
            return DroppingPort()
        return ReplyPort(delivery, header.reply_to, self._owed)

    def _reply(self, delivery: Delivery, result: Any) -> None:
        if delivery.header.reply_to is not None:
            payload, buffers = dumps(result, result_of=delivery.header.method)
            self._cell.proc.sender.reply(delivery, payload, buffers)

    def _raised(self, delivery: Delivery, exc: Exception) -> None:
        """Tell the caller, or fail the actor by raising."""
        if self._instance._debugging is not None:
            self._instance._debugging.raised(exc)
        header = delivery.header
        _logger.debug("endpoint raised: actor=%s endpoint=%s", self._cell.display, header.method, exc_info=exc)
        if header.reply_to is None or header.explicit:
            raise exc
        self._report(delivery, exc, f"Actor call {self._cell.create.name}.{header.method} failed.")

    def _leave(self) -> None:
        """User code has returned or raised: a debug session of it ends."""
        if self._instance._debugging is not None:
            self._instance._debugging.left()

    def _report(self, delivery: Delivery, exc: BaseException, message: str) -> None:
        payload, buffers = dumps_exception(ActorError(exc, message))
        self._cell.proc.sender.reply(delivery, payload, buffers, Flag.ERROR)

    def _failure(self, notice: Notice) -> tuple[Callable[..., Any] | None, Any]:
        """The user's hook for a notice, and its argument."""
        if isinstance(notice, Failure):
            return hook_of(self._cls, "__supervise__"), MeshFailure(notice)
        fault = notice.fault
        envelope = UndeliverableMessageEnvelope(
            self._cell.instance.actor_id, f"{fault.mesh}[{fault.rank}].{notice.method}", undelivered(notice.method, fault)
        )
        return self._cls._handle_undeliverable_message, envelope  # type: ignore[attr-defined]

    def _end_owed(self) -> None:
        """Nobody will use the ports that are still open: who waits for them hears how this actor ended."""
        while self._owed:
            self._cell.refuse_started(self._owed.pop())

    def _children(self) -> list[Any]:
        children: list[Any] = self._cell.instance._children
        self._cell.instance._children = []
        return list(reversed(children))


class SyncBehavior(_Behavior):
    """An actor whose endpoints are all `def`."""

    def handle(self, delivery: Delivery) -> None:
        """Run an endpoint."""
        header = delivery.header
        try:
            args, kwargs = loads(delivery.payload, delivery.buffers)
            delivery.payload, delivery.buffers = b"", ()
            function = self._method(header.method).function
            if header.explicit:
                function(self._actor, self._port(delivery), *args, **kwargs)
                self._leave()
                return
            result = function(self._actor, *args, **kwargs)
            if self._instance._debugging is not None:
                self._leave()
            del args, kwargs
            if type(result) is CoroutineType:
                result.close()
                raise TypeError(f"{header.method} is async, but {class_name(self._cls)} has sync endpoints and no event loop")
            self._reply(delivery, result)
        except Exception as exc:
            self._raised(delivery, exc)
        except BaseException:
            self._leave()
            raise

    def supervise(self, notice: Notice) -> Any:
        """Ask the user's hook; no hook: not handled."""
        hook, argument = self._failure(notice)
        try:
            return False if hook is None else hook(self._actor, argument)
        except BaseException as exc:
            _add_trigger(exc, notice)
            raise
        finally:
            self._leave()

    def close(self, exc: BaseException | None) -> None:
        """Stop what the actor owns, then run `__cleanup__`, which may still answer calls after a stop."""
        if exc is not None:
            self._end_owed()
        for stopping in _stop_children(self._children()):
            stopping.get()
        cleanup = hook_of(self._cls, "__cleanup__")
        try:
            if cleanup is not None and self._actor is not None:
                cleanup(self._actor, _as_exception(exc))
        finally:
            self._leave()
            self._actor = None
            self._end_owed()


class AsyncBehavior(_Behavior):
    """An actor with an event loop."""

    asynchronous = True

    def __init__(self, cell: Cell, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(cell, cls, args, kwargs)
        self._tasks: dict[asyncio.Task[None], tuple[float, Delivery]] = {}
        """Concurrent calls under way, oldest first: since when, and which."""

    def handle(self, delivery: Delivery) -> Awaitable[None] | None:
        """Run an endpoint; a concurrent one only starts."""
        try:
            method = self._method(delivery.header.method)
        except Exception as exc:
            self._raised(delivery, exc)
            return None
        if method.concurrent:
            task = asyncio.get_running_loop().create_task(self._run_concurrently(method.function, delivery), name=delivery.header.method)
            self._tasks[task] = (time.monotonic(), delivery)
            self._show_tasks()
            task.add_done_callback(self._forget_task)
            return None
        return self._run(method.function, delivery)

    def _forget_task(self, task: asyncio.Task[None]) -> None:
        _, delivery = self._tasks.pop(task)
        if task.cancelled():  # before it had begun: a call that has begun answers its end itself
            self._cell.refuse_started(delivery)
        self._show_tasks()

    def _show_tasks(self) -> None:
        slot = self._cell.slot
        if slot is not None:
            since_s, oldest = next(iter(self._tasks.values()), (0.0, None))
            slot.overlap(len(self._tasks), since_s, "" if oldest is None else oldest.header.method)

    async def _run(self, function: Callable[..., Any], delivery: Delivery) -> None:
        header = delivery.header
        try:
            args, kwargs = loads(delivery.payload, delivery.buffers)
            delivery.payload, delivery.buffers = b"", ()
            if header.explicit:
                args = (self._port(delivery), *args)
            result = function(self._actor, *args, **kwargs)
            if type(result) is CoroutineType:
                result = await result
            if self._instance._debugging is not None:
                self._leave()
            del args, kwargs
            if not header.explicit:
                self._reply(delivery, result)
        except Exception as exc:
            self._raised(delivery, exc)
        except BaseException:
            self._leave()
            raise

    async def _run_concurrently(self, function: Callable[..., Any], delivery: Delivery) -> None:
        header = delivery.header
        try:
            await self._run(function, delivery)
        except BaseException as exc:
            if isinstance(exc, asyncio.CancelledError) and self._cell.should_end():
                if not header.explicit:
                    self._cell.refuse_started(delivery)
            elif isinstance(exc, Exception) or header.explicit or header.reply_to is None:
                self._cell.kill(exc)
            else:
                self._report(delivery, exc, f"Actor call {self._cell.create.name}.{header.method} failed with BaseException.")

    async def supervise(self, notice: Notice) -> Any:
        """Ask the user's hook; no hook: not handled."""
        hook, argument = self._failure(notice)
        try:
            answer = False if hook is None else hook(self._actor, argument)
            return await answer if inspect.isawaitable(answer) else answer
        except BaseException as exc:
            _add_trigger(exc, notice)
            raise
        finally:
            self._leave()

    async def close(self, exc: BaseException | None) -> None:
        """Cancel concurrent calls, stop what the actor owns, then run `__cleanup__`, which may still answer after a stop."""
        try:
            await self._close(exc)
        finally:
            self._leave()
            self._actor = None
            self._end_owed()

    async def _close(self, exc: BaseException | None) -> None:
        if exc is not None:
            self._end_owed()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)
        for stopping in _stop_children(self._children()):
            await stopping
        cleanup = hook_of(self._cls, "__cleanup__")
        if cleanup is not None and self._actor is not None:
            result = cleanup(self._actor, _as_exception(exc))
            if inspect.isawaitable(result):
                await result


def _stop_children(children: list[Any]) -> list[Any]:
    stopping = []
    for child in children:
        if not child._ended:
            stopping.append(child.stop("its owner has ended"))
    return stopping


def _add_trigger(exc: BaseException, notice: Notice) -> None:
    exc.add_note(f"This error occurred while handling another failure:\n{UnhandledFaultError(notice)}")


def _answer_ready(actor: Any) -> None:
    """`__init__` has returned, or this would not run."""


def _as_exception(exc: BaseException | None) -> Exception | None:
    if exc is None or isinstance(exc, Exception):
        return exc
    return RuntimeError(f"the actor failed: {render(exc)}")
