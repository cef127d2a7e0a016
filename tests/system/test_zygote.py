"""The zygote as its agent sees it: real processes behind a real socket."""

from __future__ import annotations

import base64
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from monarch._runtime import descendants, zygote
from monarch._wire.zygote_messages import (
    Command,
    Continued,
    Exited,
    Gone,
    KillProc,
    Leaving,
    Note,
    Reply,
    Request,
    Shutdown,
    SignalProc,
    Started,
    StartFailed,
    StartProc,
    Stopped,
    encode,
    reply_reader,
)

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="zygotes need Linux"), pytest.mark.timeout(30)]

_T = TypeVar("_T")
SRC = Path(zygote.__file__).parents[2]
WAIT_S = 15.0

# What the spec of a test's proc finds ready: it is Python source that runs as the proc's main module.
PROGRAM = """
import os, signal, socket, subprocess, sys
from monarch._runtime import zygote

def say(*words):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.sendto(" ".join(map(str, words)).encode(errors="surrogateescape"), os.environ["EAR"])

child = zygote.run(socket.socket(fileno={fd}))
if isinstance(child, zygote.Child):
    exec(child.spec.decode())
"""
IDLE = "say('ready', os.getpid()); signal.pause()"


class Agent:
    """Stands where the host agent does: starts a zygote, talks to it, hears what the procs say."""

    def __init__(self, folder: Path, *, send_buffer_bytes: int | None = None) -> None:
        self.ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.ear.bind(str(folder / "ear"))
        self.ear.settimeout(WAIT_S)
        self.env = {**os.environ, "PYTHONPATH": str(SRC), "EAR": str(folder / "ear")}
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(WAIT_S)
        if send_buffer_bytes is not None:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        with theirs:
            code = PROGRAM.format(fd=theirs.fileno())
            self.process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()], env=self.env)
        self.uids: set[str] = set()
        # Other sessions may run the same tests on this machine, and uids are unique on a host.
        self._run = f"@{uuid.uuid4().hex[:8]}"
        self._reader = reply_reader()
        self._replies: list[Reply] = []

    def full(self, uid: str) -> str:
        """The uid that goes over the wire for a test's short one."""
        return uid + self._run

    def send(self, request: Request) -> None:
        if not isinstance(request, Shutdown):
            request = msgspec.structs.replace(request, uid=self.full(request.uid))
        self.sock.sendall(encode(request))

    def start(self, uid: str, code: str = IDLE, **fields: object) -> None:
        env = fields.pop("env", {})
        assert isinstance(env, dict)
        self.uids.add(self.full(uid))
        defaults = {"cwd": "/", "sys_path": [str(SRC), *sys.path]}
        self.send(StartProc(uid, code.encode(), {**self.env, **env}, **{**defaults, **fields}))  # type: ignore[arg-type]

    def start_ready(self, uid: str, code: str = IDLE, **fields: object) -> int:
        """Start a proc that says "ready" and return its pid."""
        self.start(uid, code, **fields)
        pid = self.expect(Started, uid).pid
        assert self.hear()[0] == "ready"
        return pid

    def hear(self) -> list[str]:
        """The next thing that a proc says."""
        return os.fsdecode(self.ear.recv(65536)).split(" ")

    def reply(self) -> Reply:
        while not self._replies:
            data = self.sock.recv(65536)
            assert data, "the zygote ended"
            self._replies += self._reader.feed(data)
        reply = self._replies.pop(0)
        return reply if isinstance(reply, Note | Leaving) else msgspec.structs.replace(reply, uid=reply.uid.removesuffix(self._run))

    def expect(self, kind: type[_T], uid: str | None = None) -> _T:
        """The next reply, which has to be of this kind and about this proc."""
        reply = self.reply()
        assert isinstance(reply, kind), reply
        assert uid is None or getattr(reply, "uid", None) == uid, reply
        return reply

    def expect_end(self, uid: str) -> Exited:
        """The two replies that end a proc."""
        exited = self.expect(Exited, uid)
        assert self.expect(Gone, uid).left == []
        return exited

    def end(self) -> None:
        """Close the socket, then see that the zygote ends well and nothing of any proc is left."""
        self.sock.close()
        self.ear.close()
        assert self.process.wait(WAIT_S) in (0, -signal.SIGKILL)
        assert list(descendants.find_descendants(self.uids)) == []


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = Agent(tmp_path)
    yield made
    made.end()


