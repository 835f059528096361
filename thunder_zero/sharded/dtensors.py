"""Parameters as DTensors: their placements, their rows in a program, their gradients.

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
    """Return the DTensor spec of each parameter, by path. The dict is empty if parameters are plain tensors.

    Parameters are plain tensors in stage 0 without tensor parallelism. Otherwise, rows are sharded over the last data
    dimension of the mesh, or replicated. Slices are sharded over the mesh dimension of tensor parallelism.
    """
    if not (STAGES[plan.policy.stage].sharded or plan.mesh.is_sliced):
        return {}
    mesh = ranks.mesh or DeviceMesh.from_group(ranks.shard_group, device.type)

    @cache
    def spec(shape: tuple[int, ...], dtype: torch.dtype, sharded: bool, sliced: int | None) -> DTensorSpec:
        # Cached, since each operator call compares specs, which is fast for identical objects.
        row_placements = (_rows_of_slices(sliced, plan.mesh.tensor.size) if sharded else Replicate(),)
        slice_placements = (Replicate() if sliced is None else Shard(sliced),) if plan.mesh.is_sliced else ()
        replica_placements = [Replicate()] * (mesh.ndim - 1 - len(slice_placements))
        placements = (*replica_placements, *row_placements, *slice_placements)
        return DTensorSpec(mesh, placements, contiguous(shape, dtype))

    return {
        param.path: spec(plan.resting(param).shape, param.rest_dtype, param.sharded, param.sliced)
        for param in plan.params
    }


def _rows_of_slices(sliced: int | None, slices: int) -> Placement:
    """Return FSDP2's placement of rows for a parameter that tensor parallelism slices along dimension ``sliced``."""
    return StridedShard(0, split_factor=slices) if sliced == 0 and slices > 1 else Shard(0)


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


def local(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, without an autograd view. Return any other tensor unchanged."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class PassesOn(Protocol):
    """The part of :class:`thunder_zero.sharded.outside.OutsideGradients` that :class:`Rows` needs."""

    def is_hooked(self, path: str) -> bool:
        """Return whether a shard has hooks of the user, on its gradient or on its accumulation."""

    def give(self, path: str, mean: Tensor) -> None:
        """Record that a program passes a mean gradient to autograd."""


class HoldsRows(Protocol):
    """The part of :class:`thunder_zero.sharded.state.LocalState` that :class:`Rows` needs."""

    shards: dict[str, nn.Parameter]
    specs: Mapping[str, DTensorSpec]
    frozen: frozenset[str]
    single_rows: frozenset[str]

    @property
    def outside(self) -> PassesOn:
        """Return the object that knows the hooks on gradients."""

    @property
    def rows(self) -> Mapping[str, Tensor]:
        """Return the rows that programs read, by path."""

    def gradient(self, rows: Tensor, path: str) -> Tensor:
        """Return the gradient of a shard, from the gradient of its rows."""


class Rows(torch.autograd.Function):
    """An autograd function from shards to the rows that a program reads. One call takes all parameters of a program."""

    @staticmethod
    def forward(ctx: Any, state: HoldsRows, paths: Sequence[str], *shards: Tensor) -> tuple[Tensor, ...]:
        """Return the padded rows. A tied parameter may occur twice in ``paths``."""
        ctx.set_materialize_grads(False)  # grads of unused parameters stay None
        ctx.state, ctx.paths = state, paths
        rows = tuple(state.rows[path].detach() for path in paths)
        if state.frozen:
            ctx.mark_non_differentiable(
                *(tensor for tensor, path in zip(rows, paths, strict=True) if path in state.frozen)
            )
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Return gradients of the shards; None for a gradient that is deferred, missing, or already in ``.grad``.

        A gradient is written to ``.grad`` here, as in FSDP2, since autograd would copy it or create another DTensor.
        Then the hooks of ``outside.py`` only get gradients from outside of programs.
        """
        state: HoldsRows = ctx.state
        writes_grads = accumulates(leaf for leaf, _ in ctx.next_functions if leaf)
        shard_grads: list[Tensor | None] = []
        for rows, path in zip(grads, ctx.paths, strict=True):
            grad = None if rows is None else state.gradient(rows, path)
            # Single rows are excluded: autograd may later add to .grad in place, and DTensor would broadcast the row.
            trains = state.shards[path].requires_grad  # it may have been frozen since forward
            writes = trains and writes_grads and path not in state.single_rows and not state.outside.is_hooked(path)
            if grad is not None and writes and _write(grad, state.shards[path]):
                grad = None
            if grad is not None and trains:
                state.outside.give(path, grad)
            shard_grads.append(grad)
        return None, None, *shard_grads


def _write(grad: Tensor, shard: nn.Parameter) -> bool:
    """Set or add to ``.grad``. Return False if autograd must add, since ``.grad`` is placed in another way."""
    held = shard.grad
    if held is None:
        shard.grad = grad
    elif isinstance(held, DTensor) and isinstance(grad, DTensor) and held.placements != grad.placements:
        return False
    else:
        local(held).add_(local(grad))
    return True


def has_hooks(shard: Tensor) -> bool:
    """Return whether a shard has hooks on its gradient, or on its accumulation."""
    return bool(shard._backward_hooks or shard._post_accumulate_grad_hooks)


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
    """Return a DTensor like a parameter, with a copy of this rank's part of a full tensor. This is not a collective.

    Return ``full`` if the parameter is not a DTensor, or ``full`` is a DTensor already. Only this rank's part is copied
    to the parameter's device.
    """
    if not isinstance(param, DTensor) or isinstance(full, DTensor):
        return full
    (chunk,) = param.__create_chunk_list__()
    rows = full.detach()
    for dimension, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
        rows = rows.narrow(dimension, offset, size)
    return dtensor_like(rows.to(local(param).device, copy=True).contiguous(), param, full.shape)


def parts_of(full: Mapping[str, Any], state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the full tensors of a state dict by this rank's parts. ``state_dict`` is the model's state dict.

    Values whose names the model does not have are unchanged.
    """
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
