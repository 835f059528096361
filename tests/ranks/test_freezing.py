"""Parameters that are frozen and unfrozen between steps, or during an accumulation, train as in one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import thunder_zero as tz
from tests.harness.as_one_process import Side, Steps, trains_as_one_process
from tests.harness.errors import error_of, fails
from tests.harness.loops import WIDTH, batch
from tests.harness.models import count_sends, fresh
from tests.harness.ranks import RanksPool
from tests.harness.tiers import slow
from thunder_zero.schedule.ops import Reduce

POLICIES = {f"stage {stage}": tz.Policy(stage=stage) for stage in range(4)}
POLICIES["holding"] = replace(tz.ZERO2, reshard_after_backward=False)
POLICIES["int8"] = replace(tz.ZERO3, reduce_format={"a": tz.Int8(), "c": tz.Int8()})
POLICIES["bfloat16"] = replace(tz.ZERO2, mixed_precision=tz.MixedPrecision(reduce_dtype=torch.float64))
POLICIES["offload"] = replace(tz.ZERO3, cpu_offload=True)
# (step, micro-batch): the modules that are frozen or unfrozen before it; each of the three paths always trains a part
CHANGES: dict[tuple[int, int], dict[str, bool]] = {
    (1, 0): {"a": True, "c": False},
    (1, 1): {"b": False},  # frozen with a deferred gradient, which stays
    (2, 0): {"b": True, "a": False},
    (3, 1): {"": True},  # the plan of the first step's end, or a new one; optimizer states are kept
    (4, 0): {"a": False},
}
STEPS, MICRO = 5, 2


class Net(nn.Module):
    """Three layers; on request dynamo captures two graphs."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, 7), nn.Linear(7, 6), nn.Linear(6, 3)
        self.scale, self.breaks = nn.Parameter(torch.tensor(1.5)), breaks

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.c(torch.tanh(self.b(x)) * self.scale)


