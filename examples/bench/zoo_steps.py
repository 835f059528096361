"""Trains one family of the zoo on one rank, under a front end and a stage, and compares it with eager."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import thunder_zero as tz  # before thunder
from examples.bench.families import Family
from thunder_zero.schedule.timeline import Kind

import thunder

STEPS = 3
STAGES = (1, 2, 3)
LEARNING_RATE = 1e-3
EPSILON = 1e-4  # gradients of the keys' biases are zero but for rounding, and AdamW would divide them by themselves
BUCKET_BYTES = 4096  # several gathers, in models as small as these


def policy(stage: int) -> tz.Policy:
    return tz.Policy(stage, bucket_bytes=BUCKET_BYTES, reshard_after_forward=True)


FRONT_ENDS: dict[str, Callable[[nn.Module, int], Any]] = {
    "thunder.jit": lambda module, stage: thunder.jit(module, transforms=[tz.ZeroTransform(policy(stage))]),
    "tz.compile": lambda module, stage: tz.compile(module, policy(stage)),
}


def fresh(family: Family) -> nn.Module:
    torch.manual_seed(0)
    return family.make()


def batches(family: Family, world_size: int) -> list[list[Any]]:
    """A batch for each rank in each step."""
    torch.manual_seed(1)
    return [[family.batch() for _ in range(world_size)] for _ in range(STEPS)]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPSILON)


def eager(family: Family, world_size: int) -> dict[str, torch.Tensor]:
    """The parameters after the steps, in one process that computes the mean loss of all ranks."""
    model = fresh(family)
    optimizer = adamw(model)
    for batch in batches(family, world_size):
        for mine in batch:
            (family.loss(model, mine) / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def thunder_alone(family: Family) -> None:
    """Forward and backward under ``thunder.jit``, without this package."""
    family.loss(thunder.jit(fresh(family)), batches(family, 1)[0][0]).backward()


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


def train(family: Family, front_end: str, stage: int, rank: int, world_size: int) -> dict[str, Any]:
    """Take the steps. Of the last of them: graphs, gathers in their proven schedules, and gathers launched.

    Returns:
        ``error``: the largest difference of a parameter from eager; ``graphs``; ``scheduled``; ``launched``;
        ``registered``: operators through automatic registration; ``seconds``: CPU time of the first forward, which
        compiles both phases.
    """
    model = FRONT_ENDS[front_end](fresh(family), stage)
    optimizer = adamw(model)
    seconds = 0.0
    for number, batch in enumerate(batches(family, world_size)):
        mine = deepcopy(batch[rank])
        with gathers_launched(model) as launched:
            start = time.process_time()
            loss = family.loss(model, mine)
            seconds = seconds if number else time.process_time() - start
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    programs = [tz.traces_of(model, graph=graph) for graph in range(len(model.graphs()))]
    full = tz.full_state_dict(model)
    right = eager(family, world_size) if rank == 0 else {}
    return {
        "error": max((float((full[name] - value).abs().max()) for name, value in right.items()), default=0.0),
        "graphs": len(programs),
        "scheduled": sum(op.kind is Kind.GATHER for program in programs for op in program.timeline.ops),
        "launched": len(launched),
        "registered": sorted({name for program in programs for name in program.registered}),
        "seconds": seconds,
    }
