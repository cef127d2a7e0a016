"""The printer: shows the output of procs in the process that asked for it, through its own `sys.stdout` and `sys.stderr`.

One thread takes what the host agents send, line by line, in the order of arrival; so a notebook shows it in the cell, and a
stdout that nobody reads stops this thread and, by missing credit, the writers, and nothing else.

Rules of this file:
    1. Everything that reaches the printer goes through one queue: lines, changes of what is shown how, requests to flush.
    2. A line is printed once: at once with its writer, or merged with a count when a window is set.
    3. Nobody waits for the printer without a bound: whoever reads stdout may have stopped.

Read next: `_runtime/logs.py` for the sender, `_runtime/log_merge.py` for the merging.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from monarch import config
from monarch._base.ids import ProcRef, agent_at, by_agent
from monarch._runtime.future import Future, gather, settled
from monarch._runtime.log_lines import decoded
from monarch._runtime.log_merge import Merged, Merger
from monarch._wire.observation_messages import FlushLogs, LogCredit, LogLine, LogLines, StreamLogs

if TYPE_CHECKING:
    from monarch._runtime.proc import Proc

FLUSH_S = 3.0
"""Longest wait for lines to be printed, where somebody waits for that."""
_STREAMS = {1: "stdout", 2: "stderr"}


class _Batch(NamedTuple):
    message: LogLines
    sender: ProcRef


class View:
    """How the output of some procs is shown."""

    def __init__(self, ranks: Mapping[str, int], window_s: float | None) -> None:
        """Args:
        ranks: rank in the whole mesh of each proc, by uid.
        window_s: similar lines are collected for so long and merged; None: each is printed at once.
        """
        self.ranks = ranks
        self.window_s = window_s
        self.mergers = {number: Merger(config.value("log_merge")) for number in _STREAMS}
        self.due_s: float | None = None
        """When what is collected is printed; None: nothing is."""

    def take(self) -> dict[int, list[Merged]]:
        """What is collected, by stream."""
        self.due_s = None
        return {number: merger.take() for number, merger in self.mergers.items() if merger}


class LogPrinter:
    """Prints lines of procs. Thread: any, except what says otherwise."""

    def __init__(self, proc: Proc) -> None:
        self._proc = proc
        self._queue: queue.SimpleQueue[_Batch | Callable[[], None] | None] = queue.SimpleQueue()
        self._views: dict[str, View] = {}
        self._agents: dict[str, set[str]] = {}
        """Procs whose output comes, by the address of their agent."""
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="monarch-logs", daemon=True)
        self._thread.start()

    # --- any thread ----------------------------------------------------------------------------------------------

    def put(self, message: LogLines, sender: ProcRef) -> None:
        """Print lines that `sender` has sent; returns at once."""
        self._queue.put(_Batch(message, sender))

    def choose(self, refs: Sequence[ProcRef], ranks: Mapping[str, int], *, here: bool, window_s: float | None) -> Future[None]:
        """Have the output of some procs shown here, or no longer.

        Args:
            ranks: see `View`.
        """
        if not here:
            return self.end_stream(refs)
        with self._lock:
            is_shown = any(ref.uid in uids for ref in refs for uids in self._agents.values())
        if not is_shown:
            return self.start_stream(refs, View(ranks, window_s))
        result: Future[None] = Future._new()  # what was written so far is printed as it was to be

        def start() -> None:
            self.start_stream(refs, View(ranks, window_s))._when_done(lambda: result._complete(None))

        self.flush()._when_done(start)
        return result

    def start_stream(self, refs: Sequence[ProcRef], view: View) -> Future[None]:
        """Have the output of some procs shown here, as `view` says; done when nothing of it goes elsewhere any more."""

        def change() -> None:
            self._flush()
            self._views.update(dict.fromkeys((ref.uid for ref in refs), view))

        self._queue.put(change)
        return self._ask(refs, on=True)

    def end_stream(self, refs: Sequence[ProcRef]) -> Future[None]:
        """The opposite; done when what came so far is printed."""
        result: Future[None] = Future._new()
        self._ask(refs, on=False)._when_done(lambda: self.forget([ref.uid for ref in refs], result))
        return result

    def _ask(self, refs: Sequence[ProcRef], *, on: bool) -> Future[None]:
        groups = {address: [ref.uid for ref in group] for address, group in by_agent(refs).items()}
        with self._lock:
            for address, uids in groups.items():
                known = self._agents.setdefault(address, set())
                if on:
                    known.update(uids)
                else:
                    known.difference_update(uids)
        requests = [self._proc.request(agent_at(address), StreamLogs(uids, on)) for address, uids in groups.items()]
        return gather([settled(request) for request in requests])._then(lambda _: None)

    def flush(self) -> Future[None]:
        """Done when everything that the procs have written so far is printed, merged or not."""
        with self._lock:
            asked = {address: sorted(uids) for address, uids in self._agents.items() if uids}
        requests = [self._proc.request(agent_at(address), FlushLogs(uids)) for address, uids in asked.items()]
        result: Future[None] = Future._new()
        gather([settled(request) for request in requests])._when_done(lambda: self.print_all(result))
        return result

    def print_all(self, result: Future[None]) -> None:
        """Complete `result` when everything that has come so far is printed."""

        def finish() -> None:
            self._flush()
            result._complete(None)

        self._queue.put(finish)

    def forget(self, uids: Sequence[str], result: Future[None]) -> None:
        """Some procs have ended, or are shown elsewhere; completes `result` when what came of them is printed."""

        def finish() -> None:
            self._flush()
            for uid in uids:
                self._views.pop(uid, None)
            with self._lock:
                for known in self._agents.values():
                    known.difference_update(uids)
            result._complete(None)

        self._queue.put(finish)

    def close(self, budget_s: float) -> None:
        """Print what has come, then end the thread; it is left behind when it does not come to its end in time."""
        self._queue.put(None)
        self._thread.join(budget_s)

    # --- the printer's thread ------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=self._until_due_s())
            except queue.Empty:
                self._flush(time.monotonic())
                continue
            if item is None:
                self._flush()
                return
            if isinstance(item, _Batch):
                self._print_batch(item.message)
                self._proc.tell(item.sender, LogCredit(item.message.nbytes))
            else:
                item()

    def _until_due_s(self) -> float | None:
        due = [view.due_s for view in self._views.values() if view.due_s is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _print_batch(self, message: LogLines) -> None:
        texts: dict[int, list[str]] = {1: [], 2: []}
        for line in message.lines:
            view = self._views.get(line.proc)
            if view is None or view.window_s is None:
                texts[line.stream].append(prefixed(line, message.host, -1 if view is None else view.ranks[line.proc]) + "\n")
            else:
                self._collect(view, view.window_s, line)
        for number, parts in texts.items():
            write(number, "".join(parts))

    def _collect(self, view: View, window_s: float, line: LogLine) -> None:
        merger = view.mergers[line.stream]
        merger.add((line.proc, line.actor, line.rank), decoded(line.text, line.missing))
        if view.due_s is None:
            view.due_s = time.monotonic() + window_s
        if merger.full:
            write(line.stream, block(merger.spill(), colored=_is_for_people(line.stream)))

    def _flush(self, due_s: float = float("inf")) -> None:
        """Print what views have collected that are due."""
        for view in {id(view): view for view in self._views.values()}.values():
            if view.due_s is not None and view.due_s <= due_s:
                for number, merged in view.take().items():
                    write(number, block(merged, colored=_is_for_people(number)))


def prefixed(line: LogLine, host: str, proc_rank: int) -> str:
    """`[<host> <proc> <actor>] [<rank>] text`; what is not known is left out.

    Args:
        proc_rank: shown when the actor is not known; -1: not known either.
    """
    proc = line.proc.partition("<")[0]
    who = f"[{host} {proc} {line.actor}]" if line.actor else f"[{host} {proc}]"
    rank = line.rank if line.actor else proc_rank
    if rank >= 0 and config.value("prefix_with_rank"):
        who = f"{who} [{rank}]"
    return f"{who} {decoded(line.text, line.missing)}"


def block(merged: Sequence[Merged], *, colored: bool) -> str:
    """Merged lines with a header and a footer."""
    frame, count, plain = ("\x1b[36m", "\x1b[33m", "\x1b[0m") if colored else ("", "", "")
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    lines = [f"{count}[{line.num_lines} similar log lines]{plain} {line.text}" for line in merged]
    return "\n".join(
        [f"{frame}>>> Aggregated Logs ({now}) >>>{plain}", *lines, f"{frame}<<< Aggregated Logs ({now}) <<<{plain}", ""],
    )


def write(number: int, text: str) -> None:
    """Write to this process's stdout (1) or stderr (2) as they are now; a broken one gets nothing."""
    stream: Any = getattr(sys, _STREAMS[number])
    if not text or stream is None:
        return
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError:
            encoding = getattr(stream, "encoding", None) or "ascii"
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except (OSError, ValueError):  # closed, or its reader has gone: nobody is left to tell
        return


def _is_for_people(number: int) -> bool:
    stream: Any = getattr(sys, _STREAMS[number])
    try:
        return bool(stream.isatty()) or shell() is not None
    except (AttributeError, ValueError):
        return False


# --- notebooks -----------------------------------------------------------------------------------------------------


def shell() -> Any:
    """The IPython shell of this process; None outside of IPython."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


_hooked: set[int] = set()


def flush_after_cells(flush: Callable[[], Future[None]]) -> None:
    """Under IPython, have the lines of a cell printed before the cell ends; once for each shell.

    Args:
        flush: starts a flush of everything that is shown.
    """
    running = shell()
    if running is None or id(running) in _hooked:
        return
    _hooked.add(id(running))

    def post_run_cell(*_: object) -> None:
        asyncio_events = sys.modules.get("asyncio.events")
        flushed = flush()
        if asyncio_events is None or asyncio_events._get_running_loop() is None:
            flushed.exception(FLUSH_S)  # inside a loop the flush goes on by itself

    running.events.register("post_run_cell", post_run_cell)
