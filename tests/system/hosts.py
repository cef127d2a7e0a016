"""Hosts for tests: network namespaces joined by a bridge, with links that can go down, be slow or swallow packets.

    def test_two_machines(hosts):
        a, b = hosts[:2]
        with start_script_in(a, WORKER) as worker:
            worker.wait_line("ready")
            run_script_in(b, CLIENT, args=[a.url(26600)]).check()

    client (the namespace of the tests)   10.77.N.254   fd77:N::fe   mhN   --.
    a, b, c, d                            10.77.N.1..4  fd77:N::1..4 eth0  --+-- bridge, in a namespace of its own

Rules of this file:
    1. `iproute2` and `nsenter`/`unshare` only. N is claimed by making the link `mhN`, so several test runs share a machine.
    2. Names of namespaces carry pid and start time of the process that made them; whoever starts next removes those of the dead.
    3. A process that `Host.run` starts is itself the child: what kills it kills the program.

Read next: `script.py` for what a run of a script tells, `frame_delay.py` for slow links.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, overload

from system.frame_delay import FrameDelay
from system.script import CompletedRun, Run, run_script, start_script

_NAMESPACES = Path("/var/run/netns")
_PREFIX = "mh"
_BRIDGE = "bridge0"
_NOBODY = "02:00:00:00:de:ad"
"""A hardware address that no host has: what is sent there is carried by the bridge and taken by nobody."""
_CLONE_NEWNET = 0x40000000
_SET_NAME = 'echo "$1" > /proc/sys/kernel/hostname && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
_GOODBYE_S = 2.0
_numbers = itertools.count()


class Host:
    """One machine of a rig, or its client: the namespace that the tests themselves are in."""

    def __init__(self, rig: Hosts, name: str, namespace: str | None, interface: str, index: int, *, ipv6_only: bool) -> None:
        self.name = name
        self.ip = "" if ipv6_only else f"10.77.{rig.number}.{index}"
        """Its IPv4 address; "" when it has none."""
        self.ip6 = f"fd77:{rig.number:x}::{index:x}"
        self.interface = interface
        self.namespace = namespace
        """Name of its network namespace; None for the client."""
        self._rig = rig
        self._identity: tuple[str, ...] = ()
        self._delay: FrameDelay | None = None
        self._undo: dict[str, Callable[[], None]] = {}

    @property
    def prefix(self) -> tuple[str, ...]:
        """What in front of a command makes it run on this host, as the same process."""
        if self.namespace is None:
            return ()
        return ("nsenter", f"--net={_NAMESPACES / self.namespace}", "--", *self._identity)

    def url(self, port: int, scheme: str = "tcp") -> str:
        """The address of a port of this host; IPv6 where it has nothing else."""
        return f"{scheme}://{self.ip or f'[{self.ip6}]'}:{port}"

    def run(self, command: str | Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program on this host: Python source, or a command and its arguments. The caller waits for it."""
        argv = [sys.executable, "-c", command] if isinstance(command, str) else command
        return subprocess.Popen([*self.prefix, *argv], **options)

    def rename(self, hostname: str, names: Mapping[str, str]) -> None:
        """From now on programs here see this host name, and an /etc/hosts of `localhost` and `names` (name to address)."""
        table = self._rig.folder / f"{self.name}.hosts"
        entries = {"localhost": "127.0.0.1", **names}
        table.write_text("".join(f"{address} {name}\n" for name, address in entries.items()))
        self._identity = ("unshare", "--uts", "--mount", "sh", "-c", _SET_NAME, "sh", hostname, str(table))

    # --- its link ------------------------------------------------------------------------------------------------

    def link_down(self) -> None:
        """Pull the cable at the bridge: the interface here loses its carrier and keeps its addresses."""
        _ip("link", "set", self._port, "down", namespace=self._rig.bridge)
        self._undo["link"] = self.link_up

    def link_up(self) -> None:
        """Plug it in again."""
        _ip("link", "set", self._port, "up", namespace=self._rig.bridge)

    def limit(self, rate: str, burst: str = "32kb", latency: str = "50ms") -> None:
        """At most `rate` (`20mbit`) each way, by a token bucket; what would wait longer than `latency` is dropped."""
        for namespace, device in self._both_ends():
            _tc("qdisc", "replace", "dev", device, "root", "tbf", "rate", rate, "burst", burst, "latency", latency, namespace=namespace)
        self._undo["limit"] = self.unlimit

    def unlimit(self) -> None:
        """Take the limit away."""
        for namespace, device in self._both_ends():
            subprocess.run(_command("tc", ["qdisc", "del", "dev", device, "root"], namespace), stderr=subprocess.DEVNULL)

    def delay(self, milliseconds: float) -> None:
        """Every frame to and from this host takes so much longer; 0 takes the delay away."""
        if self._delay is not None:
            _ip("link", "set", self._port, "master", _BRIDGE, namespace=self._rig.bridge)
            self._delay.close()
            self._delay = None
        if milliseconds:
            with inside(self._rig.bridge):
                self._delay = FrameDelay(f"{self.name}-in", f"{self.name}-out", milliseconds / 1000)
            own = f"{self.name}-bridge"
            _batch(
                [
                    *([] if own in _devices(self._rig.bridge) else [f"link add name {own} type bridge mcast_snooping 0"]),
                    f"link set {own} up",
                    f"link set {self.name}-in master {own} up",
                    f"link set {self.name}-out master {_BRIDGE} up",
                    f"link set {self._port} master {own}",
                ],
                self._rig.bridge,
            )
            self._undo["delay"] = lambda: self.delay(0)

    def drop(self, address: str) -> None:
        """What this host sends to `address` vanishes without a word, whether that address exists or not."""
        _ip("neigh", "replace", address, "lladdr", _NOBODY, "dev", self.interface, "nud", "permanent", namespace=self.namespace)
        self._undo[f"drop {address}"] = lambda: self.undrop(address)

    def undrop(self, address: str) -> None:
        """Packets to `address` arrive again."""
        subprocess.run(_command("ip", ["neigh", "del", address, "dev", self.interface], self.namespace), stderr=subprocess.DEVNULL)

    def add_default_route(self) -> None:
        """Route what is on no other network to the client, which has no way on: it vanishes there. Not for the client itself."""
        if self.namespace is None:
            raise ValueError("the client's default route is that of the machine")
        gateways = [gateway for gateway in (self.ip and self._rig.client.ip, self._rig.client.ip6) if gateway]
        _batch([f"route replace default via {gateway}" for gateway in gateways], self.namespace)
        self._undo["route"] = lambda: _batch([f"route del default via {gateway}" for gateway in gateways], self.namespace)

    def sent_bytes(self) -> int:
        """What this host has sent so far, with all headers."""
        (link,) = json.loads(_ip("-json", "-s", "link", "show", "dev", self.interface, namespace=self.namespace))
        return int(link["stats64"]["tx"]["bytes"])

    def mend(self) -> None:
        """Undo everything above but the name."""
        while self._undo:
            self._undo.popitem()[1]()

    def pids(self) -> list[int]:
        """Processes in this host's namespace; none for the client."""
        return [] if self.namespace is None else _pids(self.namespace)

    @property
    def _port(self) -> str:
        return f"p-{self.name}"

    def _both_ends(self) -> list[tuple[str | None, str]]:
        return [(self.namespace, self.interface), (self._rig.bridge, self._port)]

    def __repr__(self) -> str:
        return f"<host {self.name} {self.ip or self.ip6}>"