def is_alive(pid: int) -> bool:
    return not descendants.is_zombie(pid)


def wait_end(pid: int) -> None:
    """Wait until a process that is not our child has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with open(fd, "rb"):
        assert select.select([fd], [], [], WAIT_S)[0], f"pid {pid} is still alive"


@pytest.mark.parametrize("code", [0, 7])
def test_a_fork_runs_its_spec_and_its_exit_code_is_told(agent: Agent, code: int) -> None:
    agent.start("a", f"say(child.uid, os.getpid()); sys.exit({code})")
    pid = agent.expect(Started, "a").pid
    assert agent.hear() == [agent.full("a"), str(pid)]
    assert agent.expect_end("a") == Exited("a", pid, code, None, False)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_death_by_signal_is_told_with_the_signal(agent: Agent, number: signal.Signals) -> None:
    pid = agent.start_ready("a", "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); " + IDLE)
    os.kill(pid, number)
    assert agent.expect_end("a") == Exited("a", pid, None, number, False)


def test_a_signal_from_the_agent_reaches_the_whole_group(agent: Agent) -> None:
    code = "p = subprocess.Popen(['sleep', '60']); say('ready'); say('child ended by', -p.wait()); signal.pause()"
    agent.start_ready("a", "signal.signal(signal.SIGUSR1, lambda *_: None); " + code)
    agent.send(SignalProc("a", signal.SIGUSR1))
    assert agent.hear() == ["child", "ended", "by", str(int(signal.SIGUSR1))]
    agent.send(KillProc("a"))
    agent.expect_end("a")


def test_stopping_and_continuing_are_told(agent: Agent) -> None:
    pid = agent.start_ready("a")
    for _ in range(2):
        os.kill(pid, signal.SIGSTOP)
        assert agent.expect(Stopped) == Stopped("a", pid)
        os.kill(pid, signal.SIGCONT)
        assert agent.expect(Continued) == Continued("a", pid)
    os.kill(pid, signal.SIGSTOP)
    agent.expect(Stopped)
    agent.send(KillProc("a"))
    agent.expect_end("a")


@pytest.mark.parametrize("place", ["last", "zygote.last", "signal.last.last"], ids=["main module", "module of ours", "module of its own"])
def test_module_globals_are_finalised_in_a_fork(agent: Agent, tmp_path: Path, place: str) -> None:
    code = """
import types; signal.last = types.ModuleType("fresh"); sys.modules["fresh"] = signal.last
class Last:
    def __init__(self, path, write=os.write):
        self.fd, self.write = os.open(path, os.O_CREAT | os.O_WRONLY), write
    def __del__(self):
        self.write(self.fd, b"finalised")
"""
    agent.start("a", f"{code}\n{place} = Last({str(tmp_path / 'out')!r})")
    agent.expect(Started)
    assert agent.expect_end("a").code == 0
    assert (tmp_path / "out").read_text() == "finalised"


def test_sixty_four_children_come_and_go_at_once(agent: Agent) -> None:
    uids = [f"p{rank}" for rank in range(64)]
    for uid in uids:
        agent.start(uid)
    started = [agent.expect(Started) for _ in uids]
    assert {reply.uid for reply in started} == set(uids)
    assert {int(agent.hear()[1]) for _ in uids} == {reply.pid for reply in started}
    for reply in started:
        os.kill(reply.pid, signal.SIGKILL)
    ends = [agent.reply() for _ in range(2 * len(uids))]
    assert {reply.uid for reply in ends if isinstance(reply, Exited)} == set(uids)
    assert {reply.uid for reply in ends if isinstance(reply, Gone)} == set(uids)


def test_a_uid_is_refused_while_its_first_proc_lives(agent: Agent) -> None:
    agent.start_ready("a")
    agent.start("a")
    assert f"{agent.full('a')!r} exists already" in agent.expect(StartFailed, "a").reason
    agent.send(KillProc("a"))
    agent.expect_end("a")
    agent.start_ready("a")


OFFSPRING = {
    "plain": "pid = subprocess.Popen(['sleep', '60']).pid",
    "new session": "pid = subprocess.Popen(['sleep', '60'], start_new_session=True).pid",
    "clean environment": "pid = subprocess.Popen(['/bin/sleep', '60'], env={}, start_new_session=True).pid",
    "tree": "pid = int(subprocess.run(['sh', '-c', 'setsid sh -c \"setsid sleep 60 & wait\" >&2 & echo $!'], stdout=-1).stdout)",
    "daemon": """
