"""Shard arithmetic: sums over ranks give the whole, and bytes sent are the formulas of the stages' table."""

from __future__ import annotations

from fractions import Fraction
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunder_zero import layout

ROWS = st.integers(1, 100)
WORLD = st.integers(1, 16)
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


def test_the_picture_in_the_docstring() -> None:
    assert [layout.row_range(5, 4, rank) for rank in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert [layout.stored_rows(5, 4, rank) for rank in range(4)] == [2, 2, 2, 2]
    assert [layout.padding_rows(5, 4, rank) for rank in range(4)] == [0, 0, 1, 2]
    assert layout.owned_numel((5,), 4, layout.busiest_rank(4)) == 2
    assert layout.shard_shape((5, 3), 4, 0) == (2, 3)
    assert layout.padded_shape((5, 3), 4) == (8, 3)


@given(ROWS, WORLD)
def test_ranges_follow_each_other_and_cover_all_rows(rows: int, world_size: int) -> None:
    ranges = [layout.row_range(rows, world_size, rank) for rank in range(world_size)]
    assert [row for start, stop in ranges for row in range(start, stop)] == list(range(rows))
    chunk = layout.stored_rows(rows, world_size, 0)
    assert all(0 <= stop - start <= chunk for start, stop in ranges)
    assert (chunk - 1) * world_size < rows <= chunk * world_size


@given(SHAPES, WORLD)
def test_shards_side_by_side_are_the_padded_shape(shape: tuple[int, ...], world_size: int) -> None:
    shard, padded = layout.shard_shape(shape, world_size, 0), layout.padded_shape(shape, world_size)
    if layout.is_sharded(shape):
        assert (shard[0] * world_size, *shard[1:]) == padded
        assert 0 <= padded[0] - shape[0] < world_size * shard[0]
        assert padded[1:] == shape[1:]
    else:
        assert shard == padded == shape


@given(SHAPES, WORLD)
def test_ranks_own_all_elements_once(shape: tuple[int, ...], world_size: int) -> None:
    owned = [layout.owned_numel(shape, world_size, rank) for rank in range(world_size)]
    assert sum(owned) == prod(shape) * (1 if layout.is_sharded(shape) else world_size)


@given(SHAPES, WORLD)
def test_gathers_and_reduce_scatters_send_each_element_to_others_once(shape: tuple[int, ...], world_size: int) -> None:
    gathers = [layout.gather_sends(shape, world_size, rank) for rank in range(world_size)]
    scatters = [layout.scatter_sends(shape, world_size, rank) for rank in range(world_size)]
    floor = prod(shape) * (world_size - 1) if layout.is_sharded(shape) else 0
    assert sum(gathers) == sum(scatters) == floor


@given(SHAPES, WORLD)
def test_an_all_reduce_sends_twice_the_floor(shape: tuple[int, ...], world_size: int) -> None:
    sends, exact = layout.all_reduce_sends(shape, world_size), Fraction(2 * (world_size - 1) * prod(shape), world_size)
    assert exact <= sends < exact + 1


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (4, 0)])
def test_zero_dimensional_and_empty_parameters_stay_full(shape: tuple[int, ...]) -> None:
    assert not layout.is_sharded(shape)
    assert layout.shard_shape(shape, 4, 0) == shape
    assert layout.gather_sends(shape, 4, 0) == layout.scatter_sends(shape, 4, 0) == 0


def test_fewer_rows_than_ranks_leaves_the_last_ranks_with_padding_only() -> None:
    assert [layout.owned_numel((2, 3), 4, rank) for rank in range(4)] == [3, 3, 0, 0]
    assert layout.shard_shape((2, 3), 4, 3) == (1, 3)
    assert [layout.gather_sends((2, 3), 4, rank) for rank in range(4)] == [9, 9, 0, 0]  # own 3 elements, to 3 others
    assert [layout.scatter_sends((2, 3), 4, rank) for rank in range(4)] == [3, 3, 6, 6]  # what others own


def test_one_rank_sends_nothing() -> None:
    assert layout.gather_sends((7, 2), 1, 0) == layout.scatter_sends((7, 2), 1, 0) == 0
    assert layout.all_reduce_sends((7, 2), 1) == 0
