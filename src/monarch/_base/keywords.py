"""Keywords: functions whose callers are told the right form when they pass arguments in a wrong one.

Both decorators leave the signature as it is, for people and for type checkers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from monarch._base.errors import did_you_mean, explain

P = ParamSpec("P")
R = TypeVar("R")


def keywords_only(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Tell whoever passes an argument by position that it belongs at the keyword `name`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if args:
                text = f"{function.__name__}() takes its arguments by keyword"
                raise TypeError(explain(text, next=f"write {function.__name__}({name}={args[0]!r})"))
            return function(*args, **kwargs)

        return checked

    return decorate


def known_keywords(guess: Callable[[dict[str, Any]], str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Tell whoever passes an unknown keyword which one was meant.

    Args:
        guess: what the unknown ones, with their values, should have been, as "name=value"; "": look for the nearest name.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        names = [name for name in inspect.signature(function).parameters if name != "self"]

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            unknown = {name: value for name, value in kwargs.items() if name not in names}
            if unknown:
                meant = guess(unknown)
                nearest = f"; did you mean {meant}?" if meant else did_you_mean(next(iter(unknown)), names)
                text = f"{function.__name__}() has no argument {', '.join(map(repr, unknown))}{nearest}"
                raise TypeError(explain(text, next=f"its arguments are: {', '.join(names)}"))
            return function(*args, **kwargs)

        return checked

    return decorate
