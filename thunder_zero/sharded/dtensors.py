"""Parameters at rest as DTensors: how ranks share them, their rows in a program, their gradients.

::

    rank 0 of 2, weight of 3 x 4, stored as 2 x 4          rank 1
    DTensor (3, 4), Shard(0)   local (2, 4)  ----.         DTensor (3, 4), Shard(0)   local (1, 4)
    rows    (2, 4)             the same memory <-'         rows    (2, 4)             the same memory, and padding

The optimizer steps DTensors, whose local tensors end before the padding. Programs read the rows with the padding.
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
    """Return how ranks share each parameter, by path; empty in stage 0 without slices, whose parameters are plain
    tensors.

    The rows of a parameter are sharded over the last data dimension of the mesh, or replicated. Its slices are over the
    dimension for tensor parallelism.
    """
    if not (STAGES[plan.policy.stage].sharded or plan.mesh.is_sliced):
        return {}
    mesh = ranks.mesh or DeviceMesh.from_group(ranks.shard_group, device.type)

    @cache
    def spec(shape: tuple[int, ...], dtype: torch.dtype, sharded: bool, sliced: int | None) -> DTensorSpec:
        # Cached: torch compares specs in each call of an operator, and is fast if they are one object.
        of_rows = (_rows_of_slices(sliced, plan.mesh.tensor.size) if sharded else Replicate(),)
        of_slices = (Replicate() if sliced is None else Shard(sliced),) if plan.mesh.is_sliced else ()
        of_copies = [Replicate()] * (mesh.ndim - 1 - len(of_slices))
        return DTensorSpec(mesh, (*of_copies, *of_rows, *of_slices), contiguous(shape, dtype))

    return {
        param.path: spec(plan.resting(param).shape, param.rest_dtype, param.sharded, param.sliced)
        for param in plan.params
    }


def _rows_of_slices(sliced: int | None, slices: int) -> Placement:
    """Return how the rows of slices are placed: as FSDP2 places them, if slices are rows themselves."""
    return StridedShard(0, split_factor=slices) if sliced == 0 and slices > 1 else Shard(0)


def contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> TensorMeta:
    """Return the shape, strides and dtype of a contiguous full tensor, for a DTensor's spec."""
    return TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), dtype)


def as_dtensor(rows: Tensor, spec: DTensorSpec | None) -> Tensor:
    """Return a DTensor of rows without padding; the rows themselves in stage 0.

    ``DTensor.from_local`` would cost ten times as much in every step. So would ``__init__``, which does nothing: torch
    hides it from dynamo.
    """
    return rows if spec is None else DTensor.__new__(DTensor, rows, spec, requires_grad=False)


def parameter(rows: Tensor, spec: DTensorSpec | None, *, requires_grad: bool) -> nn.Parameter:
    """Return the parameter that the optimizer steps: rows without padding, in the same memory.

    A DTensor's local tensor begins at storage offset 0, since torch neither copies nor saves one with another offset.
    """
    if spec is not None and rows.storage_offset():
        rows = torch.from_dlpack(rows) if rows.numel() else torch.empty_like(rows)
    return nn.Parameter(as_dtensor(rows, spec), requires_grad)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, as it is stored: not a view with a history; any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class HoldsRows(Protocol):
    """The part of :class:`thunder_zero.sharded.state.LocalState` that :class:`Rows` needs."""

    shards: dict[str, nn.Parameter]
    specs: Mapping[str, DTensorSpec]
    frozen: frozenset[str]
    single_rows: frozenset[str]

    @property
    def rows(self) -> Mapping[str, Tensor]:
        """Return the rows that programs read, by path."""

    def gradient(self, rows: Tensor, path: str) -> Tensor:
        """Return the gradient of a shard, from the gradient of its rows."""


