"""The part of the protocol by which hosts come together: who may work with whom, and how those meet that can't dial each other.

Read next: `messages.py`, which makes these part of `Control`; `_runtime/{visitors,outreach,versions}.py`, which use them.
"""

from __future__ import annotations

import msgspec

from monarch._base.ids import ProcRef


class Versions(msgspec.Struct, frozen=True):
    """What two processes compare when they meet; "" where something is not installed."""

    monarch: str
    protocol: int
    python: str
    torch: str


class Attach(msgspec.Struct, frozen=True, tag=True):
    """A client is about to use this host; answered by `HostInfo`."""

    versions: Versions
    any_version: bool
    """Whatever differs: go on."""


class HostInfo(msgspec.Struct, frozen=True, tag=True):
    """What a host says of itself."""

    versions: Versions
    name: str
    """Name of the machine."""
    address: str
    """What its agent calls itself; the client may know it by another name."""
    service: str


class HandOver(msgspec.Struct, frozen=True, tag=True):
    """A connection from another host is for the receiver; its descriptor comes along.

    From a proc's own agent, with the preface answered; from a client to its agent, whose procs may be meant, without.
    """

    target: str
    tls: bool
    peer: str
    """Where it comes from, for people."""


class TookOver(msgspec.Struct, frozen=True, tag=True):
    """A proc to its agent: one connection that was handed over is no longer on its way."""


class Register(msgspec.Struct, frozen=True, tag=True):
    """The sender is a client that others reach through this host: connections for `name` are its own, and it connects through tunnels."""

    name: str


class Reach(msgspec.Struct, frozen=True, tag=True):
    """`seeker` can't dial `target`: whoever knows the way to `target` asks it to dial `seeker`."""

    target: ProcRef
    seeker: ProcRef


class DialMe(msgspec.Struct, frozen=True, tag=True):
    """Dial this process, which has something to say and can't dial itself."""

    seeker: ProcRef
