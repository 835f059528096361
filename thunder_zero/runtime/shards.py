"""What a rank keeps of a parameter, and of an optimizer's state, and what stands in its place in the plain module."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from thunder_zero import layout
from thunder_zero.plan import Param, Plan

SIMPLE = (bool, int, float, str, type(None))  # what a state may be beside a tensor


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


def state_is_rows(key: str, value: Any, param: Param, plan: Plan) -> bool:
    """Whether an optimizer's state of a parameter is this rank's rows of it. Otherwise this rank has all of it: one
    number, or whatever it is of a replicated parameter.

    Raises:
        ValueError: of a sharded parameter neither rows nor one number, so that nobody could put it together.
    """
    if not param.sharded or isinstance(value, SIMPLE):
        return False
    if isinstance(value, Tensor):
        if tuple(value.shape) == plan.shard_shape(param):
            return True
        if value.numel() == 1:
            return False
    raise ValueError(
        f"the optimizer's {key!r} of parameter {param.path!r} {_seen(value)}, which is neither one number nor of the "
        f"shard's shape {plan.shard_shape(param)}, so it cannot be put together from ranks; save it on each rank by "
        f"itself, as the optimizer's own state_dict() has it"
    )


def state_is_full(key: str, value: Any, param: Param) -> bool:
    """Whether a state of a parameter in a full state dict is of the parameter's shape, so that its rows are known.
    Otherwise all ranks take all of it: one number, or whatever it is of a replicated parameter.

    Raises:
        ValueError: of a sharded parameter anything else, so that nobody knows what a rank's rows are.
    """
    if isinstance(value, Tensor) and value.ndim > 0 and tuple(value.shape) == param.shape:
        return True
    if not param.sharded or isinstance(value, SIMPLE) or (isinstance(value, Tensor) and value.numel() == 1):
        return False
    raise ValueError(
        f"the optimizer's {key!r} of parameter {param.path!r} {_seen(value)} in the state dict, which is neither one "
        f"number nor of the parameter's shape {param.shape}, so it has no rows that a rank could take; load it where "
        f"the parameter is replicated (stage 0)"
    )


def _seen(value: Any) -> str:
    return f"has shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"is a {type(value).__name__}"


def at_rest_of(full: Tensor, param: Param, plan: Plan) -> Tensor:
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
