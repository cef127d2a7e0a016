"""Kinds of configuration values: how each is checked, normalised and read from text; and `Knob`, a row of the table.

Rules of this file:
    1. A value that `accept` returned is immutable and compares by value.
    2. A wrong type is a TypeError, a right type out of range a ValueError; both say what is right.
    3. Durations are text in one normal form ("1m 30s"), so that what is read back can be written down again.

Read next: `monarch/config.py` for the table and the layers of values.
"""

# Annotations are evaluated here: as text they would make the two named tuples cost 2 ms of every import of monarch.

import math
import operator
import re
import struct
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple, NoReturn

from monarch._base.errors import did_you_mean, explain


class Encoding(Enum):
    """How a message's body is written. Stored and reported; monarch always uses its own frames."""

    Bincode = "bincode"
    Json = "json"
    Multipart = "multipart"

    def __repr__(self) -> str:
        return f"Encoding.{self.name}"


class ChannelTransport(Enum):
    """The kind of link between procs. `Unix` is the default; the `Tcp` members reach other machines."""

    TcpWithLocalhost = "tcp-localhost"
    TcpWithHostname = "tcp"
    MetaTlsWithHostname = "metatls-hostname"
    MetaTlsWithIpV6 = "metatls"
    Tls = "tls"
    Quic = "quic"
    MetaQuicWithHostname = "metaquic-hostname"
    MetaQuicWithIpV6 = "metaquic"
    Local = "local"
    Unix = "unix"

    def __repr__(self) -> str:
        return f"ChannelTransport.{self.name}"


_TRANSPORTS = {transport.value: transport for transport in ChannelTransport}
_TRANSPORTS |= {"ipc": ChannelTransport.Unix, "inproc": ChannelTransport.Local}
_URL = re.compile(r"(tcp|tls|metatls|quic|metaquic)://\S*[^\s/:]:(fd)?\d+|ipc://\S+|inproc://\d+")


class BindSpec:
    """Where a proc listens: any address of a transport, or one address given as a URL. Compares by value.

    Raises:
        ValueError: text that is neither a transport's name nor an address.
        TypeError: neither text, a `ChannelTransport` nor a `BindSpec`.
    """

    __slots__ = ("_spec",)
    _spec: ChannelTransport | str

    def __init__(self, spec: "ChannelTransport | str | BindSpec") -> None:
        if isinstance(spec, BindSpec):
            spec = spec._spec
        elif isinstance(spec, str):
            spec = _TRANSPORTS.get(spec, spec)
        elif not isinstance(spec, ChannelTransport):
            raise TypeError(f"expected a ChannelTransport, str or BindSpec, got {type(spec).__name__}")
        if isinstance(spec, str) and not _URL.fullmatch(spec):
            raise ValueError(
                f"unknown transport {spec!r}{did_you_mean(spec, _TRANSPORTS)}; expected one of {', '.join(sorted(_TRANSPORTS))}, "
                "or an address such as 'tcp://host:26600' or 'ipc:///run/monarch.sock'"
            )
        self._spec = spec

    @property
    def transport(self) -> ChannelTransport:
        """The transport named, or the one that serves the address."""
        if isinstance(self._spec, ChannelTransport):
            return self._spec
        return _TRANSPORTS[self._spec.partition("://")[0]]

    @property
    def address(self) -> str | None:
        """The URL to bind; None when any address of `transport` will do."""
        return self._spec if isinstance(self._spec, str) else None

    def __str__(self) -> str:
        return self._spec if isinstance(self._spec, str) else self._spec.value

    def __repr__(self) -> str:
        return f"PyBindSpec(Addr({self._spec}))" if isinstance(self._spec, str) else f"PyBindSpec(Any({self._spec.name}))"

    def __eq__(self, other: object) -> bool:
        return self._spec == other._spec if isinstance(other, BindSpec) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._spec)

    def __reduce__(self) -> tuple[Any, ...]:
        return BindSpec, (self._spec,)


