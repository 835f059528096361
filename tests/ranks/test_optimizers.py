"""On shards, torch's optimizers step as in one process, or raise an error that names ``tz.whole``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim

import thunder_zero as tz
from tests.harness.errors import error_of, fails
from tests.harness.models import Mlp, fresh, relative_error, sharded
from tests.harness.ranks import RanksPool
from tests.harness.whole_steps import make_gradients, set_gradients

STEPS, UNTIL = 3, 7  # some classes take a few steps before they need an operator without a rule
TORCH_OPTIMIZERS: tuple[tuple[type[optim.Optimizer], dict[str, Any]], ...] = (
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (optim.SGD, {"lr": 0.1, "foreach": True}),
    (optim.Adam, {"amsgrad": True}),
    (optim.AdamW, {}),
    (optim.AdamW, {"fused": True}),
    (optim.AdamW, {"foreach": True}),
    (optim.AdamW, {"lr": torch.tensor(0.1)}),
    (optim.NAdam, {"decoupled_weight_decay": True}),
    (optim.RAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    (optim.Adamax, {}),
    (optim.Adagrad, {"lr_decay": 0.1}),
    (optim.Adadelta, {}),
    (optim.RMSprop, {"centered": True, "momentum": 0.9}),
    (optim.ASGD, {}),
)
# Elementwise optimizers that use an operator for which torch has no sharding rule
WITHOUT_RULES = ("Adan", "AdaSmooth", "ADOPT", "DiffGrad", "FTRL", "MADGRAD", "Ranger", "SPAM", "SRMM")


def matrices_of(module: nn.Module) -> list[nn.Parameter]:
    return [param for param in module.parameters() if param.ndim == 2]


def largest_error(
    make: Callable[..., optim.Optimizer],
    policy: tz.Policy | int,
    like: Callable[..., optim.Optimizer] | None = None,
    params: Callable[[nn.Module], Iterable[nn.Parameter]] = nn.Module.parameters,
) -> float:
    """Return the largest relative error of a parameter after steps on the gradients of one process.

    Args:
        make: builds the optimizer of shards.
        policy: of the model.
        like: builds the optimizer of one process; by default ``make``.
        params: returns the parameters of a module that are stepped.
    """
    plain, model = fresh(Mlp), sharded(fresh(Mlp), policy)
    optimizer, plain_optimizer = make(params(model)), (like or make)(params(plain))
    for step in range(STEPS):
        grads = make_gradients(plain, step)
        set_gradients(model, grads)
        for name, param in plain.named_parameters():
            param.grad = grads[name].clone() if name in grads else None
        optimizer.step()
        plain_optimizer.step()
    full, start = tz.full_state_dict(model), fresh(Mlp).state_dict()
    expected = dict(plain.named_parameters())
    assert max(relative_error(full[name], value) for name, value in start.items()) > 1e-4, "nothing moved"
    return max(relative_error(full[name], param.detach()) for name, param in expected.items())


def step_torchs(rank: int, world_size: int) -> None:
    for stage in (1, 3):
        for kind, options in TORCH_OPTIMIZERS:
            error = largest_error(partial(kind, **options), tz.Policy(stage=stage, replicate_below_bytes=20))
            assert error < 1e-6, (stage, kind, options, error)
    # Muon iterates in bfloat16; a step on a rank's rows only would be 38% off.
    error = largest_error(optim.Muon, 3, params=matrices_of)
    assert error < 2e-3, error


def test_torchs_optimizers_step_as_in_one_process(ranks_pool: RanksPool) -> None:
    """The model has uneven rows, replicated parameters, and parameters without a gradient in a step."""
    ranks_pool.run(2, step_torchs)


def step_without_rules(rank: int, world_size: int, kinds: list[Any]) -> None:
    for kind in kinds:
        model = sharded(fresh(Mlp), 3)
        set_gradients(model, make_gradients(fresh(Mlp), 0))
        optimizer, name = kind(model.parameters()), kind.__name__
        notes = notes_of(lambda: [optimizer.step() for _ in range(UNTIL)])  # noqa: B023
        assert notes == [
            f"thunder_zero: torch cannot take this step of {name} on shards; step whole parameters instead, with "
            f"tz.whole({name}, params, ...) in place of {name}(params, ...), for the same params and options"
        ], (name, notes)
        error = largest_error(partial(tz.whole, kind), 3, kind)
        assert error == 0, (name, error)


def notes_of(step: Callable[[], object]) -> list[str]:
    """Return the notes of the error that a step raises."""
    try:
        step()
    except Exception as failure:
        return getattr(failure, "__notes__", [])
    return ["no error"]


def test_optimizers_without_rules_are_pointed_to_whole_parameters(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, step_without_rules, [optim.Rprop, optim.Adafactor])


@pytest.mark.slow
def test_elementwise_optimizers_without_rules_are_pointed_to_whole_parameters(ranks_pool: RanksPool) -> None:
    package = pytest.importorskip("pytorch_optimizer")
    ranks_pool.run(2, step_without_rules, [getattr(package, name) for name in WITHOUT_RULES])


class Fails(optim.SGD):
    """An optimizer whose step raises an error unrelated to DTensors."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise ValueError("a fault of its own")


