"""Loops in which a forward is not followed by its own backward: evaluation, GANs, teachers, self-distillation.

The reference is one process, which trains on the batches of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thunder_zero as tz
from examples.tensor_memory import added_at_peak
from tests.harness.models import Mlp, Tensors, error, fresh, sharded
from tests.harness.ranks import RanksPool
from tests.harness.tiers import of_tier

STAGES = of_tier((3,), (0, 1, 2, 3))
WIDTH, ROWS, STEPS = 5, 3, 2  # rows of each rank's batch
Pair = tuple[Any, Any]


def batch(ranks: Sequence[int], step: int) -> Tensor:
    """The rows of these ranks, the same in every process: (ROWS * len(ranks), WIDTH)."""
    generators = [torch.Generator().manual_seed(1000 * step + rank) for rank in ranks]
    return torch.cat([torch.randn(ROWS, WIDTH, generator=generator) for generator in generators])


class Trainer:
    """Two models with an optimizer each, and this process's rows of each step."""

    def __init__(self, first: Any, second: Any, ranks: Sequence[int]) -> None:
        self.first, self.second, self.ranks = first, second, ranks
        self.steps_first = torch.optim.SGD(first.parameters(), 0.3, momentum=0.9)
        self.steps_second = torch.optim.SGD(second.parameters(), 0.3, momentum=0.9)

    def batch(self, number: int) -> Tensor:
        return batch(self.ranks, number)


