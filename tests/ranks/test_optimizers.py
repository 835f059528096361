"""Which optimizers may step rows: torch's elementwise classes, by exact type, and others by the probe, or the user's
word."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh

import thunder_zero as tz
from tests.harness.checkpoints import stepped
from tests.harness.errors import raised
from tests.harness.models import error, fresh
from tests.harness.ranks import RanksPool
from thunder_zero.runtime import probe as probe_room
from thunder_zero.runtime.couplings import ELEMENTWISE

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
    """A user's class, which does what its base does."""


def muon(params: list[nn.Parameter]) -> optim.Optimizer:
    return optim.Muon([param for param in params if param.ndim == 2])


def mixed(params: list[nn.Parameter]) -> optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": [nn.Parameter(torch.ones(2))]}, {"params": params[-1:], "lr": 0.1}]
    return optim.Adafactor(groups)


def sharded_by_torch(params: list[nn.Parameter]) -> optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # compiles TorchScript when it is imported

    return ZeroRedundancyOptimizer(params, optim.SGD, lr=0.1)


WHOLE = "use tz.whole("
REFUSED: dict[str, tuple[Make, str, str]] = {  # what it is, and what to do
    "Muon": (muon, "torch.optim.Muon couples elements of one parameter (", f"{WHOLE}Muon, ...)"),
    "Adafactor": (optim.Adafactor, "torch.optim.Adafactor couples elements of one", f"{WHOLE}Adafactor, ...)"),
    "LBFGS": (
        optim.LBFGS,
        "LBFGS couples parameters (",
        "use an optimizer that steps every parameter alone, or stage=0",
    ),
    "SparseAdam": (optim.SparseAdam, "cannot be probed (RuntimeError: SparseAdam does not", "trust_optimizer=True"),
    "one sharded parameter": (mixed, "Adafactor couples elements of one parameter (", WHOLE),
    "ZeroRedundancyOptimizer": (
        sharded_by_torch,
        "ZeroRedundancyOptimizer may couple elements, and cannot be probed (ValueError: the value of its argument "
        "'optimizer_class' is neither in defaults nor in an attribute)",
        "trust_optimizer=True",
    ),
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
    refused = {name: step_of(make, stage=3) for name, (make, *_) in REFUSED.items()}
    copies = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicate", "shard"))
    passed = {
        "trusted": step_of(muon, stage=1, trust_optimizer=True),
        "a subclass": step_of(Mine, stage=1),
        "scheduled": step_of(scheduled, stage=2),
        "DDP": step_of(muon, stage=0),
        "replicated": step_of(muon, stage=3, replicate_below_bytes=1000),
        "ignored": step_of(muon, stage=3, ignored=("weight",)),
        "whole copies": step_of(muon, stage=3, mesh=copies),
    }
    return refused, passed


def test_an_optimizer_that_couples_what_ranks_have_apart_is_refused(ranks_pool: RanksPool) -> None:
    first, second = ranks_pool.run(2, steps)
    assert first == second  # the sentences, too
    refused, passed = first
    for name, (told, changed) in refused.items():
        for words in REFUSED[name][1:]:
            assert words in told, told
        path = "bias" if name == "one sharded parameter" else "weight"
        assert f", and each rank has only some rows of parameter {path!r}; use" in told, told
        assert not changed, name
    assert set(passed.values()) == {("nothing", True)}, passed


class Clipping(optim.SGD):
    """Clips by the norm of a parameter if an option or an attribute says so; counts its steps in its group and in an
    attribute."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            for name, value in (("clip", 0.0), ("rank", 0), ("count", 0)):
                group.setdefault(name, value)
        self.steps, self.norms = 0, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            group["count"] += 1
            for param in group["params"]:
                if group["clip"] or group["rank"] or self.norms:
                    param.grad.mul_(0.1 / param.grad.norm())
        super().step()


def options_change(rank: int, world_size: int) -> tuple[dict[str, str], int]:
    """What a step says after an option has changed; how often the probe tried while none did."""
    found = {}
    tries = 0
    of_class = probe_room._Probe.verdict

    def count(self: Any) -> Any:
        nonlocal tries
        tries += 1
        return of_class(self)

    for name, value in (("clip", 0.5), ("rank", 4), ("norms", 1)):
        model = thunder.jit(fresh(nn.Linear, 4, 6), transforms=[tz.ZeroTransform(stage=3)])
        optimizer = Clipping(list(model.parameters()))
        with mock.patch.object(probe_room._Probe, "verdict", count):
            for step in range(4):
                optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
                stepped(model, optimizer)
        if name in optimizer.param_groups[0]:
            optimizer.param_groups[0][name] = value
        else:
            setattr(optimizer, name, value)
        found[name] = raised(partial(stepped, model, optimizer))
    return found, tries


@pytest.mark.slow
def test_an_option_that_changes_after_the_probe_is_probed_again(ranks_pool: RanksPool) -> None:
    for found, tries in ranks_pool.run(2, options_change):
        assert all("Clipping couples elements of one parameter" in told for told in found.values()), found
        assert tries == 1  # a count that steps change, and amounts, are no new options
