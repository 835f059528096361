"""``tz.whole`` refuses optimizers that cannot be stepped in parts, ranks that differ, and wrong uses."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh

import thunder_zero as tz
from tests.harness.errors import error_of, fails
from tests.harness.models import Mlp, fresh, sharded
from tests.harness.ranks import RanksPool
from tests.harness.whole_steps import CoupledIfAsked, CustomOptimizer, make_gradients, set_gradients
from thunder_zero.optim import members
from thunder_zero.plan import owners

import thunder

# Optimizers


class NeedsLoss(optim.SGD):
    def step(self, loss: Any) -> None:  # type: ignore[override]
        super().step()


class OwnGroups(optim.SGD):
    """An optimizer that builds its own groups."""

    def __init__(self, params: Any) -> None:
        params = [param for group in params for param in group["params"]]
        super().__init__([{"params": params[:1]}, {"params": params[1:]}], 0.1)


class CountsItself(CustomOptimizer):
    """An optimizer that counts its steps in an attribute."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.count = 0

    def change(self, group: dict[str, Any], params: list[Any]) -> None:
        self.count += 1
        for param in params:
            param -= 0.1 / self.count * param.grad


class CountsWhereItSteps(CustomOptimizer):
    """An optimizer that counts the steps in which a group has gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, steps=0)

    def change(self, group: dict[str, Any], params: list[Any]) -> None:
        group["steps"] += bool(params)
        for param in params:
            param -= 0.1 / group["steps"] * param.grad


class CountsNines(CustomOptimizer):
    """An optimizer that counts steps with a gradient that the probe does not use."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, steps=0)

    def change(self, group: dict[str, Any], params: list[Any]) -> None:
        group["steps"] += any(bool((param.grad == 9).all()) for param in params)
        super().change(group, params)


class Single(CustomOptimizer):
    """An optimizer that does not step float64, the dtype of probe parameters."""

    def change(self, group: dict[str, Any], params: list[Any]) -> None:
        assert all(param.dtype == torch.float32 for param in params), "single precision alone"
        super().change(group, params)


class NeedsParameters(CustomOptimizer):
    """An optimizer that fails on groups without parameters."""

    def change(self, group: dict[str, Any], params: list[Any]) -> None:
        torch.stack([param.sum() for param in group["params"]])
        super().change(group, params)


class Noisy(CustomOptimizer):
    """An optimizer that draws random numbers."""

    def change(self, group: dict[str, Any], params: list[Any]) -> None:
        for param in params:
            param -= 0.1 * torch.rand_like(param) * param.grad


class Failing(CustomOptimizer):
    """An optimizer that fails on one gradient, so on one owner, and has a method that torch's classes lack."""

    def evaluate(self) -> None: ...

    def change(self, group: dict[str, Any], params: list[Any]) -> None:
        if any(param.shape == (7, 7) and param.grad[0, 0] == 9 for param in params):
            raise ValueError("no step on a nine")
        super().change(group, params)


# Refusals when the optimizer is built


def refuse_classes(model: Any, params: list[Any]) -> None:
    give_class = "to make optimizers with; give the class itself and then the parameters"
    for kind, args, words in (
        (lambda params: [*params], params, "which makes a list; give a class of torch.optim.Optimizer"),
        (optim.LBFGS, params, "a step of LBFGS needs the argument 'closure', such as a"),
        (NeedsLoss, params, "a step of NeedsLoss needs the argument 'loss', such as a closure"),
        (optim.SGD(params, 0.1), params, f"tz.whole was given a SGD {give_class}"),
        (params, optim.SGD, f"tz.whole was given a list {give_class}"),
        (optim.Adafactor, model, "tz.whole was given a ZeroModule; give it model.parameters(), or some of them"),
        (CountsWhereItSteps, params, "changes 'steps' of a group only where it has parameters of the group"),
        (CoupledIfAsked, [{"params": params, "norm": 1.0}], "CoupledIfAsked couples parameters (beside other probe p"),
        (optim.Muon, params, "Muon only supports 2D parameters"),
        (Single, params, "cannot be tried on probe parameters (AssertionError: single precision alone), and each rank"),
        (OwnGroups, params, "OwnGroups makes 2 groups of the 1 that it was given, so tz.whole cannot tell their param"),
        (NeedsParameters, params, "NeedsParameters cannot step groups without parameters (RuntimeError: stack expects"),
    ):
        fails(partial(tz.whole, kind, args), words)  # type: ignore[arg-type]


