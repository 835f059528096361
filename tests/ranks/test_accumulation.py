"""Gradient accumulation: gradients are reduced in each backward, or deferred by ``no_sync`` until the last one."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.as_one_process import Side, Steps, assert_near, gather_objects, trains_as_one_process
from tests.harness.errors import error_of, fails
from tests.harness.models import count_sends, fresh, sharded
from tests.harness.ranks import RanksPool
from tests.harness.tiers import slow
from thunder_zero.sharded.sharded_model import sharded_model

MICRO, ROWS, STEPS = 3, 6, 3  # micro-batches of a step, rows of a micro-batch over all ranks, steps
MODES = ("reduced", "deferred", "mixed")
POLICIES = {f"stage {stage}": tz.Policy(stage=stage, reshard_after_forward=True) for stage in range(4)}
POLICIES["holding"] = replace(tz.ZERO2, reshard_after_backward=False)


class Paths(nn.Module):
    """A model with a layer of the first micro-batch alone and a layer of the last alone; the rest is in all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 5)
        self.first = nn.Linear(5, 5)
        self.last = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, path: str) -> Tensor:
        x = torch.tanh(self.shared.forward(x)) * self.scale
        if path == "first":
            x = self.first.forward(x)
        if path == "last":
            x = self.last.forward(x)
        return x


PATHS = ("first", "neither", "last")
COMMON = {"scale", "shared.weight", "shared.bias"}
FIRST = {"first.weight", "first.bias"}


def make_batch(number: int) -> Tensor:
    return torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(number))


def deferred_paths(model: Any) -> set[str]:
    """Return the parameters whose gradients ``no_sync`` holds."""
    return {param.path for param in sharded_model(model).state.deferred}


def accumulate(side: Side, mode: str, sent: list[int]) -> Steps:
    """Yield the inputs' gradients of each step; append what each micro-batch sends to ``sent``."""
    (model,) = side.models
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        grads = []
        for micro, path in enumerate(PATHS):
            x = side.rows(make_batch(step * MICRO + micro)).requires_grad_()
            defers = micro < MICRO - 1 and (mode == "deferred" or (mode == "mixed" and micro == 1))
            with model.no_sync() if defers and side.is_sharded else nullcontext(), count_sends() as messages:
                (model(x, path).square().mean() / MICRO).backward()
            assert x.grad is not None
            grads.append(side.gather(x.grad) / side.world_size)
            if side.is_sharded:
                sent.append(sum(messages))
                expected = set() if not defers else COMMON if mode == "mixed" else COMMON | FIRST
                assert deferred_paths(model) == expected, (mode, micro)
        optimizer.step()
        yield torch.cat(grads)


def train_in_all_modes(rank: int, world_size: int, policy: tz.Policy) -> None:
    plain = fresh(Paths)
    model = sharded(plain, policy)
    sends = {}
    for mode in MODES:
        model.load_original_state_dict(plain.state_dict())
        sent: list[int] = []
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*no_sync.*|.*No op.*")
            trains_as_one_process([(model, plain)], partial(accumulate, mode=mode, sent=sent))
        sends[mode] = [sum(ranks) for ranks in zip(*gather_objects(sent), strict=True)]
    check_bytes(tz.traces_of(model).plan, world_size, sends["reduced"], sends["deferred"])
    if not policy.reshard_after_backward:
        write_to_held_parameters(model)


def check_bytes(plan: tz.schedule.Plan, world_size: int, reduced: list[int], deferred: list[int]) -> None:
    """Check that no_sync gathers without reducing, and that the last micro-batch reduces every gradient."""

    def nbytes(*layers: str) -> int:
        return sum(param.full_bytes for param in plan.params if param.path.startswith(layers))

    per_byte = (world_size - 1) * (1 if plan.policy.stage else 2)  # what all ranks send to reduce a byte
    first, scalar = per_byte * nbytes("first"), 2 * 4 * (world_size - 1)  # the scalar is all-reduced in all stages
    common = per_byte * nbytes("shared") + scalar
    # A policy that holds parameters keeps the shared layer unsharded between micro-batches.
    gathers = (world_size - 1) * nbytes("shared") if not plan.policy.reshard_after_backward else 0
    for step in range(1, STEPS):
        micros = slice(step * MICRO, (step + 1) * MICRO)
        spared = [plain - held for plain, held in zip(reduced[micros], deferred[micros], strict=True)]
        assert spared == [common + first, common + gathers, gathers - first], (step, spared)


def write_to_held_parameters(model: Any) -> None:
    """Check that held parameters are gathered again after a write between two micro-batches."""
    plain = Paths()
    plain.load_state_dict({name: 2 * value for name, value in tz.full_state_dict(model).items()})
    model.zero_grad()
    with model.no_sync():
        model(make_batch(0), "first").sum().backward()
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(2)
        assert_near(model(make_batch(0), "first").detach(), plain(make_batch(0), "first").detach(), "after the change")


@pytest.mark.parametrize(("world_size", "name"), [(2, "stage 3"), *slow(*((3, name) for name in POLICIES))])
def test_reduced_and_deferred_gradients_train_as_one_process(ranks_pool: RanksPool, world_size: int, name: str) -> None:
    ranks_pool.run(world_size, train_in_all_modes, POLICIES[name])


