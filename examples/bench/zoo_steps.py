"""Trains one family of the zoo on one rank by ``thunder.jit``, and compares it with eager.

Right is the mean over ranks of what eager PyTorch gives for each rank's batch, seed and buffers::

    rank 0: eager(module, batch 0, seed 0) -> gradients 0 --+
                                                            mean -> right gradients, right step
    rank 1: eager(module, batch 1, seed 1) -> gradients 1 --+
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thunder_zero as tz  # before thunder
from examples.bench.families import Family
from thunder_zero.capture.zero_module import captured_forward
from thunder_zero.schedule.ops import Gather

import thunder

STEPS = 2
LEARNING_RATE = 0.1
SMALL = 1e-3  # differences are relative to a tensor's largest value, or to this
BUCKET_BYTES = 4096  # several gathers, in models as small as these
BETWEEN_STEPS = 1000  # seeds


@dataclass(frozen=True)
class Right:
    """One step of eager: this rank's loss and buffers, and the mean gradients of all ranks, or None."""

    loss: Tensor
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]


def policy(stage: int) -> tz.Policy:
    return tz.Policy(stage, bucket_bytes=BUCKET_BYTES, reshard_after_forward=True)


def fresh(family: Family) -> nn.Module:
    torch.manual_seed(0)
    return family.make()


def batches(family: Family, rank: int) -> list[Any]:
    """This rank's batch of each step."""
    torch.manual_seed(1 + rank)
    return [family.batch() for _ in range(STEPS)]


def computed(family: Family, model: Any, batch: Any, rank: int, step: int) -> Tensor:
    """Run forward and backward with a seed of this rank and step; returns the loss."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):  # some models draw in Python or numpy
        seed(BETWEEN_STEPS * step + rank)
    loss = family.loss(model, deepcopy(batch))
    loss.backward()
    return loss.detach()


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def eager(family: Family, rank: int, world_size: int) -> list[Right]:
    """Train in eager PyTorch, by hand on all ranks."""
    model, found = fresh(family), []
    optimizer = sgd(model)
    for step, batch in enumerate(batches(family, rank)):
        loss = computed(family, model, batch, rank, step)
        for param in model.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= world_size
        grads = {name: None if each.grad is None else each.grad.clone() for name, each in model.named_parameters()}
        found.append(Right(loss, grads, {name: buffer.clone() for name, buffer in model.named_buffers()}))
        optimizer.step()
        optimizer.zero_grad()
    return found


def farthest(found: Mapping[str, Tensor | None], right: Mapping[str, Tensor | None]) -> float:
    """The largest difference of a tensor's values, relative to the largest of its right values, or to SMALL.

    Raises:
        AssertionError: one side has a gradient, and the other does not.
    """
    errors = [0.0]
    for name, value in right.items():
        other = found[name]
        assert (value is None) == (other is None), f"{name} has {'no' if other is None else 'a'} gradient"
        if value is not None and other is not None and value.numel():
            errors.append(float((other - value).abs().max()) / max(float(value.abs().max()), SMALL))
    return max(errors)


@contextmanager
def gathers_launched(model: Any) -> Iterator[list[int]]:
    """How many parameters each gather of the model's transport has, in the block."""
    launched: list[int] = []
    transport = model.state.transport
    launch = transport.all_gather

    def counted(shards: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        launched.append(len(params))
        return launch(shards, params, *args, **kwargs)

    with patch.object(transport, "all_gather", counted):
        yield launched


def full_gradients(model: Any) -> dict[str, Tensor | None]:
    return {
        name: None
        if param.grad is None
        else param.grad.full_tensor()
        if hasattr(param.grad, "full_tensor")
        else param.grad
        for name, param in model.named_parameters()
    }


def train(family: Family, stage: int, rank: int, right: Sequence[Right]) -> dict[str, Any]:
    """Take the steps. Of the last of them: graphs, gathers in their proven schedules, and gathers launched.

    Returns:
        ``error``: the largest relative difference of a loss, a gradient or a buffer from eager; ``graphs``;
        ``scheduled``; ``launched``; ``seconds``: CPU time of the first step, which compiles both phases.
    """
    model = thunder.jit(fresh(family), transforms=[tz.ZeroTransform(policy(stage))])
    optimizer = sgd(model)
    seconds, error = 0.0, 0.0
    for step, batch in enumerate(batches(family, rank)):
        with gathers_launched(model) as launched:
            start = time.process_time()
            loss = computed(family, model, batch, rank, step)
            seconds = seconds if step else time.process_time() - start
        error = max(
            error,
            farthest({"loss": loss}, {"loss": right[step].loss}),
            farthest(full_gradients(model), right[step].gradients),
            farthest(dict(model.named_buffers()), right[step].buffers),
        )
        optimizer.step()
        optimizer.zero_grad()
    programs = [tz.traces_of(model, graph=graph) for graph in range(len(captured_forward(model).ran))]
    return {
        "error": error,
        "graphs": len(programs),
        "scheduled": sum(isinstance(op, Gather) for program in programs for op in program.timeline.ops),
        "launched": len(launched),
        "seconds": seconds,
    }
