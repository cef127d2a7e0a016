"""Configuration: every knob once, and the layers that give it a value.

Rules of this file:
    1. A knob is a row of `KNOBS`; nothing else in monarch reads an environment variable that a row names.
    2. What the program says beats what the environment says, here and in the procs it starts. Highest first: `configured()`,
       `configure()`, the client's program (`adopt`), environment, the client's environment (`adopt`), default.
    3. A value is checked and normalised when it is set. Reading is one look-up in a dict that is replaced, never changed.
    4. A call that fails changes nothing.

Thread: any thread. The values are process-wide, `configured()` included.
Fork: a child keeps the values; it calls `reload_config_from_env()` when its environment was changed after the fork.

Read next: `_base/knobs.py` for the kinds of values and the columns of the table.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from monarch._base.errors import did_you_mean, explain, nearest, without_next
from monarch._base.knobs import (
    BOOLEAN,
    DURATION,
    ENCODING,
    FLOAT,
    HYPERACTOR,
    INTEGER,
    MESH,
    MONARCH,
    NONZERO,
    PORTS,
    TEXT,
    TRANSPORT,
    BindSpec,
    ChannelTransport,
    Encoding,
    Knob,
    knob,
    nanos,
    refuse,
)

__all__ = [
    "BindSpec",
    "ChannelTransport",
    "Encoding",
    "clear_runtime_config",
    "configure",
    "configured",
    "get_global_config",
    "get_runtime_config",
    "parametrize_config",
    "parametrize_config_pointwise",
    "reload_config_from_env",
    "reset_config_to_defaults",
]


# fmt: off
_ROWS = (
    # Messages and links.
    knob(HYPERACTOR, "codec_max_frame_length", INTEGER, 10 * 2**30, "largest frame; a bigger one is a delivery failure", unit="bytes"),
    knob(HYPERACTOR, "message_delivery_timeout", DURATION, "30s", "undelivered for so long: returned to the sender"),
    knob(HYPERACTOR, "message_ack_time_interval", DURATION, "500ms", "longest wait before a link acknowledges"),
    knob(HYPERACTOR, "message_ack_every_n_messages", INTEGER, 1000, "most messages before a link acknowledges"),
    knob(HYPERACTOR, "message_ttl_default", INTEGER, 64, "hops before a message is dropped as looping"),
    knob(HYPERACTOR, "split_max_buffer_size", INTEGER, 5, "values a reduction collects before it sends"),
    knob(HYPERACTOR, "split_max_buffer_age", DURATION, "50ms", "time a reduction collects before it sends"),
    knob(HYPERACTOR, "terminated_snapshot_retention", INTEGER, 100, "dead actors remembered for introspection"),
    knob(HYPERACTOR, "process_exit_timeout", DURATION, "10s", "wait for a process to exit"),
    knob(HYPERACTOR, "stop_actor_timeout", DURATION, "10s", "wait for one actor to stop"),
    knob(HYPERACTOR, "cleanup_timeout", DURATION, "3s", "budget of an actor's __cleanup__"),
    knob(HYPERACTOR, "channel_net_rx_buffer_full_check_interval", DURATION, "5s", "how often a full receive buffer is looked at"),
    knob(HYPERACTOR, "channel_tcp_keepalive_idle", DURATION, "60s", "silence before TCP probes the peer"),
    knob(HYPERACTOR, "channel_tcp_congestion", TEXT, "", "TCP congestion control of the links; empty: the system's"),
    knob(HYPERACTOR, "channel_reconnect_timeout", DURATION, "60s", "longest try to restore a cut link"),
    knob(HYPERACTOR, "message_latency_sampling_rate", FLOAT, 0.01, "fraction of messages whose latency is measured"),
    knob(HYPERACTOR, "enable_dest_actor_reordering_buffer", BOOLEAN, True, "per-sender order is restored at the destination"),
    knob(HYPERACTOR, "sequencer_max_locked_keys", NONZERO, 128, "senders a sequencer handles at a time"),
    knob(HYPERACTOR, "host_spawn_ready_timeout", DURATION, "30s", "wait for a host agent to be ready; 0s: no limit"),
    knob(HYPERACTOR, "server_heartbeat_interval", DURATION, "1s", "how often a listening end beats"),
    knob(HYPERACTOR, "forwarder_flush_timeout", DURATION, "5s", "wait for queued messages at shutdown"),
    knob(HYPERACTOR, "pending_actor_delivery_timeout", DURATION, "30s", "wait of a message for an actor that is being spawned"),
    knob(HYPERACTOR, "hyperactor_tls_cert", TEXT, None, "path of the PEM certificate", optional=True, local=True),
    knob(HYPERACTOR, "hyperactor_tls_key", TEXT, None, "path of the PEM private key", optional=True, local=True),
    knob(HYPERACTOR, "hyperactor_tls_ca", TEXT, None, "path of the PEM authority", optional=True, local=True),
    knob(HYPERACTOR, "default_encoding", ENCODING, Encoding.Multipart, "wire encoding; without effect"),
    # Output of child processes.
    knob(HYPERACTOR, "read_log_buffer", INTEGER, 100, "without effect: tail_log_lines says how many lines are kept"),
    knob(HYPERACTOR, "force_file_log", BOOLEAN, False, "write children's output to files in every environment"),
    knob(HYPERACTOR, "prefix_with_rank", BOOLEAN, True, "forwarded lines start with the rank"),
    knob(MESH, "enable_log_forwarding", BOOLEAN, False, "forward children's output to the client; set it before spawn"),
    knob(MESH, "enable_file_capture", BOOLEAN, False, "also write children's output to files"),
    knob(MESH, "tail_log_lines", INTEGER, 0, "last lines of a dead child's output in the error; 0: 20"),
    # Procs, hosts and meshes.
    knob(HYPERACTOR, "process_memory_metric_interval", DURATION, "300s", "how often a process's memory is recorded"),
    knob(HYPERACTOR, "stop_grace_period", DURATION, "10s", "from asking to killing", env="HYPERACTOR_REMOTE_STOP_GRACE_PERIOD"),
    knob(MESH, "default_transport", TRANSPORT, "unix", "link between procs, or the address to bind"),
    knob(MESH, "supervision_watchdog_timeout", DURATION, "2m", "silence of an owner before it counts as dead"),
    knob(MESH, "mesh_orphan_timeout", DURATION, "60s", "silence of the client before its procs exit", optional=True),
    knob(MESH, "mesh_bootstrap_enable_pdeathsig", BOOLEAN, True, "children die with their parent (Linux)"),
    knob(MESH, "mesh_terminate_concurrency", INTEGER, 16, "procs ended at a time"),
    knob(MESH, "mesh_terminate_timeout", DURATION, "10s", "wait for a proc to end before it is killed"),
    knob(MESH, "max_cast_dimension_size", NONZERO, 16, "longest dimension of a cast that is not cut"),
    knob(MESH, "max_cast_fanout", NONZERO, 16, "next hops of one cast"),
    knob(MESH, "proc_launcher_kind", TEXT, "", "how hosts launch procs: '', 'native', 'systemd'"),
    knob(MESH, "use_direct_spawn", BOOLEAN, False, "actors are spawned without the agent; without effect"),
    knob(MESH, "mesh_attach_config_timeout", DURATION, "60s", "wait for a worker's answer to an attach"),
    knob(MESH, "mesh_proc_spawn_max_idle", DURATION, "30s", "longest time without progress while procs spawn"),
    knob(MESH, "proc_stop_max_idle", DURATION, "30s", "longest time without progress while procs stop"),
    knob(MESH, "get_proc_state_max_idle", DURATION, "1m", "longest time without progress while proc states are read"),
    knob(MESH, "actor_spawn_max_idle", DURATION, "30s", "longest time without progress while actors spawn"),
    knob(MESH, "get_actor_state_max_idle", DURATION, "30s", "longest time without progress while actor states are read"),
    knob(HYPERACTOR, "remote_alloc_bind_to_inaddr_any", BOOLEAN, False, "accepted for old scripts; without effect"),
    knob(HYPERACTOR, "remote_alloc_bootstrap_addr", TEXT, None, "accepted for old scripts; without effect", optional=True),
    knob(HYPERACTOR, "remote_alloc_allowed_port_range", PORTS, None, "accepted for old scripts; without effect", optional=True),
    # Admin service and stacks.
    knob(MESH, "mesh_admin_addr", TEXT, "[::]:1729", "address of the admin service"),
    knob(MESH, "mesh_admin_resolve_actor_timeout", DURATION, "200ms", "wait for an actor's answer"),
    knob(MESH, "mesh_admin_max_concurrent_resolves", INTEGER, 2, "references resolved at a time"),
    knob(MESH, "mesh_admin_single_host_timeout", DURATION, "3s", "wait for one host"),
    knob(MESH, "mesh_admin_query_child_timeout", DURATION, "100ms", "wait for a child's answer"),
    knob(MESH, "mesh_admin_config_dump_bridge_timeout", DURATION, "5s", "wait for a configuration dump"),
    knob(MESH, "mesh_admin_pyspy_timeout", DURATION, "10s", "budget of one py-spy dump"),
    knob(MESH, "mesh_admin_tree_timeout", DURATION, "10s", "budget per node of the tree"),
    knob(MESH, "mesh_admin_pyspy_bridge_timeout", DURATION, "13s", "wait for the process that dumps"),
    knob(MESH, "mesh_admin_pyspy_client_timeout", DURATION, "20s", "wait of the client for a dump"),
    knob(MESH, "mesh_admin_pyspy_max_profile_duration", DURATION, "5m", "longest profile"),
    knob(MONARCH, "pyspy_bin", TEXT, "", "py-spy binary; empty: the one on PATH", env="PYSPY_BIN"),
    # Telemetry.
    knob(MONARCH, "enable_otel_tracing", BOOLEAN, True, "send traces to OpenTelemetry", env="ENABLE_OTEL_TRACING"),
    knob(MONARCH, "enable_otel_metrics", BOOLEAN, True, "send metrics to OpenTelemetry", env="ENABLE_OTEL_METRICS"),
    knob(MONARCH, "enable_recorder_tracing", BOOLEAN, True, "keep a ring of recent events", env="ENABLE_RECORDER_TRACING"),
    knob(MONARCH, "enable_sqlite_tracing", BOOLEAN, False, "write events to a SQLite file", env="ENABLE_SQLITE_TRACING"),
    knob(MONARCH, "file_log_level", TEXT, "", "level of the runtime's own log file", env="MONARCH_FILE_LOG"),
    knob(MONARCH, "otel_metric_export_interval", DURATION, "1s", "metrics period", unit="ms", env="OTEL_METRIC_EXPORT_INTERVAL"),
    knob(MONARCH, "scuba_log_enter_exit", BOOLEAN, False, "without effect", env="SCUBA_LOG_ENTER_EXIT"),
    knob(MONARCH, "monarch_log_suffix", TEXT, "", "ending of the log file's name", env="MONARCH_LOG_SUFFIX"),
    knob(MONARCH, "perfetto_trace_mode", TEXT, None, "off, user or dev", env="PERFETTO_TRACE_MODE", optional=True),
    # Parts of the peer's runtime.
    knob(MONARCH, "small_write_threshold", INTEGER, 256, "without effect", env="MONARCH_HYPERACTOR_SMALL_WRITE_THRESHOLD"),
    knob(MONARCH, "tokio_worker_threads", INTEGER, None, "without effect", optional=True),
    knob(HYPERACTOR, "enable_unawaited_python_task_traceback", BOOLEAN, False, "name the line that made a lost future"),
    # One-sided memory.
    knob(MONARCH, "rdma_max_chunk_size_mb", INTEGER, 64, "chunk of a TCP transfer", unit="MiB"),
    knob(MONARCH, "rdma_allow_tcp_fallback", BOOLEAN, True, "transfers may go by TCP"),
    knob(MONARCH, "rdma_disable_ibverbs", BOOLEAN, False, "network cards are not used"),
    knob(MONARCH, "rdma_tcp_fallback_parallelism", INTEGER, 1, "TCP connections per transfer"),
    knob(MONARCH, "rdma_cq_busy_poll_window", DURATION, None, "spin before backing off", optional=True),
    knob(MONARCH, "rdma_qp_init_timeout", DURATION, "30s", "wait for a queue pair"),
    knob(MONARCH, "rdma_ibverbs_target", TEXT, "", "cpu:<numa>, gpu:<ordinal> or nic:<name>; empty: chosen by distance"),
    knob(MONARCH, "rdma_peer_device_affinity", TEXT, "", "any, match_name or groups:a,b|c,d; empty: any"),
    knob(MONARCH, "rdma_qps_per_cq", INTEGER, 64, "queue pairs per completion queue"),
    knob(MONARCH, "rdma_runtime_worker_threads", INTEGER, 4, "threads of the transfer engine"),
    knob(MONARCH, "rdma_qps_per_peer", INTEGER, 4, "queue pairs per peer"),
    knob(MONARCH, "rdma_min_stripe_size_kb", INTEGER, 512, "smallest stripe over several cards", unit="KiB"),
    knob(MONARCH, "rdma_max_nics_per_buffer", INTEGER, None, "most cards for one buffer", optional=True),
    knob(MONARCH, "rdma_cq_poller_per_device", BOOLEAN, True, "one completion poller per card"),
    knob(MONARCH, "rdma_host_odp", BOOLEAN, False, "on-demand paging of host memory"),
    # Our own: the peer does not know these.
    knob(MONARCH, "shm_threshold_bytes", INTEGER, 524288, "own: buffers of a message that add up to this use shared memory on a host"),
    knob(MONARCH, "mailbox_window_bytes", INTEGER, 2**25, "own: unhandled bytes of one sender at one actor before it is slowed"),
    knob(MONARCH, "rdma_transports", TEXT, "cma,ipc,nixl,tcp", "own: what may move memory; nixl is forced by any value but this one"),
    knob(MONARCH, "rdma_nixl_start_limit", DURATION, "10s", "own: how long NIXL may take to start, before tcp is used for good"),
    knob(MONARCH, "rdma_tcp_connections", NONZERO, 4, "own: TCP connections to one host, unless rdma_tcp_fallback_parallelism is larger"),
    knob(MONARCH, "rdma_data_max_connections", NONZERO, 256, "own: TCP connections that a host agent serves memory on"),
    knob(MONARCH, "rdma_idle_limit", DURATION, "30s", "own: a TCP connection without transfers is closed after so long"),
    knob(MONARCH, "proc_stopped_limit", DURATION, "10s", "own: how long a proc may sit stopped before it is dead", optional=True),
    knob(MONARCH, "log_folder", TEXT, "", "own: where log files go; empty: monarch-<user id>-logs in the temporary folder"),
    knob(MONARCH, "log_file_max_bytes", NONZERO, 2**24, "own: size at which a log file starts anew; two older parts stay"),
    knob(MONARCH, "log_merge", TEXT, "actors", "own: which similar lines merge: of different actors, or all", choices=("actors", "all")),
    knob(MONARCH, "allow_version_mismatch", BOOLEAN, False, "own: attach to workers of another monarch or Python, at your own risk"),
    knob(MONARCH, "stall_endpoint_limit", DURATION, "60s", "own: an endpoint that runs longer is reported, once", optional=True),
    knob(MONARCH, "stall_mailbox_limit", NONZERO, 10_000, "own: so many waiting for one actor, and growing, is reported", optional=True),
    knob(MONARCH, "stall_interpreter_limit", DURATION, "10s", "own: an interpreter silent for longer is reported", optional=True),
    knob(MONARCH, "proc_start", TEXT, "auto", "own: how procs start", choices=("auto", "fork", "fresh")),
    knob(MONARCH, "client_exit_timeout", DURATION, "1s", "own: budget of the shutdown at interpreter exit"),
)
# fmt: on

KNOBS: Mapping[str, Knob] = {row.name: row for row in _ROWS}
"""The table, by name. What a row's columns mean: `_base/knobs.py`."""

