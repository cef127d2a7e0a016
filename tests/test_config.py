from __future__ import annotations

import inspect
import itertools
import json
import re
import struct
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch import config
from monarch._base import knobs
from monarch.config import (
    KNOBS,
    BindSpec,
    ChannelTransport,
    Encoding,
    clear_runtime_config,
    configure,
    configured,
    get_global_config,
    get_runtime_config,
    parametrize_config,
    parametrize_config_pointwise,
    reload_config_from_env,
    reset_config_to_defaults,
)

DEFAULTS = {
    "codec_max_frame_length": 10 * 2**30,
    "message_delivery_timeout": "30s",
    "message_ttl_default": 64,
    "cleanup_timeout": "3s",
    "channel_tcp_keepalive_idle": "1m",
    "enable_dest_actor_reordering_buffer": True,
    "hyperactor_tls_cert": None,
    "default_encoding": Encoding.Multipart,
    "process_memory_metric_interval": "5m",
    "default_transport": BindSpec(ChannelTransport.Unix),
    "enable_log_forwarding": False,
    "tail_log_lines": 0,
    "supervision_watchdog_timeout": "2m",
    "mesh_orphan_timeout": "1m",
    "mesh_attach_config_timeout": "1m",
    "get_proc_state_max_idle": "1m",
    "get_actor_state_max_idle": "30s",
    "mesh_admin_addr": "[::]:1729",
    "mesh_admin_pyspy_max_profile_duration": "5m",
    "tokio_worker_threads": None,
    "rdma_qps_per_cq": 64,
    "rdma_runtime_worker_threads": 4,
    "rdma_cq_busy_poll_window": None,
    "pending_actor_delivery_timeout": "30s",
    "use_direct_spawn": False,
    "shm_threshold_bytes": 524288,
    "mailbox_window_bytes": 33554432,
    "proc_stopped_limit": "10s",
    "proc_start": "auto",
    "client_exit_timeout": "1s",
}

OTHERS = {
    "duration": "7m 3s",
    "integer": 12345,
    "nonzero integer": 7,
    "float": 0.5,
    "boolean": None,
    "text": "other",
    "encoding": Encoding.Json,
    "transport": BindSpec("tcp://node7:26600"),
    "port range": slice(8000, 9000),
}

WRONG = {
    "duration": [30, 1.5, True, "soon", "1.5s"],
    "integer": ["5", 1.5, True],
    "nonzero integer": ["5", 1.5, True],
    "float": ["0.5", True],
    "boolean": [1, "true", 0.0],
    "text": [5, b"x"],
    "encoding": ["Json", 1],
    "transport": [5, 1.5],
    "port range": [8000, "8000"],
}

HINT = "  next:  rename or unset it"


@pytest.fixture(autouse=True)
def _fresh_layers():
    reset_config_to_defaults()
    yield
    BLOCKS.clear()
    reset_config_to_defaults()
    reload_config_from_env()


def other(name: str) -> object:
    """A value of knob `name` that is not its default."""
    row = KNOBS[name]
    return next((c for c in row.choices if c != row.default), not row.default if row.kind is knobs.BOOLEAN else OTHERS[row.kind.name])


def as_env(value: object) -> str:
    return f"{value.start}..{value.stop}" if isinstance(value, slice) else value.name if isinstance(value, Encoding) else str(value)


@pytest.mark.parametrize(("name", "default"), DEFAULTS.items())
def test_a_default_is_what_the_documents_say(name, default):
    assert get_global_config()[name] == config.value(name) == default


@pytest.mark.parametrize("name", KNOBS)
def test_every_knob_round_trips_and_is_restored(name):
    before = get_global_config()
    value = other(name)
    with configured(**{name: value}) as effective:
        assert effective[name] == get_global_config()[name] == config.value(name) == value
    assert get_global_config() == before


@pytest.mark.parametrize("name", KNOBS)
def test_every_knob_refuses_a_wrong_type_and_stays_as_it_was(name):
    wrong = WRONG[KNOBS[name].kind.name] + ([] if KNOBS[name].optional else [None])
    for value in wrong:
        with pytest.raises(TypeError, match=f"invalid value .* for configuration key `{name}`: "):
            configure(**{name: value})
    assert get_runtime_config() == {}


