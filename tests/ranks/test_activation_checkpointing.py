"""Activation checkpointing: the recomputed forward gathers nothing more than backward does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import thunder_zero as tz
from tests.harness.as_one_process import Side, Steps, trains_as_one_process
from tests.harness.loops import step_on
from tests.harness.models import (
    LENGTH,
    WIDTH,
    Block,
    count_sends,
    fresh,
    from_parameters_alone,
    join_rows,
    parameter_inputs,
    relative_error,
    saved,
    sharded,
)
from tests.harness.ranks import RanksPool
from tests.harness.tiers import slow
from thunder_zero.plan.policy import RECOMPUTE
from thunder_zero.schedule.lifetimes import gathered_bytes
from thunder_zero.schedule.ops import Gather, Reduce
from thunder_zero.sharded.dtensors import local

BLOCKS, STEPS = 2, 3
VECTORS = BLOCKS * sum(path.endswith("bias") for path, _ in Block().named_parameters())
NOTHING_KEPT = replace(tz.ZERO3, reshard_after_forward=True)
POLICIES, NAMES = [NOTHING_KEPT, *slow(tz.ZERO3, tz.ZERO1)], ["nothing kept", "ZeRO-3", "ZeRO-1"]


class Net(nn.Module):
    """Two transformer blocks, each of them checkpointed."""

    def __init__(self, is_checked: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.is_checked = is_checked

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checked else block(x)
        return x


def make_batch(rows: int = 2) -> Tensor:
    return torch.randn(rows, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


def count_collectives(traces: tz.tools.Traces) -> Counter[tuple[str, bool]]:
    return Counter((op.kind, op.backward) for op in traces.timeline.ops if isinstance(op, Gather | Reduce))


def gathered_again(traces: tz.tools.Traces) -> set[str]:
    return {path for op in traces.backward_timeline.ops if isinstance(op, Gather) for path in op.params}


def saved_activations(traces: tz.tools.Traces) -> set[str]:
    """Return what forward saves and computes from data, not from parameters alone."""
    parameters = parameter_inputs(traces)
    return saved(traces.forward) - parameters - from_parameters_alone(traces.forward, parameters)


@pytest.mark.parametrize("policy", POLICIES, ids=NAMES)
def test_checkpointing_adds_no_collectives(policy: tz.Policy) -> None:
    plain, checked = (
        tz.trace(fresh(Net, is_checked), make_batch(), policy=policy, world_size=2) for is_checked in (False, True)
    )
    assert count_collectives(checked) == count_collectives(plain)
    assert len(saved_activations(checked)) <= BLOCKS < len(saved_activations(plain)) / 2, "activations are recomputed"
    assert max(gathered_bytes(checked.timeline)) <= max(gathered_bytes(plain.timeline))
    assert gathered_bytes(checked.timeline)[-1] == 0
    more = gathered_again(checked) - gathered_again(plain)
    assert all(path.endswith("bias") or path.startswith("blocks.0") for path in more), "read by forward"
    assert bool(more) == (policy is NOTHING_KEPT)
    if policy is NOTHING_KEPT:
        parameters = parameter_inputs(checked)
        assert saved(checked.forward) & from_parameters_alone(checked.forward, parameters) == set()
        assert gathered_bytes(checked.forward_timeline)[-1] == 0


def train(side: Side) -> Steps:
    (model,) = side.models
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
    for _ in range(STEPS):
        y = model(side.rows(make_batch(4)))
        step_on(optimizer, y.square().mean())
        yield side.gather(y)


def train_with_checkpoints(rank: int, world_size: int, policy: tz.Policy) -> None:
    """Check that training equals one process without checkpoints, and sends the bytes of the timeline."""
    model = sharded(fresh(Net, True), policy)
    trains_as_one_process([(model, fresh(Net, False))], train)
    model(make_batch()).sum().backward()  # refreshes ZeRO-1's rows
    with count_sends() as sent:
        model(make_batch()).square().mean().backward()
    timeline = tz.traces_of(model).timeline
    ops = [op for op in timeline.ops if policy.stage != 1 or op.backward]
    assert sum(sent) == sum(timeline.traffic(op).sent for op in ops), sum(sent)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES, ids=NAMES)
def test_training_equals_one_process(ranks_pool: RanksPool, policy: tz.Policy) -> None:
    ranks_pool.run(2, train_with_checkpoints, policy)


def train_in_modes(rank: int, world_size: int) -> None:
    results = {}
    for mode in RECOMPUTE:
        model = sharded(fresh(Net, False), replace(NOTHING_KEPT, recompute=mode))
        list(train(Side([model], rank, world_size)))
        gathers = [op for op in tz.traces_of(model).timeline.ops if isinstance(op, Gather)]
        results[mode] = sum(len(op.params) for op in gathers), tz.full_state_dict(model)
    plain, expected = results.pop("none")
    for mode, (gathered, weights) in results.items():
        more = VECTORS + 1 if mode == "units" else 0  # and the weight of the first norm, whose input needs no gradient
        assert gathered - plain == more, (mode, gathered, plain)
        assert_close(weights, expected, rtol=0, atol=0)


@pytest.mark.slow
def test_recomputing_trains_alike_bit_for_bit(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, train_in_modes)


# Random numbers

COUNT = 16  # elements of each operator
NEARLY_DIAGONAL = 60 * torch.eye(COUNT)[None, None]


def attention(h: Tensor) -> Tensor:
    """Let each position attend to itself; dropout keeps or drops its value."""
    values = h.reshape(1, 1, COUNT, 1).expand(1, 1, COUNT, COUNT)
    return F.scaled_dot_product_attention(NEARLY_DIAGONAL, NEARLY_DIAGONAL, values, dropout_p=0.5)[0, 0, :, 0]


# Each maps an element to itself times a random factor.
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda h: F.dropout(h, 0.5),
    "rrelu": lambda h: F.rrelu(-h, 0.0, 1.0, True),
    "attention": attention,
    "rand": lambda h: h * torch.rand(h.shape),
    "rand_like": lambda h: h * (torch.rand_like(h) > 0.5),
    "randn": lambda h: h * torch.randn(h.shape),
    "randn_like": lambda h: h * torch.randn_like(h),
    "randint": lambda h: h * torch.randint(0, 2, h.shape),
    "bernoulli": lambda h: h * torch.bernoulli(torch.full_like(h, 0.5)),
    "exponential": lambda h: h * torch.empty_like(h).exponential_(),
    "poisson": lambda h: h * torch.poisson(torch.ones_like(h)),
}


class Drawing(nn.Module):
    """Returns ``y = exp(factor * x * w)``. At w = 1 the gradient is ``y * log(y)`` if factors are forward's."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.draws = [DRAWS[name] for name in names]
        self.w = nn.Parameter(torch.ones(len(names) + 1, COUNT))

    def forward(self, x: Tensor) -> Tensor:
        drawn = [
            checkpoint(lambda x, w, draw=draw: draw(x * w).exp(), x, w, use_reentrant=False)
            for draw, w in zip(self.draws, self.w, strict=False)
        ]
        return torch.stack([*drawn, checkpoint(checkpoint_inside_checkpoint, x, self.w[-1], use_reentrant=False)])