class Rows(torch.autograd.Function):
    """The rows of shards, as an autograd function that turns their gradients into gradients of the shards.

    One call serves all parameters of a program.
    """

    @staticmethod
    def forward(ctx: Any, state: HoldsRows, paths: Sequence[str], *shards: Tensor) -> tuple[Tensor, ...]:
        """Return the rows, padded. A tied parameter may be there twice."""
        ctx.set_materialize_grads(False)  # a parameter that nothing reads keeps grad None
        ctx.state, ctx.paths = state, paths
        rows = tuple(state.rows[path].detach() for path in paths)
        if state.frozen:
            ctx.mark_non_differentiable(
                *(tensor for tensor, path in zip(rows, paths, strict=True) if path in state.frozen)
            )
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Return gradients of the shards; None for rows whose gradient is deferred, or that have none.

        A first gradient is put into ``.grad`` here, as in FSDP2: autograd would make one more DTensor of each. A single
        row's gradient is an exception, since autograd may add another one to it in place, such as that of a penalty.
        DTensor would take the one row for a dimension to broadcast.
        """
        state: HoldsRows = ctx.state
        puts = bool(state.specs) and accumulates(leaf for leaf, _ in ctx.next_functions if leaf)
        shard_grads: list[Tensor | None] = []
        for rows, path in zip(grads, ctx.paths, strict=True):
            grad, shard = None if rows is None else state.gradient(rows, path), state.shards[path]
            is_first = grad is not None and shard.grad is None and path not in state.single_rows
            if puts and is_first and not has_hooks(shard):
                shard.grad, grad = grad, None
            shard_grads.append(grad)
        return None, None, *shard_grads


def has_hooks(shard: Tensor) -> bool:
    """Return whether a function is called with the gradient of a shard, or after it is added."""
    return bool(shard._backward_hooks or shard._post_accumulate_grad_hooks)


def require_own(value: Any, param: Any, what: str) -> None:
    """Refuse the rows of another rank, as in a file that one rank wrote and every rank has loaded."""
    if isinstance(value, DTensor) and isinstance(param, DTensor) and value.device_mesh is not param.device_mesh:
        place, other = param.device_mesh.get_coordinate(), value.device_mesh.get_coordinate()
        if value.device_mesh == param.device_mesh and place != other:
            raise ValueError(
                f"{what} has the rows of the rank at {other} of the mesh, and this rank is at {place}: one rank wrote "
                f"its own rows, and others loaded them; save with tz.save on all ranks, or full values "
                f"(tz.full_state_dict)"
            )


def refuse_to_compute(module: nn.Module, args: Any) -> None:
    """Raise if a module with shards is called: it is a copy of a sharded model."""
    if any(isinstance(param, DTensor) for param in module.parameters()):
        raise RuntimeError(
            f"a copy of a sharded {type(module).__name__} has its rows and computes nothing; call the model itself, or "
            f"load thunder_zero.full_state_dict(model) into a plain module (tz.EMA averages in place)"
        )


def part_of(full: Tensor, param: Tensor) -> Tensor:
    """Return a copy of this rank's part of a full tensor of a parameter's shape; not a collective.

    If the parameter has no parts, or ``full`` is a DTensor itself, return ``full``. Only the part is on the parameter's
    device.
    """
    if not isinstance(param, DTensor) or isinstance(full, DTensor):
        return full
    (chunk,) = param.__create_chunk_list__()
    rows = full.detach()
    for dimension, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
        rows = rows.narrow(dimension, offset, size)
    return dtensor_like(rows.to(local(param).device, copy=True).contiguous(), param, full.shape)


def parts_of(full: Mapping[str, Any], state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict of full tensors with this rank's parts in their places; ``state_dict`` is the model's.

    Names that the model does not have stay.
    """
    parts = dict(full)
    for name, value in full.items():
        like = state_dict.get(name)
        require_own(value, like, repr(name))
        if not isinstance(like, Tensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
            continue  # a part, an extra state, or a value that torch refuses
        if value.shape != like.shape:
            raise ValueError(
                f"{name!r} has shape {tuple(value.shape)} in the state dict and {tuple(like.shape)} in the model; load "
                f"the state dict of this model"
            )
        parts[name] = part_of(value, like)
    return parts


def load_parts(module: nn.Module, full: Mapping[str, Any], state_dict: Mapping[str, Any], strict: bool) -> Any:
    """Load a state dict of full tensors into a module whose state dict has parts; not a collective."""
    # A value under an old name, which the module renames, reaches the parameter in full, and DTensor cuts it.
    with implicit_replication():
        return module.load_state_dict(parts_of(full, state_dict), strict)


def dtensor_like(rows: Tensor, param: DTensor, shape: torch.Size) -> Tensor:
    """Return a DTensor of a full shape, placed as a parameter is, over this rank's rows, which are not copied."""
    return as_dtensor(rows, DTensorSpec(param.device_mesh, param.placements, contiguous(shape, rows.dtype)))
