"""How often the host reads a tensor's value in a training step: on a GPU it stops there until all work has ended."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import thunder_zero as tz
from tests.harness.host_reads import HostReads
from tests.harness.models import Mlp, fresh, sharded
from tests.harness.ranks import RanksPool
from tests.harness.tiers import of_tier

STAGES = of_tier((1,), (0, 1, 2, 3))
EACH_STEP = {0: [], 1: ["tolist"], 2: [], 3: []}  # ZeRO-1: which parameters an optimizer stepped on any rank


def reads(call: Any) -> list[str]:
    with HostReads() as seen:
        call()
    return seen.seen


def step_of(model: Any, optimizer: torch.optim.Optimizer) -> Any:
    def step() -> None:
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def count(rank: int, world_size: int, stage: int) -> dict[str, list[str]]:
    """Reads of a step after the first two, and of each function around it."""
    model = sharded(fresh(Mlp, 4, 2), tz.Policy(stage=stage, check_gradients=True) if stage == 2 else stage)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)  # AdamW reads its step counts, which are on the CPU
    step = step_of(model, optimizer)
    step()
    step()
    found = {"step": reads(step)}
    x, items = torch.ones(2, 4), torch.tensor([1.0], requires_grad=True)
    found["global_mean"] = reads(lambda: tz.global_mean(model, items.sum(), 3))
    model(x).square().mean().backward()
    found["clip"] = reads(lambda: tz.clip_grad_norm_(model, 1.0))
    found["clip, error_if_nonfinite"] = reads(lambda: tz.clip_grad_norm_(model, 1.0, error_if_nonfinite=True))
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_reads_of_a_step(ranks_pool: RanksPool, stage: int) -> None:
    for found in ranks_pool.run(2, count, stage):
        checked = ["_local_scalar_dense"] if stage == 2 else []
        assert found == {
            "step": EACH_STEP[stage] + checked,
            "global_mean": ["tolist"],
            "clip": ["tolist"],
            "clip, error_if_nonfinite": ["tolist", "_local_scalar_dense"],
        }


def count_others(rank: int, world_size: int) -> dict[str, list[str]]:
    """Reads of micro-batches under ``no_sync``, of the one after them, and of a backward in float16 with a scaler."""
    model = sharded(fresh(Mlp, 4, 2), 3)
    x, found = torch.ones(2, 4), {}
    for _ in range(2):  # the first time compiles
        with model.no_sync():
            found["no_sync"] = reads(lambda: model(x).square().mean().backward())
        found["after no_sync"] = reads(lambda: model(x).square().mean().backward())
    half = tz.Policy(stage=3, mixed_precision=tz.MixedPrecision(torch.float16))
    model = sharded(fresh(Mlp, 4, 2), half)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")
    for _ in range(2):
        loss = scaler.scale(model(x.half()).float().square().mean())
        found["float16"] = reads(loss.backward)
        found["unscale"] = reads(lambda: scaler.unscale_(optimizer))
        scaler.update()
    return found


@pytest.mark.slow
def test_reads_of_other_steps(ranks_pool: RanksPool) -> None:
    for found in ranks_pool.run(2, count_others):
        assert found == {"no_sync": [], "after no_sync": [], "float16": [], "unscale": []}


def test_the_count_sees_every_kind_of_read() -> None:
    t = torch.tensor([1.0, 2.0])
    for call in (t[0].item, t.tolist, lambda: bool(t[0]), lambda: int(t[0]), lambda: float(t[0]), t.cpu, t.nonzero):
        assert len(reads(call)) == 1, call
    assert reads(lambda: t[t > 1]) == ["index"]
    assert reads(lambda: t.sum() + t[0]) == []
