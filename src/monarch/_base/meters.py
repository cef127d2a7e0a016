"""Meters: counters and histograms, handed to OpenTelemetry when it is installed, silent otherwise.

Rules of this file:
    1. OpenTelemetry is imported when the first meter or instrument is asked for, never by importing monarch.
    2. From then on our classes count as subclasses of its API classes, so code typed with `opentelemetry.metrics` takes them.
    3. Attributes leave as text and counts as int, whatever the caller gave: one form for every reader.

Read next: `spans.py`, which times.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, SupportsFloat, SupportsInt

Attributes = Mapping[Any, Any] | None


class _Unheard:
    """The instrument that nobody reads."""

    __slots__ = ()

    def add(self, amount: int, attributes: dict[str, str] | None = None) -> None:
        return None

    def record(self, amount: float, attributes: dict[str, str] | None = None) -> None:
        return None


@functools.cache
def _api() -> Any:
    """The module `opentelemetry.metrics`, with our classes registered there; None when it is not installed."""
    try:
        api = importlib.import_module("opentelemetry.metrics")
    except ImportError:
        return None
    for ours in (Counter, UpDownCounter, Histogram, Meter, MeterProvider):
        getattr(api, ours.__name__).register(ours)
    return api


def _inner(kind: str, scope: str, name: str, unit: str, description: str, **advice: Any) -> Any:
    """OpenTelemetry's instrument, or the silent one."""
    api = _api()
    # A program may install our provider as the global one; its instruments would then lead back to themselves.
    if api is None or isinstance(api.get_meter_provider(), MeterProvider):
        return _Unheard()
    return getattr(api.get_meter(scope), kind)(name, unit=unit, description=description, **advice)


def _as_text(attributes: Attributes) -> dict[str, str] | None:
    return None if attributes is None else {str(key): str(value) for key, value in attributes.items()}


class _Instrument:
    """One named instrument; `inner` receives what is left after conversion and may be replaced."""

    __slots__ = ("__weakref__", "description", "inner", "name", "unit")
    _kind = ""

    def __init__(self, name: str, unit: str = "", description: str = "", *, scope: str = "monarch", **advice: Any) -> None:
        self.name = name
        self.unit = unit
        self.description = description
        self.inner: Any = _inner(self._kind, scope, name, unit, description, **advice)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


class Counter(_Instrument):
    """A sum that only grows."""

    __slots__ = ()
    _kind = "create_counter"

    def add(self, amount: SupportsInt, attributes: Attributes = None, context: object = None) -> None:
        """Add `amount`, as an int. Keys and values of `attributes` become text. `context` is accepted and not used."""
        self.inner.add(int(amount), attributes=_as_text(attributes))


class UpDownCounter(_Instrument):
    """A sum that grows and shrinks."""

    __slots__ = ()
    _kind = "create_up_down_counter"

    def add(self, amount: SupportsInt, attributes: Attributes = None, context: object = None) -> None:
        """Add `amount`, as an int; it may be negative. Otherwise as `Counter.add`."""
        self.inner.add(int(amount), attributes=_as_text(attributes))


class Histogram(_Instrument):
    """A distribution of measured values."""

    __slots__ = ()
    _kind = "create_histogram"

    def record(self, amount: SupportsFloat, attributes: Attributes = None, context: object = None) -> None:
        """Record `amount`, as a float. Otherwise as `Counter.add`."""
        self.inner.record(float(amount), attributes=_as_text(attributes))


class Meter:
    """Makes instruments of one scope. Of OpenTelemetry's kinds it has counters, up-down counters and histograms."""

    def __init__(self, name: str = "monarch", version: str | None = None, schema_url: str | None = None) -> None:
        self.name = name
        self.version = version
        self.schema_url = schema_url

    def create_counter(self, name: str, unit: str = "", description: str = "") -> Counter:
        """A sum that only grows."""
        return Counter(name, unit, description, scope=self.name)

    def create_up_down_counter(self, name: str, unit: str = "", description: str = "") -> UpDownCounter:
        """A sum that grows and shrinks."""
        return UpDownCounter(name, unit, description, scope=self.name)

    def create_histogram(
        self, name: str, unit: str = "", description: str = "", *, explicit_bucket_boundaries_advisory: Sequence[float] | None = None
    ) -> Histogram:
        """A distribution of measured values."""
        buckets = explicit_bucket_boundaries_advisory
        advice = {} if buckets is None else {"explicit_bucket_boundaries_advisory": buckets}
        return Histogram(name, unit, description, scope=self.name, **advice)

    def create_gauge(self, name: str, unit: str = "", description: str = "") -> NoReturn:
        """Not offered: warns, then raises NotImplementedError."""
        warnings.warn("monarch meters have no gauges; use create_up_down_counter() or create_histogram()", stacklevel=2)
        _not_offered("gauge", name)

    def create_observable_counter(
        self, name: str, callbacks: Sequence[Callable[..., Any]] | None = None, unit: str = "", description: str = ""
    ) -> NoReturn:
        """Not offered: raises NotImplementedError."""
        _not_offered("observable counter", name)

    def create_observable_up_down_counter(
        self, name: str, callbacks: Sequence[Callable[..., Any]] | None = None, unit: str = "", description: str = ""
    ) -> NoReturn:
        """Not offered: raises NotImplementedError."""
        _not_offered("observable up-down counter", name)

    def create_observable_gauge(
        self, name: str, callbacks: Sequence[Callable[..., Any]] | None = None, unit: str = "", description: str = ""
    ) -> NoReturn:
        """Not offered: raises NotImplementedError."""
        _not_offered("observable gauge", name)


def _not_offered(kind: str, name: str) -> NoReturn:
    raise NotImplementedError(f"no {kind} {name!r}: monarch meters have counters, up-down counters and histograms; use one of these")


class MeterProvider:
    """Makes meters; can be installed with `opentelemetry.metrics.set_meter_provider`, which then counts silently."""

    def get_meter(
        self, name: str = "monarch", version: str | None = None, schema_url: str | None = None, attributes: Attributes = None
    ) -> Meter:
        """A meter of scope `name`."""
        return Meter(name, version, schema_url)


METER = Meter()
"""The meter of scope `monarch`."""


def get_meter() -> Meter:
    """The meter of scope `monarch`."""
    _api()
    return METER
