"""Buffers at the C level: where the bytes of a Python object are in memory.

Rules of this file:
    1. An address is good for as long as somebody holds an export of the object: keep a memoryview of it.

Read next: `_net/local.py` and `monarch/rdma/memory.py`, which hand addresses to the kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PYBUF_SIMPLE = 0
PYBUF_WRITABLE = 1


class PyBuffer(ctypes.Structure):
    """CPython's `Py_buffer`: the one way to the address of a read-only view."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_void_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p, ctypes.c_int)(("PyObject_GetBuffer", ctypes.pythonapi))
_release_buffer = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(("PyBuffer_Release", ctypes.pythonapi))


@contextmanager
def exported(data: Any) -> Iterator[PyBuffer]:
    """The C-contiguous buffer of `data`, for the length of the block; BufferError when it has none."""
    buffer = PyBuffer()
    _get_buffer(data, ctypes.byref(buffer), PYBUF_SIMPLE)
    try:
        yield buffer
    finally:
        _release_buffer(ctypes.byref(buffer))


def address_of(data: Any) -> tuple[int, int]:
    """Address and number of bytes of a C-contiguous buffer; the address of an empty one may be 0.

    Raises:
        BufferError: the object has no such buffer.

    Cost: 1 us.
    """
    buffer = PyBuffer()
    _get_buffer(data, ctypes.byref(buffer), PYBUF_SIMPLE)
    place = buffer.buf or 0, buffer.len
    _release_buffer(ctypes.byref(buffer))
    return place
