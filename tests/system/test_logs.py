"""Output of procs: every line once, in order, with its writer, whoever dies, blocks or floods."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from monarch.actor import Actor, SupervisionError, endpoint, this_host
from monarch.cli import main
from monarch.config import configured
from system.conftest import requires_torch
from system.script import CompletedRun, run_script, start_script
from system.waiting import error_of, wait_until

pytest_plugins = ["system.recorder"]

PRELUDE = """
import asyncio, os, signal, subprocess, sys, threading, time
import monarch.actor
from monarch import config
from monarch.actor import Actor, current_rank, endpoint, this_host, default_bootstrap_cmd

class Printer(Actor):
    @endpoint
    def numbers(self, times, count):
        for _ in range(times):
            for number in range(count):
                print(number)
    @endpoint
    def say(self, text, stream="stdout"):
        print(text, file=getattr(sys, stream))
    @endpoint
    def run(self, code):
        import ctypes, os, signal, subprocess, sys, threading, time
        from monarch.actor import current_rank
        exec(code, locals())
    @endpoint
    def pid(self):
        return os.getpid()

def show(mesh, **options):
    asyncio.run(mesh.logging_option(**options))
"""


def run(source: str, code: str = "", **options: Any) -> CompletedRun:
    """Run a script that ends well; `CODE` in it is source that an actor runs."""
    return run_script(script_of(source, code), **options).check()


def script_of(source: str, code: str = "") -> str:
    return f"{PRELUDE}\nCODE = {textwrap.dedent(code)!r}\n{textwrap.dedent(source)}"


BLOCK = re.compile(r">>> Aggregated Logs \(.*\) >>>\n(.*?)<<< Aggregated Logs \(.*\) <<<\n", re.DOTALL)


def merged_lines(text: str) -> list[tuple[int, str]]:
    """Counts and texts of all blocks; what is outside of blocks must be nothing."""
    assert BLOCK.sub("", text) == "", text
    rows = [line for block in BLOCK.findall(text) for line in block.splitlines()]
    matches = [re.fullmatch(r"\[(\d+) similar log lines\] (.*)", row) for row in rows]
    assert all(matches), text
    return [(int(match[1]), match[2]) for match in matches if match]


# --- every line once, none lost ------------------------------------------------------------------------------------


def test_merged_lines_add_up_and_none_covers_two_lines_of_one_actor():
    done = run("""
        procs = this_host().spawn_procs(per_host={"gpus": 4})
        printers = procs.spawn("printer", Printer)
        show(procs, stream_to_client=True, aggregate_window_sec=1)
        printers.numbers.call(2, 10).get()
    """)  # the flush is that at the end of the program
    totals: Counter[str] = Counter()
    for count, text in merged_lines(done.stdout):
        assert count <= 4
        totals[text] += count
    assert totals == {str(number): 8 for number in range(10)}


def test_streamed_lines_come_once_with_actor_and_rank():
    done = run("""
        procs = this_host().spawn_procs(per_host={"gpus": 4})
        printers = procs.spawn("printer", Printer)
        show(procs, stream_to_client=True)
        printers.numbers.call(2, 10).get()
    """)
    lines = done.stdout.splitlines()
    matches = [re.fullmatch(r"\[\S+ anon-(\d) printer\] \[(\d)\] (\d)", line) for line in lines]
    assert len(lines) == 80 and all(matches), done
    assert all(match[1] == match[2] for match in matches if match)
    for rank in "0123":
        assert [match[3] for match in matches if match and match[2] == rank] == list("0123456789") * 2
    assert done.stderr == ""


def test_without_an_option_lines_come_raw_once_and_before_what_the_caller_prints_next():
    done = run("""
        printers = this_host().spawn_procs(per_host={"gpus": 2}).spawn("printer", Printer)
        for turn in range(30):
            printers.say.call(f"actor {turn}").get()
            print(f"client {turn}")
    """)
    wanted = [line for turn in range(30) for line in (f"actor {turn}", f"actor {turn}", f"client {turn}")]
    assert done.stdout.splitlines() == wanted
    assert done.stderr == ""


def test_what_goes_where_can_change_at_any_time():
    done = run("""
        procs = this_host().spawn_procs(name="crew")
        printers = procs.spawn("printer", Printer)
        printers.say.call("one").get()
        show(procs, stream_to_client=True)
        printers.say.call("two").get()
        show(procs, stream_to_client=True, aggregate_window_sec=60)
        printers.say.call("three").get()
        printers.say.call("four", "stderr").get()
        show(procs, stream_to_client=True, aggregate_window_sec=30)
        print("window changed")
        printers.say.call("five").get()
        show(procs)
        print("switched off")
        printers.say.call("six").get()
        with config.configured(prefix_with_rank=False):
            show(procs, stream_to_client=True)
            printers.say.call("seven").get()
            procs.stop().get()
        print("stopped")
    """)
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "T", re.sub(r"^\[\S+ crew", "[H crew", done.stdout, flags=re.MULTILINE))
    head, foot = ">>> Aggregated Logs (T) >>>", "<<< Aggregated Logs (T) <<<"
    assert text.splitlines() == [
        "one",
        "[H crew-0 printer] [0] two",
        *(head, "[1 similar log lines] three", foot),
        "window changed",
        *(head, "[1 similar log lines] five", foot),
        "switched off",
        "six",
        "[H crew-0 printer] seven",
        "stopped",
    ]
    assert [text for _, text in merged_lines(done.stderr)] == ["four"]


def test_a_window_prints_by_itself():
    done = run("""
        procs = this_host().spawn_procs()
        printers = procs.spawn("printer", Printer)
        show(procs, stream_to_client=True, aggregate_window_sec=1)
        printers.say.call("soon").get()
        started = time.monotonic()
        class Watch:
            def __init__(self, inner): self.inner, self.seen = inner, threading.Event()
            def write(self, text): self.seen.set(); return self.inner.write(text)
            def __getattr__(self, name): return getattr(self.inner, name)
        sys.stdout = Watch(sys.stdout)
        assert sys.stdout.seen.wait(5), "nothing was printed"
        assert time.monotonic() - started > 0.5
        sys.stdout = sys.stdout.inner
    """)
    assert merged_lines(done.stdout) == [(1, "soon")]


def test_lines_of_c_code_subprocesses_threads_and_fresh_interpreters_are_captured():
    done = run(
        """
        hosts = this_host()
        mesh = hosts.spawn_procs(name="warm"), hosts.spawn_procs(name="cold", bootstrap_command=default_bootstrap_cmd())
        for procs in mesh:
            printers = procs.spawn("printer", Printer)
            show(procs, stream_to_client=True)
            printers.run.call(CODE).get()
        """,
        r"""
        print("from python")
        os.write(1, b"from the descriptor\n")
        subprocess.run(["sh", "-c", "echo from a shell; echo from /dev/stderr > /dev/stderr"])
        ctypes.CDLL(None).puts(b"from c"); ctypes.CDLL(None).fflush(None)
        thread = threading.Thread(target=print, args=("from a thread",)); thread.start(); thread.join()
        print("caf\udce9 \u20ac", file=sys.stderr)
        sys.stdout.buffer.write(b"\xff bytes\n"); print("after bytes")
        """,
    )
    for label in ("warm", "cold"):
        lines = [re.sub(r"^\[\S+ ", "[", line) for line in done.stdout.splitlines() if f" {label}-0" in line]
        assert lines == [
            f"[{label}-0 printer] [0] from python",
            f"[{label}-0] [0] from the descriptor",
            f"[{label}-0] [0] from a shell",
            f"[{label}-0] [0] from c",
            f"[{label}-0 printer] [0] from a thread",
            f"[{label}-0] [0] \\xff bytes",
            f"[{label}-0 printer] [0] after bytes",
        ]
        errors = [re.sub(r"^\[\S+ ", "[", line) for line in done.stderr.splitlines() if f" {label}-0" in line]
        assert errors == [f"[{label}-0] [0] from /dev/stderr", f"[{label}-0 printer] [0] caf\\udce9 €"]


def test_a_descriptor_that_the_user_redirects_gets_no_marks(tmp_path):
    target = tmp_path / "mine.txt"
    done = run(
        'this_host().spawn_procs().spawn("printer", Printer).run.call(CODE).get()',
        f"""
        kept = os.dup(1)
        os.dup2(os.open({str(target)!r}, os.O_CREAT | os.O_WRONLY), 1)
        print("to the file")
        os.dup2(kept, 1)
        print("to the client")
        """,
    )
    assert done.stdout == "to the client\n"
    assert target.read_text() == "to the file\n"


def test_threads_do_not_mix_their_lines():
    done = run(
        """
        procs = this_host().spawn_procs()
        printers = procs.spawn("printer", Printer)
        show(procs, stream_to_client=True)
        printers.run.call(CODE).get()
        """,
        r"""
        def work(name):
            for number in range(200):
                print(name, number, "x" * 50, sep="-", end="-end\n")
        threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
        noise = subprocess.Popen(["sh", "-c", "for i in $(seq 200); do echo noise $i; done"])
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        noise.wait()
        """,
    )
    texts = [line.split("] ")[-1] for line in done.stdout.splitlines()]
    for name in "abcd":
        assert [text for text in texts if text.startswith(name)] == [f"{name}-{number}-{'x' * 50}-end" for number in range(200)]
    assert [text for text in texts if text.startswith("noise")] == [f"noise {number}" for number in range(1, 201)]
    assert len(texts) == 1000


def test_the_level_hides_what_is_below_it():
    done = run("""
        procs = this_host().spawn_procs()
        printers = procs.spawn("printer", Printer)
        log = "import logging; logging.getLogger().error('at level {}')"
        show(procs, stream_to_client=True, level=50)
        printers.run.call(log.format("critical")).get()
        show(procs, stream_to_client=True, level=40)
        printers.run.call(log.format("error")).get()
    """)
    assert "at level critical" not in done.stdout + done.stderr
    assert "at level error" in done.stderr and "at level error" not in done.stdout


# --- dying ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ["", "stream_to_client=True"], ids=["raw", "streamed"])
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)", "os.abort()"], ids=["killed", "exit", "aborted"])
def test_a_process_that_dies_loses_no_line(end, options):
    done = run(
        f"""
        monarch.actor.unhandled_fault_hook = lambda failure: None
        procs = this_host().spawn_procs()
        printers = procs.spawn("printer", Printer)
        show(procs, {options})
        print("error", type(printers.run.call(CODE).exception(10)).__name__)
        """,
        f"""
        for number in range(3000):
            print(number, "x" * 30)
        {end}
        """,
    )
    numbers = [int(match[1]) for match in re.finditer(r"(\d+) x{30}$", done.stdout, re.MULTILINE)]
    assert numbers == list(range(3000))
    assert "error SupervisionError" in done.stdout


class Mortal(Actor):
    """Dies in several ways."""

    @endpoint
    def speak_and_die(self, lines: int, width: int) -> None:
        for number in range(lines):
            print(f"word {number} ".ljust(width, "."), file=(sys.stdout, sys.stderr)[number % 2])
        os.write(2, b"Fatal: no newline")
        os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    def leave_a_child(self) -> int:
        return subprocess.Popen(["sh", "-c", "trap '' HUP TERM; sleep 60"], start_new_session=True).pid


def test_last_words_are_part_of_the_error(faults):
    procs = this_host().spawn_procs(per_host={"gpus": 2})
    mortals = procs.spawn("mortal", Mortal)
    mortals.initialized.get()
    call = mortals.slice(gpus=1).speak_and_die.call_one(30, 20)
    error = error_of(call)
    assert isinstance(error, SupervisionError)
    text = str(error)
    assert "SIGKILL" in text and "its last lines:" in text
    words = [line.split("| ")[1] for line in text.splitlines() if line.lstrip().startswith("| ")]
    assert len(words) == 20 and words[-1] == "Fatal: no newline"
    assert {"word 29 ............", "word 28 ............"} <= set(words)
    assert text.index("its last lines") < text.index("  where: ")
    [failure] = faults.wait(1)
    assert "| Fatal: no newline" in failure.report()
    procs.stop().get()


def test_an_error_with_last_words_stays_short(faults):
    procs = this_host().spawn_procs()
    error = error_of(procs.spawn("mortal", Mortal).speak_and_die.call_one(100, 3000))
    assert "its last lines:" in str(error) and len(str(error)) <= 4000
    faults.wait(1)
    procs.stop().get()


def test_a_process_that_cannot_start_says_why_in_its_last_words():
    done = run("""
        from monarch.actor import BootstrapCommand
        monarch.actor.unhandled_fault_hook = lambda failure: None
        procs = this_host().spawn_procs(bootstrap_command=BootstrapCommand("sh", None, ["-c", "echo no libcuda here >&2; exit 7"]))
        try:
            procs.initialized.get()
        except Exception as exc:
            print(exc)
    """)
    assert re.search(r"it exited with status 7.*\n.*its last lines:\n.*\| no libcuda here", done.stdout), done


def test_a_grandchild_that_holds_the_pipe_keeps_nothing_alive():
    procs = this_host().spawn_procs()
    child = procs.spawn("mortal", Mortal).leave_a_child.call_one().get()
    started = time.monotonic()
    procs.stop().get(timeout=10)
    assert time.monotonic() - started < 5
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_a_process_that_was_started_anew_is_shown_as_the_one_before_it():
    done = run(
        """
        from monarch.actor import OneForOne
        procs = this_host().spawn_procs()
        printers = procs.supervised(OneForOne(max_restarts=3, within_s=60)).spawn("printer", Printer)
        show(procs, stream_to_client=True)
        for life in range(3):
            printers.say.call(f"life {life}").get()
            print(type(printers.run.call("print('bye'); os.kill(os.getpid(), signal.SIGKILL)").exception(10)).__name__)
        printers.say.call("life 3").get()
        """
    )
    lines = [line.split("] ")[-1] for line in done.stdout.splitlines() if line.startswith("[")]
    assert lines == ["life 0", "bye", "life 1", "bye", "life 2", "bye", "life 3"], done
    assert done.stdout.count("SupervisionError") == 3 and done.stdout.count(" anon-0 printer] [0] ") == 7


# --- floods and blocks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "write"),
    [
        ("", "sys.stdout.write('x' * 200_000_000)"),
        ("show(procs, stream_to_client=True)", "sys.stdout.write('x' * 200_000_000)"),
        ("show(procs, stream_to_client=True, aggregate_window_sec=1)", "for _ in range(3200): sys.stdout.buffer.write(b'x' * 62_500)"),
    ],
    ids=["raw", "streamed", "merged"],
)
def test_a_bomb_is_cut_and_says_how_much_is_missing(option, write):
    done = run(
        f"""
        def peak_kib(pid):
            with open(f"/proc/{{pid}}/status") as status:
                return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

        procs = this_host().spawn_procs()
        printers = procs.spawn("printer", Printer)
        {option}
        printers.say.call("warm").get()
        agents = [int(pid) for task in os.listdir("/proc/self/task") for pid in open(f"/proc/self/task/{{task}}/children").read().split()]
        assert len(agents) == 1
        before = {{pid: peak_kib(pid) for pid in (os.getpid(), *agents)}}
        printers.run.call(CODE).get()
        procs.stop().get()
        for pid, kib in before.items():
            assert peak_kib(pid) - kib < 64 * 1024, (pid, kib, peak_kib(pid))
        """,
        f"{write}\nprint()\nprint('END')",
        timeout=28,
    )
    assert "END" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if "xxxx" in line]
    shown, separator, mark = line.rpartition("x... [TRUNCATED] ")
    assert separator and len(shown) < 70_000
    assert (shown + "x").count("x") + int(mark.removesuffix(" more bytes")) == 200_000_000


@pytest.mark.parametrize("option", ["", "show(procs, stream_to_client=True)"], ids=["raw", "streamed"])
def test_a_stdout_that_nobody_reads_blocks_neither_stop_nor_the_agent(option, tmp_path):
    source = script_of(f"""
        def note(text):
            with open({str(tmp_path / "notes")!r}, "a") as file: file.write(text + chr(10))
        config.configure(stop_actor_timeout="500ms", cleanup_timeout="100ms")
        monarch.actor.unhandled_fault_hook = lambda failure: note("fault")
        hosts = this_host()
        procs, others = hosts.spawn_procs(), hosts.spawn_procs()
        printers, quiet = procs.spawn("printer", Printer), others.spawn("quiet", Printer)
        {option}
        printers.run.broadcast("while True: print('flood' * 100)")
        while not any(row.state == "busy" for row in procs.activity().get()): time.sleep(0.01)
        time.sleep(1)
        note(f"others work {{len(quiet.pid.call().get(timeout=5))}}")
        note(f"agent answers {{len(others.activity().get(timeout=5))}}")
        procs.stop().get(timeout=15)
        note("stopped")
        hosts.spawn_procs().initialized.get(timeout=10)
        note("spawned")
    """)
    (tmp_path / "script.py").write_text(source)
    process = subprocess.Popen([sys.executable, str(tmp_path / "script.py")], stdout=subprocess.PIPE)
    try:
        assert process.wait(25) == 0
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    assert (tmp_path / "notes").read_text().splitlines() == ["others work 1", "agent answers 1", "stopped", "spawned"]


def test_a_slow_reader_gets_every_line(tmp_path):
    source = script_of("""
        printers = this_host().spawn_procs(per_host={"gpus": 2}).spawn("printer", Printer)
        printers.run.call("for number in range(20000): print(current_rank().rank, number, 'x' * 40)").get()
    """)
    (tmp_path / "script.py").write_text(source)
    process = subprocess.Popen([sys.executable, str(tmp_path / "script.py")], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        data = b""
        while piece := os.read(process.stdout.fileno(), 50_000):
            data += piece
            if len(data) < 300_000:
                time.sleep(0.02)  # the reader is slow, not waiting for anything
    assert process.wait(10) == 0
    for rank in range(2):
        numbers = [int(line.split()[1]) for line in data.decode().splitlines() if line.startswith(f"{rank} ")]
        assert numbers == list(range(20000))


# --- notebooks -----------------------------------------------------------------------------------------------------


NOTEBOOK = """
import contextlib, io, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
def cell(source):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        result = shell.run_cell(source)
    result.raise_error()
    return out.getvalue()
