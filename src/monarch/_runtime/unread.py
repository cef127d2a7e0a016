"""Unread values: what a Future says to code that takes it for the value that it will have.

Whoever forgets `.get()` or `await` finds out when the Future is used, and is told then. Type checkers see none of this, so
they go on refusing such code.

Rules of this file:
    1. A Future stays no Iterable and is always true: iteration, unpacking and `in` come to `__getitem__`.
    2. Names in double underscores are asked for by protocols (copy, pickle, numpy); they are missing without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from monarch._base.errors import explain

_NEXT = "take its value first: future.get(), or await future"


class Unread:
    """Base of `Future`: refuses what only its value can do. Raises AttributeError for a name, TypeError for all else."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("__"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            raise AttributeError(explain(f"a Future has no attribute {name!r}; its value may have", next=_NEXT), name=name, obj=self)

        def __getitem__(self, _: Any) -> NoReturn:
            raise TypeError(explain("a Future can't be indexed, unpacked or iterated over", next=_NEXT))

        def __len__(self) -> NoReturn:
            raise TypeError(explain("a Future has no len()", next=_NEXT))

        def __bool__(self) -> bool:
            return True  # as of any object without a length

        def _refuse(operator: str) -> Callable[..., NoReturn]:
            def refuse(self: Any, *_: Any) -> NoReturn:
                raise TypeError(explain(f"a Future is no operand of {operator}", next=_NEXT))

            return refuse

        __add__ = __radd__ = _refuse("+")
        __sub__ = __rsub__ = __neg__ = _refuse("-")
        __mul__ = __rmul__ = _refuse("*")
        __truediv__ = __rtruediv__ = _refuse("/")
        __floordiv__ = __rfloordiv__ = _refuse("//")
        __mod__ = __rmod__ = _refuse("%")
        __pow__ = __rpow__ = _refuse("**")
        __matmul__ = __rmatmul__ = _refuse("@")
        __lt__ = __gt__ = _refuse("< and >")
        __le__ = __ge__ = _refuse("<= and >=")
        __int__ = _refuse("int()")
        __float__ = _refuse("float()")
        del _refuse
