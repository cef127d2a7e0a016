"""Gateways: how a client outside a cluster, behind NAT say, becomes part of it through one address.

Read next: `presence.py`, docs/design/tunnels.md.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal

from monarch import config
from monarch._base.addresses import Address, parse_dialled_address
from monarch._base.errors import explain, next_of, without_next
from monarch._base.ids import random_id
from monarch._net import credentials
from monarch._runtime import versions
from monarch._wire import messages
from monarch._wire.contact_messages import Attach, HostInfo
from monarch.actor.attaching import CHECK
from monarch.actor.client import ClientProcess, start_client
from monarch.actor.presence import BehindGateway
from monarch.actor.process import become, known_process, this_process
from monarch.actor.trust import TRUST_ALL, checked_credentials, show, warn_of_strangers
from monarch.actor.workers import checked_path

if TYPE_CHECKING:
    from pathlib import Path

    from monarch._net.credentials import Credentials

_logger = logging.getLogger("monarch.attach")
_SAY_S = 3.0


def attach(
    addr: str, *, private_key: bytes | Path | None = None, ca: bytes | Path | Literal["trust_all_connections"] | None = None
) -> None:
    """Reach every host of a cluster, and be reached by it, through one of its worker loops: the gateway.

    For a client that can dial that one address only, and that nobody can dial. Call it before anything else that needs
    monarch's runtime; waits for the gateway, up to `mesh_attach_config_timeout`. `this_host()` stays this machine. Then
    attach to workers by the addresses that they have inside the cluster. If the gateway ends, so does the connection to
    everybody else.

    Args:
        addr: address of any worker loop: `tcp://`, `tls://` or `ipc://`, as this machine reaches it.
        private_key, ca: as for `attach_to_workers`.

    Raises:
        ValueError: the address is malformed, or the credentials can't be used.
        RuntimeError: this process uses monarch already, or is attached to another gateway; or the gateway does not answer,
            or runs another version.
    """
    dialled = parse_dialled_address(addr)
    if _is_attached(dialled):
        return
    shown = _credentials_for(dialled, private_key, ca, addr)
    before = credentials.own_credentials()
    show(shown)
    try:
        presence = BehindGateway(dialled, _called(dialled), f"client.{random_id()}")
        become(lambda: start_client(presence), _refuse_late)
        this_process().proc.request(presence.gateway, messages.Ping()).get(timeout=config.seconds("mesh_attach_config_timeout"))
    except BaseException:
        credentials.set_credentials(before)
        raise


def _is_attached(dialled: Address) -> bool:
    """Whether this process is attached there; RuntimeError when it can't be any more."""
    process = known_process()
    if process is None:
        return False
    presence = process.presence if isinstance(process, ClientProcess) else None
    if not isinstance(presence, BehindGateway):
        raise _refuse_late()
    if presence.dialled != dialled:
        raise RuntimeError(
            explain(
                f"this client is already attached to the gateway {presence.dialled}; it can't be attached to {dialled} as well",
                next="a process has one gateway: use a new process",
            )
        )
    end = process.proc.fates.gone.get(presence.gateway.uid)
    if end is not None:
        raise RuntimeError(
            explain(f"this client was attached to the gateway {dialled}, which is lost", where=end.reason, next="start a new process")
        )
    return True


def _refuse_late() -> RuntimeError:
    return RuntimeError(
        explain("attach() came too late: this process already uses monarch", next="call attach() before this_host(), spawn and the like")
    )


def _credentials_for(dialled: Address, private_key: bytes | Path | None, ca: bytes | Path | str | None, addr: str) -> Credentials:
    if not dialled.is_network:
        checked_path(addr)
    elif ca is None and dialled.scheme == "tcp":  # a script that says it to attach_to_workers has no place for it here, in the peer
        shown = checked_credentials(private_key, TRUST_ALL, dialled, what="a client")
        warn_of_strangers(_logger, shown, dialled)
        return shown
    return checked_credentials(private_key, ca, dialled, what="a client")


def _called(dialled: Address) -> str:
    """What the gateway calls itself."""
    from monarch._net.inquiry import Inquiry

    budget_s = config.seconds("mesh_attach_config_timeout")
    own, any_version = versions.own_versions(), bool(config.value("allow_version_mismatch"))
    inquiry = Inquiry(dialled.url, Attach(own, any_version))

    def say() -> None:
        _logger.warning("attach: waiting for the gateway: address=%s reason=%s", dialled, inquiry.story or "no answer yet")

    info = inquiry.ask(budget_s, say, _SAY_S)
    if not isinstance(info, HostInfo):
        raise RuntimeError(
            explain(
                f"attach failed: the gateway {dialled} did not answer",
                where=without_next(inquiry.story) or f"no answer within {budget_s:g} s (mesh_attach_config_timeout)",
                next=next_of(inquiry.story) or CHECK,
            )
        )
    fatal, others = versions.differences(own, info.versions)
    if fatal and not any_version:
        raise RuntimeError(versions.mismatch(fatal, own, {info.address: info.versions}))
    if fatal or others:
        _logger.warning("versions differ:\n%s", versions.table(own, {info.address: info.versions}))
    return info.address
