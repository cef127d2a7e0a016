"""Identities of procs and actors, and the addresses that lead to them.

Rules of this file:
    1. The random part comes from the kernel (`os.urandom`), so forked processes never repeat each other's ids. Only a
       universe of `monarch.testing` draws from a seed, to repeat itself.
    2. Whoever creates a thing chooses its id *and* address before it exists. A reference is therefore complete from
       the start, and nobody ever waits in order to pickle one.

Read next: `_wire/messages.py` for the messages that carry them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_AGENT = "host@"
GATEWAY_ONLY = "gateway://"
"""Scheme of the addresses of a client, and of its host, that only its gateway reaches."""
_TEXT = re.compile(r"(?P<label>[^<>@.]*)(?:<(?P<random>[1-9A-Za-z]+)>)?")
_PROC = r"[1-9A-Za-z]{12}\.[0-9]+"
_FILE_OF_PROC = re.compile(rf"(?P<agent>.+)\.d/(?P<name>{_PROC})", re.DOTALL)

_entropy: Callable[[int], bytes] = os.urandom


def draw_ids_from(source: Callable[[int], bytes]) -> Callable[[int], bytes]:
    """Take the random bytes of new ids from `source(count)`; the source before."""
    global _entropy
    before, _entropy = _entropy, source
    return before


def random_id() -> str:
    """Twelve characters, 70 bits, from the kernel's generator."""
    number = int.from_bytes(_entropy(9), "little")
    out = []
    for _ in range(12):
        number, digit = divmod(number, 58)
        out.append(_ALPHABET[digit])
    return "".join(out)


def sanitize_label(name: str) -> str:
    """`name` as an identity label: lower case, only `[a-z0-9-_]`, starts with a letter, at most 63 characters; "nil" if empty."""
    label = re.sub(r"[^a-z0-9_-]", "", name.lower())
    label = re.sub(r"^[^a-z]+|[^a-z0-9]+$", "", label)[:63]
    return re.sub(r"[^a-z0-9]+$", "", label) or "nil"


class Uid:
    """Identity of an actor or proc: a random instance (`label<random>` or `<random>`) or a bare singleton name."""

    __slots__ = ("_label", "_random")

    def __init__(self, label: str, random: str) -> None:
        self._label = label
        self._random = random

    @staticmethod
    def anonymous() -> Uid:
        """A fresh instance id without a label."""
        return Uid("", random_id())

    @staticmethod
    def instance(label: str | None = None) -> Uid:
        """A fresh instance id; the label is sanitised."""
        return Uid("" if label is None else sanitize_label(label), random_id())

    @staticmethod
    def from_string(text: str) -> Uid:
        """Parse `label<random>`, `<random>` or a singleton name; ValueError otherwise."""
        match = _TEXT.fullmatch(text)
        if match is None or not text:
            raise ValueError(f"invalid uid {text!r}; expected 'label<random>', '<random>' or a name")
        return Uid(match["label"], match["random"] or "")

    @property
    def label(self) -> str | None:
        """The human part; None when there is none."""
        return self._label or None

    @property
    def is_instance(self) -> bool:
        """True for an id with a random part."""
        return bool(self._random)

    @property
    def is_singleton(self) -> bool:
        """True for a bare name."""
        return not self._random

    def __str__(self) -> str:
        return f"{self._label}<{self._random}>" if self._random else self._label

    def __repr__(self) -> str:
        return f"Uid({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Uid) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __reduce__(self) -> tuple[object, ...]:
        return Uid, (self._label, self._random)


class ProcId:
    """Identity of one proc."""

    __slots__ = ("uid",)

    def __init__(self, uid: Uid) -> None:
        self.uid = uid

    @staticmethod
    def from_string(text: str) -> ProcId:
        """Parse the text form of a proc's uid."""
        return ProcId(Uid.from_string(text))

    @property
    def label(self) -> str | None:
        """`<proc mesh name>-<rank>`."""
        return self.uid.label

    def __str__(self) -> str:
        return str(self.uid)

    def __repr__(self) -> str:
        return f"ProcId({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcId) and self.uid == other.uid

    def __hash__(self) -> int:
        return hash(self.uid)

    def __reduce__(self) -> tuple[object, ...]:
        return ProcId, (self.uid,)


