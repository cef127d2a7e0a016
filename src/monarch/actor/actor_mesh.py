"""Actor meshes: references to the actors that one `spawn` created, or to some of them.

A mesh is complete from the moment of `spawn`: its ids and addresses are chosen by the spawner, so it can be called,
sliced and sent to others while its actors are still being created.

Read next: `endpoint.py` for what calling does, `proc_mesh.py` for what it stands on.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Generator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

from monarch._base.errors import did_you_mean, explain
from monarch._base.ids import ProcRef, between_hosts
from monarch._mesh.mesh import ShapedMesh
from monarch._mesh.shape import Extent, Point, Shape
from monarch._runtime.faults import GAVE_UP, buried, last_words
from monarch._runtime.future import Future
from monarch._wire import messages
from monarch._wire.messages import Fault, ProcExited
from monarch.actor.base import Actor, hook_of
from monarch.actor.endpoint import Endpoint, EndpointProperty, NotAnEndpoint, nearest_adverb
from monarch.actor.process import this_process

if TYPE_CHECKING:
    from monarch.actor.proc_mesh import ProcMesh
    from monarch.actor.proc_mesh_core import Refs
    from monarch.actor.supervised import SupervisionGroup

T = TypeVar("T")
READY = "__ready__"
"""Name of the message that every actor answers once its `__init__` has returned."""


class ActorMeshCore:
    """What all views of one actor mesh share."""

    def __init__(
        self, *, uid: str, name: str, cls: type, proc_mesh: ProcMesh, chain: str, owner_actor: str, owned: bool, supervised: bool
    ) -> None:
        self.uid = uid
        self.name = name
        self.cls = cls
        self.proc_mesh = proc_mesh
        """The view of the proc mesh that was spawned on: rank r of the actor mesh is on its r-th proc."""
        self.chain = chain
        """Human chain of the spawner."""
        self.owner_actor = owner_actor
        self.owned = owned
        """This object is the owner's handle, not a reference that arrived by message."""
        self.supervised = supervised
        """A restarting policy looks after it."""
        self.gave_up = False
        """The policy restarts nothing any more. Known in the process of the owner only."""
        self.group: SupervisionGroup | None = None
        """Whose policy that is; None in a reference, and without a policy."""
        self.creation: tuple[bytes, Sequence[memoryview]] | None = None
        """Pickled class and arguments, for creating an actor anew; None where nothing restarts."""
        self.stopped = False
        """Nothing of it is left to stop: the mesh, or all its procs, were stopped by the owner."""
        self.refs: Refs = proc_mesh._refs
        self.extent: Extent = proc_mesh.extent

    def display(self, rank: int) -> str:
        """Human chain of one actor of the mesh."""
        return f"{self.chain}.<{class_name(self.cls)} {self.name}{Point(rank, self.extent)}>"

    def blame(self, rank: int, exited: ProcExited) -> Fault:
        """The fault of one actor when its proc is gone."""
        if exited.how == "stopped":
            kind, report = "stopped", f"actor mesh is stopped due to proc mesh shutdown ({exited.reason})"
        else:
            kind, report = "lost", f"the process this actor was running on failed: {exited.reason}{_place_of(exited)}{last_words(exited)}"
            if self.gave_up:
                report = f"{report}\n{GAVE_UP}"
        again = exited.again and self.supervised and not self.gave_up
        return Fault(kind, self.display(rank), self.uid, rank, report, exited.proc.uid, again)

    def amend(self, fault: Fault) -> Fault:
        """What an actor of the mesh has answered, in the light of what its policy has decided since."""
        return buried(fault) if fault.again and self.gave_up else fault


def _place_of(exited: ProcExited) -> str:
    """On which host that was, where there are several, and the reason does not say it anyway."""
    host = exited.proc.host
    return f", on {host}" if between_hosts(host) and host not in exited.reason else ""


