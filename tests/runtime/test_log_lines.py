"""Lines out of a stream: whole, in order, with their writers, however the stream is cut."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._runtime.log_lines import (
    KEPT_BYTES,
    PIECE_BYTES,
    SHOWN_BYTES,
    Line,
    Splitter,
    Writer,
    closing,
    cut_mark,
    decoded,
    opening,
    pieces,
)

MARK = "c0ffee"
ANNA, BERT = Writer("anna", 0), Writer("bert", 7)


def feed(splitter: Splitter, data: bytes, cuts: list[int]) -> list[Line]:
    """The lines of `data`, cut into pieces of these lengths over and over."""
    lines: list[Line] = []
    at, turn = 0, 0
    while at < len(data):
        length = cuts[turn % len(cuts)]
        lines += splitter.feed(data[at : at + length])
        at, turn = at + length, turn + 1
    return lines + splitter.finish()


def written(text: bytes, writer: Writer | None, thread: int = 1) -> list[bytes]:
    """What a process writes for a text of `writer`, as separate writes."""
    return [text] if writer is None else list(pieces(text, opening(MARK, thread, writer), closing(MARK)))


cuts = st.lists(st.integers(1, 40), min_size=1, max_size=5)
texts = st.binary(max_size=60).map(lambda data: data.replace(b"\x1b", b"?"))


@given(texts=st.lists(st.tuples(texts, st.sampled_from([None, ANNA, BERT])), max_size=8), cuts=cuts)
def test_whole_lines_arrive_with_their_writers_however_the_stream_is_cut(texts, cuts):
    stream = b"".join(piece for text, writer in texts for piece in written(text.replace(b"\n", b"") + b"\n", writer))
    lines = feed(Splitter(MARK), stream, cuts)
    assert [(line.text, line.writer) for line in lines] == [(text.replace(b"\n", b""), writer) for text, writer in texts]
    assert all(line.ended and not line.missing for line in lines)


@given(data=st.binary(max_size=300), cuts=cuts)
def test_output_without_marks_is_shown_byte_for_byte(data, cuts):
    assert b"".join(line.raw() for line in feed(Splitter(MARK), data, cuts)) == data


crumbs = st.sampled_from([b"\x1b", b"_", b"m", b"\x1b_m", b"\x1b_mc0ffe", b"\x1b\\", b"x", b"\n", b";"])


@given(noise=st.lists(crumbs, max_size=30), cuts=cuts)
def test_what_only_looks_like_a_mark_is_kept(noise, cuts):
    data = b"".join(noise)
    assert b"".join(line.raw() for line in feed(Splitter(MARK), data, cuts)) == data


speakers = st.sampled_from([(ANNA, 1), (ANNA, 2), (BERT, 3), (None, 0)])


@given(parts=st.lists(st.tuples(speakers, st.sampled_from([b"a", b"bc", b"d\n"])), max_size=20), cuts=cuts)
def test_parts_of_lines_come_together_again_for_each_thread(parts, cuts):
    stream = b"".join(piece for (writer, thread), text in parts for piece in written(text, writer, thread))
    lines = feed(Splitter(MARK), stream, cuts)
    for who in {who for who, _ in parts}:
        mine = b"".join(text for other, text in parts if other == who)
        if who[0] == ANNA:
            continue  # two threads of one actor: their lines are told apart by content only, see below
        assert b"".join(line.raw() for line in lines if line.writer == who[0]) == mine
    anna = sorted(line.raw() for line in lines if line.writer == ANNA)
    wanted: list[bytes] = []
    for thread in (1, 2):
        wanted += b"".join(text for who, text in parts if who == (ANNA, thread)).splitlines(keepends=True)
    assert anna == sorted(wanted)


def test_a_subprocess_between_two_parts_of_a_line_takes_nothing_of_it():
    stream = b"".join([*written(b"half", ANNA), b"from outside\n", *written(b" done\n", ANNA)])
    assert [(line.writer, line.text) for line in Splitter(MARK).feed(stream)] == [(None, b"from outside"), (ANNA, b"half done")]


def test_an_empty_print_ends_a_line_that_went_past_python():
    stream = b"".join([b"x" * 10, *written(b"\n", ANNA), *written(b"END\n", ANNA)])
    assert [line.raw() for line in Splitter(MARK).feed(stream)] == [b"x" * 10 + b"\n", b"END\n"]


def test_another_process_mark_is_plain_text():
    stream = opening("other", 1, ANNA) + b"x\n"
    (line,) = Splitter(MARK).feed(stream)
    assert line.writer is None and line.text == stream[:-1]


@pytest.mark.parametrize("length", [0, 1, SHOWN_BYTES, SHOWN_BYTES + 1, KEPT_BYTES, KEPT_BYTES + 1, 3 * KEPT_BYTES])
@pytest.mark.parametrize("step", [1000, KEPT_BYTES, 10**6])
def test_a_long_line_is_cut_and_says_how_much_is_missing(length, step):
    (line,) = feed(Splitter(MARK), b"x" * length + b"\n", [step])
    assert len(line.text) + line.missing == length and len(line.text) <= KEPT_BYTES
    text, missing = line.shortened()
    assert len(text) + missing == length and len(text) <= SHOWN_BYTES
    shown = decoded(text, missing)
    assert shown.endswith(cut_mark(missing)) == (length > SHOWN_BYTES)
    assert not missing or re.search(rf"\b{missing} more bytes", shown)


def test_memory_for_a_line_without_end_is_bounded():
    splitter = Splitter(MARK)
    for _ in range(200):
        splitter.feed(b"x" * 65536)
    assert sum(map(len, splitter.unfinished())) == KEPT_BYTES
    (line,) = splitter.feed(b"\n")
    assert line.missing == 199 * 65536


def test_lines_of_many_threads_that_never_end_are_bounded():
    splitter = Splitter(MARK)
    stream = b"".join(piece for thread in range(500) for piece in written(b"never", ANNA, thread))
    lines = splitter.feed(stream)
    assert len(splitter.unfinished()) <= 64
    assert len(lines) + len(splitter.finish()) == 500


def test_a_cut_does_not_split_a_character():
    for extra in range(4):
        text = b"y" * extra + "é€😀".encode() * SHOWN_BYTES
        shown, missing = Line(None, text[:KEPT_BYTES], len(text) - len(text[:KEPT_BYTES]), 0, True).shortened()
        assert "\\x" not in decoded(shown) and len(shown) > SHOWN_BYTES - 4
        assert len(shown) + missing == len(text)


def test_invalid_utf_8_is_shown_escaped():
    (line,) = Splitter(MARK).feed(b"caf\xe9 \xf0\x9f\n")
    assert line.raw() == b"caf\xe9 \xf0\x9f\n"
    assert decoded(line.text) == "caf\\xe9 \\xf0\\x9f"


def test_an_unfinished_line_is_shown_once():
    splitter = Splitter(MARK)
    assert not splitter.feed(b"10%") and splitter.has_unshown
    assert splitter.take_unshown() == b"10%" and not splitter.has_unshown
    splitter.feed(b" 20%")
    assert splitter.take_unshown() == b" 20%"
    (line,) = splitter.feed(b" done\n")
    assert line.raw() == b" done\n" and line.text == b"10% 20% done"


def test_the_end_of_the_stream_in_a_line_adds_no_newline():
    splitter = Splitter(MARK)
    splitter.feed(b"prompt> \x1b")
    (line,) = splitter.finish()
    assert line.raw() == b"prompt> \x1b" and not line.ended


@given(text=st.binary(max_size=20_000), thread=st.integers(0, 2**63), name=st.text(max_size=200), rank=st.integers(0, 10**6))
def test_a_piece_is_one_write_for_the_kernel(text, thread, name, rank):
    parts = list(pieces(text, opening(MARK, thread, Writer(name, rank)), closing(MARK)))
    assert all(len(part) <= PIECE_BYTES for part in parts)


@pytest.mark.parametrize("name", ["plain", "with space", "ünïcode", "semi;colon", "[brackets]", "x" * 300, "esc\x1b\\ape\n"])
def test_a_name_survives_or_is_made_harmless(name):
    (line,) = Splitter(MARK).feed(b"".join(written(b"text\n", Writer(name, 3))))
    assert line.text == b"text" and line.writer is not None and line.writer.rank == 3
    kept = "".join(char for char in name if ord(char) >= 32)
    assert kept.startswith(line.writer.name) and line.writer.name
