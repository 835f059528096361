"""Ranks whose losses leave out different outputs train with ``materialize_grads``, and are told of it without it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.errors import error_of
from tests.harness.models import fresh, full
from tests.harness.ranks import RanksPool
from tests.harness.tiers import slow

X = torch.linspace(-1, 1, 12).view(3, 4)


class Heads(nn.Module):
    """A body and two heads, of which a loss takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.first(hidden), self.second(hidden)


def train(rank: int, world_size: int, stage: int) -> None:
    """Take another head on each rank. A gradient is the mean over ranks, which are zero where a head is left out."""
    plain = fresh(Heads)
    model: Any = tz.compile(deepcopy(plain), stage=stage, materialize_grads=True)
    for _ in range(2):
        model(X)[rank].sum().backward()
        sum(output.sum() for output in plain(X)).div(world_size).backward()
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(param.grad), expected.grad, msg=name)
    strict: Any = tz.compile(fresh(Heads), stage=stage)
    words = "the ranks do different things", "both in backward", "pass materialize_grads=True if the losses of ranks"
    error = error_of(lambda: strict(X)[rank].sum().backward())
    assert all(word in error for word in words), error


@pytest.mark.parametrize("stage", [3, *slow(0, 1, 2)])
def test_losses_of_ranks_may_leave_out_different_outputs(ranks_pool: RanksPool, stage: int) -> None:
    ranks_pool.run(2, train, stage)
