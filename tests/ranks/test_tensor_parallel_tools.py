"""Modules in slices beside one process, in the cases of ``examples/bench/slices.py``; torch's and Hugging Face's tools
on them; what ranks send and store."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

import thunder_zero as tz
from examples.bench.slices import (
    MESHES,
    MODELS,
    adamw,
    in_slices,
    llama,
    loss_of,
    mesh_of,
    one_process,
    plain,
    slice_llama,
    tokens_of,
    worst,
)
from examples.sent_bytes import bytes_on_sockets, counted_lines
from tests.harness.ranks import RanksPool
from tests.harness.tiers import slow

DOUBLE = torch.float64
OWN = "of plain modules"
FULL = StateDictOptions(full_state_dict=True)
HEADERS, TAGS = 144, 16 * 1024  # on sockets: of a message; of the phases of a step, and of what AdamW compares


# Ten steps


def ten_steps(rank: int, world_size: int, mesh_name: str, model: str, stage: int, sequence: bool, limit: float) -> None:
    dtype = DOUBLE if limit < 1e-6 else torch.float32
    mesh, right = mesh_of(MESHES[mesh_name]), one_process(plain(MODELS[model].build, dtype))
    off = worst(in_slices(model, mesh, stage, sequence, dtype), mesh, right)
    assert 0 < off <= limit, off


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("mesh", "model", "stage", "sequence", "limit"),
    slow(
        ("1x2", "Llama", 3, True, 1e-9),
        ("1x2", "Qwen3", 2, False, 1e-9),
        ("1x2", OWN, 1, True, 1e-9),
        ("2x1", "Llama", 1, False, 1e-9),
        ("2x1", "Qwen3", 3, True, 1e-9),
        ("2x2", "Llama", 0, False, 5e-5),
        ("2x2", "Llama", 2, True, 1e-9),
        ("2x2", "Qwen3", 3, True, 1e-9),
        ("2x2", "GPT-2, perceptrons", 3, False, 1e-9),
        ("2x2", OWN, 3, False, 5e-5),
        ("1x4", OWN, 3, True, 1e-9),
        ("4x1", OWN, 2, False, 1e-9),
    ),
)
def test_ten_steps_as_one_process(
    ranks_pool: RanksPool, mesh: str, model: str, stage: int, sequence: bool, limit: float
) -> None:
    ranks_pool.run(prod(MESHES[mesh]), ten_steps, mesh, model, stage, sequence, limit, timeout=200)


# Checkpoints


def step_of(model: Any, optimizer: torch.optim.Optimizer, number: int = 0) -> None:
    optimizer.zero_grad()
    loss_of(model, tokens_of(number)).backward()
    optimizer.step()


def parts_of(model: Any, optimizer: Any, options: Any = None) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }


def same_bits(found: Any, right: Any, where: str = "") -> None:
    if isinstance(right, dict):
        assert found.keys() == right.keys(), where
        for key, value in right.items():
            same_bits(found[key], value, f"{where}.{key}")
    else:
        assert torch.equal(found, right) if isinstance(right, Tensor) else found == right, where


def of_fsdp2(mesh: Any, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    how = MODELS[OWN]
    module = how.slice(plain(how.build, seed=seed), mesh["tp"], False)
    for block in module.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(module, mesh=mesh["dp"])
    return module, adamw(module)


def of_ours(mesh: Any, stage: int) -> tuple[Any, torch.optim.Optimizer]:
    model = in_slices(OWN, mesh, stage, False, DOUBLE)
    return model, adamw(model)


def beside_fsdp2(rank: int, world_size: int, folder: Path, stage: int) -> None:
    """What FSDP2 saves, on modules in slices, loads into ours; it takes a step; what it saves loads into FSDP2's."""
    mesh = mesh_of((2, world_size // 2))
    theirs, ours, others = of_fsdp2(mesh, 1), of_ours(mesh, stage), of_fsdp2(mesh, 2)
    step_of(*theirs)
    for number, (before, after) in enumerate(((theirs, ours), (ours, others))):
        right = parts_of(*before, FULL)
        dcp.save(parts_of(*before), checkpoint_id=folder / str(number))
        state = parts_of(*after)
        dcp.load(state, checkpoint_id=folder / str(number))
        set_model_state_dict(after[0], state["model"])
        set_optimizer_state_dict(*after, state["optimizer"])
        same_bits(parts_of(*after, FULL), right)
        for each in (before, after):
            step_of(*each, number + 1)
        for name, value in tz.full_state_dict(ours[0]).items() if number == 0 else ():
            torch.testing.assert_close(value, theirs[0].get_parameter(name).full_tensor(), rtol=0, atol=1e-9)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_checkpoints_of_fsdp2_in_slices(ranks_pool: RanksPool, tmp_path: Path) -> None:
    ranks_pool.run(4, beside_fsdp2, tmp_path, 3, timeout=200)


def saved(rank: int, world_size: int, folder: Path) -> None:
    """One launch saves from several meshes; each loads into each other one, and into one process."""
    meshes = [mesh_of(shape) for shape in ((2, 2), (1, 4), (4, 1))]
    models = [of_ours(mesh, stage) for mesh, stage in zip(meshes, (3, 2, 1), strict=True)]
    rights = []
    for number, (model, optimizer) in enumerate(models):
        step_of(model, optimizer, number)
        tz.save(folder / str(number), model, optimizer)
        rights.append(deepcopy(parts_of(model, optimizer, FULL)))  # the load writes to what they may share
    for number, right in enumerate(rights):
        for model, optimizer in models:
            tz.load(folder / str(number), model, optimizer)
            same_bits(parts_of(model, optimizer, FULL), right)
    if rank == 0:
        torch.save(rights, folder / "right.pt")


def loaded(rank: int, world_size: int, folder: Path) -> None:
    model, optimizer = of_ours(mesh_of((2, 1)), 3) if world_size > 1 else _alone()
    for number, right in enumerate(torch.load(folder / "right.pt")):
        tz.load(folder / str(number), model, optimizer)
        same_bits(parts_of(model, optimizer, FULL), right)


def _alone() -> tuple[Any, torch.optim.Optimizer]:
    model = tz.compile(plain(MODELS[OWN].build), stage=3)
    return model, adamw(model)


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_checkpoints_between_meshes(ranks_pool: RanksPool, tmp_path: Path) -> None:
    ranks_pool.run(4, saved, tmp_path, timeout=200)
    ranks_pool.run(2, loaded, tmp_path, timeout=100)
    ranks_pool.run(1, loaded, tmp_path, timeout=100)


# Tools


def llama_at_rest(rank: int, world_size: int, folder: Path) -> None:
    """Full state dicts and a folder of Hugging Face's; tied again after slicing."""
    mesh = mesh_of((1, world_size))
    module = plain(lambda: llama(tied=True))
    right = one_process(plain(lambda: llama(tied=True)), 2)
    part: Any = slice_llama(module, mesh["tp"], False)
    part.lm_head.weight = part.model.embed_tokens.weight
    model = tz.compile(part, stage=3, mesh=mesh)
    off = worst(model, mesh, right)
    assert off <= 1e-9, off
    full = tz.full_state_dict(model)
    assert full["lm_head.weight"].shape == (32, 32)
    same_bits(get_model_state_dict(model, options=FULL), full)
    tz.save_pretrained(model, folder)
    plain_one = LlamaForCausalLM.from_pretrained(folder, dtype=DOUBLE)
    same_bits(dict(plain_one.state_dict()), full)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_tied_llama_in_slices_at_rest(ranks_pool: RanksPool, tmp_path: Path) -> None:
    ranks_pool.run(2, llama_at_rest, tmp_path, timeout=200)


def formats(rank: int, world_size: int) -> None:
    """Gradients of slices travel as bytes over dp, within the steps of the format; parameters near."""
    mesh, how = mesh_of((2, world_size // 2)), MODELS[OWN]
    (right, *_) = one_process(plain(how.build, torch.float32), 1)
    for field, limit in (("reduce_format", 4 / 127), ("gather_format", 0.2)):
        with counted_lines() as lines:
            model = in_slices(OWN, mesh, 3, False, torch.float32, **{field: {"*": tz.Int8(32)}})
            loss_of(model, tokens_of(0).chunk(2)[rank // (world_size // 2)]).backward()
        timeline = tz.traces_of(model).timeline
        assert [line.nbytes for line in lines] == [timeline.bytes_sent(op) for op in timeline.launches.values()]
        off = {}
        for name, param in model.named_parameters():
            value = right.grads[name]
            size = value.abs().max().clamp(min=1e-6)  # the gradient of a bias of keys is zero but for rounding
            off[name] = ((param.grad.full_tensor() - value).abs().max() / size).item()
        assert 0 < max(off.values()) <= limit, (field, off)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_formats_of_slices(ranks_pool: RanksPool) -> None:
    ranks_pool.run(4, formats, timeout=200)


# Bytes


def bytes_of_dimensions(rank: int, world_size: int) -> None:
    """At rest a rank has 1 / (dp * tp) of what is sliced; over dp each launch sends what the plan says, over tp the
    sockets have what the trace says."""
    mesh = mesh_of((world_size // 2, 2))
    model = in_slices(OWN, mesh, 3, False, DOUBLE)
    plan = model.state.plan
    for param in plan.params:
        held = local_of(model.state.shards[param.path])
        parts = mesh.size() if param.sliced is not None else mesh["dp"].size()
        assert held.numel() * parts == prod(plan.whole_shape(param)), param.path
    x = tokens_of(0).chunk(mesh["dp"].size())[rank // 2]
    loss_of(model, x).backward()
    timeline = tz.traces_of(model).timeline
    torchs = [op.sends for op in timeline.ops if op.sends]
    activation = x.numel() * 32 * 8
    # forward: embed, o and down of two blocks; half of the logits; backward: q, k, v and up of two blocks, and head
    assert Counter(torchs) == {activation: 1 + 4 + 8 + 1, activation // 2: 1}, torchs
    if mesh["dp"].size() == 1:
        dist.barrier()
        before = bytes_on_sockets()
        loss_of(model, x).backward()
        found = bytes_on_sockets() - before
        assert sum(torchs) <= found <= sum(torchs) + 8 * HEADERS * len(torchs) + TAGS, (found, sum(torchs))


def local_of(param: Tensor) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


@pytest.mark.timeout(240)
@pytest.mark.parametrize("world_size", [2, *slow(4)])
def test_bytes_of_each_dimension(ranks_pool: RanksPool, world_size: int) -> None:
    ranks_pool.run(world_size, bytes_of_dimensions, timeout=200)
