"""Values come back as they were, large memory is not copied on the way out, and what arrives over a buffer is the user's to write."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._wire.pickling import dumps, dumps_in_band, loads

LARGE = 300 * 1024
"""Bytes of this size leave the payload."""


def sent(value: Any) -> Any:
    """`value` as another process gets it: every buffer is writable memory of its own."""
    payload, buffers = dumps(value)
    return loads(payload, [memoryview(bytearray(buffer)) for buffer in buffers])


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, "u1").__array_interface__["data"][0])


@dataclass
class Parcel:
    content: Any


class Colour(Enum):
    RED = 1


class Text(str):
    pass


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.complex_numbers(allow_nan=False)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=40)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.sets(st.integers(), max_size=40)
        | inner.map(Parcel)
    ),
    max_leaves=60,
)


@given(values)
def test_any_value_comes_back_equal_and_of_the_same_type(value):
    back = sent(value)
    assert back == value
    assert type(back) is type(value)


@given(st.lists(values, max_size=4), st.dictionaries(st.text(), values, max_size=4))
def test_arguments_of_a_call_come_back_equal(args, kwargs):
    assert sent((tuple(args), kwargs)) == (tuple(args), kwargs)


@given(values)
def test_bytes_alone_are_enough_in_band(value):
    assert loads(dumps_in_band(value)) == value
    assert loads(memoryview(dumps_in_band(value))) == value


@pytest.mark.parametrize("value", [True, 1, 1.5, "a", b"b", 1j, None, (), [], {}, set(), ((), {}), ((1,), {}), ((), {"a": 1})], ids=repr)
def test_small_builtin_values_travel_as_plain_pickles(value):
    payload, buffers = dumps(value)
    assert not buffers
    assert b"monarch" not in payload and b"cloudpickle" not in payload
    assert loads(payload) == value and type(loads(payload)) is type(value)


@pytest.mark.parametrize(
    "value", [Text("a"), OrderedDict(a=1), Colour.RED, Parcel(3), range(4), slice(1, 2), Ellipsis, frozenset({1})], ids=repr
)
def test_subclasses_and_other_classes_keep_their_type(value):
    for shape in (value, [value], ((value,), {}), {"a": (value,)}):
        assert sent(shape) == shape
    assert type(sent([value])[0]) is type(value)


def test_classes_and_functions_of_main_travel_by_value():
    source = (
        "import sys; sys.path.insert(0, 'src')\n"
        "from monarch._wire.pickling import dumps\n"
        "class Point:\n    def __init__(self, x): self.x = x\n    def twice(self): return helper(self.x)\n"
        "def helper(x): return 2 * x\n"
        "p, b = dumps((([{'k': Point(4)}], helper, lambda: helper(1)), {}))\n"
        "assert 'numpy' not in sys.modules and 'torch' not in sys.modules\n"
        "sys.stdout.buffer.write(p)"
    )
    payload = subprocess.run([sys.executable, "-c", source], capture_output=True, check=True).stdout
    (points, helper, function), _ = loads(payload)
    assert (points[0]["k"].twice(), helper(3), function()) == (8, 6, 2)


def test_importing_the_module_loads_neither_cloudpickle_nor_numpy():
    source = "import sys, monarch._wire.pickling; print({'cloudpickle', 'numpy', 'ctypes', 'asyncio', 'socket'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_a_module_registered_for_pickling_by_value_is_honoured():
    import cloudpickle

    module = sys.modules[Parcel.__module__]
    by_name, _ = dumps(Parcel(1))
    cloudpickle.register_pickle_by_value(module)
    try:
        by_value, _ = dumps(Parcel(1))
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    assert len(by_value) > 3 * len(by_name)


@pytest.mark.parametrize("kind", [bytes, bytearray])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: ((x,), {}), lambda x: [[{"k": [Parcel(x)]}]]], ids=["bare", "call", "nested"])
def test_large_bytes_leave_the_payload_uncopied_and_keep_their_type(kind, wrap):
    content = kind(b"ab" * (LARGE // 2))
    payload, buffers = dumps(wrap(content))
    assert len(payload) < 1000
    assert [address(buffer) for buffer in buffers] == [address(memoryview(content))]
    back = loads(payload, [memoryview(bytes(buffer)) for buffer in buffers])
    assert back == wrap(content)
    while type(back) is not kind:
        back = back.content if isinstance(back, Parcel) else back["k"] if isinstance(back, dict) else back[0]


@given(st.lists(st.integers(0, 2) | st.just(LARGE) | st.just(LARGE + 7), max_size=8), st.booleans())
def test_large_and_small_pieces_of_any_order_are_put_back(sizes, with_array):
    value = [bytes([index]) * size for index, size in enumerate(sizes)]
    value += ["é" * (LARGE // 2), list(range(3)), value[:1], bytearray(LARGE)]
    payload, buffers = dumps((value, np.arange(LARGE) if with_array else None))
    back, array = loads(payload, buffers)
    assert back == value
    assert array is None or (array == np.arange(LARGE)).all()


def test_long_pickles_stay_one_payload():
    value = [Parcel(index) for index in range(20_000)]
    payload, buffers = dumps(value)
    assert not buffers and len(payload) > 100_000
    assert loads(payload) == value


@pytest.mark.parametrize(
    "content", [b"\x80\x05\x95" + bytes(LARGE), b"\x95" + bytes(LARGE), b"\x95" + LARGE.to_bytes(8, "little") + bytes(LARGE)]
)
def test_large_bytes_that_look_like_pickles_come_back(content):
    assert sent([content, Parcel(1)]) == [content, Parcel(1)]


class Stubborn:
    def __reduce__(self):
        raise ValueError("stays here")


@pytest.mark.parametrize(
    ("value", "kind", "what", "where"),
    [
        (((1, threading.Lock()), {}), TypeError, "cannot pickle '_thread.lock' object", "argument 1, of type _thread.lock"),
        (((), {"k": {"z": [threading.Lock()]}}), TypeError, "_thread.lock", r"argument 'k'\['z'\]\[0\], of type _thread.lock"),
        (((Parcel(threading.Lock()),), {}), TypeError, "_thread.lock", r"argument 0\.content, of type _thread.lock"),
        ((i for i in "a"), TypeError, "generator", "value, of type builtins.generator"),
        ([1, (i for i in "a")], TypeError, "generator", r"value\[1\], of type builtins.generator"),
    ],
    ids=["argument", "keyword", "attribute", "result", "part of a result"],
)
def test_a_value_that_cannot_travel_is_named(value, kind, what, where):
    with pytest.raises(kind, match=f"(?s){what}.*where: {where}.*next: "):
        dumps(value)


def test_an_error_of_the_users_own_keeps_its_type_and_gets_a_note():
    with pytest.raises(ValueError, match="stays here") as caught:
        dumps((([Stubborn()],), {}))
    assert caught.value.__notes__ == [f"  where: argument 0[0], of type {Stubborn.__module__}.Stubborn"]


def test_a_closure_names_its_variable():
    lock = threading.Lock()
    with pytest.raises(TypeError, match="variable 'lock'"):
        dumps(lambda: lock)


def test_a_value_that_breaks_the_search_keeps_its_first_error():
    class Odd:
        def __reduce__(self):
            raise TypeError("first")

        @property
        def __dict__(self):
            raise RuntimeError("second")

    with pytest.raises(TypeError, match="first") as caught:
        dumps([Odd()])
    assert "second" in caught.value.__notes__[0]


def test_a_failed_pickling_leaves_the_next_one_alone():
    with pytest.raises(TypeError):
        dumps([np.zeros(10_000), threading.Lock()])
    assert sent([1, Parcel(2)]) == [1, Parcel(2)]


def test_pickling_inside_a_reducer_does_not_disturb_the_outer_one():
    class Inner:
        def __reduce__(self):
            return loads, (dumps(Parcel([1, 2]))[0],)

    array = np.arange(5000)
    first, second, third = sent([array, Inner(), array])
    assert second == Parcel([1, 2]) and first is third and (first == array).all()


def test_an_error_while_loading_is_the_users_own():
    class Breaks:
        def __reduce__(self):
            return _only_on_client, ()

    payload, buffers = dumps(Breaks())
    with pytest.raises(ImportError, match="only_on_client"):
        loads(payload, buffers)


def _only_on_client():
    raise ImportError("only_on_client")


def test_threads_pickle_at_the_same_time():
    values = [[Parcel(index), np.full(3000, index), b"x" * LARGE] for index in range(8)]
    results: dict[int, Any] = {}

    def work(index):
        results[index] = [sent(values[index]) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert all(back[0] == Parcel(i) and (back[1] == i).all() and back[2] == b"x" * LARGE for i in range(8) for back in results[i])
