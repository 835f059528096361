"""Training reads no collective's result before its wait or after its free, and writes to no message that still travels.

The NCCL transport runs on a wire that executes each collective at its wait, and poisons memory that is not valid. On
the CPU a transport that sends at once would hide such errors.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import thunder_zero as tz
from tests.harness.late import CoalescedSums, late_wire
from tests.harness.models import Small, fresh
from tests.harness.ranks import RanksPool
from tests.harness.tiers import deep, slow
from thunder_zero.comm import backends

import thunder

STEPS, ROWS = 4, 4
HALF = tz.MixedPrecision(torch.bfloat16, torch.float32)
POLICIES = {
    "0": tz.Policy(stage=0),
    "1": tz.Policy(stage=1),
    "2": tz.Policy(stage=2),
    "3": tz.Policy(stage=3, reshard_after_forward=True),
    "1 bfloat16": tz.Policy(stage=1, mixed_precision=HALF),
    "2 kept unsharded over an accumulation": tz.Policy(stage=2, reshard_after_backward=False),
    "3 bfloat16": tz.Policy(stage=3, mixed_precision=HALF, reshard_after_forward=True),
}


def make_batches(step: int) -> list[Tensor]:
    """Return two micro-batches of the rows of all ranks."""
    generator = torch.Generator().manual_seed(step)
    return list(torch.randint(0, 9, (2, ROWS, 3), generator=generator))


def train(model: nn.Module, rank: int, world_size: int) -> Tensor:
    """Return the loss of each step, with ``no_sync`` in every second step; later losses depend on all weights."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    rows = slice(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)
    losses = []
    for step in range(STEPS):
        first, second = (tokens[rows] for tokens in make_batches(step))
        if step % 2:
            with getattr(model, "no_sync", nullcontext)():
                model(first).float().square().mean().backward()
        loss = model(second).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def shard(policy: tz.Policy, copies: int = 1) -> Any:
    mesh = init_device_mesh("cpu", (copies, dist.get_world_size() // copies)) if copies > 1 else None
    return thunder.jit(fresh(Small), transforms=[tz.ZeroTransform(policy, mesh=mesh)])


def assert_losses(losses: Tensor, tolerance: float = 1e-5) -> None:
    """Check that the mean losses over ranks equal one process's losses."""
    dist.all_reduce(losses)
    expected = train(fresh(Small), 0, 1)
    torch.testing.assert_close(losses / dist.get_world_size(), expected, rtol=tolerance, atol=tolerance)


def train_on_late_wire(rank: int, world_size: int, name: str, copies: int) -> None:
    with late_wire() as wire:
        losses = train(shard(POLICIES[name], copies), rank, world_size)
    assert wire.waiting == 0, "messages were not waited for"
    assert wire.most > 0, "nothing was in flight"
    assert wire.poisoned > 0, "nothing was freed"
    assert_losses(losses, 0.03 if "bfloat16" in name else 1e-5)


@pytest.mark.parametrize(
    ("name", "copies"),
    [
        *slow(("0", 1), ("1", 1), ("1 bfloat16", 1), ("2 kept unsharded over an accumulation", 1), ("3 bfloat16", 1)),
        *slow(("1", 2), ("3 bfloat16", 2)),  # hybrid sharding
        *deep(("2", 1), ("3", 1), ("2", 2), ("3", 2)),
    ],
)
def test_a_late_wire_changes_nothing(ranks_pool: RanksPool, name: str, copies: int) -> None:
    ranks_pool.run(2 * copies, train_on_late_wire, name, copies)


def train_on_gloo(rank: int, world_size: int, stage: int) -> None:
    """Run the NCCL transport, with torch's own grouping of collectives, on gloo with sums."""
    with mock.patch.dict(backends.BACKENDS, {("cpu", "gloo"): CoalescedSums}):
        assert_losses(train(shard(tz.Policy(stage=stage)), rank, world_size))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3, *deep(1, 2)])
def test_the_nccl_transport_trains_as_one_process(ranks_pool: RanksPool, stage: int) -> None:
    ranks_pool.run(2, train_on_gloo, stage)
