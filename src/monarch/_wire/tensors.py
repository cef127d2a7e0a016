"""Arrays and tensors on the wire: their memory goes beside the pickle, and what arrives lies over the memory received.

Loaded with the first array or tensor; `pickling.py` asks `reducers_of` when a library has appeared.

Rules of this file:
    1. numpy and torch are never imported to send, only to load.
    2. Tensors that share a storage share it on the other side, too; a small view leaves its base behind.
    3. What differs from the common case (sparse, quantised, nested, hooked) goes by the library's own form.

Read next: `pickling.py`.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

from monarch._base.errors import require
from monarch._wire.pickling import OUT_OF_BAND_BYTES, has_dispatch_mode

_NO_MODES = nullcontext()


def reducers_of(name: str, library: Any) -> dict[type, Callable[[Any, Any], Any]]:
    """Reducers by exact type, `(value, pickler) -> reduced or NotImplemented`.

    Args:
        name: "numpy" or "torch".
        library: the imported module of that name.
    """
    if name == "numpy":
        scalars = {library.dtype(code).type: _reduce_scalar for code in "?bhilqBHILQefdFD"}
        return {library.ndarray: _reduce_array, **scalars}
    return {
        library.Tensor: _reduce_tensor,
        library.nn.Parameter: _reduce_tensor,
        library.UntypedStorage: _reduce_untyped,
        library.storage.TypedStorage: _reduce_typed,
    }


def _reduce_array(array: Any, pickler: Any) -> Any:
    # numpy's own form names its dtype object piece by piece: twice the time and the bytes of this one.
    dtype = array.dtype
    if dtype.kind not in "biufc" or dtype.metadata is not None or not array.size:
        return NotImplemented
    flags, order = array.flags, "C"
    shape = array.shape
    if not flags.c_contiguous:
        if flags.f_contiguous:
            array, order = array.T, "F"
        else:
            array = array.copy("C")
    return _load_array, (pickle.PickleBuffer(array), dtype.str, shape, order)


def _reduce_scalar(value: Any, pickler: Any) -> Any:
    return type(value), (value.item(),)


def _load_array(buffer: Any, dtype: str, shape: tuple[int, ...], order: str) -> Any:
    numpy: Any = require("numpy", extra="tensor")
    return numpy.frombuffer(buffer, dtype).reshape(shape, order=order)


def _reduce_tensor(tensor: Any, pickler: Any) -> Any:
    torch: Any = sys.modules["torch"]
    if (
        tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor._backward_hooks
        or tensor.__dict__
        or tensor.is_meta
    ):
        return NotImplemented  # torch's own form, with its storages reduced below
    with torch.utils._python_dispatch._disable_current_modes() if has_dispatch_mode(torch) else _NO_MODES:
        parts = _tensor_parts(tensor, pickler)
    if type(tensor) is not torch.Tensor:
        return _load_parameter, (*parts, tensor.requires_grad)
    return (_load_leaf if tensor.requires_grad else _load_tensor), parts


def _tensor_parts(tensor: Any, pickler: Any) -> tuple[Any, ...]:
    dtype = str(tensor.dtype)[6:]
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().resolve_conj().resolve_neg()
    if not tensor.is_cpu and not tensor.is_cuda:
        tensor = tensor.detach().cpu()
    storage = tensor.untyped_storage()
    if 2 * tensor.nbytes < storage.nbytes() and storage._cdata not in (pickler.storages or ()):
        tensor = tensor.detach().clone()  # a small view: its base stays here
        storage = tensor.untyped_storage()
    return _holder(storage, pickler), dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _reduce_untyped(storage: Any, pickler: Any) -> Any:
    return NotImplemented if storage.device.type == "meta" else (_load_untyped, (_holder(storage, pickler),))


def _reduce_typed(storage: Any, pickler: Any) -> Any:
    untyped = storage._untyped_storage
    return NotImplemented if untyped.device.type == "meta" else (_load_typed, (_holder(untyped, pickler), str(storage.dtype)[6:]))


# A storage travels as a list of one element, its memory. Pickle remembers lists, so tensors of one storage share the
# list; the first of them to be loaded replaces the memory in it by the storage. (An object with a reducer instead of
# the list costs 4 us more a tensor.)
def _holder(storage: Any, pickler: Any) -> list[Any]:
    """The list that stands for `storage` in this message. Its memory stays as long as the list or a view of it does."""
    known = pickler.storages
    if known is None:
        known = pickler.storages = {}
    key = storage._cdata
    if key in known:
        return known[key][0]  # type: ignore[no-any-return]
    import ctypes

    local = storage if storage.device.type == "cpu" else storage.cpu()
    num_bytes = local.nbytes()
    memory: Any = None
    if num_bytes >= OUT_OF_BAND_BYTES:
        view = _bytes_type(num_bytes).from_address(local.data_ptr())
        view.owner = local  # ctypes does not own what it looks at
        memory = pickle.PickleBuffer(view)
    elif num_bytes:
        memory = bytearray(ctypes.string_at(local.data_ptr(), num_bytes))
    known[key] = [memory], storage
    return known[key][0]  # type: ignore[no-any-return]


@lru_cache(maxsize=256)
def _bytes_type(num_bytes: int) -> Any:
    import ctypes

    return ctypes.c_char * num_bytes  # making the type costs 12 us, a hundred times its use


def _storage_in(holder: list[Any], torch: Any) -> Any:
    """The storage that `holder` stands for, made over the received memory by whoever comes first."""
    memory = holder[0]
    if memory is None:
        holder[0] = torch.UntypedStorage(0, device="cpu")
    elif not isinstance(memory, torch.UntypedStorage):
        holder[0] = _over(memory, torch.uint8, torch).untyped_storage()
    return holder[0]


def _over(memory: Any, dtype: Any, torch: Any) -> Any:
    # torch keeps this object, but gives up its export: a memoryview that somebody else could release would leave the tensor
    # over freed memory. Nobody else has this one.
    view = memoryview(memory)
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=dtype)


def _load_tensor(holder: list[Any], dtype_name: str, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Any:
    torch: Any = sys.modules.get("torch") or require("torch", extra="tensor")
    dtype, memory = getattr(torch, dtype_name), holder[0]
    if memory is None or isinstance(memory, torch.UntypedStorage) or len(memory) % dtype.itemsize:
        storage = _storage_in(holder, torch)
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, shape, stride)
    tensor = _over(memory, dtype, torch)  # the common case, in half the time
    holder[0] = tensor.untyped_storage()
    return tensor.as_strided_(shape, stride, offset)


def _load_leaf(*parts: Any) -> Any:
    return _load_tensor(*parts).requires_grad_()


def _load_parameter(*parts: Any) -> Any:
    tensor = _load_tensor(*parts[:-1])
    return sys.modules["torch"].nn.Parameter(tensor, parts[-1])


def _load_untyped(holder: list[Any]) -> Any:
    return _storage_in(holder, require("torch", extra="tensor"))


def _load_typed(holder: list[Any], dtype_name: str) -> Any:
    torch: Any = require("torch", extra="tensor")
    storage = _storage_in(holder, torch)
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=getattr(torch, dtype_name), _internal=True)
