"""The probe of ``tz.whole`` finds what an optimizer couples, draws and changes.

It finds nothing in an optimizer that steps each parameter by itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.harness.whole_steps import CustomOptimizer
from thunder_zero.optim.probe import SIDE, STEPS, ProbeResult, probe_optimizer
from thunder_zero.optim.stepper import GroupedParams, make_optimizer

SHAPES = ((9, 4), (5,))
Factor = Callable[[Tensor, dict[str, Any], list[Tensor]], Any]  # called with a gradient, a state and all gradients


class Planted(CustomOptimizer):
    """An optimizer that scales its step by a given factor and counts in its groups."""

    def __init__(self, params: Any, lr: Any = 0.1, factor: Factor | None = None) -> None:
        super().__init__(params, lr, count=0)
        self.factor = factor

    def change(self, group: dict[str, Any], params: list[Any]) -> None:
        group["count"] += 1
        for param in params:
            everything = [param.grad for group in self.param_groups for param in group["params"]]
            factor = self.factor(param.grad, self.state[param], everything) if self.factor else 1.0
            param.sub_(factor * param.grad, alpha=float(group["lr"]))


def own_norm(grad: Tensor, state: Any, everything: Any) -> Any:
    """Scale by the norm of a parameter, which couples only its own elements."""
    state["norm"] = grad.norm()
    return 1 / state["norm"].clamp_min(1e-9)


def all_norms(grad: Tensor, state: Any, everything: Any) -> Any:
    return 1 / (1 + sum(float(grad.norm()) for grad in everything))


def threshold_all_norms(grad: Tensor, state: Any, everything: Any) -> Any:
    return 1.0 if all_norms(grad, state, everything) > 1e-3 else 0.5


def store_all_norms(grad: Tensor, state: Any, everything: Any) -> Any:
    """Store norms for a later use."""
    state["norms"] = [*state.get("norms", []), all_norms(grad, state, everything)][-2:]
    return 1.0


def draw_noise(grad: Tensor, state: Any, everything: Any) -> Any:
    return torch.rand(()).item() + random.random() + numpy.random.random()


def draw_and_all_norms(grad: Tensor, state: Any, everything: Any) -> Any:
    return all_norms(grad, state, everything) + 1e-3 * torch.rand(()).item()


def sum_over_ranks(grad: Tensor, state: Any, everything: Any) -> Any:
    dist.all_reduce(grad)
    return 1.0


class Empty(Planted):
    """An optimizer that fails on groups without parameters."""

    def change(self, group: dict[str, Any], params: list[Any]) -> None:
        torch.stack([param.sum() for param in group["params"]])
        super().change(group, params)


class CountsWhereItSteps(CustomOptimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, steps=0)

    def change(self, group: dict[str, Any], params: list[Any]) -> None:
        group["steps"] += bool(params)
        super().change(group, params)


class MovesAll(CustomOptimizer):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for param in (param for group in self.param_groups for param in group["params"]):
                param.mul_(0.9)
        super().step()


def probe_class(
    kind: Any, groups: Any = SHAPES, attributes: Mapping[str, Any] | None = None, **options: Any
) -> ProbeResult:
    """Probe a class; check that nothing but the probe's own parameters changes.

    Args:
        kind: the class.
        groups: shapes, or for each group its options with ``shapes`` and perhaps ``names``.
        attributes: of the first parameter.
        options: of the class.
    """
    all_groups = groups if isinstance(groups[0], dict) else [{"shapes": groups}]
    members = [
        (index, name, nn.Parameter(torch.ones(shape)))
        for index, group in enumerate(all_groups)
        for shape, name in zip(group["shapes"], group.get("names", [None] * len(group["shapes"])), strict=True)
    ]
    vars(members[0][2]).update(attributes or {})
    group_options = [
        {key: value for key, value in group.items() if key not in ("shapes", "names")} for group in all_groups
    ]

    def make_on(options_by_group: Sequence[Mapping[str, Any]], params: GroupedParams) -> optim.Optimizer:
        return make_optimizer(
            kind, options, options_by_group, list(map(frozenset, group_options)), params, named="names" in all_groups[0]
        )

    like = make_on(group_options, members)
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1]
    result = probe_optimizer(make_on, like, torch.device("cpu"))
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert (states[2] == numpy.random.get_state()[1]).all()
    assert all(bool((param == 1).all()) for _, _, param in members)
    assert not like.state
    return result


@contextmanager
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


CASES: dict[str, tuple[dict[str, Any], str, str]] = {  # options, the fields that are set, words in their texts
    "nothing": ({}, "", ""),
    "a norm of one parameter": ({"factor": own_norm}, "", ""),
    "parameters": ({"factor": all_norms}, "couples", "step 1 was off by"),
    "large": ({"factor": threshold_all_norms}, "couples", "was off by"),
    "hidden": ({"factor": store_all_norms}, "couples", f"after {STEPS} steps the state['norms'][0] was another one"),
    "random": ({"factor": draw_noise}, "draws", "Python's, numpy's, torch's on the cpu"),
    "random, and parameters": ({"factor": draw_and_all_norms}, "couples draws", "step 1 was off by"),
    "a collective": ({"factor": sum_over_ranks}, "unknown", "RuntimeError: its step calls the collective c10d"),
    "NaN": ({"factor": lambda *_: float("nan")}, "unknown", "probe parameters become NaN or Inf in step 1"),
    "no move": ({"factor": lambda *_: 0.0}, "unknown", f"probe parameters did not move in {STEPS} steps"),
    "a warmup that begins with zero": ({"factor": all_norms, "lr": 0.0}, "couples", "step 1 was off by"),
    "a learning rate in a tensor": ({"factor": all_norms, "lr": torch.tensor(0.0)}, "couples", "step 1 was off by"),
}


@pytest.mark.parametrize("name", CASES)
def test_couplings_and_draws_are_found(name: str) -> None:
    options, field, words = CASES[name]
    with one_rank():
        result = probe_class(Planted, **options)
    texts = {name: getattr(result, name) for name in ("couples", "draws", "unknown", "fails_empty")}
    texts = {name: text for name, text in texts.items() if text}
    assert " ".join(texts) == field, result
    assert words in "".join(texts.values()), result


def test_changes_by_steps_are_found() -> None:
    plain, empty, counts, moves = map(probe_class, (Planted, Empty, CountsWhereItSteps, MovesAll))
    assert (plain.moving, plain.moving_if_any, plain.moves_all) == (frozenset(("count",)), frozenset(), False)
    assert (empty.fails_empty, empty.couples) == ("RuntimeError: stack expects a non-empty TensorList", "")
    assert counts.moving_if_any == counts.moving == {"steps"}
    assert moves.moves_all


class Asking(Planted):
    """An optimizer that couples parameters by an option of the group, an attribute or a name."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        everything = [param for group in self.param_groups for param in group["params"]]
        for group in self.param_groups:
            for param, name in zip(group["params"], group["param_names"], strict=True):
                if group.get("rank") or getattr(param, "normed", False) or "head" in name:
                    param.grad.mul_(sum(float(other.grad.norm()) for other in everything))
        super().step()


