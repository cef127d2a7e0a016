"""The NIXL library: whether it is here, whether it should be used, and what it must be told before it starts.

Rules of this file:
    1. Nothing of NIXL is imported before somebody needs an agent: finding out costs two looks at the file system.
    2. What must be said by environment variables is said for the time of the start only, and never over the user's head.

Read next: `nixl_agent.py`, which starts an agent.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from monarch import config
from monarch._base.errors import explain

_logger = logging.getLogger("monarch.rdma")
_DEVICES = "/sys/class/infiniband"
_EXTRA = "pip install 'monarch-mesh[rdma]'"
_PACKAGES = ("nixl_cu12", "nixl_cu13")
_DEFAULT = config.KNOBS["rdma_transports"].default
_warn_lock = threading.Lock()
_has_warned = False


@lru_cache(maxsize=1)
def devices() -> tuple[str, ...]:
    """Names of the RDMA devices of this machine."""
    try:
        return tuple(sorted(os.listdir(_DEVICES)))
    except OSError:
        return ()


def _driver_of(device: str) -> str:
    try:
        return os.path.basename(os.readlink(f"{_DEVICES}/{device}/device/driver"))
    except OSError:
        return ""


@lru_cache(maxsize=1)
def package() -> str:
    """The installed package; "" for none. Of two, the one for the user's torch."""
    installed = [name for name in _PACKAGES if importlib.util.find_spec(name) is not None]
    torch = sys.modules.get("torch")
    cuda = str(getattr(getattr(torch, "version", None), "cuda", None) or "")
    wanted = "nixl_cu" + cuda.partition(".")[0]
    return wanted if wanted in installed else next(iter(installed), "")


def is_forced() -> bool:
    """The configuration names nixl in words of its own, so it is used without a device too."""
    setting = config.value("rdma_transports")
    return setting != _DEFAULT and "nixl" in (name.strip() for name in setting.split(","))


def uses_devices() -> bool:
    """There are devices, and they may be used."""
    return bool(devices()) and not config.value("rdma_disable_ibverbs")


def wanted(*, for_device_memory: bool) -> bool:
    """Whether NIXL is to be tried; warns once where it should be there and is not installed.

    Args:
        for_device_memory: the bytes are on a GPU.
    """
    if not (uses_devices() or is_forced()):
        return for_device_memory and bool(package())
    if not package():
        warn_once("it is not installed", _EXTRA)
        return False
    return True


def warn_once(why: str, hint: str) -> None:
    """Tell this process's user that NIXL should carry memory, and does not."""
    global _has_warned
    with _warn_lock:
        if _has_warned:
            return
        _has_warned = True
    where = f"RDMA devices {', '.join(devices())}" if devices() else f"rdma_transports={config.value('rdma_transports')!r}"
    _logger.warning("%s", explain(f"NIXL does not carry memory of this process: {why}; tcp is used", where=where, next=hint))


@contextlib.contextmanager
def environment() -> Iterator[None]:
    """What NIXL and its UCX read when the first agent starts; only what the user has not set, and only meanwhile."""
    settings = {"UCX_MODULES": _modules(), "NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}
    added = {name: text for name, text in settings.items() if text and name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _modules() -> str:
    """UCX's module for EFA loads the host's libibverbs beside the wheel's, and the destructors of two crash at the end of the process."""
    if not uses_devices():
        return "^ib"
    return "" if any(_driver_of(name) == "efa" for name in devices()) else "^efa"


def load() -> Any:
    """The bindings; ImportError when they are not there or can't be loaded. Cost: 200 ms."""
    return importlib.import_module(f"{package() or _PACKAGES[0]}._bindings")


@lru_cache(maxsize=1)
def works_on_a_device() -> bool:
    """Whether an agent of this machine has read its own memory by way of an RDMA device. Cost: nothing without one, else a second, once."""
    return bool(devices() and package()) and probe("ib")


def probe(transports: str, names: str = "all") -> bool:
    """Start a process in which an agent reads its own memory.

    Args:
        transports: of UCX (`UCX_TLS`), so that none is used that needs no device.
        names: of the network devices that may be used (`UCX_NET_DEVICES`).
    """
    settings = {"UCX_TLS": transports, "UCX_NET_DEVICES": names}
    limit_s = config.seconds("rdma_nixl_start_limit")
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "monarch.rdma.nixl_probe"],
            env={**os.environ, **settings},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        _logger.warning("an agent of NIXL has not read its own memory: transports=%s limit_s=%g", transports, limit_s)
        return False
    if ended.returncode:
        last = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        _logger.warning("an agent of NIXL can't read its own memory: transports=%s reason=%s", transports, last[:500])
    return not ended.returncode
