"""Source text of code that has no file here: functions of notebooks and of `__main__` are sent by value.

The client has the text, in a file or in its `linecache`; a controller there hands it out. In a worker `linecache` asks it
for files that do not exist here, so tracebacks, `inspect` and the debugger show lines as if they did.

Rules of this file:
    1. Each file is asked for once per process, and an answer takes `_ANSWER_S` at most: a traceback is not worth a hang.
    2. The net thread never asks: it would wait for its own answer.
"""

from __future__ import annotations

import linecache
import os
from collections.abc import Callable
from typing import Any

from monarch._net.loop import this_turn
from monarch.actor.base import Actor
from monarch.actor.endpoint import endpoint
from monarch.actor.process import known_process

_ANSWER_S = 5.0
_NOT_A_FILE = ("<string>", "<frozen ", "<attrs generated ", "<__array_function__", "<decorator-gen")
_problems: dict[str, str] = {}
_asked: set[str] = set()


class SourceLoaderController(Actor):
    """Hands out source text, in the client."""

    _lives_in_client = True

    @endpoint
    def get_source(self, filename: str) -> str:
        """The text of a file; "" when there is none."""
        return "".join(linecache.getlines(filename))


class RemoteImportLoader:
    """A loader, as `linecache` knows them, for a file of the client."""

    def __init__(self, filename: str) -> None:
        self._filename = filename

    def get_source(self, name: str) -> str:
        """The text of the file, whatever module asks; ImportError when the client can't be asked."""
        try:
            return ask_client(self._filename)
        except Exception as exc:
            raise ImportError(f"no source of {self._filename}: {exc}") from exc


def ask_client(filename: str) -> str:
    """The text of a file of the client. Raises what the controller failed with, or TimeoutError."""
    from monarch.actor.controllers import get_or_spawn_controller
    from monarch.actor.debugger import outcome_within

    controller: Any = outcome_within(get_or_spawn_controller("source_loader", SourceLoaderController), _ANSWER_S)
    return str(outcome_within(controller.get_source.call_one(filename), _ANSWER_S))


def problem_with(filename: str) -> str | None:
    """Why there is no source of a file, if the client was asked for it in vain; told once."""
    linecache.getlines(filename)
    return _problems.pop(filename, None)


def install_source_loader() -> None:
    """Let `linecache` of this process ask the client."""
    update: Callable[..., list[str]] = linecache.updatecache
    own_pid = os.getpid()

    def updatecache(filename: str, module_globals: dict[str, Any] | None = None) -> list[str]:
        lines = update(filename, module_globals)
        if lines or os.getpid() != own_pid or not _is_the_clients(filename):
            return lines
        _asked.add(filename)
        try:
            text = RemoteImportLoader(filename).get_source("")
        except ImportError as exc:
            _problems[filename] = str(exc.__cause__)
            return []
        lines = text.splitlines(keepends=True)
        # No time stamp: what `checkcache` can't compare it keeps.
        linecache.cache[filename] = (len(text), None, lines, filename)
        return lines

    linecache.updatecache = updatecache  # the one place that all readers of source go through


def _is_the_clients(filename: str) -> bool:
    if not filename or filename in _asked or filename.startswith(_NOT_A_FILE) or os.path.exists(filename):
        return False
    process = known_process()
    return process is not None and not process.proc.stopping and this_turn.wake_ups is None
