"""Models and optimizers with state, ours and torch's, and their full contents; and simulated ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import thunder_zero as tz
from tests.harness.models import Mlp
from thunder_zero.checkpoint import folder
from thunder_zero.checkpoint.contents import Contents
from thunder_zero.checkpoint.dcp_write import WritePlanner, write_planned
from thunder_zero.checkpoint.save import entries_of, finish_checkpoint
from thunder_zero.plan.layout import is_sharded, row_range
from thunder_zero.sharded.sharded_model import sharded_model


def adamw(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take a step, so that the optimizer has state, without compiling a forward."""
    for param in model.parameters():
        if param.requires_grad:
            param.grad = param.detach().cos()
    optimizer.step()


def state_of(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Return all parameters and optimizer states in full, on each rank."""
    full = {name: value for name, value in tz.full_state_dict(model).items() if isinstance(value, Tensor)}
    for path, param in sharded_model(model).state.params.items():
        for key, value in optimizer.state.get(param.shard, {}).items():
            full[f"{path} {key}"] = full_copy(torch.as_tensor(value))
    return full


def full_copy(value: Tensor) -> Tensor:
    """Return a copy of the full tensor, on each rank."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Return the names of the entries that differ, or that only one has."""
    return [name for name in a.keys() | b.keys() if not (name in a and name in b and a[name].equal(b[name]))]


def torch_model(world_size: int, kind: str) -> tuple[Any, torch.optim.Optimizer]:
    """Return an MLP under FSDP2 or DDP, and its optimizer. Its values differ from those of other tests' models."""
    torch.manual_seed(5)
    module: Any = Mlp()
    if kind == "fsdp2":
        for layer in module.layers:
            fully_shard(layer, mesh=init_device_mesh("cpu", (world_size,)))
        fully_shard(module, mesh=init_device_mesh("cpu", (world_size,)))
    else:
        module = DistributedDataParallel(module)
    return module, adamw(module, lr=1.0)


def torch_state_of(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Return all parameters and optimizer states of torch's own model in full, named as by :func:`state_of`."""
    full = {name.removeprefix("module."): full_copy(param.detach()) for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        for key, value in optimizer.state[param].items():
            full[f"{name.removeprefix('module.')} {key}"] = full_copy(value)
    return full


# A rank saves and loads only its DTensors and its optimizer, so one process can simulate all ranks.


@dataclass
class Simulated:
    """One of several ranks that this process simulates."""

    contents: Contents
    optimizer: torch.optim.Optimizer


def part_of(full: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a DTensor with this rank's rows of a tensor. It is replicated if the tensor is not sharded."""
    shape, stride = full.shape, torch.empty(full.shape, device="meta").stride()
    placement = Shard(0) if is_sharded(tuple(shape)) else Replicate()
    local = full
    if placement.is_shard():
        (rank,) = mesh.get_coordinate() or ()
        start, stop = row_range(shape[0], mesh.size(), rank)
        local = full[start:stop].clone()
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=shape, stride=stride)


def mesh_of(rank: int, world_size: int) -> DeviceMesh:
    """Return the mesh of a simulated rank. Meshes differ by rank, because torch caches DTensors' layouts by mesh."""
    ranks = torch.arange(world_size)
    return DeviceMesh("cpu", ranks, mesh_dim_names=(f"rank{rank}",), _init_backend=False, _rank=rank)


def simulated_ranks(
    module: nn.Module, world_size: int, stage: int, make: Callable[[Any], torch.optim.Optimizer]
) -> list[Simulated]:
    ranks = []
    for rank in range(world_size):
        mesh, params = mesh_of(rank, world_size), {}
        for name, param in module.named_parameters():
            value = param.detach().clone()
            params[name] = nn.Parameter(part_of(value, mesh) if stage else value, param.requires_grad)
        first = {id(param): name for name, param in module.named_parameters()}
        names = {name: first[id(param)] for name, param in module.named_parameters(remove_duplicate=False)}
        aliases = {name: target for name, target in names.items() if name != target}
        contents = Contents(
            params, aliases, {}, {name: name for name in params}, {}, {}, rank, world_size, rank, world_size
        )
        ranks.append(Simulated(contents, make(params.values())))
    return ranks


def save_simulated(path: Path, ranks: Sequence[Simulated]) -> None:
    """Save for all ranks as ``write_checkpoint`` of checkpoint/save.py does; each rank has an extra."""
    folder.prepare(path)
    parts = []
    for number, rank in enumerate(ranks):
        entries, _ = entries_of(rank.contents, [rank.optimizer], {"position": 100 + number})
        parts.append(write_planned(folder.staging_of(path), number, WritePlanner(entries)))
    finish_checkpoint(path, parts, None)