@pytest.mark.parametrize("name", KNOBS)
def test_every_knob_reads_its_environment_variables(name, monkeypatch):
    value = other(name)
    for variable in KNOBS[name].env:
        monkeypatch.setenv(variable, as_env(value))
        reload_config_from_env()
        assert config.value(name) == value
        monkeypatch.delenv(variable)
    reload_config_from_env()
    assert config.value(name) == KNOBS[name].default


@pytest.mark.parametrize("name", KNOBS)
def test_every_knob_travels_to_a_child_as_plain_data(name):
    configure(**{name: other(name)})
    sent = json.loads(json.dumps(config.snapshot()))
    reset_config_to_defaults()
    config.adopt(sent)
    assert config.value(name) == (KNOBS[name].default if KNOBS[name].local else other(name))


def test_all_knobs_can_be_set_at_once():
    everything = {name: other(name) for name in KNOBS}
    with configured(**everything) as effective:
        assert effective == everything


def test_every_knob_says_what_it_is_and_has_its_own_variable():
    variables = [variable for row in KNOBS.values() for variable in row.env]
    assert len(set(variables)) == len(variables)
    assert all(row.meaning for row in KNOBS.values())


@pytest.mark.parametrize("give", [configure, lambda **kw: configured(**kw).__enter__()], ids=["configure", "configured"])
def test_an_unknown_key_is_refused_with_the_nearest_one(give):
    with pytest.raises(
        ValueError, match=r"invalid configuration key: `tail_log_line`; did you mean 'tail_log_lines'\?\n.*get_global_config"
    ):
        give(tail_log_line=5)


def test_a_failing_configure_changes_nothing_at_all():
    configure(tail_log_lines=3)
    with pytest.raises(TypeError, match="`cleanup_timeout`"):
        configure(tail_log_lines=9, cleanup_timeout=5)
    assert get_runtime_config() == {"tail_log_lines": 3}


@pytest.mark.parametrize("name", [name for name, row in KNOBS.items() if row.kind is knobs.NONZERO])
def test_zero_is_refused_where_nothing_would_move(name):
    with pytest.raises(ValueError, match=f"invalid value 0 for configuration key `{name}`.*1 or more"):
        configure(**{name: 0})


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"tail_log_lines": -1}, "from 0 to"),
        ({"tail_log_lines": 2**64}, "from 0 to"),
        ({"message_latency_sampling_rate": float("nan")}, "finite"),
        ({"message_latency_sampling_rate": 1e39}, "finite"),
        ({"default_transport": "carrier pigeon"}, "unknown transport 'carrier pigeon'"),
        ({"proc_start": "frok"}, "expected one of 'auto', 'fork', 'fresh'; did you mean 'fork'"),
    ],
)
def test_a_value_out_of_range_is_refused(values, text):
    with pytest.raises(ValueError, match=text):
        configure(**values)


def test_an_error_shows_the_right_form():
    with pytest.raises(TypeError, match=r"got int\n  next:  write for example cleanup_timeout='3s'"):
        configure(cleanup_timeout=3)


@pytest.mark.parametrize("spec", [ChannelTransport.TcpWithHostname, "tcp", BindSpec("tcp")], ids=repr)
def test_a_transport_reads_back_as_a_bind_spec(spec):
    configure(default_transport=spec)
    assert get_global_config()["default_transport"] == BindSpec(ChannelTransport.TcpWithHostname)


@given(st.floats(0, 1))
def test_a_float_reads_back_with_32_bits(rate):
    with configured(message_latency_sampling_rate=rate) as effective:
        assert effective["message_latency_sampling_rate"] == struct.unpack("f", struct.pack("f", rate))[0]


def test_integers_of_other_libraries_are_integers():
    class Five:
        def __index__(self):
            return 5

    configure(tail_log_lines=Five())
    assert type(config.value("tail_log_lines")) is int


# Layers. Each one sets another value; `rank` counts from the lowest.


def _client_env(value, monkeypatch):
    config.adopt({"tail_log_lines": value, "environment": ["tail_log_lines"]})


def _env(value, monkeypatch):
    monkeypatch.setenv("HYPERACTOR_MESH_TAIL_LOG_LINES", str(value))
    reload_config_from_env()


def _client_program(value, monkeypatch):
    before = config.snapshot()
    config.adopt(before | {"tail_log_lines": value, "environment": []})


