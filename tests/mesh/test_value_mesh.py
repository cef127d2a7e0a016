"""ValueMesh: values by rank, by coordinate, by name; decoded once, late, and shared by slices."""

from __future__ import annotations

import pickle
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch._mesh.shape import Extent, Point, Shape, Slice
from monarch._mesh.value_mesh import LazySlot, ValueMesh

thorough = settings(max_examples=60)


def shape_of(**sizes):
    return Shape(list(sizes), Slice.new_row_major(list(sizes.values())))


SHAPE = shape_of(hosts=2, gpus=3)
VALUES = [f"v{rank}" for rank in range(6)]


def values_mesh():
    return ValueMesh(SHAPE, VALUES)


class Decoder:
    """Slots that note which ranks were decoded, in order."""

    def __init__(self, shape, *, broken=()):
        self.log = []
        self.error = ImportError("no module named 'gone'")
        self.broken = broken
        self.mesh = ValueMesh._from_lazy(shape, [LazySlot(lambda rank=rank: self.decode(rank)) for rank in range(len(shape))])

    def decode(self, rank):
        self.log.append(rank)
        if rank in self.broken:
            raise self.error
        return [rank]


@thorough
@given(st.lists(st.integers(1, 4), max_size=3))
def test_every_way_to_a_value_finds_the_same_one(sizes):
    named = {f"d{i}": size for i, size in enumerate(sizes)}
    shape = shape_of(**named)
    mesh = ValueMesh(shape, [object() for _ in range(len(shape))])
    for rank, place in enumerate(product(*map(range, sizes))):
        coords = dict(zip(named, place, strict=True))
        value = mesh.values()[rank]
        found = [mesh[rank], mesh[rank - len(mesh)], mesh[place], mesh[coords], mesh[Point(rank, mesh.extent)]]
        found += [mesh.get(rank), mesh.item(**coords), mesh.slice(**coords).item(), mesh.flatten("r").item(r=rank)]
        assert all(one is value for one in found)
    assert [(point.rank, value) for point, value in mesh] == list(enumerate(mesh.values()))


@thorough
@given(st.data())
def test_parts_hold_the_selected_values_in_order(data):
    starts = {"hosts": data.draw(st.integers(0, 1)), "gpus": data.draw(st.integers(0, 2))}
    step = data.draw(st.integers(1, 3))
    picks = {label: slice(start, None, step) for label, start in starts.items()}
    hosts, gpus = range(2)[picks["hosts"]], range(3)[picks["gpus"]]
    expected = [VALUES[3 * host + gpu] for host in hosts for gpu in gpus]
    part = values_mesh().slice(**picks)
    assert part.values() == expected
    assert part.flatten("r").values() == expected
    assert part.rename(hosts="h").split(h=("a", "b"), b=1).values() == expected
    assert values_mesh()[picks].values() == expected
    assert [dict(point) for point, _ in part] == [{"hosts": h, "gpus": g} for h in range(len(hosts)) for g in range(len(gpus))]
    again = part.slice(gpus=-1 % len(gpus))
    assert again.values() == expected[len(gpus) - 1 :: len(gpus)]


def test_points_are_renumbered_whatever_the_shape_was_cut_from():
    mesh = ValueMesh(SHAPE.select("gpus", slice(1, 3)).at("hosts", 1), ["x", "y"])
    assert list(mesh) == [(Point(0, Extent(["gpus"], [2])), "x"), (Point(1, Extent(["gpus"], [2])), "y")]
    assert mesh.flatten("r").slice(r=1).item() == "y"


def test_an_index_that_names_fewer_dimensions_gives_a_mesh():
    part = values_mesh()[{"gpus": -1}]
    assert isinstance(part, ValueMesh)
    assert (part.sizes, part.values()) == ({"hosts": 2}, ["v2", "v5"])
    assert values_mesh()[{}].values() == VALUES
    assert ValueMesh(Shape.unity(), ["only"])[{}] == "only"


@pytest.mark.parametrize(
    ("index", "kind", "text"),
    [
        (6, IndexError, r"rank 6 out of range for \{hosts: 2, gpus: 3\}; it goes from -6 to 5"),
        (-7, IndexError, "rank -7 out of range"),
        ((1, 3), IndexError, "coordinate 'gpus' 3 out of range"),
        ((1,), IndexError, "got 1 coordinates for the 2 dimensions"),
        ({"gpus": 3}, IndexError, "coordinate 'gpus' 3 out of range"),
        ({"gpu": 0}, KeyError, "^Dimension 'gpu' not found in .* did you mean 'gpus'"),
        ({"gpu": slice(0, 1)}, KeyError, "Dimension 'gpu' not found"),
        ({"gpus": True}, TypeError, "not True"),
        (True, TypeError, "not True"),
        ("gpus", TypeError, "not 'gpus'"),
        (slice(0, 2), TypeError, r"mesh.slice\(gpus=slice\(0, 2\)\) selects a part"),
    ],
    ids=str,
)
def test_an_index_that_means_no_value_is_refused(index, kind, text):
    with pytest.raises(kind, match=text):
        values_mesh()[index]


def test_item_needs_one_integer_per_dimension():
    mesh = values_mesh()
    assert mesh.item(gpus=2, hosts=1) == "v5"
    with pytest.raises(KeyError, match=r"^item\(\) needs one integer per dimension of \{hosts: 2, gpus: 3\}; missing 'gpus'$") as missing:
        mesh.item(hosts=1)
    assert missing.value.args[0] == "gpus"
    with pytest.raises(KeyError, match=r"^item has extra dimensions: \['rack'\]; it takes"):
        mesh.item(hosts=1, gpus=0, rack=0)
    for place in (3, -1):
        with pytest.raises(IndexError, match="index out of range"):
            mesh.item(hosts=0, gpus=place)
    with pytest.raises(TypeError, match=r"gpus=slice\(0, 1, None\) is not an index; write gpus=0"):
        mesh.item(hosts=0, gpus=slice(0, 1))


