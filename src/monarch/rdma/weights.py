"""Weights: a state dict that its owner publishes again and again, and that any number of readers pull whole, in one version.

    publisher = WeightPublisher(model.state_dict())     # on the learner, once
    weights = publisher.weights                         # a handle; send it in any message
    publisher.publish(model.state_dict(), version=7)    # after each step; nobody is told, nobody is waited for
    version = weights.pull(rollout.state_dict())        # anywhere, at any time

The owner keeps `copies` versions side by side in memory of its own, so training goes on in the tensors themselves:

    header    published, writing, version of each copy      8 bytes each, written by the owner only
    copy 0    the tensors one after the other               of publications 0, copies, 2 x copies, ...
    copy 1    ...                                           of publications 1, copies + 1, ...

Rules of this file:
    1. A copy belongs to publication n until publication n + copies begins, which says so in `writing` first. Who has read a copy looks
       at `writing` again: if its publication is over by then, what was read is thrown away and read anew.
    2. The reader needs nobody: it is one-sided, as all of this package.

Read next: `buffer.py`, `action.py`.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from monarch._base.errors import explain
from monarch.rdma.action import RDMAAction
from monarch.rdma.buffer import RDMABuffer
from monarch.rdma.errors import RDMATimeout

_ALIGNMENT = 64
_WORD_BYTES = 8
_PUBLISHED, _WRITING, _VERSIONS = 0, 1, 2
_MOST_COPIES = 16


class Part(NamedTuple):
    """One tensor of a state dict."""

    offset: int
    """In a copy."""
    nbytes: int
    dtype: str
    """As `str(tensor.dtype)` says, without the module."""
    shape: tuple[int, ...]


class WeightPublisher:
    """The owner's end. Thread: any, one publication at a time."""

    def __init__(self, state: Mapping[str, Any], *, version: int = 0, copies: int = 2) -> None:
        """Publish `state` for the first time.

        Args:
            state: name to tensor (on any device, of any layout) or numpy array.
            version: what `Weights.pull` returns to whoever reads this; any number of yours.
            copies: how many versions are kept; a reader that takes longer than `copies - 1` publications has to begin anew.

        Raises:
            ValueError: there is no tensor in it, or `copies` is none of 1 to 16.
            TypeError: a value is neither a tensor nor an array.

        Cost: `copies` times the memory of `state`, and one copy of it now and at each publication.
        """
        if not 1 <= copies <= _MOST_COPIES:
            raise ValueError(explain(f"copies must be 1 to {_MOST_COPIES}, not {copies}"))
        parts, size = {}, 0
        for name, value in state.items():
            part = _part_of(name, value, size)
            parts[name] = part
            size += -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
        if not size:
            raise ValueError(explain("there are no weights to publish: the state dict is empty", next="publish it once it is filled"))
        self._copies = copies
        self._lock = threading.Lock()
        self._memory = [memoryview(mmap.mmap(-1, size)) for _ in range(copies)]
        self._words = memoryview(mmap.mmap(-1, (_VERSIONS + copies) * _WORD_BYTES))
        self._header = (ctypes.c_uint64 * (_VERSIONS + copies)).from_buffer(self._words)  # an item is stored at once
        self._buffers = [RDMABuffer(self._words), *(RDMABuffer(memory) for memory in self._memory)]
        self.weights = Weights(self._buffers[0], self._buffers[1:], parts)
        """The handle; the same for all versions."""
        self._published = -1
        self.publish(state, version=version)

    def publish(self, state: Mapping[str, Any], *, version: int | None = None) -> int:
        """Make `state` the version that readers get from now on.

        Args:
            state: the names, shapes and types of the constructor.
            version: None: one more than the last.

        Returns:
            The version.

        Raises:
            ValueError: another name, shape or type; nothing was published.

        Cost: one copy of the weights; what is on a GPU is copied from there.
        """
        parts = self.weights.parts
        _check_same(parts, state, what="published")
        with self._lock:
            number = self._published + 1
            slot = number % self._copies
            if version is None:
                version = int(self._header[_VERSIONS + (self._published % self._copies)]) + 1
            self._header[_WRITING] = number
            for name, part in parts.items():
                _copy_out(state[name], self._memory[slot][part.offset : part.offset + part.nbytes], part)
            self._header[_VERSIONS + slot] = version
            self._header[_PUBLISHED] = number
            self._published = number
        return version

    def close(self) -> None:
        """Take the memory back; who pulls from then on gets `RDMAError`."""
        for buffer in self._buffers:
            buffer.drop().get()


