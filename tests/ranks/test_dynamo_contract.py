"""Promises of every sharded model, each shown by the shortest loop; most of the models have graph breaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_

import thunder_zero as tz
from tests.harness.as_one_process import Side, Steps, trains_as_one_process
from tests.harness.errors import error_of
from tests.harness.loops import (
    ROWS,
    SMALL,
    WIDTH,
    Lora,
    Statistics,
    after_failures,
    batch,
    experts,
    interrupted,
    sgd,
    skips_what_overflows,
    two_steps,
)
from tests.harness.models import Halves, fresh
from tests.harness.ranks import RanksPool

pytestmark = pytest.mark.slow


def pair(make: Callable[[], nn.Module], policy: tz.Policy | int = 3, **arguments: Any) -> tuple[Any, Any]:
    """Return a sharded model that dynamo captures, and its plain module."""
    plain = fresh(make)
    return tz.compile(deepcopy(plain), policy, **arguments), plain


# Training


class Branches(Halves):
    """A model whose second graph has one layer more if ``goes_on``."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, goes_on: bool = False) -> Tensor:
        x = torch.tanh(self.a(x))
        torch._dynamo.graph_break()
        x = self.b(x)
        return self.other(x) if goes_on else x


def defer_and_clip(side: Side) -> Steps:
    """Defer the first of two micro-batches, which alone reaches the last layer."""
    (model,) = side.models
    with model.no_sync() if side.is_sharded else nullcontext():
        model(side.rows(batch(0)), goes_on=True).square().mean().backward()
    model(side.rows(batch(1))).square().mean().backward()
    yield tz.clip_grad_norm_(model, 0.1) if side.is_sharded else clip_grad_norm_(model.parameters(), 0.1)


def accumulate_and_clip(rank: int, world_size: int) -> None:
    """Check that hooks run once, and that a backward of several graphs asks once what other ranks have deferred."""
    model, plain = pair(Branches, 2, mesh=init_device_mesh("cpu", (2, 2)) if world_size == 4 else None)
    calls = Counter[str]()
    for name, param in model.named_parameters():
        param.register_hook(lambda grad, name=name: calls.update([f"before {name}"]))
        param.register_post_accumulate_grad_hook(lambda param, name=name: calls.update([f"after {name}"]))
    with mock.patch.object(model.state, "on_any_rank", wraps=model.state.on_any_rank) as on_any_rank:
        trains_as_one_process([(model, plain)], defer_and_clip)
    assert on_any_rank.call_count == 1, on_any_rank.call_args_list
    assert set(calls.values()) == {1}, calls
    assert len(calls) == 2 * len(list(model.parameters())), calls


def guard_accumulation(rank: int, world_size: int) -> None:
    """Check that ``torch.autograd.grad`` is refused, and that a backward finds NaN deferred outside of its graphs."""
    model, _ = pair(Branches, tz.Policy(2, check_gradients=True))
    x = batch().requires_grad_()
    with model.no_sync():
        model(x * (torch.nan if rank == 1 else 1.0), goes_on=True).sum().backward()
        error = error_of(lambda: torch.autograd.grad(model(x).sum(), x))
    assert "in the middle of an accumulation: no_sync defers" in error, error
    error = error_of(lambda: model(x).sum().backward())
    assert "NaN or Inf" in error, error
    assert "the gradients that no_sync deferred are dropped" in error, error


def leave_parameters_out(rank: int, world_size: int) -> None:
    """Train experts that some backwards do not reach, and a router that is ignored."""
    model, plain = pair(Lora, tz.Policy(3, ignored=("router",), replicate_below_bytes=SMALL))
    assert len(model.get_parameter("up")) == len(model.get_parameter("router.bias")) == 7
    trains_as_one_process([(model, plain)], experts)


def skip_overflow(rank: int, world_size: int) -> None:
    """Skip a step whose gradients are infinite on the last rank alone."""
    half = tz.MixedPrecision(torch.float16, output_dtype=torch.float32)
    model, _ = pair(Halves, tz.Policy(mixed_precision=half))
    last = rank == world_size - 1
    skips_what_overflows(model, lambda overflows: model(batch()).sum() * (1e5 if overflows and last else 1))


# Before, between and after the steps


def begin_on_meta(rank: int, world_size: int) -> None:
    """Begin with the values that construction would have drawn."""
    with torch.device("meta"):
        plain = Halves()
    torch.manual_seed(0)
    trains_as_one_process([(tz.compile(plain, stage=3), fresh(Halves))], two_steps)


