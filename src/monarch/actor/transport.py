"""Transports: whether a client listens for other hosts, and where.

Rules of this file:
    1. A process has one transport, chosen before its first use of the runtime.
    2. A client listens only where strangers are told from friends, or a script says that it trusts all. Where nobody says so, a transport
       without an address means no more than that other hosts may be used: they are reached by connections that this client makes.

Read next: `presence.py` for what follows.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal, NamedTuple

from monarch import config
from monarch._base.addresses import WorkerAddress, parse_worker_address
from monarch._base.errors import explain
from monarch._net import credentials
from monarch._net.credentials import Credentials
from monarch.actor.presence import Listening, Presence
from monarch.actor.process import known_process
from monarch.actor.trust import TRUST_ALL, checked_credentials, show, warn_of_strangers
from monarch.config import BindSpec, ChannelTransport

if TYPE_CHECKING:
    from pathlib import Path

_logger = logging.getLogger("monarch.actor")
_SCHEMES: dict[ChannelTransport, Literal["tcp", "tls", "ipc"]] = {
    ChannelTransport.TcpWithHostname: "tcp",
    ChannelTransport.TcpWithLocalhost: "tcp",
    ChannelTransport.Tls: "tls",
    ChannelTransport.Unix: "ipc",
}


class _Enabled(NamedTuple):
    """What a script has asked for."""

    spec: BindSpec
    shown: Credentials | None
    """What it shows, and asks for; None: what the environment says, if it says enough to listen."""


_enabled: _Enabled | None = None


def enable_transport(
    transport: ChannelTransport | str | BindSpec,
    *,
    private_key: bytes | Path | None = None,
    ca: bytes | Path | Literal["trust_all_connections"] | None = None,
) -> None:
    """Choose how other hosts reach this client and the processes on its host; before anything else that needs the runtime.

    Args:
        transport: "ipc": not at all, they are asked to dial; the default. "tcp", "tls": at the address of this machine, any free port. An
            address such as "tcp://node1:26601": there; an alias says what is advertised. Clients without a secret or certificates do
            not listen, and are reached as with "ipc", over the connections that they make.
        private_key, ca: as for `start_worker_loop_forever`; "trust_all_connections" lets a client listen without a secret.

    Raises:
        ValueError: no transport has this name; or an address is given, and nothing says whom to trust there.
        NotImplementedError: a transport that exists elsewhere only.
        RuntimeError: another one was enabled before, or the runtime is in use already.
    """
    global _enabled
    spec = BindSpec(transport)
    where = _where(spec)
    if _enabled is not None and _enabled.spec != spec:
        raise RuntimeError(
            explain(
                f"Only one transport type may be enabled at one time: {_enabled.spec} was, so {spec} can't be",
                next="enable one, before anything else",
            )
        )
    if _enabled is not None and known_process() is not None:
        return
    if known_process() is not None:
        raise RuntimeError(
            explain(
                f"transport {spec} came too late: this process already uses monarch, with the default transport",
                next="call enable_transport() before this_host(), spawn and the like",
            )
        )
    shown = None
    if where is not None and (spec.address is not None or ca is not None or private_key is not None or where.bound.scheme == "tls"):
        shown = checked_credentials(private_key, ca, where.advertised, what="a client")
    config.configure(default_transport=spec)
    _enabled = _Enabled(spec, shown)


def chosen_presence() -> Presence:
    """That of a client which starts now; it listens from here on, if it is to.

    Raises:
        RuntimeError: the address can't be bound.
        ValueError, NotImplementedError: `default_transport` was set to something that there is not.
    """
    spec: BindSpec = config.value("default_transport")
    where = _where(spec)
    shown = _enabled.shown if _enabled is not None and _enabled.spec == spec else None
    if where is None:
        return Presence()
    if shown is None:
        shown = credentials.own_credentials()
        if not (shown.has_certificate if where.bound.scheme == "tls" else shown.secret):
            _logger.info('without a secret this client does not listen: transport=%s; enable_transport(ca="%s") lets it', spec, TRUST_ALL)
            return Presence()
    return _listening(where, shown)


def _listening(where: WorkerAddress, shown: Credentials) -> Listening:
    from monarch._net.interfaces import advertised_address, listen_on

    show(shown)
    listener = listen_on(where.bound)
    try:
        advertised, note = advertised_address(where, listener)
        if note:
            _logger.info("%s", note)
        warn_of_strangers(_logger, shown, advertised)
    except BaseException:
        listener.close()
        raise
    return Listening(advertised, listener)


def _where(spec: BindSpec) -> WorkerAddress | None:
    """Where to listen; None: nowhere.

    Raises:
        NotImplementedError: there is no such transport.
        ValueError: the address is malformed.
    """
    scheme = _SCHEMES.get(spec.transport)
    if scheme is None or (scheme == "ipc" and spec.address is not None):
        raise NotImplementedError(
            explain(
                f"there is no transport {spec} for a client",
                next="use 'tcp' or 'tls', an address such as 'tcp://host:port' or 'tls://host:port', or 'ipc'",
            )
        )
    if scheme == "ipc":
        return None
    if spec.address is not None:
        return parse_worker_address(spec.address)
    from monarch._net.interfaces import own_address

    address = own_address(scheme, reach="loopback" if spec.transport is ChannelTransport.TcpWithLocalhost else "network")
    return WorkerAddress(address, address)
