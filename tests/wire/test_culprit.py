"""Culprits: the part of a value that can't be pickled is named in the words of whoever sent it."""

from __future__ import annotations

import functools
import textwrap
import threading

import pytest

from monarch._wire.pickling import dumps

LOCK = "_thread.lock"
SCRIPT = """
    import functools
    import threading

    lock = threading.Lock()

    def helper():
        return lock

    def decorated(function):
        @functools.wraps(function)
        def inner(self):
            return function(self)
        return inner

    class Plain:
        def go(self):
            return lock

    class Deep:
        def go(self):
            return [helper() for _ in self.others()]

        def others(self):
            return [Plain, Deep]

    class Decorated:
        @decorated
        def go(self):
            return lock

    class Derived(Plain):
        pass

    def default(x=lock):
        return x

    def keyword(*, x=lock):
        return x

    bound = Plain().go
    item = [Deep()]
"""


@pytest.fixture(scope="module")
def script():
    """The names of a user's script, whose classes and functions travel by value."""
    names = {"__name__": "__main__"}
    exec(textwrap.dedent(SCRIPT), names)
    return names


def error_of(value, **options):
    with pytest.raises(TypeError) as caught:
        dumps(value, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("Plain", "value.go, global 'lock'"),
        ("Decorated", "value.go, global 'lock'"),
        ("Derived", "value, class Plain.go, global 'lock'"),
        ("Deep", "value.go, global 'helper', global 'lock'"),
        ("helper", "value, global 'lock'"),
        ("item", "value[0], class Deep.go, global 'helper', global 'lock'"),
        ("bound", "value, class Plain.go, global 'lock'"),
    ],
)
def test_a_global_that_the_scripts_code_uses_is_named(script, name, where):
    text = error_of(script[name])
    assert text.startswith(f"cannot pickle '_thread.lock' object\n  where: {where}, of type {LOCK}\n  next:  make it where it is used")


@pytest.mark.parametrize("name", ["default", "keyword"])
def test_a_default_is_named(script, name):
    assert f"where: value, default of 'x', of type {LOCK}" in error_of(script[name])


def test_a_variable_of_a_closure_is_named_also_before_it_has_a_value():
    def outer():
        lock = threading.Lock()

        def inner():
            return later, lock

        dumps_error = error_of(inner)
        later = 1
        return dumps_error

    assert "value.<variable 'lock'>" in outer()


def test_the_parts_of_a_spawn_have_names():
    parts = ("class C", "arguments", "options")
    assert f"where: arguments[1], of type {LOCK}" in error_of((int, (1, threading.Lock()), {}), parts=parts)
    assert f"where: options['x'][0], of type {LOCK}" in error_of((int, (), {"x": [threading.Lock()]}), parts=parts)


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (threading.Lock(), "the result of step()"),
        ([1, {"a": threading.Lock()}], "the result of step()[1]['a']"),
        (((threading.Lock(),), {}), "the result of step()[0][0]"),
    ],
)
def test_a_result_is_said_to_be_one(value, where):
    assert f"where: {where}, of type {LOCK}\n" in error_of(value, result_of="step")


def test_what_refers_to_itself_is_searched_once():
    loop = [threading.Lock()]
    loop.insert(0, loop)
    assert f"where: value[1], of type {LOCK}" in error_of(loop)


def test_our_own_objects_say_what_to_do_themselves():
    from monarch._runtime.future import Future

    text = error_of((([Future._completed(1)],), {}))
    assert text.startswith("a Future can't be pickled") and "argument 0[0]" in text and "next:" not in text


def test_a_partial_of_a_function_is_named_by_its_type():
    assert "value" in error_of(functools.partial(print, threading.Lock()))
