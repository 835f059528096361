"""ZeRO-1: all ranks refresh the same stale parameters, however these were changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.errors import raised
from tests.harness.ranks import RanksPool
from tests.harness.tiers import of_tier

import thunder


def changed_by_all_means(rank: int, world_size: int) -> dict[str, float]:
    """How far the model is from a plain one with its full weights, after each way to change them."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))

    x = torch.randn(2, 5)
    plain = build()
    model = thunder.jit(build(), transforms=[tz.ZeroTransform(stage=1)])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    distance: dict[str, float] = {}

    def compare(how: str) -> None:
        plain.load_state_dict(tz.full_state_dict(model))
        distance[how] = (model(x) - plain(x)).abs().max().item()

    with torch.no_grad():
        model(x)
        for param in model.parameters():
            param.add_(0.1)
    compare("updated in place")
    model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()})
    compare("loaded shards")
    model.load_original_state_dict(build().state_dict())
    compare("loaded a plain state dict")
    model(x).sum().backward()
    if rank == 0:  # as a scaler would that found an Inf on the others
        optimizer.step()
    compare("one rank stepped")
    model.zero_grad()
    change_through_data(model, x, compare)
    return distance


def change_through_data(model: Any, x: Tensor, compare: Callable[[str], None]) -> None:
    """Writes that raise no version, as hand-written optimizers make them."""
    weight = model.get_parameter("0.weight")
    ways: dict[str, Callable[[Any], Any]] = {
        "added to data": lambda param: param.data.add_(param.grad, alpha=-0.1),
        "foreach on data": lambda param: torch._foreach_add_([param.data], [param.grad], alpha=-0.1),
        "copied to data": lambda param: param.data.copy_(param.data - 0.1 * param.grad),
        "numpy": lambda param: np.negative(param.data.numpy(), out=param.data.numpy()),
        "clamped data": lambda param: param.data.clamp_(-0.1, 0.1),
        "turned data": lambda param: param.data.copy_(param.data.flip(0)),
    }
    for how, write in ways.items():
        model(x).sum().backward()
        for param in model.parameters():
            write(param)
        model.zero_grad()
        compare(how)
    weight.data.mul_(2)
    for _ in range(2):  # it does not forget
        told = raised(lambda: model(x))
        assert "'0.weight' was written to in a way that PyTorch does not see (.data, numpy, a kernel)" in told, told
    with torch.no_grad():
        weight.mul_(2)
    compare("seen again")


@pytest.mark.parametrize("world_size", of_tier([3], [2, 3]))
def test_no_rank_computes_with_stale_rows(ranks_pool: RanksPool, world_size: int) -> None:
    for distance in ranks_pool.run(world_size, changed_by_all_means):
        assert len(distance) == 11
        assert max(distance.values()) < 1e-5, distance
