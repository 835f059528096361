"""The error of a value is named by its shape: a factor, one rank's share, rows in another order."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from thunder_zero.spmd.error_shapes import Slices, find_slices, join, name_error, relative_error

MESH = {"dp": 3, "tp": 2}
TRUE = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def named(values: list[Tensor], true: Tensor = TRUE) -> tuple[str, float | None]:
    return name_error(values, true, MESH)


@pytest.mark.parametrize(
    ("factor", "sentence"),
    [
        (2.0, "2 times the true value: counted once on each rank of tp"),
        (3.0, "3 times the true value: counted once on each rank of dp"),
        (6.0, "6 times the true value: counted once on each rank of dp x tp"),
        (5.0, "5 times the true value"),
        (1 / 3, "1/3 of the true value: divided by the size of dp once too often"),
        (1 / 5, "1/5 of the true value"),
        (0.3, "0.3 times the true value"),
        (1.00003, "1.00003 times the true value"),
        (-1.0, "the true value with the wrong sign"),
        (0.0, "zero"),
    ],
)
def test_a_factor_that_all_ranks_have(factor: float, sentence: str) -> None:
    text, found = named([factor * TRUE] * 6)
    assert text == sentence
    assert found == pytest.approx(factor)


def test_axes_of_one_size_are_named() -> None:
    text, _ = name_error([2 * TRUE] * 4, TRUE, {"dp": 2, "tp": 2})
    assert text == "2 times the true value: counted once on each rank of dp, or once on each rank of tp"
    assert name_error([2 * TRUE], TRUE, {"dp": 1})[0] == "2 times the true value"


def shares(of: Tensor, count: int) -> list[Tensor]:
    """Return different tensors with the sum ``of``."""
    parts = [torch.randn(of.shape, generator=torch.Generator().manual_seed(i), dtype=of.dtype) for i in range(1, count)]
    return [*parts, of - sum(parts)]


def on_ranks(dp: list[Tensor] | None = None, tp: list[Tensor] | None = None) -> list[Tensor]:
    """Return values that differ along one axis, in the order of ranks."""
    return [(dp[i] if dp else tp[j] if tp else TRUE) for i in range(3) for j in range(2)]


def test_a_share_of_each_rank_is_named_with_its_axis() -> None:
    text, factor = named(on_ranks(tp=shares(TRUE, 2)))
    assert text == "one rank's share: the sum over tp is the true value; it is not reduced over tp"
    assert factor is None
    text, _ = named(on_ranks(dp=shares(3 * TRUE, 3)))
    assert text == "one rank's own value: the mean over dp is the true value; it is not averaged over dp"
    text, _ = named(on_ranks(dp=shares(5 * TRUE, 3)))
    assert text == "one rank's share: it is not reduced over dp, and the sum over dp is 5 times the true value"
    text, _ = named(shares(TRUE, 6))
    assert text == "one rank's share: the sum over dp x tp is the true value; it is not reduced over dp x tp"


def test_other_disagreements_name_ranks_or_axes() -> None:
    other = TRUE + TRUE.flip(0)
    assert (
        named([TRUE, other, TRUE, TRUE, other, TRUE])[0]
        == "ranks disagree: right on ranks 0, 2, 3, 5, wrong on ranks 1, 4"
    )
    one_right_sum = [*shares(TRUE, 2), *shares(other, 2), *shares(TRUE, 2)]
    assert named(one_right_sum)[0].startswith("ranks disagree along dp, tp: relative error")
    text, _ = named(on_ranks(tp=[other, TRUE.flip(1)]))
    assert re.fullmatch(r"ranks disagree along tp: relative error [\d.]+ on rank 0", text)


def test_rows_in_another_order_are_named_with_their_dimension() -> None:
    for dim in (0, 1):
        order = torch.randperm(TRUE.shape[dim], generator=torch.Generator().manual_seed(1))
        text, factor = named([TRUE.index_select(dim, order)] * 6)
        assert (text, factor) == (f"the true value with its rows along dimension {dim} in another order", None)
    vector = torch.arange(1.0, 5.0)
    assert "another order" in named([vector.flip(0)] * 6, vector)[0]


def test_rows_that_alone_are_wrong_are_named() -> None:
    wrong = TRUE.clone()
    wrong[2:4] *= 2
    text, _ = named([wrong] * 6)
    assert text == (
        "right but for rows 2 to 3 of 6 along dimension 0, which are 2 times the true value: "
        "counted once on each rank of tp"
    )
    wrong = TRUE.clone()
    wrong[:, [0, 3]] = TRUE[:, [3, 0]] + 1
    assert named([wrong] * 6)[0] == "right but for rows 2 of 4 along dimension 1, which are wrong"


def test_what_has_no_shape_has_its_relative_error() -> None:
    text, factor = named([TRUE + TRUE.flip(0)] * 6)
    assert text == f"no multiple of the true value: relative error {relative_error(TRUE + TRUE.flip(0), TRUE):.2g}"
    assert factor is None
    assert named([TRUE] * 5 + [TRUE * float("nan")])[0] == "infinite or not a number on rank 5"
    assert named([TRUE] * 6, torch.zeros_like(TRUE))[0] == "not zero, as the true value is"
    assert relative_error(TRUE, torch.zeros_like(TRUE)) == float("inf")
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0


def test_numbers_are_named_like_tensors() -> None:
    one = torch.tensor(4.0)
    assert named([one / 2] * 6, one) == ("1/2 of the true value: divided by the size of tp once too often", 0.5)


def test_plain_slices_are_put_together_along_their_axis() -> None:
    by_rank = [TRUE.chunk(2)[rank % 2] for rank in range(6)]
    assert find_slices(by_rank, TRUE, MESH) == Slices("tp", 0)
    assert all(torch.equal(whole, TRUE) for whole in join(by_rank, Slices("tp", 0), MESH))
    by_rank = [TRUE.chunk(3)[rank // 2] for rank in range(6)]
    assert find_slices(by_rank, TRUE, MESH) == Slices("dp", 0)
    assert all(torch.equal(whole, TRUE) for whole in join(by_rank, Slices("dp", 0), MESH))
    assert find_slices(by_rank[::-1], TRUE, MESH) is None  # in another order
    assert find_slices([TRUE] * 6, TRUE, MESH) is None