def _runtime(value, monkeypatch):
    configure(tail_log_lines=value)


def _override(value, monkeypatch):
    BLOCKS.append(configured(tail_log_lines=value))
    BLOCKS[-1].__enter__()


BLOCKS: list[AbstractContextManager[object]] = []
"""Open blocks, which end when they are forgotten."""

LAYERS = [_client_env, _env, _client_program, _runtime, _override]
PAIRS = [pair for pair in itertools.permutations(range(len(LAYERS)), 2) if set(pair) != {0, 2}]
"""Without the two that one `adopt()` sets."""


@pytest.mark.parametrize("order", PAIRS, ids=lambda pair: "-then-".join(LAYERS[i].__name__ for i in pair))
def test_the_higher_layer_wins_in_whatever_order_they_are_set(order, monkeypatch):
    for rank in order:
        LAYERS[rank](rank + 1, monkeypatch)
    assert config.value("tail_log_lines") == max(order) + 1


def test_a_script_that_overrules_its_environment_also_overrules_it_in_its_procs(monkeypatch):
    monkeypatch.setenv("HYPERACTOR_MESH_TAIL_LOG_LINES", "1")
    reload_config_from_env()
    configure(tail_log_lines=2)
    sent = config.snapshot()
    reset_config_to_defaults()  # the child, which has inherited the variable
    reload_config_from_env()
    config.adopt(sent)
    assert config.value("tail_log_lines") == 2


def test_the_environment_of_a_host_beats_the_environment_of_the_client(monkeypatch):
    monkeypatch.setenv("HYPERACTOR_MESH_TAIL_LOG_LINES", "1")
    monkeypatch.setenv("HYPERACTOR_CLEANUP_TIMEOUT", "4s")
    reload_config_from_env()
    sent = config.snapshot()
    monkeypatch.setenv("HYPERACTOR_MESH_TAIL_LOG_LINES", "2")
    monkeypatch.delenv("HYPERACTOR_CLEANUP_TIMEOUT")
    reload_config_from_env()
    config.adopt(sent)
    assert (config.value("tail_log_lines"), config.value("cleanup_timeout")) == (2, "4s")


def test_a_snapshot_reaches_grandchildren_and_holds_no_defaults():
    configure(tail_log_lines=2)
    sent = config.snapshot()
    reset_config_to_defaults()
    config.adopt(sent)
    assert config.snapshot() == sent == {"tail_log_lines": 2, "environment": []}


def test_a_second_client_replaces_what_the_first_one_left():
    config.adopt({"tail_log_lines": 2})
    config.adopt({"cleanup_timeout": "4s"})
    assert (config.value("tail_log_lines"), config.value("cleanup_timeout")) == (0, "4s")


def test_a_key_of_a_newer_client_is_ignored_with_a_warning():
    with pytest.warns(UserWarning, match="ignored configuration key `from_the_future`"):
        config.adopt({"from_the_future": 1, "tail_log_lines": 2})
    assert config.value("tail_log_lines") == 2


def test_paths_of_certificates_stay_in_the_process():
    configure(hyperactor_tls_key="/etc/key.pem")
    assert "hyperactor_tls_key" not in config.snapshot()


def test_get_runtime_config_holds_only_what_was_configured(monkeypatch):
    _env(5, monkeypatch)
    configure(cleanup_timeout="60s")
    configure(prefix_with_rank=False)
    with configured(cleanup_timeout="1s"):
        assert get_runtime_config() == {"cleanup_timeout": "1s", "prefix_with_rank": False}
    assert get_runtime_config() == {"cleanup_timeout": "1m", "prefix_with_rank": False}
    clear_runtime_config()
    assert get_runtime_config() == {}
    assert config.value("tail_log_lines") == 5


def test_what_the_getters_give_is_a_copy():
    configure(tail_log_lines=1)
    for copy in (get_global_config(), get_runtime_config()):
        copy["tail_log_lines"] = 9
    assert config.value("tail_log_lines") == 1


def test_blocks_nest_and_end_also_by_an_exception():
    configure(tail_log_lines=1)
    with configured(tail_log_lines=2, prefix_with_rank=False):
        with pytest.raises(KeyError), configured(tail_log_lines=3) as inner:
            assert (inner["tail_log_lines"], inner["prefix_with_rank"]) == (3, False)
            raise KeyError
        assert config.value("tail_log_lines") == 2
    assert (config.value("tail_log_lines"), config.value("prefix_with_rank")) == (1, True)


