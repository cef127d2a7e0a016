"""Visitors: connections are passed to the process they are for, few at a time, and strangers hear little."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from monarch._base.ids import ProcRef
from monarch._net.handshake import Preface, StatusCode
from monarch._net.stream import LinkClosedError
from monarch._runtime import visitors
from monarch._runtime.visitors import Visitors
from monarch._wire.contact_messages import HandOver

AGENT = "tcp://127.0.0.1:26600"


def record(name, *, up=True, exited=None):
    return SimpleNamespace(ref=ProcRef(f"{name}<1>", f"{AGENT}/{name}", AGENT), up=up, exited=exited)


class Knock:
    """A connection that is asked for by name; what it was told."""

    peer = "10.0.0.9:4"

    def __init__(self):
        self.answer = None
        self.ours, self.theirs = socket.socketpair()

    def refuse(self, code, reason):
        self.answer = (code, reason)
        self.ours.close()

    def accept(self):
        self.answer = "accepted"

    def take(self):
        self.answer = "taken"
        return self.ours

    @property
    def is_closed(self):
        return self.theirs.recv(1) == b""


class Sent:
    """A link to a process that takes what it is sent, until told otherwise."""

    def __init__(self):
        self.messages = []
        self.error = None

    def send_descriptor(self, message, fd):
        if self.error is not None:
            raise self.error
        self.messages.append(message)


@pytest.fixture
def rig():
    link, knocks = Sent(), []
    host = Visitors(lambda ref: link, "service<1>")

    def knock(name):
        knocks.append(Knock())
        host.lead(Preface(name, False), knocks[-1])
        return knocks[-1]

    yield host, link, knock
    for each in knocks:
        each.ours.close()
        each.theirs.close()


def test_a_connection_goes_to_the_process_of_that_name(rig):
    host, link, knock = rig
    host.add(record("a"))
    host.add(record("b"))
    assert knock("b").answer == "taken"
    assert link.messages == [HandOver("b", False, "10.0.0.9:4")]


@pytest.mark.parametrize(
    ("known", "code"),
    [
        ([], StatusCode.GONE),
        ([record("a", exited=SimpleNamespace(again=False, reason="exited with status 3 in /home/alice"))], StatusCode.GONE),
        ([record("a", up=False)], StatusCode.BUSY),
        ([record("a", exited=SimpleNamespace(again=True, reason="killed"))], StatusCode.BUSY),
    ],
)
def test_a_stranger_hears_whether_it_takes_connections_and_nothing_else(rig, known, code):
    host, link, knock = rig
    for each in known:
        host.add(each)
    told, reason = knock("a").answer
    assert told is code and "alice" not in reason and "killed" not in reason and not link.messages


def test_a_process_that_is_unknown_and_one_that_has_ended_sound_the_same(rig):
    host, _, knock = rig
    host.add(record("a", exited=SimpleNamespace(again=False, reason="x")))
    assert knock("a").answer == knock("nobody").answer


def test_what_is_forgotten_is_gone(rig):
    host, _, knock = rig
    host.add(record("a"))
    host.remove(record("a"))
    host.remove(record("a"))
    assert knock("a").answer[0] is StatusCode.GONE


def test_few_are_on_their_way_to_a_process_that_takes_none(rig, monkeypatch):
    monkeypatch.setattr(visitors, "_MAX_WAITING", 3)
    host, link, knock = rig
    host.add(record("a"))
    host.add(record("b"))
    answers = [knock("a").answer for _ in range(5)]
    assert answers[:3] == ["taken"] * 3 and [code for code, _ in answers[3:]] == [StatusCode.BUSY] * 2
    assert knock("b").answer == "taken", "another one is not to suffer"
    host.on_taken("a<1>")
    assert knock("a").answer == "taken" and knock("a").answer[0] is StatusCode.BUSY
    host.on_lost("a<1>", 7)
    assert [knock("a").answer for _ in range(3)] == ["taken"] * 3
    assert len(link.messages) == 8


def test_few_are_on_their_way_in_all(rig, monkeypatch):
    monkeypatch.setattr(visitors, "_MAX_WAITING_IN_ALL", 4)
    host, _, knock = rig
    for name in "abc":
        host.add(record(name))
    answers = [knock("abc"[number % 3]).answer for number in range(6)]
    assert answers[:4] == ["taken"] * 4 and {code for code, _ in answers[4:]} == {StatusCode.BUSY}


def test_news_of_one_that_nobody_waits_for_changes_nothing(rig):
    host, _, knock = rig
    host.add(record("a"))
    host.on_taken("a<1>")
    host.on_lost("a<1>", 7)
    assert knock("a").answer == "taken"


@pytest.mark.parametrize("error", [LinkClosedError("it has ended"), OSError(24, "Too many open files")])
def test_a_connection_that_can_t_be_passed_on_is_closed(rig, error):
    host, link, knock = rig
    host.add(record("a"))
    link.error = error
    assert knock("a").is_closed
    link.error = None
    assert not host._waiting and knock("a").answer == "taken"


def test_a_service_is_known_by_its_id(rig):
    host, _, knock = rig
    host.add(record("a"))
    assert knock("@service<1>").answer == "accepted" and knock("@service<1>/a").answer == "taken"
    for name in ("@service<2>", "@service<2>/a"):
        code, reason = knock(name).answer
        assert code is StatusCode.GONE and "service<2> is not here (any more)" in reason
