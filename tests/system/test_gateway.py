"""A client that reaches one host of a cluster only: through it all others, both ways, and what happens when a part of the way goes."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack, contextmanager, suppress

import pytest

from monarch._net.certificates import mint_job_certificates
from system.hosts import start_script_in
from system.script import run_script, start_script

SECRET = {"MONARCH_SECRET": "a secret of the tests of gateways"}
QUICK = {"HYPERACTOR_SERVER_HEARTBEAT_INTERVAL": "200ms", "HYPERACTOR_CHANNEL_RECONNECT_TIMEOUT": "3s"}
BUDGET_S = 3.0
START_S = 20.0

WORKER = """
import sys
from monarch.actor import start_worker_loop_forever

ended = start_worker_loop_forever(address=sys.argv[1])
print("ready", flush=True)
ended.get()
"""

CLIENT = """
import asyncio, logging, os, pickle, signal, sys, time
import monarch.actor
from monarch.actor import Actor, attach, attach_to_workers, endpoint, send, this_host, this_proc

logging.basicConfig(level=logging.INFO, stream=sys.stdout)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
GATEWAY, *WORKERS = sys.argv[1:]
WAIT_S = 15


monarch.actor.unhandled_fault_hook = lambda failure: None


class Worker(Actor):
    def __init__(self):
        self.seen = 0

    @endpoint
    def pid(self):
        return os.getpid()

    @endpoint
    def count(self):
        self.seen += 1
        return self.seen

    @endpoint
    def length(self, data):
        return len(data)

    @endpoint
    def give(self, nbytes):
        return bytes(nbytes)

    @endpoint
    def pid_of(self, other):
        return other.pid.call_one().get(timeout=WAIT_S)

    @endpoint
    def say(self, text):
        print(text, flush=True)


def say(*words):
    print(*words, flush=True)


attach(GATEWAY)
hosts = attach_to_workers(workers=WORKERS)
"""

SPAWNED = """
procs = hosts.spawn_procs({"procs": 2})
workers = procs.spawn("worker", Worker)
far = workers.slice(hosts=1, procs=1)
far.pid.call_one().get(timeout=WAIT_S)
"""


@contextmanager
def loops(places, env):
    """Worker loops: at these (host, address)."""
    with ExitStack() as stack:
        runs = [stack.enter_context(start_script_in(host, WORKER, args=[address], env={**SECRET, **env})) for host, address in places]
        for run in runs:
            run.wait_line("ready", timeout=START_S)
        yield runs
        for run in runs:
            with suppress(ProcessLookupError):
                os.kill(run.pid, signal.SIGTERM)  # its agent ends with it, and cleans up
        for run in runs:
            run.finish()


@contextmanager
def client_on(host, addresses, source, env=None):
    """A client on `host`: the first of these is its gateway."""
    with start_script_in(host, CLIENT + source, args=[addresses[0], *addresses], env={**SECRET, **(env or {})}) as run:
        yield run


@pytest.fixture(scope="module")
def cluster(hosts):
    """Worker loops on a, b and c, that soon notice when somebody falls silent; their addresses."""
    places = [(hosts[name], hosts[name].url(26600)) for name in "abc"]
    with loops(places, QUICK):
        yield [address for _, address in places]


@pytest.fixture(autouse=True)
def cut_off(request):
    """Host d reaches a, and neither b nor c."""
    if "hosts" not in request.fixturenames:
        yield
        return
    hosts = request.getfixturevalue("hosts")
    for other in hosts["b"], hosts["c"]:
        hosts.cut(hosts["d"], other)
    yield
    hosts.mend()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    files = mint_job_certificates(tmp_path_factory.mktemp("certificates") / "job")
    return {"HYPERACTOR_TLS_CERT": files.cert, "HYPERACTOR_TLS_KEY": files.key, "HYPERACTOR_TLS_CA": files.ca}


WAIT_FOR_END = """
say("ready", far.pid.call_one().get(timeout=WAIT_S))
signal.sigwait({signal.SIGUSR1})
began = time.monotonic()
try:
    while True:
        far.pid.call_one().get(timeout=WAIT_S)
except Exception as exc:
    say("seconds", round(time.monotonic() - began, 3), type(exc).__name__)
