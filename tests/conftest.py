"""Rules that every test obeys: nothing left behind, unit tests cheap, system tests last.

Unit tests are compared before and after each test. In `tests/system` one client lives as long as its module, so there
the comparison is before the module's first and after its last test, when the client has been shut down.

Read next: `monarch/testing/leaks.py` for what counts, `system/conftest.py` for the fixtures of tests that start processes.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from itertools import groupby
from pathlib import Path

import hypothesis
import pytest

from monarch.testing import leaks
from system.hosts import own_namespaces

_CPU_LIMIT_S = 6.0
_SYSTEM = Path(__file__).parent / "system"
_before: dict[Path, leaks.Snapshot] = {}
_UNTIMED = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])  # others use the machine as well
hypothesis.settings.register_profile("full", _UNTIMED)
hypothesis.settings.register_profile("quick", _UNTIMED, max_examples=15)
hypothesis.settings.load_profile("full")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", type=Path, metavar="FOLDER", help="only the files that no other run with this folder has begun")


def pytest_configure(config: pytest.Config) -> None:
    """Give the session a mark that its processes inherit and a temporary folder of its own (short: it holds sockets)."""
    os.environ.pop(leaks.SESSION_MARK, None)
    leaks.mark_session()
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # where tmp_path stays, for a look afterwards
    folder = tempfile.mkdtemp(prefix="mt-")
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Other sessions may mount as well."""
    own = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    os.environ[leaks.MOUNT_ROOTS] = os.pathsep.join([str(own), os.environ["TMPDIR"]])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if _is_system(item):
            item.add_marker(pytest.mark.system)
    items.sort(key=_is_system)
    sizes = Counter(item.path for item in items)
    if config.getoption("--share"):  # large files first, so that the runs end at about the same time
        items.sort(key=lambda item: (_is_system(item), -sizes[item.path], item.path))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Many tests call the collector; none means what was there before it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Of runs that share the files, one takes a file when it has done with the one before."""
    folder: Path | None = session.config.getoption("--share")
    if folder is None or session.config.option.collectonly or session.testsfailed:
        return None
    folder.mkdir(exist_ok=True)
    ours = (items for _, group in groupby(session.items, key=lambda item: item.path) if _is_taken(items := list(group), folder))
    queue = list(next(ours, []))
    while queue:
        item = queue.pop(0)
        queue = queue or list(next(ours, []))  # before its last test: what is torn down after that depends on what comes next
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=queue[0] if queue else None)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
    return True


def _is_taken(items: list[pytest.Item], folder: Path) -> bool:
    """Whether nobody else has taken this file."""
    try:
        (folder / str(items[0].path.relative_to(_SYSTEM.parent)).replace("/", "-")).mkdir()
    except FileExistsError:
        return False
    return True


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
