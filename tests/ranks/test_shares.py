"""Ranks that take batches in proportion to ``Policy.shares`` train as one process on the whole batches.

The weights of gradients are in the printed trace, and nothing else of a step changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import thunder_zero as tz
from tests.harness.as_one_process import Side, Steps, assert_near, gather_objects, trains_as_one_process
from tests.harness.errors import fails
from tests.harness.models import LENGTH, VOCABULARY, GptShape, Mlp, fresh, full, sharded
from tests.harness.ranks import RanksPool
from tests.harness.tiers import slow

ROWS, MICRO, STEPS = 12, 3, 3
DATA = torch.randint(0, VOCABULARY, (ROWS * MICRO * STEPS, 2, LENGTH), generator=torch.Generator().manual_seed(1))
CLIPPED = 0.05  # the largest norm, which all gradients exceed


def batches(side: Side, shares: Sequence[float], start: int = 0) -> Iterator[Tensor]:
    """Yield this side's items of each global batch of an epoch."""
    mine = tuple(shares) if side.is_sharded else (1,)
    sampler = tz.ShareSampler(DATA, ROWS, mine, side.rank)
    sampler.set_epoch(2, start)
    yield from (DATA[items] for items in sampler)


def whole_mean(side: Side, local: Tensor, shares: Sequence[float]) -> Tensor:
    """Return the mean of the whole batch, from the means of ranks."""
    if not side.is_sharded:
        return local.detach()
    weighed = (share * value for share, value in zip(shares, gather_objects(local.detach(), side.group), strict=True))
    return sum(weighed, torch.zeros_like(local)) / sum(shares)


def accumulate(side: Side, shares: Sequence[float]) -> Steps:
    """Take steps of several micro-batches, all but the last under ``no_sync``, with clipping."""
    (model,) = side.models
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], 0.5, momentum=0.9)
    rows = batches(side, shares)
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for micro in range(MICRO):
            tokens, targets = next(rows).unbind(1)
            with model.no_sync() if side.is_sharded and micro < MICRO - 1 else nullcontext():
                losses.append(F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()) / MICRO)
                losses[-1].backward()
        clip = tz.clip_grad_norm_ if side.is_sharded else clip_plain
        norm = clip(model, CLIPPED)
        optimizer.step()
        yield torch.stack((whole_mean(side, sum(losses), shares), norm))  # type: ignore[arg-type]


def clip_plain(model: torch.nn.Module, max_norm: float) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def train(rank: int, world_size: int, policy: tz.Policy, tolerance: float, dtype: torch.dtype) -> None:
    plain = fresh(GptShape).to(dtype)
    model = sharded(plain, policy)
    trains_as_one_process([(model, plain)], partial(accumulate, shares=policy.shares), tolerance=tolerance)


EXACT, FLOAT32 = (1e-12, torch.float64), (1e-6, torch.float32)
CASES: list[tuple[int, tz.Policy, float, torch.dtype]] = [
    (2, tz.Policy(stage=3, shares=(2, 1)), *EXACT),
    (3, tz.Policy(stage=2, shares=(3, 1, 2), check_gradients=True), *EXACT),
]
SLOW_CASES: list[tuple[int, tz.Policy, float, torch.dtype]] = [
    *((2, tz.Policy(stage=stage, shares=(2, 1)), *EXACT) for stage in range(3)),
    (3, tz.Policy(stage=0, shares=(3, 1, 2)), *EXACT),
    *((2, tz.Policy(stage=stage, shares=(0.5, 0.25)), *FLOAT32) for stage in (0, 3)),
    *((3, tz.Policy(stage=stage, shares=(3, 1, 2)), *FLOAT32) for stage in (1, 2)),
    (4, tz.Policy(stage=3, shares=(5, 4, 1, 2), replicated=("blocks.1",), bucket_bytes=0), *EXACT),
    (2, tz.Policy(stage=2, shares=(2, 1), reduce_format=tz.Int8()), 5e-2, torch.float32),
    (
        2,
        tz.Policy(stage=3, shares=(2, 1), mixed_precision=tz.MixedPrecision(None, torch.bfloat16)),
        2e-2,
        torch.float32,
    ),
    (2, tz.Policy(stage=3, shares=(2, 1), mixed_precision=tz.MixedPrecision(torch.float32, torch.float64)), *FLOAT32),
]


@pytest.mark.parametrize(("world_size", "policy", "tolerance", "dtype"), [*CASES, *slow(*SLOW_CASES)])
def test_ranks_with_shares_train_as_one_process(
    ranks_pool: RanksPool, world_size: int, policy: tz.Policy, tolerance: float, dtype: torch.dtype
) -> None:
    ranks_pool.run(world_size, train, policy, tolerance, dtype)