class View:
    """Where the actors of one view of a mesh are; immutable."""

    __slots__ = ("mesh_ranks", "procs", "ranks", "refs")

    def __init__(self, core: ActorMeshCore, shape: Shape) -> None:
        self.mesh_ranks: Sequence[int] = shape.ndslice.ranks()
        """Rank in the whole mesh of each rank of the view."""
        self.refs: tuple[ProcRef, ...] = core.refs.cut(self.mesh_ranks).all()
        self.procs: tuple[str, ...] = tuple(ref.uid for ref in self.refs)
        self.ranks = range(len(self.refs))


class ActorMesh(ShapedMesh, Generic[T]):
    """The actors of one `spawn`, or a slice of them. Picklable: what arrives is a reference. Thread: any."""

    def __init__(self, core: ActorMeshCore, shape: Shape) -> None:
        self._core = core
        self._shape = shape

    _endpoint_class: ClassVar[type[Endpoint[..., Any]]] = Endpoint
    """What an endpoint of this kind of view is (`deadline.py` has another)."""

    # --- endpoints -----------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        core = self.__dict__.get("_core")
        if core is None:  # being unpickled
            raise AttributeError(name)
        attribute = inspect.getattr_static(core.cls, name, None)
        if isinstance(attribute, EndpointProperty):
            endpoint = self._endpoint_class(self, name, attribute._method, explicit=attribute._explicit_response_port)
            self.__dict__[name] = endpoint
            return endpoint
        if name in dir(core.cls):
            return NotAnEndpoint(self, name)
        known = list(endpoints_of(core.cls))
        meant = did_you_mean(name, known)
        adverb = "" if meant else nearest_adverb(name)
        raise AttributeError(
            explain(
                f"{adverb} belongs to an endpoint: write mesh.<endpoint>.{adverb}(...)"
                if adverb
                else f"actor mesh {core.name!r} has no endpoint {name!r}{meant}",
                where=f"class {class_name(core.cls)}",
                next=f"its endpoints are: {', '.join(known) or '(none)'}",
            )
        )

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *endpoints_of(self._core.cls)})

    @cached_property
    def _view(self) -> View:
        return View(self._core, self._shape)

    # --- life ----------------------------------------------------------------------------------------------------

    @property
    def initialized(self) -> Future[None]:
        """Whether the actors of this view were created; it waits for no `__init__`.

        The future fails with RuntimeError when their procs are stopped or never came.
        """
        return self._core.proc_mesh._created(self._view.refs)

    def __await__(self) -> Generator[Any, None, ActorMesh[T]]:
        """This mesh, once every `__init__` has returned; raises what `__init__` failed with."""
        yield from self._endpoint_class(self, READY, _ready, explicit=False).call().__await__()
        return self

    def stop(self, reason: str = "stopped by client") -> Future[Any]:
        """Stop the actors: what is queued is handled first, within `stop_actor_timeout`, then `__cleanup__(None)` runs.

        Raises:
            NotImplementedError: this is a slice, or a reference that arrived by message.
        """
        core = self._core
        if not core.owned or self._shape != core.extent.region.as_shape():
            raise NotImplementedError(
                explain(
                    "Cannot call stop on an ActorMeshRef, requires an owned ActorMesh",
                    where=f"mesh {core.name!r}, extent {self.extent}",
                    next="stop the mesh that spawn() returned, in the actor that spawned it",
                )
            )
        process = this_process()
        process.supervisor.disown_actors(core)
        request = messages.StopActor(core.uid, f"ActorMeshController received explicit stop request ({reason})")
        return process.proc.request_all(self._view.refs, request, survivors=True)._then(lambda _: ())

    @property
    def _ended(self) -> bool:
        return self._core.stopped

    @property
    def _name(self) -> Future[str]:
        return Future._completed(self._core.uid)

    @property
    def _proc_mesh(self) -> ProcMesh:
        return self._core.proc_mesh

    @property
    def _class(self) -> type:
        return self._core.cls

    @property
    def _mesh_name(self) -> str:
        return self._core.name

    # --- geometry ------------------------------------------------------------------------------------------------

    def _new_with_shape(self, shape: Shape) -> ActorMesh[T]:
        return self if shape == self._shape else ActorMesh(self._core, shape)

    @cached_property
    def extent(self) -> Extent:
        """Dimensions and sizes of this view."""
        return self._shape.extent

    def __repr__(self) -> str:
        return f"ActorMesh(class={self._core.cls}, shape={self._shape}, inner={self._core.uid})"

    def __reduce__(self) -> tuple[Any, ...]:
        core = self._core
        return _rebuild, (core.uid, core.name, core.cls, core.proc_mesh, core.chain, core.owner_actor, core.supervised, self._shape)