class Weights:
    """A handle to published weights, for any process. Thread: any."""

    def __init__(self, header: RDMABuffer, copies: list[RDMABuffer], parts: dict[str, Part]) -> None:
        self._header = header
        self._copies = copies
        self.parts = parts
        """Name to place, type and shape of each tensor."""

    def version(self, *, timeout: int = 60) -> int:
        """The version that is published now. Cost: one small one-sided read."""
        words = self._read_header(timeout)
        return words[_VERSIONS + words[_PUBLISHED] % len(self._copies)]

    def pull(self, into: Mapping[str, Any], *, names: Iterable[str] | None = None, timeout: int = 60) -> int:
        """Copy the published weights into tensors or arrays of this process; all of one version.

        Args:
            into: name to tensor or array, of the published shape and type. Those on the CPU and contiguous are filled directly,
                others through a copy.
            names: which; None: all that are in `into`.
            timeout: seconds.

        Returns:
            The version.

        Raises:
            ValueError: a name, shape or type that is not the published one; nothing was changed.
            RDMATimeout: not done in time, or the owner publishes faster than this process reads. What was pulled so far is of
                several versions.
            RDMAError: the owner has ended, or closed the publisher.
        """
        wanted = {name: into[name] for name in (into if names is None else names)}
        _check_same(self.parts, wanted, what="pulled", partly=True)
        targets = {name: _target_of(value, self.parts[name]) for name, value in wanted.items()}
        deadline_s = time.monotonic() + timeout
        while True:
            left_s = max(1, int(deadline_s - time.monotonic()))
            words = self._read_header(left_s)
            number = words[_PUBLISHED]
            slot = number % len(self._copies)
            action = RDMAAction()
            for name, target in targets.items():
                part = self.parts[name]
                if part.nbytes:
                    action.read_remote(target, self._copies[slot][part.offset : part.offset + part.nbytes])
            action.submit(timeout=left_s).get()
            if self._read_header(left_s)[_WRITING] < number + len(self._copies):
                break
            if time.monotonic() >= deadline_s:
                hint = "publish less often, or with more copies: WeightPublisher(..., copies=3)"
                raise RDMATimeout(explain(f"no version could be read whole within {timeout} s: the next ones came too soon", next=hint))
        for name, value in wanted.items():
            if targets[name] is not value:
                _copy_in(targets[name], value, self.parts[name])
        return words[_VERSIONS + slot]

    def _read_header(self, timeout: int) -> list[int]:
        data = bytearray(self._header.size())
        self._header.read_into(data, timeout=timeout).get()
        return list(memoryview(data).cast("Q"))

    def __repr__(self) -> str:
        return f"<Weights: {len(self.parts)} tensors, {sum(part.nbytes for part in self.parts.values())} bytes>"


# --- tensors and arrays --------------------------------------------------------------------------------------------------


def _torch_of(value: Any) -> Any:
    """The torch module when `value` is a tensor; None: it is none."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(value, torch.Tensor) else None


def _part_of(name: str, value: Any, offset: int) -> Part:
    if _torch_of(value) is None and not (hasattr(value, "__array_interface__") and hasattr(value, "dtype")):
        what = f"{name!r} is a {type(value).__name__}, neither a tensor nor an array"
        raise TypeError(explain(what, next="publish tensors or numpy arrays"))
    nbytes = int(value.numel() * value.element_size()) if _torch_of(value) is not None else int(value.nbytes)
    return Part(offset, nbytes, _dtype_of(value), tuple(value.shape))


def _dtype_of(value: Any) -> str:
    return str(value.dtype).rpartition(".")[2]


def _check_same(parts: Mapping[str, Part], state: Mapping[str, Any], *, what: str, partly: bool = False) -> None:
    unknown, missing = state.keys() - parts.keys(), set() if partly else parts.keys() - state.keys()
    if unknown or missing:
        text = ", ".join(sorted(unknown or missing)[:5])
        why = "are not among the published weights" if unknown else f"are missing in what is {what}"
        raise ValueError(explain(f"{text} {why}", next="use the names of the first publication"))
    for name, value in state.items():
        found = _part_of(name, value, 0)
        if (found.dtype, found.shape) != (parts[name].dtype, parts[name].shape):
            have, want = f"{found.dtype} {list(found.shape)}", f"{parts[name].dtype} {list(parts[name].shape)}"
            raise ValueError(explain(f"{name!r} that is {what} is {have}, and was published as {want}", next="give it that type and shape"))


def _flat(value: Any) -> Any:
    """A one-dimensional view of a contiguous tensor or array."""
    return value.view(-1) if _torch_of(value) is not None else value.reshape(-1)


def _target_of(value: Any, part: Part) -> Any:
    """What to read into: the value itself as one dimension, or a buffer that is copied from afterwards."""
    torch = _torch_of(value)
    if torch is not None:
        direct = value.device.type == "cpu" and value.is_contiguous()
        return value if direct and value.dim() == 1 else _flat(value) if direct else bytearray(part.nbytes)
    return _flat(value) if value.flags.c_contiguous and value.flags.writeable else bytearray(part.nbytes)


def _copy_out(value: Any, memory: memoryview, part: Part) -> None:
    torch = _torch_of(value)
    if not part.nbytes:
        return
    if torch is not None:
        torch.frombuffer(memory, dtype=value.dtype).view(part.shape).copy_(value.detach())
    else:
        numpy: Any = sys.modules["numpy"]  # there is an array, so it is there
        numpy.frombuffer(memory, dtype=value.dtype).reshape(part.shape)[...] = value


def _copy_in(data: Any, value: Any, part: Part) -> None:
    if not isinstance(data, bytearray) or not part.nbytes:
        return  # it was read in place, through a view
    torch = _torch_of(value)
    if torch is not None:
        with torch.no_grad():
            value.copy_(torch.frombuffer(data, dtype=value.dtype).view(part.shape))
    else:
        numpy: Any = sys.modules["numpy"]
        value[...] = numpy.frombuffer(data, dtype=value.dtype).reshape(part.shape)
