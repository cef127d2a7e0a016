"""Threads inherit the context of whoever starts them, and are threads like others besides."""

from __future__ import annotations

import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from monarch._runtime.threads import inherit_context

variable = contextvars.ContextVar("variable", default="none")


@pytest.fixture(autouse=True)
def patched(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", threading.Thread.start)  # put back afterwards
    inherit_context()


@pytest.fixture(autouse=True)
def context():
    token = variable.set("of the starter")
    yield
    variable.reset(token)


def run(thread):
    thread.start()
    thread.join()


def test_a_thread_sees_the_context_of_its_starter():
    seen = []
    run(threading.Thread(target=lambda: seen.append(variable.get())))
    assert seen == ["of the starter"]


def test_a_thread_of_a_thread_does_so_too():
    seen = []

    def start_another():
        variable.set("of the first thread")
        run(threading.Thread(target=lambda: seen.append(variable.get())))

    run(threading.Thread(target=start_another))
    assert seen == ["of the first thread"]


def test_the_context_is_that_of_the_start_and_not_of_the_construction():
    seen = []
    thread = threading.Thread(target=lambda: seen.append(variable.get()))
    variable.set("of the start")
    run(thread)
    assert seen == ["of the start"]


def test_what_a_thread_changes_stays_its_own():
    run(threading.Thread(target=lambda: variable.set("of the thread")))
    assert variable.get() == "of the starter"


def test_a_subclass_with_its_own_run_does_so_too():
    class Own(threading.Thread):
        def run(self):
            self.seen = variable.get()

    thread = Own()
    run(thread)
    assert thread.seen == "of the starter"


def test_pools_and_timers_do_so_too():
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(variable.get).result() == "of the starter"
    seen = []
    timer = threading.Timer(0, lambda: seen.append(variable.get()))
    run(timer)
    assert seen == ["of the starter"]


def test_arguments_arrive_and_a_second_start_is_refused():
    seen = []
    thread = threading.Thread(target=lambda *args, **kwargs: seen.append((args, kwargs)), args=[1], kwargs={"two": 2})
    run(thread)
    assert seen == [((1,), {"two": 2})]
    with pytest.raises(RuntimeError, match="once"):
        thread.start()


def test_what_a_thread_raises_is_reported_as_ever(monkeypatch):
    reported = []
    monkeypatch.setattr(threading, "excepthook", lambda args: reported.append(args.exc_value))

    def fail():
        raise LookupError("in the thread")

    run(threading.Thread(target=fail))
    assert [str(error) for error in reported] == ["in the thread"]


def test_inheriting_twice_is_harmless():
    inherit_context()
    seen = []
    run(threading.Thread(target=lambda: seen.append(variable.get())))
    assert seen == ["of the starter"]
