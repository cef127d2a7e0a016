"""Channels: all bytes or an error, never later than the deadline."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from monarch.rdma.channel import Channel, ChannelClosedError
from monarch.rdma.errors import DeadlineError

WAIT_S = 5.0


@pytest.fixture
def ends():
    left, right = socket.socketpair()
    channel = Channel(left)
    yield channel, right
    channel.close()
    right.close()


def soon(seconds=WAIT_S):
    return time.monotonic() + seconds


def test_bytes_arrive_however_they_are_cut(ends):
    channel, other = ends
    data = bytes(range(256)) * 4096
    sender = threading.Thread(target=lambda: [other.sendall(data[at : at + 70000]) for at in range(0, len(data), 70000)])
    sender.start()
    space = memoryview(bytearray(len(data)))
    channel.receive(space, soon())
    sender.join(WAIT_S)
    assert space == data


def test_many_parts_are_sent_in_order(ends):
    channel, other = ends
    parts = [bytes([number]) * (number * 5000) for number in range(30)]
    received = bytearray()

    def take():
        while len(received) < sum(map(len, parts)):
            received.extend(other.recv(100000))

    taker = threading.Thread(target=take)
    taker.start()
    channel.send(parts, soon())
    taker.join(WAIT_S)
    assert received == b"".join(parts)


def test_a_silent_peer_is_waited_for_until_the_deadline(ends):
    channel, other = ends
    other.sendall(b"ab")
    began = time.monotonic()
    with pytest.raises(DeadlineError):
        channel.receive(memoryview(bytearray(3)), soon(0.1))
    with pytest.raises(DeadlineError):
        channel.send([bytes(64 << 20)], soon(0.1))
    assert time.monotonic() - began < 2


def test_the_end_of_the_peer_is_an_error(ends):
    channel, other = ends
    assert channel.is_quiet()
    other.sendall(b"ab")
    other.close()
    assert not channel.is_quiet()
    with pytest.raises(ChannelClosedError):
        channel.receive(memoryview(bytearray(3)), soon())
    with pytest.raises(OSError):
        channel.send([bytes(1 << 20)], soon())


def test_whoever_waits_can_be_interrupted(ends):
    channel, _ = ends
    caught = []

    def wait():
        try:
            channel.receive(memoryview(bytearray(1)), soon(60))
        except OSError as exc:
            caught.append(exc)

    waiter = threading.Thread(target=wait)
    waiter.start()
    channel.interrupt()
    waiter.join(WAIT_S)
    assert caught and not waiter.is_alive()
