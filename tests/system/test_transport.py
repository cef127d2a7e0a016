"""Transports: a client that listens is reached by hosts that it has never heard of, and one without a secret does not listen."""

from __future__ import annotations

import os
import signal

import pytest

from monarch._net.certificates import mint_job_certificates
from system.hosts import start_script_in

SECRET = {"MONARCH_SECRET": "a secret of the tests of transports"}
START_S = 20.0

ACTOR = """
import logging, os, pickle, signal, sys
from monarch.actor import Actor, enable_transport, endpoint, this_host, this_proc
from monarch.actor.process import this_process

logging.basicConfig(level=logging.INFO, stream=sys.stdout)


class Worker(Actor):
    @endpoint
    def pid(self):
        return os.getpid()

    @endpoint
    def pid_of(self, other):
        return other.pid.call_one().get(timeout=10)
"""

LISTENING = """
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
enable_transport(sys.argv[1])
here = this_proc().spawn("here", Worker)
local = this_host().spawn_procs({"procs": 2}).spawn("local", Worker)
assert here.pid_of.call_one(local.slice(procs=0)).get(timeout=10) != os.getpid()
assert local.pid_of.call(here).get(timeout=10).values() == [os.getpid()] * 2
with open(sys.argv[2], "wb") as file:
    pickle.dump((here, local), file)
print("pids", os.getpid(), *local.pid.call().get(timeout=10).values(), flush=True)
print("address", this_process().proc.ref.address, flush=True)
signal.sigwait({signal.SIGUSR1})
"""

STRANGER = """
here, local = pickle.load(open(sys.argv[1], "rb"))
own = this_host().spawn_procs().spawn("own", Worker)
print("reached", here.pid.call_one().get(timeout=10), *local.pid.call().get(timeout=10).values(), flush=True)
print("from a proc", own.pid_of.call_one(local.slice(procs=1)).get(timeout=10), flush=True)
"""


@pytest.mark.parametrize("transport", ["tcp", "tcp://{ip}:26650", "tcp://{ip}:26651@tcp://*:26651", "tls", "tls://{ip}:26652"])
def test_a_client_that_listens_is_reached_by_whoever_has_a_reference(hosts, tmp_path, transport):
    a, b = hosts[:2]
    path = str(tmp_path / "reference")
    scheme = transport[:3]
    env = SECRET
    if scheme == "tls":
        files = mint_job_certificates(tmp_path / "job")
        env = {f"HYPERACTOR_TLS_{name.upper()}": str(getattr(files, name)) for name in ("cert", "key", "ca")}
    with start_script_in(a, ACTOR + LISTENING, args=[transport.format(ip=a.ip), path], env=env) as client:
        pids = client.wait_line(r"^pids (.*)", timeout=START_S)[1]
        client.wait_line(rf"^address {scheme}://{a.ip}:{r'[0-9]+' if transport == scheme else '2665.'}$")
        # It runs in a namespace of its own and has its own references to dial: nobody has told the listening client of it.
        with start_script_in(b, ACTOR + f'enable_transport("{scheme}")\n' + STRANGER, args=[path], env=env) as stranger:
            out = stranger.finish().check().stdout
        os.kill(client.pid, signal.SIGUSR1)
        client.finish().check()
    assert f"reached {pids}" in out
    assert f"from a proc {pids.split()[-1]}" in out


def test_a_client_without_a_secret_does_not_listen_unless_told_so(run_script):
    source = (
        ACTOR
        + """
from monarch.actor import shutdown_context
from monarch.config import configure
enable_transport("tcp")
print(this_process().proc.ref.address.partition(":")[0], this_host().spawn_procs().spawn("w", Worker).pid.call_one().get(timeout=10) > 0)
"""
    )
    out = run_script(source, env={"MONARCH_SECRET": None}).check().stdout
    assert "without a secret this client does not listen" in out
    assert "ipc True" in out
    trusting = source.replace('enable_transport("tcp")', 'enable_transport("tcp-localhost", ca="trust_all_connections")')
    assert "tcp True" in run_script(trusting, env={"MONARCH_SECRET": None}).check().stdout


RULES = """
import os
from monarch.actor import ChannelTransport, enable_transport, this_host, this_proc
from monarch.config import BindSpec, get_global_config


def error(transport, **how):
    try:
        enable_transport(transport, **how)
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}".splitlines()[0]
    return "fine"


def show(*words):
    print(*words, flush=True)


show("unknown", error("carrier pigeon"))
for elsewhere in ("metatls", "metatls-hostname", "quic", ChannelTransport.Local, "ipc:///tmp/x"):
    show("elsewhere", error(elsewhere))
show("secret", error("tcp://127.0.0.1:0"))
show("certificate", error("tls"))
"""


def test_the_rules_of_transports(run_script):
    early = """
show("first", error("ipc"), error(ChannelTransport.Unix), error(BindSpec("unix")), get_global_config()["default_transport"])
show("other", error("tcp"))
this_proc()
show("again", error("ipc"))
show("other again", error("tcp"))
"""
    late = """
this_proc()
show("late", error("tcp"))
show("late default", error("ipc"))
"""
    out = run_script(RULES + early, env={"MONARCH_SECRET": None}).check().stdout
    assert "unknown ValueError: unknown transport 'carrier pigeon'" in out
    assert out.count("elsewhere NotImplementedError: there is no transport ") == 5
    assert "secret ValueError: a client at tcp://127.0.0.1:0 has no secret" in out
    assert "certificate ValueError: a client at tls://" in out
    assert "first fine fine fine unix" in out
    assert "other RuntimeError: Only one transport type may be enabled at one time" in out
    assert "again fine" in out
    assert "other again RuntimeError: Only one transport type may be enabled at one time" in out
    out = run_script(RULES + late, env={"MONARCH_SECRET": None}).check().stdout
    assert "late RuntimeError: transport tcp came too late: this process already uses monarch" in out
    assert "late default RuntimeError: transport unix came too late" in out
