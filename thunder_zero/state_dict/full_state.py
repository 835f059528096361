"""Full parameters and optimizer states out of shards, and shards out of full ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.optim import Optimizer

from thunder_zero.plan import Param
from thunder_zero.rows import own_rows
from thunder_zero.runtime.optimizers import parameters_of, state_is_full
from thunder_zero.runtime.registry import owners_of, shard_instead_of
from thunder_zero.runtime.state import State
from thunder_zero.state_dict.optimizer_state import state_value


@torch.no_grad()
def shard(state: State, prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's rows of the full parameters in a submodule's part of a plain state dict.

    Args:
        state: the model's state. Its ZeRO-1 buffers are refreshed in the next forward.
        prefix: the submodule's path, "" for the root.
        values: full parameters and buffers by their names in the submodule.

    Raises:
        ValueError: a parameter of another shape.
    """
    rows = dict(values)
    for name, value in values.items():
        path = f"{prefix}.{name}" if prefix else name
        param = state.plan.by_name.get(path)
        if param is None:
            continue
        if tuple(value.shape) != param.shape:
            raise ValueError(
                f"parameter {path!r} has shape {tuple(value.shape)} in the state dict; it is {param.shape}"
            )
        # Cast here: Thunder would put a tensor of another dtype in the place of the shard.
        rows[name] = own_rows(value.to(param.dtype), param, state.plan)
        state.mark_stale([param.path])
    return rows


@torch.no_grad()
def full(state: State, prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Full parameters for the shards in a submodule's part of a sharded state dict; a collective."""
    gathered: dict[str, Any] = dict(values)
    for name in values:
        param = state.plan.by_name.get(f"{prefix}.{name}" if prefix else name)
        if param is not None:
            gathered[name] = state.gather_now(param)
    return gathered


@torch.no_grad()
def full_optimizer_state_dict(optimizer: Optimizer, keep: bool) -> dict[str, Any]:
    """An optimizer's state dict with full tensors, as the plain module's optimizer has it; a collective.

    Args:
        optimizer: steps shards, and other parameters, whose state stays as it is.
        keep: whether this rank keeps the result, on the CPU; otherwise it only takes part, and returns nothing.

    Raises:
        ValueError: a state that belongs to no single row, so that there is no full one.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    packed = optimizer.state_dict()
    states = dict(packed["state"])
    params = parameters_of(optimizer)
    for index, owner in enumerate(owners_of(params)):  # by index: all ranks gather in the same order
        values = states.get(index)
        if owner is not None and values is not None:
            states[index] = {name: state_value(*owner, name, value, options) for name, value in values.items()}
    return {**packed, "state": states} if keep else {}


@torch.no_grad()
def shard_optimizer_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The other way: a plain module's optimizer state dict with this rank's rows; what is cut already stays so.

    A hook of ``Optimizer.register_load_state_dict_pre_hook``.

    Raises:
        ValueError: a state of another shape than its parameter.
    """
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    states = dict(state_dict["state"])
    # Another number of parameters is refused by torch right after this.
    for index, owner in zip(indices, owners_of(parameters_of(optimizer)), strict=False):
        if owner is not None and index in states:
            states[index] = {name: _own_value(*owner, name, value) for name, value in states[index].items()}
    return {**state_dict, "state": states}


def _own_value(state: State, param: Param, name: str, value: Any) -> Any:
    shape = tuple(value.shape) if isinstance(value, Tensor) else None
    if shape == state.plan.shard_shape(param) != param.shape:  # cut already; a single row's shard has both shapes
        return value
    return own_rows(value, param, state.plan).to(state.device) if state_is_full(name, value, param) else value


@torch.no_grad()
def step_shards(optimizer: Optimizer) -> None:
    """Give an optimizer that was built on the plain module, or on placeholders, the shards instead, with their rows of
    the state that it has."""
    for group in optimizer.param_groups:
        old = group["params"]
        new = [shard_instead_of(param) for param in old]
        group["params"] = [param if shard is None else shard for param, shard in zip(old, new, strict=True)]
        for before, owner, shard in zip(old, owners_of(group["params"]), new, strict=True):
            if owner is not None and shard is not None and before in optimizer.state:
                values = optimizer.state.pop(before)
                optimizer.state[shard] = {name: _own_value(*owner, name, value) for name, value in values.items()}
