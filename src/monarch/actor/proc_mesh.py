"""Proc meshes: the processes that one `spawn_procs` started, or some of them.

Read next: `host_mesh.py` for how they start, `actor_mesh.py` for what is spawned on them.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from monarch import config
from monarch._base.errors import explain
from monarch._base.ids import ProcRef, agent_at, by_agent, random_id, sanitize_label
from monarch._mesh.mesh import ShapedMesh
from monarch._mesh.shape import Extent, Shape
from monarch._runtime.future import Future, gather, settled
from monarch._runtime.policies import Policy, Restarting
from monarch._wire import messages
from monarch._wire.messages import CreateActor
from monarch._wire.observation_messages import Activity, ActorActivity
from monarch._wire.pickling import dumps
from monarch.actor.actor_mesh import ActorMesh, ActorMeshCore, check_actor_class
from monarch.actor.base import Actor
from monarch.actor.endpoint import parameters_of
from monarch.actor.mock import get_actor_class
from monarch.actor.proc_mesh_core import STOPPED, ProcMeshCore, ProcNames, Refs
from monarch.actor.process import this_process

if TYPE_CHECKING:
    from monarch.actor.host_mesh import HostMesh
    from monarch.actor.supervised import SupervisedProcs, SupervisionGroup

T = TypeVar("T", bound=Actor)
_STOP_GRACE_S = 3.0


class ProcMesh(ShapedMesh):
    """Processes that actors can be spawned on. Picklable: what arrives is a reference. Thread: any."""

    def __init__(self, core: ProcMeshCore, shape: Shape) -> None:
        self._core = core
        self._shape = shape
        if core.owned and core.hosts is not None:
            _active.add(self)

    # --- spawning ------------------------------------------------------------------------------------------------

    def spawn(self, name: str, Class: type[T], *args: Any, **kwargs: Any) -> T:
        """Create one actor of a class on every proc of this view; returns at once.

        Messages sent meanwhile wait for `__init__`, in order. The running actor becomes the owner. `await` the result to
        wait until every `__init__` has returned.

        Args:
            name: for people; need not be unique.

        Raises:
            ValueError: `Class` is no actor class, mixes sync and async, or has an endpoint with a reserved name.
            TypeError: the arguments do not fit `Class.__init__`, or can't be pickled.
        """
        return self._checked_spawn(name, Class, args, kwargs)

    def _checked_spawn(
        self, name: str, Class: type[T], args: tuple[Any, ...], kwargs: dict[str, Any], group: SupervisionGroup | None = None
    ) -> T:
        if not isinstance(name, str):
            raise TypeError(explain(f"the name of the actors is {name!r}; expected a string", next='write spawn("name", Class, ...)'))
        check_actor_class(Class)
        cls = get_actor_class(Class)
        if cls is not Class:
            check_actor_class(cls)
        init: Any = inspect.getattr_static(cls, "__init__")
        if init is not object.__init__:
            parameters_of(init, 1).bind(f"{cls.__name__}.__init__", args, kwargs)
        return cast(T, self._spawn(name, cls, args, kwargs, group=group))

    def supervised(self, policy: Policy | SupervisionGroup) -> SupervisedProcs:
        """These procs, with a policy for the actors that are spawned through the result.

        All that one result spawns is one group: it shares the count of restarts, and `AllForOne` and `RestForOne` restart
        across its meshes. For a group on several proc meshes pass the same `SupervisionGroup` to each.

        Args:
            policy: `OneForOne`, `AllForOne`, `RestForOne`, `Escalate` or `Ignore`, or a group that has one.

        Raises:
            TypeError: neither a policy nor a group.
            ValueError: `replace="proc"` on a process that nobody spawned (a client's), which can't be replaced.
        """
        from monarch.actor.supervised import supervise

        return supervise(self, policy)

    def _spawn(
        self,
        name: str,
        cls: type,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        system: bool = False,
        group: SupervisionGroup | None = None,
    ) -> ActorMesh[Any]:
        process = this_process()
        instance = process.instance()
        uid = f"{sanitize_label(name)}-{random_id()}"
        owner_actor = instance._uid
        supervised = group is not None and isinstance(group.policy, Restarting)
        core = ActorMeshCore(
            uid=uid,
            name=name,
            cls=cls,
            proc_mesh=self._unowned,
            chain=str(instance),
            owner_actor=owner_actor,
            owned=True,
            supervised=supervised,
        )
        controllers = process.controllers if system else process.controller_table()
        parts = (f"class {cls.__qualname__}", "arguments", "arguments", "procs", "spawning actor", "table of controllers")
        payload, buffers = dumps((cls, args, kwargs, self._unowned, instance._snapshot(), controllers), parts=parts)
        extent = self.extent
        proc, labels, sizes = process.proc, tuple(extent.labels), tuple(extent.sizes)
        if not system:
            core.group = group
            if supervised:  # the buffers are the caller's memory, which may change before they are needed again
                core.creation = (payload, [memoryview(bytes(buffer)) for buffer in buffers])
            instance._add_child(ActorMesh(core, extent.region.as_shape()))
            process.supervisor.own_actors(core)
        # The rank of each is in its frame, so that one message is for all.
        create = CreateActor(uid, name, proc.ref, owner_actor, -1, labels, sizes, system, supervised)
        proc.tell_all(core.refs.all(), create, payload, buffers)
        return ActorMesh(core, extent.region.as_shape())

    # --- life ----------------------------------------------------------------------------------------------------

    @property
    def initialized(self) -> Future[bool]:
        """True once all procs run and their bootstrap function has ended.

        Raises (through the future):
            ActorError: the bootstrap function raised.
            ValueError: a process could not be started.
            RuntimeError: the mesh was stopped.
        """
        core = self._core
        if core.ready is not None:
            return core.ready
        return self._created(self._refs.all())._then(lambda _: True)

    def __await__(self) -> Any:
        """This mesh, once it is initialized."""
        yield from self.initialized.__await__()
        return self

    def stop(self, reason: str = "stopped by client") -> Future[None]:
        """Stop all actors, then end the processes and everything they started; begins at once, and may be repeated.

        Actors handle what is queued within `stop_actor_timeout` and clean up within `cleanup_timeout`; what then still
        lives is killed.

        Raises:
            ValueError: this is a slice, or a reference that arrived by message.
        """
        core = self._core
        self._check_owned("stopped", "stop")
        if core.successor is not None:
            return core.successor.stop(reason)
        with core.lock:
            if core.stopping is None:
                core.stopping = self._stop(reason)
            return core.stopping

    def _check_owned(self, done: str, what: str) -> None:
        core = self._core
        if not core.owned or core.hosts is None or self._shape != core.extent.region.as_shape():
            raise ValueError(
                explain(
                    f"ProcMesh is not owned; must be {done} by an owner",
                    where=f"mesh {core.name!r}, extent {self.extent}",
                    next=f"{what} the mesh that spawn_procs() returned, in the actor that called it",
                )
            )

    def respawn(self) -> ProcMesh:
        """This mesh with a new process in the place of each that is gone; returns at once.

        The new processes start like those before them: same coordinates, environment as it is now, same bootstrap, which
        runs only there. Processes that live go on, with their actors. Actor meshes that had lost a rank do not get it
        back: stop them and spawn new ones on the result. For restarts that nobody has to ask for, see `supervised`.

        Returns:
            A new mesh of the same extent; this one when no process is gone. Stopping either stops all.

        Raises:
            ValueError: this is a slice, or a reference that arrived by message.
            RuntimeError: the mesh was stopped, or its processes never came.
        """
        self._check_owned("respawned", "respawn")
        core = self._core
        if core.successor is not None:
            return core.successor.respawn()
        if core.stopping is not None:
            raise RuntimeError(explain(STOPPED, where=f"mesh {core.name!r}", next="spawn a new one"))
        process = this_process()
        dead = [rank for rank, ref in enumerate(core.refs) if ref.uid in process.proc.fates.gone]
        if not dead:
            return self
        if core.launch is None:
            raise core.launch_error() or RuntimeError(explain("the mesh never started", where=f"mesh {core.name!r}"))
        renamed = {**dict(core.names.renamed), **dict.fromkeys(dead, random_id())}
        names = core.names._replace(renamed=tuple(sorted(renamed.items())))
        new = ProcMeshCore(names, name=core.name, extent=core.extent, hosts=core.hosts, owner_actor=core.owner_actor, owned=True)
        mesh = ProcMesh(new, self._shape)
        new.succeed(core)
        core.successor = mesh
        _active.discard(self)
        process.instance()._add_child(mesh)
        new.launch = core.launch
        new.ready = core.launch.start(mesh, dead)
        announce(mesh)
        return mesh

    def _stop(self, reason: str) -> Future[None]:
        process = this_process()
        proc, core = process.proc, self._core
        core.stop_begun = True
        budget_s = config.seconds("stop_actor_timeout") + config.seconds("cleanup_timeout") + _STOP_GRACE_S
        # The agents hear first, so that a proc that ends at once has ended because it was asked to.
        done = gather(
            [
                settled(proc.request(agent_at(address), messages.StopProcs([ref.uid for ref in refs], budget_s)))
                for address, refs in by_agent(core.refs).items()
            ]
        )
        proc.tell_all(core.refs.all(), messages.StopProc(reason))

        def finish() -> None:
            process.supervisor.disown_procs(core)
            process.print_last(core.refs, result)

        _active.discard(self)
        result: Future[None] = Future._new()
        done._when_done(finish)
        return result

    async def __aenter__(self) -> Self:
        if self._core.stopping is not None:
            raise RuntimeError(explain(STOPPED, where=f"mesh {self._core.name!r}", next="spawn a new one"))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._core.stopping is None:
            await self.stop()

    def _created(self, refs: Sequence[ProcRef]) -> Future[None]:
        """A future that ends once everything sent to these procs so far has arrived."""
        proc, core = this_process().proc, self._core.spawned or self._core
        answers = proc.request_all(refs, messages.Ping())
        result: Future[None] = Future._new()

        def transfer() -> None:
            if answers._error is None:
                result._complete(None)
            elif core.stopping is not None:
                result._fail(RuntimeError(explain(STOPPED, where=f"mesh {core.name!r}", next="spawn a new one")))
            else:
                text = f"error spawning actor mesh: statuses: {core.launch_error() or answers._error}"
                result._fail(RuntimeError(explain(text, where=f"mesh {core.name!r}, extent {self.extent}")))

        # A failure later: who waits hears of a lost proc before the mesh, which knows why it never came.
        answers._when_done(lambda: transfer() if answers._error is None else proc.loop.call_soon(transfer))
        return result

    # --- looking at it -------------------------------------------------------------------------------------------

    @property
    def host_mesh(self) -> HostMesh:
        """The host of a mesh of one proc.

        Raises:
            NotImplementedError: the mesh has more procs.
        """
        if len(self) != 1:
            raise NotImplementedError(
                explain("`ProcMesh.host_mesh` is not yet supported for non-singleton proc meshes", where=f"extent {self.extent}")
            )
        return self._host_of(self._shape.ndslice.ranks()[0])

    def _host_of(self, rank: int) -> HostMesh:
        from monarch.actor.host_mesh import host_mesh_at, local_host_mesh

        hosts = self._core.hosts
        if hosts is None:
            return local_host_mesh()
        return host_mesh_at(hosts, self._core.refs[rank].host)

    def activity(self) -> Future[list[ActorActivity]]:
        """What every actor on these procs is doing right now, read from outside the processes.

        It answers also while a proc computes, hangs, is stopped by a signal or holds its interpreter lock: which
        endpoint runs, for how many seconds, and how many messages wait behind it.
        """
        process = this_process()
        own = [ref for ref in self._refs if ref.uid == process.proc.ref.uid]
        others = [ref for ref in self._refs if ref.uid != process.proc.ref.uid]
        rows = process.own_activity() if own else []
        if not others:
            return Future._completed(rows)
        answers = [
            process.proc.request(agent_at(address), Activity([ref.uid for ref in refs])) for address, refs in by_agent(others).items()
        ]
        return gather(answers)._then(lambda parts: rows + [row for part in parts for row in part.actors])

    async def logging_option(
        self, stream_to_client: bool = False, aggregate_window_sec: int | None = None, level: int = logging.INFO
    ) -> None:
        """Choose where the output of these processes goes, and set the level of their Python logger; may be repeated.

        Args:
            stream_to_client: print each line here, on `sys.stdout` or `sys.stderr`, as `[host proc actor] [rank] line`. Otherwise
                lines go, as they are, to the stdout and stderr that the host's agent has: on this host, the client's.
            aggregate_window_sec: merge similar lines of different actors for so many seconds, then print them with counts;
                needs `stream_to_client`.
            level: 0 to 255.

        Raises:
            TypeError: the window is no number.
            ValueError: the level is out of range, or the window is not positive and finite.
            RuntimeError: a window without streaming.
        """
        if not 0 <= level <= 255:
            raise ValueError(f"Invalid logging level: {level}; expected 0 to 255")
        if aggregate_window_sec is not None:
            _check_window(aggregate_window_sec)
        if aggregate_window_sec is not None and not stream_to_client:
            raise RuntimeError("cannot set aggregate window without streaming to client; pass stream_to_client=True")
        from monarch.actor.setup import SetLevel

        await self.initialized
        setter = self._spawn("logging", SetLevel, (level,), {}, system=True)
        await setter
        process, ranks = this_process(), {ref.uid: rank for rank, ref in enumerate(self._core.refs)}
        if stream_to_client or process.printer is not None:
            await process.log_printer().choose(self._refs, ranks, here=stream_to_client, window_s=aggregate_window_sec)

    async def sync_workspace(self, *args: Any, **kwargs: Any) -> None:
        """Not here: the host mesh has it."""
        raise NotImplementedError("sync_workspace is a method of HostMesh; call it on the hosts of these procs")

    def activate(self) -> Any:
        """Needs the tensor engine."""
        raise RuntimeError("activate() needs the tensor engine, which is not part of this version of monarch")

    def rank_tensor(self, dim: str) -> Any:
        """Needs the tensor engine."""
        raise RuntimeError("rank_tensor() needs the tensor engine, which is not part of this version of monarch")

    def rank_tensors(self) -> Any:
        """Needs the tensor engine."""
        raise RuntimeError("rank_tensors() needs the tensor engine, which is not part of this version of monarch")

    @property
    def _ended(self) -> bool:
        return self._core.stopping is not None or self._core.successor is not None

    @property
    def _name(self) -> Future[str]:
        return Future._completed(self._core.uid)

    @property
    def _host_mesh(self) -> HostMesh | None:
        return self._core.hosts

    @property
    def _region(self) -> Any:
        return self._shape.region

    # --- geometry ------------------------------------------------------------------------------------------------

    @cached_property
    def _refs(self) -> Refs:
        return self._core.refs.cut(self._shape.ndslice.ranks())

    @cached_property
    def _unowned(self) -> ProcMesh:
        """This view as somebody else would receive it."""
        core = self._core
        if not core.owned:
            return self
        reference = ProcMeshCore(
            core.names, name=core.name, extent=core.extent, hosts=core.hosts, owner_actor=core.owner_actor, owned=False
        )
        reference.spawned = core
        return ProcMesh(reference, self._shape)

    def _new_with_shape(self, shape: Shape) -> ProcMesh:
        return self if shape == self._shape else ProcMesh(self._core, shape)

    @property
    def _proc_mesh(self) -> ProcMesh:
        """What programs for PyTorch Monarch hand to its private functions."""
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcMesh) and self._core.names == other._core.names and self._shape == other._shape

    def __hash__(self) -> int:
        return hash((self._core.uid, self._shape))

    def __repr__(self) -> str:
        return f"ProcMesh(name={self._core.name!r}, extent={self.extent})"

    def __reduce__(self) -> tuple[Any, ...]:
        core = self._core
        return _rebuild, (core.names, core.name, core.extent, core.hosts, core.owner_actor, self._shape)


def _check_window(seconds: Any) -> None:
    """Refuse what is no time to collect similar lines for."""
    hint = "give it seconds, such as 3, or None to print each line at once"
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(explain(f"aggregate_window_sec is {seconds!r}; expected a number of seconds", next=hint))
    if not 0 < seconds < float("inf"):
        raise ValueError(explain(f"aggregate_window_sec is {seconds!r}; expected a finite number of seconds, more than 0", next=hint))


def _rebuild(names: ProcNames, name: str, extent: Extent, hosts: HostMesh | None, owner_actor: str, shape: Shape) -> ProcMesh:
    return ProcMesh(ProcMeshCore(names, name=name, extent=extent, hosts=hosts, owner_actor=owner_actor, owned=False), shape)


# --- registry of meshes spawned by this process --------------------------------------------------------------------

_active: weakref.WeakSet[ProcMesh] = weakref.WeakSet()
_callbacks: list[Callable[[ProcMesh], None]] = []


def get_active_proc_meshes() -> list[ProcMesh]:
    """The proc meshes that this process has spawned and not stopped."""
    return list(_active)


def register_proc_mesh_spawn_callback(callback: Callable[[ProcMesh], None]) -> None:
    """Call `callback(proc_mesh)` once for every mesh that this process spawns from now on."""
    _callbacks.append(callback)


def unregister_proc_mesh_spawn_callback(callback: Callable[[ProcMesh], None]) -> None:
    """Undo a registration.

    Raises:
        ValueError: it is not registered.
    """
    if callback not in _callbacks:
        raise ValueError(f"{callback!r} is not registered as a spawn callback")
    _callbacks.remove(callback)


def announce(mesh: ProcMesh) -> None:
    """Run the spawn callbacks for a new mesh."""
    for callback in list(_callbacks):
        callback(mesh)
