"""What every mesh can do with its dimensions, on a mesh that only knows its base ranks."""

from __future__ import annotations

import operator
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch._mesh.mesh import MeshTrait, ShapeExt
from monarch._mesh.shape import Extent, Point, Shape, Slice

thorough = settings(max_examples=60)


class RankMesh(MeshTrait):
    """The smallest mesh."""

    def __init__(self, shape):
        self.shape = shape

    @property
    def _ndslice(self):
        return self.shape.ndslice

    @property
    def _labels(self):
        return self.shape.labels

    def _new_with_shape(self, shape):
        return RankMesh(shape)

    def ranks(self):
        return self.shape.ranks()


def mesh(**sizes):
    return RankMesh(Shape(list(sizes), Slice.new_row_major(list(sizes.values()))))


MESH = mesh(hosts=4, gpus=6)


def places(size):
    return st.integers(0, size - 1) | st.slices(size).filter(lambda part: range(size)[part] and (part.step or 1) > 0)


@thorough
@given(st.permutations(["a", "b", "c"]), st.data())
def test_slice_picks_the_same_elements_in_any_order_of_keywords(order, data):
    sizes = {"a": 2, "b": 3, "c": 4}
    picks = {label: data.draw(places(sizes[label]) | st.none()) for label in order}
    given_ = {label: part for label, part in picks.items() if part is not None}
    kept = {label: range(size)[picks.get(label) or slice(None)] for label, size in sizes.items() if not isinstance(picks[label], int)}
    model = [
        12 * place["a"] + 4 * place["b"] + place["c"]
        for place in (
            dict(zip("abc", values, strict=True))
            for values in product(*([picks[k]] if isinstance(picks[k], int) else list(kept[k]) for k in "abc"))
        )
    ]
    cut = mesh(**sizes).slice(**given_)
    assert cut.ranks() == model
    assert cut.sizes == {label: len(part) for label, part in kept.items()}


