"""Sharded training has the numbers of one process, for each model and loop in ``CASES``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import thunder_zero as tz
from examples.tensor_memory import added_at_peak
from tests.harness.as_one_process import Loop, Side, Steps, assert_near, digest, trains_as_one_process
from tests.harness.errors import fails
from tests.harness.loops import ROWS, WIDTH, Statistics, after_failures, batch, interrupted, sgd, step_on, two_steps
from tests.harness.models import LENGTH, GptShape, Mlp, Small, fresh, sharded
from tests.harness.ranks import RanksPool, run_ranks
from tests.harness.tiers import slow

import thunder

WORDS = 9  # in the smallest vocabulary


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with an eps above the rounding noise of gradients that are exactly zero in theory."""
    return torch.optim.AdamW(model.parameters(), 5e-3, eps=1e-3)


# Language models in a usual loop


def train_language_model(side: Side, optimizer_of: Callable[[Any], torch.optim.Optimizer], steps: int = 8) -> Steps:
    (model,) = side.models
    optimizer = optimizer_of(model)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        tokens, targets = torch.randint(0, WORDS, (2, ROWS, LENGTH), generator=generator)
        logits = model(side.rows(tokens))
        loss = F.cross_entropy(logits.flatten(0, 1), side.rows(targets).flatten())
        step_on(optimizer, loss)
        yield torch.cat((side.gather(logits).flatten(), side.mean(loss)[None]))


SGD: Loop = partial(train_language_model, optimizer_of=partial(sgd, lr=0.02))
ADAMW: Loop = partial(train_language_model, optimizer_of=adamw)
TWENTY: Loop = partial(train_language_model, optimizer_of=adamw, steps=20)


# Loops in which a forward is not followed by its own backward


def train_gan(side: Side) -> Steps:
    """Take two steps of the critic for each step of the generator, whose backward goes through the critic.

    Gradients of both accumulate until they are zeroed.
    """
    generator, critic = side.models
    first, second = sgd(generator, 0.3), sgd(critic, 0.3)
    for step in range(2):
        for index, context in enumerate((torch.no_grad, nullcontext)):
            with context():
                fake = generator(side.rows(batch(step + index)))
            assert fake.requires_grad is (context is nullcontext)
            real = critic(side.rows(batch(7 + index)))
            step_on(second, (critic(fake.detach()) - 1).square().mean() + real.square().mean())
        yield side.mean(step_on(first, critic(generator(side.rows(batch(step)))).square().mean()))


def train_student(side: Side) -> Steps:
    """Call the teacher between the student's forward and backward; the teacher averages the student's weights."""
    student, teacher = side.models
    optimizer = sgd(student, 0.3)
    for step in range(2):
        answer = student(side.rows(batch(step)))
        with torch.no_grad():
            target = teacher(side.rows(batch(step)))
        step_on(optimizer, (answer - target - 0.5).square().mean())
        with torch.no_grad():
            for param, student_param in zip(teacher.parameters(), student.parameters(), strict=True):
                param.lerp_(student_param, 0.3)
        yield side.gather(target)


def delay_backward(side: Side) -> Steps:
    """Call three forwards, then both models without a graph, then backward of the second loss and of the others."""
    model, other = side.models
    losses = [model(side.rows(batch(step))).square().mean() for step in range(3)]
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            model(side.rows(batch(8)))
            other(side.rows(batch(9)))
    losses[1].backward()
    (losses[0] + losses[2]).backward()
    yield side.mean(torch.stack(losses))


# Batches that ranks do not share evenly


def train_unevenly(side: Side) -> Steps:
    """Train on ranks with different numbers of rows, also none: in ``tz.global_mean`` each row weighs the same."""
    model = side.models[0]
    optimizer = sgd(model)
    for step, sizes in enumerate(((0, 7), (4, 3))):
        x = torch.cat(side.parts(batch(step, 7), sizes))
        if side.is_sharded:
            total = model(x if len(x) else torch.ones(1, WIDTH)).square().mean(1).sum()
            loss = tz.global_mean(model, total if len(x) else total * 0, count=len(x))
            message = f"not a number of items (on this rank it is {-1 if side.rank else 4})"
            fails(partial(tz.global_mean, model, total, -1 if side.rank else 4), "ValueError", message)
            fails(partial(tz.global_mean, model, total, 0), "ValueError", "no rank has an item")
        else:
            loss = model(x).square().mean()
        yield side.mean(step_on(optimizer, loss))


