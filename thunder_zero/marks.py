"""Keeps the marks of parameters: attributes that users set, such as ``no_weight_decay``."""

from __future__ import annotations

from torch import Tensor, nn

OF_TORCH = "_is_param"  # an attribute by which torch knows a DTensor that is a parameter; no mark


def parameter_like(original: Tensor, values: Tensor) -> nn.Parameter:
    """A parameter of these values, with the marks of another one, which trains if that does."""
    return marked(nn.Parameter(values, original.requires_grad), original)


def marked(param: nn.Parameter, original: Tensor) -> nn.Parameter:
    """The parameter, with the marks that another one has now, and no others."""
    own = vars(param)
    kept = {name: value for name, value in own.items() if name == OF_TORCH}
    own.clear()
    own.update({name: value for name, value in vars(original).items() if name != OF_TORCH}, **kept)
    return param
