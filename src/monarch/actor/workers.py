"""Worker loops: host agents that wait for clients, and attaching to them.

A worker loop outlives its clients: when one ends, by any way, its procs end and the loop waits for the next.

Rules of this file:
    1. A loop that other machines reach trusts who holds the job's secret or a certificate of the job; whoever wants neither says so.
    2. What is wrong with an address or with credentials is raised here, in the caller's thread; what is wrong with the network, by
       `HostMesh.initialized`.

Read next: `_runtime/host.py` for the agent, `attaching.py` for the client's side.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from monarch import config
from monarch._base.addresses import Address, WorkerAddress, parse_address, parse_dialled_address, parse_worker_address
from monarch._base.agents import Agents
from monarch._base.errors import explain
from monarch._base.keywords import keywords_only
from monarch._mesh.shape import Extent
from monarch._net import credentials
from monarch._net.credentials import Credentials
from monarch._runtime.future import Future
from monarch._runtime.interpreter import host_command
from monarch._runtime.rundir import make_run_dir, remove_run_dir
from monarch.actor.attaching import Attaching
from monarch.actor.client import ENTRY
from monarch.actor.host_mesh import Attachment, HostMesh
from monarch.actor.process import this_process
from monarch.actor.trust import checked_credentials, show, warn_of_strangers

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

_logger = logging.getLogger("monarch.worker")
_MAX_PATH_BYTES = 60
_INTERRUPTED = 130
"""Exit status of a program that Ctrl-C has ended; as a shell counts."""
_END_S = 20.0
"""How long what runs at a worker loop may take to end."""


@keywords_only("address")
def run_worker_loop_forever(
    *, private_key: bytes | Path | None = None, ca: bytes | Path | Literal["trust_all_connections"] | None = None, address: str
) -> None:
    """Serve this host at `address` until a client shuts it down. See `start_worker_loop_forever`.

    Ctrl-C ends the loop and what runs there, and then raises a `KeyboardInterrupt` that ends the program with status 130, without
    a traceback.
    """
    loop = _start_loop(private_key, ca, address)
    try:
        loop.ended.get()
    except KeyboardInterrupt:
        loop.end(_END_S)
        raise Interrupted from None


@keywords_only("address")
def start_worker_loop_forever(
    *, private_key: bytes | Path | None = None, ca: bytes | Path | Literal["trust_all_connections"] | None = None, address: str
) -> Future[None]:
    """`run_worker_loop_forever` in the background; the future completes when the loop has ended.

    The loop ends with this process too.

    Args:
        address: where it is reached: `tcp://host:port`, `tls://host:port`, an alias `tcp://<dialled>@tcp://<bound>`, or
            `ipc://<path>` for processes of this user on this machine. Port 0 is a free one, which the log tells.
        private_key: for tls://: PEM of the key and its certificates; None: what the `hyperactor_tls_*` knobs name.
        ca: for tls://: PEM of who signs them. "trust_all_connections": whoever reaches a tcp:// address, and no secret is set
            (`MONARCH_SECRET`, `MONARCH_SECRET_FILE`), may run any code here.

    Raises:
        ValueError: the address, the secret or the certificates can't be used; or nothing says whom to trust.
        RuntimeError: something serves there already, or the address is not this machine's.
    """
    return _start_loop(private_key, ca, address).ended


class Interrupted(KeyboardInterrupt, SystemExit):
    """Ctrl-C in a program that does nothing but serve: whoever catches KeyboardInterrupt has it, and nobody is shown a traceback."""

    def __init__(self) -> None:
        self.code = _INTERRUPTED


class _Loop(NamedTuple):
    """A worker loop of this process."""

    ended: Future[None]
    lifeline: socket.socket
    """The loop ends when this is closed."""

    def end(self, budget_s: float) -> None:
        """End it, and wait so long for that; a second Ctrl-C does not wait."""
        with contextlib.suppress(OSError):  # it has ended meanwhile
            self.lifeline.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(TimeoutError, RuntimeError, KeyboardInterrupt):
            self.ended.get(budget_s)


def _start_loop(private_key: bytes | Path | None, ca: bytes | Path | Literal["trust_all_connections"] | None, address: str) -> _Loop:
    config.warn_of_environment()
    worker = parse_worker_address(address)
    shown = checked_credentials(private_key, ca, worker.advertised, what="a worker")
    if worker.advertised.is_network:
        return _start_for_others(worker, shown)
    path = checked_path(address)
    _remove_stale(path)
    return _start([address, ENTRY, _encoded_config()], [], shown, address)


def _start_for_others(worker: WorkerAddress, shown: Credentials) -> _Loop:
    from monarch._net.interfaces import advertised_address, listen_on

    listener = listen_on(worker.bound)
    with listener:
        advertised, note = advertised_address(worker, listener)
        if note:
            _logger.warning("%s", note)
        warn_of_strangers(_logger, shown, advertised)
        _logger.info("worker loop: address=%s", advertised)
        run_dir = make_run_dir()
        try:
            fds = [listener.fileno(), run_dir.lock_fd]
            arguments = [_agent_address(advertised), ENTRY, _encoded_config(), *map(str, fds), run_dir.path]
            loop = _start(arguments, fds, shown, str(advertised))
        except BaseException:
            remove_run_dir(run_dir.path)
            raise
        finally:
            os.close(run_dir.lock_fd)
    return loop


def _start(arguments: list[str], fds: list[int], shown: Credentials, address: str) -> _Loop:
    import subprocess

    ours, theirs = socket.socketpair()
    with theirs:
        agent = subprocess.Popen(
            host_command("worker", str(theirs.fileno()), *arguments),
            pass_fds=[theirs.fileno(), *fds],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    credentials.send(ours, shown)
    ended: Future[None] = Future._new()
    threading.Thread(target=_wait, args=(agent, ours, address, ended), name="monarch-worker-loop", daemon=True).start()
    return _Loop(ended, ours)


@keywords_only("workers")
def attach_to_workers(
    *,
    private_key: bytes | Path | None = None,
    ca: bytes | Path | Literal["trust_all_connections"] | None = None,
    workers: Sequence[str | Future[str]],
    name: str | None = None,
) -> HostMesh:
    """The hosts of some worker loops, as a mesh with the dimension `hosts`; returns at once.

    Loops that do not serve yet are waited for, up to `mesh_attach_config_timeout`; `initialized` names those that never
    came.

    Args:
        workers: addresses, or futures of them, in rank order.
        private_key, ca: as for `start_worker_loop_forever`.
        name: for people.

    Raises:
        TypeError: `workers` is no list of addresses.
        ValueError: an address is malformed or can't be dialled, or there is none; or nothing says whom to trust.
    """
    if isinstance(workers, str):
        raise TypeError(explain(f"workers is the string {workers!r}; expected a list of addresses", next=f"write workers=[{workers!r}]"))
    if not workers:
        raise ValueError("workers is empty; give the address of at least one worker loop")
    texts = [_text_of(worker) for worker in workers]
    addresses = [parse_dialled_address(text) for text in texts]
    shown = Credentials()
    for address, text in zip(addresses, texts, strict=True):
        shown = checked_credentials(private_key, ca, address, what="a client")
        if not address.is_network:
            checked_path(text)
    process = this_process()
    agents = Agents(process.name_of(_agent_address(address)) for address in addresses)
    show(shown)
    attaching = Attaching(process, agents)
    attaching.start()
    return HostMesh(agents, Extent(["hosts"], [len(agents)]).region.as_shape(), attachment=Attachment(attaching))


def _text_of(worker: str | Future[str]) -> str:
    text = worker.get() if isinstance(worker, Future) else worker
    if not isinstance(text, str):
        raise TypeError(explain(f"{text!r} is no address of a worker; expected a string", next='write workers=["tcp://host:port", ...]'))
    return text


def _agent_address(address: Address) -> str:
    """How references name the agent there: a service that has an id is one of several that may be at this address in turn."""
    return f"{address.url}/@{address.service}" if address.service and address.is_network else address.url


def _encoded_config() -> str:
    return msgspec.json.encode(config.snapshot()).decode()


def checked_path(text: str) -> str:
    """The file of an ipc:// address; raises ValueError or NotImplementedError where there can be none."""
    address = parse_address(text)
    path = address.path
    if address.scheme != "ipc" or path.startswith("@"):
        how = "use tcp://host:port, tls://host:port or ipc://<path of a socket file>"
        raise NotImplementedError(explain(f"cannot serve at {text!r}", next=how))
    if not os.path.isabs(path) or len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise ValueError(f"invalid worker address {text!r}; expected an absolute path of at most {_MAX_PATH_BYTES} bytes")
    return path


def _remove_stale(path: str) -> None:
    """Remove what a killed worker loop left at its address.

    Raises:
        RuntimeError: a loop serves there.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(path) == 0:
            raise RuntimeError(explain(f"a worker loop serves at ipc://{path} already", next="choose another address, or shut it down"))
    if os.path.exists(path):
        os.unlink(path)
    folder = path + ".d"
    if os.path.isdir(folder):
        remove_run_dir(folder)


def _wait(agent: subprocess.Popen[bytes], lifeline: socket.socket, address: str, ended: Future[None]) -> None:
    status = agent.wait()
    lifeline.close()
    if status == 0:
        ended._complete(None)
    else:
        ended._fail(RuntimeError(explain(f"the worker loop ended with status {status}", where=address, next="see its output above")))