def test_couplings_by_options_attributes_and_names_are_found() -> None:
    cases: list[tuple[dict[str, Any], str, dict[str, Any], bool]] = [
        ({}, "b", {}, False),
        ({"rank": 4}, "b", {}, True),
        ({}, "b", {"normed": True}, True),
        ({}, "head", {}, True),
    ]
    for option, name, attributes, coupled in cases:
        groups = [{"shapes": [(4, 3)], "names": ["a"]}, {"shapes": [(4, 3)], "names": [name], **option}]
        assert bool(probe_class(Asking, groups, attributes).couples) is coupled, (option, name, attributes)


def matrices_together(grad: Tensor, state: Any, everything: list[Tensor]) -> Any:
    return 1 / (1 + sum(float(other.norm()) for other in everything if other.ndim == grad.ndim == 2))


def test_couplings_of_some_shapes_are_found() -> None:
    vectors = [(length,) for length in range(1, SIDE + 2)]
    assert probe_class(Planted, [*vectors, (2, 2)], factor=matrices_together) == probe_class(Planted)
    assert probe_class(Planted, [*vectors, (2, 2), (3, 2)], factor=matrices_together).couples
    assert probe_class(Planted, [(2, 2), (2, 2)], factor=matrices_together).couples  # two parameters of the same shape


def test_hooks_of_the_user_are_not_called() -> None:
    calls: list[int] = []

    class Hooked(Planted):
        def __init__(self, params: Any, lr: Any = 0.1) -> None:
            super().__init__(params, lr)
            self.register_step_pre_hook(lambda *_: calls.append(2))
            self.register_step_post_hook(lambda *_: calls.append(2))

    handle = register_optimizer_step_post_hook(lambda *_: calls.append(1))
    try:
        probe_class(Planted)
        assert calls == []
        probe_class(Hooked)
        assert set(calls) == {2}, "its own hooks"
        calls.clear()
        optim.SGD([nn.Parameter(torch.ones(2))], 0.1).step()
        assert calls == [1]
    finally:
        handle.remove()


def test_optimizers_of_a_package_are_classified() -> None:
    package = pytest.importorskip("pytorch_optimizer")
    for name in ("Lion", "ScheduleFreeAdamW", "Lamb", "Shampoo", "SOAP", "ScalableShampoo"):
        result = probe_class(getattr(package, name))
        assert result == ProbeResult(moving=result.moving), name
    for name in ("AdaGC", "Adai", "AvaGrad", "Prodigy", "DAdaptAdaGrad", "DAdaptLion"):
        assert probe_class(getattr(package, name)).couples, name
    for name in ("Kron", "Gravity"):
        assert probe_class(getattr(package, name)).draws, name
    assert "does not require grad" in probe_class(package.SophiaH).unknown
