"""Extent, Point, Shape and Region against a model that maps each coordinate to its base rank."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch._mesh.shape import DimensionError, Extent, Point, Region, Shape, Slice

thorough = settings(max_examples=60)

LABELS = ["hosts", "gpus", "lanes"]


def row_major(**sizes):
    return Shape(list(sizes), Slice.new_row_major(list(sizes.values())))


def model_of(shape):
    """{coordinates: base rank}, listed one by one."""
    ranks = iter(range(len(shape)))
    return {place: next(ranks) for place in product(*map(range, shape.extent.sizes))}


def listing_of(shape):
    """What `shape` says, in the form of the model."""
    return dict(zip(product(*map(range, shape.extent.sizes)), shape.ranks(), strict=True))


@st.composite
def cuts(draw):
    """A row-major shape and a list of cuts (label, int | slice) that leave something."""
    shape = row_major(**{label: draw(st.integers(1, 5)) for label in LABELS[: draw(st.integers(0, 3))]})
    left = {label: range(size) for label, size in shape.extent.items()}
    steps = []
    for _ in range(draw(st.integers(0, 4)) if left else 0):
        label = draw(st.sampled_from(sorted(left)))
        size = len(left[label])
        if draw(st.booleans()):
            part = draw(st.slices(size).filter(lambda part, size=size: range(size)[part] and (part.step or 1) > 0))
            left[label] = left[label][part]
        else:
            part = draw(st.integers(0, size - 1))
            del left[label]
        steps.append((label, part))
        if not left:
            break
    return shape, steps


@thorough
@given(cuts())
def test_at_and_select_compose_in_any_order(cut):
    shape, steps = cut
    labels, model = shape.labels, model_of(shape)
    for label, part in steps:
        dim = labels.index(label)
        if isinstance(part, slice):
            kept = range(max(place[dim] for place in model) + 1)[part]
            model = {(*p[:dim], kept.index(p[dim]), *p[dim + 1 :]): rank for p, rank in model.items() if p[dim] in kept}
            shape = shape.select(label, part)
        else:
            model = {(*p[:dim], *p[dim + 1 :]): rank for p, rank in model.items() if p[dim] == part}
            labels = [*labels[:dim], *labels[dim + 1 :]]
            shape = shape.at(label, part)
    assert shape.labels == labels
    assert listing_of(shape) == model
    for place, rank in model.items():
        assert shape.coordinates(rank) == dict(zip(labels, place, strict=True))
        assert tuple(shape.region.point_of_base_rank(rank).values()) == place
    copy = pickle.loads(pickle.dumps(shape))
    assert copy == shape
    assert hash(copy) == hash(shape)


@thorough
@given(st.dictionaries(st.sampled_from(LABELS), st.integers(1, 5)))
def test_points_count_row_major(sizes):
    extent = Extent(list(sizes), list(sizes.values()))
    places = list(product(*map(range, sizes.values())))
    assert [tuple(Point(rank, extent).values()) for rank in range(extent.nelements)] == places
    for outside in (-1, extent.nelements):
        with pytest.raises(ValueError, match=f"rank {outside} out of range for {{"):
            extent.coordinates(outside)


@pytest.mark.parametrize(
    "value",
    [
        Extent(["a", "b"], [2, 3]),
        Extent([], []),
        Point(4, Extent(["a", "b"], [2, 3])),
        row_major(a=2, b=3),
        row_major(a=2, b=3).select("b", slice(0, 3, 2)),
        Shape.unity(),
        row_major(a=2, b=3).region,
    ],
    ids=repr,
)
def test_everything_is_a_value_that_survives_pickling(value):
    copy = pickle.loads(pickle.dumps(value))
    assert copy == value
    assert hash(copy) == hash(value)
    assert value != object()


def test_pickles_stay_small():
    assert len(pickle.dumps(Point(4, Extent(["hosts", "gpus"], [2, 3])), protocol=5)) < 110


class TestExtent:
    extent = Extent(["hosts", "gpus"], [2, 3])

    def test_is_a_mapping_from_label_to_size(self):
        e = self.extent
        assert isinstance(e, Mapping)
        assert dict(e) == dict(**e) == {"hosts": 2, "gpus": 3}
        assert (e.labels, e.sizes, e.nelements, len(e)) == (["hosts", "gpus"], [2, 3], 6, 2)
        assert (list(e), list(e.keys()), list(e.values())) == (["hosts", "gpus"], ["hosts", "gpus"], [2, 3])
        assert "gpus" in e
        assert "rack" not in e
        assert e.get("rack") is None
        assert e.get("gpus") == 3

    def test_text_is_that_of_the_native_class(self):
        assert repr(self.extent) == str(self.extent) == "{hosts: 2, gpus: 3}"
        assert repr(Extent([], [])) == "{}"
        assert Extent([], []).nelements == 1

    @pytest.mark.parametrize("kind", [ValueError, KeyError])
    def test_a_missing_dimension_is_a_value_error_and_a_key_error_with_a_plain_text(self, kind):
        with pytest.raises(kind, match=r"^Dimension 'gpu' not found in \{hosts: 2, gpus: 3\}; did you mean 'gpus'\?$"):
            self.extent["gpu"]

    def test_the_error_of_a_missing_dimension_survives_pickling(self):
        error = pickle.loads(pickle.dumps(DimensionError("x", self.extent)))
        assert str(error) == "Dimension 'x' not found in {hosts: 2, gpus: 3}"

    def test_a_key_that_is_no_string_is_missing_like_any_other(self):
        assert 3 not in self.extent
        with pytest.raises(KeyError, match="Dimension 3 not found"):
            self.extent[3]

    def test_equals_extents_only_and_order_counts(self):
        assert self.extent == Extent(("hosts", "gpus"), (2, 3))
        assert self.extent != {"hosts": 2, "gpus": 3}
        assert self.extent != Extent(["gpus", "hosts"], [3, 2])

    def test_lengths_must_match(self):
        with pytest.raises(ValueError, match=r"label/sizes dimension mismatch: 1 != 2"):
            Extent(["a"], [1, 2])

    def test_labels_are_unique_and_no_plain_string(self):
        with pytest.raises(ValueError, match=r"duplicate labels in \['a', 'a'\]"):
            Extent(["a", "a"], [1, 2])
        with pytest.raises(TypeError, match=r"write \['ab'\]"):
            Extent("ab", [1, 2])

    def test_a_size_is_not_negative(self):
        with pytest.raises(ValueError, match="at least 0"):
            Extent(["a"], [-1])

    def test_region_covers_everything(self):
        assert self.extent.region == Region(["hosts", "gpus"], Slice.new_row_major([2, 3]))


class TestPoint:
    extent = Extent(["hosts", "gpus"], [2, 3])
    point = Point(4, extent)

    def test_is_a_mapping_from_label_to_coordinate(self):
        p = self.point
        assert isinstance(p, Mapping)
        assert dict(p) == dict(**p) == dict(p.items()) == {"hosts": 1, "gpus": 1}
        assert (p.rank, p.extent, len(p), list(p)) == (4, self.extent, 2, ["hosts", "gpus"])
        assert p.size("gpus") == 3
        assert p.get("rack", 7) == 7
        assert "gpus" in p
        assert "rack" not in p

    @pytest.mark.parametrize("kind", [ValueError, KeyError])
    def test_a_missing_dimension_is_a_value_error_and_a_key_error(self, kind):
        for look in (self.point.__getitem__, self.point.size):
            with pytest.raises(kind, match=r"Dimension 'host' not found in .* did you mean 'hosts'"):
                look("host")

    def test_text_shows_coordinate_and_size(self):
        assert repr(self.point) == str(self.point) == "{'hosts': 1/2, 'gpus': 1/3}"
        assert repr(Point(0, Extent([], []))) == "{}"

    def test_a_rank_outside_is_noticed_on_use(self):
        outside = Point(6, self.extent)
        assert outside.rank == 6
        for use in (lambda: outside["gpus"], lambda: dict(outside), lambda: str(outside)):
            with pytest.raises(ValueError, match=r"rank 6 out of range for \{hosts: 2, gpus: 3\} \(nelements=6\)"):
                use()

    def test_equals_points_of_the_same_rank_and_extent(self):
        assert self.point == Point(4, Extent(["hosts", "gpus"], [2, 3]))
        assert self.point != Point(4, Extent(["hosts", "gpus"], [3, 3]))
        assert self.point != Point(3, self.extent)
        assert self.point != {"hosts": 1, "gpus": 1}
        assert {self.point: "x"}[Point(4, self.extent)] == "x"

    def test_is_read_only(self):
        with pytest.raises(AttributeError):
            self.point.rank = 3

    def test_a_shape_in_place_of_an_extent_is_refused(self):
        with pytest.raises(TypeError, match=r"needs an Extent, not Shape; .* \.extent"):
            Point(0, Shape.unity())


class TestShape:
    shape = row_major(label0=2, label1=3)

    def test_tells_its_parts(self):
        s = self.shape
        assert (s.labels, s.ndslice, len(s)) == (["label0", "label1"], Slice.new_row_major([2, 3]), 6)
        assert s.ranks() == [0, 1, 2, 3, 4, 5]
        assert s.extent == Extent(["label0", "label1"], [2, 3])
        assert s.region.as_shape() == s

    def test_text_is_that_of_the_native_class(self):
        assert str(self.shape) == "{label0=2,label1=3}"
        text = 'Shape { labels: ["label0", "label1"], slice: Slice { offset: 0, sizes: [2, 3], strides: [3, 1] } }'
        assert repr(self.shape) == text

    def test_at_drops_the_dimension_and_moves_the_offset(self):
        assert self.shape.at("label0", 1) == Shape(["label1"], Slice(offset=3, sizes=[3], strides=[1]))
        assert self.shape.index(label1=2, label0=1) == Shape([], Slice(offset=5, sizes=[], strides=[]))

    @pytest.mark.parametrize(
        ("index", "kind", "text"),
        [(2, ValueError, "index 2 out of range for dimension 'label0' in"), (-1, OverflowError, "is negative; it counts from 0 to 1")],
    )
    def test_at_refuses_places_outside(self, index, kind, text):
        with pytest.raises(kind, match=text):
            self.shape.at("label0", index)

    def test_select_clamps_as_lists_do(self):
        assert self.shape.select("label1", slice(-2, 99)) == Shape(["label0", "label1"], Slice(offset=1, sizes=[2, 2], strides=[3, 1]))

    def test_select_takes_a_step_on_an_inner_dimension(self):
        assert self.shape.select("label1", slice(0, 3, 2)).ranks() == [0, 2, 3, 5]

    @pytest.mark.parametrize("part", [slice(2, 1), slice(9, None), slice(0, 0)], ids=str)
    def test_select_of_nothing_is_refused(self, part):
        with pytest.raises(ValueError, match=r"selects nothing of dimension 'label1' in \{label0: 2, label1: 3\}"):
            self.shape.select("label1", part)

    @pytest.mark.parametrize("step", [0, -1])
    def test_select_refuses_a_step_below_one(self, step):
        with pytest.raises(ValueError, match=r"step below 1; .* use a positive step"):
            self.shape.select("label1", slice(None, None, step))

    def test_select_refuses_an_integer_and_names_at(self):
        with pytest.raises(TypeError, match=r"at\(\) takes one index"):
            self.shape.select("label1", 1)

    def test_an_unknown_label_names_the_known_and_the_nearest(self):
        for look in (lambda: self.shape.at("label", 0), lambda: self.shape.select("label", slice(0, 1))):
            with pytest.raises(ValueError, match=r"Dimension 'label' not found in \{label0: 2, label1: 3\}; did you mean 'label"):
                look()

    def test_coordinates_of_a_rank_elsewhere_are_refused(self):
        with pytest.raises(ValueError, match="value 9 not in"):
            self.shape.coordinates(9)

    def test_there_is_one_unique_label_per_dimension(self):
        with pytest.raises(ValueError, match="label slice dimension mismatch: 1 != 2"):
            Shape(["a"], Slice.new_row_major([2, 3]))
        with pytest.raises(ValueError, match="duplicate labels"):
            Shape(["a", "a"], Slice.new_row_major([2, 3]))
        with pytest.raises(TypeError, match=r"Slice.new_row_major\(sizes\)"):
            Shape(["a"], [2])

    def test_unity_has_one_element_and_no_dimension(self):
        assert (len(Shape.unity()), Shape.unity().ranks(), str(Shape.unity())) == (1, [0], "{}")


class TestRegion:
    region = row_major(hosts=4, gpus=2).select("hosts", slice(1, None, 2)).region

    def test_tells_its_parts(self):
        assert self.region.labels == ["hosts", "gpus"]
        assert self.region.slice() == Slice(offset=2, sizes=[2, 2], strides=[4, 1])
        assert len(self.region) == 4

    def test_points_are_renumbered_in_the_region(self):
        assert self.region.point_of_base_rank(7) == Point(3, Extent(["hosts", "gpus"], [2, 2]))

    def test_a_base_rank_elsewhere_is_refused(self):
        with pytest.raises(ValueError, match=r"base rank 4 not in region Region \{ labels: \[\"hosts\", \"gpus\"\]"):
            self.region.point_of_base_rank(4)
