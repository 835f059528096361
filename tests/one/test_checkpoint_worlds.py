"""A checkpoint loads into any number of ranks and any stage. The ranks are simulated.

The reference is a plain module that trains without interruption. Optimizers work element by element, so every number is
equal bit for bit. Real ranks: ``tests/ranks/test_checkpoints.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.harness.checkpoints import Simulated, part_of, save_simulated, simulated_ranks
from tests.harness.errors import fails
from tests.harness.models import Small, fresh
from tests.harness.tiers import deep, slow
from thunder_zero.checkpoint import manifest
from thunder_zero.checkpoint.contents import is_cut, split_rank_prefix
from thunder_zero.checkpoint.dcp_read import read_metadata
from thunder_zero.checkpoint.load import Loaded, extras_to_load, own_extras, read_checkpoint
from thunder_zero.sharded.dtensors import local

WORLDS, STAGES = (1, 2, 3, 4), (0, 1, 2, 3)
PAIRS = [(1, 0, 3, 3), (3, 3, 1, 1), (2, 1, 4, 2), (3, 2, 3, 0)]  # worlds and stages, from and to
MORE = [(4, 3, 2, 3), (2, 2, 1, 3), (4, 1, 3, 1), (1, 3, 2, 0), (3, 0, 4, 3), (2, 3, 2, 2)]
ALL = sorted({*product(WORLDS, STAGES, WORLDS, STAGES)} - {*PAIRS, *MORE})
BEFORE, AFTER = range(2), range(2, 6)  # steps
Saved = Callable[[int, int], Path]


def adamw(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    return torch.optim.AdamW([{"params": params[:3]}, {"params": params[3:], "lr": 0.02}], 0.05, foreach=False)


def backward(module: nn.Module, step: int) -> None:
    module.zero_grad()
    batch = torch.randint(0, 9, (4, 3), generator=torch.Generator().manual_seed(step))
    module(batch).square().mean().backward()


def train(ranks: Sequence[Simulated], module: nn.Module, steps: range) -> dict[str, Tensor]:
    """Train as ranks do: gather, compute, cut the gradients, step the shards. Return the weights at the end."""
    for step in steps:
        gather_weights(ranks, module)
        backward(module, step)
        for rank in ranks:
            for name, param in rank.contents.params.items():
                grad = module.get_parameter(name).grad
                if grad is not None and isinstance(param, DTensor):
                    grad = part_of(grad, param.device_mesh)
                param.grad = grad
            rank.optimizer.step()
    gather_weights(ranks, module)
    return dict(module.state_dict())


@torch.no_grad()
def gather_weights(ranks: Sequence[Simulated], module: nn.Module) -> None:
    for name in ranks[0].contents.params:
        parts = [local(rank.contents.params[name].detach()) for rank in ranks]
        module.get_parameter(name).copy_(torch.cat(parts) if is_cut(ranks[0].contents.params[name]) else parts[0])


@torch.no_grad()
def load(path: Path, ranks: Sequence[Simulated]) -> None:
    for number, rank in enumerate(ranks):
        manifest.require_no_faults(path, manifest.read(path).files[number :: len(ranks)])
        read = read_checkpoint(path, read_metadata(path), [rank.contents], [rank.optimizer])
        for _, give in read.states:
            give()
        for target, value in read.tensors:
            target.copy_(value)


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    """Return the weights after uninterrupted training."""
    plain = fresh(Small)
    optimizer = adamw(plain.parameters())
    for step in (*BEFORE, *AFTER):
        backward(plain, step)
        optimizer.step()
    return dict(plain.state_dict())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return a function that saves a checkpoint of a world and a stage, once."""
    root = tmp_path_factory.mktemp("runs")

    @cache
    def path(world: int, stage: int) -> Path:
        module = fresh(Small)
        ranks = simulated_ranks(module, world, stage, adamw)
        train(ranks, module, BEFORE)
        save_simulated(root / f"{world}-{stage}", ranks)
        return root / f"{world}-{stage}"

    return path


@pytest.mark.parametrize(("world", "stage", "to_world", "to_stage"), [*PAIRS, *slow(*MORE), *deep(*ALL)])
def test_the_next_steps_equal_an_uninterrupted_run(
    saved: Saved, expected: dict[str, Tensor], world: int, stage: int, to_world: int, to_stage: int
) -> None:
    module = fresh(Small)
    with torch.no_grad():
        for param in module.parameters():
            param.fill_(7)  # a value that is not loaded stays 7
    ranks = simulated_ranks(module, to_world, to_stage, adamw)
    for rank in ranks:
        for group in rank.optimizer.param_groups:
            group["lr"] = 9.0
    load(saved(world, stage), ranks)
    for name, value in train(ranks, module, AFTER).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize(("world", "stage"), [(3, 3), (2, 1), *slow((4, 2), (3, 0)), *deep((4, 1), (2, 3), (1, 0))])
def test_no_padding_and_no_copy_is_written(saved: Saved, expected: dict[str, Tensor], world: int, stage: int) -> None:
    # Shapes are whole, each row is written once, and both names of a tied weight have one place.
    metadata = read_metadata(saved(world, stage))
    stored = metadata.state_dict_metadata
    assert {key.removeprefix("model.") for key in stored if key.startswith("model.")} == expected.keys()
    for name, value in expected.items():
        result = stored[f"model.{name}"]
        assert tuple(result.size) == tuple(value.shape)
        written = [int(chunk.sizes.numel()) for chunk in result.chunks]
        assert sum(written) == value.numel(), name
    places = {index: place for index, place in metadata.storage_data.items() if index.offset is not None}
    for index, place in places.items():
        if index.fqn == "model.head.weight":
            twin = places[type(index)("model.embed.weight", index.offset)]
            assert (place.relative_path, place.offset) == (twin.relative_path, twin.offset)
    for file in saved(world, stage).glob("*.distcp"):
        of_file = {
            place.offset: place.length for place in metadata.storage_data.values() if place.relative_path == file.name
        }
        assert sum(of_file.values()) == file.stat().st_size, "no byte is written twice"
    assert stored["optim.state.embed.weight.exp_avg"].size == (9, 5)
    assert manifest.read(saved(world, stage)).ranks == world


def test_each_rank_gets_its_extras_if_the_world_is_unchanged(saved: Saved) -> None:
    (rank, *_) = simulated_ranks(fresh(Small), 3, 3, adamw)
    extras = read_checkpoint(saved(3, 3), read_metadata(saved(3, 3)), [rank.contents], []).of_rank
    assert extras == ({"position": 100}, {"position": 101}, {"position": 102})
    assert split_rank_prefix("rank12.extra.any\nname") == (12, "extra.any\nname")
    assert own_extras(extras, 1, 3) == {"position": 101}
    assert own_extras(extras, 1, 2) == {}
    fails(lambda: own_extras(extras, 1, 2)["position"], "KeyError", "are in Loaded.of_rank: ask own.get('position')")
    alike = ({"epoch": 4, "position": 1}, {"epoch": 4, "position": 2})
    assert own_extras(alike, 4, 5) == {"epoch": 4}
    assert own_extras((), 0, 1) == {}
    differs = "'position' on 2 ranks: it differs between the 3 ranks that saved"
    fails(lambda: extras_to_load({"position": None}, Loaded({}, extras), 2), differs)
    unknown = "no extra 'rng': it has ['position']; leave it out of"
    fails(lambda: extras_to_load({"rng": None}, Loaded(extras[0], extras), 3), unknown)
