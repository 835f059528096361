"""Parameters at rest as DTensors: how ranks share them, their rows in a program, their gradients.

::

    rank 0 of 2, weight of 3 x 4, stored as 2 x 4          rank 1
    DTensor (3, 4), Shard(0)   local (2, 4)  ----.         DTensor (3, 4), Shard(0)   local (1, 4)
    rows    (2, 4)             the same memory <-'         rows    (2, 4)             the same memory, and padding

The optimizer steps DTensors, whose local tensors end before the padding; programs read the rows, and the padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication

from thunder_zero.comm.group import Ranks
from thunder_zero.compat.private import DTensorSpec, StridedShard, TensorMeta
from thunder_zero.compat.torch.autograd import accumulates
from thunder_zero.plan.params import Plan
from thunder_zero.plan.policy import STAGES


def specs_of(plan: Plan, ranks: Ranks, device: torch.device) -> dict[str, DTensorSpec]:
    """How ranks share each parameter, by path: its rows over the last data dimension of the mesh, or all of it on every
    rank; its slices over the dimension for tensor parallelism. None in stage 0 without slices, whose parameters are
    plain tensors."""
    if not (STAGES[plan.policy.stage].sharded or plan.mesh.is_sliced):
        return {}
    mesh = ranks.mesh or DeviceMesh.from_group(ranks.shard_group, device.type)

    @cache
    def spec(shape: tuple[int, ...], dtype: torch.dtype, sharded: bool, sliced: int | None) -> DTensorSpec:
        # Parameters that look alike share it: torch compares specs in each call of an operator, the same one at once.
        cut = (_rows_of_slices(sliced, plan.mesh.tensor.size) if sharded else Replicate(),)
        over_slices = (Replicate() if sliced is None else Shard(sliced),) if plan.mesh.is_sliced else ()
        copies = [Replicate()] * (mesh.ndim - 1 - len(over_slices))
        return DTensorSpec(mesh, (*copies, *cut, *over_slices), contiguous(shape, dtype))

    return {
        param.path: spec(plan.resting(param).shape, param.rest_dtype, param.sharded, param.sliced)
        for param in plan.params
    }


def _rows_of_slices(sliced: int | None, slices: int) -> Placement:
    """How the rows of slices are placed: as FSDP2 places them, if slices are rows themselves."""
    return StridedShard(0, split_factor=slices) if sliced == 0 and slices > 1 else Shard(0)


def contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> TensorMeta:
    """What a DTensor's spec says of a full tensor."""
    return TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), dtype)


def as_dtensor(rows: Tensor, spec: DTensorSpec | None) -> Tensor:
    """A DTensor of rows without padding; in stage 0 the rows. ``DTensor.from_local`` would cost ten times as much in
    every step, and ``__init__``, which does nothing, as much again: torch hides it from dynamo."""
    return rows if spec is None else DTensor.__new__(DTensor, rows, spec, requires_grad=False)


def parameter(rows: Tensor, spec: DTensorSpec | None, *, requires_grad: bool) -> nn.Parameter:
    """What the optimizer steps: rows without padding, in the same memory. A DTensor's local tensor begins at storage
    offset 0, since torch neither copies nor saves another one."""
    if spec is not None and rows.storage_offset():
        rows = torch.from_dlpack(rows) if rows.numel() else torch.empty_like(rows)
    return nn.Parameter(as_dtensor(rows, spec), requires_grad)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, as it is stored: not a view with a history; any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class HoldsRows(Protocol):
    """What the gradients of rows need: see :class:`thunder_zero.sharded.state.LocalState`."""

    shards: dict[str, nn.Parameter]
    specs: Mapping[str, DTensorSpec]
    frozen: frozenset[str]
    single_rows: frozenset[str]

    @property
    def rows(self) -> Mapping[str, Tensor]:
        """What programs read, by path."""

    def gradient(self, rows: Tensor, path: str) -> Tensor:
        """The gradient of a shard, from its rows."""


