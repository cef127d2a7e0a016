"""Scripts that import from the private paths of the package whose API this is."""

import subprocess
import sys
from importlib import import_module

import pytest

from monarch._compat import TABLE

NAMES = [(path, name) for path, homes in TABLE.items() for names in homes.values() for name in names.split()]


@pytest.mark.parametrize(("path", "name"), NAMES)
def test_every_name_of_the_table_is_there_and_is_the_one_of_its_home(path, name):
    homes = {name: home for home, names in TABLE[path].items() for name in names.split()}
    assert getattr(import_module(path), name) is getattr(import_module(homes[name]), name)


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
