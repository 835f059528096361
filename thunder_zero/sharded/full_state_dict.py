"""``tz.full_state_dict``. Converts optimizers' state dicts to full tensors and back, for Fabric."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from thunder_zero.comm.small_collectives import full_tensor, gather_object_on_rank_0
from thunder_zero.sharded.dtensors import local, part_of
from thunder_zero.sharded.frozen import decoded_values
from thunder_zero.sharded.optimizers import StepsWhole, param_shaped_states, parameters_of
from thunder_zero.sharded.sharded_model import owner_of, owner_of_replaced, sharded_model, tagged
from thunder_zero.sharded.state import State


@tagged("full_state_dict")
def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer of the plain module on every rank, in full.

    A collective: all ranks must call it. Values are copies on the model's device.

    >>> torch.save(tz.full_state_dict(model), "model.pt")
    """
    sharded = sharded_model(model)
    parts: dict[str, Any] = get_model_state_dict(sharded)  # keep DTensors: torch would gather values without a tag
    full = decoded_values(sharded.plain, _in_full(parts, sharded.state))
    memory_of_model = {_memory_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return {name: value.clone() if _memory_of(value) in memory_of_model else value for name, value in full.items()}


@torch.no_grad()
def full_optimizer_state_dict(optimizer: Optimizer, *, wanted: bool) -> dict[str, Any]:
    """Return an optimizer's state dict with full tensors on the CPU. This is a collective.

    With ``wanted=False`` this rank takes part in the collective, and returns {}. States of parameters that
    ``thunder_zero`` did not shard are unchanged.
    """
    state_dict = optimizer.state_dict()
    states: dict[int, Any] = {}
    params = parameters_of(optimizer)
    for number, owner in enumerate(map(owner_of, params)):  # all ranks gather in the same order
        values = state_dict["state"].get(number, {})
        if owner is None:
            full = values
        elif isinstance(optimizer, StepsWhole):
            values_of_ranks = gather_object_on_rank_0(_on_cpu(values), owner[0].group)
            full = next((values for values in values_of_ranks if values), {})
        else:
            full = _in_full(values, owner[0])
        if wanted and full:
            states[number] = _on_cpu(full)
        del full  # before the next tensor is gathered
    return {**state_dict, "state": states} if wanted else {}


@torch.no_grad()
def shard_optimizer_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Replace full states in a state dict by this rank's parts; a hook before an optimizer loads it."""
    params = parameters_of(optimizer)
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    if len(indices) != len(params):
        return state_dict  # torch raises right after this hook
    states = dict(state_dict["state"])
    names = param_shaped_states((states.get(index, {}), param) for index, param in zip(indices, params, strict=True))
    for index, param in zip(indices, params, strict=True):
        if (owner := owner_of(param)) is None or index not in states:
            continue
        if not isinstance(optimizer, StepsWhole):
            states[index] = _parts(owner[1].path, states[index], param, names)
        elif optimizer.owner_of(param) != owner[0].plan.mesh.shard.place:
            del states[index]
    return {**state_dict, "state": states}


@torch.no_grad()
def step_shards(optimizer: Optimizer) -> None:
    """Replace the plain module's parameters in an optimizer by the shards, and full states by this rank's parts."""
    pairs = ((values, param) for param, values in optimizer.state.items() if isinstance(param, Tensor))
    names = param_shaped_states(pairs)
    for group in optimizer.param_groups:
        for index, original in enumerate(group["params"]):
            if (owner := owner_of_replaced(original)) is not None:
                shard = group["params"][index] = owner[1].shard
                if original in optimizer.state:
                    optimizer.state[shard] = _parts(owner[1].path, optimizer.state.pop(original), shard, names)


def _in_full(values: Mapping[str, Any], state: State) -> dict[str, Any]:
    return {
        name: full_tensor(value, state.group) if isinstance(value, DTensor) else value for name, value in values.items()
    }


def _memory_of(value: Any) -> int | None:
    return local(value).untyped_storage().data_ptr() if isinstance(value, Tensor) else None


def _on_cpu(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in values.items()}


def _parts(path: str, values: Mapping[str, Any], param: Tensor, names: Container[str]) -> dict[str, Any]:
    """Return a parameter's states, with this rank's parts in place of the full states named in ``names``."""
    parts = dict(values)
    for name, value in values.items():
        if not isinstance(value, Tensor) or not isinstance(param, DTensor):
            continue
        if value.shape == param.shape and name in names:
            parts[name] = part_of(value, param)
        elif value.numel() != 1:
            raise ValueError(
                f"cannot cut the optimizer's {name!r} of parameter {path!r} into rows: it has shape "
                f"{tuple(value.shape)} in the state dict, and is neither one number nor of the parameter's shape "
                f"{tuple(param.shape)}; load it into an optimizer made by tz.whole, or where the parameter is "
                f"replicated (stage 0)"
            )
    return parts