_LIKENESS = 0.8
"""From here on an unknown variable counts as misspelt; other programs have variables with our prefix, too."""
_ENVIRONMENT = "environment"
"""Entry of a snapshot that is no knob: names of the values that only the sender's environment asked for."""


def _checked(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _find(name).accept(value) for name, value in values.items()}


def _find(name: str) -> Knob:
    if name in KNOBS:
        return KNOBS[name]
    near = did_you_mean(name, KNOBS)
    raise ValueError(explain(f"invalid configuration key: `{name}`{near}", next="monarch.config.get_global_config() lists the keys"))


def _read_env() -> tuple[dict[str, Any], list[str]]:
    """Values of the variables that are set, and what is wrong with others: a bad one is left out, as it must not break `import monarch`."""
    found: dict[str, Any] = {}
    complaints = []
    for row in _ROWS:
        for variable in row.env:
            text = os.environ.get(variable)
            if text is None:
                continue
            try:
                found[row.name] = row.parse(text)
            except (TypeError, ValueError) as exc:
                sample = "" if row.default is None else f"set it for example to {row.kind.plain(row.default)}, or unset it"
                complaints.append(explain(f"ignored {variable}={text!r}: {without_next(str(exc)).rpartition('`: ')[2]}", next=sample))
            break
    return found, complaints


