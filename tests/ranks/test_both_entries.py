"""``tz.compile`` and ``thunder.jit`` with ``ZeroTransform`` both train as one process, and load each other's files."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import thunder_zero as tz
from tests.harness.as_one_process import Loop, Side, Steps, trains_as_one_process
from tests.harness.loops import WIDTH, batch, deferred_steps, sgd, step_on
from tests.harness.models import Mlp, fresh
from tests.harness.ranks import RanksPool
from tests.harness.tiers import slow

import thunder

DECAY = 0.5
DOUBLE = tz.MixedPrecision(torch.float64, output_dtype=torch.float32)


def jit_sharded(module: nn.Module, policy: tz.Policy, **arguments: Any) -> Any:
    return thunder.jit(module, transforms=[tz.ZeroTransform(policy, **arguments)])


ENTRIES: dict[str, Callable[..., Any]] = {"tz.compile": tz.compile, "thunder.jit": jit_sharded}


def clip_and_average(side: Side) -> Steps:
    """Clip gradients and average weights."""
    (model,) = side.models
    optimizer = sgd(model)
    average: Any = (
        tz.EMA(model, DECAY) if side.is_sharded else AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    )
    for number in range(2):
        optimizer.zero_grad()
        model(side.rows(batch(number))).square().mean().backward()
        yield tz.clip_grad_norm_(model, 0.1) if side.is_sharded else clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        average.update() if side.is_sharded else average.update_parameters(model)
    with torch.no_grad():
        if side.is_sharded:
            with average.applied():
                y = model(side.rows(batch(2)))
        else:
            y = average(batch(2))
    yield side.gather(y)


def step_on_whole_parameters(side: Side) -> Steps:
    """Train with an optimizer that needs whole parameters."""
    (model,) = side.models
    make = partial(tz.whole, torch.optim.Adafactor) if side.is_sharded else torch.optim.Adafactor
    optimizer = make(model.parameters(), lr=0.01)
    for number in range(2):
        y = model(side.rows(batch(number)))
        step_on(optimizer, y.square().mean())
        yield side.gather(y)


@dataclass(frozen=True)
class Row:
    """A policy and a loop to train with, on two ranks that hold ``copies`` of the model."""

    policy: tz.Policy
    loop: Loop = deferred_steps
    copies: int = 1


FAST: dict[str, Row] = {
    "stage 2": Row(tz.Policy(stage=2)),
    "stage 3": Row(tz.Policy(stage=3, reshard_after_forward=True)),
    "clipping, EMA": Row(tz.Policy(stage=3), clip_and_average),
}
SLOW: dict[str, Row] = {
    "stage 0": Row(tz.Policy(stage=0)),
    "stage 1": Row(tz.Policy(stage=1)),
    "hybrid": Row(tz.Policy(stage=3), copies=2),
    "cpu_offload": Row(tz.Policy(stage=3, cpu_offload=True)),
    "mixed precision": Row(tz.Policy(stage=3, mixed_precision=DOUBLE)),
    "whole parameters": Row(tz.Policy(stage=3), step_on_whole_parameters),
}


def train_under_entry(rank: int, world_size: int, entry: str, name: str) -> None:
    row = (FAST | SLOW)[name]
    mesh = init_device_mesh("cpu", (row.copies, world_size // row.copies)) if row.copies > 1 else None
    plain = fresh(Mlp, WIDTH, 2)
    trains_as_one_process([(ENTRIES[entry](deepcopy(plain), row.policy, mesh=mesh), plain)], row.loop)


@pytest.mark.filterwarnings("ignore:cpu_offload")
@pytest.mark.parametrize("name", [*FAST, *slow(*SLOW)])
@pytest.mark.parametrize("entry", ENTRIES)
def test_both_entries_train_as_one_process(ranks_pool: RanksPool, entry: str, name: str) -> None:
    ranks_pool.run(2, train_under_entry, entry, name)


def resume_under_other_entry(rank: int, world_size: int, folder: Path) -> None:
    """Save under each entry in stage 1, load under the other entry in stage 3, and go on training."""
    for first, second in (tuple(ENTRIES), tuple(ENTRIES)[::-1]):
        plain = fresh(Mlp, WIDTH, 2)
        models = [ENTRIES[entry](deepcopy(plain), tz.Policy(stage=stage)) for entry, stage in ((first, 1), (second, 3))]

        def loop(side: Side, models: Any = models, path: Path = folder / first) -> Steps:
            source, target = models if side.is_sharded else (*side.models, *side.models)
            optimizer = sgd(source)
            step_on(optimizer, source(side.rows(batch())).square().mean())
            if side.is_sharded:
                tz.save(path, source, optimizer)
                optimizer = sgd(target)
                tz.load(path, target, optimizer)
            y = target(side.rows(batch(1)))
            step_on(optimizer, y.square().mean())
            yield side.gather(y)

        trains_as_one_process([(models[1], plain)], loop)


@pytest.mark.slow
def test_checkpoints_go_from_one_entry_to_the_other(ranks_pool: RanksPool, tmp_path: Path) -> None:
    ranks_pool.run(2, resume_under_other_entry, tmp_path)