class Hosts:
    """Some hosts on one network. Use as a context manager: its end kills what runs on them and removes them."""

    def __init__(self, names: Sequence[str] = ("a", "b", "c", "d"), *, ipv6_only: Sequence[str] = ()) -> None:
        sweep()
        owner = f"{_PREFIX}-{os.getpid()}-{_start_time(os.getpid())}-{next(_numbers)}"
        self._folder = tempfile.TemporaryDirectory(prefix="hosts-")
        self.folder = Path(self._folder.name)
        self.bridge = f"{owner}-bridge"
        """The namespace of the bridge."""
        self.number = 0
        """N of the addresses."""
        self.client: Host
        self._hosts: list[Host] = []
        self._namespaces = [self.bridge, *(f"{owner}-{name}" for name in names)]
        try:
            _batch([f"netns add {namespace}" for namespace in self._namespaces])
            self.number = self._claim_number()
            self.client = Host(self, "client", None, f"{_PREFIX}{self.number}", 254, ipv6_only=False)
            self._hosts = [
                Host(self, name, f"{owner}-{name}", "eth0", index, ipv6_only=name in ipv6_only) for index, name in enumerate(names, 1)
            ]
            self._connect()
        except BaseException:
            self.close()
            raise

    def _claim_number(self) -> int:
        for number in random.sample(range(1, 255), 254):
            link = f"{_PREFIX}{number}"
            arguments = ["link", "add", link, "type", "veth", "peer", "name", "p-client", "netns", self.bridge]
            done = subprocess.run(_command("ip", arguments, None), capture_output=True, text=True)
            if done.returncode == 0:
                return number
            if "exists" not in done.stderr:
                raise RuntimeError(f"{' '.join(arguments)}: {done.stderr.strip()}")
        raise RuntimeError("254 rigs on this machine are too many")

    def _connect(self) -> None:
        everyone = [self.client, *self._hosts]
        _batch([f"link add name p-{host.name} netns {self.bridge} type veth peer name eth0 netns {host.namespace}" for host in self._hosts])
        ports = [f"link set p-{host.name} master {_BRIDGE} up" for host in everyone]
        _batch([f"link add name {_BRIDGE} type bridge mcast_snooping 0", f"link set {_BRIDGE} up", *ports], self.bridge)
        for host in everyone:
            with inside(host):  # no second's wait until a link-local address can be bound
                Path(f"/proc/sys/net/ipv6/conf/{host.interface}/accept_dad").write_text("0")
            ipv4 = [f"address add {host.ip}/24 dev {host.interface}"] if host.ip else []
            ipv6 = [f"address add {host.ip6}/64 dev {host.interface} nodad"]
            _batch(["link set lo up", *ipv4, *ipv6, f"link set {host.interface} up"], host.namespace)

    @overload
    def __getitem__(self, index: int | str) -> Host: ...
    @overload
    def __getitem__(self, index: slice) -> list[Host]: ...
    def __getitem__(self, index: int | str | slice) -> Host | list[Host]:
        """The host with a name or number; the client is not one of them."""
        if isinstance(index, str):
            return next(host for host in self._hosts if host.name == index)
        return self._hosts[index]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return len(self._hosts)

    def free_address(self) -> str:
        """An IPv4 address of this network that no host has: see `Host.drop`."""
        return f"10.77.{self.number}.99"

    def cut(self, left: Host, right: Host) -> None:
        """What these two send to each other vanishes, in both directions and both families; everybody else is reached."""
        for sender, receiver in ((left, right), (right, left)):
            for address in filter(None, (receiver.ip, receiver.ip6)):
                sender.drop(address)

    def mend(self) -> None:
        """All links as they were in the beginning."""
        for host in (self.client, *self._hosts):
            host.mend()

    def close(self) -> list[str]:
        """Remove everything; the commands of programs that still ran on the hosts, which are killed."""
        left: list[str] = []
        with ExitStack() as stack:  # each of these, whatever the others raise
            stack.callback(self._folder.cleanup)
            for namespace in self._namespaces:
                stack.callback(_remove, namespace)
            if self.number:
                stack.callback(subprocess.run, _command("ip", ["link", "del", f"{_PREFIX}{self.number}"], None), stderr=subprocess.DEVNULL)
            for host in self._hosts:
                if host._delay is not None:
                    stack.callback(host._delay.close)
            for namespace in self._namespaces:
                left += _kill_all(namespace)
        return left

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def inside(host: Host | str) -> Iterator[None]:
    """The calling thread is on `host` (or in the namespace of that name) for the block.

    Sockets that are made in it stay there, and threads that are started in it too.
    """
    namespace = host.namespace if isinstance(host, Host) else host
    if namespace is None:
        yield
        return
    with open("/proc/thread-self/ns/net") as home, open(_NAMESPACES / namespace) as there:
        _enter(there.fileno())
        try:
            yield
        finally:
            _enter(home.fileno())


