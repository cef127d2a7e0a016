"""Actions: lists of transfers that are submitted together, as often as one likes.

Read next: `engine.py`, which runs them.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NoReturn

from monarch._base.errors import explain
from monarch._runtime.future import Future
from monarch.rdma.backend import check_backend
from monarch.rdma.manager import own_manager
from monarch.rdma.memory import memory_of
from monarch.rdma.transport import Op

if TYPE_CHECKING:
    from monarch.rdma.buffer import RDMABuffer

_MOST_TIMEOUT = 2**64 - 1
_IN_FLIGHT = "RdmaAction is currently being submitted; await the in-flight submit before mutating it"


class RDMAAction:
    """A list of reads and writes that run together.

    Within one submit there is no order. Two operations may name the same local memory; what they leave there, if both read, is
    then a matter of chance. Thread: one at a time, except `submit` (any).
    """

    def __init__(self) -> None:
        self._ops: list[Op] = []
        self._under_way: list[Future[None]] = []

    def read_remote(self, dst: Any, src: RDMABuffer) -> RDMAAction:
        """Add: copy all of `src` to the first bytes of `dst`; what is behind them stays as it is.

        Raises:
            ValueError: `dst` is no contiguous memory, is read-only, or is shorter than `src`.
            TypeError: `src` is no RDMABuffer.
            RuntimeError: a submit is under way.
        """
        self._check_idle()
        self._ops.append(read_op(dst, src))
        return self

    def write_remote(self, dst: RDMABuffer, src: Any) -> RDMAAction:
        """Add: copy all of `src` to the first bytes of `dst`.

        Raises:
            ValueError: `src` is no contiguous memory, or is longer than `dst`, or `dst` is read-only.
            TypeError: `dst` is no RDMABuffer.
            RuntimeError: a submit is under way.
        """
        self._check_idle()
        self._ops.append(write_op(dst, src))
        return self

    def fetch_add(self, src: RDMABuffer, dst: Any, add: int) -> NoReturn:
        """Not there yet."""
        raise NotImplementedError("Not yet supported")

    def compare_and_swap(self, src: RDMABuffer, dst: Any, compare: int, swap: int) -> NoReturn:
        """Not there yet."""
        raise NotImplementedError("Not yet supported")

    def submit(self, *, timeout: int = 60) -> Future[None]:
        """Run everything that was added, from now on, whether anybody waits or not. May be repeated; the bytes are those of then.

        Args:
            timeout: seconds for all of it; 0 times out.

        Returns:
            A future that fails with `RDMAError`, of which `RDMATimeout` is one.

        Raises:
            TypeError, OverflowError: the timeout is no integer, or none that fits 64 bits without a sign.
            RdmaInitError: no transfer is possible in this process.
        """
        timeout_s = checked_timeout(timeout)
        check_backend()
        self._under_way = [future for future in self._under_way if not future._done]
        future = own_manager().engine.submit(self._ops, timeout_s, ("action", id(self)) if self._ops else None)
        if not future._done:
            self._under_way.append(future)
        return future

    def _check_idle(self) -> None:
        if any(not future._done for future in self._under_way):
            raise RuntimeError(_IN_FLIGHT)


def read_op(dst: Any, src: RDMABuffer) -> Op:
    """Remote `src` to local `dst`; raises as `RDMAAction.read_remote`."""
    try:
        nbytes = src._nbytes
    except AttributeError:
        raise _no_buffer(src) from None
    local = memory_of(dst)
    if local.is_readonly:
        hint = "read into a bytearray, an array, a tensor, or a memoryview of one"
        raise ValueError(explain("destination local memory is read-only; reading into it would change an immutable object", next=hint))
    if local.nbytes < nbytes:
        what = f"destination local memory size ({local.nbytes}) must be >= remote buffer size ({nbytes})"
        raise ValueError(explain(what, next="use a larger destination, or a slice of the buffer: buffer[start:stop]"))
    return Op("read", local, 0, src._handle, src._offset, nbytes)


def write_op(dst: RDMABuffer, src: Any) -> Op:
    """Local `src` to remote `dst`; raises as `RDMAAction.write_remote`."""
    try:
        handle = dst._handle
    except AttributeError:
        raise _no_buffer(dst) from None
    local = memory_of(src)
    if local.nbytes > dst._nbytes:
        what = f"source local memory size ({local.nbytes}) must be <= remote buffer size ({dst._nbytes})"
        raise ValueError(explain(what, next="write a slice of the source"))
    if handle.is_read_only:
        what = f"buffer {handle.number} of {handle.ref.uid} is over read-only memory"
        raise ValueError(explain(what, next="make the RDMABuffer over writable memory, such as a bytearray"))
    return Op("write", local, 0, handle, dst._offset, local.nbytes)


def _no_buffer(value: object) -> TypeError:
    hint = "write read_remote(memory, buffer) or write_remote(buffer, memory)"
    return TypeError(explain(f"the remote side of a transfer is an RDMABuffer, not a {type(value).__name__}", next=hint))


def checked_timeout(timeout: int) -> int:
    """A timeout in whole seconds; TypeError, OverflowError otherwise."""
    try:
        seconds = operator.index(timeout)
    except TypeError as exc:
        raise TypeError(explain(f"timeout={timeout!r} is no whole number of seconds: {exc}", next="write timeout=1, or more")) from None
    if not 0 <= seconds <= _MOST_TIMEOUT:
        raise OverflowError(
            explain(f"timeout must fit in an unsigned 64-bit integer; got {seconds}", next="give whole seconds, such as 60")
        )
    return seconds
