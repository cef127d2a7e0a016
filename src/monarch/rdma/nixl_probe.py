"""A process of its own: exit status 0 when an agent of NIXL could read its own memory by what UCX's variables allow.

`nixl_library.probe` runs it: what hangs or crashes there harms nobody.

Read next: `nixl_agent.py` for the agent.
"""

from __future__ import annotations

import os
import sys
import time

from monarch._base.buffers import address_of
from monarch.rdma.nixl_agent import Agent, State

_LIMIT_S = 5.0
_NBYTES = 4096


def read_own_memory() -> bool:
    """Whether bytes that an agent reads from itself arrive."""
    agent = Agent(f"probe-{os.getpid()}")
    memory = bytearray(os.urandom(_NBYTES)) + bytearray(_NBYTES)
    start, nbytes = address_of(memory)
    agent.register(start, nbytes)
    request = agent.begin("read", [(start + _NBYTES, _NBYTES, 0)], False, [(start, _NBYTES, 0)], False, agent.name)
    end_s = time.monotonic() + _LIMIT_S
    while agent.state(request) is State.UNDER_WAY:
        if time.monotonic() > end_s:
            return False
        time.sleep(0.001)
    agent.release(request)
    return memory[:_NBYTES] == memory[_NBYTES:]


if __name__ == "__main__":
    # Without the destructors of the libraries, which are known to crash: the answer is what was read.
    try:
        status = 0 if read_own_memory() else 1
    except Exception as exc:
        print(repr(exc), file=sys.stderr, flush=True)
        status = 1
    os._exit(status)
