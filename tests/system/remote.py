"""Programs on the hosts of a rig, as on machines of their own: each with a host name and private folders for sockets and memory.

    with serving(a, 26600) as worker:                 # a worker loop on host a
        done = run_alone(b, CLIENT, args=[a.url(26600)]).check()

Network namespaces share the file system, so a socket file of one host could be connected to from another. Programs that this
module starts see an empty temporary folder and an empty /dev/shm instead; what works, works over the network.

Read next: `hosts.py` for the rig, `script.py` for what a run tells.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from monarch._net.certificates import mint_job_certificates
from system.hosts import Host
from system.script import CompletedRun, Run, run_script, start_script
from system.waiting import is_gone, wait_until

TESTS = str(Path(__file__).parents[1])
TRUST = "trust_all_connections"
_OWN_FOLDERS = """
    source=$(cat "$4") && echo "$1" > /proc/sys/kernel/hostname && mount -t tmpfs none "$2" && mount -t tmpfs none /dev/shm &&
    mkdir -p "$(dirname "$4")" && printf '%s\\n' "$source" > "$4" && shift 2 && exec "$@"
"""
"""$1: host name, $2: folder to hide, $3: interpreter, $4: script, which is brought along."""

_FILES = """
    import json, logging, os, re, sys, time
    from pathlib import Path
    for name, text in json.loads(os.environ.get("TEST_FILES", "{}")).items():
        Path(name).write_text(text)
        Path(name).chmod(0o600)
    ca = os.environ.get("TEST_CA")
"""
WORKERS = f"""{_FILES}
    from monarch.actor import start_worker_loop_forever
    logging.basicConfig(level=logging.INFO)
    loops = [start_worker_loop_forever(address=address, ca=ca) for address in sys.argv[1:]]
    print("ready", flush=True)
    for loop in loops:
        loop.get()
    print("ended", flush=True)
"""
"""Worker loops at the addresses that are its arguments; "ready" when they listen.

Environment: `TEST_CA` is the argument `ca`; `TEST_FILES` (JSON, texts by path) are written first, for this host alone.
"""
CLIENT = f"""{_FILES}
    import monarch.actor
    from monarch.actor import attach_to_workers
    from system.peers import Peer
    monarch.actor.unhandled_fault_hook = lambda failure: print(f"failure {{failure.crashed_ranks}}\\n", end="", flush=True)

    def use(workers):
        began = time.monotonic()
        try:
            mesh = attach_to_workers(ca=ca, workers=workers)
            mesh.initialized.get(30)
        except (RuntimeError, ValueError) as exc:
            print(f"after {{time.monotonic() - began:.2f}} s: {{type(exc).__name__}}: {{exc}}", flush=True)
            return None, None, None
        procs = mesh.spawn_procs({{"gpus": 2}})
        peers = procs.spawn("peer", Peer)
        print("from", *sorted({{name for name, _ in peers.where.call().get(10).values()}}), flush=True)
        print("addresses", *sorted({{ref.address for ref in peers._core.refs}} | {{ref.host for ref in peers._core.refs}}), flush=True)
        return mesh, procs, peers

    for group in sys.argv[1:]:
        mesh, procs, peers = use(group.split(","))
    if peers is None:
        sys.exit()
"""
"""Attaches to each group of workers, spawns and calls `peers`: prints who has answered, or what went wrong and when. Same environment.

Its arguments are the groups, with commas between the addresses; what follows has `mesh`, `procs` and `peers` of the last one.
"""


def alone(host: Host) -> tuple[str, ...]:
    """What in front of a script makes it run on `host` with folders of its own; for the client of the rig, only that."""
    shell = ("unshare", "--mount", "--uts", "sh", "-c", _OWN_FOLDERS, "sh", f"host-{host.name}", tempfile.gettempdir())
    return (*host.prefix, *shell)


def start_alone(host: Host, source: str, *, env: Mapping[str, str | None] | None = None, **options: Any) -> Run:
    """`start_script` on a host, isolated. Modules of the tests can be imported there."""
    return start_script(source, prefix=alone(host), env={"PYTHONPATH": TESTS, **(env or {})}, **options)


def run_alone(host: Host, source: str, *, env: Mapping[str, str | None] | None = None, **options: Any) -> CompletedRun:
    """`run_script` on a host, isolated. Modules of the tests can be imported there."""
    return run_script(source, prefix=alone(host), env={"PYTHONPATH": TESTS, **(env or {})}, **options)


def tls(folder: Path) -> dict[str, str]:
    """Variables of a program on any host that has the certificates of a new authority in files of its own."""
    files = mint_job_certificates(folder)
    own = {name: f"/dev/shm/{name}.pem" for name in ("cert", "key", "ca")}
    texts = {path: Path(getattr(files, name)).read_text() for name, path in own.items()}
    return {f"HYPERACTOR_TLS_{name.upper()}": path for name, path in own.items()} | {"TEST_FILES": json.dumps(texts)}


def attach(host: Host, *groups: Sequence[str], source: str = "", ca: str | None = TRUST, **env: str) -> CompletedRun:
    """`CLIENT` on a host, with one or more groups of addresses, then `source`."""
    arguments = [",".join(group) for group in groups]
    return run_alone(host, CLIENT + source, args=arguments, env={"TEST_CA": ca, **env}, timeout=30).check()


@contextmanager
def serving(
    host: Host,
    *places: int | str,
    env: Mapping[str, str | None] | None = None,
    ca: str | None = TRUST,
) -> Generator[Run, None, None]:
    """Worker loops on a host, while the block runs.

    Args:
        places: their ports, or their addresses.
        ca: what they are told; None: nothing.
    """
    addresses = [host.url(place) if isinstance(place, int) else place for place in places]
    with start_alone(host, WORKERS, args=addresses, env={"TEST_CA": ca, **(env or {})}) as run:
        run.wait_line("^ready")
        try:
            yield run
        finally:
            left = run.pids()
            run.finish(timeout=0.0, grace_s=0.0)
            wait_until(lambda: all(map(is_gone, left)))


@contextmanager
def workers(hosts: Sequence[Host], port: int = 26600, **env: str) -> Generator[list[str], None, None]:
    """One worker loop on each of some hosts; their addresses. The block shuts the loops down."""
    with ExitStack() as stack:
        variables = {"TEST_CA": TRUST, **env}
        runs = [stack.enter_context(start_alone(host, WORKERS, args=[host.url(port)], env=variables)) for host in hosts]
        for run in runs:
            run.wait_line("^ready")
        yield [host.url(port) for host in hosts]
        for run in runs:
            run.finish().check()


def agent_of(run: Run) -> int:
    """The process of the host agent that a script with one worker loop has started."""
    (agent,) = [pid for pid in run.pids() if _arguments(pid)[-1:] and "worker" in _arguments(pid) and _parent(pid) == run.pid]
    return agent


def _arguments(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
