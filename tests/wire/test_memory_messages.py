"""Messages about memory: what is secret in them is not shown."""

from __future__ import annotations

from monarch._wire.memory_messages import LendMemory


def test_a_request_to_lend_shows_neither_ticket_nor_credentials():
    text = repr(LendMemory("tcp://node7:26600/x", b"ticket-of-16-byt", b"private key"))
    assert "node7" in text and "ticket" not in text and "private" not in text
