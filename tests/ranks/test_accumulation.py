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

MICRO, ROWS, STEPS = 3, 6, 3  # micro-batches of a step, rows of one over all ranks, steps
WAYS = ("reduced", "deferred", "mixed")
POLICIES = {f"stage {stage}": tz.Policy(stage=stage, reshard_after_forward=True) for stage in range(4)}
POLICIES["holding"] = replace(tz.ZERO2, reshard_after_backward=False)


class Paths(nn.Module):
    """A model with five rows and a scalar in all micro-batches; one layer in the first alone, one in the last alone."""

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


def batch(number: int) -> Tensor:
    return torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(number))


def deferred(model: Any) -> set[str]:
    """Return the parameters whose gradients ``no_sync`` holds."""
    return set(sharded_model(model).state.accumulation.paths)


def accumulate(side: Side, way: str, sent: list[int]) -> Steps:
    """Parameters that only the first micro-batch, or only the last one, reaches, and the gradients of inputs too."""
    (model,) = side.models
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        grads = []
        for micro, path in enumerate(PATHS):
            x = side.rows(batch(step * MICRO + micro)).requires_grad_()
            defers = micro < MICRO - 1 and (way == "deferred" or (way == "mixed" and micro == 1))
            with model.no_sync() if defers and side.is_sharded else nullcontext(), count_sends() as messages:
                (model(x, path).square().mean() / MICRO).backward()
            assert x.grad is not None
            grads.append(side.gather(x.grad) / side.world_size)
            if side.is_sharded:
                sent.append(sum(messages))
                right = set() if not defers else COMMON if way == "mixed" else COMMON | FIRST
                assert deferred(model) == right, (way, micro)
        optimizer.step()
        yield torch.cat(grads)


def both_ways(rank: int, world_size: int, policy: tz.Policy) -> None:
    plain = fresh(Paths)
    model = sharded(plain, policy)
    sends = {}
    for way in WAYS:
        model.load_original_state_dict(plain.state_dict())
        sent: list[int] = []
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*no_sync.*|.*No op.*")
            trains_as_one_process([(model, plain)], partial(accumulate, way=way, sent=sent))
        sends[way] = [sum(ranks) for ranks in zip(*gather_objects(sent), strict=True)]
    check_bytes(tz.traces_of(model).plan, world_size, sends["reduced"], sends["deferred"])
    if not policy.reshard_after_backward:
        changed_on_the_way(model)


def check_bytes(plan: tz.schedule.Plan, world_size: int, reduced: list[int], deferred: list[int]) -> None:
    """Under no_sync a micro-batch gathers and does not reduce; the last one reduces every gradient of any of them."""

    def nbytes(*layers: str) -> int:
        return sum(param.full_bytes for param in plan.params if param.path.startswith(layers))

    each = (world_size - 1) * (1 if plan.policy.stage else 2)  # what all ranks send to reduce a byte
    first, scalar = each * nbytes("first"), 2 * 4 * (world_size - 1)  # the scalar is all-reduced in all stages
    common = each * nbytes("shared") + scalar
    # The layer that all micro-batches read is kept unsharded, if it is held.
    gathers = (world_size - 1) * nbytes("shared") if not plan.policy.reshard_after_backward else 0
    for step in range(1, STEPS):
        micros = slice(step * MICRO, (step + 1) * MICRO)
        spared = [plain - held for plain, held in zip(reduced[micros], deferred[micros], strict=True)]
        assert spared == [common + first, common + gathers, gathers - first], (step, spared)


def changed_on_the_way(model: Any) -> None:
    """Write to held parameters between two micro-batches of a step: they are gathered again."""
    plain = Paths()
    plain.load_state_dict({name: 2 * value for name, value in tz.full_state_dict(model).items()})
    model.zero_grad()
    with model.no_sync():
        model(batch(0), "first").sum().backward()
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(2)
        assert_near(model(batch(0), "first").detach(), plain(batch(0), "first").detach(), "after the change")


@pytest.mark.parametrize("name", ["stage 3", *slow("holding", "stage 0", "stage 1", "stage 2")])
def test_both_ways_train_as_one_process(ranks_pool: RanksPool, name: str) -> None:
    ranks_pool.run(3, both_ways, POLICIES[name], timeout=110)


# What becomes of deferred gradients


def defer(model: Any, x: Tensor | None = None) -> None:
    with model.no_sync():
        model(torch.ones(2, 4) if x is None else x, "first").sum().backward()


def reduce_all(model: Any) -> None:
    model(torch.ones(2, 4), "neither").sum().backward()


