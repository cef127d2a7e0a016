"""The text form of selections."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch._mesh.selection import Selection

thorough = settings(max_examples=60)

ZERO, ONE, TWO = (f"Range(Range({i}, Some({i + 1}), 1), True)" for i in range(3))


def test_constants():
    assert repr(Selection.all()) == "All(True)"
    assert repr(Selection.any()) == "Any(True)"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("*", "All(True)"),
        ("(?)", "Any(True)"),
        ("0", ZERO),
        ("1:3", "Range(Range(1, Some(3), 1), True)"),
        ("1:", "Range(Range(1, None, 1), True)"),
        (":3", "Range(Range(0, Some(3), 1), True)"),
        ("::2", "Range(Range(0, None, 2), True)"),
        ("(1:5:2)", "Range(Range(1, Some(5), 2), True)"),
        ("*, ?", "All(Any(True))"),
        ("(*, 1:3) & (0, *)", "Intersection(All(Range(Range(1, Some(3), 1), True)), Range(Range(0, Some(1), 1), All(True)))"),
        ("0 | 1 & 2", f"Union({ZERO}, Intersection({ONE}, {TWO}))"),
        ("0 & 1 | 2", f"Union(Intersection({ZERO}, {ONE}), {TWO})"),
        ("0 | 1 | 2", f"Union(Union({ZERO}, {ONE}), {TWO})"),
        ("((0) | (1)) & (2)", f"Intersection(Union({ZERO}, {ONE}), {TWO})"),
        ("(0 | 1, *)", f"Union({ZERO}, {ONE.replace('True', 'All(True)')})"),
        ("((0 | 1), *)", f"Union({ZERO.replace('True', 'All(True)')}, {ONE.replace('True', 'All(True)')})"),
        ("((*, 0), 1)", f"All({ZERO.replace('True', ONE)})"),
    ],
)
def test_text_is_parsed_as_the_peer_does(text, expected):
    assert repr(Selection.from_string(text)) == expected


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("this is not valid selection syntax", "character 0, before 'this is"),
        ("", "character 0, before ''"),
        ("()", r"expected .*\n  where: character 1, before '\)'"),
        ("(*,)", "character 3"),
        ("(0", r"expected '\)'"),
        ("(0) extra", "character 3, before 'extra'"),
        ("* *", r"expected '&', '\|' or the end\n  where: character 2"),
        ("1 2", "character 2"),
        ("(-1)", "character 1, before '-1"),
        ("1:3:0", "a step is at least 1"),
        ("[1, 2]", "only numbers and"),
    ],
)
def test_other_text_is_refused_with_its_place_and_the_right_form(text, where):
    with pytest.raises(ValueError, match=f"(?s)invalid selection .*{where}") as caught:
        Selection.from_string(text)
    assert "next:  write one part per dimension" in str(caught.value)


@thorough
@given(st.text(alphabet="012*?:,&|() x", max_size=12))
def test_any_text_parses_or_is_a_value_error(text):
    try:
        selection = Selection.from_string(text)
    except ValueError:
        return
    assert selection == Selection.from_string(text.replace(" ", "  ").replace(",", " , "))
    assert Selection.from_string(f"(({text}))") == selection


def test_selections_are_values():
    one = Selection.from_string("(*, 1:3)")
    assert one == pickle.loads(pickle.dumps(one)) == Selection.from_string("(*,1:3:1)")
    assert len({one, Selection.from_string("*,1:3"), Selection.all()}) == 2
    assert Selection.all() != "All(True)"