@thorough
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_split_and_rename_leave_the_elements_where_they_were(sizes, data):
    whole = mesh(**{f"d{i}": size for i, size in enumerate(sizes)})
    part = whole.slice(d0=slice(0, None, 2))
    inner = data.draw(st.sampled_from([n for n in range(1, 5) if part.size("d0") % n == 0]))
    cut = part.split(d0=("x", "y"), y=inner)
    assert cut.ranks() == part.ranks()
    assert list(cut.sizes.items())[:2] == [("x", part.size("d0") // inner), ("y", inner)]
    assert part.rename(d0="z").ranks() == part.ranks()


@thorough
@given(st.lists(st.integers(1, 4), max_size=3))
def test_an_index_is_a_row_major_rank_or_one_coordinate_per_dimension(sizes):
    whole = mesh(**{f"d{i}": size for i, size in enumerate(sizes)})
    for rank, place in enumerate(product(*map(range, sizes))):
        from_end = tuple(coord - size for coord, size in zip(place, sizes, strict=True))
        for index in (rank, rank - len(whole), place, from_end):
            one = whole[index]
            assert (one.ranks(), one.sizes, type(one)) == ([rank], {}, RankMesh)


def test_an_index_counts_inside_a_cut_mesh():
    cut = MESH.slice(hosts=slice(1, None), gpus=slice(0, 6, 2))
    assert [cut[i].ranks()[0] for i in range(len(cut))] == cut.ranks() == [6, 8, 10, 12, 14, 16, 18, 20, 22]
    assert cut[-1].ranks() == cut[2, 2].ranks() == cut[-1, -1].ranks() == [22]


@pytest.mark.parametrize(
    ("index", "kind", "text"),
    [
        (24, IndexError, r"rank 24 out of range for \{hosts: 4, gpus: 6\}; it goes from -24 to 23"),
        (-25, IndexError, "rank -25 out of range"),
        ((0, 6), IndexError, r"coordinate 'gpus' 6 out of range .* -6 to 5"),
        ((0,), IndexError, r"got 1 coordinates for the 2 dimensions of \{hosts: 4, gpus: 6\}"),
        ((), IndexError, "got 0 coordinates"),
        (True, TypeError, "is an integer, not True"),
        ((0, False), TypeError, "coordinate 'gpus' .* not False"),
        (1.0, TypeError, "not 1.0"),
        ("gpus", TypeError, "not 'gpus'"),
        (slice(0, 2), TypeError, r"mesh.slice\(gpus=slice\(0, 2\)\) selects a part"),
    ],
    ids=str,
)
def test_an_index_that_means_no_element_is_refused(index, kind, text):
    with pytest.raises(kind, match=text):
        MESH[index]


def test_a_mesh_without_dimensions_has_one_element():
    one = MESH[7]
    assert (len(one), one.size(), one.extent, one[0].ranks(), one[-1].ranks(), one[()].ranks()) == (1, 1, Extent([], []), [7], [7], [7])
    with pytest.raises(IndexError, match=r"rank 1 out of range for \{\}"):
        one[1]


@pytest.mark.parametrize("loop", [iter, list, lambda mesh: [*mesh]], ids=["iter", "list", "star"])
def test_indexing_does_not_make_a_mesh_iterable(loop):
    with pytest.raises(TypeError, match=r"'RankMesh' object is not iterable; write \[mesh\[i\] for i in range\(len\(mesh\)\)\]"):
        loop(MESH)
    with pytest.raises(TypeError, match="not reversible"):
        reversed(MESH)
    with pytest.raises(TypeError, match="not iterable"):
        operator.contains(MESH, 3)


@pytest.mark.parametrize(
    ("where", "kind", "text"),
    [
        ({"gpu": 1}, TypeError, r"Shape does not have dimension labeled 'gpu', only \{hosts: 4, gpus: 6\}; did you mean 'gpus'"),
        ({"gpus": 6}, IndexError, r"index out of range: gpus=6 in .* the last is 5"),
        ({"gpus": -1}, IndexError, r"index out of range: gpus=-1 .* is negative; the same place from the front is gpus=5"),
        ({"gpus": -7}, IndexError, r"gpus=-7 in \{hosts: 4, gpus: 6\} is negative$"),
        ({"gpus": slice(6, 9)}, ValueError, "selects nothing"),
        ({"gpus": slice(None, None, -1)}, ValueError, "step below 1"),
        ({"gpus": "all"}, TypeError, r"gpus='all' is not an index; write gpus=0, or mesh.slice\(gpus=slice\(0, 2\)\)"),
    ],
    ids=str,
)
def test_slice_refuses_what_is_not_there(where, kind, text):
    with pytest.raises(kind, match=text):
        MESH.slice(**where)


def test_a_dimension_may_be_named_like_a_parameter():
    odd = mesh(self=2, shape=3)
    assert odd.slice(self=1, shape=2).ranks() == [5]
    assert odd.rename(self="a").split(shape=("b",)).sizes == {"a": 2, "b": 3}


def test_slice_takes_a_point():
    assert MESH.slice(**Point(9, MESH.extent)).ranks() == [9]


def test_the_order_of_keywords_does_not_matter_for_steps():
    small = mesh(a=2, b=3)
    assert small.slice(b=slice(0, 3, 2), a=1).ranks() == small.slice(a=1, b=slice(0, 3, 2)).ranks() == [3, 5]


def test_shape_ext_slices_a_bare_shape():
    assert ShapeExt.slice(MESH.shape, hosts=1) == MESH.shape.at("hosts", 1)


def test_flatten_selects_coordinator_and_others():
    flat = MESH.flatten("rank")
    assert flat.sizes == {"rank": 24}
    assert flat.slice(rank=0).ranks() == [0]
    assert flat.slice(rank=slice(1, None)).ranks() == list(range(1, 24))
    assert MESH.slice(hosts=2).flatten("r").ranks() == list(range(12, 18))
    assert MESH[3].flatten("r").sizes == {"r": 1}


def test_a_sparse_mesh_is_not_flattened():
    with pytest.raises(ValueError, match=r"^cannot flatten sparse mesh \{hosts: 4\}: strides \[6\] leave gaps; flatten first, then slice"):
        MESH.slice(gpus=0).flatten("r")


def test_split_infers_one_size_of_each_dimension():
    assert MESH.split(hosts=("dp", "pp"), pp=2).sizes == {"dp": 2, "pp": 2, "gpus": 6}
    assert MESH.split(gpus=["tp", "x", "ep"], tp=3, ep=1, hosts=("h",)).sizes == {"h": 4, "tp": 3, "x": 2, "ep": 1}
    assert MESH.split(gpus=("a", "b"), a=2, b=3).sizes == {"hosts": 4, "a": 2, "b": 3}
    assert MESH.split(hosts=("hosts", "lanes"), lanes=2).sizes == {"hosts": 2, "lanes": 2, "gpus": 6}


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({"gpus": "tp"}, r"gpus='tp' must be a sequence of names; write gpus=\('outer', 'inner'\)"),
        ({"gpus": 3}, "must be a sequence of names"),
        ({"gpus": ("a", "b"), "a": "2"}, "a='2': no dimension 'a' in"),
        ({"gpus": ("a", "b"), "a": True}, "a=True"),
        ({"gpus": ("a", "b"), "a": 0}, "at least 1"),
        ({"gpu": ("a", "b")}, r"no dimension 'gpu' in \{hosts: 4, gpus: 6\}; did you mean 'gpus'\?"),
        ({"gpus": ("a", "b")}, r"cannot infer the sizes of \['a', 'b'\] from 'gpus' of size 6; give all but one, as b=2"),
        ({"gpus": ("a", "b"), "a": 4}, "cannot split 'gpus' of size 6 .* multiply to 4"),
        ({"gpus": ("a", "b"), "a": 2, "b": 2}, "multiply to 4"),
        ({"gpus": ()}, "cannot split 'gpus' of size 6 into"),
        ({"c": 2}, r"sizes for \['c'\], but no dimension of"),
        ({"gpus": ("hosts",)}, r"duplicate labels in \['hosts', 'hosts'\]"),
        ({"gpus": ("a", "a"), "a": 2}, "duplicate labels"),
    ],
    ids=str,
)
def test_split_refuses_what_does_not_add_up(parts, text):
    with pytest.raises(ValueError, match=text):
        MESH.split(**parts)


def test_rename_keeps_the_order_and_can_swap():
    assert list(MESH.rename(hosts="h").sizes) == ["h", "gpus"]
    assert MESH.rename(hosts="gpus", gpus="hosts").sizes == {"gpus": 4, "hosts": 6}
    with pytest.raises(ValueError, match="duplicate labels"):
        MESH.rename(hosts="gpus")
    with pytest.raises(ValueError, match=r"no dimension 'host' in .* did you mean 'hosts'"):
        MESH.rename(host="h")


def test_size_multiplies_the_dimensions_asked_for():
    assert (MESH.size(), MESH.size("gpus"), MESH.size(["hosts", "gpus"]), MESH.size(()), len(MESH)) == (24, 6, 24, 1, 24)
    assert MESH.sizes == {"hosts": 4, "gpus": 6}
    assert MESH.extent == Extent(["hosts", "gpus"], [4, 6])
    for dim in ("gpu", ["hosts", "gpu"]):
        with pytest.raises(KeyError, match=r"Dimension 'gpu' not found in .* did you mean 'gpus'"):
            MESH.size(dim)


def test_a_mesh_needs_its_three_parts():
    with pytest.raises(TypeError, match="abstract"):
        MeshTrait()
