"""Arrays and tensors: they come back equal, writable, over the memory received, sharing what they had shared."""

from __future__ import annotations

import gc
import weakref
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from monarch._wire.pickling import OUT_OF_BAND_BYTES, dumps, loads

LARGE = 300 * 1024
"""Bytes of this size leave the payload."""


def sent(value: Any) -> Any:
    """`value` as another process gets it: every buffer is writable memory of its own."""
    payload, buffers = dumps(value)
    return loads(payload, [memoryview(bytearray(buffer)) for buffer in buffers])


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, "u1").__array_interface__["data"][0])


def arrays() -> list[Any]:
    base = np.arange(24.0).reshape(2, 3, 4)
    big = np.arange(30_000).reshape(100, 300)
    return [
        base,
        base[::2],
        base.T,
        base[:, ::-1],
        np.asfortranarray(base),
        big,
        big.T,
        big[::3, ::2],
        big[5],
        np.broadcast_to(big[0], (5, 300)),
        np.array(3),
        np.array(3.5, dtype=">f8"),
        np.zeros((0, 4)),
        np.zeros((3, 0, 2), "i1"),
        np.array([True, False]),
        np.arange(5, dtype="c16"),
        np.array(["a", "bcd"]),
        np.array([b"x"], "S3"),
        np.array(["2026-11-29"], "M8[D]"),
        np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array([{"a": 1}, None, Fraction(3)], dtype=object),
        np.arange(3, dtype="f2"),
        np.ma.masked_array([1, 2], [True, False]),
        np.longdouble(1) * np.ones(3),
    ]


@pytest.mark.parametrize("array", arrays(), ids=lambda a: f"{a.dtype}{a.shape}{a.strides}")
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: ((x,), {}), lambda x: {"a": [x]}], ids=["bare", "call", "nested"])
def test_arrays_come_back_equal_and_writable(array, wrap):
    back = sent(wrap(array))
    while not isinstance(back, np.ndarray):
        back = back["a"] if isinstance(back, dict) else back[0]
    assert type(back) is type(array) and back.dtype == array.dtype and back.shape == array.shape
    np.testing.assert_array_equal(back, array)
    assert back.flags.writeable or not array.flags.writeable
    assert back.flags.f_contiguous or not array.flags.f_contiguous


@pytest.mark.parametrize(
    "value", [np.float64(2.5), np.float32(1), np.int64(3), np.bool_(True), np.str_("a"), np.dtype("f4"), np.float32], ids=repr
)
def test_numpy_scalars_come_back(value):
    assert sent(value) == value
    assert type(sent(value)) is type(value)


def test_a_contiguous_array_is_not_copied_to_be_sent():
    for array in (np.arange(10_000.0), np.arange(10_000.0).reshape(100, 100).T):
        _, (buffer,) = dumps(((array,), {}))
        assert address(buffer) == array.ctypes.data
        assert buffer.contiguous and buffer.format == "B" and buffer.nbytes == array.nbytes


def test_a_buffer_keeps_its_array_alive():
    array = np.arange(10_000.0)
    expected = array.tobytes()
    _, (buffer,) = dumps(array)
    gone = weakref.ref(array)
    del array
    gc.collect()
    assert gone() is not None and bytes(buffer) == expected


def test_an_array_lies_over_the_received_buffer_and_keeps_it():
    payload, (buffer,) = dumps(np.arange(10_000.0))
    memory = bytearray(buffer)
    array = loads(payload, [memoryview(memory)])
    array[0] = 7
    assert bytes(memory[:8]) == array[:1].tobytes()
    with pytest.raises(BufferError):
        memory.clear()
    del array
    memory.clear()


def test_small_arrays_stay_in_the_payload():
    assert not dumps(np.zeros(OUT_OF_BAND_BYTES - 1, "u1"))[1]
    assert len(dumps(np.zeros(OUT_OF_BAND_BYTES, "u1"))[1]) == 1


try:
    import torch
except ImportError:
    torch = None
needs_torch = pytest.mark.skipif(torch is None, reason="tensors are sent only where torch is installed")

