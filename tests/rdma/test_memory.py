"""Local memory: what is accepted, what is refused in which words, and what the cache remembers for how long."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import sys
import threading

import numpy as np
import pytest

from monarch.rdma import memory
from monarch.rdma.memory import local_memory_cache, memory_of

TEXT = b"0123456789abcdef"
SHAPE_ERROR = r"RDMABuffer only supports 1d contiguous torch.Tensor or 1d c-contiguous memoryview. Got: "


def tensor_of(data, dtype="uint8"):
    torch = pytest.importorskip("torch")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(getattr(torch, dtype))


def anonymous(data):
    pages = mmap.mmap(-1, 4096)
    pages[: len(data)] = data
    return memoryview(pages)[: len(data)]


def ctypes_array(data):
    return (ctypes.c_char * len(data)).from_buffer_copy(data)


KINDS = {
    "memoryview": lambda: memoryview(bytearray(TEXT)),
    "slice": lambda: memoryview(bytearray(b"..." + TEXT + b"..."))[3:-3],
    "signed": lambda: memoryview(bytearray(TEXT)).cast("b"),
    "chars": lambda: memoryview(bytearray(TEXT)).cast("c"),
    "bytearray": lambda: bytearray(TEXT),
    "array": lambda: array.array("I", TEXT),
    "ctypes": lambda: memoryview(ctypes_array(TEXT)).cast("B"),
    "mmap": lambda: anonymous(TEXT),
    "numpy uint8": lambda: np.frombuffer(bytearray(TEXT), np.uint8),
    "numpy view": lambda: memoryview(np.frombuffer(bytearray(TEXT), np.uint8)),
    "numpy float64": lambda: np.frombuffer(bytearray(TEXT), np.float64),
    "numpy complex": lambda: np.frombuffer(bytearray(TEXT), np.complex128),
    "numpy half": lambda: np.frombuffer(bytearray(TEXT), np.float16),
    **{
        f"torch {dtype}": lambda dtype=dtype: tensor_of(TEXT, dtype)
        for dtype in ("uint8", "int8", "bool", "float16", "bfloat16", "float32", "float64", "complex64", "int64", "float8_e4m3fn")
    },
    "torch slice": lambda: tensor_of(b"...." + TEXT + b"....")[4:-4],
    "torch row": lambda: tensor_of(TEXT * 3).view(3, 16)[1],
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_every_kind_of_memory_is_read_and_written_in_place(make):
    data = make()
    found = memory_of(data)
    assert (found.size, found.read_at(0, 16), found.read_at(4, 3)) == (16, TEXT, b"456")
    found.write_at(1, b"XY")
    assert memory_of(data).read_at(0, 4) == b"0XY3"
    assert bytes(found.view(2, 2)) == b"Y3"


@pytest.mark.parametrize("place", [(0, 17), (16, 1), (-1, 2), (3, -1)], ids=str)
def test_beyond_the_end_there_is_nothing(place):
    found = memory_of(bytearray(TEXT))
    for act in (found.read_at, found.view):
        with pytest.raises(RuntimeError, match="exceeds region size 16"):
            act(*place)
    with pytest.raises(RuntimeError, match="exceeds region size 16"):
        found.write_at(15, b"ab")


def strided_tensor():
    return tensor_of(TEXT)[::2]


def matrix_tensor():
    return tensor_of(TEXT).view(4, 4)


def scalar_tensor():
    return tensor_of(TEXT)[0]


def sparse_tensor():
    return tensor_of(TEXT).to_sparse()


def meta_tensor():
    return pytest.importorskip("torch").empty(4, device="meta")


def conjugated_tensor():
    return tensor_of(TEXT, "complex64").conj()


REFUSED = {
    "strided view": lambda: memoryview(bytearray(TEXT))[::2],
    "reversed view": lambda: memoryview(bytearray(TEXT))[::-1],
    "matrix": lambda: memoryview(np.zeros((2, 2), np.uint8)),
    "numpy matrix": lambda: np.zeros((2, 2)),
    "numpy strided": lambda: np.zeros(10)[::2],
    "numpy objects": lambda: np.array([object()]),
    "numpy dates": lambda: np.zeros(2, "datetime64[s]"),
    "bytes": lambda: b"immutable",
    "text": lambda: "text",
    "number": lambda: 7,
    "none": lambda: None,
    "list": lambda: [1, 2],
    **{make.__name__: make for make in (strided_tensor, matrix_tensor, scalar_tensor, sparse_tensor, meta_tensor, conjugated_tensor)},
}


def test_a_contiguous_matrix_is_viewed_and_only_a_strided_one_is_copied():
    with pytest.raises(ValueError, match=r"  next:  pass tensor\.view\(-1\), which is the same memory"):
        memory_of(matrix_tensor())
    with pytest.raises(ValueError, match=r"  next:  pass tensor\.contiguous\(\)\.view\(-1\), which is a copy"):
        memory_of(strided_tensor())


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_what_has_no_plain_run_of_bytes_is_refused_with_a_way_on(make):
    with pytest.raises(ValueError, match=SHAPE_ERROR + r"(.|\n)*  next:  "):
        memory_of(make())


def test_a_memoryview_of_other_elements_is_a_runtime_error():
    with pytest.raises(RuntimeError, match=r"failed to acquire memoryview buffer(.|\n)*cast\('B'\)"):
        memory_of(memoryview(bytearray(TEXT)).cast("i"))


def test_read_only_memory_is_known_as_such():
    found = memory_of(memoryview(b"immutable"))
    assert found.is_readonly and found.read_at(0, 2) == b"im"
    with pytest.raises(RuntimeError, match="read-only"):
        found.write_at(0, b"x")


def test_memory_stays_while_it_is_used_whatever_becomes_of_its_view():
    data = bytearray(TEXT)
    view = memoryview(data)
    found = memory_of(view)
    view.release()
    with pytest.raises(BufferError):
        data.extend(b"more")
    assert found.read_at(0, 16) == TEXT


# --- the cache -------------------------------------------------------------------------------------------------------


def test_the_same_view_is_the_same_memory_and_another_one_is_not():
    data = bytearray(TEXT)
    view, other = memoryview(data), memoryview(data)
    first = memory_of(view)
    assert memory_of(view) is first
    assert memory_of(other) is not first
    assert {key[0] for key in local_memory_cache} >= {id(view), id(other)}


def test_tensors_over_one_range_of_a_storage_share_their_memory():
    tensor = tensor_of(TEXT)
    first = memory_of(tensor)
    assert memory_of(tensor) is first
    assert memory_of(tensor[:]) is first
    assert memory_of(tensor.view(-1)) is first
    assert memory_of(tensor[:8]) is not first


def test_an_entry_ends_with_what_backs_it():
    before = set(local_memory_cache)
    view = memoryview(bytearray(TEXT))
    found = memory_of(view)
    weak = found.downgrade()
    assert weak.upgrade() is found and len(set(local_memory_cache) - before) == 1
    del found
    assert weak.upgrade().read_at(0, 16) == TEXT
    del view
    gc.collect()
    assert weak.upgrade() is None and set(local_memory_cache) <= before


def test_an_entry_of_a_tensor_ends_with_the_last_tensor_of_its_storage():
    before = set(local_memory_cache)
    tensor = tensor_of(TEXT)
    memory_of(tensor)
    part = tensor[2:]
    del tensor
    gc.collect()
    assert set(local_memory_cache) - before
    del part
    gc.collect()
    assert set(local_memory_cache) <= before


def test_eviction_inside_of_a_change_of_the_cache_does_not_block():
    view = memoryview(bytearray(TEXT))
    memory_of(view)
    [(key, ref)] = [(key, ref) for key, ref in memory._cache_refs.items() if ref() is view]
    with memory._cache_lock:
        memory.evict(key, ref)
    assert key not in local_memory_cache
    memory_of(view)
    memory.evict(key, ref)  # an old reference does not end the new entry
    assert key in local_memory_cache


def test_threads_may_ask_for_the_same_memory():
    view = memoryview(bytearray(TEXT))
    found = []
    threads = [threading.Thread(target=lambda: found.append(memory_of(view))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {memory.read_at(0, 16) for memory in found} == {TEXT} and len(found) == 8


def test_neither_torch_nor_numpy_is_needed():
    import subprocess

    source = (
        "import sys; from monarch.rdma.memory import memory_of; memory_of(bytearray(4)); assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", source], check=True)


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_the_check_alone_refuses_the_same(make):
    with pytest.raises(ValueError, match=SHAPE_ERROR):
        memory.check_contiguous(make())


def test_the_check_alone_takes_views_and_tensors_only():
    memory.check_contiguous(memoryview(bytearray(TEXT)))
    with pytest.raises(ValueError, match=SHAPE_ERROR + "bytearray\n  next:  pass a tensor or a memoryview"):
        memory.check_contiguous(bytearray(TEXT))
    memory.check_contiguous(tensor_of(TEXT, "float32"))


def test_the_place_of_a_tensor_is_that_of_its_memory():
    tensor = tensor_of(TEXT, "float32")[1:]
    assert memory.place_of_tensor(tensor) == (memory_of(tensor).addr, 12) == memory.Place(addr=tensor.data_ptr(), size_in_bytes=12)
