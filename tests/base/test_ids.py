"""Ids are unique, survive their text and pickle, and an address tells its parts."""

from __future__ import annotations

import os
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._base.ids import ActorAddr, ProcId, ProcRef, Uid, agent_at, folder_of, random_id, sanitize_label, split_agent, split_target

ALPHABET = set("123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz")
labels = st.from_regex(r"[a-z]([a-z0-9_-]{0,20}[a-z0-9])?", fullmatch=True)
uids = st.builds(Uid.instance, labels) | st.builds(Uid.anonymous) | st.builds(Uid.from_string, labels)


def pickled(value):
    return pickle.loads(pickle.dumps(value))


def test_random_ids_differ():
    ids = [random_id() for _ in range(2000)]
    assert len(set(ids)) == len(ids)
    assert {len(text) for text in ids} == {12}
    assert set("".join(ids)) == ALPHABET


def test_a_forked_process_draws_other_ids():
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(write, random_id().encode())
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        theirs = pipe.read()
    os.waitpid(pid, 0)
    assert len(theirs) == 12
    assert theirs != random_id()


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("Trainer", "trainer"),
        ("my actor!", "myactor"),
        ("1_2-a-3", "a-3"),
        ("--a--", "a"),
        ("a_", "a"),
        ("x" * 80, "x" * 63),
        ("x" * 62 + "-y", "x" * 62),
        ("", "nil"),
        ("7", "nil"),
        ("Ünïcode", "ncode"),
        ("__", "nil"),
    ],
)
def test_a_name_becomes_a_label(name, label):
    assert sanitize_label(name) == label


@given(st.text())
def test_every_label_is_short_plain_and_stays_what_it_is(name):
    label = sanitize_label(name)
    assert re.fullmatch(r"[a-z]([a-z0-9_-]{0,61}[a-z0-9])?", label)
    assert sanitize_label(label) == label


@given(uids)
def test_a_uid_survives_its_text_and_pickle(uid):
    for same in (Uid.from_string(str(uid)), pickled(uid)):
        assert (same, hash(same), same.label, same.is_instance) == (uid, hash(uid), uid.label, uid.is_instance)
    assert uid.is_singleton is not uid.is_instance
    assert repr(uid) == f"Uid('{uid}')"


def test_an_instance_carries_a_label_only_when_given_one():
    assert Uid.instance("My Mesh").label == "mymesh"
    assert Uid.instance().label is None
    assert re.fullmatch(r"<\w{12}>", str(Uid.anonymous()))
    assert re.fullmatch(r"mymesh<\w{12}>", str(Uid.instance("My Mesh")))
    assert Uid.instance("a") != Uid.instance("a")
    assert Uid.from_string("root").is_singleton


@pytest.mark.parametrize("text", ["", "a<", "a<>", "a<1>x", "<a", "a.b", "a@b", "a<0x>", "a<1><2>"])
def test_other_text_is_no_uid(text):
    with pytest.raises(ValueError, match=rf"invalid uid {re.escape(repr(text))}; expected"):
        Uid.from_string(text)


@given(uids)
def test_a_proc_is_known_by_its_uid(uid):
    proc = ProcId(uid)
    assert proc == ProcId.from_string(str(uid)) == pickled(proc)
    assert (hash(proc), str(proc), proc.label, repr(proc)) == (hash(uid), str(uid), uid.label, f"ProcId('{uid}')")
    assert proc != uid
    assert proc != ProcId(Uid.anonymous())


locations = st.sampled_from(["ipc:///run/m.sock", "tcp://node7:26600", "tcp://public:1@tcp://10.0.0.1:2"])


@given(uids, uids, locations)
def test_an_actor_address_survives_its_text_and_pickle(actor, proc, location):
    addr = ActorAddr.from_string(f"{actor}.{proc}@{location}")
    for same in (pickled(addr), ActorAddr.from_string(str(addr)), ActorAddr(addr=location, proc_name=str(proc), actor_name=str(actor))):
        assert same == addr
        assert hash(same) == hash(addr)
        assert (same.addr, same.proc_name, same.actor_name) == (location, str(proc), str(actor))
    assert addr.uid == addr.pid == str(actor)
    assert (addr.label, addr.proc_label) == (actor.label, proc.label)
    assert addr.proc_id == f"{proc}@{location}"
    assert repr(addr) == f"ActorAddr('{addr}')"
    assert addr != str(addr)


@pytest.mark.parametrize("text", ["", "a.b", "a@c", ".b@c", "a.@c", "a.b@", "@", "ab"])
def test_other_text_is_no_actor_address(text):
    with pytest.raises(ValueError, match=rf"invalid actor address {re.escape(repr(text))}; expected '<actor>.<proc>@<location>'"):
        ActorAddr.from_string(text)


@pytest.mark.parametrize(("actor", "is_root"), [("root", True), ("root<1a>", True), ("rooted", False), ("<1root>", False)])
def test_the_client_of_a_job_is_its_root(actor, is_root):
    assert ActorAddr.from_string(f"{actor}.p<1>@ipc:///s").is_root is is_root


def test_an_agent_is_known_by_its_address():
    assert agent_at("ipc:///s") == agent_at("ipc:///s") == ProcRef("host@ipc:///s", "ipc:///s", "")
    assert agent_at("ipc:///s") != agent_at("ipc:///t")
    assert folder_of("ipc:///s").startswith("ipc:///s")


@pytest.mark.parametrize(
    ("address", "agent", "name"),
    [
        ("tcp://h:1", "tcp://h:1", ""),
        ("tcp://h:1/abc.3", "tcp://h:1", "abc.3"),
        ("tls://[::1]:1/@service<7x>", "tls://[::1]:1/@service<7x>", ""),
        ("tls://[::1]:1/@service<7x>/abc.3", "tls://[::1]:1/@service<7x>", "abc.3"),
        ("ipc:///run/w", "ipc:///run/w", ""),
    ],
)
def test_an_address_between_hosts_is_that_of_an_agent_and_a_name(address, agent, name):
    assert split_agent(address) == (agent, name)


def test_what_a_connection_is_for_is_a_service_and_a_process():
    assert split_target("") == ("", "")
    assert split_target("abc.3") == ("", "abc.3")
    assert split_target("@w<7x>") == ("w<7x>", "")
    assert split_target("@w<7x>/abc.3") == ("w<7x>", "abc.3")
