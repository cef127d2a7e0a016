"""Addresses: where something listens, as text that people write and as parts that programs use.

    ipc:///run/w.sock   ipc://@name                  Unix socket: a file, or a name of Linux's abstract namespace
    tcp://node7:26600   tcp://10.0.0.7:0             TCP: a host name, IPv4 or [IPv6]; port 0 is any free one
    tcp://*:26600       tcp://node7:fd3              all interfaces; a listening socket that was inherited as descriptor 3
    tls://node7:26600                                as tcp://, encrypted
    inproc://3                                       inside this process
    worker<3kW...>@tcp://node7:26600                 the same, if the service there has this id
    tcp://gate:7000@tcp://10.0.0.7:26600             an alias: others dial the first, the second is bound

Pure: no I/O. `_net/interfaces.py` binds, resolves, and chooses what is advertised.

Rules of this file:
    1. `str(parse_address(text))` is canonical: addresses that mean the same parts have the same text.
    2. Malformed text raises ValueError and nothing else; a transport that is known but not made, NotImplementedError.

Read next: `_net/interfaces.py`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from monarch._base.errors import did_you_mean, explain

SCHEMES = ("ipc", "tcp", "tls", "inproc")
DEFAULT_SERVICE = "service"
"""What a host agent is called when its address names nobody."""
WILDCARDS = ("*", "0.0.0.0", "::")
_NOT_MADE = ("metatls", "quic", "metaquic")
_NUMBER = re.compile(r"[0-9]{1,18}")
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_SERVICE = re.compile(r"(?:[A-Za-z0-9_-]+|(?=<))(?:<[1-9A-Za-z]+>)?")
_MOST_HOST_CHARACTERS = 253
_MOST_PORT = 65535
_MOST_FD = (1 << 31) - 1


class Address(NamedTuple):
    """One address in its parts; `str()` gives its canonical text."""

    scheme: str
    """One of `SCHEMES`."""
    host: str = ""
    """Host name in lower case, IPv4 or IPv6 without brackets, `*` for all interfaces; "" for ipc and inproc."""
    port: int = 0
    """0 to 65535; 0 stands for any free port, and where `fd` is given."""
    fd: int | None = None
    """Descriptor of a listening socket that this process has inherited."""
    path: str = ""
    """ipc: path of the socket file, or `@name`; inproc: the number."""
    service: str = ""
    """Id that the service there must have; "" for whoever serves."""

    def __str__(self) -> str:
        return f"{self.service}@{self.url}" if self.service else self.url

    @property
    def url(self) -> str:
        """The canonical text without the service id."""
        return f"{self.scheme}://{self._rest}"

    @property
    def is_network(self) -> bool:
        """Whether other machines can be meant: tcp and tls."""
        return self.scheme in ("tcp", "tls")

    @property
    def is_wildcard(self) -> bool:
        """Whether it stands for every interface of a machine; such an address can be bound, not dialled."""
        return self.host in WILDCARDS

    @property
    def _rest(self) -> str:
        if not self.is_network:
            return self.path
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port if self.fd is None else f'fd{self.fd}'}"


class WorkerAddress(NamedTuple):
    """What others dial and what is bound; both are the same unless the text was an alias."""

    advertised: Address
    bound: Address

    def __str__(self) -> str:
        return str(self.advertised) if self.advertised == self.bound else f"{self.advertised}@{self.bound.url}"

    @property
    def is_alias(self) -> bool:
        """Whether the script itself says what is advertised."""
        return self.advertised != self.bound


def parse_address(text: str) -> Address:
    """The parts of an address.

    Raises:
        ValueError: malformed; the text says which part.
        NotImplementedError: a transport that exists elsewhere only, such as `quic://`.
    """
    service, url = _split_service(text)
    return _parse_url(url, text)._replace(service=service)


def parse_worker_address(text: str) -> WorkerAddress:
    """What a worker advertises and binds: one address for both, or an alias `<dialled>@<bound>`.

    Raises:
        ValueError: malformed, or halves that do not belong together.
        NotImplementedError: as `parse_address`.
    """
    service, url = _split_service(text)
    dialled, at, bound = url.partition("@")
    if not at or not dialled.startswith(("tcp://", "tls://")):
        address = parse_address(text)
        return WorkerAddress(address, address)
    halves = WorkerAddress(*(_parse_url(half, text)._replace(service=service) for half in (dialled, bound)))
    if halves.advertised.scheme != halves.bound.scheme:
        raise _malformed(text, "both halves of an alias must have the same scheme")
    if halves.advertised.is_wildcard or halves.advertised.fd is not None:
        raise _malformed(text, f"{dialled!r}, in front of the '@', is what others dial: a host and a port")
    return halves


def parse_dialled_address(text: str) -> Address:
    """What a client dials to reach a worker.

    Raises:
        ValueError: malformed, or an address that can be bound only.
        NotImplementedError: as `parse_address`.
    """
    address = parse_worker_address(text).advertised
    if address.is_network and (address.is_wildcard or address.fd is not None or not address.port):
        what = "every interface" if address.is_wildcard else "any free port" if address.fd is None else "a socket of the worker"
        raise ValueError(
            explain(f"{text!r} can't be dialled: it stands for {what}", next="give the host, and the port, that the worker's log shows")
        )
    return address


def native_spelling(address: Address) -> str:
    """The short form that ids and logs show: `tcp:10.0.0.7:26600`, `unix:@name`, `local:3`."""
    kind = {"ipc": "unix", "inproc": "local"}.get(address.scheme, address.scheme)
    service = f"{address.service}@" if address.service else ""
    return f"{service}{kind}:{address._rest}"


def is_ip(host: str) -> bool:
    """Whether `host` is an address and not a name."""
    return ":" in host or _is_dotted_number(host)


def canonical_service(text: str) -> str | None:
    """The id of a service as addresses carry it, "" for the default one; None when `text` is no id."""
    if not _SERVICE.fullmatch(text):
        return None
    return "" if text == DEFAULT_SERVICE else text


def _malformed(text: str, reason: str = "") -> ValueError:
    return ValueError(
        explain(
            f"invalid worker address {text!r}; expected a channel URL such as 'tcp://host:4444' or a ProcAddr such as "
            "'service<…>@tcp://host:4444'",
            where=reason,
        )
    )


def _split_service(text: str) -> tuple[str, str]:
    """The id in front of a URL. An alias and the name of a Unix socket have a "@" as well, but behind a "://"."""
    head, at, url = text.partition("@")
    if not at or "://" in head:
        return "", text
    service = canonical_service(head)
    if service is None:
        raise _malformed(text, f"{head!r} is not the id of a service")
    return service, url


def _parse_url(url: str, text: str) -> Address:
    """The parts of `url`, which is all or a part of the address `text` that errors show."""
    scheme, separator, rest = url.partition("://")
    if not separator or not rest:
        raise _malformed(text)
    if scheme in _NOT_MADE:
        made = ", ".join(f"{name}://" for name in SCHEMES)
        raise NotImplementedError(explain(f"there is no transport for {text!r}; there are {made}", next="use tls:// for encryption"))
    if scheme == "ipc":
        return Address("ipc", path=_checked_path(text, rest))
    if scheme == "inproc":
        return Address("inproc", path=str(_checked_number(text, rest, "port of this process")))
    if scheme in ("tcp", "tls"):
        return Address(scheme, *_split_socket(text, rest))
    raise _malformed(text, f"scheme {scheme!r} is unknown{did_you_mean(scheme, SCHEMES)}")


def _split_socket(text: str, rest: str) -> tuple[str, int, int | None]:
    host, colon, port = rest.rpartition(":")
    if not colon or (":" in host and not host.startswith("[")):
        raise _malformed(text, f"{rest!r} is not 'host:port'; an IPv6 address stands in brackets, as in [::1]:4444")
    if port.startswith("fd"):
        return _checked_host(text, host), 0, _checked_number(text, port[2:], "descriptor", _MOST_FD)
    return _checked_host(text, host), _checked_number(text, port, "port", _MOST_PORT), None


def _checked_number(text: str, digits: str, what: str, most: int | None = None) -> int:
    if not _NUMBER.fullmatch(digits) or (most is not None and int(digits) > most):
        limit = "" if most is None else f" from 0 to {most}"
        raise _malformed(text, f"{what} {digits!r} is not a number{limit}")
    return int(digits)


def _checked_path(text: str, path: str) -> str:
    if "\0" in path or not (path.startswith("/") or (path.startswith("@") and len(path) > 1)):
        raise _malformed(text, f"{path!r} is neither an absolute path nor '@' and a name")
    return path


def _checked_host(text: str, host: str) -> str:
    if host == "*":
        return host
    if host.startswith("[") and host.endswith("]"):
        return _checked_ipv6(text, host[1:-1])
    if _is_dotted_number(host):
        return _checked_ipv4(text, host)
    name = host.lower() if host.isascii() else ""
    if len(name) > _MOST_HOST_CHARACTERS or not all(map(_LABEL.fullmatch, name.removesuffix(".").split("."))):
        raise _malformed(text, f"{host!r} is not a host name")
    return name


def _is_dotted_number(host: str) -> bool:
    # As in URLs: a last label of digits makes it an address, so that "10.0.0" is a mistake and not a name to look up.
    return host.rpartition(".")[2].isdigit()


def _checked_ipv4(text: str, host: str) -> str:
    parts = host.split(".")
    if len(parts) != 4 or not all(_NUMBER.fullmatch(part) and str(int(part)) == part and int(part) < 256 for part in parts):
        raise _malformed(text, f"{host!r} is not an IPv4 address")
    return host


def _checked_ipv6(text: str, host: str) -> str:
    import ipaddress  # only for what is written in brackets

    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:
        raise _malformed(text, f"{host!r} is not an IPv6 address") from None
    if address.scope_id is not None and not re.fullmatch(r"[A-Za-z0-9_.-]{1,15}", address.scope_id):
        raise _malformed(text, f"{address.scope_id!r} is not the name of an interface")
    # One spelling for both: Python versions print the mapped form differently, and a socket dials the same.
    return str(address.ipv4_mapped or address)