def collect_notes(rank: int, world_size: int) -> None:
    model = sharded(fresh(Mlp), tz.Policy(stage=2, ignored=("layers.1.weight",)))
    set_gradients(model, make_gradients(fresh(Mlp), 0))
    ignored = model.get_parameter("layers.1.weight")
    ignored.grad = torch.ones_like(ignored)
    mixed = notes_of(optim.AdamW(model.parameters(), fused=True).step)
    assert len(mixed) == 1, mixed
    assert "group 0 of AdamW has shards, and plain tensors such as parameters that the policy ignores" in mixed[0]
    others = [param for param in model.parameters() if param is not ignored]
    fused = notes_of(optim.SGD(others, fused=True).step)
    assert fused == ["thunder_zero: torch has no rule for the fused step of SGD on shards; leave fused=True out"], fused
    optim.AdamW([{"params": others}, {"params": [ignored]}], fused=True).step()
    assert notes_of(Fails(others).step) == [], "no error of torch's DTensors"
    plain = nn.Parameter(torch.ones(2))
    fails(Fails([plain]).step, "a fault of its own")
    outer = error_of(lambda: step_while_handling(others))
    assert outer == "ValueError: a fault of its own", outer


def step_while_handling(params: list[nn.Parameter]) -> None:
    """Take a step that works while another error is handled."""
    try:
        Fails(params).step()
    except ValueError:
        optim.SGD(params, 0.1).step()
        raise


def test_only_errors_of_shards_are_explained(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, collect_notes)


def test_the_page_has_a_verdict_for_every_class() -> None:
    pytest.importorskip("pytorch_optimizer")
    from examples.bench.optimizers import PAGE, classes, versions

    page = PAGE.read_text()
    if f"\n{versions()}\n" not in page:
        pytest.skip(f"the page has other versions than {versions()}")
    table = page.partition(f"\n{versions()}\n")[2].partition("\n|---")[2].partition("\n\n")[0]
    verdicts: dict[str, tuple[str, str]] = {}
    for shards, whole, *packages in re.findall(r"^\| (.*?) \| (.*?) ?\| (.*?) ?\| (.*?) ?\|$", table, re.MULTILINE):
        for package, names in zip(("torch.optim", "pytorch_optimizer"), packages, strict=True):
            for name in re.findall(r"(\w+)(?: \([^)]*\))?(?:,|$)", names):
                verdicts[f"{package}.{name}"] = (shards, whole)
    assert sorted(verdicts) == sorted(name for name, _ in classes([]))
    assert "WRONG" not in page
    assert {verdicts[f"torch.optim.{kind.__name__}"] for kind, _ in TORCH_OPTIMIZERS} == {("exact", "exact")}
    assert {verdicts[f"pytorch_optimizer.{name}"] for name in WITHOUT_RULES} == {("raises", "exact")}
