"""Shard arithmetic: sums over ranks give the whole, and bytes sent are the formulas of the stages' table."""

from __future__ import annotations

from fractions import Fraction
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from thunder_zero.plan import layout

ROWS = st.integers(1, 100)
WORLD = st.integers(1, 16)
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


def test_the_picture_in_the_docstring() -> None:
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
    assert [layout.gather_sends((2, 3), 4, rank) for rank in range(4)] == [9, 9, 0, 0]  # own 3 elements, to 3 others
    assert [layout.scatter_sends((2, 3), 4, rank) for rank in range(4)] == [3, 3, 6, 6]  # what others own
