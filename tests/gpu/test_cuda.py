"""On a GPU: the numbers of the CPU, NCCL's transport without peers, and shards in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.models import LENGTH, VOCABULARY, Gpt, error, fresh
from tests.harness.one_rank import communicating

import thunder

STAGES, STEPS = (0, 1, 2, 3), 3
TOKENS = torch.arange(2 * LENGTH).view(2, LENGTH) % VOCABULARY


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train(model: nn.Module, tokens: Tensor) -> list[Tensor]:
    """The losses of some steps, and what is trained after them; on the CPU."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(tokens).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    return losses


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_it_trains_as_on_the_cpu(stage: int, offload: bool) -> None:
    module = fresh(Gpt)
    expected = train(deepcopy(module), TOKENS)
    policy = tz.Policy(stage=stage, cpu_offload=offload)
    with communicating():
        model: Any = thunder.jit(module, transforms=[tz.ZeroTransform(policy, device="cuda")])
    assert error(torch.stack(train(model, TOKENS.cuda())), torch.stack(expected)) < 1e-4
    plan = tz.traces_of(model).plan
    for param in plan.params:
        shard = model.get_parameter(param.path)
        is_on_host = offload and param.sharded
        assert shard.device.type == ("cpu" if is_on_host else "cuda")
        assert shard.is_pinned() == is_on_host
        assert shard.grad is None or shard.grad.device == shard.device


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_the_collectives_of_nccl_are_launched(stage: int, offload: bool) -> None:
    """The fake backend stands in for NCCL with two ranks: shapes, dtypes and devices fit; no values come from peers."""
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        half = tz.MixedPrecision(torch.bfloat16, torch.float32, torch.float32)
        policy = tz.Policy(stage=stage, cpu_offload=offload, mixed_precision=half)
        model: Any = thunder.jit(fresh(Gpt), transforms=[tz.ZeroTransform(policy, device="cuda")])
        train(model, TOKENS.cuda())
        assert all(p.grad is None or p.grad.shape == p.shape for p in model.parameters())
    finally:
        dist.destroy_process_group()