def _misspelt() -> Iterator[str]:
    """What is said of variables of the environment that look like a knob's, and are none."""
    names = {_without_prefix(variable): variable for row in reversed(_ROWS) for variable in reversed(row.env) if _has_prefix(variable)}
    known = {variable for row in _ROWS for variable in row.env}
    for variable in os.environ:
        if _has_prefix(variable) and variable not in known:
            meant = nearest(_without_prefix(variable), names, _LIKENESS)
            if meant:
                yield explain(f"the environment variable {variable} is unknown; did you mean {names[meant]}?", next="rename or unset it")


def _has_prefix(variable: str) -> bool:
    return variable.startswith((HYPERACTOR, MONARCH))


def _without_prefix(variable: str) -> str:
    return variable.removeprefix(MESH).removeprefix(HYPERACTOR).removeprefix(MONARCH)


def warn_of_environment() -> None:
    """Log what is wrong with the environment, each thing once. For processes that people start: children have the same one."""
    with _layers.lock:
        complaints = [text for text in (*_layers.complaints, *_misspelt()) if text not in _layers.told]
        _layers.told.update(complaints)
    if complaints:
        import logging

        for text in complaints:
            logging.getLogger("monarch.config").warning("%s", text)


class _Layers:
    """The layers of values, and the two dicts made from them that are read."""

    def __init__(self) -> None:
        # Re-entrant: the collector may end a forgotten `configured()` block in the middle of a change.
        self.lock = threading.RLock()
        self.inherited_env: dict[str, Any] = {}
        self.env: dict[str, Any]
        self.complaints: list[str]
        self.env, self.complaints = _read_env()
        self.told: set[str] = set()
        self.inherited: dict[str, Any] = {}
        self.runtime: dict[str, Any] = {}
        self.overrides: list[dict[str, Any]] = []
        self.effective: dict[str, Any] = {}
        self.seconds: dict[str, float | None] = {}
        self.refresh()

    def environment(self) -> dict[str, Any]:
        return self.inherited_env | self.env

    def configured(self) -> dict[str, Any]:
        merged = dict(self.runtime)
        for override in self.overrides:
            merged |= override
        return merged

    def program(self) -> dict[str, Any]:
        return self.inherited | self.configured()

    def refresh(self) -> None:
        """Make the dicts anew; called with the lock held. Readers see the old or the new ones, never half of each."""
        self.effective = {row.name: row.default for row in _ROWS} | self.environment() | self.program()
        durations = {row.name: self.effective[row.name] for row in _ROWS if row.kind is DURATION}
        self.seconds = {name: None if text is None else nanos(text) / 1e9 for name, text in durations.items()}