def refuse_parameters(originals: list[Any], params: list[Any], others: list[Any]) -> None:
    of_two_models, twice = [params[0], others[0]], [{"params": params[:1]}, {"params": params[:1]}]
    for args, words in (
        ([nn.Parameter(torch.ones(2, 2))], "a parameter (of shape (2, 2)) that is not one of a sharded model's: take"),
        (originals, "(the plain module's 'layers.0.weight') that is not one of a sharded model's"),
        (of_two_models, "(Mlp); make one for each model"),
        (twice, "some parameters appear in more than one parameter group"),
    ):
        fails(partial(tz.whole, optim.Adafactor, args), words)
    fails(lambda: tz.whole(optim.Adafactor, params, lr=-1.0), "Learning rate should be >= 0")


def refuse_wrong_uses(params: list[Any], others: list[Any]) -> None:
    """Refuse wrong uses, some of them after a step."""
    no_method = "tz.whole(Failing) has no 'evaluate': it has what torch.optim.Optimizer has"
    fails(lambda: tz.whole(Failing, params).evaluate(), no_method)
    optimizer = tz.whole(optim.Adafactor, params)
    fails(lambda: optimizer.evaluate(), "tz.whole(Adafactor) has no 'evaluate': it has what torch.optim.Optimizer has")
    fails(lambda: optimizer.add_param_group({"params": others}), "(Mlp); make one for each model")
    fails(lambda: deepcopy(optimizer), "tz.whole(Adafactor) cannot be copied or pickled, as it belongs to a model")
    fails(lambda: optimizer.step(lambda: 0.0), "tz.whole(Adafactor).step was given a closure")  # type: ignore[arg-type]
    optimizer.step()
    stray_state = {**optimizer.state_dict(), "state": {"k": 1}}
    fails(lambda: optimizer.load_state_dict(stray_state), "has a state 'k' that is of no parameter, which tz.whole")
    optimizer.param_groups[0]["params"] = params[:2]
    fails(optimizer.step, "in the groups of tz.whole(Adafactor) were changed by hand; use add_param_group")


def refuse_all(rank: int, world_size: int) -> None:
    plain, other_model = fresh(Mlp), sharded(fresh(Mlp), 2)
    originals, others = list(plain.parameters()), list(other_model.parameters())
    model = thunder.jit(plain, transforms=[tz.ZeroTransform(stage=3)])
    params = list(model.parameters())
    refuse_classes(model, params)
    refuse_parameters(originals, params, others)
    set_gradients(model, make_gradients(fresh(Mlp), 0))
    refuse_wrong_uses(params, others)


def test_optimizers_that_cannot_be_stepped_in_parts_are_refused(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, refuse_all)


def refuse_later_changes(rank: int, world_size: int) -> None:
    """Refuse what the probe did not see: a norm that an option turns on, a count that a new group lacks."""
    model, grads = sharded(fresh(Mlp), 3), make_gradients(fresh(Mlp), 0)
    params = list(model.parameters())
    coupling = tz.whole(CoupledIfAsked, params, lr=0.1)
    coupling.step()
    coupling.param_groups[0]["norm"] = 1.0
    set_gradients(model, grads)
    fails(coupling.step, "CoupledIfAsked couples parameters (beside other probe parameters ")
    counting: Any = tz.whole(CountsItself, params[:2], lr=0.1)
    fails(lambda: setattr(counting, "count", 100), "tz.whole(CountsItself) cannot set 'count', which CountsItself has")
    counting.mine = 1
    counting.add_param_group({"params": params[2:4]})
    counting.step()
    fails(
        lambda: counting.add_param_group({"params": params[4:]}),
        "steps of CountsItself change its 'count', which begins anew for parameters that are added after",
    )
    set_gradients(model, grads)
    tz.whole(Single, params, trust_optimizer=True).step()
    model_of_many_buckets = sharded(fresh(Mlp), tz.Policy(stage=3, bucket_bytes=64))
    set_gradients(model_of_many_buckets, {**grads, "layers.1.weight": torch.full((7, 7), 9.0)})
    fails(
        tz.whole(CountsNines, model_of_many_buckets.parameters()).step,
        "CountsNines changes 'steps' of a group only where it has parameters of the group",
    )


