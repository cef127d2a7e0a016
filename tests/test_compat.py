"""Scripts that import from the private paths of the package whose API this is."""

import subprocess
import sys
from importlib import import_module
from unittest.mock import patch

import pytest

from monarch._compat import TABLE

NAMES = [(path, home, name) for path, homes in TABLE.items() for home, names in homes.items() for name in names.split()]


@pytest.mark.parametrize(("path", "home", "name"), NAMES)
def test_every_name_of_the_table_is_there_and_is_the_one_of_its_home(path, home, name):
    here, _, there = name.partition("=")
    assert getattr(import_module(path), here) is getattr(import_module(home), there or here)


def test_what_is_patched_at_a_path_is_patched_at_home(monkeypatch):
    path, home = import_module("monarch._src.rdma.rdma"), import_module("monarch.rdma.buffer")
    original = path.get_rdma_backend
    with monkeypatch.context() as patches:
        patches.setattr(path, "get_rdma_backend", lambda: "none")
        assert home.get_rdma_backend() == "none"
    with patch.object(path, "get_rdma_backend", return_value="none"):
        assert home.get_rdma_backend() == "none"
    assert home.get_rdma_backend is path.get_rdma_backend is original


def test_a_name_that_is_not_there_is_an_import_error_that_lists_what_is():
    with pytest.raises(ImportError, match="cannot import name 'nonsense'"):
        from monarch._src.actor.future import nonsense  # noqa: F401
    with pytest.raises(AttributeError, match="known are Future"):
        import_module("monarch._src.actor.future").nonsense


def test_an_unknown_path_is_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"monarch\._src\.actor\.nonsense"):
        import_module("monarch._src.actor.nonsense")


def test_the_bootstrap_module_is_a_program():
    run = subprocess.run([sys.executable, "-m", "monarch._src.actor.bootstrap_main"], capture_output=True, text=True, timeout=20)
    assert run.returncode == 1
    assert "MONARCH_PROC_SPEC is not set" in run.stderr
