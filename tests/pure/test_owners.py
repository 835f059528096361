"""Each whole parameter has one owner; owners share the work; no sender of a bucket carries twice its share."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunder_zero.plan.owners import Piece, assign, work_of_shape

BLOCK = ((768, 2304), (768, 768), (768, 3072), (3072, 768))  # a GPT's matrices
GPT = [Piece(number, work_of_shape(shape), 4 * prod(shape)) for number, shape in enumerate(BLOCK * 12)]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99), st.sampled_from("ab")), max_size=20),
    st.integers(1, 5),
    st.integers(0, 200),
)
def test_each_piece_has_one_owner_and_travels_once(
    sizes: list[tuple[int, int, str]], ranks: int, bucket_bytes: int
) -> None:
    pieces = [Piece(number, work, nbytes, kind) for number, (work, nbytes, kind) in enumerate(sizes)]
    buckets = assign(pieces, ranks, bucket_bytes, [0] * ranks)
    assert sorted(number for bucket in buckets for number, _ in bucket) == list(range(len(pieces)))
    assert all(0 <= owner < ranks for bucket in buckets for _, owner in bucket)
    for bucket in buckets:
        assert len({pieces[number].kind for number, _ in bucket}) == 1
        nbytes = [pieces[number].nbytes for number, _ in bucket]
        assert sum(nbytes) <= max(bucket_bytes, ranks * nbytes[0])
    assert buckets == assign(pieces[::-1], ranks, bucket_bytes, [0] * ranks), "the order of the pieces does not matter"


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_no_sender_of_a_gpts_bucket_carries_twice_its_share(ranks: int) -> None:
    totals = [0] * ranks
    for bucket in assign(GPT, ranks, 16 << 20, [0] * ranks):
        sent = [0] * ranks
        for number, owner in bucket:
            sent[owner] += GPT[number].nbytes
            totals[owner] += GPT[number].work
        largest = max(GPT[number].nbytes for number, _ in bucket)
        assert max(sent) <= max(2 * sum(sent) / ranks, largest), sent
    assert max(totals) < 1.15 * sum(totals) / ranks, totals


def test_the_largest_piece_goes_first_and_later_pieces_go_to_idle_ranks() -> None:
    works = (9, 8, 7, 3, 3, 1)
    pieces = [Piece(number, work, 5) for number, work in enumerate(works)]
    first, second = assign(pieces, 2, 15, (0, 0))
    assert first == [(0, 0), (1, 1), (2, 1)]
    assert second == [(3, 0), (4, 1), (5, 0)], "rank 0 has 9, rank 1 has 15"
    assert assign([Piece(6, 1, 5)], 2, 15, loads=(14, 18)) == [[(6, 0)]]


def test_the_work_of_a_shape_is_that_of_its_products() -> None:
    works = {(4, 6): 4 * 6 * 4, (8, 2, 3, 3): 8 * 18 * 8, (5,): 5, (): 1, (0, 3): 0}
    assert {shape: work_of_shape(shape) for shape in works} == works