class Rows(torch.autograd.Function):
    """The rows of shards, whose gradients become gradients of the shards; one for all parameters of a program."""

    @staticmethod
    def forward(ctx: Any, share: HoldsRows, paths: Sequence[str], *shards: Tensor) -> tuple[Tensor, ...]:
        """The rows, padded, by whose gradients backward makes those of the shards. A tied one may be there twice."""
        ctx.set_materialize_grads(False)  # a parameter that nothing reads keeps grad None
        ctx.share, ctx.paths = share, paths
        rows = tuple(share.rows[path].detach() for path in paths)
        if share.frozen:
            ctx.mark_non_differentiable(*(of for of, path in zip(rows, paths, strict=True) if path in share.frozen))
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Gradients of the shards; None of rows whose gradient is deferred, or that have none.

        A first gradient is put into ``.grad`` here, as FSDP2 does: autograd would make one more DTensor of each. Not
        that of a single row: autograd adds in place what else a loss reads of the parameter, as a penalty does, and
        DTensor takes one row for a dimension to broadcast.
        """
        share: HoldsRows = ctx.share
        puts = bool(share.specs) and accumulates(leaf for leaf, _ in ctx.next_functions if leaf)
        found: list[Tensor | None] = []
        for rows, path in zip(grads, ctx.paths, strict=True):
            grad, shard = None if rows is None else share.gradient(rows, path), share.shards[path]
            is_first = grad is not None and shard.grad is None and path not in share.single_rows
            if puts and is_first and not has_hooks(shard):
                shard.grad, grad = grad, None
            found.append(grad)
        return None, None, *found


def has_hooks(shard: Tensor) -> bool:
    """Whether a function is called with the gradient of a shard, or after it is added."""
    return bool(shard._backward_hooks or shard._post_accumulate_grad_hooks)


def require_own(value: Any, param: Any, what: str) -> None:
    """Refuse the rows of another rank: those in a file that one rank wrote, and every rank has loaded."""
    if isinstance(value, DTensor) and isinstance(param, DTensor) and value.device_mesh is not param.device_mesh:
        place, other = param.device_mesh.get_coordinate(), value.device_mesh.get_coordinate()
        if value.device_mesh == param.device_mesh and place != other:
            raise ValueError(
                f"{what} has the rows of the rank at {other} of the mesh, and this rank is at {place}: one rank wrote "
                f"its own rows, and others loaded them; save with tz.save on all ranks, or full values "
                f"(tz.full_state_dict)"
            )


def refuse_to_compute(module: nn.Module, args: Any) -> None:
    """Refuse a call of a module that has shards: of a copy of a sharded model, before its forward."""
    if any(isinstance(param, DTensor) for param in module.parameters()):
        raise RuntimeError(
            f"a copy of a sharded {type(module).__name__} has its rows and computes nothing; call the model itself, or "
            f"load thunder_zero.full_state_dict(model) into a plain module (tz.EMA averages in place)"
        )


def part_of(full: Tensor, param: Tensor) -> Tensor:
    """A copy of this rank's part of a full tensor of a parameter's shape; the tensor, if the parameter has no parts, or
    if it is a DTensor itself. Only the part is on the parameter's device; not a collective."""
    if not isinstance(param, DTensor) or isinstance(full, DTensor):
        return full
    (chunk,) = param.__create_chunk_list__()
    rows = full.detach()
    for dimension, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
        rows = rows.narrow(dimension, offset, size)
    return dtensor_like(rows.to(local(param).device, copy=True).contiguous(), param, full.shape)


def parts_of(full: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict of full tensors as this rank's of the same model has them; names that ``own`` does not have stay."""
    parts = dict(full)
    for name, value in full.items():
        require_own(value, own.get(name), repr(name))
        if not isinstance(like := own.get(name), Tensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
            continue  # a part, an extra state, or what torch refuses
        if value.shape != like.shape:
            raise ValueError(
                f"{name!r} has shape {tuple(value.shape)} in the state dict and {tuple(like.shape)} in the model; load "
                f"the state dict of this model"
            )
        parts[name] = part_of(value, like)
    return parts


def load_parts(module: nn.Module, full: Mapping[str, Any], own: Mapping[str, Any], strict: bool) -> Any:
    """Load a state dict of full tensors into a module whose own state dict has parts; not a collective."""
    with implicit_replication():  # what the module renames reaches the parameter in full: it takes its rows
        return module.load_state_dict(parts_of(full, own), strict)


def dtensor_like(rows: Tensor, param: DTensor, shape: torch.Size) -> Tensor:
    """A DTensor of a full shape and of this rank's rows, which stay where they are, placed as a parameter is."""
    return as_dtensor(rows, DTensorSpec(param.device_mesh, param.placements, contiguous(shape, rows.dtype)))