class Heads(nn.Module):
    """A module with two outputs and a 0-dim factor, whose gradient Thunder returns unsummed, in the batch's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.used, self.left_out = nn.Linear(WIDTH, 7), nn.Linear(7, 3), nn.Linear(7, 3)
        self.factor = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.body(x)) * self.factor
        return self.used(x), self.left_out(x)


def leave_head_out(side: Side) -> Steps:
    """Leave an output out of the loss of no rank, one rank and all ranks, which have 1, 2 and 3 rows.

    Its layer gets zeros where eager has None, by ``materialize_grads``.
    """
    (model,) = side.models
    for leaves_out in ((), (1,), (0, 1, 2)):
        model.zero_grad()
        losses = []
        for rank, x in enumerate(side.parts(batch(0, 6), (1, 2, 3)), side.rank):
            used, left_out = model(x)
            if rank not in leaves_out:
                used = used + left_out
            elif not side.is_sharded:
                used = used + 0 * left_out
            losses.append(used.square().mean())
        loss = torch.stack(losses).mean()
        loss.backward()
        yield side.mean(loss)


# Inference


def train_between_inferences(side: Side) -> Steps:
    yield from interrupted(side)
    assert not side.is_sharded or thunder.cache_misses(side.models[0]) <= 3, "inference, no_grad, training"


def differentiate_inputs(side: Side) -> Steps:
    """Check that a frozen model has a backward only if its input requires a gradient."""
    (model,) = side.models
    x = side.rows(batch(0)).requires_grad_()
    assert not model(x.detach()).requires_grad
    model(x).square().sum().backward()
    assert x.grad is not None
    yield side.gather(x.grad)


# The table

Kinds = tuple[Callable[[], nn.Module], ...]
PAIR_LOOPS: tuple[Loop, ...] = (train_gan, train_student, delay_backward, train_unevenly, after_failures)
PAIR: Kinds = (partial(Mlp, WIDTH, 3),) * 2


def frozen() -> nn.Module:
    return Mlp(WIDTH, 2).requires_grad_(False)


CASES = [  # ranks, models, the loops that train them, and stages
    (3, (Small,), (ADAMW,), (0, 3)),
    (2, PAIR, PAIR_LOOPS, (3,)),
    *slow(
        (1, (Small,), (SGD,), (1,)),
        (3, (GptShape,), (SGD, ADAMW), (2,)),
        (3, (GptShape,), (SGD, TWENTY), (0, 1, 3)),
        (1, (GptShape,), (SGD, ADAMW), (0, 3)),
        (2, PAIR, PAIR_LOOPS, (0, 1)),
        (2, (Statistics,), (train_between_inferences,), (1, 3)),
        (3, (Heads,), (leave_head_out,), (0, 1, 3)),
        (2, (frozen,), (differentiate_inputs,), (0, 3)),
    ),
]


def train_all(rank: int, world_size: int, kinds: Kinds, loops: Sequence[Loop], stages: Sequence[int]) -> None:
    """Train the same compiled models with all loops, and compare the stages more tightly than with one process."""
    first: dict[Any, dict[str, Tensor]] = {}
    for stage in stages:
        torch.manual_seed(0)
        plain = [kind() for kind in kinds]
        policy = tz.Policy(stage=stage, materialize_grads=Heads in kinds)
        models = [sharded(module, policy) for module in plain]
        for loop in loops:
            for model, module in zip(models, plain, strict=True):
                model.zero_grad()
                model.load_original_state_dict(module.state_dict())
            states = trains_as_one_process(list(zip(models, plain, strict=True)), loop)
            for index, state in enumerate(states):
                for name, expected in first.setdefault((loop, index), state).items():
                    assert_near(state[name], expected, f"{name} of stages {stage} and {stages[0]}", 1e-6)


def name_of(value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    return ",".join(str(getattr(getattr(part, "func", part), "__name__", part)) for part in value)


@pytest.mark.parametrize(("world_size", "kinds", "loops", "stages"), CASES, ids=name_of)
def test_it_trains_as_one_process(
    ranks_pool: RanksPool, world_size: int, kinds: Kinds, loops: Sequence[Loop], stages: Sequence[int]
) -> None:
    ranks_pool.run(world_size, train_all, kinds, loops, stages)


def step_in_part(rank: int, world_size: int) -> None:
    """Train on ranks 1 and 2 of three only."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return
    plain = fresh(Mlp, WIDTH)
    model = thunder.jit(deepcopy(plain), transforms=[tz.ZeroTransform(stage=1, process_group=group)])
    trains_as_one_process([(model, plain)], two_steps)


