"""Endpoint decorators and the checks of arguments, before anything is spawned."""

from __future__ import annotations

import inspect

import pytest

from monarch.actor import Actor, as_endpoint, concurrent_endpoint, endpoint
from monarch.actor.endpoint import EndpointProperty, parameters_of


class Worker(Actor):
    @endpoint
    def bare(self, x: int) -> int:
        """What it does."""
        return x

    @endpoint(explicit_response_port=True, instrument=False, propagate="cached")
    def explicit(self, port, x):
        port.send(x)

    @endpoint()
    async def called(self):
        pass

    @concurrent_endpoint
    async def concurrent(self):
        pass

    @concurrent_endpoint(explicit_response_port=True)
    async def concurrent_explicit(self, port):
        pass


def test_an_endpoint_is_a_descriptor_with_its_options_on_class_and_object():
    for holder in (Worker, Worker()):
        assert isinstance(holder.bare, EndpointProperty)
        bare, explicit = holder.bare, holder.explicit
        assert (bare._propagator, bare._explicit_response_port, bare._instrument) == (None, False, True)
        assert (explicit._propagator, explicit._explicit_response_port, explicit._instrument) == ("cached", True, False)
    assert Worker.bare._method(Worker(), 3) == 3
    with pytest.raises(TypeError, match=r"Worker.bare is an endpoint: it is called through the mesh.*\n.*write mesh.bare.call"):
        Worker().bare(3)


def test_an_endpoint_keeps_what_the_method_says_of_itself():
    assert (Worker.bare.__name__, Worker.bare.__doc__) == ("bare", "What it does.")
    assert Worker.concurrent.__qualname__ == "Worker.concurrent"
    assert repr(Worker.bare) == "<endpoint Worker.bare>"


def test_endpoints_know_whether_they_are_async_and_concurrent():
    kinds = {name: (getattr(Worker, name)._is_async, getattr(Worker, name)._concurrent) for name in ("bare", "called", "concurrent")}
    assert kinds == {"bare": (False, False), "called": (True, False), "concurrent": (True, True)}
    assert Worker.concurrent_explicit._explicit_response_port


def test_concurrent_endpoints_are_async_methods_and_no_endpoints_yet():
    with pytest.raises(ValueError, match=r"concurrent_endpoint can only wrap async endpoints; make .*sync_method an async def"):

        @concurrent_endpoint
        def sync_method(self):
            pass

    with pytest.raises(ValueError, match="@concurrent_endpoint does not wrap @endpoint; use one of them"):

        @concurrent_endpoint
        @endpoint
        async def twice(self):
            pass

    with pytest.raises(ValueError, match="can only wrap async endpoints"):
        concurrent_endpoint(explicit_response_port=True)(lambda self, port: None)


@pytest.mark.parametrize("decorator", [endpoint, concurrent_endpoint], ids=lambda f: f.__name__)
def test_mocked_propagation_is_not_implemented(decorator):
    with pytest.raises(NotImplementedError, match='propagate="mocked" is not implemented'):
        decorator(propagate="mocked")


def test_only_a_plain_method_of_a_mesh_becomes_an_endpoint():
    for wrong in (Worker.bare, Worker.__init__, print, None):
        with pytest.raises(ValueError, match=r"expected an method of a spawned actor, got(.|\n)*next:  endpoints already have call"):
            as_endpoint(wrong)


def method(self, a, b=2, *, key=None):
    pass


CALLS = [
    ((), {}, False),
    ((1,), {}, True),
    ((1, 2), {}, True),
    ((1, 2, 3), {}, False),
    ((1,), {"b": 3}, True),
    ((1,), {"key": 3}, True),
    ((1, 2), {"b": 3}, False),
    ((1,), {"other": 3}, False),
    ((), {"a": 1, "b": 2, "key": 3}, True),
]


@pytest.mark.parametrize(("args", "kwargs", "fits"), CALLS)
def test_arguments_are_checked_as_python_would(args, kwargs, fits):
    parameters = parameters_of(method, 1)
    if not kwargs:
        assert parameters.fit(args) == fits
    if fits:
        parameters.bind("mesh.method", args, kwargs)
    else:
        with pytest.raises(TypeError, match=r"\n  where: call of mesh\.method\(a, b=2, \*, key=None\)"):
            parameters.bind("mesh.method", args, kwargs)


@pytest.mark.parametrize(
    ("function", "skip", "text"),
    [
        (lambda self, a: None, 1, "(a)"),
        (lambda self, port, a: None, 2, "(a)"),
        (lambda *args: None, 1, "(*args)"),
        (lambda *args, **kwargs: None, 2, "(*args, **kwargs)"),
        (lambda self, *rest, key: None, 1, "(*rest, key)"),
    ],
)
def test_self_and_the_port_are_not_the_callers(function, skip, text):
    assert str(parameters_of(function, skip).signature) == text


def test_a_required_keyword_is_never_satisfied_by_position():
    parameters = parameters_of(lambda self, *rest, key: None, 1)
    assert not parameters.fit((1, 2, 3))
    with pytest.raises(TypeError, match=r"missing a required (keyword-only )?argument: 'key'"):
        parameters.bind("m", (1,), {})
    parameters.bind("m", (1,), {"key": 2})


def test_fit_agrees_with_inspect_for_every_short_signature():
    functions = [
        lambda self: None,
        lambda self, a: None,
        lambda self, a, b=1: None,
        lambda self, a=1, b=2: None,
        lambda self, *rest: None,
        lambda self, a, *rest: None,
        lambda self, a, /, b=1: None,
        lambda self, **named: None,
        lambda self, a, *, k=1, **named: None,
        lambda self, a, *, k: None,
    ]
    for function in functions:
        parameters = parameters_of(function, 1)
        for count in range(4):
            args = (0,) * count
            try:
                inspect.signature(function).bind(None, *args)
                binds = True
            except TypeError:
                binds = False
            assert parameters.fit(args) == binds, (inspect.signature(function), count)