_layers = _Layers()


def value(name: str) -> Any:
    """The value in force of knob `name`, as `get_global_config()` shows it. Cost: one look-up."""
    return _layers.effective[name]


def seconds(name: str) -> float:
    """The duration in force of knob `name`, in seconds; ValueError when it is None (use `seconds_or_none`)."""
    found = _layers.seconds[name]
    return refuse(f"configuration key `{name}` is None; it needs seconds_or_none()") if found is None else found


def seconds_or_none(name: str) -> float | None:
    """The duration in force of an optional knob `name`, in seconds."""
    return _layers.seconds[name]


def configure(**kw: Any) -> None:
    """Set values for this process and the procs it starts; merges with earlier calls. All of them, or none on an error.

    Raises:
        ValueError: an unknown key, or a value out of range.
        TypeError: a value of the wrong type, or text that is no duration.
    """
    checked = _checked(kw)
    with _layers.lock:
        _layers.runtime |= checked
        _layers.refresh()


@contextlib.contextmanager
def configured(**overrides: Any) -> Iterator[dict[str, Any]]:
    """Set values for the length of a `with` block, above `configure()`; yields the effective configuration.

    Blocks nest, also when they overlap in threads: each one takes back its own values only, and the youngest wins.
    """
    layer = _checked(overrides)
    with _layers.lock:
        _layers.overrides.append(layer)
        _layers.refresh()
    try:
        yield get_global_config()
    finally:
        with _layers.lock:
            _layers.overrides = [other for other in _layers.overrides if other is not layer]
            _layers.refresh()


