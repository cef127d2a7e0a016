"""Host meshes: machines that procs can be spawned on.

Read next: `_runtime/host.py` for the agent that does it, `proc_mesh.py` for the result.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from monarch import config
from monarch._base.agents import Agents
from monarch._base.errors import explain
from monarch._base.ids import ProcRef, random_id, sanitize_label
from monarch._base.keywords import known_keywords
from monarch._mesh.mesh import ShapedMesh
from monarch._mesh.shape import Extent, NDSlice, Point, Shape
from monarch._runtime.future import Future, gather, settled
from monarch._wire import messages
from monarch.actor.attaching import Attaching
from monarch.actor.launch import Launch
from monarch.actor.proc_mesh import ProcMesh, announce
from monarch.actor.proc_mesh_core import ProcMeshCore, ProcNames
from monarch.actor.process import this_process

if TYPE_CHECKING:
    from monarch._runtime.proc import Proc

_GONE_S = 5.0
_GONE_STEP_S = 0.01
_BIND_KEYS = ("cpunodebind", "membind", "physcpubind", "cpus")
PATH_VARIABLE = "MONARCH_PROC_PATH"
"""Environment variable with the directories of the user's modules, for an interpreter that no script of theirs started."""


@dataclass
class BootstrapCommand:
    """The program that becomes a proc, instead of a warm fork.

    Attributes:
        program: path or name of the executable.
        arg0: argv[0]; None means `program`.
        args: the other arguments.
        env: variables set on top of the inherited ones; None removes one.
        inherit_env: False starts from an empty environment.
    """

    program: str
    arg0: str | None = None
    args: list[str] = field(default_factory=list)
    env: dict[str, str | None] = field(default_factory=dict)
    inherit_env: bool = True

    def with_env(self, env: Mapping[str, str | None]) -> BootstrapCommand:
        """A copy with more variables."""
        return replace(self, args=list(self.args), env={**self.env, **env})


def default_bootstrap_cmd() -> BootstrapCommand:
    """The command of a fresh interpreter that becomes a proc."""
    return BootstrapCommand(sys.executable, None, ["-m", "monarch.actor.bootstrap"], {})


def _as_per_host(unknown: dict[str, Any]) -> str:
    """What keywords of `spawn_procs` that it does not have were meant as: sizes, or `per_host` misspelt."""
    if all(isinstance(value, int) for value in unknown.values()):
        return f"per_host={unknown!r}"
    sizes = next(iter(unknown.values()))
    return f"per_host={sizes!r}" if isinstance(sizes, dict) else ""


class Attachment:
    """What an attaching client knows of a host mesh; shared by its slices."""

    def __init__(self, attaching: Attaching | None = None) -> None:
        self.attaching = attaching
        """How its hosts were introduced; None: nobody has done that yet."""
        self.spawned: list[ProcMesh] = []
        self.closed = False


def check_hosts(hosts: object) -> None:
    """TypeError unless `hosts` is what procs can be spawned on."""
    if not hasattr(hosts, "spawn_procs"):
        what = f"a mesh of hosts is needed, not {type(hosts).__name__}"
        raise TypeError(explain(what, next="pass this_host(), or what attach_to_workers() gives, or a slice of that"))


