"""A checkpoint goes from any number of ranks and any stage to any other: all pairs, with simulated ranks.

What a rank saves and loads follows from its plan, its shards and its optimizer, so one process can be all ranks. The
reference is one plain module that trains without interruption; optimizers work element by element, so that every
number is equal bit for bit. Real ranks: ``tests/ranks/test_checkpoints.py``.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.models import Small, fresh, whole
from tests.harness.tiers import of_tier
from thunder_zero.checkpoint import dcp_write, folder, manifest
from thunder_zero.checkpoint.collect import model_items, optimizer_items
from thunder_zero.checkpoint.dcp_read import read_items, read_metadata
from thunder_zero.checkpoint.dcp_write import write_items, write_metadata
from thunder_zero.checkpoint.extras import extra_items, own_extras, read_extras, require_extras
from thunder_zero.checkpoint.item import Item
from thunder_zero.checkpoint.read_all import read_checkpoint
from thunder_zero.checkpoint.write import finish_checkpoint
from thunder_zero.plan import make_plan
from thunder_zero.rows import own_rows
from thunder_zero.runtime.optimizers import load_exactly
from thunder_zero.state_dict.contents import ModelContents, split_rank_prefix

WORLDS, STAGES = (1, 2, 3, 4), (0, 1, 2, 3)
BEFORE, AFTER = 3, 10  # steps


@dataclass
class Simulated:
    """One rank of several in this process."""

    held: ModelContents
    optimizer: torch.optim.Optimizer


def adamw(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    return torch.optim.AdamW([{"params": params[:3]}, {"params": params[3:], "lr": 0.02}], 0.05, foreach=False)


def ranks_of(module: nn.Module, world_size: int, stage: int) -> list[Simulated]:
    ranks = []
    for rank in range(world_size):
        plan = make_plan(module, tz.Policy(stage=stage), world_size, rank)
        values = {param.path: module.get_parameter(param.path).detach() for param in plan.params}
        shards = {
            param.path: nn.Parameter(own_rows(values[param.path], param, plan).clone(), param.requires_grad)
            for param in plan.params
        }
        ranks.append(Simulated(ModelContents(plan, shards, {}, {}, {}, rank), adamw(shards.values())))
    return ranks


def batch(step: int) -> Tensor:
    return torch.randint(0, 9, (4, 3), generator=torch.Generator().manual_seed(step))


def step_plain(module: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Tensor]:
    """One step; its gradients."""
    optimizer.zero_grad()
    module(batch(step)).square().mean().backward()
    optimizer.step()
    return {name: param.grad for name, param in module.named_parameters() if param.grad is not None}


def step_ranks(ranks: Sequence[Simulated], module: nn.Module, step: int) -> None:
    """The same on ranks: gather, compute, cut the gradients, step the shards."""
    put_together(ranks, module)
    module.zero_grad()
    module(batch(step)).square().mean().backward()
    for rank in ranks:
        for param in rank.held.plan.params:
            grad = module.get_parameter(param.path).grad
            shard = rank.held.shards[param.path]
            shard.grad = None if grad is None else own_rows(grad, param, rank.held.plan)
        rank.optimizer.step()


@torch.no_grad()
def put_together(ranks: Sequence[Simulated], module: nn.Module) -> None:
    for param in ranks[0].held.plan.params:
        parts = [rank.held.shards[param.path].detach() for rank in ranks]
        module.get_parameter(param.path).copy_(whole(parts, param.shape, sharded=param.sharded))


def save(path: Path, ranks: Sequence[Simulated], max_to_keep: int | None = None) -> None:
    """What :func:`thunder_zero.checkpoint.write.write_checkpoint` does, for all ranks."""
    folder.prepare(path)
    parts = [
        write_items(
            folder.staging_of(path),
            number,
            model_items(rank.held)
            + optimizer_items(rank.held, [rank.optimizer])
            + extra_items(rank.held, {"position": 100 + number}),
        )
        for number, rank in enumerate(ranks)
    ]
    finish_checkpoint(path, parts, max_to_keep)


def load(path: Path, ranks: Sequence[Simulated]) -> None:
    for number, rank in enumerate(ranks):
        assert manifest.find_faults(path, manifest.read(path).files[number :: len(ranks)]) == []
        found = read_checkpoint(path, rank.held, [rank.optimizer])
        (saved,) = found.optimizers
        load_exactly(rank.optimizer, saved)
        with torch.no_grad():
            for target, value in found.tensors:
                target.copy_(value)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint of each world and stage, and what uninterrupted training ends with."""
    root = tmp_path_factory.mktemp("runs")
    plain = fresh(Small)
    optimizer = adamw(plain.parameters())
    for step in range(BEFORE + AFTER):
        step_plain(plain, optimizer, step)
    for world_size, stage in product(WORLDS, STAGES):
        module = fresh(Small)
        ranks = ranks_of(module, world_size, stage)
        for step in range(BEFORE):
            step_ranks(ranks, module, step)
        save(root / f"{world_size}-{stage}", ranks)
    return root, plain.state_dict()


