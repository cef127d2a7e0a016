"""The background loop: where coroutines run that belong to nobody's loop (`returns_future`).

One asyncio loop on one daemon thread per process, started on first use and stopped with the runtime.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from monarch._runtime.future import Future

if TYPE_CHECKING:
    import asyncio

P = ParamSpec("P")
R = TypeVar("R")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None
_tasks: set[asyncio.Task[None]] = set()


_runner: Callable[[Coroutine[Any, Any, None]], None] | None = None


def run_elsewhere(runner: Callable[[Coroutine[Any, Any, None]], None] | None) -> None:
    """Let `runner` run the coroutines from now on; None: the background loop does, as always."""
    global _runner
    _runner = runner


def run_coroutine(coro: Coroutine[Any, Any, Any], future: Future[Any]) -> None:
    """Run `coro` on the background loop and complete `future` with its outcome."""

    async def run() -> None:
        try:
            future._complete(await coro)
        except BaseException as exc:
            future._fail(exc)

    def on_done(_: object) -> None:
        import asyncio

        coro.close()  # the task may have been cancelled before its first step
        future._fail(asyncio.CancelledError())

    if _runner is not None:
        _runner(run())
        return
    with _lock:  # `stop` comes before, and a new loop is made, or behind, and the coroutine is cancelled like others
        _background_loop().call_soon_threadsafe(_start, run(), on_done)


def stop() -> None:
    """Cancel what runs and end the loop; harmless when it never started."""
    global _loop, _thread
    with _lock:
        loop, thread = _loop, _thread
        _loop = _thread = None
    if loop is not None and thread is not None:
        loop.call_soon_threadsafe(loop.stop)
        if thread is not threading.current_thread():
            thread.join(5)


def _start(coro: Coroutine[Any, Any, None], on_done: Callable[[object], None]) -> None:
    import asyncio

    task = asyncio.get_running_loop().create_task(coro)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    task.add_done_callback(on_done)


def _background_loop() -> asyncio.AbstractEventLoop:
    global _loop, _thread
    import asyncio

    if _loop is None:
        _loop = asyncio.new_event_loop()
        _thread = threading.Thread(target=_serve, args=(_loop,), name="monarch-background", daemon=True)
        _thread.start()
    return _loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    import asyncio

    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        pending = asyncio.all_tasks(loop)
        for task in pending:
            task.cancel()
        if pending:
            loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        loop.close()


def returns_future(function: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Future[R]]:
    """Make a coroutine function return a `Future`; its body starts at the call, on the background loop."""

    @functools.wraps(function)
    def start(*args: P.args, **kwargs: P.kwargs) -> Future[R]:
        return Future._from_coro(function(*args, **kwargs))

    return start
