"""Private module paths of the package whose public API this one keeps, for scripts that import from them.

One table, served by an import hook: nothing of it exists before somebody imports such a path, and nothing here shapes
the rest of the tree. Rules of this file: a path gives only names that something here has, under whatever name; a missing
name is an ImportError that says so. What is patched at a path is patched in the home of the name.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any, cast

_ACTOR = "monarch.actor"
_SHAPE = "monarch._mesh.shape"

TABLE: dict[str, dict[str, str]] = {
    "monarch._src.actor.actor_mesh": {
        _ACTOR: "Accumulator Actor ActorError ActorMesh Channel Context Instance Point Port PortReceiver ValueMesh as_endpoint context "
        "current_actor_name current_rank current_size send shutdown_context attach enable_transport",
        "monarch.actor.debugger": "DebugContext",
        "monarch.actor.settings": "IN_PAR",
        "monarch.actor.ports": "RankedPortReceiver",
    },
    "monarch._src.actor.host_mesh": {_ACTOR: "HostMesh default_bootstrap_cmd this_host this_proc"},
    "monarch._src.actor.proc_mesh": {
        _ACTOR: "ProcMesh get_or_spawn_controller",
        "monarch.actor.proc_mesh": "get_active_proc_meshes register_proc_mesh_spawn_callback unregister_proc_mesh_spawn_callback",
        "monarch.actor.setup": "SetupActor",
        "monarch.actor.controllers": "_get_controller_controller",
    },
    "monarch._src.actor.endpoint": {
        _ACTOR: "Endpoint endpoint",
        "monarch.actor.endpoint": "EndpointProperty NotAnEndpoint Propagator",
        "monarch._mesh.selection": "Selection",
        _SHAPE: "Extent",
    },
    "monarch._src.actor.future": {_ACTOR: "Future"},
    "monarch._src.actor.bootstrap": {_ACTOR: "attach_to_workers run_worker_loop_forever"},
    "monarch._src.actor.bootstrap_main": {"monarch.actor.bootstrap": "invoke_main"},
    "monarch._src.actor.mock": {
        "monarch.actor.mock": "_actor_registry get_actor_class get_actor_mock_registry_state patch_actor set_actor_mock_registry_state"
    },
    "monarch._src.actor.shape": {
        _SHAPE: "Extent NDSlice Shape Slice iter_ranks",
        "monarch._mesh.mesh": "MeshTrait ShapeExt",
    },
    "monarch._src.actor.debugger.breakpoint": {"monarch.actor.debugger": "remote_breakpointhook"},
    "monarch._src.actor.debugger.debug_command": {
        "monarch.actor.debug_command": "Attach Cast Continue DebugCommand Help ListCommand Quit RanksType"
    },
    "monarch._src.actor.debugger.debug_controller": {"monarch.actor.debug_service": "DebugController debug_controller"},
    "monarch._src.actor.debugger.debug_io": {"monarch.actor.debug_io": "DebugCliIO DebugIO DebugIOError DebugStdIO"},
    "monarch._src.actor.debugger.debug_session": {"monarch.actor.debug_session": "DebugSession DebugSessionInfo DebugSessions"},
    "monarch._src.actor.debugger.pdb_wrapper": {
        "monarch.actor.debug_session": "DebuggerWrite",
        "monarch.actor.remote_pdb": "PdbWrapper",
    },
    "monarch._src.actor.source_loader": {"monarch.actor.source_loader": "RemoteImportLoader SourceLoaderController"},
    "monarch._src.gather_mount.gather_mount": {
        "monarch.gather_mount.gather_mount": "GatherMount gather_mount _NOTIFY_BATCH_S _point_to_key",
        "monarch._mounts.gather_source": "GatherSourceActor",
    },
    "monarch._src.job.mount_config": {"monarch._mounts.mount_config": "GatherMountEntry Mounts MountsHandle RemoteMountEntry"},
    "monarch.tools.debug_env": {
        "monarch.actor.debug_server": "_MONARCH_DEBUG_SERVER_HOST_ENV_VAR _MONARCH_DEBUG_SERVER_PORT_ENV_VAR "
        "_MONARCH_DEBUG_SERVER_PROTOCOL_ENV_VAR"
    },
    "monarch._src.actor.supervision": {_ACTOR: "unhandled_fault_hook"},
    "monarch._src.actor.config": {"monarch.actor.settings": "prefix_python_logs_with_actor"},
    "monarch._src.actor.telemetry": {
        _ACTOR: "get_meter span traced",
        "monarch._base.meters": "METER Counter Histogram Meter MeterProvider UpDownCounter",
    },
    "monarch._src.rdma.rdma": {
        "monarch.rdma": "RDMAAction RDMABuffer RDMAReadTransferWarning RDMATcpFallbackWarning RDMAWriteTransferWarning "
        "is_ibverbs_available is_rdma_available",
        "monarch.rdma.action": "_RdmaAction=RDMAAction",
        "monarch.rdma.buffer": "get_rdma_backend _RdmaBuffer=RDMABuffer pt_cuda_allocator_compatibility=has_expandable_segments "
        "_check_cuda_expandable_segments_enabled=_check_cuda_allocator",
        "monarch.rdma.memory": "_assert_1d_contiguous=check_contiguous _evict_local_memory=evict _get_tensor_addr_and_size=place_of_tensor "
        "_local_memory_cache=local_memory_cache _local_memory_cache_lock=_cache_lock _local_memory_cache_refs=_cache_refs "
        "_make_local_memory_handle=memory_of _make_local_memory_handle_from_memoryview=_pin_view "
        "_make_local_memory_handle_from_tensor=_pin_tensor",
        "monarch._base.buffers": "_get_memoryview_addr_and_size=address_of",
        "monarch.rdma.readiness": "context _RdmaManager=Readiness _ensure_init_rdma_manager=ensure_ready "
        "_ensure_init_rdma_manager_on_mesh=ensure_ready_on _rdma_manager_init_cache=_ready _rdma_manager_init_cache_lock=_ready_lock",
    },
    "monarch._rust_bindings.rdma": {
        "monarch.rdma": "RdmaInitError is_ibverbs_available",
        "monarch.rdma.action": "_RdmaAction=RDMAAction",
        "monarch.rdma.buffer": "_RdmaBuffer=RDMABuffer",
        "monarch.rdma.backend": "rdma_supported",
        "monarch.rdma.memory": "_LocalMemoryHandle=LocalMemory _RdmaMemoryRegionView=Place _WeakLocalMemoryHandle=WeakMemory "
        "_assert_1d_contiguous=check_contiguous _get_tensor_addr_and_size=place_of_tensor "
        "_make_local_memory_handle_from_memoryview=_pin_view _make_local_memory_handle_from_tensor=_pin_tensor",
        "monarch._base.buffers": "_get_memoryview_addr_and_size=address_of",
        "monarch.rdma.readiness": "_RdmaManager=Readiness",
    },
    "monarch._rust_bindings.monarch_hyperactor.handle": {_ACTOR: "Handle=Future"},
    "monarch._rust_bindings.monarch_extension.chunked_fuse": {"monarch._mounts.chunked": "FuseMountHandle mount_chunked_fuse"},
    "monarch._rust_bindings.monarch_extension.chain_broadcast": {
        "monarch._mounts.chain": "ChainCtx ChainServer ChainSession connect ctx_close ctx_wait_into forward new_ctx send_block "
        "send_block_to_port serve serve_port"
    },
    "monarch._rust_bindings.monarch_extension.readonly_fuse": {"monarch._mounts.actor_files": "mount_read_only_filesystem"},
    "monarch._rust_bindings.monarch_hyperactor.shape": {_SHAPE: "Extent Point Region Shape Slice"},
    "monarch._rust_bindings.monarch_hyperactor.channel": {"monarch.config": "BindSpec ChannelTransport"},
    "monarch._rust_bindings.monarch_hyperactor.config": {
        "monarch.config": "Encoding clear_runtime_config configure get_global_config get_runtime_config reload_config_from_env "
        "reset_config_to_defaults"
    },
    "monarch._rust_bindings.monarch_hyperactor.host_mesh": {_ACTOR: "BootstrapCommand"},
    "monarch._rust_bindings.monarch_hyperactor.supervision": {_ACTOR: "MeshFailure SupervisionError"},
    "monarch._rust_bindings.monarch_hyperactor.value_mesh": {_ACTOR: "ValueMesh"},
    "monarch._rust_bindings.monarch_hyperactor.selection": {"monarch._mesh.selection": "Selection"},
    "monarch._rust_bindings.monarch_hyperactor.proc": {_ACTOR: "ProcId Uid", "monarch._base.ids": "ActorAddr"},
    "monarch._rust_bindings.monarch_hyperactor.mailbox": {"monarch.actor.behavior": "UndeliverableMessageEnvelope"},
}
"""Module path -> home of the names -> names; `here=there` where they differ."""

_ROOTS = ("monarch._src", "monarch._rust_bindings", "monarch.tools")
_PACKAGES = {path.rsplit(".", depth)[0] for path in TABLE for depth in (1, 2)} & {
    *_ROOTS,
    "monarch._src.actor",
    "monarch._src.actor.debugger",
    "monarch._src.rdma",
    "monarch._src.gather_mount",
    "monarch._src.job",
    "monarch._rust_bindings.monarch_hyperactor",
    "monarch._rust_bindings.monarch_extension",
}


# Neither class derives from importlib.abc: importing that costs 8 ms, and the import system does not ask for it.
class _Finder:
    """Finds the paths of the table."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not fullname.startswith(_ROOTS):
            return None
        if fullname in TABLE or fullname in _PACKAGES:
            return ModuleSpec(fullname, cast(Any, _Loader(fullname)), is_package=fullname in _PACKAGES)
        return None