def test_get_counts_from_zero():
    assert values_mesh().get(5) == "v5"
    with pytest.raises(ValueError, match=r"index 6 out of range \(len=6\)"):
        values_mesh().get(6)
    with pytest.raises(OverflowError, match=r"rank -1 is negative; .* values\[-1\]"):
        values_mesh().get(-1)


def test_there_is_one_value_per_rank():
    for values in (VALUES[:1], [*VALUES, "more"]):
        with pytest.raises(ValueError, match=f"invalid value mesh: expected 6 ranks, but contains {len(values)} ranks"):
            ValueMesh(SHAPE, values)
    with pytest.raises(TypeError, match=r"needs a list of values, not tuple; write list\(values\)"):
        ValueMesh(SHAPE, tuple(VALUES))
    with pytest.raises(ValueError, match="expected 6 ranks, but contains 0 ranks"):
        ValueMesh._from_lazy(SHAPE, [])


def test_from_indexed_takes_any_order_and_the_last_of_a_rank():
    shape = shape_of(x=3)
    assert ValueMesh.from_indexed(shape, [(2, "c"), (0, "old"), (1, "b"), (0, "a")]).values() == ["a", "b", "c"]
    with pytest.raises(ValueError, match="expected 3 ranks, but contains 2 ranks"):
        ValueMesh.from_indexed(shape, [(0, "a"), (2, "c")])
    for rank in (3, -1):
        with pytest.raises(ValueError, match=rf"rank {rank} out of range for {{x: 3}} \(len=3\)"):
            ValueMesh.from_indexed(shape, [(0, "a"), (1, "b"), (rank, "c")])


def test_the_mesh_keeps_its_own_list():
    values = list(VALUES)
    mesh = ValueMesh(SHAPE, values)
    values[0] = mesh.values()[1] = "changed"
    assert mesh.values() == VALUES


def test_looking_decodes_one_value_once():
    decoder = Decoder(SHAPE)
    first = decoder.mesh[4]
    assert decoder.log == [4]
    assert decoder.mesh.get(4) is decoder.mesh.item(hosts=1, gpus=1) is decoder.mesh[{"hosts": 1, "gpus": 1}] is first
    assert decoder.mesh.values() == [[rank] for rank in range(6)]
    assert decoder.log == [4, 0, 1, 2, 3, 5]


def test_cutting_neither_decodes_nor_forgets():
    decoder = Decoder(SHAPE)
    mesh = decoder.mesh
    parts = [mesh.slice(hosts=1), mesh.flatten("r").slice(r=slice(3, None)), mesh.rename(hosts="h").slice(h=1), mesh[{"hosts": 1}]]
    parts.append(mesh.split(hosts=("a", "b"), b=1).slice(a=1, b=0))
    assert decoder.log == []
    found = [part.values() for part in parts]
    assert decoder.log == [3, 4, 5]
    assert all(one is other for values in found for one, other in zip(values, found[0], strict=True))


def test_iteration_decodes_as_it_goes():
    decoder = Decoder(SHAPE)
    pairs = iter(decoder.mesh)
    assert decoder.log == []
    assert next(pairs) == (Point(0, SHAPE.extent), [0])
    assert decoder.log == [0]


def test_a_value_that_cannot_be_decoded_raises_the_same_error_at_each_look_and_spares_the_others():
    decoder = Decoder(SHAPE, broken={2})
    assert decoder.mesh[1] == [1]
    lengths = []
    for look in (lambda: decoder.mesh[2], lambda: decoder.mesh.slice(gpus=2).values(), decoder.mesh.values):
        with pytest.raises(ImportError, match="no module named 'gone'") as caught:
            look()
        assert caught.value is decoder.error
        lengths.append(len(caught.traceback))
    assert decoder.log.count(2) == 1
    assert max(lengths) < min(lengths) + 3, "each look has lengthened the traceback"


def test_text_is_that_of_the_peer():
    assert repr(ValueMesh(shape_of(gpus=2), [1, 2])) == "ValueMesh({gpus: 2}):\n  (({'gpus': 0/2}, 1), ({'gpus': 1/2}, 2))"
    assert repr(ValueMesh(Shape.unity(), [7])) == "ValueMesh({}):\n  (({}, 7),)"
    long = repr(ValueMesh(shape_of(a=2), ["x" * 40, "y" * 40])).splitlines()
    assert long == ["ValueMesh({a: 2}):", f"  (({{'a': 0/2}}, '{'x' * 40}'),", f"   ({{'a': 1/2}}, '{'y' * 40}'))"]


@pytest.mark.parametrize(
    "mesh", [values_mesh(), Decoder(SHAPE).mesh, values_mesh().slice(gpus=slice(0, 3, 2))], ids=["plain", "lazy", "cut"]
)
def test_pickling_carries_shape_and_values(mesh):
    copy = pickle.loads(pickle.dumps(mesh))
    assert list(copy) == list(mesh)


def test_equality_is_identity():
    mesh = values_mesh()
    assert mesh == mesh
    assert mesh != values_mesh()
    assert len({mesh, values_mesh()}) == 2


def test_is_subscriptable_as_a_type_and_sized_as_a_mesh():
    assert ValueMesh[int](shape_of(x=1), [3]).item(x=0) == 3
    mesh = values_mesh()
    assert (len(mesh), mesh.size("gpus"), mesh.sizes, mesh.extent) == (6, 3, {"hosts": 2, "gpus": 3}, SHAPE.extent)
