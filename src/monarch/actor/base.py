"""`Actor`: what users subclass.

Read next: `endpoint.py` for methods, `behavior.py` for how an actor is run.
"""

from __future__ import annotations

import logging
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn, Self

from monarch._base.errors import explain
from monarch._mesh.mesh import MeshTrait
from monarch._mesh.shape import NDSlice, Shape
from monarch._runtime.future import Future

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

    from monarch._runtime.faults import MeshFailure


class Actor(MeshTrait):
    """Base class of actors: an object that lives in a proc of its own mesh and handles one message at a time.

    `__init__` runs in that proc, on the actor's own thread, before any message. Methods decorated with `@endpoint` can
    be called through the mesh that `spawn` returns.

    Optional methods:
        `__supervise__(self, failure) -> bool`: something that this actor spawned has failed; a true answer ends the
            matter, otherwise this actor fails too.
        `__restore__(self, rank, attempt)`: a supervision policy has created this actor anew, for the `attempt`-th time (1 or
            more), after one that failed; runs between `__init__` and the first message.
        `__cleanup__(self, exc)`: the actor ends; `exc` is None after a stop.
        `_handle_undeliverable_message(self, message) -> bool`: a message of this actor found nobody.
    """

    _is_system_actor = False
    _lives_in_client = False
    """As a controller it shares the root client's process instead of having its own."""

    @cached_property
    def logger(self) -> logging.Logger:
        """A logger with the name of the class, at level DEBUG."""
        logger = logging.getLogger(type(self).__name__)
        logger.setLevel(logging.DEBUG)
        return logger

    def _handle_undeliverable_message(self, message: Any) -> Any:
        """Decide on a message that found nobody; false (the default) fails this actor."""
        return False

    # The class stands in for its mesh where types are checked (`spawn` is typed to return it), so it has a mesh's
    # members. The actor object itself is no mesh.

    @property
    def _ndslice(self) -> NDSlice:
        self._no_mesh()

    @property
    def _labels(self) -> tuple[str, ...]:
        self._no_mesh()

    def _new_with_shape(self, shape: Shape) -> Self:
        self._no_mesh()

    @property
    def initialized(self) -> Future[None]:
        """Of a mesh: whether its actors were created."""
        self._no_mesh()

    def stop(self, reason: str = "stopped by client") -> Future[Any]:
        """Of a mesh: stop its actors."""
        self._no_mesh()

    def _no_mesh(self) -> NoReturn:
        raise NotImplementedError(
            explain("actor implementations are not meshes, but their references are", next="use the mesh that spawn() returned")
        )

    if TYPE_CHECKING:

        def __supervise__(self, failure: MeshFailure) -> Any: ...
        def __await__(self) -> Generator[Any, None, Self]: ...


def hook_of(cls: type, name: str) -> Callable[..., Any | Awaitable[Any]] | None:
    """The user's `__supervise__` or `__cleanup__`; None when the class has none."""
    return getattr(cls, name, None)
