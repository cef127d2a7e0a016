"""Commands at the debugger's prompt, and the text that they are read from.

    attach <actor> <rank>                   a
    cast <actor> ranks(<ranks>) <command>
    list  continue  help  quit              l  c  h  q

<ranks> is a rank, a list of ranks `1,4`, a range `start:stop:step` with any part left out, or such for named dimensions:
`hosts=0:2, gpus=(1,3), z=5`.

Rules of this file:
    1. Reading a command is pure: text goes in, a command or a `CommandError` comes out.
    2. A command is data that compares by value; `debug_service.py` carries it out.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from monarch._base.errors import did_you_mean

if TYPE_CHECKING:
    from monarch.actor.debug_io import DebugIO

T = TypeVar("T")

Ranks: TypeAlias = "int | list[int] | range"
"""A rank, some ranks, or a range of ranks; of a mesh or of one dimension."""
RanksType: TypeAlias = "Ranks | dict[str, Ranks]"
"""Ranks of a mesh, or coordinates by dimension."""

ACTOR = r"[-_a-zA-Z0-9]+(?:<[a-zA-Z0-9]+>)?"
"""A name as `list` shows it, or the unique one of `actor_id.actor_name`."""
_ATTACH = re.compile(rf"(?P<actor>{ACTOR})\s+(?P<rank>\d+)")
_CAST = re.compile(rf"(?P<actor>{ACTOR})\s+ranks\(\s*(?P<rest>.*)", re.DOTALL)
_TOKEN = re.compile(r"\s*(?:(?P<number>\d+)|(?P<name>[_a-zA-Z]\w*)|(?P<mark>[:,()=]))")

HELP = """\
attach <actor> <rank>                    debug one rank; its prompt takes the commands of pdb
cast <actor> ranks(<ranks>) <command>    send a command of pdb to several ranks, without waiting for what it prints
list                                     what waits at a breakpoint
continue                                 let everything go on, and forget the breakpoints set by hand
help                                     this text
quit                                     leave; what waits goes on waiting