class HostMesh(ShapedMesh):
    """Hosts that procs can be spawned on. Picklable: what arrives is a reference. Thread: any."""

    def __init__(self, agents: Agents, shape: Shape, *, python: str | None = None, attachment: Attachment | None = None) -> None:
        """Args:
        agents: the agent of every base rank of `shape`.
        python: executable of the fresh interpreters that procs start as; None forks the zygote.
        attachment: what the attaching client knows; None for a reference and for `this_host()`.
        """
        self._agents = agents
        self._shape = shape
        self._python = python
        self._attachment = attachment

    @known_keywords(_as_per_host)
    def spawn_procs(
        self,
        per_host: dict[str, int] | None = None,
        bootstrap: Callable[[], None] | Callable[[], Awaitable[None]] | None = None,
        name: str | None = None,
        proc_bind: list[dict[str, str]] | None = None,
        bootstrap_command: BootstrapCommand | Callable[[Point], BootstrapCommand] | None = None,
    ) -> ProcMesh:
        """Start processes on every host of this mesh; returns at once.

        Args:
            per_host: dimensions and sizes of the processes of one host, such as {"gpus": 8}; None: one process.
            bootstrap: runs once in each process before any actor; sync or async.
            name: for people; "anon" by default.
            proc_bind: one dict per process of a host; keys `cpunodebind`, `membind`, `physcpubind`, `cpus`.
            bootstrap_command: program to run as the process, for all or by its point. Such processes start as fresh
                interpreters; by default they are forked from a warm one.

        Raises:
            ValueError: a size is not a positive integer, a label is one of the hosts', or `proc_bind` has the wrong length.

        Failures to start are reported by `initialized` and by every call.
        """
        self._check_open()
        sizes = _checked_per_host(per_host, self.extent)
        label = sanitize_label(name or "anon")
        process = this_process()
        instance = process.instance()
        names = ProcNames(label, random_id(), self._own_agents, _product(sizes.values()))
        binds = _checked_binds(proc_bind, names.per_host)
        extent = Extent([*self.extent.labels, *sizes], [*self.extent.sizes, *sizes.values()])
        core = ProcMeshCore(names, name=name or "anon", extent=extent, hosts=self, owner_actor=instance._uid, owned=True)
        mesh = ProcMesh(core, extent.region.as_shape())
        instance._add_child(mesh)
        try:
            commands = self._commands(bootstrap_command, mesh)
        except ValueError as exc:
            core.ready = Future._failed(exc)
            for ref in core.refs:
                process.proc.loop.call_soon(process.proc.fates.on_exited, messages.ProcExited(ref, str(exc), "launch"))
            return mesh
        core.launch = Launch(bootstrap, binds, commands)
        core.ready = core.launch.start(mesh, range(len(core.refs)))
        if self._attachment is not None:
            self._attachment.spawned.append(mesh)
        announce(mesh)
        return mesh

    def _commands(
        self, command: BootstrapCommand | Callable[[Point], BootstrapCommand] | None, mesh: ProcMesh
    ) -> list[messages.Command | None]:
        extent = mesh.extent
        if command is None:
            plain: messages.Command | None = None
            if self._python is not None or config.value("proc_start") == "fresh" or sys.platform != "linux":
                plain = _encodable(replace(default_bootstrap_cmd(), program=self._python or sys.executable))
            return [plain] * len(mesh)
        if isinstance(command, BootstrapCommand):
            return [_encodable(command)] * len(mesh)
        return [_encodable(_evaluated(command, Point(rank, extent))) for rank in range(len(mesh))]

    def with_python_executable(self, python_executable: str) -> HostMesh:
        """The same hosts; their processes, and those that these spawn, run this interpreter."""
        return HostMesh(self._agents, self._shape, python=python_executable)

    @property
    def _own_agents(self) -> Agents:
        """The agents of this view; of a whole mesh the same object, so that a reference to its procs has it once."""
        ranks = self._shape.ndslice.ranks()
        return self._agents if ranks == range(len(self._agents)) else Agents(self._agents[rank].address for rank in ranks)

    # --- life ----------------------------------------------------------------------------------------------------

    @property
    def initialized(self) -> Future[bool]:
        """True once the agents of all hosts answer.

        Raises (through the future):
            RuntimeError: an agent did not answer in time, or is of another version; the text names it.
        """
        if self._attachment is not None and self._attachment.attaching is not None and len(self) == len(self._agents):
            return self._attachment.attaching.ready
        process = this_process()
        agents = list(dict.fromkeys(self._here()))
        for agent in agents:
            process.need_agent(agent)
        attaching = Attaching(process, agents)
        attaching.start()
        return attaching.ready

    def shutdown(self) -> Future[None]:
        """End every process on these hosts and their agents.

        Raises:
            RuntimeError: this mesh is a reference, a slice or `this_host()`, or has been shut down.
        """
        attachment = self._owned_attachment("shut down")
        self._check_open()
        attachment.closed = True
        proc, gateway = this_process().proc, this_process().gateway
        budget_s = config.seconds("stop_actor_timeout") + config.seconds("cleanup_timeout")
        stopping = [mesh.stop() for mesh in attachment.spawned]

        def end(agent: ProcRef) -> Future[None]:
            return _afterwards(settled(proc.request(agent, messages.ShutdownHost(budget_s))), lambda: _until_gone(proc, agent))

        ended = gather([*stopping, *(end(agent) for agent in self._here() if agent != gateway)])._then(lambda _: None)
        if gateway is None or gateway not in self._here():
            return ended
        return _afterwards(ended, lambda: end(gateway))

    def stop(self) -> Future[None]:
        """End the processes that were spawned through this mesh; the hosts stay, also for other clients.

        Raises:
            RuntimeError: this mesh is a reference, a slice or `this_host()`.
        """
        attachment = self._owned_attachment("stop")
        spawned, attachment.spawned = attachment.spawned, []
        return gather([mesh.stop() for mesh in spawned])._then(lambda _: None)

    def _check_open(self) -> None:
        if self._attachment is not None and self._attachment.closed:
            raise RuntimeError(explain("HostMesh has already been shut down", where=f"extent {self.extent}", next="attach to workers anew"))

    def _owned_attachment(self, what: str) -> Attachment:
        if self._attachment is None or len(self) != len(self._agents):
            raise self._not_owned(what)
        return self._attachment

    def _not_owned(self, what: str) -> RuntimeError:
        return RuntimeError(
            explain(
                f"cannot {what} `HostMesh` that is a reference instead of owned",
                where=f"extent {self.extent}",
                next="stop the proc meshes instead; monarch.actor.shutdown_context() ends everything on this_host()",
            )
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    async def sync_workspace(self, workspace: Any, conda: bool = False, auto_reload: bool = False) -> None:
        """Mirror directories to attached hosts.

        Raises:
            RuntimeError: these hosts share the client's file system, or this mesh is a reference.
        """
        raise RuntimeError(
            explain(
                "cannot call sync_workspace on a sliced host mesh or one that was sent over an actor endpoint",
                where=f"extent {self.extent}",
                next="this_host() shares the client's file system and needs no sync",
            )
        )

    @property
    def stream_logs(self) -> bool:
        """Whether output is streamed by default: no."""
        return False

    @property
    def is_fake_in_process(self) -> bool:
        """Whether the procs are fakes inside this process: no."""
        return False

    # --- geometry ------------------------------------------------------------------------------------------------

    @property
    def region(self) -> Any:
        """Base ranks of this view."""
        return self._shape.region

    def _new_with_shape(self, shape: Shape) -> HostMesh:
        return self if shape == self._shape else HostMesh(self._agents, shape, python=self._python, attachment=self._attachment)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HostMesh) and self._here() == other._here() and self._shape.extent == other._shape.extent

    def _here(self) -> tuple[ProcRef, ...]:
        return tuple(self._agents[rank] for rank in self._shape.ndslice.ranks())

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"HostMesh(extent={self.extent}, agents={[agent.address for agent in self._here()]})"

    def __reduce__(self) -> tuple[Any, ...]:
        return HostMesh._rebuild, (self._agents, self._shape, self._python)

    @staticmethod
    def _rebuild(agents: Agents, shape: Shape, python: str | None) -> HostMesh:
        return HostMesh(agents, shape, python=python)


