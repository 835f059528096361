"""What holds for every sharded model holds under ``tz.compile``: each promise in the shortest loop that shows it."""

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
from torch.testing import assert_close

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
from tests.harness.models import Halves, count_sends, fresh, sharded
from tests.harness.ranks import RanksPool

pytestmark = pytest.mark.slow


def pair(make: Callable[[], nn.Module], policy: tz.Policy | int = 3, **arguments: Any) -> tuple[Any, Any]:
    """Return a model that dynamo captures, and an equal plain module."""
    plain = fresh(make)
    return tz.compile(deepcopy(plain), policy, **arguments), plain


# Training


class Branches(Halves):
    """Sometimes the second graph has one layer more."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, goes_on: bool = False) -> Tensor:
        x = torch.tanh(self.a(x))
        torch._dynamo.graph_break()
        x = self.b(x)
        return self.other(x) if goes_on else x


def defer_and_clip(side: Side) -> Steps:
    """Of two micro-batches the first is deferred, and alone reaches a layer."""
    (model,) = side.models
    with model.no_sync() if side.is_sharded else nullcontext():
        model(side.rows(batch(0)), goes_on=True).square().mean().backward()
    model(side.rows(batch(1))).square().mean().backward()
    yield tz.clip_grad_norm_(model, 0.1) if side.is_sharded else clip_grad_norm_(model.parameters(), 0.1)


def accumulates_and_clips(rank: int, world_size: int) -> None:
    """Hooks run once, when a gradient is reduced; a backward of several graphs asks once what other ranks have
    deferred. Four ranks are two copies of two."""
    model, plain = pair(Branches, 2, mesh=init_device_mesh("cpu", (2, 2)) if world_size == 4 else None)
    ran = Counter[str]()
    for name, param in model.named_parameters():
        param.register_hook(lambda grad, name=name: ran.update([f"before {name}"]))
        param.register_post_accumulate_grad_hook(lambda param, name=name: ran.update([f"after {name}"]))
    with mock.patch.object(model.state, "on_any_rank", wraps=model.state.on_any_rank) as asked:
        trains_as_one_process([(model, plain)], defer_and_clip)
    assert asked.call_count == 1, asked.call_args_list
    assert set(ran.values()) == {1}, ran
    assert len(ran) == 2 * len(list(model.parameters())), ran


def guards_an_accumulation(rank: int, world_size: int) -> None:
    """``torch.autograd.grad`` would lose a part of it; a deferred NaN is found at the end of a backward that does not
    reach its parameter, outside of every graph."""
    model, _ = pair(Branches, tz.Policy(2, check_gradients=True))
    x = batch().requires_grad_()
    with model.no_sync():
        model(x * (torch.nan if rank == 1 else 1.0), goes_on=True).sum().backward()
        said = error_of(lambda: torch.autograd.grad(model(x).sum(), x))
    assert "in the middle of an accumulation: no_sync defers" in said, said
    said = error_of(lambda: model(x).sum().backward())
    assert "NaN or Inf" in said, said
    assert "the gradients that no_sync deferred are dropped" in said, said


def mixes_precision(rank: int, world_size: int) -> None:
    """The numbers, dtypes and bytes of ``thunder.jit``."""
    half = tz.MixedPrecision(torch.bfloat16, torch.float32, torch.float64, overrides={"1": tz.MixedPrecision()})
    plain = nn.Sequential(nn.Linear(WIDTH, 7), nn.LayerNorm(7), nn.Linear(7, WIDTH))
    results = []
    for front_end in (tz.compile, sharded):
        model: Any = front_end(deepcopy(plain), tz.Policy(mixed_precision=half))
        with count_sends() as sent:
            output = model(batch()[rank::world_size])
            output.square().mean().backward()
        results.append((output.detach(), sum(sent), [param.grad for param in model.parameters()]))
    assert output.dtype is torch.float64, output.dtype
    assert_close(*results, rtol=0, atol=0)


def leaves_parameters_out(rank: int, world_size: int) -> None:
    """A backward that does not reach an expert gives it no gradient; ranks have their own of an ignored router."""
    model, plain = pair(Lora, tz.Policy(3, ignored=("router",), replicate_below_bytes=SMALL))
    assert len(model.get_parameter("up")) == len(model.get_parameter("router.bias")) == 7
    trains_as_one_process([(model, plain)], experts)


def skips_a_step_that_overflows(rank: int, world_size: int) -> None:
    """Gradients of the second step are infinite on the last rank alone."""
    half = tz.MixedPrecision(torch.float16, output_dtype=torch.float32)
    model, _ = pair(Halves, tz.Policy(mixed_precision=half))
    last = rank == world_size - 1
    skips_what_overflows(model, lambda overflows: model(batch()).sum() * (1e5 if overflows and last else 1))


# Before, between and after the steps


def begins_on_the_meta_device(rank: int, world_size: int) -> None:
    """With the values that construction would have drawn."""
    with torch.device("meta"):
        plain = Halves()
    torch.manual_seed(0)
    trains_as_one_process([(tz.compile(plain, stage=3), fresh(Halves))], two_steps)


class Seen(Statistics):
    """Its forward also replaces a buffer."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__(momentum)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return super().forward(x)


