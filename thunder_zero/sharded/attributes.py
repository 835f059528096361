"""Keeps the attributes that users set on parameters, such as ``no_weight_decay``."""

from __future__ import annotations

from torch import Tensor, nn

from thunder_zero.compat.torch.tensors import IS_PARAM


def parameter_like(original: Tensor, values: Tensor) -> nn.Parameter:
    """Return a parameter with these values, and with the attributes and ``requires_grad`` of ``original``."""
    return with_attributes_of(nn.Parameter(values, original.requires_grad), original)


def with_attributes_of(param: nn.Parameter, original: Tensor) -> nn.Parameter:
    """Replace a parameter's attributes by the attributes of ``original``. Return the parameter."""
    attributes = vars(param)
    kept = {name: value for name, value in attributes.items() if name == IS_PARAM}
    attributes.clear()
    attributes.update({name: value for name, value in vars(original).items() if name != IS_PARAM}, **kept)
    return param