def _until_gone(proc: Proc, agent: ProcRef) -> Future[None]:
    """Done when the link to an agent that was shut down is closed: its address is free for the next one."""
    gone: Future[None] = Future._new()
    deadline_s = proc.loop.now_s() + _GONE_S

    def look() -> None:
        if proc.router.is_connected(agent) and proc.loop.now_s() < deadline_s:
            proc.loop.call_later(_GONE_STEP_S, look)
        else:
            gone._complete(None)

    proc.loop.call_soon(look)
    return gone


def _afterwards(first: Future[None], start: Callable[[], Future[None]]) -> Future[None]:
    """The outcome of `first`, once what `start()` begins after it has ended as well."""
    result: Future[None] = Future._new()

    def finish() -> None:
        if first._error is None:
            result._complete(None)
        else:
            result._fail(first._error)

    first._when_done(lambda: start()._when_done(finish))
    return result


def this_host() -> HostMesh:
    """The host of the running actor; in a client, this machine. It can't be stopped."""
    return this_process().instance().proc.host_mesh


def this_proc() -> ProcMesh:
    """The process of the running actor, as a mesh of one proc. Actors spawned here share its interpreter."""
    return this_process().instance().proc


def local_host_mesh() -> HostMesh:
    """This machine, for a process that nobody spawned; its agent starts when it is first needed."""
    return HostMesh(Agents([this_process().host_identity().address]), Shape.unity())


