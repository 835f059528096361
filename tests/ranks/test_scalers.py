"""Every gradient scaler skips a step on all ranks if one rank finds NaN or Inf, however its gradients are shared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import thunder_zero as tz
from tests.harness.models import fresh
from tests.harness.ranks import RanksPool
from tests.harness.tiers import slow
from thunder_zero.sharded.dtensors import local

import thunder

SCALERS: dict[str, Any] = {"torch's": torch.amp.GradScaler, "FSDP's": ShardedGradScaler}
OPTIMIZERS: dict[str, Any] = {
    "plain": lambda groups: torch.optim.SGD(groups, 0.1),
    "fused": lambda groups: torch.optim.AdamW(groups, 0.1, fused=True),
}


class Rows(nn.Module):
    """A module whose first parameter is a replicated scalar, then five rows, and a parameter that a policy ignores."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.layer = nn.Linear(4, 5, bias=False)
        self.own = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale * self.own


def poison(model: Any, place: str, rank: int) -> None:
    """After backward, write Inf into a gradient, on the second rank of each replica only."""
    if rank % 2:
        grad = model.get_parameter({"row": "layer.weight", "ignored": "own"}[place]).grad
        local(grad)[0] = torch.inf


def assert_steps_skipped(rank: int, world_size: int) -> None:
    """Take three steps, the second with Inf; check the scale and the parameters after each."""
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("replicate", "shard"))
    for stage in (1, 2):
        policy = tz.Policy(stage=stage, ignored=("own",))
        model: Any = thunder.jit(fresh(Rows), transforms=[tz.ZeroTransform(policy, mesh=mesh)])
        ignored = model.get_parameter("own")
        shards = [param for param in model.parameters() if param is not ignored]
        for scaler_name, scaler_kind in SCALERS.items():
            for kind, make in OPTIMIZERS.items():
                for place in ("row", "ignored"):
                    case = (stage, scaler_name, kind, place)
                    optimizer = make([{"params": shards}, {"params": [ignored]}])
                    scaler = scaler_kind("cpu", init_scale=16.0, growth_interval=100)
                    states = []
                    for step in range(3):
                        optimizer.zero_grad()
                        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
                        if step == 1:
                            poison(model, place, rank)
                            if kind == "plain":
                                scaler.unscale_(optimizer)
                        scaler.step(optimizer)
                        scaler.update()
                        assert scaler.get_scale() == (8.0 if step else 16.0), (case, step, scaler.get_scale())
                        states.append([local(param).detach().clone() for param in model.parameters()])
                    first, second, third = states
                    assert all(map(torch.equal, first, second)), case
                    assert not any(map(torch.equal, second, third)), case
                    assert all(bool(value.isfinite().all()) for value in third), case


@pytest.mark.parametrize("world_size", [2, *slow(4)])
def test_inf_in_one_ranks_gradient_skips_the_step_on_all(ranks_pool: RanksPool, world_size: int) -> None:
    """Inf is in a row of one rank of each replica, or in an ignored parameter that the same optimizer steps."""
    ranks_pool.run(world_size, assert_steps_skipped)