"""

EVERYTHING = """
procs = hosts.spawn_procs({"procs": 4})
asyncio.run(procs.logging_option(stream_to_client=True))
workers = procs.spawn("worker", Worker)
assert len(set(workers.pid.call().get(timeout=WAIT_S).values())) == 12
workers.count.broadcast()
assert set(workers.count.call().get(timeout=WAIT_S).values()) == {2}
far = workers.slice(hosts=1, procs=1)
data = bytes(8 << 20)
assert far.length.call_one(data).get(timeout=WAIT_S) == len(data)
assert far.give.call_one(len(data)).get(timeout=WAIT_S) == data
here = this_proc().spawn("here", Worker)
assert set(workers.pid_of.call(here).get(timeout=WAIT_S).values()) == {os.getpid()}
others = procs.spawn("other", Worker)
assert set(others.pid_of.call(far).get(timeout=WAIT_S).values()) == {far.pid.call_one().get(timeout=WAIT_S)}
local = this_host().spawn_procs({"procs": 2}).spawn("local", Worker)
mine = local.pid.call().get(timeout=WAIT_S).values()
say("local processes", *mine)
assert set(others.pid_of.call(local.slice(procs=1)).get(timeout=WAIT_S).values()) == {mine[1]}
assert set(local.pid_of.call(far).get(timeout=WAIT_S).values()) == {far.pid.call_one().get(timeout=WAIT_S)}
assert set(local.pid_of.call(workers.slice(hosts=0, procs=1)).get(timeout=WAIT_S).values()) < set(workers.pid.call().get().values())
far.say.call_one("hello from afar").get(timeout=WAIT_S)
hosts.stop().get(timeout=WAIT_S)
say("all is well")
"""


def test_everything_works_through_a_gateway(hosts, cluster):
    with client_on(hosts["d"], cluster, EVERYTHING) as client:
        done = client.finish(timeout=40).check()
    assert "all is well" in done.stdout
    assert "hello from afar" in done.stdout


def test_everything_works_through_a_gateway_that_speaks_tls(hosts, certificates):
    places = [(hosts[name], hosts[name].url(26601, "tls")) for name in "abc"]
    addresses = [address for _, address in places]
    source = EVERYTHING + "hosts.shutdown().get(timeout=WAIT_S)"
    with loops(places, certificates) as runs, client_on(hosts["d"], addresses, source, certificates) as client:
        assert "all is well" in client.finish(timeout=40).check().stdout
        for run in runs:  # all were shut down, the gateway last
            run.finish().check()


def test_the_gateway_needs_no_key_for_what_it_passes_on(hosts, cluster, certificates):
    """It has no certificate at all, and the worker behind it speaks TLS only: who else but the client can be at the other end?"""
    b = hosts["b"]
    source = "say(hosts.slice(hosts=1).spawn_procs().spawn('worker', Worker).length.call_one(bytes(1 << 20)).get(timeout=WAIT_S))"
    with (
        loops([(b, b.url(26602, "tls"))], certificates),
        client_on(hosts["d"], [cluster[0], b.url(26602, "tls")], source, certificates) as client,
    ):
        assert "1048576" in client.finish().check().stdout


def test_a_client_whose_link_goes_and_comes_back_loses_nothing(hosts, cluster):
    source = """
say("ready")
assert [far.count.call_one().get(timeout=WAIT_S) for _ in range(100)] == list(range(1, 101))
number = 100
while number < 150 or not signal.sigtimedwait({signal.SIGUSR1}, 0.01):
    far.count.broadcast()
    number += 1
assert far.count.call_one().get(timeout=WAIT_S) == number + 1
say("all is well")
"""
    with client_on(hosts["d"], cluster[:2], SPAWNED + source, QUICK) as client:
        client.wait_line("ready", timeout=START_S)
        hosts["d"].link_down()
        client.wait_line("no sign of life")
        hosts["d"].link_up()
        os.kill(client.pid, signal.SIGUSR1)
        assert "all is well" in client.finish().check().stdout


def seconds_until_error(client, break_it):
    """From the signal to the error of a call to `far`."""
    break_it()
    os.kill(client.pid, signal.SIGUSR1)
    return float(client.wait_line(r"^seconds ([\d.]+) (SupervisionError|ActorError)")[1])


def test_a_machine_behind_the_gateway_that_falls_silent_is_lost_after_the_budget_and_no_earlier(hosts, cluster):
    b = hosts["b"]
    first_outage = """
say("begin")
signal.sigwait({signal.SIGUSR1})
far.pid.call_one().get(timeout=WAIT_S)
hosts.slice(hosts=1).spawn_procs().initialized.get(timeout=WAIT_S)
"""
    with client_on(hosts["d"], cluster[:2], SPAWNED + first_outage + WAIT_FOR_END, QUICK) as client:
        client.wait_line("^begin", timeout=START_S)
        b.link_down()
        client.wait_line("no sign of life")
        b.link_up()
        os.kill(client.pid, signal.SIGUSR1)
        client.wait_line("^ready")
        seconds = seconds_until_error(client, b.link_down)
        assert BUDGET_S - 0.3 < seconds < BUDGET_S + 1.5


def test_a_killed_process_behind_the_gateway_is_told_at_once(hosts, cluster):
    with client_on(hosts["d"], cluster[:2], SPAWNED + WAIT_FOR_END) as client:
        victim = int(client.wait_line(r"^ready (\d+)", timeout=START_S)[1])
        assert seconds_until_error(client, lambda: os.kill(victim, signal.SIGKILL)) < 2


def test_a_killed_gateway_is_told_at_once(hosts, cluster):
    a = hosts["a"]
    addresses = [a.url(26603), cluster[1]]

    def kill_gateway():
        for pid in run.pids():
            os.kill(pid, signal.SIGKILL)

    with loops([(a, addresses[0])], {}) as (run,), client_on(hosts["d"], addresses, SPAWNED + WAIT_FOR_END) as client:
        client.wait_line("^ready", timeout=START_S)
        assert seconds_until_error(client, kill_gateway) < 2


def test_two_clients_of_one_gateway_reach_each_other(hosts, cluster, tmp_path):
    reference = str(tmp_path / "reference")
    first = f"""
