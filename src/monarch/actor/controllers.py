"""Controllers: singleton actors by name, for a whole job, each in a process of its own on the root client's host.

One internal actor of the client keeps the table of names; its reference travels to every process with the actors that
are spawned there, so all agree. A controller that has failed is made anew by the next who asks for it: what one does to
itself hurts neither the others nor the client. Those of the runtime (`Actor._lives_in_client`) share the client's process.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple, TypeVar

from monarch._runtime.faults import MeshFailure
from monarch._runtime.future import Future
from monarch.actor.base import Actor
from monarch.actor.endpoint import endpoint
from monarch.actor.host_mesh import this_host, this_proc
from monarch.actor.process import this_process

T = TypeVar("T", bound=Actor)
_logger = logging.getLogger("monarch.supervision")


class _Entry(NamedTuple):
    mesh: Any
    procs: Any
    """Its process; None for one that lives in the client."""


class ControllerTable(Actor):
    """Names and the actors they stand for."""

    _is_system_actor = True

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    @endpoint
    def get_or_spawn(self, name: str, cls: type[Actor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The controller of that name; the first caller's class and arguments make it."""
        if name not in self._entries:
            self._entries[name] = self._make(name, cls, args, kwargs)
        return self._entries[name].mesh

    def _make(self, name: str, cls: type[Actor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Entry:
        if getattr(cls, "_lives_in_client", False):
            return _Entry(this_proc().spawn(name, cls, *args, **kwargs), None)
        procs = this_host().spawn_procs(name=name)
        try:
            return _Entry(procs.spawn(name, cls, *args, **kwargs), procs)
        except BaseException:
            procs.stop()
            raise

    def __supervise__(self, failure: MeshFailure) -> bool:
        failed = {fault.mesh for fault in failure.faults}
        names = [name for name, entry in self._entries.items() if entry.mesh._core.uid in failed]
        for name in names:
            _logger.error("a controller failed; who asks for it next makes a new one: name=%s failure=%s", name, failure.report())
            entry = self._entries.pop(name)
            if entry.procs is not None:
                entry.procs.stop()
        return True


def get_or_spawn_controller(name: str, Class: type[T], *args: Any, **kwargs: Any) -> Future[T]:
    """The one actor of this name in the whole job; the first caller creates it, in a process of its own on the client's host.

    `Class` and the arguments are ignored when it exists. One that has failed is not handed out any more: the next caller
    makes a new one.
    """
    table = _get_controller_controller()[1]
    future: Future[T] = table.get_or_spawn.call_one(name, Class, args, kwargs)
    return future


def _get_controller_controller() -> tuple[Any, Any]:
    table = this_process().controller_table()
    return table._core.proc_mesh, table
