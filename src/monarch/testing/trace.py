"""The trace of a universe: what arrived where and when, for comparing two runs and for finding out what happened.

Read next: `universe.py`, which fills it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from monarch._wire import messages
from monarch._wire.frames import PREFIX, Kind
from monarch.testing.node import Node

_HEADER_AT = PREFIX.size


class Trace:
    """The latest events of a universe, each a line: `0.000120 client -> trainer-0: trainer.step`."""

    def __init__(self, most: int) -> None:
        """Args:
        most: so many events are kept; the oldest go first.
        """
        self._events: deque[tuple[float, str, str, bytes | str]] = deque(maxlen=most)
        self._headers: dict[bytes, str] = {}

    def add_message(self, now_s: float, source: Node, target: Node, data: bytes) -> None:
        """A message has arrived."""
        self._events.append((now_s, source.label, target.label, data[: _HEADER_AT + PREFIX.unpack_from(data)[3]]))

    def note(self, now_s: float, text: str) -> None:
        """The test has done something."""
        self._events.append((now_s, "", "", text))

    def lines(self) -> list[str]:
        """All events in order."""
        return list(self)

    def __iter__(self) -> Iterator[str]:
        for now_s, source, target, what in self._events:
            text = what if isinstance(what, str) else f"{source} -> {target}: {self._name(what)}"
            yield f"{now_s:.6f} {text}"

    def __len__(self) -> int:
        return len(self._events)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trace) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return "\n".join(self)

    def __repr__(self) -> str:
        return f"<trace of {len(self)} events>"

    def _name(self, data: bytes) -> str:
        kind, header = data[0], data[_HEADER_AT:]
        if kind == Kind.REPLY:
            return "reply"
        name = self._headers.get(header)
        if name is None:
            name = self._headers[header] = _name_of(kind, header)
        return name


def _name_of(kind: int, header: bytes) -> str:
    if kind == Kind.CALL:
        call = messages.decode_call(header)
        return f"{call.actor.rpartition('-')[0]}.{call.method}"
    return type(messages.decode_control(header)).__name__
