"""Actors on meshes of processes: the public API.

See `docs/` for a tutorial; `Actor`, `endpoint` and `this_host` are where to begin.
"""

from monarch._base.ids import ProcId, Uid
from monarch._base.meters import get_meter
from monarch._base.spans import span, traced
from monarch._mesh.shape import Extent, Point
from monarch._mesh.value_mesh import ValueMesh
from monarch._runtime.background import returns_future
from monarch._runtime.faults import ActorError, MeshFailure, SupervisionError
from monarch._runtime.future import Future
from monarch._runtime.policies import AllForOne, Escalate, Ignore, OneForOne, RestForOne
from monarch._wire.observation_messages import ActorActivity
from monarch.actor import settings as config
from monarch.actor.actor_mesh import ActorMesh
from monarch.actor.base import Actor
from monarch.actor.client import shutdown_context, unhandled_fault_hook
from monarch.actor.context import Context, Instance, context, current_actor_name, current_rank, current_size
from monarch.actor.controllers import get_or_spawn_controller
from monarch.actor.deadline import with_timeout
from monarch.actor.debugger import debug_controller
from monarch.actor.endpoint import Endpoint, as_endpoint, concurrent_endpoint, endpoint, send
from monarch.actor.gateway import attach
from monarch.actor.host_mesh import BootstrapCommand, HostMesh, default_bootstrap_cmd, proc_mesh, this_host, this_proc
from monarch.actor.ports import Accumulator, Channel, Port, PortReceiver
from monarch.actor.proc_mesh import ProcMesh
from monarch.actor.supervised import SupervisionGroup
from monarch.actor.transport import enable_transport
from monarch.actor.workers import attach_to_workers, run_worker_loop_forever, start_worker_loop_forever
from monarch.config import ChannelTransport

__all__ = [
    "Accumulator",
    "Actor",
    "ActorActivity",
    "ActorError",
    "ActorMesh",
    "AllForOne",
    "BootstrapCommand",
    "Channel",
    "ChannelTransport",
    "Context",
    "Endpoint",
    "Escalate",
    "Extent",
    "Future",
    "HostMesh",
    "Ignore",
    "Instance",
    "MeshFailure",
    "OneForOne",
    "Point",
    "Port",
    "PortReceiver",
    "ProcId",
    "ProcMesh",
    "RestForOne",
    "SupervisionError",
    "SupervisionGroup",
    "Uid",
    "ValueMesh",
    "as_endpoint",
    "attach",
    "attach_to_workers",
    "concurrent_endpoint",
    "config",
    "context",
    "current_actor_name",
    "current_rank",
    "current_size",
    "debug_controller",
    "default_bootstrap_cmd",
    "enable_transport",
    "endpoint",
    "get_meter",
    "get_or_spawn_controller",
    "proc_mesh",
    "returns_future",
    "run_worker_loop_forever",
    "send",
    "shutdown_context",
    "span",
    "start_worker_loop_forever",
    "this_host",
    "this_proc",
    "traced",
    "unhandled_fault_hook",
    "with_timeout",
]