def host_mesh_at(hosts: HostMesh, address: str) -> HostMesh:
    """The host of `hosts` whose agent is at `address`, as a mesh of its own."""
    for rank in hosts._shape.ndslice.ranks():
        if hosts._agents[rank].address == address:
            shape = Shape((), NDSlice(offset=rank, sizes=(), strides=()))
            return HostMesh(hosts._agents, shape, python=hosts._python)
    raise ValueError(f"no host of {hosts} is at {address}")


def proc_mesh(*, bootstrap: Callable[[], Any] | None = None, name: str | None = None, **per_host: int) -> ProcMesh:
    """Start processes on this host: `procs = await proc_mesh(gpus=8)`.

    The same as `this_host().spawn_procs(per_host, bootstrap, name)`.
    """
    return this_host().spawn_procs(per_host, bootstrap, name)


def _checked_per_host(per_host: dict[Any, Any] | None, hosts: Extent) -> dict[str, int]:
    if per_host is not None and not isinstance(per_host, Mapping):
        raise TypeError(explain(f"per_host is {per_host!r}; expected a dict of dimensions and sizes", next='write per_host={"gpus": 8}'))
    sizes = dict(per_host or {})
    overlap = [label for label in sizes if label in hosts.labels]
    if overlap:
        raise ValueError(
            explain(f"per_host labels {overlap} overlap with host labels {hosts.labels}", next="choose other names, such as gpus or procs")
        )
    for label, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(explain(f"per_host[{label!r}] is {size!r}; expected an integer of at least 1", next='write {"gpus": 8}'))
        if not isinstance(label, str) or not label.isidentifier():
            raise ValueError(f"per_host label {label!r} is no identifier; it names a dimension, such as gpus")
    return sizes


def _checked_binds(binds: list[dict[str, str]] | None, procs_per_host: int) -> list[dict[str, str]]:
    if binds is None:
        return []
    if len(binds) != procs_per_host:
        raise ValueError(
            explain(
                f"proc_bind length ({len(binds)}) must equal procs_per_host ({procs_per_host})",
                next="give one dict per process of a host",
            )
        )
    for bind in binds:
        unknown = [key for key in bind if key not in _BIND_KEYS]
        if unknown:
            raise ValueError(f"unknown proc_bind keys {unknown}; known are {', '.join(_BIND_KEYS)}")
    return binds


def _evaluated(command: Callable[[Point], BootstrapCommand], point: Point) -> BootstrapCommand:
    try:
        result = command(point)
    except Exception as exc:
        raise ValueError(f"error during mesh configuration: per-rank bootstrap callable raised: {exc!r}, at {point}") from exc
    if not isinstance(result, BootstrapCommand):
        raise ValueError(
            f"error during mesh configuration: per-rank bootstrap callable did not return BootstrapCommand, but {result!r}, at {point}"
        )
    return result


def _encodable(command: BootstrapCommand) -> messages.Command:
    env: dict[str, str | None] = {key: value if value is None else str(value) for key, value in command.env.items()}
    if not command.inherit_env:
        env = {**dict.fromkeys(os.environ), **env}
    env[PATH_VARIABLE] = os.pathsep.join(_module_path())
    return messages.Command(command.program, command.arg0, [str(arg) for arg in command.args], env)


def _module_path() -> list[str]:
    """Where this process finds the user's modules, without what belongs to its interpreter: the proc's may be another one."""
    library = os.path.dirname(os.__file__)
    entries = [entry or os.getcwd() for entry in sys.path if not entry.endswith((".zip", "-packages"))]
    return [entry for entry in entries if entry != library and not entry.startswith(library + os.sep)]


def _product(sizes: Any) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result