def start_script_in(host: Host, source: str, **options: Any) -> Run:
    """`script.start_script` on a host."""
    return start_script(source, prefix=host.prefix, **options)


def run_script_in(host: Host, source: str, **options: Any) -> CompletedRun:
    """`script.run_script` on a host."""
    return run_script(source, prefix=host.prefix, **options)


def why_not() -> str:
    """Why there can be no hosts on this machine; "" where there can."""
    missing = [name for name in ("ip", "tc", "nsenter", "unshare") if shutil.which(name) is None]
    if missing:
        return f"network namespaces need {', '.join(missing)} (Debian: iproute2, util-linux)"
    probe = f"{_PREFIX}-{os.getpid()}-{_start_time(os.getpid())}-probe"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    _remove(probe)
    return f"network namespaces are not allowed here: {done.stderr.strip()}" if done.returncode else ""


def sweep() -> None:
    """Remove what test processes that are dead have left, with everything that still runs there."""
    for namespace in _names():
        pid, start = namespace.split("-")[1:3]
        if _start_time(int(pid)) != start:
            _kill_all(namespace)
            _remove(namespace)


def own_namespaces() -> list[str]:
    """Namespaces that this process has made and not removed."""
    return [name for name in _names() if name.split("-")[1:3] == [str(os.getpid()), _start_time(os.getpid())]]