# Deferred gradients are reduced or dropped


def defer(model: Any, x: Tensor | None = None) -> None:
    with model.no_sync():
        model(torch.ones(2, 4) if x is None else x, "first").sum().backward()


def reduce_all(model: Any) -> None:
    model(torch.ones(2, 4), "neither").sum().backward()


def check_open_accumulation(model: Any) -> None:
    """Check that an optimizer refuses an open accumulation, which only ``zero_grad`` of the model drops."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    before = [param.detach().clone() for param in model.parameters()]
    defer(model)
    fails(
        optimizer.step,
        *("RuntimeError", "cannot step AdamW: no_sync still holds", "'scale'", "outside of no_sync"),
        "model.zero_grad()",
    )
    assert all(map(torch.equal, before, model.parameters()))
    assert all(param.grad is None for param in model.parameters())
    first = model.get_parameter("first.weight")
    optimizer.zero_grad()
    assert deferred_paths(model) == COMMON | FIRST
    model.zero_grad()
    assert not deferred_paths(model)
    reduce_all(model)
    assert first.grad is None
    optimizer.step()
    with pytest.raises(KeyError), model.no_sync():
        raise KeyError("a failure")
    assert sharded_model(model).state.synced


def defer_nan(model: Any, rank: int) -> None:
    """Defer NaN on rank 1 for a layer that only the first micro-batch reaches."""

    def defer_and_reduce(x: Tensor) -> None:
        defer(model, x)
        reduce_all(model)

    model.zero_grad()
    nan = torch.full((2, 4), float("nan") if rank == 1 else 1.0)
    fails(
        lambda: defer_and_reduce(nan), "RuntimeError", "NaN or Inf", "the gradients that no_sync deferred are dropped"
    )
    assert not deferred_paths(model)
    defer_and_reduce(torch.ones(2, 4))
    assert not deferred_paths(model)
    assert all(param.grad.isfinite().all() for param in model.parameters() if param.grad is not None)


def grad_of_sum(model: Any, x: Tensor, inputs: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(model(x, "first").sum(), inputs)


def check_autograd_grad(model: Any) -> None:
    """Check that torch.autograd.grad works, except where it would change or lose deferred gradients."""
    model.zero_grad()
    x = make_batch(0).requires_grad_()
    params = [param for name, param in model.named_parameters() if not name.startswith("last")]
    with model.no_sync():
        model(x, "first").square().mean().backward()
        refusals = [error_of(partial(grad_of_sum, model, x, x))]
    refusals.append(error_of(partial(model(x, "first").sum().backward, inputs=[x])))
    refusals.append(error_of(partial(grad_of_sum, model, x, params)))
    for error in refusals:
        assert "in the middle of an accumulation: no_sync defers" in error, error
        assert "; call it outside of no_sync" in error, error
    model.zero_grad()
    grads = grad_of_sum(model, x, params)
    model(x, "first").sum().backward()
    assert all(torch.equal(grad, param.grad) for grad, param in zip(grads, params, strict=True))


def check_hooks(model: Any) -> None:
    """Check that hooks run once, when a gradient is reduced, as with FSDP2."""
    calls: list[tuple[str, str, Tensor]] = []
    for name, param in model.named_parameters():
        param.register_hook(lambda grad, name=name: calls.append(("before", name, grad.clone())))
        param.register_post_accumulate_grad_hook(
            lambda param, name=name: calls.append(("after", name, param.grad.clone()))
        )
    model.zero_grad()
    defer(model)
    assert not calls
    reduce_all(model)
    assert sorted(call[:2] for call in calls) == sorted(
        (kind, name) for kind in ("after", "before") for name in COMMON | FIRST
    )
    assert all(torch.equal(grad, model.get_parameter(name).grad) for _, name, grad in calls)


def check_deferred_gradients(rank: int, world_size: int, name: str) -> None:
    model = sharded(fresh(Paths), replace(POLICIES[name], check_gradients=True))
    check_open_accumulation(model)
    defer_nan(model, rank)
    check_autograd_grad(model)
    check_hooks(model)


@pytest.mark.parametrize("name", ["stage 3", *slow("stage 0", "holding")])
def test_deferred_gradients_are_reduced_once_or_dropped(ranks_pool: RanksPool, name: str) -> None:
    ranks_pool.run(2, check_deferred_gradients, name)


# Ranks that differ


def reach_different_layers(rank: int, world_size: int) -> None:
    """Reach one layer on rank 0 and another on rank 1 under no_sync; the last micro-batch reaches neither."""
    model, plain = sharded(fresh(Paths), tz.DDP), fresh(Paths)
    with model.no_sync():
        model(make_batch(0), PATHS[2 * rank]).sum().backward()
    model(make_batch(0), "neither").sum().backward()
    for path in (*PATHS, "neither"):
        plain(make_batch(0), path).sum().backward()
    for name, param in plain.named_parameters():
        assert param.grad is not None
        assert_near(model.get_parameter(name).grad, param.grad / 2, name)


def test_a_gradient_deferred_on_one_rank_is_reduced_by_all(ranks_pool: RanksPool) -> None:
    """DDP has no collective under no_sync, so that ranks may differ there."""
    ranks_pool.run(2, reach_different_layers)
