"""Sliced modules train as one process, work with tools of torch and Hugging Face, and send what the plan says."""

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
from tests.harness.ranks import LONG, RanksPool
from tests.harness.tiers import deep, slow
from thunder_zero.schedule.ops import Compute, starts_collective

DOUBLE = torch.float64
PLAIN_MODULE = "of plain modules"
FULL = StateDictOptions(full_state_dict=True)
HEADERS, TAGS = 144, 16 * 1024  # bytes on sockets: a message's header; tags of phases and of AdamW's comparisons


# Ten steps


def take_ten_steps(
    rank: int, world_size: int, mesh_name: str, model: str, stage: int, sequence: bool, limit: float
) -> None:
    dtype = DOUBLE if limit < 1e-6 else torch.float32
    mesh, expected = mesh_of(MESHES[mesh_name]), one_process(plain(MODELS[model].build, dtype))
    error = worst(in_slices(model, mesh, stage, sequence, dtype), mesh, expected)
    assert 0 < error <= limit, error


@pytest.mark.parametrize(
    ("mesh", "model", "stage", "sequence", "limit"),
    [
        *slow(
            ("1x2", "Qwen3", 2, False, 1e-9),
            ("1x2", PLAIN_MODULE, 1, True, 1e-9),
            ("2x1", "Llama", 1, False, 1e-9),
            ("2x2", "Llama", 0, False, 5e-5),
            ("2x2", "Qwen3", 3, True, 1e-9),
            ("2x2", "GPT-2, perceptrons", 3, False, 1e-9),
        ),
        *deep(
            ("1x2", "Llama", 3, True, 1e-9),
            ("2x1", "Qwen3", 3, True, 1e-9),
            ("2x2", "Llama", 2, True, 1e-9),
            ("2x2", PLAIN_MODULE, 3, False, 5e-5),
            ("1x4", PLAIN_MODULE, 3, True, 1e-9),
            ("4x1", PLAIN_MODULE, 2, False, 1e-9),
        ),
    ],
)
def test_ten_steps_are_those_of_one_process(
    ranks_pool: RanksPool, mesh: str, model: str, stage: int, sequence: bool, limit: float
) -> None:
    ranks_pool.run(prod(MESHES[mesh]), take_ten_steps, mesh, model, stage, sequence, limit, timeout=LONG)


# Checkpoints


def take_step(model: Any, optimizer: torch.optim.Optimizer, index: int = 0) -> None:
    optimizer.zero_grad()
    loss_of(model, tokens_of(index)).backward()
    optimizer.step()


def state_of(model: Any, optimizer: Any, options: Any = None) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }


def assert_equal(actual: Any, expected: Any, path: str = "") -> None:
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), path
        for key, value in expected.items():
            assert_equal(actual[key], value, f"{path}.{key}")
    else:
        assert torch.equal(actual, expected) if isinstance(expected, Tensor) else actual == expected, path