def drop_inside(x: Tensor, w: Tensor) -> Tensor:
    return F.dropout(x * w, 0.5)


def checkpoint_inside_checkpoint(x: Tensor, w: Tensor) -> Tensor:
    return F.dropout(checkpoint(drop_inside, x, w, use_reentrant=False), 0.5).exp()


def differentiate(rank: int, world_size: int, names: list[str]) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rank)
    model = sharded(Drawing(names), 3)
    y = model(torch.arange(1, COUNT + 1) / COUNT)
    y.sum().backward()
    (param,) = model.parameters()
    return y.detach(), local(param.grad)


@pytest.mark.slow
@pytest.mark.parametrize("names", [list(DRAWS)[:2], list(DRAWS)[2:]], ids=len)
def test_backward_has_the_random_numbers_of_forward(ranks_pool: RanksPool, names: list[str]) -> None:
    outputs, grads = zip(*ranks_pool.run(2, differentiate, names), strict=True)
    expected = torch.stack([y * y.log() for y in outputs]).mean(0)
    rows = join_rows(grads, expected.shape, sharded=True)
    for name, row, expected_row in zip((*names, "a checkpoint inside a checkpoint"), rows, expected, strict=True):
        assert relative_error(row, expected_row) < 1e-4, name
        assert len(set(expected_row.tolist())) > 1, name
