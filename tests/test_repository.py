"""Rules about the repository itself: sizes, names, mirrors, weight of the import, commands that the README promises."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "monarch"
MODULES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
UNIT_TESTS = [path for path in TESTS if path.parent.name not in ("system", "docs") and path != Path(__file__)]

WANTED_LINES, MOST_LINES = 500, 600
NO_NOUN = {"utils", "util", "common", "helpers", "helper", "misc", "base_impl"}
MIRRORED = ("_base", "_mesh", "_wire")
"""Packages without I/O: every module of theirs has a unit test of its own; drivers are covered by tests/system."""
CORE_WEIGHT = {"monarch", "cloudpickle", "msgspec", "typing_extensions"}
"""What `import monarch.actor` may load besides the standard library (msgspec loads typing_extensions where it is installed)."""


def mirror_of(module: Path) -> Path:
    """`src/monarch/_wire/session.py` -> `tests/wire/test_session.py`."""
    *folders, name = [part.lstrip("_") for part in module.relative_to(PACKAGE).parts]
    return ROOT.joinpath("tests", *folders, f"test_{name}")


def has_functions(module: Path) -> bool:
    return any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in ast.walk(ast.parse(module.read_text())))


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_is_one_noun_of_bounded_length(module):
    lines = len(module.read_text().splitlines())
    assert module.stem not in NO_NOUN, f"{module} is not named after a noun of the domain"
    assert lines <= MOST_LINES, f"{module.relative_to(ROOT)} has {lines} lines, more than {MOST_LINES}: split it"
    if lines > WANTED_LINES:
        warnings.warn(f"{module.relative_to(ROOT)} has {lines} lines, more than {WANTED_LINES}", stacklevel=1)


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_says_what_it_is(module):
    text = module.read_text()
    assert not text.strip() or ast.get_docstring(ast.parse(text)), f"{module.relative_to(ROOT)} starts without a docstring"


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_open_points_name_their_issue(module):
    loose = [line for line in module.read_text().splitlines() if re.search(r"\b(TODO|FIXME|XXX)\b(?!.*#\d)", line)]
    assert not loose, f"{module.relative_to(ROOT)}: {loose}"


@pytest.mark.parametrize("test", UNIT_TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_unit_test_mirrors_a_module(test):
    known = {mirror_of(module) for module in MODULES}
    assert test in known, f"{test.relative_to(ROOT)} mirrors no module; tests of more than one module belong in tests/system"


@pytest.mark.parametrize(
    "module",
    [path for name in MIRRORED for path in sorted((PACKAGE / name).rglob("*.py")) if has_functions(path)],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_a_pure_module_has_its_unit_test(module):
    assert mirror_of(module).exists(), f"{mirror_of(module).relative_to(ROOT)} is missing"


def test_importing_the_actor_api_loads_three_packages_at_most():
    source = "import sys; before = set(sys.modules); import monarch.actor; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert loaded - sys.stdlib_module_names - CORE_WEIGHT == set()
    assert "click" not in loaded


def test_commands_and_files_that_the_readme_names_exist():
    text = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    scripts = re.findall(r"\b(?:sh|bash|python3?) ((?:scripts|bench|\.ci)/[\w./-]+)", text)
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link]
    assert {"scripts/demo", "scripts/test"} <= set(scripts)
    missing = [name for name in {*scripts, *links} if not (ROOT / name).exists()]
    assert not missing


def test_extras_of_the_package_are_those_of_the_design():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    features = {"tensor", "rdma", "telemetry", "otlp", "dashboard", "tui", "mounts", "k8s", "operator", "tls", "mcp"}
    assert set(project["optional-dependencies"]) == features | {"dev", "test", "docs"}
    assert sorted(re.match(r"[\w-]+", line)[0] for line in project["dependencies"]) == ["click", "cloudpickle", "msgspec"]


def test_a_change_fragment_is_named_after_its_issue():
    names = [path.name for path in (ROOT / "changes").iterdir() if path.name != "README.md"]
    assert not [name for name in names if not re.fullmatch(r"\d+\.(feature|fix|removal)\.md", name)]
