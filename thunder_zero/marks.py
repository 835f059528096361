"""Keeps the marks of parameters: attributes that users set, such as ``no_weight_decay``."""

from __future__ import annotations

from torch import Tensor, nn


def parameter_like(original: Tensor, values: Tensor) -> nn.Parameter:
    """A parameter of these values, with the marks of another one, which trains if that does."""
    return marked(nn.Parameter(values, original.requires_grad), original)


def marked(param: nn.Parameter, original: Tensor) -> nn.Parameter:
    """The parameter, with the marks that another one has now, and no others."""
    vars(param).clear()
    vars(param).update(vars(original))
    return param
