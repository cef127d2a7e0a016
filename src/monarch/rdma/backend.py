"""Which backend this process has, in the words of the public API, and whether the configuration makes sense.

Read next: `transport.py` for what really moves the bytes.
"""

from __future__ import annotations

import re
import warnings

from monarch import config
from monarch._base.errors import did_you_mean, explain
from monarch.rdma.errors import RdmaInitError
from monarch.rdma.nixl_library import works_on_a_device

_TARGET = re.compile(r"(?:cpu:\d+|gpu:\d+|nic:\S+)?")
_AFFINITY = re.compile(r"(?:any|match_name|groups:.+)?")
_checked: tuple[str, str] | None = None
"""The last configuration that was found right."""
_TRANSPORTS = ("cma", "ipc", "nixl", "tcp")


class RDMAReadTransferWarning(Warning):
    """Kept for compatibility; nothing warns so."""


class RDMAWriteTransferWarning(Warning):
    """Kept for compatibility; nothing warns so."""


class RDMATcpFallbackWarning(Warning):
    """Buffers of this process travel by TCP or by copies of the kernel, because there is no network card for more."""


def is_ibverbs_available() -> bool:
    """Whether NIXL, on this machine, has moved bytes by a network card with verbs. The first call may take a second where there is one."""
    return works_on_a_device()


def is_rdma_available() -> bool:
    """The same as `is_ibverbs_available`; deprecated."""
    text = "is_rdma_available() is deprecated; use is_ibverbs_available() or get_rdma_backend()"
    warnings.warn(text, DeprecationWarning, stacklevel=2)
    return is_ibverbs_available()


def get_rdma_backend() -> str:
    """`"ibverbs"`, else `"tcp"` where `rdma_allow_tcp_fallback` is on, else `"none"`."""
    if is_ibverbs_available():
        return "ibverbs"
    return "tcp" if config.value("rdma_allow_tcp_fallback") else "none"


def rdma_supported() -> bool:
    """Whether this process may move bytes at all, by whatever backend."""
    return get_rdma_backend() != "none"


def allowed_transports() -> list[str]:
    """The names in `rdma_transports`; RdmaInitError for one that does not exist, which would else switch off what was meant."""
    setting = config.value("rdma_transports")
    names = [name for part in setting.split(",") if (name := part.strip())]
    for name in names:
        if name not in _TRANSPORTS:
            what = f"invalid rdma_transports ({setting!r}): there is no transport {name!r}{did_you_mean(name, _TRANSPORTS)}"
            raise RdmaInitError(explain(what, next=f"name some of {', '.join(_TRANSPORTS)}; owner goes with tcp, staged with both and cma"))
    return names


def check_backend() -> None:
    """Whether transfers are possible at all.

    Raises:
        RdmaInitError: nothing may carry them, or a knob has a value that means nothing.
    """
    global _checked
    if get_rdma_backend() == "none":
        hint = "monarch.configure(rdma_allow_tcp_fallback=True)"
        raise RdmaInitError(explain("no RDMA backend available", next=hint))
    settings = config.value("rdma_ibverbs_target"), config.value("rdma_peer_device_affinity")
    if settings != _checked:
        _check(*settings)
        _checked = settings


def _check(target: str, affinity: str) -> None:
    if not _TARGET.fullmatch(target):
        what = f"invalid RDMA_IBVERBS_TARGET ({target!r}); expected cpu:<numa>, gpu:<ordinal>, nic:<name> or nothing"
        raise RdmaInitError(explain(what, next="correct rdma_ibverbs_target, or MONARCH_RDMA_IBVERBS_TARGET"))
    groups = [name for group in affinity.removeprefix("groups:").split("|") for name in group.split(",")]
    is_overlapping = affinity.startswith("groups:") and (len(set(groups)) != len(groups) or "" in groups)
    if not _AFFINITY.fullmatch(affinity) or is_overlapping:
        what = f"invalid RDMA_PEER_DEVICE_AFFINITY ({affinity!r}); expected any, match_name, groups:a,b|c,d (disjoint) or nothing"
        raise RdmaInitError(explain(what, next="correct rdma_peer_device_affinity, or MONARCH_RDMA_PEER_DEVICE_AFFINITY"))
