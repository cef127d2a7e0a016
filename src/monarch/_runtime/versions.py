"""Versions: what two processes must agree on to work together, and the table that shows where they do not.

Pickles of classes and functions cross from one to the other, so the minor version of Python must be the same, and so must
monarch. Another torch may go well; it is said, and no more.

Read next: `host.py`, which compares when a client attaches.
"""

from __future__ import annotations

import functools
import os
import sys

import msgspec

from monarch._base.errors import explain
from monarch._wire.contact_messages import Versions

OVERRIDE_VARIABLE = "MONARCH_TEST_VERSIONS"
"""For tests: JSON with values to report instead of the true ones."""
_FATAL = ("monarch", "protocol", "python")


def own_versions() -> Versions:
    """Those of this process. Cost: a look at the metadata of two packages, ~10 ms, the first time."""
    return _versions(os.environ.get(OVERRIDE_VARIABLE, ""))


@functools.lru_cache(maxsize=1)
def _versions(override: str) -> Versions:
    from monarch._net.handshake import VERSION

    found = Versions(_package("monarch-mesh"), VERSION, f"{sys.version_info[0]}.{sys.version_info[1]}", _package("torch"))
    return msgspec.structs.replace(found, **msgspec.json.decode(override)) if override else found


def differences(ours: Versions, theirs: Versions) -> tuple[list[str], list[str]]:
    """Names of what differs: what must not, and what may."""
    names = [name for name in ours.__struct_fields__ if getattr(ours, name) != getattr(theirs, name)]
    if "" in (ours.torch, theirs.torch) and "torch" in names:  # who has none sends no tensors
        names.remove("torch")
    return [name for name in names if name in _FATAL], [name for name in names if name not in _FATAL]


def table(client: Versions, workers: dict[str, Versions]) -> str:
    """Both sides' values, one row per worker; what differs from the client's is marked."""
    names = list(client.__struct_fields__)
    rows = [["", *names], ["client", *(str(getattr(client, name)) or "-" for name in names)]]
    for address, versions in workers.items():
        cells = ((str(getattr(versions, name)) or "-", getattr(versions, name) != getattr(client, name)) for name in names)
        rows.append([address, *(f"{text} !" if differs else text for text, differs in cells)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def mismatch(fatal: list[str], client: Versions, workers: dict[str, Versions]) -> str:
    """The text of a refusal."""
    return explain(
        f"client and worker can't work together: {' and '.join(fatal)} {'differs' if len(fatal) == 1 else 'differ'}",
        next="install the same versions on all machines, or attach all the same with monarch.config.configure(allow_version_mismatch=True)",
        detail=table(client, workers),
    )


def _package(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return ""
