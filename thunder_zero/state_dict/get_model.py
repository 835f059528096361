"""Makes a sharded model's state dict as FSDP2 has it, of DTensors or full tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from thunder_zero.plan import Param
from thunder_zero.rows import real_rows
from thunder_zero.runtime.state import State
from thunder_zero.state_dict.contents import ModelContents

FULL_ON_CPU = StateDictOptions(full_state_dict=True, cpu_offload=True)  # on rank 0 alone


def is_returned(state: State, options: StateDictOptions) -> bool:
    """Whether this rank returns a state dict: as in torch, a full one on the CPU is returned by rank 0 alone."""
    return not (options.full_state_dict and options.cpu_offload and state.group.rank() != 0)


def rows_value(state: State, param: Param, rows: Tensor, options: StateDictOptions) -> Tensor:
    """The state dict's value of a parameter, or of an optimizer's state of it, out of this rank's rows: a DTensor
    without padding, or a full tensor, which is a collective."""
    rows = rows.detach()
    if options.full_state_dict:
        value = state.gather_now(param, rows)
        if not is_returned(state, options):
            return value.new_empty(0)
    elif param.sharded:
        value = as_dtensor(state, param, real_rows(rows, param, state.plan))
    else:
        value = rows
    return value.cpu() if options.cpu_offload else value


def as_dtensor(state: State, param: Param, rows: Tensor) -> Tensor:
    """A DTensor whose local tensor is this rank's rows, not a copy of them.

    ZeRO-1's rows lie inside of the full parameter. torch copies and saves no DTensor that was made of a local tensor
    with an offset, but the offset does not matter afterwards, so the local tensor is set as FSDP2 sets it.
    """
    # Of the rows' device, not of compute's: torch copies rows to the mesh's, and offloaded ones do not fit there.
    mesh = DeviceMesh.from_group(state.ranks.inside, rows.device.type)
    stride = torch.empty(param.shape, device="meta").stride()
    first = rows.as_strided(rows.shape, rows.stride(), 0)
    value = DTensor.from_local(first, mesh, [Shard(0)], run_check=False, shape=torch.Size(param.shape), stride=stride)
    value._local_tensor = rows
    return value


def unsharded_value(value: Any, options: StateDictOptions) -> Any:
    """The state dict's value of something that each rank has all of: a copy in a full state dict, otherwise a view."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach().clone() if options.full_state_dict else value.detach()
    return value.cpu() if options.cpu_offload else value


@torch.no_grad()
def make_model_state_dict(state: State, contents: ModelContents, options: StateDictOptions) -> dict[str, Any]:
    """The plain module's state dict with the model's values; values that hooks add stay as they are."""
    unsharded = {**contents.ignored, **contents.buffers, **contents.states}
    frozen = {name for name, param in contents.plan.by_name.items() if not param.requires_grad}
    frozen |= {name for name, tensor in contents.ignored.items() if not tensor.requires_grad}
    found: dict[str, Any] = {}
    made: dict[str, Tensor] = {}  # by path: a tied parameter is gathered once
    for name, value in contents.state_dict.items():
        if options.ignore_frozen_params and name in frozen:
            continue
        param = contents.plan.by_name.get(name)
        if param is None:
            found[name] = unsharded_value(unsharded.get(name, value), options)
            continue
        if param.path not in made:
            made[param.path] = rows_value(state, param, contents.shards[param.path], options)
        found[name] = made[param.path]
    return found if is_returned(state, options) else {}
