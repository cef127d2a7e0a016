"""Entry points of the host agent and of its zygotes.

    host SOCKET LOCK RUN_DIR ADDRESS CLIENT ENTRY CONFIG    the agent of a client; SOCKET is the link to it, LOCK that of RUN_DIR
    worker SOCKET ADDRESS ENTRY CONFIG [LISTENER LOCK RUN_DIR]   a worker loop; it reads its credentials from SOCKET and ends when
                                                            that is closed; LISTENER is where other hosts connect to
    zygote SOCKET ENTRY

The agent forks its first zygote before it does anything else, so both come from one interpreter start. That zygote also
removes the files of an agent that was killed.

Read next: `interpreter.py` for the command line.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
from typing import NamedTuple

import msgspec

from monarch import config
from monarch._base.ids import agent_at, between_hosts, folder_of, place_of_client
from monarch._net import credentials
from monarch._net.router import socket_path
from monarch._runtime import descendants, rundir, zygote
from monarch._runtime.platform import SYSTEM
from monarch._wire import messages


class _Agent(NamedTuple):
    """What an agent is started with."""

    address: str
    entry: str
    client_uid: str = ""
    run_dir: str = ""
    lock_fd: int = -1
    listener_fd: int = -1

    @property
    def folder(self) -> str:
        """Where the socket files of its procs are."""
        if place_of_client(self.address):
            return os.path.join(self.run_dir, f"{self.address.rpartition('/')[2]}.d")
        return self.run_dir if between_hosts(self.address) else socket_path(folder_of(self.address))


def main(arguments: list[str]) -> None:
    """Run as what the first argument says; returns at the end of a proc only."""
    role, fd, *rest = arguments
    sock = socket.socket(fileno=int(fd))
    if role == "host":
        lock, run_dir, address, client_uid, entry, encoded_config = rest
        os.set_inheritable(int(lock), False)
        _serve(sock, _Agent(address, entry, client_uid, run_dir, int(lock)), encoded_config)
    elif role == "worker":
        address, entry, encoded_config, *outside = rest
        credentials.set_credentials(credentials.receive(sock))
        if outside:
            listener_fd, lock_fd, run_dir = int(outside[0]), int(outside[1]), outside[2]
            for inherited in (listener_fd, lock_fd):
                os.set_inheritable(inherited, False)
            _serve(sock, _Agent(address, entry, "", run_dir, lock_fd, listener_fd), encoded_config)
        else:
            _serve(sock, _Agent(address, entry), encoded_config)
    else:
        [entry] = rest
        _zygote(sock, entry, os.getppid())


def _serve(sock: socket.socket, agent: _Agent, encoded_config: str) -> None:
    """Be an agent and, in the fork, its first zygote."""
    _wake_up_at_the_end_of(os.getppid())
    config.adopt(msgspec.json.decode(encoded_config))
    importlib.import_module(agent.entry)
    SYSTEM.settle(agent.address, agent.folder)
    agent_end, zygote_end = socket.socketpair()
    own_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        agent_end.close()
        sock.close()
        if agent.lock_fd >= 0:  # only the client and the agent hold it, so that the zygote can see their end
            os.close(agent.lock_fd)
        if agent.listener_fd >= 0:
            os.close(agent.listener_fd)
        _zygote(zygote_end, agent.entry, own_pid, agent)
        return
    zygote_end.close()
    importlib.import_module("monarch._runtime.runtime_log").start_runtime_log("agent")
    host = importlib.import_module("monarch._runtime.host")
    outside = socket.socket(fileno=agent.listener_fd) if agent.listener_fd >= 0 else None
    host.HostAgent(agent_at(agent.address), agent.entry, client_uid=agent.client_uid).serve(sock, agent_end, pid, outside)
    if agent.run_dir:
        os.close(agent.lock_fd)
        rundir.remove_if_abandoned(agent.run_dir)
    _leave()


def _zygote(sock: socket.socket, entry: str, parent: int, agent: _Agent | None = None) -> None:
    """Be a zygote; returns in a proc that was forked from it, at the proc's end."""
    _wake_up_at_the_end_of(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    importlib.import_module(entry).warm_up()
    outcome = zygote.run(sock)
    if isinstance(outcome, zygote.Child):
        boot = messages.decode_boot(outcome.spec)
        importlib.import_module(boot.entry).main(boot)
        return
    if outcome is zygote.End.AGENT_LOST and agent is not None:
        _remove_files(agent)
    _leave()


def _leave() -> None:
    """End without finalising: no code of the user's ran here, and others wait for the end of this process."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(0)


def _wake_up_at_the_end_of(parent: int) -> None:
    """A stopped process would not see the closed socket that tells it to end; this one is continued by the kernel."""
    if sys.platform == "linux" and os.getppid() == parent:
        descendants.die_with_parent(signal.SIGCONT)


def _remove_files(agent: _Agent) -> None:
    """Remove what an agent that was killed had made, and the run directory when its client has ended too."""
    if not between_hosts(agent.address):
        rundir.remove_run_dir(agent.folder)
        with contextlib.suppress(OSError):
            os.unlink(socket_path(agent.address))
    elif place_of_client(agent.address):
        rundir.remove_run_dir(agent.folder)
        with contextlib.suppress(OSError):
            os.unlink(SYSTEM.file_of(agent.address))
    if agent.run_dir:
        rundir.remove_if_abandoned(agent.run_dir)
