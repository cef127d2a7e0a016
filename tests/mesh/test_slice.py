"""NDSlice against a model that lists every rank."""

from __future__ import annotations

import pickle
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch._mesh.slice import NDSlice, Slice, iter_ranks, row_major_strides

thorough = settings(max_examples=60)


def listed(offset, sizes, strides):
    """The model: base ranks in row-major order, one by one."""
    places = product(*map(range, sizes))
    return [offset + sum(c * stride for c, stride in zip(place, strides, strict=True)) for place in places]


@st.composite
def valid_parts(draw):
    """offset, sizes and strides that the constructor must take: nested with gaps, dimensions in any order."""
    dims, space = [], 1
    for _ in range(draw(st.integers(0, 4))):
        stride = space * draw(st.integers(1, 3))
        size = draw(st.integers(1, 4))
        dims.append((size, stride))
        space = stride * size
    dims = draw(st.permutations(dims))
    return draw(st.integers(0, 50)), [size for size, _ in dims], [stride for _, stride in dims]


@st.composite
def slices(draw):
    """Valid slices, and what cutting them with steps leaves."""
    offset, sizes, strides = draw(valid_parts())
    whole = NDSlice(offset=offset, sizes=sizes, strides=strides)
    if draw(st.booleans()):
        return whole
    cuts = [range(size)[draw(st.integers(0, size - 1)) :: draw(st.integers(1, 3))] for size in sizes]
    offset += sum(cut.start * stride for cut, stride in zip(cuts, strides, strict=True))
    steps = tuple(cut.step * stride for cut, stride in zip(cuts, strides, strict=True))
    return NDSlice._cut(offset, tuple(map(len, cuts)), steps)


@thorough
@given(valid_parts())
def test_a_slice_tells_its_parts_and_lists_its_ranks_row_major(parts):
    offset, sizes, strides = parts
    s = Slice(offset=offset, sizes=sizes, strides=strides)
    assert (s.offset, s.sizes, s.strides, s.ndim) == (offset, sizes, strides, len(sizes))
    assert list(s) == list(s.ranks()) == listed(offset, sizes, strides)
    assert len(s) == len(list(s))


@thorough
@given(slices())
def test_every_lookup_is_the_inverse_of_the_listing(s):
    ranks = listed(s.offset, s.sizes, s.strides)
    assert len(set(ranks)) == len(ranks)
    for position, (rank, place) in enumerate(zip(ranks, product(*map(range, s.sizes)), strict=True)):
        fresh = NDSlice._cut(*s._key())  # without the ranks that the listing has cached
        assert fresh[position] == fresh.get(position) == s.nditem(place) == rank
        assert fresh.index(rank) == position
        assert fresh.coordinates(rank) == list(place)


@thorough
@given(slices(), st.integers(-5, 400))
def test_a_value_that_is_not_listed_is_nowhere(s, value):
    assert (value in s) == (value in listed(s.offset, s.sizes, s.strides))
    if value not in s:
        for lookup in (s.index, s.coordinates):
            with pytest.raises(ValueError, match=f"value {value} not in Slice"):
                lookup(value)


@thorough
@given(slices(), st.slices(10))
def test_python_slices_give_tuples(s, part):
    assert s[part] == tuple(listed(s.offset, s.sizes, s.strides)[part])


@thorough
@given(slices())
def test_a_slice_survives_pickling(s):
    copy = pickle.loads(pickle.dumps(s))
    assert copy == s
    assert hash(copy) == hash(s)


@thorough
@given(st.lists(st.integers(0, 60), max_size=30))
def test_from_list_covers_the_ranks_in_order_each_once(ranks):
    assert [rank for part in Slice.from_list(ranks) for rank in part] == sorted(set(ranks))


@thorough
@given(st.lists(slices(), max_size=3))
def test_iter_ranks_yields_each_rank_once_in_order_of_appearance(parts):
    assert list(iter_ranks(parts)) == list(dict.fromkeys(rank for part in parts for rank in part))


@thorough
@given(st.lists(st.integers(0, 4), max_size=4))
def test_new_row_major_counts_from_zero(sizes):
    s = Slice.new_row_major(sizes)
    assert s.is_dense
    assert list(s) == list(range(len(s)))


