"""Worker loops on this host: several clients' meshes over the same loops."""

import os
import re
import signal
import socket

import pytest

from monarch.actor import Actor, attach_to_workers, endpoint, start_worker_loop_forever
from monarch.actor.process import this_process
from monarch.testing import leaks
from system.script import start_script
from system.waiting import wait_until

pytest_plugins = ["system.recorder"]
TRUST = "trust_all_connections"


class Worker(Actor):
    @endpoint
    def pid(self):
        return os.getpid()


@pytest.fixture
def loops(tmp_path_factory):
    folder = tmp_path_factory.mktemp("w", numbered=True)
    link = f"/tmp/mw-{os.getpid()}"  # socket paths are short
    os.symlink(folder, link)
    addresses = [f"ipc://{link}/w{index}" for index in range(2)]
    ended = [start_worker_loop_forever(ca=TRUST, address=address) for address in addresses]
    yield addresses, ended
    for future, address in zip(ended, addresses, strict=True):
        if not future._done:
            attach_to_workers(ca=TRUST, workers=[address]).shutdown().get(timeout=20)
        future.get(timeout=20)
    os.unlink(link)


def pids(procs):
    return procs.spawn("worker", Worker).pid.call().get(timeout=20).values()


def alive(pid):
    return os.path.exists(f"/proc/{pid}")


def test_stopping_one_attached_mesh_leaves_the_other_and_the_hosts(loops):
    addresses, ended = loops
    mine = attach_to_workers(ca=TRUST, workers=addresses)
    yours = attach_to_workers(ca=TRUST, workers=addresses)
    my_pids = pids(mine.spawn_procs({"procs": 2}))
    your_procs = yours.spawn_procs({"procs": 2})
    your_workers = your_procs.spawn("worker", Worker)
    your_pids = your_workers.pid.call().get(timeout=20).values()
    assert len({*my_pids, *your_pids}) == 8

    mine.stop().get(timeout=20)

    assert not any(map(alive, my_pids))
    assert your_workers.pid.call().get(timeout=20).values() == your_pids
    third = attach_to_workers(ca=TRUST, workers=addresses)
    assert len(pids(third.spawn_procs({"procs": 1}))) == 2
    third.shutdown().get(timeout=20)
    assert [future.get(timeout=20) for future in ended] == [None, None]
    with pytest.raises(RuntimeError, match="HostMesh has already been shut down"):
        third.spawn_procs()


def test_ranks_follow_the_order_of_the_addresses(loops):
    addresses, _ = loops
    hosts = attach_to_workers(ca=TRUST, workers=addresses)
    assert hosts.initialized.get(timeout=20) is True
    procs = hosts.spawn_procs({"gpus": 2})
    assert procs.sizes == {"hosts": 2, "gpus": 2}
    assert [ref.host for ref in procs._refs] == [addresses[0], addresses[0], addresses[1], addresses[1]]
    only = hosts.slice(hosts=1).spawn_procs({"gpus": 1})
    assert [ref.host for ref in only._refs] == [addresses[1]]
    assert len(pids(only)) == 1


def test_a_loop_that_never_comes_is_named(monkeypatch):
    from monarch.config import configured

    with configured(mesh_attach_config_timeout="1s"):
        hosts = attach_to_workers(ca=TRUST, workers=["ipc:///tmp/nobody-is-here"])
        with pytest.raises(RuntimeError, match=r"attach failed: config push failed.* on 1 host.*\n  next: .*\n    \| .*nobody-is-here"):
            hosts.initialized.get(timeout=10)


def test_a_time_out_says_why_a_host_could_not_be_reached_so_far():
    hosts = attach_to_workers(ca=TRUST, workers=["tcp://no.such.host.invalid:26600", "ipc:///tmp/nobody-is-here"])
    router = this_process().proc.router
    wait_until(lambda: all(router.story_of(agent) for agent in hosts.initialized and hosts._here()))
    procs = hosts.spawn_procs()
    for future in (hosts.initialized, procs.initialized, procs.spawn("worker", Worker).pid.call()):
        with pytest.raises(TimeoutError) as caught:
            future.get(timeout=0.3)
        assert re.search(r"^  .*: host name 'no.such.host.invalid' cannot be resolved: ", str(caught.value), re.MULTILINE), caught.value
        assert "No such file or directory" in str(caught.value)


@pytest.mark.parametrize(
    ("workers", "error", "text"),
    [
        (
            "tcp://a:1",
            TypeError,
            r"workers is the string 'tcp://a:1'; expected a list of addresses\n  next:  write workers=\['tcp://a:1'\]",
        ),
        ([26600], TypeError, "26600 is no address of a worker; expected a string"),
        (["tcp://*:26600"], ValueError, r"'tcp://\*:26600' can't be dialled: it stands for every interface\n  next:  give the host"),
        (["tcp://0.0.0.0:26600"], ValueError, "it stands for every interface"),
        (["tls://a:0"], ValueError, "it stands for any free port"),
        (["tcp://a:fd3"], ValueError, "it stands for a socket of the worker"),
    ],
)
def test_what_can_not_be_attached_to_is_refused(workers, error, text):
    with pytest.raises(error, match=text):
        attach_to_workers(ca=TRUST, workers=workers)