def _rebuild(
    uid: str, name: str, cls: type, proc_mesh: ProcMesh, chain: str, owner_actor: str, supervised: bool, shape: Shape
) -> ActorMesh[Any]:
    core = ActorMeshCore(
        uid=uid,
        name=name,
        cls=cls,
        proc_mesh=proc_mesh,
        chain=chain,
        owner_actor=owner_actor,
        owned=False,
        supervised=supervised,
    )
    return ActorMesh(core, shape)


def _ready(self: Any) -> None:
    """Signature of the `READY` message."""


def class_name(cls: type) -> str:
    """`<module>.<qualname>`."""
    return f"{cls.__module__}.{cls.__qualname__}"


# --- checks at spawn -----------------------------------------------------------------------------------------------


def endpoints_of(cls: type) -> dict[str, EndpointProperty[..., Any]]:
    """The endpoints of an actor class, inherited ones included."""
    found = {name: inspect.getattr_static(cls, name) for name in dir(cls)}
    return {name: value for name, value in found.items() if isinstance(value, EndpointProperty)}


def check_actor_class(cls: Any) -> None:
    """Raise what `spawn` raises for a class that can't be spawned."""
    if isinstance(cls, Actor):
        name = type(cls).__name__
        text = f"spawn() makes the actors itself: it takes the class {name} and not an object of it"
        raise ValueError(explain(text, next=f'write spawn("name", {name}, ...) with the arguments of __init__'))
    if not (isinstance(cls, type) and issubclass(cls, Actor)):
        raise ValueError(explain(f"{cls} must subclass monarch.service.Actor to spawn it.", next="derive it from monarch.actor.Actor"))
    endpoints = endpoints_of(cls)
    for name in endpoints:
        if name in dir(ActorMesh) or name in _RESERVED:
            raise ValueError(
                explain(
                    f"ActorMesh has an attribute that collides with an endpoint name: attribute={name}",
                    where=f"class {class_name(cls)}",
                    next="rename the endpoint",
                )
            )
    sync = [name for name, attribute in endpoints.items() if not attribute._is_async]
    asynchronous = [name for name, attribute in endpoints.items() if attribute._is_async]
    if sync and asynchronous:
        raise ValueError(
            explain(
                f"{class_name(cls)} mixes both async and sync endpoints; sync: {sync}, async: {asynchronous}",
                next="make all endpoints of the class `def`, or all `async def`",
            )
        )
    _check_hook(cls, "__cleanup__", sync, asynchronous)
    _check_hook(cls, "__supervise__", sync, [])
    _check_hook(cls, "__restore__", sync, [])


def _check_hook(cls: type, name: str, sync: list[str], asynchronous: list[str]) -> None:
    hook = hook_of(cls, name)
    if hook is None:
        return
    is_async = inspect.iscoroutinefunction(hook)
    if (sync and is_async) or (asynchronous and not is_async):
        kinds = ("async", "sync") if is_async else ("sync", "async")
        raise ValueError(
            explain(
                f"{class_name(cls)} mixes both async and sync: {name} is {kinds[0]} and its endpoints are {kinds[1]}",
                where=f"endpoints {sync or asynchronous}",
                next=f"make {name} {kinds[1]} too",
            )
        )


@functools.lru_cache(maxsize=1024)
def is_asynchronous(cls: type) -> bool:
    """Whether actors of this class have an event loop: yes, unless all their endpoints are `def`."""
    endpoints = endpoints_of(cls)
    return not endpoints or any(attribute._is_async for attribute in endpoints.values())


_RESERVED = frozenset({"_core", "_shape", "_class", "_inner", "_endpoint", "_mesh_name", "_proc_mesh", "_name"})


def as_actor(mesh: ActorMesh[T]) -> T:
    """The mesh, typed as the class whose endpoints it has."""
    return cast(T, mesh)
