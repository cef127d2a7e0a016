"""The source of log lines in a proc: which actor prints, and what its log records say of it.

Rules of this file:
    1. A record is never altered: its message stays what the program made it, for every handler. Name and rank of the actor are
       fields of their own, and the prefix is put in front of the text when a handler formats it.
    2. A reply does not overtake what was printed before it: the caller's next `print` stands behind the actor's.

Read next: `_runtime/captured_stream.py` for what happens to the text.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from typing import Any

from monarch._base.ids import agent_at
from monarch._runtime import captured_stream
from monarch._runtime.cell import Cell
from monarch._runtime.log_lines import Writer
from monarch._wire.observation_messages import FlushLogs
from monarch.actor import settings
from monarch.actor.process import known_process

_BARRIER_S = 0.05
_make_record = logging.Logger.makeRecord


def attribute_output(mark: str) -> None:
    """From now on what actors of this process print and log is known to be theirs.

    Args:
        mark: of this process (`log_lines`); "": its output is not captured.
    """
    if mark:
        captured_stream.mark_with(mark, _writer, _hold_replies)
    # Not a record factory: fields that it sets are refused in `extra=`, and many programs log a `rank` of their own.
    logging.Logger.makeRecord = _make_described_record  # type: ignore[method-assign]


def _cell() -> Cell | None:
    # The process is looked up each time: what the logging module or a stream refers to outlives the finalisation of user code.
    process = known_process()
    cell = None if process is None else process.activation().cell
    return cell if isinstance(cell, Cell) and not cell.create.system else None


def _writer() -> Writer | None:
    cell = _cell()
    return None if cell is None else Writer(cell.create.name, cell.create.rank)


def _hold_replies() -> None:
    process = known_process()
    if process is not None:
        process.proc.sender.before_reply = _wait_shown


def _wait_shown() -> None:
    process = known_process()
    if process is None:
        return
    proc = process.proc
    proc.sender.before_reply = None
    if proc.host is not None:
        # Bounded: an agent that is stuck must not hold up the work. On the thread of an async actor this blocks its loop, for
        # the tenths of a millisecond that the agent needs.
        shown = proc.request(agent_at(proc.host.address), FlushLogs([proc.ref.uid]))
        with contextlib.suppress(TimeoutError):
            shown._wait(_BARRIER_S)


# --- records -------------------------------------------------------------------------------------------------------


def _make_described_record(self: logging.Logger, *args: Any, **kwargs: Any) -> logging.LogRecord:
    record = _make_record(self, *args, **kwargs)
    _describe(record)
    return record


def _describe(record: logging.LogRecord) -> None:
    cell = _cell()
    fields = record.__dict__
    if cell is None:  # a format that asks for the fields is to work for every record of the process
        fields.setdefault("actor", "")
        fields.setdefault("rank", -1)
        return
    fields.setdefault("actor", cell.create.name)
    fields.setdefault("rank", cell.create.rank)
    fields.setdefault("actor_prefix", f"[actor={cell.display}] ")
    root = logging.getLogger()
    for handler in root.handlers or (() if logging.lastResort is None else (logging.lastResort,)):
        if not isinstance(handler.formatter, ActorFormatter):
            handler.setFormatter(ActorFormatter(handler.formatter))


class ActorFormatter(logging.Formatter):
    """Puts the actor in front of the message, then formats as another formatter does."""

    def __init__(self, inner: logging.Formatter | None) -> None:
        super().__init__()
        self.inner = inner or logging.Formatter()

    def format(self, record: logging.LogRecord) -> str:
        """The record's text, with the prefix where the message is."""
        prefix = getattr(record, "actor_prefix", "")
        message = record.getMessage()
        if not prefix or not message or not settings.prefix_python_logs_with_actor:
            return self.inner.format(record)
        prefixed = copy.copy(record)
        prefixed.msg, prefixed.args = prefix + message, None
        text = self.inner.format(prefixed)
        record.exc_text = prefixed.exc_text  # what one handler has rendered serves the next
        return text

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