@pytest.mark.parametrize(("function", "keyword"), [(attach_to_workers, "workers"), (start_worker_loop_forever, "address")])
def test_an_argument_by_position_is_told_its_keyword(function, keyword):
    with pytest.raises(TypeError, match=rf"{function.__name__}\(\) takes its arguments by keyword\n  next:  write .*\({keyword}='x'\)"):
        function("x")


@pytest.mark.parametrize(
    ("address", "error", "text"),
    [
        ("nonsense", ValueError, "invalid worker address"),
        ("ipc://relative", ValueError, "absolute path"),
        ("ipc://@abstract", NotImplementedError, "cannot serve at"),
        ("quic://host:26600", NotImplementedError, "there is no transport"),
    ],
)
def test_bad_addresses_are_refused(address, error, text):
    with pytest.raises(error, match=text):
        start_worker_loop_forever(ca=TRUST, address=address)
    with pytest.raises(error, match=text):
        attach_to_workers(ca=TRUST, workers=[address])


@pytest.mark.parametrize(
    ("address", "how", "text"),
    [
        ("tls://127.0.0.1:26600", {"ca": TRUST}, "needs a certificate"),
        ("tls://127.0.0.1:26600", {"private_key": b"key"}, "TLS needs ca as well"),
        ("tls://127.0.0.1:26600", {"ca": b"pem"}, "TLS needs private_key as well"),
        ("tcp://127.0.0.1:26600", {}, "has no secret"),
    ],
)
def test_whoever_says_neither_secret_nor_trust_is_refused(address, how, text):
    with pytest.raises(ValueError, match=text):
        start_worker_loop_forever(address=address, **how)
    with pytest.raises(ValueError, match=text):
        attach_to_workers(workers=[address], **how)


def test_two_loops_at_one_address_are_refused(loops):
    addresses, _ = loops
    attach_to_workers(ca=TRUST, workers=addresses).initialized.get(timeout=20)
    with pytest.raises(RuntimeError, match=r"serves at .* already"):
        start_worker_loop_forever(ca=TRUST, address=addresses[0])


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_a_killed_agent_is_one_failure_of_all_that_ran_there(scheme, faults):
    before = set(leaks.children(os.getpid()))
    if scheme == "ipc":
        bound = address = f"ipc:///tmp/mw-killed-{os.getpid()}"
    else:
        listener = socket.create_server(("127.0.0.1", 0))
        address, bound = f"tcp://127.0.0.1:{listener.getsockname()[1]}", f"tcp://127.0.0.1:fd{listener.detach()}"
    ended = start_worker_loop_forever(ca=TRUST, address=bound)
    [agent] = set(leaks.children(os.getpid())) - before
    hosts = attach_to_workers(ca=TRUST, workers=[address])
    procs = hosts.spawn_procs({"gpus": 3})
    first, second = procs.spawn("first", Worker), procs.spawn("second", Worker)
    for mesh in (first, second):
        mesh.pid.call().get(timeout=20)
    os.kill(agent, signal.SIGKILL)
    [failure] = faults.wait(1)
    assert failure.mesh_name == first._core.uid and failure.crashed_ranks == [0, 1, 2]
    assert [fault.rank for fault in failure.faults] == [0, 1, 2] * 2
    for mesh in (first, second):
        assert ("the agent of its host" if scheme == "ipc" else f"its host {address} is lost") in str(mesh.pid.call().exception(20))
    assert "the worker loop ended with status -9" in str(ended.exception(20))


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "ipc:///tmp/mw-interrupted"])
def test_ctrl_c_ends_a_worker_loop_and_what_runs_there_without_a_traceback(address, faults):
    source = """
        import logging, sys
        from monarch.actor import run_worker_loop_forever
        logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
        print("worker loop: address=" + sys.argv[1], flush=True)
        try:
            run_worker_loop_forever(ca="trust_all_connections", address=sys.argv[1])
        except KeyboardInterrupt:
            print("caught", flush=True)
            raise
    """
    with start_script(source, args=[address]) as run:
        match = run.wait_line(r"worker loop: address=(ipc:.*|tcp://127.0.0.1:[1-9]\d*)")
        worker = attach_to_workers(ca=TRUST, workers=[match[1]]).spawn_procs().spawn("worker", Worker)
        pid = worker.pid.call_one().get(timeout=20)
        os.kill(run.pid, signal.SIGINT)
        done = run.finish()
        faults.wait(1)
        assert (done.returncode, done.leftovers) == (130, ()) and not alive(pid), done
        assert done.stdout.endswith("caught\n") and "Traceback" not in done.stderr, done