def _names() -> list[str]:
    return sorted(path.name for path in _NAMESPACES.glob(f"{_PREFIX}-*-*-*"))


def _start_time(pid: int) -> str:
    """Ticks since boot at which a process started: with its pid, an identity; "" when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _enter(namespace: int) -> None:
    if sys.version_info >= (3, 12):
        os.setns(namespace, os.CLONE_NEWNET)
        return
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _pids(namespace: str) -> list[int]:
    done = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
    return [int(pid) for pid in done.stdout.split()]


def _kill_all(namespace: str) -> list[str]:
    """Kill what runs in a namespace and wait for its end; the commands."""
    left: dict[int, str] = {}
    deadline = time.monotonic() + _GOODBYE_S
    while (pids := _pids(namespace)) and time.monotonic() < deadline:
        for pid in pids:
            try:
                left.setdefault(pid, Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip())
                os.kill(pid, signal.SIGKILL)
            except OSError:  # it has gone
                continue
        time.sleep(0.01)
    return [f"pid {pid}: {command}" for pid, command in left.items()]


def _remove(namespace: str) -> None:
    subprocess.run(["ip", "netns", "del", namespace], stderr=subprocess.DEVNULL)


def _devices(namespace: str) -> set[str]:
    return {link["ifname"] for link in json.loads(_ip("-json", "link", "show", namespace=namespace))}


def _ip(*arguments: str, namespace: str | None) -> str:
    return _run(_command("ip", arguments, namespace))


def _tc(*arguments: str, namespace: str | None) -> str:
    return _run(_command("tc", arguments, namespace))


def _batch(lines: Sequence[str], namespace: str | None = None) -> None:
    _run(_command("ip", ["-batch", "-"], namespace), "\n".join(lines) + "\n")


def _command(program: str, arguments: Sequence[str], namespace: str | None) -> list[str]:
    return [program, *(["-n", namespace] if namespace else []), *arguments]


def _run(command: list[str], text: str = "") -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}\n{text}")
    return done.stdout
