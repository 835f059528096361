"""``tz.ShareSampler`` cuts the same global batches for any shares, and a trace with shares has its weights."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import thunder_zero as tz
from tests.harness.errors import refused
from tests.harness.models import Mlp, fresh

DATA: Any = range(40)


def batches(shares: tuple[float, ...], epoch: int = 0, start: int = 0, **options: bool) -> list[list[list[int]]]:
    """Return the items of each rank in each global batch of 12."""
    ranks = []
    for rank in range(len(shares)):
        sampler = tz.ShareSampler(DATA, 12, shares, rank, **options)
        sampler.set_epoch(epoch, start)
        ranks.append(list(sampler))
        assert len(ranks[-1]) == len(sampler)
    return [list(batch) for batch in zip(*ranks, strict=True)]


def joined(batch: Sequence[Sequence[int]]) -> list[int]:
    return [item for part in batch for item in part]


def test_ranks_take_their_shares_of_the_same_batches() -> None:
    for shares, counts in (((2, 1), [8, 4]), ((3, 1, 2), [6, 2, 4]), ((0.25, 0.75), [3, 9]), ((7,), [12])):
        cut = batches(shares)
        assert [[len(part) for part in batch] for batch in cut] == [counts] * 4
        assert [joined(batch) for batch in cut] == [joined(batch) for batch in batches((1,))], shares
    order = [item for batch in batches((2, 1)) for item in joined(batch)]
    assert sorted(order[:40]) == [*DATA]
    assert order[40:] == order[:8], "the last batch is filled up from the first items, as by DistributedSampler"
    assert order[:40] == list(DistributedSampler(DATA, 1, 0)), "one rank has the order of DistributedSampler"
    assert [joined(batch) for batch in batches((2, 1), shuffle=False, drop_last=True)] == [
        [*range(first, first + 12)] for first in (0, 12, 24)
    ]


def test_epochs_differ_and_resume() -> None:
    assert batches((2, 1)) == batches((2, 1)) != batches((2, 1), epoch=1)
    assert batches((2, 1), epoch=1, start=3) == batches((2, 1), epoch=1)[3:]
    loader: Any = DataLoader(DATA, batch_sampler=tz.ShareSampler(DATA, 12, (2, 1), 1))
    assert [rows.tolist() for rows in loader] == [batch[1] for batch in batches((2, 1))]


@pytest.mark.parametrize(
    ("batch_size", "shares", "rank", "words"),
    [
        (16, (2, 1), 0, ("batch_size is 16, which shares (2, 1) do not divide", "shares=(11, 5)")),
        (1, (2, 1), 0, ("batch_size is 1", "an item or more to each of 2 ranks")),
        (12.0, (2, 1), 0, ("batch_size is 12.0",)),
        (12, (2, 1), 2, ("rank is 2, and shares is (2, 1)",)),
        (12, (2, -1), 0, ("shares is (2, -1)",)),
        (12, (float("inf"), 1), 0, ("shares is (inf, 1)",)),
    ],
)
def test_bad_arguments(batch_size: int, shares: tuple[float, ...], rank: int, words: tuple[str, ...]) -> None:
    with refused(ValueError, *words):
        tz.ShareSampler(DATA, batch_size, shares, rank)


def test_a_trace_shows_the_weight_and_sends_what_equal_shares_send() -> None:
    module, x = fresh(Mlp), torch.randn(3, 7)
    for stage in range(4):
        equal = tz.trace(module, x, policy=tz.Policy(stage=stage), world_size=2)
        for rank, (weight, text) in enumerate(((4 / 3, "1.333"), (2 / 3, "0.6667"))):
            policy = tz.Policy(stage=stage, shares=(2, 1))
            traces = tz.trace(module, x, policy=policy, world_size=2, rank=rank)
            assert traces.plan.weight == pytest.approx(weight)
            tz.print_trace(traces, file=(printed := StringIO()), only="communication")
            assert f"float32 x {text}" in printed.getvalue()
            assert f"this rank's part is multiplied by {text}, by shares=(2, 1)" in str(
                tz.explain(traces, "layers.0.weight")
            )
            sent = [sum(item.timeline.traffic(op).busiest for op in item.timeline.ops) for item in (traces, equal)]
            assert sent[0] == sent[1] > 0
    same = tz.trace(module, x, policy=tz.Policy(stage=3, shares=(5, 5)), world_size=2)
    assert "zero_encode_grad" not in str(same.backward), "equal shares cost nothing"
    slow = tz.trace(module, x, policy=tz.Policy(stage=3, shares=(2, 1)), world_size=2)
    assert "zero_encode_grad" in str(slow.backward)
    with refused(ValueError, "shares is (2, 1), and the model has 4 data-parallel ranks"):
        tz.trace(module, x, policy=tz.Policy(shares=(2, 1)), world_size=2, replicas=2)
