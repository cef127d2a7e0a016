"""Unread values: a Future that is taken for its value says what was forgotten, and nothing else about it changes."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest

from monarch._runtime.future import Future


@pytest.fixture(params=["pending", "done"])
def future(request):
    return Future._new() if request.param == "pending" else Future._completed([1, 2])


@pytest.mark.parametrize(
    "use",
    [
        lambda future: list(future),
        lambda future: future[0],
        lambda future: 1 in future,
        lambda future: [*future],
        len,
        lambda future: future + 1,
        lambda future: 1 + future,
        lambda future: 2 * future,
        lambda future: -future,
        lambda future: future / 2,
        lambda future: future < 3,
        lambda future: sorted([future, future]),
        float,
        int,
    ],
)
def test_what_only_the_value_can_do_says_to_take_it_first(future, use):
    with pytest.raises(TypeError, match=r"a Future (.|\n)*next:  take its value first: future.get\(\), or await future"):
        use(future)


def test_a_name_that_a_future_lacks_is_said_to_be_the_values(future):
    with pytest.raises(AttributeError, match=r"a Future has no attribute 'shape'; its value may have\n  next:  take its value first"):
        _ = future.shape
    assert not hasattr(future, "shape") and getattr(future, "shape", 7) == 7


def test_what_else_looks_at_a_future_sees_what_it_saw_before(future):
    assert bool(future) and future == future and future in {future}
    assert not isinstance(future, Iterable) and not hasattr(future, "__iter__")
    assert not hasattr(future, "__array__") and not hasattr(future, "__deepcopy__")
    for copied in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="a Future can't be pickled"):
            copied(future)
    assert Future[int] is not None