@pytest.mark.parametrize(
    ("ranks", "sizes_and_strides"),
    [
        ([], []),
        ([7], [(7, [1], [1])]),
        ([0, 1, 2, 3], [(0, [4], [1])]),
        ([9, 3, 6], [(3, [3], [3])]),
        ([1, 2, 4, 5, 6], [(1, [2], [1]), (4, [3], [1])]),
        ([3, 3, 4], [(3, [2], [1])]),
    ],
    ids=str,
)
def test_from_list_takes_the_longest_evenly_spaced_run(ranks, sizes_and_strides):
    assert [(s.offset, s.sizes, s.strides) for s in Slice.from_list(ranks)] == sizes_and_strides


@pytest.mark.parametrize(
    ("sizes", "strides", "text"),
    [
        ([2, 2], [1], "invalid dims: expected 2 strides .* got 1"),
        ([2, 2], [2, 3], "nonrectangular shape: stride 3 is not a multiple of stride 2"),
        ([2, 2], [1, 1], "nonunique strides"),
        ([4, 2], [2, 4], "stride 4 must be larger than size of previous space 8"),
        ([1], [0], "strides 1"),
        ([-1], [1], "sizes are at least 0"),
    ],
    ids=str,
)
def test_strides_that_do_not_nest_are_refused(sizes, strides, text):
    with pytest.raises(ValueError, match=text):
        Slice(offset=0, sizes=sizes, strides=strides)


def test_strides_need_not_be_sorted():
    s = Slice(offset=1, sizes=[2, 2, 2], strides=[4, 32, 1])
    assert list(s) == [1, 2, 33, 34, 5, 6, 37, 38]


def test_equal_strides_are_fine_beside_a_dimension_of_one_element():
    assert list(Slice(offset=0, sizes=[1, 3], strides=[1, 1])) == [0, 1, 2]


@pytest.mark.parametrize("sizes", [[], [5], [2, 3], [2, 1, 3]], ids=str)
def test_a_dense_slice_lists_as_a_range(sizes):
    assert Slice.new_row_major(sizes).ranks() == range(len(Slice.new_row_major(sizes)))


def test_a_slice_with_one_even_step_lists_as_a_range():
    assert Slice(offset=1, sizes=[2, 3], strides=[6, 2]).ranks() == range(1, 13, 2)
    assert isinstance(Slice(offset=0, sizes=[2, 2], strides=[4, 1]).ranks(), tuple)


def test_an_empty_slice_lists_nothing():
    assert list(Slice.new_row_major([0, 3])) == []
    assert 0 not in Slice.new_row_major([0, 3])


def test_parts_are_keyword_only():
    with pytest.raises(TypeError):
        Slice(0, [1], [1])


def test_an_index_past_the_end_is_an_index_error_and_a_negative_one_a_type_error():
    s = Slice.new_row_major([2, 3])
    with pytest.raises(IndexError, match=r"index 6 out of range \(len=6\)"):
        s[6]
    with pytest.raises(ValueError, match=r"index 6 out of range \(len=6\)"):
        s.get(6)
    with pytest.raises(TypeError, match=r"negative index -1; .* the last one is index 5"):
        s[-1]


@pytest.mark.parametrize("coords", [[0], [0, 3], [-1, 0], [0, 0, 0]], ids=str)
def test_nditem_refuses_coordinates_outside(coords):
    with pytest.raises(IndexError, match="out of range for sizes"):
        Slice.new_row_major([2, 3]).nditem(coords)


def test_text_is_that_of_the_native_class():
    s = Slice.new_row_major([2, 3])
    assert repr(s) == str(s) == "Slice { offset: 0, sizes: [2, 3], strides: [3, 1] }"


def test_slices_are_equal_by_value():
    assert Slice.new_row_major([2, 3]) == Slice(offset=0, sizes=[2, 3], strides=[3, 1])
    assert len({Slice.new_row_major([2, 3]), Slice.new_row_major([2, 3]), Slice.new_row_major([6])}) == 2
    assert Slice.new_row_major([2]) != "Slice"
    assert NDSlice is Slice


def test_iter_ranks_takes_a_single_slice():
    assert list(iter_ranks(Slice(offset=2, sizes=[3], strides=[2]))) == [2, 4, 6]


def test_row_major_strides_of_nothing():
    assert row_major_strides(()) == ()