def get_global_config() -> dict[str, Any]:
    """The effective value of every key."""
    return dict(_layers.effective)


def get_runtime_config() -> dict[str, Any]:
    """Only what `configure()` and the open `configured()` blocks of this process set."""
    with _layers.lock:
        return _layers.configured()


def clear_runtime_config() -> None:
    """Forget what `configure()` set."""
    with _layers.lock:
        _layers.runtime = {}
        _layers.refresh()


def reload_config_from_env() -> None:
    """Read the environment variables again. A bad value is left out; `warn_of_environment` says so."""
    found, complaints = _read_env()
    with _layers.lock:
        _layers.env, _layers.complaints = found, complaints
        _layers.refresh()


def reset_config_to_defaults() -> None:
    """Empty every layer, the environment's and open `configured()` blocks included."""
    with _layers.lock:
        _layers.env, _layers.inherited_env, _layers.inherited, _layers.runtime, _layers.overrides = {}, {}, {}, {}, []
        _layers.refresh()


def snapshot() -> dict[str, Any]:
    """What is set in this process, for a proc or host that it starts: plain data (str, int, float, bool, None, list).

    Values inherited from this process's own client are included, so they reach grandchildren. Local knobs are not.
    """
    with _layers.lock:
        environment, program = _layers.environment(), _layers.program()
    merged = environment | program
    plain = {name: None if v is None else KNOBS[name].kind.plain(v) for name, v in merged.items() if not KNOBS[name].local}
    return plain | {_ENVIRONMENT: [name for name in plain if name not in program]}


