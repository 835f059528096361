"""ZeRO-1: all ranks refresh the same stale parameters, however these were changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import thunder_zero as tz
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
    return distance


@pytest.mark.parametrize("world_size", of_tier([3], [2, 3]))
def test_no_rank_computes_with_stale_rows(ranks_pool: RanksPool, world_size: int) -> None:
    for distance in ranks_pool.run(world_size, changed_by_all_means):
        assert set(distance) == {"updated in place", "loaded shards", "loaded a plain state dict", "one rank stepped"}
        assert max(distance.values()) < 1e-5, distance
