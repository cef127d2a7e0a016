"""The culprit: which part of a value can't be pickled, said in terms of whoever sent it.

Only looked for once pickling has failed, so that everything here may take its time. Pure.

Read next: `pickling.py`, which fails.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from monarch._base.errors import explain

_MOST_CHILDREN = 1000
_MOST_STEPS = 12
_GLOBAL = ", global "
_OWN = "monarch."
_MAKE_ANEW = "pass what it is made from, or give its class a __reduce__"
_MAKE_THERE = (
    "make it where it is used: in __init__, or inside the endpoint or function; what a script defines travels with the globals that it uses"
)


class Culprit(NamedTuple):
    """A part that can't travel."""

    root: str
    """What was sent: "argument 0", "class Worker", "value"."""
    steps: tuple[str, ...]
    """How one gets from there to the part."""
    value: Any

    @property
    def where(self) -> str:
        """The way to it and its type."""
        kind = type(self.value)
        return f"{self.root}{''.join(self.steps)}, of type {kind.__module__}.{kind.__qualname__}"

    @property
    def next(self) -> str:
        """What people can do; "" for our own objects, whose error says it."""
        if type(self.value).__module__.startswith(_OWN):
            return ""
        return _MAKE_THERE if any(step.startswith(_GLOBAL) for step in self.steps) else _MAKE_ANEW


def blame(exc: Exception, value: Any, travels: Callable[[Any], bool], *, parts: Sequence[str] = (), result_of: str = "") -> None:
    """Extend the text of `exc` (or add a note, when the text is not ours to write) with the part of `value` that can't travel.

    Args:
        travels: whether something can be pickled.
        parts: names of the items of `value`, if it is a tuple that has any.
        result_of: the endpoint whose result `value` is.
    """
    try:
        culprit = find(value, travels, parts=parts, result_of=result_of)
    except Exception as failure:  # the user's properties and comparisons run here
        exc.add_note(f"  (looking for the part that cannot travel raised {failure!r})")
        return
    if type(exc) in (TypeError, AttributeError, pickle.PicklingError) and len(exc.args) == 1:
        exc.args = (explain(str(exc.args[0]), where=culprit.where, next=culprit.next),)
    else:
        exc.add_note(f"  where: {culprit.where}")


def find(value: Any, travels: Callable[[Any], bool], *, parts: Sequence[str] = (), result_of: str = "") -> Culprit:
    """The innermost part of `value` that can't travel; `value` itself if all its parts can."""
    for root, item in _roots(value, parts, result_of):
        if not travels(item):
            return _Search(root, travels).of(item)
    return Culprit("value", (), value)


def _roots(value: Any, parts: Sequence[str], result_of: str) -> Iterator[tuple[str, Any]]:
    if result_of:
        yield f"the result of {result_of}()", value
    elif parts:
        yield from zip(parts, value, strict=True)
    elif type(value) is tuple and len(value) == 2 and type(value[0]) is tuple and type(value[1]) is dict:
        yield from ((f"argument {index}", item) for index, item in enumerate(value[0]))
        yield from ((f"argument {name!r}", item) for name, item in value[1].items())
    else:
        yield "value", value


class _Search:
    """Goes down from one root, and never twice into the same part: functions and classes refer to each other."""

    def __init__(self, root: str, travels: Callable[[Any], bool]) -> None:
        self._root = root
        self._travels = travels
        self._seen: dict[int, Any] = {}

    def of(self, value: Any) -> Culprit:
        """The part of `value`, which can't travel."""
        return self._look(value, ()) or Culprit(self._root, (), value)

    def _look(self, value: Any, steps: tuple[str, ...]) -> Culprit | None:
        """None: what can't travel in there is being looked at already."""
        self._seen[id(value)] = value
        is_bare = True
        for step, child in _children(value) if len(steps) < _MOST_STEPS else ():
            if id(child) in self._seen:
                is_bare = False
            elif not self._travels(child):
                is_bare = False
                found = self._look(child, (*steps, step))
                if found is not None:
                    return found
        return Culprit(self._root, steps, value) if is_bare else None


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value[:_MOST_CHILDREN]):
            yield f"[{index}]", item
    elif isinstance(value, dict):
        for key, item in list(value.items())[:_MOST_CHILDREN]:
            yield f"[{key!r}]", item
    elif isinstance(value, MethodType):
        yield "", value.__self__
        yield "", value.__func__
    elif not isinstance(value, type) and isinstance(wrapped := getattr(value, "__wrapped__", None), FunctionType):
        yield "", wrapped  # of an endpoint, or what another decorator has made of a function
        yield from _parts_of_function(value) if isinstance(value, FunctionType) else ()
    elif isinstance(value, FunctionType):
        yield from _parts_of_function(value)
    else:
        for name, item in list(getattr(value, "__dict__", {}).items())[:_MOST_CHILDREN]:
            yield f".{name}", item
        for cls in value.__bases__ if isinstance(value, type) else (type(value),):
            yield f", class {cls.__qualname__}", cls


def _parts_of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            content = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        yield f".<variable {name!r}>", content
    for name in _names_in(function.__code__):
        if name in function.__globals__:
            yield f"{_GLOBAL}{name!r}", function.__globals__[name]
    positional = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    named = {**dict(zip(positional[len(positional) - len(defaults) :], defaults, strict=True)), **(function.__kwdefaults__ or {})}
    for name, default in named.items():
        yield f", default of {name!r}", default


def _names_in(code: CodeType) -> dict[str, None]:
    """Names that a function, or one inside of it, may look up among its globals."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names