class Seen(Statistics):
    """A model whose forward also replaces a buffer."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__(momentum)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return super().forward(x)


def infer_between_steps(rank: int, world_size: int) -> None:
    """Check that inference and a forward without gradients are compiled once each."""
    counters.clear()  # of dynamo's captured graphs; the plain model has none
    trains_as_one_process([pair(Seen, 1)], interrupted)
    assert counters["stats"]["unique_graphs"] == 3, counters["stats"]


def save_buffers_of_forward(rank: int, world_size: int, folder: Path) -> None:
    """Save a model whose forward changed its buffers; load into a model that has computed, and go on."""
    model, loaded = (tz.compile(fresh(Seen, None), stage=stage) for stage in (1, 3))  # Thunder alone refuses None

    def loop(side: Side) -> Steps:
        first, last = (model, loaded) if side.is_sharded else (*side.models, *side.models)
        optimizer = sgd(first)
        first(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            first(batch(1))
        if side.is_sharded:
            tz.save(folder / "saved", first, optimizer)
            optimizer = sgd(last)
            with torch.no_grad():
                last(batch(1))
            tz.load(folder / "saved", last, optimizer)
        y = last(batch(2))
        y.square().mean().backward()
        optimizer.step()
        yield y.detach()

    trains_as_one_process([(loaded, fresh(Seen, None))], loop)


def compute_with_full_parameters(rank: int, world_size: int) -> None:
    """Compute and write inside of full_parameters, where the plain module is not captured."""

    def loop(side: Side) -> Steps:
        (model,) = side.models
        yield from two_steps(side)
        with tz.full_parameters(model, writeback=True) if side.is_sharded else nullcontext(model) as module:
            with torch.no_grad():
                y = module(batch())
                module.a.bias += 1
            assert not side.is_sharded or "(Halves) is inside full_parameters" in error_of(lambda: model(batch()))
        yield y
        yield from two_steps(side)

    trains_as_one_process([pair(Halves)], loop)


def go_on_after_failures(rank: int, world_size: int) -> None:
    """Go on after the first reduction, which is of the second graph's gradients, fails."""
    trains_as_one_process([pair(Halves)], partial(after_failures, reduction=1))


# Ranks that run different programs


def compile_again_on_one_rank(rank: int, world_size: int) -> None:
    """Give rank 1 a new shape in each step, for which no rank waits."""

    def loop(side: Side) -> Steps:
        for rows in (4, 6):
            parts = [side.models[0](part).square().mean() for part in side.parts(batch()[: 4 + rows], (4, rows))]
            torch.stack(parts).mean().backward()
            yield side.mean(parts[0]) if side.is_sharded else torch.stack(parts).mean()

    trains_as_one_process([pair(Halves)], loop)


PROMISES: list[tuple[Callable[..., None], int]] = [  # and the number of ranks
    (accumulate_and_clip, 2),
    (accumulate_and_clip, 4),
    (guard_accumulation, 2),
    (leave_parameters_out, 2),
    (skip_overflow, 2),
    (begin_on_meta, 3),
    (infer_between_steps, 2),
    (compute_with_full_parameters, 2),
    (go_on_after_failures, 2),
    (compile_again_on_one_rank, 2),
]


@pytest.mark.parametrize(("promise", "world_size"), PROMISES)
def test_a_promise_holds_under_dynamo(ranks_pool: RanksPool, promise: Callable[..., None], world_size: int) -> None:
    ranks_pool.run(world_size, promise)


def test_a_checkpoint_has_the_buffers_that_forward_changed(ranks_pool: RanksPool, tmp_path: Path) -> None:
    ranks_pool.run(2, save_buffers_of_forward, tmp_path)


class Experts(nn.Module):
    """A model with a graph for each expert; the sign of the batch chooses the expert."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.experts[int(x.sum() > 0)](x)
        return y


def diverge(rank: int, world_size: int, before: tuple[float, ...]) -> str:
    """Take batches of equal signs, then a batch whose sign differs on rank 1; return the error."""
    model = tz.compile(fresh(Experts), stage=3)
    for sign in before:
        model(sign * torch.ones(ROWS, WIDTH)).sum().backward()
    return error_of(lambda: model((1 - 2 * rank) * torch.ones(ROWS, WIDTH)).sum().backward())


def evaluate_or_train(rank: int, world_size: int) -> str:
    """Evaluate on rank 0 and train on rank 1, whose forwards have equal lines in ZeRO-3; return the error."""
    model = tz.compile(fresh(Halves), tz.Policy(3, reshard_after_forward=True))
    with torch.set_grad_enabled(rank == 1):
        return error_of(lambda: model(batch()))


DIFFERENT: list[tuple[Callable[..., str], tuple[Any, ...], tuple[str, ...]]] = [
    (diverge, ((),), ("both in forward number 1 of", "(launch 1: all_gather experts.1.weight", "the same path")),
    (diverge, ((1.0, -1.0),), ("do different things", "rank 0 and rank 1 are both in forward number 3", "the script")),
    (evaluate_or_train, (), ("rank 0 is in forward without backward number 1 of", "rank 1 is in forward number 1 of")),
]


def test_ranks_whose_programs_differ_raise(ranks_pool: RanksPool) -> None:
    for run, args, words in DIFFERENT:
        for error in ranks_pool.run(2, run, *args):
            assert [word for word in words if word not in error] == [], (run.__name__, args, error)
