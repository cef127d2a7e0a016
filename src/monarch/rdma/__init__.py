"""One-sided memory: handles to memory of a process that any other process reads and writes, without its owner taking part.

    buffer = RDMABuffer(tensor)             # on the owner; send it in any message
    buffer.read_into(other).get()           # anywhere: copy the owner's bytes here
    buffer.write_from(other).get()          # anywhere: copy bytes from here to the owner

Read next: `buffer.py` and `action.py` for the API, docs/design/rdma.md for how it works.
"""

import warnings as _warnings

from monarch.rdma.action import RDMAAction
from monarch.rdma.backend import (
    RDMAReadTransferWarning,
    RDMATcpFallbackWarning,
    RDMAWriteTransferWarning,
    get_rdma_backend,
    is_ibverbs_available,
    is_rdma_available,
)
from monarch.rdma.buffer import RDMABuffer
from monarch.rdma.errors import RDMAError, RdmaInitError, RDMATimeout
from monarch.rdma.mapped import MappedWeights
from monarch.rdma.weights import WeightPublisher, Weights

__all__ = [
    "MappedWeights",
    "RDMAAction",
    "RDMABuffer",
    "RDMAError",
    "RDMAReadTransferWarning",
    "RDMATcpFallbackWarning",
    "RDMATimeout",
    "RDMAWriteTransferWarning",
    "RdmaInitError",
    "WeightPublisher",
    "Weights",
    "get_rdma_backend",
    "is_ibverbs_available",
    "is_rdma_available",
]

for _kind in (RDMAReadTransferWarning, RDMAWriteTransferWarning, RDMATcpFallbackWarning):
    _warnings.simplefilter("once", _kind)
