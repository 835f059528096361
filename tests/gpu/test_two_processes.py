"""Several processes on one GPU: gloo carries what NCCL would, through host memory, each message at its wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.late import late_wire
from tests.harness.models import Small, error, fresh
from tests.harness.ranks import RanksPool

import thunder

STEPS, ROWS = 3, 4
REHEARSAL = pytest.param("cpu", marks=(pytest.mark.slow, pytest.mark.rehearsal))


def train(model: nn.Module, tokens: Tensor) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(tokens).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    return torch.stack(losses)


def all_tokens() -> Tensor:
    return torch.arange(3 * ROWS).view(ROWS, 3) % 9


def on_one_device(rank: int, world_size: int, device: str, stage: int, offload: bool) -> Tensor:
    rows = slice(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)
    with late_wire():
        policy = tz.Policy(stage=stage, cpu_offload=offload)
        model: Any = thunder.jit(fresh(Small), transforms=[tz.ZeroTransform(policy, device=torch.device(device))])
        return train(model, all_tokens()[rows].to(device))


@pytest.mark.parametrize(("stage", "offload"), [(0, False), (1, True), (2, False), (3, True)])
@pytest.mark.parametrize("device", ["cuda", REHEARSAL])
@pytest.mark.filterwarnings("ignore:cpu_offload changes nothing")
def test_two_processes_train_as_one(ranks_pool: RanksPool, device: str, stage: int, offload: bool) -> None:
    found = torch.stack(ranks_pool.run(2, on_one_device, device, stage, offload)).mean(0)
    assert error(found, train(fresh(Small), all_tokens())) < 1e-4
