"""Uneven last batches: as DistributedSampler pads or drops them, and with a mean that weighs every sample alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import thunder_zero as tz
from tests.harness.models import Mlp, error, fresh, sharded
from tests.harness.ranks import RanksPool

SAMPLES, BATCH, STAGES = 11, 2, (0, 3)
DROP = (False, True)


def samples() -> Tensor:
    return torch.randn(SAMPLES, 7, generator=torch.Generator().manual_seed(0))


def epoch(rank: int, world_size: int) -> dict[Any, Any]:
    """By stage and ``drop_last``, or "uneven": the batches of this rank, and the weights after an epoch of them."""
    found: dict[Any, Any] = {}
    for stage in STAGES:
        model = sharded(fresh(Mlp), stage)
        for drop in DROP:
            model.load_original_state_dict(fresh(Mlp).state_dict())
            data = TensorDataset(samples())
            sampler: Any = DistributedSampler(data, world_size, rank, shuffle=False, drop_last=drop)
            batches = [x for (x,) in DataLoader(data, BATCH, sampler=sampler)]
            train(model, batches)
            found[stage, drop] = batches, tz.full_state_dict(model)
        model.load_original_state_dict(fresh(Mlp).state_dict())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer.zero_grad()
        mine = samples().tensor_split(world_size)[rank]  # 4, 4 and 3 of them
        tz.global_mean(model, model(mine).square().mean(1).sum(), count=len(mine)).backward()
        optimizer.step()
        found[stage, "uneven"] = len(mine), tz.full_state_dict(model)
    return found


def train(model: nn.Module, batches: list[Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in batches:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.fixture(scope="module")
def ranks(ranks_pool: RanksPool) -> list[dict[Any, Any]]:
    return ranks_pool.run(3, epoch)


@pytest.mark.parametrize("drop", DROP)
@pytest.mark.parametrize("stage", STAGES)
def test_an_epoch_equals_one_process_on_what_the_sampler_gave(ranks: Any, stage: int, drop: bool) -> None:
    """Without ``drop_last`` the first sample appears, and counts, twice; with it two samples are left out."""
    steps = [torch.cat(parts) for parts in zip(*(found[stage, drop][0] for found in ranks), strict=True)]
    used = torch.cat(steps)
    assert len(used) == (9 if drop else 12)
    assert [int((used == sample).all(1).sum()) for sample in samples()] == [1 if drop else 2, *[1] * 8, *[1 - drop] * 2]
    model = fresh(Mlp)
    train(model, steps)
    for found in ranks:
        assert all(error(found[stage, drop][1][path], weight) < 1e-5 for path, weight in model.state_dict().items())


@pytest.mark.parametrize("stage", STAGES)
def test_uneven_ranks_train_on_the_mean_of_all_samples(ranks: Any, stage: int) -> None:
    model = fresh(Mlp)
    train(model, [samples()])
    assert [found[stage, "uneven"][0] for found in ranks] == [4, 4, 3]
    for found in ranks:
        assert all(error(found[stage, "uneven"][1][path], weight) < 1e-5 for path, weight in model.state_dict().items())