DTYPES = ["float32", "float64", "float16", "bfloat16", "bool", "uint8", "int8", "int16", "int32", "int64", "complex64", "complex128"]
VIEWS = {
    "scalar": lambda t: t[0, 0],
    "whole": lambda t: t,
    "transposed": lambda t: t.T,
    "half": lambda t: t[: len(t) // 2],
    "row": lambda t: t[3],
    "strided": lambda t: t[::2, ::3],
    "empty": lambda t: t[:0],
    "expanded": lambda t: t[:, :1].expand(-1, 7),
    "of one element": lambda t: t[0, 0].clone(),
}


@needs_torch
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("side", [6, 100])
def test_tensors_come_back_equal_writable_and_over_as_little_memory(dtype, view, side):
    tensor = VIEWS[view]((torch.arange(side * side).reshape(side, side) % 7).to(getattr(torch, dtype)))
    back = sent(((tensor,), {"k": [tensor]}))
    assert back[0][0] is back[1]["k"][0]
    back = back[0][0]
    assert type(back) is torch.Tensor and back.dtype == tensor.dtype and back.shape == tensor.shape
    assert back.reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist() if tensor.dim() else True
    assert back.to(torch.complex128).tolist() == tensor.to(torch.complex128).tolist()
    assert back.untyped_storage().nbytes() <= max(2 * tensor.nbytes, 0)
    if view != "expanded":
        back.zero_()
        assert not back.to(torch.complex128).abs().sum()


@needs_torch
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("kind", ["tensor", "parameter", "computed"])
@pytest.mark.parametrize("side", [3, 100])
def test_gradients_are_asked_for_as_before(requires_grad, kind, side):
    tensor = torch.ones(side, side, requires_grad=requires_grad)
    if kind == "parameter":
        tensor = torch.nn.Parameter(tensor.detach(), requires_grad)
    elif kind == "computed":
        tensor = tensor * 2
    back = sent([tensor])[0]
    assert type(back) is type(tensor)
    assert back.requires_grad is requires_grad and back.is_leaf
    assert torch.equal(back, tensor)
    if requires_grad:
        back.sum().backward()
        assert torch.equal(back.grad, torch.ones(side, side))


def odd_tensors() -> dict[str, Any]:
    if torch is None:
        return {}
    square = torch.arange(10_000.0).reshape(100, 100)
    marked = torch.ones(2000)
    marked.label = "mine"
    return {
        "conjugate": torch.complex(square, square).conj(),
        "negative bit": torch.complex(square, square).conj().imag,
        "sparse": square.to_sparse(),
        "sparse rows": square.to_sparse_csr(),
        "with an attribute": marked,
        "inference": torch.inference_mode()(lambda: square + 1)(),
        "nested": torch.nested.nested_tensor([torch.ones(2, 3000), torch.ones(3, 3000)]),
    }


@needs_torch
@pytest.mark.parametrize("name", odd_tensors())
def test_unusual_tensors_come_back(name):
    tensor = odd_tensors()[name]
    back = sent([tensor])[0]
    assert type(back) is type(tensor) and back.layout == tensor.layout and back.is_nested == tensor.is_nested
    dense, expected = (t.to_padded_tensor(0.0) if t.is_nested else t.to_dense() for t in (back, tensor))
    assert torch.equal(dense, expected)
    assert getattr(back, "label", None) == getattr(tensor, "label", None)


@needs_torch
def test_a_meta_tensor_comes_back_without_memory():
    back = sent(torch.empty(3, 4, device="meta"))
    assert back.is_meta and back.shape == (3, 4)


@needs_torch
def test_storages_and_subclasses_go_out_of_band():
    class Marked(torch.Tensor):
        pass

    tensor = torch.arange(3000.0)
    for value in (tensor.untyped_storage(), tensor.as_subclass(Marked)):
        payload, buffers = dumps(value)
        assert [buffer.nbytes for buffer in buffers] == [12_000] and address(buffers[0]) == tensor.data_ptr()
        back = loads(payload, [memoryview(bytearray(b)) for b in buffers])
        assert type(back).__name__ == type(value).__name__
        assert bytes(back.untyped_storage() if isinstance(back, torch.Tensor) else back) == bytes(tensor.untyped_storage())


@needs_torch
@pytest.mark.parametrize("size", [10, 100, 10_000])
def test_tensors_of_one_storage_stay_aliased(size):
    base = torch.zeros(size)
    a, b, c, d = sent([base, base[size // 2 :], base.view(2, -1), base[:1]])
    a[:] = torch.arange(size)
    assert b[0] == size // 2 and c[1, 0] == size // 2
    b[0] = -1
    assert a[size // 2] == -1
    d[0] = 99
    assert a[0] == 99
    assert len(dumps([base, base[size // 2 :]])[1]) <= 1


@needs_torch
def test_storage_and_tensors_of_different_types_share_their_memory():
    base = torch.zeros(2000)
    one, storage, two = sent([base, base.untyped_storage(), base.view(torch.int32)])
    one[0] = 1.0
    assert two[0] == 0x3F800000
    assert storage.data_ptr() == one.data_ptr()


@needs_torch
def test_a_small_view_leaves_its_base_behind():
    base = torch.arange(1_000_000.0)
    payload, buffers = dumps(base[10:2010])
    assert [buffer.nbytes for buffer in buffers] == [8000]
    assert torch.equal(loads(payload, buffers), base[10:2010])
    assert len(dumps(base[:5])[0]) < 200


@needs_torch
def test_a_tensor_is_not_copied_to_be_sent_and_its_buffer_keeps_it():
    tensor = torch.arange(5000.0)
    expected = tensor.numpy().tobytes()
    payload, (buffer,) = dumps(((tensor,), {}))
    assert address(buffer) == tensor.data_ptr()
    assert buffer.contiguous and buffer.format == "B" and not buffer.readonly
    del tensor
    gc.collect()
    torch.zeros(5000)
    assert bytes(buffer) == expected
    assert len(payload) < 150


@needs_torch
def test_a_tensor_keeps_the_received_buffer_until_it_dies():
    payload, (buffer,) = dumps(torch.arange(5000.0))

    class Memory(bytearray):
        pass

    memory = Memory(buffer)
    view = memoryview(memory)
    gone = weakref.ref(memory)
    tensor = loads(payload, [view])
    tensor[0] = 5
    assert memory[:4] == tensor[:1].numpy().tobytes()
    view.release()
    with pytest.raises(BufferError):
        memory.clear()
    part = tensor[10:20]
    del memory, view, tensor
    gc.collect()
    assert gone() is not None and part.tolist() == list(range(10, 20))
    del part
    gc.collect()
    assert gone() is None


@needs_torch
def test_a_tensor_over_a_read_only_buffer_is_a_writable_copy():
    payload, (buffer,) = dumps(torch.zeros(5000))
    memory = bytes(buffer)
    tensor = loads(payload, [memoryview(memory)])
    tensor.fill_(1)
    assert not any(memory)


@needs_torch
def test_dispatch_modes_do_not_see_the_loading():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Adds:
        def __init__(self, tensor):
            self.tensor = tensor

        def __setstate__(self, state):
            self.tensor = state["tensor"] + 1

    value = [torch.arange(5000.0), torch.arange(5.0)[1:2], Adds(torch.zeros(2))]
    with Watch():
        back = sent(value)
    assert not seen
    assert torch.equal(back[0], value[0]) and back[2].tensor.tolist() == [1, 1]


@needs_torch
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_default_device_does_not_catch_what_arrives(device):
    with torch.device(device):
        back = sent([torch.arange(5000.0, device="cpu"), torch.ones(2, device="cpu"), torch.ones(0, device="cpu")])
    assert [t.device.type for t in back] == ["cpu"] * 3
    assert back[0][-1] == 4999


@needs_torch
def test_a_module_and_its_tied_weights_come_back():
    module = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 40))
    module[1].weight = module[0].weight
    back = sent(module)
    assert back[0].weight is back[1].weight
    x = torch.ones(1, 40)
    assert torch.equal(back(x), module(x))
    state = sent(module.state_dict())
    assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr()
