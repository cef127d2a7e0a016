"""Frames between agent and zygote: any message, in any pieces, and texts that are not UTF-8."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._wire.zygote_messages import (
    Command,
    Exited,
    Gone,
    KillProc,
    Note,
    Reply,
    Shutdown,
    SignalProc,
    Started,
    StartFailed,
    StartProc,
    Stopped,
    encode,
    reply_reader,
    request_reader,
)

# What `os.environ` and `sys.argv` can hold: no NUL, and lone surrogates for bytes that are not UTF-8.
os_texts = st.text(st.characters(exclude_characters="\0", exclude_categories=()), max_size=8)
commands = st.builds(Command, os_texts, st.none() | os_texts, st.lists(os_texts, max_size=3))
starts = st.builds(
    StartProc,
    st.text(max_size=5),
    st.binary(max_size=20),
    st.dictionaries(os_texts, os_texts, max_size=4),
    os_texts,
    st.lists(os_texts, max_size=3),
    st.none() | commands,
)
requests = starts | st.sampled_from([SignalProc("a", 15), KillProc("a"), Shutdown()])
REPLIES: list[Reply] = [Started("a", 1), StartFailed("a", "why"), Exited("a", 1, None, 9, True), Gone("a"), Gone("a", [3]), Stopped("a", 1)]


@given(messages=st.lists(requests, max_size=5), step=st.integers(1, 50))
def test_requests_survive_any_split_of_the_stream(messages, step):
    stream = b"".join(map(encode, messages))
    reader = request_reader()
    assert [message for at in range(0, len(stream), step) for message in reader.feed(stream[at : at + step])] == messages


@pytest.mark.parametrize("reply", REPLIES, ids=repr)
def test_a_reply_arrives_as_it_left(reply):
    assert reply_reader().feed(encode(reply)) == [reply]


@pytest.mark.parametrize(
    ("reply", "shown"),
    [(Note("a\udcff"), Note("a\\udcff")), (StartFailed("a", "\udcff"), StartFailed("a", "\\udcff"))],
)
def test_a_text_for_people_shows_bytes_that_are_not_utf8(reply, shown):
    assert reply_reader().feed(encode(reply)) == [shown]
