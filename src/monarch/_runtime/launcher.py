"""How a child becomes a proc: everything between the fork and its first instruction of user code.

`become` runs in the child and either returns (a warm fork: the caller goes on as the proc), or executes another program,
or reports why it could not and ends. The parent reads the report from a pipe that closes when the child is under way.

Rules of this file:
    1. Nothing here is imported, compiled or looked up for the first time in a child: 256 children would each pay for it
       in time and in pages of their own. The zygote has everything ready before it forks.
    2. A step that fails names the value it failed on. A binding that the kernel cannot do is a note, a wrong one an error.

Read next: `zygote.py`, the parent; `descendants.py` for the tag that a child gets here.
"""

from __future__ import annotations

import base64
import ctypes
import errno
import os
import platform
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from monarch._runtime import descendants
from monarch._wire.zygote_messages import Command, StartProc

SPEC_VARIABLE = "MONARCH_PROC_SPEC"
"""Environment variable with the base64 of the spec, for a proc that starts by a command."""

FAILED_STATUS = 127
"""Exit status of a child that reported a failure; as a shell does."""

_LOAD_TIME_PREFIXES = (
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "VECLIB_", "NUMEXPR_", "TBB_", "NPY_", "ATEN_",
    "TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "PYTORCH_", "TRITON_", "CUDA_", "CUBLAS_", "CUDNN_", "NCCL_", "NVIDIA_", "HIP_", "ROCM_",
    "HSA_", "GLOO_", "LD_", "GLIBC_", "MALLOC_", "PYTHON", "LC_", "LANG",
)  # fmt: skip
# Read when the driver is first used, not when its library is loaded. They differ per rank, and must not cost an import per rank.
_USE_TIME = frozenset({"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"})

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MPOL_BIND = 2
_BINDINGS = ("cpunodebind", "membind", "physcpubind", "cpus")

_NOTE = b"note:"
_FAILURE = b"failed:"


class LaunchError(Exception):
    """A child could not be set up. The text is what the user reads; it names the value at fault."""


class Report(NamedTuple):
    """What a child said before it was under way."""

    notes: list[str]
    failure: str | None