cell('''
from monarch import config
from monarch.actor import Actor, endpoint, this_host, shutdown_context
class Printer(Actor):
    @endpoint
    def say(self, text): print(text)
procs = this_host().spawn_procs(per_host={"gpus": 2})
printers = procs.spawn("printer", Printer)
''')
print(cell("print(config.get_global_config()['enable_log_forwarding'])"), end="")
before = len(shell.events.callbacks["post_run_cell"])
cell("await procs.logging_option(stream_to_client=True, aggregate_window_sec=60)")
for turn in range(3):
    text = cell(f"printers.say.call('group {turn}').get()")
    assert text.count("similar log lines") == 1 and f"group {turn}" in text and "[2 similar" in text, text
cell("await procs.logging_option(stream_to_client=True)")
text = cell("printers.say.call('a line').get(); print('the cell goes on')")
assert text.count("a line") == 2, text
print(len(shell.events.callbacks["post_run_cell"]) - before)
cell("shutdown_context().get()")
"""


def test_a_notebook_shows_the_lines_of_a_cell_in_that_cell():
    assert run_script(NOTEBOOK).check().stdout.splitlines()[-2:] == ["True", "1"]


# --- files ---------------------------------------------------------------------------------------------------------


def command(*args: str) -> str:
    done = CliRunner().invoke(main, ["logs", *args], prog_name="monarch")
    return done.output


def test_files_are_rotated_private_and_shown_by_monarch_logs(tmp_path):
    folder = tmp_path / "logs"
    source = f"""
        config.configure(enable_file_capture=True, log_folder={str(folder)!r}, log_file_max_bytes=5000)
        procs = this_host().spawn_procs(per_host={{"gpus": 2}}, name="trainer")
        printers = procs.spawn("printer", Printer)
        printers.numbers.call(1, 600).get()
        os.write(1, b"ready\\n")
        input()
    """
    assert "no job of this user has log files in" in command("--folder", str(folder))
    with start_script(script_of(source)) as script:
        done = script.finish(20)
    assert done.returncode != 0 and "EOFError" in done.stderr  # its stdin is empty, which ends it
    (job,) = folder.iterdir()
    files = sorted(path.name for path in job.iterdir())
    assert len(files) == 7 and all(re.fullmatch(r"lock|trainer-[01]\.\w+\.log(\.[12])?", name) for name in files)
    assert all(path.stat().st_mode & 0o077 == 0 for path in (folder, job, *job.iterdir()))
    assert all(path.stat().st_size <= 5000 for path in job.iterdir())
    text = command("--folder", str(folder), "-n", "4", "trainer-1")
    shown = text.splitlines()
    assert [re.sub(r"^[\d-]+ [\d:.]+ ", "", line) for line in shown[:3]] == [f"out [printer 1] {number}" for number in (597, 598, 599)]
    assert "--- [trainer-1]" in shown[3]
    assert command("--folder", str(folder), "0").count("[printer 0]") == 9
    assert command("--folder", str(folder), "trainer").count("==> trainer-") == 2
    listing = command("--folder", str(folder), "--list")
    assert f"{job.name}  ended" in listing and "trainer-0" in listing and "trainer-1" in listing
    assert "no process 'trainr'" in command("--folder", str(folder), "trainr")
    assert "did you mean 'trainer'" in command("--folder", str(folder), "trainr")
    assert "no job 'x'" in command("--folder", str(folder), "--job", "x")


def test_monarch_logs_follows_until_the_job_ends(tmp_path):
    folder = tmp_path / "logs"
    source = f"""
        config.configure(enable_file_capture=True, log_folder={str(folder)!r}, log_file_max_bytes=3000)
        procs = this_host().spawn_procs(name="trainer")
        printers = procs.spawn("printer", Printer)
        printers.say.call("first").get()
        print("ready", flush=True)
        while not os.path.exists({str(tmp_path / "go")!r}): time.sleep(0.01)
        for turn in range(40):
            printers.say.call(f"later {{turn}} " + "x" * 20).get()
            time.sleep(0.01)
    """
    with start_script(script_of(source)) as script:
        script.wait_line("ready")
        follower = subprocess.Popen(
            [sys.executable, "-c", "from monarch.cli import main; main()", "logs", "-f", "--folder", str(folder)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert follower.stdout is not None
        assert follower.stdout.readline().endswith("[printer 0] first\n")
        (tmp_path / "go").touch()
        rest = follower.stdout.read()
        follower.stdout.close()
        assert follower.wait(10) == 0
        script.finish(20).check()
    assert re.findall(r"later (\d+)", rest) == [str(turn) for turn in range(40)]


def test_old_runs_are_swept(tmp_path):
    from monarch._runtime import log_files

    base = str(tmp_path / "logs")
    kept = [log_files.make_run(base) for _ in range(3)]
    for _ in range(14):
        os.close(log_files.make_run(base).lock_fd)
    runs = log_files.runs(base)
    assert len(runs) <= 3 + 11 and {run.path for run in runs if run.running} == {run.path for run in kept}
    for run in kept:
        os.close(run.lock_fd)


def test_the_runtime_writes_its_own_log_where_it_is_told(tmp_path):
    done = run_script(
        "from monarch.actor import this_host; this_host().spawn_procs().initialized.get()",
        env={"MONARCH_FILE_LOG": "debug", "MONARCH_STDERR_LOG": "info", "MONARCH_LOG_FOLDER": str(tmp_path / "logs")},
    ).check()
    assert "monarch: process started: role=client" in done.stderr
    roles = sorted(path.name.split("-")[0] for path in (tmp_path / "logs" / "runtime").iterdir())
    assert roles == ["agent", "client", "proc"]


# --- log records ---------------------------------------------------------------------------------------------------


class Keeper(logging.Handler):
    """A handler that keeps records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