if (first := os.fork()) == 0:
    os.setsid()
    if os.fork() == 0:
        os.environ.clear()
        os.execve('/bin/sh', ['sh', '-c', 'echo $$ > "$0"; exec sleep 60', PIPE], {})
    os._exit(0)
os.waitpid(first, 0)
pid = int(open(PIPE).readline())
""",
    "forked daemon": """
if (first := os.fork()) == 0:
    os.setsid()
    if os.fork() == 0:
        open(PIPE, "w").write(str(os.getpid()))
        signal.pause()
    os._exit(0)
os.waitpid(first, 0)
pid = int(open(PIPE).readline())
""",
}


def with_offspring(kind: str, folder: Path, end: str) -> str:
    os.mkfifo(folder / "fifo")
    return f"PIPE = {str(folder / 'fifo')!r}\n{OFFSPRING[kind]}\nsay(pid)\n{end}"


@pytest.mark.parametrize("way", ["agent kills", "stranger kills", "returns"])
@pytest.mark.parametrize("kind", OFFSPRING)
def test_descendants_go_with_their_proc(agent: Agent, tmp_path: Path, kind: str, way: str) -> None:
    agent.start("a", with_offspring(kind, tmp_path, "sys.exit(3)" if way == "returns" else "signal.pause()"))
    pid = agent.expect(Started).pid
    offspring = int(agent.hear()[0])
    if way == "agent kills":
        agent.send(KillProc("a"))
    elif way == "stranger kills":
        os.kill(pid, signal.SIGKILL)
    assert agent.expect(Exited).code == (3 if way == "returns" else None)
    assert agent.expect(Gone).left == []
    assert not is_alive(offspring)
    assert list(descendants.find_descendants([agent.full("a")])) == []


@pytest.mark.parametrize("kind", ["daemon", "forked daemon"])
def test_a_daemon_lives_as_long_as_its_proc(agent: Agent, tmp_path: Path, kind: str) -> None:
    agent.start("a", with_offspring(kind, tmp_path, "signal.pause()"))
    agent.expect(Started)
    daemon = int(agent.hear()[0])
    agent.start_ready("b")
    agent.send(KillProc("b"))
    agent.expect_end("b")
    assert is_alive(daemon)
    agent.send(KillProc("a"))
    agent.expect_end("a")
    assert not is_alive(daemon)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"command": Command("/no/such/python", None, [])}, "failed to spawn process '/no/such/python': No such file or directory"),
        ({"command": Command("no-such-python", "x", ["y"])}, "failed to spawn process 'no-such-python': No such file or directory"),
        ({"command": Command("/etc", None, [])}, "failed to spawn process '/etc': Permission denied"),
        ({"command": Command("a\udcff", None, [])}, "failed to spawn process 'a\\udcff': No such file or directory"),
        (
            {"command": Command("/bin/true", None, []), "env": {"BIG": "x" * 200_000}},
            "failed to spawn process '/bin/true': Argument list too long: the environment, which carries the proc's spec, takes 20",
        ),
        ({"cwd": "/no/such/folder"}, "failed to spawn process in working directory '/no/such/folder': No such file or directory"),
        ({"bind": {"cpu": "0"}}, "proc_bind has no key 'cpu'; known: cpunodebind, membind, physcpubind, cpus"),
        ({"bind": {"cpus": "zero"}}, "proc_bind cpus='zero' is not a list such as '0-3,8'"),
        ({"bind": {"physcpubind": "9999"}}, "proc_bind physcpubind='9999': Invalid argument; usable CPUs: 0"),
        ({"bind": {"cpunodebind": "999"}}, "proc_bind cpunodebind='999': No such file or directory"),
        ({"env": {"A=B": "c"}}, "failed to set up process: ValueError: illegal environment variable name"),
    ],
)
def test_a_failed_start_names_the_value_at_fault(agent: Agent, fields: dict[str, Any], reason: str) -> None:
    agent.start("a", **fields)
    assert agent.expect(StartFailed, "a").reason.startswith(reason)
    agent.start_ready("a")  # the name is free again, the zygote unharmed


def test_a_fork_finds_its_environment_directory_and_module_path(agent: Agent, tmp_path: Path) -> None:
    (tmp_path / "only_here.py").write_text("")
    code = """
