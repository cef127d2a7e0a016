"""Selections: which ranks of a mesh are meant, as an expression over its dimensions.

Pure. The text form, outermost dimension first:

    expr    = both { "|" both }                     either; binds weakest
    both    = dims { "&" dims }                     in all
    dims    = dim { "," dim }                       one per dimension, the rest is taken whole
    dim     = "*" | "?" | range | "(" expr ")"      every place, any one place, some places
    range   = number | [start] ":" [stop] [":" step]

Spaces do not count. `(*, 1:3) & (0, *)` is what both sides contain.

Read next: `mesh` for `slice`, which is what scripts use.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

from monarch._base.errors import explain

_TOKEN = re.compile(r"\s*([0-9]+|[*?:,&|()])")


class _Kind(Enum):
    TRUE = "True"
    """Everything below this dimension."""
    ALL = "All"
    """Every place of one dimension."""
    ANY = "Any"
    """One place of one dimension, whichever."""
    RANGE = "Range"
    """The places of one dimension inside bounds."""
    UNION = "Union"
    """What either side selects."""
    INTERSECTION = "Intersection"
    """What both sides select."""


class _Bounds(NamedTuple):
    start: int
    stop: int | None
    step: int

    def __repr__(self) -> str:
        stop = "None" if self.stop is None else f"Some({self.stop})"
        return f"Range({self.start}, {stop}, {self.step})"


class Selection:
    """A set of places in a mesh of any size. Made by `from_string`, `all` or `any`; equal by value."""

    __slots__ = ("_kind", "_parts")

    def __init__(self, kind: _Kind, *parts: _Bounds | Selection) -> None:
        self._kind = kind
        self._parts = parts

    @staticmethod
    def from_string(text: str) -> Selection:
        """Parse `text`; the grammar is at the head of this module.

        Raises:
            ValueError: it does not follow the grammar; the text says where.
        """
        return _Parser(text).parse()

    @staticmethod
    def all() -> Selection:
        """Every rank."""
        return Selection(_Kind.ALL, _TRUE)

    @staticmethod
    def any() -> Selection:
        """One rank, whichever."""
        return Selection(_Kind.ANY, _TRUE)

    def _then(self, rest: Selection) -> Selection:
        """This selection with `rest` applied to the dimensions that it leaves open."""
        if self._kind is _Kind.TRUE:
            return rest
        return Selection(self._kind, *(part._then(rest) if isinstance(part, Selection) else part for part in self._parts))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Selection):
            return NotImplemented
        return self._kind is other._kind and self._parts == other._parts

    def __hash__(self) -> int:
        return hash((self._kind, self._parts))

    def __repr__(self) -> str:
        return f"{self._kind.value}({', '.join(map(repr, self._parts))})" if self._parts else self._kind.value

    def __reduce__(self) -> tuple[object, ...]:
        return Selection, (self._kind, *self._parts)


_TRUE = Selection(_Kind.TRUE)


class _Parser:
    """Recursive descent, one method per line of the grammar; `_next` is the token that none of them has taken."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._end = 0
        self._next = ""
        self._advance()

    def parse(self) -> Selection:
        selection = self._expr()
        if self._next:
            raise self._error("expected '&', '|' or the end")
        return selection

    def _expr(self) -> Selection:
        left = self._both()
        while self._take("|"):
            left = Selection(_Kind.UNION, left, self._both())
        return left

    def _both(self) -> Selection:
        left = self._dims()
        while self._take("&"):
            left = Selection(_Kind.INTERSECTION, left, self._dims())
        return left

    def _dims(self) -> Selection:
        first = self._dim()
        return first._then(self._dims()) if self._take(",") else first

    def _dim(self) -> Selection:
        if self._take("*"):
            return Selection.all()
        if self._take("?"):
            return Selection.any()
        if self._take("("):
            inner = self._expr()
            if not self._take(")"):
                raise self._error("expected ')'")
            return inner
        return Selection(_Kind.RANGE, self._range(), _TRUE)

    def _range(self) -> _Bounds:
        start = self._number()
        if not self._take(":"):
            if start is None:
                raise self._error("expected '*', '?', '(', a number or a range such as 1:3")
            return _Bounds(start, start + 1, 1)
        stop = self._number()
        step = self._number() if self._take(":") else 1
        if step == 0:
            raise self._error("a step is at least 1")
        return _Bounds(start or 0, stop, 1 if step is None else step)

    def _number(self) -> int | None:
        token = self._next
        if not token.isdecimal():
            return None
        self._advance()
        return int(token)

    def _take(self, token: str) -> bool:
        """Whether the next token is `token`, which is then behind us."""
        found = self._next == token
        if found:
            self._advance()
        return found

    def _advance(self) -> None:
        match = _TOKEN.match(self._text, self._end)
        if match is not None:
            self._next, self._end = match[1], match.end()
        elif self._text[self._end :].strip():
            self._next = ""
            raise self._error("only numbers and * ? : , & | ( ) have a meaning here")
        else:
            self._next = ""

    def _error(self, expected: str) -> ValueError:
        at = self._end - len(self._next)
        return ValueError(
            explain(
                f"invalid selection {self._text!r}: {expected}",
                where=f"character {at}, before {self._text[at:].strip()!r}",
                next="write one part per dimension, such as '(*, 1:3)' or '(0, *) | (1, 2)'",
            )
        )