def test_changes_after_the_probe_are_refused(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, refuse_later_changes)


# Ranks that differ

DIFFERING_OPTIONS: dict[str, tuple[Any, Any]] = {  # options that ranks change after a step: values of both ranks
    "lr": (torch.tensor(0.01), torch.tensor(0.010000001)),
    "eps": ((None, 1e-3), (None, 2e-3)),
    "d": (1.0, 2.0),
}


def refuse_differing_ranks(rank: int, world_size: int) -> None:
    """Refuse ranks that differ. Nothing changes, and the optimizer still works."""
    model, grads = sharded(fresh(Mlp), 3), make_gradients(fresh(Mlp), 0)
    params, before = list(model.parameters()), [param.detach().clone() for param in model.parameters()]
    assign = owners.assign

    def swapped(*args: Any) -> Any:
        return [[(number, 1 - owner) for number, owner in bucket] for bucket in assign(*args)]

    with mock.patch.object(members, "assign", swapped if rank else assign):
        optimizer = tz.whole(optim.Adafactor, params)
    set_gradients(model, grads)
    fails(
        optimizer.step, "parameter 0 of Adafactor differs between ranks: rank 0 has 'layers.", "owned by rank 0, rank"
    )
    rates = tz.whole(optim.Adafactor, params, lr=0.01 * (1 + rank))
    fails(rates.step, "'lr' of group 0 of Adafactor differs between ranks: rank 0 has 0.01, rank 1 has 0.02")
    optimizer = tz.whole(optim.Adafactor, params, lr=0.01)
    if rank == 1:
        params[2].grad = None
    fails(optimizer.step, "parameter 'layers.1.weight' has a gradient on 1 of 2 ranks")
    set_gradients(model, {**grads, "layers.1.weight": torch.full((7, 7), 9.0)})
    assert all(map(torch.equal, params, before)), "a refusal changed a parameter"
    fails(tz.whole(Failing, params, lr=0.1).step, "no step on a nine")
    set_gradients(model, grads)
    optimizer.step()
    for key, values in DIFFERING_OPTIONS.items():
        saved, optimizer.param_groups[0][key] = optimizer.param_groups[0][key], values[rank]
        set_gradients(model, grads)
        shown = [value.item() if isinstance(value, torch.Tensor) else value for value in values]
        words = f"'{key}' of group 0 of Adafactor differs between ranks: rank 0 has {shown[0]}"
        fails(optimizer.step, words, f"rank 1 has {shown[1]}")
        optimizer.param_groups[0][key] = saved
    with model.no_sync():
        model(torch.ones(1, 7)).sum().backward()
    fails(optimizer.step, "cannot step Whole: no_sync still holds unreduced gradients")
    model.zero_grad()
    set_gradients(model, grads)
    elsewhere = optimizer.step if rank == 0 else partial(tz.clip_grad_norm_, model, 1.0)
    fails(elsewhere, "the ranks do different things: rank 0 is in step number")


def test_ranks_that_differ_raise_on_every_rank(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, refuse_differing_ranks)


def refuse_draws_of_copies(rank: int, world_size: int) -> None:
    """Build an optimizer that draws and one that does not, with one replica on two ranks and with two replicas."""
    replicas = "and the 2 copies of the model would draw other ones and drift apart"
    for shape, *words in (((1, 2), "nothing"), ((2, 1), "Noisy draws random numbers (torch's on the cpu)", replicas)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        model = thunder.jit(fresh(Mlp), transforms=[tz.ZeroTransform(stage=3, mesh=mesh)])
        error = error_of(lambda: tz.whole(Noisy, model.parameters()))  # noqa: B023
        assert [word for word in words if word not in error] == [], error
        tz.whole(optim.Adafactor, model.parameters())


@pytest.mark.slow
def test_optimizers_that_draw_are_refused_with_several_replicas(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, refuse_draws_of_copies)
