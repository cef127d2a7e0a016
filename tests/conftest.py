"""Rules that every test obeys: nothing left behind, unit tests cheap, system tests last.

Unit tests are compared before and after each test. In `tests/system` one client lives as long as its module, so there
the comparison is before the module's first and after its last test, when the client has been shut down.

Read next: `monarch/testing/leaks.py` for what counts, `system/conftest.py` for the fixtures of tests that start processes.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

from monarch.testing import leaks
from system.hosts import own_namespaces

_CPU_LIMIT_S = 6.0
_SYSTEM = Path(__file__).parent / "system"
_before: dict[Path, leaks.Snapshot] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1-1/1", metavar="A-B/N", help="only these of N parts of the files, with about as many tests each")


def pytest_configure(config: pytest.Config) -> None:
    """Give the session a mark that its processes inherit and a temporary folder of its own (short: it holds sockets)."""
    os.environ.pop(leaks.SESSION_MARK, None)
    leaks.mark_session()
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # where tmp_path stays, for a look afterwards
    folder = tempfile.mkdtemp(prefix="mt-")
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if _is_system(item):
            item.add_marker(pytest.mark.system)
    items.sort(key=_is_system)
    wanted = _files_of_part(Counter(item.path for item in items), config.getoption("--part"))
    config.hook.pytest_deselected(items=[item for item in items if item.path not in wanted])
    items[:] = [item for item in items if item.path in wanted]


def _files_of_part(sizes: Counter[Path], text: str) -> set[Path]:
    match = re.fullmatch(r"(\d+)-(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]) <= int(match[3]):
        raise pytest.UsageError(f"--part={text}; expected something like 1-5/8")
    first, last, number = map(int, match.groups())
    parts: list[list[Path]] = [[] for _ in range(number)]
    for path in sorted(sizes, key=lambda path: (-sizes[path], path)):
        min(parts, key=lambda part: sum(sizes[other] for other in part)).append(path)
    return {path for part in parts[first - 1 : last] for path in part}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    if _is_system(item):
        _before.setdefault(item.path, leaks.Snapshot.full())
    else:
        _before[item.path] = leaks.Snapshot.quick()
    yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    started = time.process_time()
    yield
    used = time.process_time() - started
    marker = item.get_closest_marker("cpu_limit")
    limit = marker.args[0] if marker else _CPU_LIMIT_S
    if not _is_system(item) and used > limit:
        pytest.fail(f"unit test used {used:.1f} s of processor time, limit {limit:g} s; make it smaller or mark it cpu_limit(seconds)")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    yield
    if not _is_system(item):
        left = leaks.wait_no_growth(_before.pop(item.path), leaks.Snapshot.quick)
    elif nextitem is None or nextitem.path != item.path:
        left = leaks.wait_no_growth(_before.pop(item.path), leaks.Snapshot.full)
        left += [f"network namespaces: {name}" for name in own_namespaces()]
    else:
        return
    if left:
        place = item.path.name if _is_system(item) else item.name
        pytest.fail(f"{place} left behind:\n  " + "\n  ".join(left), pytrace=False)


def _is_system(item: pytest.Item) -> bool:
    return _SYSTEM in item.path.parents