def grad_of(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


# Copies of the model, slices, and gradients from elsewhere


def train_copies(rank: int, world_size: int, stage: int) -> None:
    """Train two copies of two ranks. A small parameter's gradient is reduced over all of them at once."""
    plain, shares = fresh(GptShape).double(), (5, 1, 2, 4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    policy = tz.Policy(stage=stage, shares=shares, replicate_below_bytes=100)
    model = sharded(plain, policy, mesh=mesh)
    trains_as_one_process([(model, plain)], partial(accumulate, shares=shares), rank, tolerance=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_shares_of_copies(ranks_pool: RanksPool, stage: int) -> None:
    ranks_pool.run(4, train_copies, stage)


def grads_of_slices(rank: int, world_size: int) -> None:
    """Compare the gradients of sliced layers: both ranks of a slice have the share of their batch."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)).double()
    x = torch.randn(6, 6, dtype=torch.float64)
    plain(x).square().mean().backward()
    expected = [grad_of(param) for param in plain.parameters()]
    plain.zero_grad()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(plain, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = tz.compile(plain, tz.Policy(stage=3, shares=(2, 1)), mesh=mesh)
    model(x.split([4, 2])[rank // 2]).square().mean().backward()
    for param, grad in zip(model.parameters(), expected, strict=True):
        assert_near(full(grad_of(param)), grad, "gradient", 1e-12)


@pytest.mark.slow
def test_shares_of_slices(ranks_pool: RanksPool) -> None:
    ranks_pool.run(4, grads_of_slices)


def reach_parameters(rank: int, world_size: int) -> None:
    """Use a parameter outside of forward too, and an ignored one, whose gradient stays this rank's."""
    plain, x = fresh(Mlp).double(), torch.randn(12, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def loss(model: Any, module: Any, x: Tensor) -> Tensor:
        return model(x).square().mean() + (x @ module.layers[0].weight).square().mean()

    mine = x.split([8, 4])[rank]
    inner = fresh(Mlp).double()
    model = tz.compile(inner, tz.Policy(stage=0, shares=(2, 1), ignored=("layers.2",)))
    loss(model, inner, mine).backward()
    alone = fresh(Mlp).double()
    loss(alone, alone, mine).backward()
    loss(plain, plain, x).backward()
    for name, param in inner.named_parameters():
        expected = alone if name.startswith("layers.2") else plain
        assert_near(grad_of(param), grad_of(expected.get_parameter(name)), name, 1e-12)
    model.zero_grad()
    tz.global_mean(model, model(mine).square().mean(1).sum(), len(mine)).backward()  # decides by counts, not by shares
    plain.zero_grad()
    plain(x).square().mean().backward()
    first, expected_first = (module.get_parameter("layers.0.weight") for module in (inner, plain))
    assert_near(grad_of(first), grad_of(expected_first), "global_mean", 1e-12)


@pytest.mark.slow
def test_parameters_outside_of_forward_ignored_ones_and_global_mean(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, reach_parameters)


# Checkpoints


def train_on(
    rank: int, world_size: int, shares: tuple[float, ...], start: int, end: int, load: Path | None, save: Path | None
) -> Any:
    """Train on some batches of an epoch; load before, or save after."""
    model = sharded(fresh(GptShape).double(), tz.Policy(stage=3, shares=shares))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    if load is not None:
        tz.load(load, model, optimizer)
    side = Side([model], rank, world_size)
    for _, rows in zip(range(start, end), batches(side, shares, start), strict=False):
        optimizer.zero_grad()
        tokens, targets = rows.unbind(1)
        F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    if save is not None:
        tz.save(save, model, optimizer)
    return dict(tz.full_state_dict(model))


@pytest.mark.slow
def test_other_ranks_with_other_shares_resume_within_an_epoch(ranks_pool: RanksPool, tmp_path: Path) -> None:
    expected = ranks_pool.run(1, train_on, (1,), 0, 4, None, None)[0]
    ranks_pool.run(3, train_on, (3, 1, 2), 0, 2, None, tmp_path / "saved")
    result = ranks_pool.run(2, train_on, (2, 1), 2, 4, tmp_path / "saved", None)[0]
    for name, value in expected.items():
        assert_near(result[name], value, name, 1e-9)


# Measured shares


def measure(rank: int, world_size: int) -> None:
    assert tz.shares_of(lambda: time.sleep(0.02 * (rank + 1)), 6, steps=3) == (2, 1)
    # Each rank gets an item, however slow it is. Steps of one item need no measurement.
    assert tz.shares_of(lambda: time.sleep(0.1 * rank), 2, steps=1) == (1, 1)
    fails(
        lambda: tz.shares_of(lambda: None, 1), "ValueError", "batch_size is 1; give an item or more to each of 2 ranks"
    )
    fails(lambda: tz.shares_of(lambda: None, 4, steps=0), "ValueError", "steps is 0")
    steps: list[Callable[[], object]] = [lambda: None, lambda: [][0]]
    kind, text = (
        ("IndexError", "list index") if rank else ("RuntimeError", "rank 1 refused its step, so every rank stops")
    )
    fails(lambda: tz.shares_of(steps[rank], 4), kind, text)
    fails(lambda: tz.shares_of(lambda: None, 4 + rank), "RuntimeError", "batch_size differs between ranks")
    assert dist.get_world_size() == 2


def test_shares_of_measured_steps(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, measure)
