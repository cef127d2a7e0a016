"""Buffers: what users make over memory and send to others.

Read next: `action.py` for transfers, `handles.py` for what is pickled.
"""

from __future__ import annotations

import logging
import sys
import warnings
from functools import lru_cache
from typing import Any

from monarch._base.errors import explain
from monarch._runtime.future import Future
from monarch.rdma.action import checked_timeout, read_op, write_op
from monarch.rdma.backend import RDMATcpFallbackWarning, check_backend, get_rdma_backend
from monarch.rdma.handles import Handle, decode_handle, encode_handle
from monarch.rdma.manager import own_manager
from monarch.rdma.memory import LocalMemory, memory_of

_logger = logging.getLogger("monarch.rdma")


class RDMABuffer:
    """A handle to bytes of the process that made it; in any process it reads and writes these, without the owner taking part.

    Whoever has one may read, write and drop the memory. Bytes that the owner changes during a transfer may arrive half changed.
    Thread: any.
    """

    __slots__ = ("__weakref__", "_handle", "_nbytes", "_offset")

    def __init__(self, data: Any) -> None:
        """Publish memory of this process. It stays pinned until `drop()`, or the end of the process, also when `data` is gone.

        Args:
            data: one-dimensional and contiguous: a tensor of any type, a memoryview of bytes, a bytearray, a numpy array. What
                is read-only (a memoryview of `bytes`) can be read by others, and not written.

        Raises:
            ValueError: another shape or type, or no bytes at all.
            RuntimeError: no backend may be used, or the memoryview is not one of bytes.
            RdmaInitError: the configuration names a device that can't be.

        Cost: 30 us, whatever the size; nothing is copied. The first one of a process takes milliseconds, or a second on a
        machine with an RDMA device, which is tried then.
        """
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(data, torch.Tensor) and data.is_cuda:
            _check_cuda_allocator()
        if _own_backend() == "tcp":
            text = (
                "no RDMA device: buffers are copied by the kernel on one host, and travel by TCP between hosts; with "
                "monarch.configure(rdma_allow_tcp_fallback=False) they are refused instead"
            )
            warnings.warn(text, RDMATcpFallbackWarning, stacklevel=2)
        memory = memory_of(data)
        if not memory.nbytes:
            raise ValueError("Cannot create RDMABuffer with size 0.")
        self._handle = _publish(memory)
        self._offset = 0
        self._nbytes = memory.nbytes

    @classmethod
    def _over(cls, memory: LocalMemory) -> RDMABuffer:
        """Publish memory that is described already, without a word about how it travels.

        Raises:
            RuntimeError, RdmaInitError: as the constructor.
        """
        _own_backend()
        return cls._of(_publish(memory), 0, memory.nbytes)

    @classmethod
    def _of(cls, handle: Handle, offset: int, nbytes: int) -> RDMABuffer:
        buffer = cls.__new__(cls)
        buffer._handle, buffer._offset, buffer._nbytes = handle, offset, nbytes
        return buffer

    def size(self) -> int:
        """Number of bytes."""
        return self._nbytes

    @property
    def backend(self) -> str:
        """`get_rdma_backend()` of this process."""
        return get_rdma_backend()

    @property
    def owner(self) -> str:
        """Who owns the memory, for people."""
        return f"rdma_manager.{self._handle.ref.uid}@{self._handle.ref.address}"

    def __getitem__(self, part: object) -> RDMABuffer:
        """A buffer of some of the bytes, `buffer[4096:8192]`; no communication. Dropping it drops the whole buffer.

        Raises:
            TypeError: no slice, or one with a step.
            ValueError: no bytes are in it.
        """
        if not isinstance(part, slice) or part.step not in (None, 1):
            raise TypeError(explain(f"an RDMABuffer takes slices of bytes, not {part!r}", next="write buffer[start:stop]"))
        start, stop, _ = part.indices(self._nbytes)
        if stop <= start:
            what = f"Cannot create RDMABuffer with size 0. No byte of a buffer of {self._nbytes} bytes is in [{part.start}:{part.stop}]"
            raise ValueError(explain(what, next="slices count bytes, not elements, and end where the buffer ends"))
        return self._of(self._handle, self._offset + start, stop - start)

    def read_into(self, dst: Any, *, timeout: int = 60) -> Future[None]:
        """Copy all bytes to the first `size()` bytes of `dst`, beginning now; see `RDMAAction`.

        Args:
            dst: as `data` of the constructor, writable, and at least as long.
            timeout: seconds.
        """
        op = read_op(dst, self)
        timeout_s = checked_timeout(timeout)
        check_backend()
        return own_manager().engine.submit((op,), timeout_s)

    def write_from(self, src: Any, *, timeout: int = 60) -> Future[None]:
        """Copy all of `src` to the first bytes, beginning now; see `RDMAAction`.

        Args:
            src: as `data` of the constructor, and at most as long.
            timeout: seconds.
        """
        op = write_op(self, src)
        timeout_s = checked_timeout(timeout)
        check_backend()
        return own_manager().engine.submit((op,), timeout_s)

    def drop(self) -> Future[None]:
        """Take the memory back, from any process: transfers fail from then on, and the owner lets go of it. Harmless twice."""
        return own_manager().drop(self._handle)

    def __reduce__(self) -> Any:
        return _load, (encode_handle(self._handle), self._offset, self._nbytes)

    def __repr__(self) -> str:
        return f"<RDMABuffer {self._handle.number} of {self._nbytes} bytes of {self._handle.ref.uid}>"


def _load(data: bytes, offset: int, nbytes: int) -> RDMABuffer:
    handle = decode_handle(data)
    if not (offset >= 0 and nbytes > 0 and offset + nbytes <= handle.nbytes):
        raise ValueError(
            explain(
                f"bytes {offset} to {offset + nbytes} of an RDMABuffer of {handle.nbytes} do not exist", where=f"owner {handle.ref.uid}"
            )
        )
    return RDMABuffer._of(handle, offset, nbytes)


def _own_backend() -> str:
    backend = get_rdma_backend()
    if backend == "none":
        hint = "monarch.configure(rdma_allow_tcp_fallback=True)"
        raise RuntimeError(explain("RDMA is not available on this platform, and rdma_allow_tcp_fallback is off", next=hint))
    return backend


def _publish(memory: LocalMemory) -> Handle:
    try:
        check_backend()
        handle = own_manager().register(memory)
        if not handle.blobs and memory.device != "cpu":
            own_manager().drop(handle)
            hint = "let rdma_transports name cma or tcp as well, which carry copies of it"
            raise ValueError(explain(f"nothing that rdma_transports allows reaches memory on {memory.device}", next=hint))
        return handle
    except Exception as exc:
        _logger.error("Failed to create buffer of %d bytes: %s", memory.nbytes, exc)
        raise


def has_expandable_segments() -> bool:
    """Whether torch allocates CUDA memory in expandable segments, which network cards want."""
    torch: Any = sys.modules["torch"]
    return bool(torch.cuda.memory._snapshot()["allocator_settings"].get("expandable_segments"))


@lru_cache(maxsize=1)
def _check_cuda_allocator() -> bool:
    """`has_expandable_segments`; if not, say so once."""
    try:
        if has_expandable_segments():
            return True
        text = "CUDA memory is not in expandable segments; set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before torch is imported"
    except Exception as exc:
        text = f"can't tell whether CUDA memory is in expandable segments: {exc!r}"
    warnings.warn(text, UserWarning, stacklevel=4)
    return False
