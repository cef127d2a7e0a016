"""User scripts run as users run them: in a fresh interpreter, and searched for afterwards for anything still alive.

    done = run_script('''
        from monarch.actor import this_host
        this_host().spawn_procs(per_host={"gpus": 2}).initialized.get()
    ''')
    done.check()

    with start_script(source) as run:          # when something has to happen while it runs
        run.wait_line("ready")
        os.kill(run.pid, signal.SIGKILL)
        assert run.finish().leftover_pids == ()

Each run is a session of its own and carries `MONARCH_TEST_RUN=<random>` in its environment; what carries it too after
the script's end is a leftover, wherever it hangs in the process tree.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from monarch.testing import leaks

_MARK = "MONARCH_TEST_RUN"


@dataclass(frozen=True)
class CompletedRun:
    """How a script ended: exit status (negative for a signal), what it printed, and who outlived it."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    """From start to the exit of the script itself, without the search for leftovers."""
    leftovers: tuple[str, ...]
    """One line per process that was alive `grace_s` after the exit; they have been killed since."""

    @property
    def leftover_pids(self) -> tuple[int, ...]:
        return tuple(int(line.removeprefix("pid ").split(":")[0]) for line in self.leftovers)

    def check(self, returncode: int = 0) -> CompletedRun:
        """This run, when it ended with `returncode` and left nothing; else AssertionError with all that it printed."""
        assert self.returncode == returncode and not self.leftovers, str(self)
        return self

    def __str__(self) -> str:
        parts = [f"script ended with {self.returncode} after {self.seconds:.2f} s", "--- stdout", self.stdout, "--- stderr", self.stderr]
        return "\n".join([*parts, "--- left behind", *(self.leftovers or ("nothing",))])


class Run:
    """A script that is running. Use as a context manager: its end is the end of every process of the run."""

    def __init__(
        self,
        source: str,
        *,
        env: Mapping[str, str | None] | None = None,
        args: Sequence[str] = (),
        python: str = sys.executable,
        cwd: str | Path | None = None,
        send_stdin: str | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="run-")
        folder = Path(self._folder.name)
        (folder / "script.py").write_text(textwrap.dedent(source))
        # Files, not pipes: a leftover that holds a pipe open would make reading it wait for ever.
        self._stdout, self._stderr, stdin = folder / "stdout", folder / "stderr", folder / "stdin"
        stdin.write_text(send_stdin or "")
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        merged = {**os.environ, "PYTHONUNBUFFERED": "1", **(env or {}), _MARK: self._mark.split("=")[1]}
        with open(self._stdout, "wb") as out, open(self._stderr, "wb") as err, open(stdin, "rb") as source_in:
            self._started = time.monotonic()
            self._process = subprocess.Popen(
                [*prefix, python, str(folder / "script.py"), *args],
                stdin=source_in,
                stdout=out,
                stderr=err,
                cwd=cwd,
                env={name: value for name, value in merged.items() if value is not None},
                start_new_session=True,
            )
        self.pid = self._process.pid

    def stdout(self) -> str:
        return self._stdout.read_text(errors="replace")

    def stderr(self) -> str:
        return self._stderr.read_text(errors="replace")

    def pids(self) -> list[int]:
        """Every live process of this run, the script itself included."""
        return [pid for pid in leaks.marked(self._mark) if not leaks.command(pid).endswith("(zombie)")]

    def wait_line(self, pattern: str, timeout: float = 10.0) -> re.Match[str]:
        """The first match of `pattern` in a line of stdout.

        Raises:
            AssertionError: the script ended or `timeout` passed without one; the text holds all that was printed.
        """
        deadline = time.monotonic() + timeout
        while True:
            ended = self._process.poll() is not None
            text = self.stdout()
            if not ended and pattern.endswith("$"):  # a whole line is wanted, and the last one may be being written
                text = text[: text.rfind("\n") + 1]
            if match := re.search(pattern, text, re.MULTILINE):
                return match
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"no line matches {pattern!r}\n{self.finish(timeout=0.1)}")
            time.sleep(0.005)

    def finish(self, timeout: float = 20.0, grace_s: float = 2.0) -> CompletedRun:
        """Wait for the script's end, then up to `grace_s` for the end of everything that it had started.

        Past `timeout` the run is killed, and the return code is that of the kill; leftovers are killed as well.
        """
        try:
            returncode = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGABRT if timeout > 1 else signal.SIGKILL)  # faulthandler prints the stacks
            returncode = self._process.wait(5.0)
        seconds = time.monotonic() - self._started
        deadline = time.monotonic() + grace_s
        while (pids := self.pids()) and time.monotonic() < deadline:
            time.sleep(0.02)
        leftovers = tuple(filter(None, map(leaks.command, pids)))
        self._kill_all()
        return CompletedRun(returncode, self.stdout(), self.stderr(), seconds, leftovers)

    def _kill_all(self) -> None:
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._kill_all()
        self._process.wait(5.0)
        self._folder.cleanup()


def start_script(
    source: str,
    *,
    env: Mapping[str, str | None] | None = None,
    args: Sequence[str] = (),
    python: str = sys.executable,
    cwd: str | Path | None = None,
    send_stdin: str | None = None,
    prefix: Sequence[str] = (),
) -> Run:
    """Start `source` as a script of its own.

    Args:
        env: variables to add; a value of None removes one.
        prefix: a command that becomes the interpreter given behind it, such as `nsenter`.
    """
    with_stacks = {"PYTHONFAULTHANDLER": "1", **(env or {})}
    return Run(source, env=with_stacks, args=args, python=python, cwd=cwd, send_stdin=send_stdin, prefix=prefix)


def run_script(
    source: str,
    *,
    timeout: float = 20.0,
    grace_s: float = 2.0,
    env: Mapping[str, str | None] | None = None,
    args: Sequence[str] = (),
    python: str = sys.executable,
    cwd: str | Path | None = None,
    send_stdin: str | None = None,
    prefix: Sequence[str] = (),
) -> CompletedRun:
    """Run `source` to its end in a fresh interpreter and say how it ended and who outlived it.

    Raises:
        AssertionError: it was still running after `timeout`; the text holds its stacks and all that it printed.
    """
    with start_script(source, env=env, args=args, python=python, cwd=cwd, send_stdin=send_stdin, prefix=prefix) as run:
        done = run.finish(timeout, grace_s)
    assert done.seconds < timeout, f"script did not end within {timeout:g} s\n{done}"
    return done
