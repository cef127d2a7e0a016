"""Interfaces of this machine: where to listen, and under which address others find it.

Rules of this file:
    1. What the script says wins: an alias, an IP address, a name that leads to this machine's network.
    2. What the script leaves open (`*`, a name that leads to loopback) becomes the address that the default route would use,
       and whoever asked gets a sentence about it for the log.
    3. Every failure names the address and, where the kernel knows, who is in the way.

Read next: `resolver.py` for other machines' names, `_base/addresses.py` for the text of addresses.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import sys
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from monarch._base.addresses import WILDCARDS, Address, WorkerAddress, is_ip, parse_address
from monarch._base.errors import explain
from monarch._net.resolver import Target, resolve_within

_BACKLOG = 4096
_NAME_BUDGET_S = 5.0
"""How long the name of this machine may take to resolve: it is in a file of its own, or else of no use."""
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
_ELSEWHERE = {socket.AF_INET: "203.0.113.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses reserved for documentation: no machine has them, so the way there is the default route. Nothing is sent."""
_NO_FAMILY = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT)
_OTHER_PORT = "another port, from 1024 on; 0 takes any free one"


class LocalAddress(NamedTuple):
    """An address of an interface that is up."""

    interface: str
    host: str
    """IPv4, or IPv6 with its interface (`%eth0`) where it means nothing without."""
    loopback: bool
    link_local: bool

    def __str__(self) -> str:
        return f"{self.host} ({self.interface})"


class Primary(NamedTuple):
    """The address under which other machines most likely reach this one."""

    host: str
    origin: str
    """How it was found, for people: `eth0, the interface of the default route`."""


# --- listening -------------------------------------------------------------------------------------------------------


def listen_on(bound: Address, *, backlog: int = _BACKLOG) -> socket.socket:
    """A non-blocking TCP socket that listens at a tcp or tls address; the caller owns it.

    `*` and `[::]` take IPv6 and IPv4. A name is bound where it leads to; this machine's own name, where it leads to loopback or
    nowhere, binds all interfaces. `fdN` takes over that descriptor.

    Raises:
        RuntimeError: it cannot be bound; the text says who has the port, or which addresses there are.

    Cost: blocks for up to 5 s where a host name has to be resolved.
    """
    if bound.fd is not None:
        return _adopt(bound.fd, bound)
    failure: OSError | None = None
    for family, sockaddr in _places(bound):
        try:
            return _listener(family, sockaddr, backlog)
        except OSError as exc:
            failure = failure or exc
            if exc.errno not in _NO_FAMILY:
                break
    raise _cannot_listen(bound, failure or OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))) from failure


def _places(bound: Address) -> list[Target]:
    """Where to try to bind, in order."""
    if bound.host == "*":
        return _everywhere(bound.port)
    if bound.is_wildcard:
        return [place for place in _everywhere(bound.port) if place[1][0] == bound.host]
    try:
        targets = resolve_within(bound, _NAME_BUDGET_S)
    except OSError as exc:
        if not _is_own_name(bound.host):
            raise RuntimeError(explain(f"cannot listen at {bound}", where=str(exc).splitlines()[0], next=_choose_local(bound))) from exc
        targets = []
    if not is_ip(bound.host):
        if _is_own_name(bound.host) and all(map(_leads_to_loopback, targets)):
            return _everywhere(bound.port)
        targets.sort(key=_leads_to_loopback)
    return targets


def _everywhere(port: int) -> list[Target]:
    return [(socket.AF_INET6, ("::", port, 0, 0)), (socket.AF_INET, ("0.0.0.0", port))]


def _listener(family: int, sockaddr: tuple[Any, ...], backlog: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if sys.platform != "win32":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a listener that was killed leaves its port waiting
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if sockaddr[0] == "::" else 1)
        sock.bind(sockaddr)
        sock.listen(backlog)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _adopt(fd: int, bound: Address) -> socket.socket:
    fault = _fault_of_descriptor(fd)
    if fault:
        raise RuntimeError(
            explain(
                f"cannot listen at {bound}: descriptor {fd} {fault}",
                next="bind and listen in the parent process, and let this one inherit it: subprocess.Popen(..., pass_fds=[fd])",
            )
        )
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    sock.setblocking(False)
    return sock


