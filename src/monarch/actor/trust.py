"""Trust: whom this process talks to on a network, as a script or its environment says.

Rules of this file:
    1. Whoever listens for other machines, or attaches to them, holds the job's secret or a certificate of the job, or says that
       he trusts all.

Read next: `_net/credentials.py`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from monarch._base.errors import explain
from monarch._net import credentials
from monarch._net.credentials import Credentials

if TYPE_CHECKING:
    from pathlib import Path

    from monarch._base.addresses import Address

TRUST_ALL = "trust_all_connections"


def checked_credentials(private_key: bytes | Path | None, ca: bytes | Path | str | None, address: Address, *, what: str) -> Credentials:
    """What this process shows to others, and asks of them.

    Raises:
        ValueError: nothing says whom to trust at this address.
    """
    trusts_all = ca == TRUST_ALL
    authority = None if trusts_all else ca
    shown = credentials.given_credentials(private_key, authority)  # type: ignore[arg-type]
    if address.scheme == "tls" and not shown.has_certificate:
        raise ValueError(
            explain(
                f"{what} at {address.url} needs a certificate",
                next="pass private_key and ca, or set hyperactor_tls_cert, _key and _ca; `monarch certs FOLDER` makes them",
            )
        )
    if address.scheme == "tcp" and not shown.secret and not trusts_all:
        raise ValueError(
            explain(
                f"{what} at {address.url} has no secret, so it could not tell friends from others",
                next=f'set MONARCH_SECRET_FILE on all machines (`monarch secret FILE` makes one), or pass ca="{TRUST_ALL}"',
            )
        )
    return shown


def warn_of_strangers(logger: logging.Logger, shown: Credentials, address: Address) -> None:
    """Say it when whoever reaches this address may run any code."""
    from monarch._net.interfaces import is_loopback

    if not shown.secret and address.scheme == "tcp" and not is_loopback(address):
        logger.warning("%s trusts all connections: whoever reaches it may run any code as this user; set MONARCH_SECRET_FILE", address)


def show(shown: Credentials) -> None:
    """Use these credentials in this process from now on.

    Raises:
        ValueError: it has other certificates already.
    """
    before = credentials.own_credentials()
    if before.has_certificate and before != shown:
        raise ValueError(explain("this process has other certificates already", next="use one authority for all workers of a job"))
    credentials.set_credentials(shown)
