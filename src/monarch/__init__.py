"""monarch: one Python script drives a whole cluster as if it were one machine.

    from monarch import Actor, endpoint, proc_mesh

The names here are loaded when they are first used, so `import monarch` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from monarch._compat import install as _install_compat

__version__ = "0.1.0"

_HOMES = {
    "monarch.actor": (
        "Accumulator Actor ActorError ActorMesh Channel Extent Future HostMesh MeshFailure Point Port PortReceiver ProcMesh "
        "SupervisionError ValueMesh as_endpoint concurrent_endpoint context current_rank current_size endpoint "
        "get_or_spawn_controller proc_mesh send shutdown_context this_host this_proc"
    ),
    "monarch._mesh.shape": "NDSlice Shape Slice",
    "monarch.config": "clear_runtime_config configure configured get_global_config get_runtime_config",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

if TYPE_CHECKING:
    from monarch._mesh.shape import NDSlice as NDSlice
    from monarch._mesh.shape import Shape as Shape
    from monarch._mesh.shape import Slice as Slice
    from monarch.actor import Accumulator as Accumulator
    from monarch.actor import Actor as Actor
    from monarch.actor import ActorError as ActorError
    from monarch.actor import ActorMesh as ActorMesh
    from monarch.actor import Channel as Channel
    from monarch.actor import Extent as Extent
    from monarch.actor import Future as Future
    from monarch.actor import HostMesh as HostMesh
    from monarch.actor import MeshFailure as MeshFailure
    from monarch.actor import Point as Point
    from monarch.actor import Port as Port
    from monarch.actor import PortReceiver as PortReceiver
    from monarch.actor import ProcMesh as ProcMesh
    from monarch.actor import SupervisionError as SupervisionError
    from monarch.actor import ValueMesh as ValueMesh
    from monarch.actor import as_endpoint as as_endpoint
    from monarch.actor import concurrent_endpoint as concurrent_endpoint
    from monarch.actor import current_rank as current_rank
    from monarch.actor import current_size as current_size
    from monarch.actor import get_or_spawn_controller as get_or_spawn_controller
    from monarch.actor import send as send
    from monarch.actor import shutdown_context as shutdown_context
    from monarch.actor import this_host as this_host
    from monarch.actor import this_proc as this_proc
    from monarch.actor.context import context as context
    from monarch.actor.endpoint import endpoint as endpoint
    from monarch.actor.host_mesh import proc_mesh as proc_mesh
    from monarch.config import clear_runtime_config as clear_runtime_config
    from monarch.config import configure as configure
    from monarch.config import configured as configured
    from monarch.config import get_global_config as get_global_config
    from monarch.config import get_runtime_config as get_runtime_config


_install_compat()


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'monarch' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
