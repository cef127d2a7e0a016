"""Local memory: address, length and owner of the bytes of a tensor, an array or any other object with a buffer.

Rules of this file:
    1. torch and numpy are never imported: only their objects, which the user has made, are looked at.
    2. A `LocalMemory` pins what it describes: the storage of a tensor, an export of anything else. Nothing moves or goes meanwhile.
    3. The cache holds weak handles only. It forgets a range when what backs it is collected, in the middle of anything.

Read next: `regions.py`, where the owner publishes memory; `action.py`, which reads into and writes from it.
"""

from __future__ import annotations

import ctypes
import re
import sys
import threading
import weakref
from functools import partial
from typing import Any, NamedTuple, NoReturn

from monarch._base.buffers import address_of
from monarch._base.errors import explain

_BYTE_FORMATS = ("B", "b", "c")
_FIELD_NAMES = re.compile(r":[^:]*:")
_ACCEPTED = "RDMABuffer only supports 1d contiguous torch.Tensor or 1d c-contiguous memoryview. Got: "
CacheKey = tuple[int, int, int]
"""Identity of what backs the memory, address, bytes."""


class Place(NamedTuple):
    """Where bytes are, for whoever keeps them there himself."""

    addr: int
    size_in_bytes: int


class FilePlace(NamedTuple):
    """Where memory is that maps a file as it is (`MAP_SHARED`)."""

    fd: int
    """Stays open as long as the memory is published."""
    offset: int
    """Of the first byte."""


class LocalMemory:
    """A range of this process's memory, which stays where it is as long as this object lives. Thread: any."""

    __slots__ = ("__weakref__", "_anchor", "address", "device", "file", "is_readonly", "nbytes", "pin")

    def __init__(
        self,
        address: int,
        nbytes: int,
        pin: Any,
        *,
        is_readonly: bool = False,
        device: str = "cpu",
        anchor: Any = None,
        file: FilePlace | None = None,
    ) -> None:
        """Args:
        pin: what keeps the bytes in place.
        anchor: the user's object whose end is the end of the cache entry; None: there is no such object.
        file: that the memory is a mapping of; None: not known.
        """
        self.address = address
        self.nbytes = nbytes
        self.pin = pin
        self.is_readonly = is_readonly
        self.device = device
        """Of torch, `cpu` or `cuda:<index>`."""
        self.file = file
        self._anchor = anchor

    @property
    def addr(self) -> int:
        """Address of the first byte."""
        return self.address

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.nbytes

    @property
    def lifetime(self) -> object:
        """With whose end the bytes may be used for something else: the user's object, or this one when that can't be watched."""
        return self if self._anchor is None else self._anchor

    def read_at(self, offset: int, size: int) -> bytes:
        """A copy of `size` bytes; RuntimeError beyond the end."""
        self._check(offset, size)
        return ctypes.string_at(self.address + offset, size)

    def write_at(self, offset: int, data: bytes) -> None:
        """Overwrite bytes; RuntimeError beyond the end, or when the memory is read-only."""
        self._check(offset, len(data))
        if self.is_readonly:
            raise RuntimeError(explain("this memory is read-only", next="make it over a writable object, such as a bytearray"))
        ctypes.memmove(self.address + offset, data, len(data))

    def view(self, offset: int, size: int) -> memoryview:
        """The bytes themselves, writable; only for as long as this object lives. RuntimeError beyond the end."""
        self._check(offset, size)
        return memoryview((ctypes.c_char * size).from_address(self.address + offset)).cast("B")

    def _check(self, offset: int, size: int) -> None:
        if offset < 0 or size < 0 or offset + size > self.nbytes:
            raise RuntimeError(f"access at offset {offset} of {size} bytes exceeds region size {self.nbytes}")
        if self.device != "cpu":
            raise RuntimeError(explain(f"this memory is on {self.device}", next="copy it by torch"))

    def downgrade(self) -> WeakMemory | None:
        """A handle that does not pin; None when nothing tells when the memory goes."""
        return None if self._anchor is None else WeakMemory(self)

    def __reduce__(self) -> NoReturn:
        hint = "send RDMABuffers, and make the RDMAAction in the process that submits it"
        raise TypeError(explain("memory of this process can't be copied or sent", next=hint))

    def __repr__(self) -> str:
        return f"<LocalMemory of {self.nbytes} bytes on {self.device}>"


class WeakMemory:
    """Remembers a range of memory without pinning it. Thread: any."""

    __slots__ = ("_anchor", "_strong", "address", "device", "is_readonly", "nbytes")

    def __init__(self, memory: LocalMemory) -> None:
        self.address = memory.address
        self.nbytes = memory.nbytes
        self.device = memory.device
        self.is_readonly = memory.is_readonly
        self._anchor = weakref.ref(memory._anchor)
        self._strong = weakref.ref(memory)

    @property
    def addr(self) -> int:
        """Address of the first byte."""
        return self.address

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.nbytes

    def upgrade(self) -> LocalMemory | None:
        """The memory, pinned; None when what backs it is gone."""
        strong = self._strong()
        if strong is None:
            anchor = self._anchor()
            if anchor is None:
                return None
            pin = memoryview(anchor) if isinstance(anchor, memoryview) else anchor
            strong = LocalMemory(self.address, self.nbytes, pin, is_readonly=self.is_readonly, device=self.device, anchor=anchor)
            self._strong = weakref.ref(strong)
        return strong


local_memory_cache: dict[CacheKey, WeakMemory] = {}
"""What was used so far and still exists."""
_cache_refs: dict[CacheKey, weakref.ref[Any]] = {}
_cache_lock = threading.RLock()
"""Re-entrant: the collector may end an entry while another one is made."""


