"""Placeholders: they replace the plain module's parameters, with full shape and one element, NaN."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def placeholder(param: nn.Parameter, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter of the same shape that holds one element: NaN, where the dtype has it.

    Thunder traces shapes and dtypes (those of compute) from the plain module; the values are in the shards. Code that
    reads a placeholder by mistake gets NaN, not stale weights.
    """
    value = float("nan") if param.is_floating_point() or param.is_complex() else 0
    one = torch.full((), value, dtype=dtype, device=device)
    return nn.Parameter(one.expand(param.shape), requires_grad=param.requires_grad)


def is_all_nan(param: Tensor) -> bool:
    """Whether every element is NaN, as in a copy of a placeholder."""
    if not param.is_floating_point() or param.is_meta or param.numel() == 0:
        return False
    first = param.detach()[(0,) * param.ndim]
    return bool(first.isnan()) and bool(param.detach().isnan().all())


def set_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a parameter or a buffer in its place in the module tree."""
    parent, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(parent), attribute, tensor)