def test_a_block_does_not_pin_or_undo_what_others_configure_meanwhile():
    with configured(tail_log_lines=2):
        configure(tail_log_lines=7, cleanup_timeout="9s")
        assert config.value("tail_log_lines") == 2
    assert (config.value("tail_log_lines"), config.value("cleanup_timeout")) == (7, "9s")


def test_blocks_may_end_in_any_order():
    first, second = configured(tail_log_lines=1), configured(tail_log_lines=2)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert config.value("tail_log_lines") == 2
    second.__exit__(None, None, None)
    assert config.value("tail_log_lines") == 0


def test_reset_empties_every_layer(monkeypatch):
    for n, layer in enumerate(LAYERS):
        layer(n + 1, monkeypatch)
    reset_config_to_defaults()
    assert get_global_config() == {name: row.default for name, row in KNOBS.items()}


def test_a_bad_variable_is_left_out_and_told_of_once(monkeypatch, caplog):
    monkeypatch.setenv("HYPERACTOR_CLEANUP_TIMEOUT", "soon")
    monkeypatch.setenv("HYPERACTOR_MESH_TAIL_LOG_LINES", "many")
    for _ in range(2):
        reload_config_from_env()
        config.warn_of_environment()
    assert config.value("cleanup_timeout") == "3s" and config.value("tail_log_lines") == 0
    assert [record.getMessage() for record in caplog.records] == [
        "ignored HYPERACTOR_CLEANUP_TIMEOUT='soon': Invalid duration format; expected text such as '30s', '500ms' or '1m 30s'\n"
        "  next:  set it for example to 3s, or unset it",
        "ignored HYPERACTOR_MESH_TAIL_LOG_LINES='many': expected an int\n  next:  set it for example to 0, or unset it",
    ]


def test_a_misspelt_variable_is_told_of_once(monkeypatch, caplog):
    for name in ("MONARCH_STALL_ENPOINT_LIMIT", "MONARCH_MAX_CAST_FANOUT", "HYPERACTOR_TAIL_LOG_LINE", "MONARCH_HOSTS", "MONARCH_RUN"):
        monkeypatch.setenv(name, "1")
    config.warn_of_environment()
    config.warn_of_environment()
    assert [record.getMessage().splitlines() for record in caplog.records] == [
        ["the environment variable MONARCH_STALL_ENPOINT_LIMIT is unknown; did you mean MONARCH_STALL_ENDPOINT_LIMIT?", HINT],
        ["the environment variable MONARCH_MAX_CAST_FANOUT is unknown; did you mean HYPERACTOR_MESH_MAX_CAST_FANOUT?", HINT],
        ["the environment variable HYPERACTOR_TAIL_LOG_LINE is unknown; did you mean HYPERACTOR_MESH_TAIL_LOG_LINES?", HINT],
    ]


def test_no_variable_that_monarch_reads_counts_as_misspelt(monkeypatch, caplog):
    source = "".join(path.read_text() for path in Path(config.__file__).parent.rglob("*.py"))
    for name in set(re.findall(r"\b(?:MONARCH|HYPERACTOR)_[A-Z_]*[A-Z]\b", source)):
        monkeypatch.setenv(name, "")
    config.warn_of_environment()
    assert not [text for record in caplog.records if "unknown" in (text := record.getMessage())]


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("HYPERACTOR_CLEANUP_TIMEOUT", "5", "cleanup_timeout", "5s"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "60000", "otel_metric_export_interval", "1m"),
        ("HYPERACTOR_MESH_ORPHAN_TIMEOUT", "none", "mesh_orphan_timeout", None),
        ("HYPERACTOR_REMOTE_STOP_GRACE_PERIOD", "5s", "stop_grace_period", "5s"),
        ("HYPERACTOR_MESH_DEFAULT_TRANSPORT", "tcp", "default_transport", BindSpec("tcp")),
        ("HYPERACTOR_DEFAULT_TRANSPORT", "tcp", "default_transport", BindSpec("tcp")),
        ("HYPERACTOR_DEFAULT_ENCODING", "json", "default_encoding", Encoding.Json),
        ("MONARCH_FILE_LOG", "debug", "file_log_level", "debug"),
        ("PYSPY_BIN", "/bin/py-spy", "pyspy_bin", "/bin/py-spy"),
        ("MONARCH_HYPERACTOR_SMALL_WRITE_THRESHOLD", "1", "small_write_threshold", 1),
    ],
)
def test_a_variable_is_read_as_documented(variable, text, name, value, monkeypatch):
    monkeypatch.setenv(variable, text)
    reload_config_from_env()
    assert config.value(name) == value


