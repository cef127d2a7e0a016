"""Errors that tell a story: what happened, where, and what to do next.

Rules of this file:
    1. Every error that a user can meet is rendered by `explain`, so all of them read alike.
    2. Built-in types (`ValueError`, `TypeError`) are raised where the public contract names them;
       classes of our own exist only where a program has a reason to catch them apart.

Read next: `monarch/actor/errors.py` for the errors of remote calls.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from types import ModuleType

_NEXT = "  next:  "


def explain(what: str, *, where: str = "", next: str = "", detail: str = "") -> str:
    """Render an error text.

    Args:
        what: one sentence with the offending value.
        where: the place in the user's terms (actor, rank, host).
        next: what the user can do now.
        detail: raw lines (a log tail, a remote traceback), shown behind a bar.

    Returns:
        `what`, then one indented line for each of the others that is not empty.
    """
    lines = [what]
    if where:
        lines.append(f"  where: {where}")
    if next:
        lines.append(f"{_NEXT}{next}")
    lines.extend(f"    | {line}" for line in detail.splitlines())
    return "\n".join(lines)


def next_of(text: str) -> str:
    """What an error's text itself says that people can do; "" when it says nothing."""
    return next((line.removeprefix(_NEXT) for line in text.splitlines() if line.startswith(_NEXT)), "")


def without_next(text: str) -> str:
    """An error's text without what people can do, for where many are shown and that is said once."""
    return "\n".join(line for line in text.splitlines() if not line.startswith(_NEXT))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The known name nearest to `name` as "; did you mean 'x'?", or "" when none is near."""
    near = nearest(name, known)
    return f"; did you mean {near!r}?" if near else ""


def nearest(name: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """The known name nearest to `name`; "" when none is at least so like it (1: equal)."""
    import difflib  # 2 ms of everybody's import for a sentence that few ever read

    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=likeness)), "")


class InternalError(RuntimeError):
    """A state that the code holds to be impossible. Always a defect of monarch, never of the script."""


class MissingExtraError(ImportError):
    """An optional library is not installed. The text names the extra that brings it."""


def require(library: str, *, extra: str) -> ModuleType:
    """Import an optional library.

    Raises:
        MissingExtraError: it is not installed; the text says which extra to install.
    """
    try:
        return importlib.import_module(library)
    except ImportError as exc:
        raise MissingExtraError(
            explain(f"{library!r} is not installed", next=f"pip install '.[{extra}]' in the checkout of monarch-mesh")
        ) from exc
