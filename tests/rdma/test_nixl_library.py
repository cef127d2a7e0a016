"""When NIXL is tried, and what it is told before it starts."""

from __future__ import annotations

import logging
import os

import pytest

from monarch.config import configured
from monarch.rdma import nixl_library
from monarch.rdma.nixl_library import environment, wanted, works_on_a_device


@pytest.fixture
def machine(monkeypatch):
    """`machine(devices, package)`: what is found here."""

    def found(devices, package):
        monkeypatch.setattr(nixl_library, "devices", lambda: devices)
        monkeypatch.setattr(nixl_library, "package", lambda: package)
        monkeypatch.setattr(nixl_library, "_driver_of", lambda name: name.partition("_")[0])

    monkeypatch.setattr(nixl_library, "_has_warned", False)
    for name in ("UCX_MODULES", "UCX_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    return found


@pytest.mark.parametrize(
    "transports, disabled", [("cma,ipc,nixl,tcp", False), ("cma,ipc,nixl,tcp", True), ("nixl,tcp", False), ("nixl", True)]
)
@pytest.mark.parametrize("devices", [(), ("mlx5_0",)])
@pytest.mark.parametrize("package", ["", "nixl_cu12"])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_it_is_tried_with_a_device_with_gpu_memory_or_when_it_is_named(machine, caplog, transports, disabled, devices, package, on_gpu):
    machine(devices, package)
    with configured(rdma_transports=transports, rdma_disable_ibverbs=disabled), caplog.at_level(logging.WARNING):
        answers = [wanted(for_device_memory=on_gpu) for _ in range(3)]
    should = bool(devices and not disabled) or transports.startswith("nixl")
    assert answers == [bool(package) and (should or on_gpu)] * 3
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == (should and not package)
    assert all("monarch-mesh[rdma]" in text and "next:" in text for text in warned)


@pytest.mark.parametrize(
    "devices, disabled, modules",
    [((), False, "^ib"), (("mlx5_0",), False, "^efa"), (("mlx5_0",), True, "^ib"), (("efa_0", "mlx5_0"), False, None)],
)
def test_modules_that_crash_at_the_end_are_left_out_while_it_starts(machine, devices, disabled, modules):
    machine(devices, "nixl_cu12")
    with configured(rdma_disable_ibverbs=disabled), environment():
        assert os.environ.get("UCX_MODULES") == modules
    assert "UCX_MODULES" not in os.environ


def test_what_the_user_has_set_stays(machine, monkeypatch):
    machine((), "nixl_cu12")
    monkeypatch.setenv("UCX_MODULES", "all")
    with environment():
        assert os.environ["UCX_MODULES"] == "all"
    assert os.environ["UCX_MODULES"] == "all"


def test_without_a_device_nothing_is_started_to_find_out(machine, monkeypatch):
    machine((), "nixl_cu12")
    monkeypatch.setattr(nixl_library, "probe", lambda transports: pytest.fail("a process was started"))
    works_on_a_device.cache_clear()
    assert works_on_a_device() is False
    works_on_a_device.cache_clear()
