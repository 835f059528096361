"""What a rank keeps of a parameter, and what stands in its place in the plain module."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from thunder_zero import layout
from thunder_zero.plan import Param, Plan


def own_rows(full: Tensor, param: Param, plan: Plan) -> Tensor:
    """This rank's rows of a full parameter, padded with zeros: what its shard should hold. All of it, if replicated."""
    if not param.sharded:
        return full
    start, stop = layout.row_range(param.shape[0], plan.world_size, plan.rank)
    shard = full.new_zeros(plan.shard_shape(param))
    shard[: stop - start] = full[start:stop]
    return shard


def real_rows(shard: Tensor, param: Param, plan: Plan) -> Tensor:
    """This rank's rows without the padding behind them, as a view; all of it, if replicated."""
    if not param.sharded:
        return shard
    start, stop = layout.row_range(param.shape[0], plan.world_size, plan.rank)
    return shard[: stop - start]


def kept_of(full: Tensor, param: Param, plan: Plan) -> Tensor:
    """What is there of a full parameter at rest: all of it (ZeRO-1, replicated ones), or this rank's rows."""
    return full if param.resident else own_rows(full, param, plan)


def side_by_side(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors of one dtype that share one memory, one after the other.

    Each is a tensor by itself and no view, with a version of its own: autograd keeps shards for backward, and a
    step of another shard must not seem to have changed them.
    """
    memory = torch.cat([tensor.flatten() for tensor in tensors])
    starts = accumulate((tensor.numel() for tensor in tensors), initial=0)
    return [
        torch.empty(0, dtype=memory.dtype, device=memory.device).set_(
            memory.untyped_storage(), start, tensor.shape, tensor.stride()
        )
        for start, tensor in zip(starts, tensors, strict=False)
    ]


def placeholder(param: nn.Parameter, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter of the same shape that holds one element: NaN, where the dtype has it.

    Thunder traces shapes and dtypes (those of compute) from the plain module; the values are in the shards. Whoever
    reads a placeholder by mistake gets NaN, not stale weights.
    """
    value = float("nan") if param.is_floating_point() or param.is_complex() else 0
    one = torch.full((), value, dtype=dtype, device=device)
    return nn.Parameter(one.expand(param.shape), requires_grad=param.requires_grad)


def set_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a parameter or a buffer in its place in the module tree."""
    parent, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(parent), attribute, tensor)


def is_hollow(param: Tensor) -> bool:
    """Whether a parameter is NaN all over, as a copy of a placeholder is."""
    if not param.is_floating_point() or param.is_meta or param.numel() == 0:
        return False
    first = param.detach()[(0,) * param.ndim]
    return bool(first.isnan()) and bool(param.detach().isnan().all())
