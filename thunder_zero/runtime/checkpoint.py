"""Full parameters out of shards, and shards out of full parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thunder_zero.runtime.shards import own_rows
from thunder_zero.runtime.state import State


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
        rows[name] = own_rows(value, param, state.plan)
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
def full_state_dict(state: State, names: Mapping[str, Any], model: Any) -> dict[str, Tensor]:
    """Every parameter and buffer in full; a collective that all ranks must call.

    Args:
        state: the model's state.
        names: the plain module's state dict; only its names and its extra state are read.
        model: the jitted module, which holds the buffers.
    """
    gathered: dict[str, Tensor] = {}  # by path: a tied parameter is gathered once
    result: dict[str, Any] = {}
    others = dict(model.named_parameters(remove_duplicate=False))  # those that the policy ignores, beside the shards
    for name, plain in names.items():
        param = state.plan.by_name.get(name)
        if param is not None:
            if param.path not in gathered:
                gathered[param.path] = state.gather_now(param)
            result[name] = gathered[param.path]
        elif name in others:
            result[name] = others[name].detach().clone()
        elif isinstance(plain, Tensor):
            result[name] = model.get_buffer(name).detach().clone()
        else:
            result[name] = plain
    return result
