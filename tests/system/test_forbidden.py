"""One-sided memory where the kernel forbids its calls: by a seccomp profile, or everybody's look into a process."""

from __future__ import annotations

import pytest

from monarch.rdma import vm
from system.remote import TESTS

pytestmark = pytest.mark.skipif(not vm.available(), reason="this system has no process_vm_readv")
USE = """
    import warnings
    warnings.simplefilter("ignore")
    from system import forbidden
    {forbid}
    import os, signal, socket
    from monarch.actor import attach_to_workers, endpoint, start_worker_loop_forever, this_host
    from monarch.rdma import RDMAAction, RDMABuffer, RDMAError
    from monarch.rdma.manager import own_manager
    from system.memory_owner import Owner

    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{{free.getsockname()[1]}}"
    loop = start_worker_loop_forever(ca="trust_all_connections", address=address)

    class Peer(Owner):
        @endpoint
        def hide(self) -> None:
            forbidden.hide()

        @endpoint
        def use(self, buffers: list[RDMABuffer]) -> str:
            for buffer in buffers:
                data = os.urandom(buffer.size())
                buffer.write_from(memoryview(data)).get(20)
                target = bytearray(buffer.size() + 8)
                buffer.read_into(target).get(20)
                assert target == data + bytes(8)
            parts, action = [bytearray(10) for _ in range(100)], RDMAAction()
            for at, part in enumerate(parts):
                action.read_remote(part, buffers[-1][20 * at : 20 * at + 10])
            action.submit().get(20)
            assert parts == [data[20 * at : 20 * at + 10] for at in range(100)]
            return own_manager()._choice.known(buffers[0]._handle).name

        @endpoint
        def failure(self, buffer: RDMABuffer) -> str:
            texts = []
            for transfer in (buffer.read_into, buffer.write_from):
                try:
                    transfer(bytearray(buffer.size())).get(20)
                except RDMAError as exc:
                    texts.append(str(exc))
            return "\\n".join(texts)

    host = {host}
    procs = host.spawn_procs({{"gpus": 2}})
    owner, reader = (procs.slice(gpus=rank).spawn(f"peer{{rank}}", Peer) for rank in range(2))
    {hide}
    buffers = [owner.publish.call_one(nbytes).get(20)[0] for nbytes in (5, 40 << 20, 3000)]
    print("by", reader.use.call_one(buffers).get(20), flush=True)
"""

ENDS = """
    buffers[2].drop().get(20)
    print(reader.failure.call_one(buffers[2]).get(20).count("not found"), flush=True)
    import monarch.actor
    monarch.actor.unhandled_fault_hook = lambda failure: None
    os.kill(owner.pid.call_one().get(20), signal.SIGKILL)
    text = reader.failure.call_one(buffers[1]).get(20)
    print(text.count("the owner of the buffer is gone"), flush=True)
    print(text, flush=True)
    attach_to_workers(ca="trust_all_connections", workers=[address]).shutdown().get(20)
    loop.get(20)
"""
"""What is dropped, and who is killed, is told as such."""
HERE = "this_host()"
AT_A_PORT = 'attach_to_workers(ca="trust_all_connections", workers=[address])'
"""Where a process can be dialled."""


def test_where_seccomp_forbids_the_calls_the_kernel_copies_by_its_files(run_script):
    done = run_script(
        USE.format(forbid="forbidden.forbid_calls()", hide="", host=HERE) + ENDS,
        env={"PYTHONPATH": TESTS},
    ).check()
    assert done.stdout.split("\n")[:3] == ["by cma", "2", "2"], str(done)


@pytest.mark.parametrize("host", [HERE, AT_A_PORT], ids=["at a socket file", "at a port"])
def test_where_nobody_may_look_into_the_owner_it_serves_its_memory_itself(run_script, host):
    done = run_script(
        USE.format(forbid="forbidden.forbid_calls(); forbidden.forbid_tracing()", hide="owner.hide.call_one().get(20)", host=host) + ENDS,
        env={"PYTHONPATH": TESTS},
    ).check()
    assert done.stdout.split("\n")[:3] == ["by owner", "2", "2"], str(done)
    assert done.stderr.count("memory is served by the process that owns it") == 1