here, local = this_proc().spawn("here", Worker), this_host().spawn_procs().spawn("local", Worker)
say("pids", os.getpid(), local.pid.call_one().get(timeout=WAIT_S))
with open({reference!r}, "wb") as file:
    pickle.dump((here, local), file)
say("ready")
signal.sigwait({{signal.SIGUSR1}})
"""
    second = f"""
here, local = pickle.load(open({reference!r}, "rb"))
say("theirs", here.pid.call_one().get(timeout=WAIT_S), local.pid.call_one().get(timeout=WAIT_S))
say("again", *workers.pid_of.call(local).get(timeout=WAIT_S).values())
"""
    with client_on(hosts["d"], cluster[:1], first) as one:
        pids = one.wait_line(r"^pids (\d+) (\d+)", timeout=START_S)
        one.wait_line("^ready")
        with client_on(hosts["c"], cluster[:2], SPAWNED + second) as other:
            done = other.finish().check()
        os.kill(one.pid, signal.SIGUSR1)
        one.finish().check()
    assert f"theirs {pids[1]} {pids[2]}" in done.stdout
    assert "again" + f" {pids[2]}" * 4 in done.stdout


def test_a_socket_file_as_gateway_may_be_removed_afterwards():
    folder = f"/tmp/mgw-{os.getpid()}"  # socket paths are short
    os.mkdir(folder, 0o700)
    addresses = [f"ipc://{folder}/w{index}" for index in range(2)]
    source = CLIENT.replace("hosts =", f"os.unlink({folder + '/w0'!r})\nhosts =") + EVERYTHING.replace("== 12", "== 8")
    source += "hosts.shutdown().get(timeout=WAIT_S)"
    with ExitStack() as stack:
        runs = [stack.enter_context(start_script(WORKER, args=[address])) for address in addresses]
        for run in runs:
            run.wait_line("ready", timeout=START_S)
        done = run_script(source, args=[addresses[0], *addresses], timeout=30).check()
        for run in runs:
            run.finish().check()
    os.rmdir(folder)
    assert "all is well" in done.stdout
    assert "hello from afar" in done.stdout


def test_attaching_comes_first_and_once():
    source = """
import os
from monarch.actor import attach, attach_to_workers, start_worker_loop_forever, this_host, shutdown_context
from monarch.config import configure
first, second = [f"ipc:///tmp/mga-{os.getpid()}-{index}" for index in range(2)]
loops = [start_worker_loop_forever(address=address) for address in (first, second)]

def error(address):
    try:
        attach(address)
    except (RuntimeError, ValueError, NotImplementedError) as exc:
        return str(exc)

configure(mesh_attach_config_timeout="300ms")
print(error("tcp://localhost:1"))
print(error("tcp://no.such.host.invalid:1"))
configure(mesh_attach_config_timeout="20s")
print(error("nonsense"))
attach(first)
attach(first)
print(error(second))
this_host().spawn_procs().initialized.get()
shutdown_context().get()
hosts = attach_to_workers(workers=[first, second])
print(error(first))
hosts.shutdown().get()
for loop in loops:
    loop.get(timeout=10)
"""
    lines = run_script(source).check().stdout
    assert "attach failed: the gateway tcp://localhost:1 did not answer\n  where: Connection refused\n  next:  check that" in lines
    assert "host name 'no.such.host.invalid' cannot be resolved: Name or service not known\n  next:  see /etc/hosts" in lines
    assert "invalid worker address 'nonsense'" in lines
    assert "this client is already attached to the gateway ipc:///tmp/mga-" in lines
    assert "use a new process" in lines
    assert "attach() came too late: this process already uses monarch" in lines


def test_a_gateway_that_comes_late_is_waited_for():
    address = f"ipc:///tmp/mgl-{os.getpid()}"
    source = CLIENT.replace("attach(GATEWAY)", 'say("waiting"); attach(GATEWAY)')
    source += "say('size', len(hosts.spawn_procs().spawn('w', Worker)))\nhosts.shutdown().get(timeout=WAIT_S)"
    with start_script(source, args=[address, address]) as client:
        client.wait_line("waiting", timeout=START_S)
        with start_script(WORKER, args=[address]) as worker:
            assert "size 1" in client.finish().check().stdout
            worker.finish().check()
