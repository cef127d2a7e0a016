"""Any exception arrives: itself, its class rebuilt, or a stand-in that says what it was."""

from __future__ import annotations

import asyncio
import pickle
import sys
import threading
import types

import pytest

from monarch._wire.exceptions import RemoteException, dumps_exception
from monarch._wire.pickling import loads


def sent(exc: BaseException) -> BaseException:
    payload, buffers = dumps_exception(exc)
    assert not buffers
    return loads(payload)


class KeywordOnly(Exception):
    def __init__(self, *, code):
        self.code = code

    def __str__(self):
        return f"http {self.code}"


class Reworded(Exception):
    def __init__(self, code):
        super().__init__(f"code {code}")


class TwoArguments(Exception):
    def __init__(self, name, count):
        super().__init__(f"{count} x {name}")
        self.name = name


class WithLock(Exception):
    def __init__(self, text):
        super().__init__(text, threading.Lock())
        self.lock = threading.Lock()
        self.kept = [1, 2]

    def __str__(self):
        return self.args[0]


class OwnReduce(Exception):
    def __reduce__(self):
        return OwnReduce, ("from reduce",)

    def __str__(self):
        return "mine"


class NewNeedsMore(Exception):
    def __new__(cls, code, extra):
        return super().__new__(cls, code)

    def __init__(self, code, extra):
        super().__init__(code)


class Path(OSError):
    def __init__(self, *, path):
        super().__init__(2, "nothing there", path)


class Unprintable(Exception):
    def __str__(self):
        raise KeyError("no text")

    __repr__ = __str__


class Group(ExceptionGroup):
    pass


USUAL = [
    ValueError("x"),
    ValueError(),
    KeyError("k"),
    ValueError(1, None, [2]),
    StopIteration(3),
    SystemExit(3),
    KeyboardInterrupt(),
    OSError(2, "no", "/x"),
    FileNotFoundError(2, "no", "/x", None, "/y"),
    ConnectionResetError(104, "reset"),
    UnicodeDecodeError("utf8", b"x", 0, 1, "bad"),
    ImportError("no", name="a", path="b"),
    SyntaxError("bad", ("f.py", 1, 2, "x = ", 1, 3)),
    asyncio.CancelledError("late"),
    asyncio.IncompleteReadError(b"a", 3),
    ExceptionGroup("g", [ValueError(1), ExceptionGroup("h", [KeyError(2)])]),
    RemoteException("a.B", "text", "B('text')"),
    pickle.PicklingError("p"),
]
UNUSUAL = [
    KeywordOnly(code=503),
    Reworded(5),
    TwoArguments("a", 2),
    OwnReduce(1),
    NewNeedsMore(1, 2),
    Path(path="/q"),
    Unprintable("u"),
    WithLock("w"),
]


@pytest.mark.parametrize("exc", USUAL + UNUSUAL, ids=lambda exc: type(exc).__name__)
def test_an_exception_comes_back_in_its_own_class_and_says_the_same(exc):
    back = sent(exc)
    assert type(back) is type(exc)
    if not isinstance(exc, Unprintable):
        assert str(back) == str(exc)
    assert back.__traceback__ is None and back.__cause__ is None and back.__context__ is None


@pytest.mark.parametrize("exc", USUAL, ids=lambda exc: type(exc).__name__)
def test_usual_exceptions_keep_their_arguments_and_fields(exc):
    back = sent(exc)
    if not isinstance(exc, ExceptionGroup):
        assert back.args == exc.args
    for name in ("errno", "filename", "filename2", "name", "path", "lineno", "text", "code", "value", "partial", "start"):
        assert getattr(back, name, None) == getattr(exc, name, None)


def test_an_exception_with_keyword_arguments_keeps_its_attributes():
    assert sent(KeywordOnly(code=503)).code == 503
    assert sent(TwoArguments("a", 2)).name == "a"


def test_an_operating_system_error_with_its_own_constructor_keeps_its_fields():
    back = sent(Path(path="/q"))
    assert (back.errno, back.strerror, back.filename) == (2, "nothing there", "/q")