def make_fsdp2(mesh: Any, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    spec = MODELS[PLAIN_MODULE]
    module = spec.slice(plain(spec.build, seed=seed), mesh["tp"], False)
    for block in module.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(module, mesh=mesh["dp"])
    return module, adamw(module)


def make_ours(mesh: Any, stage: int) -> tuple[Any, torch.optim.Optimizer]:
    model = in_slices(PLAIN_MODULE, mesh, stage, False, DOUBLE)
    return model, adamw(model)


def exchange_with_fsdp2(rank: int, world_size: int, folder: Path, stage: int) -> None:
    """Load what FSDP2 saves of a sliced module into ours, take a step, and load what ours saves into FSDP2."""
    mesh = mesh_of((2, world_size // 2))
    fsdp2, ours, other_fsdp2 = make_fsdp2(mesh, 1), make_ours(mesh, stage), make_fsdp2(mesh, 2)
    take_step(*fsdp2)
    for index, (before, after) in enumerate(((fsdp2, ours), (ours, other_fsdp2))):
        expected = state_of(*before, FULL)
        dcp.save(state_of(*before), checkpoint_id=folder / str(index))
        state = state_of(*after)
        dcp.load(state, checkpoint_id=folder / str(index))
        set_model_state_dict(after[0], state["model"])
        set_optimizer_state_dict(*after, state["optimizer"])
        assert_equal(state_of(*after, FULL), expected)
        for pair in (before, after):
            take_step(*pair, index + 1)
        for name, value in tz.full_state_dict(ours[0]).items() if index == 0 else ():
            torch.testing.assert_close(value, fsdp2[0].get_parameter(name).full_tensor(), rtol=0, atol=1e-9)


@pytest.mark.slow
def test_fsdp2_and_ours_load_each_others_checkpoints_of_slices(ranks_pool: RanksPool, tmp_path: Path) -> None:
    ranks_pool.run(4, exchange_with_fsdp2, tmp_path, 3, timeout=LONG)


def save_on_meshes(rank: int, world_size: int, folder: Path) -> None:
    """Save on several meshes, load each checkpoint on every mesh, and keep the expected states for other worlds."""
    meshes = [mesh_of(shape) for shape in ((2, 2), (1, 4), (4, 1))]
    models = [make_ours(mesh, stage) for mesh, stage in zip(meshes, (3, 2, 1), strict=True)]
    expected = []
    for index, (model, optimizer) in enumerate(models):
        take_step(model, optimizer, index)
        tz.save(folder / str(index), model, optimizer)
        expected.append(deepcopy(state_of(model, optimizer, FULL)))  # a load writes into tensors that they may share
    for index, state in enumerate(expected):
        for model, optimizer in models:
            tz.load(folder / str(index), model, optimizer)
            assert_equal(state_of(model, optimizer, FULL), state)
    if rank == 0:
        torch.save(expected, folder / "expected.pt")


def load_on_another_world(rank: int, world_size: int, folder: Path) -> None:
    model, optimizer = make_ours(mesh_of((2, 1)), 3) if world_size > 1 else make_unsliced()
    for index, expected in enumerate(torch.load(folder / "expected.pt")):
        tz.load(folder / str(index), model, optimizer)
        assert_equal(state_of(model, optimizer, FULL), expected)


def make_unsliced() -> tuple[Any, torch.optim.Optimizer]:
    model = tz.compile(plain(MODELS[PLAIN_MODULE].build), stage=3)
    return model, adamw(model)


@pytest.mark.slow
def test_checkpoints_load_on_other_meshes_and_worlds(ranks_pool: RanksPool, tmp_path: Path) -> None:
    ranks_pool.run(4, save_on_meshes, tmp_path, timeout=LONG)
    ranks_pool.run(2, load_on_another_world, tmp_path)
    ranks_pool.run(1, load_on_another_world, tmp_path)


# Tools


def save_llama(rank: int, world_size: int, folder: Path) -> None:
    """Save a llama that is tied again after slicing: full state dicts, and a folder for Hugging Face."""
    mesh = mesh_of((1, world_size))
    module = plain(lambda: llama(tied=True))
    expected = one_process(plain(lambda: llama(tied=True)), 2)
    sliced: Any = slice_llama(module, mesh["tp"], False)
    sliced.lm_head.weight = sliced.model.embed_tokens.weight
    model = tz.compile(sliced, stage=3, mesh=mesh)
    error = worst(model, mesh, expected)
    assert error <= 1e-9, error
    full = tz.full_state_dict(model)
    assert full["lm_head.weight"].shape == (32, 32)
    assert_equal(get_model_state_dict(model, options=FULL), full)
    tz.save_pretrained(model, folder)
    loaded = LlamaForCausalLM.from_pretrained(folder, dtype=DOUBLE)
    assert_equal(dict(loaded.state_dict()), full)


@pytest.mark.slow
def test_a_tied_llama_in_slices_is_saved_for_hugging_face(ranks_pool: RanksPool, tmp_path: Path) -> None:
    ranks_pool.run(2, save_llama, tmp_path, timeout=LONG)


def use_formats(rank: int, world_size: int) -> None:
    """Send gradients and parameters of slices as int8 over dp; errors stay within the format's."""
    mesh, spec = mesh_of((2, world_size // 2)), MODELS[PLAIN_MODULE]
    (expected, *_) = one_process(plain(spec.build, torch.float32), 1)
    for field, limit in (("reduce_format", 4 / 127), ("gather_format", 0.2)):
        with counted_lines() as lines:
            model = in_slices(PLAIN_MODULE, mesh, 3, False, torch.float32, **{field: {"*": tz.Int8(32)}})
            loss_of(model, tokens_of(0).chunk(2)[rank // (world_size // 2)]).backward()
        timeline = tz.traces_of(model).timeline
        assert [line.nbytes for line in lines] == [timeline.traffic(op).sent for op in timeline.launches.values()]
        errors = {}
        for name, param in model.named_parameters():
            value = expected.grads[name]
            size = value.abs().max().clamp(min=1e-6)  # a keys' bias has a gradient of zero, except for rounding
            errors[name] = ((param.grad.full_tensor() - value).abs().max() / size).item()
        assert 0 < max(errors.values()) <= limit, (field, errors)


@pytest.mark.slow
def test_formats_work_with_slices(ranks_pool: RanksPool) -> None:
    ranks_pool.run(4, use_formats, timeout=LONG)


# Bytes


def count_bytes(rank: int, world_size: int) -> None:
    """Check that a rank stores 1 / (dp * tp) of a sliced parameter, and that tp's bytes on sockets are the trace's."""
    mesh = mesh_of((world_size // 2, 2))
    model = in_slices(PLAIN_MODULE, mesh, 3, False, DOUBLE)
    plan = model.state.plan
    for param in plan.params:
        shard = local(model.state.params[param.path].shard)
        parts = mesh.size() if param.sliced is not None else mesh["dp"].size()
        assert shard.numel() * parts == prod(plan.whole_shape(param)), param.path
    x = tokens_of(0).chunk(mesh["dp"].size())[rank // 2]
    loss_of(model, x).backward()
    timeline = tz.traces_of(model).timeline
    torchs = [timeline.traffic(op).sent for op in filter(starts_collective, timeline.ops) if isinstance(op, Compute)]
    activation = x.numel() * 32 * 8
    # forward: embed, then o and down of two blocks, and half of the logits; backward: q, k, v, up of two blocks, head
    assert Counter(torchs) == {activation: 1 + 4 + 8 + 1, activation // 2: 1}, torchs
    if mesh["dp"].size() == 1:
        dist.barrier()
        before = bytes_on_sockets()
        loss_of(model, x).backward()
        socket_bytes = bytes_on_sockets() - before
        traced = sum(torchs)
        assert traced <= socket_bytes <= traced + 8 * HEADERS * len(torchs) + TAGS, (socket_bytes, traced)


def local(param: Tensor) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_store_and_send_what_the_plan_and_the_trace_say(ranks_pool: RanksPool, world_size: int) -> None:
    ranks_pool.run(world_size, count_bytes, timeout=LONG)