def evict(key: CacheKey, ref: weakref.ref[Any], *, lock: Any = _cache_lock) -> None:
    """What backs an entry is gone; an entry that was made since for another object with the same id stays."""
    with lock:
        if _cache_refs.get(key) is ref:
            del _cache_refs[key]
            local_memory_cache.pop(key, None)


def memory_of(data: Any) -> LocalMemory:
    """The memory of a one-dimensional contiguous tensor, memoryview, bytearray, array or other object with a writable buffer.

    Args:
        data: a memoryview must have byte format; other objects may have elements of any type.

    Returns:
        The same object as before for the same storage or memoryview and the same range, if that is in use.

    Raises:
        ValueError: another shape, strides or type.
        RuntimeError: a memoryview of another format.

    Cost: 2-4 us.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(data, torch.Tensor):
        return _tensor_memory(data, torch)
    if isinstance(data, memoryview):
        return _view_memory(data)
    return _object_memory(data)


def check_contiguous(data: Any) -> None:
    """ValueError, as of `memory_of`, for what is neither a tensor nor a memoryview that is one-dimensional and contiguous."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(data, torch.Tensor):
        _check_tensor(data, torch)
    elif isinstance(data, memoryview):
        _check_view(data)
    else:
        raise ValueError(explain(f"{_ACCEPTED}{type(data).__name__}", next="pass a tensor or a memoryview"))


def place_of_tensor(tensor: Any) -> tuple[int, int]:
    """Address and number of bytes of a contiguous tensor."""
    return tensor.data_ptr(), tensor.nbytes


def _check_tensor(tensor: Any, torch: Any) -> None:
    if tensor.layout is not torch.strided or tensor.dim() != 1 or not tensor.is_contiguous():
        if tensor.layout is torch.strided and tensor.is_contiguous():
            hint = "pass tensor.view(-1), which is the same memory"
        else:
            hint = "pass tensor.contiguous().view(-1), which is a copy, or a contiguous slice"
        shape = f"a tensor of shape {tuple(tensor.shape)}" + (f" and strides {tensor.stride()}" if tensor.layout is torch.strided else "")
        raise ValueError(explain(_ACCEPTED + shape, next=hint))
    if tensor.is_meta or not (tensor.is_cpu or tensor.is_cuda):
        raise ValueError(explain(f"{_ACCEPTED}a tensor on {tensor.device}", next="only CPU and CUDA tensors have memory that can be moved"))
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(explain(f"{_ACCEPTED}a lazily conjugated or negated tensor", next="pass tensor.resolve_conj().resolve_neg()"))


def _tensor_memory(tensor: Any, torch: Any) -> LocalMemory:
    _check_tensor(tensor, torch)
    storage = tensor.untyped_storage()
    return _known((id(storage), *place_of_tensor(tensor)), storage) or _pin_tensor(tensor)


def _pin_tensor(tensor: Any) -> LocalMemory:
    storage = tensor.untyped_storage()
    device = "cpu" if tensor.is_cpu else str(tensor.device)
    return _remember(LocalMemory(*place_of_tensor(tensor), storage, device=device, anchor=storage), storage)


def _check_view(view: memoryview) -> None:
    if view.ndim != 1 or not view.c_contiguous:
        shape = f"a memoryview of shape {view.shape} and strides {view.strides}"
        raise ValueError(explain(_ACCEPTED + shape, next="copy it into a bytearray, or use a contiguous slice"))


def _view_memory(view: memoryview) -> LocalMemory:
    _check_view(view)
    if view.format not in _BYTE_FORMATS:
        text = f"failed to acquire memoryview buffer: its format is {view.format!r}, not bytes"
        raise RuntimeError(explain(text, next="pass view.cast('B')"))
    return _known((id(view), *address_of(view)), view) or _pin_view(view)


def _pin_view(view: memoryview) -> LocalMemory:
    # An export of its own: the user may release his view while the bytes are still in use.
    return _remember(LocalMemory(*address_of(view), memoryview(view), is_readonly=view.readonly, anchor=view), view)


def _object_memory(data: Any) -> LocalMemory:
    if isinstance(data, bytes):
        raise ValueError(explain(f"{_ACCEPTED}bytes, which are immutable", next="pass memoryview(data) to let others read them"))
    try:
        view = memoryview(data)
    except TypeError:
        hint = "pass a tensor, a numpy array, a bytearray, or a memoryview of anything with a buffer"
        raise ValueError(explain(_ACCEPTED + f"{type(data).__name__} ({data!r:.60})", next=hint)) from None
    except (BufferError, ValueError) as exc:
        raise ValueError(explain(f"{_ACCEPTED}{type(data).__name__}: {exc}", next="pass array.view('uint8')")) from None
    if "O" in _FIELD_NAMES.sub("", view.format):
        raise ValueError(explain(f"{_ACCEPTED}{type(data).__name__} of Python objects", next="pass an array of numbers"))
    if view.ndim != 1 or not view.c_contiguous:
        shape = f"{type(data).__name__} of shape {view.shape} and strides {view.strides}"
        raise ValueError(explain(_ACCEPTED + shape, next="pass numpy.ascontiguousarray(array).reshape(-1), or a contiguous slice"))
    address, nbytes = address_of(view)
    return LocalMemory(address, nbytes, view, is_readonly=view.readonly)


def _known(key: CacheKey, anchor: Any) -> LocalMemory | None:
    weak = local_memory_cache.get(key)
    return None if weak is None or weak._anchor() is not anchor else weak.upgrade()


def _remember(memory: LocalMemory, anchor: Any) -> LocalMemory:
    key = id(anchor), memory.address, memory.nbytes
    weak = memory.downgrade()
    assert weak is not None
    with _cache_lock:
        _cache_refs[key] = weakref.ref(anchor, partial(evict, key))
        local_memory_cache[key] = weak
    return memory
