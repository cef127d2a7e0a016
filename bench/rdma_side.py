"""Owner and reader of one-sided memory on one host, measured on command: the same program for both implementations.

`rdma.py --peer` starts it with the interpreter of the other one and asks in its own rounds, one JSON line each way on stdin and stdout.
Only what both have is used: `RDMABuffer` over memoryviews, whole buffers, `RDMAAction`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from typing import Any

from monarch.actor import Actor, endpoint, shutdown_context, this_host
from monarch.rdma import RDMAAction, RDMABuffer

WAIT_S = 120.0
NUM_PARTS, PART_BYTES = 1000, 4096


class Owner(Actor):
    """Publishes memory of each size, and many small parts."""

    @endpoint
    def publish(self, sizes: list[int]) -> tuple[list[Any], list[Any], float]:
        self.memory = [bytearray(b"\1") * nbytes for nbytes in [*sizes, *[PART_BYTES] * NUM_PARTS]]
        buffers, seconds = [], 0.0
        for memory in self.memory:
            began = time.perf_counter()
            buffers.append(RDMABuffer(memoryview(memory)))
            if len(buffers) == 1:
                seconds = time.perf_counter() - began
        return buffers[: len(sizes)], buffers[len(sizes) :], seconds


def main() -> None:
    warnings.simplefilter("ignore")
    sizes: list[int] = json.loads(sys.argv[1])
    owner = this_host().spawn_procs(per_host={"owners": 1}).spawn("owner", Owner)
    buffers, parts, register_s = owner.publish.call_one(sizes).get(WAIT_S)
    by_size = dict(zip(sizes, buffers, strict=True))
    memory = bytearray(b"\2") * max(sizes[-1], NUM_PARTS * PART_BYTES)
    view = memoryview(memory)
    targets = {nbytes: view[:nbytes] for nbytes in sizes}
    action = RDMAAction()
    for number, part in enumerate(parts):
        action.read_remote(view[number * PART_BYTES : (number + 1) * PART_BYTES], part)
    calls: dict[str, Any] = {
        "read": lambda nbytes: by_size[nbytes].read_into(targets[nbytes]).get(WAIT_S),
        "write": lambda nbytes: by_size[nbytes].write_from(targets[nbytes]).get(WAIT_S),
        "batch": lambda _: action.submit().get(WAIT_S),
    }
    print(json.dumps(register_s), flush=True)
    for line in sys.stdin:
        name, nbytes, times = json.loads(line)
        taken = []
        for _ in range(times):
            began = time.perf_counter()
            calls[name](nbytes)
            taken.append(time.perf_counter() - began)
        print(json.dumps(statistics.median(taken)), flush=True)
    shutdown_context().get(WAIT_S)


if __name__ == "__main__":
    main()