class ActorAddr:
    """Globally unique address of an actor: `<actor-uid>.<proc-uid>@<location>`."""

    __slots__ = ("addr", "proc_name", "actor_name")

    def __init__(self, *, addr: str, proc_name: str, actor_name: str) -> None:
        self.addr = addr
        self.proc_name = proc_name
        self.actor_name = actor_name

    @staticmethod
    def from_string(text: str) -> ActorAddr:
        """Parse the text form; ValueError when it is malformed."""
        names, at, addr = text.partition("@")
        actor, dot, proc = names.partition(".")
        if not (at and dot and actor and proc and addr):
            raise ValueError(f"invalid actor address {text!r}; expected '<actor>.<proc>@<location>'")
        return ActorAddr(addr=addr, proc_name=proc, actor_name=actor)

    @property
    def uid(self) -> str:
        """The actor's uid as text."""
        return self.actor_name

    @property
    def pid(self) -> str:
        """The same as `uid`; kept for compatibility."""
        return self.actor_name

    @property
    def label(self) -> str | None:
        """The human part of the actor's uid."""
        return Uid.from_string(self.actor_name).label

    @property
    def proc_label(self) -> str | None:
        """The human part of the proc's uid."""
        return Uid.from_string(self.proc_name).label

    @property
    def proc_id(self) -> str:
        """The proc's address: `<proc-uid>@<location>`."""
        return f"{self.proc_name}@{self.addr}"

    @property
    def is_root(self) -> bool:
        """True for the client of a job."""
        return self.label == "root" or self.actor_name == "root"

    def __str__(self) -> str:
        return f"{self.actor_name}.{self.proc_name}@{self.addr}"

    def __repr__(self) -> str:
        return f"ActorAddr({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActorAddr) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __reduce__(self) -> tuple[object, ...]:
        return _addr_from_parts, (self.addr, self.proc_name, self.actor_name)


def _addr_from_parts(addr: str, proc_name: str, actor_name: str) -> ActorAddr:
    return ActorAddr(addr=addr, proc_name=proc_name, actor_name=actor_name)


class ProcRef(NamedTuple):
    """Where a proc is, or will be: enough to send to it from anywhere on its host."""

    uid: str
    """Text form of its uid, `<mesh>-<rank><random>`."""
    address: str
    """Where others reach it: `ipc://<path>` of its socket, or `<address of its host agent>/<name>` between hosts.

    A client that others reach has a *place*, and all of its host has addresses below it: the client itself `<place>`, its agent
    `<place>/h<random>`, procs `<place>/h<random>/<name>`. The place is `tcp://host:port` where the client listens,
    `<address of its gateway>/<name>` where it is attached to one, and `gateway://<name>` where that is a socket file:
    then nobody can dial it, and whoever wants to asks the gateway.
    """
    host: str
    """Address of the host agent that starts and watches it; "" for a client, which no agent started."""


def by_agent(refs: Iterable[ProcRef]) -> dict[str, list[ProcRef]]:
    """The procs of each host agent, by its address."""
    groups: dict[str, list[ProcRef]] = {}
    for ref in refs:
        groups.setdefault(ref.host, []).append(ref)
    return groups


def agent_at(address: str) -> ProcRef:
    """The host agent that serves at an address; there is at most one."""
    return ProcRef(f"{_AGENT}{address}", address, "")


def is_agent(ref: ProcRef) -> bool:
    """Whether a process is a host agent."""
    return ref.uid.startswith(_AGENT)


def folder_of(agent_address: str) -> str:
    """The first part of the addresses of an agent's procs."""
    return f"{agent_address}.d" if agent_address.startswith("ipc://") else agent_address


def split_address(address: str) -> tuple[str, str]:
    """An address as that of its host's agent and the name of a process there; the name is "" for the agent itself.

    What only a gateway reaches is under a name of the gateway, which is left out: `GATEWAY_ONLY` stands for it.
    """
    if address.startswith(GATEWAY_ONLY):
        return GATEWAY_ONLY, address.removeprefix(GATEWAY_ONLY)
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        match = _FILE_OF_PROC.fullmatch(rest)
        return (f"ipc://{match['agent']}", match["name"]) if match else (address, "")
    place, slash, name = rest.partition("/")
    return (f"{scheme}://{place}", name) if slash and scheme != "inproc" else (address, "")


def is_proc_name(name: str) -> bool:
    """Whether a name below the address of a worker loop is that of a proc of its host, not of a client that is reached through it."""
    return re.fullmatch(_PROC, name) is not None


def split_agent(address: str) -> tuple[str, str]:
    """An address between hosts as that of its agent, with the id of its service where it has one, and the name of a process there."""
    place, target = split_address(address)
    service, name = split_target(target)
    return f"{place}/@{service}" if service else place, name


def split_target(target: str) -> tuple[str, str]:
    """What stands behind a host's address, `@<id>/<name>`: id of a service, name of a process; "" for one that is missing."""
    if not target.startswith("@"):
        return "", target
    service, _, name = target[1:].partition("/")
    return service, name


def between_hosts(address: str) -> bool:
    """Whether an address is of use on other machines."""
    return address.startswith(("tcp://", "tls://", GATEWAY_ONLY))


def place_of_client(agent_address: str) -> str:
    """Of the agent of a client that others reach, the place of that client; "" for every other agent."""
    name = split_address(agent_address)[1]
    return agent_address.rpartition("/")[0] if name and not name.startswith("@") and between_hosts(agent_address) else ""