import only_here
say(*sorted(os.environ))
echoed = subprocess.run(['sh', '-c', 'printf "%s %s" $ODD $MONARCH_PROC_UID'], stdout=-1).stdout
say(os.environ['ODD'], os.fsdecode(echoed))
say(os.getcwd(), sys.path, os.readlink('/proc/self/fd/0'), sys.stdin.read(), sys.stdout.line_buffering)
"""
    env = {"EAR": agent.env["EAR"], "ODD": "\udcff", "PATH": os.environ["PATH"]}
    agent.env = {}
    path = [str(tmp_path), *sys.path]
    agent.start("a", code, env=env, cwd=str(tmp_path), sys_path=path)
    agent.expect(Started)
    assert agent.hear() == ["EAR", "MONARCH_PROC_UID", "ODD", "PATH"]
    assert agent.hear() == ["\udcff", "\udcff", agent.full("a")]
    assert " ".join(agent.hear()) == f"{tmp_path} {path} /dev/null  True"
    assert agent.expect_end("a").code == 0


def test_a_command_finds_its_environment_directory_arguments_and_spec(agent: Agent, tmp_path: Path) -> None:
    script = tmp_path / "proc.sh"
    script.write_text('#!/bin/sh\nprintf \'%s\\n\' "$PWD" "$1" "$ODD" "$MONARCH_PROC_UID" "$MONARCH_PROC_SPEC" > out; exit 4\n')
    script.chmod(0o755)
    agent.env = {"ODD": "\udcff", "PATH": str(tmp_path)}
    agent.start("a", "spec", command=Command("proc.sh", "any", ["x y"]), cwd=str(tmp_path))
    agent.expect(Started, "a")
    assert agent.expect_end("a").code == 4
    lines = os.fsdecode((tmp_path / "out").read_bytes()).splitlines()
    assert lines == [str(tmp_path), "x y", "\udcff", agent.full("a"), base64.b64encode(b"spec").decode()]


def test_a_fresh_interpreter_has_its_environment_before_its_first_import(agent: Agent, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys; open(os.environ['MARK'], 'w').write(f'{os.environ[\"MARK\"]} {\"torch\" in sys.modules}')"
    )
    for mark in ("r0", "r1"):
        env = {"MARK": mark, "PYTHONPATH": str(tmp_path)}
        agent.start(mark, command=Command(sys.executable, None, ["-c", "pass"]), env=env, cwd=str(tmp_path))
        agent.expect(Started)
        assert agent.expect_end(mark).code == 0
    assert [(tmp_path / mark).read_text() for mark in ("r0", "r1")] == ["r0 False", "r1 False"]


@pytest.mark.parametrize("command", [None, Command("/bin/sleep", None, ["60"])], ids=["fork", "command"])
def test_a_child_leads_a_session_with_signals_at_their_defaults(agent: Agent, command: Command | None) -> None:
    agent.start("a", command=command)
    pid = agent.expect(Started).pid
    if command is None:
        agent.hear()
    fields = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    assert os.getsid(pid) == os.getpgid(pid) == pid
    assert int(fields["SigBlk"], 16) == 0
    ignored = int(fields["SigIgn"], 16)
    pythons_own = 1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1
    assert ignored == (pythons_own if command is None else 0)
    assert int(fields["SigCgt"], 16) & ~(1 << 31 | 1 << 32) == (1 << signal.SIGINT - 1 if command is None else 0)


@pytest.mark.parametrize("key", ["cpus", "physcpubind", "cpunodebind"])
@pytest.mark.parametrize("command", [None, Command("/bin/sleep", None, ["60"])], ids=["fork", "command"])
def test_a_child_runs_on_the_cpus_it_is_bound_to(agent: Agent, key: str, command: Command | None) -> None:
    last = max(os.sched_getaffinity(0))
    agent.start("a", bind={key: "0" if key == "cpunodebind" else str(last)}, command=command)
    reply = agent.reply()
    if isinstance(reply, StartFailed):
        assert key == "cpunodebind" and not Path("/sys/devices/system/node/node0").exists()
        return
    assert isinstance(reply, Started)
    assert os.sched_getaffinity(reply.pid) == (os.sched_getaffinity(0) if key == "cpunodebind" else {last})


def test_memory_is_bound_or_a_note_says_why_not(agent: Agent) -> None:
    agent.start("a", "say(open('/proc/self/numa_maps').readline())", bind={"membind": "0"})
    reply = agent.reply()
    if isinstance(reply, Note):
        assert "membind='0' ignored" in reply.text
        agent.expect(Started)
    else:
        assert "bind:0" in agent.hear()


def test_a_child_holds_none_of_the_zygotes_descriptors(agent: Agent) -> None:
    agent.start_ready("first")
    code = """
