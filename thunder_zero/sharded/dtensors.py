"""Parameters as DTensors: their placements, their parts of full tensors, and users' attributes.

::

    rank 0 of 2, weight of 3 x 4, stored as 2 x 4          rank 1
    DTensor (3, 4), Shard(0)   local (2, 4)  ----.         DTensor (3, 4), Shard(0)   local (1, 4)
    rows    (2, 4)             the same memory <-'         rows    (2, 4)             the same memory, and padding

The optimizer steps DTensors, whose local tensors end before the padding. Programs read the rows with the padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication

from thunder_zero.comm.group import Ranks
from thunder_zero.compat.private import DTensorSpec, StridedShard, TensorMeta
from thunder_zero.plan.params import Param, Plan
from thunder_zero.plan.policy import STAGES

IS_PARAM = "_is_param"  # torch's attribute that marks a DTensor as a parameter


def specs_of(plan: Plan, ranks: Ranks, device: torch.device) -> dict[str, DTensorSpec]:
    """Return the DTensor spec of each parameter, by path; none in stage 0 without tensor parallelism."""
    if not (STAGES[plan.policy.stage].sharded or plan.mesh.is_sliced):
        return {}
    mesh = ranks.mesh or DeviceMesh.from_group(ranks.shard_group, device.type)

    @cache
    def spec(shape: tuple[int, ...], dtype: torch.dtype, sharded: bool, sliced: int | None) -> DTensorSpec:
        # Cached, since each operator call compares specs, which is fast for identical objects.
        slices = plan.mesh.tensor.size
        rows = StridedShard(0, split_factor=slices) if sliced == 0 and slices > 1 else Shard(0)
        row_placements = (rows if sharded else Replicate(),)
        slice_placements = (Replicate() if sliced is None else Shard(sliced),) if plan.mesh.is_sliced else ()
        replica_placements = [Replicate()] * (mesh.ndim - 1 - len(slice_placements))
        placements = (*replica_placements, *row_placements, *slice_placements)
        return DTensorSpec(mesh, placements, contiguous(shape, dtype))

    return {
        param.path: spec(plan.resting(param).shape, param.rest_dtype, param.sharded, param.sliced)
        for param in plan.params
    }


def of_gradient(spec: DTensorSpec | None, param: Param) -> DTensorSpec | None:
    """Return the spec of a parameter's gradient. If only the owner gets it, it is a sum of the owner's and zeros."""
    if spec is None or param.owner is None:
        return spec
    return DTensorSpec(spec.mesh, (*spec.placements[:-1], Partial()), spec.tensor_meta)


def contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> TensorMeta:
    """Return the metadata of a contiguous full tensor, for a DTensor's spec."""
    return TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), dtype)


def as_dtensor(rows: Tensor, spec: DTensorSpec | None) -> Tensor:
    """Return a DTensor with these local rows, without padding. Without a spec, return the rows."""
    # DTensor.from_local, or calling the class, would cost ten times as much in every step.
    return rows if spec is None else DTensor.__new__(DTensor, rows, spec, requires_grad=False)


def parameter(rows: Tensor, spec: DTensorSpec | None, *, requires_grad: bool) -> nn.Parameter:
    """Return the parameter that the optimizer steps: an alias of rows without padding."""
    if spec is not None and rows.storage_offset():  # torch neither copies nor saves a DTensor with a storage offset
        rows = torch.from_dlpack(rows) if rows.numel() else torch.empty_like(rows)
    return nn.Parameter(as_dtensor(rows, spec), requires_grad)


def parameter_like(original: Tensor, values: Tensor) -> nn.Parameter:
    """Return a parameter with these values, and with the attributes and ``requires_grad`` of ``original``."""
    return with_attributes_of(nn.Parameter(values, original.requires_grad), original)


def with_attributes_of(param: nn.Parameter, original: Tensor) -> nn.Parameter:
    """Replace a parameter's attributes, such as ``no_weight_decay``, by those of ``original``. Return the parameter."""
    attributes = vars(param)
    kept = {name: value for name, value in attributes.items() if name == IS_PARAM}
    attributes.clear()
    attributes.update({name: value for name, value in vars(original).items() if name != IS_PARAM}, **kept)
    return param


def local(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, without an autograd view. Return any other tensor unchanged."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def require_own(value: Any, param: Any, label: str) -> None:
    """Raise ValueError if a value has another rank's rows, for example if all ranks loaded a file of one rank."""
    if isinstance(value, DTensor) and isinstance(param, DTensor) and value.device_mesh is not param.device_mesh:
        place, other = param.device_mesh.get_coordinate(), value.device_mesh.get_coordinate()
        if value.device_mesh == param.device_mesh and place != other:
            raise ValueError(
                f"{label} has the rows of the rank at {other} of the mesh, and this rank is at {place}: one rank wrote "
                f"its own rows, and others loaded them; save with tz.save on all ranks, or full values "
                f"(tz.full_state_dict)"
            )


def refuse_to_compute(module: nn.Module, args: Any) -> None:
    """Raise RuntimeError if a module has shards. This is a hook of copies of a model, which cannot compute."""
    if any(isinstance(param, DTensor) for param in module.parameters()):
        raise RuntimeError(
            f"a copy of a sharded {type(module).__name__} has its rows and computes nothing; call the model itself, or "
            f"load thunder_zero.full_state_dict(model) into a plain module (tz.EMA averages in place)"
        )


def part_of(full: Tensor, param: Tensor) -> Tensor:
    """Return this rank's part of a full tensor, copied, as a DTensor like ``param``, if that is a DTensor."""
    if not isinstance(param, DTensor) or isinstance(full, DTensor):
        return full
    (chunk,) = param.__create_chunk_list__()
    rows = full.detach()
    for dimension, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
        rows = rows.narrow(dimension, offset, size)
    return dtensor_like(rows.to(local(param).device, copy=True).contiguous(), param, full.shape)


def parts_of(full: Mapping[str, Any], state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Replace full tensors by this rank's parts, for the names in ``state_dict``, the model's state dict."""
    parts = dict(full)
    for name, value in full.items():
        like = state_dict.get(name)
        require_own(value, like, repr(name))
        if not isinstance(like, Tensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
            continue  # a part, an extra state, or a value for which torch raises
        if value.shape != like.shape:
            raise ValueError(
                f"{name!r} has shape {tuple(value.shape)} in the state dict and {tuple(like.shape)} in the model; load "
                f"the state dict of this model"
            )
        parts[name] = part_of(value, like)
    return parts


def load_parts(module: nn.Module, full: Mapping[str, Any], state_dict: Mapping[str, Any], strict: bool) -> Any:
    """Load a state dict of full tensors into a module with sharded tensors. This is not a collective."""
    # If a load hook renames an old name, the value is still full, and DTensor shards the value.
    with implicit_replication():
        return module.load_state_dict(parts_of(full, state_dict), strict)


def dtensor_like(rows: Tensor, param: DTensor, shape: torch.Size) -> Tensor:
    """Return a DTensor with this full shape, a parameter's placements, and these local rows (not copied)."""
    return as_dtensor(rows, DTensorSpec(param.device_mesh, param.placements, contiguous(shape, rows.dtype)))
