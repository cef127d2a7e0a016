"""Ids of services: from the scheduler through the environment to the worker, and in front of the address to the client."""

from __future__ import annotations

import pytest

from monarch._base.addresses import parse_worker_address
from monarch._base.ids import ProcId
from monarch.actor.service_ids import (
    SERVICE_PROC_IDS_ENV,
    SERVICE_PROC_RANK_ENV,
    deserialize_service_proc_ids,
    new_service_proc_id,
    ranked_service_proc_id_from_env,
    serialize_service_proc_ids,
    service_proc_addr,
    service_proc_addrs,
)

ADDRESSES = ["tcp://node7:26600", "tcp://gate:7000@tcp://10.0.0.7:26600", "ipc://@name", "ipc:///tmp/w"]


def test_new_ids_differ_and_say_what_they_are_of():
    first, second = new_service_proc_id(), new_service_proc_id()
    assert first != second
    assert first.label == "service"


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_with_an_id_is_one_that_workers_understand(address):
    proc_id = new_service_proc_id()
    text = service_proc_addr(address, proc_id)
    assert text == f"{proc_id}@{address}"
    worker = parse_worker_address(text)
    assert worker.advertised.service == worker.bound.service == str(proc_id)
    assert service_proc_addr(address, str(proc_id)) == text


def test_without_ids_addresses_stay_as_they_are():
    assert service_proc_addr(ADDRESSES[0], None) == ADDRESSES[0]
    assert service_proc_addrs(ADDRESSES, None) == ADDRESSES


def test_each_address_gets_its_own_id():
    ids = [new_service_proc_id() for _ in ADDRESSES]
    assert service_proc_addrs(ADDRESSES, ids) == [f"{proc_id}@{address}" for proc_id, address in zip(ids, ADDRESSES, strict=True)]
    with pytest.raises(ValueError, match="4 addresses and 3 ids"):
        service_proc_addrs(ADDRESSES, ids[1:])


@pytest.mark.parametrize("proc_id", ["", "a b", "a@b", "tcp://x", "a<>"])
def test_a_malformed_id_is_refused(proc_id):
    with pytest.raises(ValueError, match="invalid id of a service"):
        service_proc_addr("tcp://h:1", proc_id)


def test_a_second_id_is_refused():
    once = service_proc_addr("tcp://h:1", new_service_proc_id())
    with pytest.raises(ValueError, match="has the id of a service already"):
        service_proc_addr(once, new_service_proc_id())


def test_ids_survive_their_text():
    ids = [new_service_proc_id(), ProcId.from_string("other<5>"), ProcId.from_string("plain")]
    assert deserialize_service_proc_ids(serialize_service_proc_ids(ids)) == ids
    assert deserialize_service_proc_ids(serialize_service_proc_ids([])) == []


@pytest.mark.parametrize("text", ["", "service<5>", "{}", "[1]", '["a b"]', '[""]', "[null]"])
def test_other_text_holds_no_ids(text):
    with pytest.raises(ValueError, match="expected a JSON list of ids"):
        deserialize_service_proc_ids(text)


@pytest.mark.parametrize("rank_env", [SERVICE_PROC_RANK_ENV, "SLURM_NODEID"])
def test_a_worker_finds_its_id_by_its_rank(monkeypatch, rank_env):
    ids = [new_service_proc_id() for _ in range(3)]
    monkeypatch.setenv(SERVICE_PROC_IDS_ENV, serialize_service_proc_ids(ids))
    for rank, proc_id in enumerate(ids):
        monkeypatch.setenv(rank_env, str(rank))
        assert ranked_service_proc_id_from_env(rank_env=rank_env) == proc_id


def test_a_worker_that_was_given_no_ids_has_none(monkeypatch):
    monkeypatch.delenv(SERVICE_PROC_IDS_ENV, raising=False)
    monkeypatch.setenv(SERVICE_PROC_RANK_ENV, "7")
    assert ranked_service_proc_id_from_env() is None


@pytest.mark.parametrize("rank", [None, "", "2", "-1", "x", "²"])
def test_a_rank_that_is_none_of_the_list_names_both_variables(monkeypatch, rank):
    monkeypatch.setenv(SERVICE_PROC_IDS_ENV, serialize_service_proc_ids([new_service_proc_id(), new_service_proc_id()]))
    monkeypatch.delenv(SERVICE_PROC_RANK_ENV, raising=False)
    if rank is not None:
        monkeypatch.setenv(SERVICE_PROC_RANK_ENV, rank)
    with pytest.raises(ValueError, match=r"MONARCH_SERVICE_PROC_RANK is .* no rank among the 2 ids of MONARCH_SERVICE_PROC_IDS"):
        ranked_service_proc_id_from_env()
