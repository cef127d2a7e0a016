"""The command line: `monarch certs`, `monarch debug`, `monarch demo`, `monarch logs`, `monarch secret`, `monarch version`.

Rules of this file:
    1. Importing it, and asking for help, starts nothing and loads no part of monarch: commands import what they run.
    2. An error that a user can meet is one line on stderr, with those of `where` and `next` below it, and the exit status
       is 1; 2 for a wrong command line; Ctrl-C is 130. An error of ours keeps its traceback.

Read next: `demo.py` for the main job.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from typing import Any

import click

_INTERRUPTED = 130
_WRONG_USE = 2
_MOST_DEFAULT_PROCS = 8


class Commands(click.Group):
    """A group of commands that reports errors as rule 2 says."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command line, and end the program unless `standalone_mode` is off."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        try:
            status = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except click.Abort:
            click.echo("monarch: interrupted", err=True)
            sys.exit(_INTERRUPTED)
        except (click.ClickException, OSError, RuntimeError, ValueError, ImportError) as exc:
            click.echo(f"monarch: {in_short(exc)}", err=True)
            sys.exit(_WRONG_USE if isinstance(exc, click.UsageError) else 1)
        sys.exit(status if isinstance(status, int) else 0)


def in_short(exc: Exception) -> str:
    """An error's text without its details."""
    if isinstance(exc, click.UsageError) and exc.ctx is not None:
        return f"{exc.format_message()}\n  next:  see {exc.ctx.command_path} --help"
    text = exc.format_message() if isinstance(exc, click.ClickException) else str(exc) or type(exc).__name__
    return "\n".join(line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("|"))


def version_text() -> str:
    """Version of the package, of Python and of the system."""
    from monarch import __version__

    return f"monarch-mesh {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"


def _default_procs() -> int:
    return min(max(4, os.cpu_count() or 1), _MOST_DEFAULT_PROCS)


def _print_version(context: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        click.echo(version_text())
        context.exit()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.option("-V", "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print the version.")
@click.pass_context
def main(context: click.Context) -> None:
    """Drive a whole cluster from one Python script."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@main.command()
@click.option("--procs", type=click.IntRange(min=2), default=_default_procs, show_default="4 to 8", help="Worker processes.")
@click.option("--files", type=click.IntRange(min=1), default=None, help="Index so many files at most.")
def demo(procs: int, files: int | None) -> None:
    """Index the Python standard library on a mesh of processes, then survive two failures."""
    from monarch.demo import run_demo

    run_demo(procs, files)


@main.command()
@click.argument("processes", nargs=-1)
@click.option("-f", "--follow", is_flag=True, help="Go on with what is written, until the job ends.")
@click.option("-n", "--lines", type=click.IntRange(min=0), default=10, show_default=True, help="So many last lines of each process.")
@click.option("-l", "--list", "only_list", is_flag=True, help="List the jobs and their processes instead.")
@click.option("--job", default=None, help="Name of a job, as --list shows it; the youngest by default.")
@click.option("--folder", default=None, help="Where the log files are, if the job set log_folder.")
def logs(processes: tuple[str, ...], follow: bool, lines: int, only_list: bool, job: str | None, folder: str | None) -> None:
    """Print the last lines of the processes of a job.

    PROCESSES are names of meshes (trainer), of processes (trainer-3), or ranks (3); all by default. A job writes log files when
    it sets enable_file_capture, or runs with HYPERACTOR_MESH_ENABLE_FILE_CAPTURE=1.
    """
    from monarch._runtime import log_report

    if only_list:
        click.echo(log_report.overview(folder, job))
        return
    for data in log_report.tails(folder, job, processes, lines, follow=follow):
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


@main.command()
@click.option("--host", default=None, help="Where the job runs; default: here.")
@click.option("--port", type=click.IntRange(1, 65535), default=None, help="Where its debugger listens; default: found.")
@click.option("--token", default=None, envvar="MONARCH_DEBUG_TOKEN", help="Secret of the job; default: found, on its machine.")
def debug(host: str | None, port: int | None, token: str | None) -> int:
    """Attach this terminal to the breakpoints of a running job."""
    from monarch.debug_terminal import debug_job, run_terminal

    return run_terminal(debug_job(host, port, token))


@main.command()
@click.argument("file", type=click.Path())
def secret(file: str) -> None:
    """Write a fresh secret of a job to FILE, which only you can read.

    Give a copy of it to every machine of the job and name it in MONARCH_SECRET_FILE.
    """
    from monarch._net.secret import write_secret_file

    write_secret_file(file)
    click.echo(f"MONARCH_SECRET_FILE={os.path.abspath(file)}")


@main.command()
@click.argument("folder", type=click.Path())
@click.option("--days", type=click.IntRange(min=1), default=30, show_default=True, help="For so long they are valid.")
def certs(folder: str, days: int) -> None:
    """Make the certificates of a job, for tls:// addresses, in a new FOLDER.

    Give a copy of it to every machine of the job. Whoever has member.pem is a member.
    """
    from monarch._net.certificates import mint_job_certificates

    files = mint_job_certificates(folder, days=days)
    for part in ("cert", "key", "ca"):
        click.echo(f"HYPERACTOR_TLS_{part.upper()}={getattr(files, part)}")


@main.command()
def version() -> None:
    """Print the version."""
    click.echo(version_text())