def step_on(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def gan(t: Trainer, step: int) -> None:
    """The generator's backward goes through the discriminator; the discriminator's own takes what no graph made."""
    generator, discriminator = t.first, t.second
    step_on(t.steps_first, discriminator(generator(t.batch(step))).square().mean())
    with torch.no_grad():
        fake = generator(t.batch(step))
    assert not fake.requires_grad
    step_on(t.steps_second, (discriminator(fake) - 1).square().mean() + discriminator(t.batch(9)).square().mean())


def teacher_and_student(t: Trainer, step: int) -> None:
    """The teacher follows the student's weights, and is called between the student's forward and its backward."""
    student, teacher = t.first, t.second
    answer = student(t.batch(step))
    with torch.no_grad():
        target = teacher(t.batch(step))
    step_on(t.steps_first, (answer - target - 0.5).square().mean())
    with torch.no_grad():
        for mine, other in zip(teacher.parameters(), student.parameters(), strict=True):
            mine.lerp_(other, 0.3)


def self_distillation(t: Trainer, step: int) -> None:
    """One model three times in one loss; the third time without a graph."""
    model, x = t.first, t.batch(step)
    once, twice = model(x), model(x + 0.1)
    with torch.no_grad():
        target = model(x - 0.1)
    step_on(t.steps_first, (once - twice).square().mean() + (twice - target - 0.3).square().mean())


def critic(t: Trainer, step: int) -> None:
    """Several steps of the critic for one of the generator; gradients of both pile up until they are zeroed."""
    generator, discriminator = t.first, t.second
    for number in range(2):
        fake = generator(t.batch(step + number)).detach()
        step_on(t.steps_second, discriminator(fake).mean() - discriminator(t.batch(7 + number)).square().mean())
    step_on(t.steps_first, -discriminator(generator(t.batch(step))).mean())


def evaluated_on_the_way(t: Trainer, step: int) -> None:
    """Both models are called without a graph between a forward and its backward: the trained one, and the other."""
    y = t.first(t.batch(step))
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            t.first(t.batch(step + 5))
            t.second(t.batch(step + 5))
    step_on(t.steps_first, y.square().mean())


LOOPS: dict[str, Callable[[Trainer, int], None]] = {
    "gan": gan,
    "teacher and student": teacher_and_student,
    "self-distillation": self_distillation,
    "critic": critic,
    "evaluated on the way": evaluated_on_the_way,
}


def modules() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return Mlp(WIDTH, 2), Mlp(WIDTH, 2)


def trained(loop: str, models: Pair, ranks: Sequence[int]) -> tuple[Tensors, Tensors]:
    """The weights of both models after some steps."""
    trainer = Trainer(*models, ranks)
    for step in range(STEPS):
        LOOPS[loop](trainer, step)
    first, second = (
        tz.full_state_dict(model) if isinstance(model, tz.ZeroModule) else model.state_dict() for model in models
    )
    return first, second


def run(rank: int, world_size: int) -> dict[tuple[int, str], tuple[Tensors, Tensors]]:
    results = {}
    for stage in STAGES:
        plain = modules()
        models = tuple(sharded(module, stage) for module in plain)
        for loop in LOOPS:
            for model, module in zip(models, plain, strict=True):
                model.zero_grad()
                model.load_original_state_dict(module.state_dict())
            results[stage, loop] = trained(loop, models, [rank])
    return results


def test_loops_with_several_forwards_train_as_one_process(ranks_pool: RanksPool) -> None:
    ranks = ranks_pool.run(2, run, timeout=110)
    for loop in LOOPS:
        right = trained(loop, modules(), range(2))
        for results in ranks:
            for stage in STAGES:
                for found, expected in zip(results[stage, loop], right, strict=True):
                    for name, weight in expected.items():
                        assert error(found[name], weight) < 1e-5, (loop, stage, name)


# No graph: no memory

LAYERS, MANY_ROWS = 6, 512  # the activations are much larger than the parameters


def without_graph(model: Any, x: Tensor) -> dict[str, Any]:
    """What a forward holds under ``no_grad`` and ``inference_mode``."""
    found: dict[str, Any] = {}
    for context in (torch.no_grad, torch.inference_mode):
        outputs: list[Tensor] = []

        def forward(context: Any = context, outputs: list[Tensor] = outputs) -> None:
            with context():
                outputs.append(model(x))

        forward()  # compiles
        peak = added_at_peak(forward, x.device)
        found[context.__name__] = outputs[-1].requires_grad, outputs[-1].is_inference(), peak
    return found


def infer(rank: int, world_size: int) -> list[list[dict[str, Any]]]:
    """Before a training step and after it."""
    results = []
    x = torch.randn(MANY_ROWS, WIDTH, requires_grad=True)
    for stage in STAGES:
        model = sharded(fresh(Mlp, WIDTH, LAYERS), stage)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        before = without_graph(model, x)
        step_on(optimizer, model(x).square().mean())
        results.append([before, without_graph(model, x)])
    return results


@pytest.mark.slow
def test_nothing_is_saved_where_no_gradient_can_be_asked_for(ranks_pool: RanksPool) -> None:
    eager = fresh(Mlp, WIDTH, LAYERS)
    right = without_graph(deepcopy(eager), torch.randn(MANY_ROWS, WIDTH, requires_grad=True))
    parameters = sum(param.nbytes for param in eager.parameters())
    assert parameters < MANY_ROWS * WIDTH * 4 / 4
    for results in ranks_pool.run(2, infer, timeout=110):
        for of_stage in results:
            for found in of_stage:
                for context, (requires_grad, is_inference, peak) in found.items():
                    assert (requires_grad, is_inference) == right[context][:2]
                    assert peak <= right[context][2] + 2 * parameters


@pytest.mark.slow
def test_gradients_of_inputs_reach_a_frozen_model(ranks_pool: RanksPool) -> None:
    """A model without trainable parameters has a backward where its input needs one, and none otherwise."""
    right = batch(range(2), 0).requires_grad_()
    fresh(Mlp, WIDTH, 2).requires_grad_(False)(right).square().sum().backward()
    assert right.grad is not None
    for rank, results in enumerate(ranks_pool.run(2, frozen, timeout=110)):
        for is_connected, grad in results:
            assert not is_connected
            assert error(grad, right.grad[rank * ROWS : (rank + 1) * ROWS]) < 1e-5


def frozen(rank: int, world_size: int) -> list[tuple[bool, Tensor | None]]:
    results = []
    for stage in (0, 1, 2, 3):
        model = sharded(fresh(Mlp, WIDTH, 2).requires_grad_(False), stage)
        is_connected = model(batch([rank], 0)).requires_grad
        x = batch([rank], 0).requires_grad_()
        model(x).square().sum().backward()
        results.append((is_connected, x.grad))
    return results
