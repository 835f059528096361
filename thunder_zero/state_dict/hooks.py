"""Cuts full state dicts into rows, and back, in Thunder's and Fabric's own hooks.

``to_rows`` and ``to_full`` serve ZeroTransform; the functions on optimizers serve Fabric.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.optim import Optimizer

from thunder_zero.plan import Param
from thunder_zero.rows import own_rows
from thunder_zero.runtime.optimizers import StepsWhole, parameters_of, state_is_full
from thunder_zero.runtime.registry import owners_of, shard_instead_of
from thunder_zero.runtime.state import State
from thunder_zero.state_dict.contents import Named
from thunder_zero.state_dict.get_optimizer import state_value, with_whole_states


@torch.no_grad()
def to_rows(state: State, prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Cut the full parameters of one submodule's state dict into this rank's rows.

    Args:
        state: the model's state. Its ZeRO-1 buffers are refreshed in the next forward.
        prefix: the submodule's path; "" for the root.
        values: full parameters and buffers by their names in the submodule.

    Raises:
        ValueError: a parameter has another shape.
    """
    rows = dict(values)
    for name, value in values.items():
        path = f"{prefix}.{name}" if prefix else name
        param = state.plan.by_name.get(path)
        if param is None:
            continue
        if tuple(value.shape) != param.shape:
            raise ValueError(
                f"parameter {path!r} has shape {tuple(value.shape)} in the state dict and {param.shape} in the model; "
                f"load the state dict of this model"
            )
        # Cast here: Thunder would replace the shard by a tensor of another dtype.
        rows[name] = own_rows(value.to(param.dtype), param, state.plan)
        state.mark_stale([param.path])
    return rows


@torch.no_grad()
def to_full(state: State, prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Gather the shards of one submodule's state dict into full parameters; a collective."""
    gathered: dict[str, Any] = dict(values)
    for name in values:
        param = state.plan.by_name.get(f"{prefix}.{name}" if prefix else name)
        if param is not None:
            gathered[name] = state.gather_now(param)
    return gathered


@torch.no_grad()
def full_optimizer_state_dict(optimizer: Optimizer, *, wanted: bool) -> dict[str, Any]:
    """An optimizer's state dict with full tensors, as the plain module's optimizer has it; a collective.

    Args:
        optimizer: steps shards, and possibly other parameters, whose states stay as they are.
        wanted: return the result, on the CPU; otherwise this rank only takes part, and returns an empty dict.

    Raises:
        ValueError: a state is neither rows nor one number, so that no full state can be made.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    own = optimizer.state_dict()
    states = dict(own["state"])
    shards = parameters_of(optimizer)
    models: dict[int, State] = {}
    found: list[tuple[Named, Mapping[str, Any]]] = []
    for index, (owner, shard) in enumerate(zip(owners_of(shards), shards, strict=True)):
        if owner is not None:
            models[index] = owner[0]
            rank = optimizer.owner_of(shard) if isinstance(optimizer, StepsWhole) else None
            found.append((Named(str(index), index, owner[1], shard, rank), states.get(index, {})))
    if isinstance(optimizer, StepsWhole):
        found = with_whole_states(models[found[0][0].number], found)
    for named, values in found:  # all ranks gather in the same order
        state = models[named.number]
        if values:
            of = {name: state_value(state, named, name, value, options) for name, value in values.items()}
            states[named.number] = of
    return {**own, "state": states} if wanted else {}


@torch.no_grad()
def shard_optimizer_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Cut the full states of a plain module's optimizer state dict into this rank's rows; existing rows stay.

    A hook of ``Optimizer.register_load_state_dict_pre_hook``.

    Raises:
        ValueError: a state has another shape than its parameter.
    """
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    owners = owners_of(parameters_of(optimizer))
    if len(indices) != len(owners):
        return state_dict  # torch refuses it right after this hook
    states = dict(state_dict["state"])
    shards = parameters_of(optimizer)
    for index, owner, shard in zip(indices, owners, shards, strict=True):
        if isinstance(optimizer, StepsWhole):
            if owner is not None and optimizer.owner_of(shard) != owner[0].plan.rank:
                states.pop(index, None)
        elif owner is not None and index in states:
            states[index] = {name: _rows_value(*owner, name, value) for name, value in states[index].items()}
    return {**state_dict, "state": states}


def _rows_value(state: State, param: Param, name: str, value: Any) -> Any:
    shape = tuple(value.shape) if isinstance(value, Tensor) else None
    if shape == state.plan.shard_shape(param) != param.shape:  # rows already; the shard of one row has both shapes
        return value
    if not state_is_full(name, value, param):
        return value
    return own_rows(value, param, state.plan).to(state.shards[param.path].device)


@torch.no_grad()
def step_shards(optimizer: Optimizer) -> None:
    """Replace the plain module's parameters, or placeholders, in an optimizer by shards, and their states by rows."""
    for group in optimizer.param_groups:
        old = group["params"]
        new = [shard_instead_of(param) for param in old]
        group["params"] = [param if shard is None else shard for param, shard in zip(old, new, strict=True)]
        for before, owner, shard in zip(old, owners_of(group["params"]), new, strict=True):
            if owner is not None and shard is not None and before in optimizer.state:
                values = optimizer.state.pop(before)
                optimizer.state[shard] = {name: _rows_value(*owner, name, value) for name, value in values.items()}