class Either(nn.Module):
    """Two layers, each in a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.b, self.c = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, name: str) -> Tensor:
        torch._dynamo.graph_break()
        return self.get_submodule(name)(x)


def unfreeze_the_other(side: Side) -> Steps:
    """Compile the graph of ``c`` while ``b`` is frozen. Its program must later reduce what ``b`` has deferred."""
    (model,) = side.models
    model.b.requires_grad_(False)
    optimizer = adamw(model)
    for step in range(2):
        if step:
            model.b.requires_grad_(True)
            with model.no_sync() if side.is_sharded else nullcontext():
                model(side.rows(batch()), "b").square().mean().backward()
        y = model(side.rows(batch(step)), "c")
        y.square().mean().backward()
        optimizer.step()
        yield side.gather(y)
        model.zero_grad()


Make = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.05, weight_decay=0.1)


def frozen_by_turns(side: Side, make: Make = adamw) -> Steps:
    (model,) = side.models
    model.a.requires_grad_(False)  # while the optimizer is made
    optimizer = make(model)
    for step in range(STEPS):
        for micro in range(MICRO):
            for path, trains in CHANGES.get((step, micro), {}).items():
                model.get_submodule(path).requires_grad_(trains)
            with model.no_sync() if side.is_sharded and micro < MICRO - 1 else nullcontext():
                y = model(side.rows(batch(MICRO * step + micro)))
                y.square().mean().backward()
        if side.is_sharded:
            tz.clip_grad_norm_(model, 0.3)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        yield side.gather(y)
        model.zero_grad()
        with torch.no_grad():
            model(side.rows(batch()))  # such forwards may run before the first training forward of a plan


def train_by_turns(rank: int, world_size: int, name: str) -> None:
    policy, plain = POLICIES[name], fresh(Net)
    model = tz.compile(fresh(Net), policy)
    tolerance = 0.05 if name == "int8" else None
    trains_as_one_process([(model, plain)], frozen_by_turns, tolerance=tolerance)


@pytest.mark.parametrize("name", ["stage 3", *slow(*(name for name in POLICIES if name != "stage 3"))])
def test_parameters_frozen_and_unfrozen_by_turns_train_as_in_one_process(ranks_pool: RanksPool, name: str) -> None:
    ranks_pool.run(2, train_by_turns, name)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    params = [param for param in model.parameters() if param.ndim == 2]
    options: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
    return (
        tz.whole(torch.optim.Muon, params, **options)
        if isinstance(model, tz.ZeroModule)
        else torch.optim.Muon(params, **options)
    )


KINDS = ("one graph", "two graphs", "either graph", "whole", "replicas", "hybrid")


def train_kind(rank: int, world_size: int, stage: int, kind: str) -> None:
    loop, breaks = partial(frozen_by_turns, make=muon if kind == "whole" else adamw), kind == "two graphs"
    if kind == "either graph":
        trains_as_one_process([(tz.compile(fresh(Either), stage), fresh(Either))], unfreeze_the_other)
        return
    shape = {"replicas": (world_size, 1), "hybrid": (world_size // 2, 2)}.get(kind)
    mesh: dict[str, Any] = {} if shape is None else {"mesh": init_device_mesh("cpu", shape)}
    model = tz.compile(fresh(Net, breaks), stage, **mesh)
    trains_as_one_process([(model, fresh(Net, breaks))], loop)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_whole_parameters_and_meshes_follow(ranks_pool: RanksPool, kind: str, stage: int) -> None:
    ranks_pool.run(4 if kind == "hybrid" else 2, train_kind, stage, kind)


# Programs and what is sent


def alternate(rank: int, world_size: int, stage: int) -> None:
    """As a GAN does: freeze and unfreeze in turn. Each choice is compiled once, and frozen parameters send nothing."""
    model: Any = tz.compile(fresh(Net), stage=stage)
    sends = []
    for trains in (True, False) * 3:
        model.b.requires_grad_(trains)
        with count_sends() as sent:
            model(batch()[:2]).sum().backward()
        sends.append(sum(sent))
        assert (model.b.weight.grad is None) is not trains
        model.zero_grad()
    timeline = tz.traces_of(model).timeline
    reduced = {path for op in timeline.ops if isinstance(op, Reduce) for path in op.params}
    assert reduced == {name for name, _ in model.named_parameters() if not name.startswith("b.")}, reduced
    assert len(tz.tools.programs(model)) == 2
    assert sends[4:] == sends[2:4]
    assert sends[4] > sends[5]


def freeze_on_rank_0(rank: int, world_size: int, stage: int) -> str:
    model = tz.compile(fresh(Net), stage=stage)
    model(batch()[:2]).sum().backward()
    if rank == 0:
        model.get_submodule("b").requires_grad_(False)
    return error_of(lambda: model(batch()[:2]).sum().backward())


@pytest.mark.parametrize("stage", [3, *slow(0)])
def test_each_choice_is_compiled_once_and_made_on_all_ranks(ranks_pool: RanksPool, stage: int) -> None:
    ranks_pool.run(2, alternate, stage)
    first, second = ranks_pool.run(2, freeze_on_rank_0, stage)
    assert first == second
    for words in ("the ranks do different things", "rank 0 is in", "with requires_grad of 'b.bias' and 1 more changed"):
        assert words in first, first


# Checkpoints, averages, formats


def save_and_load(rank: int, world_size: int, folder: str, stage: int) -> None:
    """A run that froze a part goes on in a new model, which freezes the part before or after it loads."""
    model: Any = tz.compile(fresh(Net), stage=stage)
    optimizer, ema = adamw(model), tz.EMA(model, 0.5)

    def step(model: Any, optimizer: torch.optim.Optimizer, ema: tz.EMA) -> dict[str, Tensor]:
        model(batch()[:2]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
        with ema.applied():
            averages = tz.full_state_dict(model)
        return tz.full_state_dict(model) | {f"average of {name}": value for name, value in averages.items()}

    step(model, optimizer, ema)
    model.a.requires_grad_(False)
    step(model, optimizer, ema)
    tz.save(folder, model, optimizer, extra={"ema": ema})
    expected = step(model, optimizer, ema)
    for before in (True, False):
        other: Any = tz.compile(fresh(Net), stage=stage)
        others = adamw(other), tz.EMA(other, 0.5)
        other.a.requires_grad_(not before)
        tz.load(folder, other, others[0], extra={"ema": others[1]})
        other.a.requires_grad_(False)
        result = step(other, *others)
        assert all(torch.equal(result[name], value) for name, value in expected.items()), before
    late: Any = tz.EMA(other, 0.5)
    other.a.requires_grad_(True)
    fails(late.update, "parameter 'a.weight'", "required no gradients when the EMA was made")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_a_run_that_freezes_goes_on_from_a_checkpoint(ranks_pool: RanksPool, stage: int, tmp_path: Path) -> None:
    ranks_pool.run(2, save_and_load, str(tmp_path / "step"), stage)