def test_gradients_are_means_over_the_process_group(ranks_pool: RanksPool) -> None:
    ranks_pool.run(3, step_in_part)


# Stale values


def step_before_backward(rank: int, world_size: int, stage: int) -> None:
    """Step between a forward and its backward.

    A step on DTensors does not raise the version of the saved rows, and a fused optimizer raises none at all.
    """
    model = sharded(fresh(Mlp, WIDTH, 2), tz.Policy(stage=stage, reshard_after_forward=True))
    for optimizer in (sgd(model), torch.optim.AdamW(model.parameters(), fused=True)):
        loss = model(batch()).square().mean()
        model(batch(1)).square().mean().backward()
        optimizer.step()
        fails(loss.backward, "RuntimeError", "modified by an inplace operation")
        model.zero_grad()
        model(batch()).square().mean().backward()  # the next step works
        optimizer.step()


@pytest.mark.parametrize("stage", [3, *slow(0, 1)])
def test_a_backward_after_a_step_is_refused(ranks_pool: RanksPool, stage: int) -> None:
    ranks_pool.run(2, step_before_backward, stage)


# Bits


def digest_two_runs(rank: int, world_size: int) -> list[str]:
    """Return the digests of all results of two runs in one compiled model."""
    plain, digests = fresh(Small), []
    model = sharded(plain, 3)
    for _ in range(2):
        model.load_original_state_dict(plain.state_dict())
        values = list(train_language_model(Side([model], rank, world_size), adamw, steps=3))
        digests.append(
            digest([*values, *model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)])
        )
    return digests


@pytest.mark.slow
@pytest.mark.parametrize("are_new", [False, True])
def test_runs_are_equal_to_the_bit(ranks_pool: RanksPool, are_new: bool) -> None:
    """New processes hash strings differently; no program may depend on hashes."""
    ranks = ranks_pool.run(3, digest_two_runs)
    assert all(first == again for first, again in ranks)
    assert not are_new or run_ranks(3, digest_two_runs) == ranks


# Inference


def measure_inference(rank: int, world_size: int, stage: int) -> None:
    """Check that a forward without a graph adds at its peak what eager's adds, apart from gathered parameters."""
    plain = fresh(Mlp, WIDTH, 6)
    x = batch(0, 512).requires_grad_()
    parameters = sum(param.nbytes for param in plain.parameters())
    assert parameters < x.nbytes / 4
    model = sharded(plain, stage)
    step_on(sgd(model), model(x).square().mean())
    for context in (torch.no_grad, torch.inference_mode):
        peaks = []
        with context():
            for module in (model, plain):
                y = module(x)  # compiles
                assert (y.requires_grad, y.is_inference()) == (False, context is torch.inference_mode)
                peaks.append(added_at_peak(partial(module, x), x.device))
        assert peaks[0] <= peaks[1] + 2 * parameters, (context, peaks, parameters)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_inference_saves_nothing_for_backward(ranks_pool: RanksPool, stage: int) -> None:
    ranks_pool.run(2, measure_inference, stage)