_NANOS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9, "day": 86400 * 10**9}
_NANOS |= {"week": 7 * _NANOS["day"], "month": 2_630_016 * 10**9, "year": 31_557_600 * 10**9}
_UNIT_NAMES = {
    **dict.fromkeys(("ns", "nsec", "nanos"), "ns"),
    **dict.fromkeys(("us", "µs", "usec"), "us"),
    **dict.fromkeys(("ms", "msec", "millis"), "ms"),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), "s"),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), "m"),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), "h"),
    **dict.fromkeys(("d", "day", "days"), "day"),
    **dict.fromkeys(("w", "wk", "wks", "week", "weeks"), "week"),
    **dict.fromkeys(("M", "month", "months"), "month"),
    **dict.fromkeys(("y", "yr", "yrs", "year", "years"), "year"),
}
_DURATION = re.compile(r"(?:\s*[0-9]+\s*[a-zA-Zµ]+)+\s*")
_DURATION_PART = re.compile(r"([0-9]+)\s*([a-zA-Zµ]+)")
_INVALID_DURATION = "Invalid duration format; expected text such as '30s', '500ms' or '1m 30s'"


def nanos(text: str) -> int:
    """A humantime duration in nanoseconds; TypeError for other text."""
    if text.strip() == "0":
        return 0
    parts = _DURATION_PART.findall(text)
    if not _DURATION.fullmatch(text) or any(unit not in _UNIT_NAMES for _, unit in parts):
        raise TypeError(_INVALID_DURATION)
    total = sum(int(number) * _NANOS[_UNIT_NAMES[unit]] for number, unit in parts)
    if total >= 2**64 * 10**9:
        raise TypeError(f"{_INVALID_DURATION}; this one is too long")
    return total


def _duration_text(total: int) -> str:
    """The one normal form of a duration: largest units first, zero parts left out ("1m 30s", "2days 4h")."""
    parts = []
    for unit in ("year", "month", "day", "h", "m", "s", "ms", "us", "ns"):
        number, total = divmod(total, _NANOS[unit])
        if number:
            plural = "s" if len(unit) > 2 and number > 1 else ""
            parts.append(f"{number}{unit}{plural}")
    return " ".join(parts) or "0s"


class Kind(NamedTuple):
    """The type of a knob: how a value is checked, read from text, and written as plain data."""

    name: str
    accept: Callable[[Any], Any]
    """The normalised value; TypeError for a wrong type, ValueError for one out of range. Called by `configure`."""
    parse: Callable[[str], Any]
    """Text of an environment variable -> what `accept` takes; ValueError otherwise."""
    plain: Callable[[Any], Any] = lambda value: value
    """The value as str, int, float or bool, such that `accept` or `parse` takes it. Called by `snapshot`."""


def _wrong_type(expected: str, value: object) -> NoReturn:
    raise TypeError(f"expected {expected}, got {type(value).__name__}")


def _accept_duration(value: Any) -> str:
    return _duration_text(nanos(value)) if isinstance(value, str) else _wrong_type("a duration as text such as '30s'", value)


def _accept_integer(value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        _wrong_type("an int", value)
    number = operator.index(value)
    if not 0 <= number < 2**64:
        raise ValueError("expected an int from 0 to 2**64 - 1")
    return number


def _accept_nonzero(value: Any) -> int:
    return _accept_integer(value) or refuse("expected an int of 1 or more")


def refuse(why: str) -> NoReturn:
    raise ValueError(why)


def _accept_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        _wrong_type("a float", value)
    if not math.isfinite(value) or abs(value) > 3.4e38:
        refuse("expected a finite float of 32 bits")
    number: float = struct.unpack("f", struct.pack("f", value))[0]
    return number


def _accept_boolean(value: Any) -> bool:
    return value if isinstance(value, bool) else _wrong_type("a bool", value)


def _accept_text(value: Any) -> str:
    return value if isinstance(value, str) else _wrong_type("a str", value)


def _accept_encoding(value: Any) -> Encoding:
    return value if isinstance(value, Encoding) else _wrong_type("an Encoding", value)


def _accept_ports(value: Any) -> slice:
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+)\.\.(\d+)", value)
        value = slice(int(match[1]), int(match[2])) if match else value
    if not isinstance(value, slice) or value.step not in (None, 1):
        _wrong_type("a port range such as slice(26600, 26700) or '26600..26700'", value)
    start, stop = _accept_integer(value.start), _accept_integer(value.stop)
    return slice(start, stop) if start < stop <= 65536 else refuse("expected ports start < stop <= 65536")


