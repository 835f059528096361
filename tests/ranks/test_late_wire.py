"""Training through the NCCL transport on a wire that runs each collective at its wait, and poisons what is not valid.

Nothing may read a gathered parameter or a reduced gradient before its wait or after it was freed, and nothing may
write to what still travels. On the CPU a transport that sends at once would hide all three.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import thunder_zero as tz
from tests.harness.late import GroupedSums, late_wire
from tests.harness.models import Small, error, fresh
from tests.harness.ranks import RanksPool
from tests.harness.tiers import of_tier
from thunder_zero.comm import backends, native
from thunder_zero.schedule.timeline import LAUNCHES

import thunder

STEPS, ROWS = 3, 4
HALF = tz.MixedPrecision(torch.bfloat16, torch.float32)
POLICIES = {
    "0": tz.Policy(stage=0),
    "1": tz.Policy(stage=1),
    "2": tz.Policy(stage=2),
    "3": tz.Policy(stage=3, gather_last_units_once=False),
    "1 bfloat16": tz.Policy(stage=1, mixed_precision=HALF),
    "2 gathered once an accumulation": tz.Policy(stage=2, gather_once_per_accumulation=True),
    "3 bfloat16": tz.Policy(stage=3, mixed_precision=HALF, gather_last_units_once=False),
}
FAST = ("1",)


def batches(step: int) -> list[Tensor]:
    """Two micro-batches of all ranks' rows."""
    generator = torch.Generator().manual_seed(step)
    return list(torch.randint(0, 9, (2, ROWS, 3), generator=generator))


def train(model: nn.Module, rank: int, world_size: int, no_sync: bool) -> list[Tensor]:
    """The mean loss of each step: from the second on it shows the weights, gathered anew."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    rows = slice(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)
    found = []
    for step in range(STEPS):
        first, second = (tokens[rows] for tokens in batches(step))
        if no_sync:
            with model.no_sync():
                model(first).float().square().mean().backward()
        loss = model(second).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found


class Accumulating(nn.Module):
    """One process without ``no_sync``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, tokens: Tensor) -> Any:
        return self.module(tokens)

    no_sync = staticmethod(torch.enable_grad)


def right(no_sync: bool) -> list[Tensor]:
    return train(Accumulating(fresh(Small)), 0, 1, no_sync)


def on_late_wire(rank: int, world_size: int, name: str, no_sync: bool, copies: int = 1) -> tuple[list[Tensor], int]:
    mesh = init_device_mesh("cpu", (copies, world_size // copies)) if copies > 1 else None
    with late_wire() as wire:
        model: Any = thunder.jit(fresh(Small), transforms=[tz.ZeroTransform(POLICIES[name], mesh=mesh)])
        found = train(model, rank, world_size, no_sync)
    assert wire.waiting == 0
    return found, min(wire.most, wire.poisoned)


def assert_right(ranks: list[tuple[list[Tensor], int]], name: str, no_sync: bool) -> None:
    expected = right(no_sync)
    limit = 0.03 if "bfloat16" in name else 1e-5
    for step in range(STEPS):
        mean = torch.stack([found[step] for found, _ in ranks]).mean()
        assert error(mean, expected[step]) < limit, (step, mean, expected[step])
    for _, count in ranks:
        assert count > 0, "nothing was in flight, or nothing was freed"


@pytest.mark.parametrize("no_sync", of_tier((False,), (False, True)))
@pytest.mark.parametrize("name", of_tier(FAST, tuple(POLICIES)))
def test_a_late_wire_changes_nothing(ranks_pool: RanksPool, name: str, no_sync: bool) -> None:
    assert_right(ranks_pool.run(2, on_late_wire, name, no_sync), name, no_sync)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1", "2", "3", "3 bfloat16"])
def test_a_late_wire_changes_nothing_in_hybrid_sharding(ranks_pool: RanksPool, name: str) -> None:
    assert_right(ranks_pool.run(4, on_late_wire, name, True, 2), name, True)


# The NCCL transport as it is: means, on ranks without peers; sums, on gloo


OPERATIONS = {"all_gather_single": "gather", "reduce_scatter_single": "reduce", "all_reduce": "reduce"}


def on_fake_ranks(rank: int, world_size: int, name: str) -> tuple[list[str], list[str], set[str], bool]:
    """Rank 1 of 4 without peers, a step: its launches and the timeline's, what reduces, whether gradients fit."""
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=1, world_size=4)
    launch, launches = native.Grouped._launch, []
    reduces: set[str] = set()

    def counted(transport: Any, collective: Callable[..., Any], calls: Any) -> Any:
        launches.append(OPERATIONS[collective.__name__.replace("into_tensor", "single").replace("tensor", "single")])
        reduces.update(str(call[-1]["op"]) for call in calls if call[-1])
        return launch(transport, collective, calls)

    try:
        with mock.patch.dict(backends.BACKENDS, {("cpu", "fake"): native.Grouped}):
            model: Any = thunder.jit(fresh(Small), transforms=[tz.ZeroTransform(POLICIES[name])])
        for _ in range(2):
            with mock.patch.object(native.Grouped, "_launch", counted):
                launches.clear()
                model(batches(0)[0]).float().square().mean().backward()
            torch.optim.SGD(model.parameters(), 0.1).step()
        planned = [op.kind.value for op in tz.traces_of(model).timeline.ops if op.kind in LAUNCHES]
        fit = all(p.grad is None or p.grad.shape == p.shape for p in model.parameters())
        return launches, planned, reduces, fit
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["0", "1", "3 bfloat16"])
def test_each_bucket_is_one_launch_on_nccl(ranks_pool: RanksPool, name: str) -> None:
    ((launches, planned, reduces, fit),) = ranks_pool.run(1, on_fake_ranks, name)
    assert launches == planned
    assert len(launches) >= 4
    assert reduces == {"RedOpType.AVG"}
    assert fit


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.slow
def test_the_nccl_transport_trains_as_one_process(ranks_pool: RanksPool, stage: int) -> None:
    """As it is, with torch's own grouping of collectives, on gloo with sums."""
    assert_right(ranks_pool.run(2, on_gloo, stage), str(stage), False)


def on_gloo(rank: int, world_size: int, stage: int) -> tuple[list[Tensor], int]:
    with mock.patch.dict(backends.BACKENDS, {("cpu", "gloo"): GroupedSums}):
        model: Any = thunder.jit(fresh(Small), transforms=[tz.ZeroTransform(stage)])
        return train(model, rank, world_size, False), 1