class _Path(ModuleType):
    """A module whose attributes are those of their homes."""

    _homes: dict[str, tuple[str, str]]
    """Name here -> module and name there."""
    _originals: dict[str, Any]
    """Of the names that were patched, which is undone by deleting them."""

    def __init__(self, fullname: str) -> None:
        super().__init__(fullname)
        homes = {}
        for home, names in TABLE.get(fullname, {}).items():
            for name in names.split():
                here, _, there = name.partition("=")
                homes[here] = home, there or here
        self.__dict__.update(_homes=homes, _originals={}, __all__=sorted(homes))

    def __getattr__(self, name: str) -> Any:
        home = self._homes.get(name)
        if home is None:
            raise AttributeError(f"{self.__name__} has no {name!r} here; known are {', '.join(sorted(self._homes)) or '(none)'}")
        return getattr(import_module(home[0]), home[1])

    def __setattr__(self, name: str, value: Any) -> None:
        home = self._homes.get(name)
        if home is None:
            super().__setattr__(name, value)
        else:
            self._originals.setdefault(name, getattr(self, name))
            setattr(import_module(home[0]), home[1], value)

    def __delattr__(self, name: str) -> None:
        if name in self._originals:
            setattr(self, name, self._originals.pop(name))
            del self._originals[name]
        else:
            super().__delattr__(name)


class _Loader:
    """Makes the module of a path."""

    def __init__(self, fullname: str) -> None:
        self._fullname = fullname

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """A module that knows the homes of its names."""
        return _Path(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """It is complete already."""

    def get_code(self, fullname: str) -> CodeType:
        """What `python -m` runs: only the bootstrap is a program."""
        program = "from monarch.actor.bootstrap import invoke_main\ninvoke_main()\n" if fullname.endswith(".bootstrap_main") else ""
        return compile(program, fullname, "exec")


def install() -> None:
    """Serve the table from now on; harmless twice."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(cast(Any, _Finder()))
