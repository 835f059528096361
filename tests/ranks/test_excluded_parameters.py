"""Parameters excluded from sharding or training: ignored, replicated, frozen, experts that a step does not reach; and
ranks with batches of different sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.models import count_sends, error, fresh, sharded
from tests.harness.ranks import RanksPool
from tests.harness.tiers import of_tier
from thunder_zero.schedule.timeline import Kind

BOTH_FRONT_ENDS = True

STAGES, STEPS, ROWS = of_tier((1, 3), (0, 1, 2, 3)), 3, 6


class Lora(nn.Module):
    """A frozen base, trained adapters of rank 2, a router of each rank's own, and two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 7, bias=False).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, 5))
        self.up = nn.Parameter(torch.randn(7, 2))
        self.router = nn.Linear(7, 7)
        self.experts = nn.ModuleList([nn.Linear(7, 3), nn.Linear(7, 3)])

    def forward(self, x: Tensor, expert: int) -> Tensor:
        x = torch.tanh(self.base(x) + x @ self.down.t() @ self.up.t())
        out: Tensor = self.experts[expert](torch.tanh(self.router(x)))
        return out


SMALL = 4 * 7 * 3  # bytes: the experts' weights are not smaller, their biases and the adapters are


def policy_of(stage: int) -> tz.Policy:
    return tz.Policy(stage=stage, ignored=("router",), replicate_below_bytes=SMALL, gather_last_units_once=False)


def batch(step: int, rank: int) -> Tensor:
    """Rows of one rank; all ranks have the same number."""
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def train(model: Any, xs: list[list[Tensor]]) -> None:
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], 0.1, momentum=0.9)
    for step, parts in enumerate(xs):
        optimizer.zero_grad()
        for x in parts:
            (model(x, min(step, 1)).square().mean() / len(parts)).backward()
        optimizer.step()


def run(rank: int, world_size: int) -> list[dict[str, Any]]:
    results = []
    for stage in STAGES:
        plain = fresh(Lora)
        with torch.no_grad():
            plain.router.bias += rank  # which ranks may have of their own
        model = sharded(plain, policy_of(stage))
        before = model.get_parameter("experts.1.weight").detach().clone()
        train(model, [[batch(0, rank)]])
        untouched = torch.equal(before, model.get_parameter("experts.1.weight"))
        with count_sends() as sent:
            model(batch(0, rank), 0).square().mean().backward()
        traces = tz.traces_of(model)
        ops = traces.timeline.ops
        results.append(
            {
                "untouched": untouched,
                "router": (model.get_parameter("router.bias").shape, model.get_parameter("router.bias").grad),
                "sent": (sum(sent), sum(map(traces.timeline.bytes_sent, ops))),
                "gathered": {path for op in ops if op.kind is Kind.GATHER for path in op.params},
                "reduced": {path for op in ops if op.kind is Kind.REDUCE for path in op.params},
                "full": tz.full_state_dict(model),
                "planned": {param.path: param.sharded for param in traces.plan.params},
            }
        )
    return results


@pytest.mark.parametrize("world_size", of_tier([3], [1, 3]))
def test_excluded_parameters_are_left_alone(ranks_pool: RanksPool, world_size: int) -> None:
    for rank, results in enumerate(ranks_pool.run(world_size, run)):
        for stage, found in zip(STAGES, results, strict=True):
            assert found["untouched"], "a step of the first expert does not train the second"
            shape, grad = found["router"]
            assert shape == (7,)
            assert grad is not None
            assert set(found["planned"]) == {"base.weight", "down", "up", *EXPERTS}
            large = {"base.weight", "experts.0.weight", "experts.1.weight"}
            assert {path for path, is_sharded in found["planned"].items() if is_sharded} == (large if stage else set())
            reached = large - {"experts.1.weight"}
            assert found["gathered"] == (reached if stage else set())
            assert found["reduced"] == {"down", "up", "experts.0.weight", "experts.0.bias"}, "the base is frozen"
            assert world_size == 1 or stage == 1 or found["sent"][0] == pytest.approx(found["sent"][1], abs=64)
            assert set(found["full"]) == set(fresh(Lora).state_dict())
            assert abs(found["full"]["router.bias"].mean() - rank) < 0.6


EXPERTS = {f"experts.{number}.{name}" for number in (0, 1) for name in ("weight", "bias")}


def run_shared(rank: int, world_size: int) -> list[dict[str, Tensor]]:
    """Trained with a router that is not ignored, so that one process can be compared."""
    results = []
    for stage in STAGES:
        model = sharded(fresh(Lora), tz.Policy(stage=stage, replicate_below_bytes=SMALL))
        train(model, [[batch(step, rank)] for step in range(STEPS)])
        results.append(tz.full_state_dict(model))
    return results


def test_adapters_and_experts_train_as_in_one_process(ranks_pool: RanksPool) -> None:
    right = fresh(Lora)
    train(right, [[batch(step, rank) for rank in range(3)] for step in range(STEPS)])
    for results in ranks_pool.run(3, run_shared):
        for weights in results:
            for path, weight in right.state_dict().items():
                assert error(weights[path], weight) < 1e-5, path


# Batches of different sizes


def uneven(rank: int, world_size: int) -> dict[str, Any]:
    """Rank r has r rows, so rank 0 has none; together they are one batch."""
    found: dict[str, Any] = {}
    for stage in STAGES:
        model = sharded(fresh(nn.Linear, 5, 3), stage)
        x = batch(0, 0)[: max(rank, 1)]
        total = F.mse_loss(model(x), torch.ones(len(x), 3), reduction="none").mean(1).sum() * (rank > 0)
        loss = tz.global_mean(model, total, count=rank)
        loss.backward()
        found[f"stage {stage}"] = tz.clip_grad_norm_(model, 1e9)
        found[f"loss {stage}"] = loss.detach()
    for name, count in {"negative": -1 if rank else 4, "nothing": 0}.items():
        try:
            tz.global_mean(model, total, count)
        except ValueError as failure:
            found[name] = str(failure)
    return found


def test_every_row_of_every_rank_weighs_alike(ranks_pool: RanksPool) -> None:
    ranks = ranks_pool.run(3, uneven)
    right = fresh(nn.Linear, 5, 3)
    x = torch.cat([batch(0, 0)[:rank] for rank in range(3)])
    loss = F.mse_loss(right(x), torch.ones(3, 3))
    loss.backward()
    norm = nn.utils.clip_grad_norm_(right.parameters(), 1e9)
    for stage in STAGES:
        assert error(torch.stack([found[f"loss {stage}"] for found in ranks]).mean(), loss.detach()) < 1e-6
        assert all(error(found[f"stage {stage}"], norm) < 1e-5 for found in ranks)
    for rank, found in enumerate(ranks):
        assert f"not a number of items (on this rank it is {-1 if rank else 4})" in found["negative"]
        assert "no rank has an item" in found["nothing"]