links = (f'/proc/self/fd/{fd}' for fd in os.listdir('/proc/self/fd') if int(fd) > 2)
say('held:', *(os.readlink(link) for link in links if os.path.exists(link) or os.path.islink(link)))
"""
    agent.start("a", code)
    agent.expect(Started)
    assert agent.hear() == ["held:"]


def test_a_preload_that_fails_is_noted_once_and_the_proc_starts(agent: Agent) -> None:
    agent.start("a", preload=["no_such_module", "json"])
    assert "could not preload 'no_such_module': ModuleNotFoundError" in agent.expect(Note).text
    agent.expect(Started, "a")
    agent.start("b", "say('json' in sys.modules)", preload=["no_such_module"])
    agent.expect(Started, "b")


def test_a_death_is_told_while_the_zygote_imports(agent: Agent, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    (tmp_path / "slow_module.py").write_text(f"open({str(gate)!r}).read()")
    pid = agent.start_ready("a")
    agent.start("b", "import slow_module", sys_path=[str(tmp_path), *sys.path], preload=["slow_module"])
    with open(gate, "w"):  # opens when the import has come to its read
        os.kill(pid, signal.SIGKILL)
        assert agent.expect(Exited, "a").signal == signal.SIGKILL
    assert {type(agent.reply()), type(agent.reply())} == {Gone, Started}


def test_an_import_does_not_delay_the_end(agent: Agent, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    (tmp_path / "slow_module.py").write_text(f"open({str(gate)!r}).read()")
    agent.start_ready("a")
    agent.start("b", "import slow_module", sys_path=[str(tmp_path), *sys.path], preload=["slow_module"])
    with open(gate, "w"):  # opens when the import has come to its read, and the import goes on until it is closed
        os.kill(agent.process.pid, signal.SIGCONT)  # harmless as long as the agent lives
        os.kill(agent.process.pid, signal.SIGTERM)
        agent.expect(Leaving)
        told: list[Any] = []
        while len(told) < 3:  # the two are ended at once, and tell of it in any order
            reply = agent.reply()
            told += [] if isinstance(reply, Note) else [reply]
        assert [type(reply) for reply in told if reply.uid == "a"] == [Exited, Gone]
        assert ["shutting down" in reply.reason for reply in told if reply.uid == "b"] == [True]
        assert agent.process.wait(WAIT_S) == 0


def test_preloaded_libraries_compute_in_every_fork(agent: Agent) -> None:
    pytest.importorskip("torch", reason="preloads torch, which is the user's choice to install")
    code = """