def test_what_cannot_travel_of_an_exception_stays_behind_alone():
    back = sent(WithLock("w"))
    assert back.kept == [1, 2]
    assert not hasattr(back, "lock")
    assert back.args[0] == "w" and "lock" in back.args[1]


def test_notes_travel():
    exc = KeywordOnly(code=1)
    exc.add_note("seen at rank 3")
    assert sent(exc).__notes__ == ["seen at rank 3"]


def test_an_exception_whose_class_cannot_travel_arrives_as_a_stand_in():
    class Stays(Exception):
        lock = threading.Lock()

    back = sent(Stays("why"))
    assert type(back) is RemoteException
    assert "Stays: why" in str(back)
    assert (back.text, back.representation) == ("why", "Stays('why')")
    assert back.type_name.endswith("Stays")
    again = sent(back)
    assert type(again) is RemoteException and again.args == back.args


def test_an_exception_whose_module_the_receiver_lacks_arrives_as_a_stand_in():
    module = types.ModuleType("only_on_the_worker")
    exec("class Gone(Exception): pass", module.__dict__)
    sys.modules[module.__name__] = module
    try:
        payload, _ = dumps_exception(ValueError("outer").with_traceback(None))
        cause = ValueError("outer")
        cause.__cause__ = module.Gone("why")
        payload, _ = dumps_exception(cause)
    finally:
        del sys.modules[module.__name__]
    back = loads(payload)
    assert type(back) is ValueError
    assert str(back.__cause__) == "only_on_the_worker.Gone: why"


def test_a_class_of_a_function_travels_by_value():
    class Local(Exception):
        def __init__(self, *, code):
            super().__init__(f"local {code}")

    back = sent(Local(code=1))
    assert type(back).__name__ == "Local" and str(back) == "local 1"


@pytest.mark.parametrize("suppress", [False, True])
def test_causes_and_contexts_travel(suppress):
    try:
        try:
            try:
                raise KeyError("first")
            except KeyError:
                raise KeywordOnly(code=2)  # noqa: B904
        except KeywordOnly as second:
            raise ValueError("third") from (None if suppress else second)
    except ValueError as exc:
        back = sent(exc)
    assert back.__suppress_context__ is True
    assert (back.__cause__ is None) is suppress
    assert back.__context__.code == 2
    assert repr(back.__context__.__context__) == "KeyError('first')"
    assert back.__cause__ in (None, back.__context__)


def test_a_cycle_of_contexts_ends():
    one, two = ValueError(1), ValueError(2)
    one.__context__, two.__context__ = two, one
    back = sent(one)
    assert back.__context__.__context__ is back


def test_a_long_chain_is_cut():
    exc = ValueError(0)
    for index in range(1, 500):
        outer = ValueError(index)
        outer.__cause__ = exc
        exc = outer
    back, length = sent(exc), 1
    assert str(back) == "499"
    while back.__cause__ is not None:
        back, length = back.__cause__, length + 1
    assert 10 < length < 100


def test_members_of_a_group_go_each_on_its_own():
    class Stays(Exception):
        lock = threading.Lock()

    back = sent(Group("several", [KeywordOnly(code=3), Stays("s"), ValueError(1)]))
    assert type(back) is Group
    assert [type(member) for member in back.exceptions] == [KeywordOnly, RemoteException, ValueError]
    assert back.exceptions[0].code == 3 and "Stays: s" in str(back.exceptions[1])


def test_an_exception_that_raises_in_everything_still_arrives():
    class Hostile(Exception):
        lock = threading.Lock()

        def __reduce__(self):
            raise RuntimeError

        def __str__(self):
            raise RuntimeError

        __repr__ = __str__

    back = sent(Hostile())
    assert type(back) is RemoteException and "Hostile" in str(back) and "RuntimeError" in str(back)


def test_sending_leaves_the_exception_as_it_was():
    exc = WithLock("w")
    before = dict(vars(exc)), exc.args
    sent(exc)
    assert (vars(exc), exc.args) == before