def refuses_and_drops(model: Any) -> None:
    """Leave an accumulation open: optimizers refuse it. ``zero_grad`` of the model drops it, that of an optimizer does
    not."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    before = [param.detach().clone() for param in model.parameters()]
    defer(model)
    fails(
        optimizer.step,
        *("RuntimeError", "cannot step AdamW: no_sync still holds", "'first.bias'", "outside of no_sync"),
        "model.zero_grad()",
    )
    assert all(map(torch.equal, before, model.parameters()))
    assert all(param.grad is None for param in model.parameters())
    first = model.get_parameter("first.weight")
    optimizer.zero_grad()
    assert deferred(model) == COMMON | FIRST
    model.zero_grad()
    assert not deferred(model)
    reduce_all(model)
    assert first.grad is None
    optimizer.step()
    with pytest.raises(KeyError), model.no_sync():
        raise KeyError("a failure")
    assert sharded_model(model).state.accumulation.synced


def finds_nan(model: Any, rank: int) -> None:
    """Defer NaN on rank 1 for a layer that only the first micro-batch reaches; nothing adds it later."""

    def both(x: Tensor) -> None:
        defer(model, x)
        reduce_all(model)

    model.zero_grad()
    nan = torch.full((2, 4), float("nan") if rank == 1 else 1.0)
    fails(lambda: both(nan), "RuntimeError", "NaN or Inf", "the gradients that no_sync deferred are dropped")
    assert not deferred(model)
    both(torch.ones(2, 4))
    assert not deferred(model)
    assert all(param.grad.isfinite().all() for param in model.parameters() if param.grad is not None)


def gradient(model: Any, x: Tensor, wanted: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(model(x, "first").sum(), wanted)


def gives_what_is_asked_for(model: Any) -> None:
    """Call torch.autograd.grad: it works, but not where it would add to an accumulation or lose a part of it."""
    model.zero_grad()
    x = batch(0).requires_grad_()
    params = [param for name, param in model.named_parameters() if not name.startswith("last")]
    with model.no_sync():
        model(x, "first").square().mean().backward()
        refusals = [error_of(partial(gradient, model, x, x))]
    refusals.append(error_of(partial(model(x, "first").sum().backward, inputs=[x])))
    refusals.append(error_of(partial(gradient, model, x, params)))
    for said in refusals:
        assert "in the middle of an accumulation: no_sync defers" in said, said
        assert "; call it outside of no_sync" in said, said
    model.zero_grad()
    asked = gradient(model, x, params)
    model(x, "first").sum().backward()
    assert all(torch.equal(grad, param.grad) for grad, param in zip(asked, params, strict=True))


def runs_hooks_once(model: Any) -> None:
    """Run hooks when a gradient is reduced, as FSDP2 does."""
    fired: list[tuple[str, str, Tensor]] = []
    for name, param in model.named_parameters():
        param.register_hook(lambda grad, name=name: fired.append(("before", name, grad.clone())))
        param.register_post_accumulate_grad_hook(
            lambda param, name=name: fired.append(("after", name, param.grad.clone()))
        )
    model.zero_grad()
    defer(model)
    assert not fired
    reduce_all(model)
    assert sorted(at[:2] for at in fired) == sorted(
        (kind, name) for kind in ("after", "before") for name in COMMON | FIRST
    )
    assert all(torch.equal(grad, model.get_parameter(name).grad) for _, name, grad in fired)


def in_turn(rank: int, world_size: int, name: str) -> None:
    model = sharded(fresh(Paths), replace(POLICIES[name], check_gradients=True))
    refuses_and_drops(model)
    finds_nan(model, rank)
    gives_what_is_asked_for(model)
    runs_hooks_once(model)


@pytest.mark.parametrize("name", ["stage 3", *slow("stage 0", "holding")])
def test_deferred_gradients_are_reduced_once_or_dropped(ranks_pool: RanksPool, name: str) -> None:
    ranks_pool.run(2, in_turn, name, timeout=110)


# Ranks that differ


def reach(rank: int, world_size: int) -> None:
    """Reach one layer on rank 0 and another on rank 1 under no_sync; the last micro-batch reaches neither."""
    model, one = sharded(fresh(Paths), tz.DDP), fresh(Paths)
    with model.no_sync():
        model(batch(0), PATHS[2 * rank]).sum().backward()
    model(batch(0), "neither").sum().backward()
    for path in (*PATHS, "neither"):
        one(batch(0), path).sum().backward()
    for name, param in one.named_parameters():
        assert param.grad is not None
        assert_near(model.get_parameter(name).grad, param.grad / 2, name)


def test_a_gradient_deferred_on_one_rank_is_reduced_by_all(ranks_pool: RanksPool) -> None:
    """DDP has no collective under no_sync, so that ranks may differ there."""
    ranks_pool.run(2, reach)