loaded = {"numpy", "torch"} <= sys.modules.keys()
import numpy, torch
assert numpy.allclose(numpy.ones((300, 300)) @ numpy.ones((300, 300)), 300)
assert torch.allclose(torch.ones(300, 300) @ torch.ones(300, 300), torch.full((300, 300), 300.0))
say('ready', loaded)
signal.pause()
"""
    for rank in range(16):
        agent.start(f"p{rank}", code, preload=["numpy", "torch"])
    assert {agent.expect(Started).uid for _ in range(16)} == {f"p{rank}" for rank in range(16)}
    assert [agent.hear() for _ in range(16)] == [["ready", "True"]] * 16


def test_forks_do_not_share_random_streams(agent: Agent) -> None:
    pytest.importorskip("torch", reason="preloads torch, which is the user's choice to install")
    code = "import random, numpy, torch; say(random.random(), numpy.random.random(), torch.rand(1, dtype=torch.float64).item())"
    for uid in ("a", "b", "c"):
        agent.start(uid, code, preload=["random", "numpy.random", "torch"])
    drawn = [agent.hear() for _ in range(3)]
    assert [len(set(column)) for column in zip(*drawn, strict=True)] == [3, 3, 3]


def test_an_idle_fork_is_small(agent: Agent) -> None:
    pytest.importorskip("torch", reason="preloads torch, which is the user's choice to install")
    agent.start_ready("first", preload=["numpy", "torch"])
    pid = agent.start_ready("a", preload=["numpy", "torch"])
    rows = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]]
    assert sum(int(row[1]) for row in rows if row[0].startswith("Private_")) < 6000


def test_procs_die_with_a_killed_zygote(agent: Agent) -> None:
    pids = [agent.start_ready("a"), agent.start_ready("b")]
    agent.start("c", command=Command("/bin/sleep", None, ["60"]))
    pids.append(agent.expect(Started).pid)
    agent.process.kill()
    for pid in pids:
        wait_end(pid)


@pytest.mark.parametrize("way", ["agent goes", "agent asks", "SIGTERM", "SIGHUP"])
def test_the_end_of_the_zygote_takes_procs_and_descendants(agent: Agent, tmp_path: Path, way: str) -> None:
    agent.start("a", "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + with_offspring("forked daemon", tmp_path, "signal.pause()"))
    pids = [agent.expect(Started).pid, int(agent.hear()[0]), agent.start_ready("b")]
    os.kill(pids[-1], signal.SIGSTOP)
    if way == "agent goes":
        agent.sock.close()
    elif way == "agent asks":
        agent.send(Shutdown())
    else:
        agent.process.send_signal(getattr(signal, way))
    assert agent.process.wait(WAIT_S) == 0
    assert not any(map(is_alive, pids))
    if way != "agent goes":
        replies = [agent.reply() for _ in range(4)]
        for kind in (Stopped, Leaving):  # the SIGKILL can overtake the telling of a stop
            if any(isinstance(reply, kind) for reply in replies):
                replies.append(agent.reply())
        assert any(isinstance(reply, Leaving) for reply in replies) == (way != "agent asks")
        for kind in (Exited, Gone):
            assert {reply.uid for reply in replies if isinstance(reply, kind)} == {"a", "b"}


def test_ctrl_c_does_not_touch_the_zygote(agent: Agent) -> None:
    agent.start_ready("a")
    agent.process.send_signal(signal.SIGINT)
    agent.start_ready("b")


def test_a_slow_agent_does_not_stop_the_zygote(tmp_path: Path) -> None:
    agent = Agent(tmp_path, send_buffer_bytes=2048)
    with contextlib.closing(contextlib.ExitStack()) as cleanup:
        cleanup.callback(agent.end)
        pid = agent.start_ready("a")
        for _ in range(500):
            agent.start("a", "")
        agent.send(KillProc("a"))
        wait_end(pid)  # nobody has read a reply yet
        replies = [agent.reply() for _ in range(502)]
        assert [type(reply) for reply in replies[-2:]] == [Exited, Gone]
        assert {type(reply) for reply in replies[:-2]} == {StartFailed}


def test_the_error_of_a_killed_proc_is_a_matter_of_milliseconds(agent: Agent) -> None:
    took_s = []
    for rank in range(5):
        pid = agent.start_ready(f"p{rank}")
        began = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        agent.expect(Exited)
        took_s.append(time.perf_counter() - began)
        agent.expect(Gone)
    assert min(took_s) < 0.05