def infers_between_steps(rank: int, world_size: int) -> None:
    """Inference is another program, which is compiled once, and so is a forward without gradients."""
    counters.clear()  # dynamo's, of the graphs that it captures; the plain model has none
    trains_as_one_process([pair(Seen, 1)], interrupted)
    assert counters["stats"]["unique_graphs"] == 3, counters["stats"]


def saves_what_forward_left(rank: int, world_size: int, folder: Path) -> None:
    """A forward changed buffers and refreshed ZeRO-1's copies; a model that has computed, too, loads and goes on.

    Without a momentum, which Thunder alone refuses.
    """
    model, other = (tz.compile(fresh(Seen, None), stage=stage) for stage in (1, 3))

    def loop(side: Side) -> Steps:
        first, last = (model, other) if side.is_sharded else (*side.models, *side.models)
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

    trains_as_one_process([(other, fresh(Seen, None))], loop)


def computes_with_full_parameters(rank: int, world_size: int) -> None:
    """The plain module does so, uncaptured; what it is given goes on in the model."""

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


def goes_on_after_failures(rank: int, world_size: int) -> None:
    """The reduction of the second graph's gradients fails, which comes first in backward."""
    trains_as_one_process([pair(Halves)], partial(after_failures, reduction=1))


# Ranks that run different programs


def compiles_again_alone(rank: int, world_size: int) -> None:
    """Rank 1 gets a new shape in each step, and nobody waits for it."""

    def loop(side: Side) -> Steps:
        for rows in (4, 6):
            parts = [side.models[0](part).square().mean() for part in side.parts(batch()[: 4 + rows], (4, rows))]
            torch.stack(parts).mean().backward()
            yield side.mean(parts[0]) if side.is_sharded else torch.stack(parts).mean()

    trains_as_one_process([pair(Halves)], loop)


PROMISES: list[tuple[Callable[..., None], int]] = [  # and of how many ranks
    (accumulates_and_clips, 2),
    (accumulates_and_clips, 4),
    (guards_an_accumulation, 2),
    (mixes_precision, 3),
    (leaves_parameters_out, 2),
    (skips_a_step_that_overflows, 2),
    (begins_on_the_meta_device, 3),
    (infers_between_steps, 2),
    (computes_with_full_parameters, 2),
    (goes_on_after_failures, 2),
    (compiles_again_alone, 2),
]


@pytest.mark.parametrize(("promise", "world_size"), PROMISES)
def test_dynamo(ranks_pool: RanksPool, promise: Callable[..., None], world_size: int) -> None:
    ranks_pool.run(world_size, promise)


def test_a_checkpoint_has_what_forward_left(ranks_pool: RanksPool, tmp_path: Path) -> None:
    ranks_pool.run(2, saves_what_forward_left, tmp_path)


class Experts(nn.Module):
    """The graph after the break is another one for each expert, by the values of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.experts[int(x.sum() > 0)](x)
        return y


def differ(rank: int, world_size: int, before: tuple[float, ...]) -> str:
    """Batches of these signs on all ranks, then one of another sign on rank 1."""
    model = tz.compile(fresh(Experts), stage=3)
    for sign in before:
        model(sign * torch.ones(ROWS, WIDTH)).sum().backward()
    return error_of(lambda: model((1 - 2 * rank) * torch.ones(ROWS, WIDTH)).sum().backward())


def evaluate_or_train(rank: int, world_size: int) -> str:
    """In ZeRO-3 both forwards have the same lines."""
    model = tz.compile(fresh(Halves), tz.Policy(3, reshard_after_forward=True))
    with torch.set_grad_enabled(rank == 1):
        return error_of(lambda: model(batch()))


DIFFERENT: list[tuple[Callable[..., str], tuple[Any, ...], tuple[str, ...]]] = [
    (differ, ((),), ("line 0 of the collectives of forward of graph 1 differs", "the same path")),
    (differ, ((1.0, -1.0),), ("do different things", "rank 0 and rank 1 are both in forward of graph", "the script")),
    (evaluate_or_train, (), ("rank 0 is in the first forward without backward of graph 0", "rank 1 is in the first")),
]


def test_ranks_whose_programs_differ_hear_of_it(ranks_pool: RanksPool) -> None:
    for run, args, words in DIFFERENT:
        for said in ranks_pool.run(2, run, *args):
            assert [word for word in words if word not in said] == [], (run.__name__, args, said)
