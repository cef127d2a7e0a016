from __future__ import annotations

import abc
import subprocess
import sys
import types

import pytest

from monarch._base import meters
from monarch.telemetry import METER, Counter, Histogram, Meter, MeterProvider, UpDownCounter, get_meter


class Recorder:
    """An inner instrument that keeps what arrives."""

    def __init__(self):
        self.got = []

    def add(self, amount, attributes=None):
        self.got.append((amount, attributes))

    record = add


class Api(types.ModuleType):
    """Stands for `opentelemetry.metrics`: abstract classes, and a global provider whose instruments record."""

    def __init__(self):
        super().__init__("opentelemetry.metrics")
        for kind in (Counter, UpDownCounter, Histogram, Meter, MeterProvider):
            setattr(self, kind.__name__, abc.ABCMeta(kind.__name__, (), {}))
        self.provider = object()
        self.made = []

    def get_meter_provider(self):
        return self.provider

    def get_meter(self, scope):
        def create(name, **options):
            self.made.append((scope, name, options))
            return Recorder()

        return types.SimpleNamespace(create_counter=create, create_up_down_counter=create, create_histogram=create)


@pytest.fixture(params=[False, True], ids=["without OpenTelemetry", "with OpenTelemetry"])
def api(request, monkeypatch):
    """The API in `sys.modules`, or None where importing it fails."""
    stand_in = Api() if request.param else None
    monkeypatch.setitem(sys.modules, "opentelemetry", types.ModuleType("opentelemetry") if stand_in else None)
    monkeypatch.setitem(sys.modules, "opentelemetry.metrics", stand_in)
    meters._api.cache_clear()
    yield stand_in
    meters._api.cache_clear()


@pytest.mark.parametrize("attributes", [None, {}, {"rank": 3, 4: None}], ids=repr)
@pytest.mark.parametrize("create", ["create_counter", "create_up_down_counter"])
def test_counters_pass_on_ints_and_text(api, create, attributes):
    counter = getattr(get_meter(), create)("requests", unit="1", description="how many")
    counter.add(1)
    counter.inner = Recorder()
    counter.add(2.9, attributes)
    counter.add(1, attributes=attributes)
    text = None if attributes is None else {str(key): str(value) for key, value in attributes.items()}
    assert counter.inner.got == [(2, text), (1, text)]
    assert all(type(amount) is int for amount, _ in counter.inner.got)


def test_an_up_down_counter_goes_down(api):
    counter = UpDownCounter("queued")
    counter.inner = Recorder()
    counter.add(-3)
    assert counter.inner.got == [(-3, None)]


def test_a_histogram_passes_on_floats(api):
    histogram = get_meter().create_histogram("latency", unit="s", explicit_bucket_boundaries_advisory=[1, 2])
    histogram.inner = Recorder()
    histogram.record(1, {"rank": 3})
    assert histogram.inner.got == [(1.0, {"rank": "3"})]
    assert type(histogram.inner.got[0][0]) is float


@pytest.mark.parametrize("kind", [Counter, UpDownCounter, Histogram])
def test_an_instrument_can_be_made_by_its_name_alone(api, kind):
    assert repr(kind("requests")) == f"{kind.__name__}('requests')"


@pytest.mark.parametrize("kind", ["counter", "up_down_counter", "gauge"])
def test_observable_instruments_are_not_offered(api, kind):
    with pytest.raises(NotImplementedError, match="counters, up-down counters and histograms; use one of these"):
        getattr(get_meter(), f"create_observable_{kind}")("load", callbacks=[])


def test_a_gauge_warns_and_is_not_offered(api):
    with pytest.warns(UserWarning, match="no gauges; use"), pytest.raises(NotImplementedError, match="no gauge 'load'"):
        get_meter().create_gauge("load")


def test_there_is_one_meter_and_a_provider_makes_others(api):
    assert get_meter() is METER
    assert METER.name == "monarch"
    other = MeterProvider().get_meter("library", "1.0", "https://schema", {"a": 1})
    assert (other.name, other.version, other.schema_url) == ("library", "1.0", "https://schema")


@pytest.mark.parametrize("api", [True], indirect=True)
def test_instruments_are_made_in_the_program_s_provider(api):
    get_meter().create_counter("a", "1", "what").add(2)
    MeterProvider().get_meter("library").create_histogram("b", explicit_bucket_boundaries_advisory=[1.0])
    assert api.made == [
        ("monarch", "a", {"unit": "1", "description": "what"}),
        ("library", "b", {"unit": "", "description": "", "explicit_bucket_boundaries_advisory": [1.0]}),
    ]


@pytest.mark.parametrize("api", [True], indirect=True)
def test_our_classes_count_as_the_api_s(api):
    meter = get_meter()
    assert isinstance(meter, api.Meter)
    assert isinstance(MeterProvider(), api.MeterProvider)
    assert isinstance(meter.create_counter("a"), api.Counter)
    assert isinstance(meter.create_up_down_counter("b"), api.UpDownCounter)
    assert isinstance(meter.create_histogram("c"), api.Histogram)


@pytest.mark.parametrize("api", [True], indirect=True)
def test_our_provider_installed_as_the_global_one_does_not_lead_back_to_itself(api):
    api.provider = MeterProvider()
    Counter("a").add(1)
    assert api.made == []


def test_importing_monarch_telemetry_does_not_import_opentelemetry(tmp_path):
    (tmp_path / "opentelemetry").mkdir()
    (tmp_path / "opentelemetry" / "__init__.py").write_text("")
    code = (
        "import sys, monarch.telemetry as t\n"
        "with t.span('x'): print('opentelemetry' in sys.modules)\n"
        "t.get_meter(); print('opentelemetry' in sys.modules)"
    )
    env = {"PYTHONPATH": ":".join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