def startup_environment(env: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    """The part of `env` that an interpreter and its libraries read while they load.

    A fork gets its own environment after that, so a zygote serves only children whose value of this equals its own.
    """
    return frozenset((name, env[name]) for name in env if name.startswith(_LOAD_TIME_PREFIXES) and name not in _USE_TIME)


def become(start: StartProc, *, parent: int, report: int) -> None:
    """Turn this freshly forked process into the proc; returns only for a warm fork. All signals are blocked on entry.

    Args:
        parent: pid of the zygote; when it has ended meanwhile, so does this process.
        report: write end of the pipe to the zygote. Closed on return, and by the exec.
    """
    try:
        _join_zygote(start.uid, parent)
        _redirect(start.outputs)
        _enter_directory(start.cwd)
        for note in _bind(start.bind):
            os.write(report, _NOTE + _encoded(note))
        if start.command is not None:
            _execute(start, start.command)
        _replace_environment({**start.env, descendants.UID_VARIABLE: start.uid})
        sys.path[:] = start.sys_path
        _reseed()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
    except BaseException as exc:  # nothing may unwind into the zygote's loop, least of all here
        reason = str(exc) if isinstance(exc, LaunchError) else f"failed to set up process: {type(exc).__name__}: {exc}"
        try:
            os.write(report, _FAILURE + _encoded(reason))
        finally:
            os._exit(FAILED_STATUS)
    os.close(report)


def parse_report(raw: bytes) -> Report:
    """What `become` wrote to its report pipe."""
    lines = [line for line in raw.split(b"\0") if line]
    notes = [line.removeprefix(_NOTE).decode() for line in lines if line.startswith(_NOTE)]
    failures = [line.removeprefix(_FAILURE).decode() for line in lines if line.startswith(_FAILURE)]
    return Report(notes, failures[0] if failures else None)


def parse_cpus(text: str) -> set[int]:
    """CPU or node numbers of a list such as "0-3,8" or "0-7:2" (every second one).

    Raises:
        ValueError: `text` is no such list, or names nothing.
    """
    numbers: set[int] = set()
    for part in text.split(","):
        span, _, stride = part.strip().partition(":")
        first, dash, last = span.partition("-")
        numbers.update(range(int(first), int(last if dash else first) + 1, int(stride or 1)))
    if not numbers or min(numbers) < 0:
        raise ValueError(f"{text!r} names no number")
    return numbers


def _encoded(text: str) -> bytes:
    # Bounded: a pipe may be as small as a page, and nobody reads it while the parent forks the next child.
    return text.replace("\0", "").encode("utf-8", "backslashreplace")[:1500].decode(errors="ignore").encode() + b"\0"


def _join_zygote(uid: str, parent: int) -> None:
    descendants.die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel knew of our wish
        os._exit(FAILED_STATUS)
    # A session, not only a group: without a controlling terminal no Ctrl-C, Ctrl-Z or hang-up can reach the proc.
    os.setsid()
    descendants.mark_self(uid)


def _redirect(outputs: Sequence[str]) -> None:
    for fd, path in enumerate(outputs, start=1):
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # else it would wait for an agent that is gone
        os.set_blocking(pipe, True)
        if pipe == fd:  # it was closed
            os.set_inheritable(fd, True)
        else:
            os.dup2(pipe, fd)
            os.close(pipe)


def _enter_directory(cwd: str) -> None:
    try:
        os.chdir(cwd)
    except OSError as exc:
        raise LaunchError(f"failed to spawn process in working directory {cwd!r}: {exc.strerror}") from exc


def _bind(bind: Mapping[str, str]) -> list[str]:
    """Bind this process to CPUs and memory nodes; the notes say what the kernel cannot do."""
    unknown = sorted(bind.keys() - set(_BINDINGS))
    if unknown:
        raise LaunchError(f"proc_bind has no key {unknown[0]!r}; known: {', '.join(_BINDINGS)}")
    notes = []
    # numactl's keys win: `cpus` is what to do on hosts without numactl. Of two lists the finer one holds.
    key = next((key for key in ("physcpubind", "cpunodebind", "cpus") if key in bind), None)
    if key is not None:
        _bind_cpus(key, bind[key])
    if "membind" in bind:
        notes += _bind_memory(bind["membind"])
    return notes


def _bind_cpus(key: str, text: str) -> None:
    try:
        if text == "all":
            return
        cpus = parse_cpus(text)
        if key == "cpunodebind":
            cpus = set().union(*(_cpus_of_node(node) for node in sorted(cpus)))
        os.sched_setaffinity(0, cpus)
    except (ValueError, OverflowError) as exc:
        raise LaunchError(f"proc_bind {key}={text!r} is not a list such as '0-3,8': {exc}") from exc
    except OSError as exc:
        usable = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        raise LaunchError(f"proc_bind {key}={text!r}: {exc.strerror}; usable CPUs: {usable}") from exc


def _cpus_of_node(node: int) -> set[int]:
    with open(f"/sys/devices/system/node/node{node}/cpulist") as file:
        return parse_cpus(file.read())


def _bind_memory(text: str) -> list[str]:
    if text == "all":
        return []
    try:
        nodes = parse_cpus(text)
    except ValueError as exc:
        raise LaunchError(f"proc_bind membind={text!r} is not a list such as '0-1': {exc}") from exc
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return [f"proc_bind membind={text!r} ignored: unknown system call number on {platform.machine()}"]
    words = max(nodes) // 64 + 1
    mask = (ctypes.c_uint64 * words)()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    # The kernel reads one bit less than it is told.
    if descendants.libc.syscall(number, _MPOL_BIND, mask, ctypes.c_ulong(words * 64 + 1)) != 0:
        return [f"proc_bind membind={text!r} ignored: {os.strerror(ctypes.get_errno())}"]
    return []


def _execute(start: StartProc, command: Command) -> None:
    env = {
        **start.env,
        descendants.UID_VARIABLE: start.uid,
        SPEC_VARIABLE: base64.b64encode(start.spec).decode(),
    }
    # Ignored signals stay ignored across an exec: Python's own SIGPIPE and SIGXFSZ must not reach a foreign program.
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    argv0 = command.program if command.arg0 is None else command.arg0
    try:
        os.execvpe(command.program, [argv0, *command.args], env)
    except (OSError, ValueError) as exc:
        cause = exc.strerror if isinstance(exc, OSError) else str(exc)
        if isinstance(exc, OSError) and exc.errno == errno.E2BIG:
            cause = f"{cause}: the environment, which carries the proc's spec, takes {sum(map(len, env.values()))} bytes"
        raise LaunchError(f"failed to spawn process {command.program!r}: {cause}") from exc


def _replace_environment(env: Mapping[str, str]) -> None:
    """Make os.environ and the C library's environment equal `env`, in place, touching only what differs."""
    zone = os.environ.get("TZ")
    for name in [name for name in os.environ if name not in env]:
        del os.environ[name]
    for name, value in env.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    if env.get("TZ") != zone:
        time.tzset()


def _reseed() -> None:
    """Give this child random streams of its own; `random` itself does so at each fork.

    Only what is loaded can have been inherited, so nothing is imported.
    """
    legacy_seed = getattr(sys.modules.get("numpy.random"), "seed", None)
    if legacy_seed is not None:
        legacy_seed()
    generator = getattr(sys.modules.get("torch"), "default_generator", None)
    if generator is not None:
        generator.seed()
