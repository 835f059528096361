"""Every kind of parameter trains as in one process: tied, ignored, replicated, frozen, or not reached by a step."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import thunder_zero as tz
from tests.harness.as_one_process import assert_near, assert_same_parameters, assert_same_state, trains_as_one_process
from tests.harness.loops import SMALL, Lora, experts
from tests.harness.models import ZOO_WITHOUT_GRAD, Zoo, count_sends, fresh, sharded
from tests.harness.ranks import RanksPool
from tests.harness.tiers import slow
from thunder_zero.plan.amounts import size
from thunder_zero.schedule.ops import Gather, Op, Reduce

POLICIES = {f"stage {stage}": tz.Policy(stage=stage) for stage in range(4)}
POLICIES["each unit"] = replace(tz.ZERO3, gather_per_unit=True, bucket_bytes=0)
ROWS = 4  # rows of each rank's batch


def paths_of(timeline: tz.schedule.Timeline, kind: type[Op]) -> list[str]:
    return [path for op in timeline.ops if isinstance(op, kind) for path in op.params]


def train_every_kind(rank: int, world_size: int, policy: tz.Policy) -> None:
    """Load the plain module's state dict into a model with other weights, then compare a step."""
    plain = fresh(Zoo)
    torch.manual_seed(1)
    model = sharded(Zoo(), policy)
    model.load_original_state_dict(plain.state_dict())
    batches = [torch.randn(ROWS, 9, generator=torch.Generator().manual_seed(seed)) for seed in range(world_size)]
    all_ranks, this_rank = deepcopy(plain), deepcopy(plain)
    for x in batches:  # statistics are those of each rank's rows
        (all_ranks(x).square().mean() / world_size).backward()
    inputs = [batches[rank].clone().requires_grad_() for _ in range(2)]
    y, expected = model(inputs[0]), this_rank(inputs[1])
    for output in (y, expected):
        output.square().mean().backward()
    assert_near(y.detach(), expected.detach(), "output")
    assert inputs[0].grad is not None
    assert inputs[1].grad is not None
    assert_near(inputs[0].grad, inputs[1].grad, "gradient of the input")
    assert {name for name, param in all_ranks.named_parameters() if param.grad is None} == ZOO_WITHOUT_GRAD
    assert_same_parameters(model, all_ranks)
    full = assert_same_state(model, this_rank)
    assert all(torch.equal(full[name], param) for name, param in plain.named_parameters()), "there was no step"
    timeline = tz.traces_of(model).timeline
    trained = {name for name, _ in plain.named_parameters()} - ZOO_WITHOUT_GRAD
    assert sorted(paths_of(timeline, Reduce)) == sorted(trained)
    # Gathers of both phases. By default ZeRO-3 keeps this unit gathered for backward, as it is one of the last.
    gathers = 0 if policy.stage == 0 else 3 if policy.gather_per_unit else 1
    assert paths_of(timeline, Gather).count("layers.0.weight") == gathers


@pytest.mark.parametrize("name", ["each unit", *slow("stage 0", "stage 1")])
def test_every_kind_of_parameter_trains_as_one_process(ranks_pool: RanksPool, name: str) -> None:
    ranks_pool.run(3, train_every_kind, POLICIES[name])


# Parameters that are left out


LARGE = {"base.weight", "experts.0.weight", "experts.1.weight"}


def train_with_left_out(rank: int, world_size: int, stage: int) -> None:
    plain = fresh(Lora)
    policy = tz.Policy(stage=stage, ignored=("router",), replicate_below_bytes=SMALL, reshard_after_forward=True)
    model = sharded(plain, policy)
    trains_as_one_process([(model, plain)], experts)
    with count_sends() as sent:
        model(torch.ones(6, 5), 0).square().mean().backward()
    traces = tz.traces_of(model)
    assert {param.path for param in traces.plan.params if param.sharded} == (LARGE if stage else set())
    assert {path for path in traces.plan.by_name if "router" in path} == set()
    assert set(paths_of(traces.timeline, Gather)) == (LARGE - {"experts.1.weight"} if stage else set())
    reduced = {"down", "up", "experts.0.weight", "experts.0.bias"}
    assert set(paths_of(traces.timeline, Reduce)) == reduced, "neither the base, which is frozen, nor the router"
    forecast = sum(traces.timeline.traffic(op).sent for op in traces.timeline.ops)
    assert stage == 1 or sum(sent) == pytest.approx(forecast, abs=64), (sum(sent), forecast)
    bias = model.get_parameter("router.bias")
    assert bias.shape == (7,), bias.shape
    with torch.no_grad():
        bias.fill_(rank)  # ranks may differ in ignored parameters
    assert (tz.full_state_dict(model)["router.bias"] == rank).all()


@pytest.mark.parametrize("stage", [3, *slow(0, 1)])
def test_left_out_parameters_are_not_sharded(ranks_pool: RanksPool, stage: int) -> None:
    ranks_pool.run(3, train_with_left_out, stage)


class Printed(nn.Module):
    """A module that prints folded blocks, rows with padding, a scalar and an ignored layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.head, self.extra, self.none = nn.Linear(8, 3, bias=False), nn.Linear(2, 2, bias=False), None
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


PRINTED = """of Printed: stage 3, 2 ranks, 1 unit, 516 B of parameters at rest on this rank
Printed(
  scale: [] replicated
  (blocks): ModuleList(
    (0-2): 3 x Sequential(
      (0): Linear(in_features=8, out_features=8, bias=True, weight: [8, 8] rows [4, 8], bias: [8] rows [4])
      (1): Tanh()
    )
  )
  (head): Linear(in_features=8, out_features=3, bias=False, weight: [3, 8] rows [2, 8])
  (extra): Linear(in_features=2, out_features=2, bias=False, weight: [2, 2] ignored)
)"""


def print_models(rank: int, world_size: int) -> list[str]:
    """Return the texts of all stages, from 3 on, and of hybrid sharding."""
    policy, mesh = tz.Policy(stage=3, ignored=("extra",)), init_device_mesh("cpu", (2, 1))
    models = [tz.compile(Printed(), policy)]
    models += [sharded(Printed(), replace(policy, stage=stage)) for stage in range(3)]
    return [*map(repr, models), repr(tz.compile(Printed(), policy, mesh=mesh))]


def test_a_model_prints_its_share(ranks_pool: RanksPool) -> None:
    full = 4 * (3 * 72 + 24 + 1 + 4)
    for first, *others in ranks_pool.run(2, print_models):
        assert first == f"ZeroModule {PRINTED}"
        heads = [text.splitlines()[0] for text in others]
        assert [head.split(", ", 1)[0].split()[-1] for head in heads] == ["0", "1", "2", "3"]
        assert heads[0].endswith(f"{size(full)} of parameters at rest on this rank")
        assert heads[1].endswith(f"{size(full + 4 * 8)} of parameters at rest on this rank"), "with padding"
        assert heads[2].endswith("516 B of parameters at rest on this rank")
        assert "2 ranks (2 copies of the model)" in heads[3]