<ranks>: 1 or 1,4 or 0:8:2 or : or by dimension: hosts=0:2, gpus=(1,3)
attach, list, continue, help and quit may be written a, l, c, h and q.
While attached: 'detach' comes back here and leaves the rank waiting, 'quit' raises bdb.BdbQuit in the endpoint.
"""


class CommandError(ValueError):
    """A line that is no command; the text says why."""


@dataclass(frozen=True)
class Attach:
    """Debug one session."""

    actor_name: str
    rank: int


@dataclass(frozen=True)
class Cast:
    """Send a command of pdb to several sessions of an actor mesh."""

    actor_name: str
    ranks: RanksType
    command: str


@dataclass(frozen=True)
class ListCommand:
    """Show the sessions."""


@dataclass(frozen=True)
class Continue:
    """Let all sessions go on."""


@dataclass(frozen=True)
class Help:
    """Show the commands."""


@dataclass(frozen=True)
class Quit:
    """Leave the terminal."""


Command: TypeAlias = "Attach | Cast | ListCommand | Continue | Help | Quit"


class DebugCommand:
    """Reads commands."""

    @staticmethod
    async def parse(debug_io: DebugIO, line: str) -> Command | None:
        """The command of a line; None, after saying why to `debug_io`, when it is none."""
        try:
            return read_command(line)
        except CommandError as exc:
            await debug_io.output(f"Error parsing input: {exc}\n")
            return None


def read_command(line: str) -> Command:
    """The command of a line.

    Raises:
        CommandError: it is none.
    """
    word, rest = (*line.split(None, 1), "", "")[:2]
    rest = rest.strip()
    if word in ("attach", "a"):
        return _read_attach(rest)
    if word == "cast":
        return _read_cast(rest)
    simple = _SIMPLE.get(word)
    if simple is None:
        raise CommandError(f"unknown command {word!r}{did_you_mean(word, _WORDS)}; 'help' lists them" if word else "no command")
    if rest:
        raise CommandError(f"{word!r} takes no arguments, got {rest!r}")
    return simple()


_SIMPLE: dict[str, Callable[[], Command]] = {
    "list": ListCommand,
    "l": ListCommand,
    "continue": Continue,
    "c": Continue,
    "help": Help,
    "h": Help,
    "quit": Quit,
    "q": Quit,
}
_WORDS = ("attach", "cast", "list", "continue", "help", "quit")


def _read_attach(rest: str) -> Attach:
    match = _ATTACH.fullmatch(rest)
    if match is None:
        raise CommandError(f"expected 'attach <actor> <rank>', got {rest!r} behind 'attach'")
    return Attach(match["actor"], int(match["rank"]))


def _read_cast(rest: str) -> Cast:
    match = _CAST.fullmatch(rest)
    if match is None:
        raise CommandError(f"expected 'cast <actor> ranks(<ranks>) <command>', got {rest!r} behind 'cast'")
    reader = _Ranks(match["rest"])
    ranks = reader.selection()
    reader.take(")")
    command = reader.rest()
    if not command or command.startswith(")"):
        raise CommandError(f"expected a command of pdb behind the ranks, got {command!r}")
    return Cast(match["actor"], ranks, command)


class _Ranks:
    """Reads what stands between the brackets of `ranks(...)`: one method for each form, each with one token of look-ahead."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def selection(self) -> RanksType:
        """Ranks of the mesh, or a dict of dimensions."""
        if self._peek("name"):
            return dict(self._separated(self._dimension))
        first = self._ranks()
        if isinstance(first, range) or not self._peek("mark", ","):
            return first
        self.take(",")
        return [first, *self._separated(self._number)]

    def _dimension(self) -> tuple[str, Ranks]:
        name = self._take_kind("name", "a dimension")
        self.take("=")
        if not self._peek("mark", "("):
            return name, self._ranks()
        self.take("(")
        ranks = list(self._separated(self._number))
        self.take(")")
        if len(ranks) < 2:
            raise CommandError(f"expected at least two entries in brackets, got {ranks}; write {name}={ranks[0]}")
        return name, ranks

    def _ranks(self) -> int | range:
        parts: list[int | None] = [self._number() if self._peek("number") else None]
        while len(parts) < 3 and self._peek("mark", ":"):
            self.take(":")
            parts.append(self._number() if self._peek("number") else None)
        if len(parts) == 1:
            return self._number() if parts[0] is None else parts[0]
        start, stop, step = (*parts, None)[:3]
        if step == 0:
            raise CommandError("the step of a range is at least 1")
        return range(start or 0, sys.maxsize if stop is None else stop, 1 if step is None else step)

    def _separated(self, read: Callable[[], T]) -> list[T]:
        found = [read()]
        while self._peek("mark", ","):
            self.take(",")
            found.append(read())
        return found

    def _number(self) -> int:
        return int(self._take_kind("number", "a number"))

    def take(self, mark: str) -> None:
        """Go past `mark`."""
        if self._take_kind("mark", repr(mark)) != mark:
            raise self._wrong(repr(mark))

    def rest(self) -> str:
        """What stands behind everything read so far."""
        return self._text[self._at :].strip()

    def _peek(self, kind: str, text: str | None = None) -> bool:
        match = _TOKEN.match(self._text, self._at)
        return match is not None and match[kind] is not None and text in (None, match[kind])

    def _take_kind(self, kind: str, what: str) -> str:
        match = _TOKEN.match(self._text, self._at)
        if match is None or match[kind] is None:
            raise self._wrong(what)
        self._at = match.end()
        return match[kind]

    def _wrong(self, what: str) -> CommandError:
        return CommandError(f"expected {what} at {self._text[self._at :]!r} in 'ranks({self._text}'")
