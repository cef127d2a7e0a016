from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import sys
import time
import types

import pytest

from monarch.telemetry import span, traced


class Api(types.ModuleType):
    """Stands for `opentelemetry.trace`; keeps "path of open spans" for each span that ended."""

    def __init__(self):
        super().__init__("opentelemetry.trace")
        self.open = contextvars.ContextVar("open", default=())
        self.ended = []
        self.scopes = []

    def get_tracer(self, scope):
        self.scopes.append(scope)
        return self

    @contextlib.contextmanager
    def start_as_current_span(self, name):
        path = (*self.open.get(), name)
        token = self.open.set(path)
        try:
            yield path
        finally:
            self.open.reset(token)
            self.ended.append("/".join(path))


@pytest.fixture
def api(monkeypatch):
    stand_in = Api()
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", stand_in)
    return stand_in


@pytest.fixture(params=[False, True], ids=["without OpenTelemetry", "with OpenTelemetry"])
def either(request, monkeypatch):
    if request.param:
        monkeypatch.setitem(sys.modules, "opentelemetry.trace", Api())
    else:
        monkeypatch.delitem(sys.modules, "opentelemetry.trace", raising=False)


async def echo(value):
    await asyncio.sleep(0)
    return value


def test_spans_nest_and_let_exceptions_pass(either):
    with pytest.raises(KeyError), span("outer"), span("inner"):
        raise KeyError
    with span("again"), span("again"):
        pass


@pytest.mark.parametrize("decorate", [traced, traced(), traced(name="other")], ids=["bare", "called", "named"])
async def test_a_traced_function_works_as_before(either, decorate):
    @decorate
    def double(x: int, *, plus: int = 0) -> int:
        """Twice."""
        return 2 * x + plus

    assert double(2, plus=1) == 5
    assert (double.__name__, double.__doc__, str(inspect.signature(double))) == (
        "double",
        "Twice.",
        "(x: 'int', *, plus: 'int' = 0) -> 'int'",
    )
    traced_echo = decorate(echo)
    assert inspect.iscoroutinefunction(traced_echo)
    assert await traced_echo("x") == "x"


@pytest.mark.parametrize("make", [lambda fail: fail, traced], ids=["plain", "traced"])
def test_a_traced_function_raises_as_before(either, make):
    def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        make(fail)()


def test_a_span_s_name_is_not_taken_for_a_function():
    with pytest.raises(TypeError, match=r"decorates a function, got 'load'; .*traced\(name='load'\)"):
        traced("load")


def test_nested_spans_follow_the_context(api):
    @traced
    def inner():
        with span("deep"):
            pass

    with span("outer"):
        inner()
    assert api.ended == ["outer/inner/deep", "outer/inner", "outer"]
    assert api.scopes == ["monarch"]


async def test_spans_of_concurrent_tasks_do_not_mix(api):
    @traced(name="task")
    async def work(n):
        with span(str(n)):
            await asyncio.sleep(0)

    await asyncio.gather(work(1), work(2))
    assert sorted(api.ended) == ["task", "task", "task/1", "task/2"]


def test_a_function_decorated_before_the_program_imports_a_tracer_is_heard(monkeypatch):
    monkeypatch.delitem(sys.modules, "opentelemetry.trace", raising=False)

    @traced
    def late():
        pass

    late()
    stand_in = Api()
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", stand_in)
    late()
    assert stand_in.ended == ["late"]


def test_an_unheard_span_is_almost_free(monkeypatch):
    monkeypatch.delitem(sys.modules, "opentelemetry.trace", raising=False)

    def cost_us() -> float:
        started = time.perf_counter()
        for _ in range(1000):
            with span("x"):
                pass
        return (time.perf_counter() - started) * 1e3

    assert min(cost_us() for _ in range(50)) < 1.0  # 0.2 measured; room for a busy machine
