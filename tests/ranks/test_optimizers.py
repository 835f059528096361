"""Which optimizers may step rows: torch's elementwise classes, by exact type, and others on the user's word."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh

import thunder_zero as tz
from tests.harness.checkpoints import stepped
from tests.harness.errors import raised
from tests.harness.models import error, fresh
from tests.harness.ranks import RanksPool
from thunder_zero.runtime.optimizer_hooks import ELEMENTWISE

import thunder

Make = Callable[[list[nn.Parameter]], optim.Optimizer]

OPTIONS: dict[type[optim.Optimizer], tuple[dict[str, Any], ...]] = {  # what might couple elements, but does not
    optim.SGD: ({"momentum": 0.9, "nesterov": True}, {"fused": True}, {"foreach": True, "maximize": True}),
    optim.Adam: ({"amsgrad": True}, {"fused": True, "weight_decay": 0.1}, {"foreach": True}),
    optim.AdamW: ({"amsgrad": True}, {"fused": True}, {"lr": torch.tensor(0.1)}),
    optim.NAdam: ({"decoupled_weight_decay": True},),
    optim.RAdam: ({"decoupled_weight_decay": True, "weight_decay": 0.1},),
    optim.Adagrad: ({"fused": True}, {"lr_decay": 0.1}),
    optim.RMSprop: ({"centered": True, "momentum": 0.9},),
}
CASES = [(kind, options) for kind in sorted(ELEMENTWISE, key=str) for options in ({}, *OPTIONS.get(kind, ()))]


def after_steps(make: Make, start: list[Tensor]) -> Tensor:
    """These parameters after four steps, joined; an element's gradient is a function of the element alone."""
    params = [nn.Parameter(rows.clone()) for rows in start]
    optimizer = make(params)
    for step in range(4):
        for param in params:
            param.grad = torch.sin(param.detach() * (step + 2))
        optimizer.step()
    return torch.cat([param.detach() for param in params])


@pytest.mark.parametrize(("kind", "options"), CASES, ids=lambda part: getattr(part, "__name__", ""))
def test_a_step_on_rows_is_a_step_on_these_rows_of_the_whole(kind: Any, options: dict[str, Any]) -> None:
    full = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    make = partial(kind, **options)
    assert error(after_steps(make, [full[:4], full[4:]]), after_steps(make, [full])) < 1e-6


class Mine(optim.SGD):
    """A user's class, which may do anything."""


def muon(params: list[nn.Parameter]) -> optim.Optimizer:
    return optim.Muon([param for param in params if param.ndim == 2])


def mixed(params: list[nn.Parameter]) -> optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": [nn.Parameter(torch.ones(2))]}, {"params": params[-1:], "lr": 0.1}]
    return Mine(groups)


def sharded_by_torch(params: list[nn.Parameter]) -> optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # compiles TorchScript when it is imported

    return ZeroRedundancyOptimizer(params, optim.SGD, lr=0.1)


UNKNOWN: dict[str, tuple[Make, str]] = {
    "Muon": (muon, "optim.Muon"),
    "Adafactor": (optim.Adafactor, "optim.Adafactor"),
    "LBFGS": (optim.LBFGS, "lbfgs.LBFGS"),
    "SparseAdam": (optim.SparseAdam, "sparse_adam.SparseAdam"),
    "a subclass": (Mine, "test_optimizers.Mine"),
    "one sharded parameter": (mixed, "test_optimizers.Mine"),
    "ZeroRedundancyOptimizer": (sharded_by_torch, "zero_redundancy_optimizer.ZeroRedundancyOptimizer"),
}


def step_of(make: Make, **policy: Any) -> tuple[str, bool]:
    """The error of a step, and whether a parameter changed."""
    model = thunder.jit(fresh(nn.Linear, 4, 6), transforms=[tz.ZeroTransform(**policy)])
    params = list(model.parameters())
    before = [param.detach().clone() for param in params]
    optimizer = make(params)
    if type(optimizer) is optim.LBFGS:
        told = raised(lambda: optimizer.step(lambda: 0.0))
    else:
        told = raised(lambda: stepped(model, optimizer))
    return told, not all(map(torch.equal, before, params))


def scheduled(params: list[nn.Parameter]) -> optim.Optimizer:
    """A scheduler replaces the method ``step`` of its optimizer."""
    optimizer = optim.SGD(params, lr=0.1)
    optim.lr_scheduler.ConstantLR(optimizer)
    return optimizer


def steps(rank: int, world_size: int) -> tuple[dict[str, tuple[str, bool]], dict[str, tuple[str, bool]]]:
    refused = {name: step_of(make, stage=3) for name, (make, _) in UNKNOWN.items()}
    copies = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicate", "shard"))
    passed = {
        "trusted": step_of(Mine, stage=1, trust_optimizer=True),
        "scheduled": step_of(scheduled, stage=2),
        "DDP": step_of(muon, stage=0),
        "replicated": step_of(muon, stage=3, replicate_below_bytes=1000),
        "ignored": step_of(muon, stage=3, ignored=("weight",)),
        "whole copies": step_of(muon, stage=3, mesh=copies),
    }
    return refused, passed


def test_an_optimizer_that_is_not_known_as_elementwise_is_refused_on_rows(ranks_pool: RanksPool) -> None:
    for refused, passed in ranks_pool.run(2, steps):
        for name, (told, changed) in refused.items():
            assert f"{UNKNOWN[name][1]} is not known to treat every element alone" in told, told
            path = "bias" if name == "one sharded parameter" else "weight"
            assert f"only some rows of parameter {path!r}; use" in told, told
            assert ("a subclass of torch.optim.SGD may do anything" in told) is (UNKNOWN[name][0] in (Mine, mixed)), (
                told
            )
            assert "trust_optimizer=True" in told, told
            assert not changed, name
        assert set(passed.values()) == {("nothing", True)}, passed
