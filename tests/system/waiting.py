"""Ways to wait in tests: for a state that only polling shows, for the error of a call, for the end of a stranger's process."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
WAIT_S = 10.0


def wait_until(condition: Callable[[], T], timeout: float = WAIT_S) -> T:
    """The first true value of `condition()`; for what nobody announces, such as the end of a stranger's process."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {inspect.getsource(condition)}"
        time.sleep(0.005)
    return value


def error_of(future: Any, timeout: float = WAIT_S) -> Exception:
    """What `future` fails with; AssertionError when it does not fail, or not in time."""
    error = future.exception(timeout)
    assert error is not None, "the call returned"
    assert not isinstance(error, TimeoutError), f"no answer within {timeout:g} s"
    return error


def is_gone(pid: int) -> bool:
    """The process is not in the process table, or only as a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
