"""Endpoints: the methods of an actor that messages can call, and the adverbs that call them.

Seen from the class, an endpoint is a descriptor with options; seen through a mesh, it is bound to a view of the mesh
and has the adverbs `call`, `call_one`, `choose`, `stream`, `broadcast`.

Rules of this file:
    1. Arguments are checked and pickled in the caller's thread; when that fails nothing is sent.
    2. An adverb sends at once. Its future only collects the reply.
    3. What is equal for all calls of one endpoint by one sender (the header) is encoded once.

Read next: `actor_mesh.py` for views, `behavior.py` for the receiving end.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, cast, overload

from monarch._base.errors import did_you_mean, explain, nearest
from monarch._base.ids import ProcRef
from monarch._mesh.shape import Extent
from monarch._mesh.value_mesh import ValueMesh
from monarch._runtime.future import Future
from monarch._runtime.mailbox import Gather, OneReply, Reply, Stream
from monarch._wire import messages
from monarch._wire.messages import CallHeader, Fault, ProcExited
from monarch._wire.pickling import dumps
from monarch.actor.process import Process, this_process

if TYPE_CHECKING:
    from monarch.actor.actor_mesh import ActorMesh
    from monarch.actor.ports import Port

P = ParamSpec("P")
R = TypeVar("R")
Propagator = Any
_ADVERBS = ("call", "call_one", "choose", "stream", "broadcast")


class Endpoint(Generic[P, R]):
    """One method of the actors of a mesh view. Thread: any."""

    __slots__ = ("_explicit", "_header", "_key", "_mesh", "_name", "_parameters")

    def __init__(self, mesh: ActorMesh[Any], name: str, method: Callable[..., Any], *, explicit: bool) -> None:
        self._mesh = mesh
        self._name = name
        self._explicit = explicit
        self._parameters = parameters_of(method, 2 if explicit else 1)
        self._key: tuple[str, bool, bool] | None = None
        self._header: tuple[CallHeader, bytes] | None = None

    # --- adverbs -------------------------------------------------------------------------------------------------

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Future[ValueMesh[R]]:
        """Call every actor of the view; a `ValueMesh` with the view's extent once all have answered.

        Raises:
            TypeError: the arguments do not fit the signature, or can't be pickled; nothing was sent.

        The future fails with `ActorError` of the lowest rank that raised, after all ranks have answered; or with
        `SupervisionError` as soon as a rank is known to be dead or stopped.
        """
        process = this_process()
        gather = Gather(process.proc.ports, self, self._values)
        self._send(process, args, kwargs, gather.port, self._mesh._view.ranks, once=True)
        return gather.future

    def call_one(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call the only actor of the view; its value.

        Raises:
            ValueError: the view has not exactly one actor.
            TypeError: the arguments do not fit the signature, or can't be pickled; nothing was sent.
        """
        num_actors = len(self._mesh._view.refs)
        if num_actors != 1:
            raise ValueError(
                explain(
                    f"call_one requires exactly 1 actor, but mesh has {num_actors}",
                    where=f"{self.endpoint}, extent {self._mesh.extent}",
                    next="slice the mesh down to one actor, or use call() or choose()",
                )
            )
        return self._call_rank(0, args, kwargs)

    def choose(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call one actor of the view, chosen uniformly at random; its value."""
        return self._call_rank(_any_of(len(self._mesh._view.refs)), args, kwargs)

    def stream(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[Future[R]]:
        """Call every actor of the view; one future per actor, the k-th asked for takes the k-th reply to arrive."""
        process = this_process()
        stream = Stream(process.proc.ports, self, _value_of)
        self._send(process, args, kwargs, stream.port, self._mesh._view.ranks)
        return _futures(stream, len(self._mesh._view.refs))

    def broadcast(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Send to every actor of the view and wait for nothing. An actor that raises fails, and its owner hears of it."""
        self._send(this_process(), args, kwargs, 0, self._mesh._view.ranks)

    def rref(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Needs the tensor engine."""
        raise NotImplementedError("rref needs the tensor engine, which is not part of this version of monarch; use call()")

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Future[Any]:
        """The same as `call`; on a view of one actor, as `call_one`."""
        if len(self._mesh._view.refs) == 1:
            return self._call_rank(0, args, kwargs)
        return self.call(*args, **kwargs)

    # --- what receivers ask for ----------------------------------------------------------------------------------

    @property
    def procs(self) -> Sequence[str]:
        """Uid of the proc of each rank of the view."""
        return self._mesh._view.procs

    @property
    def endpoint(self) -> str:
        """`<mesh name>.<method>`."""
        return f"{self._mesh._core.name}.{self._name}"

    @property
    def refs(self) -> Sequence[ProcRef]:
        """The proc of each rank of the view."""
        return self._mesh._view.refs

    @property
    def mesh_ranks(self) -> Sequence[int]:
        """Rank in the whole mesh of each rank of the view."""
        return self._mesh._view.mesh_ranks

    @property
    def actor(self) -> str:
        """Uid of the mesh."""
        return self._mesh._core.uid

    @property
    def caller(self) -> str:
        """Uid of the actor that called last; "" when nobody has."""
        return "" if self._header is None else self._header[0].sender_actor

    def blame(self, rank: int, exited: ProcExited) -> Fault:
        """The fault of the view's rank `rank` when its proc is gone."""
        return self._mesh._core.blame(self._mesh._view.mesh_ranks[rank], exited)

    def amend(self, fault: Fault) -> Fault:
        """The fault that a rank has answered with, as it is known here."""
        return self._mesh._core.amend(fault)

    # --- sending -------------------------------------------------------------------------------------------------

    def _call_rank(self, rank: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[R]:
        process = this_process()
        receiver = OneReply(process.proc.ports, self, rank)
        self._send(process, args, kwargs, receiver.port, (rank,))
        return receiver.future

    def _send(
        self,
        process: Process,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        port: int,
        ranks: Sequence[int],
        *,
        once: bool = False,
        to: Port[Any] | None = None,
    ) -> None:
        proc = process.proc
        try:
            if kwargs or not self._parameters.fit(args):
                self._parameters.bind(self.endpoint, args, kwargs)
            payload, buffers = dumps((args, kwargs))
            header, encoded = self._header_for(process, port != 0, once, to)
            view = self._mesh._view
            proc.sender.call(self, view.refs, ranks, header, encoded, payload, buffers, port)
        except BaseException:
            if to is None:
                proc.ports.close(port)
            raise

    def _header_for(self, process: Process, wants_reply: bool, once: bool, to: Port[Any] | None) -> tuple[CallHeader, bytes]:
        sender_actor = process.activation().cell.uid
        key = (sender_actor, wants_reply, once)
        if to is None and key == self._key and self._header is not None and self._header[0].sender is process.proc.ref:
            return self._header
        ref = process.proc.ref
        extent = self._mesh.extent
        header = CallHeader(
            actor=self._mesh._core.uid,
            method=self._name,
            sender=ref,
            sender_actor=sender_actor,
            reply_to=(ref if to is None else to._proc) if wants_reply else None,
            labels=tuple(extent.labels),
            sizes=tuple(extent.sizes),
            explicit=self._explicit,
            once=once,
        )
        built = (header, messages.encode(header))
        if to is None:
            self._key, self._header = key, built
        return built

    def _values(self, replies: list[Reply]) -> ValueMesh[R]:
        return ValueMesh._from_lazy(_dense(self._mesh.extent), replies)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            text = f"an endpoint has no attribute {name!r}{did_you_mean(name, _ADVERBS)}"
            raise AttributeError(explain(text, where=self.endpoint, next=f"call it by {', '.join(_ADVERBS)}"))

    def __reduce__(self) -> Any:
        raise TypeError(f"an endpoint can't be pickled; send the mesh and use .{self._name} there")

    def __repr__(self) -> str:
        return f"Endpoint({self.endpoint}, extent={self._mesh.extent})"


def nearest_adverb(name: str) -> str:
    """The adverb that `name` is, or is a misspelling of; "" when it is near none."""
    return nearest(name, _ADVERBS)


def _any_of(count: int) -> int:
    import random  # after a script that draws numbers has imported it; not part of everybody's import

    return random.randrange(count)


def _dense(extent: Extent) -> Any:
    return extent.region.as_shape()


def _futures(stream: Stream, count: int) -> Iterator[Future[Any]]:
    for _ in range(count):
        yield stream.receive()


def _value_of(item: tuple[int, Reply]) -> Any:
    return item[1].take()


# --- signatures ----------------------------------------------------------------------------------------------------


class Parameters:
    """A method's parameters behind `self`; arguments are checked without `inspect` where that is enough."""

    __slots__ = ("most", "required", "signature")

    def __init__(self, signature: inspect.Signature) -> None:
        self.signature = signature
        positional = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        needs_names = any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in signature.parameters.values())
        has_rest = any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values())
        self.required = 1 << 30 if needs_names else sum(p.default is p.empty for p in positional)
        self.most = 1 << 30 if has_rest else len(positional)

    def fit(self, args: tuple[Any, ...]) -> bool:
        """Whether these positional arguments alone make a call; False: `bind` knows."""
        return self.required <= len(args) <= self.most

    def bind(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise TypeError, with the call's name, when the arguments do not fit."""
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as exc:
            raise TypeError(explain(str(exc), where=f"call of {name}{self.signature}")) from None


@functools.lru_cache(maxsize=4096)
def parameters_of(method: Callable[..., Any], skip: int) -> Parameters:
    """The parameters of `method` without its first `skip` ones."""
    signature = inspect.signature(method)
    rest = list(signature.parameters.values())
    if not (rest and rest[0].kind is inspect.Parameter.VAR_POSITIONAL):
        rest = rest[skip:]
    return Parameters(signature.replace(parameters=rest))


# --- decorators ----------------------------------------------------------------------------------------------------


class EndpointProperty(Generic[P, R]):
    """What `@endpoint` makes of a method: a descriptor that `spawn` and meshes read."""

    def __init__(
        self,
        method: Callable[..., Any],
        *,
        propagator: Propagator = None,
        explicit_response_port: bool = False,
        instrument: bool = True,
        concurrent: bool = False,
    ) -> None:
        self._method = method
        self._propagator = propagator
        self._explicit_response_port = explicit_response_port
        self._instrument = instrument
        self._concurrent = concurrent
        functools.update_wrapper(cast(Any, self), method)

    @property
    def _is_async(self) -> bool:
        return inspect.iscoroutinefunction(self._method)

    def __get__(self, instance: Any, owner: type | None = None) -> EndpointProperty[P, R]:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(self._not_through_the_object())

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(self._not_through_the_object() if name in _ADVERBS else f"an endpoint has no attribute {name!r}")

    def _not_through_the_object(self) -> str:
        return explain(
            f"{self._method.__qualname__} is an endpoint: it is called through the mesh that spawn() returned",
            next=f"write mesh.{self._method.__name__}.call(...); inside the actor factor a plain method out, which both may call",
        )

    def __repr__(self) -> str:
        return f"<endpoint {self._method.__qualname__}>"


def _check_propagate(propagate: Propagator) -> None:
    if propagate == "mocked":
        raise NotImplementedError('propagate="mocked" is not implemented; use "inspect" or a callable')


if TYPE_CHECKING:

    @overload
    def endpoint(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /) -> Endpoint[P, R]: ...
    @overload
    def endpoint(method: Callable[Concatenate[Any, P], R], /) -> Endpoint[P, R]: ...
    @overload
    def endpoint(
        *, propagate: Propagator = None, explicit_response_port: Literal[False] = False, instrument: bool = True
    ) -> _Decorator: ...
    @overload
    def endpoint(*, propagate: Propagator = None, explicit_response_port: Literal[True], instrument: bool = True) -> _ExplicitDecorator: ...
    def endpoint(method: Any = None, **options: Any) -> Any: ...

    class _Decorator:
        @overload
        def __call__(self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /) -> Endpoint[P, R]: ...
        @overload
        def __call__(self, method: Callable[Concatenate[Any, P], R], /) -> Endpoint[P, R]: ...
        def __call__(self, method: Any, /) -> Any: ...

    class _ExplicitDecorator:
        @overload
        def __call__(self, method: Callable[Concatenate[Any, Port[R], P], Coroutine[Any, Any, None]], /) -> Endpoint[P, R]: ...
        @overload
        def __call__(self, method: Callable[Concatenate[Any, Port[R], P], None], /) -> Endpoint[P, R]: ...
        def __call__(self, method: Any, /) -> Any: ...

    concurrent_endpoint = endpoint

else:

    def endpoint(method=None, *, propagate=None, explicit_response_port=False, instrument=True):
        """Make a method callable by messages, bare or with options.

        Args:
            propagate: for the tensor engine only.
            explicit_response_port: the method takes a `Port` after `self` and answers through it; its return value is
                ignored, and an exception in it fails the actor.
            instrument: trace each call as a span.
        """
        _check_propagate(propagate)

        def wrap(function):
            return EndpointProperty(function, propagator=propagate, explicit_response_port=explicit_response_port, instrument=instrument)

        return wrap if method is None else wrap(method)

    def concurrent_endpoint(method=None, *, propagate=None, explicit_response_port=False, instrument=True):
        """Like `endpoint`, for async methods whose calls may overlap: each runs as a task of its own.

        Raises:
            ValueError: the method is not async, or is an `@endpoint` already.
        """
        _check_propagate(propagate)

        def wrap(function):
            if isinstance(function, EndpointProperty):
                raise ValueError("@concurrent_endpoint does not wrap @endpoint; use one of them")
            if not inspect.iscoroutinefunction(function):
                raise ValueError(f"concurrent_endpoint can only wrap async endpoints; make {function.__qualname__} an async def")
            return EndpointProperty(
                function,
                propagator=propagate,
                explicit_response_port=explicit_response_port,
                instrument=instrument,
                concurrent=True,
            )

        return wrap if method is None else wrap(method)


# --- plain methods -------------------------------------------------------------------------------------------------


class NotAnEndpoint:
    """What a mesh gives for an attribute of the class that is no endpoint; `as_endpoint` makes it one."""

    def __init__(self, mesh: ActorMesh[Any], name: str) -> None:
        self._mesh = mesh
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise self._error()

    def __getattr__(self, name: str) -> Any:
        if name in _ADVERBS:
            raise self._error()
        raise AttributeError(name)

    def _error(self) -> RuntimeError:
        return RuntimeError(
            explain(
                f"Actor {self._mesh._core.cls}.{self._name} is not annotated as an endpoint",
                next=f"decorate it with @endpoint, or write as_endpoint(obj.{self._name}).call(...)",
            )
        )


def as_endpoint(
    not_an_endpoint: Callable[P, Awaitable[R]] | Callable[P, R], *, propagate: Propagator = None, explicit_response_port: bool = False
) -> Endpoint[P, R]:
    """The adverbs for a plain method of a spawned actor.

    Raises:
        ValueError: not a plain method read through a mesh.
    """
    _check_propagate(propagate)
    placeholder: Any = not_an_endpoint
    if not isinstance(placeholder, NotAnEndpoint):
        raise ValueError(
            explain(f"expected an method of a spawned actor, got {not_an_endpoint!r}", next=f"endpoints already have {', '.join(_ADVERBS)}")
        )
    method = getattr(placeholder._mesh._core.cls, placeholder._name)
    if not callable(method):
        raise ValueError(f"expected an method of a spawned actor, but {placeholder._name} is {method!r}")
    mesh = placeholder._mesh
    return cast(Endpoint[P, R], mesh._endpoint_class(mesh, placeholder._name, method, explicit=explicit_response_port))


def send(
    endpoint: Endpoint[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    port: Port[Any] | None = None,
    selection: Literal["all", "choose"] = "all",
) -> None:
    """Send to the actors of an endpoint's view; replies go to `port`, each tagged with its rank.

    Args:
        port: None makes it a broadcast.
        selection: "all", or "choose" for one actor at random.

    Raises:
        ValueError: another selection.
    """
    view = endpoint._mesh._view
    if selection == "all":
        ranks: Sequence[int] = view.ranks
    elif selection == "choose":
        ranks = (_any_of(len(view.refs)),)
    else:
        raise ValueError(f"Invalid selection: {selection!r}; expected 'all' or 'choose'")
    endpoint._send(this_process(), args, kwargs, 0 if port is None else port._port, ranks, to=port)
