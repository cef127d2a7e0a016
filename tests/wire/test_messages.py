"""Messages: each arrives as it left, and bytes that are none are refused, whatever they are."""

from __future__ import annotations

import typing

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from monarch._base.ids import ProcRef
from monarch._wire import messages
from monarch._wire.messages import CallHeader, Command, Control, DecodeError, Fault, Hello, Ping, ProcBoot, ProcSpec

DECODERS = (messages.decode_control, messages.decode_call, messages.decode_boot, messages.decode_fault)
CONTROLS = typing.get_args(Control)

texts = st.text(max_size=6)
numbers = st.integers(-(2**63), 2**64 - 1)
floats = st.floats(allow_nan=False)
json_like = st.recursive(st.none() | st.booleans() | numbers | floats | texts, lambda inner: st.lists(inner, max_size=2))


def values_of(kind):
    """A strategy for a field of type `kind`."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is dict:
        return st.dictionaries(values_of(args[0]), values_of(args[1]), max_size=3)
    if origin is list:
        return st.lists(values_of(args[0]), max_size=3)
    if origin is tuple and args[-1] is not ...:
        return st.tuples(*map(values_of, args))
    if origin is tuple:
        return st.lists(values_of(args[0]), max_size=3).map(tuple)
    if args:  # a union
        return st.one_of(map(values_of, args))
    if kind is ProcRef:
        return st.builds(ProcRef, texts, texts, texts)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return structs(kind)
    scalars = {str: texts, int: numbers, bool: st.booleans(), float: floats, type(None): st.none(), typing.Any: json_like}
    return {bytes: st.binary(max_size=9), **scalars}[kind]


def structs(kind):
    return st.builds(kind, *(values_of(field.type) for field in msgspec.structs.fields(kind)))


@pytest.mark.parametrize("kind", CONTROLS, ids=lambda kind: kind.__name__)
@settings(max_examples=30)
@given(data=st.data())
def test_every_control_message_arrives_as_it_left(kind, data):
    message = data.draw(structs(kind))
    assert messages.decode_control(messages.encode(message)) == message


@pytest.mark.parametrize(
    ("kind", "decode"),
    [(CallHeader, messages.decode_call), (Fault, messages.decode_fault), (ProcBoot, messages.decode_boot)],
    ids=lambda value: value.__name__,
)
@given(data=st.data())
def test_every_other_struct_arrives_as_it_left(kind, decode, data):
    value = data.draw(structs(kind))
    assert decode(messages.encode(value)) == value


def test_a_fault_is_read_from_any_buffer():
    fault = Fault("lost", "actor", "mesh", -1, "gone")
    encoded = messages.encode(fault)
    assert messages.decode_fault(bytearray(encoded)) == messages.decode_fault(memoryview(encoded)) == fault


def test_messages_differ_by_their_name_alone():
    tags = {messages.encode(kind(*[None] * len(kind.__struct_fields__)))[:40] for kind in CONTROLS}
    assert len(tags) == len(CONTROLS)


def test_a_field_that_a_newer_peer_added_is_ignored():
    encoded = msgspec.msgpack.encode({"type": "Ping", "added_later": 1})
    assert messages.decode_control(encoded) == Ping()


@pytest.mark.parametrize(
    "value",
    [
        {"type": "NoSuchMessage"},
        {"type": 5},
        {},
        {"proc": ["a", "b", "c"], "pid": 1, "version": "1"},
        {"type": "Hello", "pid": 1, "version": "1"},
        {"type": "Hello", "proc": ["a", "b"], "pid": 1, "version": "1"},
        {"type": "Hello", "proc": ["a", "b", "c"], "pid": "1", "version": "1"},
        {"type": "Credit", "actor": "a", "nbytes": 1.5},
        {"type": "ReleaseSegments", "segments": [1, None]},
        [],
        "Ping",
        None,
    ],
    ids=repr,
)
def test_a_message_of_another_shape_is_refused(value):
    with pytest.raises(DecodeError):
        messages.decode_control(msgspec.msgpack.encode(value))


@pytest.mark.parametrize("decode", DECODERS, ids=lambda decode: decode.__name__)
@given(data=st.binary(max_size=60))
@example(data=b"")
@example(data=b"\xc1")
@example(data=b"\xdf\xff\xff\xff\xff")
@example(data=b"\xdd\xff\xff\xff\xff")
@example(data=b"\x81\xa4type\xdb\xff\xff\xff\xff")
@example(data=b"\x81\xa4type\xa2\xff\xfe")
@example(data=b"\x91" * 100_000)
@example(data=b"\x81\xa6config" + b"\x91" * 100_000)
def test_any_other_bytes_are_refused(decode, data):
    with pytest.raises(DecodeError):
        decode(data)


BOOT = ProcBoot(ProcRef("a", "b", "c"), ProcRef("d", "e", "f"), ProcRef("g", "h", ""), "p", {"key": [1]}, "module")
WHOLE = messages.encode(
    messages.SpawnProcs("m", [ProcSpec(BOOT.proc, "n", {}, Command("p", None, [], {}))], BOOT.owner, None, "/", [], [], {"deep": [[]]}, 1.0)
)


@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 255))
def test_a_changed_byte_gives_a_message_or_is_refused(at, byte):
    changed = WHOLE[:at] + bytes([byte]) + WHOLE[at + 1 :]
    try:
        message = messages.decode_control(changed)
    except DecodeError:
        return
    assert isinstance(message, CONTROLS)


@given(st.integers(0, len(WHOLE) - 1))
def test_a_cut_message_is_refused(length):
    with pytest.raises(DecodeError):
        messages.decode_control(WHOLE[:length])


def test_a_value_nested_too_deeply_is_refused():
    encoded = messages.encode(BOOT).replace(b"\x91\x01", b"\x91" * 100_000 + b"\x01")
    with pytest.raises(DecodeError):
        messages.decode_boot(encoded)


def test_a_call_header_is_the_same_bytes_for_every_call():
    sender = ProcRef("a", "b", "c")
    one, two = (CallHeader("actor", "method", sender, "me", sender, ("gpus",), (8,)) for _ in range(2))
    assert messages.encode(one) == messages.encode(two)
    assert messages.decode_call(messages.encode(one)).once is False


def test_hello_has_no_field_that_runs_code():
    hello = Hello(ProcRef("a", "b", "c"), 1, "1")
    assert msgspec.msgpack.decode(messages.encode(hello)) == {
        "type": "Hello", "proc": ["a", "b", "c"], "pid": 1, "version": "1", "session": "", "received": 0, "resumed": False,
        "epoch": 0, "patience_s": 0.0,
    }  # fmt: skip
