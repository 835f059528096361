"""One table of promises, each held under both entries: ``tz.compile`` and ``thunder.jit`` with ``ZeroTransform``.

A row is a policy and a loop, in which a sharded model has the numbers of one process. A checkpoint that is saved under
one entry is loaded under the other.
"""

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


def jitted(module: nn.Module, policy: tz.Policy, **arguments: Any) -> Any:
    return thunder.jit(module, transforms=[tz.ZeroTransform(policy, **arguments)])


ENTRIES: dict[str, Callable[..., Any]] = {"tz.compile": tz.compile, "thunder.jit": jitted}


def clipped(side: Side) -> Steps:
    """Clip, and average the weights."""
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


def whole(side: Side) -> Steps:
    """An optimizer that needs whole parameters."""
    (model,) = side.models
    make = partial(tz.whole, torch.optim.Adafactor) if side.is_sharded else torch.optim.Adafactor
    optimizer = make(model.parameters(), lr=0.01)
    for number in range(2):
        y = model(side.rows(batch(number)))
        step_on(optimizer, y.square().mean())
        yield side.gather(y)


@dataclass(frozen=True)
class Row:
    """A promise; ``copies`` of the model, among two ranks."""

    policy: tz.Policy
    loop: Loop = deferred_steps
    copies: int = 1


FAST: dict[str, Row] = {
    "stage 2": Row(tz.Policy(stage=2)),
    "stage 3": Row(tz.Policy(stage=3, reshard_after_forward=True)),
    "clipping, EMA": Row(tz.Policy(stage=3), clipped),
}
SLOW: dict[str, Row] = {
    "stage 0": Row(tz.Policy(stage=0)),
    "stage 1": Row(tz.Policy(stage=1)),
    "hybrid": Row(tz.Policy(stage=3), copies=2),
    "cpu_offload": Row(tz.Policy(stage=3, cpu_offload=True)),
    "mixed precision": Row(tz.Policy(stage=3, mixed_precision=DOUBLE)),
    "whole parameters": Row(tz.Policy(stage=3), whole),
}


def holds(rank: int, world_size: int, entry: str, name: str) -> None:
    row = (FAST | SLOW)[name]
    mesh = init_device_mesh("cpu", (row.copies, world_size // row.copies)) if row.copies > 1 else None
    plain = fresh(Mlp, WIDTH, 2)
    trains_as_one_process([(ENTRIES[entry](deepcopy(plain), row.policy, mesh=mesh), plain)], row.loop)


@pytest.mark.filterwarnings("ignore:cpu_offload")
@pytest.mark.parametrize("name", [*FAST, *slow(*SLOW)])
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_promise_holds_under_both_entries(ranks_pool: RanksPool, entry: str, name: str) -> None:
    ranks_pool.run(2, holds, entry, name)


def goes_on(rank: int, world_size: int, folder: Path) -> None:
    """Saved under each entry, in one stage, and loaded under the other, in another."""
    for first, other in (tuple(ENTRIES), tuple(ENTRIES)[::-1]):
        plain = fresh(Mlp, WIDTH, 2)
        models = [ENTRIES[entry](deepcopy(plain), tz.Policy(stage=stage)) for entry, stage in ((first, 1), (other, 3))]

        def loop(side: Side, models: Any = models, path: Path = folder / first) -> Steps:
            begins, ends = models if side.is_sharded else (*side.models, *side.models)
            optimizer = sgd(begins)
            step_on(optimizer, begins(side.rows(batch())).square().mean())
            if side.is_sharded:
                tz.save(path, begins, optimizer)
                optimizer = sgd(ends)
                tz.load(path, ends, optimizer)
            y = ends(side.rows(batch(1)))
            step_on(optimizer, y.square().mean())
            yield side.gather(y)

        trains_as_one_process([(models[1], plain)], loop)


@pytest.mark.slow
def test_checkpoints_go_from_one_entry_to_the_other(ranks_pool: RanksPool, tmp_path: Path) -> None:
    ranks_pool.run(2, goes_on, tmp_path)