def spawners_value(spawner: Mapping[str, Any], name: str) -> Any:
    """A knob as a spawner's `snapshot()` has it; this process may be older than the setting."""
    return spawner.get(name, KNOBS[name].default)


def adopt(values: dict[str, Any]) -> None:
    """Install a client's `snapshot()` below this process's own `configure()`; replaces what was adopted before.

    What the client's program set beats this process's environment: a child has its client's environment too, and would
    otherwise go back to a variable that the script had overruled. What only the client's environment set does not.
    Keys that this version does not know are left out with a warning, so that a newer client can attach.
    """
    from_env = set(values.get(_ENVIRONMENT, ()))
    checked = {}
    for name, plain in values.items():
        if name in KNOBS:
            row = KNOBS[name]
            checked[name] = row.accept(row.kind.parse(plain) if isinstance(plain, str) else plain)
        elif name != _ENVIRONMENT:
            warnings.warn(explain(f"ignored configuration key `{name}` of the client", next="install one version everywhere"), stacklevel=2)
    with _layers.lock:
        _layers.inherited = {name: v for name, v in checked.items() if name not in from_env}
        _layers.inherited_env = {name: v for name, v in checked.items() if name in from_env}
        _layers.refresh()


def parametrize_config(**values: Iterable[Any]) -> Callable[[Callable[..., Any]], Any]:
    """Pytest decorator: run the test under `configured()` for every combination of the sets of values; ValueError if one is empty."""
    choices = {name: sorted(given, key=repr) for name, given in values.items()}
    if not choices or not all(choices.values()):
        raise ValueError(f"parametrize_config needs at least one key, and a value for each; got {choices}")
    return _parametrize([dict(zip(choices, row, strict=True)) for row in itertools.product(*choices.values())])


def parametrize_config_pointwise(**values: list[Any]) -> Callable[[Callable[..., Any]], Any]:
    """Pytest decorator: run the test under `configured()` for the n-th value of every list; ValueError if lengths differ."""
    lengths = {name: len(given) for name, given in values.items()}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise ValueError(f"parametrize_config_pointwise needs lists of one length, at least 1; got lengths {lengths}")
    return _parametrize([dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)])


def _parametrize(rows: list[dict[str, Any]]) -> Callable[[Callable[..., Any]], Any]:
    import functools
    import inspect

    import pytest

    def decorate(test: Callable[..., Any]) -> Any:
        @functools.wraps(test)
        def run(*args: Any, _config_overrides: dict[str, Any], **kwargs: Any) -> Any:
            with configured(**_config_overrides):
                return test(*args, **kwargs)

        @functools.wraps(test)
        async def run_async(*args: Any, _config_overrides: dict[str, Any], **kwargs: Any) -> Any:
            with configured(**_config_overrides):
                return await test(*args, **kwargs)

        wrapped: Any = run_async if inspect.iscoroutinefunction(test) else run
        extra = inspect.Parameter("_config_overrides", inspect.Parameter.KEYWORD_ONLY)
        signature = inspect.signature(test)
        wrapped.__signature__ = signature.replace(parameters=[*signature.parameters.values(), extra])
        ids = ["-".join(f"{name}={v}" for name, v in row.items()) for row in rows]
        return pytest.mark.parametrize("_config_overrides", rows, ids=ids)(wrapped)

    return decorate
