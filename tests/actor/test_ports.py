"""Texts of ports and receivers, and what needs no process."""

from __future__ import annotations

import pickle

import pytest

from monarch._base.ids import ProcRef
from monarch.actor import Accumulator, Channel, Port, PortReceiver
from monarch.actor.ports import DroppingPort, RankedPortReceiver

REF = ProcRef("proc<uid>", "ipc:///nowhere/p", "ipc:///nowhere/h")


def test_a_port_survives_pickling_with_all_its_properties():
    port = Port(REF, 7, 3, once=True)
    port.return_undeliverable = False
    copy = pickle.loads(pickle.dumps(port))
    assert (copy._proc, copy._port, copy._rank, copy._once, copy.return_undeliverable) == (REF, 7, 3, True, False)
    assert repr(copy) == "Port(proc<uid>, 7)"
    assert Port(REF, 1, None, once=False).return_undeliverable is True


def test_a_dropping_port_drops_values_and_raises_exceptions_where_it_is():
    port = DroppingPort()
    assert port.send(5) is None and port.return_undeliverable is False
    error = KeyError("k")
    with pytest.raises(KeyError) as caught:
        port.exception(error)
    assert caught.value is error


@pytest.mark.parametrize("kind", [PortReceiver, RankedPortReceiver])
def test_receivers_stay_where_they_are(kind):
    with pytest.raises(TypeError, match=f"a {kind.__name__} can't be pickled: messages arrive in the process that.*; send the Port"):
        pickle.dumps(kind(None))


@pytest.mark.parametrize("generic", [Channel, Port, PortReceiver])
def test_they_can_be_subscripted_for_type_checkers(generic):
    assert generic[int].__origin__ is generic
    assert Channel[int].open is not None and Accumulator[..., int, str] is not None