@pytest.mark.parametrize(
    ("world", "to_world"), of_tier([(1, 3), (3, 1), (3, 3), (2, 4)], list(product(WORLDS, WORLDS)))
)
def test_the_next_steps_equal_an_uninterrupted_run(runs: Any, world: int, to_world: int) -> None:
    """For each pair of stages, too."""
    root, right = runs
    for stage, to_stage in product(STAGES, STAGES):
        module = fresh(Small)
        with torch.no_grad():
            for param in module.parameters():
                param.fill_(7)  # what is not loaded is seen
        ranks = ranks_of(module, to_world, to_stage)
        for rank in ranks:
            for group in rank.optimizer.param_groups:
                group["lr"] = 9.0
        load(root / f"{world}-{stage}", ranks)
        for step in range(BEFORE, BEFORE + AFTER):
            step_ranks(ranks, module, step)
        put_together(ranks, module)
        for name, value in module.state_dict().items():
            assert torch.equal(value, right[name]), (stage, to_stage, name)


def test_no_padding_and_no_copy_is_written(runs: Any) -> None:
    """Whole shapes, each row once, a tied weight under both names at one place in one file."""
    root, right = runs
    for world, stage in product(WORLDS, STAGES):
        path = root / f"{world}-{stage}"
        metadata = read_metadata(path)
        stored = metadata.state_dict_metadata
        assert {key.removeprefix("model.") for key in stored if key.startswith("model.")} == right.keys()
        for name, value in right.items():
            found = stored[f"model.{name}"]
            assert tuple(found.size) == tuple(value.shape)
            written = [int(chunk.sizes.numel()) for chunk in found.chunks]
            assert sum(written) == value.numel(), (world, stage, name)
        places = {index: place for index, place in metadata.storage_data.items() if index.offset is not None}
        for index, place in places.items():
            if index.fqn == "model.head.weight":
                twin = type(index)("model.embed.weight", index.offset)
                assert (place.relative_path, place.offset) == (places[twin].relative_path, places[twin].offset)
        assert stored["optim.state.embed.weight.exp_avg"].size == (9, 5)
        assert manifest.read(path).ranks == world


class Command:
    """Unpickled, it runs a command."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


def test_nothing_that_is_read_runs(tmp_path: Path) -> None:
    """Neither DCP's metadata nor a value, which DCP itself unpickles."""
    done = tmp_path / "done"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Command(done)))
    with pytest.raises(ValueError, match=r"\.metadata is damaged \(it names posix\.mkdir.*; use another checkpoint"):
        read_metadata(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps([1]))
    with pytest.raises(ValueError, match=r"\.metadata is damaged \(it holds a list\); use another checkpoint"):
        read_metadata(tmp_path)
    value = io.BytesIO()
    torch.save(Command(done), value)
    part = write_items(tmp_path / "a", 0, [Item(("rank0", "extra", "bad"), value.getvalue())])
    write_metadata(tmp_path / "a", [part])
    with pytest.raises(ValueError, match=r"cannot read .* is damaged \(Weights only load failed.*; use another"):
        read_extras(tmp_path / "a", read_metadata(tmp_path / "a"))
    assert not done.exists()


def test_rows_that_are_in_no_file(tmp_path: Path) -> None:
    half = Item(("w",), torch.ones(2, 3), 0, (4, 3))
    part = write_items(tmp_path, 0, [half])
    with pytest.raises(ValueError, match=r"w is incomplete: its shape \(4, 3\) needs 12 elements, the ranks wrote 6"):
        write_metadata(tmp_path, [part])
    with mock.patch.object(dcp_write, "_require_all_rows"):  # another tool's
        write_metadata(tmp_path, [part])
    wanted = Item(("w",), torch.zeros(3, 3), 1, (4, 3))
    with pytest.raises(ValueError, match="is incomplete: rows of w are missing; use another checkpoint"):
        read_items(tmp_path, read_metadata(tmp_path), [wanted])


def test_the_extras_of_each_rank(runs: Any) -> None:
    root, _ = runs
    extras = read_extras(root / "3-2", read_metadata(root / "3-2"))
    assert extras == ({"position": 100}, {"position": 101}, {"position": 102})
    assert split_rank_prefix("rank12.extra.any\nname") == (12, "extra.any\nname")
    assert own_extras(extras, 1, 3) == {"position": 101}
    assert own_extras(extras, 1, 2) == {}
    with pytest.raises(ValueError, match="'position' on 2 ranks: it differs between the 3 ranks that saved"):
        require_extras(["position"], {}, extras, 2)
    alike = ({"epoch": 4, "position": 1}, {"epoch": 4, "position": 2})
    assert own_extras(alike, 4, 5) == {"epoch": 4}
    assert own_extras((), 0, 1) == {}
    with pytest.raises(ValueError, match=r"no extra 'rng': it has \['position'\]; leave it out of extra"):
        require_extras(["rng"], extras[0], extras, 3)
