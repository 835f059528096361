"""What a rank keeps of a parameter, and of an optimizer's state, and what stands in its place in the plain module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from thunder_zero.plan import Param, Plan

SIMPLE = (bool, int, float, str, type(None))  # what a state may be beside a tensor


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
