"""Actions: what is no transfer is refused at the call, and an action stays where its memory is."""

from __future__ import annotations

import copy
import pickle

import pytest

from monarch._base.ids import ProcRef
from monarch.rdma import RDMAAction, RDMABuffer
from monarch.rdma.handles import Handle

HANDLE = Handle(ProcRef("proc-0", "ipc://x", "ipc://y"), bytes(16), 0, 0, 1, 0, 100, 0, {})
BUFFER = RDMABuffer._of(HANDLE, 0, 100)


@pytest.mark.parametrize("wrong", [None, bytearray(100), memoryview(bytearray(100))], ids=lambda value: type(value).__name__)
def test_the_remote_side_is_a_buffer(wrong):
    for add in (lambda: RDMAAction().read_remote(bytearray(100), wrong), lambda: RDMAAction().write_remote(wrong, bytearray(1))):
        with pytest.raises(TypeError, match=rf"not a {type(wrong).__name__}(?s:.*)write_remote\(buffer, memory\)"):
            add()
    with pytest.raises(ValueError, match="1d contiguous"):
        RDMAAction().read_remote(BUFFER, BUFFER)


def test_an_action_is_neither_copied_nor_sent():
    torch = pytest.importorskip("torch")
    for memory in (bytearray(100), torch.zeros(25)):
        action = RDMAAction().read_remote(memory, BUFFER)
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"can't be copied or sent(?s:.*)in the process that submits it"):
                copied(action)
