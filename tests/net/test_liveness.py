"""Liveness: what the kernel knows of a connection says for how long its other end has been silent."""

from __future__ import annotations

import socket
import sys
import time

import pytest

from monarch._net.liveness import Pulse, Signs, signs_of

QUIET = Signs(retransmits=0, probes=0, backoff=0, unacknowledged=0, data_age_ms=90_000, age_ms=700)
FULL = QUIET._replace(backoff=5, age_ms=12_000)


@pytest.mark.parametrize(
    ("signs", "silence_s"),
    [
        (QUIET, 0.7),
        (QUIET._replace(age_ms=90_000, data_age_ms=200), 0.2),
        (QUIET._replace(unacknowledged=3, retransmits=4, backoff=4, age_ms=5000), 5.0),
        (FULL, 0.0),
    ],
    ids=["idle", "only receiving", "nothing is acknowledged", "no room, and it says so"],
)
def test_silence_is_the_time_without_a_sign(signs, silence_s):
    assert Pulse().silence_s(signs, 1000.0) == silence_s


def test_where_there_is_no_room_only_unanswered_questions_count():
    pulse = Pulse()
    asked = FULL._replace(probes=1)
    assert pulse.silence_s(asked, 100.0) == 0.0
    assert pulse.silence_s(asked, 101.5) == 1.5
    assert pulse.silence_s(FULL, 102.0) == 0.0, "it has been answered"
    assert pulse.silence_s(asked, 110.0) == 0.0
    assert pulse.silence_s(asked._replace(probes=2), 113.0) == 3.0
    assert pulse.silence_s(asked._replace(probes=3, data_age_ms=100), 114.0) == 0.1
    assert pulse.silence_s(QUIET, 115.0) == 0.7


@pytest.mark.skipif(sys.platform != "linux", reason="needs TCP_INFO")
def test_a_full_socket_of_a_process_that_does_not_read_is_no_silence():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as ours:
        theirs, _ = listener.accept()
        with theirs:
            assert signs_of(ours).unacknowledged == 0
            ours.setblocking(False)
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline and not signs_of(ours).backoff:
                try:
                    ours.send(bytes(1 << 20))
                except BlockingIOError:
                    signs_of(ours)
            signs = signs_of(ours)
            assert signs.backoff
            assert Pulse().silence_s(signs, 0.0) == 0.0


def test_a_socket_of_this_machine_has_no_signs():
    left, right = socket.socketpair()
    with left, right:
        assert signs_of(left) is None
