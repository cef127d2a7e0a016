"""Ids of the services behind worker addresses: they tell the allocation that a client means from a later one at the same address.

A scheduler draws one id per worker, hands the list to all of them in `MONARCH_SERVICE_PROC_IDS` and to each its place in
`MONARCH_SERVICE_PROC_RANK`; the client attaches to `<id>@<address>`.

    ids = [new_service_proc_id() for _ in addresses]
    env[SERVICE_PROC_IDS_ENV] = serialize_service_proc_ids(ids)
    attach_to_workers(ca=ca, workers=service_proc_addrs(addresses, ids))

Read next: `_base/addresses.py` for the text of addresses, `workers.py` for who serves.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from monarch._base.addresses import DEFAULT_SERVICE, canonical_service
from monarch._base.errors import explain
from monarch._base.ids import ProcId, Uid

SERVICE_PROC_IDS_ENV = "MONARCH_SERVICE_PROC_IDS"
"""A JSON list of ids, by rank."""
SERVICE_PROC_RANK_ENV = "MONARCH_SERVICE_PROC_RANK"
"""Which of them is this worker's."""


def new_service_proc_id() -> ProcId:
    """A fresh id for one service: `service<random>`."""
    return ProcId(Uid.instance(DEFAULT_SERVICE))


def service_proc_addr(address: str, proc_id: ProcId | str | None) -> str:
    """`<id>@<address>`, or the address itself without an id.

    Raises:
        ValueError: the id is malformed, or the address has one already.
    """
    if proc_id is None:
        return address
    if canonical_service(str(proc_id)) is None:
        raise ValueError(f"invalid id of a service {str(proc_id)!r}; expected one of new_service_proc_id(), such as 'service<…>'")
    head, at, _ = address.partition("@")
    if at and "://" not in head:
        raise ValueError(f"the address {address!r} has the id of a service already")
    return f"{proc_id}@{address}"


def service_proc_addrs(addresses: Sequence[str], proc_ids: Sequence[ProcId | str] | None) -> list[str]:
    """`service_proc_addr` of each pair; the addresses themselves without ids.

    Raises:
        ValueError: there are more of one than of the other, or as `service_proc_addr`.
    """
    if proc_ids is None:
        return list(addresses)
    if len(addresses) != len(proc_ids):
        raise ValueError(f"{len(addresses)} addresses and {len(proc_ids)} ids of services; give one id for each address")
    return [service_proc_addr(address, proc_id) for address, proc_id in zip(addresses, proc_ids, strict=True)]


def serialize_service_proc_ids(proc_ids: Sequence[ProcId | str]) -> str:
    """The ids as the value of `MONARCH_SERVICE_PROC_IDS`: a JSON list of text."""
    return json.dumps([str(proc_id) for proc_id in proc_ids])


def deserialize_service_proc_ids(serialized: str) -> list[ProcId]:
    """The ids that `serialize_service_proc_ids` wrote.

    Raises:
        ValueError: it is something else.
    """
    try:
        texts = json.loads(serialized)
    except ValueError:
        texts = None
    if not isinstance(texts, list) or not all(isinstance(text, str) and canonical_service(text) is not None for text in texts):
        raise ValueError(f"invalid ids of services {serialized!r}; expected a JSON list of ids, such as '[\"service<…>\"]'")
    return [ProcId.from_string(text) for text in texts]


def ranked_service_proc_id_from_env(*, rank_env: str = SERVICE_PROC_RANK_ENV) -> ProcId | None:
    """The id that the scheduler has given to this worker; None where it gives none.

    Args:
        rank_env: the variable that holds the rank, such as `SLURM_NODEID`.

    Raises:
        ValueError: there are ids but no rank among them, or they are malformed.
    """
    serialized = os.environ.get(SERVICE_PROC_IDS_ENV)
    if serialized is None:
        return None
    proc_ids = deserialize_service_proc_ids(serialized)
    rank = os.environ.get(rank_env, "")
    if not (rank.isascii() and rank.isdigit() and int(rank) < len(proc_ids)):
        raise ValueError(
            explain(
                f"{rank_env} is {rank!r}, which is no rank among the {len(proc_ids)} ids of {SERVICE_PROC_IDS_ENV}",
                next=f"set {rank_env} to this worker's place in the list, from 0, or unset {SERVICE_PROC_IDS_ENV}",
            )
        )
    return proc_ids[int(rank)]
