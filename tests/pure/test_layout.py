"""Shards of all ranks add up to the whole, and sent bytes follow the formulas of the stages' table."""

from __future__ import annotations

from fractions import Fraction
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunder_zero.plan import layout
from thunder_zero.plan.geometry import Geometry, cut_rows
from thunder_zero.plan.mesh import DATA, REPLICATE, SHARD, Axis, Mesh

ROWS = st.integers(1, 100)
WORLD = st.integers(1, 16)
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


def test_the_picture_in_the_docstring_is_right() -> None:
    assert [layout.row_range(5, 4, rank) for rank in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert layout.stored_rows(5, 4) == 2
    assert [layout.padding_rows(5, 4, rank) for rank in range(4)] == [0, 0, 1, 2]
    assert [layout.owned_numel((5,), 4, rank) for rank in range(4)] == [2, 2, 1, 0]
    assert layout.shard_shape((5, 3), 4) == (2, 3)
    assert layout.padded_shape((5, 3), 4) == (8, 3)


@given(ROWS, WORLD)
def test_ranges_follow_each_other_and_cover_all_rows(rows: int, world_size: int) -> None:
    ranges = [layout.row_range(rows, world_size, rank) for rank in range(world_size)]
    assert [row for start, stop in ranges for row in range(start, stop)] == list(range(rows))
    chunk = layout.stored_rows(rows, world_size)
    assert all(0 <= stop - start <= chunk for start, stop in ranges)
    assert (chunk - 1) * world_size < rows <= chunk * world_size


@given(SHAPES, WORLD)
def test_each_element_is_stored_owned_and_sent_once(shape: tuple[int, ...], world_size: int) -> None:
    ranks = range(world_size)
    shard, padded = layout.shard_shape(shape, world_size), layout.padded_shape(shape, world_size)
    owned = sum(layout.owned_numel(shape, world_size, rank) for rank in ranks)
    gathered = [layout.gather_sends(shape, world_size, rank) for rank in ranks]
    scattered = [layout.scatter_sends(shape, world_size, rank) for rank in ranks]
    sends, exact = layout.all_reduce_sends(shape, world_size), Fraction(2 * (world_size - 1) * prod(shape), world_size)
    assert exact <= sends < exact + 1
    if layout.is_sharded(shape):
        assert (shard[0] * world_size, *shard[1:]) == padded
        assert 0 <= padded[0] - shape[0] < world_size * shard[0]
        assert padded[1:] == shape[1:]
        assert owned == prod(shape)
        assert sum(gathered) == sum(scattered) == prod(shape) * (world_size - 1)
    else:
        assert shard == padded == shape
        assert owned == prod(shape) * world_size
        assert not any(gathered + scattered)


def test_fewer_rows_than_ranks_leaves_the_last_ranks_with_padding_only() -> None:
    assert [layout.owned_numel((2, 3), 4, rank) for rank in range(4)] == [3, 3, 0, 0]
    assert layout.shard_shape((2, 3), 4) == (1, 3)
    assert [layout.gather_sends((2, 3), 4, rank) for rank in range(4)] == [9, 9, 0, 0]  # 3 elements to each of 3 peers
    assert [layout.scatter_sends((2, 3), 4, rank) for rank in range(4)] == [3, 3, 6, 6]  # the elements that peers own


# On meshes

ONE, TWO, FOUR = Mesh.of(1), Mesh.of(2, 1), Mesh.of(4, 2)
COPIES = Mesh.of(2, 1, replicas=3, copy=2)


@pytest.mark.parametrize(
    ("shape", "mesh", "is_cut", "at_rest", "gathered", "rows", "stored", "padding", "numel", "batches"),
    [
        ((5, 3), ONE, True, (5, 3), (5, 3), slice(0, 5), slice(0, 5), 0, 15, 1),
        ((5, 3), TWO, True, (3, 3), (6, 3), slice(3, 5), slice(3, 6), 1, 6, 2),
        ((5, 3), FOUR, True, (2, 3), (8, 3), slice(4, 5), slice(4, 6), 1, 3, 4),
        ((5, 3), COPIES, True, (3, 3), (6, 3), slice(3, 5), slice(3, 6), 1, 6, 6),
        ((2,), FOUR, True, (1,), (4,), slice(2, 2), slice(2, 3), 1, 0, 4),
        ((5, 3), TWO, False, (5, 3), (5, 3), slice(None), slice(None), 0, 15, 2),
        ((5, 3), COPIES, False, (5, 3), (5, 3), slice(None), slice(None), 0, 15, 6),
        ((), COPIES, False, (), (), slice(None), slice(None), 0, 1, 6),
    ],
)
def test_a_geometry_has_the_shapes_and_rows_of_its_mesh(
    shape: tuple[int, ...],
    mesh: Mesh,
    is_cut: bool,
    at_rest: tuple[int, ...],
    gathered: tuple[int, ...],
    rows: slice,
    stored: slice,
    padding: int,
    numel: int,
    batches: int,
) -> None:
    geometry = Geometry(shape, mesh, is_cut)
    assert (geometry.in_compute, geometry.at_rest, geometry.gathered) == (shape, at_rest, gathered)
    assert (geometry.rows, geometry.stored_rows, geometry.padding, geometry.numel) == (rows, stored, padding, numel)
    assert prod(mesh.over(axis).size for axis in geometry.reduced_over) == mesh.batches == batches, (
        "each batch counts once"
    )
    assert geometry.is_spread == (is_cut and mesh.shard.size > 1)


def test_an_axis_that_no_mesh_has_is_named() -> None:
    assert Mesh.of(2).over("replicate").size == 1
    with pytest.raises(ValueError, match="no mesh has an axis 'dp'; name one of all, replicate, shard, tensor"):
        Mesh.of(2).over("dp")


def test_parts_of_a_gradient_are_summed_over_slices() -> None:
    mesh = Mesh.of(2, 1, replicas=3, copy=2, slices=4, part=3)
    cut, replicated = (Geometry((12, 8), mesh, is_cut, is_partial=True) for is_cut in (True, False))
    assert (cut.reduced_over, replicated.reduced_over) == (("shard", "replicate", "tensor"), ("all", "tensor"))
    assert mesh.batches == 6, "gradients are summed over slices, not averaged"
    assert Geometry((12, 8), Mesh.of(2, 0, slices=1), True, is_partial=True).reduced_over == ("shard",)


SLICED = Mesh.of(2, 1, replicas=3, copy=2, slices=4, part=3)


@pytest.mark.parametrize(
    ("sliced", "is_cut", "in_compute", "at_rest", "gathered", "rows", "padding"),
    [
        (0, True, (3, 8), (2, 8), (4, 8), slice(2, 3), 1),
        (1, True, (12, 2), (6, 2), (12, 2), slice(6, 12), 0),
        (1, False, (12, 2), (12, 2), (12, 2), slice(None), 0),
        (None, True, (12, 8), (6, 8), (12, 8), slice(6, 12), 0),
        (None, False, (12, 8), (12, 8), (12, 8), slice(None), 0),
    ],
)
def test_data_axes_cut_the_rows_of_a_slice(
    sliced: int | None,
    is_cut: bool,
    in_compute: tuple[int, ...],
    at_rest: tuple[int, ...],
    gathered: tuple[int, ...],
    rows: slice,
    padding: int,
) -> None:
    geometry = Geometry((12, 8), SLICED, is_cut, sliced)
    assert (geometry.shape, geometry.in_compute, geometry.at_rest, geometry.gathered) == (
        (12, 8),
        in_compute,
        at_rest,
        gathered,
    )
    assert (geometry.rows, geometry.padding) == (rows, padding)
    assert str(SLICED) == "rank 1 of 2 of slice 3 of 4"


@given(SHAPES, WORLD, st.integers(1, 4))
def test_ranks_of_a_mesh_store_each_element_as_often_as_there_are_copies(
    shape: tuple[int, ...], world_size: int, replicas: int
) -> None:
    meshes = [Mesh.of(world_size, rank, replicas, copy=copy) for copy in range(replicas) for rank in range(world_size)]
    geometries = [cut_rows(shape, mesh) for mesh in meshes]
    assert [mesh.place() for mesh in meshes] == list(range(world_size * replicas))
    copies = replicas if geometries[0].is_cut else replicas * world_size
    assert sum(geometry.numel for geometry in geometries) == prod(shape) * copies
    assert [geometry.numel for geometry in geometries] == [geometries[0].numel_of(mesh.shard.place) for mesh in meshes]


def test_an_axis_that_is_not_a_data_axis_neither_cuts_rows_nor_divides_gradients() -> None:
    mesh = Mesh((Axis("tensor", 5, 4), *COPIES.axes))
    with_tensor, alone = Geometry((5, 3), mesh, is_cut=True), Geometry((5, 3), COPIES, is_cut=True)
    assert (with_tensor.at_rest, with_tensor.rows, mesh.batches) == (alone.at_rest, alone.rows, COPIES.batches)
    assert (mesh.size(), mesh.place()) == (30, 4 * 6 + 5)


def test_a_mesh_counts_ranks_along_some_of_its_axes() -> None:
    assert [COPIES.size(axes) for axes in ([SHARD], [REPLICATE], DATA, [], ["tensor"], None)] == [2, 3, 6, 1, 1, 6]
    assert [COPIES.place(axes) for axes in ([SHARD], [REPLICATE], DATA, [], ["tensor"], None)] == [1, 2, 5, 0, 0, 5]
    assert (COPIES.shard, COPIES.replicate) == (Axis("shard", 2, 1), Axis("replicate", 3, 2))
    assert Mesh(()).shard == Axis("shard", 1, 0)
    assert str(COPIES) == "rank 1 of 2"


@pytest.mark.parametrize(
    ("world", "words"),
    [
        ((0,), "world_size is 0; give the number of ranks, at least 1"),
        ((2, 2), "rank is 2; with world_size=2 it must be 0 to 1"),
        ((2, 0, 0), "replicas is 0; give the number of copies of the sharded model, at least 1"),
    ],
)
def test_a_mesh_refuses_what_is_out_of_range(world: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Mesh.of(*world)
