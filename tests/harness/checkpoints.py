"""Models and optimizers with state, ours and torch's, and their full contents; ranks that one process simulates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thunder_zero as tz
from tests.harness.models import Mlp
from thunder_zero.checkpoint import folder
from thunder_zero.checkpoint.collect import model_items, optimizer_items
from thunder_zero.checkpoint.dcp_write import write_items
from thunder_zero.checkpoint.extras import extra_items
from thunder_zero.checkpoint.write import finish_checkpoint
from thunder_zero.plan import make_plan
from thunder_zero.rows import own_rows
from thunder_zero.runtime.sharded_model import sharded_model
from thunder_zero.state_dict.contents import ModelContents


def adamw(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take a step, so that the optimizer has state, without compiling a forward."""
    for param in model.parameters():
        if param.requires_grad:
            param.grad = param.detach().cos() * (param.detach() != 0)  # padding stays 0
    optimizer.step()


def state_of(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """All parameters and optimizer state in full, on each rank."""
    full = {name: value for name, value in tz.full_state_dict(model).items() if isinstance(value, Tensor)}
    state = sharded_model(model).state
    for path, shard in state.shards.items():
        for key, value in optimizer.state.get(shard, {}).items():
            value = torch.as_tensor(value)
            rows = value.shape == shard.shape
            full[f"{path} {key}"] = state.gather_now(state.plan.by_name[path], value) if rows else value.clone()
    return full


def same(found: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    """The names of the entries that differ."""
    return [name for name in found.keys() | right.keys() if name not in found or not found[name].equal(right[name])]


def plain(world_size: int, kind: str) -> tuple[Any, torch.optim.Optimizer]:
    """Torch's own model of that kind, with other values."""
    torch.manual_seed(5)
    module: Any = Mlp()
    if kind == "fsdp2":
        for layer in module.layers:
            fully_shard(layer, mesh=init_device_mesh("cpu", (world_size,)))
        fully_shard(module, mesh=init_device_mesh("cpu", (world_size,)))
    else:
        module = DistributedDataParallel(module)
    return module, adamw(module, lr=1.0)


def full_of(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """All parameters and optimizer state of torch's own model in full, with the names of :func:`state_of`."""

    def whole(value: Any) -> Tensor:
        return value.full_tensor() if isinstance(value, torch.distributed.tensor.DTensor) else value

    found = {name.removeprefix("module."): whole(param.detach()) for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        for key, value in optimizer.state[param].items():
            found[f"{name.removeprefix('module.')} {key}"] = whole(value)
    return found


# What a rank saves and loads follows from its plan, its shards and its optimizer, so one process can be all ranks.


@dataclass
class Simulated:
    """One rank of several in this process."""

    held: ModelContents
    optimizer: torch.optim.Optimizer


def simulated_ranks(
    module: nn.Module, world_size: int, stage: int, make: Callable[[Any], torch.optim.Optimizer]
) -> list[Simulated]:
    ranks = []
    for rank in range(world_size):
        plan = make_plan(module, tz.Policy(stage=stage), world_size, rank)
        shards = {}
        for param in plan.params:
            value = module.get_parameter(param.path).detach()
            shards[param.path] = nn.Parameter(own_rows(value, param, plan).clone(), param.requires_grad)
        ranks.append(Simulated(ModelContents(plan, shards, {}, {}, {}, rank), make(shards.values())))
    return ranks


def save_simulated(path: Path, ranks: Sequence[Simulated]) -> None:
    """What :func:`thunder_zero.checkpoint.write.write_checkpoint` does, for all ranks; each has an extra."""
    folder.prepare(path)
    parts = []
    for number, rank in enumerate(ranks):
        items = model_items(rank.held) + optimizer_items(rank.held, [rank.optimizer])
        items += extra_items(rank.held, {"position": 100 + number})
        parts.append(write_items(folder.staging_of(path), number, items))
    finish_checkpoint(path, parts, None)