class Texts(logging.Handler):
    """A handler that keeps what its formatter makes."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


class Thing:
    def __str__(self) -> str:
        return "the thing"


class Logger(Actor):
    """Logs to handlers that look at what arrives."""

    @endpoint
    def records(self) -> list[tuple[Any, ...]]:
        keeper, thing = Keeper(), Thing()
        root = logging.getLogger()
        root.addHandler(keeper)
        log = logging.getLogger("some.module")
        log.warning("")
        log.warning("%d%%", 50)
        log.warning(thing)
        log.warning("own fields", extra={"rank": "mine", "actor": "too"})
        root.removeHandler(keeper)
        assert keeper.records[2].msg is thing
        return [
            (record.msg if isinstance(record.msg, str) else None, record.getMessage(), vars(record)["actor"], vars(record)["rank"])
            for record in keeper.records
        ]

    @endpoint
    def texts(self) -> list[str]:
        handler = Texts()
        handler.setFormatter(logging.Formatter("%(levelname)s|%(actor)s|%(message)s"))
        root = logging.getLogger()
        root.addHandler(handler)
        log = logging.getLogger("some.module")
        log.warning("")
        log.warning("%d%%", 50)
        try:
            raise ValueError("inner")
        except ValueError:
            log.exception("with a traceback")
        import monarch.actor.settings as settings

        settings.prefix_python_logs_with_actor = False
        log.warning("bare")
        root.removeHandler(handler)
        return handler.texts

    @endpoint
    def compile(self) -> float:
        import torch

        @torch.compile(backend="eager")
        def double(x: Any) -> Any:
            logging.getLogger("inside").debug("")
            return x * 2

        return float(double(torch.ones(2)).sum())


def test_log_records_are_not_altered_and_name_their_actor():
    procs = this_host().spawn_procs(per_host={"gpus": 2})
    loggers = procs.spawn("log ger", Logger)
    assert loggers.slice(gpus=1).records.call_one().get() == [
        ("", "", "log ger", 1),
        ("%d%%", "50%", "log ger", 1),
        (None, "the thing", "log ger", 1),
        ("own fields", "own fields", "too", "mine"),
    ]
    empty, percent, traceback, bare = loggers.slice(gpus=1).texts.call_one().get()
    prefix = f"[actor=<root>.<{Logger.__module__}.Logger log ger{{'gpus': 1/2}}>] "
    assert (empty, percent) == ("WARNING|log ger|", f"WARNING|log ger|{prefix}50%")
    assert traceback.startswith(f"ERROR|log ger|{prefix}with a traceback\nTraceback") and traceback.endswith("ValueError: inner")
    assert bare == "WARNING|log ger|bare"
    procs.stop().get()


@requires_torch
@pytest.mark.timeout(90)  # the imports of torch, which the zygote may have to do as well
def test_torch_compiles_with_its_trace_log_on(tmp_path):
    folder = tmp_path / "trace"

    def trace() -> None:
        os.environ["TORCH_TRACE"] = str(folder)

    with configured(proc_start="fresh"):  # torch reads the variable when it is imported, and a warm process may have it already
        procs = this_host().spawn_procs(bootstrap=trace)
        procs.initialized.get()
    assert procs.spawn("logger", Logger).compile.call_one().get() == 4.0
    procs.stop().get()
    assert wait_until(lambda: list(Path(folder).glob("*")))