def _fault_of_descriptor(fd: int) -> str:
    """What keeps a descriptor from being a listening TCP socket; "" when it is one."""
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        return "is not open"
    if not stat.S_ISSOCK(mode):
        return "is not a socket"
    probe = socket.socket(fileno=os.dup(fd))
    with probe:
        if probe.family not in (socket.AF_INET, socket.AF_INET6) or probe.type != socket.SOCK_STREAM:
            return f"is not a TCP socket, but {probe.family.name} {probe.type.name}"
        try:
            listening = probe.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        except OSError:  # some systems cannot tell
            return ""
        if listening:
            return ""
        return "is a connected socket, not a listening one" if _has_peer(probe) else "is a TCP socket that does not listen"


def _has_peer(sock: socket.socket) -> bool:
    try:
        sock.getpeername()
    except OSError:
        return False
    return True


def _cannot_listen(bound: Address, failure: OSError) -> RuntimeError:
    what = f"cannot listen at {bound}"
    if failure.errno == errno.EADDRINUSE:
        from monarch._net.port_holders import port_holder

        holder = port_holder(bound.port) or "held by a process of another user or container"
        return RuntimeError(explain(f"{what}: port {bound.port} is in use", where=holder, next=f"end it, or choose {_OTHER_PORT}"))
    if failure.errno in (errno.EACCES, errno.EPERM):
        return RuntimeError(explain(f"{what}: this user may not bind port {bound.port}", next=f"choose {_OTHER_PORT}"))
    if failure.errno in _NO_FAMILY:
        return RuntimeError(explain(f"{what}: this machine has no such address", where=_local_hosts(), next=_choose_local(bound)))
    return RuntimeError(explain(f"{what}: {failure.strerror}", next=_choose_local(bound)))


def _local_hosts() -> str:
    return "its addresses are " + ", ".join(str(local) for local in local_addresses())


def _choose_local(bound: Address) -> str:
    url = f"{bound.scheme}://"
    return f"bind one of this machine's addresses, or all with {url}*:port; to advertise another: {url}dialled:port@{url}bound:port"


# --- advertising -----------------------------------------------------------------------------------------------------


def advertised_address(worker: WorkerAddress, sock: socket.socket) -> tuple[Address, str]:
    """What others dial to reach `sock`, which `listen_on(worker.bound)` gave, and a remark for the log.

    Returns:
        The address with the port that `sock` really has; "" or a sentence that says what was chosen and why.

    Cost: blocks as `listen_on` where a host name has to be resolved.
    """
    wanted = worker.advertised
    address = wanted._replace(port=wanted.port or sock.getsockname()[1], fd=None)
    if worker.is_alias or (is_ip(wanted.host) and not wanted.is_wildcard):
        return address, ""
    if wanted.is_wildcard:
        own = str(sock.getsockname()[0])
        if own not in WILDCARDS:  # an inherited socket
            return address._replace(host=own), ""
        return _advertise_primary(address, sock, "all interfaces are bound")
    elsewhere = _where_own_name_leads(wanted)
    if elsewhere is None:
        return address, ""
    return _advertise_primary(address, sock, f"{wanted.host!r} is this machine's own name but {elsewhere}, which others cannot dial")


def _advertise_primary(address: Address, sock: socket.socket, reason: str) -> tuple[Address, str]:
    primary = primary_interface(_families_of(sock, address.host))
    chosen = address._replace(host=primary.host)
    return chosen, f"{reason}; {chosen.url} is advertised ({primary.origin})"


def _families_of(sock: socket.socket, host: str) -> tuple[socket.AddressFamily, ...]:
    """The families that `sock` serves, those that `host` stands for first."""
    if sock.family == socket.AF_INET:
        return (socket.AF_INET,)
    if sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY):
        return (socket.AF_INET6,)
    return (socket.AF_INET6, socket.AF_INET) if host == "::" else (socket.AF_INET, socket.AF_INET6)


def _where_own_name_leads(address: Address) -> str | None:
    """Why this machine's own name is of no use to others, for people; None when it is, or when it is another name."""
    if not _is_own_name(address.host):
        return None
    try:
        targets = resolve_within(address, _NAME_BUDGET_S)
    except OSError:
        return "resolves to nothing here"
    hosts = list(dict.fromkeys(str(target[1][0]) for target in targets))
    return f"resolves to {', '.join(hosts)} here" if all(map(_leads_to_loopback, targets)) else None


