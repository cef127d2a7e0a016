"""What tests of connections share: something done on a loop, and bytes read exactly."""

from __future__ import annotations

import threading

WAIT_S = 10.0


def on_loop(loop, function, *args):
    """The value of `function(*args)`, run as a callback."""
    done, result = threading.Event(), []

    def run():
        try:
            result.append(function(*args))
        finally:
            done.set()

    loop.call_soon(run)
    assert done.wait(WAIT_S)
    return result[0]


def exactly(sock, count):
    """The next `count` bytes."""
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        assert piece, f"closed behind {data!r}"
        data += piece
    return data
