"""The command line: what it loads, what it prints, and how it ends."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

import monarch
from monarch._base.errors import explain
from monarch.cli import Commands, main


def run(*args: str, command: click.Command = main) -> Result:
    return CliRunner().invoke(command, args, prog_name="monarch")


@click.group(cls=Commands)
def failing() -> None:
    pass


@failing.command()
@click.argument("name")
def raises(name: str) -> None:
    raise {
        "explained": ValueError(explain("3 is too many", where="rank 1 of {gpus: 2}", next="take 2", detail="a line of a log")),
        "bare": OSError(),
        "interrupt": KeyboardInterrupt(),
        "defect": AssertionError("ours"),
    }[name]


def test_importing_the_command_line_loads_and_starts_nothing_of_monarch() -> None:
    source = """
import sys, threading
import monarch.cli
print(*(name for name in sys.modules if name.startswith("monarch")), threading.active_count())
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == ["1", "monarch", "monarch._compat", "monarch.cli"]


def test_help_names_the_commands() -> None:
    done = run("--help")
    assert done.exit_code == 0
    assert {"certs", "demo", "secret", "version"} <= set(done.stdout.split())


def test_without_a_command_it_prints_its_help() -> None:
    done = run()
    assert (done.exit_code, done.stdout, done.stderr) == (0, run("--help").stdout, "")


def test_the_package_runs_as_the_command_does() -> None:
    done = subprocess.run([sys.executable, "-m", "monarch", "version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, run("version").stdout, "")
    done = subprocess.run([sys.executable, "-m", "monarch", "fly"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, run("fly").stderr)


def test_the_version_is_that_of_the_installed_package() -> None:
    done = run("version")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith(f"monarch-mesh {monarch.__version__}, Python 3.")
    assert run("--version").output == run("-V").output == done.output
    assert importlib.metadata.version("monarch-mesh") == monarch.__version__


@pytest.mark.parametrize(
    ("args", "text", "help_of"),
    [
        (["fly"], "No such command 'fly'", "monarch"),
        (["demo", "--procs", "1"], "Invalid value for '--procs': 1 is not in the range", "monarch demo"),
        (["demo", "--files", "many"], "Invalid value for '--files': 'many' is not a valid integer", "monarch demo"),
        (["version", "--loud"], "No such option", "monarch version"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_command_line_is_status_2_and_says_where_the_help_is(args: list[str], text: str, help_of: str) -> None:
    done = run(*args)
    assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (2, "", 2)
    assert done.stderr.startswith(f"monarch: {text}")
    assert done.stderr.endswith(f"\n  next:  see {help_of} --help\n")


@pytest.mark.parametrize(
    ("name", "status", "text"),
    [
        ("explained", 1, "monarch: 3 is too many\n  where: rank 1 of {gpus: 2}\n  next:  take 2\n"),
        ("bare", 1, "monarch: OSError\n"),
        ("interrupt", 130, "\nmonarch: interrupted\n"),
    ],
)
def test_an_error_of_a_command_is_short(name: str, status: int, text: str) -> None:
    done = run("raises", name, command=failing)
    assert (done.exit_code, done.stderr) == (status, text)


def test_a_secret_is_written_to_a_private_file_and_never_printed(tmp_path: Path) -> None:
    path = tmp_path / "job.secret"
    done = run("secret", str(path))
    assert (done.exit_code, done.stdout, done.stderr) == (0, f"MONARCH_SECRET_FILE={path}\n", "")
    written = path.read_text()
    assert len(written) > 40
    again = run("secret", str(path))
    assert (again.exit_code, again.stdout, path.read_text()) == (1, "", written)
    assert again.stderr.startswith(f"monarch: {path} is there already\n  next:")
    assert written.strip() not in done.output + again.output


def test_certificates_are_made_and_their_variables_printed(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    done = run("certs", str(folder), "--days", "2")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"HYPERACTOR_TLS_CERT={folder}/member.pem",
        f"HYPERACTOR_TLS_KEY={folder}/member.pem",
        f"HYPERACTOR_TLS_CA={folder}/ca.pem",
    ]
    assert sorted(path.name for path in folder.iterdir()) == ["ca.pem", "member.pem"]
    assert run("certs", str(folder)).stderr.startswith(f"monarch: {folder} is there already\n  next:")
    assert run("certs", str(tmp_path / "no" / "certs")).stderr.startswith("monarch: [Errno 2] No such file or directory")


def test_a_defect_of_ours_keeps_its_traceback() -> None:
    done = run("raises", "defect", command=failing)
    assert isinstance(done.exception, AssertionError)
