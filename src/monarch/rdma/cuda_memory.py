"""The few things that CUDA does for `ipc`, by torch: identities of GPUs, handles of storages, copies. It has not run on hardware.

Read next: `ipc_transport.py`, which says when.
"""

from __future__ import annotations

import sys
import uuid
from typing import Any

import msgspec

from monarch.rdma import staging
from monarch.rdma.memory import LocalMemory


class TorchCuda:
    """CUDA of the torch that the user has imported. Thread: any."""

    @property
    def _torch(self) -> Any:
        torch = sys.modules.get("torch")
        if torch is None:
            raise RuntimeError("torch is not imported")
        return torch

    def uuid(self, device: str) -> bytes:
        """See `Cuda`."""
        text = getattr(self._torch.cuda.get_device_properties(device), "uuid", None)
        if text is None:
            raise RuntimeError("this torch tells no identities of GPUs")
        return uuid.UUID(str(text).removeprefix("GPU-")).bytes

    def find(self, identity: bytes) -> str:
        """See `Cuda`."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available():
            return ""
        names = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
        return next((name for name in names if self.uuid(name) == identity), "")

    def storage_start(self, memory: LocalMemory) -> int:
        """See `Cuda`."""
        return int(memory.pin.data_ptr())

    def share(self, memory: LocalMemory) -> bytes:
        """See `Cuda`."""
        return msgspec.msgpack.encode(list(memory.pin._share_cuda_())[1:])  # the first is the GPU as the owner calls it

    def map(self, shared: bytes, device: str) -> Any:
        """See `Cuda`."""
        torch = self._torch
        torch.cuda._lazy_init()
        return torch.UntypedStorage._new_shared_cuda(torch.device(device).index, *msgspec.msgpack.decode(shared))

    def copy(self, kind: str, storage: Any, offset: int, local: LocalMemory, local_offset: int, nbytes: int) -> None:
        """See `Cuda`."""
        torch = self._torch
        staging.wait_for_kernels([local])
        far = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, offset, (nbytes,), (1,))
        near = staging.bytes_of(local, local_offset, nbytes)
        stream = torch.cuda.Stream(storage.device)
        with torch.cuda.stream(stream):
            if kind == "read":
                near.copy_(far, non_blocking=True)
            else:
                far.copy_(near, non_blocking=True)
        stream.synchronize()
        staging.wait_for_kernels([local])