def test_seconds_follow_every_change():
    assert config.seconds("cleanup_timeout") == 3.0
    with configured(cleanup_timeout="1m 500ms", mesh_orphan_timeout=None):
        assert config.seconds("cleanup_timeout") == 60.5
        assert config.seconds_or_none("mesh_orphan_timeout") is None
        with pytest.raises(ValueError, match="`mesh_orphan_timeout` is None"):
            config.seconds("mesh_orphan_timeout")
    assert config.seconds_or_none("mesh_orphan_timeout") == 60.0


def test_the_environment_is_read_at_import_and_nothing_heavy_is_loaded():
    heavy = {"pytest", "asyncio", "msgspec", "inspect"}
    code = f"import sys, monarch.config as c; print(c.value('tail_log_lines'), *({heavy} & set(sys.modules)))"
    env = {"HYPERACTOR_MESH_TAIL_LOG_LINES": "8", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["8"]


SEEN: list[tuple[object, ...]] = []


@parametrize_config(tail_log_lines={1, 2}, prefix_with_rank={True, False})
def test_parametrize_config_runs_the_cross_product(tmp_path):
    assert tmp_path.exists()
    assert config.value("tail_log_lines") in (1, 2)
    SEEN.append((config.value("tail_log_lines"), config.value("prefix_with_rank")))


def test_parametrize_config_ran_every_combination():
    assert sorted(SEEN) == [(1, False), (1, True), (2, False), (2, True)]


@parametrize_config_pointwise(tail_log_lines=[1, 2], cleanup_timeout=["1s", "2s"])
async def test_parametrize_config_pointwise_zips(tmp_path):
    assert (config.value("tail_log_lines"), config.value("cleanup_timeout")) in ((1, "1s"), (2, "2s"))


def test_parametrize_config_adds_one_parameter():
    @parametrize_config(tail_log_lines={1})
    def decorated(fixture):
        pass

    assert list(inspect.signature(decorated).parameters) == ["fixture", "_config_overrides"]


@pytest.mark.parametrize("values", [{}, {"tail_log_lines": set()}, {"tail_log_lines": {1}, "prefix_with_rank": set()}], ids=repr)
def test_parametrize_config_needs_values(values):
    with pytest.raises(ValueError, match="a value for each"):
        parametrize_config(**values)


@pytest.mark.parametrize("values", [{}, {"tail_log_lines": []}, {"tail_log_lines": [1], "prefix_with_rank": [True, False]}], ids=repr)
def test_parametrize_config_pointwise_needs_equal_lengths(values):
    with pytest.raises(ValueError, match="one length"):
        parametrize_config_pointwise(**values)


PAGE = (Path(__file__).parents[1] / "docs" / "configuration.md").read_text()
SOURCE = "\n".join(path.read_text() for path in Path(config.__file__).parent.rglob("*.py") if path != Path(config.__file__))


@pytest.mark.parametrize("row", KNOBS.values(), ids=lambda row: row.name)
def test_the_page_of_keys_has_every_key_with_its_default_where_it_belongs(row):
    if row.default is None:
        default = "None"
    elif isinstance(row.default, str):
        default = f'`"{row.default}"`'
    else:
        default = f"`{row.default:.7g}`" if isinstance(row.default, float) else f"`{row.default!r}`"
    line = f"\n| `{row.name}` | `{row.env[0]}` | {default} | "
    assert PAGE.count(line) == 1, f"docs/configuration.md lacks the line {line.strip()}"
    has_effect = re.search(rf"[\"']{row.name}[\"']", SOURCE) is not None
    assert (PAGE.index(line) < PAGE.index("## Keys without an effect")) == has_effect


def test_the_page_of_keys_has_no_others():
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == set(KNOBS)