def _parse_number(kind: type[int] | type[float]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            return refuse(f"expected {'an int' if kind is int else 'a float'}")

    return parse


def _parse_boolean(text: str) -> bool:
    flag = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    found = flag.get(text.lower())
    return refuse("expected true or false") if found is None else found


def _parse_encoding(text: str) -> Encoding:
    return Encoding(text.lower())


DURATION = Kind("duration", _accept_duration, str)
INTEGER = Kind("integer", _accept_integer, _parse_number(int))
NONZERO = Kind("nonzero integer", _accept_nonzero, _parse_number(int))
FLOAT = Kind("float", _accept_float, _parse_number(float))
BOOLEAN = Kind("boolean", _accept_boolean, _parse_boolean)
TEXT = Kind("text", _accept_text, str)
ENCODING = Kind("encoding", _accept_encoding, _parse_encoding, lambda value: value.value)
TRANSPORT = Kind("transport", BindSpec, str, str)
PORTS = Kind("port range", _accept_ports, str, lambda value: f"{value.start}..{value.stop}")


class Knob(NamedTuple):
    """One row of the table."""

    name: str
    kind: Kind
    unit: str
    """What a number counts: "s", "bytes"; also the unit of a bare number in the variable of a duration."""
    default: Any
    env: tuple[str, ...]
    """Environment variables, first found wins. More than one where documents of the peer disagree on the prefix."""
    meaning: str
    optional: bool
    """Whether None is a value: no limit, or not set."""
    choices: tuple[str, ...]
    """The texts allowed; empty when any is."""
    local: bool
    """Whether the value stays in this process, because it names its own files."""

    def accept(self, value: Any) -> Any:
        """`value` normalised; TypeError or ValueError name the knob, the value and what is right."""
        if value is None and self.optional:
            return None
        try:
            value = self.kind.accept(value)
            if self.choices and value not in self.choices:
                refuse(f"expected one of {', '.join(map(repr, self.choices))}{did_you_mean(value, self.choices)}")
        except (TypeError, ValueError) as exc:
            error = TypeError if isinstance(exc, TypeError) else ValueError
            or_none = "; None is allowed too" if self.optional else ""
            sample = "" if self.default is None else f"write for example {self.name}={self.default!r}"
            raise error(explain(f"invalid value {value!r} for configuration key `{self.name}`: {exc}{or_none}", next=sample)) from None
        return value

    def parse(self, text: str) -> Any:
        """The value that `text` of an environment variable stands for."""
        if self.optional and text.lower() in ("", "none"):
            return None
        if self.kind is DURATION and text.strip().isdigit():
            text = f"{text} {self.unit}"
        return self.accept(self.kind.parse(text))


HYPERACTOR, MESH, MONARCH = "HYPERACTOR_", "HYPERACTOR_MESH_", "MONARCH_"
"""Prefixes of the environment variables: the peer's core, the peer's meshes, and ours."""


def _variables(prefix: str, name: str) -> tuple[str, ...]:
    upper = name.upper().removeprefix("HYPERACTOR_")
    if prefix == MONARCH:
        return (MONARCH + upper,)
    core, mesh = HYPERACTOR + upper, MESH + upper.removeprefix("MESH_")
    return tuple(dict.fromkeys((mesh, core) if prefix == MESH else (core, mesh)))


def knob(
    prefix: str,
    name: str,
    kind: Kind,
    default: Any,
    meaning: str,
    *,
    env: str = "",
    unit: str = "",
    optional: bool = False,
    choices: tuple[str, ...] = (),
    local: bool = False,
) -> Knob:
    """A row of the table; without `env`, the variable is `prefix` and the name in capitals, no word twice."""
    unit = unit or ("s" if kind is DURATION else "bytes" if name.endswith("_bytes") else "")
    variables = (env,) if env else _variables(prefix, name)
    return Knob(name, kind, unit, None if default is None else kind.accept(default), variables, meaning, optional, choices, local)