def own_address(scheme: Literal["tcp", "tls"], port: int = 0, *, reach: Literal["network", "loopback"] = "network") -> Address:
    """Where a process listens that was told a transport and no address: at this machine's host name, or on loopback only."""
    if reach == "loopback":
        return Address(scheme, "127.0.0.1", port)
    try:
        return parse_address(f"{scheme}://{socket.gethostname()}:{port}")
    except ValueError:  # host names are free text: "Anna's laptop", "12345"
        return Address(scheme, "*", port)


def is_loopback(address: Address) -> bool:
    """Whether only processes of this machine can dial it. A name is not looked up: only `localhost` counts."""
    if not address.is_network:
        return True
    host = address.host.removesuffix(".")
    return host in ("localhost", "::1") or host.endswith(".localhost") or (is_ip(host) and host.startswith("127."))


def _leads_to_loopback(target: Target) -> bool:
    return is_loopback(Address("tcp", str(target[1][0]).removeprefix("::ffff:")))


def _is_own_name(host: str) -> bool:
    """Whether `host` is this machine's name, with or without a domain."""
    own = socket.gethostname().lower()
    return not is_ip(host) and own != "localhost" and host.partition(".")[0] == own.partition(".")[0]


# --- interfaces ------------------------------------------------------------------------------------------------------


def primary_address(families: tuple[socket.AddressFamily, ...] = (socket.AF_INET, socket.AF_INET6)) -> str:
    """The address of this machine that others most likely reach; loopback when it has no other."""
    return primary_interface(families).host


def primary_interface(families: tuple[socket.AddressFamily, ...] = (socket.AF_INET, socket.AF_INET6)) -> Primary:
    """`primary_address` with how it was found: by the default route of the first family that has one, else the first interface."""
    local = [address for address in local_addresses() if not address.loopback]
    for family in families:
        host = _source_towards(family)
        if host is not None and not is_loopback(Address("tcp", host)):
            name = next((address.interface for address in local if address.host == host), "no interface")
            return Primary(host, f"{name}, the interface of the default route")
    for family in families:
        for address in local:
            if not address.link_local and (":" in address.host) == (family == socket.AF_INET6):
                return Primary(address.host, f"{address.interface}, the first interface; there is no default route")
    return Primary("127.0.0.1" if socket.AF_INET in families else "::1", "there is no other interface, so other machines cannot dial it")


def _source_towards(family: socket.AddressFamily) -> str | None:
    """What the kernel would put into a packet to somewhere far away."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((_ELSEWHERE[family], 9))
            return str(sock.getsockname()[0])
    except OSError:
        return None


def local_addresses() -> list[LocalAddress]:
    """Every address of the interfaces that are up, in the kernel's order.

    Source: getifaddrs(3), whose structures Linux, macOS and the BSDs share but for the family's place in a socket address.
    """
    import ctypes  # 10 ms that only a listener pays

    class Entry(ctypes.Structure):
        pass

    Entry._fields_ = [
        ("next", ctypes.POINTER(Entry)),
        ("name", ctypes.c_char_p),
        ("flags", ctypes.c_uint),
        ("address", ctypes.c_void_p),
    ]
    libc = ctypes.CDLL(None, use_errno=True)
    head = ctypes.POINTER(Entry)()
    if libc.getifaddrs(ctypes.byref(head)):
        raise OSError(ctypes.get_errno(), f"getifaddrs: {os.strerror(ctypes.get_errno())}")
    try:
        return list(_local_addresses(head))
    finally:
        libc.freeifaddrs(head)


def _local_addresses(entry: Any) -> Iterator[LocalAddress]:
    while entry:
        fields = entry.contents
        if fields.address and fields.flags & _IFF_UP:
            name = fields.name.decode(errors="replace")
            host = _host_of(fields.address, name)
            if host is not None:
                yield LocalAddress(name, host, bool(fields.flags & _IFF_LOOPBACK), host.startswith(("169.254.", "fe80:")))
        entry = fields.next


def _host_of(sockaddr: int, interface: str) -> str | None:
    """The text of a C socket address; None for other families than IPv4 and IPv6."""
    import ctypes

    head = ctypes.string_at(sockaddr, 2)
    family = head[1] if sys.platform == "darwin" or "bsd" in sys.platform else int.from_bytes(head, sys.byteorder)
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, ctypes.string_at(sockaddr + 4, 4))
    if family == socket.AF_INET6:
        host = socket.inet_ntop(socket.AF_INET6, ctypes.string_at(sockaddr + 8, 16))
        return f"{host}%{interface}" if host.startswith("fe80:") else host
    return None
