"""Exceptions as bytes that always load: the object itself, else the same class rebuilt, else a stand-in that says what it was.

Pure: no I/O. Tracebacks never travel; whoever sends an exception renders its traceback as text beside it.

Rules of this file:
    1. An exception is sent as it is only when its pickle was loaded back here and says the same; many classes pickle well
       and break on load, because `BaseException.__reduce__` calls the class with `args`, whatever its constructor takes.
    2. `dumps_exception` does not raise and `loads` of its result raises nothing of the exception's own.
    3. Causes, contexts and members of groups go the same way, each on its own.

Read next: `pickling.py`.
"""

from __future__ import annotations

import pickle
from typing import Any

from monarch._wire.pickling import dumps_in_band, loads

_MOST_LINKED = 32
"""Exceptions of one chain that are sent; the chain is cut behind them."""


class RemoteException(Exception):
    """Stands in for an exception that could not travel, or whose class this process does not have."""

    def __init__(self, type_name: str, text: str, representation: str) -> None:
        super().__init__(type_name, text, representation)
        self.type_name = type_name
        """Qualified name of the class that was raised."""
        self.text = text
        """Its `str()`."""
        self.representation = representation
        """Its `repr()`."""

    def __str__(self) -> str:
        said = self.text or self.representation
        return f"{self.type_name}: {said}" if said else self.type_name


def dumps_exception(exc: BaseException) -> tuple[bytes, list[memoryview]]:
    """`exc` with its causes and contexts, in the form of `pickling.dumps`: `pickling.loads` returns the exception.

    Returns:
        A payload without buffers. What arrives has, in this order of preference, the full state of `exc`; its class,
        `args` and the picklable part of its attributes; or is a `RemoteException`.

    Cost: 5 us for a built-in exception of plain arguments; else one pickling and one unpickling of `exc`.
    """
    return pickle.dumps(_Parcel(_chain(exc)), 5), []


class _Parcel:
    """Pickles as the exception that its rows describe."""

    __slots__ = ("rows",)

    def __init__(self, rows: list[tuple[Any, ...]]) -> None:
        self.rows = rows

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack, (self.rows,)


class _Bare:
    """Pickles as a call of `_rebuild`: class, arguments and attributes, past `__init__`."""

    __slots__ = ("parts",)

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, self.parts


def _chain(exc: BaseException) -> list[tuple[Any, ...]]:
    """One row an exception: (class name, str, repr, pickle or None, row of the cause, row of the context, suppress)."""
    linked = [exc]
    places = {id(exc): 0}
    links = []
    for one in linked:  # grows while it is walked; `places` stops cycles
        link: list[int | None] = []
        for other in (one.__cause__, one.__context__):
            if other is not None and id(other) not in places and len(linked) < _MOST_LINKED:
                places[id(other)] = len(linked)
                linked.append(other)
            link.append(None if other is None else places.get(id(other)))
        links.append((*link, one.__suppress_context__))
    return [(_type_name(one), _say(str, one), _say(repr, one), _blob(one), *link) for one, link in zip(linked, links, strict=True)]


def _type_name(exc: BaseException) -> str:
    kind = type(exc)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _say(how: Any, exc: BaseException) -> str:
    try:
        return str(how(exc))
    except Exception as failure:
        return f"<{how.__name__}() raised {type(failure).__name__}>"


def _blob(exc: BaseException) -> bytes | None:
    kind = type(exc)
    if kind.__module__ == "builtins" and not exc.__dict__ and all(type(arg) in (str, int, float, bool) for arg in exc.args):
        return pickle.dumps(exc, 5)
    for form in (_itself, _rebuilt):
        try:
            blob = dumps_in_band(form(exc))
            loaded = loads(blob)
        except Exception:  # noqa: S112  # whatever goes wrong with the user's class, the next form has a chance
            continue
        if isinstance(loaded, BaseException) and _type_name(loaded) == _type_name(exc) and _say(str, loaded) == _say(str, exc):
            return blob
    return None


def _itself(exc: BaseException) -> Any:
    return exc


def _rebuilt(exc: BaseException) -> Any:
    state = {name: value for name, value in exc.__dict__.items() if _travels(value)}
    fields = {}
    if isinstance(exc, OSError):  # kept outside `__dict__`, and parsed from `args` by no constructor that is skipped
        names = ("errno", "strerror", "filename", "filename2")
        fields = {name: getattr(exc, name) for name in names if getattr(exc, name, None) is not None}
    return _Bare(type(exc), tuple(_portable(arg) for arg in exc.args), state, fields)


def _portable(arg: Any) -> Any:
    """`arg` if it travels, a parcel for an exception that does not, its `repr` for all else."""
    if _travels(arg):
        return arg
    if isinstance(arg, BaseException):
        return _Parcel(_chain(arg))
    if isinstance(arg, (list, tuple)):
        return [_portable(item) for item in arg]
    return repr(arg)


def _travels(value: Any) -> bool:
    try:
        loads(dumps_in_band(value))
    except Exception:
        return False
    return True


def _rebuild(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any], fields: dict[str, Any]) -> BaseException:
    try:
        exc = kind.__new__(kind, *args)
    except Exception:
        builtin = next(base for base in kind.__mro__ if base.__module__ == "builtins")
        exc = builtin.__new__(kind, *args)
    if exc.args != args and not isinstance(exc, BaseExceptionGroup):
        exc.args = args
    for name, value in fields.items():
        setattr(exc, name, value)
    exc.__dict__.update(state)
    return exc


def _unpack(rows: list[tuple[Any, ...]]) -> BaseException:
    found = [_load_row(*row[:4]) for row in rows]
    for exc, (cause, context, suppress) in zip(found, (row[4:] for row in rows), strict=True):
        exc.__cause__ = None if cause is None else found[cause]
        exc.__context__ = None if context is None else found[context]
        exc.__suppress_context__ = suppress
    return found[0]


def _load_row(type_name: str, text: str, representation: str, blob: bytes | None) -> BaseException:
    if blob is not None:
        try:
            exc = loads(blob)
        except Exception:
            exc = None  # the class is not importable in this process
        if isinstance(exc, BaseException):
            return exc
    return RemoteException(type_name, text, representation)
